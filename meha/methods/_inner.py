"""Steps on the lower level, and the ways to pull a gradient back through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meha._leaves import Leaves, add_, copy_
from meha._oracle import Oracle, Term
from meha._variables import Variable

__all__ = ["Objective", "descend", "lower_objective", "reverse", "unroll"]

Objective = Callable[[int, Variable], list[Term]]
"""What step t descends on, as a weighted sum of functions at (x, y), as a function of t and y."""


def lower_objective(oracle: Oracle, x: Variable) -> Objective:
    """The objective f, the same in every step."""
    return lambda t, y: [(1.0, oracle.lower, x, y)]


def descend(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    steps: int,
    step: float,
    batch: Any,
    objective: Objective | None = None,
    trace: list[Leaves] | None = None,
    ridge: float = 0.0,
) -> None:
    """Set y <- proj_Y(y - step * grad_y objective(t, y)) for t = 0, ..., steps - 1; f is the objective by default.

    Args:
        trace: takes copies of y_0, ..., y_{steps}.
        ridge: adds ridge/2 ||y||^2 to the objective.
    """
    objective = objective or lower_objective(oracle, x)
    for t in range(steps):
        if trace is not None:
            trace.append([leaf.detach().clone() for leaf in y.leaves])
        _, direction = oracle.gradient(y, objective(t, y), batch)
        if ridge:
            add_(y.leaves, y.leaves, -step * ridge)
        add_(y.leaves, direction, -step)
        oracle.prox(x.value, y.leaves, step)
    if trace is not None:
        trace.append([leaf.detach().clone() for leaf in y.leaves])


def reverse(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    trace: list[Leaves],
    step: float,
    h: Leaves,
    q: Leaves,
    batch: Any,
    objective: Objective | None = None,
    terms: int | None = None,
) -> tuple[Leaves, Leaves]:
    """Pull the gradient (h, q) at (x, trace[-1]) back through the steps that led there: the gradient in x, and in y_0.

    For the last ``terms`` steps (all by default), from the last to the first, with J the Jacobian of the projection on Y,

        q <- J' q;   h <- h - step * objective_xy [q];   q <- q - step * objective_yy [q].

    One Hessian-vector product a step. Iterates are kept and derivatives recomputed, so that memory is that of the iterates and
    of one graph; objectives must give the same value when they are called again.
    """
    objective = objective or lower_objective(oracle, x)
    steps = len(trace) - 1
    for t in reversed(range(steps - min(terms if terms is not None else steps, steps), steps)):
        copy_(y.leaves, trace[t])
        hessian = oracle.hessian(objective(t, y), batch)
        if not oracle.prox.identity:
            ahead = [leaf - step * d for leaf, d in zip(trace[t], hessian.gradient, strict=True)]
            q = oracle.prox.pull_back(x.value, ahead, step, q)
        d_x, d_y = hessian(q, x, y)
        h = [a - step * b for a, b in zip(h, d_x, strict=True)]
        q = [a - step * b for a, b in zip(q, d_y, strict=True)]
        del hessian  # before the next one is built
    copy_(y.leaves, trace[-1])
    return h, q


def unroll(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    steps: range,
    step: float,
    batch: Any,
    objective: Objective | None = None,
) -> list[Variable]:
    """Unroll the steps of :func:`descend`: y and each iterate, with the graph that leads there from x and from the first.

    One backward pass from any of them then does what :func:`reverse` does step by step: in less time, with the memory of all
    graphs. y itself stays where it is.
    """
    if y.has_modules or not oracle.prox.identity:
        found = "holds a module" if y.has_modules else "has a set Y"
        raise ValueError(f"keep_graph: y {found}, and steps are kept as graphs for free tensors only; leave keep_graph out.")
    objective = objective or lower_objective(oracle, x)
    iterates = [Variable.of(y.like([leaf.detach().clone().requires_grad_() for leaf in y.leaves]), y.argument)]
    for t in steps:
        last = iterates[-1]
        direction = oracle.traced(last, objective(t, last), batch)
        with torch.enable_grad():
            leaves = [leaf - step * d for leaf, d in zip(last.leaves, direction, strict=True)]
            iterates.append(Variable.of(last.like(leaves), y.argument))
    return iterates
