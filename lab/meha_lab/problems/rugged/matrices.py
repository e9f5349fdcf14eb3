"""Lower levels that factor matrices or recover a vector from squares: saddles, and solutions that differ by a sign."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import tracking
from meha_lab.problems.rugged._minima import best, box_minima, newton

__all__ = ["phase_retrieval", "rank_one", "two_factors"]


def _symmetric(rng: np.random.Generator, m: int) -> Array:
    A = rng.normal(size=(m, m)).round(2)
    return 0.5 * (A + A.T)


def rank_one(m: int, n: int, *, seed: int, gap: float = 1.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = ||y y^T - A(x)||^2 / 4, with A(x) = A_0 + sum_j x_j A_j symmetric.

    y is the leading eigenvector, scaled to the root of its eigenvalue, with the sign that t prefers; other eigenvectors are
    saddles. ``gap`` is the distance of the two largest eigenvalues of A_0.
    """
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(m, m)))[0]
    A0 = Q @ np.diag(np.r_[1 + gap, np.linspace(1, -0.5, m - 1)]) @ Q.T
    As = 0.5 * np.array([_symmetric(rng, m) for _ in range(n)]) / np.sqrt(m)
    s, t = rng.uniform(-1, 1, n).round(2), rng.normal(size=m).round(2)

    def build(cast: Cast) -> Problem:
        A0_, As_ = cast(A0), cast(As)
        return Problem(
            tracking(cast, s, t),
            lambda x, y: 0.25 * (torch.outer(y, y) - A0_ - torch.tensordot(x, As_, 1)).square().sum(),
        )

    def response(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(double(A0) + torch.tensordot(x, double(As), 1))
        y = values[-1].clamp(min=0).sqrt() * vectors[:, -1]  # Eckart and Young (1936), for a symmetric matrix
        return y if float(y @ double(t)) >= 0 else -y

    return Blueprint(
        build=build, x0=np.zeros(n), y0=-0.5 * np.sign(t), response=response, region=Region((-1.5, 1.5), (-1.5, 1.5))
    )


def two_factors(p: int, q: int, n: int, *, seed: int, ridge: float = 0.2) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = ||u v^T - A(x)||^2 / 2 + ridge / 2 ||y||^2 for y = (u, v).

    A(x) = A_0 + sum_j x_j A_j. u and v are the leading singular vectors times sqrt(sigma_1 - ridge), with the sign that t
    prefers; zero and the other singular vectors are saddles.
    """
    rng = np.random.default_rng(seed)
    A0 = np.zeros((p, q))
    A0[: min(p, q), : min(p, q)] = np.diag(np.linspace(2, 1, min(p, q)))
    A0 = np.linalg.qr(rng.normal(size=(p, p)))[0] @ A0 @ np.linalg.qr(rng.normal(size=(q, q)))[0]
    As = 0.5 * rng.normal(size=(n, p, q)).round(2) / np.sqrt(p * q)
    s, t = rng.uniform(-1, 1, n).round(2), rng.normal(size=p + q).round(2)

    def build(cast: Cast) -> Problem:
        A0_, As_ = cast(A0), cast(As)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            misfit = torch.outer(y[:p], y[p:]) - A0_ - torch.tensordot(x, As_, 1)
            return 0.5 * misfit.square().sum() + 0.5 * ridge * y.square().sum()

        return Problem(tracking(cast, s, t), lower)

    def response(x: Tensor) -> Tensor:
        U, sigma, V = torch.linalg.svd(double(A0) + torch.tensordot(x, double(As), 1))
        y = (sigma[0] - ridge).clamp(min=0).sqrt() * torch.cat([U[:, 0], V[0]])
        return y if float(y @ double(t)) >= 0 else -y

    return Blueprint(
        build=build, x0=np.zeros(n), y0=-0.3 * np.sign(t), response=response, region=Region((-1.5, 1.5), (-1.5, 1.5))
    )


def phase_retrieval(m: int, count: int, n: int, *, seed: int) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = mean_i ((a_i^T y)^2 - b_i - (C x)_i)^2 / 4: squares of linear measurements.

    y and -y fit equally well; further basins come from C x, which no y explains.
    """
    rng = np.random.default_rng(seed)
    A, truth = rng.normal(size=(count, m)).round(2), rng.normal(size=m).round(2)
    b, C = (A @ truth) ** 2, 0.7 * rng.normal(size=(count, n)).round(2)
    s, t = rng.uniform(-1, 1, n).round(2), (truth + 0.5 * rng.normal(size=m)).round(2)

    def misfit(A_: Tensor, data: Tensor, y: Tensor) -> Tensor:
        return 0.25 * ((y @ A_.mT).square() - data).square().mean(-1)

    def build(cast: Cast) -> Problem:
        A_, b_, C_ = cast(A), cast(b), cast(C)
        return Problem(tracking(cast, s, t), lambda x, y: misfit(A_, b_ + C_ @ x, y))

    starts = double(np.random.default_rng(0).normal(size=(150, m)) * 1.2)

    def response(x: Tensor) -> Tensor:
        data, target = double(b) + double(C) @ x, double(t)
        ends = torch.full((m,), 3.0, dtype=torch.float64)

        def lower(y: Tensor) -> Tensor:
            return misfit(double(A), data, y)

        rows = box_minima(lower, -ends, ends, points=41 if m == 2 else 25) if m <= 3 else newton(lower, starts, steps=30)
        rows = torch.cat([rows, -rows])  # the search may have met only one of each pair
        return best(lambda y: (y - target).square().sum(-1), lower, rows)

    return Blueprint(
        build=build, x0=np.zeros(n), y0=np.full(m, -0.5), response=response, region=Region((-1.0, 1.0), (-2.0, 2.0))
    )
