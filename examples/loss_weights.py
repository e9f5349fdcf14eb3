"""
Weights of auxiliary losses
===========================

The main task has 15 examples and 20 features. Four auxiliary tasks have 60 examples each: two are nearly the same task, two
have nothing to do with it. How much should each count? Weights of the auxiliary losses are learned from 40 validation examples
of the main task.
"""

import matplotlib.pyplot as plt
import torch

import meha

generator = torch.Generator().manual_seed(1)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


truth = normal(20)
others = [truth + 0.1 * normal(20), truth + 0.3 * normal(20), normal(20), -truth]
names = ["close", "similar", "unrelated", "opposite"]


def sample(coefficients, n):
    A = normal(n, 20)
    return meha.losses.LeastSquares(A, A @ coefficients + 0.5 * normal(n))


main, valid, test = sample(truth, 15), sample(truth, 40), sample(truth, 2000)
auxiliary = [sample(coefficients, 60) for coefficients in others]

# %%
# ``x`` has the logarithms of the four weights, ``y`` the coefficients that all tasks share.

problem = meha.Problem(
    upper=lambda x, y: valid(y),
    lower=lambda x, y: main(y) + sum(x[k].exp() * auxiliary[k](y) for k in range(4)) + 1e-3 * y.square().sum(),
    x_set=meha.sets.Box(-9.0, 4.0),
)
zeros = torch.zeros(4, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
solution = meha.solve(problem, *zeros)
print(solution)

# %%
# For comparison: all weights zero (the main task alone), and all weights one.


def fit(x):
    """The solution of the lower level at x."""
    fixed = meha.Problem(upper=lambda y: y.square().sum(), lower=lambda y: problem.lower(x, y))
    return meha.solve(fixed, None, zeros[1]).y


alone, equal, learned = (float(test(fit(x))) for x in (zeros[0] - 30, zeros[0], solution.x))
print(f"test loss: main task alone {alone:.3f}, equal weights {equal:.3f}, learned weights {learned:.3f}")

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].bar(names, solution.x.exp(), color="tab:blue")
axes[0].set(yscale="log", title="learned weight of each auxiliary task")
axes[1].bar(["alone", "equal", "learned"], [alone, equal, learned], color=["0.7", "0.7", "tab:blue"])
axes[1].set(yscale="log", title="test loss of the main task")
plt.show()
