"""Surroundings: the curvature of the hyper-objective around a point that seems to be the end, and points of lower F nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from meha.methods._quasi_newton import size as norm
from meha.methods.newton.domain import Domain
from meha.methods.newton.hyper import HyperObjective, Value
from meha.methods.newton.quasi_newton import Memory
from meha.methods.newton.tuning import TUNING

__all__ = ["Surroundings"]


class Surroundings:
    """Small moves around a point.

    Args:
        objective, domain, memory: the hyper-objective, X, and where curvatures go to.
        eps: rounding error of the variables.
        note: is shown each value.
    """

    def __init__(
        self, objective: HyperObjective, domain: Domain, memory: Memory, eps: float, note: Callable[[Value], None]
    ) -> None:
        self._objective, self._domain, self._memory, self._eps, self._note = objective, domain, memory, eps, note

    def probe(self, now: Value) -> Value | None:
        """Learn the curvature along some directions; returns a point of lower F if it is negative along one.

        Up to a number of coordinates it is the whole curvature, whatever their units; beyond, that along some fixed directions.
        """
        if not self._domain.coordinatewise:
            return None
        free = self._domain.free(now.x, now.gradient).nonzero().reshape(-1)
        few, columns = len(free) <= TUNING.probes_x, []
        for k, move in enumerate(_probes(now.x, free, self._domain.x_size(now.x) or 1.0)):
            new = self._nearby(now, self._eps**TUNING.probe_power * move, grow=few)
            if new is None:
                continue
            change, moved = new.gradient - now.gradient, new.x - now.x
            if float(torch.dot(change, moved)) < 0:
                lower = self.descend(now, moved)
                if lower is not None:
                    return lower
            if few:
                columns.append(change[free] / moved[free[k]])
            else:
                self._memory.update(moved, change)
        if columns and len(columns) == len(free):
            self._memory.replace(torch.stack(columns, dim=1), free, len(now.x))
        return None

    def descend(self, now: Value, move: Tensor, signs: tuple[int, ...] = (1, -1)) -> Value | None:
        """A point at which F is lower, beyond what rounding explains, at a multiple of a small move."""
        for sign in signs:
            new = self._objective(self._domain.project(now.x + sign * TUNING.probe_growth * move), now.y)
            if new.regular and now.F - self._eps**TUNING.loose_power * abs(now.F) > new.F:
                self._memory.clear()
                return new
        return None

    def _nearby(self, now: Value, move: Tensor, *, grow: bool) -> Value | None:
        """The hyper-objective after a small move, or after a longer one where its gradient shows no difference."""
        found = None
        for _ in range(TUNING.probe_growths if grow else 1):
            new = self._objective(self._domain.project(now.x + move), now.y)
            if not math.isfinite(new.F):
                break
            self._note(new)
            found = new
            if norm(new.gradient - now.gradient) > TUNING.seen * self._eps * now.size:
                break
            move = TUNING.probe_growth * move
        return found


def _probes(x: Tensor, free: Tensor, size: float) -> Iterator[Tensor]:
    """Moves that test the curvature at x: along each free coordinate, or some fixed directions where these are many."""
    few, phase = len(free) <= TUNING.probes_x, torch.arange(len(x), dtype=x.dtype, device=x.device)
    for k in range(len(free) if few else TUNING.probes_many):
        move = torch.zeros_like(x)
        if few:
            move[free[k]] = float(x[free[k]].abs()) or size
        else:
            move[free] = ((k + 1) * (phase + 1)).cos()[free] * x[free].abs().clamp(min=size / len(x))
        yield move
