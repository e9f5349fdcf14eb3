"""Terms that compare coordinates with each other: total variation, fused lasso, ordered weighted L1."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meha.problem.nonsmooth.base import Weight, Weighted, soft, total
from meha.tensors.variables import Leaves
from meha.tensors.vectors import join, split


class TotalVariation(Weighted):
    """Weighted absolute differences of neighbours along the last axis of each leaf; the prox is exact, by dynamic programming.

    Args:
        weight: w: one number, or one per difference (a tensor that broadcasts to them).
        part: the leaves of y that it acts on; all by default.

    >>> TotalVariation(1.0).prox(None, torch.tensor([0.0, 0.0, 5.0, 5.0]), step=1.0)
    tensor([0.5000, 0.5000, 4.5000, 4.5000])
    >>> TotalVariation(torch.tensor([2.0, 1.0])).value(None, torch.tensor([0.0, 1.0, 3.0]))
    tensor(4.)
    """

    def check(self, leaves: Leaves) -> None:
        for leaf in leaves:
            if leaf.ndim == 0 or leaf.shape[-1] < 2:
                needed = "needs two or more coordinates along the last axis"
                raise ValueError(f"{type(self).__name__}: {needed}, got a leaf of shape {tuple(leaf.shape)}; choose a part.")

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        jumps = [leaf.diff(dim=-1) for leaf in leaves]
        return total(w * jump.abs() for w, jump in self.weighted(self.weight, x, jumps))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        weights = self.weighted(self.weight, x, [leaf.diff(dim=-1) for leaf in leaves])
        return [_along_last(leaf, step * w) for leaf, (w, _) in zip(leaves, weights, strict=True)]

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join([leaf.diff(dim=-1) for leaf in leaves])

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        sizes = split(t, [leaf.diff(dim=-1) for leaf in leaves])
        return total(w * size for w, size in self.weighted(self.weight, x, sizes, signed=True)), t[:0]


class FusedLasso(TotalVariation):
    """L1 and total variation together; prox: that of the total variation, then soft thresholding.

    Args:
        l1: v: one number for each leaf.
        variation: w: as in :class:`TotalVariation`.

    >>> FusedLasso(1.0, 1.0).prox(None, torch.tensor([0.0, 0.0, 5.0, 5.0]), step=1.0)
    tensor([0.0000, 0.0000, 3.5000, 3.5000])
    """

    def __init__(self, l1: Weight = 1.0, variation: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(variation, part)
        self.l1 = self.declared("l1", l1)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        sparse = total(v * leaf.abs() for v, leaf in self.weighted(self.l1, x, leaves, scalar=True))
        return sparse + super().value_leaves(x, leaves)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        # The prox of the sum is the composition in this order (Friedman, Hastie, Hoefling, Tibshirani 2007).
        smooth = super().prox_leaves(x, leaves, step)
        return [soft(leaf, step * v) for v, leaf in self.weighted(self.l1, x, smooth, scalar=True)]

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return torch.cat([super().absolute_terms(leaves), join(leaves)])

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        jumps = len(super().absolute_terms(leaves))
        variation, none = super().epigraph(x, leaves, t[:jumps])
        pairs = self.weighted(self.l1, x, split(t[jumps:], leaves), scalar=True, signed=True)
        return variation + total(v * size for v, size in pairs), none


class OrderedL1(Weighted):
    """Ordered weighted L1 (SLOPE): w_1 times the largest absolute value of each leaf of y, plus w_2 times the next, and so on.

    The prox is exact, by pooling.

    Args:
        weight: w: one number (then g is the L1 norm), or one per coordinate of a leaf, from the largest to the smallest.
        part: the leaves of y that it acts on; all by default.

    >>> term = OrderedL1(torch.tensor([2.0, 1.0, 0.0]))
    >>> term.value(None, torch.tensor([1.0, -3.0, 2.0]))  # 2 * 3 + 1 * 2
    tensor(8.)
    >>> term.prox(None, torch.tensor([1.0, -3.0, 2.5]), step=1.0)
    tensor([ 1.0000, -1.2500,  1.2500])
    """

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return total(w * flat.abs().sort(descending=True).values for w, flat in self._pairs(x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        results = []
        for (w, flat), leaf in zip(self._pairs(x, leaves), leaves, strict=True):
            sizes, order = flat.abs().sort(descending=True, stable=True)
            # For sorted sizes, the prox is a projection onto non-increasing sequences (Bogdan et al. 2015).
            pooled = sizes.new_tensor(_falling((sizes - step * w).tolist())).clamp(min=0)
            results.append((flat.sign() * torch.zeros_like(flat).scatter(0, order, pooled)).reshape(leaf.shape))
        return results

    def _pairs(self, x: Any, leaves: Leaves) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of weights, which must not increase, and flat leaves."""
        pairs = self.weighted(self.weight, x, [leaf.reshape(-1) for leaf in leaves])
        for w, _ in pairs:
            if w.ndim and bool((w.detach().diff() > 0).any()):
                remedy = "sort them (weight=lambda x: x.exp().sort(descending=True).values)"
                order = "from that of the largest coordinate to that of the smallest"
                raise ValueError(f"OrderedL1: weights must not increase, {order}; {remedy}.")
        return pairs


def _along_last(leaf: Tensor, weights: Tensor) -> Tensor:
    """Return the prox of the total variation of each row."""
    rows = leaf.reshape(-1, leaf.shape[-1])
    each = weights.expand(leaf.diff(dim=-1).shape).reshape(len(rows), -1)
    # Plain numbers on the host: the recursion takes one coordinate after the other.
    results = [_denoised(row, widths) for row, widths in zip(rows.double().tolist(), each.double().tolist(), strict=True)]
    return leaf.new_tensor(results).reshape(leaf.shape)


def _denoised(values: list[float], weights: list[float]) -> list[float]:
    """Return argmin_u sum_i (u_i - values_i)^2 / 2 + sum_i weights_i |u_{i+1} - u_i|, by dynamic programming (Johnson 2013).

    The derivative of the least cost of the first i values, as a function of u_i, is piecewise linear and increasing. The next
    difference clips it to [-w_i, w_i]: u_i is u_{i+1}, clipped to [low_i, high_i]. A knot is a breakpoint with the changes of
    slope and intercept there.
    """
    knots: deque[tuple[float, float, float]] = deque()
    lows, highs, before = [], [], 0.0
    for value, weight in zip(values[:-1], weights, strict=True):
        slope, intercept = 1.0, -before - value  # on the far left
        while knots and slope * knots[0][0] + intercept <= -weight:
            _, more, shift = knots.popleft()
            slope, intercept = slope + more, intercept + shift
        low = (-weight - intercept) / slope
        first = (low, slope, intercept + weight)  # from the constant -weight to this piece
        slope, intercept = 1.0, before - value  # on the far right
        while knots and slope * knots[-1][0] + intercept >= weight:
            _, more, shift = knots.pop()
            slope, intercept = slope - more, intercept - shift
        high = max((weight - intercept) / slope, low)  # rounding could put it below low
        knots.appendleft(first)
        knots.append((high, -slope, weight - intercept))
        lows.append(low)
        highs.append(high)
        before = weight
    slope, intercept = 1.0, -before - values[-1]
    while knots and slope * knots[0][0] + intercept <= 0:  # the minimum of the last cost, where its derivative is zero
        _, more, shift = knots.popleft()
        slope, intercept = slope + more, intercept + shift
    result = [-intercept / slope]
    for low, high in zip(reversed(lows), reversed(highs), strict=True):  # back from the last coordinate
        result.append(min(max(result[-1], low), high))
    return result[::-1]


def _falling(values: list[float]) -> list[float]:
    """Return the nearest non-increasing sequence, by pooling adjacent violators: blocks that increase become their mean."""
    blocks: list[tuple[float, int]] = []  # sum and length
    for value in values:
        amount, length = value, 1
        while blocks and blocks[-1][0] * length <= amount * blocks[-1][1]:  # compares the means without dividing
            last = blocks.pop()
            amount, length = amount + last[0], length + last[1]
        blocks.append((amount, length))
    return [amount / length for amount, length in blocks for _ in range(length)]
