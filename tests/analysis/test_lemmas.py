"""The constants of the paper's lemmas, the bounds of its theorems, and what these say, on problems where all is known."""

import math

import pytest
import torch

import meha
from meha.analysis.diagnostics import envelope, gap, hypergradient, merit, prox_residual, subgradient_residual
from meha.analysis.theory import (
    Constants,
    check,
    contraction,
    envelope_weak_convexity,
    eta_range,
    hypergradient_bound,
    prox_lipschitz,
    response_bound,
    step_bounds,
    theta_lipschitz,
)
from meha.problem.nonsmooth import L1, MCP, GroupL2
from meha.problem.sets import Box


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def penalised(a=3.0):
    """f = cos(x + y) / 2 + x y / 4 in two coordinates, g = MCP: weakly convex in all its parts, with constants by hand."""
    return meha.Problem(
        upper=lambda x, y: (x - 1).square().sum() / 2 + (x + y).square().sum() / 2,
        lower=lambda x, y: (x + y).cos().sum() / 2 + (x * y).sum() / 4,
        nonsmooth=MCP(0.3, a=a),
        constants=Constants(L_F=2.7, L_f=1.3, rho_f=0.5, rho_g=1 / a, f_yy=0.5, f_xy=0.75),
    )


PROBLEMS = {
    "strong convex": (lambda: meha.problems.strong_convex(2), 0.8),
    "sine": (lambda: meha.problems.sine(2), 0.3),
    "lasso": (lambda: meha.problems.lasso(2), 1.0),
    "weakly convex": (penalised, 0.3),
}


def points(problem, count, seed=0):
    """Random pairs of points in X x Y."""
    x0, y0 = meha.problems.lasso(2).x0 if not hasattr(problem, "x0") else problem.x0, getattr(problem, "y0", number([0.0, 0.0]))
    for i in range(count):
        draws = [(normal(*x0.shape, seed=seed + 4 * i + j), normal(*y0.shape, seed=seed + 4 * i + 2 + j)) for j in (0, 1)]
        yield [(x if problem.x_set is None else problem.x_set.project(x), y) for x, y in draws]


def test_prox_lipschitz():
    """No random pair exceeds the constants, and the one in x is attained."""
    s, m = 0.6, 5
    cases = [
        (L1(lambda x: x.expand(m)), 1, Constants(L_F=0.0, L_f=0.0, L_g=math.sqrt(m))),
        (L1(lambda x: x), m, Constants(L_F=0.0, L_f=0.0, L_g=1.0)),
        (GroupL2([2, 3], weight=lambda x: x), 2, Constants(L_F=0.0, L_f=0.0, L_g=1.0)),
        (MCP(lambda x: x, a=2.0), m, Constants(L_F=0.0, L_f=0.0, L_g=1.0, rho_g=0.5)),
    ]
    for g, n, constants in cases:
        in_x, in_z = prox_lipschitz(constants, s)
        ratios_x, ratios_z = [], []
        for seed in range(200):
            x, other = (normal(n, seed=2 * seed + i).abs() / 2 for i in (0, 1))
            z, moved = (normal(m, seed=1000 + 2 * seed + i) * 2 for i in (0, 1))
            there = g.prox(x, z, s)
            ratios_x.append(float((there - g.prox(other, z, s)).norm() / (x - other).norm()))
            ratios_z.append(float((there - g.prox(x, moved, s)).norm() / (z - moved).norm()))
        assert max(ratios_x) <= in_x * (1 + 1e-9)
        assert max(ratios_z) <= in_z * (1 + 1e-9)
        assert max(ratios_x) > 0.7 * in_x
        assert max(ratios_z) > 0.6 * in_z
    with pytest.raises(ValueError, match=r"s: must be below 1/rho_g = 2"):
        prox_lipschitz(cases[-1][2], 2.0)


@pytest.mark.parametrize("case", PROBLEMS)
def test_contraction_and_lipschitz_constant_of_theta(case):
    make, gamma = PROBLEMS[case]
    problem = make()
    constants = problem.constants
    eta = eta_range(constants, gamma).upper
    sigma, L_theta = contraction(constants, gamma, eta), theta_lipschitz(constants, gamma)
    assert 0 < sigma < 1
    assert contraction(constants, gamma, eta / 2) > sigma  # falls with eta
    factors, moves = [], []
    for (x, y), (other, moved) in points(problem, 25):
        best = envelope(problem, x, y, gamma, tol=1e-12).theta
        theta = best + normal(*y.shape, seed=7)
        slope = torch.autograd.functional.jacobian(lambda t: problem.lower(x, t), theta)  # noqa: B023
        new = problem.g.prox(x, theta - eta * (slope + (theta - y) / gamma), eta)
        factors.append(float((new - best).norm() / (theta - best).norm()))
        there = envelope(problem, other, moved, gamma, tol=1e-12).theta
        moves.append(float((best - there).norm() / torch.cat([(x - other).reshape(-1), y - moved]).norm()))
    assert 0.1 * sigma < max(factors) <= sigma * (1 + 1e-6)
    assert 0.05 * L_theta < max(moves) <= L_theta * (1 + 1e-6)


def test_theta_lipschitz_by_hand():
    """s = 0.1, gamma = 0.5: || (K_x + s K_z f_xy, s K_z / gamma) || / (1 - sigma), with K_x = 0.2/0.9 and K_z = 1/0.9."""
    known = Constants(L_F=1.0, L_f=5.0, rho_f=0.0, rho_g=0.5, L_g=2.0, f_yy=1.0, f_xy=3.0)
    known = Constants(**{**vars(known), "rho_g": 0.5})
    sigma = math.sqrt(1 - 0.1 * 2) / (1 - 0.1 * 0.5)
    expected = math.hypot(0.1 * 2 / 0.95 + 0.1 * 3 / 0.95, 0.1 * 2 / 0.95) / (1 - sigma)
    assert theta_lipschitz(known, 0.5, s=0.1) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"gamma: must be in \(0, 1\), the range of the theorem, got 2"):
        theta_lipschitz(known, 2.0)
    with pytest.raises(ValueError, match=r"eta: must be in \(0, 0.2222\], the range of the theorem, got 1"):
        contraction(known, 0.5, 1.0)


@pytest.mark.parametrize("case", PROBLEMS)
def test_weak_convexity_of_the_envelope(case):
    """The gradient of v + rho_x/2 |x|^2 + 1/(2 gamma) |y|^2 is monotone; that of v alone is not."""
    make, gamma = PROBLEMS[case]
    problem = make()
    rho_x, rho_y = envelope_weak_convexity(problem.constants, gamma)
    assert rho_y == 1 / gamma
    bare = []
    for (x, y), (other, moved) in points(problem, 25):
        here, there = (envelope(problem, a, b, gamma, tol=1e-12) for a, b in ((x, y), (other, moved)))
        d_x, d_y = (x - other).reshape(-1), y - moved
        product = float((here.gradient_x - there.gradient_x).reshape(-1) @ d_x + (here.gradient_y - there.gradient_y) @ d_y)
        assert product + rho_x * float(d_x @ d_x) + rho_y * float(d_y @ d_y) >= -1e-6
        bare.append(product)
    assert min(bare) < -1e-3


@pytest.mark.parametrize("case", PROBLEMS)
def test_the_merit_falls_as_the_lemma_says_with_the_largest_steps_that_it_admits(case):
    make, gamma = PROBLEMS[case]
    problem = make()
    eta, c = 0.9 * eta_range(problem.constants, gamma).upper, 2.0
    bounds = step_bounds(problem.constants, gamma, eta, c)
    assert check(problem.constants, gamma=gamma, eta=eta, p=0.0, c=c, alpha=bounds.alpha, beta=bounds.beta) == []
    x0, y0 = getattr(problem, "x0", number([0.5, -0.5])), getattr(problem, "y0", number([1.0, 0.2]))
    run = meha.MEHA(alpha=bounds.alpha, beta=bounds.beta, eta=eta, gamma=gamma, c=c, p=0.0).start(problem, x0, y0)
    run.state.theta.leaves[0].detach().add_(1.0)  # away from theta*
    for _ in range(6):
        x, y, theta = run.x.clone(), run.y.clone(), run.state.theta.detached().clone()
        best = envelope(problem, x, y, gamma, tol=1e-13).theta
        before = merit(problem, x, y, theta, gamma, c, problem.constants, tol=1e-13)
        run.step()
        after = merit(problem, run.x, run.y, run.state.theta.detached(), gamma, c, problem.constants, tol=1e-13)
        promised = float((run.x - x).square().sum()) / (4 * bounds.alpha) + float((run.y - y).square().sum()) / (
            4 * bounds.beta
        )
        promised += bounds.theta * float((theta - best).square().sum())
        assert promised > 0
        assert before - after >= promised * (1 - 1e-6)


def test_step_bounds_by_hand():
    """The paper's formulas, with 1 - sigma^2 in place of its lower bound (eta rho / (1 - eta rho))^2."""
    known = Constants(L_F=2.0, L_f=1.5, rho_f=0.25, rho_g=0.5, L_g=0.5, f_yy=1.0, f_xy=0.75)
    gamma, eta, c = 0.4, 0.1, 4.0
    d = 1 - contraction(known, gamma, eta) ** 2
    assert d > (eta * 0.5 / (1 - eta * 0.5)) ** 2
    t = (1 / 0.8 - 0.75) / 2
    L = 2 / 4 + 1.5 + 0.5 + max(2 + 1.25**2 / t, 2.5)
    M, T = 4 + 6.25, theta_lipschitz(known, gamma) ** 2
    bounds = step_bounds(known, gamma, eta, c)
    assert bounds.C_alpha == pytest.approx(L / 2 + d * T / (4 * gamma**2) + (1 + 4 / d) * T * M, rel=1e-12)
    assert bounds.C_beta == pytest.approx(0.25 + L / 2 + (1 + 4 / d) * T * M, rel=1e-12)
    assert bounds.alpha == pytest.approx(1 / (4 * bounds.C_alpha), rel=1e-12)
    assert bounds.beta == pytest.approx(1 / (4 * bounds.C_beta), rel=1e-12)
    assert bounds.theta == pytest.approx(d / 2 * M, rel=1e-12)
    small = step_bounds(Constants(L_F=1e-9, L_f=1e-9, rho_f=0.0), 1e9, 1e-8, 1.0)  # nothing is curved: d decides
    assert (small.alpha, small.beta) == pytest.approx((5e-18, 2.5e-18), rel=1e-6)


def test_alpha_and_beta_are_looked_at():
    known = Constants(L_F=1.0, L_f=1.0, rho_f=0.0)
    bounds = step_bounds(known, 1.0, 0.25, 2.0)
    alpha, beta = check(known, gamma=1.0, eta=0.25, c=2.0, alpha=10 * bounds.alpha, beta=3 * bounds.beta)
    assert alpha.startswith("alpha = ")
    assert alpha.endswith("(step_bounds): 10 times too large.")
    assert beta.endswith("(step_bounds): 3 times too large.")
    (only,) = check(known, gamma=1.0, eta=0.26, c=2.0, alpha=1.0, beta=1.0)
    assert "eta" in only
    with pytest.raises(ValueError, match="depend on eta and c"):
        check(known, gamma=1.0, alpha=0.1)


def test_in_the_range_is_said_only_of_runs_whose_alpha_and_beta_are():
    problem = meha.problems.strong_convex(2)
    gamma, eta, c = 1.0, 0.2, 2.0
    bounds = step_bounds(problem.constants, gamma, eta, c)

    def theory(alpha, beta, **more):
        method = meha.MEHA(alpha=alpha, beta=beta, eta=eta, gamma=gamma, c=c, p=0.1, **more)
        run = method.start(problem, problem.x0, problem.y0)
        return run.method.report(run)["theory"]

    inside = "gamma, eta, p, alpha, beta in the range of the convergence theorem"
    assert theory(bounds.alpha, bounds.beta) == inside
    assert theory(lambda k: bounds.alpha / (k + 1), bounds.beta) == inside
    fits = "gamma, eta, p fit the convergence theorem; "
    assert theory(10 * bounds.alpha, bounds.beta) == fits + "alpha is 10 times what its proof admits"
    assert theory(2 * bounds.alpha, 30 * bounds.beta) == fits + "alpha is 2 times and beta is 30 times what its proof admits"
    assert theory(None, bounds.beta, x_optimizer=torch.optim.Adam).startswith(
        fits + "alpha and beta not looked at; not covered: x_opt"
    )
    assert theory(bounds.alpha, bounds.beta, gradients=3) == inside + "; not covered: gradients=3"


def test_the_theorem_on_the_hypergradient_is_checked():
    known = Constants(L_F=2.0, L_f=3.0, rho_f=0.0)
    assert check(known, gamma=2.1, p=0.25, c=17.0, mu=0.5) == []
    gamma, c = check(known, gamma=2.0, p=0.25, c=8.0, mu=0.5)
    assert gamma == "gamma = 2 is not above 1/mu = 2."
    assert c == "c = 8 is not above 4 L_F/mu = 16; c_k = c (k+1)^p is from k = 16."
    (p,) = check(known, gamma=2.1, p=0.0, c=17.0, mu=0.5)
    assert p.startswith("p = 0: c_k does not grow")
    assert "g is not zero" in check(Constants(L_F=2.0, L_f=3.0, rho_f=0.0, L_g=1.0), gamma=2.1, mu=0.5)[0]
    both = check(Constants(L_F=2.0, L_f=3.0), gamma=2.1, mu=0.5)  # rho_f = L_f, as in the paper, leaves no gamma
    assert len(both) == 1
    assert "gamma = 2.1 is not below" in both[0]


def steep():
    """f = sum log cosh(3 (y - sin x)) / 3 + |y - sin x|^2 / 4: curvature between 1/2 and 7/2, f_yyy at most 7."""
    return meha.Problem(
        upper=lambda x, y: (x.square() + 1).sqrt().sum() + ((y - 1).square() + 1).sqrt().sum(),
        lower=lambda x, y: ((3 * (y - x.sin())).cosh().log() / 3 + (y - x.sin()).square() / 4).sum(),
    )


@pytest.mark.parametrize("gamma", [2.0, 2.5, 20.0])
@pytest.mark.parametrize("c", [10.0, 100.0])
def test_bounds_of_the_theorem_on_the_hypergradient(gamma, c):
    """|y - y*(x)| and the distance of the residual to the hypergradient, at points near to and far from y*(x) = sin x."""
    problem, mu, n = steep(), 0.5, 3
    slope = math.sqrt(n)
    constants = Constants(L_F=1.0, L_f=7.0, rho_f=0.0)
    tightest = math.inf
    for seed in range(12):
        x = normal(n, seed=seed)
        y = x.sin() + normal(n, seed=100 + seed) * (2.0 if seed % 3 == 0 else 1.0 / c)
        theta = envelope(problem, x, y, gamma, tol=1e-12).theta
        total = lambda a, b: problem.upper(a, b) + c * problem.lower(a, b)  # noqa: E731
        F_x, F_y = torch.autograd.functional.jacobian(total, (x, y))
        v_x = torch.autograd.functional.jacobian(lambda a: problem.lower(a, theta), x)  # noqa: B023
        R_x, R_y = F_x - c * v_x, F_y - c * (y - theta) / gamma
        residual, error = float(R_y.norm()), float((y - x.sin()).norm())
        paper = response_bound(mu=mu, c=c, slope=slope, residual=residual)
        sharp = response_bound(mu=mu, c=c, slope=slope, residual=residual, gamma=gamma)
        assert error <= sharp <= paper
        tightest = min(tightest, sharp / error)
        if residual <= slope:
            exact = hypergradient(problem, x, y, tol=1e-12)
            bound = hypergradient_bound(constants, mu=mu, gamma=gamma, c=c, slope=slope, residual=residual, L_f2=8.0)
            assert float((exact - R_x).norm()) <= bound
    assert tightest < 10


def test_hypergradient_bound_by_hand():
    known = Constants(L_F=2.0, L_f=3.0, rho_f=0.0)
    spread, L_Phi = 7.0, 7.0 * (2 + 0.1 * 4 / 0.5)
    L_mu = 6 * 0.1 / 0.5 * spread * (2 + 6 * 4 * 0.1 / 0.5) + 6 * L_Phi * 0.1 / (0.25 * 3)
    numbers = dict(mu=0.5, gamma=3.0, c=50.0, slope=0.1, L_f2=4.0)
    assert hypergradient_bound(known, residual=0.05, **numbers) == pytest.approx(L_mu / 50 + 6 * 0.05, rel=1e-12)
    with pytest.raises(ValueError, match=r"residual: must not exceed slope = 0.1, got 0.2"):
        hypergradient_bound(known, residual=0.2, **numbers)
    with pytest.raises(ValueError, match="gamma: must be at least 1/mu = 2"):
        hypergradient_bound(known, residual=0.05, **{**numbers, "gamma": 1.0})


def wells(**parts):
    """F = (x - 0.3)^2 + (y - 0.2)^2, f = (y^2 - 1)^2 / 4: y = 0 is a maximum of f, and its curvature there is -1."""
    return meha.Problem(
        upper=lambda x, y: (x - 0.3).square().sum() + (y - 0.2).square().sum(),
        lower=lambda x, y: (y.square() - 1).square().sum() / 4 + 0 * x.sum(),
        **parts,
    )


def test_the_gap_vanishes_at_stationary_points_that_are_no_minimisers():
    """The equivalence theorem: for gamma < 1/rho, gap = 0 means stationary, minimal or not; above, it excludes the maximum."""
    problem, x = wells(), number([0.0])
    for y in (-1.0, 0.0, 1.0):
        assert gap(problem, x, number([y]), 0.9) == pytest.approx(0, abs=1e-12)
    for y in (-1.3, -0.5, 0.05, 0.8):
        assert gap(problem, x, number([y]), 0.9) > 1e-5
    value = [gap(problem, x, number([y]), 4.0) for y in (-1.0, 1e-3, 1.0)]
    assert value[0] == pytest.approx(0, abs=1e-12)
    assert value[2] == pytest.approx(0, abs=1e-12)
    assert value[1] > 0.01  # beside the maximum, from where the inner solver finds better points


def test_the_gap_vanishes_at_stationary_points_with_a_kink_and_a_set():
    """f = -y^2/2, g = |y|/2, Y = [-1, 2]: stationary at -1 (held by Y), -1/2 (a maximum), 0 (the kink), 1/2, 2 (held)."""
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: -y.square().sum() / 2, nonsmooth=L1(0.5), y_set=Box(-1.0, 2.0))
    x = number([0.0])
    for y in (-1.0, -0.5, 0.0, 0.5, 2.0):
        assert gap(problem, x, number([y]), 0.6) == pytest.approx(0, abs=1e-12)
    for y in (-0.9, -0.3, 0.2, 1.0, 1.9):
        assert gap(problem, x, number([y]), 0.6) > 1e-3


@pytest.mark.parametrize("c", [1.0, 10.0, 100.0, 1e4])
def test_solutions_of_the_penalised_problem_tend_to_that_of_the_reformulation(c):
    """F is best at y = 0.2, and y = 0, the maximum of f, is the stationary point nearest to it: the limit of y_c.

    Near y = 0 and for gamma = 1/2, theta solves theta^3 + theta = 2 y and the gap is y^2/2 to second order, so that
    y_c = 0.4 / (2 + c) to first order.
    """
    problem, gamma = wells(), 0.5
    grid = torch.linspace(-1.6, 1.6, 3201, dtype=torch.float64)
    # theta^3 - theta + (theta - y) / gamma = 0 is theta^3 + theta = 2 y
    q = (grid.square() + 1 / 27).sqrt()
    theta = (grid + q).pow(1 / 3) - (q - grid).pow(1 / 3)
    f = (grid.square() - 1).square() / 4
    v = (theta.square() - 1).square() / 4 + (theta - grid).square() / (2 * gamma)
    psi = (grid - 0.2).square() + c * (f - v)
    best = float(grid[psi.argmin()])
    assert best == pytest.approx(0.4 / (2 + c), abs=0.02 if c == 1 else 2e-3)
    x, y = number([0.3]), number([0.4 / (2 + c)])
    for _ in range(30):  # Newton's method on psi_c in y, by differences of its derivative
        slope = [float(2 * (t - 0.2) + c * (t**3 - t - (t - _root(t)) / gamma)) for t in (y, y + 1e-6, y - 1e-6)]
        y = y - slope[0] * 2e-6 / (slope[1] - slope[2])
    assert float(y) == pytest.approx(best, abs=1e-3)
    for residual in (prox_residual, subgradient_residual):
        assert residual(problem, x, y, gamma, c, tol=1e-13) < 1e-6 * (1 + c)
        assert residual(problem, x, y + 0.1, gamma, c, tol=1e-13) > 0.1
    assert abs(float(y)) < 0.5 / c


def _root(y):
    """The real solution of theta^3 + theta = 2 y."""
    q = (y.square() + 1 / 27).sqrt()
    return (y + q).pow(1 / 3) - (q - y).sign() * (q - y).abs().pow(1 / 3)
