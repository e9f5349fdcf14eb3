"""Run cells in worker processes, keep each record at once, and estimate the time left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import torch

from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.race import measure
from meha_lab.store import Store

__all__ = ["Watcher", "WorkerDiedError", "run", "time_left"]


Watcher = Callable[[Cell, Record | None], None]
"""Called with a cell when it begins (None) and when it ends (its record)."""


class WorkerDiedError(RuntimeError):
    """A worker process died; the message names the runs in progress."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        at_work = "; ".join(f"{cell.case.name}, {cell.name}, seed {cell.seed}" for cell in cells)
        super().__init__(
            f"A worker process died: it ran out of memory, or was killed. In progress: {at_work}. Finished runs are kept;"
            " repeat the command to continue. Use --methods to leave out a method that needs too much memory."
        )


def run(cells: Iterable[Cell], store: Store, jobs: int = 1, watch: Watcher = lambda cell, record: None) -> int:
    """Measure the cells that have no record yet, in their order, and keep each record at once; returns their number.

    Args:
        jobs: number of worker processes, each with one thread; 0 to work in this process.
        watch: called when a cell begins and when it ends.

    An interrupt loses only the runs in progress; the same call continues with the rest.
    """
    todo = store.missing(cells)
    for cell, record in _inline(todo, watch) if jobs == 0 else _pool(todo, jobs, watch):
        store.put(cell, {**record, "jobs": max(jobs, 1)})
        watch(cell, record)
    return len(todo)


def _inline(cells: Sequence[Cell], watch: Watcher) -> Iterator[tuple[Cell, Record]]:
    for cell in cells:
        watch(cell, None)
        yield cell, measure(cell)


def _pool(cells: Sequence[Cell], jobs: int, watch: Watcher) -> Iterator[tuple[Cell, Record]]:
    """Hand out cells one by one, so that the display knows which run, and none is queued at an interrupt."""
    if not cells:
        return
    waiting, running = list(reversed(cells)), dict[Future[Record], Cell]()
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the workers when they load their libraries
    pool = ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop()
                watch(cell, None)
                with _interrupts_held_back():
                    running[pool.submit(measure, cell)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                try:
                    record = future.result()
                except BrokenProcessPool as error:
                    raise WorkerDiedError([cell, *running.values()]) from error
                yield cell, record
    finally:
        for process in list((pool._processes or {}).values()):
            if running:
                process.terminate()  # what it works on would be thrown away
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold back Ctrl-C; worker processes that start meanwhile never see one, and leave it to this process."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def time_left(cells: Sequence[Cell], store: Store, jobs: int) -> float | None:
    """Estimate the seconds for the missing cells from finished ones of the same method and case, else method, else any."""
    took: dict[object, list[float]] = defaultdict(list)
    for cell in cells:
        record = store.get(cell)
        if record is not None:
            for like in ((cell.case.name, cell.name), cell.name, None):
                took[like].append(record["took"])
    if not took:
        return None
    total = 0.0
    for cell in store.missing(cells):
        known = next(took[like] for like in ((cell.case.name, cell.name), cell.name, None) if like in took)
        total += sum(known) / len(known)
    return total / max(jobs, 1)
