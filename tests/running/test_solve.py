"""The loop: stopping, status, history, callbacks, batches, the last finite iterate."""

import math
import re

import pytest
import torch
from matplotlib import pyplot

import meha
from meha import Status, Verdict
from meha.problem.loaders import Accumulated
from meha.running.observers import DivergenceGuard, Progress, Recorder
from meha.running.stopping import Gap, RelativeChange, Residual

QUICK = meha.MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49)


def toy():
    return meha.problems.merely_convex(4)


def solve(problem, method=QUICK, **options):
    return meha.solve(problem, problem.x0, problem.y0, method, **options)


def test_relative_change():
    solution = solve(toy(), tol=1e-5, max_steps=5000)
    assert solution.status is Status.RULE_MET
    assert not solution.converged
    change = solution.history["change"]
    assert max(change[-2:]) <= 1e-5 < min(change[:-2])
    once = solve(toy(), tol=None, callbacks=RelativeChange(1e-5, times=1), max_steps=5000)
    assert once.steps == solution.steps - 1
    assert "relative change" in solution.message


def test_gap_and_residual_rules():
    problem = toy()
    for rule, measured in (
        (Gap(1e-4), lambda s: meha.diagnostics.gap(problem, s.x, s.y, 5.0)),
        (Residual(1e-2), lambda s: meha.diagnostics.prox_residual(problem, s.x, s.y, 5.0, s.history["c"][-1])),
        (Residual(1e-2, c=2.0, gamma=1.0, every=7), lambda s: meha.diagnostics.prox_residual(problem, s.x, s.y, 1.0, 2.0)),
    ):
        solution = solve(problem, tol=None, callbacks=rule, max_steps=3000)
        assert solution.status is Status.RULE_MET
        assert solution.steps % rule.every == 0
        assert measured(solution) <= rule.tol
        earlier = solve(problem, tol=None, max_steps=solution.steps - rule.every)
        assert measured(earlier) > rule.tol
        assert type(rule).__name__.lower() in solution.message
        assert solution.counts.lower == 4 * solution.steps


def test_a_users_rule_and_several_rules():
    def low(run, info):
        return Verdict(Status.RULE_MET, "F is below 0.1") if info["upper"] < 0.1 else None

    solution = solve(toy(), callbacks=[Gap(1e-12), low], max_steps=3000)
    assert (solution.status, solution.message) == (Status.RULE_MET, "F is below 0.1")
    assert solution.history["upper"][-1] < 0.1 <= solution.history["upper"][-2]


@pytest.mark.parametrize("method", [None, meha.MEHA(), meha.RHG(), meha.ActiveSets()], ids=str)
def test_the_time_may_be_bounded(method):
    """The clock of this test moves with the calls of F, so that the machine's does not matter."""
    calls = 0

    def upper(x, y):
        nonlocal calls
        calls += 1
        return (x - 1).square().sum() + (y - 2).pow(4).sum() + x.pow(4).sum()

    problem = meha.Problem(upper, lambda x, y: (y - x).square().sum() + y.pow(4).sum() / 4)
    start = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    free = meha.solve(problem, *start, method, max_steps=200)
    whole, calls = calls, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: float(calls))
        solution = meha.solve(problem, *start, method, max_steps=200, max_seconds=whole / 2)
    assert calls <= whole / 2 + 40  # that of a batch of samples, and of the solution
    assert solution.status is Status.MAX_SECONDS
    assert "The time allowed (max_seconds) was over" in solution.message
    assert math.isfinite(solution.upper)
    assert free.status is not Status.MAX_SECONDS


@pytest.mark.parametrize("wrong", [0.0, -1.0, "1", math.nan])
def test_times_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="max_seconds: must be a positive number"):
        solve(toy(), max_seconds=wrong)


def test_max_steps():
    solution = solve(toy(), max_steps=7)
    assert solution.status is Status.MAX_STEPS
    assert solution.steps == 7
    assert str(solution.status) == "max steps"


def test_paper_steps_on_the_merely_convex_toy_are_reported_as_diverged():
    problem = meha.problems.merely_convex(10)
    for steps in (800, 20_000):
        solution = solve(problem, problem.preset("paper"), max_steps=steps)
        assert solution.status is Status.DIVERGED
        assert not solution.converged
        assert "theta lags behind y" in solution.message
        assert math.isfinite(float(solution.x.norm()))
    assert solve(problem, problem.preset("recipe"), max_steps=800).status is not Status.DIVERGED


def test_fast_divergence_returns_a_finite_iterate_and_advice():
    problem = meha.problems.strong_convex(3)
    method = meha.MEHA(alpha=10.0, beta=5.0, eta=3.0, gamma=10.0, c=1.0)
    solution = solve(problem, method)
    assert solution.status is Status.DIVERGED
    assert bool(torch.isfinite(solution.x).all())
    assert "eta = 3 is above" in solution.message
    assert "Try alpha=" in solution.message
    suggested = dict(pair.split("=") for pair in solution.message.split("Try ")[1].split(", which")[0].split(", "))
    better = meha.MEHA(**{name: float(value) for name, value in suggested.items()}, c=1.0)
    again = solve(problem, better, max_steps=500, tol=None)
    assert again.status is Status.MAX_STEPS
    assert problem.distance(again.x, again.y).x < 0.2


@pytest.mark.parametrize("module", [False, True])
def test_non_finite_returns_the_last_finite_iterate(module):
    """f = y^4 with steps far too long: the iterates double in exponent until they overflow."""

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.y = torch.nn.Parameter(torch.full((2,), 3.0))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self):
            self.seen.copy_(self.y.detach() + 0)
            return self.y

    def read(y):
        return y() if module else y

    y0 = Holder() if module else torch.full((2,), 3.0)
    problem = meha.Problem(lambda x, y: (x + read(y)).square().sum(), lambda x, y: (read(y) - x).pow(4).sum())
    method = meha.MEHA(alpha=0.1, beta=1.0, eta=1.0, gamma=1.0, c=1.0)
    solution = meha.solve(problem, torch.zeros(2), y0, method, callbacks=DivergenceGuard(1e30))
    assert solution.status is Status.NON_FINITE
    assert str(solution.status) == "non-finite"
    if module:
        assert bool(torch.isfinite(y0.seen).all())
    y = read(solution.y)
    assert bool(torch.isfinite(y).all())
    assert float(y.detach().norm()) > 3
    assert "The iterate before it is returned" in solution.message


def test_travelling_far_is_not_divergence():
    """A solution at distance 1e4 with small steps, and a slow drift of constant speed along a linear F."""
    far = meha.Problem(lambda x, y: (x - 1e4).square().sum() + y.square().sum(), lambda x, y: (y - x / 100).square().sum())
    zero = torch.zeros(1, dtype=torch.float64)
    method = meha.MEHA(alpha=0.01, beta=0.1, eta=0.1, gamma=1.0, c=1.0, p=0.0)
    solution = meha.solve(far, zero, zero, method, max_steps=4000, tol=None)
    assert solution.status is Status.MAX_STEPS
    assert float(solution.x) == pytest.approx(1e4, rel=1e-2)
    drift = meha.Problem(lambda x, y: -x.sum() + y.square().sum(), lambda x, y: (y - 1).square().sum())
    assert meha.solve(drift, zero, zero, method, max_steps=4000, tol=None).status is Status.MAX_STEPS


@pytest.mark.parametrize("beta", [*(pytest.param(beta, marks=pytest.mark.slow) for beta in (0.02, 0.05)), 0.1])
def test_a_long_transient_that_settles_is_not_divergence(beta):
    """y leaves an unstable point, speeds up a million times, and comes to rest far away."""
    width = 1e3
    problem = meha.Problem(
        lambda x, y: (y * 1e-3).square().sum() + x.square().sum(),
        lambda x, y: (0.25 * (y / width) ** 4 - 0.5 * (y / width) ** 2).sum() * width**2 + 0 * x.sum(),
    )
    one = torch.ones(1, dtype=torch.float64)
    method = meha.MEHA(alpha=0.001, beta=beta, eta=beta, gamma=5.0, c=1000.0)
    solution = meha.solve(problem, one, 1e-3 * one, method, max_steps=round(200 / beta), tol=None)
    assert solution.status is Status.MAX_STEPS
    assert abs(float(solution.y)) == pytest.approx(1000, rel=1e-3)


def test_an_upper_objective_that_becomes_nan_is_noticed():
    def upper(x, y):
        return (x - y).square().sum() + (torch.nan if float(x.detach().sum()) > 1 else 0)

    problem = meha.Problem(lambda x, y: upper(x, y) + (y - 3).square().sum(), lambda x, y: (y - x).square().sum())
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    solution = meha.solve(problem, torch.zeros(1), torch.zeros(1), method, max_steps=500)
    assert solution.status is Status.NON_FINITE


def test_an_objective_that_breaks_down_numerically_ends_the_run():
    def lower(x, y):
        torch.linalg.cholesky(torch.eye(2, dtype=torch.float64) * (1 - x.sum()))
        return (y - x.sum()).square().sum()

    problem = meha.Problem(lambda x, y: (x - 3).square().sum() + y.square().sum(), lower)
    zero = torch.zeros(1, dtype=torch.float64)
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    solution = meha.solve(problem, zero, zero, method, max_steps=500, tol=None)
    assert solution.status is Status.BROKE_DOWN
    assert "cholesky" in solution.message
    assert bool(torch.isfinite(solution.x).all())


def test_advice_for_a_run_whose_steps_fit_the_start_only():
    """f = exp(4 y) is flat at the start and steep later; the steps fit the start, and the advice says so."""
    problem = meha.Problem(
        upper=lambda x, y: (y - 30).square().sum() + x.square().sum(),
        lower=lambda x, y: (4 * y).exp().sum() - (x * y).sum(),
        constants=meha.theory.Constants(L_F=2.0, L_f=0.1, rho_f=0.0),
    )
    start = torch.full((1,), -3.0, dtype=torch.float64)
    chosen = meha.MEHA(p=0.49).start(problem, start, start).method  # given by the user, no run makes them smaller
    solution = meha.solve(problem, start, start, chosen, max_steps=200)
    assert solution.status in (Status.DIVERGED, Status.NON_FINITE)
    assert "not where the run went; take smaller ones" in solution.message


def test_history_is_thinned_and_has_the_last_step():
    full = solve(toy(), max_steps=25)
    thin = solve(toy(), max_steps=25, callbacks=Recorder(10))
    assert full.history["step"] == list(range(1, 26))
    assert thin.history["step"] == [10, 20, 25]
    for name in ("upper", "lower", "gap", "residual", "d_x", "c", "change", "gradients_upper", "gradients_lower"):
        assert thin.history[name] == [full.history[name][k - 1] for k in (10, 20, 25)], name
    assert full.history["gradients_lower"][-1] == 100
    assert all(a < b for a, b in zip(full.history["seconds"], full.history["seconds"][1:], strict=False))


def test_callbacks():
    problem, seen = toy(), []

    def error(run, info):
        seen.append(info.step)
        return {"error": problem.distance(run.x, run.y).x}

    def enough(run, info):
        return info.step == 12

    solution = solve(problem, callbacks=[error, enough], max_steps=100)
    assert solution.status is Status.STOPPED
    assert str(solution.status) == "stopped"
    assert "enough" in solution.message
    assert seen == list(range(1, 13))
    assert solution.history["error"][-1] == pytest.approx(problem.distance(solution.x, solution.y).x)
    assert solve(problem, callbacks=error, max_steps=3).steps == 3


def noisy():
    return meha.Problem(
        upper=lambda x, y, batch: (x - 1).square().sum() + (y - batch).square().sum(),
        lower=lambda x, y, batch: (y - x - 0.1 * batch).square().sum(),
    )


def test_batches_are_begun_anew():
    batches = [torch.tensor([0.1]), torch.tensor([-0.1]), torch.tensor([0.2])]
    seen = []
    problem = noisy()
    solution = meha.solve(
        problem,
        torch.zeros(1),
        torch.zeros(1),
        meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0),
        batches=batches,
        max_steps=7,
        tol=None,
        callbacks=lambda run, info: seen.append(float(run.batch)),
    )
    assert solution.steps == 7
    assert seen == pytest.approx([0.1, -0.1, 0.2, 0.1, -0.1, 0.2, 0.1])
    assert math.isfinite(solution.upper)
    assert solution.diagnose().gap >= 0


def test_batches_that_run_out():
    batches, steps = (torch.ones(1) for _ in range(3)), 3
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    solution = meha.solve(noisy(), torch.zeros(1), torch.zeros(1), method, batches=batches, max_steps=9, tol=None)
    assert solution.status is Status.MAX_STEPS
    assert solution.steps == steps
    assert f"ran out after {steps} of 9" in solution.message


def test_accumulated_batches_are_one_batch():
    """Four batches of three in groups of two are two batches of six, and a group that is not full is left out."""
    numbers = torch.linspace(-1, 2, 12, dtype=torch.float64)
    problem = meha.Problem(
        upper=lambda x, y, batch: (x - 1).square().sum() + (y - batch).square().mean(),
        lower=lambda x, y, batch: (y - x * batch).square().mean(),
    )
    zero, method = torch.zeros(1, dtype=torch.float64), meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    options = dict(method=method, max_steps=7, tol=None)
    whole = meha.solve(problem, zero, zero, batches=numbers.reshape(2, 6), **options)
    parts = meha.solve(problem, zero, zero, batches=Accumulated(numbers.reshape(4, 3), 2), **options)
    assert parts.x.tolist() == pytest.approx(whole.x.tolist(), rel=1e-12)
    assert parts.counts == whole.counts
    assert parts.upper == pytest.approx(whole.upper)
    short = meha.solve(problem, zero, zero, batches=Accumulated(iter(numbers.reshape(4, 3)), 3), **options)
    assert short.steps == 1
    assert "ran out after 1 of 7" in short.message


def test_modules_are_trained_in_place_and_tensors_are_not():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    inputs = torch.randn(8, 2)
    problem = meha.Problem(
        lambda x, y: (y(inputs) - 1).square().mean(), lambda x, y: y(inputs).square().mean() + x * y.weight.square().sum()
    )
    x0 = torch.tensor(0.5)
    solution = meha.solve(problem, x0, model, max_steps=5)
    assert solution.y is model
    assert not torch.equal(model.weight, before)
    assert float(x0) == 0.5


def test_the_printed_solution():
    solution = solve(toy(), max_steps=50)
    text = str(solution)
    assert text.startswith("MEHA: max steps after 50 steps")
    assert len(text.splitlines()) == 5
    for part in (f"F          {solution.upper:.6g}", "gap", "residual", "100 gradients of F, 200 of f"):
        assert part in text
    for part in ("gamma=5", "p=0.49", "theory     eta = 0.9 is above"):
        assert part in solution.details
    diagnosis = solution.diagnose()
    assert diagnosis.gap == pytest.approx(meha.diagnostics.gap(toy(), solution.x, solution.y, 5.0))
    c = solution.history["c"][-1]
    assert diagnosis.residual == pytest.approx(meha.diagnostics.prox_residual(toy(), solution.x, solution.y, 5.0, c))
    assert f"gap       {diagnosis.gap:.3g}" in str(diagnosis)
    assert repr(solution).startswith("Solution(max steps, steps=50")
    default = solve(toy(), meha.MEHA(p=0.49), max_steps=5).details
    assert "theory     gamma, eta, p fit the convergence theorem; alpha is " in default
    unknown = meha.Problem(toy().upper, toy().lower)
    assert "theory" not in meha.solve(unknown, toy().x0, toy().y0, QUICK, max_steps=5).details


def test_one_is_printed_in_the_singular():
    solution = solve(toy(), meha.RHG(alpha=0.1, beta=0.1, inner_steps=1), max_steps=1)
    assert str(solution).startswith("RHG: max steps after 1 step,")
    assert "1 gradient of F, 1 of f, 1 Hessian-vector product\n" in str(solution)
    assert repr(solution.history).startswith("History(1 row of ")
    solution = meha.solve(toy(), toy().x0, toy().y0, meha.StochasticMEHA(), max_steps=1)
    assert solution.message == "The only step was taken."
    assert str(solution.refit(steps=1)).startswith("refit: 1 step from y0, 1 gradient of f\n")


def test_progress_shows_a_total_only_where_there_is_one(capsys):
    solve(toy(), max_steps=5, callbacks=Progress())
    shown = capsys.readouterr().out
    assert "step 5  F" in shown
    assert "of 5" not in shown
    meha.solve(toy(), toy().x0, toy().y0, meha.StochasticMEHA(), max_steps=5, callbacks=Progress())
    assert "step 5 of 5  F" in capsys.readouterr().out
    toy_2 = meha.problems.sine(2)
    meha.solve(toy_2, toy_2.x0, toy_2.y0, callbacks=Progress())
    assert re.search(r"pass \d", capsys.readouterr().out)


def test_plot(tmp_path):
    solution = solve(toy(), max_steps=50)
    path = tmp_path / "curves.png"
    figure = solution.plot(path=str(path))
    assert path.stat().st_size > 5000
    titles = [axis.get_title().split(" (")[0] for axis in figure.axes]
    assert titles == ["F(x, y)", "gap", "residual", "relative change of"]
    assert list(figure.axes[0].lines[0].get_ydata()) == solution.history["upper"]
    assert figure.number in pyplot.get_fignums()  # so that pyplot.show() shows it
    pyplot.close(figure)
    with pytest.raises(ValueError, match="names"):
        solution.plot(["nothing"])


def test_plot_draws_what_was_returned():
    """Passes of the method are lines of their own; the strong one leads to the answer, which is marked."""
    problem = meha.problems.sine(1)
    solution = meha.solve(problem, problem.x0, problem.y0)
    passes = set(solution.history["run"])
    assert len(passes) > 1
    figure = solution.plot(["upper", "gap"])
    *others, answer, mark = figure.axes[0].lines
    assert len(others) == len(passes) - 1
    assert mark.get_ydata()[0] == solution.upper
    assert answer.get_color() == "C0"
    end = abs(answer.get_ydata()[-1] - solution.upper)
    assert all(end <= abs(line.get_ydata()[-1] - solution.upper) for line in others)
    pyplot.close(figure)


def test_a_gap_below_zero_keeps_its_logarithmic_axis():
    solution = solve(toy(), max_steps=50)
    solution.history["gap"][3] = -1e-9
    figure = solution.plot(["gap"])
    assert figure.axes[0].get_yscale() == "symlog"
    pyplot.close(figure)


def test_a_solution_in_a_notebook():
    solution = solve(toy(), max_steps=5)
    text = solution._repr_html_()
    assert text.startswith("<b>MEHA: max steps after 5 steps")
    assert "<details>" in text
    assert "p=0.49" in text


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (dict(max_steps=0), ValueError, "max_steps: must be a whole number of at least 1, got 0"),
        (dict(max_steps=1e2), ValueError, "max_steps: must be a whole number"),
        (dict(tol="a"), ValueError, "tol: must be a number of at least 0"),
        (dict(tol=math.nan), ValueError, "tol: must be"),
        (dict(tol=-1.0), ValueError, "tol: must be"),
        (dict(callbacks=1e-5), TypeError, r"callbacks: expected a function of \(run, info\) or a list of them"),
        (dict(callbacks="residual"), TypeError, "callbacks: expected a function"),
        (dict(callbacks=["residual"]), TypeError, "callbacks: expected a function"),
        (dict(callbacks=None), TypeError, "callbacks: expected a function"),
        (dict(callbacks=[Recorder(), Recorder()]), ValueError, "callbacks: holds 2 of Recorder; give one at most"),
        (dict(batches=5), TypeError, "batches: expected an iterable"),
        (dict(method="MEHA"), TypeError, "method: expected a method such as meha.MEHA()"),
        (dict(method=meha.MEHA), TypeError, "method: expected a method such as meha.MEHA()"),
        (dict(callbacks=lambda run, info: 3.0), TypeError, "callbacks: <lambda> returned float; return a Verdict or True"),
        (
            dict(callbacks=lambda run, info: {"step": 7}),
            ValueError,
            "callbacks: <lambda> returned 'step', which the history has",
        ),
        (dict(callbacks=lambda run, info: {"a": "x"}), TypeError, "callbacks: <lambda> returned 'x' for 'a'"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        solve(toy(), **options)


def test_wrong_options_of_observers():
    with pytest.raises(ValueError, match="Recorder: every: must be a whole number"):
        Recorder(2.5)
    with pytest.raises(ValueError, match="DivergenceGuard: limit: must be a positive number"):
        DivergenceGuard(0)


@pytest.mark.parametrize("tol", ["a", math.nan, -1.0])
@pytest.mark.parametrize("rule", [Gap, Residual, RelativeChange])
def test_wrong_tolerances(rule, tol):
    with pytest.raises(ValueError, match=f"{rule.__name__}: tol: must be a number of at least 0"):
        rule(tol)


def test_rules_without_gamma_say_so():
    class Still(meha.Method):
        """Does nothing."""

        def init(self, oracle, x, y):
            return meha.methods.State(x=x, y=y)

        def step(self, oracle, state, at):
            return {"upper": 1.0}

    problem = toy()
    with pytest.raises(ValueError, match=r"Gap: Still has no gamma; give one, as in Gap\(0.1, gamma=1.0\)"):
        solve(problem, Still(), callbacks=Gap(0.1, every=1), tol=None, max_steps=2)
    with pytest.raises(ValueError, match="Residual: Still has no penalty c"):
        solve(problem, Still(), callbacks=Residual(0.1, every=1, gamma=1.0), tol=None, max_steps=2)
    solution = solve(problem, Still(), tol=0.0)
    assert solution.steps == 2
    assert solution.diagnose().residual is None
    assert "Still: rule met" in str(solution)
    assert RelativeChange(0.5).tol == 0.5


STAGED = {
    "VPBGD": (meha.VPBGD, {"c": lambda k: 0.0 if k < 300 else 20.0}, 0.03),
    "F2SA": (meha.F2SA, {"inner_steps": 2, "c": lambda k: 0.1 if k < 300 else 20.0}, 0.03),
    "MEHA": (meha.MEHA, {"c": lambda k: 0.1 if k < 300 else 20.0}, 0.1),
    "BAMM": (meha.BAMM, {"strategy": None, "mu": lambda k: 0.9 if k < 300 else 0.0}, 1e-5),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_plateau_of_a_schedule_is_not_convergence(name):
    """x rests at another point while the weight of a level stands still, and moves on when that does."""
    kind, options, error = STAGED[name]
    problem = meha.problems.strong_convex(2)
    solution = meha.solve(problem, problem.x0, problem.y0, kind(**options), tol=1e-6, max_steps=2000)
    assert solution.steps > 300
    assert solution.history["change"][290] < 1e-6  # it did rest
    assert solution.status is Status.RULE_MET
    assert problem.distance(solution.x, solution.y).x < error


@pytest.mark.parametrize("method", [meha.VPBGD(), meha.BAMM(mu=0.0, strategy=None)], ids=lambda m: m.name)
def test_a_start_at_rest_is_not_convergence(method):
    """F is least at y0 (for BAMM: f is), so that the first step moves nothing but the method's own variables."""
    problem = meha.Problem(lambda x, y: (y - 1).square().sum(), lambda x, y: (y - x).square().sum())
    zero = torch.zeros(2, dtype=torch.float64)
    solution = meha.solve(problem, zero, zero if method.name == "BAMM" else zero + 1, method, max_steps=3000)
    assert solution.history["change"][0] == 0
    assert solution.x.tolist() == pytest.approx([1, 1], abs=0.05)


def test_objectives_without_a_value_are_named():
    zero = torch.zeros(2, dtype=torch.float64)
    bad = meha.Problem(lambda x, y: (x.sum() - 1).sqrt() + y.sum(), lambda x, y: (y - x).square().sum())
    with pytest.raises(ValueError, match=r"upper: is nan at the start \(x0, y0\)"):
        meha.solve(bad, zero, zero)
    solution = meha.solve(bad, zero, zero, meha.RHG(alpha=0.1, beta=0.1))
    assert solution.status is Status.NON_FINITE
    assert "Upper is nan at the start (x0, y0)" in solution.message


def test_copies_of_modules_are_trained_on_demand():
    """Also inside of a dict; the same start then gives the same answer twice."""
    problem = meha.Problem(
        lambda x, y: (y["net"].weight - 1).square().sum() + x.square().sum(), lambda x, y: (y["net"].weight - x).square().sum()
    )
    network = torch.nn.Linear(2, 1, bias=False)
    before = network.weight.detach().clone()
    first, second = (meha.solve(problem, torch.zeros(2), {"net": network}, max_steps=20, copy=True) for _ in range(2))
    assert torch.equal(network.weight, before)
    assert not torch.equal(first.y["net"].weight, before)
    assert torch.equal(first.y["net"].weight, second.y["net"].weight)
    with pytest.raises(TypeError, match="copy: must be True or False"):
        meha.solve(problem, torch.zeros(2), {"net": network}, copy="no")
