"""GALET: an implicit gradient for lower levels whose Hessian may be singular."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meha.analysis.theory import Constants
from meha.method.method import At
from meha.methods.frames import check_step
from meha.methods.implicit import ImplicitMethod
from meha.numerics.linear_systems import Operator
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, add_, subtract

__all__ = ["GALET"]


@dataclass(frozen=True, kw_only=True)
class GALET(ImplicitMethod):
    """Generalised alternating method (Xiao et al. 2023), for lower levels that satisfy the Polyak-Lojasiewicz inequality.

        y <- T steps of size beta on f(x, .)
        v = 0;   ``terms`` times  v <- v + eta f_yy [F_y - f_yy [v]]        (descent on ||f_yy v - F_y||^2 / 2)
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    From v = 0 the least-squares solution of minimal norm is approached, also where f_yy is singular. A step costs T gradients
    of f, 1 of F and 2 terms + 1 Hessian-vector products. That v (the paper's -w)
    starts at 0 in every step is our reading.

    Args:
        terms: steps on v.
        eta: their size, below 2 / ||f_yy||^2.
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`.

    Its theory leaves the choice among several lower solutions to the start: on :func:`meha.problems.merely_convex` the
    second half of y never moves, and x ends near 1/2 instead of 1.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = GALET(alpha=0.4, beta=0.5, eta=0.5, terms=30).start(problem, problem.x0, problem.y0)
    >>> for _ in range(50):
    ...     info = run.step()
    >>> run.x
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eta")

    terms: int = 10
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("terms", self.terms)
        check_step("eta", self.eta)

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        return {**steps, "eta": steps["eta"] ** 2}  # the least-squares problem has the Hessian f_yy^2

    def solve(self, apply: Operator, rhs: Leaves, at: At) -> Leaves:
        v = [torch.zeros_like(leaf) for leaf in rhs]  # from 0, v stays in the range of f_yy: the solution of minimal norm
        for _ in range(self.terms):
            add_(v, apply(subtract(rhs, apply(v))), at.eta)
        return v
