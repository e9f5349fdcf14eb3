"""PenaltyContinuation: minimise F + c (f + g - v) for a growing penalty c, where v is the value of the lower level."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from meha.engines.attempt import EngineKind, Result, Start, plain, restored
from meha.engines.base import Engine, EngineState, unverified
from meha.engines.tuning import TUNING
from meha.lower.curvature import Curvatures, balance, flatten, probe
from meha.lower.flat_problem import BudgetError, FlatProblem, LowerPoint, PenaltyPoint
from meha.method.method import Numbers
from meha.method.status import Status, Verdict
from meha.numerics.extrapolation import richardson
from meha.numerics.limited_memory import EvaluatedPoint, LimitedMemory, PointT, QuasiNewtonDescent, vector_norm
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable

__all__ = [
    "EnvelopePoint",
    "LowerSolve",
    "PenaltyContinuation",
    "PenaltyEnvelope",
    "PenaltyPass",
    "PenaltyStage",
    "Scales",
    "Sizes",
    "compare_stages",
    "extrapolate_stages",
    "measure",
    "stage_accuracy",
    "stage_verdict",
]


@dataclass(eq=False)
class Sizes:
    """The start (x0, y0), by which the sizes of x and y are judged.

    Attributes:
        tol: the accuracy asked for, or the finest that the precision allows.
        simple: whether there is no x, so that the accuracy of y counts.
        x_largest, y_largest: the largest sizes of x and y in stages that the lower level shapes.
    """

    x0: Tensor
    y0: Tensor
    tol: float
    simple: bool
    x_largest: float = 0.0
    y_largest: float = 0.0

    @property
    def name(self) -> str:
        """The variable whose accuracy counts."""
        return "y" if self.simple else "x"

    def x_size(self, x: Tensor) -> float:
        """The size of x, or its distance from the start where that is larger."""
        return max(vector_norm(x), vector_norm(x - self.x0)) or 1.0

    def y_size(self, y: Tensor) -> float:
        """The same for y."""
        return max(vector_norm(y), vector_norm(y - self.y0)) or 1.0

    def note(self, x: Tensor, y: Tensor, theta: Tensor) -> None:
        """Keep the largest sizes."""
        self.x_largest = max(self.x_largest, self.x_size(x))
        self.y_largest = max(self.y_largest, self.y_size(y), self.y_size(theta))

    @classmethod
    def of(cls, levels: FlatProblem, tol: float) -> Sizes:
        """The sizes of the present point."""
        tol = max(tol, TUNING.least_tol * levels.eps**TUNING.least_tol_power)
        return cls(flatten(levels.x), flatten(levels.y), tol, levels.oracle.problem._without_x)


@dataclass(eq=False, kw_only=True)
class Scales(Sizes):
    """What is measured at the start, before the first pass.

    Attributes:
        slope: the norm of F_y at the start.
        balance: the c at which both levels weigh the same.
        starts: the first c of each pass.
        proximal: the weight, where the levels balance, of a proximal term that vanishes as c grows; 0 if there is none.
    """

    curvatures: Curvatures
    slope: float
    balance: float
    starts: tuple[float, ...]
    proximal: float = 0.0

    @property
    def growth(self) -> float:
        """The growth of c from stage to stage; the bias falls by the ratio."""
        return TUNING.ratio**2 if self.proximal else TUNING.ratio

    def tie(self, c: float) -> float:
        """The weight of the proximal term at c.

        It falls with the root of c: F, of weight 1/c, then draws y away from the response by as much as the term does.
        """
        return self.proximal * math.sqrt(self.balance / c)


def measure(levels: FlatProblem, sizes: Sizes, both_starts: bool) -> Scales:
    """Probe the curvatures at the start, and balance both levels in y; for the first pass, also in x.

    Raises:
        ValueError: an objective is not finite there.
    """
    levels.move(sizes.x0, sizes.y0)
    y0 = sizes.y0
    F, _, F_y = levels.upper(y0)
    lower = levels.lower(y0)
    for level, value in (("upper", F), ("lower", lower.value)):
        if not math.isfinite(value):
            raise ValueError(f"{level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=TUNING.probes)
    F_xx, F_yy, f_yy, f_xy = (curvatures[name] for name in ("F_xx", "F_yy", "f_yy", "f_xy"))
    slope, f_slope = vector_norm(F_y), vector_norm(lower.gradient)
    if F_yy and f_yy:
        in_y = F_yy / f_yy
    elif f_yy and slope:  # F is linear: where it draws y as far as y is from the lower level's solution
        apart = max(vector_norm(_rough_solution(levels, y0).z - y0), vector_norm(y0))
        in_y = slope / (f_yy * apart or f_yy)
    else:  # f is linear
        in_y = slope / f_slope if slope and f_slope else 1.0
    in_both = min(in_y, balance(F_xx, F_yy, f_yy, f_xy))
    starts = (TUNING.upper_first * in_both, TUNING.lower_first * in_y)[: 2 if both_starts else 1]
    scales = Scales(**vars(sizes), curvatures=curvatures, slope=slope, balance=in_y, starts=starts)
    if levels.oracle.response_term.vanishes:  # F has no say in which basin y is
        scales.starts, scales.proximal = (TUNING.lower_first * in_y,), TUNING.proximal * (f_yy or 1.0)
        scales.tol = max(sizes.tol, levels.eps**TUNING.least_tol_proximal_power)
    return scales


def _rough_solution(levels: FlatProblem, y: Tensor) -> LowerPoint:
    """Solve the lower level roughly."""
    descent = levels.descent(levels.lower, LimitedMemory(TUNING.rough_pairs), 1 / levels.curvatures["f_yy"])
    point = descent.evaluate(y)
    first = vector_norm(descent.residual(point).r)
    for _ in range(TUNING.rough_steps):
        if vector_norm(descent.residual(point).r) <= TUNING.rough_reduction * first:
            break
        new = descent.step(point, *descent.direction(point))
        if new is None:
            break
        point = new
    return point


class PenaltyStage(NamedTuple):
    """The end of a stage: c, x, y, values there, and the limits for c to infinity.

    Attributes:
        length: the size of the next step, relative to x.
        blur: the rounding error of the gradient, relative to the largest gradient.
        apart: the distance of y from theta, relative to y.
        solved: whether x is as accurate as the stage demands.
        bias_x, bias_y, bias_F: relative changes of the limits with this stage; the first is that of y where there is no x.
    """

    c: float
    x: Tensor
    y: Tensor
    F: float
    gap: float
    residual: float
    length: float
    blur: float
    apart: float
    solved: bool
    limit_x: Tensor
    limit_y: Tensor
    limit_F: float
    bias_x: float = math.inf
    bias_y: float = math.inf
    bias_F: float = math.inf


def stage_accuracy(stages: Sequence[PenaltyStage], scales: Scales) -> float:
    """The relative accuracy in x of the next stage."""
    moved = 1.0
    if len(stages) >= 2:
        moved = vector_norm(stages[-1].x - stages[-2].x) / scales.x_size(stages[-1].x)
    return min(
        max(TUNING.stage_accuracy * moved**TUNING.stage_accuracy_power, TUNING.last_accuracy * scales.tol),
        TUNING.first_stage_accuracy,
    )


def extrapolate_stages(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Where x and y lead for c to infinity, if that can be said.

    By Richardson's rule in 1/c, of second order where that agrees with the first; by a geometric series where their changes
    shrink by another factor, and steadily, as they do when the lower level is degenerate.
    """
    both = xs, ys
    changes = [[vector_norm(b - a) for a, b in itertools.pairwise(points[-4:])] for points in both]
    if len(xs) <= 2:
        return None
    many = len(changes[0]) > 2
    if all(sizes[-1] <= TUNING.shrinking * sizes[-2] for sizes in changes):
        first = [richardson(points[-1], points[-2], TUNING.ratio) for points in both]
        if many and all(sizes[-2] <= TUNING.shrinking * sizes[-3] for sizes in changes):
            before = [richardson(points[-2], points[-3], TUNING.ratio) for points in both]
            second = [richardson(new, old, TUNING.ratio**2) for new, old in zip(first, before, strict=True)]
            if all(vector_norm(b - a) <= 0.5 * vector_norm(a - old) for a, b, old in zip(first, second, before, strict=True)):
                return second[0], second[1]
        return first[0], first[1]
    if not many or not all(sizes[-2] and sizes[-3] for sizes in changes):
        return None
    factors = [sizes[-1] / sizes[-2] for sizes in changes]
    for factor, sizes in zip(factors, changes, strict=True):
        if factor > TUNING.steady or abs(factor - sizes[-2] / sizes[-3]) > TUNING.unsteady * factor:
            return None
    x, y = (z[-1] + (z[-1] - z[-2]) * (factor / (1 - factor)) for z, factor in zip(both, factors, strict=True))
    return x, y


def compare_stages(stage: PenaltyStage, last: PenaltyStage, scales: Scales, spread: float) -> PenaltyStage:
    """The stage with F's limit, and with its biases: changes of the limits since the last stage, those of F relative to its
    ``spread``.
    """
    limit_F = richardson(stage.F, last.F, TUNING.ratio)
    bias_y = vector_norm(stage.limit_y - last.limit_y) / scales.y_size(stage.y)
    bias_x = vector_norm(stage.limit_x - last.limit_x) / scales.x_size(stage.x) + 2 * stage.length
    return stage._replace(
        limit_F=limit_F,
        bias_x=bias_y if scales.simple else bias_x,
        bias_y=bias_y,
        bias_F=abs(limit_F - last.limit_F) / (spread or 1.0),
    )


def stage_verdict(stages: Sequence[PenaltyStage], scales: Scales, spread: float) -> Verdict | None:
    """Whether a pass ends with the last stage, and why; only stages that were solved are evidence."""
    stage, tol = stages[-1], scales.tol
    name, bias = scales.name, f"{stage.bias_x:.1e}"
    close = 2 * stage.c * stage.gap <= TUNING.closed * spread
    if scales.balance / stage.c < TUNING.may_end_below and stage.apart <= TUNING.joined and close:
        solved = all(recent.solved for recent in stages[-2:])
        if solved and stage.bias_x <= tol and stage.bias_y <= TUNING.y_tol * tol:
            return Verdict(
                Status.CONVERGED, f"{name}, extrapolated in 1/c, changed by {bias} in the last stage (tol {tol:.1e})."
            )
        if solved and all(_rests(recent, tol) for recent in stages[-TUNING.F_rest_stages :]):
            where = ", in directions in which F is almost constant" if stage.bias_x > tol else ""
            return Verdict(Status.CONVERGED, f"F no longer changes; {name} changed by {bias} in the last stage{where}.")
        if scales.growth * stage.blur > TUNING.blurred:
            message = f"{name} is accurate to about {bias}; rounding errors, which c multiplies, prevent more. Use float64."
            return Verdict(Status.FINISHED, message)
    if len(stages) >= TUNING.max_stages or stage.c > TUNING.largest_c * scales.balance:
        unsolved = "" if stage.solved else ", of which the last was not solved"
        message = f"{name} is accurate to about {bias} after {len(stages)} stages{unsolved}."
        return Verdict(Status.FINISHED, f"{message} Ask for less accuracy (tol), or inspect the problem with meha.check.")
    return None


def _rests(stage: PenaltyStage, tol: float) -> bool:
    """Whether F changed so little with a stage that further ones are of no use."""
    flat = stage.bias_F <= tol and stage.bias_x > TUNING.unsettled
    return flat or stage.bias_F <= TUNING.F_rest * tol**TUNING.F_rest_power


@dataclass(eq=False, kw_only=True)
class EnvelopePoint(EvaluatedPoint):
    """Phi_c at x.

    Attributes:
        y: the lower solution under the pull of F.
        thetas: a lower solution in each basin, that of y first.
        shares: the weight of each basin in the value function.
        F, phi, gap: F and f + g at y, and by how much f + g at y exceeds the least at a theta.
        slope, blur: the size of the parts of the gradient, and their rounding error.
    """

    y: Tensor
    thetas: list[Tensor]
    shares: list[float]
    F: float = math.nan
    phi: float = math.nan
    gap: float = math.nan
    slope: float = math.nan
    blur: float = math.nan


class LowerSolve(Generic[PointT]):
    """Minimises F/c + f + g, or f + g (c infinite), again and again as x and c change.

    Args:
        evaluate: the point at y, with the weight 1/c of F.

    Attributes:
        pairs, t: its memory of curvature, and the plain step.
        force: the size of F's pull on y, 1/c of its gradient.
        solved: whether the last solve got the residual to the size of the force.
    """

    def __init__(self, levels: FlatProblem, scales: Scales, evaluate: Callable[[Tensor, float], PointT]) -> None:
        self.levels, self.scales, self.evaluate = levels, scales, evaluate
        self.pairs = LimitedMemory.sized(TUNING.composite_pairs if levels.composite else TUNING.pairs, len(scales.y0))
        self.force, self.solved = 0.0, False

    def enter(self, c: float) -> None:
        """Begin a stage."""
        self.c, rho = c, self.levels.oracle.problem.g.rho
        self.curvature = self.scales.curvatures["F_yy"] / c + self.scales.curvatures["f_yy"]
        self.t = min(1 / (self.curvature or 1.0), 0.5 / rho if rho else math.inf)
        self.pairs.reweigh(1 / c)

    def __call__(self, z: Tensor, other: Tensor, eps: float) -> PointT:
        """Minimise from z on, until the distance from ``other`` is known to the relative accuracy ``eps``."""
        scales, rounding = self.scales, self.levels.eps
        descent = self.levels.descent(lambda at: self.evaluate(at, 1 / self.c), self.pairs, self.t)
        point = descent.evaluate(z)
        if not point.finite:
            return point
        smallest, idle, cleared, start = math.inf, 0, False, max(scales.y_size(z), scales.y_size(other))
        descent.t = min(descent.t, TUNING.leap * start / (vector_norm(point.gradient) or math.inf) or descent.t)
        for _ in range(TUNING.inner_steps):
            if point.upper is not None:
                self.force = max(vector_norm(point.upper), TUNING.least_force * scales.tol * scales.slope) / self.c
            d, remembered = descent.direction(point)
            r = descent.residual(point).r
            residual, length, here = vector_norm(r), vector_norm(d), vector_norm(point.z)
            enough = eps * max(vector_norm(point.z - other), TUNING.least_distance * scales.tol * scales.y_size(point.z))
            if (residual <= eps * self.force and length <= enough) or residual <= 2 * rounding * self.curvature * here:
                break
            idle = 0 if residual < 0.5 * smallest else idle + 1
            smallest = min(smallest, residual)
            nothing = -float(r @ d) <= TUNING.within_noise * point.noise
            if idle >= TUNING.patience and (nothing or length <= rounding**0.5 * here):
                break
            if length <= TUNING.within_rounding * rounding * here:
                break
            new = descent.step(point, d, remembered)
            if new is None:
                if cleared or not remembered or nothing:
                    break
                self.pairs.clear()
                cleared = True
                continue
            point, cleared = new, False
            if vector_norm(point.z) > TUNING.far * max(start, scales.y_largest):
                return replace(point, smooth=-math.inf)
        self.solved = vector_norm(descent.residual(point).r) <= TUNING.solved * max(self.force, scales.tol * scales.slope)
        self.t = descent.t
        return point

    def state_dict(self) -> dict[str, Any]:
        """What the next solve depends on."""
        return {"c": self.c, "t": self.t, "force": self.force, "solved": self.solved, "pairs": self.pairs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another solve was."""
        self.enter(state["c"])
        self.t, self.force, self.solved = state["t"], state["force"], state["solved"]
        self.pairs.load_state_dict(state["pairs"])


class PenaltyEnvelope:
    """Phi_c as a function of x, with c and the accuracy ``eps`` of the solves.

    The value function is the least over the basins that are known, smoothed where several are as low: with the weights p of
    the basins and mu = kappa / c it is

        v(x) = - mu log( sum_i p_i exp( - v_i(x) / mu ) ).

    Its gradient is that of sum_i s_i v_i, with shares s_i that are multipliers: where the optimum lies on the border between
    two basins, F alone would cross it, and the share of the basin beyond is what holds x back. From stage to stage the shares
    become the weights, divided by the growth of c, so that the smoothing leaves no error.

    Attributes:
        weights: p, one for each basin; the first is the one of y.
        kappa: the part of the range of F over which the smoothing extends.
    """

    def __init__(self, levels: FlatProblem, scales: Scales) -> None:
        self.levels, self.scales = levels, scales
        self.solve_y = LowerSolve(levels, scales, levels.penalty)
        self.solve_thetas = [self._new()]
        self.weights, self.kappa = [1.0], 0.0

    def _new(self) -> LowerSolve[LowerPoint]:
        return LowerSolve(self.levels, self.scales, lambda theta, weight: self.levels.lower(theta))

    def enter(self, c: float, eps: float) -> None:
        """Begin a stage."""
        self.c, self.eps = c, eps
        if self.scales.proximal:
            self.levels.oracle.response_term.weight = self.scales.tie(c)
        self.solve_y.enter(c)
        for solve in self.solve_thetas:
            solve.enter(math.inf)

    def choose(self, kept: Sequence[int]) -> None:
        """Keep some of the basins, in this order."""
        self.solve_thetas = [self.solve_thetas[i] for i in kept]
        self.reweigh([self.weights[i] for i in kept])

    def extend(self, n: int) -> None:
        """Make room for further basins, ``n`` in all."""
        while len(self.solve_thetas) < n:
            self.solve_thetas.append(self._new())
            self.solve_thetas[-1].enter(math.inf)
        self.reweigh([*self.weights, *[TUNING.new_weight] * (n - len(self.weights))])

    def reweigh(self, weights: Sequence[float]) -> None:
        """Set the weights of all basins; the first gets what the others leave."""
        least = TUNING.least_weight * min(1.0, self.scales.balance / self.c)
        others = [max(weight, least) for weight in weights[1:]]
        first = max(1 - sum(others), least)
        self.weights = [weight / (first + sum(others)) for weight in (first, *others)]

    def lower(self, theta: Tensor, other: Tensor, basin: int = 0) -> LowerPoint:
        """Solve the lower level in a basin at the present x."""
        solve = self.solve_thetas[basin]
        solve.force = self.solve_y.force
        return solve(theta, other, self.eps)

    def solve_elsewhere(self, theta: Tensor) -> LowerPoint:
        """Solve the lower level from another point; it leaves no trace in the memory."""
        solve = self._new()
        solve.enter(math.inf)
        solve.force = self.solve_y.force
        return solve(theta, theta, self.eps)

    def branch(self, theta: Tensor) -> PenaltyPoint:
        """The lower solution under the pull of F, from another basin; it leaves no trace in the memory."""
        solve = LowerSolve(self.levels, self.scales, self.levels.penalty)
        solve.enter(self.c)
        return solve(theta, theta, self.eps)

    def __call__(self, x: Tensor, y: Tensor, thetas: Sequence[Tensor], far: float) -> EnvelopePoint:
        """Evaluate Phi_c at x, with solves that start at y and the thetas; NaN where one fails, or x is larger than ``far``."""
        nowhere = EnvelopePoint(x, math.nan, torch.full_like(x, math.nan), y=y, thetas=list(thetas), shares=self.weights)
        if vector_norm(x) > far:
            return nowhere
        self.levels.move(x)
        at_y = self.solve_y(y, thetas[0], self.eps)
        if not at_y.finite:
            return nowhere
        y, F, F_x, phi = at_y.z, at_y.F, at_y.F_x, at_y.f + at_y.nonsmooth
        ends = [self.lower(thetas[0], y)]
        if not ends[0].value <= phi + ends[0].noise:
            ends = [self.lower(y, y)]
        ends += [self.lower(theta, y, i) for i, theta in enumerate(thetas) if i]
        if not all(end.finite for end in ends):
            return nowhere
        c, least = self.c, min(ends, key=lambda end: end.value)
        shares, smooth = self._shares([end.value - least.value for end in ends])
        pull = c * sum(
            (share * self.levels.pull(at_y, end) for share, end in zip(shares, ends, strict=True) if share), torch.zeros_like(x)
        )
        gap, slope = phi - least.value, vector_norm(F_x) + vector_norm(c * self.levels.pull(at_y, ends[0]))
        noise = c * (at_y.noise + least.noise) + self.eps**2 * c * abs(gap)
        blur = 2 * self.levels.eps * c * (vector_norm(least.f_x) + self.scales.curvatures["f_xy"] * vector_norm(y))
        value = F + c * (gap - smooth)
        point = EnvelopePoint(x, value, F_x + pull, noise=noise, y=y, thetas=[end.z for end in ends], shares=shares)
        point.F, point.phi, point.gap, point.slope, point.blur = F, phi, gap, slope, blur
        return point

    def _shares(self, heights: Sequence[float]) -> tuple[list[float], float]:
        """The shares of basins of these heights above the lowest, and by how much the smoothed minimum differs from it."""
        if len(heights) == 1:
            return [1.0], 0.0
        mu = self.kappa / self.c
        parts = [p * (math.exp(-h / mu) if mu else float(h <= 0)) for p, h in zip(self.weights, heights, strict=True)]
        return [part / sum(parts) for part in parts], -mu * math.log(sum(parts))

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluation depends on."""
        thetas = [solve.state_dict() for solve in self.solve_thetas]
        own = {"c": self.c, "eps": self.eps, "weights": self.weights, "kappa": self.kappa}
        return own | {"solve_y": self.solve_y.state_dict(), "solve_thetas": thetas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another envelope was."""
        self.c, self.eps, self.weights, self.kappa = (state[name] for name in ("c", "eps", "weights", "kappa"))
        if self.scales.proximal:
            self.levels.oracle.response_term.weight = self.scales.tie(self.c)
        self.solve_y.load_state_dict(state["solve_y"])
        self.solve_thetas = [self._new() for _ in state["solve_thetas"]]
        for solve, saved in zip(self.solve_thetas, state["solve_thetas"], strict=True):
            solve.load_state_dict(saved)


class StageEvaluation(NamedTuple):
    """The largest gradient and change of F, which fade from stage to stage, and the range of F since the levels balance."""

    slope: float = 0.0
    span: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    @property
    def spread(self) -> float:
        """The range of F."""
        return self.highest - self.lowest


class PenaltyPass:
    """One pass; ``result`` is set when it is over.

    Args:
        start: where it begins.
        allowed: gradients of f that it may take.

    Attributes:
        x, y, thetas: the last accepted point; ``point`` is Phi_c there, None when it has to be evaluated.
        asleep: lower solutions in basins that are too high to matter in this stage.
        t: a step along the gradient.
        weight: that of the upper level in the stage, 1 where the levels balance.
        origin: x, y and ``seen`` at the beginning of the stage.
        tau: the relative accuracy in x of the stage.
        steps, failures: the steps of the stage, and those that failed.
        widest: the largest size of x so far.
        passed: the number of stages before the present basin was entered.
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

    def __init__(self, levels: FlatProblem, scales: Scales, start: Start, allowed: int) -> None:
        self.levels, self.scales, self.name, self.first, self.allowed = levels, scales, start.name, start.c, allowed
        self.x, self.y, self.t, self.weight, self.seen = start.x, start.y, 0.0, math.inf, StageEvaluation()
        self.thetas, self.inactive_basins = [start.y, *start.others[: TUNING.basins]], start.others[TUNING.basins :]
        self.envelope = PenaltyEnvelope(levels, scales)
        self.passed, self.widest = 0, 0.0
        self.pairs = LimitedMemory.sized(TUNING.outer_pairs, len(self.x), TUNING.damping)
        self.stages: list[PenaltyStage] = []
        self.end = levels.spent + allowed
        self.result: Result | None = None
        self._begin_stage(start.c)

    def _begin_stage(self, c: float) -> None:
        """Begin a stage."""
        before, self.weight = self.weight, self.scales.balance / c
        seen = self.seen._replace(slope=0.5 * self.seen.slope, span=0.5 * self.seen.span)
        if before >= 1 > self.weight and self.stages:
            seen = seen._replace(lowest=self.stages[-1].F, highest=self.stages[-1].F)
        self.tau = stage_accuracy(self.stages, self.scales) if self.weight < 1 else TUNING.first_stage_accuracy
        self.envelope.enter(c, min(TUNING.coarsest_solve, max(self.tau, TUNING.finest_solve_first)))
        self.envelope.extend(len(self.thetas))
        self.envelope.kappa = TUNING.smoothing * max(seen.spread, seen.span, 0.0)
        self.thetas = [self._displaced_theta(), *self.thetas[1:]]
        self.seen, self.origin = seen, (self.x, self.y, seen)
        self.point: EnvelopePoint | None = None
        self.steps = self.failures = 0

    def _displaced_theta(self) -> Tensor:
        """A point near y, from which theta finds its way down even if y is at a maximum or saddle of f."""
        if self.levels.composite:  # a kink of g holds y where a displacement would only cost steps
            return self.y
        generator = torch.Generator().manual_seed(self.passed + len(self.stages))
        d = torch.randn(len(self.y), generator=generator, dtype=torch.float64, device="cpu").to(self.y)
        way = max(TUNING.displaced_least * self.scales.y_size(self.y), TUNING.displaced * vector_norm(self.y - self.thetas[0]))
        return self.levels.inside(self.y + way / vector_norm(d) * d)

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
            self._abandon_stage()
            return {"upper": F, "gap": math.inf, "residual": math.inf, "c": c}
        self._accept(point)
        change = abs(point.F - self.stages[-1].F) if self.stages else 0.0
        seen = self.seen = self.seen._replace(slope=max(self.seen.slope, point.slope), span=max(self.seen.span, change))
        scale, span = scales.x_size(point.z), seen.span or abs(point.value) or 1.0
        self.widest = max(self.widest, scale)
        longest = 0.5 * max(1.0, TUNING.stride * self.widest / scale)  # x may cross zero, where its size is none
        reach = scale / (vector_norm(point.gradient) or 1.0)
        t = min(self.t, longest * reach) if self.t else TUNING.first_step * reach
        project = self.levels.project if self.levels.constrained else None
        descent = QuasiNewtonDescent(
            self._phi, self.pairs, project, False, t, kinks=len(self.thetas) > 1, clock=self.levels.clock
        )
        d, remembered = descent.direction(point)
        residual, length = vector_norm(descent.residual(point).r), vector_norm(d) / scale
        small = length <= tau or -float(point.gradient @ d) <= TUNING.negligible * tau**2 * span
        done = small and residual <= TUNING.stationary * seen.slope
        done = done or residual <= max(TUNING.negligible * tau**2 * seen.slope, point.blur)

        early = self.weight >= TUNING.lower_shapes_below
        enough = self.failures >= TUNING.max_failures or self.steps >= (TUNING.early_steps if early else TUNING.late_steps)
        if not done and not enough:
            self.steps += 1
            envelope.eps = min(
                envelope.eps, max(TUNING.finest_solve_after_step, TUNING.in_step * min(1.0, residual / seen.slope))
            )
            self._move(descent, point, descent.step(point, d, remembered, min(1.0, longest / length)))
        elif not done and early and vector_norm(self.x - self.origin[0]) > TUNING.wandered * scales.x_size(self.origin[0]):
            self._abandon_stage()
        else:
            self._end_stage(point, residual, length, done)
        return {"upper": point.F, "lower": point.phi, "gap": point.gap, "residual": residual, "c": c}

    def _phi(self, x: Tensor) -> EnvelopePoint:
        far = TUNING.far * max(self.scales.x_size(self.origin[0]), self.scales.x_largest)
        point = self.envelope(x, self.y, self.thetas, far)
        lowest, highest = min(self.seen.lowest, point.F), max(self.seen.highest, point.F)  # NaN changes nothing
        self.seen = self.seen._replace(lowest=lowest, highest=highest)
        return point

    def _accept(self, point: EnvelopePoint) -> None:
        self.point, self.x, self.y, self.thetas = point, point.z, point.y, point.thetas
        if self.weight < TUNING.lower_shapes_below:
            self.scales.note(self.x, self.y, self.thetas[0])

    def _move(self, descent: QuasiNewtonDescent[EnvelopePoint], point: EnvelopePoint, new: EnvelopePoint | None) -> None:
        """Accept a new point; without one, solve more accurately, and then forget the curvatures."""
        if new is None:
            self.failures, self.point = self.failures + 1, None
            self.envelope.eps = max(TUNING.retry * self.envelope.eps, TUNING.finest_solve_after_failure)
            if self.failures > 1:
                self.pairs.clear()
        else:
            s, change = new.z - point.z, new.gradient - point.gradient
            self.t = float(s @ s / (s @ change)) if float(s @ change) > 0 else descent.t
            self._accept(new)

    def _abandon_stage(self) -> None:
        """Leave a stage that has no solution nearby: return to where it began, with more weight on the lower level."""
        self.x, self.y, self.seen = self.origin
        self.pairs.clear()
        self.envelope.solve_y.pairs.clear()
        self.t, c = 0.0, self.scales.growth * self.envelope.c
        if c <= TUNING.largest_c * self.scales.balance:
            return self._begin_stage(c)
        message = (
            "F + c (f + g) has no minimum near the start, or is not finite, for any c tried. Check that f has a minimum in y"
            " and F one over its solutions, or bound x and y (x_set, y_set)."
        )
        return self._close(self.x, self.y, Verdict(Status.DIVERGED, message))

    def _end_stage(self, point: EnvelopePoint, residual: float, length: float, done: bool) -> None:
        """End a stage; then begin the next, or end the pass."""
        levels, scales, x, y, c = self.levels, self.scales, self.x, self.y, self.envelope.c
        ends = (
            extrapolate_stages([s.x for s in self.stages] + [x], [s.y for s in self.stages] + [y]) if self.weight < 1 else None
        )
        limit_x, limit_y = ends or (x, y)
        limit_x = levels.project(limit_x)
        apart, blur = vector_norm(y - self.thetas[0]) / scales.y_size(y), point.blur / (self.seen.slope or 1.0)
        stage = PenaltyStage(c, x, y, point.F, point.gap, residual, length, blur, apart, done, limit_x, limit_y, point.F)
        if self.stages:
            stage = compare_stages(stage, self.stages[-1], scales, self.seen.spread)
        levels.move(x)
        self.envelope.reweigh(point.shares)
        if (len(self.thetas) > 1 or self.inactive_basins) and self._select_basins(point.phi - point.gap):
            return self._begin_stage(c)  # there is a lower basin than those that were followed
        self.envelope.reweigh([weight / scales.growth for weight in self.envelope.weights])
        moved = self._change_basin(point, stage)
        self.stages.append(stage)
        end = None if moved else stage_verdict(self.stages, scales, self.seen.spread)
        if end is not None:
            return self._close(limit_x, limit_y, end)
        border = max(point.shares[1:], default=0.0) > TUNING.borderline * self.weight
        if (len(self.thetas) > 1 and apart > TUNING.joined) or self._left_basin(stage, self.stages[:-1]):
            self.inactive_basins = [
                *self.inactive_basins,
                self.thetas[0],
            ]  # y may have left the basin of its theta, which is not forgotten
        if moved:
            self.passed += len(self.stages)
            self.stages = []
        elif ends is not None and not border:  # the next solution is closer to the limit by the ratio of the c
            self.x = levels.project(limit_x + (x - limit_x) / TUNING.ratio)
            if not levels.composite:
                self.y = levels.inside(limit_y + (y - limit_y) / TUNING.ratio)
        return self._begin_stage(scales.growth * c)

    def _select_basins(self, least: float) -> bool:
        """Keep the lowest of all basins that are known, each once, besides that of y; others sleep until the next stage.

        Returns:
            Whether one that was asleep is lower than ``least``, the lowest of the others.
        """
        scales, known = self.scales, [*self.thetas[1:], *self.inactive_basins]
        ends = [
            self.envelope.lower(theta, theta, i) if i < len(self.thetas) else self.envelope.solve_elsewhere(theta)
            for i, theta in enumerate(known, 1)
        ]
        order = sorted((i for i, end in enumerate(ends) if end.finite), key=lambda i: ends[i].value)
        kept: list[int] = []
        for i in order:
            others = [self.thetas[0], *(ends[j].z for j in kept)]
            if all(vector_norm(ends[i].z - other) > TUNING.merged * scales.y_size(other) for other in others):
                kept.append(i)
        awake, inactive_basins = kept[: TUNING.basins], kept[TUNING.basins :]
        n = len(self.thetas) - 1
        awake.sort(key=lambda i: i >= n)
        self.envelope.choose([0, *(i + 1 for i in awake if i < n)])
        self.thetas = [self.thetas[0], *(ends[i].z for i in awake)]
        self.inactive_basins = [ends[i].z for i in inactive_basins]
        self.envelope.extend(len(self.thetas))
        return any(ends[i].value < least - ends[i].noise for i in awake if i >= n)

    def _change_basin(self, point: EnvelopePoint, stage: PenaltyStage) -> bool:
        """Go with y to another basin if F + c (f + g) is smaller there."""
        c, thetas = stage.c, self.thetas
        left_basin = self._left_basin(stage, self.stages)
        here = point.value + c * (point.phi - point.gap)  # F + c (f + g), less what the smoothing does not yet penalise
        best, least = None, here - TUNING.better * max(self.seen.spread, 0.0) - point.noise
        for i in range(0 if left_basin else 1, len(thetas)):
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

    def _left_basin(self, stage: PenaltyStage, before: Sequence[PenaltyStage]) -> bool:
        """Whether y seems to be in another basin than its theta: the gap does not fall as it should."""
        return self.weight < TUNING.lower_shapes_below and bool(before) and stage.gap > TUNING.fallen * before[-1].gap

    def _close(self, x: Tensor, y: Tensor, end: Verdict) -> None:
        """End the pass, with the lower level solved at x."""
        self.envelope.eps = min(self.envelope.eps, TUNING.last_accuracy * self.scales.tol)
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
        spread, others = self.seen.spread, [*self.thetas[1:], *self.inactive_basins]
        self.result = Result(
            EngineKind.PENALTY_CONTINUATION, self.name, x, y, F, lower, solved, spread, others, course, accuracy, end
        )

    def _settle(self, x: Tensor, y: Tensor) -> tuple[Tensor, LowerPoint]:
        """Solve the lower level at x; where another basin is hardly lower, move x to where both are the same."""
        levels, scales = self.levels, self.scales
        levels.move(x)
        theta = self.envelope.lower(y, y)
        for _ in range(TUNING.tie_steps):
            others = [self.envelope.lower(other, theta.z, i) for i, other in enumerate(self.thetas) if i]
            lowest = min(others, key=lambda other: other.value, default=theta)
            difference, normal = theta.value - lowest.value, levels.pull(theta, lowest)
            if not difference > theta.noise + lowest.noise or not vector_norm(normal) > 0:
                break
            new = levels.project(x - difference / float(normal @ normal) * normal)
            if not vector_norm(new - x) <= TUNING.tie_reach * scales.x_size(x):
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
        self.seen, self.origin = StageEvaluation(*state["seen"]), (x, y, StageEvaluation(*seen))
        self.stages = [PenaltyStage(*stage) for stage in state["stages"]]
        self.point = state["point"] and EnvelopePoint(**state["point"])
        self.pairs.load_state_dict(state["pairs"])
        self.envelope.load_state_dict(state["envelope"])


class PenaltyRun:
    """One pass as a run of its own: its end is the answer.

    Args:
        levels: the problem.
        tol, lower_first, max_gradients: those of the method.
    """

    engine = EngineKind.PENALTY_CONTINUATION.value

    def __init__(self, levels: FlatProblem, tol: float, lower_first: bool, max_gradients: int) -> None:
        self.levels, self.lower_first, self.max_gradients = levels, lower_first, max_gradients
        self.sizes = Sizes.of(levels, tol)
        self.now: PenaltyPass | None = None

    @property
    def verdict(self) -> Verdict | None:
        """How the pass ended; None while it goes on."""
        result = self.now and self.now.result
        return unverified(result.verdict) if result else None

    def _pass(self, scales: Scales) -> PenaltyPass:
        start = Start("", scales.starts[-1 if self.lower_first else 0], scales.x0, scales.y0, [])
        return PenaltyPass(self.levels, scales, start, self.max_gradients)

    def advance(self) -> Numbers:
        """Take a step of the pass; the first one also measures the problem."""
        levels = self.levels
        now = self.now = self.now or self._pass(measure(levels, self.sizes, True))
        levels.move(now.x)
        with levels.until(self.max_gradients):
            numbers = now.step()
        levels.move(*((now.x, now.y) if now.result is None else (now.result.x, now.result.y)))
        return numbers

    def report(self) -> dict[str, str]:
        """The penalties of the pass and the accuracy that it reached."""
        result = self.now and self.now.result
        return {"course": result.course, "accuracy": result.accuracy} if result else {}

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        now = self.now
        if now is None:
            return {"now": None}
        return {
            "scales": vars(now.scales),
            "curvatures": self.levels.curvatures,
            "now": now.state_dict(),
            "result": now.result and plain(now.result),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another run was."""
        self.now = None
        if state["now"] is not None:
            self.levels.curvatures = state["curvatures"]
            self.now = self._pass(Scales(**state["scales"]))
            self.now.load_state_dict(state["now"])
            self.now.result = state["result"] and restored(state["result"])


@dataclass(frozen=True, kw_only=True)
class PenaltyContinuation(Engine):
    """Minimise F + c (f + g - v) over (x, y) for a growing penalty c, with first derivatives only; one pass, nothing verified.

    With y projected out, the penalised problem has one variable,

        Phi_c(x) = min_y { F(x, y) + c (f+g)(x, y) } - c min_theta (f+g)(x, theta),

    whose gradient needs no second derivatives. Each stage minimises Phi_c over X by L-BFGS steps for one c, which grows
    fourfold, until x, extrapolated in 1/c, changes by less than ``tol``. It takes every non-smooth term, and lower levels
    with several solutions. The default of :func:`meha.solve` also begins elsewhere and verifies y; see
    :class:`~meha.methods.Default`.

    Args:
        tol: the relative error of x at which to stop, an estimate.
        lower_first: begin with a c at which f decides; otherwise F decides at first, and shows the way from far.
        max_gradients: upper bound on the gradients of f.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, meha.PenaltyContinuation(lower_first=True))
    >>> print(solution.engine, solution.status)
    PenaltyContinuation rule met
    """

    tol: float = 1e-6
    lower_first: bool = False

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> EngineState:
        course = PenaltyRun(FlatProblem(oracle, x, y), self.tol, self.lower_first, self.max_gradients)
        return EngineState(x=x, y=y, course=course, settled=False)
