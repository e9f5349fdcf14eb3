"""Checks of numbers, with errors that name the argument."""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np

__all__ = ["RefusalError", "check_count", "check_positive", "check_share", "check_switch", "check_tolerance"]


LONGEST = 200
"""Characters of a value that an error message shows."""


class RefusalError(Exception):
    """A command that cannot run, and why, in a sentence for the user."""


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a positive, finite number."""
    if not 0 < _number(value) < math.inf:
        raise ValueError(f"{name}: must be a positive number, got {_shown(value)}.")


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: must be a whole number of at least 1, got {_shown(value)}.")


def check_tolerance(name: str, value: object) -> None:
    """Raise unless ``value`` is a number of at least 0."""
    if not _number(value) >= 0:
        raise ValueError(f"{name}: must be a number of at least 0, got {_shown(value)}.")


def check_share(name: str, value: object) -> None:
    """Raise unless ``value`` is a number from 0 to less than 1."""
    if not 0 <= _number(value) < 1:
        raise ValueError(f"{name}: must be a number from 0 to less than 1, got {_shown(value)}.")


def check_switch(name: str, value: object) -> None:
    """Raise unless ``value`` is True or False; text such as "False" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: must be True or False, got {_shown(value)}.")


def _number(value: object) -> float:
    """The value as a float; NaN for what is not a number that torch can take: text, fractions, integers beyond floats."""
    if isinstance(value, bool) or not isinstance(value, Real) or not isinstance(value, Integral | float | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _shown(value: object) -> str:
    """The value for an error message, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a very large integer"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
