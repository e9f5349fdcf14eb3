"""Points of other methods, and points that are wrong on purpose, judged by ``meha.verify`` and by the known answers.

``python -m meha_lab.verification`` prints the table of docs/verify.md. Ten problems of the tuning half have a point of each of
MEHA, F2SA and RHG (with the numbers that they choose themselves, 2,000 steps) and from a nested script with scipy, and points
that are wrong by construction: the start, another x with its own lower solution, another y, a point outside of the sets, the
y that is best for F where the problem asks for the nearest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import typer
from scipy.optimize import minimize
from torch import Tensor

import meha
from meha_lab.problems import collection
from meha_lab.problems.collected import CollectedProblem
from meha_lab.problems.collection import Entry
from meha_lab.problems.constrained.known import judge

__all__ = ["NAMES", "main", "points", "right"]

NAMES = (
    "quadratic, condition 10",
    "logistic, one weight",
    "elastic net",
    "double well, n = 1",
    "sine, n = 10",
    "tilted well",
    "crossing wells, inside",
    "3 equations, 8 unknowns, nearest",
    "linear over linear, 1 + 1, 2 rows",
    "two x and a paraboloid",
)

STEPS, AWAY, TOL = 2000, 0.3, 1e-3


def _entries() -> list[Entry]:
    every = [entry for group in (None, "constrained") for entry in collection("tuning", group=group)]
    return [entry for name in NAMES for entry in every if entry.name == name]


def right(entry: Entry, problem: CollectedProblem, x: Tensor, y: Tensor) -> bool:
    """What the known answer says of a point."""
    if entry.group == "constrained":
        return judge(problem, x, y).right()
    return bool(problem.verify(x, y).right(tol=TOL))


def _nested(problem: CollectedProblem) -> tuple[Tensor, Tensor]:
    """The usual script: Nelder and Mead over x, BFGS for y at each x, from where the last one ended."""
    y = problem.y0.clone()

    def respond(x: Tensor) -> Tensor:
        def value(z: Any) -> tuple[float, Any]:
            leaf = torch.tensor(z, dtype=x.dtype, requires_grad=True)
            f = problem.lower(x, leaf.reshape(problem.y0.shape))
            return float(f.detach()), torch.autograd.grad(f, leaf)[0].numpy()

        return torch.tensor(minimize(value, y.numpy(), jac=True, method="BFGS").x, dtype=x.dtype).reshape(problem.y0.shape)

    def upper(z: Any) -> float:
        nonlocal y
        x = torch.tensor(z, dtype=problem.x0.dtype)
        y = respond(x)
        return float(problem.upper(x, y))

    found = minimize(upper, problem.x0.numpy(), method="Nelder-Mead", options={"maxiter": 400, "xatol": 1e-8, "fatol": 1e-12})
    x = torch.tensor(found.x, dtype=problem.x0.dtype)
    return x, respond(x)


def points(entry: Entry, problem: CollectedProblem) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names and points to judge."""
    assert problem.x_star is not None
    assert problem.y_star is not None
    x, y = problem.x_star, problem.y_star
    yield "the known answer", x, y
    stated = replace(problem, constants=None)
    if entry.group not in ("constrained", "hollow"):
        for method in (meha.MEHA(), meha.F2SA(), meha.RHG()):
            try:
                found = meha.solve(stated, problem.x0, problem.y0, method, max_steps=STEPS)
            except (ValueError, TypeError):  # the method cannot take g or Y
                continue
            if not found.status.failed:
                yield method.name, found.x, found.y
        if problem.nonsmooth is None and problem.x_set is None and problem.y_set is None:
            yield "scipy, nested", *_nested(problem)
    yield "the start", problem.x0, problem.y0
    move = AWAY * (1 + x.abs())
    yield "another x, the same y", x + move, y
    yield "another y", x, y + AWAY * (1 + y.abs())
    if entry.group == "hollow":
        free = replace(stated, response="optimistic")
        best = meha.solve(free, problem.x0, problem.y0)
        yield "the y that F would choose", best.x, best.y


def main() -> None:
    """Print one row for each problem, and the totals."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    counts: Counter[tuple[bool, str]] = Counter()
    kinds = [f"{truth}: {says}" for truth in ("right", "wrong") for says in ("converged", "open", "refuted")]
    typer.echo(f"| problem | {' | '.join(kinds)} | gradients |")
    typer.echo("|---" * (len(kinds) + 2) + "|")
    shown = ""
    for entry in _entries():
        problem, own, work = entry.make(), Counter[tuple[bool, str]](), 0
        for name, x, y in points(entry, problem):
            found = meha.verify(problem, x, y, y0=problem.y0)
            says = "converged" if found.converged else "refuted" if found.refuted else "open"
            truth = right(entry, problem, x, y)
            own[truth, says] += 1
            work += found.gradients
            if (truth and says == "refuted") or (not truth and says != "refuted"):
                shown += f"{entry.name}, {name}: {'right' if truth else 'wrong'}\n{found}\n\n"
        counts += own
        row = [own[truth, says] for truth in (True, False) for says in ("converged", "open", "refuted")]
        typer.echo(f"| {entry.name} | {' | '.join(map(str, row))} | {work:,} |")
    row = [counts[truth, says] for truth in (True, False) for says in ("converged", "open", "refuted")]
    typer.echo(f"| **all** | {' | '.join(map(str, row))} | |")
    typer.echo(f"\n{shown}")


if __name__ == "__main__":
    main()
