"""The upper level: losses of fitted models on examples left out, as functions of the log-weights of their penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from meha._cross_validation.judging import Judge
from meha._cross_validation.models import Fits, Models, chosen
from meha._cross_validation.penalties import Family, Penalty

__all__ = ["ROUGH", "Layout", "Level", "Point", "layout_of"]

ROUGH = 1e-4
"""Optimality of fits during a search, relative to the gradient without features."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which weight and which group each coefficient belongs to.

    Attributes:
        classes: (P,), the weight of each coefficient; -1 for those without a penalty.
        labels: (P,), the group of each coefficient; ``len(sizes)`` for those in none.
        sizes: (groups,), the number of coefficients in each group.
        owner: (groups,), the weight of each group.
        prior: (C, C), the quadratic form that the prior puts on deviations of the log-weights from their centre.
    """

    classes: Tensor
    labels: Tensor
    sizes: Tensor
    owner: Tensor
    prior: Tensor

    @property
    def count(self) -> int:
        """The number C of weights."""
        return len(self.prior)

    def penalty(self, x: Tensor, family: Family) -> Penalty:
        """The penalties at log-weights x, (B, C)."""
        weights = x.exp()
        each = weights[:, self.classes.clamp(min=0)] * (self.classes >= 0)
        group = x.new_zeros(len(x), 0)
        if family.group:
            group = family.group * weights[:, self.owner] * self.sizes.to(x).sqrt()
        return Penalty(family.l1 * each, family.l2 * each, group, self.labels, self.classes)

    def sizes_of(self, b: Tensor) -> Tensor:
        """Root mean squares of the coefficients that share a weight, (B, C)."""
        known = self.classes >= 0
        classes = self.classes[known]
        squares = b.new_zeros(len(b), self.count).index_add_(1, classes, b[:, known].square())
        return (squares / torch.bincount(classes, minlength=self.count).clamp(min=1)).sqrt()


def layout_of(
    features: int, outputs: int, kind: Literal["one", "group", "feature"], groups: NDArray[Any] | None, intercept: bool
) -> Layout:
    """The layout of features times outputs coefficients, feature by feature, and of one more feature for an intercept.

    Args:
        kind: whether there is one weight, one for each group, or one for each feature.
        groups: the group of each feature, from 0.
    """
    labels = torch.from_numpy(groups) if groups is not None else torch.zeros(features, dtype=torch.long)
    classes = {"one": torch.zeros_like(labels), "group": labels, "feature": torch.arange(features)}[kind]
    count = int(labels.max()) + 1
    owner = torch.zeros(count, dtype=torch.long).scatter_(0, labels, classes)
    prior = torch.eye(int(classes.max()) + 1, dtype=torch.float64)
    if kind == "feature" and groups is not None:
        prior = _by_groups(labels)
    if intercept:
        classes, labels = torch.cat([classes, torch.tensor([-1])]), torch.cat([labels, torch.tensor([count])])
    classes, labels = classes.repeat_interleave(outputs), labels.repeat_interleave(outputs)
    return Layout(classes, labels, torch.bincount(labels, minlength=count)[:count], owner, prior)


def _by_groups(labels: Tensor) -> Tensor:
    """The prior that pulls log-weights to the means of their groups, and each of these means, as one number, to the centre."""
    member = one_hot(labels).double()
    means = member @ (member / member.sum(0)).t()
    shares = (member / member.sum(0)) @ (member / member.sum(0)).t()
    return torch.eye(len(labels), dtype=torch.float64) - means + shares


@dataclass(frozen=True, eq=False)
class Point:
    """Log-weights of all models, (B, C), the fits there, their scores, and the upper level of each learner."""

    x: Tensor
    fits: Fits
    scores: Tensor
    values: Tensor

    def replaced(self, other: Point, good: Tensor, owner: Tensor) -> Point:
        """This point, with another one for the learners that are ``good``."""
        rows = good[owner][:, None]
        b, free, signs = (torch.where(rows, a, b) for a, b in zip(other.fits.variables, self.fits.variables, strict=True))
        fits = Fits(b, free, signs, torch.where(rows[:, 0], other.fits.converged, self.fits.converged))
        scores = torch.where(rows if self.scores.ndim == 2 else rows[:, :, None], other.scores, self.scores)
        return Point(torch.where(rows, other.x, self.x), fits, scores, torch.where(good, other.values, self.values))


class Level:
    """The mean loss of models on the examples that ``valid`` (B, n) weighs, for each of several learners.

    ``owner`` (B,) names the learner that a model belongs to.
    """

    def __init__(self, models: Models, judge: Judge, layout: Layout, family: Family, valid: Tensor, owner: Tensor) -> None:
        self.models, self.judge, self.layout, self.family, self.owner = models, judge, layout, family, owner
        self.learners = int(owner.max()) + 1
        total = valid.new_zeros(self.learners).index_add_(0, owner, valid.sum(1))
        self.valid = valid / total[owner][:, None]

    def at(self, x: Tensor, start: Tensor) -> Point:
        """Fit all models at log-weights x, (B, C)."""
        fits = self.models.fit(self.layout.penalty(x, self.family), start, ROUGH)
        scores = self.models.scores(fits.b)
        losses = (self.valid * self.judge.losses(scores)).sum(1)
        return Point(x, fits, scores, x.new_zeros(self.learners).index_add_(0, self.owner, losses))

    def derivatives(self, point: Point) -> tuple[Tensor, Tensor]:
        """Gradients (learners, C) in the log-weights, and Gauss-Newton matrices (learners, C, C).

        With H the Hessian of a model on its face and q the gradient of its penalty there, the coefficients move by
        -H^-1 diag(q) with their log-weights; the matrices are those of the losses along these moves.
        """
        models, C = self.models, self.layout.count
        b, scores, x = point.fits.b, point.scores, point.x
        penalty = self.layout.penalty(x, self.family)
        index, valid = chosen(point.fits.free)
        system = models.system(penalty, b, scores, torch.arange(len(b), device=b.device), index, valid)
        pull = torch.where(valid, penalty.slope(b, point.fits.signs).gather(1, index), 0.0)
        slope = torch.where(valid, models.pull(models.weighted(self.judge.slopes(scores), self.valid)).gather(1, index), 0.0)
        classes = self.layout.classes.clamp(min=0)[index]
        own = self.owner[:, None].expand_as(classes)
        gradient = x.new_zeros(self.learners, C)
        adjoint = system.solve(slope[:, :, None])[:, :, 0]
        gradient.index_put_((own, classes), -pull * adjoint, accumulate=True)
        matrix = x.new_zeros(self.learners, C, C)
        few = index.shape[1] >= C
        right = torch.diag_embed(pull)
        if few:  # coefficients that share a weight move together
            right = pull.new_zeros(len(b), index.shape[1], C).scatter_(2, classes[:, :, None], pull[:, :, None])
        moves = system.solve(right)
        products = moves.mT @ self._curved(scores, index, valid, moves)
        if few:
            return gradient, matrix.index_add_(0, self.owner, products)
        rows, columns = classes[:, :, None].expand_as(products), classes[:, None, :].expand_as(products)
        return gradient, matrix.index_put_((own[:, :, None].expand_as(products), rows, columns), products, accumulate=True)

    def _curved(self, scores: Tensor, index: Tensor, valid: Tensor, moves: Tensor) -> Tensor:
        """The Hessians of the losses on the examples left out, times moves (B, m, k)."""
        models = self.models
        if models.outputs == 1:
            weights = self.valid * models.loss.curvatures(scores)
            if index.shape[1] == models.size and bool(valid.all()):
                return models.A.t() @ (weights[:, :, None] * (models.A @ moves))
            columns = models.A.t()[index] * valid[:, :, None]
            return columns @ (weights[:, :, None] * (columns.mT @ moves))
        H = models.hessian(scores, self.valid, index)
        return torch.where(valid[:, :, None] & valid[:, None, :], H, 0.0) @ moves
