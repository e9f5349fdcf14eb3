"""solve(): the loop around a run, with stopping, history, callbacks and a progress bar."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from meha.checks import check_count, check_positive, check_tolerance
from meha.methods import MEHA, Method, Run, StepInfo
from meha.problem import Problem
from meha.solution import History, Solution, Status
from meha.stopping import RelativeChange, Rule
from meha.variables import Leaves, Variable, copy_, norm, subtract

__all__ = ["Callback", "solve"]

RESERVED = ("step", "seconds", "gradients_upper", "gradients_lower", "hessian_products")
"""Columns of the history besides the numbers of the steps."""

Callback = Callable[[Run, StepInfo], bool | Mapping[str, float] | None]


def solve(
    problem: Problem,
    x0: Any,
    y0: Any,
    method: Method | None = None,
    *,
    max_steps: int = 10_000,
    tol: float | None = 1e-8,
    stop: Rule | Sequence[Rule] = (),
    batches: Iterable[Any] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    record: int = 1,
    progress: bool = False,
    divergence: float = 1e8,
) -> Solution:
    """Solve a bilevel problem from (x0, y0).

    Args:
        problem: what to solve.
        x0, y0: the start. Tensors are not changed; modules are trained in place.
        method: :class:`MEHA` with parameters chosen for the problem by default.
        max_steps: stop after so many steps.
        tol: stop when the relative change of (x, y) in a step falls to it; None for never.
        stop: further rules (:mod:`meha.stopping`); the first that holds ends the run as converged.
        batches: an iterable of batches for the objectives, begun anew when it ends (if it can be).
        callbacks: called as ``callback(run, info)`` after each step. It may return True to stop the run, or numbers by name to
            add to the history.
        record: keep the numbers of every ``record``-th step, and of the last.
        progress: show a bar (needs rich).
        divergence: the run counts as diverged when ||(x, y)|| exceeds this many times 1 + ||(x0, y0)||, or earlier, when it
            keeps accelerating away from the start while F grows.

    Returns:
        The last finite iterate with its status. Failures of the run are a status, not an exception.

    >>> import torch
    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
    ...     lower=lambda x, y: torch.sin(x + y - 2).sum(),
    ... )
    >>> solution = solve(problem, x0=torch.tensor([-6.0]), y0=torch.zeros(1), max_steps=2000)
    >>> print(solution.status, round(float(solution.x), 1))
    max steps 2.3
    """
    check_count("max_steps", max_steps)
    check_count("record", record)
    check_positive("divergence", divergence)
    if tol is not None:
        check_tolerance("tol", tol)
    if batches is not None and not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}.")
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method: expected a method such as meha.MEHA(), got {method!r}.")
    method = method if method is not None else MEHA()
    rules = ([] if tol is None else [RelativeChange(tol)]) + _functions("stop", stop)
    called = _functions("callbacks", callbacks)

    begin = time.perf_counter()
    run = method.start(problem, x0, y0)
    loop = _Loop(run, rules, called, record, divergence, seconds=time.perf_counter() - begin)
    with _progress_bar(max_steps) if progress else nullcontext() as show:
        for batch in _cycle(batches, max_steps):
            over = loop.advance(batch)
            if show is not None:
                show(run, loop.history)
            if over:
                break
        else:
            short = f"The batches ran out after {run.k} of {max_steps} steps." if run.k < max_steps else ""
            remedy = "allow more steps, or relax tol." if run.method.settles(run.k) else "allow more steps."
            loop.finish(Status.MAX_STEPS, short or f"No stopping rule was met; {remedy}")
    return loop.solution()


class _Loop:
    """One run with its clock, its history and the test whether it is over."""

    def __init__(
        self, run: Run, rules: list[Rule], callbacks: list[Callback], record: int, divergence: float, seconds: float
    ) -> None:
        self.run, self.rules, self.callbacks, self.record = run, rules, callbacks, record
        self.held = [0] * len(rules)
        self.history, self.seconds = History(), seconds
        self.status, self.message = Status.MAX_STEPS, ""
        x, y = run.state.x, run.state.y
        self.leaves = [leaf.detach() for leaf in x.leaves + y.leaves]
        self.previous = [leaf.clone() for leaf in self.leaves]
        self.buffers = [buffer for variable in (x, y) for buffer in variable.buffers().values()]
        self.previous_buffers = [buffer.clone() for buffer in self.buffers]
        self.runaway = _Runaway(self.leaves, divergence)
        self.last: tuple[StepInfo, dict[str, float]]

    def advance(self, batch: Any) -> bool:
        """One step and all that belongs to it; whether the run is over."""
        run = self.run
        begin = time.perf_counter()
        copy_(self.previous, self.leaves)
        for kept, buffer in zip(self.previous_buffers, self.buffers, strict=True):
            kept.copy_(buffer)
        try:
            info = run.step(batch)
        except (LinAlgError, ArithmeticError) as error:
            return self._undo(Status.BROKE_DOWN, f"Step {run.k + 1} broke down: {error}. The iterate before it is returned.")
        size, moved = norm(self.leaves), norm(subtract(self.leaves, self.previous))
        info = info.plus(change=float(moved / size) if moved > 0 else 0.0)
        self.seconds += time.perf_counter() - begin

        extra: dict[str, float] = {}
        over = self._failed(info, float(size), float(moved)) or self._called(info, extra) or self._converged(info)
        self.last = info, extra
        if over or info.step % self.record == 0:
            self._record()
        return over

    def _record(self) -> None:
        info, extra = self.last
        counts = self.run.counts
        work = {"gradients_upper": counts.upper, "gradients_lower": counts.lower, "hessian_products": counts.hvp}
        self.history.append({"step": info.step, "seconds": self.seconds, **info, **work, **extra})

    def _failed(self, info: StepInfo, size: float, moved: float) -> bool:
        """End the run if its iterate is not finite or runs away."""
        if not math.isfinite(size + info.get("upper", 0.0)):
            message = f"Step {info.step} gave NaN or infinity; the iterate before it is returned."
            return self._undo(Status.NON_FINITE, message)
        reason = self.runaway(self.leaves, info, size, moved)
        return self.finish(Status.DIVERGED, reason) if reason else False

    def _undo(self, status: Status, message: str) -> bool:
        """Go back to the iterate before the last step, and end the run."""
        copy_(self.leaves, self.previous)
        for buffer, kept in zip(self.buffers, self.previous_buffers, strict=True):
            buffer.copy_(kept)
        return self.finish(status, message)

    def _called(self, info: StepInfo, extra: dict[str, float]) -> bool:
        for callback in self.callbacks:
            answer, name = callback(self.run, info), _name(callback)
            if isinstance(answer, Mapping):
                for key, value in answer.items():
                    extra[key] = self._number(name, key, value, {*info, *RESERVED})
            elif answer is not None and type(answer).__name__ not in ("bool", "bool_"):
                kind = type(answer).__name__
                raise TypeError(f"callbacks: {name} returned {kind}; return True to stop, numbers by name to record, or None.")
            elif answer:
                return self.finish(Status.STOPPED, f"{name} asked to stop at step {info.step}.")
        return False

    @staticmethod
    def _number(callback: str, key: str, value: Any, taken: set[str]) -> float:
        if key in taken:
            raise ValueError(f"callbacks: {callback} returned {key!r}, which the history has already; use another name.")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"callbacks: {callback} returned {value!r} for {key!r}; the history takes numbers.") from None

    def _converged(self, info: StepInfo) -> bool:
        if self.run.finished:
            return self.finish(Status.FINISHED, self.run.finished)
        for i, rule in enumerate(self.rules):
            reason = rule(self.run, info)
            self.held[i] = self.held[i] + 1 if reason else 0
            if reason and self.held[i] >= getattr(rule, "times", 1):
                return self.finish(Status.CONVERGED, reason if isinstance(reason, str) else f"{_name(rule)} holds")
        return False

    def finish(self, status: Status, message: str) -> bool:
        self.status, self.message = status, message
        return True

    def _undefined(self, x: Variable, y: Variable) -> str:
        """Which objective has no value at the start (x, y)."""
        oracle, batch = self.run.oracle, self.run.batch
        with torch.no_grad():
            for function in (oracle.upper, oracle.lower):
                try:
                    value = float(function(x, y, batch))
                except (LinAlgError, ArithmeticError):
                    continue
                if not math.isfinite(value):
                    return f"{function.level.capitalize()} is {value} at the start (x0, y0); check it, or start elsewhere."
        return ""

    def solution(self) -> Solution:
        run, message = self.run, self.message
        if self.status in (Status.DIVERGED, Status.NON_FINITE, Status.BROKE_DOWN):
            x, y = run.state.x.copy(), run.state.y.copy()
            copy_([leaf.detach() for leaf in x.leaves + y.leaves], self.runaway.start)
            message += " " + (self._undefined(x, y) or run.method.advice(run.problem, x, y, run.batch))
        if run.k % self.record and self.status is Status.MAX_STEPS:
            self._record()
        return Solution(
            problem=run.problem,
            method=run.method,
            x=run.state.x.snapshot(),
            y=run.state.y.snapshot(),
            status=self.status,
            message=message,
            steps=run.k,
            seconds=self.seconds,
            counts=run.counts,
            history=self.history,
            constants=run.constants,
            batch=run.batch,
        )


class _Runaway:
    """Tells a diverging run from one that travels far.

    At steps 64, 128, 256, ... it looks at the second half of the run so far. A run that approaches something slows down; one
    that drifts keeps its pace and at most doubles its distance from the start. Three windows in a row with longer steps and
    1.5 times the distance, the last two with a larger F, and a last step longer than their mean, are taken for divergence, if
    the distance is large at all.
    """

    def __init__(self, leaves: Leaves, limit: float) -> None:
        self.start = [leaf.clone() for leaf in leaves]
        self.scale = 1 + float(norm(self.start))
        self.limit = limit * self.scale
        self.windows: list[tuple[float, float, float]] = []
        self.moved = self.upper = 0.0

    def __call__(self, leaves: Leaves, info: StepInfo, size: float, moved: float) -> str:
        if size > self.limit:
            return f"||(x, y)|| reached {size:.1e} at step {info.step}."
        self.moved += moved
        self.upper += info.get("upper", 0.0)
        if info.step < 32 or info.step & (info.step - 1):
            return ""
        length, distance = info.step // 2, float(norm(subtract(leaves, self.start)))
        if info.step > 32:
            self.windows.append((distance, self.moved / length, self.upper / length))
        self.moved = self.upper = 0.0
        if len(self.windows) < 4 or distance < 10 * self.scale:
            return ""
        recent = self.windows[-4:]
        away = all(b[0] > 1.5 * a[0] and b[1] > 1.05 * a[1] for a, b in itertools.pairwise(recent))
        worse = recent[1][2] < recent[2][2] < recent[3][2]
        if not (away and worse and moved > recent[3][1]):
            return ""
        return f"The steps grow and lead away from the start: distance {distance:.3g} after {info.step} steps, F growing."


def _functions(argument: str, value: Any) -> list[Any]:
    listed = [value] if callable(value) else value
    if not isinstance(listed, list | tuple) or not all(callable(item) for item in listed):
        raise TypeError(f"{argument}: expected a function of (run, info) or a list of them, got {value!r}.")
    return list(listed)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _cycle(batches: Iterable[Any] | None, max_steps: int) -> Iterator[Any]:
    """At most ``max_steps`` batches, begun anew when they end; None each time when there are none."""
    if batches is None:
        yield from itertools.repeat(None, max_steps)
        return
    left = max_steps
    while left:
        before = left
        for batch in batches:
            yield batch
            left -= 1
            if not left:
                return
        if left == before:
            return


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[Run, History], None]]:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError('progress=True needs rich; install it with: pip install "meha[progress]"') from error
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)

        def show(run: Run, history: History) -> None:
            numbers = " ".join(f"{name} {history[name][-1]:.3g}" for name in ("upper", "gap", "residual") if name in history)
            bar.update(task, completed=run.k, description=numbers)

        yield show
