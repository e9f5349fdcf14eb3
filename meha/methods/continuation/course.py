"""The course of a run: passes, the search of the lower level at their ends, and the choice between their results."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meha._running import Numbers
from meha._verdicts import Status, Verdict
from meha.methods._curvatures import describe
from meha.methods._levels import BudgetError, Levels, LowerPoint
from meha.methods._quasi_newton import Pairs, size
from meha.methods._verification import Evidence, Search
from meha.methods.continuation.anew import compare, respond, select, told
from meha.methods.continuation.passes import Pass, Result, Start
from meha.methods.continuation.scales import Scales, measure
from meha.methods.continuation.tuning import TUNING

__all__ = ["Course"]

STARTS = ("upper level first", "lower level first")
"""The first two passes."""


class Course:
    """Passes, one step at a time; after them, y is verified, and what is found gives rise to further passes.

    Args:
        levels: the problem.
        tol, both_starts, max_gradients: those of the method.

    Attributes:
        plan: the passes to come.
        results: those of the passes that are over.
        valleys: the lowest points of valleys of the lower level that were met, whatever x was.
        several: whether some of them differ in height, at some x.
        explored: whether other x were tried.
    """

    def __init__(self, levels: Levels, tol: float, both_starts: bool, max_gradients: int) -> None:
        self.levels, self.tol, self.both_starts, self.max_gradients = levels, tol, both_starts, max_gradients
        self.scales: Scales | None = None
        self.plan: list[Start] = []
        self.results: list[Result] = []
        self.now: Pass | None = None
        self.valleys: list[Tensor] = []
        self.several = self.explored = False

    @property
    def over(self) -> bool:
        """Whether all passes are done."""
        return bool(self.results) and self.now is None

    @property
    def best(self) -> int:
        """The result to return: y may not be refuted, then F counts; the first unless another is clearly better."""
        least = TUNING.better * max(0.0, *(result.spread for result in self.results), 0.0)
        best = 0
        for i, other in enumerate(self.results):
            worth, others = _worth(self.results[best]), _worth(other)
            if others > worth or (others == worth and least < self.results[best].F - other.F):
                best = i
        return best

    @property
    def verdict(self) -> Verdict | None:
        """The end of the best pass, and what is known about its y; None while there is something to do."""
        if not self.over:
            return None
        best = self.results[self.best]
        end = told(best, _judged(best))
        rivals = [result.F for result in self.results if self._rivals(result, best)]
        if not rivals:
            return end
        note = f"Another start ended at another local solution, F = {min(rivals):.6g}; there may be more."
        return replace(end, message=f"{end.message} {note}")

    def _rivals(self, result: Result, best: Result) -> bool:
        """Whether a result is a solution as well, as far as is known, and another one."""
        same = max(TUNING.agreement * self.tol, TUNING.least_agreement)
        apart = abs(result.F - best.F) > same * max(best.spread, result.spread, abs(best.F))
        return result is not best and _worth(result) == _worth(best) and apart

    def _near(self, a: Result, b: Result) -> bool:
        """Whether two results are the same point, as far as their accuracy shows."""
        assert self.scales is not None
        same = max(TUNING.agreement * self.scales.tol, TUNING.least_agreement)
        return size(a.x - b.x) <= same * self.scales.x_size(a.x) and size(a.y - b.y) <= same * self.scales.y_size(a.y)

    @property
    def agree(self) -> bool:
        """Whether the first two passes ended at the same point, or with the same F."""
        assert self.scales is not None
        a, b = self.results[0], self.results[: len(self.scales.starts)][-1]
        alike = abs(a.F - b.F) <= TUNING.least_agreement * max(a.spread, b.spread, abs(a.F))
        return a is b or ((self._near(a, b) or alike) and _worth(a) == _worth(b))

    def advance(self) -> Numbers:
        """Take a step, and put the point into the variables at which the run would end now."""
        levels = self.levels
        if self.scales is None:
            self.scales = measure(levels, self.tol, self.both_starts)
            pairs = zip(STARTS, self.scales.starts, strict=False)
            self.plan = [Start(name, c, self.scales.x0, self.scales.y0, []) for name, c in pairs]
        now = self.now = self.now or self._pass()
        levels.move(now.x)
        with levels.until(self.max_gradients):
            numbers = now.step() | {"run": len(self.results) + 1}
            if now.result is not None:
                self.results.append(now.result)
                with contextlib.suppress(BudgetError):
                    if not self.plan:
                        self._judge(now.envelope.solve_thetas[0].pairs)
                self.now = self._pass() if self.plan else None
        answer = self.results[self.best] if self.results else now
        levels.move(answer.x, answer.y)
        return numbers

    def _left(self) -> int:
        """The gradients of f that may still be taken."""
        return self.max_gradients - self.levels.oracle.counts.lower

    def _pass(self) -> Pass:
        assert self.scales is not None
        first = len(self.results) < len(self.scales.starts)
        allowed = TUNING.share_first * self.max_gradients if first else TUNING.share_next * self._left()
        return Pass(self.levels, self.scales, self.plan.pop(0), int(min(allowed, self._left())))

    def _judge(self, pairs: Pairs) -> None:
        """Verify the best result; plan further passes where it is refuted, or where there are other valleys.

        Args:
            pairs: what the last pass has learned about the curvature of f.
        """
        assert self.scales is not None
        self._pairs = pairs
        if self.scales.proximal:
            self._verify_response(self.best)
            return
        while not self.plan:
            i = self.best
            result = self.results[i]
            if result.verdict.status is Status.DIVERGED or result.evidence is not None:
                break
            self._verify(i)
            if not self.plan and (self.several or len(self.valleys) > 1) and not self.explored:
                self._explore(self.best)
        if not self.plan and self.results[self.best].verdict.status is not Status.DIVERGED:
            self._look_beyond(self.best)
            if not self.scales.simple and self.levels.oracle.selection.response is None:
                i = self.best
                self.results[i] = compare(self.levels, self.scales, self.results[i])

    def _verify_response(self, i: int) -> None:
        """Find the response at the x of a result; no point of the lower level may be lower."""
        scales, result = self.scales, self.results[i]
        assert scales is not None
        if result.verdict.status is Status.DIVERGED:
            return
        self.results[i] = result = select(self.levels, scales, result)
        search = self._search(result.x, result.y, solved=True)
        self.results[i] = result._replace(evidence=search.run([scales.y0], self._allowed()))
        self._look_beyond(i)

    def _search(self, x: Tensor, y: Tensor, *, solved: bool) -> Search:
        """A search of the lower level at x, around y."""
        scales, levels = self.scales, self.levels
        assert scales is not None
        levels.move(x)
        scale, t = max(scales.y_size(y), scales.y_largest), 1 / (scales.curvatures["f_yy"] or 1.0)
        return Search(levels, y, self._pairs, t, scale, scales.tol * scales.x_size(x), solved=solved)

    def _allowed(self) -> int:
        return min(self._left(), max(TUNING.least_search, int(TUNING.search * self.levels.oracle.counts.lower)))

    def _verify(self, i: int) -> None:
        """Search the lower level at the x of a result; a lower point gives rise to passes that know of it."""
        scales, levels, result = self.scales, self.levels, self.results[i]
        assert scales is not None
        search = self._search(result.x, result.y, solved=True)
        given = [other.y for other in self.results if other is not result] + result.others + self.valleys + [scales.y0]
        evidence = search.run(given, self._allowed())
        own, valleys = search.valleys[0], sorted(search.valleys, key=lambda valley: valley.value)
        self._note(valleys)
        self.several = self.several or evidence.values > 1
        if evidence.excess:
            self.results = [r._replace(evidence=evidence) if self._near(r, result) else r for r in self.results]
            others = [valley.z for valley in valleys if valley is not own][: TUNING.remembered]
            holding = TUNING.holding * abs(levels.upper(others[0])[0] - result.F) / evidence.excess
            self._add(Start("back from a higher valley", scales.starts[0], result.x, result.y, others))
            c = max(scales.starts[-1], holding)
            if not self._add(Start("from a lower valley", c, result.x, others[0], [result.y, *others[1:]])):
                self._fall_back(result, valleys[0], evidence)
            return
        F = levels.upper(own.z)[0]
        self.results[i] = result._replace(y=own.z, F=F, lower=own.value, evidence=evidence)
        for valley in valleys:
            equal = valley is not own and valley.value <= own.value + search.equal(valley)
            if equal and levels.upper(valley.z)[0] < F - TUNING.better * max(result.spread, 0.0):
                self._add(Start("from a valley of the same height", scales.starts[-1], result.x, valley.z, [own.z]))
                break

    def _note(self, valleys: Sequence[LowerPoint]) -> None:
        """Remember the lowest points of valleys that were met, whatever x was."""
        assert self.scales is not None
        for valley in valleys:
            far = TUNING.merged * self.scales.y_size(valley.z)
            if len(self.valleys) < TUNING.remembered and all(size(valley.z - known) > far for known in self.valleys):
                self.valleys.append(valley.z)

    def _explore(self, i: int) -> None:
        """Solve the lower level at some x far and near; plan passes from those that may lead to another solution."""
        scales, levels, best = self.scales, self.levels, self.results[i]
        assert scales is not None
        self.explored = True
        found: list[tuple[float, Tensor, list[Tensor]]] = []
        with levels.until(levels.oracle.counts.lower + self._allowed()), contextlib.suppress(BudgetError):
            found.extend(self._lowest(x, best.y) for x in self._samples(best.x))
            found.sort(key=lambda point: point[0])
            if not self.several:  # only where F rises on the way to the best
                humps = [self._lowest(0.5 * (x + best.x), best.y)[0] > F for F, x, _ in found[: TUNING.explored]]
                found = [point for point, hump in zip(found, humps, strict=False) if hump or point[0] < best.F]
        for F, x, ys in found[: TUNING.explored]:
            if math.isfinite(F):
                self._add(Start("from another x", scales.starts[-1], x, ys[0], ys[1:]))

    def _lowest(self, x: Tensor, y: Tensor) -> tuple[float, Tensor, list[Tensor]]:
        """F in the lowest valley that is known at x, x, and the bottoms of all of them, the lowest first."""
        search = self._search(x, y, solved=False)
        for start in (y, *(self.valleys if self.several else []), *itertools.islice(search.random(), 2)):
            search.descend(start)
        valleys = sorted(search.valleys, key=lambda valley: valley.value)[: TUNING.remembered]
        if not valleys:
            return math.inf, x, []
        self._note(valleys[:1])
        return self.levels.upper(valleys[0].z)[0], x, [valley.z for valley in valleys]

    def _samples(self, x: Tensor) -> Iterator[Tensor]:
        """Random points of X: between its bounds where there are such, around x elsewhere."""
        assert self.scales is not None
        low, high = self.levels.x_bounds()
        held = torch.isfinite(low) & torch.isfinite(high)
        generator = torch.Generator().manual_seed(len(x))
        for i in range(TUNING.samples):
            share = (i + torch.rand(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)) / TUNING.samples
            d = torch.randn(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x)
            away = x + self.scales.x_size(x) / math.sqrt(len(x)) * d
            yield self.levels.project(torch.where(held, low + share * (high - low), away))

    def _look_beyond(self, i: int) -> None:
        """Note whether F stays as low when the coordinates of x that went furthest go twice as far, or by the size of x."""
        scales, levels, result = self.scales, self.levels, self.results[i]
        assert scales is not None
        x, moved = result.x, result.x - scales.x0
        distance = moved.abs()
        if not size(moved) > scales.tol * scales.x_size(x):
            return
        furthest = distance >= 0.5 * distance.max()
        if size(moved) <= TUNING.moved * scales.x_size(x):  # a start near the solution says nothing about what is far
            moved = moved * (scales.x_size(x) / size(moved))
        beyond = torch.where(furthest, x + TUNING.beyond * moved, x)
        if levels.constrained and not torch.equal(levels.project(beyond), beyond):  # X holds them
            return
        F = self._upper_at(torch.where(furthest, x + moved, x), result.y)
        slack = TUNING.better if scales.proximal else scales.tol
        if not result.F + slack * result.spread >= F:
            return
        message = (
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, for example with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
        )
        self.results[i] = result._replace(verdict=Verdict(Status.AT_INFINITY, message))

    def _upper_at(self, x: Tensor, y: Tensor) -> float:
        """F at another x, with the response there, or the lowest point of the lower level that is found from y."""
        assert self.scales is not None
        if self.scales.proximal:
            fresh = respond(self.levels, self.scales, x)
            return self.levels.upper(fresh.y)[0]
        search = self._search(x, y, solved=False)
        if self.several:
            search.run([y, *self.valleys], self._allowed())
        else:
            search.descend(y)
        return self.levels.upper(search.lowest.z)[0] if search.valleys else math.nan

    def _add(self, start: Start) -> bool:
        """Plan a pass, if there may be another."""
        may = len(self.results) + len(self.plan) < TUNING.passes and self._left() > TUNING.least_pass
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

    def report(self) -> dict[str, str]:
        """What is known about the problem, how c grew, which accuracy was reached, and what the other passes found."""
        if self.scales is None:
            return {}
        lines = {"problem": f"{describe(self.scales.curvatures)}; balanced at c = {self.scales.balance:.2g}"}
        if not self.results:
            return lines
        best = self.results[self.best]
        lines["course"] = f"c from {best.c[0]:.2g} to {best.c[1]:.2g} in {best.stages} stages"
        at = f"gap {best.gap:.1e} and stationarity {best.residual:.1e} at the last c"
        lines["accuracy"] = f"{self.scales.name} to about {best.bias:.1e} (an estimate, not a bound); {at}"
        if best.evidence is not None:
            lines["lower"] = str(best.evidence)
        if best.fresh is not None:
            lines["fresh"] = f"F = {best.fresh:.6g} at the lower solution nearest to y0"
        if len(self.results) == 2 and self.agree:
            lines["starts"] = "upper level first and lower level first agree"
        elif len(self.results) > 1:
            lines["starts"] = "; ".join(_told(result, result is best) for result in self.results)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        if self.scales is None:
            return {}
        results = [_plain(result) for result in self.results]
        plan = [tuple(start) for start in self.plan]
        own = {"valleys": self.valleys, "several": self.several, "explored": self.explored, "plan": plan, "results": results}
        return own | {"scales": vars(self.scales), "now": self.now and self.now.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        self.scales = self.now = None
        self.results = [_result(saved) for saved in state.get("results", [])]
        self.plan = [Start(*saved) for saved in state.get("plan", [])]
        self.valleys = state.get("valleys", [])
        self.several, self.explored = (state.get(name, False) for name in ("several", "explored"))
        if state:
            self.scales = Scales(**state["scales"])
            self.levels.curvatures = self.scales.curvatures
            if state["now"] is not None:
                self.now = Pass(self.levels, self.scales, Start("", 1.0, self.scales.x0, self.scales.y0, []), 0)
                self.now.load_state_dict(state["now"])


def _judged(result: Result) -> Verdict:
    """The end of a pass in the light of what is known about its y."""
    end, evidence = result.verdict, result.evidence
    if end.status is not Status.CONVERGED:
        return end
    if evidence is None:
        doubt = "y could not be verified, since no gradients of f were left; allow more (max_gradients)"
    elif evidence.excess:
        doubt = f"A better point of the lower level was found, and could not be used: {evidence}"
    elif not evidence.certain:
        doubt = f"A better point of the lower level may exist: {evidence}"
    else:
        return Verdict(Status.CONVERGED, f"{end.message} {evidence}.")
    return Verdict(Status.LOCAL, f"{end.message} {doubt}.")


def _told(result: Result, best: bool) -> str:
    """A pass in a few words."""
    refuted = result.evidence is not None and result.evidence.excess > 0
    end = "diverged" if result.verdict.status is Status.DIVERGED else f"F = {result.F:.6g}"
    return (
        f"{result.start}: {end}"
        + (", in a valley that is not the lowest" if refuted else "")
        + (" (the answer)" if best else "")
    )


def _worth(result: Result) -> tuple[bool, bool, bool]:
    """What counts before F: whether there is an answer, whether y is not refuted, whether the lower level was solved."""
    refuted = result.evidence is not None and result.evidence.excess > 0
    return result.verdict.status is not Status.DIVERGED, not refuted, result.solved


def _plain(result: Result) -> dict[str, Any]:
    verdict, evidence = result.verdict, result.evidence
    return result._asdict() | {"verdict": (verdict.status.value, verdict.message), "evidence": evidence and tuple(evidence)}


def _result(saved: Mapping[str, Any]) -> Result:
    status, message = saved["verdict"]
    evidence = saved["evidence"] and Evidence(*saved["evidence"])
    return Result(**{**saved, "verdict": Verdict(Status(status), message), "evidence": evidence})
