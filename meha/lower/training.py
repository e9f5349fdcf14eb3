"""The step size and the number of steps of a response ``Trained``, from the training curve of the lower level."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from meha.lower.estimation import Probe
from meha.numerics.tolerances import LOOSE, PROBES
from meha.problem.loaders import random_states, set_random_states
from meha.problem.oracle import Oracle
from meha.problem.responses import Trained
from meha.tensors.variables import Variable, add_, copy_

LONGEST = 50
"""Steps of the longest curve, and so of a response: RHG keeps a copy of y for each, and takes three gradients' time."""

GAINED = 0.99
"""Part of what the longest curve gains that the response must gain; the last part takes most steps. On a quadratic f, the error
of y is then a tenth of what it was."""

CURVES = 10
"""Upper bound on the curves by which a step size is sought, besides two at the end: the work of four steps of RHG at most."""

MARGIN = math.sqrt(2)
"""A step size must still be stable when it is this much longer, or the curvature grows by as much while x moves."""


@dataclass(frozen=True)
class TrainingCurve:
    """How f + g falls in training.

    Attributes:
        lr: the step size.
        values: f + g before the first step and after each; while a step size is sought, only up to the first rise.
        stable: whether there was none, and all values are finite.
    """

    lr: float
    values: list[float]
    stable: bool


class Training:
    """Trains a copy of y from the start of a response at x, with the same random numbers every time.

    Args:
        x, y: the start of the run; they and their buffers stay as they are.
        batch: the first batch; None without batches.

    Attributes:
        curves: those so far.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, batch: Any, response: Trained) -> None:
        self.oracle, self.x, self.y, self.batch = oracle, x.copy(), y.copy(), batch
        copy_(self.y.leaves, [leaf.detach() for leaf in response.begin(x, self.y)])
        self.start, self.random = self.y.state_dict(), random_states()
        self.curves: list[TrainingCurve] = []

    def curve(self, lr: float, steps: int, *, falling: bool = True) -> TrainingCurve:
        """Train for some steps, or with ``falling`` until f + g rises."""
        oracle, x, y, values = self.oracle, self.x, self.y, list[float]()
        y.load_state_dict(self.start)
        while True:
            set_random_states(self.random)
            (value,), direction = oracle.gradient(y, [(1.0, oracle.lower, x, y)], self.batch, strict=False)
            values.append(float(value) + float(oracle.g(x, y)))
            stable = math.isfinite(values[-1]) and not (
                falling and values[-1] > values[max(len(values) - 2, 0)] + self.noise(values)
            )
            if not stable or len(values) > steps:
                break
            add_(y.leaves, direction, -lr)
            oracle.prox(x.value, y.leaves, lr)
        self.curves.append(TrainingCurve(lr, values, stable))
        return self.curves[-1]

    def noise(self, values: list[float]) -> float:
        """The change of f + g that counts as rounding."""
        return float(max(torch.finfo(leaf.dtype).eps for leaf in self.y.leaves) ** LOOSE * abs(values[0]))

    def search(self, steps: int) -> TrainingCurve:
        """The curve that ends lowest, of stable step sizes that differ by factors of two, with a margin to unstable ones."""
        around = self.x, self.y
        probe = Probe(self.oracle, self.x.copy(), self.y.copy(), self.batch, torch.Generator().manual_seed(0), PROBES, around)
        low, high = probe.block(self.oracle.lower, probe.y)
        longest = self.oracle.longest_prox
        best = self.curve(min(1 / (max(-low, high) or 1.0), longest), steps)
        grows = best.stable
        while not best.stable and len(self.curves) < CURVES:
            best = self.curve(best.lr / 2, steps)
        while grows and 2 * best.lr <= longest and len(self.curves) < CURVES:
            longer = self.curve(2 * best.lr, steps)
            grows = longer.stable and longer.values[-1] < best.values[-1]
            best = longer if grows else best
        if best.stable and not self.curve(MARGIN * best.lr, steps).stable:
            shorter = self.curve(best.lr / MARGIN, steps)
            best = shorter if shorter.stable else best
        return best

    def steps(self, curve: TrainingCurve) -> int:
        """The number of steps after which GAINED of the fall is gained; all where nothing falls but rounding."""
        begin, lowest = curve.values[0], min(curve.values)
        enough = begin - GAINED * (begin - lowest)
        seen = begin - lowest > self.noise(curve.values)
        return next(t for t, value in enumerate(curve.values) if value <= enough) if seen else len(curve.values) - 1


def complete(oracle: Oracle, x: Variable, y: Variable, batch: Any, response: Trained) -> tuple[Trained, str]:
    """The response with the numbers that were left out, and what they do, in words.

    Nothing else changes: x and y, their buffers and the random numbers that are drawn next are as before. Gradients count.

    Raises:
        ValueError: f + g is not finite at the start, or training does not lower it.
    """
    random, before, lr = random_states(), oracle.counts.lower, response.lr
    try:
        training, most = Training(oracle, x, y, batch, response), response.steps or LONGEST
        curve = training.search(most) if lr is None else training.curve(lr, most, falling=False)
    finally:
        set_random_states(random)
    values = curve.values
    if not math.isfinite(values[0]):
        raise ValueError(f"lower: is {values[0]} where training begins; check it, or begin elsewhere.")
    if not curve.stable or (values[-1] > values[0] and min(values) == values[0]):
        remedy = f"give a smaller one than {lr:.3g}" if lr else "give it, as in Trained(lr=...), and look at meha.check"
        raise ValueError(f"response: with no step size that was tried does training lower f + g from its start; {remedy}.")
    steps = response.steps or training.steps(curve)
    words = f"{steps} step{'s' * (steps != 1)} of {curve.lr:.3g} lower f + g from {values[0]:.4g} to {values[steps]:.4g}"
    words += "" if response.steps else f", and {len(values) - 1} steps to {min(values):.4g}"
    found = dataclasses.replace(response, steps=steps, lr=curve.lr)
    return found, f"{words} (found by {oracle.counts.lower - before} gradients of f)"
