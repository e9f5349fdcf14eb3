"""StochasticMEHA: the update against a second implementation, noise, scales, networks, checkpoints, tasks with defaults."""

import io
import re
from functools import partial

import numpy as np
import pytest
import torch
from meha_lab.tasks import few_shot
from torch import nn
from torch.nn.functional import cross_entropy

import meha
from meha.problem.nonsmooth import L1
from meha.problem.sets import Box, L2Ball

FRESH = meha.StochasticMEHA(warm_start=False)
QUICK = meha.StochasticMEHA(lr=0.05, x_lr=0.05)
"""For problems whose numbers are of the order of 1."""


def quadratic(upper=1.0, lower=1.0):
    """Solution x = y = 1/2; that of the penalised problem is x = (1 + c) / (1 + 2 c) for equal scales."""
    return meha.Problem(
        upper=lambda x, y, noise: upper * ((x - 1).square().sum() + y.square().sum() + (noise[0] * y).sum()),
        lower=lambda x, y, noise: lower * ((y - x).square().sum() + (noise[1] * y).sum()),
    )


def noises(n, steps, size=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(2, n, generator=generator, dtype=dtype) for _ in range(steps)]


def run_all(run, batches):
    infos = [run.step(batch) for batch in batches]
    return infos[-1]


def start(method=None, problem=None, n=3, dtype=torch.float64):
    method, problem = method or meha.StochasticMEHA(), problem or quadratic()
    return method.start(problem, torch.full((n,), 0.3, dtype=dtype), torch.linspace(-1, 1, n, dtype=dtype))


def theta(run):
    return run.state.theta.leaves[0].detach()


# The step


def reference(batches, n, lr=0.015, x_lr=0.01):
    """Steps on the quadratic in numpy, from the formulas of the documentation; F depends on x, and y has no modules."""
    x, y = np.full(n, 0.3), np.linspace(-1, 1, n)
    theta = y.copy()

    def grad_F(y, b):
        return 2 * y + b[0]

    def grad_f(x, y, b):
        return 2 * (y - x) + b[1]

    b = batches[0]
    here = [grad_F(y, b), grad_f(x, y, b)]
    up, low = (np.linalg.norm(g) + 2 * np.sqrt(n) for g in here)  # both have the curvature 2 in all directions
    c = 100 * up / low
    mean = dict.fromkeys("xyt", 0.0)
    square, scale = 0.0, 0.0
    for k, b in enumerate(batches):
        age = 1 + k / 100
        d = {
            "x": 2 * (x - 1) + c * (-2 * (y - x) + 2 * (theta - x)),
            "y": grad_F(theta, b) / c + grad_f(x, y, b),
            "t": grad_f(x, theta, b),
        }
        square = square + ((d["y"] ** 2 + d["t"] ** 2) / 2 - square) / (k + 1)
        size = np.abs(d["x"]).mean()
        scale = max(scale + (size - scale) / (k + 1), size / 10)
        mean = {name: 0.9 * mean[name] + 0.1 * d[name] for name in d}
        hat = {name: mean[name] / (1 - 0.9 ** (k + 1)) for name in d}
        y = y - 0.01 / age * (y - theta)
        theta = theta - lr / age * hat["t"] / np.sqrt(square)
        y = y - lr / age * hat["y"] / np.sqrt(square)
        x = x - x_lr / age * hat["x"] / scale
    return x, y, theta, c


def test_the_step_is_that_of_the_documentation():
    batches = noises(3, 20)
    run = start(meha.StochasticMEHA(warm_start=True))
    info = run_all(run, batches)
    x, y, theta_, c = reference([batch.numpy() for batch in batches], 3)
    assert np.allclose(run.x, x, rtol=1e-10)
    assert np.allclose(run.y, y, rtol=1e-10)
    assert np.allclose(run.state.theta.leaves[0].detach(), theta_, rtol=1e-10)
    assert info["c"] == pytest.approx(c)


class Holder(nn.Module):
    """A module with one parameter."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values.clone())


def test_a_network_is_trained_as_a_tensor_is():
    """A tensor, and a module that holds it as y."""
    held = meha.Problem(lambda x, y, b: quadratic().upper(x, y.values, b), lambda x, y, b: quadratic().lower(x, y.values, b))
    method, y0 = meha.StochasticMEHA(lr=0.03), torch.linspace(-1, 1, 3, dtype=torch.float64)
    plain, run = start(method), method.start(held, torch.full((3,), 0.3, dtype=torch.float64), Holder(y0))
    for one in (plain, run):
        run_all(one, noises(3, 30))
    assert torch.equal(run.y.values.detach(), plain.y)
    assert torch.equal(run.x, plain.x)
    assert run.counts == plain.counts


def test_matrices_have_rates_for_their_columns():
    """The first step of y is lr for each number, times 64 / columns above 64; that of x is on average x_lr / sqrt(columns)."""
    problem = meha.Problem(
        lambda x, y, b: (y[0].sum() + y[1].sum() - 1).square(),
        lambda x, y, b: (y[0] - x.sum()).square().sum() + y[1].square().sum(),
    )
    y0 = [torch.ones(2, 256), torch.ones(2, 16)]
    run = meha.StochasticMEHA(lr=0.01, x_lr=0.02).start(problem, torch.ones(3, 4), y0)
    run.step(0)
    steps = [(before - after).abs().mean() for before, after in zip(y0, run.y, strict=True)]
    assert float(steps[1] / steps[0]) == pytest.approx(4.0, rel=0.4)
    moved = []
    for shape in ((12,), (3, 4)):
        run = meha.StochasticMEHA(lr=0.01, x_lr=0.02).start(problem, torch.ones(shape), y0)
        for _ in range(3):
            run.step(0)
        moved.append(float((run.x - 1).abs().mean()))
    assert moved[0] / moved[1] == pytest.approx(2.0, rel=1e-3)


def test_rates_of_x_do_not_depend_on_its_form():
    """A tensor, and a module that holds it."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.linspace(0, 1, 3, dtype=torch.float64))

    held = meha.Problem(lambda x, y, b: quadratic().upper(x.x, y, b), lambda x, y, b: quadratic().lower(x.x, y, b))
    y0, batches = torch.zeros(3, dtype=torch.float64), noises(3, 30)
    plain = meha.StochasticMEHA().start(quadratic(), torch.linspace(0, 1, 3, dtype=torch.float64), y0)
    module = meha.StochasticMEHA().start(held, Holder(), y0)
    for run in (plain, module):
        run_all(run, batches)
    assert torch.equal(plain.x, module.x.x.detach())


def test_the_gap_is_that_of_the_lower_level():
    """theta follows f alone, to its solution y = 1; y is a little nearer to the 3 that F wants; x plays no part in f."""
    problem = meha.Problem(lambda x, y, b: (y - 3).square().sum() + x.square().sum(), lambda x, y, b: (y - 1).square().sum())
    run = meha.StochasticMEHA(lr=0.05).start(problem, torch.zeros(3).double(), torch.zeros(3).double())
    gaps = [run.step(0)["gap"] for _ in range(1000)]
    assert torch.allclose(theta(run), torch.ones(3).double(), atol=0.01)
    assert gaps[-1] == pytest.approx(float((run.y - 1).square().sum()), rel=0.1, abs=1e-4)
    assert gaps[-1] > 1e-4
    assert (run.y > theta(run)).all()


def test_variables_that_belong_to_the_batch_restart():
    """f has another solution with each batch: going on is worse than beginning at y0, and the run finds out."""
    problem = meha.Problem(
        lambda x, y, b: (y - x).square().sum() + x.square().sum(), lambda x, y, b: (y - x - 100 * b[0]).square().sum()
    )
    changing, fixed = (start(meha.StochasticMEHA(lr=1.0), problem) for _ in range(2))
    run_all(changing, [batch * (-1) ** k for k, batch in enumerate([*noises(3, 1)] * 13)])
    run_all(fixed, [*noises(3, 1)] * 13)
    assert changing.state.fresh
    assert not fixed.state.fresh
    assert "y restarts with each batch" in changing.method.report(changing)["course"]
    torch.testing.assert_close(changing.state.origin.leaves[0].detach(), torch.linspace(-1, 1, 3, dtype=torch.float64))


def test_optimizers_and_momentum():
    """The directions of y and theta are those of F / c + f and f, so that plain steps of 0.2 are stable for the curvature 2."""
    steps = meha.Optimizer(torch.optim.SGD, lr=0.2, clip=1.0)
    method = meha.StochasticMEHA(x_optimizer=partial(torch.optim.Adam, lr=0.01), y_optimizer=steps, warm_start=True)
    run = start(method, n=20)
    c = run_all(run, noises(20, 1500, size=0.1))["c"]
    assert float(run.x.mean()) == pytest.approx((1 + c) / (1 + 2 * c), abs=0.05)
    none, some = (start(meha.StochasticMEHA(momentum=momentum)) for momentum in (0.0, 0.9))
    for one in (none, some):
        run_all(one, noises(3, 5))
    assert not torch.equal(none.x, some.x)


def test_work_is_counted():
    run = start()
    run_all(run, noises(3, 10))
    assert run.counts == meha.problem.oracle.Counts(upper=12, lower=22)


@pytest.mark.parametrize("method", [meha.StochasticMEHA(), FRESH, meha.StochasticMEHA(inner_steps=2)])
def test_scales_of_the_objectives_do_not_matter(method):
    batches = noises(3, 50)
    first, second = start(method), start(method, quadratic(upper=100.0, lower=0.01))
    for run in (first, second):
        run_all(run, batches)
    assert torch.allclose(first.x, second.x, rtol=1e-9)
    assert torch.allclose(first.y, second.y, rtol=1e-9)


@pytest.mark.parametrize("y0", [0.0, 0.3, 1.0])
def test_steepness_is_that_of_curvatures_also_from_a_minimum(y0):
    """F = 3 y^2 has its minimum at 0, f = (y - 0.3)^2 at 0.3; the forces are gradient plus curvature for each number."""
    problem = meha.Problem(lambda x, y: 3 * y.square().sum(), lambda x, y: (y - x).square().sum())
    run = meha.StochasticMEHA().start(problem, torch.full((4,), 0.3), torch.full((4,), y0))
    run.step()
    force, other = abs(6 * y0) + 6, abs(2 * (y0 - 0.3)) + 2
    assert float(run.state.numbers.value["steepness"]) == pytest.approx(force / other, rel=1e-4)


@pytest.mark.parametrize("batch", [0, None], ids=["batches", "all data"])
def test_the_upper_level_is_seen_at_theta(batch):
    """A y that fits its data directly cannot deceive x; all data are one batch."""
    seen = []

    def upper(x, y, *_):
        seen.append(y.detach().clone())
        return (y - 3).square().sum()

    problem = meha.Problem(upper, lambda x, y, *_: (y - x).square().sum())
    run = meha.StochasticMEHA(warm_start=True).start(problem, torch.zeros(2), torch.zeros(2))
    for _ in range(20):
        run.step(*[] if batch is None else [batch])
    at_theta = theta(run).clone()
    assert not torch.equal(at_theta, run.y)
    run.step(*[] if batch is None else [batch])
    assert torch.equal(seen[-1], at_theta)


# Noise


def test_converges_under_noise():
    n, run = 100, start(QUICK, n=100)
    run_all(run, noises(n, 2000, size=0.5))
    assert float(run.x.mean()) == pytest.approx(0.5, abs=0.03)  # the response is exact: c leaves no bias
    assert float(run.x.std()) < 0.15


def test_noise_of_the_lower_level_moves_y_and_theta_alike():
    """Two runs with noise in f alone differ in y by far more than in y - theta, where F pulls at y with a constant force."""
    problem = meha.Problem(lambda x, y, noise: (x - 1).square().sum() + y.sum(), quadratic().lower)
    runs = [start(QUICK, problem, n=200) for _ in range(2)]
    for seed, run in enumerate(runs):
        run_all(run, noises(200, 600, seed=seed))
    moved = runs[0].y - runs[1].y
    parted = moved - (theta(runs[0]) - theta(runs[1]))
    assert float(moved.std()) > 0.05
    assert float(parted.std()) < 0.3 * float(moved.std())


def test_single_precision():
    batches = noises(5, 200)
    double, single = start(n=5), start(n=5, dtype=torch.float32)
    run_all(double, batches)
    run_all(single, [batch.float() for batch in batches])
    assert single.x.dtype == single.y.dtype == torch.float32
    assert torch.allclose(single.x.double(), double.x, atol=1e-3)
    assert torch.allclose(single.y.double(), double.y, atol=1e-3)


def test_tiny_gradients_in_single_precision():
    """Squares of 1e-20 vanish in single precision; steps stay bounded."""
    run = start(problem=quadratic(upper=1e-20, lower=1e-20), dtype=torch.float32)
    before = run.x.clone()
    run_all(run, noises(3, 3, dtype=torch.float32))
    assert float((run.x - before).abs().max()) < 0.2


# Sets and non-smooth terms


def test_intervals():
    problem = meha.Problem(
        lambda x, y: (y - 2).square().sum(), lambda x, y: (y - x).square().sum(), x_set=Box(0.0, 1.0), y_set=Box(-1.0, 0.5)
    )
    run = meha.StochasticMEHA().start(problem, torch.tensor([0.2, 0.9]), torch.zeros(2))
    for _ in range(100):
        run.step()
    assert run.y.tolist() == [0.5, 0.5]
    assert float(run.x.min()) >= 0
    assert float(run.x.max()) <= 1


def mean_of_second_half(run, name, steps):
    """Of the points of a run, which swings around the solution."""
    points = []
    for k in range(steps):
        run.step()
        points += [getattr(run, name).clone()] if k >= steps // 2 else []
    return torch.stack(points).mean(dim=0)


@pytest.mark.parametrize(("method", "steps"), [(QUICK, 2000), (FRESH, 800)])
def test_soft_thresholding(method, steps):
    """y(x) = soft(x, 1/2), and F = |y - b|^2 is 0 where x = b + sign(b) / 2, whatever c; where b = 0, y is 0 exactly."""
    b = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    problem = meha.Problem(lambda x, y: (y - b).square().sum(), lambda x, y: 0.5 * (y - x).square().sum(), nonsmooth=L1(0.5))
    begin = torch.tensor([2.0, 0.2, -2.0], dtype=torch.float64)  # from y = 0, F would pull no number off its kink
    run = method.start(problem, begin, begin)
    x = mean_of_second_half(run, "x", steps)
    assert torch.allclose(x[[0, 2]], torch.tensor([1.5, -1.5], dtype=torch.float64), atol=0.1)
    assert float(run.y[1]) == float(theta(run)[1]) == 0


def test_a_ball_keeps_the_direction():
    """The nearest point of the disc to (3, 4) is (3, 4) / 5: coordinates of a step must be scaled alike to get there."""
    target = torch.tensor([3.0, 4.0])
    problem = meha.Problem(
        lambda x, y: (y - target).square().sum(), lambda x, y: (y - x).square().sum(), x_set=L2Ball(5.0), y_set=L2Ball(1.0)
    )
    run = QUICK.start(problem, torch.zeros(2), torch.tensor([1.0, 0.0]))
    assert torch.allclose(mean_of_second_half(run, "y", 1000), target / 5, atol=2e-2)


# Lower variables that start over


def test_fresh_variables_halve_their_error_with_each_step():
    """With the curvature known, half a Newton step; here it is the same in all directions."""
    problem = meha.Problem(
        lambda x, y, b: (y - b).square().sum() + x.square().sum(), lambda x, y, b: 3 * (y - x * b).square().sum()
    )
    run = FRESH.start(problem, torch.ones(1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
    for seed in range(5):
        batch = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = run.x.clone()
        numbers = run.state.numbers.value
        numbers["curvature_theta"] *= 0 if seed == 0 else 1  # not yet known
        info = run.step(batch)
        share = theta(run) / (x * batch)
        assert torch.allclose(share, share[0].expand(4), rtol=1e-6)
        assert float(share[0]) == pytest.approx(1 - 0.5**5, rel=0.2)
        assert float(numbers["curvature_theta"]) == pytest.approx(6 * info["c"], rel=0.6)


# Networks


class Noisy:
    """Two clouds in the plane; a fifth of the labels of the first half is wrong, and the second half is clean."""

    def __init__(self, n=100):
        generator = torch.Generator().manual_seed(0)
        self.truth = torch.arange(2 * n) % 2
        self.inputs = torch.randn(2 * n, 2, generator=generator) + 2.0 * (2 * self.truth[:, None] - 1)
        self.wrong = torch.arange(n) % 5 == 0
        self.labels = torch.where(self.wrong, 1 - self.truth[:n], self.truth[:n])
        self.n = n

    def batches(self, count, size=16):
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(self.n, (2, size), generator=generator) for _ in range(count)]

    @property
    def problem(self):
        def upper(x, y, batch):
            return cross_entropy(y(self.inputs[self.n + batch[0]]), self.truth[self.n + batch[0]])

        def lower(x, y, batch):
            losses = cross_entropy(y(self.inputs[batch[1]]), self.labels[batch[1]], reduction="none")
            return (x[batch[1]].sigmoid() * losses).mean()

        return meha.Problem(upper, lower)


def network(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), *extra, nn.ReLU(), nn.Linear(16, 2))


def test_batch_norm_and_batches():
    data, model = Noisy(), network(nn.BatchNorm1d(16))
    run = meha.StochasticMEHA().start(data.problem, torch.zeros(data.n), model)
    run_all(run, data.batches(300))
    x = run.x
    assert float(x[data.wrong].mean()) < float(x[~data.wrong].mean()) - 0.5
    statistics = [part.running_mean for part in (model[1], run.state.theta.value[1])]
    assert not torch.equal(*statistics)
    model.eval()
    with torch.no_grad():
        assert float((model(data.inputs).argmax(dim=1) == data.truth).float().mean()) > 0.95


def test_frozen_parameters_stay():
    data, model = Noisy(), network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    run = meha.StochasticMEHA().start(data.problem, torch.zeros(data.n), model)
    bias = model[0].bias.clone()
    run_all(run, data.batches(5))
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[0].bias, bias)


def test_gradients_of_the_user_stay():
    data, model = Noisy(), network()
    model[0].bias.grad = torch.ones(16)
    run_all(meha.StochasticMEHA().start(data.problem, torch.zeros(data.n), model), data.batches(2))
    assert torch.equal(model[0].bias.grad, torch.ones(16))
    assert model[0].weight.grad is None


@pytest.mark.parametrize("method", [meha.StochasticMEHA(), FRESH, meha.StochasticMEHA(inner_steps=3)])
def test_a_checkpoint_goes_on_bit_for_bit(method):
    data = Noisy()
    batches = data.batches(12)

    def begin():
        return method.start(data.problem, torch.zeros(data.n), network(nn.BatchNorm1d(16)))

    whole = begin()
    run_all(whole, batches[:6])
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    saved = whole.state_dict()
    run_all(whole, batches[6:])
    file.seek(0)
    for state in (torch.load(file, weights_only=True), saved):  # what state_dict returned is a copy
        other = begin()
        other.load_state_dict(state)
        run_all(other, batches[6:])
        assert torch.equal(whole.x, other.x)
        assert all(torch.equal(a, b) for a, b in zip(whole.y.state_dict().values(), other.y.state_dict().values(), strict=True))
        assert whole.counts == other.counts


def test_micro_batches_are_one_batch():
    data = Noisy()
    (batch,) = data.batches(1)
    once, twice = (meha.StochasticMEHA().start(data.problem, torch.zeros(data.n), network()) for _ in range(2))
    for _ in range(3):
        once.step(batch)
        twice.step(meha.MicroBatches([batch[:, :8], batch[:, 8:]]))
    assert torch.allclose(once.x, twice.x, atol=1e-4)


def test_micro_batches_are_one_batch_for_an_x_that_all_examples_share():
    generator = torch.Generator().manual_seed(0)
    rows, targets = torch.randn(12, 3, generator=generator).double(), torch.randn(12, generator=generator).double()
    problem = meha.Problem(
        lambda x, y, batch: (rows[batch] @ y - 1).square().mean(),
        lambda x, y, batch: (torch.sigmoid(rows[batch] @ x) * (rows[batch] @ y - targets[batch]).square()).mean(),
    )
    once, twice = (meha.StochasticMEHA().start(problem, torch.ones(3).double(), torch.ones(3).double()) for _ in range(2))
    first = twice.step(meha.MicroBatches([range(6), range(6, 12)]))
    assert once.step(range(12))["d_x"] == first["d_x"] == 0  # y and theta begin together: there is nothing to learn yet
    for _ in range(10):
        once.step(range(12))
        twice.step(meha.MicroBatches([range(6), range(6, 12)]))
    assert not torch.allclose(once.x, torch.ones(3).double(), atol=1e-3)
    torch.testing.assert_close(once.x, twice.x, rtol=1e-12, atol=1e-12)


def test_solve_takes_it():
    data = Noisy()
    solution = meha.solve(
        data.problem, torch.zeros(data.n), network(), meha.StochasticMEHA(), batches=data.batches(10), max_steps=30
    )
    assert solution.status is meha.Status.FINISHED
    assert "finished after 30 steps" in str(solution)
    assert solution.steps == 30


def numbers_in(line):
    return [float(number) for number in re.findall(r"\d[\d.e+-]*", line)]


def test_the_report_has_the_numbers_of_the_last_step():
    """Those of the documentation for t = 30."""
    run = start(meha.StochasticMEHA(lr=0.02), quadratic(upper=8.0, lower=2.0))
    assert run.method.report(run) == {}
    run.step(noises(3, 1)[0])
    run.state.k = 3000
    c = run.step(noises(3, 1)[0])["c"]
    report = run.method.report(run)
    q = float(run.state.numbers.value["steepness"])
    assert numbers_in(report["problem"]) == pytest.approx([q], rel=0.05)
    assert numbers_in(report["course"]) == pytest.approx([c, 0.01 / 31, 0.02 / 31], rel=0.05)


def test_the_report_of_variables_that_begin_anew():
    """f = 3 |y - x|^2 has the curvature 6, and F that of 2."""
    problem = meha.Problem(lambda x, y: y.square().sum() + x.square().sum(), lambda x, y: 3 * (y - x).square().sum())
    solution = meha.solve(problem, torch.ones(3).double(), torch.ones(3).double(), FRESH, max_steps=40)
    c = solution.history["c"][-1]
    found = numbers_in(solution.report["course"])
    assert found == pytest.approx([c, 0.01 / 1.039, 0.5 / (2 + 6 * c), 0.5 / (6 * c)], rel=0.3)
    assert solution.report["course"] in " ".join(solution.details.split())


def test_a_batch_with_nan_ends_in_a_status():
    batches = [*noises(3, 3), torch.full((2, 3), torch.nan, dtype=torch.float64)]
    solution = meha.solve(
        quadratic(), torch.zeros(3).double(), torch.zeros(3).double(), meha.StochasticMEHA(), batches=batches, max_steps=10
    )
    assert solution.status == meha.Status.NON_FINITE
    assert bool(torch.isfinite(solution.x).all())
    nothing = meha.solve(quadratic(), solution.x, solution.y, meha.StochasticMEHA(), batches=batches[-1:], max_steps=1)
    assert nothing.report == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"inner_steps": 0}, "inner_steps"),
        ({"momentum": None}, "momentum: must be a number from 0 to less than 1"),
    ],
)
def test_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        meha.StochasticMEHA(**options)


# Tasks


@pytest.mark.slow
def test_few_shot_with_defaults():
    task = few_shot("digits", ways=5, tasks=4, width=8, test_tasks=100)
    run = FRESH.start(task.problem, *task.start())
    before = task.evaluate(run.x)["accuracy"]
    for batch, _ in zip(task.batches(), range(40), strict=False):
        run.step(batch)
    assert task.evaluate(run.x)["accuracy"] > before + 0.05
