"""LabelCleaner: find wrong labels with a model of the label noise, the share of each class that is labelled as another."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import has_fit_parameter

from meha.cleaning import clean
from meha.cleaning.network import check_trusted
from meha.sklearn._base import Array, Weighting, dense, distinct, together

# The model of the label noise.
POWERS = (1.0, 2.0, 4.0, 8.0)  # candidate powers of probabilities: models fitted to wrong labels are underconfident
STRENGTHS = (1e6, 100.0, 10.0, 1.0)  # candidate numbers of imagined examples per class; the first enforces the even pattern
STEPS = 10  # of the EM algorithm
RARE_CLASS = 1e-3  # smallest share of wrong labels in the prior
TINY = 1e-6  # smallest probability of a class

# The estimator.
ROUNDS = 3  # how often the estimator is fitted again, to the label probabilities of the round before
RARE = 1e-3  # smallest probability of a class, and smallest weight of an example
NEUTRAL = 0.5


def true_classes(probabilities: Array, labels: Array, folds: Array) -> Array:
    """Return probabilities (n, K) of the true class j of each example, given its label k: p_j^a T_jk, normalised.

    T_jk, the share of class j that is labelled k, is the maximum a posteriori estimate under a prior for errors that are spread
    evenly over the other classes. Cross-validation by the likelihood of the labels chooses first the power a, with the even
    pattern, then the strength of the prior.

    Args:
        probabilities: out-of-fold probabilities of the classes, (n, K).
        labels: (n,), from 0.
        folds: the fold of each example, (n,).

    Every fifth label is that of the next class; the model gives each true class the probability 0.6:

    >>> truth, place = np.arange(600) % 3, np.arange(600)
    >>> labels = np.where(place % 5 == 0, (truth + 1) % 3, truth)
    >>> classes = true_classes(0.2 + 0.4 * np.eye(3)[truth], labels, place // 120)
    >>> bool((classes.argmax(axis=1) == truth).all())
    True
    """

    def sharpened(power: float) -> Array:
        result = (probabilities / probabilities.max(axis=1, keepdims=True)) ** power  # else high powers underflow to 0 / 0
        return (result / result.sum(axis=1, keepdims=True)).clip(min=TINY)

    power = min(POWERS, key=lambda power: _loss(sharpened(power), labels, folds, STRENGTHS[0]))
    probabilities = sharpened(power)
    strength = min(STRENGTHS, key=lambda strength: _loss(probabilities, labels, folds, strength))
    return _posterior(probabilities, labels, _shares(probabilities, labels, strength))


def _loss(probabilities: Array, labels: Array, folds: Array, strength: float) -> float:
    """Return minus the log-likelihood of the labels of each fold, with T estimated on the other folds."""
    total = 0.0
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        shares = _shares(probabilities[train], labels[train], strength)
        total -= np.log((probabilities[test] * shares[:, labels[test]].T).sum(axis=1)).sum()
    return total


def _shares(probabilities: Array, labels: Array, strength: float) -> Array:
    """Return the maximum a posteriori T, by the EM algorithm (Dawid and Skene 1979)."""
    count = probabilities.shape[1]
    given = np.eye(count)[labels]
    shares = _even(0.5, count)
    for _ in range(STEPS):
        joint = _posterior(probabilities, labels, shares).T @ given
        rate = 1 - np.trace(joint) / max(joint.sum(), RARE_CLASS)  # the prior has the overall error rate of the current T
        joint = joint + strength * _even(np.clip(rate, RARE_CLASS, 1 - RARE_CLASS), count)
        shares = joint / joint.sum(axis=1, keepdims=True)
    return shares


def _posterior(probabilities: Array, labels: Array, shares: Array) -> Array:
    joint = probabilities * shares[:, labels].T
    return joint / joint.sum(axis=1, keepdims=True)


def _even(rate: float, count: int) -> Array:
    """Return the T of wrong labels at this rate, spread evenly over the other classes."""
    return np.where(np.eye(count, dtype=bool), 1 - rate, rate / (count - 1))


class LabelCleaner(ClassifierMixin, Weighting):
    """Find wrong labels, with or without trusted examples, and fit a classifier that hardly uses the wrong ones.

    Examples are judged by models that have not seen them: out-of-fold probabilities p_j(x_i) give the probability that the true
    class is j,

        P(j | x_i, label k) = p_j(x_i)^a T_jk / sum_l p_l(x_i)^a T_lk,    T_jk the share of class j that is labelled k.

    T makes the given labels most likely, under a prior for errors that are spread evenly over the classes; cross-validation
    chooses the power a and the strength of the prior. In each of three rounds the models are fitted to the two likeliest labels
    of each example, with these probabilities as weights. If all classes have trusted examples, the rounds are also run from
    models of the trusted examples alone; the run with the smaller out-of-fold loss on trusted examples is used.

    Args:
        estimator: a classifier with ``predict_proba`` and ``sample_weight``; by default a logistic regression. "network": a
            network judges by :func:`meha.cleaning.clean`, where the weights of examples are the upper variables and the trusted
            examples, which it needs, are the upper level; a logistic regression predicts. It scales features column by column,
            pixels (rows of square pictures of type uint8) as a whole. It is for classes that a linear model cannot tell apart;
            on a thousand pictures of 28 x 28 pixels it finds fewer wrong labels than the default.
        folds: number of folds.
        random_state: the seed of folds and networks.

    Attributes:
        label_quality_: (n,), from 0 (the label looks wrong) to 1 (it looks right, or is trusted).
        suspects_: row numbers of the examples with a quality below 0.5, most suspicious first.
        suggested_: (n,), the label that looks right.
        estimator_: the classifier, fitted with ``label_quality_`` as weights, which ``predict`` and ``predict_proba`` call.
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

    def fit(self, X: Any, y: ArrayLike, trusted: ArrayLike | None = None) -> Self:
        """Find wrong labels, and fit the classifier.

        Args:
            X: (n, features).
            y: (n,), the labels, some of which may be wrong.
            trusted: a mask, or the row numbers, of examples whose labels are right.
        """
        pixels = getattr(X, "dtype", None) == np.uint8  # asked now: the next line makes all numbers floats
        X, y = self._read(X, y)
        check_classification_targets(y)
        self.classes_, labels = distinct(y)
        mask = np.zeros(len(labels), dtype=bool) if trusted is None else check_trusted(trusted, len(labels))
        by_network = isinstance(self.estimator, str) and self.estimator == "network"
        model = LogisticRegression(max_iter=1000) if self.estimator is None or by_network else self.estimator
        if not hasattr(model, "predict_proba") or not has_fit_parameter(model, "sample_weight"):
            raise TypeError(f"estimator: {type(model).__name__} needs sample_weight in fit, and predict_proba; pass another.")
        if by_network:
            if not mask.any():
                raise ValueError("trusted: estimator='network' needs trusted examples; name some, or pass another estimator.")
            features = dense(X).astype(np.uint8 if pixels else np.float64, copy=False)
            cleaning = clean(features, labels, mask, seed=self.random_state)
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
        """Return the probability that each label is right, and the most likely class."""
        folds = together(X, labels, labels + len(self.classes_) * mask, self.folds, self.random_state)  # by class and trust
        given, doubtful = np.eye(len(self.classes_))[labels], ~mask

        def posterior(probabilities: Array) -> Array:
            result = given.copy()  # trusted labels are certain
            result[doubtful] = true_classes(probabilities[doubtful], labels[doubtful], folds[doubtful])
            return result

        starts, runs = [np.ones(len(labels), dtype=bool)], []
        if len(np.unique(labels[mask])) == len(self.classes_):
            starts.append(mask)  # where most labels are wrong, models of all labels would confirm them
        for rows in starts:
            probabilities = _left_out(model, X, given * rows[:, None], folds)
            for _ in range(ROUNDS):
                probabilities = _left_out(model, X, posterior(probabilities), folds)
            runs.append((-float(np.log(probabilities[mask, labels[mask]]).sum()), posterior(probabilities)))
        classes = min(runs, key=lambda run: run[0])[1]
        return classes[np.arange(len(labels)), labels], classes.argmax(axis=1)

    def predict(self, X: Any) -> Array:
        """Predict classes with ``estimator_``."""
        X = self._read_again(X)
        return self.estimator_.predict(X)

    def predict_proba(self, X: Any) -> Array:
        """Predict probabilities of the classes with ``estimator_``."""
        X = self._read_again(X)
        return self.estimator_.predict_proba(X)


def _left_out(model: Any, X: Any, posterior: Array, folds: Array) -> Array:
    """Return out-of-fold probabilities of models that are fitted to the two likeliest classes of each example."""
    result = np.full(posterior.shape, RARE)
    for fold in np.unique(folds):
        train, test = np.flatnonzero(folds != fold), folds == fold
        likely = np.argsort(-posterior[train], axis=1)[:, :2].T  # two: a fit takes twice the rows, not K times
        rows, classes = np.tile(train, 2), likely.reshape(-1)
        weights = posterior[rows, classes]
        kept = weights > RARE
        if len(np.unique(classes[kept])) > 1:  # else there is nothing to fit, and probabilities stay equal
            fitted = clone(model).fit(X[rows[kept]], classes[kept], sample_weight=weights[kept])
            result[np.ix_(test, fitted.classes_)] = fitted.predict_proba(X[test]).clip(min=RARE)
    return result / result.sum(axis=1, keepdims=True)
