"""Pace: when to compile a run, and how many steps to take at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from meha._running import Run
from meha.compiled.recorded import Recorded
from meha.compiled.steppers import Compiled, Eager, Stepper, TracingError, variables_of
from meha.compiled.traced import Traced

__all__ = ["CompileWarning", "Pace"]

LONGEST = 4096
"""Upper bound on the steps between two looks at a compiled run."""

SHARE = 16
"""A group is at most this part of the steps done, so that observers see a run at ever longer, but not too long, intervals."""

WORTH_TRACING, WORTH_COMPILING = 5.0, 30.0
"""Seconds that the steps left must take before "auto" traces them, and before it compiles what was not compiled before."""

TIMED = 3
"""Steps after the first that are timed before "auto" decides."""


class CompileWarning(UserWarning):
    """A run that was to be compiled runs step by step."""


class Pace:
    """Decides whether a run is compiled, and how many steps are taken at once.

    Args:
        compile: see :func:`meha.solve`.
        batches: whether there are batches; a group has all of its batches in memory, and stays small then.

    Attributes:
        eager, stepper: the stepper that always works, and the one to use.
    """

    def __init__(self, compile: bool | Literal["auto"], run: Run, max_steps: int, batches: bool) -> None:
        self.run, self.max_steps, self._wanted = run, max_steps, compile
        self._longest = 0 if batches else LONGEST
        self.eager = Eager(run)
        self.stepper: Stepper = self.eager
        self._first: tuple[int, float] | None = None
        self._groups = 0  # compiled groups so far

    @property
    def steps(self) -> int:
        """Number of steps to take next."""
        k, left, unit = self.run.k, self.max_steps - self.run.k, self.stepper.unrolled
        if self.stepper is self.eager or left < unit:
            return min(left, 1)
        return max(unit, min(k // SHARE, left, self._longest) // unit * unit)

    def update(self) -> None:
        """Decide after a step whether to compile, and do it; its time counts as time of the run."""
        begin = time.perf_counter()
        if self._wanted and (self._wanted is True or self._takes(WORTH_TRACING)):
            try:
                compiled = _build(self.run)
                enough = self.max_steps - self.run.k >= compiled.unrolled
                if enough and (self._wanted is True or compiled.known or self._takes(WORTH_COMPILING)):
                    compiled.compile()
                    self.stepper = compiled
            except TracingError as reason:
                if self._wanted is True:
                    warnings.warn(f"compile: the steps run one by one, because {reason}.", CompileWarning, stacklevel=3)
            self._wanted = False
        self.run.seconds += time.perf_counter() - begin

    def watch(self) -> None:
        """Have the next group compared with eager steps if it is the first, the second, the fourth, the eighth, ..."""
        if isinstance(self.stepper, Compiled):
            self._groups += 1
            self.stepper.watched = self._groups & (self._groups - 1) == 0

    def differs(self, batches: Sequence[Any]) -> int | None:
        """Compare the last group if it was watched; on a difference, go back and on step by step.

        Returns:
            The number of the step to which the run went back; None if it did not.
        """
        compiled = self.stepper
        if not (isinstance(compiled, Compiled) and compiled.watched):
            return None
        found = compiled.difference(batches)
        if not found:
            return None
        k, self.stepper = compiled.give_up(), self.eager
        warnings.warn(
            f"compile: the compiled steps are not those of Python: {found}. The run goes back to step {k}, and on step by step."
            " Objectives must be functions of x, y and the batch, in torch alone; write them so, or leave compile out.",
            CompileWarning,
            stacklevel=5,
        )
        return k

    def _takes(self, seconds: float) -> bool:
        """Whether the steps that are left would take longer, by those after the first."""
        k, now = self.run.k, self.run.seconds
        if self._first is None:
            self._first = k, now
        first, then = self._first
        return k >= first + TIMED and (now - then) / (k - first) * (self.max_steps - k) > seconds


def _build(run: Run) -> Compiled:
    """The compiled stepper for a run: tensors are traced and compiled; modules on a GPU are recorded.

    Raises:
        TracingError: the steps of the run cannot be compiled.
    """
    if run.group is not None:
        raise TracingError("several processes take part, and send messages in each step")
    if run.problem.selected is not None:
        raise TracingError("the problem has a selected response, which may begin elsewhere in each step")
    modules = any(variable.has_modules for variable in variables_of(run.state).values())
    return Recorded(run) if modules else Traced(run)
