"""The base class of LVHBA and BiCGAFFA: the Lagrangian f + <multipliers, h> of a coupled lower level, and steps on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.method.method import At, Method, Numbers, State
from meha.problem.oracle import Function, Oracle
from meha.problem.problem import Problem
from meha.problem.schedules import Power, Schedule, check_schedule
from meha.tensors.checks import check_positive
from meha.tensors.state import Saved
from meha.tensors.variables import Leaves, Variable, norm

GROWING = Power(1.0, p=0.3)
"""The penalty of the first experiment of both papers."""


class Lagrangian(Saved):
    """L(x, y; w) = f(x, y) + <w, h(x, y)>, with inequalities first and equations after them.

    Attributes:
        sizes: the numbers of inequalities and equations.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle = oracle
        self.constraints = oracle.problem.constraints[0]
        with torch.no_grad():  # only the number of rows is wanted
            parts = [constraint.values(x, y) for constraint in self.constraints]
        self.sizes = sum(len(part[0]) for part in parts), sum(len(part[1]) for part in parts)

    def values(self, x: Variable, y: Variable) -> Tensor:
        """Return h(x, y) and the equations as one vector."""
        parts = [constraint.values(x, y) for constraint in self.constraints]
        return torch.cat([part[0] for part in parts] + [part[1] for part in parts])  # the order of the multipliers

    def project(self, w: Tensor, radius: float) -> Tensor:
        """Project multipliers on Z: of size ``radius`` at most, and not negative for inequalities."""
        return torch.cat([w[: self.sizes[0]].clamp(0.0, radius), w[self.sizes[0] :].clamp(-radius, radius)])

    def gradients(self, wrt: tuple[Variable, ...], x: Variable, y: Variable, w: Tensor) -> tuple[Tensor, list[Leaves]]:
        """Return f(x, y) and the gradients of L(x, y; w); they count as one gradient of f."""
        oracle = self.oracle
        value: list[Tensor] = []

        def evaluate(x: Variable, y: Variable, batch: Any) -> Tensor:
            f = oracle.lower(x, y, batch)
            value.append(f.detach())  # f itself is reported; evaluated once, it is taken from inside of L
            return f + w.to(f) @ self.values(x, y).to(f)

        total = Function("lower", evaluate, y.device)
        _, derivatives = oracle.gradients(wrt, [(1.0, total, x, y)], strict=False)  # L may be constant in x
        oracle.average([], (), value)  # above, L and its gradients are averaged over processes, but not f
        return value[0], derivatives

    def violation(self, values: Tensor) -> float:
        """Return the largest violation among rows with these values."""
        parts = values[: self.sizes[0]].clamp(min=0), values[self.sizes[0] :].abs()
        return max((float(part.max()) for part in parts if len(part)), default=0.0)


@dataclass
class LagrangianState(State):
    """x, y, the point theta of the proximal Lagrangian, and the multipliers z."""

    theta: Variable
    z: Variable
    lagrangian: Lagrangian


@dataclass(frozen=True, kw_only=True)
class LagrangianMethod(Method):
    """Base class of single loops on the proximal Lagrangian of the lower level; its fields are those of both methods."""

    takes_coupling: ClassVar[bool] = True
    projects_start: ClassVar[bool] = True
    refuses_nonsmooth: ClassVar[str] = "it takes plain gradient steps on the lower level"
    penalties: ClassVar[tuple[str, ...]] = ("c",)
    steps: ClassVar[tuple[str, ...]] = ("alpha", "eta")

    alpha: Schedule = 0.01
    eta: Schedule = 0.01
    gamma1: float = 10.0
    gamma2: float = 10.0
    c: Schedule = GROWING
    radius: float = 1000.0

    def __post_init__(self) -> None:
        for name in (*self.steps, "c"):
            check_schedule(name, getattr(self, name))
        for name in ("gamma1", "gamma2", "radius"):
            check_positive(name, getattr(self, name))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if not problem.lower_constraints:
            raise ValueError(
                f"lower_constraints: {self.name} is for lower levels that constraints couple with x, and there are none; use"
                " MEHA."
            )
        if problem.needs_batch:
            raise ValueError(f"method: {self.name} takes no batches; use objectives of (x, y) on all data.")

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> LagrangianState:
        lagrangian = Lagrangian(oracle, x, y)
        z = Variable(y.leaves[0].detach().new_zeros(sum(lagrangian.sizes)), "z")
        return LagrangianState(x, y, theta=y.copy(), z=z, lagrangian=lagrangian)

    def descend(self, oracle: Oracle, state: LagrangianState, at: At, multipliers: Tensor) -> tuple[Tensor, Leaves]:
        """Return f at theta, and theta after a step on the proximal Lagrangian; theta itself is not moved."""
        x, y, theta = state.x, state.y, state.theta
        best, (d_theta,) = state.lagrangian.gradients((theta,), x, theta, multipliers)
        moved = [t - at.eta * (d + (t - own) / self.gamma1) for t, d, own in zip(theta.leaves, d_theta, y.leaves, strict=True)]
        oracle.prox(x.value, moved, 1.0)  # without g, this is the projection on Y, for which the step does not matter
        return best, moved

    def advance(self, variable: Variable, direction: Leaves, step: float) -> Leaves:
        """Return the leaves of a variable after a step."""
        return [leaf - step * d for leaf, d in zip(variable.leaves, direction, strict=True)]

    def numbers(
        self, at: At, upper: Tensor, lower: Tensor, best: Tensor, violation: float, directions: tuple[Leaves, Leaves]
    ) -> Numbers:
        """Return the numbers of a step."""
        gap = lower - best
        return {"upper": upper, "lower": lower, "gap": gap, "violation": violation, "d_x": norm(*directions), "c": at.c}

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        listed = ", ".join(self.steps[:-1]) + f" and {self.steps[-1]}"
        return f"Take smaller {listed}, or use the default, which chooses its numbers."
