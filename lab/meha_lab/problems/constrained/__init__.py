"""Problems whose levels are coupled by constraints, with answers that are computed without the methods of this library."""

from meha_lab.problems.constrained.known import Judged, coupled_problem
from meha_lab.problems.constrained.linear import LINEAR
from meha_lab.problems.constrained.smooth import SMOOTH

__all__ = ["FAMILIES", "Judged", "coupled_problem"]

FAMILIES = {**LINEAR, **SMOOTH}
