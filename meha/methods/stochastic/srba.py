"""SRBA: recursive estimates of the directions of SOBA, which begin afresh on all examples after a fixed number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meha.methods.stochastic.frame import RestartedMethod
from meha.tensors.checks import check_count


@dataclass(frozen=True, kw_only=True)
class SRBA(RestartedMethod):
    """Stochastic recursive bilevel algorithm (Dagréou, Moreau, Vaiter and Ablin 2023): SOBA with the recursion of SARAH.

    With D(x, y, v) = (F_x - f_xy [v], f_y, f_yy [v] - F_y), on all examples in the steps 0, q, 2 q, ..., and on a batch
    in the others,

        d = D(x, y, v)                                        where k is a multiple of q
        d <- d + D(x, y, v) - D(x', y', v')                   elsewhere, both on the batch of the step
        x <- proj_X( x - alpha d_x ),    y <- y - beta d_y,    v <- v - eta d_v,

    with (x', y', v') the point before the last step. A step costs 2 gradients of f, 2 of F and 2 Hessian-vector products. One
    on all examples takes the derivatives of all of them in one pass, with the memory of that, and counts as one on every
    group: n_f gradients of f, n_F of F and n_f products, for n_F and n_f groups of upper and of lower examples.

    The theory is for f strongly convex in y, Lipschitz derivatives (second ones of F, third ones of f), constant rates, and a
    period of the order of the number of groups. It keeps v in a ball, which is left out here.

    Args:
        period: q; by default the larger one of n_F and n_f, so that restarts cost as much as half of the other steps.
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
    >>> method = meha.stochastic.SRBA(alpha=0.2, beta=0.3, eta=0.3)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=300)
    >>> print(f"{float(solution.x):.6f}")
    1.000000
    """

    period: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period is not None:
            check_count("period", self.period)

    def restarts(self, groups: int) -> Callable[[int], bool]:
        period = self.period or groups
        return lambda k: k % period == 0
