"""What the methods share that take steps on y and then move x along an estimate of the hypergradient d/dx F(x, y(x))."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from meha._checks import check_count
from meha._oracle import Oracle
from meha._variables import Leaves, Variable
from meha.methods._base import Method, Numbers, State
from meha.methods._moves import check_step, move
from meha.methods._optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods._parameters import hypergradient_steps
from meha.schedules import Schedule, evaluate
from meha.theory import Constants

__all__ = ["HypergradientMethod", "HypergradientState"]


@dataclass
class HypergradientState(State):
    """x, y and the optimizer of x."""

    x_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class HypergradientMethod(Method):
    """Each step: lower steps on y, an estimate h of the hypergradient, x <- proj_X(x - alpha h).

    Args:
        alpha, beta: step sizes of x and of y, numbers or functions of k; chosen from the problem's constants when left out.
        inner_steps: T, the steps on y.
        warm_start: whether they begin where the last ones ended, or at y0 every time.
        x_optimizer: a factory such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; it takes the step of
            x, instead of alpha.

    The numbers of a step: ``upper`` F(x, y_T) before x moves, ``d_x`` the norm of h.
    """

    refuses_nonsmooth: ClassVar[str] = "it differentiates the lower level twice"

    alpha: Schedule | None = None
    beta: Schedule | None = None
    inner_steps: int = 10
    warm_start: bool = True
    x_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        check_step("alpha", self.alpha, "x_optimizer", self.x_optimizer)
        check_step("beta", self.beta)
        check_count("inner_steps", self.inner_steps)

    def choose(self, constants: Constants) -> dict[str, float]:
        return hypergradient_steps(constants)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> HypergradientState:
        optimizer = build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem)
        return HypergradientState(x, y, optimizer, start=None if self.warm_start else y.copy())

    def step(self, oracle: Oracle, state: HypergradientState, batch: Any) -> Numbers:
        state.restart(state.y)
        numbers, h = self.hypergradient(oracle, state, batch)
        d_x, _ = move("alpha", self.alpha, state.k, state.x, h, oracle.project, state.x.value, state.x_optimizer)
        return {**numbers, "d_x": d_x}

    def lower_step(self, k: int) -> float:
        """beta at step k."""
        assert self.beta is not None
        return evaluate("beta", self.beta, k)

    @abstractmethod
    def hypergradient(self, oracle: Oracle, state: Any, batch: Any) -> tuple[dict[str, Any], Leaves]:
        """Take the steps on y in place; numbers for the history, and the direction for x."""
