"""The lower level solved anew at the end: the response that is meant, or what a fresh y says about the one that was found."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._levels import Levels
from meha.methods._nearest import Fresh, nearest
from meha.methods.continuation.passes import Result
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.tuning import TUNING

__all__ = ["compare", "respond", "select", "told"]


def respond(levels: Levels, scales: Scales, x: Tensor) -> Fresh:
    """The lower solution at x nearest to y0, or to where the response of the problem begins."""
    selection = levels.oracle.selection
    levels.move(x)
    if selection.nearest:
        selection.weight = 0.0
        start = torch.cat([leaf.detach().reshape(-1) for leaf in selection.centre(levels.x)]).to(scales.y0)
    else:
        start = scales.y0
    return nearest(levels, start, TUNING.beyond_tol * scales.tol, scales.curvatures["f_yy"])


def select(levels: Levels, scales: Scales, result: Result) -> Result:
    """The result with the response in the place of y, which the proximal term still held."""
    fresh = respond(levels, scales, result.x)
    end = result.verdict
    if not fresh.solved and end.status is Status.CONVERGED:
        message = f"{end.message} The nearest solution of the lower level could not be found as accurately."
        end = Verdict(Status.FINISHED, message)
    F = levels.upper(fresh.y)[0]
    return result._replace(y=fresh.y, F=F, lower=fresh.lower, verdict=end)


def compare(levels: Levels, scales: Scales, result: Result) -> Result:
    """The result with F at a fresh lower solution; without one where this is higher than y, in another valley."""
    fresh = respond(levels, scales, result.x)
    fell = abs(levels.lower(scales.y0).value - fresh.lower)
    if fresh.lower - result.lower > TUNING.as_low * fell + TUNING.within_noise * levels.lower(fresh.y).noise:
        return result
    return result._replace(fresh=levels.upper(fresh.y)[0])


def _hollow(result: Result) -> str:
    """What to say where y owes its F to the choice among the solutions of the lower level; nothing where it does not."""
    scale = max(result.spread, abs(result.F))
    if result.fresh is None or not result.fresh - result.F > TUNING.hollow * scale:
        return ""
    return (
        f"At this x, a fresh lower solution has F = {result.fresh:.3g}, not {result.F:.3g}: y owes its F to the upper level's"
        " data. If y is to be computed anew, state it: Problem(..., response=meha.responses.Nearest())."
    )


def told(result: Result, verdict: Verdict) -> Verdict:
    """The verdict, with what a fresh y says."""
    note = _hollow(result)
    return replace(verdict, message=f"{verdict.message} {note}") if note else verdict
