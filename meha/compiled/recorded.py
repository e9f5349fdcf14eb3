"""Recorded: steps on modules as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from meha._leaves import Leaves, copy_, norm, subtract
from meha._oracle import Counts
from meha._running import Run, StepInfo
from meha._variables import Variable
from meha.compiled.steppers import (
    ROW,
    BatchForm,
    Compiled,
    Facts,
    TracingError,
    check_state,
    first_line,
    number_dtype,
    record,
    traced_step,
    variables_of,
)
from meha.methods._optimizers import RunningOptimizer

__all__ = ["Recorded"]

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
