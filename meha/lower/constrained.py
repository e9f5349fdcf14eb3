"""Solve the lower level at one x by sequential quadratic programming, where constraints couple x and y."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meha.numerics.quadratic_program import Array
from meha.numerics.sqp import Stationary, is_convex, minimise_sqp
from meha.numerics.tolerances import FEASIBLE
from meha.reduce.nonlinear_program import PROBES, REACH, NonlinearProgram

Cut = Callable[[Array], tuple[float, Array]]
"""A function of z = (x, y) that gives the least f of another basin of the lower level at x, and its gradient in z."""


@dataclass(eq=False)
class SelectedProgram:
    """The least value of one function of a coupled problem over its constraints, or the feasible point nearest to a target.

    The unknowns are (x, y), or y alone where x is given: with f and the lower constraints, that is the lower level at x.

    Args:
        objective: the index of the function, or the target.
        lower_only: leave out the upper constraints.
        x: fixed, if given.
    """

    coupling: NonlinearProgram
    objective: int | Array
    lower_only: bool = False
    x: Array | None = None

    def __post_init__(self) -> None:
        rows, every = self.coupling.rows, np.arange(self.coupling.count)
        both = [(rows.lower_equations, rows.lower), (rows.upper_equations, rows.upper)][: 1 if self.lower_only else 2]
        self.equations = np.concatenate([every[equations] for equations, _ in both])
        self.inequalities = np.concatenate([every[inequalities] for _, inequalities in both])
        self.fixed = np.zeros(0) if self.x is None else self.x

    def at(self, w: Array) -> Array:
        """(x, y)."""
        return np.concatenate([self.fixed, w])

    def values(self, w: Array) -> tuple[float, Array, Array]:
        values, aim = self.coupling.values(self.at(w)), self.objective
        phi = values[aim] if isinstance(aim, int) else 0.5 * (w - aim) @ (w - aim)
        return float(phi), values[self.equations], values[self.inequalities]

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        J, aim = self.coupling.jacobian(self.at(w))[:, len(self.fixed) :], self.objective
        return J[aim] if isinstance(aim, int) else w - aim, J[self.equations], J[self.inequalities]

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        weights, aim, first = np.zeros(self.coupling.count), self.objective, len(self.fixed)
        weights[self.equations], weights[self.inequalities] = mu, lam
        if isinstance(aim, int):
            weights[aim] = 1.0
        z = self.at(w)
        H = self.coupling.weighted(z, weights, np.zeros(self.coupling.m), self.equations[:0])[0][first:, first:]
        return H if isinstance(aim, int) else H + np.eye(len(w))


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
        bent = coupling.weighted(z, weights, np.zeros(coupling.m), self.nu[:0])[0][
            coupling.n :
        ]  # the derivative of that gradient
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
        H = np.zeros((self.size + extra, self.size + extra))
        total, cross = coupling.weighted(z, weights, along, self.active_rows)
        # The equations hold first derivatives of f and the constraints, so their Hessians hold third ones.
        H[: self.size, : self.size] = total + coupling.third(z, self._weights(multipliers), along)
        H[self.size :, : self.size], H[: self.size, self.size :] = cross, cross.T
        return H


SAMPLES, DESCENTS = 200, 6
"""Points at which a lower level with several basins is sampled, and how many of them start descents."""

WEIGHT = 1e3
"""Weight of violations where points are compared."""


def penalised(
    coupling: NonlinearProgram, values: Array, objective: int, *, lower_only: bool = False, weight: float = WEIGHT
) -> Array:
    """One function plus the weighted sum of violations, from the values of all functions at one point in each row."""
    rows = coupling.rows
    broken = np.maximum(values[:, rows.lower], 0.0).sum(axis=1) + np.abs(values[:, rows.lower_equations]).sum(axis=1)
    if not lower_only:
        broken += np.maximum(values[:, rows.upper], 0.0).sum(axis=1) + np.abs(values[:, rows.upper_equations]).sum(axis=1)
    merits = values[:, objective] + weight * broken
    return np.where(np.isfinite(merits), merits, math.inf)  # beside a pole


@dataclass(eq=False)
class SampleBox:
    """A box for sampling (x, y): around all points that meet the linear constraints, where these bound it."""

    low: Array
    high: Array

    @classmethod
    def of(cls, coupling: NonlinearProgram, z: Array) -> SampleBox:
        """Compute the box by bound tightening: each linear row bounds one unknown where it has bounds of the others."""
        rows, size = coupling.rows, len(z)
        low, high = np.full(size, -math.inf), np.full(size, math.inf)
        values, J = coupling.values(z), coupling.jacobian(z)
        every = np.arange(coupling.count)
        i, e = (
            np.concatenate([every[kind][coupling.linear[kind]] for kind in kinds])
            for kinds in ((rows.lower, rows.upper), (rows.lower_equations, rows.upper_equations))
        )
        A = np.vstack([J[i], J[e], -J[e]])  # an equation bounds on both sides
        b = A @ z - np.concatenate([values[i], values[e], -values[e]])
        with np.errstate(divide="ignore", invalid="ignore"):
            for k in list(range(size)) * 2:  # twice: the first unknowns may be bounded by the last
                least = np.where(A != 0, A * np.where(A > 0, low, high), 0.0)  # of each term
                limit = (b - np.delete(least, k, axis=1).sum(axis=1)) / A[:, k]
                high[k] = min(high[k], limit[A[:, k] > 0].min(initial=math.inf))
                low[k] = max(low[k], limit[A[:, k] < 0].max(initial=-math.inf))
        reach = REACH + np.abs(z)  # relative to the start where that is large
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
    """

    def __init__(self, coupling: NonlinearProgram, region: SampleBox) -> None:
        self.coupling, self.region = coupling, region
        self.convex = self._convexity()

    def _convexity(self) -> bool | None:
        """Classify the lower level; see the attribute ``convex``."""
        rows = self.coupling.rows
        if not self.coupling.linear[rows.lower_equations].all():  # its feasible set is not convex
            return False
        return self.look_convex(np.r_[rows.f, rows.lower, rows.lower_equations], first=self.coupling.n)

    def look_convex(self, functions: Array, first: int = 0) -> bool | None:
        """Whether functions are convex in the unknowns from ``first`` on: True if that is certain, None if samples say so."""
        which = np.zeros(self.coupling.count, dtype=bool)
        which[functions] = True
        certain = bool(self.coupling.quadratic[which].all())  # then the curvature is the same everywhere
        points = self.region.draw(np.random.default_rng(0), 1 if certain else PROBES)
        for z in points:
            hessians = self.coupling.hessians(z, which)[which][:, first:, first:]
            if not np.isfinite(hessians).all():  # beside a pole
                continue
            if not all(is_convex(H) for H in hessians):
                return False
        return True if certain else None

    def solve(self, x: Array, y: Array) -> Stationary:
        """Find a local solution from y, with its multipliers."""
        return minimise_sqp(SelectedProgram(self.coupling, self.coupling.rows.f, lower_only=True, x=x), y)

    def search(self, x: Array, y: Array, seed: int = 0, *, quick: bool = False) -> Stationary | None:
        """Multistart: the best feasible solution of descents from y and from sampled points; None without a feasible one."""
        ends = [self.solve(x, y)]
        if self.convex is not True and not (quick and self.convex is None):
            starts = self._starts(x, np.random.default_rng(seed))
            few = quick or self.convex is None  # then the best sample alone
            ends += [self.solve(x, start) for start in starts[: 1 if few else DESCENTS]]
        good = [point for point in ends if point.violation <= FEASIBLE]
        return min(good, key=lambda point: point.value) if good else None

    def _starts(self, x: Array, generator: np.random.Generator) -> list[Array]:
        """Sampled points that are far apart from each other, in turn of least f and of least penalised f.

        The second kind lies in the wide parts of the feasible set, and would alone never lead to a narrow one.
        """
        coupling, n = self.coupling, self.coupling.n
        box = SampleBox(self.region.low[n:], self.region.high[n:])
        points = box.draw(generator, SAMPLES)
        values = coupling.many(np.hstack([np.tile(x, (SAMPLES, 1)), points]))
        orders = [
            np.argsort(penalised(coupling, values, coupling.rows.f, lower_only=True, weight=weight)) for weight in (WEIGHT, 1.0)
        ]
        width = np.maximum(box.high - box.low, np.finfo(float).tiny)
        chosen: list[Array] = []
        # Starts close to each other would end in the same basin.
        distance = 0.5 / (1 + len(width))
        for k in itertools.chain(*zip(*orders, strict=True)):
            if len(chosen) >= DESCENTS:
                break
            if all(float(np.abs((points[k] - other) / width).max()) > distance for other in chosen):
                chosen.append(points[k])
        return chosen

    def meet(self, z: Array, *, lower_only: bool = False) -> Stationary:
        """Project z on all constraints, or on those of the lower level; a local solution where they are not convex."""
        return minimise_sqp(SelectedProgram(self.coupling, z, lower_only), z)

    def cut(self, y: Array) -> Cut:
        """The least f of the basin around y as a function of z = (x, y), with its gradient."""
        coupling, rows = self.coupling, self.coupling.rows
        known: dict[bytes, tuple[float, Array]] = {}  # values() and jacobians() ask at the same x
        seen = deque(
            [(np.full(coupling.n, math.inf), y.copy())], maxlen=PROBES
        )  # of the last solutions, the nearest is the start

        def value(z: Array) -> tuple[float, Array]:
            x = z[: coupling.n]
            key = x.tobytes()
            if key not in known:
                nearest = min(seen, key=lambda pair: float(np.abs(pair[0] - x).max(initial=0.0)))
                solution = self.solve(x, nearest[1])
                gradient = np.zeros(len(z))
                if solution.violation > FEASIBLE:  # the basin ends before this x, and no longer bounds f
                    known[key] = math.inf, gradient
                else:
                    J = coupling.jacobian(np.concatenate([x, solution.w]))[:, : coupling.n]
                    # The envelope theorem: the gradient of the value is that of the Lagrangian in x.
                    total = J[rows.f] + solution.lam @ J[rows.lower] + solution.mu @ J[rows.lower_equations]
                    gradient[: coupling.n] = total
                    known[key] = solution.value, gradient
                    seen.append((x.copy(), solution.w))
            return known[key]

        return value
