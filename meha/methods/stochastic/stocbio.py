"""StocBiO: stochastic steps on y, a Neumann series on batches of its own, and a step on x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, descend
from meha.methods.stochastic.frame import StepBatches, series_direction
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves


@dataclass(frozen=True, kw_only=True)
class StocBiO(HypergradientMethod):
    """Stochastic bilevel optimizer (Ji, Yang and Liang 2021).

        T times:  y <- y - beta f_y
        r_0 = F_y;    r_j = r_{j-1} - eta f_yy [r_{j-1}],  j = 1, ..., Q;    v = eta (r_0 + ... + r_Q)
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    A step costs T gradients of f, 1 of F and Q + 1 Hessian-vector products. With ``Indices(..., draws=T + Q + 1)``, each
    of the T steps on y and of the Q products has a batch of its own, and the last one serves for F and f_xy; with any other
    batch, all take the same.

    The theory is for f strongly convex in y with Lipschitz second derivatives, constant rates, batches whose size
    falls geometrically along the series, and T and Q of the order of log K; here batches have one size.

    Args:
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`. T is
            ``inner_steps``.
        system_steps: Q.
        eta: the step of the series, beta by default.

    Without draws, it is :class:`~meha.NS`.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=5 + 5 + 1)
    >>> fall = meha.schedules.InversePower(0.5, power=0.5)
    >>> method = meha.stochastic.StocBiO(alpha=fall, beta=fall, eta=0.5, inner_steps=5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=100)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"

    system_steps: int = 10
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("system_steps", self.system_steps)

    def hypergradient(self, oracle: Oracle, state: HypergradientState, at: At) -> tuple[dict[str, Any], Leaves]:
        T, Q = self.inner_steps, self.system_steps
        batches = StepBatches(self.name, at.batch, T + Q + 1, "inner_steps + system_steps + 1")
        for t in range(T):
            descend(oracle, state.x, state.y, 1, at.beta, batches(t))
        step = at.beta if self.eta is None else at.eta
        upper, h, _ = series_direction(oracle, state.x, state.y, step, batches, T, self.drawn(at))
        return {"upper": upper}, h

    def drawn(self, at: At) -> Any:
        """The number of factors of the one product that stands for the series; None for the whole series."""
        return None
