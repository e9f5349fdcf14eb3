"""Intervals of parameters, for searches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

__all__ = ["Interval", "LogUniform", "Uniform"]


@dataclass(frozen=True)
class Interval(ABC):
    """Values that a parameter may take, from ``low`` to ``high``."""

    low: float
    high: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        ends: tuple[Any, Any] = (self.low, self.high)
        if not all(isinstance(end, Real) and math.isfinite(end) for end in ends):
            raise ValueError(f"{name}: low and high must be finite numbers, got {self.low!r} and {self.high!r}.")
        if not self.low < self.high:
            raise ValueError(f"{name}: low must be less than high, got {self.low!r} and {self.high!r}.")

    def at(self, share: Tensor) -> Tensor:
        """Values at these shares of the way from low (0) to high (1)."""
        return self._between(share).clamp(self.low, self.high)

    @abstractmethod
    def _between(self, share: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Uniform(Interval):
    """Interval [low, high] with uniform values.

    >>> import torch
    >>> Uniform(1.0, 3.0).at(torch.tensor([0.0, 0.5, 1.0]))
    tensor([1., 2., 3.])
    """

    def _between(self, share: Tensor) -> Tensor:
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class LogUniform(Interval):
    """Interval [low, high], 0 < low, with uniform logarithms: all orders of magnitude count alike.

    >>> import torch
    >>> LogUniform(0.01, 1.0).at(torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0100, 0.1000, 1.0000])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > 0:
            raise ValueError(f"LogUniform: low must be positive, got {self.low!r}; use Uniform for an interval with zero.")

    def _between(self, share: Tensor) -> Tensor:
        return self.low * (self.high / self.low) ** share
