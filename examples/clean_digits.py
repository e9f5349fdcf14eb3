"""
Find mislabeled images
======================

:func:`meha.cleaning.clean` ranks the examples of your own data by how wrong their labels look, given a few trusted labels.
The command ``meha clean data.npz --clean-fraction 0.1`` does the same for a file.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import meha

rng = np.random.default_rng(0)
images, truth = load_digits(return_X_y=True)
trusted = np.arange(len(truth)) < 180  # a tenth, known to be right
labels = np.where(~trusted & (rng.random(len(truth)) < 0.25), rng.integers(0, 10, len(truth)), truth)
cleaning = meha.cleaning.clean(images, labels, trusted)
print(cleaning)

# %%
# How good is it? Here the truth is known.

wrong, flagged = np.flatnonzero(labels != truth), cleaning.suspicious()
found = np.isin(wrong, flagged).mean()
precision = np.isin(flagged, wrong).mean()
print(
    f"{len(wrong)} labels are wrong; {100 * found:.1f} % of them are found, {100 * precision:.0f} % of those flagged are wrong"
)

# %%
# The most suspicious images, with the given label and the suggested one.

figure, axes = plt.subplots(3, 8, figsize=(9, 4.2), layout="constrained")
for axis, row in zip(axes.flat, cleaning.order, strict=False):
    axis.imshow(images[row].reshape(8, 8), cmap="gray_r")
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"{labels[row]} → {cleaning.suggested[row]}", fontsize="medium")
plt.show()
