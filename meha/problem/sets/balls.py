"""Balls of three norms, and the simplex."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from meha.problem.sets.base import Bound, Face, FlatSet, Rows, check_vector, reached, to_tensors
from meha.tensors.checks import check_positive
from meha.tensors.variables import Leaves, Variable, inner, norm
from meha.tensors.vectors import join, split

MANY_CORNERS = 10  # largest dimension in which an L1 ball is written as rows, 2^n of them


@dataclass(frozen=True, eq=False)
class _Ball(FlatSet):
    """Base class of balls, which are projected onto after a shift of the centre to zero."""

    radius: float = 1.0
    center: Bound = 0.0

    def __post_init__(self) -> None:
        check_positive(f"{type(self).__name__}: radius", self.radius)
        to_tensors(self, "center")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        check_vector(self.center, variable, chosen, f"{type(self).__name__}: center")

    def project_vector(self, z: Tensor) -> Tensor:
        center = _vector_like(self.center, z)
        return center + self._project_centered(z - center)

    def as_constraints(self, leaves: Leaves) -> Rows | None:
        z = join(leaves)
        return self._rows(z - _vector_like(self.center, z)), z[:0]

    @abstractmethod
    def _project_centered(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _rows(self, z: Tensor) -> Tensor:
        """Return the inequalities of the ball around zero."""


@dataclass(frozen=True, eq=False)
class L2Ball(_Ball):
    """{z : ||z - center||_2 <= radius}.

    Args:
        radius: positive.
        center: a number or a vector with one entry per coordinate of the variable.

    >>> L2Ball(1.0).project(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    def _project_centered(self, z: Tensor) -> Tensor:
        inside = norm([z.detach()]) <= self.radius
        far = torch.where(inside, torch.ones_like(z), z)  # avoids 0 / 0 in a derivative at the centre
        unit = far / far.abs().max()  # its norm cannot overflow
        return torch.where(inside, z, unit * (self.radius / norm([unit])))

    def _rows(self, z: Tensor) -> Tensor:
        return (z.square().sum() - self.radius**2).reshape(1)  # the square of the norm is smooth at the centre

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor:
        outside = z - _vector_like(self.center, z)
        size = norm([outside])
        unit = outside / size.clamp(min=torch.finfo(z.dtype).tiny)  # at the centre, zero instead of NaN
        outward = inner([unit], [d]).clamp(min=0)
        return d - torch.where(reached(size, self.radius, z), outward, 0.0) * unit


@dataclass(frozen=True, eq=False)
class L1Ball(_Ball):
    """{z : ||z - center||_1 <= radius}; projection: soft thresholding at a level found by sorting.

    >>> L1Ball(1.0).project(torch.tensor([2.0, -1.0]))
    tensor([1., 0.])
    """

    def _project_centered(self, z: Tensor) -> Tensor:
        size = z.abs()
        inside = size.sum() <= self.radius  # torch.where instead of a branch: no synchronisation
        return torch.where(inside, z, z.sign() * _project_simplex(size, self.radius))

    def as_constraints(self, leaves: Leaves) -> Rows | None:
        few = sum(leaf.numel() for leaf in leaves) <= MANY_CORNERS
        return super().as_constraints(leaves) if few else None

    def _rows(self, z: Tensor) -> Tensor:
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * len(z)).reshape(-1, len(z)).to(z)
        return signs @ z - self.radius  # <s, z> <= r for all signs s: linear, without kinks

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor:
        """On the boundary, the sum of absolute values must not grow along d."""
        outside = z - _vector_like(self.center, z)
        if not bool(reached(outside.abs().sum(), self.radius, z)):
            return d
        free = outside != 0
        growth = torch.where(free, outside.sign() * d, d.abs())
        t = _level(growth[free], growth[~free]).clamp(min=0)
        return torch.where(free, d - t * outside.sign(), d.sign() * (d.abs() - t).clamp(min=0))


@dataclass(frozen=True, eq=False)
class LinfBall(_Ball):
    """``{z : max_i |z_i - center_i| <= radius}``.

    >>> LinfBall(1.0).project(torch.tensor([2.0, -0.5]))
    tensor([ 1.0000, -0.5000])
    """

    coordinatewise = True

    def face(self, leaves: Leaves) -> Face:
        z = join(leaves)
        center = _vector_like(self.center, z)
        low, high = center - self.radius, center + self.radius
        return Face(split((z > low) & (z < high), leaves))

    def _project_centered(self, z: Tensor) -> Tensor:
        return z.clamp(-self.radius, self.radius)

    def _rows(self, z: Tensor) -> Tensor:
        return torch.cat([-z - self.radius, z - self.radius])


@dataclass(frozen=True, eq=False)
class Simplex(FlatSet):
    """{z : z >= 0, sum z = total}.

    >>> Simplex().project(torch.tensor([1.0, 1.0]))
    tensor([0.5000, 0.5000])
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        check_positive("Simplex: total", self.total)

    def face(self, leaves: Leaves) -> Face:
        return Face([leaf > 0 for leaf in leaves], torch.ones_like(join(leaves))[None])  # the sum must not change

    def as_constraints(self, leaves: Leaves) -> Rows:
        z = join(leaves)
        return -z, z.sum().reshape(1) - self.total

    def project_vector(self, z: Tensor) -> Tensor:
        return _project_simplex(z, self.total)

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor:
        free = z > 0
        shifted = d - _level(d[free], d[~free])
        return torch.where(free, shifted, shifted.clamp(min=0))


def _project_simplex(z: Tensor, total: float) -> Tensor:
    """Return max(z - t, 0) with the level t at which the entries sum to ``total``, by sorting (Held, Wolfe, Crowder 1974)."""
    z = z - z.max()  # the result is the same, with less rounding for large z
    ordered = z.sort(descending=True).values
    rank = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device)
    levels = (ordered.cumsum(0) - total) / rank
    positive = (ordered > levels).sum().clamp(min=1).reshape(1)  # at least one, unless z is NaN
    return (z - levels.gather(0, positive - 1)).clamp(min=0)


def _level(free: Tensor, fixed: Tensor) -> Tensor:
    """Return the level t with sum(free - t) + sum(max(fixed - t, 0)) = 0; ``free`` is not empty."""
    ordered = fixed.sort(descending=True).values
    sums = free.sum() + torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    levels = sums / torch.arange(free.numel(), free.numel() + sums.numel(), dtype=free.dtype, device=free.device)
    above = (ordered > levels[:-1]).sum()  # the largest entries of fixed lie above the level
    return levels[above]


def _vector_like(value: Bound, z: Tensor) -> Bound:
    return value.reshape(-1).to(z) if isinstance(value, Tensor) and value.ndim else value
