"""Measure the curvatures of F and f at a point by the power method on differences of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meha.numerics.tolerances import DIFFERENCE
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable
from meha.tensors.vectors import join, vector_norm

LENGTHS = (1.0, 10.0, 100.0)
"""Multiples of the step of a difference, tried in turn until it exceeds rounding."""

SEEN = 30.0
"""A difference counts if it exceeds this multiple of the rounding error of the gradients."""

Curvatures = dict[str, float]
"""Norms of second derivatives by name: F_xx, F_yy, F_xy, f_yy, and f_xy, in which f stands for f + g."""

Value = tuple[Tensor, Tensor, Tensor]
"""A value with its gradients in x and y, as vectors."""


def describe(curvatures: Curvatures) -> str:
    """Summarise the curvatures for a report.

    >>> describe({"F_xx": 0.0, "F_yy": 2.0, "F_xy": 0.0, "f_yy": 0.99, "f_xy": 3.1})
    'curvature in y: F 2, f 0.99; coupling 3.1'
    >>> describe({"F_xx": 0.0, "F_yy": 0.0, "F_xy": 0.0, "f_yy": 0.99, "f_xy": 0.0})
    'curvature in y: f 0.99; F linear in y; no coupling at the start'
    """
    in_y = {"F": curvatures["F_yy"], "f": curvatures["f_yy"]}
    curved = ", ".join(f"{name} {value:.2g}" for name, value in in_y.items() if value)
    parts = [f"curvature in y: {curved}"] if curved else []
    parts += [f"{name} linear in y" for name, value in in_y.items() if not value]
    parts.append(f"coupling {curvatures['f_xy']:.2g}" if curvatures["f_xy"] else "no coupling at the start")
    return "; ".join(parts)


def balance(F_xx: float, F_yy: float, L: float, L_xy: float) -> float:
    """The penalty c at which F and c times the lower level are curved alike, in y or in x, whichever is smaller.

    Args:
        L: the curvature of the lower level in y.
        L_xy: its coupling of x and y; with y at its minimum, the lower level has the curvature L_xy^2 / L in x.

    Infinite if F or the lower level is linear in both.

    >>> balance(F_xx=1.0, F_yy=2.0, L=4.0, L_xy=2.0), balance(F_xx=0.0, F_yy=0.0, L=4.0, L_xy=2.0)
    (0.5, inf)
    """
    in_y = F_yy / L if L else 0.0  # F and c f are curved alike in y at c = F_yy / L
    in_x = F_xx * L / L_xy**2 if L_xy else 0.0
    return min(in_y or math.inf, in_x or math.inf)  # 0 means that there is nothing to balance


def flatten(*variables: Variable) -> Tensor:
    """The numbers of variables as one new vector."""
    return torch.cat([leaf.detach().reshape(-1) for variable in variables for leaf in variable.leaves])


def write(vector: Tensor, *variables: Variable) -> None:
    """Put the numbers of a vector into variables, in place."""
    leaves = [leaf.detach() for variable in variables for leaf in variable.leaves]
    if len(leaves) == 1:  # the usual case, without a split
        leaves[0].copy_(vector.view(leaves[0].shape))
        return
    for leaf, part in zip(leaves, vector.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.copy_(part.view(leaf.shape))


def upper_gradients(oracle: Oracle, x: Variable, y: Variable, *, strict: bool = False) -> Value:
    """F, F_x and F_y, at the cost of one gradient."""
    (value,), gradients = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], strict=strict)
    return value, join(gradients[0]), join(gradients[1])


def lower_gradients(oracle: Oracle, x: Variable, y: Variable) -> Value:
    """f + g, its gradient in x, and that of f alone in y (g is left to its prox), at the cost of one gradient."""
    (value,), gradients = oracle.gradients((x, y), [(1.0, oracle.lower, x, y)], strict=False)
    in_x = join(gradients[0])
    if oracle.phi is not oracle.lower:
        value, in_x = value + oracle.g(x, y), in_x + join(oracle.g_gradient(x, y))
    return value, in_x, join(gradients[1])


def probe(oracle: Oracle, x: Variable, y: Variable, vectors: dict[str, Tensor], rounds: int) -> Curvatures:
    """Lower bounds on the norms of second derivatives at (x, y), by ``rounds`` steps of the power method each.

    Products with a vector are differences of gradients between (x, y) and a point nearby in X, Y and the domain of g. They cost
    3 gradients of f and 2 of F a round (up to 3 times as many for linear functions), and one of each for the point itself.

    Args:
        vectors: the start of the power steps, random if empty; overwritten by their end, so that the next call goes on there.

    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (3 * y.square() - x * y).sum())
    >>> x, y = Variable(torch.ones(2, dtype=torch.float64), "x"), Variable(torch.ones(2, dtype=torch.float64), "y")
    >>> print({name: round(value, 3) for name, value in probe(Oracle(problem, x, y), x, y, {}, rounds=2).items()})
    {'F_xx': 2.0, 'F_yy': 2.0, 'F_xy': 2.0, 'f_yy': 6.0, 'f_xy': 1.0}
    """
    here = _Here(oracle, x, y)
    if not vectors:
        generator = torch.Generator().manual_seed(0)
        for name, like in (("F_xx", here.x), ("F_yy", here.y), ("f_yy", here.y), ("f_xy", here.x)):
            vectors[name] = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)
    norms = dict.fromkeys(("F_xx", "F_yy", "F_xy", "f_yy", "f_xy"), 0.0)

    def note(name: str, image: Tensor, start: str = "") -> bool:
        """Record the norm of the image of a unit vector, and make it the next start; False if it is zero or not finite."""
        size = vector_norm(image)
        if not 0 < size < math.inf:
            return False
        norms[name] = max(norms[name], size)  # any image is a lower bound of the norm
        if start:
            vectors[start] = image / size
        return True

    for _ in range(rounds):
        in_x, in_y = here.product(upper_gradients, x, vectors["F_xx"])
        note("F_xx", in_x, "F_xx")
        note("F_xy", in_y)
        in_x, in_y = here.product(upper_gradients, y, vectors["F_yy"])
        note("F_yy", in_y, "F_yy")
        note("F_xy", in_x)
        in_x, in_y = here.product(lower_gradients, y, vectors["f_yy"])
        note("f_yy", in_y, "f_yy")
        note("f_xy", in_x)
        _, in_y = here.product(lower_gradients, x, vectors["f_xy"])
        if note("f_xy", in_y):  # the power method on f_yx f_xy: from x to y and back
            in_x, _ = here.product(lower_gradients, y, in_y)
            note("f_xy", in_x, "f_xy")
    return norms


class _Here:
    """A point with its gradients, from which difference quotients are taken."""

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle, self.first, self.second = oracle, x, y
        self.x, self.y = flatten(x), flatten(y)
        self.gradients = {function: function(oracle, x, y) for function in (upper_gradients, lower_gradients)}

    def product(self, gradients: Callable[..., Value], along: Variable, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of both gradients along ``vector``, whose length does not matter.

        A difference within rounding may come from a linear function or from a large gradient; a longer step tells which.
        """
        start = self.x if along is self.first else self.y
        accuracy, scale = torch.finfo(start.dtype).eps, float(start.norm()) or 1.0
        zero = torch.zeros_like(self.x), torch.zeros_like(self.y)
        for longer in LENGTHS:
            moved = self._go(along, start, vector / vector.norm(), longer * accuracy**DIFFERENCE * scale)
            new, old = gradients(self.oracle, self.first, self.second), self.gradients[gradients]
            write(start, along)
            pairs = [(a - b, float(a.norm() + b.norm())) for a, b in zip(new[1:], old[1:], strict=True)]
            seen = [moved > 0 and float(difference.norm()) > SEEN * accuracy * size for difference, size in pairs]
            if any(seen):  # the other one is then zero, up to rounding
                break
        in_x, in_y = (pairs[i][0] / moved if seen[i] else zero[i] for i in range(2))
        return in_x, in_y

    def _go(self, variable: Variable, start: Tensor, direction: Tensor, h: float) -> float:
        """Move by h along a unit vector, or against it where that leaves the set; returns the distance moved."""
        moved = 0.0
        # A corner of the set may block one side only.
        for step in (h, -h):
            write(start + step * direction, variable)
            self._enter(variable)
            moved = float((flatten(variable) - start).norm())
            if moved > 0.5 * h:
                break
        return moved

    def _enter(self, variable: Variable) -> None:
        """Project a variable on its set; for y by its prox, with a step too short for g to move it."""
        if variable is self.first:
            self.oracle.project(self.first.value, variable.leaves, 1.0)
        else:
            self.oracle.prox(self.first.value, variable.leaves, torch.finfo(variable.leaves[0].dtype).tiny)
