"""Penalised linear models: their penalties, and solutions for all folds and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meha.problem.losses import LeastSquares, LinearModelLoss

__all__ = ["FAMILIES", "DenseSystem", "DualSystem", "Family", "Fits", "Models", "Penalty"]


@dataclass(frozen=True)
class Family:
    """Shares of the parts of a penalty: sum_j w_j (l1 |b_j| + l2 b_j^2 / 2) + sum_g w_g group sqrt(size_g) ||b_g||.

    >>> Family("elastic net", l1=0.5, l2=0.5).sparse
    True
    """

    name: str
    l1: float = 0.0
    l2: float = 0.0
    group: float = 0.0

    @property
    def sparse(self) -> bool:
        """Whether coefficients become zero."""
        return self.l1 > 0 or self.group > 0


FAMILIES: Mapping[str, Callable[[float], Family]] = {
    "ridge": lambda ratio: Family("ridge", l2=1.0),
    "lasso": lambda ratio: Family("lasso", l1=1.0),
    "elastic-net": lambda ratio: Family("elastic net", l1=ratio, l2=1 - ratio),
    "group": lambda ratio: Family("group lasso", group=1.0),
    "sparse-group": lambda ratio: Family("sparse group lasso", l1=ratio, group=1 - ratio),
}
"""Families by the names of their penalties, as functions of the share of absolute values."""


@dataclass(frozen=True, eq=False)
class Penalty:
    """The penalties of B models with P coefficients each.

    Attributes:
        l1: (B, P).
        l2: (B, P).
        group: (B, groups).
        labels: (P,), the group of each coefficient; ``groups`` for those in none.
        classes: (P,), the weight of each coefficient, from 0; -1 for those without a penalty.
    """

    l1: Tensor
    l2: Tensor
    group: Tensor
    labels: Tensor
    classes: Tensor

    def __getitem__(self, rows: Tensor) -> Penalty:
        """The penalties of some of the models."""
        return Penalty(self.l1[rows], self.l2[rows], self.group[rows], self.labels, self.classes)

    @property
    def sparse(self) -> bool:
        """Whether there are kinks."""
        return self.grouped or bool(self.l1.any())

    @property
    def grouped(self) -> bool:
        """Whether there are norms of groups."""
        return self.group.shape[1] > 0

    def norms(self, b: Tensor) -> Tensor:
        """Norms of the groups, (B, groups)."""
        return self._sums(b.square()).sqrt()

    def value(self, b: Tensor) -> Tensor:
        """Values, (B,)."""
        result = (self.l1 * b.abs() + 0.5 * self.l2 * b.square()).sum(1)
        return result + (self.group * self.norms(b)).sum(1) if self.grouped else result

    def free(self, b: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients that may move where the smooth part has the gradient ``slope``, and the signs of their first move.

        They are those that are not zero, and those whose slope exceeds what the kink at zero holds.
        """
        signs = torch.where(b != 0, b.sign(), -slope.sign() * (slope.abs() > self.l1))
        free = (b != 0) | (signs != 0) | (self.l1 == 0)
        if self.grouped:
            pull = torch.where(b != 0, 0.0, (slope.abs() - self.l1).clamp(min=0))
            open_ = (self.norms(b) > 0) | (self._sums(pull.square()).sqrt() > self.group)
            free = free & self._spread(open_, True)
        return free, signs

    def slope(self, b: Tensor, signs: Tensor) -> Tensor:
        """Gradient along the face on which coefficients have these signs."""
        result = self.l1 * signs + self.l2 * b
        return result + self._spread(self._inverse_norms(b) * self.group, 0.0) * b if self.grouped else result

    def curvature(self, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Second derivatives along the coefficients ``index`` (B, m): a diagonal, and a matrix (B, m, m) for group norms."""
        diagonal = self.l2.gather(1, index)
        if not self.grouped:
            return diagonal, None
        inverse = self._inverse_norms(b)
        chosen, labels = b.gather(1, index), self.labels[index]
        diagonal = diagonal + self._spread(inverse * self.group, 0.0).gather(1, index)
        scale = self._spread(inverse.pow(3) * self.group, 0.0).gather(1, index).sqrt() * chosen
        same = labels[:, :, None] == labels[:, None, :]
        return diagonal, -(scale[:, :, None] * scale[:, None, :]) * same

    def prox(self, b: Tensor, step: Tensor) -> Tensor:
        """Proximal map with a step for each model, (B, 1)."""
        result = b.sign() * (b.abs() - step * self.l1).clamp(min=0) / (1 + step * self.l2)
        if not self.grouped:
            return result
        norms = self.norms(result)
        shrunk = (1 - step * self.group / norms.clamp(min=torch.finfo(b.dtype).tiny)).clamp(min=0)
        return result * self._spread(shrunk, 1.0)

    def _inverse_norms(self, b: Tensor) -> Tensor:
        norms = self.norms(b)
        return torch.where(norms > 0, 1 / norms.clamp(min=torch.finfo(b.dtype).tiny), 0.0)

    def _sums(self, values: Tensor) -> Tensor:
        count = self.group.shape[1]
        return values.new_zeros(len(values), count + 1).index_add_(1, self.labels, values)[:, :count]

    def _spread(self, values: Tensor, rest: float | bool) -> Tensor:
        """Values of groups for each coefficient; ``rest`` for those in none."""
        return torch.cat([values, values.new_full((len(values), 1), rest)], dim=1)[:, self.labels]


RIDGE = 1e-10
"""Added to the diagonal of a Hessian, relative to its mean, for faces on which features depend on each other."""
GROWTH = 100.0
"""Factor by which it grows where that does not suffice."""
FLOOR = 1e-9
"""Smallest diagonal of a system in its dual form, relative to the mean (for intercepts, which have no penalty)."""


@dataclass(frozen=True, eq=False)
class DenseSystem:
    """Matrices H (B, m, m), restricted to the valid rows and columns (B, m); the others become those of the identity."""

    H: Tensor
    valid: Tensor

    def without(self, removed: Tensor) -> DenseSystem:
        """The systems without some coefficients (B, m)."""
        return DenseSystem(self.H, self.valid & ~removed)

    def solve(self, right: Tensor) -> Tensor:
        """Solutions for right-hand sides (B, m, k)."""
        return torch.cholesky_solve(right, self._factor)

    @cached_property
    def _factor(self) -> Tensor:
        """Cholesky factors; the diagonal grows where a matrix is not positive definite."""
        valid = self.valid
        diagonal = torch.where(valid, self.H.diagonal(dim1=1, dim2=2), 0.0)
        shift = RIDGE * diagonal.sum(1) / valid.sum(1).clamp(min=1) + torch.finfo(self.H.dtype).tiny
        H = torch.where(valid[:, :, None] & valid[:, None, :], self.H, 0.0)
        while True:
            factor, info = torch.linalg.cholesky_ex(H + torch.diag_embed(torch.where(valid, shift[:, None], 1.0)))
            if not bool(info.any()):
                return factor
            shift = torch.where(info > 0, GROWTH * shift, shift)


@dataclass(frozen=True, eq=False)
class DualSystem:
    """Matrices A' diag(weights) A + diag(diagonal) for data A (n, m) with more coefficients than examples.

    They are solved with matrices of n rows. Where coefficients that share a weight have the same diagonal, sums of ``kernels``
    A_c A_c' (C, n, n) give these matrices; ``members`` names a coefficient of each.
    """

    A: Tensor
    weights: Tensor
    diagonal: Tensor
    kernels: Tensor | None = None
    members: Tensor | None = None

    def without(self, removed: Tensor) -> DualSystem:
        """The same systems: nothing is removed where there are no kinks."""
        return self

    def solve(self, right: Tensor) -> Tensor:
        """Solutions for right-hand sides (B, m, k)."""
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
        inner.diagonal(dim1=1, dim2=2).add_(1.0)
        return root, inverse[:, :, None], torch.linalg.cholesky(inner)


TOLERANCE = 1e-7
"""Optimality of a fit, relative to the gradient without features."""
ITERATIONS = 200
"""Newton steps of one call, at most."""
HALVINGS = 6
"""Times that a Newton step is halved before a proximal gradient step replaces it."""
DECREASE = 1e-4
"""Share of the predicted decrease that a step must reach."""
POWER_STEPS = 8
"""Products that estimate the largest eigenvalue of a Hessian."""
SAFETY = 1.3
"""Factor by which that estimate may be too small."""
PROXIMAL_STEPS = 5
"""Proximal gradient steps where a Newton step fails."""
KERNELS = 20
"""Size of the kernels of all weights together, relative to the data, up to which they are stored."""
REMOVALS = 4
"""Times that coefficients which would enter with the wrong sign are taken out of a Newton step."""


@dataclass(frozen=True, eq=False)
class Fits:
    """Coefficients of B fitted models, and what their derivatives need.

    Attributes:
        b: (B, P).
        free, signs: the face of each model, (B, P).
        converged: (B,).
    """

    b: Tensor
    free: Tensor
    signs: Tensor
    converged: Tensor

    @property
    def variables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The coefficients and their faces."""
        return self.b, self.free, self.signs


class Models:
    """Linear models with the mean loss over the examples that ``train`` (B, n) weighs, and their fits.

    Coefficients are vectors of P = features times outputs numbers, feature by feature.
    """

    def __init__(self, loss: LinearModelLoss, train: Tensor) -> None:
        self.loss, self.A = loss, loss.A
        self.train = train / train.sum(1, keepdim=True)
        self.outputs = loss.shape[1] if len(loss.shape) > 1 else 1
        self.size = self.A.shape[1] * self.outputs
        bound = self.A.square().sum(1).max() * loss._curvature
        self._products: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.lipschitz = torch.minimum(self._norm_bound() * loss._curvature, bound.expand(len(train)))

    def _norm_bound(self) -> Tensor:
        """Bounds on the largest eigenvalues of A' diag(train) A, by a few products with their safety."""
        v = torch.ones(len(self.train), self.A.shape[1], dtype=self.A.dtype, device=self.A.device)
        value = v.new_ones(len(v))
        for _ in range(POWER_STEPS):
            v = v / v.norm(dim=1, keepdim=True)
            u = (self.train * (v @ self.A.t())) @ self.A
            value, v = u.norm(dim=1), u
        return SAFETY * value

    def scores(self, b: Tensor) -> Tensor:
        """A b, (B, n) or (B, n, outputs)."""
        if self.outputs == 1:
            return b @ self.A.t()
        return torch.einsum("np,bpc->bnc", self.A, b.view(len(b), -1, self.outputs))

    def pull(self, slopes: Tensor) -> Tensor:
        """A' slopes, (B, P)."""
        if self.outputs == 1:
            return slopes @ self.A
        return torch.einsum("np,bnc->bpc", self.A, slopes).reshape(len(slopes), -1)

    def slopes(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Derivatives of the weighted losses by the scores."""
        return self.weighted(self.loss.slopes(scores), weights)

    def weighted(self, slopes: Tensor, weights: Tensor) -> Tensor:
        """Slopes of examples times their weights (B, n)."""
        return slopes * (weights if self.outputs == 1 else weights[:, :, None])

    def hessian(self, scores: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Second derivatives of the weighted losses along the coefficients ``index`` (B, m)."""
        curvature = self.loss.curvatures(scores)
        if self.outputs == 1:
            columns = self.A.t()[index]  # (B, m, n)
            return (columns * (weights * curvature)[:, None, :]) @ columns.mT
        feature, output = index // self.outputs, index % self.outputs
        columns = self.A.t()[feature]
        shares = curvature.mT.gather(1, output[:, :, None].expand(-1, -1, curvature.shape[1]))
        weighted = columns * shares
        same = output[:, :, None] == output[:, None, :]
        return same * ((weighted * weights[:, None, :]) @ columns.mT) - (weighted * weights[:, None, :]) @ weighted.mT

    def fit(self, penalty: Penalty, start: Tensor, tol: float = TOLERANCE) -> Fits:
        """Fit all models from a start (B, P)."""
        b = start.clone()
        count = len(b)
        rows = torch.arange(count, device=b.device)
        scale = self.at_zero.abs().amax(1).clamp(min=torch.finfo(b.dtype).tiny)
        converged = torch.zeros(count, dtype=torch.bool, device=b.device)
        frees, signs_ = torch.zeros_like(b, dtype=torch.bool), torch.zeros_like(b)
        for _ in range(ITERATIONS):
            part, at, train = penalty[rows], b[rows], self.train[rows]
            scores = self.scores(at)
            slope = self.pull(self.slopes(scores, train))
            free, signs = part.free(at, slope)
            step = 1 / self.lipschitz[rows][:, None]
            opened = at
            if part.grouped:  # a group starts with a proximal step
                fresh = free & (part._spread(part.norms(at), 1.0) == 0)
                if bool(fresh.any()):
                    opened = torch.where(fresh, part.prox(at - step * slope, step), at)
                    free = free & ~(fresh & (opened == 0))
                    signs = torch.where(fresh, opened.sign(), signs)
            residual = torch.where(free, slope + part.slope(at, signs), 0.0).abs().amax(1)
            done = residual <= tol * scale[rows]
            if part.grouped:
                done &= (opened == at).all(1)
            frees[rows], signs_[rows] = free, signs
            converged[rows] = done
            if bool(done.all()):
                break
            rest = ~done
            rows = rows[rest]
            b[rows] = self._step(penalty[rows], at[rest], opened[rest], free[rest], signs[rest], rows)
        return Fits(b, frees, signs_, converged)

    @cached_property
    def at_zero(self) -> Tensor:
        """Gradients of the losses at zero coefficients, (B, P)."""
        zero = torch.zeros(len(self.train), self.size, dtype=self.A.dtype, device=self.A.device)
        return self.pull(self.slopes(self.scores(zero), self.train))

    def objective(self, penalty: Penalty, b: Tensor, rows: Tensor) -> Tensor:
        """Loss and penalty, (B,)."""
        return (self.train[rows] * self.loss.losses(self.scores(b))).sum(1) + penalty.value(b)

    @cached_property
    def _grams(self) -> Tensor | None:
        """Matrices A' diag(train) A, where they are the Hessians of all losses and smaller than the data."""
        if not isinstance(self.loss, LeastSquares) or self.outputs > 1 or self.size > len(self.A) / 2:
            return None
        return torch.stack([(self.A.t() * weights) @ self.A for weights in self.train])

    def _kernels(self, classes: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Products A_c A_c' of the columns that share a weight, and one of these columns; nothing where they are too many."""
        key = id(classes)
        if key not in self._products:
            kinds, where = classes.unique(return_inverse=True)
            self._products[key] = None, None
            if len(kinds) * len(self.A) <= self.size * KERNELS:
                columns = [(where == kind).nonzero()[:, 0] for kind in range(len(kinds))]
                kernels = torch.stack([self.A[:, part] @ self.A[:, part].t() for part in columns])
                self._products[key] = kernels, torch.stack([part[0] for part in columns])
        return self._products[key]

    def _step(self, penalty: Penalty, at: Tensor, opened: Tensor, free: Tensor, signs: Tensor, rows: Tensor) -> Tensor:
        """A Newton step on the face, cut at kinks; where it does not decrease the objective, a proximal gradient step."""
        scores = self.scores(opened)
        slope = self.pull(self.slopes(scores, self.train[rows])) + penalty.slope(opened, signs)
        index, valid = chosen(free)
        system = self.system(penalty, opened, scores, rows, index, valid)
        right, entering = slope.gather(1, index), (opened == 0).gather(1, index)
        outward = signs.gather(1, index)
        move = torch.zeros_like(right)
        for _ in range(REMOVALS):  # what would enter with the wrong sign stays zero
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
        slack = before.abs() * torch.finfo(at.dtype).eps * len(self.A)
        predicted = -(right * move).sum(1)
        best, missing = at.clone(), torch.arange(len(at), device=at.device)
        size = 1.0
        for _ in range(HALVINGS):
            part = penalty[missing]
            new = opened[missing] + size * direction[missing]
            crossed = (new * signs[missing] < 0) & (part.l1 > 0)
            new = torch.where(crossed, 0.0, new)
            if part.grouped:
                old = opened[missing]
                turned = (part._sums(new * old) <= 0) & (part.norms(old) > 0)
                new = torch.where(part._spread(turned, False), 0.0, new)
            value = self.objective(part, new, rows[missing])
            good = value <= before[missing] - DECREASE * size * predicted[missing] + slack[missing]
            best[missing[good]] = new[good]
            missing = missing[~good]
            if len(missing) == 0:
                return best
            size = size / 2
        step = 1 / self.lipschitz[rows[missing]][:, None]
        for _ in range(PROXIMAL_STEPS):
            now = best[missing]
            smooth = self.pull(self.slopes(self.scores(now), self.train[rows[missing]]))
            best[missing] = penalty[missing].prox(now - step * smooth, step)
        return best

    def system(
        self, penalty: Penalty, b: Tensor, scores: Tensor, rows: Tensor, index: Tensor, valid: Tensor
    ) -> DenseSystem | DualSystem:
        """Linear systems with the Hessians of the objectives along the coefficients ``index`` (B, m)."""
        diagonal, extra = penalty.curvature(b, index)
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
    """The positions of True in each row, padded to the largest count (at least 1), and which of them are real."""
    count = max(int(mask.sum(1).max()), 1)
    index = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[:, :count]
    return index, mask.gather(1, index)
