"""Published methods for stochastic bilevel optimization: objectives that are means over examples, drawn in batches."""

from meha.methods.stochastic.saba import SABA
from meha.methods.stochastic.soba import SOBA

__all__ = ["SABA", "SOBA"]
