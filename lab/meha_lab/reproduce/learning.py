"""Learning tasks as cells: a method trains on data, and is evaluated while the clock stands still; settings that were tried."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch

from meha.methods import Method, Optimizer, Run, default_method
from meha.methods.stochastic import NetworkSOBA
from meha.problem.loaders import Endless
from meha.problem.schedules import InversePower, Power, Ramp
from meha_lab.reproduce.cells import Cell, Record, ended
from meha_lab.reproduce.contenders import Setting

__all__ = [
    "Attempt",
    "Attempts",
    "announce",
    "attempted",
    "best",
    "build",
    "chosen",
    "device",
    "lines",
    "loss",
    "shipped",
    "train",
]


WARM_STEPS = 2

COST = 2.7
"""Mean gradients in a step of NetworkSOBA: two while x rests, else three."""

Attempt = list[Any]
"""A setting that was tried, with accuracy and F1 for "hyper-cleaning", or batches and seconds to the target for "few-shot".

Both numbers are None where the run failed. A setting alone is declared, and not yet tried."""

Attempts = dict[str, dict[str, list[Attempt]]]
"""By task and method."""

SCHEDULES: Mapping[str, Callable[..., Any]] = {"Power": Power, "Ramp": Ramp, "InversePower": InversePower}


@cache
def shipped() -> Attempts:
    """The attempts that come with the package."""
    return json.loads((files("meha_lab.reproduce") / "learning.json").read_text())


def loss(task: str, attempt: Attempt) -> float:
    """How good an attempt was (low is good); infinite where it failed."""
    first, second = attempt[1:] or (None, None)
    if first is None or second is None:
        return math.inf
    return -(first + second) if task == "hyper-cleaning" else second


def best(task: str, attempts: Sequence[Attempt], *, single_loop: bool = False) -> Setting:
    """The setting of the best attempt; of those with one inner step, if ``single_loop``."""
    allowed = [attempt for attempt in attempts if not single_loop or attempt[0].get("inner_steps", 1) == 1]
    return min(allowed, key=lambda attempt: loss(task, attempt))[0]


def chosen(task: str, method: str, *, single_loop: bool = False) -> Setting:
    """The best of the shipped attempts.

    >>> chosen("few-shot", "RHG")["inner_steps"]
    2
    """
    return best(task, shipped()[task][method], single_loop=single_loop)


def attempted(task: str, setting: Setting, record: Record) -> Attempt:
    """A record of a trial as a row of ``learning.json``."""
    if task == "hyper-cleaning":
        last = record["last"]
        return [setting, *(None if last[name] is None else round(last[name], 4) for name in ("accuracy", "f1"))]
    reached = record["reached"]
    return [setting, None, None] if reached is None else [setting, reached["step"], round(reached["seconds"], 2)]


def lines(attempts: Attempts) -> dict[str, dict[str, str]]:
    """The rows of all attempts as JSON, one in a line."""
    return {
        task: {name: "[\n   " + ",\n   ".join(map(json.dumps, rows)) + "\n  ]" for name, rows in methods.items()}
        for task, methods in attempts.items()
    }


def build(kind: type[Method], setting: Setting, examples: int = 1) -> Method:
    """The method of a setting. Schedules are written as their name and numbers, ``lr`` is that of Adam for x (a number, or a
    schedule), and alpha is multiplied by the number of examples: in hyper-cleaning x_i moves along a mean over all of them.

    >>> from meha.methods import F2SA
    >>> build(F2SA, {"alpha": 0.1, "c": {"Power": [0.15, 0.5]}}, examples=50).alpha
    5.0
    """
    numbers = {name: _read(value, examples if name == "alpha" else 1) for name, value in setting.items() if name != "pool"}
    if "lr" in numbers:
        numbers["x_optimizer"] = _adam(numbers.pop("lr"))
    return kind(**numbers)


def _adam(lr: Any) -> Any:
    """Adam with a rate, or with one that follows a schedule."""
    if not callable(lr):
        return partial(torch.optim.Adam, lr=lr)
    scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda k: lr(k) / lr(0))
    return Optimizer(torch.optim.Adam, lr=lr(0), scheduler=scheduler)


def _read(value: Any, scale: float) -> Any:
    if isinstance(value, Mapping):
        ((name, (first, *rest)),) = value.items()
        rest = [rest[0] * scale, *rest[1:]] if name == "Ramp" else rest
        return SCHEDULES[name](first * scale, *rest)
    return value * scale if scale != 1 else value


def device() -> torch.device:
    """The device on which tasks run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(cell: Cell) -> Record:
    """Train, and record accuracy and the like against steps, time and work; until the target, if there is one."""
    case, where = cell.case, device()
    pool = {"pool": cell.setting["pool"]} if "pool" in cell.setting else {}
    task = case.build(**dict(case.arguments), **pool, seed=cell.seed, device=where)
    method = _method(cell, task)
    _throw_away(method, task)
    run, batches = method.start(task.problem, *task.start()), Endless(task.batches())
    announce(run, case.work, case.steps)
    seconds, rows, next_look, outcome = 0.0, list[dict[str, float]](), 0.0, ""
    while not outcome:
        counts = run.counts
        now = {"step": run.k, "seconds": seconds, "gradients": counts.upper + counts.lower}
        now["work"] = now["gradients"] + counts.hvp
        spent = now["work"] / case.work if case.steps is None else run.k / case.steps
        if run.verdict is not None:
            outcome = ended(run.verdict)
        elif spent >= 1 or seconds >= case.seconds:
            outcome = "work" if spent >= 1 else "time"
        if spent >= next_look or outcome:
            next_look = (math.floor(spent * case.looks + 1e-9) + 1) / case.looks
            rows.append({**now, **task.evaluate(run.x, run.y)})
            if not all(math.isfinite(value) for value in rows[-1].values()):
                outcome = "diverged"
            elif case.target is not None and rows[-1]["accuracy"] >= case.target:
                outcome = "target"
        if not outcome:
            begin = time.perf_counter()
            run.step(next(batches))
            _wait(where)
            seconds += time.perf_counter() - begin
    curve = {name: [row[name] for row in rows] for name in rows[0]}
    reached = rows[-1] if outcome == "target" else None
    return {"outcome": outcome, "reached": reached, "last": rows[-1], "curve": curve}


def _method(cell: Cell, task: Any) -> Method:
    """The method of a cell for a task; alpha is given for one example."""
    x0, y0 = task.start()
    if cell.contender.kind is None:
        batches = None if next(iter(task.batches())) is None else task.batches()  # a task on all data yields no batches
        return replace(default_method(task.problem, x0, y0, batches), **cell.setting)
    return build(cell.contender.kind, cell.setting, x0.numel() if isinstance(x0, torch.Tensor) else 1)


def announce(run: Run, work: float, steps: int | None = None) -> None:
    """Tell NetworkSOBA, whose rates fall to the end, how many steps it will take."""
    if isinstance(run.method, NetworkSOBA):
        run.last = steps or round(work / COST)


def _throw_away(method: Method, task: Any) -> None:
    """Let libraries load and caches fill."""
    run, batches = method.start(task.problem, *task.start()), Endless(task.batches())
    while run.verdict is None and run.k < WARM_STEPS:
        run.step(next(batches))
    task.evaluate(run.x, run.y)


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
