"""A race of methods with batches on finite sums, judged by exact value functions.

    python -m meha_lab.benchmarks.batches --tune --measure       # settings, then measured runs: resumes where it stopped
    python -m meha_lab.benchmarks.batches --tune --family logistic --method SOBA --method default
    python -m meha_lab.benchmarks.batches --part defaults --part steps --part memory --part ablation
    python -m meha_lab.benchmarks.batches --draw                 # the tables of docs/batches.md
    python -m meha_lab.benchmarks.batches --tune --measure --small --records out/small   # a minute's version

One thread. Set MEHA_DATA for MNIST. The instances are those of ``finite_sums``, the protocol is on the page.

Records: a line of lab/records/batches.jsonl for each run, of batches_best.jsonl for the least value and the curvatures of each
instance, of batches_parts.jsonl for the rows of the parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meha_lab import ablation, pages
from meha_lab.benchmarks import network
from meha_lab.benchmarks.finite_sums import FAMILIES, FiniteSum, Size, ValueFunction, curvatures, flat, least, leaves
from meha_lab.paths import RECORDS
from meha_lab.reproduce.memory import peak
from meha_lab.reproduce.race import processor
from meha_lab.store import Record, Store
from torch import Tensor

import meha
from meha.analysis.theory import TheoryWarning
from meha.methods.stochastic import adaptive_soba
from meha.running.compiled import CompileWarning

BUDGET = 20_000
"""Calls of a run. A gradient of F or f on a batch, in all variables, is one call, a Hessian-vector product two."""

LEVELS = (1e-1, 1e-2, 1e-3)
"""Of (h - h*) / (h(x0) - h*)."""

SPACING = 1.2
"""Points at which a run is judged: the calls between grow by this factor."""

SETTINGS = 25
"""Random settings of a method on a family."""

SCREENED = 5
"""How many of them, by each level, also run on the other tuning seeds."""

TUNED, MEASURED = (10, 11), (0, 1, 2)
"""Seeds on which settings are chosen, and on which they are measured."""

DIVERGED = 10.0
"""A run ends where h is this far above h*, in units of its distance at the start."""

STARTS = {"quadratic": 1, "cleaning": 2, "network": 2}
"""Starts of the search for h*, by family; otherwise four."""

PUBLISHED = (
    *("SOBA", "MASOBA", "SABA", "SRBA", "SPABA", "FSLA", "SUSTAIN", "MRBO", "VRBO"),
    *("StocBiO", "AmIGO", "TTSA", "BSA", "PBGDFree"),
)
"""Of ``meha.stochastic``, as far as they are there."""

DRAWN: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("beta", "eta"), (0.01, 1.5)),
    "gamma": (1.0, 100.0),
    "c": (1.0, 1000.0),
    "share": (0.01, 1.0),
}
"""Ranges of log-uniform draws: rates and gamma in units of 1 / L_f, c in units of L_F / L_f. That of alpha is the family's."""

EFFORT = ({"inner_steps": 1, "system_steps": 3}, {"inner_steps": 5, "system_steps": 10})
"""Inner steps, and steps or terms for the linear system: few or many, for methods that have them."""

ONE_LOOP = ("TTSA",)
"""Methods that are others with one inner step."""

WEIGHTED = ("F2SA", "MEHA")
"""Methods that move x along its direction divided by c."""


def published() -> dict[str, type[meha.Method]]:
    """The methods with settings, by name."""
    group = getattr(meha, "stochastic", None)
    found = {name: getattr(group, name) for name in PUBLISHED if hasattr(group, name)}
    return {**found, "F2SA": meha.F2SA, "MEHA": meha.MEHA}


# Instances and settings


@functools.lru_cache(maxsize=5)
def value_function(family: str, seed: int, size: Size) -> ValueFunction:
    return ValueFunction(FAMILIES[family](seed, size))


@dataclasses.dataclass
class Instance:
    """A finite sum in the dtype of a race, with its exact value function, and what is known of it.

    Attributes:
        known: h(x0), the least h that was found, and curvatures.
    """

    exact: FiniteSum
    model: FiniteSum
    value: ValueFunction
    known: Record

    @classmethod
    def of(cls, family: str, seed: int, size: Size, store: Store, dtype: torch.dtype = torch.float64) -> Instance:
        value = value_function(family, seed, size)
        exact = value.model
        known = {record["key"]: record for record in store.records("batches_best")}.get(exact.key)
        if known is None:
            begin = time.process_time()
            x, ends = least(value, STARTS.get(family, 4))
            known = {"h0": value(value.x0), "best": ends[0], "ends": ends, **curvatures(value, x)}
            known["seconds"] = time.process_time() - begin
            store.add("batches_best", exact.key, known)
        return cls(exact, exact.to(dtype), value, known)


def draw(name: str, family: str, number: int) -> Record:
    """A random setting of a method, in units of the instance, with three digits."""
    fields = {field.name for field in dataclasses.fields(published()[name])}
    rng = np.random.default_rng([zlib.crc32(f"{name} {family}".encode()), number])
    setting: Record = {}
    for field, (low, high) in {"alpha": FAMILIES[family].rates, **DRAWN}.items():
        value = math.exp(rng.uniform(math.log(low), math.log(high)))  # also where it is not used: methods draw alike
        if field in fields:
            setting[field] = float(f"{value:.3g}")
    effort, falls = EFFORT[int(rng.integers(2))], bool(rng.integers(2))
    setting |= {key: n for key, n in effort.items() if key in fields and not (key == "inner_steps" and name in ONE_LOOP)}
    return {**setting, "falls": falls}


@dataclasses.dataclass(frozen=True)
class Falling:
    """A rate that falls linearly, to 0 after the last step."""

    first: float
    steps: int

    def __call__(self, k: int) -> float:
        return self.first * max(1 - k / self.steps, 1 / self.steps)


def build(name: str, setting: Record, known: Record, steps: int) -> meha.Method | None:
    """The method with a setting in the units of an instance; None for the default."""
    if name == "default":
        return None
    kind = published()[name]
    found = {key: value for key, value in setting.items() if key != "falls"}
    if "c" in found:
        found["c"] *= known["L_F"] / known["L_f"]
        found["alpha"] *= max(1.0, found["c"]) if name in WEIGHTED else 1.0
        found |= {"p": 0.0} if any(field.name == "p" for field in dataclasses.fields(kind)) else {}
    units = {"alpha": 1 / known["L_h"], "beta": 1 / known["L_f"], "eta": 1 / known["L_f"], "gamma": 1 / known["L_f"]}
    for field, unit in units.items():
        if field in found:
            found[field] *= unit
            if setting["falls"] and field != "gamma":
                found[field] = Falling(found[field], steps)
    return kind(**found)


# One run


def calls(counts: Any) -> int:
    return counts.upper + counts.lower + 2 * counts.hvp


class Judge:
    """Observes a run: keeps h at points spaced in calls, off the clock, and ends the run where it is over or hopeless."""

    def __init__(self, instance: Instance | None, budget: int) -> None:
        self.instance, self.budget = instance, budget
        self.calls: list[int] = []
        self.values: list[float] = []
        self.seen: list[tuple[int, int, float]] = []  # steps, calls and CPU seconds, without those of the judge
        self._paused, self._next = 0.0, 1.0

    def __call__(self, run: meha.Run, info: meha.StepInfo) -> bool:
        begin, done = time.process_time(), calls(run.counts)
        if not self.seen or done >= self._next or done >= self.budget:
            self.seen.append((run.k, done, begin - self._paused))
        over = done >= self.budget
        if done >= self._next or over:
            self._next = done * SPACING
            if self.instance is not None:
                over = self._judge(flat(run.x).double(), done) or over
        self._paused += time.process_time() - begin
        return over

    def _judge(self, x: Tensor, done: int) -> bool:
        """Keep h(x); whether it is beyond hope."""
        assert self.instance is not None
        known, h = self.instance.known, math.inf
        if bool(torch.isfinite(x).all()):
            try:
                h = self.instance.value(x)
            except ArithmeticError:  # so far away that f has no minimum in double precision
                h = math.inf
        self.calls.append(done)
        self.values.append(h)
        return not h - known["best"] <= DIVERGED * (known["h0"] - known["best"])

    @property
    def rate(self) -> tuple[float, float]:
        """CPU seconds of a call and of a step, from the second look on: tracing and compilation come before it. NaN if the
        run was over then."""
        if len(self.seen) < 3:
            return math.nan, math.nan
        (k, done, begin), (last_k, last, end) = self.seen[1], self.seen[-1]
        return (end - begin) / (last - done), (end - begin) / (last_k - k)


def draws(method: meha.Method | None) -> int:
    """The independent batches that a step of a method uses."""
    name = "" if method is None else method.name
    inner, system = (getattr(method, field, 0) for field in ("inner_steps", "system_steps"))
    if name in ("StocBiO", "AmIGO", "BSA", "TTSA"):
        return inner + system + 1
    return {"MRBO": system, "SUSTAIN": system, "PBGDFree": inner}.get(name, 0) + 1


def solve(model: FiniteSum, method: meha.Method | None, steps: int, judge: Judge, compiled: bool) -> tuple[Any, str]:
    """Run a method; return the solution, and why it was not compiled."""
    x0, y0 = ([leaf.clone() for leaf in leaves(point)] for point in (model.x0, model.y0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = meha.solve(
            model.problem,
            x0[0] if isinstance(model.x0, Tensor) else x0,
            y0[0] if isinstance(model.y0, Tensor) else y0,
            method,
            batches=model.batches(draws(method)),
            max_steps=steps,
            tol=None,
            callbacks=[judge, meha.observers.Recorder(every=steps)],
            compile=compiled,
        )
    for warning in caught:
        if not issubclass(warning.category, CompileWarning | TheoryWarning | meha.TrainingWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return solution, next((str(item.message) for item in caught if issubclass(item.category, CompileWarning)), "")


class Pilots:
    """Eager runs with very small rates, which say what the steps of a method cost; each is made once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, float, float]] = {}

    def __call__(self, instance: Instance, name: str, setting: Record, budget: int) -> tuple[int, float, float]:
        """The steps that take the budget; CPU seconds of a call and of a step."""
        model = instance.model
        key = (model.family, model.size, model.dtype, name, setting.get("inner_steps"), setting.get("system_steps"), budget)
        if key not in self._known:
            quiet = {k: 1e-6 * v if k in ("alpha", "beta", "eta") else v for k, v in setting.items()} | {"falls": False}
            self._known[key] = pilot(model, build(name, quiet, instance.known, 1), budget)
        return self._known[key]


def pilot(model: FiniteSum, method: meha.Method | None, budget: int) -> tuple[int, float, float]:
    """The steps that take the budget, which may cost unequal numbers of calls; CPU seconds of a call and of a step."""
    judge = Judge(None, budget)
    solution, _ = solve(model, method, budget, judge, False)
    return solution.steps, *judge.rate


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_key(instance: Instance, name: str, setting: Record, budget: int) -> str:
    shown = " ".join(f"{key}={value:g}" if key != "falls" else "falling" * value for key, value in setting.items())
    return f"{instance.exact.key} {name_of(instance.model.dtype)} {budget} calls: {name} {shown}".rstrip()


def race(
    instance: Instance, name: str, setting: Record, budget: int, pilots: Pilots, timed: bool = False, compiled: bool = True
) -> Record:
    """Run a method with a setting; the record."""
    record: Record = {"family": instance.exact.family, "size": instance.exact.size, "seed": instance.exact.seed}
    record |= {"instance": instance.exact.key, "method": name, "setting": setting, "budget": budget}
    record["dtype"] = name_of(instance.model.dtype)
    begin = time.process_time()
    judge = Judge(instance, budget)
    try:
        steps, eager, _ = pilots(instance, name, setting, budget)
        solution, why = solve(instance.model, build(name, setting, instance.known, steps), steps, judge, compiled)
    except (ValueError, TypeError) as error:  # the method cannot take the problem
        return {**record, "status": "refused", "why": str(error)[:200], "calls": [], "values": []}
    if not judge.calls or judge.calls[-1] < calls(solution.counts):
        judge._judge(flat(solution.x).double(), calls(solution.counts))
    record |= {"status": solution.status.value, "why": why[:200], "steps": steps, "calls": judge.calls}
    record["values"] = [float(f"{value:.12g}") for value in judge.values]
    record["seconds"] = time.process_time() - begin
    if timed:
        record["cpu"] = {"eager": eager, "compiled": judge.rate[0] if compiled and not why else math.nan}
    return record


def reached(record: Record, level: float, best: float, h0: float) -> float:
    """Calls at the first stored point after which the run stays below a level; infinity if there is none."""
    found = math.inf
    if record["status"] in ("non-finite", "diverged"):
        return found
    for done, value in zip(reversed(record["calls"]), reversed(record["values"]), strict=True):
        if value is None or not value - best <= level * (h0 - best):
            break
        found = done
    return found


# Tuning, measuring


def races(
    family: str, seed: int, jobs: Iterable[tuple[str, Record]], options: argparse.Namespace, store: Store, timed: bool = False
) -> list[Record]:
    """The records of these methods and settings on an instance; those that are missing are run."""
    known = {record["key"]: record for record in store.records("batches")}
    instance = Instance.of(family, seed, options.size, store, options.dtype)
    found = []
    for name, setting in jobs:
        key = run_key(instance, name, setting, options.budget)
        record = known.get(key)
        if options.again or record is None or record["status"] == "refused" or (timed and "cpu" not in record):
            record = race(instance, name, setting, options.budget, options.pilots, timed, not options.eager)
            store.add("batches", key, record)
            known[key] = record
            ends = [f"{reached(record, level, instance.known['best'], instance.known['h0']):,.0f}" for level in LEVELS]
            status = f"{record['status']} {record['why']}".rstrip()
            print(f"{key}: {status}, calls {' / '.join(ends)}, {record.get('seconds', 0):.1f} s", flush=True)
        found.append(record)
    return found


class Levels:
    """Calls to the levels, from records: h* is the least value that any run or search has found on an instance."""

    def __init__(self, store: Store) -> None:
        self.known = {record["key"]: (record["h0"], record["best"]) for record in store.records("batches_best")}
        for record in store.records("batches"):
            h0, best = self.known.get(record["instance"], (math.nan, math.inf))
            least = min((value for value in record["values"] if value is not None), default=math.inf)
            self.known[record["instance"]] = h0, min(best, least)

    def calls(self, record: Record, level: float) -> float:
        h0, best = self.known[record["instance"]]
        return reached(record, level, best, h0)

    def end(self, record: Record) -> float:
        """The relative suboptimality at the last point."""
        h0, best = self.known[record["instance"]]
        value = record["values"][-1] if record["values"] else None
        return math.inf if value is None else (value - best) / (h0 - best)


Score = tuple[float, float]


def scores(records: Sequence[Record], levels: Levels) -> dict[str, Score]:
    """By column, and for all columns: the mean logarithm of the calls, and that of the distance at the end.

    A level that was not reached counts as twice the budget.
    """
    far = min(1e30, statistics.fmean(math.log(max(min(levels.end(record), 1e30), 1e-12)) for record in records))

    def mean(level: float) -> float:
        return statistics.fmean(math.log(min(levels.calls(record, level), 2 * record["budget"])) for record in records)

    columns = {f"{level:g}": (mean(level), far) for level in LEVELS}
    return {**columns, "all": (math.fsum(score for score, _ in columns.values()), far)}


def tune(family: str, name: str, options: argparse.Namespace, store: Store) -> dict[str, Record]:
    """The best settings of a method by column: all on the first seed, the best of them on the others as well."""
    if name == "default":
        return {"all": {}}
    first, *others = options.tuned
    jobs = [(name, draw(name, family, number)) for number in range(options.settings)]
    runs = [[record] for record in races(family, first, jobs, options, store) if record["status"] != "refused"]
    levels = Levels(store)
    kept: list[int] = []
    for column in (*(f"{level:g}" for level in LEVELS), "all"):
        order = sorted(range(len(runs)), key=lambda i: scores(runs[i], levels)[column])
        kept += [i for i in order[:SCREENED] if i not in kept]
    for seed in others:
        again = races(family, seed, [(name, runs[i][0]["setting"]) for i in kept], options, store)
        for i, record in zip(kept, again, strict=True):
            runs[i].append(record)
    levels, chosen = Levels(store), [runs[i] for i in kept]
    found = [scores(run, levels) for run in chosen]
    return {
        column: chosen[min(range(len(chosen)), key=lambda i: found[i][column])][0]["setting"]
        for column in (found[0] if found else ())
    }


def measure(family: str, name: str, options: argparse.Namespace, store: Store) -> None:
    """Run the chosen settings on the measured seeds, and keep which they are."""
    chosen = tune(family, name, options, store)
    distinct = {repr(setting): setting for setting in chosen.values()}
    for seed in options.measured:
        races(family, seed, [(name, setting) for setting in distinct.values()], options, store, timed=True)
    made = {"processor": processor(), "torch": str(torch.__version__)}
    row = {"part": "race", "family": family, "method": name, "size": options.size, "chosen": chosen, "budget": options.budget}
    key = f"race {family} {options.size} {options.budget} {name}"
    store.add(
        "batches_parts", key, {**row, "dtype": name_of(options.dtype), "seeds": list(options.measured), "made with": made}
    )


# The tables


def shown(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, and the least and the largest; a dash where a level was not reached."""
    texts = [
        f"{value:{form}}" if math.isfinite(value) else "-" for value in (statistics.median(values), min(values), max(values))
    ]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} .. {texts[2]})"


HEAD = ("", *(f"calls to {level:g}" for level in LEVELS), "end", "CPU s to 1e-2, compiled", "eager")


def family_table(family: str, rows: Sequence[Record], runs: dict[str, list[Record]], levels: Levels) -> list[str]:
    """The methods on a family: the best setting for each column, and one for all."""

    def of(row: Record, column: str) -> list[Record]:
        setting = row["chosen"].get(column, row["chosen"].get("all"))
        return [run for run in runs.get(row["method"], []) if run["setting"] == setting and run["seed"] in row["seeds"]]

    def costs(found: Sequence[Record], how: str) -> str:
        rates = [run.get("cpu", {}).get(how) for run in found]
        spent = [levels.calls(run, 1e-2) * rate for run, rate in zip(found, rates, strict=True) if rate]
        return shown(spent, ".2g") if len(spent) == len(found) else "-"

    lines, best = [], dict[str, list[float]]()
    for row in rows:
        one = of(row, "all")
        if not one:
            lines.append([f"`{row['method']}`", "refused", *[""] * (len(HEAD) - 2)])
            continue
        rest = [shown([levels.end(run) for run in one], ".1e"), costs(one, "compiled"), costs(one, "eager")]
        whole = [shown([levels.calls(run, level) for run in one]) for level in LEVELS]
        if row["method"] == "default":
            lines.append(["**default**", *whole, *rest])
            continue
        cells = []
        for level in LEVELS:
            found = sorted((run["seed"], levels.calls(run, level)) for run in of(row, f"{level:g}"))
            each = [value for _, value in found]
            cells.append(shown(each))
            if f"{level:g}" not in best or statistics.median(each) < statistics.median(best[f"{level:g}"]):
                best[f"{level:g}"] = each
        lines += [
            [f"`{row['method']}`, best for the column", *cells, "", "", ""],
            [f"`{row['method']}`, one setting", *whole, *rest],
        ]
    default = next((of(row, "all") for row in rows if row["method"] == "default"), [])
    if default and best:
        default = sorted(default, key=lambda run: run["seed"])
        cells = [shown(ratios([levels.calls(run, level) for run in default], best[f"{level:g}"]), ".2f") for level in LEVELS]
        lines.append(["default / best tuned, each seed", *cells, "", "", ""])
    known = [levels.known[run["instance"]] for run in default]
    about = "; ".join(f"h {h0:.4g}, best {least:.4g}" for h0, least in dict.fromkeys(known))
    return [f"### {family}", "", *([about + ".", ""] if about else []), *pages.markdown(HEAD, lines), ""]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of calls, seed by seed: 0 where only ours reached the level, infinity where only theirs did or neither."""
    return [a / b if math.isfinite(a) else math.inf for a, b in zip(ours, theirs, strict=False)]


def table(store: Store) -> list[str]:
    """All tables of the page."""
    parts = store.records("batches_parts")
    rows = [row for row in parts if row["part"] == "race" and row["size"] == "full"]
    levels, lines = Levels(store), list[str]()
    if rows:
        last, made = rows[-1], rows[-1]["made with"]
        rows = [row for row in rows if (row["budget"], row["dtype"]) == (last["budget"], last["dtype"])]
        lines += [f"Budget {last['budget']:,} calls, {last['dtype']}, {made['processor']}, torch {made['torch']}.", ""]
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family]
        runs: dict[str, list[Record]] = {}
        for run in store.records("batches"):
            if own and all(run[name] == own[0][name] for name in ("family", "size", "budget", "dtype")):
                runs.setdefault(run["method"], []).append(run)
        if own:
            lines += family_table(family, own, runs, levels)
    for name, (title, head) in PARTS.items():
        own = [row for row in parts if row["part"] == name]
        if own:
            made = own[-1]["made with"]
            cells = [row["cells"] for row in own if row["made with"] == made]
            lines += [f"### {title}", "", *pages.markdown(head, cells), ""]
            lines += [f"{made['processor']}, torch {made['torch']}.", ""]
    return lines[:-1] if lines else ["There are no records yet."]


TABLES: pages.Tables = {"batches": ("batches.md", table)}


# The parts


PARTS = {
    "defaults": (
        "Left out settings: methods with the rates that they choose themselves, `logistic`",
        ("", "status", "calls", "end", "message"),
    ),
    "steps": ("Steps per second, `logistic`", ("", "calls a step", "compiled", "eager", "ratio")),
    "memory": (
        "Memory and time on networks",
        ("", "method", "tensors of the size of y at the peak", "time of a step, by that of Adam"),
    ),
    "ablation": (
        "The numbers of the default: calls to 1e-2 with a number three times as large and as small, by those without a change",
        ("", "value", "a third", "three times", "not reached, of 24 (4 families, 3 levels, 2 values)"),
    ),
}


def keep(store: Store, part: str, cells: Sequence[str], **more: Any) -> None:
    """Store the row of a part."""
    made = {"processor": processor(), "torch": str(torch.__version__)}
    store.add("batches_parts", f"{part} {cells[0]} {cells[1] if part == 'memory' else ''}".rstrip(), {
        "part": part, "cells": list(cells), **more, "made with": made
    })  # fmt: skip
    print(*cells, sep=" | ", flush=True)


def measure_defaults(options: argparse.Namespace, store: Store) -> None:
    """Where methods end whose settings are left out."""
    instance = Instance.of("logistic", options.measured[0], options.size, store, options.dtype)
    for name in ("MEHA", "RHG", "CG", "F2SA", "VPBGD"):
        judge = Judge(instance, options.budget)
        try:
            solution, _ = solve(instance.model, getattr(meha, name)(), options.budget, judge, False)
        except (ValueError, TypeError) as error:
            keep(store, "defaults", [f"`{name}()`", "refused", "", "", str(error).split(". ")[0]])
            continue
        judge._judge(flat(solution.x).double(), calls(solution.counts))
        known = instance.known
        end = (judge.values[-1] - known["best"]) / (known["h0"] - known["best"])
        over = judge.calls[-1] >= options.budget
        status, message = ("budget spent", "") if over else (solution.status.value, solution.message.split(". ")[0])
        cells = [f"`{name}()`", status, f"{judge.calls[-1]:,}", f"{end:.1e}", message]
        keep(store, "defaults", cells, values=judge.values, calls=judge.calls)


def measure_steps(options: argparse.Namespace, store: Store) -> None:
    """Steps per second of compiled and of eager runs, from the second look of a warm run on."""
    instance = Instance.of("logistic", options.measured[0], options.size, store, options.dtype)
    for name in ("default", "MEHA", "SOBA"):
        if name not in {"default", *published()}:
            continue
        rates = {"alpha": 0.01, "beta": 0.1, "eta": 0.1} | ({"gamma": 10.0, "c": 10.0} if name == "MEHA" else {})
        method, speeds = build(name, {**rates, "falls": False}, instance.known, 1), dict[str, float]()
        cost = 0.0
        for how in ("compiled", "eager"):
            judge = Judge(None, options.budget)
            _, why = solve(instance.model, method, judge.budget, judge, how == "compiled")
            (k, done, _), (last_k, last, _) = judge.seen[1], judge.seen[-1]
            cost = (last - done) / (last_k - k)
            speeds[how] = math.nan if why else 1 / judge.rate[1]
        shares = [f"{speeds[how]:,.0f}" if speeds[how] == speeds[how] else "not compiled" for how in speeds]
        ratio = speeds["compiled"] / speeds["eager"]
        keep(store, "steps", [name, f"{cost:.2g}", *shares, f"{ratio:.1f}" if ratio == ratio else ""])


RATES = {"alpha": 1.0, "eta": 1e-3, "beta": 1e-3}
ON_NETWORKS: dict[str, Callable[[], meha.Method | None]] = {
    "default": lambda: None,
    "`MEHA(gradients=2)`": lambda: meha.MEHA(**RATES, gamma=10.0, c=2.0, gradients=2),
    "`F2SA()`": meha.F2SA,
}
MODELS: dict[str, Callable[[], Any]] = {
    "MLP": network.mlp,
    "ConvNet": network.convnet,
    "Transformer": network.transformer,
}


def steps_on(model: str, method: str, batch: Any) -> Callable[[], Any]:
    """A function that takes a step of a method on a network; "plain Adam" takes it along f alone."""
    torch.manual_seed(0)
    x, y = torch.zeros(network.EXAMPLES), MODELS[model]()
    if method != "plain Adam":
        chosen = ON_NETWORKS[method]() or meha.methods.default_method(network.PROBLEM, x, y, [batch])
        run = chosen.start(network.PROBLEM, x, y)
        return lambda: run.step(batch)
    optimizer = torch.optim.Adam(y.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        network.lower(x, y, batch).backward()
        optimizer.step()

    return step


def most(model: str, method: str) -> float:
    """The most memory of some steps on two examples, with all that lasts between them, in tensors of the size of y."""

    def work() -> None:
        step = steps_on(model, method, network.make_batch(2))
        for _ in range(3):
            step()

    steps_on(model, method, network.make_batch(2))()  # what torch makes once
    size = network.size(MODELS[model]())
    return peak(work) / size - 1  # y itself is made there, too


def measure_memory(options: argparse.Namespace, store: Store) -> None:
    """Memory above y, and the time of a step by that of Adam, in turns."""
    for model in MODELS:
        names = [*ON_NETWORKS, "plain Adam"]
        contenders = {name: steps_on(model, name, network.make_batch(64)) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(options.rounds + 2):
            for name, step in contenders.items():
                begin = time.process_time()
                step()
                if turn >= 2:  # the first steps set up
                    times[name].append(time.process_time() - begin)
        for name in names:
            each = sorted(a / b for a, b in zip(times[name], times["plain Adam"], strict=True))
            low, middle, high = each[len(each) // 5], statistics.median(each), each[-1 - len(each) // 5]
            keep(store, "memory", [model, name, f"{most(model, name):.1f}", f"{middle:.1f} ({low:.1f} .. {high:.1f})"])


VARIED = ("quadratic", "logistic", "cleaning", "domains")
"""Families on which the numbers of the default are varied: those whose lower level is convex."""


def measure_ablation(options: argparse.Namespace, store: Store) -> None:
    """Each named number of the default times 1/3 and 3: geometric means over families, on a seed on which it was chosen."""
    instances = [Instance.of(family, options.tuned[0], options.size, store, options.dtype) for family in VARIED]
    budget = options.budget // 3

    def calls_to() -> list[float]:
        """The calls to all levels on all instances."""
        found = []
        for instance in instances:
            judge = Judge(instance, budget)
            solution, _ = solve(instance.model, None, budget, judge, False)
            record = {"status": solution.status.value, "calls": judge.calls, "values": judge.values}
            found += [reached(record, level, instance.known["best"], instance.known["h0"]) for level in LEVELS]
        return found

    def cost(found: Sequence[float]) -> float:
        """Of the middle level; one that was not reached counts as twice the budget."""
        return statistics.fmean(math.log(min(calls, 2 * budget)) for calls in found[1 :: len(LEVELS)])

    base = cost(calls_to())
    for name, value in vars(adaptive_soba).items():
        if not (name.isupper() and isinstance(value, int | float)):
            continue
        shares, missed = [], 0
        for factor in sorted(ablation.FACTORS):
            with ablation.changed(ablation.Number(adaptive_soba.__name__, "", name), factor):
                found = calls_to()
            shares.append(math.exp(cost(found) - base))
            missed += sum(math.isinf(calls) for calls in found)
        keep(store, "ablation", [f"`{name}`", f"{value:g}", *(f"{share:.2f}" for share in shares), str(missed)])


MEASURES = {
    "defaults": measure_defaults,
    "steps": measure_steps,
    "memory": measure_memory,
    "ablation": measure_ablation,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = ["default", *published()]
    parser.add_argument("--family", action="append", choices=[*FAMILIES], help="only this; may be given again")
    parser.add_argument("--method", action="append", choices=names, help="only this; may be given again")
    parser.add_argument("--part", action="append", choices=[*MEASURES], help="another part; may be given again")
    parser.add_argument("--tune", action="store_true", help="run the settings on the tuning seeds")
    parser.add_argument("--measure", action="store_true", help="run the chosen settings on the measured seeds")
    parser.add_argument("--draw", action="store_true", help="draw the tables of docs/batches.md from the records")
    parser.add_argument("--seeds", type=int, nargs="+", help="measured seeds")
    parser.add_argument("--tuned", type=int, nargs="+", help="tuning seeds")
    parser.add_argument("--settings", type=int, help="random settings of a method")
    parser.add_argument("--budget", type=int, help="calls of a run")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--again", action="store_true", help="run also what has records, as after a change of a method")
    parser.add_argument("--eager", action="store_true", help="do not compile runs")
    parser.add_argument("--rounds", type=int, default=15, help="turns in which steps on networks are timed")
    parser.add_argument("--small", action="store_true", help="small instances, few settings and seeds, a small budget")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    options = parser.parse_args(arguments)
    options.size = "small" if options.small else "full"
    options.budget = options.budget or (400 if options.small else BUDGET)
    options.settings = options.settings or (2 if options.small else SETTINGS)
    options.tuned = options.tuned or TUNED[: 1 if options.small else None]
    options.measured = options.seeds or MEASURED[: 1 if options.small else None]
    options.dtype, options.pilots = getattr(torch, options.dtype), Pilots()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", TheoryWarning)
    store = Store(options.records)
    for family in options.family or FAMILIES:
        for name in options.method or names:
            if options.measure:
                measure(family, name, options, store)
            elif options.tune:
                tune(family, name, options, store)
    for part in options.part or ():
        MEASURES[part](options, store)
    if options.draw:
        pages.draw(TABLES)


if __name__ == "__main__":
    main()
