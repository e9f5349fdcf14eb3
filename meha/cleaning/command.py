"""The command ``meha clean``: it reads a file, and writes weights, a picture and a summary."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from meha.cleaning.memory import check_memory, check_outputs, printable
from meha.cleaning.network import CleaningWarning
from meha.cleaning.network import clean as clean_examples
from meha.running.loggers import write_atomically
from meha.tensors.checks import RefusalError


def clean_file(
    data: Path,
    clean_fraction: float | None,
    trusted: str | None,
    label: str | None,
    ignore: list[str],
    out: Path,
    seed: int,
    top: int | None,
    force: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Find wrong labels in a file, write and (unless quiet) print the result, and return it.

    Training uses one thread: its matrices are small, and threads that wait for each other take far longer on a busy machine.

    Args:
        force: whether files of an earlier run may be overwritten; the others are the options of the command.
    """
    import matplotlib  # noqa: F401  to fail now if it is missing, not after the training

    from meha.cleaning.files import picture, read, table

    console, threads = Console(quiet=quiet), torch.get_num_threads()
    torch.set_num_threads(1)
    columns = (TextColumn("Training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    outputs = [out / "weights.csv", out / "suspicious.png"]
    try:
        check_outputs(data, outputs, force=force)  # what can be refused is refused before the training
        check_memory(data)
        examples = read(data, label=label, trusted=trusted, ignore=ignore, clean_fraction=clean_fraction)
        out.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(record=True) as caught, bar:
            warnings.simplefilter("ignore")  # only those about the data are printed below
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
        raise RefusalError(printable(str(error))) from error
    except FileExistsError as error:  # by mkdir
        raise RefusalError(f"--out: {out} is not a folder; give another path.") from error
    finally:
        torch.set_num_threads(threads)  # callers in the same process keep their threads
    plain: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    # Labels come from the file: they must not act as markup or escape sequences of the terminal.
    for warning in caught:
        Console(stderr=True).print(printable(str(warning.message)), style="yellow", **plain)
    write_atomically(outputs[0], table(examples.labels, cleaning))
    write_atomically(outputs[1], picture(examples, cleaning, top))

    rows: list[dict[str, Any]] = [
        {
            "row": int(row),
            "given": str(examples.labels[row]),
            "suggested": str(cleaning.suggested[row]),
            "weight": float(cleaning.weights[row]),
        }
        for row in cleaning.suspicious()
    ]
    trusted_count, classes = int(cleaning.trusted.sum()), len(set(examples.labels.tolist()))
    unverified = len(cleaning.trusted) - trusted_count
    console.print(f"{len(rows):,} of {unverified:,} unverified labels look wrong (weight below 0.5).", highlight=False)
    console.print(f"Trusted examples: {trusted_count:,}. Classes: {classes}.", highlight=False)
    if rows:
        worst = Table(box=None, pad_edge=False, header_style="dim")
        worst.add_column("row", justify="right")
        for head in ("given", "suggested"):
            worst.add_column(head, max_width=30, no_wrap=True)
        worst.add_column("weight", justify="right")
        for example in rows[:10]:
            names, weight = (Text(printable(example[head])) for head in ("given", "suggested")), example["weight"]
            worst.add_row(str(example["row"]), *names, f"{weight:.3f}" if weight >= 0.001 else "< 0.001")
        console.print(worst)
    console.print(f"Weights: {outputs[0]}\nPicture: {outputs[1]}", **plain)
    found = {"unverified": unverified, "trusted": trusted_count, "classes": classes, "suspicious": rows}
    return found | {"weights": str(outputs[0]), "picture": str(outputs[1])}
