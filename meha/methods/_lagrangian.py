"""The Lagrangian of a coupled lower level, f + <multipliers, h>, and its gradients, for first-order methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meha._oracle import Function, Oracle
from meha._variables import Leaves, Variable
from meha.methods._base import Method
from meha.problem import Problem

__all__ = ["Lagrangian", "require_constraints"]


def require_constraints(method: Method, problem: Problem) -> None:
    """Raise unless there are lower constraints, and neither g nor batches."""
    if not problem.lower_constraints:
        raise ValueError(
            f"lower_constraints: {method.name} is for lower levels that constraints couple with x, and there are none; use"
            " MEHA."
        )
    if problem.needs_batch:
        raise ValueError(f"method: {method.name} takes no batches; use objectives of (x, y) on all data.")


class Lagrangian:
    """L(x, y; w) = f(x, y) + <w, h(x, y)>, with inequalities first and equations after them.

    Attributes:
        sizes: the numbers of inequalities and equations.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle = oracle
        self.constraints = oracle.problem.constraints[0]
        with torch.no_grad():
            parts = [constraint.values(x, y) for constraint in self.constraints]
        self.sizes = sum(len(part[0]) for part in parts), sum(len(part[1]) for part in parts)

    def multipliers(self, like: Tensor) -> Tensor:
        """Zeros, one for each row."""
        return like.detach().new_zeros(sum(self.sizes))

    def state_dict(self) -> dict[str, str]:
        """Nothing: it does not change in a run."""
        return {}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Nothing."""

    def values(self, x: Variable, y: Variable) -> Tensor:
        """h(x, y) and the equations, as one vector."""
        parts = [constraint.values(x, y) for constraint in self.constraints]
        return torch.cat([part[0] for part in parts] + [part[1] for part in parts])

    def project(self, w: Tensor, radius: float) -> Tensor:
        """The nearest multipliers of size ``radius`` at most, not negative for inequalities."""
        return torch.cat([w[: self.sizes[0]].clamp(0.0, radius), w[self.sizes[0] :].clamp(-radius, radius)])

    def gradients(self, wrt: tuple[Variable, ...], x: Variable, y: Variable, w: Tensor) -> tuple[Tensor, list[Leaves]]:
        """f(x, y), and the gradients of L(x, y; w); it counts as one gradient of f."""
        oracle = self.oracle
        value: list[Tensor] = []

        def evaluate(x: Variable, y: Variable, batch: Any) -> Tensor:
            f = oracle.lower(x, y, batch)
            value.append(f.detach())
            return f + w.to(f) @ self.values(x, y).to(f)

        total = Function("lower", evaluate, y.device)
        _, found = oracle.gradients(wrt, [(1.0, total, x, y)], strict=False)
        oracle.average([], (), value)
        return value[0], found
