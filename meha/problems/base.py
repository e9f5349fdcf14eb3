"""KnownProblem: a problem with its answer, its start and its presets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods import MEHA
from meha.methods._parameters import complete_meha
from meha.problem import Problem

__all__ = ["Distance", "KnownProblem", "relative"]


class Distance(NamedTuple):
    """How far a point is from the solution (set), relative to the size of the solution, in x and in y."""

    x: float
    y: float


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownProblem(Problem):
    """A :class:`~meha.Problem` whose answer is known. It goes into ``solve`` like any other.

    Attributes:
        name: for tables and figures.
        x0, y0: the start of the paper's experiment, or our reading of it.
        x_star, y_star: the solution; one of them where there is a set.
        upper_star: F at the solution.
        distance: ``distance(x, y)``, to the solution or the solution set; NaN where there is nothing to compare with.
        metrics: further measures by name, each a function of (x, y).
        response: ``response(x)``, a solution y of the lower level at x in float64 (the best for F where there are several),
            found without any method of the library; None where it is not known.
        value: ``value(x)``, the hyper-objective F(x, response(x)) in float64; None like ``response``.
        measure: what :meth:`error` is: the distance in x, or the excess of ``value`` where x is not unique or hardly
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
        """The one number that counts: 0 at a solution, by :attr:`measure`.

        ``"distance"``: ``distance(x, y).x``. ``"excess"``: the part of what could be gained from x0 on that x still misses,
        max(0, value(x) - upper_star) / (value(x0) - upper_star), and infinity for an x outside of X. y plays no part in it.
        Where x is not finite, the error is infinite.
        """
        if not all(bool(torch.isfinite(leaf).all()) for leaf in Variable.of(x, "x").leaves):
            return math.inf
        if self.measure == "distance":
            return self.distance(x, y).x
        if self.value is None or self.upper_star is None:
            raise ValueError(f"measure: {self.name} has no value(x) and upper_star, which 'excess' needs; give both.")
        if self.x_set is not None and not self.x_set.contains(x):
            return math.inf
        excess = (self.value(x) - self.upper_star) / (self.value(self.x0) - self.upper_star)
        return math.inf if math.isnan(excess) else max(0.0, excess)

    def preset(self, name: str) -> MEHA:
        """MEHA with all its numbers.

        ``"paper"``: the table values of the paper. ``"recipe"``: numbers with which Algorithm 1 is known to work here.
        ``"theory"``: what ``MEHA(p=0.49)`` chooses from the exact constants of this problem, inside the theorem's range.
        """
        if name == "theory":
            x, y = Variable(self.x0, "x"), Variable(self.y0, "y")
            return complete_meha(MEHA(), Oracle(self, x, y), x, y, None)[0]
        if name not in self.presets:
            raise ValueError(f"preset: {self.name} has {', '.join([*self.presets, 'theory'])}, got {name!r}.")
        return self.presets[name]


def relative(value: Tensor, target: Tensor) -> float:
    """||value - target|| / ||target||."""
    return float((value - target).norm() / target.norm())
