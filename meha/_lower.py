"""The lower level solved to a tolerance: FISTA with backtracking and restart, for any f, g and Y.

One solver serves the lower level itself, min_y (f + g)(x, y), and its proximal form,
min_theta (f + g)(x, theta) + ||theta - y||^2 / (2 gamma), whose value is the Moreau envelope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha._checks import check_count
from meha._oracle import Oracle
from meha._variables import Leaves, Variable, copy_, inner, norm, subtract

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

    def differentiate(at: Leaves) -> tuple[Tensor, Leaves]:
        """f, and the gradient of the smooth part, at a point where theta then is."""
        copy_(point, at)
        (f,), found = oracle.gradient(theta, [(1.0, oracle.lower, x, theta)], batch)
        if gamma is not None:
            found = [g + a / gamma for g, a in zip(found, subtract(point, y.leaves), strict=True)]
        return f, found

    def objective(f: Tensor) -> float:
        """The whole objective at theta."""
        total = float(f) + float(oracle.g(x, theta))
        if gamma is not None:
            away = float(norm(subtract(point, y.leaves)))
            total += away * away / (2 * gamma)
        return total

    def prox_step(start: Leaves, direction: Leaves, step: float) -> Leaves:
        new = [s - step * d for s, d in zip(start, direction, strict=True)]
        oracle.prox(x.value, new, step)
        return new

    with torch.no_grad():
        limit = 0.5 / oracle.problem.g.rho if oracle.problem.g.rho else math.inf
        here = [leaf.clone() for leaf in y.leaves]
        f, d_here = differentiate(here)
        value = objective(f)
        ahead, d_ahead = here, d_here
        step = min(limit, 1.0 if gamma is None else gamma)
        slope = float(norm(d_here))
        if slope > 0:  # a first step that fits the curvature at y, so as not to leave its surroundings at once
            near = prox_step(here, d_here, min(step, 1e-4 * (float(norm(here)) or 1.0) / slope))
            bend, length = float(norm(subtract(differentiate(near)[1], d_here))), float(norm(subtract(near, here)))
            step = min(step, length / bend) if math.isfinite(bend) and bend > 0 and length > 0 else step
        bound = 1e12 * (1 + float(norm(here)))
        momentum, residual, least, since, steps = 1.0, math.inf, math.inf, 0, 0
        converged = was_small = False
        while steps < max_steps and step > 1e-30:
            steps += 1
            new = prox_step(ahead, d_ahead, step)
            move = subtract(new, ahead)
            f, d_new = differentiate(new)
            length, turn, slope = _numbers(norm(move), inner(subtract(d_new, d_ahead), move), norm(d_ahead))
            if turn > length * length / step * (1 + 1e-9) + eps * slope * length:  # up to rounding
                step /= 2
                continue
            value_new = objective(f)
            if not (math.isfinite(turn) and value_new <= value + 32 * eps * max(abs(value), abs(value_new))):  # rises, or NaN
                if ahead is here:
                    step /= 2
                ahead, d_ahead, momentum = here, d_here, 1.0
                continue

            left, back = subtract(new, prox_step(new, d_new, step)), inner(subtract(ahead, new), subtract(new, here))
            mapping, size, way, uphill = _numbers(norm(left), norm(new), norm(subtract(new, y.leaves)), back)
            residual, size = mapping / step, max(size, way)
            curvature = max(turn, 0.0) / (length * length) if length * length > 0 else 0.0
            small = residual <= max(tol * curvature * size, 16 * eps * size / step)
            converged = small and (was_small or residual == 0)  # twice: one step may have met a wall of curvature
            was_small = small
            least, since = (residual, 0) if residual < least else (least, since + 1)
            old, here, d_here, value = here, new, d_new, value_new
            if converged or since > PATIENCE or size > bound:
                break
            following = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            factor = 0.0 if uphill > 0 else (momentum - 1) / following
            momentum = 1.0 if uphill > 0 else following
            ahead, d_ahead = here, d_here
            if factor:
                ahead = [n + factor * (n - o) for n, o in zip(here, old, strict=True)]
                d_ahead = differentiate(ahead)[1]
            step = min(1.2 * step, limit)
        copy_(point, here)
    return LowerSolution(theta, residual, steps, converged)


def _numbers(*scalars: Tensor) -> list[float]:
    """The numbers, with one synchronisation for all."""
    return torch.stack(scalars).tolist()
