"""Change every heuristic number of the default by a factor of three, one at a time, and record what that changes.

``python -m meha_lab.ablation measure`` runs problems of the tuning half with each number times 3 and times 1/3, and appends one
line per run to ``out/ablation.jsonl``; it continues where it was interrupted. ``... summarise`` adds the runs of each number
up in ``lab/records/ablation.jsonl``, and ``... draw`` writes the table of docs/numbers.md from that. A number that a run never
reads is not changed there: nothing could happen.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import typer

import meha
from meha_lab.house import named_numbers
from meha_lab.paths import ROOT
from meha_lab.problems import collection
from meha_lab.problems.collection import Entry

__all__ = ["FACTORS", "Number", "changed", "effect", "numbers", "outcome", "read_by", "scaled"]

FACTORS = (3.0, 1 / 3)
RUNS = ROOT / "out/ablation.jsonl"
RECORDS = ROOT / "lab/records/ablation.jsonl"
PAGE = ROOT / "docs/numbers.md"
MARKS = "<!-- numbers begin -->\n", "<!-- numbers end -->\n"
GROUPS = ("gentle", "rugged", "simple", "hollow", "constrained")
STARTS, SEED = (0, 1), 1  # the start of the problem, and one drawn with this seed

SAME_X = 1e-3
"""Error of x, relative to 1 + its size, from which on an answer is another one."""

SAME_WORK = 0.1
"""Relative change of the gradients of f from which on a number counts as steering the work."""

PATIENCE = 10.0
"""A run that takes this many times as long as the unchanged one is ended, and counts as more work."""


class Number(NamedTuple):
    """A named number: its module, the class that holds it (empty for a constant of the module), and its name."""

    module: str
    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.owner + '.' if self.owner else ''}{self.name}"


def numbers(root: Path = ROOT) -> list[Number]:
    """All named numbers of the automatic methods."""
    found = []
    for text in named_numbers(root):
        place, _, name = text.partition(":")
        owner, _, name = name.rpartition(".")
        found.append(Number(place.removesuffix(".py").replace("/", "."), owner, name))
    return found


def scaled(value: Any, factor: float) -> Any:
    """A number, or each of a tuple, times a factor; whole numbers stay whole and at least 1 away from where they were.

    >>> scaled(4, 1 / 3), scaled(1, 1 / 3), scaled(0.5, 3.0), scaled((1.0, 2.0), 3.0)
    (1, 0, 1.5, (3.0, 6.0))
    """
    if isinstance(value, tuple):
        return tuple(scaled(part, factor) for part in value)
    return round(value * factor) if isinstance(value, int) else value * factor


def _holders(number: Number) -> list[Any]:
    """What holds the number at run time: its class's instances in modules, or every module that imported the constant."""
    module = importlib.import_module(number.module)
    loaded = [other for name, other in list(sys.modules.items()) if name.startswith("meha.") and isinstance(other, ModuleType)]
    if number.owner:
        kind = getattr(module, number.owner)
        return list({id(held): held for other in loaded for held in vars(other).values() if isinstance(held, kind)}.values())
    value = getattr(module, number.name)
    return [other for other in loaded if getattr(other, number.name, None) is value]


@contextlib.contextmanager
def changed(number: Number, factor: float) -> Iterator[None]:
    """Multiply a number by a factor, wherever it is read."""
    holders = _holders(number)
    before = getattr(holders[0], number.name)
    for holder in holders:
        object.__setattr__(holder, number.name, scaled(before, factor))  # classes of numbers are frozen
    try:
        yield
    finally:
        for holder in holders:
            object.__setattr__(holder, number.name, before)


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


class read_by:  # noqa: N801 - a context manager, used like a function
    """Collect the names that the code of meha which runs inside may read."""

    def __enter__(self) -> read_by:
        self.codes: set[CodeType] = set()
        self.inside = str(Path(meha.__file__).parent)
        sys.setprofile(self._follow)
        return self

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.names: dict[str, set[str]] = {}
        for code in self.codes:
            if code.co_filename.startswith(self.inside):
                self.names.setdefault(code.co_filename, set()).update(_names(code))

    def __contains__(self, number: Number) -> bool:
        holders = {id(holder) for holder in _holders(number)}
        modules = [other for name, other in list(sys.modules.items()) if name.startswith("meha.")]
        knowing = [m for m in modules if id(m) in holders or any(id(value) in holders for value in vars(m).values())]
        return any(number.name in self.names.get(str(module.__file__), ()) for module in knowing)


def outcome(entry: Entry, start: int) -> dict[str, Any]:
    """Solve a problem with the default; how it ended, what is true of it, x, F and the gradients of f."""
    known = entry.make()
    generator = torch.Generator().manual_seed(SEED)
    x0, y0 = (known.x0, known.y0) if start == 0 else known.start(generator)
    try:
        solution = meha.solve(known, x0, y0)
    except (RuntimeError, ValueError, ArithmeticError) as error:
        return {"status": f"error: {type(error).__name__}", "right": False, "x": [], "F": math.nan, "work": 0}
    x, y = solution.x, solution.y
    leaves = [x] if isinstance(x, torch.Tensor) else []
    right = bool(known.verify(x, y).right(tol=1e-3)) if entry.group != "constrained" else _judged(known, x, y)
    return {
        "status": solution.status.value,
        "right": right,
        "x": [float(f"{v:.7g}") for leaf in leaves for v in leaf.reshape(-1).tolist()[:50]],
        "F": float(f"{float(known.upper(x, y) if x is not None else known.upper(y)):.9g}"),
        "work": solution.counts.lower + solution.counts.upper,
    }


def _judged(known: Any, x: Any, y: Any) -> bool:
    from meha_lab.problems.constrained.known import judge

    return judge(known, x, y).right()


def effect(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The strongest thing that differs between two outcomes: truth, answer, status, work, counts or nothing.

    >>> one = {"status": "converged", "right": True, "x": [1.0], "F": 0.0, "work": 100}
    >>> effect(one, one | {"work": 101}), effect(one, one | {"x": [2.0]}), effect(one, one | {"right": False}), effect(one, one)
    ('counts', 'answer', 'truth', 'nothing')
    """
    if before["right"] != after["right"]:
        return "truth"
    if before["status"] != after["status"]:
        return "status"
    a, b = torch.tensor(before["x"]), torch.tensor(after["x"])
    if len(a) != len(b) or (len(a) and float((a - b).norm()) > SAME_X * (1 + float(a.norm()))):
        return "answer"
    if abs(after["work"] - before["work"]) > SAME_WORK * before["work"]:
        return "work"
    return "nothing" if after["work"] == before["work"] else "counts"


class _OverTimeError(Exception):
    pass


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _OverTimeError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@cache
def _entries() -> dict[str, Entry]:
    return {entry.name: entry for group in GROUPS for entry in collection("tuning", group=group)}  # type: ignore[arg-type]


def _unchanged(name: str, start: int, most_seconds: float) -> dict[str, Any]:
    """The record of a problem with all numbers as they are, and its time."""
    entry = _entries()[name]
    begin = time.perf_counter()
    try:
        with _time_limit(60 * most_seconds):
            now = outcome(entry, start)
    except _OverTimeError:
        now = {"status": "over time", "right": False, "x": [], "F": math.nan, "work": 0}
    seconds = time.perf_counter() - begin
    return {"number": "", "factor": 1.0, "problem": name, "start": start, "group": entry.group, "seconds": seconds} | now


def _ablate(unchanged: dict[str, Any], done: set[tuple[str, float]], out: Path) -> None:
    """Change each number that a run reads, and append what that does to the records."""
    name, start = unchanged["problem"], unchanged["start"]
    entry = _entries()[name]
    with read_by() as reading:
        outcome(entry, start)
    with out.open("a", buffering=1) as file:  # whole lines at once: several processes write here
        for number in numbers():
            if number not in reading:
                continue
            for factor in FACTORS:
                if (str(number), factor) in done:
                    continue
                try:
                    with _time_limit(PATIENCE * unchanged["seconds"] + 1), changed(number, factor):
                        found = effect(unchanged, outcome(entry, start))
                except _OverTimeError:
                    found = "work"
                except Exception as error:
                    found = f"error: {type(error).__name__}"
                line = {"number": str(number), "factor": factor, "problem": name, "start": start, "effect": found}
                print(json.dumps(line), file=file)


def _records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


app = typer.Typer(add_completion=False)


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="the file of the runs")] = RUNS,
    most_seconds: Annotated[float, typer.Option(help="problems that take longer are left out")] = 1.0,
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
) -> None:
    """Run what is not recorded yet: the problems unchanged, then with each number changed, quick problems first."""
    out.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    records = _records(out)
    known = {(row["problem"], row["start"]) for row in records if row["number"] == ""}
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        waiting = [
            pool.submit(_unchanged, name, start, most_seconds)
            for start in STARTS
            for name in _entries()
            if (name, start) not in known
        ]
        for ended in as_completed(waiting):
            with out.open("a") as file:
                print(json.dumps(ended.result()), file=file)
        rows = {(row["problem"], row["start"]): row for row in _records(out) if row["number"] == ""}
        done: dict[tuple[str, int], set[tuple[str, float]]] = {}
        for row in records:
            done.setdefault((row["problem"], row["start"]), set()).add((row["number"], row["factor"]))
        quick = sorted((row["start"], row["seconds"], key) for key, row in rows.items() if row["seconds"] <= most_seconds)
        runs = [pool.submit(_ablate, rows[key], done.get(key, set()), out) for _, _, key in quick]
        for run in runs:
            run.result()


EFFECTS = ("truth", "status", "answer", "work", "counts", "nothing")
"""What a change may do, the strongest first; an error counts as a change of the truth."""


@app.command()
def summarise(runs: Annotated[Path, typer.Option(help="the file of the runs")] = RUNS) -> None:
    """Add up the runs of each number."""
    found: dict[str, Counter[str]] = {}
    where: dict[str, set[str]] = {}
    for row in _records(runs):
        if row["number"]:
            kind = row["effect"] if row["effect"] in EFFECTS else "truth"
            found.setdefault(row["number"], Counter())[kind] += 1
            if kind in EFFECTS[:3]:
                where.setdefault(row["number"], set()).add(row["problem"])
    with RECORDS.open("w") as file:
        for number, effects in sorted(found.items()):
            line = {"number": number, **{kind: effects[kind] for kind in EFFECTS}, "problems": sorted(where.get(number, ()))}
            print(json.dumps(line), file=file)


def reasons() -> dict[str, tuple[str, str]]:
    """The value of each number, and its reason: the comment behind it, or the text below it.

    >>> reasons()["meha.numerics.line_search:TRIALS"]
    ('25', 'lengths; after that many, 0.3^25 = 1e-13, only rounding is left')
    """
    found = {}
    for number in numbers():
        module = importlib.import_module(number.module)
        value = getattr(getattr(module, number.owner) if number.owner else module, number.name)
        lines = Path(str(module.__file__)).read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if re.match(rf"\s*([A-Z_]+, )*{number.name}\b[^=]*=", line))
        if lines[at].endswith("("):  # the formatter has broken a long line
            at += 1
        below = next(iter(lines[at + 1 :]), "").strip()
        reason = lines[at].partition("#")[2].strip() or (below.strip('"') if below.startswith('"""') else "")
        values = value if isinstance(value, tuple) else (value,)
        found[str(number)] = ", ".join(f"{part:.4g}" for part in values), reason
    return found


@app.command()
def draw() -> None:
    """Write the table of docs/numbers.md: each number with its value, reason, and what a factor of three changes."""
    records = {row["number"]: row for row in _records(RECORDS)}
    rows = ["| number | value | reason | runs | " + " | ".join(EFFECTS[:5]) + " |", "|---" * 9 + "|"]
    for number, (value, reason) in reasons().items():
        row = records.get(number)
        counts = [sum(row[kind] for kind in EFFECTS), *(row[kind] for kind in EFFECTS[:5])] if row else ["-"] * 6
        place = number.removeprefix("meha.").replace("DefaultTuning.", "").replace("NewtonTuning.", "")
        rows.append(f"| `{place}` | {value} | {reason} | {' | '.join(str(count or '') for count in counts)} |")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + "\n".join(rows) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    app()
