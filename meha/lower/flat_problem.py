"""Both levels of a problem as functions of a flat vector y, at the x that is set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meha.lower.curvature import Curvatures, flatten, upper_gradients, write
from meha.numerics.limited_memory import EvaluatedPoint, LimitedMemory, PointT, QuasiNewtonDescent
from meha.problem.oracle import BudgetError, Oracle
from meha.problem.problem import Prox
from meha.tensors.variables import Variable
from meha.tensors.vectors import Clock

SUMMANDS = 5.0
"""Number of rounding errors that a value is assumed to have."""


@dataclass(eq=False, kw_only=True)
class LowerPoint(EvaluatedPoint):
    """f + g at theta, with the gradient of f in x."""

    f_x: Tensor


@dataclass(eq=False, kw_only=True)
class PenaltyPoint(LowerPoint):
    """weight F + f + g at y, with F, F_x and f; ``upper`` is F_y."""

    F: float
    F_x: Tensor
    f: float


class FlatProblem:
    """F, f, g, X and Y of a problem on vectors.

    Args:
        oracle: takes the gradients, and counts them.
        x, y: variables to write to; afterwards they hold the last point evaluated.

    Attributes:
        curvatures: those of F and f, from which the rounding errors of values are estimated.
        eps: the rounding error of a number.
        composite: whether g is more than the indicator of Y.
        constrained: whether X is not the whole space.
        bounded: whether there is a g or a Y.
        limit: gradients of f, counted from the start of the run, after which :class:`BudgetError` is raised; a product with
            its Hessian counts as one.
        clock: adds up the time of evaluations.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle, self.x, self.y = oracle, x, y
        self.curvatures: Curvatures = {"F_yy": 0.0, "f_yy": 0.0}
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in x.leaves + y.leaves)
        self.composite = oracle.phi is not oracle.lower  # the oracle has f + g = f where there is no g
        self.constrained = not oracle.project.identity
        self.bounded = not oracle.prox.identity
        self.limit = math.inf
        self.clock = Clock()

    @property
    def spent(self) -> int:
        """The number of gradients of f and products with its Hessian so far."""
        return self.oracle.counts.lower + self.oracle.counts.hvp

    @contextlib.contextmanager
    def until(self, limit: float) -> Iterator[None]:
        """Lower the budget of gradients of f to ``limit`` inside a block; it is never raised."""
        before, self.limit = self.limit, min(self.limit, limit)
        try:
            yield
        finally:
            self.limit = before

    def project(self, x: Tensor, step: float = 1.0) -> Tensor:
        """The projection on X, with the signature of a proximal map."""
        return self._map(self.oracle.project, x, step, self.x) if self.constrained else x

    def prox(self, y: Tensor, step: float) -> Tensor:
        """The proximal map of g(x, .) + indicator of Y."""
        return self._map(self.oracle.prox, y, step, self.y) if self.bounded else y

    def _map(self, prox: Prox, z: Tensor, step: float, like: Variable) -> Tensor:
        parts = z.clone().split([leaf.numel() for leaf in like.leaves])  # the map works in place, on views
        leaves = [part.view(leaf.shape) for part, leaf in zip(parts, like.leaves, strict=True)]
        prox(self.x.value, leaves, step)
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def upper(self, y: Tensor) -> tuple[float, Tensor, Tensor]:
        """F(x, y) with its gradients in x and y."""
        begin = time.perf_counter()
        write(y, self.y)  # the oracle evaluates at the variables
        value, in_x, in_y = upper_gradients(self.oracle, self.x, self.y, strict=True)
        F = float(value)
        self.clock.functions += time.perf_counter() - begin
        return F, in_x, in_y

    def lower(self, y: Tensor) -> LowerPoint:
        """f + g as a function of y."""
        if self.spent >= self.limit:
            raise BudgetError
        begin = time.perf_counter()
        write(y, self.y)
        oracle, x = self.oracle, self.x
        strict = not self.composite  # otherwise x may act through g alone
        (value,), (in_x, in_y) = oracle.gradients((x, self.y), [(1.0, oracle.lower, x, self.y)], strict=strict)
        f, g = float(value), float(oracle.g(x, self.y)) if self.composite else 0.0
        self.clock.functions += time.perf_counter() - begin
        noise = self._rounding(abs(f) + abs(g), self.curvatures["f_yy"], y)
        f_x, f_y = (torch.cat([part.reshape(-1) for part in leaves]) for leaves in (in_x, in_y))
        return LowerPoint(y, f, f_y, g, noise, f_x=f_x)

    def penalty(self, y: Tensor, weight: float) -> PenaltyPoint:
        """weight F + f + g as a function of y."""
        F, F_x, F_y = self.upper(y)
        at = self.lower(y)
        f, g = at.smooth, at.nonsmooth
        curvature = weight * self.curvatures["F_yy"] + self.curvatures["f_yy"]
        noise = self._rounding(weight * abs(F) + abs(f) + abs(g), curvature, y)
        gradient = weight * F_y + at.gradient
        return PenaltyPoint(y, weight * F + f, gradient, g, noise, upper=F_y, f_x=at.f_x, F=F, F_x=F_x, f=f)

    def _rounding(self, value: float, curvature: float, z: Tensor) -> float:
        """Estimate the rounding error of a value, whose summands may be as large as curvature * ||z||^2 and cancel."""
        noise = self.eps * (SUMMANDS * value + curvature * float(z @ z))
        return noise if math.isfinite(noise) else 0.0  # an infinite tolerance would accept any point

    def descent(self, evaluate: Callable[[Tensor], PointT], pairs: LimitedMemory, t: float) -> QuasiNewtonDescent[PointT]:
        """A quasi-Newton descent of ``evaluate`` in y, with the proximal map of g and Y."""
        return QuasiNewtonDescent(evaluate, pairs, self.prox if self.bounded else None, self.composite, t, clock=self.clock)

    def pull(self, y: LowerPoint, theta: LowerPoint) -> Tensor:
        """The gradient in x of (f + g)(x, y) - (f + g)(x, theta)."""
        difference = y.f_x - theta.f_x
        return difference + (self._g_x(y.z) - self._g_x(theta.z)) if self.composite else difference

    def _g_x(self, y: Tensor) -> Tensor:
        write(y, self.y)
        return torch.cat([part.reshape(-1) for part in self.oracle.g_gradient(self.x, self.y)])

    def inside(self, y: Tensor) -> Tensor:
        """Project y on Y and the domain of g, by a proximal map with a vanishing step."""
        return self.prox(y, torch.finfo(y.dtype).tiny)

    def y_bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of y in each coordinate; infinite where Y is not a box."""
        domain = self.oracle.problem.y_set
        return self._bounds(self.inside, self.y, domain is not None and domain.coordinatewise)

    def x_bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of x in each coordinate; infinite where X is not a box."""
        domain = self.oracle.problem.x_set
        return self._bounds(self.project, self.x, domain is not None and domain.coordinatewise)

    @staticmethod
    def _bounds(project: Callable[[Tensor], Tensor], like: Variable, coordinatewise: bool) -> tuple[Tensor, Tensor]:
        far = flatten(like)
        far = torch.full_like(far, torch.finfo(far.dtype).max)  # its projection on a box shows the bounds
        low, high = (project(-far), project(far)) if coordinatewise else (-far, far)
        return (torch.where(low > -far, low, -math.inf), torch.where(high < far, high, math.inf))

    def move(self, x: Tensor, y: Tensor | None = None) -> None:
        """Write flat vectors into the variables."""
        write(x, self.x)
        if y is not None:
            write(y, self.y)
