"""Steps in x: a weak Wolfe line search with projection, and the stationarity test at kinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from meha.engines.hyper_objective import HyperObjective, HyperValue
from meha.numerics.line_search import CURVATURE, DECREASE, LONGER, TRIALS
from meha.numerics.quadratic_program import solve_program
from meha.numerics.tolerances import LOOSE


def line_search(
    objective: HyperObjective, start: HyperValue, direction: Tensor, project: Callable[[Tensor], Tensor], eps: float
) -> tuple[HyperValue | None, list[HyperValue]]:
    """Find a point along the projected direction that meets the weak Wolfe conditions; returns it and all trials.

    Lengths grow until they bracket such a point, and are then bisected; this also converges where F has kinks (Lewis and
    Overton, 2013). Where differences of F are lost in rounding, a smaller slope is enough (Hager and Zhang, 2005).
    """
    low, high, length = 0.0, math.inf, 1.0
    slope = float(torch.dot(start.gradient, direction))
    noise = eps**LOOSE * abs(start.F)
    best: HyperValue | None = None
    tried: list[HyperValue] = []
    guess = start.y
    for _ in range(TRIALS):
        end = torch.add(start.x, direction, alpha=length)
        x = project(end)
        move = x - start.x
        if not bool(move.any()):  # X blocks the direction, or the length is below rounding
            break
        if tried and torch.equal(x, tried[-1].x):  # a bound of X holds it
            new = tried[-1]
        else:
            new = objective(x, guess)
            tried.append(new)
        promised = float(torch.dot(start.gradient, move))
        now = float(torch.dot(new.gradient, direction)) if math.isfinite(new.F) else 0.0
        decreased = start.F + DECREASE * promised >= new.F  # Armijo, with the usual 1e-4: almost any decrease will do
        level = abs(new.F - start.F) <= noise and abs(now) <= 0.5 * abs(slope)
        if math.isfinite(new.F) and new.regular and (decreased or level):
            if best is None or new.F <= best.F:
                best = new
            clipped = x is not end and not torch.equal(x, end)  # at the boundary of X, a longer step need not lower the slope
            if now >= CURVATURE * slope or clipped:
                return new if decreased or best is None else best, tried
            low, guess = length, new.y
        else:
            high = length
        length = LONGER * length if high == math.inf else (low + high) / 2
        if high < math.inf and high - low <= eps * high:
            break
    return best, tried


def shortest_combination(gradients: Tensor) -> Tensor:
    """The shortest vector in the convex hull of the rows: min ||G' w|| over weights w >= 0 of sum 1.

    At a kink, x is stationary if zero is a convex combination of the gradients around it, although none of them is zero.
    """
    count, gram = len(gradients), (gradients @ gradients.T).numpy(force=True).astype(float)
    answer = solve_program(gram, np.zeros(count), -np.eye(count), np.zeros(count), np.ones((1, count)), np.ones(1))
    return gradients.T @ torch.as_tensor(answer.z).to(gradients)
