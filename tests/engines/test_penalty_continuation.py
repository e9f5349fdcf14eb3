"""The rules of PenaltyContinuation, each on a small problem that fails without it."""

import pytest
import torch

import meha
from meha.engines.attempt import Start
from meha.engines.penalty_continuation import PenaltyPass, Sizes, extrapolate_stages, measure, stage_verdict
from meha.lower.flat_problem import FlatProblem
from meha.method.status import Status
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable

F64 = torch.float64


def vector(*numbers, dtype=F64):
    return torch.tensor(numbers, dtype=dtype)


def passed(problem, x0, y0, others=(), first=0, tol=1e-6, c=None):
    """A pass from (x0, y0) that follows other basins, to its end; from its first or second c, or from the given one."""
    x, y = Variable(x0.clone(), "x"), Variable(y0.clone(), "y")
    levels = FlatProblem(Oracle(problem, x, y), x, y)
    scales = measure(levels, Sizes.of(levels, tol), both_starts=True)
    now = PenaltyPass(levels, scales, Start("", c or scales.starts[first], x0, y0, list(others)), 20_000)
    while now.result is None:
        now.step()
    return now


def test_limits():
    """Errors with a second term: Richardson's rule of second order, and of first order with three stages."""
    x, y = vector(1.0, 2.0), vector(3.0)
    errors = [4.0**-k + 4.0 ** (-2 * k) for k in range(2, 6)]
    xs, ys = ([z * (1 + error) for error in errors] for z in (x, y))
    limit_x, limit_y = extrapolate_stages(xs, ys)
    assert torch.allclose(limit_x, x, rtol=1e-4 * errors[-1])
    assert torch.allclose(limit_y, y, rtol=1e-4 * errors[-1])
    assert torch.allclose(extrapolate_stages(xs[1:], ys[1:])[0], (4 * xs[-1] - xs[-2]) / 3)
    assert extrapolate_stages(xs[2:], ys[2:]) is None
    assert extrapolate_stages(xs[::-1], ys[::-1]) is None


def test_extrapolation_ends_a_pass_at_a_small_penalty():
    """The error of x is 1/c: without extrapolation, a tolerance of 1e-6 would need c = 1e6."""
    problem = meha.Problem(lambda x, y: ((y - 1) ** 2 + 0.1 * x**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    now = passed(problem, vector(0.0), vector(0.0))
    assert float(now.result.x) == pytest.approx(1 / 1.1, abs=1e-6)
    assert now.envelope.c < 1e5


def test_theta_leaves_a_maximum():
    """F holds y at a maximum of f, where its gradient vanishes: theta must leave it, and y follow."""
    problem = meha.Problem(lambda x, y: (x**2 + 10 * y[:1] ** 2).sum(), lambda x, y: ((y**2 - 1) ** 2).sum() + 0 * x.sum())
    now = passed(problem, vector(1.0), vector(0.0, 1.0))
    assert torch.allclose(now.result.y.abs(), torch.ones(2, dtype=F64), atol=1e-5)


def test_a_pass_moves_to_a_better_basin_of_the_same_height():
    problem = meha.Problem(lambda x, y: ((y - 0.5) ** 2 + x**2).sum(), lambda x, y: ((y**2 - 1) ** 2).sum() + 0 * x.sum())
    now = passed(problem, vector(1.0), vector(-1.0), others=[vector(1.0)], first=1)
    assert float(now.result.y) == pytest.approx(1.0, abs=1e-5)
    assert now.result.verdict.status is Status.CONVERGED


def test_x_stays_on_the_border_of_two_basins():
    """The well at y = -1 is the lower one for x > 0, and F draws x there while y is at 1: the optimum is x = 0."""
    problem = meha.Problem(lambda x, y: ((x - 1) ** 2 + (y - 1) ** 2).sum(), lambda x, y: ((y**2 - 1) ** 2 + 0.3 * x * y).sum())
    now = passed(problem, vector(-0.5), vector(1.0), others=[vector(-1.0)], first=1)
    assert float(now.result.x) == pytest.approx(0.0, abs=1e-4)
    assert float(now.result.y) == pytest.approx(1.0, abs=1e-3)


def test_a_stage_without_a_minimum_gives_way_to_a_larger_penalty():
    """F alone falls without end along x = y, and F + c (f + g - v) has a minimum only from some c on."""
    problem = meha.Problem(lambda x, y: (x**2 - 4 * y + 0.5 * y * (y - x)).sum(), lambda x, y: ((y - x) ** 2).sum())
    now = passed(problem, vector(0.0), vector(0.0))
    assert float(now.result.x) == pytest.approx(2.0, abs=1e-5)


def test_a_stage_that_runs_away_along_a_line_is_begun_again_with_a_larger_penalty():
    """With z = y - x, F + c f = (x - 1)^2 / 2 - z x + c z^2 / 2 has no minimum for c < 1, and one near x = 1 for large c."""
    problem = meha.Problem(lambda x, y: (0.5 * (x - 1) ** 2 - (y - x) * x).sum(), lambda x, y: 0.5 * ((y - x) ** 2).sum())
    now = passed(problem, vector(0.5), vector(0.5), c=0.5)
    assert now.widest > 1e6
    assert now.stages[0].c == 2.0
    assert float(now.result.x) == pytest.approx(1.0, abs=1e-5)


def test_the_smoothing_of_two_basins_leaves_no_error():
    """At the border x = 0 the weights become the multipliers over c: x of a stage is exact long before 1/c is small."""
    problem = meha.Problem(lambda x, y: ((x - 1) ** 2 + (y - 1) ** 2).sum(), lambda x, y: ((y**2 - 1) ** 2 + 0.3 * x * y).sum())
    now = passed(problem, vector(-0.5), vector(1.0), others=[vector(-1.0)], first=1)
    assert now.envelope.c < 1e5
    assert abs(float(now.stages[-1].x)) < 1e-9
    # F falls by 2 per unit of x, and the difference of the wells by 0.6: that is the multiplier.
    assert now.stages[-1].c * now.point.shares[1] == pytest.approx(2 / 0.6, rel=1e-3)


def test_a_stage_that_was_not_solved_is_no_evidence():
    problem = meha.Problem(lambda x, y: ((y - 1) ** 2 + 0.1 * x**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    now = passed(problem, vector(0.0), vector(0.0))
    *before, last = now.stages
    assert stage_verdict(now.stages, now.scales, 1.0).status is Status.CONVERGED
    for stages in ([*before, last._replace(solved=False)], [*before[:-1], before[-1]._replace(solved=False), last]):
        assert stage_verdict(stages, now.scales, 1.0) is None


def test_rounding_errors_end_a_pass_in_single_precision():
    """c multiplies rounding errors: the pass ends before they spoil x."""
    problem = meha.Problem(lambda x, y: ((y - 1) ** 2 + 0.1 * x**2).sum(), lambda x, y: ((y - x) ** 2).sum())
    now = passed(problem, vector(0.0, dtype=torch.float32), vector(0.0, dtype=torch.float32))
    assert float(now.result.x) == pytest.approx(1 / 1.1, abs=1e-3)
    assert now.scales.tol == pytest.approx(10 * torch.finfo(torch.float32).eps ** (2 / 3))


def test_a_linear_upper_level_has_a_balance():
    """F has no curvature to compare with that of f: it shall move y by as much as f does."""
    problem = meha.Problem(lambda x, y: 100 * y.sum() + (x**2).sum(), lambda x, y: 2 * ((y - x - 3) ** 2).sum())
    now = passed(problem, vector(0.0), vector(0.0))
    assert now.scales.balance == pytest.approx(100 / 12)
    assert float(now.result.x) == pytest.approx(-50.0, rel=1e-5)


def test_a_pass_keeps_gradients_for_its_last_solve():
    problem = meha.problems.sine(n=10)
    solution = meha.solve(problem, problem.x0, problem.y0, meha.PenaltyContinuation(max_gradients=60))
    assert "The pass took all gradients" in solution.message
    assert solution.counts.lower <= 60
