"""Both levels at several points in one call: on a small problem, twenty points take little more time than one."""

from __future__ import annotations

import time
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap

from meha.lower.flat_problem import LowerPoint
from meha.lower.newton_on_faces import NewtonLower, semidefinite
from meha.lower.newton_tuning import TUNING
from meha.lower.quadratic_model import matches_quadratic
from meha.numerics.line_search import DECREASE, SHORTER
from meha.numerics.tolerances import DIFFERENCE, LOOSE, ROUNDING, STEPS
from meha.problem.oracle import BudgetError
from meha.tensors.gradients import PlainAttention
from meha.tensors.state import Saved
from meha.tensors.torch_private import BREAKDOWNS, backward, pull_back
from meha.tensors.variables import Variable


class Ends(NamedTuple):
    """Where Newton steps from several points ended.

    Attributes:
        y: the ends, one in each row.
        fallen: the decrease of f.
        solved: whether each end is a local minimum.
        convex: whether f has no negative curvature at the start.
    """

    y: Tensor
    fallen: Tensor
    solved: Tensor
    convex: Tensor


class Batch(Saved):
    """f, F and Newton steps at several (x, y) at once, one in each row.

    It needs a problem without g and Y, with few unknowns and little data: there, the overhead of calls dominates. The methods
    return None elsewhere, which includes objectives that torch cannot map over a batch, such as those with random numbers or
    with branches that depend on values.

    Args:
        lower: the solver of the lower level, whose counts and clock are used.

    Attributes:
        known: whether batches are possible; None before the first test.
    """

    saves = ("known",)

    def __init__(self, lower: NewtonLower) -> None:
        self._lower = lower
        self.known: bool | None = None

    def possible(self, x: Tensor, y: Tensor) -> bool:
        """Whether several points may be evaluated at once; tested once, at the given point."""
        if self.known is None:
            lower = self._lower
            self.known = lower.faces.smooth and lower.oracle.group is None and len(y) <= TUNING.batched
            if self.known:
                elements = _Elements()  # the size of the graph tells how much data f touches
                with saved_tensors_hooks(elements, lambda tensor: tensor):
                    lower.expand(lower.flat_x.at(x), y)
                self.known = elements.count * len(y) <= TUNING.batched_elements
        return self.known

    def upper(self, x: Tensor, y: Tensor) -> Tensor | None:
        """F at all points."""
        oracle, begin = self._lower.oracle, time.perf_counter()
        try:
            with torch.no_grad(), PlainAttention():  # torch maps fused kernels one by one
                F: Tensor = vmap(lambda a, b: oracle.upper(*self._variables(a, b)))(x, y)
        except (*BREAKDOWNS, RuntimeError):  # torch cannot map every objective over a batch
            return None
        oracle.counts.upper += len(x)
        self._lower.clock.functions += time.perf_counter() - begin
        return F

    def solve(self, x: Tensor, y: Tensor, tol: Tensor, bottom: LowerPoint, reach: Tensor, looks: Tensor) -> Ends | None:
        """Minimise f over y from all points by Newton steps with absolute eigenvalues and backtracking.

        Args:
            x, y: the points.
            tol: the accuracy of y in each row, relative to y; infinity to evaluate the start alone.
            bottom: a solution at one x; a row ends there once it is within its ``reach`` and f between them looks convex
                quadratic.
            looks: the rows at whose starts negative curvature ends the whole batch.
        """
        if not self.possible(x[0], y[0]):
            return None
        try:
            return self._solve(x, y, tol, bottom, reach, looks)
        except BudgetError:
            raise
        except (*BREAKDOWNS, RuntimeError):
            self.known = False
            return None

    def _solve(self, x: Tensor, y: Tensor, tol: Tensor, bottom: LowerPoint, reach: Tensor, looks: Tensor) -> Ends:
        eps = self._lower.eps
        first, gradients, hessians = self._expand(x, y)
        convex = semidefinite(hessians, eps)
        if not bool(convex[looks].all()):  # the caller needs a convex lower level, so the descents would be in vain
            return Ends(y, torch.zeros_like(first), torch.zeros_like(convex), convex)
        values, lengths, (steps, strict) = first, torch.ones_like(first), _newton(gradients, hessians)
        goals = tol * torch.linalg.vector_norm(y, dim=1).clamp(min=self._lower.largest)
        for _ in range(STEPS):
            near = torch.linalg.vector_norm(y - bottom.z, dim=1) <= reach
            noise = bottom.noise + ROUNDING * eps * values.abs()
            joined = near & matches_quadratic(y, values, gradients, bottom, noise)
            done = joined | (torch.linalg.vector_norm(steps, dim=1) <= goals)
            if bool((done | ~torch.isfinite(values)).all()):
                break
            trial = torch.where(done[:, None], y, y + lengths[:, None] * steps)  # rows that are done stay in the batch
            new, new_gradients, new_hessians = self._expand(x, trial)
            slopes = (gradients * steps).sum(1)
            noise = eps**LOOSE * values.abs()
            # Armijo's rule, up to the rounding of the values.
            better = ~done & (new <= values + torch.minimum(DECREASE * lengths * slopes + noise, noise))
            rows = better[:, None]
            y, values = torch.where(rows, trial, y), torch.where(better, new, values)
            gradients = torch.where(rows, new_gradients, gradients)
            hessians = torch.where(rows[:, :, None], new_hessians, hessians)
            lengths = torch.where(better, 1.0, SHORTER * lengths)
            steps, strict = _newton(gradients, hessians)
        solved = joined | (done & strict & torch.isfinite(values))
        # The last Newton step is shorter than the tolerance: it is taken without an evaluation.
        y = torch.where(joined[:, None], bottom.z, torch.where((solved & torch.isfinite(tol))[:, None], y + steps, y))
        return Ends(y, first - torch.where(joined, bottom.smooth, values), solved, convex)

    def _expand(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f, its gradients, and its Hessians in y."""
        lower, begin = self._lower, time.perf_counter()
        counts, n = lower.oracle.counts, y.shape[1]
        if counts.lower + counts.hvp + len(y) > lower.limit:
            raise BudgetError
        with torch.enable_grad(), PlainAttention():
            at = y.detach().requires_grad_()
            values = vmap(lambda a, b: lower.oracle.lower(*self._variables(a, b)))(x, at)
            (gradients,) = backward(values.sum(), (at,), graph=True)  # rows are independent: one pass for all gradients
        assert gradients is not None
        counts.lower += len(y)
        known = lower.hessians
        if not gradients.requires_grad:  # f is linear in y
            hessians = torch.zeros(len(y), n, n, dtype=y.dtype, device=y.device)
        elif known.constant and known.matrix is not None and self._same(gradients, at, known.matrix):
            hessians = known.matrix.expand(len(y), n, n)
        else:
            units = torch.eye(n, dtype=y.dtype, device=y.device)[:, None].expand(n, len(y), n)
            rows: Tensor = vmap(lambda unit: cast("Tensor", pull_back((gradients,), (unit,), (at,))[0]))(units)
            hessians = rows.transpose(0, 1)
            counts.hvp += len(y) * n
        lower.clock.functions += time.perf_counter() - begin
        return values.detach(), gradients.detach(), hessians

    def _same(self, gradients: Tensor, y: Tensor, matrix: Tensor) -> bool:
        """Whether one product for each row shows that all Hessians equal a symmetric matrix."""
        known = self._lower.hessians
        probe = known.probe(matrix)
        (products,) = pull_back((gradients,), (probe.expand_as(y),), (y,))
        self._lower.oracle.counts.hvp += len(y)
        return products is not None and known.agrees(matrix, products, probe)

    def _variables(self, x: Tensor, y: Tensor) -> tuple[Variable, Variable]:
        flat_x, flat_y = self._lower.flat_x, self._lower.flat_y
        return flat_x.variable.moved(flat_x.split(x)), flat_y.variable.moved(flat_y.split(y))


class _Elements:
    """A hook that counts the numbers which an autograd graph saves for its derivatives."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.count += tensor.numel()
        return tensor


def _newton(gradients: Tensor, hessians: Tensor) -> tuple[Tensor, Tensor]:
    """Newton steps, with absolute eigenvalues where a Hessian is not positive definite, and whether each Hessian is."""
    factors, info = torch.linalg.cholesky_ex(hessians)
    convex = info == 0
    if bool(convex.all()):
        return -torch.cholesky_solve(gradients[:, :, None], factors)[:, :, 0], convex
    values, vectors = torch.linalg.eigh(torch.where(torch.isfinite(hessians), hessians, 0.0))  # it raises at NaN, for all rows
    # As in Factor.solve: a lower bound on |H|, and no division by zero where H = 0.
    sizes, real = values.abs(), torch.finfo(values.dtype)
    sizes = sizes.clamp(min=real.eps**DIFFERENCE * sizes.amax(1, keepdim=True)).clamp(min=real.tiny)
    parts = (vectors.transpose(1, 2) @ gradients[:, :, None])[:, :, 0] / sizes
    return -(vectors @ parts[:, :, None])[:, :, 0], convex
