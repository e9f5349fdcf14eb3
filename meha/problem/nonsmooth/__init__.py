"""Non-smooth terms g(x, y): value and proximal map.

Each docstring states g; ``prox(x, y, step)`` is argmin_w step * g(x, w) + 0.5 ||w - y||^2. Gradients in x come from ``value``
by autograd, so a term needs no hand-written derivative.

A weight is a number, a tensor, or a function of x. It gives one number for all coordinates, one per coordinate (a tensor that
broadcasts to the leaf), or one per leaf (a list, a dict or, for several leaves, a vector with one entry each). Weights must not
be negative: constrain x (``x_set=NonNegative()``) or map it (``weight=lambda x: x.exp()``).

With ``part``, a term acts only on the leaves of that name (``"coef"``, ``"net.0.weight"``, or a whole branch). Terms on
different parts are added with ``+``.
"""

from meha.problem.nonsmooth.base import NonSmooth, Sum, Zero
from meha.problem.nonsmooth.coupled import GroupL2, Nuclear, SparseGroup
from meha.problem.nonsmooth.ordered import FusedLasso, OrderedL1, TotalVariation
from meha.problem.nonsmooth.separable import L1, MCP, SCAD, ElasticNet, NonNegativeL1

__all__ = [
    "L1",
    "MCP",
    "SCAD",
    "ElasticNet",
    "FusedLasso",
    "GroupL2",
    "NonNegativeL1",
    "NonSmooth",
    "Nuclear",
    "OrderedL1",
    "SparseGroup",
    "Sum",
    "TotalVariation",
    "Zero",
]
