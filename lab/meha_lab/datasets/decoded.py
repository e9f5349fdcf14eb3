"""Keep decoded images in the cache, so that they are decoded once."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meha.running.loggers import write_atomically
from meha_lab.datasets.sources import Source, cache_folder

__all__ = ["Arrays", "decoded_once"]


Arrays = dict[str, NDArray[np.uint8]]


def decoded_once(
    source: Source, name: str, key: str, shapes: Mapping[str, tuple[int, ...]], decode: Callable[[], Arrays], compress: bool
) -> Arrays:
    """Return arrays of bytes from a file in the cache, or decode them and write this file.

    Args:
        source: the data set; the file is in its subfolder of the cache.
        name: the name of the file, with the ending ``.npz``.
        key: a digest of what is decoded; a file with another key is outdated, and made again like a damaged one.
        shapes: the names and shapes of the arrays to return; others in the file are not read.
        decode: returns all arrays of the file.
        compress: make the file smaller and slower.
    """
    path = cache_folder() / source.subfolder / name
    arrays = _stored(path, key, shapes)
    if arrays is None:
        arrays = decode()
        buffer = io.BytesIO()
        contents: dict[str, Any] = {"key": np.array(key), **arrays}
        (np.savez_compressed if compress else np.savez)(buffer, **contents)
        try:
            write_atomically(path, buffer.getbuffer())
        except OSError as error:
            warnings.warn(
                f"{source.name}: the images could not be cached in {path} ({error}), so the next call decodes them again. "
                f"Set the environment variable MEHA_CACHE to a writable folder.",
                stacklevel=3,
            )
    return {part: arrays[part] for part in shapes}


def _stored(path: Path, key: str, shapes: Mapping[str, tuple[int, ...]]) -> Arrays | None:
    """The arrays from :func:`decoded_once`, if they are intact and have this key."""
    try:
        with path.open("rb") as file, np.load(file) as stored:  # an .npz file has a checksum of each array
            if str(stored["key"]) != key:
                return None
            arrays = {part: stored[part] for part in shapes}
    except Exception:  # it can be made again
        return None
    intact = all(arrays[part].shape == shape and arrays[part].dtype == np.uint8 for part, shape in shapes.items())
    return arrays if intact else None
