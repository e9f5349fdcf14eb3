"""The convergence rates of the paper's two theorems, measured on problems that satisfy their conditions.

With c_k = c (k+1)^p, and gamma, eta, alpha, beta in range, Theorem 1 says of the minima over k = 0, 1, ..., K

    theta           min ||theta^k - theta*_gamma(x^k, y^k)|| = O(K^-1/2)
    residual        min R_k(x^{k+1}, y^{k+1})                = O(K^-(1-2p)/2)
    gap             (phi - v_gamma)(x^K, y^K)                = O(K^-p)    if p > 0 and F + c_k (phi - v_gamma) stays bounded

and Theorem 2, where g = 0, f is mu-strongly convex in y, gamma > 1/mu and p > 0,

    hypergradient   min ||grad Phi(x^{k+1})||                = O(K^-(1/2-p) + K^-p).

These are upper bounds: a curve agrees when it falls at least as fast. The measured minima are never smaller than those:

- They are over K/2 <= k <= K. The bounds hold for these as well (the proof sums squares, and ends with this remark). A minimum
  over all k may be met early, by chance: where y0 is stationary, theta^0 = theta*, and it is zero for ever.
- They are over the measured k only, all small ones and then 20 per decade.

R_k is :func:`meha.diagnostics.prox_residual`: the paper's distance where g = 0; on the lasso the norm of the prox-gradient
mapping, which is at most that distance, and equal to it after the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from meha.analysis.diagnostics import envelope, prox_residual
from meha.analysis.diagnostics import hypergradient as gradient_of_phi
from meha.methods import Method
from meha.methods.meha import MEHA, MEHAState
from meha.methods.parameters import parameters
from meha.problem.schedules import evaluate
from meha.problems import KnownProblem, lasso, merely_convex, sine, strong_convex
from meha_lab.reproduce.cells import Record, ended

__all__ = ["FLOOR", "TOLERANCE", "TRIALS", "Rate", "Trial", "measure", "predicted", "slope"]


FLOOR = 1e-11
"""Values below are rounding, at the sizes of these problems: theta* is accurate to 5e-14, and R_k has c_k times its error."""

TOLERANCE = 0.05
"""A slope may be shallower by this. The bounds count powers of c_k, where a curve has those of b + c_k, and bends slowly."""

INNER = 1e-14
"""The relative tolerance of the inner solves."""


def measure(problem: KnownProblem, method: MEHA, steps: int, *, hypergradient: bool = False) -> dict[str, list[float]]:
    """The curves of one run from the problem's start, by name: ``K`` and the columns above, at log-spaced K up to ``steps``.

    The curves end early when the run is over, or when theta and residual have both reached the floor.

    Args:
        hypergradient: measure that column too; f must be smooth and strongly convex in y.

    >>> curves = measure(strong_convex(n=2), MEHA(c=10.0, p=0.25), steps=40)
    >>> list(curves), curves["K"][-3:]
    (['K', 'theta', 'gap', 'residual'], [32.0, 35.0, 40.0])
    """
    run = method.start(problem, problem.x0, problem.y0)
    complete, state = run.method, run.state
    assert isinstance(complete, MEHA)
    assert isinstance(state, MEHAState)
    assert complete.gamma is not None
    rows: list[dict[str, float]] = []
    for k in _grid(steps):
        while run.verdict is None and run.k < k:
            run.step()
        if run.verdict is not None:
            break
        here = envelope(problem, run.x, run.y, complete.gamma, tol=INNER)
        row = {"K": float(k), "theta": float((state.theta.detached() - here.theta).norm()), "gap": here.phi - here.value}
        run.step()
        row["residual"] = prox_residual(problem, run.x, run.y, complete.gamma, evaluate("c_k", complete.c_k, k), tol=INNER)
        if hypergradient:
            row["hypergradient"] = float(gradient_of_phi(problem, run.x, run.y, tol=INNER).norm())
        rows.append(row)
        if max(row["theta"], row["residual"]) < FLOOR:
            break
    names = ["K", "theta", "gap", "residual", *(["hypergradient"] if hypergradient else [])]
    found = {name: [row[name] for row in rows] for name in names}
    return {name: found[name] if name in ("K", "gap") else _minima(found["K"], found[name]) for name in names}


def predicted(p: float) -> dict[str, float]:
    """The exponents of K in the theorems' bounds, by column; those of gap and hypergradient are claimed for p > 0 only.

    >>> predicted(0.25)
    {'theta': -0.5, 'residual': -0.25, 'gap': -0.25, 'hypergradient': -0.25}
    """
    return {"theta": -0.5, "residual": -(1 - 2 * p) / 2, "gap": -p, "hypergradient": -min(0.5 - p, p)}


def slope(K: Sequence[float], values: Sequence[float]) -> float:
    """The measured exponent: least squares in log-log over the last decade of K in which the values are above the floor.

    A curve that falls faster than any power has a steep slope before it reaches the floor. NaN with fewer than
    three values, or where one is not finite.

    >>> K = [10.0 ** (i / 10) for i in range(50)]
    >>> print(f"{slope(K, [3 * k**-0.25 for k in K]):.3f}")
    -0.250
    """
    x, y = np.asarray(K, dtype=float), np.asarray(values, dtype=float)
    above = y > FLOOR
    last = above & (x >= x[above].max(initial=0.0) / 10)
    if last.sum() < 3 or not np.isfinite(y).all():
        return math.nan
    return float(np.polyfit(np.log(x[last]), np.log(y[last]), 1)[0])


@dataclass(frozen=True)
class Rate:
    """An exponent of K, as a theorem bounds it and as a run shows it."""

    column: str
    predicted: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the curve falls at least as fast as the bound; False when nothing was measured."""
        return self.measured <= self.predicted + TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A theorem put to the test on a problem that satisfies its conditions, for some p.

    Attributes:
        theorem: 1 or 2.
        problem: makes the problem.
        c: the penalty at the start.
        powers: the p.
        steps: the length of a run.
    """

    theorem: Literal[1, 2]
    problem: partial[KnownProblem]
    c: float
    powers: tuple[float, ...] = (0.0, 0.1, 0.25, 0.4)
    steps: int

    def method(self, p: float) -> MEHA:
        """The numbers that MEHA chooses from the problem's constants, but with half the steps alpha and beta.

        The theorem asks for steps so small that a merit function decreases in every step by as much as its proof needs. It does
        in the steps that the tests check; with the alpha and beta of the rule it rises at first on all but the lasso.
        """
        constants = self.problem().constants
        assert constants is not None
        rule = parameters(constants, self.c)
        alpha, beta = rule["alpha"] / 2, rule["beta"] / 2
        return MEHA(alpha=alpha, beta=beta, eta=rule["eta"], gamma=rule["gamma"], c=self.c, p=p)

    def measure(self, p: float, steps: int | None = None) -> dict[str, list[float]]:
        """The curves for this p (:func:`measure`)."""
        return measure(self.problem(), self.method(p), steps or self.steps, hypergradient=self.theorem == 2)

    def end(self, method: Method) -> Record:
        """The end of a run: its outcome, steps and gradients, and those quantities of the theorem that do not depend on p."""
        problem, gamma = self.problem(), self.method(0.25).gamma
        assert gamma is not None
        run = method.start(problem, problem.x0, problem.y0)
        while run.verdict is None and run.k < self.steps:
            run.step()
        curve = {"K": [float(run.k)], "gap": [math.nan], "hypergradient": [math.nan]}
        if run.x.isfinite().all() and run.y.isfinite().all():
            here = envelope(problem, run.x, run.y, gamma, tol=INNER)
            curve["gap"] = [here.phi - here.value]
            if self.theorem == 2:
                curve["hypergradient"] = [float(gradient_of_phi(problem, run.x, run.y, tol=INNER).norm())]
        outcome = "steps" if run.verdict is None else ended(run.verdict)
        return {"outcome": outcome, "gradients": run.counts.upper + run.counts.lower, "curve": curve}

    def columns(self, p: float) -> list[str]:
        """The columns that the theorem bounds for this p."""
        if self.theorem == 2:
            return ["hypergradient"]
        return ["theta", "residual", "gap"] if p > 0 else ["theta", "residual"]

    def rates(self, p: float, curves: Mapping[str, Sequence[float]]) -> list[Rate]:
        """The bounds for this p, and the measured exponents."""
        return [Rate(name, predicted(p)[name], slope(curves["K"], curves[name])) for name in self.columns(p)]


# c is free. Powers of c_k show once it is large against the curvature of F relative to that of f (the proof of Theorem 2 has
# c_k > 4 L_F / mu, which is 4 here), and x moves along the solutions of the lower level at the speed alpha / c_k: these are
# between. In the lasso, F is not bounded below as Theorem 1 asks, but the iterates stay where it is.
TRIALS: Mapping[str, Trial] = {
    "weakly convex": Trial(theorem=1, problem=partial(sine, n=10), c=12.0, steps=10_000),
    "merely convex": Trial(theorem=1, problem=partial(merely_convex, n=10), c=1.0, steps=5_000),
    "non-smooth": Trial(theorem=1, problem=partial(lasso, n=100), c=100.0, steps=5_000),
    "strongly convex": Trial(theorem=2, problem=partial(strong_convex, n=100), c=5.0, powers=(0.1, 0.25, 0.4), steps=10_000),
}


def _grid(steps: int) -> list[int]:
    """1, 2, ..., and 20 per decade as soon as these are further apart than 1, up to ``steps``."""
    return sorted({*(round(10 ** (i / 20)) for i in range(math.ceil(20 * math.log10(steps)))), steps})


def _minima(K: Sequence[float], values: Sequence[float]) -> list[float]:
    """At each K, the least of the values at K/2, ..., K."""
    return [min(v for k, v in zip(K, values, strict=True) if last / 2 <= k <= last) for last in K]
