"""Penalties of many linear models at once, with weights that coefficients may share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FAMILIES", "Family", "Penalty"]


@dataclass(frozen=True)
class Family:
    """Shares of the parts of a penalty: sum_j w_j (l1 |b_j| + l2 b_j^2 / 2) + sum_g w_g group sqrt(size_g) ||b_g||.

    >>> Family("elastic net", l1=0.5, l2=0.5).sparse
    True
    """

    name: str
    l1: float = 0.0
    l2: float = 0.0
    group: float = 0.0

    @property
    def sparse(self) -> bool:
        """Whether coefficients become zero."""
        return self.l1 > 0 or self.group > 0


FAMILIES: Mapping[str, Callable[[float], Family]] = {
    "ridge": lambda ratio: Family("ridge", l2=1.0),
    "lasso": lambda ratio: Family("lasso", l1=1.0),
    "elastic-net": lambda ratio: Family("elastic net", l1=ratio, l2=1 - ratio),
    "group": lambda ratio: Family("group lasso", group=1.0),
    "sparse-group": lambda ratio: Family("sparse group lasso", l1=ratio, group=1 - ratio),
}
"""Families by the names of their penalties, as functions of the share of absolute values."""


@dataclass(frozen=True, eq=False)
class Penalty:
    """The penalties of B models with P coefficients each.

    Attributes:
        l1: (B, P).
        l2: (B, P).
        group: (B, groups).
        labels: (P,), the group of each coefficient; ``groups`` for those in none.
        classes: (P,), the weight of each coefficient, from 0; -1 for those without a penalty.
    """

    l1: Tensor
    l2: Tensor
    group: Tensor
    labels: Tensor
    classes: Tensor

    def __getitem__(self, rows: Tensor) -> Penalty:
        """The penalties of some of the models."""
        return Penalty(self.l1[rows], self.l2[rows], self.group[rows], self.labels, self.classes)

    @property
    def sparse(self) -> bool:
        """Whether there are kinks."""
        return self.grouped or bool(self.l1.any())

    @property
    def grouped(self) -> bool:
        """Whether there are norms of groups."""
        return self.group.shape[1] > 0

    def norms(self, b: Tensor) -> Tensor:
        """Norms of the groups, (B, groups)."""
        return self._sums(b.square()).sqrt()

    def value(self, b: Tensor) -> Tensor:
        """Values, (B,)."""
        result = (self.l1 * b.abs() + 0.5 * self.l2 * b.square()).sum(1)
        return result + (self.group * self.norms(b)).sum(1) if self.grouped else result

    def free(self, b: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients that may move where the smooth part has the gradient ``slope``, and the signs of their first move.

        They are those that are not zero, and those whose slope exceeds what the kink at zero holds.
        """
        signs = torch.where(b != 0, b.sign(), -slope.sign() * (slope.abs() > self.l1))
        free = (b != 0) | (signs != 0) | (self.l1 == 0)
        if self.grouped:
            pull = torch.where(b != 0, 0.0, (slope.abs() - self.l1).clamp(min=0))
            open_ = (self.norms(b) > 0) | (self._sums(pull.square()).sqrt() > self.group)
            free = free & self._spread(open_, True)
        return free, signs

    def slope(self, b: Tensor, signs: Tensor) -> Tensor:
        """Gradient along the face on which coefficients have these signs."""
        result = self.l1 * signs + self.l2 * b
        return result + self._spread(self._inverse_norms(b) * self.group, 0.0) * b if self.grouped else result

    def curvature(self, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Second derivatives along the coefficients ``index`` (B, m): a diagonal, and a matrix (B, m, m) for group norms."""
        diagonal = self.l2.gather(1, index)
        if not self.grouped:
            return diagonal, None
        inverse = self._inverse_norms(b)
        chosen, labels = b.gather(1, index), self.labels[index]
        diagonal = diagonal + self._spread(inverse * self.group, 0.0).gather(1, index)
        scale = self._spread(inverse.pow(3) * self.group, 0.0).gather(1, index).sqrt() * chosen
        same = labels[:, :, None] == labels[:, None, :]
        return diagonal, -(scale[:, :, None] * scale[:, None, :]) * same

    def prox(self, b: Tensor, step: Tensor) -> Tensor:
        """Proximal map with a step for each model, (B, 1)."""
        result = b.sign() * (b.abs() - step * self.l1).clamp(min=0) / (1 + step * self.l2)
        if not self.grouped:
            return result
        norms = self.norms(result)
        shrunk = (1 - step * self.group / norms.clamp(min=torch.finfo(b.dtype).tiny)).clamp(min=0)
        return result * self._spread(shrunk, 1.0)

    def _inverse_norms(self, b: Tensor) -> Tensor:
        norms = self.norms(b)
        return torch.where(norms > 0, 1 / norms.clamp(min=torch.finfo(b.dtype).tiny), 0.0)

    def _sums(self, values: Tensor) -> Tensor:
        count = self.group.shape[1]
        return values.new_zeros(len(values), count + 1).index_add_(1, self.labels, values)[:, :count]

    def _spread(self, values: Tensor, rest: float | bool) -> Tensor:
        """Values of groups for each coefficient; ``rest`` for those in none."""
        return torch.cat([values, values.new_full((len(values), 1), rest)], dim=1)[:, self.labels]
