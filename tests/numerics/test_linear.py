"""Linear systems: conjugate gradients and the Neumann series against dense solves, and what singular systems do."""

import numpy as np
import pytest
import torch

from meha.numerics.linear_systems import CurvatureError, conjugate_gradients, neumann_series

SHAPES = [(2, 3), (1,), (4,)]
N = 11


def symmetric(eigenvalues, seed=0):
    """A dense matrix with these eigenvalues and random eigenvectors."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(eigenvalues),) * 2))
    return basis @ np.diag(eigenvalues) @ basis.T


def split(vector, dtype=torch.float64):
    """A vector of N numbers as leaves of different shapes."""
    sizes = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    return [torch.tensor(p, dtype=dtype).reshape(s) for p, s in zip(np.split(vector, sizes[:-1]), SHAPES, strict=True)]


def join(leaves):
    return np.concatenate([leaf.double().numpy().reshape(-1) for leaf in leaves])


class Operator:
    """v -> H v on leaves, with the number of products."""

    def __init__(self, matrix, dtype=torch.float64):
        self.matrix, self.dtype, self.products = matrix, dtype, 0

    def __call__(self, leaves):
        self.products += 1
        return split(self.matrix @ join(leaves), self.dtype)


def krylov(H, b, k):
    """What k steps of conjugate gradients give: the minimiser of v'Hv/2 - b'v over span(b, Hb, ..., H^(k-1) b)."""
    V = np.linalg.qr(np.stack([np.linalg.matrix_power(H, j) @ b for j in range(k)], axis=1))[0]
    return V @ np.linalg.solve(V.T @ H @ V, V.T @ b)


def relative_residual(H, v, b):
    return np.linalg.norm(b - H @ v) / np.linalg.norm(b)


RIGHT = np.random.default_rng(1).normal(size=N)
EIGENVALUES = np.geomspace(0.1, 20.0, N)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 3 * N])
def test_conjugate_gradients_are_the_best_in_the_krylov_space(seed, steps):
    H = symmetric(EIGENVALUES, seed)
    apply, rhs = Operator(H), split(RIGHT)
    v, residual = conjugate_gradients(apply, rhs, steps=steps)
    expected = np.linalg.solve(H, RIGHT) if steps > N else krylov(H, RIGHT, steps)
    assert np.allclose(join(v), expected, rtol=0, atol=1e-9 * np.linalg.norm(expected))
    assert [leaf.shape for leaf in v] == [leaf.shape for leaf in rhs]
    assert apply.products == steps or (steps > N and N <= apply.products <= 2 * N)
    assert residual == pytest.approx(relative_residual(H, join(v), RIGHT), rel=1e-6, abs=1e-13)
    assert (residual > 1e-3) == (steps < N)  # what is not solved is not called solved
    assert np.array_equal(join(rhs), RIGHT)


def test_conjugate_gradients_stop_at_the_tolerance():
    H = symmetric(EIGENVALUES)
    products = []
    for tol in (0.5, 0.1, 1e-2):
        apply = Operator(H)
        v, residual = conjugate_gradients(apply, split(RIGHT), steps=100, tol=tol)
        assert relative_residual(H, join(v), RIGHT) <= tol * (1 + 1e-9)
        assert residual <= tol
        before = krylov(H, RIGHT, apply.products - 1) if apply.products > 1 else 0 * RIGHT
        assert relative_residual(H, before, RIGHT) > tol  # and not a step later than that
        products.append(apply.products)
    assert products == sorted(set(products))


def test_conjugate_gradients_stop_when_they_have_the_solution():
    """As many products as there are different eigenvalues; none for a zero right-hand side."""
    for eigenvalues, count in ((np.full(N, 3.0), 1), (np.where(np.arange(N) < 4, 2.0, 5.0), 2)):
        H = symmetric(eigenvalues)
        apply = Operator(H)
        v, residual = conjugate_gradients(apply, split(RIGHT), steps=50)
        assert apply.products == count
        assert residual < 1e-14
        assert np.allclose(join(v), np.linalg.solve(H, RIGHT), rtol=0, atol=1e-13)
    apply = Operator(symmetric(EIGENVALUES))
    v, residual = conjugate_gradients(apply, split(0 * RIGHT), steps=5)
    assert (apply.products, residual) == (0, 0.0)
    assert not join(v).any()


# The last one fails: squares underflow in float32, and a system that is solved to 1 % is reported with a residual of 0. Scaling
# the right-hand side by a power of 2 first, and the answer back, cures it (meha/linear.py).
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6, 1e-21])
def test_conjugate_gradients_in_single_precision(scale):
    H = symmetric(np.geomspace(0.5, 5.0, N))
    rhs = split(scale * RIGHT, torch.float32)
    v, residual = conjugate_gradients(Operator(H, torch.float32), rhs, steps=4 * N)
    assert all(leaf.dtype == torch.float32 for leaf in v)
    expected = np.linalg.solve(H, scale * RIGHT)
    assert np.linalg.norm(join(v) - expected) < 1e-5 * np.linalg.norm(expected)
    assert residual < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowest", [-1e-3, -1.0])  # of an eigenvalue 0, rounding would decide the sign
def test_systems_that_are_not_positive_definite_are_refused(dtype, lowest):
    H = symmetric(np.append(np.geomspace(1.0, 4.0, N - 1), lowest))
    with pytest.raises(CurvatureError, match="not positive definite"):
        conjugate_gradients(Operator(H, dtype), split(RIGHT, dtype), steps=3 * N)
    assert issubclass(CurvatureError, ArithmeticError)  # which solve() reports as a breakdown


def test_the_first_product_can_be_enough_to_refuse():
    apply = Operator(-np.eye(N))
    with pytest.raises(CurvatureError):
        conjugate_gradients(apply, split(RIGHT), steps=5)
    assert apply.products == 1
    with pytest.raises(CurvatureError):
        conjugate_gradients(Operator(0 * np.eye(N)), split(RIGHT), steps=5)


def test_a_singular_system_with_solutions_is_solved():
    """A right-hand side in the range of H has a solution, and conjugate gradients find the shortest one."""
    H = symmetric(np.append(np.geomspace(1.0, 4.0, N - 2), [0.0, 0.0]))
    rhs = H @ RIGHT
    v, residual = conjugate_gradients(Operator(H), split(rhs), steps=3 * N, tol=1e-12)
    assert np.allclose(join(v), np.linalg.pinv(H) @ rhs, rtol=0, atol=1e-9)
    assert residual <= 1e-12


def test_conjugate_gradients_with_a_preconditioner():
    rng = np.random.default_rng(1)
    A = torch.tensor(rng.normal(size=(20, 20)))
    H, right = A @ A.T + torch.diag(torch.linspace(1, 1e4, 20, dtype=torch.float64)), torch.tensor(rng.normal(size=20))
    products = []

    def apply(v):
        products.append(v)
        return [H @ v[0]]

    (v,), residual = conjugate_gradients(apply, [right], steps=100, tol=1e-10, precondition=lambda r: [r[0] / H.diagonal()])
    preconditioned = len(products)
    assert residual <= 1e-10
    assert torch.allclose(v, torch.linalg.solve(H, right), rtol=1e-7)
    conjugate_gradients(apply, [right], steps=100, tol=1e-10)
    assert preconditioned < len(products) - preconditioned
    with pytest.raises(CurvatureError) as met:
        conjugate_gradients(lambda v: [-v[0]], [right], steps=10)
    assert torch.equal(met.value.v[0], right)  # a direction in which the curvature is negative


@pytest.mark.parametrize("terms", [1, 2, 7])
def test_neumann_series_term_by_term(terms):
    H, step = symmetric(np.geomspace(0.5, 5.0, N)), 0.3
    apply, rhs = Operator(H), split(RIGHT)
    v = neumann_series(apply, rhs, step=step, terms=terms)
    expected = step * sum(np.linalg.matrix_power(np.eye(N) - step * H, j) @ RIGHT for j in range(terms + 1))
    assert np.allclose(join(v), expected, rtol=0, atol=1e-12)
    assert apply.products == terms
    assert np.array_equal(join(rhs), RIGHT)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_neumann_series_tends_to_the_solution(dtype, accuracy):
    H = symmetric(np.geomspace(1.0, 3.0, N))
    v = neumann_series(Operator(H, dtype), split(RIGHT, dtype), step=0.5, terms=60)
    expected = np.linalg.solve(H, RIGHT)
    assert all(leaf.dtype == dtype for leaf in v)
    assert np.linalg.norm(join(v) - expected) < accuracy * np.linalg.norm(expected)


def test_neumann_series_grows_when_the_step_is_too_long():
    H = symmetric(np.geomspace(1.0, 3.0, N))
    sizes = [np.linalg.norm(join(neumann_series(Operator(H), split(RIGHT), step=0.8, terms=t))) for t in (10, 20, 40)]
    assert sizes[2] > 10 * sizes[1] > 100 * sizes[0]
