"""The lower level around a point, on flat vectors: value, gradient and second derivatives from one autograd graph."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from meha.problem.losses import record_known_hessians
from meha.problem.oracle import Oracle
from meha.tensors.gradients import PlainAttention, differentiate, fill
from meha.tensors.torch_private import backward, pull_back
from meha.tensors.variables import Leaves, Variable
from meha.tensors.vectors import Clock, Flat

CHUNK = 256
"""Rows of a Hessian that one batched backward pass computes: more rows save no time and take more memory."""

FEW = 4
"""Products that take less time one by one than as one batch."""


class Expansion:
    """f + g at one point (x, y), with second derivatives on demand from the graph of the first ones.

    Attributes:
        x, y: the point.
        f, g: the values.
        f_y: the gradient of f in y.
        gradient: that of f + g in y, where it exists.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Tensor, flat_x: Flat, flat_y: Flat, clock: Clock) -> None:
        begin = time.perf_counter()
        self._oracle, self._x, self._flat_x, self._flat_y, self._clock = oracle, x, flat_x, flat_y, clock
        self.y = y
        self._y = flat_y.at(y)
        with torch.enable_grad(), PlainAttention():
            f = oracle.lower(x, self._y)
            oracle.check_twice(f, oracle.lower)
            self._first = differentiate(f, self._y.leaves)
            g = oracle.g(x, self._y)
            curved = isinstance(g, Tensor) and g.requires_grad  # without g it is the number 0
            self._second = differentiate(g, self._y.leaves) if isinstance(g, Tensor) and curved else []
        oracle.counts.lower += 1  # value and gradient together count as one
        self.f, self.g = float(oracle.mean(f.detach())), float(g.detach() if isinstance(g, Tensor) else g)
        self.f_y = oracle.mean(flat_y.join([leaf.detach() for leaf in self._first]))
        self.gradient = self.f_y + flat_y.join([leaf.detach() for leaf in self._second]) if self._second else self.f_y
        clock.functions += time.perf_counter() - begin

    @property
    def value(self) -> float:
        """f + g; infinity in place of NaN, so that comparisons reject the point."""
        total = self.f + self.g
        return math.inf if math.isnan(total) else total

    @property
    def x(self) -> Variable:
        """The upper variable; its identity tells whether two expansions share x."""
        return self._x

    def product(self, vector: Tensor, *, g: bool = True) -> Tensor:
        """The Hessian-vector product (f + g)_yy v, or f_yy v with ``g=False``."""
        begin = time.perf_counter()
        self._oracle.counts.hvp += 1
        # The mean is over processes, which share the data of f; g is the same in all.
        result = self._oracle.mean(self._pull(self._first, vector, self._y, self._flat_y))
        if g and self._second:
            result = result + self._pull(self._second, vector, self._y, self._flat_y)
        self._clock.functions += time.perf_counter() - begin
        return result

    def products(self, vectors: Tensor) -> Tensor:
        """The products f_yy v for all rows v of a matrix."""
        begin = time.perf_counter()
        self._oracle.counts.hvp += len(vectors)
        if len(vectors) <= FEW:
            result = torch.stack([self._pull(self._first, row, self._y, self._flat_y) for row in vectors])
        else:
            result = torch.cat([self._images(self._first, part) for part in vectors.split(CHUNK)])
        result = self._oracle.mean(result)
        self._clock.functions += time.perf_counter() - begin
        return result

    def cross(self, vector: Tensor) -> Tensor:
        """The gradient in x of <(f + g)_y(x, y), v> for a fixed v."""
        begin = time.perf_counter()
        self._oracle.counts.hvp += 1
        result = self._oracle.mean(self._pull(self._first, vector, self._x, self._flat_x))
        if self._second:
            result = result + self._pull(self._second, vector, self._x, self._flat_x)
        self._clock.functions += time.perf_counter() - begin
        return result

    def rows(self, chosen: Tensor | None = None) -> Tensor:
        """The rows of f_yy for the chosen coordinates, or all of them."""
        begin = time.perf_counter()
        rows = self._oracle.mean(self._rows(self._first, chosen))
        self._oracle.counts.hvp += len(rows)
        self._clock.functions += time.perf_counter() - begin
        return rows

    def by_formula(self) -> Tensor | None:
        """f_yy by closed forms, where f is a sum of multiples of ``meha.losses`` at leaves of y and of other terms; else None.

        The losses know their second derivatives; those of the other terms take batched passes, which see no data. The result is
        wrong where f is a nonlinear function of the losses, so the caller checks it by a product.
        """
        begin = time.perf_counter()
        matrix, leaves = None, self._y.leaves
        with torch.enable_grad(), PlainAttention(), record_known_hessians(leaves) as calls:
            f = self._oracle.lower(self._x, self._y)
            # The factors of the losses in f, then the gradient of all other terms.
            gradient = differentiate(f, [*(call.value for call in calls), *leaves]) if calls else []
        if calls:
            rest = gradient[len(calls) :]
            n, varies = self.f_y.numel(), any(leaf.requires_grad for leaf in rest)
            matrix = self._rows(rest, None) if varies else self.f_y.new_zeros(n, n)
            for slope, (function, y, weights, _) in zip(gradient, calls, strict=False):
                begins = sum(self._flat_y.sizes[: next(i for i, leaf in enumerate(leaves) if leaf is y)])
                part = slice(begins, begins + y.numel())
                matrix[part, part] += slope.detach() * function.hessian(y, weights)  # slope is the factor of this loss in f
            self._oracle.counts.hvp += n  # as many as its rows would cost
        self._clock.functions += time.perf_counter() - begin
        return matrix

    def g_rows(self, chosen: Tensor | None, separable: bool) -> Tensor | None:
        """Rows of g_yy, by one backward pass if g is separable; None where g is linear."""
        if not any(leaf.requires_grad for leaf in self._second):
            return None
        begin = time.perf_counter()
        rows: Tensor | None
        if separable:
            # A product of a diagonal matrix with ones is its diagonal.
            diagonal = self._pull(self._second, torch.ones_like(self.f_y), self._y, self._flat_y)
            rows = torch.diag(diagonal) if bool(diagonal.any()) else None
            rows = rows if rows is None or chosen is None else rows[chosen]
        else:
            rows = self._rows(self._second, chosen)
        self._clock.functions += time.perf_counter() - begin
        return rows

    def _pull(self, outputs: Leaves, vector: Tensor, wrt: Variable, flat: Flat) -> Tensor:
        """The vector-Jacobian product of ``outputs`` in ``wrt``, as a flat vector."""
        pairs = [pair for pair in zip(outputs, self._flat_y.split(vector), strict=True) if pair[0].requires_grad]
        if not pairs:  # linear outputs have no graph
            return torch.zeros(flat.size, dtype=flat.dtype, device=vector.device)
        first, cotangents = zip(*pairs, strict=True)
        return flat.join(_grad(first, wrt.leaves, cotangents))

    def _rows(self, outputs: Leaves, chosen: Tensor | None) -> Tensor:
        n = self.f_y.numel()
        index = torch.arange(n, device=self.f_y.device) if chosen is None else chosen
        pieces = []
        for part in index.split(CHUNK):
            unit = torch.zeros(len(part), n, dtype=self.f_y.dtype, device=self.f_y.device)
            unit[torch.arange(len(part), device=unit.device), part] = 1.0
            pieces.append(self._images(outputs, unit))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _images(self, outputs: Leaves, vectors: Tensor) -> Tensor:
        """One vector-Jacobian product for each row, batched."""
        if not len(vectors):  # a batch without rows breaks the derivatives of indexing
            return torch.zeros(0, self._flat_y.size, dtype=vectors.dtype, device=vectors.device)
        images: Tensor = vmap(lambda row: self._pull(outputs, row, self._y, self._flat_y))(vectors)
        return images


@dataclass(frozen=True)
class UpperValue:
    """F and its gradients at a point, as flat vectors."""

    F: float
    F_x: Tensor
    F_y: Tensor


def upper_value(oracle: Oracle, x: Variable, y: Tensor, flat_x: Flat, flat_y: Flat, clock: Clock) -> UpperValue:
    """F and its gradients in x and y."""
    begin = time.perf_counter()
    at = flat_y.at(y)
    leaves, n = [*x.leaves, *at.leaves], len(x.leaves)
    with torch.enable_grad():
        F = oracle.upper(x, at)
        parts = fill(backward(F, leaves) if F.requires_grad else [None] * len(leaves), leaves)
    F_x, F_y = oracle.mean(flat_x.join(parts[:n])), oracle.mean(flat_y.join(parts[n:]))
    oracle.counts.upper += 1
    result = UpperValue(float(oracle.mean(F.detach())), F_x, F_y)
    clock.functions += time.perf_counter() - begin
    return result


def _grad(outputs: Sequence[Tensor], inputs: Leaves, cotangents: Sequence[Tensor]) -> Leaves:
    parts = pull_back(outputs, cotangents, inputs)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(inputs, parts, strict=True)]
