"""One call of ``meha.solve`` as a cell, and the best of many random choices of MEHA's numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import meha
from meha.lower.proximal_gradient import solve_lower
from meha.problem.oracle import Oracle
from meha.problems import KnownProblem
from meha.running.solve import uninterrupted
from meha.tensors.variables import Variable
from meha_lab.problems.collected import collected
from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.rows import run_rows

__all__ = ["GOOD", "RANGES", "draw", "judged", "search", "solve_cell"]


GOOD = 1e-3
"""An answer with at most this error is good."""

RANGES = {"alpha": (1e-5, 10.0), "beta": (1e-5, 10.0), "eta": (1e-5, 10.0), "gamma": (1e-2, 1e3), "c": (1e-2, 1e3)}
"""Ranges of the random search, the same for all problems."""


def solve_cell(cell: Cell) -> Record:
    """Solve the problem of a cell, without its constants, which a user does not know.

    The setting may have ``preset`` (of the problem), ``random`` (the number of random points), ``max_steps``, and ``gradients``
    (of f, after which the run is stopped).
    """
    problem = replace(cell.case.problem(cell.seed), constants=None)
    setting = dict(cell.setting)
    options = {"max_steps": setting["max_steps"]} if "max_steps" in setting else {}
    if "random" in setting:
        return search(problem, draw(cell.case.name, setting["random"]), setting["max_steps"])
    if "preset" in setting:
        return _attempt(problem, problem.preset(setting["preset"]), tol=None, **options)
    if "gradients" in setting:
        options["callbacks"] = lambda run, info: run.counts.lower >= setting["gradients"]
    return _attempt(problem, cell.contender.build(problem, {}), **options)


def _attempt(problem: KnownProblem, method: meha.Method, **options: Any) -> Record:
    solution = uninterrupted(meha.solve(problem, problem.x0, problem.y0, method, **options))
    return {
        **judged(problem, solution.x, solution.y),
        "gradients": [solution.counts.lower, solution.counts.upper],
        "steps": solution.steps,
        "seconds": round(solution.seconds, 2),
        "outcome": solution.status.value,
    }


def judged(problem: KnownProblem, x: Tensor, y: Tensor) -> dict[str, float | None]:
    """The errors of an answer, in three digits; None for values that are not finite.

    The group lasso has no known answer. Its weights x are judged by the validation error of the lower solution at x: F at the y
    of the answer is small for any y that overfits the validation data, whatever x is.
    """
    try:
        errors = {"error": collected(problem).error(x, y)} if problem.x_star is not None else _validated(problem, x, y)
    except ArithmeticError:  # x is so far off that its lower level cannot be solved
        errors = {"error": math.inf}
    return {name: float(f"{value:.3g}") if math.isfinite(value) else None for name, value in errors.items()}


def _validated(problem: KnownProblem, x: Tensor, y: Tensor) -> dict[str, float]:
    at_x, start = Variable(x, "x"), Variable(problem.y0, "y")
    fitted = solve_lower(Oracle(problem, at_x, start), at_x, start, tol=1e-7, max_steps=5000).theta.snapshot()
    validation, test = problem.upper, problem.metrics["test error"]
    with torch.no_grad():
        errors = {"error": float(validation(x, fitted)), "test": test(x, fitted)}
        return {**errors, "error of y": float(validation(x, y)), "test of y": test(x, y)}


def search(problem: KnownProblem, numbers: Mapping[str, Tensor], steps: int) -> Record:
    """The best of many points, run again by the library; how many of them diverge, and how many come close."""
    X, Y = run_rows(problem, problem.x0, problem.y0, numbers, steps)
    alive = X.flatten(1).isfinite().all(1) & Y.flatten(1).isfinite().all(1)
    errors = {i: judged(problem, X[i], Y[i])["error"] for i in alive.nonzero().flatten().tolist()}
    ranked = {i: error for i, error in errors.items() if error is not None}
    counts = {"diverged": int((~alive).sum()), "within": sum(error <= GOOD for error in ranked.values())}
    if not ranked:
        end = meha.Status.DIVERGED.value
        return {"error": None, "gradients": [0, 0], "steps": 0, "seconds": 0.0, "outcome": end, **counts}
    best = min(ranked, key=lambda i: ranked[i])
    point: dict[str, Any] = {name: float(f"{value[best]:.4g}") for name, value in numbers.items()}
    return {**_attempt(problem, meha.MEHA(**point), max_steps=steps, tol=None), **counts, "point": point}


def draw(name: str, points: int) -> dict[str, Tensor]:
    """Random values of MEHA's six numbers for a case: p is uniform, the others are log-uniform."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    u = torch.rand(6, points, generator=generator, dtype=torch.float64)
    logs = {key: math.log(low) + math.log(high / low) * u[i] for i, (key, (low, high)) in enumerate(RANGES.items())}
    return {**{key: value.exp() for key, value in logs.items()}, "p": u[5] / 2}
