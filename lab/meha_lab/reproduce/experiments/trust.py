"""Beyond the paper: what "converged" is worth, from ten starts on every problem with a known answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from meha.problems import KnownProblem
from meha_lab.problems import collection
from meha_lab.problems.collection import Entry
from meha_lab.reproduce.cells import Case, Cell
from meha_lab.reproduce.contenders import CONTENDERS, Setting
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records, prose, short
from meha_lab.reproduce.page import Item, Mark, Section, Table
from meha_lab.reproduce.starts import TRUTHS
from meha_lab.reproduce.tuning import Tuning

__all__ = ["METHODS", "Trust", "problem_of"]


KIND: Literal["starts"] = "starts"
QUICK_STARTS = 2
METHODS: Mapping[str, Setting] = {"automatic": {"starts": 10}}
"""The methods that claim convergence, with the number of starts."""

LOW = 3
"""A lower level with at most this number of variables is low-dimensional."""

QUICK = ("tilted well", "one-sided", "quartic equation")


@cache
def _entries() -> dict[str, Entry]:
    return {entry.name: entry for entry in collection(group=None) if entry.group != "hollow"}  # where the answer depends on y0


def problem_of(name: str) -> KnownProblem:
    """A problem of any group of the collection."""
    return _entries()[name].make()


def _cell(name: str, method: str, quick: bool) -> Cell:
    case = Case(name, problem_of, (("name", name),), seconds=math.inf)
    setting = {**METHODS[method], "starts": QUICK_STARTS} if quick else dict(METHODS[method])
    return Cell(KIND, case, CONTENDERS[method], setting, 0, method)


@cache
def _part(name: str) -> str:
    """The part of the collection that a problem counts to."""
    entry = _entries()[name]
    if entry.group != "rugged":
        return entry.group
    return f"rugged, y up to {LOW}" if entry.make().y0.numel() <= LOW else "rugged, larger y"


class End(NamedTuple):
    """How a run ended."""

    status: str
    truth: str
    error: float | None
    gap: float | None
    gradients: int


class Trust(Experiment):
    """How often an answer is right, and how often it is wrong while the status is "converged"."""

    name = "trust"
    title = 'What "converged" is worth'
    about = "beyond the paper: ten starts on each of 194 problems; answers that are wrong while the status is converged"
    in_quick = False

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        quick = options.quick
        return [
            _cell(name, method, quick)
            for method in METHODS
            if options.wants(method)
            for name in (QUICK if quick else _entries())
        ]

    def section(self, records: Records) -> Section:
        ends = {
            method: {name: _ends(record) for name in _entries() for record in records.get(name, method, KIND)}
            for method in METHODS
        }
        tables = [_rates(ends), _wrong(ends)]
        return Section(self.name, self.title, [prose(self.name, "about"), *tables, prose(self.name, "why")])

    def claims(self, records: Records) -> list[Claim]:
        return []


Ends = Mapping[str, Mapping[str, list[End]]]


def _ends(record: Mapping[str, Any]) -> list[End]:
    return [End(*end) for end in record["ends"]]


def _rates(ends: Ends) -> Table:
    """For each method and part of the collection: how many answers are right, claimed, and claimed but wrong."""
    rows: list[list[Item]] = []
    for method, problems in ends.items():
        groups: dict[str, list[list[End]]] = {}
        for half in ("held-out", "tuning"):
            for name, ends_of_it in problems.items():
                if _entries()[name].half == half:
                    groups.setdefault(f"{_part(name)}: {half}", []).append(ends_of_it)
        groups["all"] = list(problems.values())
        for title, found in groups.items():
            runs = [end for part in found for end in part]
            if runs:
                rows.append([method, title, len(found), *_counts(runs)])
    columns = [
        "method",
        "part of the collection",
        "problems",
        "right, %",
        "converged, %",
        "wrong y",
        "other x",
        "wrong, %",
        "gradients of f, median",
    ]
    caption = 'Answers from ten starts. "Wrong y" and "other x" count the runs that say "converged" and are not right.'
    return Table("trust-rates", caption, columns, rows)


def _counts(runs: list[End]) -> list[Item]:
    right = sum(end.truth == "right" for end in runs)
    claimed = [end for end in runs if end.status == "converged"]
    wrong = [sum(end.truth == truth for end in claimed) for truth in reversed(TRUTHS[1:])]
    share = 100 * sum(wrong) / max(len(runs), 1)
    work = statistics.median(end.gradients for end in runs)
    percent: list[Item] = [f"{100 * right / len(runs):.1f}", f"{100 * len(claimed) / len(runs):.1f}"]
    return [*percent, *wrong, Mark(f"{share:.2f}", "best" if share <= 1 else "failed", share), f"{work:,.0f}"]


def _wrong(ends: Ends) -> Table:
    """The problems on which a method is wrong while it says that it converged."""
    rows: list[list[Item]] = []
    for method, problems in ends.items():
        for name, found in problems.items():
            wrong = [end for end in found if end.status == "converged" and end.truth != "right"]
            if wrong:
                kinds = ", ".join(f"{truth} {sum(end.truth == truth for end in wrong)}" for truth in TRUTHS[1:])
                errors = [end.error for end in wrong if end.error is not None]
                worst = short(max(errors)) if errors else None
                rows.append([method, name, f"{_part(name)}: {_entries()[name].half}", kinds, worst])
    caption = 'Where "converged" was wrong: the number of starts, and the largest error of x.'
    return Table("trust-wrong", caption, ["method", "problem", "part", "runs", "error of x"], rows)
