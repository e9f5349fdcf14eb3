"""RHG: the hypergradient by reverse-mode differentiation through lower steps, whole or truncated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, Objective, Trajectory
from meha.problem.oracle import Oracle
from meha.problem.responses import Nearest, Response, Trained
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable


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

    By default the sweep back uses the graph of the last step, and recomputes derivatives at the stored iterates before it. So
    memory is that of T + 1 copies of y and the graphs of one step and of F, f is evaluated 2 T - 1 times, and must give the
    same value twice: no dropout. On the strong convex problem with T = 50 it takes 1.5 times as long as with ``keep_graph`` for
    n = 10, where the time goes into calls, and three quarters for n = 10^5.

    It follows every response of :mod:`meha.responses`. With :class:`~meha.responses.Trained`, the number and the size of the
    lower steps are those of the response, or found if it leaves them out, every step starts afresh, and where the start depends
    on x, h has this part as well (with ``terms``, as if the other steps left y where it is: first-order MAML).

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
        x, T = state.x, self.inner_steps
        objective, step = self.objective(oracle, x, at)
        first = 0 if self.terms is None else T - self.terms  # the steps that truncation leaves out need no graph
        steps = Trajectory(oracle, x, state.y, T, step, at.batch, objective, keep_graph=self.keep_graph, first=first)
        moves = oracle.response_term.moves  # the start may depend on x
        upper, h, q = steps.pull_back(terms=self.terms, to_start=moves)
        if moves:
            h = [a + b for a, b in zip(h, oracle.response_term.pull_back(x, q), strict=True)]
        return {"upper": upper}, h

    def objective(self, oracle: Oracle, x: Variable, at: At) -> tuple[Objective | None, float]:
        """Return the objective of the inner steps, None for f, and their size."""
        return None, at.beta
