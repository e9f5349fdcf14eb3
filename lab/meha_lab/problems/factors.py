"""Problems with products of unknowns: matrix factorisation, sparse codes, linear heads on learned features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meha.problem.nonsmooth import ElasticNet
from meha.problem.problem import Problem
from meha.problem.sets import Box, L2Ball
from meha_lab.problems.blueprints import Blueprint, Cast, double

__all__ = ["dictionary", "factorisation", "products", "representation"]


def factorisation(rows: int, columns: int, rank: int, *, seed: int, noise: float = 0.3) -> Blueprint:
    """F = ||U V' - M_clean||^2 / 2, f = ||U V' - M||^2 / 2 + exp(x) (||U||^2 + ||V||^2) / 2, y = (U; V), |x| <= 4.

    f is not convex in y but has no bad local minima: with this many columns, U V' is M with its singular values reduced by
    exp(x), to no less than 0. U and V are unique up to a rotation. U = V = 0 is a saddle, so the start is elsewhere.
    """
    rng = np.random.default_rng(seed)
    clean = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))
    M, width = clean + noise * rng.normal(size=clean.shape), min(rows, columns)

    def build(cast: Cast) -> Problem:
        M_, clean_ = cast(M), cast(clean)
        return Problem(
            upper=lambda x, y: 0.5 * (y[:rows] @ y[rows:].T - clean_).square().sum(),
            lower=lambda x, y: 0.5 * (y[:rows] @ y[rows:].T - M_).square().sum() + 0.5 * (x.exp() * y.square()).sum(),
            x_set=Box(-4.0, 4.0),
        )

    u, sigma, v = torch.linalg.svd(double(M), full_matrices=False)

    def response(x: Tensor) -> Tensor:
        root = (sigma - x.exp()).clamp(min=0).sqrt()  # min (||U||^2 + ||V||^2) / 2 is the nuclear norm of U V'
        return torch.cat([u * root, v.T * root])

    return Blueprint(
        build=build,
        x0=np.zeros(1),
        y0=0.1 * rng.normal(size=(rows + columns, width)),
        response=response,
        unique=lambda y: y[:rows] @ y[rows:].T,
    )


def products(n: int, *, seed: int) -> Blueprint:
    """F = ||u v - t||^2 / 2 + 0.05 ||x||^2, f = ||u v - a||^2 / 2 + <x, u^2 + v^2> / 2 entry by entry, y = (u, v), 0 <= x <= 3.

    This is a smooth, non-convex form of the lasso: |u v| = max(|a| - x, 0). The signs of u and v are arbitrary.
    """
    rng = np.random.default_rng(seed)
    a = rng.choice([-1.0, 1.0], size=n) * rng.uniform(1, 3, size=n)
    t = a * rng.uniform(0.3, 1.1, size=n)

    def build(cast: Cast) -> Problem:
        a_, t_ = cast(a), cast(t)
        return Problem(
            upper=lambda x, y: 0.5 * (y[0] * y[1] - t_).square().sum() + 0.05 * x.square().sum(),
            lower=lambda x, y: 0.5 * (y[0] * y[1] - a_).square().sum() + 0.5 * (x * y.square()).sum(),
            x_set=Box(0.0, 3.0),
        )

    a_ = double(a)

    def response(x: Tensor) -> Tensor:
        root = (a_.abs() - x).clamp(min=0).sqrt()
        return torch.stack([root, a_.sign() * root])

    # For x_i < |a_i|, F is the parabola (|a| - x - |t|)^2 / 2 + x^2 / 20, and its minimum lies in this range.
    x_star = np.clip((np.abs(a) - np.abs(t)) / 1.1, 0, None)  # 0 if |t| > |a|
    return Blueprint(
        build=build,
        x0=np.full(n, 0.5),
        y0=np.stack([np.ones(n), 0.1 * np.sign(a)]),
        x_star=x_star,
        response=response,
        unique=lambda y: y[0] * y[1],
    )


def dictionary(d: int, atoms: int, n: int, *, seed: int) -> Blueprint:
    """F = ||M_clean - D y||^2 / (2 n), f + g = ||M - D y||^2 / 2 + 0.1 ||y||_1 + 0.01 ||y||^2 / 2, D = x, ||D||^2 <= atoms.

    y holds the codes of n signals in a dictionary of unit atoms, some of which end up unused. There are many local optima; the
    start, close to the true dictionary, leads to a good one.
    """
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(d, atoms))
    truth /= np.linalg.norm(truth, axis=0)
    codes = rng.normal(size=(atoms, n)) * (rng.uniform(size=(atoms, n)) < 0.6)
    clean = truth @ codes
    M = clean + 0.1 * rng.normal(size=clean.shape)
    start = truth + 0.2 * rng.normal(size=truth.shape)

    def build(cast: Cast) -> Problem:
        M_, clean_ = cast(M), cast(clean)
        return Problem(
            upper=lambda x, y: (clean_ - x @ y).square().sum() / (2 * n),
            lower=lambda x, y: 0.5 * (M_ - x @ y).square().sum(),
            nonsmooth=ElasticNet(0.1, 0.01),
            x_set=L2Ball(float(np.sqrt(atoms))),
        )

    return Blueprint(
        build=build, x0=0.99 * start * np.sqrt(atoms) / np.linalg.norm(start), y0=np.zeros((atoms, n)), measure="excess"
    )


def representation(p: int, features: int, n: int, *, seed: int, bent: bool = False) -> Blueprint:
    """F = validation loss + 0.005 ||x||^2, f = ||phi(A x) y - b||^2 / (2 n) + 0.05 ||y||^2: features x with a head y.

    x is a matrix; phi is the identity, or tanh if ``bent``. Rotating (or permuting) features changes nothing.
    """
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(2 * n, p))
    b = np.tanh(A @ rng.normal(size=(p, 2))) @ rng.normal(size=2) + 0.2 * rng.normal(size=2 * n)
    x0 = 0.5 * rng.normal(size=(p, features))

    def bend(z: Tensor) -> Tensor:
        return torch.tanh(z) if bent else z

    def build(cast: Cast) -> Problem:
        A_, b_, A2_, b2_ = cast(A[:n]), cast(b[:n]), cast(A[n:]), cast(b[n:])
        return Problem(
            upper=lambda x, y: (bend(A2_ @ x) @ y - b2_).square().mean() / 2 + 0.005 * x.square().sum(),
            lower=lambda x, y: (bend(A_ @ x) @ y - b_).square().mean() / 2 + 0.05 * y.square().sum(),
        )

    A_, b_ = double(A[:n]), double(b[:n])

    def response(x: Tensor) -> Tensor:
        z = bend(A_ @ x)
        return torch.linalg.solve(z.T @ z / n + 0.1 * torch.eye(features, dtype=x.dtype), z.T @ b_ / n)

    return Blueprint(build=build, x0=x0, y0=np.zeros(features), response=response, measure="excess")
