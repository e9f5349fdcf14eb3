"""Methods kept for comparisons, or young. They work and are tested; names and arguments may change in any version."""

from meha.methods.contrib.adaptive_meha import AdaptiveMEHA
from meha.methods.contrib.network_soba import NetworkSOBA

__all__ = ["AdaptiveMEHA", "NetworkSOBA"]
