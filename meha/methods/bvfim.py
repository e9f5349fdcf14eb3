"""BVFIM: a barrier, or a penalty, on the value-function constraint, with parameters that fall to zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from meha.analysis.theory import Constants
from meha.method.method import At, Numbers
from meha.methods.frames import PenaltyMethod, PenaltyState, descend, gap_terms
from meha.methods.parameters import hypergradient_steps
from meha.problem.oracle import Oracle
from meha.tensors.checks import check_count, check_positive, check_tolerance
from meha.tensors.variables import add_, copy_, inner

SHORTEST = 2.0**-40
"""The part of beta below which a step of y is given up; y is then stationary up to rounding."""

Price = Callable[[float, float], float]

PENALTIES: dict[str, tuple[Price, Price]] = {
    "log": (lambda slack, tau: -tau * math.log(slack) if slack > 0 else math.inf, lambda slack, tau: tau / slack),
    # slack^2 may underflow
    "inverse": (lambda slack, tau: tau / slack if slack > 0 else math.inf, lambda slack, tau: tau / slack / slack),
    # ** would raise an error on overflow
    "quadratic": (
        lambda slack, tau: max(0.0, -slack) * max(0.0, -slack) / (2 * tau),
        lambda slack, tau: max(0.0, -slack) / tau,
    ),
}
"""P and w = -P' as functions of the slack and tau; P is infinite outside a barrier."""


@dataclass(frozen=True, kw_only=True)
class BVFIM(PenaltyMethod):
    """Bilevel value-function interior-point method (Liu et al. 2021), and its form as sequential minimisation, BVFSM.

    All of m1, m2, theta and tau fall with the factor d = max( floor, min(1, hold / (k+1))^power ). Step k is

        z = y, then T times:   z <- proj_Y( z - eta (f_y(x, z) + m1 z) )
        slack(y) = f(x, z) + m1/2 ||z||^2 + m2 - f(x, y),   which is to be positive, and is at z;   y = z if it is not at y
        T_y times:             y <- proj_Y( y - t grad_y [ F + theta/2 ||y||^2 + P(slack) ](x, y) )
        x <- proj_X( x - alpha (F_x + w (f_x(x, y) - f_x(x, z))) ),    w = -P'(slack)

    ===========  ==========================  =====================  ==================
    penalty      P                           w                      tau falls with
    ===========  ==========================  =====================  ==================
    log          -tau ln(slack)              tau / slack            d
    inverse      tau / slack                 tau / slack^2          d^2
    quadratic    max(0, -slack)^2 / (2 tau)  max(0, -slack) / tau   d
    ===========  ==========================  =====================  ==================

    The first two are barriers: t is halved, from beta or from twice the last t if that is shorter, until slack > 0 and the
    objective of y does not rise, so that every y is strictly feasible. The third is BVFSM's penalty from outside, with the same
    search and any y to start from. A step costs T + T_y + 2 gradients of f and T_y + 1 of F; the search adds evaluations of
    both, mostly 1 to 4 a step of y, which are not counted.

    Args:
        penalty: ``"log"``, ``"inverse"`` or ``"quadratic"``.
        m1, theta: weights of ||z||^2/2 and ||y||^2/2 at first; may be 0.
        m2: how far above its minimum f may be at first.
        tau: the weight of the penalty at first.
        hold: number of steps for which all of these stay as they are.
        power, floor: how fast they fall, and to which part of their first values.
        upper_steps: T_y, the steps on y.
        beta: the longest step of y; there is no ``y_optimizer``, because the search decides about lengths.
        alpha, eta, inner_steps, x_optimizer: see :class:`~meha.methods.frames.PenaltyMethod`.

    The numbers of a step are those of the x-direction, at the old x and the new y, with ``slack`` and w as ``c``.

    What we find: the papers claim convergence without convexity of f, with code that never enforces the constraint. With the
    true barriers, :func:`meha.problems.sine` is solved from its start for n = 1 and 10, if

    - m2 exceeds the range of f, here 2 n, until x has settled, and tau is not larger than m2: then F chooses the basin. With
      m2 <= n, as by default, all 36 runs of barriers that we tried ended in another basin;
    - z starts at y in every step, as here. A z that continues from its last point stays in its own basin, and takes y there as
      soon as a step of x makes y infeasible.

    As f(x, y) stays about m2 above its minimum, the error of x is of the order of sqrt(m2), and ends near 1e-3 (5e-3 for the
    quadratic penalty) with the default floor. It does not fall much further: w grows like 1 / sqrt(m2), and the objective of y
    becomes too stiff for gradient steps. With T_y = 10 or floor = 1e-8, x jumps away from the solution time and again.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)  # the solution is x = 2.36
    >>> method = BVFIM(alpha=0.2, beta=0.3, eta=0.5, m2=4.0, tau=4.0, power=4.0, upper_steps=10)
    >>> run = method.start(problem, problem.x0, problem.y0)
    >>> for _ in range(100):
    ...     info = run.step()
    >>> print(f"{float(run.x):.1f}")
    2.3
    """

    penalty: Literal["log", "inverse", "quadratic"] = "log"
    m1: float = 0.01
    m2: float = 1.0
    theta: float = 0.01
    tau: float = 1.0
    hold: int = 20
    power: float = 3.0
    floor: float = 1e-6
    upper_steps: int = 25

    def __post_init__(self) -> None:
        if self.y_optimizer is not None:
            raise ValueError(
                f"y_optimizer: BVFIM searches the length of every step of y and cannot use {self.y_optimizer!r}; leave it out,"
                " and give beta, the longest step."
            )
        super().__post_init__()
        if str(self.penalty) not in PENALTIES:
            raise ValueError(f"penalty: must be 'log', 'inverse' or 'quadratic', got {self.penalty!r}.")
        checks = {check_tolerance: ("m1", "theta"), check_positive: ("m2", "tau", "power", "floor")}
        for check, names in {**checks, check_count: ("hold", "upper_steps")}.items():
            for name in names:
                check(name, getattr(self, name))
        if self.floor > 1:
            raise ValueError(f"floor: must be in (0, 1], because it is a part of the first values, got {self.floor}.")

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        # Where y minimises its objective, x descends on a function with about the curvature of F(x, y(x)).
        alpha = min(steps["alpha"], hypergradient_steps(constants)["alpha"])
        return {**steps, "alpha": alpha, "eta": 1 / (1 / steps["eta"] + self.m1)}  # the ridge adds m1 to the curvature

    def _part(self, k: int) -> float:
        """Return the factor d of step k."""
        return max(self.floor, min(1.0, self.hold / (k + 1)) ** self.power)

    def step(self, oracle: Oracle, state: PenaltyState, at: At) -> Numbers:
        x, z, batch = state.x, state.z, at.batch
        d = self._part(state.k)
        state.settled = self._part(state.k + 1) == self.floor
        m1, theta, tau = self.m1 * d, self.theta * d, self.tau * (d * d if self.penalty == "inverse" else d)
        copy_(z.leaves, state.y.leaves)  # a z that continues from its last point would draw y into its own basin
        descend(oracle, x, z, self.inner_steps, at.eta, batch, ridge=m1)
        room = m1 / 2 * float(inner(z.leaves, z.leaves)) + self.m2 * d
        slack = self._descend_y(oracle, state, at, room, theta, tau)
        w = PENALTIES[self.penalty][1](slack, tau)
        (upper, lower, best), d_x = oracle.gradient(x, gap_terms(oracle, state, 1.0, w), batch)
        size = self.move_x(oracle, state, at, d_x)
        return {"upper": upper, "lower": lower, "gap": lower - best, "slack": slack, "d_x": size, "c": w}

    def _descend_y(self, oracle: Oracle, state: PenaltyState, at: At, room: float, theta: float, tau: float) -> float:
        """Take the steps of y, and return its slack f(x, z) + room - f(x, y) after them."""
        x, y, z, batch = state.x, state.y, state.z, at.batch
        price, weight = PENALTIES[self.penalty]
        beta = t = at.beta
        best = float(oracle.lower(x, z, batch))

        def measure(lower: float) -> tuple[float, float]:
            """Return the slack and the objective of y, where f is ``lower``."""
            slack = best - lower + room  # in this order, z has a positive slack also when room is below the rounding of f
            ridge = theta / 2 * float(inner(y.leaves, y.leaves))
            return slack, float(oracle.upper(x, y, batch)) + ridge + price(slack, tau)

        slack, value = measure(float(oracle.lower(x, y, batch)))
        if self.penalty != "quadratic" and not slack > 0:  # a step of x made y infeasible, where a barrier is infinite
            copy_(y.leaves, z.leaves)
            slack, value = measure(best)
        for _ in range(self.upper_steps):
            terms = [(1.0, oracle.upper, x, y), (weight(slack, tau), oracle.lower, x, y)]
            _, d_y = oracle.gradient(y, terms, batch)
            old = [leaf.clone() for leaf in y.leaves]
            direction = [torch.add(part, leaf, alpha=theta) for part, leaf in zip(d_y, old, strict=True)]
            t = min(beta, 2 * t)  # near the last length, so that a stiff barrier does not cost many halvings every time
            while t >= SHORTEST * beta:
                add_(y.leaves, direction, -t)
                oracle.prox(x.value, y.leaves, t)
                new_slack, new_value = measure(float(oracle.lower(x, y, batch)))
                if new_value <= value:  # not for NaN, and not outside a barrier
                    slack, value = new_slack, new_value
                    break
                copy_(y.leaves, old)
                t /= 2
        return slack
