"""State: what an object must remember is saved as plain data, and restored bit for bit, by one walk over its attributes."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from meha.tensors.variables import Variable, kept

TYPE, VALUE = "<type>", "<value>"
"""Keys of a saved value whose type plain data cannot tell: the name of the type, and what it is made of."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and restored: variables, optimizers, loaders, callbacks, parts of a run."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Saved:
    """Saves and restores its attributes: all fields of a dataclass, or those that a class lists in ``saves``.

    >>> class Counter(Saved):
    ...     saves = ("count",)
    ...     count = 0
    >>> first, second = Counter(), Counter()
    >>> first.count = 3
    >>> second.load_state_dict(first.state_dict())
    >>> second.count
    3
    """

    saves: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """A copy of what it remembers, in plain tensors, numbers and text, for ``torch.save``."""
        return saved(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another object of the class was."""
        restore(self, state)


def saved(item: Any) -> dict[str, Any]:
    """The attributes of an object as plain data, which ``torch.load(..., weights_only=True)`` reads; tensors are copied."""
    return {name: pack(getattr(item, name)) for name in _names(item)}


def restore(item: Any, state: Mapping[str, Any]) -> None:
    """Set the attributes of an object to what :func:`saved` returned.

    Raises:
        ValueError: the state is of an object with other attributes.
    """
    names = _names(item)
    if not isinstance(state, Mapping) or set(names) != set(state):
        raise ValueError(f"state: this run needs {sorted(names)}, and gets something else; it is of another method.")
    for name in names:
        setattr(item, name, unpack(state[name], getattr(item, name, None)))


def pack(value: Any) -> Any:
    """A value as plain data: tensors are copied; dataclasses, named tuples, enums and arrays keep the names of their types."""
    if isinstance(value, Stateful):
        state = value.state_dict()
        return state if isinstance(value, Saved | Variable) else copy.deepcopy(state)  # optimizers change what they hand out
    if isinstance(value, Tensor):
        return kept(value)
    if isinstance(value, np.ndarray):
        return {TYPE: "array", VALUE: torch.tensor(value)}
    if isinstance(value, enum.Enum):
        return {TYPE: _name(value), VALUE: value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {TYPE: _name(value), VALUE: saved(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {TYPE: _name(value), VALUE: [pack(part) for part in value]}
    if isinstance(value, list | tuple):
        return type(value)(pack(part) for part in value)
    if isinstance(value, dict):
        return {key: pack(part) for key, part in value.items()}
    return value


def unpack(state: Any, now: Any = None) -> Any:
    """The value that :func:`pack` saved.

    Args:
        now: the present value. One that restores itself does so in place; a tensor says on which device the new one must be.
    """
    if isinstance(now, Stateful):
        own = isinstance(now, Saved | Variable)
        now.load_state_dict(state if own else copy.deepcopy(state))  # optimizers keep the tensors that they are given
        return now
    if isinstance(state, Tensor):
        return state.to(now.device if isinstance(now, Tensor) else state.device, copy=True)
    if isinstance(state, dict) and set(state) == {TYPE, VALUE}:
        return _build(state[TYPE], state[VALUE])
    if isinstance(state, dict):
        before = now if isinstance(now, dict) else {}
        return {key: unpack(part, before.get(key)) for key, part in state.items()}
    if isinstance(state, list | tuple):
        old = now if isinstance(now, list | tuple) and len(now) == len(state) else [None] * len(state)
        return type(state)(unpack(part, item) for part, item in zip(state, old, strict=True))
    return state


def _build(name: str, value: Any) -> Any:
    """Make an array, an enum, a named tuple or a dataclass of this library; a file can name no other type."""
    if name == "array":
        return value.numpy().copy()
    module, _, kind = name.partition(":")
    found: Any = getattr(sys.modules.get(module), kind, None) if module.startswith("meha.") else None
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return found(value)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make"):
        return found._make(unpack(value))
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return found(**unpack(value))
    raise ValueError(f"state: holds a {name}, which this version does not know; the state is of another version.")


def _name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _names(item: Any) -> tuple[str, ...]:
    """The attributes to save; fields of a dataclass that cannot be saved, such as graphs, say so in their metadata."""
    if dataclasses.is_dataclass(item) and not getattr(item, "saves", ()):
        return tuple(field.name for field in dataclasses.fields(item) if field.metadata.get("saved", True))
    return tuple(getattr(item, "saves", ()))
