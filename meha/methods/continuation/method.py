"""Continuation: bilevel problems without hyper-parameters, by second-order steps or a penalty that grows in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha._checks import check_count, check_tolerance
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Verdict
from meha.methods._base import Method, State
from meha.methods._levels import Levels
from meha.methods.constrained import CoupledCourse
from meha.methods.continuation.course import Course
from meha.problem import Problem
from meha.responses import Nearest, Response
from meha.sets import Intersection, Polyhedron

__all__ = ["Continuation", "ContinuationState"]

SMALL = 300
"""Unknowns up to which problems with polyhedral sets take the way of coupled ones, whose Hessians are dense."""


@dataclass(frozen=True, kw_only=True)
class Continuation(Method):
    """Newton and quasi-Newton continuation, the default of ``solve`` for tensors: accurate, with nothing to choose.

    It has two engines. The first takes second derivatives (:mod:`meha.methods.newton`): Newton steps on the lower level, with
    dense Hessians or conjugate gradients, on the face of g and Y; hypergradients by the implicit function theorem; quasi-Newton
    steps in x. Its point is the answer if y is a strict minimum, the curvature of f at random points shows no sign of another
    valley, and a search of the lower level finds nothing below y. It then begins again at other x; where these attempts end at
    several solutions, the best must appear three times. Where the Hessian is singular on the face, the lower level
    is not convex, or steps fail, the second engine begins at (x0, y0), and the better of all points is the answer. It takes
    first derivatives only: with y projected out, the penalised problem has one variable,

        Phi_c(x) = min_y { F(x, y) + c (f+g)(x, y) } - c min_theta (f+g)(x, theta),
        grad Phi_c(x) = F_x(x, y) + c ( (f+g)_x(x, y) - (f+g)_x(x, theta) ),

    which is the penalty of MEHA for gamma to infinity. Each stage minimises Phi_c over X for one c by quasi-Newton steps, whose
    memory of curvature serves the next stage as well; y and theta are found in the same way, with memories of their own, and
    only as accurately as the stage needs.

    - c begins where F decides (``upper level first``) and grows fourfold, until x, extrapolated in 1/c, changes by less than
      ``tol``. A second pass begins where f decides (``lower level first``). During later passes, the variables hold the best
      result so far.
    - Then y is verified: descents of f + g at the final x, from points near y and far away, must find nothing below it
      (:mod:`meha.methods._verification`). A lower valley gives rise to two further passes, from there and from the refuted
      point; where there are several valleys, others start from other x. A pass follows all valleys that are known, and the
      value function is the least of them. The answer has the smallest F of those that were not refuted. The status is
      ``converged`` only if y was verified, and ``local`` otherwise; the report tells what was met.
    - At the end, the lower level is solved again from y0 at the final x (:mod:`meha.methods._nearest`); where F differs there,
      the message says so. The first engine leaves this out where it knows that y is the only solution, and answers only there
      if the response is :class:`~meha.responses.Nearest`. Passes then have a proximal term in f whose weight falls with the
      root of c, c grows sixteenfold, x is extrapolated in the root of 1/c, and y is that fresh solution; their ``tol`` is at
      least 1e-4.
    - theta starts close to y in each stage, so that it leaves maxima and saddles.
    - g and Y enter by their proximal map, X by its projection; coordinates which these hold fast are taken out of the steps.
    - The steps compare values. The objectives must give the same value at the same point, so batches and dropout are not
      possible; see :class:`~meha.StochasticMEHA`. In single precision, where c times a small difference cancels, about four
      digits are possible, and a smaller ``tol`` is raised to that.

    Problems with constraints that couple x and y take another way (:mod:`meha.methods.constrained`): branch and bound where
    they are linear and quadratic, otherwise descents over the active sets of the lower level from many starts; a step is one
    start.

    Memory: a dense Hessian on up to 2,000 free coordinates of y; in passes up to 300 pairs of the size of y twice (50 with g),
    as long as these are fewer than 4 million numbers (at least 5).

    Args:
        tol: the relative error of x at which to stop, estimated by how much the extrapolated x changed with the last stage (an
            estimate, not a bound); 0.0 for as accurate as possible.
        second_order: whether the first engine is used.
        both_starts: whether there is a second pass.
        verify: whether the answer is verified, and looked for from other starts. If False, the first stationary point is the
            answer, the status "rule met", and nothing is said about other valleys and other solutions.
        max_gradients: upper bound on the gradients of f in a run, those of the searches included (those that probe the problem
            at the start, some 50, are taken in any case). A product with the Hessian of f counts as one. The first engine and
            each of the first two passes may take 45 % of them.

    A step is one step in x, with the solves in y that it needs. Its numbers: ``upper`` F, ``lower`` f + g, ``residual`` the
    norm of the projected hypergradient or gradient of Phi_c, ``run`` the number of the attempt, and in passes ``gap``
    (f+g)(x, y) - (f+g)(x, theta) and ``c``.

    >>> import torch
    >>> from meha.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lambda x, y: (x + y - 2).sin().sum())
    >>> run = Continuation().start(problem, torch.tensor([-6.0], dtype=torch.float64), torch.zeros(10, dtype=torch.float64))
    >>> while run.verdict is None:
    ...     info = run.step()
    >>> print(f"{float(run.x):.5f}")  # (30/2 pi - 18) / 11
    2.64763
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)
    vanishes: ClassVar[bool] = True
    takes_coupling: ClassVar[bool] = True
    projects_start: ClassVar[bool] = True
    repeats: ClassVar[str] = "it compares values"

    tol: float = 1e-6
    second_order: bool = True
    both_starts: bool = True
    verify: bool = True
    max_gradients: int = 40_000

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)
        check_count("max_gradients", self.max_gradients)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError(
                f"method: {self.name} compares values, which change from batch to batch; use StochasticMEHA() or MEHA(), or"
                " objectives of (x, y) on all data."
            )

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> ContinuationState:
        if oracle.problem.coupled and oracle.group is not None:
            raise ValueError(
                f"group: {self.name} cannot take several processes where constraints couple x and y, because it recognises"
                " quadratic objectives on the data of one; use BiCGAFFA, with x and y whole in each process."
            )
        if oracle.problem.coupled or (oracle.group is None and _cornered(oracle.problem, x, y)):
            return ContinuationState(x=x, y=y, course=CoupledCourse(oracle, x, y, self.max_gradients), settled=False)
        return ContinuationState(
            x=x,
            y=y,
            course=Course(Levels(oracle, x, y), self.tol, self.second_order, self.both_starts, self.verify, self.max_gradients),
            settled=False,
        )

    def step(self, oracle: Oracle, state: ContinuationState, at: At) -> Numbers:
        if at.batch is not None:
            raise ValueError(f"batch: {self.name} takes none, got {type(at.batch).__name__}; use StochasticMEHA() or MEHA().")
        return state.course.advance()

    def terminate(self, state: ContinuationState) -> Verdict | None:
        return state.course.verdict

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return (
            "F seems to have no minimum over the solutions of the lower level: check its sign, or bound x and y (x_set, y_set)."
        )

    def report(self, run: Run) -> dict[str, str]:
        return run.state.course.report()


@dataclass
class ContinuationState(State):
    """x, y, and the course of the run."""

    course: Course | CoupledCourse


def _cornered(problem: Problem, x: Variable, y: Variable) -> bool:
    """Whether X or Y has faces that only the room for coupled problems knows, and it can take the rest of the problem."""
    known = any(isinstance(domain, Polyhedron | Intersection) for domain in (problem.x_set, problem.y_set))
    plain = problem.nonsmooth is None and problem.selected is None and x.numel + y.numel <= SMALL
    return known and plain and not (x.has_modules or y.has_modules)
