"""Algorithm 1 with many choices of its six numbers at once, one in each row of x, y and theta, for random searches.

A row takes the steps of meha.MEHA with its numbers (tests/test_automatic_table.py compares them), but 200 rows take little
longer than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from meha.problem.nonsmooth import L1, ElasticNet, GroupL2, NonSmooth
from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet

__all__ = ["run_rows"]


FAR = 1e8
"""A row whose (x, y) is longer has diverged."""


def run_rows(problem: Problem, x0: Tensor, y0: Tensor, numbers: Mapping[str, Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """x and y of every row after ``steps`` steps from one start; NaN where (x, y) was not finite, or longer than FAR.

    Args:
        problem: without batches; x and y are tensors, and g, if there is one, is L1, ElasticNet or GroupL2.
        numbers: alpha, beta, eta, gamma, c and p, a vector each.
    """
    algorithm, count = Algorithm(problem), len(numbers["c"])
    x, y = (z.expand(count, *z.shape).clone() for z in (x0, y0))
    theta, rows = y.clone(), torch.arange(count)
    x_end, y_end = torch.full_like(x, math.nan), torch.full_like(y, math.nan)
    for k in range(steps):
        alpha, beta, eta, gamma, c, p = (numbers[name][rows] for name in ("alpha", "beta", "eta", "gamma", "c", "p"))
        x, y, theta = algorithm.step(x, y, theta, alpha, beta, eta, gamma, c * (k + 1) ** p)
        if k % 10 == 0 or k == steps - 1:
            near = torch.hypot(x.flatten(1).norm(dim=1), y.flatten(1).norm(dim=1)) < FAR
            x, y, theta, rows = x[near], y[near], theta[near], rows[near]
            if not len(rows):
                break
    x_end[rows], y_end[rows] = x, y
    return x_end, y_end


class Algorithm:
    """The step of :class:`meha.MEHA` on rows."""

    def __init__(self, problem: Problem) -> None:
        self.F, self.f, self.g = vmap(problem.upper), vmap(problem.lower), Term(problem.nonsmooth)
        self.project_x, self.project_y = _projection(problem.x_set), _projection(problem.y_set)

    def step(
        self,
        x: Tensor,
        y: Tensor,
        theta: Tensor,
        alpha: Tensor,
        beta: Tensor,
        eta: Tensor,
        gamma: Tensor,
        c: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        F, f, g = self.F, self.f, self.g
        d = _gradient(lambda z: f(x, z).sum(), theta) + (theta - y) / _along(gamma, y)
        theta = self.project_y(g.prox(x, theta - _along(eta, y) * d, eta))

        d = _gradient(lambda z: (F(z, y) / c + f(z, y) - f(z, theta)).sum() + g.sum(z, y) - g.sum(z, theta), x)
        x = self.project_x(x - _along(alpha, x) * d)

        d = _gradient(lambda z: (F(x, z) / c + f(x, z)).sum(), y) - (y - theta) / _along(gamma, y)
        y = self.project_y(g.prox(x, y - _along(beta, y) * d, beta))
        return x, y, theta


class Term:
    """g on rows: the library's term on a y that holds them all, with the weights that each row's x gives."""

    def __init__(self, g: NonSmooth | None) -> None:
        if type(g) not in (type(None), L1, ElasticNet, GroupL2):
            raise TypeError(f"nonsmooth: rows take L1, ElasticNet or GroupL2, got {type(g).__name__}.")
        self.g = g

    def sum(self, x: Tensor, y: Tensor) -> Tensor | float:
        """The sum of g over the rows."""
        return 0.0 if self.g is None else self._wide(x, y).value_leaves(None, [y])

    def prox(self, x: Tensor, y: Tensor, step: Tensor) -> Tensor:
        """The proximal map of each row, with its own step."""
        if self.g is None:
            return y
        steps: Any = step.repeat_interleave(self.g.count) if isinstance(self.g, GroupL2) else _along(step, y)
        return self._wide(x, y).prox_leaves(None, [y], steps)[0]

    def _wide(self, x: Tensor, y: Tensor) -> NonSmooth:
        def weights(weight: Any) -> Tensor:
            found = vmap(weight)(x) if callable(weight) else y.new_full((len(y),), weight)
            return found.reshape(len(y), *[1] * (y.ndim - found.ndim), *found.shape[1:])

        g = self.g
        if isinstance(g, GroupL2):
            return GroupL2([*g.groups] * len(y), weights(g.weight).expand(len(y), g.count).reshape(-1))
        if isinstance(g, ElasticNet):
            return ElasticNet(weights(g.l1), weights(g.l2))
        assert isinstance(g, L1)
        return L1(weights(g.weight))


def _projection(domain: ConvexSet | None) -> Callable[[Tensor], Tensor]:
    if domain is None:
        return lambda z: z
    return vmap(lambda z: domain.project_leaves([z])[0])


def _gradient(total: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a sum over rows, which is that of each row."""
    at = at.detach().requires_grad_()
    (found,) = torch.autograd.grad(total(at), at, allow_unused=True)
    return torch.zeros_like(at) if found is None else found


def _along(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each row."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))
