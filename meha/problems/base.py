"""KnownProblem: a problem with its solution, a start and settings for MEHA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._variables import Variable, norm
from meha.methods import MEHA
from meha.methods._parameters import complete_meha
from meha.problem import Problem
from meha.sets import ConvexSet

__all__ = ["Distance", "KnownProblem", "Region", "Verification", "relative"]

SAMPLE = 64
"""Number of random starts from which the ranges of F and of f + g are taken."""

UPPER_TOL = 0.05
"""How far F may be from its least value, relative to its range, where x and the gap are right.

It is loose because y is inaccurate where the lower level is flat; another solution of the lower level differs by more.
"""


class Distance(NamedTuple):
    """Relative distance of a point to the solution (set), in x and in y."""

    x: float
    y: float


class Region(NamedTuple):
    """Where random starts are drawn from, uniformly: the least and the greatest x and y, numbers or one a coordinate."""

    x: tuple[Any, Any]
    y: tuple[Any, Any]


class Verification(NamedTuple):
    """How far a point is from being a solution, without a unit.

    Attributes:
        x: ||x - x*|| / (1 + ||x*||) or :meth:`KnownProblem.error`, whichever is less; the error alone if it is an excess. For
            problems without x, the same of y.
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
class KnownProblem(Problem):
    """A :class:`~meha.Problem` with a known solution; pass it to ``solve`` like any other.

    Attributes:
        name: the name in tables and figures.
        x0: the start of x in the paper's experiment, or our reading of it.
        y0: the start of y.
        x_star: the solution in x; any one if there are several.
        y_star: the solution in y.
        upper_star: F at the solution.
        distance: ``distance(x, y)`` to the solution (set); NaN if there is nothing to compare with.
        presets: settings of MEHA by name; see :meth:`preset`.
        metrics: further measures by name, each a function of (x, y).
        answer: ``answer(x)``, the solution y of the lower level at x in float64 (if there are several, the best for F, or the
            one that ``response`` names), computed without the methods of this library; None if unknown.
        value: ``value(x)``, the hyper-objective F(x, answer(x)) in float64; None if unknown.
        measure: what :meth:`error` returns: the distance in x, or the excess of ``value`` if x is not unique or hardly
            matters.
        region: where :meth:`start` draws random starts from; None takes the surroundings of x0 and y0.
        local: x of local optima that are not global, as far as the search for the solution met them.

    >>> from meha.problems import strong_convex
    >>> problem = strong_convex(n=2)
    >>> problem.distance(problem.x_star, problem.y_star)
    Distance(x=0.0, y=0.0)
    >>> problem.preset("paper").gamma
    10.0
    """

    name: str
    x0: Any
    y0: Any
    x_star: Any = None
    y_star: Any = None
    upper_star: float | None = None
    distance: Callable[[Any, Any], Distance]
    presets: Mapping[str, MEHA]
    metrics: Mapping[str, Callable[[Any, Any], float]] = field(default_factory=dict)
    answer: Callable[[Any], Any] | None = None
    value: Callable[[Any], float] | None = None
    measure: Literal["distance", "excess"] = "distance"
    region: Region | None = None
    local: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"KnownProblem({self.name!r})"

    def start(self, generator: torch.Generator) -> tuple[Any, Any]:
        """Draw a random start (x, y) from :attr:`region`, in X and Y; x is None if the problem has none.

        >>> from meha.problems import collection
        >>> problem = collection("tuning", group="rugged")[0].make()
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

    def verify(self, x: Any, y: Any) -> Verification:
        """Compare a point with the solution and with the global minimum of the lower level at x.

        >>> from meha.problems import collection
        >>> problem = collection("tuning", group="rugged")[0].make()
        >>> problem.verify(problem.x_star, problem.y_star).right()
        True
        >>> problem.verify(problem.x_star, -problem.y_star).right()  # the other valley
        False
        """
        if not all(bool(torch.isfinite(part).all()) for part in (x, y) if part is not None):
            return Verification(math.inf, math.inf, math.inf)
        point, answer = (y, self.y_star) if x is None else (x, self.x_star)
        least, best = self.lower_value(self.x_star), float(self._upper(self.x_star, self.y_star))
        generator = torch.Generator().manual_seed(0)
        starts = [self.start(generator) for _ in range(SAMPLE)]
        lower_range = sum(self._total(self.x_star, start) - least for _, start in starts) / SAMPLE
        if lower_range <= 0:  # every y solves the lower level at x*
            least = self.lower_value(self.x0)
            lower_range = sum(self._total(self.x0, start) - least for _, start in starts) / SAMPLE
        upper_range = sum(abs(float(self._upper(*start)) - best) for start in starts) / SAMPLE
        inside = self.y_set is None or self.y_set.contains(y)
        gap = (self._total(x, y) - self.lower_value(x)) / lower_range if inside else math.inf
        far = self.error(x, y)
        numbers = (
            far if self.measure == "excess" else min(far, float(norm([point - answer]) / (1 + norm([answer])))),
            gap,
            abs(float(self._upper(x, y)) - best) / upper_range,
        )
        return Verification(*(math.inf if math.isnan(number) else number for number in numbers))

    def _upper(self, x: Any, y: Any) -> Tensor:
        return self.upper(y) if x is None else self.upper(x, y)

    def _total(self, x: Any, y: Any) -> float:
        """f + g."""
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

    def preset(self, name: str) -> MEHA:
        """Return MEHA with settings for this problem.

        ``"paper"``: the values in the paper's table. ``"recipe"``: values with which Algorithm 1 works on this problem.
        ``"theory"``: values within the range of the theorem, from the exact constants of this problem.
        """
        if name == "theory":
            x, y = Variable(self.x0, "x"), Variable(self.y0, "y")
            return complete_meha(MEHA(), Oracle(self, x, y), x, y, None)[0]
        if name not in self.presets:
            raise ValueError(f"preset: must be one of {', '.join([*self.presets, 'theory'])} for {self.name}, got {name!r}.")
        return self.presets[name]


def _draw(start: Tensor, ends: tuple[Any, Any] | None, domain: ConvexSet | None, generator: torch.Generator) -> Tensor:
    """Draw a point between ``ends``, or around ``start``, and project it."""
    shape = start.shape
    if ends is None:
        spread = max(1.0, float(norm([start])) / math.sqrt(start.numel()))
        point = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        point = start + point.to(start)
    else:
        low, high = (torch.as_tensor(end, dtype=torch.float64) for end in ends)
        point = (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(start)
    return point if domain is None else domain.project(point)


def relative(value: Tensor, target: Tensor) -> float:
    """Return ||value - target|| / ||target||, or ||value|| if the target is zero."""
    size = norm([target])
    return float(norm([value - target]) / (size if size > 0 else 1.0))
