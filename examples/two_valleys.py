"""
A lower level with two valleys
==============================

F draws x below 0 and y to 1. The well of f at 1 is the lower one only for x >= 0, so that the answer lies at the border, x = 0,
where both wells are equally deep. A method that follows one valley ends at x = -1, in the well that is not the lowest there.
``solve`` searches the lower level for lower valleys before it says "converged".
"""

import matplotlib.pyplot as plt
import torch

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
    """f(x, .) at the ends of passes of a run: all valleys as circles, that of y as a dot."""
    grid = torch.linspace(-1.6, 1.6, 401, dtype=torch.float64)
    figure, axes = plt.subplots(1, len(results), figsize=(3.6 * len(results), 3.0), layout="constrained", sharey=True)
    for axis, end in zip(axes, results, strict=True):
        axis.plot(grid, [float(lower(end.x, point)) for point in grid])
        axis.plot(*zip(*bottoms(end.x, grid), strict=True), "o", mfc="none", color="tab:gray", ms=10)
        axis.plot(float(end.y), float(lower(end.x, end.y)), "o", color="tab:red")
        axis.set_title(f"{end.start}: x = {float(end.x) + 0.0:.2f}, F = {end.F:.3g}", fontsize="small")
        axis.set_xlabel("y")
    figure.axes[0].set_ylabel("f(x, y)")


# %%
# The details list all passes of the run, what each found, and which one is the answer.

problem = meha.Problem(upper, lower)
x0, y0 = (torch.tensor([number], dtype=torch.float64) for number in (-2.0, 1.0))
solution = meha.solve(problem, x0, y0)
print(solution.details)

# %%
# Where three of the passes ended: red is y, circles are all valleys of f at that x.

run = meha.Default().start(problem, x0, y0)
while run.verdict is None:
    run.step()
ends = {end.start: end for end in run.state.course.judgement.results}
draw([ends[name] for name in ("upper level first", "from a lower valley", "back from a higher valley")])
plt.show()
