"""Detection of calls of losses with closed-form Hessians inside of an objective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["HasHessian", "LossCall", "note_call", "record_known_hessians"]


class HasHessian(Protocol):
    """A function of y and optional weights whose Hessian in y is known."""

    def hessian(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the second derivatives in y."""


class LossCall(NamedTuple):
    """A recorded call of a function; ``value`` is a leaf of the graph that replaces its result."""

    function: HasHessian
    y: Tensor
    weights: Tensor | None
    value: Tensor


class _Recorder(NamedTuple):
    leaves: Sequence[Tensor]
    calls: list[LossCall]


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)  # threads do not see each other's


@contextmanager
def record_known_hessians(leaves: Sequence[Tensor]) -> Iterator[list[LossCall]]:
    """Record the calls at one of these tensors; autograd then sees the objective without them."""
    calls: list[LossCall] = []
    token = _RECORDER.set(_Recorder(leaves, calls))
    try:
        yield calls
    finally:
        _RECORDER.reset(token)


def note_call(function: HasHessian, y: Tensor, weights: Tensor | None, value: Tensor) -> Tensor:
    """Return the value or, if calls at y are being recorded, a leaf that replaces it."""
    recorder = _RECORDER.get()
    if recorder is None or not any(y is leaf for leaf in recorder.leaves):  # the formula is for y itself, not functions of it
        return value
    leaf = value.detach().requires_grad_()  # its gradient is the weight of the loss in the objective
    recorder.calls.append(LossCall(function, y, weights, leaf))
    return leaf
