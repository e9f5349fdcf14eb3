"""Newton: second-order solution of deterministic problems whose lower level has a regular solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meha._checks import check_tolerance
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Verdict
from meha.methods._base import Method, State
from meha.methods.newton.course import Course
from meha.problem import Problem

__all__ = ["Newton", "NewtonState"]


@dataclass(frozen=True, kw_only=True)
class Newton(Method):
    """Newton's method below, implicit hypergradients, quasi-Newton steps above: fast and accurate where y*(x) is regular.

    x -> F(x, y*(x)) is minimised over X by quasi-Newton steps. Each evaluation solves the lower level by Newton steps, with
    dense Hessians up to some thousand unknowns and conjugate gradients beyond, and takes the hypergradient

        F_x - d/dx <(f+g)_y, v>,  (f+g)_yy v = F_y,

    on the face of y*: the coordinates that g and Y leave free. L1 and its relatives, groups, boxes, non-negative y and the
    simplex tell their faces; others are refused.

    - It claims convergence only with evidence: the lower level solved, a Hessian that is positive definite on the face, and a
      hypergradient that is small relative to its parts; or, at a kink of the hyper-objective, small combinations of
      hypergradients from nearby.
    - It needs second derivatives, and a lower solution that is locally unique. Where the Hessian is singular on the face, it
      breaks down and says so; :class:`~meha.Continuation` takes such problems. With several local solutions below, it
      follows the one that Newton's method finds from y0, whatever F would prefer.
    - Tensors only, and the same value at the same point: no modules, no batches.

    Args:
        tol: the relative accuracy of x; 0.0 for as accurate as possible.

    A step is one quasi-Newton step in x with all its lower solves. Its numbers: ``upper`` F, and ``residual`` the norm of the
    projected hypergradient. A Hessian of n rows counts as n Hessian-vector products.

    >>> import torch
    >>> from meha.problem import Problem
    >>> fit, weigh = lambda y: 0.5 * (y - 3).square().sum(), lambda x, y: x.exp() * y.square().sum()
    >>> problem = Problem(lambda x, y: (y - 2).square().sum(), lambda x, y: fit(y) + weigh(x, y))
    >>> run = Newton().start(problem, torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> while run.verdict is None:
    ...     info = run.step()
    >>> print(f"{float(run.x):.6f}")  # y = 3 / (1 + 2 exp x) = 2 at x = -log 4
    -1.386294
    """

    tol: float = 1e-6

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError(
                f"method: {self.name} compares values, which change from batch to batch; use StochasticMEHA() or MEHA(), or"
                " objectives of (x, y) on all data."
            )

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> NewtonState:
        for variable in (x, y):
            if variable.has_modules:
                raise TypeError(f"{variable.argument}: {self.name} takes tensors, got a module; use Continuation().")
        return NewtonState(x=x, y=y, course=Course(oracle, x, y, self.tol), settled=False)

    def step(self, oracle: Oracle, state: NewtonState, at: At) -> Numbers:
        if at.batch is not None:
            raise ValueError(f"batch: {self.name} takes none, got {type(at.batch).__name__}; use StochasticMEHA() or MEHA().")
        return state.course.advance()

    def terminate(self, state: NewtonState) -> Verdict | None:
        return state.course.verdict

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Use meha.Continuation(), which needs no second derivatives and no unique solution of the lower level."

    def report(self, run: Run) -> dict[str, str]:
        return run.state.course.report()


@dataclass
class NewtonState(State):
    """x, y, and the course of the run."""

    course: Course
