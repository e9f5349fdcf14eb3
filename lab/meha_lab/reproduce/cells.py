"""Cases, cells and records: what is measured, stated so that a record can be found again on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from meha.method.status import Status, Verdict
from meha.problems import KnownProblem
from meha_lab.reproduce.contenders import Contender, Setting
from meha_lab.store import Record

__all__ = ["OWN_ENDS", "TUNING_SEEDS", "Case", "Cell", "Kind", "Record", "ended"]


Kind = Literal["race", "memory", "rates", "training", "solve", "starts", "architecture", "task"]

FIELDS: dict[Kind, set[str]] = {
    "race": {"reached", "last", "curve", "at weights"},
    "memory": {"peak", "size"},
    "rates": {"curve"},
    "training": {"reached", "last", "curve"},
    "solve": {"error", "gradients", "steps", "seconds"},
    "starts": {"ends"},
    "architecture": {"search", "curve", "genotype", "final"},
    "task": {"returned", "fresh", "references", "curve"},
}
"""The fields that a record of each kind must have, besides the common ones."""

COMMON = {"case", "method", "setting", "seed", "outcome", "took", "machine", "torch", "jobs"}

REACHED = {"step", "seconds", "work", "gradients"}

PROTOCOL = 2
"""Raise it when the meaning of a record changes; older records are then ignored."""

TUNING_SEEDS = (1000, 1001)
"""Seeds on which settings are chosen; the reported runs have others."""

OWN_ENDS = tuple(status.value for status in (Status.CONVERGED, Status.LOCAL, Status.FINISHED, Status.RULE_MET))
"""Outcomes of runs that a method ended by itself, with nothing left to do; AdaptiveMEHA has a rule, and claims nothing."""

SPREAD = 0.1
"""Starts are moved by this share of their distance to the solution."""


@dataclass(frozen=True)
class Case:
    """A problem with a target and limits, the same for all methods.

    Attributes:
        name: its name in tables.
        build: makes the problem; called as ``build(**arguments)``, with the seed as well if ``data`` is true. For training it
            makes a task (:mod:`meha.tasks`), with seed and device.
        target: upper bound on the larger of the relative errors of x and y, to be reached for good; None where the solution
            is not known. In training, the accuracy to reach.
        work: upper bound on gradients of F and f and Hessian-vector products together.
        seconds: upper bound on the time.
        steps: upper bound on the number of steps; None for no bound.
        stay: the target is reached for good when the errors stay below it for as much work again, and for at least this much.
        looks: number of steps whose x is judged by solving the lower level; without a target only. With none, the record has
            the last numbers only, with those of theta beside those of y. In training, number of
            evaluations, spread evenly over the steps, or over the work where no steps are given.
        rest: the run also ends when a step changes x by at most this share; without a target only. None for no such end.
        data: whether a seed draws the data of the problem; otherwise it moves the start.
        tuned_at: name of the case on which settings are chosen; this one when empty.
        tuning_seeds: seeds on which settings are chosen.
    """

    name: str
    build: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...] = ()
    target: float | None = None
    work: int = 20_000
    seconds: float = 60.0
    steps: int | None = None
    stay: int = 1000
    looks: int = 10
    rest: float | None = None
    data: bool = False
    tuned_at: str = ""
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS

    def problem(self, seed: int) -> KnownProblem:
        """The problem with the data, or the start, of a seed. Seed 0 is the paper's start; for others, normal noise moves each
        coordinate by a tenth of the root mean square distance to the solution.

        >>> from meha.problems import strong_convex
        >>> case = Case("strong convex", strong_convex, (("n", 2),))
        >>> case.problem(0).x0, case.problem(1).x0
        (tensor([2., 2.], dtype=torch.float64), tensor([2.0992, 2.0400], dtype=torch.float64))
        """
        arguments = dict(self.arguments)
        if self.data:
            return self.build(**arguments, seed=seed)
        problem = self.build(**arguments)
        if seed == 0:
            return problem
        generator = torch.Generator().manual_seed(seed)
        moved = {}
        for name in ("x", "y"):
            start, solution = getattr(problem, f"{name}0"), getattr(problem, f"{name}_star")
            noise = torch.randn(start.shape, generator=generator, dtype=start.dtype)
            moved[f"{name}0"] = start + SPREAD * (start - solution).square().mean().sqrt() * noise
        if problem.x_set is not None:
            moved["x0"] = problem.x_set.project(moved["x0"])
        return replace(problem, **moved)


@dataclass(frozen=True)
class Cell:
    """One measurement: a method with a setting on a case, for a seed.

    Attributes:
        kind: "race" to the target, "memory" of some steps, "rates" of the theorems, "training" on a task, "solve", one call
            of :func:`meha.solve`, "starts", one from each of some starts, "architecture", a search and the training of what it
            found, or "task", a run on a learning task that is judged by test data.
        label: the name in tables and figures; that of the contender when empty.
    """

    kind: Kind
    case: Case
    contender: Contender
    setting: Setting = field(hash=False)
    seed: int
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the method on the page and the display."""
        return self.label or self.contender.name

    @property
    def key(self) -> str:
        """Where the record lies on disk: a digest of everything that the result depends on, except the code of the methods.

        >>> from meha.problems import lasso
        >>> from meha_lab.reproduce.contenders import CONTENDERS
        >>> cell = Cell("race", Case("lasso, n = 2", lasso, (("n", 2),)), CONTENDERS["MEHA"], {"c": 3}, seed=0)
        >>> len(cell.key), cell.key == replace(cell, seed=1).key
        (12, False)
        """
        case, numbers = self.case, sorted(self.setting.items())
        limits = (case.target, case.work, case.seconds, case.steps, case.stay, case.looks, case.data)
        rest = () if case.rest is None else (case.rest,)
        problem = (case.name, case.build.__name__, case.arguments, (*limits, *rest))
        content = (PROTOCOL, self.kind, problem, self.contender.name, self.name, numbers, self.seed)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:12]

    def accepts(self, record: Record) -> bool:
        """Whether a record has the fields of this cell."""
        if not COMMON | FIELDS[self.kind] <= set(record) or record["seed"] != self.seed:
            return False
        reached = record.get("reached")
        return reached is None or (isinstance(reached, dict) and set(reached) >= REACHED)


def ended(verdict: Verdict) -> str:
    """The outcome of a run that is over: its status, with the reason of a breakdown.

    >>> ended(Verdict(Status.RULE_MET, "small steps")), ended(Verdict(Status.BROKE_DOWN, "singular matrix"))
    ('rule met', 'broke down: singular matrix')
    """
    return f"{verdict.status}: {verdict.message}" if verdict.status is Status.BROKE_DOWN else str(verdict.status)
