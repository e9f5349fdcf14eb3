"""The experiments: what is measured for each table and figure, and what the page says about it."""

from meha_lab.reproduce.experiments.architecture_search import ArchitectureSearchExperiment
from meha_lab.reproduce.experiments.automatic import Automatic
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records
from meha_lab.reproduce.experiments.comparison import Comparison
from meha_lab.reproduce.experiments.group_lasso import GroupLasso
from meha_lab.reproduce.experiments.learning import FewShotLearning, HyperCleaningExperiment
from meha_lab.reproduce.experiments.learning_tasks import LearningTasks
from meha_lab.reproduce.experiments.nonsmooth import LassoToy, Sensitivity
from meha_lab.reproduce.experiments.smooth import HighDimension, LargeScale, MerelyConvex, NonConvex, StrongConvex
from meha_lab.reproduce.experiments.theorems import ConvergenceRates
from meha_lab.reproduce.experiments.trust import Trust

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Options", "Records"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        StrongConvex(),
        HighDimension(),
        MerelyConvex(),
        NonConvex(),
        LargeScale(),
        LassoToy(),
        GroupLasso(),
        Sensitivity(),
        ConvergenceRates(),
        HyperCleaningExperiment(),
        FewShotLearning(),
        LearningTasks(),
        ArchitectureSearchExperiment(),
        Comparison(),
        Automatic(),
        Trust(),
    )
}
