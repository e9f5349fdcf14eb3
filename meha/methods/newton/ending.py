"""The end of the engine: the scales that its last points tell, and what was measured where it seems to be at rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._quasi_newton import size as norm
from meha.methods.newton.hyper import Value
from meha.methods.newton.systems import Factor
from meha.methods.newton.tuning import TUNING

__all__ = ["Signs", "Trail"]


@dataclass
class Trail:
    """The last points, whose smallest changes are the scales of the end: a start far away says nothing about it.

    Attributes:
        eps: rounding error of the variables.
        points: x, F, and the size of the hypergradient.
        least, most: the range of F so far.
    """

    eps: float
    points: list[tuple[Tensor, float, float]] = field(default_factory=list)
    least: float = math.inf
    most: float = -math.inf

    def add(self, now: Value) -> None:
        """Go on to a point."""
        if math.isfinite(now.F):
            self.least, self.most = min(self.least, now.F), max(self.most, now.F)
            self.points = [*self.points, (now.x, now.F, now.size)][-TUNING.recent :]

    @property
    def tells(self) -> bool:
        """Whether there are enough points."""
        return len(self.points) == TUNING.recent

    @property
    def size(self) -> float:
        """The size of the hypergradient: the second largest, as the first one may belong to a start far away."""
        return sorted(size for _, _, size in self.points)[-2:][0]

    @property
    def _moves(self) -> list[float]:
        return [norm(new - old) for (old, _, _), (new, _, _) in pairwise(self.points)]

    @property
    def moved(self) -> float:
        """The shortest move."""
        return min(self._moves)

    @property
    def unbounded(self) -> bool:
        """Whether F has come down to its rounding error at the start, and x goes on with moves that do not shrink."""
        steady = all(TUNING.steady * before <= after for before, after in pairwise(self._moves))
        return self.tells and steady and abs(self.points[-1][1]) <= self.eps * (self.most - self.least)

    @property
    def spread(self) -> float:
        """The last change of F, or a part of its whole range that is next to nothing if that is more."""
        return max(self._changed, self.eps**TUNING.lower_power * (self.most - self.least)) if self.points else 0.0

    @property
    def fallen(self) -> float:
        """The range of F at the last points."""
        values = [F for _, F, _ in self.points]
        return max(values) - min(values)

    @property
    def _changed(self) -> float:
        last = [F for _, F, _ in self.points[-2:]]
        return max(last) - min(last)

    def scale(self, now: Value) -> float:
        """The scale of F at the end, at least what rounding hides."""
        return max(abs(now.F), self._changed, self.eps**2 * (self.most - self.least))


@dataclass
class Signs:
    """Measures at a point that seems to be the end.

    Attributes:
        pivot: the smallest pivot of the Hessian on the face, relative to its diagonal entry; NaN without a factor.
        error: the estimated error of y, relative to y.
        stationarity: the hypergradient, relative to its largest size, or at a kink a combination of those nearby.
        weak: the number of coordinates of y that are about to move.
    """

    pivot: float
    error: float
    stationarity: float
    weak: int

    def __str__(self) -> str:
        words = f"relative hypergradient {self.stationarity:.1e}; y to about {self.error:.1e}"
        return words + (f"; {self.weak} coordinates of y are about to move" if self.weak else "")

    def converged(self, *, kink: bool = False) -> Verdict:
        """The end at a stationary x and a strict minimum y."""
        where = ", at a kink of the hyper-objective" if kink else ""
        curvature = f"smallest pivot {self.pivot:.1e}" if math.isfinite(self.pivot) else "no negative curvature met"
        return Verdict(
            Status.CONVERGED,
            f"Relative hypergradient {self.stationarity:.1e}{where}; y is a strict minimum of the lower level ({curvature}).",
        )

    def irregular(self, factor: Factor, *, regular: bool) -> Verdict:
        """The end at a y that is not a strict minimum."""
        kind = "indefinite" if factor.indefinite else "singular"
        if factor.indefinite or not regular:
            return Verdict(Status.BROKE_DOWN, f"The lower Hessian is {kind} on the face of y.")
        return Verdict(
            Status.FINISHED,
            f"Relative hypergradient {self.stationarity:.1e}, but the lower Hessian is singular on the face of y.",
        )
