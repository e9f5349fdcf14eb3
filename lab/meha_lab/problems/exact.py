"""Solve small lower levels accurately by semi-smooth Newton steps, as references for the collection.

The code is independent of the methods of this library: it uses only the objectives and the proximal map of g and Y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meha.problem.problem import Problem, Prox
from meha.tensors.variables import Variable, norm

__all__ = ["Linearised", "least_squares", "minimiser"]


def minimiser(problem: Problem, x: Tensor, y0: Tensor, *, tol: float = 1e-13, max_steps: int = 300) -> Tensor:
    """Minimise the convex function f(x, .) + g(x, .) on Y from ``y0``, in float64.

    Each step is a Newton step for the equation y = prox(y - s grad f(x, y)). It is shortened until the residual falls in
    proportion; if it never does, a round of accelerated proximal gradient steps (FISTA) replaces it.

    >>> problem = Problem(lambda x, y: y.sum(), lambda x, y: (y - x).pow(4).sum() + (y - x).square().sum())
    >>> minimiser(problem, torch.tensor([3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    tensor([3.], dtype=torch.float64)
    """
    y, size = y0.clone(), 1.0
    for _ in range(max_steps):
        here = Linearised(problem, x, y)
        size = float(norm([here.residual]))
        if size <= tol * (1 + float(norm([y]))):
            return here.image
        newton = here.newton()
        for length in (1.0, 0.5, 0.25, 0.1, 0.03):
            new = _projected(here.prox, x, y + length * newton, here.step)  # a Newton step may leave Y or the domain of g
            if float(norm([new - _image(problem, here.prox, x, new, here.step)])) <= (1 - length / 2) * size:
                y = new
                break
        else:
            y = _accelerated(problem, here.prox, x, y, here.step)
    if size > 1e-9 * (1 + float(norm([y]))):  # rounding may prevent tol; a larger residual is a wrong reference
        raise ArithmeticError(f"minimiser: the residual of the lower level is still {size:.1e} after {max_steps} steps.")
    return y


class Linearised:
    """The map y -> prox(y - step grad f(x, y)) and its derivative at a point; a minimiser is a fixed point.

    Attributes:
        step: a step size below the inverse of the largest curvature of f in y.
        image: the value of the map.
        residual: y - image.
        slope: the derivative of the residual, a matrix.
        shrink: the derivative of prox, a matrix.
    """

    def __init__(self, problem: Problem, x: Tensor, y: Tensor) -> None:
        n = y.numel()
        curvature = torch.autograd.functional.hessian(lambda z: problem.lower(x, z), y, vectorize=True).reshape(n, n)
        self.step = 1 / max(float(torch.linalg.matrix_norm(curvature, torch.inf)), 1e-8)  # bounds the eigenvalues
        self.prox = problem._bind_prox(Variable.of(y.clone(), "y"))
        forward = y - self.step * _gradient(problem, x, y)
        self.image = _image(problem, self.prox, x, y, self.step)
        self.residual = y - self.image
        eye = torch.eye(n, dtype=y.dtype)
        if self.prox.identity:
            self.shrink = eye
        elif problem.g.separable and (problem.y_set is None or problem.y_set.coordinatewise):
            self.shrink = torch.diag(self._pull_back(x, forward, torch.ones_like(y)))  # one product: the Jacobian is diagonal
        else:
            self.shrink = torch.stack([self._pull_back(x, forward, row.reshape(y.shape)) for row in eye])
        self.slope = eye - self.shrink @ (eye - self.step * curvature)

    def _pull_back(self, x: Tensor, forward: Tensor, cotangent: Tensor) -> Tensor:
        return self.prox.pull_back(x, [forward], self.step, [cotangent])[0].reshape(-1)

    def newton(self) -> Tensor:
        """Return the step that makes the linearised residual zero."""
        return least_squares(self.slope, -self.residual.reshape(-1)).reshape(self.residual.shape)


def least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the shortest solution of a square system, which may be singular."""
    solution, info = torch.linalg.solve_ex(matrix, right)  # unlike solve, does not raise if singular
    if int(info) or not bool(torch.isfinite(solution).all()):
        solution = torch.linalg.pinv(matrix, rcond=1e-12) @ right
    return solution


def _gradient(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        return torch.autograd.grad(problem.lower(x, z), z)[0]


def _image(problem: Problem, prox: Prox, x: Tensor, y: Tensor, step: float) -> Tensor:
    """Return prox(y - step grad f(x, y))."""
    image = y - step * _gradient(problem, x, y)
    prox(x, [image], step)
    return image


def _projected(prox: Prox, x: Tensor, y: Tensor, step: float) -> Tensor:
    """Return the projection of y on Y and the domain of g."""
    if prox.identity:
        return y
    point = y.clone()
    prox(x, [point], 1e-12 * step)  # with a tiny step, prox hardly shrinks and only projects
    return point


def _accelerated(problem: Problem, prox: Prox, x: Tensor, y: Tensor, step: float, rounds: int = 20) -> Tensor:
    """Take accelerated proximal gradient steps (Beck and Teboulle 2009) with backtracking."""
    ahead, momentum = y, 1.0
    for _ in range(rounds):
        slope, value = _gradient(problem, x, ahead), float(problem.lower(x, ahead))
        while True:
            new = ahead - step * slope
            prox(x, [new], step)
            move = new - ahead
            model = value + float((slope * move).sum()) + float(move.square().sum()) / (2 * step)
            if float(problem.lower(x, new)) <= model + 1e-14 * abs(value) or step < 1e-16:
                break
            step /= 2
        next_momentum = 0.5 + (0.25 + momentum**2) ** 0.5  # Nesterov's (1983) sequence
        ahead = new + (momentum - 1) / next_momentum * (new - y)
        y, momentum = new, next_momentum
    return y
