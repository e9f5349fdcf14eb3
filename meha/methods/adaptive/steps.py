"""One step of AdaptiveMEHA as a map of z = (x, y, theta), its evaluation, and the accelerated move to the next point."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meha._oracle import Oracle
from meha.methods._anderson import combine
from meha.methods._curvatures import flatten, lower_gradients, upper_gradients, write
from meha.methods.adaptive.state import AdaptiveState, Record
from meha.methods.adaptive.tuning import TUNING

__all__ = ["StepMap", "advance", "evaluate", "move"]


class StepMap(NamedTuple):
    """The step at given c, gamma and steps, z <- prox(z - roots^2 * direction(z)), in terms of records."""

    c: float
    gamma: float
    beta: float
    eta: float
    roots: Tensor  # of the steps, one for each number of z
    parts: tuple[int, int, int]  # how many numbers x, y and theta have

    @classmethod
    def of(cls, oracle: Oracle, state: AdaptiveState) -> StepMap:
        """The map with the steps that the curvatures allow."""
        seen, c = state.sight.curvatures, state.pace.c
        L = seen["f_yy"] + oracle.problem.g.rho
        gamma = TUNING.gamma * state.pace.growth / L
        h_y = seen["F_yy"] / c + L
        h_x = seen["F_xx"] / c + seen["f_xy"] ** 2 / (L + 1 / gamma) or (seen["F_xy"] / c) ** 2 / h_y or 1.0
        coupling = 1 + seen["F_xy"] / c / math.sqrt(h_x * h_y)
        curvatures = (coupling * h_x, coupling * h_y, L + 1 / gamma)
        alpha, beta, eta = (TUNING.safety * shrink / h for shrink, h in zip(state.pace.shrink, curvatures, strict=True))
        parts = (state.x.numel, state.y.numel, state.y.numel)
        roots = [state.origin.new_full((n,), math.sqrt(step)) for n, step in zip(parts, (alpha, beta, eta), strict=True)]
        return cls(c, gamma, beta, eta, torch.cat(roots), parts)

    def direction(self, record: Record) -> Tensor:
        """The direction of the step, without subgradients."""
        z, _, upper, lower = record
        _, y, theta = z.split(self.parts)
        direction = upper / self.c + lower
        direction[-len(theta) :] += (theta - y) / self.gamma
        return direction

    def residual(self, record: Record) -> Tensor:
        """The direction with the subgradients, zero at a fixed point, in the metric of the steps."""
        return self.roots * (self.direction(record) + record[1])

    def size(self, record: Record) -> float:
        """The norm of the residual."""
        return float(self.residual(record).norm())

    def image(self, record: Record) -> Tensor:
        """Where the step leads before the prox maps."""
        return record[0] - self.roots.square() * self.direction(record)

    def before_prox(self, record: Record) -> Tensor:
        """What the prox maps took to z; equal to the image at a fixed point."""
        return record[0] + self.roots.square() * record[1]


def evaluate(oracle: Oracle, state: AdaptiveState, here: StepMap) -> tuple[Record, dict[str, float]]:
    """The gradients at the point, and the numbers of the step."""
    x, y, theta, w = state.at_x, state.at_y, state.theta, state.subgradients
    F, F_x, F_y = upper_gradients(oracle, x, y)
    phi, phi_x, f_y = lower_gradients(oracle, x, y)
    phi_theta, phi_x_theta, f_y_theta = lower_gradients(oracle, x, theta)
    s = w.split(here.parts)[2]
    upper = torch.cat([F_x, F_y, torch.zeros_like(F_y)])
    lower = torch.cat([phi_x - phi_x_theta, f_y - f_y_theta - s, f_y_theta])
    record = (flatten(x, y, theta), w, upper, lower)
    direction = here.direction(record)
    return record, {
        "upper": float(F),
        "lower": float(phi),
        "gap": float(phi - phi_theta) - float((flatten(y) - flatten(theta)).square().sum()) / (2 * here.gamma),
        "residual": here.c * float((direction + w).norm()),
        "d_x": float(direction[: here.parts[0]].norm()),
        "c": here.c,
        "gamma": here.gamma,
    }


def advance(oracle: Oracle, state: AdaptiveState) -> None:
    """Choose the next point: an accelerated step, unless it is inconsistent, or a plain one."""
    here, memory = StepMap.of(oracle, state), state.memory
    last = memory.records[-1]
    target, memory.accelerated = here.image(last), False
    if len(memory.records) > 1:
        residuals = torch.stack([here.residual(record) for record in memory.records])
        start, size = here.before_prox(last), float(residuals[-1].norm())
        step = combine(torch.stack([here.image(record) for record in memory.records]), residuals) - start
        length = float((step / here.roots).norm())
        if TUNING.shortest * size <= length < math.inf:
            reach = max(TUNING.least_reach * size, memory.reach or TUNING.first_reach * size)
            share = min(1.0, reach / length) if length else 1.0
            target, memory.accelerated, memory.reach = start + share * step, True, 2 * share * length
        else:  # the residual cannot change as fast as the memory says
            memory.forget(keep=1)
    move(oracle, state, here, target)


def move(oracle: Oracle, state: AdaptiveState, here: StepMap, target: Tensor) -> None:
    """Go to the prox of the target, and note the subgradients that it finds."""
    x, y, theta = state.at_x, state.at_y, state.theta
    write(target, x, y, theta)
    oracle.project(x.value, x.leaves, 1.0)
    oracle.prox(x.value, y.leaves, here.beta)
    oracle.prox(x.value, theta.leaves, here.eta)
    state.subgradients = (target - flatten(x, y, theta)) / here.roots.square()
