"""CompiledPace, which decides when a run is compiled, and Recorded, steps on modules as a CUDA graph."""

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

AGREEMENT = 1e-3  # the largest distance of recorded from eager steps, relative to their length; sums may differ in order


class Recorded(Compiled):
    """Takes steps on modules that were recorded as a CUDA graph: all kernels of a step are launched at once.

    Python code in objectives and hooks of modules no longer runs then. The graph is compared with an eager step before use.
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
        # A graph reads fixed memory: batches and schedules are copied into these tensors before each replay.
        batch = BatchForm(facts.batch.put([tensor.clone() for tensor in facts.batch.tensors]))
        self._static, self._row = batch.tensors, torch.ones(ROW, dtype=facts.dtype, device=facts.device)
        given = batch.put(batch.tensors)

        def step() -> Tensor:
            oracle = run.oracle.bare()
            vector, facts.read, facts.returned = traced_step(run, oracle, {}, self._row, given)
            facts.counts = oracle.counts
            return vector

        try:
            with torch.random.fork_rng([facts.device]), ExitStack() as stack:  # the trial steps must not use up random numbers
                for optimizer in self._optimizers.values():
                    stack.enter_context(optimizer.recording())
                    optimizer.steps = 0
                step()  # shows which schedules it reads and which numbers it returns
                for name, optimizer in self._optimizers.items():
                    if optimizer.scheduler is not None and optimizer.steps != 1:
                        raise TracingError(f"{name} has a schedule, and takes {optimizer.steps} steps in one of the method")
                rows = facts.table(run.k, 2)
                ends = []
                for once in (step, record(step)):  # two steps of each from the same point
                    copy_(self._tensors, self._kept)
                    for row in rows:
                        self._row[: len(row)] = row
                        once()
                    ends.append([tensor.to(facts.dtype, copy=True) for tensor in self._tensors])
            self._replay = once
            moved, apart = (norm(subtract(ends[0], other)) for other in (self._kept, ends[1]))
            if not apart <= AGREEMENT * moved:  # also where one of them is NaN
                raise TracingError("the graph of a step gives other numbers than the step, because of random numbers or Python")
        except Exception as error:
            for optimizer in self._optimizers.values():
                optimizer.release()
            if isinstance(error, TracingError):
                raise
            # whatever objectives do that a graph cannot hold
            raise TracingError(f"a step cannot be recorded: {first_line(error)}") from error
        finally:
            copy_(self._tensors, self._kept)  # the trial steps are undone

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
    """Return the tensors of a variable that steps may change: its leaves, and buffers such as running statistics."""
    return [tensor.detach() for tensor in [*variable.leaves, *variable.buffers().values()]]


LONGEST = 4096  # upper bound on the steps of a group, after which observers see the run
SHARE = 16  # a group is at most this part of the steps done: observers see a run at longer and longer intervals

# Seconds that the steps left must take before "auto" traces them, which takes 0.2 s, and before it compiles them, some 20 s.
WORTH_TRACING, WORTH_COMPILING = 5.0, 30.0
TIMED = 3  # steps after the first that are timed before "auto" decides


class CompileWarning(UserWarning):
    """A run that was to be compiled runs step by step."""


class CompiledPace:
    """Decides whether a run is compiled, and how many steps are taken at once.

    Args:
        compile: see :func:`meha.solve`.
        batches: whether there are batches; a group has all of its batches in memory, and stays small then.

    Attributes:
        eager, stepper: the stepper that always works, and the one to use.
        wanted: ``compile`` until it is decided, False after that.
    """

    def __init__(self, compile: bool | Literal["auto"], run: Run, max_steps: int, batches: bool) -> None:
        self.run, self.max_steps, self.wanted = run, max_steps, compile
        self._longest = 0 if batches else LONGEST
        self.eager = Eager(run)
        self.stepper: Stepper = self.eager
        self._first: tuple[int, float] | None = None
        self._groups = 0  # compiled groups so far

    @property
    def steps(self) -> int:
        """Return the number of steps to take next."""
        k, left, unit = self.run.k, self.max_steps - self.run.k, self.stepper.unrolled
        if self.stepper is self.eager or left < unit:  # the remainder at the end is taken eagerly
            return min(left, 1)
        return max(unit, min(k // SHARE, left, self._longest) // unit * unit)

    def update(self) -> None:
        """Decide after a step whether to compile, and do so; the time this takes counts as time of the run."""
        begin = time.perf_counter()
        if self.wanted is True or (self.wanted and self._takes(WORTH_TRACING)):
            try:
                compiled = _build(self.run)
                enough = self.max_steps - self.run.k >= compiled.unrolled
                if enough and (self.wanted is True or compiled.known or self._takes(WORTH_COMPILING)):
                    compiled.compile()
                    self.stepper = compiled
            except TracingError as reason:
                if self.wanted is True:
                    warnings.warn(f"compile: the steps run one by one, because {reason}.", CompileWarning, stacklevel=3)
            self.wanted = False  # decided once; what failed is not tried again
        self.run.seconds += time.perf_counter() - begin

    def watch(self) -> None:
        """Compare the next group with eager steps if it is the first, the second, the fourth, the eighth, ..."""
        if isinstance(self.stepper, Compiled):
            self._groups += 1
            self.stepper.watched = self._groups & (self._groups - 1) == 0  # powers of two: the checks become rare

    def differs(self, batches: Sequence[Any]) -> int | None:
        """Compare the last group if it was watched; on a difference, go back, and continue eagerly.

        Returns:
            The number of the step to which the run went back; None if it did not.
        """
        compiled = self.stepper
        if not (isinstance(compiled, Compiled) and compiled.watched):
            return None
        difference = compiled.difference(batches)
        if not difference:
            return None
        k, self.stepper = compiled.give_up(), self.eager
        warnings.warn(
            f"compile: compiled and eager steps differ: {difference}. The run falls back to eager execution from step {k}."
            " Objectives must be functions of x, y and the batch, in torch alone; write them so, or leave compile out.",
            CompileWarning,
            stacklevel=5,
        )
        return k

    def _takes(self, seconds: float) -> bool:
        """Return whether the steps left would take longer than this, at the mean time of the steps after the first."""
        k, now = self.run.k, self.run.seconds
        if self._first is None:  # the first step is slower: it also checks the objectives
            self._first = k, now
        first, then = self._first
        return k >= first + TIMED and (now - then) / (k - first) * (self.max_steps - k) > seconds


def _build(run: Run) -> Compiled:
    """Return the compiled stepper for a run: steps on tensors are traced and compiled, steps on modules recorded.

    Raises:
        TracingError: the steps of the run cannot be compiled.
    """
    if run.group is not None:
        raise TracingError("several processes take part, and send messages in each step")
    if run.problem._selected_response is not None:
        raise TracingError("the problem has a selected response, which may begin elsewhere in each step")
    modules = any(variable.has_modules for variable in variables_of(run.state).values())
    return Recorded(run) if modules else Traced(run)
