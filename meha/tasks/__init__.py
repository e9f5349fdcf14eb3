"""Learning tasks on data: find wrong labels, hyper-cleaning, few-shot learning, and architecture search."""

from meha.tasks import architecture_search
from meha.tasks._cleaning import Cleaning, CleaningWarning, clean
from meha.tasks.few_shot import FewShot, few_shot
from meha.tasks.hyper_cleaning import HyperCleaning, hyper_cleaning

__all__ = [
    "Cleaning",
    "CleaningWarning",
    "FewShot",
    "HyperCleaning",
    "architecture_search",
    "clean",
    "few_shot",
    "hyper_cleaning",
]
