"""Solve the lower level at one x by sequential quadratic programming, where constraints couple x and y."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meha.numerics.quadratic_program import Array, solve_program
from meha.numerics.sqp import Stationary, minimise_sqp
from meha.reduce.nonlinear_program import NonlinearProgram

Cut = Callable[[Array], tuple[float, Array]]
"""A function of z = (x, y) that gives the least f of another basin of the lower level at x, and its gradient in z."""


def _weighted(hessians: Array, weights: Array) -> Array:
    return np.einsum("k,kij->ij", weights, hessians)


@dataclass(eq=False)
class RelaxedProgram:
    """min F(x, y) over all constraints, without the lower level; or the feasible point nearest to ``target``."""

    coupling: NonlinearProgram
    target: Array | None = None
    lower_only: bool = False

    def values(self, w: Array) -> tuple[float, Array, Array]:
        values, rows = self.coupling.values(w), self.coupling.rows
        phi = float(values[rows.F]) if self.target is None else 0.5 * float((w - self.target) @ (w - self.target))
        if self.lower_only:
            return phi, values[rows.lower_equations], values[rows.lower]
        equations = np.concatenate([values[rows.lower_equations], values[rows.upper_equations]])
        return phi, equations, np.concatenate([values[rows.lower], values[rows.upper]])

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        J, rows = self.coupling.jacobian(w), self.coupling.rows
        g = J[rows.F] if self.target is None else w - self.target
        if self.lower_only:
            return g, J[rows.lower_equations], J[rows.lower]
        equations = np.vstack([J[rows.lower_equations], J[rows.upper_equations]])
        return g, equations, np.vstack([J[rows.lower], J[rows.upper]])

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        weights = np.zeros(coupling.count)
        weights[rows.F] = float(self.target is None)  # with a target, the objective is ||w - target||^2 / 2
        split = rows.lower_equations.stop - rows.lower_equations.start
        weights[rows.lower_equations] = mu[:split]
        inner = rows.lower.stop - rows.lower.start
        weights[rows.lower] = lam[:inner]
        if not self.lower_only:
            weights[rows.upper_equations], weights[rows.upper] = mu[split:], lam[inner:]
        H = _weighted(coupling.hessians(w, weights != 0), weights)  # functions of weight 0 cost nothing
        return H if self.target is None else H + np.eye(len(w))


@dataclass(eq=False)
class LowerProgram:
    """The lower level at one x, min f(x, y) over its constraints; or the best of its solutions for F.

    Args:
        level: if given, minimise F over the y with f(x, y) <= level and all constraints.
    """

    coupling: NonlinearProgram
    x: Array
    level: float | None = None

    def at(self, y: Array) -> Array:
        """(x, y)."""
        return np.concatenate([self.x, y])

    def values(self, w: Array) -> tuple[float, Array, Array]:
        values, rows = self.coupling.values(self.at(w)), self.coupling.rows
        if self.level is None:
            return float(values[rows.f]), values[rows.lower_equations], values[rows.lower]
        equations = np.concatenate([values[rows.lower_equations], values[rows.upper_equations]])
        beyond = [values[rows.f] - self.level]
        return float(values[rows.F]), equations, np.concatenate([values[rows.lower], values[rows.upper], beyond])

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        J, rows = self.coupling.jacobian(self.at(w))[:, self.coupling.n :], self.coupling.rows
        if self.level is None:
            return J[rows.f], J[rows.lower_equations], J[rows.lower]
        equations = np.vstack([J[rows.lower_equations], J[rows.upper_equations]])
        return J[rows.F], equations, np.vstack([J[rows.lower], J[rows.upper], J[rows.f]])

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        weights = np.zeros(coupling.count)
        if self.level is None:
            weights[rows.f], weights[rows.lower_equations], weights[rows.lower] = 1.0, mu, lam
        else:
            split, inner = rows.lower_equations.stop - rows.lower_equations.start, rows.lower.stop - rows.lower.start
            weights[rows.F], weights[rows.f] = 1.0, lam[-1]
            weights[rows.lower_equations], weights[rows.upper_equations] = mu[:split], mu[split:]
            weights[rows.lower], weights[rows.upper] = lam[:inner], lam[inner:-1]
        return _weighted(coupling.hessians(self.at(w), weights != 0), weights)[coupling.n :, coupling.n :]


@dataclass(eq=False)
class PieceProgram:
    """One piece of the KKT reformulation: the lower level is replaced by its KKT conditions with a fixed active set.

    The unknowns are w = (x, y, lambda of the active inequalities, nu of the equations).

    Args:
        active: a mask of the lower inequalities.
        cuts: least values of f in other basins, which f must not exceed.
    """

    coupling: NonlinearProgram
    active: Array
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        rows = self.coupling.rows
        self.size = self.coupling.n + self.coupling.m
        inequalities = np.arange(rows.lower.start, rows.lower.stop)
        self.on, self.off = inequalities[self.active], inequalities[~self.active]  # as equations, and as inequalities
        self.nu = np.arange(rows.lower_equations.start, rows.lower_equations.stop)
        self.active_rows = np.concatenate([self.on, self.nu])  # in the order of the multipliers

    def start(self, z: Array, lam: Array, nu: Array) -> Array:
        """The unknowns at a point, given all multipliers of the lower level."""
        return np.concatenate([z, np.maximum(lam[self.active], 0.0), nu])  # the piece demands lambda >= 0

    def multipliers(self, w: Array) -> tuple[Array, Array]:
        """The multipliers of all lower inequalities (zero where inactive), and of the lower equations."""
        lam = np.zeros(len(self.active))
        lam[self.active] = w[self.size : self.size + len(self.on)]
        return lam, w[self.size + len(self.on) :]

    def values(self, w: Array) -> tuple[float, Array, Array]:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        values = coupling.values(z)
        J = coupling.jacobian(z)[:, coupling.n :]
        gradient = J[rows.f] + multipliers @ J[self.active_rows]  # of the Lagrangian of the lower level in y
        equations = np.concatenate([gradient, values[self.active_rows], values[rows.upper_equations]])
        excess = [float(values[rows.f]) - cut(z)[0] for cut in self.cuts]
        inequalities = np.concatenate([-multipliers[: len(self.on)], values[self.off], values[rows.upper], excess])
        return float(values[rows.F]), equations, inequalities

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        J = coupling.jacobian(z)
        extra = len(multipliers)
        g = np.concatenate([J[rows.F], np.zeros(extra)])
        weights = self._weights(multipliers)
        bent = _weighted(coupling.hessians(z, weights != 0), weights)[coupling.n :]  # the derivative of that gradient
        held, above = J[self.active_rows], J[rows.upper_equations]
        equations = np.vstack(
            [
                np.hstack([bent, held[:, coupling.n :].T]),
                np.hstack([held, np.zeros((len(held), extra))]),
                np.hstack([above, np.zeros((len(above), extra))]),
            ]
        )
        signs = np.zeros((len(self.on), self.size + extra))
        signs[range(len(self.on)), range(self.size, self.size + len(self.on))] = -1.0
        # f - v <= 0, where v(x) is the least f of another basin.
        cuts = [J[rows.f] - cut(z)[1] for cut in self.cuts]
        below = np.vstack([J[self.off], J[rows.upper], np.array(cuts).reshape(-1, self.size)])
        return g, equations, np.vstack([signs, np.hstack([below, np.zeros((len(below), extra))])])

    def _weights(self, multipliers: Array) -> Array:
        """The weight of each function in the Lagrangian of the lower level."""
        weights = np.zeros(self.coupling.count)
        weights[self.coupling.rows.f] = 1.0
        weights[self.active_rows] = multipliers
        return weights

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        m, extra = coupling.m, len(multipliers)
        along, held, above = mu[:m], mu[m : m + extra], mu[m + extra :]  # in the order of the equations in values()
        weights = np.zeros(coupling.count)
        weights[rows.F], weights[self.active_rows], weights[rows.upper_equations] = 1.0, held, above
        rest = lam[len(self.on) :]
        weights[self.off] = rest[: len(self.off)]
        count = rows.upper.stop - rows.upper.start
        weights[rows.upper] = rest[len(self.off) : len(self.off) + count]
        weights[rows.f] = rest[len(self.off) + count :].sum()  # the curvature of the cuts themselves is left out
        needed = weights != 0
        needed[self.active_rows] |= bool(along.any())  # these also appear in the mixed block below
        hessians = coupling.hessians(z, needed)
        H = np.zeros((self.size + extra, self.size + extra))
        # The equations hold first derivatives of f and the constraints, so their Hessians hold third ones.
        H[: self.size, : self.size] = _weighted(hessians, weights) + coupling.third(z, self._weights(multipliers), along)
        if extra:
            cross = hessians[self.active_rows][:, :, coupling.n :] @ along
            H[self.size :, : self.size], H[: self.size, self.size :] = cross, cross.T
        return H


ROUNDS = 40
"""Steps of one solve of the lower level."""

LOOSE = 20
"""Steps of a descent in the search for a lower basin."""

MET = 1e-7
"""Violation with which a point of the lower level counts as feasible."""

SAMPLES, DESCENTS, FEW = 200, 6, 2
"""Points at which a nonconvex lower level is sampled, and how many of them start descents: at most, and in a quick search."""

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

CURVATURE_SAMPLES = 12
"""Points at which the curvature of functions that are not quadratic is checked."""

WEIGHT = 1e3
"""Weight of violations where points are compared."""


@dataclass(eq=False)
class SampleBox:
    """A box for sampling (x, y): around all points that meet the linear constraints, where these bound it."""

    low: Array
    high: Array

    @classmethod
    def of(cls, coupling: NonlinearProgram, z: Array) -> SampleBox:
        """Compute the box from linear constraints on single unknowns and, where there are few unknowns, by linear programs."""
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
        single = (A != 0).sum(axis=1) == 1  # bounds on one unknown need no program
        for row, right in zip(A[single], b[single], strict=True):
            k = int(np.flatnonzero(row)[0])
            if row[k] > 0:
                high[k] = min(high[k], right / row[k])
            else:
                low[k] = max(low[k], right / row[k])
        if size <= SCREENED:  # two programs for each unknown
            for k in range(size):
                for sign, ends in ((1.0, low), (-1.0, high)):
                    if not math.isfinite(ends[k]):
                        answer = solve_program(np.zeros((size, size)), sign * np.eye(size)[k], A, b, C, d)
                        if answer.solved and abs(answer.z[k]) < WIDE:
                            ends[k] = answer.z[k]
        reach = WITHOUT_BOUND + np.abs(z)  # relative to the start where that is large
        open_low, open_high = ~np.isfinite(low), ~np.isfinite(high)
        low[open_low] = np.where(open_high, z - reach, high - 2 * reach)[open_low]
        high[open_high] = np.maximum(z + reach, low + reach)[open_high]
        return cls(np.minimum(low, high), np.maximum(low, high))  # contradictory bounds, or rounding, may swap the ends

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """Points spread over the box by Latin hypercube sampling (McKay, Beckman and Conover, 1979)."""
        size = len(self.low)
        layers = np.stack([generator.permutation(count) for _ in range(size)], axis=1)
        shares = (layers + generator.uniform(size=(count, size))) / count
        return self.low + shares * (self.high - self.low)


class ConstrainedLower:
    """The lower level of a coupled problem, solved locally or by multistart.

    Attributes:
        convex: whether it is convex in y: True if that is certain, None if sampled curvatures say so, False if not.
        solves: the number of local solves so far.
    """

    def __init__(self, coupling: NonlinearProgram, region: SampleBox) -> None:
        self.coupling, self.region = coupling, region
        self.solves = 0
        self.convex = self._convexity()

    def _convexity(self) -> bool | None:
        """Classify the lower level; see the attribute ``convex``."""
        coupling, rows = self.coupling, self.coupling.rows
        which = np.zeros(coupling.count, dtype=bool)
        which[rows.f] = True
        which[rows.lower] = which[rows.lower_equations] = True
        if not coupling.linear[rows.lower_equations].all():  # its feasible set is not convex
            return False
        certain = bool(coupling.quadratic[which].all())  # then the curvature is the same everywhere
        points = self.region.draw(np.random.default_rng(0), 1 if certain else CURVATURE_SAMPLES)
        for z in points:
            hessians = coupling.hessians(z, which)[which][:, coupling.n :, coupling.n :]
            if not np.isfinite(hessians).all():  # beside a pole
                continue
            for H in hessians:
                values = np.linalg.eigvalsh(H)
                if values[0] < -CONVEX * (1 + float(np.abs(values).max())):
                    return False
        return True if certain else None

    def solve(self, x: Array, y: Array, rounds: int = ROUNDS) -> Stationary:
        """Find a local solution from y, with its multipliers."""
        self.solves += 1
        return minimise_sqp(LowerProgram(self.coupling, x), y, rounds)

    def search(self, x: Array, y: Array, seed: int = 0, *, quick: bool = False) -> Stationary | None:
        """Multistart: the best feasible solution of descents from y and from sampled points; None without a feasible one."""
        ends = [self.solve(x, y)]
        if self.convex is not True and not (quick and self.convex is None):
            starts = self._starts(x, np.random.default_rng(seed))
            few = quick or self.convex is None
            ends += [self.solve(x, start, LOOSE) for start in starts[: FEW if few else DESCENTS]]
        good = [point for point in ends if point.violation <= MET]
        return min(good, key=lambda point: point.value) if good else None

    def _starts(self, x: Array, generator: np.random.Generator) -> list[Array]:
        """The sampled points of least penalised f that are far apart from each other."""
        coupling, rows, n = self.coupling, self.coupling.rows, self.coupling.n
        box = SampleBox(self.region.low[n:], self.region.high[n:])
        points = box.draw(generator, SAMPLES)
        values = coupling.many(np.hstack([np.tile(x, (SAMPLES, 1)), points]))
        broken = np.maximum(values[:, rows.lower], 0.0).sum(axis=1) + np.abs(values[:, rows.lower_equations]).sum(axis=1)
        merits = values[:, rows.f] + WEIGHT * broken
        order = np.argsort(np.where(np.isfinite(merits), merits, math.inf))
        width = np.maximum(box.high - box.low, np.finfo(float).tiny)
        chosen: list[Array] = []
        # Starts close to each other would end in the same basin.
        distance = 0.5 / (1 + len(width))
        for k in order:
            if len(chosen) >= DESCENTS:
                break
            if all(float(np.abs((points[k] - other) / width).max()) > distance for other in chosen):
                chosen.append(points[k])
        return chosen

    def strict(self, x: Array, at: Stationary) -> bool:
        """Whether a solution is isolated: strong second-order sufficient conditions hold there."""
        coupling, rows = self.coupling, self.coupling.rows
        J = coupling.jacobian(np.concatenate([x, at.w]))[:, coupling.n :]
        # Active constraints without a multiplier leave their directions open (strong second-order condition; Robinson, 1980).
        binding = at.lam > CONVEX * (1 + float(np.abs(at.lam).max(initial=0.0)))
        held = np.vstack([J[rows.lower][binding], J[rows.lower_equations]])
        _, sizes, directions = np.linalg.svd(held, full_matrices=True)
        # The gradients of the constraints may be dependent.
        rank = int((sizes > INDEPENDENT * max(float(sizes.max(initial=0.0)), 1.0)).sum())
        H = LowerProgram(coupling, x).hessian(at.w, at.mu, at.lam)
        if not np.isfinite(H).all():
            return False
        least = np.linalg.eigvalsh(directions[rank:] @ H @ directions[rank:].T)[:1]
        return bool((least > INDEPENDENT * (1 + float(np.abs(H).max(initial=0.0)))).all())

    def best_for_upper(self, x: Array, y: Array, level: float) -> Stationary:
        """Minimise F over the feasible y with f(x, y) <= level (the optimistic choice)."""
        return minimise_sqp(LowerProgram(self.coupling, x, level), y, ROUNDS)

    def meet(self, z: Array, *, lower_only: bool = False) -> Stationary:
        """Project z on all constraints, or on those of the lower level; a local solution where they are not convex."""
        return minimise_sqp(RelaxedProgram(self.coupling, z, lower_only), z, ROUNDS)

    def cut(self, y: Array) -> Cut:
        """The least f of the basin around y as a function of z = (x, y), with its gradient."""
        coupling, rows = self.coupling, self.coupling.rows
        seed = y.copy()  # all solves start here, so the value depends on x alone
        known: dict[bytes, tuple[float, Array]] = {}  # values() and jacobians() ask at the same x

        def value(z: Array) -> tuple[float, Array]:
            x = z[: coupling.n]
            key = x.tobytes()
            if key not in known:
                solution = self.solve(x, seed)
                gradient = np.zeros(len(z))
                if solution.violation > MET:  # the basin ends before this x, and no longer bounds f
                    known[key] = math.inf, gradient
                else:
                    J = coupling.jacobian(np.concatenate([x, solution.w]))[:, : coupling.n]
                    # The envelope theorem: the gradient of the value is that of the Lagrangian in x.
                    total = J[rows.f] + solution.lam @ J[rows.lower] + solution.mu @ J[rows.lower_equations]
                    gradient[: coupling.n] = total
                    known[key] = solution.value, gradient
            return known[key]

        return value
