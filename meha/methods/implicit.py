"""CG, NS and GALET: the hypergradient from the implicit function theorem, by three solvers of its linear system."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meha.analysis.theory import Constants
from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, descend
from meha.numerics.linear_systems import Operator, conjugate_gradients, neumann_series
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Response
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_count, check_tolerance
from meha.tensors.variables import Leaves, Variable, add_, subtract


@dataclass(frozen=True, kw_only=True)
class ImplicitMethod(HypergradientMethod):
    """Base class of methods with h = F_x - f_xy [v], where f_yy v = F_y at (x, y) after T lower steps."""

    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"

    def hypergradient(self, oracle: Oracle, state: HypergradientState, at: At) -> tuple[dict[str, Any], Leaves]:
        x, y = state.x, state.y
        batch = at.batch
        descend(oracle, x, y, self.inner_steps, at.beta, batch)  # not differentiated: v accounts for how y follows x
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        hessian = oracle.hessian([(1.0, oracle.lower, x, y)], batch)  # one graph for all products
        v = self.solve(lambda vector: hessian(vector, y)[0], F_y, at)
        (cross,) = hessian(v, x)  # the adjoint form: one system, whatever the size of x
        return {"upper": upper}, subtract(F_x, cross)

    @abstractmethod
    def solve(self, apply: Operator, rhs: Leaves, at: At) -> Leaves:
        """Solve f_yy v = rhs approximately."""


@dataclass(frozen=True, kw_only=True)
class CG(ImplicitMethod):
    """Implicit differentiation with conjugate gradients (Pedregosa 2016), for lower levels that are strongly convex in y.

        y <- T steps of size beta on f(x, .);   K steps of conjugate gradients for (f_yy + damping I) v = F_y
        x <- proj_X( x - alpha (F_x - f_xy [v]) )

    A step costs T gradients of f, 1 of F and at most K + 1 Hessian-vector products (fewer when the system is solved earlier).

    Args:
        cg_steps: K.
        damping: added to the Hessian; with networks, whose Hessians are indefinite, it must exceed the most negative curvature.
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`.

    It follows :class:`~meha.responses.Nearest`, whose proximal term makes the Hessian of a flat lower level definite; y must
    come close to the response in T steps, so warm starts and many steps help.

    A Hessian that is not positive definite ends the run with the status "broke down". On
    :func:`meha.problems.merely_convex` that is so in the second step; with damping, x ends near 1/2 instead of 1.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = CG(alpha=0.4, beta=0.5, cg_steps=2).start(problem, problem.x0, problem.y0)
    >>> for _ in range(50):
    ...     info = run.step()
    >>> run.x
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    follows: ClassVar[tuple[type[Response], ...]] = (Nearest,)

    cg_steps: int = 20
    damping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cg_steps", self.cg_steps)
        check_tolerance("damping", self.damping)

    def solve(self, apply: Operator, rhs: Leaves, at: At) -> Leaves:
        def damped(vector: Leaves) -> Leaves:
            return [a + self.damping * v for a, v in zip(apply(vector), vector, strict=True)]

        return conjugate_gradients(damped if self.damping else apply, rhs, steps=self.cg_steps)[0]

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Add damping (or more of it), take smaller steps, or use a method without Hessians, such as MEHA or BOME."


@dataclass(frozen=True, kw_only=True)
class NS(ImplicitMethod):
    """Implicit differentiation with a Neumann series (Lorraine et al. 2020), for lower levels strongly convex in y.

        y <- T steps of size beta on f(x, .);   v_0 = F_y;   K times v <- F_y + v - eta f_yy [v]
        x <- proj_X( x - alpha (F_x - eta f_xy [v]) )

    The series converges for 0 < eta < 2 / ||f_yy||. A step costs T gradients of f, 1 of F and K + 1 Hessian-vector products.
    With eta = beta, at a fixed point y, it is RHG truncated to K + 1 terms.

    Args:
        terms: K.
        eta: the step of the series, beta by default.
        alpha, beta, inner_steps, warm_start, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`.

    On :func:`meha.problems.merely_convex` the series grows without bound in the flat directions, which happen not to matter
    for x there; x ends near 1/2 instead of 1.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = NS(alpha=0.4, beta=0.5, terms=30).start(problem, problem.x0, problem.y0)
    >>> for _ in range(50):
    ...     info = run.step()
    >>> run.x
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    terms: int = 20
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("terms", self.terms)

    def solve(self, apply: Operator, rhs: Leaves, at: At) -> Leaves:
        step = at.beta if self.eta is None else at.eta  # with beta, the series is RHG at a fixed point, truncated
        return neumann_series(apply, rhs, step=step, terms=self.terms)


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
    shorter: ClassVar[Mapping[str, float]] = {**ImplicitMethod.shorter, "eta": ImplicitMethod.shorter["beta"] ** 2}  # of f_yy^2

    terms: int = 10
    eta: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("terms", self.terms)

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        return {**steps, "eta": steps["eta"] ** 2}  # the least-squares problem has the Hessian f_yy^2

    def solve(self, apply: Operator, rhs: Leaves, at: At) -> Leaves:
        v = [torch.zeros_like(leaf) for leaf in rhs]  # from 0, v stays in the range of f_yy: the solution of minimal norm
        for _ in range(self.terms):
            add_(v, apply(subtract(rhs, apply(v))), at.eta)
        return v
