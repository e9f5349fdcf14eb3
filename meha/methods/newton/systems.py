"""Linear systems with the Hessian of the lower level on a face: dense factors and conjugate gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from meha._second_order import Clock
from meha.methods.newton.faces import Face
from meha.methods.newton.tuning import TUNING

__all__ = ["Factor", "conjugate_gradients", "factorise", "semidefinite"]


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of the Hessian H on a face.

    Attributes:
        face: the face.
        lower: the Cholesky factor; None if H is not positive definite.
        scale, values, vectors: the eigenvalues of H after a division by scale on both sides; None if H is positive definite.
        pivot: the smallest pivot relative to its diagonal entry, 1 for diagonal matrices, 0 for singular ones.
    """

    face: Face
    lower: Tensor | None
    scale: Tensor | None = None
    values: Tensor | None = None
    vectors: Tensor | None = None
    pivot: float = 0.0

    @property
    def definite(self) -> bool:
        """Whether H is positive definite, up to rounding."""
        return self.lower is not None

    def solve(self, vector: Tensor) -> Tensor:
        """H^-1 v along the face; with |H| in place of H, bounded below, where H is not positive definite."""
        part = self.face.reduce(vector)
        if not part.numel():
            return torch.zeros_like(vector)
        if self.lower is not None and len(part) <= TUNING.inverted and self.pivot >= TUNING.well_conditioned:
            solution = self._inverse @ part
        elif self.lower is not None:
            solution = torch.cholesky_solve(part[:, None], self.lower)[:, 0]
        else:
            scale, values, vectors = self._eigen()
            sizes = values.abs()
            sizes = sizes.clamp(min=TUNING.floor * float(sizes.max()))
            solution = vectors @ ((vectors.T @ (part / scale)) / sizes) / scale
        return self.face.extend(solution, vector.numel())

    @cached_property
    def _inverse(self) -> Tensor:
        assert self.lower is not None
        return torch.cholesky_inverse(self.lower)

    def shortest(self, vector: Tensor) -> tuple[Tensor, float]:
        """The least-squares solution of H v = vector along the face without the flat directions, and its relative residual."""
        part = self.face.reduce(vector)
        scale, values, vectors = self._eigen()
        cutoff = TUNING.singular * len(values) * torch.finfo(values.dtype).eps * float(values.abs().max())
        inverse = torch.where(values.abs() > cutoff, 1 / values, 0.0)
        image = vectors.T @ (part / scale)
        size = float(torch.linalg.vector_norm(image))
        missed = float(torch.linalg.vector_norm(torch.where(inverse == 0, image, 0.0)))
        return self.face.extend(vectors @ (inverse * image) / scale, vector.numel()), missed / size if size else 0.0

    @property
    def indefinite(self) -> bool:
        """Whether H has a direction of negative curvature, beyond rounding."""
        least = torch.finfo(self.values.dtype).eps ** TUNING.loose_power if self.values is not None else 0.0
        return self.values is not None and float(self.values[0]) < -least * float(self.values.abs().max())

    def downwards(self, size: int) -> Tensor | None:
        """The direction of the most negative curvature; None if there is none."""
        if not self.indefinite:
            return None
        scale, _, vectors = self._eigen()
        return self.face.extend(vectors[:, 0] / scale, size)

    def _eigen(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.scale is not None
        assert self.values is not None
        assert self.vectors is not None
        return self.scale, self.values, self.vectors

    def state_dict(self) -> dict[str, object]:
        """Everything, as plain tensors and numbers."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "face": vars(self.face)}

    @classmethod
    def restored(cls, state: dict[str, object]) -> Factor:
        """The factor that wrote ``state``."""
        return cls(**{**state, "face": Face(**state["face"])})  # type: ignore[arg-type]


def factorise(matrix: Tensor, face: Face, clock: Clock) -> Factor:
    """Factorise the Hessian on a face, given with one row and column for each coordinate of the face."""
    begin = time.perf_counter()
    matrix = matrix if face.basis is None else face.basis.T @ matrix @ face.basis
    n, eps = len(matrix), torch.finfo(matrix.dtype).eps
    result = Factor(face, matrix, pivot=1.0)
    if n:
        lower, info = torch.linalg.cholesky_ex(matrix)
        diagonal = matrix.diagonal()
        pivot = float((lower.diagonal().square() / diagonal).min()) if not int(info) else 0.0
        if pivot > TUNING.singular * n * eps:
            result = Factor(face, lower, pivot=pivot)
        else:
            if not bool(torch.isfinite(matrix).all()):
                raise ArithmeticError("the Hessian of lower in y has entries that are not finite")
            scale = diagonal.abs().sqrt()
            scale = torch.where(scale > 0, scale, 1.0)
            scaled = matrix / scale / scale[:, None]
            values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
            result = Factor(face, None, scale, values, vectors)
    clock.algebra += time.perf_counter() - begin
    return result


def semidefinite(hessians: Tensor, eps: float) -> Tensor:
    """Whether a matrix, or each of several, has no negative eigenvalue, beyond rounding.

    >>> semidefinite(torch.stack([torch.eye(2), -torch.eye(2)]), 1e-7)
    tensor([ True, False])
    """
    n = hessians.shape[-1]
    shift = TUNING.singular * n * eps * hessians.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    eye = torch.eye(n, dtype=hessians.dtype, device=hessians.device)
    return torch.linalg.cholesky_ex(hessians + shift[..., None, None] * eye).info == 0


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    right: Tensor,
    tol: float,
    steps: int,
    precondition: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, float, bool]:
    """Solve H v = right with at most ``steps`` products; returns v, its relative residual, and whether H was seen positive.

    At a direction without positive curvature it stops: v is the solution so far, or that direction if it is the first.
    """
    v, r = torch.zeros_like(right), right.clone()
    size = float(torch.linalg.vector_norm(right))
    residual = size
    z = r if precondition is None else precondition(r)
    p, rz = z.clone(), float(torch.dot(r, z))
    for k in range(steps):
        if residual <= tol * size:
            break
        image = apply(p)
        curvature = float(torch.dot(p, image))
        if not curvature > 0:
            return (p if k == 0 else v), residual / size, False
        length = rz / curvature
        v.add_(p, alpha=length)
        r.sub_(image, alpha=length)
        residual = float(torch.linalg.vector_norm(r))
        z = r if precondition is None else precondition(r)
        old, rz = rz, float(torch.dot(r, z))
        p.mul_(rz / old).add_(z)
    return v, residual / size if size else 0.0, True
