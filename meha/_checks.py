"""Checks of numbers, with errors that name the argument."""

from __future__ import annotations

import math
from numbers import Integral, Real

__all__ = ["RefusalError", "check_count", "check_positive", "check_tolerance"]


class RefusalError(Exception):
    """A command that cannot run, and why, in a sentence for the user."""


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}: must be a positive number, got {value!r}.")


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: must be a whole number of at least 1, got {value!r}.")


def check_tolerance(name: str, value: object) -> None:
    """Raise unless ``value`` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name}: must be a number of at least 0, got {value!r}.")
