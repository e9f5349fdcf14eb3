"""Sequential quadratic programming against closed forms and KKT conditions."""

import numpy as np
import pytest

from meha.numerics.sqp import minimise_sqp


class Program:
    """A program from functions of w: phi, equations, inequalities; derivatives by hand."""

    def __init__(self, phi, gradient, hessian, equations=(), inequalities=()):
        self.phi, self.gradient, self.second = phi, gradient, hessian
        self.parts = (equations, inequalities)  # each (value, gradient, Hessian)

    def values(self, w):
        return self.phi(w), *(np.array([value(w) for value, _, _ in part]) for part in self.parts)

    def jacobians(self, w):
        rows = [np.array([gradient(w) for _, gradient, _ in part]).reshape(len(part), len(w)) for part in self.parts]
        return self.gradient(w), *rows

    def hessian(self, w, mu, lam):
        H = self.second(w)
        for weights, part in zip((mu, lam), self.parts, strict=True):
            for weight, (_, _, second) in zip(weights, part, strict=True):
                H = H + weight * second(w)
        return H


def flat(w):
    return np.zeros((len(w), len(w)))


CIRCLE = (lambda w: w @ w - 1, lambda w: 2 * w, lambda w: 2 * np.eye(2))


def linear(direction, *, equations=(), inequalities=()):
    return Program(lambda w: direction @ w, lambda w: direction, flat, equations, inequalities)


@pytest.mark.parametrize("kind", ["equations", "inequalities"])
@pytest.mark.parametrize("start", [(0.3, 0.1), (3.0, -2.0)])
def test_a_linear_function_on_a_circle(kind, start):
    """min <d, w> on ||w||^2 = 1 or <= 1 is at -d / ||d||, with the multiplier ||d|| / 2."""
    d = np.array([3.0, 4.0])
    end = minimise_sqp(linear(d, **{kind: [CIRCLE]}), np.array(start))
    assert end.converged
    assert end.w == pytest.approx(-d / 5, abs=1e-7)
    assert end.value == pytest.approx(-5.0)
    multiplier = end.mu if kind == "equations" else end.lam
    assert multiplier == pytest.approx([2.5], rel=1e-5)
    assert end.violation <= 1e-8


def test_an_inactive_constraint_has_no_multiplier():
    target = np.array([0.2, -0.3])
    program = Program(lambda w: (w - target) @ (w - target), lambda w: 2 * (w - target), lambda w: 2 * np.eye(2), (), [CIRCLE])
    end = minimise_sqp(program, np.array([2.0, 2.0]))
    assert end.converged
    assert end.w == pytest.approx(target, abs=1e-8)
    assert end.lam == pytest.approx([0.0], abs=1e-8)


def test_rosenbrock_in_a_disk():
    """At the end, the gradient of the Lagrangian is zero and the multiplier of the active disk positive (KKT)."""

    def gradient(w):
        return np.array([-400 * w[0] * (w[1] - w[0] ** 2) - 2 * (1 - w[0]), 200 * (w[1] - w[0] ** 2)])

    def second(w):
        return np.array([[1200 * w[0] ** 2 - 400 * w[1] + 2, -400 * w[0]], [-400 * w[0], 200.0]])

    program = Program(lambda w: 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2, gradient, second, (), [CIRCLE])
    end = minimise_sqp(program, np.array([-0.5, 0.5]))
    assert end.converged
    assert np.abs(gradient(end.w) + end.lam[0] * 2 * end.w).max() < 1e-5
    assert end.lam[0] > 0
    assert end.w @ end.w == pytest.approx(1.0)


def test_constraints_that_contradict_each_other_are_no_solution():
    left = (lambda w: w[0] + 1, lambda w: np.array([1.0, 0.0]), flat)  # w_1 <= -1
    right = (lambda w: 1 - w[0], lambda w: np.array([-1.0, 0.0]), flat)  # w_1 >= 1
    end = minimise_sqp(linear(np.array([0.0, 1.0]), inequalities=[left, right, CIRCLE]), np.zeros(2))
    assert not end.converged
    assert end.violation == pytest.approx(1.0, abs=0.1)


def test_a_degenerate_solution():
    """Three rows are active at the origin of the plane, where two suffice: multipliers are not unique."""
    rows = [(lambda w, a=a: a @ w, lambda w, a=a: a, flat) for a in np.array([[-1.0, 0.0], [0.0, -1.0], [-1.0, -1.0]])]
    end = minimise_sqp(linear(np.array([1.0, 2.0]), inequalities=rows), np.array([3.0, 1.0]))
    assert end.converged
    assert end.w == pytest.approx([0.0, 0.0], abs=1e-8)
    assert end.lam.min() >= 0


def test_an_unbounded_program_does_not_converge():
    end = minimise_sqp(
        linear(np.array([1.0, 0.0]), inequalities=[(lambda w: w[1], lambda w: np.array([0.0, 1.0]), flat)]), np.zeros(2)
    )
    assert not end.converged
    assert end.value < -1e6
