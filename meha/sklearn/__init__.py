"""scikit-learn estimators that learn penalties and weights of examples; needs ``pip install "meha[sklearn]"``."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError('meha.sklearn needs scikit-learn: pip install "meha[sklearn]".') from error

from meha.sklearn._labels import LabelCleaner
from meha.sklearn._linear import PenalizedClassifier, PenalizedRegressor
from meha.sklearn._shift import ExampleReweighter

__all__ = ["ExampleReweighter", "LabelCleaner", "PenalizedClassifier", "PenalizedRegressor"]
