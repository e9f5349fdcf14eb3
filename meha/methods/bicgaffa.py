"""BiC-GAFFA: a doubly regularised gap function of the lower level's Lagrangian, in a single loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meha.method.method import At, Numbers
from meha.methods.lagrangian import LagrangianMethod, LagrangianState
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.variables import copy_


@dataclass(frozen=True, kw_only=True)
class BiCGAFFA(LagrangianMethod):
    """Bilevel constrained gap function based first-order algorithm for coupled problems (Yao et al. 2024).

    With L = f + <lambda, h>, the gap of (y, z) as a saddle point of L,

        G(x, y, z) = max_{theta in Y, lambda} L(x, y; lambda) - L(x, theta; z)
                     - ||theta - y||^2 / (2 gamma1) - ||lambda - z||^2 / (2 gamma2),

    is not negative, and zero exactly where y solves the lower level with the multipliers z. In a single loop, F / c_k + G is
    decreased:

        theta <- proj_Y( theta - eta (L_y(x, theta; z) + (theta - y) / gamma1) ),    lambda = proj( z + gamma2 h(x, y) )
        x <- proj_X( x - alpha (F_x / c + L_x(x, y; lambda) - L_x(x, theta; z)) )
        y <- proj_Y( y - alpha (F_y / c + L_y(x, y; lambda) - (y - theta) / gamma1) )
        z <- proj_Z( z - alpha ((lambda - z) / gamma2 - h(x, theta)) )

    x, y and z move at once; lambda is not negative for inequalities; Z holds the multipliers of size ``radius`` at most. No
    projection on h <= 0 is needed, so that h may be any smooth function that is convex in y. Upper constraints are refused,
    since the paper has none. A step costs 3 gradients of f and 1 of F.

    Args:
        alpha, eta: step sizes of (x, y, z), and of theta, numbers or functions of k.
        gamma1, gamma2: the weights of the proximal terms.
        c: the penalty, a number or a function of k.
        radius: the bound of the multipliers.

    The numbers of a step: ``upper`` F, ``lower`` f, ``gap`` f(x, y) - f(x, theta), ``violation`` the largest one of the lower
    constraints at y, ``d_x`` the norm of the direction in (x, y), ``c``.

    >>> import meha, torch
    >>> problem = meha.Problem(
    ...     lambda x, y: (x - 1).square().sum() + y.square().sum(),
    ...     lambda x, y: (y - 2).square().sum(),
    ...     lower_constraints=meha.constraints.Linear([[-1.0]], [[1.0]], [0.0]),  # y <= x
    ... )
    >>> run = BiCGAFFA(alpha=0.1, eta=0.2, c=10.0).start(problem, torch.zeros(1), torch.zeros(1))
    >>> for _ in range(500):
    ...     info = run.step()
    >>> print(f"{float(run.y):.1f}")
    0.5
    """

    refuses_shards: ClassVar[str] = "its constraints are functions of x and y as whole vectors"

    gamma2: float = 1.0

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.upper_constraints:
            raise ValueError(
                "upper_constraints: BiCGAFFA takes none, because it moves (x, y) without a projection on them; use the default"
                " or LVHBA()."
            )

    def step(self, oracle: Oracle, state: LagrangianState, at: At) -> Numbers:
        x, y, theta, lagrangian = state.x, state.y, state.theta, state.lagrangian
        z = state.z.leaves[0]
        best, moved = self.descend(oracle, state, at, z.detach())
        copy_(theta.leaves, moved)
        h = lagrangian.values(x, y).detach()
        lam = z.detach() + self.gamma2 * h  # the maximum over lambda has a closed form, so that no step is needed
        lam[: lagrangian.sizes[0]].clamp_(min=0.0)  # inequalities come first
        lower, (l_x, l_y) = lagrangian.gradients((x, y), x, y, lam)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], strict=False)
        _, (v_x,) = lagrangian.gradients((x,), x, theta, z.detach())
        h_theta = lagrangian.values(x, theta).detach()
        d_x = [a / at.c + b - v for a, b, v in zip(F_x, l_x, v_x, strict=True)]
        d_y = [a / at.c + b - (own - t) / self.gamma1 for a, b, own, t in zip(F_y, l_y, y.leaves, theta.leaves, strict=True)]
        new_z = lagrangian.project(z - at.alpha * ((lam - z) / self.gamma2 - h_theta), self.radius)
        new_x, new_y = self.advance(x, d_x, at.alpha), self.advance(y, d_y, at.alpha)  # all three move at once
        oracle.prox(x.value, new_y, 1.0)
        oracle.project(x.value, new_x, 1.0)
        copy_(x.leaves, new_x)
        copy_(y.leaves, new_y)
        copy_([z], [new_z])
        return self.numbers(at, upper, lower, best, lagrangian.violation(h), (d_x, d_y))
