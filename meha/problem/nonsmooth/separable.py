"""Sums of functions of single coordinates: L1 and its relatives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from meha.problem.nonsmooth.base import NonSmooth, Weighted, kink, soft, total
from meha.problem.nonsmooth.weights import Weight
from meha.tensors.variables import Leaves
from meha.tensors.vectors import join, split

__all__ = ["L1", "MCP", "SCAD", "ElasticNet", "NonNegativeL1"]


class L1(Weighted):
    """``g(x, y) = sum_i w_i |y_i|``; prox: soft thresholding by ``step * w_i``.

    Args:
        weight: w; see :mod:`meha.nonsmooth` for its forms.
        part: the leaves of y that it acts on; all by default.

    >>> L1(1.0).prox(None, torch.tensor([3.0, -0.5]), step=1.0)
    tensor([2., -0.])
    >>> x = torch.tensor([0.5, 2.0], requires_grad=True)
    >>> torch.autograd.grad(L1(lambda x: x).value(x, torch.tensor([3.0, -4.0])), x)
    (tensor([3., 4.]),)
    """

    separable = True
    kinked = True
    quadratic = True

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return total(w * leaf.abs() for w, leaf in self.weighted(self.weight, x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [soft(leaf, step * w) for w, leaf in self.weighted(self.weight, x, leaves)]

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        return _sides(kink(w, y, w) for w, y in self.weighted(self.weight, x, leaves))

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join(leaves)

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        return total(w * size for w, size in self.weighted(self.weight, x, split(t, leaves), signed=True)), t[:0]


class NonNegativeL1(Weighted):
    """g(x, y) = sum_i w_i y_i + indicator(y >= 0); prox: max(y_i - step * w_i, 0).

    >>> NonNegativeL1(1.0).prox(None, torch.tensor([3.0, -3.0]), step=1.0)
    tensor([2., 0.])
    """

    separable = True
    kinked = True
    quadratic = True

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        linear = total(w * leaf for w, leaf in self.weighted(self.weight, x, leaves))
        infinite = [torch.where(leaf.detach() < 0, torch.inf, 0.0).sum() for leaf in leaves]  # inf * 0 would be NaN
        return linear + sum(infinite)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [(leaf - step * w).clamp(min=0) for w, leaf in self.weighted(self.weight, x, leaves)]

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        pairs = [(w.expand_as(y), y) for w, y in self.weighted(self.weight, x, leaves)]
        return [torch.where(y > 0, w, -torch.inf) for w, y in pairs], [w for w, _ in pairs]  # at zero, y cannot decrease

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join(leaves)[:0]  # linear where it is finite, so that no bound t is needed

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        return total(w * leaf for w, leaf in self.weighted(self.weight, x, leaves, signed=True)), -join(leaves)


class ElasticNet(NonSmooth):
    """``g(x, y) = sum_i w_i |y_i| + (v_i / 2) y_i^2``; prox: soft thresholding by ``step * w_i``, over ``1 + step * v_i``.

    Args:
        l1: w.
        l2: v.

    >>> ElasticNet(1.0, 1.0).prox(None, torch.tensor([3.0]), step=1.0)
    tensor([1.])
    """

    separable = True
    kinked = True
    quadratic = True

    def __init__(self, l1: Weight = 1.0, l2: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.l1, self.l2 = self.declared("l1", l1), self.declared("l2", l2)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        first = total(w * leaf.abs() for w, leaf in self.weighted(self.l1, x, leaves))
        return first + total(v * leaf.square() / 2 for v, leaf in self.weighted(self.l2, x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        pairs = zip(self.weighted(self.l1, x, leaves), self.weighted(self.l2, x, leaves), strict=True)
        return [soft(leaf, step * w) / (1 + step * v) for (w, leaf), (v, _) in pairs]

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        pairs = zip(self.weighted(self.l1, x, leaves), self.weighted(self.l2, x, leaves), strict=True)
        return _sides(kink(w, y, w + v * y.abs()) for (w, y), (v, _) in pairs)

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join(leaves)

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        first = total(w * size for w, size in self.weighted(self.l1, x, split(t, leaves), signed=True))
        return first + total(v * leaf.square() / 2 for v, leaf in self.weighted(self.l2, x, leaves, signed=True)), t[:0]


class SCAD(Weighted):
    """Smoothly clipped absolute deviation (Fan and Li 2001) with threshold w_i: for ``t = |y_i|``,

    w t  if t <= w;  (2 a w t - t^2 - w^2) / (2 (a - 1))  if w < t <= a w;  (a + 1) w^2 / 2  beyond.

    It is 1/(a - 1)-weakly convex, and its prox needs step < a - 1: with s = step, soft thresholding by s w if
    ``|y| <= (1 + s) w``; ((a - 1) y - s a w sign(y)) / (a - 1 - s) up to a w; y beyond.

    Args:
        weight: w.
        a: where the penalty becomes flat, in multiples of w; more than 2.

    >>> SCAD(1.0, a=3.0).prox(None, torch.tensor([1.5, 2.5, 9.0]), step=1.0)
    tensor([0.5000, 2.0000, 9.0000])
    """

    separable = True
    kinked = True

    def __init__(self, weight: Weight = 1.0, a: float = 3.7, part: str | Sequence[str] | None = None) -> None:
        super().__init__(weight, part)
        if not a > 2:  # also refuses NaN
            raise ValueError(f"SCAD: a must be more than 2, got {a}.")
        self.a = a
        self.rho = 1 / (a - 1)  # the largest concave curvature, of the middle piece

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return total(self._penalty(w, leaf.abs()) for w, leaf in self.weighted(self.weight, x, leaves))

    def _penalty(self, w: Tensor, t: Tensor) -> Tensor:
        a = self.a
        middle = (2 * a * w * t - t.square() - w * w) / (2 * (a - 1))
        return torch.where(t <= w, w * t, torch.where(t <= a * w, middle, (a + 1) * w * w / 2))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        a, results = self.a, []
        for w, u in self.weighted(self.weight, x, leaves):
            middle = ((a - 1) * u - step * a * w * u.sign()) / (a - 1 - step)
            near = torch.where(u.abs() <= (1 + step) * w, soft(u, step * w), middle)  # by the piece that the result lies on
            results.append(torch.where(u.abs() <= a * w, near, u))
        return results

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        a, pairs = self.a, self.weighted(self.weight, x, leaves)
        return _sides(kink(w, y, torch.minimum(w, (a * w - y.abs()).clamp(min=0) / (a - 1))) for w, y in pairs)


class MCP(Weighted):
    """Minimax concave penalty with threshold w_i: for ``t = |y_i|``, w t - t^2 / (2 a) if t <= a w; a w^2 / 2 beyond.

    It (Zhang 2010) is 1/a-weakly convex, and its prox needs step < a: soft thresholding by step * w, divided by 1 - step / a,
    for ``|y| <= a w``; y beyond.

    Args:
        weight: w.
        a: where the penalty becomes flat, in multiples of w; positive.

    >>> MCP(1.0, a=2.0).prox(None, torch.tensor([0.5, 1.5, 3.0]), step=1.0)
    tensor([0., 1., 3.])
    """

    separable = True
    kinked = True

    def __init__(self, weight: Weight = 1.0, a: float = 3.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(weight, part)
        if not a > 0:
            raise ValueError(f"MCP: a must be positive, got {a}.")
        self.a = a
        self.rho = 1 / a  # the concave curvature of the first piece

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return total(self._penalty(w, leaf.abs()) for w, leaf in self.weighted(self.weight, x, leaves))

    def _penalty(self, w: Tensor, t: Tensor) -> Tensor:
        return torch.where(t <= self.a * w, w * t - t.square() / (2 * self.a), self.a * w * w / 2)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [
            torch.where(u.abs() <= self.a * w, soft(u, step * w) / (1 - step / self.a), u)
            for w, u in self.weighted(self.weight, x, leaves)
        ]

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        return _sides(kink(w, y, (w - y.abs() / self.a).clamp(min=0)) for w, y in self.weighted(self.weight, x, leaves))


def _sides(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Leaves, Leaves]:
    """Turn a pair per leaf into a pair of lists."""
    left, right = zip(*pairs, strict=True)
    return list(left), list(right)
