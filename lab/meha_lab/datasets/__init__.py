"""Data sets of images: read the published files, or download them.

Files are read from ``folder`` if given; otherwise from the folder in the environment variable ``MEHA_DATA``, then from the
cache. Each data set has a subfolder (``mnist``, ``fashion_mnist``, ``omniglot``, ``cifar10``). Nothing is downloaded without
:func:`download` or ``download=True``. The cache is ``$MEHA_CACHE``, else ``$XDG_CACHE_HOME/meha``, else ``~/.cache/meha``.
:func:`omniglot` and archives of images for :func:`cifar10` need Pillow, :func:`digits` needs scikit-learn.

>>> from meha_lab.datasets import load
>>> load("digits")
Images(1797 of 8x8, 10 classes)
"""

from meha_lab.datasets.cifar10 import cifar10
from meha_lab.datasets.fetch import download
from meha_lab.datasets.images import Images, Part, digits, fashion_mnist, mnist
from meha_lab.datasets.named import load
from meha_lab.datasets.omniglot import Omniglot, omniglot
from meha_lab.datasets.sources import DataError

__all__ = [
    "DataError",
    "Images",
    "Omniglot",
    "Part",
    "cifar10",
    "digits",
    "download",
    "fashion_mnist",
    "load",
    "mnist",
    "omniglot",
]
