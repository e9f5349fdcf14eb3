"""The course of a run: the second-order engine first, then passes with a growing penalty where it cannot answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from meha._running import Numbers
from meha._verdicts import Verdict
from meha.methods import _curvatures as curvatures
from meha.methods._levels import BudgetError, Levels
from meha.methods.continuation.judgement import Judgement
from meha.methods.continuation.passes import Pass
from meha.methods.continuation.results import Result, Start, describe
from meha.methods.continuation.scales import Scales, Sizes, measure
from meha.methods.continuation.second_order import SecondOrder
from meha.methods.continuation.tuning import TUNING
from meha.methods.newton import Engine

__all__ = ["Course"]

STARTS = ("upper level first", "lower level first")
"""The first two passes."""


class Course:
    """Steps of the engine until it has an answer that stands, or of passes and what their judgement asks for.

    Args:
        levels: the problem.
        tol, second_order, both_starts, verify, max_gradients: those of the method.

    Attributes:
        second_order: the attempts of the second-order engine; None where it is not to be used.
        scales: what was measured before the first pass; None before.
        now: the present pass.
        over: whether there is nothing left to do.
    """

    def __init__(
        self, levels: Levels, tol: float, second_order: bool, both_starts: bool, verify: bool, max_gradients: int
    ) -> None:
        self.levels, self.both_starts, self.verify, self.max_gradients = levels, both_starts, verify, max_gradients
        self.sizes = Sizes.of(levels, tol)
        self.judgement = Judgement(levels, self.sizes, self._left)
        self.scales: Scales | None = None
        self.now: Pass | None = None
        self.over = False
        self.second_order = SecondOrder(levels, self.judgement, verify, max_gradients) if second_order else None

    def _left(self) -> int:
        """The gradients of f that may still be taken."""
        return self.max_gradients - self.levels.spent

    @property
    def verdict(self) -> Verdict | None:
        """The end of the best attempt, and what is known about its y; None while there is something to do."""
        if not self.over:
            return None
        return self.judgement.verdict if self.verify else self.judgement.unverified

    def advance(self) -> Numbers:
        """Take a step, and put the point into the variables at which the run would end now."""
        begin = time.perf_counter()
        second_order = self.second_order
        engine = None if second_order is None else second_order.engine
        numbers = self._advance_pass() if engine is None else self._advance_engine(engine)
        results = self.judgement.results
        if results:
            answer = results[self.judgement.best]
            self.levels.move(answer.x, answer.y)
        self.levels.clock.seconds += time.perf_counter() - begin
        return numbers

    def _advance_engine(self, engine: Engine) -> Numbers:
        assert self.second_order is not None
        numbers = self.second_order.advance(engine)
        if self.second_order.engine is None:
            self.over = self.second_order.answered
            if not self.over:
                self.levels.move(self.sizes.x0, self.sizes.y0)
        return numbers

    # Passes

    def _advance_pass(self) -> Numbers:
        levels, judgement = self.levels, self.judgement
        scales = self.scales = self.scales or self._measure()
        now = self.now = self.now or self._pass(scales)
        levels.move(now.x)
        with levels.until(self.max_gradients):
            numbers = now.step() | {"run": len(judgement.results) + 1}
            if now.result is not None:
                judgement.results.append(now.result)
                judgement.pairs = now.envelope.solve_thetas[0].pairs
                if self.verify or scales.proximal:  # where a response is meant, the judgement finds it
                    with contextlib.suppress(BudgetError):
                        judgement.judge(scales)
                self.over = not judgement.plan
                self.now = None if self.over else self._pass(scales)
        if not judgement.results:
            levels.move(now.x, now.y)
        return numbers

    def _measure(self) -> Scales:
        """Measure the scales, and plan the first passes."""
        scales = measure(self.levels, self.sizes, self.both_starts)
        self.sizes = self.judgement.sizes = scales
        pairs = zip(STARTS, scales.starts, strict=False)
        self.judgement.plan = [Start(name, c, scales.x0, scales.y0, []) for name, c in pairs]
        return scales

    @property
    def _passes(self) -> list[Result]:
        return [result for result in self.judgement.results if not result.second_order]

    def _pass(self, scales: Scales) -> Pass:
        first = len(self._passes) < len(scales.starts)
        allowed = TUNING.share_first * self.max_gradients if first else TUNING.share_next * self._left()
        return Pass(self.levels, scales, self.judgement.plan.pop(0), int(min(allowed, self._left())))

    # What is known

    def report(self) -> dict[str, str]:
        """What is known about the problem, which engine did what, which accuracy was reached, and what others found."""
        judgement, scales = self.judgement, self.scales
        lines = {}
        if scales is not None:
            lines["problem"] = f"{curvatures.describe(scales.curvatures)}; balanced at c = {scales.balance:.2g}"
        if not judgement.results:
            return lines
        best = judgement.results[judgement.best]
        passes, ended = self._passes, self.second_order and self.second_order.ended
        lines["engine"] = "continuation" + (f"; second order: {ended}" if ended else "")
        if best.second_order:
            lines["engine"] = "second order" + ("; continuation found nothing better" if passes else "")
        lines["course"], lines["accuracy"], lines["time"] = best.course, best.accuracy, str(self.levels.clock)
        if best.evidence is not None:
            lines["lower"] = str(best.evidence)
        if best.second_order and self.second_order is not None and self.second_order.seen:
            lines["elsewhere"] = self.second_order.seen
        if best.fresh is not None:
            lines["fresh"] = f"F = {best.fresh:.6g} at the lower solution nearest to y0"
        if len(judgement.results) == len(passes) == 2 and judgement.agree(*passes):
            lines["starts"] = "upper level first and lower level first agree"
        elif len(judgement.results) > 1 and not passes and all(judgement.agree(best, other) for other in judgement.results):
            lines["starts"] = f"{len(judgement.results)} starts in x agree"
        elif len(judgement.results) > 1:
            lines["starts"] = "; ".join(describe(result, best=result is best) for result in judgement.results)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        return {
            "second_order": self.second_order and self.second_order.state_dict(),
            "over": self.over,
            "judgement": self.judgement.state_dict(),
            "sizes": vars(self.sizes),
            "measured": self.scales is not None,
            "curvatures": self.levels.curvatures,
            "now": self.now and self.now.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        self.now, self.over = None, state["over"]
        self.scales = Scales(**state["sizes"]) if state["measured"] else None
        self.sizes = self.judgement.sizes = self.scales or Sizes(**state["sizes"])
        self.levels.curvatures = state["curvatures"]
        if self.second_order is not None:
            self.second_order.load_state_dict(state["second_order"])
        self.judgement.load_state_dict(state["judgement"])
        if state["now"] is not None:
            assert self.scales is not None
            self.now = Pass(self.levels, self.scales, Start("", 1.0, self.scales.x0, self.scales.y0, []), 0)
            self.now.load_state_dict(state["now"])
