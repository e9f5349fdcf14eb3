"""What a claim of convergence is worth: small problems with points of the lower level that only look like solutions."""

import numpy as np
import pytest
import torch

import meha
from meha import Problem, Status
from meha.sets import Box


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def tilted_wells():
    """Two wells of f; F prefers the higher one."""
    return Problem(
        lambda x, y: (x.square() + (y - 1).square() / 4).sum(), lambda x, y: ((y.square() - 1).square() + 0.3 * y).sum()
    )


def test_the_higher_well_is_not_a_solution():
    solution = meha.solve(tilted_wells(), t(1.0), t(-1.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.y) == pytest.approx(np.roots([4, 0, -4, 0.3]).real.min(), abs=1e-6)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-5)


def test_a_maximum_of_the_lower_level_is_not_a_solution():
    problem = Problem(lambda x, y: (x.square() + y.square()).sum(), lambda x, y: -y.pow(4).sum(), y_set=Box(-1.0, 1.0))
    solution = meha.solve(problem, t(1.0), t(1.0))
    assert solution.status is Status.CONVERGED
    assert abs(float(solution.y)) == pytest.approx(1.0, abs=1e-6)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-5)


def test_a_valley_that_splits_on_the_way():
    """For x < 0 the minimum at y = 0 becomes a maximum between two minima."""
    problem = Problem(
        lambda x, y: ((x + 0.5).square() + y.square() / 2).sum(), lambda x, y: (x * y.square() / 2 + y.pow(4) / 4).sum()
    )
    solution = meha.solve(problem, t(1.0), t(1.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(-0.25, abs=1e-4)
    assert abs(float(solution.y)) == pytest.approx(0.5, abs=1e-4)


def test_three_stages_at_rest_are_not_enough():
    """While c is small, F holds y at its bound."""
    problem = Problem(lambda x, y: (x.square() + y).sum(), lambda x, y: (y - 1).square().sum(), y_set=Box(-1.0, 2.0))
    solution = meha.solve(problem, t(1.0), t(-1.0), meha.AdaptiveMEHA())
    assert solution.status is Status.CONVERGED
    assert float(solution.y) == pytest.approx(1.0, abs=1e-3)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-3)


def test_group_lasso_by_the_single_loop_is_right_or_makes_no_claim():
    (entry,) = [entry for entry in meha.problems.collection("tuning") if entry.name == "group lasso, m = 60, orthogonal"]
    problem = entry.make()
    solution = meha.solve(problem, problem.x0, problem.y0, meha.AdaptiveMEHA())
    assert solution.status is not Status.CONVERGED or problem.error(solution.x, solution.y) <= 1e-2


def test_a_start_at_the_solution_is_not_at_infinity():
    problem = Problem(
        upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lower=lambda x, y: torch.sin(x + y - 2).sum()
    )
    first = meha.solve(problem, t(-6.0), torch.zeros(10, dtype=torch.float64))
    again = meha.solve(problem, first.x, first.y)
    assert again.status is Status.CONVERGED
    assert float(again.x) == pytest.approx(float(first.x), abs=1e-5)


# Before a run


def test_check_counts_valleys():
    report = meha.check(tilted_wells(), t(1.0), t(-1.0))
    assert report.valleys == 2
    ((_, sentence),) = [finding for finding in report.findings if finding[0] == "valleys"]
    assert "in 2 valleys, the lowest 0.6 below the next" in sentence
    bowl = meha.check(Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - x).square().sum()), t(1.0), t(-1.0))
    assert bowl.valleys is None
