"""Validate: judges x and y during a run on data that neither level sees."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meha._checks import check_count
from meha._running import Run, StepInfo
from meha._verdicts import Status, Verdict

__all__ = ["Validate", "ValidationWarning"]


class ValidationWarning(UserWarning):
    """F falls while a measure on other data gets worse."""


class Validate:
    """Judges x and y during a run on data that neither level sees, keeps the best iterate, and ends the run early.

    F falls as long as y can fit its data, also when x and y get worse on others. With this observer among the callbacks of
    :func:`meha.solve`, the solution has x and y where the score was best, modules included, and the history has a column
    ``score``. A warning (:class:`ValidationWarning`) says when F falls while the score gets worse. In a run of several
    processes, the score is the mean of theirs.

    Args:
        score: a function of (x, y) that returns a number, such as the loss on a third set of data.
        every: number of steps between two evaluations.
        patience: number of evaluations without a better score after which the run ends; None for never.
        larger_is_better: True for measures such as an accuracy.

    Attributes:
        best: the best score so far; NaN before the first.
        step: the step at which it was reached.

    >>> import meha, torch
    >>> problem = meha.problems.strong_convex(n=2)
    >>> method = meha.RHG(alpha=0.02, beta=0.5)  # x goes to 1/2
    >>> validate = Validate(lambda x, y: (x - 1).square().sum(), every=1, patience=2)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, method, callbacks=validate)
    >>> print(solution.status, float(abs(solution.x - 1).max()) < 0.05, solution.steps - validate.step)
    rule met True 2
    """

    agrees = True
    NOTICED = 3
    """Evaluations in a row without a better score, with F below its value at the best, at which the warning comes."""

    def __init__(
        self,
        score: Callable[[Any, Any], Any],
        every: int = 100,
        patience: int | None = 10,
        *,
        larger_is_better: bool = False,
    ) -> None:
        if not callable(score):
            raise TypeError(f"Validate: score must be a function of (x, y), got {type(score).__name__}.")
        check_count("Validate: every", every)
        if patience is not None:
            check_count("Validate: patience", patience)
        self.score, self.every, self.patience, self.larger_is_better = score, every, patience, larger_is_better
        self._forget()

    def _forget(self) -> None:
        self.best, self.step, self.upper, self.since, self._warned = math.nan, 0, math.nan, 0, False
        self._kept: dict[str, dict[str, Tensor]] = {}

    def begin(self, run: Run, max_steps: int) -> None:
        """Forget earlier runs."""
        self._forget()

    def __call__(self, run: Run, info: StepInfo) -> Verdict | Mapping[str, float] | None:
        if not info.due(self.every):
            return None
        with torch.no_grad():
            score = float(self.score(run.x, run.y))
            if run.group is not None:
                score = float(run.oracle.mean(torch.tensor(score, device=run.state.y.device)))
        sign = -1 if self.larger_is_better else 1
        if math.isnan(self.best) or sign * score < sign * self.best:  # never where it is NaN
            if not math.isnan(score):
                self.best, self.step, self.upper, self.since = score, info.step, info.get("upper", math.nan), 0
                self._kept = {"x": run.state.x.state_dict(), "y": run.state.y.state_dict()}
        else:
            self.since += 1
        if self.since >= self.NOTICED and not self._warned and info.get("upper", math.inf) < self.upper:
            self._warned = True
            warnings.warn(
                f"Validate: F fell from {self.upper:.3g} to {info['upper']:.3g} since step {self.step}, while the score went"
                f" from {self.best:.3g} to {score:.3g}: x or y fits the data of the upper level only. See docs/responses.md.",
                ValidationWarning,
                stacklevel=2,
            )
        if self.patience is not None and self.since >= self.patience:
            return Verdict(
                Status.RULE_MET,
                f"The score was not better than {self.best:.3g} in {self.since} evaluations; x and y of step {self.step} are"
                " returned.",
            )
        return {"score": score}

    def restore(self, run: Run) -> float | None:
        """Put the best iterate into the variables of a run that is over; F in the step before it, if it is known."""
        if not self._kept:
            return None
        run.state.x.load_state_dict(self._kept["x"])
        run.state.y.load_state_dict(self._kept["y"])
        return self.upper

    def state_dict(self) -> dict[str, Any]:
        """The best iterate, its score, and the evaluations since."""
        names = ("best", "step", "upper", "since", "_warned", "_kept")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another observer had seen."""
        for name, value in state.items():
            setattr(self, name, value)
