"""Methods for bilevel problems, and what a method of your own needs: Method, State, Oracle, Variable, At."""

from meha._oracle import Oracle
from meha._running import At, Run, StepInfo
from meha._variables import Variable
from meha.methods._base import Method, State
from meha.methods._default import default_method
from meha.methods._intervals import LogUniform, Uniform
from meha.methods._optimizers import Optimizer
from meha.methods.adaptive import AdaptiveMEHA
from meha.methods.bamm import BAMM
from meha.methods.bda import BDA
from meha.methods.bicgaffa import BiCGAFFA
from meha.methods.bome import BOME
from meha.methods.brc import BRC
from meha.methods.bvfim import BVFIM
from meha.methods.continuation import Continuation
from meha.methods.darts import DARTS
from meha.methods.f2sa import F2SA
from meha.methods.galet import GALET
from meha.methods.iaptt import IAPTT
from meha.methods.igjo import IGJO
from meha.methods.implicit import CG, NS
from meha.methods.lvhba import LVHBA
from meha.methods.meha import MEHA
from meha.methods.rhg import RHG
from meha.methods.search import TPE, GridSearch, RandomSearch
from meha.methods.slm import SLM
from meha.methods.stochastic import StochasticMEHA
from meha.methods.vfidca import VFiDCA
from meha.methods.vpbgd import VPBGD

__all__ = [
    "BAMM",
    "BDA",
    "BOME",
    "BRC",
    "BVFIM",
    "CG",
    "DARTS",
    "F2SA",
    "GALET",
    "IAPTT",
    "IGJO",
    "LVHBA",
    "MEHA",
    "NS",
    "RHG",
    "SLM",
    "TPE",
    "VPBGD",
    "AdaptiveMEHA",
    "At",
    "BiCGAFFA",
    "Continuation",
    "GridSearch",
    "LogUniform",
    "Method",
    "Optimizer",
    "Oracle",
    "RandomSearch",
    "Run",
    "State",
    "StepInfo",
    "StochasticMEHA",
    "Uniform",
    "VFiDCA",
    "Variable",
    "default_method",
]
