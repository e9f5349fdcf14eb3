"""Weights and groups of non-smooth terms: checks of all accepted forms, and conversion to the device of the variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor

from meha.tensors.checks import broadcasts
from meha.tensors.torch_private import under_trace
from meha.tensors.variables import Leaves

__all__ = ["Groups", "Weight", "by_size", "per_group", "per_leaf", "read_groups"]


Weight = float | Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[Any], Any]
Groups = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


def per_leaf(
    term: str, names: list[str], weight: Weight, x: Any, leaves: Leaves, *, scalar: bool = False, signed: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Pair each leaf with its weight.

    Args:
        term: name of the term in errors.
        names: names of the leaves, for weights given by name.
        scalar: whether the weight of a leaf must be a single number.
        signed: whether weights may be negative, as they may be at an x outside X.
    """
    weights = weight(x) if callable(weight) else weight
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ValueError(
                f"{term}: the weights are named {sorted(weights)}, the leaves {sorted(names)}; use the same names."
            )
        weights = [weights[leaf] for leaf in names]
    if isinstance(weights, Tensor) and weights.ndim == 1 and len(leaves) > 1 and weights.numel() == len(leaves):
        weights = list(weights)  # one entry per leaf, not one per coordinate
    many = weights if isinstance(weights, list | tuple) else [weights] * len(leaves)
    if len(many) != len(leaves):
        raise ValueError(f"{term}: got {len(many)} weights for {len(leaves)} leaves; give one for each, or a single one.")
    return [(_fitted(w, leaf, term, scalar, signed), leaf) for w, leaf in zip(many, leaves, strict=True)]


def per_group(term: str, count: int, weight: Weight, x: Any, like: Tensor) -> Tensor:
    """Convert the weights of ``count`` groups: one for all, or one for each."""
    weights = weight(x) if callable(weight) else weight
    if isinstance(weights, Mapping):
        raise TypeError(f"{term}: a weight per group is a number or a vector, got {type(weights).__name__}.")
    if isinstance(weights, list | tuple):  # entries may be tensors with a gradient, which as_tensor would drop
        weights = torch.stack([_on(w, like) for w in weights])
    weights = _on(cast(Tensor | float, weights), like)
    if weights.numel() == 1:
        weights = weights.reshape(())  # broadcasts like a number, whatever its shape was
    if weights.ndim > 0 and tuple(weights.shape) != (count,):
        raise ValueError(
            f"{term}: weight has shape {tuple(weights.shape)} for {count} groups; give a number or a vector of {count}."
        )
    return _not_negative(weights, term)


def _fitted(weight: Any, leaf: Tensor, term: str, scalar: bool, signed: bool) -> Tensor:
    """Convert the weight of one leaf to its dtype and device; raise if it does not broadcast to the leaf."""
    if not isinstance(weight, Tensor | Real):
        raise TypeError(
            f"{term}: a weight must be a number or a tensor, got {type(weight).__name__}; wrap arrays with torch.as_tensor."
        )
    fitted = _on(cast(Tensor | float, weight), leaf)
    if fitted.numel() == 1:
        fitted = fitted.reshape(())
    if fitted.ndim and (scalar or not broadcasts(fitted.shape, leaf.shape)):
        kind = "one number" if scalar else f"a number or a tensor that broadcasts to {tuple(leaf.shape)}"
        raise ValueError(f"{term}: weight has shape {tuple(fitted.shape)}; a leaf of shape {tuple(leaf.shape)} takes {kind}.")
    return fitted if signed else _not_negative(fitted, term)


def _on(value: Tensor | float, like: Tensor) -> Tensor:
    """Convert ``value`` to a tensor with the dtype and device of ``like``; a number is not copied from the host."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), float(value))


def _not_negative(weight: Tensor, term: str) -> Tensor:
    """Return the weight; raise if it is negative.

    It becomes NaN instead on an accelerator, where the check would need a synchronisation, and in a traced step, where there is
    no value.
    """
    if weight.device.type != "cpu" or under_trace():
        return torch.where(weight < 0, torch.nan, weight)  # the run then ends with NaN instead of a wrong prox
    if bool((weight < 0).any()):
        raise ValueError(
            f"{term}: a weight is negative ({float(weight.detach().min()):.3g}), and the term has no prox; constrain x"
            " (x_set=meha.sets.NonNegative()) or map it (weight=lambda x: x.exp())."
        )
    return weight


def by_size(groups: Any) -> bool:
    """Whether groups are given by sizes, not by coordinates."""
    return all(isinstance(group, Integral) or (isinstance(group, Tensor) and group.ndim == 0) for group in groups)


def read_groups(term: str, groups: Any) -> tuple[Tensor, int]:
    """Return the group of each coordinate up to the last named one (``len(groups)`` if in none), and the number of groups."""
    if not isinstance(groups, Sequence | Tensor) or isinstance(groups, str):  # a str is a Sequence, too
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
