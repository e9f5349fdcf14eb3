"""Sizes of a problem, measured at the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meha.methods._curvatures import Curvatures, balance, flatten, probe
from meha.methods._levels import Levels, LowerPoint
from meha.methods._quasi_newton import Pairs, size
from meha.methods.continuation.tuning import TUNING

__all__ = ["Scales", "Sizes", "measure"]


@dataclass(eq=False)
class Sizes:
    """The start (x0, y0), by which the sizes of x and y are judged.

    Attributes:
        tol: the accuracy asked for, or the finest that the precision allows.
        simple: whether there is no x, so that the accuracy of y counts.
        x_largest, y_largest: the largest sizes of x and y in stages that the lower level shapes.
    """

    x0: Tensor
    y0: Tensor
    tol: float
    simple: bool
    x_largest: float = 0.0
    y_largest: float = 0.0

    @property
    def name(self) -> str:
        """The variable whose accuracy counts."""
        return "y" if self.simple else "x"

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

    @classmethod
    def of(cls, levels: Levels, tol: float) -> Sizes:
        """The sizes of the present point."""
        tol = max(tol, TUNING.finest * levels.eps**TUNING.finest_power)
        return cls(flatten(levels.x), flatten(levels.y), tol, levels.oracle.problem.simple)


@dataclass(eq=False, kw_only=True)
class Scales(Sizes):
    """What is measured at the start, before the first pass.

    Attributes:
        slope: the norm of F_y at the start.
        balance: the c at which both levels weigh the same.
        starts: the first c of each pass.
        proximal: the weight, where the levels balance, of a proximal term that vanishes as c grows; 0 if there is none.
    """

    curvatures: Curvatures
    slope: float
    balance: float
    starts: tuple[float, ...]
    proximal: float = 0.0

    @property
    def growth(self) -> float:
        """The growth of c from stage to stage; the bias falls by the ratio."""
        return TUNING.ratio**2 if self.proximal else TUNING.ratio

    def tie(self, c: float) -> float:
        """The weight of the proximal term at c.

        It falls with the root of c: F, of weight 1/c, then draws y away from the response by as much as the term does.
        """
        return self.proximal * math.sqrt(self.balance / c)


def measure(levels: Levels, sizes: Sizes, both_starts: bool) -> Scales:
    """Probe the curvatures at the start, and balance both levels in y; for the first pass, also in x.

    Raises:
        ValueError: an objective is not finite there.
    """
    levels.move(sizes.x0, sizes.y0)
    y0 = sizes.y0
    F, _, F_y = levels.upper(y0)
    lower = levels.lower(y0)
    for level, value in (("upper", F), ("lower", lower.value)):
        if not math.isfinite(value):
            raise ValueError(f"{level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=TUNING.probes)
    F_xx, F_yy, f_yy, f_xy = (curvatures[name] for name in ("F_xx", "F_yy", "f_yy", "f_xy"))
    slope, f_slope = size(F_y), size(lower.gradient)
    if F_yy and f_yy:
        in_y = F_yy / f_yy
    elif f_yy and slope:  # F is linear: where it draws y as far as y is from the lower level's solution
        apart = max(size(_rough_solution(levels, y0).z - y0), size(y0))
        in_y = slope / (f_yy * apart or f_yy)
    else:  # f is linear
        in_y = slope / f_slope if slope and f_slope else 1.0
    in_both = min(in_y, balance(F_xx, F_yy, f_yy, f_xy))
    starts = (TUNING.upper_first * in_both, TUNING.lower_first * in_y)[: 2 if both_starts else 1]
    scales = Scales(**vars(sizes), curvatures=curvatures, slope=slope, balance=in_y, starts=starts)
    if levels.oracle.selection.vanishes:  # F has no say in which valley y is
        scales.starts, scales.proximal = (TUNING.lower_first * in_y,), TUNING.proximal * (f_yy or 1.0)
        scales.tol = max(sizes.tol, levels.eps**TUNING.finest_tied)
    return scales


def _rough_solution(levels: Levels, y: Tensor) -> LowerPoint:
    """Solve the lower level roughly."""
    descent = levels.descent(levels.lower, Pairs(TUNING.rough_pairs), 1 / levels.curvatures["f_yy"])
    point = descent.evaluate(y)
    first = size(descent.residual(point).r)
    for _ in range(TUNING.rough_steps):
        if size(descent.residual(point).r) <= TUNING.rough * first:
            break
        new = descent.step(point, *descent.direction(point))
        if new is None:
            break
        point = new
    return point
