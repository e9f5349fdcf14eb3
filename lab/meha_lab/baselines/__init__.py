"""Methods that the paper's experiments compare with, and that no user needs besides."""

from meha_lab.baselines.brc import BRC
from meha_lab.baselines.igjo import IGJO
from meha_lab.baselines.slm import SLM
from meha_lab.baselines.vfidca import VFiDCA

__all__ = ["BRC", "IGJO", "SLM", "VFiDCA"]
