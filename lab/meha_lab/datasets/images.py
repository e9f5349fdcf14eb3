"""Labelled images: MNIST and Fashion-MNIST from IDX files, and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meha_lab.datasets.archives import check_file, open_packed
from meha_lab.datasets.fetch import find
from meha_lab.datasets.sources import SOURCES, Folder, Source, damaged

__all__ = ["Images", "Part", "digits", "fashion_mnist", "mnist", "pieces_of"]


Part = Literal["train", "test", "all"]

SIDE = 28
COUNTS = {"train": 60_000, "test": 10_000}
PREFIXES = {"train": "train", "test": "t10k"}
NUMERALS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images with one label each.

    Args:
        images: uint8. Grey: (n, height, width), 0 is background, 255 is ink. Colour: (n, 3, height, width), red, green, blue.
        labels: (n,), int64; indices into ``classes``.
        classes: the names of the labels.

    >>> data = digits()
    >>> data.images.shape, data.labels[:5], data.classes[4]
    (torch.Size([1797, 8, 8]), tensor([0, 1, 2, 3, 4]), '4')
    >>> Images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 0]), ("cat", "dog"))
    Images(2 of 3x32x32, 2 classes)
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Images({len(self)} of {'x'.join(map(str, self.images.shape[1:]))}, {len(self.classes)} classes)"


def mnist(part: Part = "train", folder: Folder | None = None, download: bool = False) -> Images:
    """Load MNIST (LeCun, Cortes, Burges 1998): 28x28 handwritten digits, 60,000 for training and 10,000 for the test.

    Args:
        part: "train", "test", or "all" for both, in this order.
        folder: the folder of the files, or of a subfolder ``mnist`` with them; by default ``MEHA_DATA``, then the cache.
        download: download missing files (into ``folder``, or the cache).

    Returns:
        The images of the part that was asked for, with their labels.

    The files are the published ones, ``train-images-idx3-ubyte.gz`` and so on, or unpacked without ``.gz``.

    >>> mnist("test", folder="/nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: mnist: t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz (or without .gz) not found in ...
    """
    return _read(SOURCES["mnist"], NUMERALS, part, folder, download)


def fashion_mnist(part: Part = "train", folder: Folder | None = None, download: bool = False) -> Images:
    """Load Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): images of clothing, with the sizes and files of :func:`mnist`.

    Args:
        part: "train", "test", or "all" for both, in this order.
        folder: the folder of the files, or of a subfolder ``fashion_mnist``; by default ``MEHA_DATA``, then the cache.
        download: download missing files (into ``folder``, or the cache).

    Returns:
        The images of the part that was asked for, with their labels.

    >>> fashion_mnist("validation")
    Traceback (most recent call last):
    ValueError: part: must be 'train', 'test' or 'all', got 'validation'.
    """
    return _read(SOURCES["fashion-mnist"], GARMENTS, part, folder, download)


def digits() -> Images:
    """Load the 1797 handwritten 8x8 digits of scikit-learn; their levels 0 to 16 become 0 to 255.

    Needs scikit-learn (``pip install scikit-learn``), but no files.

    >>> digits().images[0, 0]
    tensor([  0,   0,  80, 207, 143,  16,   0,   0], dtype=torch.uint8)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits() needs scikit-learn; install it with: pip install scikit-learn") from error
    data = load_digits()
    levels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return Images(torch.from_numpy(levels), torch.from_numpy(data.target.astype(np.int64)), NUMERALS)


def pieces_of(part: Part) -> tuple[str, ...]:
    """Return the pieces of a part, in order.

    >>> pieces_of("all")
    ('train', 'test')
    """
    pieces = {"train": ("train",), "test": ("test",), "all": ("train", "test")}
    if part not in pieces:
        raise ValueError(f"part: must be 'train', 'test' or 'all', got {part!r}.")
    return pieces[part]


def _read(source: Source, classes: tuple[str, ...], part: Part, folder: Folder | None, download: bool) -> Images:
    images, labels = [], []
    for piece in pieces_of(part):
        prefix, count = PREFIXES[piece], COUNTS[piece]
        names = [f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"]
        image_path, label_path = find(source, names, folder, download)
        images.append(_read_idx(image_path, (count, SIDE, SIDE), source))
        labels.append(_read_idx(label_path, (count,), source))
        if labels[-1].max() >= len(classes):
            raise damaged(label_path, source, f"must have labels up to {len(classes) - 1}, got {labels[-1].max()}")
    pixels, positions = np.concatenate(images), np.concatenate(labels).astype(np.int64)
    return Images(torch.from_numpy(pixels), torch.from_numpy(positions), classes)


def _read_idx(path: Path, shape: tuple[int, ...], source: Source) -> NDArray[np.uint8]:
    """Read an IDX file, packed or not, that must have this shape; its header does not decide how much is allocated."""
    check_file(path, source)
    magic = 0x800 + len(shape)  # 8: unsigned bytes
    data = np.empty(shape, np.uint8)
    view, done = data.reshape(-1).data, 0
    try:
        with open_packed(path) as stream:
            header = stream.read(4 * (1 + len(shape)))
            if header[:4] != struct.pack(">I", magic):
                raise damaged(path, source, f"must start with the bytes {magic:08x}, got {header[:4].hex() or 'none'}")
            if header[4:] != struct.pack(f">{len(shape)}I", *shape):
                stated = np.frombuffer(header[4 : len(header) // 4 * 4], ">u4").tolist()
                raise damaged(path, source, f"must have shape {shape}, got {tuple(stated)} in its header")
            while done < len(view) and (count := stream.readinto(view[done:])):
                done += count
            more = stream.read(1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, source, f"cannot be unpacked ({error})") from error
    if done < len(view) or more:
        raise damaged(path, source, f"must have {len(view):,} bytes after its header, got {'more' if more else f'{done:,}'}")
    return data
