"""Lower levels whose solutions split, lie on rings, or sit in curved valleys."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha_lab.problems.blueprints import Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking
from meha_lab.problems.rugged._minima import best, line_minima

__all__ = [
    "bent_valley",
    "curved_valley",
    "moving_ring",
    "pitchfork",
    "ring",
    "splitting_direction",
    "subcritical",
    "tilted_ring",
]


def pitchfork(s: Numbers, t: Numbers, *, power: int = 4, weight: float = 1.0, offset: float = 0.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + weight / 2 ||y - t||^2, f = sum_i (x_i - offset) y_i^2 / 2 + y_i^power / power.

    Where x_i < offset, y_i = 0 is a maximum between two minima, y_i^(power - 2) = offset - x_i.
    """
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, s, t, weight),
            lambda x, y: (0.5 * (x - offset) * y.square() + y.pow(power) / power).sum(),
        )

    def response(x: Tensor) -> Tensor:
        size = (offset - x).clamp(min=0).pow(1 / (power - 2))
        return torch.where(double(t) >= 0, size, -size)  # both signs have the same f: F prefers that of t

    n = len(s)
    return Blueprint(build=build, x0=np.ones(n), y0=np.ones(n), response=response, region=Region((-2.0, 1.0), (-1.5, 1.5)))


def subcritical(s: float, t: float, *, cross: float = 0.0) -> Blueprint:
    """F = (x - s)^2 / 2 + (y - t)^2 / 2 + cross x y, f = x y^2 / 2 - y^4 / 2 + y^6 / 6.

    Three basins for 0 < x < 1: y = 0 is the deepest for x > 3/4, the outer two, y^2 = 1 + sqrt(1 - x), for x < 3/4.
    """

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, np.array([s]), np.array([t]), cross=cross),
            lambda x, y: (0.5 * x * y.square() - 0.5 * y.pow(4) + y.pow(6) / 6).sum(),
        )

    def response(x: Tensor) -> Tensor:
        outer = (1 + (1 - x).clamp(min=0).sqrt()).sqrt()
        rows = torch.stack([0 * x, outer, -outer])
        return best(
            lambda y: (0.5 * (y - t).square() + cross * x * y).sum(1),
            lambda y: (0.5 * x * y.square() - 0.5 * y.pow(4) + y.pow(6) / 6).sum(1),
            rows,
        )

    return Blueprint(
        build=build, x0=np.full(1, 1.5), y0=np.full(1, 0.2), response=response, region=Region((-0.5, 2.0), (-2.0, 2.0))
    )


def splitting_direction(d: Numbers, s: float, t: Numbers, *, seed: int) -> Blueprint:
    """F = (x - s)^2 / 2 + ||y - t||^2 / 2, f = y^T (Q diag(d) Q^T - x I) y / 2 + ||y||^4 / 4.

    Of the stationary points along the columns of Q, only those along the smallest d are minima: ||y||^2 = x - min d.
    """
    d, t = np.asarray(d, dtype=float), np.asarray(t, dtype=float)
    m = len(d)
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(m, m)))[0]
    axis = Q[:, d.argmin()]

    def build(cast: Cast) -> Problem:
        H_ = cast(Q @ np.diag(d) @ Q.T)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            square = y.square().sum()
            return 0.5 * (y @ H_ @ y) - 0.5 * x.sum() * square + 0.25 * square.square()

        return Problem(tracking(cast, np.array([s]), t), lower)

    def response(x: Tensor) -> Tensor:
        return (x - d.min()).clamp(min=0).sqrt() * double(axis * np.sign(axis @ t))

    return Blueprint(
        build=build, x0=np.zeros(1), y0=np.full(m, 0.3), response=response, region=Region((-1.0, 3.0), (-1.5, 1.5))
    )


def ring(m: int, s: float, *, seed: int) -> Blueprint:
    """F = (x - s)^2 / 2 + ||y - t||^2 / 2, f = (||y||^2 - exp(x))^2 / 4: any y on a sphere; the best is along t."""
    t = np.random.default_rng(seed).normal(size=m).round(2) / np.sqrt(m)

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, np.array([s]), t), lambda x, y: 0.25 * (y.square().sum() - torch.exp(x)).square().sum())

    def response(x: Tensor) -> Tensor:
        return torch.exp(0.5 * x) * double(t / np.linalg.norm(t))

    return Blueprint(
        build=build, x0=np.full(1, -1.0), y0=np.full(m, 0.1), response=response, region=Region((-1.5, 1.5), (-1.5, 1.5))
    )


def moving_ring(s: Numbers, t: Numbers, radius: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = (||y - x||^2 - radius^2)^2 / 4: a sphere around x."""
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, s, t), lambda x, y: 0.25 * ((y - x).square().sum() - radius**2).square())

    def response(x: Tensor) -> Tensor:
        away = double(t) - x
        return x + radius * away / away.norm()

    m = len(t)
    return Blueprint(
        build=build, x0=np.zeros(m), y0=np.full(m, 0.5), response=response, region=Region((-2.0, 2.0), (-2.0, 2.0))
    )


def tilted_ring(s: Numbers, t: Numbers, tilt: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = (||y||^2 - 1)^2 / 4 - tilt <x, y>.

    y is the point of a ring towards x; the opposite point is a saddle. ||y|| is the root of r^3 - r = tilt ||x||.
    """
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)

    def build(cast: Cast) -> Problem:
        return Problem(tracking(cast, s, t), lambda x, y: 0.25 * (y.square().sum() - 1).square() - tilt * (x * y).sum())

    def response(x: Tensor) -> Tensor:
        size = float(x.norm())
        r = 1 + tilt * size  # beyond the root, from where Newton's method is monotone
        for _ in range(60):
            r -= (r**3 - r - tilt * size) / (3 * r**2 - 1)
        direction = double(t) if size == 0 else x  # x = 0: any direction; t is best for F
        return r * direction / direction.norm()

    m = len(t)
    return Blueprint(build=build, x0=-s, y0=np.full(m, -0.5), response=response, region=Region((-2.0, 2.0), (-1.5, 1.5)))


def curved_valley(m: int, a: float, b: float, s: float, t: Numbers, *, steep: float = 10.0) -> Blueprint:
    """F = (x - s)^2 / 2 + ||y - t||^2 / 2, f = (y_1^2 - 1)^2 / 2 + (a + b x) y_1 + steep sum_i (y_{i+1} - y_i^2)^2.

    A valley along the curve (y_1, y_1^2, y_1^4, ...) with two local minima.
    """
    t = np.asarray(t, dtype=float)

    def well(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y.square() - 1).square() + (a + b * x) * y

    def build(cast: Cast) -> Problem:
        def lower(x: Tensor, y: Tensor) -> Tensor:
            return well(x, y[:1]).sum() + steep * (y[1:] - y[:-1].square()).square().sum()

        return Problem(tracking(cast, np.array([s]), t), lower)

    def response(x: Tensor) -> Tensor:
        ends = torch.full((1,), 3.0, dtype=torch.float64)
        first = line_minima(lambda y: well(x, y), -ends, ends)[0]
        rows = torch.stack([first ** (2**i) for i in range(m)], 1)  # on the curve, the steep term is zero
        return best(lambda y: (y - double(t)).square().sum(1), lambda y: well(x, y[:, 0]), rows)

    return Blueprint(
        build=build, x0=np.zeros(1), y0=np.full(m, 1.0), response=response, region=Region((-1.5, 1.5), (-1.2, 1.2))
    )


def bent_valley(m: int, n: int, a: float, b: float, *, seed: int, steep: float = 5.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = w(y_1) + steep / 2 sum_{i > 1} (y_i - sin(r_i y_1) - (C x)_i)^2.

    w(y_1) = (y_1^2 - 1)^2 / 4 + (a + b x_1) y_1 is a double well; the other coordinates follow y_1 along a curve that x moves.
    """
    rng = np.random.default_rng(seed)
    s, t = rng.uniform(-1, 1, n).round(2), rng.uniform(-1, 1, m).round(2)
    rates, C = np.linspace(1, 3, m - 1), rng.normal(size=(m - 1, n)).round(2) / np.sqrt(m)

    def well(x: Tensor, y: Tensor) -> Tensor:
        return 0.25 * (y.square() - 1).square() + (a + b * x[0]) * y

    def build(cast: Cast) -> Problem:
        rates_, C_ = cast(rates), cast(C)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            return well(x, y[0]) + 0.5 * steep * (y[1:] - torch.sin(rates_ * y[0]) - C_ @ x).square().sum()

        return Problem(tracking(cast, s, t), lower)

    def response(x: Tensor) -> Tensor:
        ends = torch.full((1,), 3.0, dtype=torch.float64)
        first = line_minima(lambda y: well(x, y), -ends, ends).reshape(-1, 1)
        rows = torch.cat([first, torch.sin(double(rates) * first) + double(C) @ x], 1)
        return best(lambda y: (y - double(t)).square().sum(1), lambda y: well(x, y[:, 0]), rows)

    return Blueprint(
        build=build,
        x0=np.zeros(n),
        y0=np.r_[np.sign(a), np.zeros(m - 1)],
        response=response,
        region=Region((-1.5, 1.5), (-1.5, 1.5)),
    )
