"""Terms that couple coordinates: norms of groups, and singular values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from meha.problem.nonsmooth.base import Weight, Weighted, converted, kink, least, not_negative, soft, total
from meha.tensors.variables import Leaves
from meha.tensors.vectors import join, split

Groups = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


class Nuclear(Weighted):
    """g(x, Y) = w * (sum of the singular values of Y), for each matrix leaf; prox: singular values soft-thresholded.

    >>> Nuclear(1.0).prox(None, torch.diag(torch.tensor([3.0, 0.5])), step=1.0)
    tensor([[2., 0.],
            [0., 0.]])
    """

    def check(self, leaves: Leaves) -> None:
        for leaf in leaves:
            if leaf.ndim != 2:
                raise ValueError(f"Nuclear: acts on matrices, got a leaf of shape {tuple(leaf.shape)}; choose a part.")

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        weights = self.weighted(self.weight, x, leaves, scalar=True)
        return total(w * torch.linalg.svdvals(leaf) for w, leaf in weights)

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        results = []
        for w, leaf in self.weighted(self.weight, x, leaves, scalar=True):
            u, s, v = torch.linalg.svd(leaf, full_matrices=False)  # singular value thresholding (Cai, Candes, Shen 2010)
            results.append((u * (s - step * w).clamp(min=0)) @ v)
        return results

    def least_leaves(self, x: Any, leaves: Leaves, gradient: Leaves, c: float, room: tuple[Leaves, Leaves] | None) -> Leaves:
        """Use that the subgradients are w (U V' + W), with W orthogonal to U and V and of spectral norm at most 1."""
        results = []
        for (w, leaf), d in zip(self.weighted(self.weight, x, leaves, scalar=True), gradient, strict=True):
            u, s, v = torch.linalg.svd(leaf, full_matrices=False)
            positive = s > max(leaf.shape) * torch.finfo(s.dtype).eps * s.max()  # the usual tolerance of a numerical rank
            u, v = u[:, positive], v[positive]
            whole = d + c * w * u @ v
            rest = whole - u @ (u.T @ whole)  # the part that W can cancel
            rest = rest - (rest @ v.T) @ v
            a, t, b = torch.linalg.svd(rest, full_matrices=False)
            results.append(whole - rest + (a * (t - c * w).clamp(min=0)) @ b)
        return results


class GroupL2(Weighted):
    """g(x, y) = sum_j w_j ||y^(j)||_2; prox: each group shrunk by max(0, 1 - step * w_j / ||y^(j)||).

    Args:
        groups: the sizes of contiguous groups (numbers), or the coordinates of each group (lists or index tensors).
            Coordinates count through all chosen leaves, one after another. Groups may have any sizes and must not overlap;
            coordinates outside all groups are not penalised.
        weight: w: one number, or one per group.

    >>> GroupL2([2, 1], weight=1.0).prox(None, torch.tensor([3.0, 4.0, 0.5]), step=1.0)
    tensor([2.4000, 3.2000, 0.0000])
    >>> GroupL2([[0, 2], [1]], weight=lambda x: x).value(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0, 4.0]))
    tensor(7.)
    """

    orthant = True  # shrinking keeps signs, so that it can follow the projection

    def __init__(self, groups: Groups, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(weight, part)
        self.groups = groups
        self._named, self.count = read_groups(type(self).__name__, groups)
        self._labels = self._named

    def check(self, leaves: Leaves) -> None:
        name, named, size = type(self).__name__, self._named.numel(), sum(leaf.numel() for leaf in leaves)
        if _by_size(self.groups) and named != size:
            raise ValueError(f"{name}: the groups' sizes add up to {named}, but y has {size} coordinates there.")
        if named > size:
            raise ValueError(f"{name}: groups name the coordinate {named - 1}, but y has {size} coordinates there.")

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        vector, labels = self._flatten(leaves)
        return (self._weights(x, vector) * self._norms(vector, labels)).sum()

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        vector, labels = self._flatten(leaves)
        return split(self._shrink(vector, labels, step * self._weights(x, vector)), leaves)

    def least_leaves(self, x: Any, leaves: Leaves, gradient: Leaves, c: float, room: tuple[Leaves, Leaves] | None) -> Leaves:
        """Use the gradient of the norm for groups that are not zero, and for the others the ball of subgradients."""
        vector, labels = self._flatten(leaves)
        radius = c * self._weights(x, vector).expand(self.count)
        norms = self._norms(vector, labels)
        factor = torch.where(norms > 0, radius / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0)
        smooth = split(vector * torch.cat([factor, factor.new_zeros(1)])[labels], leaves)  # the last label is that of no group
        rest = least([d + s for d, s in zip(gradient, smooth, strict=True)], self._kinks(x, leaves), c, room)
        flat, _ = self._flatten(rest)
        return split(self._shrink(flat, labels, torch.where(norms > 0, 0.0, radius)), leaves)  # least norm of rest + ball

    def _kinks(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """Return the left and right derivatives of the separable part of the term."""
        none = [torch.zeros_like(leaf) for leaf in leaves]
        return none, none

    def free(self, leaves: Leaves) -> Leaves | None:
        if self.kinked:
            return super().free(leaves)
        vector, labels = self._flatten(leaves)
        norms = self._norms(vector, labels)
        return split(torch.cat([norms > 0, norms.new_ones(1, dtype=torch.bool)])[labels], leaves)

    def cut(self, leaves: Leaves, start: Leaves) -> Leaves:
        """Stop a move at zero for each group that ends in the half-space opposite to its start."""
        if self.kinked:
            return super().cut(leaves, start)
        (new, labels), (old, _) = self._flatten(leaves), self._flatten(start)
        along = new.new_zeros(self.count + 1).index_add_(0, labels, new * old)
        along[self.count] = 0  # coordinates in no group have no kink
        return split(torch.where(along < 0, 0.0, 1.0)[labels].to(new) * new, leaves)

    def _flatten(self, leaves: Leaves) -> tuple[Tensor, Tensor]:
        """Return the leaves as one vector, and the group of each coordinate (``count`` for none) on the same device."""
        vector = join(leaves)
        if self._labels.device != vector.device or self._labels.numel() != vector.numel():
            free = torch.full((vector.numel() - self._named.numel(),), self.count)
            self._labels = torch.cat([self._named, free]).to(vector.device)
        return vector, self._labels

    def _weights(self, x: Any, like: Tensor) -> Tensor:
        return per_group(type(self).__name__, self.count, self.weight, x, like)

    def _norms(self, vector: Tensor, labels: Tensor) -> Tensor:
        """Return the norm of each group, with a gradient of zero at zero."""
        squares = vector.new_zeros(self.count + 1).index_add_(0, labels, vector.square())[: self.count]
        if not squares.requires_grad:
            return squares.sqrt()
        positive = squares > 0
        return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)  # sqrt has an infinite derivative at zero

    def _shrink(self, vector: Tensor, labels: Tensor, threshold: Tensor) -> Tensor:
        """Return the prox of the norms of the groups: block soft thresholding."""
        norms = self._norms(vector, labels)
        factor = torch.where(norms > threshold, 1 - threshold / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0)
        return vector * torch.cat([factor, factor.new_ones(1)])[labels]


class SparseGroup(GroupL2):
    """``g(x, y) = sum_i v_i |y_i| + sum_j w_j ||y^(j)||_2``; prox: soft thresholding, then shrinking of the groups.

    Args:
        groups: as in :class:`GroupL2`.
        l1: v: one number, or one per coordinate.
        group: w: one number, or one per group.

    >>> SparseGroup([2, 1], l1=1.0, group=1.0).prox(None, torch.tensor([4.0, 5.0, 1.5]), step=1.0)
    tensor([2.4000, 3.2000, 0.0000])
    """

    kinked = True

    def __init__(self, groups: Groups, l1: Weight = 1.0, group: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(groups, group, part)
        self.l1 = self.declared("l1", l1)

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        sparse = total(w * leaf.abs() for w, leaf in self.weighted(self.l1, x, leaves))
        return sparse + super().value_leaves(x, leaves)

    def _kinks(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves]:
        pairs = [kink(w, leaf, w) for w, leaf in self.weighted(self.l1, x, leaves)]
        return [left for left, _ in pairs], [right for _, right in pairs]

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        # The prox of the sum is the composition in this order (Jenatton et al. 2011).
        thresholded = [soft(leaf, step * w) for w, leaf in self.weighted(self.l1, x, leaves)]
        return super().prox_leaves(x, thresholded, step)


def per_group(term: str, count: int, weight: Weight, x: Any, like: Tensor) -> Tensor:
    """Convert the weights of ``count`` groups: one for all, or one for each."""
    weights = weight(x) if callable(weight) else weight
    if isinstance(weights, Mapping):
        raise TypeError(f"{term}: a weight per group is a number or a vector, got {type(weights).__name__}.")
    if isinstance(weights, list | tuple):  # entries may be tensors with a gradient, which as_tensor would drop
        weights = torch.stack([converted(w, like) for w in weights])
    weights = converted(cast(Tensor | float, weights), like)
    if weights.ndim > 0 and tuple(weights.shape) != (count,):
        shape = tuple(weights.shape)
        raise ValueError(f"{term}: weight has shape {shape} for {count} groups; give a number or a vector of {count}.")
    return not_negative(weights, term)


def _by_size(groups: Any) -> bool:
    """Whether groups are given by sizes, not by coordinates."""
    return all(isinstance(group, Integral) or (isinstance(group, Tensor) and group.ndim == 0) for group in groups)


def read_groups(term: str, groups: Any) -> tuple[Tensor, int]:
    """Return the group of each coordinate up to the last named one (``len(groups)`` if in none), and the number of groups."""
    if not isinstance(groups, Sequence | Tensor) or isinstance(groups, str):  # a str is a Sequence, too
        raise TypeError(f"{term}: groups must be a list of sizes or of index lists, got {type(groups).__name__}.")
    if len(groups) == 0:
        raise ValueError(f"{term}: groups is empty; give sizes or index lists.")
    if _by_size(groups):
        sizes = torch.tensor([int(size) for size in groups])
        if bool((sizes <= 0).any()):
            raise ValueError(f"{term}: sizes of groups must be positive, got {int(sizes.min())}.")
        return torch.repeat_interleave(torch.arange(len(groups)), sizes), len(groups)
    if any(isinstance(group, Integral) for group in groups):
        raise TypeError(f"{term}: groups mixes sizes and index lists; give sizes only, or lists only.")
    listed = [torch.as_tensor(group).reshape(-1).cpu() for group in groups]
    if any(index.is_floating_point() or index.dtype == torch.bool for index in listed if len(index)):  # [] is a float tensor
        raise TypeError(f"{term}: groups must hold coordinates (integers); turn a mask into them with mask.nonzero().")
    indices = [index.long() for index in listed]
    if any(len(index) == 0 for index in indices):
        raise ValueError(f"{term}: group {[len(i) for i in indices].index(0)} is empty; leave it out.")
    joined = torch.cat(indices)
    if bool((joined < 0).any()):
        raise ValueError(f"{term}: groups name the coordinate {int(joined.min())}; coordinates count from 0.")
    if len(joined.unique()) != len(joined):
        raise ValueError(f"{term}: groups overlap; the prox has a closed form only for separate groups.")
    labels = torch.full((int(joined.max()) + 1,), len(groups))
    for label, index in enumerate(indices):
        labels[index] = label
    return labels, len(groups)
