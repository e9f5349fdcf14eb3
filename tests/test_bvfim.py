"""BVFIM: its steps against a transcription in numpy, strict feasibility, costs, where it converges and where it does not."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch

import meha
from meha.methods.bvfim import BVFIM
from meha.sets import Box

PENALTIES = ("log", "inverse", "quadratic")
BARRIERS = PENALTIES[:2]

A, B, C = np.array([0.7, -1.2]), np.array([1.5, -0.5, 2.0]), np.array([1.0, 2.0, 0.5])
PICK = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])


class Mixed:
    """F = |x - A|^2/2 + |y - B|^2/2 + x_0 y_0 and f = sum C (y - PICK x)^2/2 + 0.3 sum sin y, in numpy and in torch."""

    F = staticmethod(lambda x, y: 0.5 * ((x - A) ** 2).sum() + 0.5 * ((y - B) ** 2).sum() + x[0] * y[0])
    F_x = staticmethod(lambda x, y: x - A + np.array([y[0], 0.0]))
    F_y = staticmethod(lambda x, y: y - B + np.array([x[0], 0.0, 0.0]))
    f = staticmethod(lambda x, y: 0.5 * (C * (y - PICK @ x) ** 2).sum() + 0.3 * np.sin(y).sum())
    f_x = staticmethod(lambda x, y: -PICK.T @ (C * (y - PICK @ x)))
    f_y = staticmethod(lambda x, y: C * (y - PICK @ x) + 0.3 * np.cos(y))
    x0, y0 = np.array([0.4, 0.3]), np.array([0.8, -0.35, 0.85])

    @staticmethod
    def problem(**sets):
        a, b, c, pick = (torch.tensor(array) for array in (A, B, C, PICK))
        return meha.Problem(
            upper=lambda x, y: 0.5 * (x - a).square().sum() + 0.5 * (y - b).square().sum() + x[0] * y[0],
            lower=lambda x, y: 0.5 * (c * (y - pick @ x).square()).sum() + 0.3 * y.sin().sum(),
            **sets,
        )


def transcript(p, method, x, y, steps, x_box=(-np.inf, np.inf), y_box=(-np.inf, np.inf)):
    """The formulas of the docstring. Also how often a step was halved, and how often y started at z."""
    halved = restarted = 0
    for k in range(steps):
        d = max(method.floor, min(1.0, (method.hold / (k + 1)) ** method.power))
        m1, m2, theta = method.m1 * d, method.m2 * d, method.theta * d
        tau = method.tau * (d**2 if method.penalty == "inverse" else d)
        penalty, weight = {
            "log": (lambda s, tau=tau: -tau * np.log(s) if s > 0 else np.inf, lambda s, tau=tau: tau / s),
            "inverse": (lambda s, tau=tau: tau / s if s > 0 else np.inf, lambda s, tau=tau: tau / s**2),
            "quadratic": (lambda s, tau=tau: min(0, s) ** 2 / (2 * tau), lambda s, tau=tau: max(0, -s) / tau),
        }[method.penalty]
        z = y
        for _ in range(method.inner_steps):
            z = np.clip(z - method.eta * (p.f_y(x, z) + m1 * z), *y_box)

        def slack(at, x=x, z=z, m1=m1, m2=m2):
            return p.f(x, z) + m1 / 2 * (z**2).sum() + m2 - p.f(x, at)

        def objective(at, x=x, theta=theta, penalty=penalty, slack=slack):
            return p.F(x, at) + theta / 2 * (at**2).sum() + penalty(slack(at))

        if method.penalty != "quadratic" and slack(y) <= 0:
            y, restarted = z, restarted + 1
        t = method.beta
        for _ in range(method.upper_steps):
            direction = p.F_y(x, y) + theta * y + weight(slack(y)) * p.f_y(x, y)
            t = min(method.beta, 2 * t)
            while objective(np.clip(y - t * direction, *y_box)) > objective(y):
                t, halved = t / 2, halved + 1
            y = np.clip(y - t * direction, *y_box)
        x = np.clip(x - method.alpha * (p.F_x(x, y) + weight(slack(y)) * (p.f_x(x, y) - p.f_x(x, z))), *x_box)
    return x, y, z, halved, restarted


def after(run, steps):
    info = None
    for _ in range(steps):
        info = run.step()
    return info


SHORT = dict(alpha=0.05, beta=0.02, eta=0.1, inner_steps=3, upper_steps=4, m1=0.2, theta=0.2, hold=1, power=1.0, floor=0.4)
LONG = {**SHORT, "beta": 4.0, "alpha": 0.4, "m2": 0.02, "tau": 0.5}


@pytest.mark.parametrize("sets", [{}, {"x_box": (-0.1, 0.405), "y_box": (-0.4, 0.9)}])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("search", [False, True])
def test_steps_are_those_of_the_formulas(penalty, steps, sets, search):
    """With short steps no search is needed; with long ones it is, and barriers also restart y at z."""
    options = LONG if search else {**SHORT, "m2": 0.02 if penalty == "quadratic" else 2.0, "tau": 0.3}
    method = BVFIM(penalty=penalty, **options)
    boxes = {name.replace("box", "set"): Box(*box) for name, box in sets.items()}
    run = method.start(Mixed.problem(**boxes), torch.tensor(Mixed.x0), torch.tensor(Mixed.y0))
    info = after(run, steps)
    x, y, z, halved, restarted = transcript(Mixed, method, Mixed.x0, Mixed.y0, steps, **sets)
    assert (halved > 0) == search
    assert (restarted > 0) == (search and penalty != "quadratic")
    for found, expected in ((run.x, x), (run.y, y), (run.state.z, z)):
        value = found.value if hasattr(found, "value") else found
        np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    assert info["c"] > 0


@pytest.mark.parametrize("penalty", PENALTIES)
def test_numbers_of_a_step(penalty):
    method = BVFIM(penalty=penalty, **SHORT, m2=0.02)
    run = method.start(Mixed.problem(), torch.tensor(Mixed.x0), torch.tensor(Mixed.y0))
    info, x = run.step(), Mixed.x0
    y, z = run.y.numpy(), run.state.z.value.detach().numpy()
    slack = Mixed.f(x, z) + 0.1 * (z**2).sum() + 0.02 - Mixed.f(x, y)
    w = {"log": 1 / slack, "inverse": 1 / slack**2, "quadratic": max(0, -slack)}[penalty]
    d_x = Mixed.F_x(x, y) + w * (Mixed.f_x(x, y) - Mixed.f_x(x, z))
    expected = {
        "upper": Mixed.F(x, y),
        "lower": Mixed.f(x, y),
        "gap": Mixed.f(x, y) - Mixed.f(x, z),
        "slack": slack,
        "d_x": np.linalg.norm(d_x),
        "c": w,
    }
    assert dict(info) == pytest.approx(expected, rel=1e-9)


def ridge_slack(method, problem, k, x, y, z):
    """The slack of y in step k, from its definition."""
    d = max(method.floor, min(1.0, (method.hold / (k + 1)) ** method.power))
    with torch.no_grad():
        best = problem.lower(x, z) + method.m1 * d / 2 * z.square().sum() + method.m2 * d
        return float(best - problem.lower(x, y))


@pytest.mark.parametrize("penalty", BARRIERS)
@pytest.mark.parametrize(
    ("name", "n", "start", "options"),
    [
        ("sine", 3, None, dict(alpha=0.1, beta=0.3, m2=0.3)),
        ("sine", 3, None, dict(alpha=3.0, beta=100.0, m2=12.0)),
        ("strong_convex", 4, (-3.0, 50.0), dict(alpha=0.3, beta=0.3, m2=0.01)),
        ("strong_convex", 4, (1.0, -7.0), dict(alpha=1.5, beta=1e6, m2=1.0, tau=1e-4)),
        ("merely_convex", 2, (5.0, -20.0), dict(alpha=1.0, beta=30.0, m2=1e-3, m1=0.0)),
    ],
)
def test_every_y_is_strictly_feasible(penalty, name, n, start, options):
    """Also from infeasible starts, with steps far too long, and while everything falls; and the objective of y never rises."""
    problem = getattr(meha.problems, name)(n=n)
    x0, y0 = problem.x0, problem.y0
    if start is not None:
        x0, y0 = torch.full_like(x0, start[0]), torch.full_like(y0, start[1])
    method = BVFIM(penalty=penalty, eta=0.5, inner_steps=4, upper_steps=4, hold=3, power=2.0, **options)
    run = method.start(problem, x0, y0)
    restarts = 0
    for k in range(40):
        x, old = run.x.clone(), run.y.clone()
        info = run.step()
        y, z = run.y, run.state.z.value.detach()
        slack = ridge_slack(method, problem, k, x, y, z)
        assert slack > 0
        assert slack == pytest.approx(info["slack"], rel=1e-6, abs=1e-9 * abs(float(problem.lower(x, y))))
        restarts += ridge_slack(method, problem, k, x, old, z) <= 0
    assert restarts > 0
    assert math.isfinite(float(run.y.norm()))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_objective_of_y_does_not_rise(penalty):
    """One step of y from a start that is feasible, with a beta that overshoots."""
    problem = Mixed.problem()
    for beta in (0.1, 3.0, 1e4):
        method = BVFIM(penalty=penalty, alpha=0.1, beta=beta, eta=0.1, inner_steps=5, upper_steps=1, m2=5.0, tau=0.2)
        run = method.start(problem, torch.tensor(Mixed.x0), torch.tensor(Mixed.y0))
        run.step()
        z, y = run.state.z.value.detach().numpy(), run.y.numpy()

        def objective(at, z=z):
            s = Mixed.f(Mixed.x0, z) + 0.005 * (z**2).sum() + 5.0 - Mixed.f(Mixed.x0, at)
            price = {"log": -0.2 * np.log(max(s, 1e-300)), "inverse": 0.2 / s, "quadratic": min(0, s) ** 2 / 0.4}[penalty]
            return Mixed.F(Mixed.x0, at) + 0.005 * (at**2).sum() + price

        assert objective(y) < objective(Mixed.y0) - 1e-3


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("beta", [0.1, 100.0])
def test_costs(penalty, beta):
    """Values that the search takes are not counted, and no Hessian-vector products are taken."""
    problem = meha.problems.strong_convex(n=2)
    method = BVFIM(penalty=penalty, alpha=0.1, beta=beta, eta=0.3, inner_steps=3, upper_steps=5)
    run = method.start(problem, problem.x0, problem.y0)
    after(run, 7)
    assert run.counts == meha.oracle.Counts(upper=7 * (5 + 1), lower=7 * (3 + 5 + 2), hvp=0)
