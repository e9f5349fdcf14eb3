"""AdaptiveMEHA: the toys in all units and from all starts, and what may not go wrong on the way."""

import math

import numpy as np
import pytest
import torch
from meha_lab.problems.variants import TOYS, VARIANTS, in_units

import meha
from meha.lower.curvature import balance, probe
from meha.method.status import Status
from meha.numerics.extrapolation import combine
from meha.problem.oracle import Oracle
from meha.problem.sets import Box, NonNegative
from meha.problems import lasso, sine, strong_convex
from meha.tensors.variables import Variable

SMOOTH = ["strong convex, n = 10", "merely convex, n = 10", "sine, n = 10"]


def posed(name, variant="", **kind):
    """A toy without its constants: in other units, or from another start."""
    return VARIANTS[variant](TOYS[name](**kind))


def run_to_end(problem, steps=200):
    """The run after its end, and the errors of all steps."""
    run, errors = meha.contrib.AdaptiveMEHA().start(problem, problem.x0, problem.y0), []
    while run.k < steps and run.verdict is None:
        run.step()
        errors.append(problem.error(run.x, run.y))
    return run, errors


@pytest.mark.parametrize("name", TOYS)
def test_toys(name):
    """1e-3 in at most 100 steps, by the method's own rule, at 2 + 1 gradients a step; up to 100 of f probe the curvatures."""
    run, errors = run_to_end(posed(name))
    assert run.verdict.status is Status.RULE_MET
    assert errors[-1] <= 1e-3
    assert run.k <= 100
    assert run.counts.lower <= 2 * run.k + 100
    assert run.counts.hvp == 0


@pytest.mark.parametrize("name", SMOOTH)
def test_other_units_change_nothing(name):
    run, errors = run_to_end(posed(name))
    for units in (dict(x=0.01, y=100.0, F=100.0, f=0.01), dict(x=100.0, y=0.01, F=0.01, f=100.0)):
        other, others = run_to_end(in_units(posed(name), **units))
        assert other.k == run.k
        assert np.allclose(errors, others, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "start"),
    [("strong convex, n = 10", 1), ("sine, n = 1", 2), ("sine, n = 100", 3), ("lasso, n = 2", 1), ("lasso, n = 100", 3)],
)
def test_other_starts(name, start):
    run, errors = run_to_end(posed(name, f", start {start}"))
    assert run.verdict.status is Status.RULE_MET
    assert errors[-1] <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TOYS)
def test_all_units_and_starts(name, dtype):
    for variant in VARIANTS:
        run, errors = run_to_end(posed(name, variant, dtype=dtype))
        assert run.verdict.status is Status.RULE_MET, variant
        assert errors[-1] <= (1e-3 if dtype is torch.float64 else 2e-3), variant  # a tolerance of 3e-4 in single precision
        assert run.x.dtype == dtype
        if name in SMOOTH and dtype is torch.float64 and "times" in variant:
            _, plain = run_to_end(posed(name))
            assert np.allclose(plain, errors, rtol=1e-3, atol=1e-8), variant


@pytest.mark.parametrize("name", ["strong convex, n = 10", "merely convex, n = 10", "sine, n = 10", "lasso, n = 2"])
def test_single_precision(name):
    run, errors = run_to_end(posed(name, dtype=torch.float32))
    assert run.verdict.status is Status.RULE_MET
    assert errors[-1] <= 1e-3
    assert run.x.dtype == run.y.dtype == torch.float32


def random_quadratic(seed, condition=30.0, n=4, m=12):
    """f = y'Hy/2 - y'(Ax + a) with F = |y - t|^2/2 + |x - s|^2/20, and its solution by linear algebra."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(m, m)))
    H = basis @ np.diag(np.geomspace(1.0, 1 / condition, m)) @ basis.T
    M, b, t, s = rng.normal(size=(m, n)), rng.normal(size=m), rng.normal(size=m), rng.normal(size=n)
    x_star = np.linalg.solve(M.T @ M + 0.1 * np.eye(n), M.T @ (t - b) + 0.1 * s)  # y(x) = M x + b
    H_, A, a, t_, s_ = (torch.tensor(value) for value in (H, H @ M, H @ b, t, s))
    problem = meha.Problem(
        lambda x, y: 0.5 * (y - t_).square().sum() + 0.05 * (x - s_).square().sum(),
        lambda x, y: 0.5 * y @ (H_ @ y) - y @ (A @ x + a),
    )
    return problem, torch.zeros(n).double(), torch.zeros(m).double(), x_star


@pytest.mark.parametrize("seed", range(3))
def test_random_quadratics(seed):
    problem, x0, y0, x_star = random_quadratic(seed)
    solution = meha.solve(problem, x0, y0, meha.contrib.AdaptiveMEHA(), max_steps=500)
    assert solution.status is Status.RULE_MET
    assert np.linalg.norm(solution.x.numpy() - x_star) <= 1e-3 * np.linalg.norm(x_star)


def test_bounds_on_both_levels():
    """y(x) = max(x, 0) on Y = [0, inf). F wants x = -1 and y = 2; the best is x = y = 0.5, and with x <= 0.3, x = y = 0.3."""
    upper, lower = lambda x, y: (x + 1).square().sum() + (y - 2).square().sum(), lambda x, y: (y - x).square().sum()
    for bound, expected in ((4.0, 0.5), (0.3, 0.3)):
        problem = meha.Problem(upper, lower, x_set=Box(-4.0, bound), y_set=NonNegative())
        solution = meha.solve(
            problem, torch.tensor([0.2, 0.1]).double(), torch.ones(2).double(), meha.contrib.AdaptiveMEHA(), max_steps=300
        )
        assert solution.status is Status.RULE_MET
        assert torch.allclose(solution.x, torch.full((2,), expected).double(), rtol=1e-3)
        assert torch.allclose(solution.y, solution.x, rtol=1e-3)


def test_structures_of_tensors():
    """x as a dict and y as a list of tensors: the same run as with one tensor each."""
    toy = strong_convex(4)
    flat = meha.contrib.AdaptiveMEHA().start(meha.Problem(toy.upper, toy.lower), toy.x0, toy.y0)

    def joined(objective):
        return lambda x, y: objective(torch.cat([x["a"].reshape(-1), x["b"]]), torch.cat(y))

    x0, y0 = {"a": toy.x0[:2].reshape(1, 2), "b": toy.x0[2:]}, [toy.y0[:1], toy.y0[1:]]
    run = meha.contrib.AdaptiveMEHA().start(meha.Problem(joined(toy.upper), joined(toy.lower)), x0, y0)
    for _ in range(10):
        flat.step()
        run.step()
    assert torch.allclose(torch.cat([run.x["a"].reshape(-1), run.x["b"]]), flat.x)
    assert torch.allclose(torch.cat(run.y), flat.y)


@pytest.mark.parametrize("name", ["sine, n = 10", "lasso, n = 2"])
def test_checkpoint(name, tmp_path):
    """A run goes on from a file bit for bit, and the run that wrote it is not part of it."""
    problem = posed(name)
    first, second = (meha.contrib.AdaptiveMEHA().start(problem, problem.x0, problem.y0) for _ in range(2))
    for _ in range(20):
        first.step()
    torch.save(first.state_dict(), tmp_path / "run.pt")
    kept = first.state_dict()
    infos = [dict(first.step()) for _ in range(15)]
    for state in (torch.load(tmp_path / "run.pt", weights_only=True), kept):
        second.load_state_dict(state)
        assert [dict(second.step()) for _ in range(15)] == infos
        assert torch.equal(first.x, second.x)
        assert torch.equal(first.y, second.y)
        assert first.counts == second.counts


def test_a_solve_that_was_interrupted(tmp_path):
    toy = sine(10)
    whole = meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA())
    meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA(), max_steps=17, checkpoint=tmp_path / "run.pt")
    rest = meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA(), checkpoint=tmp_path / "run.pt")
    assert torch.equal(rest.x, whole.x)
    assert (rest.steps, rest.message, rest.counts) == (whole.steps, whole.message, whole.counts)


def test_batches_are_refused():
    toy = strong_convex(3)
    batched = meha.Problem(lambda x, y, batch: toy.upper(x, y), lambda x, y, batch: toy.lower(x, y))
    with pytest.raises(ValueError, match=r"method: AdaptiveMEHA\(\) needs the same objectives"):
        meha.contrib.AdaptiveMEHA().start(batched, toy.x0, toy.y0)


def test_a_batch_is_not_ignored():
    toy = strong_convex(3)
    problem = meha.Problem(lambda x, y, batch=None: toy.upper(x, y), lambda x, y, batch=None: toy.lower(x, y))
    run = meha.contrib.AdaptiveMEHA().start(problem, toy.x0, toy.y0)
    with pytest.raises(ValueError, match=r"batch: AdaptiveMEHA\(\) takes none, got float"):
        run.step(1.0)


def test_numbers_of_a_step():
    """They are those of the point where the step's gradients are taken; the first step begins at the start, with theta = y."""
    toy = lasso(4)
    run = meha.contrib.AdaptiveMEHA().start(toy, toy.x0 + 0.1, toy.y0 + 0.5)
    info = run.step()
    assert info["upper"] == pytest.approx(2.0)
    assert info["lower"] == pytest.approx(0.5 * (2 * 0.25**2 + 2 * 0.75**2) + 0.1 * 2.0)
    assert info["gap"] == pytest.approx(0.0)
    assert info["residual"] == pytest.approx(info["c"] * math.sqrt(4 / info["c"] ** 2 + 2 * 0.25**2 + 2 * 0.75**2))
    assert info["gamma"] == pytest.approx(0.5)


def test_the_answer_is_that_of_the_state():
    """What a run would return if stopped is in X and Y at each step, and its last steps stay near the solution."""
    problem = posed("lasso, n = 100", ", start 2")
    run = meha.contrib.AdaptiveMEHA().start(problem, problem.x0, problem.y0)
    while run.verdict is None:
        run.step()
        assert problem.x_set.holds(run.state.x)
    assert problem.error(run.x, run.y) <= 1e-3


def test_an_upper_level_that_runs_away_ends_with_a_status():
    """F = -x^2 + y^2/2 with y = x has no minimum: no NaN in the answer, and not converged."""
    problem = meha.Problem(lambda x, y: (y.square() / 2 - x.square()).sum(), lambda x, y: (y - x).square().sum())
    solution = meha.solve(problem, torch.ones(1), torch.zeros(1), meha.contrib.AdaptiveMEHA(), max_steps=2000)
    assert solution.status in (Status.DIVERGED, Status.NON_FINITE)
    assert torch.isfinite(solution.x).all()
    assert torch.isfinite(solution.y).all()


def test_edges_of_a_domain_shrink_the_steps():
    """y(x) = x, and log(y) makes NaN of steps across 0, which does happen; the solution x = y = 1/2 lies inside."""
    seen = []

    def lower(x, y):
        seen.append(float(y.detach()))
        return (y - x * y.log()).sum()

    problem = meha.Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lower, x_set=Box(0.01, 10.0))
    solution = meha.solve(
        problem, torch.tensor([2.0]).double(), torch.tensor([10.0]).double(), meha.contrib.AdaptiveMEHA(), max_steps=300
    )
    assert min(seen) < 0
    assert solution.status is Status.RULE_MET
    assert float(solution.x) == pytest.approx(0.5, rel=1e-3)


def test_a_gradient_that_is_nan_at_the_start():
    problem = meha.Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - x).square().sum() + y.sqrt().sum() * 0)
    solution = meha.solve(problem, torch.ones(1), torch.zeros(1), meha.contrib.AdaptiveMEHA(), max_steps=50)
    assert solution.status is Status.NON_FINITE
    assert torch.equal(solution.x, torch.ones(1))


def quadratic(x, y):
    return (y - x).square().sum()


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("x0", [1.0, 1e6 + 0.01])
def test_a_distant_optimum_is_reached(offset, x0):
    """Far from the start or next to it, also where most of F is a constant."""
    problem = meha.Problem(lambda x, y: (x - 1e6).square().sum() + (y - 1e6).square().sum() + offset, quadratic)
    start = torch.tensor([x0]).double()
    solution = meha.solve(problem, start, start, meha.contrib.AdaptiveMEHA())
    assert solution.status is Status.RULE_MET
    assert float(solution.x) == pytest.approx(1e6)


def test_a_run_that_is_lost_has_a_verdict():
    problem = meha.Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - x).square().sum() + y.sqrt().sum() * 0)
    run = meha.contrib.AdaptiveMEHA().start(problem, torch.ones(1), torch.zeros(1))
    run.step()
    assert run.verdict.status is Status.NON_FINITE
    assert "at the start" in run.verdict.message


def test_tolerance_is_checked():
    with pytest.raises(ValueError, match="tol: must be a number of at least 0, got -1"):
        meha.contrib.AdaptiveMEHA(tol=-1.0)


def test_tolerance_zero_is_as_accurate_as_possible():
    toy = sine(10)
    solution = meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA(), tol=None)
    assert solution.method.tol == 0
    assert solution.status is Status.RULE_MET
    assert toy.distance(solution.x, solution.y).x <= 1e-6


def test_nothing_is_claimed_and_verify_judges_the_point():
    """f has two wells, and F draws y into the higher one: the rule holds there, and verify finds the other."""
    problem = meha.Problem(
        lambda x, y: (x.square() + (y - 1).square() / 4).sum(), lambda x, y: ((y.square() - 1).square() + 0.3 * y).sum()
    )
    solution = meha.solve(problem, torch.ones(1).double(), torch.ones(1).double(), meha.contrib.AdaptiveMEHA())
    assert solution.status is Status.RULE_MET
    assert "meha.verify(problem, x, y)" in solution.message
    assert float(solution.y) > 0
    assert meha.verify(problem, solution.x, solution.y).refuted


def test_the_report():
    toy = strong_convex(10)
    report = meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA()).report
    assert report["problem"].startswith("curvature in y: F ")
    assert report["course"].startswith("c = ")
    assert report["accuracy"].startswith("the limit for c to infinity changed by")


def test_balance_of_the_levels():
    """Curvatures in y are 3 and 2; in x, with y at its minimum, 4 and 6^2 / 2 = 18."""
    assert balance(F_xx=0.0, F_yy=3.0, L=2.0, L_xy=6.0) == 1.5
    assert balance(F_xx=4.0, F_yy=3.0, L=2.0, L_xy=6.0) == pytest.approx(4 / 18)
    assert balance(F_xx=4.0, F_yy=3.0, L=2.0, L_xy=0.0) == 1.5
    assert balance(F_xx=4.0, F_yy=3.0, L=0.0, L_xy=0.0) == math.inf


def test_a_tighter_tolerance():
    toy = sine(10)
    runs = [meha.solve(toy, toy.x0, toy.y0, meha.contrib.AdaptiveMEHA(tol=tol)) for tol in (1e-3, 1e-6)]
    errors = [toy.distance(solution.x, solution.y).x for solution in runs]
    assert all(solution.status is Status.RULE_MET for solution in runs)
    assert errors[1] <= 1e-5
    assert runs[0].steps < runs[1].steps


def test_curvatures_against_eigenvalues():
    """Enough rounds find the norms of all blocks, from differences of gradients alone."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(2, 9, 9))
    F, f = (torch.tensor(block + block.T) for block in half)

    def quadratic(matrix):
        return lambda x, y: 0.5 * torch.cat([x, y]) @ (matrix @ torch.cat([x, y]))

    problem = meha.Problem(quadratic(F), quadratic(f))
    x, y = Variable(torch.ones(4).double(), "x"), Variable(torch.ones(5).double(), "y")
    oracle = Oracle(problem, x, y)
    with torch.no_grad():
        found = probe(oracle, x, y, {}, rounds=60)
    expected = {"F_xx": F[:4, :4], "F_yy": F[4:, 4:], "f_yy": f[4:, 4:], "f_xy": f[:4, 4:]}
    for name, block in expected.items():
        assert found[name] == pytest.approx(np.linalg.norm(block, 2), rel=1e-2)
    assert found["F_xy"] <= np.linalg.norm(F[:4, 4:], 2) * 1.001
    assert (oracle.counts.upper, oracle.counts.lower) == (1 + 2 * 60, 1 + 3 * 60)
    assert torch.equal(x.value.detach(), torch.ones(4).double())


def test_curvatures_at_bounds():
    """The point lies in a corner of X; g = x |y| couples x and y with strength 1, and F is linear."""
    toy = lasso(4)
    x, y = Variable(toy.x0, "x"), Variable(toy.y0, "y")
    with torch.no_grad():
        found = probe(Oracle(toy, x, y), x, y, {}, rounds=2)
    assert found["F_xx"] == found["F_yy"] == found["F_xy"] == 0.0
    assert found["f_yy"] == pytest.approx(1.0, rel=1e-3)
    assert found["f_xy"] == pytest.approx(1.0, rel=1e-3)


def test_acceleration_is_gmres():
    """On a linear map, the combination minimises the residual over the span of the differences, which numpy solves."""
    rng = np.random.default_rng(1)
    A, b = 0.3 * rng.normal(size=(6, 6)), rng.normal(size=6)
    z = [rng.normal(size=6)]
    for _ in range(3):
        z.append(A @ z[-1] + b)
    images = np.array([A @ point + b for point in z])
    residuals = images - np.array(z)
    steps = np.diff(residuals, axis=0).T
    weights, *_ = np.linalg.lstsq(steps, -residuals[-1], rcond=None)
    expected = images[-1] + np.diff(images, axis=0).T @ weights
    assert np.allclose(combine(torch.tensor(images), torch.tensor(residuals)).numpy(), expected, rtol=1e-6)
    repeated = torch.tensor(images)[[0, 1, 1]], torch.tensor(residuals)[[0, 1, 1]]
    assert torch.isfinite(combine(*repeated)).all()
