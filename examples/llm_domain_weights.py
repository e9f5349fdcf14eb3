"""
Weights of text sources for a language model
============================================

Which text helps, and how much of each? Weights of sources, found while a small transformer trains on them::

    python examples/llm_domain_weights.py                         # one process, two minutes on a CPU
    torchrun --nproc-per-node=2 examples/llm_domain_weights.py    # FSDP2
    python examples/llm_domain_weights.py --lora                  # adapters on a frozen base, also with torchrun

The model learns bytes from five sources: docstrings, comments and code of the standard library, the letters of the docstrings
in random order, and random numbers. The lower level trains it on the sources, weighted by x on the simplex; the upper level is
its loss on the language reference, which is not one of the sources. Then new models are trained on as many tokens, drawn by the
weights found, and by those that one would try by hand: each source alone, equal weights, weights in proportion to size, and in
one process all pairs. `Weights of text sources <../domain-weights.html>`_ has this on a GPU, with more controls, several seeds
and two sizes of model.
"""

import argparse
import ast
import copy
import io
import itertools
import random
import sysconfig
import tokenize
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import meha

BYTES, LENGTH, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 2
SOURCES = {"docstrings": 100_000, "comments": 100_000, "code": 300_000, "shuffled": 100_000, "numbers": 300_000}

# %%
# The model, and adapters of low rank for it. All copies of an adapted model that a method makes share its frozen base.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, z):
        parts = self.mix(self.first(z)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        z = z + self.out(heads.transpose(1, 2).flatten(-2))
        return z + self.narrow(torch.nn.functional.gelu(self.wide(self.second(z))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, text):
        """The logits of the next tokens, one row for each token."""
        z = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(z)).flatten(0, 1))


class Adapted(nn.Module):
    """A frozen layer with a correction of low rank, which is zero at first."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, z):
        return self.base(z) + self.up(self.down(z))


def build(mesh=None, base=None, seed=0):
    """A new model, or new adapters on the base; sharded over the mesh."""
    torch.manual_seed(seed)
    model = Model() if base is None else copy.deepcopy(base).requires_grad_(False)
    if base is not None:
        for block in model.blocks:
            for name in ("mix", "out", "wide", "narrow"):
                setattr(block, name, Adapted(getattr(block, name)))
    if mesh is not None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return model


# %%
# The texts, which every Python has, and windows of them.


def documented(tree):
    """The nodes with a docstring."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]


def pieces(path):
    """The docstrings, the comments and the code of a module."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lexed = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = "\n".join(token.string.lstrip("# ") for token in lexed if token.type == tokenize.COMMENT)
    tree = ast.parse(text)
    docstrings = "\n".join(ast.get_docstring(node) for node in documented(tree))
    for node in documented(tree):
        node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
    return docstrings, comments, ast.unparse(tree)


def tokens(text):
    return torch.tensor([byte if byte < BYTES else 63 for byte in text.encode("utf-8")])


def texts():
    """The sources, and text of the target for the upper level and for the test."""
    parts = dict.fromkeys(SOURCES, "")
    paths = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    for path in sorted(paths, key=lambda path: zlib.crc32(path.name.encode())):
        for name, piece in zip(SOURCES, pieces(path), strict=False):
            parts[name] += piece + "\n"
        if all(len(parts[name]) >= SOURCES[name] for name in ("docstrings", "comments", "code")):
            break
    draw = random.Random(0)
    parts["shuffled"] = "".join(draw.sample(parts["docstrings"], len(parts["docstrings"])))
    parts["numbers"] = " ".join(str(draw.randrange(10**6)) for _ in range(60_000))
    paragraphs = dict.fromkeys(itertools.chain(*(topics[name].split("\n\n") for name in sorted(topics))))  # each once
    target = tokens("\n\n".join(paragraphs))
    return {name: tokens(parts[name][:size]) for name, size in SOURCES.items()}, target[:60_000], target[60_000:180_000]


def windows(text, number, generator):
    begin = torch.randint(len(text) - LENGTH, (number,), generator=generator)
    return text[begin[:, None] + torch.arange(LENGTH + 1)]


def losses(model, text):
    """The mean loss of each window."""
    return cross_entropy(model(text[:, :-1]), text[:, 1:].flatten(), reduction="none").view(len(text), -1).mean(dim=1)


# %%
# The two levels. A batch has a number of windows of each source, and as many of the target.


class Draws:
    """Batches of this process, without end."""

    def __init__(self, sources, target, number, seed):
        self.sources, self.target, self.number = sources, target, number
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            parts = [windows(text, self.number, self.generator) for text in self.sources.values()]
            yield torch.cat(parts), windows(self.target, len(parts) * self.number, self.generator)


def upper(x, y, batch):
    return losses(y, batch[1]).mean()


def lower(x, y, batch):
    return x @ losses(y, batch[0]).view(len(SOURCES), -1).mean(dim=1)


# %%
# The comparison: a model is trained on windows that are drawn by weights.


def train(model, sources, weights, steps, number, seed, rate=3e-3):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([leaf for leaf in model.parameters() if leaf.requires_grad], lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        counts = torch.multinomial(weights, len(sources) * number, replacement=True, generator=generator).bincount()
        drawn = [windows(text, count, generator) for text, count in zip(sources.values(), counts.tolist(), strict=False)]
        optimizer.zero_grad()
        losses(model, torch.cat(drawn)).mean().backward()
        optimizer.step()
        scheduler.step()
    return model


@torch.no_grad()
def judge(model, text, number):
    """The mean loss on some windows of a text, which are the same for all models."""
    return float(losses(model, windows(text, number, torch.Generator().manual_seed(5))).mean())


def controls(pairs):
    """The weights that one would try by hand, with pairs or without."""
    alone = dict(zip(SOURCES, torch.eye(len(SOURCES)), strict=True))
    sizes = torch.tensor([float(size) for size in SOURCES.values()])
    rows = {f"{name} alone": weights for name, weights in alone.items()}
    if pairs:
        rows |= {f"{a} and {b}": (alone[a] + alone[b]) / 2 for a, b in itertools.combinations(SOURCES, 2)}
    return {**rows, "equal": torch.full((len(SOURCES),), 1 / len(SOURCES)), "in proportion to size": sizes / sizes.sum()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=4, help="of each source, in a batch of a process")
    parser.add_argument("--lora", action="store_true", help="train a base on equal weights, then find weights for adapters")
    parser.add_argument("--checkpoint", help="a file (with torchrun a folder), from which the search goes on after a kill")
    options = parser.parse_args(arguments)
    rank, mesh = 0, None
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo")
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    sources, validation, test = texts()
    rows, base = controls(pairs=mesh is None), None
    if options.lora:  # the same in each process
        base = train(build(), sources, rows["equal"], options.steps, options.windows, seed=0)

    problem = meha.Problem(upper, lower, x_set=meha.sets.Simplex())
    batches, curve = Draws(sources, validation, options.windows, seed=rank), []
    solution = meha.solve(
        problem,
        rows["equal"],
        build(mesh, base),
        batches=batches,
        max_steps=options.steps,
        tol=None,
        checkpoint=options.checkpoint,
        callbacks=lambda run, info: curve.append(run.x.tolist()),
    )
    rows["found"] = solution.x

    results = {}
    for name, weights in rows.items():
        model = train(build(mesh, base, seed=1), sources, weights, options.steps, options.windows, seed=10 + rank)
        results[name] = [judge(model, text, 250 * options.windows) for text in (validation, test)]
    if rank == 0:
        print(solution)
        print("weights:", ", ".join(f"{name} {weight:.2f}" for name, weight in zip(SOURCES, solution.x.tolist(), strict=True)))
        pairs = [name for name in rows if " and " in name]
        best = min(pairs, key=results.get, default="")  # by the first number, the loss on the text of the upper level
        print("loss on unseen text of the reference:")
        for name in rows:
            if name == best or name not in pairs:
                print(f"{results[name][1]:7.3f}  {f'best pair: {name}' if name == best else name}")
        plt.plot(curve, label=[*SOURCES])
        plt.xlabel("step")
        plt.ylabel("weight")
        plt.legend()
        plt.show()
    if mesh is not None:
        dist.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
