"""Status and Verdict say how and why a run ended; TrainingWarning is for a run that goes on with a problem."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TrainingWarning(UserWarning):
    """A run goes on, but may not do what the user intended."""


class Status(enum.Enum):
    """How a run ended."""

    CONVERGED = "converged"
    """The method has evidence that this is a solution: x is stationary, and y was verified."""
    LOCAL = "local"
    """Stationary, but a better x or a lower point of the lower level may exist, or one was found and could not be used."""
    RULE_MET = "rule met"
    """A stopping rule ended the run, often because x and y hardly move; whether they are a solution was not verified."""
    FINISHED = "finished"
    """The method has nothing left to do, and does not claim convergence."""
    AT_INFINITY = "optimum at infinity"
    """F still falls, or stays as low, as x or y grows without bound."""
    DIVERGED = "diverged"
    NON_FINITE = "non-finite"
    BROKE_DOWN = "broke down"
    MAX_STEPS = "max steps"
    MAX_SECONDS = "max seconds"
    """The time allowed was over first; nothing is claimed."""
    STOPPED = "stopped"
    """By a callback, or in a loop of your own."""
    INTERRUPTED = "interrupted"
    """By Ctrl-C."""

    def __str__(self) -> str:
        return self.value

    @property
    def failed(self) -> bool:
        """Whether the last step is useless; such a run is not saved."""
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


def first_line(error: Exception) -> str:
    """The kind and the first line of an error, for a message that ends otherwise."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
