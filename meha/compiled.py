"""Compiled runs: many steps of a method as one call.

A step on a small problem spends nearly all of its time in Python and in the calls of single operations. Here it is traced once
into a graph of tensor operations, gradients included; copies of the graph in a row are compiled by torch's inductor, and on a
GPU recorded as a CUDA graph. Steps on modules are recorded without the compiler. What is traced or recorded is the very
``step`` that runs otherwise.

The step number enters a step through :func:`meha.schedules.evaluate` alone, so that step sizes and penalties are inputs of the
graph. What a method or an objective decides in Python from the values of tensors cannot be traced, and is refused.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from meha._oracle import Counts, Oracle
from meha._torch import compile_graph, norm_operation, pytree
from meha._variables import Leaves, Variable, copy_, norm, subtract
from meha.methods._base import Run, State, StepInfo
from meha.methods._optimizers import RunningOptimizer
from meha.schedules import Schedule, evaluate

__all__ = ["CompileWarning", "Compiled", "Recorded", "Traced", "TracingError"]

OPERATIONS = 1000
"""About so many operations are compiled together; the time that the compiler takes grows with them."""

UNROLLED = 32
"""At most so many steps are."""

PLAIN = (bool, int, float, str, type(None))
"""What states and batches may hold besides variables and tensors: it becomes a part of the graph."""


def _norms(leaves: Leaves, ord: float = 2, dtype: torch.dtype | None = None) -> Leaves:
    return [torch.linalg.vector_norm(leaf, ord, dtype=dtype) for leaf in leaves]


def _ones(like: Tensor, **_: Any) -> Tensor:
    return like.new_ones(()).expand(like.shape)


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    norm_operation: _norms,  # for the list the compiler has no kernel
    torch.ops.aten.ones_like.default: _ones,  # needs no value of its argument
}
"""Operations that are traced in another form, of which the compiler makes more."""

_known: dict[Any, Callable[..., Any]] = {}
"""What was compiled in this process, by the text of the graph and the kinds of its inputs."""


class CompileWarning(UserWarning):
    """A run that was to be compiled runs step by step."""


class TracingError(Exception):
    """Why a run cannot be compiled."""


class Compiled(ABC):
    """Steps of a run in groups, without Python between them. A copy of what they change is kept, so that a group can be undone.

    Args:
        run: with at least one step done, in which what was left out is chosen and the objectives are checked.
        tensors: what the steps change.
        facts: what they take and tell.

    Attributes:
        unrolled: so many steps are one call; groups are multiples of it.
    """

    unrolled: int

    def __init__(self, run: Run, tensors: Leaves, facts: _Facts) -> None:
        self.run, self._tensors, self._facts = run, tensors, facts
        self._kept = [tensor.clone() for tensor in tensors]
        self._before = run.k, run.counts

    @staticmethod
    def of(run: Run) -> Compiled:
        """Tensors are traced and compiled; modules on a GPU are recorded.

        Raises:
            TracingError: the steps of the run cannot be.
        """
        return Recorded(run) if any(variable.has_modules for variable in _variables(run.state).values()) else Traced(run)

    @property
    def known(self) -> bool:
        """Whether it takes no time, because it was done before."""
        return False

    @abstractmethod
    def compile(self) -> None:
        """Do what is done once.

        Raises:
            TracingError: it fails.
        """

    @abstractmethod
    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        """So many steps as are one call, with a row of numbers and the tensors of a batch each. What the last one tells."""

    def fits(self, batches: Sequence[Any]) -> bool:
        """Whether the batches have the form of the first one."""
        return all(self._facts.batch.match(batch) is not None for batch in batches)

    def __call__(self, batches: Sequence[Any]) -> tuple[StepInfo, float, float]:
        """A step for each batch. The numbers of the last one, the norm of (x, y) after it, and how far it moved them."""
        run, n, facts = self.run, len(batches), self._facts
        self._before = run.k, dataclasses.replace(run.counts)
        copy_(self._kept, self._tensors)
        table = facts.table(run.k, n)
        tensors = [facts.batch.match(batch) or [] for batch in batches]
        for i in range(0, n, self.unrolled):
            told = self._call(table[i : i + self.unrolled], tensors[i : i + self.unrolled])
        *numbers, size, moved = told.tolist()
        run.state.k += n
        run.batch = batches[-1]
        run.counts.add(facts.counts, n)
        return StepInfo(run.k, dict(zip(facts.names, numbers, strict=True)), span=n), size, moved

    def rewind(self) -> None:
        """Undo the last call."""
        copy_(self._tensors, self._kept)
        self.run.state.k, self.run.oracle.counts = self._before


class Traced(Compiled):
    """Steps on tensors, traced into a graph, and compiled.

    Args:
        unrolled: how many steps are compiled as one; by default as many as pay.

    >>> from meha.methods.meha import MEHA
    >>> from meha.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> compiled = Traced(run, unrolled=2)
    >>> compiled.compile()
    >>> info, size, moved = compiled([None] * 4)
    >>> info.step, run.counts
    (5, Counts(upper=10, lower=20, hvp=0))
    """

    def __init__(self, run: Run, unrolled: int | None = None) -> None:
        self._trace = trace = _trace(run)
        super().__init__(run, [leaf.detach() for variable in _variables(run.state).values() for leaf in variable.leaves], trace)
        self.unrolled = unrolled or max(1, min(UNROLLED, OPERATIONS // trace.operations))
        kinds = [_kind(tensor) for tensor in self._example()]
        self._key = (trace.text, self.unrolled, torch.get_num_threads(), *kinds)
        self._function: Callable[..., Any] | None = None

    @property
    def known(self) -> bool:
        return self._key in _known

    def compile(self) -> None:
        inputs = self._example()
        try:
            if not self.known:
                _known[self._key] = self._trace.compile(self.unrolled, inputs)
            self._function = _known[self._key]
            if inputs[0].is_cuda:
                self._function = self._record(self._function, inputs)
        except Exception as error:  # whatever the compiler, or the machine's C++ compiler, has to say
            raise TracingError(f"the compiler failed: {_first_line(error)}") from error

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        assert self._function is not None
        return self._function(*self._inputs(table, batches))[0]

    def _inputs(self, table: Tensor, batches: list[Leaves]) -> Leaves:
        return [*self._tensors, table, *self._trace.constants, *[tensor for batch in batches for tensor in batch]]

    def _example(self) -> Leaves:
        return self._inputs(self._facts.table(self.run.k, self.unrolled), [self._facts.batch.tensors] * self.unrolled)

    def _record(self, function: Callable[..., Any], inputs: Leaves) -> Callable[..., Any]:
        """The function as a CUDA graph."""
        fixed = {tensor.data_ptr() for tensor in [*self._tensors, *self._trace.constants]}
        static = [tensor if tensor.data_ptr() in fixed else tensor.clone() for tensor in inputs]
        moving = [i for i, tensor in enumerate(inputs) if tensor.data_ptr() not in fixed]
        replay = _record(lambda: function(*static))
        copy_(self._tensors, self._kept)

        def call(*given: Tensor) -> Any:
            for i in moving:
                static[i].copy_(given[i])
            return replay()

        return call


class Recorded(Compiled):
    """Steps on modules, recorded as a CUDA graph: the kernels of a step, launched together.

    Python in the objectives and hooks of modules then run no more. That the graph does what the step does is tried out.
    """

    unrolled = 8

    def __init__(self, run: Run) -> None:
        state = run.state
        if state.y.device.type != "cuda":
            raise TracingError("x or y is a module; without a GPU, compile the module instead, as in y0=torch.compile(module)")
        _check_state(run, Variable, RunningOptimizer)
        optimizers = {name: value for name, value in vars(state).items() if isinstance(value, RunningOptimizer)}
        for name, optimizer in optimizers.items():
            if not optimizer.make_capturable():
                raise TracingError(f"{name} has a scheduler, or cannot keep its step number on the GPU")
        tensors = [tensor for variable in _variables(state).values() for tensor in _changing(variable)]
        tensors += [tensor for optimizer in optimizers.values() for tensor in optimizer.tensors()]
        facts = _Facts(_Batch(run.batch), {}, [], Counts(), _dtype(run), state.y.device)
        super().__init__(run, tensors, facts)

    def compile(self) -> None:
        run, facts = self.run, self._facts
        batch = _Batch(facts.batch.put([tensor.clone() for tensor in facts.batch.tensors]))
        self._static, self._row = batch.tensors, torch.ones(32, dtype=facts.dtype, device=facts.device)
        given = batch.put(batch.tensors)

        def step() -> Tensor:
            oracle = run.oracle.bare()
            told, facts.schedules, facts.names = _told(run, oracle, {}, self._row, given)
            facts.counts = oracle.counts
            return told

        try:
            with torch.random.fork_rng([facts.device]):
                step()  # tells which numbers there are
                rows = facts.table(run.k, 2)
                ends = []
                for once in (step, _record(step)):
                    copy_(self._tensors, self._kept)
                    for row in rows:
                        self._row[: len(row)] = row
                        once()
                    ends.append([tensor.to(facts.dtype, copy=True) for tensor in self._tensors])
            self._replay = once
        except TracingError:
            raise
        except Exception as error:  # whatever objectives do that a graph cannot hold
            raise TracingError(f"a step cannot be recorded: {_first_line(error)}") from error
        finally:
            copy_(self._tensors, self._kept)
        moved, apart = (norm(subtract(ends[0], other)) for other in (self._kept, ends[1]))
        if not apart <= 1e-3 * moved:
            raise TracingError("the graph of a step gives other numbers than the step, because of random numbers, or of Python")

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        for row, tensors in zip(table, batches, strict=True):
            self._row[: len(row)] = row
            for static, tensor in zip(self._static, tensors, strict=True):
                static.copy_(tensor)
            told = self._replay()
        return told


def _record(function: Callable[[], Any]) -> Callable[[], Any]:
    """The kernels that a function launches, as a CUDA graph; what it returned is overwritten by every replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # so that kernels are loaded, which cannot be done while a graph is recorded
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


class _Batch:
    """A batch for a trace: nested dicts and lists of tensors, and of plain values that are the same in all batches."""

    def __init__(self, batch: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten(batch)
        foreign = [type(leaf).__name__ for leaf in self.leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        if foreign:
            raise TracingError(f"the batch holds {foreign[0]}, and only tensors in dicts, lists and tuples can be traced")
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.form = [_kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def match(self, batch: Any) -> Leaves | None:
        """The tensors of another batch, if it has the same form."""
        if batch is None:
            return [] if self.leaves == [None] else None
        try:
            other = _Batch(batch)
        except TracingError:
            return None
        return other.tensors if (other.spec, other.form) == (self.spec, self.form) else None

    def put(self, tensors: Sequence[Tensor]) -> Any:
        """The batch with other tensors."""
        fresh = iter(tensors)
        return pytree.tree_unflatten([next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


class _Step:
    """The number of a traced step; what depends on it is an entry of a row of numbers, in the order of first use."""

    def __init__(self, row: Tensor) -> None:
        self.row = row
        self.schedules: dict[str, tuple[Schedule, bool]] = {}

    def number(self, name: str, schedule: Schedule, zero: bool) -> Tensor:
        self.schedules.setdefault(name, (schedule, zero))
        return self.row[list(self.schedules).index(name)]


@dataclasses.dataclass
class _Facts:
    """What a step takes and tells.

    Attributes:
        schedules: of the numbers that it takes, by name.
        names: of the numbers that it tells, besides the norm of (x, y) and how far it moved.
        counts: its gradients.
        dtype, device: of the numbers.
    """

    batch: _Batch
    schedules: dict[str, tuple[Schedule, bool]]
    names: list[str]
    counts: Counts
    dtype: torch.dtype
    device: torch.device

    def table(self, k: int, n: int) -> Tensor:
        """The numbers of n steps from k on, a row each."""
        table = torch.empty(n, len(self.schedules), dtype=self.dtype)
        for i, (name, (schedule, zero)) in enumerate(self.schedules.items()):
            if callable(schedule):
                values = [evaluate(name, schedule, k + j, zero=zero) for j in range(n)]
                table[:, i] = torch.tensor(values, dtype=table.dtype)
            else:
                table[:, i] = schedule
        return table.to(self.device)


@dataclasses.dataclass
class _Trace(_Facts):
    """A step as a graph that changes its first inputs in place, and gives the numbers of the step.

    Attributes:
        graph: its inputs are the leaves of the state, a row of numbers, constants, and the tensors of a batch.
        leaves: how many there are.
        constants: tensors that the objectives and the method use besides the variables.
    """

    graph: fx.Graph
    leaves: int
    constants: Leaves

    @property
    def text(self) -> str:
        """Equal for equal computations."""
        return str(self.graph.python_code("self").src)

    @property
    def operations(self) -> int:
        """How many a step consists of, without those that only its numbers need."""
        return len(self.unroll(2).graph.nodes) - len(self.unroll(1).graph.nodes)

    def compile(self, steps: int, inputs: Leaves) -> Callable[..., Any]:
        """Several steps as one function of the leaves, a table of numbers, the constants, and a batch for each step."""
        random = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.nodes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own parts
            return compile_graph(self.unroll(steps), inputs, random=random)

    def unroll(self, steps: int) -> fx.GraphModule:
        """The graph of several steps."""
        graph = fx.Graph()
        first, row, constants, tensors = self._inputs()
        leaves = [graph.placeholder(f"leaf_{i}") for i in range(len(first))]
        table = graph.placeholder("table")
        shared = [graph.placeholder(f"constant_{i}") for i in range(len(constants))]
        batches = [[graph.placeholder(f"batch_{j}_{i}") for i in range(len(tensors))] for j in range(steps)]
        for j, batch in enumerate(batches):
            own = graph.call_function(torch.ops.aten.select.int, (table, 0, j))
            given = zip([*first, row, *constants, *tensors], [*leaves, own, *shared, *batch], strict=True)
            told = graph.graph_copy(self.graph, dict(given))
        graph.output((told,))
        graph.eliminate_dead_code()  # of the numbers of all steps but the last
        return fx.GraphModule(torch.nn.Module(), graph)

    def _inputs(self) -> tuple[list[fx.Node], fx.Node, list[fx.Node], list[fx.Node]]:
        found = [node for node in self.graph.nodes if node.op == "placeholder"]
        m, n = self.leaves, self.leaves + 1 + len(self.constants)
        return found[:m], found[m], found[m + 1 : n], found[n:]


def _trace(run: Run) -> _Trace:
    """The next step as a graph; that of the run is not done."""
    first = _trace_once(run)
    if any(first.text == text for text, *_ in _known):  # an earlier run had the same
        return first
    second = _trace_once(run)
    same = all(a is b or torch.equal(a, b) for a, b in zip(first.constants, second.constants, strict=False))
    if first.text != second.text or not same:
        raise TracingError("the objectives are not the same function each time that they are called")
    return first


def _trace_once(run: Run) -> _Trace:
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    _check_state(run, Variable)
    variables, batch, dtype = _variables(run.state), _Batch(run.batch), _dtype(run)
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
        told, *facts[:] = _told(run, oracle, own, row, batch.put(tensors))
        return told

    row = torch.ones(32, dtype=dtype, device=device)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            module = make_fx(step, decomposition_table=DECOMPOSED)(*leaves, row, *batch.tensors)
    except TracingError:
        raise
    except Exception as error:  # whatever the objectives raise when their tensors have no values
        raise TracingError(_first_line(error)) from error
    graph, constants = _lift(module, len(leaves) + 1)
    schedules, names = facts
    return _Trace(batch, schedules, names, oracle.counts, dtype, device, graph, len(leaves), constants)


def _told(
    run: Run, oracle: Oracle, own: dict[str, Variable], row: Tensor, batch: Any
) -> tuple[Tensor, dict[str, tuple[Schedule, bool]], list[str]]:
    """A step with numbers from a row. What it tells, with the norm of (x, y) after it and how far it moved, as a vector; of
    what the row consists; and what it tells by name.

    Args:
        own: variables in the place of those of the run.
    """
    state, k = run.state, _Step(row)
    at = dataclasses.replace(state, k=cast(int, k), **own)
    point = at.x.leaves + at.y.leaves
    with torch.no_grad():
        before = [leaf.clone() for leaf in point]
        numbers = run.method.step(oracle, at, batch)
        told = [number() if callable(number) else number for number in numbers.values()]
        told += [norm(point), norm(subtract(point, before))]
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            if field.name != "k" and isinstance(value, PLAIN) and getattr(at, field.name) != value:
                raise TracingError(f"{run.method.name} changes a number of its own ({field.name}) in Python")
        vector = torch.stack([torch.as_tensor(number, device=row.device).double() for number in told])
    return vector, k.schedules, list(numbers)


def _lift(module: fx.GraphModule, at: int) -> tuple[fx.Graph, Leaves]:
    """The graph without what only matters to autograd, and its constants, which become inputs at a position."""
    graph, found = module.graph, dict[Any, fx.Node]()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if node.target not in found:
                with graph.inserting_after([*inputs[:at], *found.values()][-1]):
                    found[node.target] = graph.placeholder(f"constant_{len(found)}")
            node.replace_all_uses_with(found[node.target])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph, [getattr(module, name) for name in found]


def _check_state(run: Run, *kinds: type) -> None:
    """Raise if the state holds anything besides numbers and these kinds."""
    for name, value in vars(run.state).items():
        if not isinstance(value, (*PLAIN, *kinds)):
            raise TracingError(f"{run.method.name} keeps a {type(value).__name__} ({name}), which works in Python")


def _variables(state: State) -> dict[str, Variable]:
    return {name: value for name, value in vars(state).items() if isinstance(value, Variable)}


def _changing(variable: Variable) -> Leaves:
    return [tensor.detach() for tensor in [*variable.leaves, *variable.buffers().values()]]


def _dtype(run: Run) -> torch.dtype:
    """For the numbers of steps: that of the leaves, but no half precision."""
    dtype = torch.float32
    for leaf in run.state.x.leaves + run.state.y.leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
