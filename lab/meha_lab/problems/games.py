"""Games of a leader and followers: Cournot competition with a leader, and tolls on a road network."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box, NonNegative, Simplex
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double

__all__ = ["cournot", "cournot_limited", "toll_revenue", "toll_time"]


def cournot(markets: int, followers: int, *, seed: int) -> Blueprint:
    """Cournot game: a leader sells x, followers sell y; the price in market k is a_k - b_k times all sales in it.

    F = minus the leader's profit, with a joint cost ||x||_1^2 / 20; f = the followers' potential, whose minimiser is their
    equilibrium: sum_jk (c_jk - a_k + b_k x_k) y_jk + b_k y_jk^2 / 2 + sum_k b_k (sum_j y_jk)^2 / 2. Both are quadratic.
    """
    a, b, c, own = _markets(np.random.default_rng(seed), markets, followers)
    # In equilibrium, the j followers of a market together sell (j (a - b x) - sum_j c) / (b (j + 1)).
    share = followers / (followers + 1)
    net = (a - own) - (share * a - c.sum(0) / (followers + 1))
    x_star = np.linalg.solve(np.diag(2 * b * (1 - share)) + 0.1, net)  # 0.1: the joint cost couples all markets

    b_, c_, a_ = double(b), double(c), double(a)

    def response(x: Tensor) -> Tensor:
        total = (followers * (a_ - b_ * x) - c_.sum(0)) / (b_ * (followers + 1))
        return (a_ - b_ * (x + total) - c_) / b_

    def build(cast: Cast) -> Problem:
        return _cournot(cast, a, b, c, own, joint=0.05)

    return Blueprint(build=build, x0=np.zeros(markets), y0=np.zeros((followers, markets)), x_star=x_star, response=response)


def cournot_limited(markets: int, followers: int, *, seed: int) -> Blueprint:
    """Cournot game with capacities of the followers: :func:`cournot` without the joint cost, with x >= 0.

    The markets are independent. In each, the leader's profit is a parabola between the sales x at which a follower reaches or
    leaves a bound; the solution is the best peak or end of these pieces.
    """
    rng = np.random.default_rng(seed)
    a, b, c, own = _markets(rng, markets, followers)
    capacity = rng.uniform(0.3, 1.2, size=(followers, markets)) * a / (b * (followers + 2))

    def sales(x: Array, k: int) -> Array:
        return np.array([_equilibrium(a[k] - b[k] * t, b[k], c[:, k], capacity[:, k]) for t in np.atleast_1d(x)])

    def best(k: int) -> float:
        ends = np.unique(np.r_[0.0, a[k] / b[k], _breaks(a[k], b[k], c[:, k], capacity[:, k])])  # a / b: the price is 0
        ends = ends[(ends >= 0) & (ends <= a[k] / b[k])]
        candidates = list(ends)
        for low, high in pairwise(ends):
            y_low, y_high = sales(np.array([low, high]), k).sum(1)
            slope = (y_high - y_low) / (high - low)
            peak = (a[k] - own[k] - b[k] * (y_low - slope * low)) / (2 * b[k] * (1 + slope))
            candidates.append(float(np.clip(peak, low, high)))
        profits = [x * (a[k] - own[k] - b[k] * (x + sales(np.array([x]), k).sum())) for x in candidates]
        return float(candidates[int(np.argmax(profits))])

    def response(x: Tensor) -> Tensor:
        return double(np.stack([sales(x[k : k + 1].numpy(), k)[0] for k in range(markets)], axis=1))

    def build(cast: Cast) -> Problem:
        game = _cournot(cast, a, b, c, own, joint=0.0)
        return replace(game, x_set=NonNegative(), y_set=Box(0.0, cast(capacity)))

    return Blueprint(
        build=build,
        x0=np.zeros(markets),
        y0=np.zeros((followers, markets)),
        x_star=np.array([best(k) for k in range(markets)]),
        response=response,
    )


def toll_time(side: int, *, seed: int, free: int = 0) -> Blueprint:
    """Tolls x in [0, 5] that reduce congestion on a grid of ``side`` by ``side`` blocks.

    The travel time of a road with traffic v is t + s v. Ten travellers choose among the shortest paths, y in a simplex:
    f = sum of t v + s v^2 / 2 + x v over all roads + 0.05 ||y||^2. F = total travel time + 0.05 ||x||^2. The first ``free``
    roads have no toll.
    """
    paths, t, s = _roads(np.random.default_rng(seed), side)
    tolled = np.eye(len(t))[free:]

    def build(cast: Cast) -> Problem:
        paths_, t_, s_, tolled_ = (cast(part) for part in (paths, t, s, tolled))

        def upper(x: Tensor, y: Tensor) -> Tensor:
            v = y @ paths_
            return v @ (t_ + s_ * v) + 0.05 * x.square().sum()

        def lower(x: Tensor, y: Tensor) -> Tensor:
            v = y @ paths_
            return v @ (t_ + 0.5 * s_ * v + x @ tolled_) + 0.05 * y.square().sum()

        return Problem(upper, lower, x_set=Box(0.0, 5.0), y_set=Simplex(10.0))

    return Blueprint(build=build, x0=np.zeros(len(tolled)), y0=np.full(len(paths), 10 / len(paths)))


def toll_revenue(side: int, *, seed: int, tolled: int) -> Blueprint:
    """Tolls that maximise the revenue <x, v> of the last ``tolled`` roads; travellers stay at home if a trip costs too much.

    f is that of :func:`toll_time` for y >= 0, minus the benefit of the trips, 20 q - q^2 / 2 for q = sum y. F = -revenue.
    """
    paths, t, s = _roads(np.random.default_rng(seed), side)
    chosen = np.eye(len(t))[len(t) - tolled :]

    def build(cast: Cast) -> Problem:
        paths_, t_, s_, chosen_ = (cast(part) for part in (paths, t, s, chosen))

        def lower(x: Tensor, y: Tensor) -> Tensor:
            v, q = y @ paths_, y.sum()
            return v @ (t_ + 0.5 * s_ * v + x @ chosen_) + 0.05 * y.square().sum() - 20 * q + 0.5 * q.square()

        return Problem(lambda x, y: -((x @ chosen_) @ (y @ paths_)), lower, x_set=Box(0.0, 20.0), y_set=NonNegative())

    return Blueprint(build=build, x0=np.ones(tolled), y0=np.ones(len(paths)))


def _markets(rng: np.random.Generator, markets: int, followers: int) -> tuple[Array, Array, Array, Array]:
    """Draw the prices at zero sales, their slopes, the costs of the followers and of the leader."""
    a, b = rng.uniform(8, 12, size=markets), rng.uniform(0.5, 2, size=markets)
    return a, b, rng.uniform(1, 3, size=(followers, markets)), rng.uniform(1, 3, size=markets)


def _cournot(cast: Cast, a: Array, b: Array, c: Array, own: Array, joint: float) -> Problem:
    a_, b_, c_, own_ = (cast(part) for part in (a, b, c, own))

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return x @ (own_ - a_ + b_ * (x + y.sum(0))) + joint * x.sum().square()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return ((c_ - a_ + b_ * x) * y + 0.5 * b_ * y.square()).sum() + 0.5 * b_ @ y.sum(0).square()

    return Problem(upper, lower)


def _equilibrium(price: float, b: float, c: Array, capacity: Array) -> Array:
    """Return the fixed point of sales = clip((price - b sum(sales) - c) / b, 0, capacity)."""

    def sales(total: float) -> Array:
        return np.clip((price - c) / b - total, 0, capacity)

    marks = np.unique(np.r_[0.0, capacity.sum(), (price - c) / b, (price - c) / b - capacity])
    marks = marks[(marks >= 0) & (marks <= capacity.sum())]
    excess = np.array([sales(total).sum() - total for total in marks])  # decreasing, and linear between the marks
    i = int(np.flatnonzero(excess >= 0)[-1])
    if i == len(marks) - 1:
        return sales(marks[-1])
    slope = (excess[i + 1] - excess[i]) / (marks[i + 1] - marks[i])
    return sales(marks[i] - excess[i] / slope)


def _breaks(a: float, b: float, c: Array, capacity: Array) -> Array:
    """Return the leader's sales at which a follower just reaches zero or its capacity."""
    sales = []
    for cost, bound in zip(np.r_[c, c], np.r_[np.zeros_like(c), capacity], strict=True):
        # At the price cost + b * bound every follower sells clip((cost - c) / b + bound, 0, capacity).
        total = np.clip((cost - c) / b + bound, 0, capacity).sum()
        sales.append((a - cost - b * bound) / b - total)
    return np.array(sales)


def _roads(rng: np.random.Generator, side: int) -> tuple[Array, Array, Array]:
    """Return the roads that each shortest path uses (a 0-1 matrix), and t and s of the travel times t + s v."""
    blocks = [(i, j) for i in range(side + 1) for j in range(side + 1)]
    names = [((i, j), (i + 1, j)) for i, j in blocks if i < side] + [((i, j), (i, j + 1)) for i, j in blocks if j < side]
    number = {name: k for k, name in enumerate(names)}
    rows = []
    for south in combinations(range(2 * side), side):  # a shortest path goes south side times, in any order
        i = j = 0
        row = np.zeros(len(names))
        for move in range(2 * side):
            after = (i + 1, j) if move in south else (i, j + 1)
            row[number[(i, j), after]] = 1
            i, j = after
        rows.append(row)
    return np.array(rows), rng.uniform(0.5, 2, size=len(names)), rng.uniform(0.05, 0.5, size=len(names))
