"""AdaptiveMEHA, the method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meha._checks import check_tolerance
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods._base import Method
from meha.methods._curvatures import describe, flatten
from meha.methods.adaptive.stages import set_course
from meha.methods.adaptive.state import AdaptiveState
from meha.methods.adaptive.steps import StepMap, advance, evaluate, move
from meha.methods.adaptive.tuning import TUNING
from meha.methods.adaptive.watching import check_start, first_look, look_again, watch
from meha.problem import Problem
from meha.responses import Nearest, Response

__all__ = ["AdaptiveMEHA"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveMEHA(Method):
    """MEHA without hyper-parameters: a single loop that chooses its step sizes, gamma, c and stopping point.

    Take it to follow the single loop of MEHA on a problem without batches and networks, at 2 gradients of f and 1 of F a step,
    without tuning. :class:`~meha.Continuation`, the default of :func:`~meha.solve`, is more accurate and more robust;
    :class:`~meha.StochasticMEHA` is the choice for batches and networks. AdaptiveMEHA struggles with ill-conditioned problems:
    a lower level of condition 1000 and more, or coordinates of x in very different units, make it slow, and it may then rest
    too early. A step is

        x     <- proj_X( x - alpha grad_x [ F(x, y) / c + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c + f(x, y) ] - grad_y f(x, theta) - s) )
        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )

    where s is the subgradient of g that the last prox of theta found. Once theta rests, - grad_y f(x, theta) - s is the paper's
    (theta - y) / gamma; until then it is not affected by the lag of theta. All three move at once.

    - Steps: alpha, beta and eta follow from the curvatures of F and f, estimated from differences of gradients at the start and
      now and then (:mod:`meha.methods._curvatures`), and shrink where the gradients turn out to change faster, or explode.
    - Anderson acceleration (:mod:`meha.methods._anderson`) of the whole step. Gradients of F and of f are kept apart, so that
      the memory remains valid when c, gamma or the steps change.
    - c starts small, where F shows the way, and doubles when the residual is small relative to grad F (the smaller, the less
      the last stages differ) or takes too long to get there. The answer is extrapolated to c = infinity from the last stages.
    - gamma starts at 0.45 over the curvature of f, which the theorem allows for any f, and grows when a stage takes too long
      and the lower level looks convex.

    The run has converged when the extrapolated limit, or (x, y) itself, rests with a small gap, and descents of the lower level
    from many starts find nothing below y (:mod:`meha.methods._verification`). If they do, y moves there, and the run goes on,
    up to three times; then, or if F is lower where x goes back towards x0, the status is ``local``. If F is no higher when x
    goes twice as far from x0, the optimum may lie at infinity, which is a status of its own. The method is scale-free: the run
    stays the same when x, y, F or f are measured in other units.

    The numbers of a step are those of :class:`~meha.MEHA`, and ``gamma``, at the last point that was not rejected.

    Args:
        tol: the relative change of the limit from one stage to the next that counts as rest; at least the square root of the
            rounding error is used, 3e-4 in single precision, also for 0.

    >>> import meha
    >>> problem = meha.problems.sine(n=10)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, AdaptiveMEHA())
    >>> print(solution.status, solution.steps < 100, problem.distance(solution.x, solution.y).x < 1e-3)
    converged True True
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)
    repeats: ClassVar[str] = "it compares values"

    tol: float = 1e-4

    def __post_init__(self) -> None:
        check_tolerance("tol", self.tol)

    def terminate(self, state: AdaptiveState) -> Verdict | None:
        return Verdict(Status(state.status), state.reason) if state.status else None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError(
                "method: AdaptiveMEHA() needs the same objectives in every step, and these change with the batch; use"
                " StochasticMEHA() or MEHA(), or objectives of (x, y) on all data."
            )

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Start elsewhere, or bound x and y by sets in which the objectives are defined."

    def report(self, run: Run) -> dict[str, str]:
        """The shape of the problem, the last c and gamma, and the accuracy of the answer."""
        state, course = run.state, run.state.course
        lines = {"problem": describe(state.sight.curvatures)}
        lines["course"] = f"c = {state.pace.c:.2g}" + (f", gamma = {state.numbers['gamma']:.2g}" if state.numbers else "")
        if course.extrapolated and math.isfinite(course.change) and state.status != Status.AT_INFINITY.value:
            change = f"changed by {course.change:.1e} in the last stage (an estimate, not a bound)"
            lines["accuracy"] = f"the limit for c to infinity {change}"
        if state.evidence:
            lines["lower"] = state.evidence
        return lines

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> AdaptiveState:
        check_start(oracle, x, y)
        sight, pace = first_look(oracle, x, y)
        theta = y.copy()
        zero = torch.zeros_like(flatten(x, y, theta))
        return AdaptiveState(x, y, x.copy(), y.copy(), theta, zero, flatten(x, y), sight, pace, settled=False)

    def step(self, oracle: Oracle, state: AdaptiveState, at: At) -> Numbers:
        if at.batch is not None:
            given = type(at.batch).__name__
            raise ValueError(f"batch: AdaptiveMEHA() takes none, got {given}; use StochasticMEHA() or MEHA().")
        here = StepMap.of(oracle, state)
        record, numbers = evaluate(oracle, state, here)
        if not _accept(oracle, state, here, here.size(record)):
            if state.memory.records and state.failures <= TUNING.attempts:
                return state.numbers
            where = "after ever shorter steps" if state.memory.records else "at the start"
            state.status, state.reason = Status.NON_FINITE.value, f"The gradients explode, or are not finite, {where}."
            return {**state.numbers, "upper": math.nan}
        state.numbers, state.failures, course = numbers, 0, state.course
        course.lowest, course.highest = min(course.lowest, numbers["upper"]), max(course.highest, numbers["upper"])
        watch(state, here, record)
        state.memory.records = [*state.memory.records[-TUNING.memory :], record]
        set_course(oracle, state, here, record, self.tol)
        if state.memory.records:  # otherwise y has just moved to a lower valley
            advance(oracle, state)
        look_again(oracle, state)
        return numbers


def _accept(oracle: Oracle, state: AdaptiveState, here: StepMap, size: float) -> bool:
    """Whether to continue from the point; if not, take a plain step from the last one, and a shorter one if this was plain."""
    memory = state.memory
    if not memory.records:
        return math.isfinite(size)
    if size <= (TUNING.overshoot if memory.accelerated else TUNING.explosion) * here.size(memory.records[-1]):
        return True
    if memory.accelerated:
        memory.forget(keep=1)
    else:
        state.pace.scale(TUNING.cut, TUNING.cut, TUNING.cut)
        state.failures += 1
    memory.accelerated, memory.reach = False, 0.0
    here = StepMap.of(oracle, state)
    move(oracle, state, here, here.image(memory.records[-1]))
    return False
