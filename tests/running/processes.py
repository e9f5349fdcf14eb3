"""Cases for runs in several processes, and how to start such processes; see test_distributed.py."""

import os
import socket
import traceback
import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import meha
from meha.problem.loaders import Accumulated

EXAMPLES, FEATURES, HIDDEN, CLASSES = 32, 4, 6, 3

ADAM = partial(torch.optim.Adam, lr=0.01)
STEPS = {"alpha": 20.0, "beta": 0.05, "eta": 0.05}
METHODS = {
    "MEHA(gradients=4)": meha.MEHA(**STEPS, gamma=5.0, c=2.0, p=0.1),
    "MEHA(gradients=3)": meha.MEHA(**STEPS, gamma=5.0, c=2.0, gradients=3),
    "MEHA(gradients=2)": meha.MEHA(**STEPS, gamma=5.0, c=2.0, gradients=2),
    "StochasticMEHA": meha.StochasticMEHA(lr=0.03, x_lr=0.001),  # y leaves theta fast, x is slow: little of x is rounding
    "F2SA": meha.F2SA(**STEPS, inner_steps=2),
    "VPBGD": meha.VPBGD(**STEPS, inner_steps=2, c=2.0),
    "BOME": meha.BOME(alpha=100.0, beta=0.05, eta=0.05, inner_steps=2),
}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS = {
    "MEHA with SGD": meha.MEHA(x_optimizer=SGD, y_optimizer=SGD, theta_optimizer=SGD, gamma=5.0, c=2.0),
    "StochasticMEHA with SGD": meha.StochasticMEHA(x_optimizer=SGD, y_optimizer=SGD),
}
NORMALISED = {  # steps in units of the gradients: rounding of a small gradient becomes a step as long as any
    "MEHA with Adam": meha.MEHA(
        x_optimizer=ADAM,
        y_optimizer=ADAM,
        theta_optimizer=meha.Optimizer(torch.optim.AdamW, lr=0.01, clip=0.1),
        gamma=5.0,
        c=2.0,
    ),
    "StochasticMEHA, its own rates": meha.StochasticMEHA(),
    "NetworkSOBA": meha.stochastic.NetworkSOBA(),
}
FRESH = {"StochasticMEHA, fresh": meha.StochasticMEHA(warm_start=False)}
ALL = {**METHODS, **OPTIMIZERS, **NORMALISED}


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        self.base.requires_grad_(False)

    def forward(self, z):
        return self.base(z) + self.up(self.down(z))


def network(seed=0, dtype=torch.float64, layer=nn.Linear):
    torch.manual_seed(seed)
    return nn.Sequential(layer(FEATURES, HIDDEN), nn.Tanh(), layer(HIDDEN, CLASSES)).to(dtype)


def weigher(seed=0, dtype=torch.float64):
    """An x that is a module: it says how much an example counts."""
    torch.manual_seed(10 + seed)
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


@dataclass
class Batch:
    inputs: torch.Tensor
    labels: torch.Tensor
    clean: torch.Tensor
    clean_labels: torch.Tensor
    index: torch.Tensor

    def __getitem__(self, chosen):
        return Batch(*(part[chosen] for part in vars(self).values()))


def examples(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    inputs, clean = (torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2))
    labels, clean_labels = (torch.randint(CLASSES, (EXAMPLES,), generator=generator) for _ in range(2))
    return Batch(inputs.to(dtype), labels, clean.to(dtype), clean_labels, torch.arange(EXAMPLES))


def share(rank, size, dtype=torch.float64):
    """The examples of a process."""
    return examples(dtype)[slice(rank * EXAMPLES // size, (rank + 1) * EXAMPLES // size)]


def forward(y, inputs):
    return y(inputs) if isinstance(y, nn.Module) else (inputs @ y["w"]).tanh() @ y["v"]


def upper(x, y, batch):
    return cross_entropy(forward(y, batch.clean), batch.clean_labels)


def lower(x, y, batch):
    if isinstance(x, nn.Module):
        weights = x(batch.inputs).squeeze(-1)
    elif isinstance(x, DTensor):
        weights = x.to_local()[batch.index - first_of(batch)]
    else:
        weights = x[batch.index]
    losses = cross_entropy(forward(y, batch.inputs), batch.labels, reduction="none")
    return (torch.sigmoid(weights) * losses).mean()


def first_of(batch):
    """The first example of the share that a batch is from; shares are equal."""
    size = EXAMPLES // dist.get_world_size()
    return batch.index[0] // size * size


PROBLEM = meha.Problem(upper, lower)


def shard(module, mesh, **options):
    for part in module:
        if isinstance(part, nn.Linear | Adapted):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def split_columns(module, mesh):
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def replicated_by_torch(module, mesh):
    from torch.distributed._composable import replicate_with_fsdp

    return replicate_with_fsdp.replicate(module, mesh=mesh)


@dataclass
class Kind:
    """How x and y lie in the processes.

    Attributes:
        make: from a mesh and plain x and y, those of a run, and its group (None to let it be found).
        x, y: makers of the plain ones, by seed and dtype.
        parts: batches that a step takes together.
        pace: what the steps of x are multiplied by.
        grid: whether the mesh has two dimensions, "dp" and "tp" with two processes.
    """

    make: object
    x: object = lambda seed, dtype: torch.linspace(-1, 1, EXAMPLES, dtype=dtype)
    y: object = network
    parts: int = 1
    pace: float = 1.0
    grid: bool = False


def matrices(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return {"w": torch.randn(FEATURES, HIDDEN).to(dtype), "v": 0.5 * torch.randn(HIDDEN, CLASSES).to(dtype)}


def adapters(seed=0, dtype=torch.float64):
    return network(seed, dtype, Adapted)


def divided(x, mesh):
    return distribute_tensor(x, mesh, [Shard(0)])


def whole(mesh, x, y):
    return x, y, dist.group.WORLD


KINDS = {
    "tensors": Kind(whole, y=matrices),
    "modules": Kind(whole),
    "modules, micro-batches": Kind(whole, parts=2),
    "modules, x a module": Kind(whole, x=weigher, pace=0.02),
    "adapters": Kind(whole, y=adapters),
    "fully_shard": Kind(lambda mesh, x, y: (x, shard(y, mesh), None)),
    "fully_shard, kept gathered": Kind(lambda mesh, x, y: (x, shard(y, mesh, reshard_after_forward=False), None)),
    "fully_shard, micro-batches": Kind(lambda mesh, x, y: (x, shard(y, mesh), None), parts=2),
    "fully_shard, x by example": Kind(lambda mesh, x, y: (divided(x, mesh), shard(y, mesh), None)),
    "modules, x by example": Kind(lambda mesh, x, y: (divided(x, mesh), y, None)),
    "fully_shard, x too": Kind(lambda mesh, x, y: (shard(x, mesh), shard(y, mesh), None), x=weigher, pace=0.02),
    "fully_shard, adapters": Kind(lambda mesh, x, y: (x, shard(y, mesh), None), y=adapters),
    "replicate": Kind(lambda mesh, x, y: (x, replicated_by_torch(y, mesh), None)),
    "HSDP": Kind(lambda mesh, x, y: (x, shard(y, mesh), mesh), grid=True),
    "tensor parallel": Kind(lambda mesh, x, y: (x, split_columns(y, mesh["tp"]), mesh["dp"]), grid=True),
    "fully_shard of tensor parallel": Kind(
        lambda mesh, x, y: (x, shard(split_columns(y, mesh["tp"]), mesh["dp"]), mesh["dp"]), grid=True
    ),
}


def full(value):
    """The leaves of a variable as whole tensors."""
    leaves = (
        list(value.parameters())
        if isinstance(value, nn.Module)
        else list(value.values())
        if isinstance(value, dict)
        else [value]
    )
    return [(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().clone() for leaf in leaves]


def away(value, reference):
    """The relative distance of two variables, over all their leaves."""
    a, b = (torch.cat([leaf.flatten() for leaf in full(variable)]) for variable in (value, reference))
    return float((a - b).norm() / b.norm())


def batches_of(kind, rank, size, dtype):
    mine = share(rank, size, dtype)
    if kind.parts == 1:
        return [mine]
    length = len(mine.index) // kind.parts
    return Accumulated([mine[slice(i * length, (i + 1) * length)] for i in range(kind.parts)], kind.parts)


def compare(kind, method, steps=20, dtype=torch.float64):
    """How far a run in these processes ends from one process with all examples: y, x and F on the way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"max_steps": steps, "tol": None}
    if hasattr(method, "alpha") and method.alpha is not None:
        method = replace(method, alpha=kind.pace * method.alpha)
    expected = meha.solve(PROBLEM, kind.x(0, dtype), kind.y(0, dtype), method, batches=[examples(dtype)], **options)
    mesh = (
        init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp")) if kind.grid else init_device_mesh("cpu", (size,))
    )
    seed = rank if kind.make is whole else 0  # the start of the first process counts
    x, y, group = kind.make(mesh, kind.x(seed, dtype), kind.y(seed, dtype))
    place, shares = (mesh["dp"].get_local_rank(), size // 2) if kind.grid and group is not mesh else (rank, size)
    found = meha.solve(PROBLEM, x, y, method, batches=batches_of(kind, place, shares, dtype), group=group, **options)
    assert found.counts == expected.counts
    assert away(expected.x, kind.x(0, dtype)) > 1e-3, "x stays where it is"
    history = max(abs(a - b) / abs(b) for a, b in zip(found.history["upper"], expected.history["upper"], strict=True))
    ends = [None] * size
    dist.all_gather_object(ends, full(found.x) + full(found.y))
    assert all(torch.equal(a, b) for end in ends for a, b in zip(end, ends[0], strict=True)), "processes differ"
    return away(found.y, expected.y), away(found.x, expected.x), history


def free_port():
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


PRELOADED = ("meha", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")


def in_processes(number, work, *arguments):
    """Run ``work(*arguments)`` in processes of one group; they are forked from one that has imported torch."""
    mp.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    mp.start_processes(_process, (number, free_port(), work, arguments), nprocs=number, start_method="forkserver")


def _process(rank, number, port, work, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about its own prototypes
    warnings.filterwarnings("error", category=meha.TrainingWarning)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(number))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a hang becomes an error
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
