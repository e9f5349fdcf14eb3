"""The collection: every stated answer is checked by ways other than the one that it was found by."""

import importlib
import math
from functools import partial

import numpy as np
import pytest
import torch
from meha_lab import problems
from meha_lab.problems.blueprints import references
from meha_lab.problems.collected import CollectedProblem
from meha_lab.problems.collection import BLUEPRINTS, TOYS
from meha_lab.problems.exact import Linearised
from meha_lab.problems.games import cournot_limited
from meha_lab.problems.quadratic import linear_upper, quadratic
from meha_lab.problems.regression import coreset, elastic_net, group_lasso_gaussian, lasso_weight, logistic, softmax
from meha_lab.problems.scaled import scaled

from meha.problems import group_lasso

ENTRIES = {entry.name: entry for entry in problems.collection()}
NEW = [name for family in BLUEPRINTS.values() for name in family]

everything = pytest.mark.parametrize("name", NEW)


def directions(problem, count, seed=0):
    """Random unit moves of x in the units of its coordinates, with their opposites."""
    generator = torch.Generator().manual_seed(seed)
    units = problem.x_star.abs().clamp(min=1e-2 * float(problem.x_star.abs().max()))
    moves = [torch.randn(problem.x_star.shape, generator=generator, dtype=torch.float64) * units for _ in range(count)]
    return [sign * move for move in moves for sign in (1, -1)]


def feasible(problem, x):
    return x if problem.x_set is None else problem.x_set.project(x)


def gain(problem):
    """What there is to be gained from x0 on."""
    return problem.value(problem.x0) - problem.upper_star


def test_there_are_enough_of_them_in_both_halves():
    entries = problems.collection()
    assert len(NEW) >= 60
    assert len(ENTRIES) == len(entries) == len(NEW) + sum(map(len, TOYS.values()))
    halves = {half: problems.collection(half) for half in ("tuning", "held-out")}
    assert sorted(e.name for half in halves.values() for e in half) == sorted(ENTRIES)
    assert min(map(len, halves.values())) >= 25
    families = {half: {entry.family for entry in chosen} for half, chosen in halves.items()}
    assert families["tuning"] < families["held-out"]
    assert len(families["held-out"] - families["tuning"]) >= 4


def test_references_are_those_of_cases_without_a_closed_form():
    assert set(references()) == {
        name for family in BLUEPRINTS.values() for name, make in family.items() if make().x_star is None
    }


@pytest.mark.parametrize("name", ENTRIES)
def test_the_answer_is_feasible_and_has_error_zero(name):
    problem = ENTRIES[name].make()
    assert problem.name == name
    x, y = problem.x_star, problem.y_star
    assert problem.x_set is None or problem.x_set.contains(x, tol=1e-12)
    assert problem.y_set is None or problem.y_set.contains(y, tol=1e-12)
    assert float(problem.upper(x, y)) == pytest.approx(problem.upper_star, rel=1e-12, abs=1e-12)
    assert problem.error(x, y) == pytest.approx(0, abs=1e-9)
    assert problem.error(problem.x0, problem.y0) > 0.05
    assert problem.preset("paper").gamma is not None


@everything
def test_y_star_solves_the_lower_level(name):
    """The fixed-point residual is nil, and no feasible y, near or far, has a lower f + g."""
    problem = ENTRIES[name].make()
    x, y = problem.x_star, problem.y_star
    there = Linearised(problem, x, y)
    assert float(there.residual.abs().max()) <= 1e-9 * max(1.0, float(y.abs().max()))
    generator = torch.Generator().manual_seed(1)
    lowest = float(problem.lower(x, y) + problem.g.value(x, y))
    for size in (1e-3, 0.1, 1.0, 1.0):
        move = torch.randn(y.shape, generator=generator, dtype=torch.float64) * max(1e-2, float(y.abs().max()))
        other = y + size * move
        other = other if problem.y_set is None else problem.y_set.project(other)
        value = float(problem.lower(x, other) + problem.g.value(x, other))
        assert value >= lowest - 1e-12 * max(1.0, abs(lowest))


@everything
def test_no_x_near_the_answer_is_better(name):
    """The stated y is the response; no move of x lowers F(x, y*(x)): at 1e-4 that is stationarity, at 0.3 more than that."""
    problem = ENTRIES[name].make()
    assert problem.value(problem.x_star) == pytest.approx(problem.upper_star, abs=1e-10 * gain(problem))
    for size, count in ((1e-4, 2), (0.02, 1), (0.3, 2)):
        for move in directions(problem, count):
            x = feasible(problem, problem.x_star + size * move)
            assert problem.value(x) >= problem.upper_star - 1e-9 * gain(problem)


@everything
def test_the_measure_fits(name):
    """Where errors are distances, an x that is wrong by a tenth is visibly worse; excess grows from 0 to 1 at the start."""
    problem = ENTRIES[name].make()
    if problem.measure == "excess":
        assert problem.error(problem.x0, None) == 1
        return
    for move in directions(problem, 2, seed=2):
        x = feasible(problem, problem.x_star + 0.1 * move)
        if problem.error(x, problem.y_star) > 0.01:
            assert problem.value(x) - problem.upper_star > 1e-6 * gain(problem)


@pytest.mark.parametrize("name", [name for name in NEW if ENTRIES[name].make().x0.numel() == 1])
def test_scalar_problems_on_a_grid(name):
    problem = ENTRIES[name].make()
    box = getattr(problem.x_set, "low", None), getattr(problem.x_set, "high", None)
    low, high = box if None not in box else (-4.0, 12.0)
    for t in np.linspace(float(low), float(high), 21):
        assert problem.value(torch.full((1,), t, dtype=torch.float64)) >= problem.upper_star - 1e-9 * gain(problem)


@pytest.mark.parametrize("name", ["Mirrlees", "double well, n = 1", "wave", "bilinear", "circle", "valley"])
def test_small_responses_are_global(name):
    problem = ENTRIES[name].make()
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        x = feasible(problem, problem.x_star + torch.randn(problem.x_star.shape, generator=generator, dtype=torch.float64))
        lowest = float(problem.lower(x, problem.answer(x)))
        for _ in range(50):
            y = 2 * torch.randn(problem.y_star.shape, generator=generator, dtype=torch.float64)
            y = y if problem.y_set is None else problem.y_set.project(y)
            assert float(problem.lower(x, y)) >= lowest - 1e-12


@everything
def test_single_precision(name):
    exact, single = ENTRIES[name].make(), ENTRIES[name].make(dtype=torch.float32)
    assert single.x0.dtype == single.y_star.dtype == torch.float32
    for part in ("upper", "lower"):
        at = single.x0, single.y_star
        value = getattr(single, part)(*at)
        assert value.dtype == torch.float32
        reference = float(getattr(exact, part)(*(t.double() for t in at)))
        assert float(value) == pytest.approx(reference, rel=1e-4, abs=1e-4 * max(1.0, abs(single.upper_star)))
    assert single.error(single.x_star, single.y_star) < 1e-6
    assert single.upper_star == exact.upper_star


def test_building_twice_gives_the_same_problem():
    for name in ("quadratic, condition 10", "softmax, one weight", "tolls for revenue"):
        one, two = (ENTRIES[name].make() for _ in range(2))
        assert float(one.lower(one.x_star, one.y_star)) == float(two.lower(two.x_star, two.y_star))


def respond(blueprint, x):
    return blueprint.respond(torch.tensor(x, dtype=torch.float64)).numpy()


def test_responses_against_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    n, p = 40, 10
    rng_data = problems.regression._linear_data(np.random.default_rng(5), p, n, 1.0)
    (A, b), _ = rng_data
    exact = {"fit_intercept": False, "tol": 1e-12, "max_iter": 100_000}
    net = linear_model.ElasticNet(alpha=0.5, l1_ratio=0.6, **exact).fit(A, b).coef_
    assert respond(elastic_net(p, n, seed=5, form="direct"), [0.3, 0.2]) == pytest.approx(net, abs=1e-8)
    sparse = linear_model.Lasso(alpha=0.2, **exact).fit(A, b).coef_
    assert np.any(sparse == 0)
    assert respond(lasso_weight(p, n, seed=5, form="log"), [math.log(0.2)]) == pytest.approx(sparse, abs=1e-8)
    flat = linear_model.LogisticRegression(C=1 / (n * math.exp(-3)), **exact).fit(A, np.sign(b)).coef_[0]
    assert respond(logistic(p, n, seed=5), [-3.0]) == pytest.approx(flat, abs=1e-6)


def test_responses_against_cvxpy():
    cvxpy = pytest.importorskip("cvxpy")
    n, groups, size = 30, 4, 3
    useful = np.repeat(np.arange(groups) % 2 == 0, size)
    (A, b), _ = problems.regression._linear_data(np.random.default_rng(6), groups * size, n, 1.0, useful=useful)
    weights, y = np.array([0.1, 0.4, 0.3, 0.2]), cvxpy.Variable(groups * size)
    norms = [cvxpy.norm(y[size * j : size * (j + 1)]) for j in range(groups)]
    loss = cvxpy.sum_squares(A @ y - b) / (2 * n) + sum(w * r for w, r in zip(weights, norms, strict=True))
    cvxpy.Problem(cvxpy.Minimize(loss)).solve()
    assert respond(group_lasso_gaussian(groups, size, n, seed=6), weights) == pytest.approx(y.value, abs=1e-5)

    paths, t, s = problems.games._roads(np.random.default_rng(7), 2)
    tolls, y = np.linspace(0, 3, 12), cvxpy.Variable(6, nonneg=True)
    v = y @ paths
    cost = v @ (t + tolls) + cvxpy.sum(cvxpy.multiply(s / 2, cvxpy.square(v))) + 0.05 * cvxpy.sum_squares(y)
    cvxpy.Problem(cvxpy.Minimize(cost), [cvxpy.sum(y) == 10]).solve()
    assert respond(problems.games.toll_time(2, seed=7), tolls) == pytest.approx(y.value, abs=1e-5)


def test_capacities_against_a_grid():
    for seed in range(4):
        blueprint = cournot_limited(2, 3, seed=seed)
        best = blueprint.value(torch.tensor(blueprint.x_star))
        for k in range(2):
            for t in np.linspace(0, 12, 241):
                x = torch.tensor(np.where(np.arange(2) == k, t, blueprint.x_star))
                assert blueprint.value(x) >= best - 1e-12


def test_errors_that_are_infinite():
    problem = ENTRIES["coreset, 15 examples"].make()
    assert problem.error(problem.x0 + 0.01, problem.y0) == math.inf
    for name in ("quadratic, condition 10", "representation, linear"):
        problem = ENTRIES[name].make()
        assert problem.error(problem.x0 * math.nan, problem.y0) == math.inf


def test_an_optimum_at_infinity_has_a_finite_value():
    problem = ENTRIES["ridge, weight per feature, no bounds"].make()
    far = torch.where(problem.x_star > 20, 1e4, problem.x_star)
    assert problem.error(far, problem.y0) == pytest.approx(0, abs=1e-9)
    assert problem.error(0 * far + 1e4, problem.y0) > 0.1


def test_entries_tell_of_local_optima():
    assert ENTRIES["quadratic, condition 10"].optima is None
    assert ENTRIES["ridge, one weight"].optima == 1
    assert ENTRIES["tolls for revenue"].optima > 1


def test_scaling_changes_the_numbers_and_not_the_error():
    plain, factors = quadratic(3, 5, 10.0, seed=1), np.array([1e-3, 1.0, 1e3])
    other = scaled(partial(quadratic, 3, 5, 10.0, seed=1), x=factors, y=10.0, upper=7.0, lower=0.1)
    x, y = torch.randn(3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    by = torch.tensor(factors)
    for part, factor in (("upper", 7.0), ("lower", 0.1)):
        expected = factor * float(getattr(plain.exact, part)(x, y))
        assert float(getattr(other.exact, part)(x * by, 10 * y)) == pytest.approx(expected)
    one = problems.blueprints.known_problem("plain", lambda: plain)
    two = problems.blueprints.known_problem("scaled", lambda: other)
    assert two.error(x * by, 10 * y) == pytest.approx(one.error(x, y))


def test_scaling_needs_a_smooth_problem():
    with pytest.raises(ValueError, match="make: cannot be scaled"):
        scaled(partial(elastic_net, 4, 8, seed=0, form="direct"))
    box = scaled(partial(linear_upper, 3, 5, 10.0, seed=1), x=5.0).exact.x_set
    assert float(box.high.max()) == 5


def test_bad_arguments():
    with pytest.raises(ValueError, match="half: must be"):
        problems.collection("all")
    with pytest.raises(LookupError, match="no reference is stored for 'unheard of'"):
        problems.blueprints.known_problem("unheard of", partial(softmax, 3, 10, 2, seed=0))
    problem = group_lasso(6, 2)
    blind = CollectedProblem(
        upper=problem.upper,
        lower=problem.lower,
        name="blind",
        x0=0,
        y0=0,
        distance=problem.distance,
        presets={},
        measure="excess",
    )
    with pytest.raises(ValueError, match="which blind lacks"):
        blind.error(problem.x0, problem.y0)


def script():
    return importlib.import_module("meha_lab.tools.references")


@pytest.mark.parametrize(
    "name", ["softmax, one weight", "elastic net", "group lasso, 4 groups", "tolls for revenue", "support vectors, cost"]
)
def test_the_script_differentiates_the_hyper_objective(name):
    """The derivative by which the references were found, against central differences."""
    hyper = script().FlatHyperObjective(next(family[name] for family in BLUEPRINTS.values() if name in family)())
    x = hyper.x0 * 1.1 + 0.03
    gradient = hyper.gradient(x)
    for i in range(min(3, x.size)):
        e = 1e-5 * np.eye(x.size)[i]
        assert (hyper.value(x + e) - hyper.value(x - e)) / 2e-5 == pytest.approx(gradient[i], rel=1e-4, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ridge, one weight", "softmax, weight per class", "elastic net", "tolls for revenue"])
def test_the_script_finds_the_references_again(name, capsys):
    make = next(family[name] for family in BLUEPRINTS.values() if name in family)
    found = script().reference(make(), 4, np.random.default_rng(1))
    assert found["x"] == pytest.approx(references()[name]["x"], abs=1e-7)


def test_coreset_response_is_the_weighted_solution():
    blueprint = coreset(9, 3, seed=2)
    x = np.linspace(0.05, 0.2, 9)
    x = x / x.sum()
    A, b, _, _ = problems.regression._spoiled(np.random.default_rng(2), 9, 3)
    rows = np.vstack([np.sqrt(x)[:, None] * A, 0.1 * np.eye(3)])
    expected = np.linalg.lstsq(rows, np.r_[np.sqrt(x) * b, np.zeros(3)], rcond=None)[0]
    assert respond(blueprint, x) == pytest.approx(expected, abs=1e-10)
