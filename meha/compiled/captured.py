"""What functions remember from one call to the next: counters, lists and tensors that they captured and change."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["captured", "first_change"]

DEPTH = 4
"""How deep containers and objects are looked into."""

MOST = 2000
"""Parts of one captured object that are looked at."""


def captured(*functions: Any) -> dict[str, list[Any]]:
    """What functions captured, by name: numbers and texts, sizes of containers, versions of tensors.

    >>> calls = []
    >>> def counted(x):
    ...     calls.append(1)
    ...     return len(calls) * x
    >>> before = captured(counted)
    >>> _ = counted(1.0)
    >>> first_change(before, captured(counted))
    'calls'
    """
    found: dict[str, list[Any]] = {}
    for function in functions:
        for name, value in _names(function):
            if not isinstance(value, types.ModuleType | type):
                found.setdefault(name, []).extend(part for _, part in zip(range(MOST), _parts(value, DEPTH), strict=False))
    return found


def first_change(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> str | None:
    """The first name whose value changed; None where all is as it was."""
    return next((name for name, value in after.items() if before.get(name) != value), None)


def _names(function: Any) -> Iterator[tuple[str, Any]]:
    """The names that a function reads besides its arguments, and their values."""
    if isinstance(function, functools.partial):
        yield from _names(function.func)
        yield from _places(function.args)
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield from _names(function.__func__)
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
    elif isinstance(function, types.FunctionType):
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        yield from _places(function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
    elif hasattr(function, "__dict__"):
        yield from vars(function).items()


def _places(values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Values that have places, with names for them."""
    return ((f"argument {i}", value) for i, value in enumerate(values))


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """The parts of a value that show a change."""
    if isinstance(value, Tensor):
        yield id(value), None if value.is_inference() else value._version
    elif isinstance(value, int | float | complex | str | bytes | None):
        yield repr(value)
    elif isinstance(value, np.ndarray):
        yield value.tobytes() if value.size <= MOST and value.dtype != object else id(value)
    elif isinstance(value, np.random.Generator):
        yield repr(value.bit_generator.state)
    elif depth and isinstance(value, Mapping):
        yield len(value)
        for key, item in value.items():
            yield from _parts(key, 0)
            yield from _parts(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | deque):
        yield len(value)
        for item in value:
            yield from _parts(item, depth - 1)
    elif depth and isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        for _, item in _names(value):
            if not isinstance(item, types.ModuleType | type):
                yield from _parts(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type):
        yield from _parts(vars(value), depth - 1)
    else:
        yield id(value)
