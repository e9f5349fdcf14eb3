"""Closed convex sets X and Y: projection and membership.

Every set is a set of vectors. A variable with several leaves counts as one long vector (all leaves, one after another), so
``L2Ball(1.0)`` bounds the norm of a whole dict. Products of intervals act on each leaf separately, and :class:`Product` gives
each leaf a set of its own.
"""

from meha.sets._base import ConvexSet, Product
from meha.sets.affine import AffineSet, HalfSpace
from meha.sets.balls import L1Ball, L2Ball, LinfBall, Simplex
from meha.sets.intervals import Box, NonNegative, Reals
from meha.sets.polyhedra import Intersection, Polyhedron

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
