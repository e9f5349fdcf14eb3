"""Data sets of labelled images by name."""

from __future__ import annotations

from meha_lab.datasets.cifar10 import cifar10
from meha_lab.datasets.images import Images, Part, digits, fashion_mnist, mnist
from meha_lab.datasets.sources import Folder, spelling

__all__ = ["load"]


def load(name: str, part: Part | None = None, folder: Folder | None = None, download: bool = False) -> Images:
    """Load a data set by name: :func:`digits`, :func:`mnist`, :func:`fashion_mnist` or :func:`cifar10`.

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".
        part: "train", "test" or "all"; "digits" has only "all". By default that of the function with this name: "all" for
            "digits", "train" for the others.
        folder: see :func:`mnist`; "digits" does not need it.
        download: see :func:`mnist`; "digits" does not need it.

    Returns:
        The images of the part that was asked for, with their labels.

    >>> load("digits")
    Images(1797 of 8x8, 10 classes)
    >>> load("cifar")
    Traceback (most recent call last):
    ValueError: name: must be one of 'digits', 'mnist', 'fashion-mnist', 'cifar10', got 'cifar'.
    """
    readers = {"mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10}
    known = spelling(name)
    if known == "digits":
        if part not in (None, "all"):
            raise ValueError(f"part: must be 'all' for 'digits', got {part!r}.")
        return digits()
    if known not in readers:
        raise ValueError(f"name: must be one of {', '.join(map(repr, ('digits', *readers)))}, got {name!r}.")
    return readers[known](part or "train", folder, download)
