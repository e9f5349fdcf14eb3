"""The second-order engine inside a run: from the start, then from other x, to see whether its answer is the best."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meha._running import Numbers
from meha._verdicts import Status
from meha.methods._levels import BudgetError, Levels
from meha.methods._quasi_newton import Pairs, size
from meha.methods.continuation.judgement import Judgement
from meha.methods.continuation.results import SECOND_ORDER, Result
from meha.methods.continuation.tuning import TUNING
from meha.methods.newton import Engine, unknown_faces
from meha.methods.newton.hyper import Value
from meha.methods.newton.survey import Survey

__all__ = ["SecondOrder"]

Look = tuple[float, Tensor, Tensor]
"""F, x and y."""

SAVED = ("ended", "answered", "cost", "spent", "looked", "tried", "elsewhere", "seen")


class SecondOrder:
    """Steps of the engine: from x0 to a verified answer, then from other x, as often as the size of x lets them mean something.

    With few coordinates of x, attempts begin beyond the humps of F that are seen from the answer, and the best of several
    solutions must appear three times. With many, one other start must end at the answer.

    Args:
        levels: the problem.
        judgement: where its results go, and who verifies them.
        verify, max_gradients: those of the method.

    Attributes:
        engine: the present attempt; None where it is not used, or has ended.
        ended: how it ended, or why it was not used, in words.
        answered: whether its answer stands, so that nothing has to follow.
        cost, looked: evaluations of the hyper-objective in the attempt from the start, and in looks at other x.
        spent: gradients of f, and products with its Hessian, in the attempt from the start.
        tried: number of further attempts.
        elsewhere: x and y from which more begin.
        seen: how F changes between the answer and other x, in words; empty where this was not found out.
    """

    def __init__(self, levels: Levels, judgement: Judgement, verify: bool, max_gradients: int) -> None:
        self.levels, self.judgement, self.verify, self.max_gradients = levels, judgement, verify, max_gradients
        self.ended, self.answered = self._refusal(), False
        self.cost = self.spent = self.looked = self.tried = 0
        self.seen = ""
        self.elsewhere: list[tuple[Tensor, Tensor]] = []
        self.engine = None if self.ended else self._engine()

    @property
    def tol(self) -> float:
        """The accuracy of the answer."""
        return self.judgement.sizes.tol

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
        levels, allowed = self.levels, TUNING.share_engine * self.max_gradients
        return Engine(levels.oracle, levels.x, levels.y, self.tol, allowed, levels.clock)

    def advance(self, engine: Engine) -> Numbers:
        """Take a step of the present attempt; where it is over, judge it, and begin the next one."""
        numbers = {**engine.advance(), "run": len(self.judgement.results) + 1}
        self.judgement.sizes.y_largest = engine.lower.largest
        first = not self.answered
        if engine.verdict is None and (first or not self._arrived(engine)):
            return numbers
        with self.levels.until(self.max_gradients), contextlib.suppress(BudgetError):
            if first:
                self._first(engine)
            elif self._further(engine):
                return numbers
        if self.answered and self.engine is not None:
            self._next(engine)
        return numbers

    # The attempt from the start

    def _first(self, engine: Engine) -> None:
        """Verify what the engine found, unless y may be one of several solutions nearby.

        The nearest of them, if that is meant, is then not known, and the point is no result.
        """
        assert engine.verdict is not None
        self.engine, self.ended, self.spent = None, f"{engine.verdict.message} {engine}", self.levels.spent
        if engine.verdict.status is not Status.CONVERGED:
            return
        determined, nearest = engine.determined, self.levels.oracle.selection.vanishes
        stands = not nearest if determined is None else determined
        if stands or not nearest:
            self.judgement.results = [self._result(engine, SECOND_ORDER)]
        if not stands:
            self.ended = f"The lower level may have other solutions nearby. {engine}"
        elif not self.verify:
            self.answered = True
        else:
            self._verify(engine)

    def _verify(self, engine: Engine) -> None:
        """See whether the only result stands, and from which x attempts may lead to another one."""
        others = self._others(engine)
        survey = self._stands(engine, torch.cat(others))
        if survey is None:
            return
        self.answered, self.cost = True, engine.objective.calls
        if self.judgement.results[0].verdict.status is Status.CONVERGED:  # not at infinity
            self.elsewhere = self._look_around(survey.upper(), len(others[0]))
            self.looked = engine.objective.calls - self.cost
            self.engine, engine.lower.limit = engine, self.max_gradients

    def _result(self, engine: Engine, name: str) -> Result:
        now = engine.now
        assert now is not None
        assert engine.verdict is not None
        self.levels.move(now.x)
        F = self.levels.upper(now.y)[0]
        return Result(
            name,
            now.x,
            now.y,
            F,
            now.lower,
            True,
            engine.trail.spread,
            [],
            str(engine),
            str(engine.signs),
            engine.verdict,
            gradient=now.gradient,
        )

    def _stands(self, engine: Engine, others: Tensor) -> Survey | None:
        """Verify the only result, where the engine is; returns what is seen from it, with F at other x."""
        now, levels, judgement = engine.now, self.levels, self.judgement
        assert now is not None
        assert now.response is not None
        at = now.response.at
        levels.curvatures = {**engine.shape.curvatures(at), "F_yy": self._upper_curvature(now.y)}
        inverse = engine.shape.inverse(at)
        judgement.pairs = Pairs.sized(TUNING.rough_pairs if inverse is None else TUNING.pairs, len(now.y), inverse=inverse)
        return judgement.confirms(engine, others)

    def _upper_curvature(self, y: Tensor) -> float:
        """The curvature of F in y along its gradient, which tells how far F would move y."""
        gradient = self.levels.upper(y)[2]
        slope = size(gradient)
        if not slope:
            return 0.0
        step = TUNING.displaced * self.judgement.sizes.y_size(y)
        return size(self.levels.upper(y - step / slope * gradient)[2] - gradient) / step

    # Further attempts

    def _others(self, engine: Engine) -> list[Tensor]:
        """Some x far and near, where these mean something, and points on the ways from the answer to them.

        Where g or Y makes F piecewise smooth, a way tells nothing, since each piece may have a solution of its own. Where x is
        one number, all ways lie on one line.
        """
        (best,) = self.judgement.results
        if not self.judgement.searchable:
            return [best.x.new_empty(0, len(best.x))]
        most = max(TUNING.least_look, int(TUNING.look * engine.objective.calls))
        samples = torch.stack(list(itertools.islice(self.judgement.samples(best.x), most)))
        if self.levels.bounded or len(best.x) == 1:
            return [samples]
        shares = TUNING.on_the_way if engine.batch.possible(best.x, best.y) else TUNING.half_way
        return [samples, *(best.x + share * (samples - best.x) for share in shares)]

    def _look_around(self, looks: list[Look], number: int) -> list[tuple[Tensor, Tensor]]:
        """Where attempts begin: x and y from which F does not fall all the way to the answer, those of least F first.

        Where ways tell nothing, they are all x that were looked at, and where these mean nothing, one on another side of the
        answer.

        Args:
            looks: what was found at the other x, with those on the ways.
            number: that of the ways.
        """
        (best,) = self.judgement.results
        if not self.judgement.searchable:
            return [(self.judgement.other_side(best.x), best.y)]
        if len(looks) > number or len(best.x) == 1:
            ways = [way for way in _ways(looks, best.x, number) if math.isfinite(way[-1][0])]
            looks = [way[-1] for way in ways if not _falls([best.F, *(F for F, _, _ in way)])]
            self.seen = f"F falls to the answer all the way from {len(ways) - len(looks)} of {len(ways)} other x"
        return [(x, y) for F, x, y in sorted(looks, key=lambda look: look[0]) if math.isfinite(F)]

    def _next(self, engine: Engine) -> None:
        """Begin the next attempt, if there is one to make."""
        sure = self.judgement.sure
        most, allowed = TUNING.repeats if sure else TUNING.most_repeats, self._allowed(sure=sure)
        if self.tried >= most or not self.elsewhere or engine.objective.calls >= allowed:
            self.engine = None
            return
        self.tried += 1
        if not self.judgement.searchable:
            engine.lower.limit = min(self.max_gradients, self.levels.spent + TUNING.repeat_large * self.spent)
        x, y = self.elsewhere.pop(0)
        engine.restart(x, y, max(self.tol, TUNING.repeat_tol), allowed)

    def _allowed(self, *, sure: bool) -> float:
        """The evaluations, in all, after which attempts end."""
        least, share = TUNING.least_repeat, TUNING.repeat
        if not self.judgement.searchable:
            share = TUNING.repeat_large
        elif not sure:
            least, share = TUNING.least_repeat_several, TUNING.repeat_several
        return self.cost + self.looked + max(least, share * self.cost)

    def _arrived(self, engine: Engine) -> bool:
        """Whether the present attempt is about to end at a known solution."""
        return self._known(engine) is not None

    def _known(self, engine: Engine) -> Result | None:
        """The solution at which the present attempt is about to end; None if it is not known."""
        now = engine.now
        assert now is not None
        if not math.isfinite(now.F):
            return None
        return next((result for result in self.judgement.results if self._joins(result, now, engine)), None)

    def _joins(self, result: Result, now: Value, engine: Engine) -> bool:
        """Whether an attempt is about to end at a result.

        It is there; or F between the two is as a convex quadratic function would have it. It may differ from that by more where
        the attempt has come close.
        """
        if self.judgement.near(result, now.x, now.y):
            return True
        if result.gradient is None:
            return False
        assert engine.start is not None
        way = now.x - result.x
        turn, rise = float((now.gradient - result.gradient) @ way), 0.5 * float((now.gradient + result.gradient) @ way)
        nearer = size(way) <= TUNING.nearer * size(engine.start[0] - result.x)
        noise = engine.eps**TUNING.resolved * (abs(now.F) + abs(result.F))
        return abs(now.F - result.F - rise) <= (TUNING.bowl if nearer else TUNING.exact_bowl) * turn + noise

    def _further(self, engine: Engine) -> bool:
        """Judge another attempt: it found a known solution; or another one, which it then finds accurately, and goes on."""
        judgement, now, end = self.judgement, engine.now, engine.verdict
        best = judgement.results[judgement.best]
        if now is None or not math.isfinite(now.F):
            return False
        lower = TUNING.better * max(best.spread, 0.0) < best.F - now.F
        if end is None:  # it arrived
            known = self._known(engine)
            assert known is not None
            judgement.results.append(known._replace(start=f"{SECOND_ORDER}, from another x"))
        elif engine.tol > self.tol and (end.status is Status.CONVERGED or (lower and end.status is Status.FINISHED)):
            engine.tol, engine.verdict = self.tol, None
            if lower:
                engine.objective.limit, engine.lower.limit = math.inf, self.max_gradients
            else:
                engine.objective.limit = self._allowed(sure=False)
            return True
        elif end.status is Status.CONVERGED or lower:
            self._add(engine, lower=lower)
        return False

    def _add(self, engine: Engine, *, lower: bool) -> None:
        """Add the result of the present attempt; a better one must stand like the first."""
        judgement = self.judgement
        before, result = judgement.results, self._result(engine, f"{SECOND_ORDER}, from another x")
        evidence = before[judgement.best].evidence
        if not lower:
            judgement.results = [*before, result._replace(evidence=evidence, spread=before[0].spread)]
            return
        assert engine.verdict is not None
        if engine.verdict.status is not Status.CONVERGED:
            judgement.results = [*before, result]
            return
        judgement.results = [result]
        self.answered = self._stands(engine, result.x.new_empty(0, len(result.x))) is not None
        judgement.results = [*judgement.results, *before]
        if not self.answered:
            self.engine = None

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        return {"engine": self.engine and self.engine.state_dict(), **{name: getattr(self, name) for name in SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another one was."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.engine = None if state["engine"] is None else self._engine()
        if self.engine is not None:
            self.engine.load_state_dict(state["engine"])


def _ways(looks: list[Look], x: Tensor, number: int) -> list[list[Look]]:
    """What was seen on each of a number of ways away from x; the ends of all come first, then one point on each, and so on.

    Where x is one number, there is a way to each point, over those before it on its side.
    """
    if len(x) > 1:
        return [[*looks[i + number :: number], looks[i]] for i in range(number)]
    sides = [sorted((p for p in looks if sign * float(p[1] - x) > 0), key=lambda p: abs(float(p[1] - x))) for sign in (1, -1)]
    return [side[: i + 1] for side in sides for i in range(len(side))]


def _falls(values: list[float]) -> bool:
    """Whether F never falls along a way, so that it falls all the way back to the answer, which is at its beginning.

    >>> _falls([1.0, 2.0, 4.0]), _falls([1.0, 3.0, 2.0]), _falls([1.0, 0.5])
    (True, False, False)
    """
    least = TUNING.hump * (values[-1] - values[0])
    return all(not further < nearer - least for nearer, further in itertools.pairwise(values))
