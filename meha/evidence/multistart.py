"""Multistart of implicit Newton: from x0 to an answer, then from other x, to see whether that answer is the best."""

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
from meha.lower.flat_problem import FlatProblem
from meha.method.method import Numbers
from meha.method.status import Status
from meha.numerics.limited_memory import FEW_PAIRS, PAIRS, LimitedMemory
from meha.numerics.tolerances import NEAR, PROBES, ROUNDING, SAME, SMALL
from meha.problem.oracle import BudgetError
from meha.tensors.state import Saved
from meha.tensors.vectors import vector_norm

Sample = tuple[float, Tensor, Tensor]
"""F, x and y."""

FROM_OTHER_X = "implicit Newton, from another x"
"""The name of attempts after the first."""


class Multistart(Saved):
    """Runs implicit Newton from x0, verifies its answer, and restarts it from other x.

    With few coordinates of x, restarts begin beyond the barriers of F that samples show around the answer, and the best of
    several solutions must appear three times. With many coordinates, one other start must end at the answer.

    Args:
        levels: the problem.
        attempts: collects the results, and verifies them.
        verify, max_gradients: those of the method.

    Attributes:
        engine: the present attempt; None if the problem does not allow it, or all attempts are over.
        ended: how the first attempt ended, or why there is none, in words.
        answered: whether the answer of the first attempt was verified, so that no other engine is needed.
        cost, sampled: evaluations of the hyper-objective in the first attempt, and at sampled x.
        spent: gradients of f, and products with its Hessian, in the first attempt.
        tried: number of restarts.
        elsewhere: points (x, y) of further restarts, the most promising first.
        extended: whether the x that were not sampled at first are starts as well.
        seen: how many sampled x have no barrier to the answer, in words; empty if this is unknown.
    """

    saves = ("engine", "ended", "answered", "cost", "spent", "sampled", "tried", "elsewhere", "extended", "seen")

    def __init__(self, levels: FlatProblem, attempts: Attempts, verify: bool, max_gradients: int) -> None:
        self.levels, self.attempts, self.verify, self.max_gradients = levels, attempts, verify, max_gradients
        self.ended, self.answered = self._refusal(), False
        self.cost = self.spent = self.sampled = self.tried = 0
        self.seen, self.extended = "", False
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
        """A descent from x0; it leaves a part of the budget to the penalty continuation, in case it fails."""
        levels, allowed = self.levels, TUNING.budget_share * self.max_gradients
        return HyperDescent(levels.oracle, levels.x, levels.y, self.tol, allowed, levels.clock)

    def advance(self, engine: HyperDescent) -> Numbers:
        """Take a step of the present attempt; judge it when it is over, and restart."""
        numbers = {**engine.advance(), "run": len(self.attempts.results) + 1}
        self.attempts.sizes.y_largest = engine.lower.largest  # the scale at which two y count as the same
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
        """Verify the end of the first attempt, unless y may be one of several lower solutions nearby.

        If the response is the solution nearest to y0, the engine cannot tell which of them that is, and the point is no result.
        """
        assert engine.verdict is not None
        self.engine, self.ended, self.spent = None, f"{engine.verdict.message} {engine}", self.levels.spent
        if engine.verdict.status is not Status.CONVERGED:
            return  # the penalty continuation takes over
        determined, nearest = engine.determined, self.levels.oracle.response_term.vanishes
        stands = not nearest if determined is None else determined
        if stands or not nearest:
            self.attempts.results = [self._result(engine, "implicit Newton")]
        if not stands:
            self.ended = f"The lower level may have other solutions near y. {engine}"
        elif not self.verify:
            self.answered = True
        else:
            self._verify(engine)

    def _verify(self, engine: HyperDescent) -> None:
        """Verify the only result, and choose the x of restarts that may lead to another one."""
        others = self._points_to_sample(engine)
        samples = self._verify_result(engine, torch.cat(others))
        if samples is None:
            return
        self.answered, self.cost = True, engine.objective.calls
        (best,) = self.attempts.results
        if best.verdict.status is Status.CONVERGED or best.flat:  # not at infinity
            self.elsewhere = self._promising_starts(samples.upper(), len(others[0]), engine)
            self.sampled = engine.objective.calls - self.cost
            self.engine, engine.lower.limit = engine, self.max_gradients  # the answer stands: passes need no share

    def _result(self, engine: HyperDescent, name: str) -> Result:
        now = engine.now
        assert now is not None
        assert engine.verdict is not None
        idle = self._idle(engine, now)
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
            fallen=engine.trail.most - engine.trail.least,
            idle=idle,
        )

    def _idle(self, engine: HyperDescent, now: HyperValue) -> Tensor | None:
        """A mask of the coordinates along which F is constant nearby, to rounding; None where it changes along all of them.

        There y does not follow x, or F saturates. A zero hypergradient alone may be that of a minimum.
        """
        units, rounding = self.attempts.units(now.x), self._rounding(now.F)
        idle = now.gradient.abs() * units <= engine.eps * abs(now.F)
        if not bool(idle.any()):
            return None
        nearby = (self.levels.project(now.x + sign * NEAR * units * idle) for sign in (1, -1))
        changes = (abs(engine.objective.sample(x, now.y)[0] - now.F) for x in nearby)
        return idle if all(change <= rounding for change in changes) else None

    def _rounding(self, F: float) -> float:
        return ROUNDING * self.levels.eps * abs(F)

    def _verify_result(self, engine: HyperDescent, others: Tensor) -> Samples | None:
        """Verify the only result, at which the engine is; returns the samples around it, None if it was refuted."""
        now, levels, attempts = engine.now, self.levels, self.attempts
        assert now is not None
        assert now.response is not None
        at = now.response.at
        # The descents of the lower level begin with the Hessian that the engine knows, which saves most of their steps.
        levels.curvatures = {**engine.shape.curvatures(at), "F_yy": self._upper_curvature(now.y)}
        hessian = engine.shape.hessian(at)
        attempts.pairs = LimitedMemory.sized(FEW_PAIRS if hessian is None else PAIRS, len(now.y), matrix=hessian)
        return attempts.verify_newton(engine, others)

    def _upper_curvature(self, y: Tensor) -> float:
        """The curvature of F in y along its gradient, by a difference; it tells how far F would move y."""
        gradient = self.levels.upper(y)[2]
        slope, step = vector_norm(gradient), SAME * self.attempts.sizes.y_size(y)
        if not (slope and step):
            return 0.0
        return vector_norm(self.levels.upper(y - step / slope * gradient)[2] - gradient) / step

    # Restarts

    def _points_to_sample(self, engine: HyperDescent) -> list[Tensor]:
        """The x to sample: far and near ones, and points on the segments from the answer to them; none for many coordinates.

        Where g or Y makes F piecewise smooth, segments tell nothing, since each piece may have a solution of its own. Where x
        is one number, all segments lie on one line, and the far points are enough.
        """
        (best,) = self.attempts.results
        if not self.attempts.few_coordinates:
            return [best.x.new_empty(0, len(best.x))]
        samples = torch.stack(list(itertools.islice(self.attempts.samples(best.x), TUNING.newton_samples)))
        if self.levels.bounded or len(best.x) == 1:
            return [samples]
        shares = TUNING.segment_points if engine.batch.possible(best.x, best.y) else (0.5,)
        return [samples, *(best.x + share * (samples - best.x) for share in shares)]

    def _promising_starts(self, samples: list[Sample], number: int, engine: HyperDescent) -> list[tuple[Tensor, Tensor]]:
        """The points (x, y) of restarts, the least F first: sampled x that a barrier of F separates from the answer.

        Where segments tell nothing, all sampled x; with many coordinates, where samples tell nothing, one point opposite. From
        a plateau of F, points beyond it come first.

        Args:
            samples: the far points first, then those on the segments to them.
            number: the number of segments.
            engine: the descent that ended at the answer.
        """
        (best,) = self.attempts.results
        plateau = [] if best.idle is None else self._beyond_plateau(engine, best, best.idle)
        if best.flat:
            return plateau
        if not self.attempts.few_coordinates:
            return [(self.attempts.other_side(best.x), best.y), *plateau]
        if len(samples) > number or len(best.x) == 1:
            segments = [points for points in _segments(samples, best.x, number) if math.isfinite(points[-1][0])]
            samples = [points[-1] for points in segments if not _is_monotone([best.F, *(F for F, _, _ in points)])]
            self.seen = f"no barrier between the answer and {len(segments) - len(samples)} of {len(segments)} sampled x"
        return plateau + [(x, y) for F, x, y in sorted(samples, key=lambda sample: sample[0]) if math.isfinite(F)]

    def _beyond_plateau(self, engine: HyperDescent, best: Result, idle: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Points (x, y) where F is another one than on the plateau around the answer: first its ends, then points further on.

        Args:
            idle: the coordinates along which F is constant around the answer; the others stay.
        """
        drawn = (self.levels.project(torch.where(idle, x, best.x)) for x in self.attempts.samples(best.x))
        samples = [(F, x, y) for x in drawn for F, y in [engine.objective.sample(x, best.y)] if math.isfinite(F)]
        values = [best.F, *(F for F, _, _ in samples)]
        noise = max(self._rounding(best.F), math.sqrt(engine.eps) * (max(values) - min(values)))
        beyond = sorted((point for point in samples if abs(point[0] - best.F) > noise), key=lambda point: point[0])
        ends = []
        for F, x, y in beyond[: TUNING.restarts if best.flat else 1]:
            near, end = best.x, (F, x, y)
            for _ in range(2 * PROBES):  # to a thousandth of the way
                middle = 0.5 * (near + end[1])
                F, y = engine.objective.sample(middle, end[2])
                if abs(F - best.F) <= noise:
                    near = middle
                elif math.isfinite(F):
                    end = F, middle, y
            ends.append(end)
        starts = (*ends, *beyond)
        if not best.flat:  # F has shown a way along the other coordinates: only what is better is worth a restart
            starts = tuple(point for point in starts if point[0] < best.F - noise)
        return [(x, y) for _, x, y in starts]

    def _start_next(self, engine: HyperDescent) -> None:
        """Restart from the next point, if there is one and the budget allows it."""
        confident = self.attempts.is_confident
        enough, allowed = confident and self.tried >= TUNING.restarts, self._allowed()
        if not confident and not self.elsewhere and not self.extended and self.attempts.few_coordinates:
            best, self.extended = self.attempts.results[self.attempts.best], True
            rest = itertools.islice(self.attempts.samples(best.x), TUNING.newton_samples, None)
            self.elsewhere = [(x, best.y) for x in rest]  # attempts disagree: the other x of the hypercube are starts, too
        if enough or not self.elsewhere or engine.objective.calls >= allowed:
            self.engine = None
            return
        self.tried += 1
        if not self.attempts.few_coordinates:
            engine.lower.limit = min(self.max_gradients, self.levels.spent + self.spent)
        x, y = self.elsewhere.pop(0)
        engine.restart(x, y, max(self.tol, SAME), allowed)  # most end at a known solution: coarse is enough

    def _allowed(self) -> float:
        """The budget of evaluations of the hyper-objective, in all: the cost of the evidence stays in proportion."""
        return self.cost + self.sampled + max(TUNING.least_restart, self.cost)

    def _has_joined(self, engine: HyperDescent) -> bool:
        """Whether the present attempt has reached a known solution, so that its last steps can be saved."""
        return self._joined_result(engine) is not None

    def _joined_result(self, engine: HyperDescent) -> Result | None:
        """The known solution that the present attempt has reached; None if there is none."""
        now = engine.now
        assert now is not None
        if not math.isfinite(now.F):
            return None
        return next((result for result in self.attempts.results if self._joins(result, now, engine)), None)

    def _joins(self, result: Result, now: HyperValue, engine: HyperDescent) -> bool:
        """Whether an attempt is about to end at a result, so that its last steps can be saved.

        It is there already; or F between the two points is that of a convex quadratic function, up to a misfit that may be
        larger where the attempt has come close.
        """
        if self.attempts.same_point(result, now.x, now.y):
            return True
        if result.gradient is None:
            return False
        assert engine.start is not None
        segment = now.x - result.x
        # On a segment, a quadratic rises by the mean of the slopes at both ends (trapezoidal rule, exact for quadratics).
        turn, rise = float((now.gradient - result.gradient) @ segment), 0.5 * float((now.gradient + result.gradient) @ segment)
        close = vector_norm(segment) <= SMALL * vector_norm(engine.start[0] - result.x)
        noise = math.sqrt(engine.eps) * (abs(now.F) + abs(result.F))
        return abs(now.F - result.F - rise) <= (SMALL if close else SAME**2) * turn + noise

    def _judge_attempt(self, engine: HyperDescent) -> bool:
        """Judge a restart; True if it goes on, because it met another solution that is not accurate enough yet."""
        attempts, now, end = self.attempts, engine.now, engine.verdict
        best = attempts.results[attempts.best]
        if now is None or not math.isfinite(now.F):
            return False
        lower = SAME**2 * max(best.spread, 0.0) < best.F - now.F
        if end is None:  # it joined a known solution
            known = self._joined_result(engine)
            assert known is not None
            attempts.results.append(known._replace(start=FROM_OTHER_X, fallen=engine.trail.most - engine.trail.least))
        elif engine.tol > self.tol and (end.status is Status.CONVERGED or (lower and end.status is Status.FINISHED)):
            engine.tol, engine.verdict = self.tol, None
            if lower:  # a better answer: its accuracy is worth the whole budget
                engine.objective.limit, engine.lower.limit = math.inf, self.max_gradients
            else:
                engine.objective.limit = self._allowed()
            return True
        elif end.status is Status.CONVERGED or lower:
            self._add(engine, lower=lower)
        return False

    def _add(self, engine: HyperDescent, *, lower: bool) -> None:
        """Add the result of the present attempt; a better one must be verified like the first."""
        attempts = self.attempts
        before, result = attempts.results, self._result(engine, FROM_OTHER_X)
        evidence = before[attempts.best].evidence
        if not lower:
            # It is not the answer, so that the lower level is not searched again for it.
            attempts.results = [*before, result._replace(evidence=evidence, spread=before[0].spread)]
            return
        assert engine.verdict is not None
        if engine.verdict.status is not Status.CONVERGED:
            attempts.results = [*before, result]
            return
        attempts.results = [result]  # the verification refers to the only result
        self.answered = self._verify_result(engine, result.x.new_empty(0, len(result.x))) is not None
        attempts.results = [*attempts.results, *before]
        if not self.answered:
            self.engine = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another multistart was."""
        self.engine = None if state["engine"] is None else self._engine()
        super().load_state_dict(state)


def _segments(samples: list[Sample], x: Tensor, number: int) -> list[list[Sample]]:
    """Group sampled points by the segment from x that they lie on.

    ``samples`` has the ends of all segments first, then one point of each, and so on. Where x is one number, there is a segment
    to each point, over those before it on its side.
    """
    if len(x) > 1:  # from near to far, as _is_monotone() needs
        return [[*samples[i + number :: number], samples[i]] for i in range(number)]
    sides = [sorted((p for p in samples if sign * float(p[1] - x) > 0), key=lambda p: abs(float(p[1] - x))) for sign in (1, -1)]
    return [side[: i + 1] for side in sides for i in range(len(side))]


def _is_monotone(values: list[float]) -> bool:
    """Whether F never decreases from the answer to the sampled point, so that there is no barrier between them.

    >>> _is_monotone([1.0, 2.0, 4.0]), _is_monotone([1.0, 3.0, 2.0]), _is_monotone([1.0, 0.5])
    (True, False, False)
    """
    least = SAME * (values[-1] - values[0])  # smaller dips may be errors: samples have a coarse y
    return all(not further < nearer - least for nearer, further in itertools.pairwise(values))
