"""CIFAR-10: 60,000 colour images of ten classes of animals and vehicles."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from meha_lab.datasets.archives import SHOWN, check_file, files_in
from meha_lab.datasets.decoded import Arrays, decoded_once
from meha_lab.datasets.fetch import find
from meha_lab.datasets.images import Images, Part, pieces_of
from meha_lab.datasets.sources import SOURCES, Folder, damaged

__all__ = ["cifar10"]


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
EACH = {"train": 5_000, "test": 1_000}  # images of a class
SIDE = 32
SHAPE = (3, SIDE, SIDE)
BATCHES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
PUBLISHED, FOLDERS = "cifar-10-binary", "cifar-10-images"
ENDINGS = (".jpg", ".jpeg", ".png")
LARGEST = 2**16  # bytes of one image; as JPEG they have about a thousand


def cifar10(part: Part = "train", folder: Folder | None = None, download: bool = False) -> Images:
    """Load CIFAR-10 (Krizhevsky 2009): 32x32 colour images, 5,000 of each class for training and 1,000 for the test.

    Args:
        part: "train", "test", or "all" for both, in this order.
        folder: the folder of the archive, or of a subfolder ``cifar10`` with it; by default ``MEHA_DATA``, then the cache.
        download: download the published archive (into ``folder``, or the cache) if neither archive is found.

    Returns:
        The images of the part that was asked for, with their labels.

    The archive is one of two, packed or without ``.gz``; if both are found, the first is taken:

    - ``cifar-10-binary.tar.gz``, the published one, which ``meha download cifar10`` fetches. Its order is kept.
    - ``cifar-10-images.tar.gz`` with JPEG or PNG images in ``train/<class>/`` and ``test/<class>/``, put in place by hand. The
      classes take turns: the first image of each class, then the second, and so on, sorted by file name within a class.
      Images that were compressed again as JPEG are not exactly the published ones. Needs Pillow: ``pip install pillow``.

    Decoding takes some seconds, so the result is cached; a damaged or outdated file is made again.

    >>> cifar10(folder="/nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: cifar10: cifar-10-binary.tar.gz or cifar-10-images.tar.gz (or without .gz) not found in ...
    """
    pieces = pieces_of(part)
    source = SOURCES["cifar10"]
    (path,) = find(source, [f"{PUBLISHED}.tar.gz"], folder, download, instead=[f"{FOLDERS}.tar.gz"])
    check_file(path, source)
    stem = path.name.partition(".")[0]
    decode = {PUBLISHED: _decode_batches, FOLDERS: _decode_folders}[stem]
    with path.open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()
    shapes = {name: shape for piece in pieces for name, shape in _shapes(piece).items()}
    arrays = decoded_once(source, f"{stem}.npz", key, shapes, lambda: decode(path), compress=False)
    images, labels = ([arrays[f"{piece}_{kind}"] for piece in pieces] for kind in ("images", "labels"))
    pixels, positions = np.concatenate(images), np.concatenate(labels).astype(np.int64)
    return Images(torch.from_numpy(pixels), torch.from_numpy(positions), CLASSES)


def _shapes(piece: str) -> dict[str, tuple[int, ...]]:
    count = EACH[piece] * len(CLASSES)
    return {f"{piece}_images": (count, *SHAPE), f"{piece}_labels": (count,)}


def _empty() -> Arrays:
    return {name: np.empty(shape, np.uint8) for piece in EACH for name, shape in _shapes(piece).items()}


def _check_count(path: Path, piece: str, label: int, count: int) -> None:
    if count != EACH[piece]:
        raise damaged(path, SOURCES["cifar10"], f"must have {EACH[piece]:,} {piece} images of {CLASSES[label]}, got {count:,}")


def _decode_batches(path: Path) -> Arrays:
    """Read the published archive: files of records, each a label and the red, green and blue values of an image."""
    source, arrays = SOURCES["cifar10"], _empty()
    length = 1 + int(np.prod(SHAPE))
    sizes = {name: EACH[piece] * len(CLASSES) // len(names) for piece, names in BATCHES.items() for name in names}  # records
    places = {name: (piece, i * sizes[name]) for piece, names in BATCHES.items() for i, name in enumerate(names)}
    for name, content in files_in(path, source, lambda name: name.name in sizes, max(sizes.values()) * length):
        if name.name not in places:
            raise damaged(path, source, f"has two files {name.name}")
        (piece, start), size = places.pop(name.name), sizes[name.name]
        if len(content) != size * length:
            raise damaged(path, source, f"its file {name.name} must have {size * length:,} bytes, got {len(content):,}")
        records = np.frombuffer(content, np.uint8).reshape(size, length)
        if (highest := records[:, 0].max()) >= len(CLASSES):
            raise damaged(path, source, f"its file {name.name} must have labels up to {len(CLASSES) - 1}, got {highest}")
        arrays[f"{piece}_labels"][start : start + size] = records[:, 0]
        arrays[f"{piece}_images"][start : start + size] = records[:, 1:].reshape(size, *SHAPE)
    if places:
        raise damaged(path, source, f"must have {' and '.join(places)}")
    for piece in EACH:
        for label, count in enumerate(np.bincount(arrays[f"{piece}_labels"], minlength=len(CLASSES))):
            _check_count(path, piece, label, int(count))
    return arrays


def _decode_folders(path: Path) -> Arrays:
    """Read an archive of images in folders; the classes take turns."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("cifar10() needs Pillow; install it with: pip install pillow") from error
    source, arrays = SOURCES["cifar10"], _empty()
    groups: dict[tuple[str, ...], dict[str, bytes]] = {(piece, label): {} for piece in EACH for label in CLASSES}
    for name, content in files_in(path, source, _is_image, LARGEST):
        group = groups.get(name.parent.parts[-2:])
        if group is None:
            place = f"train/<class> or test/<class> with a class of {', '.join(CLASSES)}"
            raise damaged(path, source, f"its image {str(name)[:SHOWN]!r} must be in {place}")
        if name.name in group:
            raise damaged(path, source, f"has two images {'/'.join(name.parts[-3:])[:SHOWN]!r}")
        group[name.name] = content
    for (piece, label), group in groups.items():
        _check_count(path, piece, CLASSES.index(label), len(group))
    for (piece, label), group in groups.items():
        turns = slice(CLASSES.index(label), None, len(CLASSES))
        arrays[f"{piece}_labels"][turns] = CLASSES.index(label)
        for target, file in zip(arrays[f"{piece}_images"][turns], sorted(group), strict=True):
            try:
                with Image.open(io.BytesIO(group[file]), formats=("JPEG", "PNG")) as image:
                    if image.size != (SIDE, SIDE):
                        raise ValueError(f"must have {SIDE}x{SIDE} pixels, got {image.width}x{image.height}")
                    target[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except Exception as error:  # Pillow raises many kinds of errors
                shown = f"{piece}/{label}/{file}"[:SHOWN]
                raise damaged(path, source, f"its image {shown!r} cannot be read ({error})") from error
    return arrays


def _is_image(name: PurePosixPath) -> bool:
    return name.suffix.lower() in ENDINGS and not name.name.startswith(".")  # ._0001.jpg is a note of macOS about 0001.jpg
