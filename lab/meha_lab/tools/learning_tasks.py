"""The table of docs/automatic.md on learning tasks, which python -m meha_lab.benchmarks --draw draws from the records."""

from __future__ import annotations

import math

from meha_lab import pages
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.base import mean_of
from meha_lab.reproduce.learning_tasks import TASKS
from meha_lab.reproduce.task_runs import REFERENCES
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

OTHERS = ("F2SA", "VPBGD", "RHG")


def table(store: Store) -> list[str]:
    """Mean scores of what counts for each task, by method; the references of a user without a bilevel method first."""
    cells = EXPERIMENTS["learning-tasks"].cells(Options(), Tuning.shipped())
    records = Records(store, cells)
    lines = pages.markdown(["task", "reference", "default", "4 times the work", *OTHERS], [])
    for split in ("tuning", "held out"):
        lines.append(f"| **{split}** | | | | | | |")
        for name, task in TASKS.items():
            if task.split != split:
                continue
            found = [record["references"] for record in records.get(name, REFERENCES, "task")]
            words = ", ".join(f"{key} {mean_of([r[key] for r in found])[0]:.1f}" for key in (found[0] if found else ()))
            runs = [(name, "automatic"), (f"{name}, longer", "automatic"), *((name, other) for other in OTHERS)]
            scores = [[record[task.judged] for record in records.get(case, method, "task")] for case, method in runs]
            lines.append(f"| {name} | {words} | " + " | ".join(map(shown, scores)) + " |")
    return lines


def shown(scores: list[float | None]) -> str:
    if not scores:
        return ""
    mean = mean_of(scores)[0]
    return "failed" if math.isnan(mean) else f"{mean:.1f}"


TABLES: pages.Tables = {"learning tasks": ("automatic.md", table)}
