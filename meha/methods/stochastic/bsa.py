"""BSA: stochastic steps on y, a product of a random number of factors in place of the inverse Hessian, and a step on x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meha.method.method import At
from meha.methods.stochastic.frame import UniformDraw
from meha.methods.stochastic.stocbio import StocBiO
from meha.tensors.checks import check_count


@dataclass(frozen=True, kw_only=True)
class BSA(StocBiO):
    """Bilevel stochastic approximation (Ghadimi and Wang 2018).

        T times:  y <- y - beta f_y
        v = eta (Q + 1) (I - eta f_yy)^q F_y,    q drawn from 0, ..., Q
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    The mean of v over q is the Neumann series of :class:`~meha.stochastic.StocBiO`, with more noise. A step costs T gradients
    of f, 1 of F and Q + 1 Hessian-vector products: those of the factors beyond q are taken, and not used, so that all steps
    are alike. With ``Indices(..., draws=T + Q + 1)``, each of the T steps on y and of the Q factors has a batch of its own,
    and the last one serves for F and f_xy; with any other batch, all take the same.

    The theory is for f strongly convex in y with Lipschitz second derivatives, rates alpha that fall as k^(-1/2), T that
    grows as k^(1/2), and steps beta that fall within the T steps; here T and beta are the same for all of them.

    Args:
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`. T is
            ``inner_steps``.
        system_steps: Q.
        eta: the step of the factors, beta by default.
        seed: of q, which is a function of the seed and the number of the step.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=5 + 5 + 1)
    >>> fall = meha.schedules.InversePower(0.5, power=0.5)
    >>> method = meha.stochastic.BSA(alpha=fall, beta=fall, eta=0.5, inner_steps=5, system_steps=5)
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
