"""Lower levels with many basins, whose depths or places depend on x: double wells and ripples, alone and coupled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking
from meha_lab.problems.rugged._minima import best, chain_minima, separable

__all__ = ["chain", "crossing_wells", "ripples", "rotated_wells", "tilted_wells"]


def _well(y: Tensor, height: float, tilt: Tensor) -> Tensor:
    return 0.25 * height * (y.square() - 1).square() + tilt * y


def tilted_wells(a: Numbers, B: Numbers, s: Numbers, t: Numbers, *, height: float = 1.0, cross: float = 0.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2 + cross <x, y>, f = sum_i height / 4 (y_i^2 - 1)^2 + (a + B x)_i y_i.

    The deeper basin of coordinate i is the one with the sign of -(a + B x)_i.
    """
    a, B, s, t = (np.asarray(part, dtype=float) for part in (a, B, s, t))
    ends = torch.full((len(a),), 4.0, dtype=torch.float64)

    def build(cast: Cast) -> Problem:
        a_, B_ = cast(a), cast(B)
        return Problem(tracking(cast, s, t, cross=cross), lambda x, y: _well(y, height, a_ + B_ @ x).sum())

    def response(x: Tensor) -> Tensor:
        tilt, target = (double(a) + double(B) @ x)[:, None], double(t)[:, None]
        slope = cross * x[:, None] if cross else 0.0
        return separable(lambda y: _well(y, height, tilt), lambda y: 0.5 * (y - target).square() + slope * y, -ends, ends)

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.where(t >= 0, 1.0, -1.0),
        response=response,
        region=Region((-1.5, 1.5), (-2.0, 2.0)),
    )


def crossing_wells(s: float, t: float, *, slope: float, cross: float = 0.0) -> Blueprint:
    """F = (x - s)^2 / 2 + (y - t)^2 / 2 + cross x y, f = 1 - exp(-2 (y - 1)^2) - exp(slope x + 0.2 - 3 (y + 1)^2).

    The basin near y = -1 is narrower than the one near y = 1, and deeper where x is large; the deepest one changes near
    x = -0.2 / slope. |x| <= 2.
    """

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return 1 - torch.exp(-2 * (y - 1).square()) - torch.exp(slope * x + 0.2 - 3 * (y + 1).square())

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, np.array([s]), np.array([t]), cross=cross), lambda x, y: lower(x, y).sum(), x_set=Box(-2.0, 2.0)
        )

    def response(x: Tensor) -> Tensor:
        ends = torch.full((1,), 3.0, dtype=torch.float64)
        return separable(lambda y: lower(x, y), lambda y: 0.5 * (y - t).square() + cross * x * y, -ends, ends)

    return Blueprint(
        build=build, x0=np.full(1, 1.0), y0=np.full(1, 0.5), response=response, region=Region((-2.0, 2.0), (-1.8, 1.8))
    )


def ripples(c: Numbers, B: Numbers, s: Numbers, t: Numbers, *, rate: float, size: float = 1.0, bowl: float = 0.2) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i bowl / 2 (y_i - c_i)^2 + size cos(rate y_i - (B x)_i).

    A quadratic with ripples that x moves: y_i is in the trough that is nearest to c_i.
    """
    c, B, s, t = (np.asarray(part, dtype=float) for part in (c, B, s, t))

    def phi(y: Tensor, centre: Tensor, phase: Tensor) -> Tensor:
        return 0.5 * bowl * (y - centre).square() + size * torch.cos(rate * y - phase)

    def build(cast: Cast) -> Problem:
        c_, B_ = cast(c), cast(B)
        return Problem(tracking(cast, s, t), lambda x, y: phi(y, c_, B_ @ x).sum())

    def response(x: Tensor) -> Tensor:
        centre, phase, target = double(c), (double(B) @ x)[:, None], double(t)[:, None]
        reach = 1.5 * np.pi / rate  # there is a trough within pi / rate
        return separable(
            lambda y: phi(y, centre[:, None], phase), lambda y: (y - target).square(), centre - reach, centre + reach
        )

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=c + 2.0,
        response=response,
        region=Region((-1.5, 1.5), (-4.0, 4.0)),
    )


def rotated_wells(a: Numbers, B: Numbers, s: Numbers, t: Numbers, *, height: float = 1.0, seed: int = 0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i height / 4 (z_i^2 - 1)^2 + (a + B x)_i z_i with z = Q^T y.

    Q is a random orthogonal matrix, so the basins do not lie along the coordinates of y.
    """
    a, B, s, t = (np.asarray(part, dtype=float) for part in (a, B, s, t))
    m = len(a)
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(m, m)))[0]
    ends = torch.full((m,), 4.0, dtype=torch.float64)

    def build(cast: Cast) -> Problem:
        a_, B_, Q_ = cast(a), cast(B), cast(Q)
        return Problem(tracking(cast, s, t), lambda x, y: _well(y @ Q_, height, a_ + B_ @ x).sum())

    def response(x: Tensor) -> Tensor:
        tilt, target = (double(a) + double(B) @ x)[:, None], (double(t) @ double(Q))[:, None]
        # Q keeps distances, so that f and F both separate in z.
        z = separable(lambda z: _well(z, height, tilt), lambda z: (z - target).square(), -ends, ends)
        return double(Q) @ z

    return Blueprint(
        build=build, x0=np.zeros(len(s)), y0=np.full(m, 0.5), response=response, region=Region((-1.5, 1.5), (-2.0, 2.0))
    )


def chain(a: Numbers, B: Numbers, s: Numbers, t: Numbers, *, coupling: float, height: float = 1.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i height / 4 (y_i^2 - 1)^2 + (a + B x)_i y_i, neighbours coupled.

    f has the further term coupling / 2 sum_i (y_{i+1} - y_i)^2, so that neighbours prefer the same basin.
    """
    a, B, s, t = (np.asarray(part, dtype=float) for part in (a, B, s, t))
    m = len(a)

    def build(cast: Cast) -> Problem:
        a_, B_ = cast(a), cast(B)
        return Problem(
            tracking(cast, s, t),
            lambda x, y: _well(y, height, a_ + B_ @ x).sum() + 0.5 * coupling * y.diff().square().sum(),
        )

    def response(x: Tensor) -> Tensor:
        tilt = double(a) + double(B) @ x
        rows = chain_minima(lambda y: _well(y, height, tilt[:, None]), coupling, -2.5, 2.5, m)

        def lower(y: Tensor) -> Tensor:
            return _well(y, height, tilt).sum(1) + 0.5 * coupling * y.diff(dim=1).square().sum(1)

        return best(lambda y: (y - double(t)).square().sum(1), lower, rows)

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.where(t >= 0, 1.0, -1.0),
        response=response,
        region=Region((-1.5, 1.5), (-2.0, 2.0)),
    )
