"""A pass through the stages: quasi-Newton steps on Phi_c in x, while c grows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._levels import BudgetError, Levels, LowerPoint
from meha.methods._quasi_newton import Descent, Pairs, size
from meha.methods.continuation.envelope import Envelope, EnvelopePoint
from meha.methods.continuation.results import Result, Start
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.stages import Stage, accuracy, compared, limits, verdict
from meha.methods.continuation.tuning import TUNING

__all__ = ["Pass"]


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
    """One pass; ``result`` is set when it is over.

    Args:
        start: where it begins.
        allowed: gradients of f that it may take.

    Attributes:
        x, y, thetas: the last accepted point; ``point`` is Phi_c there, None when it has to be evaluated.
        asleep: lower solutions in valleys that are too high to matter in this stage.
        t: a step along the gradient.
        weight: that of the upper level in the stage, 1 where the levels balance.
        origin: x, y and ``seen`` at the beginning of the stage.
        tau: the relative accuracy in x of the stage.
        steps, failures: the steps of the stage, and those that failed.
        widest: the largest size of x so far.
        passed: the number of stages before the present valley was entered.
        end: the gradients of f, counted from the start of the run, at which it is over.
    """

    PLAIN = (
        "x",
        "y",
        "thetas",
        "asleep",
        "t",
        "weight",
        "tau",
        "steps",
        "failures",
        "passed",
        "widest",
        "end",
        "allowed",
        "first",
        "name",
    )

    def __init__(self, levels: Levels, scales: Scales, start: Start, allowed: int) -> None:
        self.levels, self.scales, self.name, self.first, self.allowed = levels, scales, start.name, start.c, allowed
        self.x, self.y, self.t, self.weight, self.seen = start.x, start.y, 0.0, math.inf, Seen()
        self.thetas, self.asleep = [start.y, *start.others[: TUNING.valleys]], start.others[TUNING.valleys :]
        self.envelope = Envelope(levels, scales)
        self.passed, self.widest = 0, 0.0
        self.pairs = Pairs.sized(TUNING.outer_pairs, len(self.x), TUNING.damping)
        self.stages: list[Stage] = []
        self.end = levels.spent + allowed
        self.result: Result | None = None
        self._enter(start.c)

    def _enter(self, c: float) -> None:
        """Begin a stage."""
        before, self.weight = self.weight, self.scales.balance / c
        seen = self.seen._replace(slope=0.5 * self.seen.slope, span=0.5 * self.seen.span)
        if before >= 1 > self.weight and self.stages:
            seen = seen._replace(lowest=self.stages[-1].F, highest=self.stages[-1].F)
        self.tau = accuracy(self.stages, self.scales) if self.weight < 1 else TUNING.loose
        self.envelope.enter(c, min(TUNING.coarse, max(self.tau, TUNING.fine)))
        self.envelope.extend(len(self.thetas))
        self.envelope.kappa = TUNING.smoothing * max(seen.spread, seen.span, 0.0)
        self.thetas = [self._displaced(), *self.thetas[1:]]
        self.seen, self.origin = seen, (self.x, self.y, seen)
        self.point: EnvelopePoint | None = None
        self.steps = self.failures = 0

    def _displaced(self) -> Tensor:
        """A point near y, from which theta finds its way down even if y is at a maximum or saddle of f."""
        if self.levels.composite:  # a kink of g holds y where a displacement would only cost steps
            return self.y
        generator = torch.Generator().manual_seed(self.passed + len(self.stages))
        d = torch.randn(len(self.y), generator=generator, dtype=torch.float64, device="cpu").to(self.y)
        way = max(TUNING.displaced_least * self.scales.y_size(self.y), TUNING.displaced * size(self.y - self.thetas[0]))
        return self.levels.inside(self.y + way / size(d) * d)

    def step(self) -> dict[str, float]:
        """Take a step in x, or end the stage; the numbers are those before it."""
        try:
            with self.levels.until(self.end - TUNING.reserve * self.allowed):
                return self._step()
        except BudgetError:
            last = self.stages[-1] if self.stages else None
            message = (
                f"The pass took all gradients of f that it may, {self.allowed}, in {self.passed + len(self.stages)} stages."
                " Allow more (max_gradients), ask for less accuracy (tol), or inspect the problem with meha.check."
            )
            self._close(self.x, self.y, Verdict(Status.FINISHED, message))
            F = self.result.F if self.result else math.nan
            gap, residual = (last.gap, last.residual) if last else (math.inf, math.inf)
            return {"upper": F, "gap": gap, "residual": residual, "c": self.envelope.c}

    def _step(self) -> dict[str, float]:
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
        self.widest = max(self.widest, scale)
        longest = 0.5 * max(1.0, TUNING.stride * self.widest / scale)  # x may cross zero, where its size is none
        reach = scale / (size(point.gradient) or 1.0)
        t = min(self.t, longest * reach) if self.t else TUNING.first_step * reach
        project = self.levels.project if self.levels.constrained else None
        descent = Descent(self._phi, self.pairs, project, False, t, kinks=len(self.thetas) > 1, clock=self.levels.clock)
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
            self._move(descent, point, descent.step(point, d, remembered, min(1.0, longest / length)))
        elif not done and early and size(self.x - self.origin[0]) > TUNING.wandered * scales.x_size(self.origin[0]):
            self._back()
        else:
            self._leave(point, residual, length, done)
        return {"upper": point.F, "lower": point.phi, "gap": point.gap, "residual": residual, "c": c}

    def _phi(self, x: Tensor) -> EnvelopePoint:
        far = TUNING.far * max(self.scales.x_size(self.origin[0]), self.scales.x_largest)
        point = self.envelope(x, self.y, self.thetas, far)
        lowest, highest = min(self.seen.lowest, point.F), max(self.seen.highest, point.F)  # NaN changes nothing
        self.seen = self.seen._replace(lowest=lowest, highest=highest)
        return point

    def _accept(self, point: EnvelopePoint) -> None:
        self.point, self.x, self.y, self.thetas = point, point.z, point.y, point.thetas
        if self.weight < TUNING.light:
            self.scales.note(self.x, self.y, self.thetas[0])

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

    def _back(self) -> None:
        """Leave a stage that has no solution nearby: return to where it began, with more weight on the lower level."""
        self.x, self.y, self.seen = self.origin
        self.pairs.clear()
        self.envelope.solve_y.pairs.clear()
        self.t, c = 0.0, self.scales.growth * self.envelope.c
        if c <= TUNING.largest_c * self.scales.balance:
            return self._enter(c)
        message = (
            "F + c (f + g) has no minimum near the start, or is not finite, for any c tried. Check that f has a minimum in y"
            " and F one over its solutions, or bound x and y (x_set, y_set)."
        )
        return self._close(self.x, self.y, Verdict(Status.DIVERGED, message))

    def _leave(self, point: EnvelopePoint, residual: float, length: float, done: bool) -> None:
        """End a stage; then begin the next, or end the pass."""
        levels, scales, x, y, c = self.levels, self.scales, self.x, self.y, self.envelope.c
        ends = limits([s.x for s in self.stages] + [x], [s.y for s in self.stages] + [y]) if self.weight < 1 else None
        limit_x, limit_y = ends or (x, y)
        limit_x = levels.project(limit_x)
        apart, blur = size(y - self.thetas[0]) / scales.y_size(y), point.blur / (self.seen.slope or 1.0)
        stage = Stage(c, x, y, point.F, point.gap, residual, length, blur, apart, done, limit_x, limit_y, point.F)
        if self.stages:
            stage = compared(stage, self.stages[-1], scales, self.seen.spread)
        levels.move(x)
        self.envelope.reweigh(point.shares)
        if (len(self.thetas) > 1 or self.asleep) and self._rank(point.phi - point.gap):
            return self._enter(c)  # there is a lower valley than those that were followed
        self.envelope.reweigh([weight / scales.growth for weight in self.envelope.weights])
        moved = self._change_valley(point, stage)
        self.stages.append(stage)
        end = None if moved else verdict(self.stages, scales, self.seen.spread)
        if end is not None:
            return self._close(limit_x, limit_y, end)
        border = max(point.shares[1:], default=0.0) > TUNING.borderline * self.weight
        if (len(self.thetas) > 1 and apart > TUNING.joined) or self._strays(stage, self.stages[:-1]):
            self.asleep = [*self.asleep, self.thetas[0]]  # y may have left the valley of its theta, which is not forgotten
        if moved:
            self.passed += len(self.stages)
            self.stages = []
        elif ends is not None and not border:  # the next solution is closer to the limit by the ratio of the c
            self.x = levels.project(limit_x + (x - limit_x) / TUNING.ratio)
            if not levels.composite:
                self.y = levels.inside(limit_y + (y - limit_y) / TUNING.ratio)
        return self._enter(scales.growth * c)

    def _rank(self, least: float) -> bool:
        """Keep the lowest of all valleys that are known, each once, besides that of y; others sleep until the next stage.

        Returns:
            Whether one that was asleep is lower than ``least``, the lowest of the others.
        """
        scales, known = self.scales, [*self.thetas[1:], *self.asleep]
        ends = [
            self.envelope.lower(theta, theta, i) if i < len(self.thetas) else self.envelope.glance(theta)
            for i, theta in enumerate(known, 1)
        ]
        order = sorted((i for i, end in enumerate(ends) if end.finite), key=lambda i: ends[i].value)
        kept: list[int] = []
        for i in order:
            others = [self.thetas[0], *(ends[j].z for j in kept)]
            if all(size(ends[i].z - other) > TUNING.merged * scales.y_size(other) for other in others):
                kept.append(i)
        awake, asleep = kept[: TUNING.valleys], kept[TUNING.valleys :]
        n = len(self.thetas) - 1
        awake.sort(key=lambda i: i >= n)
        self.envelope.choose([0, *(i + 1 for i in awake if i < n)])
        self.thetas = [self.thetas[0], *(ends[i].z for i in awake)]
        self.asleep = [ends[i].z for i in asleep]
        self.envelope.extend(len(self.thetas))
        return any(ends[i].value < least - ends[i].noise for i in awake if i >= n)

    def _change_valley(self, point: EnvelopePoint, stage: Stage) -> bool:
        """Go with y to another valley if F + c (f + g) is smaller there."""
        c, thetas = stage.c, self.thetas
        strays = self._strays(stage, self.stages)
        here = point.value + c * (point.phi - point.gap)  # F + c (f + g), less what the smoothing does not yet penalise
        best, least = None, here - TUNING.better * max(self.seen.spread, 0.0) - point.noise
        for i in range(0 if strays else 1, len(thetas)):
            at = self.envelope.branch(thetas[i])
            if at.finite and c * at.value < least:
                best, least = (i, at), c * at.value
        if best is not None:
            i, at = best
            self.envelope.choose([i, *(j for j in range(len(thetas)) if j != i)])
            self.thetas = thetas = [thetas[i], *thetas[:i], *thetas[i + 1 :]]
            self.y = at.z
            self.pairs.clear()
            self.envelope.solve_y.pairs.clear()
        return best is not None

    def _strays(self, stage: Stage, before: Sequence[Stage]) -> bool:
        """Whether y seems to be in another valley than its theta: the gap does not fall as it should."""
        return self.weight < TUNING.light and bool(before) and stage.gap > TUNING.fallen * before[-1].gap

    def _close(self, x: Tensor, y: Tensor, end: Verdict) -> None:
        """End the pass, with the lower level solved at x."""
        self.envelope.eps = min(self.envelope.eps, TUNING.beyond_tol * self.scales.tol)
        solved, lower = False, math.nan
        with contextlib.suppress(BudgetError), self.levels.until(self.end):
            x, theta = self._settle(x, y)
            if theta.finite:
                y, lower, solved = theta.z, theta.value, self.envelope.solve_thetas[0].solved
        self.levels.move(x)
        F = self.levels.upper(y)[0]
        last = self.stages[-1] if self.stages else None
        gap, residual, bias = (last.gap, last.residual, last.bias_x) if last else (math.nan, math.nan, math.inf)
        course = f"c from {self.first:.2g} to {self.envelope.c:.2g} in {self.passed + len(self.stages)} stages"
        at = f"gap {gap:.1e} and stationarity {residual:.1e} at the last c"
        accuracy = f"{self.scales.name} to about {bias:.1e} (an estimate, not a bound); {at}"
        spread, others = self.seen.spread, [*self.thetas[1:], *self.asleep]
        self.result = Result(self.name, x, y, F, lower, solved, spread, others, course, accuracy, end)

    def _settle(self, x: Tensor, y: Tensor) -> tuple[Tensor, LowerPoint]:
        """Solve the lower level at x; where another valley is hardly lower, move x to where both are the same."""
        levels, scales = self.levels, self.scales
        levels.move(x)
        theta = self.envelope.lower(y, y)
        for _ in range(TUNING.tie_steps):
            others = [self.envelope.lower(other, theta.z, i) for i, other in enumerate(self.thetas) if i]
            lowest = min(others, key=lambda other: other.value, default=theta)
            difference, normal = theta.value - lowest.value, levels.pull(theta, lowest)
            if not difference > theta.noise + lowest.noise or not size(normal) > 0:
                break
            new = levels.project(x - difference / float(normal @ normal) * normal)
            if not size(new - x) <= TUNING.tie_reach * scales.x_size(x):
                break
            x = new
            levels.move(x)
            theta = self.envelope.lower(theta.z, theta.z)
        return x, theta

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
