"""LV-HBA and BiC-GAFFA against transcriptions of their steps in numpy, their costs, and the papers' first example."""

import numpy as np
import pytest
import torch

import meha
from meha.methods import LVHBA, BiCGAFFA
from meha.problem.constraints import Linear, Smooth
from meha.problem.schedules import Power
from meha.problem.sets import Box

STEPS = 12
N, M = 2, 3
generator = np.random.default_rng(0)
P, Q, R = generator.normal(size=(M, M)), generator.normal(size=(N, N)), generator.normal(size=(M, N))
A, B, b = generator.normal(size=(2, N)), generator.normal(size=(2, M)), np.array([0.1, 0.2])
A_eq, B_eq, b_eq = generator.normal(size=(1, N)), generator.normal(size=(1, M)), np.array([0.3])
X0, Y0 = np.array([0.4, -0.3]), np.array([0.2, 0.1, -0.2])
H, E = np.vstack([A, A_eq]), np.vstack([B, B_eq])
RIGHT = np.concatenate([b, b_eq])


def c(k):
    return 0.5 * (k + 1) ** 0.3


class Numpy:
    """F = ||x - 1||^2 / 2 + sum sin y, f = ||P y||^2 / 2 + y'R x + ||Q x||^2 / 2, and the rows."""

    @staticmethod
    def F(x, y):
        return x - 1, np.cos(y)

    @staticmethod
    def f(x, y):
        return R.T @ y + Q.T @ Q @ x, P.T @ P @ y + R @ x

    @staticmethod
    def h(x, y):
        return H @ x + E @ y - RIGHT


def problem(upper=False):
    p, q, r = (torch.from_numpy(m) for m in (P, Q, R))
    return meha.Problem(
        lambda x, y: (x - 1).square().sum() / 2 + y.sin().sum(),
        lambda x, y: (p @ y).square().sum() / 2 + y @ (r @ x) + (q @ x).square().sum() / 2,
        x_set=Box(-0.5, 0.6),
        y_set=Box(-0.4, 0.4),
        lower_constraints=[Linear(A, B, b), Linear(A_eq=A_eq, B_eq=B_eq, b_eq=b_eq)],
        upper_constraints=Linear([[1.0, 0.0]], None, [0.9]) if upper else (),
    )


def in_z(w, radius):
    return np.concatenate([np.clip(w[:2], 0, radius), np.clip(w[2:], -radius, radius)])


def nearest(x, y):
    """The projection on C, by cvxpy."""
    import cvxpy

    z = cvxpy.Variable(N + M)
    limits = [
        A @ z[:N] + B @ z[N:] <= b,
        A_eq @ z[:N] + B_eq @ z[N:] == b_eq,
        z[:N] >= -0.5,
        z[:N] <= 0.6,
        z[N:] >= -0.4,
        z[N:] <= 0.4,
    ]
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(z - np.concatenate([x, y]))), limits)
    program.solve(solver="CLARABEL", tol_gap_abs=1e-15, tol_gap_rel=1e-15, tol_feas=1e-14)
    guess = z.value
    # sharpen: the active rows of the solver's point, solved exactly
    rows = np.vstack([np.hstack([A, B]), np.eye(N + M), -np.eye(N + M)])
    right = np.concatenate([b, [0.6] * N, [0.4] * M, [0.5] * N, [0.4] * M])
    active = rows @ guess > right - 1e-6
    K, k = np.vstack([rows[active], np.hstack([A_eq, B_eq])]), np.concatenate([right[active], b_eq])
    target = np.concatenate([x, y])
    point = target - np.linalg.pinv(K) @ (K @ target - k)
    return point[:N], point[N:]


def lvhba(alpha, beta, eta, g1, g2, radius):
    x, y = nearest(X0, Y0)
    theta, lam, z = y.copy(), np.zeros(3), np.zeros(3)
    for k in range(STEPS):
        d_theta = Numpy.f(x, theta)[1] + E.T @ lam + (theta - y) / g1
        d_lam = -Numpy.h(x, theta) + (lam - z) / g2
        theta, lam = np.clip(theta - eta * d_theta, -0.4, 0.4), in_z(lam - eta * d_lam, radius)
        F, f, v = Numpy.F(x, y), Numpy.f(x, y), Numpy.f(x, theta)
        d_x = F[0] / c(k) + f[0] - v[0] - H.T @ lam
        d_y = F[1] / c(k) + f[1] - (y - theta) / g1
        x, y = nearest(x - alpha * d_x, y - alpha * d_y)
        z = in_z(z - beta * (z - lam) / g2, radius)
        yield x, y, theta, lam, z


def bicgaffa(alpha, eta, g1, g2, radius):
    x, y, theta, z = X0, Y0, Y0, np.zeros(3)
    for k in range(STEPS):
        theta = np.clip(theta - eta * (Numpy.f(x, theta)[1] + E.T @ z + (theta - y) / g1), -0.4, 0.4)
        lam = z + g2 * Numpy.h(x, y)
        lam[:2] = np.maximum(lam[:2], 0)
        F, f, v = Numpy.F(x, y), Numpy.f(x, y), Numpy.f(x, theta)
        d_x = F[0] / c(k) + f[0] + H.T @ lam - v[0] - H.T @ z
        d_y = F[1] / c(k) + f[1] + E.T @ lam - (y - theta) / g1
        d_z = -(z - lam) / g2 - Numpy.h(x, theta)
        x, y, z = np.clip(x - alpha * d_x, -0.5, 0.6), np.clip(y - alpha * d_y, -0.4, 0.4), in_z(z - alpha * d_z, radius)
        yield x, y, theta, z


def test_steps_of_lvhba():
    run = LVHBA(alpha=0.1, beta=0.3, eta=0.2, gamma1=2.0, gamma2=1.5, c=c, radius=0.2).start(
        problem(), torch.from_numpy(X0), torch.from_numpy(Y0)
    )
    before = run.counts.lower
    for x, y, theta, lam, z in lvhba(0.1, 0.3, 0.2, 2.0, 1.5, 0.2):
        run.step()
        state = run.state
        for own, other in ((run.x, x), (run.y, y), (state.theta.value, theta), (state.lam.value, lam), (state.z.value, z)):
            assert own.detach().numpy() == pytest.approx(other, abs=1e-10)
    assert run.counts.lower - before == 3 * STEPS


def test_steps_of_bicgaffa():
    run = BiCGAFFA(alpha=0.05, eta=0.2, gamma1=2.0, gamma2=1.5, c=c, radius=0.2).start(
        problem(), torch.from_numpy(X0), torch.from_numpy(Y0)
    )
    for x, y, theta, z in bicgaffa(0.05, 0.2, 2.0, 1.5, 0.2):
        run.step()
        for own, other in ((run.x, x), (run.y, y), (run.state.theta.value, theta), (run.state.z.value, z)):
            assert own.detach().numpy() == pytest.approx(other, abs=1e-10)
    assert (run.counts.lower, run.counts.upper) == (3 * STEPS, STEPS)


def example(n):
    """The first example of both papers: x = -0.3, y = (0.7, -0.4) in each coordinate, with one equation for all of them."""
    return meha.Problem(
        lambda x, y: (x - y[n:]).square().sum() / 2 + (y[:n] - 1).square().sum() / 2,
        lambda x, y: y[:n].square().sum() / 2 - x @ y[:n] + y[n:].sum(),
        lower_constraints=Linear(A_eq=torch.ones(1, n), B_eq=torch.ones(1, 2 * n), b_eq=[0.0]),
    )


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (LVHBA(alpha=0.02, beta=0.05, eta=0.02, gamma1=10.0, gamma2=1.0, c=Power(1.0, p=0.3)), 0.06),
        (BiCGAFFA(alpha=0.02, eta=0.05, gamma1=10.0, gamma2=1.0, c=Power(1.0, p=0.3)), 0.06),
    ],
    ids=["LV-HBA", "BiC-GAFFA"],
)
def test_the_first_example_of_the_papers(method, error):
    """The penalty grows, so that the error falls slowly, as in the papers' figures."""
    n = 3
    start = 10 * torch.ones(n, dtype=torch.float64), 10 * torch.ones(2 * n, dtype=torch.float64)
    problem = example(n)
    run = method.start(problem, *start)
    errors = []
    for k in range(1500):
        run.step()
        if k in (99, 1499):
            errors.append(float((run.x + 0.3).norm()) / (0.3 * n**0.5))
    assert errors[1] < error
    assert errors[1] < errors[0] / 2
    exact = meha.solve(problem, *start)
    assert exact.status is meha.Status.CONVERGED
    assert (exact.x + 0.3).abs().max() <= 1e-7
    assert (exact.y[:n] - 0.7).abs().max() <= 1e-7
    assert (exact.y[n:] + 0.4).abs().max() <= 1e-7


def test_refusals():
    plain = meha.problems.strong_convex(n=2)
    for method in (LVHBA(), BiCGAFFA()):
        with pytest.raises(ValueError, match=f"lower_constraints: {method.name} is for"):
            meha.solve(plain, plain.x0, plain.y0, method)
    with pytest.raises(ValueError, match="upper_constraints: BiCGAFFA takes none"):
        meha.solve(problem(upper=True), torch.from_numpy(X0), torch.from_numpy(Y0), BiCGAFFA())
    with pytest.raises(ValueError, match="gamma1"):
        LVHBA(gamma1=0.0)


@pytest.mark.parametrize("method", [LVHBA(), BiCGAFFA()], ids=["LV-HBA", "BiC-GAFFA"])
def test_checkpoints_and_smooth_constraints(method, tmp_path):
    curved = meha.Problem(
        lambda x, y: (x - 1).square().sum() + y.square().sum(),
        lambda x, y: (y - 2).square().sum(),
        lower_constraints=Smooth(lambda x, y: y.square().sum() - 1 - x[0]),
    )
    start = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    whole = meha.solve(curved, *start, method, max_steps=20, tol=None)
    meha.solve(curved, *start, method, max_steps=8, tol=None, checkpoint=tmp_path / "run")
    rest = meha.solve(curved, *start, method, max_steps=20, tol=None, checkpoint=tmp_path / "run")
    assert torch.equal(rest.x, whole.x)
    assert torch.equal(rest.y, whole.y)
