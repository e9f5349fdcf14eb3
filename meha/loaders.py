"""Loaders: batches without end from loaders that end, whose place can be saved and found again.

A loader here is anything that gives batches when iterated over: a DataLoader, a list, a tensor, a class with ``__iter__``.
"""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

__all__ = ["Endless", "Together", "random_states", "set_random_states"]


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and restored: a loader or a callback with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Endless(Iterator[Any]):
    """The batches of a loader, begun anew whenever they end. It ends only when a new beginning gives nothing.

    Its place can be saved. A loader with ``state_dict`` and ``load_state_dict`` of its own is asked for it. For any other, the
    place is the states of the random number generators when the loader was last begun, and how many batches it has given since:
    going back begins it anew from these states and skips as many. So the order of the batches may depend on these states and
    on nothing else that changes.

    Args:
        loader: an iterable of batches.

    >>> batches = Endless(["a", "b", "c"])
    >>> [next(batches) for _ in range(5)]
    ['a', 'b', 'c', 'a', 'b']
    >>> place = batches.state_dict()
    >>> next(batches), next(batches)
    ('c', 'a')
    >>> batches.load_state_dict(place)
    >>> next(batches)
    'c'
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader: expected an iterable of batches, got {type(loader).__name__}.")
        self.loader = loader
        self._batches: Iterator[Any] | None = None
        self._begun: dict[str, Any] = {}
        self._position = 0
        self._restored = False

    def __next__(self) -> Any:
        if self._restored:
            self._begin()  # a loader that was put back to its end gives nothing the first time
            self._restored = False
        if self._batches is not None:
            try:
                return self._take(self._batches)
            except StopIteration:
                pass
        return self._take(self._begin())

    def _begin(self) -> Iterator[Any]:
        fixed = isinstance(self.loader, Sequence | Tensor | Stateful)  # states take time, and are not needed
        self._begun, self._position = {} if fixed else random_states(self.loader), 0
        self._batches = iter(self.loader)
        return self._batches

    def _take(self, batches: Iterator[Any]) -> Any:
        batch = next(batches)
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place, in plain tensors and numbers."""
        if isinstance(self.loader, Stateful):
            return {"loader": self.loader.state_dict()}
        return {"begun": self._begun, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a place. This uses the random number generators; set their states afterwards."""
        self._batches = None
        if isinstance(self.loader, Stateful):
            self.loader.load_state_dict(state["loader"])
            self._restored = True
            return
        position = state["position"]
        if position:
            if state["begun"]:
                set_random_states(state["begun"], self.loader)
            batches = self._begin()
            for given in range(position):
                try:
                    self._take(batches)
                except StopIteration:
                    raise ValueError(
                        f"batches: ended after {given}, but {position} had been taken when their place was saved; pass the"
                        " same batches as then."
                    ) from None


class Together(Iterator[Any]):
    """One batch of each loader at a time, without end: each is begun anew when it ends, whatever their lengths.

    A batch is a named tuple. The place of all of them can be saved, as that of :class:`Endless`.

    Args:
        loaders: by name.

    >>> batches = Together(clean=[1, 2], noisy=["a", "b", "c"])
    >>> [next(batches) for _ in range(4)]
    [Batch(clean=1, noisy='a'), Batch(clean=2, noisy='b'), Batch(clean=1, noisy='c'), Batch(clean=2, noisy='a')]
    >>> next(batches).noisy
    'b'
    """

    def __init__(self, **loaders: Iterable[Any]) -> None:
        if not loaders:
            raise ValueError("Together: expected loaders by name, as in Together(clean=first, noisy=second), got none.")
        for name, loader in loaders.items():
            if not isinstance(loader, Iterable):
                raise TypeError(f"Together: {name} must be an iterable of batches, got {type(loader).__name__}.")
        self.loaders = loaders
        self._parts = {name: Endless(loader) for name, loader in loaders.items()}
        self._form: Any = namedtuple("Batch", loaders)  # type: ignore[misc]

    def __next__(self) -> Any:
        return self._form._make([next(part) for part in self._parts.values()])

    def state_dict(self) -> dict[str, Any]:
        """The places of all loaders, by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to the places of all loaders. This uses the random number generators; set their states afterwards."""
        if set(state) != set(self._parts):
            raise ValueError(f"batches: the state is of the loaders {sorted(state)}, these are {sorted(self._parts)}.")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def check_resumable(loader: Any, argument: str) -> None:
    """Raise if the loader's place cannot be saved and found again."""
    if isinstance(loader, Together):
        for name, part in loader.loaders.items():
            check_resumable(part, f"{argument}: {name}")
    elif isinstance(loader, Stateful):
        return
    elif isinstance(loader, Iterator):
        raise TypeError(
            f"{argument}: {type(loader).__name__} can be iterated over only once, so that no checkpoint can go back to its"
            " place; pass what it was made from (a list, a DataLoader, an object whose __iter__ begins anew), or give it"
            " state_dict and load_state_dict."
        )
    elif getattr(loader, "persistent_workers", False):
        raise ValueError(
            f"{argument}: persistent_workers=True keeps random states in the workers that no checkpoint can hold; pass a"
            " DataLoader with persistent_workers=False."
        )


def random_states(loader: Any = None) -> dict[str, Any]:
    """The states of the random number generators of torch, of Python and of numpy, and of those that a loader holds.

    In plain tensors, numbers and text, for ``torch.save``.

    >>> states = random_states()
    >>> drawn = torch.rand(1), random.random(), np.random.rand()
    >>> set_random_states(states)
    >>> drawn == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    numpys: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = {name: torch.from_numpy(part) if isinstance(part, np.ndarray) else part for name, part in numpys["state"].items()}
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": {**numpys, "state": inner},
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def set_random_states(states: Mapping[str, Any], loader: Any = None) -> None:
    """Set what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    for i, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, i)
    random.setstate(states["python"])
    inner = {name: part.numpy() if isinstance(part, Tensor) else part for name, part in states["numpy"]["state"].items()}
    np.random.set_state({**states["numpy"], "state": inner})
    generators = _generators(loader)
    if len(generators) != len(states["loader"]):
        raise ValueError(
            f"batches: the state holds {len(states['loader'])} random number generators of the loader, this one has"
            f" {len(generators)}; pass the same batches as then."
        )
    for generator, state in zip(generators, states["loader"], strict=True):
        generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """The random number generators of a loader, its data set and its samplers, each once."""
    found: list[torch.Generator] = []
    waiting = [loader]
    for part in waiting:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
        inner = [getattr(part, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        inner += part.loaders.values() if isinstance(part, Together) else []
        waiting += [item for item in inner if item is not None and all(item is not other for other in waiting)]
    return found
