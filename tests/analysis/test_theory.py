"""Constants, the ranges that the theorem admits, and the warnings of runs outside."""

import math
import warnings

import pytest
import torch

import meha
from meha.analysis.theory import Constants, TheoryWarning, check, estimate, eta_range, gamma_range
from meha.methods.parameters import parameters
from meha.problem.nonsmooth import MCP


def test_ranges_by_hand():
    known = Constants(L_F=1.0, L_f=3.0, rho_f=1.0, rho_g=0.25, f_yy=2.0)
    assert gamma_range(known).upper == pytest.approx(0.4)
    assert eta_range(known, 0.2).upper == pytest.approx((5 - 1) / (2 + 5) ** 2)
    assert gamma_range(Constants(L_F=1.0, L_f=1.0, rho_f=0.0)).upper == math.inf
    assert 0.4 not in gamma_range(known)
    assert 0.39 in gamma_range(known)
    assert 4 / 49 in eta_range(known, 0.2)
    assert 0.0 not in eta_range(known, 0.2)
    steep = Constants(L_F=1.0, L_f=0.1, rho_f=0.0, rho_g=40.0)
    assert eta_range(steep, 0.1).upper == pytest.approx(1 / 40)
    assert 1 / 40 not in eta_range(steep, 0.1)


def test_a_failing_inequality_is_named_with_its_factor():
    known = Constants(L_F=1.0, L_f=1.0, rho_f=1.0)
    assert check(known, gamma=0.4, eta=0.1, p=0.49) == []
    gamma, eta = check(known, gamma=5.0, eta=0.1)
    assert "gamma = 5 is not below 1/(2 rho_f + 2 rho_g) = 0.5" in gamma
    assert "10 times too large" in gamma
    assert "no eta is admitted" in eta
    (eta,) = check(known, gamma=0.4, eta=0.4)
    assert "eta = 0.4 is above (1/gamma - rho_f)/(f_yy + 1/gamma)^2 = 0.1224" in eta
    assert "3.27 times too large" in eta
    assert "p = 0.5" in check(known, gamma=0.4, p=0.5)[0]


def test_a_run_outside_warns_and_runs():
    problem = meha.problems.sine(1)
    with pytest.warns(TheoryWarning, match=r"gamma = 200 is not below .* 400 times too large"):
        run = problem.preset("paper").start(problem, problem.x0, problem.y0)
    run.step()


@pytest.mark.parametrize(
    "make",
    [
        meha.problems.strong_convex,
        meha.problems.merely_convex,
        meha.problems.sine,
        meha.problems.lasso,
        lambda n: meha.problems.group_lasso(6 * n, groups=n),
    ],
)
@pytest.mark.parametrize("n", [2, 10])
def test_exact_constants_of_the_problems_and_the_default_rule(make, n):
    """The estimate approaches the stated constants from below, and the default rule is inside the theorem's range."""
    problem = make(n)
    exact = problem.constants
    estimated = estimate(problem, problem.x0, problem.y0, points=6, rounds=40)
    for name in ("L_F", "L_f", "rho_f", "F_xx", "F_yy", "F_xy", "f_yy", "f_xy", "L_g"):
        assert getattr(estimated, name) <= getattr(exact, name) * (1 + 1e-4) + 1e-6, name
        assert getattr(estimated, name) >= getattr(exact, name) * 0.75 - 1e-6, name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preset = problem.preset("theory")
        preset.start(problem, problem.x0, problem.y0)
    assert check(exact, gamma=preset.gamma, eta=preset.eta, p=preset.p) == []
    assert preset.beta <= preset.eta


def test_estimate_on_a_quadratic():
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    H = H + H.T
    B = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    problem = meha.Problem(
        upper=lambda x, y: 1.5 * x.square().sum() + x.sum() * y["u"].sum(),
        lower=lambda x, y: 0.5 * y["u"] @ H @ y["u"] + x @ B @ y["u"],
        nonsmooth=MCP(0.1, a=4.0),
    )
    x, y = torch.zeros(3, dtype=torch.float64), {"u": torch.zeros(5, dtype=torch.float64)}
    estimated = estimate(problem, x, y, rounds=200)
    eigenvalues = torch.linalg.eigvalsh(H)
    assert estimated.f_yy == pytest.approx(float(eigenvalues.abs().max()), rel=1e-3)
    assert estimated.rho_f == pytest.approx(-float(eigenvalues.min()), rel=1e-3)
    assert estimated.f_xy == pytest.approx(float(torch.linalg.matrix_norm(B, 2)), rel=1e-3)
    assert estimated.F_xx == pytest.approx(3.0, rel=1e-6)
    assert estimated.F_yy == 0
    assert estimated.F_xy == pytest.approx(math.sqrt(15), rel=1e-6)
    assert estimated.rho_g == 0.25


@pytest.mark.parametrize("scale", [0.01, 100.0])
@pytest.mark.parametrize("what", ["x", "y", "F", "f"])
@pytest.mark.parametrize("make", [meha.problems.strong_convex, meha.problems.lasso], ids=["strong convex", "lasso"])
def test_the_default_rule_is_scale_free(make, what, scale):
    """Measured in other units, the same path is taken."""
    problem = make(4)
    units = {name: scale if name == what else 1.0 for name in ("x", "y", "F", "f")}
    a, b, F, f = units["x"], units["y"], units["F"], units["f"]
    scaled = meha.Problem(
        upper=lambda x, y: F * problem.upper(x / a, y / b),
        lower=lambda x, y: f * problem.lower(x / a, y / b),
        nonsmooth=None if problem.nonsmooth is None else meha.nonsmooth.L1(lambda x: f * x / a / b),
        x_set=None if problem.x_set is None else meha.sets.Box(0.0, a),
        constants=rescaled(problem, a, b, F, f),
    )
    run = meha.MEHA(p=0.49).start(problem, problem.x0, problem.y0)
    other = meha.MEHA(p=0.49).start(scaled, a * problem.x0, b * problem.y0)
    for _ in range(50):
        run.step()
        other.step()
    assert torch.allclose(other.x / a, run.x, rtol=1e-6, atol=1e-9)
    assert torch.allclose(other.y / b, run.y, rtol=1e-6, atol=1e-9)


def rescaled(problem, a, b, F, f):
    exact = problem.constants
    return Constants(
        L_F=1.0,
        L_f=1.0,
        rho_f=exact.rho_f * f / b**2,
        F_xx=exact.F_xx * F / a**2,
        F_yy=exact.F_yy * F / b**2,
        F_xy=exact.F_xy * F / a / b,
        f_yy=exact.f_yy * f / b**2,
        f_xy=exact.f_xy * f / a / b,
        L_g=exact.L_g * f / a / b,
    )


def test_the_rule_keeps_what_is_given():
    problem = meha.problems.sine(3)
    run = meha.MEHA(gamma=0.2, alpha=0.01).start(problem, problem.x0, problem.y0)
    expected = parameters(problem.constants, run.method.c, gamma=0.2)
    assert (run.method.gamma, run.method.alpha) == (0.2, 0.01)
    assert (run.method.beta, run.method.eta, run.method.p) == (expected["beta"], expected["eta"], 0.49)
    custom = meha.MEHA(c=lambda k: 3.0 + k).start(problem, problem.x0, problem.y0)
    assert custom.method.p is None
    assert custom.step()["c"] == 3.0
    assert custom.step()["c"] == 4.0


def test_wrong_constants_are_refused():
    with pytest.raises(ValueError, match="rho_f"):
        Constants(L_F=1.0, L_f=1.0, rho_f=-1.0)


def test_what_the_choice_costs_is_counted():
    problem = meha.problems.sine(3)
    run = meha.MEHA(p=0.49).start(meha.Problem(problem.upper, problem.lower), problem.x0, problem.y0)
    upper, lower = run.counts.upper, run.counts.lower
    assert 3 * 6 <= upper <= 8 * 3 * 8
    assert 3 * 8 <= lower <= 8 * 3 * 8
    run.step()
    assert (run.counts.upper, run.counts.lower) == (upper + 2, lower + 4)
    assert problem.preset("theory").start(problem, problem.x0, problem.y0).counts.lower == 0


def test_points_outside_the_domain_are_left_out():
    """An objective that raises away from the start does not stop the estimate; one that raises at the start does."""

    def lower(x, y):
        if bool((y.abs() > 0.5).any()):
            raise ValueError("out of domain")
        return (y - x).square().sum()

    problem = meha.Problem(lambda x, y: (x + y).square().sum(), lower)
    zero = torch.zeros(3, dtype=torch.float64)
    assert estimate(problem, zero, zero, points=5).f_yy == pytest.approx(2.0)
    with pytest.raises(ValueError, match="out of domain"):
        estimate(problem, zero, zero + 1)


def test_isolated_negative_curvature_in_high_dimension_is_found():
    """One direction in 20,000 bends down; random directions hardly see it."""
    weights = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[0] = -0.4
    problem = meha.Problem(lambda x, y: (y - x).square().sum(), lambda x, y: 0.5 * (weights * y * y).sum() + x.sum() * y.sum())
    estimated = estimate(problem, torch.zeros(1, dtype=torch.float64), torch.zeros(20_000, dtype=torch.float64), points=1)
    assert estimated.rho_f == pytest.approx(0.4, rel=0.1)
    assert estimated.f_yy == pytest.approx(1.0, rel=0.05)


def test_curvature_behind_a_large_gradient_in_single_precision():
    target = torch.tensor([1e4, -2e4, 3e4])
    problem = meha.Problem(
        lambda x, y: 50 * (y - target).square().sum() + 0.5 * x.square().sum(),
        lambda x, y: 50 * (y - x - target).square().sum(),
    )
    estimated = estimate(problem, torch.zeros(3), torch.zeros(3))
    assert estimated.f_yy == pytest.approx(100, rel=0.1)
    assert estimated.F_yy == pytest.approx(100, rel=0.1)
    solution = meha.solve(problem, torch.zeros(3), torch.zeros(3), max_steps=500)
    assert torch.allclose(solution.y - solution.x, target, rtol=0.1)


def test_the_warning_points_at_the_caller():
    problem = meha.problems.sine(1)
    for call in (
        lambda: problem.preset("paper").start(problem, problem.x0, problem.y0),
        lambda: meha.solve(problem, problem.x0, problem.y0, problem.preset("paper"), max_steps=1),
    ):
        with pytest.warns(TheoryWarning) as caught:
            call()
        assert caught[0].filename == __file__


def test_what_the_theorem_does_not_cover_is_said():
    problem = meha.problems.sine(1)

    def theory(**numbers):
        run = meha.MEHA(alpha=0.1, beta=0.1, gamma=0.4, **numbers).start(problem, problem.x0, problem.y0)
        return run.method.report(run)["theory"]

    inside = "fit the convergence theorem; alpha and beta not looked at"
    assert theory(eta=0.1, c=lambda k: 1.5**k) == f"gamma, eta {inside}; not covered: c as a function"
    assert theory(theta_optimizer=torch.optim.SGD, c=1.0, p=0.1) == f"gamma, p {inside}; not covered: theta_optimizer"
    assert "eta = 4000.04 is above" in theory(eta=lambda k: 0.04 * (k + 1), c=1.0, p=0.1)
