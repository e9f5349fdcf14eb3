"""Methods for bilevel problems, and what a method of your own needs: Method, State, Oracle, Variable, At."""

from meha.engines.active_sets import ActiveSets
from meha.engines.implicit_newton import ImplicitNewton
from meha.engines.penalty_continuation import PenaltyContinuation
from meha.method.method import At, Method, Run, State, StepInfo
from meha.method.optimizers import Optimizer
from meha.methods import contrib as contrib
from meha.methods import stochastic as stochastic
from meha.methods.bamm import BAMM
from meha.methods.bda import BDA
from meha.methods.bicgaffa import BiCGAFFA
from meha.methods.bome import BOME
from meha.methods.bvfim import BVFIM
from meha.methods.darts import DARTS
from meha.methods.default import Default, default_method
from meha.methods.f2sa import F2SA
from meha.methods.iaptt import IAPTT
from meha.methods.implicit import CG, GALET, NS
from meha.methods.lvhba import LVHBA
from meha.methods.meha import MEHA
from meha.methods.rhg import RHG
from meha.methods.search import TPE, GridSearch, LogUniform, RandomSearch, Uniform
from meha.methods.stochastic_meha import StochasticMEHA
from meha.methods.vpbgd import VPBGD
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable

__all__ = [
    "BAMM",
    "BDA",
    "BOME",
    "BVFIM",
    "CG",
    "DARTS",
    "F2SA",
    "GALET",
    "IAPTT",
    "LVHBA",
    "MEHA",
    "NS",
    "RHG",
    "TPE",
    "VPBGD",
    "ActiveSets",
    "At",
    "BiCGAFFA",
    "Default",
    "GridSearch",
    "ImplicitNewton",
    "LogUniform",
    "Method",
    "Optimizer",
    "Oracle",
    "PenaltyContinuation",
    "RandomSearch",
    "Run",
    "State",
    "StepInfo",
    "StochasticMEHA",
    "Uniform",
    "Variable",
    "default_method",
]
