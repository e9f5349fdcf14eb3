"""The end of a run of AdaptiveMEHA: y is verified, and F is compared with that at other x, before it counts as converged."""

from __future__ import annotations

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._verdicts import Status
from meha.methods._curvatures import flatten, write
from meha.methods._levels import Levels
from meha.methods._quasi_newton import Pairs, size
from meha.methods._verification import Search
from meha.methods.adaptive.infinity import at_infinity, better_behind
from meha.methods.adaptive.state import AdaptiveState
from meha.methods.adaptive.tuning import TUNING

__all__ = ["closed", "judge"]


def closed(state: AdaptiveState) -> bool:
    """Whether the gap is so small that F can hardly fall any more as c grows."""
    course = state.course
    return 2 * state.pace.c * abs(state.numbers["gap"]) <= TUNING.closed * (course.highest - course.lowest)


def judge(oracle: Oracle, state: AdaptiveState, tol: float) -> None:
    """Set the status of a run that rests; where the lower level has a lower point, go on from there, if that is worth a try."""
    doubt = at_infinity(oracle, state, tol)
    if doubt:
        state.status, state.reason = Status.AT_INFINITY.value, doubt
        return
    search = _search(oracle, state, tol)
    start, allowed = state.origin[state.x.numel :], max(TUNING.least_search, int(TUNING.search * oracle.counts.lower))
    evidence = search.run([flatten(state.theta), start], allowed)
    state.evidence = str(evidence)
    better = _better(search, state, evidence.excess)
    if better is not None:
        if state.course.restarts < TUNING.restarts:
            levels = search.levels
            pull = abs(levels.upper(better)[0] - levels.upper(flatten(state.y))[0])
            _restart(state, better, TUNING.holding * pull / evidence.excess if evidence.excess else 0.0)
            return
        write(better, state.y)
        state.status = Status.LOCAL.value
        state.reason += f"; y was in a valley that is not the best, and was moved: {evidence}"
        return
    behind = better_behind(oracle, state, tol)
    state.status = (Status.CONVERGED if evidence.certain and not behind else Status.LOCAL).value
    state.reason += f"; {behind or evidence}"


def _better(search: Search, state: AdaptiveState, excess: float) -> Tensor | None:
    """The lowest point of the lower level, if y is above it, or one as low as y at which F is smaller."""
    levels, course, lowest = search.levels, state.course, search.lowest
    level = lowest.value + search.equal(lowest) + (0.0 if excess else search.slack)
    values = [(levels.upper(valley.z)[0], valley.z) for valley in search.valleys if valley.value <= level]
    F, y = min(values, key=lambda value: value[0])
    gained = levels.upper(search.point.z)[0] - F > TUNING.closed * (course.highest - course.lowest)
    return y if excess or gained else None


def _search(oracle: Oracle, state: AdaptiveState, tol: float) -> Search:
    """A search of the lower level at x, around y."""
    levels = Levels(oracle, state.x.copy(), state.y.copy())
    levels.curvatures = state.sight.curvatures
    x, y, (x0, y0) = flatten(state.x), flatten(state.y), state.origin.split((state.x.numel, state.y.numel))
    scale, tolerance = max(size(y), size(y - y0)) or 1.0, tol * max(size(x), size(x - x0))
    pairs, curvature = Pairs.sized(TUNING.pairs, len(y)), levels.curvatures["f_yy"]
    return Search(levels, y, pairs, 1 / curvature, scale, tolerance, slack=curvature * (tol * scale) ** 2, solved=True)


def _restart(state: AdaptiveState, y: Tensor, c: float) -> None:
    """Go on from another y, at this c or a larger one, with a new memory and new stages."""
    state.pace.c = max(state.pace.c, c)
    write(y, state.at_y)
    write(y, state.theta)
    write(flatten(state.x), state.at_x)
    state.subgradients = torch.zeros_like(state.subgradients)
    state.memory.forget()
    state.course.stages, state.course.extrapolated, state.course.steps = [], False, 0
    state.course.restarts += 1
    state.reason = ""
