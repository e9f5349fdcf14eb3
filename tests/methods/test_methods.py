"""Every method against a transcription of its formulas in numpy; costs, refusals, checkpoints, and what all of them share."""

import dataclasses
import gc
import io
import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from smooth import M, N, Smooth
from structures import OnlyOnce
from test_linear import krylov

import meha
from meha.methods import BAMM, BDA, BOME, CG, DARTS, F2SA, GALET, IAPTT, NS, RHG, VPBGD
from meha.problem.nonsmooth import L1
from meha.problem.schedules import InversePower, Ramp
from meha.problem.sets import Box

STEPS = 8
SEEDS = (0, 1)
X = Box(-0.4, 0.5)


def alpha(k):
    return 0.4 / (k + 1) ** 0.3


def beta(k):
    return 0.4 / (k + 1) ** 0.1


def eta(k):
    return 0.3 / (k + 1) ** 0.2


class Interval:
    """Projection on an interval, and where its derivative is 1."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __call__(self, u):
        return np.clip(u, self.low, self.high)

    def inside(self, u):
        return (self.low < u) & (u < self.high)


IN_X, FREE, IN_Y = Interval(-0.4, 0.5), Interval(-math.inf, math.inf), Interval(-0.25, 0.3)

# Transcriptions: generators of (x, y, numbers) after each step.


def size(d):
    return np.linalg.norm(d)


def advance(run, batches):
    return [dict(run.step(batch)) for batch in batches]


def forward(p, x, y, steps, a, b, Y):
    """y_0, ..., y_T of y <- proj_Y(y - a_t F_y - b_t f_y), and the points before their projections."""
    ys, us = [y], []
    for t in range(steps):
        us.append(ys[t] - a[t] * p.F_y(x, ys[t]) - b[t] * p.f_y(x, ys[t]))
        ys.append(Y(us[t]))
    return ys, us


def backward(p, x, ys, us, a, b, Y, terms):
    """d F(x, y_T) / dx and / dy_{T - terms}, through the last steps."""
    h, q = p.F_x(x, ys[-1]), p.F_y(x, ys[-1])
    for t in list(reversed(range(len(us))))[:terms]:
        q = q * Y.inside(us[t])
        h = h - (a[t] * p.F_xy(x, ys[t]) + b[t] * p.f_xy(x, ys[t])) @ q
        q = q - (a[t] * p.F_yy(x, ys[t]) + b[t] * p.f_yy(x, ys[t])) @ q
    return h, q


def rhg(p, x, y, Y, steps=4, terms=4, warm=True, mu=lambda t: 0.0, upper_beta=beta):
    y0 = y
    for k in range(STEPS):
        weights = [mu(t) * upper_beta(k) for t in range(steps)], [(1 - mu(t)) * beta(k) for t in range(steps)]
        ys, us = forward(p, x, y if warm else y0, steps, *weights, Y)
        h, _ = backward(p, x, ys, us, *weights, Y, terms)
        numbers, y = dict(upper=p.F(x, ys[-1]), d_x=size(h)), ys[-1]
        x = IN_X(x - alpha(k) * h)
        yield x, y, numbers


def iaptt(p, x, y, Y, steps=4):
    z = y
    for k in range(STEPS):
        weights = [0.0] * steps, [beta(k)] * steps
        ys, us = forward(p, x, z, steps, *weights, Y)
        values = [p.F(x, y) for y in ys]
        tbar = 1 + int(np.argmax(values[1:]))
        h, q = backward(p, x, ys[: tbar + 1], us[:tbar], *weights, Y, tbar)
        x, z = IN_X(x - alpha(k) * h), Y(z - eta(k) * q)
        yield x, ys[-1], dict(upper=values[-1], pessimistic=tbar, d_x=size(h))


def descended(p, x, y, steps, step):
    for _ in range(steps):
        y = y - step * p.f_y(x, y)
    return y


def implicit(p, x, y, Y, solve, steps=4):
    """h = F_x - f_xy v, with v = solve(f_yy, F_y, k)."""
    for k in range(STEPS):
        y = descended(p, x, y, steps, beta(k))
        h = p.F_x(x, y) - p.f_xy(x, y) @ solve(p.f_yy(x, y), p.F_y(x, y), k)
        numbers = dict(upper=p.F(x, y), d_x=size(h))
        x = IN_X(x - alpha(k) * h)
        yield x, y, numbers


def neumann(H, b, s, terms):
    return s * sum(np.linalg.matrix_power(np.eye(len(b)) - s * H, j) @ b for j in range(terms + 1))


def least_squares(H, b, s, terms):
    w = 0 * b
    for _ in range(terms):
        w = w - s * H @ (b + H @ w)
    return -w


def bome(p, x, y, Y, u, control, steps=3):
    for k in range(STEPS):
        z = descended(p, x, y, steps, eta(k))
        q, q_x, q_y = p.f(x, y) - p.f(x, z), p.f_x(x, y) - p.f_x(x, z), p.f_y(x, y)
        square = q_x @ q_x + q_y @ q_y
        phi = u * square if control == "norm" else u * q
        lam = max(0.0, (phi - p.F_x(x, y) @ q_x - p.F_y(x, y) @ q_y) / (square + 1e-8))
        d_x, d_y = p.F_x(x, y) + lam * q_x, p.F_y(x, y) + lam * q_y
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), gap=q, c=lam, d_x=size(d_x))
        x, y = IN_X(x - alpha(k) * d_x), y - beta(k) * d_y
        yield x, y, numbers


def f2sa(p, x, y, Y, c, steps=3):
    z = y
    for k in range(STEPS):
        s = min(1, 1 / c(k))
        for _ in range(steps):
            z = Y(z - eta(k) * p.f_y(x, z))
            y = Y(y - beta(k) * s * (p.F_y(x, y) + c(k) * p.f_y(x, y)))
        d_x = s * (p.F_x(x, y) + c(k) * (p.f_x(x, y) - p.f_x(x, z)))
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), gap=p.f(x, y) - p.f(x, z), c=c(k), d_x=size(d_x))
        x = IN_X(x - alpha(k) * d_x)
        yield x, y, numbers


def vpbgd(p, x, y, Y, c, steps=2):
    z = y
    for k in range(STEPS):
        s = min(1, 1 / c(k)) if c(k) else 1
        for _ in range(steps):
            z = Y(z - eta(k) * p.f_y(x, z))
        d_x = s * (p.F_x(x, y) + c(k) * (p.f_x(x, y) - p.f_x(x, z)))
        d_y = s * (p.F_y(x, y) + c(k) * p.f_y(x, y))
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), gap=p.f(x, y) - p.f(x, z), c=c(k), d_x=size(d_x))
        x, y = IN_X(x - alpha(k) * d_x), Y(y - beta(k) * d_y)
        yield x, y, numbers


def bamm(p, x, y, Y, mu, steps):
    """``steps(k, mu_k)`` gives the steps of v and x; None for the exact line search on v."""
    v = 0 * y
    for k in range(STEPS):
        w = mu(k)
        psi_yy, psi_xy = (w * d + (1 - w) * e for d, e in ((p.F_yy(x, y), p.f_yy(x, y)), (p.F_xy(x, y), p.f_xy(x, y))))
        rest = psi_yy @ v - p.F_y(x, y)
        d_x, d_y = p.F_x(x, y) - psi_xy @ v, w * p.F_y(x, y) + (1 - w) * p.f_y(x, y)
        e, a = steps(k, w)
        numbers = dict(upper=p.F(x, y), lower=p.f(x, y), mu=w, d_x=size(d_x))
        v = v - (rest @ rest / (rest @ psi_yy @ rest) if e is None else e) * rest
        x, y = IN_X(x - a * d_x), y - beta(k) * d_y
        yield x, y, numbers


def darts(p, x, y, Y, order, epsilon=0.05):
    for k in range(STEPS):
        at = y
        if order == 2:
            at = y - beta(k) * p.f_y(x, y)
            d = p.F_y(x, at)
            e = epsilon / size(d)
        h = p.F_x(x, at)
        if order == 2:
            h = h - beta(k) * (p.f_x(x, y + e * d) - p.f_x(x, y - e * d)) / (2 * e)
        upper = p.F(x, at)
        x = IN_X(x - alpha(k) * h)
        numbers = dict(upper=upper, lower=p.f(x, y), d_x=size(h))
        y = y - beta(k) * p.f_y(x, y)
        yield x, y, numbers


def falling(t):
    return 0.8 / (t + 1)


def fading(k):
    return 0.9 / (k + 1) ** 0.1


def growing(k):
    return 0.4 * (k + 1) ** 0.7


RAMP = Ramp(0.0, 3.0, steps=6)
AB = dict(alpha=alpha, beta=beta)
ABE = AB | dict(eta=eta)

TRANSCRIPTIONS = {
    "RHG, warm": (RHG(**AB, inner_steps=4), rhg),
    "RHG, cold": (RHG(**AB, inner_steps=4, warm_start=False), partial(rhg, warm=False)),
    "RHG, truncated": (RHG(**AB, inner_steps=4, terms=2), partial(rhg, terms=2)),
    "BDA, constant": (BDA(**AB, inner_steps=4, mu=0.3), partial(rhg, mu=lambda t: 0.3)),
    "BDA, falling, own step": (
        BDA(**AB, inner_steps=4, mu=falling, upper_beta=eta, warm_start=False),
        partial(rhg, mu=falling, upper_beta=eta, warm=False),
    ),
    "BDA, default": (BDA(**AB, inner_steps=4), partial(rhg, mu=lambda t: 0.5 / (t + 1))),
    "IAPTT": (IAPTT(**ABE, inner_steps=4), iaptt),
    "CG": (CG(**AB, inner_steps=4, cg_steps=3), partial(implicit, solve=lambda H, b, k: krylov(H, b, 3))),
    "CG, damped": (
        CG(**AB, inner_steps=4, cg_steps=2, damping=0.7),
        partial(implicit, solve=lambda H, b, k: krylov(H + 0.7 * np.eye(len(b)), b, 2)),
    ),
    "NS": (NS(**ABE, inner_steps=4, terms=3), partial(implicit, solve=lambda H, b, k: neumann(H, b, eta(k), 3))),
    "NS, step of y": (NS(**AB, inner_steps=4, terms=3), partial(implicit, solve=lambda H, b, k: neumann(H, b, beta(k), 3))),
    "GALET": (
        GALET(**ABE, inner_steps=4, terms=3),
        partial(implicit, solve=lambda H, b, k: least_squares(H, b, eta(k), 3)),
    ),
    "BOME, norm": (BOME(**ABE, inner_steps=3, u=0.2), partial(bome, u=0.2, control="norm")),
    "BOME, gap": (BOME(**ABE, inner_steps=3, u=0.3, control="gap"), partial(bome, u=0.3, control="gap")),
    "F2SA": (F2SA(**ABE, inner_steps=3, c=growing), partial(f2sa, c=growing)),
    "F2SA, default": (F2SA(**ABE, inner_steps=3), partial(f2sa, c=lambda k: (k + 1) ** (1 / 3))),
    "VPBGD": (VPBGD(**ABE, inner_steps=2, c=RAMP), partial(vpbgd, c=lambda k: 3 * min(k / 6, 1))),
    "DARTS, order 1": (DARTS(**AB, order=1), partial(darts, order=1)),
    "DARTS, order 2": (DARTS(**AB, order=2, epsilon=0.05), partial(darts, order=2)),
    "BAMM, mu = 0": (
        BAMM(**ABE, mu=0.0, strategy=None),
        partial(bamm, mu=lambda k: 0.0, steps=lambda k, w: (eta(k), alpha(k))),
    ),
    "BAMM, line search": (
        BAMM(**AB, mu=0.0, strategy=None, line_search=True),
        partial(bamm, mu=lambda k: 0.0, steps=lambda k, w: (None, alpha(k))),
    ),
    "BAMM, line search, s3": (
        BAMM(beta=beta, mu=0.3, line_search=True, tau=0.2),
        partial(bamm, mu=lambda k: 0.3, steps=lambda k, w: (None, (k + 1) ** -0.3 * w**3 * beta(k))),
    ),
    "BAMM, s3, steps of its own": (
        BAMM(**ABE, mu=0.2, strategy="s3"),
        partial(bamm, mu=lambda k: 0.2, steps=lambda k, w: (eta(k), alpha(k))),
    ),
    **{
        f"BAMM, {name}": (
            BAMM(beta=beta, mu=fading, strategy=name, tau=0.2),
            partial(
                bamm,
                mu=fading,
                steps=lambda k, w, e=e, a=a: ((k + 1) ** -0.1 * w**e * beta(k), (k + 1) ** -0.3 * w**a * beta(k)),
            ),
        )
        for name, e, a in (("s1", 2, 7), ("s2", 1, 5), ("s3", 0, 3))
    },
}
WITH_Y_SET = ["RHG, warm", "RHG, truncated", "BDA, falling, own step", "IAPTT", "F2SA", "VPBGD"]
CASES = [(name, FREE) for name in TRANSCRIPTIONS] + [(name, IN_Y) for name in WITH_Y_SET]


def transcribed(method, transcription, Y, seed):
    """A run and the transcription from the same start, step by step."""
    p = Smooth(seed)
    x0, y0 = IN_X(p.x0), Y(p.y0)
    problem = p.problem(x_set=X, y_set=None if Y is FREE else Box(Y.low, Y.high))
    run = method.start(problem, torch.tensor(x0), torch.tensor(y0))
    for x, y, numbers in transcription(p, x0, y0, Y):
        yield run.step(), run, x, y, numbers


@pytest.mark.parametrize(("name", "Y"), CASES, ids=[name + (", Y" if Y is IN_Y else "") for name, Y in CASES])
def test_equals_the_transcription(name, Y):
    check_transcription(*TRANSCRIPTIONS[name], Y)


def check_transcription(method, transcription, Y):
    bound_x = bound_y = moved = 0
    for seed in SEEDS:
        for info, run, x, y, numbers in transcribed(method, transcription, Y, seed):
            assert dict(info) == pytest.approx(numbers, rel=1e-8, abs=1e-10)
            assert np.abs(run.x.numpy() - x).max() < 1e-10
            assert np.abs(run.y.numpy() - y).max() < 1e-10
            bound_x += int((~IN_X.inside(x)).sum())
            bound_y += int((~Y.inside(y)).sum())
        moved += size(x - IN_X(Smooth(seed).x0)) + size(y - Y(Smooth(seed).y0))
    assert moved > 0.3
    assert 0 < bound_x < len(SEEDS) * STEPS * N
    assert bound_y or Y is FREE


def test_the_cases_are_not_one_sided():
    """BOME's multipliers come to zero in some steps and are positive in others; tbar and the weights vary."""

    def values(name, column):
        return np.array([[n[column] for *_, n in transcribed(*TRANSCRIPTIONS[name], FREE, seed)] for seed in SEEDS])

    for name in ("BOME, norm", "BOME, gap"):
        assert values(name, "c").min() == 0 < values(name, "c").max(), name
    assert len(np.unique(values("IAPTT", "pessimistic"))) > 1
    assert growing(0) < 1 < growing(STEPS)
    assert RAMP(0) < 1 < RAMP(STEPS)


# Costs

T, K = 4, 2
GIVEN = dict(alpha=0.1, beta=0.2, eta=0.15)
COSTS = [  # gradients of F, of f, Hessian-vector products; calls of upper, of lower (the last step and the sweep share a graph)
    (RHG(alpha=0.1, beta=0.2, inner_steps=T), (1, T, T), (1, 2 * T - 1)),
    (RHG(alpha=0.1, beta=0.2, inner_steps=1), (1, 1, 1), (1, 1)),
    (RHG(alpha=0.1, beta=0.2, inner_steps=T, warm_start=False), (1, T, T), (1, 2 * T - 1)),
    (RHG(alpha=0.1, beta=0.2, inner_steps=T, terms=K), (1, T, K), (1, T + K - 1)),
    (BDA(alpha=0.1, beta=0.2, inner_steps=T), (T + 1, T, T), (2 * T, 2 * T - 1)),
    (BDA(alpha=0.1, beta=0.2, inner_steps=T, mu=0.0), (1, T, T), (1, 2 * T - 1)),
    (IAPTT(**GIVEN, inner_steps=T), (1, T, "tbar"), (T + 1, "T + tbar")),
    (CG(alpha=0.1, beta=0.2, inner_steps=T, cg_steps=K), (1, T, K + 1), (1, T + 1)),
    (CG(alpha=0.1, beta=0.2, inner_steps=T, cg_steps=K, damping=0.1), (1, T, K + 1), (1, T + 1)),
    (NS(alpha=0.1, beta=0.2, inner_steps=T, terms=K), (1, T, K + 1), (1, T + 1)),
    (GALET(**GIVEN, inner_steps=T, terms=K), (1, T, 2 * K + 1), (1, T + 1)),
    (BOME(**GIVEN, inner_steps=T), (1, T + 2, 0), (1, T + 2)),
    (BOME(**GIVEN, inner_steps=T, control="gap"), (1, T + 2, 0), (1, T + 2)),
    (F2SA(**GIVEN, inner_steps=T), (T + 1, 2 * T + 2, 0), (T + 1, 2 * T + 2)),
    (VPBGD(**GIVEN, inner_steps=T), (1, T + 2, 0), (1, T + 2)),
    (BAMM(beta=0.2), (1, 1, 1), (2, 2)),
    (BAMM(**GIVEN, mu=0.0, strategy=None), (1, 1, 1), (1, 2)),
    (BAMM(beta=0.2, line_search=True), (1, 1, 2), (2, 2)),
    (DARTS(alpha=0.1, beta=0.2, order=1), (1, 1, 0), (1, 1)),
    (DARTS(alpha=0.1, beta=0.2), (1, 4, 0), (1, 4)),
]


@pytest.mark.parametrize(("method", "costs", "calls"), COSTS, ids=[repr(i) + case[0].name for i, case in enumerate(COSTS)])
def test_costs_of_a_step(method, costs, calls):
    check_costs(method, costs, calls)


def check_costs(method, costs, calls):
    p, called = Smooth(1), dict(upper=0, lower=0)

    def counted(name):
        def call(x, y):
            called[name] += 1
            return getattr(p, name)(x, y)

        return call

    run = method.start(meha.Problem(counted("upper"), counted("lower")), p.t["x0"], p.t["y0"])
    assert called == dict(upper=0, lower=0)
    for _ in range(3):
        before, called_before = dataclasses.astuple(run.counts), dict(called)
        info = run.step()
        tbar = info.get("pessimistic", 0)
        known = {"tbar": tbar, "T + tbar": T + tbar - (tbar == T)}
        spent = tuple(b - a for a, b in zip(before, dataclasses.astuple(run.counts), strict=True))
        assert spent == tuple(known.get(cost, cost) for cost in costs)
        assert tuple(called[n] - called_before[n] for n in called) == tuple(known.get(count, count) for count in calls)


def test_cg_spends_no_more_products_than_it_needs():
    problem = meha.problems.strong_convex(5)
    run = CG(alpha=0.1, beta=0.2, inner_steps=T, cg_steps=20).start(problem, problem.x0, problem.y0)
    run.step()
    assert (run.counts.upper, run.counts.lower, run.counts.hvp) == (1, T, 2)


def test_newton_counts_a_hessian_as_its_rows():
    """One Newton step per lower solve on a quadratic: two gradients of f, and a Hessian only once."""
    p = Smooth(1, bend=0.0)
    run = p.start(meha.Default(verify=False))
    run.step()
    first = dataclasses.replace(run.counts)
    assert first.hvp >= M
    while run.verdict is None:
        run.step()
    assert run.counts.hvp - first.hvp < M * run.k  # fewer than a Hessian in each step


@pytest.mark.parametrize("kind", [BOME, F2SA, VPBGD, DARTS, partial(DARTS, order=1), RHG, CG, NS, BAMM, GALET])
@pytest.mark.parametrize("automatic", [False, True])
def test_first_order_methods_take_no_double_backward(kind, automatic):
    problem = meha.Problem(meha.problems.strong_convex(3).upper, lambda x, y: OnlyOnce.apply(y) - (x * y).sum())
    start = torch.zeros(3, dtype=torch.float64)
    steps = {} if automatic else {name: 0.1 for name in ("alpha", "beta", "eta") if name in fields(kind)}
    run = kind(**steps).start(problem, start, start)
    if kind in (RHG, CG, NS, BAMM, GALET):  # the objective does tell a double backward
        with pytest.warns(meha.TrainingWarning, match="double backward"):
            run.step()
        return
    for _ in range(5):
        run.step()
    assert float(run.x.abs().max()) > 0.05


# What is refused


def fields(kind):
    return {field.name for field in dataclasses.fields(getattr(kind, "func", kind))}


KINDS = [RHG, BDA, IAPTT, CG, NS, GALET, BOME, F2SA, VPBGD, BAMM, DARTS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problems_that_are_refused(kind):
    p = Smooth(0)
    y0 = torch.zeros_like(p.t["y0"])
    with pytest.raises(ValueError, match=f"^nonsmooth: {kind.__name__} cannot take L1.*, because .*; use MEHA"):
        kind().start(p.problem(nonsmooth=L1(0.1)), p.t["x0"], y0)
    constrained = p.problem(y_set=Box(-1.0, 1.0))
    if kind in (RHG, BDA, IAPTT, F2SA, VPBGD):
        kind().start(constrained, p.t["x0"], y0).step()
    else:
        with pytest.raises(ValueError, match=f"^y_set: {kind.__name__} cannot take Box.*, because .*; use MEHA"):
            kind().start(constrained, p.t["x0"], y0)


SGD = partial(torch.optim.SGD, lr=0.1)
BAD_STEPS = [0.0, -0.1, math.nan, math.inf, "fast", True]
BAD_COUNTS = [0, -1, 2.5, "two", True]
BAD = [
    *((kind, {name: value}, name) for kind in KINDS for name in ("alpha", "beta", "eta") for value in BAD_STEPS),
    *((kind, {"inner_steps": value}, "inner_steps") for kind in KINDS for value in BAD_COUNTS),
    *((kind, {"terms": value}, "terms") for kind in (RHG, BDA, NS, GALET) for value in BAD_COUNTS),
    *((CG, {"cg_steps": value}, "cg_steps") for value in BAD_COUNTS),
    *((kind, dict(alpha=0.1, x_optimizer=SGD), "alpha and x_optimizer") for kind in KINDS),
    *((kind, dict(beta=0.1, y_optimizer=SGD), "beta and y_optimizer") for kind in KINDS),
    *((kind, dict(x_optimizer="adam"), "x_optimizer") for kind in KINDS),
    *((kind, dict(y_optimizer=0.1), "y_optimizer") for kind in KINDS),
    *((kind, dict(inner_steps=3, terms=4), "terms") for kind in (RHG, BDA)),
    *((kind, dict(mu=value), "mu") for kind in (BDA, BAMM) for value in (1.0, 2.0, -0.1, math.nan, lambda t: 1.5)),
    *((kind, dict(c=value), "c") for kind in (F2SA, VPBGD) for value in BAD_STEPS),
    *((BOME, dict(u=value), "u") for value in BAD_STEPS),
    *((DARTS, dict(epsilon=value), "epsilon") for value in BAD_STEPS),
    *((DARTS, dict(order=value), "order") for value in (0, 3, "2", None)),
    *((BOME, dict(control=value), "control") for value in ("size", None, 1)),
    *((BAMM, dict(strategy=value), "strategy") for value in ("s4", "S1", 3)),
    (BAMM, dict(mu=0.0), "strategy"),
    (BAMM, dict(tau=-0.1), "tau"),
    (BDA, dict(upper_beta=-0.1), "upper_beta"),
    (IAPTT, dict(warm_start=False), "warm_start"),
    (CG, dict(damping=-0.1), "damping"),
    (CG, dict(damping=math.nan), "damping"),
    (BAMM, dict(tau="slow"), "tau"),
    (BAMM, dict(tau=math.nan), "tau"),
    (BAMM, dict(mu="small"), "mu"),
    (BDA, dict(mu="small"), "mu"),
]
BAD = [case for case in BAD if all(name in fields(case[0]) for name in case[1])]


def describe(case):
    if isinstance(case, dict):
        return ", ".join(f"{name}={'function' if callable(value) else repr(value)}" for name, value in case.items())
    return getattr(case, "__name__", "")


@pytest.mark.parametrize(("kind", "arguments", "named"), BAD, ids=describe)
def test_bad_arguments_are_named(kind, arguments, named):
    with pytest.raises((ValueError, TypeError), match=f"^{named}: "):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (RHG, dict(beta=lambda k: -0.1), "beta: the schedule gave"),
        (RHG, dict(alpha=lambda k: 0.0), "alpha: the schedule gave"),
        (IAPTT, dict(eta=lambda k: math.nan), "eta: the schedule gave"),
        (NS, dict(eta=lambda k: math.inf), "eta: the schedule gave"),
        (GALET, dict(eta=lambda k: -1.0), "eta: the schedule gave"),
        (BDA, dict(mu=lambda t: 0.5 * (t + 1)), "mu: must be in .* at step 1"),
        (BDA, dict(upper_beta=lambda k: -0.1), "upper_beta: the schedule gave"),
        (BAMM, dict(mu=lambda k: 0.9 if k == 0 else 1.0), "mu: must be in .* at step 1"),
        (F2SA, dict(c=lambda k: -1.0), "c: the schedule gave"),
        (VPBGD, dict(c=lambda k: -1.0), "c: "),
        (VPBGD, dict(c=lambda k: math.nan), "c: "),
    ],
    ids=describe,
)
def test_schedules_are_checked_as_they_go(kind, arguments, named):
    steps = {name: 0.1 for name in ("alpha", "beta", "eta") if name in fields(kind)}
    run = Smooth(0).start(kind(**{**steps, **arguments}))
    with pytest.raises(ValueError, match=f"^{named}"):
        advance(run, [None, None])


# What all methods share

METHODS = {
    "RHG": partial(RHG, inner_steps=3),
    "RHG, cold": partial(RHG, inner_steps=3, warm_start=False),
    "RHG, truncated": partial(RHG, inner_steps=3, terms=1),
    "BDA": partial(BDA, inner_steps=3),
    "IAPTT": partial(IAPTT, inner_steps=3),
    "CG": partial(CG, inner_steps=3, cg_steps=3, damping=3.0),
    "NS": partial(NS, inner_steps=3, terms=3),
    "GALET": partial(GALET, inner_steps=3, terms=2),
    "BOME": partial(BOME, inner_steps=2),
    "BOME, gap": partial(BOME, inner_steps=2, control="gap", u=5.0),
    "F2SA": partial(F2SA, inner_steps=2),
    "VPBGD": partial(VPBGD, inner_steps=2, c=InversePower(1.0, power=0.2)),
    "BAMM": BAMM,
    "BAMM, line search": partial(BAMM, mu=0.0, strategy=None, line_search=True),
    "DARTS, order 1": partial(DARTS, order=1),
    "DARTS, order 2": DARTS,
    "MEHA": partial(meha.MEHA, gamma=2.0, c=1.0),
    "SOBA": meha.stochastic.SOBA,
    "MASOBA": meha.stochastic.MASOBA,
    "StocBiO": partial(meha.stochastic.StocBiO, inner_steps=3, system_steps=3),
    "AmIGO": partial(meha.stochastic.AmIGO, inner_steps=3, system_steps=2),
    "MRBO": partial(meha.stochastic.MRBO, system_steps=3),
    "FSLA": meha.stochastic.FSLA,
    "BSA": partial(meha.stochastic.BSA, inner_steps=3, system_steps=2),
}
every_method = pytest.mark.parametrize("name", METHODS)


def with_steps(name, **steps):
    """The method with small steps, except where an optimizer takes them."""
    make = METHODS[name]
    given = {n: steps.get(n, 0.05) for n in ("alpha", "beta", "eta") if n in fields(make)}
    optimizers = {n: v for n, v in steps.items() if n.endswith("_optimizer") and n in fields(make)}
    taken = {"x_optimizer": "alpha", "y_optimizer": "beta"}
    return make(**{n: v for n, v in given.items() if n not in {taken[o] for o in optimizers}}, **optimizers)


INPUTS = torch.linspace(-2, 2, 24).reshape(12, 2).sin()
TARGETS = INPUTS.sum(1, keepdim=True).cos()
BATCHES = [slice(0, 4), slice(2, 6), slice(4, 8)]


def network(seed, *more):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), *more, torch.nn.Tanh(), torch.nn.Linear(3, 1))


CONSTANTS = meha.theory.Constants(L_F=5.0, L_f=2.6, rho_f=1.4, F_xx=0.02, F_yy=5.0, F_xy=0.0, f_yy=2.5, f_xy=0.4)


def network_problem(use_x=True, constants=None):
    """Weights of training examples and a penalty; batches are slices of the examples."""

    def upper(x, y, batch):
        value = (y(INPUTS[8:]) - TARGETS[8:]).square().mean()
        return value + 0.01 * (x["more"][0]["decay"] + 2).square() if use_x else value

    def lower(x, y, batch):
        fit = x["weights"][batch].sigmoid()[:, None] * (y(INPUTS[batch]) - TARGETS[batch]).square()
        return fit.mean() + x["more"][0]["decay"].exp() * sum(p.square().sum() for p in y.parameters())

    x = {"weights": torch.zeros(8), "more": [{"decay": torch.tensor(-3.0)}]}
    return meha.Problem(upper, lower, constants=constants), x


def same(a, b):
    """Equal, bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(u, v) for u, v in zip(a, b, strict=True))
    return a == b


def tensor_run(name, shift=0.0):
    p = Smooth(0)
    method = with_steps(name, alpha=alpha, beta=0.1)
    return method.start(p.problem(x_set=Box(-9.0, 9.0)), p.t["x0"] + shift, p.t["y0"] - shift), [None] * 3


def network_run(name, shift=0.0):
    """A module with buffers, batches, optimizers for x and y, and the other steps chosen (others for another shift)."""
    adam, sgd = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    optimizers = {"x_optimizer": adam, "y_optimizer": sgd if "DARTS" in name else adam}
    method = METHODS[name](**{n: v for n, v in optimizers.items() if n in fields(METHODS[name])})
    problem, x = network_problem(constants=dataclasses.replace(CONSTANTS, f_yy=2.5 + shift))
    return method.start(problem, x, network(int(shift), torch.nn.BatchNorm1d(3))), BATCHES


@every_method
@pytest.mark.parametrize("start", [tensor_run, network_run])
def test_restored_bit_for_bit(name, start):
    run, batches = start(name)
    advance(run, batches)
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    expected = advance(run, batches)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other, _ = start(name, shift=1.0)
    other.step(batches[0])
    other.load_state_dict(saved)
    assert same(other.state_dict(), saved)
    assert other.k == 3
    assert advance(other, batches) == expected
    assert same(other.state_dict(), run.state_dict())
    assert not same(other.state_dict(), saved)


def test_states_of_other_methods_are_refused():
    runs = [tensor_run(name)[0] for name in METHODS]
    for run, other in [*pairwise(runs), (runs[-1], runs[0])]:
        run.step()
        before = other.state_dict()
        with pytest.raises(ValueError, match=r"^state: was written by .*; start the run with the same method"):
            other.load_state_dict(run.state_dict())
        assert same(other.state_dict(), before)


@every_method
def test_structures_batches_and_steps_that_were_left_out(name):
    """Nested dicts, a module and batches in single precision, with chosen steps."""
    estimated = name in ("RHG", "IAPTT", "BOME", "BAMM", "DARTS, order 2")  # one of each kind; it takes a while
    problem, x = network_problem(constants=None if estimated else CONSTANTS)
    given, model = {"weights": x["weights"].clone(), "decay": x["more"][0]["decay"].clone()}, network(1)
    run = METHODS[name]().start(problem, x, model)
    infos = advance(run, 2 * BATCHES)
    assert 0 < run.method.beta < 1e3
    assert name == "BAMM" or run.method.alpha is not None
    assert run.y is model
    assert all(math.isfinite(v) for info in infos for v in info.values())
    assert same({"weights": x["weights"], "decay": x["more"][0]["decay"]}, given)
    assert run.x["weights"].dtype == run.x["more"][0]["decay"].dtype == torch.float32
    assert not torch.equal(run.x["more"][0]["decay"], given["decay"])
    assert torch.equal(run.x["weights"], given["weights"]) == (name == "DARTS, order 1")  # F itself does not use them
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@every_method
@pytest.mark.parametrize(("upper_scale", "lower_scale"), [(100.0, 1.0), (1.0, 100.0)], ids=["steep F", "steep f"])
def test_chosen_steps_fit_both_levels(name, upper_scale, lower_scale):
    """On quadratics, steps that were left out do not make a run explode, however F and f are scaled."""
    p = Smooth(0, bend=0.0)
    upper, lower = [upper_scale * d for d in (p.P.T @ p.P, p.Q.T @ p.Q, p.P.T @ p.Q)], [lower_scale * d for d in (p.H, p.B)]
    F_xx, F_yy, F_xy, f_yy, f_xy = (np.linalg.norm(d, 2) for d in upper + lower)
    problem = meha.Problem(
        lambda x, y: upper_scale * p.upper(x, y),
        lambda x, y: lower_scale * p.lower(x, y),
        constants=meha.theory.Constants(
            L_F=F_xx + F_yy, L_f=lower_scale + f_yy + f_xy, rho_f=0.0, F_xx=F_xx, F_yy=F_yy, F_xy=F_xy, f_yy=f_yy, f_xy=f_xy
        ),
    )
    run = METHODS[name]().start(problem, p.t["x0"], p.t["y0"])
    uppers = [info["upper"] / upper_scale for info in advance(run, [None] * 12)]
    assert max(uppers) < 30 * p.F(p.x0, p.y0)


@every_method
def test_copies_with_another_step(name):
    """A copy with one number changed is the method with that number."""
    for step in ("alpha", "beta"):
        assert dataclasses.replace(METHODS[name](**{step: 0.1}), **{step: 0.2}) == METHODS[name](**{step: 0.2})


@every_method
def test_optimizers_take_the_steps(name):
    """SGD takes the plain steps; Adam moves x by its rate, the sign of the direction deciding where to."""
    p = Smooth(0)
    plain, sgd, adam = (
        p.start(with_steps(name, **optimizers))
        for optimizers in (
            {},
            {n: partial(torch.optim.SGD, lr=0.05) for n in ("x_optimizer", "y_optimizer")},
            {"x_optimizer": partial(torch.optim.Adam, lr=0.01)},
        )
    )
    for k in range(3):
        plain.step(), sgd.step(), adam.step()
        if k == 0:
            assert torch.allclose((adam.x - p.t["x0"]).abs(), torch.full((N,), 0.01, dtype=torch.float64), rtol=1e-4)
            assert torch.equal((adam.x - p.t["x0"]).sign(), (plain.x - p.t["x0"]).sign())
    assert torch.allclose(plain.x, sgd.x, rtol=0, atol=1e-13)
    assert torch.allclose(plain.y, sgd.y, rtol=0, atol=1e-13)
    assert all(leaf.grad is None for run in (sgd, adam) for leaf in run.state.x.leaves + run.state.y.leaves)
    assert torch.equal(p.t["x0"], torch.tensor(p.x0))


def test_memory_does_not_grow_with_steps():
    runs = [tensor_run(name)[0] for name in METHODS]

    def tensors():
        gc.collect()
        return sum(1 for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    for run in runs:
        for _ in range(5):
            run.step()
    before = tensors()
    for run in runs:
        for _ in range(45):
            run.step()
    assert tensors() == before
    assert all(leaf.grad is None and leaf.grad_fn is None for run in runs for leaf in run.state.x.leaves + run.state.y.leaves)


def test_cg_breaks_down_on_a_singular_hessian():
    problem = meha.problems.merely_convex(3)
    solution = meha.solve(problem, problem.x0, problem.y0, CG(alpha=0.1, beta=0.1))
    assert solution.status is meha.Status.BROKE_DOWN
    assert solution.status.value == "broke down"
    assert "the Hessian of lower in y is not positive definite" in solution.message
    assert "damping" in solution.message
    assert bool(torch.isfinite(solution.x).all() and torch.isfinite(solution.y).all())
    assert solution.steps == 1  # from x0 the right-hand side has no part in the flat direction, from x1 it has
    assert not torch.equal(solution.x, problem.x0)
    fine = meha.solve(problem, problem.x0, problem.y0, CG(alpha=0.1, beta=0.1, damping=0.1), max_steps=20)
    assert fine.status is meha.Status.MAX_STEPS


@every_method
def test_an_upper_objective_without_x(name):
    problem, x = network_problem(use_x=False)
    run = with_steps(name).start(problem, x, network(0))
    if name == "DARTS, order 1":
        with pytest.raises(ValueError, match=r"^order: DARTS of order 1 .* upper does not depend on x; use order=2"):
            run.step(BATCHES[0])
        return
    infos = advance(run, 2 * BATCHES)
    assert all(math.isfinite(v) for info in infos for v in info.values())
    assert bool((run.x["weights"] != 0).all())
    assert float(run.x["more"][0]["decay"]) != -3


ONES = torch.ones(2, dtype=torch.float64)


@every_method
@pytest.mark.parametrize("automatic", [False, True])
def test_an_x_without_influence_is_an_error(name, automatic):
    problem = meha.Problem(lambda x, y: (y - 2).square().sum(), lambda x, y: (y - 1).square().sum())
    method = METHODS[name]() if automatic else with_steps(name)
    with pytest.raises(ValueError, match="^order: " if name == "DARTS, order 1" else "^x: .*upper.*lower"):
        method.start(problem, ONES, 2 * ONES).step()


@every_method
@pytest.mark.parametrize("automatic", [False, True])
def test_an_objective_without_y_is_an_error(name, automatic):
    method = METHODS[name]() if automatic else with_steps(name)
    lower = meha.Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (x - y.detach()).square().sum())
    with pytest.raises(ValueError, match=r"^lower: does not depend on y"):
        method.start(lower, ONES, 2 * ONES).step()
    if name != "DARTS, order 1":  # which does not look at F_y
        upper = meha.Problem(lambda x, y: torch.ones((), dtype=ONES.dtype), lambda x, y: (x - y).square().sum())
        with pytest.raises(ValueError, match=r"^upper: does not depend on y.* not on x either"):
            method.start(upper, ONES, 2 * ONES).step()


def test_darts_looks_ahead_as_its_optimizer_steps():
    """Momentum, weight decay and a learning rate for each group, over several steps, against a hand computation."""

    def factory(leaves):
        a, b = leaves
        options = {"momentum": 0.9, "weight_decay": 0.2}
        return torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.4}], lr=1.0, **options)

    problem = meha.Problem(
        lambda x, y: 0.5 * (y[0] - 1).square().sum() + 0.5 * (y[1] + 2).square().sum() + 0.5 * x.square().sum(),
        lambda x, y: 0.5 * (y[0] - x).square().sum() + (y[1] - x).square().sum(),
    )
    one = torch.ones(1, dtype=torch.float64)
    run = meha.DARTS(alpha=0.3, y_optimizer=factory).start(problem, one, [2 * one, 3 * one])
    x, y, lr, buffer = 1.0, np.array([2.0, 3.0]), np.array([0.1, 0.4]), None
    curve, target = np.array([1.0, 2.0]), np.array([1.0, -2.0])
    for _ in range(4):
        slope = curve * (y - x) + 0.2 * y
        ahead = y - lr * (slope if buffer is None else slope + 0.9 * buffer)
        x = x - 0.3 * (x + (lr * curve * (ahead - target)).sum())  # f_xy = -curve
        slope = curve * (y - x) + 0.2 * y
        buffer = slope if buffer is None else 0.9 * buffer + slope
        y = y - lr * buffer
        run.step()
        assert float(run.x) == pytest.approx(x, rel=1e-8)
        assert [float(leaf) for leaf in run.y] == pytest.approx(list(y), rel=1e-8)
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(ValueError, match="y_optimizer: the step ahead of DARTS knows no nesterov"):
        meha.DARTS(alpha=0.3, y_optimizer=nesterov).start(problem, one, [one, one])


def test_iaptt_moves_z_with_the_step_of_x_by_default():
    p = Smooth(0)
    left_out, given = (p.start(meha.IAPTT(alpha=0.1, beta=0.1, **eta)) for eta in ({}, {"eta": 0.1}))
    for run in (left_out, given):
        run.step(), run.step()
    assert torch.equal(left_out.state.z.leaves[0], given.state.z.leaves[0])


def test_bamm_says_when_mu_leaves_its_strategy_without_steps():
    p = Smooth(0)
    run = p.start(meha.BAMM(beta=0.1, mu=lambda k: max(0.0, 0.5 - 0.25 * k)))
    run.step(), run.step()
    with pytest.raises(ValueError, match="strategy: its steps are powers of mu, which is 0 at step 2"):
        run.step()


def test_schedules_that_end_can_be_saved():
    """A table of steps has no value at the steps by which checkpoints tell schedules apart."""
    p, table = Smooth(0), [0.1] * 5
    run = p.start(meha.VPBGD(alpha=lambda k: table[k], beta=0.1, eta=0.1))
    run.step()
    other = p.start(meha.VPBGD(alpha=lambda k: table[k], beta=0.1, eta=0.1))
    other.load_state_dict(run.state_dict())
    assert other.k == 1


def test_mu_of_bda_is_a_schedule_of_inner_steps():
    """It stands still for some t and moves later, which says nothing about the steps of the run."""
    p = Smooth(0)
    for method, settled in ((BDA, True), (BAMM, False)):
        run = p.start(method(mu=lambda k: 0.5 if k < 8 else 0.1))
        for _ in range(2):
            run.step()
        assert run.settled is settled
