"""How a run ends: one verdict, whoever asks; and nothing goes on after it."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import meha
from meha import Status, Verdict, methods
from meha.problem.problem import Problem
from meha.tensors.variables import Variable

MOMENT = {"alpha": 0.1, "beta": 0.1, "eta": 0.1, "gamma": 1.0, "c": 1.0}
ZERO = torch.zeros(1, dtype=torch.float64)


def step_to_the_end(run, most=3000):
    """The loop that the documentation shows, with a bound so that a failure does not hang the tests."""
    while run.verdict is None:
        run.step()
        assert run.k <= most
    return run.verdict


def breaking(x, y):
    torch.linalg.cholesky(torch.eye(2, dtype=x.dtype) * (1 - x.sum()))
    return (y - x.sum()).square().sum()


def infinite():
    """F falls for ever as x grows."""
    return Problem(lambda x, y: (-x).exp().sum() + (y - x).square().sum(), lambda x, y: (y - x).square().sum())


ENDS = {
    "converged": lambda: (meha.Default(), meha.problems.sine(1)),
    "converged, implicit Newton": lambda: (meha.Default(), meha.problems.strong_convex(3)),
    "converged, continuation": lambda: (meha.Default(second_order=False), meha.problems.strong_convex(3)),
    "rule met": lambda: (meha.contrib.AdaptiveMEHA(), meha.problems.sine(1)),
    "finished": lambda: (meha.GridSearch(space=meha.Uniform(0.0, 1.0), points=3), meha.problems.lasso(n=2)),
    "finished by a limit": lambda: (meha.Default(max_gradients=30), meha.problems.sine(1)),
    "optimum at infinity": lambda: (meha.Default(), infinite()),
    "diverged": lambda: (
        meha.Default(),
        Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: -(y - x - 1).square().sum()),
    ),
    "broke down": lambda: (
        meha.MEHA(**MOMENT),
        Problem(lambda x, y: (x - 3).square().sum() + y.square().sum(), breaking),
    ),
    "non-finite": lambda: (
        meha.MEHA(alpha=0.1, beta=1.0, eta=1.0, gamma=1.0, c=1.0),
        Problem(lambda x, y: (x + y).square().sum(), lambda x, y: (y - x - 3).pow(4).sum()),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_loop_on_the_verdict_ends_on_every_kind_of_end(end):
    method, problem = ENDS[end]()
    run = method.start(problem, getattr(problem, "x0", ZERO), getattr(problem, "y0", ZERO))
    verdict = step_to_the_end(run)
    assert isinstance(verdict, Verdict)
    assert str(verdict.status) == end.split(",")[0].replace(" by a limit", "")
    assert verdict.message
    k, x = run.k, run.x.clone()
    with pytest.raises(RuntimeError, match=rf"step: the run is over \({verdict.status}: .*ask run.verdict .* start a new run"):
        run.step()
    assert run.k == k
    torch.testing.assert_close(run.x, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("end", ENDS)
def test_solve_ends_as_the_loop_does(end):
    method, problem = ENDS[end]()
    start = getattr(problem, "x0", ZERO), getattr(problem, "y0", ZERO)
    verdict = step_to_the_end(method.start(problem, *start))
    solution = meha.solve(problem, *start, method, tol=None if not hasattr(method, "tol") else "default")
    kinds = {verdict.status} | ({Status.DIVERGED} if end == "non-finite" else set())  # the guard may come first
    assert solution.status in kinds
    assert solution.converged == (verdict.status is Status.CONVERGED)


@pytest.mark.parametrize("method", [None, meha.contrib.AdaptiveMEHA()], ids=["default", "AdaptiveMEHA"])
@pytest.mark.parametrize(
    "problem",
    [infinite(), Problem(lambda x, y: (-y).exp().sum(), lambda x, y: (y - x).square().sum())],
    ids=["F of x", "F of y alone"],
)
def test_an_optimum_at_infinity_is_never_converged(problem, method):
    solution = meha.solve(problem, ZERO, ZERO, method, max_steps=2000)
    assert not solution.converged
    assert solution.status is not Status.CONVERGED


def test_a_printed_solution_calls_no_objective():
    calls = []

    def counted(function):
        def call(x, y):
            calls.append(1)
            return function(x, y)

        return call

    torch.manual_seed(0)
    network, inputs = torch.nn.Linear(3, 1), torch.randn(8, 3)
    problem = Problem(
        counted(lambda x, y: (y(inputs) - 1).square().mean()),
        counted(lambda x, y: y(inputs).square().mean() + x.exp() * y.weight.square().sum()),
    )
    toy = meha.problems.merely_convex(4)
    small = Problem(counted(toy.upper), counted(toy.lower))
    for solution in (
        meha.solve(problem, torch.zeros(()), network, max_steps=20),
        meha.solve(problem, torch.zeros(()), copy.deepcopy(network), meha.MEHA(**MOMENT), max_steps=20),
        meha.solve(small, toy.x0, toy.y0, meha.MEHA(**MOMENT), max_steps=20),
        meha.solve(small, toy.x0, toy.y0),
    ):
        calls.clear()
        text = f"{solution} {solution.details} {solution.upper} {solution!r}"
        assert text.startswith(f"{solution.engine}: ")
        assert max(map(len, str(solution).splitlines())) <= 100
        assert not calls
        assert solution.diagnose().gap > -1e-6
        assert calls


@pytest.mark.parametrize(
    "options", [{}, {"gradients": 4}, {"gradients": 3}, {"inner_steps": 1}, {"warm_start": True}, {"p": 0.49}], ids=str
)
def test_meha_is_the_algorithm_of_the_paper_whatever_is_left_out(options):
    problem = meha.problems.sine(2)
    method = meha.MEHA(**options)
    run = method.start(problem, problem.x0, problem.y0)
    assert isinstance(run.method, meha.MEHA)
    assert run.method.gradients == options.get("gradients", 4)
    run.step()
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=3)
    assert isinstance(solution.method, meha.MEHA)
    assert str(solution).startswith("MEHA: max steps after 3 steps")
    if options in ({}, {"gradients": 4}, {"inner_steps": 1}):
        steps, by_hand = solution.method, _algorithm_1(problem, solution.method, 3)
        assert math.isfinite(steps.c)
        torch.testing.assert_close(solution.x, by_hand[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(solution.y, by_hand[1], rtol=1e-12, atol=1e-12)


def _algorithm_1(problem, m, steps):
    """The paper's three updates, written out for the sine problem."""
    x, y = problem.x0.clone(), problem.y0.clone()
    theta = y.clone()

    def gradient(function, *at):
        at = [part.clone().requires_grad_() for part in at]
        return torch.autograd.grad(function(*at), at, allow_unused=True)

    for k in range(steps):
        c = m.c * (k + 1) ** m.p
        theta = theta - m.eta * (gradient(problem.lower, x, theta)[1] + (theta - y) / m.gamma)
        F_x, f_x, f_theta = gradient(problem.upper, x, y)[0], *(gradient(problem.lower, x, z)[0] for z in (y, theta))
        x = x - m.alpha * (F_x / c + f_x - f_theta)
        F_y, f_y = gradient(problem.upper, x, y)[1], gradient(problem.lower, x, y)[1]
        y = y - m.beta * (F_y / c + f_y - (y - theta) / m.gamma)
    return x, y


def test_one_function_decides_the_default():
    toy = meha.problems.sine(1)
    noisy = Problem(lambda x, y, batch: (x - y - batch).square().sum(), lambda x, y, batch: (y - x).square().sum())
    network = torch.nn.Linear(1, 1)
    on_network = Problem(lambda x, y: (y(x) - 1).square().sum(), lambda x, y: (y(x) + 1).square().sum())
    for problem, x, y, batches, expected in (
        (toy, toy.x0, toy.y0, None, meha.Default),
        (toy, toy.x0, toy.y0, [1], meha.stochastic.AdaptiveSOBA),
        (noisy, ZERO, ZERO, [ZERO], meha.stochastic.AdaptiveSOBA),
        (replace(noisy, y_set=meha.sets.Box(-1.0, 1.0)), ZERO, ZERO, [ZERO], meha.StochasticMEHA),
        (replace(noisy, nonsmooth=meha.nonsmooth.L1(0.1)), ZERO, ZERO, [ZERO], meha.StochasticMEHA),
        (on_network, torch.ones(1), network, None, meha.stochastic.NetworkSOBA),
        (on_network, torch.ones(1), {"net": [network]}, None, meha.stochastic.NetworkSOBA),
    ):
        assert type(methods.default_method(problem, x, y, batches)) is expected
    solution = meha.solve(noisy, ZERO, ZERO, batches=[ZERO], max_steps=1)
    assert type(solution.method) is meha.stochastic.AdaptiveSOBA
    batch = torch.zeros(1, dtype=torch.float64)
    assert meha.check(noisy, ZERO, ZERO, batch=batch).method == "AdaptiveSOBA"
    assert meha.check(toy, toy.x0, toy.y0).method == "Default"


class StopsAfter:
    """A stateful rule: it ends the run after as many calls as it is told, counted over all processes."""

    def __init__(self, limit):
        self.limit, self.calls = limit, 0

    def __call__(self, run, info):
        self.calls += 1
        return Verdict(Status.CONVERGED, f"{self.calls} calls") if self.calls >= self.limit else None

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_stateful_rule_is_resumed(tmp_path):
    problem = meha.problems.merely_convex(4)
    call = dict(method=meha.MEHA(**MOMENT), tol=None, checkpoint=tmp_path / "run.pt")
    first = meha.solve(problem, problem.x0, problem.y0, max_steps=12, callbacks=StopsAfter(20), **call)
    assert first.status is Status.MAX_STEPS
    second = meha.solve(problem, problem.x0, problem.y0, max_steps=100, callbacks=StopsAfter(20), **call)
    assert (second.status, second.steps, second.message) == (Status.CONVERGED, 20, "20 calls")
    assert second.history["step"] == list(range(1, 21))


def test_observers_begin_and_end_and_see_numbers_of_those_before():
    seen = []

    class Watch:
        def begin(self, run, max_steps):
            seen.append(("begin", run.k, max_steps))

        def __call__(self, run, info):
            seen.append((info.step, info["double"]))

        def end(self, run):
            seen.append(("end", run.k))

    problem = meha.problems.merely_convex(2)
    callbacks = [lambda run, info: {"double": 2.0 * info.step}, Watch()]
    solution = meha.solve(problem, problem.x0, problem.y0, meha.MEHA(**MOMENT), tol=None, max_steps=2, callbacks=callbacks)
    assert seen == [("begin", 0, 2), (1, 2.0), (2, 4.0), ("end", 2)]
    assert solution.history["double"] == [2.0, 4.0]


def test_observers_can_be_used_again():
    """Rules, guards and recorders begin afresh with each run."""
    problem = meha.problems.merely_convex(4)
    guard, recorder = meha.observers.DivergenceGuard(), meha.observers.Recorder(3)
    rule = meha.stopping.RelativeChange(1e-4)
    runs = [
        meha.solve(problem, problem.x0, problem.y0, meha.MEHA(**MOMENT), tol=None, callbacks=[guard, recorder, rule])
        for _ in range(2)
    ]
    assert runs[0].steps == runs[1].steps
    assert runs[0].history["step"] == runs[1].history["step"]


def test_the_answer_so_far_is_what_the_run_holds():
    """While the second run of Default goes on, x and y are the result of the first."""
    problem = meha.problems.sine(10)
    run = meha.Default().start(problem, problem.x0, problem.y0)
    first = meha.Default(both_starts=False).start(problem, problem.x0, problem.y0)
    step_to_the_end(first)
    while run.k < first.k:
        run.step()
    for _ in range(3):
        torch.testing.assert_close(run.x, first.x, rtol=0, atol=0)
        run.step()
    short = meha.solve(problem, problem.x0, problem.y0, max_steps=first.k + 1)
    assert short.status is Status.MAX_STEPS
    assert problem.distance(short.x, short.y).x < 1e-5


def test_numbers_of_a_step_are_those_of_the_method():
    method = meha.MEHA(alpha=lambda k: 0.1 / (k + 1), beta=0.2, eta=0.3, gamma=2.0, c=4.0, p=0.5 - 1e-9)
    at = methods.At(method, 3, batch="b")
    assert (at.alpha, at.beta, at.batch, at.x_optimizer) == (0.1 / 4, 0.2, "b", None)
    assert at.c_k == pytest.approx(8.0)
    with pytest.raises(AttributeError):
        _ = at.nothing
    with pytest.raises(ValueError, match=r"alpha: the schedule gave -1\.0 at step 0; it must be positive"):
        _ = methods.At(meha.MEHA(alpha=lambda k: -1.0), 0, None).alpha
    assert methods.At(meha.VPBGD(c=lambda k: 0.0), 0, None).c == 0


def test_run_checks_without_waiting_for_values():
    """``ended`` is the verdict without a look at x and y."""
    problem = Problem(lambda x, y: (x + y).square().sum(), lambda x, y: (y - x).square().sum())
    run = meha.MEHA(**MOMENT).start(problem, ZERO, ZERO)
    run.step()
    run.state.x.leaves[0].detach().fill_(math.nan)
    assert run.ended is None
    assert run.verdict == Verdict(Status.NON_FINITE, "Step 1 gave NaN or infinity.")
    assert isinstance(run.state.x, Variable)
