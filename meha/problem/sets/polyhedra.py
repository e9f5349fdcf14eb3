"""Sets given by linear inequalities and equations, and intersections of sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from meha.numerics.quadratic_program import Array, feasible, solve_program
from meha.problem.sets.base import ConvexSet, Face, FlatSet, Product, Rows, check_vector, reached, to_tensors
from meha.tensors.variables import Leaves, Variable, inner, norm, subtract
from meha.tensors.vectors import join

EMPTY = 1e-6  # violation, with rows scaled to length 1, from which on the inequalities count as contradictory
ON_FACE = 1e-8  # slack, relative to 1 + |b| and with rows scaled to length 1, up to which a row is active
ROUNDS = 10_000  # most rounds of Dykstra's method
ACCURACY = 1e-10  # change in a round, relative to 1 + ||z||, at which Dykstra's method stops


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
            wanted = "normal must not be zero, and normal and offset must be finite"
            raise ValueError(f"HalfSpace: {wanted}, got offset={self.offset}.")

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
            shapes = f"{tuple(self.matrix.shape)} and {tuple(self.rhs.shape)}"
            wanted = "matrix must have two dimensions and at least one row, and rhs one entry per row"
            raise ValueError(f"AffineSet: {wanted}, got shapes {shapes}.")
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


@dataclass(frozen=True, eq=False)
class Polyhedron(FlatSet):
    """{z : A z <= b, A_eq z = b_eq}.

    The projection is that of a quadratic program, solved to rounding in double precision on the CPU: by an interior point
    method, which finds the active rows, and by the equations of these. Its derivative keeps the active rows fixed.

    Args:
        A, b: inequalities, one row each.
        A_eq, b_eq: equations; rows may depend on each other.

    >>> triangle = Polyhedron([[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], [1.0, 0.0, 0.0])
    >>> triangle.project(torch.tensor([2.0, 1.0]))
    tensor([1., 0.])
    """

    A: Tensor | None = None
    b: Tensor | None = None
    A_eq: Tensor | None = None
    b_eq: Tensor | None = None
    iterative = True
    arrays: tuple[Array, Array, Array, Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        to_tensors(self, *(name for name in ("A", "b", "A_eq", "b_eq") if getattr(self, name) is not None))
        widths = {matrix.shape[-1] for matrix in (self.A, self.A_eq) if matrix is not None}
        for matrix, right, names in ((self.A, self.b, ("A", "b")), (self.A_eq, self.b_eq, ("A_eq", "b_eq"))):
            if (matrix is None) != (right is None):
                raise ValueError(f"Polyhedron: {names[0]} and {names[1]} belong together; give both, or neither.")
            if matrix is not None and right is not None and (matrix.ndim != 2 or right.shape != matrix.shape[:1]):
                shapes = f"{tuple(matrix.shape)} and {tuple(right.shape)}"
                wanted = f"{names[0]} must be a matrix and {names[1]} have one entry per row"
                raise ValueError(f"Polyhedron: {wanted}, got shapes {shapes}.")
        if len(widths) != 1:
            wanted = "A and b, A_eq and b_eq, or all four with as many columns"
            raise ValueError(f"Polyhedron: give {wanted}, got columns {sorted(widths)}.")
        arrays = (*_arrays(self.A, self.b, *widths), *_arrays(self.A_eq, self.b_eq, *widths))
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError("Polyhedron: A, b, A_eq and b_eq must be finite; leave out rows without a bound.")
        object.__setattr__(self, "arrays", arrays)
        origin = np.zeros(arrays[0].shape[1])
        known = solve_program(np.eye(len(origin)), origin, *arrays).solved  # a projection tells in most cases, and is quicker
        violation = 0.0 if known else feasible(*arrays, origin)[1]
        if violation > EMPTY:
            found = f"every point violates a row by {violation:.1e} or more"
            raise ValueError(f"Polyhedron: is empty: {found}; check the signs (A z <= b).")

    def check(self, variable: Variable, chosen: list[int]) -> None:
        matrix = self.A if self.A is not None else self.A_eq
        assert matrix is not None
        check_vector(matrix[0], variable, chosen, "Polyhedron: a row", scalar=False)

    def as_constraints(self, leaves: Leaves) -> Rows:
        z = join(leaves)
        A, b, C, d = (torch.from_numpy(array).to(z) for array in self.arrays)
        return A @ z - b, C @ z - d

    def project_vector(self, z: Tensor) -> Tensor:
        A, b, C, d = self.arrays
        point = z.detach().double().cpu().numpy()
        answer = solve_program(np.eye(len(point)), -point, A, b, C, d)
        active = answer.lam > 0  # polished: exact zeros elsewhere
        rows = torch.from_numpy(np.vstack([A[active], C])).to(z.device)
        nearest = torch.from_numpy(answer.z).to(z)
        if not z.requires_grad:
            return nearest
        # The derivative of the projection: onto the directions along the active rows; pinv, as these may be dependent.
        kept = z if not len(rows) else z - (torch.linalg.pinv(rows) @ rows).to(z) @ z
        return nearest + kept - kept.detach()  # the value of nearest with the derivative of kept

    def face(self, leaves: Leaves) -> Face:
        A, b, C, _ = self.arrays
        z = join(leaves).detach().double().cpu().numpy()
        lengths = np.maximum(np.sqrt((A * A).sum(axis=1)), np.finfo(float).tiny)
        # The point may be rounded to single precision, and the slack with it.
        tight = (b - A @ z) / lengths <= max(ON_FACE, float(np.sqrt(torch.finfo(leaves[0].dtype).eps))) * (
            1 + np.abs(b) / lengths
        )
        rows = np.vstack([A[tight], C])
        free = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
        return Face(free, torch.from_numpy(rows).to(leaves[0]) if len(rows) else None)


class Intersection(ConvexSet):
    """The points that several sets have in common.

    The projection is Dykstra's: projections on the sets in turn, each with the correction of its last turn, until a round
    changes the point by less than 1e-10 (1 + ||z||), or by rounding in single precision, and each set contains it to that
    accuracy. Polyhedra, boxes and half-spaces alone are better stated as one :class:`Polyhedron`, whose projection is exact.

    >>> from meha.problem.sets import Box, L2Ball
    >>> Intersection(Box(0.5, 1.0), L2Ball(1.0)).project(torch.tensor([2.0, 0.0])).round(decimals=4)
    tensor([0.8660, 0.5000])
    """

    iterative = True

    def __init__(self, *sets: ConvexSet) -> None:
        if len(sets) < 2:
            raise ValueError(f"Intersection: expected two sets or more, got {len(sets)}.")
        for member in sets:
            if not isinstance(member, ConvexSet):
                raise TypeError(f"Intersection: expected sets of meha.sets, got {type(member).__name__}.")
            if isinstance(member, Product):
                raise TypeError("Intersection: a Product names leaves; put the Intersection inside the Product instead.")
        self.sets = sets
        self.coordinatewise = all(member.coordinatewise for member in sets)

    def __repr__(self) -> str:
        return f"Intersection({', '.join(repr(member) for member in self.sets)})"

    def check(self, variable: Variable, chosen: list[int]) -> None:
        for member in self.sets:
            member.check(variable, chosen)

    def project_leaves(self, leaves: Leaves) -> Leaves:
        eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves)
        corrections = [[torch.zeros_like(leaf) for leaf in leaves] for _ in self.sets]
        point = leaves
        for _ in range(ROUNDS):
            before, far = point, 0.0
            for i, member in enumerate(self.sets):
                start = [p + c for p, c in zip(point, corrections[i], strict=True)]
                new = member.project_leaves(start)
                # Without these, the limit would be a point of the intersection, but not the nearest (Boyle, Dykstra 1986).
                corrections[i] = [s - n for s, n in zip(start, new, strict=True)]
                far = max(far, _distance(point, new))
                point = new
            limit = max(ACCURACY, math.sqrt(len(self.sets)) * 2 * eps) * (1 + float(norm(point).detach()))
            if max(far, _distance(before, point)) <= limit:  # a round may change nothing while the sets still disagree
                break
        return point

    def face(self, leaves: Leaves) -> Face | None:
        faces = [member.face(leaves) for member in self.sets]
        known = [face for face in faces if face is not None]
        if len(known) < len(faces):
            return None
        free = [torch.stack(masks).all(dim=0) for masks in zip(*(face.free for face in known), strict=True)]
        rows = [face.rows for face in known if face.rows is not None]
        return Face(free, torch.cat(rows) if rows else None)

    def as_constraints(self, leaves: Leaves) -> Rows | None:
        members = [member.as_constraints(leaves) for member in self.sets]
        known = [rows for rows in members if rows is not None]
        if len(known) < len(members):
            return None
        inequalities, equations = (torch.cat(rows) for rows in zip(*known, strict=True))
        return inequalities, equations


def _distance(a: Leaves, b: Leaves) -> float:
    with torch.no_grad():
        return float(norm(subtract(a, b)))


def _arrays(matrix: Tensor | None, right: Tensor | None, width: int) -> tuple[Array, Array]:
    """Return a matrix and a right-hand side as arrays, without rows if they are None."""
    if matrix is None or right is None:
        return np.zeros((0, width)), np.zeros(0)
    return matrix.detach().double().cpu().numpy(), right.detach().double().cpu().numpy()
