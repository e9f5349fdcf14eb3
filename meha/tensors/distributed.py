"""Several processes at one run: which they are, means over them, and tensors of which each process holds a part.

With a group, an objective is the mean of its values in the processes, as it is the mean over the parts of
:class:`~meha.MicroBatches`. Gradients are averaged in one place, the oracle: those of whole leaves by all-reduces of a few
large messages, those of modules with ``fully_shard`` by torch itself, and those of a DTensor that is divided among the
processes, such as weights of examples that are kept where the examples are, by a division.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

from meha.tensors.torch_private import wraps_gradients

__all__ = ["Group", "check_module", "distribute", "is_dtensor", "local", "owners", "sharded_modules", "total"]


T = TypeVar("T")

BUCKET = 1 << 25
"""Bytes of gradients in one message; a larger leaf has one of its own."""


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: divided among processes, or a whole one that says so."""
    module = sys.modules.get("torch.distributed.tensor")  # where it is not loaded, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local(leaves: list[Tensor]) -> list[Tensor]:
    """The parts that this process holds, which share memory with the leaves; whole leaves are returned as they are.

    Arithmetic on single numbers works on the parts, without the cost of operations on DTensors.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return leaves
    return [_part(leaf) if is_dtensor(leaf) else leaf for leaf in leaves]


def _part(leaf: Any) -> Tensor:
    part: Tensor = leaf.detach().to_local() if torch.is_grad_enabled() else leaf.to_local()
    return part


def owners(leaf: Any) -> list[ProcessGroup]:
    """The groups of processes among which a leaf is divided, one for each dimension of its mesh that divides it."""
    if not is_dtensor(leaf):
        return []
    return [leaf.device_mesh.get_group(d) for d, place in enumerate(leaf.placements) if not place.is_replicate()]


def total(parts: list[Tensor], leaves: list[Tensor]) -> Tensor:
    """The sum of numbers, one for what this process holds of each leaf, over all processes that hold parts of it."""
    if "torch.distributed.tensor" not in sys.modules or not any(is_dtensor(leaf) for leaf in leaves):
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    sums: dict[Any, list[Tensor]] = {}
    for part, leaf in zip(parts, leaves, strict=True):
        sums.setdefault(tuple(owners(leaf)), []).append(part)
    numbers = []
    for groups, members in sums.items():
        number = torch.stack(members).sum()
        for group in groups:
            dist.all_reduce(number, group=group)
        numbers.append(number)
    return numbers[0] if len(numbers) == 1 else torch.stack(numbers).sum()


def distribute(whole: Tensor, like: Tensor) -> Tensor:
    """Divide a tensor that every process has as a leaf is divided; return it as it is if the leaf is whole."""
    if not is_dtensor(like):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def sharded_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """The modules with ``fully_shard`` among these and inside them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for module in modules for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def check_module(module: nn.Module, argument: str) -> None:
    """Refuse a module whose wrapper averages gradients in its own way.

    Raises:
        TypeError: it is wrapped.
    """
    for part in module.modules():
        wrapper = wraps_gradients(part)
        if wrapper:
            remedy = (
                "pass the module itself (its attribute .module) and the processes, as in solve(..., group=dist.group.WORLD)"
                if wrapper == "DistributedDataParallel"
                else "use torch.distributed.fsdp.fully_shard, or pass the module itself and solve(..., group=dist.group.WORLD)"
            )
            raise TypeError(
                f"{argument}: is wrapped in {wrapper}, which averages the gradients of this module alone, and not those of the"
                f" other level; {remedy}."
            )


class Group:
    """The processes among which the batches of a run are divided.

    Args:
        where: a process group, or a mesh of which all dimensions divide the batches.
        leaves: the leaves of the run. Processes that share parts of them, as in tensor parallelism, belong to the run, too.

    Attributes:
        size: number of processes that divide the batches.
        rank, count: the place of this process among all that belong to the run, and their number.
        everyone: the process group of all that belong to the run.
    """

    def __init__(self, where: Any, leaves: Sequence[Tensor] = ()) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        if where is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process does not belong to it; call solve in the processes that do.")
        if isinstance(where, DeviceMesh):
            self._parts: list[ProcessGroup] = [where.get_group(d) for d in range(where.ndim)]
            self._ranks = _ranks(where)
        elif isinstance(where, dist.ProcessGroup):
            self._parts, self._ranks = [where], set(dist.get_process_group_ranks(where))
        else:
            raise TypeError(f"group: expected a process group or a DeviceMesh, got {type(where).__name__}.")
        self.size = len(self._ranks)
        meshes = _meshes(leaves)
        members = sorted(self._closure(meshes))
        self.everyone = self._join(members)
        self.rank, self.count = members.index(dist.get_rank()), len(members)
        self._members = members
        if set(members) == self._ranks:
            self._parts = [self.everyone]

    @classmethod
    def of(cls, where: Any, leaves: Sequence[Tensor]) -> Group | None:
        """The group that was given; otherwise the processes among which leaves are divided; None if there are none.

        Raises:
            TypeError, ValueError: it is no group, this process is not in it, or the mesh of the leaves does not tell it.
        """
        if where is not None:
            return cls(where, leaves)
        meshes = _meshes(leaves)
        if not meshes:
            return None
        if len(meshes) > 1 or meshes[0].ndim > 1:
            raise ValueError(
                "group: x and y are divided over several dimensions of a mesh; say which of them divide the batches, as in"
                " solve(..., group=mesh['dp']), or group=mesh if all do."
            )
        return cls(meshes[0], leaves)

    def _closure(self, meshes: list[DeviceMesh]) -> set[int]:
        """The ranks of the processes that divide the batches or hold parts, with those that these share with, and so on."""
        found = {dist.get_rank()} | self._ranks
        groups = [*self._parts, *(mesh.get_group(d) for mesh in meshes for d in range(mesh.ndim))]
        if all(set(dist.get_process_group_ranks(group)) <= self._ranks for group in groups):
            return found
        for _ in groups:
            for group in groups:
                found |= set().union(*_gather(sorted(found), group))
        return found

    def _join(self, members: list[int]) -> ProcessGroup:
        """A process group of these ranks: one that exists, if possible."""
        for group in (dist.group.WORLD, *self._parts):
            assert group is not None
            if set(dist.get_process_group_ranks(group)) == set(members):
                return group
        joined: ProcessGroup = dist.new_group(members, use_local_synchronization=True)
        return joined

    @property
    def main(self) -> bool:
        """Whether this process is the first, which writes and prints."""
        return self.rank == 0

    def check(self, leaves: list[Tensor], managed: list[bool], argument: str) -> None:
        """Refuse leaves that ``fully_shard`` averages over other processes than those of the group.

        Raises:
            ValueError: they are others.
        """
        for leaf, done in zip(leaves, managed, strict=True):
            if not done:
                continue
            mesh: DeviceMesh = leaf.device_mesh  # type: ignore[attr-defined]
            ranks = _ranks(mesh)
            if not self._ranks <= ranks or (mesh.ndim == 1 and ranks != self._ranks):
                raise ValueError(
                    f"group: has the processes {sorted(self._ranks)}, but fully_shard averages the gradients of {argument} over"
                    f" {sorted(ranks)}; pass the mesh of fully_shard, or leave group out."
                )

    def gather(self, value: T) -> list[T]:
        """What each of the processes that belong to the run has, in their order."""
        return _gather(value, self.everyone)

    def first(self, value: T) -> T:
        """What the first process has."""
        box = [value]
        dist.broadcast_object_list(box, src=self._members[0], group=self.everyone)
        return box[0]

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is so in any process that belongs to the run."""
        answer = torch.tensor(float(flag), device=device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self.everyone)
        return bool(answer)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the numbers of the first; DTensors stay as they are."""
        for tensor in tensors:
            if not is_dtensor(tensor):
                for part in reversed(self._parts):
                    dist.broadcast(tensor.detach(), src=dist.get_process_group_ranks(part)[0], group=part)

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The means of tensors over the processes that divide the batches, as new tensors; the list is used up."""
        means: list[Tensor] = [*tensors]
        pending: list[tuple[list[int], list[torch.Size], Tensor, Any]] = []
        for bucket in _buckets(tensors):
            shapes = [tensors[i].shape for i in bucket]
            flat = torch.cat([tensors[i].reshape(-1) for i in bucket]).div_(self.size)
            for i in bucket:
                tensors[i] = means[i] = flat  # returns the memory before the next bucket is made
            work: Any = dist.all_reduce(flat, group=self._parts[0], async_op=True)
            for part in self._parts[1:]:
                work.wait()
                work = dist.all_reduce(flat, group=part, async_op=True)
            pending.append((bucket, shapes, flat, work))
        for bucket, shapes, flat, work in pending:
            work.wait()
            pieces = flat.split([math.prod(shape) for shape in shapes])
            for i, shape, piece in zip(bucket, shapes, pieces, strict=True):
                means[i] = piece.view(shape)
        return means

    def average(self, gradient: list[Tensor], leaves: list[Tensor], managed: list[bool], values: list[Tensor]) -> None:
        """Replace gradients of leaves, and values, by their means over the processes.

        Args:
            managed: which leaves belong to modules with ``fully_shard``, whose gradients torch has averaged.
        """
        waiting: list[tuple[list[Tensor], int]] = [(values, i) for i in range(len(values))]
        shells: dict[int, Any] = {}
        for i, (leaf, done) in enumerate(zip(leaves, managed, strict=True)):
            if done:
                continue
            if is_dtensor(leaf):
                part: Any = gradient[i]
                placements = leaf.placements  # type: ignore[attr-defined]
                if part.placements != placements:  # partial sums, where activations are divided
                    part = gradient[i] = part.redistribute(placements=placements)
                if self._divides(leaf):
                    self._own(gradient, i, leaf)
                    continue
                shells[i] = part
                gradient[i] = part.to_local()
            waiting.append((gradient, i))
        means = self.mean([where[i] for where, i in waiting])
        for (where, i), mean in zip(waiting, means, strict=True):
            where[i] = mean
        for i, part in shells.items():
            gradient[i] = type(part).from_local(
                gradient[i], part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
            )

    def _divides(self, leaf: Tensor) -> bool:
        """Whether processes that divide the batches hold different parts of a leaf."""
        return any(self.contains(group) for group in owners(leaf))

    def contains(self, group: ProcessGroup) -> bool:
        """Whether the processes of another group all divide the batches."""
        return set(dist.get_process_group_ranks(group)) <= self._ranks

    def _own(self, gradient: list[Tensor], i: int, leaf: Any) -> None:
        """The mean for a leaf that is divided with the batches: each part has its gradient from those who hold it."""
        gradient[i] = gradient[i] / self.size
        mesh = leaf.device_mesh
        for d, place in enumerate(leaf.placements):
            if place.is_replicate() and self.contains(mesh.get_group(d)):
                dist.all_reduce(_part(gradient[i]), group=mesh.get_group(d))


def _meshes(leaves: Iterable[Any]) -> list[DeviceMesh]:
    """The meshes of leaves, each once."""
    meshes: list[DeviceMesh] = []
    for leaf in leaves:
        if is_dtensor(leaf) and leaf.device_mesh not in meshes:
            meshes.append(leaf.device_mesh)
    return meshes


def _ranks(mesh: DeviceMesh) -> set[int]:
    """The ranks of a mesh."""
    return set(dist.get_process_group_ranks(mesh.get_group()) if mesh.ndim == 1 else mesh.mesh.flatten().tolist())


def _gather(value: T, group: ProcessGroup) -> list[T]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _buckets(tensors: list[Tensor]) -> Iterator[list[int]]:
    """Which tensors go together: of one dtype, up to BUCKET bytes, from the last on, as a backward pass finds them."""
    opened: dict[torch.dtype, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):
        tensor = tensors[i]
        bucket, size = opened.pop(tensor.dtype, ([], 0))
        weight = tensor.numel() * tensor.element_size()
        if bucket and size + weight > BUCKET:
            yield bucket
            bucket, size = [], 0
        opened[tensor.dtype] = ([*bucket, i], size + weight)
    for bucket, _ in opened.values():
        yield bucket
