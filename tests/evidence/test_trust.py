"""What a claim of convergence is worth: small problems with points of the lower level that only look like solutions."""

import numpy as np
import pytest
import torch

import meha
from meha import Default, Problem, Status
from meha.engines.attempt import EngineKind, Result
from meha.engines.penalty_continuation import Sizes
from meha.evidence.attempts import Attempts, attach_resolved_F, final_verdict
from meha.lower.flat_problem import FlatProblem
from meha.lower.multistart import LowerMultistart
from meha.method.status import Verdict
from meha.numerics.limited_memory import LimitedMemory
from meha.problem.oracle import Oracle
from meha.problem.sets import Box
from meha.tensors.variables import Variable


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def tilted_wells():
    """Two wells of f; F prefers the higher one."""
    return Problem(
        lambda x, y: (x.square() + (y - 1).square() / 4).sum(), lambda x, y: ((y.square() - 1).square() + 0.3 * y).sum()
    )


def test_the_higher_well_is_not_a_solution():
    solution = meha.solve(tilted_wells(), t(1.0), t(-1.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.y) == pytest.approx(np.roots([4, 0, -4, 0.3]).real.min(), abs=1e-6)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-5)


def test_a_maximum_of_the_lower_level_is_not_a_solution():
    problem = Problem(lambda x, y: (x.square() + y.square()).sum(), lambda x, y: -y.pow(4).sum(), y_set=Box(-1.0, 1.0))
    solution = meha.solve(problem, t(1.0), t(1.0))
    assert solution.status is Status.CONVERGED
    assert abs(float(solution.y)) == pytest.approx(1.0, abs=1e-6)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-5)


def test_a_basin_that_splits_on_the_way():
    """For x < 0 the minimum at y = 0 becomes a maximum between two minima."""
    problem = Problem(
        lambda x, y: ((x + 0.5).square() + y.square() / 2).sum(), lambda x, y: (x * y.square() / 2 + y.pow(4) / 4).sum()
    )
    solution = meha.solve(problem, t(1.0), t(1.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(-0.25, abs=1e-4)
    assert abs(float(solution.y)) == pytest.approx(0.5, abs=1e-4)


def test_three_stages_at_rest_are_not_enough():
    """While c is small, F holds y at its bound."""
    problem = Problem(lambda x, y: (x.square() + y).sum(), lambda x, y: (y - 1).square().sum(), y_set=Box(-1.0, 2.0))
    solution = meha.solve(problem, t(1.0), t(-1.0), meha.contrib.AdaptiveMEHA())
    assert solution.status is Status.RULE_MET
    assert float(solution.y) == pytest.approx(1.0, abs=1e-3)
    assert float(solution.x) == pytest.approx(0.0, abs=1e-3)


def test_a_start_at_the_solution_is_not_at_infinity():
    problem = Problem(
        upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lower=lambda x, y: torch.sin(x + y - 2).sum()
    )
    first = meha.solve(problem, t(-6.0), torch.zeros(10, dtype=torch.float64))
    again = meha.solve(problem, first.x, first.y)
    assert again.status is Status.CONVERGED
    assert float(again.x) == pytest.approx(float(first.x), abs=1e-5)


# Basins


def crossing_wells():
    """Wells at -1 and 1 whose order changes at x = 0; F draws x below 0, and y to 1, which is no solution there."""
    return Problem(
        lambda x, y: ((x + 1).square() + (y - 1).square()).sum(), lambda x, y: ((y.square() - 1).square() - x * y / 2).sum()
    )


@pytest.mark.parametrize("start", [(2.0, 1.0), (-2.0, -1.0), (-1.0, 1.0), (0.5, 0.0)])
def test_the_answer_may_lie_where_two_basins_are_as_low(start):
    x0, y0 = (t(number) for number in start)
    solution = meha.solve(crossing_wells(), x0, y0)
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(0.0, abs=1e-6)
    assert float(solution.y) == pytest.approx(1.0, abs=1e-6)
    assert "basins, none below y" in solution.report["lower"]


def test_the_report_tells_which_start_gave_the_answer():
    solution = meha.solve(tilted_wells(), t(1.0), t(-1.0))
    assert "ended in 2 basins" in solution.message
    starts = solution.report["starts"].split("; ")
    assert starts[0].startswith("implicit Newton: F = ")
    assert starts[1] == "upper level first: F = 0.000397014, in a basin that is not the lowest"
    assert sum("(the answer)" in line for line in starts) == 1
    assert "F = 1.0359 " in next(line for line in starts if "(the answer)" in line)


def test_a_run_on_several_basins_is_resumed_bit_for_bit(tmp_path):
    whole = meha.solve(crossing_wells(), t(2.0), t(1.0))
    path = tmp_path / "run.pt"
    for steps in (3, 20, 45, 80, 10_000):
        part = meha.solve(crossing_wells(), t(2.0), t(1.0), checkpoint=path, max_steps=steps)
    assert part.steps == whole.steps > 80
    assert torch.equal(part.x, whole.x)
    assert torch.equal(part.y, whole.y)
    assert part.counts == whole.counts
    assert part.message == whole.message


@pytest.mark.parametrize("most", [60, 150, 300])
def test_gradients_are_bounded_and_what_was_not_verified_is_not_claimed(most):
    solution = meha.solve(tilted_wells(), t(1.0), t(-1.0), Default(max_gradients=most))
    assert solution.counts.lower <= most
    assert solution.status in (Status.LOCAL, Status.FINISHED)
    assert "max_gradients" in solution.message


def test_a_saddle_is_left():
    """F draws y to the ridge of f, where the gradient in y[1] is zero."""
    problem = Problem(
        lambda x, y: (x - 1).square().sum() + (y[0] - x[0]) ** 2 + y[1] ** 2,
        lambda x, y: (y[0] - x[0]) ** 2 - y[1] ** 2 + y[1] ** 4 / 4,
    )
    solution = meha.solve(problem, t(0.0), t(0.0, 0.3))
    assert solution.status is Status.CONVERGED
    assert abs(float(solution.y[1])) == pytest.approx(2**0.5, abs=1e-3)


def search(lower, y, *, solved=True, tolerance=0.0, **parts):
    """A search of the lower level around y."""
    problem = Problem(lambda x, y: (x * y).sum(), lower, **parts)
    first, second = Variable(t(1.0), "x"), Variable(y, "y")
    levels = FlatProblem(Oracle(problem, first, second), first, second)
    return LowerMultistart(levels, y, LimitedMemory(20), 0.1, float(y.norm()) or 1.0, tolerance, solved=solved)


def test_two_descents_from_beside_a_maximum_end_on_both_of_its_sides():
    hill = search(lambda x, y: (y.square() - 1).square().sum(), t(0.0))
    assert sorted(float(hill.descend(start.y).z) for start in hill.draw([], 0)) == pytest.approx([-1.0, 1.0], abs=1e-6)


def test_a_distant_start_in_line_with_a_basin_may_still_lead_to_another():
    """At (2, 1), f is nearly the quadratic around zero; the first step, along its steep side, ends in the well at (2, 0)."""

    def lower(x, y):
        well = (-0.5 * ((y[0] - 2).square() + y[1].square()) / 0.3**2).exp()
        return 0.5 * (y[0].square() + 100 * y[1].square()) - 2.5 * well

    wells = search(lower, t(0.0, 0.0))
    assert wells.descend(t(2.0, 1.0)).z.tolist() == pytest.approx([2.0, 0.0], abs=0.1)
    assert wells.excess(wells.lowest) == pytest.approx(0.5, abs=0.1)


def test_a_lower_point_is_a_proof():
    """Of two basins, y is in the higher one; from the lower one, nothing is found."""
    lower = lambda x, y: ((y.square() - 1).square() + 0.3 * x * y).sum()  # noqa: E731
    roots = sorted(np.roots([4, 0, -4, 0.3]).real)
    values = [(root**2 - 1) ** 2 + 0.3 * root for root in roots]
    high, low = search(lower, t(roots[2])), search(lower, t(roots[0]))
    evidence = high.run([], 1000)
    assert evidence.excess == pytest.approx(values[2] - values[0], rel=1e-9)
    assert float(high.lowest.z) == pytest.approx(roots[0], abs=1e-6)
    evidence = low.run([], 1000)
    assert (evidence.excess, evidence.values, evidence.certain) == (0.0, 2, True)
    assert evidence.above == pytest.approx(values[2] - values[0], rel=1e-9)


@pytest.mark.parametrize(("error", "excess"), [(0.0, 0.6), (0.9, 0.6), (1.1, 0.0)])
def test_a_difference_that_vanishes_within_the_error_of_x_is_none(error, excess):
    """At x = 1, the wells at 1 and -1 differ by 0.6 x: by nothing at x = 0."""
    wells = search(lambda x, y: (100 * (y.square() - 1).square() + 0.3 * x * y).sum(), t(1.0), tolerance=error)
    assert wells.run([], 1000).excess == pytest.approx(excess, abs=1e-3)


def test_a_convex_lower_level_takes_few_gradients():
    matrix = torch.diag(torch.logspace(0, 2, 10, dtype=torch.float64))
    lower = lambda x, y: 0.5 * y @ matrix @ y - x.sum() * y.sum()  # noqa: E731
    bowl = search(lower, torch.linalg.solve(matrix, torch.ones(10, dtype=torch.float64)))
    evidence = bowl.run([], 1000)
    assert (evidence.values, evidence.excess, evidence.certain) == (1, 0.0, True)
    assert "found no lower value" in str(evidence)
    assert bowl.levels.oracle.counts.lower < 400


def test_flat_basins_count_once():
    """All points of a plane, and all of a circle, are solutions."""
    plane = search(lambda x, y: (y.sum() - x.sum()).square(), t(0.5, 0.5, 0.0)).run([], 1000)
    circle = search(lambda x, y: (y.square().sum() - x.sum()).square(), t(0.6, 0.8)).run([], 1000)
    assert (plane.values, plane.excess) == (circle.values, circle.excess) == (1, 0.0)


def test_all_points_of_a_plane_are_one_basin_and_two_equal_wells_are_two():
    plane = search(lambda x, y: (y.sum() - x.sum()).square(), t(0.5, 0.5, 0.0))
    wells = search(lambda x, y: (y.square() - 1).square().sum(), t(1.0))
    for found in (plane, wells):
        found.run([], 1000)
    assert (len(plane.basins), len(wells.basins)) == (1, 2)


def attempts(*Fs, engine=EngineKind.IMPLICIT_NEWTON):
    """Attempts that converged at x = 0, 1, ... and y = (0, 0) with these F; all y with y1 + y2 = 0 solve the lower level."""
    problem = Problem(lambda x, y: (y[0] - 1).square() + x.square().sum() - 1, lambda x, y: y.sum().square() + 0 * x.sum())
    first, second = Variable(t(0.0), "x"), Variable(t(2.0, 0.0), "y")
    levels = FlatProblem(Oracle(problem, first, second), first, second)
    levels.curvatures = {"f_yy": 2.0}
    found = Attempts(levels, Sizes.of(levels, 1e-6), lambda: 1000)
    end = Verdict(Status.CONVERGED, "Found.")
    found.results = [Result(engine, "", t(float(k)), t(0.0, 0.0), F, 0.0, True, 1.0, [], "", "", end) for k, F in enumerate(Fs)]
    return found


@pytest.mark.parametrize(
    ("Fs", "engine", "confident"),
    [
        ((1.0,), EngineKind.IMPLICIT_NEWTON, True),
        ((1.0, 2.0), EngineKind.IMPLICIT_NEWTON, False),
        ((1.0, 2.0, 1.0), EngineKind.IMPLICIT_NEWTON, False),
        ((1.0, 2.0, 1.0, 1.0), EngineKind.IMPLICIT_NEWTON, True),
        ((1.0, 2.0, 1.0, 1.0, 3.0), EngineKind.IMPLICIT_NEWTON, False),
        ((1.0, 2.0), EngineKind.PENALTY_CONTINUATION, False),
        ((1.0, 2.0, 1.0), EngineKind.PENALTY_CONTINUATION, True),
    ],
)
def test_the_best_is_found_twice_and_by_newton_once_more_for_each_other_solution(Fs, engine, confident):
    assert attempts(*Fs, engine=engine).is_confident is confident


def test_F_at_the_lower_solution_nearest_to_the_start_is_told_unless_its_basin_is_higher():
    """(1, -1) is the solution nearest to (2, 0); F is -1 there, and 0 where y is zero."""
    found = attempts(-1.5)
    result = attach_resolved_F(found.levels, found.sizes, found.results[0])
    assert result.F_nearest == pytest.approx(-1.0, abs=1e-9)
    assert "F = -1.5 at the returned y, but -1 at the one nearest to y0" in final_verdict(result).message
    in_a_lower_basin = found.results[0]._replace(lower=-1.0)
    assert attach_resolved_F(found.levels, found.sizes, in_a_lower_basin).F_nearest is None


def test_coordinates_of_basins_are_exchanged():
    """Of 2^12 basins, one is the lowest: each coordinate must be on its own side."""
    tilt = t(*(0.1 * (-1) ** (i // 2) for i in range(12)))
    wells = search(lambda x, y: ((y.square() - 1).square() + tilt * y * x).sum(), torch.ones(12, dtype=torch.float64))
    evidence = wells.run([], 3000)
    assert torch.equal(wells.lowest.z.sign(), -tilt.sign())
    assert not evidence.certain


def test_a_search_that_may_take_nothing_has_no_evidence():
    evidence = search(lambda x, y: (y.square() - x).square().sum(), t(1.0)).run([], 0)
    assert (evidence.starts, evidence.certain) == (0, False)


# Problems without x


def test_the_solution_of_least_norm():
    """The lower level has a plane of solutions; that of least norm follows from the pseudo-inverse."""
    generator = torch.Generator().manual_seed(0)
    A, b = torch.randn(2, 5, generator=generator, dtype=torch.float64), t(1.0, -2.0)
    problem = Problem(upper=lambda y: y.square().sum(), lower=lambda y: (A @ y - b).square().sum())
    for method, accuracy, status in ((None, 1e-6, Status.CONVERGED), (meha.contrib.AdaptiveMEHA(), 1e-3, Status.RULE_MET)):
        solution = meha.solve(problem, None, torch.ones(5, dtype=torch.float64), method)
        assert solution.status is status
        assert solution.x is None
        assert torch.allclose(solution.y, torch.linalg.pinv(A) @ b, atol=accuracy)
    assert solution.diagnose().gap <= 1e-6


def test_the_accuracy_of_a_problem_without_x_is_that_of_y():
    problem = Problem(upper=lambda y: (y - 2).square().sum(), lower=lambda y: y.square().sum())
    solution = meha.solve(problem, None, t(1.0))
    assert solution.message.startswith("y, extrapolated in 1/c")
    assert float(solution.y) == pytest.approx(0.0, abs=1e-6)


def test_problems_without_x_are_checked_and_resumed(tmp_path):
    problem = Problem(upper=lambda y: (y - 2).square().sum(), lower=lambda y: (y[0] * y[1] - 1).square())
    report = meha.check(problem, None, t(1.0, 3.0))
    assert report.ok
    assert ("start", "no x; y: 2 numbers; float64 on cpu.") in report.findings
    whole = meha.solve(problem, None, t(1.0, 3.0))
    path = tmp_path / "run.pt"
    meha.solve(problem, None, t(1.0, 3.0), checkpoint=path, max_steps=5)
    assert torch.equal(meha.solve(problem, None, t(1.0, 3.0), checkpoint=path).y, whole.y)
    run = Default().start(problem, None, t(1.0, 3.0))
    run.step()
    assert run.x is None


def test_batches_without_x():
    data = torch.ones(8, 2, dtype=torch.float64)
    problem = Problem(upper=lambda y, batch: y.square().sum(), lower=lambda y, batch: (batch @ y - 1).square().mean())
    solution = meha.solve(problem, None, t(1.0, 3.0), batches=[data], max_steps=3)
    assert solution.method.name == "StochasticMEHA"
    assert solution.x is None


@pytest.mark.parametrize(
    ("problem", "x0", "kind", "message"),
    [
        (
            Problem(lambda x, y: (x * y).sum(), lambda x, y: (x - y).square().sum()),
            None,
            TypeError,
            "both must be functions of y",
        ),
        (Problem(lambda y: y.sum(), lambda y: y.square().sum()), t(1.0), TypeError, "upper: takes y alone, but there is an x0"),
        (
            Problem(lambda y: torch.ones(()), lambda y: y.square().sum()),
            None,
            ValueError,
            "all solutions .* minimise lower alone",
        ),
        (Problem(lambda y: y.sum(), lambda y: torch.ones(())), None, ValueError, "lower: does not depend on y.* any y solves"),
        (
            Problem(lambda y: y.sum(), lambda y: y.square().sum(), x_set=Box(0.0, 1.0)),
            None,
            ValueError,
            "x_set: .* there is no x",
        ),
    ],
    ids=["two arguments", "an x", "constant F", "constant f", "a set for x"],
)
def test_what_makes_no_sense_is_refused_with_a_reason(problem, x0, kind, message):
    with pytest.raises(kind, match=message):
        meha.solve(problem, x0, t(1.0))


def test_a_method_that_moves_x_alone_refuses_a_problem_without_x():
    problem = Problem(lambda y: y.sum(), lambda y: y.square().sum())
    with pytest.raises(ValueError, match="there is no x"):
        meha.solve(problem, None, t(1.0), meha.RHG(alpha=0.1, beta=0.1))


def test_an_upper_level_that_ignores_y():
    """x minimises F alone, and y is any solution there."""
    problem = Problem(lambda x, y: (x - 2).square().sum(), lambda x, y: (y - 3 * x).square().sum())
    solution = meha.solve(problem, t(0.0), t(1.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(2.0, abs=1e-5)
    assert float(solution.y) == pytest.approx(6.0, abs=1e-4)


# Before a run


def test_check_counts_basins():
    report = meha.check(tilted_wells(), t(1.0), t(-1.0))
    assert report.basins == 2
    ((_, sentence),) = [finding for finding in report.findings if finding[0] == "basins"]
    assert "in 2 basins, the lowest 0.6 below the next" in sentence
    bowl = meha.check(Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - x).square().sum()), t(1.0), t(-1.0))
    assert bowl.basins is None
