"""The second-order engine: faces, Hessians, hypergradients, steps in x, verdicts, and its part in the default method."""

import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

import meha
from meha.engines.hyper_objective import HyperValue, hypergradient
from meha.engines.implicit_newton import HyperDescent, search_x, shortest_combination
from meha.lower.expansion import Expansion
from meha.lower.newton_on_faces import (
    Faces,
    Hessians,
    LowerResponse,
    NewtonLower,
    SmoothFace,
    colours,
    factorise,
    unknown_faces,
)
from meha.methods import Default
from meha.problem.nonsmooth import L1, MCP, SCAD, ElasticNet, GroupL2, NonNegativeL1, Nuclear, SparseGroup
from meha.problem.oracle import Oracle
from meha.problem.sets import AffineSet, Box, L2Ball, LinfBall, NonNegative, Simplex
from meha.tensors.variables import Variable
from meha.tensors.vectors import Clock, Flat

F64 = torch.float64


def data(n=30, p=8, seed=0, dtype=F64):
    rng = np.random.default_rng(seed)
    A, A_val = rng.normal(size=(2, n, p))
    y = np.where(np.arange(p) % 3, 0.0, 1.0 + np.arange(p) / p)
    b, b_val = (M @ y + 0.5 * rng.normal(size=n) for M in (A, A_val))
    return [torch.tensor(part, dtype=dtype) for part in (A, b, A_val, b_val)]


def least_squares(term=None, y_set=None, x_set=None, penalty=None, seed=0, p=8):
    A, b, A_val, b_val = data(p=p, seed=seed)
    return meha.Problem(
        lambda x, y: 0.5 * (A_val @ y - b_val).square().mean(),
        lambda x, y: 0.5 * (A @ y - b).square().mean() + (0.0 if penalty is None else penalty(x, y)),
        nonsmooth=term,
        y_set=y_set,
        x_set=x_set,
    )


def lower_of(problem, x, y):
    x, y = Variable(x, "x"), Variable(y, "y")
    oracle, clock = Oracle(problem, x, y), Clock()
    flat_x, flat_y = Flat(x), Flat(y)
    return NewtonLower(oracle, flat_x, flat_y, clock)


def value_at(problem, x, y):
    """The hyper-objective and its gradient at x, by a solve from y."""
    lower = lower_of(problem, x, y)
    with torch.no_grad():
        response = lower.solve(lower.flat_x.at(x.reshape(-1)), y.reshape(-1))
        assert response.solved
        return hypergradient(lower, response), response, lower


def engine_on(problem, x, y, most=200):
    """The engine alone, until it ends."""
    x, y = Variable(x, "x"), Variable(y, "y")
    engine = HyperDescent(Oracle(problem, x, y), x, y, 1e-6)
    with torch.no_grad():
        while engine.verdict is None and engine.steps < most:
            engine.advance()
    return engine


def confirmed(solution):
    """Whether the engine's answer was verified, and no pass was necessary."""
    return solution.status is meha.Status.CONVERGED and solution.report["engine"] == "ImplicitNewton"


# The parts


def test_second_derivatives_are_those_of_autograd():
    def lower(x, y):
        return (x["a"].sum() * y["u"].pow(3)).sum() + (y["u"].sum() * y["v"]).sin().sum() * x["b"].square()

    problem = meha.Problem(lambda x, y: y["u"].sum(), lower, nonsmooth=GroupL2([2], lambda x: x["b"].exp(), part="u"))
    x = Variable({"a": torch.tensor([0.3, 0.4], dtype=F64), "b": torch.tensor(0.7, dtype=F64)}, "x")
    y = Variable({"u": torch.tensor([1.0, -0.5], dtype=F64), "v": torch.tensor([[0.2]], dtype=F64)}, "y")
    flat_x, flat_y, oracle = Flat(x), Flat(y), Oracle(problem, x, y)
    at = Expansion(oracle, flat_x.at(flat_x.read()), flat_y.read(), flat_x, flat_y, Clock())

    def joined(z, g=True):
        x, y = z[:3], z[3:]
        f = lower({"a": x[:2], "b": x[2]}, {"u": y[:2], "v": y[2:].reshape(1, 1)})
        return f + x[2].exp() * y[:2].norm() if g else f

    z = torch.cat([flat_x.read(), flat_y.read()])
    whole, smooth = (torch.autograd.functional.hessian(lambda z, g=g: joined(z, g), z) for g in (True, False))
    v = torch.tensor([0.3, -1.0, 2.0], dtype=F64)
    assert at.value == pytest.approx(float(joined(z)), rel=1e-14)
    assert torch.allclose(at.rows(), smooth[3:, 3:], atol=1e-12)
    assert torch.allclose(at.rows(torch.tensor([2, 0])), smooth[[5, 3], 3:], atol=1e-12)
    assert torch.allclose(at.rows() + at.g_rows(None, separable=False), whole[3:, 3:], atol=1e-12)
    assert torch.allclose(at.product(v), whole[3:, 3:] @ v, atol=1e-12)
    assert torch.allclose(at.product(v, g=False), smooth[3:, 3:] @ v, atol=1e-12)
    assert torch.allclose(at.cross(v), whole[:3, 3:] @ v, atol=1e-12)
    assert oracle.counts == meha.problem.oracle.Counts(upper=0, lower=1, hvp=3 + 2 + 3 + 2 + 1)


@pytest.mark.parametrize(
    ("term", "y_set", "point", "free", "equations"),
    [
        (L1(1.0), None, [0.0, 2.0, -3.0], [1, 2], 0),
        (ElasticNet(), None, [0.0, 2.0, 0.0], [1], 0),
        (NonNegativeL1(1.0), None, [0.0, 2.0, 0.0], [1], 0),
        (GroupL2([2, 1]), None, [0.0, 2.0, 0.0], [0, 1], 0),
        (GroupL2([[0, 2]]), None, [0.0, 2.0, 0.0], [1], 0),
        (SparseGroup([2, 1]), None, [0.0, 2.0, 1.0], [1, 2], 0),
        (None, Box(0.0, 2.0), [0.0, 2.0, 1.0], [2], 0),
        (None, NonNegative(), [0.0, 2.0, 1.0], [1, 2], 0),
        (None, LinfBall(2.0, 1.0), [-1.0, 2.0, 3.0], [1], 0),
        (None, Simplex(3.0), [0.0, 2.0, 1.0], [1, 2], 1),
        (None, AffineSet(torch.ones(1, 3), torch.tensor([3.0])), [0.0, 2.0, 1.0], [0, 1, 2], 1),
        (L1(1.0), Box(-1.0, 2.0), [0.0, 2.0, 1.0], [2], 0),
    ],
)
def test_faces(term, y_set, point, free, equations):
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: y.sum(), nonsmooth=term, y_set=y_set)
    y = Variable(torch.tensor(point, dtype=F64), "y")
    faces = Faces(Oracle(problem, Variable(torch.ones(1), "x"), y), Flat(y))
    face = faces.at(y.leaves[0].detach())
    assert face.index.tolist() == free
    assert (0 if face.rows is None else len(face.rows)) == equations
    if equations:
        assert torch.allclose(face.rows @ face.basis, torch.zeros(1, len(free) - 1, dtype=F64), atol=1e-14)
        assert torch.allclose(face.basis.T @ face.basis, torch.eye(len(free) - 1, dtype=F64), atol=1e-14)


@pytest.mark.parametrize(
    ("term", "y_set", "named"), [(Nuclear(1.0), None, "Nuclear"), (None, L2Ball(), "L2Ball"), (L1(1.0), Box(0.0, 1.0), "")]
)
def test_faces_that_are_not_known(term, y_set, named):
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: y.square().sum(), nonsmooth=term, y_set=y_set)
    assert unknown_faces(problem, Variable(torch.zeros(2, 2), "y")) == named


def test_factors():
    from meha.lower.newton_on_faces import SmoothFace

    rng = np.random.default_rng(0)
    Q = torch.linalg.qr(torch.tensor(rng.normal(size=(4, 4))))[0]
    right = torch.tensor(rng.normal(size=4))
    definite = Q @ torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)) @ Q.T
    factor = factorise(definite, SmoothFace(), Clock())
    assert factor.definite
    assert torch.allclose(definite @ factor.solve(right), right)
    indefinite = Q @ torch.diag(torch.tensor([-1.0, 2.0, 3.0, 4.0], dtype=F64)) @ Q.T
    factor = factorise(indefinite, SmoothFace(), Clock())
    assert not factor.definite
    assert factor.indefinite
    assert float(right @ factor.solve(right)) > 0  # a descent direction
    down = factor.downwards(4)
    assert float(down @ indefinite @ down) < 0
    singular = Q @ torch.diag(torch.tensor([0.0, 2.0, 3.0, 4.0], dtype=F64)) @ Q.T
    factor = factorise(singular, SmoothFace(), Clock())
    assert not factor.definite
    assert not factor.indefinite
    v, missed = factor.shortest(singular @ right)
    assert missed < 1e-12
    assert torch.allclose(singular @ v, singular @ right)
    assert factor.shortest(right)[1] > 0.01


def test_the_shortest_combination():
    rows = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [0.0, 5.0]], dtype=F64)
    assert torch.allclose(shortest_combination(rows), torch.tensor([0.0, 1.0], dtype=F64), atol=1e-6)
    assert float(shortest_combination(torch.cat([rows, -rows])).norm()) < 1e-6


# The lower level


@pytest.mark.parametrize("seed", [0, 1])
def test_the_lower_level_against_scipy(seed):
    A, b, _, _ = data(seed=seed)
    signs = b.sign()
    problem = meha.Problem(
        lambda x, y: y.sum(), lambda x, y: torch.nn.functional.softplus(-signs * (A @ y)).sum() + x.exp() * y.square().sum()
    )
    x, y = torch.tensor(-2.0, dtype=F64), torch.zeros(8, dtype=F64)
    _, response, _ = value_at(problem, x, y)
    M, s = A.numpy(), signs.numpy()
    expected = minimize(
        lambda y: np.logaddexp(0, -s * (M @ y)).sum() + math.exp(-2) * y @ y,
        np.zeros(8),
        jac=lambda y: M.T @ (-s / (1 + np.exp(s * (M @ y)))) + 2 * math.exp(-2) * y,
        tol=1e-12,
    )
    assert np.abs(response.y.numpy() - expected.x).max() < 1e-6
    assert response.error < 1e-10


def test_a_quadratic_is_recognised_and_factorised_once():
    problem = least_squares(penalty=lambda x, y: 0.5 * y @ y - x.square().sum() * y[0])
    x, y = torch.tensor([0.5], dtype=F64), torch.ones(8, dtype=F64)
    _, _, lower = value_at(problem, x, y)
    assert lower.hessians.quadratic
    counts = lower.oracle.counts
    for k in range(3):
        before = counts.hvp
        with torch.no_grad():
            response = lower.solve(lower.flat_x.at(x + k), y.clone())
        assert response.solved
        assert counts.hvp - before <= 2  # no new Hessian, which takes 8


def test_a_hessian_that_varies_with_y_is_not_taken_for_constant():
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: (y - x).cosh().sum() + 0.05 * y.square().sum())
    _, response, lower = value_at(problem, torch.tensor([2.0], dtype=F64), torch.zeros(3, dtype=F64))
    assert not lower.hessians.quadratic
    y = response.y
    assert float(((y - 2.0).sinh() + 0.1 * y).abs().max()) < 1e-9


def test_an_f_that_is_quadratic_near_the_start_only_is_looked_at_again():
    """f has the curvature 1 up to y = 1, and 1/4 beyond: at x = 2, y is 5 and moves four times as fast as x."""
    problem = meha.Problem(
        lambda x, y: y.sum(),
        lambda x, y: (0.5 * y.square() - 0.375 * (y - 1).clamp(min=0).square() - x * y).sum(),
    )
    lower = lower_of(problem, torch.full((1,), 0.3, dtype=F64), torch.zeros(1, dtype=F64))
    with torch.no_grad():
        for x in (0.3, 0.2):
            response = lower.solve(lower.flat_x.at(torch.full((1,), x, dtype=F64)), torch.zeros(1, dtype=F64))
            assert float(response.y) == pytest.approx(x)
        assert lower.hessians.quadratic
        response = lower.solve(lower.flat_x.at(torch.full((1,), 2.0, dtype=F64)), response.y)
        assert float(response.y) == pytest.approx(5.0)
        assert float(hypergradient(lower, response).gradient) == pytest.approx(4.0)


def test_saddles_are_left():
    """f = (y^2 - 1)^2 from the saddle y = 0 in one coordinate, and from the side in the other."""
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: ((y.square() - 1).square()).sum() + 0 * x.sum())
    _, response, _ = value_at(problem, torch.ones(1, dtype=F64), torch.tensor([0.0, 0.1], dtype=F64))
    assert torch.allclose(response.y.abs(), torch.ones(2, dtype=F64))


def test_large_lower_levels_use_conjugate_gradients(monkeypatch):
    """With and without dense Hessians: the same solution and hypergradient."""
    A, b, _, _ = data()
    problem = meha.Problem(
        lambda x, y: (y - 0.1).square().sum(),
        lambda x, y: torch.nn.functional.softplus(-b.sign() * (A @ y)).mean() + 0.5 * (x.exp() * y.square()).sum(),
        nonsmooth=L1(0.02),
        x_set=Box(-4.0, 2.0),
    )
    x, y = torch.full((8,), -3.0, dtype=F64), torch.zeros(8, dtype=F64)
    dense, _, lower = value_at(problem, x, y)
    assert lower.factor is not None

    from meha.lower import newton_on_faces as module

    monkeypatch.setattr(module, "TUNING", dataclasses.replace(module.TUNING, dense=0))
    iterated, _, lower = value_at(problem, x, y)
    assert lower.factor is None
    assert torch.allclose(dense.y, iterated.y, atol=1e-9)
    assert torch.allclose(dense.gradient, iterated.gradient, rtol=1e-6, atol=1e-10)
    engine = engine_on(problem, x, y)
    assert engine.verdict.status is meha.Status.CONVERGED
    assert "no negative curvature met" in engine.verdict.message


# Hypergradients, against differences of exact solves


def soft(x):
    return x.exp()


TERMS = {
    "lasso, one weight": (L1(soft), None, 1),
    "lasso, weights": (L1(soft), None, 8),
    "elastic net": (ElasticNet(lambda x: x[:8].exp(), lambda x: x[8:].exp()), None, 16),
    "group lasso": (GroupL2([2, 3, 3], soft), None, 3),
    "sparse groups": (SparseGroup([2, 3, 3], lambda x: x[0].exp(), lambda x: x[1:].exp()), None, 4),
    "non-negative lasso": (NonNegativeL1(soft), None, 8),
    "SCAD": (SCAD(soft, a=5.0), None, 8),
    "MCP": (MCP(soft, a=5.0), None, 8),
    "lasso in a box": (L1(soft), Box(-0.8, 0.8), 8),
    "groups, non-negative": (GroupL2([2, 3, 3], soft), NonNegative(), 3),
}


@pytest.mark.parametrize("name", TERMS)
def test_hypergradients_of_terms(name):
    term, y_set, size = TERMS[name]
    problem = least_squares(term, y_set)
    x = torch.linspace(-2.2, -1.6, size, dtype=F64) + (1.5 if isinstance(term, GroupL2) else 0.0)
    value, response, _ = value_at(problem, x, torch.zeros(8, dtype=F64))
    free = response.face.index.numel()
    assert 0 < free < 8
    check_differences(problem, x, value)


@pytest.mark.parametrize(
    "y_set", [Box(-0.5, 0.9), NonNegative(), LinfBall(0.7), Simplex(2.0), AffineSet(torch.ones(1, 8), torch.ones(1))]
)
def test_hypergradients_of_sets(y_set):
    problem = least_squares(None, y_set, penalty=lambda x, y: 0.5 * (x.exp() * y * y).sum() - 0.1 * x @ y)
    x = torch.linspace(-2.0, -1.0, 8, dtype=F64)
    start = y_set.project(torch.zeros(8, dtype=F64))
    value, response, _ = value_at(problem, x, start)
    held = 8 - response.face.index.numel() + (0 if response.face.rows is None else len(response.face.rows))
    assert 0 < held < 8
    check_differences(problem, x, value)


def check_differences(problem, x, value):
    h = 1e-6
    for i in range(len(x)):
        move = torch.zeros_like(x)
        move[i] = h
        ends = [value_at(problem, x + sign * move, value.y)[0].F for sign in (1, -1)]
        assert float(value.gradient[i]) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4, abs=1e-8)
    expected = value_at(problem, x, 0.5 * value.y)[0] if problem.y_set is None else value  # another start, the same solution
    assert torch.allclose(expected.gradient, value.gradient, rtol=1e-6, atol=1e-10)


# Whole runs


def test_ridge_with_a_penalty_for_each_feature_against_scipy():
    A, b, A_val, b_val = data()
    x_set = Box(-6.0, 4.0)
    problem = least_squares(penalty=lambda x, y: 0.5 * (x.exp() * y * y).sum(), x_set=x_set)
    solution = meha.solve(problem, torch.zeros(8, dtype=F64), torch.zeros(8, dtype=F64))
    assert confirmed(solution)
    G, c = (A.T @ A / 30).numpy(), (A.T @ b / 30).numpy()
    M, t = A_val.numpy(), b_val.numpy()

    def exact(x):
        return np.linalg.solve(G + np.diag(np.exp(x)), c)

    def F(x):
        return 0.5 * np.square(M @ exact(x) - t).mean()

    x = solution.x.numpy()
    assert np.abs(solution.y.numpy() - exact(x)).max() < 1e-8
    found = minimize(F, np.zeros(8), method="L-BFGS-B", bounds=[(-6, 4)] * 8, options={"ftol": 1e-15, "gtol": 1e-10})
    assert solution.upper == pytest.approx(F(x), rel=1e-10)
    assert solution.upper <= found.fun * (1 + 1e-7)
    assert bool(((solution.x == -6) | (solution.x == 4)).any())  # bounds take part


def test_logistic_with_one_penalty_against_scipy():
    A, b, A_val, b_val = (part.numpy() for part in data(n=40, seed=3))
    s, s_val = np.sign(b), np.sign(b_val)

    def lower(x):
        def loss(y):
            return np.logaddexp(0, -s * (A @ y)).mean() + 0.5 * math.exp(x) * y @ y

        def slope(y):
            return A.T @ (-s / (1 + np.exp(s * (A @ y)))) / len(s) + math.exp(x) * y

        return minimize(loss, np.zeros(8), jac=slope, method="BFGS", options={"gtol": 1e-12}).x

    best = minimize_scalar(
        lambda x: np.logaddexp(0, -s_val * (A_val @ lower(x))).mean(), bounds=(-8, 2), options={"xatol": 1e-7}
    )
    tensors = [torch.tensor(part) for part in (A, s, A_val, s_val)]
    softplus = torch.nn.functional.softplus
    problem = meha.Problem(
        lambda x, y: softplus(-tensors[3] * (tensors[2] @ y)).mean(),
        lambda x, y: softplus(-tensors[1] * (tensors[0] @ y)).mean() + 0.5 * (x.exp() * y * y).sum(),
    )
    solution = meha.solve(problem, torch.zeros((), dtype=F64), torch.zeros(8, dtype=F64))
    assert confirmed(solution)
    assert float(solution.x) == pytest.approx(best.x, abs=1e-4)
    assert solution.upper == pytest.approx(best.fun, rel=1e-9)
    assert solution.counts.hvp > 0


def test_hundreds_of_weights():
    """The lasso with a weight for each of 200 features: one of many local solutions, at which F is stationary."""
    rng = np.random.default_rng(0)
    A, A_val = torch.tensor(rng.normal(size=(2, 60, 200)))
    b, b_val = (M[:, :6].sum(1) + 0.3 * torch.tensor(rng.normal(size=60)) for M in (A, A_val))
    problem = meha.Problem(
        lambda x, y: 0.5 * (A_val @ y - b_val).square().mean(),
        lambda x, y: 0.5 * (A @ y - b).square().mean(),
        nonsmooth=L1(soft),
        x_set=Box(-5.0, 1.0),
    )
    solution = meha.solve(problem, torch.full((200,), -1.0, dtype=F64), torch.zeros(200, dtype=F64))
    assert solution.status in (meha.Status.CONVERGED, meha.Status.LOCAL)
    assert solution.report["engine"] == "ImplicitNewton"
    start = float(problem.upper(None, torch.zeros(200, dtype=F64)))
    assert solution.upper < 0.05 * start
    value, _, _ = value_at(problem, solution.x, solution.y)
    free = (solution.x > -5) & (solution.x < 1)
    assert float(value.gradient[free].norm()) < 1e-3 * value.size


@pytest.mark.parametrize("x_set", [Simplex(), L2Ball(0.5)])
def test_other_sets_of_x(x_set):
    """Projected gradients: y = x, so that the answer is the projection of the target."""
    target = torch.tensor([0.7, 0.5, -0.4], dtype=F64)
    problem = meha.Problem(
        lambda x, y: (y - target).square().sum(), lambda x, y: (y - x).square().sum() + (y - x).pow(4).sum(), x_set=x_set
    )
    x0 = x_set.project(torch.zeros(3, dtype=F64))
    solution = meha.solve(problem, x0, torch.zeros(3, dtype=F64), max_steps=100)
    assert confirmed(solution)
    assert torch.allclose(solution.x, x_set.project(target), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_precisions(dtype):
    problem = meha.problems.strong_convex(5, dtype=dtype)
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert confirmed(solution)
    assert solution.x.dtype == solution.y.dtype == dtype
    assert problem.distance(solution.x, solution.y).x < (1e-4 if dtype == torch.float32 else 1e-9)


def test_units_do_not_matter():
    """x in units from 1e-3 to 1e3: the curvature is measured before convergence is claimed."""
    units = torch.logspace(-3, 3, 5, dtype=F64)
    target = torch.linspace(1, 2, 5, dtype=F64)
    mix = torch.eye(5, dtype=F64) + 0.2
    problem = meha.Problem(lambda x, y: (y - target).square().sum(), lambda x, y: (mix @ y - x / units).square().sum())
    solution = meha.solve(problem, torch.zeros(5, dtype=F64), torch.zeros(5, dtype=F64))
    assert confirmed(solution)
    assert torch.allclose(solution.x / units, mix @ target, rtol=1e-5)


# Verdicts


def test_a_singular_hessian_is_left_to_the_continuation():
    problem = meha.problems.merely_convex(3)
    engine = engine_on(problem, problem.x0, problem.y0)
    assert engine.verdict.status is meha.Status.BROKE_DOWN
    assert engine.verdict.message == "The lower Hessian is singular on the face of y."
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert solution.status is meha.Status.CONVERGED
    assert solution.report["engine"].startswith(
        "PenaltyContinuation; ImplicitNewton: The lower Hessian is singular on the face of y."
    )
    assert problem.distance(solution.x, solution.y).x < 1e-5


def test_a_y_that_is_not_unique_is_not_called_converged():
    """f determines the product of y only; F depends on the product, so the hypergradient exists, but no strict minimum."""
    problem = meha.Problem(
        lambda x, y: (y[0] * y[1] - 2).square() + 0.1 * x.square().sum(), lambda x, y: (y[0] * y[1] - x.sum()).square()
    )
    engine = engine_on(problem, torch.ones(1, dtype=F64), torch.tensor([1.0, 2.0], dtype=F64))
    assert engine.verdict.status is meha.Status.FINISHED
    assert "singular on the face of y" in engine.verdict.message
    assert float(engine.now.x) == pytest.approx(2 / 1.1, rel=1e-5)


def test_a_lower_level_without_a_minimum_breaks_down():
    problem = meha.Problem(lambda x, y: y.square().sum() + x.square().sum(), lambda x, y: (x * y).sum())
    engine = engine_on(problem, torch.ones(2, dtype=F64), torch.ones(2, dtype=F64))
    assert engine.verdict.status is meha.Status.BROKE_DOWN


def test_a_wrong_basin_is_left_to_the_continuation():
    """The engine ends in the basin of its start; the search finds others, and passes find the answer."""
    problem = meha.problems.sine(10)
    engine = engine_on(problem, problem.x0, problem.y0)
    assert engine.verdict.status is meha.Status.CONVERGED
    assert float(engine.now.F) > 10
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert solution.status is meha.Status.CONVERGED
    assert problem.distance(solution.x, solution.y).x < 1e-5
    assert solution.report["engine"].startswith("PenaltyContinuation; ImplicitNewton: Relative hypergradient")
    assert solution.report["starts"].startswith("implicit Newton: F = ")


def test_functions_without_second_derivatives_are_left_to_the_continuation():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    problem = meha.Problem(lambda x, y: (y - 2).square().sum() + (x - 1).square().sum(), lambda x, y: Once.apply(y - x).sum())
    solution = meha.solve(problem, torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64))
    assert solution.status is meha.Status.CONVERGED
    assert torch.allclose(solution.x, torch.full((2,), 1.5, dtype=F64), rtol=1e-5)
    assert solution.report["engine"].startswith("PenaltyContinuation; ImplicitNewton: ")


def test_the_engine_can_be_left_out():
    problem = meha.problems.strong_convex(3)
    solution = meha.solve(problem, problem.x0, problem.y0, Default(second_order=False))
    assert solution.counts.hvp == 0
    assert solution.report["engine"] == "PenaltyContinuation"


def test_the_budget_of_the_engine():
    """Hessians count row by row; the engine leaves more than half to the continuation, and no run exceeds the whole."""
    problem = least_squares(penalty=lambda x, y: 0.5 * (x.exp() * y * y).sum(), x_set=Box(-6.0, 4.0))
    x0, y0 = torch.zeros(8, dtype=F64), torch.zeros(8, dtype=F64)
    solution = meha.solve(problem, x0, y0, Default(max_gradients=100))
    assert solution.status is not meha.Status.CONVERGED
    assert "Gradient budget exhausted" in solution.report["engine"]
    assert solution.counts.hvp + solution.counts.lower < 200  # those that probe the problem are taken in any case
    assert meha.solve(problem, x0, y0, Default(max_gradients=2000)).status is meha.Status.CONVERGED


def test_a_maximum_of_the_hyper_objective_is_left():
    """The hypergradient is zero at the start, a maximum in x."""
    problem = meha.Problem(lambda x, y: y.cos().sum(), lambda x, y: (y - x).square().sum())
    solution = meha.solve(problem, torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert confirmed(solution)
    assert solution.upper == pytest.approx(-1.0)


def test_a_short_step_grows_until_the_slope_has_risen():
    """Along a hundredth of the way to the minimum of (x - 1)^2 / 2, slopes must rise from -1 to -0.9: lengths 1, 4, 16."""

    def half_square(x, y):
        return HyperValue(x, y, 0.5 * float((x - 1).square()), 0.0, x - 1, 1.0)

    start = half_square(torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64))
    found, tried = search_x(half_square, start, torch.full((1,), 0.01, dtype=F64), lambda x: x, torch.finfo(F64).eps)
    assert float(found.x) == pytest.approx(0.16)
    assert len(tried) == 3


def test_an_error_of_y_changes_the_value_by_its_square():
    """f = (y - x)^2 / 2, F = y^2 / 2: at y = x + e, F is wrong by x e, and the corrected value by -e^2 / 2."""
    x, y = torch.full((1,), 3.0, dtype=F64), torch.full((1,), 3.01, dtype=F64)
    lower = lower_of(meha.Problem(lambda x, y: 0.5 * y.square().sum(), lambda x, y: 0.5 * (y - x).square().sum()), x, y)
    response = LowerResponse(lower.expand(lower.flat_x.at(x), y), SmoothFace(), 0.0, solved=True)
    assert pytest.approx(4.5 - 0.5 * 0.01**2, rel=1e-12) == hypergradient(lower, response).F


def test_the_engine_alone_leaves_a_maximum():
    problem = meha.Problem(lambda x, y: y.cos().sum(), lambda x, y: (y - x).square().sum())
    engine = engine_on(problem, torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert engine.verdict.status is meha.Status.CONVERGED
    assert pytest.approx(-1.0) == engine.now.F


def test_gradients_of_both_sides_make_a_kink_of_the_upper_level_stationary():
    """F = 2 |x - 1| + x / 2 has slopes -1.5 and 2.5 beside x = 1, and no small one anywhere."""
    problem = meha.Problem(lambda x, y: (2 * (y - 1).abs() + 0.5 * y).sum(), lambda x, y: (y - x).square().sum())
    engine = engine_on(problem, torch.full((1,), 3.0, dtype=F64), torch.zeros(1, dtype=F64))
    assert engine.verdict.status is meha.Status.CONVERGED
    assert "at a kink" in engine.verdict.message
    assert float(engine.now.x) == pytest.approx(1.0, abs=1e-6)


def test_a_short_step_of_a_wrong_memory_is_not_the_end():
    """F = x^2 / 2 at x = 1, and a memory that saw a curvature of 1e12: the step is as short as at a solution."""
    problem = meha.Problem(lambda x, y: 0.5 * y.square().sum(), lambda x, y: 0.5 * (y - x).square().sum())
    one = torch.ones(1, dtype=F64)
    engine = engine_on(problem, one.clone(), one.clone(), most=0)
    with torch.no_grad():
        now = engine.objective(one, one)
        for _ in range(4):
            engine.trail.add(now)
        engine.memory.add(one, 1e12 * one)
        direction = engine._direction(now)
        assert float(direction) == pytest.approx(-1e-12)
        assert not engine._stationary(now, direction)


def test_an_infimum_that_x_approaches_in_equal_steps_lies_at_infinity():
    """Newton steps on exp(-x) have length 1, so that x itself is never far."""
    problem = meha.Problem(lambda x, y: (-y).exp().sum(), lambda x, y: (y - x).square().sum())
    engine = engine_on(problem, torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert engine.verdict.status is meha.Status.AT_INFINITY
    assert float(engine.now.x) < 100


def test_a_kink_of_the_hyper_objective():
    """With y = max(x, 0), F(x) = y + (x^2 + 1) / 2: its slope jumps from x to x + 1 at x = 0, where y leaves its bound."""
    problem = meha.Problem(
        lambda x, y: y.sum() + 0.5 * (x + 1).square().sum() - x.sum(),
        lambda x, y: 0.5 * (y - x).square().sum(),
        y_set=NonNegative(),
    )
    solution = meha.solve(problem, torch.full((1,), 0.7, dtype=F64), torch.zeros(1, dtype=F64))
    assert abs(float(solution.x)) < 1e-5
    assert confirmed(solution)
    assert "at a kink" in solution.message


def test_a_weakly_held_y_does_not_hide_a_descent():
    """At the start y = 0 is held with a zero multiplier, and the hypergradient of that face is zero; F falls as y moves."""
    problem = meha.Problem(
        lambda x, y: (y - 1).square().sum() + 0.5 * x.square().sum(),
        lambda x, y: 0.5 * (y - x).square().sum(),
        y_set=NonNegative(),
    )
    solution = meha.solve(problem, torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert confirmed(solution)
    assert float(solution.x) == pytest.approx(2 / 3, rel=1e-5)


def test_the_optimum_at_infinity():
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: (y - x).square().sum())
    engine = engine_on(problem, torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert engine.verdict.status is meha.Status.AT_INFINITY


@pytest.mark.parametrize("objective", ["lower", "x"])
def test_objectives_that_ignore_a_variable(objective):
    ones = torch.ones(2, dtype=F64)

    def square(z):
        return z.square().sum()

    problems = {
        "lower": meha.Problem(lambda x, y: square(x - y), lambda x, y: square(x - y.detach())),
        "x": meha.Problem(lambda x, y: square(y - 2), lambda x, y: square(y - 1)),
    }
    with pytest.raises(ValueError, match=f"^{objective}: "):
        Default().start(problems[objective], ones, 2 * ones).step()


def test_the_report_splits_the_time():
    problem = meha.problems.lasso(20)
    run = Default().start(problem, problem.x0, problem.y0)
    assert run.method.report(run) == {}
    while run.verdict is None:
        run.step()
    report, clock = run.method.report(run), run.state.course.levels.clock
    assert "in the objectives" in report["time"]
    assert "in linear algebra" in report["time"]
    assert 0 < clock.functions + clock.algebra <= clock.seconds <= run.seconds
    assert "coordinates of y can move" in report["course"]
    assert "relative hypergradient" in report["accuracy"]
    assert report["engine"] == "ImplicitNewton"


def test_held_coordinates_are_let_go():
    """From weights that hold y at zero, where x has no influence: half of the answer needs y free."""
    problem = meha.problems.lasso(20)
    x0 = torch.full((20,), 0.2, dtype=F64)
    engine = engine_on(problem, x0, problem.y0)
    assert engine.verdict.status is meha.Status.CONVERGED
    assert engine.released == 1
    assert pytest.approx(-0.5, abs=1e-9) == engine.now.F
    assert confirmed(solution := meha.solve(problem, x0, problem.y0))
    assert problem.distance(solution.x, solution.y).x < 1e-6


def test_independent_problems_take_as_many_products_as_one():
    """Five folds of eight coefficients: the Hessian has blocks, and eight products and a check give all of them."""
    A, b, _, _ = data(n=50)
    inside = torch.stack([torch.arange(50) % 5 != k for k in range(5)]).to(F64)

    def losses(y):
        return torch.nn.functional.softplus(-b.sign() * (y @ A.T))

    problem = meha.Problem(
        lambda x, y: ((1 - inside) * losses(y)).mean(),
        lambda x, y: (inside * losses(y)).mean(1).sum() + 0.5 * (x.exp() * y.square()).sum(),
        x_set=Box(-8.0, 2.0),
    )
    engine = engine_on(problem, torch.full((8,), -3.0, dtype=F64), torch.zeros(5, 8, dtype=F64))
    assert engine.verdict.status is meha.Status.CONVERGED
    assert int(engine.lower.hessians.groups[1].max()) == 7


# Hessians


def hessian_of(function, x, y):
    return torch.autograd.functional.hessian(lambda y: function(x, y), y)


@pytest.mark.parametrize(
    ("change", "products"),
    [(lambda x, y: (x.exp() * y.square()).sum(), 2), (lambda x, y: x.sum() * (y[:4] @ y[4:]).square(), 8)],
    ids=["diagonal", "dense"],
)
def test_hessians_by_the_pattern_of_their_changes(change, products):
    A, b, _, _ = data()

    def lower(x, y):
        return (A @ y - b).square().mean() + change(x, y)

    problem = meha.Problem(lambda x, y: y.sum(), lower)
    level = lower_of(problem, torch.zeros(8, dtype=F64), torch.ones(8, dtype=F64))
    hessians = Hessians(level.eps)
    for k in range(4):
        x, y = torch.linspace(0.1, 0.3, 8, dtype=F64) * (k + 1), torch.ones(8, dtype=F64)
        with torch.no_grad():
            at = level.expand(level.flat_x.at(x), y)
            before = level.oracle.counts.hvp
            found = hessians.at(at)
        assert torch.allclose(found, hessian_of(lower, x, y), atol=1e-12)
        if k > 1:
            assert level.oracle.counts.hvp - before == products
    assert hessians.dense == (products == 8)


def test_a_pattern_that_breaks_is_noticed():
    """The change is diagonal until x is large."""

    def lower(x, y):
        return (x * y.square()).sum() + (x[0] - 2).clamp(min=0) * y[0] * y[1] + y[0] * y[1]

    problem = meha.Problem(lambda x, y: y.sum(), lower)
    level = lower_of(problem, torch.ones(8, dtype=F64), torch.ones(8, dtype=F64))
    hessians = Hessians(level.eps)
    for k in range(5):
        x, y = torch.full((8,), 1.0 + k / 2, dtype=F64), torch.ones(8, dtype=F64)
        with torch.no_grad():
            found = hessians.at(level.expand(level.flat_x.at(x), y))
        assert torch.allclose(found, hessian_of(lower, x, y), atol=1e-12)


FORMULAS = {
    "a loss and a penalty": (lambda x, y, loss: 3 * loss(y["a"]) + (x.exp() * y["a"].pow(4)).sum() + y["b"].exp().sum(), True),
    "weights": (lambda x, y, loss: loss(y["a"], weights=x.sigmoid().expand(30)) + y["b"].square().sum(), True),
    "two losses": (lambda x, y, loss: loss(y["a"]) + x.exp() * loss(y["b"]), True),
    "parts of y": (lambda x, y, loss: loss(y["a"]) + loss(y["a"] * y["b"]), True),
    "no loss at y": (lambda x, y, loss: loss(2 * y["a"]) + y["b"].square().sum(), False),
    "a function of a loss": (lambda x, y, loss: loss(y["a"]).log() + y["b"].square().sum(), False),
    "weights by y": (lambda x, y, loss: loss(y["a"], weights=y["a"].sum().expand(30)) + y["b"].square().sum(), False),
}


@pytest.mark.parametrize("name", list(FORMULAS))
def test_hessians_by_formulas_of_losses(name):
    """They are those of backward passes, or are not used."""
    lower, used = FORMULAS[name]
    A, b, _, _ = data(p=6)
    loss = meha.losses.Logistic(A, b > 0)
    problem = meha.Problem(lambda x, y: y["a"].sum(), lambda x, y: lower(x, y, loss))
    y = {"a": torch.linspace(-1, 1, 6, dtype=F64), "b": torch.linspace(1, 2, 6, dtype=F64)}
    level = lower_of(problem, torch.tensor(0.3, dtype=F64), y)
    at = level.expand(level.flat_x.at(level.flat_x.read()), level.flat_y.read())
    hessians = Hessians(level.eps)
    torch.testing.assert_close(hessians.at(at), at.rows(), rtol=1e-12, atol=1e-12)
    assert hessians.formulas == used


def test_formulas_of_losses_give_the_same_solution(monkeypatch):
    A, b, A_val, b_val = data()
    training, validation = meha.losses.Logistic(A, b > 0), meha.losses.Logistic(A_val, b_val > 0)
    box = Box(-6.0, 3.0)
    problem = meha.Problem(lambda x, y: validation(y), lambda x, y: training(y) + x.exp() * y.square().sum(), x_set=box)
    x0, y0 = torch.tensor(-1.0, dtype=F64), torch.zeros(8, dtype=F64)
    plain = meha.solve(problem, x0, y0)
    calls = []
    monkeypatch.setattr(
        meha.losses.Logistic, "_hessian", lambda *given, old=meha.losses.Logistic._hessian: calls.append(1) or old(*given)
    )
    solution = meha.solve(problem, x0, y0)
    assert calls
    assert solution.status == plain.status == meha.Status.CONVERGED
    torch.testing.assert_close(solution.x, plain.x, rtol=1e-8, atol=0.0)


def test_groups_of_columns():
    pattern = torch.zeros(40, 40, dtype=torch.bool)
    for i in range(39):
        pattern[i, i + 1] = pattern[i + 1, i] = pattern[i, i] = True
    group = colours(pattern)
    assert int(group.max()) + 1 <= 4
    for row in pattern:
        members = group[row].tolist()
        assert len(members) == len(set(members))


@pytest.mark.parametrize("make", [meha.problems.sine, meha.problems.lasso, meha.problems.group_lasso])
def test_restored_bit_for_bit(make):
    problem = make(20) if make is not meha.problems.group_lasso else least_squares(GroupL2([2, 3, 3], soft))
    x0, y0 = (
        (problem.x0, problem.y0) if hasattr(problem, "x0") else (torch.full((3,), -1.0, dtype=F64), torch.zeros(8, dtype=F64))
    )
    whole, other = (Default().start(problem, x0, y0) for _ in range(2))
    whole.step()
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    other.step()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    steps = 0
    while whole.verdict is None and steps < 50:
        assert dict(whole.step()) == dict(other.step())
        assert torch.equal(whole.x, other.x)
        assert torch.equal(whole.y, other.y)
        steps += 1
    assert steps
    assert whole.verdict == other.verdict
    assert whole.counts == other.counts


def wavy(height: float) -> meha.Problem:
    """y = x, and F has many local minima in x, the lowest at 0."""
    return meha.Problem(
        lambda x, y: (y.square() / 20 + height * (1 - (3 * y).cos())).sum(),
        lambda x, y: (y - x).square().sum(),
        x_set=Box(-4.0, 4.0),
    )


def test_the_best_of_several_solutions_must_appear_several_times():
    """The start is next to a poor local minimum: attempts from other x find better ones, and the status tells how often."""
    solution = meha.solve(wavy(0.3), torch.full((1,), 3.9, dtype=F64), torch.zeros(1, dtype=F64))
    assert solution.report["engine"] == "ImplicitNewton"
    assert float(solution.x) == pytest.approx(0.0, abs=1e-6)
    ends = [float(part.split("F = ")[1].split()[0]) for part in solution.report["starts"].split("; ")]
    assert max(ends) > 0.1  # that of x0
    found = sum(end < 1e-9 for end in ends)
    assert solution.status is (meha.Status.CONVERGED if found >= 3 else meha.Status.LOCAL)


def test_one_solution_is_found_again_at_little_cost():
    solution = meha.solve(wavy(0.0), torch.full((1,), 3.9, dtype=F64), torch.zeros(1, dtype=F64))
    assert confirmed(solution)
    assert "starts" not in solution.report  # F falls towards the answer from all x that were looked at
    assert solution.counts.lower < 450
