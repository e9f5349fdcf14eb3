"""Sums of functions of single coordinates: L1 and its relatives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meha.problem.nonsmooth.base import NonSmooth, Weight, Weighted, kink, soft, total
from meha.tensors.variables import Leaves
from meha.tensors.vectors import join, split


class _Separable(Weighted):
    """Base class of sums of one function of each coordinate, with a kink at zero and one weight."""

    separable = True
    kinked = True

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return total(self._value(w, y) for w, y in self.weighted(self.weight, x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [self._prox(w, y, step) for w, y in self.weighted(self.weight, x, leaves)]

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        pairs = [self._sides(w, y) for w, y in self.weighted(self.weight, x, leaves)]
        return [left for left, _ in pairs], [right for _, right in pairs]

    @abstractmethod
    def _value(self, w: Tensor, y: Tensor) -> Tensor:
        """Return the function of each coordinate."""

    @abstractmethod
    def _prox(self, w: Tensor, y: Tensor, step: float) -> Tensor: ...

    @abstractmethod
    def _sides(self, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the left and right derivatives."""


class L1(_Separable):
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

    quadratic = True

    def _value(self, w: Tensor, y: Tensor) -> Tensor:
        return w * y.abs()

    def _prox(self, w: Tensor, y: Tensor, step: float) -> Tensor:
        return soft(y, step * w)

    def _sides(self, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return kink(w, y, w)

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join(leaves)

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        return total(w * size for w, size in self.weighted(self.weight, x, split(t, leaves), signed=True)), t[:0]


class NonNegativeL1(_Separable):
    """g(x, y) = sum_i w_i y_i + indicator(y >= 0); prox: max(y_i - step * w_i, 0).

    >>> NonNegativeL1(1.0).prox(None, torch.tensor([3.0, -3.0]), step=1.0)
    tensor([2., 0.])
    """

    quadratic = True

    def _value(self, w: Tensor, y: Tensor) -> Tensor:
        return w * y + torch.where(y.detach() < 0, torch.inf, 0.0)  # inf * 0 would be NaN

    def _prox(self, w: Tensor, y: Tensor, step: float) -> Tensor:
        return (y - step * w).clamp(min=0)

    def _sides(self, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(y > 0, w, -torch.inf), w.expand_as(y)  # at zero, y cannot decrease

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
        weights = zip(self.weighted(self.l1, x, leaves), self.weighted(self.l2, x, leaves), strict=True)
        pairs = [kink(w, y, w + v * y.abs()) for (w, y), (v, _) in weights]
        return [left for left, _ in pairs], [right for _, right in pairs]

    def absolute_terms(self, leaves: Leaves) -> Tensor:
        return join(leaves)

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor]:
        first = total(w * size for w, size in self.weighted(self.l1, x, split(t, leaves), signed=True))
        return first + total(v * leaf.square() / 2 for v, leaf in self.weighted(self.l2, x, leaves, signed=True)), t[:0]


class SCAD(_Separable):
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

    def __init__(self, weight: Weight = 1.0, a: float = 3.7, part: str | Sequence[str] | None = None) -> None:
        super().__init__(weight, part)
        if not a > 2:  # also refuses NaN
            raise ValueError(f"SCAD: a must be more than 2, got {a}.")
        self.a = a
        self.rho = 1 / (a - 1)  # the largest concave curvature, of the middle piece

    def _value(self, w: Tensor, y: Tensor) -> Tensor:
        a, t = self.a, y.abs()
        middle = (2 * a * w * t - t.square() - w * w) / (2 * (a - 1))
        return torch.where(t <= w, w * t, torch.where(t <= a * w, middle, (a + 1) * w * w / 2))

    def _prox(self, w: Tensor, y: Tensor, step: float) -> Tensor:
        a = self.a
        middle = ((a - 1) * y - step * a * w * y.sign()) / (a - 1 - step)
        near = torch.where(y.abs() <= (1 + step) * w, soft(y, step * w), middle)  # by the piece that the result lies on
        return torch.where(y.abs() <= a * w, near, y)

    def _sides(self, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return kink(w, y, torch.minimum(w, (self.a * w - y.abs()).clamp(min=0) / (self.a - 1)))


class MCP(_Separable):
    """Minimax concave penalty with threshold w_i: for ``t = |y_i|``, w t - t^2 / (2 a) if t <= a w; a w^2 / 2 beyond.

    It (Zhang 2010) is 1/a-weakly convex, and its prox needs step < a: soft thresholding by step * w, divided by 1 - step / a,
    for ``|y| <= a w``; y beyond.

    Args:
        weight: w.
        a: where the penalty becomes flat, in multiples of w; positive.

    >>> MCP(1.0, a=2.0).prox(None, torch.tensor([0.5, 1.5, 3.0]), step=1.0)
    tensor([0., 1., 3.])
    """

    def __init__(self, weight: Weight = 1.0, a: float = 3.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(weight, part)
        if not a > 0:
            raise ValueError(f"MCP: a must be positive, got {a}.")
        self.a = a
        self.rho = 1 / a  # the concave curvature of the first piece

    def _value(self, w: Tensor, y: Tensor) -> Tensor:
        t = y.abs()
        return torch.where(t <= self.a * w, w * t - t.square() / (2 * self.a), self.a * w * w / 2)

    def _prox(self, w: Tensor, y: Tensor, step: float) -> Tensor:
        return torch.where(y.abs() <= self.a * w, soft(y, step * w) / (1 - step / self.a), y)

    def _sides(self, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return kink(w, y, (w - y.abs() / self.a).clamp(min=0))
