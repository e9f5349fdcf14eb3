"""Kinks and sets as constraints: g by its epigraph, with further unknowns t, X and Y by their inequalities and equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from meha.numerics.tolerances import SINGULAR
from meha.problem.constraints import Constraint, Linear
from meha.problem.nonsmooth import NonSmooth
from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet
from meha.problem.sets.base import Rows
from meha.problem.sets.polyhedra import Polyhedron
from meha.tensors.variables import Leaves, Variable
from meha.tensors.vectors import split

REMEDIES = {
    "as_constraints": "define it, or state the set as a meha.constraints.Smooth or a Polyhedron",
    "absolute_terms": "define it and epigraph, or use a term that has them, such as L1, or a smooth term",
    "epigraph": "define it beside absolute_terms, or use a term that has both, such as L1, or a smooth term",
}
"""What to do about a set or term that lacks an attribute."""


def lacking(problem: Problem, x: Variable, y: Variable) -> str:
    """Say which attribute a set or term lacks to become constraints at variables like ``x`` and ``y``; empty if none."""
    with torch.no_grad():
        for variable, domain in zip((x, y), problem.domains, strict=True):
            for part, chosen in domain.parts(variable):
                leaves = [variable.leaves[i] for i in chosen]
                if part.as_constraints(leaves) is None:
                    return _missing(f"{variable.argument}_set", part, "as_constraints", leaves)
        for term, chosen in problem.g.terms(y):
            leaves = [y.leaves[i] for i in chosen]
            bounded = term.absolute_terms(leaves)
            if bounded is None or term.epigraph(x.value, leaves, bounded.abs()) is None:
                return _missing("nonsmooth", term, "absolute_terms" if bounded is None else "epigraph", leaves)
    return ""


def _missing(argument: str, part: ConvexSet | NonSmooth, attribute: str, leaves: Leaves) -> str:
    found = f"{type(part).__name__} has no {attribute} for its {sum(leaf.numel() for leaf in leaves)} coordinates"
    return f"{argument}: {found}, which is needed together with constraints; {REMEDIES[attribute]}."


@dataclass(frozen=True, eq=False)
class Membership(Constraint):
    """x in X, or y in Y, as the inequalities and equations of the set.

    Args:
        argument: ``"x"`` or ``"y"``.
        parts: the sets of separate groups of leaves.
    """

    argument: str
    parts: list[tuple[ConvexSet, list[int]]]

    def values(self, x: Variable, y: Variable) -> Rows:
        leaves = (x if self.argument == "x" else y).leaves
        rows = [cast(Rows, part.as_constraints([leaves[i] for i in chosen])) for part, chosen in self.parts]
        none = leaves[0].new_zeros(0)
        inequalities, equations = (torch.cat(side) if side else none for side in ([r[k] for r in rows] for k in (0, 1)))
        return inequalities, equations


def absorb_constraints_of_x(problem: Problem, x: Variable) -> Problem:
    """Return the problem with its constraints as a part of X, where all of them are linear and on x alone; else unchanged.

    No constraint then couples x and y, and every method that projects on X can take the problem.
    """
    below, above = problem.constraints
    of_x = [part for part in above if isinstance(part, Linear) and part.B is None and part.B_eq is None]
    if below or not of_x or len(of_x) < len(above) or x.divided:
        return problem
    for part in of_x:
        part.check(x, x)  # the matrices for y are None
    inside = Membership("x", problem.domains[0].parts(x))

    def rows(vector: Tensor) -> Tensor:
        """All inequalities, then all equations."""
        at = x.moved(split(vector, x.leaves))
        return torch.cat(
            [side for sides in zip(*(part.values(at, at) for part in (inside, *of_x)), strict=True) for side in sides]
        )

    zero = torch.zeros(x.numel, dtype=torch.float64, device=x.device)
    if any(part.as_constraints(split(zero, x.leaves)) is None for part, _ in inside.parts):
        return problem
    with torch.enable_grad():
        matrix = jacobian(rows, zero)
    constant, point = rows(zero), torch.arange(1.0, x.numel + 1, device=x.device).to(zero).cos()
    rounding = SINGULAR * torch.finfo(zero.dtype).eps * (1 + constant.abs() + matrix.abs().sum(dim=1))
    if not bool(((rows(point) - matrix @ point - constant).abs() <= rounding).all()):  # such as the rows of a ball
        return problem
    at = x.moved(split(zero, x.leaves))
    count = sum(len(part.values(at, at)[0]) for part in (inside, *of_x))
    (A, C), (b, d) = matrix.tensor_split([count]), (-constant).tensor_split([count])
    try:
        domain = Polyhedron(A, b, C, d)
    except ValueError as error:
        raise ValueError(f"upper_constraints: no x in X meets them ({error}); check their signs (A x <= b).") from error
    return dataclasses.replace(problem, x_set=domain, upper_constraints=())


class Epigraph:
    """g(x, y) = min { value(x, y, t) : rows(x, y, t) <= 0 } for all terms of a problem; t is empty if there is no g.

    Args:
        problem: the problem with the term g, of which :func:`lacking` has checked the attributes.
        y: a variable with the structure of the lower level.

    Attributes:
        size: the number of unknowns t.
    """

    def __init__(self, problem: Problem, y: Variable) -> None:
        self._terms = problem.g.terms(y)
        self._sizes = [len(bounded) for bounded in self._absolute_terms(y)]
        self.size = sum(self._sizes)

    def start(self, y: Variable) -> Tensor:
        """Return the least feasible t at y."""
        return torch.cat([y.leaves[0].new_zeros(0), *(bounded.abs() for bounded in self._absolute_terms(y))])

    def _absolute_terms(self, y: Variable) -> list[Tensor]:
        """Return the linear functions of y whose absolute values t bounds, for each term."""
        return [cast(Tensor, term.absolute_terms([y.leaves[i] for i in chosen])) for term, chosen in self._terms]

    def _pieces(self, x: Variable, y: Variable, t: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the unknowns of each term, its smooth function and its inequalities."""
        for (term, chosen), part in zip(self._terms, t.split(self._sizes), strict=True):
            yield part, *cast(Rows, term.epigraph(x.value, [y.leaves[i] for i in chosen], part))

    def value(self, x: Variable, y: Variable, t: Tensor) -> Tensor | float:
        """Return the smooth function that replaces g."""
        return sum(smooth for _, smooth, _ in self._pieces(x, y, t))

    def rows(self, x: Variable, y: Variable, t: Tensor) -> Rows:
        """Return the inequalities, which hold where they are not positive, and no equations."""
        rows = [t[:0]]
        for (part, _, more), bounded in zip(self._pieces(x, y, t), self._absolute_terms(y), strict=True):
            # |a| <= t as two linear inequalities, since |a| itself has no derivative at zero.
            rows += [bounded - part, -bounded - part, more]
        return torch.cat(rows), t[:0]
