"""The default: which engine runs on which problem, what evidence its answer needs, and which engine comes next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from meha.engines.active_sets import ActiveSetSearch
from meha.engines.attempt import EngineKind, Result, Start, describe
from meha.engines.base import Engine, EngineState
from meha.engines.implicit_newton import HyperDescent
from meha.engines.penalty_continuation import PenaltyPass, Scales, Sizes, measure
from meha.engines.tuning import TUNING
from meha.evidence.attempts import Attempts
from meha.evidence.multistart import Multistart
from meha.lower import curvature as curvatures
from meha.lower.flat_problem import FlatProblem
from meha.method.method import Method, Numbers, Run
from meha.method.status import Verdict
from meha.methods.rhg import RHG
from meha.methods.stochastic.adaptive_soba import AdaptiveSOBA
from meha.methods.stochastic.network_soba import NetworkSOBA
from meha.methods.stochastic_meha import StochasticMEHA
from meha.problem.oracle import BudgetError, Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Response, Trained
from meha.reduce.as_constraints import lacking
from meha.tensors.state import Saved, pack, unpack
from meha.tensors.variables import Variable, modules_of, named_leaves

__all__ = ["Default", "DefaultRun", "default_method"]


STARTS = ("upper level first", "lower level first")
"""The names of the first two passes, which begin with a small and a large c."""


class DefaultRun(Saved):
    """Runs the policy: implicit Newton first, because it is fastest; without a verified answer, the penalty continuation.

    Args:
        levels: the problem.
        tol, second_order, both_starts, verify, max_gradients: those of the method.

    Attributes:
        attempts: the results of all attempts, and the evidence about them.
        newton: the multistart of implicit Newton; None where it is not to be used.
        scales: what was measured before the first pass; None before that.
        now: the present pass; None before the first.
        over: whether the run has ended.
    """

    saves = ("newton", "over", "attempts", "now")

    def __init__(
        self, levels: FlatProblem, tol: float, second_order: bool, both_starts: bool, verify: bool, max_gradients: int
    ) -> None:
        self.levels, self.both_starts, self.verify, self.max_gradients = levels, both_starts, verify, max_gradients
        self.sizes = Sizes.of(levels, tol)
        self.attempts = Attempts(levels, self.sizes, self._left)
        self.scales: Scales | None = None
        self.now: PenaltyPass | None = None
        self.over = False
        self.newton = Multistart(levels, self.attempts, verify, max_gradients) if second_order else None

    def _left(self) -> int:
        """The gradients of f that are left in the budget."""
        return self.max_gradients - self.levels.spent

    @property
    def engine(self) -> str:
        """The name of the engine that the present answer comes from."""
        if self.attempts.results:
            return self.attempts.results[self.attempts.best].engine.value
        first = self.newton is not None and self.newton.engine is not None
        return (EngineKind.IMPLICIT_NEWTON if first else EngineKind.PENALTY_CONTINUATION).value

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the best attempt, with the evidence about its y; None while there is something to do."""
        if not self.over:
            return None
        return self.attempts.verdict if self.verify else self.attempts.unverified

    def advance(self) -> Numbers:
        """Take a step, and write the point that would be the answer now into the variables."""
        begin = time.perf_counter()
        engine = None if self.newton is None else self.newton.engine
        numbers = self._advance_pass() if engine is None else self._advance_engine(engine)
        results = self.attempts.results
        if self.over and results and self.verify:
            self.attempts.doubt_jumps()
        if results:  # a later attempt must not hide the best answer so far from callbacks and checkpoints
            answer = results[self.attempts.best]
            self.levels.move(answer.x, answer.y)
        self.levels.clock.seconds += time.perf_counter() - begin
        return numbers

    def _advance_engine(self, engine: HyperDescent) -> Numbers:
        """Take a step of implicit Newton; when its attempts are over, end the run or go back to the start for passes."""
        assert self.newton is not None
        numbers = self.newton.advance(engine)
        if self.newton.engine is None:
            self.over = self.newton.answered
            if not self.over:  # passes begin at (x0, y0), not where implicit Newton ended
                self.levels.move(self.sizes.x0, self.sizes.y0)
        return numbers

    # Passes

    def _advance_pass(self) -> Numbers:
        """Take a step of the present pass; when it is over, judge its result, and begin the next pass that is planned."""
        levels, attempts = self.levels, self.attempts
        scales = self.scales = self.scales or self._measure()
        now = self.now = self.now or self._pass(scales)
        levels.move(now.x)
        with levels.until(self.max_gradients):
            numbers = now.step() | {"run": len(attempts.results) + 1}
            if now.result is not None:
                attempts.results.append(now.result)
                attempts.pairs = now.envelope.solve_thetas[0].pairs  # the search of the lower level begins with this curvature
                if self.verify or scales.proximal:  # with the response ``Nearest``, judge() also replaces y by that solution
                    with contextlib.suppress(BudgetError):
                        attempts.judge(scales)
                self.over = not attempts.plan
                self.now = None if self.over else self._pass(scales)
        if not attempts.results:  # evaluations have left trial points in the variables
            levels.move(now.x, now.y)
        return numbers

    def _measure(self) -> Scales:
        """Measure the scales, and plan the first passes."""
        scales = measure(self.levels, self.sizes, self.both_starts)
        self.sizes = self.attempts.sizes = scales  # one object: passes update the largest sizes in it
        pairs = zip(STARTS, scales.starts, strict=False)
        self.attempts.plan = [Start(name, c, scales.x0, scales.y0, []) for name, c in pairs]
        return scales

    @property
    def _passes(self) -> list[Result]:
        return [result for result in self.attempts.results if result.engine is EngineKind.PENALTY_CONTINUATION]

    def _pass(self, scales: Scales) -> PenaltyPass:
        # Each pass takes a part of what is left, so that there is always some for verification.
        return PenaltyPass(self.levels, scales, self.attempts.plan.pop(0), int(TUNING.budget_share * self._left()))

    # What is known

    def report(self) -> dict[str, str]:
        """The problem, the engine and course of the answer, its accuracy, its evidence, and where other attempts ended."""
        attempts, scales = self.attempts, self.scales
        lines = {}
        if scales is not None:
            lines["problem"] = f"{curvatures.describe(scales.curvatures)}; balanced at c = {scales.balance:.2g}"
        if not attempts.results:
            return lines
        best = attempts.results[attempts.best]
        passes, ended = self._passes, self.newton and self.newton.ended
        lines["engine"] = self.engine + (f"; ImplicitNewton: {ended}" if ended else "")
        by_newton = best.engine is EngineKind.IMPLICIT_NEWTON
        if by_newton:
            lines["engine"] = self.engine + ("; PenaltyContinuation found nothing better" if passes else "")
        lines["course"], lines["accuracy"], lines["time"] = best.course, best.accuracy, str(self.levels.clock)
        if best.evidence is not None:
            lines["lower"] = str(best.evidence)
        if by_newton and self.newton is not None and self.newton.seen:
            lines["elsewhere"] = self.newton.seen
        if best.F_nearest is not None:
            lines["fresh"] = f"F = {best.F_nearest:.6g} at the lower solution nearest to y0"
        if len(attempts.results) == len(passes) == 2 and attempts.same_solution(*passes):
            lines["starts"] = "upper level first and lower level first agree"
        elif (
            len(attempts.results) > 1 and not passes and all(attempts.same_solution(best, other) for other in attempts.results)
        ):
            lines["starts"] = f"{len(attempts.results)} starts in x agree"
        elif len(attempts.results) > 1:
            lines["starts"] = "; ".join(describe(result, best=result is best) for result in attempts.results)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps need, in plain tensors, numbers and text."""
        return {**super().state_dict(), "sizes": pack(self.sizes), "curvatures": self.levels.curvatures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        sizes = self.sizes = self.attempts.sizes = unpack(state["sizes"])  # one object, as in _measure
        self.scales = sizes if isinstance(sizes, Scales) else None
        self.levels.curvatures = state["curvatures"]
        # The start and the budget are placeholders, which the saved state overwrites.
        start = Start("", 1.0, sizes.x0, sizes.y0, [])
        self.now = None if state["now"] is None else PenaltyPass(self.levels, sizes, start, 0)
        super().load_state_dict({name: state[name] for name in self.saves})


SMALL = 300
"""Unknowns up to which ActiveSets takes problems with polyhedral sets; its Hessians are dense."""


@dataclass(frozen=True, kw_only=True)
class Default(Engine):
    """The default of ``solve`` for tensors: accurate, with nothing to choose. It picks engines, and verifies their answers.

    - :class:`~meha.ActiveSets` takes problems with constraints that couple x and y, and small ones with polyhedral sets.
    - :class:`~meha.ImplicitNewton` takes all others first. Its point is the answer if y is a strict minimum, the curvature of f
      at random points shows no sign of another basin, and restarts of the lower level find nothing below y. It then begins
      again at other x; where these attempts end at several solutions, the best must appear three times.
    - :class:`~meha.PenaltyContinuation` comes next, from (x0, y0), where the Hessian is singular on the face, the lower level
      is not convex, or steps fail. The better of all points is the answer. Its first pass begins with a c at which F decides
      (``upper level first``), the second where f decides (``lower level first``). During later passes, the variables hold the
      best result so far.

    Evidence decides the status:

    - y is verified. Descents of f + g at the final x, from points near y and far away, must find nothing below it. A lower
      basin gives rise to two further passes, from there and from the refuted point; where there are several basins, others
      start from other x. A pass follows all basins that are known, and the value function is the least of them. The answer
      has the smallest F of those that were not refuted. The status is ``converged`` only if y was verified, and ``local``
      otherwise; the report tells what was met.
    - At the end, the lower level is solved again from y0 at the final x. Where F differs there, the message says so. Implicit
      Newton leaves this out where it knows that y is the only solution, and answers only there if the response is
      :class:`~meha.responses.Nearest`. Passes then have a proximal term in f whose weight falls with the root of c, c grows
      sixteenfold, x is extrapolated in the root of 1/c, and y is that nearest solution; their ``tol`` is at least 1e-4.

    The objectives must give the same value at the same point, so batches and dropout are not possible; see
    :class:`~meha.StochasticMEHA`. In single precision, where c times a small difference cancels, about four digits are
    possible, and a smaller ``tol`` is raised to that.

    Memory: a dense Hessian on up to 2,000 free coordinates of y; in passes up to 300 pairs of the size of y twice, as long as
    these are fewer than 4 million numbers (at least 10).

    Args:
        tol: the relative error of x at which to stop, estimated by how much the extrapolated x changed with the last stage (an
            estimate, not a bound); 0.0 for as accurate as possible.
        second_order: whether ImplicitNewton is used.
        both_starts: whether there is a second pass.
        verify: whether the answer is verified, and other starts are tried. If False, the first stationary point is the
            answer, the status "rule met", and nothing is said about other basins and other solutions.
        max_gradients: upper bound on the gradients of f in a run, those of the searches included (those that probe the problem
            at the start, some 50, are taken in any case). A product with the Hessian of f counts as one. ImplicitNewton may
            take 70 % of them, each pass 70 % of what is left.

    A step is one step in x, with the solves in y that it needs. Its numbers: ``upper`` F, ``lower`` f + g, ``residual`` the
    norm of the projected hypergradient or gradient of Phi_c, ``run`` the number of the attempt, and in passes ``gap``
    (f+g)(x, y) - (f+g)(x, theta) and ``c``.

    >>> import torch
    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lambda x, y: (x + y - 2).sin().sum())
    >>> run = Default().start(problem, torch.tensor([-6.0], dtype=torch.float64), torch.zeros(10, dtype=torch.float64))
    >>> while run.verdict is None:
    ...     info = run.step()
    >>> print(f"{float(run.x):.5f}")  # (30/2 pi - 18) / 11
    2.64763
    """

    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)
    vanishes: ClassVar[bool] = True
    takes_coupling: ClassVar[bool] = True

    tol: float = 1e-6
    second_order: bool = True
    both_starts: bool = True
    verify: bool = True

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> EngineState:
        if oracle.problem.coupled and oracle.group is not None:
            raise ValueError(
                f"group: {self.name} cannot take several processes where constraints couple x and y, because it recognises"
                " quadratic objectives on the data of one; use BiCGAFFA, with x and y whole in each process."
            )
        course: DefaultRun | ActiveSetSearch | None = None
        if oracle.problem.coupled or (oracle.group is None and _may_use_active_sets(oracle.problem, x, y)):
            course = ActiveSetSearch(oracle, x, y, self.max_gradients)
            if not (oracle.problem.coupled or oracle.problem.domains[1].iterative or course.provable):
                course = None  # projected gradients of the hyper-objective are quicker than pieces where X alone is such a set
        if course is None:
            levels = FlatProblem(oracle, x, y)
            course = DefaultRun(levels, self.tol, self.second_order, self.both_starts, self.verify, self.max_gradients)
        return EngineState(x=x, y=y, course=course, settled=False)


def _may_use_active_sets(problem: Problem, x: Variable, y: Variable) -> bool:
    """Whether X or Y may be taken by its inequalities, and the problem is small and smooth enough for the active-set engine."""
    # The other engines only project on such sets, which is a numerical solve each time.
    iterative = any(domain.iterative for domain in problem.domains)
    plain = problem.nonsmooth is None and problem._selected_response is None and x.numel + y.numel <= SMALL
    return iterative and plain and not (x.has_modules or y.has_modules) and not lacking(problem, x, y)


HALF = (torch.float16, torch.bfloat16)  # their rounding errors hide the differences that line searches compare

RATE = 0.01
"""Learning rate of x where Adam takes its steps."""


def start_default(problem: Problem, x: Any, y: Any, tol: float, max_gradients: int) -> Run:
    """A run of the default for tensors from a point, for :func:`meha.verify`."""
    return Default(tol=min(tol, Default.tol), max_gradients=max_gradients).start(problem, x, y)


def default_method(problem: Problem, x0: Any, y0: Any, batches: Iterable[Any] | None = None) -> Method:
    """The method that :func:`meha.solve` takes when none is given.

    A response :class:`~meha.responses.Trained` goes to :class:`~meha.RHG`, which differentiates through its steps, with Adam
    for x if there are modules or batches. Otherwise, tensors without batches go to :class:`~meha.Default`; tensors with batches
    to :class:`~meha.stochastic.AdaptiveSOBA`; a network y to :class:`~meha.stochastic.NetworkSOBA`; other modules,
    and batches beside a non-smooth term or a set Y, or where x and y are of one form (y may have it once for each task), to
    :class:`~meha.StochasticMEHA`.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)
    >>> default_method(problem, problem.x0, problem.y0).name
    'Default'
    """
    problem, _ = problem._with_dummy_x(x0, Variable.of(y0, "y"))  # x0 may be None
    modules = next(modules_of((x0, y0)), None) is not None
    noisy = batches is not None or problem.needs_batch or modules
    if isinstance(problem._selected_response, Trained):
        return RHG(x_optimizer=partial(torch.optim.Adam, lr=RATE)) if noisy else RHG()
    if not noisy and any(
        leaf.dtype in HALF for value in (x0, y0) if value is not None for leaf in Variable.of(value, "x").leaves
    ):
        raise TypeError(
            "x0, y0: the default computes in single or double precision; pass .float() or .double() tensors, or name a method."
        )
    if not noisy:
        return Default()
    simple = problem.nonsmooth is None and problem.y_set is None and problem._selected_response is None
    # Where x is a start for models of the same form, or for one model for each task, y may belong to the batch, which
    # StochasticMEHA finds out.
    shapes = form(y0)
    of_a_task = {name: shape[1:] for name, shape in shapes.items()}
    alike = not isinstance(y0, torch.Tensor) and x0 is not None and form(x0) in (shapes, of_a_task)
    if not simple or alike or problem._without_x:
        return StochasticMEHA()
    if not modules:
        return AdaptiveSOBA()
    trained = next(modules_of(y0), None) is not None
    return NetworkSOBA() if trained else StochasticMEHA()


def form(value: Any) -> dict[str, torch.Size]:
    """The names and shapes of the tensors of a value."""
    return {name: leaf.shape for name, leaf in named_leaves(value).items()}
