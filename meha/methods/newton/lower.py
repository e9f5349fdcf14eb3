"""The lower level at a fixed x by Newton steps on the face of g and Y, from a point nearby."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._second_order import Clock, Expansion, Flat
from meha._variables import Variable
from meha.methods._levels import BudgetError
from meha.methods.newton.faces import Face, Faces
from meha.methods.newton.hessians import Hessians
from meha.methods.newton.systems import Factor, conjugate_gradients, factorise
from meha.methods.newton.tuning import TUNING

__all__ = ["LowerLevel", "Response"]


SAVED = ("accuracy", "curved", "failed", "largest", "limit", "scale", "step")
"""The numbers that a checkpoint keeps."""


@dataclass(frozen=True, eq=False)
class Response:
    """A solution y of the lower level at one x.

    Attributes:
        at: f + g around (x, y).
        face: the face of y.
        error: estimated error of y, relative to y.
        solved: whether it is small.
    """

    at: Expansion
    face: Face
    error: float
    solved: bool

    @property
    def y(self) -> Tensor:
        """The solution."""
        return self.at.y


class LowerLevel:
    """Solves the lower level at any x, with a memory of the last Hessian.

    A step solves the Newton equation on the face of y, which the proximal map of g + indicator of Y finds. A factor of an old
    Hessian serves as long as its steps converge quickly: from the solution at the last x, such a step is the first-order
    prediction of the solution at the new one.

    Attributes:
        tol, accuracy: the least relative error of y that rounding allows, and the one to be reached in the next solves.
        factor: the last factor; None before the first, and where systems are too large for one.
        hessians: those of f.
        curved: whether g added to the Hessian of the factor.
        failed: the least length of a first step with an old factor after which a new factor was necessary.
        scale, largest: the largest norm of y in this solve, and so far.
        step: the length of proximal steps; zero before the first.
        limit: gradients of f and products with its Hessian, counted from the start of the run, after which
            :class:`BudgetError` is raised.
    """

    def __init__(self, oracle: Oracle, flat_x: Flat, flat_y: Flat, clock: Clock) -> None:
        self.oracle, self.flat_x, self.flat_y, self.clock = oracle, flat_x, flat_y, clock
        self.faces = Faces(oracle, flat_y)
        self.eps = flat_y.eps
        self.tol = self.accuracy = self.eps**TUNING.lower_power
        self.factor: Factor | None = None
        self.hessians = Hessians(self.eps)
        self.curved = False
        self.failed = math.inf
        self.scale = self.largest = self.step = 0.0
        self.limit = math.inf
        self._exact_at: Expansion | None = None  # where the factor is that of the Hessian

    def expand(self, x: Variable, y: Tensor) -> Expansion:
        """f + g around (x, y)."""
        if self.oracle.counts.lower + self.oracle.counts.hvp >= self.limit:
            raise BudgetError
        return Expansion(self.oracle, x, y, self.flat_x, self.flat_y, self.clock)

    @property
    def small(self) -> bool:
        """Whether y is small enough for a dense Hessian, whatever its face is."""
        return self.flat_y.size <= TUNING.dense

    def solve(self, x: Variable, y: Tensor) -> Response:
        """Minimise f + g over Y at ``x``, from ``y``."""
        response = self._solve(x, y)
        far = float(torch.linalg.vector_norm(response.y)) < TUNING.contraction * self.scale
        return self._solve(x, response.y) if response.solved and far and self.scale > self._least_scale else response

    @property
    def _least_scale(self) -> float:
        return self.eps**TUNING.loose_power * self.largest

    def _solve(self, x: Variable, y: Tensor) -> Response:
        at = self.expand(x, y)
        self.scale = max(float(torch.linalg.vector_norm(y)), self._least_scale)
        if not math.isfinite(at.value):
            return Response(at, self.faces.at(y), math.inf, solved=False)
        stalled, last, old_steps = 0, math.inf, TUNING.old_steps + TUNING.old_steps_by_size * self.flat_y.size
        first = 0.0 if self.small else float(torch.linalg.vector_norm(at.f_y))
        attempt = math.inf  # the length of the first step with an old factor
        for _ in range(TUNING.lower_steps):
            at, face = self._identify(at)
            self.scale = max(self.scale, float(torch.linalg.vector_norm(at.y)))
            self.largest = max(self.largest, self.scale)
            gradient = at.gradient
            direction, exact = self._direction(at, face, gradient, first)
            size = float(torch.linalg.vector_norm(direction))
            if exact and self._exact_at is not at and size > TUNING.contraction * last:  # not quadratic after all
                exact = self.hessians.still_quadratic(at)
            if not exact and attempt == math.inf:
                attempt = size
            if not exact and not self._worthwhile(size, last, old_steps):
                self.failed = min(self.failed, attempt)
                self.renew(at, face)
                direction, exact = self._direction(at, face, gradient, first)
                size = float(torch.linalg.vector_norm(direction))
            if not math.isfinite(size):
                break
            if self._enough(size, last):
                lower = self._escape(at, face) if exact else None
                if lower is not None:
                    at, last = lower, math.inf
                    continue
                if self.small and self.hessians.quadratic is None and TUNING.telling * self.scale < last < math.inf:
                    self.hessians.at(at)
                return Response(at, face, size / self.scale if self.scale else 0.0, solved=True)
            slope = float(torch.dot(gradient, direction))
            blurred = -slope <= self._noise(at)
            stalled = stalled + 1 if blurred and size > TUNING.level * last else 0
            if stalled > TUNING.stalls:  # rounding
                break
            moved = self._move(at, direction, slope, blurred, patient=exact)
            if moved is None and not exact:
                self.renew(at, face)
                continue
            if moved is None and not self.faces.smooth:
                moved = self._proximal(at)
            if moved is None:
                break
            at, last = moved, size
        at, face = (at, self.faces.at(at.y))
        direction, _ = self._direction(at, face, at.gradient, first)
        error = float(torch.linalg.vector_norm(direction)) / (self.scale or 1.0)
        return Response(at, face, error, solved=error <= self.eps**TUNING.loose_power)

    def renew(self, at: Expansion, face: Face) -> Factor | None:
        """Factorise the Hessian on the face at this point; None if it is too large."""
        if face.count(self.flat_y.size) > TUNING.dense:
            self.factor = None
            return None
        index, matrix = face.index, self.hessian(at, face.index)
        curved = at.g_rows(index, self.faces.separable)
        if curved is not None:
            matrix = matrix + (curved if index is None else curved[:, index])
        self.curved = curved is not None
        self.factor = factorise(matrix, face, self.clock)
        self._exact_at = at
        return self.factor

    def hessian(self, at: Expansion, index: Tensor | None) -> Tensor:
        """The Hessian of f on some coordinates."""
        if self.small and (index is None or self.hessians.quadratic is not False):
            matrix = self.hessians.at(at)
            return matrix if index is None else matrix[index][:, index]
        return at.rows(index)[:, index]

    def exact(self, at: Expansion, face: Face) -> bool:
        """Whether the factor is that of the Hessian at this point."""
        made = self._exact_at
        if self.factor is None or not self.factor.face.equals(face):
            return False
        if made is at or not (self.hessians.quadratic and self.faces.quadratic):
            return made is at
        if made is not None and made.x is at.x:
            return True
        if not self.hessians.constant and not self.hessians.varies:
            self.hessians.at(at)  # which compares them
        return self.hessians.constant and not self.curved

    def solve_system(self, at: Expansion, face: Face, right: Tensor) -> tuple[Tensor, bool, float]:
        """Solve (f + g)_yy v = right along the face; returns v, whether there is a solution, and the relative residual."""
        factor = self.factor if self.factor is not None and self.factor.face.equals(face) else None
        large = face.count(self.flat_y.size) > TUNING.dense
        if not self.exact(at, face):
            steps = int(TUNING.old_steps + TUNING.old_steps_by_size * face.count(self.flat_y.size))
            if large or (factor is not None and factor.definite):
                most = TUNING.cg_steps if large else steps
                v, residual, positive = self.iterate(at, face, right, self.accuracy, most, factor)
                if large or (positive and residual <= self.accuracy):
                    return v, positive and residual <= max(self.accuracy, self.eps**TUNING.loose_power), residual
            factor = self.renew(at, face)
        assert factor is not None
        begin = time.perf_counter()
        if factor.definite:
            v, consistent = factor.solve(right), True
        else:
            v, missed = factor.shortest(right)
            consistent = missed <= TUNING.inconsistent
        self.clock.algebra += time.perf_counter() - begin
        return v, consistent, 0.0

    def iterate(
        self, at: Expansion, face: Face, right: Tensor, tol: float, steps: int, factor: Factor | None
    ) -> tuple[Tensor, float, bool]:
        """Conjugate gradients on the face: v, its relative residual, and whether all curvatures were positive."""
        size = right.numel()
        precondition = None if factor is None else lambda part: face.reduce(factor.solve(face.extend(part, size)))
        v, residual, positive = conjugate_gradients(
            lambda part: face.reduce(at.product(face.extend(part, size))), face.reduce(right), tol, steps, precondition
        )
        return face.extend(v, size), residual, positive

    def _direction(self, at: Expansion, face: Face, gradient: Tensor, first: float) -> tuple[Tensor, bool]:
        """The Newton direction, and whether it is that of the Hessian here."""
        if face.count(self.flat_y.size) > TUNING.dense:
            size = float(torch.linalg.vector_norm(face.reduce(gradient)))
            tol = min(TUNING.forcing, math.sqrt(size / first)) if first else TUNING.forcing
            v, _, _ = self.iterate(at, face, gradient, tol, TUNING.cg_steps, None)
            return -v, True
        if self.factor is None or not self.factor.face.equals(face):
            self.renew(at, face)
        assert self.factor is not None
        begin = time.perf_counter()
        direction = -self.factor.solve(gradient)
        self.clock.algebra += time.perf_counter() - begin
        return direction, self.exact(at, face)

    def _enough(self, size: float, last: float) -> bool:
        """Whether a step is short enough to be left out; more than the least error needs steps that shrink quickly."""
        quick = size <= TUNING.quick * last < math.inf
        return size <= (self.accuracy if quick else self.tol) * self.scale

    def _worthwhile(self, size: float, last: float, most: float) -> bool:
        """Whether an old factor is worth another step: it is definite, and would end the solve soon."""
        if self.factor is None or not self.factor.definite:
            return False
        if self._enough(size, last):
            return True
        if last == math.inf:
            return size <= TUNING.level * self.failed
        ratio = size / last
        end = (self.accuracy if ratio <= TUNING.quick else self.tol) * self.scale
        return ratio <= TUNING.contraction and math.log(end / size) >= most * math.log(ratio)

    def _noise(self, at: Expansion) -> float:
        """The error of values: it may be far above their own rounding, where f subtracts large numbers.

        Where the Hessian is not positive definite, a smaller gradient is no sign of a lower value, so values must decide.
        """
        definite = self.factor is None or self.factor.definite
        return (self.eps**TUNING.loose_power if definite else TUNING.rounding * self.eps) * (abs(at.f) + abs(at.g))

    def _move(self, at: Expansion, direction: Tensor, slope: float, blurred: bool, *, patient: bool) -> Expansion | None:
        """A point of sufficient decrease along the direction; None if there is none."""
        length = 1.0
        for _ in range(TUNING.shortenings if patient else 1):
            end = torch.add(at.y, direction, alpha=length)
            new = self.expand(at.x, end if self.faces.smooth else self.faces.feasible(at.x, end, at.y))
            least = at.value + TUNING.decrease * length * slope
            if new.value <= least:
                return new
            if blurred and new.value <= at.value + self._noise(at):
                left = float(torch.dot(new.gradient, direction))
                if abs(left) <= TUNING.level * abs(slope):
                    return new
            length *= TUNING.shorter
        return None

    def _escape(self, at: Expansion, face: Face) -> Expansion | None:
        """A lower point along the most negative curvature, where a stationary point is a saddle."""
        direction = None if self.factor is None else self.factor.downwards(len(at.y))
        if direction is None:
            return None
        direction = direction * ((self.scale or 1.0) / float(torch.linalg.vector_norm(direction)))
        for _ in range(TUNING.escapes):
            direction = TUNING.shorter * direction
            for end in (at.y + direction, at.y - direction):
                new = self.expand(at.x, end if self.faces.smooth else self.faces.feasible(at.x, end, at.y))
                if new.value < at.value - self._noise(at):
                    return new
        return None

    def _identify(self, at: Expansion) -> tuple[Expansion, Face]:
        """The face of the proximal step, and the point itself if it lies there, or that of the step."""
        if self.faces.smooth:
            return at, Face()
        if not self.step:
            self.step = self.first_step(at)
        image = self.faces.prox(at.x, at.y - self.step * at.f_y, self.step)
        here, there = self.faces.at(at.y), self.faces.at(image)
        held = image == at.y
        if there.index is not None:
            held[there.index] = True
        if here.equals(there) and bool(held.all()) and bool((image.sign() * at.y.sign() >= 0).all()):
            return at, here
        moved = self._proximal(at)
        return (moved, self.faces.at(moved.y)) if moved is not None else (at, here)

    def _proximal(self, at: Expansion) -> Expansion | None:
        """A proximal gradient step of sufficient decrease; None if it leads nowhere."""
        for _ in range(TUNING.shortenings):
            image = self.faces.prox(at.x, at.y - self.step * at.f_y, self.step)
            move = image - at.y
            square = float(torch.dot(move, move))
            if not square:
                return None
            new = self.expand(at.x, image)
            model = at.f + float(torch.dot(at.f_y, move)) + square / (2 * self.step)
            if new.f <= model + self._noise(at):
                return new
            self.step *= TUNING.shorter
        return None

    def first_step(self, at: Expansion) -> float:
        """The inverse of the largest curvature of f, by power steps."""
        v = torch.arange(len(at.y), dtype=at.y.dtype, device=at.y.device).cos()
        size, matrix = 0.0, self.hessians.matrix if self.hessians.known_at(at.x) else None
        for _ in range(TUNING.probes):
            v = v / torch.linalg.vector_norm(v)
            v = at.product(v, g=False) if matrix is None else matrix @ v
            size = float(torch.linalg.vector_norm(v))
            if not size:
                break
        limit = 0.5 / self.oracle.problem.g.rho if self.oracle.problem.g.rho else math.inf
        return min(1 / size if size else 1.0, limit)

    def state_dict(self) -> dict[str, Any]:
        """The memory, in plain tensors and numbers."""
        saved = {name: getattr(self, name) for name in SAVED}
        return {**saved, "hessians": self.hessians.state_dict(), "factor": self.factor and self.factor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a memory."""
        for name in SAVED:
            setattr(self, name, state[name])
        self.factor = None if state["factor"] is None else Factor.restored(state["factor"])
        self.hessians.load_state_dict(state["hessians"])
        self._exact_at = None
