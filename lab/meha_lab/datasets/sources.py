"""Addresses and checksums of the data sets, and the local folders for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SOURCES", "DataError", "Folder", "Source", "cache_folder", "damaged", "path_of", "source_of", "spelling"]


Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Source:
    """The published files of one data set.

    Args:
        name: the name of the data set.
        address: the URL of the folder with the files, with a slash at the end.
        files: the name and the MD5 checksum of each file.
    """

    name: str
    address: str
    files: dict[str, str]

    @property
    def subfolder(self) -> str:
        """The name of the subfolder of ``MEHA_DATA`` and the cache."""
        return self.name.replace("-", "_")


SOURCES = {
    source.name: source
    for source in (
        Source(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
        ),
        Source(
            "fashion-mnist",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
        ),
        Source(
            "omniglot",
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
            {
                "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
                "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
            },
        ),
        Source(
            "cifar10",
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        ),
    )
}


def source_of(name: str) -> Source:
    """Return the source with this name.

    >>> source_of("fashion_mnist").address
    'http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/'
    """
    source = SOURCES.get(spelling(name))
    if source is None:
        raise ValueError(f"name: must be one of {', '.join(map(repr, SOURCES))}, got {name!r}.")
    return source


def spelling(name: str) -> str:
    """Return the name in lower case with hyphens.

    >>> spelling("Fashion_MNIST")
    'fashion-mnist'
    """
    return str(name).lower().replace("_", "-")


def cache_folder() -> Path:
    """Return the cache folder: ``$MEHA_CACHE``, else ``$XDG_CACHE_HOME/meha``, else ``~/.cache/meha``."""
    if own := os.environ.get("MEHA_CACHE"):
        return path_of(own)
    return path_of(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "meha"


def path_of(folder: Folder) -> Path:
    """Return the absolute path of a folder, with ``~`` expanded.

    >>> path_of("data") == Path.cwd() / "data"
    True
    """
    return Path(folder).expanduser().absolute()


class DataError(ValueError):
    """A file exists but has the wrong content."""


def damaged(path: Path, source: Source, what: str) -> DataError:
    """Return the error for such a file, with the remedy."""
    published = {path.name, f"{path.name}.gz"} & set(source.files)
    remedy = (
        "Delete this file and download it again"
        if published
        else "Replace this file, or delete it and download the published one"
    )
    return DataError(f"{path}: {what}. {remedy}: meha download {source.name}")
