"""Beyond the paper: what it costs not to choose any numbers, on the collection of group_lasso, the toys and the group lasso."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from meha.method.status import Status
from meha.problems import KnownProblem, group_lasso
from meha_lab.problems import collection
from meha_lab.problems.variants import TOYS, VARIANTS
from meha_lab.reproduce.cells import Case, Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS, Setting
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records, prose, short
from meha_lab.reproduce.page import Item, Mark, Prose, Section, Table
from meha_lab.reproduce.solving import GOOD
from meha_lab.reproduce.tuning import Tuning

__all__ = ["Automatic", "ProblemRow", "problem_of", "reaches", "rows"]


POINTS, STEPS, ADAPTIVE_STEPS, LIMIT = 200, 1000, 400, 20_000

QUICK_POINTS, QUICK_STEPS = 10, 100

VERY_GOOD = 1e-5

ADAPTIVE, SINGLE = "AdaptiveMEHA", "automatic, float32"

HEADS = {"paper": "paper's numbers", "random": f"best of {POINTS}", ADAPTIVE: ADAPTIVE, "automatic": "automatic"}

COLUMNS: Mapping[str, tuple[str, Setting]] = {
    "paper": ("MEHA", {"preset": "paper", "max_steps": STEPS}),
    "recipe": ("MEHA", {"preset": "recipe", "max_steps": STEPS}),
    "random": ("MEHA", {"random": POINTS, "max_steps": STEPS}),
    ADAPTIVE: (ADAPTIVE, {"max_steps": ADAPTIVE_STEPS}),
    "automatic": ("automatic", {}),
    SINGLE: ("automatic", {}),
}
"""The contender and the setting of each column."""

FAILURES = {status.value for status in (Status.DIVERGED, Status.NON_FINITE, Status.BROKE_DOWN)}

QUICK = ("quadratic, condition 10", "one-sided", "toy: lasso, n = 2", "toy: lasso, n = 2, x times 100")


def problem_of(family: str, name: Any, variant: str = "", dtype: str = "float64") -> KnownProblem:
    """A problem of the collection, a toy, or the group lasso with ``name`` features."""
    if family == "group lasso":
        return group_lasso(name)
    make: Callable[..., KnownProblem] = TOYS[name] if family == "toys" else _entries()[name]
    return VARIANTS[variant](make(dtype=getattr(torch, dtype)))


@cache
def _entries() -> dict[str, Callable[..., KnownProblem]]:
    return {entry.name: entry.make for entry in collection()}


@dataclass(frozen=True)
class ProblemRow:
    """A row of the tables: its name, its group, the arguments of :func:`problem_of`, and its columns."""

    name: str
    group: str
    arguments: Mapping[str, Any]
    columns: tuple[str, ...]

    def cell(self, column: str, quick: bool = False) -> Cell:
        """The cell of a column."""
        name, setting = COLUMNS[column]
        if quick and "max_steps" in setting:
            setting = {**setting, "max_steps": QUICK_STEPS}
        if quick and "random" in setting:
            setting = {**setting, "random": QUICK_POINTS}
        if self.group == "group lasso" and column == "automatic":
            setting = {"gradients": LIMIT}  # it does not come to an end there
        arguments = {**self.arguments, "dtype": "float32"} if column == SINGLE else self.arguments
        case = Case(self.name, problem_of, tuple(arguments.items()), seconds=math.inf)
        return Cell("solve", case, CONTENDERS[name], setting, 0, column)


def rows() -> list[ProblemRow]:
    """All rows."""
    both = (ADAPTIVE, "automatic")
    listed = [
        ProblemRow(entry.name, entry.half, {"family": "collection", "name": entry.name}, ("paper", "random", *both))
        for entry in collection()
    ]
    for toy in TOYS:
        for variant in VARIANTS:
            columns = ("paper", *(() if variant else ("random",)), *both, SINGLE)
            arguments = {"family": "toys", "name": toy, "variant": variant}
            listed.append(ProblemRow(f"toy: {toy}{variant}", "toys", arguments, columns))
    for m in (600, 3600):
        columns = ("paper", "recipe", *(("random",) if m == 600 else ()), *both)
        listed.append(ProblemRow(f"group lasso, m = {m}", "group lasso", {"family": "group lasso", "name": m}, columns))
    return listed


class Automatic(Experiment):
    """Error and gradients of four ways to run, for each problem."""

    name = "automatic"
    title = "Without choosing any numbers"
    about = "beyond the paper: solve, AdaptiveMEHA, the best of 200 random points and the paper's numbers on 201 problems"
    in_quick = False

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells = [
            row.cell(column, options.quick)
            for row in rows()
            if not options.quick or row.name in QUICK
            for column in row.columns
        ]
        return [cell for cell in cells if options.wants(cell.contender.name)]

    def section(self, records: Records) -> Section:
        measured = [_Runs(row, records) for row in rows() if any(records.get(row.name, c, "solve") for c in row.columns)]
        groups = {
            group: [runs for runs in measured if runs.row.group == group]
            for group in ("held-out", "tuning", "toys", "group lasso")
        }
        tables = [_summary(groups), _toys(groups["toys"]), *_problems(groups), _group_lasso(groups["group lasso"])]
        shown = [table for table in tables if table.rows]
        missed = [Prose(text) for column in ("automatic", ADAPTIVE) for text in _missed(groups, column)]
        about, why = (prose(self.name, part) for part in ("about", "why"))
        return Section(self.name, self.title, [about, *shown[:1], *_random(groups), *missed, *shown[1:], why])

    def claims(self, records: Records) -> list[Claim]:
        return []


class _Runs:
    """The records of a row, by column."""

    def __init__(self, row: ProblemRow, records: Records) -> None:
        self.row = row
        self._columns = {column: next(iter(records.get(row.name, column, "solve")), None) for column in row.columns}

    def __getitem__(self, column: str) -> Record | None:
        return self._columns.get(column)


Groups = Mapping[str, Sequence[_Runs]]


def reaches(record: Record, target: float) -> bool:
    """Whether a run ended well and within the target."""
    return record["outcome"] not in FAILURES and record["error"] is not None and record["error"] <= target


def _of(runs: Iterable[_Runs], column: str) -> list[Record]:
    return [record for run in runs if (record := run[column]) is not None]


def _summary(groups: Groups) -> Table:
    """How many problems each way solves, and the median work."""
    table: list[list[Item]] = []
    halves = {"held-out": groups["held-out"], "tuning": groups["tuning"]}
    for title, runs in {**halves, "both": [*halves["held-out"], *halves["tuning"]]}.items():
        if not runs:
            continue
        for target in (GOOD, VERY_GOOD):
            counts = [sum(reaches(record, target) for record in _of(runs, column)) for column in HEADS]
            table.append([f"{title}, {len(runs)} problems: to {target:.0e}", *counts])
        medians: list[Item] = []
        for column in HEADS:
            work = [record["gradients"] for record in _of(runs, column)]
            f, F = (statistics.median([pair[i] for pair in work] or [0]) for i in (0, 1))
            medians.append(f"{f:,.0f} / {F:,.0f}" + (" for each point" if column == "random" else ""))
        table.append([f"{title}: gradients of f / F, median", *medians])
    caption = "Problems of the collection that are solved to an error of 1e-3 and of 1e-5."
    return Table("automatic-summary", caption, ["", *HEADS.values()], table)


def _random(groups: Groups) -> list[Prose]:
    searched = _of([*groups["held-out"], *groups["tuning"]], "random")
    points = sum(_points(record) for record in searched)
    if not points:
        return []
    diverged, within = (sum(record[name] for record in searched) / points for name in ("diverged", "within"))
    return [Prose(f"Of all random points {diverged:.0%} diverged, and {within:.1%} ended within {GOOD:.0e}.")]


def _points(record: Record) -> int:
    """How many points a search tried, from the text of its setting."""
    return POINTS if f"'random': {POINTS}" in record["setting"] else QUICK_POINTS


def _missed(groups: Groups, column: str) -> list[str]:
    texts = []
    for half in ("held-out", "tuning"):
        runs = [run for run in groups[half] if run[column] is not None]
        missed = [
            f"{run.row.name} ({_text(record)})" for run in runs for record in _of([run], column) if not reaches(record, GOOD)
        ]
        if runs:
            texts.append(
                f"{column} misses {GOOD:.0e} on {len(missed)} problems of the {half} half: {'; '.join(missed) or 'none'}."
            )
    return texts


def _toys(runs: Sequence[_Runs]) -> Table:
    columns = [
        "", "paper's numbers: to 1e-3", f"best of {POINTS}", "within 1e-3, diverged", f"{ADAPTIVE}: to 1e-3", "worst", "steps",
        "automatic: to 1e-5", "worst", "gradients of f", "of F", "float32: to 1e-3", "worst",
    ]  # fmt: skip
    table: list[list[Item]] = []
    for toy in TOYS:
        own = [run for run in runs if run.row.arguments["name"] == toy]
        paper, searched, adaptive, automatic, single = (_of(own, c) for c in ("paper", "random", ADAPTIVE, "automatic", SINGLE))
        if own:
            table.append(
                [
                    toy,
                    _passed(paper, GOOD),
                    *_search(searched[0] if searched else None),
                    _passed(adaptive, GOOD),
                    _worst(adaptive),
                    _range([record["steps"] for record in adaptive]),
                    _passed(automatic, VERY_GOOD),
                    _worst(automatic),
                    _range([record["gradients"][0] for record in automatic]),
                    _range([record["gradients"][1] for record in automatic]),
                    _passed(single, GOOD),
                    _worst(single),
                ]
            )
    caption = "The paper's toys, each in nine units and from three other starts."
    return Table("automatic-toys", caption, columns, table)


def _problems(groups: Groups) -> list[Table]:
    columns = ["", "paper's numbers", f"best of {POINTS}", "within 1e-3, diverged", ADAPTIVE, "f / F", "automatic", "f / F"]
    tables = []
    for half in ("held-out", "tuning"):
        table: list[list[Item]] = []
        for run in groups[half]:
            row: list[Item] = [run.row.name, _error(run["paper"]), *_search(run["random"])]
            for column in (ADAPTIVE, "automatic"):
                row += [_error(run[column]), _gradients(run[column])]
            table.append(row)
        caption = f"The {half} half of the collection: errors, and gradients of f / of F."
        tables.append(Table(f"automatic-{half}", caption, columns, table))
    return tables


def _group_lasso(runs: Sequence[_Runs]) -> Table:
    columns = ["", "", "validation", "test", "validation of the y returned", "test", "f / F", "seconds", "end"]
    titles = {**HEADS, "recipe": "recipe"}
    table: list[list[Item]] = []
    for run in runs:
        for column in run.row.columns:
            for record in _of([run], column):
                numbers = [_number(record.get(name)) for name in ("error", "test", "error of y", "test of y")]
                end = [_gradients(record), f"{record['seconds']:.1f}", record["outcome"]]
                table.append([run.row.name, titles[column], *numbers, *end])
    caption = "The group lasso: losses of the lower solution at the weights x, and of the y that is returned."
    return Table("automatic-group-lasso", caption, columns, table)


def _search(record: Record | None) -> list[Item]:
    """The best point, and how many come close and diverge."""
    return [_error(record), None if record is None else f"{record['within']}, {record['diverged']}"]


def _text(record: Record) -> str:
    if record["outcome"] in FAILURES:
        return str(record["outcome"])
    error = record["error"]
    return "none" if error is None else short(error)


def _error(record: Record | None) -> Item:
    """The error, marked where it is good; or how the run failed."""
    if record is None:
        return None
    failed = record["outcome"] in FAILURES or record["error"] is None
    kind: Any = "failed" if failed else "best" if record["error"] <= GOOD else "number"
    return Mark(_text(record), kind, None if failed else record["error"])


def _number(value: float | None) -> Item:
    return Mark("none", "failed") if value is None else Mark(f"{value:.3g}", "number", value)


def _gradients(record: Record | None) -> Item:
    return None if record is None else "{:,} / {:,}".format(*record["gradients"])


def _passed(records: Sequence[Record], target: float) -> Item:
    return f"{sum(reaches(record, target) for record in records)} of {len(records)}" if records else None


def _worst(records: Sequence[Record]) -> Item:
    def badness(record: Record) -> tuple[bool, float]:
        return record["outcome"] in FAILURES, math.inf if record["error"] is None else record["error"]

    return _error(max(records, key=badness, default=None))


def _range(numbers: Sequence[int]) -> Item:
    return f"{min(numbers):,} to {max(numbers):,}" if numbers else None
