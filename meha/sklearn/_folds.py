"""Folds that do not depend on the order of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from meha.tensors.checks import check_count

__all__ = ["check_folds", "dealt", "together", "ways"]

Array = NDArray[Any]

WAYS = 2
"""Times that examples are dealt into folds."""


def check_folds(folds: int) -> int:
    """Return the number of folds, if it is one."""
    check_count("folds", folds)
    if folds < 2:
        raise ValueError(f"folds: must be 2 or more, got {folds}.")
    return folds


def dealt(strata: Array, count: int, generator: np.random.Generator) -> Array:
    """Folds of examples in random order, each with its share of every stratum; as many as examples, at most."""
    order = generator.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    folds = np.empty(len(strata), dtype=np.int64)
    folds[order] = np.arange(len(strata)) % min(count, len(strata))
    return folds


def ways(strata: Array, count: int, seed: int) -> Array:
    """Folds of examples, dealt several times in another order: (ways, examples)."""
    generator = np.random.default_rng(seed)
    return np.stack([dealt(strata, count, generator) for _ in range(WAYS)])


def together(X: Any, y: Array, strata: Array, count: int, seed: int) -> Array:
    """Folds in which equal examples stay together, whatever their order."""
    dense = X.toarray() if issparse(X) else X
    _, first, inverse = np.unique(np.column_stack([dense, y]), axis=0, return_index=True, return_inverse=True)
    return dealt(strata[first], count, np.random.default_rng(seed))[inverse.reshape(-1)]
