"""Data hyper-cleaning: learn a weight for each training example from clean validation examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meha.problem.problem import Problem
from meha_lab.datasets import Images, load
from meha_lab.datasets.sources import spelling

__all__ = ["HyperCleaning", "Labelled", "hyper_cleaning", "mlp"]


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "none": nn.Identity}

SIZES = {"digits": (600, 600, 597)}
"""Sizes of training, validation and test data for data sets with fewer images than in the paper."""


class Labelled(NamedTuple):
    """Inputs, one per row, and their labels."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device | str | None) -> Labelled:
        """Move both to a device."""
        return Labelled(self.inputs.to(device), self.labels.to(device))


def mlp(inputs: int, outputs: int, hidden: int = 300, activation: str = "sigmoid", seed: int = 0) -> nn.Sequential:
    """Build a network with one hidden layer; its initial weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):  # restores the random state of the caller
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, outputs))


@dataclass(frozen=True, eq=False)
class HyperCleaning:
    """Hyper-cleaning task: training examples with some wrong labels, clean validation examples, and test examples.

        F(x, y) = mean over validation of CE(y),    f(x, y) = mean over training of sigmoid(x_i) CE_i(y)

    where y is a network and CE the cross entropy. Every step uses all data.

    Attributes:
        train: the training data; their labels may be wrong.
        validation: the clean validation data.
        test: the test data.
        tampered: a mask of the training labels that were redrawn.
        true_labels: the training labels before that.
        classes: the number of classes.
        hidden: the number of hidden units of the network.
        activation: the activation of the network.
        seed: the seed of the initial weights of the network.

    >>> task = hyper_cleaning("digits", seed=0)
    >>> len(task.train.labels), int(task.tampered.sum())
    (600, 300)
    >>> x, y = task.start()
    >>> print({name: round(value, 3) for name, value in task.evaluate(x, y).items() if name != "validation loss"})
    {'accuracy': 0.037, 'f1': 0.667, 'f1 by label': 0.701, 'mean |x|': 0.0}
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    tampered: Tensor
    true_labels: Tensor
    classes: int = 10
    hidden: int = 300
    activation: str = "sigmoid"
    seed: int = 0

    @property
    def problem(self) -> Problem:
        """Return the bilevel problem on all data."""
        return Problem(upper=self._upper, lower=self._lower)

    def _upper(self, x: Tensor, y: nn.Module) -> Tensor:
        return cross_entropy(y(self.validation.inputs), self.validation.labels)

    def _lower(self, x: Tensor, y: nn.Module) -> Tensor:
        losses = cross_entropy(y(self.train.inputs), self.train.labels, reduction="none")
        return torch.dot(x.sigmoid(), losses) / len(losses)  # a mean over all examples: removing some lowers f

    def start(self) -> tuple[Tensor, nn.Module]:
        """Return x with weight 1/2 for every example, and a new network."""
        inputs, labels = self.train
        network = mlp(inputs.shape[1], self.classes, self.hidden, self.activation, self.seed)
        return torch.zeros(len(labels), device=inputs.device), network.to(inputs.device)

    def batches(self) -> list[None]:
        """Return the only batch, None: every step uses all data."""
        return [None]

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: nn.Module) -> dict[str, float]:
        """Return the test accuracy, and F1 scores for finding the clean labels by x_i >= 0.

        ``f1`` counts the labels that were not redrawn as clean, like published results; ``f1 by label`` counts those that are
        right, by chance or not. A perfect separation by label has f1 = 0.952 if half of the labels were redrawn from all ten.
        """
        kept = x >= 0
        right = self.train.labels == self.true_labels
        return {
            "accuracy": float((y(self.test.inputs).argmax(dim=1) == self.test.labels).double().mean()),
            "f1": _f1(kept, ~self.tampered),
            "f1 by label": _f1(kept, right),
            "validation loss": float(self._upper(x, y)),
            "mean |x|": float(x.abs().mean()),
        }


def _f1(kept: Tensor, clean: Tensor) -> float:
    """Return the F1 score 2 p r / (p + r) with p the share of clean among kept, and r that of kept among clean."""
    both, either = int((kept & clean).sum()), int(kept.sum()) + int(clean.sum())
    return 2 * both / either if either else 0.0  # the same as 2 p r / (p + r), without 0 / 0


def hyper_cleaning(
    data: Literal["digits", "mnist", "fashion-mnist"] | Images = "digits",
    *,
    sizes: tuple[int, int, int] | None = None,
    fraction: float = 0.5,
    exact: bool = False,
    hidden: int = 300,
    activation: Literal["sigmoid", "relu", "none"] = "sigmoid",
    seed: int = 0,
    device: torch.device | str | None = None,
) -> HyperCleaning:
    """Build the paper's hyper-cleaning task from images, with labels made wrong on purpose.

    Args:
        data: the name of a data set, or images.
        sizes: of training, validation and test data; by default 5000, 5000, 10000 (digits: 600, 600, 597).
        fraction: the share of training labels to redraw.
        exact: never redraw the true label. The paper's code draws from all labels, so a tenth of the redrawn labels are right
            with ten classes.
        hidden: the number of hidden units of the network.
        activation: the activation of the network; the paper does not state it.
        seed: the seed of the images, the labels and the initial network.
        device: the device of the data.

    Returns:
        The task, with its problem, its start and its evaluation.
    """
    name = "" if isinstance(data, Images) else spelling(data)
    images = data if isinstance(data, Images) else load(name, "all" if name == "digits" else "train")
    sizes = sizes or SIZES.get(name, (5000, 5000, 10000))
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) > len(images.labels):
        raise ValueError(f"sizes: must be three positive numbers with a sum of at most {len(images.labels)}, got {sizes}.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: must be in [0, 1], got {fraction}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(images.labels), generator=generator)[: sum(sizes)]
    inputs = images.images[drawn].flatten(1).float() / 255
    parts = [Labelled(a, b) for a, b in zip(inputs.split(sizes), images.labels[drawn].split(sizes), strict=True)]
    truth, classes = parts[0].labels, int(images.labels.max()) + 1
    tampered = torch.zeros(sizes[0], dtype=torch.bool)
    tampered[torch.randperm(sizes[0], generator=generator)[: round(fraction * sizes[0])]] = True
    shift = torch.randint(1 if exact else 0, classes, (sizes[0],), generator=generator)  # a shift of 0 keeps the label
    labels = torch.where(tampered, (truth + shift) % classes, truth)
    train, validation, test = (part.to(device) for part in (Labelled(parts[0].inputs, labels), *parts[1:]))
    return HyperCleaning(train, validation, test, tampered.to(device), truth.to(device), classes, hidden, activation, seed)
