"""Grid search, random search and TPE where f is quadratic: semismooth Newton steps solve the lower level at a candidate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meha.lower.proximal_gradient import ProximalSolution
from meha.methods.search import TPE, GridSearch, RandomSearch, Search, SearchState
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable
from meha_lab.baselines.semismooth import QuadraticLower

__all__ = [
    "QUADRATIC",
    "QuadraticGridSearch",
    "QuadraticRandomSearch",
    "QuadraticSearch",
    "QuadraticSearchState",
    "QuadraticTPE",
]


@dataclass
class QuadraticSearchState(SearchState):
    """The state of a search, and f as tensors: factor, target and linear part."""

    lower: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class QuadraticSearch(Search):
    """A search for a convex quadratic f of y alone and a :class:`meha.nonsmooth.GroupL2`.

    f is read once, by products with its Hessian. ``inner_steps`` are semismooth Newton steps, of which some thirty do what
    takes FISTA thousands; they count no gradients.
    """

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> QuadraticSearchState:
        form = QuadraticLower.read(oracle, x, y, type(self).__name__)
        return QuadraticSearchState(**vars(super().init(oracle, x, y)), lower=form.parts)

    def solve_candidate(self, oracle: Oracle, state: SearchState, x: Variable, batch: Any) -> ProximalSolution:
        assert isinstance(state, QuadraticSearchState)
        lower = QuadraticLower(oracle, state.lower)
        return lower.solve(x, state.start, tol=self.lower_tol, max_steps=self.inner_steps)


@dataclass(frozen=True, kw_only=True)
class QuadraticGridSearch(QuadraticSearch, GridSearch):
    """Grid search for a quadratic f."""


@dataclass(frozen=True, kw_only=True)
class QuadraticRandomSearch(QuadraticSearch, RandomSearch):
    """Random search for a quadratic f."""


@dataclass(frozen=True, kw_only=True)
class QuadraticTPE(QuadraticSearch, TPE):
    """TPE for a quadratic f."""


QUADRATIC: dict[type[Search], type[Search]] = {
    GridSearch: QuadraticGridSearch,
    RandomSearch: QuadraticRandomSearch,
    TPE: QuadraticTPE,
}
"""The form of each search for a quadratic f."""
