"""MRBO: directions of x and y with the recursive momentum of STORM, and a Neumann series in place of the linear system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from meha.method.method import At, Numbers, State
from meha.method.optimizers import RunningOptimizer
from meha.methods.stochastic.frame import (
    ImplicitSteps,
    StepBatches,
    carry,
    check_share,
    is_first,
    series_direction,
    used_up,
    zeros,
)
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, add_, copy_


@dataclass
class MomentumState(State):
    """x and y, the point before the last step, and the estimates of the directions there."""

    last_x: Variable
    last_y: Variable
    d_x: Variable
    d_y: Variable
    x_optimizer: RunningOptimizer | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class MRBO(ImplicitSteps):
    """Momentum-based recursive bilevel optimizer (Yang, Ji and Liang 2021).

    With h(x, y) = F_x - f_xy [v] and the series of :class:`~meha.stochastic.StocBiO` for v, on the batch of the step,

        d_x <- h(x, y) + (1 - share) (d_x - h(x', y'));    d_y <- f_y(x, y) + (1 - share) (d_y - f_y(x', y'))
        x <- proj_X( x - alpha d_x ),    y <- y - beta d_y,

    with (x', y') the point before the last step; the first step has h and f_y alone. A step costs 2 gradients of f, 2 of F
    and 2 Q + 2 Hessian-vector products, the first one half. With ``Indices(..., draws=Q + 1)``, each of the Q products has a
    batch of its own, the same at both points, and the last one serves for all else; with any other batch, all take the same.

    The theory is for f strongly convex in y, Lipschitz second derivatives, rates that fall as k^(-1/3), and shares that fall
    as k^(-2/3). In the paper x and y have shares of their own.

    Args:
        share: of the new estimate, a number from above 0 to 1, or a function of k; with 1, there is no momentum.
        system_steps: Q.
        alpha, beta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.
        eta: the step of the series; left out, it is chosen like beta.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=5 + 1)
    >>> fall = meha.schedules.InversePower(0.5, power=1 / 3)
    >>> method = meha.stochastic.MRBO(alpha=fall, beta=fall, eta=0.5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=150)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    repeats: ClassVar[str] = "it takes differences of derivatives on one batch"

    share: Schedule = 0.1
    system_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)
        check_count("system_steps", self.system_steps)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> MomentumState:
        return MomentumState(x, y, x.copy(), y.copy(), zeros(x, "d_x"), zeros(y, "d_y"), **self.optimizers(oracle, x=x))

    def step(self, oracle: Oracle, state: MomentumState, at: At) -> Numbers:
        upper, *new = self.estimates(oracle, state.x, state.y, at)
        old = None if at.rare(is_first) else self.estimates(oracle, state.last_x, state.last_y, at)[1:]
        carry((state.d_x, state.d_y), tuple(new), old, at.share)
        copy_(state.last_x.leaves, state.x.leaves)
        copy_(state.last_y.leaves, state.y.leaves)
        add_(state.y.leaves, state.d_y.leaves, -at.beta)
        return {"upper": upper, "d_x": self.move_x(oracle, state, at, used_up(state.d_x))}

    def estimates(self, oracle: Oracle, x: Variable, y: Variable, at: At) -> tuple[Any, Leaves, Leaves]:
        """Return F, and the directions of x and y, at a point."""
        batches = StepBatches(self.name, at.batch, self.system_steps + 1, "system_steps + 1")
        return series_direction(oracle, x, y, at.eta, batches, 0, self.drawn(at), counted=True)

    def drawn(self, at: At) -> Any:
        """The number of factors of the one product that stands for the series; None for the whole series."""
        return None
