"""The report: stored results as a page, and its summary for the terminal."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from meha._files import write_atomically
from meha.reproduce.contenders import CONTENDERS
from meha.reproduce.experiments import EXPERIMENTS, Claim, Options, Results
from meha.reproduce.experiments.base import Verdict, prose
from meha.reproduce.page import Cell as Entry
from meha.reproduce.page import Details, Mark, Page, Prose, Section, Table, write
from meha.reproduce.race import Record
from meha.reproduce.store import Store
from meha.reproduce.tuning import Tuning

__all__ = ["draw"]

PACKAGES = ("numpy", "optuna", "cvxpy", "matplotlib")

STYLES: dict[Verdict, Literal["best", "failed"]] = {"holds": "best", "does not hold": "failed"}


def draw(
    store: Store, options: Options, tuning: Tuning, folder: Path, command: str, asked: Sequence[str]
) -> tuple[Path, list[Claim]]:
    """Write the page of the experiments that were asked for, and of others that are complete; its path, and its summary."""
    found = {name: Results(store, experiment.cells(options, tuning)) for name, experiment in EXPERIMENTS.items()}
    shown = {name: results for name, results in found.items() if results.count and (name in asked or not results.missing)}
    records = list({id(record): record for results in shown.values() for record in results.records()}.values())  # each once
    machines = list(dict.fromkeys(record["machine"] for record in records))
    sections, claims = [], list[Claim]()
    for name, results in shown.items():
        section = EXPERIMENTS[name].section(results)
        if len(machines) > 1:
            section = replace(section, blocks=[*section.blocks, Prose(f"Measured on: {_machines(results.records())}.")])
        sections.append(section)
        claims += EXPERIMENTS[name].claims(results)
    rows: list[list[Entry]] = []
    for claim in claims:
        style = STYLES.get(claim.verdict)
        rows.append([claim.claim, claim.measured, Mark(claim.verdict, style) if style else claim.verdict])
    summary = Table("summary", "What the paper says, and what was measured.", ["claim", "measured", "verdict"], rows)
    lead = [prose("lead", part).text for part in ("about", "meha", "automatic", "care")]
    if options.quick:
        lead.append(prose("lead", "quick").text)
    if options.limit is not None:
        lead.append(f"Here a race had at most {options.limit:g} seconds, whatever its section says.")
    left = sum(results.missing for results in shown.values())
    if left:
        lead.append(f"{left} runs are still to be measured; the same command goes on with them.")
    title = "The experiments of the MEHA paper, measured again"
    _write_runs(records, folder / "runs.csv")
    page = Page(title, lead, summary, [*sections, _protocol(options, tuning)], _facts(records, command))
    return write(page, folder), claims


def _protocol(options: Options, tuning: Tuning) -> Section:
    """How it was measured, and which settings were chosen."""
    rows: list[list[Entry]] = []
    for case, methods in tuning.results.items():
        rows.append([Mark(case, "head")])
        for method, results in methods.items():
            best = tuning.best(case, method)
            good = sum(all(work is not None for work, _ in seeds) for seeds in results)
            setting = ", ".join(f"{name} {value}" for name, value in CONTENDERS[method].settings()[best].items())
            work = [f"{work:,.0f}" for work, _ in results[best] if work is not None]
            rows.append([method, setting, ", ".join(work) or Mark("not reached", "failed"), f"{good} of {len(results)}"])
    chosen = Table(
        "settings",
        "The chosen settings: work to the target on the two seeds where they were chosen, and how many reach it on both.",
        ["method", "setting", "work", "settings that reach it"],
        rows,
        "Numbers for alpha, beta, eta and c, and steps (alpha and beta together), are multiples of what the method chooses by"
        " itself from the problem's constants.",
    )
    points = [
        prose("protocol", part) for part in ("target", "clock", "settings", "automatic", "seeds", "work", "memory", "note")
    ]
    seeds, trained = (", ".join(map(str, some)) for some in (options.reported, options.trained))
    text = 'This page: seeds {}; learning tasks: {}. Every run is in <a href="runs.csv">runs.csv</a>.'
    reported = Prose(Markup(text).format(seeds, trained))
    return Section("protocol", "How it was measured", [*points, reported, Details("Which settings were chosen", [chosen])])


def _write_runs(records: Sequence[Record], path: Path) -> None:
    """Every run in a line."""
    columns = ["case", "method", "seed", "setting", "outcome"]
    moments = [
        (moment, name) for moment in ("reached", "last") for name in ("seconds", "work", "gradients", "error x", "error y")
    ]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    others = ("F", "test error", "accuracy", "f1", "validation loss")
    writer.writerow([*columns, *(f"{name} ({moment})" for moment, name in moments), *others, "peak bytes"])
    for record in records:
        last = record.get("last") or {}
        numbers = [(record.get(moment) or {}).get(name) for moment, name in moments]
        writer.writerow(
            [*(record[name] for name in columns), *numbers, *(last.get(name) for name in others), record.get("peak")]
        )
    write_atomically(path, file.getvalue())


def _facts(records: Sequence[Record], command: str) -> dict[str, str]:
    took = sum(record["took"] for record in records)
    return {
        "Command": command,
        "Measured on": _machines(records),
        "Drawn with": ", ".join(f"{name} {_version(name)}" for name in ("meha", *PACKAGES))
        + f", Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        "Runs": f"{len(records)}, {took / 60:.0f} minutes in all",
    }


def _machines(records: Sequence[Record]) -> str:
    """Where the records come from, and how many runs shared the machine."""
    found = {f"{record['machine']}, torch {record['torch']}, {_side_by_side(record['jobs'])}" for record in records}
    return "; ".join(sorted(found))


def _side_by_side(jobs: int) -> str:
    return "one run at a time" if jobs == 1 else f"{jobs} runs side by side"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
