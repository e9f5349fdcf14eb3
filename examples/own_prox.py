r"""
A non-smooth term of your own
=============================

A term needs its value and its proximal map. This one penalises negative coefficients more than positive ones,
:math:`g(x, y) = w \sum_i \max(y_i, -3 y_i)`, which the library does not have.
"""

import matplotlib.pyplot as plt
import torch

import meha


class Tilted(meha.nonsmooth.NonSmooth):
    """w(x) times the sum of max(y_i, -3 y_i); prox: y moves towards zero by step * w, or by three times that from below."""

    def __init__(self, weight, part=None):
        super().__init__(part)
        self.weight = self.declared("weight", weight)

    def value_leaves(self, x, leaves):
        return sum((w * torch.maximum(y, -3 * y)).sum() for w, y in self.weighted(self.weight, x, leaves))

    def prox_leaves(self, x, leaves, step):
        return [(y - step * w).clamp(min=0) + (y + 3 * step * w).clamp(max=0) for w, y in self.weighted(self.weight, x, leaves)]


# %%
# Is the proximal map right? It minimises ``step * g(w) + (w - y)^2 / 2``, which a grid can check.

grid = torch.linspace(-4, 4, 80001, dtype=torch.float64)
for y in (-2.5, -1.0, 0.3, 2.0):
    values = 0.5 * torch.maximum(grid, -3 * grid) + 0.5 * (grid - y).square()
    own = Tilted(1.0).prox(None, torch.tensor([y], dtype=torch.float64), step=0.5)
    print(f"prox of {y:4.1f}: {float(own):7.4f}, on the grid {float(grid[values.argmin()]):7.4f}")

# %%
# In a problem: the weight is learned, as with any other term.

generator = torch.Generator().manual_seed(0)
A, A_valid = torch.randn(2, 40, 20, generator=generator, dtype=torch.float64)
truth = torch.cat([torch.ones(5), torch.zeros(15)]).double()
noise = torch.randn(2, 40, generator=generator, dtype=torch.float64)
problem = meha.Problem(
    upper=lambda x, y: (A_valid @ (y - truth) - noise[0]).square().mean(),
    lower=lambda x, y: (A @ (y - truth) - noise[1]).square().mean(),
    nonsmooth=Tilted(weight=lambda x: x.exp()),
    x_set=meha.sets.Box(-8.0, 2.0),
)
solution = meha.solve(problem, torch.full((1,), -3.0, dtype=torch.float64), torch.zeros(20, dtype=torch.float64))
print(solution)

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.stem(torch.linalg.lstsq(A, A @ truth + noise[1]).solution, linefmt="lightgray", markerfmt=".", label="least squares")
axis.stem(solution.y, linefmt="C0-", markerfmt="C0.", label=f"learned weight {float(solution.x.exp()):.2f}")
axis.set(xlabel="coefficient; the first five are 1, the others 0")
axis.legend(frameon=False)
plt.show()
