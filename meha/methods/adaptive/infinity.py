"""A look beyond the end of a run, and back: whether the optimum lies elsewhere, or at infinity."""

from __future__ import annotations

import math
from functools import partial

import torch

from meha._lower import solve_lower
from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods._curvatures import flatten, write
from meha.methods.adaptive.state import AdaptiveState
from meha.methods.adaptive.tuning import TUNING

__all__ = ["at_infinity", "better_behind"]


def at_infinity(oracle: Oracle, state: AdaptiveState, tol: float) -> str:
    """Why the optimum may lie at infinity, from F where the coordinates of x that went furthest go twice as far; or nothing."""
    start, here = state.origin[: state.x.numel], flatten(state.x)
    way = here - start
    if not float(way.norm()) > TUNING.moved * float(here.norm()):  # a start near the solution says nothing about what is far
        return ""
    furthest = way.abs() >= way.abs().max() / 2
    far = torch.where(furthest, here + TUNING.beyond * way, here)
    x = state.x.copy()
    write(far, x)
    oracle.project(x.value, x.leaves, 1.0)
    if not torch.equal(flatten(x), far):  # X holds x
        return ""
    write(torch.where(furthest, here + way, here), x)
    try:
        if not (_may_be_low(oracle, state, x, tol) and _is_low(oracle, state, x, tol)):
            return ""
    except (RuntimeError, ValueError, ArithmeticError):  # an objective or g is not defined there
        return ""
    return (
        f"(x, y) rests, but F is no higher when {int(furthest.sum())} of {len(here)} coordinates of x go twice as far from x0:"
        " the optimum may lie at infinity. Bound x, as with x_set=meha.sets.Box(-10.0, 10.0) for log-weights."
    )


def better_behind(oracle: Oracle, state: AdaptiveState, tol: float) -> str:
    """Why F is not smallest at x: it is lower where the coordinates that went furthest go back towards x0; or nothing.

    This finds x on plateaus, such as weights so large that y no longer depends on them.
    """
    start, here = state.origin[: state.x.numel], flatten(state.x)
    way = here - start
    furthest = way.abs() >= way.abs().max() / 2
    solve = partial(solve_lower, oracle, tol=TUNING.lower_tol, max_steps=TUNING.lower_steps)
    F = float(oracle.upper(state.x, state.y))
    least = F - tol * (state.course.highest - state.course.lowest) - math.sqrt(torch.finfo(here.dtype).eps) * abs(F)
    x = state.x.copy()
    for share in TUNING.behind:
        write(torch.where(furthest, start + share * way, here), x)
        if bool(way.any()) and float(oracle.upper(x, solve(x, state.y).theta)) < least:
            return (
                f"but F is lower when {int(furthest.sum())} of {len(here)} coordinates of x go back to {share:g} of their way"
                " from x0; start there"
            )
    return ""


def _may_be_low(oracle: Oracle, state: AdaptiveState, x: Variable, tol: float) -> bool:
    """Whether F may be no higher at x, from values alone, with y as it is or twice as far, whichever suits f + g better."""
    y, start, here, values = state.y.copy(), state.origin[state.x.numel :], flatten(state.y), []
    for guess in (here, 2 * here - start):
        write(guess, y)
        oracle.prox(x.value, y.leaves, TUNING.inside / state.sight.curvatures["f_yy"])
        values.append((float(oracle.phi(x, y)), float(oracle.upper(x, y))))
    return min(values)[1] <= float(oracle.upper(state.x, state.y)) + tol * (state.course.highest - state.course.lowest)


def _is_low(oracle: Oracle, state: AdaptiveState, x: Variable, tol: float) -> bool:
    """Whether F is lower at x, or y goes on while F stays as low, with the lower level solved.

    (If neither F nor y changes, x has gone where it no longer matters, and has converged.)
    """
    solve = partial(solve_lower, oracle, tol=TUNING.lower_tol, max_steps=TUNING.lower_steps)
    y = solve(state.x, state.y).theta
    beyond = solve(x, y).theta
    F, F_beyond = float(oracle.upper(state.x, y)), float(oracle.upper(x, beyond))
    noise, spread = math.sqrt(torch.finfo(state.origin.dtype).eps), state.course.highest - state.course.lowest
    moves = float((flatten(beyond) - flatten(y)).norm()) > tol * float(flatten(y).norm())
    return F_beyond < F - noise * abs(F) or (moves and F_beyond <= F + noise * min(abs(F), spread))
