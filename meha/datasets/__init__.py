"""Data sets of images: readers of the publishers' files, and their download.

Files are looked for in ``folder``, if it is given; else in the folder that the environment variable ``MEHA_DATA`` names; else
in the cache. In each of them a data set has its own subfolder (``mnist``, ``fashion_mnist``, ``omniglot``). Nothing is
downloaded unless :func:`download`, or ``download=True``, asks for it. The cache is the folder that ``MEHA_CACHE`` names, else
``$XDG_CACHE_HOME/meha``, else ``~/.cache/meha``. Reading drawings of Omniglot needs Pillow and :func:`digits` needs
scikit-learn: ``pip install "meha[data]"``.

>>> from meha.datasets import load
>>> load("digits")
Images(1797 of 8x8, 10 classes)
"""

from meha.datasets.fetch import download
from meha.datasets.images import Images, Part, digits, fashion_mnist, load, mnist
from meha.datasets.omniglot import Omniglot, omniglot
from meha.datasets.sources import DataError

__all__ = ["DataError", "Images", "Omniglot", "Part", "digits", "download", "fashion_mnist", "load", "mnist", "omniglot"]
