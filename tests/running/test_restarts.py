"""Runs that diverge on steps which they chose themselves, and begin again with shorter ones."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import meha
from meha import Status
from meha.problem.loaders import Indices

ZERO = torch.zeros(3, dtype=torch.float64)


def growing(**sets):
    """The curvature of f in y is exp(x), and y(x) = exp(-x): F draws x to where steps that fit the start are too long."""
    return meha.Problem(
        lambda x, y: 100 * (y - 0.01).square().sum() + 1e-3 * x.square().sum(),
        lambda x, y: (x.exp() * y.square() / 2 - y).sum(),
        **sets,
    )


def logistic(n=40, features=22):
    """Weights of a ridge penalty, for each feature one, that F learns from other examples; features of scales 1/3 to 3."""
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    A = torch.randn(2 * n, features, **draw) * torch.logspace(-1, 1, features, base=3, dtype=torch.float64)
    b = (A @ (0.3 * torch.randn(features, **draw)) + 2 * torch.randn(2 * n, **draw)).sign()

    def loss(y, rows):
        return softplus(-b[rows] * (A[rows] @ y)).mean()

    problem = meha.Problem(
        lambda x, y, batch: loss(y, n + batch.upper),
        lambda x, y, batch: loss(y, batch.lower) + (x.exp() * y.square()).sum() / 2,
    )
    x0, y0 = torch.full((features,), -3.0, dtype=torch.float64), torch.zeros(features, dtype=torch.float64)
    return problem, x0, y0, Indices(8, upper=n, lower=n), lambda y: float(loss(y, slice(n, None)))


@pytest.mark.parametrize(
    "method",
    [meha.MEHA(), meha.RHG(inner_steps=3), meha.CG(inner_steps=3, cg_steps=5), meha.F2SA(inner_steps=3), meha.VPBGD()],
    ids=lambda method: method.name,
)
def test_batches_of_a_logistic_problem(method):
    problem, x0, y0, batches, validation = logistic()
    solution = meha.solve(problem, x0, y0, method, batches=batches, max_steps=200, tol=None)
    assert solution.status is Status.MAX_STEPS
    assert validation(solution.y) < validation(y0)
    assert ("began again" in solution.message) == ("restarts" in solution.report)
    if method.name == "CG":  # its first steps end where y is of no use
        assert "began again" in solution.message


@pytest.mark.parametrize("kind", [meha.RHG, meha.CG, meha.NS, meha.GALET, meha.F2SA, meha.VPBGD, meha.BOME])
def test_the_run_is_that_with_shorter_steps(kind):
    """Bit for bit the run of a user who gives the numbers that were found, but for the work that was lost."""
    method = kind(inner_steps=3)
    problem = steep() if kind in (meha.RHG, meha.GALET) else growing()
    solution = meha.solve(problem, ZERO, ZERO, method, max_steps=150)
    assert not solution.status.failed
    assert "began again" in solution.message
    first = method.start(problem, ZERO, ZERO).method
    ratio = solution.method.beta / first.beta
    restarts = solution.message.count(" after ")
    assert ratio == 0.25**restarts == solution.method.alpha / first.alpha
    given = meha.solve(problem, ZERO, ZERO, solution.method, max_steps=150)
    assert torch.equal(given.x, solution.x)
    assert torch.equal(given.y, solution.y)
    assert given.status is solution.status
    assert given.steps == solution.steps == len(solution.history["step"])
    assert given.history["upper"] == solution.history["upper"]
    assert solution.counts.lower > given.counts.lower + 3  # the constants, and the steps that were lost


def steep():
    """As growing(), and steeper, so that one step of x is enough."""
    return meha.Problem(
        lambda x, y: (x - y).sum() + (x - 2).square().sum(), lambda x, y: ((4 * x).exp() * y.square() / 2 - y).sum()
    )


def test_numbers_of_the_user_are_never_changed():
    for given in ({"alpha": 0.3}, {"beta": 0.3}):
        solution = meha.solve(growing(), ZERO, ZERO, meha.CG(**given), max_steps=100)
        assert {name: getattr(solution.method, name) for name in given} == given
    free = meha.CG().start(growing(), ZERO, ZERO).method
    solution = meha.solve(growing(), ZERO, ZERO, free, max_steps=100)
    assert solution.status.failed
    assert solution.method == free
    assert "began again" not in solution.message


@pytest.mark.parametrize("kind", [meha.RHG, meha.F2SA, meha.VPBGD])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_a_problem_without_a_solution_diverges_at_once(kind, level):
    problem = {
        "upper": meha.Problem(lambda x, y: -(x * y).sum(), lambda x, y: (y - x).square().sum()),
        "lower": meha.Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: -(y - x).square().sum()),
    }[level]
    solution = meha.solve(problem, ZERO + 0.5, ZERO + 0.6, kind(), max_steps=2000)
    assert solution.status is Status.DIVERGED
    assert "began again" not in solution.message


def test_a_method_that_breaks_down_on_any_steps_says_so_soon():
    """The Hessian of f is singular everywhere."""
    problem = meha.problems.merely_convex(n=2)
    solution = meha.solve(problem, problem.x0, problem.y0, meha.CG(), max_steps=50)
    assert solution.status is Status.BROKE_DOWN
    assert "Add damping" in solution.message
    assert solution.counts.lower < 500


def test_bad_data_are_named_at_once():
    problem = meha.Problem(lambda x, y, b: (x - y).square().sum(), lambda x, y, b: (y - b).square().sum() + (x * y).sum())
    solution = meha.solve(problem, ZERO, ZERO, meha.RHG(), batches=[ZERO, ZERO / 0], max_steps=4)
    assert solution.status is Status.NON_FINITE
    assert "batch 2 of this pass" in solution.message
    assert "began again" not in solution.message


def test_there_is_an_end_to_it():
    """A beta of the user that no alpha makes up for: y oscillates with factor -5."""
    problem = meha.Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    solution = meha.solve(problem, ZERO, ZERO + 1, meha.RHG(beta=3.0), max_steps=100)
    assert solution.status is Status.DIVERGED
    assert solution.message.count("diverged after 1 step") == 5
    assert solution.method.beta == 3.0


def test_it_resumes_from_checkpoints_before_and_after(tmp_path):
    def call(file=None, **options):
        plain = growing()
        problem = meha.Problem(
            lambda x, y, b: plain.upper(x, y), lambda x, y, b: plain.lower(x, y) + b * (y - 1).square().sum()
        )
        batches = [0.01, 0.03, 0.02, 0.0]
        method = meha.VPBGD(inner_steps=2)
        return meha.solve(problem, ZERO, ZERO, method, batches=batches, tol=None, max_steps=60, checkpoint=file, **options)

    whole, seen = call(), []
    (lost,) = (int(word) for word in whole.message.partition(" after ")[2].split()[:1])
    stops = (lost - 5, lost + 15)  # counted over all calls, which repeat up to 6 steps

    def stop(run, info):
        seen.append(info.step)
        if len(seen) in stops:
            raise KeyboardInterrupt

    file = meha.Checkpoint(tmp_path / "run.pt", every=4)
    ends = [call(file, callbacks=stop) for _ in stops]
    assert [end.status for end in ends] == [Status.INTERRUPTED] * 2
    assert ends[1].steps < ends[0].steps  # it began again in between
    solution = call(file)
    assert torch.equal(solution.x, whole.x)
    assert torch.equal(solution.y, whole.y)
    assert (solution.message, solution.steps, solution.counts) == (whole.message, whole.steps, whole.counts)
    again = call(file)
    assert (again.message, again.steps) == (whole.message, whole.steps)


def test_running_statistics_of_modules_begin_again_as_well():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.norm = nn.Parameter(ZERO.clone()), nn.BatchNorm1d(3, affine=False).double()

        def forward(self):
            self.norm(self.scale.detach() * torch.tensor([[1.0], [2.0]], dtype=torch.float64))
            return self.scale

    def run(method):
        plain, net = growing(), Net()
        problem = meha.Problem(lambda x, y: plain.upper(x, y()), lambda x, y: plain.lower(x, y()))
        return meha.solve(problem, ZERO, net, method, max_steps=60)

    solution = run(meha.VPBGD(inner_steps=3))
    assert "began again" in solution.message
    given = run(solution.method)
    assert torch.equal(solution.y.scale, given.y.scale)
    assert torch.equal(solution.y.norm.running_mean, given.y.norm.running_mean)
    extra = int(solution.y.norm.num_batches_tracked) - int(given.y.norm.num_batches_tracked)
    assert extra == 2  # F and f at the start, before their constants are measured on a copy


def test_compiled_groups_begin_again_as_well(monkeypatch):
    """With the graph as it was traced in the place of the compiler, which would take half a minute."""
    monkeypatch.setattr(meha.running.compiled, "compile_graph", lambda module, inputs, random: module)
    options = dict(max_steps=150, tol=None)
    eager = meha.solve(growing(), ZERO, ZERO, meha.VPBGD(inner_steps=1), **options)
    compiled = meha.solve(growing(), ZERO, ZERO, meha.VPBGD(inner_steps=1), compile=True, **options)
    assert "began again" in eager.message
    assert eager.method == compiled.method
    assert torch.allclose(eager.x, compiled.x, rtol=1e-9, atol=0)
    assert compiled.steps == 150
