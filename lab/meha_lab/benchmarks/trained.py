"""The response Trained without numbers, beside numbers that trials chose, on five small learning problems.

    python -m meha_lab.benchmarks.trained [--seeds 5] [--steps 60]

The numbers are the best of six on two seeds of their own, by F of a fresh training at the x that they lead to. On other seeds,
the x with and without numbers are judged alike: by F after a fresh training with the chosen numbers, and by the part of the
fall from x0 that is reached without numbers. Processor time; set OMP_NUM_THREADS=1. It takes some ten minutes.
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial
from itertools import pairwise

import torch
from meha_lab import pages
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import meha
from meha.problem.responses import Trained

CHOOSING, FIRST = (100, 101), 200  # seeds of the trials, and the first of those that are measured
NUMBERS = [(steps, share) for steps in (10, 30, 100) for share in (0.25, 1.0)]  # the step size in parts of 1 / curvature
FRESH = 20  # trainings over which F is averaged, where they differ


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def network(seed, *widths):
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@dataclasses.dataclass
class LearningProblem:
    """A problem without a response, a start, and where its training begins."""

    problem: meha.Problem
    x0: object
    y0: object
    rate: float
    start: object = None
    batches: object = None
    others: object = None


def cleaning(seed, n=200):
    """Weights of examples, of which 40 % have random labels."""
    g = drawn(seed)
    classes, inputs = torch.randn(10, 3, generator=g), torch.randn(2 * n, 10, generator=g)
    labels = (inputs @ classes).argmax(1)
    wrong, noisy = torch.rand(n, generator=g) < 0.4, labels[:n].clone()
    noisy[wrong] = torch.randint(3, (int(wrong.sum()),), generator=g)

    def lower(x, y):
        return (x.sigmoid() * cross_entropy(y(inputs[:n]), noisy, reduction="none")).mean()

    problem = meha.Problem(lambda x, y: cross_entropy(y(inputs[n:]), labels[n:]), lower)
    return LearningProblem(problem, torch.zeros(n), network(seed, 10, 32, 3), 1.5)


def decay(seed, n=60):
    """Weight decay by layer, for a regression with few data."""
    g = drawn(seed)
    inputs = torch.randn(2 * n, 8, generator=g)
    targets = torch.sin(inputs[:, :2].sum(1, keepdim=True)) + 0.3 * torch.randn(2 * n, 1, generator=g)

    def lower(x, y):
        sizes = torch.stack([p.square().sum() for p in y.parameters() if p.ndim > 1])
        return mse_loss(y(inputs[:n]), targets[:n]) + (x.exp() * sizes).sum()

    problem = meha.Problem(lambda x, y: mse_loss(y(inputs[n:]), targets[n:]), lower)
    return LearningProblem(problem, torch.full((3,), -6.0), network(seed, 8, 32, 32, 1), 0.16)


def distillation(seed, n=400):
    """Eight examples that train a network from any random parameters."""
    g = drawn(seed)
    classes, inputs = torch.randn(6, 4, generator=g), torch.randn(n, 6, generator=g)
    labels, own = (inputs @ classes).argmax(1), torch.arange(8) % 4
    problem = meha.Problem(lambda x, y: cross_entropy(y(inputs), labels), lambda x, y: cross_entropy(y(x), own))
    return LearningProblem(problem, 0.5 * torch.randn(8, 6, generator=g), network(seed, 6, 24, 4), 1.6, "redraw")


def sines(seed):
    """The start of a network from which it learns sines from ten points."""
    g = drawn(seed)

    def task():
        (size,), (phase,), z = (
            1 + 2 * torch.rand(1, generator=g),
            3 * torch.rand(1, generator=g),
            torch.rand(20, 1, generator=g),
        )
        z = 6 * z - 3
        return z, size * torch.sin(z + phase)

    def error(y, z, target):
        return mse_loss((z @ y["a"] + y["b"]).tanh() @ y["c"] + y["d"], target)

    shapes = {"a": (1, 20), "b": (20,), "c": (20, 1), "d": (1,)}
    x0 = {name: torch.randn(shape, generator=g) * (0.2 if name == "c" else 1.0) for name, shape in shapes.items()}
    problem = meha.Problem(
        lambda x, y, batch: error(y, batch[0][10:], batch[1][10:]), lambda x, y, batch: error(y, batch[0][:10], batch[1][:10])
    )
    batches, others = ([task() for _ in range(count)] for count in (50, FRESH))
    return LearningProblem(problem, x0, {name: part.clone() for name, part in x0.items()}, 0.05, lambda x: x, batches, others)


def regression(seed, n=60):
    """Weights of examples for a linear model with tensors, whose condition number is a thousand."""
    g, scales = drawn(seed), torch.logspace(0, -1.5, 20, dtype=torch.float64)
    inputs = torch.randn(2, n, 20, generator=g, dtype=torch.float64) * scales
    noise = torch.tensor([0.3, 0.1])[:, None] * torch.randn(2, n, generator=g, dtype=torch.float64)
    targets = inputs.sum(-1) + noise
    problem = meha.Problem(
        lambda x, y: mse_loss(inputs[1] @ y, targets[1]),
        lambda x, y: (x.sigmoid() * (inputs[0] @ y - targets[0]).square()).mean(),
    )
    return LearningProblem(problem, torch.zeros(n, dtype=torch.float64), torch.zeros(20, dtype=torch.float64), 0.9)


CASES = {
    "weights of noisy examples": cleaning,
    "decay by layer": decay,
    "distilled examples": distillation,
    "start for few points": sines,
    "linear model, tensors": regression,
}


def solved(make, seed, numbers, steps):
    """The solution with these numbers of training, and its processor time."""
    case, begin = make(seed), time.process_time()
    problem = dataclasses.replace(case.problem, response=Trained(start=case.start, **numbers))
    torch.manual_seed(seed)
    method = meha.RHG(x_optimizer=partial(torch.optim.Adam, lr=0.05))
    solution = meha.solve(problem, case.x0, case.y0, method, max_steps=steps, tol=None, batches=case.batches)
    return solution, time.process_time() - begin


def merit(make, seed, x, numbers):
    """F at x after a fresh training with these numbers, the mean where trainings differ."""
    case = make(seed)
    problem = dataclasses.replace(case.problem, response=Trained(start=case.start, **numbers))
    still = meha.RHG(alpha=1e-12)
    there = meha.solve(problem, case.x0 if x is None else x, case.y0, still, max_steps=1, tol=None, batches=case.batches)
    if case.others is not None:
        return statistics.mean(there.refit(batches=[batch]).upper for batch in case.others)
    if case.start == "redraw":
        return statistics.mean(there.refit(seed=i).upper for i in range(FRESH))
    return there.refit().upper


def chosen(make, steps):
    """The numbers with the best F on the seeds of the trials."""

    def tried(numbers):
        return statistics.mean(merit(make, seed, solved(make, seed, numbers, steps)[0].x, numbers) for seed in CHOOSING)

    rate = make(CHOOSING[0]).rate
    return min((dict(steps=T, lr=share * rate) for T, share in NUMBERS), key=tried)


def compared(make, seed, numbers, steps):
    """F at x0, at the x with these numbers, and without; the steps that were found; and both times."""
    (given, first), (free, second) = (solved(make, seed, each, steps) for each in (numbers, {}))
    merits = [merit(make, seed, x, numbers) for x in (None, given.x, free.x)]
    return (*merits, free.problem.response.steps, first, second)


HEAD = ("", "chosen: steps, lr", "found: steps", "F at x0", "chosen", "found", "part of the fall", "time, chosen", "found")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many are measured")
    parser.add_argument("--steps", type=int, default=60, help="steps of x")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make in CASES.items():
        numbers = chosen(make, options.steps)
        table = [compared(make, FIRST + i, numbers, options.steps) for i in range(options.seeds)]
        x0, given, free, found, first, second = (statistics.mean(column) for column in zip(*table, strict=True))
        parts = [(row[0] - row[2]) / (row[0] - row[1]) for row in table]
        fell = f"{statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
        times = f"{first:.1f} s", f"{second:.1f} s"
        rows.append(
            [
                name,
                f"{numbers['steps']}, {numbers['lr']:.2g}",
                f"{found:.0f}",
                *(f"{F:.3g}" for F in (x0, given, free)),
                fell,
                *times,
            ]
        )
        print(rows[-1], flush=True)
    print("\n".join(pages.markdown(HEAD, rows)))


if __name__ == "__main__":
    main()
