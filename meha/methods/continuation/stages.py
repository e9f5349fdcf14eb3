"""Stages, one for each c: where they lead as c grows, and when there have been enough. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._extrapolation import richardson
from meha.methods._quasi_newton import size
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.tuning import TUNING

__all__ = ["Stage", "accuracy", "compared", "limits", "verdict"]


class Stage(NamedTuple):
    """The end of a stage: c, x, y, values there, and the limits for c to infinity.

    Attributes:
        length: the size of the next step, relative to x.
        blur: the rounding error of the gradient, relative to the largest gradient.
        apart: the distance of y from theta, relative to y.
        solved: whether x is as accurate as the stage demands.
        bias_x, bias_y, bias_F: relative changes of the limits with this stage; the first is that of y where there is no x.
    """

    c: float
    x: Tensor
    y: Tensor
    F: float
    gap: float
    residual: float
    length: float
    blur: float
    apart: float
    solved: bool
    limit_x: Tensor
    limit_y: Tensor
    limit_F: float
    bias_x: float = math.inf
    bias_y: float = math.inf
    bias_F: float = math.inf


def accuracy(stages: Sequence[Stage], scales: Scales) -> float:
    """The relative accuracy in x of the next stage."""
    moved = 1.0
    if len(stages) >= 2:
        moved = size(stages[-1].x - stages[-2].x) / scales.x_size(stages[-1].x)
    return min(max(TUNING.tightening * moved**TUNING.tightening_power, TUNING.beyond_tol * scales.tol), TUNING.loose)


def limits(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Where x and y lead for c to infinity, if that can be said.

    By Richardson's rule in 1/c, of second order where that agrees with the first; by a geometric series where their changes
    shrink by another factor, and steadily, as they do when the lower level is degenerate.
    """
    both = xs, ys
    changes = [[size(b - a) for a, b in itertools.pairwise(points[-4:])] for points in both]
    if len(xs) <= 2:
        return None
    many = len(changes[0]) > 2
    if all(sizes[-1] <= TUNING.shrinking * sizes[-2] for sizes in changes):
        first = [richardson(points[-1], points[-2], TUNING.ratio) for points in both]
        if many and all(sizes[-2] <= TUNING.shrinking * sizes[-3] for sizes in changes):
            before = [richardson(points[-2], points[-3], TUNING.ratio) for points in both]
            second = [richardson(new, old, TUNING.ratio**2) for new, old in zip(first, before, strict=True)]
            if all(size(b - a) <= 0.5 * size(a - old) for a, b, old in zip(first, second, before, strict=True)):
                return second[0], second[1]
        return first[0], first[1]
    if not many or not all(sizes[-2] and sizes[-3] for sizes in changes):
        return None
    factors = [sizes[-1] / sizes[-2] for sizes in changes]
    for factor, sizes in zip(factors, changes, strict=True):
        if factor > TUNING.steady or abs(factor - sizes[-2] / sizes[-3]) > TUNING.unsteady * factor:
            return None
    x, y = (z[-1] + (z[-1] - z[-2]) * (factor / (1 - factor)) for z, factor in zip(both, factors, strict=True))
    return x, y


def compared(stage: Stage, last: Stage, scales: Scales, spread: float) -> Stage:
    """The stage with F's limit, and with its biases: changes of the limits since the last stage, those of F relative to its
    ``spread``.
    """
    limit_F = richardson(stage.F, last.F, TUNING.ratio)
    bias_y = size(stage.limit_y - last.limit_y) / scales.y_size(stage.y)
    bias_x = size(stage.limit_x - last.limit_x) / scales.x_size(stage.x) + 2 * stage.length
    return stage._replace(
        limit_F=limit_F,
        bias_x=bias_y if scales.simple else bias_x,
        bias_y=bias_y,
        bias_F=abs(limit_F - last.limit_F) / (spread or 1.0),
    )


def verdict(stages: Sequence[Stage], scales: Scales, spread: float) -> Verdict | None:
    """Whether a pass ends with the last stage, and why; only stages that were solved are evidence."""
    stage, tol = stages[-1], scales.tol
    name, bias = scales.name, f"{stage.bias_x:.1e}"
    close = 2 * stage.c * stage.gap <= TUNING.closed * spread
    if scales.balance / stage.c < TUNING.lightest and stage.apart <= TUNING.joined and close:
        solved = all(recent.solved for recent in stages[-2:])
        if solved and stage.bias_x <= tol and stage.bias_y <= TUNING.y_tol * tol:
            return Verdict(
                Status.CONVERGED, f"{name}, extrapolated in 1/c, changed by {bias} in the last stage (tol {tol:.1e})."
            )
        if solved and all(_rests(recent, tol) for recent in stages[-TUNING.rests :]):
            where = ", in directions in which F is almost constant" if stage.bias_x > tol else ""
            return Verdict(Status.CONVERGED, f"F no longer changes; {name} changed by {bias} in the last stage{where}.")
        if scales.growth * stage.blur > TUNING.blurred:
            message = f"{name} is accurate to about {bias}; rounding errors, which c multiplies, prevent more. Use float64."
            return Verdict(Status.FINISHED, message)
    if len(stages) >= TUNING.max_stages or stage.c > TUNING.largest_c * scales.balance:
        unsolved = "" if stage.solved else ", of which the last was not solved"
        message = f"{name} is accurate to about {bias} after {len(stages)} stages{unsolved}."
        return Verdict(Status.FINISHED, f"{message} Ask for less accuracy (tol), or inspect the problem with meha.check.")
    return None


def _rests(stage: Stage, tol: float) -> bool:
    """Whether F changed so little with a stage that further ones are of no use."""
    flat = stage.bias_F <= tol and stage.bias_x > TUNING.unsettled
    return flat or stage.bias_F <= TUNING.resting * tol**TUNING.resting_power
