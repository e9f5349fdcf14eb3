"""How examples that were left out judge a model."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import one_hot

from meha.losses import LinearModelLoss, Logistic, Softmax

__all__ = ["Judge"]

IMAGINED = 0.3
"""Examples that are imagined to have another class than the model would say."""


class Judge:
    """Losses of examples left out; with classes, each example counts for a small part as one of the other classes.

    Where classes are (nearly) separable, the examples at hand favour models that are ever surer of themselves, and the first
    example on the wrong side that was not at hand costs more than all others. Here a fraction of one example is imagined to be
    there, spread over all: l_i + share * (score of the own class - mean score of the others).

    Args:
        loss: of the model.
        weights: of the examples, (n,).

    >>> import torch
    >>> A, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    >>> judge = Judge(Logistic(A, labels), torch.ones(2, dtype=torch.float64))
    >>> right, sure = torch.tensor([-3.0, 3.0]).double(), torch.tensor([-30.0, 30.0]).double()
    >>> bool(judge.losses(right).sum() < judge.losses(sure).sum())
    True
    """

    def __init__(self, loss: LinearModelLoss, weights: Tensor) -> None:
        self.loss = loss
        examples = weights.sum().square() / weights.square().sum()
        self.towards: Tensor | None = None
        if isinstance(loss, Logistic):
            self.towards = loss.signs
        elif isinstance(loss, Softmax):
            own = one_hot(loss.labels, loss.shape[1]).to(weights)
            self.towards = own - (1 - own) / (loss.shape[1] - 1)
        if self.towards is not None:
            self.towards = self.towards * IMAGINED / (examples + IMAGINED)

    def losses(self, scores: Tensor) -> Tensor:
        """The loss of each example at scores (..., n), or (..., n, outputs)."""
        result = self.loss.losses(scores)
        if self.towards is None:
            return result
        margins = self.towards * scores
        return result + (margins if self.towards.ndim == 1 else margins.sum(dim=-1))

    def slopes(self, scores: Tensor) -> Tensor:
        """Derivatives of :meth:`losses` by the scores."""
        result = self.loss.slopes(scores)
        return result if self.towards is None else result + self.towards
