"""Schedules: step sizes and penalties as functions of the step number k = 0, 1, 2, ...

A schedule is a positive number or a function that returns one for each step number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from meha.tensors.checks import check_count, check_positive, check_tolerance

__all__ = ["Cosine", "InversePower", "Power", "Ramp", "Schedule"]

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class InversePower:
    """Inverse power annealing, s_k = initial * (k + 1)^(-power). The paper states no exponent; 1/40 is our reading.

    >>> InversePower(0.1, power=0.5)(3)
    0.05
    """

    initial: float
    power: float = 1 / 40

    def __post_init__(self) -> None:
        check_positive("InversePower: initial", self.initial)
        if not self.power >= 0:
            raise ValueError(f"InversePower: power must be at least 0, got {self.power}.")

    def __call__(self, k: int) -> float:
        return self.initial * (k + 1) ** -self.power


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``initial`` at step 0 to ``final`` at step ``steps``, then constant.

    >>> Cosine(1.0, steps=10, final=0.5)(5)
    0.75
    """

    initial: float
    steps: int
    final: float

    def __post_init__(self) -> None:
        check_positive("Cosine: initial", self.initial)
        check_positive("Cosine: final", self.final)
        if self.steps < 1:
            raise ValueError(f"Cosine: steps must be at least 1, got {self.steps}.")

    def __call__(self, k: int) -> float:
        progress = min(k / self.steps, 1.0)  # constant after the last step
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Power:
    """Power law, c_k = initial * (k + 1)^p; the penalty of the paper's theorem for 0 <= p < 1/2.

    >>> Power(2.0, p=0.5)(3)
    4.0
    """

    initial: float
    p: float = 0.0

    def __call__(self, k: int) -> float:
        return self.initial * (k + 1) ** self.p


@dataclass(frozen=True)
class Ramp:
    """Linear ramp from ``initial`` at step 0 to ``final`` at step ``steps``, then constant.

    >>> Ramp(0.0, 2.0, steps=10)(5)
    1.0
    """

    initial: float
    final: float
    steps: int

    def __post_init__(self) -> None:
        check_tolerance("Ramp: initial", self.initial)
        check_positive("Ramp: final", self.final)
        check_count("Ramp: steps", self.steps)

    def __call__(self, k: int) -> float:
        return self.initial + (self.final - self.initial) * min(k / self.steps, 1.0)


def evaluate(name: str, schedule: Schedule, k: int, *, zero: bool = False) -> float:
    """Return the value at step k, checked; ``name`` is for errors, and with ``zero``, a function may also return 0."""
    if not callable(schedule):  # was checked when the method was made
        return schedule
    value = float(schedule(k))
    if not (0 < value < math.inf or (zero and value == 0)):  # NaN fails, too
        raise ValueError(f"{name}: the schedule gave {value} at step {k}; it must be positive and finite.")
    return value


def fraction(name: str, schedule: Schedule, k: int) -> float:
    """Return the value at step k of a schedule of numbers in [0, 1), checked."""
    value = float(schedule(k)) if callable(schedule) else schedule
    check_tolerance(name, value)
    if not value < 1:
        raise ValueError(f"{name}: must be in [0, 1), or a function of the step with values in it, got {value} at step {k}.")
    return float(value)


def rests(schedule: Schedule, k: int) -> bool:
    """Whether a small step at k indicates convergence: not while the schedule is zero, or constant before it changes."""
    if not callable(schedule):
        return True
    later = []
    for j in (k + 1, 2 * k + 100, 10 * k + 1000, 100_000, 1_000_000):  # soon and late: a function does not say when it changes
        with suppress(Exception):  # a user's function may fail for steps that never come
            later.append(float(schedule(j)))
    now = float(schedule(k))
    moves = any(value != now for value in later)
    return not moves or (now != 0 and later[0] != now)  # steady change, as of a decay, is no reason to wait


def check_schedule(name: str, schedule: Schedule) -> None:
    """Raise unless ``schedule`` is a positive number or a function of the step number."""
    if not callable(schedule):
        check_positive(name, schedule)
