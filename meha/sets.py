"""Closed convex sets X and Y: projection and membership.

Every set is a set of vectors. A variable of several leaves counts as one long vector (all leaves, one after another), so
that ``L2Ball(1.0)`` bounds the norm of a whole dict; sets that act on each coordinate by itself apply to each leaf, and
:class:`Product` gives each leaf its own set.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meha._checks import check_positive
from meha._variables import Leaves, Variable, norm, select, subtract

__all__ = [
    "AffineSet",
    "Box",
    "ConvexSet",
    "HalfSpace",
    "L1Ball",
    "L2Ball",
    "LinfBall",
    "NonNegative",
    "Product",
    "Reals",
    "Simplex",
]

Bound = float | Tensor


class ConvexSet(ABC):
    """A closed convex set C with its Euclidean projection argmin_{w in C} ||w - z||."""

    coordinatewise: bool = False
    """Whether C is a product of intervals, one per coordinate."""

    def project(self, value: Any) -> Any:
        """The point of the set nearest to ``value``, in the same structure (a module is copied)."""
        point = Variable.of(value, "value").copy()
        with torch.no_grad():
            for part, chosen in self.parts(point):
                leaves = [point.leaves[i] for i in chosen]
                for leaf, new in zip(leaves, part.project_leaves(leaves), strict=True):
                    leaf.copy_(new)
        return point.detached()

    def contains(self, value: Any, tol: float = 1e-6) -> bool:
        """Whether ``value`` is within ``tol * (1 + ||value||)`` of the set."""
        return self.holds(Variable.of(value, "value"), tol)

    def holds(self, variable: Variable, tol: float = 1e-6) -> bool:
        """The same for a variable."""
        with torch.no_grad():
            if not all(bool(torch.isfinite(leaf).all()) for leaf in variable.leaves):
                return False
            for part, chosen in self.parts(variable):
                leaves = [variable.leaves[i] for i in chosen]
                distance = float(norm(subtract(leaves, part.project_leaves(leaves))))
                if not (math.isfinite(distance) and distance <= tol * (1 + float(norm(leaves)))):
                    return False
        return True

    def parts(self, variable: Variable) -> list[tuple[ConvexSet, list[int]]]:
        """The set as sets of separate groups of leaves, checked against the shapes of ``variable``."""
        self.check(variable, list(range(len(variable.leaves))))
        return [(self, list(range(len(variable.leaves))))]

    def check(self, variable: Variable, chosen: list[int]) -> None:
        """Raise if the set does not fit these leaves of ``variable``."""

    @abstractmethod
    def project_leaves(self, leaves: Leaves) -> Leaves:
        """The projection of a list of leaves, as new leaves."""


@dataclass(frozen=True, eq=False)
class Reals(ConvexSet):
    """The whole space.

    >>> Reals().project(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    coordinatewise = True

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
        _to_tensors(self, "low", "high")
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        try:
            ordered = bool((low <= high).all())
        except RuntimeError:
            shapes = f"{tuple(low.shape)} and {tuple(high.shape)}"
            raise ValueError(f"Box: low and high have shapes {shapes}, which do not fit each other.") from None
        if not ordered:
            raise ValueError(f"Box: low must not exceed high in any coordinate, got low={self.low}, high={self.high}.")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        for i in chosen:
            for name, bound in (("low", self.low), ("high", self.high)):
                _check_broadcast(bound, variable, i, f"{type(self).__name__}: {name}")

    def project_leaves(self, leaves: Leaves) -> Leaves:
        return [_clip(leaf, self.low, self.high) for leaf in leaves]


@dataclass(frozen=True, eq=False)
class NonNegative(ConvexSet):
    """{z : z >= 0}; projection max(z, 0).

    >>> NonNegative().project(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    coordinatewise = True

    def project_leaves(self, leaves: Leaves) -> Leaves:
        return [leaf.clamp(min=0) for leaf in leaves]


class _FlatSet(ConvexSet):
    """A set of whole vectors: leaves are joined, projected and split again."""

    def project_leaves(self, leaves: Leaves) -> Leaves:
        if len(leaves) == 1:
            return [self.project_vector(leaves[0].reshape(-1)).reshape(leaves[0].shape)]
        vector = self.project_vector(torch.cat([leaf.reshape(-1) for leaf in leaves]))
        pieces = vector.split([leaf.numel() for leaf in leaves])
        return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]

    @abstractmethod
    def project_vector(self, z: Tensor) -> Tensor:
        """The projection of one vector."""


@dataclass(frozen=True, eq=False)
class _Ball(_FlatSet):
    radius: float = 1.0
    center: Bound = 0.0

    def __post_init__(self) -> None:
        check_positive(f"{type(self).__name__}: radius", self.radius)
        _to_tensors(self, "center")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        _check_vector(self.center, variable, chosen, f"{type(self).__name__}: center")

    def project_vector(self, z: Tensor) -> Tensor:
        center = _vector_like(self.center, z)
        return center + self._project_centered(z - center)

    @abstractmethod
    def _project_centered(self, z: Tensor) -> Tensor: ...


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
        inside = torch.linalg.vector_norm(z.detach()) <= self.radius
        far = torch.where(inside, torch.ones_like(z), z)  # so that a derivative at the centre is no 0 / 0
        unit = far / far.abs().max()  # its norm cannot overflow
        return torch.where(inside, z, unit * (self.radius / torch.linalg.vector_norm(unit)))


@dataclass(frozen=True, eq=False)
class L1Ball(_Ball):
    """{z : ||z - center||_1 <= radius}; projection by soft thresholding at the level that a sort finds.

    >>> L1Ball(1.0).project(torch.tensor([2.0, -1.0]))
    tensor([1., 0.])
    """

    def _project_centered(self, z: Tensor) -> Tensor:
        size = z.abs()
        inside = size.sum() <= self.radius
        return torch.where(inside, z, z.sign() * _project_simplex(size, self.radius))


@dataclass(frozen=True, eq=False)
class LinfBall(_Ball):
    """{z : max_i |z_i - center_i| <= radius}.

    >>> LinfBall(1.0).project(torch.tensor([2.0, -0.5]))
    tensor([ 1.0000, -0.5000])
    """

    coordinatewise = True

    def _project_centered(self, z: Tensor) -> Tensor:
        return z.clamp(-self.radius, self.radius)


@dataclass(frozen=True, eq=False)
class Simplex(_FlatSet):
    """{z : z >= 0, sum z = total}.

    >>> Simplex().project(torch.tensor([1.0, 1.0]))
    tensor([0.5000, 0.5000])
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        check_positive("Simplex: total", self.total)

    def project_vector(self, z: Tensor) -> Tensor:
        return _project_simplex(z, self.total)


@dataclass(frozen=True, eq=False)
class HalfSpace(_FlatSet):
    """{z : <normal, z> <= offset}.

    >>> HalfSpace(torch.tensor([2.0, 0.0]), 1.0).project(torch.tensor([3.0, 1.0]))
    tensor([0.5000, 1.0000])
    """

    normal: Tensor
    offset: float

    def __post_init__(self) -> None:
        _to_tensors(self, "normal")
        size = float(torch.linalg.vector_norm(self.normal.double()))
        if not (0 < size < math.inf and math.isfinite(self.offset)):
            raise ValueError(f"HalfSpace: normal must not be zero, and normal and offset finite, got offset={self.offset}.")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        _check_vector(self.normal, variable, chosen, "HalfSpace: normal", scalar=False)

    def project_vector(self, z: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(self.normal.double())
        unit, offset = (self.normal / size).reshape(-1).to(z), float(self.offset / size)
        return z - (unit @ z - offset).clamp(min=0) * unit


@dataclass(frozen=True, eq=False)
class AffineSet(_FlatSet):
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
        _to_tensors(self, "matrix", "rhs")
        if self.matrix.ndim != 2 or not len(self.matrix) or self.rhs.shape != self.matrix.shape[:1]:
            raise ValueError(
                "AffineSet: matrix must have two dimensions and at least one row, and rhs one entry per row, got shapes"
                f" {tuple(self.matrix.shape)} and {tuple(self.rhs.shape)}."
            )
        matrix, rhs = self.matrix.double(), self.rhs.double()
        inverse = torch.linalg.pinv(matrix)
        error = torch.linalg.vector_norm(matrix @ (inverse @ rhs) - rhs)
        if not bool(error <= 1e-4 * (1 + torch.linalg.vector_norm(rhs))):
            raise ValueError(f"AffineSet: the equations contradict each other (residual {float(error):.1e}).")
        object.__setattr__(self, "inverse", inverse)

    def check(self, variable: Variable, chosen: list[int]) -> None:
        _check_vector(self.matrix[0], variable, chosen, "AffineSet: a row of matrix", scalar=False)

    def project_vector(self, z: Tensor) -> Tensor:
        matrix, rhs, inverse = (t.to(z) for t in (self.matrix, self.rhs, self.inverse))
        return z - inverse @ (matrix @ z - rhs)


class Product(ConvexSet):
    """A set for each leaf, by name; leaves that are not named are free.

    Args:
        sets: from the name of a leaf (or of a branch of the dict, list or module) to its set.

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

    def __repr__(self) -> str:
        return f"Product({self.sets})"

    def parts(self, variable: Variable) -> list[tuple[ConvexSet, list[int]]]:
        taken: dict[int, str] = {}
        found: list[tuple[ConvexSet, list[int]]] = []
        for name, member in self.sets.items():
            chosen = select(name, variable.names, "Product")
            for i in chosen:
                if i in taken:
                    raise ValueError(f"Product: {name!r} and {taken[i]!r} both hold the leaf {variable.names[i]!r}.")
                taken[i] = name
            member.check(variable, chosen)
            found.append((member, chosen))
        return found

    def project_leaves(self, leaves: Leaves) -> Leaves:
        raise TypeError("Product: leaves have no names here; use project(value) or parts(variable).")


def _to_tensors(part: ConvexSet, *names: str) -> None:
    """Turn fields that are lists or arrays into tensors; numbers and tensors stay as they are."""
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor | float | int):
            continue
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{type(part).__name__}: {name} must be a number or a tensor, got {value!r}.") from None
        object.__setattr__(part, name, tensor)


def _clip(leaf: Tensor, low: Bound, high: Bound) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(leaf, torch.as_tensor(low).to(leaf), torch.as_tensor(high).to(leaf))
    return leaf.clamp(low, high)


def _project_simplex(z: Tensor, total: float) -> Tensor:
    """max(z - t, 0) with the level t at which the entries sum to ``total``."""
    z = z - z.max()  # changes nothing but rounding
    ordered = z.sort(descending=True).values
    rank = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device)
    levels = (ordered.cumsum(0) - total) / rank
    positive = (ordered > levels).sum().clamp(min=1).reshape(1)  # at least one, unless z is NaN
    return (z - levels.gather(0, positive - 1)).clamp(min=0)


def _vector_like(value: Bound, z: Tensor) -> Bound:
    return value.reshape(-1).to(z) if isinstance(value, Tensor) and value.ndim else value


def _check_vector(value: Bound, variable: Variable, chosen: list[int], label: str, *, scalar: bool = True) -> None:
    if not isinstance(value, Tensor) or (scalar and value.ndim == 0):
        return
    size = sum(variable.leaves[i].numel() for i in chosen)
    if value.numel() != size:
        raise ValueError(f"{label} has {value.numel()} entries, but {variable.argument} has {size} coordinates there.")


def _check_broadcast(value: Bound, variable: Variable, index: int, label: str) -> None:
    shape = tuple(torch.as_tensor(value).shape)
    target = tuple(variable.leaves[index].shape)
    try:
        fits = torch.broadcast_shapes(shape, target) == torch.Size(target)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{label} has shape {shape}, which does not broadcast to {variable.label(variable.names[index])}"
            f" of shape {target}; for a different bound per leaf use Product."
        )
