"""Tables of docs/estimators.md and docs/label-noise.md, from the records of python -m meha_lab.benchmarks.estimators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from meha_lab.benchmarks.estimator_data import SETS
from meha_lab.benchmarks.estimator_labels import LABELS
from meha_lab.benchmarks.estimator_records import Record
from meha_lab.benchmarks.estimator_structure import STRUCTURE
from meha_lab.paths import DOCS

SINGLE = ("RidgeCV", "LassoCV", "ElasticNetCV", "logistic ridge CV", "logistic lasso CV")
OURS = "meha.sklearn"
TPE = "TPE, 50 trials"
SEEN = 7
"""Splits up to this one were looked at when numbers of the search were chosen."""
HEAD = (
    "data",
    "ridge",
    "lasso",
    "elastic net",
    "adaptive (group) lasso",
    "TPE",
    "`meha.sklearn`",
    "against the best single weight",
    "time",
    "in `LassoCV`s",
)


class Row(NamedTuple):
    """A line of the table of errors: its cells, the error over that of the best single weight, and two ratios of times."""

    cells: list[str]
    ratio: float
    time: float
    time_of_kind: float


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def error_row(name: str, records: Sequence[Record]) -> Row:
    """The line of one data set: means over the splits, of methods that have all of them, and medians of times."""
    methods = {record["method"] for record in records}
    errors = {m: [r["error"] for r in records if r["method"] == m and r["error"] is not None] for m in methods}
    mean = {m: float(np.mean(values)) for m, values in errors.items() if len(values) == len(errors[OURS])}
    seconds = {m: np.median([r["seconds"] or np.nan for r in records if r["method"] == m]) for m in methods}
    ratio = mean[OURS] / min(mean[m] for m in SINGLE if m in mean)
    classes = "logistic ridge CV" in mean
    ridge, lasso = ("logistic ridge CV", "logistic lasso CV") if classes else ("RidgeCV", "LassoCV")
    others = [f"{mean[m]:.3f}" if m in mean else "" for m in (ridge, lasso, "ElasticNetCV", "adaptive lasso", TPE)]
    time = seconds[OURS] / seconds["LassoCV"]
    cells = [name, *others, f"**{mean[OURS]:.3f}**", f"{ratio - 1:+.1%}", f"{seconds[OURS]:.2f} s", f"{time:.1f}"]
    return Row(cells, ratio, time, seconds[OURS] / seconds[ridge if classes else lasso])


def sentence(rows: Sequence[Row]) -> str:
    """The figures that matter, in words."""
    better = sum(row.ratio <= 0.95 for row in rows)
    times, times_of_kind = (np.median([getattr(row, name) for row in rows]) for name in ("time", "time_of_kind"))
    return (
        f"Worst case {max(row.ratio for row in rows) - 1:+.1%} against the best single weight; better by 5 % or more on"
        f" {better} of {len(rows)}; median time {times:.1f} times `LassoCV`'s ({times_of_kind:.1f} times that of the method for"
        " the same kind of target)."
    )


def error_tables(records: Sequence[Record]) -> list[str]:
    """The tables of fresh splits and of those that were seen."""
    lines: list[str] = []
    for title, fresh in (("Fresh splits", True), ("Splits that were looked at", False)):
        mine = [record for record in records if (record["split"] >= SEEN) == fresh]
        known = {record["set"] for record in mine if record["method"] == OURS}
        rows = [error_row(name, [record for record in mine if record["set"] == name]) for name in SETS if name in known]
        if rows:
            lines += [f"**{title}**", "", *table(HEAD, [row.cells for row in rows]), "", sentence(rows), ""]
    return lines[:-1]


def label_table(records: Sequence[Record]) -> list[str]:
    """Area under the curve and precision of each method for each kind of wrong labels, and their means."""
    names = sorted({r["method"] for r in records}, key=lambda m: (not m.startswith("LabelCleaner"), m))

    def cell(method: str, title: str = "") -> str:
        mine = [r for r in records if r["method"] == method and title in ("", r["set"])]
        return f"{np.mean([r['auc'] for r in mine]):.3f}, {np.mean([r['precision'] for r in mine]):.3f}" if mine else ""

    measured = {r["set"] for r in records}
    rows = [[title, *(cell(name, title) for name in names)] for title in LABELS if title in measured]
    return table(["data", *names], [*rows, ["mean", *map(cell, names)]])


def structure_table(records: Sequence[Record]) -> list[str]:
    """How often many weights are taken, and the mean test error with them over that of a single weight."""
    rows = []
    for title in STRUCTURE:
        for method in sorted({r["method"] for r in records}):
            mine = [r for r in records if r["set"] == title and r["method"] == method]
            if mine:
                ratio = np.mean([r["error"] for r in mine]) / np.mean([r["single"] for r in mine])
                left = sum(r["left"] for r in mine)
                rows.append([title, f"`{method}`", f"{left} of {len(mine)}", f"{ratio - 1:+.1%}"])
    return table(["data", "method", "more than one weight", "test error against one weight"], rows)


def write(page: Path, part: str, lines: Sequence[str]) -> None:
    """Replace a part of a page."""
    begin, end = f"<!-- {part}: written by python -m meha_lab.benchmarks.estimators -->", f"<!-- end of {part} -->"
    head, rest = page.read_text().split(begin)
    page.write_text("\n".join([head + begin, *lines, end]) + rest.split(end)[1])
    print("\n".join(lines))


def draw_pages(records: Sequence[Record]) -> None:
    """Write all tables for which there are records."""
    for part, page, lines_of in (
        ("errors", "estimators.md", error_tables),
        ("labels", "label-noise.md", label_table),
        ("structure", "estimators.md", structure_table),
    ):
        mine = [record for record in records if record["part"] == part]
        if mine:
            write(DOCS / page, part, lines_of(mine))
