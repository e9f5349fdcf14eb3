"""Lower levels that fit small models to data: robust centres, mixtures, networks, and smooth minima of quadratics."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking
from meha_lab.problems.rugged._minima import best, box_minima, line_minima, newton, separable

__all__ = ["centre", "centres", "mixture", "network", "smooth_minimum"]


def _robust(r: Tensor) -> Tensor:
    """Return r^2 / (1 + r^2) (Geman-McClure): quadratic near zero, and 1 far away."""
    return r.square() / (1 + r.square())


def centres(points: Numbers, moves: Numbers, s: Numbers, t: Numbers, *, width: float = 0.5) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_ij rho((y_i - points_ij - (moves x)_j) / width), rho(r) = r^2 / (1 + r^2).

    Each y_i is a centre of a row of points, as robust statistics define it: it sits in the largest cluster, and x moves the
    points towards or away from each other.
    """
    points, moves, s, t = (np.asarray(part, dtype=float) for part in (points, moves, s, t))
    m = len(points)

    def build(cast: Cast) -> Problem:
        points_, moves_ = cast(points), cast(moves)
        return Problem(tracking(cast, s, t), lambda x, y: _robust((y[:, None] - points_ - moves_ @ x) / width).sum())

    def response(x: Tensor) -> Tensor:
        data, target = double(points) + double(moves) @ x, double(t)[:, None]

        def phi(y: Tensor) -> Tensor:
            return _robust((y[..., None] - data[:, None]) / width).sum(-1)

        return separable(phi, lambda y: (y - target).square(), data.amin(1), data.amax(1))  # all minima lie among the data

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.full(m, points.mean()),
        response=response,
        region=Region((-1.0, 1.0), (points.min(), points.max())),
    )


def centre(points: Numbers, s: Numbers, t: Numbers, *, width: float = 0.6) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_j exp(x_{j mod n}) rho(||y - points_j|| / width), in the plane.

    x weighs the points, and so decides which cluster is the largest; |x_i| <= 1.
    """
    points, s, t = (np.asarray(part, dtype=float) for part in (points, s, t))
    n = len(s)
    group = np.arange(len(points)) % n

    def misfit(weights: Tensor, points_: Tensor, y: Tensor) -> Tensor:
        square = (y[..., None, :] - points_).square().sum(-1) / width**2
        return (weights * square / (1 + square)).sum(-1)

    def build(cast: Cast) -> Problem:
        points_ = cast(points)
        return Problem(tracking(cast, s, t), lambda x, y: misfit(torch.exp(x)[group], points_, y), x_set=Box(-1.0, 1.0))

    def response(x: Tensor) -> Tensor:
        def lower(y: Tensor) -> Tensor:
            return misfit(torch.exp(x)[group], double(points), y)

        rows = box_minima(lower, double(points.min(0)), double(points.max(0)))
        return best(lambda y: (y - double(t)).square().sum(-1), lower, rows)

    return Blueprint(
        build=build,
        x0=np.zeros(n),
        y0=points.mean(0),
        response=response,
        region=Region((-1.0, 1.0), (points.min(0), points.max(0))),
    )


def mixture(data: Numbers, m: int, s: float, t: Numbers, *, prior: float) -> Blueprint:
    """F = (x - s)^2 / 2 + ||y - t||^2 / 2, f = -mean_i log mean_k exp(-(data_i - y_k)^2 / (2 exp(x))) + prior / 2 ||y||^2.

    The means y of m equal Gaussian components with variance exp(x): exchanging them changes nothing, and a mean between two
    clusters is a saddle, or a minimum where the variance is large. -2 <= x <= 1.
    """
    data, t = np.asarray(data, dtype=float), np.asarray(t, dtype=float)

    def misfit(x: Tensor, data_: Tensor, y: Tensor) -> Tensor:
        square = (data_[:, None] - y[..., None, :]).square() / (2 * torch.exp(x))
        return -torch.logsumexp(-square, -1).mean(-1) + 0.5 * prior * y.square().sum(-1)

    def build(cast: Cast) -> Problem:
        data_ = cast(data)
        return Problem(tracking(cast, np.array([s]), t), lambda x, y: misfit(x, data_, y).sum(), x_set=Box(-2.0, 1.0))

    def response(x: Tensor) -> Tensor:
        ends = torch.full((m,), 3.0, dtype=torch.float64)

        def lower(y: Tensor) -> Tensor:
            return misfit(x, double(data), y)

        rows = box_minima(lower, -ends, ends, points=61 if m == 2 else 25, kept=24)  # kept: m! exchanges of each minimum
        return best(lambda y: (y - double(t)).square().sum(-1), lower, rows)

    return Blueprint(
        build=build,
        x0=np.full(1, 0.5),
        # In the order opposite to that of t, so that the nearest solution is not the one that F prefers.
        y0=np.linspace(0.5, -0.5, m) if t[0] < t[-1] else np.linspace(-0.5, 0.5, m),
        response=response,
        region=Region((-2.0, 1.0), (-2.0, 2.0)),
    )


def network(units: int, count: int, *, seed: int, bias: bool = False) -> Blueprint:
    """F: squared errors on other data; f: mean_i (sum_k v_k tanh(w_k a_i + b) - d_i)^2 / 2 + exp(x) / 2 ||y||^2, y = (v, w, b).

    x is the logarithm of the weight decay, -6 <= x <= 0. A unit with both signs changed, or units exchanged, give the same
    fit; y = 0 is a saddle.
    """
    rng = np.random.default_rng(seed)

    def sample() -> tuple[Array, Array]:
        a = rng.normal(size=count).round(2)
        return a, (1.5 * np.tanh(1.5 * a - 0.5) + (0.8 * np.sin(2 * a)) + 0.5 * rng.normal(size=count)).round(2)

    (a, d), (a_other, d_other) = sample(), sample()
    m = 2 * units + bias

    def misfit(inputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        v, w = y[..., :units, None], y[..., units : 2 * units, None]
        hidden = torch.tanh(w * inputs + (y[..., -1:, None] if bias else 0.0))
        return 0.5 * ((v * hidden).sum(-2) - outputs).square().mean(-1)

    def build(cast: Cast) -> Problem:
        a_, d_, a__, d__ = cast(a), cast(d), cast(a_other), cast(d_other)
        return Problem(
            lambda x, y: misfit(a__, d__, y) + 0.01 * x.square().sum(),
            lambda x, y: misfit(a_, d_, y) + 0.5 * torch.exp(x).sum() * y.square().sum(),
            x_set=Box(-6.0, 0.0),
        )

    starts = double(np.random.default_rng(0).normal(size=(100, m)) * 2)

    def response(x: Tensor) -> Tensor:
        def lower(y: Tensor) -> Tensor:
            return misfit(double(a), double(d), y) + 0.5 * torch.exp(x) * y.square().sum(-1)

        def upper(y: Tensor) -> Tensor:
            return misfit(double(a_other), double(d_other), y)

        ends = torch.full((m,), 6.0, dtype=torch.float64)
        # Grids are too large beyond three unknowns; 100 fixed starts replace them.
        rows = box_minima(lower, -ends, ends, points=49 if m == 2 else 25) if m <= 3 else newton(lower, starts, steps=40)
        return best(upper, lower, rows)

    return Blueprint(
        build=build, x0=np.full(1, -1.0), y0=np.full(m, 0.1), response=response, region=Region((-6.0, 0.0), (-2.0, 2.0))
    )


def smooth_minimum(c: Numbers, h: Numbers, B: Numbers, s: Numbers, t: Numbers, *, softness: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = -softness log sum_j exp(-(||y - c_j||^2 / 2 + (h + B x)_j) / softness).

    Quadratics around the rows of c, joined smoothly: stationary points are convex combinations of the c_j. With two they
    lie on a line; with more, the search starts from all centres and all points of a grid of combinations.
    """
    c, h, B, s, t = (np.asarray(part, dtype=float) for part in (c, h, B, s, t))
    count = len(c)

    def smooth(heights: Tensor, c_: Tensor, y: Tensor) -> Tensor:
        bowls = 0.5 * (y[..., None, :] - c_).square().sum(-1) + heights
        return -softness * torch.logsumexp(-bowls / softness, -1)

    def build(cast: Cast) -> Problem:
        c_, h_, B_ = cast(c), cast(h), cast(B)
        return Problem(tracking(cast, s, t), lambda x, y: smooth(h_ + B_ @ x, c_, y))

    # Starts on a grid of convex combinations of the centres, where all stationary points lie.
    steps = np.stack(np.meshgrid(*[np.linspace(0, 1, 7)] * count, indexing="ij"), -1).reshape(-1, count)[1:]
    mixed = double(np.unique((steps / steps.sum(1, keepdims=True)).round(9), axis=0) @ c)

    def response(x: Tensor) -> Tensor:
        heights, c_ = double(h) + double(B) @ x, double(c)

        def lower(y: Tensor) -> Tensor:
            return smooth(heights, c_, y)

        if count == 2:
            zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
            share = line_minima(lambda r: lower(c_[0] + r[..., None] * (c_[1] - c_[0])), zero, one)
            rows = c_[0] + share.reshape(-1, 1) * (c_[1] - c_[0])
        else:
            rows = newton(lower, mixed, steps=30)
        return best(lambda y: (y - double(t)).square().sum(-1), lower, rows)

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=c[np.square(c - t).sum(1).argmin()],
        response=response,
        region=Region((-1.5, 1.5), (c.min() - 0.5, c.max() + 0.5)),
    )
