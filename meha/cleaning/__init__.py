"""Find wrong labels with a network that learns from trusted examples: the work of ``meha clean``."""

from meha.cleaning.network import Cleaning, CleaningWarning, clean

__all__ = ["Cleaning", "CleaningWarning", "clean"]
