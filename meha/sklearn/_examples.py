"""Estimators that learn weights of examples: wrong labels, and data from elsewhere."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, has_fit_parameter, validate_data

from meha._checks import check_count
from meha.sklearn._folds import together
from meha.sklearn._linear import PenalizedClassifier
from meha.tasks import clean
from meha.tasks._cleaning import check_trusted

__all__ = ["ExampleReweighter", "LabelCleaner"]

Array = NDArray[Any]

ROUNDS = 3
"""Times that examples are judged and the estimator is fitted again."""
RARE = 1e-3
"""Smallest probability of a class, and share of a kind of error, that is taken seriously."""
NEUTRAL = 0.5
LARGEST = 20.0
"""Largest weight of an example, relative to the mean."""
POWERS = (0.25, 0.5, 0.75, 1.0)
"""Powers of the ratio of densities that the folds choose from."""
EVIDENCE = 1.0
"""Standard errors by which weights must be better than none."""


class LabelCleaner(ClassifierMixin, BaseEstimator):
    """Find wrong labels, with or without examples that are trusted, and fit a classifier that hardly uses them.

    With trusted examples and no ``estimator``, a network judges: :func:`meha.tasks.clean`, where the weights of examples are
    the upper variables, judged by the trusted ones. With an estimator (or without trusted examples), examples are judged by
    models that have not seen them, in rounds: out-of-fold probabilities give each label the probability that it is right,

        P(right | x_i, label k) = p_k(x_i) T_kk / sum_j p_j(x_i) T_jk,    T_jk the share of class j that is labelled k,

    and the next round weighs the examples with them. The first round, whose models have seen all wrong labels, leaves T out;
    the others estimate it from their probabilities. Trusted examples keep weight 1.

    Args:
        estimator: a classifier with ``predict_proba`` and ``sample_weight``; by default the network judges, and a logistic
            regression predicts.
        folds: number of folds.
        random_state: decides folds and networks.

    Attributes:
        label_quality_: (n,), from 0 (the label looks wrong) to 1 (it looks right, or is trusted).
        suspects_: row numbers of the examples with a quality below 0.5, most suspicious first.
        suggested_: (n,), the label that looks right.
        estimator_: the classifier, fitted with ``label_quality_`` as weights; ``predict`` and ``predict_proba`` are its own.
        classes_: the classes.

    >>> generator = np.random.default_rng(0)
    >>> truth = np.arange(200) % 2
    >>> X = generator.normal(size=(200, 3)) + 3 * truth[:, None]
    >>> y = truth.copy()
    >>> y[::9] = 1 - y[::9]
    >>> cleaner = LabelCleaner().fit(X, y)
    >>> bool(np.isin(np.arange(0, 200, 9), cleaner.suspects_).mean() > 0.9)
    True
    """

    def __init__(self, estimator: Any = None, folds: int = 5, random_state: int = 0) -> None:
        self.estimator = estimator
        self.folds = folds
        self.random_state = random_state

    def fit(self, X: Any, y: ArrayLike, trusted: ArrayLike | None = None) -> Self:
        """Judge all labels.

        Args:
            X: (n, features).
            y: (n,), the labels, some of which may be wrong.
            trusted: a mask, or the row numbers, of examples whose labels are right.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        check_count("folds", self.folds)
        if self.folds < 2:
            raise ValueError(f"folds: must be 2 or more, got {self.folds}.")
        self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y: all samples are of one class ({self.classes_[0]}); a classifier needs two or more.")
        mask = np.zeros(len(labels), dtype=bool) if trusted is None else check_trusted(trusted, len(labels))
        model = LogisticRegression(max_iter=1000) if self.estimator is None else self.estimator
        if not has_fit_parameter(model, "sample_weight") or not hasattr(model, "predict_proba"):
            raise TypeError(f"estimator: {type(model).__name__} needs sample_weight in fit, and predict_proba; pass another.")
        if self.estimator is None and mask.any():
            cleaning = clean(X.toarray() if issparse(X) else X, labels, mask, seed=self.random_state)
            quality, suggested = cleaning.weights, cleaning.suggested
        else:
            quality, suggested = self._judge(model, X, labels, mask)
        self.label_quality_ = quality
        order = np.argsort(quality, kind="stable")
        self.suspects_ = order[quality[order] < NEUTRAL]
        self.suggested_ = self.classes_[suggested]
        weights = np.where(quality > RARE, quality, RARE)
        self.estimator_ = clone(model).fit(X, self.classes_[labels], sample_weight=weights)
        return self

    def _judge(self, model: Any, X: Any, labels: Array, mask: Array) -> tuple[Array, Array]:
        count = len(self.classes_)
        folds = together(X, labels, labels, self.folds, self.random_state)
        quality = np.ones(len(labels))
        probabilities = np.full((len(labels), count), 1 / count)
        for attempt in range(ROUNDS):
            probabilities = self._left_out(model, X, labels, folds, quality, probabilities)
            posterior = (
                probabilities * self._shares(probabilities, labels, mask)[:, labels].T if attempt else probabilities.copy()
            )
            posterior /= posterior.sum(axis=1, keepdims=True)
            quality = np.where(mask, 1.0, posterior[np.arange(len(labels)), labels])
        suggested = np.where(mask, labels, posterior.argmax(axis=1))
        return quality, suggested

    @staticmethod
    def _shares(probabilities: Array, labels: Array, mask: Array) -> Array:
        """T_jk, the share of class j that is labelled k."""
        count = probabilities.shape[1]
        joint = np.eye(count)
        np.add.at(joint.T, labels[~mask], probabilities[~mask])
        return (joint / joint.sum(axis=1, keepdims=True)).clip(min=RARE)

    def _left_out(self, model: Any, X: Any, labels: Array, folds: Array, quality: Array, before: Array) -> Array:
        """Probabilities of the classes by models that have not seen the example."""
        result = before.copy()
        for fold in np.unique(folds):
            train, test = folds != fold, folds == fold
            present = np.unique(labels[train])
            if len(present) < 2:
                continue
            fitted = clone(model).fit(X[train], labels[train], sample_weight=quality[train].clip(min=RARE))
            result[test] = RARE
            result[np.ix_(test, fitted.classes_)] = fitted.predict_proba(X[test]).clip(min=RARE)
        return result / result.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> Array:
        """Predict classes with ``estimator_``."""
        X = self._read(X)
        return self.estimator_.predict(X)

    def predict_proba(self, X: Any) -> Array:
        """Predict probabilities of the classes with ``estimator_``."""
        X = self._read(X)
        return self.estimator_.predict_proba(X)

    def _read(self, X: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _can_score(self: Any) -> bool:
    return hasattr(self.estimator_ if hasattr(self, "estimator_") else self._model(), "score")


class ExampleReweighter(BaseEstimator):
    """Fit an estimator for data whose features are distributed differently (covariate shift), by weights of its examples.

    A :class:`PenalizedClassifier` tells the features at hand from those of the target; its odds are the ratio r of densities.
    Examples get the weights r^a. The power a is the upper variable: folds choose it by the losses of examples left out, with
    weights r; where no power is better than none by more than its standard error, all weights are 1.

    Args:
        estimator: a regressor or classifier with ``sample_weight``; by default a ridge.
        folds: number of folds.
        random_state: decides the folds.

    Attributes:
        sample_weight_: (n,), mean 1.
        power_: a.
        errors_: the weighted error for each power.
        estimator_: the estimator, fitted with these weights; ``predict`` and ``score`` are its own.

    >>> generator = np.random.default_rng(0)
    >>> X, X_target = generator.normal(size=(300, 1)), generator.normal(1.5, 0.5, size=(300, 1))
    >>> model = ExampleReweighter().fit(X, X[:, 0] ** 2, X_target)
    >>> plain = Ridge().fit(X, X[:, 0] ** 2)
    >>> errors = [np.mean((fitted.predict(X_target) - X_target[:, 0] ** 2) ** 2) for fitted in (model, plain)]
    >>> bool(errors[0] < 0.2 * errors[1])
    True
    """

    def __init__(self, estimator: Any = None, folds: int = 5, random_state: int = 0) -> None:
        self.estimator = estimator
        self.folds = folds
        self.random_state = random_state

    def fit(self, X: Any, y: ArrayLike, X_target: Any = None) -> Self:
        """Learn weights of the examples, and fit the estimator with them.

        Args:
            X: (n, features).
            y: (n,), targets or labels.
            X_target: (m, features), features from where predictions are wanted; without them all weights are 1.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_count("folds", self.folds)
        if self.folds < 2:
            raise ValueError(f"folds: must be 2 or more, got {self.folds}.")
        model = self._model()
        if is_classifier(model):
            check_classification_targets(y)
        if not has_fit_parameter(model, "sample_weight"):
            raise TypeError(f"estimator: {type(model).__name__} needs sample_weight in fit; pass another.")
        self.power_, self.sample_weight_ = 0.0, np.ones(X.shape[0])
        self.errors_: dict[float, float] = {}
        if X_target is not None:
            target = check_array(X_target, accept_sparse="csr", dtype=np.float64)
            if target.shape[1] != X.shape[1]:
                raise ValueError(f"X_target: has {target.shape[1]} features, X has {X.shape[1]}; pass the same features.")
            self._choose(model, X, np.asarray(y), self._ratios(X, target))
        self.estimator_ = clone(model).fit(X, y, sample_weight=self.sample_weight_)
        return self

    def _model(self) -> Any:
        return Ridge() if self.estimator is None else self.estimator

    def _ratios(self, X: Any, target: Any) -> Array:
        """The ratio of the densities of target and data at each example, mean 1."""
        both = np.concatenate([part.toarray() if issparse(part) else part for part in (X, target)])
        judge = PenalizedClassifier(folds=self.folds, random_state=self.random_state)
        judge.fit(both, np.arange(len(both)) >= X.shape[0])
        ratios = np.exp(judge.decision_function(both[: X.shape[0]]).clip(-LARGEST, LARGEST))
        return _normal(ratios)

    def _choose(self, model: Any, X: Any, y: Array, ratios: Array) -> None:
        folds = together(X, y, np.zeros(len(y)), self.folds, self.random_state)
        losses = {power: self._losses(model, X, y, folds, _normal(ratios**power)) for power in (0.0, *POWERS)}
        share = ratios / ratios.sum()
        self.errors_ = {power: float(share @ loss) for power, loss in losses.items()}
        for power in POWERS:
            gain = losses[0.0] - losses[power]
            mean = share @ gain
            noise = np.sqrt(np.sum(share**2 * (gain - mean) ** 2))
            if mean > EVIDENCE * noise and self.errors_[power] < self.errors_[self.power_]:
                self.power_ = power
        self.sample_weight_ = _normal(ratios**self.power_)

    def _losses(self, model: Any, X: Any, y: Array, folds: Array, weights: Array) -> Array:
        """Squared errors, or wrong classes, of examples left out."""
        result = np.zeros(len(y))
        for fold in np.unique(folds):
            train, test = folds != fold, folds == fold
            predicted = clone(model).fit(X[train], y[train], sample_weight=weights[train]).predict(X[test])
            result[test] = predicted != y[test] if is_classifier(model) else (predicted - y[test]) ** 2
        return result

    def predict(self, X: Any) -> Array:
        """Predict with ``estimator_``."""
        check_is_fitted(self)
        return self.estimator_.predict(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False))

    @available_if(_can_score)
    def score(self, X: Any, y: ArrayLike) -> float:
        """The score of ``estimator_``."""
        check_is_fitted(self)
        return float(self.estimator_.score(validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False), y))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags


def _normal(weights: Array) -> Array:
    """Weights with mean 1, none above the largest."""
    weights = weights / weights.mean()
    weights = weights.clip(max=LARGEST)
    return weights / weights.mean()
