"""Omniglot: 1623 handwritten characters of 50 alphabets, 20 drawings each."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meha_lab.datasets.archives import check_file
from meha_lab.datasets.decoded import Arrays, decoded_once
from meha_lab.datasets.fetch import find
from meha_lab.datasets.sources import SOURCES, Folder, damaged

__all__ = ["Omniglot", "omniglot"]


CHARACTERS = {"images_background.zip": 964, "images_evaluation.zip": 659}
DRAWINGS = 20
SIDE = 105
LARGEST = 2**16  # bytes of one drawing; the published ones have a few hundred

Drawings = dict[tuple[str, str], list[zipfile.ZipInfo]]
"""The drawings in an archive, in order, by alphabet and character."""


@dataclass(frozen=True, eq=False, repr=False)
class Omniglot:
    """Characters, each drawn by 20 people.

    Args:
        images: (1623 characters, 20 drawings, size, size), uint8; 0 is paper, 255 is ink.
        alphabets: the alphabet of each character, such as "Greek".
        characters: the name of each character within its alphabet, such as "character01".
        background: (1623,), bool; True for the published training characters (``images_background``, 964 from 30 alphabets),
            False for ``images_evaluation`` (659 from 20 alphabets).

    >>> Omniglot(torch.zeros(1, 20, 28, 28, dtype=torch.uint8), ("Greek",), ("character01",), torch.tensor([True]))
    Omniglot(1 characters, 20 drawings of 28x28 each)
    """

    images: Tensor
    alphabets: tuple[str, ...]
    characters: tuple[str, ...]
    background: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        count, drawings, height, width = self.images.shape
        return f"Omniglot({count} characters, {drawings} drawings of {height}x{width} each)"


def omniglot(folder: Folder | None = None, download: bool = False, size: int = 28) -> Omniglot:
    """Load Omniglot (Lake, Salakhutdinov, Tenenbaum 2015) from ``images_background.zip`` and ``images_evaluation.zip``.

    The black and white 105x105 drawings are converted to grey and resized with Pillow's Lanczos filter, as is usual since MAML.
    This takes some seconds for all 32,460, so the result is cached, one file per size; a damaged or outdated file is made
    again. Needs Pillow: ``pip install pillow``.

    Args:
        folder: the folder of the files, or of a subfolder ``omniglot`` with them; by default ``MEHA_DATA``, then the cache.
        download: download missing files (into ``folder``, or the cache).
        size: height and width of the images, 1 to 105 pixels.

    Returns:
        The characters, with the alphabet of each.

    >>> omniglot(size=0)
    Traceback (most recent call last):
    ValueError: size: must be a whole number from 1 to 105, got 0.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= SIDE:
        raise ValueError(f"size: must be a whole number from 1 to {SIDE}, got {size!r}.")
    source = SOURCES["omniglot"]
    paths = find(source, list(CHARACTERS), folder, download)
    archives = {path: _drawings(path, count) for path, count in zip(paths, CHARACTERS.values(), strict=True)}
    names = [name for drawings in archives.values() for name in drawings]

    def decode() -> Arrays:
        return {"images": np.concatenate([_decode(path, drawings, size) for path, drawings in archives.items()])}

    shapes = {"images": (len(names), DRAWINGS, size, size)}
    images = decoded_once(source, f"drawings-{size}.npz", _key(archives), shapes, decode, compress=True)["images"]
    first = next(iter(archives.values()))
    return Omniglot(
        torch.from_numpy(images),
        tuple(alphabet for alphabet, _ in names),
        tuple(character for _, character in names),
        torch.arange(len(names)) < len(first),
    )


def _drawings(path: Path, count: int) -> Drawings:
    """List the archive by alphabet and character; it must have ``count`` characters of 20 drawings."""
    source = SOURCES["omniglot"]
    check_file(path, source)
    with path.open("rb") as file:
        try:
            entries = sorted(zipfile.ZipFile(file).infolist(), key=lambda entry: entry.filename)
        except Exception as error:  # zipfile raises many kinds of errors
            raise damaged(path, source, f"is not a readable zip archive ({error})") from error
    drawings: Drawings = {}
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts  # images_background, Greek, character01, 0394_01.png
        if len(parts) < 3 or parts[0] == "__MACOSX" or not parts[-1].endswith(".png"):
            continue
        if entry.file_size > LARGEST:
            size = f"{entry.file_size:,} bytes"
            raise damaged(path, source, f"its drawing {entry.filename} has {size}, more than {LARGEST:,}")
        drawings.setdefault((parts[-3], parts[-2]), []).append(entry)
    if len(drawings) != count:
        raise damaged(path, source, f"must have {count} characters, got {len(drawings)}")
    for (alphabet, character), entries in drawings.items():
        if len(entries) != DRAWINGS:
            raise damaged(path, source, f"must have {DRAWINGS} drawings of {alphabet}/{character}, got {len(entries)}")
    return drawings


def _decode(path: Path, drawings: Drawings, size: int) -> NDArray[np.uint8]:
    """Read all drawings of an archive, (characters, 20, size, size)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("omniglot() needs Pillow; install it with: pip install pillow") from error
    images = np.empty((len(drawings), DRAWINGS, size, size), np.uint8)
    with zipfile.ZipFile(path) as archive:
        for position, entry in enumerate(entry for entries in drawings.values() for entry in entries):
            try:
                with archive.open(entry) as file:
                    content = file.read(entry.file_size)  # a bound, in case the stated size is wrong
                with Image.open(io.BytesIO(content), formats=("PNG",)) as drawing:
                    if drawing.size != (SIDE, SIDE):
                        raise ValueError(f"must have {SIDE}x{SIDE} pixels, got {drawing.width}x{drawing.height}")
                    grey = drawing.convert("L")  # images of 1 bit would lose pixels instead of being averaged
                images[divmod(position, DRAWINGS)] = np.asarray(grey.resize((size, size), Image.Resampling.LANCZOS))
            except Exception as error:  # zipfile and Pillow raise many kinds of errors
                raise damaged(path, SOURCES["omniglot"], f"its drawing {entry.filename} cannot be read ({error})") from error
    return np.subtract(255, images, out=images)


def _key(archives: dict[Path, Drawings]) -> str:
    """A digest of the names and checksums of all drawings, independent of their packing."""
    digest = hashlib.sha256()
    for drawings in archives.values():
        for (alphabet, character), entries in drawings.items():
            digest.update(f"{alphabet}/{character}: {[entry.CRC for entry in entries]}\n".encode())
    return digest.hexdigest()
