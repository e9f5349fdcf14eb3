"""Searches of `meha reproduce architecture-search` that are killed and repeated end bit for bit as if nothing had been."""

import os
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from meha_lab.reproduce import architecture
from meha_lab.reproduce.architecture import QUICK, ROWS
from meha_lab.reproduce.cells import Case, Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.tasks.architecture_search import ArchitectureSearch, FinalTraining, SearchSpace, architecture_search

TINY = replace(
    QUICK,
    task={"data": "digits", "channels": 4, "cells": 3, "batch": 4, "size": 32, "space": SearchSpace(nodes=1)},
    final={"epochs": 1, "channels": 2, "cells": 3, "batch": 4, "drop_path": 0.2, "cutout": True},
)

LIVES = (0.2, 0.35, 0.4)
"""Shares of all passes after which processes are killed: in the first stage, in a later one, in the final training."""


def measure(row, folder, name, dies=None):
    """Search and train with a checkpoint after each step; keep all results, and the number of passes in this process.

    Args:
        dies: the process kills itself at the beginning of this pass.
    """
    os.environ["MEHA_CACHE"] = f"{folder}/{name}-cache"
    passes, results = 0, []

    def counted(loss):
        def function(*arguments):
            nonlocal passes
            passes += 1
            if passes == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(*arguments)

        return function

    def kept(function):
        def run(*arguments, **options):
            found = function(*arguments, **options, every=1)
            results.append(found)
            return found

        return run

    for owner, losses in ((ArchitectureSearch, ("_upper", "_lower")), (FinalTraining, ("_loss",))):
        for loss in losses:
            setattr(owner, loss, counted(getattr(owner, loss)))
    for function in ("search", "train_final"):
        setattr(architecture, function, kept(getattr(architecture, function)))
    case = Case(TINY.name, architecture_search, (("protocol", TINY),), data=True)
    record = architecture.measure_architecture(Cell("architecture", case, CONTENDERS[ROWS[row].method], {"row": row}, 0, row))
    torch.save({"passes": passes, "record": record, "results": [plain(found) for found in results]}, f"{folder}/{name}")


def plain(found):
    """What a search or a training gave, without its times."""
    history = {name: values for name, values in found.history.items() if name != "seconds"}
    if hasattr(found, "network"):
        return {"y": found.network.state_dict(), "history": history, "scores": found.scores}
    counts = [found.counts.upper, found.counts.lower, found.counts.hvp]
    cells = found.genotype.to_dict()
    return {"x": found.x, "y": found.y.state_dict(), "genotype": cells, "history": history, "counts": counts}


def in_a_process(function):
    """Whether a process that calls the function comes to its end; if not, it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def kill_and_repeat(rows, folder):
    """For each row, a run as a whole, and one that is killed three times."""
    torch.set_num_threads(1)
    architecture_search(**TINY.task)
    torch.optim.SGD([torch.zeros(1)])  # what both import is then there for all processes
    for row in rows:
        place = f"{folder}/{row}"
        os.mkdir(place)
        assert in_a_process(partial(measure, row, place, "whole"))
        passes = torch.load(f"{place}/whole", weights_only=True)["passes"]
        for share in LIVES:
            assert not in_a_process(partial(measure, row, place, "broken", int(share * passes)))
            assert any(Path(place, "broken-cache").rglob("*.pt"))  # it goes on from there
        assert in_a_process(partial(measure, row, place, "broken"))


def assert_same(found, expected, where=""):
    """Bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert list(found) == list(expected), where
        for name in found:
            assert_same(found[name], expected[name], f"{where} {name}")
    elif isinstance(found, list):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where} {i}")
    elif isinstance(found, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected or (found != found and expected != expected), where


def check(rows, folder):
    code = f"from test_architecture_search_resume import kill_and_repeat; kill_and_repeat({list(rows)!r}, {str(folder)!r})"
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for row in rows:
        whole, broken = (torch.load(folder / row / name, weights_only=True) for name in ("whole", "broken"))
        for run in (whole, broken):
            assert run["record"]["final"].pop("seconds") > 0
            assert run["record"]["search"].pop("seconds") > 0
        assert_same(broken["record"], whole["record"], row)
        assert_same(broken["results"], whole["results"], row)
        assert len(whole["results"]) == 1 + (TINY.candidates if row == "Random search" else 1)
        # Each of three deaths repeats a part of one step, of at most a dozen passes.
        dead = sum(int(share * whole["passes"]) - 1 for share in LIVES)
        assert whole["passes"] <= dead + broken["passes"] <= whole["passes"] + 3 * 12, row
        for name in ("whole", "broken"):
            assert not list((folder / row / f"{name}-cache").rglob("*.pt"))


def test_killed_searches_go_on(tmp_path):
    check(["MEHA on P-DARTS"], tmp_path)


@pytest.mark.slow
def test_killed_searches_of_all_rows_go_on(tmp_path):
    check(ROWS, tmp_path)
