"""Compiled runs: many steps of a method as one call, for ``solve(..., compile=True)``.

A step on a small problem spends nearly all of its time in Python and in the calls of single operations. Here it is traced once
into a graph of tensor operations, gradients included, and torch's inductor compiles a loop over this graph, in which the number
of steps is an input. On a GPU, where the host would have to wait in each turn of the loop, some copies of the graph in a row
are compiled, and recorded as a CUDA graph. Steps on modules are recorded without the compiler. What is traced or recorded is
the method's own ``step``.

The step number enters a step through its numbers alone (``at.alpha``, ``at.c``), so that these are inputs of the graph. A
method or an objective that decides in Python from the values of tensors cannot be traced, and runs step by step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import time
import types
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from meha.method.method import At, Run, StepInfo, StepNumber
from meha.method.optimizers import RunningOptimizer
from meha.method.status import first_line
from meha.methods import Method
from meha.problem.loaders import Group, Rows, random_states, set_random_states
from meha.problem.oracle import Counts, Oracle
from meha.problem.schedules import evaluate
from meha.tensors.torch_private import GraphRecorder, RefusingValues, compile_graph, functional, norm_operation, pytree
from meha.tensors.variables import Leaves, Variable, copy_, distance, norm, norms, subtract

T = TypeVar("T")
aten = torch.ops.aten

__all__ = ["CompileWarning", "Compiled", "CompiledPace", "Eager", "Recorded", "Traced", "TracingError"]

PLAIN = (bool, int, float, str, type(None))  # types besides variables and tensors whose values become a part of the graph
ROW = 32  # upper bound on the schedules that a step may read; the trace needs a fixed size before it knows their number

DEPTH = 4  # how deep containers and objects are searched for changes; cycles end there
MOST = 2000  # parts of one captured object that are examined, since it may be a whole data set

# Upper bounds on the operations that are compiled together, as the compiler's time grows with them, and on the steps in a row:
OPERATIONS, UNROLLED = 1000, 32  # without a loop
TURN_OPERATIONS, TURN = 1000, 8  # in one turn of a loop, which takes 1 to 5 us besides its steps
LOOPED = 2**20  # upper bound on the bytes of the variables in a loop, whose turns copy them; steps in a row work in place
BATCH_TURN = 2  # with batches, where the steps themselves take longer: more would double the compiler's time for 10% of speed

# Compiled and eager steps agree within these powers of the rounding error, times their length and the size of (x, y).
SAME_MOVE, SAME = 0.4, 0.75
AGREEMENT = 1e-3  # the largest distance of recorded from eager steps, relative to their length; sums may differ in order

SHORTEST, LONGEST = 32, 4096  # bounds on the steps of a group, after which observers see the run
SHARE = 16  # between them, a group is this part of the steps done: observers see a run at longer and longer intervals
BYTES = 2**25  # upper bound on the batches of a group, which are in memory together
COMPARED = 2  # steps of a group that are repeated eagerly
PAUSE = 0.2  # seconds of compiled steps after which Ctrl-C is noticed

# Seconds that the steps left must take before "auto" traces them, which takes 0.02 s, and before it compiles them, some 20 s.
WORTH_TRACING, WORTH_COMPILING = 5.0, 30.0
TIMED = 3  # steps after the first that are timed before "auto" decides


class CompileWarning(UserWarning):
    """A run that was to be compiled runs step by step."""


class TracingError(Exception):
    """A run cannot be compiled."""


class Eager:
    """One step at a time, as Python runs it.

    Attributes:
        whole: False during a call, and after one that raised an exception, when x and y may be half-way through a step.
    """

    whole = True

    def __init__(self, run: Run) -> None:
        self.run, variables = run, (run.state.x, run.state.y)
        self._leaves = [leaf.detach() for variable in variables for leaf in variable.leaves]
        self._kept: Leaves = []  # made when the numbers that were left out are chosen, which takes memory of its own
        # Buffers are copied one by one, since their dtypes may differ.
        self._buffers = [(buffer, buffer.clone()) for variable in variables for buffer in variable.buffers().values()]

    def __call__(self, batch: Any) -> StepInfo:
        """Take a step; return its numbers, with ``size`` and ``moved``."""
        self.run.prepare(batch)
        if self._kept:
            copy_(self._kept, self._leaves)  # x and y only: the rest of the state is of no use after a failed step
        else:
            self._kept = [leaf.clone() for leaf in self._leaves]
        for buffer, kept in self._buffers:
            kept.copy_(buffer)
        self.whole = False
        info, begin = self.run.step(batch), time.perf_counter()
        if self.run.group is None:
            size, moved = norms(self._leaves, subtract(self._leaves, self._kept))
        else:
            size, moved = float(norm(self._leaves)), float(distance(self._leaves, self._kept))
        info = info.measured(size, moved)
        self.run.seconds += time.perf_counter() - begin  # the device has finished the step now
        self.whole = True
        return info

    def rewind(self) -> None:
        """Undo the last step, as far as the answer (x, y) is concerned."""
        copy_(self._leaves, self._kept)
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        self.whole = True


class BatchForm:
    """The structure of a batch: nested dicts and lists of tensors, and of plain values that are the same in all batches."""

    def __init__(self, batch: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten(batch)
        foreign = [type(leaf).__name__ for leaf in self.leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        if foreign:
            raise TracingError(f"the batch holds {foreign[0]}, and only tensors in dicts, lists and tuples can be traced")
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.form = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def match(self, batch: Any) -> Leaves | None:
        """The tensors of another batch; None if it has another structure, shapes, dtypes or plain values."""
        if batch is None:
            return [] if self.leaves == [None] else None
        leaves, spec = pytree.tree_flatten(batch)
        return self._tensors_of(leaves, 0) if spec == self.spec else None

    def _tensors_of(self, leaves: list[Any], dim: int) -> Leaves | None:
        """The tensors among leaves that have the form of this batch from dimension ``dim`` on, or None."""
        for leaf, form in zip(leaves, self.form, strict=True):
            if isinstance(leaf, Tensor):
                if (leaf.shape[dim:], leaf.dtype, leaf.device) != form:
                    return None
            elif type(leaf) is not type(form) or leaf != form:
                return None
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def matches(self, group: Group) -> Iterator[Leaves]:
        """The tensors of the batches of a group, up to the first one of another form."""
        found = (self.match(batch) for batch, _, _ in group)
        return itertools.takewhile(lambda tensors: tensors is not None, found)  # type: ignore[arg-type]

    def stack(self, group: Group, into: Leaves) -> int:
        """Write the batches of a group, up to the first one of another form, into rows of tensors; return their number."""
        if isinstance(group, Rows):
            leaves, spec = pytree.tree_flatten(group.rows)
            stacked = self._tensors_of(leaves, 1) if spec == self.spec else None
            for tensor, given in zip(into, stacked or [], strict=False):
                tensor[: len(group)] = given
            return 0 if stacked is None else len(group)
        if group[0] is group[-1] and group[0][0] is None and self.leaves == [None]:  # a run without batches
            return len(group)
        batches = list(self.matches(group))
        for i, tensor in enumerate(into if batches else []):
            torch.stack([tensors[i] for tensors in batches], out=tensor[: len(batches)])
        return len(batches)

    def put(self, tensors: Sequence[Tensor]) -> Any:
        """The batch with other tensors."""
        others = iter(tensors)
        return pytree.tree_unflatten([next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


@dataclasses.dataclass
class Facts:
    """What a step reads and returns.

    Attributes:
        method: whose schedules are read.
        read: names of the schedules, and functions of the step number (:meth:`~meha.methods.At.of`), in the order of first use.
        returned: names of the numbers, besides the norm of (x, y) and the length of the step.
        rare: the functions that say which steps are not as the others (:meth:`~meha.methods.At.rare`).
        counts: its gradients.
        dtype, device: of the numbers.
    """

    method: Method
    batch: BatchForm
    read: list[str | StepNumber]
    returned: list[str]
    rare: list[Callable[[int], bool]]
    counts: Counts
    dtype: torch.dtype
    device: torch.device

    def alike(self, k: int, n: int) -> int:
        """How many of the n steps from k on are as the traced one, up to the first that is not."""
        return next((j for j in range(n) if any(rare(k + j) for rare in self.rare)), n)

    def table(self, k: int, n: int) -> Tensor:
        """The values of the schedules for n steps from k on, a row for each step."""
        table, steps = torch.empty(n, len(self.read), dtype=self.dtype), range(k, k + n)
        for i, name in enumerate(self.read):
            if not isinstance(name, str):
                table[:, i] = torch.from_numpy(np.fromiter((name(step) for step in steps), np.float64, n))
                continue
            schedule, zero = getattr(self.method, name), name in self.method.may_be_zero
            if callable(schedule):
                values = np.fromiter(map(schedule, steps), np.float64, n)
                bad = ~(np.isfinite(values) & ((values > 0) | (zero & (values == 0))))
                if bad.any():
                    evaluate(name, schedule, k + int(bad.argmax()), zero=zero)  # raises
                table[:, i] = torch.from_numpy(values)
            else:
                table[:, i] = schedule
        return table.to(self.device)


class Compiled(ABC):
    """Takes groups of steps without Python between them.

    Args:
        run: with at least one step done, in which what was left out is chosen and the objectives are checked.
        tensors: those that the steps change.
        facts: what a step reads and returns.

    Attributes:
        unit: the number of steps in a group is a multiple of it; known once the steps are compiled.
        shortest, longest: bounds on the number of steps in a group, besides the last one.
        known: whether a compiled version was already cached.
        whole: as in :class:`Eager`.
    """

    unit: int
    shortest: int
    longest: int
    known = False
    whole = True

    def __init__(self, run: Run, tensors: Leaves, facts: Facts) -> None:
        self.run, self._tensors, self._facts = run, tensors, facts
        self._kept = [tensor.clone() for tensor in tensors]
        self._before = run.k, run.counts

    @abstractmethod
    def compile(self) -> None:
        """Compile or record the steps, or raise a :class:`TracingError`."""

    @abstractmethod
    def fit(self, group: Group) -> int:
        """For how many batches from the first one on a step can be taken; the last one of a pass, for example, may be smaller.

        They are kept for the call that follows.
        """

    def alike(self, n: int) -> int:
        """How many of the next n steps can be taken together."""
        return self._facts.alike(self.run.k, n)

    @abstractmethod
    def _take(self, table: Tensor) -> Tensor:
        """Take a step for each row of numbers, with the batches that :meth:`fit` kept; return the last numbers."""

    def __call__(self, group: Group) -> StepInfo:
        """Take a step for each batch; return the numbers of the last one, with ``size`` and ``moved``."""
        run, n, facts, begin = self.run, len(group), self._facts, time.perf_counter()
        self._before = run.k, dataclasses.replace(run.counts)
        copy_(self._kept, self._tensors)
        self.whole = False
        *numbers, size, moved = self._take(facts.table(run.k, n)).tolist()  # waits for the device
        run.state.k += n
        run.batch = group[-1][0]
        run.counts.add(facts.counts, n)  # the compiled steps do not pass through the oracle, which counts otherwise
        run.seconds += time.perf_counter() - begin
        self.whole = True
        return StepInfo(run.k, dict(zip(facts.returned, numbers, strict=True)), span=n).measured(size, moved)

    def rewind(self) -> None:
        """Undo the last call."""
        self._return_to(self._kept, *self._before)
        self.whole = True

    def _return_to(self, tensors: Leaves, k: int, counts: Counts) -> None:
        """Put the run where it was after step k."""
        copy_(self._tensors, tensors)
        self.run.state.k, self.run.oracle.counts = k, dataclasses.replace(counts)


class _TracedAt(At):
    """The schedules of a step that is traced once for all step numbers: entries of a row, in the order of first use."""

    def __init__(self, method: Method, row: Tensor, batch: Any, last: int | None) -> None:
        super().__init__(method, 0, batch, last)
        self._row, self._read = row, list[str | StepNumber]()
        self._rare: list[Callable[[int], bool]] = []

    def _evaluate(self, name: str, schedule: Any) -> Tensor:
        return self.of(name)

    def of(self, function: str | StepNumber) -> Tensor:
        """An entry of the row, which is an input of the graph; a number would be frozen into it."""
        self._read.append(function)
        return self._row[len(self._read) - 1]

    def rare(self, function: Callable[[int], bool]) -> bool:
        """False: the graph is that of the other steps."""
        self._rare.append(function)
        return False


class _UnknownStepNumber:
    """Stands for the step number in a traced step, which must not compute with it: its value would be frozen."""


def _traced_step(
    run: Run, oracle: Oracle, own: dict[str, Variable], row: Tensor, batch: Any
) -> tuple[Tensor, list[str | StepNumber], list[str], list[Callable[[int], bool]]]:
    """Take a step with numbers from a row; return its numbers, the norm of (x, y) and the length of the step as one vector,
    the names of the schedules that it read, the names of its numbers, and what says which steps are not as this one.

    Args:
        own: variables in the place of those of the run.
    """
    state, at = run.state, _TracedAt(run.method, row, batch, run.last)
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
    return vector, at._read, list(numbers), at._rare


def _parts_of(run: Run, *kinds: type) -> dict[str, Any]:
    """The parts of the state of the method by name, besides plain values, which must be of these kinds."""
    parts = {name: value for name, value in vars(run.state).items() if not isinstance(value, PLAIN)}
    for name, value in parts.items():
        if not isinstance(value, kinds):
            raise TracingError(f"{run.method.name} keeps a {type(value).__name__} ({name}), which works in Python")
    return parts


def _number_dtype(run: Run) -> torch.dtype:
    """The dtype for the numbers of steps: that of the leaves, but at least single precision; half would round step sizes."""
    kinds = [leaf.dtype for leaf in run.state.x.leaves + run.state.y.leaves]
    return functools.reduce(torch.promote_types, kinds, torch.float32)


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


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph assumes about a tensor: shape, strides, dtype, device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def captured(*functions: Any) -> dict[str, list[Any]]:
    """Return what functions captured, by name: numbers and texts, sizes of containers, versions of tensors.

    >>> calls = []
    >>> def counted(x):
    ...     calls.append(1)
    ...     return len(calls) * x
    >>> before = captured(counted)
    >>> _ = counted(1.0)
    >>> first_change(before, captured(counted))
    'calls'
    """
    parts: dict[str, list[Any]] = {}
    for function in functions:
        for name, value in _names(function):
            parts.setdefault(name, []).extend(part for _, part in zip(range(MOST), _parts(value, DEPTH), strict=False))
    return parts


def first_change(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> str | None:
    """The first name whose value changed; None if none did."""
    return next((name for name, value in after.items() if before.get(name) != value), None)


def _names(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function reads besides its arguments, and their values; but no modules and classes."""
    found: list[Iterable[tuple[str, Any]]]
    if isinstance(function, functools.partial):
        found = [_names(function.func), _places(function.args), function.keywords.items()]
    elif isinstance(function, types.MethodType):
        found = [_names(function.__func__), getattr(function.__self__, "__dict__", {}).items()]
    elif isinstance(function, types.FunctionType):
        code, known = function.__code__, function.__globals__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found = [
            ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType()),  # equal: not yet assigned
            ((name, known[name]) for name in code.co_names if name in known),
            _places(function.__defaults__ or ()),
            (function.__kwdefaults__ or {}).items(),
        ]
    else:
        found = [getattr(function, "__dict__", {}).items()]
    for pairs in found:
        yield from ((name, value) for name, value in pairs if not isinstance(value, types.ModuleType | type))


def _places(values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield positional arguments with names for them."""
    return ((f"argument {i}", value) for i, value in enumerate(values))


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """Yield parts of a value that differ after the value was changed."""
    if isinstance(value, Tensor):  # torch counts writes into a tensor, except for inference tensors; contents may be large
        yield id(value), None if value.is_inference() else value._version
    elif isinstance(value, int | float | complex | str | bytes | None):
        yield repr(value)
    elif isinstance(value, np.ndarray):
        yield value.tobytes() if value.size <= MOST and value.dtype != object else id(value)
    elif isinstance(value, np.random.Generator):
        yield repr(value.bit_generator.state)
    elif depth and isinstance(value, Mapping):
        yield len(value)
        for key, item in value.items():
            yield from _parts(key, 0)
            yield from _parts(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | deque):
        yield len(value)
        for item in value:
            yield from _parts(item, depth - 1)
    elif depth and isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        for _, item in _names(value):
            yield from _parts(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type):
        yield from _parts(vars(value), depth - 1)
    else:
        yield id(value)


DECOMPOSED: dict[Any, Callable[..., Any]] = {  # operations that are traced in another form, which compiles better
    norm_operation: lambda leaves, ord=2, dtype=None: [  # the compiler has no kernel for the list
        torch.linalg.vector_norm(leaf, ord, dtype=dtype) for leaf in leaves
    ],
    torch.ops.aten.ones_like.default: lambda like, **_: like.new_ones(()).expand(like.shape),  # needs no value of its argument
}


@dataclasses.dataclass
class _Function:
    """A compiled function ``call(*leaves, first, end, *constants, table, *batches)``, which takes the steps of some rows.

    Attributes:
        unit: the number of rows must be a multiple of it.
        turn: the number of steps in a row; calls for multiples of it give the same numbers as one call for all.
        unseen: steps that must be compared with eager ones before all parts of the function were.
    """

    call: Callable[..., Any]
    unit: int
    turn: int
    unseen: int


# Functions compiled in this process, by the text of the graph and the kinds of its inputs: runs on other data share them.
_known: dict[Any, _Function] = {}


class Traced(Compiled):
    """Steps on tensors, traced into a graph, and compiled.

    >>> from meha.methods import MEHA
    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> compiled = Traced(run)
    >>> compiled.compile()
    >>> group = [(None, None, "")] * 4
    >>> compiled.fit(group)
    4
    >>> info = compiled(group)
    >>> info.step, run.counts
    (5, Counts(upper=10, lower=20, hvp=0))
    """

    shortest = SHORTEST

    def __init__(self, run: Run) -> None:
        self._trace = trace = _trace(run)
        variables = _parts_of(run, Variable).values()
        super().__init__(run, [leaf.detach() for variable in variables for leaf in variable.leaves], trace)
        size = sum(tensor.nbytes for tensor in trace.batch.tensors)
        self.longest = max(UNROLLED, min(LONGEST, BYTES // max(1, size)))
        # Compiled code assumes fixed shapes; the first rows of these tensors are used, as many as a group has steps.
        self._table = torch.ones(self.longest, len(trace.read), dtype=trace.dtype, device=trace.device)
        self._stacks = [tensor.new_empty(self.longest, *tensor.shape) for tensor in trace.batch.tensors]
        kinds = [_kind(tensor) for tensor in self._inputs(0, 1)]
        self._key = (trace.text, torch.get_num_threads(), *kinds)  # compiled loops are split among threads
        self.known = self._key in _known
        self._function: _Function | None = None
        self._groups, self._watched, self._seconds = 0, False, math.inf
        # The eager steps so far are right.
        self._agreed = [tensor.clone() for tensor in self._tensors], run.k, dataclasses.replace(run.counts)

    @property
    def unit(self) -> int:  # type: ignore[override]
        return 1 if self._function is None else self._function.unit

    def compile(self) -> None:
        try:
            if self._key not in _known:
                _known[self._key] = self._trace.compile(self._inputs(0, 1), str(self._key[1:]))
            self._function = _known[self._key]
            if self._table.is_cuda:
                self._function = dataclasses.replace(self._function, call=self._record(self._function))
        except Exception as error:  # whatever the compiler, or the machine's C++ compiler, has to say
            raise TracingError(f"the compiler failed: {first_line(error)}") from error

    def fit(self, group: Group) -> int:
        return min(self._trace.batch.stack(group, self._stacks), self.alike(len(group))) // self.unit * self.unit

    def _take(self, table: Tensor) -> Tensor:
        assert self._function is not None
        n, done, begin = len(table), 0, time.perf_counter()
        self._table[:n] = table
        # Ctrl-C waits for the end of a call. Whole turns in each give the same numbers, however long the calls are.
        turn = self._function.turn
        steps = turn * max(1, int(PAUSE / (turn * self._seconds)))
        while done < n:
            end = min(n, done + steps)
            vector: Tensor = self._function.call(*self._inputs(done, end))[0]
            done = end
        self._seconds = (time.perf_counter() - begin) / n
        self._groups += 1
        # The first group, the second, the fourth, ... and the last is compared with eager steps: the checks become rare.
        self._watched = self._groups & (self._groups - 1) == 0 or self.run.k + n == self.run.last
        return vector

    def difference(self, group: Group) -> str:
        """Repeat the first steps of the last group, compiled and eagerly, and say how they differ; empty if they agree.

        Where they agree, the run stays where it is; otherwise it goes back to where they last did.
        """
        if not self._watched or self._trace.random:  # with random numbers, the eager steps would draw others
            return ""
        assert self._function is not None
        run, states, unit = self.run, random_states(), self.unit
        done = [tensor.clone() for tensor in self._tensors], run.k, dataclasses.replace(run.counts)
        n = min(len(group), max(COMPARED, unit, self._function.unseen)) // unit * unit
        try:
            copy_(self._tensors, self._kept)
            self._function.call(*self._inputs(0, n))
            ends = [tensor.clone() for tensor in self._tensors]
            self._return_to(self._kept, *self._before)
            for i in range(n):
                info = run.step(group[i][0])
            difference = self._apart(ends, info)
        except Exception as error:  # the eager steps that follow raise it again
            difference = f"a step raises {first_line(error)}"
        finally:
            set_random_states(states)
            self._return_to(*done)  # the repeated steps do not count as work of the run
            run.batch = group[-1][0]
        if difference:
            self._return_to(*self._agreed)
        else:
            self._agreed = done
            if n >= self._function.unseen:
                self._function.unseen = 0
        return difference

    def _apart(self, ends: Leaves, info: StepInfo) -> str:
        """Say how ``ends`` differ from the present tensors, or which number of the last step is not finite; else empty."""
        for name, value in info.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        eps = max(torch.finfo(tensor.dtype).eps for tensor in ends)
        apart, moved, size = (
            float(norm(part)) for part in (subtract(self._tensors, ends), subtract(self._tensors, self._kept), self._tensors)
        )
        close = apart <= eps**SAME_MOVE * moved + eps**SAME * size
        return "" if close else f"x, y differ by {apart:.1e} after a way of {moved:.1e}"

    def _inputs(self, first: int, end: int) -> Leaves:
        rows = (torch.tensor(first), torch.tensor(end))
        return [*self._tensors, *rows, *self._trace.constants, self._table, *self._stacks]

    def _record(self, function: _Function) -> Callable[..., Any]:
        """Return the steps of one call as a CUDA graph, which replays on fixed memory: the rows are copied there first."""
        unit, rows = function.unit, [self._table, *self._stacks]
        static = [tensor[:unit].clone() for tensor in rows]
        first, last = torch.tensor(0), torch.tensor(unit)
        replay = record(lambda: function.call(*self._tensors, first, last, static[0], *self._trace.constants, *static[1:]))
        copy_(self._tensors, self._kept)  # recording has taken steps

        def call(*inputs: Tensor) -> Any:
            first, end = (int(number) for number in inputs[len(self._tensors) : len(self._tensors) + 2])
            for i in range(first, end, unit):
                for tensor, row in zip(static, rows, strict=True):
                    tensor.copy_(row[i : i + unit])
                result = replay()
            return result

        return call


@dataclasses.dataclass
class _Trace(Facts):
    """A step as a graph that changes its first inputs in place, and returns the numbers of the step.

    Attributes:
        graph: its inputs are the leaves of the state, a row of numbers, the tensors of a batch, and constants.
        leaves: number of leaves.
        constants: tensors that the objectives and the method use besides the variables.
    """

    graph: fx.Graph
    leaves: int
    constants: Leaves

    @functools.cached_property
    def text(self) -> str:
        """The graph as text, which is equal for equal computations."""
        return str(self.graph.python_code("self").src)

    @property
    def random(self) -> bool:
        """Whether the step draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.nodes)

    @property
    def operations(self) -> int:
        """The number of operations of a step, without those that only its reported numbers need."""
        # Only the last step of a call reports its numbers, so that a further step adds just its own operations.
        return len(self.unroll(2).graph.nodes) - len(self.unroll(1).graph.nodes)

    def compile(self, inputs: Leaves, key: str) -> _Function:
        """Compile steps as one function of the leaves, the first row and the end, constants, numbers and batches.

        Args:
            key: a text that tells inputs and threads from others.
        """
        operations = self.operations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own parts
            size = sum(leaf.nbytes for leaf in inputs[: self.leaves])
            # In a loop, random numbers would be others than in eager steps.
            if self.device.type == "cpu" and not self.random and size <= LOOPED:
                turn = max(1, min(BATCH_TURN if self.batch.tensors else TURN, TURN_OPERATIONS // operations))
                with contextlib.suppress(Exception):  # torch's loops are young; what is wrong with the steps fails again below
                    return _Function(compile_graph(self.loop(turn, inputs), inputs, loop=key), 1, turn, turn + (turn > 1))
            unit = max(1, min(UNROLLED, OPERATIONS // operations))
            leaves, _, constants, rows = self._split(inputs)
            given = [*leaves, *constants, *[row[0] for row in rows for _ in range(unit)]]
            function = compile_graph(self.unroll(unit), given, random=self.random)

        def call(*inputs: Tensor) -> Any:
            leaves, (first, end), constants, rows = self._split(inputs)
            for i in range(int(first), int(end), unit):
                result = function(*leaves, *constants, *[row[j] for row in rows for j in range(i, i + unit)])
            return result

        return _Function(call, unit, unit, unit)

    def _split(self, inputs: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T], Sequence[T]]:
        """The leaves, the first row and the end, constants, and the table and the stacked batches among the inputs."""
        at = [0, self.leaves, self.leaves + 2, self.leaves + 2 + len(self.constants), len(inputs)]
        leaves, rows, constants, tables = (inputs[begin:end] for begin, end in itertools.pairwise(at))
        return leaves, rows, constants, tables

    def unroll(self, steps: int) -> fx.GraphModule:
        """The graph of several steps in a row, as a function of the leaves, the constants, and the rows for each step."""
        graph = fx.Graph()
        leaves = [graph.placeholder(f"leaf_{i}") for i in range(self.leaves)]
        constants = [graph.placeholder(f"constant_{i}") for i in range(len(self.constants))]
        rows = [
            [graph.placeholder(f"row_{i}_{j}") for j in range(steps)] for i in range(1 + len(self.batch.tensors))
        ]  # of the table, and of batches
        for step in zip(*rows, strict=True):
            numbers = self._copy(graph, [*leaves, *step, *constants])
        graph.output((numbers,))
        graph.eliminate_dead_code()  # the reported numbers of all steps but the last
        return fx.GraphModule(torch.nn.Module(), graph)

    def loop(self, turn: int, inputs: Leaves) -> fx.GraphModule:
        """The graph of a loop over rows, ``turn`` steps at a time, and of a loop over the rest, a step at a time."""
        graph, root, width = fx.Graph(), torch.nn.Module(), len(self.returned) + 2
        leaves, (place, end), constants, rows = self._split(self._placeholders(graph))
        numbers = graph.call_function(aten.full.default, ([width], math.nan), {"dtype": torch.float64})
        carried, others = (place, *leaves, numbers), (end, *constants, *rows)
        trial = [inputs[self.leaves], *inputs[: self.leaves], torch.zeros(width, dtype=torch.float64)]
        for steps in dict.fromkeys((turn, 1)):
            root.add_module(f"goes_on_{steps}", self._goes_on(steps))
            root.add_module(f"turn_{steps}", functional(self._turn(steps), [*trial, *inputs[self.leaves + 1 :]]))
            parts = graph.get_attr(f"goes_on_{steps}"), graph.get_attr(f"turn_{steps}")
            ends = graph.call_function(torch.ops.higher_order.while_loop, (*parts, carried, others))
            carried = tuple(graph.call_function(operator.getitem, (ends, i)) for i in range(len(carried)))
        for leaf, value in zip(leaves, carried[1:-1], strict=True):
            graph.call_function(aten.copy_.default, (leaf, value))
        graph.output((carried[-1],))
        return fx.GraphModule(root, graph)

    def _turn(self, steps: int) -> fx.GraphModule:
        """The graph of one turn of a loop, which takes some steps from one place in the rows to the next."""
        graph = fx.Graph()
        place, leaves, _, _, constants, rows = self._of_turn(graph)
        # A turn must not write into its inputs, nor return them.
        leaves = [graph.call_function(aten.clone.default, (leaf,)) for leaf in leaves]
        for j in range(steps):
            index = graph.call_function(aten.reshape.default, (graph.call_function(aten.add.Tensor, (place, j)), [1]))
            chosen = [graph.call_function(aten.index_select.default, (row, 0, index)) for row in rows]
            chosen = [graph.call_function(aten.select.int, (row, 0, 0)) for row in chosen]
            numbers = self._copy(graph, [*leaves, *chosen, *constants])
        ends = [graph.call_function(aten.clone.default, (end,)) for end in (*leaves, numbers)]
        graph.output((graph.call_function(aten.add.Tensor, (place, steps)), *ends))
        graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), graph)

    def _goes_on(self, steps: int) -> fx.GraphModule:
        """The graph that says whether there are rows for this number of steps."""
        graph = fx.Graph()
        place, _, _, end, _, _ = self._of_turn(graph)
        graph.output(graph.call_function(aten.le.Tensor, (graph.call_function(aten.add.Tensor, (place, steps)), end)))
        return fx.GraphModule(torch.nn.Module(), graph)

    def _placeholders(self, graph: fx.Graph) -> list[fx.Node]:
        """Inputs of a graph, in the order of :meth:`_split`."""
        count = self.leaves + 2 + len(self.constants) + 1 + len(self.batch.tensors)
        return [graph.placeholder(f"input_{i}") for i in range(count)]

    def _of_turn(self, graph: fx.Graph) -> Any:
        """Inputs of a turn: the place, the leaves and the numbers, which it moves on; the end, constants, and the rows."""
        place, *leaves = (graph.placeholder(f"carried_{i}") for i in range(1 + self.leaves))
        numbers, end = graph.placeholder("numbers"), graph.placeholder("end")
        constants = [graph.placeholder(f"constant_{i}") for i in range(len(self.constants))]
        rows = [graph.placeholder(f"rows_{i}") for i in range(1 + len(self.batch.tensors))]
        return place, leaves, numbers, end, constants, rows

    def _copy(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> Any:
        """Copy the step into a graph, with these inputs; return the node of its numbers."""
        own = [node for node in self.graph.nodes if node.op == "placeholder"]
        return graph.graph_copy(self.graph, dict(zip(own, inputs, strict=True)))


def _trace(run: Run) -> _Trace:
    """Trace the next step into a graph; the run does not take it."""
    objectives = run.problem.upper, run.problem.lower
    before = captured(*objectives)
    first, second = _trace_once(run), _trace_once(run)  # twice, to notice objectives that change from call to call
    name = first_change(before, captured(*objectives))
    if name is not None:
        raise TracingError(f"an objective changes {name!r} when it is called, which a compiled step would not")
    same = all(a is b or torch.equal(a, b) for a, b in zip(first.constants, second.constants, strict=False))
    if first.text != second.text or not same:
        raise TracingError("the objectives are not the same function each time that they are called")
    return first


def _trace_once(run: Run) -> _Trace:
    """Trace one step of copies of the variables, or raise if it cannot be traced, such as a branch on the value of a tensor."""
    variables, batch, dtype = _parts_of(run, Variable), BatchForm(run.batch), _number_dtype(run)
    leaves = [leaf.detach().clone() for variable in variables.values() for leaf in variable.leaves]
    # Stacked batches have contiguous rows.
    tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in batch.tensors]
    device = leaves[0].device
    row, oracle = torch.ones(ROW, dtype=dtype, device=device), run.oracle.bare(joint=True)
    recorder = GraphRecorder([*leaves, row, *tensors], DECOMPOSED, TracingError)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), RefusingValues(recorder, TracingError), recorder:
            fresh, own = iter(leaves), {}
            for name, variable in variables.items():
                value = variable.like([next(fresh).detach().requires_grad_() for _ in variable.leaves])
                own[name] = Variable.of(value, variable.argument)
            vector, read, returned, rare = _traced_step(run, oracle, own, row, batch.put(tensors))
    except TracingError:
        raise
    except Exception as error:  # whatever the objectives raise in a trace
        raise TracingError(first_line(error)) from error
    recorder.graph.output(recorder.node(vector))
    return _Trace(
        run.method, batch, read, returned, rare, oracle.counts, dtype, device, recorder.graph, len(leaves), recorder.constants
    )


class Recorded(Compiled):
    """Takes steps on modules that were recorded as a CUDA graph: all kernels of a step are launched at once.

    Python code in objectives and hooks of modules no longer runs then. The graph is compared with an eager step before use.
    """

    unit = shortest = longest = 8

    def __init__(self, run: Run) -> None:
        if run.state.y.device.type != "cuda":
            raise TracingError("x or y is a module; without a GPU, compile the module instead, as in y0=torch.compile(module)")
        tensors: Leaves = []  # those that steps may change: leaves, buffers such as running statistics, moments
        self._optimizers: dict[str, RunningOptimizer] = {}
        for name, part in _parts_of(run, Variable, RunningOptimizer).items():
            if isinstance(part, Variable):
                tensors += [tensor.detach() for tensor in [*part.leaves, *part.buffers().values()]]
                continue
            if part.built:
                raise TracingError(f"{name} was built outside of the run, where its options may change between steps")
            if not part.make_capturable():
                raise TracingError(f"{name} cannot keep its step number on the GPU")
            self._optimizers[name] = part
            tensors += part.tensors()
        super().__init__(
            run, tensors, Facts(run.method, BatchForm(run.batch), [], [], [], Counts(), _number_dtype(run), run.state.y.device)
        )
        self._schedules = [optimizer.schedule for optimizer in self._optimizers.values()]

    def fit(self, group: Group) -> int:
        self._batches = list(self._facts.batch.matches(group))
        return min(len(self._batches), self.alike(len(group))) // self.unit * self.unit

    def __call__(self, group: Group) -> StepInfo:
        self._schedules = [optimizer.schedule for optimizer in self._optimizers.values()]
        return super().__call__(group)

    def rewind(self) -> None:
        super().rewind()
        for optimizer, schedule in zip(self._optimizers.values(), self._schedules, strict=True):
            optimizer.schedule = schedule

    def compile(self) -> None:
        run, facts = self.run, self._facts
        # A graph reads fixed memory: batches and schedules are copied into these tensors before each replay.
        batch = BatchForm(facts.batch.put([tensor.clone() for tensor in facts.batch.tensors]))
        self._static, self._row = batch.tensors, torch.ones(ROW, dtype=facts.dtype, device=facts.device)
        given = batch.put(batch.tensors)

        def step() -> Tensor:
            oracle = run.oracle.bare()
            vector, facts.read, facts.returned, facts.rare = _traced_step(run, oracle, {}, self._row, given)
            facts.counts = oracle.counts
            return vector

        for optimizer in self._optimizers.values():
            optimizer.recording, optimizer.steps = True, 0
        try:
            with torch.random.fork_rng([facts.device]):  # the trial steps must not use up random numbers
                step()  # shows which schedules it reads and which numbers it returns
                for name, optimizer in self._optimizers.items():
                    if optimizer.scheduler is not None and optimizer.steps != 1:
                        raise TracingError(f"{name} has a schedule, and takes {optimizer.steps} steps in one of the method")
                rows = facts.table(run.k, 2)
                ends = []
                for once in (step, record(step)):  # two steps of each from the same point
                    copy_(self._tensors, self._kept)
                    for row in rows:
                        self._row[: len(row)] = row
                        once()
                    ends.append([tensor.to(facts.dtype, copy=True) for tensor in self._tensors])
            self._replay = once
            moved, apart = (norm(subtract(ends[0], other)) for other in (self._kept, ends[1]))
            if not apart <= AGREEMENT * moved:  # also where one of them is NaN
                raise TracingError("the graph of a step gives other numbers than the step, because of random numbers or Python")
        except Exception as error:
            for optimizer in self._optimizers.values():
                optimizer.release()
            if isinstance(error, TracingError):
                raise
            # whatever objectives do that a graph cannot hold
            raise TracingError(f"a step cannot be recorded: {first_line(error)}") from error
        finally:
            for optimizer in self._optimizers.values():
                optimizer.recording = False
            copy_(self._tensors, self._kept)  # the trial steps are undone

    def _take(self, table: Tensor) -> Tensor:
        for row, tensors in zip(table, self._batches, strict=True):
            self._row[: len(row)] = row
            for static, tensor in zip(self._static, tensors, strict=True):
                static.copy_(tensor)
            vector = self._replay()
            for optimizer in self._optimizers.values():
                optimizer.advance()
        return vector


class CompiledPace:
    """Decides whether a run is compiled, and how many steps are taken at once.

    Args:
        compile: see :func:`meha.solve`.

    Attributes:
        eager, compiled: what takes single steps, and groups of them; None as long as nothing is compiled.
        wanted: ``compile`` until it is decided, False after that.
    """

    def __init__(self, compile: bool | Literal["auto"], run: Run, max_steps: int) -> None:
        self.run, self.max_steps, self.wanted, self._asked = run, max_steps, compile, compile
        self.eager = Eager(run)
        self.compiled: Compiled | None = None
        self._first: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        """The number of steps to take next."""
        k, left, compiled = self.run.k, self.max_steps - self.run.k, self.compiled
        if compiled is None:
            return min(left, 1)
        steps = compiled.alike(min(left, compiled.longest, max(compiled.shortest, k // SHARE)))
        return steps // compiled.unit * compiled.unit or min(left, 1)  # a remainder at the end is taken eagerly

    def update(self) -> None:
        """Decide after a step whether to compile, and do so; the time this takes counts as time of the run."""
        begin = time.perf_counter()
        if self.wanted is True or (self.wanted and self._takes(WORTH_TRACING)):
            try:
                compiled = _build(self.run)
                enough = self.max_steps - self.run.k >= compiled.shortest
                if enough and (self.wanted is True or compiled.known or self._takes(WORTH_COMPILING)):
                    compiled.compile()
                    self.compiled = compiled
            except TracingError as reason:
                if self.wanted is True:
                    warnings.warn(f"compile: the steps run one by one, because {reason}.", CompileWarning, stacklevel=3)
            self.wanted = False  # decided once; what failed is not tried again
        self.run.seconds += time.perf_counter() - begin

    def begin_again(self) -> None:
        """Forget what was compiled, after the run went back to its start with a new state."""
        self.compiled, self.wanted, self._first = None, self._asked, None

    def differs(self, group: Group) -> int | None:
        """Compare the last group with eager steps now and then; on a difference, go back, and continue eagerly.

        Returns:
            The number of the step to which the run went back; None if it did not.
        """
        difference = self.compiled.difference(group) if isinstance(self.compiled, Traced) else ""
        if not difference:
            return None
        k, self.compiled = self.run.k, None
        warnings.warn(
            f"compile: compiled and eager steps differ: {difference}. The run falls back to eager execution from step {k}."
            " Objectives must be functions of x, y and the batch, in torch alone; write them so, or leave compile out.",
            CompileWarning,
            stacklevel=5,
        )
        return k

    def _takes(self, seconds: float) -> bool:
        """Whether the steps left would take longer than this, at the mean time of the steps after the first."""
        k, now = self.run.k, self.run.seconds
        if self._first is None:  # the first step is slower: it also checks the objectives
            self._first = k, now
        first, then = self._first
        return k >= first + TIMED and (now - then) / (k - first) * (self.max_steps - k) > seconds


def _build(run: Run) -> Compiled:
    """What takes groups of steps of a run, or raise: steps on tensors are traced and compiled, steps on modules recorded."""
    if run.group is not None:
        raise TracingError("several processes take part, and send messages in each step")
    if run.problem._selected_response is not None:
        raise TracingError("the problem has a selected response, which may begin elsewhere in each step")
    if run.oracle.lacking:
        raise TracingError(
            f"torch has no second derivatives here ({run.oracle.lacking}), and both gradients of a difference"
            " must draw the same random numbers"
        )
    parts = vars(run.state).values()
    return Recorded(run) if any(isinstance(part, Variable) and part.has_modules for part in parts) else Traced(run)
