"""A Trainer of transformers that learns a weight for each domain, or for each example, while it trains the model.

Copy this file. Give the training data a column of whole numbers from 0, the domain of each example, and some data as you want
the model to be good at::

    trainer = BilevelTrainer(model, args, train_dataset=sources, eval_dataset=target, x=torch.zeros(4))
    trainer.train()
    print(trainer.weights())

The lower level trains the model on the weighted losses of ``train_dataset``, with the optimizer, the schedule and the clipping
of the Trainer; the upper level is the loss on ``eval_dataset``. For TRL, put the same class before another Trainer::

    class BilevelSFTTrainer(Bilevel, SFTTrainer): ...
"""

import os

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

import meha


def losses(model, batch):
    """The mean loss of the tokens of each example."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=-100, reduction="none")
    return each.sum(1) / (labels != -100).sum(1).clamp(min=1)


def shares(x):
    """All weights: positive, with mean 1."""
    return len(x) * x.softmax(0)


class Gradients(torch.optim.Optimizer):
    """Takes no step, but keeps the gradients, for an optimizer that belongs to somebody else."""

    def __init__(self, tensors):
        super().__init__(tensors, {"lr": 1.0})

    def step(self, closure=None):
        self.kept = [(p, p.grad) for group in self.param_groups for p in group["params"]]

    def hand_over(self):
        for p, gradient in self.kept:
            p.grad = gradient


class WithColumn:
    """A collator that keeps a column of whole numbers, which others drop."""

    def __init__(self, collator, column):
        self.collator, self.column = collator, column

    def __call__(self, examples):
        batch = self.collator([{key: value for key, value in row.items() if key != self.column} for row in examples])
        if self.column in examples[0]:
            batch[self.column] = torch.tensor([row[self.column] for row in examples])
        return batch


class Bilevel:
    """Turns the steps of a Trainer into steps of a bilevel run.

    Args:
        x: the start of the weights, such as ``torch.zeros(4)`` for four domains.
        column: the column of ``train_dataset`` with the domain of each example, or with its own number.
        x_optimizer: takes the steps of x, see ``meha.start``; nothing need be chosen.
        arguments: for the Trainer. ``eval_dataset`` has a length; of several, the one named "valid" is that of the upper level.
    """

    def __init__(self, *arguments, x, column="domain", x_optimizer=None, **named):
        super().__init__(*arguments, **named)
        if self.args.fp16:
            raise ValueError("fp16: its scaling of the loss would be undone twice; use bf16=True.")
        self.x, self.column, self.x_optimizer = x, column, x_optimizer
        self.data_collator = WithColumn(self.data_collator, column)
        self.problem = meha.Problem(upper=self.upper, lower=self.lower)
        self.run = self.saved = None
        self.parts = []

    def upper(self, x, y, batch):
        return losses(y, batch["valid"]).mean()

    def lower(self, x, y, batch):
        return (shares(x)[batch["train"][self.column]] * losses(y, batch["train"])).mean()

    def weights(self):
        """The weights now."""
        return shares(self.run.x).detach()

    def train(self, *arguments, **named):
        self.run = self.saved = None
        return super().train(*arguments, **named)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.column not in inputs:
            reason = f"has no column {self.column!r}, or loses it, as by packing=True, which joins examples"
            raise ValueError(f"train_dataset: {reason}; give it one with the number of a weight for each example.")
        model.train()
        if self.run is None:
            self._start(model)
        inputs = self._prepare_inputs(inputs)
        self.parts.append({"train": inputs, "valid": self._prepare_inputs(self._draw(len(inputs[self.column])))})
        if not self.accelerator.sync_gradients:  # a part of a step, with gradient_accumulation_steps
            return torch.zeros((), device=self.args.device)
        self.info, self.parts = self.run.step(meha.MicroBatches(self.parts)), []
        if self.run.verdict is not None:  # x or the model is NaN, for instance; the Trainer would go on
            raise RuntimeError(f"{self.run.verdict.status}: {self.run.verdict.message}")
        self.gradients.hand_over()  # the Trainer clips them, and takes the step of y
        return torch.tensor(self.info["lower"], device=self.args.device)

    def _start(self, model):
        together = {}
        if self.args.world_size > 1:  # the run averages the gradients of both levels, and DistributedDataParallel none
            model, together = self.accelerator.unwrap_model(model), {"group": torch.distributed.group.WORLD}
        self.gradients = Gradients([p for p in model.parameters() if p.requires_grad])
        optimizers = {"x_optimizer": self.x_optimizer, "y_optimizer": self.gradients}
        x, steps = self.x.to(self.args.device), self.state.max_steps
        self.run = meha.start(self.problem, x, model, max_steps=steps, **optimizers, **together)
        if self.saved is not None:
            self.saved["state"]["y"] = self.run.state_dict()["state"]["y"]  # the Trainer has loaded the model
            self.run.load_state_dict(self.saved)
        data = self.eval_dataset["valid"] if isinstance(self.eval_dataset, dict) else self.eval_dataset
        self.valid = self._remove_unused_columns(data) if hasattr(data, "column_names") else data

    def _draw(self, size):
        """Examples of the upper level; the step decides which, so that a run that goes on needs no state of theirs."""
        place = [self.args.seed, self.state.global_step, len(self.parts), self.args.process_index]
        chosen = np.random.default_rng(place).integers(len(self.valid), size=size)
        return self.data_collator([self.valid[i] for i in chosen.tolist()])

    def compute_loss(self, model, inputs, *arguments, **named):
        inputs = {key: value for key, value in inputs.items() if key != self.column}  # which the model does not know
        return super().compute_loss(model, inputs, *arguments, **named)

    def log(self, logs, *arguments, **named):
        if self.run is not None and "loss" in logs:
            logs["upper"] = self.info["upper"]
            if len(self.x) <= 20:
                logs |= {f"weight_{i}": weight for i, weight in enumerate(self.weights().tolist())}
        super().log(logs, *arguments, **named)

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if self.column not in self._signature_columns:  # otherwise the Trainer drops the column
            self._signature_columns.append(self.column)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = self.run.state_dict()
            del state["state"]["y"]  # the Trainer has saved the model
            torch.save(state, os.path.join(output_dir, "bilevel.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.saved = torch.load(os.path.join(checkpoint, "bilevel.pt"), weights_only=True)


class BilevelTrainer(Bilevel, Trainer):
    """A Trainer that learns weights of domains or of examples."""
