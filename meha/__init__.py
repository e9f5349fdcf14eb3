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

from meha import cleaning, problems
from meha.analysis import diagnostics, theory
from meha.inspection import check
from meha.method.status import Status, TrainingWarning, Verdict
from meha.methods import (
    BAMM,
    BDA,
    BOME,
    BVFIM,
    CG,
    DARTS,
    F2SA,
    GALET,
    IAPTT,
    LVHBA,
    MEHA,
    NS,
    RHG,
    TPE,
    VPBGD,
    ActiveSets,
    BiCGAFFA,
    Default,
    GridSearch,
    ImplicitNewton,
    LogUniform,
    Method,
    Optimizer,
    PenaltyContinuation,
    RandomSearch,
    Run,
    StepInfo,
    StochasticMEHA,
    Uniform,
    contrib,
    stochastic,
)
from meha.problem import constraints, loaders, losses, nonsmooth, responses, schedules, sets
from meha.problem.loaders import MicroBatches
from meha.problem.problem import Problem
from meha.running import loggers, observers, stopping
from meha.running.checkpoints import Checkpoint, SharedCheckpoint
from meha.running.cross_validation import cross_validation
from meha.running.solution import Solution
from meha.running.solve import solve
from meha.running.start import TrainingRun, start
from meha.running.verify import Verification, verify

__version__ = "0.1.0"

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
    "BiCGAFFA",
    "Checkpoint",
    "Default",
    "GridSearch",
    "ImplicitNewton",
    "LogUniform",
    "Method",
    "MicroBatches",
    "Optimizer",
    "PenaltyContinuation",
    "Problem",
    "RandomSearch",
    "Run",
    "SharedCheckpoint",
    "Solution",
    "Status",
    "StepInfo",
    "StochasticMEHA",
    "TrainingRun",
    "TrainingWarning",
    "Uniform",
    "Verdict",
    "Verification",
    "check",
    "cleaning",
    "constraints",
    "contrib",
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
    "start",
    "stochastic",
    "stopping",
    "theory",
    "verify",
]
