"""Base class for methods that update y, then move x along an estimate of the hypergradient d/dx F(x, y(x))."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from meha._checks import check_count
from meha._leaves import Leaves
from meha._oracle import Oracle
from meha._running import At, Numbers
from meha._variables import Variable
from meha.methods._base import Method, State
from meha.methods._moves import check_step, move
from meha.methods._optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods._parameters import complete, hypergradient_steps
from meha.schedules import Schedule
from meha.theory import Constants

__all__ = ["HypergradientMethod", "HypergradientState"]


@dataclass
class HypergradientState(State):
    """x, y and the optimizer of x."""

    x_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class HypergradientMethod(Method):
    """Base class of methods that take lower steps on y, estimate the hypergradient h, and set x <- proj_X(x - alpha h).

    Args:
        alpha, beta: step sizes of x and of y, numbers or functions of k; those left out are chosen from the problem's
            constants.
        inner_steps: T, the steps on y.
        warm_start: whether they begin where the last ones ended, or at y0 every time.
        x_optimizer: a factory such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; it takes the step of
            x, instead of alpha.

    The numbers of a step: ``upper`` F(x, y_T) before x moves, ``d_x`` the norm of h.
    """

    refuses_nonsmooth: ClassVar[str] = "it differentiates the lower level twice"
    refuses_shards: ClassVar[str] = "it takes second derivatives, which a pass through sharded modules does not have"
    repeats: ClassVar[str] = "it computes derivatives again at points where it has been"
    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    alpha: Schedule | None = None
    beta: Schedule | None = None
    inner_steps: int = 10
    warm_start: bool = True
    x_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        check_step("alpha", self.alpha, "x_optimizer", self.x_optimizer)
        check_step("beta", self.beta)
        check_count("inner_steps", self.inner_steps)

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        return complete(self, self.chosen, self.choose, oracle, x, y, batch)

    def choose(self, constants: Constants) -> dict[str, float]:
        """Step sizes for a problem with these constants."""
        return hypergradient_steps(constants)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> HypergradientState:
        optimizer = build_optimizer("x_optimizer", self.x_optimizer, x, oracle.problem)
        return HypergradientState(x, y, optimizer, start=None if self.warm_start else y.copy())

    def step(self, oracle: Oracle, state: HypergradientState, at: At) -> Numbers:
        state.restart(state.y)
        numbers, h = self.hypergradient(oracle, state, at)
        d_x, _ = move(state.x, h, at.alpha, oracle.project, state.x.value, state.x_optimizer)
        return {**numbers, "d_x": d_x}

    @abstractmethod
    def hypergradient(self, oracle: Oracle, state: Any, at: At) -> tuple[dict[str, Any], Leaves]:
        """Take the steps on y in place; return numbers for the history, and the direction for x."""
