"""
A lower level with two basins
=============================

F pulls x below 0 and y to 1. The minimum of f near y = 1 is the global one only for x >= 0. So the answer lies at x = 0, where
both minima are equally low. A method that stays in one basin ends near x = -1, at a local minimum of f that is not global.
``solve`` restarts the lower level from other points before it says "converged".
"""

import matplotlib.pyplot as plt
import torch

import meha


def upper(x, y):
    return (x + 1).square().sum() + (y - 1).square().sum()


def lower(x, y):
    return ((y.square() - 1).square() - x * y / 2).sum()


def local_minima(x, grid):
    """The local minima of f(x, .), from values on a grid."""
    values = [float(lower(x, point)) for point in grid]
    inner = range(1, len(grid) - 1)
    return [(float(grid[i]), values[i]) for i in inner if values[i] <= min(values[i - 1], values[i + 1])]


def draw(results):
    """f(x, .) where attempts of a run ended: local minima as circles, y as a dot."""
    grid = torch.linspace(-1.6, 1.6, 401, dtype=torch.float64)
    figure, axes = plt.subplots(1, len(results), figsize=(3.6 * len(results), 3.0), layout="constrained", sharey=True)
    for axis, end in zip(axes, results, strict=True):
        axis.plot(grid, [float(lower(end.x, point)) for point in grid])
        axis.plot(*zip(*local_minima(end.x, grid), strict=True), "o", mfc="none", color="tab:gray", ms=10)
        axis.plot(float(end.y), float(lower(end.x, end.y)), "o", color="tab:red")
        axis.set_title(f"{end.start}: x = {float(end.x) + 0.0:.2f}, F = {end.F:.3g}", fontsize="small")
        axis.set_xlabel("y")
    figure.axes[0].set_ylabel("f(x, y)")


# %%
# The details list all attempts of the run, what each found, and which one is the answer.

problem = meha.Problem(upper, lower)
x0, y0 = (torch.tensor([number], dtype=torch.float64) for number in (-2.0, 1.0))
solution = meha.solve(problem, x0, y0)
print(solution.details)

# %%
# Where three of the attempts ended: the red dot is y, circles are all local minima of f at that x.

run = meha.Default().start(problem, x0, y0)
while run.verdict is None:
    run.step()
ends = {end.start: end for end in run.state.course.attempts.results}
draw([ends[name] for name in ("upper level first", "from a lower basin", "back from a higher basin")])
plt.show()
