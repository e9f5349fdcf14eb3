"""One run on a learning task as a cell: the scores of the y returned and of one trained afresh, or the references."""

from __future__ import annotations

from typing import Any

from meha.methods import Method, default_method
from meha_lab.reproduce.cells import Cell, Record, ended
from meha_lab.reproduce.learning import announce, device
from meha_lab.reproduce.learning_tasks import LearningTask

__all__ = ["REFERENCES", "measure_task"]


REFERENCES = "references"
"""The label of the cells that measure references instead of a method."""


def measure_task(cell: Cell) -> Record:
    """Run a method until it has used up its work; judge x and y by test data on the way and at the end."""
    case = cell.case
    task: LearningTask = case.build(**dict(case.arguments), seed=cell.seed, device=device())
    if cell.label == REFERENCES:
        return {"outcome": "done", "returned": None, "fresh": None, "references": task.references(), "curve": {}}
    x0, y0 = task.start()
    run = _method(cell, task, x0, y0).start(task.problem, x0, y0)
    announce(run, case.work)
    rows: list[dict[str, Any]] = []
    for batch in task.batches():
        spent = _work(run.counts) / case.work
        if run.verdict is not None or spent >= 1 or run.k == run.last:
            break
        if spent * case.looks >= len(rows):
            rows.append({"step": run.k, "work": _work(run.counts), "score": task.score(run.x, run.y)})
        run.step(batch)
    outcome = "work" if run.verdict is None else ended(run.verdict)
    curve = {name: [row[name] for row in rows] for name in ("step", "work", "score")}
    if run.verdict is not None and run.verdict.status.failed:
        return {"outcome": outcome, "returned": None, "fresh": None, "references": {}, "curve": curve}
    scores = {"returned": task.score(run.x, run.y), "fresh": task.score(run.x, task.fresh(run.x))}
    return {"outcome": outcome, **scores, "references": {}, "curve": curve}


def _work(counts: Any) -> int:
    return counts.upper + counts.lower + counts.hvp


def _method(cell: Cell, task: LearningTask, x0: Any, y0: Any) -> Method:
    kind = cell.contender.kind
    return default_method(task.problem, x0, y0, task.batches()) if kind is None else kind(**cell.setting)
