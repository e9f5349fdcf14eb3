"""Both levels of a problem as functions of flat vectors, at one x at a time, for quasi-Newton steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods._curvatures import Curvatures, flatten, upper_gradients, write
from meha.methods.continuation.quasi_newton import Point
from meha.problem import Prox

__all__ = ["Levels", "size"]


def size(z: Tensor) -> float:
    """The Euclidean norm."""
    return float(torch.linalg.vector_norm(z))


class Levels:
    """F, f, g, X and Y of a problem on vectors.

    Args:
        oracle: takes the gradients, and counts them.
        x, y, theta: variables to write to; afterwards they hold the last point that was looked at.
        curvatures: of F and f, which say how far a value can be trusted.

    Attributes:
        eps: the rounding error of a number.
        composite: whether g is more than the indicator of Y.
        constrained: whether X is not the whole space.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, theta: Variable, curvatures: Curvatures) -> None:
        self.oracle, self.x, self.y, self.theta, self.curvatures = oracle, x, y, theta, curvatures
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in x.leaves + y.leaves)
        self.composite = oracle.phi is not oracle.lower
        self.constrained = not oracle.project.identity
        self.bounded = not oracle.prox.identity

    def project(self, x: Tensor, step: float = 1.0) -> Tensor:
        """The projection on X, with the signature of a proximal map."""
        return self._map(self.oracle.project, x, step, self.x)

    def prox(self, y: Tensor, step: float) -> Tensor:
        """The proximal map of g(x, .) + indicator of Y."""
        return self._map(self.oracle.prox, y, step, self.y)

    def _map(self, prox: Prox, z: Tensor, step: float, like: Variable) -> Tensor:
        parts = z.clone().split([leaf.numel() for leaf in like.leaves])
        leaves = [part.view(leaf.shape) for part, leaf in zip(parts, like.leaves, strict=True)]
        prox(self.x.value, leaves, step)
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def upper(self, y: Tensor) -> tuple[float, Tensor, Tensor]:
        """F(x, y) with its gradients in x and y."""
        write(y, self.y)
        value, in_x, in_y = upper_gradients(self.oracle, self.x, self.y, strict=True)
        return float(value), in_x, in_y

    def lower(self, z: Tensor, at: Variable | None = None) -> Point:
        """f as a function of theta at x; ``extra`` is its gradient in x."""
        at = self.theta if at is None else at
        write(z, at)
        oracle, x = self.oracle, self.x
        strict = not self.composite  # otherwise x may act through g alone
        (value,), (in_x, in_y) = oracle.gradients((x, at), [(1.0, oracle.lower, x, at)], strict=strict)
        g = float(oracle.g(x, at)) if self.composite else 0.0
        gradient = torch.cat([part.reshape(-1) for part in in_y])
        noise = self._rounding(abs(float(value)) + abs(g), self.curvatures["f_yy"], z)
        return Point(z, float(value), gradient, g, noise, extra=torch.cat([part.reshape(-1) for part in in_x]))

    def both(self, y: Tensor, weight: float) -> Point:
        """weight F + f as a function of y at x; ``extra`` has F, f and their gradients in x."""
        F, F_x, F_y = self.upper(y)
        f = self.lower(y, self.y)
        curvature = weight * self.curvatures["F_yy"] + self.curvatures["f_yy"]
        noise = self._rounding(weight * abs(F) + abs(f.smooth) + abs(f.nonsmooth), curvature, y)
        value, gradient = weight * F + f.smooth, weight * F_y + f.gradient
        return Point(y, value, gradient, f.nonsmooth, noise, upper=F_y, extra=(F, F_x, f.smooth, f.extra))

    def _rounding(self, value: float, curvature: float, z: Tensor) -> float:
        """The error of a value whose summands may be as large as the curvature makes them."""
        noise = self.eps * (5 * value + curvature * float(z @ z))
        return noise if math.isfinite(noise) else 0.0

    def pull(self, y: Point, theta: Point) -> Tensor:
        """The gradient in x of (f + g)(x, y) - (f + g)(x, theta)."""
        difference = y.extra[3] - theta.extra
        return difference + (self._g_x(self.y, y.z) - self._g_x(self.theta, theta.z)) if self.composite else difference

    def _g_x(self, at: Variable, z: Tensor) -> Tensor:
        write(z, at)
        return torch.cat([part.reshape(-1) for part in self.oracle.g_gradient(self.x, at)])

    def move(self, x: Tensor, y: Tensor | None = None, theta: Tensor | None = None) -> None:
        """Put vectors into the variables."""
        write(x, self.x)
        if y is not None:
            write(y, self.y)
        if theta is not None:
            write(theta, self.theta)

    def now(self) -> tuple[Tensor, Tensor]:
        """x and y as vectors."""
        return flatten(self.x), flatten(self.y)
