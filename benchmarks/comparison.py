"""Every method on every problem with a known answer, each with the best of its settings in meha.reproduce.contenders.

    python benchmarks/comparison.py            # tune all methods, write benchmarks/results/comparison.json and the table
    python benchmarks/comparison.py BOME CG    # only these rows
    python benchmarks/comparison.py --table    # write the table in docs/how-to-choose.md again

Work is the number of gradients of F and of f and of Hessian-vector products together. A method solves a problem when the
relative errors of x and of y are at most TARGET and stay so while it does as much work again, and STAY at least: passing by is
not solving. It may spend BUDGET to get there.
tests/test_comparison.py runs the best setting of each cell again, and checks the table.
"""

from __future__ import annotations

import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meha.problems import group_lasso, lasso, merely_convex, sine, strong_convex
from meha.reproduce.contenders import CONTENDERS, SETTINGS

TARGET, BUDGET, STAY = 0.05, 20_000, 2_000

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/comparison.json", ROOT / "docs/how-to-choose.md"

PROBLEMS = {
    "strong convex": lambda: strong_convex(10),
    "merely convex": lambda: merely_convex(10),
    "sine, n = 1": lambda: sine(1),
    "sine, n = 10": lambda: sine(10),
    "lasso": lambda: lasso(10),
    "group lasso": lambda: group_lasso(60, 6, design="orthogonal"),
}


def attempt(row: str, problem_name: str, index: int, budget: int = BUDGET) -> dict[str, Any]:
    """Run one setting: the work after which the problem stays solved (None if it does not), or why the method refuses it."""
    problem = PROBLEMS[problem_name]()
    try:
        method = CONTENDERS[row].build(problem, CONTENDERS[row].settings()[index])
        run = method.start(problem, problem.x0, problem.y0)
    except ValueError as error:
        return {"setting": index, "refused": str(error)}
    solved, error, work = None, math.inf, 0
    outcome = ""
    while not outcome:
        try:
            run.step()
        except ArithmeticError as reason:
            outcome = str(reason)
            break
        except ValueError as reason:
            return {"setting": index, "refused": str(reason)}
        work = run.counts.upper + run.counts.lower + run.counts.hvp
        error = float(np.max(problem.distance(run.x, run.y)))  # NaN if one is
        if not math.isfinite(error) or error > 1e6:
            outcome = "diverged"
        solved = (work if solved is None else solved) if error <= TARGET else None
        if run.finished:
            outcome = "finished"
        elif work >= (budget if solved is None else solved + max(solved, STAY)):
            outcome = "budget"
    return {"setting": index, "work": solved, "error": float(f"{error:.3g}"), "x": _brief(run.x), "outcome": outcome}


def _brief(x: torch.Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in x.flatten()[:3]]


def better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a result is better: solved with less work, or closer."""
    if "refused" in one or "refused" in other:
        return "refused" in other
    key = [(r["work"] is None, r["work"] or (r["error"] if r["error"] == r["error"] else math.inf)) for r in (one, other)]
    return key[0] < key[1]


def tune(rows: list[str]) -> dict[str, dict[str, Any]]:
    """The best of the settings for each row and problem; every setting is run."""
    jobs = [(row, name, index) for row in rows for name in PROBLEMS for index in range(SETTINGS)]
    found: dict[str, dict[str, Any]] = {row: {} for row in rows}
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for (row, name, _), result in zip(jobs, pool.map(attempt, *zip(*jobs, strict=True)), strict=True):
            if name not in found[row] or better(result, found[row][name]):
                found[row][name] = result
            if result["setting"] == SETTINGS - 1:
                print(row, "|", name, "|", found[row][name], flush=True)
    return found


SINES = ("sine, n = 1", "sine, n = 10")

FAILURES = {
    "open": {
        "merely convex": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; IGJO; GridSearch; RandomSearch; TPE",
    },
    "valley": {
        "sine, n = 1": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; BOME; SLM; IGJO; GridSearch",
        "sine, n = 10": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; BOME; SLM; IGJO; GridSearch; BDA; IAPTT",
    },
    "curvature": dict.fromkeys(("merely convex", *SINES), "CG"),
    "blind": dict.fromkeys(("strong convex", "merely convex", *SINES), "DARTS, order 1"),
    "one step": {"strong convex": "DARTS, order 2"},
    "heuristic": dict.fromkeys(("strong convex", "merely convex", *SINES), "BRC"),
    "many": {"lasso": "RandomSearch", "group lasso": "GridSearch; RandomSearch; TPE"},
    "inexact": {"lasso": "VFiDCA"},
}
KNOWN_FAILURES = {
    (row, name): reason for reason, rows in FAILURES.items() for name, listed in rows.items() for row in listed.split("; ")
}
REASONS = {
    "open": "What the lower level leaves open never moves: the second half of y keeps its start, and x ends near 1/2.",
    "valley": "Ends in another valley of f, near the start, or moves between valleys.",
    "curvature": "The Hessian of f in y is singular or indefinite, and the run breaks down; damping does not help.",
    "blind": "Order 1 ignores how y depends on x.",
    "one step": "One lower step shows only a part of how y depends on x, so that the answer is biased.",
    "heuristic": "The direction is a heuristic; the run diverges, or ends elsewhere.",
    "many": "One value for all weights does not suffice, and each by itself is too much for the candidates that can be tried.",
    "inexact": "Its own test ends the run with y off by 6 %: the lower level is penalised, and holds up to about 1 / beta.",
    "smooth": "Refuses a non-smooth lower level, with the reason.",
    "lasso": "Takes penalised least squares only.",
}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as markdown: work until solved, or the closest that a method came, with a letter for the reason."""
    letters = {reason: chr(ord("a") + i) for i, reason in enumerate(REASONS)}
    lines = ["| | " + " | ".join(PROBLEMS) + " |", "|---" * (1 + len(PROBLEMS)) + "|"]
    for row, cells in results.items():
        shown = []
        for name in PROBLEMS:
            cell = cells[name]
            if "refused" in cell:
                shown.append(f"({letters['lasso' if row == 'VFiDCA' else 'smooth']})")
            elif cell["work"] is None:
                error = f"{cell['error']:.2g}" if cell["error"] < 100 else "diverges"
                shown.append(f"{error} ({letters[KNOWN_FAILURES[row, name]]})")
            else:
                shown.append(f"**{cell['work']:,}**")
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *(f"- ({letters[reason]}) {text}" for reason, text in REASONS.items())])


BEGIN, END = "<!-- table: written by benchmarks/comparison.py -->", "<!-- end of table -->"


def page(results: dict[str, dict[str, Any]], text: str) -> str:
    """The page with its table replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    asked = [row for row in sys.argv[1:] if not row.startswith("--")]
    if "--table" not in sys.argv:
        results |= tune(asked or [row for row in CONTENDERS if not CONTENDERS[row].automatic])
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({row: results[row] for row in CONTENDERS if row in results}, indent=1) + "\n")
    PAGE.write_text(page(results, PAGE.read_text()))
