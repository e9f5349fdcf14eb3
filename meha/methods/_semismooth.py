"""A convex quadratic function plus g, minimised by proximal point steps whose duals are solved by semismooth Newton steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meha._lower import LowerSolution
from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods.vfidca.quadratic import Quadratic, as_vector, read_quadratic
from meha.nonsmooth import GroupL2, SparseGroup

__all__ = ["Minimum", "QuadraticLower", "minimise"]

Map = Callable[[Tensor, float], Tensor]

FIRST_LENGTH, LENGTHENING = 30.0, 5.0
"""The first proximal point step, in units of the inverse of the largest curvature, and how much longer each next one is."""

LONGEST = 1e8
"""Longest proximal point step, in the same units."""

NEWTON_STEPS = 50
"""Newton steps for one proximal point step, at most."""

HALVINGS, DECREASE = 20, 1e-4
"""Times that a Newton step is halved, and the share of the decrease that its slope promises which it must reach."""

INEXACT = 0.1
"""Error of a proximal point step, relative to its length."""

DIFFERENCE = 1e-7
"""Relative change of a block for the derivative of the proximal map along it."""

ROUNDING = 16.0
"""Multiple of the rounding error below which a residual is taken for zero."""


@dataclass(frozen=True)
class Minimum:
    """A point y, the norm of the prox-gradient mapping there, the Newton steps taken, and whether it is small enough."""

    y: Tensor
    residual: float
    steps: int
    converged: bool


def minimise(
    q: Quadratic, g: Callable[[Tensor], float], prox: Map, blocks: Tensor, y: Tensor, *, tol: float, max_steps: int
) -> Minimum:
    """Minimise q(y) + g(y) from y, with the proximal map ``prox(z, step)`` of g.

    With R the factor of q, t its target and l its linear part, a proximal point step of length s is

        y <- prox(y - s (R'u + l), s),  where  u = R prox(y - s (R'u + l), s) - t,

    an equation in as many numbers as R has rows. Its left side minus its right is the gradient of a convex function of u with
    the generalised Hessian I + s R P R', where P is the derivative of the proximal map: g is a sum of functions of the norms
    of blocks of y, so P has one number along each block, and one across it.

    Args:
        blocks: the block of each coordinate, counted from 0.
        tol: of the prox-gradient mapping, relative to the curvature of q along y times the size of y.
        max_steps: Newton steps in all, at most.

    >>> soft = lambda z, step: z.sign() * (z.abs() - step).clamp(min=0)
    >>> q = Quadratic(torch.eye(2, dtype=torch.float64), torch.tensor([3.0, 0.5]).double(), torch.zeros(2).double())
    >>> y = torch.zeros(2, dtype=torch.float64)
    >>> found = minimise(q, lambda y: float(y.abs().sum()), soft, torch.arange(2), y, tol=1e-9, max_steps=100)
    >>> [round(number, 6) for number in found.y.tolist()]
    [2.0, 0.0]
    """
    R, steps, eps = q.factor, 0, torch.finfo(y.dtype).eps
    largest = q.smoothness or 1.0
    length, u = FIRST_LENGTH / largest, q.factor @ y - q.target
    residual = math.inf
    while steps < max_steps:
        point = _Dual(q, g, prox, blocks, y, length)
        at = point(u)
        for _ in range(NEWTON_STEPS):
            move = float(torch.linalg.vector_norm(at.y - y))
            error = float(torch.linalg.vector_norm(at.slope))
            size = float(torch.linalg.vector_norm(at.u)) + float(torch.linalg.vector_norm(q.target))
            if error * math.sqrt(largest) * length <= INEXACT * move or error <= ROUNDING * eps * size or steps >= max_steps:
                break
            steps += 1
            nearer = _newton_step(point, at)
            if nearer is None:
                break
            at = nearer
        y, u = at.y, at.u
        residual = float(torch.linalg.vector_norm(y - prox(y - q.gradient(y) / largest, 1 / largest))) * largest
        size = float(torch.linalg.vector_norm(y))
        curvature = float((R @ y).square().sum()) / size**2 if size else 0.0
        if residual <= max(tol * curvature * size, ROUNDING * eps * largest * size):
            return Minimum(y, residual, steps, converged=True)
        if length >= LONGEST / largest:
            break
        length = min(LENGTHENING * length, LONGEST / largest)
    return Minimum(y, residual, steps, converged=False)


class QuadraticLower:
    """The lower level of a problem whose f is a convex quadratic function of y alone, and whose g is a :class:`GroupL2`.

    Attributes:
        parts: f as tensors: factor, target and linear part.
    """

    def __init__(self, oracle: Oracle, parts: list[Tensor]) -> None:
        self.oracle, self.parts = oracle, parts
        self._f = Quadratic(factor=parts[0], target=parts[1], linear=parts[2])
        g = oracle.problem.g
        assert isinstance(g, GroupL2)
        self._blocks = g.labels(len(parts[2]))

    @classmethod
    def read(cls, oracle: Oracle, x: Variable, y: Variable, reader: str) -> QuadraticLower:
        """Read f by products with its Hessian.

        Raises:
            ValueError: the lower level is another one.
        """
        problem = oracle.problem
        if not isinstance(problem.g, GroupL2) or isinstance(problem.g, SparseGroup) or problem.y_set is not None:
            raise ValueError(f"nonsmooth: {reader} needs GroupL2 and no y_set, got {problem.g!r} and {problem.y_set!r}.")
        if len(y.leaves) != 1:
            raise ValueError(f"y: {reader} needs one tensor, got {len(y.leaves)}: {', '.join(y.names)}.")
        with torch.no_grad():
            f = read_quadratic(oracle, oracle.lower, x, y, reader)
        return cls(oracle, [f.factor, f.target, f.linear])

    def solve(self, x: Variable, y: Variable, *, tol: float, max_steps: int) -> LowerSolution:
        """Minimise f + g at x, from y."""
        problem, (leaf,) = self.oracle.problem, y.leaves

        def prox(z: Tensor, step: float) -> Tensor:
            found = z.to(leaf).reshape(leaf.shape).clone()
            self.oracle.prox(x.value, [found], step)
            return found.reshape(-1).double().cpu()

        def g(z: Tensor) -> float:
            return float(problem.g.value_leaves(x.value, [z.to(leaf).reshape(leaf.shape)]))

        with torch.no_grad():
            found = minimise(self._f, g, prox, self._blocks, as_vector(y), tol=tol, max_steps=max_steps)
            theta = y.copy()
            theta.leaves[0].copy_(found.y.to(leaf).reshape(leaf.shape))
        return LowerSolution(theta, found.residual, found.steps, found.converged)


@dataclass(frozen=True)
class _At:
    """The function of u: its value, its slope, and the z and y that belong to u."""

    u: Tensor
    z: Tensor
    y: Tensor
    value: float
    slope: Tensor


class _Dual:
    """The convex function of u whose minimum gives a proximal point step from y."""

    def __init__(self, q: Quadratic, g: Callable[[Tensor], float], prox: Map, blocks: Tensor, y: Tensor, length: float) -> None:
        self.q, self.g, self.prox, self.blocks, self.y, self.length = q, g, prox, blocks, y, length

    def __call__(self, u: Tensor) -> _At:
        q, slope = self.q, self.q.factor.T @ u + self.q.linear
        z = self.y - self.length * slope
        new = self.prox(z, self.length)
        inside = float(slope @ new) + self.g(new) + float((new - self.y).square().sum()) / (2 * self.length)
        value = float(u @ u) / 2 + float(u @ q.target) - inside
        return _At(u, z, new, value, u + q.target - q.factor @ new)

    def hessian(self, at: _At) -> Tensor:
        """I + s R P R' at a point."""
        R, s, z = self.q.factor, self.length, at.z
        before, after, further = (self._norms(v) for v in (z, at.y, self.prox((1 + DIFFERENCE) * z, s)))
        size = before.clamp(min=torch.finfo(z.dtype).tiny)
        across, along = after / size, (further - after) / (DIFFERENCE * size)
        inward = R.new_zeros(len(R), len(size)).index_add_(1, self.blocks, R * (z / size[self.blocks]))
        product = (R * across[self.blocks]) @ R.T + (inward * (along - across)) @ inward.T
        return torch.eye(len(R), dtype=R.dtype, device=R.device) + s * product

    def _norms(self, vector: Tensor) -> Tensor:
        """The norms of the blocks."""
        return vector.new_zeros(int(self.blocks.max()) + 1).index_add_(0, self.blocks, vector.square()).sqrt()


def _newton_step(point: _Dual, at: _At) -> _At | None:
    """A Newton step that decreases the function enough; None if rounding hides the decrease."""
    lower, info = torch.linalg.cholesky_ex(point.hessian(at))
    direction = -at.slope if int(info) else -torch.cholesky_solve(at.slope[:, None], lower)[:, 0]
    promised = float(at.slope @ direction)
    share = 1.0
    for _ in range(HALVINGS):
        new = point(at.u + share * direction)
        if new.value <= at.value + DECREASE * share * promised:
            return new
        if float(torch.linalg.vector_norm(new.slope)) < float(torch.linalg.vector_norm(at.slope)) / 2:
            return new
        share /= 2
    return None
