"""What the default samples before it says "converged": several points at once, and the segments to other x."""

import math

import meha_lab.problems
import pytest
import torch

import meha
from meha.engines.implicit_newton import HyperDescent
from meha.evidence.multistart import _is_monotone, _segments
from meha.evidence.sampling import Samples
from meha.lower.flat_problem import FlatProblem
from meha.lower.multistart import LowerMultistart, StartingPoint
from meha.numerics.limited_memory import LimitedMemory
from meha.problem.oracle import Oracle
from meha.problem.sets import Box
from meha.tensors.variables import Variable

F64 = torch.float64


def finished(problem, x0, y0):
    """The engine at the end of its first attempt."""
    x, y = Variable(x0.clone(), "x"), Variable(y0.clone(), "y")
    engine = HyperDescent(Oracle(problem, x, y), x, y, 1e-6)
    with torch.no_grad():
        while engine.verdict is None:
            engine.advance()
    return engine


def levels_of(engine):
    levels = FlatProblem(engine.oracle, engine.flat_x.variable, engine.flat_y.variable)
    levels.move(engine.now.x)
    return levels


def samples(engine, far=None, others=None, starts=(0.5, -0.5)):
    """Samples around the end of an engine: curvature at far points, descents from around y, and F at other x."""
    levels, y = levels_of(engine), engine.now.y
    origins = [StartingPoint(y + start, 0.1 * abs(start) * math.sqrt(len(y)), random=True) for start in starts]
    far = far or (engine.now.x[None], y[None])
    others = engine.now.x[None][:0] if others is None else others
    return Samples(engine.objective, engine.batch, engine.now.x, levels.lower(y), origins, far, others)


def logistic(n=4):
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(30, n, generator=generator, dtype=F64)
    b = (A.sum(1) + torch.randn(30, generator=generator, dtype=F64)).sign()

    def loss(y):
        return torch.nn.functional.softplus(-b[:20] * (A[:20] @ y)).mean()

    return meha.Problem(
        lambda x, y: torch.nn.functional.softplus(-b[20:] * (A[20:] @ y)).mean(),
        lambda x, y: loss(y) + 0.5 * (x.exp() * y.square()).sum(),
        x_set=Box(-6.0, 3.0),
    )


X0, Y0 = torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)


@pytest.mark.parametrize("kind", ["logistic", "quadratic"])
def test_a_batch_finds_what_single_solves_find(kind):
    problem = logistic()
    if kind == "quadratic":
        target = torch.arange(1.0, 5.0, dtype=F64)
        problem = meha.Problem(lambda x, y: (y - target).square().sum() + x.square().sum(), lambda x, y: (y - x).square().sum())
    engine = finished(problem, X0, Y0)
    others = torch.stack([engine.now.x + move for move in (0.7, -0.5, 0.2)])
    seen = samples(engine, others=others)
    assert seen._ends is not None
    assert all(math.isfinite(fallen) for fallen in seen.descents(1.0))
    for found, error in ((seen.upper(), 1e-5), (seen._solve_each(), 1e-2)):  # a batch also takes the last step
        assert torch.equal(torch.stack([x for _, x, _ in found]), others)
        for F, x, y in found:
            expected = engine.objective(x, engine.now.y)
            assert pytest.approx(expected.F, rel=error) == F
            assert torch.allclose(y, expected.y, rtol=100 * error, atol=error)


def branches(x, y):
    return (y - x).square().sum() if bool(x.sum() > -1e9) else y.sum()


def random_numbers(x, y):
    torch.rand(2)
    return (y - x).square().sum() + 0 * torch.rand(2, dtype=F64).sum()


@pytest.mark.parametrize("lower", [branches, random_numbers])
def test_what_torch_cannot_map_over_a_batch_is_taken_solve_each(lower):
    problem = meha.Problem(lambda x, y: (y - 2).square().sum() + x.square().sum(), lower)
    engine = finished(problem, X0, Y0)
    seen = samples(engine, others=engine.now.x[None] + 1)
    assert seen._ends is None
    assert seen.descents(1.0) is None
    assert seen.convex(far=True)
    ((F, x, y),) = seen.upper()
    assert pytest.approx(float(problem.upper(x, y))) == F
    solution = meha.solve(problem, X0, Y0)
    assert solution.status is meha.Status.CONVERGED
    assert torch.allclose(solution.x, torch.ones(4, dtype=F64), atol=1e-5)


def test_a_maximum_of_f_is_no_solution_at_another_x():
    """y = 0 solves the lower level for x > 0. For x < 0 it is a maximum of f, which Newton steps do not leave."""
    problem = meha.Problem(
        lambda x, y: (x - 1).square().sum() + y.square().sum(),
        lambda x, y: (0.25 * y.pow(4) + 0.5 * x * y.square()).sum(),
    )
    engine = finished(problem, torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64))
    seen = samples(engine, others=torch.tensor([[2.0], [-1.0]], dtype=F64))
    assert seen._ends is not None
    assert [F for F, _, _ in seen.upper()] == [pytest.approx(1.0), math.inf]


def test_many_unknowns_are_not_taken_at_once():
    problem = meha.Problem(lambda x, y: (y - 2).square().sum() + x.square().sum(), lambda x, y: (y - x).square().sum())
    engine = finished(problem, torch.zeros(1, dtype=F64), torch.zeros(41, dtype=F64))
    assert samples(engine)._ends is None
    assert not engine.batch.known


def test_a_lower_level_that_is_not_convex_elsewhere_is_left_to_the_continuation():
    """At the end f is convex in y, at other x it has two basins."""
    problem = meha.Problem(
        lambda x, y: (x - 2).square().sum() + (y - 0.1).square().sum(),
        lambda x, y: (0.25 * y.pow(4) + 0.5 * x * y.square() - 0.1 * y).sum(),
        x_set=Box(-3.0, 3.0),
    )
    x0, y0 = torch.full((1,), 1.5, dtype=F64), torch.zeros(1, dtype=F64)
    engine = finished(problem, x0, y0)
    assert engine.verdict.status is meha.Status.CONVERGED
    assert samples(engine).convex(far=True)
    assert not samples(engine, far=(torch.full((1, 1), -2.0, dtype=F64), torch.zeros(1, 1, dtype=F64))).convex(far=True)
    solution = meha.solve(problem, x0, y0)
    assert "upper level first" in solution.report["starts"]
    assert solution.status is meha.Status.CONVERGED


def test_a_quadratic_function_that_bends_far_away_is_seen():
    """f is quadratic on all points that Newton meets; the constant Hessian is not taken for that of far points."""
    problem = meha.Problem(
        lambda x, y: (y - 0.5).square().sum() + 0.01 * x.square().sum(),
        lambda x, y: (y - x).square().sum() - 4 * (y.abs() - 3).clamp(min=0).square().sum(),
    )
    engine = finished(problem, torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64))
    assert engine.lower.hessians.constant
    assert samples(engine).convex(far=True)
    assert not samples(engine, far=(engine.now.x[None], torch.full((1, 1), 5.0, dtype=F64))).convex(far=True)


def test_the_other_sign_of_y_is_tried():
    """f is even in y: from y0 the engine ends in the basin that F likes less, and F would gain by the other sign."""
    problem = meha.Problem(
        lambda x, y: (y + 1).square().sum() + 0.1 * x.square().sum(), lambda x, y: (y.square() - 4 - x).square().sum()
    )
    solution = meha.solve(problem, torch.zeros(1, dtype=F64), torch.full((3,), 2.0, dtype=F64))
    assert bool((solution.y < 0).all())


TWO_VALLEYS = meha.Problem(
    lambda x, y: (y - torch.tensor([1.0, -3.0], dtype=F64)).square().sum() + x.square().sum(),
    lambda x, y: (y[0].square() - 1).square() + (y[1] - x.sum()).square() + 0.1 * y[0],
)


def test_a_descent_of_a_batch_that_ends_elsewhere_is_made_again_and_shows_the_other_basin():
    engine = finished(TWO_VALLEYS, torch.zeros(1, dtype=F64), torch.tensor([1.0, 0.0], dtype=F64))
    seen = samples(engine, starts=(0.2, -2.5))
    fallen = seen.descents(1.0)
    assert fallen[0] > 0
    assert math.isnan(fallen[1])
    search = LowerMultistart(levels_of(engine), engine.now.y, LimitedMemory.sized(20, 2), 0.1, 1.0, 0.0, solved=True)
    search.origins = list(seen._origins)
    search.joined(fallen)
    assert (search.starts, len(search.origins), len(search.heights)) == (1, 1, 1)
    search.run([], 1000, most=2)
    assert sorted(round(float(basin.z[0])) for basin in search.basins) == [-1, 1]


def test_curvature_counts_at_random_starts_and_not_at_those_that_were_given():
    engine = finished(TWO_VALLEYS, torch.zeros(1, dtype=F64), torch.tensor([1.0, 0.0], dtype=F64))
    y, between = engine.now.y, torch.zeros(2, dtype=F64)  # f is not convex between the basins
    for random, convex in ((y + 0.1, True), (between, False)):
        origins = [StartingPoint(between, 0.0, random=False), StartingPoint(random, 0.0, random=True)]
        bottom, far = levels_of(engine).lower(y), (engine.now.x[None], y[None])
        seen = Samples(engine.objective, engine.batch, engine.now.x, bottom, origins, far, engine.now.x[None][:0])
        assert seen.convex(far=True)
        assert seen.convex(far=False) is convex


def test_ways_to_other_x():
    look = [(float(i), torch.full((2,), float(i)), torch.zeros(1)) for i in range(6)]  # two ends, then two points on each way
    assert [[F for F, _, _ in way] for way in _segments(look, torch.zeros(2), 2)] == [[2.0, 4.0, 0.0], [3.0, 5.0, 1.0]]
    line = [(F, torch.tensor([x]), torch.zeros(1)) for F, x in ((3.0, 2.0), (1.0, 1.0), (5.0, -1.0))]
    assert [[F for F, _, _ in way] for way in _segments(line, torch.zeros(1), 3)] == [[1.0], [1.0, 3.0], [5.0]]
    assert _is_monotone([0.0, 1.0, math.inf])
    assert not _is_monotone([0.0, -1.0])
    assert not _is_monotone([0.0, 2.0, 1.0])


def two_basins(x, y):
    """F of x = y: a wide basin at 3, and a lower one at -3, behind a hump."""
    return (0.05 * (y.square() - 9).square() + 0.5 * y).sum()


@pytest.mark.parametrize("n", [1, 2])
def test_a_better_solution_behind_a_hump_is_found(n):
    problem = meha.Problem(two_basins, lambda x, y: (y - x).square().sum())
    solution = meha.solve(problem, torch.full((n,), 2.5, dtype=F64), torch.zeros(n, dtype=F64))
    assert bool((solution.x < 0).all())


def test_without_humps_there_is_one_attempt():
    solution = meha.solve(logistic(), X0, Y0)
    assert solution.status is meha.Status.CONVERGED
    assert "starts" not in solution.report


def test_an_optimum_at_infinity_needs_no_passes():
    entry = next(entry for entry in meha_lab.problems.collection() if entry.name == "ridge, weight per feature, no bounds")
    problem = entry.make()
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert solution.status is meha.Status.AT_INFINITY
    assert solution.report["engine"].startswith("ImplicitNewton")
    assert "starts" not in solution.report
