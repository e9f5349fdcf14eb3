"""Status and Verdict: how a run ends, and why; TrainingWarning: what it goes on in spite of."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Status", "TrainingWarning", "Verdict"]


class TrainingWarning(UserWarning):
    """A run goes on, but perhaps not as it was meant to."""


class Status(enum.Enum):
    """How a run ended."""

    CONVERGED = "converged"
    """The method has evidence that this is a solution: x rests, and y was verified."""
    LOCAL = "local"
    """At rest, but a better point of the lower level may exist or was found and could not be used, or a better x may exist."""
    RULE_MET = "rule met"
    """A stopping rule ended the run, often since x and y rest; whether they are a solution was not verified."""
    FINISHED = "finished"
    """The method has nothing left to do, and does not claim convergence."""
    AT_INFINITY = "optimum at infinity"
    """F still falls, or stays as low, as x or y goes on without bound."""
    DIVERGED = "diverged"
    NON_FINITE = "non-finite"
    BROKE_DOWN = "broke down"
    MAX_STEPS = "max steps"
    STOPPED = "stopped by callback"
    INTERRUPTED = "interrupted"
    """By Ctrl-C."""

    def __str__(self) -> str:
        return self.value

    @property
    def failed(self) -> bool:
        """Whether the last step was of no use; such a run is not saved."""
        return self in (Status.DIVERGED, Status.NON_FINITE, Status.BROKE_DOWN)


@dataclass(frozen=True)
class Verdict:
    """Why a run is over.

    Attributes:
        status: the kind of end.
        message: the reason in a sentence, with a remedy where something went wrong.

    >>> Verdict(Status.RULE_MET, "relative change 1e-09 <= 1e-08")
    Verdict(status=<Status.RULE_MET: 'rule met'>, message='relative change 1e-09 <= 1e-08')
    """

    status: Status
    message: str
