"""ActiveSets: coupled problems, by branch and bound or descent over the active sets of the lower level's KKT conditions."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from meha.engines.base import Engine, EngineState
from meha.lower.constrained import ConstrainedLower, Cut, PieceProgram, RelaxedProgram, SampleBox
from meha.method.method import Numbers
from meha.method.status import Status, Verdict
from meha.numerics.quadratic_program import Array, feasible, solve_program
from meha.numerics.sqp import Stationary, minimise_sqp
from meha.problem.oracle import Oracle
from meha.reduce.nonlinear_program import NonlinearProgram
from meha.tensors.variables import Variable

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

FREE, ACTIVE, INACTIVE = 0, 1, 2  # what a node says about a lower constraint; FREE is undecided


@dataclass(eq=False)
class Enumerated:
    """The result of a branch and bound.

    Attributes:
        z: the best point; None if no point is feasible.
        F: its value.
        lam, nu: multipliers of the lower level there.
        complete: whether the tree was exhausted, which proves that z is a global solution.
        unbounded: whether F falls without bound on some piece.
        nodes: the number of quadratic programs solved.
    """

    z: Array | None
    F: float
    lam: Array
    nu: Array
    complete: bool
    unbounded: bool
    nodes: int


class Branching:
    """Branch and bound over the complementarity conditions of the lower level (Bard and Moore, 1990).

    A node fixes some lower constraints as active and some multipliers as zero. Its relaxation, a convex quadratic program in
    (x, y, lambda, nu) without the other complementarity conditions, bounds F from below on all pieces of the node. This needs
    a convex quadratic F, a quadratic f that is convex in y, and linear constraints.
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
        self.nodes = 0

    @staticmethod
    def fits(coupling: NonlinearProgram) -> bool:
        """Whether F and f are quadratic and convex, f in y only, and all constraints linear."""
        rows = coupling.rows
        objectives = [rows.F, rows.f]
        if not (coupling.quadratic[objectives].all() and coupling.linear[2:].all()):
            return False
        H = coupling.hessians(np.zeros(coupling.n + coupling.m))
        return _convex(H[rows.F]) and _convex(H[rows.f][coupling.n :, coupling.n :])

    def search(self) -> Enumerated:
        """Visit the nodes with the least bound first, until no node can contain a better point than the best one found."""
        best: tuple[float, Array | None] = (math.inf, None)
        order = itertools.count()  # breaks ties in the heap, which cannot compare arrays
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
            if w is None:  # the relaxation is unbounded, but the complementarity it ignores may still bound F: branch
                index = next((i for i in range(self.q) if node[i] == FREE), None)
                if index is None:  # nothing is ignored: F falls without bound over solutions of the lower level
                    unbounded, complete = True, False
                    continue
            else:
                if best[0] - IMPROVEMENT * (1 + abs(best[0])) <= F and best[1] is not None:
                    continue
                index, error = self._violated(w)
                piece = np.where(self._slack(w) < self._multipliers(w), ACTIVE, INACTIVE)
                piece = np.where(node == FREE, piece, node)
                if error <= COMPLEMENTARY or best[1] is None:  # round the relaxation to a piece: an early best point prunes
                    value, point = self._relax(piece)
                    if point is not None and value < best[0]:
                        best = value, point
                    if error <= COMPLEMENTARY and point is not None and value <= F + IMPROVEMENT * (1 + abs(F)):
                        continue  # the piece attains the bound of the node
                free = np.flatnonzero(node == FREE)
                if not len(free):
                    continue
                if node[index] != FREE:  # all products vanish up to rounding: any undecided pair will do
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
        """The bound of a node and its minimizer; (inf, None) if it is infeasible, (-inf, None) if it is unbounded."""
        self.nodes += 1
        on, off = np.flatnonzero(node == ACTIVE), np.flatnonzero(node == INACTIVE)
        kept = np.ones(len(self.b), dtype=bool)  # the interior point method needs inequalities that can be strict
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
        # With damping, even an unbounded program has a solution, but a very distant one (up to 1 / DAMPING).
        if answer.solved and float(np.abs(w).max(initial=0.0)) * math.sqrt(DAMPING) < 1:
            return self.F0 + float(self.g @ w) + 0.5 * float(w @ self.H @ w), w
        _, violation = feasible(A, b, C, d, np.zeros(len(self.g)))
        return (math.inf, None) if violation > CONTRADICTION else (-math.inf, None)

    def _slack(self, w: Array) -> Array:
        return self.b[: self.q] - self.A[: self.q] @ w

    def _multipliers(self, w: Array) -> Array:
        return w[self.size : self.size + self.q]

    def _violated(self, w: Array) -> tuple[int, float]:
        """The lower constraint with the largest product of slack and multiplier, each capped at 1, and that product."""
        if not self.q:
            return 0, 0.0
        products = np.minimum(np.abs(self._slack(w)), 1.0) * np.minimum(np.abs(self._multipliers(w)), 1.0)
        index = int(products.argmax())
        return index, float(products[index])


def _convex(H: Array) -> bool:
    values = np.linalg.eigvalsh(H) if len(H) else np.zeros(1)
    return bool(values[0] >= -CONVEX * (1 + float(np.abs(values).max())))


PIECES = 40
"""Pieces that a descent may visit at most."""

MET = 1e-7
"""Largest violation of the constraints of a piece with which its minimizer counts as feasible."""

ZERO = 1e-6
"""Multipliers and slacks, relative to the largest multiplier or 1, that count as zero."""

PIECE_BETTER = 1e-9
"""Improvement of F, relative to 1 + |F|, that is worth another piece."""

TOGETHER = 4
"""Constraints that are flipped together, in all combinations, at most."""


@dataclass(eq=False)
class PieceMinimum:
    """A minimizer of F on one piece: it satisfies the KKT conditions of the lower level and all constraints.

    Attributes:
        z: (x, y).
        F: its value.
        lam, nu: multipliers of the lower inequalities and equations.
        active: a mask of the lower inequalities that the piece fixes as active.
        converged: whether the SQP run converged.
        pieces: the number of pieces visited.
    """

    z: Array
    F: float
    lam: Array
    nu: Array
    active: Array
    converged: bool
    pieces: int


def descend(coupling: NonlinearProgram, z: Array, lam: Array, nu: Array, cuts: tuple[Cut, ...] = ()) -> PieceMinimum | None:
    """Minimise F from z on the piece of its active constraints, then on neighbouring pieces, until none is better.

    Args:
        lam, nu: multipliers of the lower level at z.
        cuts: least values of f in other basins, which f must not exceed.
    """
    rows = coupling.rows
    values = coupling.values(z)[rows.lower]
    scale = max(1.0, float(np.abs(lam).max(initial=0.0)))
    first = (lam > ZERO * scale) & (values > -ZERO * (1 + np.abs(values)))
    seen: set[bytes] = set()
    best: PieceMinimum | None = None
    here: Stationary | None = None
    tried = 0
    # Near degenerate points, small slacks and positive multipliers suggest different active sets: their overlap comes first.
    waiting: Iterator[Array] = iter([first, values > -ZERO, lam > ZERO * scale])
    while tried < PIECES:
        active = next(waiting, None)
        if active is None:
            break
        if active.tobytes() in seen:  # neighbours of neighbours come back
            continue
        seen.add(active.tobytes())
        tried += 1
        piece = PieceProgram(coupling, active, cuts)
        start = (z, lam, nu) if best is None else (best.z, best.lam, best.nu)
        here = minimise_sqp(piece, piece.start(*start))
        if here.violation > MET or not np.isfinite(here.value):
            continue
        if best is None or here.value < best.F - PIECE_BETTER * (1 + abs(best.F)):
            point = here.w[: piece.size]
            best = PieceMinimum(point, here.value, *piece.multipliers(here.w), active, here.converged, tried)
            waiting = _neighbours(coupling, best)  # those of the old point no longer touch the best one
    if best is not None:
        best.pieces = tried
    return best


def _neighbours(coupling: NonlinearProgram, at: PieceMinimum) -> Iterator[Array]:
    """Active sets whose pieces also contain this point: one constraint flipped, one exchanged, or a few flipped together.

    A constraint with zero slack and zero multiplier satisfies the KKT conditions both as active and as inactive, so the pieces
    meet here. One with a positive multiplier cannot become inactive alone: stationarity would be violated.
    """
    values = coupling.values(at.z)[coupling.rows.lower]
    scale = max(1.0, float(np.abs(at.lam).max(initial=0.0)))
    zero_slack = values > -ZERO * (1 + np.abs(at.z).max(initial=0.0))
    weak = np.flatnonzero(zero_slack & (at.lam <= ZERO * scale))
    strong = np.flatnonzero(zero_slack & (at.lam > ZERO * scale))
    for k in weak:
        yield _flip(at.active, [int(k)])
    for k, j in itertools.product(weak, strong):  # multipliers that are not unique can pass from j to k, as in a simplex pivot
        yield _flip(at.active, [int(k), int(j)])
    if len(weak) <= TOGETHER:  # all 2^k combinations; with more, single flips must do
        for count in range(2, len(weak) + 1):
            for chosen in itertools.combinations(weak, count):
                yield _flip(at.active, [int(k) for k in chosen])


def _flip(active: Array, chosen: list[int]) -> Array:
    other = active.copy()
    other[chosen] = ~other[chosen]
    return other


START_FEASIBLE = 1e-6
"""Violation with which a point counts as feasible."""

SCREENING = 48
"""Random points at which the lower level is solved, among which the starts are chosen."""

STARTS = 12
"""Descents from the points that were chosen among them."""

MORE = 8
"""Further descents where the first ones end at different F."""

DISTINCT = 0.02
"""Least distance of their starts from each other, relative to the width of the region."""

CLOSE = 1e-3
"""Distance of two starts, relative to the width of the region, below which one of them is enough."""

WEIGHT = 1e3
"""Weight of violations where starts are compared."""


class ActiveSetStarts:
    """Chooses the starts of a multistart for a coupled problem, each with a name.

    Args:
        coupling: the problem.
        lower: its lower level, with the box from which points are drawn.
        z0: the given start.
    """

    def __init__(self, coupling: NonlinearProgram, lower: ConstrainedLower, z0: Array) -> None:
        self.coupling, self.lower, self.z0 = coupling, lower, z0

    def first(self) -> list[tuple[str, Array]]:
        """The given start, the minimizer of F without the lower level, and points spread over the region."""
        coupling = self.coupling
        generator = np.random.default_rng(0)  # a fixed seed: the same problem gets the same starts in every run
        starts = [("the given start", self.z0)]
        high = minimise_sqp(RelaxedProgram(coupling), self.z0)
        if np.isfinite(high.w).all() and high.violation <= START_FEASIBLE:
            starts.append(("the upper level alone", high.w))
        scored = self._screen(generator, SCREENING)
        return starts + [(f"point {k + 1}", z) for k, z in enumerate(self._spread(scored))]

    def further(self) -> list[tuple[str, Array]]:
        """Further starts, the best of other random points, for the case that the first ones end at different F."""
        scored = sorted(self._screen(np.random.default_rng(1), 2 * SCREENING), key=lambda pair: pair[0])
        return [(f"further point {k + 1}", z) for k, z in enumerate(self._apart([z for _, z in scored])[:MORE])]

    def _screen(self, generator: np.random.Generator, count: int) -> list[tuple[float, Array]]:
        """Random points with the lower level solved, each with its merit: F plus the weighted sum of violations."""
        coupling, rows = self.coupling, self.coupling.rows
        scored: list[tuple[float, Array]] = []
        points = self.lower.region.draw(generator, count)
        for point in points if self.lower.convex is not False else points[: count // 2]:  # each takes several descents there
            z = self.respond(point)
            values = coupling.values(z)
            broken = np.maximum(values[rows.upper], 0.0).sum() + np.abs(values[rows.upper_equations]).sum()
            broken += np.maximum(values[rows.lower], 0.0).sum() + np.abs(values[rows.lower_equations]).sum()
            merit = float(values[rows.F] + WEIGHT * broken)
            if math.isfinite(merit):  # not beside a pole
                scored.append((merit, z))
        return scored

    def _apart(self, points: list[Array]) -> list[Array]:
        """The points that are not close to an earlier one, which would lead to the same solution."""
        width = np.maximum(self.lower.region.high - self.lower.region.low, np.finfo(float).tiny)
        chosen: list[Array] = []
        for z in points:
            if all(float(np.abs((z - other) / width).max()) > DISTINCT for other in chosen):
                chosen.append(z)
        return chosen

    def _spread(self, scored: list[tuple[float, Array]]) -> list[Array]:
        """Choose the best point of each active set of the lower level, then the points farthest from those chosen (maximin)."""
        rows = self.coupling.rows
        width = np.maximum(self.lower.region.high - self.lower.region.low, np.finfo(float).tiny)
        best: dict[bytes, tuple[float, Array]] = {}
        for merit, z in scored:
            key = (self.coupling.values(z)[rows.lower] >= -START_FEASIBLE).tobytes()  # each active set has its own piece
            if key not in best or merit < best[key][0]:
                best[key] = merit, z
        chosen = [z for _, z in sorted(best.values(), key=lambda pair: pair[0])][: STARTS // 2]
        others = [z for _, z in sorted(scored, key=lambda pair: pair[0])]  # at equal distances, the best comes first
        while others and len(chosen) < STARTS:
            distances = [min((float(np.abs((z - c) / width).max()) for c in chosen), default=1.0) for z in others]
            far = int(np.argmax(distances))
            if distances[far] <= CLOSE:
                break
            chosen.append(others.pop(far))
        return chosen

    def respond(self, z: Array) -> Array:
        """A point (x, y) near z whose y solves the lower level at x."""
        n = self.coupling.n
        met = self.lower.meet(z)  # the upper constraints may be out of reach from z: then those of the lower level must do
        near = met.w if met.violation <= START_FEASIBLE else self.lower.meet(z, lower_only=True).w
        if not np.isfinite(near).all():
            return z
        answer = self.lower.search(near[:n], near[n:], quick=True)
        return near if answer is None else np.concatenate([near[:n], answer.w])


FIRST, LAST = 0.05, 1e-7
"""The first and the last length of a step, relative to the width of the region."""

SHORTER = 0.25
"""Factor of the step length where no step improves F."""

TRIALS = 60
"""Largest number of lower solves for each coordinate of x."""

COMPASS_BETTER = 1e-4
"""Improvement of F, relative to 1 + |F|, that counts: more than F gains by an f that exceeds its minimum by TIE."""

TIE = 1e-9
"""Excess of f over its minimum, relative to 1 + |f|, up to which y counts as a lower solution, so that F may choose it."""

COMPASS_FEASIBLE = 1e-7
"""Largest violation with which a point of the search counts as feasible."""


def compass_search(coupling: NonlinearProgram, lower: ConstrainedLower, z: Array, F: float) -> tuple[Array, float]:
    """Improve z by steps along the coordinates of x, with the lower level solved at each; returns the best point and its F.

    Compass search (Kolda, Lewis and Torczon, 2003) needs values only. It finds solutions where the lower level has no
    multipliers (no constraint qualification holds), so that they lie on no piece of the KKT conditions.
    """
    n = coupling.n
    low, high = lower.region.low[:n], lower.region.high[:n]
    width = high - low
    length, trials = FIRST, 0
    while length > LAST and trials < TRIALS * n:
        moved = False
        for k in range(n):
            for sign in (1.0, -1.0):
                x = z[:n].copy()
                x[k] = min(max(x[k] + sign * length * width[k], low[k]), high[k])  # relative to the width: units do not matter
                trials += 1
                other, value = _respond(coupling, lower, x, z[n:])
                if value < F - COMPASS_BETTER * (1 + abs(F)):
                    z, F, moved = other, value, True
                    break
        if not moved:  # F has no better neighbour at this length
            length *= SHORTER
    return z, F


def _respond(coupling: NonlinearProgram, lower: ConstrainedLower, x: Array, y: Array) -> tuple[Array, float]:
    """(x, y) with the lower solution of least F (the optimistic one), and F; infinite if a constraint is violated."""
    z = np.concatenate([x, y])
    answer = lower.search(x, y, quick=True)
    if answer is None:
        return z, math.inf
    z = np.concatenate([x, answer.w])
    if lower.strict(x, answer):  # the solution is isolated: F has no choice
        F = coupling.exact(z)[0]
        return z, F if coupling.violation(z) <= COMPASS_FEASIBLE and math.isfinite(F) else math.inf
    best = lower.best_for_upper(x, answer.w, answer.value + TIE * (1 + abs(answer.value)))
    chosen = np.concatenate([x, best.w])
    if np.isfinite(chosen).all() and coupling.violation(chosen) <= COMPASS_FEASIBLE:
        f = coupling.exact(chosen)[1]  # the solver met the bound on f only up to its tolerance
        if f <= answer.value + 2 * TIE * (1 + abs(answer.value)):
            z = chosen
    F = coupling.exact(z)[0]
    return z, F if coupling.violation(z) <= COMPASS_FEASIBLE and math.isfinite(F) else math.inf


ANSWER_FEASIBLE = 1e-6
"""Largest violation of a constraint that an answer may have."""

GAP = 1e-6
"""Largest gap f - min f, relative to 1 + |f|, that an answer may have."""

AGREE = 1e-5
"""Difference of F, relative to 1 + |F|, within which two starts agree."""

ENOUGH = 3
"""Starts that must agree, or a fifth of those that ended feasible if that is more, before the answer counts as global."""

SHARE = 0.2
"""See ENOUGH."""

FEW = 4
"""Largest number of coordinates of x for which a compass search ends the run: a round takes two lower solves for each."""

REFUTED = 4
"""Lower basins that one start may follow."""

EARLY = 7
"""Feasible starts after which a run may end early, if half of them agree."""

SHOWN = 8
"""Active constraints that a report lists."""

FAR = 1e6
"""Size of a point, relative to that of the start, from which on the optimum seems to lie at infinity."""


@dataclass(eq=False)
class ActiveSetOutcome:
    """The point at which the descent from one start ended.

    Attributes:
        start: its name.
        in_lower_basin: whether it began in the basin of the lower level that refuted another point of the same start.
        z: the point.
        F, f: the values at z.
        lam, nu: multipliers of the lower level.
        violation, gap: the largest violation, and f minus the least value of f found at the same x.
        certain: why z is a global solution, in words; empty if that is not known.
    """

    start: str
    in_lower_basin: bool
    z: Array
    F: float
    f: float
    lam: Array
    nu: Array
    violation: float
    gap: float
    certain: str = ""

    @property
    def good(self) -> bool:
        """Whether z is feasible for both levels, i.e. meets all constraints and solves the lower level."""
        return self.violation <= ANSWER_FEASIBLE and self.gap <= GAP * (1 + abs(self.f))


class ActiveSetSearch:
    """Runs branch and bound where it applies, otherwise a multistart of descents over pieces, one start in each step.

    Args:
        oracle: the problem and its counts.
        x, y: the variables, which hold the best point so far after each step.
        max_gradients: no further start begins beyond this number of gradients of f and products with its Hessian.

    Attributes:
        outcomes: the ends of all descents so far.
        done: the starts so far, each with whether its lower basin was followed, too.
        plan: the starts to come.
        nodes, unbounded: the size of the branch and bound tree, and whether F was unbounded there.
        over: whether the run has ended.
    """

    engine = "ActiveSets"

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, max_gradients: int) -> None:
        self.oracle, self.max_gradients, self._variables = oracle, max_gradients, (x, y)
        self._set_up()
        self.outcomes: list[ActiveSetOutcome] = []
        self.done: list[tuple[str, bool]] = []
        self.plan: list[tuple[str, Array]] = []
        self.nodes = 0
        self.unbounded = False
        self.over = False
        self._drawn = self._refined = self._again = False

    def _set_up(self) -> None:
        """Take the variables as the start, recognise quadratic and linear functions around it, and set up the lower level."""
        self.coupling = NonlinearProgram(self.oracle, *self._variables)
        self.z0 = self.coupling.read()
        self.region = SampleBox.of(self.coupling, self.z0)
        self.lower = ConstrainedLower(self.coupling, self.region)
        self.starts = ActiveSetStarts(self.coupling, self.lower, self.z0)

    # Steps

    def advance(self) -> Numbers:
        """Descend from the next start, and write the best point so far into the variables."""
        self.coupling.forget()  # a resumed run has no cached values either, and must count the same
        if not self._drawn:
            self._begin()
        elif self.plan:
            name, z = self.plan.pop(0)
            self._run_start(name, z)
            if not self.plan and not self._again and not self._confirmed(self.best):  # too few agree: more starts, once
                self._again = True
                self.plan += self.starts.further()
            if (not self.plan or self._settled(self.best)) and not self._refined:  # last, from the best point of all
                self._refine()
        while self.best is None and self.plan and not math.isfinite(sum(self.coupling.exact(self.z0))):
            self._run_start(*self.plan.pop(0))  # the start is no answer, not even a preliminary one
        best = self.best
        if best is not None:
            self.coupling.write(best.z)
        spent = self.oracle.counts.lower + self.oracle.counts.hvp
        certain = best is not None and best.good and bool(best.certain)
        self.over = certain or not self.plan or self._settled(best) or (spent >= self.max_gradients and best is not None)
        if best is None:
            F, f = self.coupling.exact(self.z0)
            return {"upper": F, "lower": f, "violation": self.coupling.violation(self.z0), "run": len(self.done)}
        return {"upper": best.F, "lower": best.f, "violation": best.violation, "gap": best.gap, "run": len(self.done)}

    def _begin(self) -> None:
        """Run branch and bound where it applies; without a proof, choose starts for descents."""
        self._drawn = True
        if Branching.fits(self.coupling):
            self.done.append(("branch and bound", False))
            answer = Branching(self.coupling).search()
            self.nodes, self.unbounded = answer.nodes, answer.unbounded
            # Functions were taken as quadratic because they are near the start: the answer, far away, must confirm it.
            if answer.z is not None and self.coupling.confirm(answer.z):
                why = f"branch and bound over {answer.nodes} nodes found nothing better" if answer.complete else ""
                self._record("branch and bound", answer.z, answer.lam, answer.nu, why)
            if answer.complete and Branching.fits(self.coupling):  # again: confirm() drops models that are wrong
                return
        self.plan = self.starts.first()

    def _run_start(self, name: str, z: Array) -> None:
        """Descend from a start; where a lower basin refutes the end, descend again with that basin as a constraint."""
        coupling, n = self.coupling, self.coupling.n
        self.done.append((name, False))
        z = self.starts.respond(z)
        answer = self.lower.solve(z[:n], z[n:])
        if not np.isfinite(answer.w).all():
            return
        start = np.concatenate([z[:n], answer.w]), answer.lam, answer.mu
        cuts: list[Cut] = []
        last: PieceMinimum | None = None
        for _ in range(REFUTED):
            minimum = descend(coupling, *start, tuple(cuts))
            if minimum is None and last is not None:  # with the cuts, the start leads to no feasible point: try the last end
                minimum = descend(coupling, last.z, last.lam, last.nu, tuple(cuts))
            if minimum is None:
                if coupling.violation(start[0]) <= ANSWER_FEASIBLE:  # no piece led to a feasible point: the start is one
                    self._record(name, *start)
                return
            other = self._verify(name, minimum)
            if other is None:
                return
            cuts.append(self.lower.cut(other))  # f(x, y) <= v(x), the least f of the basin that refuted y
            self._branch(name, minimum, other)
            last = minimum

    def _refine(self) -> None:
        """Improve the best point by a compass search, if x has few coordinates, and plan a last descent from its end."""
        self._refined = True
        best = self.best
        if best is None or not best.good or self.coupling.n > FEW:
            return
        z, F = compass_search(self.coupling, self.lower, best.z, best.F)
        if F < best.F:
            answer = self.lower.solve(z[: self.coupling.n], z[self.coupling.n :])
            self._record("steps in x", z, answer.lam, answer.mu)
            self.plan.append(("the end of steps in x", z))

    def _branch(self, name: str, minimum: PieceMinimum, other: Array) -> None:
        """Descend also from the lower basin that refuted a minimum, without cuts; once for each start."""
        if (name, True) not in self.done:
            self.done.append((name, True))
            z = np.concatenate([minimum.z[: self.coupling.n], other])
            answer = self.lower.solve(z[: self.coupling.n], other)
            better = descend(self.coupling, z, answer.lam, answer.mu)
            if better is not None:
                self._verify(name, better, in_lower_basin=True)

    def _verify(self, name: str, minimum: PieceMinimum, *, in_lower_basin: bool = False) -> Array | None:
        """Record a minimum; returns the y of a lower basin at its x that refutes it, None if there is none."""
        outcome, least = self._record(name, minimum.z, minimum.lam, minimum.nu, in_lower_basin=in_lower_basin)
        return None if outcome.violation > ANSWER_FEASIBLE or outcome.good or least is None else least

    def _record(
        self, name: str, z: Array, lam: Array, nu: Array, certain: str = "", *, in_lower_basin: bool = False
    ) -> tuple[ActiveSetOutcome, Array | None]:
        """Add a point to the outcomes, with its gap; returns the outcome, and the best y of a multistart at its x."""
        n = self.coupling.n
        F, f = self.coupling.exact(z)
        least = self.lower.search(z[:n], z[n:], seed=len(self.done))
        value = math.inf if least is None else self.coupling.exact(np.concatenate([z[:n], least.w]))[1]
        gap = max(0.0, f - value) if math.isfinite(value) else 0.0
        if least is not None and f < value - GAP * (1 + abs(f)):  # f below its minimum: y gains by violating a constraint
            own = self.lower.solve(z[:n], z[n:])
            gap = max(0.0, own.value - f) if own.violation <= ANSWER_FEASIBLE else gap
        outcome = ActiveSetOutcome(name, in_lower_basin, z, F, f, lam, nu, self.coupling.violation(z), gap, certain)
        self.outcomes.append(outcome)
        return outcome, None if least is None else least.w

    # What is known

    @property
    def best(self) -> ActiveSetOutcome | None:
        """The feasible point with the least F; if none is feasible, the one with the least violation or gap."""
        good = [outcome for outcome in self.outcomes if outcome.good]
        if good:  # of points with equal F up to rounding, one with a proof wins
            return min(good, key=lambda outcome: (outcome.F - AGREE**2 * bool(outcome.certain), outcome.violation))
        return min(self.outcomes, key=lambda outcome: max(outcome.violation, outcome.gap), default=None)

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
        if float(np.abs(best.z).max(initial=0.0)) > FAR * (1 + float(np.abs(self.z0).max(initial=0.0))):
            return Verdict(Status.AT_INFINITY, "F still falls far from the start; bound x and y.")
        feasible = f"largest violation {best.violation:.1e}, lower gap {best.gap:.1e}"
        if best.certain:
            return Verdict(Status.CONVERGED, f"{best.certain[0].upper()}{best.certain[1:]}; {feasible}.")
        reached, ended = self._agreement(best)
        if self._confirmed(best):
            return Verdict(Status.CONVERGED, f"{reached} of {ended} starts that ended feasible agree; {feasible}.")
        return Verdict(
            Status.LOCAL,
            f"{reached} of {ended} starts that ended feasible led here, and a better x may exist; {feasible}.",
        )

    def _agreement(self, best: ActiveSetOutcome) -> tuple[int, int]:
        """The number of starts that ended with the F of the best point, and the number that ended feasible."""
        by_start: dict[str, float] = {}
        for outcome in self.outcomes:
            if outcome.good:  # a start counts once, by the best of its basins
                by_start[outcome.start] = min(outcome.F, by_start.get(outcome.start, math.inf))
        reached = sum(abs(F - best.F) <= AGREE * (1 + abs(best.F)) for F in by_start.values())
        return reached, len(by_start)

    def _confirmed(self, best: ActiveSetOutcome | None) -> bool:
        """Whether enough starts agree for the answer to count as global."""
        if best is None or not best.good:
            return False
        reached, ended = self._agreement(best)
        return reached >= max(ENOUGH, SHARE * ended)

    def _settled(self, best: ActiveSetOutcome | None) -> bool:
        """Whether enough starts agree for the run to end before the others."""
        if best is None or not best.good:
            return False
        reached, ended = self._agreement(best)
        return ended >= EARLY and reached > ENOUGH and 2 * reached >= ended

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
        tight = [k for k in range(rows.lower.start, rows.lower.stop) if values[k] >= -ANSWER_FEASIBLE]
        texts = [f"{coupling.names[k]} (multiplier {best.lam[k - rows.lower.start]:.3g})" for k in tight]
        texts += [coupling.names[k] for k in range(rows.upper.start, rows.upper.stop) if values[k] >= -ANSWER_FEASIBLE]
        more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        lines["active"] = (", ".join(texts[:SHOWN]) + more) if texts else "no constraint"
        lines["violation"] = f"{best.violation:.1e} at most; lower gap {best.gap:.1e}"
        if self.nodes:
            lines["search"] = f"branch and bound, {self.nodes} nodes"
        values_by_start = [
            f"{outcome.start}{', lower basin' if outcome.in_lower_basin else ''} F = {outcome.F:.6g}"
            for outcome in self.outcomes
            if outcome.good
        ]
        if len(values_by_start) > 1:
            lines["starts"] = "; ".join(values_by_start[: 2 * SHOWN])
        return lines

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps need, in plain lists, numbers and text."""
        return {
            "z0": self.z0.tolist(),
            "outcomes": [
                {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(o).items()} for o in self.outcomes
            ],
            "done": list(self.done),
            "plan": [(name, z.tolist()) for name, z in self.plan],
            "numbers": {"nodes": self.nodes, "unbounded": self.unbounded, "over": self.over}
            | {"drawn": self._drawn, "refined": self._refined, "again": self._again},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        if not np.array_equal(self.z0, state["z0"]):  # models of functions and sampled points depend on the start
            here = self.coupling.read()
            self.coupling.write(np.array(state["z0"]))
            self._set_up()
            self.coupling.write(here)
        self.outcomes = []
        for saved in state["outcomes"]:
            fields: dict[str, Any] = dict(saved)
            fields |= {name: np.array(saved[name]) for name in ("z", "lam", "nu")}
            self.outcomes.append(ActiveSetOutcome(**fields))
        self.done = [(name, again) for name, again in state["done"]]
        self.plan = [(name, np.array(z)) for name, z in state["plan"]]
        numbers = state["numbers"]
        self.nodes, self.unbounded = numbers["nodes"], numbers["unbounded"]
        self.over, self._drawn = numbers["over"], numbers["drawn"]
        self._refined, self._again = numbers["refined"], numbers["again"]


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
