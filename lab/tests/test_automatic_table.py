"""The experiment "automatic": the random search is MEHA's, cases are what they are called, records can be measured again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from meha_lab.problems import collection
from meha_lab.problems.variants import VARIANTS
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.automatic import ADAPTIVE, SINGLE, VERY_GOOD, reaches, rows
from meha_lab.reproduce.page import Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.rows import run_rows
from meha_lab.reproduce.runner import run
from meha_lab.reproduce.solving import GOOD, RANGES, draw, judged, search
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

import meha
from meha.problems import lasso, sine

ROOT = Path(__file__).parents[2]
ROWS, STORE = {row.name: row for row in rows()}, Store(ROOT / "lab/records")


def problem_of(name):
    return replace(ROWS[name].cell("paper").case.problem(0), constants=None)


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
    problem = problem_of(name)
    x0, y0 = problem.x0, problem.y0
    numbers = draw(name, 4)
    numbers = {key: 0.01 * value if key in ("alpha", "beta", "eta") else value for key, value in numbers.items()}
    numbers["beta"][3] = numbers["eta"][3] = 1e9  # which goes too far
    X, Y = run_rows(problem, x0, y0, numbers, 15)
    for i in range(4):
        run = meha.MEHA(**{key: float(value[i]) for key, value in numbers.items()}).start(problem, x0, y0)
        while run.verdict is None and run.k < 15:
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
        run_rows(problem, torch.ones(1), torch.ones(1), draw("any", 2), 1)


def test_the_search_returns_its_best_point():
    problem = problem_of("toy: strong convex, n = 10")
    common = {"alpha": 1.5, "beta": 0.8, "eta": 0.8, "gamma": 10.0, "p": 0.1}
    values = [1.0, 33.3, 5.0, 1e-3]  # the last one diverges
    numbers = {name: torch.tensor([value] * 4, dtype=torch.float64) for name, value in common.items()}
    found = search(problem, {**numbers, "c": torch.tensor(values, dtype=torch.float64)}, 100)
    errors = {}
    for c in values[:3]:
        run = meha.MEHA(**common, c=c).start(problem, problem.x0, problem.y0)
        for _ in range(100):
            run.step()
        errors[c] = float((run.x - 0.5).norm() / 0.5 / 10**0.5)
    best = min(errors, key=errors.get)
    assert found["point"] == {**common, "c": best}
    assert found["error"] == pytest.approx(errors[best], rel=1e-2)
    assert (found["diverged"], found["within"], found["gradients"]) == (1, 0, [400, 200])


def test_points_are_spread_over_their_ranges():
    numbers = draw("any", 2000)
    assert all(not torch.equal(value, draw("other", 2000)[name]) for name, value in numbers.items())
    for name, (low, high) in {**RANGES, "p": (0.0, 0.5)}.items():
        value, middle = numbers[name], (low + high) / 2 if name == "p" else (low * high) ** 0.5
        assert low <= float(value.min()) <= float(value.max()) <= high
        assert float((value < middle).double().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("toy", ["sine, n = 10", "lasso, n = 2"])
@pytest.mark.parametrize(("what", "unit"), [("x", 0.01), ("y", 100.0), ("F", 100.0), ("f", 0.01)])
def test_other_units_are_the_same_problem(toy, what, unit):
    known = sine(10) if "sine" in toy else lasso(2)
    x, y, F, f = (unit if what == name else 1.0 for name in "xyFf")
    problem = problem_of(f"toy: {toy}, {what} times {unit:g}")
    assert judged(problem, x * known.x_star, y * known.y_star)["error"] == pytest.approx(0.0, abs=1e-12)
    assert judged(problem, problem.x0, problem.y0)["error"] == pytest.approx(known.distance(known.x0, known.y0).x, rel=1e-2)
    at, z = known.x0 + 0.3, known.y0 + 0.7
    assert float(problem.upper(x * at, y * z)) == pytest.approx(F * float(known.upper(at, z)))
    phi = float(known.lower(at, z) + known.g.value(at, z))
    assert float(problem.lower(x * at, y * z) + problem.g.value(x * at, y * z)) == pytest.approx(f * phi)
    if known.x_set is not None:
        assert torch.allclose(problem.x_set.project(x * (at + 1)), x * known.x_set.project(at + 1))


def test_all_problems_and_variants_are_there_and_recorded():
    assert {entry.name for entry in collection()} <= set(ROWS)
    assert sum(row.group == "toys" for row in ROWS.values()) == 10 * (1 + 8 + 3)
    assert all(problem_of(f"toy: sine, n = 1{variant}").constants is None for variant in VARIANTS)
    for row in ROWS.values():
        for column in row.columns:
            assert STORE.get(row.cell(column)) is not None, (row.name, column)


def test_the_group_lasso_is_judged_by_its_weights():
    problem = meha.problems.group_lasso(30, 3)
    good, bad = (judged(problem, torch.full_like(problem.x0, weight), problem.y0) for weight in (0.1, 1e6))
    assert good["error"] < bad["error"]
    assert bad["error"] == pytest.approx(float(problem.upper(problem.x0, 0 * problem.y0)), rel=1e-2)  # the lower solution is 0
    assert good["error of y"] == bad["error of y"]  # whatever the weights are


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("toy: merely convex, n = 10", "paper"),
        ("toy: sine, n = 100, x times 100", "automatic"),
        ("toy: lasso, n = 100, start 2", "automatic"),
        ("toy: sine, n = 1, f times 0.01", ADAPTIVE),
        ("toy: strong convex, n = 100", SINGLE),
        ("bilinear", "automatic"),
    ],
)
def test_records_can_be_measured_again(name, column):
    cell = ROWS[name].cell(column)
    found, stored = measure(cell), STORE.get(cell)
    assert found["outcome"] == stored["outcome"]
    assert found["gradients"] == pytest.approx(stored["gradients"], rel=0.25)
    for target in (GOOD, VERY_GOOD):
        assert reaches(found, 2 * target) or not reaches(stored, target)


def tables(store, options):
    experiment = EXPERIMENTS["automatic"]
    section = experiment.section(Records(store, experiment.cells(options, Tuning.shipped())))
    return {block.name: block for block in section.blocks if isinstance(block, Table)}


def test_the_tables_and_what_the_documentation_says_about_them():
    found = tables(STORE, Options())
    assert list(found) == [f"automatic-{name}" for name in ("summary", "toys", "held-out", "tuning", "group-lasso")]
    counts = {row[0]: row[1:] for row in found["automatic-summary"].rows}
    solved = [counts[f"both, 79 problems: to {target}"] for target in ("1e-03", "1e-05")]
    text = " ".join((ROOT / "docs/automatic.md").read_text().split())
    pattern = r"Of the 79 problems, `solve` reaches 1e-3 on (\d+) and 1e-5 on (\d+), `AdaptiveMEHA` on (\d+) and (\d+)"
    numbers = [int(number) for number in re.search(pattern, text).groups()]
    assert numbers == [solved[0][3], solved[1][3], solved[0][2], solved[1][2]]
    assert len(found["automatic-held-out"].rows) == 44
    assert len(found["automatic-toys"].rows) == 10
    (row,) = [row for row in found["automatic-tuning"].rows if row[0] == "quadratic, condition 10"]
    texts = [entry if isinstance(entry, str) else entry.text for entry in row[1:]]
    assert texts == ["diverged", "7e-02", "0, 125", "1e-05", "139 / 78", "5e-08", "144 / 45"]


def test_the_quick_form(tmp_path):
    options, store = Options(quick=True), Store(tmp_path)
    run(EXPERIMENTS["automatic"].cells(options, Tuning.shipped()), store, jobs=0)
    found = tables(store, options)
    assert list(found) == [f"automatic-{name}" for name in ("summary", "toys", "held-out", "tuning")]
    (toy,) = found["automatic-toys"].rows
    assert (toy[0], toy[7]) == ("lasso, n = 2", "2 of 2")
