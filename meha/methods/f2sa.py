"""F2SA: the gradient of the penalised problem with y and z each following its own objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meha.method.method import At, Numbers
from meha.methods.frames import PenaltyMethod, PenaltyState, at_most_one, gap_terms
from meha.problem.oracle import Oracle
from meha.problem.responses import Response, Trained
from meha.problem.schedules import Power, Schedule
from meha.tensors.variables import Variable

GROWING = Power(1.0, p=1 / 3)  # the paper's exponent without noise


@dataclass(frozen=True, kw_only=True)
class F2SA(PenaltyMethod):
    """Fully first-order stochastic approximation (Kwon et al. 2023).

    With the weight c_k and s = min(1, 1/c_k),

        T times:  z <- proj_Y( z - eta f_y(x, z) ),    y <- proj_Y( y - beta s (F_y + c_k f_y)(x, y) )
        x <- proj_X( x - alpha s (F_x(x, y) + c_k (f_x(x, y) - f_x(x, z))) )

    The factor s is how the paper's steps shrink with the weight: without it y diverges. A step costs 2 T + 2 gradients of f and
    T + 1 of F.

    Args:
        c: the weight of the lower level, a number or a function of k; (k+1)^(1/3) by default, the paper's choice without noise.
        warm_start: whether y and z continue from the last step, or restart at y0 in every step.
        alpha, beta, eta, inner_steps, x_optimizer, y_optimizer: see :class:`~meha.methods.frames.PenaltyMethod`.

    It follows :class:`~meha.responses.Trained`: y and z then begin afresh, and T and, if they are left out, beta and eta are
    those of the response, or of what is found for it. F draws y away from the response by T beta / c, so give a large
    constant c, and an alpha of that order.

    MEHA differs by a proximal term in the problem of z. The paper's theory is for f strongly convex in y; with a growing weight
    it also solves :func:`meha.problems.merely_convex`.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=1)
    >>> run = F2SA(alpha=0.5, beta=0.5, eta=0.5, inner_steps=5).start(problem, problem.x0, problem.y0)
    >>> for _ in range(2000):
    ...     info = run.step()
    >>> print(f"{float(run.x):.2f}")
    0.52
    """

    follows: ClassVar[tuple[type[Response], ...]] = (Trained,)
    penalties: ClassVar[tuple[str, ...]] = ("c",)

    c: Schedule = GROWING
    warm_start: bool = True

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> PenaltyState:
        state = super().init(oracle, x, y)
        state.start = None if self.warm_start else y.copy()
        return state

    def step(self, oracle: Oracle, state: PenaltyState, at: At) -> Numbers:
        c, batch = at.c, at.batch
        s = at_most_one(c)
        state.restart(state.y, state.z)  # does nothing with warm starts
        first, second, third = gap_terms(oracle, state, s, c * s)
        for _ in range(self.inner_steps):
            self.follow(oracle, state, at, steps=1)
            _, d_y = oracle.gradient(state.y, [first, second], batch)  # f(x, z) does not depend on y
            self.move_y(oracle, state, at, d_y)
        (upper, lower, best), d_x = oracle.gradient(state.x, [first, second, third], batch)
        size = self.move_x(oracle, state, at, d_x)
        return {"upper": upper, "lower": lower, "gap": lower - best, "d_x": size, "c": c}
