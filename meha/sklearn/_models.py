"""Fit penalised linear models for all folds and weights in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meha.problem.losses import LeastSquares, LinearModelLoss


@dataclass(frozen=True)
class Family:
    """A penalty by the shares of its parts: sum_j w_j (l1 |b_j| + l2 b_j^2 / 2) + sum_g w_g group sqrt(size_g) ||b_g||."""

    name: str
    l1: float = 0.0
    l2: float = 0.0
    group: float = 0.0

    @property
    def sparse(self) -> bool:
        """Return True if the penalty sets coefficients to exactly zero."""
        return self.l1 > 0 or self.group > 0


FAMILIES: Mapping[str, Callable[[float], Family]] = {
    "ridge": lambda ratio: Family("ridge", l2=1.0),
    "lasso": lambda ratio: Family("lasso", l1=1.0),
    "elastic-net": lambda ratio: Family("elastic net", l1=ratio, l2=1 - ratio),
    "group": lambda ratio: Family("group lasso", group=1.0),
    "sparse-group": lambda ratio: Family("sparse group lasso", l1=ratio, group=1 - ratio),
}
"""Families by the names of their penalties, as functions of l1_ratio."""


@dataclass(frozen=True, eq=False)
class Penalty:
    """The penalties of B models with P coefficients each."""

    l1: Tensor  # (B, P), the weight of each absolute value
    l2: Tensor  # (B, P), the weight of each square
    group: Tensor  # (B, groups), the weight of each group norm
    labels: Tensor  # (P,), the index of each coefficient's group; ``groups`` for coefficients in no group
    classes: Tensor  # (P,), the index of each coefficient's weight, from 0; -1 for coefficients without a penalty

    def __getitem__(self, rows: Tensor) -> Penalty:
        return Penalty(self.l1[rows], self.l2[rows], self.group[rows], self.labels, self.classes)

    @property
    def sparse(self) -> bool:
        """Return True if the penalty has kinks."""
        return self.grouped or bool(self.l1.any())

    @property
    def grouped(self) -> bool:
        """Return True if the penalty has group norms."""
        return self.group.shape[1] > 0

    def norms(self, b: Tensor) -> Tensor:
        return self._sums(b.square()).sqrt()

    def value(self, b: Tensor) -> Tensor:
        result = (self.l1 * b.abs() + 0.5 * self.l2 * b.square()).sum(1)
        return result + (self.group * self.norms(b)).sum(1) if self.grouped else result

    def free(self, b: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the free (active) coefficients, given the gradient ``slope`` of the loss, and their signs.

        A coefficient is free if it is not zero, or if the gradient exceeds the subdifferential of the penalty at zero.
        """
        signs = torch.where(b != 0, b.sign(), -slope.sign() * (slope.abs() > self.l1))
        free = (b != 0) | (signs != 0) | (self.l1 == 0)
        if self.grouped:
            pull = torch.where(b != 0, 0.0, (slope.abs() - self.l1).clamp(min=0))
            # A zero group leaves zero if its soft-thresholded gradient exceeds its weight (Simon et al. 2013).
            open_ = (self.norms(b) > 0) | (self._sums(pull.square()).sqrt() > self.group)
            free = free & self._spread(open_, True)
        return free, signs

    def slope(self, b: Tensor, signs: Tensor) -> Tensor:
        """Return the gradient of the penalty for coefficients of these signs."""
        result = self.l1 * signs + self.l2 * b
        return result + self._spread(self._inverse_norms(b) * self.group, 0.0) * b if self.grouped else result

    def curvature(self, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the Hessian in the coefficients ``index`` (B, m): a diagonal, and a matrix (B, m, m) for group norms."""
        diagonal = self.l2.gather(1, index)
        if not self.grouped:
            return diagonal, None
        # The Hessian of ||b|| is I / ||b|| - b b' / ||b||^3.
        inverse = self._inverse_norms(b)
        values, labels = b.gather(1, index), self.labels[index]
        diagonal = diagonal + self._spread(inverse * self.group, 0.0).gather(1, index)
        scale = self._spread(inverse.pow(3) * self.group, 0.0).gather(1, index).sqrt() * values
        same = labels[:, :, None] == labels[:, None, :]
        return diagonal, -(scale[:, :, None] * scale[:, None, :]) * same

    def prox(self, b: Tensor, step: Tensor) -> Tensor:
        """Return the proximal map with a step for each model, (B, 1)."""
        result = b.sign() * (b.abs() - step * self.l1).clamp(min=0) / (1 + step * self.l2)
        if not self.grouped:
            return result
        norms = self.norms(result)  # exact in this order for l1 and group norms (Friedman et al. 2010); no family adds squares
        shrunk = (1 - step * self.group / norms.clamp(min=torch.finfo(b.dtype).tiny)).clamp(min=0)
        return result * self._spread(shrunk, 1.0)

    def _inverse_norms(self, b: Tensor) -> Tensor:
        norms = self.norms(b)
        return torch.where(norms > 0, 1 / norms.clamp(min=torch.finfo(b.dtype).tiny), 0.0)

    def _sums(self, values: Tensor) -> Tensor:
        count = self.group.shape[1]  # one more column takes the coefficients in no group, and is dropped
        return values.new_zeros(len(values), count + 1).index_add_(1, self.labels, values)[:, :count]

    def _spread(self, values: Tensor, default: float | bool) -> Tensor:
        """Return the value of its group for each coefficient; ``default`` for coefficients in no group."""
        return torch.cat([values, values.new_full((len(values), 1), default)], dim=1)[:, self.labels]


RIDGE = 1e-10  # regularisation of Hessians, relative to their mean diagonal, for free features that are linearly dependent
GROWTH = 100.0  # factor by which it grows as long as a Hessian is not positive definite
FLOOR = 1e-9  # smallest diagonal of a dual system, relative to the mean (for intercepts, which have no penalty)


@dataclass(frozen=True, eq=False)
class DenseSystem:
    """Linear systems with matrices H (B, m, m) in the valid unknowns (B, m); the other unknowns are padding."""

    H: Tensor
    valid: Tensor

    def without(self, removed: Tensor) -> DenseSystem:
        """Return the systems without some unknowns (B, m)."""
        return DenseSystem(self.H, self.valid & ~removed)

    def solve(self, right: Tensor) -> Tensor:
        """Return the solutions for right-hand sides (B, m, k)."""
        return torch.cholesky_solve(right, self._factor)

    @cached_property
    def _factor(self) -> Tensor:
        """Return Cholesky factors; the diagonal grows until all matrices are positive definite."""
        valid = self.valid
        diagonal = torch.where(valid, self.H.diagonal(dim1=1, dim2=2), 0.0)
        shift = RIDGE * diagonal.sum(1) / valid.sum(1).clamp(min=1) + torch.finfo(self.H.dtype).tiny  # tiny: 0 could not grow
        H = torch.where(valid[:, :, None] & valid[:, None, :], self.H, 0.0)  # padding becomes the identity
        while True:
            factor, info = torch.linalg.cholesky_ex(H + torch.diag_embed(torch.where(valid, shift[:, None], 1.0)))
            if not bool(info.any()):
                return factor
            shift = torch.where(info > 0, GROWTH * shift, shift)


@dataclass(frozen=True, eq=False)
class DualSystem:
    """Linear systems with matrices A' diag(weights) A + diag(diagonal), for data A (n, m) with more columns than rows.

    The Woodbury identity needs only factors of size n. Where coefficients that share a weight have the same diagonal, these are
    sums of the ``kernels`` A_c A_c' (C, n, n); ``members`` holds the index of one coefficient for each kernel.
    """

    A: Tensor
    weights: Tensor
    diagonal: Tensor
    kernels: Tensor | None = None
    members: Tensor | None = None

    def without(self, removed: Tensor) -> DualSystem:
        """Return these systems: without kinks, all unknowns stay."""
        return self

    def solve(self, right: Tensor) -> Tensor:
        """Return the solutions for right-hand sides (B, m, k)."""
        root, inverse, factor = self._parts
        first = inverse * right
        inner = torch.cholesky_solve(root * (self.A @ first), factor)
        return first - inverse * (self.A.t() @ (root * inner))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        root = self.weights.sqrt()[:, :, None]
        inverse = 1 / torch.maximum(self.diagonal, FLOOR * self.diagonal.mean(1, keepdim=True))
        if self.kernels is None or self.members is None:
            inner = (self.A * inverse[:, None, :]) @ self.A.t()
        else:
            inner = (inverse[:, self.members] @ self.kernels.flatten(1)).view(len(inverse), *self.kernels.shape[1:])
        inner = inner * root * root.mT
        inner.diagonal(dim1=1, dim2=2).add_(1.0)  # roots of the weights on both sides keep it symmetric, and allow zero weights
        return root, inverse[:, :, None], torch.linalg.cholesky(inner)


TOLERANCE = 1e-7  # on the gradient of a fit, relative to the gradient at zero coefficients
ITERATIONS = 200  # largest number of Newton steps of a fit
HALVINGS = 6  # step sizes of the line search before proximal gradient steps replace a Newton step
DECREASE = 1e-4  # share of the predicted decrease that a step must reach (Armijo)
POWER_STEPS = 8  # power iterations that estimate the largest eigenvalue of a Hessian
SAFETY = 1.3  # safety factor of that estimate, which is a lower bound
PROXIMAL_STEPS = 5  # proximal gradient steps after a failed Newton step
KERNELS = 20  # largest size of all kernels together, relative to the data, that is stored
REMOVALS = 4  # how often coefficients that would enter with the wrong sign are removed from a Newton step


@dataclass(frozen=True, eq=False)
class Fits:
    """Coefficients of B fitted models, with their active sets."""

    b: Tensor  # (B, P)
    free: Tensor  # (B, P), a mask of the free coefficients
    signs: Tensor  # (B, P)
    converged: Tensor  # (B,), True if the tolerance was reached


class Models:
    """B linear models on the same data, each with its own weights ``train`` (B, n) of the examples.

    Coefficients are vectors of P = features times outputs numbers, feature by feature.
    """

    def __init__(self, loss: LinearModelLoss, train: Tensor) -> None:
        self.loss, self.A = loss, loss.A
        self.train = train / train.sum(1, keepdim=True)
        self.outputs = loss.shape[1] if len(loss.shape) > 1 else 1
        self.size = self.A.shape[1] * self.outputs
        self._products: dict[int, tuple[Tensor, Tensor] | tuple[None, None]] = {}
        v = self.A.new_ones(len(train), self.A.shape[1])
        for _ in range(POWER_STEPS):  # estimates the largest eigenvalues of A' diag(train) A
            v = v / v.norm(dim=1, keepdim=True)
            v = (self.train * (v @ self.A.t())) @ self.A
        bound = self.A.square().sum(1).max() * loss._curvature  # each row of train sums to 1
        self.lipschitz = torch.minimum(SAFETY * v.norm(dim=1) * loss._curvature, bound.expand(len(train)))

    def scores(self, b: Tensor) -> Tensor:
        """Return the scores A b, (B, n) or (B, n, outputs)."""
        if self.outputs == 1:
            return b @ self.A.t()
        return torch.einsum("np,bpc->bnc", self.A, b.view(len(b), -1, self.outputs))

    def pull(self, slopes: Tensor) -> Tensor:
        """Return A' slopes, (B, P)."""
        if self.outputs == 1:
            return slopes @ self.A
        return torch.einsum("np,bnc->bpc", self.A, slopes).reshape(len(slopes), -1)

    def slopes(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the derivatives of the weighted losses with respect to the scores."""
        return self.weighted(self.loss.slopes(scores), weights)

    def weighted(self, slopes: Tensor, weights: Tensor) -> Tensor:
        """Return slopes of examples times their weights (B, n)."""
        return slopes * (weights if self.outputs == 1 else weights[:, :, None])

    def hessian(self, scores: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Return the Hessians of the weighted losses in the coefficients ``index`` (B, m)."""
        curvature = self.loss.curvatures(scores)
        if self.outputs == 1:
            columns = self.A.t()[index]  # (B, m, n)
            return (columns * (weights * curvature)[:, None, :]) @ columns.mT
        feature, output = index // self.outputs, index % self.outputs
        columns = self.A.t()[feature]
        shares = columns * curvature.mT.gather(1, output[:, :, None].expand(-1, -1, curvature.shape[1]))
        weighted = shares * weights[:, None, :]
        # The Hessian of the cross entropy in the scores is diag(p) - p p'.
        return (output[:, :, None] == output[:, None, :]) * (weighted @ columns.mT) - weighted @ shares.mT

    def fit(self, penalty: Penalty, start: Tensor, tol: float = TOLERANCE) -> Fits:
        """Fit all models from a start (B, P) by Newton steps on the active set."""
        never = torch.zeros_like(start, dtype=torch.bool)
        fits = Fits(start.clone(), never, torch.zeros_like(start), never[:, 0].clone())
        scale = self.at_zero.abs().amax(1).clamp(min=torch.finfo(start.dtype).tiny)
        rows = torch.arange(len(start), device=start.device)
        for _ in range(ITERATIONS):  # rows are the models that have not converged: the batch shrinks
            part, at = penalty[rows], fits.b[rows]
            slope = self.pull(self.slopes(self.scores(at), self.train[rows]))
            free, signs = part.free(at, slope)
            step = 1 / self.lipschitz[rows][:, None]
            opened = at
            if part.grouped:  # a norm has no Hessian at zero, so a group leaves zero by a proximal step
                entering = free & (part._spread(part.norms(at), 1.0) == 0)
                if bool(entering.any()):
                    opened = torch.where(entering, part.prox(at - step * slope, step), at)
                    free = free & ~(entering & (opened == 0))
                    signs = torch.where(entering, opened.sign(), signs)
            # Coefficients that are not free satisfy their optimality conditions by definition.
            residual = torch.where(free, slope + part.slope(at, signs), 0.0).abs().amax(1)
            done = residual <= tol * scale[rows]
            if part.grouped:
                done &= (opened == at).all(1)  # not before the groups that enter have moved
            fits.free[rows], fits.signs[rows], fits.converged[rows] = free, signs, done
            if bool(done.all()):
                break
            rows = rows[~done]
            fits.b[rows] = self._step(penalty[rows], rows, *(values[~done] for values in (at, opened, free, signs)))
        return fits

    @cached_property
    def at_zero(self) -> Tensor:
        """Return the gradients of the losses at zero coefficients, (B, P)."""
        zero = torch.zeros(len(self.train), self.size, dtype=self.A.dtype, device=self.A.device)
        return self.pull(self.slopes(self.scores(zero), self.train))

    def objective(self, penalty: Penalty, b: Tensor, rows: Tensor) -> Tensor:
        """Return loss plus penalty of each model, (B,)."""
        return (self.train[rows] * self.loss.losses(self.scores(b))).sum(1) + penalty.value(b)

    @cached_property
    def _grams(self) -> Tensor | None:
        """Return the constant Hessians A' diag(train) A of least squares, if they are smaller than the data; else None."""
        if not isinstance(self.loss, LeastSquares) or self.outputs > 1 or self.size > len(self.A) / 2:
            return None
        return torch.stack([(self.A.t() * weights) @ self.A for weights in self.train])

    def _kernels(self, classes: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return products A_c A_c' of the columns that share a weight, and the index of one column each; None if too large."""
        key = id(classes)  # the layout keeps this tensor alive, so its id is not reused
        if key not in self._products:
            kinds, where = classes.unique(return_inverse=True)
            self._products[key] = None, None
            if len(kinds) * len(self.A) <= self.size * KERNELS:
                columns = [(where == kind).nonzero()[:, 0] for kind in range(len(kinds))]
                kernels = torch.stack([self.A[:, part] @ self.A[:, part].t() for part in columns])
                self._products[key] = kernels, torch.stack([part[0] for part in columns])
        return self._products[key]

    def _step(self, penalty: Penalty, rows: Tensor, at: Tensor, opened: Tensor, free: Tensor, signs: Tensor) -> Tensor:
        """Take a Newton step in the free coefficients, cut at kinks; proximal gradient steps where the line search fails."""
        scores = self.scores(opened)
        slope = self.pull(self.slopes(scores, self.train[rows])) + penalty.slope(opened, signs)
        index, valid = chosen(free)
        system = self.system(penalty, opened, scores, rows, index, valid)
        right, entering = slope.gather(1, index), (opened == 0).gather(1, index)
        outward = signs.gather(1, index)
        move = torch.zeros_like(right)
        for _ in range(REMOVALS):  # a wrong sign would mean another gradient of the penalty
            right = torch.where(valid, right, 0.0)
            move = -system.solve(right[:, :, None])[:, :, 0]
            wrong = valid & entering & (move * outward < 0)
            if not bool(wrong.any()):
                break
            valid = valid & ~wrong
            system = system.without(wrong)
        move = torch.where(valid & ~(entering & (move * outward < 0)), move, 0.0)
        direction = torch.zeros_like(at).scatter_(1, index, move)
        before = self.objective(penalty, at, rows)
        slack = before.abs() * torch.finfo(at.dtype).eps * len(self.A)  # rounding errors of the sum over examples
        predicted = -(right * move).sum(1)
        best, missing = at.clone(), torch.arange(len(at), device=at.device)
        size = 1.0
        for _ in range(HALVINGS):
            part = penalty[missing]
            new = opened[missing] + size * direction[missing]
            crossed = (new * signs[missing] < 0) & (part.l1 > 0)  # the quadratic model ends at the kink
            new = torch.where(crossed, 0.0, new)
            if part.grouped:
                old = opened[missing]
                turned = (part._sums(new * old) <= 0) & (part.norms(old) > 0)  # such groups passed their kink
                new = torch.where(part._spread(turned, False), 0.0, new)
            value = self.objective(part, new, rows[missing])
            good = value <= before[missing] - DECREASE * size * predicted[missing] + slack[missing]
            best[missing[good]] = new[good]
            missing = missing[~good]
            if len(missing) == 0:
                return best
            size = size / 2
        step = 1 / self.lipschitz[rows[missing]][:, None]  # steps of 1 / L decrease the objective
        for _ in range(PROXIMAL_STEPS):
            now = best[missing]
            smooth = self.pull(self.slopes(self.scores(now), self.train[rows[missing]]))
            best[missing] = penalty[missing].prox(now - step * smooth, step)
        return best

    def system(
        self, penalty: Penalty, b: Tensor, scores: Tensor, rows: Tensor, index: Tensor, valid: Tensor
    ) -> DenseSystem | DualSystem:
        """Return linear systems with the Hessians of the objectives in the coefficients ``index`` (B, m)."""
        diagonal, extra = penalty.curvature(b, index)
        # With fewer examples than coefficients, all of them free, systems of the size of the examples are cheaper.
        if self.outputs == 1 and len(self.A) < index.shape[1] == self.size and not penalty.sparse:
            weights = self.train[rows] * self.loss.curvatures(scores)
            return DualSystem(self.A, weights, diagonal, *self._kernels(penalty.classes))
        if self._grams is None:
            H = self.hessian(scores, self.train[rows], index)
        else:
            H = self._grams[rows[:, None, None], index[:, :, None], index[:, None, :]]
        H.diagonal(dim1=1, dim2=2).add_(diagonal)
        return DenseSystem(H if extra is None else H + extra, valid)


def chosen(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of True in each row, padded to the largest count (at least 1), and a mask of the real ones."""
    count = max(int(mask.sum(1).max()), 1)
    index = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[:, :count]  # stable: they stay in order
    return index, mask.gather(1, index)
