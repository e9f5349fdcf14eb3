"""StochasticMEHA: MEHA for batches and networks, with steps like those of Adam and nothing to tune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha._checks import check_count, check_positive
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._torch import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)
from meha._variables import Leaves, Variable, copy_, distance, norm
from meha.methods._base import Method, State
from meha.problem import Problem
from meha.sets import ConvexSet

__all__ = ["StochasticMEHA", "StochasticMEHAState"]

MOMENTUM = 0.9
"""Share of the running means of directions and curvatures that a step keeps, as in Adam."""

PATIENCE = 1000
"""Number of steps after which the step sizes begin to shrink: until then they must cover the distance."""

WAY = 16.0
"""Both levels weigh the same when the rates of y add up to this: F leads for 350 steps on tensors, longer on networks."""

TENSOR_RATE = 5.0
"""Rate of tensors relative to networks: logits of example weights, of the order of 1, have further to go than their weights."""

FRESH_STEPS, FRESH_STEP = 5, 0.5
"""Steps of lower variables that restart with each batch, and their size times the curvature: each halves the error."""

SMALLER = 10
"""Divisor of the rate that is advised after a failed run."""


@dataclass
class StochasticMEHAState(State):
    """x, y, theta; the moments of their directions, where y and theta share the second; and numbers of the problem."""

    theta: Variable
    mean_x: Variable
    square_x: Variable
    mean_y: Variable | None
    mean_theta: Variable | None
    square_y: Variable | None
    numbers: Variable


@dataclass(frozen=True, kw_only=True)
class StochasticMEHA(Method):
    """MEHA for batches and networks: one loop, noisy gradients, and steps in a metric that the gradients themselves provide.

    Step k = 0, 1, ... takes the gradients of F(x, y), f(x, y) and f(x, theta) on one batch, and moves all variables at once:

        theta <- theta - r_k D^-1 < c_k f_y(x, theta) > - s_k (theta - y)
        y     <- y - r_k D^-1 < F_y(x, y) + c_k f_y(x, y) >
        x     <- x - a_k D_x^-1 < F_x(x, y) + c_k (f_x(x, y) - f_x(x, theta)) >

    where < > is a running mean of the directions (of memory 10), and the diagonal matrices D and D_x hold the roots of the mean
    squares of the directions so far. With t = k / 1000,

        r_k = lr / sqrt(1 + t),    s_k = r_k / (1 + t),    a_k = lr / (1 + t),    c_k = q (r_0 + ... + r_k) / 16,

    and q is how steep F is in y in comparison with f, measured at the start. What makes it work for two levels, where an Adam
    for each variable does not:

    - y and theta share a metric, the mean of their squares, and a batch. The noise of f then moves both alike, and leaves
      y - theta, which is all that x learns from.
    - theta is pulled towards y. It follows the argmin of c_k f(x, .) + ||. - y||_D^2 s_k / (2 r_k), the Moreau envelope of f in
      the metric; without it, y and theta part for ever in the directions in which f is flat.
    - c_k grows as far as y may have gone. Small at first, it lets F choose among the solutions of the lower level, and the
      weights of doubtful examples are settled before a network can learn these by heart.
    - D_x takes away the scale of x, such as the 1/n in the gradient of each of n weights, and the steps of x shrink faster than
      those of y and theta, so that these can follow.

    The direction of y lacks the term (theta - y) s_k / r_k of MEHA, with which a perceptron learned less well (and a
    convolutional network better; docs/automatic.md has what else was tried). The fixed points for a given c are then those of
    MEHA for the limit s_k = 0, which it approaches.

    Multiplying F or f by a number changes nothing. A step costs 2 gradients of f and 1 of F (the first one, two more of each),
    keeps 2 tensors for each of x and y and 1 for each of theta, and never waits for the device.

    Args:
        lr: the length of the first steps of each number in a network; variables without modules take five times that.
        inner_steps: T, the steps of theta and y for one of x: by default 1, or 5 without warm start.
        warm_start: False for lower variables that belong to the batch, such as the heads of its tasks: they begin at y0 with
            each batch, and take T gradient steps of half the reciprocal of the curvature, which is measured as they go.

    A set of intervals is projected on. For other sets, and with a non-smooth g, only steps that scale all coordinates alike are
    correct: D is then the root of the mean over all coordinates, and each step waits for it.

    The numbers of a step, at the point where x begins to move: ``upper`` F(x, y), ``lower`` (f+g)(x, y), ``gap``
    (f+g)(x, y) - (f+g)(x, theta), ``d_x`` the norm of the direction of x before the mean is taken, ``c`` the penalty.

    >>> problem = Problem(
    ...     upper=lambda x, y, noise: (x - 1).square().sum() + (y - noise[0]).square().sum(),
    ...     lower=lambda x, y, noise: (y - x - noise[1]).square().sum(),
    ... )
    >>> generator = torch.Generator().manual_seed(0)
    >>> run = StochasticMEHA().start(problem, torch.zeros(50), torch.zeros(50))
    >>> for _ in range(4000):
    ...     info = run.step(0.1 * torch.randn(2, 50, generator=generator))
    >>> print(f"{run.x.mean():.1f}")  # the solution is 0.5
    0.5
    """

    lr: float = 0.01
    inner_steps: int | None = None
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        if self.inner_steps is not None:
            check_count("inner_steps", self.inner_steps)

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return f"Take smaller steps, such as StochasticMEHA(lr={self.lr / SMALLER:g}), or look at the batch for NaN."

    def report(self, run: Run) -> dict[str, str]:
        """The steepness of F relative to f, and the numbers of the last step."""
        state = run.state
        age, numbers = _age(state.k - 1), {name: float(number) for name, number in state.numbers.value.items()}
        q, c = numbers["steepness"], _penalty(state.k - 1, self.rate(state.y)) * numbers["steepness"]
        if not state.k or not math.isfinite(q):
            return {}
        if self.warm_start:
            lower = f"{self.rate(state.y) / math.sqrt(age):.2g} of y and theta; gamma = {c * age:.2g} in their metric"
        else:
            steps = (FRESH_STEP / numbers[name] for name in ("curvature_y", "curvature_theta"))
            lower = "gradients times {:.2g} and {:.2g} for y and theta".format(*steps)
        return {
            "problem": f"balanced at c = {q:.2g}, judged by the slopes of F and f in y at the start",
            "course": f"c = {c:.2g} and growing; steps of {self.rate(state.x) / age:.2g} for each number of x, {lower}",
        }

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> StochasticMEHAState:
        fresh = not self.warm_start
        dtype = torch.promote_types(y.leaves[0].dtype, torch.float32)
        names = ("steepness", "curvature_y", "curvature_theta") if fresh else ("steepness",)
        return StochasticMEHAState(
            x,
            y,
            start=y.copy() if fresh else None,
            settled=False,  # the rates fall and the penalty grows throughout the run
            theta=y.copy(),
            mean_x=_zeros(x),
            square_x=_zeros(x),
            mean_y=None if fresh else _zeros(y),
            mean_theta=None if fresh else _zeros(y),
            square_y=None if fresh else _zeros(y),
            numbers=Variable.of({name: torch.ones((), dtype=dtype, device=y.device) for name in names}, "numbers"),
        )

    def step(self, oracle: Oracle, state: StochasticMEHAState, at: At) -> Numbers:
        x, y, theta, k, batch = state.x, state.y, state.theta, state.k, at.batch
        state.restart(y, theta)
        if k == 0:
            self._measure(oracle, state, batch)
        c = _penalty(k, self.rate(y)) * state.numbers.value["steepness"]
        steps = self.inner_steps or (1 if self.warm_start else FRESH_STEPS)
        if self.warm_start:
            for j in range(k * steps + 1, (k + 1) * steps):
                _, lower_directions = _directions(oracle, state, (y, theta), c, batch)
                self._move_lower(oracle, state, lower_directions, c, j)
            values, (d_x, *lower_directions) = _directions(oracle, state, (x, y, theta), c, batch)
            self._move_lower(oracle, state, lower_directions, c, (k + 1) * steps)
        else:
            _descend(oracle, state, steps, c, batch)
            values, (d_x,) = _directions(oracle, state, (x,), c, batch)
        size = norm(d_x)
        self._move_x(oracle, state, d_x)
        upper, lower, best = values
        return {"upper": upper, "lower": lower, "gap": lower - best, "d_x": size, "c": c}

    def rate(self, variable: Variable) -> float:
        """The rate of the first step of this variable."""
        return self.lr * (1.0 if variable.has_modules else TENSOR_RATE)

    def _move_x(self, oracle: Oracle, state: StochasticMEHAState, direction: Leaves) -> None:
        x, n, rate = state.x, state.k + 1, self.rate(state.x) / _age(state.k)
        metric = _metric(state.square_x.leaves, [direction], n, whole=_mixes(oracle.problem.x_set))
        _follow(x.leaves, state.mean_x.leaves, direction, metric, n, rate)
        oracle.project(x.value, x.leaves, rate)

    def _move_lower(self, oracle: Oracle, state: StochasticMEHAState, directions: list[Leaves], c: Tensor, n: int) -> None:
        """The n-th step of y and theta, in the metric that they share."""
        y, theta, problem = state.y, state.theta, oracle.problem
        rate, whole = self.rate(y) / math.sqrt(_age(state.k)), problem.nonsmooth is not None or _mixes(problem.y_set)
        assert state.mean_y is not None
        assert state.mean_theta is not None
        assert state.square_y is not None
        metric = _metric(state.square_y.leaves, directions, n, whole)
        foreach_lerp_(theta.leaves, y.leaves, rate / _age(state.k))
        _follow(theta.leaves, state.mean_theta.leaves, directions[1], metric, n, rate)
        _follow(y.leaves, state.mean_y.leaves, directions[0], metric, n, rate)
        if not oracle.prox.identity:
            step = float(rate * c / metric[0].flatten()[0]) if whole else rate
            for variable in (theta, y):
                oracle.prox(state.x.value, variable.leaves, step)

    def _measure(self, oracle: Oracle, state: StochasticMEHAState, batch: Any) -> None:
        """q = (|F_y| + L_F sqrt(n)) / (|f_y| + L_f sqrt(n)), with slopes L of the gradients in n numbers along a first step.

        These are the forces that y meets at the start, and when each number has gone by 1. Either may vanish: gradients where y
        starts at a minimum, slopes where an objective is linear. (Not the balance of curvatures of the methods without noise:
        power steps on a batch would see its noise, and wait for the device.)
        """
        x, y, theta, numbers, rate = state.x, state.y, state.theta, state.numbers.value, self.rate(state.y)

        def gradients(at: Variable) -> list[Leaves]:
            return [oracle.gradient(at, [(1.0, function, x, at)], batch)[1] for function in (oracle.upper, oracle.lower)]

        here, root = gradients(y), math.sqrt(y.numel)
        sizes = [norm(gradient) for gradient in here]
        for gradient, size in zip(here, sizes, strict=True):
            scale = rate * root / size.clamp_min(torch.finfo(size.dtype).tiny)
            foreach_sub_(theta.leaves, foreach_mul(gradient, scale))
        oracle.prox(x.value, theta.leaves, rate)
        slopes = [_slope(new, old, theta.leaves, y.leaves) for new, old in zip(gradients(theta), here, strict=True)]
        upper, lower = (size + slope * root for size, slope in zip(sizes, slopes, strict=True))
        numbers["steepness"].copy_(upper / lower)
        if not self.warm_start:
            c = _penalty(0, rate) * numbers["steepness"]
            numbers["curvature_y"].copy_(slopes[0] + c * slopes[1])
            numbers["curvature_theta"].copy_(c * slopes[1])
        copy_(theta.leaves, y.leaves)


def _age(k: int) -> float:
    return 1 + k / PATIENCE


def _penalty(k: int, lr: float) -> float:
    """c_k / q: the sum of the rates so far, as an integral, over WAY."""
    return 2 * PATIENCE * lr * (math.sqrt(_age(k + 1)) - 1) / WAY


def _zeros(variable: Variable) -> Variable:
    return Variable.of([torch.zeros_like(leaf) for leaf in variable.leaves], "moments")


def _mixes(domain: ConvexSet | None) -> bool:
    """Whether the projection on a set is only correct after steps that scale all coordinates alike."""
    return domain is not None and not domain.coordinatewise


def _directions(
    oracle: Oracle, state: StochasticMEHAState, wrt: tuple[Variable, ...], c: Tensor, batch: Any
) -> tuple[list[Tensor], list[Leaves]]:
    """F, f and f at theta, and the directions of some variables: the gradients of F(x, y) + c (f(x, y) - f(x, theta)), and
    c f_y(x, theta) for theta."""
    x, y, theta = state.x, state.y, state.theta
    if len(wrt) > 2 and oracle.phi is not oracle.lower:  # g has a derivative in x, but in y a prox
        values, of_x = _directions(oracle, state, wrt[:1], c, batch)
        return values, of_x + _directions(oracle, state, wrt[1:], c, batch)[1]
    f = oracle.phi if x in wrt else oracle.lower
    (upper,), first = oracle.gradients(tuple(v for v in wrt if v is not theta), [(1.0, oracle.upper, x, y)], batch)
    (lower, best), second = oracle.gradients(wrt, [(1.0, f, x, y), (-1.0, f, x, theta)], batch)
    directions = []
    for variable, gradient in zip(wrt, second, strict=True):
        directions.append(list(foreach_mul(gradient, -c if variable is theta else c)))
    for direction, gradient in zip(directions, first, strict=False):
        foreach_add_(direction, gradient)
    return [upper, lower, best], directions


def _descend(oracle: Oracle, state: StochasticMEHAState, steps: int, c: Tensor, batch: Any) -> None:
    """Gradient steps of y and theta from where they begin; their curvatures follow from how gradients change on the way."""
    numbers, levels = state.numbers.value, (state.y, state.theta)
    curvatures: list[Tensor] = [numbers["curvature_y"], numbers["curvature_theta"]]
    before: list[tuple[Leaves, Leaves]] = []
    for _ in range(steps):
        _, directions = _directions(oracle, state, levels, c, batch)
        here = [[leaf.clone() for leaf in level.leaves] for level in levels]
        for curvature, direction, point, (old_direction, old_point) in zip(curvatures, directions, here, before, strict=False):
            curvature.lerp_(_slope(direction, old_direction, point, old_point).to(curvature), 1 - MOMENTUM)
        before = list(zip(directions, here, strict=True))
        for level, curvature, direction in zip(levels, curvatures, directions, strict=True):
            step = FRESH_STEP / curvature
            foreach_sub_(level.leaves, foreach_mul(direction, step))
            if not oracle.prox.identity:
                oracle.prox(state.x.value, level.leaves, float(step * c))


def _metric(square: Leaves, directions: list[Leaves], n: int, whole: bool) -> Leaves:
    """The roots of the mean squares of n directions, of which the last come now; one number for all if ``whole``."""
    foreach_mul_(square, 1 - 1 / n)
    for direction in directions:
        foreach_addcmul_(square, direction, direction, 1 / (n * len(directions)))
    roots = list(foreach_sqrt(square))
    foreach_add_(roots, math.sqrt(torch.finfo(roots[0].dtype).tiny))
    if whole:
        mean = norm(roots) / math.sqrt(sum(root.numel() for root in roots))
        return [mean.to(root.dtype).expand_as(root) for root in roots]
    return roots


def _follow(leaves: Leaves, mean: Leaves, direction: Leaves, metric: Leaves, n: int, rate: float) -> None:
    """The n-th step along the running mean of directions, in the metric."""
    foreach_lerp_(mean, direction, 1 - MOMENTUM)
    foreach_addcdiv_(leaves, mean, metric, -rate / (1 - MOMENTUM**n))


def _slope(gradient: Leaves, old_gradient: Leaves, point: Leaves, old_point: Leaves) -> Tensor:
    """How fast a gradient changes between two points; not zero, and not infinite."""
    tiny = math.sqrt(torch.finfo(gradient[0].dtype).tiny)
    return (distance(gradient, old_gradient) + tiny) / (distance(point, old_point) + tiny)
