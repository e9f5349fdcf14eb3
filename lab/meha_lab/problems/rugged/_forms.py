"""Parts that many rugged problems share: an upper level that tracks a target, and random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from meha_lab.problems.blueprints import Array, Cast

__all__ = ["Numbers", "numbers", "tracking"]


Numbers = Any
"""An array of numbers, or nested lists that numpy can convert to one."""


def tracking(cast: Cast, s: Array, t: Array, weight: float = 1.0, cross: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return F(x, y) = ||x - s||^2 / 2 + weight / 2 ||y - t||^2 + cross <x, y>."""
    s_, t_ = cast(s), cast(t)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        value = 0.5 * (x - s_).square().sum() + 0.5 * weight * (y - t_).square().sum()
        return value + cross * (x * y).sum() if cross else value

    return upper


def numbers(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Array:
    """Return random numbers between ``low`` and ``high``, rounded to three digits."""
    return np.random.default_rng(seed).uniform(low, high, shape).round(3)
