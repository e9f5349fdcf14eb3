"""The tables of docs/automatic.md: the random search is MEHA's, cases are what they are called, numbers are the stored ones."""

import json
import sys
from pathlib import Path

import pytest
import torch

import meha
from meha.problems import collection, lasso, sine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import automatic  # noqa: E402
from batched import run_rows  # noqa: E402

CASES = automatic.cases()
RESULTS = json.loads(automatic.RESULTS.read_text())


def setting(name, dtype=torch.float64):
    return CASES[name].build(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "quadratic, condition 10",
        "softmax, weight per class",  # y is a matrix
        "coreset, 15 examples",  # X is a simplex
        "circle",  # Y is a ball
        "tolls for revenue",
        "elastic net",
        "lasso, one weight, log",  # one weight for all of y
        "lasso, weight per feature",
        "group lasso, 4 groups",
        "dictionary, 2 atoms",  # a g that x does not change
    ],
)
def test_a_row_of_the_search_is_a_run_of_meha(name):
    problem, x0, y0, _, _ = setting(name)
    numbers = automatic.draw(name, 4)
    numbers = {key: 0.01 * value if key in ("alpha", "beta", "eta") else value for key, value in numbers.items()}
    numbers["beta"][3] = numbers["eta"][3] = 1e9  # which goes too far
    X, Y = run_rows(problem, x0, y0, numbers, 15)
    for i in range(4):
        run = meha.MEHA(**{key: float(value[i]) for key, value in numbers.items()}).start(problem, x0, y0)
        for _ in range(15):
            run.step()
        away = float(torch.hypot(run.x.norm(), run.y.norm()))
        if i < 3 or away < 1e8:
            assert not torch.equal(run.x, x0)
            torch.testing.assert_close(X[i], run.x, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(Y[i], run.y, rtol=1e-7, atol=1e-9)
        else:
            assert X[i].isnan().all()
            assert Y[i].isnan().all()


def test_the_search_refuses_what_it_does_not_know():
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: (x * y).sum(), nonsmooth=meha.nonsmooth.MCP())
    with pytest.raises(TypeError, match="MCP"):
        run_rows(problem, torch.ones(1), torch.ones(1), automatic.draw("any", 2), 1)


def test_the_search_returns_its_best_point():
    case = setting("toy: strong convex, n = 10")
    common = {"alpha": 1.5, "beta": 0.8, "eta": 0.8, "gamma": 10.0, "p": 0.1}
    values = [1.0, 33.3, 5.0, 1e-3]  # the last one diverges
    numbers = {name: torch.tensor([value] * 4, dtype=torch.float64) for name, value in common.items()}
    found = automatic.search(case, {**numbers, "c": torch.tensor(values, dtype=torch.float64)}, 100)
    errors = {}
    for c in values[:3]:
        run = meha.MEHA(**common, c=c).start(case.problem, case.x0, case.y0)
        for _ in range(100):
            run.step()
        errors[c] = float((run.x - 0.5).norm() / 0.5 / 10**0.5)
    best = min(errors, key=errors.get)
    assert found["point"] == {**common, "c": best}
    assert found["error"] == pytest.approx(errors[best], rel=1e-2)
    assert (found["diverged"], found["within"], found["gradients"]) == (1, 0, [400, 200])


def test_points_are_spread_over_their_ranges():
    numbers = automatic.draw("any", 2000)
    assert all(not torch.equal(value, automatic.draw("other", 2000)[name]) for name, value in numbers.items())
    for name, (low, high) in {**automatic.RANGES, "p": (0.0, 0.5)}.items():
        value, middle = numbers[name], (low + high) / 2 if name == "p" else (low * high) ** 0.5
        assert low <= float(value.min()) <= float(value.max()) <= high
        assert float((value < middle).double().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("toy", ["sine, n = 10", "lasso, n = 2"])
@pytest.mark.parametrize(("what", "unit"), [("x", 0.01), ("y", 100.0), ("F", 100.0), ("f", 0.01)])
def test_other_units_are_the_same_problem(toy, what, unit):
    known = sine(10) if "sine" in toy else lasso(2)
    x, y, F, f = (unit if what == name else 1.0 for name in "xyFf")
    problem, x0, y0, _, judge = setting(f"toy: {toy}, {what} times {unit:g}")
    assert judge(x * known.x_star, y * known.y_star)["error"] == pytest.approx(0.0, abs=1e-12)
    assert judge(x0, y0)["error"] == pytest.approx(known.error(known.x0, known.y0))
    at, z = known.x0 + 0.3, known.y0 + 0.7
    assert float(problem.upper(x * at, y * z)) == pytest.approx(F * float(known.upper(at, z)))
    phi = float(known.lower(at, z) + known.g.value(at, z))
    assert float(problem.lower(x * at, y * z) + problem.g.value(x * at, y * z)) == pytest.approx(f * phi)
    if known.x_set is not None:
        assert torch.allclose(problem.x_set.project(x * (at + 1)), x * known.x_set.project(at + 1))


def test_all_problems_and_variants_are_there():
    assert {entry.name for entry in collection()} <= set(CASES)
    assert sum(case.group == "toys" for case in CASES.values()) == 10 * (1 + 8 + 3)
    assert all(setting(f"toy: sine, n = 1{variant}").problem.constants is None for variant in automatic.VARIANTS)
    for name, case in CASES.items():
        assert set(RESULTS[name]) == set(case.columns), name


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("toy: merely convex, n = 10", "paper"),
        ("toy: sine, n = 100, x times 100", "solve"),
        ("toy: lasso, n = 100, start 2", "solve"),
        ("toy: sine, n = 1, f times 0.01", "MEHA()"),
        ("toy: strong convex, n = 100", "float32"),
        ("bilinear", "solve"),
    ],
)
def test_cells_can_be_measured_again(name, column):
    found, stored = automatic.measure(name, column), RESULTS[name][column]
    assert found["end"] == stored["end"]
    assert found["gradients"] == pytest.approx(stored["gradients"], rel=0.25)
    for target in (automatic.GOOD, automatic.VERY_GOOD):
        assert automatic.reaches(found, 2 * target) or not automatic.reaches(stored, target)


def test_the_tables_in_the_documentation_are_the_ones_that_were_measured():
    text = automatic.PAGE.read_text()
    assert text == automatic.page(RESULTS, text), "run: python benchmarks/automatic.py --part none"
