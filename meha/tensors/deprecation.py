"""Renamed names stay usable for at least one minor version, with a warning that tells the new name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """A name that was moved: its new dotted name, and the version in which the old one goes."""

    new: str
    removed_in: str


def deprecated_names(module: str, names: Mapping[str, Renamed]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that hands out renamed objects with a DeprecationWarning.

    Args:
        module: the ``__name__`` of the module that had the old names.
        names: from each old name to its new place.

    >>> __getattr__ = deprecated_names("meha", {"Continuation": Renamed("meha.methods.Default", "0.2")})
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     __getattr__("Continuation").__name__
    'Default'
    >>> print(caught[0].message)
    meha.Continuation is now meha.methods.Default; the old name goes in version 0.2.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        # The caller's line is two frames up: this function, then the attribute access itself.
        warnings.warn(
            f"{module}.{name} is now {new.new}; the old name goes in version {new.removed_in}.",
            DeprecationWarning,
            stacklevel=2,
        )
        place, _, attribute = new.new.rpartition(".")
        return getattr(importlib.import_module(place), attribute)

    return __getattr__
