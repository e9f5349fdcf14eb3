"""MEHA without parameters: its single loop, with steps, gamma and c that are chosen and adapted as it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meha._checks import check_tolerance
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods._anderson import combine
from meha.methods._base import Method, State
from meha.methods._curvatures import Curvatures, describe, flatten, lower_gradients, probe, upper_gradients, write
from meha.problem import Problem

__all__ = ["AdaptiveMEHA", "AdaptiveState"]

SAFETY = 0.6
"""Steps times curvatures."""

MEMORY = 40
"""Points, besides the last one, from which the next is extrapolated."""

RATIO = 2.0
"""By how much c grows from stage to stage."""

EARLY, LATE = 15, 60
"""After so many steps a stage has taken too long, while c still changes the solution much, and later."""

Record = tuple[Tensor, Tensor, Tensor, Tensor]
"""z = (x, y, theta), the subgradients that the prox maps found there, and the parts of the direction that c divides and not."""

Stage = tuple[float, Tensor, bool, float]
"""c, the point (x, y) at the end, whether the residual was small there, and gamma relative to its first value."""


@dataclass
class AdaptiveState(State):
    """The answer (x, y); the point (at_x, at_y, theta) where the next gradients are taken; and what is known so far.

    Attributes:
        subgradients: those of g and of the indicators of X and Y that the last prox maps found, zero without them.
        origin: the start (x, y).
        curvatures, vectors: norms of second derivatives, and where the next power steps for them start.
        c: the penalty.
        growth: gamma relative to its first value.
        shrink: the steps of x, y and theta relative to what the curvatures say.
        concave: the largest negative curvature of f in y that was seen between y and theta.
        memory: the last points with their gradients, none of which depend on c, gamma or steps.
        accelerated, reach: whether the point is an extrapolated one, and how far the next such may go.
        stages: the ends of the last three.
        steps: those of the present stage.
        probed: the step in which the curvatures were looked at.
        failures: rejected points since the last one that was not.
        extrapolated, change: whether the answer is a limit for c to infinity, and by how much that changed with the last stage.
        scale: the largest size of grad F, in the metric of the steps.
        lowest, highest: of F.
        numbers: those of the last point that was not rejected.
        reason: why the run has converged.
    """

    at_x: Variable
    at_y: Variable
    theta: Variable
    subgradients: Tensor
    origin: Tensor
    curvatures: Curvatures
    vectors: dict[str, Tensor]
    c: float
    growth: float = 1.0
    shrink: tuple[float, float, float] = (1.0, 1.0, 1.0)
    concave: float = 0.0
    memory: list[Record] = field(default_factory=list)
    accelerated: bool = False
    reach: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    steps: int = 0
    probed: int = 0
    failures: int = 0
    extrapolated: bool = False
    change: float = math.inf
    scale: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    numbers: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class AdaptiveMEHA(Method):
    """What ``MEHA()`` is for problems without batches: nothing to choose, and one loop all the same. A step is

        x     <- proj_X( x - alpha grad_x [ F(x, y) / c + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c + f(x, y) ] - grad_y f(x, theta) - s) )
        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )

    where s is the subgradient of g that theta's last prox found. Once theta rests, - grad_y f(x, theta) - s is the paper's
    (theta - y) / gamma; until then it does not feel that theta lags behind. All three move at once, which costs 2 gradients of
    f and 1 of F.

    - Steps: alpha, beta and eta follow from the curvatures of F and f, seen by differences of gradients at the start and now
      and then (:mod:`meha.methods._curvatures`), and shrink where the gradients turn out to change faster, or explode.
    - Anderson acceleration (:mod:`meha.methods._anderson`) of the whole step. Gradients of F and of f are kept apart, so that
      the memory remains valid when c, gamma or the steps change.
    - c starts small, where F shows the way, and doubles when the residual is small against grad F (the smaller, the less the
      last stages differ) or does not get there in time. The answer is the limit for c to infinity, told by the last two stages.
    - gamma starts at 0.45 over the curvature of f, inside the theorem for any f, and grows when a stage takes too long and the
      lower level looks convex.

    The run has converged when the extrapolated limit, or (x, y) itself, rests. All of it is scale-free: the run stays the same
    when x, y, F or f are measured in other units. A lower level of condition 1000 and more, or coordinates of x in very
    different units, make it slow, and then rest need not mean that it has arrived.

    The numbers of a step are those of :class:`~meha.MEHA`, and ``gamma``, at the last point that was not rejected.

    Args:
        tol: the relative change of the limit from one stage to the next that counts as rest; at least the square root of the
            accuracy of the numbers, 3e-4 in single precision.

    >>> import meha
    >>> problem = meha.problems.sine(n=10)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, meha.AdaptiveMEHA())
    >>> print(solution.status, solution.steps < 100, problem.distance(solution.x, solution.y).x < 1e-3)
    converged True True
    """

    tol: float = 1e-4

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)

    def terminate(self, state: AdaptiveState) -> Verdict | None:
        return Verdict(Status.CONVERGED, state.reason) if state.reason else None

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Start elsewhere, or bound x and y by sets in which the objectives are defined."

    def report(self, run: Run) -> dict[str, str]:
        """What was found about the problem, where c and gamma went, and how well x is known."""
        state = run.state
        lines = {"problem": describe(state.curvatures)}
        lines["course"] = f"c = {state.c:.2g}" + (f", gamma = {state.numbers['gamma']:.2g}" if state.numbers else "")
        if math.isfinite(state.change):
            limit = "the limit for c to infinity" if state.extrapolated else "x and y"
            lines["accuracy"] = f"{limit} changed by {state.change:.1e} with the last stage (an estimate, no bound)"
        return lines

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> AdaptiveState:
        _check(oracle, x, y)
        vectors: dict[str, Tensor] = {}
        curvatures = probe(oracle, x, y, vectors, rounds=4)
        theta = y.copy()
        c = _first_penalty(oracle, x, theta, curvatures)
        zero = torch.zeros_like(flatten(x, y, theta))
        return AdaptiveState(x, y, x.copy(), y.copy(), theta, zero, flatten(x, y), curvatures, vectors, c, settled=False)

    def step(self, oracle: Oracle, state: AdaptiveState, at: At) -> Numbers:
        if at.batch is not None:
            raise ValueError(
                "batch: MEHA() takes one only where the objectives cannot do without; make batch a required argument of upper"
                " or lower, or give MEHA a number, such as MEHA(p=0.49)."
            )
        here = _map(oracle, state)
        record, numbers = _evaluate(oracle, state, here)
        size = here.size(record)
        if not self._accept(oracle, state, here, size):
            lost = not state.memory or state.failures > 30
            return {**state.numbers, "upper": math.nan} if lost else state.numbers
        state.numbers, state.failures = numbers, 0
        state.lowest, state.highest = min(state.lowest, numbers["upper"]), max(state.highest, numbers["upper"])
        _watch(state, here, record)
        state.memory = [*state.memory[-MEMORY:], record]
        self._set_course(oracle, state, here, record, size)
        _advance(oracle, state)
        _look_again(oracle, state)
        return numbers

    def _accept(self, oracle: Oracle, state: AdaptiveState, here: _Map, size: float) -> bool:
        """Whether to go on from the point; if not, take a plain step from the last one, and a shorter one if this was plain."""
        if not state.memory:
            return math.isfinite(size)
        if size <= (2 if state.accelerated else 10) * here.size(state.memory[-1]):
            return True
        if state.accelerated:
            state.memory = state.memory[-1:]
        else:
            state.shrink = _times(state.shrink, 0.4, 0.4, 0.4)
            state.failures += 1
        state.accelerated, state.reach = False, 0.0
        here = _map(oracle, state)
        _move(oracle, state, here, here.image(state.memory[-1]))
        return False

    def _set_course(self, oracle: Oracle, state: AdaptiveState, here: _Map, record: Record, size: float) -> None:
        """End the stage if it is solved as well as it pays, or takes too long; then c grows."""
        point = record[0][: len(state.origin)]
        accuracy = torch.finfo(point.dtype).eps
        drift = 1.0 if len(state.stages) < 2 else _change(state, state.stages[-1][1], state.stages[-2][1])
        upper = float((here.roots * record[2]).norm())
        state.scale = max(state.scale, upper)
        state.steps += 1
        tol = max(self.tol, math.sqrt(accuracy))
        wanted = min(max(0.05 * drift, 0.3 * tol), 0.1) * max(upper, 1e-3 * state.scale) / state.c
        solved = size <= max(wanted, 4 * accuracy * float((record[0] / here.roots).norm()))
        late = state.steps >= (EARLY if drift > 0.3 else max(LATE, state.k / 4))
        # What F still loses on its way to c = infinity is about twice c times the gap.
        close = 2 * state.c * abs(state.numbers["gap"]) <= 10 * tol * (state.highest - state.lowest)
        if late and not solved:
            _grow_gamma(state, here, record)
            state.steps = 0
        if solved or (late and not close):
            state.stages = [*state.stages[-2:], (state.c, point, solved, state.growth)]
            state.c *= RATIO
            state.shrink = _times(state.shrink, 2.0, 2.0, 2.0)
            state.steps = 0
            self._extrapolate(oracle, state, tol)
        if not state.extrapolated:
            write(point, state.x, state.y)

    def _extrapolate(self, oracle: Oracle, state: AdaptiveState, tol: float) -> None:
        """The limit for c to infinity, where the last stages tell it, and whether it rests."""
        before, state.extrapolated = flatten(state.x, state.y) if state.extrapolated else None, False
        if len(state.stages) < 3 or not all(solved for _, _, solved, _ in state.stages):
            return
        (_, z0, _, g0), (c1, z1, _, g1), (c2, z2, _, g2) = state.stages
        first, second = _change(state, z1, z0), _change(state, z2, z1)
        if max(first, second) <= tol:
            state.reason = f"(x, y) changed by {max(first, second):.1e} <= tol = {tol:.1e} (relative) while c grew to {c2:.3g}"
        if g0 == g1 == g2 and second <= 0.8 * first:
            limit = z2 + (z2 - z1) / (c2 / c1 - 1)
            write(limit, state.x, state.y)
            oracle.project(state.x.value, state.x.leaves, 1.0)
            oracle.prox(state.x.value, state.y.leaves, 1e-9 / state.curvatures["f_yy"])  # no more than a projection
            state.extrapolated = True
            last, state.change = state.change, math.inf if before is None else _change(state, flatten(state.x, state.y), before)
            if state.change <= tol and last <= 10 * tol and _change(state, limit, z2) <= 10 * tol:
                state.reason = (
                    f"the limit for c to infinity changed by {state.change:.1e} <= tol = {tol:.1e} (relative), c = {c2:.3g}"
                )


class _Map(NamedTuple):
    """The step at given c, gamma and steps, z <- prox(z - roots^2 * direction(z)), in terms of records."""

    c: float
    gamma: float
    beta: float
    eta: float
    roots: Tensor  # of the steps, one for each number of z
    parts: tuple[int, int, int]  # how many numbers x, y and theta have

    def direction(self, record: Record) -> Tensor:
        z, _, upper, lower = record
        _, y, theta = z.split(self.parts)
        found = upper / self.c + lower
        found[-len(theta) :] += (theta - y) / self.gamma
        return found

    def residual(self, record: Record) -> Tensor:
        """The direction with the subgradients, zero at a fixed point, in the metric of the steps."""
        return self.roots * (self.direction(record) + record[1])

    def size(self, record: Record) -> float:
        return float(self.residual(record).norm())

    def image(self, record: Record) -> Tensor:
        """Where the step leads before the prox maps."""
        return record[0] - self.roots.square() * self.direction(record)

    def before_prox(self, record: Record) -> Tensor:
        """What the prox maps took to z; equal to the image at a fixed point."""
        return record[0] + self.roots.square() * record[1]


def _map(oracle: Oracle, state: AdaptiveState) -> _Map:
    """The steps that the curvatures admit."""
    found, c, rho = state.curvatures, state.c, oracle.problem.g.rho
    L = found["f_yy"] + rho
    gamma = 0.45 * state.growth / L
    h_y = found["F_yy"] / c + L
    h_x = found["F_xx"] / c + found["f_xy"] ** 2 / (L + 1 / gamma) or (found["F_xy"] / c) ** 2 / h_y or 1.0
    coupling = 1 + found["F_xy"] / c / math.sqrt(h_x * h_y)
    curvatures = (coupling * h_x, coupling * h_y, L + 1 / gamma)
    alpha, beta, eta = (SAFETY * shrink / h for shrink, h in zip(state.shrink, curvatures, strict=True))
    parts = (state.x.numel, state.y.numel, state.y.numel)
    steps = [state.origin.new_full((n,), math.sqrt(step)) for n, step in zip(parts, (alpha, beta, eta), strict=True)]
    return _Map(c, gamma, beta, eta, torch.cat(steps), parts)


def _evaluate(oracle: Oracle, state: AdaptiveState, here: _Map) -> tuple[Record, dict[str, float]]:
    """The gradients at the point, and the numbers of the step."""
    x, y, theta, w = state.at_x, state.at_y, state.theta, state.subgradients
    F, F_x, F_y = upper_gradients(oracle, x, y)
    phi, phi_x, f_y = lower_gradients(oracle, x, y)
    phi_theta, phi_x_theta, f_y_theta = lower_gradients(oracle, x, theta)
    s = w.split(here.parts)[2]
    upper = torch.cat([F_x, F_y, torch.zeros_like(F_y)])
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


def _watch(state: AdaptiveState, here: _Map, record: Record) -> None:
    """Shrink the steps where the residual changed faster than they admit, and note negative curvature.

    Acceleration goes to a maximum as readily as to a minimum, so that it begins anew where the residual of (x, y) turned
    against their move.
    """
    if state.memory:
        last, n = state.memory[-1], len(state.origin)
        move = (here.before_prox(record) - here.before_prox(last)) / here.roots
        change = here.residual(record) - here.residual(last)
        moved, changed = float(move.norm()), [float(part.norm()) for part in change.split(here.parts)]
        state.shrink = _times(state.shrink, *(max(moved / part, 0.2) if part > 1.3 * moved else 1.0 for part in changed))
        if float(move[:n] @ change[:n]) < -0.1 * float(move[:n].norm() * change[:n].norm()):
            state.memory, state.reach = [], 0.0
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    apart, slope = y - theta, lower.split(here.parts)[1] + w.split(here.parts)[2]
    distance = float(apart.square().sum())
    curvature = float(apart @ slope) / distance if distance else 0.0
    if curvature < -1e-3 * state.curvatures["f_yy"]:
        state.concave = max(state.concave, -curvature)


def _times(shrink: tuple[float, float, float], x: float, y: float, theta: float) -> tuple[float, float, float]:
    return min(1.0, x * shrink[0]), min(1.0, y * shrink[1]), min(1.0, theta * shrink[2])


def _grow_gamma(state: AdaptiveState, here: _Map, record: Record) -> None:
    """Let gamma grow if theta has arrived, still has most of the slope that y has, and no negative curvature forbids it.

    In a direction in which f has the curvature mu, that share q is 1 / (1 + gamma mu), and gamma q / (1 - q) is 1 / mu.
    """
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    (_, w_y, w_theta), (_, difference, f_theta) = w.split(here.parts), lower.split(here.parts)
    at_theta = f_theta + w_theta
    share = float(at_theta.norm()) / (float((difference + at_theta + w_y).norm()) or 1.0)
    lag = float((at_theta - (y - theta) / here.gamma).norm())
    if share > 0.7 and lag < 0.2 * float(at_theta.norm()):
        most = max(state.curvatures["f_yy"] / state.concave, 1.0) if state.concave else 1e3
        growth = min(state.growth * min(share / max(1 - share, 1e-9), 16.0), most)
        if growth > 1.5 * state.growth:
            state.growth = growth


def _look_again(oracle: Oracle, state: AdaptiveState) -> None:
    """Look at the curvatures anew, first often, then every 50 steps, and follow them where they have changed."""
    if state.k + 1 - state.probed < min(max(1, state.probed), 50):
        return
    state.probed, state.vectors = state.k + 1, dict(state.vectors)
    found = probe(oracle, state.at_x, state.at_y, state.vectors, rounds=1)
    old = state.curvatures
    changed = {
        name: max(value, 0.4 * old[name]) for name, value in found.items() if not 0.4 * old[name] <= value <= 1.1 * old[name]
    }
    state.curvatures = {**old, **changed}
    if not state.stages:
        state.c = min(state.c, _balance(state.curvatures))


def _advance(oracle: Oracle, state: AdaptiveState) -> None:
    """Choose the next point: an accelerated step, unless it is inconsistent, or a plain one."""
    here = _map(oracle, state)
    last = state.memory[-1]
    target, state.accelerated = here.image(last), False
    if len(state.memory) > 1:
        residuals = torch.stack([here.residual(record) for record in state.memory])
        start, size = here.before_prox(last), float(residuals[-1].norm())
        step = combine(torch.stack([here.image(record) for record in state.memory]), residuals) - start
        length = float((step / here.roots).norm())
        if 0.3 * size <= length < math.inf:
            share = min(1.0, max(4 * size, state.reach or 10 * size) / length) if length else 1.0
            target, state.accelerated, state.reach = start + share * step, True, 2 * share * length
        else:  # the residual cannot change as fast as the memory says
            state.memory, state.reach = [last], 0.0
    _move(oracle, state, here, target)


def _move(oracle: Oracle, state: AdaptiveState, here: _Map, target: Tensor) -> None:
    """Go to the prox of the target, and note the subgradients that it finds."""
    x, y, theta = state.at_x, state.at_y, state.theta
    write(target, x, y, theta)
    oracle.project(x.value, x.leaves, 1.0)
    oracle.prox(x.value, y.leaves, here.beta)
    oracle.prox(x.value, theta.leaves, here.eta)
    state.subgradients = (target - flatten(x, y, theta)) / here.roots.square()


def _change(state: AdaptiveState, new: Tensor, old: Tensor) -> float:
    """The relative change from old to new, the larger of those of x and y; the way from the start counts as size, a little."""
    parts = (state.x.numel, state.y.numel)
    found = []
    for a, b, start in zip(new.split(parts), old.split(parts), state.origin.split(parts), strict=True):
        size = float(a.norm()) + 0.01 * float((a - start).norm())
        found.append(float((a - b).norm()) / size if size else float((a - b).norm() > 0))
    return max(found)


def _check(oracle: Oracle, x: Variable, y: Variable) -> None:
    """Raise if the start has no value, or an objective ignores its variables."""
    for function in (oracle.upper, oracle.lower):
        value = float(function(x, y))
        if not math.isfinite(value):
            raise ValueError(f"{function.level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    upper_gradients(oracle, x, y, strict=True)
    oracle.gradient(y, [(1.0, oracle.lower, x, y)])
    oracle.gradient(x, [(1.0, oracle.phi, x, y)])


def _balance(found: Curvatures) -> float:
    """Half of the c at which F and the lower level have equal curvatures; infinite where F has none."""
    F_xx, F_yy, L, L_xy = found["F_xx"], found["F_yy"], found["f_yy"], found["f_xy"]
    return 0.5 * min(F_yy / L or math.inf, F_xx * L / L_xy**2 or math.inf if L_xy else math.inf)


def _first_penalty(oracle: Oracle, x: Variable, y: Variable, found: Curvatures) -> float:
    """c at the start: from curvatures, or, where F is linear, a tenth of that at which slopes are equal.

    A linear f gets the curvature that would bring its slope to zero within the size of y.
    """
    _, _, F_y = upper_gradients(oracle, x, y)
    _, _, f_y = lower_gradients(oracle, x, y)
    start = flatten(y)
    found["f_yy"] = L = found["f_yy"] or float(f_y.norm()) / (float(start.norm()) or 1.0) or 1.0
    c = _balance(found)
    if c < math.inf:
        return c
    write(start - f_y / L, y)
    oracle.prox(x.value, y.leaves, 1 / (L + 2 * oracle.problem.g.rho))
    slope, mapping = float(F_y.norm()), float((start - flatten(y)).norm()) * L
    write(start, y)
    return 0.1 * slope / mapping if slope and mapping else 1.0
