"""FSLA: stochastic steps on y and the linear system, and recursive momentum for the direction of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from meha.method.method import At
from meha.methods.stochastic.frame import (
    CarriedState,
    SystemMethod,
    Triple,
    carry,
    check_share,
    derivatives,
    is_first,
    one_batch,
    used_up,
    zeros,
)
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.variables import Variable, subtract


@dataclass(frozen=True, kw_only=True)
class FSLA(SystemMethod):
    """Fully single-loop algorithm (Li, Gu and Huang 2022).

    With h(x, y, v) = F_x - f_xy [v] on the batch of the step, at once,

        y <- y - beta f_y;    v <- v - eta (f_yy [v] - F_y)
        d <- h(x, y, v) + (1 - share) (d - h(x', y', v'));    x <- proj_X( x - alpha d ),

    with (x', y', v') the point before the last step, and every derivative at the old (x, y, v); the first step has h alone. In
    the paper v moves after y; that all move at once is our reading. A step costs 1 gradient of f, 2 of F (the second in x
    alone, which is not counted where F does not use x) and 2 Hessian-vector products, the first one 1 of each.

    The theory is for f strongly convex in y with Lipschitz second derivatives, and rates and shares that fall as k^(-1/2).

    Args:
        share: of the new direction, a number from above 0 to 1, or a function of k.
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
    >>> method = meha.stochastic.FSLA(alpha=fall, beta=0.5, eta=0.5, share=0.3)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=200)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    repeats: ClassVar[str] = "it takes differences of derivatives on one batch"

    share: Schedule = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> CarriedState:
        v, last_v, d_x = zeros(y, "v"), zeros(y, "v"), zeros(x, "d_x")
        return CarriedState(x, y, v, x.copy(), y.copy(), last_v, d_x, **self.optimizers(oracle, x=x))

    def directions(self, oracle: Oracle, state: CarriedState, at: At) -> tuple[Tensor, Triple]:
        batch = one_batch(self.name, at.batch)
        found = derivatives(oracle, state.x, state.y, state.v.leaves, batch)
        d_x, d_y, d_v = found.directions
        old = None
        if not at.rare(is_first):
            x, y = state.last_x, state.last_y
            _, F_x = oracle.gradient(x, [(1.0, oracle.upper, x, y)], batch)
            (cross,) = oracle.hessian([(1.0, oracle.lower, x, y)], batch)(state.last_v.leaves, x)
            old = (subtract(F_x, cross),)
        carry((state.d_x,), (d_x,), old, at.share)
        state.keep()
        return found.upper, (used_up(state.d_x), d_y, d_v)
