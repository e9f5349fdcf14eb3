"""Convex quadratic functions of y, read from what the user wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meha._functions import Function
from meha._leaves import norm
from meha._oracle import Oracle
from meha._variables import Variable

__all__ = ["Quadratic", "as_vector", "read_quadratic"]

BLOCK = 64
"""Hessian-vector products between two looks at whether the Hessian is known."""

PROBES = 3
"""Random points at which a function is compared with the quadratic that it should be."""


@dataclass(frozen=True)
class Quadratic:
    """q(y) = ||factor y - target||^2 / 2 + <linear, y> + constant; linear is zero where a target can express all of q.

    >>> q = Quadratic(torch.tensor([[2.0, 0.0]]), torch.tensor([1.0]), torch.tensor([0.0, 1.0]), 3.0)
    >>> y = torch.tensor([1.0, 2.0])
    >>> q(y), q.gradient(y), q.difference(y, torch.zeros(2))
    (5.5, tensor([2., 1.]), 2.0)
    """

    factor: Tensor
    target: Tensor
    linear: Tensor
    constant: float = 0.0

    def __call__(self, y: Tensor) -> float:
        return float((self.factor @ y - self.target).square().sum() / 2 + self.linear @ y) + self.constant

    def gradient(self, y: Tensor) -> Tensor:
        """q'(y)."""
        return self.factor.T @ (self.factor @ y - self.target) + self.linear

    def difference(self, y: Tensor, z: Tensor) -> float:
        """q(y) - q(z) without cancellation."""
        d = y - z
        return float((self.factor @ d).square().sum() / 2 + self.gradient(z) @ d)

    @cached_property
    def smoothness(self) -> float:
        """The largest eigenvalue of the Hessian."""
        return float(torch.linalg.matrix_norm(self.factor, 2)) ** 2 if len(self.factor) else 0.0


def read_quadratic(oracle: Oracle, function: Function, x: Variable, y: Variable, reader: str = "VFiDCA") -> Quadratic:
    """F or f as a quadratic function of y; refused, in the name of a reader, if it is none, not convex, or depends on x."""
    needed = f"{function.level}: {reader} needs a convex quadratic function of y alone"
    leaf, at, generator = y.leaves[0], as_vector(y), torch.Generator().manual_seed(0)
    _, (gradient,) = oracle.gradient(y, [(1.0, function, x, y)])
    slope, products = gradient.reshape(-1).double().cpu(), oracle.hessian([(1.0, function, x, y)])
    accuracy = torch.finfo(leaf.dtype).eps ** 0.5

    def apply(vector: Tensor) -> Tensor:
        return products([vector.to(leaf).reshape(leaf.shape)], y)[0][0].reshape(-1).double().cpu()

    values, vectors = _eigen(apply, len(at), accuracy, generator)
    largest = float(values.abs().max())
    if float(values.min()) < -accuracy * largest:
        raise ValueError(f"{needed}, and its Hessian has the eigenvalue {float(values.min()):.3g}; use MEHA.")
    kept = values > torch.finfo(leaf.dtype).eps * len(at) * largest
    factor = (values[kept].sqrt() * vectors[:, kept]).T.contiguous()
    target = factor @ at - (factor @ slope) / values[kept]
    linear = slope - factor.T @ (factor @ at - target)
    linear = torch.where(norm([linear]) <= accuracy * norm([slope]), 0.0, linear)
    quadratic = Quadratic(factor, target, linear)
    quadratic = dataclasses.replace(quadratic, constant=float(function(x, y)) - quadratic(at))

    for _ in range(PROBES):
        other_x, other_y = x.copy(), y.copy()
        for variable in (other_x, other_y):
            for part in variable.leaves:
                part.add_((1 + float(part.abs().max())) * (2 * torch.rand(part.shape, generator=generator) - 1).to(part))
        oracle.project(other_x.value, other_x.leaves, 1.0)
        there = as_vector(other_y)
        expected, found, moved = quadratic(there), float(function(x, other_y)), float(function(other_x, other_y))
        allowed = 10 * accuracy * (abs(expected) + abs(quadratic.constant) + float(slope.abs() @ there.abs()))
        if not abs(found - expected) <= allowed:
            raise ValueError(f"{needed}, and it is not quadratic: {found:.6g} instead of {expected:.6g} at some y; use MEHA.")
        if not abs(moved - found) <= allowed:
            raise ValueError(f"{needed}, and its value changes with x; use MEHA.")
    return quadratic


def _eigen(apply: Callable[[Tensor], Tensor], size: int, accuracy: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, known by products with it; some or all of its zeros are left out.

    Products with random vectors span the range of the matrix as soon as there are as many as its rank.
    """

    def images(vectors: Tensor) -> Tensor:
        return torch.stack([apply(vector) for vector in vectors.T], dim=1)

    def random(count: int) -> Tensor:
        return torch.randn(size, count, generator=generator, dtype=torch.float64, device="cpu")

    basis = torch.zeros(size, 0, dtype=torch.float64)
    while basis.shape[1] < size:
        basis = torch.linalg.qr(torch.cat([basis, images(random(min(BLOCK, size - basis.shape[1])))], dim=1))[0]
        probe = images(random(1))
        if norm([probe - basis @ (basis.T @ probe)]) <= 1e-3 * accuracy * norm([probe]):
            break
    inside = basis.T @ images(basis)
    values, vectors = torch.linalg.eigh((inside + inside.T) / 2)
    return values, basis @ vectors


def as_vector(y: Variable) -> Tensor:
    """y as a new vector in double precision on the host."""
    return y.leaves[0].detach().reshape(-1).double().cpu().clone()
