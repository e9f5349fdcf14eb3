"""Method and State: what all methods share.

A method object is its hyper-parameters and nothing else, a frozen dataclass; a :class:`~meha.Run` is the method at work: a
problem, its variables and a state. A method writes two functions, ``init`` and ``step``; the other five hooks have defaults.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from meha._checks import check_switch
from meha._leaves import copy_
from meha._oracle import Oracle
from meha._running import At, Numbers, Run
from meha._variables import Variable
from meha._verdicts import Verdict
from meha.loaders import Stateful
from meha.methods._optimizers import text
from meha.problem import Problem
from meha.responses import Response, Trained
from meha.theory import Constants

__all__ = ["Method", "State"]


@dataclass
class State:
    """What changes from step to step: variables, optimizers and numbers. Methods add fields of their own.

    Attributes:
        k: number of steps done.
        start: where the lower variables begin in every step; None where they go on from the last one.
        settled: False while a small step does not mean convergence.
    """

    x: Variable
    y: Variable
    k: int = dataclasses.field(default=0, kw_only=True)
    start: Variable | None = dataclasses.field(default=None, kw_only=True)
    settled: bool = dataclasses.field(default=True, kw_only=True)

    def restart(self, *variables: Variable) -> None:
        """Put lower variables back to ``start`` and clear their optimizers, unless they go on from the last step."""
        if self.start is not None:
            for variable in variables:
                copy_(variable.leaves, self.start.leaves)
            for optimizer in (getattr(self, "y_optimizer", None), getattr(self, "theta_optimizer", None)):
                if optimizer is not None:
                    optimizer.forget()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain tensors and numbers."""
        saved = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Stateful):  # optimizers keep what they hand out
                value = value.state_dict() if isinstance(value, Variable) else copy.deepcopy(value.state_dict())
            saved[field.name] = value
        return saved

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

    The hooks are ``init`` and ``step``, and, with defaults, ``terminate``, ``report``, ``check``, ``resolve`` and ``advice``.
    A method with a field ``tol`` ends by a measure of its own, to which ``solve(..., tol=...)`` is handed.

    Attributes:
        takes_coupling: whether the method takes constraints that couple x and y.
        projects_start: whether a start outside X or Y is moved to the nearest point of the set, and not refused.
        refuses_nonsmooth, refuses_y_set: why the method cannot take a non-smooth term, or a set Y; empty when it can.
        refuses_group, refuses_shards: why it cannot run in several processes, or on variables that are divided among them.
        follows: kinds of selected responses (:mod:`meha.responses`) that the method can follow.
        vanishes: whether it lets the proximal term of ``Nearest()`` vanish; otherwise the term keeps a small weight.
        differentiates_start: whether it differentiates in the start of y, so that this may depend on x.
        penalties: names of schedules that must be at rest, or steadily on the move, before a small step means convergence.
        may_be_zero: names of schedules that may be 0.
        open_ended: whether a run has no end of its own, so that one that took all its steps is finished.
        repeats: why an objective must give the same value when it is called again at one point; empty when it need not.
    """

    takes_coupling: ClassVar[bool] = False
    projects_start: ClassVar[bool] = False
    refuses_nonsmooth: ClassVar[str] = ""
    refuses_y_set: ClassVar[str] = ""
    refuses_group: ClassVar[str] = ""
    refuses_shards: ClassVar[str] = ""
    follows: ClassVar[tuple[type[Response], ...]] = ()
    vanishes: ClassVar[bool] = False
    differentiates_start: ClassVar[bool] = False
    penalties: ClassVar[tuple[str, ...]] = ()
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    open_ended: ClassVar[bool] = False
    repeats: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        return type(self).__name__

    def start(self, problem: Problem, x: Any, y: Any, *, group: Any = None) -> Run:
        """Start a run from (x, y). Tensors are copied; modules are trained in place.

        Args:
            group: the processes that take part, see :func:`meha.solve`.

        Raises:
            TypeError, ValueError: the start does not fit the problem; the message names the argument and the remedy.
        """
        for field in dataclasses.fields(self):
            if field.type in (bool, "bool"):
                check_switch(field.name, getattr(self, field.name))
        return Run(_following(self, problem), problem, x, y, group)

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
        """Why the run is over, by the method's own measure; None while there is something to do."""
        return None

    def report(self, run: Run) -> Mapping[str, str]:
        """What the run learned about the problem, in lines by heading, for the printed solution."""
        return {}

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
        response = problem.selected
        if response is not None and not isinstance(response, self.follows):
            others = "RHG" if isinstance(response, Trained) else "the default, RHG or CG"
            raise ValueError(
                f"response: {self.name} looks for the best y for F and cannot follow {type(response).__name__}; use {others},"
                ' or leave response out of the problem ("optimistic").'
            )

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        """The method with every number that was left out chosen for this problem, and the problem's constants if known."""
        return self, oracle.problem.constants

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        """What to try when a run from (x, y) failed."""
        return "Take smaller steps."


def _following(method: Method, problem: Problem) -> Method:
    """The method with the number and the size of the lower steps that a response prescribes.

    Raises:
        ValueError: it has another step size.
    """
    response = problem.selected if isinstance(problem, Problem) else None
    if not isinstance(response, Trained) or not isinstance(response, method.follows):
        return method
    beta = getattr(method, "beta", None)
    if method.differentiates_start and beta not in (None, response.lr):
        raise ValueError(f"beta: is {beta!r}, but the response takes steps of lr={response.lr:g}; leave beta out.")
    free = [name for name in ("beta", "eta") if hasattr(method, name) and getattr(method, name) is None]
    free = [name for name in free if getattr(method, {"beta": "y_optimizer"}.get(name, ""), None) is None]
    numbers: dict[str, Any] = {"inner_steps": response.steps, "warm_start": False}
    return dataclasses.replace(method, **numbers, **dict.fromkeys(free, response.lr))
