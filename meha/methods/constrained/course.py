"""The course of a run on a coupled problem: branch and bound where it applies, or descents from many starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meha._coupling import Coupling
from meha._oracle import Oracle
from meha._quadratic import Array
from meha._running import Numbers
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods.constrained.branching import Branching
from meha.methods.constrained.compass import compass
from meha.methods.constrained.descent import Found, descend
from meha.methods.constrained.lower import LowerLevel, Region
from meha.methods.constrained.programs import Cut
from meha.methods.constrained.starts import Starts

__all__ = ["CoupledCourse"]

FEASIBLE = 1e-6
"""Violation that an answer may have."""

GAP = 1e-6
"""Gap of the lower level, relative to 1 + |f|, that an answer may have."""

AGREE = 1e-5
"""Difference of F, relative to 1 + |F|, within which two starts agree."""

ENOUGH = 3
"""Starts that must agree, or a fifth of those that ended feasible if that is more, before the answer counts as global."""

SHARE = 0.2
"""See ENOUGH."""

FEW = 4
"""Largest number of x for which steps along the coordinates are taken in the end."""

REFUTED = 4
"""Lower valleys that are followed from one start."""

BELOW = ", lower valley"
"""What the name of a start ends with that begins in a valley below what another found."""

EARLY = 7
"""Starts after which a run may end before the last one, if half of those that ended feasible agree."""

SHOWN = 8
"""Active constraints that a report lists."""

FAR = 1e6
"""Size of a point, relative to that of the start, from which on the optimum seems to lie at infinity."""


@dataclass(eq=False)
class Outcome:
    """The end of one start.

    Attributes:
        start: its name.
        z: the point.
        F, f: the values there.
        lam, nu: multipliers of the lower level.
        violation, gap: the largest violation, and f minus the least value that was found at the same x.
        certain: why nothing better exists, in words; empty if that is not known.
    """

    start: str
    z: Array
    F: float
    f: float
    lam: Array
    nu: Array
    violation: float
    gap: float
    certain: str = ""

    @property
    def good(self) -> bool:
        """Whether it is feasible on both levels."""
        return self.violation <= FEASIBLE and self.gap <= GAP * (1 + abs(self.f))


class CoupledCourse:
    """Starts, one a step, and what they found.

    Args:
        oracle: the problem and its counts.
        x, y: the variables, which hold the best point so far after each step.
        max_gradients: no further start begins beyond this number of gradients of f and products with its Hessian.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, max_gradients: int) -> None:
        self.oracle, self.max_gradients, self._variables = oracle, max_gradients, (x, y)
        self._look()
        self.outcomes: list[Outcome] = []
        self.done: list[str] = []
        self.plan: list[tuple[str, Array]] = []
        self.nodes = 0
        self.unbounded = False
        self.over = False
        self._drawn = self._refined = self._again = False

    def _look(self) -> None:
        """Take the variables for the start, and see what kind of problem it is around it."""
        self.coupling = Coupling(self.oracle, *self._variables)
        self.z0 = self.coupling.read()
        self.region = Region.of(self.coupling, self.z0)
        self.lower = LowerLevel(self.coupling, self.region)
        self.starts = Starts(self.coupling, self.lower, self.z0)

    # Steps

    def advance(self) -> Numbers:
        """Work off one start, and put the best point so far into the variables."""
        self.coupling.forget()
        if not self._drawn:
            self._begin()
        elif self.plan:
            name, z = self.plan.pop(0)
            self._work(name, z)
            if not self.plan and not self._again and not self._confirmed(self.best):
                self._again = True
                self.plan += self.starts.further()
            if (not self.plan or self._settled(self.best)) and not self._refined:
                self._refine()
        while self.best is None and self.plan and not math.isfinite(sum(self.coupling.exact(self.z0))):
            self._work(*self.plan.pop(0))  # the start cannot stand for an answer meanwhile
        best = self.best
        if best is not None:
            self.coupling.write(best.z)
        spent = self.oracle.counts.lower + self.oracle.counts.hvp
        certain = best is not None and best.good and bool(best.certain)
        self.over = certain or not self.plan or self._settled(best) or (spent >= self.max_gradients and best is not None)
        if best is None:
            F, f = self.coupling.exact(self.z0)
            return {"upper": F, "lower": f, "violation": self.coupling.violation(self.z0), "run": len(self.done)}
        return {"upper": best.F, "lower": best.f, "violation": best.violation, "gap": best.gap, "run": len(self.done)}

    def _begin(self) -> None:
        """Branch and bound where it applies; otherwise choose the starts."""
        self._drawn = True
        if Branching.fits(self.coupling):
            self.done.append("branch and bound")
            found = Branching(self.coupling).search()
            self.nodes, self.unbounded = found.nodes, found.unbounded
            if found.z is not None and self.coupling.confirm(found.z):
                why = f"branch and bound over {found.nodes} nodes found nothing better" if found.complete else ""
                self._note("branch and bound", found.z, found.lam, found.nu, why)
            if found.complete and Branching.fits(self.coupling):
                return
        self.plan = self.starts.first()

    def _work(self, name: str, z: Array) -> None:
        """Descend from a start, and follow the lower valleys that refute what it finds."""
        coupling, n = self.coupling, self.coupling.n
        self.done.append(name)
        z = self.starts.respond(z)
        answer = self.lower.solve(z[:n], z[n:])
        if not np.isfinite(answer.w).all():
            return
        start = np.concatenate([z[:n], answer.w]), answer.lam, answer.mu
        cuts: list[Cut] = []
        last: Found | None = None
        for _ in range(REFUTED):
            found = descend(coupling, *start, tuple(cuts))
            if found is None and last is not None:
                found = descend(coupling, last.z, last.lam, last.nu, tuple(cuts))
            if found is None:
                if coupling.violation(start[0]) <= FEASIBLE:
                    self._note(name, *start)
                return
            other = self._verify(name, found)
            if other is None:
                return
            cuts.append(self.lower.cut(other))
            self._branch(name, found, other)
            last = found

    def _refine(self) -> None:
        """Steps in x from the best point, for few x; where they lead on, a last start."""
        self._refined = True
        best = self.best
        if best is None or not best.good or self.coupling.n > FEW:
            return
        z, F = compass(self.coupling, self.lower, best.z, best.F)
        if F < best.F:
            answer = self.lower.solve(z[: self.coupling.n], z[self.coupling.n :])
            self._note("steps in x", z, answer.lam, answer.mu)
            self.plan.append(("the end of steps in x", z))

    def _branch(self, name: str, found: Found, other: Array) -> None:
        """A further start in the valley that refuted a point, the first time that this is met."""
        label = name + BELOW
        if label not in self.done:
            self.done.append(label)
            z = np.concatenate([found.z[: self.coupling.n], other])
            answer = self.lower.solve(z[: self.coupling.n], other)
            better = descend(self.coupling, z, answer.lam, answer.mu)
            if better is not None:
                self._verify(label, better)

    def _verify(self, name: str, found: Found) -> Array | None:
        """Note what a start found; a y of a lower valley at the same x, if there is one."""
        outcome, least = self._note(name, found.z, found.lam, found.nu)
        return None if outcome.violation > FEASIBLE or outcome.good or least is None else least

    def _note(self, name: str, z: Array, lam: Array, nu: Array, certain: str = "") -> tuple[Outcome, Array | None]:
        """Add what was found, with the best y that a search of the lower level finds at its x."""
        n = self.coupling.n
        F, f = self.coupling.exact(z)
        least = self.lower.search(z[:n], z[n:], seed=len(self.done))
        value = math.inf if least is None else self.coupling.exact(np.concatenate([z[:n], least.w]))[1]
        gap = max(0.0, f - value) if math.isfinite(value) else 0.0
        if least is not None and f < value - GAP * (1 + abs(f)):  # no solution of the lower level, but a violation that pays
            own = self.lower.solve(z[:n], z[n:])
            gap = max(0.0, own.value - f) if own.violation <= FEASIBLE else gap
        outcome = Outcome(name, z, F, f, lam, nu, self.coupling.violation(z), gap, certain)
        self.outcomes.append(outcome)
        return outcome, None if least is None else least.w

    # What is known

    @property
    def best(self) -> Outcome | None:
        """The feasible point with the smallest F; where there is none, the one with the smallest violation and gap."""
        good = [outcome for outcome in self.outcomes if outcome.good]
        if good:
            return min(good, key=lambda outcome: (outcome.F - AGREE**2 * bool(outcome.certain), outcome.violation))
        return min(self.outcomes, key=lambda outcome: max(outcome.violation, outcome.gap), default=None)

    @property
    def verdict(self) -> Verdict | None:
        """How sure the best point is; None while there are starts left."""
        if not self.over:
            return None
        best = self.best
        if best is None or not best.good:
            if self.unbounded:
                return Verdict(
                    Status.AT_INFINITY, "F falls without bound over the solutions of the lower level; bound x and y."
                )
            worst = math.inf if best is None else best.violation
            closest = (
                f"the smallest violation that was found is {worst:.1e}" if math.isfinite(worst) else "no start led anywhere"
            )
            return Verdict(
                Status.FINISHED,
                f"No point was found that solves the lower level and meets all constraints ({closest}); check their signs"
                " (h(x, y) <= 0), or start near a point that meets them.",
            )
        if float(np.abs(best.z).max(initial=0.0)) > FAR * (1 + float(np.abs(self.z0).max(initial=0.0))):
            return Verdict(Status.AT_INFINITY, "F still falls far from the start; bound x and y.")
        feasible = f"largest violation {best.violation:.1e}, lower gap {best.gap:.1e}"
        if best.certain:
            return Verdict(Status.CONVERGED, f"{best.certain[0].upper()}{best.certain[1:]}; {feasible}.")
        reached, ended = self._agreement(best)
        if self._confirmed(best):
            return Verdict(Status.CONVERGED, f"{reached} of {ended} starts that ended feasible agree; {feasible}.")
        return Verdict(
            Status.LOCAL,
            f"{reached} of {ended} starts that ended feasible led here, and a better x may exist; {feasible}.",
        )

    def _agreement(self, best: Outcome) -> tuple[int, int]:
        """How many starts ended with the same F, and how many ended feasible."""
        by_start: dict[str, float] = {}
        for outcome in self.outcomes:
            if outcome.good:
                start = outcome.start.removesuffix(BELOW)
                by_start[start] = min(outcome.F, by_start.get(start, math.inf))
        reached = sum(abs(F - best.F) <= AGREE * (1 + abs(best.F)) for F in by_start.values())
        return reached, len(by_start)

    def _confirmed(self, best: Outcome | None) -> bool:
        """Whether enough starts agree for the answer to count as global."""
        if best is None or not best.good:
            return False
        reached, ended = self._agreement(best)
        return reached >= max(ENOUGH, SHARE * ended)

    def _settled(self, best: Outcome | None) -> bool:
        """Whether enough starts agree that the others are not needed."""
        if best is None or not best.good:
            return False
        reached, ended = self._agreement(best)
        return ended >= EARLY and reached > ENOUGH and 2 * reached >= ended

    def report(self) -> dict[str, str]:
        """Which constraints are active with which multipliers, the largest violation, and what the starts found."""
        coupling, best, rows = self.coupling, self.best, self.coupling.rows
        kinds = "linear" if coupling.linear[2:].all() else "quadratic" if coupling.quadratic[2:].all() else "smooth"
        convexity = {True: "convex in y", None: "convex in y as far as seen", False: "not convex in y"}[self.lower.convex]
        counts = f"{rows.lower_equations.stop - 2} lower and {coupling.count - rows.upper.start} upper rows"
        lines = {"problem": f"{counts}, {kinds}; lower level {convexity}"}
        if best is None:
            return lines
        values = coupling.values(best.z)
        tight = [k for k in range(rows.lower.start, rows.lower.stop) if values[k] >= -FEASIBLE]
        texts = [f"{coupling.names[k]} (multiplier {best.lam[k - rows.lower.start]:.3g})" for k in tight]
        texts += [coupling.names[k] for k in range(rows.upper.start, rows.upper.stop) if values[k] >= -FEASIBLE]
        more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        lines["active"] = (", ".join(texts[:SHOWN]) + more) if texts else "no constraint"
        lines["violation"] = f"{best.violation:.1e} at most; lower gap {best.gap:.1e}"
        if self.nodes:
            lines["search"] = f"branch and bound, {self.nodes} nodes"
        values_by_start = [f"{outcome.start} F = {outcome.F:.6g}" for outcome in self.outcomes if outcome.good]
        if len(values_by_start) > 1:
            lines["starts"] = "; ".join(values_by_start[: 2 * SHOWN])
        return lines

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors, numbers and text."""
        return {
            "z0": self.z0.tolist(),
            "outcomes": [
                {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(o).items()} for o in self.outcomes
            ],
            "done": list(self.done),
            "plan": [(name, z.tolist()) for name, z in self.plan],
            "numbers": {"nodes": self.nodes, "unbounded": self.unbounded, "over": self.over}
            | {"drawn": self._drawn, "refined": self._refined, "again": self._again},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another course was."""
        if not np.array_equal(self.z0, state["z0"]):
            here = self.coupling.read()
            self.coupling.write(np.array(state["z0"]))
            self._look()
            self.coupling.write(here)
        self.outcomes = []
        for saved in state["outcomes"]:
            fields: dict[str, Any] = dict(saved)
            fields |= {name: np.array(saved[name]) for name in ("z", "lam", "nu")}
            self.outcomes.append(Outcome(**fields))
        self.done = list(state["done"])
        self.plan = [(name, np.array(z)) for name, z in state["plan"]]
        numbers = state["numbers"]
        self.nodes, self.unbounded = numbers["nodes"], numbers["unbounded"]
        self.over, self._drawn = numbers["over"], numbers["drawn"]
        self._refined, self._again = numbers["refined"], numbers["again"]
