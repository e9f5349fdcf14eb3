"""IGJO: implicit gradients of the lower solution on its support, with a line search on x."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.lower.proximal_gradient import ProximalSolution, solve_lower
from meha.method.method import At, Method, Numbers, State
from meha.method.status import Status, Verdict
from meha.numerics.linear_systems import CurvatureError, Operator, conjugate_gradients
from meha.problem.nonsmooth import GroupL2
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_count, check_positive, check_tolerance
from meha.tensors.variables import Leaves, Variable, add_, copy_, inner, norm, subtract

__all__ = ["IGJO", "IGJOState"]


SUFFICIENT = 1e-3
"""The share of the decrease predicted by the gradient that a step must reach (Armijo 1966)."""

SHRINK = 0.1
"""The factor on a step size that was rejected; its cube where the lower solve broke down, as in the source."""


@dataclass
class IGJOState(State):
    """x, y, the step size of x, by how much the last step lowered F, and the size of the support before it."""

    size: float
    decrease: float = math.inf
    support: int = -1


@dataclass(frozen=True, kw_only=True)
class IGJO(Method):
    """Implicit gradients for joint optimization (Feng & Simon 2018), for L1 and group terms, or without g.

    At a solution y of the lower level, phi = f + g is twice differentiable in the coordinates of the support S, which are those
    with ``|y_i| > threshold``, and all on which g does not act; the others stay zero when x moves a little. A step is

        phi_yy(x, y)_SS v = F_y(x, y)_S;    h = F_x - phi_xy [v];    x <- proj_X( x - s h ),  y <- the lower solution there,

    where s is multiplied by 0.1 until F falls by 0.001 ||x_new - x||^2 / s, which is 0.001 s ||h||^2 inside of X; if that would
    take F below zero, it need only not rise. s is never enlarged again.

    One linear system gives h for any number of weights, where the source solves one for each. It is solved by conjugate
    gradients or, if the matrix turns out not to be positive definite, in the sense of least squares. A step costs a few lower
    solves, one gradient of F, and a Hessian-vector product for each iteration of conjugate gradients.

    Args:
        alpha: s at the start.
        threshold: see above. The lower solver finds exact zeros, so that 0 will do; it must be less than the entries of y.
        decrease: the run is finished when a step lowers F by less (an absolute number, as in the source),
        min_alpha: or when s falls below this,
        iterations: or after this many steps.
        inner_steps, lower_tol: of the lower solves, as in :func:`meha.lower.proximal_gradient.solve_lower`.
        linear_steps, linear_tol: upper bound on the iterations on the linear system, and the relative residual at which they
            end.

    Where y = 0 there is no support, and the method does not move: start from small weights. Values of F on different batches do
    not compare, so objectives should see all data.

    The numbers of a step: ``upper`` F and ``residual`` of the lower solution after it, ``d_x`` the norm of h, ``support`` the
    size of S and ``linear_residual`` that of the linear system before it, ``s`` the step size that was taken.

    >>> import meha
    >>> problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    >>> solution = meha.solve(problem, problem.x0, problem.y0, IGJO())
    >>> solution.steps, problem.distance(solution.x, solution.y).y < 1e-10
    (2, True)
    """

    refuses_group: ClassVar[str] = "it solves subproblems on all data at once"
    refuses_y_set: ClassVar[str] = "it takes y for free on its support"

    alpha: float = 1.0
    threshold: float = 1e-4
    decrease: float = 5e-4
    min_alpha: float = 1e-6
    iterations: int = 50
    inner_steps: int = 20_000
    lower_tol: float = 1e-10
    linear_steps: int = 1000
    linear_tol: float = 1e-10

    def __post_init__(self) -> None:
        for name in ("alpha", "min_alpha"):
            check_positive(name, getattr(self, name))
        for name in ("threshold", "decrease", "lower_tol", "linear_tol"):
            check_tolerance(name, getattr(self, name))
        for name in ("iterations", "inner_steps", "linear_steps"):
            check_count(name, getattr(self, name))
        if self.min_alpha > self.alpha:
            raise ValueError(
                f"min_alpha: must not exceed alpha={self.alpha:g}, got {self.min_alpha:g}; no step would be taken."
            )

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> IGJOState:
        for term, _ in oracle.problem.g.terms(y):
            if not (term.separable or isinstance(term, GroupL2)):
                raise ValueError(
                    f"nonsmooth: IGJO takes terms that are smooth on the support of y, and {type(term).__name__} is not; use"
                    " L1, GroupL2, SparseGroup or another separable term, or the method MEHA."
                )
        return IGJOState(x, y, self.alpha)

    def step(self, oracle: Oracle, state: IGJOState, at: At) -> Numbers:
        x, y, batch = state.x, state.y, at.batch
        solution = self._solve(oracle, x, y, batch)
        if not solution.converged:  # the implicit function theorem holds at a solution only
            raise ArithmeticError(
                f"the lower level was not solved (residual {solution.residual:.1e} after {solution.steps} steps); allow more"
                " inner_steps, or a larger lower_tol"
            )
        copy_(y.leaves, solution.theta.leaves)
        upper, h, numbers = self._implicit_gradient(oracle, x, y, batch)
        lowest, old = upper, [leaf.clone() for leaf in x.leaves]
        trial = x.copy()  # x stays until a step is accepted
        while state.size >= self.min_alpha:  # the size is never reset, as in the source
            copy_(trial.leaves, old)
            add_(trial.leaves, h, -state.size)
            oracle.project(trial.value, trial.leaves, state.size)
            trial_solution = self._solve(oracle, trial, y, batch)
            there = float(oracle.upper(trial, trial_solution.theta, batch))
            # Armijo's rule for projected steps; a loss cannot meet a bound below 0, and the source then asks for no rise only.
            bound = upper - SUFFICIENT * float(norm(subtract(trial.leaves, old))) ** 2 / state.size
            if trial_solution.converged and there <= (bound if bound >= 0 else upper):
                copy_(x.leaves, trial.leaves)
                copy_(y.leaves, trial_solution.theta.leaves)
                lowest, solution = there, trial_solution
                break
            state.size *= SHRINK if math.isfinite(trial_solution.residual) else SHRINK**3
        state.decrease, state.support = upper - lowest, int(numbers["support"])
        return {"upper": lowest, "residual": solution.residual, "s": state.size, **numbers}

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Start from other weights, or use MEHA."

    def terminate(self, state: IGJOState) -> Verdict | None:
        if state.support == 0:
            reason = "The support is empty (y = 0), so x has no influence on y nearby; start from smaller weights."
        elif state.size < self.min_alpha:
            reason = f"No step of at least min_alpha={self.min_alpha:g} lowers F."
        elif state.decrease < self.decrease:
            reason = f"The last step lowered F by {state.decrease:.2g} < decrease={self.decrease:g}, an absolute number."
        elif state.k >= self.iterations:
            reason = f"{state.k} iterations are done."
        else:
            return None
        return Verdict(Status.FINISHED, reason)

    def _solve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> ProximalSolution:
        return solve_lower(oracle, x, y, tol=self.lower_tol, max_steps=self.inner_steps, batch=batch)

    def _implicit_gradient(
        self, oracle: Oracle, x: Variable, y: Variable, batch: Any
    ) -> tuple[float, Leaves, dict[str, float | Tensor]]:
        """Compute F, its gradient in x along the lower solution y, and the numbers of the step."""
        (upper,), (h, q) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        support = self._support(oracle, y)
        hessian = oracle.hessian([(1.0, oracle.phi, x, y)], batch)

        def apply(vector: Leaves) -> Leaves:
            return _restrict(hessian(vector, y)[0], support)

        v, residual = self._invert(apply, _restrict(q, support))  # the adjoint: one system for all weights
        h = subtract(h, hessian(v, x)[0])  # g depends on x, so that this is phi_xy, not f_xy alone
        if not bool(torch.isfinite(norm(h))):
            raise ArithmeticError("the implicit gradient is not finite, as the second derivatives of f + g are not")
        size = sum(int(part.sum()) for part in support)
        return float(upper), h, {"d_x": norm(h), "support": float(size), "linear_residual": residual}

    def _support(self, oracle: Oracle, y: Variable) -> list[Tensor]:
        """Return the coordinates of y that move with x: those that g does not hold at zero."""
        penalised = {i for _, chosen in oracle.problem.g.terms(y) for i in chosen}
        return [
            leaf.detach().abs() > self.threshold if i in penalised else torch.ones_like(leaf, dtype=torch.bool)
            for i, leaf in enumerate(y.leaves)
        ]

    def _invert(self, apply: Operator, rhs: Leaves) -> tuple[Leaves, float]:
        """Solve H v = rhs, or its least-squares problem, and return v with its relative residual."""
        try:
            v, residual = conjugate_gradients(apply, rhs, steps=self.linear_steps, tol=self.linear_tol)
            if residual <= math.sqrt(self.linear_tol):  # conjugate gradients that stall hint at a singular system
                return v, residual
        except CurvatureError:
            pass  # H may be singular, for which the source uses LSMR
        return least_squares(apply, rhs, steps=self.linear_steps, tol=self.linear_tol)


def _restrict(leaves: Leaves, support: list[Tensor]) -> Leaves:
    """Set leaves to zero outside of the support, even where they are NaN: norms have no second derivative at zero."""
    return [torch.where(part, leaf, 0.0) for leaf, part in zip(leaves, support, strict=True)]


def least_squares(apply: Operator, rhs: Leaves, *, steps: int, tol: float) -> tuple[Leaves, float]:
    """Minimise ||H v - rhs|| for a symmetric H, which may be singular; return the shortest v and its relative residual.

    The method is conjugate gradients on the normal equations H^2 v = H rhs, with two products per iteration.

    >>> least_squares(lambda v: [v[0] * torch.tensor([2.0, 0.0])], [torch.tensor([3.0, 4.0])], steps=5, tol=0.0)
    ([tensor([1.5000, 0.0000])], 0.8)
    """
    eps = max(torch.finfo(leaf.dtype).eps for leaf in rhs)
    v, r = [torch.zeros_like(leaf) for leaf in rhs], [leaf.clone() for leaf in rhs]
    s = apply(r)  # of r itself: H^2 is never applied as such, which keeps its rounding errors out
    p = [leaf.clone() for leaf in s]
    ss = float(inner(s, s))
    least, size = max(tol, 4 * eps) ** 2 * ss, float(norm(rhs))
    for _ in range(steps):
        if ss <= least:
            break
        image = apply(p)
        length = ss / float(inner(image, image))
        add_(v, p, length)
        add_(r, image, -length)
        s = apply(r)
        old, ss = ss, float(inner(s, s))
        p = [a + (ss / old) * b for a, b in zip(s, p, strict=True)]
    return v, float(norm(r)) / size if size else 0.0
