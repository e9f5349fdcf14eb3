"""Method, Run and StepInfo: what all methods share.

A method object is its hyper-parameters and nothing else, a frozen dataclass; a :class:`Run` is the method at work: a
problem, its variables and a state. A method writes two functions, ``init`` and ``step``.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meha._oracle import Counts, Oracle
from meha._variables import Variable, copy_
from meha.loaders import Stateful
from meha.methods._optimizers import text
from meha.problem import Problem
from meha.schedules import rests
from meha.theory import Constants, estimate_at

__all__ = ["Method", "Numbers", "Run", "State", "StepInfo"]


Numbers = Mapping[str, Tensor | float | Callable[[], Tensor | float]]
"""The numbers of a step by name; a scalar tensor or a function is turned into a number when it is read."""


class StepInfo(Mapping[str, float]):
    """The numbers of one step, by name. They stay on the device, or are not even computed, until they are read.

    Attributes:
        step: how many steps have been done.
        span: how many of them since the last numbers were told: 1, or more in compiled runs.

    >>> info = StepInfo(3, {"upper": torch.tensor(2.0), "c": 0.5})
    >>> info.step, info["upper"], dict(info)
    (3, 2.0, {'upper': 2.0, 'c': 0.5})
    """

    __slots__ = ("_numbers", "span", "step")

    def __init__(self, step: int, numbers: Numbers, span: int = 1) -> None:
        self.step, self.span = step, span
        self._numbers = numbers

    def due(self, every: int) -> bool:
        """Whether it is time for what is done every so many steps: one of the steps since the last numbers is such a step."""
        return self.step % every < self.span

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name]
        return float(number() if callable(number) else number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def plus(self, **numbers: float) -> StepInfo:
        """The same with further numbers; what was not read yet stays so."""
        return StepInfo(self.step, {**self._numbers, **numbers}, self.span)

    def __repr__(self) -> str:
        return f"StepInfo(step={self.step}, " + ", ".join(f"{k}={v:.4g}" for k, v in self.items()) + ")"


@dataclass
class State:
    """What changes from step to step: variables, optimizers and numbers. Methods add fields of their own.

    Attributes:
        start: where lower variables begin anew in every step; None where they go on from the last one.
    """

    x: Variable
    y: Variable
    k: int = dataclasses.field(default=0, kw_only=True)
    start: Variable | None = dataclasses.field(default=None, kw_only=True)

    def restart(self, *variables: Variable) -> None:
        """Put lower variables back to where they began, if they begin anew in every step, and let their optimizers forget."""
        if self.start is not None:
            for variable in variables:
                copy_(variable.leaves, self.start.leaves)
            for optimizer in (getattr(self, "y_optimizer", None), getattr(self, "theta_optimizer", None)):
                if optimizer is not None:
                    optimizer.forget()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain tensors and numbers."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Stateful):  # optimizers keep what they hand out
                value = value.state_dict() if isinstance(value, Variable) else copy.deepcopy(value.state_dict())
            found[field.name] = value
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of ``state``; nothing is changed when it does not fit."""
        names = {field.name for field in dataclasses.fields(self)}
        if not isinstance(state, Mapping) or names != set(state):
            raise ValueError(f"state: this run needs {sorted(names)}, and gets something else; it is of another method.")
        if not isinstance(state["k"], int) or state["k"] < 0:
            raise ValueError(f"state: k must be the number of steps done, got {state['k']!r}; the state is damaged.")
        before = self.state_dict()
        try:
            self._load(state)
        except ValueError:
            self._load(before)
            raise
        except Exception as error:  # what a damaged optimizer state raises is up to the optimizer
            self._load(before)
            raise ValueError(f"state: cannot be read ({error!r}); it is damaged.") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Variable):
                value.load_state_dict(state[field.name])
            elif isinstance(value, Stateful):
                value.load_state_dict(copy.deepcopy(state[field.name]))  # optimizers keep the tensors that they are given
            else:
                setattr(self, field.name, state[field.name])


@dataclass(frozen=True)
class Method(ABC):
    """Hyper-parameters of a method; :meth:`start` sets it to work on a problem.

    Attributes:
        refuses_nonsmooth, refuses_y_set: why the method cannot take a non-smooth term, or a set Y; empty when it can.
    """

    refuses_nonsmooth: ClassVar[str] = ""
    refuses_y_set: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return type(self).__name__

    def start(self, problem: Problem, x: Any, y: Any) -> Run:
        """A run from (x, y). Tensors are copied; modules are trained in place.

        Raises:
            TypeError, ValueError: the start does not fit the problem; the message names the argument and the remedy.
        """
        return Run(self.stand_in(problem, x, y), problem, x, y)

    def stand_in(self, problem: Problem, x: Any, y: Any, *, batches: bool = False) -> Method:
        """The method that runs on this problem: itself, unless a name stands for several.

        Args:
            batches: whether there are some, also where the objectives could do without.
        """
        return self

    def check(self, problem: Problem) -> None:
        """Raise if the method cannot take this problem."""
        for argument, reason in (("nonsmooth", self.refuses_nonsmooth), ("y_set", self.refuses_y_set)):
            value = getattr(problem, argument)
            if reason and value is not None:
                raise ValueError(
                    f"{argument}: {self.name} cannot take {type(value).__name__}, because {reason}; use MEHA, or leave"
                    f" {argument} out of the problem."
                )

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        """The method with every number that was left out chosen for this problem, and the problem's constants if known."""
        missing = self.missing()
        if not missing:
            return self, oracle.problem.constants
        constants = oracle.problem.constants or estimate_at(oracle, x, y, batch=batch)
        found = self.choose(constants)
        return dataclasses.replace(self, **{name: found[name] for name in missing}), constants

    def missing(self) -> list[str]:
        """The step sizes that were left out, and for which there is no optimizer."""
        taken = {"alpha": getattr(self, "x_optimizer", None), "beta": getattr(self, "y_optimizer", None), "eta": None}
        return [name for name in taken if getattr(self, name, 0.0) is None and taken[name] is None]

    def choose(self, constants: Constants) -> dict[str, float]:
        """Step sizes for a problem with these constants."""
        return {}

    def theory(self, constants: Constants) -> str:
        """Whether the run is covered by the method's convergence theory, in a sentence; empty when nothing is known."""
        return ""

    def settles(self, k: int) -> bool:
        """Whether small steps after k steps mean that the run has converged, and not that a schedule has yet to move."""
        return all(rests(getattr(self, name, 0.0), k - 1) for name in ("c", "mu"))

    def converged(self, state: Any) -> str:
        """Why the run has converged by a measure of the method's own, in a sentence; empty while it has not."""
        return ""

    def diverged(self, state: Any) -> str:
        """Why the run has no solution to go to, by a measure of the method's own, and what to try; empty while it may have."""
        return ""

    def finished(self, state: Any) -> str:
        """Why nothing is left to do, in a sentence; empty while something is."""
        return ""

    def conclude(self, state: Any) -> None:
        """Put into the variables what the user gets when the run ends now; by default what is there."""

    def report(self, state: Any) -> Mapping[str, str]:
        """What the run found about the problem, in lines by heading, for the printed solution."""
        return {}

    def to(self, tol: float | None) -> Self:
        """The method with this accuracy as its own, if it has one; None for all that can be had."""
        return self

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        """What to try when a run from (x, y) failed."""
        return "Take smaller steps."

    @abstractmethod
    def init(self, oracle: Oracle, x: Variable, y: Variable) -> State:
        """The state before the first step."""

    @abstractmethod
    def step(self, oracle: Oracle, state: Any, batch: Any) -> Numbers:
        """Advance ``state`` by one step in place, and tell its numbers. Gradient tracking is off outside the oracle."""


class Run:
    """A method at work on a problem.

    Attributes:
        method: the hyper-parameters, with those that were left out filled in: at the start, or in the first step if the
            objectives need a batch.
        problem: the problem.
        constants: those of the problem, stated or estimated; None when nothing is known.
        batch: the last batch, None before the first or without batches.

    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> from meha.methods.meha import MEHA
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(2), torch.zeros(2))
    >>> info = run.step()
    >>> run.x, run.k, run.counts
    (tensor([0.2000, 0.2000]), 1, Counts(upper=2, lower=4, hvp=0))
    """

    def __init__(self, method: Method, problem: Problem, x: Any, y: Any) -> None:
        if not isinstance(problem, Problem):
            raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "torch.inference_mode() is on, in which nothing can be differentiated; start the run outside it."
            )
        method.check(problem)
        first, second = Variable(x, "x"), Variable(y, "y")
        problem.check_start(first, second)
        self.problem, self.method, self._given = problem, method, method
        self.constants: Constants | None = None
        self.batch: Any = None
        self.oracle = Oracle(problem, first, second)
        with torch.no_grad():
            self.state = method.init(self.oracle, first, second)
        self._copies = [part for part in vars(self.state).values() if isinstance(part, Variable) and part.follows]
        self._resolved = False
        if not problem.needs_batch:
            self._resolve(None)

    def _resolve(self, batch: Any) -> None:
        self.method, self.constants = self._given.resolve(self.oracle, self.state.x, self.state.y, batch)
        self._resolved = True

    @property
    def x(self) -> Any:
        """The upper variable now: modules as they are, tensors without gradient tracking (they change with each step)."""
        return self.state.x.detached()

    @property
    def y(self) -> Any:
        """The lower variable now."""
        return self.state.y.detached()

    @property
    def k(self) -> int:
        """Steps done."""
        return self.state.k

    @property
    def counts(self) -> Counts:
        """Gradients and Hessian-vector products taken so far."""
        return self.oracle.counts

    @property
    def converged(self) -> str:
        """Why the run has converged by the method's own measure; empty while it has not."""
        return self.method.converged(self.state)

    @property
    def diverged(self) -> str:
        """Why the method found no solution to go to; empty while there may be one."""
        return self.method.diverged(self.state)

    @property
    def finished(self) -> str:
        """Why the method has nothing left to do; empty while it has."""
        return self.method.finished(self.state)

    def step(self, batch: Any = None) -> StepInfo:
        """One step, with the batch handed to the objectives when there is one.

        Args:
            batch: anything; :class:`~meha.MicroBatches` for one that does not fit into memory as a whole.

        A ``module.eval()`` or ``.train()`` between steps also holds for the method's copies of the module.
        """
        state, self.batch = self.state, batch
        if not self._resolved:
            self._resolve(batch)
        for variable in self._copies:
            variable.follow_modes()
        with torch.no_grad():
            numbers = self.method.step(self.oracle, state, batch)
        state.k += 1
        return StepInfo(state.k, numbers)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that the run's future depends on, in plain tensors and numbers, for ``torch.save``.

        (Objectives that draw random numbers also depend on the generators' states, which are the caller's.)

        Load it with ``torch.load(path, weights_only=True)``.
        """
        given, now = vars(self._given), vars(self.method)
        return {
            "method": self.method.name,
            "given": describe(self._given, exact=True),
            "chosen": {name: now[name] for name in now if given[name] is None and now[name] is not None},
            "counts": dataclasses.asdict(self.counts),
            "state": self.state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that wrote ``state`` was, bit for bit.

        The run must have been started on the same problem with the same method and variables of the same shapes. Numbers
        that were left out of the method are those that the other run chose.

        Raises:
            ValueError: the state is of another method or other hyper-parameters, or does not fit; the run is unchanged.
        """
        missing = {"method", "given", "chosen", "counts", "state"} - set(state if isinstance(state, Mapping) else ())
        if missing:
            raise ValueError(f"state: lacks {sorted(missing)}; pass what Run.state_dict() returned.")
        own = (self.method.name, describe(self._given, exact=True))
        if (state["method"], state["given"]) != own:
            raise ValueError(
                f"state: was written by {state['method']}({state['given']}), this run is {own[0]}({own[1]});"
                " start the run with the same method."
            )
        try:
            method, counts = dataclasses.replace(self._given, **state["chosen"]), Counts(**state["counts"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"state: its chosen numbers or counts cannot be read ({error}); it is damaged.") from error
        self.state.load_state_dict(state["state"])
        self.method, self.oracle.counts = method, counts
        self._resolved = self._resolved or self.k > 0


def describe(method: Method, *, exact: bool = False) -> str:
    """The hyper-parameters that are set, as text; functions and factories by their names.

    Args:
        exact: with all digits, and functions of the step number by some of their values, so that equal text means equal runs.
    """
    parts = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if value is None:
            continue
        short = isinstance(value, float) and not exact
        found = f"{value:.6g}" if short else text(value, sample=exact and not field.name.endswith("_optimizer"))
        parts.append(f"{field.name}={found}")
    return ", ".join(parts)
