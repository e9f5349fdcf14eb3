"""Linear systems H v = b with a symmetric operator H that is given by matrix-vector products only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from meha.tensors.variables import Leaves, add_, inner, norm

Operator = Callable[[Leaves], Leaves]


class CurvatureError(ArithmeticError):
    """Conjugate gradients met a direction p with <p, H p> <= 0."""


def conjugate_gradients(apply: Operator, rhs: Leaves, *, steps: int, tol: float = 0.0) -> tuple[Leaves, float]:
    """Solve H v = rhs by conjugate gradients (Hestenes and Stiefel, 1952) from v = 0; return v and its relative residual.

    Args:
        apply: v -> H v for a positive definite H.
        steps: the largest number of products.
        tol: relative residual at which to stop; at least a few units of rounding.

    Raises:
        CurvatureError: H has a direction without positive curvature, so the system may have no solution or many.

    >>> v, residual = conjugate_gradients(lambda v: [2 * v[0]], [torch.tensor([1.0, 3.0])], steps=5)
    >>> v, residual
    ([tensor([0.5000, 1.5000])], 0.0)
    """
    eps = max(torch.finfo(leaf.dtype).eps for leaf in rhs)
    exponent = math.frexp(float(norm(rhs)))[1]
    scale = math.ldexp(1.0, max(-100, min(-exponent, 100)))  # a power of two, so that squares neither vanish nor overflow
    v = [torch.zeros_like(leaf) for leaf in rhs]
    r, p = [leaf * scale for leaf in rhs], [leaf * scale for leaf in rhs]
    size = float(norm(r))
    rr = size * size
    for _ in range(steps):
        if math.sqrt(rr) <= max(tol, 4 * eps) * size:  # below a few eps, only rounding is left
            break
        image = apply(p)
        curvature = float(inner(p, image))
        # Relative to |p| |H p|: rounding alone may turn a curvature of zero into a small positive one.
        if curvature <= eps**0.75 * float(norm(p)) * float(norm(image)):
            raise CurvatureError("the Hessian of lower in y is not positive definite")
        length = rr / curvature
        add_(v, p, length)
        add_(r, image, -length)
        rr_next = float(norm(r)) ** 2
        p = [a + (rr_next / rr) * b for a, b in zip(r, p, strict=True)]
        rr = rr_next
    return [leaf / scale for leaf in v], math.sqrt(rr) / size if size else 0.0


def least_squares(apply: Operator, rhs: Leaves, *, steps: int, tol: float) -> tuple[Leaves, float]:
    """Minimise ||H v - rhs|| for a symmetric H, which may be singular; return the shortest v and its relative residual.

    The method is conjugate gradients on the normal equations H^2 v = H rhs, with two products per iteration.

    >>> least_squares(lambda v: [v[0] * torch.tensor([2.0, 0.0])], [torch.tensor([3.0, 4.0])], steps=5, tol=0.0)
    ([tensor([1.5000, 0.0000])], 0.8)
    """
    eps = max(torch.finfo(leaf.dtype).eps for leaf in rhs)
    v, r = [torch.zeros_like(leaf) for leaf in rhs], [leaf.clone() for leaf in rhs]
    s = apply(r)  # of r itself: H^2 is never applied as such, which keeps its rounding errors out
    p = [leaf.clone() for leaf in s]
    ss = float(inner(s, s))
    least, size = max(tol, 4 * eps) ** 2 * ss, float(norm(rhs))
    for _ in range(steps):
        if ss <= least:
            break
        image = apply(p)
        length = ss / float(inner(image, image))
        add_(v, p, length)
        add_(r, image, -length)
        s = apply(r)
        old, ss = ss, float(inner(s, s))
        p = [a + (ss / old) * b for a, b in zip(s, p, strict=True)]
    return v, float(norm(r)) / size if size else 0.0


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
