"""Newton: second-order solution of deterministic problems with a regular lower level."""

from meha.methods.newton.hyper import HyperObjective, hypergradient
from meha.methods.newton.lower import LowerLevel
from meha.methods.newton.method import Newton, NewtonState

__all__ = ["HyperObjective", "LowerLevel", "Newton", "NewtonState", "hypergradient"]
