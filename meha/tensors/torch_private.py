"""The private names of torch that the library uses, in one place.

Tried with torch 2.8 to 2.13; pyproject.toml bounds torch accordingly. A test refuses such names in other files.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

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


def under_trace() -> bool:
    """Whether operations are being traced, so that tensors have no values."""
    return _get_current_dispatch_mode() is not None


class RefusingValues(TorchFunctionMode):
    """A context for traces that refuses to turn tensors which depend on the inputs into numpy arrays or lists.

    A trace would record what is computed from these as a constant.

    Args:
        error: makes the exception to raise, from the name of the function that was called.
    """

    LEAVING = frozenset({"numpy", "tolist", "__array__", "__dlpack__"})
    """Others, such as item, are refused by the trace itself."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self._error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.LEAVING and isinstance(args[0], Tensor) and _is_traced(args[0]):
            raise self._error(name)
        return func(*args, **(kwargs or {}))


def _is_traced(tensor: Tensor) -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

    mode = get_proxy_mode()
    return mode is not None and has_proxy_slot(tensor, mode.tracer)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Tensor], *, random: bool) -> Callable[..., Any]:
    """Compile a graph by inductor, through torch's cache on disk.

    Args:
        random: whether the graph draws random numbers.
    """
    inductor = importlib.import_module("torch._inductor")  # takes seconds
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))  # without it, torch's cache on disk is not used
    with torch.no_grad(), tracing(context):
        # Reordering loops between fusions fails on a GPU with torch 2.11 (an assertion in the scheduler).
        # With fallback_random, compiled code draws the same random numbers as eager code.
        options = {"fallback_random": random, "loop_ordering_after_fusion": False}
        return inductor.compile(module, [*inputs], options=options)
