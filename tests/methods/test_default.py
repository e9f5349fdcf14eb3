"""solve() without a method: accuracy in all units, local solutions, constraints, failures, checkpoints."""

import io
import math

import pytest
import torch
from meha_lab.paths import RECORDS
from meha_lab.problems import collection
from meha_lab.problems.variants import TOYS, VARIANTS, in_units, started_near
from meha_lab.reproduce.contenders import AUTOMATIC
from meha_lab.reproduce.experiments import EXPERIMENTS, Options
from meha_lab.reproduce.experiments.comparison import CASES
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store
from structures import OnlyOnce
from torch import nn

import meha
from meha.method.status import Status
from meha.methods.default import Default

F64 = torch.float64
SOME = [
    "strong convex, n = 10", "merely convex, n = 10", "sine, n = 1", "sine, n = 1000", "lasso, n = 2", "lasso, n = 1000"
]  # fmt: skip


WORK = {"strong convex": 400, "merely convex": 600, "sine": 2000, "lasso": 600}
"""Gradients of f that a toy may take; the sine has many basins, which are searched."""


FIRST_ORDER = Default(second_order=False)


def toy(name, dtype=F64):
    """A toy without its constants."""
    return VARIANTS[""](TOYS[name](dtype=dtype))


def solved(problem, **given):
    return meha.solve(problem, problem.x0, problem.y0, **given)


@pytest.mark.parametrize("name", TOYS)
def test_toys_to_five_digits(name):
    solution = solved(problem := toy(name))
    assert solution.status is Status.CONVERGED
    assert problem.error(solution.x, solution.y) <= 1e-5
    assert solution.counts.lower <= WORK[name.split(",")[0]]
    assert isinstance(solution.method, Default)


@pytest.mark.parametrize("name", ["strong convex, n = 10", "merely convex, n = 10", "sine, n = 10", "lasso, n = 2"])
@pytest.mark.parametrize("units", [(0.01, 100.0, 100.0, 0.01), (100.0, 0.01, 0.01, 100.0)])
def test_units_do_not_matter(name, units):
    solution = solved(problem := in_units(toy(name), **dict(zip("xyFf", units, strict=True))))
    assert problem.error(solution.x, solution.y) <= 1e-5
    assert solution.counts.lower <= WORK[name.split(",")[0]]


@pytest.mark.parametrize("name", SOME)
def test_other_starts(name):
    solution = solved(problem := started_near(toy(name), seed=0))
    assert problem.error(solution.x, solution.y) <= 1e-5


@pytest.mark.parametrize("name", SOME)
def test_three_digits_in_single_precision(name):
    solution = solved(problem := toy(name, torch.float32))
    assert solution.x.dtype is torch.float32
    assert problem.error(solution.x, solution.y) <= 1e-3
    assert solution.counts.lower <= (10_000 if name == "sine, n = 1000" else WORK[name.split(",")[0]])  # rounding hides basins


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("name", TOYS)
def test_toys_in_all_units_and_from_all_starts(name, dtype):
    for variant, change in VARIANTS.items():
        solution = solved(problem := change(toy(name, dtype)))
        assert problem.error(solution.x, solution.y) <= (1e-5 if dtype is F64 else 1e-3), variant
        assert solution.counts.lower <= 10_000, variant  # rounding hides basins


QUICK = [
    "quadratic, condition 10",
    "linear F, condition 10",
    "undetermined, 3 of 6",
    "ridge, one weight",
    "reweighting, 15 examples",
    "Cournot, 1 market",
    "Cournot with capacities, 1 market",
    "double well, n = 1",
    "cubic, n = 3",
]


@pytest.mark.parametrize("name", QUICK)
def test_problems_of_the_collection(name):
    (entry,) = [entry for entry in collection() if entry.name == name]
    problem = entry.make()
    assert problem.error(problem.x0, problem.y0) > 1e-2
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert problem.error(solution.x, solution.y) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("half", ["tuning", "held-out"])
def test_the_collection(half):
    errors = {}
    for entry in collection(half):
        problem = entry.make()
        solution = meha.solve(problem, problem.x0, problem.y0)
        errors[entry.name] = problem.error(solution.x, solution.y)
    assert sum(error <= 1e-3 for error in errors.values()) >= 0.93 * len(errors), errors
    assert sum(error <= 1e-5 for error in errors.values()) >= 0.8 * len(errors), errors


@pytest.mark.parametrize("row", AUTOMATIC)
def test_the_recorded_runs_without_settings(row):
    store = Store(RECORDS)
    cells = [cell for cell in EXPERIMENTS["comparison"].cells(Options(), Tuning.shipped()) if cell.name == row]
    assert len(cells) == len(CASES)
    for cell in cells:
        recorded, now = store.get(cell)["last"], measure(cell)["last"]
        # Rounding differs between processors, and can change when a stage ends.
        assert now["work"] == pytest.approx(recorded["work"], rel=0.5), cell.case.name
        assert now["error x"] == pytest.approx(recorded["error x"], rel=1.0, abs=1e-5), cell.case.name


def test_tol_is_reached_and_not_exceeded_by_much():
    problem = toy("sine, n = 10")
    work, errors = [], []
    for tol in (1e-2, 1e-4, 1e-6, 1e-8):
        solution = solved(problem, tol=tol)
        assert solution.method.tol == tol
        work.append(solution.counts.upper)
        errors.append(problem.error(solution.x, solution.y))
    assert all(error <= 10 * tol for error, tol in zip(errors, (1e-2, 1e-4, 1e-6, 1e-8), strict=True))
    assert work[0] < 0.8 * work[2]


def test_as_accurate_as_possible():
    solution = solved(problem := toy("strong convex, n = 10"), tol=None)
    assert problem.error(solution.x, solution.y) <= 1e-9


def test_different_local_solutions_are_reported():
    problem = toy("sine, n = 10")
    solution = solved(problem)
    assert "another local solution, F = " in solution.message
    assert "upper level first: F = 0.461362 (the answer); lower level first: F = 127.74" in solution.report["starts"]
    solution = solved(toy("strong convex, n = 10"), method=FIRST_ORDER)
    assert "another" not in solution.message
    assert solution.report["starts"].endswith("agree")
    alone = meha.solve(problem, problem.x0, problem.y0, Default(both_starts=False, second_order=False))
    assert "lower level first" not in alone.report.get("starts", "")
    assert alone.counts.upper < 300


def test_the_report():
    solution = solved(in_units(toy("strong convex, n = 10"), f=2.0), method=FIRST_ORDER)
    assert solution.report["problem"] == "curvature in y: F 1, f 2; coupling 2; balanced at c = 0.5"
    assert "stages" in solution.report["course"]
    estimate = float(solution.report["accuracy"].split("about ")[1].split(" ")[0])
    assert 0 < estimate <= 1e-6


@pytest.mark.parametrize(
    ("upper", "lower"),
    [
        (lambda x, y: y.square().sum(), lambda x, y: (y - 1).square().sum() + (x.exp() * y.square()).sum()),
        (lambda x, y: (-x).exp().sum() + y.square().sum(), lambda x, y: (y - 1).square().sum()),
        (lambda x, y: y.square().sum(), lambda x, y: (y - 1 / (1 + x.square())).square().sum()),
    ],
    ids=["log-weight", "exponential", "rational"],
)
def test_an_optimum_at_infinity_is_never_converged(upper, lower):
    problem = meha.Problem(upper, lower)
    run = Default().start(problem, torch.ones(1, dtype=F64), torch.ones(2, dtype=F64))
    while run.verdict is None:
        run.step()
    assert run.verdict.status is Status.AT_INFINITY
    assert "x_set=meha.sets.Box" in run.verdict.message
    assert abs(float(run.x)) > 10


@pytest.mark.parametrize(
    "upper",
    [lambda x, y: -(x * y).sum(), lambda x, y: -y.square().sum() - x.square().sum()],
    ids=["bilinear", "concave"],
)
def test_no_minimum_is_divergence(upper):
    problem = meha.Problem(upper, lambda x, y: (y - x).square().sum())
    solution = meha.solve(problem, torch.ones(2, dtype=F64), torch.ones(2, dtype=F64))
    assert solution.status is Status.DIVERGED
    assert "bound x and y" in solution.message
    assert all(bool(torch.isfinite(part).all()) for part in (solution.x, solution.y))


def test_objectives_without_a_value_somewhere():
    """log(x) and log(y) have none for negative numbers: steps shrink."""
    problem = meha.Problem(
        lambda x, y: (y - 3).square().sum() + 0.1 * (x - 1).square().sum(), lambda x, y: (y - x * y.log()).sum()
    )
    solution = meha.solve(problem, torch.full((2,), 0.1, dtype=F64), torch.full((2,), 0.1, dtype=F64))
    best = (3 + 0.1) / 1.1  # y = x
    assert torch.allclose(solution.x, torch.full((2,), best, dtype=F64), rtol=1e-5)


@pytest.mark.parametrize(
    "bad", [lambda x, y: (x * y).sum() * math.nan, lambda x, y: (x + y).sum() / 0], ids=["NaN", "infinity"]
)
def test_no_value_at_the_start(bad):
    good = lambda x, y: (y - x).square().sum()  # noqa: E731
    for problem, level in ((meha.Problem(bad, good), "upper"), (meha.Problem(good, bad), "lower")):
        with pytest.raises(ValueError, match=f"{level}: is (nan|inf) at the start"):
            meha.solve(problem, torch.ones(2, dtype=F64), torch.ones(2, dtype=F64))


def test_general_sets():
    """X a simplex, Y a ball: against a fine grid of the same problem."""
    target = torch.tensor([1.0, -2.0], dtype=F64)
    problem = meha.Problem(
        lambda x, y: (y - target).square().sum(),
        lambda x, y: (y - 3 * x).square().sum(),
        x_set=meha.sets.Simplex(),
        y_set=meha.sets.L2Ball(1.5),
    )
    solution = meha.solve(problem, torch.full((2,), 0.5, dtype=F64), torch.zeros(2, dtype=F64))
    t = torch.linspace(0, 1, 100_001, dtype=F64)
    y = 3 * torch.stack([t, 1 - t], 1)
    y = y * (1.5 / y.norm(dim=1)).clamp(max=1)[:, None]
    values = (y - target).square().sum(1)
    assert solution.upper <= float(values.min()) * (1 + 1e-6)
    assert abs(float(solution.x[0]) - float(t[values.argmin()])) <= 1e-4


def test_weakly_convex_term():
    """MCP with one learned weight: against a grid, with the prox in closed form."""
    a = torch.tensor([3.0, 0.4, -0.2], dtype=F64)
    problem = meha.Problem(
        lambda x, y: (y - torch.tensor([3.0, 0.0, 0.0], dtype=F64)).square().sum() + 0.01 * x.square().sum(),
        lambda x, y: 0.5 * (y - a).square().sum(),
        nonsmooth=meha.nonsmooth.MCP(lambda x: x, a=3.0),
        x_set=meha.sets.NonNegative(),
    )
    solution = meha.solve(problem, torch.full((1,), 0.3, dtype=F64), torch.zeros(3, dtype=F64))
    x = torch.linspace(0, 1, 20_001, dtype=F64)[:, None]
    y = problem.nonsmooth.prox(x, a.expand(len(x), 3), 1.0)
    values = (y - torch.tensor([3.0, 0.0, 0.0], dtype=F64)).square().sum(1) + 0.01 * x[:, 0].square()
    assert solution.upper <= float(values.min()) + 1e-6


def test_modules_and_structures():
    layer = nn.Linear(3, 1).double()
    x0 = {"log": torch.zeros((), dtype=F64), "bias": [torch.zeros(1, dtype=F64)]}
    data = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    labels = data.sum(1, keepdim=True) + 0.3
    problem = meha.Problem(
        lambda x, y: (y(data[20:]) + x["bias"][0] - labels[20:]).square().mean(),
        lambda x, y: (
            (y(data[:20]) - labels[:20]).square().mean() + x["log"].exp() * sum(p.square().sum() for p in y.parameters())
        ),
        x_set=meha.sets.Product({"log": meha.sets.Box(-20.0, 5.0)}),
    )
    solution = meha.solve(problem, x0, layer, Default(), tol=1e-5)
    assert solution.upper < 1e-8
    assert solution.y is layer


def test_first_order_only():
    problem = meha.Problem(
        lambda x, y: (x - 1).square().sum() + OnlyOnce.apply(y).sum(), lambda x, y: OnlyOnce.apply(y - x).sum()
    )
    solution = meha.solve(problem, torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64), FIRST_ORDER)
    assert solution.converged
    assert solution.counts.hvp == 0
    assert torch.allclose(solution.x, torch.full((2,), 2 / 3, dtype=F64), rtol=1e-5)


def test_batches_are_refused():
    problem = meha.Problem(lambda x, y, batch: (x * y).sum(), lambda x, y, batch: (y - x).square().sum())
    with pytest.raises(ValueError, match=r"StochasticMEHA\(\)"):
        Default().start(problem, torch.ones(1), torch.ones(1))
    problem = meha.Problem(lambda x, y, batch=None: (x * y).sum(), lambda x, y, batch=None: (y - x).square().sum())
    with pytest.raises(ValueError, match="batch: Default takes none, got Tensor"):
        Default().start(problem, torch.ones(1), torch.ones(1)).step(torch.ones(1))


def test_which_method_is_taken():
    problem = toy("strong convex, n = 10")
    assert solved(problem, max_steps=1).method.name == "Default"
    network = nn.Linear(2, 1)
    problem = meha.Problem(lambda x, y: y(x).sum().square(), lambda x, y: (y(x) - 1).square().sum())
    assert meha.solve(problem, torch.ones(2), network, max_steps=1).method.name == "NetworkSOBA"
    batches = meha.Problem(lambda x, y, b: (y - b).square().sum(), lambda x, y, b: (y - x).square().sum())
    found = meha.solve(batches, torch.ones(2), torch.ones(2), batches=[torch.ones(2)], max_steps=1)
    assert found.method.name == "AdaptiveSOBA"
    of_networks = meha.Problem(lambda x, y, b: y(b).square().sum(), lambda x, y, b: (y(b) - x).square().sum())
    found = meha.solve(of_networks, torch.ones(1), nn.Linear(2, 1), batches=[torch.ones(3, 2)], max_steps=1)
    assert found.method.name == "NetworkSOBA"


@pytest.mark.parametrize("tasks", [(), (4,)], ids=["one", "for each task"])
def test_models_of_the_form_of_x_may_belong_to_the_batch(tasks):
    """The common start of few-shot learning, with one model or one for each task; its lower level is not strongly convex."""
    problem = meha.Problem(lambda x, y, b: (y["w"] - b).square().sum(), lambda x, y, b: (y["w"] - x["w"] - b).square().sum())
    x0, y0 = {"w": torch.ones(2, 3)}, {"w": torch.ones(*tasks, 2, 3)}
    assert meha.solve(problem, x0, y0, batches=[torch.ones(2, 3)], max_steps=1).method.name == "StochasticMEHA"


def test_the_second_run_cut_short():
    problem = toy("sine, n = 10")
    whole = FIRST_ORDER.start(problem, problem.x0, problem.y0)
    steps = 0
    while whole.step()["run"] == 1:
        steps += 1
    solution = solved(problem, method=FIRST_ORDER, max_steps=steps + 3)
    assert solution.status is Status.MAX_STEPS
    assert problem.error(solution.x, solution.y) <= 1e-5


@pytest.mark.parametrize("name", ["sine, n = 10", "lasso, n = 100"])
def test_a_run_goes_on_from_its_state(name):
    problem = toy(name)
    whole, other = (Default().start(problem, problem.x0, problem.y0) for _ in range(2))
    infos = []
    while whole.verdict is None:
        infos.append(dict(whole.step()))
    for cut in (1, len(infos) // 3, 2 * len(infos) // 3):
        part = Default().start(problem, problem.x0, problem.y0)
        for _ in range(cut):
            part.step()
        file = io.BytesIO()
        torch.save(part.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert [dict(other.step()) for _ in range(len(infos) - cut)] == infos[cut:]
        assert other.verdict == whole.verdict
        assert torch.equal(other.x, whole.x)
        assert other.counts == whole.counts


def test_checkpoint_of_a_solve(tmp_path):
    problem = toy("sine, n = 1")
    whole = solved(problem)
    path = tmp_path / "run.pt"
    solved(problem, max_steps=7, checkpoint=meha.Checkpoint(path, every=3))
    resumed = solved(problem, checkpoint=path)
    assert torch.equal(resumed.x, whole.x)
    assert resumed.history["upper"] == whole.history["upper"]
    reports = [{name: text for name, text in solution.report.items() if name != "time"} for solution in (resumed, whole)]
    assert reports[0] == reports[1]


# The quasi-Newton steps


# Many coordinates of x


def wells(tilt):
    """In each coordinate of x two basins of F, of different depth, where y follows x."""
    return meha.Problem(
        upper=lambda x, y: ((y.square() - 1).square() + tilt * y).sum(), lower=lambda x, y: (y - x).square().sum()
    )


@pytest.mark.parametrize("start", [1.5, 3.0, -3.0])
def test_with_many_coordinates_another_start_must_end_at_the_answer(start):
    """The lower basins lie below 0, where F is -9.16; from above, a first attempt ends at 8.82, and must not be believed."""
    y0 = torch.zeros(30, dtype=torch.float64)
    found = meha.solve(wells(0.3), torch.full_like(y0, start), y0)
    assert found.status is meha.Status.LOCAL or found.upper == pytest.approx(-9.162855, abs=1e-5)
    assert found.upper < 8.0


def test_with_many_coordinates_and_one_solution_the_claim_stands():
    goal = torch.linspace(-1, 1, 30, dtype=torch.float64)
    problem = meha.Problem(lambda x, y: (y - goal).square().sum(), lambda x, y: (y - x).square().sum())
    found = meha.solve(problem, torch.full_like(goal, 3.0), torch.zeros_like(goal))
    assert found.status is meha.Status.CONVERGED
    assert "did not end there" not in found.message
    torch.testing.assert_close(found.x, goal, rtol=0, atol=1e-6)


# Without verification


@pytest.mark.parametrize("second_order", [True, False])
def test_without_verification_the_first_answer_is_no_claim(second_order):
    problem = meha.problems.strong_convex(5)
    full = meha.solve(problem, problem.x0, problem.y0, meha.Default(second_order=second_order))
    quick = meha.solve(problem, problem.x0, problem.y0, meha.Default(second_order=second_order, verify=False))
    assert full.status is meha.Status.CONVERGED
    assert quick.status is meha.Status.RULE_MET
    assert "Nothing was verified" in quick.message
    torch.testing.assert_close(quick.x, full.x, rtol=1e-5, atol=1e-6)
    assert quick.counts.lower + quick.counts.hvp < 0.7 * (full.counts.lower + full.counts.hvp)


def test_without_verification_a_selected_response_is_still_found():
    """f = (y_1 + y_2 - x)^2 has many solutions; the one nearest to y0 = (0, 0) is (x, x) / 2."""
    problem = meha.Problem(
        lambda x, y: (y[0] - 1).square() + x.square().sum() / 10,
        lambda x, y: (y.sum() - x.sum()).square(),
        response=meha.responses.Nearest(),
    )
    start = torch.zeros(1, dtype=F64), torch.zeros(2, dtype=F64)
    found = meha.solve(problem, *start, meha.Default(verify=False))
    assert float(found.x) == pytest.approx(10 / 7, abs=1e-2)
    torch.testing.assert_close(found.y, found.x.expand(2) / 2, rtol=0, atol=1e-3)


def test_verify_must_be_a_switch():
    problem = meha.problems.strong_convex(2)
    with pytest.raises(TypeError, match="verify: must be True or False"):
        meha.Default(verify="no").start(problem, problem.x0, problem.y0)
