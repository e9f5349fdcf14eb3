"""Smooth programs with equations and inequalities, solved by sequential quadratic programming."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meha.numerics.quadratic_program import Array, Program, solve_program

__all__ = ["SmoothProgram", "Stationary", "minimise_sqp"]


ROUNDS = 60
"""Steps of one run."""

STEP = 1e-9
"""Length of a step, relative to the point, at which a run ends."""

FEASIBLE = 1e-8
"""Violation at which a run may end."""

CURVATURE = 1e-8
"""Least curvature of a model, relative to its largest."""

STRONG = (1e1, 1e3, 1e5)
"""Weights of the equations that are tried to make a model convex without changing its solution."""

PENALTY, GROWTH, LEAST = 1.0, 1.5, 1e-2
"""The first weights of violations, how far they lie above the multipliers, and the smallest ones."""

DECREASE, SHORTEST = 1e-4, 1e-7
"""Share of the predicted decrease that a step must reach, and the shortest step that is tried."""

ELASTIC = 10.0
"""Weight of violations in a model whose constraints contradict each other, relative to the penalty."""

LONG = 1e2
"""Longest step, relative to 1 plus the size of the point."""

FAR = 1e7
"""Size of a point beyond which a run has no solution."""

ROUNDING = 1e-14
"""Change of the penalised objective, relative to its size, that is not counted."""

STALLED = 3
"""Steps without progress after which a run ends."""


SINGULAR = 1e-12
"""Singular values below this, relative to the largest, count as zero."""

Pair = tuple[Array, Array]
"""Something for the equations, and for the inequalities."""


class SmoothProgram(Protocol):
    """min phi(w) subject to equations = 0 and inequalities <= 0."""

    def values(self, w: Array) -> tuple[float, Array, Array]:
        """phi, the equations, and the inequalities."""
        ...

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        """Their first derivatives."""
        ...

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        """The Hessian of phi + <mu, equations> + <lam, inequalities>."""
        ...


@dataclass(eq=False)
class Stationary:
    """Where a run ended.

    Attributes:
        w: the point.
        value: phi there.
        mu, lam: multipliers of equations and inequalities.
        violation: the largest one.
        rests: whether the last step was short and the point is feasible.
    """

    w: Array
    value: float
    mu: Array
    lam: Array
    violation: float
    rests: bool


def minimise_sqp(problem: SmoothProgram, w: Array, rounds: int = ROUNDS, step: float = STEP) -> Stationary:
    """Look for a local solution from w, which need not be feasible.

    Each step solves a quadratic model with linear constraints; where these contradict each other, their violations are
    penalised instead. Steps are shortened until phi plus the weighted sum of violations falls; a step that fails at full length
    is first corrected for the curvature of the constraints.
    """
    phi, e, h = problem.values(w)
    mu, lam = np.zeros(len(e)), np.zeros(len(h))
    weights = np.full(len(e), PENALTY), np.full(len(h), PENALTY)
    stalled = 0
    rests = False
    for _ in range(rounds):
        g, J, A = problem.jacobians(w)
        if not (np.isfinite(g).all() and np.isfinite(J).all() and np.isfinite(A).all()):
            break
        H = problem.hessian(w, mu, lam)
        H = _convex(H if np.isfinite(H).all() else np.eye(len(w)), J)
        model = solve_program(H, g, A, -h, J, -e, lam > 0)
        if not model.solved:
            model = _elastic(H, g, A, h, J, e, ELASTIC * max(weights[0].max(initial=PENALTY), weights[1].max(initial=PENALTY)))
        d = model.z
        length = float(np.abs(d).max(initial=0.0))
        size = 1 + float(np.abs(w).max(initial=0.0))
        if not math.isfinite(length) or size > FAR:
            break
        if length > LONG * size:
            d, length = d * (LONG * size / length), LONG * size
        mu, lam = model.mu, model.lam
        if length <= step * size and _violation(e, h) <= FEASIBLE:
            rests = True
            break
        if model.solved:
            weights = _weights(weights[0], mu), _weights(weights[1], lam)
        before = phi + _sum(e, h, weights)
        slope = float(g @ d) - _sum(e, h, weights) + _sum(e + J @ d, h + A @ d, weights)
        moved = _search(problem, w, d, before, min(slope, 0.0), weights, (H, J, A))
        if moved is None:
            rests = bool(_violation(e, h) <= FEASIBLE and length <= math.sqrt(step) * size)
            break
        w, phi, e, h = moved
        stalled = stalled + 1 if before - phi - _sum(e, h, weights) <= ROUNDING * (1 + abs(before)) else 0
        if stalled >= STALLED:
            rests = _violation(e, h) <= FEASIBLE
            break
    return Stationary(w, phi, mu, lam, _violation(e, h), rests)


def _search(
    problem: SmoothProgram, w: Array, d: Array, before: float, slope: float, weights: Pair, model: tuple[Array, Array, Array]
) -> tuple[Array, float, Array, Array] | None:
    """The first point along d, or bent at full length, at which the penalised objective has fallen enough."""
    t = 1.0
    slack = ROUNDING * (1 + abs(before))
    while t > SHORTEST:
        new = w + t * d
        phi, e, h = problem.values(new)
        after = phi + _sum(e, h, weights)
        if math.isfinite(after) and after <= before + DECREASE * t * slope + slack:
            return new, phi, e, h
        if t == 1.0 and math.isfinite(after):
            bent = new + _correction(*model, e, h)
            phi, e, h = problem.values(bent)
            after = phi + _sum(e, h, weights)
            if math.isfinite(after) and after <= before + DECREASE * slope + slack:
                return bent, phi, e, h
        t *= 0.5
    return None


def _correction(H: Array, J: Array, A: Array, e: Array, h: Array) -> Array:
    """The step that meets the equations and the violated inequalities to first order and changes the model least."""
    violated = h > 0
    rows, right = np.vstack([J, A[violated]]), np.concatenate([e, h[violated]])
    if not len(rows):
        return np.zeros(rows.shape[1])
    n, q = len(H), len(right)
    K = np.block([[H, rows.T], [rows, np.zeros((q, q))]])
    return -np.linalg.lstsq(K, np.concatenate([np.zeros(n), right]), rcond=SINGULAR)[0][:n]


def _weights(before: Array, multipliers: Array) -> Array:
    """Weights of violations above the multipliers; larger ones fall by halves."""
    wanted = GROWTH * np.abs(multipliers)
    return np.maximum(np.maximum(wanted, 0.5 * (before + wanted)), LEAST)


def _convex(H: Array, J: Array) -> Array:
    """A positive definite matrix that equals H on the directions that the equations leave, where H allows it."""
    H = 0.5 * (H + H.T)
    size = max(float(np.abs(H).max(initial=0.0)), 1.0)
    least = CURVATURE * size
    values, vectors = np.linalg.eigh(H)
    if len(values) and values[0] >= -least:
        return H + np.eye(len(H)) * max(least - float(values[0]), 0.0)
    if len(J):
        lengths = np.maximum(np.sqrt((J * J).sum(axis=1)), least)
        rows = J / lengths[:, None]
        for weight in STRONG:
            changed = H + weight * size * rows.T @ rows
            if np.linalg.eigvalsh(changed)[0] > least:
                return changed
    return (vectors * np.maximum(np.abs(values), least)) @ vectors.T


def _elastic(H: Array, g: Array, A: Array, h: Array, J: Array, e: Array, weight: float) -> Program:
    """The model with violations penalised: those of the equations both ways."""
    n, p, q = len(g), len(e), len(h)
    size = n + 2 * p + q
    big_H = np.zeros((size, size))
    big_H[:n, :n] = H
    big_H[range(n, size), range(n, size)] = CURVATURE
    big_g = np.concatenate([g, np.full(2 * p + q, weight)])
    C = np.hstack([J, np.eye(p), -np.eye(p), np.zeros((p, q))])
    upper = np.hstack([A, np.zeros((q, 2 * p)), -np.eye(q)])
    signs = np.hstack([np.zeros((2 * p + q, n)), -np.eye(2 * p + q)])
    found = solve_program(big_H, big_g, np.vstack([upper, signs]), np.concatenate([-h, np.zeros(2 * p + q)]), C, -e)
    return Program(found.z[:n], found.lam[:q], found.mu, False)


def _sum(e: Array, h: Array, weights: Pair) -> float:
    return float(weights[0] @ np.abs(e) + weights[1] @ np.maximum(h, 0.0))


def _violation(e: Array, h: Array) -> float:
    return float(max(np.abs(e).max(initial=0.0), h.max(initial=0.0), 0.0))
