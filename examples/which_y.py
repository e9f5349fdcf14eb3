"""Solve a problem whose lower level leaves y open with both responses, and draw which y is meant.

    python examples/which_y.py [--out out]

The lower level asks for y_1 + y_2 = x, a line of solutions for each x. The best y for F lies where the line comes closest to
F's target; the nearest one lies straight ahead of y0. Both have the same x here, and different F.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

import meha

TARGET = torch.tensor([3.0, 1.0], dtype=torch.float64)


def upper(x, y):
    return (x - 1).square().sum() + (y - TARGET).square().sum()


def lower(x, y):
    return (y.sum() - x).square().sum()


def draw(solutions, y0):
    """The line of lower solutions at each x, the y that was found on it, and circles of equal F around its target."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    grid = torch.linspace(-1.0, 4.0, 101)
    for axis, (name, solution) in zip(figure.subplots(1, 2, sharey=True), solutions.items(), strict=True):
        axis.contour(grid, grid, (grid - TARGET[0]) ** 2 + (grid[:, None] - TARGET[1]) ** 2, 12, colors="lightgray")
        axis.plot(grid, float(solution.x) - grid, color="tab:blue", label=f"lower solutions, x = {float(solution.x):.2f}")
        axis.plot(*y0, "o", mfc="none", color="black", label="y0")
        axis.plot(*TARGET, "x", color="tab:gray", label="target of F")
        axis.plot(*solution.y, "o", color="tab:red", label=f"y, F = {solution.upper:.2f}")
        axis.set(title=name, xlabel="y_1", xlim=(-1, 4), ylim=(-1, 4), aspect="equal")
        axis.legend(fontsize="x-small")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    problem, x0, y0 = meha.Problem(upper, lower), torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    responses = {"optimistic": "optimistic", "nearest to y0": meha.responses.Nearest()}
    solutions = {name: meha.solve(replace(problem, response=kind), x0, y0) for name, kind in responses.items()}
    for name, solution in solutions.items():
        print(f"{name}: y = {[round(value, 3) for value in solution.y.tolist()]}, F = {solution.upper:.3f}")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(solutions, y0).savefig(options.out / "which_y.png", dpi=150)


if __name__ == "__main__":
    main()
