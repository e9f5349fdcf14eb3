"""Newton: the second-order engine, for problems whose lower level has a regular solution."""

from meha.methods.newton.engine import Engine
from meha.methods.newton.faces import unknown_faces
from meha.methods.newton.hyper import HyperObjective, hypergradient
from meha.methods.newton.lower import LowerLevel

__all__ = ["Engine", "HyperObjective", "LowerLevel", "hypergradient", "unknown_faces"]
