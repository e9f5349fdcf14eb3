"""Runs in several processes: the group of processes, means over it, and tensors of which each process holds a part.

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

T = TypeVar("T")

BUCKET = 1 << 25  # bytes of gradients in one message, as each has a fixed cost; a larger leaf has one of its own


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: sharded among processes, or replicated in them."""
    module = sys.modules.get("torch.distributed.tensor")  # where it is not loaded, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local(leaves: list[Tensor]) -> list[Tensor]:
    """Return the local parts of DTensors, which share memory with them and save their overhead; other leaves as they are."""
    if "torch.distributed.tensor" not in sys.modules:
        return leaves
    return [_part(leaf) if is_dtensor(leaf) else leaf for leaf in leaves]


def _part(leaf: Any) -> Tensor:
    part: Tensor = leaf.detach().to_local() if torch.is_grad_enabled() else leaf.to_local()  # to_local() would be recorded
    return part


def owners(leaf: Any) -> list[ProcessGroup]:
    """Return the groups of processes among which a leaf is sharded, one for each mesh dimension that shards it."""
    if not is_dtensor(leaf):
        return []
    return [leaf.device_mesh.get_group(d) for d, place in enumerate(leaf.placements) if not place.is_replicate()]


def total(parts: list[Tensor], leaves: list[Tensor]) -> Tensor:
    """Sum one number per leaf, computed from its local part, over all leaves and all processes that hold parts of them."""
    if "torch.distributed.tensor" not in sys.modules or not any(is_dtensor(leaf) for leaf in leaves):
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    sums: dict[Any, list[Tensor]] = {}
    for part, leaf in zip(parts, leaves, strict=True):
        sums.setdefault(tuple(owners(leaf)), []).append(part)  # leaves with the same owners share one all-reduce
    numbers = []
    for groups, members in sums.items():
        number = torch.stack(members).sum()
        for group in groups:
            dist.all_reduce(number, group=group)
        numbers.append(number)
    return numbers[0] if len(numbers) == 1 else torch.stack(numbers).sum()


def distribute(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every process has like the leaf ``like``; return it as it is if that is not a DTensor."""
    if not is_dtensor(like):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import, and rarely needed

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)  # None: nothing is sent


def sharded_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return all modules with ``fully_shard`` among these modules and their submodules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever calls fully_shard has imported it
    if fsdp is None:
        return []
    return [part for module in modules for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def check_module(module: nn.Module, argument: str) -> None:
    """Refuse a module inside of a wrapper that averages its gradients by itself, such as DistributedDataParallel."""
    for part in module.modules():
        if wrapper := wraps_gradients(part):
            raise TypeError(
                f"{argument}: is wrapped in {wrapper}, which averages the gradients of this module alone, and not those of the"
                " other level; pass the module itself (of DistributedDataParallel its attribute .module) and the processes, as"
                " in solve(..., group=dist.group.WORLD), or use torch.distributed.fsdp.fully_shard."
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
        self._members = sorted(self._closure(_meshes(leaves)))
        self.everyone = self._join()
        self.rank, self.count = self._members.index(dist.get_rank()), len(self._members)
        if set(self._members) == self._ranks:
            self._parts = [self.everyone]  # one all-reduce over all, instead of one for each dimension of a mesh

    @classmethod
    def of(cls, where: Any, leaves: Sequence[Tensor]) -> Group | None:
        """Return the group that was given, else that of the processes which shard the leaves; None if there is neither."""
        if where is not None:
            return cls(where, leaves)
        meshes = _meshes(leaves)
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            remedy = "say which of them divide the batches, as in solve(..., group=mesh['dp']), or group=mesh if all do"
            raise ValueError(f"group: x and y are divided over several dimensions of a mesh; {remedy}.")
        return cls(meshes[0], leaves) if meshes else None

    def _closure(self, meshes: list[DeviceMesh]) -> set[int]:
        """Return the ranks reachable through data-parallel and sharding groups (transitive closure)."""
        ranks = {dist.get_rank()} | self._ranks
        groups = [*self._parts, *(mesh.get_group(d) for mesh in meshes for d in range(mesh.ndim))]
        if all(set(dist.get_process_group_ranks(group)) <= self._ranks for group in groups):
            return ranks
        for _ in groups:  # a chain of groups that leads to a rank is at most this long
            for group in groups:
                ranks |= set().union(*_gather(sorted(ranks), group))
        return ranks

    def _join(self) -> ProcessGroup:
        """Return a process group of all that belong to the run; an existing one if possible."""
        existing: list[Any] = [dist.group.WORLD, *self._parts]
        same = [group for group in existing if set(dist.get_process_group_ranks(group)) == set(self._members)]
        # No other process need call it.
        return same[0] if same else dist.new_group(self._members, use_local_synchronization=True)

    @property
    def main(self) -> bool:
        """Whether this process is the first, which writes and prints."""
        return self.rank == 0

    def check(self, leaves: list[Tensor], managed: list[bool], argument: str) -> None:
        """Refuse leaves that ``fully_shard`` averages over other processes than those of the group."""
        for leaf, done in zip(leaves, managed, strict=True):
            if not done:
                continue
            mesh: DeviceMesh = leaf.device_mesh  # type: ignore[attr-defined]
            ranks = _ranks(mesh)
            # A mesh of several dimensions may average over some of them only; then its processes must contain the group.
            if not self._ranks <= ranks or (mesh.ndim == 1 and ranks != self._ranks):
                raise ValueError(
                    f"group: has the processes {sorted(self._ranks)}, but fully_shard averages the gradients of {argument} over"
                    f" {sorted(ranks)}; pass the mesh of fully_shard, or leave group out."
                )

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes of the run, in the order of their ranks."""
        return _gather(value, self.everyone)

    def first(self, value: T) -> T:
        """Return the value of the first process."""
        box = [value]
        dist.broadcast_object_list(box, src=self._members[0], group=self.everyone)
        return box[0]

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is true in any process of the run."""
        answer = torch.tensor(float(flag), device=device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self.everyone)
        return bool(answer)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the first process; DTensors stay as they are."""
        for tensor in tensors:
            if not is_dtensor(tensor):
                for part in reversed(self._parts):
                    dist.broadcast(tensor.detach(), src=dist.get_process_group_ranks(part)[0], group=part)

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means of tensors over the data-parallel processes as new tensors; the list is overwritten."""
        means: list[Tensor] = [*tensors]
        pending: list[tuple[list[int], list[torch.Size], Tensor, Any]] = []
        for bucket in _buckets(tensors):
            shapes = [tensors[i].shape for i in bucket]
            flat = torch.cat([tensors[i].reshape(-1) for i in bucket]).div_(self.size)
            for i in bucket:
                tensors[i] = means[i] = flat  # returns the memory before the next bucket is made
            work: Any = dist.all_reduce(flat, group=self._parts[0], async_op=True)  # is sent while the next bucket is made
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
                if any(self._contains(group) for group in owners(leaf)):  # processes hold different parts of the leaf
                    self._own(gradient, i, leaf)
                    continue
                shells[i] = part  # the parts are averaged as plain tensors, and become DTensors again at the end
                gradient[i] = part.to_local()
            waiting.append((gradient, i))
        means = self.mean([where[i] for where, i in waiting])
        for (where, i), mean in zip(waiting, means, strict=True):
            where[i] = mean
        for i, part in shells.items():
            gradient[i] = type(part).from_local(
                gradient[i], part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
            )

    def _contains(self, group: ProcessGroup) -> bool:
        """Whether all processes of another group are data-parallel ones of this group."""
        return set(dist.get_process_group_ranks(group)) <= self._ranks

    def _own(self, gradient: list[Tensor], i: int, leaf: Any) -> None:
        """Average the gradient of a leaf that is sharded together with the batches."""
        gradient[i] = gradient[i] / self.size  # all other processes have a gradient of zero for this part
        mesh = leaf.device_mesh
        for d, place in enumerate(leaf.placements):
            if place.is_replicate() and self._contains(mesh.get_group(d)):
                dist.all_reduce(_part(gradient[i]), group=mesh.get_group(d))


def _meshes(leaves: Iterable[Any]) -> list[DeviceMesh]:
    """Return the meshes of the DTensors among the leaves, each once."""
    meshes: list[DeviceMesh] = []
    for leaf in leaves:
        if is_dtensor(leaf) and leaf.device_mesh not in meshes:
            meshes.append(leaf.device_mesh)
    return meshes


def _ranks(mesh: DeviceMesh) -> set[int]:
    """Return the ranks of all processes of a mesh."""
    return set(dist.get_process_group_ranks(mesh.get_group()) if mesh.ndim == 1 else mesh.mesh.flatten().tolist())


def _gather(value: T, group: ProcessGroup) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _buckets(tensors: list[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors that share a message: of one dtype, up to BUCKET bytes, from the last to the first."""
    opened: dict[torch.dtype, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):  # a backward pass computes the gradients of the last layers first
        tensor = tensors[i]
        bucket, size = opened.pop(tensor.dtype, ([], 0))
        weight = tensor.numel() * tensor.element_size()
        if bucket and size + weight > BUCKET:
            yield bucket
            bucket, size = [], 0
        opened[tensor.dtype] = ([*bucket, i], size + weight)
    for bucket, _ in opened.values():
        yield bucket
