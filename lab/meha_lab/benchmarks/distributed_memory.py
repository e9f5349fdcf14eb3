"""Memory of a step on a model of 7 billion parameters, per process, with fake tensors.

    python -m meha_lab.benchmarks.distributed_memory

Nothing is computed, and no GPU is needed: tensors have shapes only, and the bytes that are alive are counted.
Shapes of Llama-2-7B, float32 parameters, passes in bfloat16, activation checkpointing, 4096 tokens.
"""

import argparse
import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import meha
from meha.methods import Variable

WIDTH, INNER, HEADS, LAYERS, WORDS, TOKENS = 4096, 11008, 32, 32, 32000, 4096
ADAMW = partial(torch.optim.AdamW, lr=1e-5)
METHODS = {
    "MEHA(gradients=2), plain steps": meha.MEHA(alpha=1.0, beta=1e-3, eta=1e-3, gamma=1.0, c=1.0, gradients=2),
    "MEHA(gradients=2), AdamW": meha.MEHA(alpha=1.0, y_optimizer=ADAMW, theta_optimizer=ADAMW, gamma=1.0, c=1.0, gradients=2),
    "StochasticMEHA": meha.StochasticMEHA(warm_start=True),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, z):
        n = self.first(z)
        parts = (layer(n).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        z = z + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))
        n = self.second(z)
        return z + self.down(silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text):
        return self.head(self.norm(self.blocks(self.tokens(text))))


def build(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def loss(model, text):
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


PROBLEM = meha.Problem(lambda x, y, text: loss(y, text), lambda x, y, text: x.sum() * loss(y, text))


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, now and at most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self):
        counter = self

        def resize(storage, size):
            result = counter._resize(storage, size)
            counter.see(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # by which fully_shard frees what it gathered
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def see(self, storage):
        key, size = storage._cdata, storage.size()
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.forget, key)
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def forget(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by later
        result = function(*arguments, **(options or {}))
        for tensor in pytree.tree_leaves((arguments, result)):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result


def measured(name, mesh):
    """Bytes between steps, at most in the first step, and at most in the next."""
    with Alive() as alive:
        text = torch.zeros(1, TOKENS + 1, dtype=torch.long)
        if name == "training, AdamW":
            model = build(mesh)
            optimizer = ADAMW(model.parameters())

            def step(text):
                optimizer.zero_grad()
                loss(model, text).backward()
                optimizer.step()
        else:
            step = METHODS[name].start(PROBLEM, torch.ones(8), build(mesh)).step
        peaks = []
        for _ in range(2):
            alive.peak = 0
            step(text)
            peaks.append(alive.peak)
        return alive.now, *peaks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--methods", nargs="+", choices=["training, AdamW", *METHODS], default=["training, AdamW", *METHODS])
    arguments = parser.parse_args()
    globals()["LAYERS"] = arguments.layers
    Variable.check_finite = lambda self: None  # fake tensors have no values
    for processes in arguments.processes:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        mesh = init_device_mesh("cpu", (processes,))
        with FakeTensorMode():
            for name in arguments.methods:
                now, first, later = (f"{size / 1e9:.1f} GB" for size in measured(name, mesh))
                print(
                    f"{processes} processes, {name}: {now} between steps, {first} in the first, {later} later",
                    flush=True,
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
