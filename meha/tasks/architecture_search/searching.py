"""A search in stages, with any bilevel method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from meha._checkpoints import Checkpoint
from meha._oracle import Counts, Oracle
from meha._running import At, Numbers
from meha._solving import solve
from meha._variables import Variable
from meha.methods import Method, State
from meha.methods._moves import move
from meha.methods._optimizers import Optimizer, OptimizerFactory, RunningOptimizer, build_optimizer
from meha.observers import Recorder
from meha.tasks.architecture_search.genotype import Genotype
from meha.tasks.architecture_search.networks import FinalNetwork
from meha.tasks.architecture_search.task import ArchitectureSearch, FinalTraining, entropy

__all__ = ["RATE", "SGD", "Found", "LowerDescent", "Stage", "Trained", "search", "train_final"]

RATE = 0.025
"""Learning rate of the weights at the start, as in DARTS."""

SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 3e-4, "clip": 5.0}
"""How DARTS trains weights, in a search and afterwards."""

HISTORY = 200
"""Number of steps whose numbers are kept."""


@dataclass
class LowerDescentState(State):
    """x, which stays, y and its optimizer."""

    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class LowerDescent(Method):
    """Train y alone on the lower level: the steps before x moves, and the training of a final network.

    Args:
        y_optimizer: takes the steps of y.
    """

    y_optimizer: OptimizerFactory

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> LowerDescentState:
        return LowerDescentState(x, y, build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem))

    def step(self, oracle: Oracle, state: LowerDescentState, at: At) -> Numbers:
        x, y = state.x, state.y
        (lower,), slope = oracle.gradient(y, [(1.0, oracle.lower, x, y)], at.batch)
        move(y, slope, 0.0, oracle.prox, x.value, state.y_optimizer)
        return {"lower": lower}


@dataclass(frozen=True)
class Stage:
    """A part of a search.

    Attributes:
        steps: of the bilevel method.
        warm_up: steps of y alone before them.
        cells: of the super-network; those of the task by default.
        operations: number that each edge keeps after this stage; all by default.
        skip_dropout: rate at which skip connections are dropped at the start of the stage; it falls to 0.
    """

    steps: int
    warm_up: int = 0
    cells: int | None = None
    operations: int | None = None
    skip_dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found.

    Attributes:
        task: that of the last stage.
        x, y: its architecture parameters and super-network.
        genotype: the derived cells.
        history: numbers of the steps of the bilevel method in all stages; "entropy" is that of x.
        counts: gradients and Hessian-vector products of all stages.
        seconds: time of the steps.
    """

    task: ArchitectureSearch
    x: dict[str, Tensor]
    y: Any
    genotype: Genotype
    history: dict[str, list[float]]
    counts: Counts
    seconds: float


def search(
    task: ArchitectureSearch,
    method: Callable[[int], Method],
    stages: Sequence[Stage],
    *,
    warm_up: OptimizerFactory | None = None,
    folder: str | Path | None = None,
    every: int = 100,
    compile: bool = False,
    callbacks: Sequence[Any] = (),
) -> Found:
    """Search for an architecture.

    A search of DARTS has one stage. P-DARTS has three, each with a new and deeper super-network on the operations that are left;
    PC-DARTS has one, with a warm-up and a task with partial channels. All of them take any bilevel method.

    Args:
        task: the task of the first stage.
        method: makes the method of a stage from its number of steps, for schedules.
        stages: the stages, in their order.
        warm_up: the optimizer of y before x moves; SGD with the numbers of DARTS by default.
        folder: keeps checkpoints. If the process is killed, repeat the call: it goes on from the last one.
        every: number of steps between checkpoints.
        compile: see :func:`meha.solve`.
        callbacks: observers of the bilevel steps.
    """
    if not stages:
        raise ValueError("stages: is empty; give at least one Stage(steps).")
    history: dict[str, list[float]] = {}
    counts, seconds = Counts(), 0.0
    for i, stage in enumerate(stages):
        task = replace(
            task, cells=stage.cells or task.cells, skip_dropout=stage.skip_dropout, steps=stage.warm_up + stage.steps
        )
        x0, y = task.start()
        x: Any = x0
        batches = task.batches()
        if stage.warm_up:
            first = LowerDescent(y_optimizer=warm_up or Optimizer(torch.optim.SGD, lr=RATE, **SGD))
            warmed = solve(
                task.problem, x, y, first, max_steps=stage.warm_up, **_options(batches, folder, f"warm-up-{i}", every, compile)
            )
            counts.add(warmed.counts, 1)
            seconds += warmed.seconds
        recorder = Recorder(every=max(1, stage.steps // HISTORY))
        options = _options(batches, folder, f"stage-{i}", every, compile)
        found = solve(
            task.problem,
            x,
            y,
            method(stage.steps),
            max_steps=stage.steps,
            callbacks=[_entropy, *callbacks, recorder],
            **options,
        )
        x, y = found.x, found.y
        counts.add(found.counts, 1)
        seconds += found.seconds
        for name, values in found.history.items():
            history.setdefault(name, []).extend(values)
        genotype = task.genotype(x)
        if stage.operations is not None and i + 1 < len(stages):
            task = replace(task, kept=task.pruned(x, stage.operations))
    return Found(task, x, y, genotype, history, counts, seconds)


@dataclass(frozen=True, eq=False)
class Trained:
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
) -> Trained:
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
    options = _options(task.batches(), folder, "final", every, compile)
    found = solve(task.problem, x, y, method, max_steps=task.steps, callbacks=[*callbacks, recorder], **options)
    return Trained(found.y, task.evaluate(x, found.y), found.y.parameter_count, dict(found.history), found.seconds)


def _entropy(run: Any, info: Any) -> dict[str, float]:
    return {"entropy": entropy(run.x)}


def _options(batches: Any, folder: str | Path | None, name: str, every: int, compile: bool) -> dict[str, Any]:
    file = None if folder is None else Checkpoint(Path(folder) / f"{name}.pt", every)
    return {"tol": None, "batches": batches, "checkpoint": file, "compile": compile}
