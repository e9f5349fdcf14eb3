"""No method makes a tensor on the default device: with "meta" in its place, any such tensor would spoil the run.

A machine without a GPU thus finds what would fail on one. (:mod:`tests.test_gpu` runs on the device itself.)
"""

import pytest
import torch

import meha

METHODS = [
    meha.Default(),
    meha.Default(second_order=False),
    meha.contrib.AdaptiveMEHA(),
    meha.StochasticMEHA(),
    meha.StochasticMEHA(warm_start=False),
    *(meha.MEHA(gradients=n) for n in (4, 3, 2)),
    meha.RHG(),
    meha.BDA(),
    meha.IAPTT(),
    meha.CG(),
    meha.NS(),
    meha.GALET(),
    meha.BAMM(),
    meha.BOME(),
    meha.F2SA(),
    meha.VPBGD(),
    meha.BVFIM(),
    meha.DARTS(),
]


@pytest.fixture
def elsewhere(monkeypatch):
    """The default device is "meta", except for draws from a generator of the host, which are moved afterwards."""
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **options: draw(*size, **{"device": "cpu", **options}))

    def run(method, problem, steps):
        torch.set_default_device("meta")
        try:
            run = method.start(problem, problem.x0, problem.y0)
            while run.verdict is None and run.k < steps:
                run.step()
        finally:
            torch.set_default_device(None)
        return run

    return run


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} {method.describe()[:40]}")
@pytest.mark.parametrize("make", [meha.problems.strong_convex, meha.problems.lasso], ids=["smooth", "non-smooth"])
def test_every_tensor_is_where_the_variables_are(method, make, elsewhere):
    problem = make(4)
    if problem.nonsmooth is not None and method.refuses_nonsmooth:
        pytest.skip("the method takes smooth problems only")
    run = elsewhere(method, problem, steps=30)
    assert run.x.device.type == run.y.device.type == "cpu"
    assert bool(torch.isfinite(run.x).all())


def test_a_tensor_on_the_default_device_is_found(elsewhere):
    problem = meha.problems.strong_convex(4)
    lost = meha.Problem(lambda x, y: problem.upper(x, y) + torch.ones(4).sum(), problem.lower)
    object.__setattr__(lost, "x0", problem.x0)
    object.__setattr__(lost, "y0", problem.y0)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        elsewhere(meha.MEHA(), lost, steps=3)
