"""The measured convergence rates against closed forms and an independent Algorithm 1."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from meha_lab.reproduce.rates import FLOOR, TRIALS, Rate, measure, predicted, slope

from meha import Status, Verdict
from meha.analysis.diagnostics import merit
from meha.methods import MEHA
from meha.problem.schedules import evaluate
from meha.problems import lasso, strong_convex

CELLS = [(name, p) for name, trial in TRIALS.items() for p in trial.powers]


@pytest.mark.parametrize(
    ("p", "exponents"),
    [
        (0.0, (-0.5, -0.5, 0.0, 0.0)),
        (0.1, (-0.5, -0.4, -0.1, -0.1)),
        (0.25, (-0.5, -0.25, -0.25, -0.25)),
        (0.4, (-0.5, -0.1, -0.4, -0.1)),
    ],
)
def test_exponents_of_the_theorems(p, exponents):
    found = predicted(p)
    assert list(found) == ["theta", "residual", "gap", "hypergradient"]
    assert tuple(found.values()) == pytest.approx(exponents)


K = np.geomspace(1, 1e4, 81)


@pytest.mark.parametrize("exponent", [-2.0, -0.5, -0.1, 0.0, 0.3])
def test_slope_of_a_power_law(exponent):
    assert slope(K, 7 * K**exponent) == pytest.approx(exponent, abs=1e-9)


def test_slope_is_that_of_the_end_and_not_of_the_floor():
    late = np.where(K < 900, 900**1.5 * K**-2.0, K**-0.5)
    assert slope(K, late) == pytest.approx(-0.5)
    noise = FLOOR * np.random.default_rng(0).uniform(1e-5, 0.5, K.size)
    fast = np.maximum(K**-6.0, noise)  # on the floor from K = 10^1.8 on
    assert slope(K, fast) == pytest.approx(-6.0)
    pierced = np.where(np.arange(K.size) % 7 == 3, 0.0, K**-0.25)  # exact zeros where a curve changes sign
    assert slope(K, pierced) == pytest.approx(-0.25)


def test_slope_of_nothing_is_not_a_number_and_agrees_with_nothing():
    for values in (np.zeros(81), np.where(K < 1.2, 1.0, 0.0), np.where(K > 5e3, np.inf, 1.0)):
        assert math.isnan(slope(K, values))
    assert not Rate("theta", -0.5, math.nan).agrees


def test_an_upper_bound_agrees_with_what_is_steeper():
    assert Rate("theta", -0.5, -3.0).agrees
    assert Rate("theta", -0.5, -0.46).agrees
    assert not Rate("theta", -0.5, -0.4).agrees
    assert not Rate("hypergradient", -0.1, 0.0).agrees


def algorithm(x, y, m, steps):
    """theta^k, x^k, y^k of Algorithm 1 for k = 0, ..., steps, with the derivatives of the strongly convex problem by hand."""
    theta, found = y.copy(), []
    for k in range(steps + 1):
        found.append((theta, x, y))
        c = m.c * (k + 1) ** m.p
        theta = theta - m.eta * (theta - x + (theta - y) / m.gamma)
        x = x - m.alpha * ((x - 1) / c - y + theta)
        y = y - m.beta * (y / c + y - x - (y - theta) / m.gamma)
    return found


def test_columns_against_closed_forms():
    """theta* = (gamma x + y) / (1 + gamma), gap = kappa |y - x|^2 / 2 with kappa = gamma / (1 + gamma), grad Phi = 2x - 1."""
    x0, y0 = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0])
    problem = dataclasses.replace(strong_convex(n=3), x0=torch.tensor(x0), y0=torch.tensor(y0))
    m = MEHA(alpha=0.2, beta=0.1, eta=0.2, gamma=2.0, c=3.0, p=0.3)
    found = measure(problem, m, 60, hypergradient=True)
    trace, kappa = algorithm(x0, y0, m, 62), m.gamma / (1 + m.gamma)

    def theta(k):
        theta, x, y = trace[k]
        return np.linalg.norm(theta - (m.gamma * x + y) / (1 + m.gamma))

    def residual(k):
        (_, x, y), c = trace[k + 1], m.c * (k + 1) ** m.p
        return np.linalg.norm([x - 1 + c * kappa * (x - y), y + c * kappa * (y - x)])

    def hypergradient(k):
        return np.linalg.norm(2 * trace[k + 1][1] - 1)

    ks = found["K"]
    assert ks[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ks[-1] == 60
    assert found["gap"] == pytest.approx(
        [kappa / 2 * np.linalg.norm(trace[int(k)][2] - trace[int(k)][1]) ** 2 for k in ks], rel=1e-9
    )
    for column in (theta, residual, hypergradient):
        expected = [min(column(int(k)) for k in ks if last / 2 <= k <= last) for last in ks]
        assert found[column.__name__] == pytest.approx(expected, rel=1e-9), column.__name__


def test_residual_of_the_lasso_is_the_distance_of_the_paper():
    """dist(0, grad F + c (grad f + subdifferential of g - grad v_gamma) + normal cone of X), coordinate by coordinate."""
    problem, m, steps = lasso(n=100), TRIALS["non-smooth"].method(0.25), 150
    found = measure(problem, m, steps)
    a = np.where(np.arange(100) < 50, 0.01, -0.01)
    run, distance = m.start(problem, problem.x0, problem.y0), []
    for k in range(steps + 1):
        run.step()
        x, y, c = run.x.numpy(), run.y.numpy(), m.c * (k + 1) ** m.p
        middle = (m.gamma * a + y) / (1 + m.gamma)
        theta = np.sign(middle) * np.maximum(np.abs(middle) - m.gamma * x / (1 + m.gamma), 0)
        d_x, d_y = c * (np.abs(y) - np.abs(theta)), 1 + c * (y - a - (y - theta) / m.gamma)
        d_x = np.where(x <= 0, np.minimum(d_x, 0), np.where(x >= 1, np.maximum(d_x, 0), d_x))
        d_y = np.where(y == 0, np.maximum(np.abs(d_y) - c * x, 0), d_y + c * x * np.sign(y))
        distance.append(np.hypot(np.linalg.norm(d_x), np.linalg.norm(d_y)))
    ks = [int(k) for k in found["K"]]
    expected = np.array([min(distance[k] for k in ks if last / 2 <= k <= last) for last in ks])
    early = ks.index(10)
    assert found["residual"][early:] == pytest.approx(expected[early:], rel=1e-9)
    assert (found["residual"][:early] <= expected[:early] * (1 + 1e-9)).all()


@pytest.mark.parametrize(("name", "p"), CELLS)
def test_trials_are_inside_the_range(name, p):
    trial = TRIALS[name]
    problem, method = trial.problem(), trial.method(p)
    assert method.check_theory(problem.constants) == []
    assert (method.c, method.p) == (trial.c, p)
    if trial.theorem == 2:  # f = |y|^2 / 2 - <x, y> has mu = 1
        assert problem.nonsmooth is None
        assert problem.x_set is None
        assert problem.y_set is None
        assert method.gamma > 1
        assert p > 0
        assert method.c > 4 * problem.constants.L_F


@pytest.mark.parametrize("name", TRIALS)
def test_steps_are_so_small_that_the_merit_function_decreases(name):
    """V_{k+1} - V_k <= -|dx|^2 / (4 alpha) - |dy|^2 / (4 beta), from which the proof gets its rates.

    V has L_f where the proof uses that grad_x f is Lipschitz in y; that constant is f_xy.
    """
    trial = TRIALS[name]
    problem, m = trial.problem(), trial.method(trial.powers[0])
    constants = dataclasses.replace(problem.constants, L_f=problem.constants.f_xy)
    lowest = -2.0 if name == "non-smooth" else 0.0  # of F; where the lasso's iterates are
    run = m.start(problem, problem.x0, problem.y0)

    def value():
        c = evaluate("c_k", m.c_k, run.k)
        return merit(problem, run.x, run.y, run.state.theta.detached(), m.gamma, c, constants, lower_bound=lowest, tol=1e-14)

    before = value()
    for _ in range(40):
        x, y = run.x.clone(), run.y.clone()
        run.step()
        assert float(problem.upper(run.x, run.y)) >= lowest
        after = value()
        assert after - before <= -((run.x - x).norm() ** 2) / (4 * m.alpha) - (run.y - y).norm() ** 2 / (4 * m.beta) + 1e-12
        before = after


def test_a_run_that_has_come_to_rest_ends():
    trial = TRIALS["non-smooth"]
    found = trial.measure(0.0)
    assert found["K"][-1] < 1000
    assert found["residual"][-1] < FLOOR
    rates = trial.rates(0.0, found)
    assert [rate.column for rate in rates] == ["theta", "residual"]
    assert all(rate.measured < -4 for rate in rates)  # linear convergence is steeper than any power


def far_from_the_start(self, state):
    """A verdict of a method that judges itself to be lost after ten steps."""
    return Verdict(Status.DIVERGED, "too far") if state.k >= 10 else None


def test_a_run_that_its_method_ends_is_over(monkeypatch):
    monkeypatch.setattr(MEHA, "terminate", far_from_the_start)
    trial = TRIALS["strongly convex"]
    assert trial.measure(0.25, steps=30)["K"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    end = trial.end(trial.method(0.25))
    assert (end["outcome"], end["curve"]["K"]) == ("diverged", [10])
    assert math.isfinite(end["curve"]["gap"][0])


def test_a_run_that_is_not_finite_has_no_bounds(monkeypatch):
    trial = TRIALS["strongly convex"]
    wild = dataclasses.replace(trial.method(0.25), alpha=1e200, beta=1e200)
    end = trial.end(wild)
    assert end["outcome"] == "non-finite"
    assert end["curve"]["K"][0] < 10
    assert math.isnan(end["curve"]["gap"][0])


def test_a_short_run_is_plain_numbers():
    for name, trial in TRIALS.items():
        found = json.loads(json.dumps(trial.measure(0.25, steps=30), allow_nan=False))
        assert found["K"][-1] == 30
        assert len({len(column) for column in found.values()}) == 1
        assert ("hypergradient" in found) == (name == "strongly convex")
        assert {rate.column for rate in trial.rates(0.25, found)} <= set(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "p"), CELLS)
def test_measured_rates_agree(name, p):
    trial = TRIALS[name]
    rates = trial.rates(p, trial.measure(p))
    assert all(rate.agrees for rate in rates), rates
