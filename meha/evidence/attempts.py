"""Attempts: what several starts found, which of them is the answer, and whether that is enough to say "converged"."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from meha.engines.attempt import EngineKind, Result, Start
from meha.engines.base import unverified
from meha.engines.implicit_newton import HyperDescent
from meha.engines.penalty_continuation import Scales, Sizes
from meha.engines.tuning import TUNING
from meha.evidence.sampling import Samples
from meha.lower.flat_problem import FlatProblem, LowerPoint
from meha.lower.multistart import HITS, Evidence, LowerMultistart
from meha.lower.nearest import NearestSolution, solve_nearest
from meha.lower.quadratic_model import QuadraticModel
from meha.method.status import Status, Verdict
from meha.numerics.limited_memory import LimitedMemory
from meha.numerics.tolerances import FAR, SAME, SMALL
from meha.problem.oracle import BudgetError, Function
from meha.tensors.state import Saved
from meha.tensors.vectors import vector_norm

CELLS = 12
"""Cells in which a way to a distant point is searched for a jump, and halvings of one of them."""

FAR_AWAY = 2.0
"""Length of these ways where there are no bounds, in units of x or y."""


def jumps(value: Callable[[float], float]) -> bool:
    """Whether a function on [0, 1] jumps: by bisection of the cell whose change is most unlike those beside it.

    >>> jumps(lambda t: 5 * t * t + (t > 0.3)), jumps(lambda t: 50 * t * t + abs(t - 0.3) ** 0.5)
    (True, False)
    """
    points = [k / CELLS for k in range(CELLS + 1)]
    values = [value(t) for t in points]
    changes = [after - before for before, after in itertools.pairwise(values)]
    if not all(map(math.isfinite, changes)):  # it leaves the domain of the function
        return False
    beside = [changes[1], *changes, changes[-2]]
    k = max(range(CELLS), key=lambda k: abs(2 * changes[k] - beside[k] - beside[k + 2]))
    left, right, first, last = points[k], points[k + 1], values[k], values[k + 1]
    noise = math.sqrt(torch.finfo(torch.float64).eps) * max(map(abs, values))
    for _ in range(CELLS):  # a continuous change would halve each time
        middle = 0.5 * (left + right)
        here = value(middle)
        if abs(here - first) > abs(last - here):
            right, last = middle, here
        else:
            left, first = middle, here
    return abs(last - first) > SMALL * abs(changes[k]) + noise


def nearest_solution(levels: FlatProblem, sizes: Sizes, x: Tensor) -> NearestSolution:
    """The lower solution at x nearest to y0, or to where the response of the problem begins."""
    response_term = levels.oracle.response_term
    levels.move(x)
    if response_term.nearest:
        response_term.weight = 0.0  # the proximal term of the last stage would shift the solution
        start = torch.cat([leaf.detach().reshape(-1) for leaf in response_term.centre(levels.x)]).to(sizes.y0)
    else:
        start = sizes.y0
    return solve_nearest(levels, start, SMALL * sizes.tol, levels.curvatures["f_yy"])


def use_nearest(levels: FlatProblem, sizes: Sizes, result: Result) -> Result:
    """Replace the y of a result, which still depends on the proximal term, by the lower solution nearest to y0."""
    fresh = nearest_solution(levels, sizes, result.x)
    end = result.verdict
    if not fresh.solved and end.status is Status.CONVERGED:
        message = f"{end.message} The nearest solution of the lower level could not be found as accurately."
        end = Verdict(Status.FINISHED, message)
    F = levels.upper(fresh.y)[0]
    return result._replace(y=fresh.y, F=F, lower=fresh.lower, verdict=end)


def attach_resolved_F(levels: FlatProblem, sizes: Sizes, result: Result) -> Result:
    """Re-solve the lower level from y0, and add F there to the result, unless that solution is in a higher basin than y."""
    fresh = nearest_solution(levels, sizes, result.x)
    fell = abs(levels.lower(sizes.y0).value - fresh.lower)  # the scale of differences of f + g
    if fresh.lower - result.lower > SAME**2 * fell + TUNING.within_noise * levels.lower(fresh.y).noise:
        return result
    return result._replace(F_nearest=levels.upper(fresh.y)[0])


def rank_key(result: Result) -> tuple[bool, bool, bool]:
    """What ranks attempts before F does: there is an answer, y is not refuted, the lower level was solved."""
    return result.verdict.status is not Status.DIVERGED, not result.refuted, result.solved


def final_verdict(result: Result) -> Verdict:
    """The verdict of an attempt, given the evidence about its y and F at the re-solved y."""
    end, note = _verified(result), _several_solutions_warning(result)
    return Verdict(end.status, f"{end.message} {note}") if note else end


def _verified(result: Result) -> Verdict:
    end, evidence = result.verdict, result.evidence
    if end.status is not Status.CONVERGED:
        return end
    if evidence is None or not (evidence.starts or evidence.excess):
        doubt = "y could not be verified, because the gradient budget is exhausted (max_gradients)"
    elif evidence.excess:
        doubt = f"A better point of the lower level was found, and could not be used: {evidence}"
    elif not evidence.certain:
        doubt = f"A better point of the lower level may exist: {evidence}; a larger max_gradients allows more of them"
    else:
        return Verdict(Status.CONVERGED, f"{end.message} {evidence}.")
    return Verdict(Status.LOCAL, f"{end.message} {doubt}.")


def _several_solutions_warning(result: Result) -> str:
    """A warning where F depends on the choice among several lower solutions; empty where it does not."""
    scale = max(result.spread, abs(result.F))
    if result.F_nearest is None or not result.F_nearest - result.F > SAME * scale:
        return ""
    return (
        f"Warning: the lower level has several solutions at this x. F = {result.F:.3g} at the returned y, but"
        f" {result.F_nearest:.3g} at the one nearest to y0. If y will be computed again, for example by training, pass"
        " Problem(..., response=meha.responses.Nearest())."
    )


class Attempts(Saved):
    """Collects the results of all attempts, verifies the best, and plans passes that may refute or confirm it.

    Args:
        levels: the problem.
        sizes: those of the start.
        left: the gradients of f that may still be taken.

    Attributes:
        results: those of the attempts that are over.
        plan: starts of further passes.
        basins: minimizers of the basins of the lower level that were met, at any x.
        several: whether basins of different height were met at some x.
        explored: whether other x were sampled.
        confirmed: whether passes were planned that may find the best solution again.
        pairs: the L-BFGS memory with which descents of the lower level begin.
    """

    saves = ("results", "plan", "basins", "several", "explored", "confirmed")

    def __init__(self, levels: FlatProblem, sizes: Sizes, left: Callable[[], int]) -> None:
        self.levels, self.sizes, self.left = levels, sizes, left
        self.results: list[Result] = []
        self.plan: list[Start] = []
        self.basins: list[Tensor] = []
        self.several = self.explored = self.confirmed = False
        self.pairs = LimitedMemory(1)  # replaced by that of an engine before the first search

    # The results

    @property
    def best(self) -> int:
        """The index of the answer: the best by rank, then by F; an earlier one unless a later one is clearly better."""
        least = SAME**2 * max(0.0, *(result.spread for result in self.results), 0.0)  # a pass that failed has -inf
        best = 0
        for i, other in enumerate(self.results):
            own, others = rank_key(self.results[best]), rank_key(other)
            if others > own or (others == own and least < self.results[best].F - other.F):
                best = i
        return best

    @property
    def verdict(self) -> Verdict:
        """The verdict of the best attempt, with what the other attempts say about it."""
        best = self.results[self.best]
        end = final_verdict(best)
        rivals, _ = self._other_solutions(best)
        if rivals:
            note = f"Another start converged to another local solution, F = {min(rivals):.6g}; there may be more."
        elif not self._descended(best):
            note = "F is constant around this x, so that its gradient says nothing; there may be better solutions."
        elif not self.is_confident:
            note = "A second start converged to a different x; there may be better solutions."
        else:
            return end
        status = Status.LOCAL if end.status is Status.CONVERGED and not self.is_confident else end.status
        return Verdict(status, f"{end.message} {note}")

    @property
    def unverified(self) -> Verdict:
        """The verdict of the best attempt, where nothing was verified."""
        return unverified(self.results[self.best].verdict)

    def _other_solutions(self, best: Result) -> tuple[list[float], int]:
        """F of attempts that ended elsewhere, and the number of attempts that agree with the best."""
        solutions = [result for result in self.results if rank_key(result) == rank_key(best)]
        others = [result.F for result in solutions if not self.same_solution(best, result)]
        return others, len(solutions) - len(others)

    @property
    def is_confident(self) -> bool:
        """The one rule for other x: nothing else was met, or the best was found often enough.

        With k other solutions of different F, implicit Newton must find the best in k + 2 attempts, passes in 2: they are slow.
        """
        best = self.results[self.best]
        if not self._descended(best):
            return False
        rivals, alike = self._other_solutions(best)
        cheap = all(result.engine is EngineKind.IMPLICIT_NEWTON for result in self.results)
        if rivals:
            # Attempts that ended at the same F count as one other solution.
            kinds = [F for i, F in enumerate(rivals) if all(abs(F - G) > SAME * self._size_of(F) for G in rivals[:i])]
            return alike >= TUNING.agreeing + (len(kinds) if cheap else 0)
        return self.few_coordinates or not cheap or alike >= TUNING.agreeing

    def _descended(self, best: Result) -> bool:
        """Whether an attempt has come to the best result from a larger F; on a plateau, any start would stay where it is."""
        return not best.flat or any(result.fallen > 0 and self.same_solution(best, result) for result in self.results)

    @property
    def few_coordinates(self) -> bool:
        """Whether x has few enough coordinates for a handful of samples to show where other solutions are."""
        return self.sizes.x0.numel() <= TUNING.searchable

    def same_solution(self, a: Result, b: Result) -> bool:
        """Whether two results are the same point, or have the same F: x may not matter."""
        rounding = self.levels.eps * max(a.fallen, b.fallen) if math.isfinite(a.fallen + b.fallen) else 0.0
        alike = abs(a.F - b.F) <= SAME * self._size_of(a.F) + SAME**2 * max(a.spread, b.spread) + rounding
        return a is b or ((self.same_point(a, b.x, b.y) or alike) and rank_key(a) == rank_key(b))

    def _size_of(self, F: float) -> float:
        """The size of F without a constant in it: not more than F fell in an attempt, nor less than its rounding."""
        fallen = max(result.fallen for result in self.results)
        return min(abs(F), max(fallen, math.sqrt(self.levels.eps) * abs(F)))

    def same_point(self, result: Result, x: Tensor, y: Tensor) -> bool:
        """Whether a point is that of a result, within the accuracy of both."""
        sizes = self.sizes
        same, y_size = max(2 * sizes.tol, SAME), max(sizes.y_size(y), sizes.y_largest)
        return vector_norm(result.x - x) <= same * sizes.x_size(x) and vector_norm(result.y - y) <= same * y_size

    # What to do next

    def verify_newton(self, engine: HyperDescent, others: Tensor) -> Samples | None:
        """Verify the only result, that of implicit Newton; None if it is refuted or doubtful, so that passes must follow.

        Where the lower level is not convex, it may have other basins at other x, which implicit Newton does not follow.

        Args:
            engine: the descent, at the result.
            others: the x, one in each row, at which F is sampled; far ones first.
        """
        (result,), model = self.results, engine.model
        search = self._search(result.x, result.y, solved=True, model=model)
        drawn = others if len(others) else self.samples(result.x)
        elsewhere = torch.stack([self.sizes.x0, *itertools.islice(drawn, TUNING.curvature_samples - 1)])
        points = torch.stack(list(itertools.islice(search.random(), len(elsewhere))))
        given = [self.sizes.y0, self.levels.inside(-result.y)]  # products and squares of y do not change with its sign
        assert engine.now is not None
        origins = search.draw(given, HITS)
        # One batch: curvature at far points, descents of the lower level at x, and F at the other x.
        samples = Samples(engine.objective, engine.batch, engine.now.x, search.point, origins, (elsewhere, points), others)
        # A quadratic model of f needs no samples at x: its curvature is the same everywhere.
        if not samples.convex(far=True) or (model is None and not samples.convex(far=False)):
            return None
        search.joined(samples.descents(search.scale))
        evidence = search.run([], self._allowed(), most=2)  # a second basin is enough to call for passes
        bent = model is not None and search.model is None and not samples.convex(far=False)
        # ``bent``: the descents showed that f is not that quadratic, and samples at x show negative curvature.
        if bent or not evidence.certain or evidence.excess or len(search.basins) > 1:
            self.results = [result._replace(evidence=evidence if evidence.excess else None)]
            return None
        self._learn(search, evidence)
        self.results = [self._polished(result, search, evidence)]
        if not self._check_infinity(0, lambda x: engine.objective.sample(x, result.y)[0]):
            self.results = [result]
            return None
        if not engine.determined:
            self._compare(0)
        return samples

    def judge(self, scales: Scales) -> None:
        """Verify the best result; plan further passes where it is refuted, or where other basins or x may be better."""
        if scales.proximal:
            self._select(scales)
            return
        while not self.plan:  # each test may make another result the best, which then must pass the same tests
            i = self.best
            if self.results[i].verdict.status is Status.DIVERGED:
                return
            if self.results[i].evidence is None:
                self._verify(i, scales)
            elif not self.explored:
                self._explore(i, scales)
            elif not self.confirmed:
                self._confirm(i, scales)
            else:
                self._check_infinity(i, partial(self._upper_at, self.results[i].y))
                self._compare(i)
                return

    def doubt_jumps(self) -> None:
        """Let the best result be local where F or f jumps on the way to distant points: descents see nothing beyond a jump."""
        best = self.best
        result = self.results[best]
        if result.verdict.status is not Status.CONVERGED or not self.few_coordinates:
            return
        if level := self._jumping(result):
            message = f"{level} jumps on the way to other points, where gradients and other starts are no evidence."
            self.results[best] = result._replace(verdict=Verdict(Status.LOCAL, f"{result.verdict.message} {message}"))
        self.levels.move(result.x, result.y)

    def _jumping(self, result: Result) -> str:
        """The level with a jump between a point and others, in x or in y; empty if none is met."""
        levels, x, y = self.levels, result.x, result.y
        ends = []
        for sign in (-1.0, 1.0):
            to_x, to_y = ((pair[sign > 0]) for pair in (levels.x_bounds(), levels.y_bounds()))
            far_x = x + sign * FAR_AWAY * torch.where(x != 0, x.abs(), self.units(x))  # a distant start does not matter here
            far_y = y + sign * FAR_AWAY * (self.sizes.y_size(y) or 1.0) / math.sqrt(len(y))
            ends.append((levels.project(torch.where(torch.isfinite(to_x), to_x, far_x)), y))
            ends.append((x, levels.inside(torch.where(torch.isfinite(to_y), to_y, far_y))))
        for (end_x, end_y), (name, level) in itertools.product(ends, (("F", levels.oracle.upper), ("f", levels.oracle.lower))):

            def value(t: float, end_x: Tensor = end_x, end_y: Tensor = end_y, level: Function = level) -> float:
                levels.oracle.check_time()
                levels.move(x + t * (end_x - x), y + t * (end_y - y))
                return float(level(levels.x, levels.y))

            if jumps(value):
                return name
        return ""

    def _select(self, scales: Scales) -> None:
        """Find the response ``Nearest`` at the x of the best result, and verify that no lower value exists there."""
        while not self.plan:
            i = self.best
            if self.results[i].verdict.status is Status.DIVERGED:
                return
            if self.results[i].evidence is not None:
                self._check_infinity(i, partial(self._upper_at, self.results[i].y))
                return
            self.results[i] = result = use_nearest(self.levels, scales, self.results[i])
            search = self._search(result.x, result.y, solved=True)
            self.results[i] = result._replace(evidence=search.run([scales.y0], self._allowed()))

    def _compare(self, i: int) -> None:
        """Add F at the re-solved y to a result, unless the problem says which lower solution it means."""
        if self.sizes.simple or self.levels.oracle.response_term.response is not None:
            return
        with contextlib.suppress(BudgetError):
            self.results[i] = attach_resolved_F(self.levels, self.sizes, self.results[i])

    def _search(self, x: Tensor, y: Tensor, *, solved: bool, model: QuadraticModel | None = None) -> LowerMultistart:
        """A multistart of the lower level at x, around y."""
        sizes, levels = self.sizes, self.levels
        levels.move(x)
        scale, t = max(sizes.y_size(y), sizes.y_largest), 1 / (levels.curvatures["f_yy"] or 1.0)
        return LowerMultistart(levels, y, self.pairs, t, scale, sizes.tol * sizes.x_size(x), solved=solved, model=model)

    def _allowed(self) -> int:
        """The budget of one search, in gradients of f: a share of those spent so far."""
        return min(self.left(), max(TUNING.least_search, self.levels.spent // 2))

    def _learn(self, search: LowerMultistart, evidence: Evidence) -> None:
        """Keep what a search learned about the basins of the lower level."""
        self._remember_basins(sorted(search.basins, key=lambda basin: basin.value))
        self.several = self.several or evidence.values > 1

    def _polished(self, result: Result, search: LowerMultistart, evidence: Evidence) -> Result:
        """Add the evidence to a result, and move its y to the lowest point that the search found in its basin."""
        if evidence.excess:
            return result._replace(evidence=evidence)
        own = search.basins[0]
        F = result.F if own is search.point else self.levels.upper(own.z)[0]  # saves a gradient of F where y did not move
        return result._replace(y=own.z, F=F, lower=own.value, evidence=evidence)

    def _verify(self, i: int, scales: Scales) -> None:
        """Search the lower level at the x of a result; a lower basin leads to two passes that follow it."""
        levels, result = self.levels, self.results[i]
        search = self._search(result.x, result.y, solved=True)
        given = [other.y for other in self.results if other is not result] + result.others + self.basins + [scales.y0]
        evidence = search.run(given, self._allowed())
        self._learn(search, evidence)
        own, basins = search.basins[0], sorted(search.basins, key=lambda basin: basin.value)
        if evidence.excess:
            self.results = [
                r._replace(evidence=evidence) if self.same_point(r, result.x, result.y) else r for r in self.results
            ]
            others = [basin.z for basin in basins if basin is not own][: TUNING.samples]
            # With a larger c, F cannot pull y out of the lower basin again.
            holding = TUNING.first_c * abs(levels.upper(others[0])[0] - result.F) / evidence.excess
            self._add(Start("back from a higher basin", scales.starts[0], result.x, result.y, others))
            c = max(scales.starts[-1], holding)
            if not self._add(Start("from a lower basin", c, result.x, others[0], [result.y, *others[1:]])):
                self._fall_back(result, basins[0], evidence)
            return
        self.results[i] = polished = self._polished(result, search, evidence)
        for basin in basins:  # an equally low basin in which F is smaller is a better answer (the optimistic response)
            equal = basin is not own and basin.value <= own.value + search.equal(basin)
            if equal and levels.upper(basin.z)[0] < polished.F - SAME**2 * max(result.spread, 0.0):
                self._add(Start("from a basin of the same height", scales.starts[-1], result.x, basin.z, [own.z]))
                break

    def _remember_basins(self, basins: Sequence[LowerPoint]) -> None:
        """Keep the minimizers of basins for later searches, each once."""
        for basin in basins:
            far = SAME * self.sizes.y_size(basin.z)
            if len(self.basins) < TUNING.samples and all(vector_norm(basin.z - known) > far for known in self.basins):
                self.basins.append(basin.z)

    def _explore(self, i: int, scales: Scales) -> None:
        """Sample other x, and plan passes from those that may lead to another solution."""
        self.explored = True
        for _, x, ys in self._promising_x(self.results[i]):
            # With a smaller c, F would first pull the pass away from that x.
            self._add(Start("from another x", TUNING.faithful * scales.starts[-1], x, ys[0], ys[1:]))

    def _promising_x(self, best: Result) -> list[tuple[float, Tensor, list[Tensor]]]:
        """Sampled x that are better than the best attempt or separated from it by a barrier, as (F, x, lower solutions)."""
        levels = self.levels
        found: list[tuple[float, Tensor, list[Tensor]]] = []
        doubtful = self.several or len(self.basins) > 1 or bool(self._other_solutions(best)[0])
        allowed = self._allowed() if doubtful else min(self.left(), levels.spent // 2)
        with levels.until(levels.spent + allowed), contextlib.suppress(BudgetError):
            found.extend(self._lowest_basin(x, best.y) for x in self.samples(best.x))
            found.sort(key=lambda point: point[0])
            if not self.several:  # with one basin, F is continuous: without a barrier, a pass would end at the best again
                barriers = [self._lowest_basin(0.5 * (x + best.x), best.y)[0] > F for F, x, _ in found[: TUNING.restarts]]
                found = [point for point, barrier in zip(found, barriers, strict=False) if barrier or point[0] < best.F]
        return [point for point in found[: TUNING.restarts] if math.isfinite(point[0])]

    def _confirm(self, i: int, scales: Scales) -> None:
        """Where several solutions were met, and the best not often enough, plan passes that may find it again."""
        best, self.confirmed = self.results[i], True
        if not self.is_confident:
            for x in itertools.islice(self.samples(best.x), TUNING.restarts):
                self._add(Start("once more, from another x", scales.starts[0], x, best.y, []))

    def _lowest_basin(self, x: Tensor, y: Tensor) -> tuple[float, Tensor, list[Tensor]]:
        """F in the lowest known basin at x, x, and the minimizers of all of them, the lowest first.

        With the response ``Nearest``, the nearest solution is the only one.
        """
        if self.levels.oracle.response_term.vanishes:
            y = nearest_solution(self.levels, self.sizes, x).y
            return self.levels.upper(y)[0], x, [y]
        search = self._search(x, y, solved=False)
        for start in (y, *((*self.basins, *itertools.islice(search.random(), 2)) if self.several else ())):
            search.descend(start)
        basins = sorted(search.basins, key=lambda basin: basin.value)[: TUNING.samples]
        if not basins:
            return math.inf, x, []
        self._remember_basins(basins[:1])
        return self.levels.upper(basins[0].z)[0], x, [basin.z for basin in basins]

    def samples(self, x: Tensor) -> Iterator[Tensor]:
        """Points of X: a Latin hypercube between its bounds; in coordinates without bounds, -x and random points around x."""
        low, high = self.levels.x_bounds()
        boxed = torch.isfinite(low) & torch.isfinite(high)
        generator = torch.Generator().manual_seed(len(x))  # the same points in every run, and after a resume
        parts = torch.rand(TUNING.samples, len(x), generator=generator, dtype=torch.float64, device="cpu").argsort(0)
        units, away = self.units(x), -2 * x
        for k, part in enumerate(parts.to(x)):
            share = (part + torch.rand(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)) / TUNING.samples
            yield self.levels.project(torch.where(boxed, low + share * (high - low), x + away))
            if k % 2:  # antithetic: the next point lies opposite
                away = -away
                continue
            d = torch.randn(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)
            away = TUNING.wider ** (k // 2 % 2) * units * d

    def other_side(self, x: Tensor) -> Tensor:
        """A point of X whose coordinates are as far from x as those of x0 or of 0 are, each on a random side."""
        generator = torch.Generator().manual_seed(len(x))
        signs = torch.randint(0, 2, (len(x),), generator=generator, device="cpu").to(x) * 2 - 1
        return self.levels.project(x + signs * self.units(x))

    def units(self, x: Tensor) -> Tensor:
        """The distance at which to look for other solutions: the size of each coordinate, or how far it moved from x0."""
        units = torch.maximum(x.abs(), (x - self.sizes.x0).abs())
        return torch.where(units > 0, units, self.sizes.x_size(x) / math.sqrt(len(x)))

    def _check_infinity(self, i: int, upper: Callable[[Tensor], float]) -> bool:
        """Check whether the optimum lies at infinity: F stays as low when the coordinates that moved most move twice as far.

        ``upper`` is F as a function of x. Returns False where F is as low there, but changes further away, so that another
        solution may lie beyond.
        """
        sizes, levels, result = self.sizes, self.levels, self.results[i]
        x, moved = result.x, result.x - sizes.x0
        distance = moved.abs()
        if not vector_norm(moved) > sizes.tol * sizes.x_size(x):  # x did not move: there is no direction to test
            return True
        furthest = distance >= 0.5 * distance.max()  # one coordinate may go to infinity while the others converge
        if vector_norm(moved) <= SAME * sizes.x_size(x):  # a start near the solution says nothing about what is far
            moved = moved * (sizes.x_size(x) / vector_norm(moved))
        beyond = torch.where(furthest, x + FAR * moved, x)
        if levels.constrained and not torch.equal(levels.project(beyond), beyond):  # X bounds them
            return True
        slack = SAME**2 if levels.oracle.response_term.vanishes else sizes.tol  # with ``Nearest``, tol is raised to 1e-4

        def rise(share: float) -> float:
            return upper(torch.where(furthest, x + share * moved, x)) - result.F

        if not rise(1.0) <= slack * result.spread:
            return True
        message = (
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, for example with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
        )
        self.results[i] = result._replace(verdict=Verdict(Status.AT_INFINITY, message))
        # Beyond a plateau, F may change again, and another solution may lie there.
        return all(abs(rise(share)) <= slack * result.spread for share in TUNING.further)

    def _upper_at(self, y: Tensor, x: Tensor) -> float:
        """F at another x, with the nearest solution there, or the lowest one that descents from y and known basins find."""
        if self.levels.oracle.response_term.vanishes:
            return self.levels.upper(nearest_solution(self.levels, self.sizes, x).y)[0]
        search = self._search(x, y, solved=False)
        if self.several:
            search.run([y, *self.basins], self._allowed())
        else:
            search.descend(y)
        return self.levels.upper(search.lowest.z)[0] if search.basins else math.nan

    def _add(self, start: Start) -> bool:
        """Plan a pass, if number and budget allow another one."""
        may = len(self.results) + len(self.plan) < TUNING.passes and self.left() > 0
        if may:
            self.plan.append(start)
        return may

    def _fall_back(self, result: Result, lowest: LowerPoint, evidence: Evidence) -> None:
        """Add the lower basin that refuted a result as a result of its own, where the budget allows no pass from it."""
        F = self.levels.upper(lowest.z)[0]
        message = "A better point of the lower level was found at this x, and could not be used to improve x."
        end = Verdict(Status.LOCAL, message)
        evidence = evidence._replace(excess=0.0)  # the excess was that of the refuted y
        self.results.append(result._replace(y=lowest.z, F=F, lower=lowest.value, verdict=end, evidence=evidence))
