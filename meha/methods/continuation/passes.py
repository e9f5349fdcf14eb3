"""A pass through the stages: quasi-Newton steps on Phi_c in x, while c grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods.continuation.envelope import Envelope, EnvelopePoint
from meha.methods.continuation.levels import Levels
from meha.methods.continuation.quasi_newton import INSIDE, Descent, Pairs, size
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.stages import Stage, accuracy, compared, limits, verdict
from meha.methods.continuation.tuning import Tuning

__all__ = ["Pass", "Result"]


class Result(NamedTuple):
    """The end of a pass.

    Attributes:
        spread: the range of F in the stages in which the lower level counts.
        solved: whether y solves the lower level, as far as F can tell.
        c: the first and the last one.
        gap, residual, bias: those of the last stage.
    """

    x: Tensor
    y: Tensor
    F: float
    spread: float
    solved: bool
    c: tuple[float, float]
    stages: int
    gap: float
    residual: float
    bias: float
    verdict: Verdict


class Seen(NamedTuple):
    """The largest gradient and the largest change of F in the last stages, and the range of F once the lower level counts."""

    slope: float = 0.0
    span: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf


class Pass:
    """One pass, from the start (x0, y0) and a first c.

    Attributes:
        x, y, theta: the last accepted point.
        point: Phi_c there; None when it has to be evaluated.
        origin: x, y and ``seen`` at the beginning of the stage.
        tau: the relative accuracy in x of the stage.
        steps, failures: the steps of the stage, and how many of them failed.
        before: gradients of f taken before this pass.
        result: set when the pass is over.
    """

    PLAIN = ("x", "y", "theta", "t", "tau", "steps", "failures", "before")

    def __init__(self, levels: Levels, scales: Scales, tuning: Tuning, c: float, max_gradients: int) -> None:
        self.levels, self.scales, self.tuning, self.max_gradients = levels, scales, tuning, max_gradients
        most = tuning.composite_pairs if levels.composite else tuning.pairs
        self.envelope = Envelope(levels, scales, tuning, self._memory(most, len(scales.y0)))
        self.pairs = Pairs(self._memory(tuning.outer_pairs, len(scales.x0)), tuning.damping)
        self.x, self.y, self.t, self.seen = scales.x0, scales.y0, 0.0, Seen()
        self.stages: list[Stage] = []
        self.first, self.before = c, levels.oracle.counts.lower
        self.result: Result | None = None
        self._enter(c)

    def _memory(self, most: int, n: int) -> int:
        tuning = self.tuning
        return max(tuning.fewest_pairs, min(most, 2 * n + tuning.spare_pairs, tuning.most_numbers // n))

    @property
    def c(self) -> float:
        """The penalty of the stage."""
        return self.envelope.c

    @property
    def weight(self) -> float:
        """That of the upper level, 1 where both levels weigh the same."""
        return self.scales.balance / self.c

    def _enter(self, c: float) -> None:
        """Begin a stage."""
        tuning, seen, weight = self.tuning, self.seen, self.scales.balance / c
        if self.stages and self.weight >= 1 > weight:
            seen = seen._replace(lowest=self.stages[-1].F, highest=self.stages[-1].F)
        self.seen = seen._replace(slope=0.5 * seen.slope, span=0.5 * seen.span)
        self.tau = accuracy(self.stages, self.scales, tuning) if weight < 1 else tuning.loose
        self.envelope.enter(c, min(tuning.coarse, max(self.tau, tuning.fine)))
        self.theta, self.origin = self.y, (self.x, self.y, self.seen)
        self.point: EnvelopePoint | None = None
        self.steps = self.failures = 0

    def step(self) -> dict[str, float]:
        """Take a step in x, or end the stage; the numbers are those before it."""
        tuning, scales, tau = self.tuning, self.scales, self.tau
        point = self.point or self._phi(self.x)
        if not point.finite:
            numbers = {"upper": self.stages[-1].F if self.stages else 0.0, "gap": math.inf, "residual": math.inf, "c": self.c}
            self._back()
            return numbers
        self._accept(point)
        change = abs(point.F - self.stages[-1].F) if self.stages else 0.0
        seen = self.seen = self.seen._replace(slope=max(self.seen.slope, point.slope), span=max(self.seen.span, change))
        scale, span = scales.x_size(point.z), seen.span or abs(point.value) or 1.0
        reach = scale / (size(point.gradient) or 1.0)
        t = min(self.t, 0.5 * reach) if self.t else tuning.first_step * reach
        descent = Descent(self._phi, self.pairs, self.levels.project if self.levels.constrained else None, False, t)
        d, remembered = descent.direction(point)
        residual, length = size(descent.residual(point).r), size(d) / scale
        small = length <= tau or -float(point.gradient @ d) <= tuning.negligible * tau**2 * span
        done = small and residual <= tuning.stationary * seen.slope
        done = done or residual <= max(tuning.negligible * tau**2 * seen.slope, point.blur)
        numbers = {"upper": point.F, "lower": point.phi, "gap": point.gap, "residual": residual, "c": self.c}

        early = self.weight >= tuning.light
        if not done and self.failures < tuning.max_failures and self.steps < (tuning.short_steps if early else tuning.long_steps):
            self.steps += 1
            self.envelope.eps = min(self.envelope.eps, max(tuning.finer, tuning.in_step * min(1.0, residual / seen.slope)))
            self._move(descent, point, descent.step(point, d, remembered, min(1.0, 0.5 / length)))
        elif not done and early and size(self.x - self.origin[0]) > tuning.wandered * scales.x_size(self.origin[0]):
            self._back()
        else:
            self._leave(point, residual, length)
        return numbers

    def _phi(self, x: Tensor) -> EnvelopePoint:
        far = self.tuning.far * max(self.scales.x_size(self.origin[0]), self.scales.x_largest)
        point = self.envelope(x, self.y, self.theta, far)
        lowest, highest = min(self.seen.lowest, point.F), max(self.seen.highest, point.F)  # NaN changes nothing
        self.seen = self.seen._replace(lowest=lowest, highest=highest)
        return point

    def _accept(self, point: EnvelopePoint) -> None:
        self.point, self.x, self.y, self.theta = point, point.z, point.y, point.theta
        if self.weight < self.tuning.light:
            self.scales.note(self.x, self.y, self.theta)

    def _move(self, descent: Descent[EnvelopePoint], point: EnvelopePoint, new: EnvelopePoint | None) -> None:
        """Accept a new point; without one, solve more accurately, and then forget the curvatures."""
        if new is None:
            self.failures += 1
            self.envelope.eps = max(self.tuning.retry * self.envelope.eps, self.tuning.finest_solve)
            self.point = None
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
        self.t, c = 0.0, self.tuning.ratio * self.c
        if c <= self.tuning.largest_c * self.scales.balance and self._used() <= self.max_gradients:
            return self._enter(c)
        message = (
            "F + c (f + g) has no minimum near the start, or is not finite, for any c tried. Check that f has a minimum in y"
            " and F one over its solutions, or bound x and y (x_set, y_set)."
        )
        return self._close(self.x, self.y, Verdict(Status.DIVERGED, message))

    def _leave(self, point: EnvelopePoint, residual: float, length: float) -> None:
        """End a stage; then begin the next, or end the pass."""
        levels, scales, tuning, x, y = self.levels, self.scales, self.tuning, self.x, self.y
        led = limits([s.x for s in self.stages] + [x], [s.y for s in self.stages] + [y], tuning) if self.weight < 1 else None
        limit_x, limit_y = led or (x, y)
        limit_x = levels.project(limit_x)
        apart, blur = size(y - self.theta) / scales.y_size(y), point.blur / (self.seen.slope or 1.0)
        values = self.c, x, y, point.F, point.gap, residual, length, blur, apart
        stage = Stage(*values, led is not None, limit_x, limit_y, point.F)
        if self.stages:
            stage = compared(stage, self.stages[-1], scales, tuning, self.seen.highest - self.seen.lowest)
        self.stages.append(stage)
        end = verdict(self.stages, scales, tuning, self._used(), self.max_gradients)
        if end is not None:
            return self._close(limit_x, limit_y, end)
        if led is not None:  # the error falls with 1/c, and so does the distance of the next solution from the limit
            self.x = levels.project(limit_x + (x - limit_x) / tuning.ratio)
            if not levels.composite:
                self.y = levels.prox(limit_y + (y - limit_y) / tuning.ratio, INSIDE)
        return self._enter(tuning.ratio * self.c)

    def _close(self, x: Tensor, y: Tensor, end: Verdict) -> None:
        """End the pass, with the lower level solved at x."""
        self.levels.move(x)
        self.envelope.eps = min(self.envelope.eps, self.tuning.beyond_tol * self.scales.tol)
        theta = self.envelope.lower(y, y)
        y, solved = (theta.z, self.envelope.solve_theta.solved) if theta.finite else (y, False)
        F = self.levels.upper(y)[0]
        if end.status is not Status.DIVERGED:
            end = self._endless(x, y, F) or end
        c, spread, last = (self.first, self.c), self.seen.highest - self.seen.lowest, self.stages[-1] if self.stages else None
        gap, residual, bias = (last.gap, last.residual, last.bias_x) if last else (math.nan, math.nan, math.inf)
        self.result = Result(x, y, F, spread, solved, c, len(self.stages), gap, residual, bias, end)

    def _endless(self, x: Tensor, y: Tensor, F: float) -> Verdict | None:
        """Whether F stays as low when the coordinates of x that went furthest go twice as far."""
        moved = x - self.scales.x0
        distance = moved.abs()
        if not float(distance.max()) > 0:
            return None
        furthest = distance >= 0.5 * distance.max()
        beyond = torch.where(furthest, x + self.tuning.beyond * moved, x)
        if self.levels.constrained and not torch.equal(self.levels.project(beyond), beyond):  # X holds them
            return None
        self.levels.move(torch.where(furthest, x + moved, x))
        theta = self.envelope.lower(y, y)
        value = self.levels.upper(theta.z)[0] if theta.finite else math.nan
        self.levels.move(x)
        if not value <= F + self.scales.tol * (self.seen.highest - self.seen.lowest):
            return None
        return Verdict(
            Status.AT_INFINITY,
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, for example with x_set=meha.sets.Box(-10.0, 10.0) for log-weights.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors and numbers."""
        x, y, seen = self.origin
        return {name: getattr(self, name) for name in self.PLAIN} | {
            "seen": tuple(self.seen),
            "origin": (x, y, tuple(seen)),
            "stages": [tuple(stage) for stage in self.stages],
            "point": None if self.point is None else vars(self.point) | {"seen": None},
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
        self.point = None if state["point"] is None else EnvelopePoint(**state["point"])
        self.pairs.load_state_dict(state["pairs"])
        self.envelope.load_state_dict(state["envelope"])
