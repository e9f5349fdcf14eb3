"""
Support vectors in the dual, with C and the kernel width
========================================================

C and the width of the kernel are learned on validation data, from the dual problem of a support vector machine.

The lower level is the dual problem, a quadratic program in the multipliers y of the examples with the box 0 <= y <= C. x holds
the logarithms of C and of the width of a Gaussian kernel: C moves the bounds of y, the width its objective. The upper level is
a smooth hinge loss on other data. A constant in the kernel takes the place of a bias.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import softplus

import meha

TRAIN, VALID = 8, 40


def moons(n, generator):
    """Two interleaved half circles with noise, and labels -1 and 1."""
    angle = torch.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    side = torch.arange(n) % 2
    points = torch.stack([angle.cos() + side, angle.sin() * (1 - 2 * side) + 0.4 * side], dim=1)
    return points + 0.25 * torch.randn(n, 2, generator=generator, dtype=torch.float64), (1 - 2 * side).double()


def problem():
    generator = torch.Generator().manual_seed(0)
    (a, label), (b, target) = moons(TRAIN, generator), moons(VALID, generator)
    near, far = torch.cdist(a, a).square(), torch.cdist(b, a).square()

    def kernel(x, squares):
        return torch.exp(-squares * torch.exp(-2 * x[1]) / 2) + 1

    def upper(x, y):
        margin = target * (kernel(x, far) @ (label * y))
        return softplus(4 * (1 - margin)).mean() / 4

    def lower(x, y):
        weighted = label * y
        return weighted @ kernel(x, near) @ weighted / 2 - y.sum()

    bounds = meha.constraints.Bounds(0.0, lambda x: x[0].exp().expand(TRAIN))
    return meha.Problem(upper, lower, x_set=meha.sets.Box(-3.0, 3.0), lower_constraints=bounds)


def main():
    stated = problem()
    x0, y0 = torch.zeros(2, dtype=torch.float64), torch.full((TRAIN,), 0.5, dtype=torch.float64)
    solution = meha.solve(stated, x0, y0, meha.Default(max_gradients=2000))
    print(solution)
    C, width = solution.x.exp().tolist()
    at_zero, at_C = int((solution.y < 1e-6).sum()), int((solution.y > C - 1e-6).sum())
    print(f"C = {C:.4f}, width = {width:.4f}; of {TRAIN} multipliers {at_zero} are zero and {at_C} are C")
    print(f"validation loss {float(stated.upper(solution.x, solution.y)):.4f}")
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.bar(range(1, TRAIN + 1), solution.y.numpy())
    axes.axhline(C, color="C1", label=f"C = {C:.2f}")
    axes.set(xlabel="example", ylabel="multiplier", title="support vectors at the C and width found")
    axes.legend()
    figure.tight_layout()
    plt.show()


if __name__ == "__main__":
    main()
