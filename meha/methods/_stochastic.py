"""What StochasticMEHA is made of: its state, its numbers, directions, metrics, and steps of variables that restart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha._distributed import local
from meha._leaves import Leaves, add_, distance, join_norms, norm, scaled
from meha._oracle import Oracle
from meha._torch import foreach_add_, foreach_addcmul_, foreach_mul_, foreach_norm, foreach_sqrt
from meha._variables import Variable
from meha.methods._base import State
from meha.methods._optimizers import RunningOptimizer
from meha.sets import ConvexSet

__all__ = [
    "BATCHES",
    "DIRECT",
    "WHOLE",
    "Course",
    "StochasticMEHAState",
    "age",
    "begin",
    "columns",
    "descend",
    "find_directions",
    "fresh_age",
    "mixes",
    "penalty",
    "read",
    "responding",
    "slope",
    "update_metric",
    "zeros",
]


@dataclass(frozen=True)
class Course:
    """The numbers of a run in which y goes on from step to step.

    Attributes:
        lr, x_lr: rates of y and of x at the start.
        patience, power: rates are divided by (1 + k / patience)^power.
        weight: c, relative to where both levels weigh the same at the start.
        pull: the share of its distance to theta that the response loses in each step.
        width: rates are for layers with up to this number of inputs; wider ones, whose inputs act together, have
            proportionally smaller rates.
        linear: whether F is differentiated at theta, so that the response of theta to F is one to first order.
    """

    lr: float
    x_lr: float
    patience: int
    power: float
    weight: float
    pull: float
    width: float
    linear: bool

    def age(self, k: int) -> float:
        """What the rates are divided by in step k."""
        return (1 + k / self.patience) ** self.power


BATCHES = Course(lr=0.003, x_lr=0.01, patience=100, power=1.0, weight=10.0, pull=0.01, width=64, linear=True)
"""With batches: theta is what training gives. The sum of its rates grows as log k, so that a longer run changes little:
networks learn wrong labels by heart only on a long way."""

AGING, LEAST_AGING, MOST_AGING = 4.0, 0.3, 10.0
"""With batches, where y is a network: how fast its rates fall. The gradients of F at y and at theta, which never learns from
the data of F, are compared: smaller ones at y say that it knows these data by heart, larger ones that it learns wrong things
from those of f. A step counts as AGING |log of their ratio| steps of theta, within limits: some decay, and no sudden stop."""

SPAN = 20
"""Steps over which the sizes of these gradients are averaged."""

DIRECT = 10.0
"""With batches, and an F that depends on x itself: factor of c. The response then must keep its distance to theta, since F_x
and what it says about x are added, and a small distance serves as well."""

WHOLE = Course(lr=0.01, x_lr=0.05, patience=1000, power=0.5, weight=0.01, pull=0.001, width=math.inf, linear=False)
"""With all data in every step: nothing is noise, and F may choose among the solutions of the lower level, as in MEHA."""

TENSORS = 5.0
"""Rate of y without modules relative to networks, whose numbers act together."""

LIMIT = 10.0
"""Upper bound on a step of a number of x, in units of the mean step of its tensor."""

SUDDEN = 10.0
"""The mean size of the directions of x is at least this part of the last one."""

WATCHED = 10
"""Steps after the first in which variables that go on are compared with those that start over."""

FRESH_RATE, FRESH_PATIENCE = 0.01, 1000
"""With lower variables that restart: the rate of x, and the number of steps after which it shrinks."""

FRESH_WAY = 320
"""With lower variables that restart: c grows with k, and with its root after FRESH_PATIENCE; both levels weigh the same after
about this number of steps, and until then F leads."""

FRESH_MEMORY = 0.9
"""Share of the measured curvatures that a step keeps."""

TRIAL = 0.01
"""Length of the step of each number of y along which slopes are measured at the start."""

FRESH_STEPS, FRESH_STEP = 5, 0.5
"""Steps of lower variables that restart with each batch, and their size times the curvature: each halves the error."""

SMALLER = 10
"""Divisor of the rates that are advised after a failed run."""


@dataclass
class StochasticMEHAState(State):
    """x, y, theta, the response of theta to F; the moments of their directions; and numbers of the problem.

    Attributes:
        response: theta, a little better for F, where y is a network; otherwise, and without batches, y has this part.
        square_theta: the mean squares of the directions of theta and of the response.
        origin: where y began, while it is not decided whether it restarts with each batch.
        numbers: ``steepness`` of F relative to f; ``excess``, by how much f was larger where theta went on than at its start;
            curvatures of the steps of variables that restart; ``seen`` and ``unseen``, the sizes of the gradient of F at y and
            at theta, and the ``age`` of y that follows from them.
        fresh: whether the lower variables restart with each batch.
        direct: whether F depends on x itself.
    """

    theta: Variable
    mean_x: Variable
    square_x: Variable
    response: Variable | None
    mean_y: Variable | None
    mean_theta: Variable | None
    mean_response: Variable | None
    square_y: Variable | None
    square_theta: Variable | None
    origin: Variable | None
    numbers: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None
    theta_optimizer: RunningOptimizer | None = None
    response_optimizer: RunningOptimizer | None = None
    fresh: bool = False
    direct: bool = False


def fresh_age(k: int) -> float:
    return 1 + k / FRESH_PATIENCE


def penalty(k: int) -> float:
    """c_k / q with lower variables that restart: the sum of rates that fall as the root, as an integral."""
    return 2 * FRESH_PATIENCE * (math.sqrt(fresh_age(k + 1)) - 1) / FRESH_WAY


def columns(leaf: Tensor) -> int:
    """The number of columns of a matrix; 1 for vectors and numbers."""
    return math.prod(leaf.shape[1:])


def begin(state: StochasticMEHAState) -> Variable:
    """Where lower variables begin with each batch."""
    begin = state.start or state.origin
    assert begin is not None
    return begin


def zeros(variable: Variable) -> Variable:
    return Variable.of([torch.zeros_like(leaf) for leaf in variable.leaves], "moments")


def mixes(domain: ConvexSet | None) -> bool:
    """Whether the projection on a set is only correct after steps that scale all coordinates alike."""
    return domain is not None and not domain.coordinatewise


def responding(state: StochasticMEHAState, linear: bool) -> Variable:
    """The variable that responds to F: y itself, unless y is a network that learns from both levels."""
    return state.y if state.response is None or not linear else state.response


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
    """F, f and f at theta, and the directions of some variables: the gradients of F(x, y) + c (f(x, y) - f(x, theta)), and
    c f_y(x, theta) for theta. (A metric takes the factor c of those of y and theta away.) If ``linear``, with F at theta. Where
    there is a response, it takes the place of y, and the list ends with the gradient of F in theta.

    Where y and theta are ``together``, f drops out of the direction of x. Sums over micro-batches would leave rounding of it,
    along which x would take a step of full length.
    """
    x, theta = state.x, state.theta
    y = responding(state, linear)
    if len(wrt) > 2 and oracle.phi is not oracle.lower:  # g has a derivative in x, but in y a prox
        values, of_x = find_directions(oracle, state, wrt[:1], c, batch, linear=linear, together=together)
        return values, of_x + find_directions(oracle, state, wrt[1:], c, batch, linear=linear)[1]
    f = oracle.phi if x in wrt else oracle.lower
    at = theta if linear else y
    of_upper = tuple(at if v is y else v for v in wrt if v is not theta)
    (upper,), first = oracle.gradients(of_upper, [(1.0, oracle.upper, x, at)], batch, own=True)
    (lower, best), second = oracle.gradients(wrt, [(1.0, f, x, y), (-1.0, f, x, theta)], batch, own=True)
    directions = []
    for variable, gradient in zip(wrt, second, strict=True):
        directions.append(scaled(gradient, -c if variable is theta else 0 * c if together and variable is x else c))
    apart = [first.pop()] if y is not state.y and y in wrt else []
    for direction, gradient in zip(directions, first, strict=False):
        add_(direction, gradient, 1.0)
    values = [upper, lower, best]
    directions = oracle.average(directions + apart, wrt + (theta,) * len(apart), values)
    if apart:
        add_(directions[wrt.index(y)], directions[-1], 1.0)
    return values, directions


def read(oracle: Oracle, state: StochasticMEHAState, batch: Any) -> tuple[Leaves, Tensor]:
    """The direction in which y learns from both levels, the gradient of F / q + f; and the size of that of F."""
    x, y = state.x, state.y
    of_upper, of_lower = (oracle.gradient(y, [(1.0, level, x, y)], batch)[1] for level in (oracle.upper, oracle.lower))
    size = norm(of_upper)
    add_(of_lower, of_upper, 1 / state.numbers.value["steepness"])
    return of_lower, size


def age(state: StochasticMEHAState, seen: Tensor, unseen: Tensor, n: int) -> None:
    """Let y grow older by its n-th step, where F has gradients of these sizes at y and at theta."""
    numbers = state.numbers.value
    tiny = math.sqrt(torch.finfo(numbers["age"].dtype).tiny)
    for name, size in (("seen", seen), ("unseen", unseen)):
        numbers[name].lerp_(size.to(numbers[name]), max(1 / n, 1 / SPAN))
    ratio = (numbers["seen"] + tiny) / (numbers["unseen"] + tiny)
    numbers["age"].add_((AGING * ratio.log().abs()).clamp(LEAST_AGING, MOST_AGING))


def descend(oracle: Oracle, state: StochasticMEHAState, steps: int, c: Tensor, batch: Any) -> None:
    """Gradient steps of y and theta from where they begin; their curvatures follow from how gradients change on the way."""
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
                oracle.prox(state.x.value, level.leaves, float(step * c))


def update_metric(square: Leaves, directions: list[Leaves], n: int, whole: bool) -> Leaves:
    """The roots of the mean squares of n directions, of which the last come now; one number for all if ``whole``.

    For leaves that are divided among processes, the parts of this one.
    """
    parts = local(square)
    foreach_mul_(parts, 1 - 1 / n)
    for direction in directions:
        here = local(direction)
        foreach_addcmul_(parts, here, here, 1 / (n * len(directions)))
    roots = list(foreach_sqrt(parts))
    foreach_add_(roots, math.sqrt(torch.finfo(roots[0].dtype).tiny))
    if whole:
        mean = join_norms(list(foreach_norm(roots)), square) / math.sqrt(sum(leaf.numel() for leaf in square))
        return [mean.to(root.dtype).expand_as(root) for root in roots]
    return roots


def slope(gradient: Leaves, old_gradient: Leaves, point: Leaves, old_point: Leaves) -> Tensor:
    """How fast a gradient changes between two points; not zero, and not infinite."""
    tiny = math.sqrt(torch.finfo(gradient[0].dtype).tiny)
    return (distance(gradient, old_gradient) + tiny) / (distance(point, old_point) + tiny)
