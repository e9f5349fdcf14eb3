"""Total variation, fused lasso and ordered weighted L1: proxes against cvxpy, optimality, weights, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meha
from meha.problem.nonsmooth import L1, FusedLasso, OrderedL1, TotalVariation

SEEDS = st.integers(0, 2**31 - 1)
many = settings(max_examples=40, deadline=None, database=None)


def by_cvxpy(y, term):
    """The prox by an interior point method, polished to its last digits."""
    cvxpy = pytest.importorskip("cvxpy")
    u = cvxpy.Variable(len(y))
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(u - y) / 2 + term(cvxpy, u)))
    tight = dict(tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13, tol_ktratio=1e-10)
    problem.solve(solver=cvxpy.CLARABEL, **tight)
    return u.value


def ordered(cvxpy, u, w):
    """sum_i w_i |u|_(i) as sums of largest entries."""
    steps = w - np.append(w[1:], 0.0)
    return sum(step * cvxpy.sum_largest(cvxpy.abs(u), i + 1) for i, step in enumerate(steps) if step > 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [2, 7, 30])
def test_proxes_agree_with_cvxpy(seed, n):
    rng = np.random.default_rng([seed, n])
    y, step = rng.normal(size=n) + 2 * (np.arange(n) > n / 2), 0.7
    w, v = rng.uniform(0, 1.5, size=n - 1), 0.4
    falling = np.sort(rng.uniform(0, 1.5, size=n))[::-1].copy()
    cases = [
        (TotalVariation(0.9), lambda c, u: step * 0.9 * c.tv(u)),
        (TotalVariation(torch.from_numpy(w)), lambda c, u: step * c.abs(c.diff(u)) @ w),
        (FusedLasso(v, torch.from_numpy(w)), lambda c, u: step * (v * c.norm1(u) + c.abs(c.diff(u)) @ w)),
        (OrderedL1(torch.from_numpy(falling)), lambda c, u: step * ordered(c, u, falling)),
    ]
    for term, stated in cases:
        got = term.prox(None, torch.from_numpy(y), step).numpy()
        np.testing.assert_allclose(got, by_cvxpy(y, stated), atol=1e-8, rtol=0)


@many
@given(SEEDS)
def test_the_prox_of_the_variation_is_optimal(seed):
    """The dual certificate: sums of y - u stay within the weights, and reach them where u jumps."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 200))
    y, w = rng.normal(size=n).round(1), rng.uniform(0, 2, size=n - 1).round(1)
    u = TotalVariation(torch.from_numpy(w)).prox(None, torch.from_numpy(y), 1.0).numpy()
    tension = np.cumsum(y - u)
    assert abs(tension[-1]) < 1e-9
    assert (np.abs(tension[:-1]) <= w + 1e-9).all()
    jumps = np.diff(u)
    moving = np.abs(jumps) > 1e-9
    np.testing.assert_allclose(tension[:-1][moving], (-np.sign(jumps) * w)[moving], atol=1e-9)


@many
@given(SEEDS)
def test_the_prox_of_the_ordered_norm_does_not_expand_and_keeps_order(seed):
    rng = np.random.default_rng(seed)
    a, b = torch.from_numpy(rng.normal(size=(2, 12)).round(1))
    w = torch.from_numpy(np.sort(rng.uniform(0, 1, size=12))[::-1].copy())
    term = OrderedL1(w)
    p, q = term.prox(None, a, 1.0), term.prox(None, b, 1.0)
    assert float((p - q).norm()) <= float((a - b).norm()) + 1e-12
    order = a.abs().argsort(descending=True)
    assert bool((p.abs()[order].diff() <= 1e-12).all())
    assert bool((p * a >= 0).all())


def test_equal_weights_are_the_norm():
    y = torch.tensor([3.0, -0.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(OrderedL1(0.8).prox(None, y, 0.5), L1(0.8).prox(None, y, 0.5))
    assert float(OrderedL1(0.8).value(None, y)) == pytest.approx(0.8 * 5)


def test_rows_are_separate_and_structures_are_kept():
    y = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    term = TotalVariation(0.5)
    rows = [term.prox(None, row, 0.7) for row in y.reshape(-1, 6)]
    torch.testing.assert_close(term.prox(None, {"a": y, "b": y[0]}, 0.7)["a"].reshape(-1, 6), torch.stack(rows))


def test_gradients_in_x():
    y = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64)
    x = torch.tensor([0.3, 0.2], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(TotalVariation(lambda x: x).value(x, y), x)
    assert slope.tolist() == [2.0, 5.0]
    x = torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(OrderedL1(lambda x: x).value(x, y), x)
    assert slope.tolist() == [3.0, 2.0, 1.0]


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="sort them"):
        OrderedL1(torch.tensor([1.0, 2.0])).prox(None, torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match="two or more coordinates"):
        TotalVariation().prox(None, torch.zeros(1), 1.0)
    with pytest.raises(ValueError, match="one number"):
        FusedLasso(torch.tensor([1.0, 2.0, 3.0]), 1.0).prox(None, torch.zeros(3), 1.0)


def test_a_weight_of_the_variation_is_learned():
    """The default chooses the smoothing of a noisy step; a grid finds no better F."""
    rng = np.random.default_rng(0)
    truth = np.repeat([0.0, 2.0], 10)
    a, b = torch.from_numpy(truth + 0.4 * rng.normal(size=(2, 20)))
    term = TotalVariation(lambda x: x.exp())
    problem = meha.Problem(
        upper=lambda x, y: (y - b).square().mean(), lower=lambda x, y: 0.5 * (y - a).square().sum(), nonsmooth=term
    )
    grid = [
        float((term.prox(torch.tensor(t, dtype=torch.float64), a, 1.0) - b).square().mean()) for t in np.linspace(-4, 3, 141)
    ]
    solution = meha.solve(problem, torch.zeros((), dtype=torch.float64), a, max_steps=300)
    y = term.prox(solution.x, a, 1.0)
    assert float((y - b).square().mean()) < min(grid) * 1.02
