"""AdaptiveMEHA: the single loop of MEHA with step sizes, gamma, c and a stopping test that it chooses itself.

In the order of this file: the numbers of its heuristics, its state, one step, estimates of curvature and the step sizes that
follow from them, Anderson acceleration, the checks at the end, the stages of c, and the method that combines them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from meha.lower.curvature import Curvatures, balance, describe, flatten, lower_gradients, probe, upper_gradients, write
from meha.lower.flat_problem import FlatProblem
from meha.lower.multistart import LowerMultistart
from meha.lower.proximal_gradient import solve_lower
from meha.method.method import At, Method, Numbers, Run, State
from meha.method.status import Status, Verdict
from meha.numerics.extrapolation import combine, richardson
from meha.numerics.limited_memory import LimitedMemory, vector_norm
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Response
from meha.tensors.checks import check_tolerance
from meha.tensors.variables import Variable

__all__ = [
    "TUNING",
    "AdaptiveMEHA",
    "AdaptiveStages",
    "AdaptiveState",
    "AdaptiveSteps",
    "AdaptiveTuning",
    "AndersonMemory",
    "Record",
    "Sight",
    "Stage",
    "StepMap",
    "advance",
    "at_infinity",
    "better_behind",
    "check_start",
    "closed",
    "evaluate",
    "first_look",
    "grow_gamma",
    "judge",
    "look_again",
    "move",
    "set_course",
    "watch",
]


@dataclass(frozen=True)
class AdaptiveTuning:
    """Every heuristic number of AdaptiveMEHA. All are relative, so that the units of x, y, F and f do not matter."""

    # Steps
    safety: float = 0.6  # steps times curvatures; below 1, because curvatures are estimated from below
    gamma: float = 0.45  # first gamma times the curvature of f; below 1/2 the theorem covers any f

    # Curvatures
    first_look: int = 4  # power iterations for each curvature at the start; enough for its first digit
    next_look: int = 1  # power iterations in each later estimate, which continue the earlier ones
    wait: int = 50  # largest number of steps between two estimates, which then cost 5 % of all gradients
    fall: float = 0.4  # curvatures that fell by less are kept, and none falls further at once: an estimate may miss much
    rise: float = 1.1  # curvatures that rose by less are kept, so that the steps do not change all the time
    concave: float = 1e-3  # negative curvature of f, relative to its largest, that counts; less is the error of differences

    # Rejected points
    explosion: float = 10.0  # growth of the residual at which a plain step is rejected; some growth is normal across a kink
    overshoot: float = 2.0  # the same for an accelerated step, which is worth little when it does not reduce the residual
    cut: float = 0.4  # factor on all steps after a rejected plain step, so that a few get below any curvature
    attempts: int = 30  # rejected plain steps in a row after which the run gives up, with steps of 1e-12 of their first size

    # Shorter steps
    excess: float = 1.3  # change of the residual, relative to the move, above which steps are cut; 1 if curvatures are right
    least_cut: float = 0.2  # smallest factor on steps at once, as one change may be exceptional
    against: float = 0.1  # negative cosine of move and residual's change at which acceleration starts again; less may be noise

    # Growth of gamma
    flat: float = 0.7  # share of the slope at y that is left at theta from which on f is too flat for gamma
    arrived: float = 0.2  # relative error of theta below which that share means something
    growth: float = 16.0  # largest factor on gamma at once, as it is judged from one direction
    worth: float = 1.5  # smallest factor on gamma that justifies a change, after which the last stages do not compare
    largest: float = 1e3  # largest gamma relative to the first one; without limit, theta would never converge
    share_left: float = 1e-9  # guards the division by 1 - share

    # Acceleration
    memory: int = 40  # points, besides the last one, that are combined; more seldom help and are costly
    shortest: float = 0.3  # shortest accelerated step relative to the plain one; the residual cannot fall faster than that
    first_reach: float = 10.0  # longest accelerated step relative to the plain one, at first and after a rejected one
    least_reach: float = 4.0  # the same at any time; otherwise it may be twice the last accelerated step

    # Stages of c
    first_c: float = 0.5  # c at the start, relative to the balance of both levels: F counts a little more, and guides x
    first_c_linear: float = 0.1  # c at the start, relative to equal slopes, if F is linear: slopes do not say how far it draws
    ratio: float = 2.0  # factor on c from stage to stage; a larger one makes the next solution hard to reach
    early: int = 15  # steps after which a stage is left unsolved, while the solution moves much with c
    late: int = 60  # the same once it moves little, and a solved stage is worth waiting for
    late_share: float = 0.25  # the same as a share of all steps, so that hard problems get longer stages
    moving: float = 0.3  # relative change between stages above which the solution moves much
    accuracy: float = 0.05  # residual of a solved stage relative to grad F, times the relative change between the last stages
    accuracy_tol: float = 0.3  # the same, times tol, below which it need not be: well inside the changes to be seen
    loosest: float = 0.1  # upper bound of that residual, relative to grad F; beyond, the stage shows nothing
    least_slope: float = 1e-3  # lower bound of grad F relative to its largest, for a minimum of F inside
    rounding: float = 4.0  # multiple of the rounding error of z below which the residual cannot get
    close: float = 10.0  # an unsolved stage is not left if F can still change only by this multiple of tol times its range

    # Limits for c to infinity
    shrinks: float = 0.8  # largest ratio of successive changes that is extrapolated; 1/2 where the bias is of order 1/c
    near: float = 10.0  # multiple of tol within which the last change, and the limit from its stage, must lie
    way: float = 0.01  # weight of the distance from the start in the size of a point, which may end at zero
    inside: float = 1e-9  # prox step, times the curvature of f, that only brings y into its set

    # The end
    closed: float = 0.1  # change of F that the gap still allows, relative to its range, at which a run may end
    pairs: int = 50  # memory of the descents that verify y
    least_search: int = 1000  # gradients of f that these may take in any case
    search: float = 0.5  # share of the gradients taken so far that they may take in addition
    holding: float = 10.0  # c, in units of the difference of F over that of f, at which F cannot pull y out of a lower basin
    restarts: int = 3  # times that y may move to a lower basin; more would mean that x and y chase each other
    behind: tuple[float, ...] = (0.0, 0.1, 0.3)  # shares of the segment from x0 to x at which F is compared

    # Optima at infinity
    moved: float = 1e-3  # x has moved if it is further from the start than this, relative to x
    beyond: float = 1e3  # x that can move this many times as far as it did inside X counts as unbounded
    lower_tol: float = 1e-8  # relative accuracy of the lower solves that compare F, well below what tol can be
    lower_steps: int = 1000  # largest number of steps of these solves, which happen once in a run


TUNING = AdaptiveTuning()


Record = tuple[Tensor, Tensor, Tensor, Tensor]
"""An evaluated point: z = (x, y, theta), the subgradients of its prox maps, and the gradients of F and those of f apart.

They are kept apart because c divides only the former: a record stays valid when c changes."""

Stage = tuple[float, Tensor, bool, float]
"""A finished stage: c, its last point (x, y), whether the residual was small there, and gamma relative to its first value."""


class _Saved:
    """Saves and restores the fields of a dataclass."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(vars(type(self)(**state)))


@dataclass
class Sight(_Saved):
    """What the run knows about the curvature of the problem.

    Attributes:
        curvatures, vectors: norms of second derivatives, and the vectors from which their next power iterations start.
        concave: the largest negative curvature of f in y that was seen between y and theta.
        step: the step in which the curvatures were last estimated.
    """

    curvatures: Curvatures
    vectors: dict[str, Tensor]
    concave: float = 0.0
    step: int = 0


@dataclass
class AdaptiveSteps(_Saved):
    """The penalty c, gamma relative to its first value, and the steps of x, y, theta relative to what the curvatures allow."""

    c: float
    growth: float = 1.0
    shrink: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def scale(self, *factors: float) -> None:
        """Multiply the steps, up to what the curvatures allow."""
        x, y, theta = (min(1.0, factor * shrink) for factor, shrink in zip(factors, self.shrink, strict=True))
        self.shrink = (x, y, theta)


@dataclass
class AndersonMemory(_Saved):
    """The points that Anderson acceleration combines; none of them depends on c, gamma or the step sizes.

    Attributes:
        accelerated: whether the present point is a combination of them, and not a plain step.
        reach: the largest length of the next accelerated step; 0 if there was none before.
    """

    records: list[Record] = field(default_factory=list)
    accelerated: bool = False
    reach: float = 0.0

    def forget(self, keep: int = 0) -> None:
        """Restart the acceleration with the last ``keep`` points."""
        self.records, self.reach = self.records[len(self.records) - keep :], 0.0


@dataclass
class AdaptiveStages(_Saved):
    """The stages of growing c, and how far the run has come in them.

    Attributes:
        stages: the last three that are finished.
        steps: the number of steps in the present stage.
        extrapolated, change: whether the answer is extrapolated to c = infinity, and its change in the last stage.
        scale: the largest size of grad F, in the metric of the steps.
        lowest, highest: the range of F so far.
        restarts: how often y was moved to a lower basin.
    """

    stages: list[Stage] = field(default_factory=list)
    steps: int = 0
    extrapolated: bool = False
    change: float = math.inf
    scale: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    restarts: int = 0


@dataclass
class AdaptiveState(State):
    """The answer (x, y), the point (at_x, at_y, theta) of the next gradients, and what the run has learned.

    Attributes:
        subgradients: those of g and of the indicators of X and Y at the point, from the last prox maps; zero without them.
        origin: the start (x, y).
        failures: the number of rejected points since the last accepted one.
        numbers: the numbers of the last accepted point.
        evidence: the result of the multistart search of the lower level at the end; empty before.
        status, reason: how and why the run has ended; empty before.
    """

    at_x: Variable
    at_y: Variable
    theta: Variable
    subgradients: Tensor
    origin: Tensor
    sight: Sight
    pace: AdaptiveSteps
    memory: AndersonMemory = field(default_factory=AndersonMemory)
    course: AdaptiveStages = field(default_factory=AdaptiveStages)
    failures: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    evidence: str = ""
    status: str = ""
    reason: str = ""


class StepMap(NamedTuple):
    """The step z <- prox(z - roots^2 * direction(z)) for fixed c, gamma and step sizes, as a function of records."""

    c: float
    gamma: float
    beta: float
    eta: float
    roots: Tensor  # the square roots of the step sizes, one for each coordinate of z: residual and move then have one metric
    parts: tuple[int, int, int]  # the sizes of x, y and theta

    @classmethod
    def of(cls, oracle: Oracle, state: AdaptiveState) -> StepMap:
        """Return the map with the largest step sizes that the curvatures allow."""
        seen, c = state.sight.curvatures, state.pace.c
        L = seen["f_yy"] + oracle.problem.g.rho
        gamma = TUNING.gamma * state.pace.growth / L
        h_y = seen["F_yy"] / c + L
        # phi - v_gamma has this curvature in x where f has L in y; without any in x, there is the one that F_xy brings about.
        h_x = seen["F_xx"] / c + seen["f_xy"] ** 2 / (L + 1 / gamma) or (seen["F_xy"] / c) ** 2 / h_y or 1.0
        coupling = 1 + seen["F_xy"] / c / math.sqrt(h_x * h_y)  # [[a, b], [b, d]] <= (1 + b / sqrt(a d)) diag(a, d)
        curvatures = (coupling * h_x, coupling * h_y, L + 1 / gamma)
        alpha, beta, eta = (TUNING.safety * shrink / h for shrink, h in zip(state.pace.shrink, curvatures, strict=True))
        parts = (state.x.numel, state.y.numel, state.y.numel)
        roots = [state.origin.new_full((n,), math.sqrt(step)) for n, step in zip(parts, (alpha, beta, eta), strict=True)]
        return cls(c, gamma, beta, eta, torch.cat(roots), parts)

    def direction(self, record: Record) -> Tensor:
        """Return the direction of the step without the subgradients, which the prox maps add."""
        z, _, upper, lower = record
        _, y, theta = z.split(self.parts)
        direction = upper / self.c + lower
        direction[-len(theta) :] += (theta - y) / self.gamma
        return direction

    def residual(self, record: Record) -> Tensor:
        """Return (before_prox - image) / roots: direction and subgradients in the metric of the steps, zero at fixed points."""
        return self.roots * (self.direction(record) + record[1])

    def size(self, record: Record) -> float:
        """Return the norm of the residual."""
        return float(self.residual(record).norm())

    def image(self, record: Record) -> Tensor:
        """Return the point to which the step leads before the prox maps."""
        return record[0] - self.roots.square() * self.direction(record)

    def before_prox(self, record: Record) -> Tensor:
        """Return the point whose prox is z; it equals the image at a fixed point."""
        return record[0] + self.roots.square() * record[1]


def evaluate(oracle: Oracle, state: AdaptiveState, here: StepMap) -> tuple[Record, dict[str, float]]:
    """Compute the gradients at the present point, and the numbers of the step."""
    x, y, theta, w = state.at_x, state.at_y, state.theta, state.subgradients
    F, F_x, F_y = upper_gradients(oracle, x, y)
    phi, phi_x, f_y = lower_gradients(oracle, x, y)
    phi_theta, phi_x_theta, f_y_theta = lower_gradients(oracle, x, theta)
    s = w.split(here.parts)[2]
    upper = torch.cat([F_x, F_y, torch.zeros_like(F_y)])
    # - f_y_theta - s equals the paper's (theta - y) / gamma once theta has converged, and does not lag behind before.
    lower = torch.cat([phi_x - phi_x_theta, f_y - f_y_theta - s, f_y_theta])
    record = (flatten(x, y, theta), w, upper, lower)
    direction = here.direction(record)
    return record, {
        "upper": float(F),
        "lower": float(phi),
        "gap": float(phi - phi_theta) - float((flatten(y) - flatten(theta)).square().sum()) / (2 * here.gamma),
        "residual": here.c * float((direction + w).norm()),
        "d_x": float(direction[: here.parts[0]].norm()),
        "c": here.c,
        "gamma": here.gamma,
    }


def move(oracle: Oracle, state: AdaptiveState, here: StepMap, target: Tensor) -> None:
    """Move to the prox of the target, and store the subgradients there, which are what the prox took away."""
    x, y, theta = state.at_x, state.at_y, state.theta
    write(target, x, y, theta)
    oracle.project(x.value, x.leaves, 1.0)
    oracle.prox(x.value, y.leaves, here.beta)
    oracle.prox(x.value, theta.leaves, here.eta)
    state.subgradients = (target - flatten(x, y, theta)) / here.roots.square()


def check_start(oracle: Oracle, x: Variable, y: Variable) -> None:
    """Raise if an objective is not finite at the start, or ignores its variables."""
    for function in (oracle.upper, oracle.lower):
        value = float(function(x, y))
        if not math.isfinite(value):
            raise ValueError(f"{function.level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    upper_gradients(oracle, x, y, strict=True)
    oracle.gradient(y, [(1.0, oracle.lower, x, y)])
    oracle.gradient(x, [(1.0, oracle.phi, x, y)])


def _first_c(seen: Curvatures) -> float:
    """Return the first c for these curvatures; infinite where F is linear."""
    return TUNING.first_c * balance(seen["F_xx"], seen["F_yy"], seen["f_yy"], seen["f_xy"])


def first_look(oracle: Oracle, x: Variable, y: Variable) -> tuple[Sight, AdaptiveSteps]:
    """Estimate the curvatures at the start, and choose c from them or, where F is linear, from the slopes of F and f in y.

    A linear f is given the curvature with which a Newton step is as long as y.
    """
    sight = Sight({}, {})
    sight.curvatures = curvatures = probe(oracle, x, y, sight.vectors, TUNING.first_look)
    _, _, F_y = upper_gradients(oracle, x, y)
    _, _, f_y = lower_gradients(oracle, x, y)
    start = flatten(y)
    curvatures["f_yy"] = L = curvatures["f_yy"] or float(f_y.norm()) / (float(start.norm()) or 1.0) or 1.0
    c = _first_c(curvatures)
    if c < math.inf:
        return sight, AdaptiveSteps(c)
    write(start - f_y / L, y)
    oracle.prox(x.value, y.leaves, 1 / (L + 2 * oracle.problem.g.rho))  # a weakly convex g has a prox below 1 / rho only
    slope, mapping = float(F_y.norm()), float((start - flatten(y)).norm()) * L
    write(start, y)  # y served as scratch
    return sight, AdaptiveSteps(TUNING.first_c_linear * slope / mapping if slope and mapping else 1.0)


def look_again(oracle: Oracle, state: AdaptiveState) -> None:
    """Estimate the curvatures again, at steps 1, 2, 4, 8 and so on, later every 50, and adopt those that have changed."""
    sight = state.sight
    if state.k + 1 - sight.step < min(max(1, sight.step), TUNING.wait):
        return
    sight.step, sight.vectors = state.k + 1, dict(sight.vectors)
    now, old = probe(oracle, state.at_x, state.at_y, sight.vectors, TUNING.next_look), sight.curvatures
    sight.curvatures = {
        name: old[name] if TUNING.fall * old[name] <= value <= TUNING.rise * old[name] else max(value, TUNING.fall * old[name])
        for name, value in now.items()
    }
    if not state.course.stages:  # F must still lead in the first stage, also with the curvatures that are known by now
        state.pace.c = min(state.pace.c, _first_c(sight.curvatures))


def watch(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Shorten the steps where the residual changed faster than they allow, and record negative curvature of f.

    Anderson acceleration converges to maxima as readily as to minima, so it restarts where the residual of (x, y) turned
    against their move.
    """
    if state.memory.records:
        last, n = state.memory.records[-1], len(state.origin)
        step = (here.before_prox(record) - here.before_prox(last)) / here.roots
        change = here.residual(record) - here.residual(last)
        length, changes = float(step.norm()), [float(part.norm()) for part in change.split(here.parts)]
        state.pace.scale(*(max(length / part, TUNING.least_cut) if part > TUNING.excess * length else 1.0 for part in changes))
        if float(step[:n] @ change[:n]) < -TUNING.against * float(step[:n].norm() * change[:n].norm()):
            state.memory.forget()
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    apart, slope = y - theta, lower.split(here.parts)[1] + w.split(here.parts)[2]  # f_y(x, y) - f_y(x, theta), without s
    distance = float(apart.square().sum())
    curvature = float(apart @ slope) / distance if distance else 0.0
    if curvature < -TUNING.concave * state.sight.curvatures["f_yy"]:
        state.sight.concave = max(state.sight.concave, -curvature)


def grow_gamma(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Increase gamma if theta has converged, keeps most of the slope that y has, and no negative curvature forbids it.

    The share q that theta keeps is 1 / (1 + gamma mu) where f has the curvature mu, so that gamma q / (1 - q) is 1 / mu.
    """
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    (_, w_y, w_theta), (_, difference, f_theta) = w.split(here.parts), lower.split(here.parts)
    at_theta = f_theta + w_theta
    share = float(at_theta.norm()) / (float((difference + at_theta + w_y).norm()) or 1.0)
    lag = float((at_theta - (y - theta) / here.gamma).norm())
    if share > TUNING.flat and lag < TUNING.arrived * float(at_theta.norm()):
        sight, pace = state.sight, state.pace
        # The theorem needs gamma < 1 / (2 rho_f + 2 rho_g), and the first gamma is 0.45 over the largest curvature of f + g.
        most = max(sight.curvatures["f_yy"] / sight.concave, 1.0) if sight.concave else TUNING.largest
        growth = min(pace.growth * min(share / max(1 - share, TUNING.share_left), TUNING.growth), most)
        if growth > TUNING.worth * pace.growth:
            pace.growth = growth


def advance(oracle: Oracle, state: AdaptiveState) -> None:
    """Move to the next point: by Anderson acceleration (1965), or by a plain step where the memory contradicts itself."""
    here, memory = StepMap.of(oracle, state), state.memory
    last = memory.records[-1]
    target, memory.accelerated = here.image(last), False
    if len(memory.records) > 1:
        residuals = torch.stack([here.residual(record) for record in memory.records])
        start, size = here.before_prox(last), float(residuals[-1].norm())
        step = combine(torch.stack([here.image(record) for record in memory.records]), residuals) - start
        length = float((step / here.roots).norm())
        if TUNING.shortest * size <= length < math.inf:
            reach = max(TUNING.least_reach * size, memory.reach or TUNING.first_reach * size)  # as a trust region
            share = min(1.0, reach / length) if length else 1.0
            target, memory.accelerated, memory.reach = start + share * step, True, 2 * share * length
        else:  # the residual cannot change as fast as the memory says
            memory.forget(keep=1)
    move(oracle, state, here, target)


def _accept(oracle: Oracle, state: AdaptiveState, here: StepMap, size: float) -> bool:
    """Return True if the run continues from this point; else take a plain step from the last one, shorter if this was plain."""
    memory = state.memory
    if not memory.records:
        return math.isfinite(size)
    if size <= (TUNING.overshoot if memory.accelerated else TUNING.explosion) * here.size(memory.records[-1]):
        return True
    if memory.accelerated:
        memory.forget(keep=1)
    else:
        state.pace.scale(TUNING.cut, TUNING.cut, TUNING.cut)
        state.failures += 1
    memory.accelerated, memory.reach = False, 0.0
    here = StepMap.of(oracle, state)  # with the steps just cut
    move(oracle, state, here, here.image(memory.records[-1]))
    return False


def _may_be_low(oracle: Oracle, state: AdaptiveState, x: Variable, tol: float) -> bool:
    """Return True if F may be as low at x, judged by values at two guesses of y: a cheap test that spares most lower solves."""
    y, start, here, values = state.y.copy(), state.origin[state.x.numel :], flatten(state.y), []
    for guess in (here, 2 * here - start):
        write(guess, y)
        oracle.prox(x.value, y.leaves, TUNING.inside / state.sight.curvatures["f_yy"])
        values.append((float(oracle.phi(x, y)), float(oracle.upper(x, y))))
    return min(values)[1] <= float(oracle.upper(state.x, state.y)) + tol * (state.course.highest - state.course.lowest)


def _is_low(oracle: Oracle, state: AdaptiveState, x: Variable, tol: float) -> bool:
    """Return True if, with the lower level solved, F is lower at x, or is as low while y still moves.

    (If neither F nor y changes, x no longer matters there, and has converged.)
    """
    solve = partial(solve_lower, oracle, tol=TUNING.lower_tol, max_steps=TUNING.lower_steps)
    y = solve(state.x, state.y).theta
    beyond = solve(x, y).theta
    F, F_beyond = float(oracle.upper(state.x, y)), float(oracle.upper(x, beyond))
    noise, spread = math.sqrt(torch.finfo(state.origin.dtype).eps), state.course.highest - state.course.lowest
    moves = float((flatten(beyond) - flatten(y)).norm()) > tol * float(flatten(y).norm())
    return F_beyond < F - noise * abs(F) or (moves and F_beyond <= F + noise * min(abs(F), spread))


def at_infinity(oracle: Oracle, state: AdaptiveState, tol: float) -> str:
    """Say why the optimum may lie at infinity: F is as low where coordinates that moved far move twice as far; or ""."""
    start, here = state.origin[: state.x.numel], flatten(state.x)
    shift = here - start
    if not float(shift.norm()) > TUNING.moved * float(here.norm()):  # a start near the solution says nothing about what is far
        return ""
    furthest = shift.abs() >= shift.abs().max() / 2
    far = torch.where(furthest, here + TUNING.beyond * shift, here)
    x = state.x.copy()
    write(far, x)
    oracle.project(x.value, x.leaves, 1.0)
    if not torch.equal(flatten(x), far):  # X bounds x
        return ""
    write(torch.where(furthest, here + shift, here), x)
    try:
        if not (_may_be_low(oracle, state, x, tol) and _is_low(oracle, state, x, tol)):
            return ""
    except (RuntimeError, ValueError, ArithmeticError):  # an objective or g is not defined there
        return ""
    return (
        f"(x, y) rests, but F is no higher when {int(furthest.sum())} of {len(here)} coordinates of x go twice as far from x0:"
        " the optimum may lie at infinity. Bound x, as with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
    )


def better_behind(oracle: Oracle, state: AdaptiveState, tol: float) -> str:
    """Say why F is not smallest at x: it is lower where the coordinates that moved furthest return towards x0; or "".

    This detects x on plateaus, such as weights so large that y no longer depends on them.
    """
    start, here = state.origin[: state.x.numel], flatten(state.x)
    shift = here - start
    furthest = shift.abs() >= shift.abs().max() / 2
    solve = partial(solve_lower, oracle, tol=TUNING.lower_tol, max_steps=TUNING.lower_steps)
    F = float(oracle.upper(state.x, state.y))
    least = F - tol * (state.course.highest - state.course.lowest) - math.sqrt(torch.finfo(here.dtype).eps) * abs(F)
    x = state.x.copy()
    for share in TUNING.behind:
        write(torch.where(furthest, start + share * shift, here), x)
        if bool(shift.any()) and float(oracle.upper(x, solve(x, state.y).theta)) < least:
            return (
                f"but F is lower when {int(furthest.sum())} of {len(here)} coordinates of x go back to {share:g} of their way"
                " from x0; start there"
            )
    return ""


def _search(oracle: Oracle, state: AdaptiveState, tol: float) -> LowerMultistart:
    """Prepare a multistart search of the lower level at x, around y."""
    levels = FlatProblem(oracle, state.x.copy(), state.y.copy())
    levels.curvatures = state.sight.curvatures
    x, y, (x0, y0) = flatten(state.x), flatten(state.y), state.origin.split((state.x.numel, state.y.numel))
    scale, tolerance = max(vector_norm(y), vector_norm(y - y0)) or 1.0, tol * max(vector_norm(x), vector_norm(x - x0))
    pairs, curvature = LimitedMemory.sized(TUNING.pairs, len(y)), levels.curvatures["f_yy"]
    return LowerMultistart(levels, y, pairs, 1 / curvature, scale, tolerance, slack=curvature * (tol * scale) ** 2, solved=True)


def _better(search: LowerMultistart, state: AdaptiveState, excess: float) -> Tensor | None:
    """Return the best of the lowest points of the lower level, if y is above it or F is clearly smaller there; else None."""
    levels, course, lowest = search.levels, state.course, search.lowest
    level = lowest.value + search.equal(lowest) + (0.0 if excess else search.slack)
    values = [(levels.upper(basin.z)[0], basin.z) for basin in search.basins if basin.value <= level]
    F, y = min(values, key=lambda value: value[0])
    gained = levels.upper(search.point.z)[0] - F > TUNING.closed * (course.highest - course.lowest)
    return y if excess or gained else None


def _restart(state: AdaptiveState, y: Tensor, c: float) -> None:
    """Restart the run from another y, at this c or a larger one, without the old points and stages."""
    state.pace.c = max(state.pace.c, c)
    write(y, state.at_y)
    write(y, state.theta)
    write(flatten(state.x), state.at_x)
    state.subgradients = torch.zeros_like(state.subgradients)
    state.memory.forget()
    state.course.stages, state.course.extrapolated, state.course.steps = [], False, 0
    state.course.restarts += 1
    state.reason = ""


def judge(oracle: Oracle, state: AdaptiveState, tol: float) -> None:
    """Decide the status of a run that has converged, or restart it from a lower point of the lower level."""
    doubt = at_infinity(oracle, state, tol)
    if doubt:  # then the lower level need not be searched at this x
        state.status, state.reason = Status.AT_INFINITY.value, doubt
        return
    search = _search(oracle, state, tol)
    start, allowed = state.origin[state.x.numel :], max(TUNING.least_search, int(TUNING.search * oracle.counts.lower))
    evidence = search.run([flatten(state.theta), start], allowed)
    state.evidence = str(evidence)
    better = _better(search, state, evidence.excess)
    if better is not None:
        if state.course.restarts < TUNING.restarts:
            levels = search.levels
            pull = abs(levels.upper(better)[0] - levels.upper(flatten(state.y))[0])
            # At c < pull / excess the penalised objective is smaller in the old basin, and y would return there.
            _restart(state, better, TUNING.holding * pull / evidence.excess if evidence.excess else 0.0)
            return
        write(better, state.y)
        state.status = Status.LOCAL.value
        state.reason += f"; y was in a basin that is not the best, and was moved: {evidence}"
        return
    behind = better_behind(oracle, state, tol)
    state.status = (Status.CONVERGED if evidence.certain and not behind else Status.LOCAL).value
    state.reason += f"; {behind or evidence}"


def _change(state: AdaptiveState, new: Tensor, old: Tensor) -> float:
    """Return the relative change of x or y, the larger one; their size includes a little of the distance from the start."""
    parts = (state.x.numel, state.y.numel)
    changes = []
    for a, b, start in zip(new.split(parts), old.split(parts), state.origin.split(parts), strict=True):
        size = float(a.norm()) + TUNING.way * float((a - start).norm())
        changes.append(float((a - b).norm()) / size if size else float((a - b).norm() > 0))
    return max(changes)


def closed(state: AdaptiveState) -> bool:
    """Return True if the gap is so small that F can hardly change any more as c grows."""
    course = state.course
    return 2 * state.pace.c * abs(state.numbers["gap"]) <= TUNING.closed * (course.highest - course.lowest)


def _extrapolate(oracle: Oracle, state: AdaptiveState, tol: float) -> None:
    """Extrapolate the answer to c = infinity if the last stages allow it; set a reason to stop if it, or (x, y), converged."""
    course = state.course
    before, course.extrapolated = flatten(state.x, state.y) if course.extrapolated else None, False
    if len(course.stages) <= 2 or not all(solved for _, _, solved, _ in course.stages):
        return
    (_, z0, _, g0), (c1, z1, _, g1), (c2, z2, _, g2) = course.stages
    first, second = _change(state, z1, z0), _change(state, z2, z1)
    if max(first, second) <= tol and closed(state):
        state.reason = f"(x, y) changed by {max(first, second):.1e} <= tol = {tol:.1e} (relative) while c grew to {c2:.3g}"
    if g0 == g1 == g2 and second <= TUNING.shrinks * first:  # one gamma, and changes that shrink like a geometric series
        limit = richardson(z2, z1, c2 / c1)  # the bias of a penalty is of order 1 / c
        write(limit, state.x, state.y)
        oracle.project(state.x.value, state.x.leaves, 1.0)  # extrapolation may leave X and Y
        oracle.prox(state.x.value, state.y.leaves, TUNING.inside / state.sight.curvatures["f_yy"])
        course.extrapolated = True
        last, course.change = course.change, math.inf if before is None else _change(state, flatten(state.x, state.y), before)
        near = _change(state, limit, z2) <= TUNING.near * tol
        if course.change <= tol and last <= TUNING.near * tol and near and closed(state):
            state.reason = (
                f"the limit for c to infinity changed by {course.change:.1e} <= tol = {tol:.1e} (relative), c = {c2:.3g}"
            )


def set_course(oracle: Oracle, state: AdaptiveState, here: StepMap, record: Record, tol: float) -> None:
    """Finish the stage if it is solved accurately enough, or takes too long, and increase c; then set the answer."""
    pace, course = state.pace, state.course
    point = record[0][: len(state.origin)]
    eps = torch.finfo(point.dtype).eps
    tol = max(tol, math.sqrt(eps))
    drift = 1.0 if len(course.stages) < 2 else _change(state, course.stages[-1][1], course.stages[-2][1])
    slope = float((here.roots * record[2]).norm())
    course.scale = max(course.scale, slope)
    course.steps += 1
    accuracy = min(max(TUNING.accuracy * drift, TUNING.accuracy_tol * tol), TUNING.loosest)
    wanted = accuracy * max(slope, TUNING.least_slope * course.scale) / pace.c
    solved = here.size(record) <= max(wanted, TUNING.rounding * eps * float((record[0] / here.roots).norm()))
    late = course.steps >= (TUNING.early if drift > TUNING.moving else max(TUNING.late, TUNING.late_share * state.k))
    # F still changes by about twice c times the gap as c grows to infinity, because the gap is of order 1 / c^2.
    close = 2 * pace.c * abs(state.numbers["gap"]) <= TUNING.close * tol * (course.highest - course.lowest)
    if late and not solved:
        grow_gamma(state, here, record)
        course.steps = 0
    if solved or (late and not close):
        course.stages = [*course.stages[-2:], (pace.c, point, solved, pace.growth)]
        pace.c *= TUNING.ratio
        pace.scale(2.0, 2.0, 2.0)  # steps that were cut for the curvature at a smaller c may recover
        course.steps = 0
        _extrapolate(oracle, state, tol)
    if not course.extrapolated:
        write(point, state.x, state.y)
    if state.reason:
        judge(oracle, state, tol)


@dataclass(frozen=True, kw_only=True)
class AdaptiveMEHA(Method):
    """MEHA without hyper-parameters: a single loop that chooses its step sizes, gamma, c and stopping point.

    Take it to follow the single loop of MEHA on a problem without batches and networks, at 2 gradients of f and 1 of F a step,
    without tuning. :class:`~meha.Default`, the default of :func:`~meha.solve`, is more accurate and more robust;
    :class:`~meha.StochasticMEHA` is the choice for batches and networks. AdaptiveMEHA struggles with ill-conditioned problems:
    a lower level of condition 1000 and more, or coordinates of x in very different units, make it slow, and it may then stop
    too early. A step is

        x     <- proj_X( x - alpha grad_x [ F(x, y) / c + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c + f(x, y) ] - grad_y f(x, theta) - s) )
        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )

    where s is the subgradient of g that the last prox of theta found. Once theta has converged, - grad_y f(x, theta) - s is the
    paper's (theta - y) / gamma; until then it is not affected by the lag of theta. All three move at once.

    - Steps: alpha, beta and eta follow from the curvatures of F and f, estimated from differences of gradients at the start and
      at times later (:mod:`meha.lower.curvature`), and shrink where the gradients turn out to change faster, or explode.
    - Anderson acceleration of the whole step. Gradients of F and of f are kept apart, so that
      the memory remains valid when c, gamma or the steps change.
    - c starts small, where F dominates, and doubles when the residual is small relative to grad F (the smaller, the less
      the last stages differ) or takes too long to get there. The answer is extrapolated to c = infinity from the last stages.
    - gamma starts at 0.45 over the curvature of f, which the theorem allows for any f, and grows when a stage takes too long
      and no negative curvature of the lower level was met.

    The run has converged when the extrapolated limit, or (x, y) itself, stops changing with a small gap, and a multistart
    search of the lower level (:mod:`meha.lower.multistart`) finds nothing below y. If it does, y moves there, and the run
    restarts, up to three times; then, or if F is lower where x goes back towards x0, the status is ``local``. If F is no higher
    when x goes twice as far from x0, the optimum may lie at infinity, which is a status of its own. The method is
    scale-free: the run stays the same when x, y, F or f are measured in other units.

    The numbers of a step are those of :class:`~meha.MEHA`, and ``gamma``, at the last point that was not rejected.

    Args:
        tol: the relative change of the limit between two stages at which it has converged; at least the square root of the
            rounding error is used, 3e-4 in single precision, also for 0.

    >>> import meha
    >>> problem = meha.problems.sine(n=10)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, AdaptiveMEHA())
    >>> print(solution.status, solution.steps < 100, problem.distance(solution.x, solution.y).x < 1e-3)
    converged True True
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)
    repeats: ClassVar[str] = "it compares values"

    tol: float = 1e-4

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)

    def terminate(self, state: AdaptiveState) -> Verdict | None:
        return Verdict(Status(state.status), state.reason) if state.status else None

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
        state, course = run.state, run.state.course
        lines = {"problem": describe(state.sight.curvatures)}
        lines["course"] = f"c = {state.pace.c:.2g}" + (f", gamma = {state.numbers['gamma']:.2g}" if state.numbers else "")
        if course.extrapolated and math.isfinite(course.change) and state.status != Status.AT_INFINITY.value:
            change = f"changed by {course.change:.1e} in the last stage (an estimate, not a bound)"
            lines["accuracy"] = f"the limit for c to infinity {change}"
        if state.evidence:
            lines["lower"] = state.evidence
        return lines

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> AdaptiveState:
        check_start(oracle, x, y)
        sight, pace = first_look(oracle, x, y)
        theta = y.copy()
        zero = torch.zeros_like(flatten(x, y, theta))
        return AdaptiveState(x, y, x.copy(), y.copy(), theta, zero, flatten(x, y), sight, pace, settled=False)

    def step(self, oracle: Oracle, state: AdaptiveState, at: At) -> Numbers:
        if at.batch is not None:
            given = type(at.batch).__name__
            raise ValueError(f"batch: AdaptiveMEHA() takes none, got {given}; use StochasticMEHA() or MEHA().")
        here = StepMap.of(oracle, state)
        record, numbers = evaluate(oracle, state, here)
        if not _accept(oracle, state, here, here.size(record)):
            if state.memory.records and state.failures <= TUNING.attempts:
                return state.numbers
            where = "after ever shorter steps" if state.memory.records else "at the start"
            state.status, state.reason = Status.NON_FINITE.value, f"The gradients explode, or are not finite, {where}."
            return {**state.numbers, "upper": math.nan}
        state.numbers, state.failures, course = numbers, 0, state.course
        course.lowest, course.highest = min(course.lowest, numbers["upper"]), max(course.highest, numbers["upper"])
        watch(state, here, record)  # before the record is stored, because it is compared with the one before
        state.memory.records = [*state.memory.records[-TUNING.memory :], record]
        set_course(oracle, state, here, record, self.tol)
        if state.memory.records:  # otherwise y has just moved to a lower basin
            advance(oracle, state)
        look_again(oracle, state)
        return numbers
