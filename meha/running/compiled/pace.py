"""Recorded: steps on modules as a CUDA graph."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from meha.method.method import Run, StepInfo
from meha.method.optimizers import RunningOptimizer
from meha.problem.oracle import Counts
from meha.running.compiled.steppers import (
    ROW,
    BatchForm,
    Compiled,
    Eager,
    Facts,
    Stepper,
    TracingError,
    check_state,
    first_line,
    number_dtype,
    record,
    traced_step,
    variables_of,
)
from meha.running.compiled.traced import Traced
from meha.tensors.variables import Leaves, Variable, copy_, norm, subtract

__all__ = ["CompileWarning", "CompiledPace", "Recorded"]


AGREEMENT = 1e-3
"""The largest distance of recorded from eager steps, relative to their length; the order of sums may differ."""


class Recorded(Compiled):
    """Steps on modules, recorded as a CUDA graph: the kernels of a step, launched together.

    Python in the objectives and hooks of modules no longer runs then. Before it is used, the graph is compared with the step.
    """

    unrolled = 8

    def __init__(self, run: Run) -> None:
        state = run.state
        if state.y.device.type != "cuda":
            raise TracingError("x or y is a module; without a GPU, compile the module instead, as in y0=torch.compile(module)")
        check_state(run, Variable, RunningOptimizer)
        optimizers = {name: value for name, value in vars(state).items() if isinstance(value, RunningOptimizer)}
        for name, optimizer in optimizers.items():
            if not optimizer.make_capturable():
                raise TracingError(f"{name} cannot keep its step number on the GPU")
        tensors = [tensor for variable in variables_of(state).values() for tensor in _changing(variable)]
        tensors += [tensor for optimizer in optimizers.values() for tensor in optimizer.tensors()]
        facts = Facts(run.method, BatchForm(run.batch), [], [], Counts(), number_dtype(run), state.y.device)
        super().__init__(run, tensors, facts)
        self._optimizers = optimizers
        self._schedules = [optimizer.schedule for optimizer in optimizers.values()]

    def __call__(self, batches: Sequence[Any]) -> StepInfo:
        self._schedules = [optimizer.schedule for optimizer in self._optimizers.values()]
        return super().__call__(batches)

    def rewind(self) -> None:
        super().rewind()
        for optimizer, schedule in zip(self._optimizers.values(), self._schedules, strict=True):
            optimizer.schedule = schedule

    def compile(self) -> None:
        run, facts = self.run, self._facts
        batch = BatchForm(facts.batch.put([tensor.clone() for tensor in facts.batch.tensors]))
        self._static, self._row = batch.tensors, torch.ones(ROW, dtype=facts.dtype, device=facts.device)
        given = batch.put(batch.tensors)

        def step() -> Tensor:
            oracle = run.oracle.bare()
            vector, facts.read, facts.returned = traced_step(run, oracle, {}, self._row, given)
            facts.counts = oracle.counts
            return vector

        try:
            with torch.random.fork_rng([facts.device]), ExitStack() as stack:
                for optimizer in self._optimizers.values():
                    stack.enter_context(optimizer.recording())
                    optimizer.steps = 0
                step()  # shows which numbers there are
                for name, optimizer in self._optimizers.items():
                    if optimizer.scheduler is not None and optimizer.steps != 1:
                        raise TracingError(f"{name} has a schedule, and takes {optimizer.steps} steps in one of the method")
                rows = facts.table(run.k, 2)
                ends = []
                for once in (step, record(step)):
                    copy_(self._tensors, self._kept)
                    for row in rows:
                        self._row[: len(row)] = row
                        once()
                    ends.append([tensor.to(facts.dtype, copy=True) for tensor in self._tensors])
            self._replay = once
            moved, apart = (norm(subtract(ends[0], other)) for other in (self._kept, ends[1]))
            if not apart <= AGREEMENT * moved:
                raise TracingError("the graph of a step gives other numbers than the step, because of random numbers or Python")
        except Exception as error:
            for optimizer in self._optimizers.values():
                optimizer.release()
            if isinstance(error, TracingError):
                raise
            # whatever objectives do that a graph cannot hold
            raise TracingError(f"a step cannot be recorded: {first_line(error)}") from error
        finally:
            copy_(self._tensors, self._kept)

    def _call(self, table: Tensor, batches: list[Leaves]) -> Tensor:
        for row, tensors in zip(table, batches, strict=True):
            self._row[: len(row)] = row
            for static, tensor in zip(self._static, tensors, strict=True):
                static.copy_(tensor)
            vector = self._replay()
            for optimizer in self._optimizers.values():
                optimizer.advance()
        return vector


def _changing(variable: Variable) -> Leaves:
    return [tensor.detach() for tensor in [*variable.leaves, *variable.buffers().values()]]


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


class CompiledPace:
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
    if run.problem._selected_response is not None:
        raise TracingError("the problem has a selected response, which may begin elsewhere in each step")
    modules = any(variable.has_modules for variable in variables_of(run.state).values())
    return Recorded(run) if modules else Traced(run)
