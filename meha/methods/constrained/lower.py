"""The lower level at one x: solved from a point, searched for lower valleys, and sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array, solve_program
from meha.methods.constrained.programs import Cut, Lower, Relaxed
from meha.methods.constrained.sqp import Stationary, minimise

__all__ = ["LowerLevel", "Region"]

ROUNDS = 40
"""Steps of one solve of the lower level."""

LOOSE = 20
"""Steps of a descent that looks for a lower valley."""

MET = 1e-7
"""Violation with which a point of the lower level counts as feasible."""

SAMPLES, DESCENTS, FEW = 200, 6, 2
"""Points at which a lower level that is not convex is looked at, and those of them that descents start from."""

WITHOUT_BOUND = 10.0
"""Distance from the start within which unbounded coordinates are drawn."""

WIDE = 1e4
"""A range beyond this is taken for unbounded."""

SCREENED = 12
"""Largest number of unknowns whose ranges are computed by linear programs."""

CONVEX = 1e-9
"""Negative curvature, relative to the largest, that is due to rounding."""

INDEPENDENT = 1e-6
"""Singular values and curvatures, relative to the largest or 1, that count as more than zero."""

LOOKS = 12
"""Points at which the curvature of functions that are not quadratic is looked at."""

WEIGHT = 1e3
"""Weight of violations where points are compared."""


@dataclass(eq=False)
class Region:
    """A box for (x, y) that holds all points that meet the linear constraints, or a wide one around the start."""

    low: Array
    high: Array

    @classmethod
    def of(cls, coupling: Coupling, z: Array) -> Region:
        """The box, by linear programs where there are few unknowns."""
        rows, size = coupling.rows, len(z)
        low, high = np.full(size, -math.inf), np.full(size, math.inf)
        values, J = coupling.values(z), coupling.jacobian(z)
        every = np.arange(coupling.count)
        inequality = np.zeros(coupling.count, dtype=bool)
        equation = np.zeros(coupling.count, dtype=bool)
        inequality[rows.lower] = inequality[rows.upper] = True
        equation[rows.lower_equations] = equation[rows.upper_equations] = True
        i, e = every[inequality & coupling.linear], every[equation & coupling.linear]
        A, b, C, d = J[i], J[i] @ z - values[i], J[e], J[e] @ z - values[e]
        single = (A != 0).sum(axis=1) == 1
        for row, right in zip(A[single], b[single], strict=True):
            k = int(np.flatnonzero(row)[0])
            if row[k] > 0:
                high[k] = min(high[k], right / row[k])
            else:
                low[k] = max(low[k], right / row[k])
        if size <= SCREENED:
            for k in range(size):
                for sign, ends in ((1.0, low), (-1.0, high)):
                    if not math.isfinite(ends[k]):
                        answer = solve_program(np.zeros((size, size)), sign * np.eye(size)[k], A, b, C, d)
                        if answer.solved and abs(answer.z[k]) < WIDE:
                            ends[k] = answer.z[k]
        reach = WITHOUT_BOUND + np.abs(z)
        open_low, open_high = ~np.isfinite(low), ~np.isfinite(high)
        low[open_low] = np.where(open_high, z - reach, high - 2 * reach)[open_low]
        high[open_high] = np.maximum(z + reach, low + reach)[open_high]
        return cls(np.minimum(low, high), np.maximum(low, high))

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """Points spread over the box, one in each of ``count`` layers in every coordinate."""
        size = len(self.low)
        layers = np.stack([generator.permutation(count) for _ in range(size)], axis=1)
        shares = (layers + generator.uniform(size=(count, size))) / count
        return self.low + shares * (self.high - self.low)


class LowerLevel:
    """The lower level of a coupled problem.

    Attributes:
        convex: whether it is convex in y: True if that is certain, None if curvatures at some points say so, False if not.
        solves: how often it was solved.
    """

    def __init__(self, coupling: Coupling, region: Region) -> None:
        self.coupling, self.region = coupling, region
        self.solves = 0
        self.convex = self._convexity()

    def _convexity(self) -> bool | None:
        coupling, rows = self.coupling, self.coupling.rows
        which = np.zeros(coupling.count, dtype=bool)
        which[rows.f] = True
        which[rows.lower] = which[rows.lower_equations] = True
        if not coupling.linear[rows.lower_equations].all():
            return False
        sure = bool(coupling.quadratic[which].all())
        points = self.region.draw(np.random.default_rng(0), 1 if sure else LOOKS)
        for z in points:
            hessians = coupling.hessians(z, which)[which][:, coupling.n :, coupling.n :]
            if not np.isfinite(hessians).all():
                continue
            for H in hessians:
                values = np.linalg.eigvalsh(H)
                if values[0] < -CONVEX * (1 + float(np.abs(values).max())):
                    return False
        return True if sure else None

    def solve(self, x: Array, y: Array, rounds: int = ROUNDS) -> Stationary:
        """A local solution from y, with its multipliers."""
        self.solves += 1
        return minimise(Lower(self.coupling, x), y, rounds)

    def search(self, x: Array, y: Array, seed: int = 0, *, quick: bool = False) -> Stationary | None:
        """The best solution that descents from y and from other points find; None if they find no feasible one."""
        found = [self.solve(x, y)]
        if self.convex is not True and not (quick and self.convex is None):
            starts = self._starts(x, np.random.default_rng(seed))
            few = quick or self.convex is None
            found += [self.solve(x, start, LOOSE) for start in starts[: FEW if few else DESCENTS]]
        good = [point for point in found if point.violation <= MET]
        return min(good, key=lambda point: point.value) if good else None

    def _starts(self, x: Array, generator: np.random.Generator) -> list[Array]:
        """The most promising of many points, far apart from each other."""
        coupling, rows, n = self.coupling, self.coupling.rows, self.coupling.n
        box = Region(self.region.low[n:], self.region.high[n:])
        points = box.draw(generator, SAMPLES)
        values = coupling.many(np.hstack([np.tile(x, (SAMPLES, 1)), points]))
        broken = np.maximum(values[:, rows.lower], 0.0).sum(axis=1) + np.abs(values[:, rows.lower_equations]).sum(axis=1)
        merits = values[:, rows.f] + WEIGHT * broken
        order = np.argsort(np.where(np.isfinite(merits), merits, math.inf))
        width = np.maximum(box.high - box.low, np.finfo(float).tiny)
        chosen: list[Array] = []
        distance = 0.5 / (1 + len(width))
        for k in order:
            if len(chosen) >= DESCENTS:
                break
            if all(float(np.abs((points[k] - other) / width).max()) > distance for other in chosen):
                chosen.append(points[k])
        return chosen

    def strict(self, x: Array, at: Stationary) -> bool:
        """Whether a solution is the only one nearby: f is curved along the directions that multipliers leave open."""
        coupling, rows = self.coupling, self.coupling.rows
        J = coupling.jacobian(np.concatenate([x, at.w]))[:, coupling.n :]
        binding = at.lam > CONVEX * (1 + float(np.abs(at.lam).max(initial=0.0)))
        held = np.vstack([J[rows.lower][binding], J[rows.lower_equations]])
        _, sizes, directions = np.linalg.svd(held, full_matrices=True)
        rank = int((sizes > INDEPENDENT * max(float(sizes.max(initial=0.0)), 1.0)).sum())
        H = Lower(coupling, x).hessian(at.w, at.mu, at.lam)
        if not np.isfinite(H).all():
            return False
        least = np.linalg.eigvalsh(directions[rank:] @ H @ directions[rank:].T)[:1]
        return bool((least > INDEPENDENT * (1 + float(np.abs(H).max(initial=0.0)))).all())

    def best_for_upper(self, x: Array, y: Array, level: float) -> Stationary:
        """The solution with the smallest F among those with f at most ``level``."""
        return minimise(Lower(self.coupling, x, level), y, ROUNDS)

    def meet(self, z: Array, *, lower_only: bool = False) -> Stationary:
        """The point nearest to z that meets all constraints, as far as one can be found."""
        return minimise(Relaxed(self.coupling, z, lower_only), z, ROUNDS)

    def cut(self, y: Array) -> Cut:
        """The value of the valley around y, as a function of z = (x, y), with its gradient."""
        coupling, rows = self.coupling, self.coupling.rows
        seed = y.copy()
        known: dict[bytes, tuple[float, Array]] = {}

        def value(z: Array) -> tuple[float, Array]:
            x = z[: coupling.n]
            key = x.tobytes()
            if key not in known:
                solution = self.solve(x, seed)
                gradient = np.zeros(len(z))
                if solution.violation > MET:  # the valley ends before this x
                    known[key] = math.inf, gradient
                else:
                    J = coupling.jacobian(np.concatenate([x, solution.w]))[:, : coupling.n]
                    total = J[rows.f] + solution.lam @ J[rows.lower] + solution.mu @ J[rows.lower_equations]
                    gradient[: coupling.n] = total
                    known[key] = solution.value, gradient
            return known[key]

        return value
