"""Small problems from the literature, with non-convex, constrained, degenerate or undetermined lower levels.

If the lower level has several solutions, the one with the smallest F counts.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box, L2Ball, NonNegative
from meha_lab.problems.blueprints import Blueprint, Cast

__all__ = ["bilinear", "circle", "cubic", "dead_zone", "double_well", "mirrlees", "one_sided", "quartic", "valley", "wave"]


def bilinear() -> Blueprint:
    """F = (x - 1.25)^2 + y^2, f = (x - 1) y, |x| <= 2, |y| <= 1: y = -sign(x - 1), except at the solution x = 1, y = 0."""

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: (x - 1.25).square().sum() + y.square().sum(),
            lambda x, y: ((x - 1) * y).sum(),
            x_set=Box(-2.0, 2.0),
            y_set=Box(-1.0, 1.0),
        )

    return Blueprint(build=build, x0=np.zeros(1), y0=np.zeros(1), x_star=np.ones(1), response=lambda x: -torch.sign(x - 1))


def cubic(n: int) -> Blueprint:
    """F = ||x - e||^2 + ||y - 2 e||^2, f = sum y_i^3 / 3 - x_i^2 y_i, 0 <= x, y <= 4: y = x, and x = y = 3/2 e.

    f has a saddle in y where x = 0, and is not convex for y < 0.
    """

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: (x - 1).square().sum() + (y - 2).square().sum(),
            lambda x, y: (y.pow(3) / 3 - x.square() * y).sum(),
            x_set=Box(0.0, 4.0),
            y_set=Box(0.0, 4.0),
        )

    return Blueprint(build=build, x0=np.full(n, 0.5), y0=np.full(n, 0.5), x_star=np.full(n, 1.5), response=lambda x: x.clone())


def mirrlees() -> Blueprint:
    """F = (x - 2)^2 + (y - 1)^2, f = -x exp(-(y + 1)^2) - exp(-(y - 1)^2), 0.5 <= x <= 2.

    Mirrlees' example. f has two basins in y; the one at y > 0 is deeper only for x <= 1. The solution is x = 1, y = 0.9575,
    where both are equally deep; beyond it, the minimum at y > 0 is still a local one.
    """

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: (x - 2).square().sum() + (y - 1).square().sum(),
            lambda x, y: (-x * torch.exp(-(y + 1).square()) - torch.exp(-(y - 1).square())).sum(),
            x_set=Box(0.5, 2.0),
        )

    def response(x: Tensor) -> Tensor:
        # Bisection of the stationarity x (y + 1) exp(-4 y) + y - 1 = 0 on the side of the deeper basin.
        low, high = (0.5, 1.0) if float(x) <= 1 else (-1.0, -0.5)
        for _ in range(60):
            y = 0.5 * (low + high)
            rising = float(x) * (y + 1) * math.exp(-4 * y) + y - 1 > 0
            low, high = (low, y) if rising else (y, high)
        return torch.full_like(x, 0.5 * (low + high))

    return Blueprint(build=build, x0=np.full(1, 0.5), y0=np.zeros(1), x_star=np.ones(1), response=response)


def double_well(n: int) -> Blueprint:
    """F = ||x - 1/2||^2 + ||y - 3/2||^2, f = sum (y_i^2 - 1)^2 / 4 - x_i y_i.

    f has two basins for |x_i| < 0.38, the deeper one at the sign of x_i; the start, x = y = -1, is in the wrong one.
    Stationarity x = y^3 - y makes y the root of a polynomial.
    """

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: (x - 0.5).square().sum() + (y - 1.5).square().sum(),
            lambda x, y: (0.25 * (y.square() - 1).square() - x * y).sum(),
        )

    def response(x: Tensor) -> Tensor:
        y = torch.where(x >= 0, 1.0, -1.0) * (1 + x.abs())  # beyond the root, from where Newton's method is monotone
        for _ in range(60):
            y = y - (y.pow(3) - y - x) / (3 * y.square() - 1)
        return y

    # (y^3 - y - 1/2) (3 y^2 - 1) + y - 3/2 = 0 has a single root y > 1.
    roots = np.roots([3, 0, -4, -1.5, 2, -1])
    y_star = float(roots[np.abs(roots.imag) < 1e-12].real.max())
    return Blueprint(
        build=build, x0=np.full(n, -1.0), y0=np.full(n, -1.0), x_star=np.full(n, y_star**3 - y_star), response=response
    )


def valley() -> Blueprint:
    """F = (x - 2)^2 / 2 + (y_2 - 1)^2 / 2, f = (y_1 - x)^2 / 2 + 10 (y_2 - y_1^2)^2: Rosenbrock's valley, y = (x, x^2).

    The solution is the real root of 2 x^3 - x - 2.
    """

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: 0.5 * (x - 2).square().sum() + 0.5 * (y[1] - 1).square(),
            lambda x, y: 0.5 * (y[0] - x).square().sum() + 10 * (y[1] - y[0].square()).square(),
        )

    roots = np.roots([2, 0, -1, -2])
    x_star = roots[np.abs(roots.imag) < 1e-12].real  # x - 2 + 2 x (x^2 - 1) = 0, by F(x, (x, x^2))
    return Blueprint(
        build=build, x0=np.full(1, -1.0), y0=np.zeros(2), x_star=x_star, response=lambda x: torch.cat([x, x.square()])
    )


def wave() -> Blueprint:
    """F = (x - 2)^2 / 2 + y^2 / 2, f = (y - sin x)^2 / 2: x is the only root of x - 2 + sin(2 x) / 2."""

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: 0.5 * (x - 2).square().sum() + 0.5 * y.square().sum(),
            lambda x, y: 0.5 * (y - torch.sin(x)).square().sum(),
        )

    x = 2.5  # Newton steps converge from here
    for _ in range(20):
        x -= (x - 2 + math.sin(2 * x) / 2) / (1 + math.cos(2 * x))
    return Blueprint(build=build, x0=np.zeros(1), y0=np.zeros(1), x_star=np.full(1, x), response=torch.sin)


def quartic(n: int) -> Blueprint:
    """F = ||x - e||^2 / 2 + ||y||^2 / 2, f = sum (y_i - x_i)^4 / 4: x = y = e / 2, where f has zero curvature."""

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: 0.5 * (x - 1).square().sum() + 0.5 * y.square().sum(), lambda x, y: 0.25 * (y - x).pow(4).sum()
        )

    return Blueprint(build=build, x0=np.full(n, 2.0), y0=np.zeros(n), x_star=np.full(n, 0.5), response=lambda x: x.clone())


def dead_zone(n: int) -> Blueprint:
    """F = ||x - 2 e||^2 / 2 + ||y||^2 / 2, f = sum max(0, |y_i - x_i| - 1)^2 / 2: any y within 1 of x; x = 3/2 e, y = e / 2."""

    def build(cast: Cast) -> Problem:
        return Problem(
            lambda x, y: 0.5 * (x - 2).square().sum() + 0.5 * y.square().sum(),
            lambda x, y: 0.5 * ((y - x).abs() - 1).clamp(min=0).square().sum(),
        )

    return Blueprint(
        build=build,
        x0=np.zeros(n),
        y0=np.zeros(n),
        x_star=np.full(n, 1.5),
        response=lambda x: torch.zeros_like(x).clamp(x - 1, x + 1),  # the y within 1 of x that is nearest to 0, as F wants
    )


def one_sided() -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = ||y||^2 / 2 - <x, y>, y >= 0: y = max(x, 0).

    With s = (-1, 1, 0.5, 2) and t = (0.5, 2, -2, 1): x = (-1, 1.5, 0, 1.5), the third at the kink.
    """
    s, t = np.array([-1.0, 1.0, 0.5, 2.0]), np.array([0.5, 2.0, -2.0, 1.0])

    def build(cast: Cast) -> Problem:
        s_, t_ = cast(s), cast(t)
        return Problem(
            lambda x, y: 0.5 * (x - s_).square().sum() + 0.5 * (y - t_).square().sum(),
            lambda x, y: 0.5 * y.square().sum() - (x * y).sum(),
            y_set=NonNegative(),
        )

    return Blueprint(
        build=build,
        x0=np.ones(4),
        y0=np.ones(4),
        x_star=np.array([-1.0, 1.5, 0.0, 1.5]),
        response=lambda x: x.clamp(min=0),
    )


def circle() -> Blueprint:
    """F = ||x - (2, 0)||^2 / 2 + ||y - (0, 1)||^2 / 2, f = -<x, y>, ||y|| <= 1: y = x / ||x||.

    At the angle phi, the best x has norm 2 cos(phi), and F = 2 sin(phi)^2 + 1 - sin(phi): sin(phi) = 1/4.
    """

    def build(cast: Cast) -> Problem:
        s_, t_ = cast([2.0, 0.0]), cast([0.0, 1.0])
        return Problem(
            lambda x, y: 0.5 * (x - s_).square().sum() + 0.5 * (y - t_).square().sum(),
            lambda x, y: -(x * y).sum(),
            y_set=L2Ball(1.0),
        )

    x_star = np.array([15 / 8, math.sqrt(15) / 8])
    return Blueprint(build=build, x0=np.ones(2), y0=np.zeros(2), x_star=x_star, response=lambda x: x / x.norm())
