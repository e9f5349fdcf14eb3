"""Cross-validation as an upper level: penalised linear models on folds, fitted together, and the choice of their weights."""

from meha._cross_validation.penalties import FAMILIES, Family
from meha._cross_validation.search import Candidate, Search, choose
from meha._cross_validation.upper import Layout, layout_of

__all__ = ["FAMILIES", "Candidate", "Family", "Layout", "Search", "choose", "layout_of"]
