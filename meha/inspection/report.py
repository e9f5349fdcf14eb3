"""The report of a check, and how it prints."""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import dataclass, field

from meha.problem.oracle import Counts

WIDTH = 100  # columns of printed lines


@dataclass(eq=False, repr=False)
class Report:
    """Result of :func:`meha.check`; ``print`` it. It is true if there are no warnings.

    Names are those of the formulas: ``"F in x"`` is upper as a function of x, ``"f in y"`` is lower as a function of y.

    Attributes:
        findings: pairs of a topic and a sentence about it.
        warnings: what to fix or know before a run: a sentence or two each, with the remedy.
        upper, lower: F and f at the start; NaN where they have no value.
        depends: for ``"F on x"``, ``"F on y"``, ``"f on x"``, ``"f on y"``, ``"g on x"``, whether the value changes with it.
        unused: leaves that neither level uses.
        deviations: of gradients from finite differences, relative and beyond rounding; ``"f in x"`` stands for f + g.
        repeatable: whether the objectives return the same values when called again; None if this was not checked.
        twice: whether f can be differentiated twice in y, with a result that agrees with differences; None if not checked.
        kinks: jumps of gradients relative to their largest size nearby, for ``"f in y"`` and so on, where there is a kink.
        convexity: of f in y: ``"strongly convex"``, ``"convex with flat directions"``, ``"non-convex"``, ``"linear"`` or
            ``"unknown"``, as far as the points that were visited show.
        curvature: smallest and largest curvature of f in y at these points.
        basins: basins of f + g in y near the start that differ in height; None if f looks convex, or they were not counted.
        flat: number of directions of y in which f + g is flat at a solution of the lower level; None if they were not counted.
        open: whether F changes in these directions, so that it depends on which solution is meant.
        carried: whether steps on one batch spoil the lower level on another, so that y belongs to its batch; None without two.
        violation: the largest violation of a coupling constraint at the start; NaN without such constraints.
        active: names of the lower constraints that are active at the lower solution for x0.
        sizes: root mean squares of x and y, and norms of the gradients F_x, F_y, f_x, f_y at the start.
        method: name of the method that ``solve`` uses by default.
        counts: gradients that the check took.
        seconds: time for a gradient of F and of f.
    """

    findings: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    upper: float = math.nan
    lower: float = math.nan
    depends: dict[str, bool] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    deviations: dict[str, float] = field(default_factory=dict)
    repeatable: bool | None = None
    twice: bool | None = None
    kinks: dict[str, float] = field(default_factory=dict)
    convexity: str = "unknown"
    curvature: tuple[float, float] = (math.nan, math.nan)
    basins: int | None = None
    flat: int | None = None
    open: bool = False
    carried: bool | None = None
    violation: float = math.nan
    active: list[str] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)
    method: str = ""
    counts: Counts = field(default_factory=Counts)
    seconds: tuple[float, float] = (math.nan, math.nan)

    @property
    def ok(self) -> bool:
        """Return whether there are no warnings."""
        return not self.warnings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"Report({len(self.warnings)} warning{'s' * (len(self.warnings) != 1)}, f {self.convexity} in y)"

    def _repr_html_(self) -> str:
        """Return the printed report, for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        n = len(self.warnings)
        lines = ["check: no problems found" if self.ok else f"check: {n} warning{'s' if n > 1 else ''}"]
        for topic, sentence in [*self.findings, *(("!", warning) for warning in self.warnings)]:  # what to act on comes last
            margin = f"  {topic:<11}" if topic != "!" else "  ! "
            lines += textwrap.wrap(sentence, WIDTH, initial_indent=margin, subsequent_indent=" " * len(margin))
        return "\n".join(lines)
