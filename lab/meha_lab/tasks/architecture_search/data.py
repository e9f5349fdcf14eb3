"""Batches of images with crops, flips and cutout on their device, in an order that checkpoints can restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["JUDGED", "Batches", "Pictures", "Scaling", "chunks", "crop_and_flip", "cut_out", "precision"]


CHUNK, JUDGED = 512, 10_000
"""Number of images in one pass of an evaluation, and the largest number of training images in an evaluation."""

PADDING = 1 / 8
"""Padding on each side before a crop, as a share of the width: 4 of 32 pixels, as in DARTS."""

CUTOUT = 1 / 2
"""Side of the square that cutout erases, as a share of the width: 16 of 32 pixels, as in DARTS."""


class Pictures(NamedTuple):
    """Images (N, channels, H, W), uint8, and their labels."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device | str | None) -> Pictures:
        """Move both to a device."""
        return Pictures(self.images.to(device), self.labels.to(device))


class Scaling(NamedTuple):
    """Mean and standard deviation of each channel, by which images are standardised."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, images: Tensor) -> Scaling:
        """Return the scaling that gives these images mean 0 and standard deviation 1."""
        shades = images.transpose(0, 1).flatten(1).float() / 255
        return cls(shades.mean(dim=1)[:, None, None], shades.std(dim=1)[:, None, None])

    def __call__(self, images: Tensor) -> Tensor:
        """Scale images; on a GPU channels come last in memory, which convolutions there prefer."""
        scaled = (images.float() / 255 - self.mean) / self.deviation
        return scaled.contiguous(memory_format=torch.channels_last) if scaled.is_cuda else scaled.contiguous()


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by up to an eighth of its width, with zeros around it, and flip half of them."""
    count, _, height, width = images.shape
    device, margin = images.device, int(PADDING * width)
    rows, columns = (
        torch.arange(side, device=device) + torch.randint(2 * margin + 1, (count, 1), generator=generator, device=device)
        for side in (height, width)
    )
    flipped = torch.rand(count, 1, generator=generator, device=device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)  # reading columns backwards is a flip
    each = torch.arange(count, device=device)[:, None, None]
    # Crops and flips are one index operation for the whole batch, not a loop over images.
    return pad(images, [margin] * 4)[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def cut_out(images: Tensor, generator: torch.Generator) -> Tensor:
    """Erase a square with half the width of the image around a random pixel of each image, as far as it lies inside."""
    count, _, height, width = images.shape
    half = int(CUTOUT * width) // 2
    inside = []
    for side in (height, width):
        middle = torch.randint(side, (count, 1), generator=generator, device=images.device)
        place = torch.arange(side, device=images.device)
        inside.append((place >= middle - half) & (place < middle + half))
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return images.masked_fill(square, 0.0)  # 0 is the mean colour of scaled images


def chunks(pictures: Pictures, scaling: Scaling, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scaled images and labels of the first ``most`` pictures, in chunks."""
    for images, labels in zip(*(part[:most].split(CHUNK) for part in pictures), strict=True):
        yield scaling(images), labels


def precision(device: torch.device, half: bool) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: bfloat16 where torch finds it safe, if ``half`` and on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if half and device.type == "cuda" else nullcontext()


class Batches:
    """Endless batches from several sets of pictures, each shuffled again after every epoch.

    Args:
        sets: the sets; a batch takes ``size`` pictures from each.
        make: returns a batch, given the pictures, the number of the batch and the generator.
        seed: the seed of the order and of what ``make`` draws.

    The position can be saved and restored, so that checkpoints can resume it.
    """

    def __init__(
        self, sets: Sequence[Pictures], size: int, make: Callable[[list[Pictures], int, torch.Generator], Any], seed: int
    ) -> None:
        for pictures in sets:
            if len(pictures.labels) < size:
                raise ValueError(f"batch: must be at most {len(pictures.labels)}, the number of images, got {size}.")
        self.sets, self.size, self.make = sets, size, make
        self.generator = torch.Generator(sets[0].labels.device).manual_seed(seed)
        self.orders = [self._shuffled(pictures) for pictures in sets]
        self.places = [0] * len(sets)
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._next()

    def _shuffled(self, pictures: Pictures) -> Tensor:
        return torch.randperm(len(pictures.labels), generator=self.generator, device=pictures.labels.device)

    def _next(self) -> Any:
        drawn = []
        for i, pictures in enumerate(self.sets):
            if self.places[i] + self.size > len(self.orders[i]):  # the last, smaller batch of an epoch is left out
                self.orders[i], self.places[i] = self._shuffled(pictures), 0
            chosen = self.orders[i][self.places[i] : self.places[i] + self.size]
            self.places[i] += self.size
            drawn.append(Pictures(pictures.images[chosen], pictures.labels[chosen]))
        self.count += 1
        return self.make(drawn, self.count - 1, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sets, and the state of the generator."""
        state = {"generator": self.generator.get_state(), "places": list(self.places), "count": self.count}
        return {**state, "orders": [order.clone() for order in self.orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position."""
        self.generator.set_state(state["generator"].cpu())  # states of generators are on the CPU, also those of GPUs
        self.orders = [order.to(self.sets[0].labels.device) for order in state["orders"]]
        self.places, self.count = list(state["places"]), int(state["count"])
