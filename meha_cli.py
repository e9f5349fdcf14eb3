"""The command ``meha``, outside of the package so that help and errors need not wait for the import of torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f'The command meha needs {error.name}; install it with: pip install "meha[clean]"') from error

__all__ = ["app", "fail", "listing", "refuse"]

COMMANDS = "meha.commands"
"""The entry point group through which other packages, such as meha-lab, add commands."""

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
        from meha.cleaning.command import clean_file  # imports torch: seconds that --help must not wait

        result = clean_file(data, clean_fraction, trusted, label, ignore or [], out, seed, top, force, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(result, indent=2))
    except KeyboardInterrupt:
        Console().print("Interrupted; nothing was written.")
        raise typer.Exit(130) from None  # 128 + SIGINT, the shell's convention
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]  # pip installs packages, not their modules
        fail(f'meha clean needs {package}; install it with: pip install "meha[clean]"')
    except MemoryError:
        fail(f"{data}: does not fit in memory; clean a part of it.")
    except OSError as error:
        fail(str(error))
    except Exception as error:  # refusals are RefusalErrors; refuse passes defects on with their traceback
        refuse(error)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Print versions, devices and folders, for bug reports."""
    import torch

    names = ("meha", "torch", "numpy", "matplotlib", "scikit-learn", "optuna", "typer", "rich")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = {name: _version(name) for name in names}
    rows["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    cores, threads = os.cpu_count(), torch.get_num_threads()
    rows["cpu"] = f"{cores} core{'s' * (cores != 1)}, torch uses {threads} thread{'s' * (threads != 1)}"
    rows["cuda"] = ", ".join(devices) or "none"
    rows["data"] = os.environ.get("MEHA_DATA", "MEHA_DATA is not set")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(listing(list(rows.items())))


def _add_commands() -> None:
    """Add the commands of other packages; if meha-lab is missing, ``reproduce`` says how to install it."""
    commands = {command.name: command for command in entry_points(group=COMMANDS)}
    for name, command in sorted(commands.items()):
        app.command(name)(command.load())
    if "reproduce" not in commands:
        # Accept all options of the real command, so that the hint below is printed and not an error about them.
        @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def reproduce() -> None:
            """Run the paper's experiments and write a report (in the package meha-lab)."""
            fail(
                "meha reproduce is part of the package meha-lab, in the folder lab of the repository of meha; install it there"
                " with: pip install ./lab"
            )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def refuse(error: Exception) -> NoReturn:
    """Exit with the message of a RefusalError; raise other errors again, since they are defects."""
    from meha.tensors.checks import RefusalError  # imports torch, so not at the top

    if not isinstance(error, RefusalError):
        raise error
    fail(str(error))


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 2."""
    # Messages quote file names and labels, so brackets in them are no markup.
    message = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in message)
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def listing(rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of names and their descriptions."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


_add_commands()

if __name__ == "__main__":
    app()
