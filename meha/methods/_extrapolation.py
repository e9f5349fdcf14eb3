"""Richardson's extrapolation of what depends on a parameter that grows by a known factor."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

__all__ = ["richardson"]

T = TypeVar("T", float, Tensor)


def richardson(new: T, old: T, ratio: float) -> T:
    """The limit of a sequence whose error was divided by ``ratio`` between ``old`` and ``new``.

    >>> richardson(1.25, 2.0, 4.0)  # of 1 + 1/c, at c = 4 and c = 1
    1.0
    """
    return new + (new - old) / (ratio - 1)
