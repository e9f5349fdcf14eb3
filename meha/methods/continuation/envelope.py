"""Phi_c(x) = min_y { F + c (f + g) }(x, y) - c min_theta (f + g)(x, theta), with its gradient, by two lower solves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from meha.methods._levels import Levels, LowerPoint
from meha.methods._quasi_newton import Pairs, Point, PointT, size
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.tuning import TUNING

__all__ = ["Envelope", "EnvelopePoint", "LowerSolve"]


@dataclass(eq=False, kw_only=True)
class EnvelopePoint(Point):
    """Phi_c at x.

    Attributes:
        y, theta: the two lower solutions.
        F, phi, gap: F and f + g at y, and by how much f + g at y exceeds that at theta.
        slope, blur: the size of the parts of the gradient, and their rounding error.
    """

    y: Tensor
    theta: Tensor
    F: float = math.nan
    phi: float = math.nan
    gap: float = math.nan
    slope: float = math.nan
    blur: float = math.nan


class LowerSolve(Generic[PointT]):
    """Minimises F/c + f + g, or f + g (c infinite), again and again as x and c change.

    Args:
        evaluate: the point at y, with the weight 1/c of F.

    Attributes:
        pairs, t: its memory of curvature, and the plain step.
        force: the size of F's pull on y, 1/c of its gradient.
        solved: whether the last solve got the residual to the size of the force.
    """

    def __init__(self, levels: Levels, scales: Scales, evaluate: Callable[[Tensor, float], PointT]) -> None:
        self.levels, self.scales, self.evaluate = levels, scales, evaluate
        self.pairs = Pairs.sized(TUNING.composite_pairs if levels.composite else TUNING.pairs, len(scales.y0))
        self.force, self.solved = 0.0, False

    def enter(self, c: float) -> None:
        """Begin a stage."""
        self.c, rho = c, self.levels.oracle.problem.g.rho
        self.curvature = self.scales.curvatures["F_yy"] / c + self.scales.curvatures["f_yy"]
        self.t = min(1 / (self.curvature or 1.0), 0.5 / rho if rho else math.inf)
        self.pairs.reweigh(1 / c)

    def __call__(self, z: Tensor, other: Tensor, eps: float) -> PointT:
        """Minimise from z on, until the distance from ``other`` is known to the relative accuracy ``eps``."""
        scales, rounding = self.scales, self.levels.eps
        descent = self.levels.descent(lambda at: self.evaluate(at, 1 / self.c), self.pairs, self.t)
        point = descent.evaluate(z)
        if not point.finite:
            return point
        smallest, idle, cleared, start = math.inf, 0, False, scales.y_size(z)
        descent.t = min(descent.t, TUNING.leap * start / (size(point.gradient) or math.inf) or descent.t)
        for _ in range(TUNING.inner_steps):
            if point.upper is not None:
                self.force = max(size(point.upper), TUNING.least_force * scales.tol * scales.slope) / self.c
            d, remembered = descent.direction(point)
            r = descent.residual(point).r
            residual, length, here = size(r), size(d), size(point.z)
            enough = eps * max(size(point.z - other), TUNING.least_distance * scales.tol * scales.y_size(point.z))
            if (residual <= eps * self.force and length <= enough) or residual <= 2 * rounding * self.curvature * here:
                break
            idle = 0 if residual < 0.5 * smallest else idle + 1
            smallest = min(smallest, residual)
            nothing = -float(r @ d) <= TUNING.within_noise * point.noise
            if idle >= TUNING.patience and (nothing or length <= rounding**0.5 * here):
                break
            if length <= TUNING.within_rounding * rounding * here:
                break
            new = descent.step(point, d, remembered)
            if new is None:
                if cleared or not remembered or nothing:
                    break
                self.pairs.clear()
                cleared = True
                continue
            point, cleared = new, False
            if size(point.z) > TUNING.far * max(start, scales.y_largest):
                return replace(point, smooth=-math.inf)
        self.solved = size(descent.residual(point).r) <= TUNING.solved * max(self.force, scales.tol * scales.slope)
        self.t = descent.t
        return point

    def state_dict(self) -> dict[str, Any]:
        """What the next solve depends on."""
        return {"t": self.t, "force": self.force, "pairs": self.pairs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another solve was."""
        self.t, self.force = state["t"], state["force"]
        self.pairs.load_state_dict(state["pairs"])


class Envelope:
    """Phi_c as a function of x, with c and the accuracy ``eps`` of the solves."""

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self.levels, self.scales = levels, scales
        self.solve_y = LowerSolve(levels, scales, levels.penalty)
        self.solve_theta = LowerSolve(levels, scales, lambda theta, weight: levels.lower(theta))

    def enter(self, c: float, eps: float) -> None:
        """Begin a stage."""
        self.c, self.eps = c, eps
        self.solve_y.enter(c)
        self.solve_theta.enter(math.inf)

    def lower(self, theta: Tensor, other: Tensor) -> LowerPoint:
        """Solve the lower level at the present x."""
        self.solve_theta.force = self.solve_y.force
        return self.solve_theta(theta, other, self.eps)

    def __call__(self, x: Tensor, y: Tensor, theta: Tensor, far: float) -> EnvelopePoint:
        """Evaluate Phi_c at x, with solves that start at y and theta; NaN where one fails, or x is larger than ``far``."""
        nowhere = EnvelopePoint(x, math.nan, torch.full_like(x, math.nan), y=y, theta=theta)
        if size(x) > far:
            return nowhere
        self.levels.move(x)
        at_y = self.solve_y(y, theta, self.eps)
        if not at_y.finite:
            return nowhere
        y, F, F_x, phi = at_y.z, at_y.F, at_y.F_x, at_y.f + at_y.nonsmooth
        at_theta = self.lower(theta, y)
        if not at_theta.value <= phi + at_theta.noise:
            at_theta = self.lower(y, y)
        if not at_theta.finite:
            return nowhere
        c, theta, gap = self.c, at_theta.z, phi - at_theta.value
        pull = c * self.levels.pull(at_y, at_theta)
        slope = size(F_x) + size(pull)
        noise = c * (at_y.noise + at_theta.noise) + self.eps**2 * c * abs(gap)
        blur = 2 * self.levels.eps * c * (size(at_theta.f_x) + self.scales.curvatures["f_xy"] * size(y))
        point = EnvelopePoint(x, F + c * gap, F_x + pull, noise=noise, y=y, theta=theta)
        point.F, point.phi, point.gap, point.slope, point.blur = F, phi, gap, slope, blur
        return point

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluation depends on."""
        solves = {"solve_y": self.solve_y.state_dict(), "solve_theta": self.solve_theta.state_dict()}
        return {"c": self.c, "eps": self.eps} | solves

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another envelope was."""
        self.enter(state["c"], state["eps"])
        self.solve_y.load_state_dict(state["solve_y"])
        self.solve_theta.load_state_dict(state["solve_theta"])
