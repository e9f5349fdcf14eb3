"""The task of :mod:`weighing` in Betty: two problems in an engine, which counts the steps and calls for the validation.

Betty saves a problem's module, optimizer and scheduler. The places of its loaders are its own, and begin again.
"""

import copy
import logging
from importlib.metadata import version

import torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem
from torch.optim.lr_scheduler import CosineAnnealingLR
from weighing import EPOCHS, RATE, answers, clean_loss, weighted_loss


# begin
class Outer(ImplicitProblem):
    def training_step(self, batch):
        return clean_loss(self.inner.module, batch)


class Inner(ImplicitProblem):
    def training_step(self, batch):
        return weighted_loss(self.outer.module, self.module, batch)


class Validated(Engine):
    def validation(self):
        score = self.task.accuracy(self.inner.module)
        if score > self.best:
            self.best, self.kept = score, copy.deepcopy(self.inner.module.state_dict())
        self.epoch += 1
        problems = {"inner": self.inner.state_dict(), "outer": self.outer.state_dict(), "random": torch.get_rng_state()}
        torch.save({**problems, "epoch": self.epoch, "best": self.best, "kept": self.kept}, self.task.file)
        self.task.ended(self.epoch - 1)


def train(task, numbers):
    net, weigher = task.networks()
    train, clean = task.loaders()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    x_optimizer = torch.optim.Adam(weigher.parameters(), lr=numbers["lr"])
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    outer = Outer(
        name="outer",
        config=Config(retain_graph=True),
        module=weigher,
        optimizer=x_optimizer,
        train_data_loader=clean,
    )
    inner = Inner(
        name="inner",
        config=Config(),
        module=net,
        optimizer=optimizer,
        scheduler=scheduler,
        train_data_loader=train,
    )
    state = torch.load(task.file, weights_only=True) if task.file.exists() else None
    first = 0 if state is None else state["epoch"]
    engine = Validated(
        problems=[outer, inner],
        config=EngineConfig(train_iters=(EPOCHS - first) * len(train), valid_step=len(train)),
        dependencies={"u2l": {outer: [inner]}, "l2u": {inner: [outer]}},
    )
    engine.task, engine.epoch, engine.best, engine.kept = task, first, -1.0, None
    if state is not None:
        engine.best, engine.kept = state["best"], state["kept"]
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])
        torch.set_rng_state(state["random"])
    engine.run()
    return engine.kept


# end

if __name__ == "__main__":
    logging.disable()
    answers(train, **{"betty-ml": version("betty-ml")})
