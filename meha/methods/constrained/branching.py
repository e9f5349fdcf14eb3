"""Branch and bound over the active sets of the lower level, where the problem is linear and quadratic: a global solution."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array, feasible, solve_program

__all__ = ["Branching", "Enumerated"]

NODES = 1500
"""Quadratic programs that a search may solve."""

DAMPING = 1e-10
"""Curvature of the objective in all unknowns, relative to its own, so that multipliers stay bounded."""

COMPLEMENTARY = 1e-8
"""Product of a multiplier and a slack, each at most 1, below which one of them counts as zero."""

IMPROVEMENT = 1e-7
"""Improvement of F, relative to 1 + |F|, that is worth a branch."""

CONTRADICTION = 1e-7
"""Violation beyond which constraints contradict each other."""

CONVEX = 1e-9
"""Negative curvature, relative to the largest, that is due to rounding."""

FREE, ACTIVE, INACTIVE = 0, 1, 2


@dataclass(eq=False)
class Enumerated:
    """What a search found.

    Attributes:
        z: the best point; None if no point is feasible.
        F: its value.
        lam, nu: multipliers of the lower level there.
        complete: whether nothing better exists.
        unbounded: whether F falls without bound on some piece.
        nodes: the programs that were solved.
    """

    z: Array | None
    F: float
    lam: Array
    nu: Array
    complete: bool
    unbounded: bool
    nodes: int


class Branching:
    """Complementarity branching: each node fixes that some lower constraints are active, and some multipliers zero.

    The relaxation of a node, a convex quadratic program in (x, y, lambda, nu), bounds F from below on all of its pieces. It
    needs a convex quadratic F, a quadratic f that is convex in y, and linear constraints.
    """

    def __init__(self, coupling: Coupling) -> None:
        self.coupling, rows = coupling, coupling.rows
        size = coupling.n + coupling.m
        centre = np.zeros(size)
        values, J, H = coupling.values(centre), coupling.jacobian(centre), coupling.hessians(centre)
        self.inequalities = np.arange(rows.lower.start, rows.lower.stop)
        equations = np.arange(rows.lower_equations.start, rows.lower_equations.stop)
        self.q, self.p, self.size = len(self.inequalities), len(equations), size
        total = size + self.q + self.p
        self.H = np.zeros((total, total))
        self.H[:size, :size] = H[rows.F]
        self.g = np.concatenate([J[rows.F], np.zeros(self.q + self.p)])
        self.F0 = float(values[rows.F])
        held = np.concatenate([self.inequalities, equations]).astype(int)
        stationary = np.hstack([H[rows.f][coupling.n :], J[held][:, coupling.n :].T])
        both = np.concatenate([equations, np.arange(rows.upper_equations.start, rows.upper_equations.stop)]).astype(int)
        self.C = np.vstack([stationary, np.hstack([J[both], np.zeros((len(both), self.q + self.p))])])
        self.d = np.concatenate([-J[rows.f][coupling.n :], -values[both]])
        above = np.arange(rows.upper.start, rows.upper.stop)
        lower = np.concatenate([self.inequalities, above]).astype(int)
        signs = np.hstack([np.zeros((self.q, size)), -np.eye(self.q), np.zeros((self.q, self.p))])
        self.A = np.vstack([np.hstack([J[lower], np.zeros((len(lower), self.q + self.p))]), signs])
        self.b = np.concatenate([-values[lower], np.zeros(self.q)])
        self.first_sign = len(lower)
        self.nodes = 0

    @staticmethod
    def fits(coupling: Coupling) -> bool:
        """Whether a problem is of this kind."""
        rows = coupling.rows
        objectives = [rows.F, rows.f]
        if not (coupling.quadratic[objectives].all() and coupling.linear[2:].all()):
            return False
        H = coupling.hessians(np.zeros(coupling.n + coupling.m))
        return _convex(H[rows.F]) and _convex(H[rows.f][coupling.n :, coupling.n :])

    def search(self) -> Enumerated:
        """Visit nodes with the smallest bounds first, until none can be better than the best point."""
        best: tuple[float, Array | None] = (math.inf, None)
        order = itertools.count()
        waiting: list[tuple[float, int, Array]] = [(-math.inf, next(order), np.zeros(self.q, dtype=int))]
        complete, unbounded = True, False
        while waiting:
            bound, _, node = heapq.heappop(waiting)
            if bound >= best[0] - IMPROVEMENT * (1 + abs(best[0])) and best[1] is not None:
                continue
            if self.nodes >= NODES:
                complete = False
                break
            F, w = self._relax(node)
            if w is None and math.inf == F:
                continue
            if w is None:
                index = next((i for i in range(self.q) if node[i] == FREE), None)
                if index is None:
                    unbounded, complete = True, False
                    continue
            else:
                if best[0] - IMPROVEMENT * (1 + abs(best[0])) <= F and best[1] is not None:
                    continue
                index, error = self._violated(w)
                piece = np.where(self._slack(w) < self._multipliers(w), ACTIVE, INACTIVE)
                piece = np.where(node == FREE, piece, node)
                if error <= COMPLEMENTARY or best[1] is None:
                    value, point = self._relax(piece)
                    if point is not None and value < best[0]:
                        best = value, point
                    if error <= COMPLEMENTARY and point is not None and value <= F + IMPROVEMENT * (1 + abs(F)):
                        continue
                free = np.flatnonzero(node == FREE)
                if not len(free):
                    continue
                if node[index] != FREE:
                    index = int(free[0])
            for choice in (ACTIVE, INACTIVE):
                child = node.copy()
                child[index] = choice
                heapq.heappush(waiting, (F, next(order), child))
        value, point = best
        if point is None:
            return Enumerated(None, math.inf, np.zeros(self.q), np.zeros(self.p), complete, unbounded, self.nodes)
        z, lam, nu = point[: self.size], self._multipliers(point), point[self.size + self.q :]
        return Enumerated(z, value, np.maximum(lam, 0.0), nu, complete, unbounded, self.nodes)

    def _relax(self, node: Array) -> tuple[float, Array | None]:
        """The bound of a node and its point; (inf, None) if nothing is feasible, (-inf, None) if there is no solution."""
        self.nodes += 1
        on, off = np.flatnonzero(node == ACTIVE), np.flatnonzero(node == INACTIVE)
        kept = np.ones(len(self.b), dtype=bool)
        kept[on] = False
        kept[self.first_sign + off] = False
        zero = np.zeros((len(off), len(self.g)))
        zero[range(len(off)), self.size + off] = 1.0
        C = np.vstack([self.C, self.A[on], zero])
        d = np.concatenate([self.d, self.b[on], np.zeros(len(off))])
        damping = DAMPING * max(1.0, float(np.abs(self.H).max(initial=0.0)), float(np.abs(self.g).max(initial=0.0)))
        H = self.H + damping * np.eye(len(self.g))
        A, b = self.A[kept], self.b[kept]
        answer = solve_program(H, self.g, A, b, C, d)
        w = answer.z
        if answer.solved and float(np.abs(w).max(initial=0.0)) * math.sqrt(DAMPING) < 1:
            return self.F0 + float(self.g @ w) + 0.5 * float(w @ self.H @ w), w
        _, violation = feasible(A, b, C, d, np.zeros(len(self.g)))
        return (math.inf, None) if violation > CONTRADICTION else (-math.inf, None)

    def _slack(self, w: Array) -> Array:
        return self.b[: self.q] - self.A[: self.q] @ w

    def _multipliers(self, w: Array) -> Array:
        return w[self.size : self.size + self.q]

    def _violated(self, w: Array) -> tuple[int, float]:
        """The lower constraint that is furthest from complementarity."""
        if not self.q:
            return 0, 0.0
        products = np.minimum(np.abs(self._slack(w)), 1.0) * np.minimum(np.abs(self._multipliers(w)), 1.0)
        index = int(products.argmax())
        return index, float(products[index])


def _convex(H: Array) -> bool:
    values = np.linalg.eigvalsh(H) if len(H) else np.zeros(1)
    return bool(values[0] >= -CONVEX * (1 + float(np.abs(values).max())))
