"""Compiled runs take the same steps, tell the same numbers, and fall back where they cannot."""

import os
import subprocess
import sys
import warnings

import meha_lab.problems
import numpy as np
import pytest
import torch

import meha
from meha import MEHA, Problem, solve
from meha.problem.nonsmooth import L1, MCP
from meha.problems import lasso, sine, strong_convex
from meha.running import compiled as tracing
from meha.running.compiled import CompileWarning, Traced, TracingError

STEPS = dict(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=2.0)
METHODS = [
    MEHA(alpha=meha.schedules.InversePower(0.1, 0.5), beta=0.1, eta=0.1, gamma=1.0, c=2.0, p=0.3),
    MEHA(**STEPS, gradients=3),
    MEHA(**STEPS, gradients=2),
    MEHA(**STEPS, inner_steps=3),
    MEHA(**STEPS, inner_steps=2, warm_start=False),
    meha.RHG(inner_steps=2),
    meha.BDA(inner_steps=2),
    meha.NS(inner_steps=2, terms=2),
    meha.BOME(inner_steps=2),
    meha.F2SA(inner_steps=2),
    meha.VPBGD(inner_steps=2),
    meha.GALET(inner_steps=2, terms=2),
]


def without_compiler(set_attribute):
    """Run graphs as they are, since the compiler takes seconds for each: two steps in a turn of a loop, and single ones."""
    set_attribute(tracing, "compile_graph", lambda module, inputs, **options: module)
    set_attribute(tracing, "TURN", 2)
    set_attribute(tracing, "_known", {})


@pytest.fixture
def interpreted(monkeypatch):
    without_compiler(monkeypatch.setattr)


def as_group(batches):
    return [(batch, None, "") for batch in batches]


def quadratic(**more):
    return Problem(
        upper=lambda x, y: (x["a"] - 2).square().sum() + (y - 4).square().sum() + x["b"].square(),
        lower=lambda x, y: torch.sin(x["a"] + y - 2).sum() + 0.5 * (x["b"] * y).sum() + 0.6 * y.square().sum(),
        **more,
    )


def start(dtype=torch.float64):
    return {"a": torch.tensor([-1.0, 0.5], dtype=dtype), "b": torch.tensor(0.3, dtype=dtype)}, torch.zeros(2, dtype=dtype)


def leaves(run):
    return [leaf.detach() for leaf in run.state.x.leaves + run.state.y.leaves]


def compare(method, problem, x0, y0, *, batches=(None,) * 3, tol=1e-13):
    """Compare eager steps with the loop that is handed to the compiler, run as it is."""
    one, other = method.start(problem, x0, y0), method.start(problem, x0, y0)
    one.step(batches[0])
    other.step(batches[0])
    compiled = Traced(one)
    compiled.compile()
    assert compiled.fit(as_group(batches)) == len(batches)
    info = compiled(as_group(batches))
    size = info.size
    for batch in batches:
        expected = other.step(batch)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    assert (one.k, one.counts) == (other.k, other.counts)
    assert (info.step, list(info)) == (expected.step, [*expected, "change"])
    assert dict(info) == pytest.approx({**expected, "change": info["change"]}, rel=1e4 * tol, abs=1e4 * tol)
    assert size == pytest.approx(float(torch.cat([leaf.reshape(-1) for leaf in leaves(other)]).norm()))
    return info


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} {getattr(method, 'gradients', '')}")
def test_a_traced_step_is_the_step(method):
    compare(method, quadratic(), *start())


@pytest.mark.usefixtures("interpreted")
def test_traced_steps_in_single_precision():
    compare(METHODS[0], quadratic(), *start(torch.float32), tol=1e-6)


QUICK = {"elastic net", "group lasso, 4 groups", "coreset, 15 examples", "Cournot, 1 market", "softmax, one weight"}


def entries():
    """The collection; all but some with the slow tests."""
    for entry in meha_lab.problems.collection():
        yield pytest.param(entry, id=entry.name, marks=[] if entry.name in QUICK else [pytest.mark.slow])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("entry", list(entries()))
def test_every_problem_of_the_collection_can_be_traced(entry):
    problem = entry.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", meha.theory.TheoryWarning)
        compare(MEHA(c=2.0), problem, problem.x0, problem.y0, tol=1e-9)


@pytest.mark.usefixtures("interpreted")
def test_batches_are_inputs():
    problem = Problem(
        upper=lambda x, y, batch: (y - batch["target"]).square().mean() + x.square().sum(),
        lower=lambda x, y, batch: (batch["data"] @ y - x).square().mean() * batch["scale"],
    )
    batches = [
        {"data": torch.randn(5, 2, dtype=torch.float64), "target": torch.tensor([1.0, i], dtype=torch.float64), "scale": 2}
        for i in range(3)
    ]
    x0, y0 = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    compare(MEHA(**STEPS), problem, x0, y0, batches=batches)
    run = MEHA(**STEPS).start(problem, x0, y0)
    run.step(batches[0])
    compiled = Traced(run)
    assert compiled.fit(as_group(batches[:2])) == 2
    for other in ({"scale": 3}, {"scale": 2.0}, {"data": batches[0]["data"][:4]}, {"data": batches[0]["data"].float()}):
        assert compiled.fit(as_group([batches[1], {**batches[0], **other}, batches[2]])) == 1
    assert compiled.fit(as_group([None])) == compiled.fit(as_group([batches[0]["data"]])) == 0


@pytest.mark.usefixtures("interpreted")
def test_random_objectives_draw_the_same_numbers():
    problem = Problem(
        upper=lambda x, y: (x - 1).square().sum() + y.square().sum(),
        lower=lambda x, y: (y - x + 0.1 * torch.randn(2, dtype=torch.float64)).square().sum(),
    )
    x0, y0 = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    results = []
    for compile in (False, True):
        torch.manual_seed(3)
        results.append(solve(problem, x0, y0, MEHA(**STEPS), max_steps=70, tol=None, compile=compile))
    torch.testing.assert_close(results[1].x, results[0].x, rtol=0, atol=1e-12)


def objective_with_memory():
    calls = []

    def lower(x, y):
        calls.append(1)
        return (y - x).square().sum() / len(calls)

    return Problem(lambda x, y: x.square().sum() + y.square().sum(), lower)


def branching():
    def lower(x, y):
        return (y - x).square().sum() if y.sum() > 0 else 2 * (y - x).square().sum()

    return Problem(lambda x, y: x.square().sum() + y.square().sum(), lower)


@pytest.mark.parametrize(
    ("problem", "method", "reason"),
    [
        (objective_with_memory, MEHA(**STEPS), "changes 'calls' when it is called"),
        (branching, MEHA(**STEPS), "data-dependent control flow"),
        (quadratic, meha.CG(), "data-dependent control flow"),
        (quadratic, meha.Default(), "keeps a DefaultRun"),
        (quadratic, MEHA(beta=0.1, eta=0.1, gamma=1.0, c=2.0, x_optimizer=torch.optim.Adam), "x_optimizer"),
        (lambda: quadratic(nonsmooth=MCP(0.1, 3.0)), MEHA(**STEPS), "data-dependent control flow"),
    ],
    ids=["memory", "branch", "CG", "Default", "optimizer", "MCP"],
)
def test_what_cannot_be_traced_runs_as_always_after_one_warning(problem, method, reason):
    x0, y0 = start() if problem is not objective_with_memory and problem is not branching else (torch.ones(2), torch.ones(2))
    with pytest.warns(CompileWarning, match=reason) as told:
        found = solve(problem(), x0, y0, method, max_steps=6, tol=None, compile=True)
    assert len([w for w in told if issubclass(w.category, CompileWarning)]) == 1
    if problem is not objective_with_memory:  # which remembers that it was traced
        expected = solve(problem(), x0, y0, method, max_steps=6, tol=None)
        torch.testing.assert_close(found.y, expected.y, rtol=0, atol=0)


def through_numpy(x, y):
    return float(abs(x.detach().numpy()).sum()) * (x - 0.5).square().sum()


def through_an_array(x, y):
    return float(np.asarray(x.detach()).sum()) * (x - 0.5).square().sum()


def through_a_list(x, y):
    return (x - 0.5).square().sum() if x.tolist()[0] < 0.5 else (x - 2).square().sum()


class Outside(torch.autograd.Function):
    """A square that numpy computes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def through_a_function(x, y):
    return Outside.apply(x).sum()


@pytest.mark.parametrize("part", [through_numpy, through_an_array, through_a_list, through_a_function])
def test_objectives_that_leave_torch_are_refused(part):
    """What they compute there would be frozen."""
    problem = Problem(
        lambda x, y: (x - 1).square().sum() + (y - 2).square().sum() + part(x, y), lambda x, y: (y - x).square().sum()
    )
    zero = torch.zeros(1, dtype=torch.float64)
    with pytest.warns(CompileWarning, match=r"an objective calls .* whose value would be frozen"):
        found = solve(problem, zero, zero, MEHA(**STEPS), max_steps=40, tol=None, compile=True)
    assert torch.equal(found.x, solve(problem, zero, zero, MEHA(**STEPS), max_steps=40, tol=None).x)


def test_constants_may_leave_torch():
    target = torch.full((2,), 3.0, dtype=torch.float64)
    problem = Problem(
        lambda x, y: (x - float(target.numpy()[0])).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum()
    )
    zero = torch.zeros(2, dtype=torch.float64)
    run = MEHA(**STEPS).start(problem, zero, zero)
    run.step()
    Traced(run)


@pytest.mark.parametrize("late", [False, True], ids=["after the first group", "later"])
def test_steps_that_are_not_those_of_python_are_undone(late):
    """A weight that changes in Python after the trace: the run goes back to where both agreed, warns, and goes on eagerly."""
    weight = [1.0]
    problem = Problem(lambda x, y: (x - weight[0]).square().sum() + (y - 2).square().sum(), lambda x, y: (y - x).square().sum())

    def change(run, info):
        if info.step >= (100 if late else 2):
            weight[0] = 5.0

    zero, results = torch.zeros(1, dtype=torch.float64), []
    with pytest.warns(CompileWarning, match=r"compiled and eager steps differ: x, y differ by .* eager execution from step"):
        results.append(solve(problem, zero, zero, MEHA(**STEPS), max_steps=3000, callbacks=change, compile=True))
    weight[0] = 5.0
    results.append(solve(problem, zero, zero, MEHA(**STEPS), max_steps=3000))
    torch.testing.assert_close(results[0].x, results[1].x, rtol=0, atol=1e-5)
    steps = results[0].history["step"]
    assert steps == sorted(set(steps))


def test_a_loader_that_reuses_its_tensor():
    buffer = torch.zeros(1, dtype=torch.float64)

    class Reusing:
        def __iter__(self):
            for value in (0.0, 1.0, 5.0):
                yield buffer.fill_(value)

    problem = Problem(lambda x, y, b: (x - b).square().sum() + y.square().sum(), lambda x, y, b: (y - x).square().sum())
    zero = torch.zeros(1, dtype=torch.float64)
    call = {"max_steps": 97, "tol": None, "batches": Reusing()}
    found, expected = (solve(problem, zero, zero, MEHA(**STEPS), compile=compile, **call) for compile in (True, False))
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-9)


def test_modules_are_left_to_the_module():
    net = torch.nn.Linear(2, 1)
    problem = Problem(lambda x, y: y.weight.square().sum() + x.square().sum(), lambda x, y: (y(x) - 1).square().sum())
    with pytest.warns(CompileWarning, match=r"torch.compile\(module\)"):
        solve(problem, torch.ones(2), net, MEHA(**STEPS), max_steps=2, tol=None, compile=True)


def test_a_failing_compiler_is_told(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no C++ compiler was found\nand a long trace")

    monkeypatch.setattr(tracing._Trace, "compile", fail)
    problem = sine(3)
    with pytest.warns(CompileWarning, match="no C\\+\\+ compiler was found.$"):
        found = solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=50, compile=True)
    assert found.steps == 50


@pytest.fixture(scope="module")
def sine_runs():
    """The same run as always, and compiled, of a length that no group of steps divides."""
    problem = sine(4)
    return [
        solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=1999, tol=None, compile=compile)
        for compile in (False, True)
    ]


def test_a_compiled_run_is_the_run(sine_runs):
    plain, compiled = sine_runs
    torch.testing.assert_close(compiled.x, plain.x, rtol=0, atol=1e-13)
    torch.testing.assert_close(compiled.y, plain.y, rtol=0, atol=1e-13)
    assert (compiled.steps, compiled.counts, compiled.status) == (plain.steps, plain.counts, plain.status)


def test_the_history_of_a_compiled_run_has_the_ends_of_the_groups(sine_runs):
    plain, compiled = sine_runs
    steps = [int(step) for step in compiled.history["step"]]
    assert (steps[0], steps[-1]) == (1, 1999)
    assert 30 < len(steps) < 200
    for name in ("upper", "gap", "residual", "d_x", "c", "change", "gradients_lower"):
        expected = [plain.history[name][step - 1] for step in steps]
        assert compiled.history[name] == pytest.approx(expected, rel=1e-6, abs=1e-12), name


@pytest.mark.usefixtures("interpreted")
def test_rules_and_callbacks_see_the_ends_of_the_groups():
    problem = sine(4)
    seen = []

    def small(run, info):
        return meha.Verdict(meha.Status.RULE_MET, "small") if info["residual"] < 0.05 else None

    found = solve(
        problem,
        problem.x0,
        problem.y0,
        problem.preset("recipe"),
        max_steps=100_000,
        callbacks=[small, lambda run, info: seen.append((info.step, float(run.x[0])))],
        compile=True,
    )
    assert found.status is meha.Status.RULE_MET
    assert found.history["residual"][-1] < 0.05 <= found.history["residual"][-2]
    assert seen[-1] == (found.steps, float(found.x[0]))


@pytest.mark.usefixtures("interpreted")
def test_exact_rules_are_asked_when_their_step_was_passed():
    problem = sine(4)
    found = solve(
        problem,
        problem.x0,
        problem.y0,
        problem.preset("recipe"),
        max_steps=100_000,
        callbacks=meha.stopping.Gap(1e-2, every=7),
        compile=True,
    )
    assert "gap" in found.message


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rate", [3.0, 1e200], ids=["grows", "overflows"])
def test_a_run_that_fails_ends_as_it_does_without(rate):
    problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    method = MEHA(alpha=rate, beta=0.1, eta=0.1, gamma=1.0, c=2.0, p=0.0)
    x0 = torch.full((2,), 2.0, dtype=torch.float64)
    plain, compiled = (solve(problem, x0, x0, method, max_steps=3000, compile=c) for c in (False, True))
    assert compiled.status == plain.status
    assert plain.status.value == ("non-finite" if rate > 1e100 else "diverged")
    assert all(bool(torch.isfinite(part).all()) for part in (compiled.x, compiled.y))
    if rate > 1e100:
        assert compiled.message == plain.message
        torch.testing.assert_close(compiled.x, plain.x)


@pytest.mark.usefixtures("interpreted")
def test_a_weight_that_becomes_negative_is_told_as_without():
    problem = Problem(
        upper=lambda x, y: (y - 1).square().sum() + x.sum(),
        lower=lambda x, y: (y - 2).square().sum(),
        nonsmooth=L1(weight=lambda x: x),
    )
    method = MEHA(alpha=0.05, beta=0.05, eta=0.05, gamma=1.0, c=0.5)
    x0, y0 = torch.full((1,), 0.2, dtype=torch.float64), torch.full((1,), 3.0, dtype=torch.float64)
    for compile in (False, True):
        with pytest.raises(ValueError, match="a weight is negative"):
            solve(problem, x0, y0, method, max_steps=4000, tol=None, compile=compile)


@pytest.mark.usefixtures("interpreted")
def test_what_was_compiled_serves_other_data_starts_and_step_sizes():
    def state(target):
        return Problem(lambda x, y: (y - target).square().sum(), lambda x, y: (y - x * target).square().sum())

    targets = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64)]
    known = []
    for target, alpha in zip(targets, (0.1, 0.05), strict=True):
        method = MEHA(alpha=alpha, beta=0.1, eta=0.1, gamma=1 / alpha, c=2.0, p=0.2)
        problem, x0 = state(target), target.roll(1)
        run = method.start(problem, x0, x0)
        run.step()
        known.append(Traced(run).known)
        plain, compiled = (solve(problem, x0, x0, method, max_steps=120, tol=None, compile=c) for c in (False, True))
        torch.testing.assert_close(compiled.x, plain.x, rtol=0, atol=1e-13)
    assert known == [False, True]


@pytest.mark.usefixtures("interpreted")
def test_automatic_choice(monkeypatch):
    asked = []

    def spy(run):
        asked.append(run.k)
        return Traced(run)

    def takes(self, seconds):  # a millisecond for a step, whatever the clock says
        return self.run.k > tracing.TIMED and 1e-3 * (self.max_steps - self.run.k) > seconds

    monkeypatch.setattr(tracing, "_build", spy)
    monkeypatch.setattr(tracing.CompiledPace, "_takes", takes)
    problem = sine(4)
    method = problem.preset("recipe")
    short = solve(problem, problem.x0, problem.y0, method, max_steps=60, tol=None, compile="auto")
    assert not asked  # too few steps to be worth it
    assert len(short.history["step"]) == 60
    found = solve(
        problem,
        problem.x0,
        problem.y0,
        method,
        max_steps=10**9,
        tol=None,
        callbacks=lambda run, info: info.step > 500,
        compile="auto",
    )
    assert len(asked) == 1
    assert len(found.history["step"]) < 500


@pytest.mark.usefixtures("interpreted")
def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    problem = sine(4)
    arguments = (problem, problem.x0, problem.y0, problem.preset("recipe"))
    whole = solve(*arguments, max_steps=600, tol=None, compile=True)
    path = tmp_path / "run.pt"

    def stop(run, info):
        return info.step >= 250

    part = solve(*arguments, max_steps=600, tol=None, compile=True, checkpoint=meha.Checkpoint(path, every=100), callbacks=stop)
    assert 250 <= part.steps < 400
    rest = solve(*arguments, max_steps=600, tol=None, compile=True, checkpoint=meha.Checkpoint(path, every=100))
    torch.testing.assert_close(rest.x, whole.x, rtol=0, atol=1e-13)
    assert (rest.steps, rest.counts) == (whole.steps, whole.counts)


@pytest.mark.parametrize(
    ("step", "span", "every", "due"),
    [(41, 10, 7, True), (41, 10, 20, True), (41, 10, 9, True), (41, 3, 7, False), (40, 1, 20, True), (41, 1, 20, False)],
)
def test_what_is_done_every_so_many_steps_is_due_when_such_a_step_was_among_the_last(step, span, every, due):
    assert meha.StepInfo(step, {}, span).due(every) is due
    assert due == any(k % every == 0 for k in range(step - span + 1, step + 1))


def test_nothing_is_compiled_for_a_few_steps(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(Traced, "compile", fail)
    problem = sine(3)
    assert solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=8, tol=None, compile=True).steps == 8


def test_bad_argument():
    problem = sine(1)
    with pytest.raises(ValueError, match="compile: must be True"):
        solve(problem, problem.x0, problem.y0, compile="fast")


def test_tracing_leaves_the_run_and_the_random_numbers_alone():
    problem = lasso(10)
    run = problem.preset("recipe").start(problem, problem.x0, problem.y0)
    run.step()
    before = [leaf.clone() for leaf in leaves(run)]
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    k, counts = run.k, str(run.counts)
    Traced(run)
    assert torch.equal(torch.rand(3), expected)
    assert (run.k, str(run.counts)) == (k, counts)
    assert all(torch.equal(a, b) for a, b in zip(leaves(run), before, strict=True))


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    script = (
        "import meha\n"
        "from torch._dynamo.utils import counters\n"
        "p = meha.problems.strong_convex(6)\n"
        "meha.solve(p, p.x0, p.y0, p.preset('recipe'), max_steps=100, tol=None, compile=True)\n"
        "print(counters['inductor']['fxgraph_cache_hit'])\n"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = [
        int(subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert hits == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [sine, strong_convex, lasso], ids=lambda make: make.__name__)
def test_long_compiled_runs(make):
    problem = make(50)
    plain, compiled = (
        solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=5000, tol=None, compile=c)
        for c in (False, True)
    )
    torch.testing.assert_close(compiled.x, plain.x, rtol=1e-9, atol=1e-9)


def test_an_untraceable_run_says_why():
    run = meha.CG().start(quadratic(), *start())
    run.step()
    with pytest.raises(TracingError, match="data-dependent"):
        Traced(run)
