"""Base classes of sets, and the product of sets of leaves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha.tensors.distributed import local
from meha.tensors.variables import Leaves, Variable, all_finite, copy_, distance, norm, select, short_step, subtract
from meha.tensors.vectors import join, split

Bound = float | Tensor

Rows = tuple[Tensor, Tensor]
"""Inequalities (not positive where they hold) and equations (zero where they hold), as vectors."""

ROUNDING = 64  # a point that misses the boundary of a set by less than this multiple of the rounding counts as on it


class Face(NamedTuple):
    """The directions along which a point of a set can move forwards and backwards, to first order.

    Attributes:
        free: masks of the coordinates that can move.
        rows: the directions d also satisfy rows @ d = 0, with one column per coordinate; None without equations.
    """

    free: Leaves
    rows: Tensor | None = None


class ConvexSet(ABC):
    """A closed convex set C with its Euclidean projection argmin_{w in C} ||w - z||.

    The other attributes say what else the set can do. Solvers look at these, and never at its class.
    """

    coordinatewise: bool = False
    """Whether C is a product of intervals, one per coordinate."""

    orthant: bool = False
    """Whether C is {z : z >= 0}."""

    iterative: bool = False
    """Whether the projection is a numerical solve; the default then prefers :meth:`as_constraints`."""

    def project(self, value: Any) -> Any:
        """Return the nearest point of the set, in the structure of ``value`` (a module is copied)."""
        point = Variable.of(value, "value").copy()  # the value of the caller stays as it is
        self.project_(point)
        return point.detached()

    @torch.no_grad()
    def project_(self, variable: Variable) -> None:
        """Move a variable to the nearest point of the set, in place."""
        for part, chosen in self.parts(variable):
            leaves = local([variable.leaves[i] for i in chosen])
            copy_(leaves, part.project_leaves(leaves))

    def contains(self, value: Any, tol: float = 1e-6) -> bool:
        """Whether ``value`` is within ``tol * (1 + ||value||)`` of the set."""
        return self.holds(Variable.of(value, "value"), tol)

    def holds(self, variable: Variable, tol: float = 1e-6) -> bool:
        """Whether a variable is in the set, like :meth:`contains`."""
        with torch.no_grad():
            if not all_finite(variable.leaves):
                return False
            for part, chosen in self.parts(variable):
                leaves = [variable.leaves[i] for i in chosen]
                away = float(distance(leaves, part.project_leaves(local(leaves))))
                if not (math.isfinite(away) and away <= tol * (1 + float(norm(leaves)))):
                    return False
        return True

    def parts(self, variable: Variable, chosen: list[int] | None = None) -> list[tuple[ConvexSet, list[int]]]:
        """Split the set into sets of separate groups of leaves, checked against the shapes of ``variable``.

        Leaves of ``variable`` (of those ``chosen``) that are in no group are free.
        """
        chosen = list(range(len(variable.leaves))) if chosen is None else chosen
        self.check(variable, chosen)
        return [(self, chosen)]

    def check(self, variable: Variable, chosen: list[int]) -> None:
        """Raise if the set does not fit these leaves of ``variable``."""

    def face(self, leaves: Leaves) -> Face | None:
        """Return the face on which a projected point lies; None if faces are curved, which second-order methods refuse."""
        return None

    def as_constraints(self, leaves: Leaves) -> Rows | None:
        """Return C as smooth inequalities and equations: their values at a point, which need not be in C.

        None if C has no such form; the default then refuses it beside constraints that couple x and y.
        """
        return None

    def room(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """Return masks of the coordinates that can decrease, and of those that can increase (coordinatewise sets only)."""
        # A move of at least the own size is not lost in rounding; what the projection takes back has no room.
        below = self.project_leaves([leaf - leaf.abs() - 1 for leaf in leaves])
        above = self.project_leaves([leaf + leaf.abs() + 1 for leaf in leaves])
        down = [low < leaf for low, leaf in zip(below, leaves, strict=True)]
        return down, [high > leaf for high, leaf in zip(above, leaves, strict=True)]

    def tangent_leaves(self, leaves: Leaves, directions: Leaves) -> Leaves:
        """Project directions onto the tangent cone of the set at a point of the set.

        The rest of a direction is its projection onto the normal cone (Moreau decomposition). If the cone is not known in
        closed form, the result is the directional derivative of the projection, by a forward difference.
        """
        if self.coordinatewise:
            down, up = self.room(leaves)
            return [
                torch.where(((d < 0) & low) | ((d > 0) & high), d, 0.0)
                for d, low, high in zip(directions, down, up, strict=True)
            ]
        step = short_step(leaves, directions)
        moved = self.project_leaves([leaf + step * d for leaf, d in zip(leaves, directions, strict=True)])
        return [d / step for d in subtract(moved, leaves)]

    @abstractmethod
    def project_leaves(self, leaves: Leaves) -> Leaves:
        """Return the projection of a list of leaves as new leaves."""


class FlatSet(ConvexSet):
    """A set of whole vectors: leaves are joined, projected and split again."""

    def project_leaves(self, leaves: Leaves) -> Leaves:
        return split(self.project_vector(join(leaves)), leaves)

    def tangent_leaves(self, leaves: Leaves, directions: Leaves) -> Leaves:
        tangent = self.tangent_vector(join(leaves), join(directions))
        return super().tangent_leaves(leaves, directions) if tangent is None else split(tangent, leaves)

    def tangent_vector(self, z: Tensor, d: Tensor) -> Tensor | None:
        """Return the projection of a direction onto the tangent cone at z; None if there is no closed form."""
        return None

    @abstractmethod
    def project_vector(self, z: Tensor) -> Tensor:
        """Return the projection of one vector."""


class Product(ConvexSet):
    """A set for each leaf, by name; leaves without a name here are free.

    Args:
        sets: from the name of a leaf (or of a branch of the dict, list or module) to its set.

    >>> from meha.problem.sets import NonNegative, Simplex
    >>> X = Product({"weights": Simplex(), "scale": NonNegative()})
    >>> X.project({"weights": torch.tensor([1.0, 1.0]), "scale": torch.tensor(-3.0)})
    {'weights': tensor([0.5000, 0.5000]), 'scale': tensor(0.)}
    """

    def __init__(self, sets: Mapping[str, ConvexSet]) -> None:
        if not isinstance(sets, Mapping) or not all(isinstance(name, str) for name in sets):
            raise TypeError(f"Product: expected a dict from names of leaves to sets, got {sets!r}.")
        for name, member in sets.items():
            if not isinstance(member, ConvexSet):
                raise TypeError(f"Product: {name!r} maps to {type(member).__name__}, expected a set of meha.sets.")
            if isinstance(member, Product):
                raise TypeError(f"Product: {name!r} maps to another Product; name its leaves here, as in '{name}.leaf'.")
        self.sets = dict(sets)
        self.coordinatewise = all(member.coordinatewise for member in self.sets.values())
        self.iterative = any(member.iterative for member in self.sets.values())

    def __repr__(self) -> str:
        return f"Product({self.sets})"

    def parts(self, variable: Variable, chosen: list[int] | None = None) -> list[tuple[ConvexSet, list[int]]]:
        taken: dict[int, str] = {}
        parts: list[tuple[ConvexSet, list[int]]] = []
        for name, member in self.sets.items():
            named = select(name, variable.names, "Product")
            for i in named:
                if i in taken:
                    raise ValueError(f"Product: {name!r} and {taken[i]!r} both contain the leaf {variable.names[i]!r}.")
                taken[i] = name  # two projections in turn are not that onto an intersection
            parts += member.parts(variable, named)
        return parts

    def project_leaves(self, leaves: Leaves) -> Leaves:
        raise TypeError("Product: leaves have no names here; use project(value) or parts(variable).")


def reached(value: Tensor, bound: float, z: Tensor) -> Tensor:
    """Whether a constraint value <= bound is active at z, up to rounding."""
    scale = torch.maximum(value.abs(), norm([z]))  # the value may be small by cancellation of large entries of z
    return value >= bound - ROUNDING * torch.finfo(z.dtype).eps * scale


def to_tensors(part: ConvexSet, *names: str) -> None:
    """Convert fields that are lists or arrays to tensors; numbers and tensors stay unchanged."""
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor | float | int):
            continue
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{type(part).__name__}: {name} must be a number or a tensor, got {value!r}.") from None
        object.__setattr__(part, name, tensor)  # the dataclasses are frozen


def check_vector(value: Bound, variable: Variable, chosen: list[int], label: str, *, scalar: bool = True) -> None:
    """Raise unless ``value`` has one entry per coordinate of the chosen leaves, or is a number where that is allowed."""
    if not isinstance(value, Tensor) or (scalar and value.ndim == 0):
        return
    size = sum(variable.leaves[i].numel() for i in chosen)
    if value.numel() != size:
        raise ValueError(f"{label} has {value.numel()} entries, but {variable.argument} has {size} coordinates there.")
