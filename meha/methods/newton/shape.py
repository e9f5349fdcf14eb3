"""Shape: what the lower level looks like around a solution, which a search of other valleys asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meha._second_order import Expansion
from meha.methods._bowls import Quadratic
from meha.methods.newton.faces import Face
from meha.methods.newton.lower import LowerLevel, Response
from meha.methods.newton.systems import factorise, semidefinite
from meha.methods.newton.tuning import TUNING

__all__ = ["Shape"]


class Shape:
    """Curvatures of the lower level at a solution.

    Args:
        lower: the lower level.
    """

    def __init__(self, lower: LowerLevel) -> None:
        self._lower = lower

    def curvatures(self, at: Expansion) -> dict[str, float]:
        """Norms of second derivatives of f at a point, from below."""
        probe = torch.arange(len(at.y), dtype=at.y.dtype, device=at.y.device).cos()
        coupling = float(torch.linalg.vector_norm(at.cross(probe)) / torch.linalg.vector_norm(probe))
        return {"f_yy": 1 / (self._lower.step or self._lower.first_step(at)), "f_xy": coupling}

    def inverse(self, at: Expansion) -> Callable[[Tensor], Tensor] | None:
        """The inverse of the Hessian at a point, times columns; None where it is not known, or only on a face."""
        lower, factor = self._lower, self._lower.factor
        if factor is None or factor.lower is None or not lower.faces.smooth or not lower.exact(at, factor.face):
            return None
        triangle = factor.lower
        return lambda columns: torch.cholesky_solve(columns, triangle)

    def model(self, at: Expansion) -> Quadratic | None:
        """f as a quadratic function of y, which it need not be; None if it is not convex, or if this is not known."""
        lower = self._lower
        if lower.hessians.quadratic is False or lower.oracle.problem.g.rho:
            return None
        if lower.factor is None:  # conjugate gradients saw no other curvature
            return Quadratic(lambda v: at.product(v, g=False)) if lower.faces.smooth else None
        hessian = lower.hessians.matrix
        if hessian is None or not lower.hessians.known_at(at.x):
            return None
        return Quadratic(lambda v: hessian @ v) if bool(semidefinite(hessian, lower.eps)) else None

    def determines(self, response: Response, weak: Tensor) -> bool | None:
        """Whether f + g is strictly convex on the face of y, and f on the face with the ``weak`` coordinates.

        Then y is the only solution nearby. Without a factor, which large faces do not have, it is not known: None.
        """
        factor = self._lower.factor
        if factor is None or not bool(weak.any()):
            return None if factor is None else factor.definite
        wide = weak.clone()
        wide[response.face.index] = True
        index = wide.nonzero().reshape(-1)
        if len(index) > TUNING.dense:
            return None
        return factorise(self._lower.hessian(response.at, index), Face(index), self._lower.clock).definite
