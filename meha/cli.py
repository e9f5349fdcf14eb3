"""The command ``meha``."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise SystemExit(f'The command meha needs {error.name}; install it with: pip install "meha[reproduce]"') from error

import meha

if TYPE_CHECKING:
    from meha.reproduce.cells import Cell
    from meha.reproduce.experiments import Claim
    from meha.reproduce.race import Record
    from meha.reproduce.store import Store

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Bilevel optimization without Hessians.")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Bilevel optimization without Hessians."""
    if version:
        typer.echo(meha.__version__)
        raise typer.Exit


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Experiments; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, two seeds, seconds instead of minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Seeds to report; 5 by default, 2 when quick.")] = None,
    methods: Annotated[str, typer.Option(help="Only these methods, separated by commas.")] = "",
    limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds for a run, instead of those of its experiment.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and report.")] = Path("out/reproduce"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; more disturb the times. Quick: all cores.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Choose the settings anew instead of using the shipped choice.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments and end.")] = False,
) -> None:
    """Run the paper's synthetic experiments and write a report.

    Finished runs are kept: the same command goes on where it was interrupted, and only draws the report when nothing is left.
    """
    console = Console()
    jobs = jobs or (os.cpu_count() or 1 if quick else 1)
    try:
        from meha.reproduce import report, tuning
        from meha.reproduce.contenders import CONTENDERS
        from meha.reproduce.experiments import EXPERIMENTS, Options
        from meha.reproduce.store import Store
    except ImportError as error:
        _fail(console, f'meha reproduce needs {error.name}; install it with: pip install "meha[reproduce]"')

    if listing:
        console.print(_listing([(experiment.name, experiment.about) for experiment in EXPERIMENTS.values()]))
        return
    asked = names or list(EXPERIMENTS)
    unknown = [name for name in asked if name not in EXPERIMENTS]
    if unknown:
        _fail(console, f"NAME: there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}.")
    spelled = {name.lower(): name for name in CONTENDERS}
    wanted = [method.strip().lower() for method in methods.split(",") if method.strip()]
    strange = [method for method in wanted if method not in spelled]
    if strange:
        _fail(console, f"--methods: there is no method {strange[0]!r}; there are {', '.join(CONTENDERS)}.")
    options = Options(quick, seeds, frozenset(spelled[method] for method in wanted), limit)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(console, f"--out: {out} cannot be made a folder ({error.strerror}); name another.")

    store = Store(out / "results")
    choice = tuning.Tuning.shipped()
    try:
        if tune:
            races = {name: EXPERIMENTS[name].races(quick) for name in asked}
            _work(console, {f"settings for {name}": tuning.cells(race) for name, race in races.items()}, store, jobs)
            choice = choice.updated(tuning.Tuning.of(store, [race for found in races.values() for race in found]))
            choice.save(out / "tuning.json")
        cells = {name: EXPERIMENTS[name].cells(options, choice) for name in asked}
        if not any(cells.values()):
            _fail(console, f"--methods: none of {methods} takes part in {', '.join(asked)}.")
        done = _work(console, cells, store, jobs)
    except KeyboardInterrupt:
        console.print("Interrupted. Finished runs are kept; the same command goes on where this one was.")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        _fail(console, str(error))
    command = shlex.join(["meha", *sys.argv[1:]])
    page, claims = report.draw(store, options, choice, out, command, asked)
    _summary(console, claims, done, page)


def _fail(console: Console, message: str) -> NoReturn:
    console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _listing(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _work(console: Console, cells: dict[str, list[Cell]], store: Store, jobs: int) -> int:
    """Measure what is missing, with a display; how many runs that were."""
    from meha.reproduce.runner import run

    display = _Display(cells, store, jobs)
    if not display.total:
        return 0
    with Live(display, console=console, refresh_per_second=2, transient=True):
        return run([cell for found in cells.values() for cell in found], store, jobs, display.watch)


class _Display:
    """What is at work: experiment, case, method, seed, how much is done and how long the rest will take."""

    def __init__(self, cells: dict[str, list[Cell]], store: Store, jobs: int) -> None:
        self.experiments = {cell.key: name for name, found in reversed(cells.items()) for cell in found}
        self.cells, self.store, self.jobs = [cell for found in cells.values() for cell in found], store, jobs
        self.total, self.done = len(store.missing(self.cells)), 0
        self.running: dict[str, tuple[Cell, float]] = {}
        self.left: float | None = None
        self.since = time.monotonic()

    def watch(self, cell: Cell, record: Record | None) -> None:
        from meha.reproduce.runner import time_left

        if record is None:
            self.running[cell.key] = cell, time.monotonic()
        else:
            del self.running[cell.key]
            self.done += 1
            self.left, self.since = time_left(self.cells, self.store, self.jobs), time.monotonic()

    def __rich__(self) -> RenderableType:
        left = "" if self.left is None else f", about {_duration(max(0.0, self.left - (time.monotonic() - self.since)))} left"
        lines: list[RenderableType] = [
            ProgressBar(total=self.total, completed=self.done, width=60),
            Text(f"{self.done} of {self.total} runs{left}"),
        ]
        for cell, begin in list(self.running.values()):
            seconds = time.monotonic() - begin
            text = f"{self.experiments[cell.key]}: {cell.case.name}, {cell.name}, seed {cell.seed}  {seconds:.0f} s"
            lines.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _summary(console: Console, claims: Sequence[Claim], done: int, page: Path) -> None:
    table = Table(title="What the paper says, and what was measured", title_justify="left", box=None, pad_edge=False)
    table.add_column("claim", ratio=5)
    table.add_column("measured", ratio=6)
    table.add_column("verdict", no_wrap=True)
    styles = {"holds": "green", "does not hold": "red", "in part": "yellow", "open": "yellow"}
    for claim in claims:
        table.add_row(Text(claim.claim), Text(claim.measured), Text(claim.verdict, style=styles[claim.verdict]))
    console.print(table)
    console.print(f"{done} runs measured." if done else "Nothing was left to measure.", highlight=False)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    app()
