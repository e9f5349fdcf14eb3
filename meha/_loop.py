"""The loop around a run: its steps, its observers, and what a checkpoint holds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import torch

from meha._checkpoints import Checkpoint
from meha._faults import bad_numbers, undefined, warn_about_rounding
from meha._fingerprints import constants, differing, values_at
from meha._leaves import Leaves, all_finite, copy_
from meha._running import Run, StepInfo
from meha._shared_checkpoints import SharedCheckpoint
from meha._sources import Source
from meha._structures import modules_of
from meha._torch import BREAKDOWNS
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.compiled import Pace, Stepper
from meha.loaders import Stateful, random_states
from meha.observers import DivergenceGuard, Recorder, SkipBadBatches
from meha.solution import Solution
from meha.theory import Constants

__all__ = ["Loop"]

T = TypeVar("T")

SKIP = "Repair it, or leave such batches out with callbacks=meha.observers.SkipBadBatches()."
"""What to do about a bad batch."""

CHECKED = {"upper": "F", "lower": "f + g"}
"""Numbers of a step that must be finite, with their names in messages; their gradients may be so while they are not."""

LEFT = "x or y left the domain of an objective or of a weight. Bound them by x_set or y_set, or take smaller steps."
"""What a value that is not finite at the end means, and what to do."""

SPOILT = "callbacks: {} put NaN or infinity into x or y after step {}; check what it writes. The iterate before is returned."

RESERVED = ("step", "seconds", "gradients_upper", "gradients_lower", "hessian_products")
"""Columns of the history besides the numbers of the steps."""


class Loop:
    """A run with its observers, and the verdict when it is over.

    After each step, NaN and the guard end the run at once. Otherwise the method's own verdict counts, and then the first one of
    the observers, all of which are called. The recorder comes last, so that it sees all numbers.
    """

    def __init__(self, run: Run, source: Source, observers: list[Any], max_steps: int) -> None:
        self.run, self.source, self.max_steps = run, source, max_steps
        self.guard, self.recorder = _take(observers, DivergenceGuard), _take(observers, Recorder)
        self.skipper = next((observer for observer in observers if isinstance(observer, SkipBadBatches)), None)
        self.observers = observers
        self.verdict: Verdict | None = None
        self._giver: list[str] | None = None  # the observer that gave the verdict, and its tolerance
        self._last: StepInfo | None = None
        self._stepper: Stepper | None = None  # the one that took the last steps
        self._begun = run.k
        self._values: dict[str, float] | None = None  # F and f at the start
        self._good: tuple[Any] | None = None  # the last batch on which a step went well
        variables = (run.state.x, run.state.y)
        self.modules = [part for variable in variables for module in modules_of(variable.value) for part in module.modules()]

    def __enter__(self) -> Self:
        for observer in (self.guard, *self.observers, self.recorder):
            getattr(observer, "begin", _nothing)(self.run, self.max_steps)
        return self

    def remember(self) -> None:
        """Keep the values of F and f at the start, by which a checkpoint is known to be of this problem."""
        self._values = values_at(self.run, self.guard.start)

    def __exit__(self, *error: object) -> None:
        for observer in self.observers:
            getattr(observer, "end", _nothing)(self.run)

    def due(self, every: int) -> bool:
        """Whether one of the last steps is a multiple of ``every``."""
        return self._last is not None and self._last.due(every)

    def advance(self, group: Sequence[tuple[Any, Any, str]], pace: Pace) -> None:
        """Take a step for each batch, which comes with its place in the source and its name."""
        if pace.stepper is not pace.eager and self._advance_together([batch for batch, _, _ in group], pace):
            return
        for batch, self.source.place, self.source.name in group:
            if self.skipper is not None:
                self.skipper.keep(self.run)
            info = pace.eager([batch])
            failure = self._failure(info)
            if failure is None:
                self._good = (batch,)
                self._judge(info, pace.eager)
            elif not self._skips(failure):
                pace.eager.rewind()
                self._fail(dataclasses.replace(failure, message=f"{failure.message} The iterate before it is returned."))
                if failure.status is Status.NON_FINITE:
                    self.recorder(self.run, info)
            if self.verdict is not None:
                return

    def _skips(self, failure: Verdict) -> bool:
        """Whether a step that failed is undone and its batch left out."""
        skipper, source = self.skipper, self.source
        if skipper is None or source.loader is None or failure.status is not Status.NON_FINITE:
            return False
        return skipper.skip(self.run, source.name)

    def _advance_together(self, batches: Sequence[Any], pace: Pace) -> bool:
        """Take compiled steps; False if they must be taken one by one: few, of another form, wrong, or failing."""
        stepper = pace.stepper
        if not stepper.fits(batches):
            return False
        pace.watch()
        try:
            info = stepper(batches)
            failed = self._failure(info) is not None
        except BREAKDOWNS:
            failed = True
        if failed:
            stepper.rewind()
            return False
        if (back := pace.differs(batches)) is not None:
            self.recorder.forget(back)
            return False
        self._good = (batches[-1],)
        self._judge(info, stepper)
        return True

    def _failure(self, info: StepInfo) -> Verdict | None:
        """Why the last step is of no use."""
        ended = self.run.ended
        if ended is not None and ended.status is Status.BROKE_DOWN:
            return ended
        names = [name for name in CHECKED if name in info and not math.isfinite(info[name])]
        if not names and math.isfinite(info.size):
            return None
        values = ", ".join(f"{CHECKED[name]} = {info[name]}" for name in names)
        return Verdict(Status.NON_FINITE, f"Step {info.step} gave NaN or infinity{f' ({values})' if values else ''}.")

    def _judge(self, info: StepInfo, stepper: Stepper) -> None:
        """Show the numbers of the last step to all that watch the run."""
        self._last, self._stepper = info, stepper
        verdict = self.guard(self.run, info)
        if verdict is not None:
            self._fail(verdict)
        else:
            self.verdict = self.run.ended
            taken = {*info, *RESERVED}
            leaves = self._leaves()
            for observer in self.observers:
                versions = [leaf._version for leaf in leaves]
                info = self._observe(observer, info, taken)
                if versions != [leaf._version for leaf in leaves] and not all_finite(leaves):
                    stepper.rewind()
                    self.verdict = Verdict(Status.NON_FINITE, SPOILT.format(_name(observer), info.step))
                    break
            self._agree(info)
        warn_about_rounding(self.run, info)
        self.recorder(self.run, info)

    def _leaves(self) -> Leaves:
        return [leaf.detach() for leaf in self.run.state.x.leaves + self.run.state.y.leaves]

    def _agree(self, info: StepInfo) -> None:
        """Let a verdict of an observer in one process hold in all; the first process that has one decides."""
        group = self.run.group
        if group is None or all(getattr(observer, "agrees", False) for observer in self.observers):
            return
        if group.any(self.verdict is not None, self.run.state.y.device):
            verdicts = group.gather(None if self.verdict is None else (self.verdict.status.value, self.verdict.message))
            status, message = next(verdict for verdict in verdicts if verdict is not None)
            self.verdict = Verdict(Status(status), message)

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
        """End the run, with the cause if it can be found, or with what to try."""
        run = self.run
        x, y = run.state.x.copy(), run.state.y.copy()
        copy_([leaf.detach() for leaf in x.leaves + y.leaves], self.guard.start)
        advice = self._cause(x, y, verdict.status)
        if not advice:  # a method may measure the problem first, in this process alone
            advice = run.method.advice(run.problem, x, y, run.batch) if run.group is None else "Take smaller steps."
        self.verdict = Verdict(verdict.status, f"{verdict.message} {advice}")

    def _cause(self, x: Variable, y: Variable, status: Status) -> str:
        """Whether a batch, or the start (x, y), is to blame; empty if neither is."""
        run, batch, name = self.run, self.run.batch, self.source.name
        bad = bad_numbers(batch) if status is not Status.DIVERGED else ""
        if run.group is not None:
            found = [(i, *pair) for i, pair in enumerate(run.group.gather((bad, name))) if pair[0]]
            bad, name = (found[0][1], f"{found[0][2]} in process {found[0][0]}") if found else ("", name)
        if bad:
            return f"Look at {name or 'the batch'}: {bad}. {SKIP}"
        if self._good is not None and self.source.loader is not None and status is not Status.DIVERGED:
            here = undefined(run, run.state.x, run.state.y, batch)
            if here and not undefined(run, run.state.x, run.state.y, *self._good):
                level, value = here
                return f"Look at {name}: {level} is {value} on it, and finite on the batch before, at the same point. {SKIP}"
        start = undefined(run, x, y, batch if self._good is None else self._good[0])
        if start:
            level, value = start
            return f"{level.capitalize()} is {value} at the start (x0, y0); check it, or start elsewhere."
        return ""

    def undo(self, pace: Pace) -> None:
        """Go back to the last whole step, after an exception within one."""
        for stepper in (pace.eager, pace.stepper):
            if not stepper.whole:
                stepper.rewind()
                self.run.state.k = self._begun if self._last is None else self._last.step

    def interrupt(self, pace: Pace, file: Checkpoint | SharedCheckpoint | None) -> None:
        """End the run at its last whole step."""
        self.undo(pace)
        more = f"; repeat the call to go on from the checkpoint {file.path}" if file and file.exists else ""
        self.verdict = Verdict(Status.INTERRUPTED, f"Interrupted after step {self.run.k}{more}.")

    def annotate(self, error: Exception, pace: Pace) -> None:
        """Say in an error where the run was, and keep its last whole step with it."""
        self.undo(pace)
        k = self.run.k
        if not k:
            return
        batch = f", with {self.source.name}" if self.source.name else ""
        self.verdict = Verdict(Status.INTERRUPTED, f"{type(error).__name__} after step {k}{batch}.")
        error.solution = self.solution()  # type: ignore[attr-defined]
        error.add_note(f"meha: raised after step {k} of the run{batch}; error.solution is what there was until then.")

    def check_end(self) -> None:
        """Take back the verdict if x, y, F, f or g has no finite value where the run ended: gradients may be finite there."""
        run, verdict = self.run, self.verdict
        if verdict is None or verdict.status.failed:
            return
        if not all_finite(self._leaves()):
            self.verdict = Verdict(Status.NON_FINITE, f"x or y is not finite after step {run.k}; check what callbacks write.")
            return
        known = self.modules and self._last is not None and "lower" in self._last
        blind = known or (run.problem.needs_batch and run.batch is None)
        found = None if blind else undefined(run, run.state.x, run.state.y, run.batch)
        if found and self._stepper is not None:
            k, level, value = run.k, found[0].capitalize(), found[1]
            self._stepper.rewind()
            still = undefined(run, run.state.x, run.state.y, run.batch)
            where = "at the end" if still else f"after step {k}, and the iterate before it is returned"
            self.verdict = Verdict(Status.NON_FINITE, f"{level} is {value} {where}; {LEFT}")

    def solution(self) -> Solution:
        run = self.run
        assert self.verdict is not None
        self.recorder.end(run)
        kept = [upper for observer in self.observers if (upper := getattr(observer, "restore", _nothing)(run)) is not None]
        return Solution(
            problem=run.problem,
            method=run.method,
            x=None if run.problem.simple else run.state.x.snapshot(),
            y=run.state.y.snapshot(),
            status=self.verdict.status,
            message=self.verdict.message,
            upper=kept[0] if kept and self.modules else self._upper(),
            steps=run.k,
            seconds=run.seconds,
            counts=run.counts,
            history=self.recorder.history,
            constants=run.constants,
            batch=run.batch,
            report=dict(run.method.report(run)),
            y0=self.guard.start[len(run.state.x.leaves) :],
            group=run.group,
        )

    def _upper(self) -> float | None:
        """F(x, y); with modules, which a further pass would change, the last number of a step."""
        run, history = self.run, self.recorder.history
        if not (self.modules or run.group is not None or (run.problem.needs_batch and run.batch is None)):
            with torch.no_grad(), contextlib.suppress(*BREAKDOWNS):
                return float(run.oracle.upper(run.state.x, run.state.y, run.batch))
        return next((value for value in reversed(history.get("upper", [])) if math.isfinite(value)), None)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the future depends on, in plain tensors, numbers and text."""
        run, verdict = self.run, self.verdict
        return {
            "random": random_states(self.source.loader),
            "problem": self._problem(),
            "values": self._values,
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
                raise ValueError(_changed(name, state["problem"][name], value))
        self._values = values_at(run, state["guard"]["start"])
        if reason := differing(state["values"], self._values, max(torch.finfo(leaf.dtype).eps for leaf in run.state.x.leaves)):
            raise ValueError(reason)
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
            more = status is Status.FINISHED and run.method.open_ended and run.k < self.max_steps
            if status not in (Status.MAX_STEPS, Status.STOPPED) and holds and not more:
                self.verdict, self._giver = Verdict(status, message), giver

    def _problem(self) -> dict[str, Any]:
        """What must be the same when a run goes on, besides the method and the variables."""
        problem = self.run.problem
        parts = {"nonsmooth": problem.nonsmooth, "x_set": problem.x_set, "y_set": problem.y_set}
        kinds = {name: None if part is None else f"{type(part).__name__} {constants(part)}" for name, part in parts.items()}
        response = "optimistic" if problem.selected is None else type(problem.selected).__name__
        return {**kinds, "response": response, "modules": len(self.modules)}


def _changed(name: str, before: Any, now: Any) -> str:
    """How a part of the problem differs from that in a checkpoint; a digest of its numbers follows its kind."""
    (old, *_), (new, *_) = (str(part).split(" ") for part in (before, now))
    return f"{name}: was {old}, is {new}{' with other numbers' if old == new else ''}."


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
    return [_name(observer), str(getattr(observer, "tol", getattr(observer, "patience", "")))]


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
