"""
Weights of text sources for a language model
============================================

Which text helps? Weights of sources, learned under FSDP2 in two processes, started by torchrun::

    torchrun --nproc-per-node=2 examples/llm_domain_weights.py

A small transformer learns bytes from four sources: prose (docstrings of the standard library), code (its source), the letters
of the prose in random order, and random numbers. The lower level trains it on the sources, weighted by x on the simplex; the
upper level is its loss on other prose. Then two new models are trained on as many tokens, drawn equally, and drawn by the
weights found.
"""

import argparse
import ast
import random
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import meha

BYTES, LENGTH, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 2
SOURCES = ("prose", "code", "shuffled", "numbers")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, z):
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(self.first(z)).chunk(3, dim=-1)
        )
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        z = z + self.out(heads.transpose(1, 2).flatten(-2))
        return z + self.think(self.second(z))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, text):
        z = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(z)))


def build(mesh, seed=0):
    torch.manual_seed(seed)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def docstrings(path):
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n".join(filter(None, (ast.get_docstring(node) for node in nodes)))


def tokens(text):
    return torch.tensor([byte if byte < BYTES else 63 for byte in text.encode("utf-8")])


def texts():
    """The sources, and prose of other modules for the upper level and for the test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    prose = ["\n".join(docstrings(path) for path in files[i::3]) for i in range(3)]
    code = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files[::3])[: 3 * len(prose[0])]
    draw = random.Random(0)
    shuffled = "".join(draw.sample(prose[0], len(prose[0])))
    numbers = " ".join(str(draw.randrange(10**6)) for _ in range(len(prose[0]) // 6))
    sources = dict(zip(SOURCES, map(tokens, (prose[0], code, shuffled, numbers)), strict=True))
    return sources, tokens(prose[1]), tokens(prose[2])


def windows(text, number, generator):
    begin = torch.randint(len(text) - LENGTH - 1, (number,), generator=generator)
    return text[begin[:, None] + torch.arange(LENGTH + 1)]


def loss(model, text, reduction="mean"):
    logits = model(text[:, :-1])
    return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction=reduction)


class Draws:
    """Batches of this process, without end: ``number`` windows of each source, and as many of the upper level."""

    def __init__(self, sources, clean, number, seed):
        self.sources, self.clean, self.number = sources, clean, number
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            parts = [windows(text, self.number, self.generator) for text in self.sources.values()]
            yield torch.cat(parts), windows(self.clean, self.number, self.generator)


def upper(x, y, batch):
    return loss(y, batch[1])


def lower(x, y, batch):
    losses = loss(y, batch[0], reduction="none").view(len(SOURCES), -1)
    return x @ losses.mean(dim=1)


def train(mesh, sources, weights, steps, number, seed):
    """A new model, trained on windows that are drawn by the weights."""
    model, generator = build(mesh, seed=1), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = torch.multinomial(weights, len(SOURCES) * number, replacement=True, generator=generator)
        text = torch.cat([windows(sources[SOURCES[i]], 1, generator) for i in chosen.tolist()])
        optimizer.zero_grad()
        loss(model, text).backward()
        optimizer.step()
    return model


def test(model, text):
    with torch.no_grad():
        value = loss(model, windows(text, 256, torch.Generator().manual_seed(5)))
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--windows", type=int, default=4, help="of each source, in a batch of a process")
    parser.add_argument("--checkpoint", help="a folder, from which the run goes on after a kill (torchrun --max-restarts=3)")
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    sources, clean, unseen = texts()

    problem = meha.Problem(upper, lower, x_set=meha.sets.Simplex())
    x0 = torch.full((len(SOURCES),), 1 / len(SOURCES))
    batches = Draws(sources, clean, arguments.windows, seed=rank)
    options = {"max_steps": arguments.steps, "tol": None, "checkpoint": arguments.checkpoint}
    solution = meha.solve(problem, x0, build(mesh), batches=batches, **options)

    results = {}
    for name, weights in (("equal", x0), ("found", solution.x)):
        model = train(mesh, sources, weights, arguments.steps, arguments.windows, seed=10 + rank)
        results[name] = test(model, unseen)
    if rank == 0:
        print(solution)
        print("weights:", ", ".join(f"{name} {weight:.2f}" for name, weight in zip(SOURCES, solution.x.tolist(), strict=True)))
        tokens_seen = arguments.steps * arguments.windows * len(SOURCES) * LENGTH * dist.get_world_size()
        plt.bar(SOURCES, solution.x.tolist())
        plt.ylabel("weight")
        plt.show()
        print(f"loss on unseen prose after {tokens_seen:,} tokens: equal {results['equal']:.3f}, found {results['found']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
