"""The default for coupled problems: pieces of the lower level's optimality conditions, searched from many starts."""

from meha.methods.constrained.course import CoupledCourse

__all__ = ["CoupledCourse"]
