"""verify(): is a point a solution? The tests that the default makes before it says "converged", for points from anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from meha.engines.active_sets import ActiveSetSearch
from meha.engines.penalty_continuation import Sizes
from meha.evidence.attempts import nearest_solution
from meha.lower import curvature
from meha.lower.flat_problem import FlatProblem
from meha.lower.multistart import LowerMultistart
from meha.method.method import Run
from meha.method.status import Status
from meha.methods.default import Default, start_default
from meha.numerics.limited_memory import FEW_PAIRS, LimitedMemory
from meha.numerics.tolerances import PROBES
from meha.problem.oracle import BudgetError
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Trained
from meha.tensors.checks import check_count, check_tolerance
from meha.tensors.variables import Variable, modules_of
from meha.tensors.vectors import vector_norm

Outcome = Literal["passed", "open", "refuted"]

VISIBLE = 1e3
"""A difference of F or f counts if it exceeds this many rounding errors of the value."""


@dataclass(frozen=True)
class Finding:
    """One test of a point: what was tried, and what was found.

    Attributes:
        test: what is tested.
        outcome: ``"passed"``; ``"refuted"`` where a better point is known; ``"open"`` where the budget did not suffice, or
            several solutions were met.
        detail: what was tried and found, in words.
    """

    test: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, eq=False)
class Verification:
    """What is known about a point. ``print`` it.

    Attributes:
        findings: the tests, in the order in which they were made. The first that refutes the point is the last.
        better: a point (x, y) that refutes it; None where there is none, or the point is not feasible.
        upper: F at the point.
        gradients: gradients of f, and products with its Hessian, that the tests took.
    """

    findings: tuple[Finding, ...]
    upper: float
    gradients: int
    better: tuple[Any, Any] | None = field(default=None, repr=False)

    @property
    def converged(self) -> bool:
        """Whether all tests were passed: the default would say "converged"."""
        return all(finding.outcome == "passed" for finding in self.findings)

    @property
    def refuted(self) -> bool:
        """Whether a test showed that the point is no solution."""
        return any(finding.outcome == "refuted" for finding in self.findings)

    def __str__(self) -> str:
        head = "converged" if self.converged else "refuted" if self.refuted else "open: not refuted, and not certain"
        width = max(len(finding.test) for finding in self.findings)
        rows = [f"  {item.outcome:7}  {item.test:{width}}  {item.detail}" for item in self.findings]
        return "\n".join([f"{head}, F = {self.upper:.6g}, after {self.gradients} gradients of f", *rows])


def verify(problem: Problem, x: Any, y: Any, *, y0: Any = None, budget: int = 20_000, tol: float = 1e-3) -> Verification:
    """Test whether (x, y) is a solution of a bilevel problem, wherever it comes from.

    The tests are those that :class:`~meha.Default` makes before it says "converged", in this order:

    1. *feasible*: x is in X, y in Y, and all constraints are met;
    2. *lower level stationary*: a descent of f + g from y ends at y;
    3. *lower level global*: descents of f + g from many starts at the same x find nothing lower;
    4. *response*: where the problem states ``response=Nearest()``, y is the lower solution nearest to y0;
    5. *upper level*: :class:`~meha.Default`, started at the point, finds no better one, near or at other x, and ends there.

    Args:
        problem: the problem, with objectives of (x, y) that return the same value whenever they are called.
        x, y: the point, as tensors or structures of tensors; x is None for a problem without x.
        y0: where y began; needed for ``response=Nearest()`` without a start of its own, else not used.
        budget: upper bound on the gradients of f.
        tol: the relative accuracy of the point: a better one must be further away than this.

    Raises:
        TypeError, ValueError: the point does not fit the problem, or its objectives are not deterministic.

    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> half, one = torch.tensor([0.5], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    >>> verify(problem, half, half).converged, verify(problem, one, one).refuted, verify(problem, half, one).refuted
    (True, True, True)
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    check_count("budget", budget)
    check_tolerance("tol", tol)
    stated, _ = problem._with_dummy_x(x, Variable.of(y, "y"))  # x may be None
    noisy = stated.needs_batch or next(modules_of((x, y)), None) is not None
    if noisy or isinstance(problem.response, Trained):
        raise ValueError(
            "problem: verify compares values, which must be the same in every call, so x and y must be tensors and there are no"
            " batches; use solution.refit() to train y again at the x of a network."
        )
    response = problem.response
    if isinstance(response, Nearest) and response.start is None and y0 is None:
        raise ValueError("y0: the response is the lower solution nearest to y0, so it is needed; pass verify(..., y0=...).")
    with torch.no_grad():
        return _Tests(problem, x, y, y if y0 is None else y0, budget, tol).run()


class _Tests:
    """The tests of one point."""

    def __init__(self, problem: Problem, x: Any, y: Any, y0: Any, budget: int, tol: float) -> None:
        self.problem, self.given, self.y0, self.budget, self.tol = problem, (x, y), y0, budget, tol
        self.findings: list[Finding] = []
        self.better: tuple[Any, Any] | None = None
        self.before = 0  # gradients that earlier runs took
        self.start = start_default(problem, x, y, tol, budget)

    def _begin_at(self, y: Any) -> Run:
        """Start a run of the default from the x of the point and another y, with the budget that is left."""
        self.before = self.spent
        self.start = start_default(self.problem, self.given[0], y, self.tol, max(1, self.budget - self.before))
        return self.start

    @staticmethod
    def _flat(value: Any, like: Tensor) -> Tensor:
        leaves = [] if value is None else Variable.of(value, "x").leaves
        return torch.cat([leaf.detach().reshape(-1).to(like) for leaf in leaves]) if leaves else like.new_zeros(0)

    @property
    def spent(self) -> int:
        return self.before + self.start.counts.lower + self.start.counts.hvp

    def run(self) -> Verification:
        coupled = isinstance(self.start.state.course, ActiveSetSearch)
        tests = [self._feasible, self._constrained_lower] if coupled else [self._feasible, self._lower]
        if isinstance(self.problem.response, Nearest) and self.problem.response.weight is None:
            tests.append(self._response)
        for test in (*tests, self._upper):
            try:
                test()
            except BudgetError:
                self._note(test.__name__.strip("_"), "open", f"the budget of {self.budget} gradients was used up")
            if self.findings[-1].outcome == "refuted":
                break
        return Verification(tuple(self.findings), self.F, self.spent, self.better)

    def _note(self, test: str, outcome: Outcome, detail: str, better: tuple[Any, Any] | None = None) -> None:
        self.findings.append(Finding(test, outcome, detail))
        self.better = better if outcome == "refuted" else self.better

    def _feasible(self) -> None:
        """The start of a run is projected on X and Y: how far it moved is how far the point is outside."""
        run, (x, y) = self.start, self.given
        self.x, self.y = curvature.flatten(run.state.x), curvature.flatten(run.state.y)
        self.F = float(run.oracle.upper(run.state.x, run.state.y))
        outside = [
            vector_norm(flat - self._flat(value, flat)) / (1 + vector_norm(flat)) if value is not None else 0.0
            for flat, value in ((self.x, x), (self.y, y))
        ]
        worst = max(outside)
        course = run.state.course
        if isinstance(course, ActiveSetSearch):
            worst = max(worst, course.coupling.violation(course.z0))
        detail = f"largest violation {worst:.1e}"
        self._note("feasible", "passed" if worst <= self.tol else "refuted", detail)

    def _descends(self, F: float, other: float) -> bool:
        """Whether a value is less than another, by more than rounding."""
        return other < F - VISIBLE * self.eps * (abs(F) + abs(other))

    @property
    def eps(self) -> float:
        return max(torch.finfo(leaf.dtype).eps for leaf in self.start.state.y.leaves)

    def _lower(self) -> None:
        """Descend the lower level from y, then from many other starts."""
        # The proximal term of a response has its centre where the run began.
        run = self._begin_at(self.y0) if isinstance(self.problem.response, Nearest) else self.start
        levels = self.levels = FlatProblem(run.oracle, run.state.x, run.state.y)
        sizes = self.sizes = Sizes.of(levels, Default.tol)
        levels.move(self.x, self.y)
        levels.curvatures = curvature.probe(run.oracle, run.state.x, run.state.y, {}, PROBES)
        levels.move(self.x, self.y)
        with levels.until(levels.spent + (self.budget - self.spent) // 2):
            begin = levels.lower(self.y)
            search = self._search(self.y, solved=False)
            end = search.descend(self.y)
            moved = math.inf if end is None else vector_norm(end.z - self.y) / sizes.y_size(self.y)
            if end is None or (moved > self.tol and self._descends(begin.value, end.value)):
                gain = "has no end" if end is None else f"moves y by {moved:.1e} and gains {begin.value - end.value:.1e}"
                better = None if end is None else self._point(self.x, end.z)
                self._note("lower level stationary", "refuted", f"a descent of f + g from y {gain}", better)
                return
            self._note("lower level stationary", "passed", f"a descent of f + g moves y by {moved:.1e}, relative to its size")
            search = self._search(end.z if self._descends(begin.value, end.value) else self.y, solved=True)
            evidence = search.run([self._flat(self.y0, self.y)], (self.budget - self.spent) // 2)
        outcome: Outcome = "refuted" if evidence.excess else "passed" if evidence.certain else "open"
        self._note("lower level global", outcome, str(evidence), self._point(self.x, search.lowest.z))

    def _search(self, y: Tensor, *, solved: bool) -> LowerMultistart:
        levels, sizes = self.levels, self.sizes
        step, error = 1 / (levels.curvatures["f_yy"] or 1.0), self.tol * sizes.x_size(self.x)
        pairs = LimitedMemory.sized(FEW_PAIRS, len(y))
        return LowerMultistart(levels, y, pairs, step, sizes.y_size(y), error if solved else 0.0, solved=solved)

    def _constrained_lower(self) -> None:
        """The same by sequential quadratic programming, where constraints couple the levels."""
        course = self.start.state.course
        coupling, z = course.coupling, course.z0
        x, y = z[: coupling.n], z[coupling.n :]
        least = course.lower.search(x, y)
        if least is None:
            self._note("lower level global", "refuted", "no y meets the constraints of the lower level at this x")
            return
        best = np.concatenate([x, least.w])
        f, lowest = coupling.exact(z)[1], coupling.exact(best)[1]
        gap, distance = f - lowest, float(np.linalg.norm(least.w - y)) / (1 + float(np.linalg.norm(y)))
        descends = distance > self.tol and self._descends(f, lowest) and gap > self.tol**2
        refuted = descends or gap > self.tol * (1 + abs(lowest))
        detail = f"a multistart of the lower level: f at y is {max(gap, 0.0):.1e} above the least"
        coupling.write(best)
        self._note("lower level global", "refuted" if refuted else "passed", detail, (self.start.x, self.start.y))
        coupling.write(z)

    def _response(self) -> None:
        """Compare y with the lower solution nearest to y0."""
        fresh = nearest_solution(self.levels, Sizes(self.x, self._flat(self.y0, self.y), Default.tol, simple=False), self.x)
        distance = vector_norm(fresh.y - self.y) / self.sizes.y_size(self.y)
        outcome: Outcome = "passed" if distance <= self.tol else "refuted"
        if not fresh.solved and outcome == "refuted" and distance <= math.sqrt(self.tol):
            outcome = "open"
        detail = f"the lower solution nearest to y0 is {distance:.1e} away from y, relative to its size"
        self._note("response", outcome, detail, self._point(self.x, fresh.y))

    def _upper(self) -> None:
        """Let the default run from the point: it must end there, and find nothing better."""
        run = self._begin_at(self.y0 if isinstance(self.problem.response, Nearest) else self.given[1])
        highest = lowest = self.F
        while run.verdict is None and run.k < self.budget:
            info = run.step()
            F = float(info["upper"]) if "upper" in info else math.nan  # a step that breaks off has none
            if math.isfinite(F):
                highest, lowest = max(highest, F), min(lowest, F)
        x, y = curvature.flatten(run.state.x), curvature.flatten(run.state.y)
        F = float(run.oracle.upper(run.state.x, run.state.y))
        without_x = self.given[0] is None
        old, new = (self.y, y) if without_x else (self.x, x)
        moved = vector_norm(new - old) / max(vector_norm(old), vector_norm(new), self.eps)
        end = run.verdict
        status, message = (Status.MAX_STEPS, "") if end is None else (end.status, end.message)
        solved = status in (Status.CONVERGED, Status.LOCAL, Status.RULE_MET, Status.AT_INFINITY)
        # Near a minimum, F falls by the square of the distance: smaller gains may be errors of the point.
        falls = self.F - self.tol**2 * (highest - lowest) > F and self._descends(self.F, F)
        what = "y" if without_x else "x"
        if solved and falls and moved > self.tol:
            detail = f"F falls to {F:.6g} at another {what}, {moved:.1e} away relative to its size"
            self._note("upper level", "refuted", detail, (run.x, run.y))
            return
        stays = moved <= self.tol or abs(F - self.F) <= self.tol**2 * (highest - lowest) + VISIBLE * self.eps * abs(F)
        outcome: Outcome = "passed" if stays and status is Status.CONVERGED else "open"
        where = "ends there" if stays else f"ends elsewhere, with F = {F:.6g}"
        self._note("upper level", outcome, f"{run.method.name} from the point {where} ({status}). {message}")

    def _point(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        """A flat point in the structure of the variables."""
        self.levels.move(x, y)
        return self.start.x, self.start.y
