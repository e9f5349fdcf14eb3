"""Hessians: f_yy at one point after another, with as few products as its structure allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meha._second_order import Expansion
from meha._variables import Variable
from meha.methods.newton.tuning import TUNING

__all__ = ["Hessians", "colours"]

SAVED = ("quadratic", "constant", "varies", "matrix", "groups", "dense", "formulas")
"""What a checkpoint keeps."""


class Hessians:
    """The last Hessian of f in y, and what changes from one to the next.

    A product with a fixed vector shows whether a Hessian has changed. Where it has, and changes were seen to have a pattern (a
    diagonal, or a block for each of several independent problems), a few products give the new one, and the fixed vector
    checks it.

    Args:
        eps: rounding error of the variables.

    Attributes:
        quadratic: whether f is quadratic in y; None while unknown.
        constant, varies: whether the Hessian was seen to be the same, or another, at two x.
        matrix: the last Hessian; None before the first.
        groups: the pattern of changes, and the group of each column, so that no row has two entries in one group; None if
            unknown.
        dense: whether changes have no such pattern.
        formulas: whether losses in f may give the Hessian by their formulas.
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.quadratic: bool | None = None
        self.constant = self.varies = self.dense = False
        self.formulas = True
        self.matrix: Tensor | None = None
        self.groups: tuple[Tensor, Tensor] | None = None
        self._x: Variable | None = None
        self._fixed: Tensor | None = None
        self._vectors: Tensor | None = None  # the sums of unit vectors of each group, and a fixed vector

    def known_at(self, x: Variable) -> bool:
        """Whether the matrix is that of some y at this x."""
        return self.matrix is not None and self._x is x

    def still_quadratic(self, at: Expansion) -> bool:
        """Check at a point that the Hessian is what it was taken for."""
        probe = self.probe(at.y)
        if self.matrix is None or not self.agrees(self.matrix, at.product(probe, g=False), probe):
            self.quadratic, self.constant = False, False
        return bool(self.quadratic)

    def at(self, at: Expansion) -> Tensor:
        """The Hessian at a point."""
        known = self.matrix
        if known is None:
            return self._keep(at, self._computed(at))
        same_x = self._x is at.x
        if self.quadratic and same_x:
            return known
        probe = self.probe(at.y)
        if self.quadratic is not False and not (self.varies and not same_x):
            if self.agrees(known, at.product(probe, g=False), probe):
                self.quadratic, self.constant = True, self.constant or not same_x
                self._x = at.x
                return known
            self.constant = False
            if same_x:
                self.quadratic = False
            else:
                self.varies = True
        new = self._updated(at, known, probe)
        return self._keep(at, self._compared(self._computed(at), known) if new is None else new)

    def _computed(self, at: Expansion) -> Tensor:
        """The Hessian by formulas of losses, if these are all that matters and the fixed vector agrees; else by its rows."""
        if self.formulas and len(at.y) >= TUNING.formulas:
            matrix, probe = at.by_formula(), self.probe(at.y)
            if matrix is not None and self.agrees(matrix, at.product(probe, g=False), probe):
                return matrix
            self.formulas = False
        return at.rows()

    def _keep(self, at: Expansion, matrix: Tensor) -> Tensor:
        self.matrix, self._x = matrix, at.x
        return matrix

    def agrees(self, matrix: Tensor, product: Tensor, vector: Tensor) -> bool:
        """Whether products of a Hessian, or of each of several, with a vector are those of a matrix."""
        expected = matrix @ vector
        change = float(torch.linalg.vector_norm(product - expected, dim=-1).max())
        return change <= TUNING.same * self.eps * float(torch.linalg.vector_norm(expected))

    def _updated(self, at: Expansion, known: Tensor, probe: Tensor) -> Tensor | None:
        """The Hessian from that before and a few products; None if changes have no pattern, or broke it."""
        if self.groups is None:
            return None
        pattern, group = self.groups
        vectors = self._vectors
        if vectors is None:
            vectors = torch.zeros(int(group.max()) + 2, len(known), dtype=known.dtype, device=known.device)
            vectors[group, torch.arange(len(known), device=known.device)] = 1.0
            vectors[-1] = probe
            self._vectors = vectors
        products = at.products(vectors)
        changes = products[:-1] - vectors[:-1] @ known
        new = known + torch.where(pattern, changes[group].T, 0.0)
        if self.agrees(new, products[-1], probe):
            return new
        self.groups = None
        return None

    def _compared(self, new: Tensor, known: Tensor) -> Tensor:
        """The new matrix, after a look at where it differs from the one before."""
        if not self.dense:
            change = (new - known).abs()
            pattern = change > TUNING.same * self.eps * new.abs().max()
            group = colours(pattern)
            self.dense, self.groups = group is None, None if group is None else (pattern, group)
            self._vectors = None
        return new

    def state_dict(self) -> dict[str, Any]:
        """What is known, in plain tensors and numbers."""
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what is known."""
        for name in SAVED:
            setattr(self, name, state[name])
        self._x = self._vectors = None

    def probe(self, y: Tensor) -> Tensor:
        """A fixed vector without zeros."""
        if self._fixed is None:
            self._fixed = torch.arange(len(y), dtype=y.dtype, device=y.device).cos()
        return self._fixed


def colours(pattern: Tensor) -> Tensor | None:
    """A group for each column of a symmetric pattern, so that no row has two entries in one group; None if that saves little.

    >>> colours(torch.eye(9, dtype=torch.bool))
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0])
    >>> colours(torch.block_diag(*[torch.ones(2, 2)] * 5).bool())
    tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    >>> colours(torch.ones(4, 4, dtype=torch.bool)) is None
    True
    """
    n = len(pattern)
    pattern = pattern | pattern.T
    if int(pattern.sum(1).max()) > TUNING.sparse * n:
        return None
    weights = pattern.to(torch.float32)
    near = (weights @ weights).bool().cpu()
    group = torch.full((n,), -1)
    for i in range(n):
        taken = set(group[:i][near[i, :i]].tolist())
        group[i] = next(k for k in range(n) if k not in taken)
    return group.to(pattern.device) if int(group.max()) + 1 <= TUNING.sparse * n else None
