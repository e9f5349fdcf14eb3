"""AdaptiveSOBA: a transcription in numpy, resumed and compiled runs, units, rare coordinates, sets, memory, refusals."""

import math

import numpy as np
import pytest
import torch
from test_stochastic_family import same
from torch.nn.functional import cross_entropy, softplus

import meha
from meha.methods.stochastic import AdaptiveSOBA
from meha.methods.stochastic import adaptive_soba as named
from meha.problem.loaders import Indices
from meha.problem.sets import Box, Simplex
from meha.running.compiled import Traced

STEPS, N = 60, 5


class Sums:
    """Means over examples, f strongly convex in y but not quadratic: in torch for the library, in numpy with derivatives."""

    counts, sizes = (24, 30), (4, 5)

    def __init__(self):
        rng = np.random.default_rng(3)
        self.p, self.q = rng.normal(size=(24, N)), rng.normal(size=24)
        self.r = 0.5 * rng.normal(size=(24, N))
        self.a, self.c = rng.normal(size=(30, N)), rng.normal(size=(30, N))
        self.x0, self.y0 = np.linspace(-0.3, 0.4, N), np.zeros(N)
        self.low, self.high = self.x0 - 4e-4, self.x0 + 6e-4
        self.t = {name: torch.tensor(value) for name, value in vars(self).items()}

    def upper(self, x, y, batch):
        p, q, r = (self.t[name][batch.upper] for name in "pqr")
        return 0.5 * (p @ y - q).square().mean() + (r @ x).sin().mean()

    def lower(self, x, y, batch):
        a, c = self.t["a"][batch.lower], self.t["c"][batch.lower]
        return (softplus(a @ y) + (c @ x) * (a @ y)).mean() + 0.5 * (x.exp() * y.square()).sum()

    def F(self, x, y, i):
        """The gradients of F in x and y on these examples."""
        p, q, r = self.p[i], self.q[i], self.r[i]
        return (np.cos(r @ x)[:, None] * r).mean(0), ((p @ y - q)[:, None] * p).mean(0)

    def f(self, x, y, i):
        a, c = self.a[i], self.c[i]
        f_x = ((a @ y)[:, None] * c).mean(0) + 0.5 * np.exp(x) * y**2
        return f_x, ((1 / (1 + np.exp(-a @ y)) + c @ x)[:, None] * a).mean(0) + np.exp(x) * y

    def problem(self):
        return meha.Problem(self.upper, self.lower, x_set=Box(self.t["low"], self.t["high"]))

    def indices(self, groups=True):
        return Indices(self.sizes, upper=self.counts[0], lower=self.counts[1], groups=groups)

    def start(self):
        return AdaptiveSOBA().start(self.problem(), self.t["x0"], self.t["y0"])


# The transcription: from the docstring, and the sentences about the numbers


def angle(a, b, metric):
    """The cosine in the inner product <a, b / metric>."""
    scale = math.sqrt((a * a / metric).sum() * (b * b / metric).sum())
    return (a * b / metric).sum() / scale if scale else 0.0


def random_signs(k, n):
    by_coordinate, by_step, spread = named.MIXING
    mixed = np.sin(np.arange(n) * by_coordinate + (k % named.PROBES) * by_step) * spread
    return np.where(mixed % 1.0 < 0.5, -1.0, 1.0)


class Recalled:
    """The last derivatives of one kind on the groups, and the regression of new ones on them."""

    def __init__(self):
        self.last, self.covariance, self.variance = {}, 0.0, 0.0

    def __call__(self, new, group):
        here = 0.0
        if group in self.last:
            here = self.last[group] - sum(self.last.values()) / len(self.last)
            self.covariance += named.MEAN * (new @ here - self.covariance)
            self.variance += named.MEAN * (here @ here - self.variance)
        weight = min(1.0, max(0.0, self.covariance / self.variance)) if self.variance else 0.0
        self.last[group] = new
        return new - weight * here


class Curvature:
    """The metric P and L."""

    def __init__(self, n):
        start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
        self.eigenvector = start / np.linalg.norm(start)
        self.diagonal, self.rows, self.L, self.usual = np.zeros(n), np.zeros(n), 0.0, 0.0

    def metric(self):
        P = np.maximum(self.diagonal, named.ROW * np.sqrt(self.rows))
        P = P + named.FLOOR * P.max()
        return P if P.max() > 0 else np.ones_like(P)

    def probe(self, k):
        n = len(self.diagonal)
        return random_signs(k, n) / math.sqrt(n) if k % 2 else self.eigenvector

    def learn(self, k, probe, product, v, along_v):
        n, moving = len(probe), k >= named.MEASURED
        forget = min(0.5, named.SLOW * max(1.0, self.L / named.WRONG))
        if k % 2:  # random signs: n probe_i product_i has the mean H_ii, and n product_i^2 that of the squared row
            weight = max(forget, 1 / ((k + 1) // 2))
            self.diagonal = (1 - weight) * self.diagonal + weight * n * probe * product
            self.rows = (1 - weight) * self.rows + weight * n * product**2
        P = self.metric()

        def growth(vector, image):
            return math.sqrt((image**2 / P).sum() / (vector**2 * P).sum()) if vector.any() else 0.0

        if k % 2 == 0:
            self.L = max(growth(probe, product), (1 - forget) * self.L if moving else 0.0)
            self.eigenvector = product / P / np.linalg.norm(product / P)
        if moving:
            self.L = max(self.L, growth(v, along_v))
        rise = math.log(self.L) - self.usual
        self.usual += named.SLOW * min(rise, 0.5) if moving else rise
        return P


def transcription(p, batches, groups):
    """Yield the answer, and whether a bound was active, after every step."""
    x, y, v = p.x0.copy(), p.y0.copy(), np.zeros(N)
    answer = x, y
    curvature, memory = Curvature(N), {name: Recalled() for name in ("f_y", "f_yy", "F_y")}
    rates, means = {"y": 1.0, "v": 1.0}, {"y": np.zeros(N), "v": np.zeros(N)}
    a, reach, square, past, before = named.FIRST * np.abs(x).mean(), 0.0, np.zeros(N), np.zeros(N), None
    length, opened, waited = 0, 0.0, 0.0
    for k, batch in enumerate(batches):
        i, j = batch.upper.numpy(), batch.lower.numpy()
        # derivatives: second ones by differences over a length that the rounding error determines
        reach = max(reach, np.linalg.norm(y))
        h = np.finfo(float).eps ** named.DIFFERENCE * (reach or 1.0)
        (F_x, F_y), (f_x, f_y) = p.F(x, y, i), p.f(x, y, j)
        f_xv, f_yv, size = np.zeros(N), np.zeros(N), np.linalg.norm(v)
        if size:
            f_xv, f_yv = (size / h * (ahead - here) for ahead, here in zip(p.f(x, y + h * v / size, j), (f_x, f_y), strict=True))
        probe = curvature.probe(k)
        product = (p.f(x, y + h * probe, j)[1] - f_y) / h
        P = curvature.learn(k, probe, product, v, f_yv)
        direction_of_x = F_x + f_xv
        if groups:
            u, w = (int(g) for g in batch.group)
            f_y, f_yv, F_y = memory["f_y"](f_y, w), memory["f_yy"](f_yv, w), memory["F_y"](F_y, u)
        moving, t = k >= named.MEASURED, k - named.MEASURED
        # y and v, with rates by the agreement of successive directions
        for name, direction in (("y", f_y), ("v", f_yv + F_y)):
            if moving:
                step = rates[name] / curvature.L * direction / P
                y, v = (y - step, v) if name == "y" else (y, v - step)
                rate = rates[name] * math.exp(named.GAIN * (angle(means[name], direction, P) - named.AGREEMENT))
                rates[name] = min(1.0, max(named.SLOWEST, rate))
            means[name] = (1 - named.MEAN) * means[name] + named.MEAN * direction
        # x, whose numbers are all touched by each of these batches
        if moving:
            newest = 1.0 if t == 0 else max(1 / (t + 1), 1 / (1 + named.SPAN))
            bounded = direction_of_x**2
            if k >= 2 * named.MEASURED:
                bounded = np.minimum(bounded, named.JUMP**2 * square)
            square = (1 - newest) * square + newest * bounded
            D = np.sqrt(square)
            gate = min(1.0, max(0.0, 2 - math.exp(math.log(curvature.L) - curvature.usual) / named.STALE))
            moved = x - gate * a * np.clip(direction_of_x / D, -named.LONGEST, named.LONGEST)
            moved = np.minimum(np.maximum(moved, p.low), p.high)
            past = past + ((x - moved) / (gate * a) * D if gate else 0.0)
            x, length, opened = moved, length + 1, opened + gate
            if length >= max(named.WINDOW, named.GROWING * t):
                if before is not None and before.any():
                    agreement = angle(past, before, square)
                    speed = named.GROWTH if agreement > named.GOAL else named.DECLINE
                    if opened / length > 0.5:
                        a *= math.exp(speed * (agreement - named.GOAL))
                    elif waited <= 0.5:
                        a *= named.RETREAT
                    waited = 1 - opened / length
                before, past, length, opened = past, np.zeros(N), 0, 0.0
        newest = min(1.0, (named.AVERAGE + 1) / (max(t, 0) + named.AVERAGE))
        answer = tuple(mean + newest * (now - mean) for mean, now in zip(answer, (x, y), strict=True))
        yield *answer, a, int(((x == p.low) | (x == p.high)).sum())


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "plain"])
def test_equals_the_transcription(groups):
    p = Sums()
    run, source = p.start(), p.indices(groups)
    batches = [next(source) for _ in range(STEPS)]
    rates, active = set(), []
    for batch, (x, y, a, at_bounds) in zip(batches, transcription(p, batches, groups), strict=True):
        run.step(batch)
        assert np.abs(run.x.numpy() - x).max() < 1e-8
        assert np.abs(run.y.numpy() - y).max() < 1e-8
        rates.add(a)
        active.append(at_bounds)
    assert len(rates) > 1  # windows were compared
    assert 0 < max(active) < N  # X was felt, and was not all
    assert np.abs(y).max() > 0.1
    assert ("memory" in run.method.report(run)) is groups


# Resumed and compiled


def test_a_resumed_run_is_the_run(tmp_path):
    """Bit for bit, with a memory: through state_dict, and through checkpoints of solve."""
    p = Sums()
    run, source = p.start(), p.indices()
    for _ in range(37):
        run.step(next(source))
    path = tmp_path / "state.pt"
    torch.save((run.state_dict(), source.state_dict()), path)
    saved, position = torch.load(path, weights_only=True)
    other, again = p.start(), p.indices()
    other.load_state_dict(saved)
    again.load_state_dict(position)
    for _ in range(30):
        assert dict(run.step(next(source))) == dict(other.step(next(again)))
    assert same(run.state_dict(), other.state_dict())
    assert not same(run.state_dict(), saved)
    ends = []
    for pieces in ((67,), (37, 67)):
        for steps in pieces:
            place = tmp_path / f"{len(pieces)}.pt"
            options = dict(batches=p.indices(), max_steps=steps, tol=None, checkpoint=place)
            solution = meha.solve(p.problem(), p.t["x0"], p.t["y0"], **options)
        ends.append(solution)
    assert ends[0].method.name == "AdaptiveSOBA"  # by default
    for solution in ends:
        assert torch.equal(solution.x, run.x)
        assert torch.equal(solution.y, run.y)
        assert solution.counts == run.counts
        assert solution.report["memory"].startswith("derivatives on every group")


def compiled_and_eager(compile, groups):
    """x, y and the counts after 61 steps, of which 58 are compiled, and after as many eager ones."""
    p, ends = Sums(), []
    for traced in (True, False):
        run, source, stepper, taken = p.start(), p.indices(groups), None, 0
        for _ in range(3):
            run.step(next(source))
        while run.k < STEPS + 1:
            if traced and stepper is None:
                stepper = Traced(run, unrolled=2)
                compile(stepper)
            if traced and stepper.alike(2) == 2:
                stepper([next(source), next(source)])
                taken += 2
            else:
                run.step(next(source))
        assert taken == (58 if traced else 0)
        ends.append((run.x, run.y, run.counts))
    return ends


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "plain"])
def test_traced_steps_are_the_steps(groups):
    def interpret(stepper):  # the graph as it is, without the compiler, which takes seconds
        stepper._function = stepper._trace.unroll(2)

    found, expected = compiled_and_eager(interpret, groups)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-10)
    assert found[2] == expected[2]


@pytest.mark.slow
def test_compiled_steps_are_the_steps():
    """Compiled functions round otherwise, which differences of gradients magnify."""
    found, expected = compiled_and_eager(Traced.compile, groups=True)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-8)
    assert found[2] == expected[2]


# Units, precision, structures


class Quadratic:
    """Least squares on both levels, whose solution is that of linear equations."""

    n, m, upper_count, lower_count = 2, 3, 40, 60

    def __init__(self, upper=1.0, lower=1.0, scale=1.0, own=0.05, dtype=torch.float64):
        rng = np.random.default_rng(1)
        a, c, b = rng.normal(size=(60, self.m)), rng.normal(size=(60, self.n)), rng.normal(size=60)
        p, q = rng.normal(size=(40, self.m)), rng.normal(size=40)
        self.t = {name: torch.tensor(value).to(dtype) for name, value in dict(a=a, b=b, c=c, p=p, q=q).items()}
        self.units, self.scale, self.own, self.dtype = (upper, lower), scale, own, dtype
        # y(x) = S x + s, and F is half the mean square of p y - q, plus own |x|^2
        H = a.T @ a / 60 + 0.5 * np.eye(self.m)
        S, s = (np.linalg.solve(H, a.T @ part / 60) for part in (c, b))
        P = p @ S
        self.x = np.linalg.solve(P.T @ P / 40 + 2 * own * np.eye(self.n), P.T @ (q - p @ s) / 40)
        self.y = scale * (S @ self.x + s)

    def upper(self, x, y, batch):
        p, q = self.t["p"][batch.upper], self.t["q"][batch.upper]
        own = self.own * x.square().sum() if self.own else 0.0
        return self.units[0] * (0.5 * (p @ (y / self.scale) - q).square().mean() + own)

    def lower(self, x, y, batch):
        a, b, c = (self.t[name][batch.lower] for name in "abc")
        y = y / self.scale
        return self.units[1] * (0.5 * (a @ y - b - c @ x).square().mean() + 0.25 * y.square().sum())

    def solve(self, steps=600, method=None, **options):
        x0, y0 = torch.full((self.n,), 3.0, dtype=self.dtype), torch.zeros(self.m, dtype=self.dtype)
        batches = Indices((8, 10), upper=self.upper_count, lower=self.lower_count, groups=True)
        problem = meha.Problem(self.upper, self.lower)
        return meha.solve(problem, x0, y0, method, batches=batches, max_steps=steps, tol=None, **options)

    def error(self, solution):
        return max(np.abs(solution.x.double().numpy() - self.x).max(), np.abs(solution.y.double().numpy() / self.scale - self.y / self.scale).max())
