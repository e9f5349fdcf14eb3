"""AmIGO: stochastic steps on y, then on the linear system, both from where they were, and a step on x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha.method.method import At
from meha.methods.frames import HypergradientMethod, descend
from meha.methods.stochastic.frame import StepBatches, SystemState, zeros
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, add_, subtract


@dataclass(frozen=True, kw_only=True)
class AmIGO(HypergradientMethod):
    """Amortized implicit gradient optimization (Arbel and Mairal 2022).

        T times:  y <- y - beta f_y
        Q times:  v <- v - eta (f_yy [v] - F_y)
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    v continues from its last point, 0 at the start. A step costs T gradients of f, 1 of F and Q + 1 Hessian-vector products.
    With ``Indices(..., draws=T + Q + 1)``, each of the T steps on y and of the Q products has a batch of its own, and the
    last one serves for F and f_xy; with any other batch, all take the same.

    The theory is for f strongly convex in y with Lipschitz second derivatives, constant rates, and numbers of steps of
    the order of the condition number of f; the paper also gives F and f_xy larger batches.

    Args:
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`. T is
            ``inner_steps``.
        system_steps: Q.
        eta: the step for the linear system, a number or a function of k; left out, it is chosen like beta.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8, draws=5 + 5 + 1)
    >>> fall = meha.schedules.InversePower(0.5, power=0.5)
    >>> method = meha.stochastic.AmIGO(alpha=fall, beta=0.5, eta=0.5, inner_steps=5, system_steps=5)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=100)
    >>> print(f"{float(solution.x):.1f}")
    1.0
    """

    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"
    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eta")

    system_steps: int = 10
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("system_steps", self.system_steps)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> Any:
        start = None if self.warm_start else y.copy()
        return SystemState(x, y, zeros(y, "v"), **self.optimizers(oracle, x=x), start=start)

    def hypergradient(self, oracle: Oracle, state: SystemState, at: At) -> tuple[dict[str, Any], Leaves]:
        x, y, v = state.x, state.y, state.v.leaves
        T, Q = self.inner_steps, self.system_steps
        batches = StepBatches(self.name, at.batch, T + Q + 1, "inner_steps + system_steps + 1")
        for t in range(T):
            descend(oracle, x, y, 1, at.beta, batches(t))
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batches(batches.last))
        hessian = batches.hessians(oracle, x, y)
        for j in range(T, T + Q):
            (image,) = hessian(j)(v, y)
            add_(v, subtract(image, F_y), -at.eta)
        (cross,) = hessian(batches.last)(v, x)
        return {"upper": upper}, subtract(F_x, cross)
