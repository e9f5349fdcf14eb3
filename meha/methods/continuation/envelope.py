"""Phi_c(x) = min_y { F + c (f + g) }(x, y) - c min_theta (f + g)(x, theta), with its gradient, by lower solves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from meha.methods._levels import Levels, LowerPoint, PenaltyPoint
from meha.methods._quasi_newton import Pairs, Point, PointT, size
from meha.methods.continuation.scales import Scales
from meha.methods.continuation.tuning import TUNING

__all__ = ["Envelope", "EnvelopePoint", "LowerSolve"]


@dataclass(eq=False, kw_only=True)
class EnvelopePoint(Point):
    """Phi_c at x.

    Attributes:
        y: the lower solution under the pull of F.
        thetas: a lower solution in each valley, that of y first.
        shares: the weight of each valley in the value function.
        F, phi, gap: F and f + g at y, and by how much f + g at y exceeds the least at a theta.
        slope, blur: the size of the parts of the gradient, and their rounding error.
    """

    y: Tensor
    thetas: list[Tensor]
    shares: list[float]
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
        smallest, idle, cleared, start = math.inf, 0, False, max(scales.y_size(z), scales.y_size(other))
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
        return {"c": self.c, "t": self.t, "force": self.force, "solved": self.solved, "pairs": self.pairs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another solve was."""
        self.enter(state["c"])
        self.t, self.force, self.solved = state["t"], state["force"], state["solved"]
        self.pairs.load_state_dict(state["pairs"])


class Envelope:
    """Phi_c as a function of x, with c and the accuracy ``eps`` of the solves.

    The value function is the least over the valleys that are known, smoothed where several are as low: with the weights p of
    the valleys and mu = kappa / c it is

        v(x) = - mu log( sum_i p_i exp( - v_i(x) / mu ) ).

    Its gradient is that of sum_i s_i v_i, with shares s_i that are multipliers: where the optimum lies on the border between
    two valleys, F alone would cross it, and the share of the valley beyond is what holds x back. From stage to stage the shares
    become the weights, divided by the growth of c, so that the smoothing leaves no error.

    Attributes:
        weights: p, one for each valley; the first is the one of y.
        kappa: the part of the range of F over which the smoothing extends.
    """

    def __init__(self, levels: Levels, scales: Scales) -> None:
        self.levels, self.scales = levels, scales
        self.solve_y = LowerSolve(levels, scales, levels.penalty)
        self.solve_thetas = [self._new()]
        self.weights, self.kappa = [1.0], 0.0

    def _new(self) -> LowerSolve[LowerPoint]:
        return LowerSolve(self.levels, self.scales, lambda theta, weight: self.levels.lower(theta))

    def enter(self, c: float, eps: float) -> None:
        """Begin a stage."""
        self.c, self.eps = c, eps
        if self.scales.proximal:
            self.levels.oracle.selection.weight = self.scales.tie(c)
        self.solve_y.enter(c)
        for solve in self.solve_thetas:
            solve.enter(math.inf)

    def choose(self, kept: Sequence[int]) -> None:
        """Keep some of the valleys, in this order."""
        self.solve_thetas = [self.solve_thetas[i] for i in kept]
        self.reweigh([self.weights[i] for i in kept])

    def extend(self, n: int) -> None:
        """Make room for further valleys, ``n`` in all."""
        while len(self.solve_thetas) < n:
            self.solve_thetas.append(self._new())
            self.solve_thetas[-1].enter(math.inf)
        self.reweigh([*self.weights, *[TUNING.new_weight] * (n - len(self.weights))])

    def reweigh(self, weights: Sequence[float]) -> None:
        """Set the weights of all valleys; the first gets what the others leave."""
        least = TUNING.least_weight * min(1.0, self.scales.balance / self.c)
        others = [max(weight, least) for weight in weights[1:]]
        first = max(1 - sum(others), least)
        self.weights = [weight / (first + sum(others)) for weight in (first, *others)]

    def lower(self, theta: Tensor, other: Tensor, valley: int = 0) -> LowerPoint:
        """Solve the lower level in a valley at the present x."""
        solve = self.solve_thetas[valley]
        solve.force = self.solve_y.force
        return solve(theta, other, self.eps)

    def glance(self, theta: Tensor) -> LowerPoint:
        """Solve the lower level from another point; it leaves no trace in the memory."""
        solve = self._new()
        solve.enter(math.inf)
        solve.force = self.solve_y.force
        return solve(theta, theta, self.eps)

    def branch(self, theta: Tensor) -> PenaltyPoint:
        """The lower solution under the pull of F, from another valley; it leaves no trace in the memory."""
        solve = LowerSolve(self.levels, self.scales, self.levels.penalty)
        solve.enter(self.c)
        return solve(theta, theta, self.eps)

    def __call__(self, x: Tensor, y: Tensor, thetas: Sequence[Tensor], far: float) -> EnvelopePoint:
        """Evaluate Phi_c at x, with solves that start at y and the thetas; NaN where one fails, or x is larger than ``far``."""
        nowhere = EnvelopePoint(x, math.nan, torch.full_like(x, math.nan), y=y, thetas=list(thetas), shares=self.weights)
        if size(x) > far:
            return nowhere
        self.levels.move(x)
        at_y = self.solve_y(y, thetas[0], self.eps)
        if not at_y.finite:
            return nowhere
        y, F, F_x, phi = at_y.z, at_y.F, at_y.F_x, at_y.f + at_y.nonsmooth
        ends = [self.lower(thetas[0], y)]
        if not ends[0].value <= phi + ends[0].noise:
            ends = [self.lower(y, y)]
        ends += [self.lower(theta, y, i) for i, theta in enumerate(thetas) if i]
        if not all(end.finite for end in ends):
            return nowhere
        c, least = self.c, min(ends, key=lambda end: end.value)
        shares, smooth = self._shares([end.value - least.value for end in ends])
        pull = c * sum(
            (share * self.levels.pull(at_y, end) for share, end in zip(shares, ends, strict=True) if share), torch.zeros_like(x)
        )
        gap, slope = phi - least.value, size(F_x) + size(c * self.levels.pull(at_y, ends[0]))
        noise = c * (at_y.noise + least.noise) + self.eps**2 * c * abs(gap)
        blur = 2 * self.levels.eps * c * (size(least.f_x) + self.scales.curvatures["f_xy"] * size(y))
        value = F + c * (gap - smooth)
        point = EnvelopePoint(x, value, F_x + pull, noise=noise, y=y, thetas=[end.z for end in ends], shares=shares)
        point.F, point.phi, point.gap, point.slope, point.blur = F, phi, gap, slope, blur
        return point

    def _shares(self, heights: Sequence[float]) -> tuple[list[float], float]:
        """The shares of valleys of these heights above the lowest, and by how much the smoothed minimum differs from it."""
        if len(heights) == 1:
            return [1.0], 0.0
        mu = self.kappa / self.c
        parts = [p * (math.exp(-h / mu) if mu else float(h <= 0)) for p, h in zip(self.weights, heights, strict=True)]
        return [part / sum(parts) for part in parts], -mu * math.log(sum(parts))

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluation depends on."""
        thetas = [solve.state_dict() for solve in self.solve_thetas]
        own = {"c": self.c, "eps": self.eps, "weights": self.weights, "kappa": self.kappa}
        return own | {"solve_y": self.solve_y.state_dict(), "solve_thetas": thetas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another envelope was."""
        self.c, self.eps, self.weights, self.kappa = (state[name] for name in ("c", "eps", "weights", "kappa"))
        if self.scales.proximal:
            self.levels.oracle.selection.weight = self.scales.tie(self.c)
        self.solve_y.load_state_dict(state["solve_y"])
        self.solve_thetas = [self._new() for _ in state["solve_thetas"]]
        for solve, saved in zip(self.solve_thetas, state["solve_thetas"], strict=True):
            solve.load_state_dict(saved)
