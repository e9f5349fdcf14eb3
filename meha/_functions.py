"""Functions: F, f and f + g as checked scalar functions of variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meha._distributed import Group, is_dtensor
from meha._variables import Variable
from meha.loaders import MicroBatches

__all__ = ["Function", "call_objective"]

HALF = frozenset({torch.float16, torch.bfloat16})

ON_OTHER_DEVICE = re.compile(
    r"same device|expected device|two devices|"
    r"\(torch\.[A-Z]\w+\) and weight type \(torch\.cuda|\(torch\.cuda\.\w+\) and weight type \(torch\.[A-Z]"
)
"""Matches torch's errors about tensors on different devices."""


class Function:
    """F, f or f + g as a function of variables, ``function(x, y, batch)``, with a checked scalar result.

    Half-precision results, as under ``torch.autocast``, are converted to single precision. With a group, values that are not
    differentiated are means over its processes; for the others, the oracle takes the means.

    Attributes:
        half: the dtype of a half-precision result; None if there was none.
    """

    def __init__(
        self,
        level: str,
        evaluate: Callable[[Variable, Variable, Any], Tensor],
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self.level, self._group = level, group
        self.half: torch.dtype | None = None
        self._evaluate = evaluate
        self._device = device
        self._unseen = True  # the device of results is checked only once, because it takes time

    def __call__(self, x: Variable, y: Variable, batch: Any = None) -> Tensor:
        if isinstance(batch, MicroBatches):
            return torch.stack([self(x, y, part) for part in batch]).mean()
        torch.clear_autocast_cache()  # an autocast around the run would reuse the parameters from before the last move
        before = self._sums(x, y)
        try:
            if x.sharded or y.sharded:
                with x.seated(), y.seated():
                    value = self._evaluate(x, y, batch)
            else:
                value = self._evaluate(x, y, batch)
        except RuntimeError as error:
            if ON_OTHER_DEVICE.search(str(error)):
                raise self._elsewhere(batch, f"uses tensors on other devices ({error})") from error
            if "nference tensor" in str(error):
                where = "the batch" if any(tensor.is_inference() for tensor in _tensors(batch)) else "the objective"
                raise ValueError(
                    f"{self.level}: {where} has a tensor that was made under torch.inference_mode(), through which no gradient"
                    " can pass; make it outside, or use tensor.clone()."
                ) from error
            raise
        if isinstance(value, Tensor) and value.ndim and value.numel() == 1:
            value = value.reshape(())
        if not isinstance(value, Tensor) or value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.level}: must return a scalar tensor, got {got}; reduce it with .sum() or .mean().")
        if value.is_complex():
            raise ValueError(f"{self.level}: must return a real number, got dtype {value.dtype}; take its .real or .abs().")
        if before != self._sums(x, y):
            raise ValueError(f"{self.level}: changes x or y in place; compute with a copy, such as y.clone() or y * 0.9.")
        if self._unseen:
            if value.device != self._device:
                raise self._elsewhere(batch, f"returns a tensor on {value.device}")
            self._unseen = False
        if value.dtype in HALF:
            self.half, value = value.dtype, value.float()
        if self._group is not None and not torch.is_grad_enabled():
            (value,) = self._group.mean([value])
        return value

    def _sums(self, x: Variable, y: Variable) -> list[str]:
        """By which a change of x or y in the first call is seen; nothing later, or where they are divided."""
        if not self._unseen or self._group is not None:
            return []
        leaves = [*x.leaves, *y.leaves]
        if any(is_dtensor(leaf) or type(leaf).__name__ == "FakeTensor" for leaf in leaves):
            return []
        return [repr(float(leaf.detach().sum())) for leaf in leaves]

    def _elsewhere(self, batch: Any, finding: str) -> ValueError:
        """The error for tensors of the batch or the objective that are not on the device of x and y."""
        here = self._device
        others = sorted({str(tensor.device) for tensor in _tensors(batch) if tensor.device != here})
        if others:
            return ValueError(f"batch: has tensors on {', '.join(others)}, but x and y are on {here}; move them there.")
        return ValueError(f"{self.level}: {finding}, but x and y are on {here}; move its tensors there.")


def call_objective(objective: Callable[..., Tensor]) -> Callable[[Variable, Variable, Any], Tensor]:
    """An objective of values as a function of variables."""

    def call(x: Variable, y: Variable, batch: Any) -> Tensor:
        return objective(x.value, y.value) if batch is None else objective(x.value, y.value, batch)

    return call


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a batch: nested dicts, lists and objects with attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))
