"""Calls of functions that know their Hessians, recorded inside an objective that is a sum of them and of other terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["HasHessian", "LossCall", "note_call", "record_known_hessians"]


class HasHessian(Protocol):
    """A function of y, and of weights, with a Hessian."""

    def hessian(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """The second derivatives in y."""


class LossCall(NamedTuple):
    """A call of a function, and a leaf of the graph in place of its value."""

    function: HasHessian
    y: Tensor
    weights: Tensor | None
    value: Tensor


class _Recorder(NamedTuple):
    leaves: Sequence[Tensor]
    calls: list[LossCall]


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def record_known_hessians(leaves: Sequence[Tensor]) -> Iterator[list[LossCall]]:
    """List the calls at one of these tensors; what is then differentiated is the rest of the objective."""
    calls: list[LossCall] = []
    token = _RECORDER.set(_Recorder(leaves, calls))
    try:
        yield calls
    finally:
        _RECORDER.reset(token)


def note_call(function: HasHessian, y: Tensor, weights: Tensor | None, value: Tensor) -> Tensor:
    """The value, or a leaf in its place if the call is recorded."""
    recorder = _RECORDER.get()
    if recorder is None or not any(y is leaf for leaf in recorder.leaves):
        return value
    leaf = value.detach().requires_grad_()
    recorder.calls.append(LossCall(function, y, weights, leaf))
    return leaf
