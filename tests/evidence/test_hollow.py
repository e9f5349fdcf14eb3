"""F that is not that of a fresh y: problems with known responses, refits, validation, and what check says."""

import dataclasses
import warnings
from functools import partial

import meha_lab.problems
import pytest
import torch
from meha_lab.benchmarks.hollow_networks import HOLLOW

import meha
from meha.problem.responses import Trained
from meha.running.observers import Validate, ValidationWarning

ENTRIES = {entry.name: entry for entry in meha_lab.problems.collection(group="hollow")}
SOME = ["3 equations, 8 unknowns, nearest", "ridge on 2 of 12", "2 copies, 3 features"]


def test_the_group_has_twenty_problems_half_of_them_held_out():
    halves = [entry.half for entry in ENTRIES.values()]
    assert (halves.count("tuning"), halves.count("held-out")) == (10, 10)


@pytest.mark.parametrize("name", ENTRIES)
def test_answers_are_nearest_and_best(name):
    """At x*, y* solves the lower level, no other solution that a descent finds is nearer, and no move of x lowers F."""
    problem = ENTRIES[name].make()
    x, y = problem.x_star, problem.y_star
    start = problem.response.start
    y0 = problem.y0 if start is None else start(x)
    generator = torch.Generator().manual_seed(0)
    objective = partial(total, problem, x)
    assert problem.verify(x, y).right()
    for _ in range(3):
        near = y + 0.3 * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        other = meha.lower.proximal_gradient.solve_lower(*variables(problem, x, near), tol=1e-12).theta.value.detach()
        assert objective(other) >= objective(y) - 1e-10
        if objective(other) <= objective(y) + 1e-12:
            assert (other - y0).norm() >= (y - y0).norm() - 1e-5
    for h in (1e-4, 0.3):
        for _ in range(5):
            d = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            assert problem.value(x + h * d / d.norm()) >= problem.upper_star - 1e-12


def total(problem, x, y):
    with torch.no_grad():
        return float(problem.lower(x, y) + problem.g.value(x, y))


def variables(problem, x, y):
    from meha.problem.oracle import Oracle
    from meha.tensors.variables import Variable

    y = y if problem.y_set is None else problem.y_set.project(y)
    first, second = Variable(x, "x"), Variable(y, "y")
    return Oracle(problem, first, second), first, second


def judge(name):
    """The selected response is right to 1e-3, and the optimistic run says that its F is not that of a fresh y."""
    problem = ENTRIES[name].make()
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert problem.verify(solution.x, solution.y).x <= 1e-3
    answer = problem.answer(solution.x)
    assert float((solution.y - answer).norm()) <= 1e-3 * (1 + float(answer.norm()))
    best = meha.solve(dataclasses.replace(problem, response="optimistic"), problem.x0, problem.y0)
    start = problem.response.start
    if start is None:
        fresh = problem.value(best.x)
        assert fresh > best.upper + 1e-3
        assert f"F = {best.upper:.3g} at the returned y, but {fresh:.3g} at the one nearest to y0" in best.message
    else:
        assert "at the one nearest to y0" in best.message  # from y0, which is not the start of the response


@pytest.mark.parametrize("name", SOME)
def test_runs_have_the_response_or_say_what_they_have(name):
    judge(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in SOME])
def test_all_runs_have_the_response_or_say_what_they_have(name):
    judge(name)


# Refits


def zeros(n):
    return torch.zeros(n, dtype=torch.float64)


def undetermined():
    target = torch.tensor([3.0, 1.0], dtype=torch.float64)
    return meha.Problem(
        upper=lambda x, y: (x - 1).square().sum() + (y - target).square().sum(),
        lower=lambda x, y: (y.sum() - x).square().sum(),
    )


@pytest.fixture(scope="module")
def solved():
    return meha.solve(undetermined(), zeros(1), zeros(2))


def test_refit_solves_anew(solved):
    fresh = solved.refit(metrics={"first": lambda x, y: y[0]})
    assert fresh.upper == pytest.approx(5.0, abs=1e-3)
    assert fresh.returned == pytest.approx(solved.upper)
    assert fresh.metrics["first"] == pytest.approx((1.0, 2.0), abs=1e-3)
    assert fresh.lower == pytest.approx(0.0, abs=1e-9)
    assert fresh.counts.lower > 0
    assert "lower level solved from y0" in str(fresh)
    assert torch.equal(solved.y, torch.as_tensor(solved.y))


@pytest.mark.parametrize("start", [torch.tensor([1.0, -1.0], dtype=torch.float64), lambda x: torch.cat([x, -x]) / 2])
def test_refit_from_another_start(solved, start):
    """From (1, -1), y = (2, 0): x = 2."""
    torch.testing.assert_close(solved.refit(start=start).y, torch.tensor([2.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-3)


def test_refit_takes_plain_steps(solved):
    fresh = solved.refit(steps=1, lr=0.1)
    torch.testing.assert_close(fresh.y, 0.2 * solved.x.expand(2))
    assert fresh.counts.lower == 1


def noisy_network():
    torch.manual_seed(0)
    points = torch.randn(60, 2)
    labels = (points.prod(dim=1) > 0).float()
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(y, part, weight=1.0):
        error = torch.nn.functional.binary_cross_entropy_with_logits(y(points[part])[:, 0], labels[part], reduction="none")
        return (weight * error).mean()

    problem = meha.Problem(
        upper=lambda x, y, batch: loss(y, slice(40, 60)), lower=lambda x, y, batch: loss(y, batch, x[batch].sigmoid())
    )
    return problem, net, list(torch.arange(40).split(10))


def test_refit_trains_networks():
    problem, net, batches = noisy_network()
    solution = meha.solve(problem, torch.zeros(40), net, meha.RHG(alpha=0.1, beta=0.1), batches=batches, max_steps=5)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    state = torch.get_rng_state()
    first = solution.refit(steps=20, seed=1, batches=batches)
    assert torch.equal(state, torch.get_rng_state())
    assert first.upper == solution.refit(steps=20, seed=1, batches=batches).upper
    assert first.upper != solution.refit(steps=20, seed=2, batches=batches).upper
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert first.y is not net


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batches: the objectives need some"),
        ({"batches": [torch.arange(10)]}, "steps: a network"),
        ({"batches": [torch.arange(10)], "steps": 0}, "steps: must be"),
        ({"batches": [torch.arange(10)], "steps": 1, "start": torch.zeros(3)}, "start: has leaves of other shapes"),
        ({"batches": [torch.arange(10)], "steps": 1, "lr": 0.1, "optimizer": torch.optim.Adam}, "lr: is 0.1"),
    ],
)
def test_refit_errors(options, message):
    problem, net, batches = noisy_network()
    solution = meha.solve(problem, torch.zeros(40), net, meha.RHG(alpha=0.1, beta=0.1), batches=batches, max_steps=1)
    with pytest.raises(ValueError, match=message):
        solution.refit(**options)


def test_refit_takes_the_steps_of_a_trained_response():
    problem = dataclasses.replace(undetermined(), response=Trained(steps=1, lr=0.1))
    solution = meha.solve(problem, zeros(1), zeros(2), meha.RHG(alpha=0.1), max_steps=3)
    torch.testing.assert_close(solution.refit().y, 0.2 * solution.x.expand(2))


# Networks: what x is worth to a new one


def lone(inputs=40, hidden=16, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def scaled_features(examples, validated, features=40):
    """x scales the features of a regression, three of which matter."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(examples + validated, features, generator=generator)
    goal = data[:, :3].sum(1, keepdim=True) / 2 + 0.1 * torch.randn(len(data), 1, generator=generator)

    def loss(x, y, part):
        return (y(x.exp() * data[part]) - goal[part]).square().mean()

    train, valid = slice(examples), slice(examples, None)
    return meha.Problem(lambda x, y, *_: loss(x, y, valid), lambda x, y, *_: loss(x, y, train))


def test_an_x_that_is_worth_less_than_x0_to_a_new_network_is_told():
    """Right labels, an exponent of the loss, and 20 images for F, which a network can learn by heart."""
    case = HOLLOW["focal exponent, 20 clean"]()
    with pytest.warns(meha.TrainingWarning, match="the x found is worth less than x0"):
        solution = meha.solve(case.problem, case.x0, case.network(0), max_steps=500, tol=None)
    fresh = solution.fresh
    assert fresh.worse
    assert fresh.upper > 1.02 * fresh.start > 10 * fresh.returned
    assert solution.upper == fresh.returned
    assert "Warning: the x found is worth less" in solution.message
    shown = " ".join(str(solution).split())
    assert f"F {fresh.returned:.6g}" in shown
    assert f"F = {fresh.upper:.6g} with y trained afresh at x, {fresh.start:.6g} at x0 (135 steps from new random" in shown
    assert f"fresh at x0 {fresh.start:.6g}" in str(fresh)


def test_an_x_that_serves_new_networks_is_not_called_hollow():
    solution = meha.solve(scaled_features(200, 200), torch.zeros(40), lone(), max_steps=500, tol=None)
    assert not solution.fresh.worse
    assert solution.fresh.upper < 0.9 * solution.fresh.start
    assert "Warning" not in solution.message
    spent = solution.counts
    assert solution.fresh.counts.lower <= 0.2 * (spent.upper + spent.lower)


def test_networks_without_batches_behave_like_networks_with_one():
    problem, ends = scaled_features(60, 60), []
    for options in ({}, {"batches": ["all"]}):
        y = lone()
        ends.append((meha.solve(problem, torch.zeros(40), y, max_steps=100, tol=None, **options), y))
    (plain, y), (batched, other) = ends
    assert plain.method.name == batched.method.name == "NetworkSOBA"
    assert torch.equal(plain.x, batched.x)
    assert all(map(torch.equal, y.parameters(), other.parameters()))


def test_the_flag_leaves_new_networks_out_and_they_leave_no_trace():
    problem, runs = scaled_features(60, 60), []
    for refit in (True, False):
        y = lone()
        solution = meha.solve(problem, torch.zeros(40), y, max_steps=200, tol=None, refit=refit)
        runs.append((solution, [p.clone() for p in y.parameters()], torch.get_rng_state()))
    (first, parameters, state), (second, others, other_state) = runs
    assert first.fresh is not None
    assert second.fresh is None
    assert torch.equal(state, other_state)
    assert torch.equal(first.x, second.x)
    assert all(map(torch.equal, parameters, others))
    assert first.counts == second.counts
    with torch.no_grad():  # F is that of the y that is returned, not that of the last step
        assert second.upper == float(problem.upper(second.x, second.y))
    with pytest.raises(TypeError, match="refit"):
        meha.solve(problem, torch.zeros(40), lone(), refit="no")


def test_new_networks_begin_where_a_user_would():
    """At new parameters; at y0 where these were trained before, or cannot be drawn again."""
    problem, trained, frozen = scaled_features(60, 60), lone(), lone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meha.solve(problem, torch.zeros(40), trained, max_steps=400, tol=None, refit=False)
        frozen[0].weight.requires_grad_(False)
        before = frozen[0].weight.clone()
        found = [meha.solve(problem, torch.zeros(40), y, max_steps=200, tol=None).fresh.how for y in (lone(), trained, frozen)]
    assert [how.partition(" from ")[2] for how in found] == ["new random parameters", "y0", "y0"]
    assert torch.equal(frozen[0].weight, before)


def test_where_new_networks_say_nothing():
    """After few steps, and where batches end, where y restarts in each step, and where there is no x."""
    problem, zero = scaled_features(60, 60), torch.zeros(40)
    assert meha.solve(problem, zero, lone(), max_steps=20).fresh is None
    assert meha.solve(problem, zero, lone(), max_steps=200, batches=iter(range(200))).fresh is None
    restarting = meha.RHG(alpha=0.01, beta=0.1, inner_steps=3, warm_start=False)
    assert meha.solve(problem, zero, lone(), restarting, max_steps=200, tol=None).fresh is None
    with_one_level = meha.Problem(lambda y: y(zero).square().sum(), lambda y: (y(zero) - 1).square().sum())
    assert meha.solve(with_one_level, None, lone(), max_steps=200, tol=None).fresh is None


def test_an_objective_that_ignores_its_y_cannot_be_judged_and_the_answer_stays():
    y = lone()
    problem = meha.Problem(
        lambda x, _: (y(x.exp()) - 1).square().sum(), lambda x, _: y(x).square().sum() + x.square().sum() * y[0].bias.sum()
    )
    method = meha.RHG(alpha=0.01, beta=0.01, inner_steps=1)
    with pytest.warns(meha.TrainingWarning, match="refit: a new network could not be trained"):
        solution = meha.solve(problem, torch.zeros(40), y, method, max_steps=300, tol=None)
    assert solution.steps == 300
    assert solution.fresh is None


def test_batch_norm_of_the_returned_network_stays():
    problem = scaled_features(60, 60)
    ends = []
    for refit in (True, False):
        torch.manual_seed(0)
        y = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        meha.solve(problem, torch.zeros(40), y, max_steps=200, tol=None, refit=refit)
        ends.append(y[1].running_mean)
    assert torch.equal(*ends)


def test_a_negative_gap_is_explained():
    problem = scaled_features(60, 60)
    solution = meha.solve(problem, torch.zeros(40), lone(), meha.stochastic.NetworkSOBA(both_levels=False), max_steps=20)
    assert solution.history["gap"][-1] < 0
    assert "(below 0, so the lower level is not solved)" in " ".join(str(solution).split())


# Validation


def falling():
    """F falls as x goes from 0 to 1, while the score is best at 0.3."""
    problem = meha.Problem(lambda x, y: (y - 1).square().sum(), lambda x, y: (y - x).square().sum())
    return problem, meha.RHG(alpha=0.02, beta=0.5, inner_steps=20)


def test_validation_keeps_the_best_and_ends():
    problem, method = falling()
    validate = Validate(lambda x, y: (x - 0.3).abs().sum(), every=2, patience=4)
    with pytest.warns(ValidationWarning, match=r"F fell from .* while the score went from"):
        solution = meha.solve(problem, zeros(1), zeros(1), method, callbacks=validate)
    assert solution.status is meha.Status.RULE_MET
    assert "x and y of step" in solution.message
    assert float(solution.x) == pytest.approx(0.3, abs=0.04)
    assert solution.steps == validate.step + 8
    assert solution.upper == pytest.approx(float((solution.y - 1).square()))
    assert min(score for score in solution.history["score"] if score == score) == validate.best


def test_validation_of_what_is_to_be_large():
    problem, method = falling()
    validate = Validate(lambda x, y: -(x - 0.3).abs().sum(), every=1, patience=2, larger_is_better=True)
    solution = meha.solve(problem, zeros(1), zeros(1), method, callbacks=validate)
    assert float(solution.x) == pytest.approx(0.3, abs=0.04)


def test_validation_without_patience_runs_on_and_nan_never_wins():
    problem, method = falling()
    validate = Validate(lambda x, y: x.sum() if x < 0.2 else torch.tensor(torch.nan), every=1, patience=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidationWarning)
        solution = meha.solve(problem, zeros(1), zeros(1), method, callbacks=validate, max_steps=60)
    assert solution.steps == 60
    assert validate.step == 1


def test_validation_restores_modules_and_resumes(tmp_path):
    def solve(**options):
        problem, net, batches = noisy_network()
        seen = []
        validate = Validate(lambda x, y: seen.append(y) or -len(seen) % 5, every=1, patience=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidationWarning)
            method = meha.RHG(alpha=0.1, beta=0.1)
            options = {"max_steps": 8, "tol": None, "batches": batches, "callbacks": validate} | options
            return meha.solve(problem, torch.zeros(40), net, method, **options), validate

    whole, validate = solve()
    assert validate.step == 5
    five, _ = solve(max_steps=5, callbacks=[])
    for a, b in zip(whole.y.parameters(), five.y.parameters(), strict=True):
        assert torch.equal(a, b)
    solve(max_steps=6, checkpoint=tmp_path / "run.pt")
    again, validate = solve(checkpoint=tmp_path / "run.pt")
    assert validate.step == 5
    assert torch.equal(again.x, whole.x)
    long, _ = solve(max_steps=8, callbacks=[])
    assert again.history["upper"] == long.history["upper"]  # it went on from step 6, not from the best


# check


def test_check_counts_open_directions():
    report = meha.check(undetermined(), zeros(1), zeros(2))
    assert (report.flat, report.open) == (1, True)
    assert "under-determined, since f is flat in 1 of 2 directions" in report.warnings[-1]
    assert "meha.responses.Nearest()" in report.warnings[-1]
    selected = dataclasses.replace(undetermined(), response=meha.responses.Nearest())
    report = meha.check(selected, zeros(1), zeros(2))
    assert (report.flat, report.ok) == (1, True)


@pytest.mark.parametrize(("name", "flat"), [("3 equations, 8 unknowns, nearest", 5), ("12 equations of rank 4, nearest", 4)])
def test_check_counts_what_equations_leave_open(name, flat):
    problem = dataclasses.replace(ENTRIES[name].make(), response="optimistic")
    report = meha.check(problem, problem.x0, problem.y0)
    assert (report.flat, report.open) == (flat, True)


def test_check_sees_faces():
    """On a face of the box, the one direction that is left is determined."""
    problem = dataclasses.replace(undetermined(), y_set=meha.sets.Box(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])))
    report = meha.check(problem, torch.full((1,), 0.5, dtype=torch.float64), zeros(2))
    assert report.flat == 0


def tasks(seed, same):
    generator = torch.Generator().manual_seed(seed)

    def batch():
        inputs = torch.randn(40, 20, generator=generator)
        return inputs, inputs @ (torch.ones(20) if same else torch.randn(20, generator=generator))

    problem = meha.Problem(
        lambda x, y, b: (b[0] @ y - b[1]).square().mean(),
        lambda x, y, b: (b[0] @ y - b[1]).square().mean() + x.square().sum(),
    )
    return meha.check(problem, torch.zeros(2), torch.zeros(20), batch(), batch())


def test_check_sees_heads_that_are_carried_over():
    report = tasks(0, same=False)
    assert report.carried
    assert "y seems to belong to its batch" in report.warnings[-1]
    assert "warm_start=False" in report.warnings[-1]
    report = tasks(0, same=True)
    assert report.carried is False
    assert report.ok
