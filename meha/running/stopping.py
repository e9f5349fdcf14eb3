"""Stopping rules: observers that end a run, for ``solve(..., callbacks=[Gap(1e-6)])``.

The status is then "rule met": a rule sees that x and y hardly move, or that a number is small, and verifies nothing.

A rule of your own is a function of the run and the numbers of its last step that returns a verdict, or None to continue::

    def low_enough(run, info):
        return Verdict(Status.RULE_MET, "F is below 0.3") if info["upper"] < 0.3 else None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from meha.analysis import diagnostics
from meha.method.method import Run, StepInfo
from meha.method.status import Status, Verdict
from meha.tensors.checks import check_count, check_tolerance
from meha.tensors.state import Saved

__all__ = ["Gap", "RelativeChange", "Residual"]


@dataclass
class RelativeChange(Saved):
    """Stop when ||z_{k+1} - z_k|| <= tol * ||z_{k+1}|| for z = (x, y).

    Cheap, and common in practice; small steps satisfy it far from a solution. It does not apply while the method says that
    small steps mean nothing (:attr:`meha.Run.settled`).

    Args:
        tol: stop at or below it.
        times: number of steps in a row; x and y may stand still for one step while other variables of the method move.
    """

    agrees: ClassVar[bool] = True  # x, y and their change are the same in all processes
    saves: ClassVar[tuple[str, ...]] = ("tol", "held")

    tol: float = 1e-6
    times: int = 2
    held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_tolerance(f"{type(self).__name__}: tol", self.tol)
        check_count("RelativeChange: times", self.times)

    def begin(self, run: Run, max_steps: int) -> None:
        """Start to count at zero."""
        self.held = 0

    def __call__(self, run: Run, info: StepInfo) -> Verdict | None:
        change = info["change"]
        self.held = self.held + 1 if change <= self.tol and run.settled else 0
        if self.held < self.times:
            return None
        still = f" (the residual is about {info['residual']:.2g})" if "residual" in info else ""  # small steps prove little
        return Verdict(Status.RULE_MET, f"relative change {change:.2g} <= {self.tol:.2g}{still}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count, or start at zero if the tolerance was another one."""
        self.held = state["held"] if state["tol"] == self.tol else 0


@dataclass(frozen=True)
class _Exact:
    """A rule on a diagnostic that is computed every few steps, outside the run's clock and counts.

    Args:
        tol: stop at or below it.
        every: number of steps between two evaluations.
        gamma: of the envelope; that of the method by default.
    """

    agrees: ClassVar[bool] = True  # diagnostics are computed with the group, and are the same in all processes

    tol: float
    every: int = 20
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_tolerance(f"{type(self).__name__}: tol", self.tol)
        check_count(f"{type(self).__name__}: every", self.every)

    def __call__(self, run: Run, info: StepInfo) -> Verdict | None:
        if not info.due(self.every):
            return None
        gamma = self.gamma if self.gamma is not None else getattr(run.method, "gamma", None)
        if gamma is None:
            name = type(self).__name__
            raise ValueError(f"{name}: {run.method.name} has no gamma; give one, as in {name}({self.tol:g}, gamma=1.0).")
        value = self.measure(run, info, gamma)
        if value > self.tol:
            return None
        return Verdict(Status.RULE_MET, f"{type(self).__name__.lower()} {value:.2g} <= {self.tol:.2g}")

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Gap(_Exact):
    """Stop when the gap (f + g)(x, y) - v_gamma(x, y) is at most ``tol``: y solves the lower level to that accuracy."""

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        return diagnostics.gap(run.problem, run.x, run.y, gamma, batch=run.batch, group=run.group)


@dataclass(frozen=True)
class Residual(_Exact):
    """Stop when the residual (:func:`meha.diagnostics.prox_residual`) at the current c is at most ``tol``."""

    c: float | None = None

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        c = self.c if self.c is not None else info.get("c")
        if c is None:
            raise ValueError(f"Residual: {run.method.name} has no penalty c; give one, as in Residual({self.tol:g}, c=10.0).")
        return diagnostics.prox_residual(run.problem, run.x, run.y, gamma, c, batch=run.batch, group=run.group)
