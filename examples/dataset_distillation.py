"""
Ten images that replace a data set
==================================

Dataset distillation: learn one image per digit such that a classifier trained on these ten images alone recognises real digits.
``x`` are the images, ``y`` the classifier; the lower level trains on ``x``, the upper level judges on 1,000 real digits.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import meha

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images) / 16, torch.tensor(digits)
train, test = (images[:1000], digits[:1000]), (images[1000:], digits[1000:])
classes = torch.arange(10)

# %%
# The start is one real image of each digit. A budget of gradients keeps the run short; the images are good long before they
# are optimal.

first = torch.stack([train[0][train[1] == digit][0] for digit in range(10)])
nothing = torch.zeros(64, 10, dtype=torch.float64)


def lower(x, y):
    return cross_entropy(x @ y, classes) + 0.005 * y.square().sum()


def upper(x, y):
    return cross_entropy(train[0] @ y, train[1])


solution = meha.solve(meha.Problem(upper, lower), first, nothing, meha.Default(max_gradients=3000))
print(solution)

# %%
# A classifier trained afresh on ten images only shows what the images are worth. It is the lower level alone, a problem
# without an upper variable (``x0=None``).


def accuracy(ten):
    fit = meha.Problem(upper=lambda y: y.square().sum(), lower=lambda y: lower(ten, y))
    y = meha.solve(fit, None, nothing).y
    return float(((test[0] @ y).argmax(1) == test[1]).double().mean())


print(f"test accuracy: ten real images {accuracy(first):.3f}, ten learned images {accuracy(solution.x):.3f}")

figure, axes = plt.subplots(2, 10, figsize=(9, 2.1), layout="constrained")
for row, ten in zip(axes, (first, solution.x), strict=True):
    for axis, image in zip(row, ten, strict=True):
        axis.imshow(image.reshape(8, 8), cmap="gray_r")
        axis.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("real")
axes[1, 0].set_ylabel("learned")
plt.show()
