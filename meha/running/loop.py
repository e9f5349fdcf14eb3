"""The loop of :func:`meha.solve`: steps, observers, checkpoints, and what is done when a step fails."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from meha.engines.base import Engine
from meha.method.method import Run, State, StepInfo
from meha.method.status import Status, TrainingWarning, Verdict
from meha.problem.loaders import BatchSource, Group, random_states, set_random_states
from meha.problem.nonsmooth import NonSmooth
from meha.problem.oracle import Function
from meha.problem.responses import Trained
from meha.problem.sets import ConvexSet
from meha.running.checkpoints import Checkpoint, SharedCheckpoint, checksum
from meha.running.compiled import Compiled, CompiledPace, Eager
from meha.running.observers import DivergenceGuard, History, Recorder, SkipBadBatches, work
from meha.running.solution import Solution
from meha.tensors.state import Stateful, pack, unpack
from meha.tensors.torch_private import BREAKDOWNS, fsdp_dtype
from meha.tensors.variables import Leaves, Variable, all_finite, copy_, modules_of

LEVELS = ("upper", "lower")


def plain(value: Any) -> Any:
    """Turn a value into tensors, numbers and text, of which a checksum can be taken; a function counts as "function".

    >>> from meha.problem.sets import Box
    >>> first, same, other = (checksum(plain(Box(0.0, upper))) for upper in (1.0, 1.0, 2.0))
    >>> first == same, first == other
    (True, False)
    """
    if value is None or isinstance(value, Number | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, NonSmooth | ConvexSet):
        # Private attributes are caches, such as labels for the present size of y, and may differ between equal terms.
        public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
        return [type(value).__name__, plain(public)]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return "function" if callable(value) else type(value).__name__


def values_at(run: Run, start: Leaves) -> dict[str, list[float]] | None:
    """Return what identifies a problem: F, f, g and the constraints at a start, given as the leaves of x and y, and beside it.

    None where they are not functions of x and y alone: with modules, batches and several processes, and where two calls give
    two values.
    """
    x, y = run.state.x.copy(), run.state.y.copy()
    if x.has_modules or y.has_modules or run.problem.needs_batch or run.batch is not None or run.group is not None:
        return None
    states, found = random_states(), dict[str, list[float]]()
    try:
        with torch.no_grad():
            for shift in SHIFTS:
                for leaf, begin in zip(x.leaves + y.leaves, start, strict=True):
                    pattern = (
                        (shift * torch.arange(1.0, begin.numel() + 1, device=begin.device)).cos().to(begin).reshape(begin.shape)
                    )
                    leaf.copy_(begin + shift * (1 + begin.abs()) * pattern)
                for variable, domain in zip((x, y), run.problem.domains if shift else (), strict=bool(shift)):
                    domain.project_(variable)
                try:
                    once, again = (numbers_at(run, x, y) for _ in range(2))
                except Exception:
                    if not shift:
                        raise
                    continue  # a function of the user may raise anything where the run would never go
                if repr(once) != repr(again):  # as text, so that NaN equals NaN
                    return None
                for name, numbers in once.items():
                    found.setdefault(name, []).extend(numbers)
    except BREAKDOWNS:
        return None
    finally:
        set_random_states(states)  # a run with a checkpoint draws the same random numbers as one without
    return found


SHIFTS = (0.0, 0.3, 0.7)
"""Distances from the start, relative to 1 and its numbers, of the points at which problems are compared."""


def numbers_at(run: Run, x: Variable, y: Variable) -> dict[str, list[float]]:
    """F, f and g by the names of their arguments, and of each constraint the number of its rows and a weighted sum."""
    oracle, problem = run.oracle, run.problem
    found = {level: [float(getattr(problem, level)(x.value, y.value))] for level in LEVELS}  # without terms of the response
    found["nonsmooth"] = [float(oracle.g(x, y))]
    for name, constraints in zip(("lower_constraints", "upper_constraints"), problem.constraints, strict=True):
        found[name] = []
        for rows in (rows for constraint in constraints for rows in constraint.values(x, y)):
            found[name] += [float(len(rows)), float(rows @ torch.arange(1.0, len(rows) + 1, device=rows.device).cos().to(rows))]
    return found


def differing(saved: Mapping[str, list[float]] | None, found: Mapping[str, list[float]] | None, eps: float) -> str:
    """Say how the numbers of two problems differ beyond rounding; empty if they do not, or are unknown.

    >>> differing({"upper": [1.0], "lower": [2.0, 4.0]}, {"upper": [1.0], "lower": [2.0, 3.0]}, eps=1e-16)
    'lower: is another one: near the start of the run, its value was 4, is 3.'
    """
    if saved is None or found is None:
        return ""
    for name in saved:
        before, now = saved[name], found.get(name, [])
        if len(before) != len(now):
            return f"{name}: are others than at the start of the run."
        for old, new in zip(before, now, strict=True):
            # Half of the digits: the same function may round differently in another process, another function differs by more.
            close = math.isclose(old, new, rel_tol=math.sqrt(eps), abs_tol=math.sqrt(eps))
            if not (close or (math.isnan(old) and math.isnan(new))):
                return f"{name}: is another one: near the start of the run, its value was {old:.6g}, is {new:.6g}."
    return ""


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
HALF = frozenset({torch.float16, torch.bfloat16})

FIRST_LOOK = 16  # the first step in which rounding is examined
ROUNDING = 0.25  # differences of f below this many units of rounding of f are mostly noise; measured in docs/distributed.md

# Modules that a run has trained, with the versions of their parameters at its end; weak, so that they can be freed.
_trained: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()


def bad_numbers(batch: Any) -> str:
    """Say which tensors of a batch hold NaN or infinity; empty if none does.

    >>> bad_numbers({"images": torch.tensor([0.0, torch.nan]), "labels": torch.tensor([1, 2])})
    'images has 1 NaN or infinite of 2 numbers'
    """
    bad_tensors = []
    for name, tensor in _named_tensors(batch, ""):
        n = tensor.numel()
        bad = 0 if not tensor.is_floating_point() else n - int(torch.isfinite(tensor).sum())
        if bad:
            bad_tensors.append(f"{name or 'it'} has {bad} NaN or infinite of {n} number{'s' * (n != 1)}")
    return ", ".join(bad_tensors)


def values_of(
    run: Run, x: Variable, y: Variable, batch: Any, *levels: Literal["upper", "lower", "phi"]
) -> dict[Function, float]:
    """F, f and f + g at (x, y), or those that are named, without those that break down."""
    oracle, found = run.oracle, {}
    buffers = [(buffer, buffer.clone()) for module in _modules(x, y) for buffer in module.buffers(recurse=False)]
    states = random_states()
    try:
        functions = [getattr(oracle, level) for level in levels or ("upper", "lower", "phi")]
        for function in dict.fromkeys(functions):  # without g, phi is lower, and is called once
            with torch.no_grad(), contextlib.suppress(*BREAKDOWNS):
                found[function] = float(function(x, y, batch))
        return found
    finally:  # this is a diagnosis: batch norm's statistics and random numbers must not notice it
        set_random_states(states)
        for buffer, before in buffers:
            buffer.copy_(before)


def undefined(run: Run, x: Variable, y: Variable, batch: Any) -> tuple[str, float] | None:
    """The first of F, f and f + g that is not finite at (x, y), as its argument and value; None if all are or break down."""
    values = values_of(run, x, y, batch)
    return next(((function.level, value) for function, value in values.items() if not math.isfinite(value)), None)


def warn_about_modules(run: Run, *, resumes: bool) -> None:
    """Warn about modules in eval mode, about dropout where it does harm, and about modules that a run has trained before.

    Args:
        resumes: whether the run may go on from a checkpoint, which overwrites the modules.
    """
    state, messages = run.state, []
    for variable in (state.x, state.y):
        argument = variable.argument
        for module in modules_of(variable.value):
            parts = {name: part for name, part in module.named_modules() if _has_modes(part)}
            if parts and not module.training:
                kinds = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
                messages.append(
                    f"{argument}0: the module is in eval mode, in which its {kinds} does not work as in training; call"
                    f" {argument}0.train() before the run."
                )
            random = [type(part).__name__ for part in parts.values() if part.training and isinstance(part, DROPOUTS)]
            if random and run.method.repeats:
                messages.append(
                    f"{argument}0: {random[0]} gives another value with every call, and {run.method.name} needs the same value"
                    f" twice, because {run.method.repeats}; take MEHA, F2SA, VPBGD or the default, or remove it."
                )
            # Equal versions: nobody has written into the parameters since then, so they are still those of the last run.
            if not resumes and _trained.get(module) == _versions(module):
                messages.append(
                    f"{argument}0: a run has trained this module before, and goes on from where it is; to start afresh, build"
                    " a new one, and pass copy=True to each run, which then trains a copy."
                )
    for message in messages if run.main else []:
        warnings.warn(message, TrainingWarning, stacklevel=3)


def half_precision(run: Run) -> torch.dtype | None:
    """The half-precision dtype in which the objectives are computed, as far as can be seen; None if there is none."""
    x, y = run.state.x, run.state.y
    known = [run.oracle.lower.half, *(fsdp_dtype(module) for module in x.sharded + y.sharded)]
    if torch.is_autocast_enabled(y.device.type):
        known.append(torch.get_autocast_dtype(y.device.type))
    return next((dtype for dtype in [*known, *(leaf.dtype for leaf in y.leaves)] if dtype in HALF), None)


def warn_about_rounding(run: Run, info: StepInfo) -> None:
    """Warn once when f(x, y) - f(x, theta), from which x learns, is within the rounding of f in half precision.

    It examines the steps 16, 32, 64 and so on.
    """
    due = info.step >= FIRST_LOOK and not info.step & (info.step - 1)  # seldom: reading the gap waits for the device
    if not due or run.rounded or not run.main or not {"gap", "lower"} <= set(info) or not (dtype := half_precision(run)):
        return
    gap, lower = abs(info["gap"]), abs(info["lower"])
    bound = ROUNDING * torch.finfo(dtype).eps * lower
    if gap < bound:
        run.rounded = True
        warnings.warn(
            f"x learns from f(x, y) - f(x, theta) = {gap:.1e} at step {info.step}, but the passes run in"
            f" {str(dtype).removeprefix('torch.')}, where differences of f = {lower:.2g} below {bound:.1e} are mostly rounding;"
            " compute in float32, weigh groups of examples instead of single ones, or take larger batches. See"
            " docs/distributed.md.",
            TrainingWarning,
            stacklevel=3,
        )


def mark_trained(run: Run) -> None:
    """Remember the modules of a run that is over."""
    for module in modules_of((run.state.x.value, run.state.y.value)):
        _trained[module] = _versions(module)


def forget_trained(module: nn.Module) -> None:
    """Let the next run continue with a trained module without a warning."""
    _trained.pop(module, None)


def _modules(*variables: Variable) -> Iterator[nn.Module]:
    """Yield the modules of variables, with their submodules."""
    return (part for variable in variables for module in modules_of(variable.value) for part in module.modules())


def _versions(module: nn.Module) -> tuple[int, ...]:
    """Return torch's counters of in-place writes, which change when parameters do."""
    return tuple(parameter._version for parameter in module.parameters())


def _has_modes(part: nn.Module) -> bool:
    """Whether a module works differently in training and in evaluation."""
    if isinstance(part, DROPOUTS):
        return part.p > 0
    return isinstance(part, NORMS) and part.track_running_stats  # without them, it uses the batch in both modes


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their paths in it, such as ``images.left``."""
    if isinstance(value, Tensor):
        yield name, value
        return
    pairs: Any = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if isinstance(value, list | tuple):  # the items of a named tuple, as loaders.Together yields, have names
        pairs = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    for key, item in pairs.items():
        yield from _named_tensors(item, f"{name}.{key}" if name else str(key))


T = TypeVar("T")

SKIP = "Repair it, or leave such batches out with callbacks=meha.observers.SkipBadBatches()."  # remedy for a bad batch
LEFT = "x or y left the domain of an objective or of a weight. Bound them by x_set or y_set, or take smaller steps."
SPOILT = "callbacks: {} put NaN or infinity into x or y after step {}; check what it writes. The iterate before is returned."

RESTARTS = 5  # with steps a quarter as long each time: a thousand times shorter in the end, and then they are not the cause
FALL = 100.0  # a function that falls by this many times 1 + its size at the start has no minimum that shorter steps would find

# Numbers of a step that must be finite, by their names in messages: log(1 - y) is NaN beyond y = 1, its gradient is not.
CHECKED = {"upper": "F", "lower": "f + g"}


def finished(run: Run) -> Verdict:
    """The verdict of a run that never ends by itself, after its last step."""
    return Verdict(Status.FINISHED, "The only step was taken." if run.k == 1 else f"All {run.k} steps were taken.")


def solution_of(run: Run, verdict: Verdict, history: History, y0: Leaves) -> Solution:
    """The solution where a run is now; what later steps would change is copied, except for modules."""
    return Solution(
        problem=run.problem,
        method=run.method,
        x=None if run.problem._without_x else run.state.x.snapshot(),
        y=run.state.y.snapshot(),
        status=verdict.status,
        message=verdict.message,
        upper=_upper(run, history),
        steps=run.k,
        seconds=run.seconds,
        counts=dataclasses.replace(run.counts),
        history=history,
        engine=run.engine,
        constants=run.constants,
        batch=run.batch,
        report=run.method.report(run),
        y0=y0,
        group=run.group,
    )


def _upper(run: Run, history: History) -> float | None:
    """Return F(x, y); with several processes, one of which may fail alone, the last F that a step reported."""
    if run.group is None and not (run.problem.needs_batch and run.batch is None):
        return values_of(run, run.state.x, run.state.y, run.batch, "upper").get(run.oracle.upper)
    return next((value for value in reversed(history.get("upper", [])) if math.isfinite(value)), None)


class Loop:
    """A run with its observers, and the verdict when it is over.

    After each step, NaN and the guard end the run at once. Otherwise the method's own verdict counts, and then the first one of
    the observers, all of which are called. The recorder comes last, so that it sees all numbers.
    """

    def __init__(
        self, run: Run, source: BatchSource, observers: list[Any], max_steps: int, deadline: float | None = None
    ) -> None:
        self.run, self.source, self.max_steps, self.deadline = run, source, max_steps, deadline
        if isinstance(run.method, Engine):  # a step of an engine may hold a whole search
            run.oracle.deadline = deadline
        self.guard, self.recorder = _take(observers, DivergenceGuard), _take(observers, Recorder)
        self.skipper = next((observer for observer in observers if isinstance(observer, SkipBadBatches)), None)
        self.observers = observers
        self.verdict: Verdict | None = None
        self._giver: list[str] | None = None  # the observer that gave the verdict, and its tolerance
        self._last: StepInfo | None = None
        self._stepper: Eager | Compiled | None = None  # the one that took the last steps
        self._begun = run.k
        self._values: dict[str, list[float]] | None = None  # of the problem, near the start
        self.restarts: list[str] = []  # how attempts ended that began again with shorter steps
        self.lost = 0  # their steps
        self._buffers: dict[str, Tensor] = {}  # of modules, at the start
        self._good: tuple[Any] | None = None  # the last batch on which a step went well; a tuple, as a batch may be None
        self.modules = list(_modules(run.state.x, run.state.y))

    def __enter__(self) -> Self:
        for observer in (self.guard, *self.observers, self.recorder):
            getattr(observer, "begin", _nothing)(self.run, self.max_steps)
        self._buffers = {name: buffer.clone() for name, buffer in self._buffers_now().items()}
        return self

    def remember(self) -> None:
        """Keep F and f at the start, by which a later run recognises that a checkpoint belongs to its problem."""
        self._values = values_at(self.run, self.guard.start)

    def __exit__(self, *error: object) -> None:
        for observer in self.observers:
            getattr(observer, "end", _nothing)(self.run)

    def due(self, every: int) -> bool:
        """Whether one of the last steps is a multiple of ``every``."""
        return self._last is not None and self._last.due(every)

    def advance(self, group: Group, pace: CompiledPace) -> None:
        """Take a step for each batch of a group, as many as possible together."""
        restarts = len(self.restarts)
        while group and self.verdict is None:
            if len(self.restarts) > restarts:  # what was compiled changes the tensors of the state before
                restarts = len(self.restarts)
                pace.begin_again()
            n = 0 if pace.compiled is None else pace.compiled.fit(group)
            together = group if n == len(group) else group[: n or 1]
            if pace.compiled is None or not n or not self._advance_together(pace.compiled, together, pace):
                self._advance_singly(together, pace)
            group = group[len(together) :] if len(together) < len(group) else []

    def _advance_singly(self, group: Group, pace: CompiledPace) -> None:
        """Take one step after another."""
        for batch, self.source.place, self.source.name in group:  # the source is ahead by a group; checkpoints need this place
            if self.skipper is not None:
                self.skipper.keep(self.run)
            info = pace.eager(batch)
            failure = self._failure(info)
            if failure is None:
                self._good = (batch,)
                self._judge(info, pace.eager)
            elif not self._skips(failure):
                pace.eager.rewind()
                self._fail(dataclasses.replace(failure, message=f"{failure.message} The iterate before it is returned."))
                if failure.status is Status.NON_FINITE and self.verdict is not None:  # a step that broke down has no numbers
                    self.recorder(self.run, info)
            if self.verdict is not None:
                return

    def _skips(self, failure: Verdict) -> bool:
        """Undo a failed step and leave its batch out; False if the run must end instead."""
        skipper, source = self.skipper, self.source
        if skipper is None or source.loader is None or failure.status is not Status.NON_FINITE:
            return False  # without batches, the same step would fail again
        return skipper.skip(self.run, source.name)

    def _advance_together(self, stepper: Compiled, group: Group, pace: CompiledPace) -> bool:
        """Take compiled steps; False if they must be taken one by one: wrong results or a failure."""
        try:
            info = stepper(group)
            failed = self._failure(info) is not None
        except BREAKDOWNS:
            failed = True
        if failed:  # eager steps then find the one at fault, and end the run with the same message as without compile
            stepper.rewind()
            return False
        if (back := pace.differs(group)) is not None:
            self.recorder.forget(back)  # the steps after it are taken again
            return False
        batch, self.source.place, self.source.name = group[-1]
        self._good = (batch,)
        self._judge(info, stepper)
        return True

    def _failure(self, info: StepInfo) -> Verdict | None:
        """Return why the last step must be discarded; None if it is good."""
        ended = self.run.ended
        if ended is not None and ended.status is Status.BROKE_DOWN:
            return ended
        names = [name for name in CHECKED if name in info and not math.isfinite(info[name])]
        if not names and math.isfinite(info.size):
            return None
        values = ", ".join(f"{CHECKED[name]} = {info[name]}" for name in names)
        return Verdict(Status.NON_FINITE, f"Step {info.step} gave NaN or infinity{f' ({values})' if values else ''}.")

    def _judge(self, info: StepInfo, stepper: Eager | Compiled) -> None:
        """Pass the numbers of the last step to the guard, the observers and the recorder, and keep the first verdict."""
        self._last, self._stepper = info, stepper
        verdict = self.guard(self.run, info)
        if verdict is not None:
            self._fail(verdict)
            if self.verdict is None:  # the run began again
                return
        else:
            self.verdict = self.run.ended
            taken, leaves = {*info, "step", "seconds", *work(self.run)}, self._leaves()  # columns that the recorder fills
            for observer in self.observers:
                versions = [leaf._version for leaf in leaves]
                info = self._observe(observer, info, taken)
                # Only where an observer wrote into x or y: all_finite waits for the device.
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
        """Let a verdict of an observer in one process hold in all; the first process that has one decides.

        Otherwise one process would stop, and the others would wait for its messages for ever.
        """
        group = self.run.group
        if group is None or all(getattr(observer, "agrees", False) for observer in self.observers):
            return  # observers that agree reach the same verdict in every process
        if group.any(self.verdict is not None, self.run.state.y.device):
            verdicts = group.gather(None if self.verdict is None else (self.verdict.status.value, self.verdict.message))
            status, message = next(verdict for verdict in verdicts if verdict is not None)
            self.verdict = Verdict(Status(status), message)

    def _observe(self, observer: Any, info: StepInfo, taken: set[str]) -> StepInfo:
        """Call an observer, and act on its answer."""
        answer, name = observer(self.run, info), _name(observer)
        if isinstance(answer, Mapping):
            for key, value in answer.items():
                if key in taken:
                    raise ValueError(f"callbacks: {name} returned {key!r}, which the history has already; use another name.")
                try:
                    info = info.plus(**{key: float(value)})
                except (TypeError, ValueError):
                    raise TypeError(f"callbacks: {name} returned {value!r} for {key!r}; the history takes numbers.") from None
            return info
        if type(answer).__name__ in ("bool", "bool_"):  # numpy's as well, whose name depends on its version
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
        """Begin again where steps that the run chose are to blame, or end it with a message that names the cause."""
        run = self.run
        x, y = self._start()
        advice = self._cause(x, y, verdict.status)
        if not advice and self._begin_again(verdict.status):
            return
        if not advice:  # a method may measure the problem first, in this process alone
            advice = run.method.advice(run.problem, x, y, run.batch) if run.group is None else "Take smaller steps."
        self.verdict = Verdict(verdict.status, f"{verdict.message} {advice}")

    def _start(self) -> tuple[Variable, Variable]:
        """Copies of x and y at the start."""
        x, y = self.run.state.x.copy(), self.run.state.y.copy()
        copy_([leaf.detach() for leaf in x.leaves + y.leaves], self.guard.start)
        return x, y

    def _too_long(self, status: Status) -> bool:
        """Whether the steps may have been too long, as the problem itself shows no other cause for a failure."""
        run, (x0, y0) = self.run, self._start()
        x, y, upper, lower = run.state.x, run.state.y, run.oracle.upper, run.oracle.phi
        begun, now = values_of(run, x0, y0, run.batch), values_of(run, x, y, run.batch)
        other_x, other_y = values_of(run, x0, y, run.batch), values_of(run, x, y0, run.batch)

        def less(a: dict[Function, float], b: dict[Function, float], function: Function, by: float = 0.0) -> bool:
            low, high = a.get(function, math.nan), b.get(function, math.nan)
            return low < high - by * (1 + abs(high))

        if less(other_x, begun, lower, by=FALL):  # the lower level has no minimum at x0
            return False
        if less(now, begun, upper, by=FALL) and not less(other_y, now, lower):  # F has none, along points where y is no worse
            return False
        # A method that breaks down where F is better meets what it cannot take: a flat or an indefinite Hessian.
        return status is not Status.BROKE_DOWN or not less(now, begun, upper)

    def _begin_again(self, status: Status) -> bool:
        """Go back to the start with shorter steps; False where they are the user's, or not to blame, or shortened for long."""
        run, lost = self.run, self.run.k
        if not run.chosen_steps or len(self.restarts) == RESTARTS or not self._too_long(status):
            return False
        run.begin_again(self.guard.start)
        with torch.no_grad():
            for name, buffer in self._buffers_now().items():
                buffer.copy_(self._buffers[name])
        self.restarts.append(f"{status} after {lost} step{'s' * (lost != 1)}")
        self.lost += lost
        self.verdict, self._giver, self._last, self._begun = None, None, None, 0
        self.guard.begin(run, self.max_steps)
        self.recorder.forget(0)
        return True

    def _buffers_now(self) -> dict[str, Tensor]:
        """The buffers of modules in x and y, by name."""
        variables = (self.run.state.x, self.run.state.y)
        return {f"{v.argument}.{name}": buffer for v in variables for name, buffer in v.buffers().items()}

    @property
    def _story(self) -> str:
        """What was tried before, for the message; empty if nothing was."""
        if not self.restarts:
            return ""
        steps, ends = (f"{name}={step:.3g}" for name, step in self.run.chosen_steps.items()), ", ".join(self.restarts)
        return f" The run began again with shorter steps than it had chosen ({ends}), in the end with {', '.join(steps)}."

    def _cause(self, x: Variable, y: Variable, status: Status) -> str:
        """Say whether a batch or the start (x, y) is to blame; empty if neither is."""
        run, batch, name = self.run, self.run.batch, self.source.name
        bad = bad_numbers(batch) if status is not Status.DIVERGED else ""
        if run.group is not None:  # all processes must call gather, also those whose batch is good
            blamed = [(i, *pair) for i, pair in enumerate(run.group.gather((bad, name))) if pair[0]]
            bad, name = (blamed[0][1], f"{blamed[0][2]} in process {blamed[0][0]}") if blamed else ("", name)
        if bad:
            return f"Look at {name or 'the batch'}: {bad}. {SKIP}"
        if self._good is not None and self.source.loader is not None and status is not Status.DIVERGED:
            here = undefined(run, run.state.x, run.state.y, batch)
            # Finite on another batch at the same point: the batch is to blame, and not steps that are too long.
            if here and not undefined(run, run.state.x, run.state.y, *self._good):
                level, value = here
                return f"Look at {name}: {level} is {value} on it, and finite on the batch before, at the same point. {SKIP}"
        start = undefined(run, x, y, batch if self._good is None else self._good[0])
        if start:
            level, value = start
            return f"{level.capitalize()} is {value} at the start (x0, y0); check it, or start elsewhere."
        return ""

    def undo(self, pace: CompiledPace) -> None:
        """Go back to the last completed step, after an exception inside a step."""
        for stepper in (pace.eager, pace.compiled):
            if stepper is not None and not stepper.whole:  # the exception came while this one changed x and y
                stepper.rewind()
                self.run.state.k = self._begun if self._last is None else self._last.step

    @property
    def late(self) -> bool:
        """Whether the time allowed is over, in any of the processes."""
        if self.deadline is None:
            return False
        over, group = time.monotonic() >= self.deadline, self.run.group
        return over if group is None else group.any(over, self.run.state.y.device)

    def end_late(self) -> None:
        """End the run because its time is over, with what an engine knows until then."""
        self.run.oracle.deadline = None  # the solution and its report may take a few values more
        known = self.verdict or self.run.ended
        message = f"The time allowed (max_seconds) was over after step {self.run.k}; allow more, or start from here."
        self.verdict = Verdict(Status.MAX_SECONDS, f"{message} Until then: {known.message}" if known else message)

    def interrupt(self, pace: CompiledPace, file: Checkpoint | SharedCheckpoint | None) -> None:
        """End the run at its last completed step."""
        self.undo(pace)
        more = f"; repeat the call to go on from the checkpoint {file.path}" if file and file.exists else ""
        self.verdict = Verdict(Status.INTERRUPTED, f"Interrupted after step {self.run.k}{more}.")

    def annotate(self, error: Exception, pace: CompiledPace) -> None:
        """Add to an error where it was raised, and the solution after the last completed step."""
        self.undo(pace)
        k = self.run.k
        if not k:  # no step was completed, so there is nothing to keep
            return
        batch = f", with {self.source.name}" if self.source.name else ""
        self.verdict = Verdict(Status.INTERRUPTED, f"{type(error).__name__} after step {k}{batch}.")
        error.solution = self.solution()  # type: ignore[attr-defined]
        error.add_note(f"meha: raised after step {k} of the run{batch}; error.solution is what there was until then.")

    def check_end(self) -> bool:
        """Replace the verdict if x, y, F, f or g is not finite where the run ended; return whether it begins again instead.

        A step reports F before it moves, so that the last step may leave the domain of F unnoticed.
        """
        run, verdict = self.run, self.verdict
        if verdict is None or verdict.status.failed:
            return False
        if not all_finite(self._leaves()):
            self.verdict = Verdict(Status.NON_FINITE, f"x or y is not finite after step {run.k}; check what callbacks write.")
            return False
        known = self.modules and self._last is not None and "lower" in self._last
        blind = known or (run.problem.needs_batch and run.batch is None)
        culprit = None if blind else undefined(run, run.state.x, run.state.y, run.batch)
        if culprit and self._stepper is not None:
            k, level, value = run.k, culprit[0].capitalize(), culprit[1]
            self._stepper.rewind()
            if self._begin_again(Status.NON_FINITE):
                return True
            still = undefined(run, run.state.x, run.state.y, run.batch)
            where = "at the end" if still else f"after step {k}, and the iterate before it is returned"
            self.verdict = Verdict(Status.NON_FINITE, f"{level} is {value} {where}; {LEFT}")
        return False

    def solution(self) -> Solution:
        run = self.run
        assert self.verdict is not None
        self.recorder.end(run)
        for observer in self.observers:  # Validate puts its best iterate into x and y, before they are copied
            getattr(observer, "restore", _nothing)(run)
        verdict = dataclasses.replace(self.verdict, message=self.verdict.message + self._story)
        solution = solution_of(run, verdict, self.recorder.history, self.guard.start[len(run.state.x.leaves) :])
        return dataclasses.replace(
            solution, report={**solution.report, **({"restarts": self._story.strip()} if self.restarts else {})}
        )

    @property
    def can_refit(self) -> bool:
        """Whether new networks, trained at x and at x0, can tell what x is worth."""
        run, state = self.run, self.run.state
        ended = self.verdict is not None and not (self.verdict.status.failed or self.verdict.status is Status.INTERRUPTED)
        plain = state.y.has_modules and not state.y.sharded and not run.problem._without_x
        return ended and plain and not state.restarts and not isinstance(run.problem._selected_response, Trained)

    def release(self) -> None:
        """Free the memory of a run that is over; x, y and the start remain."""
        self.run.state = State(self.run.state.x, self.run.state.y, k=self.run.k)
        self._stepper = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on, in plain tensors, numbers and text."""
        run = self.run
        return {
            "random": random_states(self.source.loader),
            "problem": self._problem(),
            "values": self._values,
            "steps": run.k + self.lost,  # of all attempts: a number that grows
            "restarts": list(self.restarts),
            "buffers": pack(self._buffers),
            "run": run.state_dict(),
            "seconds": run.seconds,
            "training": [module.training for module in self.modules],
            "constants": pack(run.constants),
            "place": self.source.place,
            "verdict": pack(self.verdict),
            "giver": self._giver,
            "guard": self.guard.state_dict(),
            "recorder": self.recorder.state_dict(),
            "observers": [(_name(item), item.state_dict()) for item in self.observers if isinstance(item, Stateful)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loop was; the place in the batches and the random states are left to the caller."""
        run = self.run
        run.load_state_dict(state["run"])
        for name, value in self._problem().items():
            if state["problem"][name] != value:
                # The kind of a part; a digest of its numbers follows.
                (old, *_), (new, *_) = (str(part).split(" ") for part in (state["problem"][name], value))
                raise ValueError(f"{name}: was {old}, is {new}{' with other numbers' if old == new else ''}.")
        self._values = values_at(run, state["guard"]["start"])
        if reason := differing(state["values"], self._values, max(torch.finfo(leaf.dtype).eps for leaf in run.state.x.leaves)):
            raise ValueError(reason)
        run.seconds = state["seconds"]
        self.restarts, self.lost = list(state["restarts"]), state["steps"] - run.k
        self._buffers = unpack(state["buffers"], self._buffers_now())
        run.constants = unpack(state["constants"])
        self.guard.load_state_dict(state["guard"])
        self.recorder.load_state_dict(state["recorder"])
        saved = list(state["observers"])
        for observer in self.observers:
            names = [name for name, _ in saved]
            if isinstance(observer, Stateful) and _name(observer) in names:
                observer.load_state_dict(saved.pop(names.index(_name(observer)))[1])  # two of one kind: in their order
        verdict, giver = unpack(state["verdict"]), state["giver"]
        if verdict is not None:
            # A rule that is gone or has another tolerance, a larger max_steps and a callback's wish do not bind this call.
            holds = giver is None or giver in [_signature(observer) for observer in self.observers]
            more = verdict.status is Status.FINISHED and run.method.open_ended and run.k < self.max_steps
            if verdict.status not in (Status.MAX_STEPS, Status.MAX_SECONDS, Status.STOPPED) and holds and not more:
                self.verdict, self._giver = verdict, giver

    def _problem(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed, besides the method and the variables."""
        problem = self.run.problem
        parts = {"nonsmooth": problem.nonsmooth, "x_set": problem.x_set, "y_set": problem.y_set}
        kinds = {
            name: None if part is None else f"{type(part).__name__} {checksum(plain(part))}" for name, part in parts.items()
        }
        response = "optimistic" if problem._selected_response is None else type(problem._selected_response).__name__
        return {**kinds, "response": response, "modules": len(self.modules)}


def _take(observers: list[Any], kind: type[T]) -> T:
    """Remove the observer of a kind from the list and return it, or make one."""
    given = [observer for observer in observers if isinstance(observer, kind)]
    if len(given) > 1:
        raise ValueError(f"callbacks: holds {len(given)} of {kind.__name__}; give one at most.")
    for observer in given:
        observers.remove(observer)
    return given[0] if given else kind()


def _name(observer: Any) -> str:
    return str(getattr(observer, "__name__", type(observer).__name__))


def _signature(observer: Any) -> list[str]:
    """Return the name and tolerance of a rule, by which a resumed run decides whether its verdict still holds."""
    return [_name(observer), str(getattr(observer, "tol", getattr(observer, "patience", "")))]


def _nothing(*arguments: object) -> None:
    """Stand in for a hook that an observer does not have."""
