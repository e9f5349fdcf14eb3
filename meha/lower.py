"""The lower level solved to a tolerance: FISTA with backtracking and restart, for any f, g and Y.

One solver serves the lower level itself, min_y (f + g)(x, y), and its proximal form,
min_theta (f + g)(x, theta) + ||theta - y||^2 / (2 gamma), whose value is the Moreau envelope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from meha.checks import check_count
from meha.oracle import Oracle
from meha.variables import Leaves, Variable, copy_, inner, norm, subtract

__all__ = ["LowerSolution", "solve_lower"]

PATIENCE = 1000
"""Iterations without a smaller residual after which the solver gives up."""


@dataclass(frozen=True)
class LowerSolution:
    """A point theta of the lower level, and how well it solves it.

    Attributes:
        theta: the minimiser found.
        residual: the norm of the prox-gradient mapping at theta; zero exactly at stationary points.
        steps: trial steps taken; each costs one or two gradients of f.
        converged: whether the residual fell under the tolerance.
    """

    theta: Variable
    residual: float
    steps: int
    converged: bool


def solve_lower(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    *,
    gamma: float | None = None,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
) -> LowerSolution:
    """Minimise (f + g)(x, theta), plus ||theta - y||^2 / (2 gamma) unless gamma is None, over theta in Y from theta = y.

    The objective never rises (beyond rounding), so that a non-convex problem ends at a stationary point that is no worse than
    y. Steps are found by backtracking on gradient differences, which works down to rounding where differences of values do not;
    the momentum restarts when it points uphill or the objective would rise.

    Args:
        tol: on the prox-gradient mapping, relative to the curvature met in the last step times the size of theta or of its
            distance from y. A step within rounding of theta also counts as converged: more cannot be had.
    """
    check_count("max_steps", max_steps)
    theta = y.copy()
    point = theta.leaves
    eps = max(torch.finfo(leaf.dtype).eps for leaf in point)

    def evaluate(at: Leaves) -> tuple[float, Leaves]:
        """Value of the whole objective, and gradient of its smooth part."""
        copy_(point, at)
        (value,), found = oracle.gradient(theta, [(1.0, oracle.lower, x, theta)], batch)
        total = float(value) + float(oracle.g(x, theta))
        if gamma is not None:
            away = subtract(point, y.leaves)
            distance = float(norm(away))
            total += distance * distance / (2 * gamma)
            found = [g + a / gamma for g, a in zip(found, away, strict=True)]
        return total, found

    def prox_step(start: Leaves, direction: Leaves, step: float) -> Leaves:
        new = [s - step * d for s, d in zip(start, direction, strict=True)]
        oracle.prox(x.value, new, step)
        return new

    with torch.no_grad():
        limit = 0.5 / oracle.problem.g.rho if oracle.problem.g.rho else math.inf
        here = [leaf.clone() for leaf in y.leaves]
        value, d_here = evaluate(here)
        ahead, d_ahead = here, d_here
        step = min(limit, 1.0 if gamma is None else gamma)
        slope = float(norm(d_here))
        if slope > 0:  # a first step that fits the curvature at y, so as not to leave its surroundings at once
            near = prox_step(here, d_here, min(step, 1e-4 * (float(norm(here)) or 1.0) / slope))
            bend, length = float(norm(subtract(evaluate(near)[1], d_here))), float(norm(subtract(near, here)))
            step = min(step, length / bend) if math.isfinite(bend) and bend > 0 and length > 0 else step
        bound = 1e12 * (1 + float(norm(here)))
        momentum, residual, least, since, steps = 1.0, math.inf, math.inf, 0, 0
        converged = was_small = False
        while steps < max_steps and step > 1e-30:
            steps += 1
            new = prox_step(ahead, d_ahead, step)
            move = subtract(new, ahead)
            length = float(norm(move))
            value_new, d_new = evaluate(new)
            turn = float(inner(subtract(d_new, d_ahead), move))
            noise = eps * float(norm(d_ahead)) * length
            if turn > length * length / step * (1 + 1e-9) + noise:
                step /= 2
                continue
            if not (math.isfinite(turn) and value_new <= value + 32 * eps * max(abs(value), abs(value_new))):  # rises, or NaN
                if ahead is here:
                    step /= 2
                ahead, d_ahead, momentum = here, d_here, 1.0
                continue

            residual = float(norm(subtract(new, prox_step(new, d_new, step)))) / step
            size = max(float(norm(new)), float(norm(subtract(new, y.leaves))))
            curvature = max(turn, 0.0) / (length * length) if length * length > 0 else 0.0
            small = residual <= max(tol * curvature * size, 16 * eps * size / step)
            converged = small and (was_small or residual == 0)  # twice: one step may have met a wall of curvature
            was_small = small
            least, since = (residual, 0) if residual < least else (least, since + 1)
            uphill = bool(inner(subtract(ahead, new), subtract(new, here)) > 0)
            old, here, d_here, value = here, new, d_new, value_new
            if converged or since > PATIENCE or size > bound:
                break
            following = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            factor = 0.0 if uphill else (momentum - 1) / following
            momentum = 1.0 if uphill else following
            ahead, d_ahead = here, d_here
            if factor:
                ahead = [n + factor * (n - o) for n, o in zip(here, old, strict=True)]
                d_ahead = evaluate(ahead)[1]
            step = min(1.2 * step, limit)
        copy_(point, here)
    return LowerSolution(theta, residual, steps, converged)
