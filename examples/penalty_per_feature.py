"""
A penalty for every feature, by cross-validation
================================================

Ridge regression usually has one penalty for all features, chosen on a grid. Here each of the ten features of scikit-learn's
diabetes data has its own, and all ten are chosen at once, by the gradient of the 5-fold cross-validation error.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes

import meha

data = load_diabetes()
order = np.random.default_rng(0).permutation(len(data.target))
A = torch.tensor(data.data[order] / data.data.std(axis=0))
b = torch.tensor((data.target[order] - data.target.mean()) / data.target.std())
A, b, A_test, b_test = A[:300], b[:300], A[300:], b[300:]
folds = torch.arange(300) % 5

# %%
# ``x`` has the logarithms of the penalties. ``y`` has a row of coefficients for each fold: the lower level fits each row on the
# other four folds, the upper level measures each row on its own fold.

train = [meha.losses.LeastSquares(A[folds != k], b[folds != k]) for k in range(5)]
valid = [meha.losses.LeastSquares(A[folds == k], b[folds == k]) for k in range(5)]


def lower(x, y):
    return sum(train[k](y[k]) for k in range(5)) + 0.5 * (x.exp() * y.square()).sum()


def upper(x, y):
    return sum(valid[k](y[k]) for k in range(5)) / 5


problem = meha.Problem(upper, lower, x_set=meha.sets.Box(-8.0, 4.0))
start = torch.full((10,), -2.0, dtype=torch.float64), torch.zeros(5, 10, dtype=torch.float64)
solution = meha.solve(problem, *start)
print(solution)

# %%
# One penalty for all features is the same problem with an ``x`` of one number.

shared = meha.Problem(upper, lambda x, y: lower(x.expand(10), y), x_set=meha.sets.Box(-8.0, 4.0))
single = meha.solve(shared, torch.full((1,), -2.0, dtype=torch.float64), start[1])


def refit(penalties):
    """Coefficients on all training data, and their test error."""
    y = torch.linalg.solve(A.T @ A / len(A) + torch.diag(penalties), A.T @ b / len(A))
    return y, (A_test @ y - b_test).square().mean()


results = {"one penalty": (single, single.x.exp().expand(10)), "ten penalties": (solution, solution.x.exp())}
for name, (found, penalties) in results.items():
    print(f"{name}: cross-validation error {2 * found.upper:.4f}, test error {refit(penalties)[1]:.4f}")

# %%
# Features that do not help get a large penalty, and a coefficient near zero.

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].bar(data.feature_names, solution.x.exp())
axes[0].axhline(float(single.x.exp()), color="tab:orange", label="one for all")
axes[0].set(yscale="log", title="penalty")
axes[0].legend(frameon=False)
axes[1].bar(data.feature_names, refit(solution.x.exp())[0])
axes[1].set(title="coefficient")
plt.show()
