"""The numbers of ``Trained`` that are left out: against training by hand in numpy, and what stays as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import meha
from meha.lower.training import CURVES, GAINED, LONGEST, MARGIN, Training, complete
from meha.problem.oracle import Oracle
from meha.problem.responses import Trained
from meha.tensors.variables import Variable

DOUBLE = torch.float64
CURVED = torch.tensor([4.0, 1.0, 0.25], dtype=DOUBLE)


def quadratic(scale=1.0, **parts):
    """f = scale/2 (y - x)' diag(CURVED) (y - x); training is stable for steps below 2 / (4 scale)."""
    return meha.Problem(
        upper=lambda x, y: (y - 1).square().sum(),
        lower=lambda x, y: scale * (CURVED * (y - x).square()).sum() / 2,
        **parts,
    )


def looked(problem, x0, y0, batch=None):
    with torch.no_grad():
        x, y = Variable(x0, "x"), Variable(y0, "y")
        oracle = Oracle(problem, x, y)
        return oracle, *complete(oracle, x, y, batch, problem.response)


START = torch.ones(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)


def fall(lr, steps):
    """f along gradient steps of the quadratic from its start, in numpy."""
    curved = CURVED.numpy()
    factors = (1 - lr * curved) ** np.arange(steps + 1)[:, None]
    return (curved * factors**2).sum(1) / 2


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_quadratic_is_trained_at_the_inverse_of_its_curvature(scale):
    """The step is 1 / L up to the accuracy of L: twice as long is the edge of stability, and the margin is kept."""
    oracle, found, words = looked(quadratic(scale, response=Trained()), *START)
    lr = found.lr * scale
    assert lr == pytest.approx(1 / 4, rel=0.02)
    values = fall(lr, LONGEST)
    enough = values[0] - GAINED * (values[0] - values[-1])
    assert found.steps == np.argmax(values <= enough) == 13
    assert f"{found.steps} steps of {found.lr:.3g} lower f + g" in words
    assert f"{oracle.counts.lower} gradients of f" in words


def test_the_step_size_is_found_beyond_a_wrong_first_guess(monkeypatch):
    """A start at which f is flat, or steeper than further on, does not decide."""
    for guess, wanted in ((1e-3, 0.256), (40.0, 0.3125)):
        monkeypatch.setattr("meha.lower.training.Probe.block", lambda *_, guess=guess: (0.0, 1 / guess))
        _, found, _ = looked(quadratic(response=Trained()), *START)
        assert found.lr == pytest.approx(wanted)  # a power of two times the guess, and stable with the margin: below 0.354
        assert MARGIN * found.lr < 0.5


def test_one_number_may_be_given():
    _, found, words = looked(quadratic(response=Trained(steps=7)), *START)
    assert (found.steps, found.lr) == (7, pytest.approx(1 / 4, rel=0.02))
    assert words.startswith("7 steps of 0.25")
    oracle, found, _ = looked(quadratic(response=Trained(lr=0.05)), *START)
    values = fall(0.05, LONGEST)
    enough = values[0] - GAINED * (values[0] - values[-1])
    assert (found.steps, found.lr) == (np.argmax(values <= enough), 0.05)
    assert oracle.counts.lower == LONGEST + 1
    assert looked(quadratic(response=Trained(steps=7, lr=0.05)), *START)[1] == Trained(steps=7, lr=0.05)


def test_the_work_is_bounded():
    """Also where every longer step is better, as on a slope, and where none is good."""
    slope = meha.Problem(lambda x, y: (y - x).square().sum(), lambda x, y: (x * y).sum(), response=Trained())
    oracle, _, _ = looked(slope, *START)
    assert oracle.counts.lower <= (CURVES + 2) * (LONGEST + 1) + 60  # those of the curvature
    kink = meha.Problem(lambda x, y: (y - x).square().sum(), lambda x, y: (y - x).abs().sum(), response=Trained(steps=1))
    oracle, found, _ = looked(kink, START[0] / 3, START[1])
    assert found.lr < 1


def test_a_prox_takes_part():
    """f falls outside of Y; in it, all steps end at its corner."""
    box = meha.sets.Box(0.0, 0.5)
    _, found, words = looked(quadratic(y_set=box, response=Trained()), *START)
    assert found.steps < 13
    assert f"50 steps to {float((CURVED * 0.25).sum() / 2):.4g} " in words


def test_a_start_at_the_solution_takes_all_steps():
    _, found, _ = looked(quadratic(response=Trained()), START[0], START[0])
    assert found.steps == LONGEST


class Noisy(nn.Module):
    """Batch normalisation with running statistics, and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, z):
        return self.net(z)


@pytest.mark.parametrize("start", [None, "redraw"])
def test_nothing_else_changes(start):
    torch.manual_seed(0)
    y, data = Noisy(), torch.randn(30, 4)
    x0, response = nn.Linear(4, 1), Trained(start=start)
    problem = meha.Problem(
        lambda x, y: y(data).square().mean(), lambda x, y: (x(data).exp() * (y(data) - 1).square()).mean(), response=response
    )
    before = [tensor.clone() for module in (x0, y) for tensor in module.state_dict().values()]
    y.net[0].weight.grad = torch.ones_like(y.net[0].weight)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = looked(problem, x0, y)
    assert all(map(torch.equal, before, [tensor for module in (x0, y) for tensor in module.state_dict().values()]))
    assert bool((y.net[0].weight.grad == 1).all())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    again = looked(problem, x0, y)
    assert first[1:] == again[1:]
    assert first[0].counts.upper == 0 < first[0].counts.lower


def test_curves_see_one_mask_and_one_start():
    torch.manual_seed(0)
    y, data = Noisy(), torch.randn(30, 4)
    problem = meha.Problem(
        lambda x, y: y(data).square().mean(), lambda x, y: (x.exp() * (y(data) - 1).square()).mean(), response=Trained()
    )
    with torch.no_grad():
        x = Variable(torch.zeros(1), "x")
        training = Training(Oracle(problem, x, v := Variable(y, "y")), x, v, None, problem.response)
        first, second = training.curve(1e-3, 5), training.curve(1e-3, 5)
    assert first == second
    assert first.stable


@pytest.mark.parametrize(
    ("response", "lower", "message"),
    [
        (Trained(), lambda x, y: (y - x).square().sum() / y.sum(), r"lower: is (nan|inf|-inf) where training begins"),
        (Trained(lr=10.0), lambda x, y: (y - x).square().sum(), r"does training lower f \+ g .*give a smaller one than 10"),
        (Trained(lr=1.5), lambda x, y: (y - x).square().sum(), r"does training lower f \+ g .*give a smaller one than 1.5"),
        (
            Trained(),
            lambda x, y: (2 * (y - x).detach().square() - (y - x).square()).sum(),
            r"does training lower f \+ g .*give it, as in Trained",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(response, lower, message):
    problem = meha.Problem(lambda x, y: (y - 1).square().sum(), lower, response=response)
    with pytest.raises(ValueError, match=message):
        looked(problem, *START)
