"""What `solve` keeps in memory, in small; ``python benchmarks/solve_memory.py`` measures it."""

import gc
import tracemalloc

import pytest
import torch
from meha_lab.benchmarks.solve_memory import CASES, MEHA, size
from meha_lab.reproduce.memory import peak

import meha
from meha.running.observers import Recorder

COPIES = {
    "`StochasticMEHA`": 11,
    "`StochasticMEHA(warm_start=True)`": 10,
    "`MEHA`": 5,
    "`MEHA()`, which chooses its numbers": 6,
    "`F2SA()`, which chooses its numbers": 6,
    "`MEHA`, Adam for y": 8,
}
"""Of y, besides y itself, as docs/runs.md says."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_y(name):
    call = CASES[name](40_000)
    assert peak(lambda: meha.solve(**call)) / size(call["y0"]) == pytest.approx(COPIES[name], abs=0.3)


@pytest.mark.filterwarnings("ignore")
def test_the_default_does_not_keep_more_of_a_large_y():
    """Its pairs are bounded: the larger y, the fewer copies."""
    small, large = (
        peak(lambda call=call: meha.solve(**call)) / size(call["y0"])
        for call in map(CASES["the default, smooth f"], (300, 30_000))
    )
    assert large < max(small, 800)


def kept(recorder, steps):
    """Bytes that are still there after a run."""
    problem, start = meha.problems.strong_convex(n=2), torch.zeros(2, dtype=torch.float64)
    meha.solve(problem, start, start, MEHA, max_steps=5, tol=None)
    gc.collect()
    tracemalloc.start()
    try:
        solution = meha.solve(problem, start, start, MEHA, max_steps=steps, tol=None, callbacks=recorder)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(solution.history["step"])
    finally:
        tracemalloc.stop()


def test_a_long_run_grows_by_its_history_alone():
    """About 500 bytes for each row of the history, and nothing for a step that is not recorded."""
    short, rows = kept(Recorder(), 100)
    long, more = kept(Recorder(), 1100)
    assert more - rows == 1000
    assert 100 < (long - short) / 1000 < 1000
    short, _ = kept(Recorder(every=10_000), 100)
    long, _ = kept(Recorder(every=10_000), 1100)
    assert (long - short) / 1000 < 20
