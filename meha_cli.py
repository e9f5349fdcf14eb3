"""The command ``meha``. It lies beside the package, so that help and errors do not wait for torch to be imported."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f'The command meha needs {error.name}; install it with: pip install "meha[reproduce]"') from error

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Bilevel optimization for PyTorch.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",  # flows the lines of a paragraph together
)


@app.callback(invoke_without_command=True)
def main(shown: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Bilevel optimization for PyTorch."""
    if shown:
        typer.echo(_version("meha"))
        raise typer.Exit


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Experiments; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases and two seeds: a few minutes for all.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's whole protocol of architecture search: days of GPU.")
    ] = False,
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
        typer.Option(min=1, help="Parallel runs. Timings are reliable only with 1 (the default; all cores with --quick)."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Choose the settings again; the package has a choice.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Measure nothing; write the report from the records.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list, or the claims, as JSON.")] = False,
    home: Annotated[str, typer.Option(help="Address of a page to which the report links.", hidden=True)] = "",
) -> None:
    """Run the paper's experiments and write a report.

    Finished runs are kept. If the command is interrupted, repeat it: it continues where it stopped. When nothing is left to
    measure, it writes the report from the records.
    """
    try:
        from meha.reproduce.command import Asked, list_experiments, run

        rows = list_experiments() if listing else []
        if listing and as_json:
            typer.echo(json.dumps([{"name": name, "about": about} for name, about in rows], indent=2))
        elif listing:
            Console().print(_listing(rows))
        else:
            asked = Asked(
                names or [], quick, seeds, methods, limit, out, records or out / "records", jobs, tune, draw, full, home
            )
            found = run(asked, quiet=as_json)
            if as_json:
                typer.echo(json.dumps(found, indent=2))
    except KeyboardInterrupt:
        Console().print("Interrupted. Finished runs are kept; repeat the command to continue.")
        raise typer.Exit(130) from None
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        _fail(f'meha reproduce needs {package}; install it with: pip install "meha[reproduce]"')
    except OSError as error:
        _fail(f"{error}; choose another folder with --out or --records.")
    except Exception as error:
        _refuse(error)


@app.command()
def clean(
    data: Annotated[Path, typer.Argument(help="NPZ file with features and labels, or CSV or Parquet table.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite weights.csv and suspicious.png in OUT.")] = False,
) -> None:
    """Find mislabeled examples, given a few labels you trust.

    Say which labels to trust with --trusted (by default the array or column "trusted") or --clean-fraction, not both.
    Each class needs trusted examples, ideally ten or more.

    An NPZ file has the features as "features", "images", "x", "X" or "data", one row per example, and the labels (integers or
    strings) as "labels", "label" or "y". In a table, all columns except the label, "trusted" and those to ignore must be
    numbers. Rows are counted from 0. All data must fit in memory.

    Labels that stand for a missing one (empty, NA, null, ?) are refused. In weights.csv, labels that a spreadsheet would take
    for a formula begin with an apostrophe.
    """
    try:
        from meha.tasks._command import clean_file

        found = clean_file(data, clean_fraction, trusted, label, ignore or [], out, seed, top, force, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
    except KeyboardInterrupt:
        Console().print("Interrupted; nothing was written.")
        raise typer.Exit(130) from None
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        _fail(f'meha clean needs {package}; install it with: pip install "meha[reproduce]"')
    except MemoryError:
        _fail(f"{data}: does not fit in memory; clean a part of it.")
    except OSError as error:
        _fail(str(error))
    except Exception as error:
        _refuse(error)


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


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Print versions, devices and folders, for bug reports."""
    import torch

    from meha.datasets.sources import cache_folder

    names = ("meha", "torch", "numpy", "matplotlib", "scikit-learn", "optuna", "cvxpy", "typer", "rich")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = {name: _version(name) for name in names}
    rows["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    rows["cpu"] = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    rows["cuda"] = ", ".join(devices) or "none"
    rows["data"] = os.environ.get("MEHA_DATA", "MEHA_DATA is not set")
    rows["cache"] = str(cache_folder())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(_listing(list(rows.items())))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _refuse(error: Exception) -> NoReturn:
    """End with the message of a refusal; other errors are defects, and are passed on."""
    from meha._checks import RefusalError

    if not isinstance(error, RefusalError):
        raise error
    _fail(str(error))


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


if __name__ == "__main__":
    app()
