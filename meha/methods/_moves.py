"""Steps of a variable along a direction, plain or by an optimizer of torch.optim, followed by a prox or projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meha._leaves import Leaves, add_, copy_, distance, norm
from meha._variables import Variable
from meha.methods._optimizers import OptimizerFactory, RunningOptimizer
from meha.problem import Prox
from meha.schedules import Schedule, check_schedule

__all__ = ["check_step", "move"]


def check_step(name: str, step: Schedule | None, optimizer: str = "", factory: OptimizerFactory | None = None) -> None:
    """Raise unless at most one of a step size and an optimizer is given, and each is what it should be."""
    if step is not None:
        check_schedule(name, step)
        if factory is not None:
            raise ValueError(f"{name} and {optimizer}: give one of them; with an optimizer the step is its lr.")
    if factory is not None and not callable(factory):
        raise TypeError(
            f"{optimizer}: expected a factory such as partial(torch.optim.Adam, lr=1e-3), got {type(factory).__name__}."
        )


def move(
    variable: Variable,
    direction: Leaves,
    step: Any,
    prox: Prox,
    x: Any,
    optimizer: RunningOptimizer | None = None,
) -> tuple[Tensor, Tensor]:
    """Set variable <- prox(variable - step * direction); return the norms of the direction, and of the move over the step.

    The second norm is the first where there is no prox, and also with an optimizer: it shows how far the variable is from a
    fixed point, which the length of a step of Adam does not.

    Args:
        direction: used up; with a prox, its list is filled with other tensors.
        step: the step size, a number, or a tensor where the step is traced; an optimizer has its learning rate instead.
        x: the value of x, for the prox.
    """
    leaves, size = variable.leaves, norm(direction)
    if optimizer is not None:
        step = 0.0 if prox.identity else optimizer.lr  # a schedule may also end at 0, where nothing moves
        old = [leaf.clone() for leaf in leaves] if step else []
        optimizer.step(leaves, direction, size)
        if not step:
            return size, size
        prox(x, leaves, step)
        return size, distance(old, leaves) / step
    if prox.identity:
        add_(leaves, direction, -step)
        return size, size
    for i, leaf in enumerate(leaves):
        direction[i] = leaf - step * direction[i] if isinstance(step, Tensor) else torch.add(leaf, direction[i], alpha=-step)
    prox(x, direction, step)
    moved = distance(leaves, direction) / step
    copy_(leaves, direction)
    return size, moved
