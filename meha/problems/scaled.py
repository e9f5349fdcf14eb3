"""The same problem in other units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from meha.problem import Problem
from meha.problems.cases import Array, Case, Cast, double
from meha.sets import Box

__all__ = ["scaled"]


def scaled(
    make: Callable[[], Case], *, x: Array | float = 1.0, y: Array | float = 1.0, upper: float = 1.0, lower: float = 1.0
) -> Case:
    """A smooth case, without Y and with at most a box for x, with x, y, F and f multiplied by these numbers.

    The distance to the solution stays that of the original.
    """
    case = make()
    original = case.exact
    if original.nonsmooth is not None or original.y_set is not None or not isinstance(original.x_set, Box | None):
        raise ValueError("make: can only be scaled without nonsmooth and y_set, and with a Box or nothing as x_set.")
    x, y = x * np.ones(case.x0.shape), y * np.ones(case.y0.shape)
    x_, y_ = double(x), double(y)

    def state(cast: Cast) -> Problem:
        base, by_x, by_y = case.state(cast), cast(x), cast(y)
        return Problem(
            lambda u, v: upper * base.upper(u / by_x, v / by_y),
            lambda u, v: lower * base.lower(u / by_x, v / by_y),
            x_set=None if not isinstance(base.x_set, Box) else Box(by_x * base.x_set.low, by_x * base.x_set.high),
        )

    def response(u: Tensor) -> Tensor:
        return y_ * case.respond(u / x_)

    x_star = None if case.x_star is None else x * case.x_star
    return replace(case, state=state, x0=x * case.x0, y0=y * case.y0, x_star=x_star, response=response, units=x)
