"""The stages of AdaptiveMEHA: when c grows, where the solutions lead for c to infinity, and when that rests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha.methods._curvatures import flatten, write
from meha.methods._extrapolation import richardson
from meha.methods.adaptive.ending import closed, judge
from meha.methods.adaptive.state import AdaptiveState, Record
from meha.methods.adaptive.steps import StepMap
from meha.methods.adaptive.tuning import TUNING
from meha.methods.adaptive.watching import grow_gamma

__all__ = ["set_course"]


def set_course(oracle: Oracle, state: AdaptiveState, here: StepMap, record: Record, tol: float) -> None:
    """End the stage if it is solved as accurately as it pays, or takes too long; then c grows."""
    pace, course = state.pace, state.course
    point = record[0][: len(state.origin)]
    eps = torch.finfo(point.dtype).eps
    tol = max(tol, math.sqrt(eps))
    drift = 1.0 if len(course.stages) < 2 else _change(state, course.stages[-1][1], course.stages[-2][1])
    slope = float((here.roots * record[2]).norm())
    course.scale = max(course.scale, slope)
    course.steps += 1
    accuracy = min(max(TUNING.accuracy * drift, TUNING.accuracy_tol * tol), TUNING.loosest)
    wanted = accuracy * max(slope, TUNING.least_slope * course.scale) / pace.c
    solved = here.size(record) <= max(wanted, TUNING.rounding * eps * float((record[0] / here.roots).norm()))
    late = course.steps >= (TUNING.early if drift > TUNING.moving else max(TUNING.late, TUNING.late_share * state.k))
    # What F still loses on its way to c = infinity is about twice c times the gap.
    close = 2 * pace.c * abs(state.numbers["gap"]) <= TUNING.close * tol * (course.highest - course.lowest)
    if late and not solved:
        grow_gamma(state, here, record)
        course.steps = 0
    if solved or (late and not close):
        course.stages = [*course.stages[-2:], (pace.c, point, solved, pace.growth)]
        pace.c *= TUNING.ratio
        pace.scale(2.0, 2.0, 2.0)
        course.steps = 0
        _extrapolate(oracle, state, tol)
    if not course.extrapolated:
        write(point, state.x, state.y)
    if state.reason:
        judge(oracle, state, tol)


def _extrapolate(oracle: Oracle, state: AdaptiveState, tol: float) -> None:
    """Put the limit for c to infinity into the answer, where the last stages show it; give a reason if it, or (x, y), rests."""
    course = state.course
    before, course.extrapolated = flatten(state.x, state.y) if course.extrapolated else None, False
    if len(course.stages) <= 2 or not all(solved for _, _, solved, _ in course.stages):
        return
    (_, z0, _, g0), (c1, z1, _, g1), (c2, z2, _, g2) = course.stages
    first, second = _change(state, z1, z0), _change(state, z2, z1)
    if max(first, second) <= tol and closed(state):
        state.reason = f"(x, y) changed by {max(first, second):.1e} <= tol = {tol:.1e} (relative) while c grew to {c2:.3g}"
    if g0 == g1 == g2 and second <= TUNING.shrinks * first:
        limit = richardson(z2, z1, c2 / c1)
        write(limit, state.x, state.y)
        oracle.project(state.x.value, state.x.leaves, 1.0)
        oracle.prox(state.x.value, state.y.leaves, TUNING.inside / state.sight.curvatures["f_yy"])
        course.extrapolated = True
        last, course.change = course.change, math.inf if before is None else _change(state, flatten(state.x, state.y), before)
        near = _change(state, limit, z2) <= TUNING.near * tol
        if course.change <= tol and last <= TUNING.near * tol and near and closed(state):
            state.reason = (
                f"the limit for c to infinity changed by {course.change:.1e} <= tol = {tol:.1e} (relative), c = {c2:.3g}"
            )


def _change(state: AdaptiveState, new: Tensor, old: Tensor) -> float:
    """The relative change from old to new, the larger of those of x and y; the way from the start counts as size, a little."""
    parts = (state.x.numel, state.y.numel)
    changes = []
    for a, b, start in zip(new.split(parts), old.split(parts), state.origin.split(parts), strict=True):
        size = float(a.norm()) + TUNING.way * float((a - start).norm())
        changes.append(float((a - b).norm()) / size if size else float((a - b).norm() > 0))
    return max(changes)
