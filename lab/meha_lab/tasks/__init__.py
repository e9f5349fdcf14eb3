"""Learning tasks of the paper on data: hyper-cleaning, few-shot learning, and architecture search."""

from meha_lab.tasks import architecture_search
from meha_lab.tasks.few_shot import FewShot, few_shot
from meha_lab.tasks.hyper_cleaning import HyperCleaning, hyper_cleaning

__all__ = ["FewShot", "HyperCleaning", "architecture_search", "few_shot", "hyper_cleaning"]
