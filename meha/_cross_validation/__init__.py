"""Cross-validation as an upper level: penalised linear models on folds, fitted together, and the choice of their weights."""

from meha._cross_validation.folded import CrossValidated, CrossValidation, cross_validation
from meha._cross_validation.penalties import FAMILIES, Family
from meha._cross_validation.search import Candidate, Search, choose
from meha._cross_validation.upper import Layout, layout_of

__all__ = [
    "FAMILIES",
    "Candidate",
    "CrossValidated",
    "CrossValidation",
    "Family",
    "Layout",
    "Search",
    "choose",
    "cross_validation",
    "layout_of",
]
