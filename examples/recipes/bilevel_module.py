"""A LightningModule that learns a weight for each training example, or for each group of them, while it trains a network.

Copy this file. The training data have inputs, labels and the number of the weight of each example; the others, which judge,
have inputs and labels::

    batches = meha.loaders.Together(train=train_loader, valid=valid_loader)
    module = BilevelModule(net, torch.zeros(1000))
    lightning.Trainer(max_epochs=20).fit(module, batches)
    print(module.weights())
"""

import lightning
import torch
from torch.nn.functional import cross_entropy

import meha


class BilevelModule(lightning.LightningModule):
    """Trains ``net`` on weighted examples, and the weights so that it does well on the others.

    Args:
        net: the network.
        x: the start of the weights, such as ``torch.zeros(1000)``; the weights are its sigmoid.
        lr: of AdamW for the network. The weights need none.
    """

    def __init__(self, net, x, lr=1e-3):
        super().__init__()
        self.automatic_optimization = False  # a step takes gradients of two levels
        self.net, self.x, self.lr = net, x, lr
        self.problem = meha.Problem(upper=self.upper, lower=self.lower)
        self.run = self.saved = None

    def upper(self, x, y, batch):
        inputs, labels = batch["valid"]
        return cross_entropy(y(inputs), labels)

    def lower(self, x, y, batch):
        inputs, labels, numbers = batch["train"]
        return (x.sigmoid()[numbers] * cross_entropy(y(inputs), labels, reduction="none")).mean()

    def weights(self):
        """The weights now."""
        return self.run.x.sigmoid().detach()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)]

    def on_train_start(self):
        x, steps = self.x.to(self.device), self.trainer.estimated_stepping_batches
        y_optimizer = meha.Optimizer(self.optimizers().optimizer, clip=1.0)
        self.run = meha.start(self.problem, x, self.net, y_optimizer=y_optimizer, max_steps=steps)
        if self.saved is not None:
            self.run.load_state_dict(self.saved["run"])
            if (batches := self._batches()) is not None:
                batches.load_state_dict(self.saved["batches"])
                batches.taken %= len(batches)  # after the last batch of an epoch, Lightning begins the next one
            meha.loaders.set_random_states(self.saved["random"], batches)

    def training_step(self, batch, number):
        # A dict of loaders gives dicts; it does as well, but its position cannot be saved.
        info = self.run.step(batch if isinstance(batch, dict) else batch._asdict())
        if self.run.verdict is not None:  # x or the network is NaN, for instance
            raise RuntimeError(f"{self.run.verdict.status}: {self.run.verdict.message}")
        self.optimizers().step()  # has no gradients any more, and counts the steps of Lightning
        self.lr_schedulers().step()
        self.log_dict({"lower": info["lower"], "upper": info["upper"]}, prog_bar=True)

    def validation_step(self, batch, number):
        inputs, labels = batch
        accuracy = (self.net(inputs).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def _batches(self):
        """The training batches, if their position can be saved, as that of Together; Lightning does it within an epoch only."""
        batches = self.trainer.train_dataloader
        return batches if isinstance(batches, meha.loaders.Together) else None

    def on_save_checkpoint(self, checkpoint):
        if self.run is not None:
            batches = self._batches()
            checkpoint["bilevel"] = {
                "run": self.run.state_dict(),
                "batches": None if batches is None else batches.state_dict(),
                "random": meha.loaders.random_states(batches),
            }

    def on_load_checkpoint(self, checkpoint):
        self.saved = checkpoint.get("bilevel")
