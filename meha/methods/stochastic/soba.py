"""SOBA: one stochastic step on x, y and the linear system of the implicit gradient at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meha.method.method import At
from meha.methods.stochastic.frame import SystemMethod, Triple, derivatives, one_batch
from meha.problem.oracle import Oracle


@dataclass(frozen=True, kw_only=True)
class SOBA(SystemMethod):
    """Stochastic bilevel algorithm (Dagréou, Ablin, Vaiter and Moreau 2022).

    On a batch, at once,

        y <- y - beta f_y;    v <- v - eta (f_yy [v] - F_y);    x <- proj_X( x - alpha (F_x - f_xy [v]) ),

    every right-hand side at the old (x, y, v), v = 0 at the start. A step costs 1 gradient of f, 1 of F and 1 Hessian-vector
    product.

    The theory is for f strongly convex in y, Lipschitz derivatives (second ones of F, third ones of f), unbiased derivatives
    of bounded variance, and rates of the order of K^(-1/2) for K steps, or that fall as k^(-1/2).

    Args:
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.

    The paper multiplies v by -1. Without batches, it is :class:`~meha.BAMM` with mu = 0.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> fall = meha.schedules.InversePower(0.3, power=0.5)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8)
    >>> method = meha.stochastic.SOBA(alpha=fall, beta=0.5, eta=0.5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=200)
    >>> print(f"{float(solution.x):.1f}")  # y = x on average, and F wants y = 1
    1.0
    """

    def directions(self, oracle: Oracle, state: Any, at: At) -> tuple[Tensor, Triple]:
        found = derivatives(oracle, state.x, state.y, state.v.leaves, one_batch(self.name, at.batch))
        return found.upper, found.directions
