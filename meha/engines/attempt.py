"""The starts and results of the attempts of a run."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from torch import Tensor

from meha.lower.multistart import Evidence
from meha.method.status import Status, Verdict


class EngineKind(enum.Enum):
    """The engine that made an attempt; the value is the name of its method, which users see."""

    IMPLICIT_NEWTON = "ImplicitNewton"
    PENALTY_CONTINUATION = "PenaltyContinuation"


class Start(NamedTuple):
    """The start of a pass: its name, the first c, x, y, and lower solutions in other basins that the pass follows."""

    name: str
    c: float
    x: Tensor
    y: Tensor
    others: list[Tensor]


class Result(NamedTuple):
    """The result of an attempt: the point at which it ended, the verdict, and the evidence about it.

    Attributes:
        engine: the engine that made it.
        start: its start, in words.
        lower: f + g at (x, y).
        solved: whether y solves the lower level in its basin, as far as F can tell.
        spread: the range of F, which differences of F are compared with; in a pass, since c passed the balance.
        others: lower solutions in the other basins that were followed.
        course, accuracy: how it went and how accurate it is, in words.
        evidence: what a multistart of the lower level at x found; None before it.
        F_nearest: F at the lower solution nearest to y0, at the same x; None if unknown, or if that one is in a higher basin.
        gradient: the hypergradient; None for a pass, which does not compute it.
        fallen: how far F fell on the way; infinite for a pass, whose F is that of other c.
        idle: a mask of the coordinates of x along which F is constant nearby, so that a zero hypergradient says nothing.
    """

    engine: EngineKind
    start: str
    x: Tensor
    y: Tensor
    F: float
    lower: float
    solved: bool
    spread: float
    others: list[Tensor]
    course: str
    accuracy: str
    verdict: Verdict
    evidence: Evidence | None = None
    F_nearest: float | None = None
    gradient: Tensor | None = None
    fallen: float = math.inf
    idle: Tensor | None = None

    @property
    def flat(self) -> bool:
        """Whether F is constant around x."""
        return self.idle is not None and bool(self.idle.all())

    @property
    def refuted(self) -> bool:
        """Whether a point of smaller f + g than y was found at x, so that y is no solution."""
        return self.evidence is not None and self.evidence.excess > 0


def describe(result: Result, *, best: bool) -> str:
    """Describe a result in a few words."""
    end = "diverged" if result.verdict.status is Status.DIVERGED else f"F = {result.F:.6g}"
    return (
        f"{result.start}: {end}"
        + (", in a basin that is not the lowest" if result.refuted else "")
        + (" (the answer)" if best else "")
    )
