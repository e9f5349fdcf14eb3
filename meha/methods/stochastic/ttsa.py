"""TTSA: one stochastic step on y and one on x, at two time scales."""

from __future__ import annotations

from dataclasses import dataclass

from meha.analysis.theory import Constants
from meha.methods.parameters import CAUTION
from meha.methods.stochastic.bsa import BSA


@dataclass(frozen=True, kw_only=True)
class TTSA(BSA):
    """Two-timescale stochastic approximation (Hong, Wai, Wang and Yang 2020): :class:`~meha.stochastic.BSA` with one step on y.

        y <- y - beta f_y
        v = eta (Q + 1) (I - eta f_yy)^q F_y,    q drawn from 0, ..., Q
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    A step costs T gradients of f, T = 1 by default, 1 of F and Q + 1 Hessian-vector products. ``Indices(..., draws=T + Q + 1)``
    as for BSA.

    The theory is for f strongly convex in y with Lipschitz second derivatives, and two time scales: alpha must fall faster than
    beta, as k^(-3/5) and k^(-2/5). Steps that are left out do not fall.

    Args:
        alpha, beta, inner_steps, system_steps, eta, seed, warm_start, x_optimizer: see :class:`~meha.stochastic.BSA`.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=1 + 5 + 1)
    >>> slow, fast = meha.schedules.InversePower(0.5, power=3 / 5), meha.schedules.InversePower(0.5, power=2 / 5)
    >>> method = meha.stochastic.TTSA(alpha=slow, beta=fast, eta=0.5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=200)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    inner_steps: int = 1

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        return {**steps, "alpha": CAUTION * steps["alpha"]}  # y only follows its solution
