"""
Check a problem before solving it
=================================

:func:`meha.check` takes some gradients at the start and says what will go wrong: gradients that do not match the values,
variables that nothing uses, kinks, scales that differ by orders of magnitude, several basins.
"""

import matplotlib.pyplot as plt
import torch

import meha

# %%
# Two mistakes in two lines: ``detach()`` hides how the lower level depends on x, and the absolute value has a kink.


def lower(x, y):
    penalty = x.detach().exp()
    return (y - torch.tensor([1.0, 2.0])).square().sum() + (penalty * y).abs().sum()


problem = meha.Problem(upper=lambda x, y: (y - 1).square().sum(), lower=lower)
print(meha.check(problem, torch.zeros(2), torch.zeros(2)))

# %%
# Repaired: no ``detach``, and the absolute value as a non-smooth term whose proximal map is known.

repaired = meha.Problem(
    upper=lambda x, y: (y - 1).square().sum(),
    lower=lambda x, y: (y - torch.tensor([1.0, 2.0])).square().sum(),
    nonsmooth=meha.nonsmooth.L1(weight=lambda x: x.exp()),
    x_set=meha.sets.Box(-5.0, 5.0),
)
print(meha.check(repaired, torch.zeros(2), torch.zeros(2)))

# %%
# The repaired problem is solved. A large weight draws the second coordinate to 1; the first needs none.

solution = meha.solve(repaired, torch.zeros(2).double(), torch.zeros(2).double())
print(solution.status, [round(value, 3) for value in solution.y.tolist()])
solution.plot(["upper", "residual"])
plt.show()
