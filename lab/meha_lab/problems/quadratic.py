"""Problems with a quadratic lower level, whose solution y*(x) is affine in x."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double

__all__ = ["linear_upper", "quadratic", "through_y", "undetermined"]


def quadratic(nx: int, ny: int, condition: float, *, seed: int, soft: bool = False) -> Blueprint:
    """F = ||y - t||^2 / 2 + rho ||x - s||^2 / 2, f = <y, H y> / 2 - <y, B x + b>, rho = 0.1.

    The eigenvalues of H are spaced geometrically from 1 to ``condition``, or from 1 / ``condition`` to 1 if ``soft``, which
    gives the hyper-objective the condition number ``condition`` squared.
    """
    rng = np.random.default_rng(seed)
    H, B, b = _lower(rng, nx, ny, condition, soft)
    J, y_b = np.linalg.solve(H, B), np.linalg.solve(H, b)
    s = rng.normal(size=nx)
    t = J @ rng.normal(size=nx) + y_b + rng.normal(size=ny) / np.sqrt(ny)  # a reachable y plus noise
    rho = 0.1

    def build(cast: Cast) -> Problem:
        H_, B_, b_, s_, t_ = (cast(part) for part in (H, B, b, s, t))
        return Problem(
            upper=lambda x, y: 0.5 * (y - t_).square().sum() + 0.5 * rho * (x - s_).square().sum(),
            lower=lambda x, y: 0.5 * y @ (H_ @ y) - y @ (B_ @ x + b_),
        )

    x_star = np.linalg.solve(J.T @ J + rho * np.eye(nx), J.T @ (t - y_b) + rho * s)
    return _linear(build, J, y_b, x_star)


def through_y(nx: int, ny: int, condition: float, *, seed: int) -> Blueprint:
    """F = ||C y - t||^2 / 2, which depends on x only through y; f as in :func:`quadratic`. C y has nx + 2 entries."""
    rng = np.random.default_rng(seed)
    H, B, b = _lower(rng, nx, ny, condition)
    J, y_b = np.linalg.solve(H, B), np.linalg.solve(H, b)
    C, t = rng.normal(size=(nx + 2, ny)) / np.sqrt(ny), rng.normal(size=nx + 2)

    def build(cast: Cast) -> Problem:
        H_, B_, b_, C_, t_ = (cast(part) for part in (H, B, b, C, t))
        return Problem(
            upper=lambda x, y: 0.5 * (C_ @ y - t_).square().sum(),
            lower=lambda x, y: 0.5 * y @ (H_ @ y) - y @ (B_ @ x + b_),
        )

    return _linear(build, J, y_b, np.linalg.lstsq(C @ J, t - C @ y_b, rcond=None)[0])


def linear_upper(nx: int, ny: int, condition: float, *, seed: int) -> Blueprint:
    """F = <p, x> + <q, y> with x in [-1, 1]^nx; f as in :func:`quadratic`. The solution is a corner of the box."""
    rng = np.random.default_rng(seed)
    H, B, b = _lower(rng, nx, ny, condition)
    J, y_b = np.linalg.solve(H, B), np.linalg.solve(H, b)
    p, q = 0.3 * rng.normal(size=nx), rng.normal(size=ny)

    def build(cast: Cast) -> Problem:
        H_, B_, b_, p_, q_ = (cast(part) for part in (H, B, b, p, q))
        return Problem(
            upper=lambda x, y: p_ @ x + q_ @ y,
            lower=lambda x, y: 0.5 * y @ (H_ @ y) - y @ (B_ @ x + b_),
            x_set=Box(-1.0, 1.0),
        )

    return _linear(build, J, y_b, -np.sign(p + J.T @ q))  # the sign of the gradient of F(x, y(x)), which is constant


def undetermined(nx: int, ny: int, rank: int, *, seed: int) -> Blueprint:
    """F = ||y - t||^2 / 2 + ||x - s||^2 / 2, f = ||A y - B x||^2 / 2; A has ``rank`` rows, and F chooses among solutions."""
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(rank, ny)) / np.sqrt(ny), rng.normal(size=(rank, nx)) / np.sqrt(nx)
    s, t = rng.normal(size=nx), rng.normal(size=ny)
    J = np.linalg.pinv(A) @ B  # y*(x) = t + A^+ (B x - A t)
    y_b = t - np.linalg.pinv(A) @ (A @ t)

    def build(cast: Cast) -> Problem:
        A_, B_, s_, t_ = (cast(part) for part in (A, B, s, t))
        return Problem(
            upper=lambda x, y: 0.5 * (y - t_).square().sum() + 0.5 * (x - s_).square().sum(),
            lower=lambda x, y: 0.5 * (A_ @ y - B_ @ x).square().sum(),
        )

    return _linear(build, J, y_b, np.linalg.solve(J.T @ J + np.eye(nx), J.T @ (t - y_b) + s))


def _lower(rng: np.random.Generator, nx: int, ny: int, condition: float, soft: bool = False) -> tuple[Array, Array, Array]:
    """Draw H, B and b."""
    basis, _ = np.linalg.qr(rng.normal(size=(ny, ny)))
    eigenvalues = np.geomspace(1, condition, ny) / (condition if soft else 1)
    return (basis * eigenvalues) @ basis.T, rng.normal(size=(ny, nx)), rng.normal(size=ny)


def _linear(build: Callable[[Cast], Problem], J: Array, y_b: Array, x_star: Array) -> Blueprint:
    """Return the blueprint with y*(x) = J x + y_b and the start x0 = 0, y0 = 0."""
    J_, y_ = double(J), double(y_b)
    return Blueprint(
        build=build, x0=np.zeros(J.shape[1]), y0=np.zeros(len(y_b)), x_star=x_star, response=lambda x: torch.mv(J_, x) + y_
    )
