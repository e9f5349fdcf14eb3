"""What all estimators share: they read data with scikit-learn 1.4 or newer, and split examples into random folds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import validation

from meha.tensors.checks import check_count

Array = NDArray[Any]

WAYS = 2  # random partitions into folds: the mean of two depends less on chance


class Estimator(BaseEstimator):
    """Base class of estimators of supervised learning that accept dense and sparse data."""

    folds: int

    def _read(self, X: Any, y: Any, **options: Any) -> tuple[Any, Array]:
        """Check the data of ``fit`` and the number of folds, and store the number and names of the features."""
        X, y = self._validated(X, y, ensure_min_samples=2, **options)
        check_count("folds", self.folds)
        if self.folds < 2:
            raise ValueError(f"folds: must be 2 or more, got {self.folds}.")
        return X, np.asarray(y)

    def _read_again(self, X: Any) -> Any:
        """Check that the estimator is fitted, and that the data have its features."""
        validation.check_is_fitted(self)
        return self._validated(X, reset=False)

    def _validated(self, *data: Any, **options: Any) -> Any:
        """Validate data by scikit-learn."""
        options = {"accept_sparse": "csr", "dtype": np.float64, **options}
        if hasattr(validation, "validate_data"):  # a function since scikit-learn 1.6, a method before
            return validation.validate_data(self, *data, **options)
        return self._validate_data(*data, **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags

    def _more_tags(self) -> dict[str, Any]:
        """Return the tags for scikit-learn before 1.6."""
        return {"requires_y": True}


class Weighting(Estimator):
    """Base class of estimators that fit another one, ``estimator_``, with weights that they learn."""

    def __init__(self, estimator: Any = None, folds: int = 5, random_state: int = 0) -> None:
        self.estimator = estimator
        self.folds = folds
        self.random_state = random_state


def dense(X: Any) -> Any:
    """Return the data as an array."""
    return X.toarray() if issparse(X) else X


def distinct(y: Array) -> tuple[Array, Array]:
    """Return the classes, two or more, and the index of each label's class."""
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y: all samples are of one class ({classes[0]}); a classifier needs two or more.")
    return classes, labels


def dealt(strata: Array, count: int, generator: np.random.Generator) -> Array:
    """Return the fold of each example in a random stratified partition, with at most one fold per example."""
    order = generator.permutation(len(strata))
    # Stratum by stratum, in random order within each: dealing in turn gives every fold its share of all strata.
    order = order[np.argsort(strata[order], kind="stable")]
    folds = np.empty(len(strata), dtype=np.int64)
    folds[order] = np.arange(len(strata)) % min(count, len(strata))
    return folds


def ways(strata: Array, count: int, seed: int) -> Array:
    """Return several random partitions of the examples into folds, (WAYS, examples)."""
    generator = np.random.default_rng(seed)
    return np.stack([dealt(strata, count, generator) for _ in range(WAYS)])


def together(X: Any, y: Array, strata: Array, count: int, seed: int) -> Array:
    """Return the fold of each example in a partition that keeps equal examples together, whatever their order."""
    # Folds are drawn for distinct examples in sorted order: copies must not be in training and validation at once.
    _, first, inverse = np.unique(np.column_stack([dense(X), y]), axis=0, return_index=True, return_inverse=True)
    return dealt(strata[first], count, np.random.default_rng(seed))[inverse.reshape(-1)]
