"""Batches of a run: loaders that repeat without end, whose positions checkpoints can save and restore."""

from __future__ import annotations

import copy
import itertools
import random
from abc import abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from meha.tensors.checks import check_count, check_switch
from meha.tensors.state import Saved, Stateful
from meha.tensors.torch_private import pytree

__all__ = [
    "Accumulated",
    "Draw",
    "Endless",
    "GroupDraw",
    "Indices",
    "MicroBatches",
    "StepDraws",
    "Together",
    "position",
    "random_states",
    "set_random_states",
]

EMPTY = (  # what to do about a loader without batches
    "pass a loader with at least one batch (drop_last=True leaves none of a data set smaller than a batch, and a generator"
    " can be iterated over only once)"
)


Group = Sequence[tuple[Any, Any, str]]
"""Successive batches of a source, each with its place there and a description."""


class BatchSource(Iterator[Any]):
    """The batches of a run, without end; None for each step if the run has no batches.

    With ``remember``, it keeps the place of the last batch: the position of the loader and the random states before it.

    Attributes:
        name: a description of the last batch for messages; empty if there are none.
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
            # Before the batch is drawn, so that a resumed run draws it again with the same random numbers.
            self.place = {"batches": self._batches.state_dict(), "random": random_states(self.loader)}
        batch = next(self._batches) if self._own is None else self._own(next(self._batches))
        self.name = position(self._batches)
        return batch

    def take(self, n: int, *, together: bool = False) -> Group:
        """The next n batches, or fewer if they end.

        Args:
            together: draw them at once where the loader can, with the same result.
        """
        if self._batches is None:
            return [(None, None, "")] * n
        if not (n and together and isinstance(self.loader, Indices)):
            return [(batch, self.place, self.name) for batch in itertools.islice(self, n)]
        place = None
        if self.remembers:
            place = {"batches": self._batches.state_dict(), "random": random_states()}
        rows = self._batches.stack(self.loader, n)
        group = Rows(rows, n, place, self._batches.taken - n)
        _, self.place, self.name = group[-1]
        return group

    @property
    def finite(self) -> bool:
        """Whether the batches may end, possibly in one process earlier than in another."""
        return isinstance(self.loader, Iterator)

    @property
    def empty(self) -> bool:
        """Whether the loader has not yielded a single batch."""
        return self._batches is not None and not self._batches.fruitful

    def find(self, place: Mapping[str, Any] | None) -> Any:
        """Go to a saved place and return the batch there."""
        if (place is None) != (self._batches is None):
            before, now = ("none", "some") if place is None else ("some", "none")
            raise ValueError(f"batches: the run in the checkpoint had {before}, this call has {now}; pass what it had.")
        if self._batches is None or place is None:
            return None
        self._batches.load_state_dict(place["batches"])
        set_random_states(place["random"], self.loader)  # after the loader, whose restart uses random numbers
        try:
            return next(self)
        except StopIteration:
            raise ValueError("batches: hold none, but the run in the checkpoint had some; pass what it had.") from None


class Rows(Group):
    """A group of batches of :class:`Indices` that were drawn at once.

    Args:
        rows: the batches as one, with a row for each.
        count: how many there are.
        place: that of the first; None if places are not remembered.
        taken: number of batches before the first.
    """

    def __init__(self, rows: Any, count: int, place: dict[str, Any] | None, taken: int) -> None:
        self.rows, self._count, self._place, self._taken = rows, count, place, taken

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(self._count)[i]]
        i = range(self._count)[i]
        batch = pytree.tree_map(lambda leaf: leaf[i] if isinstance(leaf, Tensor) else leaf, self.rows)
        place = self._place
        if place is not None:
            loader = place["batches"]["loader"]
            place = {**place, "batches": {"loader": {**loader, "taken": loader["taken"] + i}}}
        return batch, place, f"batch {self._taken + i + 1} of this pass"


class MicroBatches(tuple[Any, ...]):
    """Parts of one batch that are processed one at a time to save memory: ``run.step(MicroBatches([first, second]))``.

    An objective is the mean of its values on the parts. If the losses are means and all parts have the same size, this equals
    the value on the whole batch. Gradients are computed part by part and count as one. Second derivatives (RHG, CG, ...) keep
    the graphs of all parts.

    >>> import meha
    >>> problem = meha.Problem(lambda x, y, b: (x * y).sum(), lambda x, y, b: 0.5 * (y - b).square().sum())
    >>> run = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.ones(1), torch.zeros(1))
    >>> run.step(MicroBatches([1.0, 3.0]))["lower"]  # at y = 0, the mean of 0.5 and 4.5
    2.5
    """

    def __new__(cls, batches: Iterable[Any]) -> Self:
        if isinstance(batches, Tensor | Mapping):  # a batch by itself, which would be split into rows or keys
            raise TypeError(f"batches: expected a list of batches, got {type(batches).__name__}; split it first.")
        parts = super().__new__(cls, batches)
        if not parts:
            raise ValueError("batches: MicroBatches is empty; pass at least one batch.")
        return parts


class Endless(Iterator[Any]):
    """Repeat a loader forever; stop only when a restart yields nothing.

    The position can be saved. If the loader has ``state_dict`` and ``load_state_dict``, they are used. Otherwise the position
    is the random states at the last restart and the number of batches taken since: restoring it restarts the loader from these
    states and skips that many batches. The order of the batches may therefore depend only on these states, and on the number of
    the pass, which samplers and data sets with ``set_epoch``, such as a DistributedSampler, learn from it.

    Args:
        loader: an iterable of batches.

    Attributes:
        taken: number of batches taken since the loader was last restarted.
        fruitful: whether it has ever yielded a batch.

    >>> batches = Endless(["a", "b", "c"])
    >>> [next(batches) for _ in range(5)]
    ['a', 'b', 'c', 'a', 'b']
    >>> position = batches.state_dict()
    >>> next(batches), next(batches)
    ('c', 'a')
    >>> batches.load_state_dict(position)
    >>> next(batches)
    'c'
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader: expected an iterable of batches, got {type(loader).__name__}.")
        self.loader = loader
        self._batches: Iterator[Any] | None = None
        self._start_states: dict[str, Any] = {}
        self.taken, self._epoch = 0, -1
        self._restored = False
        self.fruitful = False

    def __next__(self) -> Any:
        if self._restored:
            self._restart()  # a loader restored at its end yields nothing the first time
            self._restored = False
        if self._batches is not None:
            with suppress(StopIteration):
                return self._take(self._batches)
        return self._take(self._restart())

    def rest(self) -> Any:
        """The next batch of this pass; StopIteration where it ends."""
        batches = self.begin() if self._batches is None or self._restored else self._batches
        return self._take(batches)

    def begin(self) -> Iterator[Any]:
        """Begin a pass."""
        self._restored = False
        return self._restart()

    def _restart(self) -> Iterator[Any]:
        fixed = isinstance(self.loader, Sequence | Tensor | Stateful)  # need no random states, which take time
        self._start_states, self.taken = {} if fixed else random_states(self.loader), 0
        self._epoch += 1  # a DistributedSampler shuffles by the number of the pass
        for name in ("sampler", "batch_sampler", "dataset"):
            part: Any = getattr(self.loader, name, None)
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        self._batches = iter(self.loader)
        return self._batches

    def _take(self, batches: Iterator[Any]) -> Any:
        batch = next(batches)
        self.taken += 1
        self.fruitful = True
        return batch

    def stack(self, loader: Indices, n: int) -> Any:
        """Take n batches of its loader as one, with a row for each."""
        if self._batches is None or self._restored:
            self._restart()
            self._restored = False
        self.taken, self.fruitful = self.taken + n, True
        return loader.stack(n)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain tensors and numbers."""
        if isinstance(self.loader, Stateful):
            return {"loader": self.loader.state_dict()}
        return {"start_states": self._start_states, "position": self.taken, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position. This uses the random number generators; set their states afterwards."""
        self._batches = None
        if isinstance(self.loader, Stateful):
            self.loader.load_state_dict(state["loader"])
            self._restored = True
            return
        position, self._epoch = state["position"], state.get("epoch", 0)
        if not position:
            return
        self._epoch -= 1  # the restart counts it again
        if state["start_states"]:
            set_random_states(state["start_states"], self.loader)
        batches = self._restart()
        for taken in range(position):
            try:
                self._take(batches)
            except StopIteration:
                mismatch = f"ended after {taken}, but the saved position is {position}"
                raise ValueError(f"batches: {mismatch}; pass the same batches as before.") from None
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch") and getattr(sampler, "epoch", self._epoch) != self._epoch:
            mismatch = f"pass {sampler.epoch}, but {self._epoch} was saved"
            raise ValueError(f"batches: the loader sets its sampler to {mismatch}; give a plain DataLoader instead.")


class Epochs(Iterator[Any]):
    """Batches without end by ``next``, and those of one epoch in a ``for`` loop; both move the same place.

    Attributes:
        taken: number of batches taken in this epoch.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._restored = self._inside = False

    @abstractmethod
    def _count(self) -> int | None:
        """Return the number of batches in an epoch; None where no loader has a length."""

    @property
    @abstractmethod
    def _first(self) -> Endless:
        """The stream whose pass is an epoch where no loader has a length."""

    @abstractmethod
    def _draw(self, *, inside: bool) -> Any:
        """Return the next batch; with ``inside``, raise StopIteration where the first stream would begin another pass."""

    def __len__(self) -> int:
        count = self._count()
        if count is None:
            raise TypeError(
                f"{type(self).__name__}: no loader has a length, so an epoch ends where the first of them does; count the"
                " batches yourself, or pass a loader with a length, such as a DataLoader of a map-style data set."
            )
        return count

    def __bool__(self) -> bool:
        return True  # without it, Python would ask for the length

    def __next__(self) -> Any:
        if self.taken == self._count():
            self.taken = 0
        inside, self._inside, self._restored = self._inside, False, False
        batch = self._draw(inside=inside)
        self.taken += 1
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Go on to the end of the epoch; a loop that was broken off, or resumed from a saved position, is finished."""
        count = self._count()
        if self.taken == count and not self._restored:  # a position that was saved in the last turn of a loop: it ends here
            self.taken = 0
        self._restored = False
        if count is None and not self.taken:
            self._first.begin()
        while count is None or self.taken < count:
            self._inside = count is None
            try:
                batch = next(self)  # which a subclass may override
            except StopIteration:  # must not leave a generator
                break
            yield batch
        self.taken = 0


class Together(Epochs):
    """Combine one batch of each loader: ``for batch in Together(train, valid)`` ends with the epoch, ``next`` never.

    An epoch is a pass through the longest loader; shorter ones restart when they end, and a new epoch goes on with them where
    they are. Loaders without a length, such as those of an ``IterableDataset``, do not count; where no loader has one, an epoch
    is a pass through the first of them. ``solve(..., batches=...)`` takes one epoch after the other.

    The position can be saved, as that of :class:`Endless`, also in the middle of an epoch: a ``for`` loop then goes on to the
    end of this epoch.

    Args:
        in_order: iterables of batches; a batch is then a tuple.
        by_name: iterables of batches by name, instead; a batch is then a named tuple.

    >>> batches = Together(clean=[1, 2], noisy=["a", "b", "c"])
    >>> len(batches), [next(batches) for _ in range(4)]
    (3, [Batch(clean=1, noisy='a'), Batch(clean=2, noisy='b'), Batch(clean=1, noisy='c'), Batch(clean=2, noisy='a')])
    >>> next(batches).noisy
    'b'
    >>> for train, valid in Together(["a", "b", "c"], [1, 2]):
    ...     print(train, valid)
    a 1
    b 2
    c 1
    """

    def __init__(self, *in_order: Iterable[Any], **by_name: Iterable[Any]) -> None:
        super().__init__()
        if bool(in_order) == bool(by_name):
            got = "both" if in_order else "none"
            raise ValueError(
                "Together: expected loaders in order, as in Together(train, valid), or by name, as in Together(clean=first,"
                f" noisy=second); got {got}."
            )
        self.loaders = by_name or {f"loader {i}": loader for i, loader in enumerate(in_order, 1)}
        for name, loader in self.loaders.items():
            if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping):
                raise TypeError(f"Together: {name} must be an iterable of batches, got {type(loader).__name__}.")
        self.parts = {name: Endless(loader) for name, loader in self.loaders.items()}
        named: Any = namedtuple("Batch", by_name)  # type: ignore[misc]
        self._form = named._make if by_name else tuple

    def _count(self) -> int | None:
        return max(length(loader) or 0 for loader in self.loaders.values()) or None

    @property
    def _first(self) -> Endless:
        return next(iter(self.parts.values()))

    def _draw(self, *, inside: bool) -> Any:
        batches: list[Any] = []
        for name, part in self.parts.items():
            try:
                batches.append(part.rest() if inside and not batches else next(part))
            except StopIteration:
                if part.fruitful:  # one that ended is no mistake of the user
                    raise
                raise ValueError(f"batches: {name} yields nothing; {EMPTY}.") from None
        return self._form(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, and the positions of all loaders by name."""
        return {"taken": self.taken, "loaders": {name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of all loaders. This uses the random number generators; set their states afterwards."""
        saved = state.get("loaders", {})
        if set(saved) != set(self.parts):
            raise ValueError(f"batches: the state is for loaders {sorted(saved)}, got {sorted(self.parts)}; pass the same.")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.taken, self._restored = state["taken"], True


class Draw(NamedTuple):
    """Indices of the examples of a batch: those of F, and those of f."""

    upper: Tensor
    lower: Tensor


class StepDraws(NamedTuple):
    """Indices of the examples of several independent batches for one step, a row for each."""

    upper: Tensor
    lower: Tensor

    def row(self, j: int) -> Draw:
        """The batch number j."""
        return Draw(self.upper[j], self.lower[j])

    def joined(self) -> Draw:
        """All of them as one batch."""
        return Draw(self.upper.flatten(), self.lower.flatten())


class GroupDraw(NamedTuple):
    """Indices of the examples of a batch, the numbers of the two groups that they are, and how many groups there are."""

    upper: Tensor
    lower: Tensor
    group: Tensor
    groups: tuple[int, int]

    def whole(self) -> Draw:
        """All examples of both levels, since groups are of one size."""
        levels = zip((self.upper, self.lower), self.groups, strict=True)
        return Draw(*(torch.arange(level.numel() * groups, device=level.device) for level, groups in levels))


class Indices(Iterator[Any]):
    """Random indices of the examples of both levels, without end, for objectives that are means over data in memory.

    Every example of a level is drawn once in each pass through its data, in an order that depends on the seed, the level and
    the number of the pass alone; a batch may begin in one pass and end in the next. The position can be saved.

    Args:
        size: number of examples in a batch, or a pair for F and for f.
        upper, lower: numbers of examples of F and of f.
        groups: draw from fixed groups, into which the examples are divided once, so that methods with a memory (SABA, SRBA)
            can keep what they computed on each, or ask for all of them; the numbers of examples must then be multiples of
            the size.
        draws: number of independent batches in a step, for methods with several (``meha.stochastic.StocBiO``): the indices
            then have a row for each. The values of F and f that a run reports, and methods outside of ``meha.stochastic``, take
            them as one batch.
        seed: of the orders. In several processes, give each its own.
        device: of the indices, that of the data.

    >>> batches = Indices(2, upper=4, lower=6, seed=1)
    >>> batch = next(batches)
    >>> batch.upper, batch.lower
    (tensor([2, 0]), tensor([1, 4]))
    >>> import meha
    >>> data, target = torch.arange(6.0), torch.ones(4)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: (y - x * data[batch.lower]).square().mean(),
    ... )
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        upper: int,
        lower: int,
        groups: bool = False,
        draws: int = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        check_switch("groups", groups)
        check_count("draws", draws)
        if groups and draws > 1:
            raise ValueError(f"draws: methods that use groups take one batch in a step, got {draws}; leave one of the two out.")
        check_count("seed", seed, least=0)
        sizes = size if isinstance(size, tuple) else (size, size)
        if len(sizes) != 2:
            raise ValueError(f"size: must be a whole number, or a pair for F and for f, got {size!r}.")
        self.counts, self.sizes, self.groups, self.seed, self.device = (upper, lower), sizes, groups, seed, device
        self.draws = draws
        for name, count, level_size in zip(("upper", "lower"), self.counts, sizes, strict=True):
            check_count(name, count)
            check_count("size", level_size)
            if level_size > count:
                raise ValueError(f"size: a batch of {level_size} is larger than the {count} examples of {name}; take fewer.")
            if groups and count % level_size:
                near = sorted((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - level_size))[:2]
                raise ValueError(
                    f"groups: {count} examples of {name} do not make groups of {level_size}; take a size of"
                    f" {' or '.join(map(str, sorted(near)))}, or leave some examples out."
                )
        self.taken = 0
        self._orders: list[dict[int, np.ndarray[Any, Any]]] = [{}, {}]
        self._members = [self._permutation(level, -1).reshape(-1, sizes[level]) for level in (0, 1)] if groups else []

    def __next__(self) -> Any:
        return self.stack(1, lambda tensor: tensor[0])

    def stack(self, n: int, shape: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        """Draw the next n batches as one, with a row for each."""
        drawn, numbers = [], []
        for level in (0, 1):
            items = self._draw(level, n)
            if self.groups:
                numbers.append(items)
                items = self._members[level][items]
            if self.draws > 1:
                items = items.reshape(n, self.draws, -1)
            drawn.append(shape(torch.from_numpy(items).to(self.device)))
        self.taken += n
        if self.draws > 1:
            return StepDraws(drawn[0], drawn[1])
        if not self.groups:
            return Draw(drawn[0], drawn[1])
        counts = (len(self._members[0]), len(self._members[1]))
        return GroupDraw(drawn[0], drawn[1], shape(torch.from_numpy(np.stack(numbers, 1)).to(self.device)), counts)

    def _draw(self, level: int, n: int) -> np.ndarray[Any, Any]:
        """The next n rows of indices of a level, or n numbers of groups."""
        width = 1 if self.groups else self.draws * self.sizes[level]
        length, begin, end = self._length(level), self.taken * width, (self.taken + n) * width
        orders = self._orders[level]
        for number in [number for number in orders if number < begin // length]:
            del orders[number]
        pieces = []
        for number in range(begin // length, (end - 1) // length + 1):
            if number not in orders:
                orders[number] = self._permutation(level, number)
            pieces.append(orders[number][max(0, begin - number * length) : end - number * length])
        drawn = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return drawn if self.groups else drawn.reshape(n, width)

    def _length(self, level: int) -> int:
        """How many examples or groups a pass has."""
        return self.counts[level] // (self.sizes[level] if self.groups else 1)

    def _permutation(self, level: int, number: int) -> np.ndarray[Any, Any]:
        """The order of a pass; that of pass -1 makes the groups."""
        generator = np.random.default_rng([self.seed, level, number + 1])
        return generator.permutation(self.counts[level] if number < 0 else self._length(level))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain numbers."""
        return {
            "counts": list(self.counts),
            "sizes": list(self.sizes),
            "seed": self.seed,
            "groups": self.groups,
            "draws": self.draws,
            "taken": self.taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position."""
        own = self.state_dict()
        other = {name: state.get(name) for name in own if name != "taken" and state.get(name) != own[name]}
        if other:
            raise ValueError(f"batches: the state is for Indices with {other}; pass the same.")
        self.taken = state["taken"]


class Owned:
    """Detects loaders that reuse the memory of the last batch, and copies their batches, so that several can be kept.

    Attributes:
        copies: whether reuse was detected.

    >>> own, buffer = Owned(), torch.zeros(2)
    >>> own(buffer) is buffer
    True
    >>> own(buffer.fill_(1.0)) is buffer
    False
    """

    def __init__(self) -> None:
        self.copies = False
        self._last: dict[int, tuple[Tensor, int]] = {}  # by place in memory, with the number of writes

    def __call__(self, batch: Any) -> Any:
        """Return the batch, or a copy once reuse was detected."""
        leaves = pytree.tree_leaves(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel()]
        now = {tensor.data_ptr(): (tensor, tensor._version) for tensor in tensors}  # _version counts writes in place
        for place, (tensor, writes) in now.items():
            # Another tensor in the same memory, or the same one written to again, has replaced the batch before.
            before, earlier = self._last.get(place, (tensor, writes))
            self.copies = self.copies or before is not tensor or earlier != writes
        self.copies = self.copies or any(tensor._version != writes for tensor, writes in self._last.values())
        self._last = now
        if not self.copies:
            return batch
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


class Accumulated(Saved, Epochs):
    """Group n successive batches of a loader into :class:`MicroBatches`: ``batches=Accumulated(loader, 4)``.

    A step then averages the objectives over n batches, with the memory of one. ``next`` never ends: the loader restarts when it
    ends, also within a group; if it yields nothing more, an incomplete group is dropped. A ``for`` loop ends with the epoch,
    after as many groups as hold a pass through the loader; if this has no length, with the last whole group of its pass. The
    position can be saved, as that of :class:`Endless`.

    Args:
        loader: an iterable of batches, or several loaders in a tuple.
        n: the number of batches per group.

    >>> batches = Accumulated(["a", "b", "c"], 2)
    >>> next(batches), next(batches), len(batches)
    (('a', 'b'), ('c', 'a'), 2)
    >>> list(Accumulated(iter("abc"), 2))
    [('a', 'b')]
    """

    saves = ("n", "stream", "taken")

    def __init__(self, loader: Iterable[Any], n: int) -> None:
        super().__init__()
        check_count("Accumulated: n", n)
        self.loader, self.n = joined(loader), n
        self.stream = Endless(self.loader)

    def _count(self) -> int | None:
        return -(-(length(self.loader) or 0) // self.n) or None

    @property
    def _first(self) -> Endless:
        return self.stream

    def _draw(self, *, inside: bool) -> MicroBatches:
        own, group = Owned(), []
        for _ in range(self.n):
            group.append(own(self.stream.rest() if inside else next(self.stream)))
            if own.copies:
                reason = "writes into the tensors of the batch before, which the group still needs"
                raise ValueError(f"batches: the loader {reason}; yield new tensors, such as tensor.clone().")
        return MicroBatches(group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position. This uses the random number generators; set their states afterwards."""
        if state["n"] != self.n:
            raise ValueError(f"batches: the state is for Accumulated with n = {state['n']}, got n = {self.n}; pass the same.")
        super().load_state_dict(state)
        self._restored = True


def length(loader: Any) -> int | None:
    """The number of batches in a pass through a loader; None if it has no end, or nobody knows.

    >>> length(["a", "b"]), length(iter(["a", "b"]))
    (2, None)
    """
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # also of a DataLoader whose data set has no length
        return None


def from_start(loader: Any) -> Any:
    """A loader that begins at the start, whose batches leave the place of this one where it is.

    >>> batches = Together([1, 2, 3], ["a", "b"])
    >>> next(batches), next(from_start(batches)), next(batches)
    ((1, 'a'), (1, 'a'), (2, 'b'))
    """
    if isinstance(loader, Together):
        other = copy.copy(loader)
        other.loaders = {name: from_start(part) for name, part in loader.loaders.items()}
        other.parts, other.taken = {name: Endless(part) for name, part in other.loaders.items()}, 0
        return other
    if isinstance(loader, Accumulated):
        return Accumulated(from_start(loader.loader), loader.n)
    return Endless(from_start(loader.loader)) if isinstance(loader, Endless) else loader


def joined(batches: Any) -> Any:
    """Loaders in a tuple as one, for whoever takes batches; anything else as it is.

    >>> len(joined((iter([1, 2]), torch.utils.data.DataLoader([1, 2, 3]))))
    3
    >>> joined((torch.zeros(2), torch.ones(2)))  # two batches
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    if type(batches) is not tuple or not batches:
        return batches
    several = all(isinstance(p, Iterable) and not isinstance(p, Tensor | np.ndarray | Sequence | Mapping) for p in batches)
    return Together(*batches) if several else batches


def position(batches: Endless) -> str:
    """Say which batch was taken last, by its number in the current pass through its loader.

    >>> batches = Endless(["a", "b", "c"])
    >>> _ = [next(batches) for _ in range(5)]
    >>> position(batches)
    'batch 2 of this pass'
    >>> batches = Endless(Together(clean=[1, 2], noisy=["a", "b", "c"]))
    >>> _ = [next(batches) for _ in range(4)]
    >>> position(batches)
    'clean batch 2, noisy batch 1 of this pass'
    """
    return f"{_numbered(batches, '')} of this pass"


def _numbered(batches: Endless, name: str) -> str:
    """Return the number of the last batch of a stream, or those of the streams inside it, as text."""
    loader = batches.loader
    if isinstance(loader, Together):
        return ", ".join(_numbered(part, f"{part_name} ") for part_name, part in loader.parts.items())
    if isinstance(loader, Accumulated):
        return f"the {loader.n} batches up to {_numbered(loader.stream, name)}"
    if isinstance(loader, Endless):
        return _numbered(loader, name)
    return f"{name}batch {batches.taken}"


def check_resumable(loader: Any, argument: str) -> None:
    """Raise if the position of the loader cannot be saved and restored."""
    if isinstance(loader, Together):
        for name, part in loader.loaders.items():
            check_resumable(part, f"{argument}: {name}")
    elif isinstance(loader, Endless | Accumulated):
        check_resumable(loader.loader, argument)
    elif isinstance(loader, Iterator) and not isinstance(loader, Stateful):
        raise TypeError(
            f"{argument}: {type(loader).__name__} can be iterated over only once, so a checkpoint cannot restore its position;"
            " pass a list, a DataLoader or another iterable that restarts, or give it state_dict and load_state_dict."
        )
    elif getattr(loader, "persistent_workers", False) and not isinstance(loader, Stateful):
        reason = "persistent_workers=True keeps random states in worker processes, where a checkpoint cannot save them"
        raise ValueError(f"{argument}: {reason}; pass a DataLoader with persistent_workers=False.")


def check_divided(loader: Any) -> None:
    """Raise if a sampler divides the data among processes in a run without a group."""
    for part in _inside(loader):
        number = getattr(part, "num_replicas", 1)
        if isinstance(number, int) and number > 1:
            raise ValueError(
                f"group: a sampler divides the batches among {number} processes, but each of them would solve a problem of its"
                " own; pass solve(..., group=torch.distributed.group.WORLD), or other batches."
            )


def _inside(loader: Any) -> Iterator[Any]:
    """Yield a loader, its data set, its samplers and the loaders inside it, each once."""
    waiting = [loader]
    for part in waiting:  # the list grows as inner loaders are found
        yield part
        inner = [getattr(part, name, None) for name in ("dataset", "sampler", "batch_sampler", "loader")]
        inner += part.loaders.values() if isinstance(part, Together) else []
        waiting += [item for item in inner if item is not None and all(item is not other for other in waiting)]


def random_states(loader: Any = None) -> dict[str, Any]:
    """Return the random states of torch, Python, numpy and the generators inside a loader, as plain data for ``torch.save``.

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
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # asking would initialise CUDA
        "python": random.getstate(),
        "numpy": {**numpys, "state": inner},
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def set_random_states(states: Mapping[str, Any], loader: Any = None) -> None:
    """Restore the states that :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    for i, state in enumerate(states["cuda"][: torch.cuda.device_count()]):  # the checkpoint may be of a larger machine
        torch.cuda.set_rng_state(state, i)
    random.setstate(states["python"])
    inner = {name: part.numpy() if isinstance(part, Tensor) else part for name, part in states["numpy"]["state"].items()}
    np.random.set_state({**states["numpy"], "state": inner})
    generators, saved = _generators(loader), states["loader"]
    if len(generators) != len(saved):
        counts = f"{len(saved)} random number generators in the loader, got {len(generators)}"
        raise ValueError(f"batches: the state is for {counts}; pass the same batches as before.")
    for generator, state in zip(generators, saved, strict=True):
        generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random number generators inside a loader, each once."""
    found = [getattr(part, "generator", None) for part in _inside(loader)]
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))
