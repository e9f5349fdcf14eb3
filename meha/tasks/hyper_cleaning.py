"""Data hyper-cleaning: a weight for each training example with a doubtful label, learned with the help of clean ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meha.datasets import Images, load
from meha.datasets.sources import spelling
from meha.problem import Problem

__all__ = ["HyperCleaning", "Labelled", "hyper_cleaning", "mlp"]

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU, "none": nn.Identity}

SIZES = {"digits": (600, 600, 597)}
"""Where there are fewer images than the paper takes."""


class Labelled(NamedTuple):
    """Inputs, one a row, and their labels."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device | str | None) -> Labelled:
        """The same on a device."""
        return Labelled(self.inputs.to(device), self.labels.to(device))


def mlp(inputs: int, outputs: int, hidden: int = 300, activation: str = "sigmoid", seed: int = 0) -> nn.Sequential:
    """A network with one hidden layer; the seed alone decides where its weights start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, outputs))


@dataclass(frozen=True, eq=False)
class HyperCleaning:
    """Training examples, some with wrong labels, clean validation examples that judge, and test examples.

        F(x, y) = mean over validation of CE(y),    f(x, y) = mean over training of sigmoid(x_i) CE_i(y)

    with y a network and CE the cross entropy; all data in every step.

    Attributes:
        train, validation, test: the data; labels of ``train`` are those that may be wrong.
        tampered: which training labels were drawn anew.
        true_labels: what they were.
        classes: how many labels there are.
        hidden, activation: of the network.
        seed: decides where its weights start.

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
        """Both levels, on all data."""
        return Problem(upper=self._upper, lower=self._lower)

    def _upper(self, x: Tensor, y: nn.Module) -> Tensor:
        return cross_entropy(y(self.validation.inputs), self.validation.labels)

    def _lower(self, x: Tensor, y: nn.Module) -> Tensor:
        losses = cross_entropy(y(self.train.inputs), self.train.labels, reduction="none")
        return torch.dot(x.sigmoid(), losses) / len(losses)

    def start(self) -> tuple[Tensor, nn.Module]:
        """Weights of one half for all, and a fresh network."""
        inputs, labels = self.train
        network = mlp(inputs.shape[1], self.classes, self.hidden, self.activation, self.seed)
        return torch.zeros(len(labels), device=inputs.device), network.to(inputs.device)

    def batches(self) -> list[None]:
        """There are none: every step sees all data."""
        return [None]

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: nn.Module) -> dict[str, float]:
        """Accuracy on the test examples; how well the weights tell clean labels, as F1 with an example kept if x_i >= 0.

        ``f1`` takes the labels that were not drawn anew for clean, as published numbers do, ``f1 by label`` those that are
        right, by chance or not; a perfect separation by label has f1 = 0.952 where half of the labels were drawn from all ten.
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
    """2 p r / (p + r) with p the share of clean among kept, r that of kept among clean."""
    both, either = int((kept & clean).sum()), int(kept.sum()) + int(clean.sum())
    return 2 * both / either if either else 0.0


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
    """The task of the paper on images, with labels spoiled on purpose.

    Args:
        data: the name of a data set, or images.
        sizes: of training, validation and test, without replacement; by default 5000, 5000, 10000 (digits: 600, 600, 597).
        fraction: of training labels that are drawn anew.
        exact: never draw the true label. The paper's code draws from all labels, so that with ten classes a tenth of the labels
            drawn anew are right.
        hidden, activation: of the network; the paper does not say which activation.
        seed: decides which images, which labels, and where the network starts.
    """
    name = "" if isinstance(data, Images) else spelling(data)
    found = data if isinstance(data, Images) else load(name, "all" if name == "digits" else "train")
    sizes = sizes or SIZES.get(name, (5000, 5000, 10000))
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) > len(found.labels):
        raise ValueError(f"sizes: must be three positive numbers with a sum of at most {len(found.labels)}, got {sizes}.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: must be in [0, 1], got {fraction}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(found.labels), generator=generator)[: sum(sizes)]
    inputs = found.images[drawn].flatten(1).float() / 255
    parts = [Labelled(a, b) for a, b in zip(inputs.split(sizes), found.labels[drawn].split(sizes), strict=True)]
    truth, classes = parts[0].labels, int(found.labels.max()) + 1
    tampered = torch.zeros(sizes[0], dtype=torch.bool)
    tampered[torch.randperm(sizes[0], generator=generator)[: round(fraction * sizes[0])]] = True
    shift = torch.randint(1 if exact else 0, classes, (sizes[0],), generator=generator)
    labels = torch.where(tampered, (truth + shift) % classes, truth)
    train, validation, test = (part.to(device) for part in (Labelled(parts[0].inputs, labels), *parts[1:]))
    return HyperCleaning(train, validation, test, tampered.to(device), truth.to(device), classes, hidden, activation, seed)
