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

from meha.engines.attempt import EngineKind, Result, Start
from meha.engines.base import Engine, EngineState, unverified
from meha.engines.tuning import TUNING
from meha.lower.curvature import Curvatures, balance, flatten, probe
from meha.lower.flat_problem import FlatProblem, LowerPoint, PenaltyPoint
from meha.method.method import Numbers
from meha.method.status import Status, Verdict
from meha.numerics.extrapolation import richardson
from meha.numerics.limited_memory import FEW_PAIRS, PAIRS, EvaluatedPoint, LimitedMemory, PointT, QuasiNewtonDescent
from meha.numerics.tolerances import FAR, NEAR, PATIENCE, PROBES, ROUNDING, SAME, SMALL, STEPS, TIGHT
from meha.problem.oracle import BudgetError, Oracle
from meha.tensors.state import Saved, pack, unpack
from meha.tensors.variables import Variable
from meha.tensors.vectors import vector_norm


@dataclass(eq=False)
class Sizes:
    """The sizes of x and y, to which tolerances are relative; they include the distance from the start (x0, y0).

    Attributes:
        tol: the relative accuracy asked for, or the finest that the precision allows.
        simple: whether there is no x, so that the accuracy of y counts.
        y_largest: the largest size of y in stages where the lower level dominates.
    """

    x0: Tensor
    y0: Tensor
    tol: float
    simple: bool
    y_largest: float = 0.0

    @property
    def name(self) -> str:
        """The variable whose accuracy counts."""
        return "y" if self.simple else "x"

    def x_size(self, x: Tensor) -> float:
        """The size of x, or its distance from the start where that is larger."""
        return max(vector_norm(x), vector_norm(x - self.x0)) or 1.0

    def y_size(self, y: Tensor) -> float:
        """The size of y, or its distance from the start where that is larger."""
        return max(vector_norm(y), vector_norm(y - self.y0)) or 1.0

    @classmethod
    def of(cls, levels: FlatProblem, tol: float) -> Sizes:
        """The sizes of the present point."""
        # With rounding errors eps c and the extrapolation error 1/c^2, no c gives more than eps^(2/3).
        tol = max(tol, TUNING.within_noise * levels.eps**TIGHT)
        return cls(flatten(levels.x), flatten(levels.y), tol, levels.oracle.problem._without_x)


@dataclass(eq=False, kw_only=True)
class Scales(Sizes):
    """Sizes, curvatures and penalties that are measured at the start, before the first pass.

    Attributes:
        slope: the norm of F_y at the start.
        balance: the c at which F and c f have the same curvature in y.
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
        """The growth of c from stage to stage.

        The error of x is proportional to 1/c, or to c^(-1/2) with a proximal term, so that it falls fourfold in both cases:
        enough to need few stages, and little enough for the last solution to be a good start of the next stage.
        """
        return TUNING.ratio**2 if self.proximal else TUNING.ratio

    def tie(self, c: float) -> float:
        """The weight of the proximal term at c, which falls with the root of c.

        Where f is flat, F of weight 1/c moves y by (1/c) / weight against the term. A weight of c^(-1/2) makes this error as
        small as the one that the term causes itself.
        """
        return self.proximal * math.sqrt(self.balance / c)


def measure(levels: FlatProblem, sizes: Sizes, both_starts: bool) -> Scales:
    """Measure the curvatures at the start, and find the c at which F and c f balance in y; for the first pass, also in x.

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
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=PROBES)
    F_xx, F_yy, f_yy, f_xy = (curvatures[name] for name in ("F_xx", "F_yy", "f_yy", "f_xy"))
    slope, f_slope = vector_norm(F_y), max(vector_norm(lower.gradient), f_yy * vector_norm(y0)) or f_yy
    # Where F or f is linear, F shall move y by as much as f does, or by the size of y.
    linear = slope / f_slope if slope and f_slope else 1.0
    in_y = F_yy / f_yy if F_yy and f_yy else linear
    in_both = min(in_y, balance(F_xx, F_yy, f_yy, f_xy))
    starts = (in_both / TUNING.first_c, TUNING.first_c * in_y)[: 2 if both_starts else 1]
    scales = Scales(**vars(sizes), curvatures=curvatures, slope=slope, balance=in_y, starts=starts)
    if levels.oracle.response_term.vanishes:  # the start decides which solution is meant: F must not move y to another basin
        scales.starts, scales.proximal = (TUNING.first_c * in_y,), SMALL * (f_yy or 1.0)
        scales.tol = max(sizes.tol, math.sqrt(levels.eps**0.5))  # the error falls with the root of c
    return scales


class PenaltyStage(NamedTuple):
    """The solution of a stage: c, x, y, values there, and the limits extrapolated to c = infinity.

    Attributes:
        length: the size of the next step, relative to x.
        blur: the rounding error of the gradient, relative to the largest gradient.
        apart: the distance of y from theta, relative to y.
        solved: whether x is as accurate as the stage demands.
        bias_x, bias_y, bias_F: relative changes of the limits since the last stage; without x, the first is that of y.
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


def extrapolate_stages(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The limits of x and y as c grows to infinity; None if the stages do not show them.

    With a non-degenerate lower level, x(c) = x + a / c + b / c^2 + ..., so Richardson's rule in 1/c removes the error a / c,
    and applied twice also b / c^2.
    """
    both = xs[-4:], ys[-4:]
    shrink = [
        all(vector_norm(z[i] - z[i - 1]) <= 2 / TUNING.ratio * vector_norm(z[i - 1] - z[i - 2]) for z in both)
        for i in range(2, len(both[0]))
    ]
    if not shrink or not shrink[-1]:
        return None
    first = [richardson(z[-1], z[-2], TUNING.ratio) for z in both]
    if len(shrink) > 1 and shrink[-2]:
        before = [richardson(z[-2], z[-3], TUNING.ratio) for z in both]
        second = [richardson(new, old, TUNING.ratio**2) for new, old in zip(first, before, strict=True)]
        # Taken only where it changes the first order little: early stages are no power series in 1/c yet.
        if all(vector_norm(b - a) <= 0.5 * vector_norm(a - old) for a, b, old in zip(first, second, before, strict=True)):
            first = second
    return first[0], first[1]


def compare_stages(stage: PenaltyStage, last: PenaltyStage, scales: Scales, spread: float) -> PenaltyStage:
    """Add the limit of F and the changes of all limits since the last stage, that of F relative to its ``spread``."""
    limit_F = richardson(stage.F, last.F, TUNING.ratio)
    bias_y = vector_norm(stage.limit_y - last.limit_y) / scales.y_size(stage.y)
    # The length is the error of the stage's own x, which extrapolation amplifies by up to 5/3.
    bias_x = vector_norm(stage.limit_x - last.limit_x) / scales.x_size(stage.x) + 2 * stage.length
    return stage._replace(
        limit_F=limit_F,
        bias_x=bias_y if scales.simple else bias_x,
        bias_y=bias_y,
        bias_F=abs(limit_F - last.limit_F) / (spread or 1.0),
    )


def stage_verdict(stages: Sequence[PenaltyStage], scales: Scales, spread: float) -> Verdict | None:
    """The verdict if a pass ends with the last stage; None if it goes on. Only solved stages are evidence."""
    stage, tol = stages[-1], scales.tol
    name, bias = scales.name, f"{stage.bias_x:.1e}"
    close = 2 * stage.c * stage.gap <= SMALL * spread  # for a quadratic f, F rises by 2 c gap when y moves to theta
    if scales.balance / stage.c < SMALL and stage.apart <= NEAR and close:
        solved = all(recent.solved for recent in stages[-2:])
        if solved and stage.bias_x <= tol and stage.bias_y <= tol / SMALL:  # the lower level determines y less well
            return Verdict(
                Status.CONVERGED, f"{name}, extrapolated in 1/c, changed by {bias} in the last stage (tol {tol:.1e})."
            )
        if solved and all(recent.bias_F <= tol**2 for recent in stages[-2:]):  # F is quadratic near a solution
            where = ", in directions in which F is almost constant" if stage.bias_x > tol else ""
            return Verdict(Status.CONVERGED, f"F no longer changes; {name} changed by {bias} in the last stage{where}.")
        if scales.growth * stage.blur > SMALL:  # rounding would spoil the gradients of the next stage
            message = f"{name} is accurate to about {bias}; rounding errors, which c multiplies, prevent more. Use float64."
            return Verdict(Status.FINISHED, message)
    if stage.c > TUNING.largest_c * scales.balance:
        unsolved = "" if stage.solved else ", of which the last was not solved"
        message = f"{name} is accurate to about {bias} after {len(stages)} stages{unsolved}."
        return Verdict(Status.FINISHED, f"{message} Ask for less accuracy (tol), or inspect the problem with meha.check.")
    return None


@dataclass(eq=False, kw_only=True)
class EnvelopePoint(EvaluatedPoint):
    """The value and gradient of Phi_c at x.

    Attributes:
        y: the minimizer of F + c (f + g), near a lower solution.
        thetas: a lower solution in each known basin, that of y first.
        shares: the share of each basin in the gradient of the smoothed value function.
        F, phi, gap: F and f + g at y, and by how much f + g at y exceeds the least value at a theta.
        slope, blur: the sum of the norms of the parts of the gradient, and their rounding error.
    """

    y: Tensor
    thetas: list[Tensor]
    shares: list[float]
    F: float = math.nan
    phi: float = math.nan
    gap: float = math.nan
    slope: float = math.nan
    blur: float = math.nan


class LowerSolve(Saved, Generic[PointT]):
    """Minimises F/c + f + g over y, or f + g (c infinite), with warm starts as x and c change.

    Args:
        evaluate: returns the point at y, given the weight 1/c of F.

    Attributes:
        pairs, t: the L-BFGS memory, and the length of a plain step.
        force: the norm of F_y / c, which moves y away from theta; residuals must be small beside it.
        solved: whether the last solve reduced the residual to the size of the force.
    """

    saves = ("c", "t", "force", "solved", "pairs")

    def __init__(self, levels: FlatProblem, scales: Scales, c: float, evaluate: Callable[[Tensor, float], PointT]) -> None:
        self.levels, self.scales, self.evaluate = levels, scales, evaluate
        self.pairs = LimitedMemory.sized(PAIRS, len(scales.y0))
        self.force, self.solved = 0.0, False
        self.enter(c)

    @property
    def curvature(self) -> float:
        """That of F/c + f in y."""
        return self.scales.curvatures["F_yy"] / self.c + self.scales.curvatures["f_yy"]

    def enter(self, c: float) -> None:
        """Set the penalty of a new stage."""
        self.c, rho = c, self.levels.oracle.problem.g.rho
        self.t = min(1 / (self.curvature or 1.0), 0.5 / rho if rho else math.inf)  # prox has one value below 1 / rho
        self.pairs.reweigh(1 / c)  # pairs keep the parts of F and f apart, so they stay exact

    def __call__(self, z: Tensor, other: Tensor, eps: float) -> PointT:
        """Minimise from z, until the distance of the solution from ``other`` has the relative accuracy ``eps``."""
        scales, rounding = self.scales, self.levels.eps
        descent = self.levels.descent(lambda at: self.evaluate(at, 1 / self.c), self.pairs, self.t)
        point = descent.evaluate(z)
        if not point.finite:
            return point
        smallest, idle, cleared, start = math.inf, 0, False, max(scales.y_size(z), scales.y_size(other))
        for _ in range(STEPS):
            if point.upper is not None:  # F/c + f + g; a solve for theta gets the force of y from its caller
                self.force = max(vector_norm(point.upper), NEAR * scales.tol * scales.slope) / self.c
            d, remembered = descent.direction(point)
            r = descent.residual(point).r
            residual, length, here = vector_norm(r), vector_norm(d), vector_norm(point.z)
            enough = eps * max(vector_norm(point.z - other), NEAR * scales.tol * scales.y_size(point.z))
            if (residual <= eps * self.force and length <= enough) or residual <= 2 * rounding * self.curvature * here:
                break
            if length <= ROUNDING * rounding * here:
                break
            idle = 0 if residual < 0.5 * smallest else idle + 1
            smallest = min(smallest, residual)
            nothing = -float(r @ d) <= TUNING.within_noise * point.noise
            if idle >= PATIENCE and (nothing or length <= rounding**0.5 * here):  # values cannot tell such steps apart
                break
            new = descent.step(point, d, remembered)
            if new is None:
                if cleared or not remembered or nothing:
                    break
                self.pairs.clear()  # the memory may be of another basin: try a plain step before giving up
                cleared = True
                continue
            point, cleared = new, False
            if vector_norm(point.z) > FAR * max(start, scales.y_largest):
                return replace(point, smooth=-math.inf)  # no minimum: the infinite value tells the caller
        self.solved = NEAR * vector_norm(descent.residual(point).r) <= max(self.force, scales.tol * scales.slope)
        self.t = descent.t
        return point


class PenaltyEnvelope(Saved):
    """Evaluates Phi_c as a function of x, with the solves in y and theta that it needs, to the accuracy ``eps``.

    The value function is the least over all known basins, v = min_i v_i, which has a kink where two basins are equally low. It
    is smoothed: with the weights p of the basins and mu = kappa / c,

        v(x) = - mu log( sum_i p_i exp( - v_i(x) / mu ) ).

    Its gradient is sum_i s_i grad v_i, with shares s_i >= 0 that sum to 1, so that c s_i is the multiplier of the constraint
    f + g <= v_i. If the optimum lies on the border between two basins, F alone would cross it, and the multiplier of the basin
    beyond holds x back. As in the exponential method of multipliers (Kort and Bertsekas, 1972), the shares of a stage become
    the weights of the next, divided by the growth of c, because c s_i has a limit. So the smoothing leaves no error.

    Attributes:
        weights: p, one for each basin; the first is the one of y.
        kappa: the range of F over which the minimum is smoothed.
    """

    saves = ("c", "eps", "weights", "kappa", "solve_y", "solve_thetas")

    def __init__(self, levels: FlatProblem, scales: Scales, c: float) -> None:
        self.levels, self.scales, self.c = levels, scales, c
        self.solve_y, self.solve_thetas = self._solve_y(), [self._solve_theta()]
        self.weights, self.kappa, self.eps = [1.0], 0.0, 1.0

    def _solve_y(self) -> LowerSolve[PenaltyPoint]:
        return LowerSolve(self.levels, self.scales, self.c, self.levels.penalty)

    def _solve_theta(self) -> LowerSolve[LowerPoint]:
        return LowerSolve(self.levels, self.scales, math.inf, lambda theta, weight: self.levels.lower(theta))

    def enter(self, c: float, eps: float) -> None:
        """Set the penalty and the accuracy of a new stage."""
        self.c, self.eps = c, eps
        self._tie()
        self.solve_y.enter(c)
        for solve in self.solve_thetas:
            solve.enter(math.inf)  # theta minimises f + g alone

    def _tie(self) -> None:
        if self.scales.proximal:
            self.levels.oracle.response_term.weight = self.scales.tie(self.c)

    def choose(self, kept: Sequence[int]) -> None:
        """Keep some of the basins, in this order."""
        self.solve_thetas = [self.solve_thetas[i] for i in kept]
        self.reweigh([self.weights[i] for i in kept])

    def extend(self, n: int) -> None:
        """Add solvers and weights for further basins, up to ``n`` in all."""
        new = n - len(self.weights)
        self.solve_thetas += [self._solve_theta() for _ in range(new)]
        self.reweigh([*self.weights, *[SMALL] * new])

    def reweigh(self, weights: Sequence[float]) -> None:
        """Set the weights of all basins; the first gets what the others leave."""
        # A weight of zero would stay zero: the basin could not come back when it becomes the lowest.
        least = NEAR * min(1.0, self.scales.balance / self.c)
        others = [max(weight, least) for weight in weights[1:]]
        first = max(1 - sum(others), least)
        self.weights = [weight / (first + sum(others)) for weight in (first, *others)]

    def lower(self, theta: Tensor, other: Tensor, solve: LowerSolve[LowerPoint] | None = None) -> LowerPoint:
        """Solve the lower level from theta at the present x; without a solver of its basin, with a memory of its own."""
        solve = solve or self._solve_theta()
        solve.force = self.solve_y.force
        return solve(theta, other, self.eps)

    def branch(self, theta: Tensor) -> PenaltyPoint:
        """Minimise F + c (f + g) from the theta of another basin, with a memory of its own."""
        return self._solve_y()(theta, theta, self.eps)

    def __call__(self, x: Tensor, y: Tensor, thetas: Sequence[Tensor], far: float) -> EnvelopePoint:
        """Evaluate Phi_c at x, with solves that start at y and the thetas; NaN where one fails, or x is larger than ``far``."""
        failed = EnvelopePoint(x, math.nan, torch.full_like(x, math.nan), y=y, thetas=list(thetas), shares=self.weights)
        if vector_norm(x) > far:
            return failed
        self.levels.move(x)
        at_y = self.solve_y(y, thetas[0], self.eps)
        if not at_y.finite:
            return failed
        y, F, F_x, phi = at_y.z, at_y.F, at_y.F_x, at_y.f + at_y.nonsmooth
        ends = [self.lower(theta, y, solve) for theta, solve in zip(thetas, self.solve_thetas, strict=True)]
        if not ends[0].value <= phi + ends[0].noise:  # theta is in a higher basin than y: start it at y, whose gap is >= 0 then
            ends[0] = self.lower(y, y, self.solve_thetas[0])
        if not all(end.finite for end in ends):
            return failed
        c, least = self.c, min(ends, key=lambda end: end.value)
        shares, smooth = self._shares([end.value - least.value for end in ends])
        # Danskin's theorem: y and theta are minimizers, so only the partial derivatives in x count.
        pulls = [self.levels.pull(at_y, end) for end in ends]
        pull = c * sum((share * part for share, part in zip(shares, pulls, strict=True)), torch.zeros_like(x))
        gap = phi - least.value
        return EnvelopePoint(
            x,
            F + c * (gap - smooth),
            F_x + pull,
            noise=c * (at_y.noise + least.noise) + self.eps**2 * c * abs(gap),  # values at minimizers err by the square of eps
            y=y,
            thetas=[end.z for end in ends],
            shares=shares,
            F=F,
            phi=phi,
            gap=gap,
            slope=vector_norm(F_x) + vector_norm(c * pulls[0]),
            blur=2 * self.levels.eps * c * (vector_norm(least.f_x) + self.scales.curvatures["f_xy"] * vector_norm(y)),
        )

    def _shares(self, heights: Sequence[float]) -> tuple[list[float], float]:
        """The shares of basins of these heights above the lowest, and by how much the smoothed minimum differs from it."""
        if len(heights) == 1:
            return [1.0], 0.0
        mu = self.kappa / self.c  # c (v_i - v) is then compared with the range of F
        parts = [p * (math.exp(-h / mu) if mu else float(h <= 0)) for p, h in zip(self.weights, heights, strict=True)]
        return [part / sum(parts) for part in parts], -mu * math.log(sum(parts))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another envelope was."""
        self.solve_thetas = [self._solve_theta() for _ in state["solve_thetas"]]  # as many as restore themselves in place
        super().load_state_dict(state)
        self._tie()


class StageEvaluation(NamedTuple):
    """The largest gradient and change of F, halved with each stage, and the range of F since c passed the balance."""

    slope: float = 0.0
    span: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    @property
    def spread(self) -> float:
        """The range of F."""
        return self.highest - self.lowest


class PenaltyPass(Saved):
    """One pass of the penalty continuation: minimise Phi_c over X in stages of growing c; ``result`` is set at the end.

    Args:
        start: the first c, and the point (x, y).
        allowed: gradients of f that it may take.

    Attributes:
        x, y, thetas: the last accepted point; ``point`` is Phi_c there, None when it has to be evaluated.
        inactive_basins: lower solutions in known basins that this stage does not follow, because others are lower.
        t: the length of a plain gradient step.
        weight: that of F in the stage, relative to the lower level; 1 where both balance.
        origin: x, y and ``seen`` at the beginning of the stage.
        tau: the relative accuracy in x of the stage.
        steps, failures: the number of steps in the stage, and of those that failed.
        widest: the largest size of x so far.
        passed: the number of stages before y entered its present basin.
        end: the gradients of f, counted from the start of the run, at which the budget of the pass ends.
    """

    saves = (
        *("x", "y", "thetas", "inactive_basins", "t", "weight", "tau", "steps", "failures", "passed", "widest", "end"),
        *("allowed", "first", "name", "seen", "origin", "stages", "point", "pairs", "envelope", "result"),
    )

    def __init__(self, levels: FlatProblem, scales: Scales, start: Start, allowed: int) -> None:
        self.levels, self.scales, self.name, self.first, self.allowed = levels, scales, start.name, start.c, allowed
        self.x, self.y, self.t, self.weight, self.seen = start.x, start.y, 0.0, math.inf, StageEvaluation()
        self.thetas, self.inactive_basins = [start.y, *start.others[: TUNING.basins]], start.others[TUNING.basins :]
        self.envelope = PenaltyEnvelope(levels, scales, start.c)
        self.passed, self.widest = 0, scales.x_size(start.x)
        self.pairs = LimitedMemory.sized(FEW_PAIRS, len(self.x))
        self.stages: list[PenaltyStage] = []
        self.end = levels.spent + allowed
        self.result: Result | None = None
        self._begin_stage(start.c)

    def _begin_stage(self, c: float) -> None:
        """Begin a stage with the penalty c."""
        before, self.weight = self.weight, self.scales.balance / c
        # Scales fade, so that a distant start does not keep the tests of later stages loose.
        seen = self.seen._replace(slope=0.5 * self.seen.slope, span=0.5 * self.seen.span)
        if before >= 1 > self.weight and self.stages:  # before the balance, y is no lower solution
            seen = seen._replace(lowest=self.stages[-1].F, highest=self.stages[-1].F)
        moved = 1.0  # as the changes of x shrink, stages become more accurate, and faster, since extrapolation amplifies errors
        if self.weight < 1 and len(self.stages) >= 2:
            last = self.stages[-1].x
            moved = min(1.0, vector_norm(last - self.stages[-2].x) / self.scales.x_size(last))
        self.tau = max(TUNING.stage_accuracy * moved**2, SMALL * self.scales.tol)
        self.envelope.enter(c, max(self.tau, self.levels.eps**TIGHT))
        self.envelope.extend(len(self.thetas))
        self.envelope.kappa = max(seen.spread, seen.span, 0.0)
        self.thetas = [self._displaced_theta(), *self.thetas[1:]]
        self.seen, self.origin = seen, (self.x, self.y, seen)
        self.point: EnvelopePoint | None = None
        self.steps = self.failures = 0

    def _displaced_theta(self) -> Tensor:
        """A start for theta beside y. A descent that starts at y could not leave a maximum or a saddle of f."""
        if self.levels.composite:  # a kink of g holds y where a displacement would only cost steps
            return self.y
        generator = torch.Generator().manual_seed(self.passed + len(self.stages))  # the same in a resumed run
        d = torch.randn(len(self.y), generator=generator, dtype=torch.float64, device="cpu").to(self.y)
        far = max(self.scales.tol * self.scales.y_size(self.y), NEAR * vector_norm(self.y - self.thetas[0]))
        return self.levels.inside(self.y + far / vector_norm(d) * d)

    def step(self) -> dict[str, float]:
        """Take a step in x, or end the stage; returns the numbers before it."""
        try:
            with self.levels.until(self.end - SMALL * self.allowed):  # the last lower solve needs gradients, too
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
        """Evaluate Phi_c, and take an L-BFGS step, end the stage, or abandon it."""
        c, tau, scales, envelope = self.envelope.c, self.tau, self.scales, self.envelope
        point = self.point or self._phi(self.x)
        if not point.finite:
            F = self.stages[-1].F if self.stages else 0.0
            self._abandon_stage()
            return {"upper": F, "gap": math.inf, "residual": math.inf, "c": c}
        self._accept(point)
        change = abs(point.F - self.stages[-1].F) if self.stages else 0.0
        seen = self.seen = self.seen._replace(slope=max(self.seen.slope, point.slope), span=max(self.seen.span, change))
        scale = scales.x_size(point.z)
        self.widest = max(self.widest, scale)
        longest = 0.5 * max(1.0, SMALL * self.widest / scale)  # x may cross zero, where its size is none
        reach = scale / (vector_norm(point.gradient) or 1.0)
        t = min(self.t, longest * reach) if self.t else NEAR * reach
        project = self.levels.project if self.levels.constrained else None
        descent = QuasiNewtonDescent(
            self._phi, self.pairs, project, False, t, kinks=len(self.thetas) > 1, clock=self.levels.clock
        )
        d, remembered = descent.direction(point)
        residual, length = vector_norm(descent.residual(point).r), vector_norm(d) / scale
        # A direction may be short because the memory is wrong, so the gradient must have fallen as well.
        done = length <= tau and residual <= SMALL * seen.slope
        done = done or residual <= max(NEAR * tau**2 * seen.slope, point.blur)
        early, origin = self.weight >= 1, self.origin[0]  # F still shapes the stage, whose solution matters little
        if done or self.failures >= PATIENCE or self.steps >= (TUNING.early_steps if early else TUNING.late_steps):
            if not done and early and NEAR * vector_norm(self.x - origin) > scales.x_size(origin):
                self._abandon_stage()  # it went so far that no solution is nearby
            else:
                self._end_stage(point, residual, length, done)
        else:
            self.steps += 1
            # As the gradient falls, y and theta must become more accurate, for Phi_c to show the decrease.
            fallen = min(1.0, residual / seen.slope) if seen.slope else 1.0
            envelope.eps = min(envelope.eps, max(self.levels.eps**TIGHT, SMALL * fallen))
            self._move(descent, point, descent.step(point, d, remembered, min(1.0, longest / length)))
        return {"upper": point.F, "lower": point.phi, "gap": point.gap, "residual": residual, "c": c}

    def _phi(self, x: Tensor) -> EnvelopePoint:
        point = self.envelope(x, self.y, self.thetas, FAR * self.widest)
        lowest, highest = min(self.seen.lowest, point.F), max(self.seen.highest, point.F)  # NaN changes nothing
        self.seen = self.seen._replace(lowest=lowest, highest=highest)
        return point

    def _accept(self, point: EnvelopePoint) -> None:
        self.point, self.x, self.y, self.thetas = point, point.z, point.y, point.thetas  # warm starts of the next solves
        if self.weight < 1:  # before, y is no lower solution
            self.scales.y_largest = max(self.scales.y_largest, *map(self.scales.y_size, (self.y, self.thetas[0])))

    def _move(self, descent: QuasiNewtonDescent[EnvelopePoint], point: EnvelopePoint, new: EnvelopePoint | None) -> None:
        """Accept a new point; without one, solve y and theta more accurately, then also clear the memory."""
        if new is None:
            self.failures, self.point = self.failures + 1, None
            self.envelope.eps = max(SMALL * self.envelope.eps, self.levels.eps**TIGHT)
            if self.failures > 1:
                self.pairs.clear()
        else:
            s, change = new.z - point.z, new.gradient - point.gradient  # the Barzilai-Borwein step (1988)
            self.t = float(s @ s / (s @ change)) if float(s @ change) > 0 else descent.t
            self._accept(new)

    def _abandon_stage(self) -> None:
        """Leave a stage without a minimum nearby: go back to where it began, and give the lower level more weight."""
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
        """End a stage: extrapolate, compare basins, and begin the next stage from a predicted point, or end the pass."""
        levels, scales, x, y, c = self.levels, self.scales, self.x, self.y, self.envelope.c
        limits = (  # before the balance, x(c) is no series in 1/c
            extrapolate_stages([s.x for s in self.stages] + [x], [s.y for s in self.stages] + [y]) if self.weight < 1 else None
        )
        limit_x, limit_y = limits or (x, y)
        limit_x = levels.project(limit_x)
        apart, blur = vector_norm(y - self.thetas[0]) / scales.y_size(y), point.blur / (self.seen.slope or 1.0)
        stage = PenaltyStage(c, x, y, point.F, point.gap, residual, length, blur, apart, done, limit_x, limit_y, point.F)
        if self.stages:
            stage = compare_stages(stage, self.stages[-1], scales, self.seen.spread)
        levels.move(x)
        self.envelope.reweigh(point.shares)
        if (len(self.thetas) > 1 or self.inactive_basins) and self._select_basins(point.phi - point.gap):
            return self._begin_stage(c)  # the value function was wrong: an inactive basin is lower
        self.envelope.reweigh([weight / scales.growth for weight in self.envelope.weights])
        # Within one basin, the gap falls as 1/c^2: y may be in another one than its theta, or on a maximum of f.
        left = self.weight < 1 and bool(self.stages) and stage.gap > self.stages[-1].gap / TUNING.ratio
        moved = self._change_basin(point, left)
        self.stages.append(stage)
        end = None if moved else stage_verdict(self.stages, scales, self.seen.spread)
        if end is not None:
            return self._close(limit_x, limit_y, end)
        if left or (len(self.thetas) > 1 and apart > NEAR):
            # Theta starts beside y in the next stage, and would lose a basin that y has left.
            self.inactive_basins = [*self.inactive_basins, self.thetas[0]]
        if moved:  # stages of another basin have another limit
            self.passed += len(self.stages)
            self.stages = []
        elif limits is not None:  # predict: the error a / c of the next solution is smaller by the ratio
            self.x = levels.project(limit_x + (x - limit_x) / TUNING.ratio)
            if not levels.composite:  # a predicted y would leave the kinks of g
                self.y = levels.inside(limit_y + (y - limit_y) / TUNING.ratio)
        return self._begin_stage(scales.growth * c)

    def _select_basins(self, least: float) -> bool:
        """Follow the lowest of all known basins besides that of y; the others are inactive until the next stage.

        Returns:
            Whether an inactive basin turned out to be lower than ``least``, the lowest of the active ones.
        """
        followed, known = len(self.thetas) - 1, [*self.thetas[1:], *self.inactive_basins]
        solves = itertools.chain(self.envelope.solve_thetas[1:], itertools.repeat(None))
        ends = [self.envelope.lower(theta, theta, solve) for theta, solve in zip(known, solves, strict=False)]
        kept: list[int] = []
        for i in sorted((i for i, end in enumerate(ends) if end.finite), key=lambda i: ends[i].value):
            others = [self.thetas[0], *(ends[j].z for j in kept)]  # basins merge as x moves: each minimizer counts once
            if all(vector_norm(ends[i].z - other) > SAME * self.scales.y_size(other) for other in others):
                kept.append(i)
        # Those with a solver and a weight come first, as choose() and extend() need.
        active = sorted(kept[: TUNING.basins], key=lambda i: i >= followed)
        self.envelope.choose([0, *(i + 1 for i in active if i < followed)])
        self.thetas = [self.thetas[0], *(ends[i].z for i in active)]
        self.inactive_basins = [ends[i].z for i in kept[TUNING.basins :]]
        self.envelope.extend(len(self.thetas))
        return any(ends[i].value < least - ends[i].noise for i in active if i >= followed)

    def _change_basin(self, point: EnvelopePoint, left: bool) -> bool:
        """Move y to another basin, or to that of its theta if it ``left`` it, if F + c (f + g) is smaller there."""
        c, thetas = self.envelope.c, self.thetas
        here = point.value + c * (point.phi - point.gap)  # F + c (f + g), less what the smoothing does not yet penalise
        best, least = None, here - SAME**2 * max(self.seen.spread, 0.0) - point.noise
        for i in range(0 if left else 1, len(thetas)):
            at = self.envelope.branch(thetas[i])
            if at.finite and c * at.value < least:
                best, least = (i, at), c * at.value
        if best is None:
            return False
        i, at = best
        order = [i, *(j for j in range(len(thetas)) if j != i)]
        self.envelope.choose(order)
        self.thetas, self.y = [thetas[j] for j in order], at.z
        self.pairs.clear()
        self.envelope.solve_y.pairs.clear()
        return True

    def _close(self, x: Tensor, y: Tensor, end: Verdict) -> None:
        """End the pass: solve the lower level accurately at x, and set the result."""
        self.envelope.eps = min(self.envelope.eps, SMALL * self.scales.tol)
        self.levels.move(x)
        solved, lower, solve = False, math.nan, self.envelope.solve_thetas[0]
        with contextlib.suppress(BudgetError), self.levels.until(self.end):  # without gradients, y stays as it is
            theta = self.envelope.lower(y, y, solve)
            if theta.finite:
                y, lower, solved = theta.z, theta.value, solve.solved
        F = self.levels.upper(y)[0]
        last = self.stages[-1] if self.stages else None
        gap, residual, bias = (last.gap, last.residual, last.bias_x) if last else (math.nan, math.nan, math.inf)
        at = f"gap {gap:.1e} and stationarity {residual:.1e} at the last c"
        self.result = Result(
            engine=EngineKind.PENALTY_CONTINUATION,
            start=self.name,
            x=x,
            y=y,
            F=F,
            lower=lower,
            solved=solved,
            spread=self.seen.spread,
            others=[*self.thetas[1:], *self.inactive_basins],
            course=f"c from {self.first:.2g} to {self.envelope.c:.2g} in {self.passed + len(self.stages)} stages",
            accuracy=f"{self.scales.name} to about {bias:.1e} (an estimate, not a bound); {at}",
            verdict=end,
        )


class PenaltyRun:
    """Runs one pass alone: its end is the answer, and nothing is verified.

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
        """Everything that later steps need, in plain tensors, numbers and text."""
        now = self.now
        return {"scales": pack(now and now.scales), "curvatures": self.levels.curvatures, "now": pack(now)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another run was."""
        self.levels.curvatures = state["curvatures"]
        self.now = None if state["now"] is None else self._pass(unpack(state["scales"]))
        unpack(state["now"], self.now)


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
        lower_first: begin with a c at which f decides; otherwise F decides at first, and leads x on from a distant start.
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
