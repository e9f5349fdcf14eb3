"""A method of one's own: alternating gradient steps, with a penalty on the gap of the lower level.

python examples/own_method.py
"""

from dataclasses import dataclass

import torch

import meha
from meha._variables import add_


@dataclass
class FollowState(meha.methods.State):
    """x, y, and z, which follows the lower level."""

    z: meha.methods.Variable


@dataclass(frozen=True, kw_only=True)
class Follow(meha.Method):
    """Move z along -grad f(x, z), and (x, y) along -grad [F(x, y) + c (f(x, y) - f(x, z))]."""

    alpha: meha.schedules.Schedule = 0.02
    c: meha.schedules.Schedule = 10.0

    def init(self, oracle, x, y):
        return FollowState(x, y, z=y.copy())

    def step(self, oracle, state, at):
        x, y, z = state.x, state.y, state.z
        _, f_z = oracle.gradient(z, [(1.0, oracle.lower, x, z)], at.batch)
        terms = [(1.0, oracle.upper, x, y), (at.c, oracle.lower, x, y), (-at.c, oracle.lower, x, z)]
        (upper, lower, best), (d_x, d_y) = oracle.gradients((x, y), terms, at.batch)
        for variable, direction in ((x, d_x), (y, d_y), (z, f_z)):
            add_(variable.leaves, direction, -at.alpha)
        return {"upper": upper, "gap": lower - best, "c": at.c}


if __name__ == "__main__":
    problem = meha.problems.strong_convex(n=2)
    print(meha.solve(problem, problem.x0, problem.y0, Follow(), compile=True))
