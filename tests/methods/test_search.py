"""Grid, random and TPE search: what they try, what they keep, and that they survive candidates that fail."""

import io
import itertools
import logging
import math
import sys

import numpy as np
import pytest
import torch

import meha
from meha.methods import TPE, GridSearch, LogUniform, RandomSearch, Uniform
from meha.problem.nonsmooth import L1, SparseGroup
from meha.problem.sets import Box, L2Ball, NonNegative, Simplex
from meha.tensors.variables import Variable

A = torch.tensor([2.0, -1.0], dtype=torch.float64)
B = torch.tensor([1.5, -0.5], dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)
ONE = torch.tensor(0.0, dtype=torch.float64)
ALL = [
    GridSearch(space=Uniform(0.0, 1.0), points=9),
    RandomSearch(space=Uniform(0.0, 1.0), trials=9),
    TPE(space=Uniform(0.0, 1.0), trials=14),
]


def shrinkage(upper=None, weight=lambda x: x, **options):
    """y = soft(A, x), F = ||y - B||^2 / 2 = (x - 1/2)^2 for one weight up to 1, with minimum 0 at x = 1/2."""
    return meha.Problem(
        upper=upper or (lambda x, y: 0.5 * (y - B).square().sum()),
        lower=lambda x, y: 0.5 * (y - A).square().sum(),
        nonsmooth=L1(weight),
        **{"x_set": NonNegative(), **options},
    )


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_values_are_those_of_the_closed_form_and_the_best_is_kept(method):
    solution = meha.solve(shrinkage(), ONE, ZERO, method)
    assert solution.status is meha.Status.FINISHED
    run = method.start(shrinkage(), ONE, ZERO)
    best = math.inf
    while run.verdict is None:
        info = run.step()
        x = float(run.state.tried[-1])
        assert info["trial"] == pytest.approx((x - 0.5) ** 2, abs=1e-10)  # lower_tol is 1e-8
        if info["trial"] < best:
            best = info["trial"]
            assert float(run.x) == x
            assert torch.allclose(run.y, A.sign() * (A.abs() - x))
        assert info["upper"] == best
    assert run.k == solution.steps
    assert run.verdict.message == solution.message == f"All {run.k} candidates were tried."
    assert torch.equal(run.x, solution.x)
    assert float(run.x) == min((float(x) for x in run.state.tried), key=lambda x: abs(x - 0.5))


def test_a_grid_is_the_product_in_order_and_ends():
    space = {"a": Uniform(0.0, 1.0), "b": LogUniform(0.01, 1.0)}
    method = GridSearch(space=space, to_x=lambda p: torch.tensor([p["a"], p["b"]]), points=3)
    run = method.start(shrinkage(), ZERO, ZERO)
    while run.verdict is None:
        run.step()
    expected = list(itertools.product([0.0, 0.5, 1.0], [0.01, 0.1, 1.0]))
    assert np.allclose(torch.stack(run.state.tried), expected, rtol=1e-14)
    assert run.x.tolist() == [0.5, pytest.approx(0.1)]  # |0.1 - 1/2| < |1 - 1/2|
    with pytest.raises(RuntimeError, match="finished: All 9 candidates were tried"):
        run.step()


@pytest.mark.parametrize(
    ("space", "expected"), [(Uniform(0.0, 3.0), 1.5), (LogUniform(0.01, 100.0), 1.0)], ids=["uniform", "log"]
)
def test_one_point_is_the_middle(space, expected):
    run = GridSearch(space=space, points=1).start(shrinkage(), ONE, ZERO)
    run.step()
    assert float(run.state.tried[0]) == pytest.approx(expected)
    assert run.verdict is not None


@pytest.mark.parametrize("points", [5, 12])
def test_a_grid_finds_two_weights_to_its_spacing(points):
    """F is separable: the best point of the grid is, in each weight, the point nearest to 1/2."""
    solution = meha.solve(shrinkage(), ZERO, ZERO, GridSearch(space=Uniform(0.03, 1.0), points=points))
    spacing = 0.97 / (points - 1)
    assert (solution.x - 0.5).abs().max() <= spacing / 2 + 1e-12
    grid = torch.linspace(0.03, 1.0, points, dtype=torch.float64)
    nearest = grid[(grid - 0.5).abs().argmin()]
    assert torch.allclose(solution.x, nearest.expand(2))


def sparse_group():
    """The sparse group lasso of the VF-iDCA experiments in small, with x a dict of group weights and one l1 weight."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 12, generator=generator, dtype=torch.float64)
    truth = torch.tensor([2.0, 1.0, 0.0] + [0.0] * 9, dtype=torch.float64)
    labels = rows @ truth + 0.5 * torch.randn(60, generator=generator, dtype=torch.float64)
    problem = meha.Problem(
        upper=lambda x, y: (rows[30:] @ y - labels[30:]).square().sum() / 60,
        lower=lambda x, y: (rows[:30] @ y - labels[:30]).square().sum() / 60,
        nonsmooth=SparseGroup([3] * 4, l1=lambda x: x["l1"], group=lambda x: x["group"]),
        x_set=NonNegative(),
    )
    x0 = {"group": torch.full((4,), 0.1, dtype=torch.float64), "l1": torch.tensor(0.1, dtype=torch.float64)}
    return problem, x0, torch.zeros(12, dtype=torch.float64)


TWO = {"group": LogUniform(1e-3, 1.0), "l1": LogUniform(1e-3, 1.0)}


def shared(p):
    return {"group": p["group"] * torch.ones(4), "l1": torch.tensor(p["l1"])}


@pytest.mark.parametrize("kind", [GridSearch, RandomSearch, TPE])
def test_two_numbers_stand_for_all_weights_of_a_dict(kind):
    problem, x0, y0 = sparse_group()
    size = {"points": 4} if kind is GridSearch else {"trials": 16}
    solution = meha.solve(problem, x0, y0, kind(space=TWO, to_x=shared, **size))
    assert set(solution.x) == {"group", "l1"}
    assert solution.x["group"].dtype == torch.float64
    assert (solution.x["group"] == solution.x["group"][0]).all()
    lower = meha.diagnostics.envelope(problem, solution.x, solution.y, 1.0).value
    assert lower == pytest.approx(
        float(problem.lower(solution.x, solution.y) + problem.g.value(solution.x, solution.y)), rel=1e-9
    )
    assert solution.steps == 16
    assert solution.history["upper"] == list(np.minimum.accumulate(solution.history["trial"]))
    assert "to_x=shared" in solution.details


def test_names_of_leaves_search_those_and_leave_the_others():
    problem, x0, y0 = sparse_group()
    run = RandomSearch(space={"group": Uniform(0.2, 0.3)}, trials=5).start(problem, x0, y0)
    while run.verdict is None:
        run.step()
        assert len(run.state.tried[-1]) == 4
    assert ((run.x["group"] >= 0.2) & (run.x["group"] <= 0.3)).all()
    assert len(run.x["group"].unique()) == 4
    assert run.x["l1"] == 0.1


def seen_by(problem_of, x0, method):
    """The x at which F is evaluated."""
    seen = []

    def upper(x, y):
        seen.append(x.detach().clone())
        return 0.5 * (y - B).square().sum()

    solution = meha.solve(problem_of(upper), x0, ZERO, method)
    return seen, solution


@pytest.mark.parametrize("domain", [Box(0.25, 0.6), L2Ball(0.5, center=0.3), Simplex(0.8)], ids=repr)
@pytest.mark.parametrize("kind", [GridSearch, RandomSearch, TPE])
def test_candidates_never_leave_X(domain, kind):
    size = {"points": 4} if kind is GridSearch else {"trials": 16}
    start = domain.project(torch.tensor([0.4, 0.4], dtype=torch.float64))
    method = kind(space=Uniform(0.0, 2.0), **size)
    seen, solution = seen_by(lambda upper: shrinkage(upper, weight=lambda x: x.clamp(min=0), x_set=domain), start, method)
    assert len(seen) == 18  # the candidates, the solution, and a last look at its values
    assert all(domain.contains(x, tol=1e-12) for x in [*seen, solution.x])
    assert len({tuple(x.tolist()) for x in seen}) > 3


def test_candidates_of_random_search_depend_on_seed_and_number_alone():
    def tried(seed, upper=None):
        run = RandomSearch(space=Uniform(0.0, 1.0), trials=6, seed=seed).start(shrinkage(upper), ZERO, ZERO)
        while run.verdict is None:
            run.step()
        return torch.stack(run.state.tried)

    assert torch.equal(tried(1), tried(1, upper=lambda x, y: y.sum()))
    assert not torch.equal(tried(1), tried(2))
    many = RandomSearch(space=LogUniform(1e-2, 1.0), trials=400).start(shrinkage(), ZERO, ZERO)
    draws = torch.cat([many.method.propose(type("At", (), {"k": k}), many.method._blocks(many.state.x)) for k in range(400)])
    assert draws.log10().mean() == pytest.approx(-1.0, abs=0.06)  # uniform on [-2, 0]: 0.02 is a standard deviation
    assert draws.log10().std() == pytest.approx(2 / math.sqrt(12), abs=0.03)


def test_tpe_depends_on_its_seed_and_on_what_it_saw():
    def last(seed, upper=None):
        run = TPE(space=Uniform(0.0, 1.0), trials=14, seed=seed).start(shrinkage(upper), ZERO, ZERO)
        while run.verdict is None:
            run.step()
        return torch.stack(run.state.tried)

    one, same, other = last(3), last(3), last(3, upper=lambda x, y: y.sum())
    assert torch.equal(one, same)
    assert not torch.equal(one, last(4))
    assert torch.equal(one[:10], other[:10])
    assert not torch.equal(one[10:], other[10:])


def test_tpe_beats_random_search_on_average():
    """Five weights, each with an effect of its own; the margin over these seeds is a factor of more than two."""
    a = torch.linspace(-2, 2, 5, dtype=torch.float64)
    zero = torch.zeros(5, dtype=torch.float64)
    problem = meha.Problem(
        lambda x, y: (y - 0.6 * a).square().sum(), lambda x, y: (y - a).square().sum() / 2, nonsmooth=L1(lambda x: x)
    )

    def mean(kind):
        methods = (kind(space=Uniform(0.0, 2.0), trials=35, seed=seed) for seed in range(3))
        return np.mean([meha.solve(problem, zero, zero, method).upper for method in methods])

    assert mean(TPE) < 0.7 * mean(RandomSearch)


def nan_beyond(x, y):
    """NaN for weights over 0.65."""
    return torch.where(x > 0.65, torch.nan, 0.5 * (y - B).square().sum())


@pytest.mark.parametrize(
    "method",
    [GridSearch(space=Uniform(0.0, 1.0), points=12), RandomSearch(space=Uniform(0.0, 1.0), trials=12), ALL[2]],
    ids=lambda m: m.name,
)
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("upper", [None, nan_beyond], ids=["fine", "nan"])
def test_restored_bit_for_bit(method, warm_start, upper):
    method = type(method)(**{**vars(method), "warm_start": warm_start})

    def start():
        return method.start(shrinkage(upper), ONE, ZERO)

    run = start()
    steps = method.total(run.state.x)
    for _ in range(steps - 4):
        run.step()
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    expected = [str(dict(run.step())) for _ in range(4)]
    assert len({line.split("trial")[1] for line in expected}) > 1
    other = start()
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert [str(dict(other.step())) for _ in range(4)] == expected
    assert torch.equal(other.x, run.x)
    assert torch.equal(other.y, run.y)
    assert torch.equal(torch.stack(other.state.tried), torch.stack(run.state.tried))
    assert other.counts == run.counts
    assert other.verdict == run.verdict is not None


def test_states_do_not_follow_the_run_and_damaged_ones_are_refused():
    run = ALL[1].start(shrinkage(), ONE, ZERO)
    run.step()
    state = run.state_dict()
    run.step()
    assert len(state["state"]["tried"]) == 1
    state["state"]["values"] = [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="must hold 1 tried candidates"):
        run.load_state_dict(state)
    assert len(run.state.values) == 2
    other = RandomSearch(space=Uniform(0.0, 1.5), trials=9).start(shrinkage(), ONE, ZERO)
    with pytest.raises(ValueError, match="start the run with the same method"):
        other.load_state_dict(run.state_dict())


@pytest.mark.parametrize("kind", [GridSearch, RandomSearch, TPE])
def test_candidates_with_a_bad_F_are_counted_and_never_best(kind):
    """From 1 down to 0 the grid meets its NaNs first, when nothing was found yet."""
    size = {"points": 11} if kind is GridSearch else {"trials": 24}
    method = kind(space={"t": Uniform(0.0, 1.0)}, to_x=lambda p: torch.tensor(1 - p["t"], dtype=torch.float64), **size)
    run = method.start(shrinkage(nan_beyond), ONE, ZERO)
    bad = 0
    while run.verdict is None:
        info = run.step()
        bad += math.isnan(info["trial"])
        assert info["failed"] == bad
        assert ("upper" in info) == (bad < run.k)
        assert float(run.x) <= 0.65
    assert 0 < bad < run.k
    assert run.verdict.message.startswith(f"All {run.k} candidates were tried, of which {bad} failed: F was not finite")
    solution = meha.solve(shrinkage(nan_beyond), ONE, ZERO, method)
    assert solution.status is meha.Status.FINISHED
    assert solution.steps == run.k
    assert torch.equal(solution.x, run.x)
    if kind is GridSearch:
        assert bad == 4
        assert float(run.x) == pytest.approx(0.5)
        assert np.isnan(solution.history["upper"][:4]).all()


@pytest.mark.parametrize("kind", [GridSearch, RandomSearch, TPE])
def test_a_search_without_any_success_breaks_down(kind):
    size = {"points": 4} if kind is GridSearch else {"trials": 4}
    method = kind(space=Uniform(0.0, 1.0), **size)
    solution = meha.solve(shrinkage(lambda x, y: y.sum() * torch.nan), ONE, ZERO, method)
    assert str(solution.status) == "broke down"
    assert "all 4 candidates failed: F was not finite" in solution.message
    assert solution.x == 0


def test_unsolved_lower_levels_are_failures():
    problem = meha.problems.group_lasso(30, groups=6)
    method = GridSearch(space={"w": LogUniform(1e-3, 10.0)}, to_x=lambda p: p["w"] * torch.ones(6), points=4, inner_steps=8)
    solution = meha.solve(problem, problem.x0, problem.y0, method)
    assert "failed: F was not finite, or the lower level not solved to lower_tol=1e-08 in inner_steps=8" in solution.message
    assert solution.history["failed"][-1] == 3
    assert solution.x[0] == 10.0  # y = 0 there, which FISTA finds at once


def test_broken_lower_levels_are_failures():
    """Objectives that raise an error of arithmetic, or are NaN."""

    def lower(x, y):
        if x > 0.65:
            raise ZeroDivisionError
        return 0.5 * (y - A).square().sum() + torch.log(x - 0.25)

    problem = meha.Problem(lambda x, y: 0.5 * (y - B).square().sum(), lower, nonsmooth=L1(lambda x: x))
    solution = meha.solve(problem, ONE + 0.3, ZERO, GridSearch(space=Uniform(0.0, 1.0), points=11))
    assert float(solution.x) == 0.5
    assert solution.history["failed"][-1] == 3 + 4  # 0, 0.1, 0.2 and 0.7 to 1


def test_warm_and_cold_starts():
    """The lower level sin(x + y - 2) has many basins: the one found is the one next to where FISTA starts."""
    problem = meha.problems.sine(1)
    run = GridSearch(space=Uniform(-6.0, 4.0), points=11).start(problem, problem.x0, problem.y0)
    cold = GridSearch(space=Uniform(-6.0, 4.0), points=11, warm_start=False).start(problem, problem.x0, problem.y0)
    basins = []
    for _ in range(11):
        run.step()
        cold.step()
        x = run.state.tried[-1]
        basins.append(float(x + run.state.start.value.detach() - 2))
        assert torch.equal(cold.state.start.value, problem.y0)
    assert np.allclose(basins, basins[0])  # followed from candidate to candidate
    assert abs(math.remainder(basins[0] + math.pi / 2, 2 * math.pi)) < 1e-6


def test_modules_with_buffers_are_taken_over_with_them():
    torch.manual_seed(0)
    inputs = torch.randn(20, 3, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    problem = meha.Problem(
        upper=lambda x, y: (y(inputs) - targets).square().mean(),
        lower=lambda x, y: (y(inputs) - targets).square().mean() + x.exp() * sum(p.square().sum() for p in y.parameters()),
    )
    solution = meha.solve(problem, ONE, model, GridSearch(space=Uniform(-6.0, 0.0), points=3, lower_tol=1e-3))
    assert float(solution.x) == -6.0
    assert solution.y is model
    assert model[0].num_batches_tracked > 0
    assert solution.upper < 0.05


def test_tpe_is_silent_writes_nothing_and_changes_no_setting(tmp_path, monkeypatch):
    import optuna

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    said, keep, before = [], Keep(), optuna.logging.get_verbosity()
    monkeypatch.chdir(tmp_path)
    logging.getLogger("optuna").addHandler(keep)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        optuna.create_study()
        assert len(said) == 1, "what others do is heard"
        run = TPE(space=Uniform(0.0, 1.0), trials=12).start(shrinkage(), ONE, ZERO)
        while run.verdict is None:
            run.step()
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(before)
        logging.getLogger("optuna").removeHandler(keep)
    assert len(said) == 1
    assert not list(tmp_path.iterdir())


def test_tpe_without_optuna_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'pip install "meha\[search\]"'):
        ALL[2].start(shrinkage(), ONE, ZERO)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1.0, 1.0), "Uniform: low must be less than high, got 1.0 and 1.0"),
        (lambda: Uniform(0.0, math.inf), "Uniform: low and high must be finite"),
        (lambda: LogUniform("a", 1.0), "LogUniform: low and high must be finite numbers, got 'a'"),
        (lambda: LogUniform(0.0, 1.0), "LogUniform: low must be positive, got 0.0; use Uniform"),
        (lambda: GridSearch(space=(0.0, 1.0)), r"space: expected an interval such as LogUniform"),
        (lambda: GridSearch(space={}), "space: expected an interval"),
        (lambda: GridSearch(space={"a": 1.0}), "space: expected an interval"),
        (lambda: GridSearch(space=Uniform(0, 1), to_x=lambda p: p), "to_x: needs a dict of named intervals as space"),
        (lambda: GridSearch(space={"a": Uniform(0, 1)}, to_x=3), "to_x: expected a function .* got int"),
        (lambda: GridSearch(space=Uniform(0, 1), points=0), "points: must be a whole number"),
        (lambda: RandomSearch(space=Uniform(0, 1), trials=0), "trials: must be a whole number"),
        (lambda: RandomSearch(space=Uniform(0, 1), seed=-1), "seed: must be a whole number of at least 0, got -1"),
        (lambda: TPE(space=Uniform(0, 1), seed=0.5), "seed: must be a whole number of at least 0, got 0.5"),
        (lambda: TPE(space=Uniform(0, 1), inner_steps=0), "inner_steps: must be a whole number"),
        (lambda: TPE(space=Uniform(0, 1), lower_tol=-1), "lower_tol: must be a number of at least 0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            GridSearch(space=Uniform(0.0, 1.0)),
            "points: a grid of 10 values for each of 5 parameters has more than 100000 points",
        ),
        (
            GridSearch(space={"l2": Uniform(0, 1)}),
            "space: no leaf is named 'l2'.* pass to_x, a function that builds x from them",
        ),
        (
            GridSearch(space={"group": Uniform(0, 1), "group.0": Uniform(0, 2)}),
            "space: no leaf is named 'group.0'",
        ),
        (RandomSearch(space=TWO, to_x=lambda p: {"group": torch.ones(3), "l1": torch.tensor(0.0)}), "to_x: returned leaves"),
        (RandomSearch(space=TWO, to_x=lambda p: torch.ones(4)), "to_x: returned leaves .* return a value like x0"),
        (RandomSearch(space=TWO, to_x=lambda p: p["l1"]), "to_x: got float, expected a tensor"),
    ],
)
def test_spaces_that_do_not_fit_x_are_refused(method, message):
    problem, x0, y0 = sparse_group()
    if method.name == "GridSearch" and not isinstance(method.space, dict):
        method = GridSearch(space=method.space, points=11)
        message = message.replace("of 10", "of 11")
    with pytest.raises((TypeError, ValueError), match=message):
        method.start(problem, x0, y0).step()


def test_two_intervals_for_a_leaf_are_refused():
    x0 = {"a": {"b": torch.zeros(2, dtype=torch.float64)}}
    problem = shrinkage(weight=lambda x: x["a"]["b"])
    with pytest.raises(ValueError, match=r"space: two intervals for x\['a.b'\], one of them from 'a.b'; give one"):
        GridSearch(space={"a": Uniform(0, 1), "a.b": Uniform(0, 1)}).start(problem, x0, ZERO)


def test_a_grid_at_the_limit_is_accepted():
    problem, x0, y0 = sparse_group()
    run = GridSearch(space=Uniform(0.0, 1.0), points=10).start(problem, x0, y0)
    assert run.method.total(run.state.x) == 100_000
    huge = {"x": torch.zeros(10_000, dtype=torch.float64)}
    big = shrinkage(weight=lambda x: x["x"][:2])
    with pytest.raises(ValueError, match="each of 10000 parameters"):
        GridSearch(space=Uniform(0.0, 1.0)).start(big, huge, ZERO)
    run = RandomSearch(space=Uniform(0.0, 1.0), trials=2).start(big, huge, ZERO)
    run.step()
    assert Variable.of(run.x, "x").numel == 10_000


@pytest.mark.parametrize("kind", [GridSearch, RandomSearch, TPE])
def test_gaussian_group_lasso_end_to_end(kind):
    problem = meha.problems.group_lasso(30, groups=3)
    size = {"points": 2} if kind is GridSearch else {"trials": 12}
    solution = meha.solve(problem, problem.x0, problem.y0, kind(space=LogUniform(1e-2, 1.0), **size))
    assert solution.status is meha.Status.FINISHED
    assert solution.counts.lower > 100
    assert solution.counts.hvp == 0
    assert problem.metrics["test error"](solution.x, solution.y) < problem.metrics["null error"](solution.x, solution.y)
    assert solution.upper == pytest.approx(min(solution.history["trial"]))
