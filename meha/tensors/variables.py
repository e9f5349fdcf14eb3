"""Variables: x and y as lists of tensors, for any structure of the user, and arithmetic on such lists."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from meha.tensors.distributed import check_module, is_dtensor, local, sharded_modules, total
from meha.tensors.torch_private import (
    compiled_parts,
    foreach_add_,
    foreach_copy_,
    foreach_mul,
    foreach_norm,
    foreach_sub,
    has_gradient_hook,
    is_view,
    plain_name,
)

KINDS = "a tensor, nested dicts or lists of tensors, or an nn.Module"


def named_leaves(value: Any, argument: str = "variable") -> dict[str, Tensor]:
    """Return the tensors of ``value`` that are optimised, by dotted name.

    A bare tensor has the empty name. A module contributes its parameters that require gradients, under their names, which
    ``torch.compile`` does not change.

    >>> list(named_leaves({"w": torch.zeros(2), "layers": [torch.zeros(1), torch.zeros(3)]}))
    ['w', 'layers.0', 'layers.1']
    """
    leaves: dict[str, Tensor] = {}
    seen: set[int] = set()
    inside: list[tuple[str, Tensor]]
    for prefix, part in named_parts(value):
        if isinstance(part, nn.Module):
            inside = [(join(prefix, plain_name(key)), leaf) for key, leaf in part.named_parameters() if leaf.requires_grad]
        elif isinstance(part, Tensor):
            inside = [(prefix, part)]
        else:
            where = f"{argument}[{prefix!r}]" if prefix else argument
            remedy = "Wrap numbers and arrays with torch.as_tensor(..., dtype=torch.float64)."
            raise TypeError(f"{where}: got {type(part).__name__}, expected {KINDS}. {remedy}")
        for name, leaf in inside:
            if id(leaf) in seen:  # a tensor that occurs twice (tied weights) is one unknown
                continue
            if name in leaves:
                raise ValueError(f"{argument}: two tensors are named {name!r}; rename a key (dots separate levels).")
            seen.add(id(leaf))
            leaves[name] = leaf
    return leaves


def select(part: str | Sequence[str] | None, names: Sequence[str], argument: str) -> list[int]:
    """Return the indices of the leaves named by ``part`` or below it; all if it is None."""
    if part is None:
        return list(range(len(names)))
    wanted = [part] if isinstance(part, str) else list(part)
    if not wanted:
        raise ValueError(f"{argument}: is empty; name a leaf, or leave it out to take all.")
    chosen: list[int] = []
    for want in wanted:
        matching = [i for i, name in enumerate(names) if name == want or name.startswith(want + ".")]
        if not matching:
            known = ", ".join(repr(name) for name in names) or "none"
            raise ValueError(f"{argument}: no leaf is named {want!r}; the leaves are {known}.")
        chosen += [i for i in matching if i not in chosen]  # a leaf and its branch may both be named
    return chosen


def named_parts(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested dicts and lists hold, with dotted names."""
    if not isinstance(value, Mapping | list | tuple):
        yield prefix, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from named_parts(item, join(prefix, str(key)))


def named_modules(value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a value with their dotted names."""
    return ((name, part) for name, part in named_parts(value) if isinstance(part, nn.Module))


def modules_of(value: Any) -> Iterator[nn.Module]:
    """Yield the modules in a value: itself, or those in its dicts and lists."""
    return (module for _, module in named_modules(value))


def join(prefix: str, name: str) -> str:
    """Return the dotted name of an item inside of ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


_sharing: ContextVar[bool] = ContextVar("sharing", default=False)


@contextmanager
def sharing() -> Iterator[None]:
    """Make states of the tensors themselves instead of copies: for one that is written to a file before anything changes."""
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def kept(tensor: Tensor) -> Tensor:
    """Return a tensor for a state: a copy, or the tensor itself while :func:`sharing`, or if it is a frozen parameter."""
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad  # which nothing changes, and which may be large
    tensor = tensor.detach()
    shares = (frozen or _sharing.get()) and not is_dtensor(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if shares else tensor.clone()  # a file would hold all that a view is a part of


def fresh_leaf(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that requires gradients if its dtype allows it."""
    fresh = tensor.detach().clone(memory_format=torch.contiguous_format)
    return fresh.requires_grad_() if fresh.is_floating_point() else fresh  # others are refused later, by name


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    """Apply ``function`` to every tensor outside modules; objects in ``memo`` are replaced."""
    if id(value) in memo:
        return memo[id(value)]
    result: Any = value
    if isinstance(value, Tensor):
        result = function(value)
    elif isinstance(value, Mapping):
        result = {key: map_tensors(item, function, memo) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        result = type(value)(*(map_tensors(item, function, memo) for item in value))
    elif isinstance(value, list | tuple):
        result = type(value)(map_tensors(item, function, memo) for item in value)
    memo[id(value)] = result  # what occurs twice is mapped once, so that ties are kept
    return result


Leaves = list[Tensor]


def norm(*variables: Leaves) -> Tensor:
    """Return the Euclidean norm of all leaves together, as a tensor (no synchronisation)."""
    leaves = [leaf for group in variables for leaf in group]
    if len(leaves) == 1 and not is_dtensor(leaves[0]):  # one call instead of two, as in most small problems
        return torch.linalg.vector_norm(leaves[0])
    return join_norms(list(foreach_norm(local(leaves))), leaves)


def norms(*groups: Leaves) -> list[float]:
    """Return the norms of groups of equally many leaves, as numbers: the host waits for the device once."""
    leaves = [leaf for group in groups for leaf in group]
    if any(is_dtensor(leaf) for leaf in leaves):
        return [float(norm(group)) for group in groups]
    parts = torch.stack(foreach_norm(leaves)).view(len(groups), -1)
    return [float(size) for size in torch.linalg.vector_norm(parts, dim=1).tolist()]


def join_norms(norms: list[Tensor], leaves: Leaves) -> Tensor:
    """Return the norm of all leaves from the norms of the parts that this process holds."""
    if not any(is_dtensor(leaf) for leaf in leaves):
        return torch.linalg.vector_norm(torch.stack(norms))
    return total([part.square() for part in norms], leaves).sqrt()  # squares, and not norms, add up over processes


def mean_size(leaf: Tensor) -> Tensor:
    """Return the mean of the absolute values of a leaf."""
    if not is_dtensor(leaf):
        return leaf.abs().mean()
    return total([local([leaf])[0].abs().sum()], [leaf]) / leaf.numel()


def all_finite(leaves: Leaves) -> bool:
    """Whether all leaves are finite; the host waits for the device."""
    return not bool(total([(~torch.isfinite(part)).sum() for part in local(leaves)], leaves))


def inner(a: Leaves, b: Leaves) -> Tensor:
    """Return the inner product of all leaves together, in the dtype of ``b``, as a tensor (no synchronisation)."""
    return total([torch.dot(u.reshape(-1).to(v.dtype), v.reshape(-1)) for u, v in zip(local(a), local(b), strict=True)], a)


def add_(leaves: Leaves, direction: Leaves, scale: float | Tensor) -> None:
    """Compute leaves <- leaves + scale * direction in place."""
    leaves, direction = local(leaves), local(direction)
    if isinstance(scale, Tensor):
        foreach_add_(leaves, foreach_mul(direction, scale))  # alpha must be a number, and reading one would synchronise
    elif len(leaves) == 1:
        leaves[0].add_(direction[0], alpha=scale)
    else:
        foreach_add_(leaves, direction, alpha=scale)


def scaled(leaves: Leaves, factor: Tensor) -> Leaves:
    """Return factor * leaves as new leaves, and empty the list of the old ones to free their memory."""
    if any(is_dtensor(leaf) for leaf in leaves):
        return [leaves.pop(0) * factor for _ in range(len(leaves))]
    products = list(foreach_mul(leaves, factor))
    leaves.clear()
    return products


def subtract(a: Leaves, b: Leaves) -> Leaves:
    """Return a - b as new leaves."""
    if len(a) == 1 or any(is_dtensor(leaf) for leaf in a):
        return [u - v for u, v in zip(a, b, strict=True)]
    return list(foreach_sub(a, b))


def distance(a: Leaves, b: Leaves) -> Tensor:
    """Return the Euclidean norm of a - b leaf by leaf, as a tensor (no synchronisation)."""
    parts = [torch.dist(u, v) for u, v in zip(local(a), local(b), strict=True)]
    return parts[0] if len(parts) == 1 and not is_dtensor(a[0]) else join_norms(parts, a)


def add_difference_(gradient: Leaves, a: Leaves, b: Leaves, scale: float | Tensor) -> None:
    """Compute gradient <- gradient + scale * (a - b) leaf by leaf, with new tensors in the list.

    (The old tensors are not written to, because autograd may return views, or one tensor twice.)
    """
    for i in range(len(gradient)):
        difference = a[i] - b[i]
        if isinstance(scale, Tensor):
            gradient[i] = gradient[i] + scale * difference
        else:
            mine, sum_ = local([gradient[i], difference])
            torch.add(mine, sum_, alpha=scale, out=sum_)  # sum_ shares the memory of the difference, which saves a third tensor
            gradient[i] = difference


def copy_(leaves: Leaves, source: Leaves) -> None:
    """Compute leaves <- source in place."""
    leaves, source = local(leaves), local(source)
    if len(leaves) == 1:
        leaves[0].copy_(source[0])
    else:
        foreach_copy_(leaves, source)


def short_step(leaves: Leaves, directions: Leaves) -> float:
    """Return the step of a forward difference along ``directions``, which moves the leaves by sqrt(eps) of their size."""
    eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves)
    # sqrt(eps) balances the rounding error of a forward difference, about eps / step, and its truncation error, about step.
    return math.sqrt(eps) * (1 + float(norm(leaves))) / (float(norm(directions)) or 1.0)


class Variable:
    """A value of x or y together with its leaves.

    Args:
        value: the object that objectives get.
        argument: its name in error messages (``"x"``, ``"y"``).
        shared: tensors that an optimizer of the caller holds, which are trained in place.

    Other tensors are copied, so a run never changes those of the caller; modules are trained in place.

    A module with ``fully_shard`` cannot be copied. A copy of its variable is a guest: it has leaves of its own, whose numbers
    are swapped into the module of its host for each pass (:meth:`seated`).

    Attributes:
        host: of a guest, the variable whose module it uses; None otherwise.
        sharded: the modules with ``fully_shard``.
        managed: which leaves belong to them, so that torch averages their gradients.

    >>> v = Variable({"a": torch.ones(2), "b": torch.zeros(())}, "x")
    >>> v.names, v.numel
    (['a', 'b'], 3)
    """

    __slots__ = ("_buffers", "_modes", "_seated", "argument", "host", "leaves", "managed", "names", "sharded", "value")

    def __init__(self, value: Any, argument: str, shared: Sequence[Tensor] = ()) -> None:
        kept = {id(tensor): tensor for tensor in shared}
        for name, leaf in named_leaves(value, argument).items():  # first, as a lazy parameter cannot be copied
            label = f"{argument}[{name!r}]" if name else argument
            _check_values(label, leaf)
            if id(leaf) in kept and not leaf.requires_grad:
                raise ValueError(
                    f"{label}: its optimizer is built, so that it is trained in place, and it does not require gradients; make"
                    " it with requires_grad=True."
                )
        kept |= {id(p): p for module in modules_of(value) for p in module.parameters()}  # are trained in place
        self._take(map_tensors(value, fresh_leaf, kept), argument)

    @classmethod
    def of(cls, value: Any, argument: str) -> Variable:
        """Make a variable that shares the tensors of ``value`` instead of copying them."""
        variable = cls.__new__(cls)
        variable._take(value, argument)
        return variable

    def _take(self, value: Any, argument: str) -> None:
        """Set all attributes from a value that the variable may keep, and refuse values that cannot be optimised."""
        self._plain()
        for module in modules_of(value):
            check_module(module, argument)
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(f"{argument}: is compiled by torch.jit, which fixes its parameters; pass the module itself.")
        self.sharded = sharded_modules(modules_of(value))
        self.reshard()  # a gathered module shows whole parameters instead of its sharded ones
        named = named_leaves(value, argument)
        if not named:
            pass_on = f"pass {KINDS} with at least one tensor (or parameter that requires gradients)"
            raise ValueError(f"{argument}: {type(value).__name__} has no tensor to optimise; {pass_on}.")
        self.value, self.argument = value, argument
        self.names, self.leaves = list(named), list(named.values())
        for name, leaf in named.items():
            label = self.label(name)
            _check_values(label, leaf)
            if has_gradient_hook(leaf):
                raise ValueError(
                    f"{label}: has a hook that runs after its gradient is computed, such as an optimizer inside the backward"
                    " pass; a step computes several gradients before it moves, so remove the hook."
                )
            if not leaf.is_floating_point():
                raise TypeError(f"{label}: dtype {leaf.dtype} cannot be differentiated; pass {label}.double().")
        if not self.numel:
            raise ValueError(f"{argument}: all tensors are empty; pass at least one with numbers.")
        inside = {id(p) for module in self.sharded for p in module.parameters()}
        self.managed = [id(leaf) in inside and is_dtensor(leaf) for leaf in self.leaves]
        devices = {str(leaf.device) for leaf in self.leaves}
        if len(devices) > 1:
            raise ValueError(f"{argument}: tensors are on different devices ({', '.join(sorted(devices))}); move them to one.")

    def _plain(self) -> None:
        """Set the attributes of a variable without modules."""
        self.host: Variable | None = None
        self._seated = False
        self._modes: list[tuple[nn.Module, nn.Module]] = []
        self._buffers: dict[str, Tensor] = {}
        self.sharded = list[Any]()

    def label(self, name: str) -> str:
        """Return the name of a leaf in error messages, such as ``x['w.0']``."""
        return f"{self.argument}[{name!r}]" if name else self.argument

    def check_finite(self) -> None:
        """Raise if a leaf contains NaN or infinity."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if leaf.is_meta:
                raise TypeError(f"{self.label(name)}: is on the meta device, and has no values; pass one on another device.")
            if bad := int(total([(~torch.isfinite(local([leaf])[0])).sum()], [leaf])):
                label, size = self.label(name), leaf.numel()
                raise ValueError(f"{label}: {bad} of its {size} numbers are NaN or infinite; pass a finite start.")

    @property
    def numel(self) -> int:
        """Total number of entries in all leaves."""
        return sum(leaf.numel() for leaf in self.leaves)

    @property
    def device(self) -> torch.device:
        """The device of all leaves."""
        return self.leaves[0].device

    @property
    def has_modules(self) -> bool:
        """Whether the value is or contains a module."""
        return next(modules_of(self.value), None) is not None

    def copy(self) -> Variable:
        """Return an independent copy.

        Buffers of modules are copied; parameters that are not optimised are shared, because nothing changes them. Ties
        between tensors and modules are kept. The copy of a compiled module is compiled. That of a sharded one is a guest.
        Functions that were set on a module, such as a wrapper of its forward, refer to the copy where they did to the module.
        """
        if self.sharded:
            return self._guest()
        modules = list(modules_of(self.value))
        inside = [part for module in modules for part in module.modules()]
        parameters = [p for module in modules for p in module.parameters()]
        trained = {id(leaf) for leaf in self.leaves}
        memo: dict[int, Any] = {id(p): p for p in parameters if id(p) not in trained}  # frozen parameters are shared
        memo |= {id(shared): shared for part in inside for shared in compiled_parts(part)}  # compiled code is reused
        attributes = [own for part in inside for own in vars(part).values() if isinstance(own, Tensor)]
        # Results of an earlier pass cannot be copied, and are not needed; a view of a parameter may be, and fails below.
        memo |= {id(own): own.detach() for own in attributes if not own.is_leaf and not is_view(own)}
        try:
            copies: dict[int, Any] = {id(module): copy.deepcopy(module, memo) for module in modules}
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"{self.argument}: cannot be copied ({error}); take away what it holds besides parameters, buffers and numbers,"
                " such as a file, a lock, or a list of tensors from an earlier pass."
            ) from error
        copied = [part for module in modules for part in copies[id(module)].modules()]
        for part in copied:
            for attribute in (vars(part), part._forward_pre_hooks, part._forward_hooks):
                attribute.update({name: _rebound(own, memo) for name, own in attribute.items() if callable(own)})
        copies |= {id(p): memo[id(p)] for p in parameters}  # a parameter that also occurs outside stays tied to its module
        other = Variable.of(map_tensors(self.value, fresh_leaf, copies), self.argument)
        other._modes = list(zip(inside, copied, strict=True))
        return other

    def _guest(self) -> Variable:
        """Return a copy that shares the sharded modules of this variable and has leaves and buffers of its own."""
        other = self._with(self.value, [leaf.detach().clone().requires_grad_() for leaf in self.leaves])
        other.sharded, other.host = self.sharded, self.host or self
        buffers = self.buffers() if self.host is None else self._buffers
        other._buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # each copy has its own running statistics
        return other

    @property
    def divided(self) -> bool:
        """Whether a leaf is a DTensor."""
        return any(map(is_dtensor, self.leaves))

    @property
    def seats(self) -> Leaves:
        """The tensors that the value consists of: the leaves, or for a guest those of its host."""
        return self.leaves if self.host is None else self.host.leaves

    @property
    def current(self) -> Leaves:
        """The tensors that hold the numbers now: those of the value during a pass, the leaves otherwise."""
        return self.seats if self._seated else self.leaves

    @contextmanager
    def seated(self) -> Iterator[None]:
        """Put the numbers of this variable into its sharded module for the time of a pass, and take them back afterwards."""
        if not self.sharded or self._seated:  # passes may be nested; a second swap would undo the first
            yield
            return
        self.reshard()
        self._swap()
        self._seated = True
        try:
            yield
        finally:
            self._seated = False
            self.reshard()
            self._swap()

    def reshard(self) -> None:
        """Make sharded modules drop the whole parameters of the last pass, which a step would leave outdated."""
        for module in self.sharded:
            module.reshard()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the numbers of a guest with those of its host, so that neither are lost."""
        if self.host is None:
            return
        mine = [*local(self.leaves), *self._buffers.values()]
        seats = [*local(self.host.leaves), *self.buffers().values()]
        for own, seat in zip(mine, seats, strict=True):
            kept = seat.clone()  # of one tensor at a time: a swap takes little memory
            seat.copy_(own)
            own.copy_(kept)

    @property
    def follows(self) -> bool:
        """Whether this is a copy whose modules follow the training or evaluation mode of the originals."""
        return bool(self._modes)

    def follow_modes(self) -> None:
        """Give the modules of a copy the current training or evaluation mode of the originals."""
        for original, own in self._modes:
            if own.training is not original.training:
                own.training = original.training

    def detached(self) -> Any:
        """Return the value with detached tensors that share memory; modules stay as they are."""
        return map_tensors(self.value, Tensor.detach, {})

    def snapshot(self) -> Any:
        """Return the value with copied tensors; modules stay as they are."""
        return map_tensors(self.value, lambda tensor: tensor.detach().clone(), {})

    def like(self, leaves: Sequence[Tensor]) -> Any:
        """Return ``leaves`` in the structure of the value; a module becomes a dict from parameter names to tensors."""
        table: dict[int, Any] = {id(own): leaf for own, leaf in zip(self.seats, leaves, strict=True)}
        for module in modules_of(self.value):
            table[id(module)] = {plain_name(name): table[id(p)] for name, p in module.named_parameters() if id(p) in table}
        return map_tensors(self.value, lambda tensor: tensor, table)

    def moved(self, leaves: Leaves) -> Variable:
        """Return a variable of the same structure that shares these leaves; the value must not contain modules."""
        return self._with(leaves[0] if isinstance(self.value, Tensor) else self.like(leaves), leaves)

    @contextmanager
    def at(self, leaves: Leaves) -> Iterator[Variable]:
        """Yield this variable at other numbers, for passes during which a graph that was recorded at its own must stay valid.

        Tensors are replaced. The parameters of a module get the memory of ``leaves`` for that time: a graph saves parameters,
        and would be spoilt by numbers that are written into them. Sharded modules cannot do this.
        """
        if not self.has_modules:
            yield self.moved([leaf.requires_grad_() for leaf in leaves])
            return
        own = [leaf.data for leaf in self.leaves]
        try:
            for leaf, other in zip(self.leaves, leaves, strict=True):
                leaf.data = other
            yield self
        finally:
            for leaf, before in zip(self.leaves, own, strict=True):
                leaf.data = before

    def _with(self, value: Any, leaves: Leaves) -> Variable:
        other = Variable.__new__(Variable)
        other._plain()
        other.argument, other.names, other.managed = self.argument, self.names, self.managed
        other.value, other.leaves = value, leaves
        return other

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint: the leaves, and the buffers and frozen parameters of modules.

        A copy leaves out the frozen parameters, which it shares with the original.
        """
        self.reshard()  # otherwise whole parameters would be saved instead of the parts
        tensors = dict(zip(self.names, self.leaves, strict=True))
        if self.host is not None:
            return tensors | self._buffers
        tensors |= self.buffers()
        if not self._modes:
            own = {id(leaf) for leaf in self.leaves}
            for prefix, module in named_modules(self.value):
                tensors |= {join(prefix, plain_name(name)): p for name, p in module.named_parameters() if id(p) not in own}
        return tensors

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers of modules, by name."""
        modules = named_modules(self.value)
        return {join(prefix, plain_name(name)): buffer for prefix, module in modules for name, buffer in module.named_buffers()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all tensors, by name; frozen parameters are those of the module."""
        return {name: kept(tensor) for name, tensor in self.tensors().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all tensors in place with those of ``state``; names, shapes and dtypes must agree."""
        own = self.tensors()
        if set(own) != set(state):
            missing, foreign = sorted(set(own) - set(state)), sorted(set(state) - set(own))
            raise ValueError(f"{self.argument}: the state is for another variable; missing {missing}, unexpected {foreign}.")
        # All checks come before the first write, so that a wrong state changes nothing.
        for name, tensor in own.items():
            saved = state[name]
            if not isinstance(saved, Tensor) or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                got = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
                raise ValueError(f"{self.label(name)}: the state has {got}, this run has {tuple(tensor.shape)} {tensor.dtype}.")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function that refers to copies where it refers to originals; ``copy.deepcopy`` takes functions as they are.

    Args:
        memo: the copies, by the identities of their originals.
    """
    if id(value) in memo:
        return memo[id(value)]
    fresh: Any = value
    if isinstance(value, MethodType):
        fresh = MethodType(_rebound(value.__func__, memo), _rebound(value.__self__, memo))
    elif isinstance(value, partial):
        options = {name: _rebound(item, memo) for name, item in value.keywords.items()}
        fresh = partial(_rebound(value.func, memo), *(_rebound(item, memo) for item in value.args), **options)
    elif isinstance(value, FunctionType) and value.__closure__:
        cells = tuple(CellType() for _ in value.__closure__)
        fresh = memo[id(value)] = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        fresh.__kwdefaults__ = value.__kwdefaults__
        fresh.__dict__.update(value.__dict__)
        for cell, own in zip(cells, value.__closure__, strict=True):  # which may refer to the function itself
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = _rebound(own.cell_contents, memo)
    return fresh


def _check_values(label: str, leaf: Tensor) -> None:
    """Raise if the values of a tensor cannot be optimised: not yet there, sparse, or of 8 bits."""
    if isinstance(leaf, nn.UninitializedParameter):
        raise TypeError(f"{label}: has no shape yet, as in a lazy module; call the module once on some data before the run.")
    if leaf.layout is not torch.strided:
        raise TypeError(f"{label}: is a tensor of layout {leaf.layout}; pass a dense one, such as {label}.to_dense().")
    if leaf.is_floating_point() and leaf.dtype.itemsize < 2:  # torch stores 8-bit floats, but has no arithmetic for them
        raise TypeError(f"{label}: dtype {leaf.dtype} cannot be computed with; pass {label}.float() or {label}.double().")
