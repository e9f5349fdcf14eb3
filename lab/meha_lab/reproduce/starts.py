"""A method from several starts on a problem with a known answer: how each run ends, what it claims, and what is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import meha
from meha_lab.problems.collected import CollectedProblem, collected
from meha_lab.reproduce.cells import Cell, Record

__all__ = ["RIGHT", "TRUTHS", "from_starts"]


RIGHT = 1e-3
"""An answer with at most this error in x is right, if y solves the lower level."""

SEED = 1
"""Of the random starts, which are the same for all methods."""

TRUTHS = ("right", "other x", "wrong y")
"""What an answer may be: the solution; a solution of the lower level at an x that is not the best; none of the lower level."""


def from_starts(cell: Cell) -> Record:
    """Solve the problem of a cell, without its constants, from x0, y0 and from random starts; ``starts`` of them in all.

    A run is recorded as its status, the truth about it (one of :data:`TRUTHS`), the error of x, the gap of the lower level
    relative to its range, and the gradients of f.
    """
    known = collected(cell.case.problem(cell.seed))
    problem, generator = replace(known, constants=None), torch.Generator().manual_seed(SEED)
    ends = []
    for start in range(cell.setting["starts"]):
        x0, y0 = (known.x0, known.y0) if start == 0 else known.start(generator)
        options: dict[str, Any] = {"max_steps": cell.setting["max_steps"]} if "max_steps" in cell.setting else {}
        solution = meha.solve(problem, x0, y0, cell.contender.build(known, {}), **options)
        ends.append([solution.status.value, *_truth(known, solution), solution.counts.lower])
    return {"ends": ends, "outcome": "finished"}


def _truth(problem: CollectedProblem, solution: meha.Solution) -> tuple[str, float, float]:
    found = problem.verify(solution.x, solution.y)
    truth = "right" if found.right(tol=RIGHT) else "wrong y" if found.gap > 1e-6 else "other x"
    return truth, found.x, found.gap
