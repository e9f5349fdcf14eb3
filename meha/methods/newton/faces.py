"""Faces of g and Y: the coordinates of y that can move, and the equations that they keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meha._leaves import Leaves
from meha._oracle import Oracle
from meha._second_order import Flat
from meha._variables import Variable
from meha.problem import Problem

__all__ = ["Face", "Faces", "unknown_faces"]


@dataclass(frozen=True, eq=False)
class Face:
    """The surroundings of a point in which f + g is smooth.

    Attributes:
        index: the coordinates that can move; None for all.
        rows: directions d also satisfy rows @ d[index] = 0; None without equations.
        basis: an orthonormal basis of these directions; None without equations.
    """

    index: Tensor | None = None
    rows: Tensor | None = None
    basis: Tensor | None = None

    @property
    def trivial(self) -> bool:
        """Whether all of space is one face."""
        return self.index is None

    def equals(self, other: Face | None) -> bool:
        """Whether both have the same coordinates and equations."""
        if other is None or self.index is None or other.index is None:
            return other is not None and self.index is None and other.index is None
        same = torch.equal(self.index, other.index)
        if not same or self.rows is None or other.rows is None:
            return same and self.rows is None and other.rows is None
        return torch.equal(self.rows, other.rows)

    def count(self, size: int) -> int:
        """The number of coordinates that can move, of ``size``."""
        return size if self.index is None else self.index.numel()

    def reduce(self, vector: Tensor) -> Tensor:
        """The part of a vector along the face, in coordinates of the face."""
        part = vector if self.index is None else vector[self.index]
        return part if self.basis is None else self.basis.T @ part

    def extend(self, part: Tensor, size: int) -> Tensor:
        """The vector with this part along the face, and zeros elsewhere."""
        part = part if self.basis is None else self.basis @ part
        return part if self.index is None else part.new_zeros(size).index_copy_(0, self.index, part)


class Faces:
    """Proximal map and faces of g + indicator of Y for vectors; :func:`unknown_faces` must have nothing against the problem."""

    def __init__(self, oracle: Oracle, flat: Flat) -> None:
        problem, y = oracle.problem, flat.variable
        self._prox, self._flat, self.smooth = oracle.prox, flat, oracle.prox.identity
        self._terms = problem.g.terms(y)
        self._sets = [] if problem.y_set is None else problem.y_set.parts(y)
        self.quadratic = all(term.quadratic for term, _ in self._terms)
        self.separable = all(term.separable for term, _ in self._terms)

    def prox(self, x: Variable, vector: Tensor, step: float) -> Tensor:
        """argmin_w step * (g + indicator of Y)(x, w) + 0.5 ||w - vector||^2."""
        leaves = [leaf.clone() for leaf in self._flat.split(vector)]
        self._prox(x.value, leaves, step)
        return self._flat.join(leaves)

    def feasible(self, x: Variable, vector: Tensor, start: Tensor) -> Tensor:
        """The end of a move from ``start``, cut at kinks of g and projected into Y."""
        leaves, old = self._flat.split(vector), self._flat.split(start)
        leaves = list(leaves)
        for term, chosen in self._terms:
            for i, leaf in zip(chosen, term.cut([leaves[i] for i in chosen], [old[i] for i in chosen]), strict=True):
                leaves[i] = leaf
        return self.prox(x, self._flat.join(leaves), torch.finfo(vector.dtype).tiny)

    def at(self, vector: Tensor) -> Face:
        """The face of a point that a proximal map returned."""
        if self.smooth:
            return Face()
        leaves = self._flat.split(vector)
        free: Leaves = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
        equations: list[Tensor] = []
        for term, chosen in self._terms:
            for i, mask in zip(chosen, term.free([leaves[i] for i in chosen]) or [], strict=True):
                free[i] = free[i] & mask
        for part, chosen in self._sets:
            face = part.face([leaves[i] for i in chosen])
            assert face is not None
            for i, mask in zip(chosen, face.free, strict=True):
                free[i] = free[i] & mask
            if face.rows is not None:
                equations.append(self._widened(face.rows, chosen))
        mask = torch.cat([leaf.reshape(-1) for leaf in free])
        index = mask.nonzero().reshape(-1)
        if not equations:
            return Face(index)
        rows = torch.cat(equations)[:, index]
        return Face(index, rows, _kernel(rows))

    def _widened(self, rows: Tensor, chosen: list[int]) -> Tensor:
        """Equations of some leaves as equations of all."""
        sizes, wide = self._flat.sizes, rows.new_zeros(len(rows), self._flat.size)
        begin = 0
        for i in chosen:
            first = sum(sizes[:i])
            wide[:, first : first + sizes[i]] = rows[:, begin : begin + sizes[i]]
            begin += sizes[i]
        return wide


def _kernel(rows: Tensor) -> Tensor:
    """An orthonormal basis of {d : rows @ d = 0}."""
    _, values, vectors = torch.linalg.svd(rows, full_matrices=True)
    eps = torch.finfo(rows.dtype).eps
    rank = int((values > max(rows.shape) * eps * values.max()).sum()) if values.numel() else 0
    return vectors[rank:].T.contiguous()


def unknown_faces(problem: Problem, y: Variable) -> str:
    """The name of a term or a set that does not tell its faces; empty if there is none."""
    for term, chosen in problem.g.terms(y):
        if term.free([y.leaves[i].detach() for i in chosen]) is None:
            return type(term).__name__
    for part, chosen in [] if problem.y_set is None else problem.y_set.parts(y):
        if part.face([y.leaves[i].detach() for i in chosen]) is None:
            return type(part).__name__
    return ""
