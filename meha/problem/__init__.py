"""State a problem: objectives, non-smooth terms, sets, constraints, losses, responses, schedules, batches."""

from meha.problem.problem import Problem

__all__ = ["Problem"]
