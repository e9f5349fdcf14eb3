"""check(): what it must find, what it must not, and that it leaves everything as it was."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from smooth import Smooth
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss, softplus

import meha
from meha import Problem
from meha.problem.nonsmooth import L1, GroupL2, NonNegativeL1
from meha.problem.sets import Box, NonNegative, Simplex

DTYPES = [torch.float64, torch.float32]


def ones(*shape, dtype=torch.float64):
    return torch.ones(*shape, dtype=dtype)


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


def upper(x, y):
    return (x - 1).square().sum() + y.square().sum()


def lower(x, y):
    return (y - x).square().sum()


def warns(report, word):
    """Whether exactly one warning has this word."""
    return sum(word in warning for warning in report.warnings) == 1


class Scaled(torch.autograd.Function):
    """y -> sum of y^2 with a gradient whose first component is wrong by a factor."""

    @staticmethod
    def forward(context, y, factor):
        context.save_for_backward(y)
        context.factor = factor
        return y.square().sum()

    @staticmethod
    def backward(context, grad):
        (y,) = context.saved_tensors
        wrong = 2 * grad * y
        wrong[0] *= context.factor
        return wrong, None


PROBLEMS = {
    "strong convex": meha.problems.strong_convex,
    "merely convex": meha.problems.merely_convex,
    "sine, n = 1": lambda dtype: meha.problems.sine(1, dtype=dtype),
    "sine, n = 10": lambda dtype: meha.problems.sine(10, dtype=dtype),
    "sine, n = 1000": lambda dtype: meha.problems.sine(1000, dtype=dtype),
    "lasso, n = 2": lambda dtype: meha.problems.lasso(2, dtype=dtype),
    "lasso, n = 100": lambda dtype: meha.problems.lasso(100, dtype=dtype),
    "group lasso": lambda dtype: meha.problems.group_lasso(60, 6, dtype=dtype),
    "group lasso, orthogonal": lambda dtype: meha.problems.group_lasso(60, 6, design="orthogonal", dtype=dtype),
    "group lasso, m = 600": lambda dtype: meha.problems.group_lasso(600, dtype=dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_false_alarms(name, dtype):
    problem = PROBLEMS[name](dtype=dtype)
    report = meha.check(problem, problem.x0, problem.y0)
    assert report.ok
    assert bool(report)
    assert report.warnings == []
    assert report.kinks == {}
    assert report.repeatable is True
    assert max(report.deviations.values()) < 1e-3
    assert report.counts.upper < 60
    assert report.counts.lower < (360 if report.convexity == "non-convex" else 180)  # the lower level is solved
    assert report.method == "Default"
    assert any(topic == "precision" for topic, _ in report.findings) is (dtype is torch.float32)
    curvature = 11.6 if name == "group lasso, m = 600" else None if "lasso" in name else 1.0
    if curvature:
        assert report.curvature[1] == pytest.approx(curvature, rel=0.02)
    expected = {"strong": "strongly convex", "merely": "convex with flat directions", "sine": "non-convex"}
    assert report.convexity == expected.get(re.split("[ ,]", name)[0], report.convexity)
    for pair, used in report.depends.items():
        absent = "lasso" in name and pair in ("F on x", "f on x")
        assert used is not absent, pair


def test_numbers_against_a_second_implementation():
    """Values, sizes and curvature of a problem with its derivatives in numpy."""
    smooth = Smooth(3, bend=0.0)
    report = meha.check(smooth.problem(), smooth.t["x0"], smooth.t["y0"])
    assert report.ok
    point = smooth.x0, smooth.y0
    assert (report.upper, report.lower) == pytest.approx((smooth.F(*point), smooth.f(*point)))
    for name in ("F_x", "F_y", "f_x", "f_y"):
        assert report.sizes[name] == pytest.approx(np.linalg.norm(getattr(smooth, name)(*point)))
    assert report.sizes["y"] == pytest.approx(np.sqrt(np.mean(smooth.y0**2)))
    eigenvalues = np.linalg.eigvalsh(smooth.f_yy(*point))
    assert report.curvature == pytest.approx((eigenvalues[0], eigenvalues[-1]), rel=1e-5)


def test_counts_are_those_of_the_calls():
    calls = {"upper": 0, "lower": 0}

    def counted(level, objective):
        def call(x, y):
            calls[level] += torch.is_grad_enabled()
            return objective(x, y)

        return call

    report = meha.check(Problem(counted("upper", upper), counted("lower", lower)), ones(3), zeros(3))
    assert (report.counts.upper, report.counts.lower) == (calls["upper"], calls["lower"])
    assert min(report.seconds) > 0


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1.01), (torch.float64, -1.0), (torch.float32, 1.5)])
def test_a_wrong_backward_is_found(level, dtype, factor):
    def with_mistake(function):
        return lambda x, y: function(x, y) + Scaled.apply(y, factor)

    parts = {"upper": upper, "lower": lower}
    x0, y0 = ones(4, dtype=dtype), ones(4, dtype=dtype)
    report = meha.check(Problem(**(parts | {level: with_mistake(parts[level])})), x0, y0)
    key = "F in y" if level == "upper" else "f in y"
    assert warns(report, f"{level}: its gradient in y deviates")
    assert len(report.warnings) == 1
    assert report.deviations.pop(key) > 1e-4
    assert max(report.deviations.values()) < 1e-4
    right = Problem(**(parts | {level: lambda x, y: parts[level](x, y) + Scaled.apply(y, 1.0)}))
    assert meha.check(right, x0, y0).ok


def test_detached_dependence_is_found():
    report = meha.check(Problem(upper, lambda x, y: (y - x.detach()).square().sum()), ones(2), zeros(2))
    assert warns(report, "lower: its value changes with x, but autograd does not see it")
    assert report.depends["f on x"]
    assert len(report.warnings) == 1
    assert repr(report).startswith("Report(1 warning, ")


def test_a_detached_part_is_found_and_named():
    problem = Problem(
        upper=lambda x, y: upper(x["a"], y["w"]) + x["b"].square().sum(),
        lower=lambda x, y: lower(x["a"], y["w"]) + (x["b"].detach().exp() * y["w"].square()).sum(),
    )
    x0 = {"a": ones(2), "b": ones(2)}
    report = meha.check(problem, x0, {"w": zeros(2), "idle": ones(1)})
    assert warns(report, "lower: its gradient in x['b'] deviates")
    assert report.unused == ["y['idle']"]
    assert warns(report, "y['idle']: no gradient")
    assert len(report.warnings) == 2


def test_a_wrong_weight_of_the_nonsmooth_term_is_found():
    def problem(weight):
        return Problem(upper, lower, nonsmooth=L1(weight))

    assert meha.check(problem(lambda x: x.exp()), ones(3), ones(3)).ok
    report = meha.check(problem(lambda x: x.detach().exp()), ones(3), ones(3))
    assert warns(report, "lower: its gradient in x deviates")


KINKS = {
    "abs at 0": ("f in y", lambda x, y: y.abs().sum(), 0.0),
    "abs beside 0": ("f in y", lambda x, y: y.abs().sum(), 1.0),
    "norm, started elsewhere": ("f in y", lambda x, y: y.norm(), 1.0),
    "abs elsewhere": ("f in y", lambda x, y: (y - 0.3).abs().sum(), 0.0),
    "beside a quartic": ("f in y", lambda x, y: y.pow(4).sum() + y.abs().sum(), 0.0),
    "max": ("f in y", lambda x, y: y.max(), 0.0),
    "relu": ("f in y", lambda x, y: (3 * y - x).relu().sum(), 0.0),
    "no derivative at 0": ("f in y", lambda x, y: y.square().sqrt().sum(), 0.0),
    "x": ("f in x", lambda x, y: (x.abs() * y).sum(), 0.0),
    "F": ("F in y", lambda x, y: y.abs().sum(), 0.0),
    "F in x": ("F in x", lambda x, y: (x - 1).abs().sum(), 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_found(name, dtype):
    key, term, start = KINKS[name]
    parts = {"upper": upper, "lower": lower}
    level = "upper" if key[0] == "F" else "lower"
    problem = Problem(**(parts | {level: lambda x, y: parts[level](x, y) + term(x, y)}))
    report = meha.check(problem, ones(3, dtype=dtype), start + zeros(3, dtype=dtype))
    assert key in report.kinks
    assert warns(report, f"{level}: has a kink as a function of {key[-1]}")
    assert warns(report, "meha.nonsmooth.L1") is (key == "f in y")
    assert not any("deviates" in warning for warning in report.warnings)  # right, where there is a derivative
    assert report.convexity == "strongly convex"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "term",
    [
        lambda x, y: huber_loss(y, torch.zeros_like(y), reduction="sum"),
        lambda x, y: softplus(10 * y).sum(),
        lambda x, y: (y.square() + 1e-2).sqrt().sum(),
        lambda x, y: y.pow(4).sum() + (x * y).exp().sum(),
        lambda x, y: 10 * y.sin().sum() + y.relu().square().sum(),
    ],
)
def test_smooth_bends_are_no_kinks(term, dtype):
    report = meha.check(Problem(upper, lambda x, y: lower(x, y) + term(x, y)), ones(3, dtype=dtype), zeros(3, dtype=dtype))
    assert report.warnings == []


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_units_do_not_matter(scale):
    """With x, y, F and f in other units, curvatures scale, and nothing else changes."""
    problem = meha.problems.sine(10)
    other = Problem(
        lambda x, y: problem.upper(x / scale, y / scale) * scale, lambda x, y: problem.lower(x / scale, y / scale) / scale
    )
    y0 = ones(10)
    first, second = meha.check(problem, problem.x0, y0), meha.check(other, scale * problem.x0, scale * y0)
    assert second.ok
    assert second.convexity == first.convexity == "non-convex"
    assert np.array(second.curvature) * scale**3 == pytest.approx(np.array(first.curvature), rel=0.05)


def test_linear_lower_level():
    report = meha.check(Problem(upper, lambda x, y: (x * y).sum()), ones(3), zeros(3))
    assert report.convexity == "linear"
    assert warns(report, "lower: looks linear in y")
    assert meha.check(Problem(upper, lambda x, y: (x * y).sum(), y_set=Box(-1.0, 1.0)), ones(3), zeros(3)).ok


def test_domains_are_respected():
    """Functions that exist on a half-space only, with and without a set that says so."""
    barrier = Problem(upper, lambda x, y: lower(x, y) - y.log().sum() + x.log().sum())
    assert meha.check(barrier, ones(3), ones(3)).ok

    def strict(x, y):
        if bool((x < 0).any()) or bool((y < 0).any()):
            raise ValueError("outside")
        return lower(x, y)

    held = Problem(upper, strict, x_set=NonNegative(), y_set=Simplex())
    report = meha.check(held, zeros(3), ones(3) / 3)
    assert report.ok
    assert report.curvature == pytest.approx((2, 2))


MESSAGES = {
    "NaN": (lambda x, y: upper(x, y) + (x - 2).log().sum(), lower, ["upper: is nan at the start"]),
    "infinity": (upper, lambda x, y: lower(x, y) + 1 / y.square().sum(), ["lower: is inf at the start"]),
    "error": (lambda x, y: {}["w"], lower, ["upper: raised KeyError at the start ('w')"]),
    "both": (lambda x, y: x, lambda x, y: 3.0, ["upper: must return a scalar", "lower: must return a scalar"]),
    "gradient": (
        upper,
        lambda x, y: lower(x, y) + y.sum() * (x - 1).square().sum().sqrt(),
        ["its gradient in x is not finite"],
    ),
    "F without y": (lambda x, y: x.square().sum(), lower, ["upper: does not depend on y"]),
    "f without x": (upper, lambda x, y: (y - 1).square().sum(), ["lower: does not depend on x"]),
    "no x": (lambda x, y: y.square().sum(), lambda x, y: (y - 1).square().sum(), ["x: neither upper nor lower"]),
    "f without y": (upper, lambda x, y: x.square().sum(), ["lower: does not depend on y"]),
    "uneven": (lambda x, y: upper(x * torch.tensor([1.0, 1e3, 1e-3]), y), lower, ["upper: its gradients in the coordinates"]),
    "huge": (upper, lambda x, y: 1e10 * lower(x, y), ["huge at the start"]),
    "digits": (lambda x, y: upper(x, y).float(), lower, ["upper: returns torch.float32"]),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_wrong_is_said(name):
    F, f, expected = MESSAGES[name]
    report = meha.check(Problem(F, f), ones(3), zeros(3))
    assert not report.ok
    assert all(warns(report, part) for part in expected)
    assert len(report.warnings) == len(expected)


def test_backward_that_raises():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, y):
            return y.sum()

        @staticmethod
        def backward(context, grad):
            raise RuntimeError("no backward here")

    report = meha.check(Problem(upper, lambda x, y: lower(x, y) + Broken.apply(y)), ones(3), zeros(3))
    assert warns(report, "lower: raised RuntimeError at the start (no backward here)")


def test_start_outside_of_the_sets():
    problem = Problem(upper, lower, x_set=Box(0.0, 0.5), y_set=Simplex())
    report = meha.check(problem, ones(3), ones(3))
    assert warns(report, "x0 is not in X = Box")
    assert warns(report, "y0 is not in Y = Simplex")
    inside = meha.check(problem, ones(3) / 2, ones(3) / 3)
    assert inside.ok
    assert (report.upper, report.lower) == pytest.approx((inside.upper, inside.lower))
    weighted = Problem(upper, lower, nonsmooth=L1(lambda x: x), x_set=NonNegative())
    (only,) = meha.check(weighted, -ones(3), ones(3)).warnings
    assert only.startswith("x0 is not in X = NonNegative(), and only the default begins at the nearest point")


def test_terms_that_do_not_fit_or_leave_their_domain():
    def look(term, x0, y0):
        return meha.check(Problem(upper, lower, nonsmooth=term), x0, y0)

    assert warns(look(GroupL2([2, 2], weight=0.1), ones(3), ones(3)), "the start does not fit the problem")
    assert warns(look(L1(lambda x: x), -ones(3), ones(3)), "a weight is negative (-1)")
    assert warns(look(L1(lambda x: x), ones(3) / 10, ones(3)), "has no value at some points of X")
    assert warns(look(NonNegativeL1(0.1), ones(3), -ones(3)), "nonsmooth: is not finite at the start")
    assert look(NonNegativeL1(lambda x: x.square()), ones(3), ones(3)).ok


def test_random_objectives():
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    noisy = Problem(upper, lambda x, y: lower(x + 0.1 * torch.randn_like(x) + random.random() + np.random.rand(), y))
    report = meha.check(noisy, ones(3), zeros(3))
    assert report.repeatable is False
    assert warns(report, "pass what is drawn as a batch, solve(..., batches=...)")
    assert len(report.warnings) == 1
    assert report.convexity == "strongly convex"  # seen with the random numbers held
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])


def test_objectives_that_change_whatever_the_seed():
    calls = []

    def counting(x, y):
        calls.append(1)
        return lower(x, y) * len(calls)

    report = meha.check(Problem(upper, counting), ones(3), zeros(3))
    assert report.repeatable is False
    assert "even with the same seed" in str(report)
    assert report.deviations == {}


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        return net, torch.zeros(40), (torch.randn(40, 4), torch.randint(3, (40,)))


def losses(x, y, batch):
    return cross_entropy(y(batch[0]), batch[1], reduction="none")


CLEANING = Problem(lambda x, y, b: losses(x, y, b).mean(), lambda x, y, b: (x.sigmoid() * losses(x, y, b)).mean())


@pytest.mark.parametrize("training", [True, False])
def test_modules_stay_as_they_are(training):
    net, x0, batch = network()
    net.train(training)
    net[4].bias.requires_grad_(False)
    net[0].weight.grad = torch.full_like(net[0].weight, 3.0)
    state, random_state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    report = meha.check(CLEANING, x0, net, batch)
    assert report.warnings == []
    assert report.repeatable is not training  # dropout
    assert ("running statistics" in str(report)) is training
    assert report.method == "NetworkSOBA"
    assert report.depends["F on x"] is False
    assert report.counts.upper + report.counts.lower < 40
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(module.training is training for module in net.modules())
    assert bool((net[0].weight.grad == 3).all())
    assert net[4].bias.requires_grad is False
    assert torch.equal(x0, torch.zeros(40))
    assert torch.equal(random_state, torch.random.get_rng_state())


def test_a_module_beside_the_argument_is_found():
    net, x0, batch = network()
    closure = Problem(lambda x, y, b: losses(x, net, b).mean(), lambda x, y, b: (x.sigmoid() * losses(x, y, b)).mean())
    assert warns(meha.check(closure, x0, net.eval(), batch), "upper: does not depend on y")


def test_batches():
    net, x0, _ = network()
    assert meha.check(CLEANING, x0, net).warnings == ["batch: the objectives need one; pass batch=next(iter(loader))."]
    assert warns(meha.check(Problem(upper, lower), ones(3), zeros(3), 5), "upper: raised TypeError")
    scaled = Problem(lambda x, y, b: b * upper(x, y), lambda x, y, b: b * lower(x, y))
    report = meha.check(scaled, ones(3), zeros(3), 3.0)
    assert report.ok
    assert report.method == "AdaptiveSOBA"
    assert ("method", "solve(problem, x0, y0) uses meha.stochastic.AdaptiveSOBA, which is made for tensors with batches.") in (
        report.findings
    )
    assert report.curvature == pytest.approx((6, 6))
    parts = meha.check(scaled, ones(3), zeros(3), meha.MicroBatches([1.0, 5.0]))
    assert parts.curvature == pytest.approx((6, 6))


def test_structures_and_modes():
    x0, y0 = {"a": ones(2), "b": [ones(1)]}, (zeros(2), zeros(()))
    problem = Problem(
        lambda x, y: upper(x["a"], y[0]) + (y[1] - x["b"][0]).square().sum(),
        lambda x, y: lower(x["a"], y[0]) + (y[1] - 2).square() + (x["b"][0] * y[1]).sum(),
    )
    with torch.inference_mode():
        assert meha.check(problem, x0, y0).ok
    assert torch.equal(y0[0], zeros(2))
    net = nn.Linear(2, 2)
    assert warns(meha.check(problem, net, net), "x and y share parameters")


def test_wrong_arguments_raise():
    with pytest.raises(TypeError, match=r"problem: expected a meha\.Problem"):
        meha.check(upper, ones(3), zeros(3))
    with pytest.raises(TypeError, match="x: got float"):
        meha.check(Problem(upper, lower), 1.0, zeros(3))
    with pytest.raises(TypeError, match=r"y: dtype torch\.int64"):
        meha.check(Problem(upper, lower), ones(3), torch.zeros(3, dtype=torch.int64))


def test_print_is_tidy():
    problem = Problem(upper, lambda x, y: lower(x, y) + y.abs().sum() + (y * x.detach()).sum())
    for report in (meha.check(problem, ones(3), zeros(3)), meha.check(meha.problems.lasso(4), zeros(4), zeros(4))):
        lines = str(report).splitlines()
        assert 10 <= len(lines) <= 25
        assert max(map(len, lines)) <= 116
        topics = [topic for topic, _ in report.findings]
        assert len(topics) == len(set(topics))
        assert all(any(line.startswith(f"  {topic} ") for line in lines) for topic in topics)
        assert sum(line.startswith("  ! ") for line in lines) == len(report.warnings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    problem = meha.problems.sine(10, device="cuda")
    report = meha.check(problem, problem.x0, problem.y0)
    assert report.ok
    assert report.convexity == "non-convex"
    assert "cuda" in str(report)
    assert warns(meha.check(problem, problem.x0.cpu(), problem.y0), "move both to one device")
    net, x0, batch = network()
    net, x0, batch = net.cuda(), x0.cuda(), tuple(part.cuda() for part in batch)
    state, random_state = copy.deepcopy(net.state_dict()), torch.cuda.get_rng_state()
    report = meha.check(CLEANING, x0, net, batch)
    assert report.warnings == []
    assert report.repeatable is False
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert torch.equal(random_state, torch.cuda.get_rng_state())
    noisy = Problem(upper, lambda x, y: lower(x + 0.1 * torch.randn_like(x), y))
    assert meha.check(noisy, x0[:3], x0[:3]).repeatable is False
