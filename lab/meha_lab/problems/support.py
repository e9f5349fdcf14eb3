"""Support vector machines with learned cost and feature scales (primal), or a learned kernel (dual)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast

__all__ = ["dual", "primal"]


def primal(p: int, n: int, *, seed: int, scales: bool = False) -> Blueprint:
    """F = logistic validation loss, f = exp(x_0) times the mean of max(0, 1 - margin)^2 + ||y||^2 / 2, |x_i| <= 4.

    If ``scales``, feature i is multiplied by exp(x_i), i = 1, ..., p.
    """
    (A, b), (A2, b2) = _clouds(np.random.default_rng(seed), p, n)

    def build(cast: Cast) -> Problem:
        margin, margin2 = cast(A * b[:, None]), cast(A2 * b2[:, None])

        def scaled(x: Tensor, y: Tensor) -> Tensor:
            return y * x[1:].exp() if scales else y

        return Problem(
            upper=lambda x, y: softplus(-(margin2 @ scaled(x, y))).mean(),
            lower=lambda x, y: x[0].exp() * (1 - margin @ scaled(x, y)).clamp(min=0).square().mean() + 0.5 * y.square().sum(),
            x_set=Box(-4.0, 4.0),
        )

    return Blueprint(build=build, x0=np.zeros(1 + p * scales), y0=np.zeros(p), measure="excess" if scales else "distance")


def dual(p: int, n: int, *, seed: int) -> Blueprint:
    """f = <y, Q y> / 2 - sum y for 0 <= y <= 1, Q_ij = b_i b_j (k(a_i, a_j) + 0.1 delta_ij), F = logistic validation loss.

    The kernel k(a, a') = exp(-sum_i exp(x_i) (a_i - a'_i)^2 / 2) has a learned width per feature, -5 <= x <= 3.
    F(x, y*(x)) has kinks where an entry of y reaches a bound, and local optima there.
    """
    (A, b), (A2, b2) = _clouds(np.random.default_rng(seed), p, n)

    def build(cast: Cast) -> Problem:
        A_, b_, A2_, b2_ = (cast(part) for part in (A, b, A2, b2))
        ridge = cast(0.1 * np.eye(n))  # makes Q positive definite, so that y is unique

        def kernel(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
            return torch.exp(-0.5 * ((left[:, None] - right[None]).square() @ x.exp()))

        def lower(x: Tensor, y: Tensor) -> Tensor:
            z = b_ * y
            return 0.5 * z @ ((kernel(x, A_, A_) + ridge) @ z) - y.sum()

        return Problem(
            upper=lambda x, y: softplus(-b2_ * (kernel(x, A2_, A_) @ (b_ * y))).mean(),
            lower=lower,
            x_set=Box(-5.0, 3.0),
            y_set=Box(0.0, 1.0),
        )

    return Blueprint(build=build, x0=np.ones(p), y0=np.full(n, 0.5), measure="excess")


def _clouds(rng: np.random.Generator, p: int, n: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Draw training and validation rows of two noisy classes, separated by a curve in the first two features."""
    A = rng.normal(size=(2 * n, p))
    b = np.where(A[:, 0] + 0.5 * A[:, 1] ** 2 - 0.5 + 0.4 * rng.normal(size=2 * n) > 0, 1.0, -1.0)
    return (A[:n], b[:n]), (A[n:], b[n:])
