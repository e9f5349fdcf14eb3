"""
Group lasso with a weight for every group
=========================================

A non-smooth lower level: each group of coefficients has a norm as its penalty, with a learned weight. Groups that carry no
signal vanish as a whole. Most bilevel methods refuse such a lower level.
"""

import matplotlib.pyplot as plt
import torch

import meha

generator = torch.Generator().manual_seed(0)
train, valid = torch.randn(2, 100, 60, generator=generator, dtype=torch.float64)
truth = torch.cat([torch.ones(10), torch.zeros(50)]).double()
noise = torch.randn(2, 100, generator=generator, dtype=torch.float64)

# %%
# :class:`meha.nonsmooth.GroupL2` is :math:`g(x, y) = \sum_j x_j \|y^{(j)}\|_2`, and ``solve`` uses its proximal map.

problem = meha.Problem(
    upper=lambda x, y: (valid @ (y - truth) - noise[0]).square().mean(),
    lower=lambda x, y: (train @ (y - truth) - noise[1]).square().mean(),
    nonsmooth=meha.nonsmooth.GroupL2([10] * 6, weight=lambda x: x),
    x_set=meha.sets.NonNegative(),
)
x0, y0 = torch.full((6,), 0.1, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
solution = meha.solve(problem, x0, y0)
print(solution)

# %%
# The first group has the signal. The others shrink, or are exactly zero.

norms = solution.y.reshape(6, 10).norm(dim=1)
print("norms of the groups:", [round(value, 3) for value in norms.tolist()])

plain = torch.linalg.lstsq(train, train @ truth + noise[1]).solution
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.stem(plain, linefmt="lightgray", markerfmt=".", basefmt=" ", label="least squares")
axis.stem(solution.y, linefmt="C0-", markerfmt="C0.", basefmt=" ", label="learned weights")
for edge in range(10, 60, 10):
    axis.axvline(edge - 0.5, color="black", linewidth=0.5, linestyle=":")
axis.set(xlabel="coefficient, six groups of ten", ylabel="y")
axis.legend(frameon=False)
plt.show()
