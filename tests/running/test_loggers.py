"""Loggers: what is in their files is what the steps gave, once each, also after a resume."""

import csv
import math
import sys

import pytest
import torch

import meha
from meha.running.loggers import CSVLogger, TensorBoardLogger


def call(**options):
    problem = meha.problems.merely_convex(4)
    method = meha.MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49)
    return meha.solve(problem, problem.x0, problem.y0, method, **{"tol": None, **options})


def by_hand(logger, steps, run=None):
    problem = meha.problems.merely_convex(4)
    run = run or meha.MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49).start(problem, problem.x0, problem.y0)
    for _ in range(steps):
        logger(run, run.step())
    return run


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_csv_holds_the_history(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    with CSVLogger(path, every=3) as logger:
        solution = call(max_steps=10, callbacks=logger)
    rows = table(path)
    assert [row["step"] for row in rows] == ["3", "6", "9"]
    assert set(rows[0]) == set(solution.history) - {"seconds"}
    for name in rows[0]:
        assert [float(row[name]) for row in rows] == [solution.history[name][k - 1] for k in (3, 6, 9)], name
    assert rows[0]["gradients_lower"] == "12"


def test_csv_by_hand_is_readable_after_each_step(tmp_path):
    path = tmp_path / "run.csv"
    logger = CSVLogger(path)
    run = by_hand(logger, 2)
    assert [row["step"] for row in table(path)] == ["1", "2"]
    logger.close()
    by_hand(logger, 1, run)
    assert [row["step"] for row in table(path)] == ["1", "2", "3"]
    by_hand(logger, 1)  # a new run
    assert [row["step"] for row in table(path)] == ["1"]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_broken_run_is_logged_as_an_unbroken_one(kind, tmp_path):
    """Broken off at step 8 with a checkpoint at 5, in the middle of a row."""

    def die(run, info):
        if info.step == 8:
            raise SystemExit

    read = table if kind is CSVLogger else curves
    whole, broken, file = tmp_path / "whole", tmp_path / "broken", tmp_path / "run.pt"
    with kind(whole) as logger:
        call(max_steps=12, callbacks=logger)
    with kind(broken) as logger, pytest.raises(SystemExit):
        call(max_steps=12, callbacks=[logger, die], checkpoint=meha.Checkpoint(file, every=5))
    if kind is CSVLogger:
        assert len(table(broken)) == 8
        with broken.open("a") as half:
            half.write("9,0.12")
    for _ in range(2):  # the second call has nothing left to do
        with kind(broken) as logger:
            call(max_steps=12, callbacks=logger, checkpoint=meha.Checkpoint(file, every=5))
        assert read(broken) == read(whole)


def test_columns_that_appear_later(tmp_path):
    path = tmp_path / "run.csv"
    run = by_hand(lambda run, info: None, 1)
    with CSVLogger(path) as logger:
        logger(run, meha.StepInfo(1, {"upper": 1.0}))
        logger(run, meha.StepInfo(2, {"upper": 2.0, "error": math.nan}))
        logger(run, meha.StepInfo(3, {"error": 0.1}))
    rows = table(path)
    assert [(row["step"], row["upper"], row["error"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "2.0", "nan"),
        ("3", "", "0.1"),
    ]
    with CSVLogger(path) as logger:
        logger(run, meha.StepInfo(3, {"other": 5.0}))
    rows = table(path)
    assert [(row["step"], row["error"], row["other"]) for row in rows] == [("1", "", ""), ("2", "nan", ""), ("3", "", "5.0")]


def test_csv_does_not_overwrite_other_files(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match=r"path: .*notes.csv was not written by CSVLogger and would be overwritten; give"):
        call(max_steps=3, callbacks=CSVLogger(path))
    assert path.read_text() == "my notes\n"


def test_tensorboard_holds_the_history(tmp_path):
    with TensorBoardLogger(tmp_path, every=2) as logger:
        solution = call(max_steps=5, callbacks=logger)
    found = curves(tmp_path)
    assert set(found) == set(solution.history) - {"seconds", "step"}
    for name, points in found.items():
        expected = [(k, torch.tensor(solution.history[name][k - 1], dtype=torch.float32).item()) for k in (2, 4)]
        assert points == expected, name


def test_tensorboard_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match=r'TensorBoardLogger needs tensorboard; install it with: pip install "meha\[tensorboard\]"'
    ):
        TensorBoardLogger(tmp_path)


def test_wrong_every(tmp_path):
    for kind in (CSVLogger, TensorBoardLogger):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: every: must be a whole number of at least 1, got 0"):
            kind(tmp_path, every=0)


def test_numbers_of_earlier_callbacks_are_logged(tmp_path):
    problem = meha.problems.strong_convex(2)
    path = tmp_path / "log.csv"
    callbacks = [lambda run, info: {"accuracy": 0.25 * run.k}, CSVLogger(path)]
    meha.solve(problem, problem.x0, problem.y0, problem.preset("theory"), max_steps=3, callbacks=callbacks)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == [0.25, 0.5, 0.75]
