"""Variables as flat vectors, their norm, and the clock that records where the engines spend time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meha.tensors.variables import Leaves, Variable, copy_


def vector_norm(vector: Tensor) -> float:
    """The Euclidean norm of a flat vector, as a number."""
    return float(torch.linalg.vector_norm(vector))


@dataclass
class Clock:
    """Seconds spent in total, in the user's functions and their derivatives, and in linear algebra."""

    seconds: float = 0.0
    functions: float = 0.0
    algebra: float = 0.0

    def __str__(self) -> str:
        rest = max(self.seconds - self.functions - self.algebra, 0.0)
        return f"{self.functions:.2g} s in the objectives, {self.algebra:.2g} s in linear algebra, {rest:.2g} s in the rest"


def join(leaves: Sequence[Tensor]) -> Tensor:
    """Return the leaves as one vector, one after another."""
    return leaves[0].reshape(-1) if len(leaves) == 1 else torch.cat([leaf.reshape(-1) for leaf in leaves])


def split(vector: Tensor, leaves: Sequence[Tensor]) -> Leaves:
    """Return the parts of a vector, or of each row of a matrix, in the shapes of ``leaves``."""
    rows = vector.shape[:-1]
    parts = vector.split([leaf.numel() for leaf in leaves], dim=-1)
    return [part.reshape((*rows, *leaf.shape)) for part, leaf in zip(parts, leaves, strict=True)]


class Flat:
    """Conversion between a variable and one flat vector.

    >>> flat = Flat(Variable({"a": torch.ones(2), "b": torch.zeros(1, 1)}, "y"))
    >>> flat.read()
    tensor([1., 1., 0.])
    >>> flat.at(torch.tensor([1.0, 2.0, 3.0])).value["b"]
    tensor([[3.]], requires_grad=True)
    """

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self.sizes = [leaf.numel() for leaf in variable.leaves]
        self.size = sum(self.sizes)
        self.dtype = functools.reduce(torch.promote_types, (leaf.dtype for leaf in variable.leaves))
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in variable.leaves)  # the coarsest leaf limits the accuracy
        self._is_vector = len(variable.leaves) == 1 and variable.leaves[0].ndim == 1  # then no reshape or copy is needed

    def read(self) -> Tensor:
        """Return a copy of the variable as a vector."""
        return self.join([leaf.detach() for leaf in self.variable.leaves]).clone()

    def write(self, vector: Tensor) -> None:
        """Overwrite the variable by a vector."""
        with torch.no_grad():
            copy_(self.variable.leaves, self.split(vector))

    def split(self, vector: Tensor) -> Leaves:
        """Split a vector, or each row of a matrix, into parts with the shapes of the leaves."""
        if self._is_vector:
            return [vector]
        leaves = self.variable.leaves
        parts = split(vector, leaves)
        return parts if len(parts) == 1 else [part.to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]

    def join(self, leaves: Sequence[Tensor]) -> Tensor:
        """Join parts with the shapes of the leaves into one vector."""
        return leaves[0] if self._is_vector else join(leaves) if len(leaves) == 1 else join(leaves).to(self.dtype)

    def at(self, vector: Tensor) -> Variable:
        """Return a variable of the same structure with the numbers of a vector."""
        return self.variable.moved([leaf.detach().requires_grad_() for leaf in self.split(vector)])  # a graph of their own
