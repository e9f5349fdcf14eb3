"""Learning tasks as cells: a method trains on data, and what it has learned is looked at outside of its clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from meha.loaders import Endless
from meha.methods import Method
from meha.reproduce.cells import Cell
from meha.reproduce.contenders import Setting
from meha.schedules import InversePower, Power, Ramp

__all__ = ["Trial", "build", "chosen", "device", "train", "trials"]

Record = dict[str, Any]

WARM_STEPS = 2

SCHEDULES: Mapping[str, Callable[..., Any]] = {"Power": Power, "Ramp": Ramp, "InversePower": InversePower}


class Trial(NamedTuple):
    """A setting that was tried on the seed for choosing, and how good it was (low is good); infinite where it failed."""

    setting: Setting
    loss: float


@cache
def trials(task: str) -> Mapping[str, list[Trial]]:
    """What was tried for each method: ``learning.json`` holds accuracy and F1 for "hyper-cleaning", and for "few-shot" the
    batches and seconds to the target."""
    found = json.loads((files("meha.reproduce") / "learning.json").read_text())[task]

    def loss(first: float | None, second: float | None) -> float:
        if first is None or second is None:
            return math.inf
        return -(first + second) if task == "hyper-cleaning" else second

    return {method: [Trial(setting, loss(*told)) for setting, *told in rows] for method, rows in found.items()}


def chosen(task: str, method: str) -> Setting:
    """The best of the settings that were tried.

    >>> chosen("few-shot", "RHG")["inner_steps"]
    2
    """
    return min(trials(task)[method], key=lambda trial: trial.loss).setting


def build(kind: type[Method], setting: Setting, examples: int = 1) -> Method:
    """The method of a setting. Schedules are written as their name and numbers, ``lr`` is that of Adam for x, and alpha is
    given for one example: x_i of hyper-cleaning moves along a mean over so many.

    >>> from meha.methods import F2SA
    >>> build(F2SA, {"alpha": 0.1, "c": {"Power": [0.15, 0.5]}}, examples=50).alpha
    5.0
    """
    numbers = {name: _read(value, examples if name == "alpha" else 1) for name, value in setting.items() if name != "pool"}
    if "lr" in numbers:
        numbers["x_optimizer"] = partial(torch.optim.Adam, lr=numbers.pop("lr"))
    return kind(**numbers)


def _read(value: Any, scale: float) -> Any:
    if isinstance(value, Mapping):
        ((name, (first, *rest)),) = value.items()
        rest = [rest[0] * scale, *rest[1:]] if name == "Ramp" else rest
        return SCHEDULES[name](first * scale, *rest)
    return value * scale if scale != 1 else value


def device() -> torch.device:
    """Where tasks run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(cell: Cell) -> Record:
    """Train, and record accuracy and the like against steps, time and work; until the target, if there is one."""
    case, where = cell.case, device()
    pool = {"pool": cell.setting["pool"]} if "pool" in cell.setting else {}
    task = case.build(**dict(case.arguments), **pool, seed=cell.seed, device=where)
    x0, _ = task.start()
    method = build(cell.contender.kind, cell.setting, x0.numel() if isinstance(x0, torch.Tensor) else 1)
    _throw_away(method, task)
    run, batches = method.start(task.problem, *task.start()), Endless(task.batches())
    seconds, rows, next_look, outcome = 0.0, list[dict[str, float]](), 0.0, ""
    while not outcome:
        counts = run.counts
        now = {"step": run.k, "seconds": seconds, "gradients": counts.upper + counts.lower}
        now["work"] = now["gradients"] + counts.hvp
        spent = now["work"] / case.work if case.steps is None else run.k / case.steps
        outcome = "work" if spent >= 1 else "time" if seconds >= case.seconds else ""
        if spent >= next_look or outcome:
            next_look = (math.floor(spent * case.looks + 1e-9) + 1) / case.looks
            rows.append({**now, **task.evaluate(run.x, run.y)})
            if not all(math.isfinite(value) for value in rows[-1].values()):
                outcome = "diverged"
            elif case.target is not None and rows[-1]["accuracy"] >= case.target:
                outcome = "target"
        if outcome:
            break
        begin = time.perf_counter()
        run.step(next(batches))
        _wait(where)
        if run.ended is not None:
            outcome = str(run.ended.status)
        seconds += time.perf_counter() - begin
    curve = {name: [row[name] for row in rows] for name in rows[0]}
    reached = rows[-1] if outcome == "target" else None
    return {"outcome": outcome, "description": run.method.describe(), "reached": reached, "last": rows[-1], "curve": curve}


def _throw_away(method: Method, task: Any) -> None:
    """Let libraries load and caches fill."""
    run, batches = method.start(task.problem, *task.start()), Endless(task.batches())
    for _ in range(WARM_STEPS):
        if run.ended is not None:
            return
        run.step(next(batches))
    task.evaluate(run.x, run.y)


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
