"""What tells problems apart whose variables have the same shapes: numbers in terms and sets, and values of F and f."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from meha._checkpoints import checksum
from meha._leaves import Leaves, copy_
from meha._running import Run
from meha._structures import modules_of
from meha._torch import BREAKDOWNS
from meha.loaders import random_states, set_random_states
from meha.nonsmooth import NonSmooth
from meha.sets import ConvexSet

__all__ = ["constants", "differing", "values_at"]

LEVELS = {"upper": "F", "lower": "f"}


def constants(part: NonSmooth | ConvexSet | None) -> str | None:
    """A digest of the kind and the numbers of a term or set; functions of x count as functions only.

    >>> from meha.sets import Box
    >>> constants(Box(0.0, 1.0)) == constants(Box(0.0, 1.0)), constants(Box(0.0, 1.0)) == constants(Box(0.0, 2.0))
    (True, False)
    """
    return None if part is None else checksum(_plain(part))


def _plain(value: Any) -> Any:
    """The value in tensors, numbers and text."""
    if value is None or isinstance(value, Number | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, NonSmooth | ConvexSet):
        public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
        return [type(value).__name__, _plain(public)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return "function" if callable(value) else type(value).__name__


def values_at(run: Run, start: Leaves) -> dict[str, float] | None:
    """F and f at a start, given as the leaves of x and y; None where they are not functions of x and y alone.

    They are not compared for modules, batches and several processes, and where two calls give two values.
    """
    x, y = run.state.x.copy(), run.state.y.copy()
    modules = [*modules_of(x.value), *modules_of(y.value)]
    if modules or run.problem.needs_batch or run.batch is not None or run.group is not None:
        return None
    states = random_states()
    try:
        with torch.no_grad():
            copy_(x.leaves + y.leaves, start)
            found = [[float(getattr(run.oracle, level)(x, y, None)) for level in LEVELS] for _ in range(2)]
    except BREAKDOWNS:
        return None
    finally:
        set_random_states(states)
    once, again = found
    return dict(zip(LEVELS, once, strict=True)) if once == again and all(map(math.isfinite, once)) else None


def differing(saved: Mapping[str, float] | None, found: Mapping[str, float] | None, eps: float) -> str:
    """How values at the same start differ beyond rounding; empty if they do not, or are not known.

    >>> differing({"upper": 1.0, "lower": 2.0}, {"upper": 1.0, "lower": 3.0}, eps=1e-16)
    'lower: f at the start of the run was 2, is 3; it is another function.'
    """
    if saved is None or found is None:
        return ""
    for level, name in LEVELS.items():
        before, now = saved[level], found[level]
        if not math.isclose(before, now, rel_tol=math.sqrt(eps), abs_tol=math.sqrt(eps)):
            return f"{level}: {name} at the start of the run was {before:.6g}, is {now:.6g}; it is another function."
    return ""
