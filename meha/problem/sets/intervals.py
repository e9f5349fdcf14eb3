"""Products of intervals, one per coordinate: the whole space, boxes and the non-negative orthant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meha.problem.sets.base import Bound, ConvexSet, Face, Rows, to_tensors
from meha.tensors.checks import broadcasts
from meha.tensors.variables import Leaves, Variable
from meha.tensors.vectors import join


@dataclass(frozen=True, eq=False)
class Reals(ConvexSet):
    """The whole space.

    >>> Reals().project(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    coordinatewise = True

    def parts(self, variable: Variable, chosen: list[int] | None = None) -> list[tuple[ConvexSet, list[int]]]:
        return []  # all leaves are free

    def face(self, leaves: Leaves) -> Face:
        return Face([torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves])

    def as_constraints(self, leaves: Leaves) -> Rows:
        none = join(leaves)[:0]
        return none, none

    def project_leaves(self, leaves: Leaves) -> Leaves:
        return leaves


@dataclass(frozen=True, eq=False)
class Box(ConvexSet):
    """{z : low <= z <= high}, coordinate by coordinate; projection clip(z, low, high).

    Args:
        low, high: numbers, or tensors that broadcast to the variable; infinite bounds are allowed.

    >>> Box(0.0, 1.0).project(torch.tensor([-1.0, 0.5, 2.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    low: Bound
    high: Bound

    coordinatewise = True

    def __post_init__(self) -> None:
        to_tensors(self, "low", "high")
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        try:
            ordered = bool((low <= high).all())  # also refuses NaN
        except RuntimeError:
            shapes = f"{tuple(low.shape)} and {tuple(high.shape)}"
            raise ValueError(f"Box: low and high have shapes {shapes}, which do not broadcast.") from None
        if not ordered:
            raise ValueError(f"Box: low must not exceed high in any coordinate, got low={self.low}, high={self.high}.")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        for i in chosen:
            target = tuple(variable.leaves[i].shape)
            for name, bound in (("low", self.low), ("high", self.high)):
                if not broadcasts(shape := tuple(torch.as_tensor(bound).shape), target):
                    leaf = f"{variable.label(variable.names[i])} of shape {target}"
                    found = f"{name} has shape {shape}, which does not broadcast to {leaf}"
                    raise ValueError(f"Box: {found}; for a different bound per leaf use Product.")

    def face(self, leaves: Leaves) -> Face:
        return Face([(leaf > _bound(self.low, leaf)) & (leaf < _bound(self.high, leaf)) for leaf in leaves])

    def as_constraints(self, leaves: Leaves) -> Rows:
        z, rows = join(leaves), []
        for sign, bound in ((-1.0, self.low), (1.0, self.high)):
            ends = join([_bound(bound, leaf).expand(leaf.shape) for leaf in leaves])
            kept = torch.nonzero(torch.isfinite(ends)).reshape(-1)  # an infinite bound would give infinite rows
            rows.append(sign * (z[kept] - ends[kept]))
        return torch.cat(rows), z[:0]

    def project_leaves(self, leaves: Leaves) -> Leaves:
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor):  # torch.clamp does not mix a tensor and a number
            return [torch.clamp(leaf, _bound(self.low, leaf), _bound(self.high, leaf)) for leaf in leaves]
        return [leaf.clamp(self.low, self.high) for leaf in leaves]


@dataclass(frozen=True, eq=False)
class NonNegative(ConvexSet):
    """{z : z >= 0}; projection max(z, 0).

    >>> NonNegative().project(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    coordinatewise = True
    orthant = True

    def face(self, leaves: Leaves) -> Face:
        return Face([leaf > 0 for leaf in leaves])  # exact: a projected point has zeros where the bound is active

    def as_constraints(self, leaves: Leaves) -> Rows:
        z = join(leaves)
        return -z, z[:0]

    def project_leaves(self, leaves: Leaves) -> Leaves:
        return [leaf.clamp(min=0) for leaf in leaves]


def _bound(value: Bound, leaf: Tensor) -> Tensor:
    """Return a bound in the dtype and on the device of a leaf."""
    return torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
