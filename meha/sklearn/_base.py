"""What all estimators share: how they read data, with scikit-learn from version 1.4 on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import validation

__all__ = ["Estimator", "sample_weights"]

Array = NDArray[Any]


class Estimator(BaseEstimator):
    """An estimator of supervised learning that reads dense and sparse data."""

    def _read(self, X: Any, y: Any, **options: Any) -> tuple[Any, Array]:
        """Check the data of ``fit``, and remember the features."""
        X, y = self._validated(X, y, ensure_min_samples=2, **options)
        return X, np.asarray(y)

    def _read_again(self, X: Any) -> Any:
        """Check that the estimator is fitted, and that data have the same features."""
        validation.check_is_fitted(self)
        return self._validated(X, reset=False)

    def _validated(self, *data: Any, **options: Any) -> Any:
        """A function since scikit-learn 1.6, a method before."""
        options = {"accept_sparse": "csr", "dtype": np.float64, **options}
        if hasattr(validation, "validate_data"):
            return validation.validate_data(self, *data, **options)
        return self._validate_data(*data, **options)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags

    def _more_tags(self) -> dict[str, Any]:
        """The same before scikit-learn 1.6."""
        return {"requires_y": True}


def sample_weights(weights: ArrayLike | None, X: Any) -> Array:
    """Weights of examples as an array; 1 without any."""
    result = np.asarray(validation._check_sample_weight(weights, X, dtype=np.float64))
    if (result < 0).any():
        raise ValueError(f"sample_weight: must not be negative, got {result.min():g}; use 0 to leave an example out.")
    return result
