"""The group lasso: test errors and time of six methods, and which reading of its text the paper's numbers fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS, Setting
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.base import (
    Answer,
    Claim,
    Experiment,
    Options,
    Records,
    Spread,
    holds,
    mean_of,
    plus_minus,
    prose,
    spread,
)
from meha_lab.reproduce.experiments.cases import GROUP_LASSO, GROUP_LASSO_READING, GROUP_LASSO_READINGS
from meha_lab.reproduce.experiments.racing import OWN, picture, shown, times
from meha_lab.reproduce.figures import Curve, Panel
from meha_lab.reproduce.page import Item, Mark, Section, Table
from meha_lab.reproduce.tuning import Tuning

__all__ = ["GroupLasso"]


CANDIDATES = 100
"""What a search may try."""

PUBLISHED: Mapping[str, Setting] = {
    "GridSearch": {"shared": True, "points": CANDIDATES, "lower_tol": 1e-6, "quadratic": True},
    "RandomSearch": {"shared": False, "trials": CANDIDATES, "lower_tol": 1e-6, "quadratic": True},
    "TPE": {"shared": False, "trials": CANDIDATES, "lower_tol": 1e-6, "quadratic": True},
    "IGJO": {"lower_tol": 1e-6},
    "VFiDCA": {},
    "MEHA": {"preset": "recipe"},
    "AdaptiveMEHA": {},
    "automatic": {},
}

SEARCHES = ("GridSearch", "RandomSearch", "TPE")

SEARCH_SECONDS = 1800.0
"""Time for a search, enough for all its candidates."""

READING = "MEHA, start 0, stop at 0.2 %"
"""MEHA with the start and the end that fit the paper's numbers."""

READING_SEEDS = 10
"""Data sets on which readings are compared: with five, their own noise is larger than what tells them apart."""


class GroupLasso(Experiment):
    """Test errors and time."""

    name = "group-lasso"
    title = "Group lasso: one weight for each group of features"
    about = "test error and time of six methods for m = 600, 1200, 2400, 3600 features, on data of five seeds"

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells = []
        seeds = options.reported[:1] if options.quick and options.seeds is None else options.reported
        recipe = PUBLISHED["MEHA"]
        for m, case in [(600, GROUP_LASSO[600])] if options.quick else list(GROUP_LASSO.items()):
            for name, setting in PUBLISHED.items():
                for seed in seeds if options.wants(name) else ():
                    drawn = {**setting, "seed": seed} if name in ("RandomSearch", "TPE") else setting
                    allowed = replace(case, seconds=SEARCH_SECONDS) if name in SEARCHES else case
                    cells.append(Cell("race", options.adapt(allowed), CONTENDERS[name], drawn, seed))
            if options.wants("MEHA"):
                reading = options.adapt(GROUP_LASSO_READING[m])
                cells += [Cell("race", reading, CONTENDERS["MEHA"], recipe, seed, READING) for seed in seeds]
            if options.wants("MEHA") and not options.quick:
                cells += [
                    Cell("race", variant, CONTENDERS["MEHA"], recipe, seed, _reading(*which))
                    for which, variant in GROUP_LASSO_READINGS[m].items()
                    for seed in range(READING_SEEDS)
                ]
        return cells

    def section(self, results: Records) -> Section:
        cases = [(m, case.name) for m, case in GROUP_LASSO.items() if results.methods(case.name)]
        panels = [
            Panel(
                f"m = {m}",
                "seconds",
                "validation error",
                [Curve(shown(method), [_course(r) for r in results.get(case, method)]) for method in results.methods(case)],
                logy=False,
            )
            for m, case in cases
        ]
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                *[self._table(results, case, m) for m, case in cases],
                *self._readings(results),
                prose(self.name, "readings"),
                picture(
                    "group-lasso",
                    "Least validation error so far of a method's weights, with the lower level solved at these weights outside"
                    " of the clock: median and 20–80 % band over data sets.",
                    "Panels of validation error against time, one line for each method.",
                    panels,
                ),
                prose(self.name, "errors"),
                prose(self.name, "automatic"),
                prose(self.name, "why"),
            ],
        )

    def _table(self, results: Records, case: str, m: int) -> Table:
        methods = results.methods(case)
        errors = {method: mean_of([r["last"]["test error"] for r in results.get(case, method)]) for method in methods}
        best = min(errors, key=lambda method: errors[method][0])
        rows: list[list[Item]] = []
        for method in methods:
            records, theirs = results.get(case, method), paper.GROUP_LASSO[m].get("MEHA" if method == READING else method)
            looks = [_best(record) for record in records if record["at weights"]]
            speed = None if method == "MEHA" else _speed(results, case, method)
            rows.append(
                [
                    shown(method),
                    plus_minus(errors[method], "best" if method == best else "number"),
                    plus_minus(mean_of([look["F"] for look in looks])),
                    plus_minus(mean_of([look["test error"] for look in looks])),
                    _took(records),
                    None if speed is None else _factor(speed),
                    None if theirs is None else Mark(f"{theirs[0]} ± {theirs[1]} ({theirs[2]} s)", "paper", theirs[0]),
                ]
            )
        columns = ["method", "test error of y", "weights: validation error", "weights: test error", "seconds (steps)"]
        null = mean_of([r["last"]["null error"] for r in results.get(case, best)])[0]
        return Table(
            f"group-lasso-{m}",
            f"Group lasso, m = {m}: errors (mean ± standard deviation over data sets) and time.",
            [*columns, "MEHA is faster by", "paper: test error (time)"],
            rows,
            f"y = 0 has test error {null:.1f}. Weights: those of the least validation error along the run, with the lower level"
            " solved at them. Steps: candidates for the searches. MEHA is faster by: seconds until the method's best"
            " weights, over those until MEHA's were as good by validation.",
        )

    def _readings(self, results: Records) -> list[Table]:
        """What the paper may have done, beside its numbers: the mean test error, and its distance from the paper's."""
        rows: list[list[Item]] = []
        for which in next(iter(GROUP_LASSO_READINGS.values())):
            for column, whose in (("test error", "y"), ("test error of theta", "theta")):
                row: list[Item] = [*_reading(*which).split(", "), whose]
                distances = []
                for m, variants in GROUP_LASSO_READINGS.items():
                    errors = [r["last"][column] for r in results.get(variants[which].name, _reading(*which))]
                    row.append(plus_minus(mean_of(errors)) if errors else None)
                    if errors:
                        distances.append(_distance(errors, paper.GROUP_LASSO[m]["MEHA"]))
                if distances:
                    rows.append([*row, Mark(f"{max(distances):.1f}", "number", max(distances))])
        if not rows:
            return []
        theirs = [paper.GROUP_LASSO[m]["MEHA"] for m in GROUP_LASSO]
        printed = [Mark(f"{mean} ± {deviation}", "paper", mean) for mean, deviation, _, _ in theirs]
        return [
            Table(
                "group-lasso-readings",
                "What the paper may have done: test error by start, end, and whose error it is.",
                ["start", "end", "error of", *[f"m = {m}" for m in GROUP_LASSO], "largest distance"],
                [*rows, ["paper", "", "", *printed, None]],
                f"Mean ± standard deviation over {READING_SEEDS} data sets. Distance from the paper's mean over five, in"
                " standard errors of the difference.",
            )
        ]

    def claims(self, results: Records) -> list[Claim]:
        claims = []
        for m, case in GROUP_LASSO.items():
            records = results.get(case.name, "MEHA")
            others = [n for n in results.methods(case.name) if n not in (*OWN, READING)]
            if not records:
                continue
            mean = mean_of([r["last"]["test error"] for r in records])[0]
            theirs, heading = paper.GROUP_LASSO[m]["MEHA"], f"Group lasso, m = {m}: "
            which = (0.0, "change of 0.2 %")
            read = [r["last"]["test error"] for r in results.get(GROUP_LASSO_READINGS[m][which].name, _reading(*which))] or [
                r["last"]["test error"] for r in results.get(case.name, READING)
            ]
            if read:
                inside: Answer = holds(_distance(read, theirs) <= TELLING) if len(read) >= 5 else "open"
                text = f"{plus_minus(mean_of(read)).text} over {len(read)} data set{'s' if len(read) > 1 else ''}"
                claim = f"{heading}MEHA's test error is {theirs[0]} ± {theirs[1]}"
                claims.append(Claim(claim, f"{text} ({_reading(*which)})", inside))
            if not others:
                continue
            errors = {n: mean_of([r["last"]["test error"] for r in results.get(case.name, n)])[0] for n in others}
            best = min(errors, key=lambda n: errors[n])
            measured = f"{mean:.1f}; the least of the others is {shown(best)} with {errors[best]:.1f}"
            claims.append(Claim(f"{heading}MEHA's test error is the least", measured, holds(mean < errors[best])))
            speeds = {n: speed for n in others if (speed := _speed(results, case.name, n)) is not None}
            measured = ", ".join(
                f"{shown(n)} {_factor(s).text.lstrip('×').strip()}" for n, s in speeds.items() if s.middle is not None
            )
            missed = [shown(n) for n, s in speeds.items() if s.middle is None]
            measured = f"times faster than {measured}" if measured else "faster than none"
            measured += f"; does not get to the validation error of {', '.join(missed)}" if missed else ""
            first = all(s.middle is not None and s.middle >= 1 for s in speeds.values())
            claims.append(Claim(f"{heading}MEHA is fastest to the same validation error", measured, holds(first)))
        return claims


def _reading(start: float, rule: str) -> str:
    """The name of a reading."""
    return f"start {start:g}, {rule}"


TELLING = 2.0
"""Standard errors beyond which two means differ."""


def _distance(errors: Sequence[float], theirs: tuple[float, float, float, float]) -> float:
    """The distance of a mean from the paper's, in standard errors of the difference."""
    mean, deviation = mean_of(errors)
    error = (deviation**2 / len(errors) + theirs[1] ** 2 / PAPER_SEEDS) ** 0.5
    return abs(mean - theirs[0]) / error


PAPER_SEEDS = 5
"""Data sets of the paper."""


def _best(record: Record) -> dict[str, float]:
    """The weights of the least validation error along a run."""
    return min(record["at weights"], key=lambda look: look["F"])


def _course(record: Record) -> tuple[list[float], list[float | None]]:
    """The least validation error so far, by time."""
    looks = record["at weights"]
    return [look["seconds"] for look in looks], list(np.minimum.accumulate([look["F"] for look in looks]))


def _took(records: Sequence[Record]) -> Mark:
    seconds, steps = (spread([r["last"][name] for r in records]) for name in ("seconds", "step"))
    return Mark(f"{seconds.text(band=False)} ({steps.text(band=False)})", "number", seconds.middle)


def _factor(speed: Spread) -> Mark:
    if speed.middle is None:
        return Mark("not reached", "failed")
    return Mark(
        times(speed.middle) + (f" ({speed.hits} of {speed.seeds})" if speed.hits < speed.seeds else ""), "number", speed.middle
    )


def _speed(results: Records, case: str, method: str) -> Spread | None:
    """Seconds until a method's best weights, over those until MEHA's were as good by validation, by data set."""
    ratios: list[float | None] = []
    own = {record["seed"]: record for record in results.get(case, "MEHA")}
    for record in results.get(case, method):
        if record["seed"] in own and record["at weights"]:
            goal = _best(record)
            seconds = [look["seconds"] for look in own[record["seed"]]["at weights"] if look["F"] <= goal["F"]]
            ratios.append(goal["seconds"] / seconds[0] if seconds else None)
    return spread(ratios) if ratios else None
