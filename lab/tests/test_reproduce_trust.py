"""``meha reproduce trust``: what runs from many starts are judged to be, and the tables that count them."""

import re
from pathlib import Path

import pytest
import torch
from meha_lab.problems import collection
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.trust import METHODS, problem_of
from meha_lab.reproduce.page import Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.runner import run
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

import meha

ROOT = Path(__file__).parents[2]
TRUST = EXPERIMENTS["trust"]


def cells(**options):
    return TRUST.cells(Options(**options), Tuning.shipped())


def tables(store, **options):
    section = TRUST.section(Records(store, cells(**options)))
    return {block.name: block for block in section.blocks if isinstance(block, Table)}


def made_up(ends):
    common = {"setting": "", "seed": 0, "outcome": "finished", "took": 1.0, "machine": "", "torch": "", "jobs": 1}
    return {"case": "", "method": "", **common, "ends": ends}


def test_every_problem_and_every_method_that_claims_convergence_has_a_cell():
    found = {(cell.case.name, cell.name) for cell in cells()}
    names = [entry.name for entry in collection(group=None) if entry.group != "hollow"]
    assert found == {(name, "automatic") for name in names}
    assert set(METHODS) == {"automatic"}
    assert {cell.setting["starts"] for cell in cells()} == {10}
    assert not cells(methods=frozenset({"MEHA"}))


def test_other_methods_claim_nothing():
    """The others end by a rule, and say so."""
    problem = meha.problems.strong_convex(2)
    for method in (meha.contrib.AdaptiveMEHA(), meha.MEHA(), meha.BOME(), meha.RHG(), meha.F2SA(), meha.VPBGD(), meha.CG()):
        solution = meha.solve(problem, problem.x0, problem.y0, method, tol=1e-3, max_steps=3000)
        assert solution.status in (meha.Status.RULE_MET, meha.Status.MAX_STEPS), method.name
        assert not solution.converged


def test_answers_are_judged_by_x_and_by_the_lower_level(monkeypatch):
    """The solution; the lower solution at another x; a point in the wrong valley."""
    known = problem_of("tilted well")
    other = known.x_star + 0.1
    answers = [(known.x_star, known.y_star), (other, known.answer(other)), (known.x_star, -known.y_star)]
    given = iter(answers)

    def solve(problem, x0, y0, method, **options):
        assert problem.constants is None
        x, y = next(given)
        counts = type("Counts", (), {"lower": 7})
        return type("Solution", (), {"x": x, "y": y, "status": meha.Status.CONVERGED, "counts": counts})

    monkeypatch.setattr(meha, "solve", solve)
    (cell,) = [cell for cell in cells() if (cell.case.name, cell.name) == ("tilted well", "automatic")]
    cell.setting["starts"] = 3
    ends = measure(cell)["ends"]
    assert [end[:2] for end in ends] == [["converged", truth] for truth in ("right", "other x", "wrong y")]
    assert [end[4] for end in ends] == [7, 7, 7]
    assert ends[0][2] < 1e-9 < 1e-3 < ends[1][2]
    assert abs(ends[1][3]) < 1e-9 < 1e-3 < ends[2][3]


def test_starts_are_the_given_one_and_random_ones(monkeypatch):
    seen = []

    def solve(problem, x0, y0, method, **options):
        seen.append((x0.clone(), options))
        return type("S", (), {"x": x0, "y": y0, "status": meha.Status.LOCAL, "counts": type("C", (), {"lower": 1})})

    monkeypatch.setattr(meha, "solve", solve)
    for cell in cells():
        if cell.case.name == "pitchfork":
            measure(cell)
    starts = torch.stack([x for x, _ in seen])
    assert len(starts) == len(starts.unique(dim=0)) == 10
    assert torch.equal(starts[0], problem_of("pitchfork").x0)
    assert [options for _, options in seen] == [{}] * 10


def test_claims_that_are_wrong_are_counted(tmp_path):
    store = Store(tmp_path)
    right, wrong, other = (["converged", truth, 0.2, 0.1, 10] for truth in ("right", "wrong y", "other x"))
    unsure = ["local", "other x", 0.3, 0.0, 30]
    chosen = {cell.case.name: cell for cell in cells() if cell.name == "automatic"}
    store.put(chosen["tilted well"], made_up([right, right, wrong, other]))
    store.put(chosen["ripples, 20 of y"], made_up([right, unsure, unsure, unsure]))
    found = tables(store)
    rows = {row[1]: row for row in found["trust-rates"].rows}
    assert rows["rugged, y up to 3: tuning"][2:7] == [1, "50.0", "100.0", 1, 1]
    assert rows["rugged, larger y: tuning"][2:7] == [1, "25.0", "25.0", 0, 0]
    assert rows["all"][2:7] == [2, "37.5", "62.5", 1, 1]
    assert (rows["all"][7].text, rows["all"][7].kind) == ("25.00", "failed")
    assert rows["rugged, larger y: tuning"][7].kind == "best"
    assert [row[:4] for row in found["trust-wrong"].rows] == [
        ["automatic", "tilted well", "rugged, y up to 3: tuning", "other x 1, wrong y 1"]
    ]


def test_the_quick_form(tmp_path):
    store = Store(tmp_path)
    chosen = cells(quick=True, methods=frozenset({"automatic"}))
    assert len(chosen) == 3
    run(chosen, store, jobs=0)
    rows = {row[1]: row for row in tables(store, quick=True)["trust-rates"].rows}
    assert rows["all"][2:4] == [3, "100.0"]
    assert rows["all"][5:7] == [0, 0]


def test_the_documentation_has_the_rates_of_the_records():
    rows = {(row[0], row[1]): row for row in tables(Store(ROOT / "lab/records"))["trust-rates"].rows}
    lines = (ROOT / "docs/trust.md").read_text().splitlines()
    table = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines if line.startswith("| `solve` ")]
    assert table
    for _, part, *numbers in table:
        row = rows["automatic", part]
        shown = [entry.text if hasattr(entry, "text") else str(entry) for entry in row[2:8]]
        assert numbers == shown, part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ripples", "chain, 8 of y", "signs"])
def test_a_record_can_be_measured_again(name):
    for cell in cells():
        if cell.case.name == name:
            found, stored = measure(cell), Store(ROOT / "lab/records").get(cell)
            assert [end[:2] for end in found["ends"]] == [end[:2] for end in stored["ends"]]
