"""Symmetric linear systems of many models at once, on the coefficients that are free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["DenseSystem", "DualSystem"]

RIDGE = 1e-10
"""Added to the diagonal of a Hessian, relative to its mean, for faces on which features depend on each other."""
GROWTH = 100.0
"""Factor by which it grows where that does not suffice."""
FLOOR = 1e-9
"""Smallest diagonal of a system in its dual form, relative to the mean (for intercepts, which have no penalty)."""


@dataclass(frozen=True, eq=False)
class DenseSystem:
    """Matrices H (B, m, m), restricted to the valid rows and columns (B, m); the others become those of the identity."""

    H: Tensor
    valid: Tensor

    def without(self, removed: Tensor) -> DenseSystem:
        """The systems without some coefficients (B, m)."""
        return DenseSystem(self.H, self.valid & ~removed)

    def solve(self, right: Tensor) -> Tensor:
        """Solutions for right-hand sides (B, m, k)."""
        return torch.cholesky_solve(right, self._factor)

    @cached_property
    def _factor(self) -> Tensor:
        """Cholesky factors; the diagonal grows where a matrix is not positive definite."""
        valid = self.valid
        diagonal = torch.where(valid, self.H.diagonal(dim1=1, dim2=2), 0.0)
        shift = RIDGE * diagonal.sum(1) / valid.sum(1).clamp(min=1) + torch.finfo(self.H.dtype).tiny
        H = torch.where(valid[:, :, None] & valid[:, None, :], self.H, 0.0)
        while True:
            factor, info = torch.linalg.cholesky_ex(H + torch.diag_embed(torch.where(valid, shift[:, None], 1.0)))
            if not bool(info.any()):
                return factor
            shift = torch.where(info > 0, GROWTH * shift, shift)


@dataclass(frozen=True, eq=False)
class DualSystem:
    """Matrices A' diag(weights) A + diag(diagonal) for data A (n, m) with more coefficients than examples.

    They are solved with matrices of n rows. Where coefficients that share a weight have the same diagonal, sums of ``kernels``
    A_c A_c' (C, n, n) give these matrices; ``members`` names a coefficient of each.
    """

    A: Tensor
    weights: Tensor
    diagonal: Tensor
    kernels: Tensor | None = None
    members: Tensor | None = None

    def without(self, removed: Tensor) -> DualSystem:
        """The same systems: nothing is removed where there are no kinks."""
        return self

    def solve(self, right: Tensor) -> Tensor:
        """Solutions for right-hand sides (B, m, k)."""
        root, inverse, factor = self._parts
        first = inverse * right
        inner = torch.cholesky_solve(root * (self.A @ first), factor)
        return first - inverse * (self.A.t() @ (root * inner))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        root = self.weights.sqrt()[:, :, None]
        inverse = 1 / torch.maximum(self.diagonal, FLOOR * self.diagonal.mean(1, keepdim=True))
        if self.kernels is None or self.members is None:
            inner = (self.A * inverse[:, None, :]) @ self.A.t()
        else:
            inner = (inverse[:, self.members] @ self.kernels.flatten(1)).view(len(inverse), *self.kernels.shape[1:])
        inner = inner * root * root.mT
        inner.diagonal(dim1=1, dim2=2).add_(1.0)
        return root, inverse[:, :, None], torch.linalg.cholesky(inner)
