"""A method that is kept for comparisons. It works and is tested; its name and arguments may change in any version."""

from meha.methods.contrib.adaptive_meha import AdaptiveMEHA

__all__ = ["AdaptiveMEHA"]
