"""Envelope, gap, residual, merit and hypergradient against closed forms and finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch

import meha
from meha.analysis.diagnostics import (
    DiagnosticWarning,
    _least,
    envelope,
    gap,
    hypergradient,
    merit,
    prox_residual,
    subgradient_residual,
)
from meha.analysis.theory import Constants
from meha.lower.proximal_gradient import solve_lower
from meha.problem.nonsmooth import L1, MCP, SCAD, ElasticNet, GroupL2, NonNegativeL1, NonSmooth, Nuclear, SparseGroup
from meha.problem.oracle import Oracle
from meha.problem.sets import AffineSet, Box, ConvexSet, HalfSpace, L1Ball, L2Ball, LinfBall, NonNegative, Reals, Simplex
from meha.tensors.variables import Variable


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def quadratic(seed, n=3, m=4, **parts):
    """F = |x|^2/2 + |y - 1|^2/2, f = y'Hy/2 + x'By, with H positive definite."""
    root, B = normal(m, m, seed=seed), normal(n, m, seed=seed + 1)
    H = root @ root.T / m + 0.3 * torch.eye(m, dtype=torch.float64)
    problem = meha.Problem(
        upper=lambda x, y: 0.5 * x.square().sum() + 0.5 * (y - 1).square().sum(),
        lower=lambda x, y: 0.5 * y @ H @ y + x @ B @ y,
        **parts,
    )
    return problem, H, B


CASES = {
    "strongly convex": lambda: quadratic(0)[0],
    "weakly convex": lambda: meha.Problem(lambda x, y: y.sum() + x.sum(), lambda x, y: (x.sum() + y).sin().sum() + x[0] * y[0]),
    "L1": lambda: quadratic(2, nonsmooth=L1(lambda x: x[0] ** 2))[0],
    "groups": lambda: quadratic(3, nonsmooth=GroupL2([3, 1], weight=lambda x: x[:2] ** 2))[0],
    "MCP": lambda: quadratic(4, nonsmooth=MCP(lambda x: x[0] ** 2 + 0.1, a=4.0))[0],
    "box": lambda: quadratic(5, y_set=Box(-0.5, 0.7))[0],
    "box and L1": lambda: quadratic(6, nonsmooth=L1(lambda x: x[1] ** 2), y_set=Box(-0.5, 0.7))[0],
    "ball": lambda: quadratic(7, y_set=L2Ball(1.0))[0],
}


@pytest.mark.parametrize("case", CASES)
def test_envelope_gradient_against_finite_differences(case):
    problem, gamma, h = CASES[case](), 0.4, 1e-5
    x, y = normal(3, seed=11), 0.4 * normal(4, seed=12)
    moreau = envelope(problem, x, y, gamma, tol=1e-13)
    assert moreau.value <= moreau.phi
    for i in range(3):
        e = h * torch.eye(3, dtype=torch.float64)[i]
        slope = envelope(problem, x + e, y, gamma, tol=1e-13).value - envelope(problem, x - e, y, gamma, tol=1e-13).value
        assert float(moreau.gradient_x[i]) == pytest.approx(slope / (2 * h), abs=1e-5)
    for i in range(4):
        e = h * torch.eye(4, dtype=torch.float64)[i]
        slope = envelope(problem, x, y + e, gamma, tol=1e-13).value - envelope(problem, x, y - e, gamma, tol=1e-13).value
        assert float(moreau.gradient_y[i]) == pytest.approx(slope / (2 * h), abs=1e-5)


@pytest.mark.parametrize("gamma", [0.1, 1.0, 20.0])
def test_envelope_closed_form_on_quadratics(gamma):
    """theta* = (H + I/gamma)^-1 (y/gamma - B'x)."""
    problem, H, B = quadratic(0)
    x, y = normal(3, seed=1), normal(4, seed=2)
    eye = torch.eye(4, dtype=torch.float64)
    theta = torch.linalg.solve(H + eye / gamma, y / gamma - B.T @ x)
    moreau = envelope(problem, x, y, gamma)
    assert torch.allclose(moreau.theta, theta, atol=1e-8)
    value = problem.lower(x, theta) + (theta - y).square().sum() / (2 * gamma)
    assert moreau.value == pytest.approx(float(value), abs=1e-9)
    assert torch.allclose(moreau.gradient_x, B @ theta, atol=1e-7)
    assert torch.allclose(moreau.gradient_y, (y - theta) / gamma, atol=1e-6)
    assert gap(problem, x, y, gamma) == pytest.approx(float(problem.lower(x, y) - value), abs=1e-9)


def test_envelope_of_the_absolute_value_is_the_huber_function():
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0 * (x * y).sum(), nonsmooth=L1(2.0))
    for value, gamma in ((0.3, 0.5), (3.0, 0.5), (-7.0, 2.0)):
        y = torch.tensor([value], dtype=torch.float64)
        t = abs(value)
        huber = t**2 / (2 * gamma) if t <= 2 * gamma else 2 * t - 2 * gamma
        assert envelope(problem, y, y, gamma).value == pytest.approx(huber, abs=1e-10)


def test_gap_is_zero_exactly_at_lower_level_solutions():
    problem, H, B = quadratic(0)
    x = normal(3, seed=1)
    best = torch.linalg.solve(H, -B.T @ x)
    assert gap(problem, x, best, 1.0) == pytest.approx(0, abs=1e-12)
    assert gap(problem, x, best + 0.01, 1.0) > 1e-6
    lasso = meha.problems.lasso(4)
    assert gap(lasso, lasso.x_star, lasso.y_star, 10.0) == pytest.approx(0, abs=1e-12)
    assert gap(lasso, lasso.x_star, lasso.y_star + 0.1, 10.0) > 1e-3


def penalised_solution(problem, H, B, gamma, c):
    """The stationary point of F + c (f - v_gamma) for the quadratic problem, from its linear equations."""
    n, m = B.shape
    z = torch.zeros(n + m, dtype=torch.float64)

    def psi(z):
        x, y = z[:n], z[n:]
        theta = torch.linalg.solve(H + torch.eye(m, dtype=torch.float64) / gamma, y / gamma - B.T @ x)
        v = problem.lower(x, theta) + (theta - y).square().sum() / (2 * gamma)
        return problem.upper(x, y) + c * (problem.lower(x, y) - v)

    hessian = torch.autograd.functional.hessian(psi, z)
    gradient = torch.autograd.functional.jacobian(psi, z)
    z = -torch.linalg.solve(hessian, gradient)
    return z[:n], z[n:], psi


@pytest.mark.parametrize(("gamma", "c"), [(0.5, 1.0), (5.0, 20.0)])
def test_residual_on_quadratics(gamma, c):
    """Zero at the exact stationary point, the norm of the gradient elsewhere."""
    problem, H, B = quadratic(0)
    x, y, psi = penalised_solution(problem, H, B, gamma, c)
    assert prox_residual(problem, x, y, gamma, c) < 1e-7
    for scale in (1e-3, 1.0):
        z = torch.cat([x, y]) + scale * normal(7, seed=3)
        size = float(torch.autograd.functional.jacobian(psi, z).norm())
        assert prox_residual(problem, z[:3], z[3:], gamma, c) == pytest.approx(size, rel=1e-5)
        assert size > scale * 0.05


def test_residual_with_constraints_and_a_nonsmooth_term():
    """F = sum y, lasso toy with n = 2: y_2 = -1/2 - (1 + gamma)/(gamma c) is stationary at x = (1, 0); near it, it is not."""
    problem = meha.problems.lasso(2)
    gamma, c = 10.0, 40.0
    # Second coordinate, x_2 = 0: phi - v = (y + 1/2)^2 gamma / (2 (1 + gamma)), so 1 + c gamma (y + 1/2)/(1 + gamma) = 0. Its
    # theta is smaller in size than y, so the derivative in x_2, c (|y| - |theta|), is positive, and x_2 = 0 is held by X.
    # First coordinate, x_1 = 1: y = theta = 0 with |0 - 1/2| < 1 - 1/c, so y is held at 0 by |y|, and x_1 does not matter.
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([0.0, -0.5 - (1 + gamma) / (gamma * c)], dtype=torch.float64)
    assert prox_residual(problem, x, y, gamma, c) < 1e-8
    assert prox_residual(problem, x, y + torch.tensor([0.0, 0.01]), gamma, c) > 0.1
    assert prox_residual(problem, x, y + torch.tensor([0.01, 0.0]), gamma, c) > 0.1
    assert prox_residual(problem, x + torch.tensor([0.0, 0.01]), y, gamma, c) > 1e-3
    free = meha.Problem(problem.upper, problem.lower, nonsmooth=L1(lambda x: x.abs()))
    assert prox_residual(free, x + torch.tensor([0.0, 1e-3]), y, gamma, c) > 0.5


Y = torch.tensor([0.0, 1.5, -0.2, 0.0, 0.0, 0.7], dtype=torch.float64)
TERMS = {
    "L1": L1(torch.tensor([0.3, 1.0, 0.0, 2.0, 0.1, 0.4])),
    "L1 on a matrix": L1(0.8),
    "non-negative L1": NonNegativeL1(0.6),
    "elastic net": ElasticNet(0.7, 1.3),
    "SCAD": SCAD(0.5, a=2.5),
    "MCP": MCP(0.5, a=2.0),
    "groups": GroupL2([1, 2, 2, 1], weight=torch.tensor([0.5, 0.3, 1.1, 0.2])),
    "scattered groups, some coordinates free": GroupL2([[0, 3], [1]], weight=0.9),
    "sparse groups": SparseGroup([1, 2, 2, 1], l1=0.4, group=torch.tensor([0.5, 0.3, 0.9, 0.2])),
    "nuclear norm": Nuclear(0.7),
    "nuclear norm of rank 0": Nuclear(0.7),
}


@pytest.mark.parametrize("domain", [None, NonNegative(), Box(-0.2, 0.7)], ids=["free", "orthant", "box"])
@pytest.mark.parametrize("case", TERMS)
def test_the_least_subgradient_is_the_limit_of_the_prox_gradient_mapping(case, domain):
    """(y - prox_{s c g}(y - s d)) / s tends to the element of least norm of d + c dg(y) + N_Y(y) as s goes to 0."""
    g, c, s = TERMS[case], 3.0, 1e-8
    y = Y.reshape(2, 3) if "matrix" in case else Y
    if "nuclear" in case:
        y = torch.zeros(3, 4, dtype=torch.float64) if "rank 0" in case else normal(3, 1, seed=1) @ normal(1, 4, seed=2)
    if "negative" in case:
        y = y.clamp(min=0)
    y = y if domain is None else domain.project(y)
    closed = domain is None or g.separable or (g.orthant and isinstance(domain, NonNegative))
    for seed in range(8):
        d = 2 * normal(*y.shape, seed=seed)
        problem = meha.Problem(lambda x, z: (d * z).sum(), lambda x, z: 0 * (x * z).sum(), nonsmooth=g, y_set=domain)  # noqa: B023
        x, value = torch.zeros((), dtype=torch.float64), Variable.of(y, "y")
        if not closed:
            with pytest.raises(ValueError, match="no closed form"):
                subgradient_residual(problem, x, y, 1.0, c)
            return
        moved = [y - s * d]
        problem._bind_prox(value)(x, moved, s * c)
        limit = (y - moved[0]) / s
        (least,) = _least(g, domain, x, value, [d], c)
        assert torch.allclose(least, limit, atol=2e-6), seed
        assert float(least.norm()) > 0.1


SPOTS = {
    "box": (Box(-1.0, 0.5), [[-1.0, 0.5, 0.2, 3.0]]),
    "box of a point": (Box(0.5, 0.5), [[1.0, 0.5, 0.2, 3.0]]),
    "orthant": (NonNegative(), [[-1.0, 0.5, 0.0, 3.0]]),
    "cube": (LinfBall(0.5, center=0.1), [[-1.0, 0.5, 0.2, 3.0]]),
    "ball": (L2Ball(2.0, center=0.1), [[-1.0, 0.5, 0.2, 3.0], [0.1, 0.2, 0.0, 0.3], [0.1] * 4]),
    "diamond": (L1Ball(1.0, center=0.1), [[-1.0, 0.5, 0.2, 3.0], [0.1, 0.2, 0.0, 0.3], [3.0, 0.1, 0.1, 0.1]]),
    "simplex": (Simplex(2.0), [[-1.0, 0.5, 0.2, 3.0], [0.5, 0.5, 0.5, 0.5], [9.0, 0.0, 0.0, 0.0]]),
    "half-space": (HalfSpace(torch.tensor([1.0, 2.0, 0.0, -1.0]), 0.5), [[1.0, 3.0, 0.2, 0.0], [0.0, 0.0, 0.0, 1.0]]),
    "equations": (AffineSet(torch.tensor([[1.0, 1.0, 0.0, 2.0]]), torch.tensor([1.0])), [[1.0, 3.0, 0.2, 0.0]]),
    "everything": (Reals(), [[1.0, 3.0, 0.2, 0.0]]),
}


@pytest.mark.parametrize("case", SPOTS)
def test_tangent_cones_are_derivatives_of_projections(case):
    domain, spots = SPOTS[case]
    h = 1e-8
    for spot in spots:
        z = domain.project(torch.tensor(spot, dtype=torch.float64))
        for seed in range(12):
            d = normal(4, seed=seed)
            (tangent,) = domain.tangent_leaves([z], [d])
            assert torch.allclose(tangent, (domain.project(z + h * d) - z) / h, atol=1e-6)
            assert float((tangent * (d - tangent)).sum()) == pytest.approx(0, abs=1e-9)  # orthogonal parts, as of a cone
            pieces = domain.tangent_leaves([z[:3], z[3:]], [d[:3], d[3:]])
            assert torch.equal(torch.cat(pieces), tangent)


class Halved(NonSmooth):
    """|y| / 2 without anything but its prox."""

    def value_leaves(self, x, leaves):
        return sum(0.5 * leaf.abs().sum() for leaf in leaves)

    def prox_leaves(self, x, leaves, step):
        return L1(0.5).prox_leaves(x, leaves, step)


class Disc(ConvexSet):
    """The unit ball without anything but its projection."""

    def project_leaves(self, leaves):
        return L2Ball(1.0).project_leaves(leaves)


def test_terms_and_sets_of_ones_own_are_approached_by_short_steps():
    x, y = normal(3, seed=1), torch.tensor([0.0, 0.5, -2.0, 0.0], dtype=torch.float64)
    one, other = (quadratic(3, nonsmooth=g)[0] for g in (Halved(), L1(0.5)))
    assert subgradient_residual(one, x, y, 0.5, 2.0) == pytest.approx(subgradient_residual(other, x, y, 0.5, 2.0), rel=1e-6)
    y = y / y.norm()
    one, other = (quadratic(3, y_set=part)[0] for part in (Disc(), L2Ball(1.0)))
    assert subgradient_residual(one, x, y, 0.5, 2.0) == pytest.approx(subgradient_residual(other, x, y, 0.5, 2.0), rel=1e-6)
    mixed = quadratic(3, nonsmooth=Halved(), y_set=Box(-1.0, 1.0))[0]
    with pytest.raises(ValueError, match="no closed form"):
        subgradient_residual(mixed, x, y, 0.5, 2.0)


@pytest.mark.parametrize("case", CASES)
def test_the_residual_of_the_paper_is_at_least_the_prox_residual(case):
    problem = CASES[case]()
    shares = []
    for seed in range(5):
        x, y = normal(3, seed=20 + seed), 0.5 * normal(4, seed=40 + seed)
        y = y if problem.y_set is None else problem.y_set.project(y)
        paper, prox = (r(problem, x, y, 0.4, 5.0) for r in (subgradient_residual, prox_residual))
        shares.append(prox / paper)
    assert max(shares) <= 1 + 1e-6 or problem.g.rho
    if case in ("strongly convex", "weakly convex"):
        assert min(shares) == pytest.approx(1, rel=1e-6)
    elif problem.nonsmooth is not None and not problem.g.rho:
        assert min(shares) < 0.999


def test_the_residual_of_the_paper_at_a_stationary_point_and_beside_it():
    """At the stationary point of the test above both residuals vanish; beside the kink, only that of the paper jumps."""
    problem, gamma, c = meha.problems.lasso(2), 10.0, 40.0
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([0.0, -0.5 - (1 + gamma) / (gamma * c)], dtype=torch.float64)
    assert subgradient_residual(problem, x, y, gamma, c) < 1e-8
    beside = y + torch.tensor([1e-6, 0.0])
    # grad_y F + c (f_y + x_1 - v_y) = 1/2 + c (-1/2 + 1 - 0) up to 1e-4, with F_y = 1 in this problem of two coordinates
    slope = float(torch.autograd.functional.jacobian(lambda z: problem.upper(x, z) + c * problem.lower(x, z), beside)[0]) + c
    assert subgradient_residual(problem, x, beside, gamma, c) == pytest.approx(slope, rel=1e-4)
    assert slope > 10
    assert prox_residual(problem, x, beside, gamma, c) < 1e-3


def test_the_residual_of_the_paper_needs_a_point_of_the_sets():
    problem = quadratic(0, x_set=NonNegative(), y_set=L2Ball(1.0))[0]
    with pytest.raises(ValueError, match=r"x: is not in x_set = NonNegative\(\); pass x_set.project\(x\)"):
        subgradient_residual(problem, -torch.ones(3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), 1.0, 1.0)
    with pytest.raises(ValueError, match="y: is not in y_set = L2Ball"):
        subgradient_residual(problem, torch.ones(3, dtype=torch.float64), torch.ones(4, dtype=torch.float64), 1.0, 1.0)


def test_hypergradient_closed_form():
    problem, H, B = quadratic(0)
    x = normal(3, seed=1)
    best = -torch.linalg.solve(H, B.T @ x)
    expected = x - B @ torch.linalg.solve(H, best - 1)
    assert torch.allclose(hypergradient(problem, x, normal(4, seed=2)), expected, atol=1e-6)


def test_hypergradient_against_finite_differences():
    problem = meha.Problem(
        upper=lambda x, y: (y["a"] - 1).square().sum() + y["b"].square().sum() * x["s"],
        lower=lambda x, y: (
            (y["a"] - x["v"]).square().sum() * x["s"].exp() + (y["b"] - 1).cosh().sum() + (y["a"].sum() - y["b"].sum()) ** 2
        ),
    )
    y0 = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    v, s, h = normal(2, seed=1), torch.tensor(0.3, dtype=torch.float64), 1e-5
    gradient = hypergradient(problem, {"v": v, "s": s}, y0, tol=1e-13)

    def phi(v, s):
        x = {"v": v, "s": s}
        best = envelope(problem, x, y0, 1e9, tol=1e-13).theta
        return float(problem.upper(x, best))

    assert float(gradient["s"]) == pytest.approx((phi(v, s + h) - phi(v, s - h)) / (2 * h), abs=1e-5)
    e = torch.tensor([h, 0.0], dtype=torch.float64)
    assert float(gradient["v"][0]) == pytest.approx((phi(v + e, s) - phi(v - e, s)) / (2 * h), abs=1e-5)


def test_hypergradient_refuses_what_it_cannot_do():
    toy = meha.problems.merely_convex(2)
    with pytest.raises(ValueError, match="not positive definite"):
        hypergradient(toy, toy.x0, toy.y_star)
    lasso = meha.problems.lasso(2)
    with pytest.raises(ValueError, match="smooth, unconstrained"):
        hypergradient(lasso, lasso.x0, lasso.y0)


@pytest.mark.parametrize("make", [meha.problems.strong_convex, meha.problems.sine])
def test_merit_decreases_along_a_run_with_small_steps(make):
    problem = make(2)
    gamma = 0.3
    run = meha.MEHA(alpha=1e-3, beta=1e-3, eta=0.1, gamma=gamma, c=1.0, p=0.0).start(problem, problem.x0, problem.y0)
    values = []
    for _ in range(60):
        theta = run.state.theta.detached()
        values.append(merit(problem, run.x, run.y, theta, gamma, 1.0, problem.constants))
        run.step()
    assert all(b < a for a, b in itertools.pairwise(values))


def test_merit_formula():
    problem, H, B = quadratic(0)
    x, y, theta = normal(3, seed=1), normal(4, seed=2), normal(4, seed=3)
    gamma, c = 0.7, 3.0
    best = torch.linalg.solve(H + torch.eye(4, dtype=torch.float64) / gamma, y / gamma - B.T @ x)
    expected = (problem.upper(x, y) + 2) / c + gap(problem, x, y, gamma)
    expected += ((1.5 + 0.5) ** 2 + 1 / gamma**2) * (theta - best).square().sum()
    value = merit(problem, x, y, theta, gamma, c, Constants(L_F=1.0, L_f=1.5, L_g=0.5), lower_bound=-2.0)
    assert value == pytest.approx(float(expected), rel=1e-8)


RATES = {
    "sine": (lambda: meha.problems.sine(5), dict(gamma=0.45, c=0.5, eta=0.1, alpha=0.03, beta=0.1)),
    "lasso": (lambda: meha.problems.lasso(10), dict(gamma=2.0, c=20.0, eta=0.2, alpha=0.2, beta=0.2)),
}


@pytest.mark.parametrize("case", RATES)
def test_rate_of_the_theorem(case):
    """p = 0: the least residual so far falls at least like 1/sqrt(K); on these problems it falls faster."""
    make, numbers = RATES[case]
    problem = make()
    assert not meha.theory.check(problem.constants, gamma=numbers["gamma"], eta=numbers["eta"], p=0.0)
    run = meha.MEHA(**numbers, p=0.0).start(problem, problem.x0, problem.y0)
    marks, least, best = (4, 16, 64, 256), {}, math.inf
    for k in range(1, marks[-1] + 1):
        run.step()
        if k <= 64 or k % 8 == 0:
            best = min(best, prox_residual(problem, run.x, run.y, numbers["gamma"], numbers["c"]))
        if k in marks:
            least[k] = best
    slope = np.polyfit(np.log(marks), np.log([max(least[k], 1e-12) for k in marks]), 1)[0]
    assert slope < -0.5
    constant = least[4] * math.sqrt(4)
    assert all(least[k] <= constant / math.sqrt(k) for k in marks)


def test_modules_and_arguments_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).double()
    inputs = normal(8, 2, seed=1)
    problem = meha.Problem(
        lambda x, y: y(inputs).square().sum(), lambda x, y: (y(inputs) - x).square().sum() + y[0].weight.square().sum()
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.ones(2, dtype=torch.float64)
    moreau = envelope(problem, x, model, 0.01)
    assert moreau.gradient_y.keys() == dict(model.named_parameters()).keys()
    assert prox_residual(problem, x, model, 0.01, 1.0) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_unfinished_inner_solve_is_said():
    problem, _, _ = quadratic(0)
    with pytest.warns(DiagnosticWarning, match="after 2 steps"):
        envelope(problem, normal(3), normal(4), 1e6, max_steps=2)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan])
def test_gamma_must_be_positive(gamma):
    problem, _, _ = quadratic(0)
    with pytest.raises(ValueError, match="gamma"):
        gap(problem, normal(3), normal(4), gamma)


def test_nonnegative_lower_level():
    """min over y >= 0 of (y + 1)^2/2 has theta* = max(0, (y/gamma - 1)/(1 + 1/gamma))."""
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (y + x).square().sum(), y_set=NonNegative())
    x, y = torch.ones(2, dtype=torch.float64), torch.tensor([0.5, 4.0], dtype=torch.float64)
    assert envelope(problem, x, y, 2.0).theta.tolist() == pytest.approx([0.0, (2 - 1) / 1.5], abs=1e-8)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_starting_at_the_solution_ends_at_once(scale):
    """Where only rounding is left of the gradient, the inner solver stops instead of chasing it."""
    H = normal(6, 6, seed=5)
    H = scale * (H @ H.T + torch.eye(6, dtype=torch.float64))
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * y @ H @ y - scale * x @ y)
    x = normal(6, seed=6)
    best = torch.linalg.solve(H, scale * x)
    point = Variable(x, "x"), Variable(best, "y")
    oracle = Oracle(problem, *point)
    solution = solve_lower(oracle, *point, gamma=1 / scale, tol=1e-10)
    assert solution.converged
    assert solution.steps < 50
    assert torch.allclose(solution.theta.detached(), best, rtol=1e-10)


@pytest.mark.parametrize("kappa", [1e2, 1e5])
def test_inner_solver_on_ill_conditioned_problems(kappa):
    spectrum = torch.logspace(0, -math.log10(kappa), 20, dtype=torch.float64)
    target = normal(20, seed=1)
    problem = meha.Problem(lambda x, y: y.sum() + x.sum(), lambda x, y: 0.5 * (spectrum * (y - target).square()).sum())
    point = Variable(target, "x"), Variable(torch.zeros(20, dtype=torch.float64), "y")
    solution = solve_lower(Oracle(problem, *point), *point, tol=1e-9, max_steps=30_000)
    assert solution.converged
    assert torch.allclose(solution.theta.detached(), target, atol=1e-3)


@pytest.mark.parametrize("gamma", [5.0, 200.0, 1e4])
def test_gap_outside_the_theorem_is_not_zero_at_points_that_are_not_stationary(gamma):
    """However far the first step would jump in the landscape of the sine."""
    problem = meha.Problem(lambda x, y: y.sum() + x.sum(), lambda x, y: torch.sin(y).sum())
    for start in np.arange(0.13, 6.3, 0.31):
        y = torch.tensor([start], dtype=torch.float64)
        assert gap(problem, y, y, gamma) > 0.1 * math.cos(start) ** 2


@pytest.mark.parametrize("start", [0.0, 20.0, 50.0])
def test_hypergradient_from_behind_a_wall_of_curvature(start):
    problem = meha.Problem(lambda x, y: y.square().sum(), lambda x, y: (y.exp() - x * y + 0.05 * y.square()).sum())
    x, y = (torch.full((1,), value, dtype=torch.float64) for value in (2.0, start))
    assert float(hypergradient(problem, x, y)) == pytest.approx(0.64863, abs=1e-4)


def test_objectives_with_a_domain():
    """y - log y is NaN for y < 0; the inner solver stays where it is defined."""
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: (y - x * y.log()).sum())
    x, y = torch.ones(1, dtype=torch.float64), torch.full((1,), 20.0, dtype=torch.float64)
    theta = 0.5 * (20 - 100 + math.sqrt(80**2 + 400))
    value = theta - math.log(theta) + (theta - 20) ** 2 / 200
    assert gap(problem, x, y, 100.0) == pytest.approx(20 - math.log(20) - value, rel=1e-8)


def test_lower_levels_without_a_minimum_are_said():
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: y.sum() - (y**4).sum() + x.sum())
    one = torch.ones(1, dtype=torch.float64)
    with pytest.warns(DiagnosticWarning, match="f is bounded below"):
        assert gap(problem, one, one, 1.0) > 1e10


def test_residual_of_a_weakly_convex_term_with_a_large_gamma():
    problem = meha.Problem(
        lambda x, y: (y - 1).square().sum() + x.square().sum(),
        lambda x, y: 0.5 * (y - x).square().sum(),
        nonsmooth=MCP(0.1, a=3.0),
    )
    zero = torch.zeros(2, dtype=torch.float64)
    assert math.isfinite(prox_residual(problem, zero, zero, 5.0, 1.0))


def test_an_unfinished_linear_system_is_said():
    spectrum = torch.logspace(0, -12, 12, dtype=torch.float64)
    root, _ = torch.linalg.qr(normal(12, 12, seed=3))
    H = root @ torch.diag(spectrum) @ root.T
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (y - x) @ H @ (y - x))
    x = normal(12, seed=4)
    with pytest.warns(DiagnosticWarning, match="conjugate gradients reached"):
        hypergradient(problem, x, x, tol=1e-14)


def test_merit_needs_a_theta_like_y():
    problem, _, _ = quadratic(0)
    with pytest.raises(ValueError, match="theta: the number or shapes of its tensors differ"):
        merit(problem, normal(3), normal(4), normal(1), 1.0, 1.0, Constants(L_F=1.0, L_f=1.0))
