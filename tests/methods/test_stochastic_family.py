"""The methods of meha.stochastic: transcriptions in numpy, costs, answers, refusals, resumed and compiled runs."""

import dataclasses
import io
import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_compiled import without_compiler

import meha
from meha.methods.frames import SteppingMethod
from meha.methods.stochastic import (
    BSA,
    FSLA,
    MASOBA,
    MRBO,
    SABA,
    SOBA,
    SPABA,
    SRBA,
    SUSTAIN,
    TTSA,
    VRBO,
    AmIGO,
    PBGDFree,
    StocBiO,
    saba,
)
from meha.methods.stochastic.frame import uniform
from meha.problem.loaders import Indices
from meha.problem.schedules import InversePower
from meha.problem.sets import Box
from meha.running.compiled import Traced

STEPS = 20
slow = partial(pytest.param, marks=pytest.mark.slow)
X = Box(-0.2, 0.3)


def alpha(k):
    return 0.2 / (k + 1) ** 0.3


def beta(k):
    return 0.3 / (k + 1) ** 0.1


def eta(k):
    return 0.25 / (k + 1) ** 0.2


RATES = dict(alpha=alpha, beta=beta, eta=eta)
CONSTANT = dict(alpha=0.3, beta=0.3, eta=0.3)


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


KINDS = [kind for name in meha.stochastic.__all__ if issubclass(kind := getattr(meha.stochastic, name), SteppingMethod)]


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


def masoba(p, x, y, batches, share):
    v, h = 0 * y, 0 * x
    for k, batch in enumerate(batches):
        d_x, d_y, d_v = p.h(x, y, v, arrays(batch))
        h = (1 - share(k)) * h + share(k) * d_x
        x, y, v = moved(x, y, v, (h, d_y, d_v), k)
        yield x, y, v


def recursive(p, x, y, batches, restarts):
    everything = np.arange(p.upper_count), np.arange(p.lower_count)
    v, d, last = 0 * y, (), ()
    for k, batch in enumerate(batches):
        if restarts(k):
            d = p.h(x, y, v, everything)
        else:
            d = [e + a - b for e, a, b in zip(d, p.h(x, y, v, arrays(batch)), p.h(*last, arrays(batch)), strict=True)]
        last = x, y, v
        x, y, v = moved(x, y, v, d, k)
        yield x, y, v


def random_numbers(seed, count):
    """SplitMix64 as Steele, Lea and Flood state it, with the arithmetic of numpy; the stream begins at the mixed seed."""

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(mix(np.array([seed], dtype=np.uint64)) + steps) >> np.uint64(11)) / 2.0**53


def coin(probability, seed):
    numbers = random_numbers(seed, STEPS)
    return lambda k: k == 0 or numbers[k] < probability


def rows_of(batch):
    """The batches of a step as arrays: those of its draws, or the one for all."""
    if batch.upper.ndim == 1:
        return lambda j: arrays(batch)
    return lambda j: (batch.upper[j].numpy(), batch.lower[j].numpy())


def factors(p, x, y, batch_of, step, first, count):
    """I - step f_yy on each of the batches."""
    return [np.eye(p.n) - step * p.f_yy(x, y, batch_of(first + j)[1]) for j in range(count)]


def series(F_y, matrices, step, drawn=None):
    """The sum over n of step M_n ... M_1 F_y, or one term of it times the number of terms."""
    terms = [F_y]
    for matrix in matrices:
        terms.append(matrix @ terms[-1])
    return step * sum(terms) if drawn is None else step * len(terms) * terms[drawn]


def hypergradient(p, x, y, batch_of, step, first, Q, drawn=None):
    u, i = batch_of(first + Q)
    v = series(p.F_y(x, y, u), factors(p, x, y, batch_of, step, first, Q), step, drawn)
    return p.F_x(x, y, u) - p.f_xy(x, y, i) @ v


def stocbio(p, x, y, batches, T, Q, seed=None, cold=False):
    start, numbers = y, None if seed is None else (random_numbers(seed, STEPS) * (Q + 1)).astype(int)
    assert numbers is None or len(set(numbers)) == Q + 1
    for k, batch in enumerate(batches):
        batch_of, y = rows_of(batch), start if cold else y
        for t in range(T):
            y = y - beta(k) * p.f_y(x, y, batch_of(t)[1])
        h = hypergradient(p, x, y, batch_of, eta(k), T, Q, None if numbers is None else numbers[k])
        x = into_X(x - alpha(k) * h)
        yield x, y, None


def amigo(p, x, y, batches, T, Q):
    v = 0 * y
    for k, batch in enumerate(batches):
        batch_of = rows_of(batch)
        for t in range(T):
            y = y - beta(k) * p.f_y(x, y, batch_of(t)[1])
        u, i = batch_of(T + Q)
        for j in range(Q):
            v = v - eta(k) * (p.f_yy(x, y, batch_of(T + j)[1]) @ v - p.F_y(x, y, u))
        x = into_X(x - alpha(k) * (p.F_x(x, y, u) - p.f_xy(x, y, i) @ v))
        yield x, y, v


def storm(p, x, y, batches, Q, share, seed=None):
    numbers, d, last = None if seed is None else (random_numbers(seed, STEPS) * (Q + 1)).astype(int), (), None
    for k, batch in enumerate(batches):
        batch_of, drawn = rows_of(batch), None if numbers is None else numbers[k]

        def at(x, y, batch_of=batch_of, drawn=drawn, k=k):
            return hypergradient(p, x, y, batch_of, eta(k), 0, Q, drawn), p.f_y(x, y, batch_of(Q)[1])

        new = at(x, y)
        if last is not None:
            new = [a + (1 - share(k)) * (e - b) for a, e, b in zip(new, d, at(*last), strict=True)]
        d, last = new, (x, y)
        x, y = into_X(x - alpha(k) * d[0]), y - beta(k) * d[1]
        yield x, y, None


def vrbo(p, x, y, batches, T, Q, restarts):
    everything, d = (np.arange(p.upper_count), np.arange(p.lower_count)), []
    for k, batch in enumerate(batches):

        def at(x, y, batch, k=k):
            return np.array([hypergradient(p, x, y, lambda j: batch, eta(k), 0, Q), p.f_y(x, y, batch[1])])

        small = arrays(batch)
        d = at(x, y, everything) if restarts(k) else d
        path = [(x, y)]
        x = into_X(x - alpha(k) * d[0])
        for t in range(T + 1):
            path.append((x, y))
            d = d + at(*path[-1], small) - at(*path[-2], small)
            y = y - beta(k) * d[1] if t < T else y
        yield x, y, None


def fsla(p, x, y, batches, share):
    v, d, last = 0 * y, 0 * x, None
    for k, batch in enumerate(batches):
        new, d_y, d_v = p.h(x, y, v, arrays(batch))
        d = new if last is None else new + (1 - share(k)) * (d - p.h(*last, arrays(batch))[0])
        last = x, y, v
        x, y, v = moved(x, y, v, (d, d_y, d_v), k)
        yield x, y, v


def pbgd_free(p, x, y, batches, T, c):
    for k, batch in enumerate(batches):
        batch_of = rows_of(batch)
        for t in range(T):
            u, i = batch_of(t)
            y = y - beta(k) * min(1, 1 / c(k)) * (p.F_y(x, y, u) + c(k) * p.f_y(x, y, i))
        x = into_X(x - alpha(k) * p.F_x(x, y, batch_of(T)[0]))
        yield x, y, None


def share(k):
    return 0.6 / (k + 1) ** 0.3


def weight(k):
    return 0.5 * (k + 1) ** 0.5


GROUPS, FIVE, THREE = dict(groups=True), dict(draws=5), dict(draws=3)
AB = dict(alpha=alpha, beta=beta)
TRANSCRIPTIONS = {  # method, options of the batches, transcription
    "SOBA": (SOBA(**RATES), {}, soba),
    "MASOBA": (MASOBA(**RATES, share=share), {}, partial(masoba, share=share)),
    "SABA": (SABA(**RATES), GROUPS, saga),
    "SRBA": (SRBA(**RATES), GROUPS, partial(recursive, restarts=lambda k: k in (0, 6, 12, 18))),
    "SRBA, period 5": (SRBA(**RATES, period=5), GROUPS, partial(recursive, restarts=lambda k: k in (0, 5, 10, 15))),
    "SPABA": (SPABA(**RATES), GROUPS, partial(recursive, restarts=coin(1 / 7, 0))),
    "SPABA, 0.4": (SPABA(**RATES, probability=0.4, seed=5), GROUPS, partial(recursive, restarts=coin(0.4, 5))),
    "StocBiO": (StocBiO(**RATES, inner_steps=2, system_steps=2), FIVE, partial(stocbio, T=2, Q=2)),
    "StocBiO, cold, one batch": (
        StocBiO(**RATES, inner_steps=2, system_steps=3, warm_start=False),
        {},
        partial(stocbio, T=2, Q=3, cold=True),
    ),
    "AmIGO": (AmIGO(**RATES, inner_steps=2, system_steps=2), FIVE, partial(amigo, T=2, Q=2)),
    "AmIGO, one batch": (AmIGO(**RATES, inner_steps=1, system_steps=3), {}, partial(amigo, T=1, Q=3)),
    "MRBO": (MRBO(**RATES, system_steps=2, share=share), THREE, partial(storm, Q=2, share=share)),
    "MRBO, one batch": (MRBO(**RATES, system_steps=3, share=0.3), {}, partial(storm, Q=3, share=lambda k: 0.3)),
    "PBGDFree": (PBGDFree(**AB, inner_steps=2, c=weight), THREE, partial(pbgd_free, T=2, c=weight)),
    "FSLA": (FSLA(**RATES, share=share), {}, partial(fsla, share=share)),
    "SUSTAIN": (SUSTAIN(**RATES, system_steps=2, share=share, seed=3), THREE, partial(storm, Q=2, share=share, seed=3)),
    "BSA": (BSA(**RATES, inner_steps=2, system_steps=2, seed=1), FIVE, partial(stocbio, T=2, Q=2, seed=1)),
    "VRBO": (
        VRBO(**RATES, inner_steps=2, system_steps=2),
        GROUPS,
        partial(vrbo, T=2, Q=2, restarts=lambda k: k in (0, 6, 12, 18)),
    ),
    "TTSA": (TTSA(**RATES, system_steps=3), FIVE, partial(stocbio, T=1, Q=3, seed=0)),
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

ONE, TWO, ALL = (1, 1, 1), (2, 2, 2), (4, 6, 6)  # ALL: 8 upper examples in groups of 2, and 12 lower ones
COSTS = {
    "SOBA": [ONE] * 3,
    "MASOBA": [ONE] * 3,
    "SABA": [ONE] * 3,
    "SRBA": [ALL, *[TWO] * 5, ALL],
    "SRBA, period 5": [ALL, *[TWO] * 4, ALL],
    "SPABA": [ALL, TWO],
    "SPABA, 0.4": [ALL] + [ALL if number < 0.4 else TWO for number in random_numbers(5, STEPS)[1:]],
    "StocBiO": [(1, 2, 3)] * 3,
    "StocBiO, cold, one batch": [(1, 2, 4)] * 3,
    "AmIGO": [(1, 2, 3)] * 3,
    "AmIGO, one batch": [(1, 1, 4)] * 3,
    "MRBO": [(1, 1, 3), (2, 2, 6), (2, 2, 6)],
    "MRBO, one batch": [(1, 1, 4), (2, 2, 8), (2, 2, 8)],
    "PBGDFree": [(3, 2, 0)] * 3,
    "FSLA": [ONE, (2, 1, 2), (2, 1, 2)],
    "SUSTAIN": [(1, 1, 3), (2, 2, 6), (2, 2, 6)],
    "BSA": [(1, 2, 3)] * 3,
    "TTSA": [(1, 1, 4)] * 3,
    "VRBO": [(4 + 4, 4 + 6, 12 + 18), *[(4, 4, 12)] * 5, (4 + 4, 4 + 6, 12 + 18)],
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


def compiled_and_eager(name):
    """x, y and the counts after 3 eager and 12 compiled steps, and after as many eager ones."""
    method, options, _ = TRANSCRIPTIONS[name]
    p = Sums()
    problem = p.problem(x_set=X)
    ends = []
    for traced in (True, False):
        run, source = method.start(problem, p.t["x0"], p.t["y0"]), p.indices(**options)
        for _ in range(3):
            run.step(next(source))
        if traced:
            stepper = Traced(run)
            stepper.compile()
        while run.k < 15:
            n = max(1, stepper.alike(15 - run.k)) if traced else 1
            group = [(next(source), None, "") for _ in range(n)]
            if traced and stepper.alike(1):
                assert stepper.fit(group) == n
                stepper(group)
            else:
                run.step(group[0][0])
        ends.append((run.x, run.y, run.counts))
    return ends


FEW = ("SABA", "SRBA, period 5", "SUSTAIN")  # a memory, rare steps, random numbers


@pytest.mark.parametrize("name", [name if name in FEW else slow(name) for name in TRANSCRIPTIONS])
def test_traced_steps_are_the_steps(name, monkeypatch):
    without_compiler(monkeypatch.setattr)
    found, expected = compiled_and_eager(name)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    assert found[2] == expected[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_compiled_steps_are_the_steps(name):
    found, expected = compiled_and_eager(name)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    assert found[2] == expected[2]


@pytest.mark.parametrize("kind", [SABA, SPABA])
def test_checkpoints_of_solve_continue_the_run(kind, tmp_path):
    """The memory is not there before the first step of the second call, and the batches go on where they were."""
    p, ends = Sums(), []
    for pieces in ((30,), (12, 30)):
        for steps in pieces:
            place = tmp_path / f"{len(pieces)}.pt"
            options = dict(batches=p.indices(groups=True), max_steps=steps, tol=None, checkpoint=place)
            solution = meha.solve(p.problem(), p.t["x0"], p.t["y0"], kind(**CONSTANT), **options)
        ends.append(solution)
    assert ends[0].steps == ends[1].steps == 30
    assert torch.equal(ends[0].x, ends[1].x)
    assert torch.equal(ends[0].y, ends[1].y)
    assert ends[0].counts == ends[1].counts


def network_run(kind, **rates):
    """Weights of examples, a network, and an optimizer for x."""
    torch.manual_seed(0)
    inputs, targets = torch.linspace(-2, 2, 40).reshape(20, 2).sin(), torch.linspace(-1, 1, 20)[:, None].cos()

    def upper(x, y, batch):
        return (y(inputs[batch.upper]) - targets[batch.upper]).square().mean() + 1e-3 * x["decay"].square()

    def lower(x, y, batch):
        losses = (y(inputs[batch.lower]) - targets[batch.lower]).square()[:, 0]
        decay = x["decay"].exp() * sum(p.square().sum() for p in y.parameters())
        return (x["weights"][batch.lower].sigmoid() * losses).mean() + decay

    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    x0 = {"weights": torch.zeros(12), "decay": torch.tensor(-1.0)}
    steps = {name: 0.02 for name in ("beta", "eta") if hasattr(kind(), name)}
    method = kind(**steps, x_optimizer=partial(torch.optim.Adam, lr=0.01))
    grouped = kind in (SABA, SRBA, SPABA, VRBO)
    return method.start(meha.Problem(upper, lower), x0, net), Indices((4, 3), upper=20, lower=12, groups=grouped)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_structures_modules_and_optimizers(kind):
    """Dicts, a module, single precision, an optimizer for x; and resumed bit for bit."""
    (run, source), (other, again) = network_run(kind), network_run(kind)
    before = [p.detach().clone() for p in run.y.parameters()]
    for _ in range(4):
        run.step(next(source))
    other.load_state_dict(run.state_dict())
    again.load_state_dict(source.state_dict())
    for _ in range(4):
        info = dict(run.step(next(source)))
        assert all(math.isfinite(value) for value in info.values())
        assert info == dict(other.step(next(again)))
    assert same(run.state_dict()["state"]["x"], other.state_dict()["state"]["x"])
    assert all(not torch.equal(a, b) for a, b in zip(run.y.parameters(), before, strict=True))
    assert float(run.x["decay"]) != -1
    assert bool((run.x["weights"] != 0).all()) == (kind is not PBGDFree)  # F itself does not use them


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
        x0, y0 = torch.full((self.n,), 3.0).double(), torch.zeros(self.m).double()
        batches = Indices(size, upper=self.upper_count, lower=self.lower_count, **options)
        problem = meha.Problem(self.upper, self.lower)
        solution = meha.solve(problem, x0, y0, method, batches=batches, max_steps=steps, tol=None)
        return max(np.abs(solution.x.numpy() - self.x).max(), np.abs(solution.y.numpy() - self.y).max()), solution


FALLING = dict(alpha=InversePower(1.5, 0.5), beta=InversePower(0.6, 0.3), eta=InversePower(0.6, 0.3))
LOOPS = dict(inner_steps=3, system_steps=3, eta=0.4, alpha=InversePower(2.0, 0.5), beta=InversePower(0.6, 0.3))
SERIES = dict(alpha=FALLING["alpha"], beta=FALLING["beta"], eta=0.4, share=0.3, system_steps=4)
ANSWERS = [  # method, steps, options of the batches, largest error; the start is wrong by 3
    (SOBA(**FALLING), 400, {}, 0.05),
    slow(MASOBA(**FALLING), 400, {}, 0.05),
    (SABA(**CONSTANT), 300, GROUPS, 1e-4),
    (SRBA(**CONSTANT), 300, GROUPS, 1e-4),
    (SPABA(**CONSTANT), 300, GROUPS, 1e-4),
    (StocBiO(**LOOPS), 150, dict(draws=7), 0.2),
    slow(AmIGO(**LOOPS), 150, dict(draws=7), 0.2),
    slow(MRBO(**SERIES), 200, FIVE, 0.15),
    slow(FSLA(**FALLING, share=0.3), 400, {}, 0.06),
    slow(SUSTAIN(**SERIES), 200, FIVE, 0.15),
    slow(BSA(**LOOPS), 200, dict(draws=7), 0.2),
    slow(VRBO(**CONSTANT | dict(eta=0.4), inner_steps=2, system_steps=12), 200, GROUPS, 3e-3),
    slow(TTSA(**LOOPS | dict(inner_steps=1)), 200, FIVE, 0.15),
]


@pytest.mark.parametrize(("method", "steps", "options", "error"), ANSWERS, ids=lambda value: getattr(value, "name", ""))
def test_the_answer_of_a_quadratic_problem(method, steps, options, error):
    found, solution = Quadratic().solve(method, steps, size=(8, 10), **options)
    assert found < error
    if method.name == "SABA":  # 5 groups of upper and 6 of lower examples, |x| = 2, |y| = 3, means as further rows
        size = 8 * (6 * (2 + 3) + 7 * (2 + 6))
        assert solution.report["memory"] == f"derivatives on every group of examples, {saba.shown(size)}"


def test_pbgd_free_ends_where_its_formula_says():
    """F_x = 0 at the minimiser of F + c f in y, which is not the solution of the bilevel problem."""
    problem = meha.Problem(
        lambda x, y: 0.5 * (x - y).square().sum() + 0.5 * (x - 3).square().sum(),
        lambda x, y: 0.5 * (y - 2 * x).square().sum(),
    )
    zero = torch.zeros(1, dtype=torch.float64)
    for c in (0.5, 4.0):
        slope = (1 + 2 * c) / (1 + c)  # of the minimiser y = slope * x
        run = PBGDFree(alpha=0.3, beta=0.5, c=c).start(problem, zero, zero)
        for _ in range(500):
            run.step()
        assert float(run.x) == pytest.approx(3 / (2 - slope), rel=1e-6)
        assert float(run.y) == pytest.approx(3 * slope / (2 - slope), rel=1e-6)


def test_the_numbers_of_coins_look_random():
    """Means, and correlations with the next number and with the next seed, within four standard deviations."""
    numbers = np.array([[uniform(seed, k) for k in range(4000)] for seed in range(4)])
    assert np.abs(numbers.mean(1) - 0.5).max() < 4 / math.sqrt(12 * 4000)
    for a, b in [(row[1:], row[:-1]) for row in numbers] + list(pairwise(numbers)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(3999)


# What is refused


@pytest.mark.parametrize("kind", [SABA, SRBA, SPABA, VRBO])
@pytest.mark.parametrize("options", [None, {}, dict(draws=2)], ids=["none", "plain", "draws"])
def test_methods_that_need_groups_say_so(kind, options):
    p = Sums()
    batch = None if options is None else next(p.indices(**options))
    problem = p.problem() if batch else meha.problems.strong_convex(3)
    run = kind(**RATES).start(problem, p.t["x0"], p.t["y0"])
    got = "none" if batch is None else type(batch).__name__
    with pytest.raises(
        TypeError, match=rf"batches: {kind.__name__} needs batches of fixed groups .*, got {got}; .*groups=True"
    ):
        run.step(batch)


@pytest.mark.parametrize("kind", [SOBA, MASOBA, FSLA])
def test_methods_of_one_batch_refuse_several(kind):
    p = Sums()
    with pytest.raises(ValueError, match=rf"batches: {kind.__name__} uses one batch in a step, got draws=2; leave draws out"):
        p.start(kind(**RATES)).step(next(p.indices(draws=2)))


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (StocBiO(inner_steps=2, system_steps=3), 6),
        (AmIGO(inner_steps=4, system_steps=3), 8),
        (BSA(inner_steps=1, system_steps=1), 3),
        (TTSA(system_steps=5), 7),
        (MRBO(system_steps=4), 5),
        (SUSTAIN(system_steps=4), 5),
        (PBGDFree(inner_steps=3), 4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_number_of_draws_must_fit(method, needed):
    p = Sums()
    steps = {name: 0.1 for name in ("alpha", "beta", "eta") if hasattr(method, name)}
    method = dataclasses.replace(method, **steps)
    p.start(method).step(next(p.indices(draws=needed)))
    with pytest.raises(ValueError, match=rf"{method.name} uses {needed} batches in a step .*, got draws=2; .*draws={needed}\)"):
        p.start(method).step(next(p.indices(draws=2)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problems_that_are_refused(kind):
    p = Sums()
    with pytest.raises(ValueError, match=f"^nonsmooth: {kind.__name__} cannot take L1.*, because .*; use MEHA"):
        p.start(kind(), nonsmooth=meha.nonsmooth.L1(0.1))
    if kind is PBGDFree:
        run = p.start(kind(alpha=0.1, beta=5.0), y_set=Box(-1.0, 1.0))
        run.step(next(p.indices()))
        assert float(run.y.abs().max()) == 1
        return
    with pytest.raises(ValueError, match=f"^y_set: {kind.__name__} cannot take Box.*, because .*; use MEHA"):
        p.start(kind(), y_set=Box(-1.0, 1.0))


def test_pbgd_free_needs_an_upper_objective_with_x():
    q = Quadratic()
    problem = meha.Problem(lambda x, y, batch: (y - 1).square().sum(), q.lower)
    run = PBGDFree(alpha=0.1, beta=0.1).start(problem, torch.zeros(2).double(), torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"^x: PBGDFree moves it along F_x, and upper does not depend on x; use VPBGD or F2SA"):
        run.step(next(Indices(2, upper=4, lower=4)))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        *((kind, dict(share=value)) for kind in (MASOBA, MRBO, SUSTAIN, FSLA) for value in (0.0, 1.5, -0.1, math.nan, "all")),
        *((kind, dict(system_steps=value)) for kind in (StocBiO, AmIGO, BSA, TTSA, MRBO, SUSTAIN, VRBO) for value in (0, 1.5)),
        *((kind, dict(inner_steps=value)) for kind in (StocBiO, AmIGO, BSA, TTSA, PBGDFree, VRBO) for value in (0, True)),
        *((kind, dict(seed=-1)) for kind in (SPABA, BSA, TTSA, SUSTAIN)),
        *((kind, dict(period=value)) for kind in (SRBA, VRBO) for value in (0, 2.5)),
        *((SPABA, dict(probability=value)) for value in (0.0, 1.1)),
        *((kind, {name: -0.1}) for kind in KINDS for name in ("alpha", "beta")),
        *((kind, dict(eta=0.0)) for kind in KINDS if kind is not PBGDFree),
        (PBGDFree, dict(c=0.0)),
    ],
    ids=str,
)
def test_bad_arguments_are_named(kind, arguments):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}: "):
        kind(**arguments)


def test_a_memory_that_does_not_fit_is_refused(monkeypatch):
    p = Sums()
    needed = 8 * (5 * 6 + 7 * 9)
    monkeypatch.setattr("meha.methods.stochastic.saba.available", lambda device: needed - 1)
    run = p.start(SABA(**RATES))
    message = r"the memory of SABA for 4 groups of upper and 6 of lower examples needs 744.0 bytes, and 743.0 bytes are left"
    with pytest.raises(ValueError, match=message):
        run.step(next(p.indices(groups=True)))
    monkeypatch.setattr("meha.methods.stochastic.saba.available", lambda device: needed)
    run.step(next(p.indices(groups=True)))
    assert run.state.bytes == needed


def test_a_damaged_memory_changes_nothing():
    p = Sums()
    run, source = p.start(SABA(**RATES)), p.indices(groups=True)
    run.step(next(source))
    before, damaged = run.state_dict(), run.state_dict()
    damaged["state"]["upper_memory"] = {"0": torch.zeros(4, 2, dtype=torch.float64)}
    damaged["state"]["y"] = {}
    with pytest.raises(ValueError, match=r"^y: the state is for another variable"):
        run.load_state_dict(damaged)
    assert same(run.state_dict(), before)


@pytest.mark.slow
@pytest.mark.parametrize("method", [SABA(**CONSTANT), SRBA(**CONSTANT, period=40)], ids=lambda method: method.name)
def test_a_compiled_run_is_the_run(method):
    """solve takes groups of steps at once, and those on all examples by themselves."""
    q, ends = Quadratic(), []
    x0, y0 = torch.zeros(q.n, dtype=torch.float64), torch.zeros(q.m, dtype=torch.float64)
    for compile in (False, True):
        batches = Indices(4, upper=q.upper_count, lower=q.lower_count, groups=True)
        options = dict(batches=batches, max_steps=700, tol=None, compile=compile)
        ends.append(meha.solve(meha.Problem(q.upper, q.lower), x0, y0, method, **options))
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=0, atol=1e-10)
    assert ends[0].counts == ends[1].counts
