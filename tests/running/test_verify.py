"""verify: right points pass, and every kind of wrong point is refuted by the test that is meant for it."""

import pytest
import torch

import meha

F64 = torch.float64


def t(*values):
    return torch.tensor(values, dtype=F64)


def pull(x, y):
    return (x - 1).square().sum() + (y - 2).square().sum()


def follow(x, y):
    return (y - x).square().sum()


PLAIN = meha.Problem(pull, follow)  # y = x, so that F is least at x = 3/2

WELLS = meha.Problem(
    upper=lambda x, y: (x - 0.5).square().sum() + y.square().sum(),
    lower=lambda x, y: ((y * y - 1) ** 2 + 0.3 * x * y).sum(),
)
"""Two basins of the lower level; for x > 0 the one with y < 0 is the lower one."""

COUPLED = meha.Problem(
    upper=lambda x, y: ((x - 3) ** 2 + (y - 2) ** 2).sum(),
    lower=lambda x, y: ((y - 5) ** 2).sum(),
    x_set=meha.sets.Box(0.0, 8.0),
    lower_constraints=meha.constraints.Linear(A=t([-2.0], [1.0], [1.0]), B=t([1.0], [-2.0], [2.0]), b=t(1.0, 2.0, 14.0)),
)
"""A textbook problem: y = min(5, 1 + 2 x, 7 - x / 2), and the solution is (1, 3)."""


def failed(verification):
    """The name of the test that refuted a point; empty if none did."""
    return next((finding.test for finding in verification.findings if finding.outcome == "refuted"), "")


def test_a_solution_passes_all_tests():
    found = meha.verify(PLAIN, t(1.5), t(1.5))
    assert found.converged
    assert not found.refuted
    assert found.better is None
    assert [finding.test for finding in found.findings] == [
        "feasible",
        "lower level stationary",
        "lower level global",
        "upper level",
    ]


@pytest.mark.parametrize(
    ("x", "y", "test"),
    [
        (1.0, 1.0, "upper level"),  # y solves the lower level, but x is not stationary
        (1.5, 1.2, "lower level stationary"),
        (1.5, 1.501, ""),  # an error within tol
    ],
)
def test_which_test_refutes_a_point(x, y, test):
    assert failed(meha.verify(PLAIN, t(x), t(y))) == test


def test_what_refutes_a_point_is_given():
    x, y = meha.verify(PLAIN, t(1.0), t(1.0)).better
    assert float(x) == pytest.approx(1.5, abs=1e-5)
    assert float(y) == pytest.approx(1.5, abs=1e-5)


def test_a_higher_basin_of_the_lower_level_is_refuted():
    right = meha.solve(WELLS, t(1.0), t(-1.0))
    assert right.verify().converged
    high = t(0.9)
    for _ in range(50):  # Newton steps to the minimum of the higher basin
        high = high - (4 * high * (high**2 - 1) + 0.3 * right.x) / (12 * high**2 - 4)
    found = meha.verify(WELLS, right.x, high)
    assert failed(found) == "lower level global"
    assert float(found.better[1]) < 0


def test_another_local_minimum_in_x_is_refuted():
    """F(x, x) = (x^2 - 1)^2 + 0.3 x has a local minimum near 0.96, and a lower one near -1.03."""
    problem = meha.Problem(lambda x, y: ((y * y - 1) ** 2 + 0.3 * x).sum(), follow)
    local = t(0.9600)
    for _ in range(50):
        local = local - (4 * local * (local**2 - 1) + 0.3) / (12 * local**2 - 4)
    found = meha.verify(problem, local, local.clone())
    assert failed(found) == "upper level"
    assert float(found.better[0]) == pytest.approx(-1.0355, abs=1e-2)


def test_points_outside_of_the_sets_are_refuted():
    problem = meha.Problem(pull, follow, x_set=meha.sets.Box(0.0, 1.0), y_set=meha.sets.Box(0.0, 2.0))
    assert meha.verify(problem, t(1.0), t(1.0)).converged
    assert failed(meha.verify(problem, t(1.5), t(1.5))) == "feasible"
    assert failed(meha.verify(problem, t(1.0), t(2.5))) == "feasible"


@pytest.mark.parametrize(
    ("x", "y", "test"),
    [
        (1.0, 3.0, ""),
        (2.0, 5.0, "upper level"),
        (1.0, 2.5, "lower level global"),
        (3.0, 2.0, "lower level global"),  # the best for F without the lower level
        (1.0, 3.5, "feasible"),
    ],
)
def test_coupled_problems(x, y, test):
    assert failed(meha.verify(COUPLED, t(x), t(y))) == test


def test_hollow_answers_are_refuted_where_the_response_is_stated():
    """The lower level fixes only the sum of y: the y nearest to 0 has two equal parts, and F would choose others."""
    upper = lambda x, y: (x - 1).square().sum() + (y - t(3.0, 1.0)).square().sum()  # noqa: E731
    lower = lambda x, y: (y.sum() - x).square().sum()  # noqa: E731
    problem = meha.Problem(upper, lower, response=meha.responses.Nearest())
    y0 = torch.zeros(2, dtype=F64)
    assert meha.verify(problem, t(2.0), t(1.0, 1.0), y0=y0).converged
    hollow = meha.solve(meha.Problem(upper, lower), t(0.0), y0)
    assert hollow.converged  # the best y for F
    assert failed(meha.verify(problem, hollow.x, hollow.y, y0=y0)) == "response"
    with pytest.raises(ValueError, match="y0"):
        meha.verify(problem, t(2.0), t(1.0, 1.0))


def test_solutions_of_other_methods_are_judged():
    good = meha.solve(PLAIN, t(0.0), t(0.0), meha.RHG(alpha=0.2, beta=0.4, inner_steps=20), max_steps=200)
    early = meha.solve(PLAIN, t(0.0), t(0.0), meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0), max_steps=5)
    assert not good.converged  # it claims nothing, and is right
    assert good.verify().converged
    assert early.verify().refuted


def test_problems_without_x():
    problem = meha.Problem(upper=lambda y: (y - 1).square().sum(), lower=lambda y: y[0].square())
    assert meha.verify(problem, None, t(0.0, 1.0)).converged
    assert failed(meha.verify(problem, None, t(0.5, 1.0))) == "lower level stationary"
    assert failed(meha.verify(problem, None, t(0.0, 0.0))) == "upper level"


def test_what_the_budget_left_open_is_not_claimed():
    found = meha.verify(WELLS, t(0.5), t(-1.04), budget=30, tol=0.1)
    assert not found.converged


def test_the_printed_verification_says_what_was_tried():
    text = str(meha.verify(PLAIN, t(1.0), t(1.0)))
    assert text.startswith("refuted, F = 1, after ")
    assert "descents of the lower level from other starts found no lower value" in text
    assert "F falls to 0.5 at another x" in text


def test_networks_and_batches_are_refused():
    net = torch.nn.Linear(1, 1)
    problem = meha.Problem(lambda x, y: y(x).sum(), lambda x, y: y(x).square().sum())
    with pytest.raises(ValueError, match="refit"):
        meha.verify(problem, t(1.0), net)
    with pytest.raises(TypeError, match="problem"):
        meha.verify(None, t(1.0), t(1.0))
    with pytest.raises(ValueError, match="budget"):
        meha.verify(PLAIN, t(1.0), t(1.0), budget=0)
