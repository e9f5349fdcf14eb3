"""ImplicitNewton: quasi-Newton steps on the hyper-objective x -> F(x, y*(x)) over X, with Newton steps for y*(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meha.engines.attempt import EngineKind
from meha.engines.base import Engine, EngineState, unverified
from meha.engines.hyper_objective import Domain, HyperObjective, HyperValue, hypergradient
from meha.lower.batched_newton import Batch
from meha.lower.curvature import SEEN
from meha.lower.expansion import Expansion
from meha.lower.newton_on_faces import Factor, LowerResponse, NewtonLower, SmoothFace, factorise, semidefinite, unknown_faces
from meha.lower.newton_tuning import TUNING
from meha.lower.quadratic_model import QuadraticModel
from meha.method.method import Numbers
from meha.method.status import Status, Verdict, first_line
from meha.numerics.limited_memory import FEW_PAIRS, LimitedMemory
from meha.numerics.line_search import LONGER, SHORTER, TRIALS, LineTrial, line_search
from meha.numerics.quadratic_program import solve_program
from meha.numerics.tolerances import DIFFERENCE, FAR, LOOSE, NEAR, PROBES, SAME, SMALL, TIGHT
from meha.problem.oracle import BudgetError, Oracle, lack
from meha.problem.problem import Problem
from meha.tensors.state import Saved
from meha.tensors.torch_private import BREAKDOWNS
from meha.tensors.variables import Variable
from meha.tensors.vectors import Clock, Flat, vector_norm
from meha.tensors.vectors import vector_norm as norm


@dataclass
class Trail:
    """The last few iterates, from which the scales of the stopping tests come.

    The tests take the smallest change among them, because the first iterate may be a distant start, with values of F and
    hypergradients beside which all later ones would seem small.

    Attributes:
        eps: rounding error of the variables.
        points: x, F, and the size of the hypergradient at the last iterates.
        least, most: the range of F so far.
    """

    eps: float
    points: list[tuple[Tensor, float, float]] = field(default_factory=list)
    least: float = math.inf
    most: float = -math.inf

    def add(self, now: HyperValue) -> None:
        """Append an iterate, and drop the oldest."""
        if math.isfinite(now.F):
            self.least, self.most = min(self.least, now.F), max(self.most, now.F)
            self.points = [*self.points, (now.x, now.F, now.size)][-TUNING.recent :]

    @property
    def filled(self) -> bool:
        """Whether there are enough iterates for the tests."""
        return len(self.points) == TUNING.recent

    @property
    def size(self) -> float:
        """The second largest hypergradient of the last iterates; the largest may belong to a distant start."""
        return sorted(size for _, _, size in self.points)[-2:][0]

    @property
    def _moves(self) -> list[float]:
        return [norm(new - old) for (old, _, _), (new, _, _) in pairwise(self.points)]

    @property
    def moved(self) -> float:
        """The length of the shortest of the last moves."""
        return min(self._moves)

    @property
    def unbounded(self) -> bool:
        """Whether x moves on with steps that do not shrink, while F is zero up to rounding: its infimum lies at infinity."""
        steady = all((1 - SMALL) * before <= after for before, after in pairwise(self._moves))  # on x^4 they shrink by 2/3
        return self.filled and steady and abs(self.points[-1][1]) <= self.eps * (self.most - self.least)

    @property
    def spread(self) -> float:
        """The last change of F, or a tiny part of its whole range if that is more."""
        return max(self._changed, self.eps**TIGHT * (self.most - self.least)) if self.points else 0.0

    @property
    def fallen(self) -> float:
        """The range of F over the last iterates."""
        values = [F for _, F, _ in self.points]
        return max(values) - min(values)

    @property
    def _changed(self) -> float:
        last = [F for _, F, _ in self.points[-2:]]
        return max(last) - min(last)

    def scale(self, now: HyperValue) -> float:
        """The scale of F near the end, not less than what rounding hides; a large constant in F is no part of it."""
        wide = max((self.most - self.least) / SAME, self.eps**LOOSE * abs(now.F))
        return max(min(abs(now.F), wide), self._changed, self.eps**2 * (self.most - self.least))


@dataclass
class StationarityMeasures:
    """What is measured at a point that seems to be stationary.

    Attributes:
        pivot: the smallest pivot of the Hessian on the face, relative to its diagonal entry; NaN without a factor.
        error: the estimated error of y, relative to y.
        stationarity: the norm of the hypergradient, relative to its largest; at a kink, of the shortest convex combination of
            the hypergradients nearby.
        weak: the number of weakly active coordinates of y, which a small change of x may free.
    """

    pivot: float
    error: float
    stationarity: float
    weak: int

    def __str__(self) -> str:
        words = f"relative hypergradient {self.stationarity:.1e}; y to about {self.error:.1e}"
        return words + (f"; {self.weak} coordinates of y are about to move" if self.weak else "")

    def converged(self, *, kink: bool = False) -> Verdict:
        """The verdict at a stationary x with a strict minimum y."""
        where = ", at a kink of the hyper-objective" if kink else ""
        curvature = f"smallest pivot {self.pivot:.1e}" if math.isfinite(self.pivot) else "no negative curvature met"
        return Verdict(
            Status.CONVERGED,
            f"Relative hypergradient {self.stationarity:.1e}{where}; y is a strict minimum of the lower level ({curvature}).",
        )

    def irregular(self, factor: Factor, *, regular: bool) -> Verdict:
        """The verdict at a y that is not a strict minimum."""
        kind = "indefinite" if factor.indefinite else "singular"
        if factor.indefinite or not regular:
            return Verdict(Status.BROKE_DOWN, f"The lower Hessian is {kind} on the face of y.")
        return Verdict(
            Status.FINISHED,
            f"Relative hypergradient {self.stationarity:.1e}, but the lower Hessian is singular on the face of y.",
        )


def weakly_active(lower: NewtonLower, now: HyperValue) -> Tensor:
    """A mask of the weakly active coordinates of y: fixed by g or Y, but freed by a small change of the gradient of f."""
    response = now.response
    if lower.faces.smooth or response is None or response.face.index is None:
        return torch.zeros_like(now.y, dtype=torch.bool)
    at, step = response.at, lower.step
    fixed = torch.ones_like(at.y, dtype=torch.bool)
    fixed[response.face.index] = False
    u = at.y - step * at.f_y
    away = torch.where(u >= at.y, 1.0, -1.0).to(u)
    weak = torch.zeros_like(fixed)
    for shift in (away, -away):  # a kink frees a coordinate when f pulls harder; a bound, when f pulls the other way
        face = lower.faces.at(lower.faces.prox(at.x, u + math.sqrt(lower.eps) * lower.scale * shift, step))
        if face.index is not None:
            weak[face.index] = True
    return weak & fixed


def release_direction(lower: NewtonLower, now: HyperValue, zero: float) -> Tensor | None:
    """A direction in x along which g frees fixed coordinates of y that would lower F; None if there is none.

    With A the free coordinates, F changes with a fixed y_i at the rate F_i - H_iA v; once free, y_i moves against f_i. The
    coordinates of x without influence, with hypergradients up to ``zero``, move so that g falls along such moves of y. Example:
    a lasso with one weight per feature, where a weight does not matter as long as its coefficient is zero.
    """
    response, oracle = now.response, lower.oracle
    if oracle.problem.nonsmooth is None or response is None or response.face.index is None or now.rates is None:
        return None
    at, idle = response.at, now.gradient.abs() <= zero
    pull = torch.where(now.rates * at.f_y > 0, -at.f_y, 0.0)  # only where the move of y_i lowers F
    pull[response.face.index] = 0.0
    length = vector_norm(pull)
    if not bool(idle.any()) or not length:
        return None
    # The mixed derivative of g by a difference: it tells in which direction x must go for g to grow less along the move.
    move = lower.eps**LOOSE * (lower.scale or 1.0) / length * pull
    here, there = (lower.flat_x.join(oracle.g_gradient(at.x, lower.flat_y.at(y))) for y in (at.y, at.y + move))
    direction = torch.where(idle, -(there - here).sign(), 0.0)
    return direction if bool(direction.any()) else None


class SaddleEscape:
    """Measures curvatures of the hyper-objective by small moves of x, and leaves saddles along negative ones.

    Args:
        objective, domain, memory: the hyper-objective, X, and the memory that learns the curvatures.
        eps: rounding error of the variables.
        note: is called with each value.
    """

    def __init__(
        self, objective: HyperObjective, domain: Domain, memory: LimitedMemory, eps: float, note: Callable[[HyperValue], None]
    ) -> None:
        self._objective, self._domain, self._memory, self._eps, self._note = objective, domain, memory, eps, note

    def probe(self, now: HyperValue) -> HyperValue | None:
        """Learn the curvature along some directions; where it is negative, return a point of lower F beyond the saddle.

        With few coordinates, differences along each of them give the whole Hessian, whatever the units of x; with many, some
        fixed directions are probed.
        """
        if not self._domain.coordinatewise:  # projected gradients do not use the memory
            return None
        free = self._domain.free(now.x, now.gradient).nonzero().reshape(-1)
        few, columns = len(free) <= 2 * PROBES, []
        for k, move in enumerate(_probes(now.x, free, self._domain.x_size(now.x) or 1.0)):
            new = self._nearby(now, move, grow=few)
            if new is None:
                continue
            change, moved = new.gradient - now.gradient, new.x - now.x
            if float(torch.dot(change, moved)) < 0:  # a saddle or maximum along this direction
                lower = self.descend(now, moved)
                if lower is not None:
                    return lower
            if few:
                columns.append(change[free] / moved[free[k]])
            else:
                self._memory.add(moved, change)
        if columns and len(columns) == len(free):  # else a column is missing, where the lower level was not solved
            self._memory.replace(torch.stack(columns, dim=1), free, len(now.x))
        return None

    def _nearby(self, now: HyperValue, move: Tensor, *, grow: bool) -> HyperValue | None:
        """The hyper-objective after a small part of a move; after a larger one where the gradient changes within rounding."""
        found = None
        length = self._eps**DIFFERENCE
        while length <= 1 / NEAR:
            new = self._objective(self._domain.project(now.x + length * move), now.y)
            if not math.isfinite(new.F):
                break
            self._note(new)
            found = new
            if not grow or norm(new.gradient - now.gradient) > SEEN * self._eps * now.size:
                break
            length *= TUNING.probe_growth
        return found

    def descend(self, now: HyperValue, move: Tensor, signs: tuple[int, ...] = (1, -1)) -> HyperValue | None:
        """A point of lower F, beyond what rounding explains, on either side along a small move; None if there is none."""
        for sign in signs:
            new = self._objective(self._domain.project(now.x + sign * TUNING.probe_growth * move), now.y)
            if new.regular and now.F - self._eps**LOOSE * abs(now.F) > new.F:
                self._memory.clear()  # its pairs belong to the region that was left
                return new
        return None


def _probes(x: Tensor, free: Tensor, size: float) -> Iterator[Tensor]:
    """Moves along which to measure the curvature at x: each free coordinate, or a few fixed directions if there are many."""
    few, phase = len(free) <= 2 * PROBES, torch.arange(len(x), dtype=x.dtype, device=x.device)
    for k in range(len(free) if few else PROBES):
        move = torch.zeros_like(x)
        if few:
            move[free[k]] = float(x[free[k]].abs()) or size  # relative to each coordinate: units do not matter
        else:  # cosines instead of random numbers: the same in a resumed run
            move[free] = ((k + 1) * (phase + 1)).cos()[free] * x[free].abs().clamp(min=size / len(x))
        yield move


class LowerShape:
    """Tells about the curvature of f around a lower solution, from what the Newton solver knows.

    Args:
        lower: the lower level.
    """

    def __init__(self, lower: NewtonLower) -> None:
        self._lower = lower

    def curvatures(self, at: Expansion) -> dict[str, float]:
        """Lower bounds on the norms of second derivatives of f at a point."""
        probe = torch.arange(len(at.y), dtype=at.y.dtype, device=at.y.device).cos()
        coupling = float(torch.linalg.vector_norm(at.cross(probe)) / torch.linalg.vector_norm(probe))
        return {"f_yy": 1 / (self._lower.step or self._lower.first_step(at)), "f_xy": coupling}

    def hessian(self, at: Expansion) -> Tensor | None:
        """The Hessian at a point if it is positive definite; None if it is not, unknown, or known on a face only."""
        lower, factor = self._lower, self._lower.factor
        if factor is None or factor.lower is None or not lower.faces.smooth or not lower.exact(at, factor.face):
            return None
        return factor.lower @ factor.lower.T

    def model(self, at: Expansion) -> QuadraticModel | None:
        """The quadratic model of f in y around a point, if it is convex; None if it is not, or if that is unknown."""
        lower = self._lower
        if lower.hessians.quadratic is False or lower.oracle.problem.g.rho:  # rho > 0: g is not convex
            return None
        if lower.factor is None:  # y has no dense Hessian; conjugate gradients met no negative curvature
            return QuadraticModel(lambda v: at.product(v, g=False)) if lower.faces.smooth else None
        hessian = lower.hessians.matrix
        if hessian is None or not lower.hessians.known_at(at.x):
            return None
        return QuadraticModel(lambda v: hessian @ v) if bool(semidefinite(hessian, lower.eps)) else None

    def determines(self, response: LowerResponse, weak: Tensor) -> bool | None:
        """Whether f + g is strictly convex on the face of y, and f on the face widened by the ``weak`` coordinates.

        Then y is the only solution nearby. None if that is unknown, because the face is too large for a factor.
        """
        factor = self._lower.factor
        if factor is None or not bool(weak.any()):
            return None if factor is None else factor.definite
        wide = weak.clone()
        wide[response.face.index] = True
        index = wide.nonzero().reshape(-1)
        if len(index) > TUNING.dense:
            return None
        return factorise(self._lower.hessian(response.at, index), SmoothFace(index), self._lower.clock).definite


def search_x(
    objective: HyperObjective, start: HyperValue, direction: Tensor, project: Callable[[Tensor], Tensor], eps: float
) -> tuple[HyperValue | None, list[HyperValue]]:
    """Search along the projected direction for a point of lower F that meets Wolfe's conditions; returns it and all trials.

    Where X holds a step at its boundary, a longer one need not lower the slope, and the decrease alone counts.
    """
    tried: list[HyperValue] = []
    guess = start.y

    def trial(length: float) -> LineTrial[HyperValue] | None:
        nonlocal guess
        end = torch.add(start.x, direction, alpha=length)
        x = project(end)
        if torch.equal(x, start.x):  # X blocks the direction, or the length is below rounding
            return None
        if tried and torch.equal(x, tried[-1].x):  # a bound of X holds it
            new = tried[-1]
        else:
            new = objective(x, guess)
            tried.append(new)
        usable = math.isfinite(new.F) and new.regular
        guess = new.y if usable and new.F < start.F else guess
        clipped = x is not end and not torch.equal(x, end)
        slope = float(torch.dot(new.gradient, direction)) if usable and not clipped else math.nan
        return LineTrial(new, new.F if usable else math.inf, slope, float(torch.dot(start.gradient, x - start.x)))

    slope = float(torch.dot(start.gradient, direction))
    # Where only tiny steps help, the lower level is singular there, and another engine is the better choice.
    return line_search(trial, start.F, slope, noise=eps**LOOSE * abs(start.F), trials=TRIALS // 2), tried


def shortest_combination(gradients: Tensor) -> Tensor:
    """The shortest vector in the convex hull of the rows: min ||G' w|| over weights w >= 0 of sum 1.

    At a kink, x is stationary if zero is a convex combination of the gradients around it, although none of them is zero.
    """
    count, gram = len(gradients), (gradients @ gradients.T).numpy(force=True).astype(float)
    answer = solve_program(gram, np.zeros(count), -np.eye(count), np.zeros(count), np.ones((1, count)), np.ones(1))
    return gradients.T @ torch.as_tensor(answer.z).to(gradients)


SINGULAR = "The lower Hessian is singular on the face of y."


class HyperDescent(Saved):
    """Minimise x -> F(x, y*(x)) over X, with y* by Newton steps and its derivative by the implicit function theorem.

    A step takes a quasi-Newton direction and a weak Wolfe line search; where X is not a product of intervals, a projected
    gradient with a spectral step. A point that seems stationary is confirmed: its curvature is probed, and its y re-solved.

    Args:
        oracle, x, y: the problem, and the variables that hold the last point.
        tol: the relative accuracy of x.
        allowed: gradients of f and products with its Hessian after which it gives up.
        clock: measures where the time goes.

    Attributes:
        start: the point (x, y) of a restart; None for the first start, which is in the variables.
        now: the hyper-objective at the last point; None before the first step.
        verdict: how it ended; None while there is something to do. ``converged`` means that x is stationary and y a strict
            minimum on its face, and says nothing about other basins of the lower level.
        measures: what was measured at the end.
        steps: number of steps in x.
        trail: the last iterates.
    """

    saves = (
        *("start", "tol", "spectral", "largest", "moving", "steps", "resting", "released", "nearby", "before"),
        *("lower", "objective", "domain", "memory", "batch", "now", "trail", "measures", "verdict"),
    )

    def __init__(
        self, oracle: Oracle, x: Variable, y: Variable, tol: float, allowed: float = math.inf, clock: Clock | None = None
    ) -> None:
        self.oracle, self.tol, self.clock = oracle, tol, clock or Clock()
        self.flat_x, self.flat_y = Flat(x), Flat(y)
        self.eps = max(self.flat_x.eps, self.flat_y.eps)
        self.lower = NewtonLower(oracle, self.flat_x, self.flat_y, self.clock)
        self.lower.limit = allowed
        self.objective = HyperObjective(self.lower, self.flat_x, self.clock)
        self.domain = Domain(oracle, self.flat_x)
        self.memory = LimitedMemory(FEW_PAIRS)
        self.batch = Batch(self.lower)
        self.shape = LowerShape(self.lower)
        self.saddle_escape = SaddleEscape(self.objective, self.domain, self.memory, self.eps, self._note)
        self.start: tuple[Tensor, Tensor] | None = None
        self._reset()

    def _reset(self) -> None:
        """Set everything that belongs to one descent to its initial value."""
        self.memory.clear()
        self.now: HyperValue | None = None
        self.verdict: Verdict | None = None
        self.spectral = 0.0  # the Barzilai-Borwein step of projected gradients, where X is not a product of intervals
        self.largest = 0.0  # the largest size of a hypergradient so far
        self.nearby: list[tuple[Tensor, Tensor]] = []  # points and hypergradients of the last evaluations
        self.steps, self.trail = 0, Trail(self.eps)
        self.moving: int | None = None  # the number of coordinates of y that can move
        self.resting = 0  # steps in a row without progress
        self.released = False  # whether fixed coordinates of y were freed
        self.before: tuple[Tensor, Tensor, float] | None = None  # the stationary point before a release, and when to return
        self.measures: StationarityMeasures | None = None

    def restart(self, x: Tensor, y: Tensor, tol: float, allowed: float) -> None:
        """Restart at another point, with a limit on all evaluations; what the lower solver knows about Hessians stays."""
        self._reset()
        self.start, self.tol, self.objective.limit = (x, y), tol, allowed

    def advance(self) -> Numbers:
        """Take a step, and write the point into the variables; after a restart, the first step only evaluates the start."""
        try:
            restarted = self.now is None and self.start is not None
            now = self.now or self._begin()
            if self.verdict is None and not restarted:
                now = self._step(now) if self.before is None or self._spent < self.before[2] else self._return(now)
                self.steps += 1
                self.trail.add(now)
            self.now = now
            if now.response is not None:
                self.moving = now.response.face.count(self.flat_y.size)
        except BudgetError:
            self.verdict = Verdict(Status.FINISHED, "Gradient budget exhausted (max_gradients).")
        except (*BREAKDOWNS, RuntimeError) as error:  # such as a function without second derivatives
            lacking = isinstance(error, RuntimeError) and lack(error)
            message = f"Torch has no second derivatives of this problem ({lacking})." if lacking else first_line(error)
            self.verdict = Verdict(Status.BROKE_DOWN, message)
        if (at := self.now) is None or not math.isfinite(at.F):
            return {}
        self.flat_x.write(at.x)
        self.flat_y.write(at.y)
        return {"upper": at.F, "lower": at.lower, "residual": self._residual(at)}

    @property
    def _spent(self) -> int:
        return self.oracle.counts.lower + self.oracle.counts.hvp

    def _return(self, now: HyperValue) -> HyperValue:
        """Return to the stationary point before a release that did not reach another one within its budget."""
        assert self.before is not None
        (x, y, _), self.before = self.before, None
        back = self._confirm(self.objective(x, y))
        if self.verdict is not None:
            note = f"F is lower, {now.F:.6g}, on a long way to another local solution."
            self.verdict = replace(self.verdict, message=f"{self.verdict.message} {note}")
        return back

    def _free(self, now: HyperValue) -> Tensor:
        return self.domain.free(now.x, now.gradient)

    def _residual(self, now: HyperValue) -> float:
        return self.domain.residual(now.x, now.gradient)

    def _begin(self) -> HyperValue:
        """Evaluate the hyper-objective at the start."""
        x, y = self.start or (self.flat_x.read(), self.flat_y.read())
        if self.start is None:  # a restart needs no further check
            self.objective.check_dependence(x, y)
        self.domain.start_size = norm(x)
        now = self.objective(x, y)
        if not math.isfinite(now.F):
            self.verdict = Verdict(Status.BROKE_DOWN, "The lower level was not solved at the start.")
        elif not now.regular:
            self.verdict = Verdict(Status.BROKE_DOWN, SINGULAR)
        self._note(now)
        self.trail.add(now)
        return now

    def _note(self, value: HyperValue, *, reached: bool = True) -> None:
        """Remember the hypergradient at a point; far trials of a search that failed are no scale for those near the start."""
        if math.isfinite(value.F):
            self.largest = max(self.largest, value.size) if reached else self.largest
            self.nearby = [*self.nearby, (value.x, value.gradient)][-FEW_PAIRS:]

    def _direction(self, now: HyperValue) -> Tensor:
        """The quasi-Newton direction on the free coordinates of x; the gradient step if nothing is known of the curvature.

        Where X is not a product of intervals, a projected gradient with a spectral step (Birgin, Martinez and Raydan, 2000).
        """
        size, x_size = now.length, self.domain.x_size(now.x)
        if not size:
            return torch.zeros_like(now.x)
        # Without a scale of x, at zero, the step promises a decrease of |F|.
        plain = TUNING.first_step * x_size / size if x_size else abs(now.F) / size**2 or 1 / size
        if not self.domain.coordinatewise:
            step = self.spectral or plain
            return self.domain.project(now.x - step * now.gradient) - now.x
        free = self._free(now)
        direction = self.memory.direction(now.gradient, free)
        if direction is not None and float(torch.dot(direction, now.gradient)) < 0:  # rounding may turn it uphill
            length = norm(direction)
            return direction * min(1.0, FAR * (x_size or length) / length)
        self.memory.clear()
        return torch.where(free, -plain * now.gradient, 0.0)

    def _step(self, now: HyperValue) -> HyperValue:
        """Take a step in x, or confirm that x is stationary."""
        direction = self._direction(now)
        if self._stationary(now, direction):
            # Few pairs may miss a saddle, or a direction in another unit: measure the curvature before trusting the test.
            sizes = now.x[self._free(now)].abs()
            even = not len(sizes) or bool((sizes >= NEAR * sizes.max()).all())
            explored = even and len(self.memory) >= len(sizes)
            lower = None if explored else self.saddle_escape.probe(self._resolved(now))
            if lower is not None:
                return lower
            if explored or self._stationary(now, self._direction(now)):
                return self._confirm(now)
            direction = self._direction(now)
        new, tried = self._search(now, direction)
        # A search may fail because of an inaccurate y, or of a memory from another region: exclude one after the other.
        if new is None and now.error > self.lower.tol:
            now = self._resolved(now)
            new, tried = self._search(now, self._direction(now))
        if new is None and self._learned():
            self.memory.clear()
            self.spectral = 0.0
            new, tried = self._search(now, self._direction(now))
        if new is None and not self._learned() and all(value.regular for value in tried):
            # The length of a first step is a guess, which may be far too long.
            new, tried = self._search(now, SHORTER ** len(tried) * direction)
        if new is None:
            return self._confirm(now, stuck=True, tried=tried)
        move, change = new.x - now.x, new.gradient - now.gradient
        stalled = norm(move) <= self.tol * self.domain.x_size(now.x) and self.tol**2 * self.trail.scale(now) >= now.F - new.F
        self.resting = self.resting + 1 if stalled else 0
        if self.resting > TUNING.recent:  # F no longer falls, while x jumps from one side of a kink to the other
            return self._confirm(new, stuck=True)
        product, square = float(torch.dot(move, change)), float(torch.dot(move, move))
        self.spectral = square / product if product > 0 else 0.0  # Barzilai and Borwein (1988)
        self.memory.add(move, change)
        # Numbers in other units may be FAR away at the answer.
        if self.domain.x_size(new.x) > FAR**2 * max(self.domain.start_size, 1.0) or self.trail.unbounded:
            self.verdict = Verdict(Status.AT_INFINITY, "F still falls as x goes on without bound; bound x (x_set).")
        return new

    def _search(self, now: HyperValue, direction: Tensor) -> tuple[HyperValue | None, list[HyperValue]]:
        """Search along a direction, with y only as accurate as the step needs; returns the new point and all trials."""
        self.lower.accuracy = self._needed_accuracy(now)
        new, tried = search_x(self.objective, now, direction, self.domain.project, self.eps)
        self.lower.accuracy = self.lower.tol
        for value in tried:
            self._note(value, reached=new is not None)
        return new, tried

    def _needed_accuracy(self, now: HyperValue) -> float:
        """The relative accuracy of y that a step needs: a small part of the relative hypergradient."""
        relative = self._residual(now) / self.largest if self.largest else 0.0
        return max(self.lower.tol, TUNING.accuracy * relative)

    def _resolved(self, now: HyperValue) -> HyperValue:
        """The same x with y re-solved, if its error exceeds the accuracy that is asked for now."""
        return self.objective(now.x, now.y) if now.error > self.lower.accuracy else now

    def _learned(self) -> bool:
        """Whether anything is known about the curvature in x."""
        return self.memory.known or (not self.domain.coordinatewise and self.spectral > 0)

    def _stationary(self, now: HyperValue, direction: Tensor) -> bool:
        """Whether the next step is short beside tol, or promises no decrease, and the hypergradient is small."""
        size, trail = self._residual(now), self.trail
        if not size:
            return True
        if not trail.filled or not self._learned():  # without a curvature, the length of a step means nothing
            return size <= self.eps * trail.size
        small = norm(direction) <= SMALL * self.tol * max(norm(now.x), trail.moved)
        if not (small and self._gain(now, direction) <= self.tol) and not self._negligible(now, direction):
            return size <= self.eps * trail.size
        # A wrong memory makes steps short as well, so the hypergradient must also be small beside the parts it consists of.
        return size <= SAME * trail.size or size <= SAME * self.objective.scale(now)

    def _gain(self, now: HyperValue, direction: Tensor) -> float:
        """The decrease of F that a direction promises, relative to F; where F goes to zero, to a part of its last decrease."""
        scale = max(self.trail.scale(now), self.tol * self.trail.fallen)
        return -float(torch.dot(now.gradient, direction)) / (scale or 1.0)

    def _negligible(self, now: HyperValue, direction: Tensor) -> bool:
        # Near a minimum, F exceeds its least value by the square of the error of x.
        return self._gain(now, direction) <= (SMALL * max(self.tol, self.eps**TIGHT)) ** 2

    def _confirm(self, now: HyperValue, *, stuck: bool = False, tried: Sequence[HyperValue] = ()) -> HyperValue:
        """Decide whether a point is a solution: x must be stationary, and y a strict minimum on its face.

        Sets the verdict, or returns a point from which the descent goes on.

        Args:
            stuck: whether no step from the point lowers F, although the hypergradient is not small.
            tried: the trials of the line search that failed.
        """
        response = self.lower.solve(self.flat_x.at(now.x), now.y)
        at, face = response.at, response.face
        factor = self.lower.renew(at, face)  # an old factor would say nothing about the curvature here
        now = hypergradient(self.lower, response, rates=not self.lower.faces.smooth)
        pivot = factor.pivot if factor is not None else math.nan
        residual = self._residual(now)
        weak = int(weakly_active(self.lower, now).sum())
        if not stuck and residual > SAME * self.largest:  # not stationary with an accurate y: go on
            self.memory.clear()
            return now
        measures = self.measures = StationarityMeasures(pivot, response.error, residual / (self.largest or 1.0), weak)
        if not response.solved:
            self.verdict = Verdict(Status.BROKE_DOWN, "The lower level was not solved.")
        elif stuck and any(not value.regular for value in tried):
            self.verdict = Verdict(Status.BROKE_DOWN, SINGULAR)
        elif factor is not None and not factor.definite:
            self.verdict = measures.irregular(factor, regular=now.regular)
        elif stuck and not self._at_kink(now, measures):
            message = f"No step along the hypergradient lowers F, of relative size {measures.stationarity:.1e}."
            small = measures.stationarity <= self.eps**LOOSE or self._negligible(now, self._direction(now))
            self.verdict = measures.converged() if small else Verdict(Status.FINISHED, message)
        else:
            # A zero hypergradient is not enough where y can change its face: F may fall on the other side of the kink.
            lower = (self._cross_kink(now) if weak else None) or self._release(now)
            if lower is not None:
                return lower
            self.verdict = measures.converged(kink=stuck or weak > 0)
        return now

    @property
    def model(self) -> QuadraticModel | None:
        """The quadratic model of f in y around the last point, if f seems to be convex and quadratic."""
        assert self.now is not None
        assert self.now.response is not None
        return self.shape.model(self.now.response.at)

    @property
    def determined(self) -> bool | None:
        """Whether f is strictly convex in all directions in which y can move from the last point; None if unknown."""
        assert self.now is not None
        assert self.now.response is not None
        return self.shape.determines(self.now.response, weakly_active(self.lower, self.now))

    def _nearby_gradients(self, now: HyperValue) -> Tensor:
        """The hypergradients of recent evaluations close to x, on its free coordinates, one in each row."""
        reach = max(self.tol, self.eps**LOOSE) / SMALL * self.domain.x_size(now.x)
        rows = [gradient for x, gradient in self.nearby if norm(x - now.x) <= reach]
        return torch.where(self._free(now), torch.stack([*rows, now.gradient]), 0.0)

    def _cross_kink(self, now: HyperValue) -> HyperValue | None:
        """A point of lower F on the other side of a kink, along a hypergradient that was seen there; None without one."""
        for row in self._nearby_gradients(now):
            size = norm(row)
            if size > SAME * self.largest:  # smaller ones belong to the side of x, which is stationary
                length = self.eps**DIFFERENCE * (self.domain.x_size(now.x) or 1.0)
                lower = self.saddle_escape.descend(now, -length / size * row, signs=(1,))
                if lower is not None:
                    return lower
        return None

    def _release(self, now: HyperValue) -> HyperValue | None:
        """Move x so far that g frees fixed coordinates of y, and return the best point met; None if F is nowhere lower.

        The hypergradient cannot show such a decrease: as long as y_i is fixed, the coordinate of x that fixes it has none.
        """
        if self.released:  # each release may lead to hundreds of further steps
            return None
        direction = release_direction(self.lower, now, self.eps * self.largest)
        if direction is None:
            return None
        self.released = True
        unit = (self.domain.x_size(now.x) or 1.0) / math.sqrt(len(now.x))  # the root mean square of the coordinates
        gain, best, guess = self.tol * self.trail.scale(now), now, now.y
        for exponent in range(PROBES):
            x = self.domain.project(now.x + TUNING.first_step * LONGER**exponent * unit * direction)
            new = self.objective(x, guess)
            if not new.regular or now.F + gain < new.F:  # too far; an F that is merely equal may still fall beyond
                break
            best, guess = (new if best.F - gain > new.F else best), new.y
        if best is now:
            return None
        self.memory.clear()
        self.before = now.x, now.y, self._spent + 2 * self._spent
        return best

    def _at_kink(self, now: HyperValue, measures: StationarityMeasures) -> bool:
        """Whether x is stationary at a kink: a convex combination of the hypergradients around it is nearly zero.

        No single hypergradient vanishes at a kink, but zero is then in Clarke's subdifferential, the convex hull of the limits
        of hypergradients; those of the last evaluations stand for it (gradient sampling; Burke, Lewis and Overton, 2005).
        """
        rows = self._nearby_gradients(now)
        if len(rows) <= 2 or not self.domain.coordinatewise:
            return False
        size = norm(shortest_combination(rows)) / (self.largest or 1.0)
        measures.stationarity = min(size, measures.stationarity)
        return size <= SAME

    def __str__(self) -> str:
        words = f"{self.steps} Newton step{'' if self.steps == 1 else 's'} in x"
        kind = "quadratic in y" if self.lower.hessians.quadratic else "smooth"
        moving = f"; f {kind}; {self.moving} of {self.flat_y.size} coordinates of y can move"
        return words if self.moving is None else words + moving


def refusal(problem: Problem, x: Variable, y: Variable) -> str:
    """Why implicit Newton cannot take a problem; empty if it can."""
    if problem._without_x:
        return "there is no x"
    if x.has_modules or y.has_modules:
        return "x or y has modules"
    unknown = unknown_faces(problem, y)
    return f"the faces of {unknown} are curved or unknown" if unknown else ""


class ImplicitNewtonRun(Saved):
    """Runs the descent alone: its first stationary point is the answer, and nothing is verified."""

    engine = EngineKind.IMPLICIT_NEWTON.value
    saves = ("descent",)

    def __init__(self, descent: HyperDescent) -> None:
        self.descent = descent

    @property
    def verdict(self) -> Verdict | None:
        """How the descent ended; None while it goes on."""
        end = self.descent.verdict
        return end and unverified(end)

    def advance(self) -> Numbers:
        """Take a step."""
        return self.descent.advance()

    def report(self) -> dict[str, str]:
        """The number of steps, the kind of f, the time, and the accuracy."""
        lines = {"course": str(self.descent), "time": str(self.descent.clock)}
        return lines if self.descent.measures is None else lines | {"accuracy": str(self.descent.measures)}


@dataclass(frozen=True, kw_only=True)
class ImplicitNewton(Engine):
    """Quasi-Newton steps on the hyper-objective x -> F(x, y*(x)), to the first stationary point; nothing is verified.

    y*(x) is found by Newton steps on the face of g and Y that holds y, with dense Hessians or conjugate gradients. The
    implicit function theorem gives the hypergradient

        F_x - f_xy' (f_yy)^-1 F_y,    restricted to the face.

    It needs second derivatives, and a lower level with a strict minimum. The default of :func:`meha.solve` begins with this
    engine, and then also looks for other basins and other solutions; see :class:`~meha.methods.Default`.

    Args:
        tol: the relative accuracy of x.
        max_gradients: upper bound on the gradients of f; a product with its Hessian counts as one.

    >>> import torch, meha
    >>> problem = meha.problems.strong_convex(n=3)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, meha.ImplicitNewton())
    >>> print(solution.engine, solution.status, solution.x)
    ImplicitNewton rule met tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """

    tol: float = 1e-6

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return f"Take the default, which has other engines for hard problems. {super().advice(problem, x, y, batch)}"

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> EngineState:
        why = refusal(oracle.problem, x, y)
        if why:
            raise ValueError(
                f"method: ImplicitNewton cannot take this problem: {why}; use the default, or PenaltyContinuation()."
            )
        descent = HyperDescent(oracle, x, y, self.tol, self.max_gradients)
        return EngineState(x=x, y=y, course=ImplicitNewtonRun(descent), settled=False)
