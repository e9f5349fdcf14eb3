"""StochasticMEHA: MEHA for batches and networks, with steps like those of Adam and nothing to tune."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha._checks import check_count, check_positive, check_share, check_switch
from meha._distributed import local
from meha._leaves import Leaves, add_, copy_, mean_size, norm, scaled
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._torch import foreach_addcdiv_, foreach_lerp_
from meha._variables import Variable
from meha.methods._base import Method
from meha.methods._moves import check_step, move
from meha.methods._optimizers import OptimizerFactory, build_optimizer
from meha.methods._stochastic import (
    BATCHES,
    DIRECT,
    FRESH_RATE,
    FRESH_STEP,
    FRESH_STEPS,
    LIMIT,
    SMALLER,
    SUDDEN,
    TENSORS,
    TRIAL,
    WATCHED,
    WHOLE,
    Course,
    StochasticMEHAState,
    age,
    begin,
    columns,
    descend,
    find_directions,
    fresh_age,
    mixes,
    penalty,
    read,
    responding,
    slope,
    update_metric,
    zeros,
)
from meha.problem import Problem

__all__ = ["StochasticMEHA", "StochasticMEHAState"]


@dataclass(frozen=True, kw_only=True)
class StochasticMEHA(Method):
    """MEHA for batches and networks: one loop, noisy gradients, and steps in a metric that the gradients themselves provide.

    Step k = 0, 1, ... takes gradients on one batch, and moves all variables at once:

        theta <- theta - r_k D^-1 < f_y(x, theta) >
        z     <- z - r_k D^-1 < F_y(x, theta) / c + f_y(x, z) > - s_k (z - theta)
        x     <- x - a_k D_x^-1 < F_x(x, theta) + c (f_x(x, z) - f_x(x, theta)) >

    where < > is a running mean of the directions. With t = k / 100,

        r_k = lr / (1 + t),    a_k = x_lr / (1 + t),    s_k = 0.01,    c = 10 q,

    and q is how steep F is in y in comparison with f, measured at the start. theta follows the lower level alone, and z is its
    response to F, to first order: a little better for F than theta. So z - theta says how x should change for the y that
    training gives; F is never seen at a y that fits the data of the upper level directly. Where F depends on x itself,
    s_k = 0.01 / (1 + t) falls with r_k, so that the response keeps its proportion to F_x, and c = 100 q.

    y is z where it consists of tensors. A network y is a third variable, which learns from the data of both levels and has no
    influence on x:

        y <- y - lr / (1 + u) E^-1 < F_y(x, y) / q + f_y(x, y) >

    u grows by 0.04 times the absolute logarithm of the ratio of the sizes of F_y(x, y) and F_y(x, theta) in a step, and by
    0.003 at least: fast where y knows the data of F by heart, or becomes worse for F than theta, which never sees these data.
    ``solution.refit`` gives a y of f alone.

    Without batches, y is z, F is taken at y, rates fall with the root of 1 + k / 1000, and c = q / 100, s_k = 0.001: then F
    chooses among the solutions of the lower level. What makes it work for networks:

    - z and theta share a batch and a metric: D holds the roots of the mean squares of both directions (E those of y). The
      noise of f then moves both alike, and leaves z - theta, which is all that x learns from.
    - Rates fall as 1/k, so that networks do not learn doubtful examples by heart, and a longer run is not worse.
    - With batches, the rate of a matrix with n > 64 inputs is that of a smaller one times 64/n: its inputs act together.
    - D_x is the mean size of the directions of a tensor: a weight of an example that is rarely drawn moves as far in a pass as
      others do. The rate of a matrix in x is divided by the root of its number of columns.

    Lower variables may belong to the batch, such as the heads of its tasks. In the first 10 steps f is therefore compared with
    its value where y began; where going on is worse, y and theta begin at y0 with each batch from then on, and take T steps of
    half the reciprocal of the curvature, which is measured as they go, while c grows from 0 and F leads.

    Multiplying F or f by a number changes nothing. A step costs 2 gradients of f and 1 of F, and one more of each for a network
    with batches (the first step, two more of each); it never waits for the device. Memory: docs/automatic.md counts it.

    Args:
        lr: the length of the first steps of each number of y; by default 0.003, or 0.01 without batches; five times
            that where y has no modules.
        x_lr: the mean length of the first steps of the numbers of x; by default 0.01, or 0.05 without batches.
        inner_steps: T, the steps of theta and y for one of x: by default 1, or 5 where they restart.
        warm_start: True if y goes on from batch to batch, False if it begins at y0 with each; by default the run finds out.
        both_levels: whether a network y learns from the data of both levels. If False, y is z also there, which saves two of
            five gradients and three tensors of the size of y.
        momentum: the share of the running means that a step keeps; 0 for none.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``, or :class:`~meha.Optimizer` with a
            schedule and clipping; they take the steps along the directions of x, and of y, z and theta, instead of these rates.

    A set of intervals is projected on. For other sets, and with a non-smooth g, only steps that scale all coordinates alike are
    correct: D is then the root of the mean over all coordinates, and each step waits for it.

    The numbers of a step, at the point where x begins to move: ``upper`` F(x, theta), or F(x, y) without batches,
    ``lower`` (f+g)(x, z), ``gap`` (f+g)(x, z) - (f+g)(x, theta), ``d_x`` the norm of the direction of x before the mean is
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
    x_lr: float | None = None
    inner_steps: int | None = None
    warm_start: bool | None = None
    both_levels: bool = True
    momentum: float = 0.9
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "x_lr"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
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
        course = self._course(batch, y.has_modules)
        return f"Take smaller steps, such as StochasticMEHA(lr={course.lr / SMALLER:g}, x_lr={course.x_lr / SMALLER:g})."

    def _course(self, batch: Any, modules: bool) -> Course:
        """The numbers for steps with or without batches."""
        course = WHOLE if batch is None else BATCHES
        return replace(course, lr=self.lr or course.lr * (1 if modules else TENSORS), x_lr=self.x_lr or course.x_lr)

    def report(self, run: Run) -> dict[str, str]:
        """The steepness of F relative to f, the numbers of the last step, and whether y restarts with each batch."""
        state, course = run.state, self._course(run.batch, run.state.y.has_modules)
        numbers = {name: float(number) for name, number in state.numbers.value.items()}
        q = numbers["steepness"]
        if not state.k or not math.isfinite(q):
            return {}
        lines = {"problem": f"balanced at c = {q:.2g}, judged by the slopes of F and f in y at the start"}
        if not state.fresh:
            older = course.age(state.k - 1)
            rates = f"steps of {course.x_lr / older:.2g} for the numbers of x, {course.lr / older:.2g} for those of y and theta"
            if responding(state, course.linear) is not state.y:
                own = course.lr / (1 + numbers["age"] / course.patience) ** course.power
                rates = f"{rates.removesuffix('y and theta')}theta, {own:.2g} for those of y, which learns from both levels"
            return {**lines, "course": f"c = {self._weight(state, course) * q:.2g}; {rates}"}
        steps = (FRESH_STEP / numbers[name] for name in ("curvature_y", "curvature_theta"))
        found = "" if self.warm_start is False else "y restarts with each batch, since going on was worse; "
        lower = "gradients times {:.2g} and {:.2g} for y and theta".format(*steps)
        rate = FRESH_RATE / fresh_age(state.k - 1)
        growing = f"c = {penalty(state.k - 1) * q:.2g} and growing; steps of {rate:.2g} for each number of x, {lower}"
        return {**lines, "course": found + growing}

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> StochasticMEHAState:
        fresh, theta = self.warm_start is False, y.copy()
        response = y.copy() if self.both_levels and y.has_modules and not fresh else None
        dtype = torch.promote_types(y.leaves[0].dtype, torch.float32)
        ones, nothing = ("steepness", "excess", "curvature_y", "curvature_theta"), ("age", "seen", "unseen")
        numbers = {name: torch.ones((), dtype=dtype, device=y.device) for name in ones}
        numbers |= {name: torch.zeros((), dtype=dtype, device=y.device) for name in nothing}
        return StochasticMEHAState(
            x,
            y,
            start=y.copy() if fresh else None,
            settled=False,  # the rates fall throughout the run
            theta=theta,
            mean_x=zeros(x),
            square_x=zeros(x),
            response=response,
            mean_y=None if fresh else zeros(y),
            mean_theta=None if fresh else zeros(y),
            mean_response=None if response is None else zeros(y),
            square_y=None if response is None else zeros(y),
            square_theta=None if fresh else zeros(y),
            origin=y.copy() if self.warm_start is None else None,
            numbers=Variable.of(numbers, "numbers"),
            x_optimizer=build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem),
            y_optimizer=build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem),
            theta_optimizer=build_optimizer("y_optimizer", self.y_optimizer, theta, oracle.problem),
            response_optimizer=build_optimizer("y_optimizer", self.y_optimizer, response, oracle.problem) if response else None,
            fresh=fresh,
        )

    def step(self, oracle: Oracle, state: StochasticMEHAState, at: At) -> Numbers:
        x, y, theta, k, batch = state.x, state.y, state.theta, state.k, at.batch
        if self.warm_start is None and 0 < k <= WATCHED + 1 and not state.fresh:
            self._watch(oracle, state, batch)
        if state.fresh:
            for variable in (y, theta):
                copy_(variable.leaves, begin(state).leaves)
        if k == 0:
            self._measure(oracle, state, batch)
        steps, course = self.inner_steps or (FRESH_STEPS if state.fresh else 1), self._course(batch, y.has_modules)
        c = state.numbers.value["steepness"] * (penalty(k) if state.fresh else self._weight(state, course))
        if state.fresh:
            descend(oracle, state, steps, c, batch)
            values, (d_x,) = find_directions(oracle, state, (x,), c, batch)
        else:
            response = responding(state, course.linear)
            for j in range(k * steps + 1, (k + 1) * steps):
                _, lower_directions = find_directions(oracle, state, (response, theta), c, batch, linear=course.linear)
                self._move_lower(oracle, state, lower_directions, c, j, course, batch)
            values, (d_x, *lower_directions) = find_directions(
                oracle, state, (x, response, theta), c, batch, linear=course.linear, together=k == 0 and steps == 1
            )
            self._move_lower(oracle, state, lower_directions, c, (k + 1) * steps, course, batch)
        size = norm(d_x)
        self._move_x(oracle, state, d_x, course)
        upper, lower, best = values
        return {"upper": upper, "lower": lower, "gap": lower - best, "d_x": size, "c": c}

    @staticmethod
    def _weight(state: StochasticMEHAState, course: Course) -> float:
        """c / q where y goes on."""
        return course.weight * (DIRECT if state.direct and course.linear else 1.0)

    def _watch(self, oracle: Oracle, state: StochasticMEHAState, batch: Any) -> None:
        """Compare f where theta went on with its value where it began, on a new batch; decide after some steps."""
        assert state.origin is not None
        excess = state.numbers.value["excess"]
        if state.k <= WATCHED:
            before, after = (oracle.lower(state.x, variable, batch) for variable in (state.origin, state.theta))
            excess.add_((after - before).detach().to(excess) - (1 if state.k == 1 else 0))
        elif float(excess) > 0:
            state.fresh = True
            for leaf in local(state.mean_x.leaves + state.square_x.leaves):
                leaf.zero_()

    def _move_x(self, oracle: Oracle, state: StochasticMEHAState, direction: Leaves, course: Course) -> None:
        x, whole = state.x, mixes(oracle.problem.x_set)
        n = state.k - (WATCHED if state.fresh and self.warm_start is None else -1)
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
                torch.maximum(scale, now / SUDDEN, out=scale)
                mean.lerp_(part, 1 - self.momentum)
                step = (mean / (scale + torch.finfo(scale.dtype).tiny)).clamp_(-LIMIT, LIMIT)
                leaf.sub_(step, alpha=rate / math.sqrt(columns(whole_leaf)) / (1 - self.momentum**n))
        oracle.project(x.value, x.leaves, rate)

    def _move_lower(
        self,
        oracle: Oracle,
        state: StochasticMEHAState,
        directions: list[Leaves],
        c: Tensor,
        n: int,
        course: Course,
        batch: Any,
    ) -> None:
        """The n-th step of theta and its response, and of y where it is a third variable; the directions are used up."""
        third = responding(state, course.linear) is not state.y
        unseen = norm(directions.pop()) if third else None
        self._move_pair(oracle, state, directions, c, n, course)
        directions.clear()  # before other gradients take their place
        if unseen is not None:
            self._move_network(oracle, state, unseen, n, course, batch)

    def _move_pair(
        self, oracle: Oracle, state: StochasticMEHAState, directions: list[Leaves], c: Tensor, n: int, course: Course
    ) -> None:
        """The n-th step of theta and its response, in the metric that they share."""
        theta, response, older = state.theta, responding(state, course.linear), course.age(state.k)
        towards, of_theta = directions
        mean, optimizer = state.mean_y, state.y_optimizer
        if response is not state.y:
            mean, optimizer = state.mean_response, state.response_optimizer
        foreach_lerp_(local(response.leaves), local(theta.leaves), course.pull / (older if state.direct else 1))
        if state.theta_optimizer is not None:
            move(response, scaled(towards, 1 / c), 0.0, oracle.prox, state.x.value, optimizer)
            move(theta, scaled(of_theta, 1 / c), 0.0, oracle.prox, state.x.value, state.theta_optimizer)
            return
        pair = [(theta, state.mean_theta, of_theta), (response, mean, towards)]
        self._advance(oracle, state, state.square_theta, pair, n, older, course, c)

    def _move_network(
        self, oracle: Oracle, state: StochasticMEHAState, unseen: Tensor, n: int, course: Course, batch: Any
    ) -> None:
        """The n-th step of a network y, which learns from both levels; ``unseen`` is the size of F_y at theta."""
        direction, seen = read(oracle, state, batch)
        if state.y_optimizer is not None:
            move(state.y, direction, 0.0, oracle.prox, state.x.value, state.y_optimizer)
            return
        age(state, seen, unseen, n)
        older = (1 + state.numbers.value["age"] / course.patience) ** course.power
        self._advance(oracle, state, state.square_y, [(state.y, state.mean_y, direction)], n, older, course, 1.0)

    def _advance(
        self,
        oracle: Oracle,
        state: StochasticMEHAState,
        square: Variable | None,
        moves: list[tuple[Variable, Variable | None, Leaves]],
        n: int,
        older: float | Tensor,
        course: Course,
        weight: float | Tensor,
    ) -> None:
        """The n-th step of variables that share a metric, along running means of their directions, in which f has a weight."""
        assert square is not None
        problem, rate = oracle.problem, course.lr
        whole = problem.nonsmooth is not None or mixes(problem.y_set)
        metric = update_metric(square.leaves, [direction for _, _, direction in moves], n, whole)
        if whole:
            rate /= float(older)
        else:
            for root, leaf in zip(metric, square.leaves, strict=True):
                root.mul_(older * max(1.0, columns(leaf) / course.width))
        for variable, mean, direction in moves:
            assert mean is not None
            self._follow(variable.leaves, mean.leaves, direction, metric, n, rate)
        if not oracle.prox.identity:
            roots = [root.flatten()[0] for root in metric if root.numel()] or [torch.ones(())]  # a process may hold no number
            step = float(rate * weight / roots[0]) if whole else rate
            for variable, _, _ in moves:
                oracle.prox(state.x.value, variable.leaves, step)

    def _follow(self, leaves: Leaves, mean: Leaves, direction: Leaves, metric: Leaves, n: int, rate: float) -> None:
        """The n-th step along the running mean of directions, in the metric."""
        means = local(mean)
        foreach_lerp_(means, local(direction), 1 - self.momentum)
        foreach_addcdiv_(local(leaves), means, metric, -rate / (1 - self.momentum**n))

    def _measure(self, oracle: Oracle, state: StochasticMEHAState, batch: Any) -> None:
        """q = (|F_y| + L_F sqrt(n)) / (|f_y| + L_f sqrt(n)), with slopes L of the gradients in n numbers along a first step.

        These are the forces that y meets at the start, and when each number has gone by 1. Either may vanish: gradients where y
        starts at a minimum, slopes where an objective is linear. (Not the balance of curvatures of the methods without noise:
        power steps on a batch would see its noise, and wait for the device.)
        """
        x, y, theta, numbers, rate = state.x, state.y, state.theta, state.numbers.value, TRIAL

        def gradients(at: Variable) -> list[Leaves]:
            return [oracle.gradient(at, [(1.0, function, x, at)], batch)[1] for function in (oracle.upper, oracle.lower)]

        _, (_, upper_here) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        state.direct = oracle.upper_uses_x
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
        copy_(theta.leaves, y.leaves)
