"""The terminal while experiments run, and their summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.experiments import Claim
from meha_lab.reproduce.runner import time_left
from meha_lab.store import Store

__all__ = ["Display", "print_summary"]


class Display:
    """The runs in progress, the share that is done, and an estimate of the time left."""

    def __init__(self, cells: dict[str, list[Cell]], store: Store, jobs: int) -> None:
        self.experiments = {cell.key: name for name, found in reversed(cells.items()) for cell in found}
        self.cells, self.store, self.jobs = [cell for found in cells.values() for cell in found], store, jobs
        self.total, self.done = len(store.missing(self.cells)), 0
        self.running: dict[str, tuple[Cell, float]] = {}
        self.left: float | None = None
        self.since = time.monotonic()

    def watch(self, cell: Cell, record: Record | None) -> None:
        """Note that a run begins (without a record) or ends."""
        if record is None:
            self.running[cell.key] = cell, time.monotonic()
        else:
            del self.running[cell.key]
            self.done += 1
            self.left, self.since = time_left(self.cells, self.store, self.jobs), time.monotonic()

    def __rich__(self) -> RenderableType:
        left = "" if self.left is None else f", about {_duration(max(0.0, self.left - (time.monotonic() - self.since)))} left"
        head = Table.grid(padding=(0, 1))
        head.add_row(ProgressBar(total=self.total, completed=self.done, width=40), f"{self.done} of {self.total} runs{left}")
        lines: list[RenderableType] = [head]
        for cell, begin in list(self.running.values()):
            seconds = time.monotonic() - begin
            text = f"{self.experiments[cell.key]}: {cell.case.name}, {cell.name}, seed {cell.seed}  {seconds:.0f} s"
            lines.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def print_summary(console: Console, claims: Sequence[Claim], done: int, page: Path) -> None:
    """Print the claims, the number of runs that were measured, and where the report is."""
    if claims:
        console.print(_claims(claims))
    console.print(f"{done} run{'s' if done > 1 else ''} measured." if done else "Nothing to measure.", highlight=False)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)


def _claims(claims: Sequence[Claim]) -> Table:
    table = Table(title="Claims of the paper, and what was measured", title_justify="left", box=None, pad_edge=False)
    table.add_column("claim", ratio=5)
    table.add_column("measured", ratio=6)
    table.add_column("answer", no_wrap=True)
    styles = {"holds": "green", "does not hold": "red", "in part": "yellow", "open": "yellow"}
    for claim in claims:
        table.add_row(Text(claim.claim), Text(claim.measured), Text(claim.answer, style=styles[claim.answer]))
    return table
