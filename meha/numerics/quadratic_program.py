"""Convex quadratic programs of moderate size, dense, in double precision: an interior point method, then an active-set step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meha.numerics.tolerances import FEASIBLE, PATIENCE, ZERO

Array = NDArray[Any]

DAMPING = 1e-13  # multiple of the identity, relative to the matrix, that keeps a singular system solvable
BACKOFF = 0.995  # fraction of the distance to the boundary that a step may go: slacks and multipliers stay positive
STALLED = 10  # iterations without half the residual after which the interior point method stops, and guesses of the active set


class Program(NamedTuple):
    """A solution of min 1/2 z'Hz + g'z subject to A z <= b, C z = d.

    Attributes:
        z: the point.
        lam, mu: multipliers of the inequalities (not negative) and of the equations.
        solved: whether the KKT residuals are small.
    """

    z: Array
    lam: Array
    mu: Array
    solved: bool


def solve_program(H: Array, g: Array, A: Array, b: Array, C: Array, d: Array, guess: Array | None = None) -> Program:
    """Solve a convex quadratic program by a primal-dual interior point method, and polish the answer.

    Args:
        H: positive semidefinite; zero for a linear program.
        g: the linear term.
        A, b: inequalities A z <= b; possibly with no rows. Infinite entries of b drop their rows.
        C, d: equations C z = d; rows may depend on each other.
        guess: a mask of the rows of A that may be active; if they are, one linear system gives the solution.

    The rows are scaled to length 1. In the end, the rows whose multiplier exceeds their slack are taken as active and the KKT
    system is solved for them, so that the solution is exact up to rounding if the active set was identified.

    >>> answer = solve_program(np.eye(2), np.array([-3.0, -1.0]), np.array([[1.0, 1.0]]), np.array([2.0]), *no_rows(2))
    >>> answer.z.round(9) + 0.0, answer.lam
    (array([2., 0.]), array([1.]))
    """
    n = len(g)
    if guess is not None:
        quick = _guessed(H, g, A, b, C, d, guess)
        if quick is not None:  # a wrong guess costs one linear system
            return quick
    if not len(A) and not len(C):
        z = np.linalg.lstsq(H, -g, rcond=None)[0]  # H may be singular; an unbounded problem shows in the residual
        solved = bool(np.abs(H @ z + g).max(initial=0.0) <= FEASIBLE * (1 + np.abs(g).max(initial=0.0)))
        return Program(z, np.zeros(0), np.zeros(0), solved)
    rows, columns = _lengths(A), _lengths(C)
    kept = np.isfinite(b) & (rows > 0)
    dropped = (rows == 0) & (b < -FEASIBLE)  # 0 z <= b < 0 contradicts itself
    scale = max(1.0, np.abs(H).max(initial=0.0), np.abs(g).max(initial=0.0))  # makes the tolerances relative
    As, bs = A[kept] / rows[kept, None], b[kept] / rows[kept]
    there = columns > 0
    Cs, ds = C[there] / columns[there, None], d[there] / columns[there]
    z, s, lam, mu = _interior(H / scale, g / scale, As, bs, Cs, ds)
    z, lam, mu = _polish(H / scale, g / scale, As, bs, Cs, ds, z, s, lam, mu)
    error = max(_errors(H / scale, g / scale, As, bs, Cs, ds, z, lam, mu))
    solved = math.isfinite(error) and error <= FEASIBLE * (1 + np.abs(z).max(initial=0.0)) and not dropped.any()
    solved = bool(solved and np.abs(d[~there]).max(initial=0.0) <= FEASIBLE)  # 0 z = d has a solution for d = 0 only
    whole_lam, whole_mu = np.zeros(len(b)), np.zeros(len(d))
    whole_lam[kept] = scale * lam / rows[kept]  # undoes the scaling of objective and rows
    whole_mu[there] = scale * mu / columns[there]
    return Program(z if len(z) == n else np.zeros(n), whole_lam, whole_mu, solved)


def _guessed(H: Array, g: Array, A: Array, b: Array, C: Array, d: Array, active: Array) -> Program | None:
    """Return the solution with these rows active; None if that violates the KKT conditions."""
    n, q = len(g), int(active.sum())
    rows = np.vstack([A[active], C])
    K = np.block([[H, rows.T], [rows, np.zeros((len(rows), len(rows)))]])
    right = np.concatenate([-g, b[active], d])
    try:
        solution = np.linalg.solve(K, right)
    except np.linalg.LinAlgError:
        return None
    z, lam, mu = solution[:n], np.zeros(len(b)), solution[n + q :]
    lam[active] = solution[n : n + q]
    size = 1 + float(np.abs(solution).max(initial=0.0))
    with np.errstate(invalid="ignore"):  # infinite entries of b
        wrong = (
            np.abs(K @ solution - right).max(initial=0.0) > ZERO * (1 + np.abs(right[np.isfinite(right)]).max(initial=0.0))
            or (A @ z - b).max(initial=0.0) > ZERO * size
            or lam.min(initial=0.0) < -ZERO * size
        )
    if wrong or not np.isfinite(solution).all():
        return None
    return Program(z, np.maximum(lam, 0.0), mu, True)


def feasible(A: Array, b: Array, C: Array, d: Array, near: Array) -> tuple[Array, float]:
    """Return a point near ``near`` that minimises the largest violation of A z <= b, C z = d, and that violation.

    Violations are measured with all rows scaled to length 1.
    """
    n = len(near)
    rows, columns = np.maximum(_lengths(A), ZERO), np.maximum(_lengths(C), ZERO)
    A, b, C, d = A / rows[:, None], b / rows, C / columns[:, None], d / columns
    kept = np.isfinite(b)
    A, b = A[kept], b[kept]
    level = -np.ones((len(A) + 2 * len(C) + 1, 1))  # a further unknown t bounds all violations: min t, t >= 0
    left = np.hstack([np.vstack([A, C, -C, np.zeros((1, n))]), level])
    right = np.concatenate([b, d, -d, [0.0]])
    H = np.zeros((n + 1, n + 1))
    H[:n, :n] = FEASIBLE * np.eye(n)  # a small proximal term chooses the minimiser near the given point
    g = np.concatenate([-FEASIBLE * near, [1.0]])
    answer = solve_program(H, g, left, right, np.zeros((0, n + 1)), np.zeros(0))
    z = answer.z[:n]
    broken = max(float((A @ z - b).max(initial=0.0)), float(np.abs(C @ z - d).max(initial=0.0)))
    return z, broken if math.isfinite(broken) else math.inf


def no_rows(n: int) -> tuple[Array, Array]:
    """Return a matrix and a vector without rows, for no equations or no inequalities."""
    return np.zeros((0, n)), np.zeros(0)


def _lengths(rows: Array) -> Array:
    return np.sqrt((rows * rows).sum(axis=1))


def _errors(
    H: Array, g: Array, A: Array, b: Array, C: Array, d: Array, z: Array, lam: Array, mu: Array
) -> tuple[float, float, float, float]:
    """Return the largest KKT residuals: stationarity, inequalities, equations, and complementarity."""
    slack = b - A @ z
    gradient = H @ z + g + A.T @ lam + C.T @ mu
    size = 1 + np.abs(lam).max(initial=0.0) + np.abs(mu).max(initial=0.0)  # where multipliers are large, so is rounding
    return (
        float(np.abs(gradient).max(initial=0.0)) / float(size),
        float((-slack).max(initial=0.0)),
        float(np.abs(C @ z - d).max(initial=0.0)),
        float(np.minimum(np.abs(slack), np.abs(lam) / size).max(initial=0.0)),
    )


def _interior(H: Array, g: Array, A: Array, b: Array, C: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """Run Mehrotra's predictor-corrector method (1992) from a point that need not be feasible."""
    n, m, p = len(g), len(A), len(C)
    z, mu = np.zeros(n), np.zeros(p)
    size = 1 + max(np.abs(b).max(initial=0.0), np.abs(d).max(initial=0.0), np.abs(g).max(initial=0.0))
    if p:
        z = np.linalg.lstsq(C, d, rcond=None)[0]
    s = np.maximum(b - A @ z, 1.0)  # slacks must start well inside; A z + s = b is reached later
    lam = np.ones(m)
    K = np.zeros((n + p, n + p))
    best, kept, stalled = math.inf, (z, s, lam, mu), 0
    while stalled < STALLED:
        r_d = H @ z + g + A.T @ lam + C.T @ mu
        r_p, r_e = A @ z + s - b, C @ z - d
        gap = float(s @ lam) / m if m else 0.0
        parts = (np.abs(r_d).max(initial=0.0), np.abs(r_p).max(initial=0.0), np.abs(r_e).max(initial=0.0), gap)
        error = float(max(parts))
        stalled = 0 if error < 0.5 * best else stalled + 1
        if error < best:  # the last iterates may get worse by rounding, so the best is returned
            best, kept = error, (z, s, lam, mu)
        # Below FEASIBLE, the error of many programs no longer falls by rounding; the active set is then known, and polished.
        if error <= ZERO * size or not math.isfinite(error) or (stalled >= PATIENCE and best <= FEASIBLE * size):
            break
        weights = lam / s
        K[:n, :n] = H + (A.T * weights) @ A  # the normal equations: slacks and multipliers are eliminated
        top = max(float(np.abs(K[:n, :n]).max()), 1.0)
        K[range(n), range(n)] += DAMPING * top
        K[:n, n:], K[n:, :n] = C.T, C
        K[n:, n:] = -DAMPING * np.eye(p)  # makes it quasidefinite: solvable also with dependent equations
        try:
            inverse = np.linalg.inv(K)
        except np.linalg.LinAlgError:
            break

        def direction(
            target: Array, inverse: Array = inverse, weights: Array = weights, at: Any = (r_d, r_p, r_e, s, lam)
        ) -> tuple[Array, Array, Array, Array]:
            """Return the Newton step towards s lam = target."""
            r_d, r_p, r_e, s, lam = at
            right = np.concatenate([-r_d - A.T @ (weights * r_p + (target - s * lam) / s), -r_e])
            step = inverse @ right
            step += inverse @ (right - K @ step)  # iterative refinement: K is ill-conditioned near the end
            dz = step[:n]
            ds = -r_p - A @ dz
            return dz, ds, (target - s * lam - lam * ds) / s, step[n:]

        dz, ds, dlam, dmu = direction(np.zeros(m))  # predictor: straight to complementarity
        if m:
            ahead = _length(s, ds), _length(lam, dlam)
            after = float((s + ahead[0] * ds) @ (lam + ahead[1] * dlam)) / m
            centre = (after / gap) ** 3 if gap > 0 else 0.0  # Mehrotra's rule: less centring where the predictor does well
            dz, ds, dlam, dmu = direction(centre * gap - ds * dlam)
        a, c = BACKOFF * _length(s, ds), BACKOFF * _length(lam, dlam)
        a, c = min(1.0, a), min(1.0, c)
        if H.any():
            a = c = min(a, c)  # H z is in the dual residual, which unequal lengths would not reduce
        z, s, lam, mu = z + a * dz, s + a * ds, lam + c * dlam, mu + c * dmu
    return kept


def _length(values: Array, steps: Array) -> float:
    """Return the longest step, at most 1 / BACKOFF, that keeps all values non-negative."""
    falling = steps < 0
    with np.errstate(over="ignore"):  # a step near zero gives infinity, which is meant
        return min(float((values[falling] / -steps[falling]).min(initial=math.inf)), 1 / BACKOFF)


def _polish(
    H: Array, g: Array, A: Array, b: Array, C: Array, d: Array, z: Array, s: Array, lam: Array, mu: Array
) -> tuple[Array, Array, Array]:
    """Solve the KKT system of the rows that seem active; keep the interior point solution if that is not better."""
    n, p = len(g), len(C)
    size = 1 + max(np.abs(b).max(initial=0.0), np.abs(z).max(initial=0.0))
    kept, before = (z, lam, mu), max(_errors(H, g, A, b, C, d, z, lam, mu))
    active = lam > s  # at a strictly complementary solution one of both tends to zero
    for _ in range(STALLED):
        rows = np.vstack([A[active], C])
        q = len(rows)
        K = np.block([[H, rows.T], [rows, np.zeros((q, q))]])
        # A correction of the present point, and not a new one: rounding is then relative to the small residual.
        right = np.concatenate([g, -b[active], -d]) + K @ np.concatenate([z, lam[active], mu])
        step = _step(K, -right)
        new, lam_new = z + step[:n], np.zeros(len(b))
        lam_new[active] = lam[active] + step[n : n + q - p]
        mu_new = mu + step[n + q - p :]
        error = max(_errors(H, g, A, b, C, d, new, lam_new, mu_new))
        wrong = float((-lam_new).max(initial=0.0)) / (1 + np.abs(lam_new).max(initial=0.0))
        if math.isfinite(error) and max(error, wrong) <= max(ZERO * size, min(before, FEASIBLE)):
            return new, np.maximum(lam_new, 0.0), mu_new
        if not np.isfinite(new).all():
            break
        falling = lam_new < 0
        # An active-set step, as far as multipliers stay positive: at a degenerate vertex, other rows replace those that leave.
        share = np.where(falling, lam / np.maximum(lam - lam_new, ZERO**2), 1.0)
        t = float(share.min(initial=1.0))
        z, lam, mu = z + t * (new - z), lam + t * (lam_new - lam), mu + t * (mu_new - mu)
        active = (active & ~(falling & (share <= t))) | (A @ new > b + ZERO * size)
    return kept


def _step(K: Array, right: Array) -> Array:
    """Solve a symmetric system; return the least-norm solution if it is singular."""
    try:
        step = np.linalg.solve(K, right)
    except np.linalg.LinAlgError:
        step = np.full(len(right), math.inf)
    size = np.abs(right).max(initial=0.0)
    if np.isfinite(step).all() and np.abs(K @ step - right).max(initial=0.0) <= FEASIBLE * size:
        return step
    try:
        return np.asarray(np.linalg.lstsq(K, right, rcond=None)[0])  # active rows may depend on each other
    except np.linalg.LinAlgError:
        return step
