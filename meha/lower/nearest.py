"""Find the lower solution nearest to a point, as the limit of a proximal term whose weight vanishes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meha.lower.flat_problem import FlatProblem, LowerPoint
from meha.numerics.extrapolation import richardson
from meha.numerics.limited_memory import PAIRS, LimitedMemory
from meha.numerics.tolerances import FAR, NEAR, PATIENCE, STEPS, TIGHT
from meha.tensors.vectors import vector_norm

RATIO = 10.0  # from the curvature of f in y to the first weight of the proximal term, and from each weight to the next


@dataclass(frozen=True, eq=False)
class NearestSolution:
    """A lower solution that was computed from a start.

    Attributes:
        y: the solution.
        lower: f + g there.
        solved: whether the limit converged to the accuracy asked for.
    """

    y: Tensor
    lower: float
    solved: bool


def solve_nearest(levels: FlatProblem, start: Tensor, tol: float, curvature: float) -> NearestSolution:
    """The solution of the lower level at the present x that is nearest to ``start``, in the basin of the start.

    Args:
        tol: relative accuracy; at least the root of the rounding error.
        curvature: that of f in y.

    Raises:
        BudgetError: the budget of gradients of f is used up.
    """
    curvature, tol = curvature or 1.0, max(tol, math.sqrt(levels.eps))
    weights = [curvature / RATIO]
    while weights[-1] > RATIO * levels.eps**TIGHT * curvature:
        weights.append(weights[-1] / RATIO)
    pairs = LimitedMemory.sized(PAIRS, len(start))
    ys, limits, y, solved = [], list[Tensor](), levels.inside(start), False
    for weight in weights:
        y = _solve(levels, y, start, weight, curvature, pairs, tol)
        ys.append(y)
        limit = y
        if len(ys) > 2 and vector_norm(ys[-1] - ys[-2]) <= 0.5 * vector_norm(ys[-2] - ys[-3]):
            # The error is of the order of the weight once changes shrink like it, and not, say, like its root.
            limit = levels.inside(richardson(ys[-1], ys[-2], RATIO))
        limits.append(limit)
        scale = max(vector_norm(limit), vector_norm(limit - start))
        if len(limits) > 2 and vector_norm(limits[-1] - limits[-2]) <= tol * scale:
            solved = True
            break
    end = _polish(levels, limits[-1], curvature, pairs, tol * max(vector_norm(limits[-1]), vector_norm(limits[-1] - start)))
    return NearestSolution(end.z, end.value, solved)


def _solve(
    levels: FlatProblem, y: Tensor, start: Tensor, weight: float, curvature: float, pairs: LimitedMemory, tol: float
) -> Tensor:
    """Minimise f + g + weight / 2 ||. - start||^2 from y on."""

    def evaluate(z: Tensor) -> LowerPoint:
        """f + g and the term; ``upper`` is the gradient of the term without its weight."""
        at, away = levels.lower(z), z - start
        square = 0.5 * weight * float(away @ away)
        noise = at.noise + levels.eps * square
        return LowerPoint(z, at.smooth + square, at.gradient + weight * away, at.nonsmooth, noise, upper=away, f_x=at.f_x)

    pairs.reweigh(weight)  # what was learned with other weights stays exact
    descent = levels.descent(evaluate, pairs, min(1 / (curvature + weight), levels.oracle.longest_prox))
    point = descent.evaluate(y)
    smallest, idle, far, cleared = math.inf, 0, FAR * (1 + vector_norm(y) + vector_norm(start)), False
    for _ in range(STEPS):
        if not point.finite or vector_norm(point.z) > far:
            break
        d, remembered = descent.direction(point)
        residual = vector_norm(descent.residual(point).r)
        wanted = NEAR * tol * weight * max(vector_norm(point.z - start), tol * vector_norm(point.z))
        if residual <= max(wanted, 2 * levels.eps * curvature * vector_norm(point.z)):
            break
        idle = 0 if residual < 0.5 * smallest else idle + 1
        smallest = min(smallest, residual)
        if idle >= PATIENCE and -float(descent.residual(point).r @ d) <= point.noise:
            break
        new = descent.step(point, d, remembered)
        if new is None:
            if cleared or not remembered:
                break
            pairs.clear()
            cleared = True
            continue
        point, cleared = new, False
    return point.z


def _polish(levels: FlatProblem, y: Tensor, curvature: float, pairs: LimitedMemory, reach: float) -> LowerPoint:
    """Take a few steps on f + g alone, within ``reach``: they bring the extrapolated point back to the set of solutions."""
    pairs.reweigh(0.0)
    descent = levels.descent(levels.lower, pairs, min(1 / curvature, levels.oracle.longest_prox))
    point = first = descent.evaluate(y)
    for _ in range(PATIENCE):
        new = descent.step(point, descent.residual(point).target - point.z, False)
        if new is None or not new.finite or vector_norm(new.z - first.z) > reach:
            break
        point = new
    return point
