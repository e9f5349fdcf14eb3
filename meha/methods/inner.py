"""Steps on the lower level, and the sweep that pulls a gradient back through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meha.oracle import Oracle, Term
from meha.variables import Leaves, Variable, add_, copy_

__all__ = ["Objective", "descend", "lower_objective", "reverse"]

Objective = Callable[[int], list[Term]]
"""What step t descends on, as a weighted sum of functions at (x, y)."""


def lower_objective(oracle: Oracle, x: Variable, y: Variable) -> Objective:
    """f itself, in every step."""
    return lambda t: [(1.0, oracle.lower, x, y)]


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
    """y <- proj_Y(y - step * grad_y objective(t)) for t = 0, ..., steps - 1, in place; f is the objective by default.

    Args:
        trace: takes copies of y_0, ..., y_{steps}.
        ridge: adds ridge/2 ||y||^2 to the objective.
    """
    objective = objective or lower_objective(oracle, x, y)
    for t in range(steps):
        if trace is not None:
            trace.append([leaf.detach().clone() for leaf in y.leaves])
        _, direction = oracle.gradient(y, objective(t), batch)
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
    objective = objective or lower_objective(oracle, x, y)
    steps = len(trace) - 1
    for t in reversed(range(steps - min(terms if terms is not None else steps, steps), steps)):
        copy_(y.leaves, trace[t])
        hessian = oracle.hessian(objective(t), batch)
        if not oracle.prox.identity:
            ahead = [leaf - step * d for leaf, d in zip(trace[t], hessian.gradient, strict=True)]
            q = oracle.prox.pull_back(x.value, ahead, step, q)
        d_x, d_y = hessian(q, x, y)
        h = [a - step * b for a, b in zip(h, d_x, strict=True)]
        q = [a - step * b for a, b in zip(q, d_y, strict=True)]
        del hessian  # before the next one is built
    copy_(y.leaves, trace[-1])
    return h, q
