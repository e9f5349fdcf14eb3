"""The problems with known answers, and what Algorithm 1 reaches on them."""

import math

import pytest
import torch

import meha
from meha import problems


def solve(problem, preset, steps, x0=None, y0=None):
    start = (problem.x0 if x0 is None else x0, problem.y0 if y0 is None else y0)
    return meha.solve(problem, *start, problem.preset(preset), max_steps=steps, tol=None)


KNOWN = {
    "strong convex": problems.strong_convex(5),
    "merely convex": problems.merely_convex(3),
    "sine 1": problems.sine(1),
    "sine 10": problems.sine(10),
    "lasso": problems.lasso(6),
    "group lasso": problems.group_lasso(240, groups=24, design="orthogonal"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_known_answer_is_feasible_and_has_the_stated_value(name):
    problem = KNOWN[name]
    x, y = problem.x_star, problem.y_star
    assert float(problem.upper(x, y)) == pytest.approx(problem.upper_star, abs=1e-9)
    assert meha.diagnostics.gap(problem, x, y, 0.4) == pytest.approx(0, abs=1e-10)
    assert problem.distance(x, y) == (0.0, 0.0)
    far = problem.distance(x, y + 1)
    assert far.y > 0.1
    assert problem.x_set is None or problem.x_set.contains(x)


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "merely convex"])
def test_the_known_answer_is_the_best_one_nearby(name):
    """No x close to it gives a lower F with its own lower-level solution (in the merely convex case, F = 0 says the same)."""
    problem = KNOWN[name]
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(10):
            x = problem.x_star + scale * torch.randn(problem.x_star.shape, generator=generator, dtype=torch.float64)
            x = x if problem.x_set is None else problem.x_set.project(x)
            best = meha.diagnostics.envelope(problem, x, problem.y_star, 1e8, tol=1e-12).theta
            assert float(problem.upper(x, best)) >= problem.upper_star - 1e-7


@pytest.mark.parametrize("name", ["lasso", "group lasso"])
def test_distance_to_a_set(name):
    problem = KNOWN[name]
    free = problem.y_star.reshape(len(problem.x_star), -1).norm(dim=1) == 0
    assert 0 < int(free.sum()) < len(free)
    x = problem.x_star + 0.05 * free
    assert problem.distance(x, problem.y_star).x == 0
    assert problem.distance(problem.x_star + 0.05, problem.y_star).x > 0


@pytest.mark.parametrize(
    ("make", "preset", "steps", "error"),
    [
        (lambda: problems.strong_convex(100), "paper", {50: 1.06, 100: 0.65, 400: 0.12, 800: 0.031}, "x"),
        (lambda: problems.merely_convex(10), "recipe", {400: 2.3e-3, 800: 1.0e-4}, "x"),
        (lambda: problems.sine(1), "recipe", {50: 0.084, 800: 0.032}, "x"),
        (lambda: problems.sine(10), "recipe", {50: 0.072, 800: 0.022}, "x"),
        (lambda: problems.sine(100), "recipe", {50: 0.080, 800: 0.025}, "x"),
        (lambda: problems.sine(1000), "recipe", {50: 0.08, 800: 0.025}, "x"),
        (lambda: problems.lasso(2), "recipe", {100: 0.061, 800: 0.021}, "y"),
        (lambda: problems.lasso(100), "recipe", {100: 0.061, 800: 0.021}, "y"),
        (lambda: problems.lasso(1000), "recipe", {100: 0.061, 800: 0.021}, "y"),
    ],
    ids=["strong convex", "merely convex", "sine 1", "sine 10", "sine 100", "sine 1000", "lasso 2", "lasso 100", "lasso 1000"],
)
def test_recipes_reach_their_errors(make, preset, steps, error):
    problem, reached = make(), {}

    def note(run, info):
        if info.step in steps:
            reached[info.step] = getattr(problem.distance(run.x, run.y), error)

    meha.solve(problem, problem.x0, problem.y0, problem.preset(preset), max_steps=max(steps), tol=None, callbacks=note)
    for step, value in steps.items():
        assert reached[step] == pytest.approx(value, rel=0.1)


def test_strong_convex_from_zero():
    problem = problems.strong_convex(100)
    zero = torch.zeros_like(problem.x0)
    solution = solve(problem, "paper", 800, zero, zero)
    assert problem.distance(solution.x, solution.y).x == pytest.approx(0.010, rel=0.1)


def test_recipe_of_the_lasso_finds_the_solution_set_in_x():
    problem = problems.lasso(100)
    solution = solve(problem, "recipe", 800)
    assert problem.distance(solution.x, solution.y).x == 0


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 10, 50, 100, 200, 1000])
def test_sine_recipe_in_the_long_run(n):
    problem = problems.sine(n)
    solution = solve(problem, "recipe", 5000)
    assert problem.distance(solution.x, solution.y).x < 0.015


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 100, 1000])
def test_lasso_recipe_in_the_long_run(n):
    problem = problems.lasso(n)
    solution = solve(problem, "recipe", 4000)
    assert problem.distance(solution.x, solution.y) == (0.0, pytest.approx(0.0095, rel=0.1))


@pytest.mark.slow
def test_group_lasso_error_of_the_paper():
    """Mean over five seeds within the paper's 71.9 +- 10.5 for m = 600, after 500 steps."""
    errors = []
    for seed in range(5):
        problem = problems.group_lasso(600, seed=seed)
        solution = solve(problem, "recipe", 500)
        errors.append(problem.metrics["test error"](solution.x, solution.y))
    mean = sum(errors) / 5
    assert abs(mean - 71.9) < 10.5


def test_group_lasso_improves_on_nothing():
    problem = problems.group_lasso(600)
    solution = solve(problem, "recipe", 150)
    error, null = (problem.metrics[name](solution.x, solution.y) for name in ("test error", "null error"))
    assert error < 0.8 * null


def test_group_lasso_generator():
    problem = problems.group_lasso(600, seed=3)
    assert problem.x0.shape == (30,)
    assert problem.y0.shape == (600,)
    again, other = problems.group_lasso(600, seed=3), problems.group_lasso(600, seed=4)
    y = torch.ones(600, dtype=torch.float64)
    assert float(problem.lower(None, y)) == float(again.lower(None, y))
    assert float(problem.lower(None, y)) != float(other.lower(None, y))
    truth = torch.cat([torch.cat([torch.ones(50), torch.zeros(150)])] * 3).double()
    noise = sum(float(part) for part in (problem.lower(None, truth), problem.upper(None, truth)))
    noise += problem.metrics["test error"](None, truth)
    signal = sum(float(part) for part in (problem.lower(None, 0 * y), problem.upper(None, 0 * y)))
    signal += problem.metrics["test error"](None, 0 * y)
    # b = Av + noise with |Av| = 2 |noise|, nearly orthogonal: |b|^2 / |noise|^2 is about 5.
    assert signal / noise == pytest.approx(5, rel=0.15)
    assert problems.group_lasso(3600).x0.shape == (300,)


def test_orthogonal_group_lasso_is_solved():
    problem = problems.group_lasso(60, groups=6, design="orthogonal")
    solution = solve(problem, "theory", 2000)
    distance = problem.distance(solution.x, solution.y)
    assert max(distance) < 0.06


@pytest.mark.parametrize("make", [problems.sine, problems.strong_convex, problems.merely_convex, problems.lasso])
def test_default_parameters_come_near_every_solution(make):
    """The rule of meha.methods.parameters on problems that hide their constants."""
    problem = make(10)
    hidden = meha.Problem(problem.upper, problem.lower, nonsmooth=problem.nonsmooth, x_set=problem.x_set)
    solution = meha.solve(hidden, problem.x0, problem.y0, meha.MEHA(p=0.49), max_steps=1500, tol=None)
    assert max(problem.distance(solution.x, solution.y)) < 0.06


def test_paper_values_on_the_sine_toy():
    """The table values come near in one dimension, and end in a wrong basin in ten."""
    one, ten = problems.sine(1), problems.sine(10)
    near, wrong = solve(one, "paper", 2000), solve(ten, "paper", 2000)
    assert one.distance(near.x, near.y).x == pytest.approx(0.017, abs=0.005)
    assert ten.distance(wrong.x, wrong.y).x > 1


@pytest.mark.parametrize("make", [problems.sine, problems.strong_convex, problems.merely_convex, problems.lasso])
def test_bad_dimension(make):
    with pytest.raises(ValueError, match="n: must be at least"):
        make(0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="n: must be even"):
        problems.lasso(3)
    with pytest.raises(ValueError, match="multiple of groups"):
        problems.group_lasso(600, groups=7)
    with pytest.raises(ValueError, match="design"):
        problems.group_lasso(60, groups=6, design="random")
    with pytest.raises(ValueError, match="preset: must be one of paper, recipe, theory for sine, n = 1, got 'best'"):
        problems.sine(1).preset("best")


def test_sine_solution_by_search():
    """The formula for x* and F* against a search over basins C_k = -pi/2 + 2 k pi and x."""
    for n in (1, 4, 30):
        problem = problems.sine(n)
        best = math.inf
        for k in range(-3, 5):
            basin = -math.pi / 2 + 2 * math.pi * k
            x = torch.linspace(-20, 20, 40001, dtype=torch.float64)
            value = (x - 2).square() + n * (basin + 2 - x - 4).square()
            best = min(best, float(value.min()))
        assert problem.upper_star == pytest.approx(best, abs=1e-4 * (n + 1))
