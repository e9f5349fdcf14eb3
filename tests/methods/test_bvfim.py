"""BVFIM: its steps against a transcription in numpy, strict feasibility, costs, where it converges and where it does not."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch

import meha
from meha.methods.bvfim import BVFIM
from meha.problem.sets import Box

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


@pytest.mark.parametrize("sets", [{}, {"x_box": (0.29, 0.405), "y_box": (-0.36, 0.851)}])
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
    if sets:
        free = transcript(Mixed, method, Mixed.x0, Mixed.y0, steps)
        assert not all(np.allclose(a, b, rtol=1e-4) for a, b in zip((x, y), free, strict=False))
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
    for k in range(25):
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
    assert run.counts == meha.problem.oracle.Counts(upper=7 * (5 + 1), lower=7 * (3 + 5 + 2), hvp=0)


SINE, CONVEX = dict(hold=20, power=4.0, beta=0.3), dict(hold=5, beta=0.3)


@pytest.mark.parametrize(
    ("name", "n", "penalty", "steps", "error", "options"),
    [
        ("sine", 1, "log", 80, 0.04, dict(SINE, alpha=0.2, m2=4.0, tau=4.0)),
        ("sine", 1, "inverse", 80, 0.04, dict(SINE, alpha=0.2, m2=4.0, tau=4.0)),
        ("sine", 1, "quadratic", 80, 0.04, dict(SINE, alpha=0.2, m2=2.5, tau=0.1)),
        ("sine", 10, "log", 110, 0.055, dict(SINE, hold=30, alpha=0.04, m2=25.0, tau=5.0)),
        ("sine", 10, "inverse", 110, 0.06, dict(SINE, hold=30, alpha=0.04, m2=25.0, tau=5.0)),
        ("sine", 10, "quadratic", 110, 0.06, dict(SINE, hold=30, alpha=0.04, m2=25.0, tau=0.1)),
        ("strong_convex", 10, "log", 40, 0.015, dict(CONVEX, alpha=0.1, m2=0.1)),
        ("strong_convex", 10, "inverse", 40, 0.015, dict(CONVEX, alpha=0.1, m2=0.1)),
        ("strong_convex", 10, "quadratic", 40, 0.04, dict(CONVEX, alpha=0.1, m2=0.1, tau=0.1)),
        ("merely_convex", 10, "log", 40, 1e-3, dict(CONVEX, alpha=0.3, m2=0.1)),
        ("merely_convex", 10, "inverse", 40, 1e-3, dict(CONVEX, alpha=0.3, m2=0.1, tau=0.1)),
        ("merely_convex", 10, "quadratic", 40, 0.015, dict(CONVEX, alpha=0.3, m2=0.1, tau=0.1)),
    ],
)
def test_reaches_known_solutions(name, n, penalty, steps, error, options):
    """The relative error of x after so many steps of 22 gradients of f and 11 of F."""
    problem = getattr(meha.problems, name)(n=n)
    run = BVFIM(penalty=penalty, eta=0.5, upper_steps=10, **options).start(problem, problem.x0, problem.y0)
    after(run, steps)
    assert problem.distance(run.x, run.y).x < error


@pytest.mark.parametrize("penalty", BARRIERS)
def test_where_it_fails(penalty):
    """A barrier that forbids the hills of f from the start leaves the sine problem in another basin."""
    problem = meha.problems.sine(n=1)
    method = BVFIM(penalty=penalty, alpha=0.2, beta=0.3, eta=0.5, m2=1.0, upper_steps=10, power=4.0)
    run = method.start(problem, problem.x0, problem.y0)
    info = after(run, 60)
    assert float(run.x) < 0
    assert info["gap"] < 0.02  # it is in a basin
    assert info["d_x"] < 0.5  # and has settled there


def test_left_out_steps_fit_the_problem():
    """On the convex problems nothing needs to be chosen by hand."""
    for problem in (meha.problems.strong_convex(n=2), meha.problems.merely_convex(n=2)):
        run = BVFIM(upper_steps=10).start(problem, problem.x0, problem.y0)
        after(run, 60)
        assert problem.distance(run.x, run.y).x < 0.2
    # F(x, y(x)) has curvature 2 + 2 n, F has 2 and f has 1 in y; safety 0.9, and the ridge on z.
    problem = meha.problems.sine(n=10)
    method = BVFIM(m1=0.5).start(problem, problem.x0, problem.y0).method
    assert (method.alpha, method.beta, method.eta) == pytest.approx((0.9 / 22, 0.9 / 3, 1 / (1 / 0.9 + 0.5)))


def test_small_steps_mean_nothing_while_it_falls():
    problem = meha.problems.sine(n=1)
    run = BVFIM(hold=10, power=2.0, floor=1e-2).start(problem, problem.x0, problem.y0)
    settled = []
    for _ in range(102):
        run.step()
        settled.append(run.settled)
    assert [settled[k - 1] for k in (1, 9, 50, 98, 100, 102)] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(penalty="cubic"), "penalty: must be 'log', 'inverse' or 'quadratic', got 'cubic'"),
        (dict(y_optimizer=partial(torch.optim.SGD, lr=0.1)), "y_optimizer: .*SGD.* leave it out, and give beta"),
        (dict(y_optimizer=partial(torch.optim.SGD, lr=0.1), beta=0.1), "y_optimizer: .*SGD.* leave it out, and give beta"),
        (dict(m1=-1.0), "m1: must be a number of at least 0, got -1.0"),
        (dict(theta=-1.0), "theta: must be a number of at least 0, got -1.0"),
        (dict(m2=0.0), "m2: must be a positive number, got 0.0"),
        (dict(tau=0.0), "tau: must be a positive number, got 0.0"),
        (dict(power=-1.0), "power: must be a positive number, got -1.0"),
        (dict(floor=0.0), "floor: must be a positive number, got 0.0"),
        (dict(floor=2.0), r"floor: must be in \(0, 1\], .* got 2.0"),
        (dict(hold=0), "hold: must be a whole number of at least 1, got 0"),
        (dict(upper_steps=0), "upper_steps: must be a whole number of at least 1, got 0"),
        (dict(inner_steps=0), "inner_steps: must be a whole number of at least 1, got 0"),
        (dict(beta=-0.1), "beta: must be a positive number, got -0.1"),
    ],
)
def test_refuses_bad_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        BVFIM(**options)


def test_refuses_a_non_smooth_lower_level():
    problem = meha.problems.lasso(n=4)
    with pytest.raises(ValueError, match="nonsmooth: BVFIM cannot take L1"):
        BVFIM().start(problem, problem.x0, problem.y0)


def split_problem():
    """strong_convex in pieces: x a dict, y a dict with a list."""
    whole = meha.problems.strong_convex(n=3)

    def join(v):
        return torch.cat([v["a"], v["b"][0]])

    return meha.Problem(lambda x, y: whole.upper(join(x), join(y)), lambda x, y: whole.lower(join(x), join(y)))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_dicts_give_what_tensors_give(penalty):
    whole, method = meha.problems.strong_convex(n=3), BVFIM(penalty=penalty, alpha=0.2, beta=1.0, eta=0.4, hold=2)
    first = method.start(whole, whole.x0, whole.y0)
    second = method.start(split_problem(), *({"a": v[:1].clone(), "b": [v[1:].clone()]} for v in (whole.x0, whole.y0)))
    for _ in range(4):
        one, two = first.step(), second.step()
    assert dict(one) == pytest.approx(dict(two), rel=1e-7)
    for a, b in ((first.x, second.x), (first.y, second.y)):
        torch.testing.assert_close(a, torch.cat([b["a"], b["b"][0]]), rtol=1e-7, atol=0)


def network_run(penalty="log", **options):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    problem = meha.Problem(
        upper=lambda x, y: (y(inputs[:8]) - targets[:8]).square().mean() + 0.01 * x["scale"].square(),
        lower=lambda x, y: (x["weights"].sigmoid()[:, None] * (y(inputs) - targets).square()).mean() * x["scale"].exp(),
    )
    method = BVFIM(penalty=penalty, beta=2.0, eta=0.3, inner_steps=5, upper_steps=4, m2=0.1, hold=2, **options)
    return method.start(problem, {"weights": torch.zeros(16), "scale": torch.tensor(0.0)}, model)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_trains_modules_in_place(penalty):
    run = network_run(penalty, alpha=0.5)
    first = run.step()
    last = after(run, 30)
    assert last["upper"] < 0.9 * first["upper"]
    assert abs(last["gap"]) < 0.01
    assert run.y is run.state.y.value
    assert (last["slack"] > 0) or penalty == "quadratic"


@pytest.mark.parametrize(
    "start",
    [
        partial(network_run, "log", x_optimizer=partial(torch.optim.Adam, lr=0.05)),
        partial(network_run, "inverse", alpha=lambda k: 0.5 / (k + 1)),
        partial(network_run, "quadratic", alpha=0.5),
        lambda: BVFIM(upper_steps=3).start(meha.problems.sine(n=2), torch.tensor([-6.0]).double(), torch.zeros(2).double()),
    ],
)
def test_restored_bit_for_bit(start):
    run = start()
    after(run, 4)
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    expected, counts = [dict(run.step()) for _ in range(4)], run.counts
    buffer.seek(0)
    other = start()
    other.step()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.k == 4
    assert [dict(other.step()) for _ in range(4)] == expected
    assert other.counts == counts


@pytest.mark.parametrize("penalty", PENALTIES)
def test_single_precision_with_a_room_below_rounding(penalty):
    """f is 1e6 large, so that m2 is lost in f(x, z) + m2; z is strictly feasible all the same, and nothing divides by zero."""
    problem = meha.Problem(
        upper=lambda x, y: 0.5 * (x - 1).square().sum() + 0.5 * y.square().sum(),
        lower=lambda x, y: 1e6 + 0.5 * (y - x).square().sum(),
    )
    method = BVFIM(penalty=penalty, alpha=0.1, beta=0.5, eta=0.5, m1=0.0, m2=1e-6, hold=1, upper_steps=5)
    run = method.start(problem, torch.tensor([2.0]), torch.tensor([2.0]))
    for _ in range(20):
        info = run.step()
        assert info["slack"] > 0 or penalty == "quadratic"
        assert math.isfinite(info["c"])
        assert math.isfinite(float(run.x))


def test_an_infinite_objective_stops_the_run_with_a_status():
    """The search raises no error of its own."""
    problem = meha.Problem(
        upper=lambda x, y: x.square().sum() + y.square().sum(), lower=lambda x, y: (y - x).square().sum() * (1e200 * x).sum()
    )
    for penalty in PENALTIES:
        method = BVFIM(penalty=penalty, alpha=0.1, beta=0.1, eta=0.1)
        solution = meha.solve(problem, torch.tensor([1.0]).double(), torch.tensor([3.0]).double(), method, max_steps=5)
        assert solution.status is meha.Status.NON_FINITE
