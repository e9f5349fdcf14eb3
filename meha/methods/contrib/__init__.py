"""Methods that are kept for comparisons. They work and are tested; their names and arguments may change in any version."""

from meha.methods.contrib.adaptive_meha import AdaptiveMEHA
from meha.methods.contrib.brc import BRC
from meha.methods.contrib.igjo import IGJO
from meha.methods.contrib.slm import SLM
from meha.methods.contrib.vfidca import VFiDCA

__all__ = ["BRC", "IGJO", "SLM", "AdaptiveMEHA", "VFiDCA"]
