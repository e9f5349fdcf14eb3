"""Problems with known solutions, for tests, comparisons and first steps."""

from meha.problems.base import Distance, KnownProblem, Region, Verification
from meha.problems.collection import Entry, collection
from meha.problems.group_lasso import group_lasso
from meha.problems.synthetic import lasso, merely_convex, sine, strong_convex

__all__ = [
    "Distance",
    "Entry",
    "KnownProblem",
    "Region",
    "Verification",
    "collection",
    "group_lasso",
    "lasso",
    "merely_convex",
    "sine",
    "strong_convex",
]
