"""The second-order engine inside a run: from the start, then from other x, to see whether its answer is the best."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meha.engines.attempt import EngineKind, Result
from meha.engines.hyper_objective import HyperValue
from meha.engines.implicit_newton import HyperDescent, refusal
from meha.engines.tuning import TUNING
from meha.evidence.attempts import Attempts
from meha.evidence.sampling import Samples
from meha.lower.flat_problem import BudgetError, FlatProblem
from meha.method.method import Numbers
from meha.method.status import Status
from meha.numerics.limited_memory import LimitedMemory, vector_norm

__all__ = ["Multistart"]


Sample = tuple[float, Tensor, Tensor]
"""F, x and y."""

FROM_OTHER_X = "implicit Newton, from another x"
"""The name of attempts after the first."""

SAVED = ("ended", "answered", "cost", "spent", "looked", "tried", "elsewhere", "seen")


class Multistart:
    """Steps of the engine: from x0 to a verified answer, then from other x, as often as the size of x lets them mean something.

    With few coordinates of x, attempts begin beyond the humps of F that are seen from the answer, and the best of several
    solutions must appear three times. With many, one other start must end at the answer.

    Args:
        levels: the problem.
        attempts: where its results go, and who verifies them.
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

    def __init__(self, levels: FlatProblem, attempts: Attempts, verify: bool, max_gradients: int) -> None:
        self.levels, self.attempts, self.verify, self.max_gradients = levels, attempts, verify, max_gradients
        self.ended, self.answered = self._refusal(), False
        self.cost = self.spent = self.sampled = self.tried = 0
        self.seen = ""
        self.elsewhere: list[tuple[Tensor, Tensor]] = []
        self.engine = None if self.ended else self._engine()

    @property
    def tol(self) -> float:
        """The accuracy of the answer."""
        return self.attempts.sizes.tol

    def _refusal(self) -> str:
        """Why the engine cannot take the problem; empty if it can."""
        why = refusal(self.levels.oracle.problem, self.levels.x, self.levels.y)
        return f"not used, since {why}" if why else ""

    def _engine(self) -> HyperDescent:
        levels, allowed = self.levels, TUNING.newton_share * self.max_gradients
        return HyperDescent(levels.oracle, levels.x, levels.y, self.tol, allowed, levels.clock)

    def advance(self, engine: HyperDescent) -> Numbers:
        """Take a step of the present attempt; where it is over, judge it, and begin the next one."""
        numbers = {**engine.advance(), "run": len(self.attempts.results) + 1}
        self.attempts.sizes.y_largest = engine.lower.largest
        first = not self.answered
        if engine.verdict is None and (first or not self._has_joined(engine)):
            return numbers
        with self.levels.until(self.max_gradients), contextlib.suppress(BudgetError):
            if first:
                self._judge_first(engine)
            elif self._judge_attempt(engine):
                return numbers
        if self.answered and self.engine is not None:
            self._start_next(engine)
        return numbers

    # The attempt from the start

    def _judge_first(self, engine: HyperDescent) -> None:
        """Verify what the engine found, unless y may be one of several solutions nearby.

        The nearest of them, if that is meant, is then not known, and the point is no result.
        """
        assert engine.verdict is not None
        self.engine, self.ended, self.spent = None, f"{engine.verdict.message} {engine}", self.levels.spent
        if engine.verdict.status is not Status.CONVERGED:
            return
        determined, nearest = engine.determined, self.levels.oracle.response_term.vanishes
        stands = not nearest if determined is None else determined
        if stands or not nearest:
            self.attempts.results = [self._result(engine, "implicit Newton")]
        if not stands:
            self.ended = f"The lower level may have other solutions nearby. {engine}"
        elif not self.verify:
            self.answered = True
        else:
            self._verify(engine)

    def _verify(self, engine: HyperDescent) -> None:
        """See whether the only result stands, and from which x attempts may lead to another one."""
        others = self._points_to_sample(engine)
        samples = self._verify_result(engine, torch.cat(others))
        if samples is None:
            return
        self.answered, self.cost = True, engine.objective.calls
        if self.attempts.results[0].verdict.status is Status.CONVERGED:  # not at infinity
            self.elsewhere = self._promising_starts(samples.upper(), len(others[0]))
            self.sampled = engine.objective.calls - self.cost
            self.engine, engine.lower.limit = engine, self.max_gradients

    def _result(self, engine: HyperDescent, name: str) -> Result:
        now = engine.now
        assert now is not None
        assert engine.verdict is not None
        self.levels.move(now.x)
        F = self.levels.upper(now.y)[0]
        return Result(
            EngineKind.IMPLICIT_NEWTON,
            name,
            now.x,
            now.y,
            F,
            now.lower,
            True,
            engine.trail.spread,
            [],
            str(engine),
            str(engine.measures),
            engine.verdict,
            gradient=now.gradient,
        )

    def _verify_result(self, engine: HyperDescent, others: Tensor) -> Samples | None:
        """Verify the only result, where the engine is; returns what is seen from it, with F at other x."""
        now, levels, attempts = engine.now, self.levels, self.attempts
        assert now is not None
        assert now.response is not None
        at = now.response.at
        levels.curvatures = {**engine.shape.curvatures(at), "F_yy": self._upper_curvature(now.y)}
        inverse = engine.shape.inverse(at)
        attempts.pairs = LimitedMemory.sized(
            TUNING.rough_pairs if inverse is None else TUNING.pairs, len(now.y), inverse=inverse
        )
        return attempts.verify_newton(engine, others)

    def _upper_curvature(self, y: Tensor) -> float:
        """The curvature of F in y along its gradient, which tells how far F would move y."""
        gradient = self.levels.upper(y)[2]
        slope = vector_norm(gradient)
        if not slope:
            return 0.0
        step = TUNING.displaced * self.attempts.sizes.y_size(y)
        return vector_norm(self.levels.upper(y - step / slope * gradient)[2] - gradient) / step

    # Further attempts

    def _points_to_sample(self, engine: HyperDescent) -> list[Tensor]:
        """Some x far and near, where these mean something, and points on the ways from the answer to them.

        Where g or Y makes F piecewise smooth, a way tells nothing, since each piece may have a solution of its own. Where x is
        one number, all ways lie on one line.
        """
        (best,) = self.attempts.results
        if not self.attempts.few_coordinates:
            return [best.x.new_empty(0, len(best.x))]
        most = max(TUNING.least_samples, int(TUNING.samples_share * engine.objective.calls))
        samples = torch.stack(list(itertools.islice(self.attempts.samples(best.x), most)))
        if self.levels.bounded or len(best.x) == 1:
            return [samples]
        shares = TUNING.segment_points if engine.batch.possible(best.x, best.y) else TUNING.segment_middle
        return [samples, *(best.x + share * (samples - best.x) for share in shares)]

    def _promising_starts(self, looks: list[Sample], number: int) -> list[tuple[Tensor, Tensor]]:
        """Where attempts begin: x and y from which F does not fall all the way to the answer, those of least F first.

        Where ways tell nothing, they are all x that were looked at, and where these mean nothing, one on another side of the
        answer.

        Args:
            looks: what was found at the other x, with those on the ways.
            number: that of the ways.
        """
        (best,) = self.attempts.results
        if not self.attempts.few_coordinates:
            return [(self.attempts.other_side(best.x), best.y)]
        if len(looks) > number or len(best.x) == 1:
            ways = [way for way in _segments(looks, best.x, number) if math.isfinite(way[-1][0])]
            looks = [way[-1] for way in ways if not _is_monotone([best.F, *(F for F, _, _ in way)])]
            self.seen = f"F falls to the answer all the way from {len(ways) - len(looks)} of {len(ways)} other x"
        return [(x, y) for F, x, y in sorted(looks, key=lambda look: look[0]) if math.isfinite(F)]

    def _start_next(self, engine: HyperDescent) -> None:
        """Begin the next attempt, if there is one to make."""
        is_confident = self.attempts.is_confident
        most, allowed = TUNING.restarts if is_confident else TUNING.most_restarts, self._allowed(is_confident=is_confident)
        if self.tried >= most or not self.elsewhere or engine.objective.calls >= allowed:
            self.engine = None
            return
        self.tried += 1
        if not self.attempts.few_coordinates:
            engine.lower.limit = min(self.max_gradients, self.levels.spent + TUNING.restart_share_large_x * self.spent)
        x, y = self.elsewhere.pop(0)
        engine.restart(x, y, max(self.tol, TUNING.restart_tol), allowed)

    def _allowed(self, *, is_confident: bool) -> float:
        """The evaluations, in all, after which attempts end."""
        least, share = TUNING.least_restart, TUNING.restart_share
        if not self.attempts.few_coordinates:
            share = TUNING.restart_share_large_x
        elif not is_confident:
            least, share = TUNING.least_restart_several, TUNING.restart_share_several
        return self.cost + self.sampled + max(least, share * self.cost)

    def _has_joined(self, engine: HyperDescent) -> bool:
        """Whether the present attempt is about to end at a known solution."""
        return self._joined_result(engine) is not None

    def _joined_result(self, engine: HyperDescent) -> Result | None:
        """The solution at which the present attempt is about to end; None if it is not known."""
        now = engine.now
        assert now is not None
        if not math.isfinite(now.F):
            return None
        return next((result for result in self.attempts.results if self._joins(result, now, engine)), None)

    def _joins(self, result: Result, now: HyperValue, engine: HyperDescent) -> bool:
        """Whether an attempt is about to end at a result.

        It is there; or F between the two is as a convex quadratic function would have it. It may differ from that by more where
        the attempt has come close.
        """
        if self.attempts.same_point(result, now.x, now.y):
            return True
        if result.gradient is None:
            return False
        assert engine.start is not None
        way = now.x - result.x
        turn, rise = float((now.gradient - result.gradient) @ way), 0.5 * float((now.gradient + result.gradient) @ way)
        nearer = vector_norm(way) <= TUNING.joining_distance * vector_norm(engine.start[0] - result.x)
        noise = engine.eps**TUNING.resolved * (abs(now.F) + abs(result.F))
        return (
            abs(now.F - result.F - rise) <= (TUNING.quadratic_misfit if nearer else TUNING.quadratic_misfit_far) * turn + noise
        )

    def _judge_attempt(self, engine: HyperDescent) -> bool:
        """Judge another attempt: it found a known solution; or another one, which it then finds accurately, and goes on."""
        attempts, now, end = self.attempts, engine.now, engine.verdict
        best = attempts.results[attempts.best]
        if now is None or not math.isfinite(now.F):
            return False
        lower = TUNING.better * max(best.spread, 0.0) < best.F - now.F
        if end is None:  # it arrived
            known = self._joined_result(engine)
            assert known is not None
            attempts.results.append(known._replace(start=FROM_OTHER_X))
        elif engine.tol > self.tol and (end.status is Status.CONVERGED or (lower and end.status is Status.FINISHED)):
            engine.tol, engine.verdict = self.tol, None
            if lower:
                engine.objective.limit, engine.lower.limit = math.inf, self.max_gradients
            else:
                engine.objective.limit = self._allowed(is_confident=False)
            return True
        elif end.status is Status.CONVERGED or lower:
            self._add(engine, lower=lower)
        return False

    def _add(self, engine: HyperDescent, *, lower: bool) -> None:
        """Add the result of the present attempt; a better one must stand like the first."""
        attempts = self.attempts
        before, result = attempts.results, self._result(engine, FROM_OTHER_X)
        evidence = before[attempts.best].evidence
        if not lower:
            attempts.results = [*before, result._replace(evidence=evidence, spread=before[0].spread)]
            return
        assert engine.verdict is not None
        if engine.verdict.status is not Status.CONVERGED:
            attempts.results = [*before, result]
            return
        attempts.results = [result]
        self.answered = self._verify_result(engine, result.x.new_empty(0, len(result.x))) is not None
        attempts.results = [*attempts.results, *before]
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


def _segments(looks: list[Sample], x: Tensor, number: int) -> list[list[Sample]]:
    """What was seen on each of a number of ways away from x; the ends of all come first, then one point on each, and so on.

    Where x is one number, there is a way to each point, over those before it on its side.
    """
    if len(x) > 1:
        return [[*looks[i + number :: number], looks[i]] for i in range(number)]
    sides = [sorted((p for p in looks if sign * float(p[1] - x) > 0), key=lambda p: abs(float(p[1] - x))) for sign in (1, -1)]
    return [side[: i + 1] for side in sides for i in range(len(side))]


def _is_monotone(values: list[float]) -> bool:
    """Whether F never falls along a way, so that it falls all the way back to the answer, which is at its beginning.

    >>> _falls([1.0, 2.0, 4.0]), _falls([1.0, 3.0, 2.0]), _falls([1.0, 0.5])
    (True, False, False)
    """
    least = TUNING.barrier * (values[-1] - values[0])
    return all(not further < nearer - least for nearer, further in itertools.pairwise(values))
