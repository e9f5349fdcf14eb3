"""Norms, inner products and in-place arithmetic on lists of leaves, whole or divided among processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meha._distributed import is_dtensor, local, total
from meha._torch import foreach_add_, foreach_copy_, foreach_mul, foreach_norm, foreach_sub

__all__ = [
    "Leaves",
    "add_",
    "add_difference_",
    "all_finite",
    "copy_",
    "distance",
    "inner",
    "join_norms",
    "mean_size",
    "norm",
    "scaled",
    "short_step",
    "subtract",
]

Leaves = list[Tensor]


def norm(*variables: Leaves) -> Tensor:
    """Return the Euclidean norm of all leaves together, as a tensor (no synchronisation)."""
    leaves = [leaf for group in variables for leaf in group]
    if len(leaves) == 1 and not is_dtensor(leaves[0]):
        return torch.linalg.vector_norm(leaves[0])
    return join_norms(list(foreach_norm(local(leaves))), leaves)


def join_norms(norms: list[Tensor], leaves: Leaves) -> Tensor:
    """Return the norm of leaves, of which the parts in this process have these norms."""
    if not any(is_dtensor(leaf) for leaf in leaves):
        return torch.linalg.vector_norm(torch.stack(norms))
    return total([part.square() for part in norms], leaves).sqrt()


def mean_size(leaf: Tensor) -> Tensor:
    """Return the mean of the absolute values of a leaf."""
    if not is_dtensor(leaf):
        return leaf.abs().mean()
    return total([local([leaf])[0].abs().sum()], [leaf]) / leaf.numel()


def all_finite(leaves: Leaves) -> bool:
    """Whether no leaf holds NaN or infinity; the host waits for the device."""
    if not any(is_dtensor(leaf) for leaf in leaves):
        return bool(torch.stack([torch.isfinite(leaf).all() for leaf in leaves]).all())
    return not bool(total([(~torch.isfinite(part)).sum() for part in local(leaves)], leaves))


def inner(a: Leaves, b: Leaves) -> Tensor:
    """Return the inner product of all leaves together, as a tensor (no synchronisation)."""
    return total([torch.dot(u.reshape(-1), v.reshape(-1)) for u, v in zip(local(a), local(b), strict=True)], a)


def add_(leaves: Leaves, direction: Leaves, scale: float | Tensor) -> None:
    """Compute leaves <- leaves + scale * direction in place."""
    leaves, direction = local(leaves), local(direction)
    if isinstance(scale, Tensor):
        foreach_add_(leaves, foreach_mul(direction, scale))
    elif len(leaves) == 1:
        leaves[0].add_(direction[0], alpha=scale)
    else:
        foreach_add_(leaves, direction, alpha=scale)


def scaled(leaves: Leaves, factor: Tensor) -> Leaves:
    """Return factor * leaves as new leaves; the list is used up, which frees each leaf once its product is made."""
    if any(is_dtensor(leaf) for leaf in leaves):
        return [leaves.pop(0) * factor for _ in range(len(leaves))]
    products = list(foreach_mul(leaves, factor))
    leaves.clear()
    return products


def subtract(a: Leaves, b: Leaves) -> Leaves:
    """Return a - b as new leaves."""
    if len(a) == 1 or any(is_dtensor(leaf) for leaf in a):
        return [u - v for u, v in zip(a, b, strict=True)]
    return list(foreach_sub(a, b))


def distance(a: Leaves, b: Leaves) -> Tensor:
    """Return the Euclidean norm of a - b leaf by leaf, as a tensor (no synchronisation)."""
    parts = [torch.dist(u, v) for u, v in zip(local(a), local(b), strict=True)]
    return parts[0] if len(parts) == 1 and not is_dtensor(a[0]) else join_norms(parts, a)


def add_difference_(gradient: Leaves, a: Leaves, b: Leaves, scale: float | Tensor) -> None:
    """Compute gradient <- gradient + scale * (a - b) leaf by leaf, with new tensors in the list.

    (The old tensors are not written to, because autograd may return views, or one tensor twice.)
    """
    for i in range(len(gradient)):
        difference = a[i] - b[i]
        if isinstance(scale, Tensor):
            gradient[i] = gradient[i] + scale * difference
        elif is_dtensor(difference):
            mine, sum_ = local([gradient[i], difference])
            torch.add(mine, sum_, alpha=scale, out=sum_)
            gradient[i] = difference
        else:
            gradient[i] = torch.add(gradient[i], difference, alpha=scale, out=difference)


def copy_(leaves: Leaves, source: Leaves) -> None:
    """Compute leaves <- source in place."""
    leaves, source = local(leaves), local(source)
    if len(leaves) == 1:
        leaves[0].copy_(source[0])
    else:
        foreach_copy_(leaves, source)


def short_step(leaves: Leaves, directions: Leaves) -> float:
    """A step along ``directions`` whose length is the square root of the rounding, relative to the leaves."""
    eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves)
    return math.sqrt(eps) * (1 + float(norm(leaves))) / (float(norm(directions)) or 1.0)
