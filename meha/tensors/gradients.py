"""Gradients of a value, or of a weighted sum of values, as lists of leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.backends import cuda

from meha.tensors.torch_private import backward
from meha.tensors.variables import Leaves, Variable

T = TypeVar("T")


class Gradient:
    """The gradient of a weighted sum of values that are added one at a time.

    Args:
        wrt: the variables to differentiate in.
        joint: take one backward pass at the end; otherwise one for each value, which frees its graph.
    """

    __slots__ = ("joint", "leaves", "parts", "total", "wrt")

    def __init__(self, wrt: tuple[Variable, ...], joint: bool) -> None:
        self.wrt, self.leaves, self.joint = wrt, [leaf for variable in wrt for leaf in variable.leaves], joint
        self.total: Tensor | None = None
        self.parts: list[Tensor | None] = [None] * len(self.leaves)

    def add(self, value: Tensor, weight: float) -> None:
        """Add ``weight * value`` to the sum."""
        if self.joint:
            self.total = weighted([weight], [value], self.total)
            return
        self._backward(weighted([weight], [value]), range(len(self.leaves)), self.leaves, inputs=self.leaves)

    def add_sharded(self, value: Tensor, weight: float, x: Variable, y: Variable, *, check: bool) -> list[bool]:
        """Add ``weight * value``, evaluated with sharded modules at (x, y).

        Returns:
            With ``check``, which takes the memory of a second gradient, on which variables of ``wrt`` it depends; else nothing.
        """
        chosen: list[int] = []
        seats: Leaves = []
        first = 0
        for variable in self.wrt:
            if variable is x or variable is y:
                chosen += range(first, first + len(variable.leaves))
                seats += variable.seats
            first += len(variable.leaves)
        before = self.parts
        if check:
            self.parts = [None] * len(before)  # a part that is still None afterwards was not reached
        if value.requires_grad:
            self._backward(weight * value, chosen, seats, inputs=None)
        if not check:
            return []
        uses = [any(part is not None for part in pieces) for pieces in split(self.parts, self.wrt)]
        self.parts = [b if a is None else a if b is None else a + b for a, b in zip(before, self.parts, strict=True)]
        return uses

    def _backward(self, value: Tensor, chosen: Sequence[int], seats: Leaves, inputs: Leaves | None) -> None:
        """Add the gradient of a value in the tensors ``seats`` to the chosen parts; the user's ``.grad`` stays as it was."""
        users = [seat.grad for seat in seats]  # autograd accumulates in .grad, which may hold gradients of the user
        try:
            for i, seat in zip(chosen, seats, strict=True):
                seat.grad = self.parts[i]
            torch.autograd.backward(value, inputs=inputs)  # adds to each gradient in place
            for i, seat in zip(chosen, seats, strict=True):
                self.parts[i] = seat.grad
        finally:
            for seat, user in zip(seats, users, strict=True):
                seat.grad = user

    def result(self) -> Leaves:
        """Return the gradient; unused leaves have zeros."""
        if self.total is not None:
            self.parts = list(backward(self.total, self.leaves))
        return fill(self.parts, self.leaves)


@contextmanager
def passing(wrt: tuple[Variable, ...], x: Variable, y: Variable) -> Iterator[bool]:
    """Seat x and y in their sharded modules, and let a backward pass compute gradients of the variables ``wrt`` only.

    A module with ``fully_shard`` computes with tensors that it gathers from its parameters, so that ``inputs`` cannot
    restrict a backward pass to some of them. Instead, the other variables do not require gradients during the pass.

    Yields:
        Whether there are such modules.
    """
    sharded = bool(x.sharded or y.sharded)
    if not sharded:  # the common case, which takes no time
        yield sharded
        return
    others = [seat for variable in (x, y) if variable not in wrt for seat in variable.seats]
    for leaf in others:
        leaf.requires_grad_(False)
    try:
        with x.seated(), y.seated():
            yield sharded
    finally:
        for leaf in others:
            leaf.requires_grad_(True)


class PlainAttention:
    """A context in which torch computes attention by plain products, whose gradient can be differentiated again.

    The fused kernels have no second derivative. The switches also hold on the CPU; a user's ``sdpa_kernel`` inside has the last
    word, and afterwards all are as before. It takes 1.4 us, since solvers enter it for each of thousands of Hessians.

    >>> with PlainAttention():
    ...     cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    (False, True)
    """

    __slots__ = ("before",)

    def __enter__(self) -> None:
        enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
        self.before = *enabled, cuda.math_sdp_enabled()
        self._switch(False, False, False, True)

    def __exit__(self, *error: object) -> None:
        self._switch(*self.before)

    @staticmethod
    def _switch(flash: bool, efficient: bool, cudnn: bool, plain: bool) -> None:
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_cudnn_sdp(cudnn)
        cuda.enable_math_sdp(plain)


def weighted(weights: Sequence[float], values: Sequence[Tensor], total: Tensor | None = None) -> Tensor:
    """Return the sum of weights times values, added to ``total``, with as few nodes of the graph as possible."""
    for weight, value in zip(weights, values, strict=True):
        # In a traced step the weight is a tensor, which must not be compared on the host.
        part = value if isinstance(weight, float) and weight == 1.0 else weight * value
        total = part if total is None else total + part
    assert total is not None
    return total


def differentiate(value: Tensor, leaves: Leaves) -> Leaves:
    """Return the gradient of ``value`` as part of the graph, so that it can be differentiated again."""
    return fill(backward(value, leaves, graph=True), leaves)


def fill(gradient: Sequence[Tensor | None], leaves: Leaves) -> Leaves:
    """Replace None by zeros."""
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, gradient, strict=True)]


def split(leaves: Sequence[T], variables: tuple[Variable, ...]) -> list[list[T]]:
    """Split one list for all variables into one list per variable."""
    if len(variables) == 1:
        return [list(leaves)]
    pieces = iter(leaves)
    return [[next(pieces) for _ in variable.leaves] for variable in variables]


def depends(value: Tensor, leaves: Leaves) -> bool:
    """Whether ``value`` depends on any of the leaves."""
    if not value.requires_grad:
        return False
    gradient = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)  # the gradient proper follows
    return any(part is not None for part in gradient)
