"""Weights and groups of non-smooth terms, in all the forms that users may give them: read, checked, on the right device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor

from meha._torch import under_trace
from meha._variables import Leaves

__all__ = ["Groups", "Weight", "by_size", "declared", "per_group", "per_leaf", "read_groups"]

Weight = float | Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[Any], Any]
Groups = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


def declared(term: str, name: str, weight: Weight) -> Weight:
    """The weight, refused at once if it is of no known form or a negative number."""
    if not callable(weight) and not isinstance(weight, Tensor | Real | list | tuple | Mapping):
        raise TypeError(
            f"{term}: {name} must be a number, a tensor, a list or dict of them, or a function of x, got {weight!r}."
        )
    if isinstance(weight, Tensor | Real) and bool(torch.as_tensor(weight < 0).any()):
        raise ValueError(f"{term}: {name} must not be negative, got {weight!r}.")
    return weight


def per_leaf(
    term: str, names: list[str], weight: Weight, x: Any, leaves: Leaves, *, scalar: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of weight and leaf.

    Args:
        term: what errors call the term.
        names: of the leaves, for weights given by name.
        scalar: whether a leaf takes a single number only.
    """
    found = weight(x) if callable(weight) else weight
    if isinstance(found, Mapping):
        if set(found) != set(names):
            raise ValueError(f"{term}: the weights are named {sorted(found)}, the leaves {sorted(names)}; name each once.")
        found = [found[leaf] for leaf in names]
    if isinstance(found, Tensor) and found.ndim == 1 and len(leaves) > 1 and found.numel() == len(leaves):
        found = list(found)
    many = found if isinstance(found, list | tuple) else [found] * len(leaves)
    if len(many) != len(leaves):
        raise ValueError(f"{term}: got {len(many)} weights for {len(leaves)} leaves; give one each, or a single one.")
    return [(_fitted(w, leaf, term, scalar), leaf) for w, leaf in zip(many, leaves, strict=True)]


def per_group(term: str, count: int, weight: Weight, x: Any, like: Tensor) -> Tensor:
    """One weight for all of ``count`` groups, or one each."""
    found = weight(x) if callable(weight) else weight
    if isinstance(found, Mapping):
        raise TypeError(f"{term}: a weight per group is a number or a vector, got {type(found).__name__}.")
    if isinstance(found, list | tuple):  # entries may be tensors with a gradient, which as_tensor would drop
        found = torch.stack([_on(w, like) for w in found])
    found = _on(cast(Tensor | float, found), like)
    if found.numel() == 1:
        found = found.reshape(())
    if found.ndim > 0 and tuple(found.shape) != (count,):
        raise ValueError(
            f"{term}: weight has shape {tuple(found.shape)} for {count} groups; give a number or a vector of {count}."
        )
    return _not_negative(found, term)


def _fitted(weight: Any, leaf: Tensor, term: str, scalar: bool) -> Tensor:
    if not isinstance(weight, Tensor | Real):
        raise TypeError(
            f"{term}: a weight must be a number or a tensor, got {type(weight).__name__}; wrap arrays with torch.as_tensor."
        )
    found = _on(cast(Tensor | float, weight), leaf)
    if found.numel() == 1:
        found = found.reshape(())
    fits = found.ndim == 0
    if not fits and not scalar:
        try:
            fits = torch.broadcast_shapes(found.shape, leaf.shape) == leaf.shape
        except RuntimeError:
            fits = False
    if not fits:
        kind = "one number" if scalar else f"a number or a tensor that broadcasts to {tuple(leaf.shape)}"
        raise ValueError(f"{term}: weight has shape {tuple(found.shape)}; a leaf of shape {tuple(leaf.shape)} takes {kind}.")
    return _not_negative(found, term)


def _on(value: Tensor | float, like: Tensor) -> Tensor:
    """``value`` as a tensor of the dtype and on the device of ``like``; a number does not cross from the host."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), float(value))


def _not_negative(weight: Tensor, term: str) -> Tensor:
    """The weight, refused if negative; NaN instead of an error on an accelerator, where it would need a synchronisation, and in
    a step that is traced, where there is no value to look at."""
    if weight.device.type != "cpu" or under_trace():
        return torch.where(weight < 0, torch.nan, weight)
    if bool((weight < 0).any()):
        raise ValueError(
            f"{term}: a weight is negative ({float(weight.detach().min()):.3g}), and the term has no prox; constrain x"
            " (x_set=meha.sets.NonNegative()) or map it (weight=lambda x: x.exp())."
        )
    return weight


def by_size(groups: Any) -> bool:
    """Whether groups are given by their sizes, rather than by their coordinates."""
    return all(isinstance(group, Integral) or (isinstance(group, Tensor) and group.ndim == 0) for group in groups)


def read_groups(term: str, groups: Any) -> tuple[Tensor, int]:
    """The group of each coordinate up to the last one named (``len(groups)`` for none), and the number of groups."""
    if not isinstance(groups, Sequence | Tensor) or isinstance(groups, str):
        raise TypeError(f"{term}: groups must be a list of sizes or of index lists, got {type(groups).__name__}.")
    if len(groups) == 0:
        raise ValueError(f"{term}: groups is empty; give sizes or index lists.")
    if by_size(groups):
        sizes = torch.tensor([int(size) for size in groups])
        if bool((sizes <= 0).any()):
            raise ValueError(f"{term}: sizes of groups must be positive, got {int(sizes.min())}.")
        return torch.repeat_interleave(torch.arange(len(groups)), sizes), len(groups)
    if any(isinstance(group, Integral) for group in groups):
        raise TypeError(f"{term}: groups mixes sizes and index lists; give sizes only, or lists only.")
    listed = [torch.as_tensor(group).reshape(-1).cpu() for group in groups]
    if any(index.is_floating_point() or index.dtype == torch.bool for index in listed if len(index)):
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
