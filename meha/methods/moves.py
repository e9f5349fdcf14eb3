"""The step of a variable along a direction: plain, or taken by an optimizer of torch.optim, and then a prox or projection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from meha.problem import Problem, Prox
from meha.schedules import Schedule, check_schedule, evaluate
from meha.sets import ConvexSet
from meha.variables import Leaves, Variable, add_, norm, subtract

__all__ = ["OptimizerFactory", "build_optimizer", "check_step", "move"]

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


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
    name: str,
    schedule: Schedule | None,
    k: int,
    variable: Variable,
    direction: Leaves,
    prox: Prox,
    x: Any,
    optimizer: torch.optim.Optimizer | None = None,
) -> Tensor:
    """variable <- prox(variable - step * direction), and the norm of the move divided by the step.

    Args:
        name, schedule, k: the step size, by its name in messages; it is the learning rate where there is an optimizer.
        x: the value of x, for the prox.
    """
    leaves = variable.leaves
    if optimizer is None and prox.identity:
        assert schedule is not None
        add_(leaves, direction, -evaluate(name, schedule, k))
        return norm(direction)
    old = [leaf.clone() for leaf in leaves]
    if optimizer is None:
        assert schedule is not None
        step = evaluate(name, schedule, k)
        add_(leaves, direction, -step)
    else:
        step = float(optimizer.param_groups[0]["lr"])
        for leaf, part in zip(leaves, direction, strict=True):
            leaf.grad = part
        optimizer.step()
        for leaf in leaves:
            leaf.grad = None
    prox(x, leaves, step)
    return norm(subtract(old, leaves)) / step


def build_optimizer(
    name: str, factory: OptimizerFactory | None, variable: Variable, problem: Problem
) -> torch.optim.Optimizer | None:
    """The optimizer of a variable, checked; None without a factory."""
    if factory is None:
        return None
    optimizer = factory(variable.leaves)
    if isinstance(optimizer, torch.optim.Optimizer) and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(f"{name}: maximize=True would climb; leave it out.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{name}: LBFGS evaluates the objective itself, which a single-loop method does not allow; use another."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{name}: the factory returned {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(leaf) for leaf in variable.leaves}:
        raise ValueError(f"{name}: the factory must hand all tensors that it gets to the optimizer, and no others.")
    lower = variable.argument != "x"
    _check_metric(optimizer, problem.y_set if lower else problem.x_set, lower and problem.nonsmooth is not None, name)
    return optimizer


def _check_metric(optimizer: torch.optim.Optimizer, domain: ConvexSet | None, nonsmooth: bool, name: str) -> None:
    """A prox belongs to the metric of the step: after Adam, soft thresholding is no proximal step of anything."""
    if not nonsmooth and (domain is None or domain.coordinatewise):
        return
    rates = {group["lr"] for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ValueError(
            f"{name}: has several learning rates {sorted(rates)}, but a prox or projection has one step; use one lr."
        )
    if isinstance(optimizer, torch.optim.SGD):
        return
    what = "a non-smooth term" if nonsmooth else f"the set {domain!r}"
    raise ValueError(
        f"{name}: {type(optimizer).__name__} rescales coordinates, and the prox or projection of {what} is only correct"
        " after plain steps; use torch.optim.SGD or leave the optimizer out."
    )
