"""Descent from piece to piece: a local solution of both levels, and the neighbouring active sets that may be better."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array
from meha.methods.constrained.programs import Cut, Piece
from meha.methods.constrained.sqp import Stationary, minimise

__all__ = ["Found", "descend"]

PIECES = 40
"""Pieces that a descent may visit."""

MET = 1e-7
"""Violation of the equations and inequalities of a piece with which its point counts."""

ZERO = 1e-6
"""Multipliers and slacks, relative to the largest multiplier or 1, that count as zero."""

BETTER = 1e-9
"""Improvement of F, relative to 1 + |F|, that is worth another piece."""

TOGETHER = 4
"""Constraints that are flipped together, in all combinations, at most."""


@dataclass(eq=False)
class Found:
    """A point that meets the optimality conditions of the lower level and all constraints.

    Attributes:
        z: (x, y).
        F: its value.
        lam, nu: multipliers of the lower inequalities and equations.
        active: the lower inequalities of the piece.
        rests: whether the last steps were short.
        pieces: how many were visited.
    """

    z: Array
    F: float
    lam: Array
    nu: Array
    active: Array
    rests: bool
    pieces: int


def descend(coupling: Coupling, z: Array, lam: Array, nu: Array, cuts: tuple[Cut, ...] = ()) -> Found | None:
    """Minimise F from z on the piece of its active constraints, then on neighbouring pieces, until none is better.

    Args:
        lam, nu: multipliers of the lower level at z.
        cuts: values that f must not exceed.
    """
    rows = coupling.rows
    values = coupling.values(z)[rows.lower]
    scale = max(1.0, float(np.abs(lam).max(initial=0.0)))
    first = (lam > ZERO * scale) & (values > -ZERO * (1 + np.abs(values)))
    seen: set[bytes] = set()
    best: Found | None = None
    here: Stationary | None = None
    tried = 0
    waiting: Iterator[Array] = iter([first, values > -ZERO, lam > ZERO * scale])
    while tried < PIECES:
        active = next(waiting, None)
        if active is None:
            break
        if active.tobytes() in seen:
            continue
        seen.add(active.tobytes())
        tried += 1
        piece = Piece(coupling, active, cuts)
        start = (z, lam, nu) if best is None else (best.z, best.lam, best.nu)
        here = minimise(piece, piece.start(*start))
        if here.violation > MET or not np.isfinite(here.value):
            continue
        if best is None or here.value < best.F - BETTER * (1 + abs(best.F)):
            point = here.w[: piece.size]
            best = Found(point, here.value, *piece.multipliers(here.w), active, here.rests, tried)
            waiting = _neighbours(coupling, best)
    if best is not None:
        best.pieces = tried
    return best


def _neighbours(coupling: Coupling, at: Found) -> Iterator[Array]:
    """Active sets whose pieces touch this point: with one constraint flipped, with all combinations of few, and exchanges."""
    values = coupling.values(at.z)[coupling.rows.lower]
    scale = max(1.0, float(np.abs(at.lam).max(initial=0.0)))
    zero_slack = values > -ZERO * (1 + np.abs(at.z).max(initial=0.0))
    weak = np.flatnonzero(zero_slack & (at.lam <= ZERO * scale))
    strong = np.flatnonzero(zero_slack & (at.lam > ZERO * scale))
    for k in weak:
        yield _flip(at.active, [int(k)])
    for k, j in itertools.product(weak, strong):
        yield _flip(at.active, [int(k), int(j)])
    if len(weak) <= TOGETHER:
        for count in range(2, len(weak) + 1):
            for chosen in itertools.combinations(weak, count):
                yield _flip(at.active, [int(k) for k in chosen])


def _flip(active: Array, chosen: list[int]) -> Array:
    other = active.copy()
    other[chosen] = ~other[chosen]
    return other
