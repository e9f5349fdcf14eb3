"""VF-iDCA: the value function of a lower level with radii instead of weights, and a sequence of convex programs."""

from __future__ import annotations

import math
import warnings
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha._checks import check_count, check_positive, check_tolerance
from meha._leaves import norm
from meha._oracle import Oracle
from meha._running import At, Numbers
from meha._variables import Variable
from meha._verdicts import Status, Verdict
from meha.methods._base import Method, State
from meha.methods.vfidca.quadratic import Quadratic, as_vector, read_quadratic
from meha.methods.vfidca.radii import Balls, minimise, read_weights
from meha.problem import Problem

__all__ = ["VFiDCA", "VFiDCAState"]

VIOLATION = 100.0
"""How much more a violated radius counts than a lower level that is not solved."""

ACCURACY = {"tol_gap_abs": 1e-7, "tol_gap_rel": 1e-7, "tol_feas": 1e-7}
SETTINGS: list[dict[str, Any]] = [{}, {"equilibrate_enable": False}, {"static_regularization_constant": 1e-7}]
"""What Clarabel is asked for (its own 1e-8 is often out of reach here), and settings that are tried until it gets there."""


@dataclass(frozen=True)
class Model:
    """A problem in the form that the method solves, in double precision on the host.

    Attributes:
        upper, lower: F and f as functions of y.
        balls: what the weights x penalise.
        order: the entry of x to which each radius belongs.
        program: the convex program of a step.
    """

    upper: Quadratic
    lower: Quadratic
    balls: Balls
    order: Tensor
    program: _Program


@dataclass
class VFiDCAState(State):
    """x, y, the radii r, the solution of v(r) and its multipliers, the penalty, and what the last step was like."""

    radii: Tensor
    solution: Tensor
    multipliers: Tensor
    beta: float
    error: float = math.inf
    violation: float = math.inf
    given: InitVar[Model | None] = None  # built for every run, and not a part of its state

    def __post_init__(self, given: Model | None) -> None:
        assert given is not None
        self.model = given


@dataclass(frozen=True, kw_only=True)
class VFiDCA(Method):
    """Value function based difference-of-convex algorithm (VF-iDCA, Gao et al. 2022).

    It takes convex quadratic F and f of y alone, and L1, GroupL2 or SparseGroup with the entries of x for weights.

    Weights become radii: gamma >= 0 are the multipliers of

        v(r) = min f(y)  over  ||y^(j)|| <= r_j,  ||y||_1 <= r_last        (|y_i| <= r_i for an L1 with a weight for each y_i)

    exactly if its solution also solves the lower level with the weights x = gamma; and v is convex with -gamma in dv(r).
    A step solves the convex program

        min_{w, r >= 0}  F(w) + rho/2 (||w - w_k||^2 + ||r - r_k||^2) + beta max(0, V, 100 max_j(||w^(j)|| - r_j)),
        V = f(w) - v(r_k) + <gamma_k, r - r_k> - eps

    by cvxpy (``pip install "meha[cvxpy]"``) and Clarabel, and then v at the new r by accelerated projected gradients; gamma
    follows from its optimality conditions. The run's y is w, and its x is gamma, projected on X.

    Let e be ||(w, r) - (w_k, r_k)|| / ||(w_k, r_k)||, and p the maximum above at (w, r). beta grows by delta after a step with
    e beta <= c min(1, beta p). The run is finished when e and p are less than ``tol``.

    Args:
        radii: r at the start, the same for all. It should bound y: where r is too large to do so, all multipliers are zero,
            and r has no reason to shrink. The run then ends at the y of least F among those of least f, and says so.
        tol: see above. The source's 0.1 is met early.
        eps, beta, rho, c, delta: see above; beta at the start.
        iterations: upper bound on the number of steps.
        inner_steps, inner_tol: of v(r): upper bound on the steps, and the residual, relative to the gradient of f at 0, at
            which they end.

    y approaches a lower solution only as beta grows, with an error of about 1 / beta: take a small ``tol`` and many iterations
    where this matters. Clarabel has trouble with a beta of more than some hundred.

    F and f are read once, by Hessian-vector products, two to three times as many as the ranks of their Hessians.
    ``counts.lower`` grows by the gradients that v(r) takes; the work of the convex solver is not counted.

    The numbers of a step, after it: ``upper`` F, ``lower`` f, ``gap`` f - v(r), ``error`` e, ``violation`` p, ``beta``.

    >>> import meha
    >>> problem = meha.problems(60, groups=6, design="orthogonal")
    >>> solution = meha.solve(problem, problem.x0, problem.y0, VFiDCA(radii=1.0, tol=0.02))
    >>> print(f"{solution.status}, {problem.distance(solution.x, solution.y).y:.2f}")
    finished, 0.03
    """

    refuses_group: ClassVar[str] = "it solves subproblems on all data at once"
    refuses_y_set: ClassVar[str] = "its lower level has no constraints but the radii"

    radii: float = 10.0
    tol: float = 0.1
    eps: float = 0.0
    beta: float = 1.0
    rho: float = 0.1
    c: float = 0.01
    delta: float = 5.0
    iterations: int = 50
    inner_steps: int = 20_000
    inner_tol: float = 1e-9

    def __post_init__(self) -> None:
        for name in ("radii", "beta", "rho", "c", "delta"):
            check_positive(name, getattr(self, name))
        for name in ("tol", "eps", "inner_tol"):
            check_tolerance(name, getattr(self, name))
        for name in ("iterations", "inner_steps"):
            check_count(name, getattr(self, name))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.needs_batch:
            raise ValueError("upper and lower: VFiDCA reads them once, without a batch; give functions of all data.")

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> VFiDCAState:
        try:
            import cvxpy  # noqa: F401
        except ImportError as error:
            raise ImportError('VFiDCA needs cvxpy; install it with: pip install "meha[cvxpy]"') from error
        if len(y.leaves) > 1:
            raise ValueError(f"y: VFiDCA takes a single tensor, got the leaves {y.names}; join them.")
        balls, order = read_weights(oracle.problem.g, x, y)
        upper, lower = (read_quadratic(oracle, function, x, y) for function in (oracle.upper, oracle.lower))
        model = Model(upper, lower, balls, order, _Program(upper, lower, balls, self.rho, self.eps))
        radii = torch.full((len(order),), float(self.radii), dtype=torch.float64)
        solution, multipliers = self._solve_lower(oracle, model, radii, as_vector(y))
        return VFiDCAState(x, y, radii, solution, multipliers, self.beta, given=model, settled=False)

    def step(self, oracle: Oracle, state: VFiDCAState, at: At) -> Numbers:
        model, w, r, u, gamma = state.model, as_vector(state.y), state.radii, state.solution, state.multipliers
        w_new, r_new = model.program.solve(w, r, u, gamma, state.beta)
        state.error = float(norm([w_new - w, r_new - r]) / norm([w, r]))
        unsolved = model.lower.difference(w_new, u) + float(gamma @ (r_new - r)) - self.eps
        outside = float((model.balls.sizes(w_new) - r_new).max())
        state.violation = max(0.0, unsolved, VIOLATION * outside)
        if state.error * state.beta <= self.c * min(1.0, state.beta * state.violation):
            state.beta += self.delta
        state.radii = r_new
        state.solution, state.multipliers = self._solve_lower(oracle, model, r_new, w_new)

        state.y.leaves[0].copy_(w_new.reshape(state.y.leaves[0].shape))
        weights = torch.zeros_like(state.multipliers).scatter(0, model.order, state.multipliers)
        for leaf, piece in zip(state.x.leaves, weights.split([leaf.numel() for leaf in state.x.leaves]), strict=True):
            leaf.copy_(piece.reshape(leaf.shape))
        oracle.project(state.x.value, state.x.leaves, 1.0)
        return {
            "upper": model.upper(w_new),
            "lower": model.lower(w_new),
            "gap": model.lower.difference(w_new, state.solution),
            "error": state.error,
            "violation": state.violation,
            "beta": state.beta,
        }

    def terminate(self, state: VFiDCAState) -> Verdict | None:
        reason = f"{state.k} iterations are done." if state.k >= self.iterations else ""
        if state.error < self.tol and state.violation < self.tol:
            reason = f"Relative change {state.error:.2g} and violation {state.violation:.2g} are less than tol={self.tol:g}."
        if reason and not bool(state.multipliers.any()):
            reason += " No radius bounds y, so all weights are zero; if that is not meant, start with smaller radii."
        return Verdict(Status.FINISHED, reason) if reason else None

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Start with smaller radii, or take a larger rho."

    def _solve_lower(self, oracle: Oracle, model: Model, radii: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """The solution of v(r), and its multipliers."""
        y, multipliers, steps, residual = minimise(
            model.lower, model.balls, radii, start, tol=self.inner_tol, max_steps=self.inner_steps
        )
        oracle.counts.lower += steps
        if not residual <= 1:
            raise ArithmeticError(
                f"v(r) was not found in inner_steps={self.inner_steps} (the residual is {residual:.1e} times what"
                f" inner_tol={self.inner_tol:g} allows); allow more steps, or a larger inner_tol"
            )
        return y, multipliers


class _Program:
    """The convex program of a step, compiled once; what changes from step to step are its parameters.

    Its variables are d = w - u, e = r - r_k and beta p, where u solves v(r_k): all become small at the end of a run, when
    V <= 0 leaves hardly any room for an interior point method.
    """

    def __init__(self, upper: Quadratic, lower: Quadratic, balls: Balls, rho: float, eps: float) -> None:
        import cvxpy as cp

        size, count = len(balls.labels), balls.count + balls.l1
        self.upper, self.lower = upper, lower
        self.d, self.e, penalty = cp.Variable(size), cp.Variable(count), cp.Variable(nonneg=True)
        self.u, self.ahead, self.d_upper, self.d_lower = (cp.Parameter(size) for _ in range(4))
        self.radii, self.multipliers, self.share = (
            cp.Parameter(count),
            cp.Parameter(count, nonneg=True),
            cp.Parameter(nonneg=True),
        )

        w, sizes = self.d + self.u, []
        if balls.count:
            sizes.append(cp.norm(cp.reshape(_spread(balls) @ w, (balls.count, -1), order="C"), 2, axis=1))
        if balls.l1:
            sizes.append(cp.norm1(w))
        unsolved = cp.sum_squares(lower.factor.numpy() @ self.d) / 2 + self.d_lower @ self.d + self.multipliers @ self.e - eps
        outside = cp.hstack(sizes) - self.radii - self.e
        F = cp.sum_squares(upper.factor.numpy() @ self.d) / 2 + self.d_upper @ self.d
        distance = cp.sum_squares(self.d + self.ahead) + cp.sum_squares(self.e)
        self.problem = cp.Problem(
            cp.Minimize(F + rho / 2 * distance + penalty),
            [unsolved <= self.share * penalty, outside <= self.share * penalty / VIOLATION, self.radii + self.e >= 0],
        )

    def solve(self, w: Tensor, r: Tensor, u: Tensor, multipliers: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """The next w and r."""
        import cvxpy as cp

        self.u.value, self.ahead.value = u.numpy(), (u - w).numpy()
        self.d_upper.value, self.d_lower.value = self.upper.gradient(u).numpy(), self.lower.gradient(u).numpy()
        self.radii.value, self.multipliers.value, self.share.value = r.numpy(), multipliers.numpy(), 1 / beta
        status = ""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)  # the status says so, too
            for options in SETTINGS:
                try:
                    self.problem.solve(solver=cp.CLARABEL, warm_start=False, **ACCURACY, **options)
                    status = self.problem.status
                except cp.SolverError:
                    status = "failed"
                if status == cp.OPTIMAL:
                    break
        if status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            raise ArithmeticError(
                f"Clarabel did not solve the convex program ({status}); a smaller beta or a larger rho may help"
            )
        return u + torch.from_numpy(self.d.value), (r + torch.from_numpy(self.e.value)).clamp(min=0)


def _spread(balls: Balls) -> Any:
    """The sparse matrix that writes the groups of y one after another, each filled up with zeros to the size of the largest."""
    from scipy.sparse import csr_array

    members = [(balls.labels == j).nonzero().reshape(-1).tolist() for j in range(balls.count)]
    width = max(map(len, members))
    entries = [(j * width + place, i) for j, group in enumerate(members) for place, i in enumerate(group)]
    rows, columns = zip(*entries, strict=True)
    return csr_array(([1.0] * len(entries), (rows, columns)), shape=(balls.count * width, len(balls.labels)))
