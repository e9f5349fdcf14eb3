"""Continuation: bilevel problems without hyper-parameters, by quasi-Newton steps on a penalty that grows in stages."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha._checks import check_count, check_tolerance
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods._base import Method, State
from meha.methods._curvatures import Curvatures, describe, probe
from meha.methods.continuation.levels import Levels, size
from meha.methods.continuation.quasi_newton import Descent, Pairs, Point
from meha.problem import Problem

__all__ = ["Continuation", "ContinuationState"]

RATIO = 4.0
"""By how much c grows from stage to stage."""

STAGES = 40
"""At most, for each start."""

LARGEST = 1e9
"""Of c, relative to the c at which both levels weigh the same."""

FAR = 1e7
"""So many times further away than the start, a stage has no solution."""

MEMORY, COMPOSITE_MEMORY, OUTER_MEMORY, NUMBERS = 300, 50, 30, 4_000_000
"""Pairs that are kept for y and theta, without and with a non-smooth g, under which the free coordinates change often; and for
x; fewer where they would hold more numbers than the last."""

LOOSE = 0.03
"""The relative accuracy in x of the first stages."""

INNER = 400
"""Steps of one solve in y or theta, at most."""


@dataclass(frozen=True, kw_only=True)
class Continuation(Method):
    """What ``solve`` takes for problems without batches when no method is given: accurate, scale-free, nothing to choose.

    With y projected out, the penalised problem has one variable,

        Phi_c(x) = min_y { F(x, y) + c (f+g)(x, y) } - c min_theta (f+g)(x, theta),
        grad Phi_c(x) = F_x(x, y) + c ( (f+g)_x(x, y) - (f+g)_x(x, theta) ),

    which is the penalty of MEHA for gamma to infinity. Each stage minimises Phi_c over X for one c by quasi-Newton steps, whose
    memory goes on to the next; y and theta are found in the same way, by memories of their own, and only as accurately as the
    stage needs. All is first order.

    - c begins where F decides (``upper level first``), grows fourfold, and ends when x, extrapolated in 1/c, rests to ``tol``.
      A second run begins where f decides (``lower level first``); the answer is the one with the smaller F, and the report
      says whether both agree. Where they do not, there are several local solutions, and others may exist.
    - theta starts at y in each stage. In a non-convex lower level both are local solutions in one valley, as in MEHA.
    - g and Y enter by their proximal map, X by its projection; coordinates which these hold fast are taken out of the steps.
    - The steps compare values. The objectives must give the same value at the same point, so there are no batches here, and no
      dropout; see :class:`~meha.StochasticMEHA`. In single precision, where c times a small difference cancels, some four
      digits can be had, and ``tol`` is taken as no less.

    Memory: up to 300 pairs of the size of y twice (50 with g), as long as these are fewer than 4 million numbers (at least 5).

    Args:
        tol: the relative error of x at which to stop, as far as it can be estimated: by how much the extrapolated x changed
            with the last stage. It is no bound.
        both_starts: whether there is a second run.
        max_gradients: give up a run after so many gradients of f.

    A step is one quasi-Newton step in x, with the solves in y that it needs. Its numbers: ``upper`` F, ``lower`` f + g, ``gap``
    (f+g)(x, y) - (f+g)(x, theta), ``residual`` the norm of the projected gradient of Phi_c, ``c``, and ``run``, 1 or 2.

    >>> from meha.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lambda x, y: (x + y - 2).sin().sum())
    >>> run = Continuation().start(problem, torch.tensor([-6.0], dtype=torch.float64), torch.zeros(10, dtype=torch.float64))
    >>> while run.verdict is None:
    ...     info = run.step()
    >>> print(f"{float(run.x):.6f}")  # (30/2 pi - 18) / 11
    2.647627
    """

    tol: float = 1e-6
    both_starts: bool = True
    max_gradients: int = 20_000

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)
        check_count("max_gradients", self.max_gradients)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError(
                f"method: {self.name} compares values, which change from batch to batch; use StochasticMEHA() or MEHA(), or"
                " objectives of (x, y) on all data."
            )

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> ContinuationState:
        return ContinuationState(x=x, y=y, theta=y.copy(), course=Course(self), settled=False)

    def step(self, oracle: Oracle, state: ContinuationState, at: At) -> Numbers:
        if at.batch is not None:
            raise ValueError(f"batch: {self.name} takes none, got {type(at.batch).__name__}; use StochasticMEHA() or MEHA().")
        course = state.course
        return course.advance(Levels(oracle, state.x, state.y, state.theta, course.curvatures))

    def terminate(self, state: ContinuationState) -> Verdict | None:
        best = state.course.best
        return None if best is None else Verdict(Status(best.status), best.reason)

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return (
            "F seems to have no minimum over the solutions of the lower level: check its sign, or bound x and y (x_set, y_set)."
        )

    def report(self, run: Run) -> dict[str, str]:
        return run.state.course.report()


@dataclass
class ContinuationState(State):
    """x, y, theta, and the course of the run."""

    theta: Variable
    course: Course


class Stage(NamedTuple):
    """The end of a stage: c, where it ended, and where that leads for c to infinity.

    Attributes:
        extrapolated: whether the limit is more than the end itself.
        bias_x, bias_y, bias_F: relative changes of the limits with this stage, and of F.
        apart: the distance of y from theta, relative to y.
    """

    c: float
    x: Tensor
    y: Tensor
    F: float
    limit_x: Tensor
    limit_y: Tensor
    limit_F: float
    extrapolated: bool = False
    bias_x: float = math.inf
    bias_y: float = math.inf
    bias_F: float = math.inf
    gap: float = math.nan
    apart: float = math.inf


class Result(NamedTuple):
    """The end of a run; ``solved`` is whether y solves the lower level, as far as F can tell."""

    x: Tensor
    y: Tensor
    F: float
    status: str
    reason: str
    c: tuple[float, float]
    stages: int
    gap: float
    residual: float
    bias: float
    solved: bool


@dataclass(eq=False)
class Envelope:
    """What an evaluation of Phi_c leaves behind: y, theta, values, and the sizes of the parts of its gradient."""

    y: Tensor
    theta: Tensor
    F: float
    phi: float
    gap: float
    scale: float
    noise: float


@dataclass(eq=False)
class Working:
    """Where a run is.

    Attributes:
        x, y, theta: the last accepted point.
        point: Phi_c there; None when it has to be found.
        pairs_x, pairs_y, pairs_theta: memories of curvature.
        t_x, t_y, t_theta: plain steps.
        slope: the size of the gradient's parts, span: the range of F, as seen in the last stages.
        lowest, highest: of F, in the stages in which the lower level counts.
        first, used: the c of the first stage, and the gradients of f before it.
        origin: x, y, slope, span, lowest and highest at the beginning of the stage.
        tau, eps: the accuracies of the stage in x, and of the solves in y and theta, both relative.
        force: the size of F's pull on y, 1/c of its gradient; solved: whether the last solve in y or theta got below it.
        length, residual, rounding: of the last step, of the gradient, and of its rounding error, the latter relative.
        steps, failures: in this stage.
        idle: stages in a row in which F rested.
    """

    c: float
    x: Tensor
    y: Tensor
    theta: Tensor
    pairs_x: Pairs
    pairs_y: Pairs
    pairs_theta: Pairs
    used: int
    first: float = 0.0
    point: Point | None = None
    t_x: float = 0.0
    t_y: float = 0.0
    t_theta: float = 0.0
    slope: float = 0.0
    span: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    reference: float = math.nan
    rel: float = math.inf
    tau: float = 0.1
    eps: float = 0.1
    force: float = 0.0
    length: float = math.inf
    residual: float = math.inf
    rounding: float = 0.0
    solved: bool = False
    steps: int = 0
    failures: int = 0
    idle: int = 0
    stages: list[Stage] = field(default_factory=list)
    origin: tuple[Any, ...] = ()


class Course:
    """Two runs through stages of growing c, one step at a time."""

    def __init__(self, method: Continuation) -> None:
        self.tol, self.both, self.max_gradients = method.tol, method.both_starts, method.max_gradients
        self.curvatures: Curvatures = {}
        self.range = self.x_largest = self.y_largest = 0.0
        self.starts: list[float] = []
        self.results: list[Result] = []
        self.best: Result | None = None
        self.work: Working | None = None

    def advance(self, at: Levels) -> Numbers:
        """One step in x, or the end of a stage."""
        if self.work is None:
            self._begin(at)
        work = self.work
        assert work is not None
        numbers = self._step(at, work)
        if self.best is None:
            assert self.work is not None
            answer = self.results[0] if self.results else self.work  # the second run goes on in its own vectors
            at.move(answer.x, answer.y, self.work.theta)
        else:
            at.move(self.best.x, self.best.y, self.best.y)
        return numbers

    # The start

    def _begin(self, at: Levels) -> None:
        """Look at the curvatures; find the c at which both levels weigh the same, in y and also in x."""
        self.tol = max(self.tol, 10 * at.eps ** (2 / 3))
        self.x0, self.y0 = at.now()
        F, _, F_y = at.upper(self.y0)
        at.curvatures = dict.fromkeys(("F_yy", "f_yy"), 0.0)
        f = at.lower(self.y0, at.y)
        for level, value in (("upper", F), ("lower", f.value)):
            if not math.isfinite(value):
                raise ValueError(f"{level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
        self.curvatures = at.curvatures = probe(at.oracle, at.x, at.y, {}, rounds=4)
        F_yy, f_yy, F_xx, f_xy = (self.curvatures[name] for name in ("F_yy", "f_yy", "F_xx", "f_xy"))
        self.F_y = size(F_y)
        if F_yy and f_yy:
            self.balance = F_yy / f_yy
        elif f_yy and self.F_y:  # F is linear: where it draws y as far as y is from the lower level's solution
            apart = max(size(self._rough(at).z - self.y0), size(self.y0))
            self.balance = self.F_y / (f_yy * apart or f_yy)
        else:  # f is linear
            self.balance = self.F_y / size(f.gradient) if self.F_y and size(f.gradient) else 1.0
        both = min(self.balance, F_xx * f_yy / f_xy**2) if F_xx and f_xy and f_yy else self.balance
        self.starts = [0.1 * both, 10 * self.balance][: 2 if self.both else 1]
        self._open(at)

    def _rough(self, at: Levels) -> Point:
        """A rough solution of the lower level."""
        descent = self._inner_descent(at, Pairs(20), None, 1 / self.curvatures["f_yy"])
        point = descent.evaluate(self.y0)
        first = size(descent.residual(point)[0])
        for _ in range(50):
            if size(descent.residual(point)[0]) <= 0.1 * first:
                break
            new = descent.step(point, *descent.direction(point))
            if new is None:
                break
            point = new
        return point

    def _open(self, at: Levels) -> None:
        """Begin the next run at the start."""
        n, m = len(self.x0), len(self.y0)
        c = self.starts[len(self.results)]
        most = COMPOSITE_MEMORY if at.composite else MEMORY
        inner, outer = (max(5, min(limit, 2 * k + 10, NUMBERS // k)) for limit, k in ((most, m), (OUTER_MEMORY, n)))
        memories = Pairs(outer, damping=1e-4), Pairs(inner), Pairs(inner)
        self.work = Working(c, self.x0, self.y0, self.y0, *memories, used=at.oracle.counts.lower, first=c)
        self._enter(self.work, at)

    # Stages

    def _enter(self, work: Working, at: Levels) -> None:
        """Begin a stage at the present c."""
        before, work.rel = work.rel, self.balance / work.c
        if before >= 1 > work.rel and work.stages:
            work.lowest = work.highest = work.stages[-1].F
        moved = 1.0
        if len(work.stages) >= 2:
            last, previous = work.stages[-1].x, work.stages[-2].x
            moved = size(last - previous) / self._x_size(last)
        work.tau = min(max(0.03 * moved**1.5, 0.1 * self.tol), LOOSE) if work.rel < 1 else LOOSE
        work.eps = min(0.1, max(work.tau, 1e-8))
        work.pairs_y.reweigh(1 / work.c)
        work.theta = work.y
        work.slope *= 0.5
        work.span *= 0.5
        work.reference = work.stages[-1].F if work.stages else math.nan
        work.steps = work.failures = 0
        rho = at.oracle.problem.g.rho
        limit = 0.5 / rho if rho else math.inf
        F_yy, f_yy = self.curvatures["F_yy"], self.curvatures["f_yy"]
        work.t_y, work.t_theta = (min(1 / (k or 1.0), limit) for k in (F_yy / work.c + f_yy, f_yy))
        work.point = None
        work.origin = (work.x, work.y, work.slope, work.span, work.lowest, work.highest)

    def _step(self, at: Levels, work: Working) -> Numbers:
        number = len(self.results) + 1
        descent = Descent(lambda x: self._phi(at, work, x), work.pairs_x, at.project if at.constrained else None, False, 0.0)
        if work.point is None:
            point = self._phi(at, work, work.x)
            if not point.finite:
                F = work.stages[-1].F if work.stages else 0.0
                numbers = {"upper": F, "gap": math.inf, "residual": math.inf, "c": work.c, "run": number}
                self._back(at, work)
                return numbers
            self._accept(work, point)
        assert work.point is not None
        point, here = work.point, work.point.extra
        work.slope = max(work.slope, here.scale)
        work.span = max(work.span, abs(here.F - work.reference) if math.isfinite(work.reference) else 0.0)
        scale, span = self._x_size(point.z), work.span or abs(point.value) or 1.0
        reach = scale / (size(point.gradient) or 1.0)
        descent.t = min(work.t_x, 0.5 * reach) if work.t_x else 0.01 * reach
        d, remembered = descent.direction(point)
        work.residual, work.length = size(descent.residual(point)[0]), size(d) / scale
        work.rounding = here.noise / (work.slope or 1.0)
        small = work.length <= work.tau or -float(point.gradient @ d) <= 0.01 * work.tau**2 * span
        done = small and work.residual <= 0.1 * work.slope
        done = done or work.residual <= max(0.01 * work.tau**2 * work.slope, here.noise)
        numbers = {"upper": here.F, "lower": here.phi, "gap": here.gap, "residual": work.residual, "c": work.c, "run": number}

        if not done and work.failures < 3 and work.steps < (10 if work.rel >= 0.3 else 50):
            work.steps += 1
            work.eps = min(work.eps, max(1e-9, 0.1 * min(1.0, work.residual / work.slope)))
            new = descent.step(point, d, remembered, min(1.0, 0.5 / work.length))
            if new is None:
                work.failures += 1
                work.eps = max(0.03 * work.eps, 1e-10)
                work.point = None
                if work.failures > 1:
                    work.pairs_x.clear()
            else:
                s, change = new.z - point.z, new.gradient - point.gradient
                work.t_x = float(s @ s / (s @ change)) if float(s @ change) > 0 else descent.t
                self._accept(work, new)
        elif not done and work.rel >= 0.3 and size(work.x - work.origin[0]) > 100 * self._x_size(work.origin[0]):
            self._back(at, work)
        else:
            self._leave(at, work, here)
        return numbers

    def _accept(self, work: Working, point: Point) -> None:
        work.point, work.x = point, point.z
        work.y, work.theta = point.extra.y, point.extra.theta
        if work.rel < 0.3:
            self.x_largest = max(self.x_largest, self._x_size(work.x))
            self.y_largest = max(self.y_largest, self._y_size(work.y), self._y_size(work.theta))

    def _back(self, at: Levels, work: Working) -> None:
        """Leave a stage that has no solution nearby: back to where it began, with more weight on the lower level."""
        work.x, work.y, work.slope, work.span, work.lowest, work.highest = work.origin
        work.pairs_x.clear()
        work.pairs_y.clear()
        work.t_x = 0.0
        work.c *= RATIO
        if work.c <= LARGEST * self.balance and at.oracle.counts.lower - work.used <= self.max_gradients:
            return self._enter(work, at)
        reason = (
            "F + c (f + g) has no minimum near the start, or no value, for any c. Check that f has a minimum in y and F one"
            " over its solutions, or bound x and y (x_set, y_set)."
        )
        return self._close(at, work, work.x, work.y, "diverged", reason)

    def _leave(self, at: Levels, work: Working, here: Envelope) -> None:
        """End a stage; then the next, or the end of the run."""
        stage = self._extrapolated(at, work, here)
        work.stages.append(stage)
        rests = (stage.bias_F <= self.tol and stage.bias_x > 0.01) or stage.bias_F <= 1e-3 * self.tol**1.5
        work.idle = work.idle + 1 if rests else 0
        used = at.oracle.counts.lower - work.used
        if work.rel < 0.1 and stage.apart <= 0.01:
            if stage.bias_x <= self.tol and stage.bias_y <= 10 * self.tol:
                reason = (
                    f"The limit of x for c to infinity changed by {stage.bias_x:.1e} with the last stage (tol {self.tol:.1e})."
                )
                return self._close(at, work, stage.limit_x, stage.limit_y, "converged", reason)
            if work.idle >= 3:
                reason = f"F rests; x changed by {stage.bias_x:.1e} with the last stage"
                reason += ", along which F hardly depends on it." if stage.bias_x > self.tol else "."
                return self._close(at, work, stage.limit_x, stage.limit_y, "converged", reason)
            if RATIO * work.rounding > 0.1:
                reason = (
                    f"Rounding errors, which c multiplies, allow no more: x is known to about {stage.bias_x:.1e}. Use float64."
                )
                return self._close(at, work, stage.limit_x, stage.limit_y, "finished", reason)
        if len(work.stages) >= STAGES or work.c > LARGEST * self.balance or used > self.max_gradients:
            reason = f"{used} gradients of f in {len(work.stages)} stages: x is known to about {stage.bias_x:.1e}."
            advice = "Allow more (max_gradients), ask for less (tol), or look at the problem with meha.check."
            return self._close(at, work, stage.limit_x, stage.limit_y, "finished", f"{reason} {advice}")
        work.c *= RATIO
        if stage.extrapolated:  # the solution of the next stage lies a quarter of the way from the limit
            work.x = stage.limit_x + (work.x - stage.limit_x) / RATIO
            work.x = at.project(work.x) if at.constrained else work.x
            if not at.composite:
                work.y = stage.limit_y + (work.y - stage.limit_y) / RATIO
                work.y = at.prox(work.y, 1e-30) if at.bounded else work.y
        return self._enter(work, at)

    def _extrapolated(self, at: Levels, work: Working, here: Envelope) -> Stage:
        """The end of this stage, and the limit of x and y for c to infinity."""
        x, y = work.x, work.y
        limits = self._limits([stage.x for stage in work.stages] + [x], [stage.y for stage in work.stages] + [y])
        extrapolated = limits is not None and work.rel < 1
        limit_x, limit_y = limits if limits is not None and extrapolated else (x, y)
        limit_x = at.project(limit_x) if at.constrained else limit_x
        apart = size(y - work.theta) / self._y_size(y)
        stage = Stage(work.c, x, y, here.F, limit_x, limit_y, here.F, extrapolated, gap=here.gap, apart=apart)
        if not work.stages:
            return stage
        last = work.stages[-1]
        limit_F = here.F + (here.F - last.F) / (RATIO - 1)
        return stage._replace(
            limit_F=limit_F,
            bias_x=size(limit_x - last.limit_x) / self._x_size(x) + 2 * work.length,
            bias_y=size(limit_y - last.limit_y) / self._y_size(y),
            bias_F=abs(limit_F - last.limit_F) / (work.highest - work.lowest or 1.0),
        )

    def _limits(self, xs: list[Tensor], ys: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Where x and y lead: by Richardson's rule in 1/c, of second order where it agrees with the first; by a geometric
        series where their changes shrink by another factor, and steadily, as they do when the lower level is degenerate.
        """
        if len(xs) < 3:
            return None
        changes = [[size(b - a) for a, b in itertools.pairwise(points[-4:])] for points in (xs, ys)]
        if all(sizes[-1] <= 0.6 * sizes[-2] for sizes in changes):
            first = [points[-1] + (points[-1] - points[-2]) / (RATIO - 1) for points in (xs, ys)]
            if len(xs) < 4 or not all(sizes[-2] <= 0.6 * sizes[-3] for sizes in changes):
                return first[0], first[1]
            before = [points[-2] + (points[-2] - points[-3]) / (RATIO - 1) for points in (xs, ys)]
            second = [new + (new - old) / (RATIO**2 - 1) for new, old in zip(first, before, strict=True)]
            agree = all(size(b - a) <= 0.5 * size(a - old) for a, b, old in zip(first, second, before, strict=True))
            return (second[0], second[1]) if agree else (first[0], first[1])
        found = []
        for points, sizes in zip((xs, ys), changes, strict=True):
            if len(sizes) < 3 or not (sizes[0] and sizes[1]):
                return None
            factor, earlier = sizes[2] / sizes[1], sizes[1] / sizes[0]
            if factor > 0.9 or abs(factor - earlier) > 0.1 * factor:
                return None
            found.append(points[-1] + (points[-1] - points[-2]) * (factor / (1 - factor)))
        return found[0], found[1]

    def _endless(self, at: Levels, work: Working, x: Tensor, y: Tensor, F: float) -> str:
        """Whether F stays as low when the coordinates of x that went furthest go twice as far."""
        moved = x - self.x0
        distance = moved.abs()
        if not float(distance.max()) > 0:
            return ""
        furthest = distance >= 0.5 * distance.max()
        beyond_all = torch.where(furthest, x + 1e3 * moved, x)
        if at.constrained and not torch.equal(at.project(beyond_all), beyond_all):  # X holds them
            return ""
        at.move(torch.where(furthest, x + moved, x))
        theta = self._solve(at, work, "theta", y, y)
        beyond = at.upper(theta.z)[0] if theta.finite else math.nan
        at.move(x)
        if not beyond <= F + self.tol * (work.highest - work.lowest):
            return ""
        return (
            f"F stays as low when {int(furthest.sum())} of {len(x)} coordinates of x go twice as far from x0: the optimum may"
            " lie at infinity. Bound x, as with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
        )

    def _close(self, at: Levels, work: Working, x: Tensor, y: Tensor, status: str, reason: str) -> None:
        """End a run with the lower level solved at x; then begin the other, or choose between them."""
        at.move(x)
        work.eps = min(work.eps, 0.1 * self.tol)
        theta = self._solve(at, work, "theta", y, y)
        y, solved = (theta.z, work.solved) if theta.finite else (y, False)
        F = at.upper(y)[0]
        if status != "diverged":
            endless = self._endless(at, work, x, y, F)
            status, reason = (Status.AT_INFINITY.value, endless) if endless else (status, reason)
        last = work.stages[-1] if work.stages else None
        gap, bias = (math.nan, math.inf) if last is None else (last.gap, last.bias_x)
        self.results.append(
            Result(x, y, F, status, reason, (work.first, work.c), len(work.stages), gap, work.residual, bias, solved)
        )
        self.range = max(self.range, work.highest - work.lowest)
        if len(self.results) < len(self.starts):
            return self._open(at)
        self.best = self.results[0]
        for other in self.results[1:]:
            worth = [(result.status != "diverged", result.solved) for result in (self.best, other)]
            gain = self.best.F - other.F
            if worth[1] > worth[0] or (worth[1] == worth[0] and gain > 1e-6 * self.range):
                self.best = other
        return None

    # Phi_c and the solves in y and theta

    def _phi(self, at: Levels, work: Working, x: Tensor) -> Point:
        """Phi_c at x; y and theta start where they were at the last accepted point."""
        nothing = Point(x, math.nan, torch.full_like(x, math.nan))
        if size(x) > FAR * max(self._x_size(work.origin[0]), self.x_largest):
            return nothing
        at.move(x)
        y = self._solve(at, work, "y", work.y, work.theta)
        if not y.finite:
            return nothing
        F, F_x, f, _ = y.extra
        phi = f + y.nonsmooth
        theta = self._solve(at, work, "theta", work.theta, y.z)
        if not theta.value <= phi + theta.noise:
            theta = self._solve(at, work, "theta", y.z, y.z)
        if not theta.finite:
            return nothing
        c, gap, pull = work.c, phi - theta.value, work.c * at.pull(y, theta)
        noise = c * (y.noise + theta.noise) + work.eps**2 * c * abs(gap)
        work.lowest, work.highest = min(work.lowest, F), max(work.highest, F)
        blur = 2 * at.eps * c * (size(theta.extra) + self.curvatures["f_xy"] * size(y.z))
        extra = Envelope(y.z, theta.z, F, phi, gap, size(F_x) + size(pull), blur)
        return Point(x, F + c * gap, F_x + pull, noise=noise, extra=extra)

    def _inner_descent(self, at: Levels, pairs: Pairs, weight: float | None, t: float) -> Descent:
        """Steps on f + g, plus weight F if there is one."""
        evaluate = at.lower if weight is None else lambda y: at.both(y, weight)
        return Descent(evaluate, pairs, at.prox if at.bounded else None, at.composite, t)

    def _solve(self, at: Levels, work: Working, which: str, z: Tensor, other: Tensor) -> Point:
        """Minimise F/c + f + g in y, or f + g in theta, from z, until y - theta is known to the relative accuracy eps."""
        is_y = which == "y"
        pairs, t = (work.pairs_y, work.t_y) if is_y else (work.pairs_theta, work.t_theta)
        descent = self._inner_descent(at, pairs, 1 / work.c if is_y else None, t)
        curvature = self.curvatures["f_yy"] + (self.curvatures["F_yy"] / work.c if is_y else 0.0)
        point = descent.evaluate(z)
        if not point.finite:
            return point
        smallest, idle, cleared, start = math.inf, 0, False, self._y_size(z)
        descent.t = min(descent.t, 10 * start / (size(point.gradient) or math.inf) or descent.t)
        for _ in range(INNER):
            if point.upper is not None:
                work.force = max(size(point.upper), 0.01 * self.tol * self.F_y) / work.c
            d, remembered = descent.direction(point)
            residual, length, here = size(descent.residual(point)[0]), size(d), size(point.z)
            enough = work.eps * max(size(point.z - other), 1e-3 * self.tol * self._y_size(point.z))
            if (residual <= work.eps * work.force and length <= enough) or residual <= 2 * at.eps * curvature * here:
                break
            idle = 0 if residual < 0.5 * smallest else idle + 1
            smallest = min(smallest, residual)
            drop = -float(descent.residual(point)[0] @ d)
            nothing = drop <= 10 * point.noise
            if (idle >= 8 and (nothing or length <= at.eps**0.5 * here)) or length <= 10 * at.eps * here:
                break
            new = descent.step(point, d, remembered)
            if new is None:
                if cleared or not remembered or nothing:
                    break
                pairs.clear()
                cleared = True
                continue
            point, cleared = new, False
            if size(point.z) > FAR * max(start, self.y_largest):
                return replace(point, smooth=-math.inf)
        work.solved = size(descent.residual(point)[0]) <= 1e3 * max(work.force, self.tol * self.F_y)
        if is_y:
            work.t_y = descent.t
        else:
            work.t_theta = descent.t
        return point

    def _x_size(self, x: Tensor) -> float:
        return max(size(x), size(x - self.x0)) or 1.0

    def _y_size(self, y: Tensor) -> float:
        return max(size(y), size(y - self.y0)) or 1.0

    # The report

    def report(self) -> dict[str, str]:
        """What was found about the problem, how c went, which accuracy was reached, and whether both starts agree."""
        if not self.curvatures:
            return {}
        lines = {"problem": f"{describe(self.curvatures)}; both levels weigh the same at c = {self.balance:.2g}"}
        best = self.best or (self.results[0] if self.results else None)
        if best is not None:
            lines["course"] = f"c from {best.c[0]:.2g} to {best.c[1]:.2g} in {best.stages} stages"
            at = f"gap {best.gap:.1e} and stationarity {best.residual:.1e} at the last c"
            lines["accuracy"] = f"x to about {best.bias:.1e} (an estimate, no bound); {at}"
        if len(self.results) == 2:
            a, b = self.results
            apart = size(a.x - b.x) / self._x_size(a.x)
            if apart <= max(100 * self.tol, 1e-3):
                lines["starts"] = "upper level first and lower level first agree"
            else:
                lines["starts"] = (
                    f"upper level first F = {a.F:.6g}, lower level first F = {b.F:.6g}: different local solutions, and there"
                    " may be others"
                )
        return lines

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        kept = {name: value for name, value in vars(self).items() if name not in ("results", "best", "work")}
        kept["results"] = [tuple(result) for result in self.results]
        kept["best"] = None if self.best is None else self.results.index(self.best)
        if self.work is not None:
            work = {name: value for name, value in vars(self.work).items() if not isinstance(value, Pairs | Point)}
            work |= {name: getattr(self.work, name).state_dict() for name in ("pairs_x", "pairs_y", "pairs_theta")}
            work["stages"] = [tuple(stage) for stage in self.work.stages]
            point = self.work.point
            if point is not None:
                work["point"] = {**vars(point), "seen": None, "extra": vars(point.extra)}
            kept["work"] = work
        return copy.deepcopy(kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another course was."""
        kept = copy.deepcopy(dict(state))
        work, best = kept.pop("work", None), kept.pop("best")
        self.results = [Result(*result) for result in kept.pop("results")]
        self.best = None if best is None else self.results[best]
        vars(self).update(kept)
        self.work = None
        if work is not None:
            for name in ("pairs_x", "pairs_y", "pairs_theta"):
                saved, work[name] = work[name], Pairs(work[name]["limit"], work[name]["damping"])
                work[name].load_state_dict(saved)
            work["stages"] = [Stage(*stage) for stage in work["stages"]]
            point = work.get("point")
            if point is not None:
                work["point"] = Point(**{**point, "extra": Envelope(**point["extra"])})
            self.work = Working(**work)
