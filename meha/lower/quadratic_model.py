"""Tests of whether f looks like a convex quadratic function of y, whose only basin every descent reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meha.lower.flat_problem import LowerPoint
from meha.numerics.tolerances import SINGULAR
from meha.tensors.vectors import vector_norm

DEVIATION = 0.05  # relative deviation from a quadratic function within which a descent counts as ending in a basin


class QuadraticModel(NamedTuple):
    """f as a convex quadratic function of y, given by products with its Hessian, which must be positive semidefinite.

    Where g and Y are convex, a descent of such an f + g ends at its only basin, and need not be made.

    >>> point = lambda z: LowerPoint(z, float(z @ z), 2 * z, f_x=z)
    >>> y, z = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> model = QuadraticModel(lambda v: 2 * v)
    >>> model.matches(point(z), point(y)), model.matches(LowerPoint(z, float(z @ z), 2.1 * z, f_x=z), point(y))
    (True, False)
    """

    product: Callable[[Tensor], Tensor]

    def matches(self, point: LowerPoint, bottom: LowerPoint) -> bool:
        """Whether f and its gradient at a point agree with the quadratic model around ``bottom``."""
        image = self.product(point.z - bottom.z)
        change = point.gradient - bottom.gradient
        rounding = SINGULAR * torch.finfo(image.dtype).eps * (vector_norm(image) + vector_norm(point.gradient))
        return vector_norm(change - image) <= rounding and in_same_quadratic(point, bottom)


def matches_quadratic(z: Tensor, value: Tensor | float, gradient: Tensor, bottom: LowerPoint, noise: Tensor | float) -> Tensor:
    """Whether f between a point, or each of several, and the bottom of a basin looks like a convex quadratic function."""
    move = z - bottom.z
    # On a quadratic function the trapezoidal rule is exact; ``turn`` is its curvature along the move.
    rise, turn = 0.5 * ((gradient + bottom.gradient) * move).sum(-1), ((gradient - bottom.gradient) * move).sum(-1)
    return (turn >= -noise) & ((value - bottom.smooth - rise).abs() <= DEVIATION * turn.abs() + noise)


def in_same_quadratic(point: LowerPoint, bottom: LowerPoint) -> bool:
    """Whether a point of a descent lies in the basin of ``bottom``, judged by :func:`matches_quadratic`."""
    return bool(matches_quadratic(point.z, point.smooth, point.gradient, bottom, point.noise + bottom.noise))
