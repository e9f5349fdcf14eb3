"""Every method on every problem with a known answer, each with the best of eight declared settings.

    python benchmarks/comparison.py            # tune all methods, write benchmarks/results/comparison.json and the table
    python benchmarks/comparison.py BOME CG    # only these rows
    python benchmarks/comparison.py --table    # write the table in docs/how-to-choose.md again

Work is the number of gradients of F and of f and of Hessian-vector products together. A method solves a problem when the
relative errors of x and of y are at most TARGET and stay so while it does as much work again, and STAY at least: passing by is
not solving. It may spend BUDGET to get there.
tests/test_comparison.py runs the best setting of each cell again, and checks the table.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import meha
from meha.oracle import Oracle
from meha.problems import KnownProblem, group_lasso, lasso, merely_convex, sine, strong_convex
from meha.schedules import InversePower, Power, Ramp
from meha.variables import Variable

TARGET, BUDGET, STAY, SETTINGS = 0.05, 20_000, 2_000, 8

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

Method, Grid = meha.Method, dict[str, tuple[Any, ...]]

# Each grid has eight settings. alpha, beta, eta and c are multiples of what the method chooses by itself for the problem.
GRIDS: dict[str, tuple[type[Method], Grid]] = {
    "MEHA": (meha.MEHA, {"c": (0.3, 1, 3, 10), "p": (0.3, 0.49)}),
    "RHG": (meha.RHG, {"alpha": (0.2, 1), "inner_steps": (10, 50), "warm_start": (True, False)}),
    "RHG, truncated": (meha.RHG, {"alpha": (0.2, 1), "inner_steps": (20, 100), "terms": (5, 10)}),
    "BDA": (meha.BDA, {"alpha": (0.2, 1), "inner_steps": (16, 64), "mu": (0.1, InversePower(0.5, power=1.0))}),
    "IAPTT": (meha.IAPTT, {"alpha": (0.2, 1), "beta": (0.1, 1), "eta": (0.1, 1), "inner_steps": (40,)}),
    "CG": (meha.CG, {"alpha": (0.2, 1), "inner_steps": (1, 20), "damping": (0.0, 0.1)}),
    "NS": (meha.NS, {"alpha": (0.2, 1), "inner_steps": (1, 20), "terms": (5, 40)}),
    "GALET": (meha.GALET, {"alpha": (0.2, 1), "inner_steps": (1, 20), "terms": (5, 40)}),
    "BAMM": (meha.BAMM, {"mu": (0.0, *(InversePower(0.9, power=q) for q in (0.1, 0.3, 1.0))), "line_search": (False, True)}),
    "BRC": (meha.BRC, {"alpha": (0.2, 1), "beta": (0.1, 1), "inner_steps": (1, 5)}),
    "DARTS, order 1": (meha.DARTS, {"order": (1,), "alpha": (0.05, 0.2, 0.5, 1), "beta": (0.3, 1)}),
    "DARTS, order 2": (meha.DARTS, {"order": (2,), "alpha": (0.05, 0.2, 0.5, 1), "beta": (0.3, 1)}),
    "BOME": (meha.BOME, {"alpha": (0.2, 1), "inner_steps": (1, 10), "control": ("norm", "gap")}),
    "F2SA": (meha.F2SA, {"alpha": (0.2, 1), "inner_steps": (1, 10), "c": (Power(1.0, 1 / 3), Ramp(0.1, 30.0, 1000))}),
    "VPBGD": (meha.VPBGD, {"alpha": (0.2, 1), "inner_steps": (1, 5), "c": (Ramp(0.0, 30.0, 300), Ramp(0.0, 30.0, 1500))}),
    "SLM": (meha.SLM, {"alpha": (0.2, 1), "inner_steps": (1, 5), "dual_step": (0.3, 3.0)}),
    "BVFIM": (meha.BVFIM, {"penalty": ("log", "inverse"), "m2": (1.0, 30.0), "hold": (20, 100)}),
    "BVFIM, sequential": (meha.BVFIM, {"penalty": ("quadratic",), "m2": (1.0, 30.0), "tau": (0.1, 1.0), "hold": (20, 100)}),
    "IGJO": (meha.IGJO, {"alpha": (1, 10), "decrease": (5e-4, 1e-8), "threshold": (1e-4, 1e-6)}),
    "VFiDCA": (meha.VFiDCA, {"radii": (0.05, 1.0), "rho": (0.1, 1.0), "beta": (1, 10), "tol": (1e-4,), "iterations": (300,)}),
}


SEARCHES: dict[str, tuple[type[Method], Grid]] = {
    "GridSearch": (meha.GridSearch, {"shared": (True, False), "warm_start": (True, False), "points": (3, 200)}),
    "RandomSearch": (meha.RandomSearch, {"shared": (True, False), "warm_start": (True, False), "seed": (0, 1)}),
    "TPE": (meha.TPE, {"shared": (True, False), "warm_start": (True, False), "seed": (0, 1)}),
}
GRIDS |= SEARCHES


def settings(row: str) -> list[dict[str, Any]]:
    """The declared settings of a row, in their order."""
    names, values = zip(*GRIDS[row][1].items(), strict=True)
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def build(row: str, problem: KnownProblem, setting: dict[str, Any]) -> Method:
    """The method of a setting: a search with its space, or steps as multiples of those that the method would choose."""
    kind = GRIDS[row][0]
    if row in SEARCHES:
        return _search(kind, problem, dict(setting))
    if setting.get("mu") == 0.0:
        setting = {**setting, "strategy": None}  # BAMM's step strategies are powers of mu
    fixed = {name: value for name, value in setting.items() if name not in SCALED or not isinstance(value, int | float)}
    method = kind(**fixed)
    x, y = Variable(problem.x0, "x"), Variable(problem.y0, "y")
    chosen, _ = method.resolve(Oracle(problem, x, y), x, y, None)
    scaled = {name: value * getattr(chosen, name) for name, value in setting.items() if name not in fixed}
    return replace(chosen, **scaled)


SCALED = ("alpha", "beta", "eta", "c")


def _search(kind: type[Method], problem: KnownProblem, setting: dict[str, Any]) -> Method:
    """All coordinates of x in the same interval, each by itself or with one value for all."""
    like = problem.x0
    interval = meha.Uniform(-6.0, 6.0) if problem.x_set is None else meha.LogUniform(1e-3, 10.0)
    space: Any = {"space": interval}
    if setting.pop("shared"):
        space = {"space": {"value": interval}, "to_x": lambda values: torch.full_like(like, values["value"])}
    elif setting.get("points", 0) > 3 and like.numel() > 1:
        setting["points"] = 2  # the product grid would have 200^n points
    trials = {meha.RandomSearch: {"trials": 400}, meha.TPE: {"trials": 200}}.get(kind, {})
    return kind(**space, **trials, **setting)


def attempt(row: str, problem_name: str, index: int, budget: int = BUDGET) -> dict[str, Any]:
    """Run one setting: the work after which the problem stays solved (None if it does not), or why the method refuses it."""
    problem = PROBLEMS[problem_name]()
    try:
        method = build(row, problem, settings(row)[index])
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
        results |= tune(asked or list(GRIDS))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({row: results[row] for row in GRIDS if row in results}, indent=1) + "\n")
    PAGE.write_text(page(results, PAGE.read_text()))
