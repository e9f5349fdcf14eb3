"""Further steps of theta and y in MEHA, lower levels that start over, and unrolling with kept graphs."""

import numpy as np
import pytest
import torch

import meha

A = np.array([[1.0, 0.3], [0.2, 0.8]])


def problem():
    a = torch.as_tensor(A)
    return meha.Problem(
        upper=lambda x, y: 0.5 * (x - 1).square().sum() + 0.5 * (y - 2).square().sum() + 0.1 * (x * y).sum(),
        lower=lambda x, y: 0.5 * (y - a @ x).square().sum() + 0.05 * y.pow(4).sum(),
    )


def transcription(steps, T, warm_start, alpha=0.05, beta=0.04, eta=0.1, gamma=2.0, c=1.5, p=0.3):
    """MEHA by hand for the problem above."""
    x, y0 = np.array([0.5, -0.5]), np.array([0.3, 0.2])
    y, theta = y0.copy(), y0.copy()

    def f_y(x, y):
        return y - A @ x + 0.2 * y**3

    def f_x(x, y):
        return -A.T @ (y - A @ x)

    for k in range(steps):
        c_k = c * (k + 1) ** p
        if not warm_start:
            y, theta = y0.copy(), y0.copy()

        def move_theta(theta, y, x=x):
            return theta - eta * (f_y(x, theta) + (theta - y) / gamma)

        def move_y(y, theta, x, c_k=c_k):
            return y - beta * ((y - 2 + 0.1 * x) / c_k + f_y(x, y) - (y - theta) / gamma)

        for _ in range(T - 1):
            theta = move_theta(theta, y)
            y = move_y(y, theta, x)
        theta = move_theta(theta, y)
        x = x - alpha * ((x - 1 + 0.1 * y) / c_k + f_x(x, y) - f_x(x, theta))
        if warm_start:
            y = move_y(y, theta, x)
    return x, y, theta


@pytest.mark.parametrize(("T", "warm_start"), [(1, True), (2, True), (4, True), (2, False), (3, False)])
def test_equals_a_transcription(T, warm_start):
    method = meha.MEHA(alpha=0.05, beta=0.04, eta=0.1, gamma=2.0, c=1.5, p=0.3, inner_steps=T, warm_start=warm_start)
    x0, y0 = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, -0.5], [0.3, 0.2]))
    run = method.start(problem(), x0, y0)
    for _ in range(30):
        run.step()
    x, y, theta = transcription(30, T, warm_start)
    assert np.allclose(run.x, x, atol=1e-12)
    assert np.allclose(run.y, y, atol=1e-12)
    assert np.allclose(run.state.theta.detached(), theta, atol=1e-12)
    last = 1 if warm_start else 0
    assert (run.counts.lower, run.counts.upper) == (30 * (2 * (T - 1) + 3 + last), 30 * (T - 1 + 1 + last))


def test_a_checkpoint_keeps_where_the_lower_level_begins():
    method = meha.MEHA(alpha=0.05, beta=0.04, eta=0.1, gamma=2.0, c=1.5, p=0.3, inner_steps=3, warm_start=False)
    starts = [torch.tensor(v, dtype=torch.float64) for v in ([0.5, -0.5], [0.3, 0.2], [7.0, 7.0])]
    run, other = method.start(problem(), *starts[:2]), method.start(problem(), starts[0], starts[2])
    run.step()
    other.load_state_dict(run.state_dict())
    run.step(), other.step()
    assert torch.equal(run.x, other.x)
    assert torch.equal(run.y, other.y)


def test_one_step_from_a_fixed_start_is_refused():
    with pytest.raises(ValueError, match="inner_steps: with warm_start=False"):
        meha.MEHA(warm_start=False)
    with pytest.raises(ValueError, match="inner_steps"):
        meha.MEHA(inner_steps=0)


@pytest.mark.parametrize(
    "method",
    [
        lambda keep: meha.RHG(alpha=0.05, beta=0.1, inner_steps=6, keep_graph=keep),
        lambda keep: meha.RHG(alpha=0.05, beta=0.1, inner_steps=6, terms=2, keep_graph=keep),
        lambda keep: meha.RHG(alpha=0.05, beta=0.1, inner_steps=6, warm_start=False, keep_graph=keep),
        lambda keep: meha.BDA(alpha=0.05, beta=0.1, inner_steps=6, keep_graph=keep),
        lambda keep: meha.BDA(alpha=0.05, beta=0.1, inner_steps=6, terms=3, keep_graph=keep),
        lambda keep: meha.IAPTT(alpha=0.05, beta=0.1, eta=0.02, inner_steps=6, keep_graph=keep),
    ],
)
def test_kept_graphs_give_the_same_run(method):
    runs = []
    for keep in (False, True):
        y0 = {"a": torch.tensor([0.3], dtype=torch.float64), "b": torch.tensor([0.2], dtype=torch.float64)}
        base = problem()
        nested = meha.Problem(
            lambda x, y, base=base: base.upper(x, torch.cat([y["a"], y["b"]])),
            lambda x, y, base=base: base.lower(x, torch.cat([y["a"], y["b"]])),
        )
        run = method(keep).start(nested, torch.tensor([0.5, -0.5], dtype=torch.float64), y0)
        numbers = [dict(run.step()) for _ in range(20)]
        runs.append((run, numbers))
    (a, first), (b, second) = runs
    assert torch.allclose(a.x, b.x, atol=1e-12)
    assert torch.allclose(a.y["a"], b.y["a"], atol=1e-12)
    assert a.counts == b.counts
    assert first[-1] == pytest.approx(second[-1], rel=1e-9)


def test_kept_graphs_need_free_tensors():
    method = meha.RHG(alpha=0.1, beta=0.1, keep_graph=True)
    network = torch.nn.Linear(2, 1)
    run = method.start(
        meha.Problem(lambda x, y: y(x).sum() ** 2, lambda x, y: (y(x) - 1).square().sum()), torch.ones(2), network
    )
    with pytest.raises(ValueError, match="keep_graph: y holds a module"):
        run.step()
    boxed = meha.Problem(lambda x, y: (x * y).sum(), lambda x, y: (y - x).square().sum(), y_set=meha.sets.Box(-1.0, 1.0))
    with pytest.raises(ValueError, match="keep_graph: y has a set Y"):
        method.start(boxed, torch.ones(2), torch.zeros(2)).step()


def test_F2SA_from_a_fixed_start():
    """With heads that start over, each step is the first step of a run from there."""
    options = dict(alpha=0.05, beta=0.1, eta=0.1, inner_steps=3, c=2.0)
    x0, y0 = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, -0.5], [0.3, 0.2]))
    run = meha.F2SA(**options, warm_start=False).start(problem(), x0, y0)
    x = x0
    for _ in range(3):
        run.step()
        fresh = meha.F2SA(**options).start(problem(), x, y0)
        fresh.step()
        x = fresh.x.clone()
        assert torch.allclose(run.x, x, atol=1e-14)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9)])
def test_optimizers_of_a_fresh_lower_level_remember_nothing(optimizer):
    """The answer on a batch does not depend on the batch before."""
    apart = meha.Problem(
        upper=lambda x, y, b: (y - b).square().sum() + 0 * x.sum(),
        lower=lambda x, y, b: (y - b).square().sum() * (1 + x.sum() ** 2),
    )
    steps = dict(y_optimizer=optimizer, theta_optimizer=optimizer, alpha=1e-9, gamma=1.0, c=1.0, p=0.0)
    found = []
    for before in (-5.0, 5.0):
        run = meha.MEHA(**steps, inner_steps=3, warm_start=False).start(apart, torch.zeros(1), torch.zeros(1))
        run.step(torch.tensor([before]))
        run.step(torch.tensor([1.0]))
        found.append(run.y.clone())
    assert torch.allclose(*found, atol=1e-6)
    assert found[0] > 0
