"""PenalizedRegressor and PenalizedClassifier: linear models whose penalties are learned by cross-validation, with figures."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from meha.problem.losses import Huber, LeastSquares, LinearModelLoss, Logistic, Softmax
from meha.sklearn._base import Array, Estimator, dense, distinct, ways
from meha.sklearn._models import FAMILIES, Family
from meha.sklearn._search import Candidate, Layout, WeightSearch, choose, layout_of

Weights = Literal["auto", "one", "group", "feature"]

AUTOMATIC = ("ridge", "elastic-net", "lasso")  # tried for "auto"; later ones must give evidence, so order matters
GROUPED = ("group", "sparse-group")  # penalties that need groups
MAD = 1.4826  # ratio of the standard deviation of a normal distribution to its median absolute deviation
NAMED = 40  # largest number of features whose names fit on the axis


class _Penalized(Estimator):
    """Base class of both estimators: it prepares the data, runs the search, and stores the results."""

    def __init__(
        self,
        penalty: str = "auto",
        weights: Weights = "auto",
        groups: ArrayLike | None = None,
        l1_ratio: float = 0.5,
        folds: int = 5,
        fit_intercept: bool = True,
        standardize: bool = True,
        random_state: int = 0,
    ) -> None:
        self.penalty = penalty
        self.weights = weights
        self.groups = groups
        self.l1_ratio = l1_ratio
        self.folds = folds
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.random_state = random_state

    def plot_weights(self, ax: Any = None) -> Any:
        """Draw the learned weights of all features on a logarithmic scale; needs matplotlib. Returns the axes."""
        check_is_fitted(self)
        ax = _axes(ax)
        ax.semilogy(np.arange(len(self.penalties_)), self.penalties_, "o")
        names = getattr(self, "feature_names_in_", None)
        if names is not None and len(names) <= NAMED:
            ax.set_xticks(np.arange(len(names)), names, rotation=90)
        ax.set(xlabel="feature", ylabel="weight of the penalty")
        return ax

    def plot_course(self, ax: Any = None) -> Any:
        """Draw the cross-validation error of all candidates along their paths; needs matplotlib. Returns the axes."""
        check_is_fitted(self)
        ax = _axes(ax)
        for (name, path), chosen in zip(self.path_.items(), self.cv_results_["chosen"], strict=True):
            style, name, alpha = ("-o", f"{name} (chosen)", 0.9) if chosen else ("-", name, 0.5)
            ax.plot(np.arange(len(path)), path[:, 1], style, label=name, alpha=alpha)
        ax.set(xlabel="point on the path, from large weights or strengths to small ones")
        ax.set(ylabel="mean loss of examples left out")
        ax.legend()
        return ax

    def _layout(self, features: int, outputs: int) -> tuple[Layout, list[Family], bool]:
        """Check the options, and return the layout of the weights, the families to try, and whether to try many weights."""
        penalty, kind, groups = self.penalty, self.weights, None
        if penalty != "auto" and penalty not in FAMILIES:
            raise ValueError(f"penalty: must be 'auto', {', '.join(map(repr, FAMILIES))}, got {penalty!r}.")
        if kind not in ("auto", "one", "group", "feature"):
            raise ValueError(f"weights: must be 'auto', 'one', 'group' or 'feature', got {kind!r}.")
        if not 0 < self.l1_ratio <= 1:
            raise ValueError(f"l1_ratio: must be in (0, 1], got {self.l1_ratio!r}; use penalty='ridge' for 0.")
        if self.groups is not None:
            labels = np.asarray(self.groups)
            if labels.shape != (features,):
                raise ValueError(f"groups: must have a label for each of {features} features, got shape {labels.shape}.")
            groups = np.unique(labels, return_inverse=True)[1]
        elif penalty in GROUPED or kind == "group":
            what = f"penalty={penalty!r}" if penalty in GROUPED else "weights='group'"
            raise ValueError(f"groups: {what} needs a group for each feature; pass groups=[...] with {features} labels.")
        if penalty in GROUPED and kind == "feature":
            raise ValueError(
                f"weights: {penalty!r} has a weight for each group, not for each feature; pass weights='group' or 'one'."
            )
        names = (penalty,) if penalty != "auto" else AUTOMATIC if groups is None else (*AUTOMATIC, "group")
        if kind == "auto":
            kind = "feature" if groups is None else "group"
        layout = layout_of(features, outputs, kind, groups, self.fit_intercept)
        return layout, [FAMILIES[name](self.l1_ratio) for name in names], kind != "one"

    def _prepared(self, X: Any, y: Array, sample_weight: ArrayLike | None) -> tuple[Array, Array, Array]:
        """Merge equal examples, sort them, and return them with their weights."""
        X = dense(X)
        weights = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64))  # all are 1 if there are none
        if (weights < 0).any():
            raise ValueError(f"sample_weight: must not be negative, got {weights.min():g}; use 0 to leave an example out.")
        # Copies in training and validation folds would leak; the sorted order makes the folds independent of that of the rows.
        rows, inverse = np.unique(np.column_stack([X, y])[weights > 0], axis=0, return_inverse=True)
        if len(rows) < 2:
            raise ValueError(f"X: has {len(rows)} sample(s) of positive weight; cross-validation needs two or more.")
        return rows[:, :-1], rows[:, -1], np.bincount(inverse.reshape(-1), weights[weights > 0])

    def _scaled(self, X: Array, weights: Array) -> Array:
        """Return features with mean 0 and standard deviation 1, and a column of ones for the intercept."""
        share = weights / weights.sum()
        centre = share @ X if self.fit_intercept else np.zeros(X.shape[1])  # without an intercept, centring would add one
        X = X - centre
        size = np.sqrt(share @ X**2)
        # A constant feature has a deviation of rounding errors only; divided by it, they would look like data.
        known = size > np.finfo(float).eps * (np.abs(centre) + np.abs(X).max(axis=0))
        self._centre, self._scale = centre, np.where(known & bool(self.standardize), np.where(known, size, 1.0), 1.0)
        X = np.where(known, X, 0.0) / self._scale
        return np.column_stack([X, np.ones(len(X))]) if self.fit_intercept else X

    def _search(self, loss: LinearModelLoss, strata: Array, weights: Array) -> Candidate:
        """Choose the penalty with stratified folds, store what was tried, and return the choice."""
        features, outputs = len(self._scale), loss.shape[1] if len(loss.shape) > 1 else 1
        folds = ways(strata, self.folds, self.random_state)
        layout, families, many = self._layout(features, outputs)
        search = WeightSearch(loss, layout, torch.from_numpy(folds), torch.from_numpy(weights))
        best, tried = choose(search, families, many)
        best = search.polished(best)  # the search fits only roughly
        classes = layout.classes[: features * outputs : outputs]  # all outputs of a feature share its weight
        self.penalty_ = best.name
        self.penalties_ = best.x[-1].exp()[classes].numpy()
        self.cv_results_ = {
            "candidate": np.array([candidate.name for candidate in tried]),
            **{key: np.array([getattr(candidate, key) for candidate in tried]) for key in ("error", "exponent", "strength")},
            "chosen": np.array([candidate.key == best.key for candidate in tried]),
        }
        self.path_ = {candidate.key: np.array(candidate.path) for candidate in tried}
        self.n_iter_ = sum(len(candidate.path) for candidate in tried)
        return best

    def _coefficients(self, b: Tensor, outputs: int) -> tuple[Array, Array]:
        """Return coefficients (outputs, features) and intercepts (outputs,) for the features before scaling."""
        table = b.view(-1, outputs).numpy().T
        coef = table[:, : len(self._scale)] / self._scale
        intercept = table[:, -1] - coef @ self._centre if self.fit_intercept else np.zeros(outputs)
        return coef, intercept


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "meha[plot]".') from error
    return pyplot.subplots()[1]


class PenalizedRegressor(RegressorMixin, _Penalized):
    """Linear regression whose penalties are learned by cross-validation.

        min_b  mean_i l(y_i - <a_i, b>) + sum_j w_j pen(b_j),    w by the losses of the folds left out

    on standardised features and targets. Cross-validation first chooses among penalties with a single weight. Then it tries
    adaptive weights, which follow a first fit, and weights that are learned one by one (or group by group) under a prior that
    pulls them together, whose strength it chooses as well. Many weights are used only if the validation losses give evidence
    for them; otherwise the answer is the single weight.

    Args:
        penalty: "ridge", "lasso", "elastic-net", "group", "sparse-group", or "auto": the best of ridge, elastic net, lasso and,
            with groups, the group lasso.
        weights: "one" for all features, one for each "group" or "feature"; "auto": for each group if there are groups,
            otherwise for each feature.
        groups: a label for each feature.
        l1_ratio: share of the absolute values in the elastic net, and in the sparse group lasso.
        loss: "squared" or "huber".
        epsilon: number of standard deviations of the residuals beyond which Huber's loss is linear.
        folds: number of folds; two random partitions are used. Equal examples are in the same fold.
        fit_intercept: whether to add an intercept, which has no penalty.
        standardize: whether features are scaled to deviation 1 for the penalties.
        random_state: the seed of the folds.

    Attributes:
        coef_: (features,).
        intercept_: a number.
        penalties_: (features,), the weights w of standardised features, for targets of deviation 1.
        penalty_: the penalty that was chosen, in words.
        cv_results_: for all candidates: name, error (mean validation loss), exponent, strength, and whether it was chosen.
        path_: for each candidate, the log-weights (or strengths) tried and their errors, (steps, 2).
        n_iter_: number of points on all paths.

    >>> generator = np.random.default_rng(0)
    >>> X = generator.normal(size=(60, 100))
    >>> y = X[:, :3].sum(axis=1) + 0.1 * generator.normal(size=60)
    >>> model = PenalizedRegressor().fit(X, y)
    >>> model.penalty_, np.flatnonzero(model.coef_)[:3]
    ('lasso, weights from a first fit', array([0, 1, 2]))
    >>> bool(model.penalties_[:3].max() < model.penalties_[3:].min())
    True
    """

    def __init__(
        self,
        penalty: str = "auto",
        weights: Weights = "auto",
        groups: ArrayLike | None = None,
        l1_ratio: float = 0.5,
        loss: Literal["squared", "huber"] = "squared",
        epsilon: float = 1.35,
        folds: int = 5,
        fit_intercept: bool = True,
        standardize: bool = True,
        random_state: int = 0,
    ) -> None:
        super().__init__(penalty, weights, groups, l1_ratio, folds, fit_intercept, standardize, random_state)
        self.loss = loss
        self.epsilon = epsilon

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the penalties by cross-validation, and fit the model on all data."""
        X, y = self._read(X, y, y_numeric=True)
        if self.loss not in ("squared", "huber"):
            raise ValueError(f"loss: must be 'squared' or 'huber', got {self.loss!r}.")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon: must be positive, got {self.epsilon!r}.")
        X, y, weights = self._prepared(X, y.astype(np.float64), sample_weight)
        A = torch.from_numpy(self._scaled(X, weights))
        share = weights / weights.sum()
        centre = float(share @ y) if self.fit_intercept else 0.0
        size = float(np.sqrt(share @ (y - centre) ** 2)) or 1.0  # 1 if the targets are constant
        b = torch.from_numpy((y - centre) / size)
        best = self._search(LeastSquares(A, b, gram=False), np.zeros(len(y)), weights)
        if self.loss == "huber":
            # Huber's delta needs a scale of the residuals that outliers hardly move: the MAD of the validation residuals.
            deviation = MAD * float((2 * best.losses).sqrt().median())
            self.delta_ = self.epsilon * (deviation or 1.0) * size
            best = self._search(Huber(A, b, delta=self.delta_ / size), np.zeros(len(y)), weights)
        coef, intercept = self._coefficients(best.fits[-1], 1)
        self.coef_, self.intercept_ = size * coef[0], size * float(intercept[0]) + centre
        return self

    def predict(self, X: Any) -> Array:
        """Predict the targets of examples."""
        return self._read_again(X) @ self.coef_ + self.intercept_


class PenalizedClassifier(ClassifierMixin, _Penalized):
    """Logistic regression, for two or more classes, whose penalties are learned by cross-validation.

    The penalties, the choice among them and all other arguments are those of :class:`PenalizedRegressor`; the losses are the
    logistic loss for two classes and the cross entropy for more. In cross-validation, 0.3 of an example is imagined to be of
    another class: a model must not be more confident than the number of examples allows. With more classes, a feature has a
    coefficient for each class, all with the same weight; groups contain those of all classes.

    Attributes:
        classes_: the classes.
        coef_: (1, features) for two classes, otherwise (classes, features).
        intercept_: (1,) or (classes,).
        penalties_, penalty_, cv_results_, path_, n_iter_: as in :class:`PenalizedRegressor`.

    >>> generator = np.random.default_rng(0)
    >>> X = generator.normal(size=(200, 5))
    >>> model = PenalizedClassifier().fit(X, X[:, 0] + 0.2 * generator.normal(size=200) > 0)
    >>> model.predict([[2.0, 0, 0, 0, 0], [-2.0, 0, 0, 0, 0]])
    array([ True, False])
    """

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn the penalties by cross-validation, and fit the model on all data."""
        X, y = self._read(X, y)
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        X, codes, weights = self._prepared(X, labels, sample_weight)
        self.classes_, targets = distinct(classes[codes.astype(np.int64)])  # a class may have lost all examples to weight 0
        A, labelled = torch.from_numpy(self._scaled(X, weights)), torch.from_numpy(targets.astype(np.int64))
        count = len(self.classes_)
        loss = Logistic(A, labelled) if count == 2 else Softmax(A, labelled, classes=count)
        best = self._search(loss, targets, weights)
        self.coef_, self.intercept_ = self._coefficients(best.fits[-1], 1 if count == 2 else count)
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the scores of examples: (n,) for two classes, otherwise (n, classes)."""
        scores = self._read_again(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities of the classes, (n, classes)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.column_stack([np.zeros(len(scores)), scores])  # a logistic model is a softmax with score 0
        return torch.from_numpy(scores).softmax(dim=1).numpy()

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Array:
        """Predict the classes of examples."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]
