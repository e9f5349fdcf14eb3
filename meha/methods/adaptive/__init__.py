"""AdaptiveMEHA: the single loop of MEHA, with steps, gamma and c that are chosen and adapted as it runs."""

from meha.methods.adaptive.method import AdaptiveMEHA
from meha.methods.adaptive.state import AdaptiveState

__all__ = ["AdaptiveMEHA", "AdaptiveState"]
