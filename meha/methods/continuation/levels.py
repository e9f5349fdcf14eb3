"""Both levels of a problem as functions of flat vectors, at one x at a time, and their sizes at the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods._curvatures import Curvatures, balance, flatten, probe, upper_gradients, write
from meha.methods.continuation.quasi_newton import Descent, Pairs, Point, PointT, size
from meha.methods.continuation.tuning import TUNING
from meha.problem import Prox

__all__ = ["Levels", "LowerPoint", "PenaltyPoint", "Scales", "measure"]

SUMMANDS = 5.0
"""Rounding errors that a value is taken to have."""


@dataclass(eq=False, kw_only=True)
class LowerPoint(Point):
    """f + g at theta, with the gradient of f in x."""

    f_x: Tensor


@dataclass(eq=False, kw_only=True)
class PenaltyPoint(LowerPoint):
    """weight F + f + g at y, with F, F_x and f; ``upper`` is F_y."""

    F: float
    F_x: Tensor
    f: float


class Levels:
    """F, f, g, X and Y of a problem on vectors.

    Args:
        oracle: takes the gradients, and counts them.
        x, y: variables to write to; afterwards they hold the last point evaluated.

    Attributes:
        curvatures: those of F and f, which say how accurate a value is.
        eps: the rounding error of a number.
        composite: whether g is more than the indicator of Y.
        constrained: whether X is not the whole space.
        bounded: whether there is a g or a Y.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle, self.x, self.y = oracle, x, y
        self.curvatures: Curvatures = {"F_yy": 0.0, "f_yy": 0.0}
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in x.leaves + y.leaves)
        self.composite = oracle.phi is not oracle.lower
        self.constrained = not oracle.project.identity
        self.bounded = not oracle.prox.identity

    def project(self, x: Tensor, step: float = 1.0) -> Tensor:
        """The projection on X, with the signature of a proximal map."""
        return self._map(self.oracle.project, x, step, self.x) if self.constrained else x

    def prox(self, y: Tensor, step: float) -> Tensor:
        """The proximal map of g(x, .) + indicator of Y."""
        return self._map(self.oracle.prox, y, step, self.y) if self.bounded else y

    def _map(self, prox: Prox, z: Tensor, step: float, like: Variable) -> Tensor:
        parts = z.clone().split([leaf.numel() for leaf in like.leaves])
        leaves = [part.view(leaf.shape) for part, leaf in zip(parts, like.leaves, strict=True)]
        prox(self.x.value, leaves, step)
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def upper(self, y: Tensor) -> tuple[float, Tensor, Tensor]:
        """F(x, y) with its gradients in x and y."""
        write(y, self.y)
        value, in_x, in_y = upper_gradients(self.oracle, self.x, self.y, strict=True)
        return float(value), in_x, in_y

    def lower(self, y: Tensor) -> LowerPoint:
        """f + g as a function of y."""
        write(y, self.y)
        oracle, x = self.oracle, self.x
        strict = not self.composite  # otherwise x may act through g alone
        (value,), (in_x, in_y) = oracle.gradients((x, self.y), [(1.0, oracle.lower, x, self.y)], strict=strict)
        f, g = float(value), float(oracle.g(x, self.y)) if self.composite else 0.0
        noise = self._rounding(abs(f) + abs(g), self.curvatures["f_yy"], y)
        f_x, f_y = (torch.cat([part.reshape(-1) for part in leaves]) for leaves in (in_x, in_y))
        return LowerPoint(y, f, f_y, g, noise, f_x=f_x)

    def penalty(self, y: Tensor, weight: float) -> PenaltyPoint:
        """weight F + f + g as a function of y."""
        F, F_x, F_y = self.upper(y)
        at = self.lower(y)
        f, g = at.smooth, at.nonsmooth
        curvature = weight * self.curvatures["F_yy"] + self.curvatures["f_yy"]
        noise = self._rounding(weight * abs(F) + abs(f) + abs(g), curvature, y)
        gradient = weight * F_y + at.gradient
        return PenaltyPoint(y, weight * F + f, gradient, g, noise, upper=F_y, f_x=at.f_x, F=F, F_x=F_x, f=f)

    def _rounding(self, value: float, curvature: float, z: Tensor) -> float:
        """The error of a value whose summands may be as large as the curvature makes them."""
        noise = self.eps * (SUMMANDS * value + curvature * float(z @ z))
        return noise if math.isfinite(noise) else 0.0

    def descent(self, evaluate: Callable[[Tensor], PointT], pairs: Pairs, t: float) -> Descent[PointT]:
        """Steps in y."""
        return Descent(evaluate, pairs, self.prox if self.bounded else None, self.composite, t)

    def pull(self, y: LowerPoint, theta: LowerPoint) -> Tensor:
        """The gradient in x of (f + g)(x, y) - (f + g)(x, theta)."""
        difference = y.f_x - theta.f_x
        return difference + (self._g_x(y.z) - self._g_x(theta.z)) if self.composite else difference

    def _g_x(self, y: Tensor) -> Tensor:
        write(y, self.y)
        return torch.cat([part.reshape(-1) for part in self.oracle.g_gradient(self.x, self.y)])

    def move(self, x: Tensor, y: Tensor | None = None) -> None:
        """Put vectors into the variables."""
        write(x, self.x)
        if y is not None:
            write(y, self.y)


@dataclass(eq=False)
class Scales:
    """Sizes measured at the start (x0, y0), by which everything later is judged.

    Attributes:
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
    starts: tuple[float, ...]
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


def measure(levels: Levels, tol: float, both_starts: bool) -> Scales:
    """Probe the curvatures at the present point, and balance both levels in y; for the first pass, also in x.

    Raises:
        ValueError: an objective is not finite there.
    """
    x0, y0 = flatten(levels.x), flatten(levels.y)
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
    tol = max(tol, TUNING.finest * levels.eps**TUNING.finest_power)
    return Scales(x0, y0, tol, curvatures, slope, in_y, starts)


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
