"""The memory of curvature against dense BFGS matrices, and the proximal quasi-Newton descent."""

import math

import numpy as np
import pytest
import torch

import meha
from meha.numerics.limited_memory import EvaluatedPoint, LimitedMemory, QuasiNewtonDescent

F64 = torch.float64


def dense_inverse(S, Y, scale):
    """BFGS updates of scale * I, as in any textbook."""
    H = scale * torch.eye(S.shape[1], dtype=F64)
    for s, y in zip(S, Y, strict=True):
        rho = 1 / (s @ y)
        V = torch.eye(len(s), dtype=F64) - rho * torch.outer(s, y)
        H = V @ H @ V.T + rho * torch.outer(s, s)
    return H


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_compact_form_is_bfgs(weight):
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(6, 6, generator=generator, dtype=F64) for _ in range(2))
    A, B = A @ A.T + torch.eye(6, dtype=F64), B @ B.T
    S = torch.randn(4, 6, generator=generator, dtype=F64)
    pairs = LimitedMemory(10)
    pairs.reweigh(weight)
    r = torch.randn(6, generator=generator, dtype=F64)
    for i, s in enumerate(S):
        pairs.add(s, A @ s, B @ s)
        Y = S[: i + 1] @ (A + weight * B)
        scale = (s @ Y[-1]) / (Y[-1] @ Y[-1])
        assert torch.allclose(pairs.direction(r), -dense_inverse(S[: i + 1], Y, scale) @ r)
    other = LimitedMemory(10)
    other.reweigh(3.0)
    for s in S:
        other.add(s, A @ s, B @ s)
    pairs.reweigh(3.0)
    assert torch.allclose(pairs.direction(r), other.direction(r))  # old pairs under a new weight
    assert torch.allclose(pairs.direction((A + 3 * B) @ S[-1]), -S[-1])  # the last pair holds exactly


def test_pairs_on_free_coordinates():
    A = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=F64))
    pairs = LimitedMemory(10)
    for s in torch.eye(3, dtype=F64):
        pairs.add(s, A @ s)
    mask = torch.tensor([True, False, True])
    assert torch.allclose(pairs.direction(torch.ones(3, dtype=F64), mask), torch.tensor([-1.0, 0.0, -1 / 9], dtype=F64))


def test_saved_pairs_are_the_same_bit_for_bit():
    """Matrices that grew pair by pair, on coordinates so different that those of all pairs at once would be others."""
    generator = torch.Generator().manual_seed(0)
    A = torch.diag(torch.logspace(0, 5, 6, dtype=F64))
    steps = torch.randn(8, 6, generator=generator, dtype=F64)
    r = torch.randn(6, generator=generator, dtype=F64)
    pairs, copied, afresh = LimitedMemory(10, damping=1e-4), LimitedMemory(10, damping=1e-4), LimitedMemory(10, damping=1e-4)
    for s in steps[:6]:
        pairs.add(s, A @ s)
        pairs.direction(r)
        afresh.add(s, A @ s)
    assert not torch.allclose(afresh.direction(r), pairs.direction(r))
    copied.load_state_dict(pairs.state_dict())
    for s in steps[6:]:
        assert torch.equal(copied.direction(r), pairs.direction(r))
        pairs.add(s, A @ s)
        copied.add(s, A @ s)
    assert torch.equal(copied.direction(r), pairs.direction(r))


def test_pairs_without_curvature_are_left_out():
    pairs = LimitedMemory(3)
    one = torch.ones(2, dtype=F64)
    for y in (-one, torch.zeros(2, dtype=F64), math.nan * one):
        pairs.add(one, y)
    assert pairs.direction(one) is None
    for k in range(5):
        pairs.add(one, (k + 1) * one)
    assert len(pairs) == 3


def quadratic(n, condition, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=F64))[0]
    A = Q @ torch.diag(torch.logspace(0, math.log10(condition), n, dtype=F64)) @ Q.T
    b = torch.randn(n, generator=generator, dtype=F64)
    return A, b, lambda z: EvaluatedPoint(z, float(0.5 * z @ A @ z - b @ z), A @ z - b)


def descend(descent, z, steps):
    point = descent.evaluate(z)
    for _ in range(steps):
        new = descent.step(point, *descent.direction(point))
        if new is None:
            break
        assert new.value <= point.value + 1e-12
        point = new
    return point


def test_smooth_descent():
    A, b, evaluate = quadratic(20, 1e3)
    point = descend(QuasiNewtonDescent(evaluate, LimitedMemory(50), None, False, 1e-3), torch.zeros(20, dtype=F64), 80)
    assert torch.allclose(point.z, torch.linalg.solve(A, b), atol=1e-8)


def test_descent_in_a_box():
    A, b, evaluate = quadratic(20, 1e3)
    clip = lambda z, step: z.clamp(0.0, 0.02)  # noqa: E731
    point = descend(QuasiNewtonDescent(evaluate, LimitedMemory(50), clip, False, 1e-3), torch.zeros(20, dtype=F64), 100)
    gradient = A @ point.z - b
    assert float((point.z - (point.z - gradient).clamp(0.0, 0.02)).norm()) <= 1e-8
    assert 0 < int((point.z == 0.02).sum()) < 20


def test_descent_with_a_lasso_term():
    A, b, evaluate = quadratic(20, 1e2)
    term = meha.nonsmooth.L1(0.5)

    def with_term(z):
        point = evaluate(z)
        point.nonsmooth = float(term.value(None, z))
        return point

    descent = QuasiNewtonDescent(with_term, LimitedMemory(50), lambda z, step: term.prox(None, z, step), True, 1e-2)
    point = descend(descent, torch.zeros(20, dtype=F64), 200)
    gradient = A @ point.z - b
    assert 0 < int((point.z == 0).sum()) < 20
    assert float((point.z - term.prox(None, point.z - gradient, 1.0)).norm()) <= 1e-8


def test_values_that_are_none_shorten_the_step():
    def evaluate(z):
        value = float((z - z.log()).sum()) if bool((z > 0).all()) else math.nan
        return EvaluatedPoint(z, value, 1 - 1 / z)

    point = descend(QuasiNewtonDescent(evaluate, LimitedMemory(10), None, False, 10.0), torch.full((2,), 0.1, dtype=F64), 30)
    assert torch.allclose(point.z, torch.ones(2, dtype=F64), atol=1e-6)


def test_the_memory_is_bfgs():
    """Its direction is that of the matrix of BFGS with the same pairs, on all and on some coordinates."""
    rng = np.random.default_rng(2)
    H = torch.tensor(np.diag([1.0, 2.0, 3.0, 4.0, 5.0]) + 0.1)
    memory = LimitedMemory(30)
    assert memory.direction(torch.ones(5, dtype=F64), torch.ones(5, dtype=torch.bool)) is None
    pairs = [torch.tensor(rng.normal(size=5)) for _ in range(3)]
    for s in pairs:
        memory.add(s, H @ s)
    gradient = torch.tensor(rng.normal(size=5))
    for free in (torch.ones(5, dtype=torch.bool), torch.tensor([True, True, False, True, True])):
        chosen = [(s[free], (H @ s)[free]) for s in pairs]
        assert all(float(s @ y) > 0 for s, y in chosen)
        s, y = chosen[-1]
        B = torch.eye(int(free.sum()), dtype=F64) * float(y @ y) / float(s @ y)
        for s, y in chosen:
            B = B - torch.outer(B @ s, B @ s) / (s @ B @ s) + torch.outer(y, y) / (s @ y)
        expected = torch.zeros(5, dtype=F64)
        expected[free] = -torch.linalg.solve(B, gradient[free])
        assert torch.allclose(memory.direction(gradient, free), expected, rtol=1e-10)
    memory.replace(H, torch.arange(5), 5)
    everywhere = torch.ones(5, dtype=torch.bool)
    assert torch.allclose(memory.direction(gradient, everywhere), -torch.linalg.solve(H, gradient))
    memory.add(pairs[0], H @ pairs[0])
    assert torch.allclose(memory.direction(gradient, everywhere), -torch.linalg.solve(H, gradient))
    memory.add(pairs[0], -pairs[0])
    assert len(memory) == 1


def test_a_memory_with_a_first_guess_is_bfgs():
    rng = np.random.default_rng(3)
    A = torch.tensor(rng.normal(size=(4, 4)))
    guess, H = A @ A.T + torch.eye(4, dtype=F64), torch.diag(torch.arange(1.0, 5.0, dtype=F64))
    pairs = LimitedMemory(10, matrix=guess)
    r = torch.tensor(rng.normal(size=4))
    assert torch.allclose(pairs.direction(r), -torch.linalg.solve(guess, r))
    B = guess
    for _ in range(3):
        s = torch.tensor(rng.normal(size=4))
        s = s / s.norm()
        pairs.add(s, H @ s)
        B = B - torch.outer(B @ s, B @ s) / (s @ B @ s) + torch.outer(H @ s, H @ s) / (s @ H @ s)
        assert torch.allclose(pairs.direction(r), -torch.linalg.solve(B, r), rtol=1e-8)
    pairs.clear()
    assert pairs.direction(r) is None
