"""Cases and cells: what is measured, stated so that a result can be found again on disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from meha.problems import KnownProblem
from meha.reproduce.contenders import Contender, Setting

__all__ = ["TUNING_SEEDS", "Case", "Cell"]

PROTOCOL = 1
"""Raise it when the meaning of a stored result changes; older results are then measured anew."""

TUNING_SEEDS = (1000, 1001)
"""Settings are chosen on these; what is reported has other seeds."""

SPREAD = 0.1
"""Starts are moved by this share of their distance to the solution."""


@dataclass(frozen=True)
class Case:
    """A problem with a target and limits, the same for all methods.

    Attributes:
        name: for tables.
        build: makes the problem; called as ``build(**arguments)``, with the seed as well if ``data`` is true. For training it
            makes a task (:mod:`meha.tasks`), with seed and device.
        target: the larger of the relative errors of x and y must fall to this and stay there; None where nothing is known. In
            training, the accuracy to reach.
        work: a run may take so many gradients of F and f and Hessian-vector products.
        seconds: and so much time.
        steps: and so many steps; None for any number.
        stay: the target holds when it does so for as much work again as it took, and for at least this much.
        looks: the weights of so many of the steps of a run are judged by solving the lower level; without a target only. In
            training, how often the task is evaluated, evenly over the steps, or over the work where no steps are given.
        data: whether a seed draws the data of the problem; otherwise it moves the start.
        tuned_at: the case on which settings are chosen, by name; this one when empty.
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
    data: bool = False
    tuned_at: str = ""

    def problem(self, seed: int) -> KnownProblem:
        """The problem of a seed: its data, or the start. The first seed is the paper's own start; for others, each coordinate
        is moved by normal noise of a tenth of the root mean square distance to the solution.

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
        kind: "race" to the target, "memory" of some steps, "rates" of the theorems, or "training" on a task.
        label: what tables and figures call the method.
    """

    kind: Literal["race", "memory", "rates", "training"]
    case: Case
    contender: Contender
    setting: Setting = field(hash=False)
    seed: int
    label: str = ""

    @property
    def name(self) -> str:
        """What the page and the display call the method."""
        return self.label or self.contender.name

    @property
    def key(self) -> str:
        """Where the result lies on disk. It depends on all that the result depends on, but for the code of the methods.

        >>> from meha.problems import lasso
        >>> from meha.reproduce.contenders import CONTENDERS
        >>> cell = Cell("race", Case("lasso, n = 2", lasso, (("n", 2),)), CONTENDERS["MEHA"], {"c": 3}, seed=0)
        >>> cell.key.rpartition("-")[0]
        'lasso-n-2/meha-seed-0-race'
        """
        case = replace(self.case, build=None, name="", tuned_at="")  # type: ignore[arg-type]
        told = (PROTOCOL, self.kind, self.case.build.__name__, case, self.contender.kind.__name__, sorted(self.setting.items()))
        digest = hashlib.sha256(repr((*told, self.seed)).encode()).hexdigest()[:10]
        return f"{_slug(self.case.name)}/{_slug(self.name)}-seed-{self.seed}-{self.kind}-{digest}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
