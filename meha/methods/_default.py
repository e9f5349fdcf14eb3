"""The default: which method runs when none is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meha._variables import Variable, modules_of
from meha.methods._base import Method
from meha.methods.continuation import Continuation
from meha.methods.stochastic import StochasticMEHA
from meha.problem import Problem

__all__ = ["default_method"]


def default_method(problem: Problem, x0: Any, y0: Any, batches: Iterable[Any] | None = None) -> Method:
    """The method that :func:`meha.solve` takes when none is given.

    Modules and batches, with which values at a point may differ from call to call, go to :class:`~meha.StochasticMEHA`;
    tensors without batches go to :class:`~meha.Continuation`.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)
    >>> default_method(problem, problem.x0, problem.y0).name
    'Continuation'
    """
    problem, _ = problem.lifted(x0, Variable.of(y0, "y"))
    noisy = batches is not None or problem.needs_batch or next(modules_of((x0, y0)), None) is not None
    return StochasticMEHA() if noisy else Continuation()
