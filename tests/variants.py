"""The toy problems in other units and from other starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import meha
from meha.problems import KnownProblem, lasso, merely_convex, sine, strong_convex

TOYS = {
    "strong 10": (strong_convex, 10),
    "strong 100": (strong_convex, 100),
    "merely 10": (merely_convex, 10),
    "sine 1": (sine, 1),
    "sine 10": (sine, 10),
    "sine 100": (sine, 100),
    "sine 1000": (sine, 1000),
    "lasso 2": (lasso, 2),
    "lasso 100": (lasso, 100),
    "lasso 1000": (lasso, 1000),
}

UNITS = [(name, factor) for name in ("x", "y", "F", "f") for factor in (0.01, 100.0)]


class Variant(NamedTuple):
    """A toy without its constants, in units of its own."""

    problem: meha.Problem
    x0: Tensor
    y0: Tensor
    toy: KnownProblem
    a: float = 1.0
    b: float = 1.0

    def error(self, x: Any, y: Any) -> float:
        return self.toy.distance(x / self.a, y / self.b).x


def toy(name: str, dtype: torch.dtype = torch.float64) -> KnownProblem:
    make, n = TOYS[name]
    return make(n, dtype=dtype)


def rescaled(known: KnownProblem, *, x: float = 1.0, y: float = 1.0, F: float = 1.0, f: float = 1.0) -> Variant:
    """The problem with x, y, F and f multiplied."""
    term = None
    if known.nonsmooth is not None:
        term = meha.nonsmooth.L1(weight=lambda v: f * v / (x * y))
    problem = meha.Problem(
        upper=lambda u, v: F * known.upper(u / x, v / y),
        lower=lambda u, v: f * known.lower(u / x, v / y),
        nonsmooth=term,
        x_set=None if known.x_set is None else meha.sets.Box(0.0, x),
    )
    return Variant(problem, x * known.x0, y * known.y0, known, x, y)


def near(known: KnownProblem, seed: int) -> Variant:
    """From a random start near the standard one."""
    generator = torch.Generator().manual_seed(seed)
    plain = rescaled(known)
    starts = []
    for start in (known.x0, known.y0):
        noise = torch.randn(start.shape, generator=generator, dtype=torch.float64).to(start)
        starts.append(start + 0.1 * (1 + start.abs()) * noise)
    x0 = starts[0] if known.x_set is None else known.x_set.project(starts[0])
    return plain._replace(x0=x0, y0=starts[1])


def variants(known: KnownProblem) -> Iterator[tuple[str, Variant]]:
    yield "plain", rescaled(known)
    for name, factor in UNITS:
        yield f"{name} times {factor:g}", rescaled(known, **{name: factor})
    for seed in range(3):
        yield f"start {seed}", near(known, seed)
