"""ExampleReweighter: weight examples for predictions on data of another distribution (covariate shift)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone, is_classifier
from sklearn.linear_model import Ridge
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, has_fit_parameter

from meha.sklearn._base import Array, Weighting, dense, together
from meha.sklearn._linear import PenalizedClassifier
from meha.sklearn._search import evident

LARGEST = 20.0  # largest weight of an example, relative to the mean
POWERS = (0.25, 0.5, 0.75, 1.0)  # candidate powers of the density ratio
EVIDENCE = 1.0  # standard errors by which weights must be better than none


def _can_score(self: Any) -> bool:
    return hasattr(self.estimator_ if hasattr(self, "estimator_") else self._model(), "score")


class ExampleReweighter(Weighting):
    """Fit an estimator with weighted examples, for target data whose features are distributed differently (covariate shift).

    A :class:`PenalizedClassifier` separates the training features from the target features; its odds are the density ratio r.
    Examples get the weights r^a (Shimodaira 2000). The power a is the upper variable: cross-validation with losses weighted by
    r chooses it; if no power is better than a = 0 by more than its standard error, all weights are 1.

    Args:
        estimator: a regressor or classifier with ``sample_weight``; by default a ridge.
        folds: number of folds.
        random_state: the seed of the folds.

    Attributes:
        sample_weight_: (n,), mean 1.
        power_: a.
        errors_: the weighted error for each power.
        estimator_: the estimator, fitted with these weights, which ``predict`` and ``score`` call.

    >>> generator = np.random.default_rng(0)
    >>> X, X_target = generator.normal(size=(300, 1)), generator.normal(1.5, 0.5, size=(300, 1))
    >>> model = ExampleReweighter().fit(X, X[:, 0] ** 2, X_target)
    >>> plain = Ridge().fit(X, X[:, 0] ** 2)
    >>> errors = [np.mean((fitted.predict(X_target) - X_target[:, 0] ** 2) ** 2) for fitted in (model, plain)]
    >>> bool(errors[0] < 0.2 * errors[1])
    True
    """

    def fit(self, X: Any, y: ArrayLike, X_target: Any = None) -> Self:
        """Learn weights of the examples, and fit the estimator with them.

        Args:
            X: (n, features).
            y: (n,), targets or labels.
            X_target: (m, features), features of the data to predict; without them all weights are 1.
        """
        X, y = self._read(X, y)
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
            self._choose(model, X, y, target)
        self.estimator_ = clone(model).fit(X, y, sample_weight=self.sample_weight_)
        return self

    def _model(self) -> Any:
        return Ridge() if self.estimator is None else self.estimator

    def _choose(self, model: Any, X: Any, y: Array, target: Any) -> None:
        """Choose the power by importance-weighted cross-validation (Sugiyama et al. 2007)."""
        both = np.concatenate([dense(X), dense(target)])
        judge = PenalizedClassifier(folds=self.folds, random_state=self.random_state)
        judge.fit(both, np.arange(len(both)) >= len(y))
        # The odds are the density ratio times m / n, which the mean of 1 removes; the limits keep exp finite.
        ratios = _normal(np.exp(judge.decision_function(both[: len(y)]).clip(-LARGEST, LARGEST)))
        folds = together(X, y, np.zeros(len(y)), self.folds, self.random_state)
        losses = {power: self._losses(model, X, y, folds, _normal(ratios**power)) for power in (0.0, *POWERS)}
        share = ratios / ratios.sum()  # a weighted validation loss estimates the loss on the target
        self.errors_ = {power: float(share @ loss) for power, loss in losses.items()}
        for power in POWERS:
            better = evident(losses[power], losses[0.0], share, EVIDENCE)
            if better and self.errors_[power] < self.errors_[self.power_]:
                self.power_ = power
        self.sample_weight_ = _normal(ratios**self.power_)

    def _losses(self, model: Any, X: Any, y: Array, folds: Array, weights: Array) -> Array:
        """Return the squared error, or 1 for a wrong class, of each example in a model that did not see it."""
        result = np.zeros(len(y))
        for fold in np.unique(folds):
            train, test = folds != fold, folds == fold
            predicted = clone(model).fit(X[train], y[train], sample_weight=weights[train]).predict(X[test])
            result[test] = predicted != y[test] if is_classifier(model) else (predicted - y[test]) ** 2
        return result

    def predict(self, X: Any) -> Array:
        """Predict targets with ``estimator_``."""
        X = self._read_again(X)
        return self.estimator_.predict(X)

    @available_if(_can_score)
    def score(self, X: Any, y: ArrayLike) -> float:
        """Return the score of ``estimator_``."""
        X = self._read_again(X)
        return float(self.estimator_.score(X, y))


def _normal(weights: Array) -> Array:
    """Return weights with mean 1, clipped at LARGEST."""
    weights = weights / weights.mean()
    weights = weights.clip(max=LARGEST)  # else a few examples of huge weight would decide the fit alone
    return weights / weights.mean()
