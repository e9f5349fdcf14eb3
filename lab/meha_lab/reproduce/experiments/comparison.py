"""Beyond the paper: every method on six problems with known answers, each with the best of its eight settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meha.problems import group_lasso, lasso, merely_convex, sine, strong_convex
from meha_lab.reproduce.cells import OWN_ENDS, Case, Cell
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Race, Records, prose, short
from meha_lab.reproduce.experiments.racing import error_at, shown
from meha_lab.reproduce.page import Block, Item, Mark, Section, Table
from meha_lab.reproduce.tuning import Tuning

__all__ = ["CASES", "KNOWN_FAILURES", "REASONS", "Comparison"]


TARGET, BUDGET, STAY = 0.05, 20_000, 2_000

QUICK_BUDGET, QUICK_CASES = 2_000, ("strong convex", "lasso")


def _case(name: str, build: Callable[..., Any], **arguments: Any) -> Case:
    """A case without a limit of time, and with settings chosen where they are reported."""
    limits: dict[str, Any] = dict(target=TARGET, work=BUDGET, stay=STAY, seconds=math.inf)
    return Case(f"comparison, {name}", build, tuple(arguments.items()), **limits, tuning_seeds=(0,))


CASES = {
    "strong convex": _case("strong convex", strong_convex, n=10),
    "merely convex": _case("merely convex", merely_convex, n=10),
    "sine, n = 1": _case("sine, n = 1", sine, n=1),
    "sine, n = 10": _case("sine, n = 10", sine, n=10),
    "lasso": _case("lasso", lasso, n=10),
    "group lasso": _case("group lasso", group_lasso, m=60, groups=6, design="orthogonal"),
}

METHODS = tuple(name for name in CONTENDERS if name not in AUTOMATIC)

SINES = ("sine, n = 1", "sine, n = 10")

FAILURES = {
    "open": {
        "merely convex": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; IGJO; GridSearch; RandomSearch; TPE",
    },
    "valley": {
        "sine, n = 1": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; BOME; SLM; IGJO; GridSearch",
        "sine, n = 10": "RHG; RHG, truncated; NS; GALET; DARTS, order 2; BOME; SLM; IGJO; GridSearch; BDA; IAPTT",
    },
    "curvature": dict.fromkeys(("merely convex", *SINES), "CG"),
    "blind": dict.fromkeys(("strong convex", "merely convex", *SINES), "DARTS, order 1"),
    "one step": {"strong convex": "DARTS, order 2"},
    "heuristic": dict.fromkeys(("strong convex", "merely convex", *SINES), "BRC"),
    "many": {"lasso": "RandomSearch", "group lasso": "GridSearch; RandomSearch; TPE"},
    "inexact": {"lasso": "VFiDCA"},
}
"""Which methods miss which group_lasso, by reason."""

KNOWN_FAILURES = {
    (row, name): reason for reason, rows in FAILURES.items() for name, listed in rows.items() for row in listed.split("; ")
}

REASONS = {
    "open": "The lower level leaves the second half of y open, and the method never moves it; x ends near 1/2.",
    "valley": "The run ends in another valley of f, near the start, or moves between valleys.",
    "curvature": "The Hessian of f in y is singular or indefinite, and the run breaks down; damping does not help.",
    "blind": "Order 1 ignores how y depends on x.",
    "one step": "One lower step shows only a part of how y depends on x, which biases the answer.",
    "heuristic": "The direction is a heuristic; the run diverges, or ends elsewhere.",
    "many": "One value for all weights is not enough, and separate values need more candidates than can be tried.",
    "inexact": "Its test ends the run with y off by 6 %: the lower level is penalised, and holds up to about 1 / beta.",
    "smooth": "The method refuses a non-smooth lower level, and says why.",
    "lasso": "The method takes penalised least squares only.",
    "unknown": "Not explained.",
}


class Comparison(Experiment):
    """Work to the target."""

    name = "comparison"
    title = "All methods on six problems with known answers"
    about = "beyond the paper: work of every method, with the best of its eight settings, on six small problems"
    in_quick = False

    def races(self, quick: bool = False) -> list[Race]:
        return [(CASES[name], METHODS) for name in (QUICK_CASES if quick else CASES)]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells: list[Cell] = []
        for case, names in self.races(options.quick):
            work = QUICK_BUDGET if options.quick else case.work
            limited = replace(case, work=work, seconds=options.limit or case.seconds)
            contenders = [CONTENDERS[name] for name in (*names, *AUTOMATIC) if options.wants(name)]
            cells += [Cell("race", limited, contender, tuning.setting(case, contender), 0) for contender in contenders]
        return cells

    def section(self, records: Records) -> Section:
        columns = [name for name, case in CASES.items() if records.methods(case.name)]
        blocks: list[Block] = [prose(self.name, "about"), *_work_table(records, columns), *_without(records, columns)]
        return Section(self.name, self.title, [*blocks, prose(self.name, "why")])

    def claims(self, records: Records) -> list[Claim]:
        return []


def _work_table(records: Records, columns: list[str]) -> list[Table]:
    """Work until solved, or the error at the end with a letter for the reason."""
    methods = [name for name in METHODS if any(records.get(CASES[column].name, name) for column in columns)]
    reasons = {(name, column): _reason(records, name, column) for name in methods for column in columns}
    letters = {reason: chr(ord("a") + i) for i, reason in enumerate(r for r in REASONS if r in reasons.values())}
    rows: list[list[Item]] = []
    for name in methods:
        row: list[Item] = [shown(name)]
        for column in columns:
            reason = reasons[name, column]
            row.append(_entry(records, name, column, f"({letters[reason]})" if reason else ""))
        rows.append(row)
    caption = (
        f"Gradients of F and f and Hessian-vector products until the relative errors of x and y are at most {100 * TARGET:g} %"
        f" for good, or the error after {BUDGET:,} of them ({QUICK_BUDGET:,} in the quick form), with a letter for the reason."
    )
    note = " ".join(f"({letter}) {REASONS[reason]}" for reason, letter in letters.items())
    return [Table("comparison", caption, ["method", *columns], rows, note)] if rows else []


def _reason(records: Records, name: str, column: str) -> str:
    """Why a method missed the target; empty where it did not, or was not measured."""
    for record in records.get(CASES[column].name, name):
        if record["outcome"].startswith("refused"):
            return "lasso" if name == "VFiDCA" else "smooth"
        if record["reached"] is None:
            return KNOWN_FAILURES.get((name, column), "unknown")
    return ""


def _entry(records: Records, name: str, column: str, letter: str) -> Item:
    for record in records.get(CASES[column].name, name):
        if record["reached"] is not None:
            return Mark(f"{record['reached']['work']:,}", "best", record["reached"]["work"])
        error = error_at(record["last"])
        text = "" if not record["last"] else f"{error:.2g} " if error is not None and error < 100 else "diverges "
        return Mark(text + letter, "failed", error)
    return None


def _without(records: Records, columns: list[str]) -> list[Table]:
    """Where the methods without settings stop."""
    rows: list[list[Item]] = []
    for name in AUTOMATIC:
        runs = [next(iter(records.get(CASES[column].name, name)), None) for column in columns]
        if not any(runs):
            continue
        row: list[Item] = [name]
        for record in runs:
            error = None if record is None else error_at(record["last"])
            if record is None or error is None:
                row.append(None)
            else:
                good = error <= TARGET and record["outcome"] in OWN_ENDS
                row.append(Mark(f"{record['last']['gradients']:,}, {short(error)}", "best" if good else "failed", error))
        rows.append(row)
    caption = "Methods without settings: gradients of F and f until the method stops, and the larger of the errors of x and y."
    return [Table("comparison-without", caption, ["method", *columns], rows)] if rows else []
