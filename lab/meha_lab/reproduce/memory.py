"""Peak memory of a piece of work: the tensors that it makes, followed from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from meha.tensors.torch_private import TorchDispatchMode, pytree

__all__ = ["peak"]


def peak(work: Callable[[], Any]) -> int:
    """The largest number of bytes that tensors made by ``work`` occupy at one time, on any device.

    Every operation of torch is seen, forward and backward, so that what the graph keeps counts as well; memory that an
    operation takes and returns within itself is not seen, nor are tensors that were there before or come from outside of
    torch (lists, numpy arrays).

    >>> def work():
    ...     a = torch.zeros(1000, dtype=torch.float64)
    ...     b = a + 1  # a and b: 16000 bytes
    ...     del a
    ...     return b.neg_() * 2
    >>> peak(work)
    16000
    """
    with _Tracker() as tracker:
        work()
    return tracker.most


class _Tracker(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self.sizes or key in given:
                continue
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
