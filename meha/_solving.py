"""solve(): the loop around a run, with stopping, history, callbacks, checkpoints and a progress bar."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch

from meha._checkpoints import REMEDY, Checkpoint
from meha._checks import check_count, check_positive, check_tolerance
from meha._oracle import MicroBatches
from meha._torch import BREAKDOWNS
from meha._variables import Variable, _modules, copy_, norm, subtract
from meha.compiled import Compiled, CompileWarning, TracingError
from meha.divergence import Runaway
from meha.loaders import Endless, Stateful, check_resumable, random_states, set_random_states
from meha.loggers import work
from meha.methods import Continuation, Method, Run, StepInfo, StochasticMEHA
from meha.methods._parameters import stochastic
from meha.problem import Problem
from meha.solution import History, Solution, Status
from meha.stopping import RelativeChange, Rule
from meha.theory import Constants

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
    tol: float | Literal["default"] | None = "default",
    stop: Rule | Sequence[Rule] = (),
    batches: Iterable[Any] | None = None,
    accumulate: int = 1,
    callbacks: Callback | Sequence[Callback] = (),
    record: int = 1,
    progress: bool = False,
    divergence: float = 1e8,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1000,
    compile: bool | Literal["auto"] = False,
) -> Solution:
    """Solve a bilevel problem from (x0, y0).

    With ``checkpoint`` a run can be killed at any moment. The same call, in a new process that builds the same problem, start
    and batches, then goes on from the last checkpoint and ends with the same numbers, bit for bit, as if nothing had happened.
    Called again after its end, a run returns the same solution; with a larger ``max_steps`` it goes on, as does one that had
    converged when ``tol`` or ``stop`` are changed, and one that a callback had stopped. All else must stay as it was.

    Args:
        problem: what to solve.
        x0, y0: the start. Tensors are not changed; modules are trained in place.
        method: how; there is nothing to choose by default. Tensors without batches then go to :class:`Continuation`, which
            finds accurate solutions of deterministic problems; modules and batches go to :class:`StochasticMEHA`.
        max_steps: stop after so many steps.
        tol: the accuracy, None for never to stop by it. Methods that estimate the error of x take it for that, by default 1e-6
            (:class:`Continuation`) or 1e-4 (``MEHA()``); all others stop when the relative change of (x, y) in a step falls to
            it, by default 1e-8.
        stop: further rules (:mod:`meha.stopping`); the first that holds ends the run as converged.
        batches: an iterable of batches for the objectives, begun anew when it ends (if it can be). For several loaders there is
            :class:`meha.loaders.Together`.
        accumulate: each step takes so many successive batches, as :class:`~meha.MicroBatches`: the mean of the objectives over
            them, with memory for one at a time.
        callbacks: called as ``callback(run, info)`` after each step. It may return True to stop the run, or numbers by name to
            add to the history and to the info of the callbacks after it. What its ``state_dict`` returns, if it has one, is
            part of a checkpoint.
        record: keep the numbers of every ``record``-th step, and of the last.
        progress: show a bar (needs rich).
        divergence: the run counts as diverged when ||(x, y)|| exceeds this many times 1 + ||(x0, y0)||, or earlier, when it
            keeps accelerating away from the start while F grows.
        checkpoint: a file from which the run goes on when it exists, and to which everything that its future depends on is
            saved: x, y and the method's own variables and optimizers, the place in the batches, the states of the random number
            generators (of torch on all devices, of Python, of numpy, and those that a DataLoader holds), the history, the
            stopping rules' counters.
        every: save after so many steps, and at the end. An exception or Ctrl-C saves nothing, since the step may be half done:
            the file remains the last whole one.
        compile: do many steps as one call (:mod:`meha.compiled`), with results equal to rounding. Steps on tensors are
            compiled, which takes some seconds, and are then tens to hundreds of times faster where the time goes into calls;
            steps on modules are recorded as a CUDA graph on a GPU (on a CPU, compile the module: ``y0=torch.compile(module)``).
            The first step is done as always, and so are the last few. History, rules, callbacks and checkpoints see the run at
            the ends of groups of steps, at first up to 32, later (without batches) a 16th of the steps done. Objectives must be
            functions of x, y and the batch: what else they depend on in Python stays as it was in the first step. What cannot
            be compiled runs as always, after one warning: methods that decide in Python, as :class:`Continuation` does,
            optimizers of tensors, schedulers, dropout. What was compiled serves all runs of the same form in this process and,
            by torch's cache on disk, in later ones. A run that goes on from a checkpoint ends as if nothing had happened, but
            for rounding. "auto" compiles when the steps that are allowed would take longer than half
            a minute, or when it was done before, and does not warn.

    Returns:
        The last finite iterate with its status. Failures of the run are a status, not an exception.

    >>> import torch
    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
    ...     lower=lambda x, y: torch.sin(x + y - 2).sum(),
    ... )
    >>> solution = solve(problem, x0=torch.tensor([-6.0]), y0=torch.zeros(1))
    >>> print(solution.status, round(float(solution.x), 3))
    converged 2.356
    """
    check_count("max_steps", max_steps)
    check_count("accumulate", accumulate)
    check_count("record", record)
    check_count("every", every)
    check_positive("divergence", divergence)
    if tol is not None and tol != "default":
        check_tolerance("tol", tol)
    if batches is not None and not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}.")
    if compile not in (True, False, "auto"):
        raise ValueError(f'compile: must be True, False or "auto", got {compile!r}.')
    if accumulate > 1 and batches is None:
        raise ValueError(f"accumulate: {accumulate} batches a step need batches; pass them, or leave accumulate out.")
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method: expected a method such as meha.MEHA(), got {method!r}.")
    method = method if method is not None else _automatic(problem, x0, y0, batches)
    method = method.stand_in(problem, x0, y0, batches=batches is not None)
    method = method if tol == "default" else method.to(tol)
    change = 1e-8 if tol == "default" else tol
    rules = ([] if change is None else [RelativeChange(change)]) + _functions("stop", stop)
    called = _functions("callbacks", callbacks)
    file = None
    if checkpoint is not None:
        check_resumable(batches, "batches")
        file = Checkpoint(checkpoint)

    begin = time.perf_counter()
    run = method.start(problem, x0, y0)
    source = _Source(batches, accumulate, remember=file is not None)
    loop = _Loop(run, source, rules, called, record, divergence, seconds=time.perf_counter() - begin)
    if file is not None:
        _resume(loop, file, max_steps)
    pace, stepped = _Pace(compile, run, max_steps, batches is not None), False
    if 0 < run.k < max_steps and not loop.over:  # a run that goes on does so in groups
        loop.seconds += pace.update(loop.seconds)
    with _progress_bar(max_steps) if progress else nullcontext() as show:
        while not loop.over and (group := [(batch, source.place) for batch in itertools.islice(source, pace.steps)]):
            loop.advance(group, pace.compiled)
            if not loop.over:
                loop.seconds += pace.update(loop.seconds)
            stepped = True
            if show is not None:
                show(run, loop.history)
            if file is not None and not loop.over and run.k < max_steps and loop.due(every):
                file.write(loop.state_dict())
    if not loop.over:
        short = f"The batches ran out after {run.k} of {max_steps} steps." if run.k < max_steps else ""
        remedy = "allow more steps, or relax tol." if run.method.settles(run.k) else "allow more steps."
        loop.finish(Status.MAX_STEPS, short or f"No stopping rule was met; {remedy}")
    if file is not None and stepped:
        file.write(loop.state_dict())
    return loop.solution()


def _automatic(problem: Problem, x0: Any, y0: Any, batches: Iterable[Any] | None) -> Method:
    """The method for a problem when none is given."""
    return StochasticMEHA() if batches is not None or stochastic(problem, x0, y0) else Continuation()


class _Source(Iterator[Any]):
    """What the steps get: batches without end, in groups of ``accumulate``; None each time when there are none.

    With ``remember``, it knows the place of the last one: that of the loader and the random states before it was taken.
    """

    def __init__(self, batches: Iterable[Any] | None, accumulate: int, remember: bool) -> None:
        self._stream = None if batches is None else Endless(batches)
        self.loader, self.accumulate, self._remember = batches, accumulate, remember
        self.place: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._stream is None:
            return None
        if self._remember:
            self.place = {"batches": self._stream.state_dict(), "random": random_states(self.loader)}
        if self.accumulate == 1:
            return next(self._stream)
        group = list(itertools.islice(self._stream, self.accumulate))
        if len(group) < self.accumulate:
            raise StopIteration
        return MicroBatches(group)

    def find(self, place: Mapping[str, Any] | None) -> Any:
        """The batch at a place, after which the next ones follow."""
        if (place is None) != (self._stream is None):
            before, now = ("none", "some") if place is None else ("some", "none")
            raise ValueError(f"batches: the run in the checkpoint had {before}, this call has {now}; pass what it had.")
        if self._stream is None or place is None:
            return None
        self._stream.load_state_dict(place["batches"])
        set_random_states(place["random"], self.loader)
        try:
            return next(self)
        except StopIteration:
            raise ValueError("batches: hold none, but the run in the checkpoint had some; pass what it had.") from None


class _Pace:
    """How many steps are done at once: one, or many when they are compiled.

    Args:
        compile: see :func:`solve`.
        batches: whether there are some; they are all in memory at once, so that groups stay small.
    """

    LONGEST = 4096

    def __init__(self, compile: bool | Literal["auto"], run: Run, max_steps: int, batches: bool) -> None:
        self.run, self.max_steps, self._wanted = run, max_steps, compile
        self._longest = 0 if batches else self.LONGEST
        self.compiled: Compiled | None = None
        self._first: tuple[int, float] | None = None

    @property
    def steps(self) -> int:
        """How many to do next."""
        k, left = self.run.k, self.max_steps - self.run.k
        if self.compiled is None or left < self.compiled.unrolled:
            return min(left, 1)
        unit = self.compiled.unrolled
        return max(unit, min(k // 16, left, self._longest) // unit * unit)

    def update(self, seconds: float) -> float:
        """Decide whether to compile, after a step, when the run has taken so many seconds. How long that took."""
        begin = time.perf_counter()
        if self._wanted and self.compiled is None and (self._wanted is True or self._pays(seconds)):
            try:
                compiled = Compiled.of(self.run)
                enough = self.max_steps - self.run.k >= compiled.unrolled
                if enough and (self._wanted is True or compiled.known or self._pays(seconds, least=30.0)):
                    compiled.compile()
                    self.compiled = compiled
            except TracingError as reason:
                if self._wanted is True:
                    warnings.warn(f"compile: the steps run one by one, because {reason}.", CompileWarning, stacklevel=3)
            self._wanted = False
        return time.perf_counter() - begin

    def _pays(self, seconds: float, least: float = 5.0) -> bool:
        """Whether the steps that are left would take at least so many seconds, by those after the first."""
        k = self.run.k
        if self._first is None:
            self._first = k, seconds
        first, then = self._first
        return k >= first + 3 and (seconds - then) / (k - first) * (self.max_steps - k) > least


def _resume(loop: _Loop, file: Checkpoint, max_steps: int) -> None:
    """Put the loop where the checkpoint is, if there is one; when it does not fit, nothing is changed."""
    run, source = loop.run, loop.source
    saved = file.read(run.state.x.device)
    if saved is None:
        return
    before, states = run.state_dict(), random_states(source.loader)
    try:
        try:
            loop.load_state_dict(saved)
        except Exception as error:  # a callback's own error, for example
            raise ValueError(f"checkpoint: {file.path} is not of this run: {error} Make the same call, or {REMEDY}.") from error
        if run.k > max_steps:
            raise ValueError(
                f"max_steps: the run in the checkpoint {file.path} has done {run.k} steps already, got {max_steps}; allow at"
                " least as many, or give another path."
            )
        run.batch = source.find(saved["place"])
        set_random_states(saved["random"], source.loader)
        for module, training in zip(loop.modules, saved["training"], strict=True):
            module.training = training
    except BaseException:
        run.load_state_dict(before)
        set_random_states(states, source.loader)
        raise


class _Loop:
    """One run with its clock, its history and the test whether it is over."""

    def __init__(
        self,
        run: Run,
        source: _Source,
        rules: list[Rule],
        callbacks: list[Any],
        record: int,
        divergence: float,
        seconds: float,
    ) -> None:
        self.run, self.source, self.rules, self.callbacks, self.record = run, source, rules, callbacks, record
        self.held = [0] * len(rules)
        self.history, self.seconds = History(), seconds
        self.status: Status | None = None
        self.message = ""
        x, y = run.state.x, run.state.y
        self.leaves = [leaf.detach() for leaf in x.leaves + y.leaves]
        self.previous = [leaf.clone() for leaf in self.leaves]
        self.buffers = [buffer for variable in (x, y) for buffer in variable.buffers().values()]
        self.previous_buffers = [buffer.clone() for buffer in self.buffers]
        self.modules = [part for variable in (x, y) for module in _modules(variable.value) for part in module.modules()]
        self.runaway = Runaway(self.leaves, divergence)
        self.last: tuple[StepInfo, dict[str, float]] | None = None

    @property
    def over(self) -> bool:
        return self.status is not None

    def advance(self, group: Sequence[tuple[Any, Any]], compiled: Compiled | None) -> None:
        """A step for each batch, which comes with its place in the source, and all that belongs to it."""
        if compiled is not None and self._advance_together([batch for batch, _ in group], compiled):
            return
        for batch, self.source.place in group:
            self._advance(batch)
            if self.over:
                return

    def _advance_together(self, batches: Sequence[Any], compiled: Compiled) -> bool:
        """Compiled steps; False if they must be done one by one: few, or with other batches, or to see which of them fails."""
        if len(batches) % compiled.unrolled or not compiled.fits(batches):
            return False
        begin = time.perf_counter()
        try:
            info, size, moved = compiled(batches)
            failed = not math.isfinite(size + info.get("upper", 0.0))
        except BREAKDOWNS:
            failed = True
        if failed:
            compiled.rewind()
            return False
        self._judge(info, size, moved, begin)
        return True

    def _advance(self, batch: Any) -> None:
        run = self.run
        begin = time.perf_counter()
        copy_(self.previous, self.leaves)
        for kept, buffer in zip(self.previous_buffers, self.buffers, strict=True):
            kept.copy_(buffer)
        try:
            info = run.step(batch)
        except BREAKDOWNS as error:
            message = f"Step {run.k + 1} broke down: {error}. The iterate before it is returned."
            return self._undo(Status.BROKE_DOWN, message)
        size, moved = norm(self.leaves), norm(subtract(self.leaves, self.previous))
        return self._judge(info, float(size), float(moved), begin)

    def _judge(self, info: StepInfo, size: float, moved: float, begin: float) -> None:
        """Take down the numbers of the last step, which moved (x, y) so far to a point of this norm, and look what they say."""
        info = info.plus(change=(moved / size if size > 0 else math.inf) if moved > 0 else 0.0)
        self.seconds += time.perf_counter() - begin

        extra: dict[str, float] = {}
        self.last = info, extra
        self._check(info, size, moved)
        if not self.over:
            asked = self._called(info, extra)
            self._converged(info)
            if asked and not self.over:
                self.finish(Status.STOPPED, asked)
        if info.due(self.record):
            self.history.append(self._row(info, extra))

    def due(self, every: int) -> bool:
        """Whether it is time for what is done every so many steps."""
        return self.last is not None and self.last[0].due(every)

    def _row(self, info: StepInfo, extra: dict[str, float]) -> dict[str, float]:
        return {"step": info.step, "seconds": self.seconds, **info, **work(self.run), **extra}

    def _check(self, info: StepInfo, size: float, moved: float) -> None:
        """End the run if its iterate is not finite or runs away."""
        if not math.isfinite(size + info.get("upper", 0.0)):
            message = f"Step {info.step} gave NaN or infinity; the iterate before it is returned."
            return self._undo(Status.NON_FINITE, message)
        reason = self.runaway(self.leaves, info, size, moved)
        return self._fail(Status.DIVERGED, reason) if reason else None

    def _undo(self, status: Status, message: str) -> None:
        """Go back to the iterate before the last step, and end the run."""
        copy_(self.leaves, self.previous)
        for buffer, kept in zip(self.buffers, self.previous_buffers, strict=True):
            buffer.copy_(kept)
        self._fail(status, message)

    def _fail(self, status: Status, message: str) -> None:
        """End the run, with what to try."""
        run = self.run
        x, y = run.state.x.copy(), run.state.y.copy()
        copy_([leaf.detach() for leaf in x.leaves + y.leaves], self.runaway.start)
        advice = self._undefined(x, y) or run.method.advice(run.problem, x, y, run.batch)
        self.finish(status, f"{message} {advice}")

    def _called(self, info: StepInfo, extra: dict[str, float]) -> str:
        """Call all callbacks; which one asked to stop."""
        asked = ""
        for callback in self.callbacks:
            answer, name = callback(self.run, info.plus(**extra)), _name(callback)
            if isinstance(answer, Mapping):
                for key, value in answer.items():
                    extra[key] = self._number(name, key, value, {*info, *RESERVED})
            elif answer is not None and type(answer).__name__ not in ("bool", "bool_"):
                kind = type(answer).__name__
                raise TypeError(f"callbacks: {name} returned {kind}; return True to stop, numbers by name to record, or None.")
            elif answer and not asked:
                asked = f"{name} asked to stop at step {info.step}."
        return asked

    @staticmethod
    def _number(callback: str, key: str, value: Any, taken: set[str]) -> float:
        if key in taken:
            raise ValueError(f"callbacks: {callback} returned {key!r}, which the history has already; use another name.")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"callbacks: {callback} returned {value!r} for {key!r}; the history takes numbers.") from None

    def _converged(self, info: StepInfo) -> None:
        """End the run if the method has nothing left to do, or a rule holds."""
        run = self.run
        for status, reason in (
            (Status.CONVERGED, run.converged),
            (Status.DIVERGED, run.diverged),
            (Status.FINISHED, run.finished),
        ):
            if reason:
                return self.finish(status, reason)
        for i, rule in enumerate(self.rules):
            holds = rule(run, info)
            self.held[i] = self.held[i] + 1 if holds else 0
            if holds and self.held[i] >= getattr(rule, "times", 1):
                return self.finish(Status.CONVERGED, holds if isinstance(holds, str) else f"{_name(rule)} holds")
        return None

    def finish(self, status: Status, message: str) -> None:
        self.status, self.message = status, message

    def _undefined(self, x: Variable, y: Variable) -> str:
        """Which objective has no value at the start (x, y)."""
        oracle, batch = self.run.oracle, self.run.batch
        with torch.no_grad():
            for function in (oracle.upper, oracle.lower):
                try:
                    value = float(function(x, y, batch))
                except BREAKDOWNS:
                    continue
                if not math.isfinite(value):
                    return f"{function.level.capitalize()} is {value} at the start (x0, y0); check it, or start elsewhere."
        return ""

    def solution(self) -> Solution:
        run = self.run
        assert self.status is not None
        with torch.no_grad():
            run.method.conclude(run.state)
        if self.last is not None and not self.last[0].due(self.record):
            self.history.append(self._row(*self.last))
        return Solution(
            problem=run.problem,
            method=run.method,
            x=run.state.x.snapshot(),
            y=run.state.y.snapshot(),
            status=self.status,
            message=self.message,
            steps=run.k,
            seconds=self.seconds,
            counts=run.counts,
            history=self.history,
            constants=run.constants,
            batch=run.batch,
            report=dict(run.method.report(run.state)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the future depends on, in plain tensors, numbers and text."""
        run = self.run
        return {
            "random": random_states(self.source.loader),
            "call": self._call(),
            "run": run.state_dict(),
            "training": [module.training for module in self.modules],
            "constants": None if run.constants is None else dataclasses.asdict(run.constants),
            "place": self.source.place,
            "seconds": self.seconds,
            "history": self.history.state_dict(),
            "last": None if self.last is None else (self.last[0].step, dict(self.last[0]), self.last[0].span, self.last[1]),
            "runaway": self.runaway.state_dict(),
            "rules": self._rules(),
            "held": self.held,
            "status": None if self.status is None else self.status.value,
            "message": self.message,
            "callbacks": [(_name(c), c.state_dict()) for c in self.callbacks if isinstance(c, Stateful)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loop was; the place in the batches and the random states are not touched."""
        run = self.run
        run.load_state_dict(state["run"])
        for name, value in self._call().items():
            if state["call"][name] != value:
                raise ValueError(f"{name}: was {state['call'][name]}, is {value}.")
        run.constants = None if state["constants"] is None else Constants(**state["constants"])
        self.seconds = state["seconds"]
        self.history.load_state_dict(state["history"])
        self.last = None if state["last"] is None else (StepInfo(*state["last"][:3]), state["last"][3])
        self.runaway.load_state_dict(state["runaway"])
        status = None if state["status"] is None else Status(state["status"])
        same = state["rules"] == self._rules()
        if same:
            self.held = list(state["held"])
        if status not in (None, Status.MAX_STEPS, Status.STOPPED) and (same or status is not Status.CONVERGED):
            self.finish(status, state["message"])
        saved = list(state["callbacks"])
        for callback in self.callbacks:
            names = [name for name, _ in saved]
            if isinstance(callback, Stateful) and _name(callback) in names:
                callback.load_state_dict(saved.pop(names.index(_name(callback)))[1])

    def _call(self) -> dict[str, Any]:
        """What must be the same when a run goes on, besides the method and the variables."""
        problem = self.run.problem
        parts = {"nonsmooth": problem.nonsmooth, "x_set": problem.x_set, "y_set": problem.y_set}
        kinds = {name: None if part is None else type(part).__name__ for name, part in parts.items()}
        return {**kinds, "modules": len(self.modules), "accumulate": self.source.accumulate}

    def _rules(self) -> list[tuple[str, str]]:
        return [(_name(rule), str(getattr(rule, "tol", ""))) for rule in self.rules]


def _functions(argument: str, value: Any) -> list[Any]:
    listed = [value] if callable(value) else value
    if not isinstance(listed, list | tuple) or not all(callable(item) for item in listed):
        raise TypeError(f"{argument}: expected a function of (run, info) or a list of them, got {value!r}.")
    return list(listed)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


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
