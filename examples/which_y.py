"""
Which solution of the lower level is meant?
===========================================

The lower level asks for y_1 + y_2 = x, a line of solutions for each x. By default the best y for F is meant; it lies where the
line comes closest to F's target. ``response=Nearest()`` means the solution nearest to the start, as gradient descent from there
would find. Both have the same x here, and different F.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import meha

TARGET = torch.tensor([3.0, 1.0], dtype=torch.float64)


def upper(x, y):
    return (x - 1).square().sum() + (y - TARGET).square().sum()


def lower(x, y):
    return (y.sum() - x).square().sum()


def draw(solutions, y0):
    """The line of lower solutions at each x, the y that was found on it, and circles of equal F around its target."""
    _, axes = plt.subplots(1, 2, figsize=(7.2, 3.6), layout="constrained", sharey=True)
    grid = torch.linspace(-1.0, 4.0, 101)
    for axis, (name, solution) in zip(axes, solutions.items(), strict=True):
        axis.contour(grid, grid, (grid - TARGET[0]) ** 2 + (grid[:, None] - TARGET[1]) ** 2, 12, colors="lightgray")
        axis.plot(grid, float(solution.x) - grid, color="tab:blue", label=f"lower solutions, x = {float(solution.x):.2f}")
        axis.plot(*y0, "o", mfc="none", color="black", label="y0")
        axis.plot(*TARGET, "x", color="tab:gray", label="target of F")
        axis.plot(*solution.y, "o", color="tab:red", label=f"y, F = {solution.upper:.2f}")
        axis.set(title=name, xlabel="y_1", xlim=(-1, 4), ylim=(-1, 4), aspect="equal")
        axis.legend(fontsize="x-small")


problem, x0, y0 = meha.Problem(upper, lower), torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
responses = {"optimistic": "optimistic", "nearest to y0": meha.responses.Nearest()}
solutions = {name: meha.solve(replace(problem, response=kind), x0, y0) for name, kind in responses.items()}
for name, solution in solutions.items():
    print(f"{name}: y = {[round(value, 3) for value in solution.y.tolist()]}, F = {solution.upper:.3f}")

draw(solutions, y0)
plt.show()
