"""The line search of all descents: Armijo's condition, and Wolfe's where the length of a step is only a guess.

Nocedal and Wright, Numerical Optimization (2006), chapter 3: lengths grow until they bracket a good
one, and are then interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

DECREASE = 1e-4  # least part of the promised decrease that a step must keep (Armijo)
CURVATURE = 0.9  # part of the first slope to which the slope must have risen (Wolfe): exact steps are not worth their cost
LONGER, SHORTER = 4.0, 0.3  # factors of a length that is too short or too long, where no interpolation helps
MARGIN = 0.1  # an interpolated length this close to an end of its interval, relative to it, is not trusted
TRIALS = 25  # lengths; after that many, 0.3^25 = 1e-13, only rounding is left

PointT = TypeVar("PointT")


class LineTrial(NamedTuple, Generic[PointT]):
    """A point on the way, as the merit function phi(t) sees it.

    Attributes:
        point: anything; the search returns that of the best trial.
        value: phi(t); infinity or NaN where there is none.
        slope: phi'(t); NaN where it is not known, as at the boundary of a set: the search then ends at the first decrease.
        promised: the change of phi that its first-order model predicts, t phi'(0) if the way is straight.
    """

    point: PointT
    value: float
    slope: float
    promised: float


class _End(NamedTuple):
    """An end of the interval of lengths that holds a good one."""

    length: float
    value: float
    slope: float


def line_search(
    evaluate: Callable[[float], LineTrial[PointT] | None],
    value: float,
    slope: float,
    *,
    noise: float = 0.0,
    first: float = 1.0,
    wolfe: bool = True,
    kinks: bool = False,
    flatter: Callable[[PointT], bool] | None = None,
    trials: int = TRIALS,
) -> PointT | None:
    """Search for a step length t with phi(t) <= phi(0) + 1e-4 promised change; returns its point, None if there is none.

    Args:
        evaluate: the trial at a length; None ends the search.
        value, slope: phi(0) and phi'(0).
        noise: values that differ by less than this decide nothing: the slope must fall instead, or ``flatter`` holds.
        first: the first length.
        wolfe: whether the slope must rise to 0.9 phi'(0); otherwise longer steps are tried.
        kinks: whether phi may have kinks; a shortened step may then be much too short, and must meet Wolfe's condition, too.
        flatter: whether a point is nearer to a stationary one than the start.

    >>> line_search(lambda t: LineTrial(t, (t - 3) ** 2, 2 * (t - 3), -6 * t), value=9.0, slope=-6.0)
    1.0
    >>> line_search(lambda t: LineTrial(t, (t - 0.1) ** 2, 2 * (t - 0.1), -0.2 * t), value=0.01, slope=-0.2)
    0.1
    """
    low, high, length = _End(0.0, value, slope), _End(math.inf, math.nan, math.nan), first
    best: PointT | None = None
    for _ in range(trials):
        new = evaluate(length)
        if new is None:
            break
        change = new.value - value
        good = -math.inf < change <= DECREASE * min(new.promised, 0.0) and (new.promised < 0 or change < 0)
        if not good and abs(change) <= noise:
            # The approximate Wolfe condition of Hager and Zhang (2005), whose slopes have smaller errors than values.
            good = abs(new.slope) <= (1 - 2 * DECREASE) * abs(slope) or (flatter is not None and flatter(new.point))
        if not good:
            high = _End(length, new.value, new.slope)
        elif not (wolfe or (kinks and math.isfinite(high.length))) or not new.slope < CURVATURE * slope:
            return new.point
        else:
            best, low = new.point, _End(length, new.value, new.slope)
        length = _between(low, high, kinks=kinks)
        if not low.length < length < high.length:  # the interval is empty, up to rounding
            break
    return best


def _between(low: _End, high: _End, *, kinks: bool) -> float:
    """The next length: the zero of the interpolated slope or, near a kink, where the tangents meet."""
    if math.isinf(high.length):
        return LONGER * low.length
    width, share = high.length - low.length, SHORTER
    if high.slope > 0 > low.slope:
        turn = high.slope - low.slope
        share = (high.slope - (high.value - low.value) / width if kinks and low.length else -low.slope) / turn
        share = share if MARGIN <= share <= 1 - MARGIN else SHORTER
    return low.length + share * width
