"""Steppers: one step of a run, or a group of steps, that can be undone."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meha.method.method import At, Run, StepInfo
from meha.methods import Method, State
from meha.problem.oracle import Counts, Oracle
from meha.problem.schedules import evaluate
from meha.tensors.torch_private import pytree
from meha.tensors.variables import Leaves, Variable, copy_, distance, norm, subtract

PLAIN = (bool, int, float, str, type(None))  # types besides variables and tensors whose values become a part of the graph
ROW = 32  # upper bound on the schedules that a step may read; the trace needs a fixed size before it knows their number


class TracingError(Exception):
    """A run cannot be compiled."""


class Stepper(ABC):
    """Takes steps of a run in groups, and can undo the last group.

    Attributes:
        unrolled: steps per call; the size of a group is a multiple of it.
        whole: False during a call, and after one that raised an exception, when x and y may be half-way through a step.
    """

    unrolled: int
    whole: bool = True

    @abstractmethod
    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        """Take a step for each batch; return the numbers of the last one, with ``size`` and ``moved``."""

    @abstractmethod
    def rewind(self) -> None:
        """Undo the last call, as far as the answer (x, y) is concerned."""

    def fits(self, batches: Sequence[Any]) -> bool:
        """Return whether the stepper can take a step for each of these batches."""
        return len(batches) % self.unrolled == 0


class Eager(Stepper):
    """One step at a time, as Python runs it."""

    unrolled = 1

    def __init__(self, run: Run) -> None:
        self.run, variables = run, (run.state.x, run.state.y)
        self._leaves = [leaf.detach() for variable in variables for leaf in variable.leaves]
        self._buffers = [buffer for variable in variables for buffer in variable.buffers().values()]
        self._kept, self._kept_buffers = ([tensor.clone() for tensor in part] for part in (self._leaves, self._buffers))

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        (batch,) = batches
        copy_(self._kept, self._leaves)  # x and y only: the rest of the state is of no use after a failed step
        _copy_each(self._kept_buffers, self._buffers)
        self.whole = False
        info, begin = self.run.step(batch), time.perf_counter()
        alone = self.run.group is None
        moved = norm(subtract(self._leaves, self._kept)) if alone else distance(self._leaves, self._kept)
        size = norm(self._leaves)
        info = info.measured(float(size), float(moved))
        self.run.seconds += time.perf_counter() - begin  # the device has finished the step now
        self.whole = True
        return info

    def rewind(self) -> None:
        copy_(self._leaves, self._kept)
        _copy_each(self._buffers, self._kept_buffers)
        self.whole = True


class Compiled(Stepper):
    """Takes groups of steps without Python between them.

    Args:
        run: with at least one step done, in which what was left out is chosen and the objectives are checked.
        tensors: those that the steps change.
        facts: what a step reads and returns.
    """

    def __init__(self, run: Run, tensors: Leaves, facts: Facts) -> None:
        self.run, self._tensors, self._facts = run, tensors, facts
        self._kept = [tensor.clone() for tensor in tensors]
        self._before = run.k, run.counts

    watched: bool = False
    """Whether the next group will be compared with eager steps."""

    def _keep_start(self) -> None:
        """Copy the tensors before the last call of a watched group, so that it can be repeated."""

    def difference(self, batches: Sequence[Any]) -> str:
        """Say how the last call of a watched group differs from eager steps; empty if it does not."""
        return ""

    def give_up(self) -> int:
        """Go back to the last step that is known to be right, and return its number."""
        self.rewind()
        return self.run.k

    @property
    def known(self) -> bool:
        """Return whether a compiled version is already cached."""
        return False

    @abstractmethod
    def compile(self) -> None:
        """Compile or record the steps.

        Raises:
            TracingError: it fails.
        """

    @abstractmethod
    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        """Take ``unrolled`` steps, with a row of numbers and the tensors of a batch each; return the last numbers."""

    def fits(self, batches: Sequence[Any]) -> bool:
        # The last batch of a pass is often smaller; such steps are taken eagerly.
        return super().fits(batches) and all(self._facts.batch.match(batch) is not None for batch in batches)

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        run, n, facts, begin = self.run, len(batches), self._facts, time.perf_counter()
        self._before = run.k, dataclasses.replace(run.counts)
        copy_(self._kept, self._tensors)
        self.whole = False
        table = facts.table(run.k, n)
        tensors = [facts.batch.match(batch) or [] for batch in batches]
        for i in range(0, n, self.unrolled):
            if self.watched and i + self.unrolled == n:  # only one call of the group is repeated, which is cheap
                self._keep_start()
            vector = self._call(table[i : i + self.unrolled], tensors[i : i + self.unrolled])
        *numbers, size, moved = vector.tolist()  # waits for the device, so that the time is that of the whole group
        run.state.k += n
        run.batch = batches[-1]
        run.counts.add(facts.counts, n)  # the compiled steps do not pass through the oracle, which counts otherwise
        run.seconds += time.perf_counter() - begin
        self.whole = True
        return StepInfo(run.k, dict(zip(facts.returned, numbers, strict=True)), span=n).measured(size, moved)

    def rewind(self) -> None:
        copy_(self._tensors, self._kept)
        self.run.state.k, self.run.oracle.counts = self._before
        self.whole = True


class BatchForm:
    """The structure of a batch: nested dicts and lists of tensors, and of plain values that are the same in all batches."""

    def __init__(self, batch: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten(batch)
        foreign = [type(leaf).__name__ for leaf in self.leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        if foreign:
            raise TracingError(f"the batch holds {foreign[0]}, and only tensors in dicts, lists and tuples can be traced")
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.form = [kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def match(self, batch: Any) -> Leaves | None:
        """Return the tensors of another batch; None if it has another structure, shapes, dtypes or plain values."""
        if batch is None:
            return [] if self.leaves == [None] else None
        try:
            other = BatchForm(batch)
        except TracingError:
            return None
        return other.tensors if (other.spec, other.form) == (self.spec, self.form) else None

    def put(self, tensors: Sequence[Tensor]) -> Any:
        """Return the batch with other tensors."""
        others = iter(tensors)
        return pytree.tree_unflatten([next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


@dataclasses.dataclass
class Facts:
    """What a step reads and returns.

    Attributes:
        method: whose schedules are read.
        read: names of the schedules.
        returned: names of the numbers, besides the norm of (x, y) and the length of the step.
        counts: its gradients.
        dtype, device: of the numbers.
    """

    method: Method
    batch: BatchForm
    read: list[str]
    returned: list[str]
    counts: Counts
    dtype: torch.dtype
    device: torch.device

    def table(self, k: int, n: int) -> Tensor:
        """Return the values of the schedules for n steps from k on, a row for each step."""
        table = torch.empty(n, len(self.read), dtype=self.dtype)
        for i, name in enumerate(self.read):
            schedule, zero = getattr(self.method, name), name in self.method.may_be_zero
            if callable(schedule):
                values = [evaluate(name, schedule, k + j, zero=zero) for j in range(n)]
                table[:, i] = torch.tensor(values, dtype=table.dtype)
            else:
                table[:, i] = schedule
        return table.to(self.device)


class _TracedAt(At):
    """The schedules of a step that is traced once for all step numbers: entries of a row, in the order of first use."""

    def __init__(self, method: Method, row: Tensor, batch: Any) -> None:
        super().__init__(method, 0, batch)
        self._row, self._read = row, list[str]()

    def _evaluate(self, name: str, schedule: Any) -> Tensor:
        self._read.append(name)  # a number would be frozen into the graph; an entry of an input is not
        return self._row[len(self._read) - 1]


class _UnknownStepNumber:
    """Stands for the step number in a traced step, which must not compute with it: its value would be frozen."""


def traced_step(
    run: Run, oracle: Oracle, own: dict[str, Variable], row: Tensor, batch: Any
) -> tuple[Tensor, list[str], list[str]]:
    """Take a step with numbers from a row; return its numbers, the norm of (x, y) and the length of the step as one vector,
    the names of the schedules that it read, and the names of its numbers.

    Args:
        own: variables in the place of those of the run.
    """
    state, at = run.state, _TracedAt(run.method, row, batch)
    copy = dataclasses.replace(state, k=_UnknownStepNumber(), **own)  # the run itself does not move
    point = copy.x.leaves + copy.y.leaves
    with torch.no_grad():
        before = [leaf.clone() for leaf in point]
        numbers = run.method.step(oracle, copy, at)
        values = [number() if callable(number) else number for number in numbers.values()]
        values += [norm(point), norm(subtract(point, before))]
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            # A change of a plain number would happen once, while the step is traced, and in no compiled step.
            if field.name != "k" and isinstance(value, PLAIN) and getattr(copy, field.name) != value:
                raise TracingError(f"{run.method.name} changes a number of its own ({field.name}) in Python")
        vector = torch.stack([torch.as_tensor(value, device=row.device).double() for value in values])
    return vector, at._read, list(numbers)


def check_state(run: Run, *kinds: type) -> None:
    """Raise if the state of the method holds anything besides plain values and these kinds."""
    for name, value in vars(run.state).items():
        if not isinstance(value, (*PLAIN, *kinds)):
            raise TracingError(f"{run.method.name} keeps a {type(value).__name__} ({name}), which works in Python")


def variables_of(state: State) -> dict[str, Variable]:
    """Return the variables of a state, by name."""
    return {name: value for name, value in vars(state).items() if isinstance(value, Variable)}


def number_dtype(run: Run) -> torch.dtype:
    """Return the dtype for the numbers of steps: that of the leaves, but at least single precision."""
    dtype = torch.float32  # half precision would round step sizes
    for leaf in run.state.x.leaves + run.state.y.leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


def record(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record the kernels that a function launches as a CUDA graph; every replay overwrites the tensor that it returned."""
    stream = torch.cuda.Stream()  # torch requires the warm-up on a stream that is not the default one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # loads the kernels, which cannot be done while a graph is recorded
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a graph assumes about a tensor: shape, strides, dtype, device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def first_line(error: Exception) -> str:
    """Return an error as one line of text."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _copy_each(tensors: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy buffers one by one, since their dtypes may differ."""
    for tensor, other in zip(tensors, source, strict=True):
        tensor.copy_(other)
