"""Smooth programs with equations and inequalities, solved by sequential quadratic programming (SQP)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meha.numerics.line_search import DECREASE
from meha.numerics.quadratic_program import STALLED, Array, Program, solve_program
from meha.numerics.tolerances import FAR, FEASIBLE, PATIENCE, SMALL, STEPS, ZERO

STRONG = 1e3  # weight of the equations, relative to the curvature, that may make a model convex without changing its solution
ELASTIC = 10.0  # weight of violations in an infeasible model, relative to the penalty
FLAT = math.sqrt(np.finfo(float).eps)  # curvature, relative to the largest, that counts as zero

Pair = tuple[Array, Array]
"""One array for the equations and one for the inequalities."""


class SmoothProgram(Protocol):
    """min phi(w) subject to equations = 0 and inequalities <= 0."""

    def values(self, w: Array) -> tuple[float, Array, Array]:
        """Return phi, the equations, and the inequalities at w."""
        ...

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        """Return the gradient of phi and the Jacobians of the equations and inequalities at w."""
        ...

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        """Return the Hessian of the Lagrangian phi + <mu, equations> + <lam, inequalities> at w."""
        ...


@dataclass(eq=False)
class Stationary:
    """The result of a run.

    Attributes:
        w: the last point.
        value: phi there.
        mu, lam: multipliers of equations and inequalities.
        violation: the largest violation of a constraint.
        converged: whether the run converged: the last step was short and the point is feasible.
    """

    w: Array
    value: float
    mu: Array
    lam: Array
    violation: float
    converged: bool


def minimise_sqp(problem: SmoothProgram, w: Array) -> Stationary:
    """Search for a local solution from w, which need not be feasible.

    Each step solves a quadratic model with linearised constraints; if these contradict each other, their violations are
    penalised instead. A line search shortens the step until phi plus the weighted sum of violations (the exact l1 penalty
    function) decreases; a step that fails at full length is first corrected for the curvature of the constraints.
    """
    phi, e, h = problem.values(w)
    mu, lam = np.zeros(len(e)), np.zeros(len(h))
    weights = np.ones(len(e)), np.ones(len(h))
    stalled, converged = 0, False
    elastic, closest = 0, math.inf  # models in a row without a feasible point that did not halve the violation
    for _ in range(STEPS):
        g, J, A = problem.jacobians(w)
        if not (np.isfinite(g).all() and np.isfinite(J).all() and np.isfinite(A).all()):
            break
        H = problem.hessian(w, mu, lam)
        H = _convex(H if np.isfinite(H).all() else np.eye(len(w)), J)  # the gradient alone still gives descent
        model = solve_program(H, g, A, -h, J, -e, lam > 0)  # near a solution, the active set is that of the last model
        if model.solved:
            elastic, closest = 0, math.inf
        else:
            violation = _violation(e, h)
            elastic = elastic + 1 if violation > 0.5 * closest else 0
            closest = min(closest, violation)
            if elastic >= PATIENCE:  # seemingly infeasible
                break
            model = _elastic(H, g, A, h, J, e, ELASTIC * max(weights[0].max(initial=1.0), weights[1].max(initial=1.0)))
        d = model.z
        length = float(np.abs(d).max(initial=0.0))
        size = 1 + float(np.abs(w).max(initial=0.0))
        if not math.isfinite(length) or size > FAR:
            break
        if length > FAR:  # a nearly flat model
            d, length = d * (FAR / length), FAR
        mu, lam = model.mu, model.lam
        feasible = _violation(e, h) <= FEASIBLE
        if length <= ZERO * size and feasible:
            converged = True
            break
        if model.solved:  # multipliers of an elastic model reflect its own weight
            weights = _weights(weights[0], mu), _weights(weights[1], lam)
        before = phi + _sum(e, h, weights)
        slope = float(g @ d) - _sum(e, h, weights) + _sum(e + J @ d, h + A @ d, weights)
        moved = _search(problem, w, d, before, min(slope, 0.0), weights, (H, J, A))  # a slope > 0 must not allow an increase
        if moved is None:
            # Near a minimum the objective changes by the square of a step, so rounding hides steps below the square root.
            converged = feasible and length <= math.sqrt(ZERO) * size
            break
        w, phi, e, h = moved
        stalled = stalled + 1 if before - phi - _sum(e, h, weights) <= ZERO * (1 + abs(before)) else 0
        if stalled >= STALLED:
            converged = _violation(e, h) <= FEASIBLE
            break
    return Stationary(w, phi, mu, lam, _violation(e, h), converged)


def _search(
    problem: SmoothProgram, w: Array, d: Array, before: float, slope: float, weights: Pair, model: tuple[Array, Array, Array]
) -> tuple[Array, float, Array, Array] | None:
    """Return the first point along d, or along the corrected full step, that satisfies Armijo's condition; None without one."""
    t = 1.0
    slack = ZERO * (1 + abs(before))
    while t > ZERO:
        new = w + t * d
        phi, e, h = problem.values(new)
        after = phi + _sum(e, h, weights)
        if math.isfinite(after) and after <= before + DECREASE * t * slope + slack:
            return new, phi, e, h
        if t == 1.0 and math.isfinite(after):  # second-order correction, against the Maratos effect (1978)
            bent = new + _correction(*model, e, h)
            phi, e, h = problem.values(bent)
            after = phi + _sum(e, h, weights)
            if math.isfinite(after) and after <= before + DECREASE * slope + slack:
                return bent, phi, e, h
        t *= 0.5 if t > SMALL else SMALL  # steps that are still too long are so by orders of magnitude
    return None


def _correction(H: Array, J: Array, A: Array, e: Array, h: Array) -> Array:
    """Return the second-order correction: the step of least model change that restores the constraints to first order."""
    violated = h > 0
    rows, right = np.vstack([J, A[violated]]), np.concatenate([e, h[violated]])
    if not len(rows):
        return np.zeros(rows.shape[1])
    n, q = len(H), len(right)
    K = np.block([[H, rows.T], [rows, np.zeros((q, q))]])
    return -np.linalg.lstsq(K, np.concatenate([np.zeros(n), right]), rcond=None)[0][:n]


def _weights(before: Array, multipliers: Array) -> Array:
    """Return weights of violations that exceed the multipliers, so that the penalty is exact (Powell's rule, 1978)."""
    wanted = 2 * np.abs(multipliers)
    return np.maximum(wanted, 0.5 * (before + wanted))  # too large weights fall only slowly


def is_convex(H: Array) -> bool:
    """Whether a symmetric matrix is positive semidefinite up to rounding."""
    values = np.linalg.eigvalsh(H) if len(H) else np.zeros(1)
    return bool(values[0] >= -FLAT * (1 + float(np.abs(values).max())))


def _convex(H: Array, J: Array) -> Array:
    """Return a positive definite matrix that equals H along the directions that satisfy the equations, if possible."""
    H = 0.5 * (H + H.T)
    size = max(float(np.abs(H).max(initial=0.0)), 1.0)
    least = FLAT * size
    values, vectors = np.linalg.eigh(H)
    if len(values) and values[0] >= -least:
        return H + np.eye(len(H)) * max(least - float(values[0]), 0.0)
    if len(J):
        lengths = np.maximum(np.sqrt((J * J).sum(axis=1)), least)
        rows = J / lengths[:, None]
        # J'J vanishes where J d = 0, so it changes nothing along the equations (as in the augmented Lagrangian).
        changed = H + STRONG * size * rows.T @ rows
        if np.linalg.eigvalsh(changed)[0] > least:
            return changed
    return (vectors * np.maximum(np.abs(values), least)) @ vectors.T  # negative curvature is reversed: steps stay bounded


def _elastic(H: Array, g: Array, A: Array, h: Array, J: Array, e: Array, weight: float) -> Program:
    """Solve the model in elastic mode: slack variables, with a penalty, absorb the violations that cannot be avoided."""
    n, p, q = len(g), len(e), len(h)
    size = n + 2 * p + q
    big_H = np.zeros((size, size))
    big_H[:n, :n] = H
    big_H[range(n, size), range(n, size)] = FLAT  # makes the slack variables unique
    big_g = np.concatenate([g, np.full(2 * p + q, weight)])
    C = np.hstack([J, np.eye(p), -np.eye(p), np.zeros((p, q))])  # an equation has a slack for each sign
    upper = np.hstack([A, np.zeros((q, 2 * p)), -np.eye(q)])
    signs = np.hstack([np.zeros((2 * p + q, n)), -np.eye(2 * p + q)])
    elastic = solve_program(big_H, big_g, np.vstack([upper, signs]), np.concatenate([-h, np.zeros(2 * p + q)]), C, -e)
    return Program(elastic.z[:n], elastic.lam[:q], elastic.mu, False)  # not a solution of the model itself


def _sum(e: Array, h: Array, weights: Pair) -> float:
    return float(weights[0] @ np.abs(e) + weights[1] @ np.maximum(h, 0.0))


def _violation(e: Array, h: Array) -> float:
    return float(max(np.abs(e).max(initial=0.0), h.max(initial=0.0), 0.0))
