"""Solve a problem whose lower level has two valleys, print the report, and draw f(x, .) with the valleys that were met.

    python examples/two_valleys.py [--out out]

F draws x below 0 and y to 1. The well of f at 1 is the lower one only for x >= 0, so that the answer lies at the border, x = 0,
where both wells are as low. A method that follows one valley ends at x = -1, in the well that is not the lowest there.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

import meha


def upper(x, y):
    return (x + 1).square().sum() + (y - 1).square().sum()


def lower(x, y):
    return ((y.square() - 1).square() - x * y / 2).sum()


def bottoms(x, grid):
    """The lowest points of the valleys of f(x, .), from values on a grid."""
    values = [float(lower(x, point)) for point in grid]
    inner = range(1, len(grid) - 1)
    return [(float(grid[i]), values[i]) for i in inner if values[i] <= min(values[i - 1], values[i + 1])]


def draw(results):
    """f(x, .) at the ends of starts of a run: all valleys as circles, that of y as a dot."""
    grid = torch.linspace(-1.6, 1.6, 401, dtype=torch.float64)
    figure = Figure(figsize=(3.6 * len(results), 3.0), layout="constrained")
    for axis, end in zip(figure.subplots(1, len(results), sharey=True), results, strict=True):
        axis.plot(grid, [float(lower(end.x, point)) for point in grid])
        axis.plot(*zip(*bottoms(end.x, grid), strict=True), "o", mfc="none", color="tab:gray", ms=10)
        axis.plot(float(end.y), float(lower(end.x, end.y)), "o", color="tab:red")
        axis.set_title(f"{end.start}: x = {float(end.x) + 0.0:.2f}, F = {end.F:.3g}", fontsize="small")
        axis.set_xlabel("y")
    figure.axes[0].set_ylabel("f(x, y)")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()

    problem = meha.Problem(upper, lower)
    x0, y0 = (torch.tensor([number], dtype=torch.float64) for number in (-2.0, 1.0))
    print(meha.solve(problem, x0, y0).details)

    run = meha.Continuation().start(problem, x0, y0)
    while run.verdict is None:
        run.step()
    names = ("upper level first", "from a lower valley", "back from a higher valley")
    ends = {end.start: end for end in run.state.course.judgement.results}
    figure = draw([ends[name] for name in names])
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("two_valleys.png", "two_valleys.svg"):
        figure.savefig(options.out / name, dpi=130)
    print(f"The valleys: {options.out / 'two_valleys.png'}")


if __name__ == "__main__":
    main()
