"""SUSTAIN: MRBO with a product of a random number of factors in place of the Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meha.method.method import At
from meha.methods.stochastic.frame import UniformDraw
from meha.methods.stochastic.mrbo import MRBO
from meha.tensors.checks import check_count


@dataclass(frozen=True, kw_only=True)
class SUSTAIN(MRBO):
    """Single-timescale double-momentum stochastic approximation (Khanduri et al. 2021).

    The step is that of :class:`~meha.stochastic.MRBO`, with recursive momentum for x and y, and in h = F_x - f_xy [v]

        v = eta (Q + 1) (I - eta f_yy)^q F_y,    q drawn from 0, ..., Q, the same at both points.

    A step costs 2 gradients of f, 2 of F and 2 Q + 2 Hessian-vector products, the first one half; products of the factors
    beyond q are taken, and not used, so that all steps are alike. ``Indices(..., draws=Q + 1)`` as for MRBO.

    The theory is for f strongly convex in y with Lipschitz second derivatives, rates that fall as k^(-1/3), and shares that
    fall as k^(-2/3).

    Args:
        share, system_steps, alpha, beta, eta, x_optimizer: see :class:`~meha.stochastic.MRBO`.
        seed: of q, which is a function of the seed and the number of the step.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=5 + 1)
    >>> fall = meha.schedules.InversePower(0.4, power=1 / 3)
    >>> method = meha.stochastic.SUSTAIN(alpha=fall, beta=fall, eta=0.5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=150)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, least=0)

    def drawn(self, at: At) -> Any:
        return at.of(UniformDraw(self.seed, self.system_steps))
