"""ActiveSets: coupled problems, by branch and bound or descent over the active sets of the lower level's KKT conditions."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meha.engines.base import Engine, EngineState
from meha.lower.constrained import DESCENTS, ConstrainedLower, Cut, PieceProgram, SampleBox, SelectedProgram, penalised
from meha.method.method import Numbers
from meha.method.status import Status, Verdict
from meha.numerics.quadratic_program import Array, feasible, solve_program
from meha.numerics.sqp import is_convex, minimise_sqp
from meha.numerics.tolerances import EQUAL, FAR, FEASIBLE, SAME, SMALL, ZERO
from meha.problem.oracle import Oracle
from meha.reduce.nonlinear_program import NonlinearProgram
from meha.tensors.state import Saved, unpack
from meha.tensors.variables import Variable

NODES = 1500
"""Quadratic programs that a branch and bound may solve."""

PIECES = 40
"""Pieces that a descent may visit at most."""

SCREENING, STARTS = 48, 20
"""Random points at which the lower level is solved, and how many of them start descents at most."""

TRIALS = 240
"""Lower solves of a compass search."""

ENOUGH, ENOUGH_BASINS, SHARE = 3, 5, 0.2
"""Starts that must agree before the answer counts as global, also where the lower level is not convex, and their share of
those that ended feasible."""

FIRST_STARTS = 6
"""Starts before the screening, which is left out where all of them agree."""

EARLY = 5
"""Further feasible starts after which a run may end if half of all agree; after twice as many, if the answer is confirmed."""

SHOWN = 8
"""Active constraints that a report lists."""


@dataclass(eq=False)
class CoupledPoint:
    """A point that may be the answer, and what is known there.

    Attributes:
        z: (x, y).
        lam, nu: multipliers of the lower inequalities and equations.
        F, f: the values at z.
        violation, gap: the largest violation, and f minus the least value of f found at the same x.
        start: the name of the start from which it was found.
        proof: why z is a global solution, in words; empty if that is not known.
    """

    z: Array
    lam: Array
    nu: Array
    F: float = math.inf
    f: float = math.inf
    violation: float = math.inf
    gap: float = math.inf
    start: str = ""
    proof: str = ""

    @property
    def good(self) -> bool:
        """Whether z is feasible for both levels, i.e. meets all constraints and solves the lower level."""
        return self.violation <= FEASIBLE and self.gap <= FEASIBLE * (1 + abs(self.f))


def _worth(F: float, best: float) -> bool:
    """Whether a value of F is better than the best one by more than the violations of both may explain."""
    return best > F + (FEASIBLE * (1 + abs(best)) if math.isfinite(best) else 0.0)


class Branching:
    """Branch and bound over the complementarity conditions of the lower level (Bard and Moore, 1990).

    A node has an entry for each lower constraint: 1 fixes it as active, -1 fixes its multiplier as zero, 0 leaves both open.
    Its relaxation, a convex quadratic program in (x, y, lambda, nu) without the other complementarity conditions, bounds F from
    below on all pieces of the node. This needs a convex quadratic F, a quadratic f that is convex in y, and linear constraints.

    Attributes:
        nodes: the number of quadratic programs solved.
        complete: whether the tree was exhausted, which proves that the point of :meth:`search` is a global solution.
        unbounded: whether F falls without bound on some piece.
    """

    def __init__(self, coupling: NonlinearProgram) -> None:
        self.coupling, rows = coupling, coupling.rows
        size = coupling.n + coupling.m
        centre = np.zeros(size)  # any point will do: quadratic and linear functions are known from one
        values, J, H = coupling.values(centre), coupling.jacobian(centre), coupling.hessians(centre)
        self.inequalities = np.arange(rows.lower.start, rows.lower.stop)
        equations = np.arange(rows.lower_equations.start, rows.lower_equations.stop)
        self.q, self.p, self.size = len(self.inequalities), len(equations), size
        total = size + self.q + self.p
        self.H = np.zeros((total, total))
        self.H[:size, :size] = H[rows.F]
        self.g = np.concatenate([J[rows.F], np.zeros(self.q + self.p)])
        self.F0 = float(values[rows.F])
        with_multiplier = np.concatenate([self.inequalities, equations]).astype(int)
        # f_y + lambda' h_y + nu' e_y = 0 is linear in (x, y, lambda, nu), because f is quadratic and the constraints linear.
        stationary = np.hstack([H[rows.f][coupling.n :], J[with_multiplier][:, coupling.n :].T])
        both = np.concatenate([equations, np.arange(rows.upper_equations.start, rows.upper_equations.stop)]).astype(int)
        self.C = np.vstack([stationary, np.hstack([J[both], np.zeros((len(both), self.q + self.p))])])
        self.d = np.concatenate([-J[rows.f][coupling.n :], -values[both]])
        above = np.arange(rows.upper.start, rows.upper.stop)
        bounds = np.concatenate([self.inequalities, above]).astype(int)  # lower ones first: _slack() takes the first q rows
        signs = np.hstack([np.zeros((self.q, size)), -np.eye(self.q), np.zeros((self.q, self.p))])  # lambda >= 0
        self.A = np.vstack([np.hstack([J[bounds], np.zeros((len(bounds), self.q + self.p))]), signs])
        self.b = np.concatenate([-values[bounds], np.zeros(self.q)])
        self.first_sign = len(bounds)
        self.nodes, self.complete, self.unbounded = 0, True, False

    @staticmethod
    def fits(coupling: NonlinearProgram) -> bool:
        """Whether F and f are quadratic and convex, f in y only, and all constraints linear."""
        rows = coupling.rows
        objectives = [rows.F, rows.f]
        if not (coupling.quadratic[objectives].all() and coupling.linear[2:].all()):
            return False
        H = coupling.hessians(np.zeros(coupling.n + coupling.m))
        return is_convex(H[rows.F]) and is_convex(H[rows.f][coupling.n :, coupling.n :])

    def search(self) -> CoupledPoint | None:
        """Visit the nodes with the least bound first, until no node can contain a better point than the best one found."""
        best, w_best = math.inf, None
        order = itertools.count()  # breaks ties in the heap, which cannot compare arrays
        waiting: list[tuple[float, int, Array]] = [(-math.inf, next(order), np.zeros(self.q, dtype=int))]
        while waiting:
            bound, _, node = heapq.heappop(waiting)
            if not _worth(bound, best):
                continue
            if self.nodes >= NODES:
                self.complete = False
                break
            F, w = self._relax(node)
            free = np.flatnonzero(node == 0)
            if w is None and F < 0 and not len(free):  # F falls without bound over solutions of the lower level
                self.unbounded, self.complete = True, False
            if w is not None and _worth(F, best):
                slack, lam = self._slack(w), self._multipliers(w)
                error = np.minimum(np.abs(slack), np.abs(lam))
                met = error.max(initial=0.0) <= FEASIBLE
                if met or w_best is None:  # round the relaxation to a piece: an early best point prunes
                    value, point = self._relax(np.where(node == 0, np.where(slack < lam, 1, -1), node))
                    if point is not None and value < best:
                        best, w_best = value, point
                    if met and point is not None and not _worth(F, value):
                        continue  # the piece attains the bound of the node
                free = free[np.argsort(-error[free], kind="stable")]  # branch where complementarity fails most
            # Where the relaxation is unbounded, the complementarity that it ignores may still bound F.
            if len(free) and _worth(F, best):
                for choice in (1, -1):
                    child = node.copy()
                    child[free[0]] = choice
                    heapq.heappush(waiting, (F, next(order), child))
        if w_best is None:
            return None
        return CoupledPoint(w_best[: self.size], np.maximum(self._multipliers(w_best), 0.0), w_best[self.size + self.q :], best)

    def _relax(self, node: Array) -> tuple[float, Array | None]:
        """The bound of a node and its minimizer; (inf, None) if it is infeasible, (-inf, None) if it is unbounded."""
        self.coupling.oracle.check_time()
        self.nodes += 1
        on, off = np.flatnonzero(node == 1), np.flatnonzero(node == -1)
        kept = np.ones(len(self.b), dtype=bool)  # the interior point method needs inequalities that can be strict
        kept[on] = False
        kept[self.first_sign + off] = False
        zero = np.zeros((len(off), len(self.g)))
        zero[range(len(off)), self.size + off] = 1.0
        C = np.vstack([self.C, self.A[on], zero])
        d = np.concatenate([self.d, self.b[on], np.zeros(len(off))])
        # Little curvature in all unknowns keeps multipliers bounded.
        damping = ZERO * max(1.0, float(np.abs(self.H).max(initial=0.0)), float(np.abs(self.g).max(initial=0.0)))
        H = self.H + damping * np.eye(len(self.g))
        A, b = self.A[kept], self.b[kept]
        answer = solve_program(H, self.g, A, b, C, d)
        w = answer.z
        # With it, even an unbounded program has a solution, but a very distant one.
        if answer.solved and float(np.abs(w).max(initial=0.0)) * math.sqrt(ZERO) < 1:
            return self.F0 + float(self.g @ w) + 0.5 * float(w @ self.H @ w), w
        _, violation = feasible(A, b, C, d, np.zeros(len(self.g)))
        return (math.inf, None) if violation > FEASIBLE else (-math.inf, None)

    def _slack(self, w: Array) -> Array:
        return self.b[: self.q] - self.A[: self.q] @ w

    def _multipliers(self, w: Array) -> Array:
        return w[self.size : self.size + self.q]


def descend(coupling: NonlinearProgram, start: CoupledPoint, cuts: tuple[Cut, ...] = ()) -> CoupledPoint | None:
    """Minimise F on the piece of the active constraints of a start, then on neighbouring pieces, until none is better.

    Args:
        start: a point with multipliers of the lower level.
        cuts: least values of f in other basins, which f must not exceed.
    """
    weak, strong = _active(coupling, start)
    # Near degenerate points, small slacks and positive multipliers suggest different active sets: their overlap comes first.
    waiting: Iterator[Array] = iter([strong, weak | strong, start.lam > FEASIBLE])
    seen: set[bytes] = set()
    best: CoupledPoint | None = None
    while len(seen) < PIECES and (active := next(waiting, None)) is not None:
        if active.tobytes() in seen:  # neighbours of neighbours come back
            continue
        seen.add(active.tobytes())
        piece = PieceProgram(coupling, active, cuts)
        at = best or start
        here = minimise_sqp(piece, piece.start(at.z, at.lam, at.nu))
        if here.violation <= FEASIBLE and _worth(here.value, math.inf if best is None else best.F):
            best = CoupledPoint(here.w[: piece.size], *piece.multipliers(here.w), here.value)
            waiting = _neighbours(coupling, best, active)  # those of the old point no longer touch the best one
    return best


def _active(coupling: NonlinearProgram, at: CoupledPoint) -> tuple[Array, Array]:
    """Masks of the active lower constraints with a zero multiplier (weakly active), and with a positive one."""
    tight = coupling.values(at.z)[coupling.rows.lower] >= -FEASIBLE * (1 + np.abs(at.z).max(initial=0.0))
    positive = at.lam > FEASIBLE * max(1.0, float(np.abs(at.lam).max(initial=0.0)))
    return tight & ~positive, tight & positive


def _neighbours(coupling: NonlinearProgram, at: CoupledPoint, active: Array) -> Iterator[Array]:
    """Active sets whose pieces also contain this point: one constraint flipped, one exchanged, or some flipped together.

    A constraint with zero slack and zero multiplier satisfies the KKT conditions both as active and as inactive, so the pieces
    meet here. One with a positive multiplier cannot become inactive alone: stationarity would be violated.
    """
    weak, strong = (np.flatnonzero(mask).tolist() for mask in _active(coupling, at))
    # Multipliers that are not unique can pass from one constraint to another, as in a simplex pivot.
    together = (itertools.combinations(weak, count) for count in range(2, len(weak) + 1))
    for chosen in itertools.chain(((k,) for k in weak), itertools.product(weak, strong), *together):
        other = active.copy()
        other[list(chosen)] = ~other[list(chosen)]
        yield other


def first_starts(coupling: NonlinearProgram, lower: ConstrainedLower, z0: Array) -> list[tuple[str, Array]]:
    """The given start, the minimizer of F without the lower level, and a few points spread over the region, each with a name.

    The points are for problems in which all functions look convex: where all starts lead to one answer, nothing more is needed.
    """
    starts = [("the given start", z0)]
    high = minimise_sqp(SelectedProgram(coupling, coupling.rows.F), z0)
    if np.isfinite(high.w).all() and high.violation <= FEASIBLE:
        starts.append(("the upper level alone", high.w))
    convex = lower.convex is not False and lower.look_convex(np.array([coupling.rows.F])) is not False
    count = FIRST_STARTS - len(starts) if convex else 0
    drawn = lower.region.draw(np.random.default_rng(1), count)
    return starts + [(f"first point {k + 1}", z) for k, z in enumerate(drawn)]


def screened_starts(coupling: NonlinearProgram, lower: ConstrainedLower) -> list[tuple[str, Array]]:
    """Points spread over the region with the lower level solved, the best ones and those that differ most, each with a name.

    The best of each active set comes first (each has its own piece), then those that are farthest from the ones chosen
    (maximin).
    """
    generator = np.random.default_rng(0)  # a fixed seed: the same problem gets the same starts in every run
    count = SCREENING // 2 if lower.convex is False else SCREENING  # a point takes several descents there
    points = [respond(coupling, lower, z) for z in lower.region.draw(generator, count)]
    values = np.stack([coupling.values(z) for z in points])
    merits = penalised(coupling, values, coupling.rows.F)
    order = [int(k) for k in np.argsort(merits) if math.isfinite(merits[k])]
    tight = values[:, coupling.rows.lower] >= -FEASIBLE
    first = {tight[k].tobytes(): k for k in reversed(order)}  # the best point of each active set
    chosen = sorted(first.values(), key=order.index)[: STARTS // 2]
    width = np.maximum(lower.region.high - lower.region.low, np.finfo(float).tiny)
    while len(chosen) < min(STARTS, len(order)):
        distances = [min((np.abs((points[k] - points[c]) / width).max() for c in chosen), default=1.0) for k in order]
        far = int(np.argmax(distances))  # at equal distances, the best comes first
        if distances[far] <= EQUAL:
            break
        chosen.append(order[far])
    return [(f"point {k + 1}", points[c]) for k, c in enumerate(chosen)]


def respond(coupling: NonlinearProgram, lower: ConstrainedLower, z: Array) -> Array:
    """A point (x, y) near z whose y solves the lower level at x."""
    n = coupling.n
    met = lower.meet(z)  # the upper constraints may be out of reach from z: then those of the lower level must do
    near = met.w if met.violation <= FEASIBLE else lower.meet(z, lower_only=True).w
    if not np.isfinite(near).all():
        return z
    answer = lower.search(near[:n], near[n:], quick=True)
    return near if answer is None else np.concatenate([near[:n], answer.w])


def compass_search(coupling: NonlinearProgram, lower: ConstrainedLower, z: Array, F: float) -> tuple[Array, float]:
    """Improve z by steps along the coordinates of x, with the lower level solved at each; returns the best point and its F.

    Compass search (Kolda, Lewis and Torczon, 2003) needs values only. It finds solutions where the lower level has no
    multipliers (no constraint qualification holds), so that they lie on no piece of the KKT conditions.
    """
    n = coupling.n
    low, high = lower.region.low[:n], lower.region.high[:n]
    length, trials = 0.5, 0
    begun = F
    # Steps that have gained nothing so far need not become short: an improvement counts from EQUAL on.
    while length > (FEASIBLE if begun > F else SAME) and trials < TRIALS:
        moved = False
        for k, sign in itertools.product(range(n), (1.0, -1.0)):
            x = z[:n].copy()
            x[k] = min(max(x[k] + sign * length * (high[k] - low[k]), low[k]), high[k])  # relative: units do not matter
            trials += 1
            answer = lower.search(x, z[n:], quick=True)
            other = z if answer is None else np.concatenate([x, answer.w])
            value = coupling.exact(other)[0]
            if value < F - EQUAL * (1 + abs(F)) and coupling.violation(other) <= FEASIBLE:
                z, F, moved = other, value, True
        length *= 1.0 if moved else 0.5  # no better neighbour at this length
    return z, F


class ActiveSetSearch(Saved):
    """Runs branch and bound where it applies, otherwise a multistart of descents over pieces, one start in each step.

    Args:
        oracle: the problem and its counts.
        x, y: the variables, which hold the best point so far after each step.
        max_gradients: no further start begins beyond this number of gradients of f and products with its Hessian.

    Attributes:
        outcomes: the ends of all descents so far.
        runs: the number of starts so far, and of branch and bound.
        plan: the starts to come; None before they are chosen.
        nodes, unbounded: the size of the branch and bound tree, and whether F was unbounded there.
        over: whether the run has ended.
    """

    engine = "ActiveSets"
    saves = ("z0", "outcomes", "plan", "runs", "nodes", "unbounded", "over", "_refined", "_screened", "_first")

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, max_gradients: int) -> None:
        self.oracle, self.max_gradients, self._variables = oracle, max_gradients, (x, y)
        self._set_up()
        self.outcomes: list[CoupledPoint] = []
        self.plan: list[tuple[str, Array]] | None = None
        self.runs = self.nodes = self._first = 0
        self.unbounded = self.over = self._refined = self._screened = False

    def _set_up(self) -> None:
        """Take the variables as the start, recognise quadratic and linear functions around it, and set up the lower level."""
        self.coupling = NonlinearProgram(self.oracle, *self._variables)
        self.z0 = self.coupling.read()
        self.lower = ConstrainedLower(self.coupling, SampleBox.of(self.coupling, self.z0))

    @property
    def provable(self) -> bool:
        """Whether branch and bound can take the problem, and prove its answer."""
        return Branching.fits(self.coupling)

    # Steps

    def advance(self) -> Numbers:
        """Descend from the next start, and write the best point so far into the variables."""
        self.coupling.forget()  # a resumed run has no cached values either, and must count the same
        if self.plan is None:
            self.plan = self._begin()
        elif self.plan:
            self._run_next()
            if (not self.plan or self._settled) and not self._refined:  # last, from the best point of all
                self._refine()
        while self.best is None and self.plan and not math.isfinite(sum(self.coupling.exact(self.z0))):
            self._run_next()  # the start is no answer, not even a preliminary one
        best = self.best
        if best is None:
            self.over = not self.plan
            F, f = self.coupling.exact(self.z0)
            return {"upper": F, "lower": f, "violation": self.coupling.violation(self.z0), "run": self.runs}
        self.coupling.write(best.z)
        spent = self.oracle.counts.lower + self.oracle.counts.hvp
        self.over = not self.plan or self._settled or spent >= self.max_gradients
        return {"upper": best.F, "lower": best.f, "violation": best.violation, "gap": best.gap, "run": self.runs}

    def _begin(self) -> list[tuple[str, Array]]:
        """Run branch and bound where it applies; without a proof, return starts for descents."""
        if Branching.fits(self.coupling):
            self.runs += 1
            tree = Branching(self.coupling)
            answer = tree.search()
            self.nodes, self.unbounded = tree.nodes, tree.unbounded
            # Functions were taken as quadratic because they are near the start: the answer, far away, must confirm it.
            if answer is not None and self.coupling.confirm(answer.z):
                answer.proof = f"Branch and bound over {tree.nodes} nodes found nothing better" if tree.complete else ""
                self._record("branch and bound", answer)
            if tree.complete and Branching.fits(self.coupling):  # again: confirm() drops models that are wrong
                self._screened = True
                return []
        starts = first_starts(self.coupling, self.lower, self.z0)
        self._first = len(starts)
        return starts

    def _run_next(self) -> None:
        """Descend from the next start; after the first ones, screen points for further starts, unless all of these agree."""
        assert self.plan
        self._run_start(*self.plan.pop(0))
        if not (self.plan or self._settled or self._screened):
            self._screened, self.plan = True, screened_starts(self.coupling, self.lower)

    def _run_start(self, name: str, z: Array) -> None:
        """Descend from a start; where a lower basin refutes the end, descend there, and again with that basin as a cut."""
        coupling, n = self.coupling, self.coupling.n
        self.runs += 1
        start = last = self._with_multipliers(respond(coupling, self.lower, z))
        if not np.isfinite(start.z).all():
            return
        cuts: tuple[Cut, ...] = ()
        for _ in range(DESCENTS):
            # With the cuts, the start may lead to no feasible point: then the last end may.
            minimum = descend(coupling, start, cuts) or (descend(coupling, last, cuts) if cuts else None)
            if minimum is None:
                if coupling.violation(start.z) <= FEASIBLE:  # no piece led to a feasible point: the start is one
                    self._record(name, start)
                return
            least = self._record(name, minimum)
            if minimum.violation > FEASIBLE or minimum.good or least is None:
                return
            if not cuts:
                below = descend(coupling, self._with_multipliers(np.concatenate([minimum.z[:n], least])))
                if below is not None:
                    self._record(name, below)
            cuts += (self.lower.cut(least),)  # f(x, y) <= v(x), the least f of the basin that refuted y
            last = minimum

    def _refine(self) -> None:
        """Improve the best point by a compass search, and plan a last descent from its end."""
        self._refined = True
        best = self.best
        if best is not None and best.good and self.plan is not None:
            z, F = compass_search(self.coupling, self.lower, best.z, best.F)
            if F < best.F:
                self._record("steps in x", self._with_multipliers(z))
                self.plan.insert(0, ("the end of steps in x", z))

    def _with_multipliers(self, z: Array) -> CoupledPoint:
        """A point (x, y) with y moved to a solution of the lower level nearby."""
        n = self.coupling.n
        answer = self.lower.solve(z[:n], z[n:])
        return CoupledPoint(np.concatenate([z[:n], answer.w]), answer.lam, answer.mu)

    def _record(self, start: str, point: CoupledPoint) -> Array | None:
        """Add a point to the outcomes, with its values and its gap; returns the best y of a multistart at its x."""
        x, y = point.z[: self.coupling.n], point.z[self.coupling.n :]
        point.start, point.violation = start, self.coupling.violation(point.z)
        point.F, point.f = self.coupling.exact(point.z)
        least = self.lower.search(x, y, seed=self.runs)
        value = math.inf if least is None else self.coupling.exact(np.concatenate([x, least.w]))[1]
        point.gap = max(0.0, point.f - value) if math.isfinite(value) else 0.0
        far = SMALL * FAR * (1 + float(np.abs(x).max(initial=0.0)))
        if least is not None and not least.converged and float(np.abs(least.w).max(initial=0.0)) >= far:
            point.gap = math.inf  # f still fell where the descent was given up
        if least is not None and point.f < value - FEASIBLE * (1 + abs(value)):  # y gains by violating a constraint
            own = self.lower.solve(x, y)
            point.gap = max(0.0, own.value - point.f) if own.violation <= FEASIBLE else point.gap
        self.outcomes.append(point)
        return None if least is None else least.w

    # What is known

    @property
    def best(self) -> CoupledPoint | None:
        """The feasible point with the least F; if none is feasible, the one with the least violation or gap."""
        good = [point for point in self.outcomes if point.good]
        if good:  # of points with equal F up to rounding, one with a proof wins
            return min(good, key=lambda point: (point.F - ZERO * bool(point.proof), point.violation))
        return min(self.outcomes, key=lambda point: max(point.violation, point.gap), default=None)

    @property
    def verdict(self) -> Verdict | None:
        """The status of the best point, and the evidence for it; None while there are starts left."""
        if not self.over:
            return None
        best = self.best
        if best is None or not best.good:
            if self.unbounded:
                return Verdict(
                    Status.AT_INFINITY, "F falls without bound over the solutions of the lower level; bound x and y."
                )
            worst = math.inf if best is None else best.violation
            closest = (
                f"the smallest violation that was found is {worst:.1e}" if math.isfinite(worst) else "no start led anywhere"
            )
            return Verdict(
                Status.FINISHED,
                f"No point was found that solves the lower level and meets all constraints ({closest}); check their signs"
                " (h(x, y) <= 0), or start near a point that meets them.",
            )
        if float(np.abs(best.z).max(initial=0.0)) > FAR:
            return Verdict(Status.AT_INFINITY, "F still falls far from the start; bound x and y.")
        feasible = f"largest violation {best.violation:.1e}, lower gap {best.gap:.1e}"
        if best.proof:
            return Verdict(Status.CONVERGED, f"{best.proof}; {feasible}.")
        reached, ended = self._agreement
        if reached >= self._needed(ended):
            return Verdict(Status.CONVERGED, f"{reached} of {ended} starts that ended feasible agree; {feasible}.")
        return Verdict(
            Status.LOCAL,
            f"{reached} of {ended} starts that ended feasible led here, and a better x may exist; {feasible}.",
        )

    def _by_start(self) -> dict[str, float]:
        """The least F of each start that ended feasible: a start counts once, by the best of its basins."""
        values: dict[str, float] = {}
        for point in self.outcomes:
            if point.good:
                values[point.start] = min(point.F, values.get(point.start, math.inf))
        return values

    @property
    def _agreement(self) -> tuple[int, int]:
        """The number of starts that ended with the F of the best point, and the number that ended feasible."""
        values = self._by_start().values()
        least = min(values, default=math.inf)
        return sum(F - least <= EQUAL * (1 + abs(least)) for F in values), len(values)

    def _needed(self, ended: int) -> float:
        """How many starts must agree: more of them where the lower level has several basins, and all that were made count."""
        if self.lower.convex is False:
            return max(ENOUGH_BASINS, SHARE * self.runs)
        return max(ENOUGH, SHARE * ended)

    @property
    def _settled(self) -> bool:
        """Whether there is a proof, or enough starts agree for the run to end before the others."""
        best = self.best
        if best is not None and best.good and best.proof:
            return True
        reached, ended = self._agreement
        if not self._screened:  # few starts are evidence where they are unanimous
            return not self.plan and reached == ended >= ENOUGH
        return reached >= self._needed(ended) and ended - self._first >= (EARLY if 2 * reached >= ended else 2 * EARLY)

    def report(self) -> dict[str, str]:
        """The active constraints with their multipliers, the largest violation, and F at the end of each start."""
        coupling, best, rows = self.coupling, self.best, self.coupling.rows
        kinds = "linear" if coupling.linear[2:].all() else "quadratic" if coupling.quadratic[2:].all() else "smooth"
        convexity = {True: "convex in y", None: "convex in y as far as seen", False: "not convex in y"}[self.lower.convex]
        counts = f"{rows.lower_equations.stop - 2} lower and {coupling.count - rows.upper.start} upper rows"
        lines = {"problem": f"{counts}, {kinds}; lower level {convexity}"}
        if best is None:
            return lines
        values = coupling.values(best.z)
        tight = [k for k in range(rows.lower.start, rows.lower.stop) if values[k] >= -FEASIBLE]
        texts = [f"{coupling.names[k]} (multiplier {best.lam[k - rows.lower.start]:.3g})" for k in tight]
        texts += [coupling.names[k] for k in range(rows.upper.start, rows.upper.stop) if values[k] >= -FEASIBLE]
        more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        lines["active"] = (", ".join(texts[:SHOWN]) + more) if texts else "no constraint"
        lines["violation"] = f"{best.violation:.1e} at most; lower gap {best.gap:.1e}"
        if self.nodes:
            lines["search"] = f"branch and bound, {self.nodes} nodes"
        starts = [f"{start} F = {F:.6g}" for start, F in self._by_start().items()]
        if len(starts) > 1:
            lines["starts"] = "; ".join(starts[: 2 * SHOWN])
        return lines

    # Checkpoints

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        z0 = unpack(state["z0"])
        if not np.array_equal(self.z0, z0):  # models of functions and sampled points depend on the start
            here = self.coupling.read()
            self.coupling.write(z0)
            self._set_up()
            self.coupling.write(here)
        super().load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class ActiveSets(Engine):
    """Problems whose constraints couple x and y, by the active sets of the lower level's KKT conditions.

    Where both objectives are quadratic and convex, and the constraints linear, branch and bound over the complementarity
    conditions finds the global solution and proves it. Otherwise, sequential quadratic programming on the piece of one active
    set at a time, and on its neighbours, descends from many starts; a step is one start. It needs smooth objectives of few
    unknowns, since Hessians are dense. Non-smooth terms enter by their epigraphs, sets by their inequalities.

    Args:
        max_gradients: no further start begins beyond this number of gradients of f and products with its Hessian.

    >>> import torch, meha
    >>> problem = meha.Problem(
    ...     upper=lambda x, y: ((x - 3) ** 2 + (y - 2) ** 2).sum(),
    ...     lower=lambda x, y: ((y - 5) ** 2).sum(),
    ...     x_set=meha.sets.Box(0.0, 8.0),
    ...     lower_constraints=meha.constraints.Smooth(lambda x, y: torch.stack([y - 2 * x - 1, x + 2 * y - 14]).reshape(-1)),
    ... )
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> solution = meha.solve(problem, one, one, meha.ActiveSets())
    >>> print(solution.engine, solution.status, f"{float(solution.x):.3f} {float(solution.y):.3f}")
    ActiveSets converged 1.000 3.000
    """

    takes_coupling: ClassVar[bool] = True
    refuses_group: ClassVar[str] = "it recognises quadratic objectives on the data of one process"

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> EngineState:
        if x.has_modules or y.has_modules:
            raise TypeError("x0, y0: ActiveSets takes tensors, not modules; use the default, or LVHBA().")
        return EngineState(x=x, y=y, course=ActiveSetSearch(oracle, x, y, self.max_gradients), settled=False)
