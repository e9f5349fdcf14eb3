"""Starts and results of the attempts of a run, and how results compare."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from meha.lower.multistart import Evidence
from meha.method.status import Status, Verdict

__all__ = ["EngineKind", "Result", "Start", "describe", "plain", "restored"]


class EngineKind(enum.Enum):
    """The engine of an attempt, by the name of its method."""

    IMPLICIT_NEWTON = "ImplicitNewton"
    PENALTY_CONTINUATION = "PenaltyContinuation"


class Start(NamedTuple):
    """Where a pass begins: what it is called, the first c, x, y, and lower solutions in other basins."""

    name: str
    c: float
    x: Tensor
    y: Tensor
    others: list[Tensor]


class Result(NamedTuple):
    """The end of an attempt: where, why, and how.

    Attributes:
        engine: the engine that made it.
        start: its start, in words.
        lower: f + g at (x, y).
        solved: whether y solves the lower level in its basin, as far as F can tell.
        spread: the range of F on the way, in a pass that of the stages that the lower level shapes.
        others: lower solutions in the other basins that were followed.
        course, accuracy: how it went and how accurate it is, in words.
        evidence: what a search of the lower level at x found; None before.
        fresh: F at the lower solution nearest to y0, at the same x; None before, or where that one is higher than y.
        gradient: the hypergradient; None in a pass.
    """

    engine: EngineKind
    start: str
    x: Tensor
    y: Tensor
    F: float
    lower: float
    solved: bool
    spread: float
    others: list[Tensor]
    course: str
    accuracy: str
    verdict: Verdict
    evidence: Evidence | None = None
    fresh: float | None = None
    gradient: Tensor | None = None

    @property
    def refuted(self) -> bool:
        """Whether a lower point of the lower level was found at x."""
        return self.evidence is not None and self.evidence.excess > 0


def describe(result: Result, *, best: bool) -> str:
    """A result in a few words."""
    end = "diverged" if result.verdict.status is Status.DIVERGED else f"F = {result.F:.6g}"
    return (
        f"{result.start}: {end}"
        + (", in a basin that is not the lowest" if result.refuted else "")
        + (" (the answer)" if best else "")
    )


def plain(result: Result) -> dict[str, Any]:
    """A result in plain tensors, numbers and text."""
    verdict, evidence = result.verdict, result.evidence
    words = {"engine": result.engine.value, "verdict": (verdict.status.value, verdict.message)}
    return result._asdict() | words | {"evidence": evidence and tuple(evidence)}


def restored(saved: Mapping[str, Any]) -> Result:
    """The result that ``plain`` wrote."""
    status, message = saved["verdict"]
    evidence = saved["evidence"] and Evidence(*saved["evidence"])
    kinds = {"engine": EngineKind(saved["engine"]), "verdict": Verdict(Status(status), message)}
    return Result(**{**saved, **kinds, "evidence": evidence})
