"""Problems of the collection in other units of x, y, F and f."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double

__all__ = ["scaled"]


def scaled(
    make: Callable[[], Blueprint], *, x: Array | float = 1.0, y: Array | float = 1.0, upper: float = 1.0, lower: float = 1.0
) -> Blueprint:
    """Multiply x, y, F and f of a smooth problem, without Y and with at most a box as X, by these numbers.

    The distance to the solution stays the same.
    """
    blueprint = make()
    original = blueprint.exact
    if original.nonsmooth is not None or original.y_set is not None or not isinstance(original.x_set, Box | None):
        raise ValueError(
            "make: cannot be scaled; the problem must have neither nonsmooth nor y_set, and at most a Box as x_set."
        )
    x, y = x * np.ones(blueprint.x0.shape), y * np.ones(blueprint.y0.shape)
    x_, y_ = double(x), double(y)

    def build(cast: Cast) -> Problem:
        base, by_x, by_y = blueprint.build(cast), cast(x), cast(y)
        return replace(
            base,
            upper=lambda u, v: upper * base.upper(u / by_x, v / by_y),
            lower=lambda u, v: lower * base.lower(u / by_x, v / by_y),
            constants=None,  # they hold in the old units only
            x_set=None if not isinstance(base.x_set, Box) else Box(by_x * base.x_set.low, by_x * base.x_set.high),
        )

    def response(u: Tensor) -> Tensor:
        return y_ * blueprint.respond(u / x_)

    x_star = None if blueprint.x_star is None else x * blueprint.x_star
    return replace(blueprint, build=build, x0=x * blueprint.x0, y0=y * blueprint.y0, x_star=x_star, response=response, units=x)
