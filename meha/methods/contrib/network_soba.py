"""NetworkSOBA: a small first-order step for networks on batches, with three gradients, and rates that fall to the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.method.method import At, Method, Numbers, Run, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods.frames import check_step, move
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_positive
from meha.tensors.distributed import local
from meha.tensors.variables import Leaves, Variable, add_, copy_, mean_size, norm, scaled

__all__ = ["NetworkSOBA", "NetworkSOBAState"]


WAY, X_WAY = 1.0, 5.0
"""Sums of the steps of a coordinate of y and of x over the whole run, so that a longer run moves no farther, with less noise:
networks memorise wrong labels when they move far."""

WIDTH = 64
"""The way of y is for layers with up to this number of inputs; wider ones, whose inputs act together, go less in proportion."""

SHORTEST = 500
"""Steps that the whole way takes at least, so that no step is long; a shorter run goes a part of it."""

PULL = 0.01
"""Weight of the newest gradient in the response: a mean over some 100 batches has a direction, and is not yet outdated."""

LONG = 0.1
"""Length of the difference along the response, relative to y. Images were not learned with a third of it."""

MEMORY = 1000
"""Steps over which squares and sizes are averaged, as in Adam; rates halve in as many where the run's end is not known."""

SUDDEN = 10.0
"""The mean size of the directions of x is at least the last one divided by this, so that a sudden jump gives no long step."""

LIMIT = 100.0
"""Upper bound on a step of a coordinate of x, in units of the mean step: one drawn in a hundredth of the steps needs that."""


@dataclass
class NetworkSOBAState(State):
    """x, y, its response to F, their metric, and sizes.

    Attributes:
        response: v, the mean of -D^-1 F_y.
        probe: a copy of y at the end of the difference; during a step also the scratch memory of quotients.
        square: mean squares of f_y and of F_y brought to the same size.
        x_sizes: the mean size of the directions of each tensor of x.
        sizes: mean norms of F_y and f_y.
    """

    response: Variable
    probe: Variable
    square: Variable
    x_sizes: Variable
    sizes: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


def falling(k: int, horizon: int | None) -> float:
    """Return the share of the way that step k takes: falls to the end of the run, or as 1/k where that is not known."""
    if horizon is None:
        return 1 / (MEMORY + k)
    return 2 / max(horizon, SHORTEST) * max(1 - (k + 0.5) / horizon, 0.5 / horizon)


def newest(k: int, horizon: int | None) -> float:
    """Return the weight of the newest value in long means: a plain mean at first, without bias to zero."""
    return max(1 / (k + 1), 1 / MEMORY)


def pulled(k: int, horizon: int | None) -> float:
    """Return the weight of the newest gradient in the response, likewise."""
    return max(1 / (k + 1), PULL)


def single(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of means: half precision would round their small changes away."""
    return torch.promote_types(dtype, torch.float32)


def zeros(leaves: Leaves) -> Variable:
    """Return means that are zero."""
    return Variable.of([torch.zeros_like(leaf, dtype=single(leaf.dtype)) for leaf in leaves], "means")


def quotient(scratch: Tensor, square: Tensor, gradient: Tensor) -> Tensor:
    """Return gradient / root of square; it uses the scratch memory where that has the precision of the square."""
    tiny = math.sqrt(torch.finfo(square.dtype).tiny)  # a coordinate without gradients divides 0 by this
    root = scratch.copy_(square) if scratch.dtype is square.dtype else square.clone()
    return root.sqrt_().add_(tiny).reciprocal_().mul_(gradient)


@dataclass(frozen=True, kw_only=True)
class NetworkSOBA(Method):
    """A step for networks on batches with two gradients of f and one of F, no second derivatives, and no numbers to choose.

    Step k = 0, 1, ... of K takes gradients on one batch, and moves all variables at once:

        x <- x - 5 r_k D_x^-1 (F_x(x, y) + (f_x(x, y + e v) - f_x(x, y)) / e),    |e v| = 0.1 |y| + 0.001 sqrt(dim y)
        v <- a mean of -D^-1 F_y(x, y) / 10 over some 100 steps
        y <- y - r_k D^-1 f_y(x, y)

    The rates r_k fall linearly to 0 at k = K, and their sum is 1. K is the number of steps that ``solve`` was given; in a loop
    of one's own, set ``run.horizon``. Without, r_k = 1 / (1000 + k).

    y follows the lower level alone, so that F is never seen at a y that fits its data: it is the network that training at x
    gives. v is its response to F, where y would go if it followed F for 100 steps. The direction of x is that of SOBA (Dagreou
    et al. 2022) with two changes. There v solves f_yy v = -F_y, which is of no use while a network trains, because its Hessian
    is indefinite. And the difference is long, so that it tells what x does to f in the range in which y still moves.

    D is the root of the mean of f_y^2 and F_y^2, the latter brought to the same norm: y and v share a metric, and a coordinate
    that matters to F alone has no infinite response. In a matrix with n > 64 inputs, steps of y and v are multiplied by 64/n.
    D_x is the mean size of the directions of a tensor, times the root of the number of columns of a matrix, since images need
    small steps: the weight of an example that is in one of 100 batches moves 100 times as far when it is drawn, and so as far
    as others in a pass over the data.

    Multiplying F or f by a number changes nothing if F does not depend on x itself. The ways are in the units of the weights of
    networks and of logits: a y whose numbers are larger, as tensors may be, needs a longer one to keep up with x. At its peak
    ``solve`` holds 8 tensors of the size of y.

    Args:
        way, x_way: the sums of the steps of a coordinate of y, and of x on average, over the run.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``, which take the steps instead.

    A set of intervals is projected on; with another set for x, all of x has one scale. The numbers of a step, before it moves:
    ``upper`` F(x, y), ``lower`` f(x, y), ``gap`` f(x, y + e v) - f(x, y), ``d_x`` the norm of the direction of x.

    >>> problem = Problem(
    ...     upper=lambda x, y, noise: (y - 1 - noise[0]).square().sum(),
    ...     lower=lambda x, y, noise: (y - x - noise[1]).square().sum(),
    ... )
    >>> generator = torch.Generator().manual_seed(0)
    >>> run = NetworkSOBA(way=20.0).start(problem, torch.zeros(50), torch.zeros(50))
    >>> run.horizon = 1000
    >>> for _ in range(1000):
    ...     info = run.step(0.1 * torch.randn(2, 50, generator=generator))
    >>> print(f"{run.x.mean():.1f}")  # y = x, and F wants 1
    1.0
    """

    refuses_nonsmooth: ClassVar[str] = "its steps of y scale each coordinate, after which a prox is not correct"
    open_ended: ClassVar[bool] = True

    way: float = WAY
    x_way: float = X_WAY
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("way", "x_way"):
            check_positive(name, getattr(self, name))
        for name in ("x_optimizer", "y_optimizer"):
            check_step("way", None, name, getattr(self, name))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.y_set is not None and not problem.y_set.coordinatewise and self.y_optimizer is None:
            raise ValueError(
                f"y_set: the steps of {self.name} scale each coordinate, after which the projection on {problem.y_set!r} is not"
                " correct; pass y_optimizer=partial(torch.optim.SGD, lr=...), or use StochasticMEHA."
            )

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return f"Take smaller steps, such as NetworkSOBA(way={self.way / 10:g}, x_way={self.x_way / 10:g})."

    def report(self, run: Run) -> dict[str, str]:
        rate, end = falling(max(run.k - 1, 0), run.horizon), "" if run.horizon else "; the end is not known (run.horizon)"
        return {"course": f"steps of {self.x_way * rate:.2g} for the numbers of x, {self.way * rate:.2g} for those of y{end}"}

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> NetworkSOBAState:
        *numbers, upper, lower = [leaf.new_zeros((), dtype=single(leaf.dtype)) for leaf in local(x.leaves + y.leaves[:1] * 2)]
        return NetworkSOBAState(
            x,
            y,
            settled=False,  # the rates fall throughout the run
            response=zeros(y.leaves),
            probe=y.copy(),
            square=zeros(y.leaves),
            x_sizes=Variable.of(numbers, "sizes"),
            sizes=Variable.of({"upper": upper, "lower": lower}, "sizes"),
            x_optimizer=build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem),
            y_optimizer=build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem),
        )

    def step(self, oracle: Oracle, state: NetworkSOBAState, at: At) -> Numbers:
        x, y, probe = state.x, state.y, state.probe
        length, size = LONG * norm(y.leaves) + self.way / MEMORY * math.sqrt(y.numel), norm(state.response.leaves)
        tiny = math.sqrt(torch.finfo(size.dtype).tiny)
        copy_(probe.leaves, y.leaves)
        add_(probe.leaves, state.response.leaves, length / (size + tiny))
        oracle.prox(x.value, probe.leaves, 1.0)
        terms = [(1.0, oracle.lower, x, probe), (-1.0, oracle.lower, x, y)]  # in one call: they share dropout masks
        (beyond, lower), (difference, minus_lower) = oracle.gradients((x, y), terms, at.batch)
        (upper,), (of_x, of_upper) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], at.batch)
        d_x = scaled(difference, size / length)  # zero in the first step, in which there is no response
        add_(d_x, of_x, 1.0)
        self._move_y(oracle, state, at, minus_lower, of_upper)
        numbers = {"upper": upper, "lower": lower, "gap": beyond - lower, "d_x": norm(d_x)}
        if state.x_optimizer is not None:
            move(x, d_x, 0.0, oracle.project, x.value, state.x_optimizer)
        else:
            self._move_x(oracle, state, d_x, self.x_way * at.of(falling), at.of(newest))
        return numbers

    def _move_y(self, oracle: Oracle, state: NetworkSOBAState, at: At, minus_lower: Leaves, of_upper: Leaves) -> None:
        """Update the metric, the response and y from -f_y and F_y."""
        y, sizes, rate, weight, pull = state.y, state.sizes.value, at.of(falling), at.of(newest), at.of(pulled)
        for size, gradient in ((sizes["upper"], of_upper), (sizes["lower"], minus_lower)):
            size.lerp_(norm(gradient).to(size), pull)
        ratio = sizes["lower"] / (sizes["upper"] + math.sqrt(torch.finfo(sizes["upper"].dtype).tiny))
        pieces = (y.leaves, state.probe.leaves, state.response.leaves, state.square.leaves, minus_lower, of_upper)
        for whole, leaf, scratch, response, square, lower, upper in zip(y.leaves, *map(local, pieces), strict=True):
            square.mul_(1 - weight)
            for gradient, factor in ((lower, 1.0), (upper, ratio)):
                part = scratch if scratch.dtype is square.dtype else torch.empty_like(square)
                square.add_(part.copy_(gradient).mul_(factor).square_().mul_(weight / 2))
            way = self.way * min(1.0, WIDTH / math.prod(whole.shape[1:]))
            response.lerp_(quotient(scratch, square, upper).mul_(-way / (MEMORY * PULL)), pull)
            if state.y_optimizer is None:
                leaf.add_(quotient(scratch, square, lower).mul_(way * rate))
        if state.y_optimizer is not None:
            move(y, [-part for part in minus_lower], 0.0, oracle.prox, state.x.value, state.y_optimizer)
        oracle.prox(state.x.value, y.leaves, 1.0)  # a projection does not depend on the step

    def _move_x(self, oracle: Oracle, state: NetworkSOBAState, direction: Leaves, rate: Any, weight: Any) -> None:
        """Take a step of x in units of the mean size of its directions; of all tensors, where a set needs one scale."""
        x, domain = state.x, oracle.problem.x_set
        means = [mean_size(part) for part in direction]
        if together := domain is not None and not domain.coordinatewise:
            sums = [mean * part.numel() for mean, part in zip(means, direction, strict=True)]
            means = [torch.stack(sums).sum() / x.numel] * len(means)
        pieces = (x.leaves, local(x.leaves), state.x_sizes.leaves, means, local(direction))
        for whole, leaf, size, mean, part in zip(*pieces, strict=True):
            size.lerp_(mean.to(size), weight)
            torch.maximum(size, mean.to(size) / SUDDEN, out=size)  # the mean alone would follow a sudden jump too late
            step = (part / (size + math.sqrt(torch.finfo(size.dtype).tiny))).clamp_(-LIMIT, LIMIT)
            leaf.sub_(step.mul_(rate / math.sqrt(1 if together else math.prod(whole.shape[1:]))))
        oracle.project(x.value, x.leaves, 1.0)
