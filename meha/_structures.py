"""Values as trees: the tensors and modules in nested dicts and lists, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meha._torch import plain_name

__all__ = ["KINDS", "fresh_leaf", "join", "map_tensors", "modules_of", "named_leaves", "named_modules", "select"]

KINDS = "a tensor, nested dicts or lists of tensors, or an nn.Module"


def named_leaves(value: Any, argument: str = "variable") -> dict[str, Tensor]:
    """Return the tensors of ``value`` that are optimised, by dotted name.

    A bare tensor has the empty name. A module contributes its parameters that require gradients, under their names, which
    ``torch.compile`` does not change.

    >>> list(named_leaves({"w": torch.zeros(2), "layers": [torch.zeros(1), torch.zeros(3)]}))
    ['w', 'layers.0', 'layers.1']
    """
    leaves: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, leaf in _walk(value, "", argument):
        if id(leaf) in seen:
            continue
        if name in leaves:
            raise ValueError(f"{argument}: two tensors are named {name!r}; rename a key (dots separate levels).")
        seen.add(id(leaf))
        leaves[name] = leaf
    return leaves


def select(part: str | Sequence[str] | None, names: Sequence[str], argument: str) -> list[int]:
    """Return the indices of the leaves named by ``part`` or below it; all if it is None."""
    if part is None:
        return list(range(len(names)))
    wanted = [part] if isinstance(part, str) else list(part)
    if not wanted:
        raise ValueError(f"{argument}: is empty; name a leaf, or leave it out to take all.")
    chosen: list[int] = []
    for want in wanted:
        matching = [i for i, name in enumerate(names) if name == want or name.startswith(want + ".")]
        if not matching:
            known = ", ".join(repr(name) for name in names) or "none"
            raise ValueError(f"{argument}: no leaf is named {want!r}; the leaves are {known}.")
        chosen += [i for i in matching if i not in chosen]
    return chosen


def _walk(value: Any, prefix: str, argument: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            if parameter.requires_grad:
                yield join(prefix, plain_name(name)), parameter
    elif isinstance(value, Mapping | list | tuple):
        for key, item in _items(value):
            yield from _walk(item, join(prefix, key), argument)
    else:
        where = f"{argument}[{prefix!r}]" if prefix else argument
        raise TypeError(
            f"{where}: got {type(value).__name__}, expected {KINDS}. "
            "Wrap numbers and arrays with torch.as_tensor(..., dtype=torch.float64)."
        )


def named_modules(value: Any, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a value, by their place in it."""
    if isinstance(value, nn.Module):
        yield prefix, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in _items(value):
            yield from named_modules(item, join(prefix, key))


def modules_of(value: Any) -> Iterator[nn.Module]:
    """The modules in a value: itself, or those in its dicts and lists."""
    return (module for _, module in named_modules(value, ""))


def _items(value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        yield str(key), item


def join(prefix: str, name: str) -> str:
    """The name of a leaf below another one."""
    return f"{prefix}.{name}" if prefix else name


def fresh_leaf(tensor: Tensor) -> Tensor:
    """A copy of a tensor, which requires gradients if it can."""
    fresh = tensor.detach().clone(memory_format=torch.contiguous_format)
    return fresh.requires_grad_() if fresh.is_floating_point() else fresh


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    """Apply ``function`` to every tensor outside modules; objects in ``memo`` are replaced."""
    if id(value) in memo:
        return memo[id(value)]
    result: Any = value
    if isinstance(value, Tensor):
        result = function(value)
    elif isinstance(value, Mapping):
        result = {key: map_tensors(item, function, memo) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        result = type(value)(*(map_tensors(item, function, memo) for item in value))
    elif isinstance(value, list | tuple):
        result = type(value)(map_tensors(item, function, memo) for item in value)
    memo[id(value)] = result
    return result
