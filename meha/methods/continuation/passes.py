"""A pass through the stages: quasi-Newton steps on Phi_c in x, while c grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._levels import Levels
from meha.methods._quasi_newton import INSIDE, Descent, Pairs, size
from meha.methods.continuation.envelope import Envelope, EnvelopePoint
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.stages import Stage, accuracy, compared, limits, verdict
from meha.methods.continuation.tuning import TUNING

__all__ = ["Pass", "Result", "best_of"]


class Result(NamedTuple):
    """The end of a pass: where, why, and how.

    Attributes:
        solved: whether y solves the lower level, as far as F can tell.
        spread: the range of F in the stages that the lower level shapes.
        c: the first and the last one.
        gap, residual, bias: those of the last stage.
    """

    x: Tensor
    y: Tensor
    F: float
    solved: bool
    spread: float
    c: tuple[float, float]
    stages: int
    gap: float
    residual: float
    bias: float
    verdict: Verdict


def best_of(results: Sequence[Result]) -> Result:
    """The result with the smallest F among those that are solutions; the first unless another is clearly better."""
    best, least = results[0], TUNING.better * max(0.0, *(result.spread for result in results))
    for other in results[1:]:
        worth, others = ((result.verdict.status is not Status.DIVERGED, result.solved) for result in (best, other))
        gain = best.F - other.F
        if others > worth or (others == worth and gain > least):
            best = other
    return best


class Seen(NamedTuple):
    """The largest gradient and change of F, which fade from stage to stage, and the range of F since the levels balance."""

    slope: float = 0.0
    span: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    @property
    def spread(self) -> float:
        """The range of F."""
        return self.highest - self.lowest


class Pass:
    """One pass, from the start (x0, y0) and a first c; ``result`` is set when it is over.

    Attributes:
        x, y, theta: the last accepted point; ``point`` is Phi_c there, None when it has to be evaluated.
        t: a step along the gradient.
        weight: that of the upper level in the stage, 1 where the levels balance.
        origin: x, y and ``seen`` at the beginning of the stage.
        tau: the relative accuracy in x of the stage.
        steps, failures: the steps of the stage, and those that failed.
        before: gradients of f taken before this pass.
    """

    PLAIN = ("x", "y", "theta", "t", "weight", "tau", "steps", "failures", "before")

    def __init__(self, levels: Levels, scales: Scales, c: float, max_gradients: int) -> None:
        self.levels, self.scales, self.first, self.max_gradients = levels, scales, c, max_gradients
        self.x, self.y, self.t, self.weight, self.seen = scales.x0, scales.y0, 0.0, math.inf, Seen()
        self.envelope = Envelope(levels, scales)
        self.pairs = Pairs.sized(TUNING.outer_pairs, len(self.x), TUNING.damping)
        self.stages: list[Stage] = []
        self.before = levels.oracle.counts.lower
        self.result: Result | None = None
        self._enter(c)

    def _enter(self, c: float) -> None:
        """Begin a stage."""
        before, self.weight = self.weight, self.scales.balance / c
        seen = self.seen._replace(slope=0.5 * self.seen.slope, span=0.5 * self.seen.span)
        if before >= 1 > self.weight and self.stages:
            seen = seen._replace(lowest=self.stages[-1].F, highest=self.stages[-1].F)
        self.tau = accuracy(self.stages, self.scales) if self.weight < 1 else TUNING.loose
        self.envelope.enter(c, min(TUNING.coarse, max(self.tau, TUNING.fine)))
        self.theta, self.seen, self.origin = self.y, seen, (self.x, self.y, seen)
        self.point: EnvelopePoint | None = None
        self.steps = self.failures = 0

    def step(self) -> dict[str, float]:
        """Take a step in x, or end the stage; the numbers are those before it."""
        c, tau, scales, envelope = self.envelope.c, self.tau, self.scales, self.envelope
        point = self.point or self._phi(self.x)
        if not point.finite:
            F = self.stages[-1].F if self.stages else 0.0
            self._back()
            return {"upper": F, "gap": math.inf, "residual": math.inf, "c": c}
        self._accept(point)
        change = abs(point.F - self.stages[-1].F) if self.stages else 0.0
        seen = self.seen = self.seen._replace(slope=max(self.seen.slope, point.slope), span=max(self.seen.span, change))
        scale, span = scales.x_size(point.z), seen.span or abs(point.value) or 1.0
        reach = scale / (size(point.gradient) or 1.0)
        t = min(self.t, 0.5 * reach) if self.t else TUNING.first_step * reach
        descent = Descent(self._phi, self.pairs, self.levels.project if self.levels.constrained else None, False, t)
        d, remembered = descent.direction(point)
        residual, length = size(descent.residual(point).r), size(d) / scale
        small = length <= tau or -float(point.gradient @ d) <= TUNING.negligible * tau**2 * span
        done = small and residual <= TUNING.stationary * seen.slope
        done = done or residual <= max(TUNING.negligible * tau**2 * seen.slope, point.blur)

        early = self.weight >= TUNING.light
        enough = self.failures >= TUNING.max_failures or self.steps >= (TUNING.early_steps if early else TUNING.late_steps)
        if not done and not enough:
            self.steps += 1
            envelope.eps = min(envelope.eps, max(TUNING.finer, TUNING.in_step * min(1.0, residual / seen.slope)))
            self._move(descent, point, descent.step(point, d, remembered, min(1.0, 0.5 / length)))
        elif not done and early and size(self.x - self.origin[0]) > TUNING.wandered * scales.x_size(self.origin[0]):
            self._back()
        else:
            self._leave(point, residual, length)
        return {"upper": point.F, "lower": point.phi, "gap": point.gap, "residual": residual, "c": c}

    def _phi(self, x: Tensor) -> EnvelopePoint:
        far = TUNING.far * max(self.scales.x_size(self.origin[0]), self.scales.x_largest)
        point = self.envelope(x, self.y, self.theta, far)
        lowest, highest = min(self.seen.lowest, point.F), max(self.seen.highest, point.F)  # NaN changes nothing
        self.seen = self.seen._replace(lowest=lowest, highest=highest)
        return point

    def _accept(self, point: EnvelopePoint) -> None:
        self.point, self.x, self.y, self.theta = point, point.z, point.y, point.theta
        if self.weight < TUNING.light:
            self.scales.note(self.x, self.y, self.theta)

    def _move(self, descent: Descent[EnvelopePoint], point: EnvelopePoint, new: EnvelopePoint | None) -> None:
        """Accept a new point; without one, solve more accurately, and then forget the curvatures."""
        if new is None:
            self.failures, self.point = self.failures + 1, None
            self.envelope.eps = max(TUNING.retry * self.envelope.eps, TUNING.finest_solve)
            if self.failures > 1:
                self.pairs.clear()
        else:
            s, change = new.z - point.z, new.gradient - point.gradient
            self.t = float(s @ s / (s @ change)) if float(s @ change) > 0 else descent.t
            self._accept(new)

    def _used(self) -> int:
        return self.levels.oracle.counts.lower - self.before

    def _back(self) -> None:
        """Leave a stage that has no solution nearby: return to where it began, with more weight on the lower level."""
        self.x, self.y, self.seen = self.origin
        self.pairs.clear()
        self.envelope.solve_y.pairs.clear()
        self.t, c = 0.0, TUNING.ratio * self.envelope.c
        if c <= TUNING.largest_c * self.scales.balance and self._used() <= self.max_gradients:
            return self._enter(c)
        message = (
            "F + c (f + g) has no minimum near the start, or is not finite, for any c tried. Check that f has a minimum in y"
            " and F one over its solutions, or bound x and y (x_set, y_set)."
        )
        return self._close(self.x, self.y, Verdict(Status.DIVERGED, message))

    def _leave(self, point: EnvelopePoint, residual: float, length: float) -> None:
        """End a stage; then begin the next, or end the pass."""
        levels, scales, x, y, c = self.levels, self.scales, self.x, self.y, self.envelope.c
        ends = limits([s.x for s in self.stages] + [x], [s.y for s in self.stages] + [y]) if self.weight < 1 else None
        limit_x, limit_y = ends or (x, y)
        limit_x = levels.project(limit_x)
        apart, blur = size(y - self.theta) / scales.y_size(y), point.blur / (self.seen.slope or 1.0)
        stage = Stage(c, x, y, point.F, point.gap, residual, length, blur, apart, limit_x, limit_y, point.F)
        if self.stages:
            stage = compared(stage, self.stages[-1], scales, self.seen.spread)
        self.stages.append(stage)
        end = verdict(self.stages, scales, self._used(), self.max_gradients)
        if end is not None:
            return self._close(limit_x, limit_y, end)
        if ends is not None:  # the next solution is closer to the limit by the ratio of the c
            self.x = levels.project(limit_x + (x - limit_x) / TUNING.ratio)
            if not levels.composite:
                self.y = levels.prox(limit_y + (y - limit_y) / TUNING.ratio, INSIDE)
        return self._enter(TUNING.ratio * c)

    def _close(self, x: Tensor, y: Tensor, end: Verdict) -> None:
        """End the pass, with the lower level solved at x."""
        self.levels.move(x)
        self.envelope.eps = min(self.envelope.eps, TUNING.beyond_tol * self.scales.tol)
        theta = self.envelope.lower(y, y)
        y, solved = (theta.z, self.envelope.solve_theta.solved) if theta.finite else (y, False)
        F = self.levels.upper(y)[0]
        if end.status is not Status.DIVERGED:
            end = self._endless(x, y, F) or end
        last = self.stages[-1] if self.stages else None
        gap, residual, bias = (last.gap, last.residual, last.bias_x) if last else (math.nan, math.nan, math.inf)
        c, stages = (self.first, self.envelope.c), len(self.stages)
        self.result = Result(x, y, F, solved, self.seen.spread, c, stages, gap, residual, bias, end)

    def _endless(self, x: Tensor, y: Tensor, F: float) -> Verdict | None:
        """Whether F stays as low when the coordinates of x that went furthest go twice as far."""
        levels, moved = self.levels, x - self.scales.x0
        distance = moved.abs()
        if not float(distance.max()) > 0:
            return None
        furthest = distance >= 0.5 * distance.max()
        beyond = torch.where(furthest, x + TUNING.beyond * moved, x)
        if levels.constrained and not torch.equal(levels.project(beyond), beyond):  # X holds them
            return None
        levels.move(torch.where(furthest, x + moved, x))
        theta = self.envelope.lower(y, y)
        value = levels.upper(theta.z)[0] if theta.finite else math.nan
        levels.move(x)
        if not value <= F + self.scales.tol * self.seen.spread:
            return None
        message = (
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, for example with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
        )
        return Verdict(Status.AT_INFINITY, message)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors and numbers."""
        x, y, seen = self.origin
        return {name: getattr(self, name) for name in self.PLAIN} | {
            "seen": tuple(self.seen),
            "origin": (x, y, tuple(seen)),
            "stages": [tuple(stage) for stage in self.stages],
            "point": self.point and vars(self.point) | {"seen": None},
            "pairs": self.pairs.state_dict(),
            "envelope": self.envelope.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another pass was."""
        for name in self.PLAIN:
            setattr(self, name, state[name])
        x, y, seen = state["origin"]
        self.seen, self.origin = Seen(*state["seen"]), (x, y, Seen(*seen))
        self.stages = [Stage(*stage) for stage in state["stages"]]
        self.point = state["point"] and EnvelopePoint(**state["point"])
        self.pairs.load_state_dict(state["pairs"])
        self.envelope.load_state_dict(state["envelope"])
