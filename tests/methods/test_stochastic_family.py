"""The methods of meha.stochastic: transcriptions in numpy, costs, answers, refusals, resumed and compiled runs."""

import dataclasses
import io

import numpy as np
import pytest
import torch

import meha
from meha.methods.stochastic import SABA, SOBA
from meha.problem.loaders import Indices
from meha.problem.schedules import InversePower
from meha.problem.sets import Box
from meha.running.compiled import Traced

STEPS = 20
X = Box(-0.2, 0.3)


def alpha(k):
    return 0.2 / (k + 1) ** 0.3


def beta(k):
    return 0.3 / (k + 1) ** 0.1


def eta(k):
    return 0.25 / (k + 1) ** 0.2


RATES = dict(alpha=alpha, beta=beta, eta=eta)


class Sums:
    """Means over examples, not quadratic, f strongly convex in y: in torch for the library, in numpy with derivatives."""

    upper_count, lower_count, n = 8, 12, 3

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.a, self.c = rng.normal(size=(self.lower_count, self.n)), 0.3 * rng.normal(size=(self.lower_count, self.n))
        self.b = np.where(rng.random(self.lower_count) < 0.5, -1.0, 1.0)
        self.p, self.r = 0.7 * rng.normal(size=(self.upper_count, self.n)), 0.7 * rng.normal(size=(self.upper_count, self.n))
        self.q = rng.normal(size=self.upper_count)
        self.x0, self.y0 = 0.1 * rng.uniform(-1, 1, size=self.n), 0.5 * rng.normal(size=self.n)
        self.t = {name: torch.tensor(value) for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def upper(self, x, y, batch):
        p, r, q = (self.t[name][batch.upper] for name in "prq")
        return (0.5 * (p @ y + r @ x - q).square() + torch.sin(r @ x) + torch.cos(p @ y)).mean()

    def lower(self, x, y, batch):
        a, c, b = (self.t[name][batch.lower] for name in "acb")
        return (torch.nn.functional.softplus(-b * (a @ y)) + (c @ x) * (a @ y)).mean() + 0.5 * (x.exp() * y.square()).sum()

    def problem(self, **parts):
        return meha.Problem(self.upper, self.lower, **parts)

    def indices(self, size=2, groups=False, **options):
        return Indices(size, upper=self.upper_count, lower=self.lower_count, groups=groups, **options)

    def start(self, method, **parts):
        return method.start(self.problem(**parts), self.t["x0"], self.t["y0"])

    def F_x(self, x, y, i):
        p, r, q = self.p[i], self.r[i], self.q[i]
        return ((p @ y + r @ x - q + np.cos(r @ x))[:, None] * r).mean(0)

    def F_y(self, x, y, i):
        p, r, q = self.p[i], self.r[i], self.q[i]
        return ((p @ y + r @ x - q - np.sin(p @ y))[:, None] * p).mean(0)

    def f_y(self, x, y, i):
        a, c, b = self.a[i], self.c[i], self.b[i]
        return ((c @ x - b / (1 + np.exp(b * (a @ y))))[:, None] * a).mean(0) + np.exp(x) * y

    def f_yy(self, x, y, i):
        a, s = self.a[i], 1 / (1 + np.exp(self.b[i] * (self.a[i] @ y)))
        return np.einsum("i,ij,ik->jk", s * (1 - s), a, a) / len(a) + np.diag(np.exp(x))

    def f_xy(self, x, y, i):
        return np.einsum("ij,ik->jk", self.c[i], self.a[i]) / len(self.a[i]) + np.diag(np.exp(x) * y)

    def h(self, x, y, v, batch):
        """The directions of x, y and v on a batch."""
        u, i = batch
        return (
            self.F_x(x, y, u) - self.f_xy(x, y, i) @ v,
            self.f_y(x, y, i),
            self.f_yy(x, y, i) @ v - self.F_y(x, y, u),
        )


def into_X(x):
    return np.clip(x, -0.2, 0.3)


# Transcriptions: generators of (x, y, v) after each step, from batches as arrays; v is None where a method has none.


def arrays(batch):
    return batch.upper.numpy(), batch.lower.numpy()


def moved(x, y, v, d, k):
    return into_X(x - alpha(k) * d[0]), y - beta(k) * d[1], v - eta(k) * d[2]


def soba(p, x, y, batches):
    v = 0 * y
    for k, batch in enumerate(batches):
        x, y, v = moved(x, y, v, p.h(x, y, v, arrays(batch)), k)
        yield x, y, v


def saga(p, x, y, batches):
    """Every part with a memory of its own, whose means are taken anew in each step."""
    v, tables = 0 * y, None
    for k, batch in enumerate(batches):
        (u, i), groups = arrays(batch), [int(g) for g in batch.group]
        parts = [p.F_x(x, y, u), p.F_y(x, y, u), p.f_xy(x, y, i) @ v, p.f_y(x, y, i), p.f_yy(x, y, i) @ v]
        level = [0, 0, 1, 1, 1]
        if tables is None:
            tables = [np.tile(part, (batch.groups[at], 1)) for part, at in zip(parts, level, strict=True)]
        found = []
        for part, table, at in zip(parts, tables, level, strict=True):
            found.append(part - table[groups[at]] + table.mean(0))
            table[groups[at]] = part
        F_x, F_y, cross, f_y, image = found
        x, y, v = moved(x, y, v, (F_x - cross, f_y, image - F_y), k)
        yield x, y, v


TRANSCRIPTIONS = {
    "SOBA": (SOBA(**RATES), {}, soba),
    "SABA": (SABA(**RATES), dict(groups=True), saga),
}


@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_equals_the_transcription(name):
    method, options, transcription = TRANSCRIPTIONS[name]
    p = Sums()
    run, source = p.start(method, x_set=X), p.indices(**options)
    batches = [next(source) for _ in range(STEPS)]
    at_bounds = 0
    for batch, (x, y, v) in zip(batches, transcription(p, p.x0, p.y0, batches), strict=True):
        run.step(batch)
        assert np.abs(run.x.numpy() - x).max() < 1e-10
        assert np.abs(run.y.numpy() - y).max() < 1e-10
        assert v is None or np.abs(run.state.v.leaves[0].detach().numpy() - v).max() < 1e-10
        at_bounds += int(((x == -0.2) | (x == 0.3)).sum())
    assert 0 < at_bounds < STEPS * p.n  # X was felt, and was not all
    assert np.abs(y - p.y0).max() > 0.1


# Costs: gradients of F, of f, and Hessian-vector products, of the first steps

COSTS = {
    "SOBA": [(1, 1, 1)] * 3,
    "SABA": [(1, 1, 1)] * 3,
}


@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_costs_of_a_step(name):
    method, options, _ = TRANSCRIPTIONS[name]
    p = Sums()
    run, source = p.start(method), p.indices(**options)
    for cost in COSTS[name]:
        before = dataclasses.astuple(run.counts)
        run.step(next(source))
        assert tuple(b - a for a, b in zip(before, dataclasses.astuple(run.counts), strict=True)) == cost


# Resumed and compiled


def same(a, b):
    """Equal, bit for bit, through dicts."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", TRANSCRIPTIONS)
@pytest.mark.parametrize("before", [0, 5], ids=["fresh", "used"])
def test_a_resumed_run_is_the_run(name, before):
    method, options, _ = TRANSCRIPTIONS[name]
    p = Sums()
    run, source = p.start(method), p.indices(**options)
    for _ in range(7):
        run.step(next(source))
    buffer = io.BytesIO()
    torch.save((run.state_dict(), source.state_dict()), buffer)
    buffer.seek(0)
    saved, position = torch.load(buffer, weights_only=True)
    other, again = p.start(method), p.indices(**options)
    for _ in range(before):  # a run in another place, which the state replaces
        other.step(next(again))
    other.load_state_dict(saved)
    again.load_state_dict(position)
    for _ in range(7):
        assert dict(run.step(next(source))) == dict(other.step(next(again)))
    assert same(run.state_dict(), other.state_dict())
    assert not same(saved, other.state_dict())


def compiled_and_eager(name, compile):
    """x, y and the counts after 3 eager and 12 compiled steps, and after as many eager ones."""
    method, options, _ = TRANSCRIPTIONS[name]
    p = Sums()
    problem = p.problem(x_set=X)
    ends = []
    for traced in (True, False):
        run, source = method.start(problem, p.t["x0"], p.t["y0"]), p.indices(**options)
        for _ in range(3):
            run.step(next(source))
        stepper = None
        while run.k < 15:
            if traced and stepper is None:
                stepper = Traced(run, unrolled=2)
                compile(stepper)
            if traced and stepper.alike(2) == 2:
                stepper([next(source), next(source)])
            else:
                run.step(next(source))
        ends.append((run.x, run.y, run.counts))
    return ends


def interpret(stepper):
    """The graph as it is, without the compiler, which takes seconds."""
    stepper._function = stepper._trace.unroll(2)


@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_traced_steps_are_the_steps(name):
    found, expected = compiled_and_eager(name, interpret)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    assert found[2] == expected[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_compiled_steps_are_the_steps(name):
    found, expected = compiled_and_eager(name, Traced.compile)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    assert found[2] == expected[2]


# Answers


class Quadratic:
    """Least squares on both levels, whose solution is that of linear equations."""

    upper_count, lower_count, n, m = 40, 60, 2, 3

    def __init__(self, seed=1):
        rng = np.random.default_rng(seed)
        self.a, self.c = rng.normal(size=(self.lower_count, self.m)), rng.normal(size=(self.lower_count, self.n))
        self.b = rng.normal(size=self.lower_count)
        self.p, self.q = rng.normal(size=(self.upper_count, self.m)), rng.normal(size=self.upper_count)
        self.t = {name: torch.tensor(value) for name, value in vars(self).items()}
        # y(x) = S x + s, and F is half the mean square of p y - q, plus 0.05 |x|^2
        H = self.a.T @ self.a / self.lower_count + 0.5 * np.eye(self.m)
        S, s = (np.linalg.solve(H, self.a.T @ part / self.lower_count) for part in (self.c, self.b))
        P = self.p @ S
        self.x = np.linalg.solve(
            P.T @ P / self.upper_count + 0.1 * np.eye(self.n), P.T @ (self.q - self.p @ s) / self.upper_count
        )
        self.y = S @ self.x + s

    def upper(self, x, y, batch):
        p, q = self.t["p"][batch.upper], self.t["q"][batch.upper]
        return 0.5 * (p @ y - q).square().mean() + 0.05 * x.square().sum()

    def lower(self, x, y, batch):
        a, b, c = (self.t[name][batch.lower] for name in "abc")
        return 0.5 * (a @ y - b - c @ x).square().mean() + 0.25 * y.square().sum()

    def solve(self, method, steps, size=4, **options):
        x0, y0 = torch.zeros(self.n).double(), torch.zeros(self.m).double()
        batches = Indices(size, upper=self.upper_count, lower=self.lower_count, **options)
        problem = meha.Problem(self.upper, self.lower)
        solution = meha.solve(problem, x0, y0, method, batches=batches, max_steps=steps, tol=None)
        return max(np.abs(solution.x.numpy() - self.x).max(), np.abs(solution.y.numpy() - self.y).max()), solution


FALLING = dict(alpha=InversePower(0.3, 0.5), beta=InversePower(0.3, 0.4), eta=InversePower(0.3, 0.4))
CONSTANT = dict(alpha=0.1, beta=0.15, eta=0.15)
ANSWERS = {  # method, steps, options of the batches, largest error
    "SOBA": (SOBA(**FALLING), 1500, {}, 0.05),
    "SABA": (SABA(**CONSTANT), 1500, dict(groups=True), 1e-6),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_of_a_quadratic_problem(name):
    method, steps, options, error = ANSWERS[name]
    found, _ = Quadratic().solve(method, steps, **options)
    assert found < error
