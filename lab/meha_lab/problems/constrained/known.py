"""Coupled problems in numpy with exact solutions of the lower level, and KnownProblems built from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problems import Distance, KnownProblem, relative
from meha_lab.problems.blueprints import Array, Cast, double, references

__all__ = ["FILE", "Coupled", "Judged", "coupled_problem", "judge"]


FILE = "constrained.json"
"""The file of the answers; ``meha_lab.tools.constrained_references`` computes them."""

TIE = 1e-9
"""Difference of f, relative to 1 + |f|, up to which two points both count as solutions of the lower level."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Coupled:
    """A coupled problem whose lower level is solved by enumeration, on a grid or in closed form.

    Args:
        build: returns the problem, given the function that casts its data.
        x0, y0: the start, feasible or not.
        answer: the solution of the lower level at x that is best for F and meets the upper constraints where one does, or None
            if there is no feasible y; in numpy.
        box: the lower and upper ends of x for a search over a grid.
        solve: returns the solution (x, y) by enumeration; None if a search over x finds it.
    """

    build: Callable[[Cast], Problem]
    x0: Array
    y0: Array
    answer: Callable[[Array], Array | None]
    box: tuple[Array, Array]
    solve: Callable[[], tuple[Array, Array]] | None = None


class Judged(NamedTuple):
    """How far a point is from being the solution, in three numbers.

    Attributes:
        upper: |F - F*| / (1 + |F*|); a feasible point cannot have a smaller F than the solution.
        violation: the largest violation of a constraint or set.
        gap: f at the point minus its least value at the same x; infinite where no y is feasible.
    """

    upper: float
    violation: float
    gap: float

    def right(self, tol: float = 1e-3, violation: float = 1e-6, gap: float = 1e-5) -> bool:
        """Return True if F is that of the solution and the point is feasible on both levels."""
        return self.upper <= tol and self.violation <= violation and self.gap <= gap


def judge(problem: KnownProblem, x: Tensor, y: Tensor) -> Judged:
    """Compare a point with the solution of a coupled problem.

    >>> from meha_lab.problems import collection
    >>> problem = collection("tuning", group="constrained")[0].make()
    >>> judge(problem, problem.x_star, problem.y_star).right()
    True
    """
    assert problem.upper_star is not None
    assert problem.answer is not None
    with torch.no_grad():
        F, f = float(problem.upper(x, y)), float(problem.lower(x, y))
        violation = max((c.violation(x, y) for level in problem.constraints for c in level), default=0.0)
        for domain, value in ((problem.x_set, x), (problem.y_set, y)):
            if domain is not None:
                violation = max(violation, float((value - domain.project(value)).abs().max()))
        # The gap uses the exact lower solution at the same x, not at x*.
        best = problem.answer(x)
        gap = math.inf if best is None else f - float(problem.lower(x, best.to(y)))
    return Judged(abs(F - problem.upper_star) / (1 + abs(problem.upper_star)), violation, gap)


def coupled_problem(
    name: str, make: Callable[[], Coupled], *, dtype: torch.dtype = torch.float64, device: Any = None
) -> KnownProblem:
    """Build the problem in this precision and on this device, with its stored answer."""
    spec = make()

    def cast(value: Any) -> Tensor:
        return torch.as_tensor(np.asarray(value), dtype=torch.float64).to(device, dtype)

    stored = references(FILE).get(name)
    if stored is None:
        raise LookupError(f"name: no reference is stored for {name!r}; compute it with tools/constrained_references.py.")
    x_star, y_star = double(stored["x"]), double(stored["y"])

    def distance(x: Tensor, y: Tensor) -> Distance:
        return Distance(relative(double(x.detach()), x_star), relative(double(y.detach()), y_star))

    def answer(x: Tensor) -> Tensor | None:
        y = spec.answer(double(x.detach()).numpy())
        return None if y is None else cast(y)

    problem = spec.build(cast)
    exact = spec.build(double)  # F* in float64, whatever the precision of the problem
    return KnownProblem(
        **{field.name: getattr(problem, field.name) for field in fields(problem)},
        name=name,
        x0=cast(spec.x0),
        y0=cast(spec.y0),
        x_star=cast(x_star),
        y_star=cast(y_star),
        upper_star=float(exact.upper(x_star, y_star)),
        distance=distance,
        presets={},
        answer=answer,
    )
