"""Search for an architecture in stages, with any bilevel method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meha.method.optimizers import Optimizer, OptimizerFactory
from meha.method.status import Status
from meha.methods import Method
from meha.problem.oracle import Counts
from meha.running.loop import forget_trained
from meha.running.observers import Recorder
from meha.running.solve import solve, uninterrupted
from meha.tensors.checks import check_count
from meha_lab.tasks.architecture_search.genotype import Genotype
from meha_lab.tasks.architecture_search.task import ArchitectureSearch, entropy
from meha_lab.tasks.architecture_search.training import HISTORY, RATE, SGD, LowerDescent, in_folder

__all__ = ["Found", "Stage", "search"]


@dataclass(frozen=True)
class Stage:
    """One stage of a search.

    Attributes:
        steps: number of steps of the bilevel method.
        warm_up: number of steps of y before them, with x fixed.
        cells: number of cells of the super-network; that of the task by default.
        operations: number of operations that each edge keeps after this stage; all by default.
        skip_dropout: rate at which skip connections are dropped at the start of the stage; it falls to 0.
    """

    steps: int
    warm_up: int = 0
    cells: int | None = None
    operations: int | None = None
    skip_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if self.warm_up != 0:
            check_count("warm_up", self.warm_up)
        for name in ("cells", "operations"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not 0 <= self.skip_dropout < 1:
            raise ValueError(f"skip_dropout: must be at least 0 and below 1, got {self.skip_dropout}.")


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a search.

    Attributes:
        task: the task of the last stage.
        x, y: the architecture parameters and the super-network of the last stage.
        genotype: the derived cells.
        history: recorded numbers of the bilevel steps of all stages; "entropy" is that of x.
        counts: numbers of gradients and Hessian-vector products in all stages.
        seconds: time of the steps.
        outcome: how the search ended, such as "max steps"; the failure of a stage, if one failed.
    """

    task: ArchitectureSearch
    x: dict[str, Tensor]
    y: Any
    genotype: Genotype
    history: dict[str, list[float]]
    counts: Counts
    seconds: float
    outcome: str


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

    DARTS has one stage. P-DARTS has three, each with a new and deeper super-network on the remaining operations; PC-DARTS has
    one, with a warm-up and a task with partial channels. Each accepts any bilevel method.

    Args:
        task: the task of the first stage.
        method: returns the method of a stage, given its number of steps (for schedules).
        stages: the stages in order.
        warm_up: the optimizer of y during the warm-up; SGD with the options of DARTS by default.
        folder: the folder of checkpoints. If the process is killed, repeat the call: it resumes from the last one.
        every: number of steps between checkpoints.
        compile: see :func:`meha.solve`.
        callbacks: observers of the bilevel steps.
    """
    if not stages:
        raise ValueError("stages: is empty; give at least one Stage(steps).")
    history: dict[str, list[float]] = {}
    counts, seconds, outcome = Counts(), 0.0, Status.MAX_STEPS
    for i, stage in enumerate(stages):
        task = replace(
            task, cells=stage.cells or task.cells, skip_dropout=stage.skip_dropout, steps=stage.warm_up + stage.steps
        )
        x0, y = task.start()  # every stage trains a new super-network, as P-DARTS does
        x: Any = x0
        batches = task.batches()
        if stage.warm_up:
            first = LowerDescent(y_optimizer=warm_up or Optimizer(torch.optim.SGD, lr=RATE, **SGD))
            warmed = solve(
                task.problem, x, y, first, max_steps=stage.warm_up, **in_folder(batches, folder, f"warm-up-{i}", every, compile)
            )
            forget_trained(uninterrupted(warmed).y)  # else the next run would warn that y is already trained
            counts.add(warmed.counts, 1)
            seconds += warmed.seconds
        recorder = Recorder(every=max(1, stage.steps // HISTORY))
        options = in_folder(batches, folder, f"stage-{i}", every, compile)
        found = solve(
            task.problem,
            x,
            y,
            method(stage.steps),
            max_steps=stage.steps,
            callbacks=[_entropy, *callbacks, recorder],
            **options,
        )
        x, y = uninterrupted(found).x, found.y
        outcome = found.status if outcome in (Status.MAX_STEPS, Status.FINISHED) else outcome  # the first failure is reported
        counts.add(found.counts, 1)
        seconds += found.seconds
        for name, values in found.history.items():
            history.setdefault(name, []).extend(values)
        genotype = task.genotype(x)
        if stage.operations is not None and i + 1 < len(stages):
            task = replace(task, kept=task.pruned(x, stage.operations))
    return Found(task, x, y, genotype, history, counts, seconds, str(outcome))


def _entropy(run: Any, info: Any) -> dict[str, float]:
    """Record the entropy of x, which falls as a search decides."""
    return {"entropy": entropy(run.x)}
