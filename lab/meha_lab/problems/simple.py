"""Simple bilevel problems: min F(y) over the solutions of one lower problem min_{y in Y} f(y) + g(y); there is no x."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meha.problem.nonsmooth import L1, NonSmooth
from meha.problem.sets import Box, ConvexSet
from meha.problems import Distance, relative
from meha_lab.problems.blueprints import NONSMOOTH, SMOOTH, Array, Cast
from meha_lab.problems.collected import CollectedProblem, Region

__all__ = ["FAMILIES", "HELD_OUT"]


Objective = Callable[[Tensor], Tensor]


def _known(
    name: str,
    state: Callable[[Cast], tuple[Objective, Objective]],
    y0: Sequence[float] | Array,
    y_star: Sequence[float] | Array,
    *,
    nonsmooth: NonSmooth | None = None,
    y_set: ConvexSet | None = None,
    reach: float = 2.0,
    dtype: torch.dtype = torch.float64,
    device: Any = None,
) -> CollectedProblem:
    """Build a problem without x; ``state`` returns F and f, and random starts have |y_i| <= ``reach``."""

    def cast(value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value, dtype=float)).to(device, dtype)

    upper, lower = state(cast)
    answer = torch.as_tensor(np.asarray(y_star, dtype=float))
    return CollectedProblem(
        upper=upper,
        lower=lower,
        nonsmooth=nonsmooth,
        y_set=y_set,
        name=name,
        x0=None,
        y0=cast(y0),
        y_star=cast(answer),
        upper_star=float(upper(cast(answer))),
        distance=lambda x, y: Distance(0.0, relative(y.detach().to("cpu", torch.float64), answer)),
        presets={"paper": SMOOTH if nonsmooth is None else NONSMOOTH},
        answer=lambda x: answer,
        value=lambda x: float(upper(cast(answer))),
        region=Region((0.0, 0.0), (-reach, reach)),
    )


def _near(cast: Cast, t: Array) -> Objective:
    t_ = cast(t)
    return lambda y: 0.5 * (y - t_).square().sum()


def least_squares(name: str, m: int, count: int, *, seed: int, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = ||A y - b||^2 / 2 with fewer equations than unknowns: the projection of t."""
    rng = np.random.default_rng(seed)
    A, b, t = rng.normal(size=(count, m)).round(2), rng.normal(size=count).round(2), rng.normal(size=m).round(2)

    def state(cast: Cast) -> tuple[Objective, Objective]:
        A_, b_ = cast(A), cast(b)
        return _near(cast, t), lambda y: 0.5 * (A_ @ y - b_).square().sum()

    return _known(name, state, np.zeros(m), t + np.linalg.pinv(A) @ (b - A @ t), **options)


def quartic_equation(name: str, a: Array, w: Array, **options: Any) -> CollectedProblem:
    """F = sum_i w_i y_i^2 / 2, f = (a^T y - 1)^4 / 4: y is proportional to a / w, and f has zero curvature."""
    y_star = a / w / (a @ (a / w))

    def state(cast: Cast) -> tuple[Objective, Objective]:
        a_, w_ = cast(a), cast(w)
        return lambda y: 0.5 * (w_ * y.square()).sum(), lambda y: 0.25 * ((a_ * y).sum() - 1).pow(4)

    return _known(name, state, np.ones(len(a)), y_star, **options)


def sphere(name: str, t: Array, **options: Any) -> CollectedProblem:
    """F = -<t, y>, f = (||y||^2 - 1)^2 / 4: y = t / ||t||."""

    def state(cast: Cast) -> tuple[Objective, Objective]:
        t_ = cast(t)
        return lambda y: -(t_ * y).sum(), lambda y: 0.25 * (y.square().sum() - 1).square()

    return _known(name, state, -0.5 * np.ones(len(t)), t / np.linalg.norm(t), **options)


def signs(name: str, t: Array, tilt: float, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = sum_i (y_i^2 - 1)^2 / 4 + tilt y_i.

    Without tilt, y_i is the sign of t_i; with it, the left basin is the deeper one, and y_i the least root of y^3 - y + tilt.
    """
    root = np.roots([1, 0, -1, tilt]).real.min()

    def state(cast: Cast) -> tuple[Objective, Objective]:
        return _near(cast, t), lambda y: (0.25 * (y.square() - 1).square() + tilt * y).sum()

    return _known(name, state, np.full(len(t), 0.8), np.full(len(t), root) if tilt else np.sign(t), **options)


def lattice(name: str, t: Array, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = sum_i 1 - cos y_i: the multiples of 2 pi that are nearest to t."""

    def state(cast: Cast) -> tuple[Objective, Objective]:
        return _near(cast, t), lambda y: (1 - torch.cos(y)).sum()

    return _known(name, state, np.ones(len(t)), 2 * np.pi * np.round(t / (2 * np.pi)), reach=7.0, **options)


def hyperbola(name: str, t: Array, product: float, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = (y_1 y_2 - product)^2 / 2: the nearest point of a hyperbola.

    y_2 = product / y_1, so y_1 is a root of y^4 - t_1 y^3 + product t_2 y - product^2.
    """
    roots = np.roots([1, -t[0], 0, product * t[1], -(product**2)])
    first = roots[np.abs(roots.imag) < 1e-9].real  # all stationary points of the distance
    points = np.stack([first, product / first], 1)

    def state(cast: Cast) -> tuple[Objective, Objective]:
        return _near(cast, t), lambda y: 0.5 * (y[0] * y[1] - product).square()

    return _known(name, state, [0.5, 0.5], points[np.square(points - t).sum(1).argmin()], **options)


def wave(name: str, t: Array, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = (y_2 - sin y_1)^2 / 2: the nearest point of a sine curve, by a grid and Newton's method."""
    grid = np.linspace(-8, 8, 4001)
    # The grid selects the global minimum among the many local ones; Newton steps make it accurate.
    y = grid[np.argmin((grid - t[0]) ** 2 + (np.sin(grid) - t[1]) ** 2)]
    for _ in range(30):
        slope = y - t[0] + (np.sin(y) - t[1]) * np.cos(y)
        y -= slope / (1 + np.cos(y) ** 2 - (np.sin(y) - t[1]) * np.sin(y))

    def state(cast: Cast) -> tuple[Objective, Objective]:
        return _near(cast, t), lambda y: 0.5 * (y[1] - torch.sin(y[0])).square()

    return _known(name, state, [0.0, 0.0], [y, np.sin(y)], **options)


def polyhedron(name: str, A: Array, b: Array, t: Array, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = ||max(0, A y - b)||^2 / 2: the projection of t on {A y <= b}, by all sets of active rows."""
    points = []
    for count in range(len(t) + 1):
        for active in itertools.combinations(range(len(A)), count):
            rows = A[list(active)]
            point = t if not active else t - np.linalg.pinv(rows) @ (rows @ t - b[list(active)])  # rows as equations
            if (A @ point <= b + 1e-9).all():
                points.append(point)
    y_star = min(points, key=lambda point: float(np.square(point - t).sum()))

    def state(cast: Cast) -> tuple[Objective, Objective]:
        A_, b_ = cast(A), cast(b)
        return _near(cast, t), lambda y: 0.5 * (A_ @ y - b_).clamp(min=0).square().sum()

    return _known(name, state, np.zeros(len(t)), y_star, **options)


def shares(name: str, t: Array, w: Array, **options: Any) -> CollectedProblem:
    """F = sum_i w_i (y_i - t_i)^2 / 2, f = (sum_i y_i - 1)^2 / 2, 0 <= y <= 1: y_i = clip(t_i - l / w_i, 0, 1) for one l."""
    low, high = -10.0, 10.0
    for _ in range(200):  # bisection: the sum of y falls with l
        level = 0.5 * (low + high)
        y_star = np.clip(t - level / w, 0, 1)
        low, high = (level, high) if y_star.sum() > 1 else (low, level)

    def state(cast: Cast) -> tuple[Objective, Objective]:
        t_, w_ = cast(t), cast(w)
        return lambda y: 0.5 * (w_ * (y - t_).square()).sum(), lambda y: 0.5 * (y.sum() - 1).square()

    return _known(name, state, np.full(len(t), 0.5), y_star, y_set=Box(0.0, 1.0), **options)


def equal_columns(name: str, t: Array, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = (sum_i y_i - 2)^2 / 2, g = ||y||_1 / 2: all y >= 0 with the sum 3/2 are solutions.

    The best is the projection of t on a simplex.
    """
    # The projection on {y >= 0, sum y = 3/2} by sorting (Held, Wolfe and Crowder 1974).
    ordered = np.sort(t)[::-1]
    levels = (np.cumsum(ordered) - 1.5) / np.arange(1, len(t) + 1)
    y_star = np.maximum(t - levels[ordered > levels][-1], 0)

    def state(cast: Cast) -> tuple[Objective, Objective]:
        return _near(cast, t), lambda y: 0.5 * (y.sum() - 2).square()

    return _known(name, state, np.zeros(len(t)), y_star, nonsmooth=L1(0.5), **options)


def rotation(name: str, m: int, r: int, *, seed: int, **options: Any) -> CollectedProblem:
    """F = ||Y - T||^2 / 2, f = ||Y Y^T - A||^2 / 4 for matrices Y of r columns; A has rank r: Y is known up to a rotation.

    Y = B U V^T, where B B^T = A, and U, V are the singular vectors of B^T T.
    """
    rng = np.random.default_rng(seed)
    B, T = rng.normal(size=(m, r)).round(2), rng.normal(size=(m, r)).round(2)
    U, _, V = np.linalg.svd(B.T @ T)  # the orthogonal Procrustes problem (Schoenemann 1966)

    def state(cast: Cast) -> tuple[Objective, Objective]:
        A_ = cast(B @ B.T)
        return _near(cast, T), lambda y: 0.25 * (y @ y.mT - A_).square().sum()

    return _known(name, state, 0.3 * np.ones((m, r)) + 0.2 * np.eye(m, r), B @ U @ V, **options)


def dead_zones(name: str, c: Array, t: Array, **options: Any) -> CollectedProblem:
    """F = ||y - t||^2 / 2, f = sum_i max(0, |y_i - c_i| - 1)^2 / 2: any y_i within 1 of c_i."""

    def state(cast: Cast) -> tuple[Objective, Objective]:
        c_ = cast(c)
        return _near(cast, t), lambda y: 0.5 * ((y - c_).abs() - 1).clamp(min=0).square().sum()

    return _known(name, state, np.zeros(len(t)), np.clip(t, c - 1, c + 1), **options)


def _members(makers: dict[str, Callable[..., CollectedProblem]]) -> dict[str, Callable[..., CollectedProblem]]:
    return {name: partial(make, name) for name, make in makers.items()}


FAMILIES: dict[str, dict[str, Callable[..., CollectedProblem]]] = {
    "simple, equations": _members(
        {
            "nearest solution of 3 equations": partial(least_squares, m=6, count=3, seed=0),
            "nearest solution of 8 equations": partial(least_squares, m=20, count=8, seed=1),
            "quartic equation": partial(quartic_equation, a=np.array([1.0, -2.0, 0.5]), w=np.array([1.0, 2.0, 0.5])),
            "shares": partial(shares, t=np.array([0.9, 0.1, -0.3, 0.6, 0.4, 0.2]), w=np.array([1.0, 2.0, 1.5, 0.7, 3.0, 1.0])),
        }
    ),
    "simple, curves": _members(
        {
            "point of a sphere": partial(sphere, t=np.array([0.5, -1.0, 0.8])),
            "point of a hyperbola": partial(hyperbola, t=np.array([2.0, 0.8]), product=1.0),
            "point of a sine curve": partial(wave, t=np.array([2.0, 2.0])),
            "rotation, 4 x 2": partial(rotation, m=4, r=2, seed=2),
        }
    ),
    "simple, valleys": _members(
        {
            "signs": partial(signs, t=np.array([0.4, -0.7, 1.5]), tilt=0.0),
            "lattice": partial(lattice, t=np.array([5.0, -2.0])),
            "left valleys, 10 of y": partial(signs, t=np.linspace(-0.5, 1.5, 10), tilt=0.2),
            "lattice, 5 of y": partial(lattice, t=np.array([5.0, -4.0, 1.0, 8.0, -7.0])),
        }
    ),
    "simple, flat": _members(
        {
            "dead zones": partial(dead_zones, c=np.array([1.0, -2.0, 0.5, 3.0]), t=np.array([-1.0, -1.5, 2.0, 2.5])),
            "polyhedron": partial(
                polyhedron,
                A=np.array([[1.0, 1.0, 0.0], [0.0, 1.0, -1.0], [-1.0, 0.0, 0.5], [0.5, -1.0, 1.0]]),
                b=np.array([1.0, 0.5, 1.0, 0.8]),
                t=np.array([2.0, 1.5, 1.0]),
            ),
            "equal columns": partial(equal_columns, t=np.array([1.0, 0.2, -0.5, 0.9])),
        }
    ),
}

HELD_OUT: set[str] = set()
"""Families whose members are all in the held-out half."""
