"""MEHA against an independent transcription of Algorithm 1, its costs, and what it accepts."""

import gc
import math
from functools import partial

import numpy as np
import pytest
import torch
from structures import OnlyOnce
from torch.nn.parameter import is_lazy

import meha
from meha.problem.nonsmooth import L1, GroupL2
from meha.problem.oracle import Oracle
from meha.problem.schedules import Cosine, InversePower
from meha.problem.sets import Box, L2Ball, NonNegative, Simplex
from meha.tensors.variables import Variable

PARAMETERS = {"alpha": 0.05, "beta": 0.04, "eta": 0.06, "gamma": 0.7, "c": 0.8, "p": 0.3}


def random_problem(seed, n=6, m=12):
    """F and f quadratic with a sine in f; the matrices as numpy arrays, the objectives as torch functions of them."""
    rng = np.random.default_rng(seed)
    P, Q, r = rng.normal(size=(5, n)), rng.normal(size=(5, m)), rng.normal(size=5)
    H = rng.normal(size=(m, m)) / math.sqrt(m)
    H, B, b = H @ H.T, rng.normal(size=(n, m)) / m, rng.normal(size=m)
    t = {name: torch.tensor(value) for name, value in {"P": P, "Q": Q, "r": r, "H": H, "B": B, "b": b}.items()}

    def upper(x, y):
        return 0.5 * (t["P"] @ x + t["Q"] @ y - t["r"]).square().sum()

    def lower(x, y):
        return 0.5 * y @ t["H"] @ y + x @ t["B"] @ y + t["b"] @ y + torch.sin(y).sum() * x.sum() / 7

    gradients = {
        "F_x": lambda x, y: P.T @ (P @ x + Q @ y - r),
        "F_y": lambda x, y: Q.T @ (P @ x + Q @ y - r),
        "f_x": lambda x, y: B @ y + np.sin(y).sum() / 7,
        "f_y": lambda x, y: H @ y + B.T @ x + b + np.cos(y) * x.sum() / 7,
    }
    return upper, lower, gradients, np.abs(rng.normal(size=n)), np.abs(rng.normal(size=m))


def transcription(gradients, x, y, prox, project, g_x, steps, alpha, beta, eta, gamma, c, p):
    """Algorithm 1 of the paper in numpy: theta, then x, then y at the new x."""
    F_x, F_y, f_x, f_y = (gradients[name] for name in ("F_x", "F_y", "f_x", "f_y"))
    theta = y.copy()
    for k in range(steps):
        ck = c * (k + 1) ** p
        theta = prox(x, theta - eta * (f_y(x, theta) + (theta - y) / gamma), eta)
        d_x = F_x(x, y) / ck + f_x(x, y) + g_x(x, y) - f_x(x, theta) - g_x(x, theta)
        x = project(x - alpha * d_x)
        d_y = F_y(x, y) / ck + f_y(x, y) - (y - theta) / gamma
        y = prox(x, y - beta * d_y, beta)
    return x, y, theta


def soft(u, t):
    return np.sign(u) * np.maximum(np.abs(u) - t, 0)


def shrink(u, t, size):
    blocks = u.reshape(-1, size)
    norms = np.linalg.norm(blocks, axis=1, keepdims=True)
    return (np.maximum(1 - t[:, None] / np.maximum(norms, 1e-300), 0) * blocks).reshape(-1)


CASES = {
    "smooth": (dict(), lambda x, u, s: u, lambda x: x, lambda x, y: 0 * x),
    "smooth, balls and boxes": (
        dict(x_set=L2Ball(1.5), y_set=Box(-0.2, 0.3)),
        lambda x, u, s: np.clip(u, -0.2, 0.3),
        lambda x: x * min(1, 1.5 / np.linalg.norm(x)),
        lambda x, y: 0 * x,
    ),
    "L1, weight per coordinate, X a box": (
        dict(nonsmooth=L1(lambda x: x.repeat(2)), x_set=Box(0.0, 1.0)),
        lambda x, u, s: soft(u, s * np.tile(x, 2)),
        lambda x: np.clip(x, 0, 1),
        lambda x, y: np.abs(y).reshape(2, -1).sum(0),
    ),
    "L1, one weight, X and Y boxes": (
        dict(nonsmooth=L1(lambda x: x[0] ** 2), x_set=NonNegative(), y_set=Box(-0.1, 0.4)),
        lambda x, u, s: np.clip(soft(u, s * x[0] ** 2), -0.1, 0.4),
        lambda x: np.maximum(x, 0),
        lambda x, y: 2 * x[0] * np.abs(y).sum() * np.eye(len(x))[0],
    ),
    "groups": (
        dict(nonsmooth=GroupL2([2] * 6, weight=lambda x: x), x_set=NonNegative()),
        lambda x, u, s: shrink(u, s * x, 2),
        lambda x: np.maximum(x, 0),
        lambda x, y: np.linalg.norm(y.reshape(-1, 2), axis=1),
    ),
    "groups, Y non-negative": (
        dict(nonsmooth=GroupL2([2] * 6, weight=lambda x: x), x_set=NonNegative(), y_set=NonNegative()),
        lambda x, u, s: shrink(np.maximum(u, 0), s * x, 2),
        lambda x: np.maximum(x, 0),
        lambda x, y: np.linalg.norm(y.reshape(-1, 2), axis=1),
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_transcription(case, seed):
    parts, prox, project, g_x = CASES[case]
    upper, lower, gradients, x0, y0 = random_problem(seed)
    x0, y0 = project(x0), prox(x0, y0, 1e-3)
    run = meha.MEHA(**PARAMETERS).start(meha.Problem(upper, lower, **parts), torch.tensor(x0), torch.tensor(y0))
    for _ in range(100):
        run.step()
    expected = transcription(gradients, x0, y0, prox, project, g_x, 100, **PARAMETERS)
    moved = np.linalg.norm(expected[0] - x0) + np.linalg.norm(expected[1] - y0)
    assert 0.1 < moved < 100
    found = (run.x, run.y, run.state.theta.detached())
    for name, ours, theirs in zip(("x", "y", "theta"), found, expected, strict=True):
        assert np.abs(ours.numpy() - theirs).max() < 1e-10, name


def test_structure_does_not_matter(monkeypatch):
    """One tensor, a dict of leaves, a module, and one backward pass per term: the same numbers."""
    upper, lower, _, x0, y0 = random_problem(3)
    x0, y0 = torch.tensor(x0), torch.tensor(y0)

    class Half(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = torch.nn.Parameter(value.clone())

    def joined(y):
        if isinstance(y, torch.nn.Module):
            return torch.cat([y[0].value, y[1].value])
        return torch.cat([y["a"], *y["b"]]) if isinstance(y, dict) else y

    starts = [
        y0,
        {"a": y0[:4], "b": [y0[4:9], y0[9:]]},
        torch.nn.ModuleList([Half(y0[:5]), Half(y0[5:])]),
    ]
    problem = meha.Problem(lambda x, y: upper(x, joined(y)), lambda x, y: lower(x, joined(y)), nonsmooth=L1(0.1))
    results = []
    for limit in (1 << 16, 0):
        monkeypatch.setattr("meha.problem.oracle.JOINT_LIMIT", limit)
        for y in starts:
            run = meha.MEHA(**PARAMETERS).start(problem, x0, y)
            for _ in range(30):
                run.step()
            results.append((run.x, joined(run.y).detach(), run.counts))
            if isinstance(y, torch.nn.Module):
                y[0].value.data, y[1].value.data = y0[:5].clone(), y0[5:].clone()
    for x, y, counts in results[1:]:
        assert torch.allclose(x, results[0][0], rtol=0, atol=1e-12)
        assert torch.allclose(y, results[0][1], rtol=0, atol=1e-12)
        assert counts == results[0][2]


def test_four_gradients_of_f_and_two_of_F_per_step():
    calls = {"upper": 0, "lower": 0}
    upper, lower, _, x0, y0 = random_problem(0)

    def counted(name, function):
        def call(x, y):
            calls[name] += 1
            return function(x, y)

        return call

    problem = meha.Problem(counted("upper", upper), counted("lower", lower))
    run = meha.MEHA(**PARAMETERS).start(problem, torch.tensor(x0), torch.tensor(y0))
    for _ in range(7):
        run.step()
    assert (run.counts.upper, run.counts.lower, run.counts.hvp) == (14, 28, 0)
    assert calls == {"upper": 14, "lower": 28}


def test_one_gradient_of_F_when_it_does_not_use_x():
    problem = meha.problems.lasso(4)
    run = problem.preset("recipe").start(problem, problem.x0, problem.y0)
    for _ in range(5):
        run.step()
    assert (run.counts.upper, run.counts.lower) == (5, 20)


def test_gradients_of_the_lower_level_alone_do_not_hide_F():
    """A method that first differentiates f + g in x must still get F's part later."""
    upper, lower, gradients, x0, y0 = random_problem(0)
    x, y = Variable(torch.tensor(x0), "x"), Variable(torch.tensor(y0), "y")
    oracle = Oracle(meha.Problem(upper, lower), x, y)
    oracle.gradient(x, [(1.0, oracle.phi, x, y)])
    _, found = oracle.gradient(x, [(1.0, oracle.upper, x, y), (1.0, oracle.phi, x, y)])
    assert np.allclose(found[0].numpy(), gradients["F_x"](x0, y0) + gradients["f_x"](x0, y0))


@pytest.mark.parametrize("method", [meha.problems.strong_convex().preset("paper"), meha.MEHA()], ids=["given", "automatic"])
def test_no_double_backward(method):
    def lower(x, y):
        return OnlyOnce.apply(y) - (x * y).sum()

    problem = meha.Problem(meha.problems.strong_convex(3).upper, lower)
    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(lower(y.detach(), y), y, create_graph=True)
    solution = meha.solve(problem, torch.zeros(3).double(), torch.zeros(3).double(), method, max_steps=1500, tol=None)
    assert torch.allclose(solution.x, torch.full((3,), 0.5).double(), atol=0.05)


def test_memory_does_not_grow_with_steps():
    problem = meha.problems.sine(1000)
    run = problem.preset("recipe").start(problem, problem.x0, problem.y0)

    def tensors():
        gc.collect()
        found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        return sum(t.numel() for t in found if not is_lazy(t))  # other tests may have left parameters without values

    run.step()
    before = tensors()
    for _ in range(200):
        run.step()
    assert tensors() == before
    assert run.state.theta.leaves[0].grad is None
    assert run.state.theta.leaves[0].grad_fn is None


def test_steps_may_be_functions_of_the_step_number():
    upper, lower, _, x0, y0 = random_problem(1)
    problem = meha.Problem(upper, lower)
    seen = []

    def alpha(k):
        seen.append(k)
        return 0.05

    plain = meha.MEHA(**PARAMETERS)
    scheduled = meha.MEHA(
        alpha=alpha, beta=lambda k: 0.04, eta=InversePower(0.06, 0.0), gamma=0.7, c=lambda k: 0.8 * (k + 1) ** 0.3
    )
    runs = [m.start(problem, torch.tensor(x0), torch.tensor(y0)) for m in (plain, scheduled)]
    for _ in range(5):
        infos = [run.step() for run in runs]
    assert seen == [0, 1, 2, 3, 4]
    assert torch.equal(runs[0].x, runs[1].x)
    assert torch.equal(runs[0].y, runs[1].y)
    assert infos[0]["c"] == infos[1]["c"] == 0.8 * 5**0.3


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (InversePower(2.0, 0.5), {0: 2.0, 3: 1.0, 99: 0.2}),
        (Cosine(1.0, steps=4, final=0.2), {0: 1.0, 2: 0.6, 4: 0.2, 9: 0.2, 1: 0.6 + 0.4 * math.sqrt(0.5)}),
    ],
)
def test_schedules(schedule, values):
    for k, value in values.items():
        assert schedule(k) == pytest.approx(value, rel=1e-12)


def test_sgd_takes_the_same_steps():
    upper, lower, _, x0, y0 = random_problem(2)
    problem = meha.Problem(
        upper, lower, nonsmooth=GroupL2([2] * 6, weight=lambda x: x), x_set=NonNegative(), y_set=NonNegative()
    )
    plain = meha.MEHA(**PARAMETERS)
    optimized = meha.MEHA(
        x_optimizer=partial(torch.optim.SGD, lr=0.05),
        y_optimizer=partial(torch.optim.SGD, lr=0.04),
        theta_optimizer=partial(torch.optim.SGD, lr=0.06),
        gamma=0.7,
        c=0.8,
        p=0.3,
    )
    runs = [m.start(problem, torch.tensor(x0), torch.tensor(y0)) for m in (plain, optimized)]
    for _ in range(20):
        infos = [run.step() for run in runs]
    assert torch.allclose(runs[0].x, runs[1].x, atol=1e-13)
    assert torch.allclose(runs[0].y, runs[1].y, atol=1e-13)
    assert infos[0]["residual"] == pytest.approx(infos[1]["residual"], rel=1e-9)


def test_adam_on_both_levels_solves_a_smooth_problem():
    problem = meha.problems.strong_convex(5)
    adam = partial(torch.optim.Adam, lr=0.003)
    method = meha.MEHA(x_optimizer=adam, y_optimizer=adam, eta=0.5, gamma=10.0, c=5.0, p=0.3)
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=3000, tol=None)
    assert problem.distance(solution.x, solution.y).x < 0.02


def test_an_optimizer_that_rescales_is_refused_before_a_prox():
    adam = partial(torch.optim.Adam, lr=0.01)
    lasso = meha.problems.lasso(4)
    with pytest.raises(ValueError, match="y_optimizer: Adam rescales"):
        meha.MEHA(y_optimizer=adam, alpha=0.1, eta=0.1, gamma=1.0, c=1.0).start(lasso, lasso.x0, lasso.y0)
    meha.MEHA(x_optimizer=adam, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(lasso, lasso.x0, lasso.y0).step()
    ball = meha.Problem(lasso.upper, lasso.lower, nonsmooth=lasso.nonsmooth, x_set=Simplex())
    with pytest.raises(ValueError, match="x_optimizer: Adam rescales"):
        meha.MEHA(x_optimizer=adam, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(ball, torch.full((4,), 0.25), torch.zeros(4))


def test_theta_has_buffers_of_its_own():
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 3), torch.randn(32, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    weights = torch.zeros(32)

    def upper(x, y):
        return (y(inputs) - targets).square().mean()

    def lower(x, y):
        return (torch.sigmoid(x)[:, None] * (y(inputs) - targets).square()).mean()

    run = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=10.0, c=1.0).start(meha.Problem(upper, lower), weights, model)
    run.step()
    theta = run.state.theta.value
    assert run.y is model
    assert theta is not model
    assert theta[0].bias is model[0].bias
    assert theta[1].running_mean is not model[1].running_mean
    # Per step: theta runs forward twice (its own step, and the x-direction), y four times (F and f, for x and for y).
    run.step()
    assert int(theta[1].num_batches_tracked) == 4
    assert int(model[1].num_batches_tracked) == 8
    assert all(p.grad is None for p in model.parameters())


def test_the_batch_reaches_both_objectives():
    seen = []
    problem = meha.Problem(
        upper=lambda x, y, batch: seen.append(batch) or (x + y - batch).square().sum(),
        lower=lambda x, y, batch: seen.append(batch) or (y - x * batch).square().sum(),
    )
    run = meha.MEHA(**PARAMETERS).start(problem, torch.ones(1), torch.ones(1))
    run.step(2.0)
    run.step(3.0)
    assert seen == [2.0] * 6 + [3.0] * 6


def test_the_numbers_of_a_step():
    """upper, lower and gap are those of the point before the step; at a fixed point the residual is zero."""
    upper, lower, _, x0, y0 = random_problem(4)
    x0, y0 = torch.tensor(x0), torch.tensor(y0)
    problem = meha.Problem(upper, lower)
    run = meha.MEHA(**PARAMETERS).start(problem, x0, y0)
    info = run.step()
    theta = run.state.theta.detached()
    assert info["upper"] == pytest.approx(float(upper(x0, y0)))
    assert info["lower"] == pytest.approx(float(lower(x0, y0)))
    gap = float(lower(x0, y0) - lower(x0, theta) - (theta - y0).square().sum() / 1.4)
    assert info["gap"] == pytest.approx(gap)
    assert info["gap"] <= meha.diagnostics.gap(problem, x0, y0, 0.7)
    c = 0.8
    moves = ((theta - y0) / 0.06, (run.x - x0) / 0.05, (run.y - y0) / 0.04)
    assert info["residual"] == pytest.approx(c * float(torch.cat(moves).norm()))
    assert info["d_x"] == pytest.approx(float(moves[1].norm()))

    toy = meha.problems.merely_convex(3)
    run = toy.preset("recipe").start(toy, toy.x_star, toy.y_star)
    assert run.step()["residual"] == 0
    assert torch.equal(run.x, toy.x_star)


def test_callers_state_is_left_alone():
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state())
    problem = meha.problems.sine(3)
    x0, y0 = problem.x0.clone(), problem.y0.clone()
    meha.solve(problem, problem.x0, problem.y0, max_steps=5)
    meha.theory.estimate(problem, problem.x0, problem.y0)
    assert torch.equal(problem.x0, x0)
    assert torch.equal(problem.y0, y0)
    assert not problem.x0.requires_grad
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[:2]
    assert torch.equal(torch.random.get_rng_state(), before[2])
    with torch.no_grad():
        meha.solve(problem, problem.x0, problem.y0, max_steps=5)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_kept(dtype):
    for make in (meha.problems.sine, meha.problems.lasso):
        problem = make(4, dtype=dtype)
        solution = meha.solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=300, tol=None)
        assert solution.x.dtype == solution.y.dtype == dtype
        assert problem.distance(solution.x, solution.y).y < 0.05


def test_F_may_begin_to_use_x_later():
    """What F depends on may change with the batch; no part of its gradient is lost."""

    def upper(x, y, batch):
        value = (y - 4).square().sum()
        return value + 100 * (x - 2).square().sum() if batch else value

    problem = meha.Problem(upper, lambda x, y, batch: 0.5 * (y - x).square().sum())
    ends = []
    for batches in ([0, 1], [1, 0]):
        method = meha.MEHA(alpha=0.01, beta=0.05, eta=0.1, gamma=1.0, c=1.0)
        zero = torch.zeros(1, dtype=torch.float64)
        ends.append(float(meha.solve(problem, zero, zero, method, batches=batches, max_steps=3000, tol=None).x))
    assert ends[0] == pytest.approx(ends[1], abs=0.05)


def test_numbers_of_a_step_do_not_follow_the_variables():
    problem = meha.Problem(lambda x, y: y[0], lambda x, y: 0.5 * (y - x).square().sum())
    run = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(1), torch.ones(1))
    info = run.step()
    run.step()
    assert info["upper"] == 1


def test_an_optimizer_with_several_rates_or_uphill_is_refused():
    problem = meha.Problem(
        lambda x, y: sum(v.sum() for v in y) + x.square().sum(),
        lambda x, y: sum((v - x).square().sum() for v in y),
        nonsmooth=L1(1.0),
    )

    def two(leaves):
        return torch.optim.SGD([{"params": leaves[:1], "lr": 0.5}, {"params": leaves[1:], "lr": 0.1}])

    for factory, message in ((two, "several learning rates"), (partial(torch.optim.SGD, lr=0.1, maximize=True), "would climb")):
        method = meha.MEHA(alpha=0.01, y_optimizer=factory, eta=0.1, gamma=1.0, c=1.0)
        with pytest.raises(ValueError, match=f"y_optimizer: .*{message}"):
            method.start(problem, torch.zeros(1), [torch.ones(1), torch.ones(2)])
