"""Method, State and Run: the hyper-parameters, what changes from step to step, and one run of a method on a problem.

A method object is its hyper-parameters and nothing else, a frozen dataclass; a :class:`~meha.Run` is the method at work: a
problem, its variables and a state. A method writes two functions, ``init`` and ``step``; the other five hooks have defaults.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from meha.lower.estimation import Probe
from meha.lower.training import complete
from meha.method.optimizers import RunningOptimizer, held, text
from meha.method.status import Status, TrainingWarning, Verdict
from meha.problem.constants import Constants
from meha.problem.constraints import takes
from meha.problem.oracle import Counts, Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Response, Trained
from meha.problem.schedules import evaluate, rests
from meha.reduce.as_constraints import absorb_constraints_of_x
from meha.tensors.checks import check_switch
from meha.tensors.distributed import Group
from meha.tensors.state import Saved, restore
from meha.tensors.torch_private import BREAKDOWNS
from meha.tensors.variables import Leaves, Variable, all_finite, copy_

PROXIMAL = 1e-3
"""Weight of the proximal term of a response ``Nearest()``, relative to the curvature of f in y, if the method keeps it."""

ROUNDS = 4
"""Hessian-vector products that measure that curvature."""

Numbers = Mapping[str, Tensor | float | Callable[[], Tensor | float]]
"""The numbers of a step by name; a scalar tensor or a function becomes a number when it is read."""

StepNumber = Callable[[int], float]
"""A number of a step, as a function of its number k; see :meth:`At.of`."""


class StepInfo(Mapping[str, float]):
    """The numbers of one step, by name. They stay on the device, or are not even computed, until they are read.

    Attributes:
        step: number of steps done.
        span: number of steps since the last numbers: 1, or more in compiled runs.
        size, moved: the norm of (x, y) after the last step, and the length of that step; NaN unless ``solve`` measured them.

    >>> info = StepInfo(3, {"upper": torch.tensor(2.0), "c": 0.5})
    >>> info.step, info["upper"], dict(info)
    (3, 2.0, {'upper': 2.0, 'c': 0.5})
    """

    __slots__ = ("_numbers", "moved", "size", "span", "step")

    def __init__(self, step: int, numbers: Numbers, span: int = 1, size: float = math.nan, moved: float = math.nan) -> None:
        self.step, self.span, self.size, self.moved = step, span, size, moved
        self._numbers = numbers

    def due(self, every: int) -> bool:
        """Whether one of the steps since the last numbers is a multiple of ``every``."""
        return self.step % every < self.span  # a compiled run reports several steps at once

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name]
        return float(number() if callable(number) else number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def plus(self, **numbers: float) -> StepInfo:
        """A copy with further numbers; those that were not computed yet are not computed."""
        return StepInfo(self.step, {**self._numbers, **numbers}, self.span, self.size, self.moved)

    def measured(self, size: float, moved: float) -> StepInfo:
        """A copy with the norm of (x, y), the length of the step, and their quotient under the name ``change``."""
        # A step to (0, 0) has no relative length; no step at all has the length 0.
        change = (moved / size if size > 0 else math.inf) if moved > 0 else 0.0
        return StepInfo(self.step, {**self._numbers, "change": change}, self.span, size, moved)

    def __repr__(self) -> str:
        return f"StepInfo(step={self.step}, " + ", ".join(f"{k}={v:.4g}" for k, v in self.items()) + ")"


class At:
    """What a step gets besides its state: the batch, and the schedules of the method as numbers, such as ``at.alpha``.

    Attributes:
        batch: the batch; None without batches.
        last: the number of steps that the run will take in all; None if nobody said it.

    Any other attribute is that of the method, evaluated for this step if it is a function of the step number. It is a tensor
    where the step is traced, and None where the method has None.
    """

    def __init__(self, method: Method, k: int, batch: Any, last: int | None = None) -> None:
        self._method, self._k, self.batch, self.last = method, k, batch, last

    def of(self, function: StepNumber) -> Any:
        """A number that depends on k alone: ``function(k)``, a tensor where the step is traced.

        >>> At(None, 3, None).of(lambda k: 1 / (k + 1))
        0.25
        """
        return function(self._k)

    def rare(self, function: Callable[[int], bool]) -> bool:
        """Whether ``function(k)`` holds: for the few steps that are not as the others, which compiled runs take by themselves.

        >>> At(None, 20, None).rare(lambda k: k % 10 == 0)
        True
        """
        return function(self._k)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks for _method before it is set: without this, endless recursion
            raise AttributeError(name)
        schedule = getattr(self._method, name)
        value = None if schedule is None else self._evaluate(name, schedule)
        setattr(self, name, value)  # __getattr__ is not asked again: a schedule is evaluated once a step
        return value

    def _evaluate(self, name: str, schedule: Any) -> Any:
        return evaluate(name, schedule, self._k, zero=name in self._method.may_be_zero)


class Run:
    """A method at work on a problem.

    Step until there is a verdict: ``while run.verdict is None: run.step()``. Many methods do not end by themselves; for these
    there is :func:`meha.solve`, or a bound on the steps.

    Attributes:
        method: the hyper-parameters, with those that were left out filled in: at the start, or in the first step if the
            objectives need a batch.
        problem: the problem, with objectives of (x, y); x is ignored if there is none.
        constants: those of the problem, stated or estimated; None when nothing is known.
        batch: the last batch; None before the first or without batches.
        group: the processes that take part; None for this one alone.
        seconds: time spent in the start and in the steps.
        last: the number of steps that the run will take in all; None if nobody said it. ``solve`` sets it to its ``max_steps``.

    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> from meha.methods import MEHA
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> run.x, run.k, run.counts
    (tensor([0.2000, 0.2000]), 1, Counts(upper=2, lower=4, hvp=0))
    """

    def __init__(self, method: Method, problem: Problem, x: Any, y: Any, group: Any = None) -> None:
        begin = time.perf_counter()
        if not isinstance(problem, Problem):
            raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
        if torch.is_inference_mode_enabled():  # tensors made in it could never record gradients
            raise RuntimeError("torch.inference_mode() is on, so gradients are not available; start the run outside it.")
        for field in dataclasses.fields(method):
            if field.type in (bool, "bool"):  # the dataclass checks no types, and a string such as "no" would count as True
                check_switch(field.name, getattr(method, field.name))
        method = _following(method, problem)
        x_shared, y_shared = (held(getattr(method, name, None)) for name in ("x_optimizer", "y_optimizer"))
        second = Variable(y, "y", y_shared)  # first: without x, the dummy x takes its dtype and device
        problem, x = problem._with_dummy_x(x, second)
        first = Variable(x, "x", x_shared)
        problem = absorb_constraints_of_x(problem, first)
        self._check_response(problem, method, first, second)
        method.check(problem)
        self.group = self._gather(problem, method, first, second, group)
        if method.projects_start:
            problem._project_start(first, second)
        problem._check_start(first, second)
        self.problem, self.method, self._given = problem, method, method  # _given keeps what the user set, for checkpoints
        self.constants: Constants | None = None
        self.batch: Any = None
        self.last: int | None = None
        self._told = False  # whether the warning about second derivatives was issued
        self.rounded = False  # whether the warning about half precision was issued
        self.oracle = Oracle(problem, first, second, self.group)
        self.oracle.response_term.hold(second)
        if not problem.needs_batch:  # otherwise the objectives can only be called in the first step
            self._weigh(first, second, None)
        with torch.no_grad():
            self.state: Any = method.init(self.oracle, first, second)
        self._copies = self._following_copies()
        self._verdict: Verdict | None = None
        self._resolved = False
        self._needs_batch = problem.needs_batch
        self._takes_batch = takes(problem.upper, 3) and takes(problem.lower, 3)
        if not self._needs_batch:
            self._resolve(None)
        self.seconds = time.perf_counter() - begin

    @staticmethod
    def _check_response(problem: Problem, method: Method, x: Variable, y: Variable) -> None:
        """Raise if the method cannot follow the response of the problem, and name those that can for such x and y."""
        response, others = problem._selected_response, "RHG or F2SA"
        if response is None or isinstance(response, method.follows):
            return
        if not isinstance(response, Trained):
            others = "RHG or CG"
            if x.has_modules or y.has_modules:
                others += ", or say how y is trained, response=meha.responses.Trained()"
            elif not takes(problem.upper, 3):
                others = "the default, RHG or CG"
            elif not problem.needs_batch:
                others += ", or the default without batches"
        raise ValueError(
            f"response: {method.name} looks for the best y for F and cannot follow {type(response).__name__}; use {others}, or"
            ' leave response out of the problem ("optimistic").'
        )

    @staticmethod
    def _gather(problem: Problem, method: Method, x: Variable, y: Variable, where: Any) -> Group | None:
        """The group of processes that take part, or raise if they cannot; all of them get the start of the first one."""
        group = Group.of(where, x.leaves + y.leaves)
        if group is None:
            return None
        shards = method.refuses_shards if y.divided or x.divided else ""
        if method.refuses_group or shards:
            what = "several processes" if method.refuses_group else "variables that are divided among processes"
            remedy = "StochasticMEHA, MEHA, F2SA, VPBGD or BOME"
            if problem.coupled:
                remedy = "BiCGAFFA, with x and y whole in each process"
            raise ValueError(
                f"group: {method.name} cannot take {what}, because {method.refuses_group or shards}; use {remedy}."
            )
        for variable in (x, y):
            group.check(variable.leaves, variable.managed, variable.argument)
            group.broadcast_(variable.tensors().values())
        return group

    @property
    def main(self) -> bool:
        """Whether this process writes and prints: it is the first of the group, or the only one."""
        return self.group is None or self.group.main

    def _weigh(self, x: Variable, y: Variable, batch: Any) -> None:
        """Weigh the proximal term of a response by the curvature of f in y, unless the user or the method sets its weight."""
        response_term = self.oracle.response_term
        if response_term.vanishes and not self.method.vanishes:
            generator = torch.Generator().manual_seed(0)
            probe = Probe(self.oracle, x.copy(), y.copy(), batch, generator, ROUNDS, around=(x, y))
            low, high = probe.block(self.oracle.lower, probe.y)
            response_term.weight = PROXIMAL * (max(-low, high) or 1.0)  # 1 where f is linear in y

    def _resolve(self, batch: Any) -> None:
        """Choose the numbers that the user left out."""
        if self.problem.needs_batch:
            self._weigh(self.state.x, self.state.y, batch)
        response, term = self.problem._selected_response, self.oracle.response_term
        if isinstance(response, Trained) and not response.complete:
            with torch.no_grad():
                found, note = complete(self.oracle, self.state.x, self.state.y, batch, response)
            term.found = {"steps": found.steps, "lr": found.lr, "note": note}
            self._take_response()
        self.method, self.constants = self._stated.resolve(self.oracle, self.state.x, self.state.y, batch)
        self._resolved = True

    def _take_response(self) -> None:
        """Put the numbers of training that were found into the problem, for the run and for its solution."""
        term = self.oracle.response_term
        numbers = {name: term.found[name] for name in ("steps", "lr") if term.found}
        if numbers:
            term.response = dataclasses.replace(cast(Trained, term.response), **numbers)
            self.problem = self.oracle.problem = dataclasses.replace(self.problem, response=term.response)

    @property
    def _stated(self) -> Method:
        """The hyper-parameters as the user and the response state them."""
        return _following(self._given, self.problem)

    def begin_again(self, start: Leaves) -> None:
        """Go back to the start, with the steps that the run chose itself shortened by the factors of the method.

        What the user gave stays as it is; the gradients and seconds that were spent stay counted.

        Args:
            start: the numbers of x and y there.
        """
        shorter = {name: step * self.method.shorter[name] for name, step in self.chosen_steps.items()}
        self.method = dataclasses.replace(self.method, **shorter)
        x, y = self.state.x, self.state.y
        for part in vars(self.state).values():
            if isinstance(part, RunningOptimizer):
                part.begin_again()
        with torch.no_grad():
            copy_([leaf.detach() for leaf in x.leaves + y.leaves], start)
            self.state = self.method.init(self.oracle, x, y)
        self._copies, self._verdict = self._following_copies(), None

    @property
    def chosen_steps(self) -> dict[str, float]:
        """The step sizes that the run chose because the user left them out, by name."""
        given, now = vars(self._stated), vars(self.method)
        return {n: now[n] for n in self.method.shorter if n in now and given[n] is None and isinstance(now[n], float)}

    def _following_copies(self) -> list[Variable]:
        """Copies of modules, such as theta, which must be in training mode whenever the user's module is."""
        return [part for part in vars(self.state).values() if isinstance(part, Variable) and part.follows]

    @property
    def x(self) -> Any:
        """The upper variable now: modules as they are, tensors without gradient tracking (they change with each step).

        None if the problem has none.
        """
        return None if self.problem._without_x else self.state.x.detached()

    @property
    def y(self) -> Any:
        """The lower variable now."""
        return self.state.y.detached()

    @property
    def k(self) -> int:
        """Number of steps done."""
        return self.state.k

    @property
    def engine(self) -> str:
        """The name of the method that gave the present answer: for the default, that of the engine."""
        return self.state.engine or self.method.name

    @property
    def counts(self) -> Counts:
        """Gradients and Hessian-vector products taken so far."""
        return self.oracle.counts

    @property
    def ended(self) -> Verdict | None:
        """The verdict so far, without the test that x and y are finite, which makes the host wait for the device."""
        return self._verdict or self.method.terminate(self.state)

    @property
    def verdict(self) -> Verdict | None:
        """Why the run is over; None while it can go on."""
        verdict = self.ended
        if verdict is None and self.k and not all_finite(self.state.x.leaves + self.state.y.leaves):
            verdict = self._verdict = Verdict(Status.NON_FINITE, f"Step {self.k} gave NaN or infinity.")
        return verdict

    @property
    def settled(self) -> bool:
        """Whether a small step means convergence; False while the method says so, or before a penalty starts to change."""
        penalties = [getattr(self.method, name) for name in self.method.penalties]
        return self.state.settled and all(rests(penalty, self.k - 1) for penalty in penalties)

    def prepare(self, batch: Any = None) -> None:
        """Choose the numbers that were left out, which may need the first batch; a step does so as well.

        Raises:
            TypeError: the objectives need a batch and there is none, or there is one and they take none.
        """
        if self._needs_batch if batch is None else not self._takes_batch:
            raise TypeError(self._misfit(batch))
        if not self._resolved:
            begin = time.perf_counter()
            self._resolve(batch)
            self.seconds += time.perf_counter() - begin

    def step(self, batch: Any = None) -> StepInfo:
        """Take one step, with the batch handed to the objectives when there is one.

        A step that breaks down (an ArithmeticError, a singular matrix) ends the run, and its numbers are empty.

        Args:
            batch: anything; :class:`~meha.MicroBatches` for one that does not fit into memory as a whole.

        A ``module.eval()`` or ``.train()`` between steps also holds for the method's copies of the module.

        Raises:
            RuntimeError: the run is over.
            TypeError: the objectives need a batch and there is none, or there is one and they take none.
        """
        self.prepare(batch)
        over, state = self.ended, self.state
        if over is not None:
            raise RuntimeError(
                f"step: the run is over ({over.status}: {over.message}); ask run.verdict before each step, and start a new run"
                " to go on, such as one with a smaller tol or from another point."
            )
        begin, self.batch = time.perf_counter(), batch
        for variable in self._copies:
            variable.follow_modes()
        try:
            with torch.no_grad():
                if state.start is not None:  # the start of the response at x, from which methods without warm start begin
                    self.oracle.response_term.begin(state.x, state.start, through=self.method.differentiates_start)
                numbers = self.method.step(self.oracle, state, At(self.method, state.k, batch, self.last))
        except BREAKDOWNS as error:  # a singular matrix is a result of the run, not a crash
            self._verdict, numbers = Verdict(Status.BROKE_DOWN, f"Step {state.k + 1} broke down: {error}."), {}
        else:
            state.k += 1
        self.seconds += time.perf_counter() - begin
        self._tell()
        return StepInfo(state.k, numbers)

    def _tell(self) -> None:
        """Warn once where products with second derivatives are differences."""
        if not self.oracle.lacking or self._told:
            return
        self._told = True
        if self.main:
            warnings.warn(
                f"torch cannot differentiate the gradients of this problem again ({self.oracle.lacking}), so that"
                f" {self.method.name} takes products with second derivatives as differences of two gradients, right to some 4"
                " digits in float32 and hardly one in half precision; for exact ones, leave out torch.compile, kernels of your"
                " own choice and functions that can be differentiated once, or take a method with first derivatives, such as"
                " F2SA.",
                TrainingWarning,
                stacklevel=3,
            )

    def _misfit(self, batch: Any) -> str:
        """The message that says why the objectives cannot be called with this batch, or without one."""
        wanted, form = 2 if batch is None else 3, "(y, batch)" if self.problem._without_x else "(x, y, batch)"
        names = " and ".join(name for name in ("upper", "lower") if not takes(getattr(self.problem, name), wanted))
        if batch is None:
            return (
                f"batches: {names} must be called with a batch, as a function of {form}, and there is none; pass"
                " solve(..., batches=...), or run.step(batch) in a loop of your own."
            )
        return f"batches: {names} cannot be called with a batch; write both as functions of {form}, or leave the batches out."

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that the run's future depends on, in plain tensors and numbers, for ``torch.save``.

        (Objectives that draw random numbers also depend on the generators' states, which are the caller's.)

        Load it with ``torch.load(path, weights_only=True)``.
        """
        given, now = vars(self._stated), vars(self.method)  # numbers that were chosen are saved, not estimated again
        return {
            "method": self.method.name,
            "given": self._given.describe(exact=True),
            "chosen": {name: now[name] for name in now if given[name] is None and now[name] is not None},
            "counts": dataclasses.asdict(self.counts),
            "state": self.state.state_dict(),
            "selection": self.oracle.response_term.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that wrote ``state`` was, bit for bit.

        The run must have been started on the same problem with the same method and variables of the same shapes. Numbers
        that were left out of the method are those that the other run chose.

        Raises:
            ValueError: the state is of another method or other hyper-parameters, or does not fit; the run is unchanged.
        """
        parts = {"method", "given", "chosen", "counts", "state", "selection"}
        missing = parts - set(state if isinstance(state, Mapping) else ())
        if missing:
            raise ValueError(f"state: lacks {sorted(missing)}; pass what Run.state_dict() returned.")
        own = (self.method.name, self._given.describe(exact=True))
        if (state["method"], state["given"]) != own:
            raise ValueError(
                f"state: was written by {state['method']}({state['given']}), this run is {own[0]}({own[1]});"
                " start the run with the same method."
            )
        try:
            counts = Counts(**state["counts"])
            dataclasses.replace(self._given, **state["chosen"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"state: its chosen numbers or counts cannot be read ({error}); it is damaged.") from error
        # First what may be refused: a failure leaves the run as it was.
        self.state.load_state_dict(state["state"])
        self.oracle.response_term.load_state_dict(state["selection"])
        self._take_response()
        self.method = dataclasses.replace(self._stated, **state["chosen"])
        self.oracle.counts, self._verdict = counts, None
        self._resolved = self._resolved or self.k > 0


@dataclass
class State(Saved):
    """What changes from step to step: variables, optimizers and numbers. Methods add fields of their own.

    Attributes:
        k: number of steps done.
        start: the point at which the lower variables begin in every step; None with warm starts.
        settled: False while a small step does not mean convergence.
    """

    x: Variable
    y: Variable
    k: int = dataclasses.field(default=0, kw_only=True)
    start: Variable | None = dataclasses.field(default=None, kw_only=True)
    settled: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def engine(self) -> str:
        """The name of the engine that gave the present answer; empty if that is the method itself."""
        return ""

    @property
    def restarts(self) -> bool:
        """Whether y is trained afresh in each step, from its start."""
        return self.start is not None

    def restart(self, *variables: Variable) -> None:
        """Reset lower variables to ``start`` and clear their optimizers; nothing happens with warm starts."""
        if self.start is not None:
            for variable in variables:
                copy_(variable.leaves, self.start.leaves)
            for name in ("y_optimizer", "theta_optimizer"):
                if (optimizer := getattr(self, name, None)) is not None:
                    optimizer.forget()  # moments of the last solve would push the next one

    def check(self) -> None:
        """Raise if the state cannot be that of a run."""
        if not isinstance(self.k, int) or self.k < 0:
            raise ValueError(f"state: k must be the number of steps done, got {self.k!r}; the state is damaged.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved; a state that does not fit changes nothing."""
        before = self.state_dict()  # fields are loaded one by one: a failure in the middle is undone
        try:
            restore(self, state)
            self.check()
        except ValueError:
            restore(self, before)
            raise
        except Exception as error:  # what a damaged optimizer state raises is up to the optimizer
            restore(self, before)
            raise ValueError(f"state: cannot be read ({error!r}); it is damaged.") from error


@dataclass(frozen=True)
class Method(ABC):
    """The hyper-parameters of a method; :meth:`start` begins a run on a problem.

    The hooks are ``init`` and ``step``, and, with defaults, ``terminate``, ``report``, ``check``, ``resolve`` and ``advice``.
    A method with a field ``tol`` ends by a test of its own, which gets the ``tol`` of ``solve(..., tol=...)``.

    Attributes:
        takes_coupling: whether the method takes constraints that couple x and y.
        projects_start: whether a start outside X or Y is moved to the nearest point of the set, and not refused.
        refuses_nonsmooth, refuses_y_set: why the method cannot take a non-smooth term, or a set Y; empty when it can.
        refuses_group, refuses_shards: why it cannot run in several processes, or on variables that are divided among them.
        refuses_scaler: why it cannot take a scaler of float16 gradients (:func:`meha.start`).
        follows: kinds of selected responses (:mod:`meha.responses`) that the method can follow.
        vanishes: whether the method drives the weight of the proximal term of ``Nearest()`` to 0; otherwise it stays small.
        differentiates_start: whether it differentiates in the start of y, so that this may depend on x.
        penalties: names of schedules that must be constant, or change in every step, before a small step means convergence.
        may_be_zero: names of schedules that may be 0.
        open_ended: whether a run never ends by itself, so that taking all its steps means that it is finished.
        shorter: the factors of step sizes, by name, with which ``solve`` begins again where a run diverges on those it chose.
        repeats: why an objective must return the same value when called twice at one point; empty when it need not.
    """

    takes_coupling: ClassVar[bool] = False
    projects_start: ClassVar[bool] = False
    refuses_nonsmooth: ClassVar[str] = ""
    refuses_y_set: ClassVar[str] = ""
    refuses_group: ClassVar[str] = ""
    refuses_shards: ClassVar[str] = ""
    refuses_scaler: ClassVar[str] = ""
    follows: ClassVar[tuple[type[Response], ...]] = ()
    vanishes: ClassVar[bool] = False
    differentiates_start: ClassVar[bool] = False
    penalties: ClassVar[tuple[str, ...]] = ()
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    open_ended: ClassVar[bool] = False
    shorter: ClassVar[Mapping[str, float]] = {"alpha": 1 / 4, "beta": 1 / 4, "eta": 1 / 4}
    repeats: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        return type(self).__name__

    def start(self, problem: Problem, x: Any, y: Any, *, group: Any = None) -> Run:
        """Start a run from (x, y). Tensors are copied, but for those of a built optimizer; modules are trained in place.

        Args:
            group: the processes that take part, see :func:`meha.solve`.

        Raises:
            TypeError, ValueError: the start does not fit the problem; the message names the argument and the remedy.
        """
        return Run(self, problem, x, y, group)

    def describe(self, *, exact: bool = False) -> str:
        """The hyper-parameters that are set, as text; functions and factories by their names.

        Args:
            exact: with all digits, and functions of the step number by some of their values, so that equal text means equal
                runs.
        """
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            short = isinstance(value, float) and not exact
            shown = f"{value:.6g}" if short else text(value, sample=exact and not field.name.endswith("_optimizer"))
            parts.append(f"{field.name}={shown}")
        return ", ".join(parts)

    @abstractmethod
    def init(self, oracle: Oracle, x: Variable, y: Variable) -> State:
        """The state before the first step."""

    @abstractmethod
    def step(self, oracle: Oracle, state: Any, at: At) -> Numbers:
        """Advance ``state`` by one step in place, and return its numbers. Gradient tracking is off outside the oracle."""

    def terminate(self, state: Any) -> Verdict | None:
        """Why the run is over, by the method's own test; None while it can go on."""
        return None

    def report(self, run: Run) -> Mapping[str, str]:
        """What the run learned about the problem, as text by heading, for the printed solution."""
        lacking, found = run.oracle.lacking, run.oracle.response_term.found
        lines = {"training": found["note"]} if found else {}
        return lines | ({"products": f"with second derivatives by differences of gradients ({lacking})"} if lacking else {})

    def check(self, problem: Problem) -> None:
        """Raise if the method cannot take this problem."""
        if problem.coupled and not self.takes_coupling:
            raise ValueError(
                f"lower_constraints, upper_constraints: {self.name} cannot take constraints that couple x and y; use the"
                " default, LVHBA() or BiCGAFFA()."
            )
        for argument, reason in (("nonsmooth", self.refuses_nonsmooth), ("y_set", self.refuses_y_set)):
            value = getattr(problem, argument)
            if reason and value is not None:
                raise ValueError(
                    f"{argument}: {self.name} cannot take {type(value).__name__}, because {reason}; use MEHA, or leave"
                    f" {argument} out of the problem."
                )

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        """The method with every number that was left out chosen for this problem, and the problem's constants if known."""
        return self, oracle.problem.constants

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        """What to try when a run from (x, y) failed."""
        return "Take smaller steps."


def _following(method: Method, problem: Problem) -> Method:
    """The method with the number and size of lower steps that a :class:`Trained` response prescribes."""
    response = problem._selected_response if isinstance(problem, Problem) else None  # Run reports a wrong type
    if not isinstance(response, Trained) or not isinstance(response, method.follows):
        return method
    beta = getattr(method, "beta", None)
    if method.differentiates_start and beta not in (None, response.lr):
        takes = "finds its steps" if response.lr is None else f"takes steps of lr={response.lr:g}"
        raise ValueError(f"beta: is {beta!r}, but the response {takes}; leave beta out, or give it as lr to Trained.")
    free = [name for name in ("beta", "eta") if hasattr(method, name) and getattr(method, name) is None]
    # An optimizer of the user has its own learning rate, and takes the place of beta.
    free = [name for name in free if getattr(method, {"beta": "y_optimizer"}.get(name, ""), None) is None]
    # What the response leaves out is found before the first step.
    steps = {} if response.steps is None else {"inner_steps": response.steps}
    return dataclasses.replace(method, **cast(Any, {**steps, "warm_start": False, **dict.fromkeys(free, response.lr)}))
