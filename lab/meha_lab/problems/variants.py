"""The paper's toys in other units and from other starts, to test that methods do not depend on either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meha.problem.nonsmooth import L1
from meha.problem.sets import Box
from meha.problems import Distance, KnownProblem, lasso, merely_convex, sine, strong_convex
from meha_lab.problems.collected import CollectedProblem, collected

__all__ = ["TOYS", "VARIANTS", "in_units", "started_near"]


def in_units(known: KnownProblem, *, x: float = 1.0, y: float = 1.0, F: float = 1.0, f: float = 1.0) -> CollectedProblem:
    """Multiply x, y, F and the lower level f + g of a toy by these numbers, and drop its constants.

    The distance to the solution and the presets stay the same.

    >>> problem = in_units(strong_convex(n=2), x=100.0, F=0.01)
    >>> problem.x_star
    tensor([50., 50.], dtype=torch.float64)
    >>> problem.error(problem.x0, problem.y0) == strong_convex(n=2).distance(2 * torch.ones(2), 2 * torch.ones(2)).x
    True
    """
    g, box = known.nonsmooth, known.x_set
    weight: Any = g.weight if isinstance(g, L1) else None
    if not (g is None or callable(weight)) or not isinstance(box, Box | None) or known.y_set:
        raise ValueError(
            f"known: {known.name} cannot be put in other units; it must have no y_set, at most a Box as x_set, at most an L1"
            " whose weight is a function of x."
        )

    def distance(u: Tensor, v: Tensor) -> Distance:
        return known.distance(u / x, v / y)

    return replace(
        collected(known),
        upper=lambda u, v: F * known.upper(u / x, v / y),
        lower=lambda u, v: f * known.lower(u / x, v / y),
        nonsmooth=None if g is None else L1(lambda u: f / y * weight(u / x)),  # |v| is y times |v / y|
        x_set=None if box is None else Box(x * box.low, x * box.high),
        x0=x * known.x0,
        y0=y * known.y0,
        x_star=x * known.x_star,
        y_star=y * known.y_star,
        upper_star=None if known.upper_star is None else F * known.upper_star,
        distance=distance,
        constants=None,
        metrics={},  # these and the answer are in the old units
        answer=None,
    )


def started_near(known: KnownProblem, seed: int) -> CollectedProblem:
    """Start a toy from a random point of X near its start, and drop its constants.

    >>> started_near(sine(n=1), seed=0).x0
    tensor([-4.9213], dtype=torch.float64)
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(z: Tensor) -> Tensor:
        noise = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        return z + 0.1 * (1 + z.abs()) * noise

    x0, y0 = moved(known.x0), moved(known.y0)
    return replace(collected(known), constants=None, x0=x0 if known.x_set is None else known.x_set.project(x0), y0=y0)


TOYS: dict[str, Callable[..., KnownProblem]] = {
    **{f"strong convex, n = {n}": partial(strong_convex, n) for n in (10, 100)},
    "merely convex, n = 10": partial(merely_convex, 10),
    **{f"sine, n = {n}": partial(sine, n) for n in (1, 10, 100, 1000)},
    **{f"lasso, n = {n}": partial(lasso, n) for n in (2, 100, 1000)},
}
"""Functions that build a toy, given ``dtype`` and ``device``, by its name."""

VARIANTS: dict[str, Callable[[KnownProblem], CollectedProblem]] = {
    "": lambda known: replace(collected(known), constants=None),
    **{
        f", {name} times {unit:g}": partial(in_units, **dict[str, Any]({name: unit}))
        for name in ("x", "y", "F", "f")
        for unit in (0.01, 100.0)
    },
    **{f", start {seed + 1}": partial(started_near, seed=seed) for seed in range(3)},
}
"""Functions that change a toy and drop its constants, by the suffix of its name."""
