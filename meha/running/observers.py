"""Observers: functions that see every step of a run, for ``solve(..., callbacks=...)``."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meha.engines.base import Engine
from meha.method.method import Run, StepInfo
from meha.method.status import Status, Verdict
from meha.tensors.checks import check_count, check_positive
from meha.tensors.state import Saved
from meha.tensors.variables import norm, subtract

__all__ = ["DivergenceGuard", "History", "Observer", "Progress", "Recorder", "SkipBadBatches", "Validate", "ValidationWarning"]


class ValidationWarning(UserWarning):
    """F falls while a measure on other data gets worse."""


class Validate(Saved):
    """Early stopping: measures x and y during a run on data that neither level uses, and keeps the best iterate.

    F falls as long as y can fit its data, also when x and y get worse on other data. With this observer among the callbacks of
    :func:`meha.solve`, the solution has x and y where the score was best, modules included, and the history has a column
    ``score``. A warning (:class:`ValidationWarning`) says when F falls while the score gets worse. In a run of several
    processes, the score is the mean of theirs.

    Args:
        score: a function of (x, y) that returns a number, such as the loss on a third set of data.
        every: number of steps between two evaluations.
        patience: number of evaluations without a better score after which the run ends; None for never.
        larger_is_better: True for measures such as an accuracy.

    Attributes:
        best: the best score so far; NaN before the first.
        step: the step at which it was reached.

    >>> import meha, torch
    >>> problem = meha.problems.strong_convex(n=2)
    >>> method = meha.RHG(alpha=0.02, beta=0.5)  # x goes to 1/2
    >>> validate = Validate(lambda x, y: (x - 1).square().sum(), every=1, patience=2)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, method, callbacks=validate)
    >>> print(solution.status, float(abs(solution.x - 1).max()) < 0.05, solution.steps - validate.step)
    rule met True 2
    """

    agrees = True  # all processes see the same mean of the scores, and so decide alike
    saves = ("best", "step", "upper", "since", "_warned", "_kept")
    NOTICED = 3
    """Evaluations in a row without a better score, with F below its value at the best, at which the warning comes."""

    def __init__(
        self,
        score: Callable[[Any, Any], Any],
        every: int = 100,
        patience: int | None = 10,
        *,
        larger_is_better: bool = False,
    ) -> None:
        if not callable(score):
            raise TypeError(f"Validate: score must be a function of (x, y), got {type(score).__name__}.")
        check_count("Validate: every", every)
        if patience is not None:
            check_count("Validate: patience", patience)
        self.score, self.every, self.patience, self.larger_is_better = score, every, patience, larger_is_better
        self._forget()

    def _forget(self) -> None:
        self.best, self.step, self.upper, self.since, self._warned = math.nan, 0, math.nan, 0, False
        self._kept: dict[str, dict[str, Tensor]] = {}

    def begin(self, run: Run, max_steps: int) -> None:
        """Forget earlier runs."""
        self._forget()

    def __call__(self, run: Run, info: StepInfo) -> Verdict | Mapping[str, float] | None:
        if not info.due(self.every):
            return None
        with torch.no_grad():
            score = float(self.score(run.x, run.y))
            if run.group is not None:
                score = float(run.oracle.mean(torch.tensor(score, device=run.state.y.device)))
        sign = -1 if self.larger_is_better else 1
        if math.isnan(self.best) or sign * score < sign * self.best:  # a score that is NaN is never better
            if not math.isnan(score):
                self.best, self.step, self.upper, self.since = score, info.step, info.get("upper", math.nan), 0
                self._kept = {"x": run.state.x.state_dict(), "y": run.state.y.state_dict()}
        else:
            self.since += 1
        if self.since >= self.NOTICED and not self._warned and info.get("upper", math.inf) < self.upper:
            self._warned = True
            warnings.warn(
                f"Validate: F fell from {self.upper:.3g} to {info['upper']:.3g} since step {self.step}, while the score went"
                f" from {self.best:.3g} to {score:.3g}: x or y fits the data of the upper level only. See docs/responses.md.",
                ValidationWarning,
                stacklevel=2,
            )
        if self.patience is not None and self.since >= self.patience:
            evaluations = f"{self.since} evaluation{'s' * (self.since != 1)}"
            return Verdict(
                Status.RULE_MET,
                f"The score was not better than {self.best:.3g} in {evaluations}; x and y of step {self.step} are returned.",
            )
        return {"score": score}

    def restore(self, run: Run) -> None:
        """Put the best iterate into the variables of a run that is over."""
        for name, state in self._kept.items():
            getattr(run.state, name).load_state_dict(state)


Observer = Callable[[Run, StepInfo], Verdict | Mapping[str, float] | bool | None]


def work(run: Run) -> dict[str, int]:
    """Return the numbers of gradients and products that a run has taken, by their names in histories and logs."""
    counts = run.counts
    return {"gradients_upper": counts.upper, "gradients_lower": counts.lower, "hessian_products": counts.hvp}


class History(Mapping[str, list[float]]):
    """The numbers of the recorded steps, by name: ``history["upper"]`` is a list with one entry per recorded step.

    >>> history = History()
    >>> history.append({"step": 1, "upper": 2.0})
    >>> history.append({"step": 2, "upper": 1.0, "error": 0.5})
    >>> history["upper"], history["error"]
    ([2.0, 1.0], [nan, 0.5])
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}
        self._rows = 0

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; a column that is new is NaN in the earlier rows."""
        for name in row:
            if name not in self._columns:
                self._columns[name] = [float("nan")] * self._rows
        self._rows += 1
        for name, column in self._columns.items():
            column.append(float(row.get(name, float("nan"))))

    def cut(self, rows: int) -> None:
        """Keep the first rows."""
        self._columns, self._rows = {name: column[:rows] for name, column in self._columns.items()}, min(rows, self._rows)

    def thin(self) -> None:
        """Keep every second row, beginning with the second."""
        # These are the steps that are multiples of twice the interval, so that the rows to come continue the pattern.
        self._columns, self._rows = {name: column[1::2] for name, column in self._columns.items()}, self._rows // 2

    def state_dict(self) -> dict[str, Tensor]:
        """Return the columns, as tensors."""
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the columns of another history."""
        self._columns = {name: column.tolist() for name, column in state.items()}
        self._rows = max((len(column) for column in self._columns.values()), default=0)

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"History({self._rows} row{'s' * (self._rows != 1)} of {', '.join(self._columns)})"


class Recorder(Saved):
    """Records the history of a run. ``solve`` has one; pass your own to record fewer steps.

    Args:
        every: record the steps that are multiples of it, and the last.
        limit: upper bound on the number of rows. When there are more, every second one is dropped, and from then on half as
            many are recorded: a checkpoint, which holds the history, does not grow without end.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> few = Recorder(limit=4)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, problem.preset("paper"), max_steps=11, callbacks=few)
    >>> solution.history["step"]
    [4.0, 8.0, 11.0]
    """

    saves = ("history", "_last", "_interval")

    def __init__(self, every: int = 1, limit: int = 100_000) -> None:
        check_count("Recorder: every", every)
        check_count("Recorder: limit", limit)
        self.every, self.limit, self.history = every, limit, History()

    def begin(self, run: Run, max_steps: int) -> None:
        """Begin a new history."""
        self.history, self._interval = History(), self.every  # of the steps that are recorded now
        self._last: dict[str, float] | None = None  # the row of the last step if it is not recorded yet: end() needs it

    def __call__(self, run: Run, info: StepInfo) -> None:
        row = {"step": info.step, "seconds": run.seconds, **info, **work(run)}
        self._last = None if info.due(self._interval) else row
        if self._last is None:
            self.history.append(row)
            if len(self.history["step"]) > self.limit:
                self.history.thin()
                self._interval *= 2
                self._last = row if self.history["step"][-1] != info.step else None  # thinning may have dropped this step

    def forget(self, step: int) -> None:
        """Drop the rows after a step to which the run went back."""
        self.history.cut(sum(k <= step for k in self.history.get("step", [])))
        self._last = None

    def end(self, run: Run) -> None:
        """Record the last step."""
        if self._last is not None:
            self.history.append(self._last)
            self._last = None


class DivergenceGuard(Saved):
    """Ends a run that diverges, but not one whose solution is far away. ``solve`` has one; pass your own for another limit.

    At steps 64, 128, 256, ... (or when they have been passed) it examines the second half of the run so far. A run that
    approaches a point slows down; one that drifts keeps its pace and at most doubles its distance from the start. A run counts
    as diverging if, over three windows in a row, its steps become longer and its distance grows 1.5 times each, F grows over
    the last two, the last step is longer than the mean, and the distance is large at all.

    Args:
        limit: the run counts as diverged in any case when ||(x, y)|| exceeds this many times 1 + ||(x0, y0)||; for engines,
            which search along each step, the square of it.
    """

    saves = ("start", "_scale", "_windows", "_moved", "_upper", "_length")
    FIRST = 32
    """Earlier steps say nothing about a trend."""
    WINDOWS = 4
    """Windows that are compared: three changes in a row."""
    FAR = 10.0
    """The distance, in units of 1 + ||(x0, y0)||, below which a run is never called diverging."""
    FURTHER, LONGER = 1.5, 1.05
    """The least growth from window to window of the distance, and of the mean step, in a run that diverges."""

    def __init__(self, limit: float = 1e8) -> None:
        check_positive("DivergenceGuard: limit", limit)
        self.limit = limit

    def begin(self, run: Run, max_steps: int) -> None:
        """Remember the start."""
        self.start = [leaf.detach().clone() for leaf in run.state.x.leaves + run.state.y.leaves]
        self._scale = 1 + float(norm(self.start))  # 1, so that a start at zero has a scale
        self._windows: list[tuple[float, float, float]] = []  # distance, mean step and mean F of each
        self._moved, self._upper, self._length = 0.0, 0.0, 0

    def __call__(self, run: Run, info: StepInfo) -> Verdict | None:
        if info.size > self.limit ** (2 if isinstance(run.method, Engine) else 1) * self._scale:
            return Verdict(Status.DIVERGED, f"||(x, y)|| reached {info.size:.1e} at step {info.step}.")
        self._moved += info.span * info.moved  # of a compiled group, only the last step is measured; it stands for all
        self._upper += info.span * info.get("upper", 0.0)
        self._length += info.span
        before = info.step - info.span
        if info.step < self.FIRST or info.step.bit_length() == before.bit_length():  # no power of two was passed
            return None
        distance = float(norm(subtract([leaf.detach() for leaf in run.state.x.leaves + run.state.y.leaves], self.start)))
        if before >= self.FIRST:  # the window before step 32 only sets the sums to zero
            self._windows.append((distance, self._moved / self._length, self._upper / self._length))
        self._moved, self._upper, self._length = 0.0, 0.0, 0
        if len(self._windows) < self.WINDOWS or distance < self.FAR * self._scale:
            return None
        recent = self._windows[-self.WINDOWS :]
        away = all(b[0] > self.FURTHER * a[0] and b[1] > self.LONGER * a[1] for a, b in itertools.pairwise(recent))
        worse = recent[-3][2] < recent[-2][2] < recent[-1][2]
        if not (away and worse and info.moved > recent[-1][1]):
            return None
        reason = f"The steps grow and lead away from the start: distance {distance:.3g} after {info.step} steps, F growing."
        return Verdict(Status.DIVERGED, reason)


class SkipBadBatches(Saved):
    """Skips batches on which a step gives NaN or infinity: ``solve(..., callbacks=SkipBadBatches())``.

    The run goes back to before the step, and takes the next batch; steps left out do not count towards ``max_steps``. Each
    step first copies the whole state of the run, which takes memory and time.

    Args:
        limit: end the run after this many bad batches in a row, since the cause is then not the batches.

    Attributes:
        skipped: which batches were skipped, in words.

    >>> import meha, torch
    >>> batches = [1.0, torch.nan, 2.0]
    >>> problem = meha.Problem(lambda x, y, b: (x - y).square().sum(), lambda x, y, b: (y - b).square().sum() + (x * y).sum())
    >>> skip = SkipBadBatches()
    >>> solution = meha.solve(problem, torch.ones(1), torch.ones(1), batches=batches, callbacks=skip, max_steps=4)
    >>> solution.steps, skip.skipped
    (4, ['batch 2 of this pass', 'batch 2 of this pass'])
    """

    agrees = True  # it never stops a run: the loop does, after too many bad batches
    saves = ("skipped",)

    def __init__(self, limit: int = 10) -> None:
        check_count("SkipBadBatches: limit", limit)
        self.limit, self.skipped, self._row = limit, list[str](), 0
        self._state: dict[str, Any] = {}

    def begin(self, run: Run, max_steps: int) -> None:
        """Forget the batches of an earlier run."""
        self.skipped, self._row = [], 0

    def keep(self, run: Run) -> None:
        """Save the state of the run before a step."""
        self._state = run.state.state_dict()

    def skip(self, run: Run, name: str) -> bool:
        """Undo the last step; False after too many bad batches in a row."""
        self._row += 1
        if self._row > self.limit:
            return False
        run.state.load_state_dict(self._state)
        self.skipped.append(name)
        return True

    def __call__(self, run: Run, info: StepInfo) -> Mapping[str, float]:
        self._row = 0  # it is called after good steps only
        return {"skipped": len(self.skipped)}


class Progress:
    """Shows a run in the terminal: its step, pass, F, penalty c and estimates. Needs rich: ``pip install "meha[progress]"``.

    A bar and the time left are shown only for methods that take all ``max_steps``. Of several processes, the first shows it.
    """

    agrees = True  # it never stops a run
    SHOWN = (("run", "pass"), ("upper", "F"), ("c", "c"), ("gap", "gap"), ("residual", "residual"), ("change", "change"))

    def __init__(self) -> None:
        try:
            from rich import progress
        except ImportError as error:
            raise ImportError('Progress needs rich; install it with: pip install "meha[progress]"') from error
        self._shown = progress.TextColumn("{task.description}")
        self._bar = progress.Progress(progress.SpinnerColumn(), progress.TimeElapsedColumn(), self._shown)
        self._counted = progress.Progress(progress.BarColumn(), progress.TimeRemainingColumn(), self._shown)

    def begin(self, run: Run, max_steps: int) -> None:
        """Show the bar."""
        self._bar = self._counted if run.method.open_ended else self._bar  # others may end at any step, so nobody knows when
        self._total = f" of {max_steps}" if run.method.open_ended else ""
        self._task = self._bar.add_task("", total=max_steps if run.method.open_ended else None, completed=run.k)
        if run.main:
            self._bar.start()

    def __call__(self, run: Run, info: StepInfo) -> None:
        known = [(word, info[name]) for name, word in self.SHOWN if name in info]
        numbers = "  ".join(f"{word} {value:.3g}" for word, value in known if not math.isnan(value))  # NaN: not measured
        self._bar.update(self._task, completed=run.k, description=f"step {run.k}{self._total}  {numbers}")

    def end(self, run: Run) -> None:
        """Stop the bar."""
        self._bar.stop()
