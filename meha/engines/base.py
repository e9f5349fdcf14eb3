"""Engine: what the engines have in common as methods. They need full gradients, and end at the first stationary point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch

from meha.method.method import At, Method, Numbers, Run, State
from meha.method.status import Status, Verdict
from meha.numerics.tolerances import SAME, SINGULAR
from meha.problem.constants import Constants
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_count, check_tolerance
from meha.tensors.state import Stateful
from meha.tensors.variables import Variable


class Course(Stateful, Protocol):
    """A run of an engine or of the default: it takes steps, and says how it ended."""

    @property
    def engine(self) -> str:
        """The name of the engine that the present answer comes from."""

    @property
    def verdict(self) -> Verdict | None:
        """Why it is over; None while there is something to do."""

    def advance(self) -> Numbers:
        """Take a step, and write the point that would be the answer now into the variables."""

    def report(self) -> dict[str, str]:
        """What a report says about the run, in lines by heading."""


@dataclass
class EngineState(State):
    """The variables x and y, and the run of an engine."""

    course: Course

    @property
    def engine(self) -> str:
        """The name of the engine that the present answer comes from."""
        return self.course.engine


@dataclass(frozen=True, kw_only=True)
class Engine(Method):
    """A method that compares values of full objectives, without batches; its subclasses build a :class:`Course`.

    Args:
        max_gradients: upper bound on the gradients of f in a run; a product with the Hessian of f counts as one.
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    refuses_scaler: ClassVar[str] = "it compares differences that half precision rounds away"
    projects_start: ClassVar[bool] = True
    repeats: ClassVar[str] = "it compares values"

    max_gradients: int = 40_000

    def __post_init__(self) -> None:
        check_tolerance("tol", getattr(self, "tol", 0.0))  # ActiveSets has none
        check_count("max_gradients", self.max_gradients)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:  # a line search would take the noise of batches for a decrease
            raise ValueError(
                f"method: {self.name} compares values, which change from batch to batch; use StochasticMEHA() or MEHA(), or"
                " objectives of (x, y) on all data."
            )

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        _refuse_random(oracle, x, y, self.name)
        return super().resolve(oracle, x, y, batch)

    def step(self, oracle: Any, state: EngineState, at: At) -> Numbers:
        if at.batch is not None:
            raise ValueError(f"batch: {self.name} takes none, got {type(at.batch).__name__}; use StochasticMEHA() or MEHA().")
        return state.course.advance()

    def terminate(self, state: EngineState) -> Verdict | None:
        return state.course.verdict

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return (
            "F seems to have no minimum over the solutions of the lower level: check its sign, or bound x and y (x_set, y_set)."
        )

    def report(self, run: Run) -> dict[str, str]:
        return run.state.course.report()


@torch.no_grad()
def _refuse_random(oracle: Oracle, x: Variable, y: Variable, name: str) -> None:
    """Raise if F or f has another value when it is called again beside the start; at y = 0 itself, data may not matter."""
    beside = y.copy()
    for leaf, old in zip(beside.leaves, y.leaves, strict=True):
        pattern = torch.arange(1.0, old.numel() + 1, device=old.device).cos().to(old).reshape(old.shape)
        leaf.copy_(old + SAME * (1 + old.abs()) * pattern)
    oracle.problem.domains[1].project_(beside)
    for function in (oracle.upper, oracle.lower):
        try:
            first, second = (float(function(x, beside)) for _ in range(2))
        except Exception:  # outside of its domain, a function of the user may raise anything; mistakes show in the first step
            continue
        rounding = SINGULAR * max(torch.finfo(leaf.dtype).eps for leaf in (*x.leaves, *y.leaves))
        if abs(first - second) > rounding * max(abs(first), abs(second)):
            raise ValueError(
                f"{function.level}: is {first:.6g}, and {second:.6g} when it is called again at the same point, and {name}"
                " compares values. Draw random numbers once, outside, or pass what is drawn as a batch, in"
                " solve(..., batches=...)."
            )


def unverified(end: Verdict) -> Verdict:
    """The verdict of an engine alone: "rule met" instead of "converged", because nothing was verified."""
    if end.status is not Status.CONVERGED:
        return end
    return Verdict(Status.RULE_MET, f"{end.message} Nothing was verified; there may be other basins and other solutions.")
