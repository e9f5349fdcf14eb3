"""The private names of torch that the library uses, in one place.

Tried with torch 2.8 to 2.13; pyproject.toml bounds torch accordingly. A test refuses such names in other files.
"""

from __future__ import annotations

import hashlib
import importlib
import operator
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["TorchDispatchMode", "pytree"]  # imports that other modules take from here

BREAKDOWNS = (LinAlgError, ArithmeticError)  # errors of a step that end a run with a status instead of an exception

foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sub = torch._foreach_sub

norm_operation = torch.ops.aten._foreach_norm.Scalar


def backward(value: Tensor, leaves: Sequence[Tensor], *, graph: bool = False) -> Sequence[Tensor | None]:
    """Return the gradient, with None for unused leaves; unlike ``torch.autograd.grad``, it spends no time on checks.

    Args:
        graph: whether the gradient can be differentiated again.
    """
    ones = (torch.ones_like(value),)
    return _engine_run_backward((value,), ones, graph, graph, tuple(leaves), allow_unreachable=True, accumulate_grad=False)


def pull_back(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the vector-Jacobian product of outputs with cotangents, with None for unused leaves; the graph is kept.

    ``torch.autograd.grad`` with cotangents would import a system for symbolic algebra first.
    """
    return _engine_run_backward(
        tuple(outputs), tuple(cotangents), True, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )


def in_transform(tensor: Tensor) -> bool:
    """Whether a tensor is inside of a transform such as ``torch.func.vmap``, where only functions of torch itself work."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class LazyModule:
    """A module of torch that is imported at its first use, because the import is slow."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another one."""
    return tensor._base is not None


def has_gradient_hook(leaf: Tensor) -> bool:
    """Whether a hook runs after the gradient of a leaf is accumulated."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def wraps_gradients(module: nn.Module) -> str:
    """The wrapper of torch.distributed that averages the gradients of a module, other than ``fully_shard``; empty if none."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]  # by name, so that they need not be imported
    if ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel") in kinds:
        return "FullyShardedDataParallel"
    return "replicate() of DistributedDataParallel" if ("torch.distributed._composable.replicate", "DDP") in kinds else ""


def fsdp_dtype(module: Any) -> torch.dtype | None:
    """The dtype in which a module with ``fully_shard`` computes, if its policy names one."""
    policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None)


def plain_name(name: str) -> str:
    """The name of a parameter or buffer as it was before ``torch.compile`` wrapped modules."""
    return name.replace("_orig_mod.", "")


def compiled_parts(module: nn.Module) -> list[Any]:
    """Return the compiled code that ``torch.compile`` keeps in a module; copies of the module can share it."""
    return [vars(module)["dynamo_ctx"]] if "dynamo_ctx" in vars(module) else []


def from_compiled(error: BaseException) -> bool:
    """Whether an error was raised in code that ``torch.compile`` made."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("torch._functorch._aot_autograd") for frame, _ in frames)


def differentiable_once(value: Tensor) -> str:
    """The name of a function in the graph of a value that is marked with ``once_differentiable``; empty if there is none.

    Torch raises for it in some second backward passes only, and leaves its part out in others, as if it were zero.
    """
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)  # of functions in Python alone
        if getattr(getattr(backward, "__code__", None), "co_qualname", "").startswith("once_differentiable."):
            return node.name()
        seen.add(node)
        waiting += [other for other, _ in node.next_functions]
    return ""


def under_trace() -> bool:
    """Whether operations are being traced, so that tensors have no values."""
    return _get_current_dispatch_mode() is not None


class GraphRecorder(TorchDispatchMode):
    """A context that writes the operations on tensors, derivatives included, into a graph while they are computed.

    Args:
        inputs: tensors that become inputs of the graph.
        replaced: other forms of some operations.
        error: makes the exceptions to raise, from what cannot be recorded.

    Attributes:
        graph: its last inputs are the constants, in their order.
        constants: further tensors that the operations read.
    """

    NAMED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    """Types of arguments, besides tensors, that a graph can hold."""

    def __init__(
        self, inputs: Sequence[Tensor], replaced: dict[Any, Callable[..., Any]], error: Callable[[str], Exception]
    ) -> None:
        super().__init__()
        self.graph, self.constants = torch.fx.Graph(), list[Tensor]()
        self._replaced, self._error = replaced, error
        self._nodes: Any = WeakTensorKeyDictionary()  # so that intermediate results are freed as without a recorder
        for i, tensor in enumerate(inputs):
            self._nodes[tensor] = self._last_input = self.graph.placeholder(f"input_{i}")

    def computes(self, tensor: Tensor) -> bool:
        """Whether the value of a tensor is computed in the graph, so that Python must not read it."""
        return tensor in self._nodes and not self._nodes[tensor].meta.get("known")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._replaced:
            with self:
                return self._replaced[func](*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:  # its result is a number of Python
            if any(isinstance(leaf, Tensor) and self.computes(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
                raise self._error("a value of a tensor is read in Python, as by .item() or data-dependent control flow")
            return func(*args, **kwargs)
        self._check_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor | list | tuple | None):  # a question about a tensor, such as for its device
            return result
        node_args, node_kwargs = pytree.tree_map(self._node, (args, kwargs))
        if func is torch.ops.aten.detach.default:  # derivatives are in the graph already
            self._nodes[result] = node_args[0]
            return result
        fresh = func is torch.ops.aten.lift_fresh.default  # made of Python's numbers, whose values may be read
        if fresh:
            func = torch.ops.aten.clone.default  # a new tensor in each step, that may be written into
        node = self.graph.call_function(func, node_args, node_kwargs)
        node.meta["known"] = fresh
        if isinstance(result, Tensor):
            self._nodes[result] = node
        else:
            for i, part in enumerate(result or ()):
                if isinstance(part, Tensor):
                    self._nodes[part] = self.graph.call_function(operator.getitem, (node, i))
        return result

    def node(self, tensor: Tensor) -> torch.fx.Node:
        """The node of a tensor; a new input if it is a constant."""
        if tensor not in self._nodes:
            with self.graph.inserting_after(self._last_input):
                self._last_input = self.graph.placeholder(f"constant_{len(self.constants)}")
            self._last_input.meta["known"] = True
            self.constants.append(tensor)
            self._nodes[tensor] = self._last_input
        node: torch.fx.Node = self._nodes[tensor]
        return node

    def _node(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.node(leaf)
        if not isinstance(leaf, self.NAMED):
            raise self._error(f"an objective uses a torch.{type(leaf).__name__} of its own, which is no tensor")
        return leaf

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise if an operation writes into a constant; one that it writes into has no fixed value any more."""
        if not func._schema.is_mutable:
            return
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    if not isinstance(leaf, Tensor):
                        continue
                    node = self._nodes.get(leaf)
                    if node is None or (node.op == "placeholder" and node.meta.get("known")):
                        raise self._error("an objective writes into a tensor of its own, which later steps would read")
                    node.meta["known"] = False


class RefusingValues(TorchFunctionMode):
    """A context that refuses to turn tensors that a recorder computes into numpy arrays or lists, which it would not see."""

    LEAVING = frozenset({"numpy", "tolist", "__array__", "__dlpack__"})
    """Others, such as item, are operations."""

    def __init__(self, recorder: GraphRecorder, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self._recorder, self._error = recorder, error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.LEAVING and isinstance(args[0], Tensor) and self._recorder.computes(args[0]):
            raise self._error(f"an objective calls .{name}() on a tensor that depends on x or y, whose value would be frozen")
        return func(*args, **(kwargs or {}))


def functional(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return a graph that computes the same, for inputs like these, without writing into tensors."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:  # nothing is computed
        fake = [mode.from_tensor(tensor) for tensor in inputs]
        recorder = GraphRecorder(fake, {}, RuntimeError)
        with recorder:
            results = torch.func.functionalize(module, remove="mutations")(*fake)
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    recorder.graph.eliminate_dead_code()
    return torch.fx.GraphModule(torch.nn.Module(), recorder.graph)


def compile_graph(
    module: torch.fx.GraphModule, inputs: Sequence[Tensor], *, random: bool = False, loop: str = ""
) -> Callable[..., Any]:
    """Compile a graph by inductor, through torch's cache on disk.

    Args:
        random: whether the graph draws random numbers.
        loop: if the graph has loops, a text that tells its inputs from others.
    """
    inductor = importlib.import_module("torch._inductor")  # takes seconds
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))  # without it, torch's cache on disk is not used
    # Reordering loops between fusions fails on a GPU with torch 2.11 (an assertion in the scheduler).
    # With fallback_random, compiled code draws the same random numbers as eager code.
    options: dict[str, Any] = {"fallback_random": random, "loop_ordering_after_fusion": False}
    if loop:
        # Otherwise the turns of a loop are calls from Python. The cache takes loops with a key of ours only.
        texts = [loop, *(part.code for part in module.modules() if isinstance(part, torch.fx.GraphModule))]
        key = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        options |= {"cpp_wrapper": True, "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": key}}
    with torch.no_grad(), tracing(context):
        return inductor.compile(module, [*inputs], options=options)
