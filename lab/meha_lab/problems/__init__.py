"""A collection of bilevel problems with answers that were computed without the methods of the library."""

from meha_lab.problems.collected import CollectedProblem
from meha_lab.problems.collection import Entry, collection

__all__ = ["CollectedProblem", "Entry", "collection"]
