"""AdaptiveMEHA: the single loop of MEHA with step sizes, gamma, c and a stopping test that it chooses itself."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from meha.lower.curvature import Curvatures, balance, describe, flatten, lower_gradients, probe, upper_gradients, write
from meha.method.method import At, Method, Numbers, Run, State
from meha.method.status import Status, Verdict
from meha.numerics.extrapolation import combine, richardson
from meha.numerics.tolerances import PROBES, SMALL
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Response
from meha.tensors.checks import check_tolerance
from meha.tensors.variables import Variable

__all__ = ["AdaptiveMEHA"]

# The heuristic numbers. All are relative, so that the units of x, y, F and f do not matter.
SAFETY = 0.6  # steps times curvatures; below 1, because curvatures are estimated from below
MEMORY = 40  # points, besides the last one, that Anderson acceleration combines; more seldom help and are costly
REACH = 10.0  # longest accelerated step relative to the plain one, unless twice the last accelerated one is longer
FIRST_C = 0.25  # c at the start, relative to the balance of both levels: F counts a little more, and guides x
LONGEST = 30  # steps after which a stage is left unsolved: at small c its solution hardly matters
ACCURACY = 0.05  # residual of a solved stage relative to grad F, times the relative change between the last stages, or tol
NEAR = 10.0  # multiple of tol: the limit and its last change lie within at the end; c stays once F can change by less

Record = tuple[Tensor, Tensor, Tensor, Tensor]
"""An evaluated point z = (x, y, theta), the subgradients of its prox maps, and the gradients of F and f: apart, for any c."""


@dataclass
class AdaptiveState(State):
    """The answer (x, y), the point (at_x, at_y, theta) of the next gradients, and what the run has learned."""

    at_x: Variable
    at_y: Variable
    theta: Variable
    subgradients: Tensor  # of g and of the indicators of X and Y at the point, from the last prox maps; zero without them
    origin: Tensor  # the start (x, y)
    curvatures: Curvatures
    vectors: dict[str, Tensor]  # from which the next power iterations of the curvatures start
    c: float
    concave: float = 0.0  # the largest negative curvature of f in y that was seen between y and theta
    growth: float = 1.0  # gamma relative to its first value
    shrink: tuple[float, ...] = (1.0, 1.0, 1.0)  # the steps of x, y, theta relative to what the curvatures allow
    records: list[Record] = field(default_factory=list)  # what Anderson acceleration combines; valid for every c and step
    accelerated: bool = False  # whether the present point is such a combination
    reach: float = 0.0  # the largest length of the next combination
    ends: list[Tensor] = field(default_factory=list)  # (x, y) at the end of the last three stages
    solved: int = 0  # how many of the last stages were solved, one after another and with one gamma
    steps: int = 0  # those in the present stage
    extrapolated: bool = False  # whether the answer is extrapolated to c = infinity
    change: float = math.inf  # that of the extrapolated answer in the last stage
    lowest: float = math.inf  # F so far, with the highest
    highest: float = -math.inf
    numbers: dict[str, float] = field(default_factory=dict)  # those of the last accepted point
    verdict: Verdict | None = None

    def scale(self, *factors: float) -> None:
        """Multiply the steps, up to what the curvatures allow."""
        self.shrink = tuple(min(1.0, factor * shrink) for factor, shrink in zip(factors, self.shrink, strict=True))

    def closed(self, share: float) -> bool:
        """Whether F changes by at most this share of its range as c grows on: by about 2 c gap, as the gap falls as 1/c^2."""
        return 2 * self.c * abs(self.numbers["gap"]) <= share * (self.highest - self.lowest)

    def distance(self, new: Tensor, old: Tensor) -> float:
        """The change of x or y, the larger one, relative to its size and way: an answer may be zero."""
        changes = []
        for a, b, start in zip(*(z.split((self.x.numel, self.y.numel)) for z in (new, old, self.origin)), strict=True):
            size, moved = float(a.norm() + (a - start).norm()), float((a - b).norm())
            changes.append(moved / size if size else float(moved > 0))
        return max(changes)


class StepMap(NamedTuple):
    """The step z <- prox(z - roots^2 * direction(z)) for fixed c, gamma and step sizes, as a function of records."""

    c: float
    gamma: float
    steps: tuple[float, ...]  # alpha, beta and eta
    roots: Tensor  # the square roots of the step sizes, one for each coordinate of z: residual and move then have one metric
    parts: tuple[int, int, int]  # the sizes of x, y and theta

    @classmethod
    def of(cls, oracle: Oracle, state: AdaptiveState) -> StepMap:
        """The map with the largest step sizes that the curvatures allow."""
        seen, c = state.curvatures, state.c
        L = seen["f_yy"] + oracle.problem.g.rho
        gamma = 0.5 * state.growth / L
        h_y, h_theta = seen["F_yy"] / c + L, L + 1 / gamma
        # phi - v_gamma has this curvature in x where f has L in y; without any in x, there is the one that F_xy brings about.
        h_x = seen["F_xx"] / c + seen["f_xy"] ** 2 / h_theta or (seen["F_xy"] / c) ** 2 / h_y or 1.0
        coupling = 1 + seen["F_xy"] / c / math.sqrt(h_x * h_y)  # [[a, b], [b, d]] <= (1 + b / sqrt(a d)) diag(a, d)
        curvatures = (coupling * h_x, coupling * h_y, h_theta)
        steps = tuple(SAFETY * shrink / h for shrink, h in zip(state.shrink, curvatures, strict=True))
        parts = (state.x.numel, state.y.numel, state.y.numel)
        roots = [state.origin.new_full((n,), math.sqrt(step)) for n, step in zip(parts, steps, strict=True)]
        return cls(c, gamma, steps, torch.cat(roots), parts)

    def direction(self, record: Record) -> Tensor:
        """The direction of the step without the subgradients, which the prox maps add."""
        z, _, upper, lower = record
        _, y, theta = z.split(self.parts)
        direction = upper / self.c + lower
        direction[-len(theta) :] += (theta - y) / self.gamma
        return direction

    def residual(self, record: Record) -> Tensor:
        """Direction and subgradients in the metric of the steps; zero at fixed points."""
        return self.roots * (self.direction(record) + record[1])

    def image(self, record: Record) -> Tensor:
        """The point to which the step leads before the prox maps."""
        return record[0] - self.roots.square() * self.direction(record)

    def evaluate(self, oracle: Oracle, state: AdaptiveState) -> tuple[Record, dict[str, float]]:
        """Compute the gradients at the present point, and the numbers of the step."""
        x, y, theta, w = state.at_x, state.at_y, state.theta, state.subgradients
        F, F_x, F_y = upper_gradients(oracle, x, y)
        phi, phi_x, f_y = lower_gradients(oracle, x, y)
        phi_theta, phi_x_theta, f_y_theta = lower_gradients(oracle, x, theta)
        # - f_y_theta - s equals the paper's (theta - y) / gamma once theta has converged, and does not lag behind before.
        lower = torch.cat([phi_x - phi_x_theta, f_y - f_y_theta - w.split(self.parts)[2], f_y_theta])
        record = (flatten(x, y, theta), w, torch.cat([F_x, F_y, torch.zeros_like(F_y)]), lower)
        direction = self.direction(record)
        numbers = {"upper": float(F), "lower": float(phi), "c": self.c, "gamma": self.gamma}
        numbers["gap"] = float(phi - phi_theta) - float((flatten(y) - flatten(theta)).square().sum()) / (2 * self.gamma)
        numbers["residual"] = self.c * float((direction + w).norm())
        numbers["d_x"] = float(direction[: self.parts[0]].norm())
        return record, numbers


def _watch(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Shorten the steps where the residual changed faster than they allow, and record negative curvature of f.

    Anderson acceleration converges to maxima as readily as to minima, so it restarts where the residual of (x, y) turned
    against their move.
    """
    if state.records:
        last, n = state.records[-1], len(state.origin)
        change = here.residual(record) - here.residual(last)
        step = (here.image(record) - here.image(last)) / here.roots + change
        length, changes = float(step.norm()), [float(part.norm()) for part in change.split(here.parts)]
        state.scale(*(max(length / part, 0.5) if part > length else 1.0 for part in changes))
        if float(step[:n] @ change[:n]) < 0:
            state.records, state.reach = [], 0.0
    (_, y, theta), (_, _, s), _, (_, slope, _) = (part.split(here.parts) for part in record)
    apart = y - theta
    if bool(apart.any()):  # slope + s is f_y(x, y) - f_y(x, theta)
        state.concave = max(state.concave, -float(apart @ (slope + s)) / float(apart.square().sum()))


def _grow_gamma(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Double gamma if theta has converged, and f is so flat that theta keeps most of the slope that y has."""
    (_, y, theta), (_, w_y, s), _, (_, difference, f_theta) = (part.split(here.parts) for part in record)
    slope = f_theta + s
    size, lag = float(slope.norm()), float((slope - (y - theta) / here.gamma).norm())
    if size > 0.5 * float((difference + slope + w_y).norm()) and lag < 0.5 * size:
        # The theorem needs gamma < 1 / (2 rho_f + 2 rho_g), and the first gamma is 1/2 over the largest curvature of f + g.
        most = state.curvatures["f_yy"] / state.concave if state.concave else math.inf
        state.growth = max(state.growth, min(2 * state.growth, most))


def _advance(oracle: Oracle, state: AdaptiveState) -> None:
    """Move to the next point, by Anderson acceleration (1965) where there is a memory."""
    here, x, y, theta = StepMap.of(oracle, state), state.at_x, state.at_y, state.theta
    images, residuals = (torch.stack([of(record) for record in state.records]) for of in (here.image, here.residual))
    target, state.accelerated = images[-1], False
    if len(state.records) > 1:
        start = target + here.roots * residuals[-1]  # the point whose prox is z; its image is the target
        step = combine(images, residuals) - start
        length = float((step / here.roots).norm())
        if 0 < length < math.inf:
            share = min(1.0, max(state.reach, REACH * float(residuals[-1].norm())) / length)  # as a trust region
            target, state.accelerated, state.reach = start + share * step, True, 2 * share * length
    write(target, x, y, theta)
    oracle.project(x.value, x.leaves, 1.0)
    oracle.prox(x.value, y.leaves, here.steps[1])
    oracle.prox(x.value, theta.leaves, here.steps[2])
    state.subgradients = (target - flatten(x, y, theta)) / here.roots.square()  # what the prox maps took away


def _extrapolate(oracle: Oracle, state: AdaptiveState, tol: float) -> None:
    """Extrapolate the answer to c = infinity if the last stages allow it; end the run if it, or (x, y), rests."""
    before, state.extrapolated = flatten(state.x, state.y) if state.extrapolated else None, False
    if state.solved <= 2:
        return
    oldest, old, new = state.ends
    first, second, last = state.distance(old, oldest), state.distance(new, old), state.change
    what, change = "(x, y)", max(first, second)
    if second <= first:  # changes that shrink
        limit = richardson(new, old, 2.0)  # the bias of a penalty is of order 1 / c
        write(limit, state.x, state.y)
        oracle.project(state.x.value, state.x.leaves, 1.0)  # extrapolation may leave X and Y
        # A prox with a step this short only brings y into its set.
        oracle.prox(state.x.value, state.y.leaves, torch.finfo(limit.dtype).eps / state.curvatures["f_yy"])
        state.extrapolated = True
        state.change = math.inf if before is None else state.distance(flatten(state.x, state.y), before)
        if state.change <= tol and max(last, state.distance(limit, new)) <= NEAR * tol:
            what, change = "the limit for c to infinity", state.change
    if change <= tol and state.closed(SMALL):  # (x, y) also rests where F holds y at a bound while c is small
        reason = f"{what} changed by {change:.1e} <= tol = {tol:.1e} (relative) while c doubled; nothing was verified"
        state.verdict = Verdict(Status.RULE_MET, f"{reason}, and meha.verify(problem, x, y) judges the point")


def _next_stage(oracle: Oracle, state: AdaptiveState, here: StepMap, record: Record, tol: float) -> None:
    """Finish the stage if it is solved accurately enough, or takes too long, and double c; then set the answer."""
    point, eps = record[0][: len(state.origin)], torch.finfo(record[0].dtype).eps
    tol = max(tol, math.sqrt(eps))
    drift = 1.0 if len(state.ends) < 2 else state.distance(state.ends[-1], state.ends[-2])
    wanted = ACCURACY * max(drift, tol) * float((here.roots * record[2]).norm()) / state.c
    rounding = 2 * eps * float((record[0] / here.roots).norm())
    solved = float(here.residual(record).norm()) <= max(wanted, rounding)
    state.steps += 1
    late = state.steps >= LONGEST
    if late and not solved:
        _grow_gamma(state, here, record)
        state.solved = state.steps = 0
    if solved or (late and not state.closed(NEAR * tol)):
        state.ends, state.solved = [*state.ends[-2:], point], state.solved + solved
        state.c, state.steps = 2 * state.c, 0
        state.scale(2.0, 2.0, 2.0)  # steps that were cut for the curvature at a smaller c may recover
        _extrapolate(oracle, state, tol)
    if not state.extrapolated:
        write(point, state.x, state.y)


@dataclass(frozen=True, kw_only=True)
class AdaptiveMEHA(Method):
    """The single loop of MEHA without parameters: it chooses its step sizes, gamma, c and stopping point.

    A step costs 2 gradients of f and 1 of F. All three variables move at once:

        x     <- proj_X( x - alpha grad_x [ F(x, y) / c + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c + f(x, y) ] - grad_y f(x, theta) - s) )
        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )

    where s is the subgradient of g that the last prox of theta found. Once theta has converged, - grad_y f(x, theta) - s is the
    paper's (theta - y) / gamma. The steps follow from curvatures (:mod:`meha.lower.curvature`), with Anderson acceleration of
    the whole step. c starts where F dominates and doubles from stage to stage; the answer is extrapolated to c = infinity.
    gamma doubles where f is flat, within what its negative curvature allows. The units of x, y, F and f do not matter.

    The run ends, with the status ``rule met``, when this limit, or (x, y) itself, stops changing. Nothing is verified: y may be
    in a basin that is not the lowest, and x on a plateau or on its way to infinity. ``meha.verify(problem, x, y)`` judges the
    point. Lower levels of condition 1000 and more make it slow.
    :class:`~meha.Default` verifies its answer; :class:`~meha.StochasticMEHA` takes batches and networks. The numbers of a step
    are those of :class:`~meha.MEHA`, and ``gamma``, at the last point that was not rejected.

    Args:
        tol: the relative change of the limit between two stages at which the run ends; at least the square root of the
            rounding error is used, 3e-4 in single precision, also for 0.

    >>> import meha
    >>> problem = meha.problems.sine(n=10)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, AdaptiveMEHA())
    >>> print(solution.status, solution.steps < 100, problem.distance(solution.x, solution.y).x < 1e-3)
    rule met True True
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)
    repeats: ClassVar[str] = "it compares values"

    tol: float = 1e-4

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError(
                "method: AdaptiveMEHA() needs the same objectives in every step, and these change with the batch; use"
                " StochasticMEHA() or MEHA(), or objectives of (x, y) on all data."
            )

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Start elsewhere, or bound x and y by sets in which the objectives are defined."

    def report(self, run: Run) -> dict[str, str]:
        """Report the curvatures, the last c and gamma, and the accuracy of the answer."""
        state = run.state
        lines = {"problem": describe(state.curvatures)}
        lines["course"] = f"c = {state.c:.2g}" + (f", gamma = {state.numbers['gamma']:.2g}" if state.numbers else "")
        if state.extrapolated and math.isfinite(state.change):
            change = f"changed by {state.change:.1e} in the last stage (an estimate, not a bound)"
            lines["accuracy"] = f"the limit for c to infinity {change}"
        return lines

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> AdaptiveState:
        # An objective that ignores its variables raises here.
        F, _, F_y = upper_gradients(oracle, x, y, strict=True)
        oracle.gradient(y, [(1.0, oracle.lower, x, y)])
        oracle.gradient(x, [(1.0, oracle.phi, x, y)])
        f, _, f_y = lower_gradients(oracle, x, y)
        for level, value in (("upper", F), ("lower", f)):
            if not math.isfinite(value):
                raise ValueError(f"{level}: is {float(value)} at the start (x0, y0); check it, or start elsewhere.")
        vectors: dict[str, Tensor] = {}
        seen = probe(oracle, x, y, vectors, PROBES)
        # A linear f gets the curvature with which a Newton step is as long as y; a linear F moves y as far as f or y's size.
        slope, lower_slope, size = (float(vector.norm()) for vector in (F_y, f_y, flatten(y)))
        L = seen["f_yy"] = seen["f_yy"] or lower_slope / (size or 1.0) or 1.0
        c = balance(seen["F_xx"], seen["F_yy"], L, seen["f_xy"])
        c, theta = FIRST_C * (c if c < math.inf else slope / (max(lower_slope, L * size) or L) or 1.0), y.copy()
        zero = torch.zeros_like(flatten(x, y, theta))
        return AdaptiveState(x, y, x.copy(), y.copy(), theta, zero, flatten(x, y), seen, vectors, c, settled=False)

    def step(self, oracle: Oracle, state: AdaptiveState, at: At) -> Numbers:
        if at.batch is not None:
            given = type(at.batch).__name__
            raise ValueError(f"batch: AdaptiveMEHA() takes none, got {given}; use StochasticMEHA() or MEHA().")
        if state.k.bit_count() == 1:  # at steps 1, 2, 4, 8 and so on
            state.vectors = dict(state.vectors)  # replaced, not changed: a step may be undone
            now = probe(oracle, state.at_x, state.at_y, state.vectors, 1)
            # An estimate may miss half of a curvature.
            state.curvatures = {name: max(value, state.curvatures[name] / 2) for name, value in now.items()}
        here = StepMap.of(oracle, state)
        record, numbers = here.evaluate(oracle, state)
        size, last = float(here.residual(record).norm()), state.records[-1:]
        # An accelerated step is worth little when it does not reduce the residual, and some growth is normal across a kink.
        if not size <= (2 * float(here.residual(last[0]).norm()) if last else sys.float_info.max):
            if not last or min(state.shrink) <= torch.finfo(state.origin.dtype).eps:
                where = "after ever shorter steps" if last else "at the start"
                state.verdict = Verdict(Status.NON_FINITE, f"The gradients explode, or are not finite, {where}.")
                return {**state.numbers, "upper": math.nan}
            if not state.accelerated:
                state.scale(0.5, 0.5, 0.5)
            state.records, state.reach = last, 0.0
            _advance(oracle, state)  # a plain step
            return state.numbers
        state.numbers = numbers
        state.lowest, state.highest = min(state.lowest, numbers["upper"]), max(state.highest, numbers["upper"])
        _watch(state, here, record)  # before the record is stored, because it is compared with the one before
        state.records = [*state.records[-MEMORY:], record]
        _next_stage(oracle, state, here, record, self.tol)
        _advance(oracle, state)
        return numbers

    def terminate(self, state: AdaptiveState) -> Verdict | None:
        return state.verdict
