"""Compiled runs: many steps of a method as one call, for ``solve(..., compile=True)``.

A step on a small problem spends nearly all of its time in Python and in the calls of single operations. Here it is traced once
into a graph of tensor operations, gradients included; copies of the graph in a row are compiled by torch's inductor, and on a
GPU recorded as a CUDA graph. Steps on modules are recorded without the compiler. What is traced or recorded is the method's
own ``step``.

The step number enters a step through its numbers alone (``at.alpha``, ``at.c``), so that these are inputs of the graph. A
method or an objective that decides in Python from the values of tensors cannot be traced, and runs step by step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import types
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx

from meha.method.method import At, Run, StepInfo, StepNumber
from meha.method.optimizers import RunningOptimizer
from meha.method.status import first_line
from meha.methods import Method
from meha.problem.loaders import random_states, set_random_states
from meha.problem.oracle import Counts, Oracle
from meha.problem.schedules import evaluate
from meha.tensors.torch_private import RefusingValues, compile_graph, norm_operation, pytree
from meha.tensors.variables import Leaves, Variable, copy_, distance, norm, norms, subtract

__all__ = ["CompileWarning", "Compiled", "CompiledPace", "Eager", "Recorded", "Traced", "TracingError"]

PLAIN = (bool, int, float, str, type(None))  # types besides variables and tensors whose values become a part of the graph
ROW = 32  # upper bound on the schedules that a step may read; the trace needs a fixed size before it knows their number

DEPTH = 4  # how deep containers and objects are searched for changes; cycles end there
MOST = 2000  # parts of one captured object that are examined, since it may be a whole data set

OPERATIONS = 1000  # upper bound on the operations that are compiled together; the compiler's time grows with them
UNROLLED = 32  # upper bound on the number of steps per compiled call

# Compiled and eager steps agree within these powers of the rounding error, times their length and the size of (x, y).
SAME_MOVE, SAME = 0.5, 0.75
AGREEMENT = 1e-3  # the largest distance of recorded from eager steps, relative to their length; sums may differ in order

LONGEST = 4096  # upper bound on the steps of a group, after which observers see the run
SHARE = 16  # a group is at most this part of the steps done: observers see a run at longer and longer intervals

# Seconds that the steps left must take before "auto" traces them, which takes 0.2 s, and before it compiles them, some 20 s.
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
        self.form = [_kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def match(self, batch: Any) -> Leaves | None:
        """The tensors of another batch; None if it has another structure, shapes, dtypes or plain values."""
        if batch is None:
            return [] if self.leaves == [None] else None
        try:
            other = BatchForm(batch)
        except TracingError:
            return None
        return other.tensors if (other.spec, other.form) == (self.spec, self.form) else None

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

    def table(self, k: int, n: int, horizon: int | None) -> Tensor:
        """The values of the schedules for n steps from k on, a row for each step."""
        table = torch.empty(n, len(self.read), dtype=self.dtype)
        for i, name in enumerate(self.read):
            if not isinstance(name, str):
                table[:, i] = torch.tensor([name(k + j, horizon) for j in range(n)], dtype=table.dtype)
                continue
            schedule, zero = getattr(self.method, name), name in self.method.may_be_zero
            if callable(schedule):
                values = [evaluate(name, schedule, k + j, zero=zero) for j in range(n)]
                table[:, i] = torch.tensor(values, dtype=table.dtype)
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
        unrolled: steps per call; the size of a group is a multiple of it.
        known: whether a compiled version was already cached.
        whole: as in :class:`Eager`.
    """

    unrolled: int
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
    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        """Take ``unrolled`` steps, with a row of numbers and the tensors of a batch each; return the last numbers."""

    def fits(self, batches: Sequence[Any]) -> bool:
        """Whether a step for each of these batches can be taken; the last batch of a pass, for example, is often smaller."""
        if len(batches) % self.unrolled or self.alike(len(batches)) < len(batches):
            return False
        return all(self._facts.batch.match(batch) is not None for batch in batches)

    def alike(self, n: int) -> int:
        """How many of the next n steps can be taken together."""
        return self._facts.alike(self.run.k, n)

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        """Take a step for each batch; return the numbers of the last one, with ``size`` and ``moved``."""
        run, n, facts, begin = self.run, len(batches), self._facts, time.perf_counter()
        self._before = run.k, dataclasses.replace(run.counts)
        copy_(self._kept, self._tensors)
        self.whole = False
        table = facts.table(run.k, n, run.horizon)
        tensors = [facts.batch.match(batch) or [] for batch in batches]
        for i in range(0, n, self.unrolled):
            vector = self._call(table[i : i + self.unrolled], tensors[i : i + self.unrolled])
        *numbers, size, moved = vector.tolist()  # waits for the device, so that the time is that of the whole group
        run.state.k += n
        run.batch = batches[-1]
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

    def __init__(self, method: Method, row: Tensor, batch: Any) -> None:
        super().__init__(method, 0, batch)
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

# Functions compiled in this process, by the text of the graph and the kinds of its inputs: runs on other data share them.
_known: dict[Any, Callable[..., Any]] = {}


class Traced(Compiled):
    """Steps on tensors, traced into a graph, and compiled.

    Args:
        unrolled: steps per compiled call; by default as many as pay.

    >>> from meha.methods import MEHA
    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> compiled = Traced(run, unrolled=2)
    >>> compiled.compile()
    >>> info = compiled([None] * 4)
    >>> info.step, run.counts
    (5, Counts(upper=10, lower=20, hvp=0))
    """

    def __init__(self, run: Run, unrolled: int | None = None) -> None:
        self._trace = trace = _trace(run)
        variables = _parts_of(run, Variable).values()
        super().__init__(run, [leaf.detach() for variable in variables for leaf in variable.leaves], trace)
        self.unrolled = unrolled or max(1, min(UNROLLED, OPERATIONS // trace.operations))
        kinds = [_kind(tensor) for tensor in self._example()]
        self._key = (trace.text, self.unrolled, torch.get_num_threads(), *kinds)  # compiled loops are split among threads
        self.known = self._key in _known
        self._function: Callable[..., Any] | None = None
        self._groups, self._watched = 0, False
        self._start = [tensor.clone() for tensor in self._tensors]
        self._agreed = self._start, run.k, dataclasses.replace(run.counts)  # the eager steps so far are right

    def compile(self) -> None:
        inputs = self._example()
        try:
            if self._key not in _known:
                _known[self._key] = self._trace.compile(self.unrolled, inputs)
            self._function = _known[self._key]
            if inputs[0].is_cuda:
                self._function = self._record(self._function, inputs)
        except Exception as error:  # whatever the compiler, or the machine's C++ compiler, has to say
            raise TracingError(f"the compiler failed: {first_line(error)}") from error

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        self._groups += 1
        # The first group, the second, the fourth, the eighth, ... is compared with eager steps: the checks become rare.
        self._watched = self._groups & (self._groups - 1) == 0
        return super().__call__(batches)

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        assert self._function is not None
        if self._watched:  # only the last call of a group is repeated, which is cheap
            copy_(self._start, self._tensors)
        return self._function(*self._inputs(table, batches))[0]

    def difference(self, batches: Sequence[Any]) -> str:
        """Repeat the steps of the last compiled call eagerly, and say how the results differ; empty if they agree.

        Where they agree, the run continues from those of the compiled call; otherwise it goes back to where they last did.
        """
        if not self._watched or self._trace.random:  # with random numbers, the eager steps would draw others
            return ""
        run, states = self.run, random_states()
        done = [tensor.clone() for tensor in self._tensors], run.k, dataclasses.replace(run.counts)
        copy_(self._tensors, self._start)
        run.state.k -= self.unrolled
        try:
            for batch in batches[-self.unrolled :]:
                info = run.step(batch)
            difference = self._apart(done[0], info)
        except Exception as error:  # the eager steps that follow raise it again
            difference = f"a step raises {first_line(error)}"
        finally:
            set_random_states(states)
            self._return_to(*done)  # the repeated steps do not count as work of the run
        if difference:
            self._return_to(*self._agreed)
        else:
            self._agreed = done
        return difference

    def _apart(self, ends: Leaves, info: StepInfo) -> str:
        """Say how ``ends`` differ from the present tensors, or which number of the last step is not finite; else empty."""
        for name, value in info.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        eps = max(torch.finfo(tensor.dtype).eps for tensor in ends)
        apart, moved, size = (
            float(norm(part)) for part in (subtract(self._tensors, ends), subtract(self._tensors, self._start), self._tensors)
        )
        close = apart <= eps**SAME_MOVE * moved + eps**SAME * size
        return "" if close else f"x, y differ by {apart:.1e} after a way of {moved:.1e}"

    def _inputs(self, table: Tensor, batches: list[Leaves]) -> Leaves:
        return [*self._tensors, table, *self._trace.constants, *[tensor for batch in batches for tensor in batch]]

    def _example(self) -> Leaves:
        return self._inputs(
            self._facts.table(self.run.k, self.unrolled, self.run.horizon), [self._facts.batch.tensors] * self.unrolled
        )

    def _record(self, function: Callable[..., Any], inputs: Leaves) -> Callable[..., Any]:
        """Return the function as a CUDA graph, which replays on fixed memory: other inputs are copied there first."""
        fixed = {tensor.data_ptr() for tensor in [*self._tensors, *self._trace.constants]}
        static = [tensor if tensor.data_ptr() in fixed else tensor.clone() for tensor in inputs]
        moving = [i for i, tensor in enumerate(inputs) if tensor.data_ptr() not in fixed]
        replay = record(lambda: function(*static))
        copy_(self._tensors, self._kept)  # recording has taken steps

        def call(*given: Tensor) -> Any:
            for i in moving:
                static[i].copy_(given[i])
            return replay()

        return call


@dataclasses.dataclass
class _Trace(Facts):
    """A step as a graph that changes its first inputs in place, and returns the numbers of the step.

    Attributes:
        graph: its inputs are the leaves of the state, a row of numbers, constants, and the tensors of a batch.
        leaves: number of leaves.
        constants: tensors that the objectives and the method use besides the variables.
    """

    graph: fx.Graph
    leaves: int
    constants: Leaves

    @property
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

    def compile(self, steps: int, inputs: Leaves) -> Callable[..., Any]:
        """Compile several steps as one function of the leaves, a table of numbers, the constants, and a batch for each step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own parts
            return compile_graph(self.unroll(steps), inputs, random=self.random)

    def unroll(self, steps: int) -> fx.GraphModule:
        """The graph of several steps in a row."""
        graph = fx.Graph()
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        leaves = [graph.placeholder(f"leaf_{i}") for i in range(self.leaves)]
        table = graph.placeholder("table")
        shared = [graph.placeholder(f"constant_{i}") for i in range(len(self.constants))]
        tensors = len(inputs) - len(leaves) - 1 - len(shared)  # of a batch
        batches = [[graph.placeholder(f"batch_{j}_{i}") for i in range(tensors)] for j in range(steps)]
        for j, batch in enumerate(batches):
            row = graph.call_function(torch.ops.aten.select.int, (table, 0, j))
            numbers = graph.graph_copy(self.graph, dict(zip(inputs, [*leaves, row, *shared, *batch], strict=True)))
        graph.output((numbers,))
        graph.eliminate_dead_code()  # the reported numbers of all steps but the last
        return fx.GraphModule(torch.nn.Module(), graph)


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
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    variables, batch, dtype = _parts_of(run, Variable), BatchForm(run.batch), _number_dtype(run)
    leaves = [leaf.detach().clone() for variable in variables.values() for leaf in variable.leaves]
    device = leaves[0].device
    oracle = run.oracle.bare(joint=True)
    facts: list[Any] = []

    def step(*inputs: Tensor) -> Tensor:
        fresh, row, tensors = iter(inputs[: len(leaves)]), inputs[len(leaves)], inputs[len(leaves) + 1 :]
        own = {}
        for name, variable in variables.items():
            value = variable.like([next(fresh).detach().requires_grad_() for _ in variable.leaves])
            own[name] = Variable.of(value, variable.argument)
        vector, *facts[:] = _traced_step(run, oracle, own, row, batch.put(tensors))
        return vector

    def leaving(name: str) -> TracingError:
        return TracingError(f"an objective calls .{name}() on a tensor that depends on x or y, whose value would be frozen")

    row = torch.ones(ROW, dtype=dtype, device=device)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), RefusingValues(leaving):
            module = make_fx(step, decomposition_table=DECOMPOSED)(*leaves, row, *batch.tensors)
    except TracingError:
        raise
    except Exception as error:  # whatever the objectives raise when their tensors have no values
        raise TracingError(first_line(error)) from error
    graph, constants = _lift(module, len(leaves) + 1)
    read, returned, rare = facts
    return _Trace(run.method, batch, read, returned, rare, oracle.counts, dtype, device, graph, len(leaves), constants)


def _lift(module: fx.GraphModule, at: int) -> tuple[fx.Graph, Leaves]:
    """Return the graph without detach operations, and its constants, which become inputs from position ``at`` on.

    As inputs, they are not part of the text of the graph, so that problems with other data share a compiled function.
    """
    graph, lifted = module.graph, dict[Any, fx.Node]()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if node.target not in lifted:
                with graph.inserting_after([*inputs[:at], *lifted.values()][-1]):
                    lifted[node.target] = graph.placeholder(f"constant_{len(lifted)}")
            node.replace_all_uses_with(lifted[node.target])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:  # gradients are in the graph already
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    constants = [getattr(module, name) for name in lifted]
    for constant in constants:
        if not isinstance(constant, Tensor):
            raise TracingError(f"an objective uses a torch.{type(constant).__name__} of its own, which is no tensor")
    return graph, constants


class Recorded(Compiled):
    """Takes steps on modules that were recorded as a CUDA graph: all kernels of a step are launched at once.

    Python code in objectives and hooks of modules no longer runs then. The graph is compared with an eager step before use.
    """

    unrolled = 8

    def __init__(self, run: Run) -> None:
        if run.state.y.device.type != "cuda":
            raise TracingError("x or y is a module; without a GPU, compile the module instead, as in y0=torch.compile(module)")
        tensors: Leaves = []  # those that steps may change: leaves, buffers such as running statistics, moments
        self._optimizers: dict[str, RunningOptimizer] = {}
        for name, part in _parts_of(run, Variable, RunningOptimizer).items():
            if isinstance(part, Variable):
                tensors += [tensor.detach() for tensor in [*part.leaves, *part.buffers().values()]]
                continue
            if not part.make_capturable():
                raise TracingError(f"{name} cannot keep its step number on the GPU")
            self._optimizers[name] = part
            tensors += part.tensors()
        super().__init__(
            run, tensors, Facts(run.method, BatchForm(run.batch), [], [], [], Counts(), _number_dtype(run), run.state.y.device)
        )
        self._schedules = [optimizer.schedule for optimizer in self._optimizers.values()]

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        self._schedules = [optimizer.schedule for optimizer in self._optimizers.values()]
        return super().__call__(batches)

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
                rows = facts.table(run.k, 2, run.horizon)
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

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        for row, tensors in zip(table, batches, strict=True):
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
        batches: whether there are batches; a group has all of its batches in memory, and stays small then.

    Attributes:
        eager, compiled: what takes single steps, and groups of them; None as long as nothing is compiled.
        wanted: ``compile`` until it is decided, False after that.
    """

    def __init__(self, compile: bool | Literal["auto"], run: Run, max_steps: int, batches: bool) -> None:
        self.run, self.max_steps, self.wanted, self._asked = run, max_steps, compile, compile
        self._longest = 0 if batches else LONGEST
        self.eager = Eager(run)
        self.compiled: Compiled | None = None
        self._first: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        """The number of steps to take next."""
        k, left = self.run.k, self.max_steps - self.run.k
        if self.compiled is None or left < (unit := self.compiled.unrolled):  # the remainder at the end is taken eagerly
            return min(left, 1)
        steps = self.compiled.alike(max(unit, min(k // SHARE, left, self._longest) // unit * unit))
        return steps // unit * unit or 1

    def update(self) -> None:
        """Decide after a step whether to compile, and do so; the time this takes counts as time of the run."""
        begin = time.perf_counter()
        if self.wanted is True or (self.wanted and self._takes(WORTH_TRACING)):
            try:
                compiled = _build(self.run)
                enough = self.max_steps - self.run.k >= compiled.unrolled
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

    def differs(self, batches: Sequence[Any]) -> int | None:
        """Compare the last group with eager steps now and then; on a difference, go back, and continue eagerly.

        Returns:
            The number of the step to which the run went back; None if it did not.
        """
        difference = self.compiled.difference(batches) if isinstance(self.compiled, Traced) else ""
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
    parts = vars(run.state).values()
    return Recorded(run) if any(isinstance(part, Variable) and part.has_modules for part in parts) else Traced(run)
