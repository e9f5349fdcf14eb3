"""The lower level solved again at the end: the response that is meant, or what a fresh y says about the one that was found."""

from __future__ import annotations

import torch
from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._levels import Levels
from meha.methods._nearest import Fresh, nearest
from meha.methods.continuation.results import Result
from meha.methods.continuation.scales import Sizes
from meha.methods.continuation.tuning import TUNING

__all__ = ["compare", "respond", "select"]


def respond(levels: Levels, sizes: Sizes, x: Tensor) -> Fresh:
    """The lower solution at x nearest to y0, or to where the response of the problem begins."""
    selection = levels.oracle.selection
    levels.move(x)
    if selection.nearest:
        selection.weight = 0.0
        start = torch.cat([leaf.detach().reshape(-1) for leaf in selection.centre(levels.x)]).to(sizes.y0)
    else:
        start = sizes.y0
    return nearest(levels, start, TUNING.beyond_tol * sizes.tol, levels.curvatures["f_yy"])


def select(levels: Levels, sizes: Sizes, result: Result) -> Result:
    """The result with the response in the place of y, which the proximal term still held."""
    fresh = respond(levels, sizes, result.x)
    end = result.verdict
    if not fresh.solved and end.status is Status.CONVERGED:
        message = f"{end.message} The nearest solution of the lower level could not be found as accurately."
        end = Verdict(Status.FINISHED, message)
    F = levels.upper(fresh.y)[0]
    return result._replace(y=fresh.y, F=F, lower=fresh.lower, verdict=end)


def compare(levels: Levels, sizes: Sizes, result: Result) -> Result:
    """The result with F at a fresh lower solution; without one where this is higher than y, in another valley."""
    fresh = respond(levels, sizes, result.x)
    fell = abs(levels.lower(sizes.y0).value - fresh.lower)
    if fresh.lower - result.lower > TUNING.as_low * fell + TUNING.within_noise * levels.lower(fresh.y).noise:
        return result
    return result._replace(fresh=levels.upper(fresh.y)[0])
