"""RHG: the hypergradient by reverse-mode differentiation through lower steps, whole or truncated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, Objective, descend, lower_objective, reverse, unroll
from meha.problem.oracle import Oracle
from meha.problem.responses import Nearest, Response, Trained
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, copy_

__all__ = ["RHG"]


@dataclass(frozen=True, kw_only=True)
class RHG(HypergradientMethod):
    """Reverse hyper-gradient (Franceschi et al. 2017); truncated (Shaban et al. 2019) when ``terms`` is given.

        y_{t+1} = proj_Y( y_t - beta grad_y f(x, y_t) ),                           t = 0, ..., T-1
        h = F_x,  q = F_y  at (x, y_T);   for t = T-1, ..., T - terms:
            h <- h - beta f_xy(x, y_t) [q];   q <- q - beta f_yy(x, y_t) [q]       (q first through the projection)
        x <- proj_X( x - alpha h )

    A step costs T gradients of f, 1 of F and ``terms`` (T when left out) Hessian-vector products.

    Args:
        terms: how many of the last steps are differentiated through; all by default.
        keep_graph: keep the graphs of all steps and take one backward pass through them, for y made of tensors.
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`.

    By default the sweep back recomputes derivatives at stored iterates, so that memory is that of T + 1 copies of y and one
    graph, and f must give the same value twice: no dropout. It takes longer than with ``keep_graph``: 1.5 times
    on the strong convex problem with n = 10^5 and T = 50, and 2.6 times with n = 10, where the time goes into calls.

    It follows every response of :mod:`meha.responses`. With :class:`~meha.responses.Trained`, the number and the size of the
    lower steps are those of the response, every step starts afresh, and where the start depends on x, h has this part as well
    (with ``terms``, as if the other steps left y where it is: first-order MAML).

    What the lower level leaves open stays where it started: on :func:`meha.problems.merely_convex` the second half of y never
    moves and x ends near 1/2 instead of 1. Warm and cold starts then give different answers. On
    :func:`meha.problems.sine` it ends in the basin nearest to the start.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = RHG(alpha=0.4, beta=0.5, inner_steps=30).start(problem, problem.x0, problem.y0)
    >>> for _ in range(50):
    ...     info = run.step()
    >>> run.x, run.counts
    (tensor([0.5000, 0.5000], dtype=torch.float64), Counts(upper=50, lower=1500, hvp=1500))
    """

    follows: ClassVar[tuple[type[Response], ...]] = (Nearest, Trained)
    differentiates_start: ClassVar[bool] = True

    terms: int | None = None
    keep_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.terms is not None:
            check_count("terms", self.terms)
            if self.terms > self.inner_steps:
                raise ValueError(
                    f"terms: must be at most the number of inner steps to go back, {self.inner_steps}, got {self.terms}."
                )

    def hypergradient(self, oracle: Oracle, state: HypergradientState, at: At) -> tuple[dict[str, Any], Leaves]:
        x, y, trace = state.x, state.y, list[Leaves]()
        objective, step, batch = *self.objective(oracle, x, at), at.batch
        if self.keep_graph:
            first = 0 if self.terms is None else self.inner_steps - self.terms
            descend(oracle, x, y, first, step, batch, objective)  # the steps that truncation leaves out need no graph
            iterates = unroll(oracle, x, y, range(first, self.inner_steps), step, batch, objective)
            upper, (h, q) = oracle.pull_back(oracle.upper, x, iterates, batch)
            copy_(y.leaves, iterates[-1].leaves)  # without its graph, which would otherwise grow from step to step
            return {"upper": upper}, _add(h, oracle.response_term.pull_back(x, q))  # the start may depend on x
        descend(oracle, x, y, self.inner_steps, step, batch, objective, trace)
        (upper,), (h, q) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        h, q = reverse(oracle, x, y, trace, step, h, q, batch, objective, self.terms)
        return {"upper": upper}, _add(h, oracle.response_term.pull_back(x, q))

    def objective(self, oracle: Oracle, x: Variable, at: At) -> tuple[Objective, float]:
        """Return the objective of the inner steps, and their size."""
        return lower_objective(oracle, x), at.beta


def _add(a: Leaves, b: Leaves) -> Leaves:
    """Return the sum of two gradients."""
    return [u + v for u, v in zip(a, b, strict=True)]
