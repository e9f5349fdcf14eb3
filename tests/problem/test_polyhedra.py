"""Polyhedra and intersections: projections against a QP solver and their definition, and the program that they rest on."""

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meha
from meha.numerics.quadratic_program import feasible, no_rows, solve_program
from meha.problem.sets import AffineSet, Box, HalfSpace, Intersection, L2Ball, NonNegative, Polyhedron, Product, Simplex
from meha.tensors.variables import Variable

D = torch.float64


def random_polyhedron(rows, n, seed, equations=0):
    generator = np.random.default_rng(seed)
    A, inside = generator.normal(size=(rows, n)), generator.normal(size=n)
    C = generator.normal(size=(equations, n))
    more = (C, C @ inside) if equations else (None, None)
    return Polyhedron(A, A @ inside + generator.random(rows), *more), 5 * generator.normal(size=n)


def reference(domain, z):
    point = cvxpy.Variable(len(z))
    A, b, C, d = domain.arrays
    limits = [A @ point <= b] + ([C @ point == d] if len(d) else [])
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(point - z)), limits)
    program.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return point.value


@pytest.mark.parametrize(
    ("rows", "n", "equations"), [(3, 2, 0), (10, 5, 0), (40, 20, 3), (100, 50, 0), (200, 100, 0), (100, 100, 10)]
)
def test_projections_agree_with_a_solver(rows, n, equations):
    for seed in range(3):
        domain, z = random_polyhedron(rows, n, seed, equations)
        projected = domain.project(torch.from_numpy(z)).numpy()
        expected = reference(domain, z)
        # the solver stops at a gap of 1e-12, which leaves its point uncertain by about the root of that
        assert np.abs(projected - expected).max() <= 1e-8 * (1 + np.abs(z).max()) or (
            np.sum((projected - z) ** 2) <= np.sum((expected - z) ** 2) + 1e-10
            and domain.contains(torch.from_numpy(projected), 1e-9)
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_projections_meet_their_definition(seed, rows, n, degenerate):
    """<z - p, w - p> <= 0 for all points w of the set, also where rows are repeated and vertices have too many of them."""
    generator = np.random.default_rng(seed)
    A = generator.integers(-2, 3, size=(rows, n)).astype(float)
    b = np.zeros(rows) if degenerate else generator.random(rows)
    A, b = np.vstack([A, A[:1]]), np.concatenate([b, b[:1]])
    domain = Polyhedron(A, b)
    z = 3 * generator.normal(size=n)
    p = domain.project(torch.from_numpy(z)).numpy()
    assert (A @ p <= b + 1e-8).all()
    for _ in range(10):
        w = domain.project(torch.from_numpy(3 * generator.normal(size=n))).numpy()
        assert (z - p) @ (w - p) <= 1e-7
    assert domain.project(torch.from_numpy(p)).numpy() == pytest.approx(p, abs=1e-9)


def test_known_polyhedra():
    z = torch.tensor([0.9, -0.2, 0.7], dtype=D)
    simplex = Polyhedron(-np.eye(3), np.zeros(3), np.ones((1, 3)), np.ones(1))
    assert simplex.project(z).numpy() == pytest.approx(Simplex().project(z).numpy(), abs=1e-12)
    box = Polyhedron(np.vstack([np.eye(3), -np.eye(3)]), np.full(6, 0.5))
    assert box.project(z).numpy() == pytest.approx(Box(-0.5, 0.5).project(z).numpy(), abs=1e-12)
    plane = Polyhedron(None, None, [[1.0, 2.0, 3.0]], [1.0])
    assert plane.project(z).numpy() == pytest.approx(
        AffineSet(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1)).project(z).numpy()
    )
    half = Polyhedron([[1.0, 2.0, 3.0]], [1.0])
    assert half.project(z).numpy() == pytest.approx(HalfSpace(torch.tensor([1.0, 2.0, 3.0]), 1.0).project(z).numpy())


def test_the_projection_is_differentiated_on_its_face():
    domain = Polyhedron([[1.0, 1.0], [-1.0, 0.0]], [1.0, 0.0])
    z = torch.tensor([2.0, 1.5], dtype=D, requires_grad=True)
    (p,) = domain.project_leaves([z])
    (gradient,) = torch.autograd.grad(p @ torch.tensor([1.0, 3.0], dtype=D), z)
    assert gradient.tolist() == pytest.approx([-1.0, 1.0])  # the part of (1, 3) along (1, -1)
    face = domain.face([p.detach()])
    assert face.rows.tolist() == [[1.0, 1.0]]
    assert domain.face([torch.tensor([0.2, 0.1], dtype=D)]).rows is None


def test_polyhedra_of_dicts_and_in_other_precisions():
    domain = Polyhedron([[1.0, 1.0, 1.0]], [1.0])
    point = {"a": torch.ones(2), "b": torch.ones(1)}
    assert domain.project(point)["b"].tolist() == pytest.approx([1 / 3])
    assert domain.project(torch.ones(3)).dtype is torch.float32
    inner = Product({"a": Polyhedron([[1.0, 1.0]], [0.0])})
    assert inner.project(point)["a"].tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1.0]], None), "A and b belong together"),
        (([[1.0]], [1.0, 2.0]), "one entry per row"),
        (([[1.0]], [1.0], [[1.0, 1.0]], [0.0]), "as many columns"),
        ((), "give A and b"),
        (([[1.0], [-1.0]], [-1.0, -1.0]), "is empty"),
        (([[float("nan")]], [1.0]), "finite"),
    ],
)
def test_wrong_polyhedra_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Polyhedron(*arguments)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="Polyhedron: a row has 2 entries, but x has 3"):
        Polyhedron([[1.0, 1.0]], [1.0]).parts(Variable(torch.zeros(3), "x"))


def test_intersections():
    both = Intersection(Box(0.5, 2.0), L2Ball(1.0))
    assert both.project(torch.tensor([2.0, 0.0], dtype=D)).tolist() == pytest.approx([3**0.5 / 2, 0.5], abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    rows = Polyhedron([[1.0, 2.0]], [0.3])
    mixed = Intersection(rows, NonNegative())
    exact = Polyhedron([[1.0, 2.0], [-1.0, 0.0], [0.0, -1.0]], [0.3, 0.0, 0.0])
    for _ in range(20):
        z = torch.randn(2, generator=generator, dtype=D)
        assert mixed.project(z).numpy() == pytest.approx(exact.project(z).numpy(), abs=1e-8)
    assert both.contains(torch.tensor([0.6, 0.6], dtype=D))
    assert not both.contains(torch.tensor([0.9, 0.9], dtype=D))
    assert not both.coordinatewise
    assert Intersection(Box(0.0, 1.0), NonNegative()).coordinatewise
    with pytest.raises(ValueError, match="two sets or more"):
        Intersection(Box(0.0, 1.0))
    with pytest.raises(TypeError, match="inside the Product"):
        Intersection(Box(0.0, 1.0), Product({"a": Box(0.0, 1.0)}))


@pytest.mark.parametrize(
    "method",
    [meha.contrib.AdaptiveMEHA(), pytest.param(meha.RHG(alpha=0.1, beta=0.4, inner_steps=10), marks=pytest.mark.slow)],
    ids=lambda method: method.name,
)
def test_methods_take_polyhedra(method):
    """y is the projection of x on a triangle, drawn to a point beyond its longest side, and x to zero."""
    target = torch.tensor([1.0, 0.5], dtype=D)
    problem = meha.Problem(
        lambda x, y: (y - target).square().sum() + 0.1 * x.square().sum(),
        lambda x, y: (y - x).square().sum(),
        x_set=Polyhedron([[1.0, 1.0]], [2.0]),
        y_set=Polyhedron([[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], [1.0, 0.0, 0.0]),
    )
    start = torch.zeros(2, dtype=D)
    default = meha.solve(problem, start, start)
    assert default.converged
    assert default.x.numpy() == pytest.approx([8 / 11, 3 / 11], abs=1e-5)
    solution = meha.solve(problem, start, start, method, max_steps=3000)
    assert solution.x.numpy() == pytest.approx(default.x.numpy(), abs=0.05)


def test_programs():
    generator = np.random.default_rng(0)
    for _ in range(20):
        n, m = 4, 9
        root = generator.normal(size=(n, 2))
        H, g = root @ root.T, generator.normal(size=n)
        A = np.vstack([generator.normal(size=(m, n)), np.eye(n), -np.eye(n)])
        b = np.concatenate([generator.random(m), np.full(2 * n, 3.0)])
        answer = solve_program(H, g, A, b, *no_rows(n))
        assert answer.solved
        gradient = H @ answer.z + g + A.T @ answer.lam
        assert np.abs(gradient).max() <= 1e-8
        assert (A @ answer.z - b).max() <= 1e-8
        assert (answer.lam >= 0).all()
        assert np.abs(answer.lam * (A @ answer.z - b)).max() <= 1e-8
        guessed = solve_program(H + np.eye(n), g, A, b, *no_rows(n), guess=answer.lam > 0)
        plain = solve_program(H + np.eye(n), g, A, b, *no_rows(n))
        assert guessed.z == pytest.approx(plain.z, abs=1e-7)


def test_contradictions_are_seen():
    A, b = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([-1.0, -1.0])
    assert not solve_program(np.eye(2), np.ones(2), A, b, *no_rows(2)).solved
    point, violation = feasible(A, b, *no_rows(2), np.zeros(2))
    assert violation == pytest.approx(1.0, abs=1e-6)
    assert point[0] == pytest.approx(0.0, abs=1e-6)
