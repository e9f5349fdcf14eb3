"""BDA: reverse-mode differentiation through steps on a mixture of both levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from meha.analysis.theory import Constants
from meha.method.method import At
from meha.methods.frames import Objective, check_step
from meha.methods.parameters import hypergradient_steps
from meha.methods.rhg import RHG
from meha.problem.oracle import Oracle, Term
from meha.problem.responses import Response
from meha.problem.schedules import InversePower, Schedule, fraction
from meha.tensors.variables import Variable

FALLING = InversePower(0.5, power=1.0)  # falls to 0, as the theory needs; a constant mu leaves a bias


@dataclass(frozen=True, kw_only=True)
class BDA(RHG):
    """Bilevel descent aggregation (Liu et al. 2020): RHG whose lower steps also descend on F, for many lower solutions.

        y_{t+1} = proj_Y( y_t - [ mu_t upper_beta F_y + (1 - mu_t) beta f_y ](x, y_t) ),     t = 0, ..., T-1
        x <- proj_X( x - alpha d/dx F(x, y_T(x)) )

    A step costs T gradients of f, T + 1 of F and T Hessian-vector products (of the mixture).

    Args:
        mu: the weight of F in [0, 1), a number or a function of the inner step t; with 0 the method is RHG. By default
            1/2 / (t+1): the answer tends to the right one as mu falls and T grows, and is biased otherwise.
        upper_beta: the step along F, beta by default.
        alpha, beta, inner_steps, terms, warm_start, keep_graph, x_optimizer: as in :class:`~meha.RHG`.

    >>> import meha
    >>> problem = meha.problems.merely_convex(n=2)
    >>> run = BDA(alpha=0.05, beta=0.1, inner_steps=16, mu=0.1).start(problem, problem.x0, problem.y0)
    >>> for _ in range(500):
    ...     info = run.step()
    >>> run.x
    tensor([1.0000, 1.0000], dtype=torch.float64)
    """

    follows: ClassVar[tuple[type[Response], ...]] = ()

    mu: Schedule = FALLING
    upper_beta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step("upper_beta", self.upper_beta)
        fraction("mu", self.mu, 0)

    def choose(self, constants: Constants) -> dict[str, float]:
        return hypergradient_steps(constants, fraction("mu", self.mu, 0))  # mu falls, so that its first value is the largest

    def objective(self, oracle: Oracle, x: Variable, at: At) -> tuple[Objective, float]:
        beta = at.beta
        upper_beta = beta if self.upper_beta is None else at.upper_beta

        def mixed(t: int, y: Variable) -> list[Term]:
            mu = fraction("mu", self.mu, t)
            terms: list[Any] = [(mu * upper_beta, oracle.upper, x, y), ((1 - mu) * beta, oracle.lower, x, y)]
            # A term of weight 0 would cost a gradient; a traced weight cannot be compared.
            return [term for term in terms if isinstance(term[0], Tensor) or term[0]]

        return mixed, 1.0  # the two step sizes are in the weights
