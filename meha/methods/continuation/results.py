"""Starts and results of the attempts of a run, and how results compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from meha._verdicts import Status, Verdict
from meha.methods._verification import Evidence
from meha.methods.continuation.tuning import TUNING

__all__ = ["SECOND_ORDER", "Result", "Start", "describe", "judged", "plain", "restored", "worth"]


SECOND_ORDER = "second order"
"""What attempts of the second-order engine are called, at the beginning."""


class Start(NamedTuple):
    """Where a pass begins: what it is called, the first c, x, y, and lower solutions in other valleys."""

    name: str
    c: float
    x: Tensor
    y: Tensor
    others: list[Tensor]


class Result(NamedTuple):
    """The end of a pass or of the second-order engine: where, why, and how.

    Attributes:
        start: what it was called.
        lower: f + g at (x, y).
        solved: whether y solves the lower level in its valley, as far as F can tell.
        spread: the range of F on the way, in a pass that of the stages that the lower level shapes.
        others: lower solutions in the other valleys that were followed.
        course, accuracy: how it went and how accurate it is, in words.
        evidence: what a search of the lower level at x found; None before.
        fresh: F at the lower solution nearest to y0, at the same x; None before, or where that one is higher than y.
        gradient: the hypergradient; None in a pass.
    """

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
    def second_order(self) -> bool:
        """Whether it is that of the second-order engine."""
        return self.start.startswith(SECOND_ORDER)

    @property
    def refuted(self) -> bool:
        """Whether a lower point of the lower level was found at x."""
        return self.evidence is not None and self.evidence.excess > 0


def worth(result: Result) -> tuple[bool, bool, bool]:
    """What counts before F: whether there is an answer, whether y is not refuted, whether the lower level was solved."""
    return result.verdict.status is not Status.DIVERGED, not result.refuted, result.solved


def judged(result: Result) -> Verdict:
    """The end in the light of what is known about y, and of F at a fresh one."""
    end, note = _verified(result), _hollow(result)
    return Verdict(end.status, f"{end.message} {note}") if note else end


def _verified(result: Result) -> Verdict:
    end, evidence = result.verdict, result.evidence
    if end.status is not Status.CONVERGED:
        return end
    if evidence is None:
        doubt = "y could not be verified, since no gradients of f were left; allow more (max_gradients)"
    elif evidence.excess:
        doubt = f"A better point of the lower level was found, and could not be used: {evidence}"
    elif not evidence.certain:
        doubt = f"A better point of the lower level may exist: {evidence}"
    else:
        return Verdict(Status.CONVERGED, f"{end.message} {evidence}.")
    return Verdict(Status.LOCAL, f"{end.message} {doubt}.")


def _hollow(result: Result) -> str:
    """What to say where F depends on the choice among the solutions of the lower level; nothing where it does not."""
    scale = max(result.spread, abs(result.F))
    if result.fresh is None or not result.fresh - result.F > TUNING.hollow * scale:
        return ""
    return (
        f"But a fresh lower solution has F = {result.fresh:.3g}, not {result.F:.3g}: the lower level has several solutions"
        " at this x, and F chose among them. If y is to be computed afresh, state it:"
        " Problem(..., response=meha.responses.Nearest())."
    )


def describe(result: Result, *, best: bool) -> str:
    """A result in a few words."""
    end = "diverged" if result.verdict.status is Status.DIVERGED else f"F = {result.F:.6g}"
    return (
        f"{result.start}: {end}"
        + (", in a valley that is not the lowest" if result.refuted else "")
        + (" (the answer)" if best else "")
    )


def plain(result: Result) -> dict[str, Any]:
    """A result in plain tensors, numbers and text."""
    verdict, evidence = result.verdict, result.evidence
    return result._asdict() | {"verdict": (verdict.status.value, verdict.message), "evidence": evidence and tuple(evidence)}


def restored(saved: Mapping[str, Any]) -> Result:
    """The result that ``plain`` wrote."""
    status, message = saved["verdict"]
    evidence = saved["evidence"] and Evidence(*saved["evidence"])
    return Result(**{**saved, "verdict": Verdict(Status(status), message), "evidence": evidence})
