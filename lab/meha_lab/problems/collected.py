"""Problems of the collection: random starts, and how far a point is from being a solution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meha.problem.sets import ConvexSet
from meha.problems import KnownProblem
from meha.tensors.variables import Variable, norm

__all__ = ["AnswerErrors", "CollectedProblem", "Region", "collected"]


SAMPLE = 64
"""Number of random starts from which the ranges of F and of f + g are estimated."""

UPPER_TOL = 0.05
"""How far F may be from its minimum, relative to its range, if x and the gap are accurate.

It is loose because y is inaccurate where the lower level is flat; another solution of the lower level differs by more.
"""


class Region(NamedTuple):
    """A box for uniform random starts: lower and upper ends of x and of y, numbers or tensors."""

    x: tuple[Any, Any]
    y: tuple[Any, Any]


class AnswerErrors(NamedTuple):
    """How far a point is from being a solution, in three dimensionless numbers.

    Attributes:
        x: ||x - x*|| / (1 + ||x*||) or :meth:`CollectedProblem.error`, whichever is less; the error alone if it is an excess.
            For problems without x, the same of y.
        gap: f + g at the point minus its global minimum at the same x, relative to the range of f + g at x*; infinite if y is
            outside of Y.
        upper: ``|F - F*|``, relative to the range of F.
    """

    x: float
    gap: float
    upper: float

    def right(self, tol: float = 1e-3, gap: float = 1e-6) -> bool:
        """Return whether x is accurate to ``tol``, y solves the lower level up to ``gap``, and F is that of the solution."""
        return self.x <= tol and self.gap <= gap and self.upper <= UPPER_TOL


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CollectedProblem(KnownProblem):
    """A known problem whose answers can be judged.

    Attributes:
        value: ``value(x)``, the hyper-objective F(x, answer(x)) in float64; None if unknown.
        measure: what :meth:`error` returns: the distance in x, or the excess of ``value`` if x is not unique or hardly
            matters.
        region: where :meth:`start` draws random starts from; None means around x0 and y0.
        local: x of the known local optima that are not global.
    """

    value: Callable[[Any], float] | None = None
    measure: Literal["distance", "excess"] = "distance"
    region: Region | None = None
    local: tuple[Any, ...] = ()

    def start(self, generator: torch.Generator) -> tuple[Any, Any]:
        """Draw a random start (x, y) from :attr:`region`, in X and Y; x is None if the problem has none.

        >>> from meha.problems import sine
        >>> problem = collected(sine(n=1))
        >>> x, y = problem.start(torch.Generator().manual_seed(0))
        >>> problem.verify(x, y).right()
        False
        """
        x_ends, y_ends = (None, None) if self.region is None else self.region
        x = None if self.x0 is None else _draw(self.x0, x_ends, self.x_set, generator)
        return x, _draw(self.y0, y_ends, self.y_set, generator)

    def lower_value(self, x: Any) -> float:
        """Return the global minimum of f(x, .) + g(x, .) on Y, from :attr:`answer`, in the precision of the problem."""
        if self.answer is None:
            raise ValueError(f"answer: the global lower value needs it, and {self.name} lacks it.")
        return self._total(x, self.answer(x).to(self.y0))

    def verify(self, x: Any, y: Any) -> AnswerErrors:
        """Compare a point with the solution and with the global minimum of the lower level at x.

        >>> from meha.problems import sine
        >>> problem = collected(sine(n=1))
        >>> problem.verify(problem.x_star, problem.y_star).right()
        True
        >>> problem.verify(problem.x_star, problem.y_star + 1).right()
        False
        """
        if not all(bool(torch.isfinite(part).all()) for part in (x, y) if part is not None):  # a diverged run
            return AnswerErrors(math.inf, math.inf, math.inf)
        point, answer = (y, self.y_star) if x is None else (x, self.x_star)
        least, best = self.lower_value(self.x_star), float(self._upper(self.x_star, self.y_star))
        generator = torch.Generator().manual_seed(0)  # fixed: the same point always gets the same numbers
        starts = [self.start(generator) for _ in range(SAMPLE)]
        # Gap and F are divided by their means over random points, so that one tolerance suits all problems.
        lower_range = sum(self._total(self.x_star, start) - least for _, start in starts) / SAMPLE
        if lower_range <= 0:  # every y solves the lower level at x*
            least = self.lower_value(self.x0)
            lower_range = sum(self._total(self.x0, start) - least for _, start in starts) / SAMPLE
        upper_range = sum(abs(float(self._upper(*start)) - best) for start in starts) / SAMPLE
        inside = self.y_set is None or self.y_set.contains(y)  # outside of Y, f + g may be below its minimum on Y
        gap = (self._total(x, y) - self.lower_value(x)) / lower_range if inside else math.inf
        error = self.error(x, y)
        numbers = (
            error if self.measure == "excess" else min(error, float(norm([point - answer]) / (1 + norm([answer])))),
            gap,
            abs(float(self._upper(x, y)) - best) / upper_range,
        )
        return AnswerErrors(*(math.inf if math.isnan(number) else number for number in numbers))

    def _upper(self, x: Any, y: Any) -> Tensor:
        return self.upper(y) if x is None else self.upper(x, y)

    def _total(self, x: Any, y: Any) -> float:
        """Return f + g."""
        with torch.no_grad():
            smooth = self.lower(y) if x is None else self.lower(x, y)
            return float(smooth + self.g.value(x, y))

    def error(self, x: Any, y: Any) -> float:
        """Return the error of a point, by :attr:`measure`; 0 at a solution.

        ``"distance"`` is ``distance(x, y).x``. ``"excess"`` is the share of the possible improvement over x0 that x misses,
        max(0, value(x) - upper_star) / (value(x0) - upper_star), or infinity if x is outside of X; it does not depend on y.
        If x is not finite, the error is infinite. Without x, it is ``distance(x, y).y``.
        """
        if x is None:
            return self.distance(x, y).y
        if not all(bool(torch.isfinite(leaf).all()) for leaf in Variable.of(x, "x").leaves):
            return math.inf
        if self.measure == "distance":
            return self.distance(x, y).x
        if self.value is None or self.upper_star is None:
            raise ValueError(f"measure: 'excess' needs value and upper_star, which {self.name} lacks; give both.")
        if self.x_set is not None and not self.x_set.contains(x):
            return math.inf
        excess = (self.value(x) - self.upper_star) / (self.value(self.x0) - self.upper_star)
        return math.inf if math.isnan(excess) else max(0.0, excess)


def collected(problem: KnownProblem) -> CollectedProblem:
    """Return a known problem, such as a toy, with what judges its answers.

    >>> from meha.problems import sine
    >>> collected(sine(n=1)).measure
    'distance'
    """
    if isinstance(problem, CollectedProblem):
        return problem
    return CollectedProblem(**{part.name: getattr(problem, part.name) for part in fields(problem)})


def _draw(start: Tensor, ends: tuple[Any, Any] | None, domain: ConvexSet | None, generator: torch.Generator) -> Tensor:
    """Draw a point between ``ends``, or around ``start``, and project it onto ``domain``."""
    shape = start.shape
    if ends is None:
        spread = max(1.0, float(norm([start])) / math.sqrt(start.numel()))  # the root mean square of the start
        point = spread * torch.randn(shape, generator=generator, dtype=torch.float64)  # the same draws for all dtypes
        point = start + point.to(start)
    else:
        low, high = (torch.as_tensor(end, dtype=torch.float64) for end in ends)
        point = (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(start)
    return point if domain is None else domain.project(point)
