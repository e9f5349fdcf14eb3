"""AdaptiveSOBA: a transcription in numpy, resumed and compiled runs, units, rare coordinates, sets, memory, refusals."""

import math

import numpy as np
import pytest
import torch
from test_compiled import without_compiler
from test_stochastic_family import same
from torch.nn.functional import cross_entropy, softplus

import meha
from meha.methods.stochastic import AdaptiveSOBA
from meha.methods.stochastic import adaptive_soba as named
from meha.problem.loaders import Draw, Indices
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
        self.low, self.high = self.x0 - 8e-3, self.x0 + 12e-3
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


def measuring(k):
    """Whether step k measures curvature."""
    return k < named.MEASURED or k % named.PERIOD == 0


def measurements(k):
    """The number of steps before step k that do."""
    return sum(measuring(j) for j in range(k))


class Recalled:
    """The last derivatives of one kind on the groups, and the regression of new ones on them."""

    def __init__(self):
        self.last, self.covariance, self.variance = {}, 0.0, 0.0

    def __call__(self, new, group, valid=True):
        here = 0.0
        if group in self.last:
            here = self.last[group] - sum(self.last.values()) / len(self.last)
        if group in self.last and valid:
            self.covariance += named.SLOW * (new @ here - self.covariance)
            self.variance += named.SLOW * (here @ here - self.variance)
        weight = min(1.0, max(0.0, self.covariance / self.variance)) if self.variance else 0.0
        if valid:
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
        return random_signs(k, n) / math.sqrt(n) if measurements(k) % 2 else self.eigenvector

    def learn(self, k, probe, product):
        n, moving = len(probe), k >= named.MEASURED
        forget, signed = min(0.5, named.SLOW * max(1.0, self.L / named.WRONG)), measuring(k) and measurements(k) % 2
        if signed:  # random signs: n probe_i product_i has the mean H_ii, and n product_i^2 that of the squared row
            weight = max(forget, 1 / ((measurements(k) + 1) // 2))
            self.diagonal = (1 - weight) * self.diagonal + weight * n * probe * product
            self.rows = (1 - weight) * self.rows + weight * n * product**2
        P = self.metric()

        def growth(vector, image):
            return math.sqrt((image**2 / P).sum() / (vector**2 * P).sum()) if vector.any() else 0.0

        if measuring(k) and not signed:
            self.L = max(growth(probe, product), (1 - forget) * self.L if moving else 0.0)
            self.eigenvector = product / P / np.linalg.norm(product / P)
        elif not signed:
            self.L = max(self.L, growth(probe, product))
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
    length, opened, waited, energy, usual = 0, 0.0, 0.0, 0.0, 0.0
    lags, last_lag = {"y": 0.0, "v": 0.0}, 0.0
    for k, batch in enumerate(batches):
        i, j = batch.upper.numpy(), batch.lower.numpy()
        # derivatives: second ones by differences over a length that the rounding error determines
        reach = max(reach, np.linalg.norm(y))
        h = np.finfo(float).eps ** named.DIFFERENCE * (reach or 1.0)
        (F_x, F_y), (f_x, f_y) = p.F(x, y, i), p.f(x, y, j)
        size = np.linalg.norm(v)
        probe = curvature.probe(k) if measuring(k) else v / (size or 1.0)
        ahead = p.f(x, y + h * probe, j)
        product = (ahead[1] - f_y) / h
        f_xv, f_yv = size / h * (ahead[0] - f_x), size * product
        P = curvature.learn(k, probe, product)
        direction_of_x = F_x + f_xv
        moving, follows, t = k >= named.MEASURED, not measuring(k), k - named.MEASURED
        if groups:
            u, w = (int(g) for g in batch.group)
            f_y, f_yv, F_y = memory["f_y"](f_y, w), memory["f_yy"](f_yv, w, follows), memory["F_y"](F_y, u)
        # y and v, with rates by the agreement of successive directions
        for name, direction in (("y", f_y), ("v", f_yv + F_y)):
            if moving if name == "y" else follows:
                agreement = angle(means[name], direction, P)
                lags[name] += (agreement - lags[name]) / named.WINDOW
                step = rates[name] / curvature.L * direction / P
                y, v = (y - step, v) if name == "y" else (y, v - step)
                rate = rates[name] * math.exp(named.GAIN * (agreement - named.AGREEMENT))
                rates[name] = min(1.0, max(named.SLOWEST, rate))
            if follows or name == "y":
                means[name] = (1 - named.SLOW) * means[name] + named.SLOW * direction
        # x, whose numbers are all touched by each of these batches
        if follows:
            newest = 1.0 if not square.any() else max(1 / (t + 1), 1 / (1 + named.SPAN))
            bounded = direction_of_x**2
            if k >= 2 * named.MEASURED:
                bounded = np.minimum(bounded, named.JUMP**2 * square)
            square = (1 - newest) * square + newest * bounded
            D = np.sqrt(square)
            gate = min(1.0, max(0.0, 2 - math.exp(math.log(curvature.L) - curvature.usual) / named.STALE))
            moved = x - gate * a * np.clip(direction_of_x / D, -named.LONGEST, named.LONGEST)
            moved = np.minimum(np.maximum(moved, p.low), p.high)
            seen = (x - moved) / (gate * a) * D if gate else np.zeros(N)
            past, energy = past + seen, energy + (seen**2 / square).sum()
            x, length, opened = moved, length + 1, opened + gate
            if length >= max(named.WINDOW, named.GROWING * t):
                if before is not None and before.any():
                    agreement = angle(past, before, square)
                    signal = min(1.0, max(0.0, (past**2 / square).sum() / energy - 1))
                    lag = max(0.0, *lags.values())
                    trend = agreement - named.GOAL
                    if agreement > named.GOAL:
                        trend = -lag if lag > named.RISING * last_lag else max(0.0, trend - (1 - signal) / math.sqrt(N))
                    if usual and energy / length > named.JUMP**2 * usual:
                        a *= named.RETREAT
                    elif opened / length > 0.5:
                        fall = named.DECAY * length / (t + 1)
                        a *= math.exp(signal * trend - (1 - signal) * fall)
                    elif waited <= 0.5:
                        a *= named.RETREAT
                    waited = 1 - opened / length
                last_lag = max(0.0, *lags.values())
                usual, before, past, length, opened, energy = energy / length, past, np.zeros(N), 0, 0.0, 0.0
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


def compiled_and_eager(groups):
    """x, y and the counts after 3 eager and 58 compiled steps, and after as many eager ones."""
    p, ends = Sums(), []
    for traced in (True, False):
        run, source = p.start(), p.indices(groups)
        for _ in range(3):
            run.step(next(source))
        if traced:
            stepper, group = Traced(run), [(next(source), None, "") for _ in range(58)]
            assert stepper.alike(58) == 58
            stepper.compile()
            assert stepper.fit(group) == 58
            stepper(group)
        while not traced and run.k < 61:
            run.step(next(source))
        ends.append((run.x, run.y, run.counts))
    return ends


@pytest.mark.parametrize("groups", [True, False], ids=["groups", "plain"])
def test_traced_steps_are_the_steps(groups, monkeypatch):
    without_compiler(monkeypatch.setattr)
    found, expected = compiled_and_eager(groups)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-9)
    assert found[2] == expected[2]


@pytest.mark.slow
def test_compiled_steps_are_the_steps():
    """Compiled functions round otherwise, which differences of gradients magnify."""
    found, expected = compiled_and_eager(groups=True)
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
        x, y = (value.double().numpy() for value in (solution.x, solution.y))
        return max(np.abs(x - self.x).max(), np.abs(y - self.y).max() / self.scale)


def test_units_do_not_matter():
    """Of F, f and y. The length of differences is relative to y, or 1 while y is zero, which a quadratic f does not show."""
    plain = Quadratic()
    solution = plain.solve()
    assert plain.error(solution) < 0.03  # the start is wrong by 3
    for other in (Quadratic(upper=1e3, lower=1e-3), Quadratic(scale=100.0)):
        found = other.solve()
        assert not torch.equal(found.y, solution.y)  # it was another computation
        assert float((found.x - solution.x).abs().max()) < 1e-4
        assert other.error(found) < 0.03


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 0.03), (torch.bfloat16, 0.05)], ids=str)
def test_coarse_numbers(dtype, error):
    q = Quadratic(dtype=dtype)
    solution = q.solve(steps=300)
    assert solution.x.dtype == solution.y.dtype == dtype
    assert solution.status is meha.Status.FINISHED
    assert q.error(solution) < error


@pytest.mark.parametrize("own", [0.05, 0.0], ids=["F of x and y", "F of y alone"])
def test_batches_without_noise(own):
    """Converges to the closed form, with and without a direct influence of x on F."""
    q = Quadratic(own=own)
    x0, y0 = torch.full((q.n,), 3.0, dtype=q.dtype), torch.zeros(q.m, dtype=q.dtype)
    everything = Draw(torch.arange(q.upper_count), torch.arange(q.lower_count))
    solution = meha.solve(meha.Problem(q.upper, q.lower), x0, y0, batches=[everything], max_steps=1200, tol=None)
    assert q.error(solution) < 5e-3  # the start is wrong by 3
    assert solution.counts.upper == 1200
    assert solution.counts.lower == 2 * 1200
    assert solution.counts.hvp == 0
    assert "memory" not in solution.report


def test_dicts_are_the_vector_of_their_parts():
    p, ends = Sums(), []
    nested = meha.Problem(
        lambda x, y, batch: p.upper(torch.cat([x["a"], x["b"][0]]), torch.cat([y[0].reshape(-1), y[1]]), batch),
        lambda x, y, batch: p.lower(torch.cat([x["a"], x["b"][0]]), torch.cat([y[0].reshape(-1), y[1]]), batch),
    )
    x0, y0 = p.t["x0"], p.t["y0"] + 0.1
    parts = {"a": x0[:2].clone(), "b": [x0[2:].clone()]}, [y0[:4].reshape(2, 2).clone(), y0[4:].clone()]
    for problem, x, y in ((meha.Problem(p.upper, p.lower), x0, y0), (nested, *parts)):
        ends.append(meha.solve(problem, x, y, batches=p.indices(), max_steps=STEPS, tol=None))
    plain, other = ends
    assert not torch.equal(plain.x, x0)
    torch.testing.assert_close(torch.cat([other.x["a"], other.x["b"][0]]), plain.x, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat([other.y[0].reshape(-1), other.y[1]]), plain.y, rtol=0, atol=1e-9)


# Coordinates that are drawn rarely, and sets


def test_weights_of_examples_move_once_per_pass_as_far_as_others():
    """A weight is drawn in every 40th step, or in every one; half of the labels are random.

    The rate grows faster without noise, so that the way of x is compared in units of the sum of the rates. Without the share
    of numbers that a batch touches, this would be 40 times less.
    """
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(5, 3, generator=generator).double()
    inputs = torch.randn(640 + 192, 5, generator=generator).double()
    labels = (inputs @ truth).argmax(1)
    given = labels[:640].clone()
    random = torch.rand(640, generator=generator) < 0.5
    given[random] = torch.randint(0, 3, (int(random.sum()),), generator=generator)
    wrong = given != labels[:640]

    def lower(x, y, batch):
        losses = cross_entropy(inputs[batch.lower] @ y, given[batch.lower], reduction="none")
        return (x[batch.lower].sigmoid() * losses).mean() + 0.01 * y.square().sum()

    problem = meha.Problem(lambda x, y, b: cross_entropy(inputs[640 + b.upper] @ y, labels[640 + b.upper]), lower)
    ways = []
    for sizes in (16, (192, 640)):
        run = AdaptiveSOBA().start(problem, torch.zeros(640).double(), torch.zeros(5, 3).double())
        source, rates = Indices(sizes, upper=192, lower=640), 0.0
        for k in range(200):
            info = run.step(next(source))
            rates += info["rate"] if k >= named.MEASURED else 0.0
            if k == 60:  # after one pass; later, the rates are those of other places
                ways.append(float(run.state.point.value["x"].abs().mean()) / rates)
        right = run.x[~wrong][:, None] > run.x[wrong]
        assert float(right.double().mean()) > 0.9
    assert 1 / 3 < ways[0] / ways[1] < 3


@pytest.mark.parametrize("domain", [Box(0.0, 0.5), Simplex()], ids=["box", "simplex"])
def test_answers_on_the_boundary_of_a_set(domain):
    """y = d x and F = |y - t|^2 / 2, with noise in both: x is t / d, clipped, or shifted by a multiplier and clipped at 0."""
    d, t = np.array([1.0, 0.5, 2.0, 1.5]), np.array([0.9, 0.6, -0.3, 0.35])
    expected = np.clip(t / d, 0.0, 0.5)
    if isinstance(domain, Simplex):
        low, high = -10.0, 10.0
        for _ in range(60):  # bisection for the multiplier with which the sum is 1
            middle = (low + high) / 2
            expected = np.maximum((d * t - middle) / d**2, 0.0)
            low, high = (middle, high) if expected.sum() > 1 else (low, middle)
    rng = np.random.default_rng(0)
    noise = [torch.tensor(0.3 * (part - part.mean(0))) for part in (rng.normal(size=(40, 4)), rng.normal(size=(60, 4)))]
    scale, target = torch.tensor(d), torch.tensor(t)
    problem = meha.Problem(
        lambda x, y, batch: 0.5 * (y - target - noise[0][batch.upper]).square().sum(1).mean(),
        lambda x, y, batch: 0.5 * (y - scale * x - noise[1][batch.lower]).square().sum(1).mean(),
        x_set=domain,
    )
    x0, y0 = torch.full((4,), 0.25, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    batches = Indices(10, upper=40, lower=60, groups=True)
    solution = meha.solve(problem, x0, y0, batches=batches, max_steps=400, tol=None)
    assert solution.method.name == "AdaptiveSOBA"
    assert np.abs(solution.x.numpy() - expected).max() < 0.01


# The memory, and what is refused


def test_a_memory_that_does_not_fit_is_left_out(monkeypatch):
    """6 groups of upper and 6 of lower examples: rows of 5 numbers for F_y, f_y and f_yy [v], twice of which must be left."""
    p, needed = Sums(), 8 * 5 * (6 + 6 + 6)
    reports, ends = [], []
    for left in (2 * needed - 1, 2 * needed):
        monkeypatch.setattr(named, "available", lambda device, left=left: left)
        solution = meha.solve(p.problem(), p.t["x0"], p.t["y0"], batches=p.indices(), max_steps=40, tol=None)
        reports.append(solution.report["memory"])
        ends.append(solution)
    none = "none of the derivatives on groups of examples, because 720.0 bytes do not fit"
    assert reports[0] == none
    assert reports[1].startswith("derivatives on every group of examples, ")
    run, source = p.start(), p.indices()
    for _ in range(40):
        batch = next(source)
        run.step(Draw(batch.upper, batch.lower))
    assert torch.equal(ends[0].y, run.y)  # the steps are those without groups
    assert not torch.equal(ends[0].y, ends[1].y)


def test_problems_that_are_refused():
    p = Sums()
    for argument, part in (("nonsmooth", meha.nonsmooth.L1(0.1)), ("y_set", Box(-1.0, 1.0))):
        problem = meha.Problem(p.upper, p.lower, **{argument: part})
        with pytest.raises(
            ValueError, match=f"^{argument}: AdaptiveSOBA cannot take {type(part).__name__}, because .*; use MEHA"
        ):
            AdaptiveSOBA().start(problem, p.t["x0"], p.t["y0"])
    with pytest.raises(ValueError, match=r"batches: AdaptiveSOBA uses one batch in a step, got draws=2; leave draws out"):
        p.start().step(next(Indices(2, upper=24, lower=30, draws=2)))


def test_modules_are_refused():
    problem = meha.Problem(lambda x, y, b: y(b).square().sum(), lambda x, y, b: (y(b) - x).square().sum())
    for x, y, name in ((torch.ones(1), torch.nn.Linear(2, 1), "y"), (torch.nn.Linear(2, 1), torch.ones(1), "x")):
        with pytest.raises(TypeError, match=rf"^{name}: AdaptiveSOBA takes tensors, .*; use StochasticMEHA\(\)\.$"):
            AdaptiveSOBA().start(problem, x, y)
    assert meha.solve(problem, torch.ones(1), torch.nn.Linear(2, 1), batches=[torch.ones(3, 2)], max_steps=1).steps == 1
