"""Which y is meant: selected responses, method by method, against closed forms."""

import dataclasses
from functools import partial

import pytest
import torch
from test_architecture import methods

import meha
from meha.methods import Method
from meha.problem.responses import Nearest, Trained

DOUBLE = torch.float64
TARGET = torch.tensor([3.0, 1.0], dtype=DOUBLE)


def zeros(n):
    return torch.zeros(n, dtype=DOUBLE)


def undetermined(response="optimistic", **parts):
    """y_1 + y_2 = x; the solution nearest to 0 has x = 2 and y = (1, 1), the best for F has x = 2 and y = (2, 0)."""
    return meha.Problem(
        upper=lambda x, y: (x - 1).square().sum() + (y - TARGET).square().sum(),
        lower=lambda x, y: (y.sum() - x).square().sum(),
        response=response,
        **parts,
    )


def test_the_default_finds_the_nearest():
    solution = meha.solve(undetermined(Nearest()), zeros(1), zeros(2))
    assert solution.converged
    torch.testing.assert_close(solution.x, torch.tensor([2.0], dtype=DOUBLE), rtol=0, atol=1e-4)
    torch.testing.assert_close(solution.y, torch.tensor([1.0, 1.0], dtype=DOUBLE), rtol=0, atol=1e-4)
    assert solution.upper == pytest.approx(5.0, abs=1e-4)
    assert "fresh" not in solution.message


def test_the_nearest_depends_on_y0():
    """From y0 = (1, -1), y = (1, -1) + x / 2, and F = (x-1)^2 + (x/2 - 2)^2 + (x/2 - 2)^2 is least at 2."""
    y0 = torch.tensor([1.0, -1.0], dtype=DOUBLE)
    solution = meha.solve(undetermined(Nearest()), zeros(1), y0)
    torch.testing.assert_close(solution.y, torch.tensor([2.0, 0.0], dtype=DOUBLE), rtol=0, atol=1e-4)


def test_a_start_that_depends_on_x():
    """y = (x, -x) + x / 2: F = (x-1)^2 + (3x/2 - 3)^2 + (x/2 + 1)^2 is least at 10 / 7."""
    start = Nearest(start=lambda x: torch.cat([x, -x]))
    for method in (None, meha.CG(inner_steps=100, alpha=0.1)):
        solution = meha.solve(undetermined(start), zeros(1), zeros(2), method)
        assert float(solution.x) == pytest.approx(10 / 7, abs=1e-4 if method is None else 5e-3)


def test_a_weight_that_is_kept():
    """With (y_1 + y_2 - x)^2 + w/2 |y|^2, both parts of y are x / (2 + w/2)."""
    w = 0.5
    share = 1 / (2 + w / 2)
    right = (1 + 4 * share) / (1 + 2 * share**2)
    problem = undetermined(Nearest(weight=w))
    for method, tol in ((None, 1e-4), (meha.CG(inner_steps=100), 1e-4), (meha.RHG(inner_steps=100), 1e-4)):
        solution = meha.solve(problem, zeros(1), zeros(2), method)
        assert float(solution.x) == pytest.approx(right, abs=tol)
        assert float(solution.y[0]) == pytest.approx(right * share, abs=tol)


def test_optimistic_runs_say_that_a_fresh_y_differs():
    solution = meha.solve(undetermined(), zeros(1), zeros(2))
    assert solution.upper == pytest.approx(3.0, abs=1e-4)
    assert "the lower level has several solutions at this x" in solution.message
    assert "F = 3 at the returned y, but 5 at the one nearest to y0" in solution.message
    assert "F = 5" in solution.report["fresh"]
    assert solution.converged


@pytest.mark.parametrize("second_order", [True, False])
def test_a_determined_lower_level_says_nothing(second_order):
    """The second-order engine knows that y is the only solution; after passes, a fresh y has the same F."""
    problem = meha.problems.strong_convex(2)
    solution = meha.solve(problem, problem.x0, problem.y0, meha.Default(second_order=second_order))
    assert "fresh" not in solution.message
    assert ("fresh" in solution.report) is not second_order
    assert second_order or solution.report["fresh"].startswith(f"F = {solution.upper:.5g}")


# The second-order engine


def bounded(response="optimistic", start=0.0):
    """f says nothing about y_2, which Y holds in [0, 1]; the best for F is 1, the nearest to y0 is the second part of y0."""
    problem = meha.Problem(
        upper=lambda x, y: (x - 2).square().sum() + (y - 1).square().sum(),
        lower=lambda x, y: (y[0] - x).square().sum(),
        y_set=meha.sets.Box(0.0, 1.0),
        response=response,
    )
    return meha.solve(problem, torch.full((1,), 0.5, dtype=DOUBLE), torch.tensor([0.5, start], dtype=DOUBLE))


def test_a_bound_that_holds_y_by_chance_does_not_determine_it():
    """On its face y is a strict minimum, and yet other solutions are as low."""
    solution = bounded()
    torch.testing.assert_close(solution.y[1], torch.ones((), dtype=DOUBLE), rtol=0, atol=1e-4)
    nearest = bounded(Nearest(start=lambda x: torch.full((2,), 0.3, dtype=DOUBLE)))
    torch.testing.assert_close(nearest.y[1], torch.full((), 0.3, dtype=DOUBLE), rtol=0, atol=1e-4)


def test_a_bound_that_holds_y_by_chance_matters_little_where_f_is_strictly_convex():
    """The minimum of y_2^2 is on the bound of Y: let go, y_2 would stay."""
    problem = meha.Problem(
        upper=lambda x, y: (x - 0.5).square().sum() + (y - 0.5).square().sum(),
        lower=lambda x, y: (y[0] - x).square().sum() + y[1].square(),
        y_set=meha.sets.Box(0.0, 1.0),
        response=Nearest(),
    )
    solution = meha.solve(problem, torch.full((1,), 0.2, dtype=DOUBLE), torch.full((2,), 0.7, dtype=DOUBLE))
    assert solution.report["engine"].startswith("ImplicitNewton")
    assert solution.converged
    torch.testing.assert_close(solution.y, torch.tensor([0.5, 0.0], dtype=DOUBLE), rtol=0, atol=1e-8)


def determined(response):
    """The lower level has one solution, y = x / 2 + 1."""
    problem = meha.Problem(
        upper=lambda x, y: (x - 1).square().sum() + (y - TARGET).square().sum(),
        lower=lambda x, y: (y - x / 2 - 1).square().sum(),
        response=response,
    )
    return meha.solve(problem, zeros(2), zeros(2))


def test_the_engine_answers_where_y_is_determined():
    """F = (x - 1)^2 + (x / 2 + 1 - t)^2 is least where 5/4 x = 1 + (t - 1) / 2, for both responses."""
    right = (1 + (TARGET - 1) / 2) / 1.25
    best, nearest = determined("optimistic"), determined(Nearest())
    for solution in (best, nearest):
        assert solution.converged
        assert solution.report["engine"].startswith("ImplicitNewton")
        torch.testing.assert_close(solution.x, right, rtol=0, atol=1e-8)
    open_ = meha.solve(undetermined(Nearest()), zeros(1), zeros(2))
    assert open_.report["engine"].startswith("PenaltyContinuation; ImplicitNewton: ")


# Method by method

FOLLOWING = {
    "Default": (Nearest,),
    "AdaptiveMEHA": (Nearest,),
    "F2SA": (Trained,),
    "RHG": (Nearest, Trained),
    "CG": (Nearest,),
}
"""The table of docs/responses.md."""

NUMBERS = {
    "F2SA": dict(alpha=100.0, c=1000.0),
    "MEHA": dict(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0),
    "GridSearch": dict(space=meha.Uniform(0.0, 1.0)),
    "RandomSearch": dict(space=meha.Uniform(0.0, 1.0)),
    "TPE": dict(space=meha.Uniform(0.0, 1.0)),
}


def built():
    found = {}
    for kind in methods():
        public = getattr(meha, kind.__name__, None) or getattr(meha.contrib, kind.__name__, None)
        if public is kind and kind is not Method:
            found[kind.__name__] = kind(**NUMBERS.get(kind.__name__, {}))
    return found


METHODS = built()


@pytest.mark.parametrize("response", [Nearest(), Trained(steps=50, lr=0.1)], ids=["nearest", "trained"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_follow_or_refuse(name, response):
    method, kind = METHODS[name], type(response)
    if kind in FOLLOWING.get(name, ()):
        method = dataclasses.replace(method, inner_steps=100, warm_start=False) if name in ("RHG", "CG") else method
        solution = meha.solve(undetermined(response), zeros(1), zeros(2), method, max_steps=2000)
        tol = 0.02 if name == "F2SA" else 5e-3  # F draws y away by its share of c
        assert float(solution.x) == pytest.approx(2.0, abs=tol)
        torch.testing.assert_close(solution.y, torch.tensor([1.0, 1.0], dtype=DOUBLE), rtol=0, atol=tol)
    else:
        with pytest.raises(ValueError, match=rf"response: {method.name} .*cannot follow {kind.__name__}; use .*RHG"):
            meha.solve(undetermined(response), zeros(1), zeros(2), method)


def test_the_table_names_every_method_that_follows():
    assert {name for name, method in METHODS.items() if method.follows} == set(FOLLOWING)
    assert {name: method.follows for name, method in METHODS.items() if method.follows} == FOLLOWING


# Trained

LR, STEPS = 0.1, 3
DATA = torch.tensor([1.0, 0.0], dtype=DOUBLE)


def adapted(x):
    """y after the steps from x on |y - DATA|^2."""
    return DATA + (x - DATA) * (1 - 2 * LR) ** STEPS


def meta(**parts):
    return meha.Problem(
        upper=lambda x, y: (y - 2).square().sum(),
        lower=lambda x, y: (y - DATA).square().sum(),
        response=Trained(steps=STEPS, lr=LR, start=lambda x: x, **parts),
    )


@pytest.mark.parametrize("options", [{}, {"keep_graph": True}], ids=str)
def test_the_gradient_goes_through_a_start_at_x(options):
    """x acts by the start alone; the hypergradient is that of F after the steps."""
    x0 = torch.tensor([0.3, -0.7], dtype=DOUBLE)
    run = meha.RHG(alpha=1.0, **options).start(meta(), x0, zeros(2))
    run.step()
    by_hand = torch.func.grad(lambda x: (adapted(x) - 2).square().sum())(x0)
    torch.testing.assert_close(x0 - run.x, by_hand)


def test_truncated_sweeps_are_first_order_at_the_start():
    x0 = torch.tensor([0.3, -0.7], dtype=DOUBLE)
    run = meha.RHG(alpha=1.0, terms=1).start(meta(), x0, zeros(2))
    run.step()
    torch.testing.assert_close(x0 - run.x, 2 * (adapted(x0) - 2) * (1 - 2 * LR))


def test_the_response_prescribes_the_steps():
    run = meha.RHG(inner_steps=7, warm_start=True).start(meta(), zeros(2), zeros(2))
    assert (run.method.inner_steps, run.method.beta, run.method.warm_start) == (STEPS, LR, False)
    with pytest.raises(ValueError, match=r"beta: is 0.5, but the response takes steps of lr=0.1"):
        meha.RHG(beta=0.5).start(meta(), zeros(2), zeros(2))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def distillation(start):
    points = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    return meha.Problem(
        upper=lambda x, y: (y(points) - points.sum(1, keepdim=True)).square().mean(),
        lower=lambda x, y: (y(x) - 1).square().mean(),
        response=Trained(steps=5, lr=0.1, start=start),
    )


def test_redrawn_networks_differ_from_step_to_step_and_resume_bit_for_bit(tmp_path):
    def solve(steps, **options):
        torch.manual_seed(1)
        method = meha.RHG(x_optimizer=partial(torch.optim.Adam, lr=0.05))
        x0 = torch.ones(2, 2, dtype=DOUBLE)
        return meha.solve(distillation("redraw"), x0, network(), method, max_steps=steps, tol=None, **options)

    whole = solve(6)
    assert len({round(value, 9) for value in whole.history["upper"]}) == 6
    file = tmp_path / "run.pt"
    solve(3, checkpoint=file)
    again = solve(6, checkpoint=file)
    assert torch.equal(again.x, whole.x)


def test_a_start_may_be_a_value_of_each_kind():
    other = network()
    for start in (lambda x: other, lambda x: dict(other.named_parameters()), None):
        run = meha.RHG(alpha=0.1).start(distillation(start), torch.ones(2, 2, dtype=DOUBLE), network())
        assert run.step()["upper"] > 0


def test_the_default_for_trained_responses():
    assert meha.methods.default_method(meta(), zeros(2), zeros(2)).name == "RHG"
    method = meha.methods.default_method(distillation("redraw"), zeros(2), network())
    assert method.name == "RHG"
    assert method.x_optimizer is not None


def test_first_order_methods_refuse_a_start_that_depends_on_x():
    run = meha.F2SA(alpha=1.0, c=10.0).start(meta(), zeros(2), zeros(2))
    with pytest.raises(ValueError, match="start: depends on x, and the method does not differentiate in it; use RHG"):
        run.step()


# Numbers of Trained that are left out


def weighted(y, **parts):
    """Weights of examples for a network, or for the same model as a tensor; the batch is a slice of the examples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 2, generator=generator, dtype=DOUBLE)
    targets = inputs.sum(1, keepdim=True).tanh()

    def errors(y, rows):
        return ((y(inputs[rows]) if callable(y) else inputs[rows] @ y) - targets[rows]).square().squeeze(-1)

    def lower(x, y, rows=slice(0, 20)):
        return (x.exp()[rows] * errors(y, rows)).mean()

    def upper(x, y, rows=None):
        return errors(y, slice(20, 40)).mean()

    return meha.Problem(upper, lower, **parts), zeros(20), y


def without_batches(problem):
    return dataclasses.replace(problem, upper=lambda x, y: problem.upper(x, y), lower=lambda x, y: problem.lower(x, y))


def with_batches(problem):
    return dataclasses.replace(
        problem, upper=lambda x, y, rows: problem.upper(x, y), lower=lambda x, y, r: problem.lower(x, y, r)
    )


BATCHES = [slice(0, 10), slice(10, 20)]


@pytest.mark.parametrize("model", [network, lambda: zeros(2)[:, None]], ids=["network", "tensor"])
@pytest.mark.parametrize("batches", [False, True], ids=["whole", "batches"])
def test_the_default_finds_the_numbers_that_are_left_out(model, batches):
    problem, x0, y0 = weighted(model(), response=Trained())
    problem, loader = (with_batches(problem), BATCHES) if batches else (without_batches(problem), None)
    solution = meha.solve(problem, x0, y0, batches=loader, max_steps=5, tol=None)
    found = solution.problem.response
    assert solution.method.name == "RHG"
    assert (solution.method.inner_steps, solution.method.beta, solution.method.warm_start) == (found.steps, found.lr, False)
    assert 1 <= found.steps <= 50
    assert solution.report["training"].startswith(f"{found.steps} step")
    assert solution.counts.lower > 5 * found.steps + 50  # those that found the numbers count
    assert f"{found.steps} step" in solution.refit(batches=loader).how
    assert float(solution.x.abs().max()) > 1e-4
    # The same as when the numbers are given.
    y0 = model()
    given = dataclasses.replace(problem, response=found)
    again = meha.solve(given, x0, y0, batches=loader, max_steps=5, tol=None)
    assert torch.equal(again.x, solution.x)


def test_numbers_are_found_from_redrawn_networks():
    torch.manual_seed(0)
    problem = dataclasses.replace(distillation("redraw"), response=Trained(start="redraw"))
    x0 = torch.ones(2, 2, dtype=DOUBLE)
    solution = meha.solve(problem, x0, network(), max_steps=3, tol=None)
    assert solution.problem.response.complete
    assert solution.problem.response.start == "redraw"
    assert float((solution.x - x0).abs().max()) > 1e-3


def test_numbers_are_found_from_a_start_at_x():
    """f has the curvatures 2 and 0.2: the step is 1 / 2, and x acts by what is left of the second coordinate."""
    curved, x0 = torch.tensor([1.0, 0.1], dtype=DOUBLE), torch.tensor([0.3, -0.7], dtype=DOUBLE)
    problem = dataclasses.replace(
        meta(), lower=lambda x, y: (curved * (y - DATA).square()).sum(), response=Trained(start=lambda x: x)
    )
    run = meha.RHG(alpha=1.0).start(problem, x0, zeros(2))
    found = run.problem.response
    assert found.lr == pytest.approx(0.5, rel=1e-3)
    errors = (curved * ((x0 - DATA) * (1 - 2 * found.lr * curved) ** torch.arange(51)[:, None]).square()).sum(1)
    assert found.steps == int((errors <= errors[0] - 0.99 * (errors[0] - errors[-1])).int().argmax())
    run.step()
    left = (1 - 2 * found.lr * curved) ** found.steps
    torch.testing.assert_close(x0 - run.x, 2 * (DATA + (x0 - DATA) * left - 2) * left)


def test_one_of_the_numbers_may_be_given():
    problem, x0, y0 = weighted(network(), response=Trained(steps=4))
    run = meha.RHG(alpha=1.0).start(without_batches(problem), x0, y0)
    assert (run.method.inner_steps, run.method.beta) == (4, run.problem.response.lr)
    problem, x0, y0 = weighted(network(), response=Trained(lr=0.03))
    run = meha.RHG(alpha=1.0).start(without_batches(problem), x0, y0)
    assert (run.method.inner_steps, run.method.beta) == (run.problem.response.steps, 0.03)
    with pytest.raises(ValueError, match=r"beta: is 0.5, but the response finds its steps; leave beta out, or give it as lr"):
        meha.RHG(beta=0.5).start(without_batches(weighted(network(), response=Trained())[0]), x0, y0)


def test_f2sa_takes_the_numbers_that_were_found():
    problem, x0, y0 = weighted(network(), response=Trained())
    run = meha.F2SA(alpha=10.0, c=100.0).start(without_batches(problem), x0, y0)
    found = run.problem.response
    assert (run.method.inner_steps, run.method.beta, run.method.eta) == (found.steps, found.lr, found.lr)
    before = run.x.clone()
    run.step()
    assert float((run.x - before).abs().max()) > 1e-6
    assert run.method.report(run)["training"].startswith(f"{found.steps} step")


def test_what_was_found_is_saved_and_not_found_again(tmp_path):
    problem, x0, _ = weighted(network(), response=Trained())
    problem = with_batches(problem)

    def solve(steps, batches, **options):
        return meha.solve(problem, x0, network(), meha.RHG(alpha=1.0), batches=batches, max_steps=steps, tol=None, **options)

    whole = solve(6, BATCHES)
    file = tmp_path / "run.pt"
    solve(3, BATCHES, checkpoint=file)
    again = solve(6, BATCHES, checkpoint=file)
    assert torch.equal(again.x, whole.x)
    assert again.counts == whole.counts
    assert again.problem.response == whole.problem.response
    assert again.report["training"] == whole.report["training"]
    run = meha.RHG(alpha=1.0).start(problem, x0, network())
    run.step(slice(0, 1))  # another first batch leads to other numbers
    assert run.problem.response != whole.problem.response
    other = meha.RHG(alpha=1.0).start(problem, x0, network())
    other.load_state_dict(run.state_dict())
    assert other.problem.response == run.problem.response
    assert other.method == run.method
    assert run.step(BATCHES[0])["upper"] == other.step(BATCHES[0])["upper"]


def test_steps_that_were_found_for_training_stay_when_a_run_begins_again():
    """The steps of x become shorter; those of training belong to the problem."""
    problem, x0, y0 = weighted(network(), response=Trained())
    run = meha.RHG().start(without_batches(problem), x0, y0)
    assert set(run.chosen_steps) == {"alpha"}
    alpha, beta = run.method.alpha, run.method.beta
    run.begin_again([leaf.detach().clone() for leaf in run.state.x.leaves + run.state.y.leaves])
    assert (run.method.alpha, run.method.beta) == (alpha / 4, beta)


# What can follow Nearest


@pytest.mark.parametrize(
    ("model", "batches", "remedy", "wrong"),
    [
        (network, False, r"use RHG or CG, or say how y is trained, response=meha.responses.Trained\(\)", "default"),
        (network, True, r"use RHG or CG, or say how y is trained, response=meha.responses.Trained\(\)", "default"),
        (lambda: zeros(2)[:, None], True, "use RHG or CG, or leave response out", "default"),
        (lambda: zeros(2)[:, None], False, "use the default, RHG or CG", "Trained"),
    ],
    ids=["network", "network, batches", "tensor, batches", "tensor"],
)
def test_the_remedy_for_nearest_can_be_followed(model, batches, remedy, wrong):
    """The message does not name the default to one who took it, and the methods that it names take the problem."""
    problem, x0, _ = weighted(model(), response=Nearest())
    problem, loader = (with_batches(problem), BATCHES) if batches else (without_batches(problem), None)
    method = meha.BOME() if "default" in remedy else None
    with pytest.raises(ValueError, match=f"cannot follow Nearest; {remedy}") as raised:
        meha.solve(problem, x0, model(), method, batches=loader)
    assert wrong not in str(raised.value)
    named = [meha.RHG(alpha=0.1), meha.CG(alpha=0.1, damping=1.0), *([None] if "default" in remedy else [])]
    for other in named:
        assert not meha.solve(problem, x0, model(), other, batches=loader, max_steps=3).status.failed
    if "Trained" in remedy:
        trained = dataclasses.replace(problem, response=Trained())
        assert not meha.solve(trained, x0, model(), batches=loader, max_steps=2).status.failed


def test_tensors_with_optional_batches_have_the_default_without():
    problem, x0, y0 = weighted(zeros(2)[:, None], response=Nearest())
    with pytest.raises(ValueError, match="use RHG or CG, or the default without batches"):
        meha.solve(problem, x0, y0, batches=BATCHES)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: undetermined("pessimistic"), "response: expected .*optimistic.*Nearest"),
        (lambda: undetermined(Nearest), "response: expected"),
        (lambda: Nearest(weight=-1.0), "weight: must be a positive number"),
        (lambda: Nearest(start="redraw"), "start: Nearest takes a function of x"),
        (lambda: Trained(steps=0, lr=0.1), "steps: must be a whole number"),
        (lambda: Trained(steps=1, lr=0.0), "lr: must be a positive number"),
        (lambda: Trained(steps=1, lr=0.1, start=3), "start: Trained takes a function of x"),
        (lambda: meha.RHG().start(undetermined(Nearest(start=lambda x: x)), zeros(1), zeros(2)), "start: returned leaves"),
        (
            lambda: meha.RHG().start(undetermined(Trained(steps=1, lr=0.1, start=lambda x: x)), zeros(1), zeros(2)).step(),
            "start: returned leaves of shapes",
        ),
        (
            lambda: meha.RHG().start(undetermined(Trained(steps=1, lr=0.1, start="redraw")), zeros(1), zeros(2)).step(),
            "cannot be drawn again",
        ),
        (
            lambda: meha.solve(meha.Problem(lambda y: y.sum(), lambda y: y.square().sum(), response=Nearest()), None, zeros(2)),
            r"response: .*there is no x",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Runs that are broken off


def test_the_default_resumes_bit_for_bit(tmp_path):
    problem = undetermined(Nearest())
    whole = meha.solve(problem, zeros(1), zeros(2))
    file = meha.Checkpoint(tmp_path / "run.pt", every=1)
    meha.solve(problem, zeros(1), zeros(2), max_steps=5, checkpoint=file)
    again = meha.solve(problem, zeros(1), zeros(2), checkpoint=file)
    assert again.steps == whole.steps
    assert torch.equal(again.x, whole.x)
    assert torch.equal(again.y, whole.y)


def test_a_run_keeps_the_weight_of_its_term():
    first = meha.CG().start(undetermined(Nearest()), zeros(1), zeros(2))
    first.step()
    second = meha.CG().start(undetermined(Nearest()), zeros(1), torch.ones(2, dtype=DOUBLE))
    second.load_state_dict(first.state_dict())
    first.step(), second.step()
    assert torch.equal(first.x, second.x)
    assert first.oracle.response_term.weight > 0


def test_a_checkpoint_of_another_response_is_refused(tmp_path):
    meha.solve(undetermined(), zeros(1), zeros(2), max_steps=3, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match="response: was optimistic, is Nearest"):
        meha.solve(undetermined(Nearest()), zeros(1), zeros(2), checkpoint=tmp_path / "run.pt")


def test_steps_are_not_compiled():
    with pytest.warns(meha.running.compiled.CompileWarning, match="selected response"):
        solution = meha.solve(meta(), zeros(2), zeros(2), meha.RHG(alpha=0.5), max_steps=80, compile=True)
    assert solution.status is meha.Status.RULE_MET
