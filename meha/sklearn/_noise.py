"""Wrong labels as a random process: the share of each class that is labelled as another one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["true_classes"]

Array = NDArray[Any]

POWERS = (1.0, 2.0, 4.0, 8.0)
"""Powers of probabilities that the folds choose from: models that are fitted to wrong labels are not sure enough."""
STRENGTHS = (1e6, 100.0, 10.0, 1.0)
"""Imagined examples of each class whose errors are spread evenly, from which the folds choose; the first fixes this pattern."""
STEPS = 10
"""Steps of the EM algorithm."""
RARE = 1e-3
"""Smallest share of wrong labels that is considered."""
TINY = 1e-6
"""Smallest probability of a class."""


def true_classes(probabilities: Array, labels: Array, folds: Array) -> Array:
    """Probabilities (n, K) of the true class j of each example, given its label k: p_j^a T_jk, normalised.

    T_jk, the share of class j that is labelled k, makes the labels most likely, under a prior that pulls it to errors that are
    spread evenly over the other classes. First the power a, for the even pattern, then the strength of the prior are those with
    which the labels of a fold are most likely under the T of the others.

    Args:
        probabilities: of the true class, (n, K), by models that have not seen the example.
        labels: (n,), from 0.
        folds: the fold of each example, (n,).

    Every fifth label is that of the next class; the model is not sure of the class of any example:

    >>> truth, place = np.arange(600) % 3, np.arange(600)
    >>> labels = np.where(place % 5 == 0, (truth + 1) % 3, truth)
    >>> classes = true_classes(0.2 + 0.4 * np.eye(3)[truth], labels, place // 120)
    >>> bool((classes.argmax(axis=1) == truth).all())
    True
    """

    def sharpened(power: float) -> Array:
        result = (probabilities / probabilities.max(axis=1, keepdims=True)) ** power
        return (result / result.sum(axis=1, keepdims=True)).clip(min=TINY)

    power = min(POWERS, key=lambda power: _loss(sharpened(power), labels, folds, STRENGTHS[0]))
    probabilities = sharpened(power)
    strength = min(STRENGTHS, key=lambda strength: _loss(probabilities, labels, folds, strength))
    return _posterior(probabilities, labels, _shares(probabilities, labels, strength))


def _loss(probabilities: Array, labels: Array, folds: Array, strength: float) -> float:
    """Minus the log-likelihood of the labels of each fold, with the T of the others."""
    total = 0.0
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        shares = _shares(probabilities[train], labels[train], strength)
        total -= np.log((probabilities[test] * shares[:, labels[test]].T).sum(axis=1)).sum()
    return total


def _shares(probabilities: Array, labels: Array, strength: float) -> Array:
    """The most likely T under a prior, by the EM algorithm."""
    count = probabilities.shape[1]
    given = np.eye(count)[labels]
    shares = _even(0.5, count)
    for _ in range(STEPS):
        joint = _posterior(probabilities, labels, shares).T @ given
        rate = 1 - np.trace(joint) / max(joint.sum(), RARE)
        joint = joint + strength * _even(np.clip(rate, RARE, 1 - RARE), count)
        shares = joint / joint.sum(axis=1, keepdims=True)
    return shares


def _posterior(probabilities: Array, labels: Array, shares: Array) -> Array:
    joint = probabilities * shares[:, labels].T
    return joint / joint.sum(axis=1, keepdims=True)


def _even(rate: float, count: int) -> Array:
    """T with wrong labels at this rate, spread evenly over the other classes."""
    return np.where(np.eye(count, dtype=bool), 1 - rate, rate / (count - 1))
