"""Course: the steps of a run in x, one at a time, its end, and what it reports."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._running import Numbers
from meha._second_order import Clock, Flat
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods.newton.hyper import HyperObjective, Value, hypergradient
from meha.methods.newton.lower import LowerLevel
from meha.methods.newton.quasi_newton import Memory, search, shortest_combination
from meha.methods.newton.systems import Factor
from meha.methods.newton.tuning import TUNING

__all__ = ["Course"]

REMEDY = "use meha.Continuation()."
SINGULAR = f"The lower Hessian is singular on the face of y; {REMEDY}"


class Course:
    """Quasi-Newton steps on x -> F(x, y*(x)) over X."""

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, tol: float) -> None:
        self.oracle, self.tol, self.clock = oracle, tol, Clock()
        self.flat_x, self.flat_y = Flat(x), Flat(y)
        self.lower = LowerLevel(oracle, self.flat_x, self.flat_y, self.clock)
        self.objective = HyperObjective(self.lower, self.flat_x, self.clock)
        x_set = oracle.problem.x_set
        self.coordinatewise = x_set is None or all(part.coordinatewise for part, _ in x_set.parts(x))
        self.memory = Memory()
        self.now: Value | None = None
        self.verdict: Verdict | None = None
        self.spectral = 0.0  # the step of projected gradients, where X is not a product of intervals
        self.largest = 0.0  # the largest size of a hypergradient so far
        self.start_size = 0.0
        self.nearby: list[tuple[Tensor, Tensor]] = []  # points and hypergradients of the last steps
        self.seconds = 0.0
        self._free_at: tuple[Value, Tensor] | None = None
        self.evidence: dict[str, float] = {}

    @property
    def eps(self) -> float:
        """Rounding error of the variables."""
        return max(self.flat_x.eps, self.flat_y.eps)

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of X."""
        if self.oracle.project.identity:
            return x
        leaves = [leaf.clone() for leaf in self.flat_x.split(x)]
        self.oracle.project(None, leaves, 1.0)
        return self.flat_x.join(leaves)

    def advance(self) -> Numbers:
        """Take a step, and put the point into the variables."""
        begin = time.perf_counter()
        now = self.now or self._begin()
        if self.verdict is None:
            now = self._step(now)
        self.now = now
        self.flat_x.write(now.x)
        self.flat_y.write(now.y)
        self.seconds += time.perf_counter() - begin
        return {"upper": now.F, "residual": float(torch.linalg.vector_norm(self._projected(now)))}

    def _begin(self) -> Value:
        """The hyper-objective at the start."""
        x, y = self.flat_x.read(), self.flat_y.read()
        at_x, at_y = self.flat_x.at(x), self.flat_y.at(y)
        for function in (self.oracle.upper, self.oracle.phi):  # both must depend on y, and one of them on x
            self.oracle.gradients((at_x, at_y), [(1.0, function, at_x, at_y)])
        self.start_size = float(torch.linalg.vector_norm(x))
        now = self.objective(x, y)
        if not math.isfinite(now.F):
            self.verdict = Verdict(Status.BROKE_DOWN, f"The lower level was not solved at the start; {REMEDY}")
        elif not now.regular:
            self.verdict = Verdict(Status.BROKE_DOWN, SINGULAR)
        self._note(now)
        return now

    def _note(self, value: Value) -> None:
        if math.isfinite(value.F):
            self.largest = max(self.largest, value.size)
            self.nearby = [*self.nearby, (value.x, value.gradient)][-TUNING.sampled :]

    def _x_size(self, x: Tensor) -> float:
        return max(float(torch.linalg.vector_norm(x)), self.start_size)

    def _free(self, now: Value) -> Tensor:
        """The coordinates of x that no bound holds."""
        if self._free_at is not None and self._free_at[0] is now:
            return self._free_at[1]
        if self.oracle.project.identity:
            free = torch.ones_like(now.x, dtype=torch.bool)
            self._free_at = now, free
            return free
        size = float(torch.linalg.vector_norm(now.gradient))
        probe = TUNING.blocked * (self._x_size(now.x) or 1.0) / size if size else 0.0
        free = self.project(now.x - probe * now.gradient) != now.x
        self._free_at = now, free
        return free

    def _projected(self, now: Value) -> Tensor:
        """The hypergradient without the part that X blocks."""
        if self.oracle.project.identity or not math.isfinite(now.F):
            return now.gradient
        if self.coordinatewise:
            return torch.where(self._free(now), now.gradient, 0.0)
        size = float(torch.linalg.vector_norm(now.gradient))
        probe = TUNING.first_step * (self._x_size(now.x) or 1.0) / size if size else 1.0
        return (now.x - self.project(now.x - probe * now.gradient)) / probe

    def _direction(self, now: Value) -> Tensor:
        """A quasi-Newton direction, or one of the length of a first step; a projected step where X is general."""
        size = float(torch.linalg.vector_norm(now.gradient))
        x_size = self._x_size(now.x)
        if not size:
            return torch.zeros_like(now.x)
        plain = TUNING.first_step * x_size / size if x_size else abs(now.F) / size**2 or 1 / size
        if not self.coordinatewise:
            step = self.spectral or plain
            return self.project(now.x - step * now.gradient) - now.x
        free = self._free(now)
        direction = self.memory.direction(now.gradient, free)
        if direction is not None and float(torch.dot(direction, now.gradient)) < 0:
            length = float(torch.linalg.vector_norm(direction))
            return direction * min(1.0, TUNING.widest * (x_size or length) / length)
        self.memory.clear()
        return torch.where(free, -plain * now.gradient, 0.0)

    def _step(self, now: Value) -> Value:
        direction = self._direction(now)
        if self._stationary(now, direction):
            lower = self._probe(now)
            if lower is not None:
                return lower
            if self._stationary(now, self._direction(now)):
                return self._confirm(now)
            direction = self._direction(now)
        new, tried = search(self.objective, now, direction, self.project, self.eps)
        for value in tried:
            self._note(value)
        if new is None and self._learned():
            self.memory.clear()
            self.spectral = 0.0
            new, tried = search(self.objective, now, self._direction(now), self.project, self.eps)
            for value in tried:
                self._note(value)
        if new is None:
            return self._confirm(now, stuck=True, tried=tried)
        move, change = new.x - now.x, new.gradient - now.gradient
        product = float(torch.dot(move, change))
        self.spectral = float(torch.dot(move, move)) / product if product > 0 else 0.0
        self.memory.update(move, change)
        if self._x_size(new.x) > TUNING.far * max(self.start_size, 1.0):
            self.verdict = Verdict(Status.AT_INFINITY, "F still falls as x goes on without bound; bound x (x_set).")
        return new

    def _probe(self, now: Value) -> Value | None:
        """Learn the curvature along some directions; returns a point of lower F if it is negative along one.

        Up to a number of coordinates it is the whole curvature, whatever their units; beyond, that along some fixed directions.
        """
        if not self.coordinatewise:
            return None
        free = self._free(now).nonzero().reshape(-1)
        size, few, columns = self._x_size(now.x) or 1.0, len(free) <= TUNING.probes_x, []
        for k in range(min(TUNING.probes_x, len(free))):
            move = torch.zeros_like(now.x)
            if few:
                move[free[k]] = float(now.x[free[k]].abs()) or size
            else:
                phase = torch.arange(len(now.x), dtype=now.x.dtype, device=now.x.device)
                move[free] = ((k + 1) * (phase + 1)).cos()[free] * now.x[free].abs().clamp(min=size / len(now.x))
            new = self._nearby_value(now, self.eps**TUNING.probe_power * move, grow=few)
            if new is None:
                continue
            change, moved = new.gradient - now.gradient, new.x - now.x
            if float(torch.dot(change, moved)) < 0:
                lower = self._descend(now, moved)
                if lower is not None:
                    return lower
            if few:
                columns.append(change[free] / moved[free[k]])
            else:
                self.memory.update(moved, change)
        if columns and len(columns) == len(free):
            self.memory.replace(torch.stack(columns, dim=1), free, len(now.x))
        return None

    def _descend(self, now: Value, move: Tensor, signs: tuple[int, ...] = (1, -1)) -> Value | None:
        """A point at which F is lower, beyond what rounding explains, at a multiple of a small move."""
        for sign in signs:
            new = self.objective(self.project(now.x + sign * TUNING.probe_growth * move), now.y)
            if new.regular and now.F - self.eps**TUNING.loose_power * abs(now.F) > new.F:
                self.memory.clear()
                return new
        return None

    def _nearby_value(self, now: Value, move: Tensor, *, grow: bool) -> Value | None:
        """The hyper-objective after a small move, or after a longer one where its gradient shows no difference."""
        found = None
        for _ in range(TUNING.probe_growths if grow else 1):
            new = self.objective(self.project(now.x + move), now.y)
            if not math.isfinite(new.F):
                break
            self._note(new)
            found = new
            if float(torch.linalg.vector_norm(new.gradient - now.gradient)) > TUNING.seen * self.eps * now.size:
                break
            move = TUNING.probe_growth * move
        return found

    def _learned(self) -> bool:
        return self.memory.known or (not self.coordinatewise and self.spectral > 0)

    def _stationary(self, now: Value, direction: Tensor) -> bool:
        """Whether the step that remains is within tol of x, or promises nothing, at a small hypergradient."""
        size = float(torch.linalg.vector_norm(self._projected(now)))
        if not size:
            return True
        if size > TUNING.settled * self.largest or not self._learned():
            return size <= self.eps * self.largest
        gain, scale = -float(torch.dot(now.gradient, direction)), max(abs(now.F), self.eps)
        small = float(torch.linalg.vector_norm(direction)) <= self.tol * self._x_size(now.x)
        return (small and gain <= self.tol * scale) or gain <= max(self.tol, self.eps**TUNING.lower_power) ** 2 * scale

    def _confirm(self, now: Value, *, stuck: bool = False, tried: Sequence[Value] = ()) -> Value:
        """The verdict at a point that seems to be the end: y must be a strict minimum on its face, and x stationary."""
        response = self.lower.solve(self.flat_x.at(now.x), now.y)
        at, face = response.at, response.face
        factor = self.lower.renew(at, face)
        now = hypergradient(self.lower, response)
        pivot = factor.pivot if factor is not None else math.nan
        residual = float(torch.linalg.vector_norm(self._projected(now)))
        weak = self._weakly_held(now)
        if not stuck and residual > TUNING.settled * self.largest:
            self.memory.clear()
            return now
        self.evidence = {
            "pivot": pivot,
            "error": response.error,
            "stationarity": residual / (self.largest or 1.0),
            "weak": weak,
        }
        if not response.solved:
            self.verdict = Verdict(Status.BROKE_DOWN, f"The lower level was not solved; {REMEDY}")
        elif stuck and any(not value.regular for value in tried):
            self.verdict = Verdict(Status.BROKE_DOWN, SINGULAR)
        elif factor is not None and not factor.definite:
            self.verdict = self._irregular(now, factor)
        elif stuck and not self._at_kink(now):
            message = (
                f"No step along the hypergradient lowers F, of relative size {self.evidence['stationarity']:.1e}; {REMEDY}"
            )
            small = self.evidence["stationarity"] <= self.eps**TUNING.loose_power
            self.verdict = self._converged() if small else Verdict(Status.FINISHED, message)
        else:
            lower = self._across(now) if weak else None
            if lower is not None:
                return lower
            self.verdict = self._converged(kink=stuck or weak > 0)
        return now

    def _irregular(self, now: Value, factor: Factor) -> Verdict:
        """The end at a y that is not a strict minimum."""
        kind = "indefinite" if factor.indefinite else "singular"
        if factor.indefinite or not now.regular:
            return Verdict(Status.BROKE_DOWN, f"The lower Hessian is {kind} on the face of y; {REMEDY}")
        return Verdict(
            Status.FINISHED,
            f"Relative hypergradient {self.evidence['stationarity']:.1e}, but the lower Hessian is singular on the face of y:"
            f" y is not unique. F does not depend on the open directions to first order; to make sure, {REMEDY}",
        )

    def _converged(self, *, kink: bool = False) -> Verdict:
        size, pivot = self.evidence["stationarity"], self.evidence["pivot"]
        where = ", at a kink of the hyper-objective" if kink else ""
        curvature = f"smallest pivot {pivot:.1e}" if math.isfinite(pivot) else "no negative curvature met"
        return Verdict(
            Status.CONVERGED,
            f"Relative hypergradient {size:.1e}{where}; y is a strict minimum of the lower level ({curvature}).",
        )

    def _around(self, now: Value) -> Tensor:
        """Hypergradients from nearby along the free coordinates of x, one in each row."""
        reach = TUNING.near * max(self.tol, self.eps**TUNING.loose_power) * self._x_size(now.x)
        rows = [gradient for x, gradient in self.nearby if float(torch.linalg.vector_norm(x - now.x)) <= reach]
        return torch.where(self._free(now), torch.stack([*rows, now.gradient]), 0.0)

    def _across(self, now: Value) -> Value | None:
        """A point of lower F along a hypergradient of another face, where y is about to change its face."""
        for row in self._around(now):
            size = float(torch.linalg.vector_norm(row))
            if size > TUNING.settled * self.largest:
                length = self.eps**TUNING.probe_power * (self._x_size(now.x) or 1.0)
                lower = self._descend(now, -length / size * row, signs=(1,))
                if lower is not None:
                    return lower
        return None

    def _at_kink(self, now: Value) -> bool:
        """Whether a combination of hypergradients from nearby is zero, which makes x stationary at a kink."""
        rows = self._around(now)
        if len(rows) <= 2 or not self.coordinatewise:
            return False
        combined = shortest_combination(rows)
        size = float(torch.linalg.vector_norm(combined)) / (self.largest or 1.0)
        self.evidence["stationarity"] = min(size, self.evidence["stationarity"])
        return size <= TUNING.settled

    def _weakly_held(self, now: Value) -> int:
        """The number of coordinates of y that a small change of the gradient would set free."""
        lower, response = self.lower, now.response
        if lower.faces.smooth or response is None or response.face.index is None:
            return 0
        at, step = response.at, lower.step
        held = torch.ones_like(at.y, dtype=torch.bool)
        held[response.face.index] = False
        u = at.y - step * at.f_y
        away = torch.where(u >= at.y, 1.0, -1.0).to(u)
        weak = torch.zeros_like(held)
        for shift in (away, -away):
            face = lower.faces.at(lower.faces.prox(at.x, u + TUNING.margin * lower.scale * shift, step))
            if face.index is not None:
                weak[face.index] = True
        return int((weak & held).sum())

    def report(self) -> dict[str, str]:
        """Where the time went, what the lower level looked like, and the evidence at the end."""
        if self.now is None:
            return {}
        functions, algebra = self.clock.functions, self.clock.algebra
        rest = max(self.seconds - functions - algebra, 0.0)
        lines = {"time": f"{functions:.2g} s in the objectives, {algebra:.2g} s in linear algebra, {rest:.2g} s in the rest"}
        response = self.now.response
        if response is not None:
            size = self.flat_y.size
            free = size if response.face.index is None else response.face.index.numel()
            kind = "quadratic in y" if self.lower.quadratic else "smooth"
            lines["problem"] = f"f {kind}; {free} of {size} coordinates of y can move"
        if self.evidence:
            accuracy = f"relative hypergradient {self.evidence['stationarity']:.1e}; y to about {self.evidence['error']:.1e}"
            if self.evidence["weak"]:
                accuracy += f"; {self.evidence['weak']:.0f} coordinates of y are at the brink of moving"
            lines["accuracy"] = accuracy
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        if self.now is None:
            return {}
        now = self.now
        return {
            "now": {"x": now.x, "y": now.y, "F": now.F, "gradient": now.gradient, "size": now.size, "regular": now.regular},
            "lower": self.lower.state_dict(),
            "memory": self.memory.state_dict(),
            "numbers": (self.spectral, self.largest, self.start_size),
            "nearby": self.nearby,
            "evidence": self.evidence,
            "verdict": self.verdict and (self.verdict.status.value, self.verdict.message),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        self.now = self.verdict = None
        self.memory.clear()
        self.nearby, self.evidence = [], {}
        if not state:
            return
        self.now = Value(**state["now"], response=None)
        self.lower.load_state_dict(state["lower"])
        self.memory.load_state_dict(state["memory"])
        self.spectral, self.largest, self.start_size = state["numbers"]
        self.nearby, self.evidence = list(state["nearby"]), dict(state["evidence"])
        if state["verdict"] is not None:
            status, message = state["verdict"]
            self.verdict = Verdict(Status(status), message)
