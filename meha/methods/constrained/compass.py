"""Steps along the coordinates of x with the lower level solved again: where a solution has no multipliers, or F has a kink."""

from __future__ import annotations

import math

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array
from meha.methods.constrained.lower import LowerLevel

__all__ = ["compass"]

FIRST, LAST = 0.05, 1e-7
"""The first and the last length of a step, relative to the width of the region."""

SHORTER = 0.25
"""Factor of the length where no step is better."""

TRIALS = 60
"""Lower levels that are solved for each coordinate of x, at most."""

BETTER = 1e-4
"""Improvement of F, relative to 1 + |F|, that counts: more than what a y within TIE of the best gains."""

TIE = 1e-9
"""Excess of f, relative to 1 + |f|, among which F chooses."""

FEASIBLE = 1e-7
"""Violation that a point may have."""


def compass(coupling: Coupling, lower: LowerLevel, z: Array, F: float) -> tuple[Array, float]:
    """The best point (x, y) that steps from z find, and its F; z itself if none is better."""
    n = coupling.n
    low, high = lower.region.low[:n], lower.region.high[:n]
    width = high - low
    length, trials = FIRST, 0
    while length > LAST and trials < TRIALS * n:
        moved = False
        for k in range(n):
            for sign in (1.0, -1.0):
                x = z[:n].copy()
                x[k] = min(max(x[k] + sign * length * width[k], low[k]), high[k])
                trials += 1
                other, value = _respond(coupling, lower, x, z[n:])
                if value < F - BETTER * (1 + abs(F)):
                    z, F, moved = other, value, True
                    break
        if not moved:
            length *= SHORTER
    return z, F


def _respond(coupling: Coupling, lower: LowerLevel, x: Array, y: Array) -> tuple[Array, float]:
    """(x, y) with the solution of the lower level that is best for F, and F; infinite where constraints fail."""
    z = np.concatenate([x, y])
    answer = lower.search(x, y, quick=True)
    if answer is None:
        return z, math.inf
    z = np.concatenate([x, answer.w])
    if lower.strict(x, answer):
        F = coupling.exact(z)[0]
        return z, F if coupling.violation(z) <= FEASIBLE and math.isfinite(F) else math.inf
    best = lower.best_for_upper(x, answer.w, answer.value + TIE * (1 + abs(answer.value)))
    chosen = np.concatenate([x, best.w])
    if np.isfinite(chosen).all() and coupling.violation(chosen) <= FEASIBLE:
        f = coupling.exact(chosen)[1]
        if f <= answer.value + 2 * TIE * (1 + abs(answer.value)):
            z = chosen
    F = coupling.exact(z)[0]
    return z, F if coupling.violation(z) <= FEASIBLE and math.isfinite(F) else math.inf
