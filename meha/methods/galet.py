"""GALET: an implicit gradient for lower levels whose Hessian may be singular."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meha.checks import check_count
from meha.methods.hypergradient import HypergradientMethod, HypergradientState
from meha.methods.inner import descend
from meha.methods.moves import check_step
from meha.oracle import Oracle
from meha.schedules import Schedule, evaluate
from meha.theory import Constants
from meha.variables import Leaves, add_

__all__ = ["GALET"]


@dataclass(frozen=True, kw_only=True)
class GALET(HypergradientMethod):
    """Generalised alternating method (Xiao et al. 2023), for lower levels that satisfy the Polyak-Lojasiewicz inequality.

        y <- T steps of size beta on f(x, .)
        w = 0;   ``terms`` times  w <- w - eta f_yy [F_y + f_yy [w]]        (least squares: ||F_y + f_yy w||^2 / 2)
        x <- proj_X( x - alpha (F_x + f_xy [w]) )

    From w = 0 the least-squares solution of minimal norm is approached, also where f_yy is singular. A step costs T gradients
    of f, 1 of F and 2 terms + 1 Hessian-vector products. That w starts at 0 in every step is our reading.

    Args:
        terms: steps on w.
        eta: their size, below 2 / ||f_yy||^2.
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.hypergradient.HypergradientMethod`.

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

    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"

    terms: int = 10
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("terms", self.terms)
        check_step("eta", self.eta)

    def choose(self, constants: Constants) -> dict[str, float]:
        found = super().choose(constants)
        return {**found, "eta": found["eta"] ** 2}

    def hypergradient(self, oracle: Oracle, state: HypergradientState, batch: Any) -> tuple[dict[str, Any], Leaves]:
        x, y = state.x, state.y
        assert self.eta is not None
        descend(oracle, x, y, self.inner_steps, self.lower_step(state.k), batch)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        hessian, eta = oracle.hessian([(1.0, oracle.lower, x, y)], batch), evaluate("eta", self.eta, state.k)
        w = [torch.zeros_like(leaf) for leaf in F_y]
        for _ in range(self.terms):
            (image,) = hessian(w, y)
            (slope,) = hessian([a + b for a, b in zip(F_y, image, strict=True)], y)
            add_(w, slope, -eta)
        (cross,) = hessian(w, x)
        return {"upper": upper}, [a + b for a, b in zip(F_x, cross, strict=True)]
