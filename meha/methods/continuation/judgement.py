"""Judgement: which result of a run is the best, whether its y solves the lower level, and what to try next."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._bowls import Quadratic
from meha.methods._levels import BudgetError, Levels, LowerPoint
from meha.methods._quasi_newton import Pairs, size
from meha.methods._verification import TOGETHER, Evidence, Search
from meha.methods.continuation.anew import compare, respond, select
from meha.methods.continuation.results import Result, Start, judged, plain, restored, worth
from meha.methods.continuation.scales import Scales, Sizes
from meha.methods.continuation.tuning import TUNING
from meha.methods.newton import Engine
from meha.methods.newton.survey import Survey

__all__ = ["Judgement"]

FLAGS = ("several", "explored", "confirmed")


class Judgement:
    """The results of a run, and what searches of the lower level found out about them.

    Args:
        levels: the problem.
        sizes: those of the start.
        left: the gradients of f that may still be taken.

    Attributes:
        results: those of the attempts that are over.
        plan: passes that a judgement asks for.
        valleys: the lowest points of valleys of the lower level that were met, whatever x was.
        several: whether some of them differ in height, at some x.
        explored: whether other x were tried.
        confirmed: whether it was asked if the best solution should be found once more.
        pairs: what is known about the curvature of f.
    """

    def __init__(self, levels: Levels, sizes: Sizes, left: Callable[[], int]) -> None:
        self.levels, self.sizes, self.left = levels, sizes, left
        self.results: list[Result] = []
        self.plan: list[Start] = []
        self.valleys: list[Tensor] = []
        self.several = self.explored = self.confirmed = False
        self.pairs = Pairs(1)

    # The results

    @property
    def best(self) -> int:
        """The result to return: y may not be refuted, then F counts; the first unless another is clearly better."""
        least = TUNING.better * max(0.0, *(result.spread for result in self.results), 0.0)
        best = 0
        for i, other in enumerate(self.results):
            own, others = worth(self.results[best]), worth(other)
            if others > own or (others == own and least < self.results[best].F - other.F):
                best = i
        return best

    @property
    def verdict(self) -> Verdict:
        """The end of the best result, and what is known about its y."""
        best = self.results[self.best]
        end = judged(best)
        rivals, _ = self._rivals(best)
        if rivals:
            note = f"Another start ended at another local solution, F = {min(rivals):.6g}; there may be more."
        elif not self.sure:
            note = "A start on another side of the answer did not end there; there may be better solutions."
        else:
            return end
        status = Status.LOCAL if end.status is Status.CONVERGED and not self.sure else end.status
        return Verdict(status, f"{end.message} {note}")

    @property
    def unverified(self) -> Verdict:
        """The end of the best result, of which nothing more is known."""
        end = self.results[self.best].verdict
        if end.status is not Status.CONVERGED:
            return end
        return Verdict(Status.RULE_MET, f"{end.message} Nothing was verified; there may be other valleys and other solutions.")

    def _rivals(self, best: Result) -> tuple[list[float], int]:
        """F of the results that are other solutions, as far as is known, and how many are the best or have its F."""
        solutions = [result for result in self.results if worth(result) == worth(best)]
        others = [result.F for result in solutions if not self.agree(best, result)]
        return others, len(solutions) - len(others)

    @property
    def sure(self) -> bool:
        """Whether no other solution than the best is to be expected, or it was found several times."""
        rivals, alike = self._rivals(self.results[self.best])
        cheap = all(result.second_order for result in self.results)
        if rivals:
            kinds = [F for i, F in enumerate(rivals) if all(abs(F - G) > TUNING.least_agreement * abs(F) for G in rivals[:i])]
            return alike >= (TUNING.found + len(kinds) - 1 if cheap else TUNING.found_by_passes)
        return self.searchable or not cheap or alike >= TUNING.found_large

    @property
    def searchable(self) -> bool:
        """Whether x has few enough coordinates for some points to say where other solutions may be."""
        return self.sizes.x0.numel() <= TUNING.searchable

    def agree(self, a: Result, b: Result) -> bool:
        """Whether two results are the same point, or have the same F."""
        alike = abs(a.F - b.F) <= TUNING.least_agreement * abs(a.F) + TUNING.alike * max(a.spread, b.spread)
        return a is b or ((self.near(a, b.x, b.y) or alike) and worth(a) == worth(b))

    def near(self, result: Result, x: Tensor, y: Tensor) -> bool:
        """Whether a point is that of a result, as far as their accuracy shows."""
        sizes = self.sizes
        same, y_size = max(TUNING.agreement * sizes.tol, TUNING.least_agreement), max(sizes.y_size(y), sizes.y_largest)
        return size(result.x - x) <= same * sizes.x_size(x) and size(result.y - y) <= same * y_size

    # What to do next

    def confirms(self, engine: Engine, others: Tensor) -> Survey | None:
        """Verify the only result, that of the second-order engine, which is there; None if it cannot be the end.

        Where the lower level is not convex, it may have other valleys at other x, and passes follow.

        Args:
            engine: at the result.
            others: the x, one in each row, at which the survey finds F; far ones first.
        """
        (result,), model = self.results, engine.model
        search = self._search(result.x, result.y, solved=True, model=model)
        samples = others if len(others) else self.samples(result.x)
        elsewhere = torch.stack([self.sizes.x0, *itertools.islice(samples, TUNING.looks - 1)])
        points = torch.stack(list(itertools.islice(search.random(), len(elsewhere))))
        given = [self.sizes.y0, self.levels.inside(-result.y)]  # products and squares of y do not change with its sign
        survey = engine.survey(search.point, search.draw(given, TOGETHER), (elsewhere, points), others)
        if not survey.convex(far=True) or (model is None and not survey.convex(far=False)):
            return None
        search.joined(survey.descents(search.scale))
        evidence = search.run([], self._allowed(), most=2)
        bent = model is not None and search.model is None and not survey.convex(far=False)
        if bent or not evidence.certain or evidence.excess or len(search.valleys) > 1:
            self.results = [result._replace(evidence=evidence if evidence.excess else None)]
            return None
        self._learn(search, evidence)
        self.results = [self._polished(result, search, evidence)]
        if not self._look_beyond(0, lambda x: engine.objective.look(x, result.y)[0]):
            self.results = [result]
            return None
        if not engine.determined:
            self._compare(0)
        return survey

    def judge(self, scales: Scales) -> None:
        """Verify the best result; plan further passes where it is refuted, or where there are other valleys."""
        if scales.proximal:
            self._select(scales)
            return
        while not self.plan:
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
                self._look_beyond(i, partial(self._upper_at, self.results[i].y))
                self._compare(i)
                return

    def _select(self, scales: Scales) -> None:
        """Find the response at the x of the best result; no point of the lower level may be lower."""
        while not self.plan:
            i = self.best
            if self.results[i].verdict.status is Status.DIVERGED:
                return
            if self.results[i].evidence is not None:
                self._look_beyond(i, partial(self._upper_at, self.results[i].y))
                return
            self.results[i] = result = select(self.levels, scales, self.results[i])
            search = self._search(result.x, result.y, solved=True)
            self.results[i] = result._replace(evidence=search.run([scales.y0], self._allowed()))

    def _compare(self, i: int) -> None:
        """Note F at a fresh y, unless the problem says which y it means."""
        if self.sizes.simple or self.levels.oracle.selection.response is not None:
            return
        with contextlib.suppress(BudgetError):
            self.results[i] = compare(self.levels, self.sizes, self.results[i])

    def _search(self, x: Tensor, y: Tensor, *, solved: bool, model: Quadratic | None = None) -> Search:
        """A search of the lower level at x, around y."""
        sizes, levels = self.sizes, self.levels
        levels.move(x)
        scale, t = max(sizes.y_size(y), sizes.y_largest), 1 / (levels.curvatures["f_yy"] or 1.0)
        return Search(levels, y, self.pairs, t, scale, sizes.tol * sizes.x_size(x), solved=solved, model=model)

    def _allowed(self) -> int:
        return min(self.left(), max(TUNING.least_search, int(TUNING.search * self.levels.spent)))

    def _learn(self, search: Search, evidence: Evidence) -> None:
        self._note(sorted(search.valleys, key=lambda valley: valley.value))
        self.several = self.several or evidence.values > 1

    def _polished(self, result: Result, search: Search, evidence: Evidence) -> Result:
        """A result with its evidence, and with y as low as the search found it in its valley."""
        if evidence.excess:
            return result._replace(evidence=evidence)
        own = search.valleys[0]
        F = result.F if own is search.point else self.levels.upper(own.z)[0]
        return result._replace(y=own.z, F=F, lower=own.value, evidence=evidence)

    def _verify(self, i: int, scales: Scales) -> None:
        """Search the lower level at the x of a result; a lower point gives rise to passes that know of it."""
        levels, result = self.levels, self.results[i]
        search = self._search(result.x, result.y, solved=True)
        given = [other.y for other in self.results if other is not result] + result.others + self.valleys + [scales.y0]
        evidence = search.run(given, self._allowed())
        self._learn(search, evidence)
        own, valleys = search.valleys[0], sorted(search.valleys, key=lambda valley: valley.value)
        if evidence.excess:
            self.results = [r._replace(evidence=evidence) if self.near(r, result.x, result.y) else r for r in self.results]
            others = [valley.z for valley in valleys if valley is not own][: TUNING.remembered]
            holding = TUNING.holding * abs(levels.upper(others[0])[0] - result.F) / evidence.excess
            self._add(Start("back from a higher valley", scales.starts[0], result.x, result.y, others))
            c = max(scales.starts[-1], holding)
            if not self._add(Start("from a lower valley", c, result.x, others[0], [result.y, *others[1:]])):
                self._fall_back(result, valleys[0], evidence)
            return
        self.results[i] = polished = self._polished(result, search, evidence)
        for valley in valleys:
            equal = valley is not own and valley.value <= own.value + search.equal(valley)
            if equal and levels.upper(valley.z)[0] < polished.F - TUNING.better * max(result.spread, 0.0):
                self._add(Start("from a valley of the same height", scales.starts[-1], result.x, valley.z, [own.z]))
                break

    def _note(self, valleys: Sequence[LowerPoint]) -> None:
        """Remember the lowest points of valleys that were met, whatever x was."""
        for valley in valleys:
            far = TUNING.merged * self.sizes.y_size(valley.z)
            if len(self.valleys) < TUNING.remembered and all(size(valley.z - known) > far for known in self.valleys):
                self.valleys.append(valley.z)

    def _explore(self, i: int, scales: Scales) -> None:
        """Solve the lower level at some x far and near; plan passes from those that may lead to another solution."""
        self.explored = True
        for _, x, ys in self._promising(self.results[i]):
            self._add(Start("from another x", TUNING.faithful * scales.starts[-1], x, ys[0], ys[1:]))

    def _promising(self, best: Result) -> list[tuple[float, Tensor, list[Tensor]]]:
        """Some x at which F is less than at the best, or which F rises from on the way there; with F, and with lower points."""
        levels = self.levels
        found: list[tuple[float, Tensor, list[Tensor]]] = []
        doubtful = self.several or len(self.valleys) > 1 or bool(self._rivals(best)[0])
        allowed = self._allowed() if doubtful else min(self.left(), int(TUNING.glance * levels.spent))
        with levels.until(levels.spent + allowed), contextlib.suppress(BudgetError):
            found.extend(self._lowest(x, best.y) for x in self.samples(best.x))
            found.sort(key=lambda point: point[0])
            if not self.several:  # only where F rises on the way to the best
                humps = [self._lowest(0.5 * (x + best.x), best.y)[0] > F for F, x, _ in found[: TUNING.explored]]
                found = [point for point, hump in zip(found, humps, strict=False) if hump or point[0] < best.F]
        return [point for point in found[: TUNING.explored] if math.isfinite(point[0])]

    def _confirm(self, i: int, scales: Scales) -> None:
        """Where several solutions were found, and the best of them once, plan passes that may find it again."""
        best, self.confirmed = self.results[i], True
        if not self.sure:
            for x in itertools.islice(self.samples(best.x), TUNING.confirming):
                self._add(Start("once more, from another x", scales.starts[0], x, best.y, []))

    def _lowest(self, x: Tensor, y: Tensor) -> tuple[float, Tensor, list[Tensor]]:
        """F in the lowest valley that is known at x, x, and the bottoms of all of them, the lowest first.

        Where the nearest solution is meant, it is the only one.
        """
        if self.levels.oracle.selection.vanishes:
            y = respond(self.levels, self.sizes, x).y
            return self.levels.upper(y)[0], x, [y]
        search = self._search(x, y, solved=False)
        for start in (y, *((*self.valleys, *itertools.islice(search.random(), 2)) if self.several else ())):
            search.descend(start)
        valleys = sorted(search.valleys, key=lambda valley: valley.value)[: TUNING.remembered]
        if not valleys:
            return math.inf, x, []
        self._note(valleys[:1])
        return self.levels.upper(valleys[0].z)[0], x, [valley.z for valley in valleys]

    def samples(self, x: Tensor) -> Iterator[Tensor]:
        """Points of X: between its bounds where there are such, spread over each coordinate; elsewhere -x and around x."""
        low, high = self.levels.x_bounds()
        held = torch.isfinite(low) & torch.isfinite(high)
        generator = torch.Generator().manual_seed(len(x))
        parts = torch.rand(TUNING.samples, len(x), generator=generator, dtype=torch.float64, device="cpu").argsort(0)
        units, away = self._units(x), -2 * x
        for k, part in enumerate(parts.to(x)):
            share = (part + torch.rand(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)) / TUNING.samples
            yield self.levels.project(torch.where(held, low + share * (high - low), x + away))
            if k % 2:  # on the other side
                away = -away
                continue
            d = torch.randn(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)
            away = TUNING.wider ** (k // 2 % 2) * units * d

    def other_side(self, x: Tensor) -> Tensor:
        """A point of X whose coordinates are as far from x as those of x0 or of 0 are, each on a random side."""
        generator = torch.Generator().manual_seed(len(x))
        signs = torch.randint(0, 2, (len(x),), generator=generator, device="cpu").to(x) * 2 - 1
        return self.levels.project(x + signs * self._units(x))

    def _units(self, x: Tensor) -> Tensor:
        """How far from x other solutions may be: the size of each coordinate, or how far it has gone."""
        units = torch.maximum(x.abs(), (x - self.sizes.x0).abs())
        return torch.where(units > 0, units, self.sizes.x_size(x) / math.sqrt(len(x)))

    def _look_beyond(self, i: int, upper: Callable[[Tensor], float]) -> bool:
        """Note whether F stays as low when the coordinates of x that went furthest go twice as far, or by the size of x.

        ``upper`` is F as a function of x. Returns False where F stays as low, but does not stay the same further away, so that
        another solution may lie there.
        """
        sizes, levels, result = self.sizes, self.levels, self.results[i]
        x, moved = result.x, result.x - sizes.x0
        distance = moved.abs()
        if not size(moved) > sizes.tol * sizes.x_size(x):
            return True
        furthest = distance >= 0.5 * distance.max()
        if size(moved) <= TUNING.moved * sizes.x_size(x):  # a start near the solution says nothing about what is far
            moved = moved * (sizes.x_size(x) / size(moved))
        beyond = torch.where(furthest, x + TUNING.beyond * moved, x)
        if levels.constrained and not torch.equal(levels.project(beyond), beyond):  # X holds them
            return True
        slack = TUNING.better if levels.oracle.selection.vanishes else sizes.tol

        def rise(share: float) -> float:
            return upper(torch.where(furthest, x + share * moved, x)) - result.F

        if not rise(1.0) <= slack * result.spread:
            return True
        message = (
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, for example with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
        )
        self.results[i] = result._replace(verdict=Verdict(Status.AT_INFINITY, message))
        return all(abs(rise(share)) <= slack * result.spread for share in TUNING.further)

    def _upper_at(self, y: Tensor, x: Tensor) -> float:
        """F at another x, with the response there, or the lowest point of the lower level that is found from y."""
        if self.levels.oracle.selection.vanishes:
            return self.levels.upper(respond(self.levels, self.sizes, x).y)[0]
        search = self._search(x, y, solved=False)
        if self.several:
            search.run([y, *self.valleys], self._allowed())
        else:
            search.descend(y)
        return self.levels.upper(search.lowest.z)[0] if search.valleys else math.nan

    def _add(self, start: Start) -> bool:
        """Plan a pass, if there may be another."""
        may = len(self.results) + len(self.plan) < TUNING.passes and self.left() > TUNING.least_pass
        if may:
            self.plan.append(start)
        return may

    def _fall_back(self, result: Result, lowest: LowerPoint, evidence: Evidence) -> None:
        """Add the lowest point of the lower level at the x of a refuted result, where no further pass can start from it."""
        F = self.levels.upper(lowest.z)[0]
        message = "A better point of the lower level was found at this x, and could not be used to improve x."
        end = Verdict(Status.LOCAL, message)
        evidence = evidence._replace(excess=0.0)
        self.results.append(result._replace(y=lowest.z, F=F, lower=lowest.value, verdict=end, evidence=evidence))

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps need, in plain tensors, numbers and text."""
        return {
            "results": [plain(result) for result in self.results],
            "plan": [tuple(start) for start in self.plan],
            "valleys": self.valleys,
            **{name: getattr(self, name) for name in FLAGS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another judgement was."""
        self.results = [restored(saved) for saved in state["results"]]
        self.plan = [Start(*saved) for saved in state["plan"]]
        self.valleys = list(state["valleys"])
        for name in FLAGS:
            setattr(self, name, state[name])
