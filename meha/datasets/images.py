"""Labelled images: MNIST and Fashion-MNIST from IDX files, and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meha.datasets.fetch import find
from meha.datasets.sources import SOURCES, Folder, Source, damaged, spelling

__all__ = ["Images", "Part", "digits", "fashion_mnist", "load", "mnist"]

Part = Literal["train", "test", "all"]

SIDE = 28
COUNTS = {"train": 60_000, "test": 10_000}
PREFIXES = {"train": "train", "test": "t10k"}
NUMERALS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Grey images with one label each.

    Args:
        images: (n, height, width), uint8; 0 is background, 255 is ink.
        labels: (n,), int64; indices into ``classes``.
        classes: the names of the labels.

    >>> digits = load("digits")
    >>> digits.images.shape, digits.labels[:5], digits.classes[4]
    (torch.Size([1797, 8, 8]), tensor([0, 1, 2, 3, 4]), '4')
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        count, height, width = self.images.shape
        return f"Images({count} of {height}x{width}, {len(self.classes)} classes)"


def mnist(part: Part = "train", folder: Folder | None = None, download: bool = False) -> Images:
    """Load MNIST (LeCun, Cortes, Burges 1998): 28x28 handwritten digits, 60,000 for training and 10,000 for the test.

    Args:
        part: "train", "test", or "all" for both, in this order.
        folder: the folder of the files, or of a subfolder ``mnist`` with them; by default ``MEHA_DATA``, then the cache.
        download: download missing files (into ``folder``, or the cache).

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

    >>> fashion_mnist("validation")
    Traceback (most recent call last):
    ValueError: part: must be 'train', 'test' or 'all', got 'validation'.
    """
    return _read(SOURCES["fashion-mnist"], GARMENTS, part, folder, download)


def digits() -> Images:
    """Load the 1797 handwritten 8x8 digits of scikit-learn; their levels 0 to 16 become 0 to 255.

    Needs scikit-learn (``pip install "meha[data]"``), but no files.

    >>> digits().images[0, 0]
    tensor([  0,   0,  80, 207, 143,  16,   0,   0], dtype=torch.uint8)
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError('digits() needs scikit-learn; install it with: pip install "meha[data]"') from error
    data = load_digits()
    levels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return Images(torch.from_numpy(levels), torch.from_numpy(data.target.astype(np.int64)), NUMERALS)


def load(name: str, part: Part = "all", folder: Folder | None = None, download: bool = False) -> Images:
    """Load a data set by name: :func:`digits`, :func:`mnist` or :func:`fashion_mnist`.

    Args:
        name: "digits", "mnist" or "fashion-mnist".
        part: "train", "test" or "all"; "digits" has only "all".
        folder: see :func:`mnist`; "digits" does not need it.
        download: see :func:`mnist`; "digits" does not need it.

    >>> load("digits")
    Images(1797 of 8x8, 10 classes)
    >>> load("cifar")
    Traceback (most recent call last):
    ValueError: name: must be one of 'digits', 'mnist', 'fashion-mnist', got 'cifar'.
    """
    readers = {"mnist": mnist, "fashion-mnist": fashion_mnist}
    known = spelling(name)
    if known == "digits":
        if part != "all":
            raise ValueError(f"part: must be 'all' for 'digits', got {part!r}.")
        return digits()
    if known not in readers:
        raise ValueError(f"name: must be one of {', '.join(map(repr, ('digits', *readers)))}, got {name!r}.")
    return readers[known](part, folder, download)


def _read(source: Source, classes: tuple[str, ...], part: Part, folder: Folder | None, download: bool) -> Images:
    if part not in (*COUNTS, "all"):
        raise ValueError(f"part: must be 'train', 'test' or 'all', got {part!r}.")
    images, labels = [], []
    for piece in COUNTS if part == "all" else (part,):
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
    if not path.is_file():
        raise damaged(path, source, "is a folder or a device, not a file")
    magic = 0x800 + len(shape)  # 8: unsigned bytes
    data = np.empty(shape, np.uint8)
    view, done = data.reshape(-1).data, 0
    try:
        with _open(path) as stream:
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


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file, and unpack it if it is packed, whatever its name."""
    file = path.open("rb")
    packed = file.peek(2)[:2] == b"\x1f\x8b"
    if not packed:
        return file
    file.close()
    return gzip.open(path)
