"""LV-HBA: a proximal Lagrangian value function, and steps projected on the constraints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from meha.lower.constrained import SelectedProgram
from meha.method.method import At, Numbers
from meha.methods.lagrangian import LagrangianMethod, LagrangianState
from meha.numerics.quadratic_program import solve_program
from meha.numerics.sqp import minimise_sqp
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.reduce.nonlinear_program import NonlinearProgram
from meha.tensors.variables import Variable, copy_


@dataclass
class LVHBAState(LagrangianState):
    """x, y, the saddle point (theta, lam) of the proximal Lagrangian, and its centre z."""

    lam: Variable
    coupling: NonlinearProgram


@dataclass(frozen=True, kw_only=True)
class LVHBA(LagrangianMethod):
    """Lagrangian value function based Hessian-free algorithm for coupled problems (Yao et al. 2024).

    With L = f + <lambda, h> and the proximal Lagrangian value function

        v(x, y, z) = min_{theta in Y} max_{lambda in Z} L(x, theta; lambda)
                     + ||theta - y||^2 / (2 gamma1) - ||lambda - z||^2 / (2 gamma2),

    it decreases F / c_k + f - v over C = {(x, y) in X x Y : h(x, y) <= 0} and z in Z, in a single loop:

        theta <- proj_Y( theta - eta (L_y(x, theta; lambda) + (theta - y) / gamma1) )
        lambda <- proj_Z( lambda - eta ((lambda - z) / gamma2 - h(x, theta)) )         (with theta before its step)
        (x, y) <- proj_C( (x, y) - alpha (d_x, d_y) ),    d_x = F_x / c + f_x(x, y) - L_x(x, theta; lambda),
                                                          d_y = F_y / c + f_y(x, y) - (y - theta) / gamma1
        z <- proj_Z( z - beta (z - lambda) / gamma2 )

    Z holds the multipliers of size ``radius`` at most, not negative for inequalities. C also holds the upper constraints, of
    which the paper has none. The projection on C is a quadratic program where the constraints are linear, and a sequence of
    them otherwise; the paper assumes h convex. A step costs 3 gradients of f and 1 of F.

    Args:
        alpha, beta, eta: step sizes of (x, y), of z, and of (theta, lambda), numbers or functions of k.
        gamma1, gamma2: the weights of the proximal terms.
        c: the penalty, a number or a function of k; 0.3 is the paper's exponent in its first experiment.
        radius: the bound of the multipliers.

    The numbers of a step: ``upper`` F, ``lower`` f, ``gap`` f(x, y) - f(x, theta), ``violation`` the largest one of the lower
    constraints at theta, ``d_x`` the norm of the direction in (x, y), ``c``.

    >>> import meha, torch
    >>> problem = meha.Problem(
    ...     lambda x, y: (x - 1).square().sum() + y.square().sum(),
    ...     lambda x, y: (y - 2).square().sum(),
    ...     lower_constraints=meha.constraints.Linear([[-1.0]], [[1.0]], [0.0]),  # y <= x
    ... )
    >>> run = LVHBA(alpha=0.1, beta=0.2, eta=0.2, c=10.0).start(problem, torch.zeros(1), torch.zeros(1))
    >>> for _ in range(500):
    ...     info = run.step()
    >>> print(f"{float(run.x):.1f}")
    0.5
    """

    refuses_group: ClassVar[str] = "its projection recognises quadratic functions on the data of one"
    steps: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eta")

    beta: Schedule = 0.01

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> LVHBAState:
        base = super().init(oracle, x, y)
        lam, coupling = Variable(base.z.value.detach(), "lambda"), NonlinearProgram(oracle, x, y)
        state = LVHBAState(**vars(base), lam=lam, coupling=coupling)
        self._project(state)  # the method needs a feasible (x, y), and theta = y at the start
        copy_(state.theta.leaves, y.leaves)
        return state

    def step(self, oracle: Oracle, state: LVHBAState, at: At) -> Numbers:
        x, y, theta, lagrangian = state.x, state.y, state.theta, state.lagrangian
        lam, z = state.lam.leaves[0], state.z.leaves[0]
        h = lagrangian.values(x, theta).detach()  # before theta moves: both steps on the saddle point are simultaneous
        best, moved = self.descend(oracle, state, at, lam.detach())
        copy_([lam], [lagrangian.project(lam - at.eta * ((lam - z) / self.gamma2 - h), self.radius)])
        copy_(theta.leaves, moved)
        (upper, lower), (g_x, g_y) = oracle.gradients(
            (x, y), [(1 / at.c, oracle.upper, x, y), (1.0, oracle.lower, x, y)], strict=False
        )
        _, (v_x,) = lagrangian.gradients((x,), x, theta, lam.detach())
        d_x = [a - b for a, b in zip(g_x, v_x, strict=True)]
        d_y = [a - (own - t) / self.gamma1 for a, own, t in zip(g_y, y.leaves, theta.leaves, strict=True)]
        copy_(x.leaves, self.advance(x, d_x, at.alpha))
        copy_(y.leaves, self.advance(y, d_y, at.alpha))
        self._project(state)  # jointly: C couples x and y
        copy_([z], [lagrangian.project(z - at.beta * (z - lam) / self.gamma2, self.radius)])
        return self.numbers(at, upper, lower, best, lagrangian.violation(h), (d_x, d_y))

    @staticmethod
    def _project(state: LVHBAState) -> None:
        """Project (x, y) on C."""
        coupling = state.coupling
        target = coupling.read()
        program = SelectedProgram(coupling, target)
        if coupling.linear[2:].all():  # of the rows after F and f, the constraints; then one quadratic program is exact
            _, e, h = program.values(target)
            _, J, A = program.jacobians(target)
            nearest = target + solve_program(np.eye(len(target)), np.zeros(len(target)), A, -h, J, -e, h > 0).z
        else:
            nearest = minimise_sqp(program, target).w
        if np.isfinite(nearest).all():  # a program that fails leaves (x, y) where the step led
            coupling.write(nearest)
