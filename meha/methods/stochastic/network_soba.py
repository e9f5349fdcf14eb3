"""NetworkSOBA: a small first-order step for networks on batches, with three gradients, and rates that fall to the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.method.method import At, Method, Numbers, Run, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods.frames import check_step, move
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_positive, check_switch
from meha.tensors.distributed import local
from meha.tensors.variables import Leaves, Variable, add_, copy_, inner, mean_size, norm, scaled

WAY, X_WAY = 0.5, 5.0
"""Sums of the steps of a coordinate of y and of x over the whole run, so that a longer run moves no farther, with less noise:
networks memorise wrong labels when they move far."""

WIDTH = 128
"""The way of y is for layers with up to this number of inputs; wider ones, whose inputs act together, go less in proportion."""

REFIT = 0.3
"""Share of the steps at the end in which x rests, and y learns from both levels."""

SHORTEST = 500
"""Steps that the whole way takes at least, so that no step is long; a shorter run goes a part of it."""

PULL = 0.03
"""Weight of the newest gradient in the response: a mean over some 30 batches has a direction, and is not yet outdated."""

LONG = 0.1
"""Upper bound on the length of the response, relative to y; beyond, f is no quadratic."""

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
        numbers: mean norms of F_y (``upper``) and f_y (``lower``), and means of -F_y v (``gain``) and v f_yy v (``curvature``).
    """

    response: Variable
    probe: Variable
    square: Variable
    x_sizes: Variable
    numbers: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


def falling(k: int, steps: float, least: float) -> float:
    """Return the share of the way that step k of these takes; the shares fall linearly and their sum is 1, or less where there
    are fewer steps than ``least``."""
    return 2 / max(steps, least) * max(1 - (k + 0.5) / steps, 0.5 / steps)


def rate(k: int, last: int | None, refit: float) -> float:
    """Return the share of the way that step k takes where a share of the steps is left for refitting y."""
    if last is None:
        return 1 / (MEMORY + k)
    first = math.ceil((1 - refit) * last)
    if k < first:
        return falling(k, first, (1 - refit) * SHORTEST)
    return falling(k - first, max(last - first, 1), refit * SHORTEST)


def refits(k: int, last: int | None, refit: float) -> bool:
    """Return whether step k is one of those at the end, in which x rests."""
    return last is not None and k >= math.ceil((1 - refit) * last)


def newest(k: int, least: float) -> float:
    """Return the weight of the newest value in a mean: a plain mean at first, without bias to zero."""
    return max(1 / (k + 1), least)


def side(k: int) -> float:
    """Return the sign of the difference in step k: that of Thue and Morse, which no period of the batches agrees with."""
    return (-1.0) ** k.bit_count()


def shares(problem: Problem) -> bool:
    """Return whether the numbers of x compete, as the weights of sources on a simplex do."""
    return problem.x_set is not None and not problem.x_set.coordinatewise


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


def add_square(square: Tensor, scratch: Tensor, gradient: Tensor, factor: Any, weight: Any) -> None:
    """Add weight (factor gradient)^2 to a mean square, in the scratch memory where that has its precision."""
    part = scratch if scratch.dtype is square.dtype else torch.empty_like(square)
    square.add_(part.copy_(gradient).mul_(factor).square_().mul_(weight))


@dataclass(frozen=True, kw_only=True)
class NetworkSOBA(Method):
    """The default for networks: two gradients of f and one of F a step, no second derivatives, nothing to choose.

    Step k = 0, 1, ... takes gradients on one batch, and moves all variables at once:

        x <- x - 5 r_k D_x^-1 (F_x(x, y) + s/e (f_x(x, y + e v) - f_x(x, y)))
        v <- a mean of -D^-1 F_y(x, y) over some 30 steps
        y <- y - 0.5 r_k D^-1 f_y(x, y)

    y follows the lower level alone, so that F is never seen at a y that fits its data: it is the network that training at x
    gives. v is the direction in which F would move it, and s v its response to F: s = -F_y v / (v f_yy v) minimises the
    linear part of F plus f along v. Both are means over the last steps, and the curvature is that of the difference
    f(x, y + e v) - f(x, y), which the step computes in any case. e = s, but e v is at most a tenth as long as y, since f is no
    quadratic beyond, and s v at most as long as y.

    The direction of x is that of :class:`~meha.stochastic.SOBA` with one change. There v solves f_yy v = -F_y, which is of no
    use while a network trains, because its Hessian is indefinite; here the solution is taken along one direction.

    A difference on one side of y has a second part, e/2 times the curvature of f along v. It is smallest for data that have
    nothing to do with F. Where the numbers of x are shares of one, such data would win, and e therefore changes its sign from
    step to step, so that this part cancels. That is so for a set X that is not one of intervals, such as a simplex;
    ``both_sides=True`` says so for logits.

    The rates r_k fall linearly to 0, and their sum is 1, so that a longer run moves no farther, with less noise. In the last
    0.3 of the steps x rests, and y learns from both levels, along f_y plus F_y times the mean ratio of their norms, with rates
    that begin again and fall to 0 once more; these steps take one gradient of each level. ``both_levels=False`` leaves this
    out. The number of steps is the ``max_steps`` of ``solve``; in a loop of one's own, set ``run.last``. Without,
    r_k = 1 / (1000 + k), and x never rests.

    D is the root of the mean of f_y^2 and F_y^2, the latter brought to the same norm: y and v share a metric, and a coordinate
    that matters to F alone has no infinite response. In a matrix with n > 128 inputs, steps of y and v are multiplied by 128/n.
    D_x is the mean size of the directions of a tensor, times the root of the number of columns of a matrix, since images need
    small steps: the weight of an example that is in one of 100 batches moves 100 times as far when it is drawn, and so as far
    as others in a pass over the data.

    Multiplying F or f by a number changes nothing. The ways are in the units of the weights of networks and of logits: a y
    whose numbers are larger, as tensors may be, needs a longer one to keep up with x. At its peak ``solve`` holds 8 tensors of
    the size of y.

    Args:
        way, x_way: the sums of the steps of a coordinate of y, and of x on average, over the run.
        both_levels: whether y learns from the data of both levels in the end.
        both_sides: whether differences are taken on both sides of y in turn; None where X says so.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``, which take the steps instead.

    A set X of intervals is projected on; with another one, all of x has one scale. The numbers of a step, before it moves:
    ``upper`` F(x, y), ``lower`` f(x, y), ``gap`` f(x, y + e v) - f(x, y), ``d_x`` the norm of the direction of x; while x
    rests, the last is 0, and there is no gap.

    >>> problem = Problem(
    ...     upper=lambda x, y, noise: (y - 1 - noise[0]).square().sum(),
    ...     lower=lambda x, y, noise: (y - x - noise[1]).square().sum(),
    ... )
    >>> generator = torch.Generator().manual_seed(0)
    >>> run = NetworkSOBA(way=20.0).start(problem, torch.zeros(50), torch.zeros(50))
    >>> run.last = 1000
    >>> for _ in range(1000):
    ...     info = run.step(0.1 * torch.randn(2, 50, generator=generator))
    >>> print(f"{run.x.mean():.1f}")  # y = x, and F wants 1
    1.0
    """

    refuses_nonsmooth: ClassVar[str] = "its steps of y scale each coordinate, after which a prox is not correct"
    refuses_y_set: ClassVar[str] = "the response of a y on the boundary is another one"
    open_ended: ClassVar[bool] = True

    way: float = WAY
    x_way: float = X_WAY
    both_levels: bool = True
    both_sides: bool | None = None
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("way", "x_way"):
            check_positive(name, getattr(self, name))
        check_switch("both_levels", self.both_levels)
        if self.both_sides is not None:
            check_switch("both_sides", self.both_sides)
        for name in ("x_optimizer", "y_optimizer"):
            check_step("way", None, name, getattr(self, name))

    @property
    def _refit(self) -> float:
        return REFIT if self.both_levels else 0.0

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return f"Take smaller steps, such as NetworkSOBA(way={self.way / 10:g}, x_way={self.x_way / 10:g})."

    def report(self, run: Run) -> Mapping[str, str]:
        if not run.k:
            return {}
        part, k = rate(run.k - 1, run.last, self._refit), run.k - 1
        course = f"steps of {self.x_way * part:.2g} for the numbers of x, {self.way * part:.2g} for those of y"
        if refits(k, run.last, self._refit):
            course = f"x rests; y learns from both levels, in steps of {self.way * part:.2g}"
        return {"course": course if run.last else f"{course}; the number of steps is not known (run.last)"}

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> NetworkSOBAState:
        scalar = local(y.leaves)[0].new_zeros((), dtype=single(y.leaves[0].dtype))
        return NetworkSOBAState(
            x,
            y,
            settled=False,  # the rates fall throughout the run
            response=zeros(y.leaves),
            probe=y.copy(),
            square=zeros(y.leaves),
            x_sizes=Variable.of([leaf.new_zeros((), dtype=single(leaf.dtype)) for leaf in local(x.leaves)], "sizes"),
            numbers=Variable.of({name: scalar.clone() for name in ("upper", "lower", "gain", "curvature")}, "numbers"),
            x_optimizer=build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem),
            y_optimizer=build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem),
        )

    def step(self, oracle: Oracle, state: NetworkSOBAState, at: At) -> Numbers:
        if at.rare(partial(refits, last=at.last, refit=self._refit)):
            return self._step_on_both(oracle, state, at)
        x, y, probe, numbers = state.x, state.y, state.probe, state.numbers.value
        size = norm(state.response.leaves)
        tiny = math.sqrt(torch.finfo(size.dtype).tiny)
        reach = norm(y.leaves) + self.way / MEMORY * math.sqrt(y.numel)  # not 0 where y is
        eps = max(torch.finfo(leaf.dtype).eps for leaf in y.leaves) ** (1 / 3)  # shorter differences are of rounding
        most = reach / (size + tiny)
        e = torch.clamp(self._scale(numbers, most), min(eps, LONG) * most, LONG * most)
        if self.both_sides or (self.both_sides is None and shares(oracle.problem)):
            e = e * at.of(side)
        copy_(probe.leaves, y.leaves)
        add_(probe.leaves, state.response.leaves, e)
        # In one call, so that they share dropout masks; y first, as sharded modules take their dtypes from the first pass.
        terms = [(-1.0, oracle.lower, x, y), (1.0, oracle.lower, x, probe)]
        values, of_lower = oracle.gradients((x, y), terms, at.batch, own=True)
        (upper,), of_upper = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], at.batch, own=True)
        values.append(upper)
        # One message for all processes.
        difference, minus_f_y, F_x, F_y = oracle.average(of_lower + of_upper, (x, y, x, y), values)
        lower, beyond, upper = values
        gap = beyond - lower
        weight = at.of(lambda k: newest(max(k - 1, 0), PULL))
        numbers["gain"].lerp_(-inner(F_y, state.response.leaves).to(numbers["gain"]), weight)
        bent = gap.to(e) + e * inner(minus_f_y, state.response.leaves)
        numbers["curvature"].lerp_((2 * bent / e.square()).to(numbers["curvature"]), weight)
        d_x = scaled(difference, torch.where(size > 0, self._scale(numbers, most) / e, 0.0))  # there is no response at first
        add_(d_x, F_x, 1.0)
        self._move_y(oracle, state, at, minus_f_y, F_y)
        found = {"upper": upper, "lower": lower, "gap": gap, "d_x": norm(d_x)}
        if state.x_optimizer is not None:
            move(x, d_x, 0.0, oracle.project, x.value, state.x_optimizer)
        else:
            self._move_x(oracle, state, d_x, at)
        return found

    @staticmethod
    def _scale(numbers: Mapping[str, Tensor], most: Tensor) -> Tensor:
        """Return s, where F + f is least along v; the most where there is no curvature."""
        gain, curvature = numbers["gain"].clamp_min(0.0), numbers["curvature"]
        return torch.where(curvature * most > gain, gain / curvature, most)

    def _rate(self, at: At) -> Any:
        return at.of(partial(rate, last=at.last, refit=self._refit))

    def _move_y(self, oracle: Oracle, state: NetworkSOBAState, at: At, minus_f_y: Leaves, F_y: Leaves) -> None:
        """Update the metric, the response and y."""
        y, numbers, rate = state.y, state.numbers.value, self._rate(at)
        weight, pull = at.of(lambda k: newest(k, 1 / MEMORY)), at.of(lambda k: newest(k, PULL))
        for name, gradient in (("upper", F_y), ("lower", minus_f_y)):
            numbers[name].lerp_(norm(gradient).to(numbers[name]), weight)
        ratio = self._ratio(numbers)
        pieces = (y.leaves, state.probe.leaves, state.response.leaves, state.square.leaves, minus_f_y, F_y)
        for whole, leaf, scratch, response, square, lower, upper in zip(y.leaves, *map(local, pieces), strict=True):
            square.mul_(1 - weight)
            add_square(square, scratch, lower, 1.0, weight / 2)
            add_square(square, scratch, upper, ratio, weight / 2)
            narrow = min(1.0, WIDTH / math.prod(whole.shape[1:]))
            response.lerp_(quotient(scratch, square, upper).mul_(-narrow), pull)
            if state.y_optimizer is None:
                leaf.add_(quotient(scratch, square, lower).mul_(narrow * self.way * rate))
        if state.y_optimizer is not None:
            move(y, [-part for part in minus_f_y], 0.0, oracle.prox, state.x.value, state.y_optimizer)

    @staticmethod
    def _ratio(numbers: Mapping[str, Tensor]) -> Tensor:
        """Return the factor that brings F_y to the size of f_y."""
        return numbers["lower"] / (numbers["upper"] + math.sqrt(torch.finfo(numbers["upper"].dtype).tiny))

    def _step_on_both(self, oracle: Oracle, state: NetworkSOBAState, at: At) -> Numbers:
        """Take a step of y along the gradients of both levels; x rests."""
        x, y, ratio, rate = state.x, state.y, self._ratio(state.numbers.value), self._rate(at)
        (upper,), of_upper = oracle.gradients((y,), [(1.0, oracle.upper, x, y)], at.batch, own=True)
        (lower,), of_lower = oracle.gradients((y,), [(1.0, oracle.lower, x, y)], at.batch, own=True)
        direction = scaled(of_upper.pop(), ratio)
        add_(direction, of_lower.pop(), 1.0)
        values = [upper, lower]
        (direction,) = oracle.average([direction], (y,), values)
        upper, lower = values
        pieces = (y.leaves, state.probe.leaves, state.square.leaves, direction)
        if state.y_optimizer is not None:
            move(y, direction, 0.0, oracle.prox, x.value, state.y_optimizer)
        else:
            for whole, leaf, scratch, square, part in zip(y.leaves, *map(local, pieces), strict=True):
                square.mul_(1 - PULL)  # quickly, since these directions have another size
                add_square(square, scratch, part, 1.0, PULL)
                narrow = min(1.0, WIDTH / math.prod(whole.shape[1:]))
                leaf.sub_(quotient(scratch, square, part).mul_(narrow * self.way * rate))
        return {"upper": upper, "lower": lower, "d_x": torch.zeros_like(upper)}

    def _move_x(self, oracle: Oracle, state: NetworkSOBAState, direction: Leaves, at: At) -> None:
        """Take a step of x in units of the mean size of its directions; of all tensors, where a set needs one scale."""
        x = state.x
        rate, weight = self.x_way * self._rate(at), at.of(lambda k: newest(k, 1 / MEMORY))
        means = [mean_size(part) for part in direction]
        if together := shares(oracle.problem):
            sums = [mean * part.numel() for mean, part in zip(means, direction, strict=True)]
            means = [torch.stack(sums).sum() / x.numel] * len(means)
        pieces = (x.leaves, local(x.leaves), state.x_sizes.leaves, means, local(direction))
        for whole, leaf, size, mean, part in zip(*pieces, strict=True):
            size.lerp_(mean.to(size), weight)
            torch.maximum(size, mean.to(size) / SUDDEN, out=size)  # the mean alone would follow a sudden jump too late
            step = (part / (size + math.sqrt(torch.finfo(size.dtype).tiny))).clamp_(-LIMIT, LIMIT)
            leaf.sub_(step.mul_(rate / math.sqrt(1 if together else math.prod(whole.shape[1:]))))
        oracle.project(x.value, x.leaves, 1.0)
