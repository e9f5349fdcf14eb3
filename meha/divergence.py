"""Divergence: telling a run that diverges from one that travels far."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from meha._variables import Leaves, copy_, norm, subtract
from meha.methods._base import StepInfo

__all__ = ["Runaway"]


class Runaway:
    """Tells a diverging run from one that travels far.

    At steps 64, 128, 256, ... (or when they have been passed) it looks at the second half of the run so far. A run that
    approaches something slows down; one that drifts keeps its pace and at most doubles its distance from the start. Three
    windows in a row with longer steps and 1.5 times the distance, the last two with a larger F, and a last step longer than
    their mean, are taken for divergence, if the distance is large at all.

    Args:
        leaves: the start.
        limit: a norm of so many times 1 + that of the start is divergence in any case.
    """

    def __init__(self, leaves: Leaves, limit: float) -> None:
        self.start = [leaf.clone() for leaf in leaves]
        self.scale = 1 + float(norm(self.start))
        self.limit = limit
        self.windows: list[tuple[float, float, float]] = []
        self.moved = self.upper = 0.0
        self.length = 0

    def state_dict(self) -> dict[str, Any]:
        """What it has seen so far."""
        return {"start": self.start, "windows": self.windows, "moved": self.moved, "upper": self.upper, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had seen."""
        copy_(self.start, state["start"])
        self.scale = 1 + float(norm(self.start))
        self.windows = list(state["windows"])
        self.moved, self.upper, self.length = state["moved"], state["upper"], state["length"]

    def __call__(self, leaves: Leaves, info: StepInfo, size: float, moved: float) -> str:
        """Why the run counts as diverged after a step of length ``moved`` to a point of norm ``size``; empty if it does not."""
        if size > self.limit * self.scale:
            return f"||(x, y)|| reached {size:.1e} at step {info.step}."
        self.moved += info.span * moved
        self.upper += info.span * info.get("upper", 0.0)
        self.length += info.span
        before = info.step - info.span
        if info.step < 32 or info.step.bit_length() == before.bit_length():
            return ""
        distance = float(norm(subtract(leaves, self.start)))
        if before >= 32:
            self.windows.append((distance, self.moved / self.length, self.upper / self.length))
        self.moved, self.upper, self.length = 0.0, 0.0, 0
        if len(self.windows) < 4 or distance < 10 * self.scale:
            return ""
        recent = self.windows[-4:]
        away = all(b[0] > 1.5 * a[0] and b[1] > 1.05 * a[1] for a, b in itertools.pairwise(recent))
        worse = recent[1][2] < recent[2][2] < recent[3][2]
        if not (away and worse and moved > recent[3][1]):
            return ""
        return f"The steps grow and lead away from the start: distance {distance:.3g} after {info.step} steps, F growing."
