"""Signs: what was measured where the engine seems to be at its end, and what follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meha._verdicts import Status, Verdict
from meha.methods.newton.systems import Factor

__all__ = ["Signs"]


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
