"""Problems that learn regularisation or data weights: f is a training loss, F a validation loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from meha.problem.nonsmooth import L1, ElasticNet, GroupL2, NonSmooth
from meha.problem.problem import Problem
from meha.problem.sets import Box, NonNegative, Simplex
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double

__all__ = ["coreset", "elastic_net", "group_lasso_gaussian", "lasso_weight", "logistic", "reweighting", "ridge", "softmax"]


def ridge(p: int, n: int, *, seed: int, each: bool = False, bounds: float | None = 6.0, noise: float = 1.0) -> Blueprint:
    """F = validation loss, f = training loss + sum_i exp(x_i) y_i^2 / 2, losses ||A y - b||^2 / (2 n), |x_i| <= bounds.

    x is one log-weight for all features, or one per feature if ``each``; then the weights of useless features go to their upper
    bound, or to infinity if there is none.
    """
    (A, b), (A2, b2) = _linear_data(np.random.default_rng(seed), p, n, noise)

    def build(cast: Cast) -> Problem:
        A_, b_, A2_, b2_ = (cast(part) for part in (A, b, A2, b2))
        return Problem(
            upper=lambda x, y: (A2_ @ y - b2_).square().mean() / 2,
            lower=lambda x, y: (A_ @ y - b_).square().mean() / 2 + 0.5 * (x.exp() * y.square()).sum(),
            x_set=None if bounds is None else Box(-bounds, bounds),
        )

    gram, right = double(A.T @ A / n), double(A.T @ b / n)

    def response(x: Tensor) -> Tensor:
        root = torch.exp(-x / 2).expand(p)  # of the inverse weights, which stay finite as weights go to infinity
        scaled = root[:, None] * gram * root + torch.eye(p, dtype=x.dtype)
        return root * torch.linalg.solve(scaled, root * right)

    return Blueprint(
        build=build, x0=np.zeros(p if each else 1), y0=np.zeros(p), response=response, measure="excess" if each else "distance"
    )


def logistic(p: int, n: int, *, seed: int, each: bool = False, bounds: float = 6.0) -> Blueprint:
    """Logistic regression: :func:`ridge` with the logistic loss and labels in {-1, 1}."""
    (A, b), (A2, b2) = _signs(*_linear_data(np.random.default_rng(seed), p, n, 1.0))

    def build(cast: Cast) -> Problem:
        margin, margin2 = cast(A * b[:, None]), cast(A2 * b2[:, None])
        return Problem(
            upper=lambda x, y: softplus(-(margin2 @ y)).mean(),
            lower=lambda x, y: softplus(-(margin @ y)).mean() + 0.5 * (x.exp() * y.square()).sum(),
            x_set=Box(-bounds, bounds),
        )

    return Blueprint(build=build, x0=np.zeros(p if each else 1), y0=np.zeros(p), measure="excess" if each else "distance")


def softmax(p: int, n: int, classes: int, *, seed: int, each: bool = False, bounds: float = 6.0) -> Blueprint:
    """Softmax regression: :func:`ridge` with cross entropy and y of shape (p, classes); one weight per class if ``each``."""
    rng = np.random.default_rng(seed)
    A, A2, truth = rng.normal(size=(n, p)), rng.normal(size=(n, p)), rng.normal(size=(p, classes)) * (np.arange(p) < 4)[:, None]
    b, b2 = ((a @ truth + rng.gumbel(size=(n, classes))).argmax(1) for a in (A, A2))  # draws from the softmax

    def build(cast: Cast) -> Problem:
        A_, A2_ = cast(A), cast(A2)
        b_, b2_ = (torch.as_tensor(labels, device=A_.device) for labels in (b, b2))
        return Problem(
            upper=lambda x, y: cross_entropy(A2_ @ y, b2_),
            lower=lambda x, y: cross_entropy(A_ @ y, b_) + 0.5 * (x.exp() * y.square()).sum(),
            x_set=Box(-bounds, bounds),
        )

    return Blueprint(build=build, x0=np.zeros(classes if each else 1), y0=np.zeros((p, classes)))


def elastic_net(p: int, n: int, *, seed: int, form: Literal["direct", "log"]) -> Blueprint:
    """Elastic net: F and f as in :func:`ridge` without the penalty, g = w ||y||_1 + v ||y||^2 / 2.

    x = (w, v) >= 0 (``form="direct"``), or x = (log w, log v) in [-8, 2]^2 (``"log"``).
    """
    (A, b), (A2, b2) = _linear_data(np.random.default_rng(seed), p, n, 1.0)

    def weight(i: int) -> Callable[[Tensor], Tensor]:
        return (lambda x: x[i]) if form == "direct" else (lambda x: x[i].exp())

    x0 = np.full(2, 0.01 if form == "direct" else -4.0)
    domain = NonNegative() if form == "direct" else Box(-8.0, 2.0)
    return Blueprint(build=_penalised(A, b, A2, b2, ElasticNet(weight(0), weight(1)), domain), x0=x0, y0=np.zeros(p))


def lasso_weight(p: int, n: int, *, seed: int, form: Literal["direct", "log"], each: bool = False) -> Blueprint:
    """Lasso: F and f as in :func:`ridge` without the penalty, g = w ||y||_1, or sum_i w_i |y_i| if ``each``.

    x = w in [0, 2] (``form="direct"``), or x = log w in [-8, 2] (``"log"``).
    """
    (A, b), (A2, b2) = _linear_data(np.random.default_rng(seed), p, n, 1.0)
    g = L1(lambda x: x) if form == "direct" else L1(lambda x: x.exp())
    domain = Box(0.0, 2.0) if form == "direct" else Box(-8.0, 2.0)
    x0 = np.full(p if each else 1, 0.01 if form == "direct" else -4.0)
    return Blueprint(build=_penalised(A, b, A2, b2, g, domain), x0=x0, y0=np.zeros(p), measure="excess" if each else "distance")


def group_lasso_gaussian(groups: int, size: int, n: int, *, seed: int) -> Blueprint:
    """Group lasso: F and f as in :func:`ridge` without the penalty, g = sum_j x_j ||y^(j)||, x >= 0.

    Every second group is useless. If a group is zero, any larger weight is optimal too.
    """
    p = groups * size
    (A, b), (A2, b2) = _linear_data(np.random.default_rng(seed), p, n, 1.0, useful=np.repeat(np.arange(groups) % 2 == 0, size))
    build = _penalised(A, b, A2, b2, GroupL2([size] * groups, weight=lambda x: x), NonNegative())
    return Blueprint(build=build, x0=np.full(groups, 0.01), y0=np.zeros(p), measure="excess")  # excess: x is not unique


def coreset(n: int, p: int, *, seed: int) -> Blueprint:
    """F = loss on clean data, f = sum_i x_i (<a_i, y> - b_i)^2 / 2 + 0.01 ||y||^2 / 2 with x in the simplex of n examples.

    A third of the labels are wrong. The weights are not unique.
    """
    A, b, A2, b2 = _spoiled(np.random.default_rng(seed), n, p)

    def build(cast: Cast) -> Problem:
        A_, b_, A2_, b2_ = (cast(part) for part in (A, b, A2, b2))
        return Problem(
            upper=lambda x, y: (A2_ @ y - b2_).square().mean() / 2,
            lower=lambda x, y: 0.5 * x @ (A_ @ y - b_).square() + 0.005 * y.square().sum(),
            x_set=Simplex(),
        )

    A_, b_ = double(A), double(b)

    def response(x: Tensor) -> Tensor:
        return torch.linalg.solve(A_.T @ (x[:, None] * A_) + 0.01 * torch.eye(p, dtype=x.dtype), A_.T @ (x * b_))

    return Blueprint(build=build, x0=np.full(n, 1 / n), y0=np.zeros(p), response=response, measure="excess")


def reweighting(n: int, p: int, *, seed: int) -> Blueprint:
    """F = logistic loss on clean data, f = mean of x_i times the logistic loss + 0.1 ||y||^2 / 2 with x in [0, 1]^n.

    A third of the labels are wrong. The weights are not unique.
    """
    A, b, A2, b2 = _spoiled(np.random.default_rng(seed), n, p)

    def build(cast: Cast) -> Problem:
        margin, margin2 = cast(A * np.sign(b)[:, None]), cast(A2 * np.sign(b2)[:, None])
        return Problem(
            upper=lambda x, y: softplus(-(margin2 @ y)).mean(),
            lower=lambda x, y: (x * softplus(-(margin @ y))).mean() + 0.05 * y.square().sum(),
            x_set=Box(0.0, 1.0),
        )

    return Blueprint(build=build, x0=np.full(n, 0.5), y0=np.zeros(p), measure="excess")  # excess: x is not unique


def _penalised(A: Array, b: Array, A2: Array, b2: Array, g: NonSmooth, domain: Box | NonNegative) -> Callable[[Cast], Problem]:
    """Return the function that builds a least-squares problem with the penalty g."""

    def build(cast: Cast) -> Problem:
        A_, b_, A2_, b2_ = (cast(part) for part in (A, b, A2, b2))
        return Problem(
            upper=lambda x, y: (A2_ @ y - b2_).square().mean() / 2,
            lower=lambda x, y: (A_ @ y - b_).square().mean() / 2,
            nonsmooth=g,
            x_set=domain,
        )

    return build


def _linear_data(
    rng: np.random.Generator, p: int, n: int, noise: float, useful: Array | None = None
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Draw training and validation data of n rows each: b = A v + noise; a third of v (or ``useful``) is not 0."""
    v = rng.normal(size=p) * (np.arange(p) % 3 == 0 if useful is None else useful)
    A = rng.normal(size=(2 * n, p))
    b = A @ v + noise * rng.normal(size=2 * n)
    return (A[:n], b[:n]), (A[n:], b[n:])


def _signs(train: tuple[Array, Array], validation: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return (train[0], np.sign(train[1])), (validation[0], np.sign(validation[1]))


def _spoiled(rng: np.random.Generator, n: int, p: int) -> tuple[Array, Array, Array, Array]:
    """Draw n training rows, the first third with labels of the wrong sign, and 3 n clean rows."""
    v = rng.normal(size=p)
    A, A2 = rng.normal(size=(n, p)), rng.normal(size=(3 * n, p))
    b, b2 = (a @ v + 0.3 * rng.normal(size=len(a)) for a in (A, A2))
    return A, b * np.where(np.arange(n) < n // 3, -1, 1), A2, b2
