"""What it costs to choose no parameters: MEHA with the paper's numbers, with the best of 200 random ones, and without any.

    python benchmarks/automatic.py                          # fill in what is missing, write the tables
    python benchmarks/automatic.py --part automatic --again # after a change of the automatic methods
    python benchmarks/automatic.py --only sine --jobs 4     # cases with this text in their name, four at a time
    python benchmarks/automatic.py --part none              # write the tables in docs/automatic.md again

Every result is stored in benchmarks/results/automatic.json as soon as it is there. The cases are the collection of problems
(meha.problems.collection), the toys in other units and from other starts (meha.problems.variants), and group lasso, all without
their constants, which a user does not know. tests/test_automatic_table.py checks the search against MEHA, and the tables
against the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from batched import run_rows
from torch import Tensor

import meha
from meha._lower import solve_lower
from meha._oracle import Oracle
from meha._variables import Variable
from meha.problems import KnownProblem, collection, group_lasso
from meha.problems.variants import TOYS, VARIANTS
from meha.solution import Status

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/automatic.json", ROOT / "docs/automatic.md"

POINTS, STEPS, SINGLE_STEPS, LIMIT = 200, 1000, 400, 20_000
RANGES = {"alpha": (1e-5, 10.0), "beta": (1e-5, 10.0), "eta": (1e-5, 10.0), "gamma": (1e-2, 1e3), "c": (1e-2, 1e3)}
GOOD, VERY_GOOD = 1e-3, 1e-5

Cell = dict[str, Any]
"""What came of one run: the error, gradients of f and F, steps, seconds and how it ended."""


# The cases


class Setting(NamedTuple):
    """A problem as a user would state it, its start, its presets, and the judge of an answer, which tells its error."""

    problem: meha.Problem
    x0: Tensor
    y0: Tensor
    presets: Mapping[str, meha.MEHA]
    judge: Callable[[Tensor, Tensor], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """A setting not yet built, its group of rows, its columns, and the gradients of f after which ``solve`` is stopped."""

    group: str
    build: Callable[[torch.dtype], Setting]
    columns: tuple[str, ...]
    limit: float = math.inf


def stated(known: KnownProblem) -> Setting:
    """A problem with a known answer, without its constants."""
    problem = meha.Problem(known.upper, known.lower, nonsmooth=known.nonsmooth, x_set=known.x_set, y_set=known.y_set)
    return Setting(problem, known.x0, known.y0, known.presets, lambda x, y: {"error": known.error(x, y)})


def without_answer(known: KnownProblem) -> Setting:
    """Group lasso, judged by the weights x: by the validation error of the y that the lower level, solved anew, has for them.

    F at the y found would not do: it is small for any y that overfits the validation data, whatever x is.
    """

    def judge(x: Tensor, y: Tensor) -> dict[str, float]:
        at_x, start = Variable(x, "x"), Variable(known.y0, "y")
        fitted = solve_lower(Oracle(known, at_x, start), at_x, start, tol=1e-7, max_steps=5000).theta.snapshot()
        validation, test = known.upper, known.metrics["test error"]
        with torch.no_grad():
            found = {"error": float(validation(x, fitted)), "test": test(x, fitted)}
            return {**found, "error of y": float(validation(x, y)), "test of y": test(x, y)}

    return stated(known)._replace(judge=judge)


BOTH = ("MEHA()", "solve")


def cases() -> dict[str, Case]:
    """All cases by name."""

    def building(
        make: Callable[..., KnownProblem], state: Callable[[KnownProblem], Setting] = stated, variant: str = ""
    ) -> Callable[[torch.dtype], Setting]:
        return lambda dtype: state(VARIANTS[variant](make(dtype=dtype)))

    found = {entry.name: Case(entry.half, building(entry.make), ("paper", "random", *BOTH)) for entry in collection()}
    for toy, make in TOYS.items():
        for variant in VARIANTS:
            columns = ("paper", *(() if variant else ("random",)), *BOTH, "float32")
            found[f"toy: {toy}{variant}"] = Case("toys", building(make, variant=variant), columns)
    for m in (600, 3600):
        columns = ("paper", "recipe", *(("random",) if m == 600 else ()), *BOTH)
        found[f"group lasso, m = {m}"] = Case("group lasso", building(partial(group_lasso, m), without_answer), columns, LIMIT)
    return found


# The columns


def attempt(setting: Setting, method: meha.Method | None, **options: Any) -> Cell:
    """What comes of one call of solve."""
    solution = meha.solve(setting.problem, setting.x0, setting.y0, method, record=10**6, **options)
    return {
        **judged(setting, solution.x, solution.y),
        "gradients": [solution.counts.lower, solution.counts.upper],
        "steps": solution.steps,
        "seconds": round(solution.seconds, 2),
        "end": solution.status.value,
    }


def judged(setting: Setting, x: Tensor, y: Tensor) -> dict[str, float | None]:
    """What the judge says, in three digits; None for what is no number."""
    try:
        found = setting.judge(x, y)
    except ArithmeticError:  # an x so far off that its lower level cannot be solved
        found = {"error": math.inf}
    return {name: float(f"{value:.3g}") if math.isfinite(value) else None for name, value in found.items()}


def measure(name: str, column: str) -> Cell:
    """One cell of the tables."""
    case = cases()[name]
    setting = case.build(torch.float32 if column == "float32" else torch.float64)
    if column in setting.presets:
        return attempt(setting, setting.presets[column], max_steps=STEPS, tol=None)
    if column == "random":
        return search(setting, draw(name, POINTS), STEPS)
    if column == "MEHA()":
        return attempt(setting, meha.MEHA(), max_steps=SINGLE_STEPS)
    return attempt(setting, None, callbacks=lambda run, info: run.counts.lower >= case.limit)


def search(setting: Setting, numbers: Mapping[str, Tensor], steps: int) -> Cell:
    """The best of many points, run again by the library, and how many of them diverge or come close."""
    X, Y = run_rows(setting.problem, setting.x0, setting.y0, numbers, steps)
    alive = X.flatten(1).isfinite().all(1) & Y.flatten(1).isfinite().all(1)
    errors = {i: judged(setting, X[i], Y[i])["error"] for i in alive.nonzero().flatten().tolist()}
    ranked = {i: error for i, error in errors.items() if error is not None}
    found = {"diverged": int((~alive).sum()), "within": sum(error <= GOOD for error in ranked.values())}
    if not ranked:
        return {"error": None, "gradients": [0, 0], "steps": 0, "seconds": 0.0, "end": Status.DIVERGED.value, **found}
    best = min(ranked, key=lambda i: ranked[i])
    point: dict[str, Any] = {key: float(f"{value[best]:.4g}") for key, value in numbers.items()}
    return {**attempt(setting, meha.MEHA(**point), max_steps=steps, tol=None), **found, "point": point}


def draw(name: str, points: int) -> dict[str, Tensor]:
    """MEHA's six numbers, p uniform, the others log-uniform: in the same ranges for all cases, other points for each."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    u = torch.rand(6, points, generator=generator, dtype=torch.float64)
    logs = {key: math.log(low) + math.log(high / low) * u[i] for i, (key, (low, high)) in enumerate(RANGES.items())}
    return {**{key: value.exp() for key, value in logs.items()}, "p": u[5] / 2}


# The command


PARTS = {
    "paper": ("paper", "recipe"),
    "random": ("random",),
    "single": ("MEHA()",),
    "solve": ("solve", "float32"),
    "automatic": ("MEHA()", "solve", "float32"),
    "all": ("paper", "recipe", "random", "MEHA()", "solve", "float32"),
    "none": (),
}

Results = dict[str, dict[str, Cell]]


def load() -> Results:
    """What was measured so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def fill(columns: Iterable[str], only: str, jobs: int, again: bool) -> None:
    """Measure what is asked for and not there yet, and store it cell by cell."""
    results = load()
    wanted = [
        (name, column)
        for name, case in cases().items()
        for column in case.columns
        if column in columns and only in name and (again or column not in results.get(name, {}))
    ]
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(measure, name, column): (name, column) for name, column in wanted}
        for done in as_completed(running):
            name, column = running[done]
            store(name, column, done.result())
            print(f"{name} | {column} | {done.result()}", flush=True)


def store(name: str, column: str, cell: Cell) -> None:
    """Add a cell to the file, which has a line for each, in the order of the cases."""
    results = load()
    results.setdefault(name, {})[column] = cell
    listed = []
    for title, case in cases().items():
        found = results.get(title, {})
        lines = [f"  {json.dumps(key)}: {json.dumps(found[key])}" for key in case.columns if key in found]
        if lines:
            listed.append(f" {json.dumps(title)}: {{\n" + ",\n".join(lines) + "\n }")
    RESULTS.parent.mkdir(exist_ok=True)
    new = RESULTS.with_suffix(f".{os.getpid()}")
    new.write_text("{\n" + ",\n".join(listed) + "\n}\n")
    new.replace(RESULTS)


# The page


FAILURES = {status.value for status in (Status.DIVERGED, Status.NON_FINITE, Status.BROKE_DOWN)}
HEADS = {
    "paper": "paper's numbers",
    "random": "best of 200",
    "MEHA()": "`MEHA()`",
    "solve": "`solve`",
}
TITLES = {"held-out": "Held-out half", "tuning": "Tuning half"}


def reaches(cell: Cell, target: float) -> bool:
    """Whether the run ended well, and within the target."""
    return cell["end"] not in FAILURES and cell["error"] is not None and cell["error"] <= target


def tables(results: Results) -> str:
    """All that the command writes into the page."""
    listed = cases()
    parts = ["## In short", "", *_summary(results, listed), "", "## The toys", "", *_toys(results), ""]
    for group, title in TITLES.items():
        parts += [f"## {title}", "", *_problems({n: results[n] for n, case in listed.items() if case.group == group}), ""]
    names = [name for name, case in listed.items() if case.group == "group lasso"]
    return "\n".join([*parts, "## Group lasso", "", *_group_lasso({name: results[name] for name in names})])


def _summary(results: Results, listed: Mapping[str, Case]) -> list[str]:
    lines = _head("", *HEADS.values())
    groups = {"held-out": ("held-out",), "tuning": ("tuning",), "both": ("held-out", "tuning")}
    for title, halves in groups.items():
        names = [name for name, case in listed.items() if case.group in halves]
        for target in (GOOD, VERY_GOOD):
            counts = [str(sum(reaches(results[name][column], target) for name in names)) for column in HEADS]
            lines.append(_row(f"{title}, {len(names)} problems: to {_short(target)}", *counts))
        medians = []
        for column in HEADS:
            f, F = (statistics.median(results[name][column]["gradients"][i] for name in names) for i in (0, 1))
            medians.append(f"{f:,.0f} / {F:,.0f}" + (f", times {POINTS}" if column == "random" else ""))
        lines.append(_row(f"{title}: gradients of f / F, median", *medians))
    searched = [results[name]["random"] for name, case in listed.items() if case.group in groups["both"]]
    shares = [sum(cell[key] for cell in searched) / (POINTS * len(searched)) for key in ("diverged", "within")]
    lines += ["", f"Of all random points {shares[0]:.0%} diverged and {shares[1]:.1%} ended within {_short(GOOD)}."]
    for column in ("solve", "MEHA()"):
        for title in TITLES:
            missed = [
                f"{name} ({_error(results[name][column])})"
                for name, case in listed.items()
                if case.group == title and not reaches(results[name][column], GOOD)
            ]
            lines += [
                "",
                f"{HEADS[column]} misses {_short(GOOD)} on {len(missed)} of the {title} half: {'; '.join(missed) or 'none'}.",
            ]
    return lines


def _toys(results: Results) -> list[str]:
    lines = _head(
        "", "paper's numbers: to 1e-3", "best of 200", "within 1e-3, diverged", "`MEHA()`: to 1e-3", "worst", "steps",
        "`solve`: to 1e-5", "worst", "gradients of f", "of F", "float32: to 1e-3", "worst",
    )  # fmt: skip
    for toy in TOYS:
        found = {
            column: [results[f"toy: {toy}{variant}"][column] for variant in VARIANTS] for column in (*BOTH, "paper", "float32")
        }
        searched = results[f"toy: {toy}"]["random"]
        lines.append(
            _row(
                toy,
                _passed(found["paper"], GOOD),
                _error(searched),
                f"{searched['within']}, {searched['diverged']}",
                _passed(found["MEHA()"], GOOD),
                _worst(found["MEHA()"]),
                _range(cell["steps"] for cell in found["MEHA()"]),
                _passed(found["solve"], VERY_GOOD),
                _worst(found["solve"]),
                _range(cell["gradients"][0] for cell in found["solve"]),
                _range(cell["gradients"][1] for cell in found["solve"]),
                _passed(found["float32"], GOOD),
                _worst(found["float32"]),
            )
        )
    return lines


def _problems(results: Results) -> list[str]:
    lines = _head("", *list(HEADS.values())[:2], "within 1e-3, diverged", "`MEHA()`", "f / F", "`solve`", "f / F")
    for name, cells in results.items():
        searched = cells["random"]
        shown = [_error(cells["paper"]), _error(searched), f"{searched['within']}, {searched['diverged']}"]
        for column in BOTH:
            shown += [_error(cells[column]), _gradients(cells[column])]
        lines.append(_row(name, *shown))
    return lines


def _group_lasso(results: Results) -> list[str]:
    lines = _head("", "", "validation", "test", "validation of the y returned", "test", "f / F", "seconds", "end")
    titles = {**HEADS, "recipe": "recipe"}
    for name, cells in results.items():
        for column, cell in cells.items():
            numbers = [_fixed(cell.get(key)) for key in ("error", "test", "error of y", "test of y")]
            lines.append(_row(name, titles[column], *numbers, _gradients(cell), f"{cell['seconds']:.1f}", cell["end"]))
    return lines


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _short(number: float) -> str:
    return f"{number:.0e}" if number else "0"


def _fixed(number: float | None) -> str:
    return "none" if number is None else f"{number:.3g}"


def _error(cell: Cell) -> str:
    """The error, bold where it is good; or how the run failed."""
    if cell["end"] in FAILURES or cell["error"] is None:
        return cell["end"] if cell["end"] in FAILURES else "none"
    return f"**{_short(cell['error'])}**" if cell["error"] <= GOOD else _short(cell["error"])


def _gradients(cell: Cell) -> str:
    return "{:,} / {:,}".format(*cell["gradients"])


def _passed(cells: list[Cell], target: float) -> str:
    return f"{sum(reaches(cell, target) for cell in cells)} of {len(cells)}"


def _worst(cells: list[Cell]) -> str:
    return _error(max(cells, key=lambda cell: (cell["end"] in FAILURES, math.inf if cell["error"] is None else cell["error"])))


def _range(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    return f"{listed[0]:,} to {listed[-1]:,}"


BEGIN, END = "<!-- tables: written by benchmarks/automatic.py -->", "<!-- end of tables -->"


def page(results: Results, text: str) -> str:
    """The page with its tables replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(results)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="all", help="which columns to measure")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this text in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument("--again", action="store_true", help="measure also what is stored already")
    asked = parser.parse_args()
    fill(PARTS[asked.part], asked.only, asked.jobs, asked.again)
    results = load()
    missing = [(name, key) for name, case in cases().items() for key in case.columns if key not in results.get(name, {})]
    if missing:
        print(f"{len(missing)} cells are missing, such as {missing[0]}; the page stays as it is.")
    else:
        PAGE.write_text(page(results, PAGE.read_text()))


if __name__ == "__main__":
    main()
