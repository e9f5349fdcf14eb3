"""The epigraph form of g: a smooth function with further unknowns t that bound the absolute values in g."""

from __future__ import annotations

import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.tensors.variables import Variable


class UnsupportedTermError(ValueError):
    """A non-smooth term has no epigraph form."""


class Epigraph:
    """g(x, y) = min { value(x, y, t) : rows(x, y, t) <= 0 } for all terms of a problem; t is empty if there is no g.

    Args:
        problem: the problem with the term g.
        y: a variable with the structure of the lower level.

    Attributes:
        size: the number of unknowns t.
    """

    def __init__(self, problem: Problem, y: Variable) -> None:
        self._terms = problem.g.terms(y)
        self._sizes: list[int] = []
        for term, chosen in self._terms:
            with torch.no_grad():
                bounded = term.absolute_terms([y.leaves[i] for i in chosen])
            if bounded is None:
                raise UnsupportedTermError(
                    f"nonsmooth: the default cannot take {type(term).__name__} together with constraints; it takes L1,"
                    " NonNegativeL1, ElasticNet, TotalVariation and FusedLasso. Use one of them, or a smooth term."
                )
            self._sizes.append(len(bounded))
        self.size = sum(self._sizes)

    def start(self, y: Variable) -> Tensor:
        """Return the least feasible t at y."""
        parts = [bounded.abs() for bounded in self._absolute_terms(y)]
        return torch.cat(parts) if parts else y.leaves[0].new_zeros(0)

    def _absolute_terms(self, y: Variable) -> list[Tensor]:
        """Return the linear functions of y whose absolute values t bounds, for each term."""
        parts = [term.absolute_terms([y.leaves[i] for i in chosen]) for term, chosen in self._terms]
        return [part for part in parts if part is not None]  # none is None, as __init__ has checked

    def value(self, x: Variable, y: Variable, t: Tensor) -> Tensor | float:
        """Return the smooth function that replaces g."""
        pieces = zip(self._terms, t.split(self._sizes), strict=True)
        return sum(term.epigraph(x.value, [y.leaves[i] for i in chosen], part)[0] for (term, chosen), part in pieces)

    def rows(self, x: Variable, y: Variable, t: Tensor) -> Tensor:
        """Return the inequalities, which hold where they are not positive."""
        rows = []
        for (term, chosen), part, bounded in zip(self._terms, t.split(self._sizes), self._absolute_terms(y), strict=True):
            # |a| <= t as two linear inequalities, since |a| itself has no derivative at zero.
            rows += [bounded - part, -bounded - part, term.epigraph(x.value, [y.leaves[i] for i in chosen], part)[1]]
        return torch.cat(rows) if rows else t[:0]
