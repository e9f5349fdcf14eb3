"""Random small coupled problems with answers from other means, and how the default fares on them.

    python -m meha_lab.tools.coupled_trials answers                 # compute the answers that are missing
    python -m meha_lab.tools.coupled_trials solve tuning [--only KIND] [--starts zeros ones random]
    python -m meha_lab.tools.coupled_trials solve held-out
    python -m meha_lab.tools.coupled_trials table

A problem is linear and quadratic with linear constraints, and its answer is the best of the convex programs of all active sets
of its lower level; or it has one or two x, and its answer is found on a grid over x that is refined, with the lower level
solved on a grid (one y), by descents from many points (two y) or in closed form; or it is a sum of such problems with their
unknowns mixed. No method of the library is used for the answers. Half of the problems of each kind are held out.
"""

import argparse
import itertools
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meha_lab.paths import RECORDS
from meha_lab.store import Store

import meha
from meha.problem.constraints import Bounds, Linear, Smooth
from meha.problem.sets import Box, NonNegative

ANSWERS = Path(__file__).with_name("coupled_answers.json")
KIND = "coupled_trials"
SEEDS = 6
"""Problems of each kind; the odd ones are held out."""

STARTS = ("zeros", "ones", "random")
TIE = 1e-9


def double(value):
    return torch.as_tensor(np.asarray(value), dtype=torch.float64)


# Linear and quadratic problems


@dataclass(eq=False)
class Quadratic:
    """F = z'Pz / 2 + p'z, f = y'Qy / 2 + y'(Rx + c), A x + B y <= b, A_eq x + B_eq y = b_eq below, U z <= u above."""

    P: Any
    p: Any
    Q: Any
    R: Any
    c: Any
    A: Any
    B: Any
    b: Any
    n: int
    m: int
    A_eq: Any = None
    B_eq: Any = None
    b_eq: Any = None
    U: Any = None
    u: Any = None
    low: Any = None
    high: Any = None
    split: bool = False  # bounds of y as a set, not as rows

    def problem(self):
        P, p, Q, R, c = (double(a) for a in (self.P, self.p, self.Q, self.R, self.c))
        lower, upper = [], []
        if len(self.b):
            lower.append(Linear(double(self.A), double(self.B), double(self.b)))
        if self.b_eq is not None:
            lower.append(Linear(A_eq=double(self.A_eq), B_eq=double(self.B_eq), b_eq=double(self.b_eq)))
        if self.U is not None:
            upper.append(Linear(double(self.U[:, : self.n]), double(self.U[:, self.n :]), double(self.u)))
        x_set = None
        if self.low is not None:
            x_set = (
                NonNegative()
                if self.high is None and not np.any(self.low)
                else Box(double(self.low), math.inf if self.high is None else double(self.high))
            )

        def F(x, y):
            z = torch.cat([x, y])
            return z @ P @ z / 2 + p @ z

        return meha.Problem(
            F,
            lambda x, y: y @ Q @ y / 2 + y @ (R @ x + c),
            x_set=x_set,
            y_set=NonNegative() if self.split else None,
            lower_constraints=lower,
            upper_constraints=upper,
        )

    def rows(self):
        """The lower inequalities, those of the set included."""
        if not self.split:
            return self.A, self.B, self.b
        return (
            np.vstack([self.A, np.zeros((self.m, self.n))]),
            np.vstack([self.B, -np.eye(self.m)]),
            np.concatenate([self.b, np.zeros(self.m)]),
        )

    def answer(self):
        import cvxpy

        n, m = self.n, self.m
        A, B, b = self.rows()
        z, lam = cvxpy.Variable(n + m), cvxpy.Variable(len(b), nonneg=True)
        on, off = cvxpy.Parameter(len(b), nonneg=True), cvxpy.Parameter(len(b), nonneg=True)
        x, y = z[:n], z[n:]
        gradient = self.Q @ y + self.R @ x + self.c + B.T @ lam
        slack = b - A @ x - B @ y
        limits = [slack >= 0, cvxpy.multiply(on, slack) == 0, cvxpy.multiply(off, lam) == 0]
        most = m
        if self.b_eq is not None:
            nu = cvxpy.Variable(len(self.b_eq))
            gradient = gradient + self.B_eq.T @ nu
            limits.append(self.A_eq @ x + self.B_eq @ y == self.b_eq)
        limits.append(gradient == 0)
        if self.low is not None:
            limits.append(x >= self.low)
        if self.high is not None:
            limits.append(x <= self.high)
        if self.U is not None:
            limits.append(self.U @ z <= self.u)
        objective = self.p @ z
        if np.any(self.P):
            objective = objective + 0.5 * cvxpy.quad_form(z, cvxpy.psd_wrap(self.P))
        program = cvxpy.Problem(cvxpy.Minimize(objective), limits)
        best, where = math.inf, None
        for count in range(most + 1):
            for chosen in itertools.combinations(range(len(b)), count):
                mask = np.zeros(len(b))
                mask[list(chosen)] = 1.0
                on.value, off.value = mask, 1 - mask
                try:
                    program.solve(solver="CLARABEL")
                except cvxpy.SolverError:
                    continue
                if program.status in ("unbounded", "unbounded_inaccurate"):
                    return None
                if program.status in ("optimal", "optimal_inaccurate") and program.value < best - 1e-8:
                    best, where = float(program.value), np.array(z.value)
        return None if where is None else (best, where[:n], where[n:])

    def value(self, x):
        """The least f at x."""
        import cvxpy

        A, B, b = self.rows()
        y = cvxpy.Variable(self.m)
        limits = [B @ y <= b - A @ x]
        if self.b_eq is not None:
            limits.append(self.B_eq @ y == self.b_eq - self.A_eq @ x)
        objective = y @ (self.R @ x + self.c)
        if np.any(self.Q):
            objective = objective + 0.5 * cvxpy.quad_form(y, cvxpy.psd_wrap(self.Q))
        program = cvxpy.Problem(cvxpy.Minimize(objective), limits)
        program.solve(solver="CLARABEL")
        return float(program.value) if program.status in ("optimal", "optimal_inaccurate") else None


def whole(random, *shape, reach=4):
    return random.integers(-reach, reach + 1, size=shape).astype(float)


def quadratic(seed, *, F="linear", f="linear", upper=0, equations=0, degenerate=False, free=False, idle=False, size=None):
    """A random problem with whole numbers; drawn again until it has an answer."""
    random = np.random.default_rng(seed)
    n, m = size or (int(random.integers(1, 4)), int(random.integers(1, 4)))
    total = n + m
    rows = int(random.integers(2, 4))
    P = np.zeros((total, total))
    if F == "quadratic":
        target = whole(random, total, reach=6)
        weights = random.integers(1, 3, size=total).astype(float)
        if idle:
            weights[0] = 0.0
        if size is None and random.random() < 0.5:
            weights[random.integers(total)] = 0.0
        P, p = np.diag(2 * weights), -2 * weights * target
    else:
        p = whole(random, total)
    Q, R = np.zeros((m, m)), np.zeros((m, n))
    if f == "quadratic":
        root = whole(random, m, m, reach=2)
        Q = 2 * np.eye(m) + (root @ root.T if random.random() < 0.5 else 0.0)
        R = whole(random, m, n, reach=3)
    elif random.random() < 0.3 and not degenerate:
        R = whole(random, m, n, reach=1)
    c = whole(random, m)
    A, B = whole(random, rows, n, reach=3), whole(random, rows, m, reach=3)
    b = random.integers(2, 13, size=rows).astype(float)
    if degenerate:
        A, B, b = np.vstack([A, A[:1], A[1:2]]), np.vstack([B, B[:1], 2 * B[1:2]]), np.concatenate([b, b[:1], 2 * b[1:2]])
        A[-1] *= 2
        c = -B[0] if random.random() < 0.5 else c * (random.random(m) < 0.5)
    A, B, b = np.vstack([A, np.ones((1, n)) * (not free)]), np.vstack([B, np.ones((1, m))]), np.concatenate([b, [10.0]])
    if idle:
        A[:, 0] = R[:, 0] = 0.0
    eq = {}
    if equations:
        k = min(equations, max(m - 1, 1))
        eq = dict(
            A_eq=whole(random, k, n, reach=2),
            B_eq=np.eye(k, m) + whole(random, k, m, reach=1),
            b_eq=random.integers(1, 6, size=k).astype(float),
        )
    split = bool(random.random() < 0.5)
    if not split:
        A, B, b = np.vstack([A, np.zeros((m, n))]), np.vstack([B, -np.eye(m)]), np.concatenate([b, np.zeros(m)])
    U, u = None, None
    if upper:
        U, u = whole(random, upper, total, reach=3), random.integers(0, 8, size=upper).astype(float)
    low = None if free else np.zeros(n)
    high = np.full(n, float(random.integers(5, 12))) if not free and random.random() < 0.4 else None
    return Quadratic(P, p, Q, R, c, A, B, b, n, m, U=U, u=u, low=low, high=high, split=split, **eq)


# One or two x, on a grid


@dataclass(eq=False)
class Gridded:
    """Functions of tensors x (..., n) and y (..., m); boxes that the search covers, and which of them belong to the problem."""

    F: Any
    f: Any
    h: tuple = ()
    G: tuple = ()
    e: tuple = ()
    x: Any = ((-3.0, 3.0),)
    y: Any = ((-3.0, 3.0),)
    x_set: bool = True
    y_set: bool = True
    moving: tuple | None = None  # Bounds(low, high) for one y
    response: Any = None  # y(x), where it is known
    path: Any = None  # (box, map): all feasible points as (x, y) of some parameters
    size: tuple = field(init=False)

    def __post_init__(self):
        self.size = len(self.x), len(self.y)

    n = property(lambda self: self.size[0])
    m = property(lambda self: self.size[1])

    def problem(self):
        lower, upper = [], []
        if self.h:
            lower.append(Smooth(lambda x, y: torch.stack([h(x, y) for h in self.h])))
        if self.e:
            lower.append(Smooth(equations=lambda x, y: torch.stack([e(x, y) for e in self.e])))
        if self.moving:
            lower.append(Bounds(*self.moving))
        if self.G:
            upper = [Smooth(lambda x, y: torch.stack([G(x, y) for G in self.G]))]
        return meha.Problem(
            self.F,
            self.f,
            x_set=self._box(self.x) if self.x_set else None,
            y_set=self._box(self.y) if self.y_set else None,
            lower_constraints=lower,
            upper_constraints=upper,
        )

    @staticmethod
    def _box(ends):
        return Box(double([a for a, _ in ends]), double([b for _, b in ends]))

    def broken(self, x, y):
        """The largest violation below."""
        worst = torch.zeros(torch.broadcast_shapes(x.shape[:-1], y.shape[:-1]), dtype=torch.float64)
        for h in self.h:
            worst = torch.maximum(worst, h(x, y))
        if self.moving:
            low, high = (None if end is None else end(x) if callable(end) else end for end in self.moving)
            if low is not None:
                worst = torch.maximum(worst, (low - y).amax(-1))
            if high is not None:
                worst = torch.maximum(worst, (y - high).amax(-1))
        return worst

    def lower(self, x):
        """Solutions of the lower level at one x that tie, the best for F first; None if there are none."""
        if self.response is not None:
            found = self.response(x)
            if not isinstance(found, list):
                return None if found is None else [found]
            return sorted(found, key=lambda y: (self.above(x, y) > 1e-8, float(self.F(x, y))))
        points = self._line(x) if self.m == 1 else self._plane(x)
        if not points:
            return None
        least = min(v for v, _ in points)
        tied = [y for v, y in points if v <= least + TIE * (1 + abs(least))]
        return sorted(tied, key=lambda y: (self.above(x, y) > 1e-8, float(self.F(x, y))))

    def above(self, x, y):
        return max((float(G(x, y)) for G in self.G), default=0.0)

    def _line(self, x):
        (a, b), found = self.y[0], []
        windows, spacing = [(a, b)], (b - a) / 800
        for zoom in range(7):
            new = []
            for low, high in windows:
                ys = torch.linspace(low, high, 801 if zoom == 0 else 41, dtype=torch.float64)[:, None]
                spacing = (high - low) / (len(ys) - 1)
                values = self.f(x.expand(len(ys), -1), ys)
                values = torch.where(
                    self.broken(x.expand(len(ys), -1), ys) <= 1e-10, values, torch.full_like(values, math.inf)
                ).numpy()
                padded = np.concatenate([[math.inf], values, [math.inf]])
                is_least = (padded[1:-1] <= padded[:-2]) & (padded[1:-1] <= padded[2:]) & np.isfinite(values)
                new += [(float(values[k]), float(ys[k, 0]), spacing) for k in np.flatnonzero(is_least)]
            new.sort()
            kept = []
            for v, y, s in new:
                if len(kept) < (6 if zoom == 0 else 3) and all(abs(y - other) > 1.5 * s for _, other, _ in kept):
                    kept.append((v, y, s))
            windows = [(max(a, y - s), min(b, y + s)) for _, y, s in kept]
            found = [(v, double([y])) for v, y, _ in kept]
            if not kept:
                return []
        return found

    def _plane(self, x):
        from scipy.optimize import minimize

        axes = [torch.linspace(a, b, 31, dtype=torch.float64) for a, b in self.y]
        ys = torch.cartesian_prod(*axes)
        wide = x.expand(len(ys), -1)
        merit = self.f(wide, ys) + 100 * self.broken(wide, ys)
        chosen = []
        for k in torch.argsort(merit):
            if len(chosen) >= 5:
                break
            if all(float((ys[k] - other).abs().max()) > (self.y[0][1] - self.y[0][0]) / 8 for other in chosen):
                chosen.append(ys[k])

        def as_numpy(function):
            return (lambda v: float(function(x, double(v)))), (lambda v: _slope(function, x, v))

        f, df = as_numpy(self.f)
        limits = []
        for h in self.h:
            value, slope = as_numpy(h)
            limits.append(dict(type="ineq", fun=lambda v, value=value: -value(v), jac=lambda v, slope=slope: -slope(v)))
        found = []
        for start in chosen:
            end = minimize(
                f,
                start.numpy(),
                jac=df,
                bounds=self.y,
                constraints=limits,
                method="SLSQP",
                options=dict(ftol=1e-14, maxiter=200),
            )
            y = double(end.x)
            if float(self.broken(x, y)) <= 1e-8:
                found.append((float(self.f(x, y)), y))
        return found

    def evaluate(self, u):
        """F and the point for parameters u (x, unless there is a path); infinite where infeasible."""
        u = double(u)
        if self.path is not None:
            x, y = self.path[1](u)
            outside = any(
                float(v) < a - 1e-12 or float(v) > b + 1e-12
                for v, (a, b) in zip(torch.cat([x, y]), (*self.x, *self.y), strict=True)
            )
            if outside or float(self.broken(x, y)) > 1e-9:
                return math.inf, None
            ys = [y]
        else:
            x, ys = u, self.lower(u)
        if not ys or self.above(x, ys[0]) > 1e-8:
            return math.inf, None
        return float(self.F(x, ys[0])), (x, ys[0])

    def answer(self):
        box = self.path[0] if self.path is not None else self.x
        low, high = (np.array(end) for end in zip(*box, strict=True))
        heavy = self.m > 1 and self.response is None and self.path is None
        counts = {1: (121, 11, 6) if heavy else (401, 21, 6), 2: (25, 7, 9) if heavy else (41, 11, 7)}[len(low)]
        windows, best = [(low, high)], (math.inf, None)
        for zoom in range(counts[2]):
            found = []
            for a, b in windows:
                count = counts[0] if zoom == 0 else counts[1]
                for u in itertools.product(*[np.linspace(a[i], b[i], count) for i in range(len(low))]):
                    value, point = self.evaluate(np.array(u))
                    if point is not None:
                        found.append((value, np.array(u), (b - a) / (count - 1), point))
            found.sort(key=lambda item: item[0])
            if not found:
                return None
            if found[0][0] < best[0]:
                best = found[0][0], found[0][3]
            windows, chosen = [], []
            for _, u, step, _ in found:
                if len(chosen) >= 4:
                    break
                if all(np.max(np.abs(u - other) / np.maximum(step, 1e-300)) > 2.5 for other in chosen):
                    chosen.append(u)
                    windows.append((np.maximum(low, u - 1.5 * step), np.minimum(high, u + 1.5 * step)))
        return None if best[1] is None else (best[0], best[1][0].numpy(), best[1][1].numpy())

    def value(self, x):
        if self.path is not None and len(self.path) > 2:
            return self.path[2](double(x))
        found = self.lower(double(x))
        return None if not found else float(self.f(double(x), found[0]))


def _slope(function, x, v):
    y = double(v).clone().requires_grad_()
    value = function(x, y)
    if not value.requires_grad:
        return np.zeros(len(v))
    return torch.autograd.grad(value, y, allow_unused=True)[0].numpy() if value.requires_grad else np.zeros(len(v))


def _x(k):
    return lambda x, y: x[..., k]


def bilinear(seed):
    """Revenue x y against a customer who buys y within a budget or a capacity that moves with x."""
    r = np.random.default_rng(seed)
    a, b, k = r.uniform(1, 4), r.uniform(0.5, 2), r.uniform(0.3, 1)
    kinds = [
        Gridded(
            lambda x, y: -x[..., 0] * y[..., 0],
            lambda x, y: (x[..., 0] - a) * y[..., 0],
            h=(lambda x, y: x[..., 0] + y[..., 0] - a - b,),
            x=((0.0, 6.0),),
            y=((0.0, 4.0),),
        ),
        Gridded(
            lambda x, y: -x[..., 0] * y[..., 0] + k * y[..., 0] ** 2,
            lambda x, y: (x[..., 0] - a) * y[..., 0] + 0.5 * y[..., 0] ** 2,
            h=(lambda x, y: x[..., 0] * y[..., 0] - b,),
            x=((0.0, 6.0),),
            y=((0.0, 4.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] * y[..., 0] - a * x[..., 1],
            lambda x, y: (x[..., 1] - k) * y[..., 0],
            h=(lambda x, y: y[..., 0] - x[..., 0] - b, lambda x, y: -y[..., 0] - 1),
            x=((-2.0, 2.0), (-1.0, 2.0)),
            y=((-4.0, 4.0),),
        ),
        Gridded(
            lambda x, y: -x[..., 0] * y[..., 0] - x[..., 1] * (b - y[..., 0]),
            lambda x, y: (x[..., 0] - x[..., 1] - k) * y[..., 0],
            h=(lambda x, y: y[..., 0] - b, lambda x, y: -y[..., 0], lambda x, y: x[..., 0] + x[..., 1] - 5 - y[..., 0]),
            x=((0.0, 3.0), (0.0, 3.0)),
            y=((-0.5, 4.0),),
            y_set=False,
        ),
    ]
    return kinds[seed % len(kinds)]


def polynomial(seed):
    """Polynomials of degree three and four above, a convex quadratic below with linear coupling."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1.5, 1.5, size=8)

    def F1(x, y):
        return x[..., 0] ** 3 * y[..., 0] + a[0] * y[..., 0] ** 3 + (x[..., 0] + a[1]) ** 4

    def F2(x, y):
        return (x[..., 0] ** 2 - 1) ** 2 + a[2] * x[..., 0] * y[..., 0] + (y[..., 0] - a[3]) ** 2

    def F3(x, y):
        return (x[..., 0] - a[0]) ** 4 + x[..., 1] ** 2 * y[..., 0] + (y[..., 0] - a[1]) ** 2 + a[4] * x[..., 1]

    def f(x, y):
        return (y[..., 0] - a[5] * x[..., 0] - a[6]) ** 2

    h = (lambda x, y: x[..., 0] + y[..., 0] - 2, lambda x, y: -2 * x[..., 0] + y[..., 0] - 3)
    two = (lambda x, y: x[..., 0] - y[..., 0] - 2 + 0.3 * x[..., 1], lambda x, y: y[..., 0] + x[..., 1] - 3)
    kinds = [
        Gridded(F1, f, h=h, y=((-5.0, 5.0),)),
        Gridded(F2, f, h=h, y=((-5.0, 5.0),), y_set=False),
        Gridded(F3, f, h=two, x=((-2.0, 2.0), (-2.0, 2.0)), y=((-5.0, 5.0),)),
    ]
    return kinds[seed % len(kinds)]


def transcendental(seed):
    """Fractions, exponentials, roots and logarithms above and below."""
    r = np.random.default_rng(seed)
    a = r.uniform(0.5, 2, size=6)
    one = r.uniform(-1, 1)
    kinds = [
        Gridded(
            lambda x, y: (a[0] + x[..., 0]) / (1 + y[..., 0]) + a[1] * y[..., 0],
            lambda x, y: (y[..., 0] - a[2] * x[..., 0]) ** 2,
            h=(lambda x, y: y[..., 0] + x[..., 0] - 3,),
            x=((0.0, 3.0),),
            y=((0.0, 4.0),),
        ),
        Gridded(
            lambda x, y: torch.exp(-x[..., 0] + y[..., 0]) + (x[..., 0] - a[0]) ** 2,
            lambda x, y: torch.exp(y[..., 0]) - a[1] * y[..., 0] + one * x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] - x[..., 0] - 1,),
            x=((-2.0, 3.0),),
            y=((-4.0, 4.0),),
        ),
        Gridded(
            lambda x, y: (x[..., 0] - a[3]) ** 2 + torch.sqrt(1 + y[..., 0] ** 2),
            lambda x, y: -torch.log(1 + y[..., 0]) + a[4] * x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] - 2 - x[..., 0],),
            x=((0.0, 3.0),),
            y=((0.0, 5.0),),
        ),
        Gridded(
            lambda x, y: (x[..., 0] + x[..., 1]) / (1 + x[..., 0] * x[..., 1]) - a[5] * y[..., 0] + x[..., 1] ** 2 / 4,
            lambda x, y: y[..., 0] ** 2 - (a[0] * x[..., 0] + 1 / (1 + x[..., 1])) * y[..., 0],
            h=(lambda x, y: y[..., 0] - 1 - x[..., 1] / 2,),
            x=((0.0, 3.0), (0.0, 3.0)),
            y=((0.0, 4.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def wells(seed):
    """One y in an interval, with several valleys; some without any coupling."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=6)
    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - a[0]) ** 2 + (y[..., 0] - a[1]) ** 2,
            lambda x, y: y[..., 0] ** 4 / 4 - y[..., 0] ** 2 / 2 + (x[..., 0] - a[2]) * y[..., 0] / 2,
            x=((-1.0, 1.0),),
            y=((-1.0, 1.5),),
        ),
        Gridded(
            lambda x, y: x[..., 0] * (1 + a[3] / 2) + y[..., 0],
            lambda x, y: -(y[..., 0] ** 2) / 2 + a[4] * x[..., 0] * y[..., 0] / 2,
            x=((-1.0, 1.0),),
            y=((-1.0, 1.0),),
        ),
        Gridded(
            lambda x, y: (x[..., 0] - a[0]) ** 2 - y[..., 0],
            lambda x, y: x[..., 0] * y[..., 0] ** 3 / 3 - (x[..., 0] + a[5] / 3) * y[..., 0],
            h=(lambda x, y: y[..., 0] - 1.5 - 0.5 * x[..., 0],),
            x=((-1.0, 1.0),),
            y=((-1.4, 2.5),),
        ),
        Gridded(
            lambda x, y: (x[..., 0] + a[1]) ** 2 + (y[..., 0] - 0.3) ** 2,
            lambda x, y: torch.sin(4 * y[..., 0] + x[..., 0]) + 0.2 * y[..., 0] ** 2,
            h=(lambda x, y: -y[..., 0] - 2 + a[2] * x[..., 0],),
            x=((-2.0, 2.0),),
            y=((-3.0, 3.0),),
        ),
        Gridded(
            lambda x, y: y[..., 0] ** 2 + x[..., 0] + a[0] * x[..., 1],
            lambda x, y: y[..., 0] ** 4 - 2 * x[..., 0] * y[..., 0] ** 2 + x[..., 1] * y[..., 0],
            G=(lambda x, y: -x[..., 0] - y[..., 0],),
            x=((-1.0, 1.0), (-1.0, 1.0)),
            y=((-1.2, 1.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def curved(seed):
    """Balls, parabolas and products as constraints below."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=8)
    ball = (lambda x, y: (y[..., 0] - a[0]) ** 2 + (y[..., 1] - x[..., 0]) ** 2 - 1.0,)
    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - a[1]) ** 2 + y[..., 0] ** 2,
            lambda x, y: -y[..., 0] + a[2] * x[..., 0],
            h=(lambda x, y: x[..., 0] ** 2 + y[..., 0] ** 2 - 2 - a[3],),
            x=((-1.0, 1.0),),
            y=((-3.0, 3.0),),
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 2 * a[1]) ** 2 + y[..., 0] + a[4] * y[..., 1],
            lambda x, y: a[2] * y[..., 0] + (0.5 + a[3] ** 2) * y[..., 1] ** 2 + a[5] * x[..., 0] * y[..., 1],
            h=ball,
            x=((-2.0, 2.0),),
            y=((-3.0, 3.0), (-4.0, 4.0)),
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 1) ** 2 + (y[..., 0] - a[0]) ** 2,
            lambda x, y: (y[..., 0] - 1 - a[1]) ** 2,
            h=(lambda x, y: y[..., 0] - x[..., 0] ** 2 - 0.1, lambda x, y: -y[..., 0] - 1 + 0.3 * x[..., 0]),
            x=((-2.0, 2.0),),
            y=((-4.0, 5.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] ** 2 + (x[..., 1] - a[0]) ** 2 - y[..., 0],
            lambda x, y: -y[..., 0] * (1 + a[1] * x[..., 1] / 3),
            h=(
                lambda x, y: y[..., 0] ** 2 + x[..., 0] ** 2 + x[..., 0] * x[..., 1] - 2,
                lambda x, y: y[..., 0] - 1.2 - x[..., 1],
            ),
            x=((-1.0, 1.0), (-1.0, 1.0)),
            y=((-4.0, 4.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def above(seed):
    """Upper constraints with y that leave several separate sets."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=6)
    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - a[0]) ** 2 + (y[..., 0] - a[1]) ** 2,
            lambda x, y: (y[..., 0] - x[..., 0]) ** 2,
            h=(lambda x, y: y[..., 0] - 1.5 + 0.5 * x[..., 0],),
            G=(lambda x, y: 1 - (x[..., 0] + y[..., 0]) ** 2 / 2,),
            x=((-3.0, 3.0),),
            y=((-4.0, 4.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] + a[2] * y[..., 0],
            lambda x, y: y[..., 0] * (1 + a[3] / 2),
            h=(
                lambda x, y: x[..., 0] - 1 - y[..., 0],
                lambda x, y: -x[..., 0] - 2 - y[..., 0] + a[0],
                lambda x, y: y[..., 0] - 4,
            ),
            G=(lambda x, y: -y[..., 0] + 0.2 * a[4],),
            x=((-5.0, 5.0),),
            y=((-9.0, 5.0),),
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 1) ** 2 + x[..., 1] ** 2 + y[..., 0],
            lambda x, y: (y[..., 0] + x[..., 0] * x[..., 1]) ** 2,
            h=(lambda x, y: y[..., 0] - 1,),
            G=(lambda x, y: 0.5 - (y[..., 0] - a[1]) ** 2,),
            x=((-2.0, 2.0), (-2.0, 2.0)),
            y=((-5.0, 5.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] ** 2 - 2 * x[..., 0] + y[..., 0] ** 2,
            lambda x, y: torch.abs(y[..., 0]) * 0 + (y[..., 0] - 2 * x[..., 0] + a[0]) ** 2,
            moving=(lambda x: x - 1, lambda x: 2 - x * x / 4),
            G=(lambda x, y: torch.sin(3 * x[..., 0]) + a[5] / 2,),
            x=((-2.0, 2.0),),
            y=((-4.0, 4.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def jumps(seed):
    """Lower solutions that jump, with the optimum at the jump or at a vertex beside it."""
    r = np.random.default_rng(seed)
    a = r.uniform(0.2, 0.9, size=4)
    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - 1) ** 2 + (y[..., 0] - 1) ** 2,
            lambda x, y: (x[..., 0] - a[0] + 0.5) * y[..., 0],
            x=((-1.0, 2.0),),
            y=((-1.0, 1.0),),
        ),
        Gridded(
            lambda x, y: -x[..., 0] + 2 * y[..., 0] * a[1],
            lambda x, y: (a[2] - x[..., 0]) * y[..., 0],
            h=(lambda x, y: y[..., 0] - 1 - x[..., 0], lambda x, y: -y[..., 0]),
            x=((0.0, 2.0),),
            y=((-1.0, 4.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] ** 2 + (y[..., 0] + 1) ** 2,
            lambda x, y: -(y[..., 0] ** 2) + 2 * (x[..., 0] - a[3]) * y[..., 0],
            h=(lambda x, y: y[..., 0] - 1, lambda x, y: -1 - y[..., 0] - 0.2 * x[..., 0]),
            x=((-1.0, 1.0),),
            y=((-2.0, 2.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def plane(seed):
    """Two y, not convex: saddles, wells and concave functions in a box, some with a coupling row."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=8)

    def f1(x, y):
        return y[..., 0] ** 2 - y[..., 1] ** 2 + a[0] * x[..., 0] * y[..., 1] + a[1] * y[..., 0]

    def f2(x, y):
        return (y[..., 0] ** 2 - 1) ** 2 + (y[..., 1] - a[2] * y[..., 0]) ** 2 + a[3] * x[..., 0] * y[..., 0] + 0.1 * y[..., 0]

    def f3(x, y):
        return y[..., 0] * y[..., 1] + (x[..., 0] + 0.1) * y[..., 0] + a[4] * y[..., 1]

    def F(x, y):
        return (x[..., 0] - a[5]) ** 2 + (y[..., 0] - a[6]) ** 2 + (y[..., 1] - a[7]) ** 2

    coupled = (lambda x, y: y[..., 0] + y[..., 1] - 1.5 - x[..., 0],)
    box = ((-1.0, 1.0), (-1.0, 1.5))
    kinds = [
        Gridded(F, f1, h=coupled, x=((-1.0, 1.0),), y=box),
        Gridded(F, f2, h=coupled, x=((-1.0, 1.0),), y=((-2.0, 2.0), (-2.0, 2.0))),
        Gridded(F, f3, x=((-1.0, 1.0),), y=box),
    ]
    return kinds[seed % len(kinds)]


def flat(seed):
    """Lower levels with many solutions among which F chooses, equations that bind y, and games in which f = -F."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=8)

    def line(u):
        return u[:1], torch.stack([u[1], u[0] + 0.5 * a[0] - u[1]])

    def F(x, y):
        return (x[..., 0] - a[1]) ** 2 + (y[..., 0] - a[2]) ** 2 + y[..., 0] * y[..., 1] * a[3] + y[..., 1] ** 2

    def zero(x):
        return 0.0

    def root(x):
        c = float(x[0])
        y = np.roots([1.0, 0.0, 1.0, -c])
        return double([float(y[np.argmin(np.abs(y.imag))].real)])

    def game(x, y):
        return (x[..., 0] - a[4]) * y[..., 0] + x[..., 0] ** 2 / 2 - y[..., 0] ** 2 * (0.6 + a[5] / 2)

    kinds = [
        Gridded(
            F,
            lambda x, y: (y[..., 0] + y[..., 1] - x[..., 0] - 0.5 * a[0]) ** 2,
            x=((-1.0, 1.0),),
            y=((-3.0, 3.0), (-6.0, 6.0)),
            path=(((-1.0, 1.0), (-3.0, 3.0)), line, zero),
            h=(lambda x, y: -y[..., 0] - 3,),
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 1) ** 2 + (y[..., 0] - a[6]) ** 4,
            lambda x, y: y[..., 0] * x[..., 0],
            e=(lambda x, y: y[..., 0] ** 3 + y[..., 0] - x[..., 0],),
            x=((-2.0, 2.0),),
            y=((-2.0, 2.0),),
            response=root,
            y_set=False,
        ),
        Gridded(
            game,
            lambda x, y: -game(x, y),
            h=(lambda x, y: y[..., 0] - 1 - x[..., 0] / 2, lambda x, y: -1 + a[7] / 3 - y[..., 0]),
            x=((-1.5, 1.5),),
            y=((-3.0, 3.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def unbounded(seed):
    """Free x and y, held only by the objectives."""
    r = np.random.default_rng(seed)
    a = r.uniform(-2, 2, size=8)
    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - a[0]) ** 2 + (y[..., 0] - a[1]) ** 2,
            lambda x, y: (y[..., 0] - a[2]) ** 2 + x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] - a[3] - x[..., 0],),
            x=((-8.0, 8.0),),
            y=((-12.0, 12.0),),
            x_set=False,
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - a[0]) ** 2 + (x[..., 1] - a[1]) ** 2 + y[..., 0] ** 2,
            lambda x, y: y[..., 0] ** 2 / 2 - (x[..., 0] + x[..., 1]) * y[..., 0],
            h=(lambda x, y: y[..., 0] + x[..., 0] - a[2], lambda x, y: -y[..., 0] - 3),
            x=((-6.0, 6.0), (-6.0, 6.0)),
            y=((-13.0, 13.0),),
            x_set=False,
            y_set=False,
        ),
        Gridded(
            lambda x, y: torch.exp(x[..., 0] / 2) + torch.exp(-x[..., 0]) + a[4] * y[..., 0],
            lambda x, y: torch.cosh(y[..., 0]) - a[5] * x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] ** 2 - 4 - x[..., 0] ** 2,),
            x=((-6.0, 6.0),),
            y=((-7.5, 7.5),),
            x_set=False,
            y_set=False,
        ),
    ]
    return kinds[seed % len(kinds)]


# Sums of problems with mixed unknowns


@dataclass(eq=False)
class Mixed:
    """A sum of problems whose unknowns are mixed by matrices."""

    parts: list
    seed: int

    def __post_init__(self):
        r = np.random.default_rng(self.seed)
        self.n, self.m = sum(p.n for p in self.parts), sum(p.m for p in self.parts)
        self.S = np.eye(self.n) + 0.3 * r.normal(size=(self.n, self.n))
        self.T = np.eye(self.m) + 0.3 * r.normal(size=(self.m, self.m))

    def split(self, x, y):
        u, v = double(self.S) @ x, double(self.T) @ y
        i = j = 0
        for p in self.parts:
            yield p, u[i : i + p.n], v[j : j + p.m]
            i, j = i + p.n, j + p.m

    def problem(self):
        def rows(x, y, name):
            return [g(u, v) for p, u, v in self.split(x, y) for g in getattr(p, name)]

        def boxed(x, y, level):
            found = []
            for p, u, v in self.split(x, y):
                held, ends, w = (p.x_set, p.x, u) if level == "x" else (p.y_set, p.y, v)
                if held:
                    found += [torch.cat([double([a for a, _ in ends]) - w, w - double([b for _, b in ends])])]
                if level == "y" and p.moving:
                    found += [p.moving[0](u) - v, v - p.moving[1](u)]
            return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)

        def below(x, y):
            h = rows(x, y, "h")
            return torch.cat([torch.stack(h) if h else torch.zeros(0, dtype=torch.float64), boxed(x, y, "y")])

        def over(x, y):
            G = rows(x, y, "G")
            return torch.cat([torch.stack(G) if G else torch.zeros(0, dtype=torch.float64), boxed(x, y, "x")])

        return meha.Problem(
            lambda x, y: sum(p.F(u, v) for p, u, v in self.split(x, y)),
            lambda x, y: sum(p.f(u, v) for p, u, v in self.split(x, y)),
            lower_constraints=Smooth(below),
            upper_constraints=Smooth(over),
        )

    def answer(self):
        found = [p.answer() for p in self.parts]
        if any(a is None for a in found):
            return None
        u, v = np.concatenate([a[1] for a in found]), np.concatenate([a[2] for a in found])
        return sum(a[0] for a in found), np.linalg.solve(self.S, u), np.linalg.solve(self.T, v)

    def value(self, x):
        total = 0.0
        for p, u, _ in self.split(double(x), torch.zeros(self.m, dtype=torch.float64)):
            part = p.value(u.numpy())
            if part is None:
                return None
            total += part
        return total


def mixed(seed):
    r = np.random.default_rng(seed)
    pool = [
        lambda: polynomial(3 * seed + 1),
        lambda: unbounded(3 * seed),
        lambda: curved(4 * seed + 2),
        lambda: above(4 * seed),
        lambda: bilinear(4 * seed + 1),
    ]
    chosen = r.choice(len(pool), size=2 if seed % 2 else 3, replace=False)
    return Mixed([pool[k]() for k in chosen], seed)


def domains(seed):
    """Logarithms, roots and powers that are not defined at the usual starts, and poles beside the feasible points."""
    r = np.random.default_rng(seed)
    a = r.uniform(0.5, 1.5, size=6)
    kinds = [
        Gridded(
            lambda x, y: -torch.log(x[..., 0]) + a[0] * x[..., 0] + y[..., 0],
            lambda x, y: -a[1] * torch.log(y[..., 0]) + x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] - 2.5 + 0.2 * x[..., 0],),
            x=((0.01, 5.0),),
            y=((0.01, 4.0),),
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 2) ** 2 + y[..., 0] ** 1.5,
            lambda x, y: a[0] * y[..., 0] - 2 * torch.sqrt(y[..., 0] + x[..., 0]),
            h=(lambda x, y: y[..., 0] - 3 * a[1],),
            x=((0.0, 4.0),),
            y=((0.0, 6.0),),
        ),
        Gridded(
            lambda x, y: x[..., 0] + 1 / (x[..., 0] + y[..., 0]) + a[2] * y[..., 0] / 5,
            lambda x, y: (y[..., 0] - a[0]) ** 2 - x[..., 0] * y[..., 0],
            h=(lambda x, y: 1 - 2 * x[..., 0] - y[..., 0],),
            x=((0.0, 4.0),),
            y=((0.0, 6.0),),
        ),
        Gridded(
            lambda x, y: -x[..., 0] * (6 - x[..., 0] - y[..., 0]) + a[3] * x[..., 0] ** 1.2,
            lambda x, y: -y[..., 0] * (6 - x[..., 0] - y[..., 0]) + a[4] * y[..., 0] ** 1.2,
            h=(lambda x, y: x[..., 0] + y[..., 0] - 3 - a[5],),
            x=((0.0, 5.0),),
            y=((0.0, 5.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def waves(seed):
    """Many local solutions in x."""
    r = np.random.default_rng(seed)
    a = r.uniform(-1, 1, size=6)
    kinds = [
        Gridded(
            lambda x, y: torch.sin(5 * x[..., 0]) + 0.1 * (x[..., 0] - a[0]) ** 2 + 0.5 * y[..., 0],
            lambda x, y: (y[..., 0] - x[..., 0] / 2) ** 2,
            h=(lambda x, y: y[..., 0] - 1 + 0.3 * a[1],),
            x=((-4.0, 4.0),),
            y=((-4.0, 4.0),),
        ),
        Gridded(
            lambda x, y: (
                torch.cos(4 * x[..., 0]) * (1 + 0.2 * y[..., 0])
                + 0.05 * (x[..., 0] - a[2]) ** 2
                + torch.sin(3 * x[..., 1])
                + 0.1 * x[..., 1] ** 2
            ),
            lambda x, y: (y[..., 0] - x[..., 0] + x[..., 1]) ** 2,
            h=(lambda x, y: y[..., 0] - 1,),
            x=((-3.0, 3.0), (-3.0, 3.0)),
            y=((-9.0, 4.0),),
        ),
        Gridded(
            lambda x, y: torch.sin(6 * y[..., 0]) + 0.1 * (x[..., 0] - a[3]) ** 2,
            lambda x, y: y[..., 0] ** 2 - 2 * x[..., 0] * y[..., 0],
            h=(lambda x, y: y[..., 0] + x[..., 0] - 4,),
            x=((-4.0, 4.0),),
            y=((-5.0, 5.0),),
        ),
    ]
    return kinds[seed % len(kinds)]


def thin(seed):
    """Constraints without multipliers, sets that shrink to a point, and complementarity."""
    r = np.random.default_rng(seed)
    a = r.uniform(0.2, 1, size=6)

    def near(x):
        c = float(x[0])
        return (
            double([min(max(a[0], c - math.sqrt(max(0.0, 1 - c * c))), c + math.sqrt(max(0.0, 1 - c * c)))])
            if abs(c) <= 1
            else None
        )

    def square(x):
        return double([float(x[0])])

    def complement(x):
        c = float(x[0])
        return double([1.0 + a[3]]) if abs(c) < 1e-12 else double([0.0])

    kinds = [
        Gridded(
            lambda x, y: (x[..., 0] - 2) ** 2 + y[..., 0],
            lambda x, y: (y[..., 0] - a[0]) ** 2,
            h=(lambda x, y: (y[..., 0] - x[..., 0]) ** 2 + x[..., 0] ** 2 - 1,),
            x=((-1.0, 1.0),),
            y=((-3.0, 3.0),),
            response=near,
            x_set=False,
            y_set=False,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - a[1]) ** 2 + (y[..., 0] - a[2]) ** 2,
            lambda x, y: -y[..., 0],
            h=(lambda x, y: (y[..., 0] - x[..., 0]) ** 2,),
            x=((-1.0, 1.0),),
            y=((-3.0, 3.0),),
            response=square,
        ),
        Gridded(
            lambda x, y: (x[..., 0] - 1) ** 2 + (y[..., 0] - 1) ** 2,
            lambda x, y: -y[..., 0],
            h=(lambda x, y: x[..., 0] * y[..., 0], lambda x, y: y[..., 0] - 1 - a[3]),
            x=((0.0, 2.0),),
            y=((0.0, 3.0),),
            response=complement,
        ),
    ]
    return kinds[seed % len(kinds)]


def scaled(seed):
    """Other units: x, y, F and f multiplied by powers of ten."""
    r = np.random.default_rng(seed)
    parts = [bilinear, polynomial, transcendental, wells, curved]
    base = parts[seed % len(parts)](int(r.integers(100)))
    s, t, u, v = 10.0 ** r.integers(-3, 4, size=4)

    def turned(g, factor=1.0):
        return lambda x, y: factor * g(x / s, y / t)

    box = [tuple((a * k, b * k) for a, b in ends) for ends, k in ((base.x, s), (base.y, t))]
    return Gridded(
        turned(base.F, u),
        turned(base.f, v),
        h=tuple(turned(h) for h in base.h),
        G=tuple(turned(G) for G in base.G),
        x=box[0],
        y=box[1],
        x_set=base.x_set,
        y_set=base.y_set,
    )


def corners(seed):
    """Concave functions of three y in a box: the lower solution is one of eight corners."""
    r = np.random.default_rng(seed)
    n = 1 + seed % 2
    C, c, p, q = r.normal(size=(3, n)), r.normal(size=3), r.normal(size=n), r.normal(size=3)
    signs = torch.cartesian_prod(*[double([-1.0, 1.0])] * 3)
    K = np.eye(3) + (0.2 * r.normal(size=(3, 3)) if seed % 3 else 0.0)
    K, C_, c_, p_, q_ = (double(v) for v in (K @ K.T, C, c, p, q))

    def f(x, y):
        return -0.5 * ((y @ K) * y).sum(-1) + (y * (x @ C_.T + c_)).sum(-1)

    def F(x, y):
        return (x - p_).square().sum(-1) + 0.5 * (y * q_).sum(-1) + 0.3 * x[..., 0] * y[..., 0]

    def respond(x):
        values = f(x.expand(8, -1), signs)
        return [signs[k] for k in torch.nonzero(values <= values.min() + TIE).reshape(-1)]

    box = ((-1.0, 1.0),) * 3
    rows = (
        ()
        if seed % 3 == 0
        else tuple((lambda x, y, k=k: -y[..., k] - 1) for k in range(3))
        + tuple((lambda x, y, k=k: y[..., k] - 1) for k in range(3))
    )
    return Gridded(F, f, h=rows, x=((-2.0, 2.0),) * n, y=box, response=respond, y_set=not rows)


@dataclass(eq=False)
class Tolls:
    """Tolls x on some columns of a transport polytope: F = -x'y, f = (cost + x)'y, B y <= b, y >= 0, sum y = demand."""

    seed: int

    def __post_init__(self):
        r = np.random.default_rng(self.seed)
        self.m = int(r.integers(3, 6))
        self.n = int(r.integers(2, min(self.m, 4)))
        self.cost = r.integers(1, 9, size=self.m).astype(float)
        self.cost[-1] = 9.0
        self.cap = r.integers(1, 4, size=self.m).astype(float)
        self.cap[-1] = 10.0
        self.demand = float(r.integers(2, 6))
        self.top = 10.0

    def problem(self):
        n, m, cost = self.n, self.m, double(self.cost)
        return meha.Problem(
            lambda x, y: -(x * y[:n]).sum(),
            lambda x, y: (cost * y).sum() + (x * y[:n]).sum(),
            x_set=Box(0.0, self.top),
            y_set=NonNegative(),
            lower_constraints=[Linear(B=np.eye(m), b=self.cap), Linear(B_eq=np.ones((1, m)), b_eq=[self.demand])],
        )

    def answer(self):
        """For each vertex y, the tolls with the largest revenue for which it is optimal, by a linear program."""
        from scipy.optimize import linprog

        n, m, best = self.n, self.m, (math.inf, None)
        for full in itertools.product((0, 1, 2), repeat=m):  # at zero, at capacity, or between (one at most)
            between = [i for i in range(m) if full[i] == 2]
            if len(between) > 1:
                continue
            y = np.array([0.0 if k == 0 else c for k, c in zip(full, self.cap, strict=True)])
            if between:
                y[between[0]] = 0.0
                y[between[0]] = self.demand - y.sum()
            if abs(y.sum() - self.demand) > 1e-9 or (y < 0).any() or (y > self.cap + 1e-9).any():
                continue
            # unknowns: x, price nu, with cost_i + x_i - nu >= 0 at zero, <= 0 at capacity, = 0 between
            A, b, C, d = [], [], [], []
            for i in range(m):
                row = np.zeros(n + 1)
                if i < n:
                    row[i] = 1.0
                row[n] = -1.0
                if full[i] == 2:
                    C.append(row), d.append(-self.cost[i])
                elif full[i] == 0:
                    A.append(-row), b.append(self.cost[i])
                else:
                    A.append(row), b.append(-self.cost[i])
            out = linprog(
                np.concatenate([-y[:n], [0.0]]),
                A or None,
                b or None,
                C or None,
                d or None,
                bounds=[(0, self.top)] * n + [(None, None)],
            )
            if out.status == 0 and out.fun < best[0] - 1e-9:
                best = out.fun, (out.x[:n], y)
        return best[0], *best[1]

    def value(self, x):
        from scipy.optimize import linprog

        c = self.cost.copy()
        c[: self.n] += x
        return float(linprog(c, A_eq=np.ones((1, self.m)), b_eq=[self.demand], bounds=[(0, k) for k in self.cap]).fun)


@dataclass(eq=False)
class Blocks:
    """A sum of linear and quadratic problems whose unknowns are mixed: many rows, and an answer of parts."""

    seed: int

    def __post_init__(self):
        count = (4, 6, 8)[self.seed % 3]
        kind = dict(F="quadratic", f="quadratic") if self.seed % 2 else dict(F="linear", f="linear")
        self.parts, k = [], 0
        while len(self.parts) < count:
            part = quadratic(10_000 * (1 + self.seed) + k, size=(1, 1), **kind)
            k += 1
            found = part.answer()
            if found is not None:
                self.parts.append((part, found))
        self.n = self.m = count
        r = np.random.default_rng(self.seed)
        self.S, self.T = (np.eye(count) + 0.2 * r.normal(size=(count, count)) for _ in range(2))

    def _whole(self):
        size = self.n
        W = np.block([[self.S, np.zeros((size, size))], [np.zeros((size, size)), self.T]])
        P, p = np.zeros((2 * size, 2 * size)), np.zeros(2 * size)
        Q, R, c = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
        A, B, b, U, u = [], [], [], [], []
        for i, (part, _) in enumerate(self.parts):
            at = [i, size + i]
            P[np.ix_(at, at)], p[at] = part.P, part.p
            Q[i, i], R[i, i], c[i] = part.Q[0, 0], part.R[0, 0], part.c[0]
            for a_row, b_row, right in zip(*part.rows(), strict=True):
                A.append(a_row[0] * np.eye(size)[i]), B.append(b_row[0] * np.eye(size)[i]), b.append(right)
            U.append(-np.eye(2 * size)[i]), u.append(0.0)
            if part.high is not None:
                U.append(np.eye(2 * size)[i]), u.append(part.high[0])
        return Quadratic(
            W.T @ P @ W,
            W.T @ p,
            self.T.T @ Q @ self.T,
            self.T.T @ R @ self.S,
            self.T.T @ c,
            np.array(A) @ self.S,
            np.array(B) @ self.T,
            np.array(b),
            size,
            size,
            U=np.array(U) @ W,
            u=np.array(u),
        )

    def problem(self):
        return self._whole().problem()

    def answer(self):
        found = [a for _, a in self.parts]
        u, v = np.array([a[1][0] for a in found]), np.array([a[2][0] for a in found])
        return sum(a[0] for a in found), np.linalg.solve(self.S, u), np.linalg.solve(self.T, v)

    def value(self, x):
        parts = [part.value(u) for (part, _), u in zip(self.parts, (self.S @ x)[:, None], strict=True)]
        return None if any(v is None for v in parts) else sum(parts)


KINDS = {
    "LP over LP": lambda s: quadratic(s),
    "LP over LP, upper rows": lambda s: quadratic(s, upper=1 + s % 2),
    "LP over LP, equations": lambda s: quadratic(s, equations=1 + s % 2),
    "degenerate LPs": lambda s: quadratic(s, degenerate=True),
    "LP over QP": lambda s: quadratic(s, f="quadratic"),
    "QP over LP": lambda s: quadratic(s, F="quadratic", upper=s % 2),
    "QP over QP": lambda s: quadratic(s, F="quadratic", f="quadratic", upper=s % 2, equations=int(s % 3 == 2)),
    "QP over QP, free x": lambda s: quadratic(s, F="quadratic", f="quadratic", free=True),
    "x without influence": lambda s: quadratic(s, F="quadratic", f="quadratic" if s % 2 else "linear", idle=True),
    "larger": lambda s: quadratic(
        s, F="quadratic" if s % 3 else "linear", f="quadratic" if s % 2 else "linear", size=((10, 4), (4, 4), (6, 3))[s % 3]
    ),
    "bilinear": bilinear,
    "polynomials": polynomial,
    "fractions and exponentials": transcendental,
    "valleys in an interval": wells,
    "curved constraints": curved,
    "separate sets": above,
    "jumps": jumps,
    "valleys in the plane": plane,
    "many solutions, equations, games": flat,
    "free variables": unbounded,
    "mixed sums": mixed,
    "domains and poles": domains,
    "waves": waves,
    "no multipliers": thin,
    "other units": scaled,
    "corners": corners,
    "tolls": Tolls,
    "blocks": Blocks,
}


def trials(half=None):
    """Name and maker of each problem; seeds are numbered again where a draw has no answer."""
    stored = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for kind, make in KINDS.items():
        for k in range(SEEDS):
            name = f"{kind} {k}"
            if half is not None and (k % 2 == 1) != (half == "held-out"):
                continue
            yield kind, name, k, make, stored.get(name)


def compute():
    stored = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for kind, name, k, make, known in trials():
        if known is not None:
            continue
        begin = time.process_time()
        for attempt in range(20):
            seed = k + 60 * list(KINDS).index(kind) + 3000 * attempt
            found = make(seed).answer()
            if found is not None and max(np.abs(found[1]).max(), np.abs(found[2]).max()) < 1e3:
                break
        else:
            raise SystemExit(f"{name}: no seed gives a problem with an answer")
        F, x, y = found
        stored[name] = {"seed": seed, "F": F, "x": list(map(float, x)), "y": list(map(float, y))}
        seconds = time.process_time() - begin
        print(f"{name}: seed {seed}, F = {F:.8g}, x = {np.round(x, 5)}, y = {np.round(y, 5)} ({seconds:.1f} s)", flush=True)
        ANSWERS.write_text(json.dumps(stored, indent=0) + "\n")


def judge(spec, problem, x, y, F_star):
    """Error of F, the largest violation, and the gap of the lower level."""
    with torch.no_grad():
        F, f = float(problem.upper(x, y)), float(problem.lower(x, y))
        worst = max((c.violation(x, y) for level in problem.constraints for c in level), default=0.0)
        for domain, value in ((problem.x_set, x), (problem.y_set, y)):
            if domain is not None:
                worst = max(worst, float((value - domain.project(value)).abs().max()))
    least = spec.value(x.numpy())
    gap = math.inf if least is None else f - least
    return (F - F_star) / (1 + abs(F_star)), worst, gap


def start_of(spec, start, seed):
    if start == "random":
        r = np.random.default_rng(1000 + seed)
        return double(r.uniform(-3, 3, size=spec.n)), double(r.uniform(-3, 3, size=spec.m))
    make = torch.zeros if start == "zeros" else torch.ones
    return make(spec.n, dtype=torch.float64), make(spec.m, dtype=torch.float64)


def run(half, only, starts, label):
    torch.set_num_threads(1)
    store = Store(RECORDS)
    for kind, name, k, make, known in trials(half):
        if known is None or (only and only not in name):
            continue
        spec = make(known["seed"])
        for start in starts:
            problem = spec.problem()
            x0, y0 = start_of(spec, start, k)
            begin = time.process_time()
            record = dict(label=label, half=half, kind=kind, name=name, start=start)
            try:
                solution = meha.solve(problem, x0, y0)
            except Exception as error:  # whatever a user would see
                record |= dict(
                    outcome="error", error=f"{type(error).__name__}: {error}"[:200], seconds=time.process_time() - begin
                )
            else:
                error, violation, gap = judge(spec, problem, solution.x, solution.y, known["F"])
                right = abs(error) <= 1e-3 and violation <= 1e-6 and gap <= 1e-5
                below = error < -1e-3 and violation <= 1e-6 and gap <= 1e-5
                record |= dict(
                    outcome="right" if right else "below the answer" if below else "wrong",
                    status=solution.status.value,
                    error=error,
                    violation=violation,
                    gap=gap,
                    gradients=solution.counts.lower + solution.counts.hvp,
                    seconds=time.process_time() - begin,
                    message=solution.message[:160],
                )
            store.add(KIND, f"{label}, {half}, {name}, {start}", record)
            if record["outcome"] != "right" or record["seconds"] > 8:
                keep = {key: value for key, value in record.items() if key not in ("label", "half", "kind")}
                print(keep, flush=True)
    table(label, half)


def table(label=None, half=None):
    groups = defaultdict(list)
    for r in Store(RECORDS).records(KIND):
        if label in (None, r["label"]) and half in (None, r["half"]):
            groups[r["label"], r["half"]].append(r)
    for (tag, part), runs in groups.items():
        print(f"\n{tag}, {part}")
        for kind in [*KINDS, None]:
            chosen = [r for r in runs if kind in (None, r["kind"])]
            if chosen:
                right = sum(r["outcome"] == "right" for r in chosen)
                claimed = sum(r["outcome"] != "right" and r.get("status") == "converged" for r in chosen)
                errors = sum(r["outcome"] == "error" for r in chosen)
                local = sum(r["outcome"] == "right" and r.get("status") != "converged" for r in chosen)
                times = sorted(r["seconds"] for r in chosen)
                counts = [len(chosen), right, claimed, errors, local]
                listed = " | ".join(map(str, [kind or "all", *counts]))
                print(f"| {listed} | {times[len(times) // 2]:.2f} | {times[-1]:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["answers", "solve", "table"])
    parser.add_argument("half", nargs="?", choices=["tuning", "held-out"])
    parser.add_argument("--only")
    parser.add_argument("--starts", nargs="+", default=STARTS)
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    if options.what == "answers":
        compute()
    elif options.what == "solve":
        run(options.half, options.only, options.starts, options.label)
    else:
        table(half=options.half)


if __name__ == "__main__":
    main()
