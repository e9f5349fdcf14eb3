"""The course of a run: the second-order engine first, then passes with a growing penalty where it cannot answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from meha._running import Numbers
from meha._verdicts import Status, Verdict
from meha.methods import _curvatures as curvatures
from meha.methods._levels import BudgetError, Levels
from meha.methods._quasi_newton import Pairs
from meha.methods.continuation.judgement import Judgement
from meha.methods.continuation.passes import Pass
from meha.methods.continuation.results import Result, Start, describe
from meha.methods.continuation.scales import Scales, Sizes, measure
from meha.methods.continuation.tuning import TUNING
from meha.methods.newton import Engine, unknown_faces

__all__ = ["Course"]

STARTS = ("upper level first", "lower level first")
"""The first two passes."""

SECOND_ORDER = "second order"
"""The result of the engine."""


class Course:
    """Steps of the engine until it has an answer that stands, or of passes and what their judgement asks for.

    Args:
        levels: the problem.
        tol, second_order, both_starts, max_gradients: those of the method.

    Attributes:
        engine: the second-order engine; None where it is not used, or has ended.
        ended: how it ended, or why it was not used, in words.
        scales: what was measured before the first pass; None before.
        now: the present pass.
        over: whether there is nothing left to do.
    """

    def __init__(self, levels: Levels, tol: float, second_order: bool, both_starts: bool, max_gradients: int) -> None:
        self.levels, self.both_starts, self.max_gradients = levels, both_starts, max_gradients
        self.sizes = Sizes.of(levels, tol)
        self.judgement = Judgement(levels, self.sizes, self._left)
        self.scales: Scales | None = None
        self.now: Pass | None = None
        self.over = False
        self.ended = self._refusal() if second_order else ""
        self.engine = self._engine() if second_order and not self.ended else None

    def _refusal(self) -> str:
        """Why the engine cannot take the problem; empty if it can."""
        levels, problem = self.levels, self.levels.oracle.problem
        if problem.simple:
            return "not used, since there is no x"
        if levels.x.has_modules or levels.y.has_modules:
            return "not used with modules"
        unknown = unknown_faces(problem, levels.y)
        return f"not used with {unknown}, whose faces are curved or unknown" if unknown else ""

    def _engine(self) -> Engine:
        levels = self.levels
        allowed = TUNING.share_first * self.max_gradients
        return Engine(levels.oracle, levels.x, levels.y, self.sizes.tol, allowed, levels.clock)

    def _left(self) -> int:
        """The gradients of f that may still be taken."""
        return self.max_gradients - self.levels.spent

    @property
    def verdict(self) -> Verdict | None:
        """The end of the best attempt, and what is known about its y; None while there is something to do."""
        return self.judgement.verdict if self.over else None

    def advance(self) -> Numbers:
        """Take a step, and put the point into the variables at which the run would end now."""
        begin = time.perf_counter()
        numbers = self._advance_engine(self.engine) if self.engine is not None else self._advance_pass()
        results = self.judgement.results
        if results:
            answer = results[self.judgement.best]
            self.levels.move(answer.x, answer.y)
        self.levels.clock.seconds += time.perf_counter() - begin
        return numbers

    # The second-order engine

    def _advance_engine(self, engine: Engine) -> Numbers:
        numbers = {**engine.advance(), "run": len(self.judgement.results) + 1}
        if engine.verdict is None:
            return numbers
        self.engine = None
        self.ended = f"{engine.verdict.message} {engine}"
        if engine.verdict.status is Status.CONVERGED:
            self._confirm(engine)
        if not self.over:
            self.levels.move(self.sizes.x0, self.sizes.y0)
        return numbers

    def _confirm(self, engine: Engine) -> None:
        """Verify what the engine found, unless y may be one of several solutions nearby.

        The nearest of them, if that is meant, is then not known, and the point is no result.
        """
        levels, judgement, now = self.levels, self.judgement, engine.now
        determined, nearest = engine.determined, levels.oracle.selection.vanishes
        stands = not nearest if determined is None else determined
        if not stands:
            self.ended = f"The lower level may have other solutions nearby. {engine}"
            if nearest:
                return
        assert now is not None
        assert engine.verdict is not None
        assert now.response is not None
        at = now.response.at
        levels.curvatures = engine.lower.curvatures(at)
        inverse = engine.lower.inverse(at)
        judgement.pairs = Pairs.sized(TUNING.rough_pairs if inverse is None else TUNING.pairs, len(now.y), inverse=inverse)
        F, spread = levels.upper(now.y)[0], engine.highest - engine.lowest
        judgement.results = [
            Result(SECOND_ORDER, now.x, now.y, F, now.lower, True, spread, [], str(engine), str(engine.signs), engine.verdict)
        ]
        with levels.until(self.max_gradients), contextlib.suppress(BudgetError):
            if stands:
                self.over = judgement.confirms(engine.lower.model(at), engine.lower.convex, determined=bool(determined))

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
        return [result for result in self.judgement.results if result.start != SECOND_ORDER]

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
        lines["engine"] = "continuation" + (f"; second order: {self.ended}" if self.ended else "")
        if best.start == SECOND_ORDER:
            lines["engine"] = "second order" + ("; continuation found nothing better" if len(judgement.results) > 1 else "")
        lines["course"], lines["accuracy"], lines["time"] = best.course, best.accuracy, str(self.levels.clock)
        if best.evidence is not None:
            lines["lower"] = str(best.evidence)
        if best.fresh is not None:
            lines["fresh"] = f"F = {best.fresh:.6g} at the lower solution nearest to y0"
        passes = self._passes
        if len(judgement.results) == len(passes) == 2 and judgement.agree(*passes):
            lines["starts"] = "upper level first and lower level first agree"
        elif len(judgement.results) > 1:
            lines["starts"] = "; ".join(describe(result, best=result is best) for result in judgement.results)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        return {
            "engine": self.engine and self.engine.state_dict(),
            "ended": self.ended,
            "over": self.over,
            "judgement": self.judgement.state_dict(),
            "scales": self.scales and vars(self.scales),
            "now": self.now and self.now.state_dict(),
            "start": (self.sizes.x0, self.sizes.y0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        self.scales = self.now = None
        self.ended, self.over = state["ended"], state["over"]
        x0, y0 = state["start"]
        self.sizes = self.judgement.sizes = Sizes(x0, y0, self.sizes.tol, self.sizes.simple)
        self.engine = None if state["engine"] is None else self._engine()
        if self.engine is not None:
            self.engine.load_state_dict(state["engine"])
        self.judgement.load_state_dict(state["judgement"])
        if state["scales"] is not None:
            self.scales = self.sizes = self.judgement.sizes = Scales(**state["scales"])
            self.levels.curvatures = self.scales.curvatures
        if state["now"] is not None:
            assert self.scales is not None
            self.now = Pass(self.levels, self.scales, Start("", 1.0, self.scales.x0, self.scales.y0, []), 0)
            self.now.load_state_dict(state["now"])
