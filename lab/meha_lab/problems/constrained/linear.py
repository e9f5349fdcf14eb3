"""Linear and quadratic objectives with linear constraints; the lower level is solved by enumeration of its active sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meha.problem.constraints import Constraint, Linear
from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Cast
from meha_lab.problems.constrained.known import TIE, Coupled

__all__ = ["LINEAR", "Pieces"]


FEASIBLE = 1e-9
"""Largest violation of an enumerated point that counts as feasible."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """min 1/2 z'Pz + p'z over low <= x <= high, U z <= u, and y among the solutions of

    min 1/2 y'Qy + y'(Rx + c) subject to A x + B y <= b, with z = (x, y).
    """

    P: Array
    p: Array
    Q: Array
    R: Array
    c: Array
    A: Array
    B: Array
    b: Array
    low: Array
    high: Array
    U: Array
    u: Array

    def state(self, cast: Cast) -> Problem:
        """Return the problem on tensors."""
        P, p, Q, R, c = (cast(array) for array in (self.P, self.p, self.Q, self.R, self.c))
        n = len(self.low)
        upper: tuple[Constraint, ...] = ()
        if len(self.u):
            upper = (Linear(cast(self.U[:, :n]), cast(self.U[:, n:]), cast(self.u)),)

        def F(x: Tensor, y: Tensor) -> Tensor:
            z = torch.cat([x, y])
            return z @ P @ z / 2 + p @ z

        return Problem(
            F,
            lambda x, y: y @ Q @ y / 2 + y @ (R @ x + c),
            x_set=Box(cast(self.low), cast(self.high)),
            lower_constraints=Linear(cast(self.A), cast(self.B), cast(self.b)),
            upper_constraints=upper,
        )

    def corners(self, x: Array) -> list[Array]:
        """Return all feasible points of the lower level that are stationary on the face of some active set."""
        right = self.b - self.A @ x
        m, slope = len(self.c), self.R @ x + self.c
        points = []
        for count in range(m + 1):  # more than m rows cannot be independent
            for chosen in itertools.combinations(range(len(right)), count):
                rows = self.B[list(chosen)]
                K = np.block([[self.Q, rows.T], [rows, np.zeros((count, count))]])
                if np.linalg.matrix_rank(K, tol=FEASIBLE) < len(K):  # no single point on this face
                    continue
                y = np.linalg.solve(K, np.concatenate([-slope, right[list(chosen)]]))[:m]
                if (self.B @ y <= right + FEASIBLE * (1 + np.abs(right))).all():
                    points.append(y)
        return points

    def answer(self, x: Array) -> Array | None:
        """Return the lower solution that is best for F, among those that meet the upper constraints if there are any."""
        points = self.corners(x)
        if not points:
            return None
        values = [0.5 * y @ self.Q @ y + y @ (self.R @ x + self.c) for y in points]
        least = min(values)
        solutions = [y for y, value in zip(points, values, strict=True) if value <= least + TIE * (1 + abs(least))]
        zs = [np.concatenate([x, y]) for y in solutions]
        inside = [z for z in zs if (self.U @ z <= self.u + FEASIBLE).all()] or zs
        return min(inside, key=lambda z: 0.5 * z @ self.P @ z + self.p @ z)[len(x) :]


def _problem(pieces: Pieces, x0: Array, y0: Array) -> Coupled:
    return Coupled(
        build=pieces.state, x0=x0, y0=y0, answer=pieces.answer, box=(pieces.low, pieces.high), solve=partial(_solve, pieces)
    )


def _solve(pieces: Pieces) -> tuple[Array, Array]:
    """Return the global solution: the best of the convex programs of all active sets (needs cvxpy, and a convex F)."""
    import cvxpy

    n, m, rows = len(pieces.low), len(pieces.c), len(pieces.b)
    best: tuple[float, Array] = (np.inf, np.zeros(n + m))
    root = np.linalg.cholesky(pieces.P + 1e-14 * np.eye(n + m)).T if pieces.P.any() else None  # 1e-14: P may be singular
    for count in range(rows + 1):
        for chosen in itertools.combinations(range(rows), count):
            z, lam = cvxpy.Variable(n + m), cvxpy.Variable(rows, nonneg=True)
            x, y = z[:n], z[n:]
            slack = pieces.b - pieces.A @ x - pieces.B @ y
            active = list(chosen)
            inactive = [i for i in range(rows) if i not in chosen]
            limits: list[Any] = [slack >= 0, x >= pieces.low, x <= pieces.high]
            # For a fixed active set, the KKT conditions of the lower level are linear: complementarity is decided.
            limits += [pieces.Q @ y + pieces.R @ x + pieces.c + pieces.B.T @ lam == 0]
            limits += [slack[active] == 0] if active else []
            limits += [lam[inactive] == 0] if inactive else []
            limits += [pieces.U @ z <= pieces.u] if len(pieces.u) else []
            objective = pieces.p @ z + (0 if root is None else 0.5 * cvxpy.sum_squares(root @ z))
            program = cvxpy.Problem(cvxpy.Minimize(objective), limits)
            program.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
            if program.status in ("optimal", "optimal_inaccurate") and program.value < best[0] - 1e-9:
                best = float(program.value), np.array(z.value)
    return best[1][:n], best[1][n:]


def random_pieces(
    n: int,
    m: int,
    rows: int,
    seed: int,
    *,
    quadratic_upper: bool,
    quadratic_lower: bool,
    upper: int = 0,
    singular: bool = False,
) -> Coupled:
    """Return a random problem whose lower level is bounded, and feasible at most x: y is in a polytope inside |y| <= 4."""
    random = np.random.default_rng(seed)
    size = n + m
    P = np.zeros((size, size))
    if quadratic_upper:
        root = random.normal(size=(size, size))
        P = root @ root.T / size + 0.2 * np.eye(size)
    Q = np.zeros((m, m))
    if quadratic_lower:
        root = random.normal(size=(m, m - 1 if singular and m > 1 else m))
        Q = root @ root.T + (0.0 if singular else 0.3) * np.eye(m)  # singular: one direction without curvature
    A = np.vstack([random.normal(size=(rows, n)), np.zeros((2 * m, n))])
    B = np.vstack([random.normal(size=(rows, m)), np.eye(m), -np.eye(m)])  # bounds |y| <= 4
    b = np.concatenate([0.5 + 2 * random.random(rows), np.full(2 * m, 4.0)])
    U = random.normal(size=(upper, size))
    pieces = Pieces(
        P=P,
        p=2 * random.normal(size=size),
        Q=Q,
        R=random.normal(size=(m, n)) if quadratic_lower else np.zeros((m, n)),
        c=random.normal(size=m),
        A=A,
        B=B,
        b=b,
        low=np.full(n, -3.0),
        high=np.full(n, 3.0),
        U=U,
        u=0.3 + random.random(upper),
    )
    return _problem(pieces, random.uniform(-2, 2, n), random.uniform(-3, 3, m))


def bilinear_tolls(seed: int, *, arcs: int = 3) -> Coupled:
    """Tolls on some of parallel roads: F = -x'y, a bilinear revenue; f = (cost + x)'y over flows with moving capacities."""
    random = np.random.default_rng(seed)
    m, n = arcs + 1, arcs
    cost = np.concatenate([1 + random.random(arcs), [3.5]])
    P = np.zeros((n + m, n + m))
    P[:n, n : n + arcs] = -np.eye(arcs)
    P = P + P.T
    R = np.vstack([np.eye(arcs), np.zeros((1, arcs))])
    capacity = np.concatenate([0.4 + 0.4 * random.random(arcs), [2.0]])
    A = np.zeros((2 * m + 2, n))
    B = np.vstack([np.eye(m), -np.eye(m), np.ones((1, m)), -np.ones((1, m))])
    b = np.concatenate([capacity, np.zeros(m), [1.0, -1.0]])
    pieces = Pieces(P, np.zeros(n + m), np.zeros((m, m)), R, cost, A, B, b, np.zeros(n), np.full(n, 4.0), *_none(n + m))
    # Without solve: F is bilinear, so the programs of the active sets would not be convex.
    return Coupled(build=pieces.state, x0=np.ones(n), y0=np.full(m, 1 / m), answer=pieces.answer, box=(pieces.low, pieces.high))


def _none(size: int) -> tuple[Array, Array]:
    return np.zeros((0, size)), np.zeros(0)


def _kind(quadratic_upper: bool, quadratic_lower: bool, **more: Any) -> Callable[..., Coupled]:
    return partial(random_pieces, quadratic_upper=quadratic_upper, quadratic_lower=quadratic_lower, **more)


LINEAR: dict[str, dict[str, Callable[[], Coupled]]] = {
    "linear, linear": {
        f"linear over linear, {n} + {m}, {rows} rows": partial(_kind(False, False), n, m, rows, seed)
        for seed, (n, m, rows) in enumerate(
            [(1, 1, 2), (1, 2, 2), (2, 1, 3), (2, 2, 2), (3, 2, 2), (2, 3, 1), (1, 3, 2), (3, 1, 4)]
        )
    },
    "linear, quadratic": {
        f"linear over quadratic, {n} + {m}, {rows} rows": partial(_kind(False, True), n, m, rows, 20 + seed)
        for seed, (n, m, rows) in enumerate([(1, 1, 2), (2, 2, 2), (2, 1, 3), (3, 2, 2), (1, 2, 3), (4, 2, 1)])
    },
    "quadratic, quadratic": {
        f"quadratic over quadratic, {n} + {m}, {rows} rows": partial(_kind(True, True), n, m, rows, 40 + seed)
        for seed, (n, m, rows) in enumerate([(1, 1, 2), (2, 2, 2), (3, 2, 3), (2, 3, 1), (5, 2, 2), (1, 3, 1)])
    },
    "upper coupling": {
        f"upper rows, {n} + {m}, {rows} + {upper} rows": partial(
            _kind(bool(seed % 2), seed % 3 != 0, upper=upper), n, m, rows, 60 + seed
        )
        for seed, (n, m, rows, upper) in enumerate(
            [(1, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 2), (3, 2, 2, 1), (1, 2, 2, 2), (2, 2, 2, 2)]
        )
    },
    "singular quadratic": {
        f"quadratic over singular, {n} + {m}": partial(_kind(True, True, singular=True), n, m, 2, 80 + seed)
        for seed, (n, m) in enumerate([(1, 2), (2, 2), (2, 3), (3, 2)])
    },
    "tolls with capacities": {
        "tolls on one road": partial(bilinear_tolls, 0, arcs=1),
        "tolls on two roads": partial(bilinear_tolls, 1, arcs=2),
    },
}
