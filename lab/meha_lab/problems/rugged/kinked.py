"""Lower levels with kinks and without convexity: folded concave penalties, and wells and ripples with a kink at zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from meha.problem.nonsmooth import L1, MCP, SCAD, GroupL2, NonNegativeL1, NonSmooth
from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking
from meha_lab.problems.rugged._minima import best, line_minima, separable

__all__ = ["kinked_ring", "kinked_ripples", "kinked_wells", "levelled", "levelled_regression"]


def scad(w: Tensor, y: Tensor, a: float) -> Tensor:
    """Return SCAD, as :class:`~meha.nonsmooth.SCAD` defines it, coordinate by coordinate."""
    t = y.abs()
    middle = (2 * a * w * t - t.square() - w * w) / (2 * (a - 1))
    return torch.where(t <= w, w * t, torch.where(t <= a * w, middle, (a + 1) * w * w / 2))


def mcp(w: Tensor, y: Tensor, a: float) -> Tensor:
    """Return MCP, as :class:`~meha.nonsmooth.MCP` defines it, coordinate by coordinate."""
    t = y.abs()
    return torch.where(t <= a * w, w * t - t.square() / (2 * a), a * w * w / 2)


PENALTIES: dict[str, tuple[Callable[..., NonSmooth], Callable[[Tensor, Tensor, float], Tensor]]] = {
    "SCAD": (SCAD, scad),
    "MCP": (MCP, mcp),
}


def levelled(
    kind: Literal["SCAD", "MCP"],
    b: Numbers,
    B: Numbers,
    s: Numbers,
    t: Numbers,
    *,
    a: float,
    curvature: float,
    weight: float | None = None,
) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = curvature / 2 ||y - b - B x||^2, g = SCAD or MCP with the given weight.

    Without a weight, it is exp(x_1), and b does not move: x is the logarithm of the weight. Where the curvature is less than
    that of the penalty, 1 / (a - 1) or 1 / a, there are basins at zero and beyond.
    """
    b, B, s, t = (np.asarray(part, dtype=float) for part in (b, B, s, t))
    term, penalty = PENALTIES[kind]
    m, n = len(b), len(s)

    def level(x: Tensor) -> Tensor:
        return torch.exp(x[:1]) if weight is None else torch.full_like(x[:1], weight)

    def build(cast: Cast) -> Problem:
        b_, B_ = cast(b), cast(B)
        return Problem(
            tracking(cast, s, t),
            lambda x, y: 0.5 * curvature * (y - b_ - B_ @ x).square().sum(),
            nonsmooth=term((lambda x: torch.exp(x[0])) if weight is None else weight, a=a),
        )

    def response(x: Tensor) -> Tensor:
        centre, target = (double(b) + double(B) @ x)[:, None], double(t)[:, None]
        ends = centre.abs().reshape(-1) + 0.5  # the penalty only pulls y from the centre towards zero
        return separable(
            lambda y: 0.5 * curvature * (y - centre).square() + penalty(level(x), y, a),
            lambda y: (y - target).square(),
            -ends,
            ends,
            extra=(0.0,),
        )

    return Blueprint(
        build=build,
        x0=np.zeros(n),
        y0=np.zeros(m),
        response=response,
        region=Region((-1.0, 1.0), (-3.0, 3.0)),
    )


def levelled_regression(m: int, count: int, *, seed: int, a: float = 1.5) -> Blueprint:
    """F: squared errors on other data; f = ||A y - d||^2 / (2 count), g = MCP(exp(x)): which coefficients are zero?

    f + g is quadratic on each of 5^m pieces; the minima of all pieces are found and compared. -4 <= x <= 1.
    """
    rng = np.random.default_rng(seed)
    truth = np.where(np.arange(m) % 2, 0.4, 1.2) * rng.choice([-1, 1], m)

    def sample() -> tuple[Array, Array]:
        A = (rng.normal(size=(count, m)) + 0.7 * rng.normal(size=(count, 1))).round(2) * 0.6
        return A, (A @ truth + 0.6 * rng.normal(size=count)).round(2)

    (A, d), (A_other, d_other) = sample(), sample()
    H, r = A.T @ A / count, A.T @ d / count
    pieces = np.array(list(itertools.product((-2, -1, 0, 1, 2), repeat=m)))
    # Zero, sloping (|y| <= a w, where the slope is w and the curvature -1 / a) and level coordinates of each piece.
    zero, sloping = double(pieces == 0), double(np.abs(pieces) == 1)
    side = double(np.sign(pieces))
    eye = torch.eye(m, dtype=torch.float64)
    matrices = (1 - zero)[:, :, None] * (double(H) - torch.diag_embed(sloping) / a) * (1 - zero)[:, None, :]
    matrices = matrices + zero[:, :, None] * eye
    convex = torch.linalg.eigvalsh(matrices).amin(1) > 1e-9  # other pieces have no minimum inside
    zero, sloping, side, matrices = zero[convex], sloping[convex], side[convex], matrices[convex]

    def build(cast: Cast) -> Problem:
        A_, d_, A__, d__ = cast(A), cast(d), cast(A_other), cast(d_other)
        return Problem(
            lambda x, y: 0.5 * (A__ @ y - d__).square().mean() + 1e-3 * x.square().sum(),
            lambda x, y: 0.5 * (A_ @ y - d_).square().mean(),
            nonsmooth=MCP(lambda x: torch.exp(x[0]), a=a),
            x_set=Box(-4.0, 1.0),
        )

    def response(x: Tensor) -> Tensor:
        w = torch.exp(x[0])
        right = (1 - zero) * (double(r) - w * sloping * side)
        rows = torch.linalg.solve(matrices, right)
        size = rows * side
        fits = torch.where(sloping > 0, (size >= 0) & (size <= a * w + 1e-12), (zero > 0) | (size >= a * w - 1e-12))
        rows = rows[fits.all(1)]  # stationary points that lie in their own piece

        def lower(y: Tensor) -> Tensor:
            return 0.5 * (y @ double(A).mT - double(d)).square().mean(1) + mcp(w, y, a).sum(1)

        return best(lambda y: (y @ double(A_other).mT - double(d_other)).square().mean(1), lower, rows)

    return Blueprint(
        build=build, x0=np.full(1, -1.0), y0=np.zeros(m), response=response, region=Region((-4.0, 1.0), (-2.0, 2.0))
    )


def kinked_wells(
    a: Numbers,
    B: Numbers,
    s: Numbers,
    t: Numbers,
    *,
    weight: float,
    height: float = 1.0,
    sides: Literal["both", "positive", "box"] = "both",
) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i height / 4 (y_i^2 - 1)^2 + (a + B x)_i y_i, g = weight ||y||_1.

    Up to three basins per coordinate: two smooth ones, and a kink at zero. ``sides``: ``"positive"`` allows y >= 0 only, and
    ``"box"`` |y_i| <= 1.2.
    """
    a, B, s, t = (np.asarray(part, dtype=float) for part in (a, B, s, t))
    m = len(a)
    high = 1.2 if sides == "box" else 4.0
    low = 0.0 if sides == "positive" else -high

    def well(y: Tensor, tilt: Tensor) -> Tensor:
        return 0.25 * height * (y.square() - 1).square() + tilt * y

    def build(cast: Cast) -> Problem:
        a_, B_ = cast(a), cast(B)
        return Problem(
            tracking(cast, s, t),
            lambda x, y: well(y, a_ + B_ @ x).sum(),
            nonsmooth=NonNegativeL1(weight) if sides == "positive" else L1(weight),
            y_set=Box(low, high) if sides == "box" else None,
        )

    def response(x: Tensor) -> Tensor:
        tilt, target = (double(a) + double(B) @ x)[:, None], double(t)[:, None]
        ends = torch.ones(m, dtype=torch.float64)
        return separable(
            lambda y: well(y, tilt) + weight * y.abs(),
            lambda y: (y - target).square(),
            low * ends,
            high * ends,
            extra=(0.0,),
        )

    return Blueprint(
        build=build,
        x0=np.zeros(len(s)),
        y0=np.full(m, 0.5),
        response=response,
        region=Region((-1.5, 1.5), (0.0 if sides == "positive" else -1.2, 1.2)),
    )


def kinked_ripples(c: Numbers, s: Numbers, t: Numbers, *, rate: float, weight: float) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = sum_i (y_i - c_i)^2 / 8 + cos(rate y_i - x_i) / 2, g = weight ||y||_1."""
    c, s, t = (np.asarray(part, dtype=float) for part in (c, s, t))
    m = len(c)

    def build(cast: Cast) -> Problem:
        c_ = cast(c)
        return Problem(
            tracking(cast, s, t),
            lambda x, y: ((y - c_).square() / 8 + 0.5 * torch.cos(rate * y - x)).sum(),
            nonsmooth=L1(weight),
        )

    def response(x: Tensor) -> Tensor:
        column, centre, target = x[:, None], double(c)[:, None], double(t)[:, None]
        ends = torch.full((m,), 6.0, dtype=torch.float64)
        return separable(
            lambda y: (y - centre).square() / 8 + 0.5 * torch.cos(rate * y - column) + weight * y.abs(),
            lambda y: (y - target).square(),
            -ends,
            ends,
            points=801,  # ripples need a finer grid
            extra=(0.0,),
        )

    return Blueprint(build=build, x0=np.zeros(m), y0=c + 1.0, response=response, region=Region((-1.5, 1.5), (-3.0, 3.0)))


def kinked_ring(s: Numbers, t: Numbers, *, weight: float, radius: float = 1.5, tilt: float = 0.3) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = (||y||^2 - radius^2)^2 / 4 - tilt <x, y>, g = weight ||y||.

    y is zero or points along x; its length minimises a function of one variable.
    """
    s, t = np.asarray(s, dtype=float), np.asarray(t, dtype=float)
    m = len(t)

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, s, t),
            lambda x, y: 0.25 * (y.square().sum() - radius**2).square() - tilt * (x * y).sum(),
            nonsmooth=GroupL2([m], weight=weight),
        )

    def response(x: Tensor) -> Tensor:
        size = x.norm()
        direction = double(t) / double(t).norm() if float(size) == 0 else x / size  # x = 0: any direction; t is best for F
        zero, far = torch.zeros(1, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64)

        def length(r: Tensor) -> Tensor:
            return 0.25 * (r.square() - radius**2).square() - tilt * size * r + weight * r

        lengths = line_minima(length, zero, far, extra=(0.0,)).reshape(-1, 1)
        return best(lambda y: (y - double(t)).square().sum(1), lambda y: length(y.norm(dim=1)), lengths * direction)

    return Blueprint(build=build, x0=-s, y0=np.full(m, 0.5), response=response, region=Region((-2.0, 2.0), (-1.5, 1.5)))
