"""The base class of all estimators: it reads data with scikit-learn 1.4 or newer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import validation

Array = NDArray[Any]


class Estimator(BaseEstimator):
    """Base class of estimators of supervised learning that accept dense and sparse data."""

    def _read(self, X: Any, y: Any, **options: Any) -> tuple[Any, Array]:
        """Check the data of ``fit``, and store the number and names of the features."""
        X, y = self._validated(X, y, ensure_min_samples=2, **options)
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


def sample_weights(weights: ArrayLike | None, X: Any) -> Array:
    """Return the weights of examples as an array; all are 1 if there are none."""
    result = np.asarray(validation._check_sample_weight(weights, X, dtype=np.float64))
    if (result < 0).any():
        raise ValueError(f"sample_weight: must not be negative, got {result.min():g}; use 0 to leave an example out.")
    return result
