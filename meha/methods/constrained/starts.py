"""Where descents begin: the given start, the solution without the lower level, and points spread over the region."""

from __future__ import annotations

import math

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array
from meha.methods.constrained.lower import LowerLevel
from meha.methods.constrained.programs import Relaxed
from meha.methods.constrained.sqp import minimise

__all__ = ["Starts"]

FEASIBLE = 1e-6
"""Violation with which a point counts as feasible."""

SCREENING = 48
"""Random points at which the lower level is solved to choose starts."""

STARTS = 12
"""Descents from chosen and random points."""

MORE = 8
"""Further descents where the first ones do not agree."""

DISTINCT = 0.02
"""Distance of their starts from each other, relative to the width of the region."""

CLOSE = 1e-3
"""Distance of two starts, relative to the width of the region, below which one of them is enough."""

WEIGHT = 1e3
"""Weight of violations where starts are compared."""


class Starts:
    """Starts for a coupled problem, each with a name.

    Args:
        coupling: the problem.
        lower: its lower level, with the region.
        z0: the given start.
    """

    def __init__(self, coupling: Coupling, lower: LowerLevel, z0: Array) -> None:
        self.coupling, self.lower, self.z0 = coupling, lower, z0

    def first(self) -> list[tuple[str, Array]]:
        """The given start, the best point without the lower level, and points spread over the region."""
        coupling = self.coupling
        generator = np.random.default_rng(0)
        starts = [("the given start", self.z0)]
        high = minimise(Relaxed(coupling), self.z0)
        if np.isfinite(high.w).all() and high.violation <= FEASIBLE:
            starts.append(("the upper level alone", high.w))
        scored = self._screen(generator, SCREENING)
        return starts + [(f"point {k + 1}", z) for k, z in enumerate(self._spread(scored))]

    def further(self) -> list[tuple[str, Array]]:
        """Starts for when the first ones do not agree: the best of other points."""
        scored = sorted(self._screen(np.random.default_rng(1), 2 * SCREENING), key=lambda pair: pair[0])
        return [(f"further point {k + 1}", z) for k, z in enumerate(self._apart([z for _, z in scored])[:MORE])]

    def _screen(self, generator: np.random.Generator, count: int) -> list[tuple[float, Array]]:
        """Random points with the lower level solved, and their merits: F, and the weighted violations."""
        coupling, rows = self.coupling, self.coupling.rows
        scored: list[tuple[float, Array]] = []
        points = self.lower.region.draw(generator, count)
        for point in points if self.lower.convex is not False else points[: count // 2]:
            z = self.respond(point)
            values = coupling.values(z)
            broken = np.maximum(values[rows.upper], 0.0).sum() + np.abs(values[rows.upper_equations]).sum()
            broken += np.maximum(values[rows.lower], 0.0).sum() + np.abs(values[rows.lower_equations]).sum()
            merit = float(values[rows.F] + WEIGHT * broken)
            if math.isfinite(merit):
                scored.append((merit, z))
        return scored

    def _apart(self, points: list[Array]) -> list[Array]:
        """Points without those that are close to an earlier one."""
        width = np.maximum(self.lower.region.high - self.lower.region.low, np.finfo(float).tiny)
        chosen: list[Array] = []
        for z in points:
            if all(float(np.abs((z - other) / width).max()) > DISTINCT for other in chosen):
                chosen.append(z)
        return chosen

    def _spread(self, scored: list[tuple[float, Array]]) -> list[Array]:
        """Some of many points: the best one of each active set of the lower level, then those farthest from the others."""
        rows = self.coupling.rows
        width = np.maximum(self.lower.region.high - self.lower.region.low, np.finfo(float).tiny)
        best: dict[bytes, tuple[float, Array]] = {}
        for merit, z in scored:
            key = (self.coupling.values(z)[rows.lower] >= -FEASIBLE).tobytes()
            if key not in best or merit < best[key][0]:
                best[key] = merit, z
        chosen = [z for _, z in sorted(best.values(), key=lambda pair: pair[0])][: STARTS // 2]
        rest = [z for _, z in sorted(scored, key=lambda pair: pair[0])]
        while rest and len(chosen) < STARTS:
            distances = [min((float(np.abs((z - c) / width).max()) for c in chosen), default=1.0) for z in rest]
            far = int(np.argmax(distances))
            if distances[far] <= CLOSE:
                break
            chosen.append(rest.pop(far))
        return chosen

    def respond(self, z: Array) -> Array:
        """A point with a solution of the lower level, near z."""
        n = self.coupling.n
        met = self.lower.meet(z)
        near = met.w if met.violation <= FEASIBLE else self.lower.meet(z, lower_only=True).w
        if not np.isfinite(near).all():
            return z
        answer = self.lower.search(near[:n], near[n:], quick=True)
        return near if answer is None else np.concatenate([near[:n], answer.w])
