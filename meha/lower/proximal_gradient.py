"""Solve the lower level to a tolerance: FISTA (Beck and Teboulle, 2009) with backtracking and restart, for any f, g and Y.

One solver serves the lower level itself, min_y (f + g)(x, y), and its proximal form,
min_theta (f + g)(x, theta) + ||theta - y||^2 / (2 gamma), whose value is the Moreau envelope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha.numerics.tolerances import DIFFERENCE, FAR, LOOSE, ROUNDING
from meha.problem.oracle import Oracle
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, copy_, inner, norm, subtract

PATIENCE = 1000
"""Iterations without a smaller residual after which the solver gives up."""

GROWTH = 1.2
"""Factor by which the step grows after each success, so that it recovers from a wall of curvature in some ten steps."""


@dataclass(frozen=True)
class ProximalSolution:
    """A solution theta of the lower level, and how accurate it is.

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
) -> ProximalSolution:
    """Minimise (f + g)(x, theta), plus ||theta - y||^2 / (2 gamma) unless gamma is None, over theta in Y from theta = y.

    The objective never rises (beyond rounding), so that a non-convex problem ends at a stationary point that is no worse than
    y. Steps are found by backtracking on gradient differences, which works down to rounding where differences of values do not;
    the momentum restarts when it points uphill or the objective would rise.

    Args:
        tol: on the prox-gradient mapping, relative to the curvature met in the last step times the size of theta or of its
            distance from y. A step within rounding of theta also counts as converged.
    """
    check_count("max_steps", max_steps)
    theta = y.copy()
    point = theta.leaves
    eps = max(torch.finfo(leaf.dtype).eps for leaf in point)

    def differentiate(at: Leaves) -> tuple[Tensor, Leaves]:
        """Move theta to a point; returns f and the gradient of the smooth part there."""
        copy_(point, at)
        (f,), gradient = oracle.gradient(theta, [(1.0, oracle.lower, x, theta)], batch)
        if gamma is not None:
            gradient = [g + a / gamma for g, a in zip(gradient, subtract(point, y.leaves), strict=True)]
        return f, gradient

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
        limit = oracle.longest_prox
        here = [leaf.clone() for leaf in y.leaves]
        f, d_here = differentiate(here)
        value = objective(f)
        ahead, d_ahead = here, d_here
        step = min(limit, 1.0 if gamma is None else gamma)
        slope = float(norm(d_here))
        if slope > 0:  # measure the curvature at y, so that the first step does not leave its basin
            near = prox_step(here, d_here, min(step, eps**DIFFERENCE * (float(norm(here)) or 1.0) / slope))
            bend, length = float(norm(subtract(differentiate(near)[1], d_here))), float(norm(subtract(near, here)))
            step = min(step, length / bend) if math.isfinite(bend) and bend > 0 and length > 0 else step
        bound = FAR * (1 + float(norm(here)))
        momentum, residual, least, since, steps = 1.0, math.inf, math.inf, 0, 0
        converged = was_small = False
        while steps < max_steps and step > torch.finfo(point[0].dtype).tiny:
            steps += 1
            new = prox_step(ahead, d_ahead, step)
            move = subtract(new, ahead)
            f, d_new = differentiate(new)
            length, turn, slope = _numbers(norm(move), inner(subtract(d_new, d_ahead), move), norm(d_ahead))
            if turn > length * length / step * (1 + eps**LOOSE) + eps * slope * length:  # curvature > 1 / step
                step /= 2
                continue
            value_new = objective(f)
            rounding = 2 * ROUNDING * eps * max(abs(value), abs(value_new))  # sums of many terms have larger errors
            if not (math.isfinite(turn) and value_new <= value + rounding):  # it rises, or is NaN
                if ahead is here:  # a plain step was too long; otherwise the momentum is to blame
                    step /= 2
                ahead, d_ahead, momentum = here, d_here, 1.0
                continue

            left, back = subtract(new, prox_step(new, d_new, step)), inner(subtract(ahead, new), subtract(new, here))
            mapping, size, moved, uphill = _numbers(norm(left), norm(new), norm(subtract(new, y.leaves)), back)
            residual, size = mapping / step, max(size, moved)
            curvature = max(turn, 0.0) / (length * length) if length * length > 0 else 0.0
            small = residual <= max(tol * curvature * size, 2 * ROUNDING * eps * size / step)
            converged = small and (was_small or residual == 0)  # twice: one step may have met a wall of curvature
            was_small = small
            least, since = (residual, 0) if residual < least else (least, since + 1)
            old, here, d_here, value = here, new, d_new, value_new
            if converged or since > PATIENCE or size > bound:
                break
            factor, momentum = nesterov(momentum, restart=uphill > 0)  # the gradient restart of O'Donoghue and Candes (2015)
            ahead, d_ahead = here, d_here
            if factor:
                ahead = [n + factor * (n - o) for n, o in zip(here, old, strict=True)]
                d_ahead = differentiate(ahead)[1]
            step = min(GROWTH * step, limit)  # else one region of large curvature would slow down all others
        copy_(point, here)
    return ProximalSolution(theta, residual, steps, converged)


def nesterov(momentum: float, *, restart: bool) -> tuple[float, float]:
    """The factor by which Nesterov's accelerated gradient method repeats the last move, and the momentum for the next step.

    Args:
        momentum: 1 at first, then what the last call returned.
        restart: whether the last move pointed uphill; the momentum then begins at 1 again.

    >>> nesterov(1.0, restart=False)
    (0.0, 1.618033988749895)
    """
    if restart:
        return 0.0, 1.0
    following = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
    return (momentum - 1) / following, following


def _numbers(*scalars: Tensor) -> list[float]:
    """Read several scalars from the device with a single synchronisation."""
    return torch.stack(scalars).tolist()
