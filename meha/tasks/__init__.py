"""Learning tasks on data: noisy labels cleaned, features shared across tasks."""

from meha.tasks.few_shot import FewShot, few_shot
from meha.tasks.hyper_cleaning import HyperCleaning, hyper_cleaning

__all__ = ["FewShot", "HyperCleaning", "few_shot", "hyper_cleaning"]
