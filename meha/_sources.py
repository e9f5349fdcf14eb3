"""Source: the batches of a run, without end, and the place of the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meha.loaders import Endless, Owned, position, random_states, set_random_states

__all__ = ["Source"]


class Source(Iterator[Any]):
    """What the steps get: batches without end; None each time when there are none.

    With ``remember``, it knows the place of the last one: that of the loader and the random states before it was taken.

    Attributes:
        name: which batch the last one was, in words; empty when there are none.
    """

    def __init__(self, batches: Iterable[Any] | None, remember: bool, *, grouped: bool = False) -> None:
        self._batches = None if batches is None else Endless(batches)
        self._own = Owned() if grouped else None
        self.loader, self.remembers = batches, remember
        self.place: dict[str, Any] | None = None
        self.name = ""

    def __next__(self) -> Any:
        if self._batches is None:
            return None
        if self.remembers:
            self.place = {"batches": self._batches.state_dict(), "random": random_states(self.loader)}
        batch = next(self._batches) if self._own is None else self._own(next(self._batches))
        self.name = position(self._batches)
        return batch

    @property
    def finite(self) -> bool:
        """Whether the batches may end, and in one process before another."""
        return isinstance(self.loader, Iterator)

    @property
    def empty(self) -> bool:
        """Whether there should be batches, and none ever came."""
        return self._batches is not None and not self._batches.fruitful

    def find(self, place: Mapping[str, Any] | None) -> Any:
        """The batch at a place, after which the next ones follow."""
        if (place is None) != (self._batches is None):
            before, now = ("none", "some") if place is None else ("some", "none")
            raise ValueError(f"batches: the run in the checkpoint had {before}, this call has {now}; pass what it had.")
        if self._batches is None or place is None:
            return None
        self._batches.load_state_dict(place["batches"])
        set_random_states(place["random"], self.loader)
        try:
            return next(self)
        except StopIteration:
            raise ValueError("batches: hold none, but the run in the checkpoint had some; pass what it had.") from None
