"""Flat and degenerate lower levels: zero curvature at the solution, plateaus, and many solutions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking

__all__ = ["ball", "budget", "cubic_root", "curve", "equations", "plateau", "power", "two_zeros"]


def power(s: Numbers, t: Numbers, *, degree: int) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i (y_i - sin x_i)^degree / degree: y = sin x, with zero curvature."""
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, s, t), lambda x, y: (y - torch.sin(x)).pow(degree).sum() / degree)

    n = len(s)
    return Blueprint(build=build, x0=np.zeros(n), y0=np.ones(n), response=torch.sin, region=Region((-1.5, 1.5), (-2.0, 2.0)))


def cubic_root(s: Numbers, t: Numbers) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i y_i^4 / 4 - x_i^3 y_i: y = x, with curvature 3 x^2.

    x = y = (s + t) / 2; where that is zero, the lower level is degenerate at the answer, and nowhere else.
    """
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, s, t), lambda x, y: (0.25 * y.pow(4) - x.pow(3) * y).sum())

    n = len(s)
    return Blueprint(
        build=build,
        x0=np.full(n, -1.0),
        y0=np.ones(n),
        x_star=0.5 * (s + t),
        response=lambda x: x.clone(),
        region=Region((-1.5, 1.5), (-1.5, 1.5)),
    )


def two_zeros(s: Numbers, t: Numbers) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i y_i^2 (y_i - x_i)^2: y_i = 0 and y_i = x_i are equally deep.

    The better of x_i = s_i, y_i = 0 and x_i = y_i = (s_i + t_i) / 2 in each coordinate. y_i = x_i / 2 is a maximum.
    """
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)
    apart, together = 0.5 * t**2, 0.25 * (s - t) ** 2  # the best F with y_i = 0, and with y_i = x_i

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, s, t), lambda x, y: (y.square() * (y - x).square()).sum())

    n = len(s)
    return Blueprint(
        build=build,
        x0=np.full(n, 0.5),
        y0=np.full(n, 0.3),
        x_star=np.where(together < apart, 0.5 * (s + t), s),
        response=lambda x: torch.where((x - double(t)).abs() < double(t).abs(), x, torch.zeros_like(x)),
        region=Region((-2.0, 2.0), (-2.0, 2.0)),
    )


def ball(C: Numbers, s: Numbers, t: Numbers, radius: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = max(0, ||y - C x||^2 - radius^2)^2 / 4: any y in a ball around C x."""
    C, s, t = (np.asarray(part, dtype=float) for part in (C, s, t))

    def build(cast: Cast) -> Problem:
        C_ = cast(C)
        return Problem(
            tracking(cast, s, t), lambda x, y: 0.25 * ((y - C_ @ x).square().sum() - radius**2).clamp(min=0).square()
        )

    def response(x: Tensor) -> Tensor:
        centre = double(C) @ x
        away = double(t) - centre
        return centre + away * min(1.0, radius / float(away.norm()))

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.full(len(t), -1.0),
        response=response,
        region=Region((-2.0, 2.0), (-2.0, 2.0)),
    )


def plateau(B: Numbers, s: Numbers, t: Numbers, *, kind: str, sharpness: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f a hole in a plateau (``"hole"``) or a cusp-like basin (``"log"``) at y = B x.

    f = sum_i 1 - exp(-sharpness r_i^2) or sum_i log(1 + sharpness r_i^2), with r = y - B x: far from B x there is hardly a
    slope, and no convexity.
    """
    B, s, t = (np.asarray(part, dtype=float) for part in (B, s, t))

    def build(cast: Cast) -> Problem:
        B_ = cast(B)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            r = sharpness * (y - B_ @ x).square()
            return (1 - torch.exp(-r)).sum() if kind == "hole" else torch.log1p(r).sum()

        return Problem(tracking(cast, s, t), lower)

    x_star = np.linalg.solve(np.eye(len(s)) + B.T @ B, s + B.T @ t)
    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.full(len(t), 1.0),
        x_star=x_star,
        response=lambda x: double(B) @ x,
        region=Region((-1.5, 1.5), (-1.5, 1.5)),
    )


def curve(s: float, t: Numbers, *, powers: tuple[int, int]) -> Blueprint:
    """F = (x - s)^2 / 2 + ||y - t||^2 / 2, f = (y_1^p y_2^q - x)^2 / 2 with powers (p, q): a curve of solutions.

    0.1 <= x <= 3. At the best point of the curve, y_1, y_2 > 0 for t_1, t_2 > 0.
    """
    t = np.asarray(t, dtype=float)
    p, q = powers

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, np.array([s]), t),
            lambda x, y: 0.5 * (y[0].pow(p) * y[1].pow(q) - x).square().sum(),
            x_set=Box(0.1, 3.0),
        )

    def response(x: Tensor) -> Tensor:
        # y_2 = (x / y_1^p)^(1 / q) on a grid of y_1 that closes in on the best.
        low, high = 0.05, 4.0
        for _ in range(30):
            first = torch.linspace(low, high, 201, dtype=torch.float64)
            second = (x / first.pow(p)).pow(1 / q)
            values = (first - t[0]).square() + (second - t[1]).square()
            k = int(values.argmin())
            low, high = float(first[max(k - 1, 0)]), float(first[min(k + 1, 200)])
        return torch.stack([first[k], second[k]])

    return Blueprint(build=build, x0=np.full(1, 0.5), y0=np.ones(2), response=response, region=Region((0.1, 3.0), (0.2, 2.0)))


def equations(m: int, count: int, n: int, *, seed: int, degree: int = 2) -> Blueprint:
    """F = ||x - s||^2 / 2 + sum_i log cosh(2 (y_i - t_i)), f = sum_j (a_j^T y - b_j - (C x)_j)^degree / degree.

    Fewer equations than unknowns: all y with A y = b + C x are solutions, and the best of them for F counts. F is strictly
    convex on them.
    """
    rng = np.random.default_rng(seed)
    A, C = rng.normal(size=(count, m)).round(2), rng.normal(size=(count, n)).round(2)
    b, s, t = rng.normal(size=count).round(2), rng.normal(size=n).round(2), rng.normal(size=m).round(2)
    inverse, null = double(np.linalg.pinv(A)), double(np.linalg.svd(A)[2][count:].T)  # solutions: a point plus null @ z

    def build(cast: Cast) -> Problem:
        A_, C_, b_, s_, t_ = cast(A), cast(C), cast(b), cast(s), cast(t)
        return Problem(
            lambda x, y: 0.5 * (x - s_).square().sum() + _log_cosh(2 * (y - t_)).sum(),
            lambda x, y: (A_ @ y - b_ - C_ @ x).pow(degree).sum() / degree,
        )

    def response(x: Tensor) -> Tensor:
        base = inverse @ (double(b) + double(C) @ x) - double(t)
        z = torch.zeros(null.shape[1], dtype=torch.float64)
        for _ in range(100):
            slope = 2 * torch.tanh(2 * (base + null @ z))
            gradient = null.T @ slope
            if float(gradient.abs().max()) <= 1e-14:
                break
            curvature = 4 / torch.cosh(2 * (base + null @ z)).square()
            # Newton steps in the null space; 1e-12 because the curvature of log cosh vanishes far from t.
            move = torch.linalg.solve(null.T @ (curvature[:, None] * null) + 1e-12 * torch.eye(len(z)), gradient)
            z = z - _length(lambda z: _log_cosh(2 * (base + null @ z)).sum(), z, move, gradient) * move
        return double(t) + base + null @ z

    return Blueprint(build=build, x0=np.zeros(n), y0=np.zeros(m), response=response, region=Region((-2.0, 2.0), (-2.0, 2.0)))


def _log_cosh(z: Tensor) -> Tensor:
    return torch.logaddexp(z, -z) - float(np.log(2))  # cosh itself overflows


def _length(f: Callable[[Tensor], Tensor], z: Tensor, move: Tensor, gradient: Tensor) -> float:
    """Return the step length of a backtracking line search with the Armijo rule, at least about 1e-6."""
    length, here, slope = 1.0, float(f(z)), float(gradient @ move)
    while length > 1e-6 and float(f(z - length * move)) > here - 1e-4 * length * slope + 1e-14:
        length /= 2
    return length


def budget(m: int, s: float, *, seed: int) -> Blueprint:
    """F = (x - s)^2 / 2 + sum_i w_i (y_i - t_i)^2 / 2, f = (sum_i y_i - x)^2 / 2, 0 <= y <= 1, 0 <= x <= m.

    Any division of the budget x is a solution; the best has y_i = clip(t_i - lambda / w_i, 0, 1) with one lambda for all.
    """
    rng = np.random.default_rng(seed)
    w, t = rng.uniform(0.5, 3, m).round(2), rng.uniform(-0.2, 1.2, m).round(2)

    def build(cast: Cast) -> Problem:
        w_, t_ = cast(w), cast(t)
        return Problem(
            lambda x, y: 0.5 * (x - s).square().sum() + 0.5 * (w_ * (y - t_).square()).sum(),
            lambda x, y: 0.5 * (y.sum() - x).square().sum(),
            x_set=Box(0.0, float(m)),
            y_set=Box(0.0, 1.0),
        )

    def response(x: Tensor) -> Tensor:
        low, high = -10.0, 10.0
        for _ in range(80):  # bisection: the sum of y falls with lambda
            level = 0.5 * (low + high)
            y = (double(t) - level / double(w)).clamp(0, 1)
            low, high = (level, high) if float(y.sum()) > float(x) else (low, level)
        return y

    return Blueprint(
        build=build, x0=np.ones(1), y0=np.full(m, 0.5), response=response, region=Region((0.0, float(m)), (0.0, 1.0))
    )
