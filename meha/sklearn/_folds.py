"""Split examples into random folds that do not depend on their order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from meha.tensors.checks import check_count

Array = NDArray[Any]

WAYS = 2
"""Number of random partitions into folds: the mean of two depends less on chance."""


def check_folds(folds: int) -> int:
    """Return the number of folds, or raise if it is not an integer of at least 2."""
    check_count("folds", folds)
    if folds < 2:
        raise ValueError(f"folds: must be 2 or more, got {folds}.")
    return folds


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
    """Return the fold of each example in a partition that keeps equal examples together."""
    dense = X.toarray() if issparse(X) else X
    # Folds are drawn for distinct examples in sorted order: copies must not be in training and validation at once.
    _, first, inverse = np.unique(np.column_stack([dense, y]), axis=0, return_index=True, return_inverse=True)
    return dealt(strata[first], count, np.random.default_rng(seed))[inverse.reshape(-1)]
