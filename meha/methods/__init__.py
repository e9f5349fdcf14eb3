"""Methods: each a frozen dataclass of hyper-parameters with ``init`` and ``step``, one a file."""

from meha.methods.base import Method, Run, State, StepInfo
from meha.methods.meha import MEHA

__all__ = ["MEHA", "Method", "Run", "State", "StepInfo"]
