"""BOME: a penalty chosen in every step so that the gap decreases at a wanted rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meha.method.method import At, Numbers
from meha.methods.frames import PenaltyMethod, PenaltyState, gap_terms
from meha.problem.oracle import Oracle
from meha.tensors.checks import check_positive
from meha.tensors.variables import copy_, inner

TINY = 1e-8  # of the paper's code: grad q vanishes where y solves the lower level


@dataclass(frozen=True, kw_only=True)
class BOME(PenaltyMethod):
    """Bilevel optimization made easy (Liu et al. 2022): a dynamic barrier on q(x, y) = f(x, y) - f(x, z).

        z = y, then T steps of size eta on f(x, .), and z taken for a constant
        lam = max( 0, (control - <grad F, grad q>) / (||grad q||^2 + 1e-8) ),   grad q = (f_x(x, y) - f_x(x, z), f_y(x, y))
        x <- proj_X( x - alpha (F_x + lam q_x) ),    y <- y - beta (F_y + lam q_y),    at once

    with control = u ||grad q||^2 or u q. A step costs T + 2 gradients of f and 1 of F.

    Args:
        u: the rate at which the gap is to fall.
        control: ``"norm"`` for u ||grad q||^2, ``"gap"`` for u q.
        alpha, beta, eta, inner_steps, x_optimizer, y_optimizer: see :class:`~meha.methods.frames.PenaltyMethod`.

    The paper allows non-convex lower levels. On :func:`meha.problems.sine` it ends in the basin nearest to the start.

    >>> import meha
    >>> problem = meha.problems.merely_convex(n=1)
    >>> run = BOME(alpha=0.5, beta=0.5, eta=0.5, inner_steps=10).start(problem, problem.x0, problem.y0)
    >>> for _ in range(500):
    ...     info = run.step()
    >>> print(f"{float(run.x):.3f}")
    1.000
    """

    refuses_y_set: ClassVar[str] = "its penalty assumes that y can follow the direction"

    u: float = 0.5
    control: Literal["norm", "gap"] = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("u", self.u)
        if str(self.control) not in ("norm", "gap"):
            raise ValueError(f"control: must be 'norm' or 'gap', got {self.control!r}.")

    def step(self, oracle: Oracle, state: PenaltyState, at: At) -> Numbers:
        x, y, batch = state.x, state.y, at.batch
        copy_(state.z.leaves, y.leaves)  # z starts at y every time, so that q >= 0
        self.follow(oracle, state, at)
        upper_term, *q_terms = gap_terms(oracle, state, 1.0, 1.0)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [upper_term], batch)
        (lower, best), (q_x, q_y) = oracle.gradients((x, y), q_terms, batch)
        gap, square = lower - best, inner(q_x, q_x) + inner(q_y, q_y)
        # lam is the smallest weight >= 0 with <grad F + lam grad q, grad q> >= control: q then falls at the wanted rate.
        wanted = self.u * (square if self.control == "norm" else gap)
        lam = ((wanted - inner(F_x, q_x) - inner(F_y, q_y)) / (square + TINY)).clamp(min=0)
        d_x, d_y = ([a + lam * b for a, b in zip(F, q, strict=True)] for F, q in ((F_x, q_x), (F_y, q_y)))
        size = self.move_x(oracle, state, at, d_x)
        self.move_y(oracle, state, at, d_y)
        return {"upper": upper, "lower": lower, "gap": gap, "d_x": size, "c": lam}
