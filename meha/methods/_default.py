"""The default: which method runs when none is named."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from meha._structures import modules_of
from meha._variables import Variable
from meha.methods._base import Method
from meha.methods.continuation import Continuation
from meha.methods.rhg import RHG
from meha.methods.stochastic import StochasticMEHA
from meha.problem import Problem
from meha.responses import Trained

__all__ = ["default_method"]

HALF = (torch.float16, torch.bfloat16)

RATE = 0.01
"""Learning rate of x where Adam takes its steps."""


def default_method(problem: Problem, x0: Any, y0: Any, batches: Iterable[Any] | None = None) -> Method:
    """The method that :func:`meha.solve` takes when none is given.

    A response :class:`~meha.responses.Trained` goes to :class:`~meha.RHG`, which differentiates through its steps, with Adam
    for x if there are modules or batches. Otherwise, modules and batches, with which values at a point may differ from call to
    call, go to :class:`~meha.StochasticMEHA`; tensors without batches go to :class:`~meha.Continuation`.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)
    >>> default_method(problem, problem.x0, problem.y0).name
    'Continuation'
    """
    problem, _ = problem.lifted(x0, Variable.of(y0, "y"))
    noisy = batches is not None or problem.needs_batch or next(modules_of((x0, y0)), None) is not None
    if isinstance(problem.selected, Trained):
        return RHG(x_optimizer=partial(torch.optim.Adam, lr=RATE)) if noisy else RHG()
    if not noisy and any(
        leaf.dtype in HALF for value in (x0, y0) if value is not None for leaf in Variable.of(value, "x").leaves
    ):
        raise TypeError(
            "x0, y0: the default computes in single or double precision; pass .float() or .double() tensors, or name a method."
        )
    return StochasticMEHA() if noisy else Continuation()
