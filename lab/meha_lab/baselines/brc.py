"""BRC: implicit differentiation with the Hessian replaced by an outer product of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, descend
from meha.problem.oracle import Oracle
from meha.tensors.variables import Leaves, inner

__all__ = ["BRC"]


TINY = 1e-8  # of the source; the quotient tends to 0 / 0 as y converges


@dataclass(frozen=True, kw_only=True)
class BRC(HypergradientMethod):
    """Best-response constraint (Liu et al. 2022, 2023): first-order only, with f_yy ~ f_y f_y' and f_xy ~ f_x f_y'.

        y <- T steps of size beta on f(x, .)
        h = F_x - <F_y, f_y> / (||f_y||^2 + 1e-8) f_x  at (x, y);   x <- proj_X( x - alpha h )

    A step costs T + 1 gradients of f (f_x and f_y are one) and 1 of F.

    Args:
        inner_steps: T; keep it small. The quotient tends to 0 / 0 as y converges, so that long inner loops lose the direction.
        alpha, beta, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`.

    A heuristic: an outer product of gradients is no approximation of a Hessian at a solution, where it vanishes, and f_x need
    not be small there. It converges on none of the problems with known answers in :mod:`meha.problems`, not even the strongly
    convex one; its published results are on networks.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = BRC(alpha=0.1, beta=0.5, inner_steps=1).start(problem, problem.x0, problem.y0)
    >>> info = run.step()
    >>> run.counts
    Counts(upper=1, lower=2, hvp=0)
    """

    refuses_nonsmooth: ClassVar[str] = "its formula is made of gradients of f"
    refuses_y_set: ClassVar[str] = "its formula holds in the interior of Y only"
    refuses_shards: ClassVar[str] = ""

    inner_steps: int = 1

    def hypergradient(self, oracle: Oracle, state: HypergradientState, at: At) -> tuple[dict[str, Any], Leaves]:
        x, y = state.x, state.y
        batch = at.batch
        descend(oracle, x, y, self.inner_steps, at.beta, batch)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        (lower,), (f_x, f_y) = oracle.gradients((x, y), [(1.0, oracle.lower, x, y)], batch)
        # The least-squares solution v of f_y f_y' v = F_y has f_x f_y' v = share f_x.
        share = inner(F_y, f_y) / (inner(f_y, f_y) + TINY)
        return {"upper": upper, "lower": lower}, [a - share * b for a, b in zip(F_x, f_x, strict=True)]
