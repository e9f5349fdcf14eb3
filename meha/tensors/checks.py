"""Checks of numbers, with errors that name the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import torch

LONGEST = 200  # characters of a value that an error message shows


class RefusalError(Exception):
    """A command cannot run; the message is a sentence that tells the user why."""


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a positive, finite number."""
    if not 0 < _number(value) < math.inf:  # written with "not" because comparisons with NaN are false; so below
        raise ValueError(f"{name}: must be a positive number, got {_shown(value)}.")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # True is an Integral in Python
        raise ValueError(f"{name}: must be a whole number of at least {least}, got {_shown(value)}.")


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


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to another shape without enlarging it."""
    try:
        return torch.broadcast_shapes(tuple(shape), tuple(target)) == torch.Size(target)
    except RuntimeError:
        return False


def _number(value: object) -> float:
    """Convert to a float; what is not a number that torch can take (text, fractions, too large integers) becomes NaN."""
    if isinstance(value, bool) or not isinstance(value, Real) or not isinstance(value, Integral | float | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return math.nan


def _shown(value: object) -> str:
    """Return the value as text for an error message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = "a very large integer"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
