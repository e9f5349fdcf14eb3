"""Compiled runs: many steps of a method as one call.

A step on a small problem spends nearly all of its time in Python and in the calls of single operations. Here it is traced once
into a graph of tensor operations, gradients included; copies of the graph in a row are compiled by torch's inductor, and on a
GPU recorded as a CUDA graph. What is traced is the very ``step`` that runs otherwise.

The step number enters a step through :func:`meha.schedules.evaluate` alone, so that step sizes and penalties are inputs of the
graph. What a method or an objective decides in Python from the values of tensors cannot be traced, and is refused.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from meha.methods.base import Run, State, StepInfo
from meha.oracle import Counts
from meha.schedules import Schedule, evaluate
from meha.variables import Leaves, Variable, copy_, norm, subtract

__all__ = ["CompileWarning", "Compiled", "TracingError"]

OPERATIONS = 2000
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
    torch.ops.aten._foreach_norm.Scalar: _norms,  # for the list the compiler has no kernel
    torch.ops.aten.ones_like.default: _ones,  # needs no value of its argument
}
"""Operations that are traced in another form, of which the compiler makes more."""

_known: dict[Any, Callable[..., Any]] = {}
"""What was compiled in this process, by the text of the graph and the kinds of its inputs."""


class CompileWarning(UserWarning):
    """A run that was to be compiled runs step by step."""


class TracingError(Exception):
    """Why a run cannot be compiled."""


class Compiled:
    """The steps of a run, traced, and compiled in groups when they are first called.

    Args:
        run: with at least one step done, in which what was left out is chosen and the objectives are checked.
        unrolled: how many steps are compiled as one; by default as many as pay.

    Raises:
        TracingError: the step cannot be traced.

    Attributes:
        unrolled: see above; calls take a multiple of it.

    >>> from meha.methods.meha import MEHA
    >>> from meha.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> compiled = Compiled(run, unrolled=2)
    >>> info, size, moved = compiled([None] * 4)
    >>> info.step, run.counts
    (5, Counts(upper=10, lower=20, hvp=0))
    """

    def __init__(self, run: Run, unrolled: int | None = None) -> None:
        self.run = run
        self._trace = trace = _trace(run)
        self._tensors = [leaf.detach() for variable in _variables(run.state).values() for leaf in variable.leaves]
        self._kept = [tensor.clone() for tensor in self._tensors]
        self._before = run.k, run.counts
        self.unrolled = unrolled or max(1, min(UNROLLED, OPERATIONS // trace.operations))
        inputs = self._inputs(self._table(self.unrolled), [trace.batch.tensors] * self.unrolled)
        kinds = [_kind(tensor) for tensor in inputs]
        self._key = (trace.text, self.unrolled, torch.get_num_threads(), *kinds)
        self._call: Callable[[Tensor, list[Leaves]], Tensor] | None = None

    @property
    def known(self) -> bool:
        """Whether something of this form was compiled before in this process."""
        return self._key in _known

    def compile(self) -> None:
        """Compile, unless that was done before.

        Raises:
            TracingError: the compiler fails.
        """
        inputs = self._inputs(self._table(self.unrolled), [self._trace.batch.tensors] * self.unrolled)
        try:
            if not self.known:
                _known[self._key] = self._trace.compile(self.unrolled, inputs)
            function = _known[self._key]
            if self._tensors[0].is_cuda:
                function = self._record(function, inputs)
        except Exception as error:  # whatever the compiler, or the machine's C++ compiler, has to say
            raise TracingError(f"the compiler failed: {_first_line(error)}") from error
        self._call = lambda table, batches: function(*self._inputs(table, batches))[0]

    def fits(self, batches: Sequence[Any]) -> bool:
        """Whether the batches have the form of the one that was traced."""
        return all(self._trace.batch.match(batch) is not None for batch in batches)

    def __call__(self, batches: Sequence[Any]) -> tuple[StepInfo, float, float]:
        """A step for each batch. The numbers of the last one, the norm of (x, y) after it, and how far it moved them."""
        if self._call is None:
            self.compile()
        assert self._call is not None
        run, n = self.run, len(batches)
        self._before = run.k, dataclasses.replace(run.counts)
        copy_(self._kept, self._tensors)
        table = self._table(n)
        tensors = [self._trace.batch.match(batch) or [] for batch in batches]
        for i in range(0, n, self.unrolled):
            part = slice(i, i + self.unrolled)
            told = self._call(table[part], tensors[part])
        *numbers, size, moved = told.tolist()
        run.state.k += n
        run.batch = batches[-1]
        counts, each = run.counts, self._trace.counts
        counts.upper, counts.lower, counts.hvp = (
            counts.upper + n * each.upper,
            counts.lower + n * each.lower,
            counts.hvp + n * each.hvp,
        )
        return StepInfo(run.k, dict(zip(self._trace.names, numbers, strict=True)), span=n), size, moved

    def rewind(self) -> None:
        """Undo the last call."""
        copy_(self._tensors, self._kept)
        self.run.state.k, self.run.oracle.counts = self._before

    def _table(self, n: int) -> Tensor:
        """The numbers of the next n steps, a row each."""
        k, schedules = self.run.k, self._trace.schedules
        table = torch.empty(n, len(schedules), dtype=self._trace.dtype)
        for i, (name, (schedule, zero)) in enumerate(schedules.items()):
            if callable(schedule):
                values = [evaluate(name, schedule, k + j, zero=zero) for j in range(n)]
                table[:, i] = torch.tensor(values, dtype=table.dtype)
            else:
                table[:, i] = schedule
        return table.to(self._tensors[0].device)

    def _inputs(self, table: Tensor, batches: list[Leaves]) -> Leaves:
        return [*self._tensors, table, *self._trace.constants, *[tensor for batch in batches for tensor in batch]]

    def _record(self, function: Callable[..., Any], inputs: Leaves) -> Callable[..., Any]:
        """The function as a CUDA graph, which one launch replays."""
        fixed = [*self._tensors, *self._trace.constants]
        own = {tensor.data_ptr() for tensor in fixed}
        static = [tensor if tensor.data_ptr() in own else tensor.clone() for tensor in inputs]
        moving = [i for i, tensor in enumerate(inputs) if tensor.data_ptr() not in own]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*static)  # kernels are loaded and tuned, and must not be while a graph is recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            told = function(*static)
        copy_(self._tensors, self._kept)

        def replay(*given: Tensor) -> Any:
            for i in moving:
                static[i].copy_(given[i])
            graph.replay()
            return told

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
class _Trace:
    """A step as a graph that changes its first inputs in place, and gives the numbers of the step.

    Attributes:
        graph: its inputs are the leaves of the state, a row of numbers, constants, and the tensors of a batch.
        constants: tensors that the objectives and the method use besides the variables.
        schedules: what the columns of the row are.
        names: what the results are, besides the norm of (x, y) and how far it moved.
        counts: the gradients of a step.
    """

    graph: fx.Graph
    leaves: int
    constants: Leaves
    batch: _Batch
    schedules: dict[str, tuple[Schedule, bool]]
    names: list[str]
    counts: Counts
    dtype: torch.dtype

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
        import torch._inductor  # takes seconds
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        random = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.nodes)
        context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))  # without which torch's cache on disk is not used
        with torch.no_grad(), tracing(context), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own parts
            return torch._inductor.compile(self.unroll(steps), [*inputs], options={"fallback_random": random})

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
    first, second = _trace_once(run), _trace_once(run)
    same = all(a is b or torch.equal(a, b) for a, b in zip(first.constants, second.constants, strict=False))
    if first.text != second.text or not same:
        raise TracingError("the objectives are not the same function each time that they are called")
    return first


def _trace_once(run: Run) -> _Trace:
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    state, method = run.state, run.method
    variables = _variables(state)
    for name, variable in variables.items():
        if variable.has_modules:
            raise TracingError(f"{name} is a module; compile the module instead, as in y0=torch.compile(module)")
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if field.name not in variables and not isinstance(value, PLAIN):
            raise TracingError(f"{method.name} keeps a {type(value).__name__} ({field.name}), which works in Python")
    batch = _Batch(run.batch)
    leaves = [leaf.detach().clone() for variable in variables.values() for leaf in variable.leaves]
    dtype = torch.float32
    for leaf in leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    oracle = run.oracle.bare()
    symbolic: list[_Step] = []
    names: list[str] = []

    def step(*inputs: Tensor) -> Tensor:
        fresh, row, tensors = iter(inputs[: len(leaves)]), inputs[len(leaves)], inputs[len(leaves) + 1 :]
        own = {}
        for name, variable in variables.items():
            value = variable.like([next(fresh).detach().requires_grad_() for _ in variable.leaves])
            own[name] = Variable.of(value, variable.argument)
        k: Any = _Step(row)
        at = dataclasses.replace(state, k=k, **own)
        point = own["x"].leaves + own["y"].leaves
        with torch.no_grad():
            before = [leaf.clone() for leaf in point]
            numbers = method.step(oracle, at, batch.put(tensors))
            told = {name: number() if callable(number) else number for name, number in numbers.items()}
            told |= {"": norm(point), " ": norm(subtract(point, before))}
            for field in dataclasses.fields(state):
                if field.name not in own and field.name != "k" and getattr(at, field.name) != getattr(state, field.name):
                    raise TracingError(f"{method.name} changes a number of its own ({field.name}) in Python")
            symbolic.append(k)
            names.extend(numbers)
            return torch.stack([torch.as_tensor(number, device=row.device).double() for number in told.values()])

    devices = [row_device] if (row_device := leaves[0].device).type == "cuda" else []
    row = torch.ones(32, dtype=dtype, device=row_device)
    try:
        with torch.random.fork_rng(devices):
            module = make_fx(step, decomposition_table=DECOMPOSED)(*leaves, row, *batch.tensors)
    except TracingError:
        raise
    except Exception as error:  # whatever the objectives raise when their tensors have no values
        raise TracingError(_first_line(error)) from error
    graph, constants = _lift(module, len(leaves) + 1)
    return _Trace(graph, len(leaves), constants, batch, symbolic[0].schedules, names, oracle.counts, dtype)


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


def _variables(state: State) -> dict[str, Variable]:
    return {name: value for name, value in vars(state).items() if isinstance(value, Variable)}


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
