"""BRC and SLM against a transcription of their formulas in numpy; costs, refusals, checkpoints."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from meha_lab.baselines import BRC, SLM
from smooth import Smooth
from test_hypergradients import close, hypergradient, iterates
from test_methods import (
    AB,
    ABE,
    BAD_COUNTS,
    BAD_STEPS,
    FREE,
    GIVEN,
    IN_X,
    IN_Y,
    SEEDS,
    STEPS,
    T,
    alpha,
    beta,
    check_costs,
    check_transcription,
    descended,
    describe,
    eta,
    size,
    transcribed,
)

import meha
from meha.problem.nonsmooth import L1
from meha.problem.sets import Box


def brc(p, x, y, Y, steps=2):
    for k in range(STEPS):
        y = descended(p, x, y, steps, beta(k))
        f_y = p.f_y(x, y)
        h = p.F_x(x, y) - (p.F_y(x, y) @ f_y) / (f_y @ f_y + 1e-8) * p.f_x(x, y)
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), d_x=size(h))
        x = IN_X(x - alpha(k) * h)
        yield x, y, numbers


def slm(p, x, y, Y, delta, r, dual_step, decay, m, steps=2):
    z, lam, x_c, y_c = y, 0.0, x, y
    for k in range(STEPS):
        s = min(1, 1 / lam) if lam else 1
        for _ in range(steps):
            z = Y(z - eta(k) * p.f_y(x, z))
        gap = p.f(x, y) - p.f(x, z)
        d_x = s * (p.F_x(x, y) + lam * (p.f_x(x, y) - p.f_x(x, z)) + r * (x - x_c))
        d_y = s * (p.F_y(x, y) + lam * p.f_y(x, y) + r * (y - y_c))
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), gap=gap, c=lam, d_x=size(d_x))
        x, y = IN_X(x - alpha(k) * d_x), Y(y - beta(k) * d_y)
        lam = max(0.0, (1 - decay) * lam + dual_step(k) * (gap - delta))
        x_c, y_c = x_c + m * (x - x_c), y_c + m * (y - y_c)
        yield x, y, numbers


SMOOTHING = dict(delta=0.8, r=0.5, dual_step=lambda k: 2 / (k + 1) ** 0.2, decay=0.1, m=0.3)
OF_BRC = BRC(**AB, inner_steps=2), brc
OF_SLM = SLM(**ABE, inner_steps=2, **SMOOTHING), partial(slm, **SMOOTHING)


@pytest.mark.parametrize(("case", "Y"), [(OF_BRC, FREE), (OF_SLM, FREE), (OF_SLM, IN_Y)], ids=["BRC", "SLM", "SLM, Y"])
def test_equals_the_transcription(case, Y):
    check_transcription(*case, Y)


def test_the_multiplier_of_slm_is_zero_in_some_steps_and_positive_in_others():
    found = np.array([[numbers["c"] for *_, numbers in transcribed(*OF_SLM, FREE, seed)] for seed in SEEDS])
    assert found[:, 1:].min() == 0  # it starts from 0
    assert found.max() > 1  # where it shortens the steps


@pytest.mark.parametrize("steps", [1, 3])
def test_brc_formula(steps):
    for seed in range(3):
        p = Smooth(seed)
        run = p.start(BRC(alpha=1.0, beta=0.3, inner_steps=steps))
        h, _ = hypergradient(run)
        x, y = p.x0, iterates(p, p.x0, p.y0, steps, 0.3)[-1]
        slope = p.f_y(x, y)
        expected = p.F_x(x, y) - p.f_x(x, y) * (p.F_y(x, y) @ slope) / (slope @ slope + 1e-8)
        assert close(h, expected, 1e-10)
        assert np.allclose(run.y.numpy(), y, rtol=0, atol=1e-12)


def test_brc_at_a_lower_solution():
    """There the quotient is 0 / 0, and nothing but F_x remains."""
    p = Smooth(0)
    y = torch.tensor(iterates(p, p.x0, p.y0, 300, 0.4)[-1])
    h, _ = hypergradient(BRC(alpha=1.0, beta=0.4).start(p.problem(), p.t["x0"], y))
    assert close(h, p.F_x(p.x0, y.numpy()), 1e-6)


@pytest.mark.parametrize(
    ("method", "costs", "calls"),
    [
        (BRC(alpha=0.1, beta=0.2, inner_steps=T), (1, T + 1, 0), (1, T + 1)),
        (SLM(**GIVEN, inner_steps=T), (1, T + 2, 0), (1, T + 2)),
    ],
    ids=["BRC", "SLM"],
)
def test_costs_of_a_step(method, costs, calls):
    check_costs(method, costs, calls)


@pytest.mark.parametrize("kind", [BRC, SLM], ids=lambda kind: kind.__name__)
def test_problems_that_are_refused(kind):
    p = Smooth(0)
    y0 = torch.zeros_like(p.t["y0"])
    with pytest.raises(ValueError, match=f"^nonsmooth: {kind.__name__} cannot take L1.*, because .*; use MEHA"):
        kind().start(p.problem(nonsmooth=L1(0.1)), p.t["x0"], y0)
    constrained = p.problem(y_set=Box(-1.0, 1.0))
    if kind is SLM:
        kind().start(constrained, p.t["x0"], y0).step()
    else:
        with pytest.raises(ValueError, match=r"^y_set: BRC cannot take Box.*, because .*; use MEHA"):
            kind().start(constrained, p.t["x0"], y0)


BAD = [
    *((kind, {"inner_steps": value}, "inner_steps") for kind in (BRC, SLM) for value in BAD_COUNTS),
    *((SLM, dict(dual_step=value), "dual_step") for value in BAD_STEPS),
    *((SLM, {name: value}, name) for name in ("delta", "r") for value in (-1e-3, math.nan, "much")),
    *((SLM, {name: value}, name) for name in ("decay", "m") for value in (-0.1, 1.1, math.nan, "small")),
    (SLM, dict(m=0.0), "m"),
]


@pytest.mark.parametrize(("kind", "arguments", "named"), BAD, ids=describe)
def test_bad_arguments_are_named(kind, arguments, named):
    with pytest.raises((ValueError, TypeError), match=f"^{named}: "):
        kind(**arguments)


def test_the_schedule_of_slm_is_checked_as_it_goes():
    run = Smooth(0).start(SLM(**GIVEN, dual_step=lambda k: -1.0))
    with pytest.raises(ValueError, match=r"^dual_step: the schedule gave"):
        run.step(), run.step()


@pytest.mark.parametrize("kind", [BRC, SLM], ids=lambda kind: kind.__name__)
def test_restored_bit_for_bit(kind):
    p = Smooth(0)
    run, other = p.start(kind(alpha=alpha, beta=0.1)), p.start(kind(alpha=alpha, beta=0.1))
    for _ in range(3):
        run.step()
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    buffer.seek(0)
    other.step()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert [dict(other.step()) for _ in range(3)] == [dict(run.step()) for _ in range(3)]
    assert torch.equal(other.x, run.x)
    assert torch.equal(other.y, run.y)


def test_a_start_at_rest_is_not_convergence():
    """F is least at y0, so that the first step moves nothing but the multiplier."""
    problem = meha.Problem(lambda x, y: (y - 1).square().sum(), lambda x, y: (y - x).square().sum())
    zero = torch.zeros(2, dtype=torch.float64)
    solution = meha.solve(problem, zero, zero + 1, SLM(), max_steps=3000)
    assert solution.history["change"][0] == 0
    assert solution.x.tolist() == pytest.approx([1, 1], abs=0.05)
