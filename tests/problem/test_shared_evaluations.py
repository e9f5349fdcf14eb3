"""MEHA with 3 or 2 gradients of f a step: the updates of its docstring, and the fixed points of the algorithm."""

import pytest
import torch
from torch import nn

import meha
from meha import MEHA, Problem
from meha.problem.nonsmooth import L1
from meha.problem.sets import Box
from meha.problems import lasso, merely_convex, sine, strong_convex

STEPS = dict(alpha=0.1, beta=0.07, eta=0.2, gamma=1.5, c=2.0, p=0.0)


def upper(x, y):
    return (x - 1).square().sum() + (y * x).sum() + y.square().sum()


def lower(x, y):
    return torch.sin(x + y).sum() + 0.5 * (y - x).square().sum()


def grad(function, *at):
    at = [part.detach().requires_grad_() for part in at]
    return torch.autograd.grad(function(*at), at)


def shrink(y, threshold):
    return y.sign() * (y.abs() - threshold).clamp(min=0)


def by_hand(gradients, x, y, theta):
    """One step as the docstring has it, for g = sum_i x_i |y_i| and boxes."""
    alpha, beta, eta, gamma, c, _ = STEPS.values()
    h_x, h_theta = grad(lower, x, theta)
    new_theta = shrink(theta - eta * (h_theta + (theta - y) / gamma), eta * x).clamp(-2, 2)
    (F_x, F_y), (f_x, f_y) = grad(upper, x, y), grad(lower, x, y)
    seen = new_theta if gradients == 3 else theta
    if gradients == 3:
        h_x = grad(lower, x, new_theta)[0]
    d_x = F_x / c + f_x + y.abs() - h_x - seen.abs()
    new_x = (x - alpha * d_x).clamp(0.1, 5)
    new_y = shrink(y - beta * (F_y / c + f_y - (y - new_theta) / gamma), beta * new_x).clamp(-2, 2)
    return new_x, new_y, new_theta


@pytest.mark.parametrize("gradients", [3, 2])
def test_the_step_is_that_of_the_docstring(gradients):
    problem = Problem(upper, lower, nonsmooth=L1(weight=lambda x: x), x_set=Box(0.1, 5.0), y_set=Box(-2.0, 2.0))
    x, y = torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([-1.0, 0.3, 1.4]).double()
    run = MEHA(**STEPS, gradients=gradients).start(problem, x, y)
    theta = y
    for _ in range(4):
        gap = meha.diagnostics.gap(problem, x, y, STEPS["gamma"])
        assert run.step()["gap"] <= gap + 1e-9
        x, y, theta = by_hand(gradients, x, y, theta)
        for found, expected in zip((run.x, run.y, run.state.theta.detached()), (x, y, theta), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (run.counts.upper, run.counts.lower) == (4, 4 * gradients)


@pytest.mark.parametrize("gradients", [3, 2])
@pytest.mark.parametrize("make", [sine, strong_convex, merely_convex, lasso], ids=lambda make: make.__name__)
def test_the_fixed_points_are_those_of_the_algorithm(make, gradients):
    """With a fixed c it comes to rest where the algorithm rests as well; that is one point, but for the lasso."""
    problem = make(4)
    preset = vars(problem.preset("recipe")) | {"p": 0.0}
    assert not callable(preset["c"])
    runs = [MEHA(**preset | {"gradients": g}).start(problem, problem.x0, problem.y0) for g in (4, gradients)]
    for run in runs:
        for _ in range(1500 if make is lasso else 1000):
            run.step()
    paper, shared = runs
    if make is not lasso:
        torch.testing.assert_close(shared.x, paper.x, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shared.y, paper.y, rtol=1e-6, atol=1e-6)
    paper.state.load_state_dict(shared.state.state_dict())
    before = [paper.x.clone(), paper.y.clone()]
    for _ in range(3):
        assert paper.step()["residual"] < 1e-4
    torch.testing.assert_close([paper.x, paper.y], before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gradients", [4, 3, 2])
def test_networks_take_so_many_gradients_and_learn(gradients):
    torch.manual_seed(0)
    images, labels = torch.randn(60, 8), torch.randint(3, (60,))
    weights, net = torch.zeros(40), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    problem = Problem(
        upper=lambda x, y: nn.functional.cross_entropy(y(images[40:]), labels[40:]),
        lower=lambda x, y: (x.sigmoid() * nn.functional.cross_entropy(y(images[:40]), labels[:40], reduction="none")).mean(),
    )
    run = MEHA(alpha=1.0, beta=0.5, eta=0.5, gamma=10.0, c=1.0, gradients=gradients).start(problem, weights, net)
    values = [run.step()["upper"] for _ in range(60)]
    assert (run.counts.upper, run.counts.lower) == (60, 60 * gradients)
    assert values[-1] < 0.7 * values[0]
    assert float(run.x.abs().max()) > 1e-3


@pytest.mark.parametrize("gradients", [3, 2])
def test_lower_levels_that_begin_anew(gradients):
    """y is not moved at the end, so that 3 is the algorithm itself, and 2 saves the gradient at theta."""
    x, y = torch.tensor([0.5, 1.0]).double(), torch.zeros(2).double()
    runs = [
        MEHA(**STEPS, inner_steps=3, warm_start=False, gradients=g).start(Problem(upper, lower), x, y) for g in (4, gradients)
    ]
    for run in runs:
        for _ in range(300):
            run.step()
    assert runs[1].counts.lower == 300 * (7 if gradients == 3 else 6)
    if gradients == 3:
        assert torch.equal(runs[0].x, runs[1].x)


@pytest.mark.parametrize("gradients", [1, 5, 3.5, "3", True])
def test_bad_numbers_are_refused(gradients):
    with pytest.raises(ValueError, match="gradients: must be 4"):
        MEHA(**STEPS, gradients=gradients)
