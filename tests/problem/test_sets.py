"""Sets: projections against formulas written by hand, the inequalities that characterise a projection, and errors."""

from collections import namedtuple
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from structures import fill, flat, leaves, size
from torch import nn

from meha.problem.problem import Problem
from meha.problem.sets import AffineSet, Box, HalfSpace, L1Ball, L2Ball, LinfBall, NonNegative, Product, Reals, Simplex
from meha.tensors.variables import Variable

SEEDS = st.integers(0, 2**31 - 1)
many = settings(max_examples=25, deadline=None, database=None)


# Projections and violations by hand: functions of one flat numpy vector.


def clip(low, high):
    return lambda z: np.minimum(np.maximum(z, low), high)


def level(z, total):
    """t with sum max(z - t, 0) = total, by bisection."""
    low, high = z.min() - total, z.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(z - middle, 0).sum() > total else (low, middle)
    return (low + high) / 2


def simplex(total):
    return lambda z: np.maximum(z - level(z, total), 0)


def l2_ball(radius, center=0.0):
    def project(z):
        length = np.sqrt(((z - center) ** 2).sum())
        return z if length <= radius else center + radius * (z - center) / length

    return project


def l1_ball(radius, center=0.0):
    def project(z):
        size = np.abs(z - center)
        return z if size.sum() <= radius else center + np.sign(z - center) * np.maximum(size - level(size, radius), 0)

    return project


def half_space(normal, offset):
    return lambda z: z if normal @ z <= offset else z - normal * (normal @ z - offset) / (normal @ normal)


def affine(matrix, rhs):
    return lambda z: z - np.linalg.lstsq(matrix, matrix @ z - rhs, rcond=1e-10)[0]


def outside(low, high):
    return lambda z: np.maximum(np.maximum(low - z, z - high), 0).max()


def off_simplex(total):
    return lambda z: max(abs(z.sum() - total), (-z).max(), 0)


def blocks(*pieces):
    """Join functions of pieces, each given as (size, function)."""
    cuts = np.cumsum([size for size, _ in pieces])[:-1]

    def apply(z):
        return [function(piece) for (_, function), piece in zip(pieces, np.split(z, cuts), strict=True)]

    return apply


# shapes: a shape, or dicts and lists of shapes; project: z -> nearest point; violation: z -> how far a constraint is broken.
Case = namedtuple("Case", "name set shapes project violation")

LOW, HIGH = np.array([-1.0, 0.0, -inf, 0.5]), np.array([0.5, inf, 0.3, 0.5])
ROW = np.array([0.2, 0.4, 0.6])
CENTER = np.array([0.5, -1.0, 2.0, 0.0, -0.3])
NORMAL = np.array([1.0, -2.0, 0.5, 0.0, 3.0])
A2 = np.array([[1.0, 2.0, 0.0, -1.0, 0.5], [0.0, 1.0, 1.0, 0.0, 2.0]])
A3 = np.vstack([A2, A2[0] - 2 * A2[1]])
B2, B3 = np.array([1.0, -2.0]), np.array([1.0, -2.0, 5.0])
PAIR = {"a": (3,), "b": (2, 1)}
TREE = {"a": (2,), "list": [(2, 2), ()], "c": (3,)}


def torch_of(array):
    return torch.tensor(array, dtype=torch.float64)


def distance(center, order):
    return lambda z: np.linalg.norm(z - center, ord=order)


CASES = [
    Case("reals", Reals(), (5,), lambda z: z, lambda z: 0.0),
    Case("nonnegative", NonNegative(), PAIR, clip(0.0, inf), outside(0.0, inf)),
    Case("box-scalar", Box(-0.5, 1.0), PAIR, clip(-0.5, 1.0), outside(-0.5, 1.0)),
    Case("box-half-line", Box(0.5, inf), (4,), clip(0.5, inf), outside(0.5, inf)),
    Case("box-tensor", Box(torch_of(LOW), torch_of(HIGH)), (4,), clip(LOW, HIGH), outside(LOW, HIGH)),
    Case("box-row", Box(-0.5, torch_of(ROW)), (2, 3), clip(-0.5, np.tile(ROW, 2)), outside(-0.5, np.tile(ROW, 2))),
    Case("l2", L2Ball(1.5), PAIR, l2_ball(1.5), lambda z: max(np.linalg.norm(z) - 1.5, 0)),
    Case(
        "l2-center",
        L2Ball(0.7, torch_of(CENTER)),
        PAIR,
        l2_ball(0.7, CENTER),
        lambda z: max(distance(CENTER, 2)(z) - 0.7, 0),
    ),
    Case("l1", L1Ball(2.0), (2, 3), l1_ball(2.0), lambda z: max(np.abs(z).sum() - 2.0, 0)),
    Case(
        "l1-center",
        L1Ball(1.2, torch_of(CENTER)),
        PAIR,
        l1_ball(1.2, CENTER),
        lambda z: max(distance(CENTER, 1)(z) - 1.2, 0),
    ),
    Case("linf", LinfBall(0.8, 0.5), (5,), clip(-0.3, 1.3), outside(-0.3, 1.3)),
    Case(
        "linf-center",
        LinfBall(0.8, torch_of(CENTER)),
        PAIR,
        clip(CENTER - 0.8, CENTER + 0.8),
        lambda z: max(distance(CENTER, inf)(z) - 0.8, 0),
    ),
    Case("simplex", Simplex(), (6,), simplex(1.0), off_simplex(1.0)),
    Case("simplex-total", Simplex(2.5), [(2,), (3, 2)], simplex(2.5), off_simplex(2.5)),
    Case("half-space", HalfSpace(torch_of(NORMAL), -1.0), PAIR, half_space(NORMAL, -1.0), lambda z: max(NORMAL @ z + 1.0, 0)),
    Case("affine", AffineSet(torch_of(A2), torch_of(B2)), PAIR, affine(A2, B2), lambda z: np.abs(A2 @ z - B2).max()),
    Case("affine-dependent", AffineSet(torch_of(A3), torch_of(B3)), (5,), affine(A2, B2), lambda z: np.abs(A2 @ z - B2).max()),
    Case(
        "product",
        Product({"b": NonNegative(), "a": Simplex()}),
        PAIR,
        lambda z: np.concatenate(blocks((3, simplex(1.0)), (2, clip(0.0, inf)))(z)),
        lambda z: max(blocks((3, off_simplex(1.0)), (2, outside(0.0, inf)))(z)),
    ),
    Case(
        "product-nested",
        Product({"list": L2Ball(1.0), "c": Box(0.0, torch_of(ROW))}),
        TREE,
        lambda z: np.concatenate(blocks((2, lambda z: z), (5, l2_ball(1.0)), (3, clip(0.0, ROW)))(z)),
        lambda z: max(blocks((2, lambda z: 0), (5, lambda z: max(np.linalg.norm(z) - 1, 0)), (3, outside(0.0, ROW)))(z)),
    ),
    Case(
        "product-entry",
        Product({"list.0": Simplex(), "a": LinfBall(0.5)}),
        TREE,
        lambda z: np.concatenate(blocks((2, clip(-0.5, 0.5)), (4, simplex(1.0)), (4, lambda z: z))(z)),
        lambda z: max(blocks((2, outside(-0.5, 0.5)), (4, off_simplex(1.0)), (4, lambda z: 0))(z)),
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_bounded = pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)


def draw(seed, case, count, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, size(case.shapes), generator=generator, dtype=torch.float64)).numpy()


def draw_outside(case):
    """A point and its projection, at least 1 apart."""
    points = draw(0, case, 20, scale=5.0)
    return next((z, case.project(z)) for z in points if np.linalg.norm(z - case.project(z)) > 1)


def project(case, z):
    return flat(case.set.project(fill(case.shapes, z)))


@each_case
@given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 5.0, 1e3]))
@many
def test_projection_is_the_one_by_hand(case, seed, scale):
    (z,) = draw(seed, case, 1, scale)
    np.testing.assert_allclose(project(case, z), case.project(z), rtol=0, atol=1e-11 * (1 + np.abs(z).max()))


@each_case
@given(seed=SEEDS)
@many
def test_projection_is_in_the_set_and_idempotent(case, seed):
    (z,) = draw(seed, case, 1)
    p = project(case, z)
    assert case.violation(p) <= 1e-12
    assert case.set.contains(fill(case.shapes, p), tol=1e-12)
    np.testing.assert_allclose(project(case, p), p, rtol=0, atol=1e-13)


@each_case
@given(seed=SEEDS)
@many
def test_projection_is_firmly_nonexpansive(case, seed):
    z, w = draw(seed, case, 2)
    move = project(case, z) - project(case, w)
    assert move @ move <= move @ (z - w) + 1e-11
    assert np.linalg.norm(move) <= np.linalg.norm(z - w) + 1e-11


@each_case
@given(seed=SEEDS)
@many
def test_no_point_of_the_set_is_nearer(case, seed):
    z, *others = draw(seed, case, 7)
    p = project(case, z)
    for w in others:
        w = case.project(w)
        assert (z - p) @ (w - p) <= 1e-10
        assert np.linalg.norm(z - p) <= np.linalg.norm(z - w) + 1e-11
        near = p + 1e-3 * (w - p)
        assert np.linalg.norm(z - p) <= np.linalg.norm(z - near) + 1e-11


@each_case
@given(seed=SEEDS, share=st.sampled_from([0.0, 0.3, 0.5]))
@many
def test_points_inside_stay(case, seed, share):
    first, second = (case.project(z) for z in draw(seed, case, 2))
    inside = share * first + (1 - share) * second
    assert case.set.contains(fill(case.shapes, inside), tol=1e-10)
    np.testing.assert_allclose(project(case, inside), inside, rtol=0, atol=1e-13)


@each_bounded
@given(seed=SEEDS, far=st.sampled_from([1e-2, 0.3, 10.0]))
@many
def test_contains_is_false_outside(case, seed, far):
    z, noise = draw(seed, case, 2)
    p = case.project(z)
    direction = z - p if np.linalg.norm(z - p) > 1e-3 else noise
    w = p + far * direction / np.linalg.norm(direction)
    gap = np.linalg.norm(w - case.project(w))
    assume(not 1e-9 < gap < 1e-4)
    assert case.set.contains(fill(case.shapes, w)) == (gap < 1e-9)


@each_bounded
def test_contains_measures_the_distance(case):
    """The tolerance is tol * (1 + ||z||) on the Euclidean distance, for the part that is broken."""
    z, p = draw_outside(case)
    w = p + 1e-3 * (z - p) / np.linalg.norm(z - p)
    assert not case.set.contains(fill(case.shapes, w), tol=1e-4 / (1 + np.linalg.norm(w)))
    assert case.set.contains(fill(case.shapes, w), tol=2e-3)


@each_case
def test_contains_is_false_for_nan(case):
    """In every coordinate, also in leaves that a Product does not name: those are in Reals(), which has no NaN."""
    for i in range(size(case.shapes)):
        z = case.project(draw(1, case, 1)[0])
        z[i] = nan
        assert not case.set.contains(fill(case.shapes, z)), f"coordinate {i}"


@each_case
def test_projection_keeps_nan(case):
    """A run that went wrong must neither be hidden nor break off inside a projection."""
    z = draw(1, case, 1)[0]
    z[0] = nan
    assert np.isnan(project(case, z)).any()


@each_bounded
@pytest.mark.parametrize("far", [1e3, 1e9, inf])
def test_contains_is_false_far_away(case, far):
    z, p = draw_outside(case)
    w = p.copy()
    w[z - p > 1e-9], w[z - p < -1e-9] = far, -far
    assert not case.set.contains(fill(case.shapes, w))


@pytest.mark.parametrize("member", [Box(0.0, 1.0), NonNegative(), LinfBall(), L2Ball()], ids=lambda s: type(s).__name__)
def test_contains_is_false_where_squares_overflow(member):
    assert not member.contains(torch.tensor([0.5, -1e25], dtype=torch.float32))


@each_case
def test_float32_is_kept(case):
    z = draw(2, case, 1)[0]
    projected = case.set.project(fill(case.shapes, z, torch.float32))
    assert {leaf.dtype for leaf in leaves(projected)} == {torch.float32}
    np.testing.assert_allclose(flat(projected), case.project(z), rtol=0, atol=2e-6)
    assert case.set.contains(projected)


@each_case
def test_structure_is_kept_and_the_argument_is_not_changed(case):
    z = draw(3, case, 1)[0]
    value = fill(case.shapes, z)
    projected = case.set.project(value)
    np.testing.assert_array_equal(flat(value), z)
    assert type(projected) is type(value)
    assert [leaf.shape for leaf in leaves(projected)] == [leaf.shape for leaf in leaves(value)]
    assert not any(leaf.requires_grad for leaf in leaves(projected))


@each_case
def test_bound_projection_changes_the_leaves_in_place(case):
    z = draw(4, case, 1)[0]
    x = Variable(fill(case.shapes, z), "x")
    problem = Problem(lambda x, y: y.sum(), lambda x, y: y.sum(), x_set=case.set)
    with torch.no_grad():
        problem._bind_projection(x)(None, x.leaves, 1.0)
    np.testing.assert_allclose(flat(x.value), case.project(z), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("member", "z", "expected"),
    [
        (L2Ball(1.0), {"a": [3.0], "b": [4.0, 0.0]}, {"a": [0.6], "b": [0.8, 0.0]}),
        (L1Ball(1.0), {"a": [2.0], "b": [-1.5, 0.1]}, {"a": [0.75], "b": [-0.25, 0.0]}),
        (LinfBall(1.0), {"a": [3.0], "b": [-4.0, 0.5]}, {"a": [1.0], "b": [-1.0, 0.5]}),
        (Simplex(3.0), {"a": [3.0], "b": [2.0, -5.0]}, {"a": [2.0], "b": [1.0, 0.0]}),
        (Box(torch.zeros(1), torch.ones(1)), {"a": [3.0], "b": [-4.0, 0.5]}, {"a": [1.0], "b": [0.0, 0.5]}),
        (HalfSpace(torch.tensor([0.0, 2.0, 0.0]), 2.0), {"a": [9.0], "b": [4.0, 7.0]}, {"a": [9.0], "b": [1.0, 7.0]}),
        (AffineSet(torch.ones(1, 3).double(), torch_of([6.0])), {"a": [0.0], "b": [3.0, 0.0]}, {"a": [1.0], "b": [4.0, 1.0]}),
        (L2Ball(1.0, torch.tensor([5.0, 0.0, 0.0])), {"a": [5.0], "b": [0.0, 3.0]}, {"a": [5.0], "b": [0.0, 1.0]}),
        (L2Ball(1.0, 2.0), {"a": [2.0], "b": [2.0, 9.0]}, {"a": [2.0], "b": [2.0, 3.0]}),
        (Product({"b": L2Ball(1.0)}), {"a": [9.0], "b": [3.0, 4.0]}, {"a": [9.0], "b": [0.6, 0.8]}),
    ],
    ids=lambda item: type(item).__name__ if not isinstance(item, dict) else "",
)
def test_several_leaves_by_hand(member, z, expected):
    projected = member.project({name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in z.items()})
    assert list(projected) == list(expected)
    for name, numbers in expected.items():
        np.testing.assert_allclose(projected[name].numpy(), numbers, rtol=0, atol=1e-12)


def test_module_is_copied():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    projected = Product({"0": Box(10.0, 20.0), "1.bias": Box(-2.0, -1.0)}).project(module)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    after = dict(projected.named_parameters())
    assert bool((after["0.weight"] == 10).all() and (after["0.bias"] == 10).all() and (after["1.bias"] == -1).all())
    assert torch.equal(after["1.weight"], before["1.weight"])


def test_frozen_parameters_are_left_alone():
    module = nn.Linear(2, 2).double()
    module.bias.requires_grad_(False)
    assert not bool((Box(10.0, 20.0).project(module).bias == 10).any())


@pytest.mark.parametrize("far", [1e3, 3e7, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("member", [Simplex(), L1Ball(1.0), L2Ball(1.0), LinfBall(1.0)], ids=lambda s: type(s).__name__)
def test_far_points_go_to_the_corner(member, dtype, far):
    projected = member.project(torch.tensor([0.0, far, 0.0], dtype=dtype))
    np.testing.assert_allclose(projected.numpy(), [0.0, 1.0, 0.0], rtol=0, atol=1e-5)


def test_l2_ball_projects_where_squares_overflow():
    projected = L2Ball(1.0).project(torch.tensor([3e25, -4e25], dtype=torch.float32))
    np.testing.assert_allclose(projected.numpy(), [0.6, -0.8], rtol=0, atol=1e-5)


def test_scalar_leaf():
    assert float(Box(0.0, 1.0).project(torch.tensor(3.0))) == 1.0
    assert float(Simplex(2.0).project(torch.tensor(-7.0))) == 2.0
    assert float(L1Ball(2.0).project(torch.tensor(-7.0))) == -2.0


def test_branch_name_is_not_a_prefix_of_letters():
    """ "a" names the leaf a and what is below it, not ab."""
    value = {"a": {"c": torch.tensor(5.0)}, "ab": torch.tensor(5.0)}
    projected = Product({"a": Box(0.0, 1.0)}).project(value)
    assert float(projected["a"]["c"]) == 1.0
    assert float(projected["ab"]) == 5.0


def test_which_sets_are_products_of_intervals():
    names = {case.name for case in CASES if case.set.coordinatewise}
    assert names == {"reals", "nonnegative", "box-scalar", "box-half-line", "box-tensor", "box-row", "linf", "linf-center"}
    assert Product({"a": Box(0.0, 1.0), "b": NonNegative()}).coordinatewise


V3 = torch.zeros(3, dtype=torch.float64)
V2 = torch.zeros(2, dtype=torch.float64)
ERRORS = [
    ("l2-radius", lambda: L2Ball(-1.0), ValueError, r"L2Ball: radius: .*-1\.0"),
    ("l1-radius", lambda: L1Ball(0.0), ValueError, r"L1Ball: radius: .*0\.0"),
    ("linf-radius", lambda: LinfBall(nan), ValueError, r"LinfBall: radius: .*nan"),
    ("simplex-total", lambda: Simplex(-2.0), ValueError, r"Simplex: total: .*-2\.0"),
    ("box-order", lambda: Box(1.0, 0.0), ValueError, r"Box: low .*high"),
    ("box-order-tensor", lambda: Box(torch.tensor([0.0, 2.0]), torch.ones(2)), ValueError, r"Box: low .*high"),
    ("box-nan", lambda: Box(nan, 1.0), ValueError, r"Box: low"),
    ("box-two-shapes", lambda: Box(torch.zeros(2), torch.ones(3)), ValueError, r"Box: low .*high"),
    ("box-low-shape", lambda: Box(torch.zeros(2), 1.0).project(V3), ValueError, r"Box: low has shape \(2,\).*\(3,\)"),
    ("box-high-shape", lambda: Box(0.0, torch.ones(2)).project(V3), ValueError, r"Box: high has shape \(2,\).*\(3,\)"),
    ("box-too-large", lambda: Box(0.0, torch.ones(2, 3)).project(V3), ValueError, r"Box: high has shape \(2, 3\)"),
    ("box-leaf", lambda: Box(0.0, torch.ones(2)).project({"u": V2, "v": V3}), ValueError, r"value\['v'\].*Product"),
    ("l2-center", lambda: L2Ball(1.0, V2).project(V3), ValueError, r"L2Ball: center has 2 .*3"),
    ("l1-center", lambda: L1Ball(1.0, V2).contains(V3), ValueError, r"L1Ball: center has 2 .*3"),
    ("linf-center", lambda: LinfBall(1.0, V3).project({"u": V3, "v": V2}), ValueError, r"LinfBall: center has 3 .*5"),
    ("normal-size", lambda: HalfSpace(torch.ones(2), 0.0).project(V3), ValueError, r"HalfSpace: normal has 2 .*3"),
    ("normal-number", lambda: HalfSpace(torch.tensor(1.0), 0.0).project(V3), ValueError, r"HalfSpace: normal has 1 .*3"),
    ("normal-zero", lambda: HalfSpace(V3, 0.0), ValueError, r"HalfSpace: normal"),
    ("matrix-shape", lambda: AffineSet(torch.ones(3), torch.ones(1)), ValueError, r"AffineSet: matrix .*\(3,\)"),
    ("rhs-shape", lambda: AffineSet(torch.ones(2, 3), torch.ones(3)), ValueError, r"AffineSet: .*rhs .*\(2, 3\) and \(3,\)"),
    ("row-size", lambda: AffineSet(torch.ones(1, 2), torch.ones(1)).project(V3), ValueError, r"AffineSet: .*matrix has 2 .*3"),
    ("contradiction", lambda: AffineSet(torch.ones(2, 3), torch.tensor([0.0, 1.0])), ValueError, r"AffineSet: .*contradict"),
    ("product-unknown", lambda: Product({"w": Reals()}).project({"u": V2, "v": V3}), ValueError, r"Product: .*'w'.*'u', 'v'"),
    ("product-prefix", lambda: Product({"u": Reals()}).project({"uu": V2}), ValueError, r"Product: .*'u'.*'uu'"),
    (
        "product-overlap",
        lambda: Product({"u": NonNegative(), "u.0": Simplex()}).project({"u": [V2, V3]}),
        ValueError,
        r"Product: 'u\.0' and 'u' both .*'u\.0'",
    ),
    ("product-member", lambda: Product({"u": 3.0}), TypeError, r"Product: 'u' .*float"),
    (
        "product-shape",
        lambda: Product({"v": Box(0.0, V2)}).project({"u": V2, "v": V3}),
        ValueError,
        r"Box: high .*value\['v'\]",
    ),
    ("product-size", lambda: Product({"v": L2Ball(1.0, V2)}).project({"u": V2, "v": V3}), ValueError, r"center has 2 .*3"),
    ("integers", lambda: Box(0.0, 1.0).project(torch.tensor([3])), TypeError, r"value: dtype torch.int64"),
    ("not-a-tensor", lambda: Box(0.0, 1.0).project(3.0), TypeError, r"value: got float"),
]


@pytest.mark.parametrize(("call", "kind", "match"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_error_names_the_argument(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


def test_box_bounds_may_be_lists_and_broadcast():
    box = Box([0.0, 0.1, 0.2], torch.ones(2, 3))
    assert box.project(torch.full((2, 3), -1.0))[1].tolist() == pytest.approx([0.0, 0.1, 0.2])


def test_single_precision_matrices_serve_double_precision_variables():
    matrix = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 7.0]])
    z = AffineSet(matrix, torch.ones(2)).project(torch.ones(3, dtype=torch.float64))
    assert float((matrix.double() @ z - 1).abs().max()) < 1e-13


def test_a_tiny_normal_does_not_underflow():
    half = HalfSpace(torch.full((2,), 1e-30, dtype=torch.float64), 0.0)
    assert half.project(torch.tensor([1.0, 1.0])).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_product_in_a_product_and_an_empty_system_are_refused():
    with pytest.raises(TypeError, match="Product: 'a' maps to another Product"):
        Product({"a": Product({"b": NonNegative()})})
    with pytest.raises(ValueError, match="AffineSet: matrix must have two dimensions and at least one row"):
        AffineSet(torch.ones(0, 2), torch.ones(0))
