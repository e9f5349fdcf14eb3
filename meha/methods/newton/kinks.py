"""Coordinates of y that g or Y hold: which are about to move, and how x can let others go."""

from __future__ import annotations

import torch
from torch import Tensor

from meha.methods._quasi_newton import size
from meha.methods.newton.hyper import Value
from meha.methods.newton.lower import LowerLevel
from meha.methods.newton.tuning import TUNING

__all__ = ["letting_go", "weakly_held"]


def weakly_held(lower: LowerLevel, now: Value) -> Tensor:
    """A mask of the coordinates of y that a small change of the gradient would set free."""
    response = now.response
    if lower.faces.smooth or response is None or response.face.index is None:
        return torch.zeros_like(now.y, dtype=torch.bool)
    at, step = response.at, lower.step
    held = torch.ones_like(at.y, dtype=torch.bool)
    held[response.face.index] = False
    u = at.y - step * at.f_y
    away = torch.where(u >= at.y, 1.0, -1.0).to(u)
    weak = torch.zeros_like(held)
    for shift in (away, -away):
        face = lower.faces.at(lower.faces.prox(at.x, u + TUNING.margin * lower.scale * shift, step))
        if face.index is not None:
            weak[face.index] = True
    return weak & held


def letting_go(lower: LowerLevel, now: Value, zero: float) -> Tensor | None:
    """A direction in x along which g lets coordinates of y go that would lower F; None if there is none.

    With A the free coordinates, F changes with a held y_i at the rate F_i - H_iA v; let go, y_i moves against f_i. Those
    coordinates of x that have no influence now, with hypergradients up to ``zero``, go down the slope of g along such moves.
    """
    response, oracle = now.response, lower.oracle
    if oracle.problem.nonsmooth is None or response is None or response.face.index is None or now.rates is None:
        return None
    at, idle = response.at, now.gradient.abs() <= zero
    pull = torch.where(now.rates * at.f_y > 0, -at.f_y, 0.0)
    pull[response.face.index] = 0.0
    length = size(pull)
    if not bool(idle.any()) or not length:
        return None
    way = lower.eps**TUNING.loose_power * (lower.scale or 1.0) / length * pull
    here, there = (lower.flat_x.join(oracle.g_gradient(at.x, lower.flat_y.at(y))) for y in (at.y, at.y + way))
    direction = torch.where(idle, -(there - here).sign(), 0.0)
    return direction if bool(direction.any()) else None
