"""Sets given by linear equations or inequalities."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meha.problem.sets.base import Face, FlatSet, Rows, check_vector, reached, to_tensors
from meha.tensors.variables import Leaves, Variable, inner, norm
from meha.tensors.vectors import join

__all__ = ["AffineSet", "HalfSpace"]


@dataclass(frozen=True, eq=False)
class HalfSpace(FlatSet):
    """{z : <normal, z> <= offset}.

    >>> HalfSpace(torch.tensor([2.0, 0.0]), 1.0).project(torch.tensor([3.0, 1.0]))
    tensor([0.5000, 1.0000])
    """

    normal: Tensor
    offset: float

    def __post_init__(self) -> None:
        to_tensors(self, "normal")
        size = float(norm([self.normal.double()]))
        if not (0 < size < math.inf and math.isfinite(self.offset)):
            raise ValueError(
                f"HalfSpace: normal must not be zero, and normal and offset must be finite, got offset={self.offset}."
            )

    def check(self, variable: Variable, chosen: list[int]) -> None:
        check_vector(self.normal, variable, chosen, "HalfSpace: normal", scalar=False)

    def as_constraints(self, leaves: Leaves) -> Rows:
        z = join(leaves)
        return self.normal.reshape(1, -1).to(z) @ z - self.offset, z[:0]

    def project_vector(self, z: Tensor) -> Tensor:
        unit, offset = self._scaled(z)
        return z - (inner([unit], [z]) - offset).clamp(min=0) * unit

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor:
        unit, offset = self._scaled(z)
        outward = inner([unit], [d]).clamp(min=0)  # only this part of d leaves the set
        return d - torch.where(reached(inner([unit], [z]), offset, z), outward, 0.0) * unit

    def _scaled(self, z: Tensor) -> tuple[Tensor, float]:
        """Return the normal scaled to length 1, and the offset that belongs to it."""
        normal = self.normal.double()
        size = norm([normal])
        return (normal / size).reshape(-1).to(z), float(self.offset / size)


@dataclass(frozen=True, eq=False)
class AffineSet(FlatSet):
    """{z : matrix z = rhs}; projection z - A^+ (A z - b).

    Args:
        matrix: A, one row per equation; rows may depend on each other.
        rhs: b; the equations must have a solution.

    >>> AffineSet(torch.ones(1, 2), torch.tensor([1.0])).project(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    matrix: Tensor
    rhs: Tensor
    inverse: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        to_tensors(self, "matrix", "rhs")
        if self.matrix.ndim != 2 or not len(self.matrix) or self.rhs.shape != self.matrix.shape[:1]:
            raise ValueError(
                "AffineSet: matrix must have two dimensions and at least one row, and rhs one entry per row, got shapes"
                f" {tuple(self.matrix.shape)} and {tuple(self.rhs.shape)}."
            )
        matrix, rhs = self.matrix.double(), self.rhs.double()
        inverse = torch.linalg.pinv(matrix)  # once, in double precision; rows may depend on each other
        error = norm([matrix @ (inverse @ rhs) - rhs])
        if not bool(error <= 1e-4 * (1 + norm([rhs]))):
            raise ValueError(f"AffineSet: the equations contradict each other (residual {float(error):.1e}).")
        object.__setattr__(self, "inverse", inverse)

    def check(self, variable: Variable, chosen: list[int]) -> None:
        check_vector(self.matrix[0], variable, chosen, "AffineSet: a row of matrix", scalar=False)

    def face(self, leaves: Leaves) -> Face:  # all coordinates are free, as long as the equations hold
        return Face([torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves], self.matrix.to(leaves[0]))

    def as_constraints(self, leaves: Leaves) -> Rows:
        z = join(leaves)
        return z[:0], self.matrix.to(z) @ z - self.rhs.to(z)

    def project_vector(self, z: Tensor) -> Tensor:
        matrix, rhs, inverse = (t.to(z) for t in (self.matrix, self.rhs, self.inverse))
        return z - inverse @ (matrix @ z - rhs)

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor:
        return d - self.inverse.to(z) @ (self.matrix.to(z) @ d)
