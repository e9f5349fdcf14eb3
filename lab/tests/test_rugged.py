"""The rugged and the simple problems: global answers, checked by ways other than the one that they were found by."""

import importlib
import itertools
from functools import cache

import numpy as np
import pytest
import torch
from meha_lab import problems
from meha_lab.problems.blueprints import double, references
from meha_lab.problems.collected import CollectedProblem
from meha_lab.problems.rugged import FAMILIES
from meha_lab.problems.rugged._minima import best, box_minima, chain_minima, line_minima, newton, separable

RUGGED = {entry.name: entry for entry in problems.collection(group="rugged")}
SIMPLE = {entry.name: entry for entry in problems.collection(group="simple")}
MAKERS = {name: make for family in FAMILIES.values() for name, make in family.items()}

rugged = pytest.mark.parametrize("name", RUGGED)
simple = pytest.mark.parametrize("name", SIMPLE)
both = pytest.mark.parametrize("entry", [*RUGGED.values(), *SIMPLE.values()], ids=lambda entry: entry.name)


@cache
def built(name):
    return {**RUGGED, **SIMPLE}[name].make()


def total(problem, x, y):
    return float((problem.lower(y) if x is None else problem.lower(x, y)) + problem.g.value(x, y))


def inside(domain, point):
    return point if domain is None else domain.project(point)


def test_groups_and_halves():
    assert len(RUGGED) >= 60
    assert len(SIMPLE) >= 10
    gentle = problems.collection()
    assert len(gentle) == 79
    assert {entry.group for entry in gentle} == {"gentle"}
    assert len(problems.collection(group=None)) == 79 + len(RUGGED) + len(SIMPLE) + len(problems.collection(group="hollow"))
    names = [entry.name for entry in problems.collection(group=None)]
    assert len(set(names)) == len(names)
    for group, least in (("rugged", 40), ("simple", 5)):
        assert min(len(problems.collection(half, group)) for half in ("tuning", "held-out")) >= least
    families = {half: {entry.family for entry in problems.collection(half, "rugged")} for half in ("tuning", "held-out")}
    assert families["tuning"] < families["held-out"]
    assert len(families["held-out"] - families["tuning"]) >= 4
    with pytest.raises(ValueError, match="group: must be"):
        problems.collection(group="hilly")


def test_sizes():
    sizes = [(make().x0.size, make().y0.size) for make in MAKERS.values()]
    assert max(n for n, _ in sizes) == 5
    assert max(m for _, m in sizes) == 20
    assert sum(m > 3 for _, m in sizes) >= 30
    assert sum(m <= 3 for _, m in sizes) >= 40


def test_references_are_those_of_cases_without_a_closed_form():
    stored = references("rugged.json")
    assert set(stored) == {name for name, make in MAKERS.items() if make().x_star is None}
    for name, record in stored.items():
        assert "none lower; x by" in record["confirmed"], name
        assert record["optima"] == 1 + len(record["local"])


@both
def test_the_answer_is_feasible_and_right(entry):
    problem = built(entry.name)
    x, y = problem.x_star, problem.y_star
    assert problem.name == entry.name
    assert problem.x_set is None or problem.x_set.contains(x, tol=1e-12)
    assert problem.y_set is None or problem.y_set.contains(y, tol=1e-12)
    assert problem.error(x, y) == pytest.approx(0, abs=1e-9)
    assert problem.verify(x, y).right(tol=1e-9, gap=1e-9)
    assert problem.region is not None
    assert not problem.verify(problem.x0, problem.y0).right()


@both
def test_no_y_is_lower(entry):
    """At x* and at other x, no y of the region or near the response has a lower f + g."""
    problem, generator = built(entry.name), torch.Generator().manual_seed(1)
    for i in range(3):
        x = problem.x_star if i == 0 else problem.start(generator)[0]
        y = problem.answer(x)
        lowest = total(problem, x, y)
        assert problem.lower_value(x) == lowest
        near = [y + size * torch.randn(y.shape, generator=generator, dtype=y.dtype) for size in (1e-4, 1e-2, 0.3) for _ in "12"]
        for other in [*(problem.start(generator)[1] for _ in range(20)), *near]:
            assert total(problem, x, inside(problem.y_set, other)) >= lowest - 1e-12 * (1 + abs(lowest))


@rugged
def test_no_x_is_better(name):
    problem, generator = built(name), torch.Generator().manual_seed(2)
    x = problem.x_star
    assert problem.value(x) == pytest.approx(problem.upper_star, abs=1e-9)
    near = [x + size * torch.randn(x.shape, generator=generator, dtype=x.dtype) for size in (1e-4, 1e-2, 0.3) for _ in "12"]
    for other in [*(problem.start(generator)[0] for _ in range(5)), *near]:
        assert problem.value(inside(problem.x_set, other)) >= problem.upper_star - 1e-9 * (1 + abs(problem.upper_star))
    for other in problem.local:
        assert problem.value(other) > problem.upper_star


@rugged
def test_an_error_in_x_shows(name):
    """Where x is wrong by a tenth, F is visibly larger, so that x* is unique."""
    problem, generator = built(name), torch.Generator().manual_seed(3)
    for _ in range(4):
        move = torch.randn(problem.x_star.shape, generator=generator, dtype=torch.float64)
        x = inside(problem.x_set, problem.x_star + 0.1 * (1 + problem.x_star.norm()) * move / move.norm())
        if float((x - problem.x_star).norm()) > 0.01:
            assert problem.value(x) > problem.upper_star + 1e-6


@both
def test_random_starts(entry):
    problem = built(entry.name)
    one, two = (problem.start(torch.Generator().manual_seed(4)) for _ in range(2))
    for point, other, start, domain in zip(one, two, (problem.x0, problem.y0), (problem.x_set, problem.y_set), strict=True):
        if start is None:
            assert point is other is None
            continue
        assert torch.equal(point, other)
        assert point.shape == start.shape
        assert domain is None or domain.contains(point)
    assert not problem.verify(*one).right()


@pytest.mark.parametrize("entry", problems.collection(), ids=lambda entry: entry.name)
def test_gentle_problems_can_be_verified(entry):
    """Their answers are right, random starts are not, and no y of a random start is below the lower value."""
    problem, generator = entry.make(), torch.Generator().manual_seed(0)
    assert problem.verify(problem.x_star, problem.y_star).right()
    for _ in range(2):
        x, y = problem.start(generator)
        assert problem.x_set is None or problem.x_set.contains(x)
        assert problem.y_set is None or problem.y_set.contains(y)
        assert problem.verify(x, y).gap >= -1e-9
        assert not problem.verify(x, y).right()
        assert problem.verify(x, problem.answer(x)).gap == pytest.approx(0, abs=1e-9)


def test_verification_tells_what_is_wrong():
    problem = built("tilted well")
    x, y = problem.x_star, problem.y_star
    moved = problem.verify(x + 0.1, problem.answer(x + 0.1))
    assert moved.x == pytest.approx(0.1 / (1 + abs(float(x))))
    assert moved.gap == 0
    other = problem.verify(x, -y)
    assert other.x == 0
    assert other.gap > 0.01
    assert not other.right()
    ring = built("ring")
    opposite = ring.verify(ring.x_star, -ring.y_star)
    assert opposite.gap == pytest.approx(0, abs=1e-9)
    assert opposite.upper > 0.1
    assert not opposite.right()
    box = built("parabola on a box")
    assert box.verify(box.x_star, 2 * box.y_star).gap == np.inf
    assert problem.verify(x * np.nan, y).x == np.inf


def test_lower_values_need_a_response():
    blind = CollectedProblem(
        upper=lambda x, y: y.sum(), lower=lambda x, y: y.sum(), name="blind", x0=0, y0=0, distance=None, presets={}
    )
    with pytest.raises(ValueError, match="blind lacks it"):
        blind.lower_value(0)


@both
def test_single_precision(entry):
    exact, single = built(entry.name), entry.make(dtype=torch.float32)
    assert single.y_star.dtype == torch.float32
    at = (single.y_star,) if single.x0 is None else (single.x0, single.y_star)
    for part in ("upper", "lower"):
        value = getattr(single, part)(*at)
        assert value.dtype == torch.float32
        assert float(value) == pytest.approx(float(getattr(exact, part)(*(t.double() for t in at))), rel=1e-4, abs=1e-4)


SMOOTH = [name for name in SIMPLE if built(name).y_set is None and built(name).nonsmooth is None]


@pytest.mark.parametrize("name", SMOOTH)
def test_simple_answers_by_a_penalty(name):
    """The least F + c f from many starts tends to the answer as c grows."""
    problem, generator = built(name), torch.Generator().manual_seed(5)
    shape = problem.y0.shape
    starts = torch.stack([problem.start(generator)[1].reshape(-1) for _ in range(60)])
    c = 1e9 if name == "quartic equation" else 1e5
    least = total(problem, None, problem.y_star)

    def penalised(z):
        return torch.func.vmap(lambda row: problem.upper(row.reshape(shape)) + c * (problem.lower(row.reshape(shape)) - least))(
            z
        )

    ends = newton(penalised, torch.cat([starts, problem.y0.reshape(1, -1)]), steps=200)
    values = penalised(ends)
    assert float(values.min()) == pytest.approx(problem.upper_star, abs=3e-3 * (1 + abs(problem.upper_star)))
    assert float((ends[values.argmin()] - problem.y_star.reshape(-1)).norm()) < 2e-2 * (1 + float(problem.y_star.norm()))


@pytest.mark.parametrize(("name", "sum_"), [("shares", 1.0), ("equal columns", 1.5)])
def test_simple_answers_among_other_solutions(name, sum_):
    problem, rng = built(name), np.random.default_rng(6)
    least = total(problem, None, problem.y_star)
    assert float(problem.y_star.sum()) == pytest.approx(sum_)
    for _ in range(200):
        other = double(sum_ * rng.dirichlet(np.full(problem.y0.numel(), 0.5)))
        if name == "shares" or float(other.max()) <= sum_:
            assert total(problem, None, other) == pytest.approx(least)
            assert float(problem.upper(other)) >= problem.upper_star
        mixed = 0.99 * problem.y_star + 0.01 * other
        assert float(problem.upper(mixed)) >= problem.upper_star


def test_minima_of_lines():
    one = torch.ones(2, dtype=torch.float64)
    kink = line_minima(lambda y: (y - 0.3).abs() + 0.5 * y.square(), -3 * one, 3 * one)
    assert kink.flatten().tolist() == pytest.approx([0.3, 0.3])
    ends = line_minima(lambda y: -y.square(), -one, 2 * one)
    assert ends.tolist() == [[-1.0, 2.0]] * 2
    tilt = torch.tensor([[0.1], [-2.0]], dtype=torch.float64)
    found = line_minima(lambda y: 0.25 * (y.square() - 1).square() + tilt * y, -3 * one, 3 * one)
    roots = [np.sort(np.roots([1, 0, -1, float(t)]).real)[[0, -1]] for t in tilt]
    assert found[0].tolist() == pytest.approx(roots[0], abs=1e-12)
    assert found[1].tolist() == pytest.approx([roots[1][-1]] * 2, abs=1e-6)
    level = separable(lambda y: (y.square() - 1).square(), lambda y: (y - tilt).square(), -3 * one, 3 * one)
    assert level.tolist() == pytest.approx([1.0, -1.0])


def test_minima_of_boxes_and_chains():
    def humps(y):
        a, b = y[:, 0], y[:, 1]
        return a**4 - 2 * a**2 + 0.5 * a * b + b**4 - b**2

    ends = torch.tensor([2.0, 1.5], dtype=torch.float64)
    rows = box_minima(humps, -ends, ends)
    lowest = best(lambda y: y[:, 0], humps, rows)
    grid = torch.cartesian_prod(*[torch.linspace(-2, 2, 401, dtype=torch.float64)] * 2)
    assert float(humps(grid).min()) >= float(humps(lowest[None])) > float(humps(grid).min()) - 1e-3
    assert float(humps(-lowest[None])) == pytest.approx(float(humps(lowest[None])))
    assert float(lowest[0]) < 0

    tilt = torch.tensor([0.3, -0.35, 0.1, -0.2], dtype=torch.float64)

    def phi(y):
        return 0.25 * (y.square() - 1).square() + tilt[:, None] * y

    def chained(y):
        return phi(y.mT).sum(0) + 0.1 * y.diff(dim=1).square().sum(1)

    signs = double(list(itertools.product((-1.0, 1.0), repeat=4)))
    expected = chained(newton(chained, signs)).min()
    assert float(chained(chain_minima(phi, 0.2, -2.5, 2.5, 4)).min()) == pytest.approx(float(expected), abs=1e-12)


def script():
    return importlib.import_module("meha_lab.tools.rugged_references")


SAMPLE = [
    "pitchfork",
    "subcritical, at the switch",
    "rank one, 2 of y",
    "indefinite, 2 of y",
    "ring",
    "3 equations, 6 unknowns",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_the_script_finds_and_confirms_the_references_again(name, capsys):
    module, record = script(), references("rugged.json")[name]
    blueprint = MAKERS[name]()
    found = module.reference(blueprint)
    assert found["x"] == pytest.approx(record["x"], abs=1e-6)
    assert found["y"] == pytest.approx(record["y"], abs=1e-5)
    said = module.confirm(name, blueprint, np.array(found["x"]), np.array(found["y"]), np.random.default_rng(2))
    assert "none lower" in said
    with pytest.raises(ArithmeticError, match="by the search and"):
        module.confirm(name, blueprint, np.array(found["x"]) + 0.05, np.array(found["y"]), np.random.default_rng(2))


@pytest.mark.parametrize("name", ["hole in a plateau", "log valley", "two zeros", "degenerate at the answer"])
def test_closed_forms_by_search(name):
    module = script()
    hyper = module.BoundedHyperObjective(MAKERS[name]())
    (value, x), *_ = module.search(hyper, np.random.default_rng(0))
    assert value == pytest.approx(built(name).upper_star, abs=1e-9)
    assert x == pytest.approx(built(name).x_star.numpy(), abs=1e-5)


def test_penalties_of_the_script():
    module, rng = script(), np.random.default_rng(7)
    x, points = double([-0.3]), double(rng.normal(size=(40, 3)) * 2)
    for name in ("SCAD, its weight", "MCP regression, 3 coefficients"):
        term = MAKERS[name]().exact.nonsmooth
        expected = [float(term.value(x, row)) for row in points]
        assert module.penalties(term, x, points).tolist() == pytest.approx(expected)
