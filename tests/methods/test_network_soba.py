"""NetworkSOBA: the step against a second implementation, memory, checkpoints, rare weights, sets, dropout and precision."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from meha_lab.benchmarks.solve_memory import network as wide
from meha_lab.benchmarks.solve_memory import size
from meha_lab.reproduce.memory import peak
from torch import nn
from torch.nn.functional import cross_entropy

import meha
from meha.methods.stochastic import NetworkSOBA
from meha.problem.oracle import Counts
from meha.problem.sets import Box, Simplex


def curved(x_set=None, y_set=None):
    """f is not quadratic, so that the length of the difference counts; F depends on x."""
    return meha.Problem(
        upper=lambda x, y, noise: (y - noise[0]).square().sum() + (x - 1).square().sum(),
        lower=lambda x, y, noise: (x * y + y.pow(4) + noise[1] * y).sum(),
        x_set=x_set,
        y_set=y_set,
    )


def noises(n, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(steps, 2, n, generator=generator, dtype=torch.float64))


def start(method, problem=None, last=None, width=1.0):
    x0, y0 = torch.full((3,), 0.3, dtype=torch.float64), torch.linspace(-width, width, 3, dtype=torch.float64)
    run = method.start(problem or curved(), x0, y0)
    run.last = last
    return run


def falling(k, steps, least):
    return 2 / max(steps, least) * max(1 - (k + 0.5) / steps, 0.5 / steps)


def transcribed(batches, last, way, x_way, refit=0.3, both_sides=False):
    """The documented formulas in numpy."""
    n = batches[0].shape[1]
    x, y, v = np.full(n, 0.3), np.linspace(-1, 1, n), np.zeros(n)
    square, size, norms, gain, curvature = np.zeros(n), 0.0, np.zeros(2), 0.0, 0.0

    def f(x, y, noise):
        return (x * y + y**4 + noise * y).sum()

    for k, (first, second) in enumerate(batches):
        F_y, f_y = 2 * (y - first), x + 4 * y**3 + second
        moving = last if last is None else math.ceil((1 - refit) * last)
        if last is not None and k >= moving:
            direction = f_y + norms[1] / norms[0] * F_y
            square += 0.03 * (direction**2 - square)
            y = y - way * falling(k - moving, last - moving, 500 * refit) * direction / np.sqrt(square)
            continue
        r = 1 / (1000 + k) if last is None else falling(k, moving, 500 * (1 - refit))
        weight, pull = 1 / (k + 1), max(1 / (k + 1), 0.03)
        d_x = 2 * (x - 1)
        if k:
            length = np.linalg.norm(y) + way / 1000 * np.sqrt(n)
            most = length / np.linalg.norm(v)
            s = max(gain, 0) / curvature if curvature * most > max(gain, 0) else most
            e = np.clip(s, np.finfo(float).eps ** (1 / 3) * most, 0.1 * most)
            e = -e if both_sides and bin(k).count("1") % 2 else e
            gain += max(1 / k, 0.03) * (-F_y @ v - gain)
            bent = f(x, y + e * v, second) - f(x, y, second) - e * f_y @ v
            curvature += max(1 / k, 0.03) * (2 * bent / e**2 - curvature)
            s = max(gain, 0) / curvature if curvature * most > max(gain, 0) else most
            d_x = d_x + s / e * ((y + e * v) - y)  # f_x is y
        norms += weight * (np.array([np.linalg.norm(F_y), np.linalg.norm(f_y)]) - norms)
        square += weight * ((f_y**2 + (F_y * norms[1] / norms[0]) ** 2) / 2 - square)
        v = v + pull * (-F_y / np.sqrt(square) - v)
        y = y - way * r * f_y / np.sqrt(square)
        size = max(size + (np.abs(d_x).mean() - size) * weight, np.abs(d_x).mean() / 10)
        x = x - x_way * r * d_x / size
    return x, y, v


@pytest.mark.parametrize(
    ("last", "both_levels", "both_sides"),
    [(None, True, None), (60, True, None), (100, False, None), (2000, True, None), (2000, True, True)],
)
def test_the_step_is_that_of_the_documentation(last, both_levels, both_sides):
    """100 steps: means have a weight of their own after 33; a run may also go on beyond its last step."""
    batches = noises(3, 100)
    run = start(NetworkSOBA(way=3.0, x_way=2.0, both_levels=both_levels, both_sides=both_sides), last=last)
    for batch in batches:
        run.step(batch)
    x, y, v = transcribed([batch.numpy() for batch in batches], last, 3.0, 2.0, 0.3 if both_levels else 0.0, both_sides)
    assert np.allclose(run.x, x, rtol=1e-8)
    assert np.allclose(run.y, y, rtol=1e-8)
    assert np.allclose(run.state.response.leaves[0], v, rtol=1e-8)
    rests = 58 if last == 60 else 0
    assert run.counts == Counts(upper=100, lower=200 - rests)


def test_the_response_minimises_the_linear_part_of_upper_plus_lower_along_its_direction():
    """With one coordinate the direction is the only one, so s v is -F_y / f_yy, in any units of F, f and y."""
    for a, b in ((1.0, 1.0), (1e3, 1.0), (1.0, 1e3), (1e-2, 1e2)):
        problem = meha.Problem(
            lambda x, y, sign, a=a: a * (y - 30).square().sum() + 0 * x.sum(),
            lambda x, y, sign, b=b: b * (y - 20 - x - sign).square().sum(),
        )
        run = NetworkSOBA().start(problem, torch.zeros(1).double(), torch.full((1,), 20.0).double())
        for k in range(40):
            run.step((-1) ** k)
        v, numbers = run.state.response.leaves[0], run.state.numbers.value
        assert float(numbers["gain"] / numbers["curvature"] * v) == pytest.approx(10 * a / b, rel=0.1)


def test_the_way_of_a_run_is_that_of_its_rates():
    """x and y, whose gradients are constant, go their way in 700 steps and in 350; a short run goes a part."""
    problem = meha.Problem(lambda x, y: 3.0 * y.sum() + x.sum(), lambda x, y: 2.0 * y.sum() + 0.0 * x.sum())
    for last, share in ((1000, 1.0), (500, 1.0), (100, 0.2)):
        run = NetworkSOBA().start(problem, torch.zeros(2), torch.zeros(2))
        run.last = last
        while run.k < 7 * last // 10:
            run.step()
        assert float(run.y.mean()) == pytest.approx(-0.5 * share, rel=1e-3)
        assert float(run.x.mean()) == pytest.approx(-5 * share, rel=1e-2)


@pytest.mark.parametrize(("both_sides", "least", "most"), [(False, 0.4, 1.0), (True, 0.0, 0.05), (None, 0.0, 0.05)])
def test_a_share_that_does_nothing_for_the_upper_level_does_not_win(both_sides, least, most):
    """F cannot be reached, so that v stays long; along it, the terms of two shares are curved and that of the third is flat."""
    one, wish = torch.tensor([1.0] * 10 + [0.0] * 10), torch.tensor([0.2] * 10 + [3.0] * 10)

    def lower(x, y, noise):
        terms = [(y[:20] - one).square().sum(), (y[:20] + one).square().sum(), (y[20:] - 1).square().sum()]
        return x @ torch.stack(terms)

    problem = meha.Problem(lambda x, y, noise: (y[:20] - wish - noise).square().sum(), lower, x_set=Simplex())
    run = NetworkSOBA(way=5.0, both_sides=both_sides).start(problem, torch.full((3,), 1 / 3), torch.zeros(30))
    run.last = 600
    for noise in 0.5 * torch.randn(600, 20, generator=torch.Generator().manual_seed(0)):
        run.step(noise)
    assert least <= float(run.x[2]) <= most


def test_x_rests_at_the_end_and_y_learns_from_both_levels():
    target = torch.tensor([3.0, 0.0])
    problem = meha.Problem(
        lambda x, y, noise: (y - target).square().sum(), lambda x, y, noise: (y[0] - x.sum() - noise[0]).square()
    )
    ends = []
    for both_levels in (True, False):
        run = NetworkSOBA(way=5.0, x_way=0.1, both_levels=both_levels).start(problem, torch.zeros(2), torch.ones(2))
        run.last = 1000
        for batch in noises(1, 1000):
            run.step(0.01 * batch[0].float())
            if run.k == 700:
                x = run.x.clone()
        assert torch.equal(run.x, x) is both_levels
        ends.append(float(run.y[1]))
    assert abs(ends[0]) < 0.01  # F alone knows of this coordinate
    assert ends[1] == 1.0


def test_matrices_of_many_columns_move_less():
    problem = meha.Problem(
        lambda x, y: (y[0].sum() + y[1].sum() - 1).square(),
        lambda x, y: (y[0] - x.sum()).square().sum() + (y[1] - x.sum()).square().sum(),
    )
    y0 = [torch.ones(2, 256), torch.ones(2, 16)]
    moved = []
    for shape in ((12,), (3, 4)):
        run = NetworkSOBA().start(problem, torch.ones(shape), y0)
        for _ in range(5):
            run.step()
        steps = [(before - after).abs().mean() for before, after in zip(y0, run.y, strict=True)]
        assert float(steps[1] / steps[0]) == pytest.approx(2.0, rel=0.1)
        moved.append(float((run.x - 1).abs().mean()))
    assert moved[0] / moved[1] == pytest.approx(2.0, rel=0.1)


def test_rarely_drawn_weights_move_as_far_as_others_in_a_pass():
    """Weights of examples of which a batch has all, or one in 20, after the same number of steps."""
    n, passes = 400, 3
    problem = meha.Problem(
        lambda x, y, drawn: (y - 1).square().sum(), lambda x, y, drawn: (x[drawn].mean() * y).sum() + 0.1 * y.square().sum()
    )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).split(n // 20)
    moves = []
    for batches in ([torch.arange(n)] * 20, order):
        run = NetworkSOBA().start(problem, torch.ones(n), torch.zeros(3))
        for _ in range(passes):
            before = run.x.clone()
            for batch in batches:
                run.step(batch)
        moves.append((run.x - before).abs())
    often, rarely = moves
    assert float(often.min()) > 0
    assert float(rarely.mean() / often.mean()) == pytest.approx(1.0, rel=0.05)
    assert float(rarely.min() / often.mean()) > 0.8


class Noisy:
    """A small classifier with a weight for each example, dropout and batch norm."""

    n = 40

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(self.n, 6, generator=generator)
        self.labels = torch.randint(3, (self.n,), generator=generator)
        self.problem = meha.Problem(self.upper, self.lower)

    def upper(self, x, y, batch):
        return cross_entropy(y(self.inputs[batch[0]]), self.labels[batch[0]])

    def lower(self, x, y, batch):
        losses = cross_entropy(y(self.inputs[batch[1]]), self.labels[batch[1]], reduction="none")
        return (x[batch[1]].sigmoid() * losses).mean()

    def batches(self, steps):
        return torch.randint(self.n, (steps, 2, 16), generator=torch.Generator().manual_seed(2))

    def start(self, *layers, method=None, dtype=torch.float32):
        torch.manual_seed(0)
        y = nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 3)).to(dtype)
        self.inputs = self.inputs.to(dtype)
        run = (method or NetworkSOBA()).start(self.problem, torch.zeros(self.n, dtype=dtype), y)
        run.last = 20
        return run


def test_a_checkpoint_goes_on_bit_for_bit():
    data = Noisy()
    batches, whole, file = data.batches(12), data.start(nn.BatchNorm1d(16)), io.BytesIO()
    for k, batch in enumerate(batches):
        if k == 6:
            torch.save(whole.state_dict(), file)
        whole.step(batch)
    file.seek(0)
    other = data.start(nn.BatchNorm1d(16))
    other.load_state_dict(torch.load(file, weights_only=True))
    for batch in batches[6:]:
        other.step(batch)
    assert torch.equal(whole.x, other.x)
    assert all(torch.equal(a, b) for a, b in zip(whole.y.state_dict().values(), other.y.state_dict().values(), strict=True))
    assert whole.counts == other.counts


def test_both_terms_of_the_difference_have_the_same_dropout():
    """In the first step both are at y; with other masks they would differ."""
    data = Noisy()
    run = data.start(nn.Dropout(0.5))
    first, second = (run.step(batch) for batch in data.batches(2))
    assert first["gap"] == 0
    assert second["gap"] != 0


def test_micro_batches_are_one_batch():
    data = Noisy()
    once, twice = data.start(), data.start()
    for batch in data.batches(5):
        once.step(batch)
        twice.step(meha.MicroBatches([batch[:, :8], batch[:, 8:]]))
    assert float((once.x - torch.zeros(data.n)).abs().max()) > 0.01
    torch.testing.assert_close(once.x, twice.x, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Means are kept in single precision; the run is near that in single precision."""
    half, whole = Noisy(), Noisy()
    runs = half.start(dtype=dtype), whole.start()
    for batch in half.batches(20):
        for run in runs:
            run.step(batch)
    assert all(leaf.dtype is torch.float32 for leaf in runs[0].state.square.leaves + runs[0].state.response.leaves)
    first, second = (run.x.float() for run in runs)
    assert float(torch.corrcoef(torch.stack([first, second]))[0, 1]) > 0.98


@pytest.mark.parametrize("saved", [False, True])
def test_memory(saved, tmp_path):
    """Eight tensors of the size of y above y, those with which ``solve`` can go back and a checkpoint included."""
    call = wide(40_000)
    options = {"checkpoint": meha.Checkpoint(tmp_path / "run.pt", every=5)} if saved else {}
    assert peak(lambda: meha.solve(**call, **options)) / size(call["y0"]) < 8.1


def test_memory_of_the_new_networks_at_the_end():
    """Two networks with Adam, a gradient, y0 and what is left of the run."""
    call = wide(4_000) | {"max_steps": 200}
    assert peak(lambda: meha.solve(**call)) / size(call["y0"]) < 10.1


def test_sets_of_x():
    run = start(NetworkSOBA(), curved(Box(0.29, 0.31)), width=0.5)
    for batch in noises(3, 60):
        run.step(batch)
        assert 0.29 <= float(run.x.min()) <= float(run.x.max()) <= 0.31
    run = NetworkSOBA(x_way=50.0).start(curved(Simplex()), torch.full((3,), 1 / 3), torch.tensor([-1.0, 0.0, 1.0]))
    for batch in noises(3, 20):
        run.step(batch.float())
        assert float(run.x.sum()) == pytest.approx(1.0)
    assert float((run.x - 1 / 3).abs().max()) > 0.005


def test_what_it_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"y_set: NetworkSOBA"):
        start(NetworkSOBA(), curved(y_set=Box(-1.0, 1.0)))
    with pytest.raises(ValueError, match="way: must be"):
        NetworkSOBA(way=-1.0)
    with pytest.raises(TypeError, match="both_sides: must be True or False"):
        NetworkSOBA(both_sides="no")


def test_optimizers_take_the_steps():
    """Plain steps along f_y and the direction of x, which is F_x in the first step."""
    sgd = partial(torch.optim.SGD, lr=0.01)
    run = start(NetworkSOBA(x_optimizer=sgd, y_optimizer=sgd))
    (batch,) = noises(3, 1)
    y = run.y.clone()
    run.step(batch)
    torch.testing.assert_close(run.x, torch.full((3,), 0.3 + 0.01 * 1.4, dtype=torch.float64))
    torch.testing.assert_close(run.y, y - 0.01 * (0.3 + 4 * y**3 + batch[1]))


def test_solve_tells_it_the_number_of_steps():
    batches, x0, y0 = noises(3, 10), torch.full((3,), 0.3, dtype=torch.float64), torch.linspace(-1, 1, 3, dtype=torch.float64)
    solution = meha.solve(curved(), x0, y0, NetworkSOBA(), batches=batches, max_steps=30)
    runs = [start(NetworkSOBA(), last=last) for last in (30, 60)]
    for batch in batches * 3:
        for run in runs:
            run.step(batch)
    assert torch.equal(solution.x, runs[0].x)
    assert not torch.equal(solution.x, runs[1].x)
    assert solution.report["course"].startswith("x rests; y learns from both levels")
    assert "the number of steps is not known" in NetworkSOBA().report(start_and_step())["course"]


def start_and_step():
    run = start(NetworkSOBA())
    run.step(noises(3, 1)[0])
    return run


def test_networks_with_batches_go_to_it():
    data = Noisy()
    solution = meha.solve(data.problem, torch.zeros(data.n), data.start().y, batches=list(data.batches(8)), max_steps=20)
    assert solution.method.name == "NetworkSOBA"
    assert solution.status == meha.Status.FINISHED
