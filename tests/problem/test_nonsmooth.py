"""Non-smooth terms: values and proximal maps against numpy formulas, optimality, weights, parts, errors, and the set Y."""

from collections import namedtuple
from functools import partial
from math import inf, prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structures import fill, flat, leaves, size
from torch import nn

from meha.problem.nonsmooth import L1, MCP, SCAD, ElasticNet, GroupL2, NonNegativeL1, Nuclear, SparseGroup, Sum, Zero
from meha.problem.problem import Problem
from meha.problem.sets import AffineSet, Box, HalfSpace, L1Ball, L2Ball, LinfBall, NonNegative, Product, Reals, Simplex
from meha.tensors.variables import Variable

SEEDS = st.integers(0, 2**31 - 1)
SHARES = st.sampled_from([0.1, 0.5, 0.9])  # of the largest step
FACTORS = st.sampled_from([0.1, 0.6, 1.7, 5.0])
many = settings(max_examples=25, deadline=None, database=None)


# Penalties by hand, of single coordinates: SCAD and MCP as integrals of their slopes.


def absolute(w, y):
    return w * np.abs(y)


def half_line(w, y):
    return np.where(y < 0, inf, w * y)


def elastic(w, v, y):
    return w * np.abs(y) + 0.5 * v * y**2


def scad(a, w, y):
    """The integral of w up to w, then of max(a w - t, 0) / (a - 1)."""
    t = np.abs(y)
    tail = (a * w - w) ** 2 - np.maximum(a * w - np.maximum(t, w), 0) ** 2
    return w * np.minimum(t, w) + tail / (2 * (a - 1))


def mcp(a, w, y):
    """The integral of max(w - t / a, 0)."""
    return a / 2 * (w**2 - np.maximum(w - np.abs(y) / a, 0) ** 2)


# Values g(x, y) by hand: functions of flat numpy vectors.


def each(penalty, *weights):
    """Sum a penalty over the coordinates, with weights that are numbers, vectors or functions of x."""

    def single(x, y):
        return penalty(*(w(x) if callable(w) else w for w in weights), y)

    def value(x, y):
        return single(x, y).sum()

    value.single = single
    return value


def nuclear(*pieces):
    """Pieces (shape, weight function), one after another."""
    cuts = np.cumsum([prod(shape) for shape, _ in pieces])[:-1]

    def value(x, y):
        matrices = [piece.reshape(shape) for piece, (shape, _) in zip(np.split(y, cuts), pieces, strict=True)]
        return sum(w(x) * np.linalg.svd(m, compute_uv=False).sum() for m, (_, w) in zip(matrices, pieces, strict=True))

    return value


def grouped(groups, weight):
    def value(x, y):
        weights = np.broadcast_to(weight(x) if callable(weight) else weight, len(groups))
        return sum(w * np.sqrt((y[list(group)] ** 2).sum()) for w, group in zip(weights, groups, strict=True))

    return value


def plus(*pieces):
    """Pieces (slice, value), each on coordinates of its own."""
    return lambda x, y: sum(value(x, y[where]) for where, value in pieces)


# x, shapes: a shape, or dicts and lists of shapes (x None: the term ignores it); value: by hand.
Case = namedtuple("Case", "name term x shapes rho value")

VECTOR, MATRIX = (5,), (3, 4)
PAIR = {"a": (3,), "b": (2, 2)}
TREE = {"free": (2,), "list": [(2,), (3,)], "matrix": (2, 2)}
W5 = np.array([0.2, 1.0, 0.0, 0.5, 2.0])
W3 = np.array([0.3, 1.0, 0.6])
T5, T3 = torch.from_numpy(W5), torch.from_numpy(W3)
LEAF = np.repeat([0.3, 1.2], [3, 4])
SPLIT = [[0, 1], [2, 3, 4]]
MIXED = [[0, 4, 2], [1], [3, 5]]
GAPS = [[5], [0, 2]]
ACROSS = [[0, 1], [2, 3, 4, 5], [6]]


def per_leaf(x):
    return np.repeat(x, [3, 4])


SEPARABLE = [
    Case("l1", L1(0.7), None, VECTOR, 0, each(absolute, 0.7)),
    Case("l1-coordinates", L1(T5), None, VECTOR, 0, each(absolute, W5)),
    Case("l1-x-coordinates", L1(lambda x: x), VECTOR, VECTOR, 0, each(absolute, lambda x: x)),
    Case("nonnegative-l1", NonNegativeL1(0.7), None, VECTOR, 0, each(half_line, 0.7)),
    Case("nonnegative-l1-x", NonNegativeL1(lambda x: 2 * x), VECTOR, VECTOR, 0, each(half_line, lambda x: 2 * x)),
    Case("elastic-net", ElasticNet(0.5, 0.8), None, VECTOR, 0, each(elastic, 0.5, 0.8)),
    Case(
        "elastic-net-x",
        ElasticNet(lambda x: x[0], lambda x: x[1]),
        (2,),
        VECTOR,
        0,
        each(elastic, lambda x: x[0], lambda x: x[1]),
    ),
    Case("elastic-net-coordinates", ElasticNet(T5, T5 + 1), None, VECTOR, 0, each(elastic, W5, W5 + 1)),
    Case("scad", SCAD(0.6), None, VECTOR, 1 / 2.7, each(partial(scad, 3.7), 0.6)),
    Case("scad-coordinates", SCAD(T5, a=3.0), None, VECTOR, 1 / 2, each(partial(scad, 3.0), W5)),
    Case("scad-x", SCAD(lambda x: x, a=2.5), VECTOR, VECTOR, 1 / 1.5, each(partial(scad, 2.5), lambda x: x)),
    Case("mcp", MCP(0.6), None, VECTOR, 1 / 3, each(partial(mcp, 3.0), 0.6)),
    Case("mcp-coordinates", MCP(T5, a=1.5), None, VECTOR, 1 / 1.5, each(partial(mcp, 1.5), W5)),
    Case("mcp-x", MCP(lambda x: x.exp(), a=0.8), (), VECTOR, 1 / 0.8, each(partial(mcp, 0.8), lambda x: np.exp(x[0]))),
]
GROUPED = [
    Case("group-sizes", GroupL2([2, 3], 0.8), None, VECTOR, 0, grouped(SPLIT, 0.8)),
    Case("group-lists", GroupL2(MIXED, T3), None, (2, 3), 0, grouped(MIXED, W3)),
    Case("group-tensors", GroupL2([torch.tensor(g) for g in MIXED], [0.3, 1.0, 0.6]), None, (6,), 0, grouped(MIXED, W3)),
    Case("group-uncovered", GroupL2(GAPS, 0.9), None, (8,), 0, grouped(GAPS, 0.9)),
    Case("group-leaves", GroupL2([2, 4, 1], T3), None, PAIR, 0, grouped(ACROSS, W3)),
    Case("group-x", GroupL2([2, 3], lambda x: x), (2,), VECTOR, 0, grouped(SPLIT, lambda x: x)),
    Case("group-x-list", GroupL2([2, 3], lambda x: [x[0], 2 * x[1]]), (2,), VECTOR, 0, grouped(SPLIT, lambda x: x * [1, 2])),
    Case(
        "sparse-group",
        SparseGroup(GAPS, l1=0.4, group=0.9),
        None,
        (8,),
        0,
        lambda x, y: absolute(0.4, y).sum() + grouped(GAPS, 0.9)(x, y),
    ),
    Case(
        "sparse-group-coordinates",
        SparseGroup([2, 3], T5, T3[:2]),
        None,
        VECTOR,
        0,
        lambda x, y: absolute(W5, y).sum() + grouped(SPLIT, W3[:2])(x, y),
    ),
    Case(
        "sparse-group-x",
        SparseGroup([2, 4, 1], l1=lambda x: x[0], group=lambda x: x[1:]),
        (4,),
        PAIR,
        0,
        lambda x, y: absolute(x[0], y).sum() + grouped(ACROSS, x[1:])(x, y),
    ),
]
OTHERS = [
    Case("zero", Zero(), None, PAIR, 0, lambda x, y: 0.0),
    Case("l1-row", L1(T3), None, (2, 3), 0, each(absolute, np.tile(W3, 2))),
    Case("l1-list", L1([0.3, 1.2]), None, PAIR, 0, each(absolute, LEAF)),
    Case("l1-list-mixed", L1([T3, 1.2]), None, PAIR, 0, each(absolute, np.r_[W3, np.full(4, 1.2)])),
    Case("l1-dict", L1({"a": 0.3, "b": 1.2}), None, PAIR, 0, each(absolute, LEAF)),
    Case("l1-dict-in-other-order", L1({"b": 1.2, "a": 0.3}), None, PAIR, 0, each(absolute, LEAF)),
    Case("l1-vector", L1(torch.tensor([0.3, 1.2], dtype=torch.float64)), None, PAIR, 0, each(absolute, LEAF)),
    Case("l1-x", L1(lambda x: x.exp()), (), PAIR, 0, each(absolute, lambda x: np.exp(x[0]))),
    Case("l1-x-vector", L1(lambda x: x), (2,), PAIR, 0, each(absolute, per_leaf)),
    Case("l1-x-dict", L1(lambda x: x), {"a": (), "b": ()}, PAIR, 0, each(absolute, per_leaf)),
    Case("l1-x-list", L1(lambda x: [x[0], 2 * x[1]]), (2,), PAIR, 0, each(absolute, lambda x: per_leaf(x * [1, 2]))),
    Case("elastic-net-leaves", ElasticNet([0.3, 1.2], 0.5), None, PAIR, 0, each(elastic, LEAF, 0.5)),
    Case("scad-x-dict", SCAD(lambda x: x), {"a": (), "b": ()}, PAIR, 1 / 2.7, each(partial(scad, 3.7), per_leaf)),
    Case("mcp-x-vector", MCP(lambda x: x), (2,), PAIR, 1 / 3, each(partial(mcp, 3.0), per_leaf)),
    Case("nuclear", Nuclear(0.6), None, MATRIX, 0, nuclear((MATRIX, lambda x: 0.6))),
    Case("nuclear-tall", Nuclear(1.6), None, (4, 2), 0, nuclear(((4, 2), lambda x: 1.6))),
    Case(
        "nuclear-x",
        Nuclear(lambda x: x),
        (2,),
        {"p": (2, 3), "q": (3, 2)},
        0,
        nuclear(((2, 3), lambda x: x[0]), ((3, 2), lambda x: x[1])),
    ),
    Case(
        "sum",
        L1(0.7, part="a") + Nuclear(0.5, part="b"),
        None,
        PAIR,
        0,
        plus((slice(3), each(absolute, 0.7)), (slice(3, 7), nuclear(((2, 2), lambda x: 0.5)))),
    ),
    Case(
        "sum-x",
        MCP(lambda x: x[0], a=2.0, part="list.0") + SCAD(0.4, part="list.1") + GroupL2([3, 1], lambda x: x[1], part="matrix"),
        (2,),
        TREE,
        1 / 2,
        plus(
            (slice(2, 4), each(partial(mcp, 2.0), lambda x: x[0])),
            (slice(4, 7), each(partial(scad, 3.7), 0.4)),
            (slice(7, 11), grouped([[0, 1, 2], [3]], lambda x: x[1])),
        ),
    ),
]
CASES = SEPARABLE + GROUPED + OTHERS
SHAPES = SEPARABLE + GROUPED + [case for case in OTHERS if not isinstance(case.term, L1)]  # without the forms of weights


def over(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def draw(seed, case, count, scale=2.0):
    """x with entries from 0.2 to 1.4, and points y."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 + 1.2 * torch.rand(size(case.x) if case.x is not None else 0, generator=generator, dtype=torch.float64)
    return x.numpy(), (scale * torch.randn(count, size(case.shapes), generator=generator, dtype=torch.float64)).numpy()


def step_of(case, share):
    return share / case.rho if case.rho else 2 * share


def prox(case, x, u, step):
    return flat(case.term.prox(fill(case.x, x), fill(case.shapes, u), step))


def objective(case, x, u, step, w):
    return step * case.value(x, w) + 0.5 * ((w - u) ** 2).sum()


def check_minimum(case, x, u, step, p, others):
    """Every other point is worse than p by what strong convexity asks for."""
    least = objective(case, x, u, step, p)
    assert np.isfinite(least)
    modulus = 1 - step * case.rho
    for w in others:
        gain = objective(case, x, u, step, w) - least
        assert gain >= modulus / 2 * ((w - p) ** 2).sum() - 1e-9 * (1 + abs(least))


def around(p, noise):
    """Points near p, at several distances, in all coordinates and in single ones."""
    near = [p + scale * row for scale in (1e-4, 1e-2, 0.3) for row in noise]
    return near + [p + sign * 1e-3 * row for row in np.eye(len(p)) for sign in (1, -1)]


@over(CASES)
@given(seed=SEEDS)
@many
def test_value_is_the_one_by_hand(case, seed):
    x, (y,) = draw(seed, case, 1)
    y = np.abs(y) if isinstance(case.term, NonNegativeL1) and seed % 2 else y
    value = case.term.value(fill(case.x, x), fill(case.shapes, y))
    assert value.shape == ()
    np.testing.assert_allclose(float(value), case.value(x, y), rtol=1e-12, atol=1e-12)


@over(CASES)
@given(seed=SEEDS, share=SHARES)
@many
def test_prox_is_the_minimum(case, seed, share):
    x, (u, *noise) = draw(seed, case, 5)
    step = step_of(case, share)
    p = prox(case, x, u, step)
    check_minimum(case, x, u, step, p, [*around(p, noise), *noise, u, 0 * u, -p])


@over(SHAPES)
@given(seed=SEEDS, share=SHARES)
@many
def test_prox_is_firmly_nonexpansive(case, seed, share):
    """<p - q, u - v> >= (1 - step rho) ||p - q||^2: Lipschitz with 1 / (1 - step rho), firmly so for convex terms."""
    x, (u, v) = draw(seed, case, 2)
    step = step_of(case, share)
    move = prox(case, x, u, step) - prox(case, x, v, step)
    rest = 1 - step * case.rho
    assert move @ (u - v) >= rest * (move @ move) - 1e-11
    assert np.linalg.norm(move) <= np.linalg.norm(u - v) / rest + 1e-11


@over(SEPARABLE)
@given(seed=SEEDS, share=SHARES)
@many
def test_prox_is_the_minimum_on_a_grid(case, seed, share):
    """Each coordinate by itself: on a grid of 1e-2, then on one of 1e-5 around the best point, and at zero."""
    x, (u,) = draw(seed, case, 1)
    step = step_of(case, share)

    def best(grid):
        lowest = np.argmin(step * case.value.single(x, grid) + 0.5 * (grid - u) ** 2, axis=0)
        return grid[lowest, np.arange(len(u))]

    span = np.abs(u).max()
    coarse = best(np.tile(np.arange(-span, span + 1e-2, 1e-2)[:, None], len(u)))
    fine = best(np.vstack([coarse + np.arange(-1.5e-2, 1.5e-2, 1e-5)[:, None], 0 * u]))
    np.testing.assert_allclose(prox(case, x, u, step), fine, rtol=0, atol=2e-5)


@over([case for case in CASES if case.x is not None])
@given(seed=SEEDS)
@many
def test_gradient_in_x(case, seed):
    """Against central differences of the value by hand."""
    x, (y,) = draw(seed, case, 1)
    y = np.abs(y) if isinstance(case.term, NonNegativeL1) else y
    value = fill(case.x, x)
    own = [leaf.requires_grad_() for leaf in leaves(value)]
    gradient = np.concatenate(
        [g.numpy().reshape(-1) for g in torch.autograd.grad(case.term.value(value, fill(case.shapes, y)), own)]
    )
    h = 1e-6
    expected = [(case.value(x + h * e, y) - case.value(x - h * e, y)) / (2 * h) for e in np.eye(len(x))]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


@over(SHAPES)
@given(seed=SEEDS)
@many
def test_convex_after_adding_the_modulus(case, seed):
    x, (y, z) = draw(seed, case, 2)
    if isinstance(case.term, NonNegativeL1):
        y, z = np.abs(y), np.abs(z)

    def h(w):
        return float(case.term.value(fill(case.x, x), fill(case.shapes, w))) + case.rho / 2 * (w @ w)

    assert h((y + z) / 2) <= (h(y) + h(z)) / 2 + 1e-11


@pytest.mark.parametrize("a", [2.2, 3.7, 10.0])
@pytest.mark.parametrize(("kind", "start"), [(SCAD, 1.0), (MCP, 0.0)], ids=["scad", "mcp"])
def test_not_convex_with_a_smaller_modulus(kind, start, a):
    """From start * w to a * w the penalty bends down by all of rho."""
    w, g = 0.6, kind(0.6, a=a)
    low, high = start * w, a * w

    def h(t):
        return float(g.value(None, torch.tensor(t, dtype=torch.float64))) + 0.95 * g.rho / 2 * t**2

    assert h((low + high) / 2) > (h(low) + h(high)) / 2 + 1e-4


@over(CASES)
def test_rho_is_the_modulus(case):
    assert case.term.rho == pytest.approx(case.rho, rel=1e-12)


@over(CASES)
def test_float32_is_kept(case):
    x, (u,) = draw(1, case, 1)
    step = step_of(case, 0.5)
    minimiser = case.term.prox(fill(case.x, x, torch.float32), fill(case.shapes, u, torch.float32), step)
    assert {leaf.dtype for leaf in leaves(minimiser)} == {torch.float32}
    np.testing.assert_allclose(flat(minimiser), prox(case, x, u, step), rtol=0, atol=1e-5)
    value = case.term.value(fill(case.x, x, torch.float32), minimiser)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(case.value(x, flat(minimiser)), rel=1e-5, abs=1e-5)


@over(CASES)
def test_structure_is_kept_and_the_argument_is_not_changed(case):
    x, (u,) = draw(2, case, 1)
    y = fill(case.shapes, u)
    minimiser = case.term.prox(fill(case.x, x), y, 0.3)
    np.testing.assert_array_equal(flat(y), u)
    assert type(minimiser) is type(y)
    assert [leaf.shape for leaf in leaves(minimiser)] == [leaf.shape for leaf in leaves(y)]
    assert not any(leaf.requires_grad for leaf in leaves(minimiser))


# Families: one weight for everything, on a matrix of 2 x 3.

FAMILIES = {
    "l1": L1,
    "nonnegative-l1": NonNegativeL1,
    "elastic-net": lambda w, part=None: ElasticNet(w, w, part),
    "scad": lambda w, part=None: SCAD(w, part=part),
    "mcp": lambda w, part=None: MCP(w, part=part),
    "nuclear": Nuclear,
    "group": lambda w, part=None: GroupL2([[0, 1], [2, 3, 4, 5]], w, part),
    "sparse-group": lambda w, part=None: SparseGroup([[0, 1], [2, 3, 4, 5]], w, w, part),
}
HOMOGENEOUS = ["l1", "nonnegative-l1", "nuclear", "group", "sparse-group"]


def family(*without):
    return pytest.mark.parametrize("name", [name for name in FAMILIES if name not in without])


def matrix(seed=0, dtype=torch.float64):
    return 2 * torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tol)


@family()
def test_weight_zero_does_nothing(name):
    u = matrix()
    expected = u.clamp(min=0) if name == "nonnegative-l1" else u
    close(FAMILIES[name](0.0).prox(None, u, 0.7), expected)


@family()
def test_huge_weight_gives_zero(name):
    close(FAMILIES[name](1e9).prox(None, matrix(), 0.7), torch.zeros(2, 3, dtype=torch.float64))


@family("scad", "mcp")
@given(seed=SEEDS, factor=FACTORS)
@many
def test_weight_and_step_count_as_a_product(name, seed, factor):
    u = matrix(seed)
    close(FAMILIES[name](0.4 * factor).prox(None, u, 0.7), FAMILIES[name](0.4).prox(None, u, 0.7 * factor))


@pytest.mark.parametrize("name", HOMOGENEOUS)
@given(seed=SEEDS, factor=FACTORS)
@many
def test_homogeneous_terms_scale_with_y(name, seed, factor):
    """g(c y) = c g(y), hence prox(c u, c step) = c prox(u, step)."""
    u, g = matrix(seed), FAMILIES[name](0.4)
    close(g.prox(None, factor * u, factor * 0.7), factor * g.prox(None, u, 0.7), 1e-11)


@pytest.mark.parametrize("name", ["scad", "mcp"])
@given(seed=SEEDS, factor=FACTORS)
@many
def test_thresholds_scale_with_y(name, seed, factor):
    """g(c w, c y) = c^2 g(w, y), hence prox(c w, c u) = c prox(w, u)."""
    u = matrix(seed)
    close(FAMILIES[name](0.4 * factor).prox(None, factor * u, 0.7), factor * FAMILIES[name](0.4).prox(None, u, 0.7), 1e-11)
    before, after = FAMILIES[name](0.4).value(None, u), FAMILIES[name](0.4 * factor).value(None, factor * u)
    close(after, factor**2 * before, 1e-11)


@family("nonnegative-l1")
def test_prox_is_odd(name):
    g, u = FAMILIES[name](0.4), matrix()
    close(g.prox(None, -u, 0.7), -g.prox(None, u, 0.7))


@family()
def test_prox_follows_x(name):
    """A weight of x acts as that number, whatever was asked before."""
    u, g = matrix(), FAMILIES[name](lambda x: x.square())
    minimisers = {x: g.prox(torch.tensor(x, dtype=torch.float64), u, 0.7) for x in (0.3, 0.9, 0.0, 0.3)}
    for x, p in minimisers.items():
        close(p, FAMILIES[name](x**2).prox(None, u, 0.7))
    assert not torch.allclose(minimisers[0.3], minimisers[0.9])


def test_prox_by_hand():
    u = np.array([3.0, -0.5, 4.0, -2.0])
    y, x = torch.from_numpy(u), torch.tensor([0.5, 2.0], dtype=torch.float64)
    soft = np.array([2.5, 0.0, 3.5, -1.5])
    np.testing.assert_allclose(L1(lambda x: x[0]).prox(x, y, 1.0).numpy(), soft)
    np.testing.assert_allclose(NonNegativeL1(lambda x: x[1]).prox(x, y, 1.0).numpy(), [1.0, 0.0, 2.0, 0.0])
    np.testing.assert_allclose(ElasticNet(lambda x: x[0], lambda x: x[1]).prox(x, y, 1.0).numpy(), soft / 3)
    np.testing.assert_allclose(GroupL2([[0, 2]], lambda x: x[1]).prox(x, y, 1.0).numpy(), [1.8, -0.5, 2.4, -2.0])
    np.testing.assert_allclose(SCAD(lambda x: x[1], a=3.0).prox(x, y, 0.5).numpy(), [2.0, 0.0, 10 / 3, -1.0], rtol=1e-12)
    np.testing.assert_allclose(MCP(lambda x: x[1], a=2.0).prox(x, y, 0.5).numpy(), [8 / 3, 0.0, 4.0, -4 / 3], rtol=1e-12)
    diagonal = Nuclear(lambda x: x[0]).prox(x, torch.diag(y), 1.0)
    np.testing.assert_allclose(diagonal.numpy(), np.diag(soft), atol=1e-12)


@given(seed=SEEDS, weight=st.floats(0.1, 3.0))
@many
def test_nuclear_prox_thresholds_singular_values(seed, weight):
    u = matrix(seed).numpy()
    left, s, right = np.linalg.svd(u, full_matrices=False)
    expected = left @ np.diag(np.maximum(s - 0.7 * weight, 0)) @ right
    np.testing.assert_allclose(Nuclear(weight).prox(None, torch.from_numpy(u), 0.7).numpy(), expected, rtol=0, atol=1e-12)


def test_value_at_zero_groups_has_a_gradient():
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(GroupL2([2, 1]).value(None, y), y)
    close(gradient, torch.zeros(3, dtype=torch.float64))


def test_one_term_serves_variables_of_different_sizes():
    g = GroupL2([[0, 2]], 1.0)
    short, long = torch.tensor([3.0, 1.0, 4.0]), torch.tensor([3.0, 1.0, 4.0, 7.0])
    for y in (short, long, short):
        close(g.prox(None, y, 1.0), torch.cat([torch.tensor([2.4, 1.0, 3.2]), y[3:]]), 1e-6)


@pytest.mark.parametrize("number", [np.int64, np.int32])
def test_sizes_may_be_numpy_integers(number):
    y = torch.tensor([3.0, 4.0, 1.0])
    assert float(GroupL2([number(2), number(1)]).value(None, y)) == pytest.approx(6.0)


def test_a_sum_of_nothing_has_a_tensor_as_value():
    value = (Zero() + Zero()).value(None, torch.ones(2))
    assert isinstance(value, torch.Tensor)
    assert float(value) == 0.0


# Parts


@family()
def test_part_leaves_the_rest_alone(name):
    y = {"a": matrix(1), "b": matrix(2), "bb": matrix(3)}
    g = FAMILIES[name](0.4, part="b")
    minimiser = g.prox(None, y, 0.7)
    assert list(minimiser) == list(y)
    close(minimiser["b"], FAMILIES[name](0.4).prox(None, y["b"], 0.7))
    assert torch.equal(minimiser["a"], y["a"])
    assert torch.equal(minimiser["bb"], y["bb"])
    close(g.value(None, y), FAMILIES[name](0.4).value(None, y["b"]))


@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        (None, ["free", "list.0", "list.1", "deep.w"]),
        ("free", ["free"]),
        ("list", ["list.0", "list.1"]),
        ("list.1", ["list.1"]),
        ("deep", ["deep.w"]),
        (["deep.w", "list.0"], ["deep.w", "list.0"]),
        (["list", "list.0"], ["list.0", "list.1"]),
    ],
)
def test_parts_of_nested_values(part, chosen):
    numbers = {"free": 2.0, "list.0": 3.0, "list.1": 4.0, "deep.w": 5.0}
    t = {name: torch.tensor([number]) for name, number in numbers.items()}
    minimiser = L1(1.0, part=part).prox(
        None, {"free": t["free"], "list": [t["list.0"], t["list.1"]], "deep": {"w": t["deep.w"]}}, 0.5
    )
    after = {
        "free": minimiser["free"],
        "list.0": minimiser["list"][0],
        "list.1": minimiser["list"][1],
        "deep.w": minimiser["deep"]["w"],
    }
    expected = {name: number - 0.5 * (name in chosen) for name, number in numbers.items()}
    assert {name: float(leaf) for name, leaf in after.items()} == expected


def test_parts_of_a_module_have_its_parameter_names():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    g = L1(0.05, part="0.weight") + Nuclear(0.05, part="1.weight")
    minimiser = g.prox(None, module, 1.0)
    assert minimiser is not module
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    after = {name: p.detach() for name, p in minimiser.named_parameters()}
    close(after["0.weight"], L1(0.05).prox(None, before["0.weight"], 1.0))
    close(after["1.weight"], Nuclear(0.05).prox(None, before["1.weight"], 1.0))
    assert torch.equal(after["0.bias"], before["0.bias"])
    assert torch.equal(after["1.bias"], before["1.bias"])
    expected = 0.05 * before["0.weight"].abs().sum() + 0.05 * before["1.weight"].norm()
    close(g.value(None, module).detach(), expected)


def test_frozen_parameters_are_no_leaves():
    module = nn.Linear(3, 2).double()
    module.bias.requires_grad_(False)
    assert L1().value(None, module).item() == pytest.approx(module.weight.abs().sum().item())
    with pytest.raises(ValueError, match=r"L1: part.*'bias'.*'weight'"):
        L1(part="bias").value(None, module)


# Errors


V3, V5 = torch.ones(3), torch.ones(5)
BOTH = {"a": V3, "b": torch.ones(2, 2)}
ERRORS = [
    ("part", lambda: L1(part="w").value(None, BOTH), ValueError, r"L1: part: .*'w'.*'a', 'b'"),
    ("part-prefix", lambda: MCP(part="a").prox(None, {"aa": V3}, 0.1), ValueError, r"MCP: part: .*'a'.*'aa'"),
    ("part-of-several", lambda: Nuclear(part=["b", "w"]).value(None, BOTH), ValueError, r"Nuclear: part: .*'w'"),
    ("scad-a", lambda: SCAD(a=2.0), ValueError, r"SCAD: a .*2\.0"),
    ("mcp-a", lambda: MCP(a=0.0), ValueError, r"MCP: a .*0\.0"),
    ("scad-step", lambda: SCAD(a=3.5).prox(None, V3, 2.5), ValueError, r"SCAD: .*step < 2\.5.*got 2\.5"),
    ("scad-step-above", lambda: SCAD(a=3.5).prox(None, V3, 7.0), ValueError, r"SCAD: .*step < 2\.5.*got 7"),
    ("mcp-step", lambda: MCP(a=1.25).prox(None, V3, 1.25), ValueError, r"MCP: .*step < 1\.25.*got 1\.25"),
    ("sum-step", lambda: (L1(part="a") + MCP(a=2.0, part="b")).prox(None, BOTH, 2.0), ValueError, r"MCP: .*step < 2,? "),
    ("step-zero", lambda: L1().prox(None, V3, 0.0), ValueError, r"L1: step .*0\.0"),
    ("step-negative", lambda: GroupL2([3]).prox(None, V3, -1.0), ValueError, r"GroupL2: step .*-1\.0"),
    ("weights-count", lambda: L1([1.0, 2.0, 3.0]).value(None, BOTH), ValueError, r"L1: got 3 weights for 2 leaves"),
    ("weights-one-leaf", lambda: L1([1.0, 2.0]).value(None, V3), ValueError, r"L1: got 2 weights for 1"),
    ("weight-shape", lambda: SCAD(torch.ones(2)).value(None, V3), ValueError, r"SCAD: weight .*\(2,\).*\(3,\)"),
    ("weight-too-large", lambda: L1(torch.ones(2, 3)).value(None, V3), ValueError, r"L1: weight .*\(2, 3\).*\(3,\)"),
    ("weight-kind", lambda: MCP("big").value(None, V3), TypeError, r"MCP: weight .*'big'"),
    ("nuclear-weight", lambda: Nuclear(V3).value(None, torch.ones(2, 3)), ValueError, r"Nuclear: weight .*\(3,\).*one number"),
    ("nuclear-vector", lambda: Nuclear().value(None, V3), ValueError, r"Nuclear: .*matrices.*\(3,\)"),
    ("nuclear-leaf", lambda: Nuclear().prox(None, BOTH, 1.0), ValueError, r"Nuclear: .*matrices.*\(3,\).*part"),
    ("group-weight", lambda: GroupL2([2, 3], V3).value(None, V5), ValueError, r"GroupL2: weight .*\(3,\).*2 groups"),
    ("no-groups", lambda: GroupL2([]), ValueError, r"GroupL2: groups is empty"),
    ("empty-group", lambda: GroupL2([[0], [], [1]]), ValueError, r"GroupL2: group 1 is empty"),
    ("size-zero", lambda: GroupL2([2, 0]), ValueError, r"GroupL2: sizes .*0"),
    ("size-negative", lambda: SparseGroup([5, -2]), ValueError, r"SparseGroup: sizes .*-2"),
    ("overlap", lambda: GroupL2([[0, 1], [1, 2]]), ValueError, r"GroupL2: groups overlap"),
    ("twice-in-one", lambda: SparseGroup([[0, 0]]), ValueError, r"SparseGroup: groups overlap"),
    ("negative-coordinate", lambda: GroupL2([[0], [-1]]), ValueError, r"GroupL2: .*coordinate -1"),
    ("unknown-coordinate", lambda: GroupL2([[0], [5]]).value(None, V5), ValueError, r"GroupL2: .*coordinate 5.*5 coordinates"),
    ("sizes-below", lambda: GroupL2([2, 2]).value(None, V5), ValueError, r"GroupL2: .*add up to 4.*5 coordinates"),
    ("sizes-above", lambda: SparseGroup([2, 4]).prox(None, V5, 1.0), ValueError, r"SparseGroup: .*add up to 6.*5 coordinates"),
    ("sum-same-leaf", lambda: (L1() + MCP(part="b")).value(None, BOTH), ValueError, r"Sum: L1 and MCP both act on y\['b'\]"),
    ("sum-tensor", lambda: Sum(L1(), Nuclear()).prox(None, torch.eye(2), 1.0), ValueError, r"Sum: L1 and Nuclear both .*y"),
    ("integers", lambda: L1().prox(None, torch.tensor([3]), 1.0), TypeError, r"y: dtype torch.int64"),
]


@pytest.mark.parametrize(("call", "kind", "match"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_error_names_the_argument(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


@family()
def test_negative_weights_are_refused(name):
    with pytest.raises(ValueError, match=r"negative"):
        FAMILIES[name](-0.25)
    g, x = FAMILIES[name](lambda x: -0.25 * x), torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"negative \(-0\.25\)"):
        g.value(x, matrix())
    with pytest.raises(ValueError, match=r"negative \(-0\.25\)"):
        g.prox(x, matrix(), 0.5)


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (lambda: L1(torch.tensor([1.0, -0.5, 1.0])), "L1: weight"),
        (lambda: ElasticNet(1.0, -0.5), "ElasticNet: l2"),
        (lambda: ElasticNet(-0.5, 1.0), "ElasticNet: l1"),
        (lambda: GroupL2([2, 1], torch.tensor([1.0, -0.5])), "GroupL2: weight"),
        (lambda: GroupL2([2, 1], lambda x: torch.tensor([1.0, -0.5])).prox(None, V3, 0.5), "GroupL2: a weight"),
        (lambda: SparseGroup([2, 1], l1=-0.5, group=1.0), "SparseGroup: l1"),
        (lambda: SparseGroup([2, 1], l1=1.0, group=-0.5), "SparseGroup: weight"),
        (lambda: NonNegativeL1([1.0, -0.5]).prox(None, [V3, V3.clone()], 0.5), "NonNegativeL1: a weight"),
    ],
)
def test_one_negative_weight_is_refused(term, name):
    with pytest.raises(ValueError, match=rf"{name} .*negative"):
        term()


@pytest.mark.parametrize(("term", "bound"), [(SCAD(a=3.5), 2.5), (MCP(a=1.25), 1.25)], ids=["scad", "mcp"])
def test_steps_just_below_the_bound_work(term, bound):
    assert bool(term.prox(None, matrix(), 0.999 * bound).isfinite().all())


# Together with Y


def bind(term, y_set, y):
    return Problem(lambda x, y: y.sum(), lambda x, y: y.sum(), nonsmooth=term, y_set=y_set)._bind_prox(y)


def bound_prox(term, y_set, x, y, step):
    """The value after the bound map has changed the leaves in place."""
    variable = Variable(y, "y")
    with torch.no_grad():
        bind(term, y_set, variable)(x, variable.leaves, step)
    return variable.detached()


CENTER = np.array([0.5, -0.7, 2.0, 0.0, -0.3])
LOW, HIGH = np.array([-1.0, 0.4, -inf, 0.0, -0.2]), np.array([0.5, 0.9, 0.3, inf, 2.0])
INTERVALS = [
    ("box", Box(-0.6, 1.1), -0.6, 1.1),
    ("box-off-zero", Box(0.3, 1.0), 0.3, 1.0),
    ("box-tensor", Box(torch.from_numpy(LOW), torch.from_numpy(HIGH)), LOW, HIGH),
    ("nonnegative", NonNegative(), 0.0, inf),
    ("linf", LinfBall(0.9, torch.from_numpy(CENTER)), CENTER - 0.9, CENTER + 0.9),
]
ORTHANT_A = np.array([0.0] * 3 + [-inf] * 4)
EACH_KIND = ["l1", "l1-x-coordinates", "nonnegative-l1-x", "elastic-net-x", "scad", "scad-x", "mcp-coordinates", "mcp-x"]
JOINT = [(case, *interval) for case in SEPARABLE if case.name in EACH_KIND for interval in INTERVALS]
JOINT += [(case, "nonnegative", NonNegative(), 0.0, inf) for case in GROUPED]
JOINT += [(case, "orthant-of-a", Product({"a": NonNegative()}), ORTHANT_A, inf) for case in GROUPED if case.shapes is PAIR]
JOINT += [(case, "reals", Reals(), -inf, inf) for case in OTHERS if case in SHAPES]
JOINT += [(case, "box", Box(-0.6, 1.1), -0.6, 1.1) for case in OTHERS if isinstance(case.term, L1 | SCAD | MCP | Zero)]
BRANCHES = [
    (
        Case(
            "two-terms",
            L1(0.9, part="a") + MCP(0.8, a=2.0, part="b"),
            None,
            PAIR,
            1 / 2,
            plus((slice(3), each(absolute, 0.9)), (slice(3, 7), each(partial(mcp, 2.0), 0.8))),
        ),
        *rest,
    )
    for rest in [
        ("box", Box(-0.6, 1.1), -0.6, 1.1),
        ("box-off-zero", Box(0.3, 1.0), 0.3, 1.0),
        ("linf", LinfBall(0.9), -0.9, 0.9),
        ("nonnegative", NonNegative(), 0.0, inf),
        (
            "product",
            Product({"a": Box(0.0, 0.5), "b": LinfBall(0.3)}),
            np.repeat([0.0, -0.3], [3, 4]),
            np.repeat([0.5, 0.3], [3, 4]),
        ),
    ]
]
PARTLY = Case(
    "part-of-the-box",
    SCAD(0.8, part="b"),
    None,
    PAIR,
    1 / 2.7,
    plus((slice(3, 7), each(partial(scad, 3.7), 0.8))),
)
WITH_GROUPS = Case(
    "groups-and-l1",
    GroupL2([1, 2], 0.8, part="a") + L1(0.5, part="b"),
    None,
    PAIR,
    0,
    plus((slice(3), grouped([[0], [1, 2]], 0.8)), (slice(3, 7), each(absolute, 0.5))),
)
JOINT += BRANCHES
JOINT += [(PARTLY, "box", Box(-0.6, 1.1), -0.6, 1.1), (PARTLY, "linf", LinfBall(0.9), -0.9, 0.9)]
JOINT += [(WITH_GROUPS, "nonnegative", NonNegative(), 0.0, inf)]


@pytest.mark.parametrize(
    ("case", "y_set", "low", "high"), [(j[0], *j[2:]) for j in JOINT], ids=[f"{j[0].name}-in-{j[1]}" for j in JOINT]
)
@given(seed=SEEDS, share=SHARES)
@settings(max_examples=10, deadline=None, database=None)
def test_prox_with_a_set_is_the_minimum_over_the_set(case, y_set, low, high, seed, share):
    x, (u, *noise) = draw(seed, case, 5)
    step = step_of(case, share)
    p = flat(bound_prox(case.term, y_set, fill(case.x, x), fill(case.shapes, u), step))
    assert bool((p >= low - 1e-12).all() and (p <= high + 1e-12).all())
    others = [np.clip(w, low, high) for w in [*around(p, noise), *noise, u, 0 * u]]
    check_minimum(case, x, u, step, p, others)


def test_set_and_term_on_different_leaves():
    y = {"a": torch.tensor([3.0, -0.4]), "b": torch.tensor([1.0, 1.0]), "c": torch.tensor([3.0, 4.0]), "d": torch.tensor([9.0])}
    minimiser = bound_prox(L1(1.0, part="a"), Product({"b": Simplex(), "c": L2Ball(1.0)}), None, y, 0.5)
    expected = {"a": [2.5, 0.0], "b": [0.5, 0.5], "c": [0.6, 0.8], "d": [9.0]}
    for name, numbers in expected.items():
        np.testing.assert_allclose(minimiser[name].numpy(), numbers, atol=1e-6)


def test_set_without_a_term_is_projected_on():
    for term in (None, Zero()):
        close(bound_prox(term, L2Ball(1.0), None, torch.tensor([3.0, 4.0]), 0.5), torch.tensor([0.6, 0.8]), 1e-6)


def test_bound_prox_says_when_it_does_nothing():
    y = Variable(V3, "y")
    assert bind(None, None, y).identity
    assert bind(Zero(), Reals(), y).identity
    assert not bind(L1(), None, y).identity
    assert not bind(None, NonNegative(), y).identity


def test_bound_prox_checks_the_step():
    y = Variable(V3, "y")
    with pytest.raises(ValueError, match=r"MCP: .*step < 1\.25"), torch.no_grad():
        bind(MCP(a=1.25), NonNegative(), y)(None, y.leaves, 1.3)


REFUSED = [
    ("l2-ball", L2Ball(1.0), L1(), V3, "L1 .*L2Ball"),
    ("l1-ball", L1Ball(1.0), ElasticNet(), V3, "ElasticNet .*L1Ball"),
    ("simplex", Simplex(), L1(), V3, "L1 .*Simplex"),
    ("half-space", HalfSpace(V3, 1.0), MCP(), V3, "MCP .*HalfSpace"),
    ("affine", AffineSet(V3[None], torch.ones(1)), SCAD(), V3, "SCAD .*AffineSet"),
    ("nonnegative-l1", Simplex(), NonNegativeL1(), V3, "NonNegativeL1 .*Simplex"),
    ("box-group", Box(0.0, 1.0), GroupL2([3]), V3, "GroupL2 .*Box"),
    ("box-like-orthant-sparse-group", LinfBall(1.0), SparseGroup([3]), V3, "SparseGroup .*LinfBall"),
    ("nonnegative-nuclear", NonNegative(), Nuclear(), torch.eye(2), "Nuclear .*NonNegative"),
    ("box-nuclear", Box(-1.0, 1.0), Nuclear(), torch.eye(2), "Nuclear .*Box"),
    ("whole-ball-part-of-y", L2Ball(1.0), L1(part="a"), BOTH, "L1 .*L2Ball"),
    ("product", Product({"b": Simplex()}), L1(part="a") + MCP(part="b"), BOTH, "MCP .*Simplex"),
    ("product-group", Product({"b": Box(0.0, 1.0)}), GroupL2([3, 4]), BOTH, "GroupL2 .*Box"),
    ("product-one-of-two", Product({"a": NonNegative(), "b": Box(0.0, 1.0)}), GroupL2([3, 4]), BOTH, "GroupL2 .*Box"),
]


@pytest.mark.parametrize(("y_set", "term", "y", "pair"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_no_closed_form_is_refused(y_set, term, y, pair):
    with pytest.raises(ValueError, match=rf"y_set and nonsmooth: .*{pair}.*closed form"):
        bind(term, y_set, Variable(y, "y"))


# Forms of groups and weights


def test_sizes_may_be_a_tensor():
    y = torch.tensor([3.0, 4.0, 1.0])
    assert float(GroupL2(torch.tensor([2, 1])).value(None, y)) == pytest.approx(6.0)


@pytest.mark.parametrize("groups", [[[True, False]], [torch.tensor([0.5, 1.0])]])
def test_masks_and_fractions_are_no_coordinates(groups):
    with pytest.raises(TypeError, match="GroupL2: groups must hold coordinates"):
        GroupL2(groups)


def test_a_group_weight_of_one_entry_is_a_number():
    y = torch.tensor([3.0, 4.0, 1.0])
    assert float(GroupL2([2, 1], torch.tensor([2.0])).value(None, y)) == pytest.approx(12.0)
    with pytest.raises(TypeError, match="GroupL2: a weight per group is a number or a vector, got dict"):
        GroupL2([2, 1], {"a": 1.0}).value(None, y)


def test_an_empty_sum_and_an_empty_part_are_refused():
    with pytest.raises(ValueError, match="Sum: needs at least one term"):
        Sum()
    with pytest.raises(ValueError, match="L1: part: is empty"):
        L1(part=[]).value(None, torch.ones(2))
