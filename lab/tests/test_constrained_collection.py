"""The constrained problems: their answers checked in ways other than those they were found by, and the default on them."""

import math

import numpy as np
import pytest
import torch
from meha_lab.problems import collection
from meha_lab.problems.blueprints import double, references
from meha_lab.problems.constrained import FAMILIES
from meha_lab.problems.constrained.known import FILE, judge

import meha

ENTRIES = {entry.name: entry for entry in collection(group="constrained")}
MAKERS = {name: make for family in FAMILIES.values() for name, make in family.items()}
QUICK = ["linear over linear, 2 + 1, 3 rows", "quadratic over quadratic, 3 + 2, 3 rows", "y in an ellipse with x"]


def test_there_are_enough_in_both_halves():
    halves = {half: collection(half, group="constrained") for half in ("tuning", "held-out")}
    assert len(ENTRIES) >= 40
    assert min(map(len, halves.values())) >= 20
    assert set(ENTRIES) == set(references(FILE)) == set(MAKERS)
    kinds = {entry.family for entry in halves["held-out"]}
    assert {"linear, linear", "linear, quadratic", "quadratic, quadratic", "upper coupling", "curved bounds"} <= kinds


@pytest.mark.parametrize("name", ENTRIES)
def test_answers_are_feasible_on_both_levels(name):
    problem = ENTRIES[name].make()
    judged = judge(problem, problem.x_star, problem.y_star)
    assert judged.violation <= 1e-6
    assert abs(judged.gap) <= 1e-6


@pytest.mark.parametrize("name", ENTRIES)
def test_no_other_x_is_better(name):
    """Random x with the exact lower level, and upper constraints met, are never below the answer."""
    spec, problem = MAKERS[name](), ENTRIES[name].make()
    exact = spec.build(double)
    generator = np.random.default_rng(1)
    low, high = spec.box
    near = problem.x_star.numpy()
    met = 0
    for k in range(60):
        x = generator.uniform(low, high) if k % 2 else np.clip(near + 0.03 * generator.normal(size=len(low)), low, high)
        y = spec.answer(x)
        if y is None:
            continue
        at = double(x), double(y)
        if max((c.violation(*at) for c in exact.constraints[1]), default=0.0) > 1e-9:
            continue
        met += 1
        assert float(exact.upper(*at)) >= problem.upper_star - 1e-6 * (1 + abs(problem.upper_star))
    assert met > 0


@pytest.mark.parametrize("name", ENTRIES)
def test_exact_lower_levels_are_minima(name):
    """No random y that meets the lower constraints has a smaller f than the exact answer."""
    spec = MAKERS[name]()
    exact = spec.build(double)
    generator = np.random.default_rng(2)
    x = double(spec.box[0] + 0.4 * (spec.box[1] - spec.box[0]))
    best = spec.answer(x.numpy())
    if best is None:
        return
    least = float(exact.lower(x, double(best)))
    for k in range(300):
        y = double(best + (0.1 if k % 2 else 3.0) * generator.normal(size=len(best)))
        if max(c.violation(x, y) for c in exact.constraints[0]) <= 0:
            assert float(exact.lower(x, y)) >= least - 1e-9


def test_wrong_points_are_judged_wrong():
    problem = ENTRIES["y below a parabola"].make()
    assert not judge(problem, problem.x_star, problem.y_star - 0.1).right()
    assert judge(problem, problem.x_star, problem.y_star + 0.1).violation == pytest.approx(0.1, abs=1e-6)
    assert not judge(problem, problem.x_star + 0.2, problem.y_star).right()


@pytest.mark.parametrize("name", QUICK)
def test_the_default_solves(name):
    problem = ENTRIES[name].make()
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert solution.status is meha.Status.CONVERGED
    assert judge(problem, solution.x, solution.y).right()


@pytest.mark.slow
@pytest.mark.parametrize("half", ["tuning", "held-out"])
def test_the_default_on_the_collection(half):
    """85 % solved, and none wrong while converged."""
    right, wrong, entries = 0, [], collection(half, group="constrained")
    for entry in entries:
        problem = entry.make()
        solution = meha.solve(problem, problem.x0, problem.y0)
        good = judge(problem, solution.x, solution.y).right()
        right += good
        if not good and solution.status is meha.Status.CONVERGED:
            wrong.append(entry.name)
    assert not wrong
    assert right >= math.ceil(0.85 * len(entries))


def test_single_precision():
    problem = ENTRIES["quadratic over quadratic, 1 + 1, 2 rows"].make(dtype=torch.float32)
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert float(problem.upper(solution.x, solution.y)) == pytest.approx(problem.upper_star, abs=1e-3)
