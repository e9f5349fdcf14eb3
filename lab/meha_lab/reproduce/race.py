"""Measure a cell: time and work to a target, memory, rates, training, or one call of solve; the record has plain numbers."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meha.lower.proximal_gradient import solve_lower
from meha.method.status import Status
from meha.methods import Run
from meha.problem.oracle import Oracle
from meha.problem.schedules import evaluate
from meha.problems import KnownProblem
from meha.tensors.variables import Variable
from meha_lab.baselines.semismooth import QuadraticLower
from meha_lab.reproduce import learning, rates
from meha_lab.reproduce.architecture import measure_architecture
from meha_lab.reproduce.cells import OWN_ENDS, Case, Cell, Record, ended
from meha_lab.reproduce.memory import peak
from meha_lab.reproduce.solving import solve_cell
from meha_lab.reproduce.starts import from_starts
from meha_lab.reproduce.task_runs import measure_task

__all__ = ["measure", "processor"]


WARM_STEPS, WARM_SECONDS = 3, 0.5
"""Limits of the throwaway run before the clock starts, by steps and by time."""

MEMORY_STEPS, LONGEST = 3, 1000
"""Steps over which memory is measured: of methods with settings, and at most of those that end by themselves."""

DENSITY = 1.15
"""Ratio of the step numbers at which a curve is recorded."""

UNDRAWN = ("gradients", "null error")
"""Columns that no figure shows: curves leave them out."""

LOWER_TOL = 1e-6
"""Accuracy of the lower level where weights are judged."""

SETTLED, LOOK = 1e-10, 200
"""A run that misses the target has settled elsewhere when (x, y) changes by at most this share in this number of steps."""


def measure(cell: Cell) -> Record:
    """Run a cell. Failures of the method are results; only errors of the program are raised."""
    begin = time.perf_counter()
    kinds: dict[str, Callable[[Cell], Record]] = {
        "race": _race,
        "memory": _memory,
        "rates": _rates,
        "training": learning.train,
        "solve": solve_cell,
        "starts": from_starts,
        "architecture": measure_architecture,
        "task": measure_task,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the theorem's range, for example, which the page discusses
        found = kinds[cell.kind](cell)
    about = {"case": cell.case.name, "method": cell.name, "setting": str(dict(cell.setting)), "seed": cell.seed}
    took = time.perf_counter() - begin
    machine = processor()
    if cell.kind in ("training", "architecture", "task") and torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()} with {machine}"
    return _plain({**about, **found, "took": took, "machine": machine, "torch": str(torch.__version__)})


def processor() -> str:
    """The model of the processor, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _plain(value: Any, digits: int = 5) -> Any:
    """The same values with five digits, curves with four; None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(item, 4 if name == "curve" else digits) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def clock(run: Run) -> float:
    """The time that a run has taken."""
    return run.seconds


def _race(cell: Cell) -> Record:
    case = cell.case
    problem = case.problem(cell.seed)
    try:
        method = cell.contender.build(problem, cell.setting)
        _warm_up(cell, problem)
        run = method.start(problem, problem.x0, problem.y0)
    except ValueError as refusal:
        return {"outcome": f"refused: {refusal}", "reached": None, "last": {}, "curve": {}, "at weights": []}
    course = _Course(case, problem, run, to_the_end=cell.contender.automatic)
    outcome = course.note()
    while not outcome:
        try:
            run.step()
        except ValueError as refusal:
            outcome = f"refused: {refusal}"
        else:
            outcome = course.note()
    if outcome not in ("target", *OWN_ENDS):
        course.reached = None  # it was not there long enough to say that it stays
    return {"outcome": outcome, **course.result()}


def _warm_up(cell: Cell, problem: KnownProblem) -> None:
    """Let libraries load and caches fill in a run that is thrown away, on small data where steps are long."""
    if cell.case.data:
        problem = cell.case.build(m=30, groups=3)
    run = cell.contender.build(problem, cell.setting).start(problem, problem.x0, problem.y0)
    while run.verdict is None and run.k < WARM_STEPS and clock(run) <= WARM_SECONDS:
        run.step()


class _Course:
    """The course of a run, observed while the clock stands still; ``to_the_end``: the target does not end it."""

    def __init__(self, case: Case, problem: KnownProblem, run: Run, to_the_end: bool) -> None:
        self.case, self.problem, self.run, self.to_the_end = case, problem, run, to_the_end
        self.reached: dict[str, float] | None = None
        self.rows: list[dict[str, float]] = []
        self.looks: list[tuple[dict[str, float], torch.Tensor]] = []
        self.kept: list[torch.Tensor] = []
        self.previous = run.x.clone()
        self.next = 0

    def note(self) -> str:
        """Look at the run after a step; the outcome if it is over, else nothing."""
        run, case, seconds = self.run, self.case, clock(self.run)
        work = run.counts.upper + run.counts.lower + run.counts.hvp
        now = {"step": run.k, "seconds": seconds, "work": work, "gradients": run.counts.upper + run.counts.lower}
        error = math.inf
        if case.target is not None:
            x, y = self.problem.distance(run.x, run.y)
            error = max(x, y) if math.isfinite(x + y) else math.inf
            now |= {"error x": x, "error y": y}
            if error > case.target:
                self.reached = None
            elif self.reached is None:
                self.reached = dict(now)
        outcome = self._over(run.k, seconds, work, error)
        if run.k >= self.next or outcome:
            self._record(now)
        self.previous.copy_(run.x)
        return outcome

    def _over(self, k: int, seconds: float, work: int, error: float) -> str:
        run, case = self.run, self.case
        if run.verdict is not None:
            return ended(run.verdict)
        if case.target is not None and k and error > 1e6:
            return "diverged"
        held = self.reached is not None and work >= self.reached["work"] + max(self.reached["work"], case.stay)
        if held and not self.to_the_end:
            return "target"
        if case.steps is not None and k >= case.steps:
            return "steps"
        if case.rest is not None and k and float((run.x - self.previous).norm()) <= case.rest * float(run.x.norm()):
            return "rest"
        if held or not self.reached:
            if work >= case.work:
                return "target" if held else "work"
            if seconds >= case.seconds:
                return "target" if held else "time"
        if k % LOOK == 0 and case.target is not None and not self.reached:
            before, self.kept = self.kept, [run.x.clone(), run.y.clone()]
            if before and run.settled:
                moved = sum(float((a - b).norm()) for a, b in zip(before, self.kept, strict=True))
                if moved <= SETTLED * sum(float(a.norm()) for a in self.kept):
                    return "settled"
        return ""

    def _record(self, now: dict[str, float]) -> None:
        run = self.run
        self.next = max(run.k + 1, math.ceil(run.k * DENSITY))
        with torch.no_grad():
            row = {**now, "F": float(self.problem.upper(run.x, run.y))}
        alpha = getattr(run.method, "alpha", None)
        if alpha is not None and run.k:
            row["direction"] = float((run.x - self.previous).norm()) / evaluate("alpha", alpha, run.k - 1)
        for name, value in self.problem.metrics.items():
            row[name] = value(run.x, run.y)
            if not self.case.looks and hasattr(run.state, "theta"):
                row[f"{name} of theta"] = value(run.x, run.state.theta.detached())
        self.rows.append(row)
        if self.case.target is None and run.k and self.case.looks:
            self.looks.append((now, run.x.clone()))

    def result(self) -> Record:
        names = [name for name in dict.fromkeys(name for row in self.rows for name in row) if name not in UNDRAWN]
        curve = {name: [row.get(name) for row in self.rows] for name in names if self.case.looks}
        return {"reached": self.reached, "last": self.rows[-1], "curve": curve, "at weights": self._at_weights()}

    def _at_weights(self) -> list[dict[str, float]]:
        """Validation and test error of the lower solution at the weights of some steps, whatever the method's y is."""
        if not self.looks:
            return []
        chosen = self.looks[:: max(1, math.ceil(len(self.looks) / self.case.looks))]
        if chosen[-1] is not self.looks[-1]:
            chosen.append(self.looks[-1])
        lower = self._solver()
        found, y, values, before = [], Variable(self.problem.y0, "y"), dict[str, float](), None
        for now, weights in chosen:
            if before is not None and torch.equal(weights, before):
                found.append({**now, **values})
                continue
            x, before = Variable(weights, "x"), weights
            y = lower(x, y)
            values = {"F": float(self.problem.upper(x.value, y.detached()))}
            values |= {name: metric(x.detached(), y.detached()) for name, metric in self.problem.metrics.items()}
            found.append({**now, **values})
        return found

    def _solver(self) -> Callable[[Variable, Variable], Variable]:
        """Solves the lower level of the problem."""
        x, y = Variable(self.problem.x0, "x"), Variable(self.problem.y0, "y")
        oracle = Oracle(self.problem, x, y)
        try:
            quadratic = QuadraticLower.read(oracle, x, y, "the group lasso")
        except ValueError:
            return lambda x, y: solve_lower(oracle, x, y, tol=LOWER_TOL, max_steps=20_000).theta
        return lambda x, y: quadratic.solve(x, y, tol=LOWER_TOL, max_steps=2000).theta


def _memory(cell: Cell) -> Record:
    """Peak of tracked allocations above the start, over the start of a run and some steps; automatic methods remember more as
    they run, and are followed to their end."""
    problem, steps = cell.case.problem(cell.seed), LONGEST if cell.contender.automatic else MEMORY_STEPS
    size = sum(tensor.numel() * tensor.element_size() for tensor in (problem.x0, problem.y0))

    def work() -> None:
        run = method.start(problem, problem.x0, problem.y0)
        while run.verdict is None and run.k < steps:
            run.step()
        if run.verdict is not None and run.verdict.status is Status.BROKE_DOWN:
            raise ValueError(run.verdict.message)

    try:
        method = cell.contender.build(problem, cell.setting)
        _warm_up(cell, problem)
        return {"outcome": "measured", "peak": peak(work), "size": size}
    except ValueError as failure:
        return {"outcome": f"failed: {failure}", "peak": None, "size": size}


def _rates(cell: Cell) -> Record:
    """The curves of a theorem on a problem; the setting names the trial and p. For an automatic run, where it ends."""
    trial = rates.TRIALS[cell.setting["trial"]]
    if cell.contender.automatic:
        return trial.end(cell.contender.build(trial.problem(), {}))
    p = cell.setting["p"]
    return {"outcome": "measured", "curve": trial.measure(p, cell.case.steps)}
