"""The command ``meha``."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise SystemExit(f'The command meha needs {error.name}; install it with: pip install "meha[reproduce]"') from error

import meha

if TYPE_CHECKING:
    from meha.reproduce.cells import Cell
    from meha.reproduce.experiments import Options
    from meha.reproduce.store import Store
    from meha.reproduce.tuning import Tuning

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Bilevel optimization without Hessians.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",  # flows the lines of a paragraph together
)


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
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Number of seeds; by default 5, for learning tasks 3; with --quick 2 and 1."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Run only these methods, separated by commas.")] = "",
    limit: Annotated[float | None, typer.Option(min=0.1, help="Seconds for each run; overrides the experiments.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/reproduce"),
    records: Annotated[Path | None, typer.Option(help="Folder for the records; by default OUT/records.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel runs; more than one disturbs the times. With --quick: all cores."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Choose the settings again; the package has a choice.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Measure nothing; write the report from the records.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
) -> None:
    """Run the paper's experiments and write a report.

    Finished runs are kept. If the command is interrupted, repeat it: it continues where it stopped. When nothing is left to
    measure, it writes the report from the records.
    """
    asked = _Asked(names or [], quick, seeds, methods, limit, out, records or out / "records", jobs, tune, draw)
    try:
        if listing:
            _list_experiments()
        else:
            _reproduce(asked)
    except KeyboardInterrupt:
        Console().print("Interrupted. Finished runs are kept; repeat the command to continue.")
        raise typer.Exit(130) from None
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        _fail(f'meha reproduce needs {package}; install it with: pip install "meha[reproduce]"')
    except OSError as error:
        _fail(f"{error}; choose another folder with --out or --records.")
    except _RefusalError as error:
        _fail(str(error))


@app.command()
def clean(
    data: Annotated[Path, typer.Argument(help="NPZ file with features and labels, or CSV file with a header.")],
    clean_fraction: Annotated[
        float | None, typer.Option(help="Share of the examples, from the first on, whose labels to trust.")
    ] = None,
    trusted: Annotated[
        str | None, typer.Option(help="Array or column that marks trusted labels (1/0, true/false, yes/no).")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Array or column with the labels.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Column to ignore; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for weights.csv and suspicious.png.")] = Path("out/clean"),
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the initial network and the order of the examples.")] = 0,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=500, help="Most examples in the picture; by default 50 images or 20 rows."),
    ] = None,
) -> None:
    """Find mislabeled examples, given a few labels you trust.

    Say which labels to trust with --trusted (by default the array or column "trusted") or --clean-fraction, not both.
    Each class needs trusted examples, ideally ten or more.

    An NPZ file has the features as "features", "images", "x", "X" or "data", one row per example, and the labels (integers or
    strings) as "labels", "label" or "y". In a CSV file, all columns except the label, "trusted" and those to ignore must be
    numbers. Rows are counted from 0. All data must fit in memory.
    """
    try:
        _clean(data, clean_fraction, trusted, label, ignore or [], out, seed, top)
    except KeyboardInterrupt:
        Console().print("Interrupted; nothing was written.")
        raise typer.Exit(130) from None
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        _fail(f'meha clean needs {package}; install it with: pip install "meha[reproduce]"')
    except MemoryError:
        _fail(f"{data}: does not fit in memory; clean a part of it.")
    except (_RefusalError, OSError) as error:
        _fail(str(error))


def _clean(
    data: Path,
    clean_fraction: float | None,
    trusted: str | None,
    label: str | None,
    ignore: list[str],
    out: Path,
    seed: int,
    top: int | None,
) -> None:
    import matplotlib  # noqa: F401  to fail now if it is missing, not after the training

    from meha._files import write_atomically
    from meha.tasks import CleaningWarning
    from meha.tasks import clean as clean_examples
    from meha.tasks._cleaning_files import picture, read, table

    console = Console()
    columns = (TextColumn("Training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        examples = read(data, label=label, trusted=trusted, ignore=ignore, clean_fraction=clean_fraction)
        out.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(record=True) as caught, bar:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", CleaningWarning)
            task = bar.add_task("", total=1.0)
            cleaning = clean_examples(
                examples.features,
                examples.labels,
                examples.trusted,
                seed=seed,
                watch=lambda share: bar.update(task, completed=share),
            )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise _RefusalError(str(error)) from error
    except FileExistsError as error:
        raise _RefusalError(f"--out: {out} is not a folder; give another path.") from error
    for warning in caught:
        Console(stderr=True).print(str(warning.message), style="yellow", markup=False, highlight=False, soft_wrap=True)
    write_atomically(out / "weights.csv", table(examples.labels, cleaning))
    write_atomically(out / "suspicious.png", picture(examples, cleaning, top))

    suspicious, trusted_count = cleaning.suspicious(), int(cleaning.trusted.sum())
    unverified, classes = len(cleaning.trusted) - trusted_count, len(set(examples.labels.tolist()))
    console.print(f"{len(suspicious):,} of {unverified:,} unverified labels look wrong (weight below 0.5).", highlight=False)
    console.print(f"Trusted examples: {trusted_count:,}. Classes: {classes}.", highlight=False)
    if len(suspicious):
        worst = Table(box=None, pad_edge=False, header_style="dim")
        worst.add_column("row", justify="right")
        for head in ("given", "suggested"):
            worst.add_column(head, max_width=30, no_wrap=True)
        worst.add_column("weight", justify="right")
        for row in suspicious[:10]:
            given, better, weight = str(examples.labels[row]), str(cleaning.suggested[row]), cleaning.weights[row]
            worst.add_row(str(row), Text(given), Text(better), f"{weight:.3f}" if weight >= 0.001 else "< 0.001")
        console.print(worst)
    console.print(f"Weights: {out / 'weights.csv'}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Picture: {out / 'suspicious.png'}", soft_wrap=True, highlight=False, markup=False)


@app.command()
def download(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Data sets to download; omit to list them.")] = None,
) -> None:
    """Download data sets into the cache ($MEHA_CACHE, or ~/.cache/meha)."""
    from meha.datasets.fetch import download as fetch
    from meha.datasets.sources import SOURCES, source_of

    if not names:
        Console().print(_listing([(source.name, f"from {source.address}") for source in SOURCES.values()]))
        return
    try:
        for source in [source_of(name) for name in names]:
            typer.echo(f"{source.name}: {fetch(source.name)}")
    except (OSError, ValueError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        Console().print("Interrupted. Complete files are kept.")
        raise typer.Exit(130) from None


class _RefusalError(Exception):
    """A sentence that says why the command cannot run."""


@dataclass(frozen=True)
class _Asked:
    """The arguments of ``meha reproduce``."""

    names: list[str]
    quick: bool
    seeds: int | None
    methods: str
    limit: float | None
    out: Path
    records: Path
    jobs: int | None
    tune: bool
    draw: bool

    @property
    def workers(self) -> int:
        """The number of parallel runs."""
        return self.jobs or (os.cpu_count() or 1 if self.quick else 1)


def _list_experiments() -> None:
    from meha.reproduce.experiments import EXPERIMENTS

    rest = " (with --quick only when named)"
    rows = [(each.name, each.about + ("" if each.in_quick else rest)) for each in EXPERIMENTS.values()]
    Console().print(_listing(rows))


def _reproduce(asked: _Asked) -> None:
    from meha.reproduce import report
    from meha.reproduce.display import print_summary
    from meha.reproduce.experiments import EXPERIMENTS
    from meha.reproduce.store import Store

    console = Console()
    names = asked.names or [name for name, each in EXPERIMENTS.items() if each.in_quick or not asked.quick]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise _RefusalError(f"NAME: there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}.")
    options, store = _options(asked), Store(asked.records)
    choice = _choice(console, asked, names, options, store)
    cells = {name: EXPERIMENTS[name].cells(options, choice) for name in names}
    if not any(cells.values()):
        raise _RefusalError(f"--methods: none of {asked.methods} takes part in {', '.join(names)}.")
    if asked.draw:
        done = 0
        if not any(store.get(cell) for found in cells.values() for cell in found):
            raise _RefusalError(f"--draw: {asked.records} has no records of {', '.join(names)} with these options.")
    else:
        done = _work(console, _possible(console, asked, cells, options, store), store, asked.workers)
    command = shlex.join(["meha", *sys.argv[1:]])
    page, claims = report.draw(store, options, choice, asked.out, command, names)
    print_summary(console, claims, done, page)


def _options(asked: _Asked) -> Options:
    from meha.reproduce.contenders import CONTENDERS
    from meha.reproduce.experiments import Options

    spelled = {name.lower(): name for name in CONTENDERS}
    wanted = [method.strip().lower() for method in asked.methods.split(",") if method.strip()]
    strange = [method for method in wanted if method not in spelled]
    if strange:
        raise _RefusalError(f"--methods: there is no method {strange[0]!r}; there are {', '.join(CONTENDERS)}.")
    return Options(asked.quick, asked.seeds, frozenset(spelled[method] for method in wanted), asked.limit)


def _choice(console: Console, asked: _Asked, names: Sequence[str], options: Options, store: Store) -> Tuning:
    """The settings: chosen now, chosen earlier in the same folder, or shipped."""
    from meha.reproduce.experiments import EXPERIMENTS
    from meha.reproduce.tuning import Tuning

    choice = Tuning.shipped()
    if asked.tune and not asked.draw:
        cells = {name: EXPERIMENTS[name].trials(options, choice) for name in names}
        possible = _possible(console, asked, cells, options, store)
        _work(console, {f"settings for {name}": found for name, found in possible.items()}, store, asked.workers)
        for name in possible:
            choice = choice.updated(EXPERIMENTS[name].chosen(options, choice, store))
        choice.save(asked.out)
    elif (asked.out / "tuning.json").exists():
        try:
            choice = Tuning.load(asked.out)
        except ValueError as error:
            raise _RefusalError(str(error)) from error
        console.print(f"Using the settings of {asked.out / 'tuning.json'}.", highlight=False)
    return choice


def _possible(
    console: Console, asked: _Asked, cells: dict[str, list[Cell]], options: Options, store: Store
) -> dict[str, list[Cell]]:
    """The experiments that can be measured here; refuse one that was named and cannot."""
    from meha.reproduce.experiments import EXPERIMENTS

    possible = {}
    for name, found in cells.items():
        reason = EXPERIMENTS[name].lacks(options) if store.missing(found) else ""
        if reason and asked.names:
            raise _RefusalError(f"{name}: {reason}")
        if reason:
            console.print(f"Without {name}: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        else:
            possible[name] = found
    return possible


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _listing(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _work(console: Console, cells: dict[str, list[Cell]], store: Store, jobs: int) -> int:
    """Measure the missing cells, with a display; returns the number of runs."""
    from meha.datasets import DataError
    from meha.reproduce.display import Display
    from meha.reproduce.runner import WorkerDiedError, run

    display = Display(cells, store, jobs)
    if not display.total:
        return 0
    _check_extras(cells)
    store.folder.mkdir(parents=True, exist_ok=True)
    with Live(display, console=console, refresh_per_second=2, transient=True):
        try:
            return run([cell for found in cells.values() for cell in found], store, jobs, display.watch)
        except (WorkerDiedError, DataError) as error:
            raise _RefusalError(str(error)) from error


def _check_extras(cells: dict[str, list[Cell]]) -> None:
    """Refuse at the start, and not after an hour, if a package is missing."""
    flat = [cell for found in cells.values() for cell in found]
    kinds, data = {cell.contender.kind for cell in flat}, {dict(cell.case.arguments).get("data") for cell in flat}
    needs = [("optuna", meha.TPE in kinds), ("cvxpy", meha.VFiDCA in kinds)]
    for package, needed in [*needs, ("sklearn", "digits" in data), ("PIL", "omniglot" in data)]:
        if needed and find_spec(package) is None:
            raise ImportError(f"{package} is missing", name=package)


if __name__ == "__main__":
    app()
