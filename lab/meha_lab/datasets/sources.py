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
        files: the name and the checksum of each file: SHA-256, or MD5 where no other is published.
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
                "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            },
        ),
        Source(
            "fashion-mnist",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            {
                "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            },
        ),
        Source(
            "omniglot",
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
            {
                "images_background.zip": "60ad8889d25e98e03cfd6276184d48303ae1ea88dbef54f163c07cf5d0dbf4df",
                "images_evaluation.zip": "ccc232fe471576431665b12d45301c5479c0597f6af3615fd8ee97d35872985f",
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
    'https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/'
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
