"""Scales: the sizes measured at the start of a run, by which everything later is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meha.methods._curvatures import Curvatures, probe
from meha.methods.continuation.levels import Levels, LowerPoint
from meha.methods.continuation.quasi_newton import Pairs, size
from meha.methods.continuation.tuning import Tuning

__all__ = ["Scales", "measure"]


@dataclass(eq=False)
class Scales:
    """Sizes of a problem.

    Attributes:
        x0, y0: the start.
        tol: the accuracy asked for, or the finest that the precision allows.
        slope: the norm of F_y at the start.
        balance: the c at which both levels weigh the same.
        starts: the first c of each pass.
        x_largest, y_largest: the largest sizes of x and y in stages that the lower level shapes.
    """

    x0: Tensor
    y0: Tensor
    tol: float
    curvatures: Curvatures
    slope: float
    balance: float
    starts: tuple[float, ...] = ()
    x_largest: float = 0.0
    y_largest: float = 0.0

    def x_size(self, x: Tensor) -> float:
        """The size of x, or its distance from the start where that is larger."""
        return max(size(x), size(x - self.x0)) or 1.0

    def y_size(self, y: Tensor) -> float:
        """The same for y."""
        return max(size(y), size(y - self.y0)) or 1.0

    def note(self, x: Tensor, y: Tensor, theta: Tensor) -> None:
        """Keep the largest sizes."""
        self.x_largest = max(self.x_largest, self.x_size(x))
        self.y_largest = max(self.y_largest, self.y_size(y), self.y_size(theta))


def measure(levels: Levels, tuning: Tuning, tol: float, both_starts: bool) -> Scales:
    """Probe the curvatures at the present point, and balance both levels: in y, and in x for the first pass.

    Raises:
        ValueError: an objective is not finite there.
    """
    x0, y0 = levels.now()
    F, _, F_y = levels.upper(y0)
    lower = levels.lower(y0)
    for level, value in (("upper", F), ("lower", lower.value)):
        if not math.isfinite(value):
            raise ValueError(f"{level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=tuning.probes)
    F_yy, f_yy, F_xx, f_xy = (curvatures[name] for name in ("F_yy", "f_yy", "F_xx", "f_xy"))
    slope, f_slope = size(F_y), size(lower.gradient)
    if F_yy and f_yy:
        balance = F_yy / f_yy
    elif f_yy and slope:  # F is linear: where it draws y as far as y is from the lower level's solution
        apart = max(size(_rough_solution(levels, tuning, y0).z - y0), size(y0))
        balance = slope / (f_yy * apart or f_yy)
    else:  # f is linear
        balance = slope / f_slope if slope and f_slope else 1.0
    in_both = min(balance, F_xx * f_yy / f_xy**2) if F_xx and f_xy and f_yy else balance
    starts = (tuning.upper_first * in_both, tuning.lower_first * balance)[: 2 if both_starts else 1]
    tol = max(tol, tuning.finest * levels.eps**tuning.finest_power)
    return Scales(x0, y0, tol, curvatures, slope, balance, starts)


def _rough_solution(levels: Levels, tuning: Tuning, y: Tensor) -> LowerPoint:
    """Solve the lower level roughly."""
    descent = levels.descent(levels.lower, Pairs(tuning.rough_pairs), 1 / levels.curvatures["f_yy"])
    point = descent.evaluate(y)
    first = size(descent.residual(point).r)
    for _ in range(tuning.rough_steps):
        if size(descent.residual(point).r) <= tuning.rough * first:
            break
        new = descent.step(point, *descent.direction(point))
        if new is None:
            break
        point = new
    return point
