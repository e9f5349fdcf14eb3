"""Solution, Status and History: what a run leaves behind."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meha import diagnostics
from meha._oracle import Counts, Oracle
from meha._variables import Variable
from meha.methods._base import Method, describe
from meha.problem import Problem
from meha.theory import Constants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["History", "Solution", "Status"]


class Status(enum.Enum):
    """How a run ended, in words: converged by a stopping rule, finished as the method itself says, and so on."""

    CONVERGED = "converged"
    FINISHED = "finished"
    MAX_STEPS = "max steps"
    DIVERGED = "diverged"
    NON_FINITE = "non-finite"
    BROKE_DOWN = "broke down"
    STOPPED = "stopped by callback"

    def __str__(self) -> str:
        return self.value


class History(Mapping[str, list[float]]):
    """The numbers of the recorded steps, by name: ``history["upper"]`` is a list with one entry per recorded step.

    >>> history = History()
    >>> history.append({"step": 1, "upper": 2.0})
    >>> history.append({"step": 2, "upper": 1.0, "error": 0.5})
    >>> history["upper"], history["error"]
    ([2.0, 1.0], [nan, 0.5])
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}
        self._rows = 0

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row; a number that earlier rows lacked is NaN there."""
        for name in row:
            if name not in self._columns:
                self._columns[name] = [float("nan")] * self._rows
        self._rows += 1
        for name, column in self._columns.items():
            column.append(float(row.get(name, float("nan"))))

    def state_dict(self) -> dict[str, Tensor]:
        """The columns, as tensors."""
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the columns of another history."""
        self._columns = {name: column.tolist() for name, column in state.items()}
        self._rows = max((len(column) for column in self._columns.values()), default=0)

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"History({self._rows} rows of {', '.join(self._columns)})"


@dataclass(eq=False, repr=False)
class Solution:
    """The last finite iterate of a run, and how it was reached. ``print`` it, or ``plot`` it.

    Attributes:
        x, y: the solution, in the structure of the start.
        status: how the run ended.
        message: the same in a sentence, with what to try when it went wrong.
        steps: steps taken.
        seconds: time of the start, where left-out numbers are chosen, and of the steps; not of diagnostics, rules, callbacks,
            checkpoints.
        counts: gradients of F and of f, Hessian-vector products.
        history: numbers of the recorded steps.
        method: the hyper-parameters, with those that were left out filled in.
        constants: of the problem, as stated with it or estimated to fill in the method; None when nothing is known.
        report: what the run found about the problem, in lines by heading; empty where the method reports nothing.
    """

    problem: Problem
    method: Method
    x: Any
    y: Any
    status: Status
    message: str
    steps: int
    seconds: float
    counts: Counts
    history: History
    constants: Constants | None = None
    batch: Any = None
    report: Mapping[str, str] = field(default_factory=dict)

    @property
    def converged(self) -> bool:
        """Whether a stopping rule was met."""
        return self.status is Status.CONVERGED

    @property
    def _unknown(self) -> bool:
        return self.problem.needs_batch and self.batch is None

    @cached_property
    def upper(self) -> float | None:
        """F(x, y), on the last batch where there are batches; None when there was none yet."""
        if self._unknown:
            return None
        x, y = Variable.of(self.x, "x").copy(), Variable.of(self.y, "y").copy()
        with torch.no_grad():
            return float(Oracle(self.problem, x, y).upper(x, y, self.batch))

    @property
    def gamma(self) -> float | None:
        """The envelope parameter of the method, if it has one."""
        return getattr(self.method, "gamma", None)

    @property
    def c(self) -> float | None:
        """The last penalty, if the method has one."""
        return self.history["c"][-1] if "c" in self.history else None

    @cached_property
    def gap(self) -> float | None:
        """(f + g)(x, y) - v_gamma(x, y), computed when first asked for; None without a gamma."""
        if self.gamma is None or self._unknown:
            return None
        return diagnostics.gap(self.problem, self.x, self.y, self.gamma, batch=self.batch)

    @cached_property
    def residual(self) -> float | None:
        """The residual of the penalised problem at the last c, computed when first asked for; None without gamma and c."""
        if self.gamma is None or self.c is None or self._unknown:
            return None
        return diagnostics.residual(self.problem, self.x, self.y, self.gamma, self.c, batch=self.batch)

    def __repr__(self) -> str:
        return f"Solution({self.status}, steps={self.steps}, seconds={self.seconds:.3g})"

    def __str__(self) -> str:
        lines = [
            f"{self.method.name}: {self.status} after {self.steps} steps, {self.seconds:.2f} s",
            f"  {self.message}",
        ]
        if self.upper is not None:
            lines.append(f"  F          {self.upper:.6g}")
        if self.gap is not None:
            lines.append(
                f"  gap        {self.gap:.3g}  (lower level: f + g above its Moreau envelope, gamma = {self.gamma:.3g})"
            )
        if self.residual is not None:
            lines.append(f"  residual   {self.residual:.3g}  (stationarity of the penalised problem, c = {self.c:.3g})")
        work = f"{self.counts.upper} of F, {self.counts.lower} of f"
        lines.append(f"  gradients  {work}" + (f", {self.counts.hvp} Hessian-vector products" if self.counts.hvp else ""))
        lines.append(f"  method     {describe(self.method)}")
        lines += [f"  {heading:<10} {line}" for heading, line in self.report.items()]
        covered = "" if self.constants is None else self.method.theory(self.constants)
        if covered:
            origin = "" if self.problem.constants is not None else " (constants estimated near the start)"
            lines.append(f"  theory     {covered}{origin}")
        return "\n".join(lines)

    def plot(self, names: Sequence[str] = ("upper", "gap", "residual", "change"), path: str | None = None) -> Figure:
        """Convergence curves of recorded numbers against the step, one panel each; saved to ``path`` if given.

        Needs matplotlib: ``pip install "meha[plot]"``.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('plot() needs matplotlib; install it with: pip install "meha[plot]"') from error
        shown = [name for name in names if name in self.history]
        if not shown:
            raise ValueError(f"names: none of {list(names)} is in the history, which has {list(self.history)}.")
        figure = Figure(figsize=(3.4 * len(shown), 2.8), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            values = self.history[name]
            axis.plot(self.history["step"], values)
            if all(not value <= 0 for value in values):
                axis.set_yscale("log")
            axis.set_xlabel("step")
            axis.set_title(_TITLES.get(name, name), fontsize="medium")
            axis.grid(alpha=0.3)
        figure.suptitle(f"{self.method.name}: {self.status}")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


_TITLES = {
    "upper": "F(x, y)",
    "lower": "(f + g)(x, y)",
    "gap": "gap (as the run estimates it)",
    "residual": "residual (as the run estimates it)",
    "change": "relative change of (x, y)",
}
