"""Lower levels with a convex quadratic f and a group lasso: f is read from products, f + g minimised by Newton steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meha.lower.proximal_gradient import ProximalSolution
from meha.problem.nonsmooth import GroupL2, SparseGroup
from meha.problem.nonsmooth.coupled import read_groups
from meha.problem.oracle import Function, Oracle
from meha.tensors.variables import Variable, norm

BLOCK = 64
"""Hessian-vector products between two tests of whether they span the range of the Hessian."""

PROBES = 3
"""Random points at which a function is compared with the quadratic that it should be."""


@dataclass(frozen=True)
class QuadraticForm:
    """q(y) = ||factor y - target||^2 / 2 + <linear, y> + constant; linear is zero where a target can express all of q.

    >>> q = QuadraticForm(torch.tensor([[2.0, 0.0]]), torch.tensor([1.0]), torch.tensor([0.0, 1.0]), 3.0)
    >>> y = torch.tensor([1.0, 2.0])
    >>> q(y), q.gradient(y), q.difference(y, torch.zeros(2))
    (5.5, tensor([2., 1.]), 2.0)
    """

    factor: Tensor
    target: Tensor
    linear: Tensor
    constant: float = 0.0

    def __call__(self, y: Tensor) -> float:
        return float((self.factor @ y - self.target).square().sum() / 2 + self.linear @ y) + self.constant

    def gradient(self, y: Tensor) -> Tensor:
        """q'(y)."""
        return self.factor.T @ (self.factor @ y - self.target) + self.linear

    def difference(self, y: Tensor, z: Tensor) -> float:
        """q(y) - q(z), computed without cancellation."""
        d = y - z
        return float((self.factor @ d).square().sum() / 2 + self.gradient(z) @ d)

    @cached_property
    def smoothness(self) -> float:
        """The largest eigenvalue of the Hessian."""
        return float(torch.linalg.matrix_norm(self.factor, 2)) ** 2 if len(self.factor) else 0.0


def read_quadratic(oracle: Oracle, function: Function, x: Variable, y: Variable, reader: str = "VFiDCA") -> QuadraticForm:
    """Read F or f as a quadratic function of y; raise, in the name of ``reader``, unless it is one, convex, and without x."""
    needed = f"{function.level}: {reader} needs a convex quadratic function of y alone"
    leaf, at, generator = y.leaves[0], as_vector(y), torch.Generator().manual_seed(0)
    _, (gradient,) = oracle.gradient(y, [(1.0, function, x, y)])
    slope, products = gradient.reshape(-1).double().cpu(), oracle.hessian([(1.0, function, x, y)])
    accuracy = torch.finfo(leaf.dtype).eps ** 0.5  # of eigenvalues: products have rounding errors

    def apply(vector: Tensor) -> Tensor:
        return products([vector.to(leaf).reshape(leaf.shape)], y)[0][0].reshape(-1).double().cpu()

    values, vectors = _eigen(apply, len(at), accuracy, generator)
    largest = float(values.abs().max())
    if float(values.min()) < -accuracy * largest:
        raise ValueError(f"{needed}, and its Hessian has the eigenvalue {float(values.min()):.3g}; use MEHA.")
    kept = values > torch.finfo(leaf.dtype).eps * len(at) * largest  # others are zero up to rounding
    factor = (values[kept].sqrt() * vectors[:, kept]).T.contiguous()
    target = factor @ at - (factor @ slope) / values[kept]  # so that factor.T (factor y - target) is the gradient
    linear = slope - factor.T @ (factor @ at - target)  # the part of the gradient outside of the range of the Hessian
    linear = torch.where(norm([linear]) <= accuracy * norm([slope]), 0.0, linear)
    quadratic = QuadraticForm(factor, target, linear)
    quadratic = dataclasses.replace(quadratic, constant=float(function(x, y)) - quadratic(at))

    # The Hessian at one y says nothing of other y, nor of x: values at random points do.
    for _ in range(PROBES):
        other_x, other_y = x.copy(), y.copy()
        for variable in (other_x, other_y):
            for part in variable.leaves:
                part.add_((1 + float(part.abs().max())) * (2 * torch.rand(part.shape, generator=generator) - 1).to(part))
        oracle.project(other_x.value, other_x.leaves, 1.0)
        there = as_vector(other_y)
        expected, actual, moved = quadratic(there), float(function(x, other_y)), float(function(other_x, other_y))
        allowed = 10 * accuracy * (abs(expected) + abs(quadratic.constant) + float(slope.abs() @ there.abs()))
        if not abs(actual - expected) <= allowed:
            raise ValueError(f"{needed}, and it is not quadratic: {actual:.6g} instead of {expected:.6g} at some y; use MEHA.")
        if not abs(moved - actual) <= allowed:
            raise ValueError(f"{needed}, and its value changes with x; use MEHA.")
    return quadratic


def _eigen(apply: Callable[[Tensor], Tensor], size: int, accuracy: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, known by products with it; some or all of its zeros are left out.

    A randomised range finder (Halko, Martinsson and Tropp, 2011): products with random vectors span the range of the matrix as
    soon as there are as many of them as its rank.
    """

    def images(vectors: Tensor) -> Tensor:
        return torch.stack([apply(vector) for vector in vectors.T], dim=1)

    def random(count: int) -> Tensor:
        return torch.randn(size, count, generator=generator, dtype=torch.float64, device="cpu")

    basis = torch.zeros(size, 0, dtype=torch.float64)
    while basis.shape[1] < size:
        basis = torch.linalg.qr(torch.cat([basis, images(random(min(BLOCK, size - basis.shape[1])))], dim=1))[0]
        probe = images(random(1))  # a new image inside the span shows, almost surely, that the span is the range
        if norm([probe - basis @ (basis.T @ probe)]) <= 1e-3 * accuracy * norm([probe]):
            break
    inside = basis.T @ images(basis)
    values, vectors = torch.linalg.eigh((inside + inside.T) / 2)
    return values, basis @ vectors


def as_vector(y: Variable) -> Tensor:
    """y as a new vector in double precision on the host."""
    return y.leaves[0].detach().reshape(-1).double().cpu().clone()


Map = Callable[[Tensor, float], Tensor]

FIRST_LENGTH, LENGTHENING = 30.0, 5.0
"""The first proximal point step, in units of 1 / (largest curvature), and the factor from one step to the next."""

LONGEST = 1e8
"""Longest proximal point step, in the same units."""

NEWTON_STEPS = 50
"""Newton steps for one proximal point step, at most."""

HALVINGS, DECREASE = 20, 1e-4
"""Times that a Newton step is halved, and the share of the decrease promised by its slope that it must reach (Armijo)."""

INEXACT = 0.1
"""Error of a proximal point step, relative to its length."""

DIFFERENCE = 1e-7
"""Relative change of a block for the derivative of the proximal map along it."""

ROUNDING = 16.0
"""Multiple of the rounding error below which a residual is taken for zero."""


@dataclass(frozen=True)
class Minimum:
    """A point y, the norm of the prox-gradient mapping there, the Newton steps taken, and whether that norm is small enough."""

    y: Tensor
    residual: float
    steps: int
    converged: bool


def minimise(
    q: QuadraticForm, g: Callable[[Tensor], float], prox: Map, blocks: Tensor, y: Tensor, *, tol: float, max_steps: int
) -> Minimum:
    """Minimise q(y) + g(y) from y by a semismooth Newton proximal point method; ``prox(z, step)`` is the proximal map of g.

    Seen from the dual, it is the semismooth Newton augmented Lagrangian method of Li, Sun and Toh (2018).

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
    >>> q = QuadraticForm(torch.eye(2, dtype=torch.float64), torch.tensor([3.0, 0.5]).double(), torch.zeros(2).double())
    >>> y = torch.zeros(2, dtype=torch.float64)
    >>> found = minimise(q, lambda y: float(y.abs().sum()), soft, torch.arange(2), y, tol=1e-9, max_steps=100)
    >>> [round(number, 6) for number in found.y.tolist()]
    [2.0, 0.0]
    """
    R, steps, eps = q.factor, 0, torch.finfo(y.dtype).eps
    largest = q.smoothness or 1.0  # a constant q has curvature 0
    length, u = FIRST_LENGTH / largest, q.factor @ y - q.target
    residual = math.inf
    while steps < max_steps:
        point = _Dual(q, g, prox, blocks, y, length)
        at = point(u)
        for _ in range(NEWTON_STEPS):
            move = float(torch.linalg.vector_norm(at.y - y))
            error = float(torch.linalg.vector_norm(at.slope))
            size = float(torch.linalg.vector_norm(at.u)) + float(torch.linalg.vector_norm(q.target))
            # A step need only be accurate relative to its length, since the next one corrects what is left.
            if error * math.sqrt(largest) * length <= INEXACT * move or error <= ROUNDING * eps * size or steps >= max_steps:
                break
            steps += 1
            nearer = _newton_step(point, at)  # None: rounding hides any progress
            if nearer is None:
                break
            at = nearer
        y, u = at.y, at.u
        residual = float(torch.linalg.vector_norm(y - prox(y - q.gradient(y) / largest, 1 / largest))) * largest
        size = float(torch.linalg.vector_norm(y))
        curvature = float((R @ y).square().sum()) / size**2 if size else 0.0
        # Below the rounding error of the gradient, no residual can fall any further.
        if residual <= max(tol * curvature * size, ROUNDING * eps * largest * size):
            return Minimum(y, residual, steps, converged=True)
        if length >= LONGEST / largest:
            break
        length = min(LENGTHENING * length, LONGEST / largest)  # longer steps: faster outside, harder systems inside
    return Minimum(y, residual, steps, converged=False)


def blocks_of(term: GroupL2, size: int) -> Tensor:
    """The group of each of ``size`` coordinates; each coordinate in no group gets one of its own.

    >>> blocks_of(GroupL2([[0, 2], [3]]), 5)
    tensor([0, 2, 0, 1, 3])
    """
    named, count = read_groups(type(term).__name__, term.groups)
    labels = torch.cat([named, torch.full((size - len(named),), count)])
    alone = labels == count
    return torch.where(alone, count + alone.cumsum(0) - 1, labels)


class QuadraticLower:
    """The lower level of a problem whose f is a convex quadratic function of y alone, and whose g is a :class:`GroupL2`.

    Attributes:
        parts: f as tensors: factor, target and linear part.
    """

    def __init__(self, oracle: Oracle, parts: list[Tensor]) -> None:
        self.oracle, self.parts = oracle, parts
        self._f = QuadraticForm(factor=parts[0], target=parts[1], linear=parts[2])
        g = oracle.problem.g
        assert isinstance(g, GroupL2)
        self._blocks = blocks_of(g, len(parts[2]))

    @classmethod
    def read(cls, oracle: Oracle, x: Variable, y: Variable, reader: str) -> QuadraticLower:
        """Read f from products with its Hessian.

        Raises:
            ValueError: f is not a convex quadratic function of y alone, g is not GroupL2, or there is a y_set.
        """
        problem = oracle.problem
        if not isinstance(problem.g, GroupL2) or isinstance(problem.g, SparseGroup) or problem.y_set is not None:
            raise ValueError(f"nonsmooth: {reader} needs GroupL2 and no y_set, got {problem.g!r} and {problem.y_set!r}.")
        if len(y.leaves) != 1:
            raise ValueError(f"y: {reader} needs one tensor, got {len(y.leaves)}: {', '.join(y.names)}.")
        with torch.no_grad():
            f = read_quadratic(oracle, oracle.lower, x, y, reader)
        return cls(oracle, [f.factor, f.target, f.linear])

    def solve(self, x: Variable, y: Variable, *, tol: float, max_steps: int) -> ProximalSolution:
        """Minimise f + g at x, from y."""
        problem, (leaf,) = self.oracle.problem, y.leaves

        def prox(z: Tensor, step: float) -> Tensor:
            image = z.to(leaf).reshape(leaf.shape).clone()  # y may be single or on a GPU; this solver is neither
            self.oracle.prox(x.value, [image], step)
            return image.reshape(-1).double().cpu()

        def g(z: Tensor) -> float:
            return float(problem.g.value_leaves(x.value, [z.to(leaf).reshape(leaf.shape)]))

        with torch.no_grad():
            minimum = minimise(self._f, g, prox, self._blocks, as_vector(y), tol=tol, max_steps=max_steps)
            theta = y.copy()
            theta.leaves[0].copy_(minimum.y.to(leaf).reshape(leaf.shape))
        return ProximalSolution(theta, minimum.residual, minimum.steps, minimum.converged)


@dataclass(frozen=True)
class _At:
    """The dual function at u: its value and slope, and the z and y that belong to u."""

    u: Tensor
    z: Tensor
    y: Tensor
    value: float
    slope: Tensor


class _Dual:
    """The convex function of u (the dual of a proximal point step from y) whose minimum gives that step."""

    def __init__(
        self, q: QuadraticForm, g: Callable[[Tensor], float], prox: Map, blocks: Tensor, y: Tensor, length: float
    ) -> None:
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
        # A prox of norms scales each block: its derivative across the block is the ratio, along it a difference quotient.
        before, after, further = (self._norms(v) for v in (z, at.y, self.prox((1 + DIFFERENCE) * z, s)))
        size = before.clamp(min=torch.finfo(z.dtype).tiny)  # no 0 / 0 in a zero block
        across, along = after / size, (further - after) / (DIFFERENCE * size)
        inward = R.new_zeros(len(R), len(size)).index_add_(1, self.blocks, R * (z / size[self.blocks]))
        product = (R * across[self.blocks]) @ R.T + (inward * (along - across)) @ inward.T
        return torch.eye(len(R), dtype=R.dtype, device=R.device) + s * product

    def _norms(self, vector: Tensor) -> Tensor:
        """The Euclidean norm of each block of a vector."""
        return vector.new_zeros(int(self.blocks.max()) + 1).index_add_(0, self.blocks, vector.square()).sqrt()


def _newton_step(point: _Dual, at: _At) -> _At | None:
    """A Newton step with backtracking (Armijo); None if rounding hides the decrease."""
    lower, info = torch.linalg.cholesky_ex(point.hessian(at))
    direction = -at.slope if int(info) else -torch.cholesky_solve(at.slope[:, None], lower)[:, 0]
    promised = float(at.slope @ direction)
    share = 1.0
    for _ in range(HALVINGS):
        new = point(at.u + share * direction)
        if new.value <= at.value + DECREASE * share * promised:
            return new
        # Near the end values agree up to rounding, but the slope of a convex function still tells progress.
        if float(torch.linalg.vector_norm(new.slope)) < float(torch.linalg.vector_norm(at.slope)) / 2:
            return new
        share /= 2
    return None
