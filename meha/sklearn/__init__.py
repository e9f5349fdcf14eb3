"""scikit-learn estimators that learn penalties and weights of examples; needs ``pip install "meha[sklearn]"``."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError('meha.sklearn needs scikit-learn: pip install "meha[sklearn]".') from error

from meha.sklearn._examples import ExampleReweighter, LabelCleaner
from meha.sklearn._linear import PenalizedClassifier, PenalizedRegressor

__all__ = ["ExampleReweighter", "LabelCleaner", "PenalizedClassifier", "PenalizedRegressor"]
