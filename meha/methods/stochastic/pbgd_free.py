"""PBGDFree: penalty-based bilevel gradient descent without the value function of the lower level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meha.analysis.theory import Constants
from meha.method.method import At, Numbers, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer
from meha.methods.frames import SteppingMethod, at_most_one
from meha.methods.parameters import penalty_steps
from meha.methods.stochastic.frame import StepBatches
from meha.problem.oracle import Oracle, Term
from meha.problem.schedules import Schedule, check_schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Variable


@dataclass
class FreeState(State):
    """x and y, and their optimizers."""

    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class PBGDFree(SteppingMethod):
    """Value-function-free penalty-based bilevel gradient descent (Jiang et al. 2025).

    With the weight c_k and s = min(1, 1/c_k),

        T times:  y <- proj_Y( y - beta s (F_y + c_k f_y) )
        x <- proj_X( x - alpha F_x )

    y follows the minimiser of F + c f, as in :class:`~meha.VPBGD` and :class:`~meha.F2SA`. Their direction of x has a further
    part, c (f_x(x, y) - f_x(x, z)) with z the solution of the lower level, which is left out here, and the loop of z with it.
    This is our reading of the paper, of which we know the summary. A step costs T gradients of f and T + 1 of F. With
    ``Indices(..., draws=T + 1)``, every step on y and that on x have batches of their own.

    What is left out is small where F hardly changes with y near the lower solution (the flatness of the paper), and there is a
    bias otherwise. Beyond flatness, the theory is for f strongly convex in y or with the Polyak-Lojasiewicz inequality, and
    constant rates. Where F does not use x, as in the choice of hyper-parameters, x would never move; that is refused.

    Args:
        alpha, beta: step sizes of x and y, numbers or functions of k; those left out are chosen from the problem's constants.
        c: the weight of the lower level, a number or a function of k.
        inner_steps: T.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; they
            take the steps of x and y, instead of alpha and beta.

    The numbers of a step: ``upper`` F and ``d_x`` the norm of F_x, after the steps on y, and ``c``.

    >>> import torch, meha
    >>> data = torch.linspace(0, 2, 8, dtype=torch.float64)
    >>> problem = meha.Problem(  # F has its least value in y at y(x), for all x: it is flat there
    ...     upper=lambda x, y, batch: (x - 3).square().sum() + 0.5 * (y - x).square().sum(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(4, upper=4, lower=8)
    >>> fall = meha.schedules.InversePower(0.5, power=0.5)
    >>> method = meha.stochastic.PBGDFree(alpha=fall, beta=fall, c=10.0)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=300)
    >>> print(f"{float(solution.x):.1f}")
    3.0
    """

    refuses_nonsmooth: ClassVar[str] = "it takes plain gradient steps on the lower level"
    penalties: ClassVar[tuple[str, ...]] = ("c",)

    alpha: Schedule | None = None
    beta: Schedule | None = None
    c: Schedule = 10.0
    inner_steps: int = 1
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule("c", self.c)
        check_count("inner_steps", self.inner_steps)

    def choose(self, constants: Constants) -> dict[str, float]:
        return penalty_steps(constants)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> FreeState:
        return FreeState(x, y, **self.optimizers(oracle, x=x, y=y))

    def step(self, oracle: Oracle, state: FreeState, at: At) -> Numbers:
        x, y, c = state.x, state.y, at.c
        s = at_most_one(c)
        batches = StepBatches(self.name, at.batch, self.inner_steps + 1, "inner_steps + 1")
        terms: list[Term] = [(s, oracle.upper, x, y), (c * s, oracle.lower, x, y)]
        for t in range(self.inner_steps):
            _, d_y = oracle.gradient(y, terms, batches(t))
            self.move_y(oracle, state, at, d_y)
        (upper,), d_x = oracle.gradient(x, [(1.0, oracle.upper, x, y)], batches(batches.last))
        if not oracle.upper_uses_x:  # known since the gradient above
            raise ValueError("x: PBGDFree moves it along F_x, and upper does not depend on x; use VPBGD or F2SA.")
        return {"upper": upper, "d_x": self.move_x(oracle, state, at, d_x), "c": c}
