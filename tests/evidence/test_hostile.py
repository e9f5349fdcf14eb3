"""Cases made to deceive the default: bad scales, far and tiny starts, starts at saddles and maxima, kinks, no solution at all.

A run may fail on such a case, as long as it does not say "converged".
"""

import math

import numpy as np
import pytest
import torch

import meha
from meha.problem.nonsmooth import L1
from meha.problem.sets import Box, NonNegative

F64 = torch.float64
NOTHING = None
"""There is no solution, so that nothing may be claimed."""

CASES = {}
SLOW = ("kink: f = ", "flat: f = (y - x)^6")


def t(*values):
    return torch.tensor(values, dtype=F64)


def square(v):
    return v.square().sum()


def at(*x):
    """The answer x = y."""
    return [(t(*x), t(*x))]


def add(name, upper, lower, x0, y0, answers, **sets):
    CASES[name] = (meha.Problem(upper, lower, **sets), t(*x0), t(*y0), answers)


def near(x, y):
    return square(x - 1) + square(y - 2)


def follow(x, y):
    return square(y - x)


for s in (1e-8, 1e-6, 1e-4, 1e-3, 1e3, 1e4, 1e6, 1e8, 1e10, 1e12):
    add(f"scale: f times {s:g}", near, lambda x, y, s=s: s * follow(x, y), [0.0], [0.0], at(1.5))
    add(f"scale: F times {s:g}", lambda x, y, s=s: s * near(x, y), follow, [0.0], [0.0], at(1.5))
    in_x = lambda x, y, s=s: near(x / s, y), lambda x, y, s=s: follow(x / s, y)
    add(f"scale: x in units of {s:g}", *in_x, [0.1 * s], [0.0], [(t(1.5 * s), t(1.5))])
    in_y = lambda x, y, s=s: near(x, y / s), lambda x, y, s=s: follow(x, y / s)
    add(f"scale: y in units of {s:g}", *in_y, [0.0], [0.3 * s], [(t(1.5), t(1.5 * s))])

ROTATION = t(0.6, 0.8, -0.8, 0.6).reshape(2, 2)
for k in (1e2, 1e4, 1e6, 1e8):
    w = t(1.0, k)
    weighted = lambda x, y, w=w: (w * (y - x).square()).sum()  # noqa: E731
    rotated = lambda x, y, w=w: (w * (ROTATION @ (y - x)).square()).sum()  # noqa: E731
    steep = lambda x, y, w=w: (w * ((x - 1).square() + (y - 2).square())).sum()  # noqa: E731
    add(f"condition: f {k:g}", near, weighted, [0.0, 0.0], [0.0, 0.0], at(1.5, 1.5))
    add(f"condition: f {k:g}, rotated", near, rotated, [0.0, 0.0], [0.0, 0.0], at(1.5, 1.5))
    add(f"condition: F {k:g}", steep, follow, [0.0, 0.0], [0.0, 0.0], at(1.5, 1.5))


def wells(y):
    return (y.square() - 1).square().sum()


add("saddle: wells at their maximum", follow, lambda x, y: wells(y), [0.3], [0.0], at(1.0) + at(-1.0))
add(
    "saddle: wells in the plane",
    lambda x, y: square(x - 1) + (y[0] - 1).square() + y[1].square(),
    lambda x, y: (y[0].square() - 1).square() + (y[1] - x[0]).square(),
    [0.0],
    [0.0, 0.0],
    [(t(0.5), t(1.0, 0.5))],
)
add(
    "saddle: y1 y2 in a box",
    lambda x, y: square(x) + (y[0] - 0.5).square() + (y[1] + 0.3).square(),
    lambda x, y: y[0] * y[1] - 0.1 * y[0],
    [1.0],
    [0.0, 0.0],
    [(t(0.0), t(1.0, -1.0))],
    y_set=Box(-1.0, 1.0),
)
LOW = -1.0355794
"""The lowest point of (y^2 - 1)^2 + 0.3 y."""
for s in (-2.0, -1.0, 0.0, 1.0, 2.0):
    lower = lambda x, y: wells(y) + 0.3 * y.sum()  # noqa: E731
    add(f"start: y at {s:g}", lambda x, y: square(x) + square(y - 1) / 4, lower, [1.0], [s], [(t(0.0), t(LOW))])
    upper = lambda x, y: wells(x) + 0.3 * x.sum() + follow(x, y)  # noqa: E731
    add(f"start: x at {s:g}", upper, follow, [s], [s], at(LOW))
add("start: maximum of F", lambda x, y: wells(x) + square(y), follow, [0.0], [0.0], at(0.5**0.5) + at(-(0.5**0.5)))
add("start: the solution", near, follow, [1.5], [1.5], at(1.5))
add("start: y far", near, follow, [1.5], [-1e4], at(1.5))


def least(function, low, high):
    points = torch.linspace(low, high, 2_000_001, dtype=F64)
    return float(points[function(points).argmin()])


LOGISTIC = least(lambda x: (torch.sigmoid(x) - 0.7).square() + 0.01 * x.square(), -5, 5)
for s in (1e-12, 1e-8, 1e-4, 1e2, 1e4, 1e6, 1e8):
    add(f"distance: quadratic, {s:g}", near, follow, [s], [-s], at(1.5))
    add(f"distance: quartic, {s:g}", lambda x, y: (x - 1).pow(4).sum() + square(y - 1), follow, [s], [s], at(1.0))
    add(
        f"distance: logistic curve, {s:g}",
        lambda x, y: square(y - 0.7) + 0.01 * square(x),
        lambda x, y: square(y - torch.sigmoid(x)),
        [s],
        [s],
        [(t(LOGISTIC), torch.sigmoid(t(LOGISTIC)))],
    )

add("kink: f = |y - x|", near, lambda x, y: (y - x).abs().sum(), [0.0], [0.0], at(1.5))
corner = lambda x, y: torch.maximum(y - x, x - 2 * y).sum()  # noqa: E731
add("kink: f = max(y - x, x - 2 y)", near, corner, [0.0], [0.0], [(t(21 / 13), t(14 / 13))])
add("kink: f = |y - x|^1.2", near, lambda x, y: (y - x).abs().pow(1.2).sum(), [0.0], [0.5], at(1.5))
add("kink: hinge", near, lambda x, y: torch.relu(1 - y).sum() + follow(x, y) / 2, [0.0], [0.0], at(1.5))
add("kink: F of absolute values", lambda x, y: (x - 1).abs().sum() + 2 * (y - 2).abs().sum(), follow, [0.0], [0.0], at(2.0))
add("kink: F a maximum", lambda x, y: torch.maximum(square(x - 1), square(y + 1)), follow, [3.0], [0.0], at(0.0))
SOFT = least(lambda x: ((1 - x.exp()).clamp(min=0) - 0.5).square() + 0.1 * x.square(), -12, 6)
add(
    "kink: soft threshold",
    lambda x, y: square(y - 0.5) + 0.1 * square(x),
    lambda x, y: square(y - 1) / 2,
    [3.0],
    [0.0],
    [(t(SOFT), t(max(0.0, 1 - math.exp(SOFT))))],
    nonsmooth=L1(lambda x: x.exp()),
)
for p in (4, 6):
    add(f"flat: f = (y - x)^{p}", near, lambda x, y, p=p: (y - x).pow(p).sum(), [0.0], [0.0], at(1.5))
add("flat: f without y2", near, lambda x, y: (y[0] - x[0]).square(), [0.0], [0.0, 0.0], [(t(1.5), t(1.5, 2.0))])

for name, upper in {
    "-x": lambda x, y: -x.sum() + 0 * y.sum(),
    "-y": lambda x, y: -y.sum(),
    "y - x^2": lambda x, y: y.sum() - square(x),
    "exp(-x)": lambda x, y: (-x).exp().sum() + follow(x, y),
    "1 / (1 + y^2)": lambda x, y: 1 / (1 + square(y)),
    "x^3": lambda x, y: x.pow(3).sum() + follow(x, y),
    "atan x": lambda x, y: torch.atan(x).sum() + follow(x, y),
}.items():
    add(f"unbounded: F = {name}", upper, follow, [0.5], [0.1], NOTHING)
for name, lower in {
    "-y^2": lambda x, y: -follow(x, y),
    "y^3": lambda x, y: (y - x).pow(3).sum(),
    "-y": lambda x, y: -y.sum(),
    "exp(-y)": lambda x, y: (-y * x.square() - y).exp().sum(),
}.items():
    add(f"unbounded: f = {name}", near, lower, [0.5], [0.1], NOTHING)
add("unbounded: f = y1^2 - y2^2", near, lambda x, y: (y[0] - x[0]).square() - y[1].square(), [0.5], [0.1, 0.0], NOTHING)

add("step: F", lambda x, y: near(x, y) + 5 * (x > 1.2).to(F64).sum(), follow, [0.0], [0.0], at(1.2))


def rosenbrock(x, y):
    return (1 - y[0]).square() + 100 * (y[1] - y[0].square()).square()


def himmelblau(a, b):
    return (a**2 + b - 11) ** 2 + (a + b**2 - 7) ** 2 + 0.1 * (a - 3) ** 2


GRID = np.linspace(-5, 5, 2001)
HIMMELBLAU = GRID[list(np.unravel_index(himmelblau(GRID[:, None], GRID[None]).argmin(), (2001, 2001)))]
add("F: Rosenbrock", rosenbrock, follow, [-1.2, 1.0], [0.0, 0.0], at(1.0, 1.0))
add("F: Rosenbrock in a box", rosenbrock, follow, [-1.2, 0.3], [0.0, 0.0], at(0.5, 0.25), x_set=Box(-1.5, 0.5))
add("F: Himmelblau", lambda x, y: himmelblau(*y), follow, [-2.0, -2.0], [0.0, 0.0], at(*HIMMELBLAU), x_set=Box(-5.0, 5.0))
for w in (3, 10, 30):
    waves = lambda x, y, w=w: square(y - 0.3) + (1 - (w * (y - 0.3)).cos()).sum()  # noqa: E731
    add(f"F: cosine of {w} y", waves, follow, [-1.7], [0.0], at(0.3), x_set=Box(-2.0, 2.0))
WELL = least(lambda y: 0.02 * y.square() - (-2 * (y - 3).square()).exp(), -5, 5)
well = lambda x, y: 0.02 * square(y) - (-2 * square(y - 3)).exp()  # noqa: E731
add("F: a well far away", well, follow, [-2.0], [0.0], at(WELL), x_set=Box(-5.0, 5.0))

add("bounds: of x", lambda x, y: near(x - 2, y), follow, [0.5], [0.0], at(1.0), x_set=Box(0.0, 1.0))
add("bounds: of y", lambda x, y: near(x - 2, y), follow, [0.5], [0.0], [(t(3.0), t(1.0))], y_set=Box(0.0, 1.0))
add("bounds: y = max(x, 0)", lambda x, y: near(x + 2, y + 1), follow, [2.0], [1.0], [(t(-1.0), t(0.0))], y_set=NonNegative())
add("bounds: kink", lambda x, y: square(x - 0.2) - 1.8 * y.sum(), follow, [-2.0], [0.0], at(0.4), y_set=Box(-1.0, 0.4))


for offset in (1e4, -1e7, 1e10):
    add(f"offset: F + {offset:g}", lambda x, y, c=offset: near(x, y) + c, follow, [0.0], [0.0], at(1.5))
    add(f"offset: f + {offset:g}", near, lambda x, y, c=offset: follow(x, y) + c, [0.0], [0.0], at(1.5))
for power in (-12, -9, 8, 9, 10, 12):
    unit = 10.0**power
    both = lambda x, y, u=unit: near(x / u, y / u), lambda x, y, u=unit: follow(x / u, y / u)
    add(f"units: x and y in {unit:g}", *both, [0.0], [0.0], at(1.5 * unit))
    of_y = lambda x, y, u=unit: near(x, y / u), lambda x, y, u=unit: follow(x, y / u)
    add(f"units: y in {unit:g}", *of_y, [0.0], [0.0], [(t(1.5), t(1.5 * unit))])
add("units: the least start", near, follow, [5e-324], [5e-324], at(1.5))

# Plateaus: the start is stationary, but F is constant around it, and lower elsewhere.
aim = lambda x, y: square(y - 0.3)  # noqa: E731
rectified = lambda x, y: square(y - x.relu())  # noqa: E731
add("plateau: y = max(x, 0)", aim, rectified, [-5.0], [0.0], at(0.3))
add("plateau: y = max(x, 0), one of two", aim, rectified, [-5.0, 3.0], [0.0, 0.0], at(0.3, 0.3))
saturating = lambda x, y: square(y - x.sigmoid())  # noqa: E731
add("plateau: y = sigmoid x", aim, saturating, [60.0], [0.0], [(t(math.log(3 / 7)), t(0.3))])
dead = {"nonsmooth": L1(lambda x: x), "x_set": Box(0.0, math.inf)}
toward = lambda x, y: square(y - 3) / 2  # noqa: E731
add("plateau: L1 beyond its dead zone", lambda x, y: square(y - 1), toward, [10.0], [0.0], [(t(2.0), t(1.0))], **dead)
hollow = lambda x, y: (x.relu() * (x - 2)).sum() + 0 * y.sum()  # noqa: E731
add("plateau: F constant for x <= 0", hollow, follow, [-3.0], [0.0], at(1.0))
for weight in (3.0, 5.0, 10.0, 100.0):
    penalty = {"nonsmooth": L1(lambda x: x.exp())}
    add(
        f"{'plateau' if weight <= 10 else 'extreme'}: lasso from {weight:g}",
        lambda x, y: square(y - t(0.5, 0.0)) + 0.01 * y[1].square(),
        lambda x, y: square(y - t(1.0, 0.2)) / 2,
        [weight],
        [0.0, 0.0],
        [(t(math.log(0.5)), t(0.5, 0.0))],
        **penalty,
    )


def error(solution, x, y):
    parts = ((solution.x, x), (solution.y, y))
    return max(float((found - right).norm()) / (float(right.norm()) or 1.0) for found, right in parts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in CASES]
)
def test_no_wrong_claim(name):
    problem, x0, y0, answers = CASES[name]
    solution = meha.solve(problem, x0, y0)
    if answers is NOTHING:
        assert not solution.converged
    elif solution.converged:
        assert min(error(solution, *answer) for answer in answers) <= 1e-2


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("offset", "units", "plateau"))])
def test_offsets_units_and_plateaus_do_no_harm(name):
    problem, x0, y0, answers = CASES[name]
    assert min(error(meha.solve(problem, x0, y0), *answer) for answer in answers) <= 1e-4


def test_a_plateau_without_an_end_is_no_evidence():
    """x has no influence at all, which no finite number of samples can tell from a wide plateau."""
    problem = meha.Problem(lambda x, y: square(y - 1), lambda x, y: square(y - 2) + 0 * x.sum())
    solution = meha.solve(problem, t(3.0, 1.0), t(0.0))
    assert solution.status is meha.Status.LOCAL
    assert "F is constant around this x" in solution.message


EASY = [name for name in CASES if name.startswith(("scale", "condition", "distance", "start", "bounds"))]


@pytest.mark.parametrize("name", EASY[::5])
def test_scales_and_starts_do_no_harm(name):
    problem, x0, y0, answers = CASES[name]
    solution = meha.solve(problem, x0, y0)
    assert solution.converged
    assert min(error(solution, *answer) for answer in answers) <= 1e-5
