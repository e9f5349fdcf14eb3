"""Hypergradients against closed forms, recursions written out by hand in numpy, and finite differences."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from smooth import M, Smooth, joined

import meha
from meha.methods import BDA, CG, DARTS, GALET, IAPTT, NS, RHG, At
from meha.problem.oracle import Counts
from meha.problem.schedules import InversePower
from meha.problem.sets import Box, L2Ball, NonNegative, Product, Simplex
from meha.tensors.variables import Variable


def hypergradient(run, batch=None):
    """h of the first step of a run, in numpy; y is then after its lower steps."""
    with torch.no_grad():
        numbers, h = run.method.hypergradient(run.oracle, run.state, At(run.method, run.k, batch))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in h)
    return np.concatenate([leaf.numpy().reshape(-1) for leaf in h]), numbers


def differences(function, at, h=1e-5):
    """Central differences of a scalar function."""
    found = np.zeros(at.size)
    for i in range(at.size):
        e = np.zeros(at.size)
        e[i] = h
        found[i] = (function(at + e) - function(at - e)) / (2 * h)
    return found


def close(found, expected, accuracy):
    return np.linalg.norm(found - expected) < accuracy * np.linalg.norm(expected)


def iterates(p, x, y, steps, beta, mu=lambda t: 0.0, project=lambda y: y):
    """y_0, ..., y_T of y <- project(y - beta (mu_t F_y + (1 - mu_t) f_y)); x may be a function of the step."""
    ys, x_of = [y], x if callable(x) else lambda t: x
    for t in range(steps):
        x_t, y = x_of(t), ys[-1]
        ys.append(project(y - beta * (mu(t) * p.F_y(x_t, y) + (1 - mu(t)) * p.f_y(x_t, y))))
    return ys


@pytest.mark.parametrize("seed", range(4))
def test_the_derivatives_in_numpy_are_right(seed):
    p = Smooth(seed)
    x, y = p.x0, p.y0
    assert float(p.upper(p.t["x0"], p.t["y0"])) == pytest.approx(p.F(x, y))
    assert float(p.lower(p.t["x0"], p.t["y0"])) == pytest.approx(p.f(x, y))
    for value, d_x, d_y, d_xy, d_yy in ((p.F, p.F_x, p.F_y, p.F_xy, p.F_yy), (p.f, p.f_x, p.f_y, p.f_xy, p.f_yy)):
        assert np.allclose(differences(lambda u, v=value: v(u, y), x), d_x(x, y), atol=1e-8)
        assert np.allclose(differences(lambda u, v=value: v(x, u), y), d_y(x, y), atol=1e-8)
        for i in range(M):
            assert np.allclose(differences(lambda u, d=d_y, i=i: d(u, y)[i], x), d_xy(x, y)[:, i], atol=1e-8)
            assert np.allclose(differences(lambda u, d=d_y, i=i: d(x, u)[i], y), d_yy(x, y)[:, i], atol=1e-8)


CLOSED = {
    "RHG": RHG(alpha=1.0, beta=0.5, inner_steps=50),
    "RHG, truncated far back": RHG(alpha=1.0, beta=0.5, inner_steps=60, terms=50),
    "BDA, mu = 0": BDA(alpha=1.0, beta=0.5, inner_steps=50, mu=0.0),
    "CG": CG(alpha=1.0, beta=0.5, inner_steps=50, cg_steps=M),
    "NS": NS(alpha=1.0, beta=0.5, inner_steps=50, terms=50),
    "NS, eta of its own": NS(alpha=1.0, beta=0.5, inner_steps=50, terms=60, eta=0.4),
    "GALET": GALET(alpha=1.0, beta=0.5, inner_steps=50, terms=120, eta=0.2),
}


@pytest.mark.parametrize("seed", range(3))
def test_closed_form_on_quadratics(seed):
    """h = F_x - f_xy f_yy^-1 F_y at y(x) = -f_yy^-1 (f_xy' x + b)."""
    p = Smooth(seed, bend=0.0)
    y = -np.linalg.solve(p.H, p.B.T @ p.x0 + p.b)
    expected = p.F_x(p.x0, y) - p.B @ np.linalg.solve(p.H, p.F_y(p.x0, y))
    assert np.linalg.norm(expected - p.F_x(p.x0, y)) > 0.1 * np.linalg.norm(expected)  # the implicit part matters
    for name, method in CLOSED.items():
        run = p.start(method)
        h, _ = hypergradient(run)
        assert close(h, expected, 1e-6), name
        assert close(run.y.numpy(), y, 1e-6), name
    found = meha.diagnostics.hypergradient(p.problem(), p.t["x0"], p.t["y0"])
    assert close(found.numpy(), expected, 1e-6)


def test_curved_problems_have_the_hypergradient_of_the_diagnostic():
    p = Smooth(0)
    found = meha.diagnostics.hypergradient(p.problem(), p.t["x0"], p.t["y0"]).numpy()
    assert close(found, differences(lambda x: p.F(x, iterates(p, x, p.y0, 80, 0.4)[-1]), p.x0), 1e-7)
    for method in (RHG, BDA, NS, CG):
        options = {NS: dict(terms=60), BDA: dict(mu=0.0)}.get(method, {})
        h, _ = hypergradient(p.start(method(alpha=1.0, beta=0.4, inner_steps=60, **options)))
        assert close(h, found, 1e-6), method


@pytest.mark.parametrize("bend", [0.0, 0.5])
@pytest.mark.parametrize(("steps", "terms"), [(1, None), (3, None), (6, None), (6, 1), (6, 3), (6, 6)])
def test_rhg_with_few_steps(steps, terms, bend):
    """By products of matrices, and by differences of the map in which x is fixed before the last ``terms`` steps."""
    p, beta, kept = Smooth(1, bend), 0.3, terms or steps
    run = p.start(RHG(alpha=1.0, beta=beta, inner_steps=steps, terms=terms))
    h, numbers = hypergradient(run)
    ys = iterates(p, p.x0, p.y0, steps, beta)
    product, expected = np.eye(M), p.F_x(p.x0, ys[-1])
    for t in reversed(range(steps - kept, steps)):
        expected = expected - beta * p.f_xy(p.x0, ys[t]) @ product @ p.F_y(p.x0, ys[-1])
        product = (np.eye(M) - beta * p.f_yy(p.x0, ys[t])) @ product
    assert close(h, expected, 1e-10)
    assert np.allclose(run.y.numpy(), ys[-1], rtol=0, atol=1e-12)
    assert float(numbers["upper"]) == pytest.approx(p.F(p.x0, ys[-1]))

    def truncated(x):
        return p.F(x, iterates(p, lambda t: x if t >= steps - kept else p.x0, p.y0, steps, beta)[-1])

    assert close(h, differences(truncated, p.x0), 1e-7)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("mu", "upper_beta"),
    [(0.3, None), (0.5, 0.7), (InversePower(0.8, power=1.0), None), (lambda t: 0.6 * 0.5**t, 0.2)],
    ids=["constant", "constant, own step", "falling", "falling, own step"],
)
def test_bda_by_hand(mu, upper_beta, seed):
    """q <- q - [mu_t s F_yy + (1 - mu_t) beta f_yy] q, and h in the same way with the cross derivatives of both."""
    p, beta, steps = Smooth(seed), 0.3, 5
    x, s, mu_of = p.x0, upper_beta or beta, mu if callable(mu) else lambda t: mu
    h, _ = hypergradient(p.start(BDA(alpha=1.0, beta=beta, inner_steps=steps, mu=mu, upper_beta=upper_beta)))

    def final(x):
        ys = [p.y0]
        for t in range(steps):
            ys.append(ys[t] - mu_of(t) * s * p.F_y(x, ys[t]) - (1 - mu_of(t)) * beta * p.f_y(x, ys[t]))
        return ys

    ys = final(x)
    expected, q = p.F_x(x, ys[-1]), p.F_y(x, ys[-1])
    for t in reversed(range(steps)):
        a, b = mu_of(t) * s, (1 - mu_of(t)) * beta
        expected = expected - (a * p.F_xy(x, ys[t]) + b * p.f_xy(x, ys[t])) @ q
        q = q - (a * p.F_yy(x, ys[t]) + b * p.f_yy(x, ys[t])) @ q
    assert close(h, expected, 1e-10)
    assert close(h, differences(lambda x: p.F(x, final(x)[-1]), x), 1e-7)


def test_iaptt_goes_back_from_the_worst_iterate():
    """tbar = argmax over t >= 1 of F(x, y_t); gradients in x and in z by differences with tbar held."""
    worst, beta, eta, steps = set(), 0.75, 0.25, 4
    for seed in range(8):
        p = Smooth(seed)
        run = p.start(IAPTT(alpha=1.0, beta=beta, eta=eta, inner_steps=steps))
        h, numbers = hypergradient(run)
        ys = iterates(p, p.x0, p.y0, steps, beta)
        values = [p.F(p.x0, y) for y in ys]
        tbar = 1 + int(np.argmax(values[1:]))
        assert numbers["pessimistic"] == tbar
        assert float(numbers["upper"]) == pytest.approx(values[-1])
        assert np.allclose(run.y.numpy(), ys[-1], rtol=0, atol=1e-12)  # the answer is y_T, not y_tbar
        d_x = differences(lambda x, p=p, tbar=tbar: p.F(x, iterates(p, x, p.y0, tbar, beta)[-1]), p.x0)
        d_z = differences(lambda z, p=p, tbar=tbar: p.F(p.x0, iterates(p, p.x0, z, tbar, beta)[-1]), p.y0)
        assert close(h, d_x, 1e-7)
        assert close((p.y0 - run.state.z.detached().numpy()) / eta, d_z, 1e-6)
        worst.add((tbar, bool(np.argmax(values) == 0)))
    assert len({tbar for tbar, _ in worst}) > 2
    assert {first for _, first in worst} == {True, False}  # that t = 0 does not count was put to the test


def test_iaptt_compares_values_and_not_views():
    """An F that picks an entry of y returns a view of it; the values to compare must not change with y."""
    problem = meha.Problem(lambda x, y: y[0], lambda x, y: 0.5 * (y - x).square().sum())
    start = torch.zeros(1, dtype=torch.float64), torch.full((1,), -1.0, dtype=torch.float64)
    _, numbers = hypergradient(IAPTT(alpha=0.1, beta=0.3, inner_steps=5).start(problem, *start))
    assert numbers["pessimistic"] == 5


# Networks


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


MODEL = network()
INPUTS = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2).sin()
TARGETS = INPUTS.sum(1, keepdim=True).cos()


def output(model, inputs):
    """Of a module, or of a dict of its parameters."""
    if isinstance(model, torch.nn.Module):
        return model(inputs)
    return torch.func.functional_call(MODEL, model, inputs)


def weighted():
    """y a network; x the logits of the weights of training examples, and a penalty."""
    x = {"logits": torch.linspace(-1, 1, 8, dtype=torch.float64), "decay": torch.tensor(-2.0, dtype=torch.float64)}

    def upper(x, y):
        return (output(y, INPUTS[8:]) - TARGETS[8:]).square().mean()

    def lower(x, y):
        ridge = sum(p.square().sum() for p in (y.parameters() if isinstance(y, torch.nn.Module) else y.values()))
        fit = x["logits"].sigmoid()[:, None] * (output(y, INPUTS[:8]) - TARGETS[:8]).square()
        return fit.mean() + x["decay"].exp() * ridge

    return upper, lower, x, network(3)


def features():
    """x a network, y a linear map of its output: a module too, with two leaves."""

    def upper(x, y):
        return (output(x, INPUTS[8:]) * y["a"] + y["b"] - TARGETS[8:]).square().mean()

    def lower(x, y):
        return (output(x, INPUTS[:8]) * y["a"] + y["b"] - TARGETS[:8]).square().mean() + 0.1 * y["a"].square()

    return upper, lower, network(4), {"a": torch.ones((), dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}


class Flat:
    """A value as a vector: ``value(vector)`` has the structure of the original, with dicts for modules."""

    def __init__(self, value):
        self.variable = Variable(value, "value").copy()
        self.shapes = [leaf.shape for leaf in self.variable.leaves]
        self.start = torch.cat([leaf.detach().reshape(-1) for leaf in self.variable.leaves])

    def __call__(self, vector):
        pieces = vector.split([shape.numel() for shape in self.shapes])
        return self.variable.like([piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)])


def flatten(make):
    upper, lower, x, y = make()
    X, Y = Flat(x), Flat(y)
    return (lambda x, y: upper(X(x), Y(y))), (lambda x, y: lower(X(x), Y(y))), X.start, Y.start


def descent(F, f, x, y, steps, beta, mu=0.0):
    """y_T by plain automatic differentiation of flat vectors."""
    for _ in range(steps):
        y = y.detach().requires_grad_()
        (d,) = torch.autograd.grad(mu * F(x, y) + (1 - mu) * f(x, y), y)
        y = (y - beta * d).detach()
    return y


@pytest.mark.parametrize("make", [weighted, features])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("kind", "mu"), [(RHG, 0.0), (partial(BDA, mu=0.4), 0.4)], ids=["RHG", "BDA"])
def test_networks_against_differences(make, kind, mu, steps):
    method = kind(alpha=1.0, beta=0.5, inner_steps=steps)
    upper, lower, x, y = make()
    h, _ = hypergradient(method.start(meha.Problem(upper, lower), x, y))
    F, f, x0, y0 = flatten(make)

    def value(vector):
        x = torch.tensor(vector)
        return float(F(x, descent(F, f, x, y0, steps, 0.5, mu)))

    expected = differences(value, x0.numpy())
    assert np.linalg.norm(expected) > 1e-3
    assert close(h, expected, 1e-5)


class Recurrent(torch.nn.Module):
    """A network that writes into buffers, and hands its parameters to an operation as one list."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.last = torch.nn.GRU(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, inputs):
        return self.last(self.norm(self.cell(inputs[:, None])[0][:, 0]))


def test_the_last_lower_step_is_evaluated_once():
    """F is differentiated at y_T while the graph of f at y_{T-1} waits; against the product of the Jacobians of both passes."""
    torch.manual_seed(0)
    y, calls = Recurrent().double(), []

    def upper(x, y):
        return (y(INPUTS[8:]) - TARGETS[8:]).square().mean()

    def lower(x, y):
        calls.append(1)
        return (x.sigmoid()[:, None] * (y(INPUTS[:8]) - TARGETS[:8]).square()).mean()

    x = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
    run = RHG(alpha=1.0, beta=0.5, inner_steps=1).start(meha.Problem(upper, lower), x, copy.deepcopy(y))
    other = copy.deepcopy(y)  # in which the new weights are set for good
    d = torch.autograd.grad(lower(x, y), list(y.parameters()), create_graph=True)
    with torch.no_grad():
        for leaf, old, part in zip(other.parameters(), y.parameters(), d, strict=True):
            leaf.copy_(old - 0.5 * part)
    q = torch.autograd.grad(upper(x, other), list(other.parameters()))
    (expected,) = torch.autograd.grad(d, x, [-0.5 * part for part in q])
    calls.clear()
    h, _ = hypergradient(run)
    assert close(h, expected.numpy(), 1e-12)
    assert np.linalg.norm(h) > 1e-4
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(run.y.parameters(), other.parameters(), strict=True))
    assert len(calls) == 1  # where three steps are differentiated, the first two are evaluated again
    assert run.counts == Counts(upper=1, lower=1, hvp=1)
    run = RHG(alpha=1.0, beta=0.5, inner_steps=3).start(meha.Problem(upper, lower), x.detach(), y)
    calls.clear()
    hypergradient(run)
    assert len(calls) == 5
    assert run.counts == Counts(upper=1, lower=3, hvp=3)


def test_cg_with_damping_on_a_network():
    """(f_yy + damping I) v = F_y, with a Hessian that is indefinite by itself, against a dense solve."""
    damping = 1.5
    upper, lower, x, y = weighted()
    method = CG(alpha=1.0, beta=0.5, inner_steps=2, cg_steps=40, damping=damping)
    h, _ = hypergradient(method.start(meha.Problem(upper, lower), x, y))
    F, f, x0, y0 = flatten(weighted)
    y = descent(F, f, x0, y0, 2, 0.5).requires_grad_()
    x = x0.clone().requires_grad_()
    F_y = torch.autograd.grad(F(x, y), y)[0]
    f_yy = torch.autograd.functional.hessian(lambda y: f(x0, y), y.detach())
    f_xy = torch.autograd.functional.jacobian(lambda x: torch.autograd.grad(f(x, y), y, create_graph=True)[0], x0).T
    v = torch.linalg.solve(f_yy + damping * torch.eye(len(y), dtype=torch.float64), F_y)
    assert float(torch.linalg.eigvalsh(f_yy)[0]) < 0
    assert close(h, -(f_xy @ v).numpy(), 1e-8)  # F does not use x itself


# Projections


def onto_simplex(y, total=1.0):
    """max(y - t, 0) with the t that bisection finds."""
    low, high = y.min() - total, y.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(y - middle, 0).sum() > total else (low, middle)
    return np.maximum(y - high, 0)


SETS = {
    "box": (Box(-0.2, 0.25), lambda y: np.clip(y, -0.2, 0.25)),
    "box, a bound per coordinate": (
        Box(np.linspace(-0.3, 0, M), np.linspace(0.1, 0.3, M)),
        lambda y: np.clip(y, np.linspace(-0.3, 0, M), np.linspace(0.1, 0.3, M)),
    ),
    "non-negative": (NonNegative(), lambda y: np.maximum(y, 0)),
    "ball": (L2Ball(0.5), lambda y: y * min(1, 0.5 / np.linalg.norm(y))),
    "ball around a point": (L2Ball(0.4, center=0.3), lambda y: 0.3 + (y - 0.3) * min(1, 0.4 / np.linalg.norm(y - 0.3))),
    "simplex": (Simplex(), onto_simplex),
    "product with a free part": (Product({"b": Simplex(0.5)}), lambda y: np.concatenate([y[:2], onto_simplex(y[2:], 0.5)])),
    "product": (
        Product({"a": Box(-0.1, 0.3), "b": Simplex(0.5)}),
        lambda y: np.concatenate([np.clip(y[:2], -0.1, 0.3), onto_simplex(y[2:], 0.5)]),
    ),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [RHG, BDA, IAPTT])
def test_through_the_projection_on_y(name, kind):
    y_set, project = SETS[name]
    beta, steps, eta, mu = 0.5, 3, 0.2, 0.4 if kind is BDA else 0.0
    active = 0
    for seed in (0, 1):
        p = Smooth(seed)
        y0 = project(p.y0)
        start = {"a": torch.tensor(y0[:2]), "b": torch.tensor(y0[2:])} if name.startswith("product") else torch.tensor(y0)
        options = {BDA: dict(mu=mu), IAPTT: dict(eta=eta)}.get(kind, {})
        method = kind(alpha=1.0, beta=beta, inner_steps=steps, **options)
        run = method.start(p.problem(y_set=y_set), p.t["x0"], start)
        h, _ = hypergradient(run)
        ys = iterates(p, p.x0, y0, steps, beta, lambda t: mu, project)
        assert np.allclose(joined(run.y).numpy(), ys[-1], rtol=0, atol=1e-12)
        tbar = steps if kind is not IAPTT else 1 + int(np.argmax([p.F(p.x0, y) for y in ys[1:]]))

        def value(x, z, p=p, tbar=tbar):
            return p.F(x, iterates(p, x, z, tbar, beta, lambda t: mu, project)[-1])

        expected = differences(lambda x, p=p, y0=y0: value(x, y0), p.x0)
        free = differences(lambda x, p=p, y0=y0, tbar=tbar: p.F(x, iterates(p, x, y0, tbar, beta)[-1]), p.x0)
        active += not close(free, expected, 1e-2)
        assert close(h, expected, 1e-6)
        if kind is IAPTT:
            d_z = differences(lambda z, p=p: value(p.x0, z), y0)
            assert np.allclose(joined(run.state.z.detached()).numpy(), project(y0 - eta * d_z), rtol=0, atol=1e-8)
    assert active  # the projection did matter


@pytest.mark.parametrize("y_set", [L2Ball(1.0), Box(-1.0, 1.0), L2Ball(1.0, center=0.25)], ids=repr)
def test_a_projected_point_at_the_centre(y_set):
    """f = ||y - x||^2 / 2 with step 1 leads to y = x at once, the centre of the set: h = F_y there."""
    problem = meha.Problem(lambda x, y: (y - 1).square().sum(), lambda x, y: 0.5 * (y - x).square().sum(), y_set=y_set)
    centre = getattr(y_set, "center", 0.0)
    x, y = torch.full((2,), centre, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    h, _ = hypergradient(RHG(alpha=1.0, beta=1.0, inner_steps=2).start(problem, x, y))
    assert np.allclose(h, 2 * (centre - 1))


# First-order estimates


def first_direction(run, alpha):
    before = run.x.clone()
    run.step()
    return ((before - run.x) / alpha).numpy()


@pytest.mark.parametrize(("bend", "epsilon", "accuracy"), [(0.0, 0.01, 1e-10), (0.5, 1e-2, 1e-4), (0.5, 1e-3, 1e-6)])
def test_darts_of_order_2_is_rhg_with_one_step(bend, epsilon, accuracy):
    """Up to the error of a difference quotient: none on quadratics, of order epsilon^2 elsewhere."""
    for seed in range(3):
        p = Smooth(seed, bend)
        h, _ = hypergradient(p.start(RHG(alpha=1.0, beta=0.4, inner_steps=1)))
        found = first_direction(p.start(DARTS(alpha=0.5, beta=0.4, epsilon=epsilon)), 0.5)
        assert close(found, h, accuracy)


def test_darts_steps_ahead_as_its_optimizer_would():
    """With momentum and weight decay: y' = y - lr (f_y + wd y + momentum buffer), then the step itself at the new x."""
    p, alpha, lr, momentum, decay, epsilon = Smooth(2), 0.1, 0.2, 0.7, 0.3, 0.05
    sgd = partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=decay)
    run = p.start(DARTS(alpha=alpha, epsilon=epsilon, y_optimizer=sgd))
    x, y, buffer = p.x0, p.y0, np.zeros(M)
    for _ in range(6):
        run.step()
        ahead = y - lr * (p.f_y(x, y) + decay * y + momentum * buffer)
        d = p.F_y(x, ahead)
        e = epsilon / np.linalg.norm(d)
        h = p.F_x(x, ahead) - lr * (p.f_x(x, y + e * d) - p.f_x(x, y - e * d)) / (2 * e)
        x = x - alpha * h
        buffer = momentum * buffer + p.f_y(x, y) + decay * y
        y = y - lr * buffer
        assert np.allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
        assert np.allclose(run.y.numpy(), y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["F without y", "lr of 0"])
def test_darts_of_order_2_where_nothing_leads_ahead(case, dtype):
    """With d = 0 there is no difference quotient to take, and x moves along F_x alone."""
    centre = torch.tensor([1.0, -2.0], dtype=dtype)
    pull = 0.0 if case == "F without y" else 1.0
    problem = meha.Problem(
        upper=lambda x, y: (x - centre).square().sum() + pull * (x * y).sum(),
        lower=lambda x, y: (y - 3 * x).square().sum() + y.sum(),
    )
    x0, y0 = torch.tensor([0.5, 0.25], dtype=dtype), torch.tensor([2.0, -1.0], dtype=dtype)
    sgd = partial(torch.optim.SGD, lr=0.0 if case == "lr of 0" else 0.1)
    run = DARTS(alpha=0.1, order=2, y_optimizer=sgd).start(problem, x0, y0)
    run.step()
    torch.testing.assert_close(run.x, x0 - 0.1 * (2 * (x0 - centre) + pull * y0))
