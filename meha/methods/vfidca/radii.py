"""A least-squares lower level with radii on norms of y in place of weights: its sets, its minimum and its multipliers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meha._leaves import norm
from meha._lower import STEP_ROUNDING, nesterov
from meha._variables import Variable
from meha._weights import per_group, read_groups
from meha.methods.vfidca.quadratic import Quadratic
from meha.nonsmooth import L1, GroupL2, NonSmooth, SparseGroup

__all__ = ["Balls", "minimise", "read_weights"]

TINY = 1e-300
"""Guards a division by zero where q is constant and y is 0."""


@dataclass(frozen=True)
class Balls:
    """The sets {y : ||y^(j)|| <= r_j for all groups j, and ||y||_1 <= r_last if ``l1``}, one for each vector r of radii.

    Args:
        labels: the group of each coordinate, ``count`` for none.
        count: the number of groups.
        l1: whether there is a last radius, for the l1 norm.

    >>> balls = Balls(torch.tensor([0, 0, 1]), 2, l1=False)
    >>> balls.project(torch.tensor([3.0, 4.0, 1.0]), torch.tensor([1.0, 2.0]))
    (tensor([0.6000, 0.8000, 1.0000]), tensor([4., 0.]))
    """

    labels: Tensor
    count: int
    l1: bool

    def sizes(self, y: Tensor) -> Tensor:
        """What the radii bound: the norm of each group, and the l1 norm."""
        return torch.cat([self._norms(y), y.abs().sum().reshape(1)]) if self.l1 else self._norms(y)

    def project(self, z: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest point y to z, and multipliers m >= 0 with z - y in sum_j m_j d||y^(j)|| + m_last d||y||_1.

        Groups are scaled down to their radius. For the l1 norm they are soft-thresholded before, at the level m_last for which
        the result has the right norm; a bracketed secant method finds it.
        """
        if not self.l1:
            return self._clip(z, radii)

        def at(level: float) -> tuple[Tensor, Tensor, float]:
            y, multipliers = self._clip(z.sign() * (z.abs() - level).clamp(min=0), radii[:-1])
            return y, torch.cat([multipliers, y.new_full((1,), level)]), float(y.abs().sum() - radii[-1])

        low, high = 0.0, float(z.abs().max())
        y, multipliers, above = at(low)
        if above <= 0:
            return y, multipliers
        y, multipliers, below = at(high)
        last, eps = 0, torch.finfo(z.dtype).eps
        for _ in range(200):
            if high - low <= 4 * eps * high or below == 0:
                break
            level = (low * below - high * above) / (below - above)
            new, m, excess = at(level)
            if excess > 0:  # an end that stays for a second time counts half (the Illinois rule)
                low, above, below, last = level, excess, below / 2 if last > 0 else below, 1
            else:
                high, below, above, last = level, excess, above / 2 if last < 0 else above, -1
                y, multipliers = new, m
        return y, multipliers

    def _norms(self, y: Tensor) -> Tensor:
        return y.new_zeros(self.count + 1).index_add(0, self.labels, y.square())[: self.count].sqrt()

    def _clip(self, z: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
        norms = self._norms(z)
        over = norms > radii
        scale = torch.where(over, radii / torch.where(over, norms, 1.0), 1.0)
        return z * torch.cat([scale, scale.new_ones(1)])[self.labels], (norms - radii).clamp(min=0)


def minimise(
    q: Quadratic, balls: Balls, radii: Tensor, start: Tensor, *, tol: float = 1e-9, max_steps: int = 20_000
) -> tuple[Tensor, Tensor, int, float]:
    """argmin q over the balls, its multipliers, the gradients taken, and the residual as a multiple of what ``tol`` allows.

    Accelerated projected gradients with restart. At the end y = P(y - s q'(y)), and the multipliers of the minimum are those of
    this projection, divided by s.

    >>> q = Quadratic(torch.eye(2), torch.tensor([3.0, 4.0]), torch.zeros(2))
    >>> y, multipliers, _, _ = minimise(q, Balls(torch.tensor([0, 0]), 1, l1=False), torch.ones(1), torch.zeros(2), tol=1e-6)
    >>> y, multipliers
    (tensor([0.6000, 0.8000]), tensor([4.]))
    """
    s = 1 / (q.smoothness or 1.0)
    eps, size = torch.finfo(start.dtype).eps, float(norm([q.gradient(torch.zeros_like(start))]))
    y, multipliers = balls.project(start, radii)
    ahead, momentum, residual, steps = y, 1.0, math.inf, 0
    while steps < max_steps and not residual <= 1:
        steps += 1
        new, multipliers = balls.project(ahead - s * q.gradient(ahead), radii)
        residual = float(norm([new - ahead])) / s / max(tol * size, STEP_ROUNDING * eps * float(norm([new])) / s, TINY)
        if residual <= 1 and ahead is not y:  # confirm it without momentum, so that y and its multipliers belong together
            y = ahead = new
            momentum, residual = 1.0, math.inf
            continue
        uphill = float((ahead - new) @ (new - y)) > 0
        factor, momentum = nesterov(momentum, restart=uphill)
        ahead, y = new + factor * (new - y) if factor else new, new
    return y, multipliers / s, steps, residual


def read_weights(g: NonSmooth, x: Variable, y: Variable) -> tuple[Balls, Tensor]:
    """What the weights of g penalise, and the entry of x that each weight is; refused unless they are the entries of x."""
    wanted = "L1, GroupL2 or SparseGroup with the entries of x for weights, as in GroupL2(groups, weight=lambda x: x)"
    terms = g.terms(y)
    if len(terms) != 1 or type(terms[0][0]) not in (L1, GroupL2, SparseGroup):
        raise ValueError(f"nonsmooth: VFiDCA takes {wanted}, got {g!r}; use MEHA.")
    term, leaf = terms[0][0], y.leaves[0].detach()
    shuffled = 1 + torch.randperm(x.numel, generator=torch.Generator().manual_seed(0)).double() / x.numel
    probe, orders = x.copy(), []
    for values in (shuffled, 3 - shuffled):
        for part, piece in zip(probe.leaves, values.split([part.numel() for part in probe.leaves]), strict=True):
            part.copy_(piece.reshape(part.shape))
        groups, l1 = _weights(term, probe, leaf)
        weights = torch.cat([part.reshape(-1) for part in (groups, l1) if part is not None])
        entries = torch.cat([part.reshape(-1) for part in probe.leaves]).to(weights)
        same = weights[:, None] == entries[None, :]
        if same.shape[0] != same.shape[1] or not bool((same.sum(0) == 1).all() and (same.sum(1) == 1).all()):
            raise ValueError(
                f"nonsmooth: VFiDCA takes {wanted}; here the {len(weights)} weights of {type(term).__name__} are not exactly"
                f" the {len(entries)} entries of x, each once."
            )
        orders.append(same.int().argmax(1).cpu())
    if not torch.equal(*orders):
        raise ValueError(f"nonsmooth: VFiDCA takes {wanted}; here the entries change places with x.")
    size = leaf.numel()
    labels, count = torch.zeros(size, dtype=torch.int64), 0
    if isinstance(term, GroupL2):
        named, count = read_groups(type(term).__name__, term.groups)
        labels = torch.cat([named, torch.full((size - len(named),), count)])
    elif groups is not None:
        labels, count = torch.arange(size), size
    return Balls(labels, count, l1 is not None), orders[0]


def _weights(term: NonSmooth, x: Variable, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The weights of groups (for L1: of single coordinates), and that of the l1 norm as a whole."""
    groups = l1 = None
    if isinstance(term, GroupL2):
        groups = per_group(type(term).__name__, term.count, term.weight, x.value, leaf)
        if groups.ndim == 0 and term.count > 1:
            raise ValueError(f"nonsmooth: VFiDCA takes a weight for each group, and {type(term).__name__} has one for all.")
    if isinstance(term, L1 | SparseGroup):
        weight = term.l1 if isinstance(term, SparseGroup) else term.weight
        ((l1, _),) = term.weighted(weight, x.value, [leaf])
        if l1.ndim and groups is not None:
            raise ValueError("nonsmooth: VFiDCA takes a SparseGroup with a single l1 weight, got one for each coordinate.")
        if l1.ndim:
            groups, l1 = l1, None
    return groups, l1
