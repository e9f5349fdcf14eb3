"""Base class for methods that penalise f(x, y) - f(x, z), while z follows the solutions of the lower level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from meha._checks import check_count
from meha._leaves import Leaves
from meha._oracle import Oracle, Term
from meha._running import At
from meha._variables import Variable
from meha.methods._base import Method, State
from meha.methods._inner import descend
from meha.methods._moves import check_step, move
from meha.methods._optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods._parameters import complete, penalty_steps
from meha.schedules import Schedule
from meha.theory import Constants

__all__ = ["PenaltyMethod", "PenaltyState", "at_most_one", "gap_terms"]


@dataclass
class PenaltyState(State):
    """x, y, the auxiliary z that follows argmin f(x, .), and optimizers."""

    z: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class PenaltyMethod(Method):
    """First-order methods for min F(x, y) subject to f(x, y) <= min_z f(x, z).

    Args:
        alpha, beta, eta: step sizes of x, y and z, numbers or functions of k; those left out are chosen from the problem's
            constants.
        inner_steps: T, the steps on z.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; they
            take the steps of x and y, instead of alpha and beta.

    The numbers of a step, at the point (x, y) where x begins to move: ``upper`` F, ``lower`` f, ``gap`` f(x, y) - f(x, z),
    ``d_x`` the norm of the x-direction, ``c`` the weight of the gap.
    """

    refuses_nonsmooth: ClassVar[str] = "it takes plain gradient steps on the lower level"

    alpha: Schedule | None = None
    beta: Schedule | None = None
    eta: Schedule | None = None
    inner_steps: int = 10
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        check_step("alpha", self.alpha, "x_optimizer", self.x_optimizer)
        check_step("beta", self.beta, "y_optimizer", self.y_optimizer)
        check_step("eta", self.eta)
        check_count("inner_steps", self.inner_steps)

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        return complete(self, ("alpha", "beta", "eta"), self.choose, oracle, x, y, batch)

    def choose(self, constants: Constants) -> dict[str, float]:
        """Step sizes for a problem with these constants."""
        return penalty_steps(constants)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> PenaltyState:
        return PenaltyState(
            x,
            y,
            z=y.copy(),
            x_optimizer=build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem),
            y_optimizer=build_optimizer("y_optimizer", self.y_optimizer, y, oracle.problem),
        )

    def follow(self, oracle: Oracle, state: PenaltyState, at: At, steps: int | None = None) -> None:
        """Move z by ``steps`` steps on the lower level, T by default."""
        descend(oracle, state.x, state.z, steps or self.inner_steps, at.eta, at.batch)

    def move_x(self, oracle: Oracle, state: PenaltyState, at: At, direction: Leaves) -> Tensor:
        """Set x <- proj_X(x - alpha * direction), and return the norm of the direction."""
        return move(state.x, direction, at.alpha, oracle.project, state.x.value, state.x_optimizer)[0]

    def move_y(self, oracle: Oracle, state: PenaltyState, at: At, direction: Leaves) -> None:
        """Set y <- proj_Y(y - beta * direction)."""
        move(state.y, direction, at.beta, oracle.prox, state.x.value, state.y_optimizer)


def at_most_one(c: Any) -> Any:
    """The factor that scales the weights 1 and c so that the larger one is at most 1."""
    return 1 / (c.clamp(min=1.0) if isinstance(c, Tensor) else max(1.0, c))  # a tensor where the step is traced


def gap_terms(oracle: Oracle, state: PenaltyState, upper: float, gap: float) -> list[Term]:
    """The terms of upper * F(x, y) + gap * (f(x, y) - f(x, z))."""
    x, y, z = state.x, state.y, state.z
    return [(upper, oracle.upper, x, y), (gap, oracle.lower, x, y), (-gap, oracle.lower, x, z)]
