"""Change every heuristic number of the default by a factor of three, one at a time, and record what that changes.

``python -m meha_lab.ablation measure`` runs problems of the tuning half with each number times 3 and times 1/3, and appends one
line per run to ``lab/records/ablation.jsonl``; it continues where it was interrupted. ``python -m meha_lab.ablation draw``
prints the table of docs/numbers.md. A number that a run never reads is not changed there: nothing could happen.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
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
RECORDS = ROOT / "lab/records/ablation.jsonl"
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


def _tasks(most_seconds: float, records: list[dict[str, Any]]) -> list[tuple[Entry, int]]:
    """Problems and starts, quick ones first where the time is known."""
    seconds = {(row["problem"], row["start"]): row["seconds"] for row in records if row["number"] == ""}
    entries = [entry for group in GROUPS for entry in collection("tuning", group=group)]  # type: ignore[arg-type]
    tasks = [(entry, start) for start in STARTS for entry in entries if seconds.get((entry.name, start), 0.0) <= most_seconds]
    return sorted(tasks, key=lambda task: (task[1], seconds.get((task[0].name, task[1]), 0.0)))


app = typer.Typer(add_completion=False)


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="the file of the records")] = RECORDS,
    most_seconds: Annotated[float, typer.Option(help="problems that take longer are left out")] = 1.0,
    part: Annotated[int, typer.Option(help="take every second problem, beginning with this one; -1 for all")] = -1,
    baseline: Annotated[bool, typer.Option(help="only run the problems unchanged")] = False,
) -> None:
    """Run what is not recorded yet."""
    torch.set_num_threads(1)
    records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["number"], row["factor"], row["problem"], row["start"]) for row in records}
    known = {(row["problem"], row["start"]): row for row in records if row["number"] == ""}
    every = numbers()
    with out.open("a") as file:
        for i, (entry, start) in enumerate(_tasks(most_seconds, records)):
            if part >= 0 and i % 2 != part:
                continue
            row = known.get((entry.name, start))
            if row is None:
                begin = time.perf_counter()
                limit = 60 * most_seconds
                try:
                    with _time_limit(limit):
                        now = outcome(entry, start)
                except _OverTimeError:
                    now = {"status": "over time", "right": False, "x": [], "F": math.nan, "work": 0}
                seconds = time.perf_counter() - begin
                row = {
                    "number": "",
                    "factor": 1.0,
                    "problem": entry.name,
                    "start": start,
                    "group": entry.group,
                    "seconds": seconds,
                }
                row |= now
                print(json.dumps(row), file=file, flush=True)
            if baseline or row["seconds"] > most_seconds:
                continue
            with read_by() as reading:
                outcome(entry, start)
            for number in every:
                if number not in reading:
                    continue
                for factor in FACTORS:
                    if (str(number), factor, entry.name, start) in done:
                        continue
                    try:
                        with _time_limit(PATIENCE * row["seconds"] + 1), changed(number, factor):
                            found = effect(row, outcome(entry, start))
                    except _OverTimeError:
                        found = "work"
                    except Exception as error:
                        found = f"error: {type(error).__name__}"
                    line = {"number": str(number), "factor": factor, "problem": entry.name, "start": start, "effect": found}
                    print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    app()
