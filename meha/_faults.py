"""Faults of a run: which batch or objective gave NaN, and what is unusual about its modules."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meha._functions import Function
from meha._running import Run, StepInfo
from meha._structures import modules_of
from meha._torch import BREAKDOWNS, fsdp_dtype
from meha._variables import Variable
from meha._verdicts import TrainingWarning
from meha.loaders import random_states, set_random_states

__all__ = ["bad_numbers", "forget_trained", "mark_trained", "undefined", "warn_about_modules", "warn_about_rounding"]

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
HALF = frozenset({torch.float16, torch.bfloat16})

FIRST_LOOK = 16
"""The first step in which rounding is looked at."""

ROUNDING = 0.25
"""Differences of f below this many units of rounding of its value are mostly noise; docs/distributed.md measures it."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_trained: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""Modules that a run has trained, with the versions of their parameters at its end."""


def bad_numbers(batch: Any) -> str:
    """Say which tensors of a batch hold NaN or infinity; empty if none does.

    >>> bad_numbers({"images": torch.tensor([0.0, torch.nan]), "labels": torch.tensor([1, 2])})
    'images has 1 NaN or infinite of 2 numbers'
    """
    found = []
    for name, tensor in _named_tensors(batch, ""):
        bad = 0 if not tensor.is_floating_point() else tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            found.append(f"{name or 'it'} has {bad} NaN or infinite of {tensor.numel()} numbers")
    return ", ".join(found)


def undefined(run: Run, x: Variable, y: Variable, batch: Any) -> tuple[str, float] | None:
    """The first of F, f and f + g that has no finite value at (x, y), by its argument, and the value; None if all have."""
    oracle = run.oracle
    functions = dict.fromkeys((oracle.upper, oracle.lower, oracle.phi))
    modules = [part for variable in (x, y) for module in modules_of(variable.value) for part in module.modules()]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    kept, states = [buffer.clone() for buffer in buffers], random_states()
    try:
        return next((found for f in functions if (found := _value(f, x, y, batch))), None)
    finally:
        set_random_states(states)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)


def _value(function: Function, x: Variable, y: Variable, batch: Any) -> tuple[str, float] | None:
    try:
        with torch.no_grad():
            value = float(function(x, y, batch))
    except BREAKDOWNS:
        return None
    return None if math.isfinite(value) else (function.level, value)


def warn_about_modules(run: Run, *, resumes: bool) -> None:
    """Warn about modules in eval mode, about dropout where it does harm, and about modules that a run has trained before.

    Args:
        resumes: whether the run may go on from a checkpoint, which overwrites the modules.
    """
    state, messages = run.state, []
    for variable in (state.x, state.y):
        argument = variable.argument
        for module in modules_of(variable.value):
            parts = {name: part for name, part in module.named_modules() if _has_modes(part)}
            if parts and not module.training:
                kinds = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
                messages.append(
                    f"{argument}0: the module is in eval mode, in which its {kinds} does not work as in training; call"
                    f" {argument}0.train() before the run."
                )
            random = [type(part).__name__ for part in parts.values() if part.training and isinstance(part, DROPOUTS)]
            if random and run.method.repeats:
                messages.append(
                    f"{argument}0: {random[0]} gives another value with every call, and {run.method.name} needs the same value"
                    f" twice, because {run.method.repeats}; take MEHA, F2SA, VPBGD or the default, or remove it."
                )
            if not resumes and _trained.get(module) == _versions(module):
                messages.append(
                    f"{argument}0: solve has trained this module before, and goes on from where it is; to start afresh, build"
                    " a new one, and pass copy=True to each run, which then trains a copy."
                )
    for message in messages if run.main else []:
        warnings.warn(message, TrainingWarning, stacklevel=3)


def half_precision(run: Run) -> torch.dtype | None:
    """The half-precision dtype in which the objectives are computed, as far as it can be seen; None if there is none."""
    x, y, oracle = run.state.x, run.state.y, run.oracle
    kind = y.device.type
    known = [oracle.lower.half, *(fsdp_dtype(module) for variable in (x, y) for module in variable.sharded)]
    known += [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    known += [leaf.dtype for leaf in y.leaves]
    return next((dtype for dtype in known if dtype in HALF), None)


def warn_about_rounding(run: Run, info: StepInfo) -> None:
    """Warn once when f(x, y) - f(x, theta), from which x learns, is within the rounding of f in half precision.

    It looks at the steps 16, 32, 64 and so on.
    """
    due = info.step >= FIRST_LOOK and not info.step & (info.step - 1)
    if not due or run.rounded or not run.main or not {"gap", "lower"} <= set(info):
        return
    dtype = half_precision(run)
    if dtype is None:
        return
    gap, lower = abs(info["gap"]), abs(info["lower"])
    bound = ROUNDING * torch.finfo(dtype).eps * lower
    if gap < bound:
        run.rounded = True
        warnings.warn(
            f"x learns from f(x, y) - f(x, theta) = {gap:.1e} at step {info.step}, but the passes run in"
            f" {str(dtype).removeprefix('torch.')}, where differences of f = {lower:.2g} below {bound:.1e} are mostly rounding;"
            " compute in float32, weigh groups of examples instead of single ones, or take larger batches. See"
            " docs/distributed.md.",
            TrainingWarning,
            stacklevel=3,
        )


def mark_trained(run: Run) -> None:
    """Remember the modules of a run that is over."""
    for variable in (run.state.x, run.state.y):
        for module in modules_of(variable.value):
            _trained[module] = _versions(module)


def forget_trained(module: nn.Module) -> None:
    """Let the next run go on from a trained module without a warning."""
    _trained.pop(module, None)


def _versions(module: nn.Module) -> tuple[int, ...]:
    """Numbers that change when parameters do."""
    return tuple(parameter._version for parameter in module.parameters())


def _has_modes(part: nn.Module) -> bool:
    """Whether a module works differently in training and in evaluation."""
    if isinstance(part, DROPOUTS):
        return part.p > 0
    return isinstance(part, NORMS) and part.track_running_stats


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their places in it."""
    if isinstance(value, Tensor):
        yield name, value
        return
    pairs: Any = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    elif hasattr(value, "__dict__"):
        pairs = vars(value).items()
    for key, item in pairs:
        yield from _named_tensors(item, f"{name}.{key}" if name else str(key))
