"""The lower solver: solutions against closed forms, and no more work than its steps need."""

import math

import pytest
import torch

import meha
from meha.lower.flat_problem import FlatProblem, LowerPoint
from meha.lower.nearest import solve_nearest
from meha.lower.proximal_gradient import solve_lower
from meha.lower.quadratic_model import in_same_quadratic
from meha.problem.nonsmooth import L1
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class CountedL1(L1):
    """Counts how often it is evaluated."""

    values = proxes = 0

    def value_leaves(self, x, leaves):
        self.values += 1
        return super().value_leaves(x, leaves)

    def prox_leaves(self, x, leaves, step):
        self.proxes += 1
        return super().prox_leaves(x, leaves, step)


def start(problem, y, x=None):
    first, second = Variable(torch.zeros(1, dtype=y.dtype) if x is None else x, "x"), Variable(y, "y")
    return Oracle(problem, first, second), first, second


@pytest.mark.parametrize("gamma", [None, 0.5, 50.0])
def test_lasso_satisfies_its_optimality_conditions(gamma):
    """The gradient of the smooth part is -w sign(theta_i) where theta_i != 0, and at most w in size elsewhere."""
    A, b, y, w = normal(40, 15), normal(40, seed=1), normal(15, seed=2), 6.0
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (A @ y - b).square().sum(), nonsmooth=L1(w))
    found = solve_lower(*start(problem, y), gamma=gamma, tol=1e-12)
    theta = found.theta.detached()
    slope = A.T @ (A @ theta - b) + (0.0 if gamma is None else (theta - y) / gamma)
    assert found.converged
    assert 0 < int((theta != 0).sum()) < 15
    assert slope[theta != 0] == pytest.approx(-w * theta[theta != 0].sign(), rel=1e-8)
    assert float(slope.abs().max()) <= w * (1 + 1e-8)


def test_nothing_is_evaluated_in_vain():
    """g where the objective is looked at, once a step; a prox for the step and one for the residual; two gradients at most."""
    A, b = normal(100, 60), normal(100, seed=1)
    g = CountedL1(2.0)
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (A @ y - b).square().sum(), nonsmooth=g)
    oracle, x, y = start(problem, torch.zeros(60, dtype=torch.float64))
    found = solve_lower(oracle, x, y, tol=1e-10)
    assert found.converged
    assert g.values <= found.steps + 1
    assert g.values < 0.6 * oracle.counts.lower
    assert g.proxes <= 2 * found.steps + 1
    assert oracle.counts.lower <= 2 * found.steps + 2


@pytest.mark.parametrize("slope", [1e170, 1e200])
def test_numbers_whose_squares_overflow_are_no_error(slope):
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: -slope * y.sum())
    found = solve_lower(*start(problem, torch.zeros(2, dtype=torch.float64)), gamma=1.0, max_steps=100)
    assert not math.isnan(float(found.theta.detached().sum()))


@pytest.mark.parametrize(("power", "quadratic"), [(1.5, False), (1.9, True), (2.0, True), (2.2, True), (4.0, False)])
def test_powers_far_from_the_square_are_not_taken_for_quadratic(power, quadratic):
    """Between 0 and z, |z|^p differs from its trapezoidal rule by |1/p - 1/2| of its turn, 25 % for the fourth power."""

    def point(z):
        z = torch.tensor([z], dtype=torch.float64)
        return LowerPoint(z, float(z.abs() ** power), power * z.abs() ** (power - 1), f_x=z)

    assert in_same_quadratic(point(3.0), point(0.0)) is quadratic


def test_the_nearest_solution_is_more_accurate_than_the_last_weight():
    """f = y1^2 / 2 + y2^2 / 200 leaves y3 free; a weight w leaves an error of 100 w in y2, which extrapolation removes."""
    curvatures, y = torch.tensor([1.0, 0.01, 0.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    problem = meha.Problem(lambda x, y: y.sum(), lambda x, y: 0.5 * (curvatures * y.square()).sum())
    found = solve_nearest(FlatProblem(*start(problem, y)), y, 1e-2, 1.0)
    assert found.solved
    assert found.y.tolist() == pytest.approx([0.0, 0.0, 1.0], abs=5e-5)
