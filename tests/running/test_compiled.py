"""Compiled runs take the same steps, tell the same numbers, and fall back where they cannot."""

import itertools
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass

import meha_lab.problems
import numpy as np
import pytest
import torch

import meha
from meha import MEHA, Problem, solve
from meha.methods import Method, State, Variable
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


@dataclass
class MemoryState(State):
    table: Variable  # the last gradient of f on each group of examples


@dataclass(frozen=True)
class Memory(Method):
    """y follows a mean of remembered gradients, of which a step renews one (SAGA), and x the gradient of F."""

    groups: int
    alpha: float = 0.05
    beta: meha.schedules.Schedule = 0.1

    def init(self, oracle, x, y):
        return MemoryState(x, y, Variable(torch.zeros(self.groups, len(y.leaves[0]), dtype=torch.float64), "table"))

    def step(self, oracle, state, at):
        x, y, (table,) = state.x, state.y, state.table.leaves
        number = at.batch.group[1:]
        _, (new,) = oracle.gradient(y, [(1.0, oracle.lower, x, y)], at.batch)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], at.batch)
        y.leaves[0].sub_(at.beta * (new - table[number][0] + table.mean(0) + 0.1 * F_y[0]))
        x.leaves[0].sub_(at.alpha * F_x[0])
        table.index_copy_(0, number, new[None])
        return {"upper": upper}


def regression(n, seed=0):
    """Least squares in n unknowns on batches of indices: 12 examples of F, and 20 of f."""
    generator = torch.Generator().manual_seed(seed)
    (A, a), (B, b) = (
        (torch.randn(m, n, dtype=torch.float64, generator=generator), torch.randn(m, dtype=torch.float64, generator=generator))
        for m in (12, 20)
    )
    return Problem(
        lambda x, y, batch: (A[batch.upper] @ y - a[batch.upper]).square().mean() + x.square().sum(),
        lambda x, y, batch: (B[batch.lower] @ y - b[batch.lower] * x).square().mean() / n,
    )


def on_indices(compile, n=3, groups=True, **options):
    method = Memory(groups=5, beta=meha.schedules.InversePower(0.1, 0.3)) if groups else MEHA(**STEPS)
    batches = meha.loaders.Indices(4, upper=12, lower=20, groups=groups, seed=7)
    options = {"max_steps": 150, "tol": None, **options}
    x0, y0 = torch.ones(1, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    return solve(regression(n), x0, y0, method, batches=batches, compile=compile, **options)


@pytest.mark.filterwarnings(f"error::{CompileWarning.__module__}.CompileWarning")
def test_compiled_steps_on_indices_of_two_shapes():
    for n in (3, 40):
        plain, compiled = on_indices(False, n), on_indices(True, n)
        for part in "xy":
            torch.testing.assert_close(getattr(compiled, part), getattr(plain, part), rtol=1e-11, atol=1e-11)
        assert torch.equal(compiled.batch.lower, plain.batch.lower)
        assert compiled.batch.groups == (3, 5)
        assert (compiled.steps, compiled.counts) == (150, plain.counts)
        assert len(compiled.history["step"]) < 10  # steps were taken in groups
    assert {function.unit for function in tracing._known.values()} == {1}  # by loops


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("groups", [False, True])
def test_a_run_on_indices_goes_on_from_a_checkpoint_bit_for_bit(groups, tmp_path):
    whole, plain = (on_indices(compile, groups=groups, max_steps=400) for compile in (True, False))
    torch.testing.assert_close(whole.y, plain.y, rtol=1e-11, atol=1e-11)
    call = {"groups": groups, "max_steps": 400, "checkpoint": meha.Checkpoint(tmp_path / "run.pt", every=50)}
    part = on_indices(True, callbacks=lambda run, info: info.step >= 170, **call)
    assert 170 <= part.steps < 250
    rest = on_indices(True, **call)
    assert rest.steps == 400
    assert torch.equal(rest.x, whole.x)
    assert torch.equal(rest.y, whole.y)
    assert torch.equal(rest.batch.upper, whole.batch.upper)


@pytest.mark.usefixtures("interpreted")
def test_a_failure_on_indices_ends_at_the_same_step_and_batch():
    """Steps of a group that is undone are taken one by one, on the same batches."""
    problem = regression(3)

    def lower(x, y, batch):  # the root is NaN at the end of the way
        return problem.lower(x, y, batch) + 0 * (0.9 - x).sqrt().sum()

    found = [
        solve(
            Problem(lambda x, y, batch: problem.upper(x, y, batch) - 30 * x.sum(), lower),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(3, dtype=torch.float64),
            MEHA(alpha=0.0005, beta=0.1, eta=0.1, gamma=1.0, c=1.0, p=0.0),
            max_steps=500,
            tol=None,
            batches=meha.loaders.Indices(4, upper=12, lower=20, seed=7),
            compile=compile,
        )
        for compile in (False, True)
    ]
    assert [solution.status.value for solution in found] == ["non-finite"] * 2
    assert 40 < found[0].steps == found[1].steps < 500
    assert torch.equal(found[0].batch.lower, found[1].batch.lower)
    assert found[0].message == found[1].message


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("size", [2**25, 200], ids=["long groups", "groups of few bytes"])
def test_a_batch_of_another_size_is_stepped_over(size, monkeypatch):
    monkeypatch.setattr(tracing, "BYTES", size)
    monkeypatch.setattr(tracing, "UNROLLED", 3)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(m, 2, dtype=torch.float64, generator=generator) for m in (4, 4, 4, 4, 3)]  # 64 bytes each
    problem = Problem(
        lambda x, y, batch: (y - batch["data"]).square().mean() + x.square().sum(),
        lambda x, y, batch: (batch["data"] @ y - x).square().mean() * batch["scale"],
    )
    zero, found = torch.zeros(2, dtype=torch.float64), []
    for compile in (False, True):
        loader = [{"data": part, "scale": 2.0} for part in data]
        x0 = torch.zeros(1, dtype=torch.float64)
        found.append(solve(problem, x0, zero, MEHA(**STEPS), max_steps=203, tol=None, batches=loader, compile=compile))
    torch.testing.assert_close(found[1].y, found[0].y, rtol=0, atol=1e-12)
    steps = [int(step) for step in found[1].history["step"]]
    assert max(b - a for a, b in itertools.pairwise(steps)) == (4 if size > 1000 else 3)
    assert len(steps) < 110 or size < 1000


@pytest.mark.usefixtures("interpreted")
def test_without_loops_steps_are_compiled_in_a_row(monkeypatch):
    def fail(*_):
        raise RuntimeError("no loops here")

    monkeypatch.setattr(tracing._Trace, "loop", fail)
    monkeypatch.setattr(tracing, "UNROLLED", 5)
    plain, compiled = on_indices(False), on_indices(True, max_steps=150)
    torch.testing.assert_close(compiled.y, plain.y, rtol=1e-11, atol=1e-11)
    assert (compiled.steps, [function.unit for function in tracing._known.values()]) == (150, [5])
    steps = [int(step) for step in compiled.history["step"]]
    assert steps[:3] == [1, 31, 61]
    assert steps[-4:] == [147, 148, 149, 150]  # the rest is taken eagerly


@pytest.mark.usefixtures("interpreted")
def test_an_interrupt_between_calls_undoes_the_group(monkeypatch):
    compile, calls = tracing._Trace.compile, []

    def interrupted(*arguments):
        function = compile(*arguments)

        def call(*inputs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return function.call(*inputs)

        return tracing._Function(call, function.unit, function.turn, function.unseen)

    monkeypatch.setattr(tracing._Trace, "compile", interrupted)
    monkeypatch.setattr(tracing, "PAUSE", 0.0)  # a call for each turn
    found = on_indices(True)
    assert (found.status, found.steps) == (meha.Status.INTERRUPTED, 1)
    torch.testing.assert_close(found.y, on_indices(False, max_steps=1).y)


def test_an_objective_must_not_write_into_a_tensor_of_its_own():
    class Hidden:
        __slots__ = ("state",)

    hidden = Hidden()
    hidden.state = torch.zeros((), dtype=torch.float64)

    def lower(x, y):
        return (y - x).square().sum() + 0 * hidden.state.add_(1.0)

    zero = torch.zeros(2, dtype=torch.float64)
    run = MEHA(**STEPS).start(Problem(lambda x, y: x.square().sum() + (y - 1).square().sum(), lower), zero, zero)
    run.step()
    with pytest.raises(TracingError, match="writes into a tensor of its own"):
        Traced(run)


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


@pytest.mark.usefixtures("interpreted")
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


@pytest.mark.usefixtures("interpreted")
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
