"""Every method on every problem with a known answer: it solves it, refuses it, or is listed with the reason why it cannot."""

import json
import sys
from pathlib import Path

import pytest

import meha
from meha.reproduce.contenders import CONTENDERS, SETTINGS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import comparison  # noqa: E402

RESULTS = json.loads(comparison.RESULTS.read_text())
TUNED = {row: contender for row, contender in CONTENDERS.items() if not contender.automatic}
CELLS = [pytest.param(row, problem, id=f"{row} on {problem}") for row in TUNED for problem in comparison.PROBLEMS]


def check(row, problem, budget):
    expected = RESULTS[row][problem]
    found = comparison.attempt(row, problem, expected["setting"], budget)
    if "refused" in expected:
        assert "refused" in found, found
        assert found["refused"].startswith(expected["refused"].split(":")[0] + ":")
        return
    assert "refused" not in found, found
    if expected["work"] is None:
        assert found["work"] is None, found
        reason = comparison.KNOWN_FAILURES[row, problem]  # not solved, and no reason given?
        if budget == comparison.BUDGET and reason in ("open", "one step", "inexact"):  # where it ends is known
            assert found["error"] == pytest.approx(expected["error"], rel=0.1)
    else:
        assert found["work"] == pytest.approx(expected["work"], rel=0.25), found
        assert found["error"] <= comparison.TARGET


@pytest.mark.parametrize(("row", "problem"), CELLS)
def test_the_best_setting_does_what_the_table_says(row, problem):
    """Failures are given a tenth of the budget here, and all of it in the slow test."""
    solved = RESULTS[row][problem].get("work") is not None
    check(row, problem, comparison.BUDGET if solved else comparison.BUDGET // 10)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "problem"), [cell for cell in CELLS if comparison.KNOWN_FAILURES.get(tuple(cell.values))])
def test_known_failures_use_the_whole_budget(row, problem):
    check(row, problem, comparison.BUDGET)


def test_every_method_has_a_row_and_eight_settings():
    methods = {contender.kind for contender in CONTENDERS.values()}
    offered = {value for value in vars(meha).values() if isinstance(value, type) and issubclass(value, meha.Method)}
    assert methods == offered - {meha.Method, meha.StochasticMEHA}  # which is for networks and batches
    for row, contender in TUNED.items():
        assert len({str(setting) for setting in contender.settings()}) == SETTINGS, row


def test_the_table_in_the_documentation_is_the_one_that_was_measured():
    text = comparison.PAGE.read_text()
    assert text == comparison.page(RESULTS, text), "run: python benchmarks/comparison.py --table"
    failures = {(row, name) for row, cells in RESULTS.items() for name, cell in cells.items() if cell.get("work", 0) is None}
    assert failures == set(comparison.KNOWN_FAILURES)
    assert set(comparison.KNOWN_FAILURES.values()) <= set(comparison.REASONS)


def test_meha_solves_all():
    assert all(cell.get("work") for cell in RESULTS["MEHA"].values())
