"""Runs can be saved and continued bit for bit; states of other runs are refused."""

import io
from functools import partial

import pytest
import torch

import meha
from meha.problem.nonsmooth import GroupL2
from meha.problem.sets import NonNegative

ADAM = partial(torch.optim.Adam, lr=0.01)


def network_run(y_optimizer=ADAM):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(16, 3, generator=generator), torch.randn(16, 2, generator=generator)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    problem = meha.Problem(
        upper=lambda x, y: (y(inputs[:8]) - targets[:8]).square().mean() + 0.01 * x["scale"].square(),
        lower=lambda x, y: (x["weights"].sigmoid()[:, None] * (y(inputs) - targets).square()).mean() * x["scale"].exp(),
    )
    method = meha.MEHA(alpha=0.1, eta=lambda k: 0.1 / (k + 1), y_optimizer=y_optimizer, gamma=10.0, c=1.0, p=0.2)
    return method.start(problem, {"weights": torch.zeros(16), "scale": torch.tensor(0.0)}, model)


def tensor_run():
    problem = meha.problems.group_lasso(30, groups=6, design="orthogonal")
    return problem.preset("theory").start(problem, problem.x0, problem.y0)


def everything(run):
    return {
        f"{part}.{name}": tensor.detach().clone()
        for part, variable in (("x", run.state.x), ("y", run.state.y), ("theta", run.state.theta))
        for name, tensor in variable.tensors().items()
    }


def batch_run():
    """Numbers left out, and objectives that need a batch: they are chosen in the first step."""
    problem = meha.Problem(
        upper=lambda x, y, batch: (y - batch).square().sum() + x.square().sum(),
        lower=lambda x, y, batch: (y - x * batch).square().sum(),
    )
    run = meha.MEHA(gamma=0.1).start(problem, torch.zeros(2), torch.zeros(2))
    take = run.step
    run.step = lambda: take(torch.tensor([1.0, 2.0]) + run.k % 3)
    return run


@pytest.mark.parametrize("start", [network_run, tensor_run, batch_run])
def test_restored_bit_for_bit(start):
    run = start()
    for _ in range(5):
        run.step()
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    expected = [dict(run.step()) for _ in range(5)]
    final, counts = everything(run), run.counts

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for other in (start(), run):
        if other is not run:
            other.step()
        other.load_state_dict(saved)
        assert other.k == 5
        assert [dict(other.step()) for _ in range(5)] == expected
        found = everything(other)
        assert found.keys() == final.keys()
        assert all(torch.equal(found[name], final[name]) for name in final)
        assert other.counts == counts


def test_restored_with_frozen_parameters_and_an_F_without_x():
    """Frozen layers, batch norm and an upper objective that ignores x leave no trace that a checkpoint misses."""

    def start(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
        model[0].requires_grad_(False)
        inputs = torch.arange(12, dtype=torch.float64).reshape(6, 2).sin()
        problem = meha.Problem(lambda x, y: (y(inputs) - 1).square().sum(), lambda x, y: (y(inputs) - x).square().sum())
        method = meha.MEHA(alpha=0.01, beta=0.01, eta=0.01, gamma=1.0, c=1.0)
        return method.start(problem, torch.zeros(1, dtype=torch.float64), model)

    run, other = start(0), start(1)
    run.step()
    other.load_state_dict(run.state_dict())
    for _ in range(3):
        assert dict(run.step()) == dict(other.step())
    found, expected = everything(other), everything(run)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("alpha", [0.10000001, lambda k: 0.1, lambda k: 0.5 / (k + 1)])
def test_nearly_equal_methods_are_told_apart(alpha):
    problem = meha.problems.strong_convex(2)
    others = dict(beta=0.1, eta=0.05, gamma=2.0, c=1.0)
    run = meha.MEHA(alpha=0.1, **others).start(problem, problem.x0, problem.y0)
    other = meha.MEHA(alpha=alpha, **others).start(problem, problem.x0, problem.y0)
    with pytest.raises(ValueError, match="start the run with the same method"):
        other.load_state_dict(run.state_dict())


def test_a_state_dict_does_not_follow_the_run():
    run = tensor_run()
    state = run.state_dict()
    before = {name: tensor.clone() for name, tensor in state["state"]["y"].items()}
    run.step()
    assert all(torch.equal(state["state"]["y"][name], before[name]) for name in before)


def test_foreign_states_are_refused_and_change_nothing():
    run = tensor_run()
    run.step()
    good = run.state_dict()
    before = everything(run)

    def altered(**changes):
        return {**good, "state": {**good["state"], **changes}}

    cases = [
        ({}, "lacks"),
        ({**good, "method": "BOME"}, "was written by BOME"),
        ({**good, "given": "gamma=1"}, "gamma=1"),
        (altered(x={"": torch.zeros(7, dtype=torch.float64)}), r"x: the state has \(7,\)"),
        (altered(y={"": torch.zeros(30)}), "float32"),
        (altered(theta={"other": torch.zeros(3)}), "another variable"),
        (altered(theta={"": "text"}), "str"),
        ({**good, "state": {"x": good["state"]["x"]}}, "another method"),
        ({**good, "state": None}, "another method"),
        (altered(k="five"), "k must be the number of steps"),
        (altered(y=None), "damaged"),
        ({**good, "counts": {"upper": 1, "other": 2}}, "counts cannot be read"),
        ({**good, "chosen": {"gamma": -1.0}}, "gamma"),
        ({**good, "chosen": {"speed": 1.0}}, "cannot be read"),
        ([1, 2], "lacks"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            run.load_state_dict(state)
        found = everything(run)
        assert all(torch.equal(found[name], before[name]) for name in before)
        assert run.k == 1
    network = network_run()
    network.step()
    broken, kept = network.state_dict(), everything(network)
    broken["state"]["y_optimizer"] = {"state": {0: "nothing"}}
    with pytest.raises(ValueError, match="damaged"):
        network.load_state_dict(broken)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in everything(network).items())
    other = network_run(y_optimizer=partial(torch.optim.SGD, lr=0.01))
    with pytest.raises(ValueError, match="this run is MEHA"):
        other.load_state_dict(network_run().state_dict())


def test_run_shows_its_variables():
    problem = meha.Problem(
        upper=lambda x, y: (y[0] - 1).square().sum() + x[0],
        lower=lambda x, y: (y[0] - x[1]).square().sum(),
        nonsmooth=GroupL2([2], weight=lambda x: x[0]),
        x_set=NonNegative(),
    )
    x0, y0 = (torch.tensor(0.1), torch.tensor([0.5])), [torch.zeros(2)]
    run = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, x0, y0)
    run.step()
    assert isinstance(run.x, tuple)
    assert isinstance(run.y, list)
    assert not run.x[0].requires_grad
    assert torch.equal(x0[1], torch.tensor([0.5]))
    assert not torch.equal(run.x[1], x0[1])


def test_numbers_are_chosen_with_the_first_batch():
    run = batch_run()
    assert run.method.eta is None
    run.step()
    assert run.method.gamma == 0.1
    assert run.method.eta > 0
    assert run.constants.f_yy == pytest.approx(2.0, rel=1e-2)


def test_chosen_numbers_are_restored_wherever_the_other_run_starts():
    problem = meha.problems.sine(2)
    hidden = meha.Problem(lambda x, y: problem.upper(x, y), lambda x, y: (y - x).pow(4).sum())
    runs = [meha.MEHA(p=0.49).start(hidden, problem.x0, y0) for y0 in (problem.y0, problem.y0 + 3)]
    assert runs[0].method != runs[1].method
    runs[1].load_state_dict(runs[0].state_dict())
    assert runs[0].method == runs[1].method
    assert dict(runs[0].step()) == dict(runs[1].step())
