"""Domain: projections on X, the coordinates of x that it leaves free, and the part of a gradient that it does not block."""

from __future__ import annotations

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._second_order import Flat
from meha.methods._quasi_newton import size
from meha.methods.newton.tuning import TUNING

__all__ = ["Domain"]


class Domain:
    """X, for vectors.

    Attributes:
        whole: whether X is the whole space.
        coordinatewise: whether it is a product of intervals.
        start_size: the norm of x at the start, below which no size of x falls.
    """

    def __init__(self, oracle: Oracle, flat: Flat) -> None:
        x_set = oracle.problem.x_set
        self._project, self._flat, self.whole = oracle.project, flat, oracle.project.identity
        self.coordinatewise = x_set is None or all(part.coordinatewise for part, _ in x_set.parts(flat.variable))
        self.start_size = 0.0
        self._free_at: tuple[Tensor, Tensor, Tensor] | None = None
        self._residual_at: tuple[Tensor, Tensor, float] | None = None
        self._size_at: tuple[Tensor, float] | None = None

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of X."""
        if self.whole:
            return x
        leaves = [leaf.clone() for leaf in self._flat.split(x)]
        self._project(None, leaves, 1.0)
        return self._flat.join(leaves)

    def x_size(self, x: Tensor) -> float:
        """The norm of x, or of the start if that is larger."""
        if self._size_at is None or self._size_at[0] is not x:
            self._size_at = x, size(x)
        return max(self._size_at[1], self.start_size)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor:
        """A mask of the coordinates that can move against the gradient."""
        known = self._free_at
        if known is not None and known[0] is x and known[1] is gradient:
            return known[2]
        if self.whole:
            free = torch.ones_like(x, dtype=torch.bool)
        else:
            length = size(gradient)
            probe = self._flat.eps**TUNING.loose_power * (self.x_size(x) or 1.0) / length if length else 0.0
            free = self.project(x - probe * gradient) != x
        self._free_at = x, gradient, free
        return free

    def residual(self, x: Tensor, gradient: Tensor) -> float:
        """The norm of the gradient without the part that X blocks."""
        known = self._residual_at
        if known is None or known[0] is not x or known[1] is not gradient:
            known = self._residual_at = x, gradient, size(self.unblocked(x, gradient))
        return known[2]

    def unblocked(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient without the part that X blocks."""
        if self.whole:
            return gradient
        if self.coordinatewise:
            return torch.where(self.free(x, gradient), gradient, 0.0)
        length = size(gradient)
        probe = TUNING.first_step * (self.x_size(x) or 1.0) / length if length else 1.0
        return (x - self.project(x - probe * gradient)) / probe
