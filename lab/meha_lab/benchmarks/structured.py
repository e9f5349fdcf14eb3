"""What meha.losses saves beside the plain expressions: a gradient, and a step of MEHA on ridge regression; both in one run.

    OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.structured [--rounds 15]

A ratio is the processor time of the plain expression by that of the loss, as median and 20-80 % range over rounds in which
they take turns. Results go to lab/records/structured.jsonl, and from there to docs/losses.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from meha_lab import pages
from meha_lab.paths import RECORDS
from meha_lab.reproduce.race import processor
from meha_lab.store import Record, Store
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

import meha
from meha.problem.losses import LeastSquares, LinearModelLoss, Logistic, Softmax

SHAPES = {
    "least squares": [(100, 600), (600, 600), (100, 20), (1000, 50), (100_000, 20), (10_000, 500)],
    "least squares, weights": [(1000, 50), (100_000, 20), (10_000, 500)],
    "logistic": [(100, 600), (1000, 50), (100_000, 20), (10_000, 500)],
    "softmax, 10 classes": [(100, 20), (1000, 50), (100_000, 20), (10_000, 500)],
}
ROUND = 0.03
"""Seconds that a contender takes in a round, about."""


def contenders(kind: str, n: int, p: int, seed: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...]]:
    """The loss and the plain expression, as functions of y (and of weights), and the shape of y."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, p, dtype=torch.float64, generator=generator)
    b = A @ torch.ones(p, dtype=torch.float64) + torch.randn(n, dtype=torch.float64, generator=generator)
    signs, labels = b.sign(), torch.randint(10, (n,), generator=generator)
    loss: LinearModelLoss
    if kind == "least squares":
        loss, plain = LeastSquares(A, b), lambda y: (A @ y - b).square().mean() / 2
    elif kind == "least squares, weights":
        loss, plain = LeastSquares(A, b, gram=False), lambda y, w: (w * (A @ y - b).square()).mean() / 2
    elif kind == "logistic":
        loss, plain = Logistic(A, signs), lambda y: softplus(-signs * (A @ y)).mean()
    else:
        loss, plain = Softmax(A, labels, classes=10), lambda y: cross_entropy(A @ y, labels)
    return loss, plain, loss.shape


def gradient(function: Callable[..., Tensor], y: Tensor, weights: list[Tensor]) -> Callable[[], Any]:
    y = y.clone().requires_grad_()
    return lambda: torch.autograd.grad(function(y, *weights), y)[0]


def step(train: Callable[..., Tensor], valid: Callable[..., Tensor], y: Tensor, weights: list[Tensor]) -> Callable[[], Any]:
    """A step on ridge regression, with x the logarithm of its weight; with weights, x are those of the examples."""
    x = torch.full((len(weights[0]) if weights else 1,), -2.0, dtype=y.dtype)

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return train(y, x.sigmoid()) + 0.05 * y.square().sum() if weights else train(y) + 0.5 * (x.exp() * y.square()).sum()

    problem = meha.Problem(lambda x, y: valid(y, *weights), lower)
    run = meha.MEHA(alpha=1e-3, beta=1e-3, eta=1e-3, gamma=10.0, c=1.0).start(problem, x, y)

    def move() -> Tensor:
        run.step()
        return run.y

    return move


def compare(ours: Callable[[], Any], plain: Callable[[], Any], rounds: int) -> dict[str, Any]:
    for _ in range(3):
        a, b = ours(), plain()
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), "the two must compute the same"
    repeats = max(1, round(ROUND / seconds(plain, 3)))
    times = [(seconds(ours, repeats), seconds(plain, repeats)) for _ in range(rounds)]
    ratios = sorted(b / a for a, b in times)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(ratios[len(ratios) // 5], 2), round(ratios[-1 - len(ratios) // 5], 2)],
        "us": round(statistics.median(a for a, _ in times) * 1e6),
        "us plain": round(statistics.median(b for _, b in times) * 1e6),
    }


def seconds(function: Callable[[], Any], repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - begin) / repeats


def measure(rounds: int, store: Store) -> None:
    made = {"processor": processor(), "threads": torch.get_num_threads(), "python": platform.python_version()}
    for kind, shapes in SHAPES.items():
        for n, p in shapes:
            (loss, plain, shape), (valid, plain_valid, _) = (contenders(kind, n, p, seed) for seed in (0, 1))
            y = torch.zeros(shape, dtype=torch.float64)
            weights = [torch.rand(n, dtype=torch.float64)] if "weights" in kind else []
            row = {
                "loss": kind,
                "rows": n,
                "columns": p,
                "gradient": compare(gradient(loss, y, weights), gradient(plain, y, weights), rounds),
                "step": compare(step(loss, valid, y, weights), step(plain, plain_valid, y, weights), rounds),
                "made with": {**made, "torch": str(torch.__version__)},
            }
            store.add("structured", f"{kind}, {n} x {p}", row)
            print(*cells(row), sep=" | ", flush=True)


HEAD = (
    "loss",
    "A",
    *(part for what in ("gradient", "step of MEHA") for part in (f"{what}, plain (us)", "with the loss", "ratio")),
)


def cells(row: Record) -> list[str]:
    """The loss, the shape of A, and both times with their ratio for a gradient and for a step."""
    found = [row["loss"], f"{row['rows']:,} x {row['columns']:,}"]
    for part in (row["gradient"], row["step"]):
        low, high = part["range"]
        found += [f"{part['us plain']:,}", f"{part['us']:,}", f"**{part['ratio']:.2f}** ({low:.2f} to {high:.2f})"]
    return found


def table(store: Store) -> list[str]:
    rows = store.records("structured", alike="made with")
    made = rows[-1]["made with"]
    shown = f"{made['processor']}, {made['threads']} thread, float64, torch {made['torch']}."
    return [*pages.markdown(HEAD, map(cells, rows)), "", shown]


TABLES: pages.Tables = {"losses": ("losses.md", table)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What meha.losses saves beside plain expressions.")
    parser.add_argument("--rounds", type=int, default=15)
    measure(parser.parse_args().rounds, Store(RECORDS))
    pages.draw(TABLES)


if __name__ == "__main__":
    main()
