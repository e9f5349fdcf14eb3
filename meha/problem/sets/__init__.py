"""Closed convex sets X and Y: projection and membership.

Every set is a set of vectors. A variable with several leaves counts as one long vector (all leaves, one after another), so
``L2Ball(1.0)`` bounds the norm of a whole dict. Products of intervals act on each leaf separately, and :class:`Product` gives
each leaf a set of its own.
"""

from meha.problem.sets.balls import L1Ball, L2Ball, LinfBall, Simplex
from meha.problem.sets.base import ConvexSet, Product
from meha.problem.sets.intervals import Box, NonNegative, Reals
from meha.problem.sets.polyhedra import AffineSet, HalfSpace, Intersection, Polyhedron

__all__ = [
    "AffineSet",
    "Box",
    "ConvexSet",
    "HalfSpace",
    "Intersection",
    "L1Ball",
    "L2Ball",
    "LinfBall",
    "NonNegative",
    "Polyhedron",
    "Product",
    "Reals",
    "Simplex",
]
