"""
A method of your own
====================

A method is a frozen dataclass with ``init`` and ``step``. ``solve`` runs it, resumes it from checkpoints and compiles it.
"""

from dataclasses import dataclass, field

import meha
from meha.methods import Method, State, Variable


@dataclass
class ChaseState(State):
    z: Variable  # chases the solution of the lower level


@dataclass(frozen=True, kw_only=True)
class Chase(Method):
    """Gradient steps: z on f(x, z), and (x, y) on F(x, y) / c_k + f(x, y) - f(x, z)."""

    alpha: meha.schedules.Schedule = 0.1
    beta: meha.schedules.Schedule = 0.5
    c: meha.schedules.Schedule = field(default=meha.schedules.Power(1.0, p=0.4))

    def init(self, oracle, x, y):
        return ChaseState(x, y, z=y.copy())

    def step(self, oracle, state, at):
        x, y, z, f = state.x, state.y, state.z, oracle.lower
        _, d_z = oracle.gradient(z, [(1.0, f, x, z)], at.batch)
        terms = [(1 / at.c, oracle.upper, x, y), (1.0, f, x, y), (-1.0, f, x, z)]
        (upper, *_), (d_x, d_y) = oracle.gradients((x, y), terms, at.batch)
        for variable, direction, size in ((x, d_x, at.alpha), (y, d_y, at.beta), (z, d_z, at.beta)):
            for leaf, part in zip(variable.leaves, direction, strict=True):
                leaf.sub_(size * part)
        return {"upper": upper, "c": at.c}


if __name__ == "__main__":
    problem = meha.problems.strong_convex(n=2)
    solution = meha.solve(problem, problem.x0, problem.y0, Chase(), max_steps=5_000, tol=1e-6)
    print(solution)
    solution.plot()
