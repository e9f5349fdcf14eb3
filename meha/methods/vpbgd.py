"""VPBGD: gradient descent on F plus a growing multiple of the gap of the lower level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meha.method.method import At, Numbers
from meha.methods.frames import PenaltyMethod, PenaltyState, at_most_one, gap_terms
from meha.problem.oracle import Oracle
from meha.problem.schedules import Ramp, Schedule

GROWING = Ramp(0.0, 10.0, steps=1000)  # from 0, so that F chooses the basin first


@dataclass(frozen=True, kw_only=True)
class VPBGD(PenaltyMethod):
    """Value-function penalty-based bilevel gradient descent (Shen and Chen 2023).

    With the weight c_k and s = min(1, 1/c_k),

        T times:  z <- proj_Y( z - eta f_y(x, z) )
        x <- proj_X( x - alpha s (F_x + c_k (f_x(x, y) - f_x(x, z))) ),    y <- proj_Y( y - beta s (F_y + c_k f_y(x, y)) )

    the last two at once. A step costs T + 2 gradients of f and 1 of F.

    Args:
        c: the weight of the gap, a number or a function of k; by default a line from 0 to 10 over 1000 steps. The error of the
            answer is of the order of 1/c at the end; a long phase with a small weight lets F choose the basin of f.
        alpha, beta, eta, inner_steps, x_optimizer, y_optimizer: see :class:`~meha.methods.frames.PenaltyMethod`.

    >>> import meha
    >>> from meha.problem.schedules import Ramp
    >>> problem = meha.problems.sine(n=1)
    >>> method = VPBGD(alpha=0.1, beta=0.1, eta=0.5, inner_steps=5, c=Ramp(0.0, 20.0, steps=1000))
    >>> run = method.start(problem, problem.x0, problem.y0)
    >>> for _ in range(2000):
    ...     info = run.step()
    >>> print(f"{float(run.x):.2f}")
    2.34
    """

    penalties: ClassVar[tuple[str, ...]] = ("c",)
    may_be_zero: ClassVar[tuple[str, ...]] = ("c",)

    c: Schedule = GROWING

    def step(self, oracle: Oracle, state: PenaltyState, at: At) -> Numbers:
        c = at.c
        s = at_most_one(c)
        self.follow(oracle, state, at)  # z continues from its last point, as in the source
        terms = gap_terms(oracle, state, s, c * s)
        (upper, lower, best), (d_x, d_y) = oracle.gradients((state.x, state.y), terms, at.batch)
        size = self.move_x(oracle, state, at, d_x)
        self.move_y(oracle, state, at, d_y)
        return {"upper": upper, "lower": lower, "gap": lower - best, "d_x": size, "c": c}
