"""Stopping rules: functions of the run and the numbers of its last step that say whether, and why, to stop.

A rule is any function ``rule(run, info) -> bool | str``: a true value stops the run as converged, and text says why. A
user's rule is often one line: ``stop=lambda run, info: info["upper"] < 0.3``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meha import diagnostics
from meha._checks import check_count, check_tolerance
from meha.methods._base import Run, StepInfo

__all__ = ["Gap", "RelativeChange", "Residual", "Rule"]

Rule = Callable[[Run, StepInfo], bool | str]


@dataclass(frozen=True)
class RelativeChange:
    """Stop when ||z_{k+1} - z_k|| <= tol * ||z_{k+1}|| for z = (x, y).

    Cheap, and common in practice; small steps satisfy it far from a solution. It does not hold while the method says that small
    steps mean nothing.

    Args:
        tol: stop at or below it.
        times: in so many steps in a row; a point may rest for one step while other variables of the method move.
    """

    tol: float = 1e-6
    times: int = 2

    def __post_init__(self) -> None:
        check_tolerance(f"{type(self).__name__}: tol", self.tol)
        check_count("RelativeChange: times", self.times)

    def __call__(self, run: Run, info: StepInfo) -> bool | str:
        change = info["change"]
        if change > self.tol or not run.method.settles(info.step):
            return False
        still = f" (the residual is about {info['residual']:.2g})" if "residual" in info else ""
        return f"relative change {change:.2g} <= {self.tol:.2g}{still}"


@dataclass(frozen=True)
class _Exact:
    """A rule on a diagnostic that is computed every so many steps, outside the run's clock and counts.

    Args:
        tol: stop at or below it.
        every: how many steps between two evaluations.
        gamma: of the envelope; the method's own by default.
    """

    tol: float
    every: int = 20
    gamma: float | None = None

    def __post_init__(self) -> None:
        check_tolerance(f"{type(self).__name__}: tol", self.tol)
        check_count(f"{type(self).__name__}: every", self.every)

    def __call__(self, run: Run, info: StepInfo) -> bool | str:
        if not info.due(self.every):
            return False
        gamma = self.gamma if self.gamma is not None else getattr(run.method, "gamma", None)
        if gamma is None:
            name = type(self).__name__
            raise ValueError(f"{name}: {run.method.name} has no gamma; give one, as in {name}({self.tol:g}, gamma=1.0).")
        value = self.measure(run, info, gamma)
        return f"{type(self).__name__.lower()} {value:.2g} <= {self.tol:.2g}" if value <= self.tol else False

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Gap(_Exact):
    """Stop when the gap (f + g)(x, y) - v_gamma(x, y) is at most ``tol``: y solves the lower level to that accuracy."""

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        return diagnostics.gap(run.problem, run.x, run.y, gamma, batch=run.batch)


@dataclass(frozen=True)
class Residual(_Exact):
    """Stop when the residual of the penalised problem at the current c is at most ``tol``."""

    c: float | None = None

    def measure(self, run: Run, info: StepInfo, gamma: float) -> float:
        c = self.c if self.c is not None else info.get("c")
        if c is None:
            raise ValueError(f"Residual: {run.method.name} has no penalty c; give one, as in Residual({self.tol:g}, c=10.0).")
        return diagnostics.residual(run.problem, run.x, run.y, gamma, c, batch=run.batch)
