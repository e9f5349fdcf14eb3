"""check(): examine a problem before a run, and say what to fix."""

from __future__ import annotations

from typing import Any

import torch

from meha.inspection.checks import Inspection
from meha.inspection.report import Report
from meha.problem.loaders import random_states, set_random_states
from meha.problem.problem import Problem
from meha.tensors.variables import Variable

__all__ = ["Report", "check"]


def check(problem: Problem, x0: Any, y0: Any, batch: Any = None, other_batch: Any = None) -> Report:
    """Examine a problem before a run from (x0, y0): what may go wrong, and what to do about it.

    The check covers values at the start, dependence on x and y, gradients against finite differences, whether repeated calls
    return the same values, kinks, whether f can be differentiated twice, the convexity of f in y, its basins if it is not
    convex, directions of y which the lower level leaves open at its solution, and scales; for problems with constraints that
    couple x and y, the constraints at the start, a feasible point of the lower level there, its active constraints and their
    gradients. It visits the start and some points around it; what does not show there is not reported. It takes about 30
    gradients of F and 100 of f, up to 400 of f to count basins and as many to solve the lower level, fewer with modules and
    slow objectives.
    Modules, tensors and random number generators stay unchanged.

    Args:
        x0: the start of x; None for a problem without x.
        batch: a batch, if the objectives take one, such as ``next(iter(loader))``.
        other_batch: another one; with it, the check sees whether y belongs to its batch, as the heads of tasks do.

    Returns:
        A report to print. Everything that is wrong with the problem, even an exception in an objective, is in its ``warnings``.

    Raises:
        TypeError, ValueError: an argument is not a problem, or holds nothing to optimise.

    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 1).square().sum() + y.square().sum(),
    ...     lower=lambda x, y: (y - x.detach()).square().sum() + y.abs().sum(),
    ... )
    >>> report = check(problem, torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> report.ok, list(report.kinks), report.deviations["F in x"] < 1e-6
    (False, ['f in y'], True)
    >>> print(report.warnings[0])
    lower: its value changes with x, but autograd does not see it; avoid .detach(), .item(), .data and numpy on x.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    states = random_states()
    with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode would have no gradients
        y = Variable(y0, "y")
        problem, x0 = problem._with_dummy_x(x0, y)
        x = Variable(x0, "x")
        for variable in (x, y):
            if variable.divided:
                raise ValueError(
                    f"{variable.argument}0: is divided among processes, and a check looks at whole variables in one; check the"
                    " problem on a small module that is not sharded."
                )
        inspection = Inspection(problem, x, y, batch, other_batch)  # it works on copies of x and y
        try:
            return inspection.report()
        finally:
            set_random_states(states)  # a run after a check draws what it would have drawn without
