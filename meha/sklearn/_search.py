"""Choose the weights of penalties by cross-validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from meha.problem.losses import LinearModelLoss, Logistic, Softmax
from meha.sklearn._models import TOLERANCE, Family, Fits, Models, Penalty, chosen

IMAGINED = 0.3  # imagined validation examples with a wrong class, which keep the search from choosing overconfident models
ROUGH = 1e-4  # tolerance on the gradient of fits during a search, relative to the gradient at zero coefficients

# Paths of a single weight, and of weights that follow a first fit.
POINTS = 20  # weights on the path of a family with one weight
DEPTH = log(1e-3)  # logarithm of the smallest weight on the path of a sparse family relative to the largest
RIDGE = 10.0, 0.1  # largest ridge weight on standardised features, and the smallest one times the number of examples
HUGE = log(1e12)  # log-weight that forces all penalised coefficients to zero
RISES = 2  # consecutive points without a better error after which a path ends
REFINEMENTS = 2  # points added around the best one
EXPONENTS = (1.0, 2.0)  # of the adaptive weights: how fast a weight falls with the size of its coefficients in a first fit
SMALL = 0.1  # size of a coefficient, relative to the largest of its model, at which its weight begins to fall
LEVELS = 9  # points on the path of adaptive weights

# Learned weights.
STRENGTHS = 4  # prior strengths that are tried
RATIO = 8.0  # ratio of one strength to the next
STEPS = 3  # Gauss-Newton steps for each strength
LONGEST = 1.0  # largest change of a log-weight in one step
CLOSE = 1e-3  # relative change of the upper level below which the steps end
EVIDENCE = 1.5  # standard errors by which a later candidate must be better than an earlier one
FEW = 2  # least number of examples per weight for learning each weight on its own


class FoldScore:
    """Validation losses of examples; for classifiers, a small share of each example counts as one of the other classes.

    Where classes are (nearly) separable, the validation examples favour ever more confident models, and the first unseen
    example on the wrong side costs more than all others. So a fraction of one example is imagined to have another class, spread
    over all examples: l_i + share * (score of the own class - mean score of the others).

    >>> A, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    >>> judge = FoldScore(Logistic(A, labels), torch.ones(2, dtype=torch.float64))
    >>> right, sure = torch.tensor([-3.0, 3.0]).double(), torch.tensor([-30.0, 30.0]).double()
    >>> bool(judge.losses(right).sum() < judge.losses(sure).sum())
    True
    """

    def __init__(self, loss: LinearModelLoss, weights: Tensor) -> None:
        self.loss = loss
        examples = weights.sum().square() / weights.square().sum()  # effective sample size (Kish 1965)
        self.towards: Tensor | None = None
        if isinstance(loss, Logistic):
            self.towards = loss.signs  # a flipped label changes the logistic loss by exactly its margin
        elif isinstance(loss, Softmax):
            own = one_hot(loss.labels, loss.shape[1]).to(weights)
            self.towards = own - (1 - own) / (loss.shape[1] - 1)  # cross entropies of two classes differ by their scores
        if self.towards is not None:
            self.towards = self.towards * IMAGINED / (examples + IMAGINED)

    def losses(self, scores: Tensor) -> Tensor:
        """Return the loss of each example at scores (..., n), or (..., n, outputs)."""
        result = self.loss.losses(scores)
        if self.towards is None:
            return result
        margins = self.towards * scores
        return result + (margins.sum(dim=-1) if self.towards.ndim > 1 else margins)

    def slopes(self, scores: Tensor) -> Tensor:
        """Return the derivatives of :meth:`losses` with respect to the scores."""
        result = self.loss.slopes(scores)
        return result if self.towards is None else result + self.towards


@dataclass(frozen=True, eq=False)
class Layout:
    """The penalty weight and the group that each coefficient belongs to."""

    classes: Tensor  # (P,), the index of each coefficient's weight; -1 for coefficients without a penalty
    labels: Tensor  # (P,), the index of each coefficient's group; ``len(sizes)`` for coefficients in no group
    sizes: Tensor  # (groups,), the number of coefficients in each group
    owner: Tensor  # (groups,), the index of each group's weight
    prior: Tensor  # (C, C), the precision matrix of the prior on deviations of the log-weights from their centre

    @property
    def count(self) -> int:
        """The number C of weights."""
        return len(self.prior)

    def penalty(self, x: Tensor, family: Family) -> Penalty:
        """Return the penalties of B models with log-weights x, (B, C)."""
        weights = x.exp()
        each = weights[:, self.classes.clamp(min=0)] * (self.classes >= 0)  # index -1 would read the last weight
        group = x.new_zeros(len(x), 0)
        if family.group:
            # Roots of the group sizes, as in Yuan and Lin (2006): otherwise large groups would be penalised less.
            group = family.group * weights[:, self.owner] * self.sizes.to(x).sqrt()
        return Penalty(family.l1 * each, family.l2 * each, group, self.labels, self.classes)

    def sizes_of(self, b: Tensor) -> Tensor:
        """Return the root mean square of the coefficients that share a weight, (B, C)."""
        known = self.classes >= 0
        classes = self.classes[known]
        squares = b.new_zeros(len(b), self.count).index_add_(1, classes, b[:, known].square())
        return (squares / torch.bincount(classes, minlength=self.count).clamp(min=1)).sqrt()


def layout_of(
    features: int, outputs: int, kind: Literal["one", "group", "feature"], groups: NDArray[Any] | None, intercept: bool
) -> Layout:
    """Return the layout of features times outputs coefficients, feature by feature; an intercept is one more feature.

    Args:
        kind: "one" weight for all features, one for each "group", or one for each "feature".
        groups: the index of each feature's group, from 0.
    """
    labels = torch.from_numpy(groups) if groups is not None else torch.zeros(features, dtype=torch.long)
    classes = {"one": torch.zeros_like(labels), "group": labels, "feature": torch.arange(features)}[kind]
    count = int(labels.max()) + 1
    owner = torch.zeros(count, dtype=torch.long).scatter_(0, labels, classes)
    prior = torch.eye(int(classes.max()) + 1, dtype=torch.float64)
    if kind == "feature" and groups is not None:  # pulls log-weights to the means of their groups, and these to the centre
        member = one_hot(labels).double()
        share = member / member.sum(0)
        prior = prior - member @ share.t() + share @ share.t()  # a mean counts once, however large its group
    if intercept:
        classes, labels = torch.cat([classes, torch.tensor([-1])]), torch.cat([labels, torch.tensor([count])])  # no penalty
    classes, labels = classes.repeat_interleave(outputs), labels.repeat_interleave(outputs)
    return Layout(classes, labels, torch.bincount(labels, minlength=count)[:count], owner, prior)


@dataclass(frozen=True, eq=False)
class FoldPoint:
    """Log-weights of all models, (B, C), their fits and scores, and the validation loss of each learner."""

    x: Tensor
    fits: Fits
    scores: Tensor
    values: Tensor

    def replaced(self, other: FoldPoint, good: Tensor, owner: Tensor) -> FoldPoint:
        """Return this point with the learners in ``good`` taken from another point."""

        def taken(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(good[owner].view(-1, *[1] * (old.ndim - 1)), new, old)

        fits = Fits(*map(taken, vars(other.fits).values(), vars(self.fits).values()))
        values = torch.where(good, other.values, self.values)
        return FoldPoint(taken(other.x, self.x), fits, taken(other.scores, self.scores), values)


class FoldLoss:
    """The upper level: the mean loss of each learner's models on the validation examples, weighted by ``valid`` (B, n).

    ``owner`` (B,) is the index of the learner that each model belongs to.
    """

    def __init__(self, models: Models, judge: FoldScore, layout: Layout, family: Family, valid: Tensor, owner: Tensor) -> None:
        self.models, self.judge, self.layout, self.family, self.owner = models, judge, layout, family, owner
        self.learners = int(owner.max()) + 1
        total = valid.new_zeros(self.learners).index_add_(0, owner, valid.sum(1))
        self.valid = valid / total[owner][:, None]  # by learner, not by model: folds count by their examples

    def at(self, x: Tensor, start: Tensor) -> FoldPoint:
        """Fit all models at log-weights x, (B, C)."""
        fits = self.models.fit(self.layout.penalty(x, self.family), start, ROUGH)  # the steps need no accurate fits
        scores = self.models.scores(fits.b)
        losses = (self.valid * self.judge.losses(scores)).sum(1)
        return FoldPoint(x, fits, scores, x.new_zeros(self.learners).index_add_(0, self.owner, losses))

    def derivatives(self, point: FoldPoint) -> tuple[Tensor, Tensor]:
        """Return gradients (learners, C) in the log-weights, and Gauss-Newton matrices (learners, C, C).

        With H the Hessian of a model in its free coefficients and q the gradient of its penalty there, the coefficients have
        the derivatives -H^-1 diag(q) in their log-weights; the matrices are the curvatures of the losses along these.
        """
        models, C = self.models, self.layout.count
        b, scores, x = point.fits.b, point.scores, point.x
        penalty = self.layout.penalty(x, self.family)
        index, valid = chosen(point.fits.free)
        system = models.system(penalty, b, scores, torch.arange(len(b), device=b.device), index, valid)
        # The penalty is linear in its weight, so its gradient q is also the derivative of q by the log-weight.
        pull = torch.where(valid, penalty.slope(b, point.fits.signs).gather(1, index), 0.0)
        slope = torch.where(valid, models.pull(models.weighted(self.judge.slopes(scores), self.valid)).gather(1, index), 0.0)
        classes = self.layout.classes.clamp(min=0)[index]  # those without a penalty add 0 to weight 0: their pull is 0
        own = self.owner[:, None].expand_as(classes)
        gradient = x.new_zeros(self.learners, C)
        adjoint = system.solve(slope[:, :, None])[:, :, 0]  # one solve gives all derivatives (implicit differentiation)
        gradient.index_put_((own, classes), -pull * adjoint, accumulate=True)
        matrix = x.new_zeros(self.learners, C, C)
        shared = index.shape[1] >= C
        right = torch.diag_embed(pull)
        if shared:  # one right-hand side per weight is cheaper than one per coefficient
            right = pull.new_zeros(len(b), index.shape[1], C).scatter_(2, classes[:, :, None], pull[:, :, None])
        moves = system.solve(right)
        products = moves.mT @ self._curved(scores, index, valid, moves)
        if shared:
            return gradient, matrix.index_add_(0, self.owner, products)
        rows, columns = classes[:, :, None].expand_as(products), classes[:, None, :].expand_as(products)
        return gradient, matrix.index_put_((own[:, :, None].expand_as(products), rows, columns), products, accumulate=True)

    def _curved(self, scores: Tensor, index: Tensor, valid: Tensor, moves: Tensor) -> Tensor:
        """Return the Hessians of the validation losses times moves (B, m, k)."""
        models = self.models
        if models.outputs == 1:
            weights = self.valid * models.loss.curvatures(scores)
            if index.shape[1] == models.size and bool(valid.all()):  # all are free: no copies of the columns of A
                return models.A.t() @ (weights[:, :, None] * (models.A @ moves))
            columns = models.A.t()[index] * valid[:, :, None]
            return columns @ (weights[:, :, None] * (columns.mT @ moves))
        H = models.hessian(scores, self.valid, index)
        return torch.where(valid[:, :, None] & valid[:, None, :], H, 0.0) @ moves


@dataclass(frozen=True, eq=False)
class Candidate:
    """One choice of the penalty, with the fits without each fold and on all data."""

    name: str  # in words
    family: Family
    x: Tensor  # log-weights, (K + 1, C): of the model without each of the K folds, then of the model on all data
    fits: Tensor  # coefficients of these models, (K + 1, P)
    losses: Tensor  # the loss of each example in the models that did not see it, (n,), by FoldScore
    error: float  # the mean of these losses
    level: float  # the common part of the log-weights
    path: list[tuple[float, float]]  # the log-weights, or strengths, that were tried, each with its error
    exponent: float = 0.0  # how fast weights fall with the size of the first fit; 0 if they do not
    strength: float = float("inf")  # of the prior; infinity if no weights were learned

    @property
    def key(self) -> str:
        """Return a name that no other candidate of the same search has."""
        return f"{self.name} ({self.exponent:g})" if self.exponent else self.name


def evident(losses: Any, before: Any, weights: Any, errors: float = EVIDENCE) -> bool:
    """Return True if the weighted mean of losses fell by more than this number of its standard errors; for tensors and arrays.

    >>> quiet, noisy = torch.tensor([1.0, 2.0, 1.5, 1.8]), torch.tensor([3.0, 0.1, 0.2, 2.9])
    >>> evident(quiet - 0.1, quiet, torch.ones(4)), evident(noisy, quiet, torch.ones(4))
    (True, False)
    """
    weights = weights / weights.sum()
    gain = before - losses
    mean = (weights * gain).sum()
    error = (weights**2 * (gain - mean) ** 2).sum() ** 0.5  # paired: what is hard for both cancels
    return bool(mean > errors * error)


class WeightSearch:
    """Compute candidates for the penalty of a linear model, and their cross-validation errors.

    Args:
        loss: the loss of the model on all data.
        layout: the weight and the group of each coefficient.
        folds: the fold of each example, from 0, for one or more random partitions of the examples, (partitions, n).
        weights: the weights of the examples, (n,).
    """

    def __init__(self, loss: LinearModelLoss, layout: Layout, folds: Tensor, weights: Tensor) -> None:
        self.loss, self.layout, self.weights, self.judge = loss, layout, weights, FoldScore(loss, weights)
        self.ways, self.each = len(folds), int(folds.max()) + 1
        self.count = self.ways * self.each
        self.members = torch.cat([(way == torch.arange(self.each)[:, None]).to(weights) for way in folds])
        self.models = Models(loss, torch.cat([1 - self.members, torch.ones_like(weights)[None]]) * weights)  # last: all data
        self.valid = self.members * weights

    def single(self, family: Family) -> Candidate:
        """Return the best single weight on a path from the largest sensible weight down."""
        grid = torch.linspace(*self._range(family), POINTS).tolist()
        return self._along(family, self.weights.new_zeros(self.count + 1, self.layout.count), grid)

    def adaptive(self, start: Candidate, exponent: float) -> Candidate:
        """Return adaptive weights (Zou 2006), which fall with the coefficients of a first fit to the training folds."""
        sizes = self.layout.sizes_of(start.fits)
        largest = sizes.amax(1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
        x = -exponent * (1 + sizes / (SMALL * largest)).log()
        reach = exponent * log(1 + 1 / SMALL)  # at the top, even the largest coefficient keeps the single weight
        grid = torch.linspace(start.level + reach, start.level - 1, LEVELS).tolist()
        best = self._along(start.family, x, grid)
        return replace(best, name=f"{start.name}, weights from a first fit", exponent=exponent)

    def learned(self, start: Candidate) -> Candidate:
        """Learn weights by Gauss-Newton steps from a single one under a prior; nested cross-validation chooses its strength.

        For each fold, a learner chooses weights by cross-validation on the other folds, and is validated on this one; one more
        learner uses all folds. All learners take their steps in one batch.
        """
        learner, fold = torch.tensor(self._pairs).t()
        members = torch.cat([self.members, torch.zeros_like(self.weights)[None]])  # the last learner leaves no other fold out
        models = Models(self.loss, (1 - members[fold] - members[learner]) * self.weights)
        level = FoldLoss(models, self.judge, self.layout, start.family, self.valid[fold], learner)
        centre = self.weights.new_full((len(fold), self.layout.count), start.level)
        u = centre.new_zeros(level.learners, self.layout.count)
        point = level.at(centre, start.fits[fold])
        scale = point.values  # losses are divided by it, so that one strength suits all learners
        best, path, fitted, worse = start, [(float("inf"), start.error)], start.fits, 0
        # The strongest prior allows a log-weight to move by about 1; a weaker one is tried only if that helps.
        top = float((level.derivatives(point)[0] / scale[:, None]).abs().max())
        for strength in [top / RATIO**k for k in range(STRENGTHS) if top > 0]:  # 0: the losses depend on no weight
            u, point = self._steps(level, centre, u, point, scale, strength)
            # Row k of u was learned without fold k, so that fold gives an unbiased error.
            fitted = self._fit(start.family, start.x + u, fitted)
            losses = self._left_out(self.models.scores(fitted))
            path.append((strength, self._mean(losses)))
            if path[-1][1] < best.error:
                best = replace(start, x=start.x + u, fits=fitted, losses=losses, error=path[-1][1], strength=strength)
                worse = 0
            else:
                worse += 1
            if worse > 1 or not evident(best.losses, start.losses, self.weights):  # a single worse strength may be noise
                break
        return replace(best, name=f"{start.name}, learned weights", path=path)

    def polished(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its models fitted to full accuracy."""
        return replace(candidate, fits=self._fit(candidate.family, candidate.x, candidate.fits, TOLERANCE))

    def _fit(self, family: Family, x: Tensor, start: Tensor, tol: float = ROUGH) -> Tensor:
        """Return coefficients of the models at log-weights x."""
        return self.models.fit(self.layout.penalty(x, family), start, tol).b

    def _steps(
        self, level: FoldLoss, centre: Tensor, u: Tensor, point: FoldPoint, scale: Tensor, strength: float
    ) -> tuple[Tensor, FoldPoint]:
        """Take Gauss-Newton steps of all learners for one strength, with Levenberg-Marquardt damping."""
        prior, owner = strength * self.layout.prior, level.owner
        damping = torch.zeros_like(scale)
        value = point.values / scale + 0.5 * ((u @ prior) * u).sum(1)
        for _ in range(STEPS):
            gradient, matrix = level.derivatives(point)
            slope = gradient / scale[:, None] + u @ prior
            curvature = matrix / scale[:, None, None] + prior + torch.diag_embed(damping[:, None].expand_as(u))
            move = -torch.linalg.solve(curvature, slope[:, :, None])[:, :, 0]
            trial = u + move.clamp(-LONGEST, LONGEST)  # the quadratic model is local
            there = level.at(centre + trial[owner], point.fits.b)
            new = there.values / scale + 0.5 * ((trial @ prior) * trial).sum(1)
            good = new <= value
            damping = torch.where(good, damping / RATIO, (RATIO * damping).clamp(min=strength))
            change = torch.where(good, value - new, 0.0).max()
            u, value = torch.where(good[:, None], trial, u), torch.where(good, new, value)
            point = there if bool(good.all()) else point.replaced(there, good, owner)
            if change < CLOSE:
                break
        return u, point

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """Return (learner, fold left out) of each nested model; the last learner has all folds, others one partition."""
        # Folds of one partition are disjoint; those of another one would overlap the fold that validates the learner.
        every, own = range(self.count), [range(k - k % self.each, k - k % self.each + self.each) for k in range(self.count)]
        return [(k, j) for k, parts in enumerate([*own, every]) for j in parts if j != k]

    @cached_property
    def _without_features(self) -> Tensor:
        """Return gradients in the penalised coefficients of models without features (intercept only); 0 for the others."""
        models, x = self.models, self.weights.new_full((self.count + 1, self.layout.count), HUGE)
        fits = self._fit(Family("lasso", l1=1.0), x, torch.zeros_like(models.at_zero), TOLERANCE)
        return models.pull(models.slopes(models.scores(fits), models.train)) * (self.layout.classes >= 0)

    def _range(self, family: Family) -> tuple[float, float]:
        """Return the largest and the smallest log-weight of a path: from (nearly) zero coefficients to hardly any penalty."""
        if not family.sparse:
            return log(RIDGE[0]), log(RIDGE[1] / len(self.weights))
        slope = self._without_features
        if family.l1:  # zero is optimal if no gradient exceeds its weight
            largest = slope.abs().max() / family.l1
        else:
            penalty = self.layout.penalty(slope.new_zeros(len(slope), self.layout.count), family)
            largest = (penalty.norms(slope) / penalty.group).max()
        top = log(float(largest.clamp(min=torch.finfo(slope.dtype).tiny)))  # 0 if the targets are constant
        return top, top + DEPTH

    def _along(self, family: Family, x: Tensor, grid: Sequence[float]) -> Candidate:
        """Return the best of the log-weights x + t, for t on a falling grid and refined between its points."""
        tried: dict[float, tuple[float, Tensor, Tensor]] = {}

        def visit(t: float, start: Tensor) -> Tensor:
            fits = self._fit(family, x + t, start)
            losses = self._left_out(self.models.scores(fits))
            tried[t] = self._mean(losses), fits, losses
            return fits

        rises, fits = 0, torch.zeros_like(self.models.at_zero)
        for t in grid:
            lowest = min((error for error, _, _ in tried.values()), default=float("inf"))
            fits = visit(t, fits)  # warm start: neighbours on the path have similar coefficients
            rises = 0 if tried[t][0] < lowest else rises + 1
            # Errors are equal, not worse, while all coefficients are still zero; such a plateau must not end the path.
            if rises >= RISES and lowest < max(error for error, _, _ in tried.values()):
                break
        for _ in range(REFINEMENTS):
            between = _between({t: error for t, (error, _, _) in tried.items()})
            if between is None:
                break
            visit(between, tried[min(tried, key=lambda t: abs(t - between))][1])
        t = min(tried, key=lambda t: tried[t][0])
        error, fits, losses = tried[t]
        path = sorted(((t, entry[0]) for t, entry in tried.items()), reverse=True)
        return Candidate(family.name, family, x + t, fits, losses, error, t, path)

    def _left_out(self, scores: Tensor) -> Tensor:
        """Return the loss of each example in the models without its fold, as the mean over all partitions."""
        return (self.members * self.judge.losses(scores[: self.count])).sum(0) / self.ways

    def _mean(self, losses: Tensor) -> float:
        return float((self.weights * losses).sum() / self.weights.sum())


def _between(errors: dict[float, float]) -> float | None:
    """Return the minimum of the parabola through the best point and its two neighbours; None at the end of the path."""
    order = sorted(errors)
    i = order.index(min(order, key=lambda t: errors[t]))
    if i in (0, len(order) - 1):
        return None
    a, b, c = order[i - 1 : i + 2]
    left, right = (errors[a] - errors[b]) * (c - b), (errors[c] - errors[b]) * (b - a)
    if left + right <= 0:  # the three errors are equal: no minimum
        return None
    return b + 0.5 * (left * (c - b) - right * (b - a)) / (left + right)


def choose(search: WeightSearch, families: Sequence[Family], many: bool) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate by cross-validation, and all that were tried.

    Families with a single weight come first, in the given order, then many weights. A later candidate replaces an earlier one
    only if the validation losses give evidence for it.
    """
    weights, layout = search.weights, search.layout
    tried = [search.single(family) for family in families]
    single = tried[0]
    for candidate in tried:
        if evident(candidate.losses, single.losses, weights):
            single = candidate
    if not many or layout.count == 1:
        return single, tried
    more = []
    for exponent in EXPONENTS:
        more.append(search.adaptive(single, exponent))
        if not evident(more[-1].losses, single.losses, weights):
            break
    if layout.count <= len(weights) / FEW:  # with fewer examples, they would fit the noise of the folds
        shared = layout.count < (layout.classes >= 0).sum()  # where coefficients share weights, a ridge is the better start
        ridges = [candidate for candidate in tried if shared and not candidate.family.sparse]
        more.append(search.learned(ridges[0] if ridges else single))
    known = [candidate for candidate in more if evident(candidate.losses, single.losses, weights)]
    return min([single, *known], key=lambda candidate: candidate.error), tried + more
