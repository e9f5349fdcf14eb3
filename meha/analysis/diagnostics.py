"""Diagnostics for any point (x, y), independent of method: Moreau envelope, gap, residuals, merit, hypergradient.

These functions do not count as work of a run and do not change their arguments: modules are copied first. They take the
user's objects (tensors, dicts, modules), and a batch if the objectives need one. After a run in several processes, call them
in all of these, with ``group=run.group``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from meha.analysis.theory import Constants
from meha.lower.proximal_gradient import ProximalSolution, solve_lower
from meha.numerics.linear_systems import CurvatureError, conjugate_gradients
from meha.problem.nonsmooth import NonSmooth, Zero
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet
from meha.tensors.checks import check_positive
from meha.tensors.distributed import Group
from meha.tensors.variables import Leaves, Variable, norm, subtract

__all__ = [
    "DiagnosticWarning",
    "Envelope",
    "envelope",
    "gap",
    "hypergradient",
    "merit",
    "prox_residual",
    "subgradient_residual",
]


class DiagnosticWarning(UserWarning):
    """An inner solve missed its tolerance, so a diagnostic is only approximate."""


@dataclass(frozen=True)
class Envelope:
    """The Moreau envelope v_gamma at a point.

    Attributes:
        value: v_gamma(x, y) = min over theta in Y of (f + g)(x, theta) + ||theta - y||^2 / (2 gamma).
        theta: the minimiser, in the structure of y.
        gradient_x: grad_x (f + g)(x, theta).
        gradient_y: (y - theta) / gamma.
        phi: (f + g)(x, y), so that phi - value is the gap.
        error: the norm of the prox-gradient mapping of the inner problem at theta.
    """

    value: float
    theta: Any
    gradient_x: Any
    gradient_y: Any
    phi: float
    error: float


def envelope(
    problem: Problem,
    x: Any,
    y: Any,
    gamma: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> Envelope:
    """Compute v_gamma(x, y), its minimiser theta* and its gradient (the paper's Lemma on the gradient of v_gamma).

    For gamma below 1 / (2 rho) the inner problem is strongly convex and theta* is unique; otherwise theta* is a
    stationary point at least as good as y, and the gradient is that of the branch through it.

    Args:
        tol: tolerance of the inner solve (:func:`meha.lower.proximal_gradient.solve_lower`), relative to the size of theta.

    Returns:
        The value, the minimiser and the gradient.

    >>> problem = Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (y - x).square().sum())
    >>> v = envelope(problem, torch.zeros(1), torch.tensor([2.0]), gamma=1.0)
    >>> round(v.value, 6), v.theta, v.gradient_y
    (1.0, tensor([1.]), tensor([1.]))
    """
    point = _Point(problem, x, y, batch, group)
    inner = point.solve(gamma, tol, max_steps)
    value, phi = point.values(inner.theta, gamma)
    d_x, d_y = point.envelope_gradient(inner.theta, gamma)
    return Envelope(value, inner.theta.detached(), point.x.like(d_x), point.y.like(d_y), phi, inner.residual)


def gap(
    problem: Problem,
    x: Any,
    y: Any,
    gamma: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> float:
    """Gap (f + g)(x, y) - v_gamma(x, y): never negative, and zero exactly where y is stationary for the lower level at x.

    >>> problem = Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (y - x).square().sum())
    >>> gap(problem, torch.zeros(1), torch.zeros(1), gamma=1.0)
    0.0
    """
    point = _Point(problem, x, y, batch, group)
    value, phi = point.values(point.solve(gamma, tol, max_steps).theta, gamma)
    return phi - value


def subgradient_residual(
    problem: Problem,
    x: Any,
    y: Any,
    gamma: float,
    c: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> float:
    """Residual R_k of the paper, at c_k = c: the distance of 0 to the subdifferential of the penalised problem,

        grad F + c (grad f + subdifferential of g - grad v_gamma) + normal cone of X x Y.

    It is zero exactly at the stationary points of psi = F + c (f + g - v_gamma) on X x Y. It jumps where a kink or the
    boundary of a set is left, so a run that ends beside a kink never sees it small; :func:`prox_residual` has no jumps. Terms
    and sets of the library are treated in closed form, others by short steps of their prox, unless they define ``slopes``,
    ``least_leaves`` or ``tangent_leaves``.

    Raises:
        ValueError: x is not in X or y not in Y, where the normal cone is empty.

    >>> from meha.problem.nonsmooth import L1
    >>> problem = Problem(lambda x, y: (x - y).sum(), lambda x, y: 0.5 * y.square().sum(), nonsmooth=L1(1.0))
    >>> subgradient_residual(problem, torch.zeros(1), torch.zeros(1), gamma=1.0, c=2.0)
    1.0
    """
    point = _Point(problem, x, y, batch, group)
    for name, variable, domain in (("x", point.x, problem.x_set), ("y", point.y, problem.y_set)):
        if domain is not None and not domain.holds(variable):  # the normal cone is empty there
            raise ValueError(f"{name}: is not in {name}_set = {domain!r}; pass {name}_set.project({name}).")
    d_x, d_y = point.penalised_gradient(gamma, c, tol, max_steps)
    with torch.no_grad():
        in_x = _least(Zero(), problem.x_set, None, point.x, d_x, c)  # g is smooth in x: only the normal cone of X is left
        return float(norm(in_x, _least(problem.g, problem.y_set, point.x.value, point.y, d_y, c)))


def prox_residual(
    problem: Problem,
    x: Any,
    y: Any,
    gamma: float,
    c: float,
    *,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> float:
    """Norm of the prox-gradient mapping of the penalised problem min over X x Y of psi = F + c (f + g - v_gamma),

        (z - prox_{s (c g + indicator)}(z - s grad(smooth part of psi))) / s,   z = (x, y),  s = gamma / c,

    the gradient in x being that of all of psi (g is smooth in x). It vanishes exactly at stationary points and is continuous.
    It equals the paper's R_k (:func:`subgradient_residual`) where g = 0 and X and Y are whole spaces, is never larger for
    convex g, and tends to it as s goes to 0. For a weakly convex g, s = min(gamma, 1 / (2 rho)) / c.

    >>> problem = Problem(lambda x, y: (x - 1).square().sum(), lambda x, y: 0.5 * (y - x).square().sum())
    >>> prox_residual(problem, torch.ones(1), torch.ones(1), gamma=1.0, c=2.0)
    0.0
    """
    point = _Point(problem, x, y, batch, group)
    oracle, x_, y_ = point.oracle, point.x, point.y
    d_x, d_y = point.penalised_gradient(gamma, c, tol, max_steps)
    step = (min(gamma, 0.5 / problem.g.rho) if problem.g.rho else gamma) / c  # the prox of c g has one value below 1 / (c rho)
    with torch.no_grad():
        new_x = [z - step * d for z, d in zip(x_.leaves, d_x, strict=True)]
        new_y = [z - step * d for z, d in zip(y_.leaves, d_y, strict=True)]
        oracle.project(x_.value, new_x, step)
        oracle.prox(x_.value, new_y, step * c)  # of c g with the step s, that is of g with s c
        return float(norm(subtract(x_.leaves, new_x), subtract(y_.leaves, new_y))) / step


def merit(
    problem: Problem,
    x: Any,
    y: Any,
    theta: Any,
    gamma: float,
    c: float,
    constants: Constants,
    *,
    lower_bound: float = 0.0,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> float:
    """Merit V = (F - lower_bound) / c + (f + g - v_gamma) + ((L_f + L_g)^2 + 1/gamma^2) ||theta - theta*||^2.

    The paper proves that it decreases along a run whose steps are small enough.

    Args:
        theta: the auxiliary variable of the run.
        constants: give L_f and L_g.
        lower_bound: a lower bound of F; any constant will do, because only differences of V matter while c is constant.

    Returns:
        V at the point.
    """
    check_positive("c", c)
    point = _Point(problem, x, y, batch, group)
    auxiliary = Variable.of(theta, "theta")
    if [leaf.shape for leaf in auxiliary.leaves] != [leaf.shape for leaf in point.y.leaves]:
        raise ValueError("theta: the number or shapes of its tensors differ from those of y; pass run.state.theta.detached().")
    best = point.solve(gamma, tol, max_steps).theta
    value, phi = point.values(best, gamma)
    weight = (constants.L_f + constants.L_g) ** 2 + 1 / gamma**2
    with torch.no_grad():
        upper = float(point.oracle.upper(point.x, point.y, batch))
        apart = float(norm(subtract(auxiliary.leaves, best.leaves)))
    return (upper - lower_bound) / c + phi - value + weight * apart * apart


def hypergradient(
    problem: Problem,
    x: Any,
    y: Any,
    *,
    tol: float = 1e-10,
    max_steps: int = 10_000,
    batch: Any = None,
    group: Group | None = None,
) -> Any:
    """Gradient of Phi(x) = F(x, y*(x)), for f smooth and strongly convex in y and without constraints on y.

    It is F_x - f_xy [f_yy^-1 F_y] at y*(x), which is computed from y; the linear system is solved by conjugate gradients. This
    diagnostic uses second derivatives; MEHA does not.

    Raises:
        ValueError: there is a non-smooth term or a constraint on y, or conjugate gradients meet a direction in which the
            Hessian of f in y is not positive.

    >>> problem = Problem(lambda x, y: y.square().sum(), lambda x, y: 0.5 * (y - 3 * x).square().sum())
    >>> print(f"{float(hypergradient(problem, torch.ones(1), torch.zeros(1))):.3f}")
    18.000
    """
    if problem.nonsmooth is not None or problem.y_set is not None:
        raise ValueError("hypergradient: needs a smooth, unconstrained lower level; this one has a non-smooth term or a y_set.")
    point = _Point(problem, x, y, batch, group)
    oracle = point.oracle
    best = point.solve(None, tol, max_steps).theta  # an error of y* enters the hypergradient to first order
    # Not strict: F may depend on x through y*(x) alone.
    _, (d_x, F_y) = oracle.gradients((point.x, best), [(1.0, oracle.upper, point.x, best)], batch, strict=False)

    with torch.no_grad():
        hessian = oracle.hessian([(1.0, oracle.lower, point.x, best)], batch)
        try:
            # n steps are enough in exact arithmetic; rounding may need some times as many.
            vector, error = conjugate_gradients(lambda v: hessian(v, best)[0], F_y, steps=10 * best.numel, tol=tol)
        except CurvatureError as reason:
            raise ValueError(
                f"hypergradient: {reason} at the solution, so the hypergradient is not defined; use gap and residual instead."
            ) from None
        if error > max(tol, 1e-6):
            warnings.warn(
                f"conjugate gradients reached a relative residual of only {error:.1e}; the hypergradient is approximate,"
                " because the Hessian of lower in y is ill-conditioned.",
                DiagnosticWarning,
                stacklevel=2,
            )
        (cross,) = hessian(vector, point.x)
        return point.x.like(subtract(d_x, cross))


class _Point:
    """Copies of (x, y), which diagnostics may move, with an oracle."""

    def __init__(self, problem: Problem, x: Any, y: Any, batch: Any, group: Group | None) -> None:
        self.y = Variable.of(y, "y").copy()  # the user's tensors and modules must not change
        problem, x = problem._with_dummy_x(x, self.y)
        self.x = Variable.of(x, "x").copy()
        self.oracle = Oracle(problem, self.x, self.y, group)
        self.batch = batch

    def solve(self, gamma: float | None, tol: float, max_steps: int) -> ProximalSolution:
        """Solve the proximal lower level, whose minimum is v_gamma, or the lower level; warn if the tolerance is missed."""
        if gamma is not None:
            check_positive("gamma", gamma)
        solution = solve_lower(self.oracle, self.x, self.y, gamma=gamma, tol=tol, max_steps=max_steps, batch=self.batch)
        if not solution.converged:
            warnings.warn(
                f"the {'' if gamma is None else 'proximal '}lower level was solved to a residual of only"
                f" {solution.residual:.1e} after {solution.steps} steps; the diagnostic is approximate. Check that gamma is"
                " small enough and f is bounded below, or raise max_steps.",
                DiagnosticWarning,
                stacklevel=3,
            )
        return solution

    def values(self, theta: Variable, gamma: float) -> tuple[float, float]:
        """v_gamma, given its minimiser theta, and f + g at y."""
        with torch.no_grad():
            phi = float(self.oracle.phi(self.x, self.y, self.batch))
            at_theta = float(self.oracle.phi(self.x, theta, self.batch))
            distance = float(norm(subtract(theta.leaves, self.y.leaves)))
            value = at_theta + distance * distance / (2 * gamma)
        return min(value, phi), phi  # theta = y is a candidate: rounding must not make the gap negative

    def envelope_gradient(self, theta: Variable, gamma: float) -> tuple[Leaves, Leaves]:
        """grad v_gamma = (grad_x (f + g)(x, theta*), (y - theta*) / gamma)."""
        oracle = self.oracle
        # Danskin's theorem: theta* is not differentiated.
        _, d_x = oracle.gradient(self.x, [(1.0, oracle.phi, self.x, theta)], self.batch, strict=False)
        with torch.no_grad():
            return d_x, [d / gamma for d in subtract(self.y.leaves, theta.leaves)]

    def penalised_gradient(self, gamma: float, c: float, tol: float, max_steps: int) -> tuple[Leaves, Leaves]:
        """The gradient of F + c (f + g - v_gamma) in x, and of F + c (f - v_gamma) in y."""
        check_positive("c", c)
        oracle, x, y = self.oracle, self.x, self.y
        v_x, v_y = self.envelope_gradient(self.solve(gamma, tol, max_steps).theta, gamma)
        _, d_x = oracle.gradient(x, [(1.0, oracle.upper, x, y), (c, oracle.phi, x, y)], self.batch, strict=False)
        # In y, g has kinks: the caller adds its subdifferential, or takes its prox.
        _, d_y = oracle.gradient(y, [(1.0, oracle.upper, x, y), (c, oracle.lower, x, y)], self.batch, strict=False)
        with torch.no_grad():
            return subtract(d_x, [c * leaf for leaf in v_x]), subtract(d_y, [c * leaf for leaf in v_y])


def _least(g: NonSmooth, domain: ConvexSet | None, x: Any, z: Variable, gradient: Leaves, c: float) -> Leaves:
    """The element of least norm of gradient + c * (subdifferential of g) + (normal cone of the set) at z."""
    parts = [] if domain is None else domain.parts(z)
    # Masks of the coordinates that the set lets decrease, and increase.
    down, up = ([torch.ones_like(leaf, dtype=torch.bool) for leaf in z.leaves] for _ in range(2))
    for part, covered in parts:
        if part.coordinatewise:
            below, above = part.room([z.leaves[i] for i in covered])
            for place, i in enumerate(covered):
                down[i], up[i] = below[place], above[place]
    result, free = list(gradient), set(range(len(gradient)))
    for term, chosen in g.terms(z):
        free -= set(chosen)
        bounded = any(not bool(mask[i].all()) for mask in (down, up) for i in chosen)
        room = ([down[i] for i in chosen], [up[i] for i in chosen]) if bounded else None  # some terms know no other case
        least = term.least_leaves(x, [z.leaves[i] for i in chosen], [gradient[i] for i in chosen], c, room)
        for i, leaf in zip(chosen, least, strict=True):
            result[i] = leaf
    for part, covered in parts:
        chosen = [i for i in covered if i in free]  # those with a term of g are done
        if chosen:
            leaves = [z.leaves[i] for i in chosen]
            # Moreau decomposition: -gradient without its normal part is its projection on the tangent cone.
            for i, leaf in zip(chosen, part.tangent_leaves(leaves, [-gradient[i] for i in chosen]), strict=True):
                result[i] = -leaf
    return result
