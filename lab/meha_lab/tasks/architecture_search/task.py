"""ArchitectureSearch: the bilevel task of an architecture search, with its start, batches and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from meha.problem.problem import Problem
from meha.tensors.checks import check_count
from meha_lab.datasets import cifar10, digits
from meha_lab.tasks.architecture_search.data import JUDGED, Batches, Pictures, Scaling, chunks, crop_and_flip, precision
from meha_lab.tasks.architecture_search.genotype import Genotype, SearchSpace, edge_weights
from meha_lab.tasks.architecture_search.networks import KINDS, Kept, SuperNetwork, check_kept, edge_factors
from meha_lab.tasks.architecture_search.operations import Style
from meha_lab.tasks.architecture_search.training import FinalTraining

__all__ = ["ArchitectureSearch", "SearchBatch", "architecture_search", "entropy"]


SPREAD = 1e-3
"""Standard deviation of the architecture parameters at the start, as in DARTS."""


class SearchBatch(NamedTuple):
    """Scaled images and labels of both levels, and the noise and rate of the dropout of skip connections, if any."""

    train: Tensor
    train_labels: Tensor
    validation: Tensor
    validation_labels: Tensor
    noise: Tensor | None
    dropout: Tensor | None


@dataclass(frozen=True, eq=False)
class ArchitectureSearch:
    """Architecture search task: x are the weights of the operations of each edge, y the super-network.

        F(x, y) = CE of the validation images,    f(x, y) = CE of the training images

    Attributes:
        train, validation: the images of the lower and of the upper level.
        test: the images by which the final network is judged.
        classes: number of classes.
        space: the operations of an edge, and the nodes of a cell.
        channels, cells: of the super-network.
        batch: images of each level in a batch.
        activation: "relu" or "swish".
        partial: K of PC-DARTS: 1/K of the channels goes through the operations; 1 for all.
        edge_normalisation: whether x has a parameter for each edge as well (PC-DARTS).
        kept: the operations that remain on each edge (P-DARTS); all by default.
        skip_dropout: rate at which skip connections are dropped for an example (P-DARTS); it falls to 0 in ``steps`` batches.
        steps: see ``skip_dropout``.
        most_skips: upper bound on the skip connections of the derived normal cell (P-DARTS).
        half: compute in bfloat16 where torch finds it safe; on a GPU only.
        seed: the seed of the start and the batches.

    >>> task = architecture_search("digits", channels=4, cells=1, batch=8)
    >>> x, y = task.start()
    >>> {name: tuple(part.shape) for name, part in x.items()}
    {'normal': (14, 8), 'reduction': (14, 8)}
    >>> batch = next(iter(task.batches()))
    >>> task.problem.lower(x, y, batch).shape, task.genotype(x).nodes
    (torch.Size([]), 4)
    """

    train: Pictures
    validation: Pictures
    test: Pictures
    classes: int = 10
    space: SearchSpace = field(default_factory=SearchSpace)
    channels: int = 16
    cells: int = 3
    batch: int = 64
    activation: Literal["relu", "swish"] = "relu"
    partial: int = 1
    edge_normalisation: bool = False
    kept: Kept | None = None
    skip_dropout: float = 0.0
    steps: int = 1
    most_skips: int | None = None
    half: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("channels", "cells", "batch", "partial", "steps"):
            check_count(name, getattr(self, name))
        Style(self.activation)
        if self.channels % self.partial:
            raise ValueError(f"channels: must be a multiple of partial = {self.partial}, got {self.channels}.")
        check_kept(self.space, self.remaining)
        if not 0 <= self.skip_dropout < 1:
            raise ValueError(f"skip_dropout: must be at least 0 and below 1, got {self.skip_dropout}.")
        if self.train.images.shape[-1] % 4 or self.train.images.shape[-2] % 4:
            sides = "x".join(map(str, self.train.images.shape[-2:]))
            raise ValueError(f"train: two cells halve the images, so that their sides must be multiples of 4, got {sides}.")

    @property
    def remaining(self) -> Kept:
        """Return the operations of each edge, for "normal" and "reduction"."""
        return self.kept or dict.fromkeys(KINDS, self.space.all_kept())

    @cached_property
    def scaling(self) -> Scaling:
        """Return the scaling of the images, computed from the training images."""
        return Scaling.of(self.train.images)

    @property
    def device(self) -> torch.device:
        """Return the device of the images."""
        return self.train.images.device

    @property
    def problem(self) -> Problem:
        """Return the bilevel problem on batches of :class:`SearchBatch`."""
        return Problem(upper=self._upper, lower=self._lower)

    def _upper(self, x: Mapping[str, Tensor], y: SuperNetwork, batch: SearchBatch) -> Tensor:
        with precision(self.device, self.half):
            scores = y(batch.validation, x, batch.noise, batch.dropout)
        return cross_entropy(scores.to(batch.validation.dtype), batch.validation_labels)  # the loss needs full precision

    def _lower(self, x: Mapping[str, Tensor], y: SuperNetwork, batch: SearchBatch) -> Tensor:
        with precision(self.device, self.half):
            scores = y(batch.train, x, batch.noise, batch.dropout)
        return cross_entropy(scores.to(batch.train.dtype), batch.train_labels)

    def start(self) -> tuple[dict[str, Tensor], SuperNetwork]:
        """Return architecture parameters near zero, and a new super-network."""
        kept, generator = self.remaining, torch.Generator().manual_seed(self.seed)  # on the CPU: the same start on all devices
        x = {kind: SPREAD * torch.randn(len(kept[kind]), len(kept[kind][0]), generator=generator) for kind in KINDS}
        if self.edge_normalisation:
            x |= {f"{kind} edges": SPREAD * torch.randn(len(kept[kind]), generator=generator) for kind in KINDS}
        with torch.random.fork_rng(devices=[]):  # restores the random state of the caller
            torch.manual_seed(self.seed)
            network = SuperNetwork(
                self.space,
                inputs=self.train.images.shape[1],
                classes=self.classes,
                channels=self.channels,
                cells=self.cells,
                activation=self.activation,
                partial=self.partial,
                kept=self.kept,
            )
        return {name: part.to(self.device) for name, part in x.items()}, network.to(self.device)

    def batches(self) -> Batches:
        """Return endless batches of cropped and flipped images."""

        def make(drawn: list[Pictures], count: int, generator: torch.Generator) -> SearchBatch:
            train, validation = (self.scaling(crop_and_flip(pictures.images, generator)) for pictures in drawn)
            noise = dropout = None
            if self.skip_dropout:
                shape = (self.batch, self.cells, self.space.edges)
                noise = torch.rand(shape, generator=generator, device=self.device)
                dropout = torch.tensor(self.skip_dropout * max(0.0, 1 - count / self.steps), device=self.device)
            return SearchBatch(train, drawn[0].labels, validation, drawn[1].labels, noise, dropout)

        return Batches([self.train, self.validation], self.batch, make, self.seed)

    @torch.no_grad()
    def evaluate(self, x: Mapping[str, Tensor], y: SuperNetwork) -> dict[str, float]:
        """Return accuracies, the loss on the images of the upper level, and the mean entropy of all edges (in nats).

        At most 10,000 images of each level are used, with the statistics of their batches.
        """
        _, train = self._judge(x, y, self.train)
        loss, validation = self._judge(x, y, self.validation)
        return {"train accuracy": train, "accuracy": validation, "validation loss": loss, "entropy": entropy(x)}

    def _judge(self, x: Mapping[str, Tensor], y: SuperNetwork, pictures: Pictures) -> tuple[float, float]:
        total = right = torch.zeros((), device=self.device)  # sums on the device: no wait for each chunk
        count = 0
        for images, labels in chunks(pictures, self.scaling, JUDGED):
            with precision(self.device, self.half):
                scores = y(images, x).float()
            total = total + cross_entropy(scores, labels, reduction="sum")
            right = right + (scores.argmax(dim=1) == labels).sum()
            count += len(labels)
        return float(total) / count, float(right) / count

    def genotype(self, x: Mapping[str, Tensor]) -> Genotype:
        """Derive the cells from architecture parameters."""
        cells = {}
        for kind in KINDS:
            edges = x.get(f"{kind} edges")
            sizes = [2 + node for node in range(self.space.nodes)]
            weights = edge_weights(x[kind], self.remaining[kind], None if edges is None else edge_factors(edges, sizes))
            # P-DARTS limits the skip connections of normal cells only.
            cells[kind] = self.space.derive(weights, self.most_skips if kind == "normal" else None)
        return Genotype(**cells)

    def pruned(self, x: Mapping[str, Tensor], operations: int) -> Kept:
        """Return the given number of operations of largest weight on each edge, in the order of the space."""
        check_count("operations", operations)
        kept = {}
        for kind in KINDS:
            rows = [
                dict(zip(names, row, strict=True)) for names, row in zip(self.remaining[kind], x[kind].tolist(), strict=True)
            ]
            best = [sorted(row, key=lambda name: -row[name])[:operations] for row in rows]
            kept[kind] = tuple(tuple(name for name in self.space.operations if name in names) for names in best)
        return kept

    def final(
        self, genotype: Genotype, *, epochs: float = 600, channels: int = 36, cells: int = 8, batch: int = 96, **options: Any
    ) -> FinalTraining:
        """Return the training of a genotype's network on the images of both levels.

        Args:
            genotype: the cells.
            epochs: passes over the images.
            channels, cells, batch: of the final network.
            options: further attributes of :class:`FinalTraining`.
        """
        both = Pictures(*(torch.cat(pair) for pair in zip(self.train, self.validation, strict=True)))
        return FinalTraining(
            genotype,
            both,
            self.test,
            self.classes,
            self.space,
            channels,
            cells,
            batch,
            epochs,
            self.activation,
            half=self.half,
            seed=self.seed,
            **options,
        )


def entropy(x: Mapping[str, Tensor]) -> float:
    """Return the mean over all edges of the entropy of their mixture, in nats.

    >>> round(entropy({"normal": torch.zeros(14, 8), "reduction": torch.zeros(14, 8)}), 4)  # log 8
    2.0794
    """
    rows = [x[kind].detach().double().log_softmax(dim=1) for kind in KINDS]
    return float(torch.cat([-(row.exp() * row).sum(dim=1) for row in rows]).mean())


def architecture_search(
    data: Literal["cifar10", "digits"] = "cifar10",
    *,
    size: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> ArchitectureSearch:
    """Build an architecture search on images; half of the training images go to each level.

    Args:
        data: "cifar10" (:func:`meha_lab.datasets.cifar10`), or "digits", 8 x 8 and grey, of which a third is for the test.
        size: number of training images for both levels together; all by default.
        seed: the seed of the split into levels, of the start and of the batches.
        device: the device of the images.
        options: further attributes of :class:`ArchitectureSearch`.

    Returns:
        The task, with its problem, its start and its batches.
    """
    if data == "cifar10":
        training, test = (Pictures(part.images, part.labels) for part in (cifar10("train"), cifar10("test")))
    elif data == "digits":
        data_set = digits()
        images = data_set.images[:, None]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the same test images for all seeds
        test, training = (
            Pictures(images[part], data_set.labels[part]) for part in (order[: len(order) // 3], order[len(order) // 3 :])
        )
    else:
        raise ValueError(f"data: must be 'cifar10' or 'digits', got {data!r}.")
    count = len(training.labels) if size is None else size
    if not 2 <= count <= len(training.labels):
        raise ValueError(f"size: must be from 2 to {len(training.labels)}, the number of training images, got {size}.")
    order = torch.randperm(len(training.labels), generator=torch.Generator().manual_seed(seed))[:count]
    lower, upper = (Pictures(training.images[part], training.labels[part]).to(device) for part in order.chunk(2))
    return ArchitectureSearch(lower, upper, test.to(device), seed=seed, **options)
