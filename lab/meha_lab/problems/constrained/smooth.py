"""Problems with smooth constraints and few unknowns, whose lower level is solved on a refined grid or in closed form.

Functions for a grid use only ``x[0]``, ``y[0]`` and arithmetic, so that they also accept many y at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meha.problem.constraints import Bounds, Constraint, Linear, Smooth
from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Cast, double
from meha_lab.problems.constrained.known import TIE, Coupled

__all__ = ["SMOOTH", "OneY"]


POINTS, ZOOMS = 2001, 4
"""Number of points of a grid of y, and how often it is refined around its minima."""

VALLEYS = 6
"""Largest number of minima of a grid that are refined."""

Function = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class OneY:
    """A problem with one y between fixed bounds, and inequalities on both levels.

    Args:
        F, f: the objectives.
        h, G: lower and upper inequalities, not positive where they hold.
        x, y: the bounds of all x, and of y.
        start: x0 and y0.
    """

    F: Function
    f: Function
    h: tuple[Function, ...]
    G: tuple[Function, ...] = ()
    x: tuple[float, float] = (-2.0, 2.0)
    y: tuple[float, float] = (-3.0, 3.0)
    start: tuple[list[float], float] = field(default_factory=lambda: ([0.0], 0.0))

    def state(self, cast: Cast) -> Problem:
        """Return the problem on tensors."""
        lower: list[Constraint] = [Bounds(*self.y)]
        if self.h:
            lower.append(Smooth(lambda x, y: torch.stack([h(x, y) for h in self.h])))
        upper = (Smooth(lambda x, y: [G(x, y) for G in self.G]),) if self.G else ()
        return Problem(
            lambda x, y: self.F(x, y),
            lambda x, y: self.f(x, y),
            x_set=Box(*self.x),
            lower_constraints=lower,
            upper_constraints=upper,
        )

    def answer(self, x: Array) -> Array | None:
        """Return the solution of the lower level by a refined grid; the best for F if there are several."""
        at = double(x)
        windows = [self.y]
        candidates: list[tuple[float, float]] = []
        for _ in range(ZOOMS):  # each zoom divides the step by 500: 2001 points over 4 steps
            minima: list[tuple[float, float, float]] = []
            for low, high in windows:
                y = torch.linspace(low, high, POINTS, dtype=torch.float64)
                inside = torch.ones(POINTS, dtype=torch.bool)
                for h in self.h:
                    inside &= h(at, y[None]) <= 1e-12
                f = torch.where(inside, self.f(at, y[None]), torch.inf)
                left = torch.cat([torch.full((1,), torch.inf, dtype=torch.float64), f[:-1]])  # walls: ends can be minima
                right = torch.cat([f[1:], torch.full((1,), torch.inf, dtype=torch.float64)])
                step = (high - low) / (POINTS - 1)
                places = torch.nonzero((f <= left) & (f <= right) & inside).reshape(-1)[: 5 * VALLEYS].tolist()
                minima += [(float(f[k]), float(y[k]), step) for k in places]
            if not minima:
                return None
            minima.sort()
            candidates = [(value, y) for value, y, _ in minima]
            windows = [(max(self.y[0], y - 2 * s), min(self.y[1], y + 2 * s)) for _, y, s in minima[:VALLEYS]]
        least = candidates[0][0]
        # The optimistic solution: among tied minima, those that meet the upper constraints, then the best for F.
        ties = [np.array([y]) for value, y in candidates if value <= least + TIE * (1 + abs(least))]
        meeting = [y for y in ties if all(float(G(at, double(y))) <= 1e-9 for G in self.G)] or ties
        return min(meeting, key=lambda y: float(self.F(at, double(y))))

    def coupled(self) -> Coupled:
        """Return the problem with its start and its answer."""
        n = len(self.start[0])
        box = (np.full(n, self.x[0]), np.full(n, self.x[1]))
        return Coupled(build=self.state, x0=np.array(self.start[0]), y0=np.array([self.start[1]]), answer=self.answer, box=box)


def _one(**parts: Any) -> Callable[[], Coupled]:
    return OneY(**parts).coupled


def disc(seed: int) -> Coupled:
    """f = ||y - t||^2 over the disc of radius 1 around x: the projection of t."""
    random = np.random.default_rng(seed)
    t, a, w = 2 * random.normal(size=2), random.normal(size=2), random.normal(size=2)

    def state(cast: Cast) -> Problem:
        target, centre, slope = cast(t), cast(a), cast(w)
        return Problem(
            lambda x, y: (x - centre).square().sum() + slope @ y + (y * y).sum() / 4,
            lambda x, y: (y - target).square().sum(),
            x_set=Box(-3.0, 3.0),
            lower_constraints=Smooth(lambda x, y: (y - x).square().sum() - 1),
        )

    def answer(x: Array) -> Array:
        away = t - x
        length = np.linalg.norm(away)
        return t if length <= 1 else x + away / length

    return Coupled(build=state, x0=np.zeros(2), y0=np.zeros(2), answer=answer, box=(np.full(2, -3.0), np.full(2, 3.0)))


def circle(seed: int) -> Coupled:
    """f = -x'y on the circle ||y|| = 1, an equation that is not convex: y = x / ||x||."""
    random = np.random.default_rng(seed)
    a, b = np.array([1.5, 0.5]) + 0.3 * random.normal(size=2), random.normal(size=2)

    def state(cast: Cast) -> Problem:
        centre, target = cast(a), cast(b)
        return Problem(
            lambda x, y: (x - centre).square().sum() + (y - target).square().sum(),
            lambda x, y: -(x * y).sum(),
            x_set=Box(0.2, 3.0),
            lower_constraints=Smooth(equations=lambda x, y: (y * y).sum() - 1),
        )

    def answer(x: Array) -> Array:
        return x / np.linalg.norm(x)

    return Coupled(build=state, x0=np.ones(2), y0=np.array([1.0, 0.0]), answer=answer, box=(np.full(2, 0.2), np.full(2, 3.0)))


def split(seed: int, *, smooth: bool) -> Coupled:
    """f = y_1^2 + w y_2^2 with y_1 + y_2 = x: shares in closed form; the upper level limits their product or sum."""
    random = np.random.default_rng(seed)
    w, a = 1 + random.random(), 2 + random.random()

    def state(cast: Cast) -> Problem:
        upper: Constraint = Smooth(lambda x, y: y[0] * y[1] - 0.5) if smooth else Linear(None, cast([[1.0, -1.0]]), cast([0.4]))
        return Problem(
            lambda x, y: (x - a).square().sum() + 0.1 * (y * y).sum(),
            lambda x, y: y[0] ** 2 + w * y[1] ** 2,
            lower_constraints=Linear(A_eq=cast([[-1.0]]), B_eq=cast([[1.0, 1.0]]), b_eq=cast([0.0])),
            upper_constraints=upper,
        )

    def answer(x: Array) -> Array:
        return np.array([w * x[0], x[0]]) / (1 + w)

    return Coupled(build=state, x0=np.array([3.0]), y0=np.zeros(2), answer=answer, box=(np.full(1, -4.0), np.full(1, 4.0)))


SMOOTH: dict[str, dict[str, Callable[[], Coupled]]] = {
    "curved bounds": {
        "y below a parabola": _one(
            F=lambda x, y: (x[0] - 1.5) ** 2 + y[0] ** 2,
            f=lambda x, y: (y[0] - 2) ** 2,
            h=(lambda x, y: y[0] - x[0] ** 2,),
        ),
        "y above an exponential": _one(
            F=lambda x, y: (x[0] - 2) ** 2 + (y[0] - 1) ** 2,
            f=lambda x, y: y[0] + 0 * x[0],
            h=(lambda x, y: torch.exp(torch.as_tensor(x[0])) - y[0],),
            y=(0.0, 9.0),
            start=([1.0], 0.0),
        ),
        "y in an ellipse with x": _one(
            F=lambda x, y: (x[0] - 1) ** 2 + (y[0] - 0.2) ** 2,
            f=lambda x, y: -y[0] + 0 * x[0],
            h=(lambda x, y: x[0] ** 2 + 4 * y[0] ** 2 - 4,),
        ),
        "product bound": _one(
            F=lambda x, y: (x[0] - 2) ** 2 + (y[0] - 2) ** 2,
            f=lambda x, y: (y[0] - 3) ** 2 + 0.1 * x[0] * y[0],
            h=(lambda x, y: x[0] * y[0] - 2,),
            x=(0.2, 3.0),
            start=([1.0], 3.0),
        ),
        "two x and a paraboloid": _one(
            F=lambda x, y: (x[0] - 1) ** 2 + (x[1] + 0.5) ** 2 + y[0] ** 2,
            f=lambda x, y: (y[0] - 2.5) ** 2 + x[1] * y[0],
            h=(lambda x, y: y[0] - 0.5 - x[0] ** 2 - x[1] ** 2,),
            start=([0.0, 0.0], 0.0),
        ),
        "logarithmic demand": _one(
            F=lambda x, y: -x[0] * y[0] + 0.5 * x[0] ** 2,
            f=lambda x, y: (1 + x[0]) * y[0] - 2 * torch.log(y[0]),
            h=(lambda x, y: y[0] * (1 + x[0]) - 1.5,),
            x=(0.0, 4.0),
            y=(0.05, 4.0),
            start=([0.5], 1.0),
        ),
    },
    "several valleys": {
        "cubic with a moving bound": _one(
            F=lambda x, y: (x[0] + 0.6) ** 2 + y[0] ** 2,
            f=lambda x, y: y[0] ** 3 / 3 - x[0] * y[0],
            h=(lambda x, y: y[0] - 1 - x[0] / 2, lambda x, y: -1.2 - y[0]),
            x=(-1.0, 1.0),
        ),
        "concave between moving ends": _one(
            F=lambda x, y: (x[0] - 1) ** 2 + (y[0] - 1) ** 2,
            f=lambda x, y: -(y[0] ** 2) + 0 * x[0],
            h=(lambda x, y: y[0] - 1, lambda x, y: -1 - x[0] / 2 - y[0]),
            x=(-1.0, 2.0),
            start=([0.5], 0.0),
        ),
        "double well": _one(
            F=lambda x, y: (x[0] - 0.5) ** 2 + (y[0] - 0.8) ** 2,
            f=lambda x, y: (y[0] ** 2 - 1) ** 2 + 0.3 * x[0] * y[0],
            h=(lambda x, y: y[0] - 1.2 - x[0] ** 2,),
        ),
        "waves": _one(
            F=lambda x, y: (x[0] - 1) ** 2 + 0.5 * (y[0] - 0.5) ** 2,
            f=lambda x, y: torch.sin(3 * y[0]) + (y[0] - x[0]) ** 2 / 4,
            h=(lambda x, y: y[0] - 2 - 0.2 * x[0],),
            G=(lambda x, y: -0.8 - y[0] - 0.5 * x[0],),
        ),
        "quartic, three valleys": _one(
            F=lambda x, y: (x[0] + 1) ** 2 + y[0],
            f=lambda x, y: 0.1 * y[0] ** 6 - 0.8 * y[0] ** 4 + 1.4 * y[0] ** 2 + x[0] * y[0],
            h=(lambda x, y: -y[0] - 2 + 0.5 * x[0],),
            y=(-2.5, 2.5),
            start=([1.0], 1.0),
        ),
        "concave in a moving box": _one(
            F=lambda x, y: x[0] ** 2 + x[1] ** 2 + 2 * (y[0] + 0.5) ** 2,
            f=lambda x, y: -(y[0] ** 2) + x[0] * y[0],
            h=(lambda x, y: y[0] - 1 - x[1], lambda x, y: -1 - y[0]),
            x=(-1.0, 1.0),
            start=([0.5, 0.5], 0.0),
        ),
    },
    "smooth above": {
        "outside a circle": _one(
            F=lambda x, y: x[0] ** 2 + (y[0] - 0.2) ** 2,
            f=lambda x, y: (y[0] - x[0]) ** 2,
            h=(lambda x, y: y[0] - 0.8,),
            G=(lambda x, y: 1 - x[0] ** 2 - y[0] ** 2,),
            start=([0.3], 0.0),
        ),
        "quartic above": _one(
            F=lambda x, y: (x[0] ** 2 - 1) ** 2 + 0.2 * x[0] + y[0] ** 2,
            f=lambda x, y: (y[0] - x[0] - 0.5) ** 2,
            h=(lambda x, y: y[0] ** 2 + x[0] ** 2 - 1.5,),
            G=(lambda x, y: y[0] - x[0] - 1,),
            start=([1.5], 1.0),
        ),
    },
    "discs": {"disc, far target": partial(disc, 0), "disc, near target": partial(disc, 3)},
    "circles": {"circle of directions": partial(circle, 0), "circle of directions, other target": partial(circle, 1)},
    "shares": {
        "shares with a limited difference": partial(split, 0, smooth=False),
        "shares with a limited product": partial(split, 1, smooth=True),
    },
}
