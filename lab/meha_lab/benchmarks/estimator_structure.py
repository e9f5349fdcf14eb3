"""Data without structure for the benchmark of the estimators: how often many weights are taken, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import meha
from meha.sklearn import PenalizedRegressor

Array = NDArray[Any]
EXAMPLES, FEATURES, TEST = 60, 5, 2000
FOLDS = 5
LEAST, MOST = -9.0, 3.0
"""Bounds of the log-weights."""
STRUCTURE = {
    "alike: all coefficients are 0.3": (0.3, False),
    "noise: all coefficients are 0": (0.0, False),
    "structure: one of five coefficients is not 0": (0.7, True),
}
"""Sizes of the coefficients, and whether only the first one has it."""


def structured(title: str, split: int) -> tuple[Array, Array, Array]:
    """Features of all examples, targets of those to learn from, and the truth of the others."""
    size, first = STRUCTURE[title]
    rng = np.random.default_rng([split, list(STRUCTURE).index(title)])
    X = rng.normal(size=(EXAMPLES + TEST, FEATURES))
    coefficients = size * (np.arange(FEATURES) < (1 if first else FEATURES))
    return X, X[:EXAMPLES] @ coefficients + rng.normal(size=EXAMPLES), X[EXAMPLES:] @ coefficients


def structure_methods(title: str, split: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each method on one draw."""
    X, y, truth = structured(title, split)
    return {
        'cross_validation(prior="folds")': partial(_measured, _folded, X, y, truth),
        'PenalizedRegressor(penalty="ridge")': partial(_measured, partial(_estimated, "ridge"), X, y, truth),
        "PenalizedRegressor()": partial(_measured, partial(_estimated, "auto"), X, y, truth),
    }


def _measured(fit: Callable[[Array, Array], tuple[Array, Array, bool]], X: Array, y: Array, truth: Array) -> dict[str, Any]:
    """Test errors with many weights allowed and with one, relative to noise of variance 1."""
    start = time.process_time()
    many, one, left = fit(X[:EXAMPLES], y)
    seconds = time.process_time() - start
    errors = [1 + float(np.mean((X[EXAMPLES:] @ b - truth) ** 2)) for b in (many, one)]
    return {"error": errors[0], "single": errors[1], "left": left, "seconds": seconds}


def _folded(X: Array, y: Array) -> tuple[Array, Array, bool]:
    A, b = torch.from_numpy(X), torch.from_numpy(y)

    def loss(x: Any, w: Any, rows: Any) -> Any:
        return (A[rows] @ w - b[rows]).square().mean() / 2

    cv = meha.cross_validation(
        lambda x, w, rows: loss(x, w, rows) + 0.5 * (x.exp() * w.square()).sum(),
        loss,
        examples=len(y),
        folds=FOLDS,
        x_set=meha.sets.Box(LEAST, MOST),
        prior="folds",
    )
    x0, w0 = torch.full((FEATURES,), -2.0, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    result, single = cv.solve(x0, w0), replace(cv, prior=float("inf")).solve(x0, w0)
    return result.y.numpy(), single.y.numpy(), bool(np.isfinite(result.strength))


def _estimated(penalty: str, X: Array, y: Array) -> tuple[Array, Array, bool]:
    models = [PenalizedRegressor(penalty=penalty, weights=weights).fit(X, y) for weights in ("auto", "one")]
    return models[0].coef_, models[1].coef_, len(np.unique(models[0].penalties_)) > 1
