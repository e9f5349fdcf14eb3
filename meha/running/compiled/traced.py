"""Steps on tensors, traced into a graph and compiled; and a check that objectives keep no state between calls."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from meha.method.method import Run, StepInfo
from meha.problem.loaders import random_states, set_random_states
from meha.running.compiled.steppers import (
    ROW,
    BatchForm,
    Compiled,
    Facts,
    TracingError,
    check_state,
    first_line,
    kind,
    number_dtype,
    record,
    traced_step,
    variables_of,
)
from meha.tensors.torch_private import RefusingValues, compile_graph, norm_operation
from meha.tensors.variables import Leaves, Variable, copy_, norm, subtract

DEPTH = 4  # how deep containers and objects are searched; cycles end there
MOST = 2000  # parts of one captured object that are examined, since it may be a whole data set


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
            if not isinstance(value, types.ModuleType | type):
                parts.setdefault(name, []).extend(part for _, part in zip(range(MOST), _parts(value, DEPTH), strict=False))
    return parts


def first_change(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> str | None:
    """Return the first name whose value changed; None if none did."""
    return next((name for name, value in after.items() if before.get(name) != value), None)


def _names(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function reads besides its arguments, and their values."""
    if isinstance(function, functools.partial):
        yield from _names(function.func)
        yield from _places(function.args)
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield from _names(function.__func__)
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
    elif isinstance(function, types.FunctionType):
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        yield from _places(function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
    elif hasattr(function, "__dict__"):
        yield from vars(function).items()


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
            if not isinstance(item, types.ModuleType | type):
                yield from _parts(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type):
        yield from _parts(vars(value), depth - 1)
    else:
        yield id(value)


OPERATIONS = 1000  # upper bound on the operations that are compiled together; the compiler's time grows with them
UNROLLED = 32  # upper bound on the number of steps per compiled call


def _norms(leaves: Leaves, ord: float = 2, dtype: torch.dtype | None = None) -> Leaves:
    return [torch.linalg.vector_norm(leaf, ord, dtype=dtype) for leaf in leaves]


def _ones(like: Tensor, **_: Any) -> Tensor:
    return like.new_ones(()).expand(like.shape)


DECOMPOSED: dict[Any, Callable[..., Any]] = {  # operations that are traced in another form, which compiles better
    norm_operation: _norms,  # the compiler has no kernel for the list
    torch.ops.aten.ones_like.default: _ones,  # needs no value of its argument
}

# Compiled and eager steps agree within these powers of the rounding error, times their length and the size of (x, y).
SAME_MOVE, SAME = 0.5, 0.75

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
        super().__init__(
            run, [leaf.detach() for variable in variables_of(run.state).values() for leaf in variable.leaves], trace
        )
        self.unrolled = unrolled or max(1, min(UNROLLED, OPERATIONS // trace.operations))
        kinds = [kind(tensor) for tensor in self._example()]
        self._key = (trace.text, self.unrolled, torch.get_num_threads(), *kinds)  # compiled loops are split among threads
        self._function: Callable[..., Any] | None = None
        self._start = [tensor.clone() for tensor in self._tensors]
        self._agreed = self._start, run.k, dataclasses.replace(run.counts)  # the eager steps so far are right

    @property
    def known(self) -> bool:
        """Return whether a compiled version is already cached."""
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
            raise TracingError(f"the compiler failed: {first_line(error)}") from error

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        assert self._function is not None
        return self._function(*self._inputs(table, batches))[0]

    def _keep_start(self) -> None:
        copy_(self._start, self._tensors)

    def difference(self, batches: Sequence[Any]) -> str:
        """Repeat the steps of the last compiled call eagerly, and say how the results differ; empty if they agree.

        Where they agree, the run continues from those of the compiled call.
        """
        if self._trace.random:  # the eager steps would draw other numbers
            return ""
        run, ends = self.run, [tensor.clone() for tensor in self._tensors]
        k, counts, states = run.k, dataclasses.replace(run.counts), random_states()
        copy_(self._tensors, self._start)
        run.state.k = k - self.unrolled
        difference = ""
        try:
            for batch in batches[-self.unrolled :]:
                info = run.step(batch)
            difference = self._apart(ends, info)
        except Exception as error:  # the eager steps that follow raise it again
            difference = f"a step raises {first_line(error)}"
        finally:
            set_random_states(states)
            copy_(self._tensors, ends)
            run.state.k, run.oracle.counts = k, counts  # the repeated steps do not count as work of the run
        if not difference:
            self._agreed = ends, k, counts
        return difference

    def _apart(self, ends: Leaves, info: StepInfo) -> str:
        """Say how ``ends`` differ from the present tensors, or which number of the last step is not finite; else empty."""
        strange = [name for name, value in info.items() if not math.isfinite(value)]
        eps = max(torch.finfo(tensor.dtype).eps for tensor in ends)
        apart, moved, size = (
            float(norm(part)) for part in (subtract(self._tensors, ends), subtract(self._tensors, self._start), self._tensors)
        )
        if strange:
            return f"{strange[0]} is {info[strange[0]]}"
        if apart <= eps**SAME_MOVE * moved + eps**SAME * size:
            return ""
        return f"x, y differ by {apart:.1e} after a way of {moved:.1e}"

    def give_up(self) -> int:
        """Go back to where compiled and eager steps last agreed, and return the number of that step."""
        tensors, run, counts = self._agreed[0], self.run, self._agreed[2]
        copy_(self._tensors, tensors)
        run.state.k, run.oracle.counts = self._agreed[1], counts
        return run.k

    def _inputs(self, table: Tensor, batches: list[Leaves]) -> Leaves:
        return [*self._tensors, table, *self._trace.constants, *[tensor for batch in batches for tensor in batch]]

    def _example(self) -> Leaves:
        return self._inputs(self._facts.table(self.run.k, self.unrolled), [self._facts.batch.tensors] * self.unrolled)

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
        """Return the graph as text, which is equal for equal computations."""
        return str(self.graph.python_code("self").src)

    @property
    def random(self) -> bool:
        """Return whether the step draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.nodes)

    @property
    def operations(self) -> int:
        """Return the number of operations of a step, without those that only its reported numbers need."""
        # Only the last step of a call reports its numbers, so that a further step adds just its own operations.
        return len(self.unroll(2).graph.nodes) - len(self.unroll(1).graph.nodes)

    def compile(self, steps: int, inputs: Leaves) -> Callable[..., Any]:
        """Compile several steps as one function of the leaves, a table of numbers, the constants, and a batch for each step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own parts
            return compile_graph(self.unroll(steps), inputs, random=self.random)

    def unroll(self, steps: int) -> fx.GraphModule:
        """Return the graph of several steps in a row."""
        graph = fx.Graph()
        first, row, constants, tensors = self._inputs()
        leaves = [graph.placeholder(f"leaf_{i}") for i in range(len(first))]
        table = graph.placeholder("table")
        shared = [graph.placeholder(f"constant_{i}") for i in range(len(constants))]
        batches = [[graph.placeholder(f"batch_{j}_{i}") for i in range(len(tensors))] for j in range(steps)]
        for j, batch in enumerate(batches):
            own = graph.call_function(torch.ops.aten.select.int, (table, 0, j))
            given = zip([*first, row, *constants, *tensors], [*leaves, own, *shared, *batch], strict=True)
            numbers = graph.graph_copy(self.graph, dict(given))
        graph.output((numbers,))
        graph.eliminate_dead_code()  # the reported numbers of all steps but the last
        return fx.GraphModule(torch.nn.Module(), graph)

    def _inputs(self) -> tuple[list[fx.Node], fx.Node, list[fx.Node], list[fx.Node]]:
        """Return the input nodes: the leaves, the row of numbers, the constants, the tensors of the batch."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        m, n = self.leaves, self.leaves + 1 + len(self.constants)
        return inputs[:m], inputs[m], inputs[m + 1 : n], inputs[n:]


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
    """Trace one step of copies of the variables.

    Raises:
        TracingError: it cannot be traced, such as a branch on the value of a tensor.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    check_state(run, Variable)
    variables, batch, dtype = variables_of(run.state), BatchForm(run.batch), number_dtype(run)
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
        vector, *facts[:] = traced_step(run, oracle, own, row, batch.put(tensors))
        return vector

    row = torch.ones(ROW, dtype=dtype, device=device)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), RefusingValues(_leaves_torch):
            module = make_fx(step, decomposition_table=DECOMPOSED)(*leaves, row, *batch.tensors)
    except TracingError:
        raise
    except Exception as error:  # whatever the objectives raise when their tensors have no values
        raise TracingError(first_line(error)) from error
    graph, constants = _lift(module, len(leaves) + 1)
    read, returned = facts
    return _Trace(run.method, batch, read, returned, oracle.counts, dtype, device, graph, len(leaves), constants)


def _leaves_torch(name: str) -> TracingError:
    """Return the error for a function that reads the values of tensors, such as ``numpy``."""
    return TracingError(f"an objective calls .{name}() on a tensor that depends on x or y, whose value would be frozen")


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
