"""Problems whose lower level has many solutions, of which the one nearest to y0, or to a point D x, is the response.

Each response is known in closed form (pseudo-inverses, projections), and x follows from it without the methods of this library.
The y that is best for F would fit the upper level directly, and is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from meha.problem.nonsmooth import L1
from meha.problem.problem import Problem
from meha.problem.responses import Nearest
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double
from meha_lab.problems.collected import Region

__all__ = ["FAMILIES"]


Function = Callable[[Tensor], Tensor]

NEWTON_STEPS, HALVINGS, STARTS = 60, 40, 12
GOLDEN = (np.sqrt(5) - 1) / 2


def _newton(value: Function, x0: Array, reach: float) -> Array:
    """Return the lowest minimum of a smooth function that damped Newton steps find from several starts."""
    generator = np.random.default_rng(0)
    starts = [x0, *(x0 + reach * generator.uniform(-1, 1, x0.shape) for _ in range(STARTS))]
    ends = []
    for start in starts:
        x = double(start)
        for _ in range(NEWTON_STEPS):
            slope, bend = jacobian(value, x), hessian(value, x)
            values, vectors = torch.linalg.eigh(bend)
            step = -vectors @ ((vectors.T @ slope) / values.abs().clamp(min=1e-8))  # |curvature|: descent also at saddles
            scale = 1.0
            for _ in range(HALVINGS):
                if value(x + scale * step) <= value(x):
                    break
                scale /= 2
            x = x + scale * step
        ends.append((float(value(x)), x.numpy()))
    return min(ends, key=lambda end: end[0])[1]


def _golden(value: Function, low: float, high: float) -> Array:
    """Return the minimum of a function of one variable on an interval, by a grid and golden-section search."""
    # The grid finds the basin of the global minimum; golden sections alone would end in any basin.
    grid = np.linspace(low, high, 401)
    best = int(np.argmin([float(value(double([x]))) for x in grid]))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(100):
        left, right = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        if value(double([left])) <= value(double([right])):
            b = right
        else:
            a = left
    return np.array([(a + b) / 2])


def _target(t: Array, weight: float, anchor: Array) -> Callable[[Cast], Callable[[Tensor, Tensor], Tensor]]:
    """Return the upper level F = ||y - t||^2 / 2 + weight / 2 ||x - anchor||^2."""

    def make(cast: Cast) -> Callable[[Tensor, Tensor], Tensor]:
        goal, centre = cast(t), cast(anchor)
        return lambda x, y: (y - goal).square().sum() / 2 + weight / 2 * (x - centre).square().sum()

    return make


def _blueprint(
    upper: Callable[[Cast], Callable[[Tensor, Tensor], Tensor]],
    state: Callable[[Cast], Problem],
    response: Function,
    x0: Array,
    y0: Array,
    x_star: Array | None = None,
    reach: float = 2.0,
) -> Blueprint:
    """Return a problem with this response; unless x_star is given, Newton steps on F(x, response(x)) compute it."""
    F = upper(double)
    if x_star is None:
        x_star = _newton(lambda x: F(x, response(x)), x0, reach)
    region = Region((-reach, reach), (-reach, reach))
    return Blueprint(build=state, x0=x0, y0=y0, x_star=x_star, response=response, region=region)


def system(m: int, n: int, k: int, seed: int, *, rank: int | None = None, moving: bool = False) -> Blueprint:
    """f = ||A y - b - B x||^2 / 2 with fewer equations than unknowns, or of low rank; ``moving`` takes the y nearest to D x."""
    random = np.random.default_rng(seed)
    A = random.normal(size=(m, n)) if rank is None else random.normal(size=(m, rank)) @ random.normal(size=(rank, n)) / rank
    b, B, D = random.normal(size=m), random.normal(size=(m, k)), random.normal(size=(n, k)) / 2
    y0, upper = random.normal(size=n) / 2, _target(random.normal(size=n), 0.1, random.normal(size=k))
    inverse = double(np.linalg.pinv(A))

    def state(cast: Cast) -> Problem:
        a, c, d, e = cast(A), cast(b), cast(B), cast(D)
        start = Nearest(start=lambda x: e @ x) if moving else Nearest()
        return Problem(upper(cast), lambda x, y: (a @ y - c - d @ x).square().sum() / 2, response=start)

    def response(x: Tensor) -> Tensor:
        start = double(D) @ x if moving else double(y0)
        return start + inverse @ (double(b) + double(B) @ x - double(A) @ start)  # the shortest correction of the start

    return _blueprint(upper, state, response, np.zeros(k), y0)


def _least(M: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """Return the solution of min ||M y - b|| nearest to ``start``."""
    return start + torch.linalg.pinv(M, rtol=1e-10) @ (b - M @ start)  # rtol: low ranks hold only up to rounding


def scales(m: int, n: int, k: int, seed: int) -> Blueprint:
    """f = ||A diag(exp(S x)) y - b||^2 / 2: x scales groups of features, and so decides which fit is the nearest."""
    random = np.random.default_rng(seed)
    A, b, S = random.normal(size=(m, n)), random.normal(size=m), np.eye(k)[np.arange(n) % k]
    y0, upper = np.zeros(n), _target(random.normal(size=n) / 2, 0.2, np.zeros(k))

    def state(cast: Cast) -> Problem:
        a, c, s = cast(A), cast(b), cast(S)
        return Problem(upper(cast), lambda x, y: (a @ ((s @ x).exp() * y) - c).square().sum() / 2, response=Nearest())

    def response(x: Tensor) -> Tensor:
        return _least(double(A) * (double(S) @ x).exp(), double(b), double(y0))

    return _blueprint(upper, state, response, np.zeros(k), y0, reach=1.0)


def weights(m: int, n: int, rank: int, k: int, seed: int) -> Blueprint:
    """f = sum_i sigmoid(x_group(i)) (a_i y - b_i)^2 / 2, where examples contradict each other and features repeat."""
    random = np.random.default_rng(seed)
    A = random.normal(size=(m, rank)) @ random.normal(size=(rank, n)) / np.sqrt(rank)
    b, S = random.normal(size=m), np.eye(k)[np.arange(m) % k]
    y0, upper = random.normal(size=n) / 2, _target(random.normal(size=n), 0.05, np.zeros(k))

    def state(cast: Cast) -> Problem:
        a, c, s = cast(A), cast(b), cast(S)
        return Problem(upper(cast), lambda x, y: ((s @ x).sigmoid() * (a @ y - c).square()).sum() / 2, response=Nearest())

    def response(x: Tensor) -> Tensor:
        root = (double(S) @ x).sigmoid().sqrt()  # weighted least squares is least squares with rows times roots
        return _least(root[:, None] * double(A), root * double(b), double(y0))

    return _blueprint(upper, state, response, np.zeros(k), y0)


def ridge(m: int, n: int, k: int, seed: int) -> Blueprint:
    """f = ||A y - b||^2 / 2 + sum_j exp(x_j) ||y_j||^2 / 2, with a penalty on the first features only, two for each x."""
    random = np.random.default_rng(seed)
    A, b, S = random.normal(size=(m, n)), random.normal(size=m), np.eye(k).repeat(2, axis=0)
    y0, upper = np.zeros(n), _target(random.normal(size=n) / 2, 0.05, np.ones(k))

    def state(cast: Cast) -> Problem:
        a, c, s = cast(A), cast(b), cast(S)
        return Problem(
            upper(cast),
            lambda x, y: (a @ y - c).square().sum() / 2 + ((s @ x).exp() * y[: 2 * k].square()).sum() / 2,
            response=Nearest(),
        )

    def response(x: Tensor) -> Tensor:
        # The penalty becomes rows of zeros as data, so that one pseudo-inverse gives the nearest solution.
        roots = torch.cat([torch.diag((double(S) @ x / 2).exp()), torch.zeros(2 * k, n - 2 * k, dtype=x.dtype)], 1)
        return _least(torch.cat([double(A), roots]), torch.cat([double(b), torch.zeros(2 * k, dtype=x.dtype)]), double(y0))

    return _blueprint(upper, state, response, np.zeros(k), y0)


def ring(n: int, seed: int) -> Blueprint:
    """f = (||y||^2 - exp(2 x))^2: every point of a sphere is a solution, and the nearest lies on the ray to y0."""
    random = np.random.default_rng(seed)
    y0, upper = random.normal(size=n), _target(1.5 * random.normal(size=n), 0.5, np.array([0.5]))

    def state(cast: Cast) -> Problem:
        return Problem(upper(cast), lambda x, y: (y.square().sum() - (2 * x).exp()).square().sum(), response=Nearest())

    return _blueprint(upper, state, lambda x: x.exp() * double(y0) / double(y0).norm(), np.zeros(1), y0, reach=1.0)


def budget(n: int, seed: int) -> Blueprint:
    """f = (sum(y) - x)^2 on a box: the nearest division of x moves all shares that are not at a bound by the same amount."""
    random = np.random.default_rng(seed)
    y0, upper = random.uniform(0.1, 0.9, n), _target(random.uniform(0, 1, n), 0.02, np.array([0.75 * n]))

    def state(cast: Cast) -> Problem:
        box = Box(0.0, 1.0)
        return Problem(upper(cast), lambda x, y: (y.sum() - x).square().sum(), y_set=box, response=Nearest())

    def response(x: Tensor) -> Tensor:
        low, high = -1.0, 1.0
        for _ in range(100):  # bisection: the sum grows with the common shift
            middle = (low + high) / 2
            low, high = (middle, high) if float((double(y0) + middle).clamp(0, 1).sum()) < float(x) else (low, middle)
        return (double(y0) + (low + high) / 2).clamp(0, 1)

    F = upper(double)
    # The bisection in response has no derivative in x, so Newton steps cannot be used.
    x_star = _golden(lambda x: F(x, response(x)), 0.0, float(n))
    return _blueprint(upper, state, response, np.array([n / 2]), y0, x_star)


def ball(n: int, k: int, seed: int) -> Blueprint:
    """f = max(0, ||y - B x|| - 1)^2: every point of a ball is a solution, and the nearest is the projection of y0."""
    random = np.random.default_rng(seed)
    B, y0 = random.normal(size=(n, k)), 2 * random.normal(size=n)
    upper = _target(-y0 + random.normal(size=n), 0.1, np.zeros(k))

    def state(cast: Cast) -> Problem:
        b = cast(B)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            away = y - b @ x
            return ((away.square().sum() + 1e-12).sqrt() - 1).clamp(min=0).square()  # 1e-12: a derivative at the centre

        return Problem(upper(cast), lower, response=Nearest())

    def response(x: Tensor) -> Tensor:
        centre = double(B) @ x
        away = double(y0) - centre
        return centre + away / away.norm().clamp(min=1.0)

    return _blueprint(upper, state, response, np.zeros(k), y0)


def logits(rows: int, classes: int, k: int, seed: int) -> Blueprint:
    """f = sum_i logsumexp(y_i) - p_i(x) y_i: each row of logits is determined up to a constant that is added to all of them."""
    random = np.random.default_rng(seed)
    B, y0 = random.normal(size=(rows * classes, k)), random.normal(size=rows * classes)
    upper = _target(random.normal(size=rows * classes), 0.1, np.zeros(k))

    def state(cast: Cast) -> Problem:
        b = cast(B)

        def lower(x: Tensor, y: Tensor) -> Tensor:
            shares, rows_of_y = (b @ x).reshape(rows, classes).softmax(1), y.reshape(rows, classes)
            return (rows_of_y.logsumexp(1) - (shares * rows_of_y).sum(1)).sum()

        return Problem(upper(cast), lower, response=Nearest())

    def response(x: Tensor) -> Tensor:
        logs = (double(B) @ x).reshape(rows, classes).log_softmax(1)
        # The constant of each row that brings it nearest to y0 is the mean difference.
        return (logs + (double(y0).reshape(rows, classes) - logs).mean(1, keepdim=True)).reshape(-1)

    return _blueprint(upper, state, response, np.zeros(k), y0)


def copies(n: int, number: int, seed: int) -> Blueprint:
    """f = ||sum of copies of y - b||^2 / 2 and g = exp(x) |y|_1: copies of a feature share its soft-thresholded coefficient."""
    random = np.random.default_rng(seed)
    b, y0 = 2 * random.normal(size=n), np.zeros(n * number)
    t = np.tile(0.5 * b / number, number) + 0.1 * random.normal(size=n * number)
    upper = _target(t, 0.02, np.array([-1.0]))

    def state(cast: Cast) -> Problem:
        c = cast(b)
        return Problem(
            upper(cast),
            lambda x, y: (y.reshape(number, n).sum(0) - c).square().sum() / 2,
            nonsmooth=L1(lambda x: x.exp()),
            response=Nearest(),
        )

    def response(x: Tensor) -> Tensor:
        total = double(b).sign() * (double(b).abs() - x.exp()).clamp(min=0)
        return (total / number).repeat(number)  # equal shares are the nearest to y0 = 0

    F = upper(double)
    x_star = _golden(lambda x: F(x, response(x)), -4.0, 2.0)
    return _blueprint(upper, state, response, np.array([-2.0]), y0, x_star)


FAMILIES: dict[str, dict[str, Callable[[], Blueprint]]] = {
    "open systems": {
        "3 equations, 8 unknowns, nearest": partial(system, 3, 8, 2, seed=0),
        "8 equations, 30 unknowns, nearest": partial(system, 8, 30, 4, seed=1),
    },
    "low rank": {
        "12 equations of rank 4, nearest": partial(system, 12, 8, 2, seed=2, rank=4),
        "30 equations of rank 9, nearest to D x": partial(system, 30, 20, 3, seed=3, rank=9, moving=True),
    },
    "feature scales": {
        "scales of 9 features": partial(scales, 4, 9, 1, seed=4),
        "scales of 25 features": partial(scales, 10, 25, 3, seed=5),
    },
    "weights of contradicting examples": {
        "weights, 8 examples": partial(weights, 8, 10, 3, 2, seed=6),
        "weights, 15 examples": partial(weights, 15, 20, 5, 3, seed=7),
    },
    "ridge on a part": {
        "ridge on 2 of 12": partial(ridge, 5, 12, 1, seed=8),
        "ridge on 4 of 20": partial(ridge, 8, 20, 2, seed=9),
    },
    "rays": {"ray to a ring": partial(ring, 2, seed=10), "ray to a sphere": partial(ring, 6, seed=11)},
    "nearest budgets": {
        "nearest budget, 4 shares": partial(budget, 4, seed=12),
        "nearest budget, 10 shares": partial(budget, 10, seed=13),
    },
    "nearest in a ball": {
        "nearest in a ball, 3 of y": partial(ball, 3, 1, seed=14),
        "nearest in a ball, 8 of y": partial(ball, 8, 2, seed=15),
    },
    "logits": {"logits, 4 classes": partial(logits, 1, 4, 2, seed=16), "logits, 3 rows": partial(logits, 3, 4, 3, seed=17)},
    "copies": {"2 copies, 3 features": partial(copies, 3, 2, seed=18), "3 copies, 5 features": partial(copies, 5, 3, seed=19)},
}
