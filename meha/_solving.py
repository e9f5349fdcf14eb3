"""solve(): the loop around a run, with observers and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, cast

import torch

from meha._checkpoints import REMEDY, Checkpoint
from meha._checks import check_count, check_tolerance
from meha._running import Run, StepInfo
from meha._torch import BREAKDOWNS
from meha._variables import Variable, copy_, modules_of
from meha._verdicts import Status, Verdict
from meha.compiled import Pace, Stepper
from meha.loaders import Endless, Stateful, check_resumable, random_states, set_random_states
from meha.methods import Method, default_method
from meha.observers import DivergenceGuard, Observer, Recorder
from meha.problem import Problem
from meha.solution import Solution
from meha.stopping import RelativeChange
from meha.theory import Constants

__all__ = ["solve"]

T = TypeVar("T")

RESERVED = ("step", "seconds", "gradients_upper", "gradients_lower", "hessian_products")
"""Columns of the history besides the numbers of the steps."""

CHANGE = 1e-8
"""The default tolerance on the relative change of (x, y), near the rounding error of a sum of double precision numbers."""


def solve(
    problem: Problem,
    x0: Any,
    y0: Any,
    method: Method | None = None,
    *,
    max_steps: int = 10_000,
    tol: float | Literal["default"] | None = "default",
    batches: Iterable[Any] | None = None,
    callbacks: Observer | Sequence[Observer] = (),
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    compile: bool | Literal["auto"] = False,
) -> Solution:
    """Solve a bilevel problem from (x0, y0).

    Args:
        problem: the problem.
        x0, y0: the start. Tensors are not changed; modules are trained in place.
        method: the method; by default the one that :func:`meha.methods.default_method` chooses, with nothing to tune.
            Tensors without batches go to :class:`Continuation`, which finds accurate solutions of deterministic problems;
            modules and batches go to :class:`StochasticMEHA`.
        max_steps: upper bound on the number of steps.
        tol: the accuracy; None means never to stop because of it. Methods with a ``tol`` of their own take it for that, by
            default 1e-6 in :class:`Continuation`, and None means as accurate as possible; all others stop when the relative
            change of (x, y) in a step falls to it, by default 1e-8.
        batches: an iterable of batches for the objectives, repeated when it ends (if it can be). :class:`meha.loaders.Together`
            joins several loaders, and :class:`meha.loaders.Accumulated` makes steps on several batches.
        callbacks: observers (:mod:`meha.observers`), called as ``callback(run, info)`` after each step: stopping rules
            (:mod:`meha.stopping`), loggers (:mod:`meha.loggers`), :class:`~meha.observers.Progress` and functions of your own.
            A :class:`~meha.observers.Recorder` or :class:`~meha.observers.DivergenceGuard` among them replaces the default.
        checkpoint: a file, or :class:`meha.Checkpoint` to say how often it is written. If the process is killed, repeat the
            call in a new process that builds the same problem, start and batches: it resumes from the last checkpoint and ends
            with the same numbers, bit for bit. The file holds x, y, the method's own variables and optimizers, the place in the
            batches, the states of the random number generators (of torch on all devices, of Python, of numpy, and those that a
            DataLoader holds), and the states of the observers. Repeated after its end, the call returns the same solution; with
            a larger ``max_steps`` it goes on, as does a run that a rule had ended when that rule is changed, and one that a
            callback had stopped. An exception or Ctrl-C saves nothing, since the step may be half done: the file remains the
            last whole one.
        compile: take many steps as one call (:mod:`meha.compiled`), with results equal to rounding. Steps on tensors are
            compiled, which takes some seconds, and are then tens to hundreds of times faster where the time goes into calls;
            steps on modules are recorded as a CUDA graph on a GPU (on a CPU, compile the module: ``y0=torch.compile(module)``).
            The first step runs eagerly, and so do the last few. Observers and checkpoints see the run at the ends of groups of
            steps, at first up to 32, later (without batches) a 16th of the steps done. Objectives must be functions of x, y and
            the batch: what else they depend on in Python stays as it was in the first step. What cannot be compiled runs
            eagerly, after one warning: methods that decide in Python, as :class:`Continuation` does, optimizers of tensors,
            schedulers, dropout. Compiled code serves all runs of the same form in this process and, by torch's cache on disk,
            in later ones. "auto" compiles when the steps that are allowed would take longer than half a minute, or when a
            compiled version is cached, and does not warn.

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
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    check_count("max_steps", max_steps)
    if tol is not None and tol != "default":
        check_tolerance("tol", tol)
    if batches is not None and not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}.")
    if compile not in (True, False, "auto"):
        raise ValueError(f'compile: must be True, False or "auto", got {compile!r}.')
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method: expected a method such as meha.MEHA(), got {method!r}.")
    if method is None:
        method = default_method(problem, x0, y0, batches)
    observers = _functions(callbacks)
    if not any(field.name == "tol" for field in dataclasses.fields(method)):
        observers = ([] if tol is None else [RelativeChange(CHANGE if tol == "default" else tol)]) + observers
    elif tol != "default":
        method = dataclasses.replace(cast(Any, method), tol=0.0 if tol is None else tol)
    file = None
    if checkpoint is not None:
        check_resumable(batches, "batches")
        file = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)

    run = method.start(problem, x0, y0)
    source = _Source(batches, remember=file is not None)
    with _Loop(run, source, observers, max_steps) as loop:
        if file is not None:
            _resume(loop, file)
        pace, stepped = Pace(compile, run, max_steps, batches is not None), False
        if 0 < run.k < max_steps and loop.verdict is None:  # a run that goes on does so in groups
            pace.update()
        while loop.verdict is None and (group := [(batch, source.place) for batch in itertools.islice(source, pace.steps)]):
            loop.advance(group, pace)
            stepped = True
            if loop.verdict is None:
                pace.update()
                if file is not None and run.k < max_steps and loop.due(file.every):
                    file.write(loop.state_dict())
    if loop.verdict is None:
        short = f"The batches ran out after {run.k} of {max_steps} steps." if run.k < max_steps else ""
        remedy = "allow more steps, or relax tol." if run.settled else "allow more steps."
        loop.verdict = Verdict(Status.MAX_STEPS, short or f"No stopping rule was met; {remedy}")
    if file is not None and stepped:
        file.write(loop.state_dict())
    return loop.solution()


class _Source(Iterator[Any]):
    """What the steps get: batches without end; None each time when there are none.

    With ``remember``, it knows the place of the last one: that of the loader and the random states before it was taken.
    """

    def __init__(self, batches: Iterable[Any] | None, remember: bool) -> None:
        self._stream = None if batches is None else Endless(batches)
        self.loader, self._remember = batches, remember
        self.place: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._stream is None:
            return None
        if self._remember:
            self.place = {"batches": self._stream.state_dict(), "random": random_states(self.loader)}
        return next(self._stream)

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


def _resume(loop: _Loop, file: Checkpoint) -> None:
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
        if run.k > loop.max_steps:
            raise ValueError(
                f"max_steps: the run in the checkpoint {file.path} has done {run.k} steps already, got {loop.max_steps}; allow"
                " at least as many, or give another path."
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
    """A run with its observers, and the verdict when it is over.

    After each step, NaN and the guard end the run at once. Otherwise the method's own verdict counts, and then the first one of
    the observers, all of which are called. The recorder comes last, so that it sees all numbers.
    """

    def __init__(self, run: Run, source: _Source, observers: list[Any], max_steps: int) -> None:
        self.run, self.source, self.max_steps = run, source, max_steps
        self.guard, self.recorder = _take(observers, DivergenceGuard), _take(observers, Recorder)
        self.observers = observers
        self.verdict: Verdict | None = None
        self._giver: list[str] | None = None  # the observer that gave the verdict, and its tolerance
        self._last: StepInfo | None = None
        variables = (run.state.x, run.state.y)
        self.modules = [part for variable in variables for module in modules_of(variable.value) for part in module.modules()]

    def __enter__(self) -> Self:
        for observer in (self.guard, *self.observers, self.recorder):
            getattr(observer, "begin", _nothing)(self.run, self.max_steps)
        return self

    def __exit__(self, *error: object) -> None:
        for observer in self.observers:
            getattr(observer, "end", _nothing)(self.run)

    def due(self, every: int) -> bool:
        """Whether one of the last steps is a multiple of ``every``."""
        return self._last is not None and self._last.due(every)

    def advance(self, group: Sequence[tuple[Any, Any]], pace: Pace) -> None:
        """Take a step for each batch, which comes with its place in the source."""
        if pace.stepper is not pace.eager and self._advance_together([batch for batch, _ in group], pace.stepper):
            return
        for batch, self.source.place in group:
            info = pace.eager([batch])
            failure = self._failure(info)
            if failure is None:
                self._judge(info)
            else:
                pace.eager.rewind()
                self._fail(dataclasses.replace(failure, message=f"{failure.message} The iterate before it is returned."))
                if failure.status is Status.NON_FINITE:
                    self.recorder(self.run, info)
            if self.verdict is not None:
                return

    def _advance_together(self, batches: Sequence[Any], stepper: Stepper) -> bool:
        """Take compiled steps; False if they must be taken one by one: few, of another form, or to see which of them fails."""
        if not stepper.fits(batches):
            return False
        try:
            info = stepper(batches)
            failed = self._failure(info) is not None
        except BREAKDOWNS:
            failed = True
        if failed:
            stepper.rewind()
            return False
        self._judge(info)
        return True

    def _failure(self, info: StepInfo) -> Verdict | None:
        """Why the last step is of no use."""
        ended = self.run.ended
        if ended is not None and ended.status is Status.BROKE_DOWN:
            return ended
        if math.isfinite(info.size + info.get("upper", 0.0)):
            return None
        return Verdict(Status.NON_FINITE, f"Step {info.step} gave NaN or infinity.")

    def _judge(self, info: StepInfo) -> None:
        """Show the numbers of the last step to all that watch the run."""
        self._last = info
        verdict = self.guard(self.run, info)
        if verdict is not None:
            self._fail(verdict)
        else:
            self.verdict = self.run.ended
            taken = {*info, *RESERVED}
            for observer in self.observers:
                info = self._observe(observer, info, taken)
        self.recorder(self.run, info)

    def _observe(self, observer: Any, info: StepInfo, taken: set[str]) -> StepInfo:
        """Call an observer, and act on its answer."""
        answer, name = observer(self.run, info), _name(observer)
        if isinstance(answer, Mapping):
            return info.plus(**{key: _number(name, key, value, taken) for key, value in answer.items()})
        if type(answer).__name__ in ("bool", "bool_"):
            answer = Verdict(Status.STOPPED, f"{name} asked to stop at step {info.step}.") if answer else None
        if answer is not None and not isinstance(answer, Verdict):
            raise TypeError(
                f"callbacks: {name} returned {type(answer).__name__}; return a Verdict or True to stop, numbers by name to"
                " record, or None."
            )
        if answer is not None and self.verdict is None:
            self.verdict, self._giver = answer, _signature(observer)
        return info

    def _fail(self, verdict: Verdict) -> None:
        """End the run, with what to try."""
        run = self.run
        x, y = run.state.x.copy(), run.state.y.copy()
        copy_([leaf.detach() for leaf in x.leaves + y.leaves], self.guard.start)
        advice = self._undefined(x, y) or run.method.advice(run.problem, x, y, run.batch)
        self.verdict = Verdict(verdict.status, f"{verdict.message} {advice}")

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
        assert self.verdict is not None
        self.recorder.end(run)
        return Solution(
            problem=run.problem,
            method=run.method,
            x=run.state.x.snapshot(),
            y=run.state.y.snapshot(),
            status=self.verdict.status,
            message=self.verdict.message,
            upper=self._upper(),
            steps=run.k,
            seconds=run.seconds,
            counts=run.counts,
            history=self.recorder.history,
            constants=run.constants,
            batch=run.batch,
            report=dict(run.method.report(run)),
        )

    def _upper(self) -> float | None:
        """F(x, y); with modules, which a further pass would change, the last number of a step."""
        run, history = self.run, self.recorder.history
        if not (self.modules or (run.problem.needs_batch and run.batch is None)):
            with torch.no_grad(), contextlib.suppress(*BREAKDOWNS):
                return float(run.oracle.upper(run.state.x, run.state.y, run.batch))
        return next((value for value in reversed(history.get("upper", [])) if math.isfinite(value)), None)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the future depends on, in plain tensors, numbers and text."""
        run, verdict = self.run, self.verdict
        return {
            "random": random_states(self.source.loader),
            "problem": self._problem(),
            "run": run.state_dict(),
            "seconds": run.seconds,
            "training": [module.training for module in self.modules],
            "constants": None if run.constants is None else dataclasses.asdict(run.constants),
            "place": self.source.place,
            "verdict": None if verdict is None else [verdict.status.value, verdict.message, self._giver],
            "guard": self.guard.state_dict(),
            "recorder": self.recorder.state_dict(),
            "observers": [(_name(observer), observer.state_dict()) for observer in self.observers if _keeps(observer)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loop was; the place in the batches and the random states are not touched."""
        run = self.run
        run.load_state_dict(state["run"])
        for name, value in self._problem().items():
            if state["problem"][name] != value:
                raise ValueError(f"{name}: was {state['problem'][name]}, is {value}.")
        run.seconds = state["seconds"]
        run.constants = None if state["constants"] is None else Constants(**state["constants"])
        self.guard.load_state_dict(state["guard"])
        self.recorder.load_state_dict(state["recorder"])
        saved = list(state["observers"])
        for observer in filter(_keeps, self.observers):
            names = [name for name, _ in saved]
            if _name(observer) in names:
                observer.load_state_dict(saved.pop(names.index(_name(observer)))[1])
        if state["verdict"] is not None:
            word, message, giver = state["verdict"]
            status = Status(word)
            holds = giver is None or giver in [_signature(observer) for observer in self.observers]
            if status not in (Status.MAX_STEPS, Status.STOPPED) and holds:
                self.verdict, self._giver = Verdict(status, message), giver

    def _problem(self) -> dict[str, Any]:
        """What must be the same when a run goes on, besides the method and the variables."""
        problem = self.run.problem
        parts = {"nonsmooth": problem.nonsmooth, "x_set": problem.x_set, "y_set": problem.y_set}
        kinds = {name: None if part is None else type(part).__name__ for name, part in parts.items()}
        return {**kinds, "modules": len(self.modules)}


def _functions(callbacks: Any) -> list[Any]:
    listed = [callbacks] if callable(callbacks) else callbacks
    if not isinstance(listed, list | tuple) or not all(callable(item) for item in listed):
        raise TypeError(f"callbacks: expected a function of (run, info) or a list of them, got {callbacks!r}.")
    return list(listed)


def _take(observers: list[Any], kind: type[T]) -> T:
    """Take the observer of a kind out of the list, or make one."""
    given = [observer for observer in observers if isinstance(observer, kind)]
    if len(given) > 1:
        raise ValueError(f"callbacks: holds {len(given)} of {kind.__name__}; give one at most.")
    for observer in given:
        observers.remove(observer)
    return given[0] if given else kind()


def _name(observer: Any) -> str:
    return str(getattr(observer, "__name__", type(observer).__name__))


def _signature(observer: Any) -> list[str]:
    return [_name(observer), str(getattr(observer, "tol", ""))]


def _keeps(observer: Any) -> bool:
    """Whether an observer has a state that belongs into checkpoints."""
    return isinstance(observer, Stateful)


def _nothing(*arguments: object) -> None:
    """Stand in for a function that an observer does not have."""


def _number(observer: str, key: str, value: Any, taken: set[str]) -> float:
    if key in taken:
        raise ValueError(f"callbacks: {observer} returned {key!r}, which the history has already; use another name.")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"callbacks: {observer} returned {value!r} for {key!r}; the history takes numbers.") from None
