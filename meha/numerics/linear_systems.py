"""Linear systems H v = b with a symmetric operator H that is given by matrix-vector products only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from meha.numerics.tolerances import TIGHT
from meha.tensors.variables import Leaves, add_, inner, norm

Operator = Callable[[Leaves], Leaves]


class CurvatureError(ArithmeticError):
    """Conjugate gradients met a direction p with <p, H p> <= 0, up to rounding.

    Attributes:
        curvature: <p, H p>; positive if only rounding may have made it so.
        v, residual: the solution so far and its relative residual; p itself if it is the first direction, along which a convex
            function of Hessian H would fall without end (the truncated Newton rule of Dembo and Steihaug, 1983).
    """

    def __init__(self, curvature: float, v: Leaves, residual: float) -> None:
        super().__init__("the Hessian of lower in y is not positive definite")
        self.curvature, self.v, self.residual = curvature, v, residual


def conjugate_gradients(
    apply: Operator, rhs: Leaves, *, steps: int, tol: float = 0.0, precondition: Operator | None = None
) -> tuple[Leaves, float]:
    """Solve H v = rhs by conjugate gradients (Hestenes and Stiefel, 1952) from v = 0; return v and its relative residual.

    Args:
        apply: v -> H v for a positive definite H.
        steps: the largest number of products.
        tol: relative residual at which to stop; at least a few units of rounding.
        precondition: r -> P r, where P resembles the inverse of H.

    Raises:
        CurvatureError: H has a direction without positive curvature, so the system may have no solution or many.

    >>> v, residual = conjugate_gradients(lambda v: [2 * v[0]], [torch.tensor([1.0, 3.0])], steps=5)
    >>> v, residual
    ([tensor([0.5000, 1.5000])], 0.0)
    """
    eps = max(torch.finfo(leaf.dtype).eps for leaf in rhs)
    exponent = math.frexp(float(norm(rhs)))[1]
    scale = math.ldexp(1.0, max(-100, min(-exponent, 100)))  # a power of two, so that squares neither vanish nor overflow
    v, r = [torch.zeros_like(leaf) for leaf in rhs], [leaf * scale for leaf in rhs]
    z = r if precondition is None else precondition(r)
    p, rz = [leaf.clone() for leaf in z], float(inner(r, z))
    size = left = float(norm(r))
    for k in range(steps):
        if left <= max(tol, 4 * eps) * size:  # below a few eps, only rounding is left
            break
        image = apply(p)
        curvature = float(inner(p, image))
        # Relative to |p| |H p|: rounding alone may turn a curvature of zero into a small positive one.
        if not curvature > eps**TIGHT * float(norm(p)) * float(norm(image)):
            raise CurvatureError(curvature, [leaf / scale for leaf in (v if k else p)], left / size)
        length = rz / curvature
        add_(v, p, length)
        add_(r, image, -length)
        left = float(norm(r))
        z = r if precondition is None else precondition(r)
        old, rz = rz, float(inner(r, z))
        p = [a + (rz / old) * b for a, b in zip(z, p, strict=True)]
    return [leaf / scale for leaf in v], left / size if size else 0.0


def neumann_series(apply: Operator, rhs: Leaves, *, step: float, terms: int) -> Leaves:
    """Approximate H^-1 rhs by step * sum_{j <= terms} (I - step H)^j rhs with ``terms`` products; needs step < 2 / ||H||.

    >>> neumann_series(lambda v: [2 * v[0]], [torch.tensor([1.0])], step=0.25, terms=2)
    [tensor([0.4375])]
    """
    v = [leaf.clone() for leaf in rhs]
    for _ in range(terms):
        image = apply(v)
        v = [b + a - step * h for b, a, h in zip(rhs, v, image, strict=True)]  # Horner's rule: no powers are kept
    return [step * leaf for leaf in v]
