"""Records on disk: see :mod:`meha_lab.store`."""

from meha_lab.store import Store

__all__ = ["Store"]
