"""Gradients of one value or of a weighted sum of values, as leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from meha._torch import backward
from meha._variables import Leaves, Variable

__all__ = ["Gradient", "depends", "differentiate", "fill", "split"]

T = TypeVar("T")


class Gradient:
    """Gradient of a weighted sum of values that arrive one at a time.

    Args:
        leaves: the tensors to differentiate in.
        joint: take one backward pass at the end; otherwise one for each value, which frees its graph.
    """

    __slots__ = ("joint", "leaves", "parts", "total")

    def __init__(self, leaves: Leaves, joint: bool) -> None:
        self.leaves, self.joint = leaves, joint
        self.total: Tensor | None = None
        self.parts: Sequence[Tensor | None] = [None] * len(leaves)

    def add(self, value: Tensor, weight: float) -> None:
        """Add ``weight * value`` to the sum."""
        value = value if isinstance(weight, float) and weight == 1.0 else weight * value
        if self.joint:
            self.total = value if self.total is None else self.total + value
            return
        users = [leaf.grad for leaf in self.leaves]
        try:
            for leaf, part in zip(self.leaves, self.parts, strict=True):
                leaf.grad = part
            torch.autograd.backward(value, inputs=self.leaves)  # adds to each gradient in place
            self.parts = [leaf.grad for leaf in self.leaves]
        finally:
            for leaf, part in zip(self.leaves, users, strict=True):
                leaf.grad = part

    def result(self) -> Leaves:
        """Return the gradient; unused leaves have zeros."""
        if self.total is not None:
            self.parts = backward(self.total, self.leaves)
        return fill(self.parts, self.leaves)


def differentiate(value: Tensor, leaves: Leaves) -> Leaves:
    """Return the gradient of ``value`` as part of the graph."""
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
    gradient = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    return any(part is not None for part in gradient)
