"""Several processes: messages and bytes of a step, its time beside plain training, and what half precision leaves of a signal.

OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 -m meha_lab.benchmarks.distributed --part messages
OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 -m meha_lab.benchmarks.distributed --part time
OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.distributed --part rounding
"""

import argparse
import copy
import itertools
import statistics
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import meha

WIDTH, CLASSES, EXAMPLES, BATCH = 512, 10, 4096, 128
ROUNDS = 20
STEPS = {"alpha": 1.0, "beta": 0.01, "eta": 0.01}
METHODS = {
    "MEHA(gradients=4)": meha.MEHA(**STEPS, gamma=5.0, c=2.0),
    "MEHA(gradients=3)": meha.MEHA(**STEPS, gamma=5.0, c=2.0, gradients=3),
    "MEHA(gradients=2)": meha.MEHA(**STEPS, gamma=5.0, c=2.0, gradients=2),
    "StochasticMEHA": meha.StochasticMEHA(warm_start=True),
    "NetworkSOBA": meha.stochastic.NetworkSOBA(),
}


class Traffic(TorchDispatchMode):
    """Counts collective operations, and their bytes: the output of an all-gather, the input of a reduce-scatter."""

    KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast")

    def __init__(self):
        super().__init__()
        self.bytes, self.messages = Counter(), Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            name = function.__name__.lstrip("_")
            kind = next(kind for kind in self.KINDS if name.startswith(kind))
            tensors = list(_tensors(arguments))
            self.messages[kind] += 1
            self.bytes[kind] += (
                max(t.numel() * t.element_size() for t in tensors)
                if kind != "allreduce"
                else sum(t.numel() * t.element_size() for t in tensors)
            )
        return function(*arguments, **(options or {}))


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def network():
    torch.manual_seed(0)
    sizes = (64, WIDTH, WIDTH, WIDTH, CLASSES)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def shard(module, mesh):
    for part in module:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, BATCH, 64, generator=generator)
    return (
        inputs,
        torch.randint(CLASSES, (2, BATCH), generator=generator),
        torch.randint(EXAMPLES, (BATCH,), generator=generator),
    )


def upper(x, y, batch):
    return cross_entropy(y(batch[0][0]), batch[1][0])


def lower(x, y, batch):
    return (torch.sigmoid(x[batch[2]]) * cross_entropy(y(batch[0][1]), batch[1][1], reduction="none")).mean()


PROBLEM = meha.Problem(upper, lower)


def training(module):
    """A step of plain training."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step(data):
        optimizer.zero_grad()
        cross_entropy(module(data[0][0]), data[1][0]).backward()
        optimizer.step()

    return step


def steps(name, mesh, group):
    """A function that takes a step: of a method, or of training."""
    if name == "training":
        if group is None and mesh is None:
            return training(network())
        return training(DistributedDataParallel(network()) if mesh is None else shard(network(), mesh))
    y = network() if mesh is None else shard(network(), mesh)
    return METHODS[name].start(PROBLEM, torch.zeros(EXAMPLES), y, group=group).step


def messages():
    dist.init_process_group("gloo")
    mesh, data = init_device_mesh("cpu", (dist.get_world_size(),)), batch(dist.get_rank())
    unit = 4 * sum(p.numel() for p in network().parameters())
    if dist.get_rank() == 0:
        print(f"|y| = {unit / 1e6:.2f} MB, |x| = {4 * EXAMPLES / unit:.4f} |y|; bytes of a step in |y|, and messages")
    for wrapped in (False, True):
        for name in ("training", *METHODS):
            if name == "training" and not wrapped:
                continue  # the buckets of DDP do not pass the dispatcher: |y| a pass
            step = steps(name, mesh if wrapped else None, None if wrapped else dist.group.WORLD)
            step(data)
            step(data)
            with Traffic() as traffic:
                step(data)
            if dist.get_rank() == 0:
                sizes = ", ".join(f"{kind} {size / unit:.3f}" for kind, size in sorted(traffic.bytes.items()))
                kind = "fully_shard" if wrapped else "replicated "
                print(f"{kind} {name:18s} {sizes}; {sum(traffic.messages.values())} messages")
    dist.destroy_process_group()


def timed(step, data, number):
    """Milliseconds of some steps; all processes begin together."""
    times = []
    dist.barrier()
    for _ in range(number):
        begin = time.perf_counter()
        step(data)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def durations(number):
    """The ways of a row take turns, so that other work on the machine meets all of them."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh, data = init_device_mesh("cpu", (dist.get_world_size(),)), batch(dist.get_rank())
    if dist.get_rank() == 0:
        print("ms a step: each process alone, replicated (over alone), with fully_shard (over alone); medians")
    for name in ("training", *METHODS):
        ways = [steps(name, where, group) for where, group in ((None, None), (None, dist.group.WORLD), (mesh, None))]
        for step in ways:
            timed(step, data, 2)
        rounds = [[timed(step, data, number) for step in ways] for _ in range(ROUNDS)]
        if dist.get_rank() == 0:
            alone, whole, sharded = (statistics.median(itertools.chain(*column)) for column in zip(*rounds, strict=True))
            print(
                f"{name:18s} {alone:7.1f} {whole:7.1f} ({whole / alone:.2f}) {sharded:7.1f} ({sharded / alone:.2f})", flush=True
            )
        del ways, step  # DDP must not outlive the group
    dist.destroy_process_group()


def rounding():
    """The error of loss(y) - loss(theta) of single examples in bfloat16, by the distance of y and theta."""
    torch.manual_seed(0)
    y = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, labels = torch.randn(512, 64), torch.randint(10, (512,))
    optimizer = torch.optim.Adam(y.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(y(inputs), labels).backward()
        optimizer.step()

    def losses(module, dtype):
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            return cross_entropy(
                module(inputs.to(torch.float64) if dtype is torch.float64 else inputs).to(
                    torch.float64 if dtype is torch.float64 else torch.float32
                ),
                labels,
                reduction="none",
            ).double()

    value = losses(y, torch.float32).mean()
    eps = torch.finfo(torch.bfloat16).eps
    print(f"loss {value:.2f}; |y - theta| / |y|, mean |difference|, in eps * loss, error bfloat16, float32, cosine")
    for distance in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2):
        theta = copy.deepcopy(y)
        with torch.no_grad():
            for p in theta.parameters():
                p.add_(torch.randn_like(p) * p.norm() / p.numel() ** 0.5, alpha=distance)
        exact = losses(y.double(), torch.float64) - losses(theta.double(), torch.float64)
        for module in (y, theta):
            module.float()
        found = {dtype: losses(y, dtype) - losses(theta, dtype) for dtype in (torch.bfloat16, torch.float32)}
        errors = [float((found[dtype] - exact).norm() / exact.norm()) for dtype in found]
        cosine = float(torch.cosine_similarity(found[torch.bfloat16], exact, dim=0))
        size = float(exact.abs().mean())
        print(f"{distance:.0e}  {size:.1e}  {size / (eps * value):.3f}  {errors[0]:.0%}  {errors[1]:.1e}  {cosine:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["messages", "time", "rounding"], required=True)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    {"messages": messages, "time": lambda: durations(arguments.steps), "rounding": rounding}[arguments.part]()


if __name__ == "__main__":
    main()
