"""Bowls: whether f looks like a convex quadratic function of y, whose only basin a descent must reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meha.lower.flat_problem import LowerPoint
from meha.numerics.limited_memory import vector_norm

__all__ = ["QuadraticModel", "in_same_quadratic", "matches_quadratic"]


EXACT = 1e3  # rounding errors within which a gradient is that of a quadratic function
BOWL = 0.05  # relative deviation of f from a quadratic function on the way to the bottom of a basin which it joins


class QuadraticModel(NamedTuple):
    """What f is, if it is a convex quadratic function of y: products with its Hessian, which must be positive semidefinite.

    Where g and Y are convex, a descent of such an f + g ends at its only basin, and need not be made.

    >>> point = lambda z: LowerPoint(z, float(z @ z), 2 * z, f_x=z)
    >>> y, z = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> model = Quadratic(lambda v: 2 * v)
    >>> model.explains(point(z), point(y)), model.explains(LowerPoint(z, float(z @ z), 2.1 * z, f_x=z), point(y))
    (True, False)
    """

    product: Callable[[Tensor], Tensor]

    def matches(self, point: LowerPoint, bottom: LowerPoint) -> bool:
        """Whether value and gradient at a point are as those at another one have it."""
        image = self.product(point.z - bottom.z)
        change = point.gradient - bottom.gradient
        rounding = EXACT * torch.finfo(image.dtype).eps * (vector_norm(image) + vector_norm(point.gradient))
        return vector_norm(change - image) <= rounding and in_same_quadratic(point, bottom)


def matches_quadratic(z: Tensor, value: Tensor | float, gradient: Tensor, bottom: LowerPoint, noise: Tensor | float) -> Tensor:
    """Whether f between a point, or each of several, and the bottom of a basin is as a convex quadratic function has it."""
    way = z - bottom.z
    rise, turn = 0.5 * ((gradient + bottom.gradient) * way).sum(-1), ((gradient - bottom.gradient) * way).sum(-1)
    return (turn >= -noise) & ((value - bottom.smooth - rise).abs() <= BOWL * turn.abs() + noise)


def in_same_quadratic(point: LowerPoint, bottom: LowerPoint) -> bool:
    """The same for a point of a descent."""
    return bool(matches_quadratic(point.z, point.smooth, point.gradient, bottom, point.noise + bottom.noise))
