"""The declared learning tasks, and their experiment: tasks are whole, cells are what they say, tables show the records."""

import dataclasses

import meha_lab.reproduce.learning_tasks
import pytest
import torch
from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.learning_tasks import OTHERS, LearningTasks
from meha_lab.reproduce.learning_tasks import TASKS, noisy_labels
from meha_lab.reproduce.page import Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.runner import run
from meha_lab.reproduce.task_runs import REFERENCES
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

import meha
from meha.tensors.variables import Variable

QUICK = Options(quick=True)
SMALL = [name for name, task in TASKS.items() if task.arguments.get("data", "generated") in ("digits", "generated")]


def cells(name, **changes):
    found = [cell for cell in LearningTasks().cells(QUICK, Tuning.shipped()) if cell.case.name == name]
    return [dataclasses.replace(cell, case=dataclasses.replace(cell.case, **changes)) for cell in found]


def test_half_of_at_least_twelve_tasks_is_held_out():
    splits = [task.split for task in TASKS.values()]
    assert len(splits) >= 12
    assert splits.count("tuning") == splits.count("held out") == len(splits) / 2


@pytest.mark.parametrize("name", SMALL)
def test_a_task_is_whole(name):
    """Objectives are finite scalars that depend on what they should, starts repeat, and fresh scores can be had."""
    task = TASKS[name].make(seed=3)
    (x, y), (again, _) = task.start(), task.start()
    batch = next(iter(task.batches()))
    run = meha.StochasticMEHA().start(task.problem, x, y)
    for _ in range(2):
        info = run.step(batch)
    assert all(torch.isfinite(torch.tensor(info[key])) for key in ("upper", "lower", "gap"))
    assert task.judged == TASKS[name].judged
    first, second = (list(Variable(value, "x").leaves) for value in (again, task.start()[0]))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_levels_see_different_data_and_labels_are_wrong_as_often_as_stated():
    task = noisy_labels("digits", clean=200, noisy=1000, network=False, fraction=0.4, seed=0)
    alike = noisy_labels("digits", clean=200, noisy=1000, network=False, fraction=0.0, seed=0)
    x, y = task.start()
    batch = {"noisy": torch.arange(1000), "clean": torch.arange(200)}
    trained = meha_lab.reproduce.learning_tasks._train(lambda net, b: alike.problem.lower(x, net, b), y, 300, [batch] * 300)
    with torch.no_grad():
        noisy, clean = (float(one.problem.lower(x, trained, batch)) for one in (task, alike))
        other = float(task.problem.upper(x, trained, batch))
    assert clean < 0.05
    assert noisy > 10 * clean
    assert clean < other < 0.5 * noisy


def test_a_cell_is_a_run_of_its_own():
    (cell,) = [cell for cell in cells("operations, digits", work=60) if cell.name == "automatic"]
    record = measure(cell)
    task = TASKS["operations, digits"].make(seed=0)
    run = meha.stochastic.NetworkSOBA().start(task.problem, *task.start())
    run.last = 22  # 16 steps of three gradients, and six of two
    for _, batch in zip(range(22), task.batches(), strict=False):
        run.step(batch)
    assert record["outcome"] == "work"
    assert record["returned"] == pytest.approx(task.score(run.x, run.y), abs=0.2)
    assert record["curve"]["step"][0] == 0
    assert max(record["curve"]["work"]) < 60


def test_references_have_a_cell_of_their_own():
    (cell,) = [cell for cell in cells("operations, digits") if cell.name == REFERENCES]
    record = measure(cell)
    assert list(record["references"]) == ["even shares", "best single operation"]
    assert record["references"]["even shares"] > 20


def test_a_failed_run_has_no_score():
    case = cells("operations, digits", work=60)[0].case
    record = measure(Cell("task", case, CONTENDERS["F2SA"], {"alpha": 1e30, "beta": 1e30, "eta": 1e30}, 0))
    assert record["outcome"] == "non-finite"
    assert record["returned"] is None


def test_the_page_shows_scores_and_judges_them(tmp_path):
    store, wanted = Store(tmp_path), cells("operations, digits", work=60)
    wanted += cells("operations, digits, longer", work=120)
    run(wanted, store, jobs=0)
    results = Records(store, wanted)
    section = EXPERIMENTS["learning-tasks"].section(results)
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    (row,) = table.rows
    assert row[:2] == ["operations, digits", "fresh"]
    assert len(row) == len(table.columns) == 6 + len(OTHERS)
    claims = EXPERIMENTS["learning-tasks"].claims(results)
    assert [claim.answer in ("holds", "does not hold") for claim in claims] == [True] * 3
