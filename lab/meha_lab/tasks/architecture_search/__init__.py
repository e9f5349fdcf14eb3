"""Differentiable architecture search: a super-network, derived cells, final networks, and searches in stages."""

from meha_lab.tasks.architecture_search.genotype import Genotype, SearchSpace, random_genotype
from meha_lab.tasks.architecture_search.networks import FinalNetwork, SuperNetwork
from meha_lab.tasks.architecture_search.operations import OPERATIONS, Style
from meha_lab.tasks.architecture_search.searching import Found, Stage, search
from meha_lab.tasks.architecture_search.task import ArchitectureSearch, architecture_search
from meha_lab.tasks.architecture_search.training import FinalTraining, LowerDescent, TrainedNetwork, train_final

__all__ = [
    "OPERATIONS",
    "ArchitectureSearch",
    "FinalNetwork",
    "FinalTraining",
    "Found",
    "Genotype",
    "LowerDescent",
    "SearchSpace",
    "Stage",
    "Style",
    "SuperNetwork",
    "TrainedNetwork",
    "architecture_search",
    "random_genotype",
    "search",
    "train_final",
]
