"""Every method on every problem with a known answer: it solves it, refuses it, or is listed with the reason why it cannot."""

from dataclasses import replace

import pytest
from meha_lab import baselines
from meha_lab.paths import RECORDS
from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS, SETTINGS
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.comparison import BUDGET, CASES, KNOWN_FAILURES, METHODS, REASONS, TARGET
from meha_lab.reproduce.experiments.racing import error_at
from meha_lab.reproduce.page import Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.runner import run
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

import meha

SHIPPED, STORE = Tuning.shipped(), Store(RECORDS)
CELLS = {(cell.name, cell.case.name): cell for cell in EXPERIMENTS["comparison"].cells(Options(), SHIPPED)}
RUNS = [pytest.param(row, problem, id=f"{row} on {problem}") for row in METHODS for problem in CASES]


def cell_of(row: str, problem: str) -> Cell:
    return CELLS[row, CASES[problem].name]


def check(row, problem, budget):
    cell = cell_of(row, problem)
    expected, found = STORE.get(cell), measure(replace(cell, case=replace(cell.case, work=budget)))
    if expected["outcome"].startswith("refused"):
        assert found["outcome"] == expected["outcome"]
        return
    assert not found["outcome"].startswith("refused"), found["outcome"]
    if expected["reached"] is None:
        assert found["reached"] is None
        reason = KNOWN_FAILURES[row, problem]  # not solved, and no reason given?
        if budget == BUDGET and reason in ("open", "one step", "inexact"):  # where it ends is known
            assert error_at(found["last"]) == pytest.approx(error_at(expected["last"]), rel=0.1)
    else:
        # A few units more or less where the lower solver stops at another rounding error.
        assert found["reached"]["work"] == pytest.approx(expected["reached"]["work"], rel=0.25, abs=4)
        assert error_at(found["last"]) <= TARGET


@pytest.mark.parametrize(("row", "problem"), RUNS)
def test_the_best_setting_does_what_the_table_says(row, problem):
    """Failures are given a tenth of the budget here, and all of it in the slow test."""
    solved = STORE.get(cell_of(row, problem))["reached"] is not None
    check(row, problem, BUDGET if solved else BUDGET // 10)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "problem"), [values for values in RUNS if KNOWN_FAILURES.get(tuple(values.values))])
def test_known_failures_use_the_whole_budget(row, problem):
    check(row, problem, BUDGET)


def test_every_method_has_a_row_and_eight_settings():
    methods = {contender.kind for contender in CONTENDERS.values() if contender.kind is not None}
    named = [*vars(meha).values(), *vars(meha.contrib).values(), *vars(baselines).values()]
    offered = {value for value in named if isinstance(value, type) and issubclass(value, meha.Method)}
    automatic = {meha.Default, meha.ImplicitNewton, meha.PenaltyContinuation, meha.ActiveSets, meha.StochasticMEHA}  # one row
    coupled = {meha.LVHBA, meha.BiCGAFFA}  # for problems that the comparison does not have
    assert methods == offered - {meha.Method} - automatic - coupled
    for row in METHODS:
        assert len({str(setting) for setting in CONTENDERS[row].settings()}) == SETTINGS, row


def test_every_run_is_recorded_and_every_failure_is_explained():
    records = {key: STORE.get(cell) for key, cell in CELLS.items()}
    assert None not in records.values()
    failures = {
        (row, problem)
        for row in METHODS
        for problem, case in CASES.items()
        if records[row, case.name]["reached"] is None and not records[row, case.name]["outcome"].startswith("refused")
    }
    assert failures == set(KNOWN_FAILURES)
    assert set(KNOWN_FAILURES.values()) <= set(REASONS)
    assert all(records["MEHA", case.name]["reached"] for case in CASES.values())
    for row in METHODS:  # the records are those of the chosen settings
        for case in CASES.values():
            work, _ = SHIPPED.scores[case.name][row][SHIPPED.best(case.name, row)][0]
            reached = records[row, case.name]["reached"]
            assert (reached and reached["work"]) == (work and pytest.approx(work, rel=0.05))


def test_the_table():
    section = EXPERIMENTS["comparison"].section(Records(STORE, CELLS.values()))
    work, without = (block for block in section.blocks if isinstance(block, Table))
    rows = {row[0]: row[1:] for row in work.rows}
    assert list(rows)[:2] == ["MEHA", "RHG"]
    assert [entry.text for entry in rows["CG"][:3]] == ["12", "0.79 (c)", "1.8 (c)"]
    assert [entry.kind for entry in rows["CG"][:3]] == ["best", "failed", "failed"]
    assert [entry.text for entry in rows["RHG"][4:]] == ["(i)", "(i)"]
    assert "(i) The method refuses a non-smooth lower level" in work.note
    assert "unknown" not in work.note
    assert [row[0] for row in without.rows] == list(AUTOMATIC)
    assert all(entry.kind == "best" for row in without.rows for entry in row[1:])


def test_the_quick_form(tmp_path):
    options, store = Options(quick=True, methods=frozenset({"MEHA", "CG", "automatic"})), Store(tmp_path)
    cells = EXPERIMENTS["comparison"].cells(options, SHIPPED)
    assert {cell.case.name for cell in cells} == {CASES[name].name for name in ("strong convex", "lasso")}
    run(cells, store, jobs=0)
    work, without = (
        block for block in EXPERIMENTS["comparison"].section(Records(store, cells)).blocks if isinstance(block, Table)
    )
    assert [row[0] for row in work.rows] == ["MEHA", "CG"]
    assert [entry.text for entry in work.rows[1][1:]] == ["12", "(a)"]
    assert [row[0] for row in without.rows] == ["automatic"]
