"""Quadratic programs against KKT conditions, on random instances of several kinds."""

import numpy as np
import pytest

from meha.numerics import quadratic_program
from meha.numerics.quadratic_program import feasible, no_rows, solve_program


def random_program(kind, n, seed):
    """2 n inequalities, n / 3 equations; feasible, and bounded for linear programs, unless the kind says otherwise."""
    generator = np.random.default_rng(seed)
    S = generator.normal(size=(n, n))
    H, A, C = S @ S.T + 0.1 * np.eye(n), generator.normal(size=(2 * n, n)), generator.normal(size=(n // 3, n))
    z = generator.normal(size=n)
    b, d = A @ z + np.abs(generator.normal(size=2 * n)) * (generator.random(2 * n) < 0.6), C @ z
    g = -A.T @ np.abs(generator.normal(size=2 * n))  # a multiplier for each row: the dual is feasible
    if kind == "linear":
        H = np.zeros((n, n))
    if kind == "degenerate":  # H of half rank, repeated rows, dependent equations
        H = S[: n // 2].T @ S[: n // 2]
        A, b, C, d = np.vstack([A, A[:n]]), np.append(b, b[:n]), np.vstack([C, C.sum(0)]), np.append(d, d.sum())
    if kind == "infeasible":
        A, b = np.vstack([A, -A[:1]]), np.append(b, -b[0] - 0.01)
    return H, g, A, b, C, d


@pytest.mark.parametrize("kind", ["regular", "linear", "degenerate"])
@pytest.mark.parametrize("n", [3, 8, 15])
def test_solutions_satisfy_the_kkt_conditions(kind, n):
    for seed in range(10):
        H, g, A, b, C, d = program = random_program(kind, n, seed)
        answer = solve_program(*program)
        assert answer.solved
        assert np.abs(H @ answer.z + g + A.T @ answer.lam + C.T @ answer.mu).max() <= 1e-8
        assert (A @ answer.z - b).max() <= 1e-8
        assert np.abs(C @ answer.z - d).max(initial=0.0) <= 1e-8
        assert answer.lam.min() >= 0
        assert np.abs(answer.lam * (b - A @ answer.z)).max() <= 1e-7


def test_infeasible_programs_are_not_solved():
    for seed in range(10):
        _, _, A, b, C, d = program = random_program("infeasible", 5, seed)
        assert not solve_program(*program).solved
        assert feasible(A, b, C, d, np.zeros(5))[1] > 1e-4


def test_unbounded_programs_are_not_solved():
    assert not solve_program(np.zeros((2, 2)), np.array([-1.0, 0.0]), np.array([[0.0, 1.0]]), np.ones(1), *no_rows(2)).solved
    assert not solve_program(np.zeros((1, 1)), np.ones(1), *no_rows(1), *no_rows(1)).solved


def test_a_right_guess_of_the_active_rows_gives_the_same_point():
    for seed in range(5):
        program = random_program("regular", 6, seed)
        answer = solve_program(*program)
        assert solve_program(*program, answer.lam > 0).z == pytest.approx(answer.z, abs=1e-9)
        assert solve_program(*program, answer.lam == 0).z == pytest.approx(answer.z, abs=1e-9)  # a wrong one costs time only


def test_the_iteration_stops_where_it_stalls(monkeypatch):
    """The residual of a program without a feasible point has a positive limit: few more iterations follow."""
    lengths = []
    original = quadratic_program._length
    monkeypatch.setattr(quadratic_program, "_length", lambda *pair: lengths.append(1) or original(*pair))
    for seed in range(5):
        lengths.clear()
        solve_program(*random_program("infeasible", 8, seed))
        assert len(lengths) / 4 <= 40  # four for each iteration
