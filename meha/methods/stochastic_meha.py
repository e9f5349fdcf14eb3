"""StochasticMEHA: MEHA for mini-batches and networks, with step sizes that are scaled by the gradients themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.method.method import At, Method, Numbers, Run, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods.frames import check_step, move
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet
from meha.tensors.checks import check_count, check_positive, check_share, check_switch
from meha.tensors.distributed import local
from meha.tensors.torch_private import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
)
from meha.tensors.variables import Leaves, Variable, add_, copy_, distance, join_norms, mean_size, norm, scaled


@dataclass(frozen=True)
class Rates:
    """The constants of a run in which y continues from step to step.

    Attributes:
        lr, x_lr: rates of y and of x at the start.
        patience, power: rates are divided by (1 + k / patience)^power.
        weight: c, relative to where both levels weigh the same at the start.
        pull: the share of its distance to theta that y loses in each step.
        width: rates are for layers with up to this number of inputs; wider ones, whose inputs act together, have
            proportionally smaller rates.
    """

    lr: float
    x_lr: float
    patience: int
    power: float
    weight: float
    pull: float
    width: float

    def age(self, k: int) -> float:
        """Return the number by which the rates are divided in step k."""
        return (1 + k / self.patience) ** self.power


RATES = Rates(lr=0.003, x_lr=0.01, patience=100, power=1.0, weight=10.0, pull=0.01, width=64)
"""theta is the result of training. The sum of its rates grows as log k, so that a longer run changes little: networks memorise
wrong labels only when they move far."""

DIRECT = 10.0
"""Where F depends on x itself: factor of c. The response then must keep its distance to theta, since F_x and what it says about
x are added, and a small distance serves as well."""

TENSORS = 5.0
"""Rate of y without modules relative to networks, whose numbers act together."""

LIMIT = 10.0
"""Upper bound on a step of a coordinate of x, in units of the mean step of its tensor."""

SUDDEN = 10.0
"""The mean size of the directions of x is at least the last one divided by this, so that a sudden jump gives no long step."""

WATCHED = 10
"""Steps after the first in which lower variables that continue are compared with those that restart."""

FRESH_RATE, FRESH_PATIENCE = 0.01, 1000
"""With lower variables that restart: the rate of x, and the number of steps after which it shrinks."""

FRESH_WAY = 320
"""With lower variables that restart: c grows with k, and with its root after FRESH_PATIENCE; both levels weigh the same after
about this number of steps, and until then F leads."""

FRESH_MEMORY = 0.9
"""Weight of the earlier curvatures in their running mean."""

TRIAL = 0.01
"""Length of the trial step of each coordinate of y along which curvatures are measured at the start."""

FRESH_STEPS, FRESH_STEP = 5, 0.5
"""Steps of lower variables that restart with each batch, and their size times the curvature: each halves the error."""

SMALLER = 10
"""Divisor of the rates that are advised after a failed run."""


@dataclass
class StochasticMEHAState(State):
    """x, y, theta, running means and mean squares of their directions, and measured numbers.

    Attributes:
        square_theta: the mean squares of the directions of theta and of y.
        origin: the start of y, until it is decided whether y restarts with each batch.
        numbers: ``steepness`` of F relative to f; ``excess``, by how much f was larger where theta continued than at its start;
            ``curvature_y`` and ``curvature_theta`` of the steps of variables that restart.
        fresh: whether the lower variables restart with each batch.
        direct: whether F depends on x itself.
    """

    theta: Variable
    mean_x: Variable
    square_x: Variable
    mean_y: Variable | None
    mean_theta: Variable | None
    square_theta: Variable | None
    origin: Variable | None
    numbers: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None
    theta_optimizer: RunningOptimizer | None = None
    fresh: bool = False
    direct: bool = False

    @property
    def restarts(self) -> bool:
        return self.fresh


def fresh_age(k: int) -> float:
    """Return the number by which the rate of x is divided where lower variables restart."""
    return 1 + k / FRESH_PATIENCE


def penalty(k: int) -> float:
    """Return c_k / q where lower variables restart: the integral of 1 / sqrt(fresh_age), divided by FRESH_WAY."""
    return 2 * FRESH_PATIENCE * (math.sqrt(fresh_age(k + 1)) - 1) / FRESH_WAY


def columns(leaf: Tensor) -> int:
    """Return the number of columns of a matrix, which is its number of inputs; 1 for vectors and numbers."""
    return math.prod(leaf.shape[1:])


def begin(state: StochasticMEHAState) -> Variable:
    """Return the start of the lower variables with each batch."""
    begin = state.start or state.origin
    assert begin is not None
    return begin


def zeros(variable: Variable) -> Variable:
    """Return moments that are zero, in the structure of a variable."""
    return Variable.of([torch.zeros_like(leaf) for leaf in variable.leaves], "moments")


def mixes(domain: ConvexSet | None) -> bool:
    """Return True if the projection on a set is only correct after steps that scale all coordinates alike."""
    return domain is not None and not domain.coordinatewise


def find_directions(
    oracle: Oracle,
    state: StochasticMEHAState,
    wrt: tuple[Variable, ...],
    c: Tensor,
    batch: Any,
    *,
    linear: bool = False,
    together: bool = False,
) -> tuple[list[Tensor], list[Leaves]]:
    """Compute F, f and f at theta, and the directions of the variables ``wrt``.

    They are the gradients of F(x, y) + c (f(x, y) - f(x, theta)), and c f_y(x, theta) for theta. (The metric cancels the factor
    c of y and theta.) If ``linear``, F is taken at theta. Where y and theta are ``together``, at the same point, f drops out of
    the direction of x.
    """
    x, y, theta = state.x, state.y, state.theta
    if len(wrt) > 2 and oracle.phi is not oracle.lower:  # g has a derivative in x, but in y a prox
        values, of_x = find_directions(oracle, state, wrt[:1], c, batch, linear=linear, together=together)
        return values, of_x + find_directions(oracle, state, wrt[1:], c, batch, linear=linear)[1]
    f = oracle.phi if x in wrt else oracle.lower  # in y, g is left to its prox
    at = theta if linear else y
    of_upper = tuple(at if v is y else v for v in wrt if v is not theta)
    (upper,), first = oracle.gradients(of_upper, [(1.0, oracle.upper, x, at)], batch, own=True)  # the sum is averaged below
    (lower, best), second = oracle.gradients(wrt, [(1.0, f, x, y), (-1.0, f, x, theta)], batch, own=True)
    directions = []  # with 0 c: sums over micro-batches leave rounding of f, along which x would take a step of full length
    for variable, gradient in zip(wrt, second, strict=True):
        directions.append(scaled(gradient, -c if variable is theta else 0 * c if together and variable is x else c))
    for direction, gradient in zip(directions, first, strict=False):
        add_(direction, gradient, 1.0)
    values = [upper, lower, best]
    return values, oracle.average(directions, wrt, values)  # one message for all processes


def descend(oracle: Oracle, state: StochasticMEHAState, steps: int, c: Tensor, batch: Any) -> None:
    """Take gradient steps of y and theta from their start, and measure curvatures by how the gradients change along them."""
    numbers, levels = state.numbers.value, (state.y, state.theta)
    curvatures: list[Tensor] = [numbers["curvature_y"], numbers["curvature_theta"]]
    before: list[tuple[Leaves, Leaves]] = []
    for _ in range(steps):
        _, directions = find_directions(oracle, state, levels, c, batch)
        here = [[leaf.clone() for leaf in level.leaves] for level in levels]
        for curvature, direction, point, (old_direction, old_point) in zip(curvatures, directions, here, before, strict=False):
            curvature.lerp_(slope(direction, old_direction, point, old_point).to(curvature), 1 - FRESH_MEMORY)
        before = list(zip(directions, here, strict=True))
        for level, curvature, direction in zip(levels, curvatures, directions, strict=True):
            step = FRESH_STEP / curvature
            add_(level.leaves, direction, -step)
            if not oracle.prox.identity:
                oracle.prox(state.x.value, level.leaves, float(step * c))  # directions hold c times the lower level


def update_metric(square: Leaves, directions: list[Leaves], n: int, whole: bool) -> Leaves:
    """Add directions to the running mean squares, and return their roots, or one mean root for all if ``whole``.

    All n directions so far weigh the same. For leaves that are divided among processes, the parts of this one.
    """
    parts = local(square)
    foreach_mul_(parts, 1 - 1 / n)
    for direction in directions:
        here = local(direction)
        foreach_addcmul_(parts, here, here, 1 / (n * len(directions)))
    roots = list(foreach_sqrt(parts))
    foreach_add_(roots, math.sqrt(torch.finfo(roots[0].dtype).tiny))  # a coordinate without gradients divides 0 by this
    if whole:
        mean = join_norms(list(foreach_norm(roots)), square) / math.sqrt(sum(leaf.numel() for leaf in square))
        return [mean.to(root.dtype).expand_as(root) for root in roots]
    return roots


def slope(gradient: Leaves, old_gradient: Leaves, point: Leaves, old_point: Leaves) -> Tensor:
    """Return the curvature between two points, |gradient difference| / |distance|, neither zero nor infinite."""
    tiny = math.sqrt(torch.finfo(gradient[0].dtype).tiny)
    return (distance(gradient, old_gradient) + tiny) / (distance(point, old_point) + tiny)


@dataclass(frozen=True, kw_only=True)
class StochasticMEHA(Method):
    """MEHA for batches and networks: one loop, noisy gradients, and steps in a metric that the gradients themselves provide.

    The default for batches and for modules where there is a non-smooth term, a set Y or no x, where x and y are dicts or lists
    of one form, and for modules that are in x alone. Other tensors with batches go to
    :class:`~meha.stochastic.AdaptiveSOBA`, other networks to :class:`~meha.stochastic.NetworkSOBA`.

    Step k = 0, 1, ... takes gradients on one batch, and moves all variables at once:

        theta <- theta - r_k D^-1 < f_y(x, theta) >
        y     <- y - r_k D^-1 < F_y(x, theta) / c + f_y(x, y) > - s_k (y - theta)
        x     <- x - a_k D_x^-1 < F_x(x, theta) + c (f_x(x, y) - f_x(x, theta)) >

    where < > is a running mean of the directions. With t = k / 100,

        r_k = lr / (1 + t),    a_k = x_lr / (1 + t),    s_k = 0.01,    c = 10 q,

    and q is how steep F is in y in comparison with f, measured at the start. theta follows the lower level alone, and y is its
    response to F, to first order: a little better for F than theta. So y - theta says how x should change for the y that
    training gives; F is never seen at a y that fits the data of the upper level directly. Where F depends on x itself,
    s_k = 0.01 / (1 + t) falls with r_k, so that the response keeps its proportion to F_x, and c = 100 q.

    Without batches, all data are one batch. What makes it work for networks:

    - y and theta share a batch and a metric: D holds the roots of the mean squares of both directions. The noise of f then
      moves both alike, and leaves y - theta, which is all that x learns from.
    - Rates fall as 1/k, so that networks do not memorise doubtful examples, and a longer run is not worse.
    - The rate of a matrix with n > 64 inputs is that of a smaller one times 64/n: its inputs act together.
    - D_x is the mean size of the directions of a tensor: a weight of an example that is rarely drawn moves as far in a pass as
      others do. The rate of a matrix in x is divided by the root of its number of columns.

    Lower variables may belong to the batch, such as the heads of its tasks. In the first 10 steps f is therefore compared with
    its value at y0; where it is larger, y and theta restart at y0 with each batch from then on, and take T steps of half the
    reciprocal of the curvature, which is measured along them, while c grows from 0 and F dominates.

    Multiplying F or f by a number changes nothing. A step costs 2 gradients of f and 1 of F (the first step, two more of each);
    it never waits for the device. Memory: docs/automatic.md counts it.

    Args:
        lr: the length of the first steps of each coordinate of y; by default 0.003, and 0.015 where y has no modules.
        x_lr: the mean length of the first steps of the coordinates of x.
        inner_steps: T, the steps of theta and y for one of x: by default 1, or 5 where they restart.
        warm_start: True if y continues from batch to batch, False if it restarts at y0 with each; by default the run decides.
        momentum: the share of the running means that a step keeps; 0 for none.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``, or :class:`~meha.Optimizer` with a
            schedule and clipping; they take the steps along the directions of x, and of y and theta, instead of these rates.

    A set of intervals is projected on. For other sets, and with a non-smooth g, only steps that scale all coordinates alike are
    correct: D is then the root of the mean over all coordinates, and each step waits for it.

    The numbers of a step, at the point where x begins to move: ``upper`` F(x, theta),
    ``lower`` (f+g)(x, y), ``gap`` (f+g)(x, y) - (f+g)(x, theta), ``d_x`` the norm of the direction of x before the mean is
    taken, ``c`` the penalty.

    >>> problem = Problem(
    ...     upper=lambda x, y, noise: (x - 1).square().sum() + (y - noise[0]).square().sum(),
    ...     lower=lambda x, y, noise: (y - x - noise[1]).square().sum(),
    ... )
    >>> generator = torch.Generator().manual_seed(0)
    >>> run = StochasticMEHA(lr=0.05, x_lr=0.05).start(problem, torch.zeros(50), torch.zeros(50))
    >>> for _ in range(4000):
    ...     info = run.step(0.1 * torch.randn(2, 50, generator=generator))
    >>> print(f"{run.x.mean():.1f}")  # the solution is 0.5
    0.5
    """

    open_ended: ClassVar[bool] = True

    lr: float | None = None
    x_lr: float = RATES.x_lr
    inner_steps: int | None = None
    warm_start: bool | None = None
    momentum: float = 0.9
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_positive("lr", self.lr)
        check_positive("x_lr", self.x_lr)
        if self.inner_steps is not None:
            check_count("inner_steps", self.inner_steps)
        if self.warm_start is not None:
            check_switch("warm_start", self.warm_start)
        check_share("momentum", self.momentum)
        for name in ("x_optimizer", "y_optimizer"):
            check_step("lr", None, name, getattr(self, name))
        if self.warm_start is False and self.y_optimizer is not None:
            raise ValueError("y_optimizer: with warm_start=False, y takes plain steps whose size is measured; leave it out.")

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        course = self._course(y.has_modules)
        return f"Take smaller steps, such as StochasticMEHA(lr={course.lr / SMALLER:g}, x_lr={course.x_lr / SMALLER:g})."

    def _course(self, modules: bool) -> Rates:
        """Return the constants of the run."""
        return replace(RATES, lr=self.lr or RATES.lr * (1 if modules else TENSORS), x_lr=self.x_lr)

    def report(self, run: Run) -> dict[str, str]:
        """Report the steepness of F relative to f, the rates of the last step, and whether y restarts with each batch."""
        state, course = run.state, self._course(run.state.y.has_modules)
        numbers = {name: float(number) for name, number in state.numbers.value.items()}
        q = numbers["steepness"]
        if not state.k or not math.isfinite(q):
            return {}
        lines = {"problem": f"balanced at c = {q:.2g}, judged by the slopes of F and f in y at the start"}
        if not state.fresh:
            older = course.age(state.k - 1)
            rates = f"steps of {course.x_lr / older:.2g} for the numbers of x, {course.lr / older:.2g} for those of y and theta"
            return {**lines, "course": f"c = {self._weight(state, course) * q:.2g}; {rates}"}
        steps = (FRESH_STEP / numbers[name] for name in ("curvature_y", "curvature_theta"))
        decision = "" if self.warm_start is False else "y restarts with each batch, since going on was worse; "
        lower = "gradients times {:.2g} and {:.2g} for y and theta".format(*steps)
        rate = FRESH_RATE / fresh_age(state.k - 1)
        growing = f"c = {penalty(state.k - 1) * q:.2g} and growing; steps of {rate:.2g} for each number of x, {lower}"
        return {**lines, "course": decision + growing}

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> StochasticMEHAState:
        fresh, theta = self.warm_start is False, y.copy()
        dtype = torch.promote_types(y.leaves[0].dtype, torch.float32)  # half precision would round small additions away
        names = ("steepness", "excess", "curvature_y", "curvature_theta")
        y_optimizer = build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem)
        numbers = {name: torch.ones((), dtype=dtype, device=y.device) for name in names}
        return StochasticMEHAState(
            x,
            y,
            start=y.copy() if fresh else None,
            settled=False,  # the rates fall throughout the run
            theta=theta,
            mean_x=zeros(x),
            square_x=zeros(x),
            mean_y=None if fresh else zeros(y),
            mean_theta=None if fresh else zeros(y),
            square_theta=None if fresh else zeros(y),
            origin=y.copy() if self.warm_start is None else None,
            numbers=Variable.of(numbers, "numbers"),
            x_optimizer=build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem),
            y_optimizer=y_optimizer,
            theta_optimizer=build_optimizer("y_optimizer", self.y_optimizer, theta, oracle.problem, y_optimizer),
            fresh=fresh,
        )

    def step(self, oracle: Oracle, state: StochasticMEHAState, at: At) -> Numbers:
        x, y, theta, k, batch = state.x, state.y, state.theta, state.k, at.batch
        if self.warm_start is None and 0 < k <= WATCHED + 1 and not state.fresh:  # in step 0, theta is still at its start
            self._watch(oracle, state, batch)
        if state.fresh:
            for variable in (y, theta):
                copy_(variable.leaves, begin(state).leaves)
        if k == 0:
            self._measure(oracle, state, batch)
        steps, course = self.inner_steps or (FRESH_STEPS if state.fresh else 1), self._course(y.has_modules)
        c = state.numbers.value["steepness"] * (penalty(k) if state.fresh else self._weight(state, course))
        if state.fresh:
            descend(oracle, state, steps, c, batch)
            values, (d_x,) = find_directions(oracle, state, (x,), c, batch)
        else:
            for j in range(k * steps + 1, (k + 1) * steps):  # the last of the inner steps shares its gradients with x
                _, lower_directions = find_directions(oracle, state, (y, theta), c, batch, linear=True)
                self._move_lower(oracle, state, lower_directions, c, j, course)
            values, (d_x, *lower_directions) = find_directions(
                oracle, state, (x, y, theta), c, batch, linear=True, together=k == 0 and steps == 1
            )
            self._move_lower(oracle, state, lower_directions, c, (k + 1) * steps, course)
        size = norm(d_x)
        self._move_x(oracle, state, d_x, course)
        upper, lower, best = values
        return {"upper": upper, "lower": lower, "gap": lower - best, "d_x": size, "c": c}

    @staticmethod
    def _weight(state: StochasticMEHAState, course: Rates) -> float:
        """Return c / q where y continues from step to step."""
        return course.weight * (DIRECT if state.direct else 1.0)

    def _watch(self, oracle: Oracle, state: StochasticMEHAState, batch: Any) -> None:
        """Compare f at theta with f at its start on a new batch, and decide after some steps whether theta restarts."""
        assert state.origin is not None
        excess = state.numbers.value["excess"]
        if state.k <= WATCHED:
            before, after = (oracle.lower(state.x, variable, batch) for variable in (state.origin, state.theta))
            excess.add_((after - before).detach().to(excess) - (1 if state.k == 1 else 0))  # the sum was initialised with 1
        elif float(excess) > 0:  # read once, because the host waits for the device here
            state.fresh = True
            for leaf in local(state.mean_x.leaves + state.square_x.leaves):  # x gets another metric, one for each coordinate
                leaf.zero_()

    def _move_x(self, oracle: Oracle, state: StochasticMEHAState, direction: Leaves, course: Rates) -> None:
        x, whole = state.x, mixes(oracle.problem.x_set)
        n = state.k - (WATCHED if state.fresh and self.warm_start is None else -1)  # steps since the moments were zero
        if state.x_optimizer is not None:
            move(x, direction, 0.0, oracle.project, x.value, state.x_optimizer)
            return
        rate = FRESH_RATE / fresh_age(state.k) if state.fresh else course.x_lr / course.age(state.k)
        if state.fresh or whole:
            metric = update_metric(state.square_x.leaves, [direction], n, whole)
            self._follow(x.leaves, state.mean_x.leaves, direction, metric, n, rate)
        else:
            pieces = zip(x.leaves, *map(local, (x.leaves, state.mean_x.leaves, state.square_x.leaves)), direction, strict=True)
            for whole_leaf, leaf, mean, scale, towards in pieces:
                now, (part,) = mean_size(towards), local([towards])
                scale.lerp_(now.expand_as(scale), 1 / n)
                torch.maximum(scale, now / SUDDEN, out=scale)  # the mean alone would follow a sudden jump too late
                mean.lerp_(part, 1 - self.momentum)
                step = (mean / (scale + torch.finfo(scale.dtype).tiny)).clamp_(-LIMIT, LIMIT)
                # Columns: images need small steps. The last factor is the bias correction of Adam (Kingma and Ba 2015).
                leaf.sub_(step, alpha=rate / math.sqrt(columns(whole_leaf)) / (1 - self.momentum**n))
        oracle.project(x.value, x.leaves, rate)

    def _move_lower(
        self, oracle: Oracle, state: StochasticMEHAState, directions: list[Leaves], c: Tensor, n: int, course: Rates
    ) -> None:
        """Take the n-th step of y and theta, in the metric that they share; it empties ``directions`` to free their memory."""
        x, y, theta, square, older = state.x.value, state.y, state.theta, state.square_theta, course.age(state.k)
        # Without this pull y fits the data of F directly, and x serves a y that training does not give.
        foreach_lerp_(local(y.leaves), local(theta.leaves), course.pull / (older if state.direct else 1))
        if state.theta_optimizer is not None:
            towards, of_theta = directions
            directions.clear()
            move(y, scaled(towards, 1 / c), 0.0, oracle.prox, x, state.y_optimizer)  # its lr is meant for F / c + f
            move(theta, scaled(of_theta, 1 / c), 0.0, oracle.prox, x, state.theta_optimizer)
            return
        assert square is not None
        whole = oracle.problem.nonsmooth is not None or mixes(oracle.problem.y_set)
        metric, rate = update_metric(square.leaves, directions[::-1], n, whole), course.lr
        if whole:  # the metric is an expanded scalar, which must not be changed in place
            rate /= older
        else:
            for root, leaf in zip(metric, square.leaves, strict=True):
                root.mul_(older * max(1.0, columns(leaf) / course.width))
        for variable, mean, direction in zip((y, theta), (state.mean_y, state.mean_theta), directions, strict=True):
            assert mean is not None
            self._follow(variable.leaves, mean.leaves, direction, metric, n, rate)
        directions.clear()
        if not oracle.prox.identity:
            roots = [root.flatten()[0] for root in metric if root.numel()] or [torch.ones(())]  # a process may hold no number
            step = float(rate * c / roots[0]) if whole else rate  # a projection on intervals does not depend on it
            for variable in (y, theta):
                oracle.prox(x, variable.leaves, step)

    def _follow(self, leaves: Leaves, mean: Leaves, direction: Leaves, metric: Leaves, n: int, rate: float) -> None:
        """Take the n-th step along the running mean of directions, with the bias correction of Adam, in the metric."""
        means = local(mean)
        foreach_lerp_(means, local(direction), 1 - self.momentum)
        foreach_addcdiv_(local(leaves), means, metric, -rate / (1 - self.momentum**n))

    def _measure(self, oracle: Oracle, state: StochasticMEHAState, batch: Any) -> None:
        """Measure q = (|F_y| + L_F sqrt(n)) / (|f_y| + L_f sqrt(n)), with curvatures L along a trial step of n coordinates.

        The sums estimate the largest gradients until each coordinate has moved by 1. Either term may vanish: gradients
        where y starts at a minimum, curvatures where an objective is linear. (Not the balance of curvatures of the methods
        without noise: power iterations on a batch would see its noise, and wait for the device.)
        """
        x, y, theta, numbers, rate = state.x, state.y, state.theta, state.numbers.value, TRIAL

        def gradients(at: Variable) -> list[Leaves]:
            return [oracle.gradient(at, [(1.0, function, x, at)], batch)[1] for function in (oracle.upper, oracle.lower)]

        copy_(theta.leaves, y.leaves)  # a step that a scaler has skipped may have left it elsewhere
        _, (_, upper_here) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        state.direct = oracle.upper_uses_x  # the first gradient in x has shown it
        here, root = [upper_here, oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)[1]], math.sqrt(y.numel)
        sizes = [norm(gradient) for gradient in here]
        for gradient, size in zip(here, sizes, strict=True):
            scale = rate * root / size.clamp_min(torch.finfo(size.dtype).tiny)
            add_(theta.leaves, gradient, -scale)
        oracle.prox(x.value, theta.leaves, rate)
        slopes = [slope(new, old, theta.leaves, y.leaves) for new, old in zip(gradients(theta), here, strict=True)]
        upper, lower = (size + slope * root for size, slope in zip(sizes, slopes, strict=True))
        numbers["steepness"].copy_(upper / lower)
        c = penalty(0) * numbers["steepness"]
        numbers["curvature_y"].copy_(slopes[0] + c * slopes[1])
        numbers["curvature_theta"].copy_(c * slopes[1])
        copy_(theta.leaves, y.leaves)  # theta served as scratch
