"""Data sets of images: read the published files, or download them.

Files are read from ``folder`` if given; otherwise from the folder in the environment variable ``MEHA_DATA``, then from the
cache. Each data set has a subfolder (``mnist``, ``fashion_mnist``, ``omniglot``). Nothing is downloaded without
:func:`download` or ``download=True``. The cache is ``$MEHA_CACHE``, else ``$XDG_CACHE_HOME/meha``, else ``~/.cache/meha``.
:func:`omniglot` needs Pillow and :func:`digits` needs scikit-learn: ``pip install "meha[data]"``.

>>> from meha.datasets import load
>>> load("digits")
Images(1797 of 8x8, 10 classes)
"""

from meha.datasets.fetch import download
from meha.datasets.images import Images, Part, digits, fashion_mnist, load, mnist
from meha.datasets.omniglot import Omniglot, omniglot
from meha.datasets.sources import DataError

__all__ = ["DataError", "Images", "Omniglot", "Part", "digits", "download", "fashion_mnist", "load", "mnist", "omniglot"]
