"""The commands ``meha reproduce`` and ``meha download``. The command ``meha`` finds them by their entry points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meha_cli import fail, refuse
from meha_cli import listing as listing_table

__all__ = ["download", "reproduce"]


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
        from meha_lab.reproduce.command import Asked, list_experiments, run

        rows = list_experiments() if listing else []
        if listing and as_json:
            typer.echo(json.dumps([{"name": name, "about": about} for name, about in rows], indent=2))
        elif listing:
            Console().print(listing_table(rows))
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
        fail(f"meha reproduce needs {package}; install it with: pip install ./lab")
    except OSError as error:
        fail(f"{error}; choose another folder with --out or --records.")
    except Exception as error:
        refuse(error)


def download(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Data sets to download; omit to list them.")] = None,
) -> None:
    """Download data sets into the cache ($MEHA_CACHE, or ~/.cache/meha)."""
    from meha_lab.datasets.fetch import download as fetch
    from meha_lab.datasets.sources import SOURCES, source_of

    if not names:
        Console().print(listing_table([(source.name, f"from {source.address}") for source in SOURCES.values()]))
        return
    try:
        for source in [source_of(name) for name in names]:
            typer.echo(f"{source.name}: {fetch(source.name)}")
    except (OSError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        Console().print("Interrupted. Complete files are kept.")
        raise typer.Exit(130) from None
