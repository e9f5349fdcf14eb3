"""Extrapolation of a sequence to its limit: Richardson's from two terms, and Anderson's from the last iterates of a map."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from meha.numerics.tolerances import TIGHT

T = TypeVar("T", float, Tensor)


def richardson(new: T, old: T, ratio: float) -> T:
    """Return the limit of a sequence whose error was divided by ``ratio`` between ``old`` and ``new``.

    >>> richardson(1.25, 2.0, 4.0)  # of 1 + 1/c, at c = 4 and c = 1
    1.0
    """
    return new + (new - old) / (ratio - 1)


def combine(images: Tensor, residuals: Tensor) -> Tensor:
    """Return the combination of images of a map whose residual is smallest: Anderson acceleration (1965).

    Args:
        images: T(z) for some points z, a row each, the latest last.
        residuals: T(z) - z, measured in any metric.

    The map z <- A z + b is solved by as many images as A has distinct eigenvalues, and one more:

    >>> A, b = torch.tensor([0.9, 0.5, -0.2], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    >>> z = torch.tensor([[3.0, 1.0, 2.0], [1.0, 4.0, 1.0], [5.0, 9.0, 2.0], [6.0, 5.0, 3.0]], dtype=torch.float64)
    >>> combine(A * z + b, A * z + b - z)
    tensor([10.0000,  2.0000,  0.8333], dtype=torch.float64)
    """
    steps = residuals.diff(dim=0).double()  # the normal equations below square the condition number
    lengths = steps.norm(dim=1)
    kept = lengths > 0  # a point that occurs twice gives no difference
    steps = steps[kept] / lengths[kept, None]  # of one length, or the ridge would count for small ones only
    gram = steps @ steps.T
    gram.diagonal().add_(torch.finfo(gram.dtype).eps ** TIGHT)  # near convergence, the columns become dependent
    weights = torch.linalg.solve(gram, -(steps @ residuals[-1].double())) / lengths[kept]
    return images[-1] + weights.to(images) @ images.diff(dim=0)[kept]
