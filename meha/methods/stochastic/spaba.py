"""SPABA: recursive estimates of the directions of SOBA, which begin afresh on all examples by the toss of a coin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meha.methods.stochastic.frame import RestartedMethod, check_share, uniform
from meha.tensors.checks import check_count


@dataclass(frozen=True, kw_only=True)
class SPABA(RestartedMethod):
    """Single-loop probabilistic average bilevel algorithm (Chu, Xu, Yao and Zhang 2024): SOBA with the estimator of PAGE.

    With D(x, y, v) = (F_x - f_xy [v], f_y, f_yy [v] - F_y), and a coin that decides in each step after the first,

        d = D(x, y, v) on all examples                        with the probability p, and at the start
        d <- d + D(x, y, v) - D(x', y', v')                   otherwise, both on the batch of the step
        x <- proj_X( x - alpha d_x ),    y <- y - beta d_y,    v <- v - eta d_v,

    with (x', y', v') the point before the last step. A step costs 2 gradients of f, 2 of F and 2 Hessian-vector products. One
    on all examples takes the derivatives of all of them in one pass, with the memory of that, and counts as one on every
    group: n_f gradients of f, n_F of F and n_f products, for n_F and n_f groups of upper and of lower examples.

    The theory is for f strongly convex in y with Lipschitz second derivatives, derivatives on examples that are Lipschitz on
    average, and constant rates. For examples without end it takes large batches instead of all, which is not offered here.

    Args:
        probability: p; by default 1 / (1 + n) with n the larger one of n_F and n_f, as for PAGE.
        seed: of the coin, which is a function of the seed and the number of the step: a resumed run needs no more.
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.

    Batches are those of ``meha.loaders.Indices(..., groups=True)``, which know all examples. Compiled runs take the steps on
    all examples by themselves. The state has 2 dim x + 5 dim y numbers besides x and y.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(2, upper=4, lower=8, groups=True)
    >>> method = meha.stochastic.SPABA(alpha=0.2, beta=0.3, eta=0.3)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=300)
    >>> print(f"{float(solution.x):.3f}")
    1.000
    """

    probability: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, least=0)
        if self.probability is not None:
            check_share("probability", self.probability)

    def restarts(self, groups: int) -> Callable[[int], bool]:
        probability = self.probability or 1 / (1 + groups)
        return lambda k: k == 0 or uniform(self.seed, k) < probability
