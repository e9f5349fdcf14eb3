"""Train network weights only: during the warm-up of a search, and for the final network of a genotype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from meha.method.method import At, Numbers
from meha.method.optimizers import Optimizer, OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods import Method, State
from meha.methods.frames import move
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.running.checkpoints import Checkpoint
from meha.running.observers import Recorder
from meha.running.solve import solve, uninterrupted
from meha.tensors.checks import check_count, check_positive
from meha.tensors.variables import Variable
from meha_lab.tasks.architecture_search.data import (
    JUDGED,
    Batches,
    Pictures,
    Scaling,
    chunks,
    crop_and_flip,
    cut_out,
    precision,
)
from meha_lab.tasks.architecture_search.genotype import Genotype, SearchSpace
from meha_lab.tasks.architecture_search.networks import FinalNetwork
from meha_lab.tasks.architecture_search.operations import Style

__all__ = [
    "HISTORY",
    "RATE",
    "SGD",
    "FinalBatch",
    "FinalTraining",
    "LowerDescent",
    "TrainedNetwork",
    "in_folder",
    "train_final",
]


AUXILIARY = 0.4
"""Weight of the auxiliary head in the loss of the final network, as in DARTS."""

RATE = 0.025
"""Learning rate of the weights at the start, as in DARTS."""

SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 3e-4, "clip": 5.0}
"""Options of SGD for the weights in DARTS, both in a search and in the final training."""

HISTORY = 200
"""Number of steps that are recorded."""


@dataclass
class LowerDescentState(State):
    """The state of LowerDescent: x, which stays fixed, y and its optimizer."""

    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class LowerDescent(Method):
    """Train y on the lower level with x fixed: the warm-up of a search, or the training of a final network.

    Args:
        y_optimizer: takes the steps of y.
    """

    y_optimizer: OptimizerFactory

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> LowerDescentState:
        return LowerDescentState(x, y, build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem))

    def step(self, oracle: Oracle, state: LowerDescentState, at: At) -> Numbers:
        x, y = state.x, state.y
        (lower,), slope = oracle.gradient(y, [(1.0, oracle.lower, x, y)], at.batch)
        move(y, slope, 0.0, oracle.prox, x.value, state.y_optimizer)  # 0.0: the optimizer has its own step size
        return {"lower": lower}


class FinalBatch(NamedTuple):
    """Scaled images, their labels, and the factors of drop path (N, cells, edges)."""

    images: Tensor
    labels: Tensor
    masks: Tensor


@dataclass(frozen=True, eq=False)
class FinalTraining:
    """Training of the final network y of a genotype, as a task that uses the lower level only.

    Attributes:
        genotype: the cells.
        train, test: the images.
        classes, space, channels, cells, batch, activation, half, seed: as in :class:`ArchitectureSearch`.
        epochs: passes over the images.
        drop_path: rate at which edges are dropped for an example; it grows from 0 to this one.
        cutout: whether a square of each image is erased.
        auxiliary: whether there is an auxiliary head.
    """

    genotype: Genotype
    train: Pictures
    test: Pictures
    classes: int = 10
    space: SearchSpace = field(default_factory=SearchSpace)
    channels: int = 36
    cells: int = 8
    batch: int = 96
    epochs: float = 600
    activation: Literal["relu", "swish"] = "relu"
    drop_path: float = 0.2
    cutout: bool = True
    auxiliary: bool = True
    half: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("channels", "cells", "batch"):
            check_count(name, getattr(self, name))
        check_positive("epochs", self.epochs)
        Style(self.activation)
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path: must be at least 0 and below 1, got {self.drop_path}.")

    @property
    def steps(self) -> int:
        """Return the number of batches in all epochs."""
        return max(1, round(self.epochs * (len(self.train.labels) // self.batch)))

    @cached_property
    def scaling(self) -> Scaling:
        """Return the scaling of the images."""
        return Scaling.of(self.train.images)

    @property
    def problem(self) -> Problem:
        """Return a problem with the loss as both levels; :class:`LowerDescent` uses the lower one."""
        return Problem(upper=self._loss, lower=self._loss)

    def _loss(self, x: Tensor, y: FinalNetwork, batch: FinalBatch) -> Tensor:
        with precision(self.train.images.device, self.half):
            scores, extra = y.scores(batch.images, batch.masks)
        loss = cross_entropy(scores.float(), batch.labels)
        return loss if extra is None else loss + AUXILIARY * cross_entropy(extra.float(), batch.labels)

    def start(self) -> tuple[Tensor, FinalNetwork]:
        """Return x, which is not used, and a new network."""
        device = self.train.images.device
        with torch.random.fork_rng(devices=[]):  # restores the random state of the caller
            torch.manual_seed(self.seed)
            network = FinalNetwork(
                self.genotype,
                self.space,
                inputs=self.train.images.shape[1],
                classes=self.classes,
                channels=self.channels,
                cells=self.cells,
                activation=self.activation,
                auxiliary=self.auxiliary,
            )
        return torch.zeros(1, device=device), network.to(device)

    def batches(self) -> Batches:
        """Return endless batches of cropped, flipped and cut images with factors of drop path."""
        edges = len(self.genotype.normal)  # the same in both cells

        def make(drawn: list[Pictures], count: int, generator: torch.Generator) -> FinalBatch:
            images = self.scaling(crop_and_flip(drawn[0].images, generator))
            if self.cutout:
                images = cut_out(images, generator)
            rate = self.drop_path * min(count / self.steps, 1.0)  # grows linearly, as in DARTS
            noise = torch.rand(self.batch, self.cells, edges, generator=generator, device=images.device)
            return FinalBatch(images, drawn[0].labels, (noise >= rate).float() / (1 - rate))  # / (1 - rate): the mean is kept

        return Batches([self.train], self.batch, make, self.seed)

    @torch.no_grad()
    def evaluate(self, x: Any, y: FinalNetwork) -> dict[str, float]:
        """Return the accuracy on training images (10,000 at most) and on all test images, with running statistics."""
        training = y.training
        y.eval()
        try:
            judged = {"train accuracy": (self.train, JUDGED), "accuracy": (self.test, len(self.test.labels))}
            return {name: self._accuracy(y, *pictures) for name, pictures in judged.items()}
        finally:
            y.train(training)

    def _accuracy(self, y: FinalNetwork, pictures: Pictures, most: int) -> float:
        right = torch.zeros((), device=pictures.images.device)  # summed on the device: no wait for each chunk
        for images, labels in chunks(pictures, self.scaling, most):
            with precision(self.train.images.device, self.half):
                right = right + (y(images).argmax(dim=1) == labels).sum()
        return float(right) / min(len(pictures.labels), most)


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A final network after its training.

    Attributes:
        network: the network.
        scores: its accuracy on the training and the test images.
        parameters: number of its parameters, without the auxiliary head.
        history: numbers of the steps.
        seconds: time of the steps.
    """

    network: FinalNetwork
    scores: dict[str, float]
    parameters: int
    history: dict[str, list[float]]
    seconds: float


def train_final(
    task: FinalTraining,
    *,
    lr: float = 0.025,
    folder: str | Path | None = None,
    every: int = 1000,
    compile: bool = False,
    callbacks: Sequence[Any] = (),
) -> TrainedNetwork:
    """Train the final network of a genotype from scratch: SGD with momentum, and a rate that falls to 0 along a cosine.

    Args:
        task: the network and its images.
        lr: the learning rate at the start.
        folder, every, compile, callbacks: see :func:`search`.
    """
    x, y = task.start()
    schedule = partial(CosineAnnealingLR, T_max=task.steps)
    method = LowerDescent(y_optimizer=Optimizer(torch.optim.SGD, lr=lr, **SGD, scheduler=schedule))
    recorder = Recorder(every=max(1, task.steps // HISTORY))
    options = in_folder(task.batches(), folder, "final", every, compile)
    found = solve(task.problem, x, y, method, max_steps=task.steps, callbacks=[*callbacks, recorder], **options)
    uninterrupted(found)
    return TrainedNetwork(found.y, task.evaluate(x, found.y), found.y.parameter_count, dict(found.history), found.seconds)


def in_folder(batches: Any, folder: str | Path | None, name: str, every: int, compile: bool) -> dict[str, Any]:
    """Return options of :func:`meha.solve` for a run with checkpoints in a folder, which ends after max_steps."""
    file = None if folder is None else Checkpoint(Path(folder) / f"{name}.pt", every)
    return {"tol": None, "batches": batches, "checkpoint": file, "compile": compile}  # tol: residuals of batches do not vanish
