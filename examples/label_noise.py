"""
Learn which labels to trust
===========================

40 % of the training labels are wrong. A weight for every training example is learned together with the network, so that the
network does well on 100 examples whose labels are right. Nothing is tuned: step sizes and penalty are chosen by ``solve``.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import meha

torch.manual_seed(0)
points = torch.randn(600, 2)
truth = (points.prod(dim=1) > 0).long()
labels = torch.where(torch.rand(600) < 0.4, 1 - truth, truth)  # 40 % of the labels are wrong
net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))

# %%
# ``x`` has a number for each of 500 training examples, whose sigmoid is the weight of its loss; ``y`` is the network. The
# lower level trains the network with these weights, the upper level judges it by 100 clean examples.

problem = meha.Problem(
    lower=lambda x, y: (x.sigmoid() * cross_entropy(y(points[:500]), labels[:500], reduction="none")).mean(),
    upper=lambda x, y: cross_entropy(y(points[500:]), truth[500:]),
)
solution = meha.solve(problem, torch.zeros(500), net, max_steps=1000)
print(solution)

# %%
# Right labels end with a large weight, wrong ones with a small one.

weights, right = solution.x.sigmoid(), (labels == truth)[:500]
print(f"mean weight: right labels {weights[right].mean():.2f}, wrong labels {weights[~right].mean():.2f}")

colors = [("tab:blue", "tab:orange")[label] for label in labels[:500]]
figure, (left, middle, hist) = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
left.scatter(*points[:500].T, s=9, c=colors)
left.set_title("500 examples, 40 % mislabeled")
middle.scatter(*points[:500].T, s=1 + 22 * weights.numpy() ** 2, c=colors)
middle.set_title("size: the learned weight")
for axis in (left, middle):
    axis.set(xticks=[], yticks=[], aspect="equal", xlim=(-3.2, 3.2), ylim=(-3.2, 3.2))
hist.hist([weights[right], weights[~right]], bins=20, stacked=True, color=["tab:green", "tab:red"], label=["right", "wrong"])
hist.set(title="weights by label", xlabel="weight", ylabel="examples")
hist.legend(frameon=False)
plt.show()
