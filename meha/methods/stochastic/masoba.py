"""MASOBA: SOBA with a moving average of the direction of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meha.method.method import At
from meha.methods.stochastic.frame import (
    SystemMethod,
    SystemState,
    Triple,
    check_share,
    derivatives,
    one_batch,
    used_up,
    zeros,
)
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.variables import Variable, copy_


@dataclass
class MASOBAState(SystemState):
    """Besides x, y and v: the average of the directions of x."""

    average: Variable


@dataclass(frozen=True, kw_only=True)
class MASOBA(SystemMethod):
    """Moving-average SOBA (Chen, Xiao and Balasubramanian 2023).

    On a batch, at once, with h the average of the directions of x, 0 at the start,

        y <- y - beta f_y;    v <- v - eta (f_yy [v] - F_y)
        h <- (1 - share) h + share (F_x - f_xy [v]);    x <- proj_X( x - alpha h ),

    every derivative at the old (x, y, v). The paper moves x along the h of the step before; here, its own direction is
    part of it. A step costs 1 gradient of f, 1 of F and 1 Hessian-vector product.

    The theory is that of :class:`~meha.stochastic.SOBA`, with fewer assumptions: second derivatives of F and third
    derivatives of f need not be Lipschitz. Rates and share are constant and of the order of K^(-1/2) for K steps.

    Args:
        share: the weight of the new direction, a number from above 0 to 1, or a function of k.
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> fall = meha.schedules.InversePower(0.3, power=0.5)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8)
    >>> method = meha.stochastic.MASOBA(alpha=fall, beta=0.5, eta=0.5, share=0.3)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=200)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    share: Schedule = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> MASOBAState:
        return MASOBAState(x, y, zeros(y, "v"), zeros(x, "average"), **self.optimizers(oracle, x=x))

    def directions(self, oracle: Oracle, state: MASOBAState, at: At) -> tuple[Tensor, Triple]:
        found = derivatives(oracle, state.x, state.y, state.v.leaves, one_batch(self.name, at.batch))
        d_x, d_y, d_v = found.directions
        share: Any = at.share
        average = state.average.leaves
        copy_(average, [(1 - share) * a + share * d for a, d in zip(average, d_x, strict=True)])
        return found.upper, (used_up(state.average), d_y, d_v)
