"""meha: bilevel optimization without Hessians.

    min F(x, y)  over x in X  and  y among the solutions of  min_{y in Y} f(x, y) + g(x, y)

State the problem once (:class:`Problem`) and solve it (:func:`solve`).

>>> import torch, meha
>>> problem = meha.Problem(
...     upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
...     lower=lambda x, y: torch.sin(x + y - 2).sum(),
... )
>>> solution = meha.solve(problem, x0=torch.tensor([-6.0]), y0=torch.zeros(1))
"""

from meha import (
    cleaning,
    constraints,
    diagnostics,
    loaders,
    loggers,
    losses,
    nonsmooth,
    observers,
    problems,
    responses,
    schedules,
    sets,
    stopping,
    theory,
)
from meha._checkpoints import Checkpoint
from meha._cross_validation import cross_validation
from meha._inspection import check
from meha._shared_checkpoints import SharedCheckpoint
from meha._solving import solve
from meha._verdicts import Status, TrainingWarning, Verdict
from meha.loaders import MicroBatches
from meha.methods import (
    BAMM,
    BDA,
    BOME,
    BRC,
    BVFIM,
    CG,
    DARTS,
    F2SA,
    GALET,
    IAPTT,
    IGJO,
    LVHBA,
    MEHA,
    NS,
    RHG,
    SLM,
    TPE,
    VPBGD,
    AdaptiveMEHA,
    BiCGAFFA,
    Continuation,
    GridSearch,
    LogUniform,
    Method,
    Optimizer,
    RandomSearch,
    Run,
    StepInfo,
    StochasticMEHA,
    Uniform,
    VFiDCA,
)
from meha.problem import Problem
from meha.solution import Solution

__version__ = "0.1.0"

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
    "BiCGAFFA",
    "Checkpoint",
    "Continuation",
    "GridSearch",
    "LogUniform",
    "Method",
    "MicroBatches",
    "Optimizer",
    "Problem",
    "RandomSearch",
    "Run",
    "SharedCheckpoint",
    "Solution",
    "Status",
    "StepInfo",
    "StochasticMEHA",
    "TrainingWarning",
    "Uniform",
    "VFiDCA",
    "Verdict",
    "check",
    "cleaning",
    "constraints",
    "cross_validation",
    "diagnostics",
    "loaders",
    "loggers",
    "losses",
    "nonsmooth",
    "observers",
    "problems",
    "responses",
    "schedules",
    "sets",
    "solve",
    "stopping",
    "theory",
]
