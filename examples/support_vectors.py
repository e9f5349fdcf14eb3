"""
Kernel widths of a support vector machine
=========================================

The dual of a support vector machine is a quadratic problem in a box: a lower level with constraints, whose solution has many
coordinates at its bounds. The widths of its kernel, one for each of four features, are learned from validation data. Only the
first two features matter.
"""

import matplotlib.pyplot as plt
import torch

import meha

generator = torch.Generator().manual_seed(0)
points = torch.randn(140, 4, generator=generator, dtype=torch.float64)
signs = torch.where(points[:, :2].norm(dim=1) > 1.2, 1.0, -1.0).double()
A, b, A_valid, b_valid = points[:60], signs[:60], points[60:], signs[60:]

# %%
# ``x`` has the logarithms of the inverse squared widths, ``y`` the dual variables in [0, C].


def kernel(x, left, right):
    scaled = x.exp().sqrt()
    distances = (left * scaled).square().sum(1)[:, None] + (right * scaled).square().sum(1) - 2 * (left * x.exp()) @ right.T
    return torch.exp(-distances / 2)


def decision(x, y, where):
    return kernel(x, where, A) @ (y * b)


problem = meha.Problem(
    upper=lambda x, y: torch.nn.functional.softplus(-3 * b_valid * decision(x, y, A_valid)).mean(),
    lower=lambda x, y: 0.5 * (y * b) @ (kernel(x, A, A) + 0.01 * torch.eye(60)) @ (y * b) - y.sum(),
    x_set=meha.sets.Box(-6.0, 3.0),
    y_set=meha.sets.Box(0.0, 2.0),
)
solution = meha.solve(problem, torch.zeros(4, dtype=torch.float64), torch.zeros(60, dtype=torch.float64))
print(solution)
print("inverse squared widths:", [f"{value:.3g}" for value in solution.x.exp().tolist()])
accuracy = (decision(solution.x, solution.y, A_valid).sign() == b_valid).double().mean()
print(f"validation accuracy {accuracy:.2f}; {int((solution.y > 1e-6).sum())} of 60 points are support vectors")

# %%
# The decision boundary in the two features that matter; support vectors have a ring.

grid = torch.linspace(-3, 3, 121, dtype=torch.float64)
square = torch.cartesian_prod(grid, grid)
values = decision(solution.x, solution.y, torch.cat([square, torch.zeros(len(square), 2).double()], dim=1))
figure, axis = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
axis.contourf(grid, grid, values.reshape(121, 121).T, levels=[-99, 0, 99], colors=["#dbe9f6", "#fde3cf"])
axis.scatter(*A[:, :2].T, c=["tab:orange" if sign > 0 else "tab:blue" for sign in b], s=14)
held = solution.y > 1e-6
axis.scatter(*A[held, :2].T, s=60, facecolors="none", edgecolors="black", linewidths=0.6)
axis.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal", xlabel="feature 1", ylabel="feature 2")
plt.show()
