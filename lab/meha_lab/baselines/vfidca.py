"""VF-iDCA: radii on norms of y take the place of weights, and every step solves a convex program."""

from __future__ import annotations

import math
import warnings
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.lower.proximal_gradient import nesterov
from meha.method.method import At, Method, Numbers, State
from meha.method.status import Status, Verdict
from meha.numerics.tolerances import ROUNDING
from meha.problem.nonsmooth import L1, GroupL2, NonSmooth, SparseGroup
from meha.problem.nonsmooth.coupled import per_group, read_groups
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_count, check_positive, check_tolerance
from meha.tensors.variables import Variable, norm
from meha_lab.baselines.semismooth import QuadraticForm, as_vector, read_quadratic

__all__ = ["Balls", "VFiDCA", "VFiDCAState", "minimise", "read_weights"]


TINY = 1e-300
"""Guards a division by zero where q is constant and y is 0."""


@dataclass(frozen=True)
class Balls:
    """The sets {y : ||y^(j)|| <= r_j for all groups j, and ||y||_1 <= r_last if ``l1``}, one for each vector r of radii.

    Args:
        labels: the group of each coordinate, ``count`` for none.
        count: the number of groups.
        l1: whether there is a last radius, for the l1 norm.

    >>> balls = Balls(torch.tensor([0, 0, 1]), 2, l1=False)
    >>> balls.project(torch.tensor([3.0, 4.0, 1.0]), torch.tensor([1.0, 2.0]))
    (tensor([0.6000, 0.8000, 1.0000]), tensor([4., 0.]))
    """

    labels: Tensor
    count: int
    l1: bool

    def sizes(self, y: Tensor) -> Tensor:
        """Return what the radii bound: the norm of each group, and the l1 norm."""
        return torch.cat([self._norms(y), y.abs().sum().reshape(1)]) if self.l1 else self._norms(y)

    def project(self, z: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest point y to z, and multipliers m >= 0 with z - y in sum_j m_j d||y^(j)|| + m_last d||y||_1.

        Groups are scaled down to their radius. For the l1 norm they are soft-thresholded before, at the level m_last for which
        the result has the right norm; a bracketed secant method finds it.
        """
        if not self.l1:
            return self._clip(z, radii)

        def at(level: float) -> tuple[Tensor, Tensor, float]:
            y, multipliers = self._clip(z.sign() * (z.abs() - level).clamp(min=0), radii[:-1])
            return y, torch.cat([multipliers, y.new_full((1,), level)]), float(y.abs().sum() - radii[-1])

        low, high = 0.0, float(z.abs().max())  # at the second, y = 0
        y, multipliers, above = at(low)
        if above <= 0:
            return y, multipliers
        y, multipliers, below = at(high)
        last, eps = 0, torch.finfo(z.dtype).eps
        for _ in range(200):  # a safeguard: the rule converges superlinearly
            if high - low <= 4 * eps * high or below == 0:
                break
            level = (low * below - high * above) / (below - above)
            new, m, excess = at(level)
            if excess > 0:  # an end that stays for a second time counts half (Illinois rule, Dowell and Jarratt 1971)
                low, above, below, last = level, excess, below / 2 if last > 0 else below, 1
            else:
                high, below, above, last = level, excess, above / 2 if last < 0 else above, -1
                y, multipliers = new, m  # of this end only, so that the result is feasible
        return y, multipliers

    def _norms(self, y: Tensor) -> Tensor:
        return y.new_zeros(self.count + 1).index_add(0, self.labels, y.square())[: self.count].sqrt()

    def _clip(self, z: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
        norms = self._norms(z)
        over = norms > radii
        scale = torch.where(over, radii / torch.where(over, norms, 1.0), 1.0)  # never 0 / 0
        return z * torch.cat([scale, scale.new_ones(1)])[self.labels], (norms - radii).clamp(min=0)


def minimise(
    q: QuadraticForm, balls: Balls, radii: Tensor, start: Tensor, *, tol: float = 1e-9, max_steps: int = 20_000
) -> tuple[Tensor, Tensor, int, float]:
    """Return argmin q over the balls, its multipliers, the number of gradients, and the residual in units that ``tol`` allows.

    Accelerated projected gradients with restart (O'Donoghue and Candes 2015). At the end y = P(y - s q'(y)), and the
    multipliers of the minimum are those of this projection, divided by s.

    >>> q = QuadraticForm(torch.eye(2), torch.tensor([3.0, 4.0]), torch.zeros(2))
    >>> y, multipliers, _, _ = minimise(q, Balls(torch.tensor([0, 0]), 1, l1=False), torch.ones(1), torch.zeros(2), tol=1e-6)
    >>> y, multipliers
    (tensor([0.6000, 0.8000]), tensor([4.]))
    """
    s = 1 / (q.smoothness or 1.0)  # a linear q takes any step
    eps, size = torch.finfo(start.dtype).eps, float(norm([q.gradient(torch.zeros_like(start))]))
    y, multipliers = balls.project(start, radii)
    ahead, momentum, residual, steps = y, 1.0, math.inf, 0
    while steps < max_steps and not residual <= 1:  # written so that NaN does not end it as solved
        steps += 1
        new, multipliers = balls.project(ahead - s * q.gradient(ahead), radii)
        residual = float(norm([new - ahead])) / s / max(tol * size, ROUNDING * eps * float(norm([new])) / s, TINY)
        if residual <= 1 and ahead is not y:  # confirm it without momentum, so that y and its multipliers belong together
            y = ahead = new
            momentum, residual = 1.0, math.inf
            continue
        uphill = float((ahead - new) @ (new - y)) > 0  # the gradient mapping points against the last move
        factor, momentum = nesterov(momentum, restart=uphill)
        ahead, y = new + factor * (new - y) if factor else new, new
    return y, multipliers / s, steps, residual


def read_weights(g: NonSmooth, x: Variable, y: Variable) -> tuple[Balls, Tensor]:
    """Return what the weights of g penalise, and the entry of x that each weight is; refuse weights that are something else."""
    wanted = "L1, GroupL2 or SparseGroup with the entries of x for weights, as in GroupL2(groups, weight=lambda x: x)"
    terms = g.terms(y)
    if len(terms) != 1 or type(terms[0][0]) not in (L1, GroupL2, SparseGroup):
        raise ValueError(f"nonsmooth: VFiDCA takes {wanted}, got {g!r}; use MEHA.")
    term, leaf = terms[0][0], y.leaves[0].detach()
    # Weights are a function of x: values that are all different show which entry each one is, and a second set confirms it.
    shuffled = 1 + torch.randperm(x.numel, generator=torch.Generator().manual_seed(0)).double() / x.numel
    probe, orders = x.copy(), []
    for values in (shuffled, 3 - shuffled):
        for part, piece in zip(probe.leaves, values.split([part.numel() for part in probe.leaves]), strict=True):
            part.copy_(piece.reshape(part.shape))
        groups, l1 = _weights(term, probe, leaf)
        weights = torch.cat([part.reshape(-1) for part in (groups, l1) if part is not None])
        entries = torch.cat([part.reshape(-1) for part in probe.leaves]).to(weights)
        same = weights[:, None] == entries[None, :]
        if same.shape[0] != same.shape[1] or not bool((same.sum(0) == 1).all() and (same.sum(1) == 1).all()):
            raise ValueError(
                f"nonsmooth: VFiDCA takes {wanted}; here the {len(weights)} weights of {type(term).__name__} are not exactly"
                f" the {len(entries)} entries of x, each once."
            )
        orders.append(same.int().argmax(1).cpu())
    if not torch.equal(*orders):
        raise ValueError(f"nonsmooth: VFiDCA takes {wanted}; here the entries change places with x.")
    size = leaf.numel()
    labels, count = torch.zeros(size, dtype=torch.int64), 0
    if isinstance(term, GroupL2):
        named, count = read_groups(type(term).__name__, term.groups)
        labels = torch.cat([named, torch.full((size - len(named),), count)])  # all others belong to no group
    elif groups is not None:  # an L1 with a weight for each coordinate
        labels, count = torch.arange(size), size
    return Balls(labels, count, l1 is not None), orders[0]


def _weights(term: NonSmooth, x: Variable, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of groups (for L1: of single coordinates), and that of the l1 norm as a whole."""
    groups = l1 = None
    if isinstance(term, GroupL2):
        groups = per_group(type(term).__name__, term.count, term.weight, x.value, leaf)
        if groups.ndim == 0 and term.count > 1:
            raise ValueError(f"nonsmooth: VFiDCA takes a weight for each group, and {type(term).__name__} has one for all.")
    if isinstance(term, L1 | SparseGroup):
        weight = term.l1 if isinstance(term, SparseGroup) else term.weight
        ((l1, _),) = term.weighted(weight, x.value, [leaf])
        if l1.ndim and groups is not None:
            raise ValueError("nonsmooth: VFiDCA takes a SparseGroup with a single l1 weight, got one for each coordinate.")
        if l1.ndim:
            groups, l1 = l1, None
    return groups, l1


VIOLATION = 100.0
"""How much more a violated radius counts than a lower level that is not solved."""

ACCURACY = {"tol_gap_abs": 1e-7, "tol_gap_rel": 1e-7, "tol_feas": 1e-7}
SETTINGS: list[dict[str, Any]] = [{}, {"equilibrate_enable": False}, {"static_regularization_constant": 1e-7}]
"""The accuracy asked of Clarabel (its own 1e-8 is often out of reach here), and settings that are tried until it gets there."""


@dataclass(frozen=True)
class ConvexModel:
    """A problem in the form that VFiDCA solves, in double precision on the host.

    Attributes:
        upper, lower: F and f as functions of y.
        balls: what the weights x penalise.
        order: the entry of x to which each radius belongs.
        program: the convex program of a step.
    """

    upper: QuadraticForm
    lower: QuadraticForm
    balls: Balls
    order: Tensor
    program: _Program


@dataclass
class VFiDCAState(State):
    """x, y, the radii r, the solution of v(r) and its multipliers, the penalty beta, and e and p of the last step."""

    radii: Tensor
    solution: Tensor
    multipliers: Tensor
    beta: float
    error: float = math.inf
    violation: float = math.inf
    given: InitVar[ConvexModel | None] = None  # built for every run, and not a part of its state

    def __post_init__(self, given: ConvexModel | None) -> None:
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

    by cvxpy and Clarabel, and then v at the new r by accelerated projected gradients; gamma
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
    >>> problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
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
        if len(y.leaves) > 1:
            raise ValueError(f"y: VFiDCA takes a single tensor, got the leaves {y.names}; join them.")
        balls, order = read_weights(oracle.problem.g, x, y)
        upper, lower = (read_quadratic(oracle, function, x, y) for function in (oracle.upper, oracle.lower))
        model = ConvexModel(upper, lower, balls, order, _Program(upper, lower, balls, self.rho, self.eps))
        radii = torch.full((len(order),), float(self.radii), dtype=torch.float64)
        solution, multipliers = self._solve_lower(oracle, model, radii, as_vector(y))
        return VFiDCAState(x, y, radii, solution, multipliers, self.beta, given=model, settled=False)

    def step(self, oracle: Oracle, state: VFiDCAState, at: At) -> Numbers:
        model, w, r, u, gamma = state.model, as_vector(state.y), state.radii, state.solution, state.multipliers
        w_new, r_new = model.program.solve(w, r, u, gamma, state.beta)
        state.error = float(norm([w_new - w, r_new - r]) / norm([w, r]))  # relative to the old point, as in the source
        unsolved = model.lower.difference(w_new, u) + float(gamma @ (r_new - r)) - self.eps
        outside = float((model.balls.sizes(w_new) - r_new).max())
        state.violation = max(0.0, unsolved, VIOLATION * outside)
        # A short step with a violated constraint means that the penalty is too weak.
        if state.error * state.beta <= self.c * min(1.0, state.beta * state.violation):
            state.beta += self.delta
        state.radii = r_new
        state.solution, state.multipliers = self._solve_lower(oracle, model, r_new, w_new)

        state.y.leaves[0].copy_(w_new.reshape(state.y.leaves[0].shape))
        weights = torch.zeros_like(state.multipliers).scatter(0, model.order, state.multipliers)  # radii to entries of x
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

    def _solve_lower(self, oracle: Oracle, model: ConvexModel, radii: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the solution of v(r) and its multipliers."""
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
    """The convex program of a step, which cvxpy compiles once; only its parameters change from step to step.

    Its variables are d = w - u, e = r - r_k and beta p, where u solves v(r_k): all become small at the end of a run, when
    V <= 0 leaves hardly any room for an interior point method.
    """

    def __init__(self, upper: QuadraticForm, lower: QuadraticForm, balls: Balls, rho: float, eps: float) -> None:
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
        """Return the next w and r."""
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
                    break  # an inaccurate solution is kept only if no setting does better
        if status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            raise ArithmeticError(
                f"Clarabel did not solve the convex program ({status}); a smaller beta or a larger rho may help"
            )
        return u + torch.from_numpy(self.d.value), (r + torch.from_numpy(self.e.value)).clamp(min=0)  # r >= 0 up to tol_feas


def _spread(balls: Balls) -> Any:
    """Build the sparse matrix that lists the groups of y one after another, each padded with zeros to the largest size."""
    from scipy.sparse import csr_array

    members = [(balls.labels == j).nonzero().reshape(-1).tolist() for j in range(balls.count)]
    width = max(map(len, members))
    entries = [(j * width + place, i) for j, group in enumerate(members) for place, i in enumerate(group)]
    rows, columns = zip(*entries, strict=True)
    return csr_array(([1.0] * len(entries), (rows, columns)), shape=(balls.count * width, len(balls.labels)))
