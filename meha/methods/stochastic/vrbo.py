"""VRBO: recursive estimates of the directions of x and y within a loop of steps on y, which begin afresh on all examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from meha.method.method import At, Numbers, State
from meha.method.optimizers import RunningOptimizer
from meha.methods.stochastic.frame import ImplicitSteps, StepBatches, carry, grouped, on_all, series_direction, used_up, zeros
from meha.problem.oracle import Oracle
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, add_


@dataclass
class VRBOState(State):
    """x and y, and the estimates of their directions there."""

    d_x: Variable
    d_y: Variable
    x_optimizer: RunningOptimizer | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class VRBO(ImplicitSteps):
    """Variance-reduced bilevel optimizer (Yang, Ji and Liang 2021).

    With h(x, y) = F_x - f_xy [v] and the series of :class:`~meha.stochastic.StocBiO` for v, a step is

        d_x = h(x, y),  d_y = f_y(x, y)  on all examples,  where k is a multiple of q
        x <- proj_X( x - alpha d_x ),  and on the batch of the step, T times, and once more without the move of y,
            d_x <- d_x + h(x, y) - h(x', y');    d_y <- d_y + f_y(x, y) - f_y(x', y');    y <- y - beta d_y

    with (x', y') the point before the last move of x or y. A step costs T + 2 gradients of f and of F, and (T + 2) (Q + 1)
    Hessian-vector products. On all examples, there is 1 more of each gradient and Q + 1 products, in one pass with the memory
    of that, which count as those on every group.

    The theory is for f strongly convex in y, Lipschitz second derivatives, constant rates and large batches. In the paper, each
    of the T steps has a batch of its own, and restarts may take a large batch; here it is one batch for the T steps, so that
    its derivatives serve twice, and all examples.

    Args:
        period: q; by default the larger one of the numbers of groups of upper and of lower examples.
        inner_steps: T.
        system_steps: Q.
        alpha, beta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.
        eta: the step of the series; left out, it is chosen like beta.

    Batches are those of ``meha.loaders.Indices(..., groups=True)``, which know all examples. Compiled runs take the steps with
    all examples by themselves.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(2, upper=4, lower=8, groups=True)
    >>> method = meha.stochastic.VRBO(alpha=0.2, beta=0.3, eta=0.5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=100)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    refuses_group: ClassVar[str] = "it restarts on all examples, and each process knows only its own"
    repeats: ClassVar[str] = "it takes differences of derivatives on one batch"

    period: int | None = None
    inner_steps: int = 3
    system_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_count("system_steps", self.system_steps)
        if self.period is not None:
            check_count("period", self.period)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> VRBOState:
        return VRBOState(x, y, zeros(x, "d_x"), zeros(y, "d_y"), **self.optimizers(oracle, x=x))

    def step(self, oracle: Oracle, state: VRBOState, at: At) -> Numbers:
        batch, estimates = grouped(self.name, at.batch), (state.d_x, state.d_y)
        period = self.period or max(batch.groups)
        if at.rare(lambda k: k % period == 0):
            with on_all(oracle, batch) as examples:
                carry(estimates, self.estimates(oracle, state, at, examples)[1:], None)
        upper, *old = self.estimates(oracle, state, at, batch)
        size = self.move_x(oracle, state, at, used_up(state.d_x))
        for t in range(self.inner_steps + 1):
            new = self.estimates(oracle, state, at, batch)[1:]
            carry(estimates, new, tuple(old))
            old = list(new)
            if t < self.inner_steps:  # the last estimates are those at the point that is left for the next step
                add_(state.y.leaves, state.d_y.leaves, -at.beta)
        return {"upper": upper, "d_x": size}

    def estimates(self, oracle: Oracle, state: VRBOState, at: At, batch: Any) -> tuple[Tensor, Leaves, Leaves]:
        """Return F, and the directions of x and y, at the present point."""
        batches = StepBatches(self.name, batch, self.system_steps + 1, "system_steps + 1")
        return series_direction(oracle, state.x, state.y, at.eta, batches, first=0, counted=True)
