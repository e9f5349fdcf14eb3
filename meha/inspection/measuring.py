"""Measurements of a problem around its start: values, deviations of gradients, kinks and curvatures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meha.lower.estimation import Probe
from meha.lower.proximal_gradient import solve_lower
from meha.problem.loaders import random_states, set_random_states
from meha.problem.oracle import JOINT_LIMIT, Function, Oracle
from meha.problem.problem import Objective, Problem
from meha.tensors.variables import Leaves, Variable, copy_, inner, norm, subtract

# Heuristics, in units of the size of a variable or of its rounding error eps.
STEPS = (30, 3, 0.3)  # of finite differences, in eps^(1/3): a wrong gradient shows at two of them, whatever the curvature
SPREADS = (2.0, 0.2, 0.02)  # half lengths of lines; the first one with both ends in the domain is used
GAPS = 11  # between the points of a line; odd, so that its centre, where a kink is likely, is inside a gap
HALVINGS = 14  # of the gap around a kink, after which the change of a smooth gradient is far below KINK
SPLIT = 0.47  # where a gap is split: not in its middle, where the derivative may not exist
KINK = 1e-3  # a jump of a gradient counts as a kink from this share of the largest gradient on the line
ENTER = 1e-30  # a step of the proximal map that only brings y into Y and the domain of g


class Line:
    """The segment centre + t v of a variable, |t| <= 1, between two ends."""

    def __init__(self, variable: Variable, first: Leaves, second: Leaves) -> None:
        self.leaves = variable.leaves
        self.v = [v / 2 for v in subtract(second, first)]
        self.centre = _moved(first, self.v, 1.0)
        self.length = float(norm(self.v))

    def go(self, t: float) -> None:
        """Move the variable to the point at t."""
        copy_(self.leaves, _moved(self.centre, self.v, t))


class _FiniteProbe(Probe):
    """A probe that raises where a gradient is not finite, instead of returning a wrong number."""

    def gradient(self, function: Function, wrt: Variable) -> Leaves:
        gradient = super().gradient(function, wrt)
        if not math.isfinite(float(norm(gradient))):
            raise ArithmeticError("a gradient is not finite")
        return gradient


class StartNeighbourhood:
    """Measures a problem around its start, at the present values of x and y, which it moves.

    Attributes:
        g: the non-smooth term.
        levels: F and f by name.
        frozen: whether every call of an objective gets the same random numbers.
        thorough: whether there is time for all measurements; False for modules, many variables and slow objectives.
        secants: curvatures of f along lines in y, collected while kinks are searched.
        outside: message of an error that g raised at a point of X.
    """

    def __init__(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> None:
        self.oracle = Oracle(replace(problem, upper=self.steady(problem.upper), lower=self.steady(problem.lower)), x, y)
        self.g = Function("nonsmooth", lambda x, y, batch: torch.as_tensor(self.oracle.g(x, y)), y.device)
        self.x, self.y, self.batch = x, y, batch
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in x.leaves + y.leaves)
        self.generator = torch.Generator().manual_seed(0)
        self.states, self.frozen = random_states(), False
        self.thorough = not (x.has_modules or y.has_modules) and x.numel + y.numel <= JOINT_LIMIT
        self.secants: list[float] = []
        self.outside = ""
        self.levels = {"F": self.oracle.upper, "f": self.oracle.lower}
        for variable in (x, y):
            self.enter(variable, variable.leaves)
        self.start = {variable: [leaf.detach().clone() for leaf in variable.leaves] for variable in (x, y)}

    def steady(self, objective: Objective) -> Objective:
        """Return the objective with the same random numbers in every call, once ``frozen`` is set."""

        def call(*arguments: Any) -> Tensor:
            if self.frozen:
                set_random_states(self.states)
            return objective(*arguments)

        return call

    def pairs(self) -> Iterator[tuple[str, Function, Variable]]:
        """Yield the derivatives that a run takes, with their names in a report; in x, f stands for f + g."""
        yield "F in y", self.oracle.upper, self.y
        yield "f in y", self.oracle.lower, self.y  # g has kinks in y; a run uses its proximal map there
        yield "F in x", self.oracle.upper, self.x
        yield "f in x", self.oracle.phi, self.x

    def enter(self, variable: Variable, leaves: Leaves) -> None:
        """Bring leaves of x into X, or of y into Y and the domain of g."""
        prox, step = (self.oracle.project, 1.0) if variable is self.x else (self.oracle.prox, ENTER)
        prox(self.x.value, leaves, step)

    def go_back(self) -> None:
        """Return to the start."""
        for variable, leaves in self.start.items():
            copy_(variable.leaves, leaves)

    def scatter(self, spread: float) -> None:
        """Move to a random point around the start; closer to the start if g has no value there."""
        for factor in (1.0, 0.1, 0.01, 0.0):
            for variable, leaves in self.start.items():
                copy_(variable.leaves, _moved(leaves, self.noise(variable), factor * spread))
            try:
                for variable in (self.x, self.y):
                    self.enter(variable, variable.leaves)
                if math.isfinite(float(self.oracle.g(self.x, self.y))):
                    return
            except Exception as error:  # from weights of g that are outside their domain at points of X
                self.outside = self.outside or str(error)

    def noise(self, variable: Variable, even: bool = False) -> Leaves:
        """Return normal noise of the size of each leaf at the start (exactly, if ``even``); that of all leaves, or 1, if 0."""
        draws, start = [], self.start[variable]
        for leaf in start:
            size = root_mean_square([leaf]) or root_mean_square(start) or 1.0
            # Drawn on the CPU in double precision, so that all devices and dtypes visit the same points.
            draw = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64, device="cpu")
            draws.append((size / (root_mean_square([draw]) or 1.0 if even else 1.0) * draw).to(leaf))
        return draws

    def line(self, variable: Variable, first: Leaves, second: Leaves) -> Line:
        """Return the segment between two points, which are first moved into the set of the variable."""
        for end in (first, second):
            self.enter(variable, end)
        return Line(variable, first, second)

    def lines(self, variable: Variable, spread: float) -> Iterator[tuple[str, Line]]:
        """Yield random lines near here with their names: along all leaves, and along single leaves if there are few."""
        here, count = [leaf.detach().clone() for leaf in variable.leaves], len(variable.leaves)
        along = [(variable.argument, range(count))] * (2 if self.thorough else 1)
        if self.thorough and 1 < count <= 6:
            along += [(variable.label(name), range(i, i + 1)) for i, name in enumerate(variable.names)]
        for label, chosen in along:
            first, second = ([d * (i in chosen) for i, d in enumerate(self.noise(variable))] for _ in range(2))
            yield label, self.line(variable, _moved(here, first, spread), _moved(here, second, spread))
            copy_(variable.leaves, here)

    def value(self, function: Function, line: Line | None = None, t: float = 0.0) -> float:
        """Return the value here, or at a point of a line; NaN outside the domain of the function."""
        if line is not None:
            line.go(t)
        try:
            return float(function(self.x, self.y, self.batch))
        except Exception:  # whatever a user's function raises there
            return math.nan

    def gradient(self, function: Function, *wrt: Variable, strict: bool = False) -> list[Leaves]:
        """Return the gradients here; outside the domain of the function NaN, or with ``strict`` raise its error."""
        try:
            return self.oracle.gradients(wrt, [(1.0, function, self.x, self.y)], self.batch, strict=False)[1]
        except Exception:
            if strict:
                raise
            return [[torch.full_like(leaf, math.nan) for leaf in variable.leaves] for variable in wrt]

    def repeats(self) -> bool:
        """Return whether a second call of F and f gives the same values as the first, up to rounding."""
        calls = [(self.value(function), self.value(function)) for function in self.levels.values()]
        return all(abs(first - second) <= 100 * self.eps * max(abs(first), abs(second)) for first, second in calls)

    def deviation(self, function: Function, variable: Variable, line: Line) -> tuple[float, bool]:
        """Return the relative deviation of the slope along a line from differences of values, and if the gradient is wrong.

        A gradient counts as wrong if the differences at two of three step sizes agree with each other much better than with
        the gradient. They do not if a kink is within a step, or if rounding dominates.
        """
        line.go(0.0)
        (gradient,) = self.gradient(function, variable)
        slope = float(inner(gradient, line.v))
        differences, rounding = [], math.inf
        for factor in STEPS:
            h = factor * self.eps ** (1 / 3)
            up, down = self.value(function, line, h), self.value(function, line, -h)
            differences.append((up - down) / (2 * h))  # central: the error is of second order in h
            rounding = min(rounding, 8 * self.eps * max(abs(up), abs(down)) / h)
        typical = float(norm(gradient)) * line.length / math.sqrt(variable.numel)  # in case the slope is small by chance
        scale = max(abs(slope), typical, *map(abs, differences))
        if not (math.isfinite(scale + sum(differences)) and scale > 0):
            return 0.0, False
        error = min(abs(difference - slope) for difference in differences)
        apart = min(abs(a - b) for a, b in itertools.pairwise(differences))
        wrong = error > max(self.eps**0.25 * scale, 5 * apart + rounding)
        return max(error - rounding, 0.0) / scale, wrong

    def jump(self, function: Function, variable: Variable, centre: Leaves) -> float:
        """Return the jump of the gradient at the sharpest kink on a random line, relative to its largest size; 0 if smooth.

        Among a dozen points, the gap in which the gradient changes most unexpectedly is split again and again: where the
        function is smooth, the change shrinks with the gap; at a kink it stays.
        """
        for spread in SPREADS:
            away = self.noise(variable, even=True)
            line = self.line(variable, _moved(centre, away, -spread), _moved(centre, away, spread))
            if all(math.isfinite(self.value(function, line, t)) for t in (-1.0, 1.0)):
                break
        else:
            return 0.0

        def gradient(t: float) -> Leaves:
            line.go(t)
            return self.gradient(function, variable)[0]

        points = [(t, gradient(t)) for t in (2 * i / GAPS - 1 for i in range(GAPS + 1))]
        steps = [subtract(b, a) for (_, a), (_, b) in itertools.pairwise(points)]
        size = max(float(norm(at)) for _, at in points)
        if function is self.oracle.lower and variable is self.y and line.length:  # curvatures that cost nothing more
            bends = [float(inner(step, line.v)) for step in steps if float(norm(step)) > 1e3 * self.eps * size]
            self.secants += [bend * GAPS / (2 * line.length**2) for bend in bends if math.isfinite(bend)]
        apart = {i: _unexpected(*steps[i - 2 : i + 3]) for i in range(2, GAPS - 2)}
        if not (math.isfinite(size + sum(apart.values())) and max(apart.values()) > KINK * size):
            return 0.0
        i = max(apart, key=lambda i: apart[i])
        left, right, change = points[i], points[i + 1], 0.0
        for _ in range(HALVINGS):
            middle = left[0] + SPLIT * (right[0] - left[0])
            at = gradient(middle)
            first, second = (float(norm(subtract(at, end))) for end in (left[1], right[1]))
            left, right = (left, (middle, at)) if first > second else ((middle, at), right)
            change = max(first, second)
            if not change > KINK * size:
                return 0.0
        return change / size

    def curvatures(self, smooth: bool) -> list[tuple[float, float]]:
        """Return the smallest and largest curvature of f in y at several points; only along lines, unless f is smooth."""
        ranges = [(secant, secant) for secant in self.secants]
        spreads: list[float | None] = [0.0] if smooth else []
        if smooth and self.thorough:  # None stands for a point near the solution
            spreads += [None, *(1.0 if i % 2 else 3.0 for i in range(max(2, min(8, 16 // self.y.numel))))]
        probe = _FiniteProbe(self.oracle, self.x, self.y, self.batch, self.generator, rounds=8 if self.thorough else 5)
        for spread in spreads:
            self.go_back()
            try:
                if spread is None:
                    near = solve_lower(self.oracle, self.x, self.y, tol=1e-3, max_steps=15, batch=self.batch).theta
                    copy_(self.y.leaves, near.leaves)
                elif spread:
                    self.scatter(spread)
                ranges.append(probe.block(self.oracle.lower, self.y))
            except Exception:  # outside the domain of f
                continue
        self.go_back()
        return ranges


def root_mean_square(leaves: Leaves) -> float:
    """Return the root mean square of all numbers."""
    return float(norm(leaves)) / math.sqrt(sum(leaf.numel() for leaf in leaves) or 1)


def unevenness(sizes: Leaves, eps: float, *, by_leaf: bool) -> float:
    """Return the ratio of the largest to the smallest size, ignoring sizes within rounding of zero.

    Args:
        by_leaf: whether to compare root mean squares of leaves instead of single numbers.
    """
    parts = [leaf.square().mean().sqrt().reshape(1) if by_leaf else leaf.reshape(-1) for leaf in sizes]
    flat = torch.cat([part.double() for part in parts])
    largest = float(flat.max())
    return largest / float(flat[flat > 100 * eps * largest].min()) if largest > 0 else 1.0


def _moved(leaves: Leaves, direction: Leaves, scale: float) -> Leaves:
    return [leaf + scale * d for leaf, d in zip(leaves, direction, strict=True)]


def _unexpected(*steps: Leaves) -> float:
    """Return the distance of the third of five successive steps from what a cubic through the others predicts."""
    return float(norm([c - (4 * (b + d) - a - e) / 6 for a, b, c, d, e in zip(*steps, strict=True)]))
