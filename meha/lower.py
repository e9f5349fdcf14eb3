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

from meha.oracle import Oracle
from meha.variables import Leaves, Variable, copy_, norm, subtract

__all__ = ["LowerSolution", "solve_lower"]

PATIENCE = 1000
"""Iterations without a smaller residual after which the solver gives up."""


@dataclass(frozen=True)
class LowerSolution:
    """A point theta of the lower level, and how well it solves it.

    Attributes:
        theta: the minimiser found.
        residual: the norm of the prox-gradient mapping at theta; zero exactly at stationary points.
        steps: iterations taken; each costs two gradients of f.
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

    The step is found by backtracking on gradient differences, which works down to rounding where differences of values do
    not; the momentum restarts when it points uphill. A non-convex problem ends at a stationary point in the basin of y.

    Args:
        tol: on the prox-gradient mapping, relative to the largest gradient met. A step within rounding of theta also counts as
            converged: more cannot be had.
    """
    theta = y.copy()
    point = theta.leaves
    eps = max(torch.finfo(leaf.dtype).eps for leaf in point)
    tol = max(tol, 8 * eps)

    def gradient() -> Leaves:
        _, found = oracle.gradient(theta, [(1.0, oracle.lower, x, theta)], batch)
        if gamma is not None:
            found = [g + (t - c) / gamma for g, t, c in zip(found, point, y.leaves, strict=True)]
        return found

    def prox_step(start: Leaves, direction: Leaves, step: float) -> Leaves:
        new = [s - step * d for s, d in zip(start, direction, strict=True)]
        oracle.prox(x.value, new, step)
        return new

    with torch.no_grad():
        limit = 0.5 / oracle.problem.g.rho if oracle.problem.g.rho else math.inf
        ahead = [leaf.clone() for leaf in point]
        here = [leaf.clone() for leaf in point]
        d_ahead = gradient()
        scale = float(norm(d_ahead))
        step = min(limit, 1.0 if gamma is None else gamma)
        momentum, residual, least, steps, since, converged = 1.0, math.inf, math.inf, 0, 0, False
        while steps < max_steps:
            steps += 1
            while True:
                new = prox_step(ahead, d_ahead, step)
                move = subtract(new, ahead)
                length = float(norm(move))
                copy_(point, new)
                d_new = gradient()
                turn = _inner(subtract(d_new, d_ahead), move)
                if not math.isfinite(turn) or turn > length**2 / step * (1 + 1e-9) + eps * scale * length:
                    step /= 2
                    if step > 1e-30:
                        continue
                break
            scale = max(scale, float(norm(d_new)))
            residual = float(norm(subtract(new, prox_step(new, d_new, step)))) / step
            converged = residual <= max(tol * scale, 16 * eps * float(norm(new)) / step)
            if converged or not math.isfinite(residual):
                break
            least, since = (residual, 0) if residual < least else (least, since + 1)
            if since > PATIENCE:
                break
            if _inner(subtract(ahead, new), subtract(new, here)) > 0:
                momentum = 1.0
            following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            factor = (momentum - 1) / following
            momentum = following
            if factor:
                ahead = [n + factor * (n - h) for n, h in zip(new, here, strict=True)]
                copy_(point, ahead)
                d_ahead = gradient()
            else:
                ahead, d_ahead = new, d_new
            here = new
            step = min(step * 1.1, limit)
        copy_(point, new)
    return LowerSolution(theta, residual, steps, converged)


def _inner(a: Leaves, b: Leaves) -> float:
    total = sum((u * v).sum() for u, v in zip(a, b, strict=True))
    return float(total) if isinstance(total, Tensor) else 0.0
