"""The state of AdaptiveMEHA, in small records that are saved as plain tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meha._variables import Variable
from meha.methods._base import State
from meha.methods._curvatures import Curvatures

__all__ = ["AdaptiveState", "Course", "Memory", "Pace", "Record", "Sight", "Stage"]

Record = tuple[Tensor, Tensor, Tensor, Tensor]
"""z = (x, y, theta), the subgradients that the prox maps found there, and the parts of the direction that c divides and not."""

Stage = tuple[float, Tensor, bool, float]
"""c, the point (x, y) at the end, whether the residual was small there, and gamma relative to its first value."""


class _Saved:
    """Saves and restores the fields of a dataclass."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(vars(type(self)(**state)))


@dataclass
class Sight(_Saved):
    """What is known about the shape of the problem.

    Attributes:
        curvatures, vectors: norms of second derivatives, and where the next power steps for them start.
        concave: the largest negative curvature of f in y that was seen between y and theta.
        step: when the curvatures were last looked at.
    """

    curvatures: Curvatures
    vectors: dict[str, Tensor]
    concave: float = 0.0
    step: int = 0


@dataclass
class Pace(_Saved):
    """The penalty c, gamma relative to its first value, and the steps of x, y, theta relative to what the curvatures allow."""

    c: float
    growth: float = 1.0
    shrink: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def scale(self, *factors: float) -> None:
        """Multiply the steps, up to what the curvatures allow."""
        x, y, theta = (min(1.0, factor * shrink) for factor, shrink in zip(factors, self.shrink, strict=True))
        self.shrink = (x, y, theta)


@dataclass
class Memory(_Saved):
    """The last points with their gradients, none of which depends on c, gamma or steps.

    Attributes:
        accelerated: whether the present point was extrapolated from them.
        reach: how long the next accelerated step may be; 0 where nothing is known.
    """

    records: list[Record] = field(default_factory=list)
    accelerated: bool = False
    reach: float = 0.0

    def forget(self, keep: int = 0) -> None:
        """Start the acceleration again, with the last points only."""
        self.records, self.reach = self.records[len(self.records) - keep :], 0.0


@dataclass
class Course(_Saved):
    """Where the run is on its way to c = infinity.

    Attributes:
        stages: the ends of the last three.
        steps: those of the present stage.
        extrapolated, change: whether the answer is a limit for c to infinity, and its change in the last stage.
        scale: the largest size of grad F, in the metric of the steps.
        lowest, highest: the range of F.
        restarts: how often y was moved to a lower valley.
    """

    stages: list[Stage] = field(default_factory=list)
    steps: int = 0
    extrapolated: bool = False
    change: float = math.inf
    scale: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    restarts: int = 0


@dataclass
class AdaptiveState(State):
    """The answer (x, y); the point (at_x, at_y, theta) where the next gradients are taken; and what is known so far.

    Attributes:
        subgradients: those of g and of the indicators of X and Y that the last prox maps found, zero without them.
        origin: the start (x, y).
        failures: rejected points since the last accepted one.
        numbers: those of the last accepted point.
        evidence: what a search of the lower level found at the end; empty before.
        status, reason: how and why the run has ended; empty before.
    """

    at_x: Variable
    at_y: Variable
    theta: Variable
    subgradients: Tensor
    origin: Tensor
    sight: Sight
    pace: Pace
    memory: Memory = field(default_factory=Memory)
    course: Course = field(default_factory=Course)
    failures: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    evidence: str = ""
    status: str = ""
    reason: str = ""
