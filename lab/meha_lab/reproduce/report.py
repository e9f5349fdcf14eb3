"""The report: stored records as a page, and its summary for the terminal."""

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

from meha.running.loggers import write_atomically
from meha_lab.reproduce.cells import Record
from meha_lab.reproduce.contenders import CONTENDERS, SETTINGS
from meha_lab.reproduce.experiments import EXPERIMENTS, Claim, Options, Records
from meha_lab.reproduce.experiments.base import Answer, prose
from meha_lab.reproduce.page import Details, Item, Mark, Page, Prose, Section, Table, write
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

__all__ = ["draw"]


PACKAGES = ("numpy", "optuna", "cvxpy", "matplotlib")

STYLES: dict[Answer, Literal["best", "failed"]] = {"holds": "best", "does not hold": "failed"}


SOURCES = {
    "strong-convex": "Figure 4, Table 9",
    "high-dimension": "Table 10",
    "merely-convex": "Figure 1",
    "non-convex": "Table 2, Figures 2 and 5",
    "large-scale": "Table 4",
    "lasso-toy": "Table 3, Figure 6",
    "group-lasso": "Table 5",
    "sensitivity": "Tables 6 and 11",
    "rates": "Theorems 3.1 and 3.2",
    "hyper-cleaning": "Table 7, Figure 3",
    "few-shot": "Table 7",
    "architecture-search": "Tables 8 and 12",
}
"""Where the paper has what an experiment measures."""

ANSWERS: tuple[Answer, ...] = ("holds", "in part", "does not hold", "open")


def draw(
    store: Store, options: Options, tuning: Tuning, folder: Path, command: str, asked: Sequence[str], home: str = ""
) -> tuple[Path, list[Claim]]:
    """Write the page of the experiments that were asked for, and of others that are complete; its path, and its summary."""
    found = {name: Records(store, experiment.cells(options, tuning)) for name, experiment in EXPERIMENTS.items()}
    shown = {name: records for name, records in found.items() if records.count and (name in asked or not records.missing)}
    records = list({id(record): record for some in shown.values() for record in some.all()}.values())  # each once
    sections, claims = [], list[Claim]()
    for name, own in shown.items():
        section = EXPERIMENTS[name].section(own)
        if len(_machines(records)) > 1:
            section = replace(section, blocks=[*section.blocks, Prose(f"Measured on: {'; '.join(_machines(own.all()))}.")])
        made = EXPERIMENTS[name].claims(own)
        counts = tuple(sum(claim.answer == answer for claim in made) for answer in ANSWERS)
        finding = _finding(made)
        sections.append(replace(section, source=SOURCES.get(name, ""), answers=counts, finding=finding))
        claims += made
    rows: list[list[Item]] = []
    for claim in claims:
        style = STYLES.get(claim.answer)
        rows.append([claim.claim, claim.measured, Mark(claim.answer, style) if style else claim.answer])
    summary = Table("summary", "Claims of the paper, and what was measured.", ["claim", "measured", "answer"], rows)
    lead = [prose("lead", part).text for part in ("about", "meha", "automatic", "care")]
    if options.quick:
        lead.append(prose("lead", "quick").text)
    if options.limit is not None:
        lead.append(f"Here a race had at most {options.limit:g} seconds, whatever its section says.")
    left = sum(some.missing for some in shown.values())
    if left:
        lead.append(f"{left} runs have not been measured yet; meha reproduce continues with them.")
    bare = sum("curve" in record and not record["curve"] and bool(record.get("last")) for record in records)
    if bare:
        lead.append(f"The curves of {bare} runs were not kept; figures leave these runs out.")
    title = "Reproducing the MEHA paper"
    _write_runs(records, folder / "runs.csv")
    page = Page(title, lead, summary, [*sections, _protocol(options, tuning)], _facts(records, command), home)
    return write(page, folder), claims


def _finding(claims: Sequence[Claim]) -> str:
    """The first claim that does not hold, or else the first, with what was measured."""
    chosen = next((claim for claim in claims if claim.answer != "holds"), claims[0] if claims else None)
    return f"{chosen.claim}: {chosen.measured}" if chosen else ""


def _protocol(options: Options, tuning: Tuning) -> Section:
    """How it was measured, and which settings were chosen."""
    rows: list[list[Item]] = []
    for case, methods in tuning.scores.items():
        kept = {method: [seeds for seeds in scores if seeds is not None] for method, scores in methods.items()}
        if any(len(scores) < SETTINGS for scores in kept.values()):
            continue  # only the best is known
        rows.append([Mark(case, "head")])
        for method, scores in kept.items():
            best = tuning.best(case, method)
            good = sum(all(work is not None for work, _ in seeds) for seeds in scores)
            setting = ", ".join(f"{name} {value}" for name, value in CONTENDERS[method].settings()[best].items())
            work = [f"{work:,.0f}" for work, _ in scores[best] if work is not None]
            rows.append([method, setting, ", ".join(work) or Mark("not reached", "failed"), f"{good} of {len(scores)}"])
    chosen = Table(
        "settings",
        "The chosen settings: work to the target on the two seeds where they were chosen, and how many reach it on both.",
        ["method", "setting", "work", "settings that reach it"],
        rows,
        "Numbers for alpha, beta, eta and c, and steps (alpha and beta together), are multiples of those that the method takes"
        " from the problem's constants.",
    )
    points = [
        prose("protocol", part) for part in ("target", "clock", "settings", "automatic", "seeds", "work", "memory", "note")
    ]
    seeds, trained = (", ".join(map(str, some)) for some in (options.reported, options.trained))
    text = 'This page: seeds {}; learning tasks: {}. Every run is in <a href="runs.csv">runs.csv</a>.'
    reported = Prose(Markup(text).format(seeds, trained))
    return Section("protocol", "How it was measured", [*points, reported, Details("Which settings were chosen", [chosen])])


def _write_runs(records: Sequence[Record], path: Path) -> None:
    """Write a line for each run."""
    columns = ["case", "method", "seed", "setting", "outcome"]
    moments = [
        (moment, name) for moment in ("reached", "last") for name in ("seconds", "work", "gradients", "error x", "error y")
    ]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    others = ("F", "test error", "accuracy", "f1", "validation loss")
    writer.writerow([*columns, *(f"{name} ({moment})" for moment, name in moments), *others, "peak bytes", "error"])
    for record in records:
        last = record.get("last") or record.get("final") or {}
        numbers = [(record.get(moment) or {}).get(name) for moment, name in moments]
        rest = [*(last.get(name) for name in others), record.get("peak"), record.get("error")]
        writer.writerow([*(record[name] for name in columns), *numbers, *rest])
    write_atomically(path, file.getvalue())


def _facts(records: Sequence[Record], command: str) -> dict[str, str]:
    took = sum(record["took"] for record in records)
    return {
        "Command": command,
        "Measured on": "; ".join(_machines(records)),
        "Drawn with": ", ".join(f"{name} {_version(name)}" for name in ("meha", *PACKAGES))
        + f", Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        "Runs": f"{len(records)}, {took / 60:.0f} minutes in all",
    }


def _machines(records: Sequence[Record]) -> list[str]:
    """The machines of the records, and how many runs shared each."""
    found = set()
    for record in records:
        jobs = "one run at a time" if record["jobs"] == 1 else f"{record['jobs']} runs in parallel"
        machine = "a machine that was not recorded" if record["machine"] is None else record["machine"]
        found.add(machine if record["torch"] is None else f"{machine}, torch {record['torch']}, {jobs}")
    return sorted(found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
