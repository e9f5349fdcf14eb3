"""What a step costs on networks, in time and memory, beside the bare passes that it is made of.

    python -m meha_lab.benchmarks.network [--rounds 15] [--memory] [--unroll]

Time: Run.step against a loop written by hand with the same forward and backward passes, and updates in place (bare.py). The
rounds alternate, so that a change of the machine's speed hits both.

Memory: the tensors alive at the peak of a step, x, y and theta among them (``meha_lab.reproduce.memory``), against x + y +
theta + one forward-backward pass with its gradient ("ratio"). The y-direction has two terms, F and f, and torch makes the
gradient of a parameter as a whole before it is added to that of the other term. So there is a second gradient of one parameter
at a time, and the largest may make up most of the network, as in the MLP; "largest" is the ratio to the sum with it. RHG with
10 inner steps stands beside.

One-step unrolls (``--unroll``: these alone): a step of ``solve`` with RHG(inner_steps=1) and with DARTS against loops by hand
(bare.py), in CPU seconds. A callback takes the step by hand after each step of ``solve``, so that both alternate.

The data are random; the task is hyper-cleaning, with a weight for each training example, or a network that gives them (x).
"""

import argparse
import copy
import statistics
import time
from functools import partial

import torch
from meha_lab.benchmarks.bare import DifferenceQuotient, Passes, Unroll
from meha_lab.reproduce.memory import peak
from torch import nn
from torch.nn.functional import cross_entropy

import meha

EXAMPLES = 5000
STEPS = dict(alpha=1.0, beta=0.05, eta=0.05, gamma=10.0, c=2.0, p=0.0)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))


def convnet(width=32):
    blocks = [
        nn.Sequential(nn.Conv2d(1 if i == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        for i in range(4)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(width, 10))


def deep():
    layers = [layer for i in range(8) for layer in (nn.Linear(784 if i == 0 else 256, 256), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class RowTransformer(nn.Module):
    """A transformer of two layers on the rows of an image, without dropout, which would draw a mask in each pass."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.place = nn.Parameter(0.02 * torch.randn(28, width))
        layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.layers(self.embed(images[:, 0]) + self.place).mean(1))


def transformer():
    return RowTransformer()


def weigher():
    """Gives the weight of an example from its image."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 1), nn.Flatten(0))


def make_batch(size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, size, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (2, size), generator=generator)
    return {"images": images[0], "labels": labels[0], "clean": (images[1], labels[1]), "index": torch.arange(size)}


def upper(x, y, batch):
    images, labels = batch["clean"]
    return cross_entropy(y(images), labels)


def lower(x, y, batch):
    weights = x(batch["images"]) if isinstance(x, nn.Module) else x[batch["index"]]
    return (weights.sigmoid() * cross_entropy(y(batch["images"]), batch["labels"], reduction="none")).mean()


PROBLEM = meha.Problem(upper, lower)

CASES = {
    "MLP, 64 examples": (None, mlp, 64),
    "MLP, 256 examples": (None, mlp, 256),
    "MLP, 512 examples": (None, mlp, 512),
    "MLP, 5000 examples": (None, mlp, EXAMPLES),
    "8 layers, 64 examples": (None, deep, 64),
    "ConvNet, 64 examples": (None, convnet, 64),
    "MLP, x a network, 256 examples": (weigher, mlp, 256),
}


def build(name):
    """x, y and a batch."""
    x, y, size = CASES[name]
    torch.manual_seed(0)
    return (torch.zeros(EXAMPLES) if x is None else x()), y(), make_batch(size)


def size(*values):
    return sum(
        leaf.numel() * leaf.element_size() for value in values for leaf in meha.tensors.variables.named_leaves(value).values()
    )


def memory(name):
    """Bytes at the peaks of a MEHA step and of an RHG step; of x + y + theta + one pass; and of the largest parameter."""
    x, y, batch = build(name)
    run = meha.MEHA(**STEPS).start(PROBLEM, x, y)
    own = run.state.x.value
    leaves = [*y.parameters(), *run.state.x.leaves]
    one = max(peak(lambda f=f: torch.autograd.grad(f(own, y, batch), leaves, allow_unused=True)) for f in (upper, lower))
    run.step(batch)
    peaks = {peak(lambda: run.step(batch)) for _ in range(3)}
    assert len(peaks) == 1, "memory must not grow from step to step"
    other = meha.RHG(alpha=1.0, beta=0.05, inner_steps=10).start(PROBLEM, x, y)
    other.step(batch)
    return {
        "MEHA": size(x, y, y) + peaks.pop(),
        "RHG": size(x, y) + peak(lambda: other.step(batch)),
        "sum": size(x, y, y) + one,
        "largest": max(size(parameter) for parameter in y.parameters()),
    }


def compare(name, rounds):
    """Milliseconds a step, ours and bare, and the sorted ratios."""
    x, y, batch = build(name)
    bare = Passes(upper, lower, STEPS, copy.deepcopy(x), copy.deepcopy(y))
    run = meha.MEHA(**STEPS).start(PROBLEM, x, y)
    for _ in range(2):
        bare.step(batch)
        run.step(batch)
    for a, b in zip(run.state.y.leaves, bare.y.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5), "the two loops must take the same steps"
    spent = {bare: [], run: []}
    for _ in range(rounds):
        for loop, seconds in spent.items():
            begin = time.perf_counter()
            loop.step(batch)
            seconds.append(time.perf_counter() - begin)
    ratios = sorted(a / b for a, b in zip(spent[run], spent[bare], strict=True))
    return 1e3 * statistics.median(spent[run]), 1e3 * statistics.median(spent[bare]), ratios


class Alternating:
    """A callback that takes a step by hand after each step of ``solve``, and keeps the CPU seconds of both."""

    def __init__(self, hand, batch):
        self.hand, self.batch, self.ours, self.theirs = hand, batch, [], []
        self.last = time.process_time()

    def __call__(self, run, info):
        begin = time.process_time()
        self.hand.step(self.batch)
        middle = time.process_time()
        self.ours.append(begin - self.last)
        self.theirs.append(middle - begin)
        self.last = time.process_time()


UNROLLED = {
    "RHG(1)": (partial(meha.RHG, inner_steps=1), Unroll),
    "DARTS": (meha.DARTS, DifferenceQuotient),
}


def unroll(method, x, turns, steps=200):
    """Milliseconds a step, ours and by hand, and the sorted ratios of the medians of each turn."""
    kind, by_hand = UNROLLED[method]
    numbers = {"alpha": 1.0, "beta": 0.05}
    found = []
    for _ in range(turns):
        torch.manual_seed(0)
        x0, y0, batch = torch.zeros(EXAMPLES) if x is None else x(), small(), make_batch(100)
        hand = by_hand(upper, lower, numbers, copy.deepcopy(x0), copy.deepcopy(y0))
        clock = Alternating(hand, batch)
        solution = meha.solve(PROBLEM, x0, y0, kind(**numbers), batches=[batch], tol=None, max_steps=steps, callbacks=clock)
        for a, b in zip(solution.y.parameters(), hand.y.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-4), "the two loops must take the same steps"
        found.append([statistics.median(seconds[steps // 4 :]) for seconds in (clock.ours, clock.theirs)])
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    return ours, theirs, sorted(a / b for a, b in found)


def show_unrolls(turns):
    print(f"{'MLP 784-64-10, 100 examples, ms a step':<48} {'solve':>8} {'by hand':>8} {'ratio':>6}   least, most")
    for method in UNROLLED:
        for name, x in (("weights", None), ("network", weigher)):
            ours, theirs, ratios = unroll(method, x, turns)
            middle = statistics.median(ratios)
            print(f"{f'{method}, x a {name}':<48} {ours:8.2f} {theirs:8.2f} {middle:6.2f}   {ratios[0]:.2f}, {ratios[-1]:.2f}")


def main():
    parser = argparse.ArgumentParser(description="Time and memory of steps on networks.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="memory only, which does not depend on the machine")
    parser.add_argument("--unroll", action="store_true", help="one-step unrolls only")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.unroll:
        show_unrolls(min(options.rounds, 7))
        return
    print(f"{'memory, MB at the peak':<32} {'MEHA':>8} {'sum':>8} {'ratio':>6} {'largest':>8} {'RHG':>8}")
    for name in CASES:
        found = {part: number / 1e6 for part, number in memory(name).items()}
        ours, total, largest = found["MEHA"], found["sum"], found["largest"]
        print(f"{name:<32} {ours:8.2f} {total:8.2f} {ours / total:6.2f} {ours / (total + largest):8.2f} {found['RHG']:8.2f}")
    if options.memory:
        return
    print(f"{'time, ms a step':<32} {'MEHA':>8} {'bare':>8} {'ratio':>6}   20-80 %")
    for name in CASES:
        ours, bare, ratios = compare(name, options.rounds)
        low, middle, high = ratios[len(ratios) // 5], statistics.median(ratios), ratios[-1 - len(ratios) // 5]
        print(f"{name:<32} {ours:8.1f} {bare:8.1f} {middle:6.2f}   {low:.2f} to {high:.2f}")
    show_unrolls(min(options.rounds, 7))


if __name__ == "__main__":
    main()
