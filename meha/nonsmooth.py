"""Non-smooth terms g(x, y): value and proximal map.

Each docstring states g; ``prox(x, y, step)`` is argmin_w step * g(x, w) + 0.5 ||w - y||^2. Gradients in x are those of
``value`` by autograd, so a term needs no hand-written derivative.

A weight may be a number, a tensor, or a function of x. It holds one number for everything, one per coordinate (a tensor
that broadcasts to the leaf), or one per leaf (a list, a dict or, for several leaves, a vector with one entry each). Weights
must not be negative: constrain x (``x_set=NonNegative()``) or map it (``weight=lambda x: x.exp()``).

With ``part`` a term acts on the leaves of that name (``"coef"``, ``"net.0.weight"``, or a whole branch), and leaves the rest
of y alone; terms on different parts are added with ``+``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meha._variables import Leaves, Variable, select
from meha._weights import Groups, Weight, by_size, declared, per_group, per_leaf, read_groups

__all__ = [
    "L1",
    "MCP",
    "SCAD",
    "ElasticNet",
    "GroupL2",
    "NonNegativeL1",
    "NonSmooth",
    "Nuclear",
    "SparseGroup",
    "Sum",
    "Zero",
]


_UNSHOWN = ("names", "rho", "count")


class NonSmooth(ABC):
    """A term g(x, y), possibly non-smooth in y, whose proximal map in y is known in closed form."""

    rho: float = 0.0
    """g + rho/2 ||y||^2 is convex in y (0 for convex terms)."""

    separable: bool = False
    """Whether g is a sum of functions of single coordinates of y."""

    orthant: bool = False
    """Whether prox of g + indicator(y >= 0) is prox of g after max(y, 0)."""

    def __init__(self, part: str | Sequence[str] | None = None) -> None:
        if part is not None and not isinstance(part, str | list | tuple):
            raise TypeError(f"{type(self).__name__}: part must be a name or a list of names, got {part!r}.")
        self.part = part
        self.names: list[str] = []

    def declared(self, name: str, weight: Weight) -> Weight:
        """A weight of this term as it was given, after a first check."""
        return declared(type(self).__name__, name, weight)

    def weighted(self, weight: Weight, x: Any, leaves: Leaves, *, scalar: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weight and leaf."""
        return per_leaf(type(self).__name__, self.names, weight, x, leaves, scalar=scalar)

    def value(self, x: Any, y: Any) -> Tensor:
        """g(x, y), differentiable in x."""
        point = Variable.of(y, "y")
        parts = [term.value_leaves(x, [point.leaves[i] for i in chosen]) for term, chosen in self.terms(point)]
        return _total(parts) if parts else point.leaves[0].new_zeros(())

    def prox(self, x: Any, y: Any, step: float) -> Any:
        """argmin_w step * g(x, w) + 0.5 ||w - y||^2, in the structure of y (a module is copied)."""
        point = Variable.of(y, "y").copy()
        with torch.no_grad():
            for term, chosen in self.terms(point):
                leaves = [point.leaves[i] for i in chosen]
                term.check_step(step)
                for leaf, new in zip(leaves, term.prox_leaves(x, leaves, step), strict=True):
                    leaf.copy_(new)
        return point.detached()

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        """The term as terms on separate groups of leaves of ``y``, checked against their shapes."""
        chosen = select(self.part, y.names, f"{type(self).__name__}: part")
        self.check([y.leaves[i] for i in chosen])
        bound = copy.copy(self)
        bound.names = [y.names[i] for i in chosen]
        return [(bound, chosen)]

    def check(self, leaves: Leaves) -> None:
        """Raise if the term does not fit these leaves."""

    def check_step(self, step: float | Tensor) -> None:
        """Raise if the proximal map is not single-valued at this step (weakly convex terms)."""
        if isinstance(step, Tensor) and self.rho == 0:  # in a traced step; whether it is positive is seen to elsewhere
            return
        if not step > 0:
            raise ValueError(f"{type(self).__name__}: step must be positive, got {step}.")
        if step * self.rho >= 1:
            raise ValueError(
                f"{type(self).__name__}: the proximal map needs step < {1 / self.rho:g} (the term is {self.rho:g}-weakly"
                f" convex), got {step:g}; take smaller steps or a larger a."
            )

    def __add__(self, other: NonSmooth) -> Sum:
        return Sum(self, other)

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_" and name not in _UNSHOWN)
        return f"{type(self).__name__}({', '.join(fields)})"

    @abstractmethod
    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        """g on the chosen leaves."""

    @abstractmethod
    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        """prox of the chosen leaves, as new leaves."""


class Zero(NonSmooth):
    """g = 0: the smooth case.

    >>> Zero().prox(None, torch.tensor([3.0]), 0.1)
    tensor([3.])
    """

    separable = True

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        return []

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return leaves[0].new_zeros(())

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return leaves


class Sum(NonSmooth):
    """g = g_1 + g_2 + ..., each on leaves of its own (there is no closed-form prox for two terms on one leaf).

    >>> g = L1(1.0, part="w") + Nuclear(0.5, part="matrix")
    >>> g.prox(None, {"w": torch.tensor([3.0]), "matrix": torch.eye(2)}, 1.0)
    {'w': tensor([2.]), 'matrix': tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])}
    """

    def __init__(self, *members: NonSmooth) -> None:
        super().__init__()
        if not members:
            raise ValueError("Sum: needs at least one term.")
        for member in members:
            if not isinstance(member, NonSmooth):
                raise TypeError(f"Sum: expected terms of meha.nonsmooth, got {type(member).__name__}.")
        self.members: list[NonSmooth] = []
        for member in members:
            self.members += member.members if isinstance(member, Sum) else [member]
        self.rho = max(member.rho for member in self.members)

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        found = [pair for member in self.members for pair in member.terms(y)]
        taken: dict[int, NonSmooth] = {}
        for term, chosen in found:
            for i in chosen:
                if i in taken:
                    raise ValueError(
                        f"Sum: {type(taken[i]).__name__} and {type(term).__name__} both act on {y.label(y.names[i])};"
                        " give each a part of its own, or use SparseGroup or ElasticNet."
                    )
                taken[i] = term
        return found

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        raise TypeError("Sum: leaves have no names here; use value(x, y) or terms(y).")

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        raise TypeError("Sum: leaves have no names here; use prox(x, y, step) or terms(y).")


class L1(NonSmooth):
    """g(x, y) = sum_i w_i |y_i|; prox: soft thresholding by step * w_i.

    Args:
        weight: w, see the module's first lines.
        part: the leaves of y that it acts on; all by default.

    >>> L1(1.0).prox(None, torch.tensor([3.0, -0.5]), step=1.0)
    tensor([2., -0.])
    >>> x = torch.tensor([0.5, 2.0], requires_grad=True)
    >>> torch.autograd.grad(L1(lambda x: x).value(x, torch.tensor([3.0, -4.0])), x)
    (tensor([3., 4.]),)
    """

    separable = True

    def __init__(self, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return _total(w * leaf.abs() for w, leaf in self.weighted(self.weight, x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [_soft(leaf, step * w) for w, leaf in self.weighted(self.weight, x, leaves)]


class NonNegativeL1(NonSmooth):
    """g(x, y) = sum_i w_i y_i + indicator(y >= 0); prox: max(y_i - step * w_i, 0).

    >>> NonNegativeL1(1.0).prox(None, torch.tensor([3.0, -3.0]), step=1.0)
    tensor([2., 0.])
    """

    separable = True

    def __init__(self, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        linear = _total(w * leaf for w, leaf in self.weighted(self.weight, x, leaves))
        infinite = [torch.where(leaf.detach() < 0, torch.inf, 0.0).sum() for leaf in leaves]
        return linear + sum(infinite)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [(leaf - step * w).clamp(min=0) for w, leaf in self.weighted(self.weight, x, leaves)]


class ElasticNet(NonSmooth):
    """g(x, y) = sum_i w_i |y_i| + (v_i / 2) y_i^2; prox: soft thresholding by step * w_i, divided by 1 + step * v_i.

    Args:
        l1: w.
        l2: v.

    >>> ElasticNet(1.0, 1.0).prox(None, torch.tensor([3.0]), step=1.0)
    tensor([1.])
    """

    separable = True

    def __init__(self, l1: Weight = 1.0, l2: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.l1, self.l2 = self.declared("l1", l1), self.declared("l2", l2)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        first = _total(w * leaf.abs() for w, leaf in self.weighted(self.l1, x, leaves))
        return first + _total(v * leaf.square() / 2 for v, leaf in self.weighted(self.l2, x, leaves))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        pairs = zip(self.weighted(self.l1, x, leaves), self.weighted(self.l2, x, leaves), strict=True)
        return [_soft(leaf, step * w) / (1 + step * v) for (w, leaf), (v, _) in pairs]


class SCAD(NonSmooth):
    """Smoothly clipped absolute deviation with threshold w_i: for t = |y_i|,

    w t  if t <= w;  (2 a w t - t^2 - w^2) / (2 (a - 1))  if w < t <= a w;  (a + 1) w^2 / 2  beyond.

    It is 1/(a - 1)-weakly convex, and its prox needs step < a - 1: with s = step, soft thresholding by s w if
    |y| <= (1 + s) w; ((a - 1) y - s a w sign(y)) / (a - 1 - s) up to a w; y beyond.

    Args:
        weight: w.
        a: where the penalty becomes flat, in multiples of w; more than 2.

    >>> SCAD(1.0, a=3.0).prox(None, torch.tensor([1.5, 2.5, 9.0]), step=1.0)
    tensor([0.5000, 2.0000, 9.0000])
    """

    separable = True

    def __init__(self, weight: Weight = 1.0, a: float = 3.7, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)
        if not a > 2:
            raise ValueError(f"SCAD: a must be more than 2, got {a}.")
        self.a = a
        self.rho = 1 / (a - 1)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return _total(self._penalty(w, leaf.abs()) for w, leaf in self.weighted(self.weight, x, leaves))

    def _penalty(self, w: Tensor, t: Tensor) -> Tensor:
        a = self.a
        middle = (2 * a * w * t - t.square() - w * w) / (2 * (a - 1))
        return torch.where(t <= w, w * t, torch.where(t <= a * w, middle, (a + 1) * w * w / 2))

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        a, found = self.a, []
        for w, u in self.weighted(self.weight, x, leaves):
            middle = ((a - 1) * u - step * a * w * u.sign()) / (a - 1 - step)
            near = torch.where(u.abs() <= (1 + step) * w, _soft(u, step * w), middle)
            found.append(torch.where(u.abs() <= a * w, near, u))
        return found


class MCP(NonSmooth):
    """Minimax concave penalty with threshold w_i: for t = |y_i|, w t - t^2 / (2 a) if t <= a w; a w^2 / 2 beyond.

    It is 1/a-weakly convex, and its prox needs step < a: soft thresholding by step * w, divided by 1 - step / a, for
    |y| <= a w; y beyond.

    Args:
        weight: w.
        a: where the penalty becomes flat, in multiples of w; positive.

    >>> MCP(1.0, a=2.0).prox(None, torch.tensor([0.5, 1.5, 3.0]), step=1.0)
    tensor([0., 1., 3.])
    """

    separable = True

    def __init__(self, weight: Weight = 1.0, a: float = 3.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)
        if not a > 0:
            raise ValueError(f"MCP: a must be positive, got {a}.")
        self.a = a
        self.rho = 1 / a

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return _total(self._penalty(w, leaf.abs()) for w, leaf in self.weighted(self.weight, x, leaves))

    def _penalty(self, w: Tensor, t: Tensor) -> Tensor:
        return torch.where(t <= self.a * w, w * t - t.square() / (2 * self.a), self.a * w * w / 2)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return [
            torch.where(u.abs() <= self.a * w, _soft(u, step * w) / (1 - step / self.a), u)
            for w, u in self.weighted(self.weight, x, leaves)
        ]


class Nuclear(NonSmooth):
    """g(x, Y) = w * (sum of the singular values of Y), for each matrix leaf; prox: singular values soft-thresholded.

    >>> Nuclear(1.0).prox(None, torch.diag(torch.tensor([3.0, 0.5])), step=1.0)
    tensor([[2., 0.],
            [0., 0.]])
    """

    def __init__(self, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)

    def check(self, leaves: Leaves) -> None:
        for leaf in leaves:
            if leaf.ndim != 2:
                raise ValueError(f"Nuclear: acts on matrices, got a leaf of shape {tuple(leaf.shape)}; choose a part.")

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        weights = self.weighted(self.weight, x, leaves, scalar=True)
        return _total(w * torch.linalg.svdvals(leaf) for w, leaf in weights)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        found = []
        for w, leaf in self.weighted(self.weight, x, leaves, scalar=True):
            u, s, v = torch.linalg.svd(leaf, full_matrices=False)
            found.append((u * (s - step * w).clamp(min=0)) @ v)
        return found


class GroupL2(NonSmooth):
    """g(x, y) = sum_j w_j ||y^(j)||_2; prox: each group shrunk by max(0, 1 - step * w_j / ||y^(j)||).

    Args:
        groups: the sizes of contiguous groups (numbers), or the coordinates of each group (lists or index tensors).
            Coordinates count through all chosen leaves, one after another. Groups may have any sizes and must not overlap;
            coordinates in no group are not penalised.
        weight: w: one number, or one per group.

    >>> GroupL2([2, 1], weight=1.0).prox(None, torch.tensor([3.0, 4.0, 0.5]), step=1.0)
    tensor([2.4000, 3.2000, 0.0000])
    >>> GroupL2([[0, 2], [1]], weight=lambda x: x).value(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0, 4.0]))
    tensor(7.)
    """

    orthant = True

    def __init__(self, groups: Groups, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)
        self.groups = groups
        self._named, self.count = read_groups(type(self).__name__, groups)
        self._labels = self._named

    def check(self, leaves: Leaves) -> None:
        size = sum(leaf.numel() for leaf in leaves)
        name = type(self).__name__
        named = self._named.numel()
        if by_size(self.groups) and named != size:
            raise ValueError(f"{name}: the groups' sizes add up to {named}, but y has {size} coordinates there.")
        if named > size:
            raise ValueError(
                f"{name}: groups name the coordinate {named - 1}, but y has {size} coordinates there (0 to {size - 1})."
            )

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        vector, labels = self._flatten(leaves)
        return (per_group(type(self).__name__, self.count, self.weight, x, vector) * self._norms(vector, labels)).sum()

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        vector, labels = self._flatten(leaves)
        return _split(
            self._shrink(vector, labels, step * per_group(type(self).__name__, self.count, self.weight, x, vector)), leaves
        )

    def _flatten(self, leaves: Leaves) -> tuple[Tensor, Tensor]:
        vector = leaves[0].reshape(-1) if len(leaves) == 1 else torch.cat([leaf.reshape(-1) for leaf in leaves])
        if self._labels.device != vector.device or self._labels.numel() != vector.numel():
            free = torch.full((vector.numel() - self._named.numel(),), self.count)
            self._labels = torch.cat([self._named, free]).to(vector.device)
        return vector, self._labels

    def _norms(self, vector: Tensor, labels: Tensor) -> Tensor:
        """One norm per group; its gradient at zero is zero."""
        squares = vector.new_zeros(self.count + 1).index_add_(0, labels, vector.square())[: self.count]
        if not squares.requires_grad:
            return squares.sqrt()
        positive = squares > 0
        return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)

    def _shrink(self, vector: Tensor, labels: Tensor, threshold: Tensor) -> Tensor:
        norms = self._norms(vector, labels)
        factor = torch.where(norms > threshold, 1 - threshold / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0)
        return vector * torch.cat([factor, factor.new_ones(1)])[labels]


class SparseGroup(GroupL2):
    """g(x, y) = sum_i v_i |y_i| + sum_j w_j ||y^(j)||_2; prox: soft thresholding, then shrinking of the groups.

    Args:
        groups: as in :class:`GroupL2`.
        l1: v: one number, or one per coordinate.
        group: w: one number, or one per group.

    >>> SparseGroup([2, 1], l1=1.0, group=1.0).prox(None, torch.tensor([4.0, 5.0, 1.5]), step=1.0)
    tensor([2.4000, 3.2000, 0.0000])
    """

    def __init__(self, groups: Groups, l1: Weight = 1.0, group: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(groups, group, part)
        self.l1 = self.declared("l1", l1)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        sparse = _total(w * leaf.abs() for w, leaf in self.weighted(self.l1, x, leaves))
        return sparse + super().value_leaves(x, leaves)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        soft = [_soft(leaf, step * w) for w, leaf in self.weighted(self.l1, x, leaves)]
        return super().prox_leaves(x, soft, step)


def _soft(u: Tensor, threshold: Tensor) -> Tensor:
    return u.sign() * (u.abs() - threshold).clamp(min=0)


def _total(terms: Any) -> Tensor:
    total: Tensor = sum(term.sum() for term in terms)
    return total


def _split(vector: Tensor, leaves: Leaves) -> Leaves:
    pieces = vector.split([leaf.numel() for leaf in leaves])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, leaves, strict=True)]
