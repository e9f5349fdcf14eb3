"""Published methods for stochastic bilevel optimization: objectives that are means over examples, drawn in batches."""

from meha.methods.stochastic.adaptive_soba import AdaptiveSOBA
from meha.methods.stochastic.amigo import AmIGO
from meha.methods.stochastic.bsa import BSA
from meha.methods.stochastic.fsla import FSLA
from meha.methods.stochastic.masoba import MASOBA
from meha.methods.stochastic.mrbo import MRBO
from meha.methods.stochastic.network_soba import NetworkSOBA
from meha.methods.stochastic.pbgd_free import PBGDFree
from meha.methods.stochastic.saba import SABA
from meha.methods.stochastic.soba import SOBA
from meha.methods.stochastic.spaba import SPABA
from meha.methods.stochastic.srba import SRBA
from meha.methods.stochastic.stocbio import StocBiO
from meha.methods.stochastic.sustain import SUSTAIN
from meha.methods.stochastic.ttsa import TTSA
from meha.methods.stochastic.vrbo import VRBO

__all__ = [
    "BSA",
    "FSLA",
    "MASOBA",
    "MRBO",
    "SABA",
    "SOBA",
    "SPABA",
    "SRBA",
    "SUSTAIN",
    "TTSA",
    "VRBO",
    "AdaptiveSOBA",
    "AmIGO",
    "NetworkSOBA",
    "PBGDFree",
    "StocBiO",
]
