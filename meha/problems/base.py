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

__all__ = ["Distance", "KnownProblem", "relative"]


class Distance(NamedTuple):
    """Relative distance of a point to the solution (set), in x and in y."""

    x: float
    y: float


@dataclass(frozen=True, eq=False, kw_only=True)
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
        response: ``response(x)``, a solution y of the lower level at x in float64 (the best for F if there are several),
            computed without the methods of this library; None if unknown.
        value: ``value(x)``, the hyper-objective F(x, response(x)) in float64; None if ``response`` is None.
        measure: what :meth:`error` returns: the distance in x, or the excess of ``value`` if x is not unique or hardly
            matters.

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
    response: Callable[[Any], Any] | None = None
    value: Callable[[Any], float] | None = None
    measure: Literal["distance", "excess"] = "distance"

    def error(self, x: Any, y: Any) -> float:
        """Return the error of a point, by :attr:`measure`; 0 at a solution.

        ``"distance"`` is ``distance(x, y).x``. ``"excess"`` is the share of the possible improvement over x0 that x misses,
        max(0, value(x) - upper_star) / (value(x0) - upper_star), or infinity if x is outside of X; it does not depend on y.
        If x is not finite, the error is infinite.
        """
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


def relative(value: Tensor, target: Tensor) -> float:
    """Return ||value - target|| / ||target||, or ||value|| if the target is zero."""
    size = norm([target])
    return float(norm([value - target]) / (size if size > 0 else 1.0))
