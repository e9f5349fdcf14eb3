"""Engine: quasi-Newton steps on x -> F(x, y*(x)) over X, one at a time, and their end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._running import Numbers
from meha._second_order import Clock, Flat
from meha._torch import BREAKDOWNS
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods._bowls import Quadratic
from meha.methods._levels import BudgetError, LowerPoint
from meha.methods._quasi_newton import size as norm
from meha.methods._verification import Origin
from meha.methods.newton.batch import Batch
from meha.methods.newton.domain import Domain
from meha.methods.newton.ending import Signs, Trail
from meha.methods.newton.hyper import HyperObjective, Value, hypergradient
from meha.methods.newton.kinks import letting_go, weakly_held
from meha.methods.newton.lower import LowerLevel
from meha.methods.newton.quasi_newton import Memory, search, shortest_combination
from meha.methods.newton.shape import Shape
from meha.methods.newton.surroundings import Surroundings
from meha.methods.newton.survey import Survey
from meha.methods.newton.tuning import TUNING

__all__ = ["Engine"]

NUMBERS = ("start", "tol", "spectral", "largest", "moving", "steps", "resting", "released", "nearby", "before")
"""What a checkpoint keeps besides the memories."""

SINGULAR = "The lower Hessian is singular on the face of y."


class Engine:
    """Minimise x -> F(x, y*(x)) over X, with y* by Newton steps and its derivative by the implicit function theorem.

    Args:
        oracle, x, y: the problem, and the variables that hold the last point.
        tol: the relative accuracy of x.
        allowed: gradients of f and products with its Hessian after which it gives up.
        clock: where the time goes to.

    Attributes:
        start: where it begins, if not where the variables are.
        now: the hyper-objective at the last point; None before the first step.
        verdict: how it ended; None while there is something to do. ``converged`` means that x is stationary and y a strict
            minimum on its face, and says nothing about other valleys of the lower level.
        signs: the measures at the end.
        steps: number of steps in x.
        trail: the last points.
    """

    def __init__(
        self, oracle: Oracle, x: Variable, y: Variable, tol: float, allowed: float = math.inf, clock: Clock | None = None
    ) -> None:
        self.oracle, self.tol, self.clock = oracle, tol, clock or Clock()
        self.flat_x, self.flat_y = Flat(x), Flat(y)
        self.eps = max(self.flat_x.eps, self.flat_y.eps)
        self.lower = LowerLevel(oracle, self.flat_x, self.flat_y, self.clock)
        self.lower.limit = allowed
        self.objective = HyperObjective(self.lower, self.flat_x, self.clock)
        self.domain = Domain(oracle, self.flat_x)
        self.memory = Memory()
        self.batch = Batch(self.lower)
        self.shape = Shape(self.lower)
        self.surroundings = Surroundings(self.objective, self.domain, self.memory, self.eps, self._note)
        self.start: tuple[Tensor, Tensor] | None = None
        self._clear()

    def _clear(self) -> None:
        """Forget where it was."""
        self.memory.clear()
        self.now: Value | None = None
        self.verdict: Verdict | None = None
        self.spectral = 0.0  # the step of projected gradients, where X is not a product of intervals
        self.largest = 0.0  # the largest size of a hypergradient so far
        self.nearby: list[tuple[Tensor, Tensor]] = []  # points and hypergradients of the last steps
        self.steps, self.trail = 0, Trail(self.eps)
        self.moving: int | None = None  # the number of coordinates of y that can move
        self.resting = 0  # steps in a row that gained nothing
        self.released = 0  # times that held coordinates of y were let go
        self.before: tuple[Tensor, Tensor, float] | None = None  # the point before, and when to return to it
        self.signs: Signs | None = None

    def restart(self, x: Tensor, y: Tensor, tol: float, allowed: float) -> None:
        """Begin once more, at another point, with a limit on all evaluations; what is known about Hessians stays."""
        self._clear()
        self.start, self.tol, self.objective.limit = (x, y), tol, allowed

    def survey(self, bottom: LowerPoint, origins: Sequence[Origin], far: tuple[Tensor, Tensor], others: Tensor) -> Survey:
        """What is seen from the last point, where f is ``bottom``."""
        assert self.now is not None
        return Survey(self.objective, self.batch, self.now.x, bottom, origins, far, others)

    def advance(self) -> Numbers:
        """Take a step, and put the point into the variables; after a restart, the first one only evaluates the start."""
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
            self.verdict = Verdict(Status.FINISHED, "It took all gradients that it may.")
        except (*BREAKDOWNS, RuntimeError) as error:  # such as a function without second derivatives
            self.verdict = Verdict(Status.BROKE_DOWN, f"{type(error).__name__}: {error}".split("\n", 1)[0])
        if (at := self.now) is None or not math.isfinite(at.F):
            return {}
        self.flat_x.write(at.x)
        self.flat_y.write(at.y)
        return {"upper": at.F, "lower": at.lower, "residual": self._residual(at)}

    @property
    def _spent(self) -> int:
        return self.oracle.counts.lower + self.oracle.counts.hvp

    def _return(self, now: Value) -> Value:
        """Return to the last point that was stationary, where the way from it is long."""
        assert self.before is not None
        (x, y, _), self.before = self.before, None
        back = self._confirm(self.objective(x, y))
        if self.verdict is not None:
            note = f"F is lower, {now.F:.6g}, on a long way to another local solution."
            self.verdict = replace(self.verdict, message=f"{self.verdict.message} {note}")
        return back

    def _free(self, now: Value) -> Tensor:
        return self.domain.free(now.x, now.gradient)

    def _residual(self, now: Value) -> float:
        return self.domain.residual(now.x, now.gradient)

    def _begin(self) -> Value:
        """The hyper-objective at the start."""
        x, y = self.start or (self.flat_x.read(), self.flat_y.read())
        if self.start is None:
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

    def _note(self, value: Value) -> None:
        if math.isfinite(value.F):
            self.largest = max(self.largest, value.size)
            self.nearby = [*self.nearby, (value.x, value.gradient)][-TUNING.sampled :]

    def _direction(self, now: Value) -> Tensor:
        """A quasi-Newton direction, or one of the length of a first step; a projected step where X is general."""
        size, x_size = now.length, self.domain.x_size(now.x)
        if not size:
            return torch.zeros_like(now.x)
        plain = TUNING.first_step * x_size / size if x_size else abs(now.F) / size**2 or 1 / size
        if not self.domain.coordinatewise:
            step = self.spectral or plain
            return self.domain.project(now.x - step * now.gradient) - now.x
        free = self._free(now)
        direction = self.memory.direction(now.gradient, free)
        if direction is not None and float(torch.dot(direction, now.gradient)) < 0:
            length = norm(direction)
            return direction * min(1.0, TUNING.widest * (x_size or length) / length)
        self.memory.clear()
        return torch.where(free, -plain * now.gradient, 0.0)

    def _step(self, now: Value) -> Value:
        direction = self._direction(now)
        if self._stationary(now, direction):
            explored = self._explored(now)
            lower = None if explored else self.surroundings.probe(self._sharpened(now))
            if lower is not None:
                return lower
            if explored or self._stationary(now, self._direction(now)):
                return self._confirm(now)
            direction = self._direction(now)
        new, tried = self._search(now, direction)
        if new is None and now.error > self.lower.tol:
            now = self._sharpened(now)
            new, tried = self._search(now, self._direction(now))
        if new is None and self._learned():
            self.memory.clear()
            self.spectral = 0.0
            new, tried = self._search(now, self._direction(now))
        if new is None:
            return self._confirm(now, stuck=True, tried=tried)
        move, change = new.x - now.x, new.gradient - now.gradient
        rests = norm(move) <= self.tol * self.domain.x_size(now.x) and self.tol**2 * self.trail.scale(now) >= now.F - new.F
        self.resting = self.resting + 1 if rests else 0
        if self.resting > TUNING.rests:  # F has come down as far as it can, and x jumps across a kink
            return self._confirm(new, stuck=True)
        product, square = float(torch.dot(move, change)), float(torch.dot(move, move))
        self.spectral = square / product if product > 0 else 0.0
        self.memory.update(move, change)
        if self.domain.x_size(new.x) > TUNING.far * max(self.domain.start_size, 1.0) or self.trail.unbounded:
            self.verdict = Verdict(Status.AT_INFINITY, "F still falls as x goes on without bound; bound x (x_set).")
        return new

    def _explored(self, now: Value) -> bool:
        """Whether the pairs tell the curvature along all free coordinates, as far as these have similar units."""
        sizes = now.x[self._free(now)].abs()
        even = not len(sizes) or bool((TUNING.uneven * sizes >= sizes.max()).all())
        return even and self.memory.count >= TUNING.explored * len(sizes)

    def _search(self, now: Value, direction: Tensor) -> tuple[Value | None, list[Value]]:
        """A step along a direction, with y as accurate as it needs."""
        self.lower.accuracy = self._needed(now)
        new, tried = search(self.objective, now, direction, self.domain.project, self.eps)
        if new is not None and self._residual(new) < TUNING.blurred * new.error * self.largest:
            self.lower.accuracy = self._needed(new)
            new = self._sharpened(new)
        self.lower.accuracy = self.lower.tol
        for value in tried:
            self._note(value)
        return new, tried

    def _needed(self, now: Value) -> float:
        """The accuracy of y that a step from a point needs."""
        relative = self._residual(now) / self.largest if self.largest else 0.0
        return max(self.lower.tol, TUNING.beyond_x * self.tol, min(TUNING.loosest, TUNING.accuracy * relative))

    def _sharpened(self, now: Value) -> Value:
        """A point with y as accurate as the lower level is solved now."""
        return self.objective(now.x, now.y) if now.error > self.lower.accuracy else now

    def _learned(self) -> bool:
        return self.memory.known or (not self.domain.coordinatewise and self.spectral > 0)

    def _stationary(self, now: Value, direction: Tensor) -> bool:
        """Whether the step that remains is within tol of x, or promises nothing, at a small hypergradient."""
        size, trail = self._residual(now), self.trail
        if not size:
            return True
        if not trail.tells or not self._learned():
            return size <= self.eps * trail.size
        small = norm(direction) <= TUNING.beyond_tol * self.tol * max(norm(now.x), trail.moved)
        if not (small and self._gain(now, direction) <= self.tol) and not self._negligible(now, direction):
            return size <= self.eps * trail.size
        return size <= TUNING.settled * trail.size or size <= TUNING.settled * self.objective.scale(now)

    def _gain(self, now: Value, direction: Tensor) -> float:
        """The decrease of F that a direction promises, relative to F, or to a part of what F fell by where it goes to zero."""
        scale = max(self.trail.scale(now), self.tol * self.trail.fallen)
        return -float(torch.dot(now.gradient, direction)) / (scale or 1.0)

    def _negligible(self, now: Value, direction: Tensor) -> bool:
        return self._gain(now, direction) <= TUNING.negligible * max(self.tol, self.eps**TUNING.lower_power) ** 2

    def _confirm(self, now: Value, *, stuck: bool = False, tried: Sequence[Value] = ()) -> Value:
        """The verdict at a point that seems to be the end: y must be a strict minimum on its face, and x stationary."""
        response = self.lower.solve(self.flat_x.at(now.x), now.y)
        at, face = response.at, response.face
        factor = self.lower.renew(at, face)
        now = hypergradient(self.lower, response, rates=not self.lower.faces.smooth)
        pivot = factor.pivot if factor is not None else math.nan
        residual = self._residual(now)
        weak = int(weakly_held(self.lower, now).sum())
        if not stuck and residual > TUNING.settled * self.largest:
            self.memory.clear()
            return now
        signs = self.signs = Signs(pivot, response.error, residual / (self.largest or 1.0), weak)
        if not response.solved:
            self.verdict = Verdict(Status.BROKE_DOWN, "The lower level was not solved.")
        elif stuck and any(not value.regular for value in tried):
            self.verdict = Verdict(Status.BROKE_DOWN, SINGULAR)
        elif factor is not None and not factor.definite:
            self.verdict = signs.irregular(factor, regular=now.regular)
        elif stuck and not self._at_kink(now, signs):
            message = f"No step along the hypergradient lowers F, of relative size {signs.stationarity:.1e}."
            small = signs.stationarity <= self.eps**TUNING.loose_power or self._negligible(now, self._direction(now))
            self.verdict = signs.converged() if small else Verdict(Status.FINISHED, message)
        else:
            lower = (self._across(now) if weak else None) or self._release(now)
            if lower is not None:
                return lower
            self.verdict = signs.converged(kink=stuck or weak > 0)
        return now

    @property
    def model(self) -> Quadratic | None:
        """f around the last point, if it seems to be a convex quadratic function of y."""
        assert self.now is not None
        assert self.now.response is not None
        return self.shape.model(self.now.response.at)

    @property
    def determined(self) -> bool | None:
        """Whether f is strictly convex wherever y could move from the last point; None where that is not known."""
        assert self.now is not None
        assert self.now.response is not None
        return self.shape.determines(self.now.response, weakly_held(self.lower, self.now))

    def _around(self, now: Value) -> Tensor:
        """Hypergradients from nearby along the free coordinates of x, one in each row."""
        reach = TUNING.near * max(self.tol, self.eps**TUNING.loose_power) * self.domain.x_size(now.x)
        rows = [gradient for x, gradient in self.nearby if norm(x - now.x) <= reach]
        return torch.where(self._free(now), torch.stack([*rows, now.gradient]), 0.0)

    def _across(self, now: Value) -> Value | None:
        """A point of lower F along a hypergradient of another face, where y is about to change its face."""
        for row in self._around(now):
            size = norm(row)
            if size > TUNING.settled * self.largest:
                length = self.eps**TUNING.probe_power * (self.domain.x_size(now.x) or 1.0)
                lower = self.surroundings.descend(now, -length / size * row, signs=(1,))
                if lower is not None:
                    return lower
        return None

    def _release(self, now: Value) -> Value | None:
        """The best of some points with coordinates of y free that g holds now; None if F is not lower at any of them."""
        if self.released >= TUNING.rounds:
            return None
        direction = letting_go(self.lower, now, self.eps * self.largest)
        if direction is None:
            return None
        self.released += 1
        unit = (self.domain.x_size(now.x) or 1.0) / math.sqrt(len(now.x))
        gain, best, guess = self.tol * self.trail.scale(now), now, now.y
        for exponent in range(TUNING.releases):
            x = self.domain.project(now.x + TUNING.release * TUNING.growth**exponent * unit * direction)
            new = self.objective(x, guess)
            if not new.regular or now.F + gain < new.F:
                break
            best, guess = (new if best.F - gain > new.F else best), new.y
        if best is now:
            return None
        self.memory.clear()
        self.before = now.x, now.y, self._spent + TUNING.detour * self._spent
        return best

    def _at_kink(self, now: Value, signs: Signs) -> bool:
        """Whether a combination of hypergradients from nearby is zero, which makes x stationary at a kink."""
        rows = self._around(now)
        if len(rows) <= 2 or not self.domain.coordinatewise:
            return False
        size = norm(shortest_combination(rows)) / (self.largest or 1.0)
        signs.stationarity = min(size, signs.stationarity)
        return size <= TUNING.settled

    def __str__(self) -> str:
        words = f"{self.steps} Newton step{'' if self.steps == 1 else 's'} in x"
        kind = "quadratic in y" if self.lower.hessians.quadratic else "smooth"
        moving = f"; f {kind}; {self.moving} of {self.flat_y.size} coordinates of y can move"
        return words if self.moving is None else words + moving

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        now = self.now
        return {
            "numbers": {name: getattr(self, name) for name in NUMBERS},
            "calls": (self.objective.calls, self.objective.limit),
            "lower": self.lower.state_dict(),
            "now": now and {name: value for name, value in vars(now).items() if name not in ("response", "rates", "length")},
            "memory": self.memory.state_dict(),
            "batched": self.batch.known,
            "start_size": self.domain.start_size,
            "signs": self.signs and vars(self.signs),
            "trail": vars(self.trail),
            "verdict": self.verdict and (self.verdict.status.value, self.verdict.message),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        vars(self).update(state["numbers"])
        self.objective.calls, self.objective.limit = state["calls"]
        self.lower.load_state_dict(state["lower"])
        self.now = state["now"] and Value(**state["now"], response=None)
        self.memory.load_state_dict(state["memory"])
        self.batch.known = state["batched"]
        self.domain.start_size = state["start_size"]
        self.signs = state["signs"] and Signs(**state["signs"])
        vars(self.trail).update(state["trail"])
        self.verdict = state["verdict"] and Verdict(Status(state["verdict"][0]), state["verdict"][1])
