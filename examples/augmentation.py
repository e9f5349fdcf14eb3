"""
Augmentation strengths
======================

A network learns digits from 20 images of each. In tests they are turned by up to 40 degrees, and have noise. How strong should
augmentations be in training? ``x`` has the strengths of four of them, which 200 validation images choose that are like those of
the tests. A random search with as many gradients is the baseline.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

import meha

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)
most = torch.tensor([60.0, 0.5, 0.5, 0.8])  # degrees, shares of half the width, logarithms of sizes, gray levels
names = ["turn", "move", "zoom", "noise"]


def drawn(n, generator):
    """What is random for n images. It is part of the batch, so that losses can be compared at the same draws."""
    return 2 * torch.rand(5, n, generator=generator) - 1, torch.randn(n, 1, 8, 8, generator=generator)


def augmented(x, inputs, draws):
    """Each image with changes between minus and plus the strengths: x has their logits, as shares of the most."""
    (a, b, c, d, e), normal = draws
    turn, move, zoom, noise = x.sigmoid() * most
    angle, size = torch.deg2rad(turn) * a, (zoom * b).exp()
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = torch.stack([cos, -sin, move * c, sin, cos, move * d], dim=1).view(-1, 2, 3)
    moved = grid_sample(inputs, affine_grid(rows, list(inputs.shape), align_corners=False), align_corners=False)
    return moved + (noise * e.abs())[:, None, None, None] * normal


of_class = [torch.nonzero(digits == k)[:, 0] for k in range(10)]
train, valid, test = (torch.cat([index[part] for index in of_class]) for part in (slice(20), slice(20, 40), slice(40, None)))
shift = torch.tensor([40.0, 0.0, 0.0, 0.4]).div(most).logit()
seen = augmented(shift, images, drawn(len(images), torch.Generator().manual_seed(0)))  # what the network is for


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))


def batches(seed):
    """Random training and validation images, and what is drawn for the former, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        parts = [part[torch.randint(len(part), (64,), generator=generator)] for part in (train, valid)]
        yield (*parts, drawn(64, generator))


# %%
# The gradient of the training loss reaches the strengths through the images.


def lower(x, net, batch):
    return cross_entropy(net(augmented(x, images[batch[0]], batch[2])), digits[batch[0]])


def upper(x, net, batch):
    return cross_entropy(net(seen[batch[1]]), digits[batch[1]])


problem = meha.Problem(upper, lower, x_set=meha.sets.Box(-5.0, 5.0))
start = torch.zeros(4)
method = meha.stochastic.NetworkSOBA(both_sides=True)
solution = meha.solve(problem, start, network(0), method, batches=batches(0), max_steps=800)
print(solution)

# %%
# ``NetworkSOBA`` is the default for networks; ``both_sides=True`` is not. The method compares training losses at two networks.
# By default the second is always on the side where F is less, and the difference is biased against strong augmentations, which
# bend the loss. With ``both_sides`` it changes sides from step to step, and the bias cancels. The default is a row below.

default = meha.solve(problem, start, network(0), batches=batches(0), max_steps=800, refit=False)

# %%
# The baselines: no augmentation, all at half of the most, and a random search with as many gradients, which takes the strengths
# with the least validation loss. All networks are trained in the same way. Nobody knows the strengths of the tests themselves;
# the last row has them.


def trained(x, seed, steps=300):
    net = network(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.008)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for batch, _ in zip(batches(seed), range(steps), strict=False):
        optimizer.zero_grad()
        lower(x, net, batch).backward()
        optimizer.step()
        schedule.step()
    return net


@torch.no_grad()
def accuracy(net):
    return 100 * float((net(seen[test]).argmax(1) == digits[test]).float().mean())


generator = torch.Generator().manual_seed(0)
count = (solution.counts.upper + solution.counts.lower) // 300
trials = [10 * torch.rand(4, generator=generator) - 5 for _ in range(count)]
losses = [float(upper(x, trained(x, 0), (None, valid)).detach()) for x in trials]
points = {
    "none": torch.full((4,), -torch.inf),
    "all at the middle": start,
    f"best of {count} random": trials[losses.index(min(losses))],
    "learned, default": default.x,
    "learned, both sides": solution.x,
    "those of the tests": shift,
}
found = {name: [accuracy(trained(x, seed)) for seed in (1, 2)] for name, x in points.items()}
shares = {name: x.sigmoid() for name, x in points.items()}
for name, scores in found.items():
    strengths = ", ".join(f"{kind} {value:.2g}" for kind, value in zip(names, (shares[name] * most).tolist(), strict=True))
    print(f"{name}: test accuracy {sum(scores) / 2:.1f} %, {strengths}")

# %%

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
colors = ["0.8", "0.6", "tab:orange", "tab:cyan", "tab:blue", "tab:green"]
left.barh(list(found), [sum(scores) / 2 for scores in found.values()], color=colors)
for row, scores in enumerate(found.values()):
    left.plot(scores, [row] * 2, "k.", markersize=4)
left.set(title="test accuracy, %, of two trainings each", xlim=(40, 75))
for row, (name, share) in enumerate([*shares.items()][2:]):
    right.bar(torch.arange(4) + 0.2 * row - 0.3, share, width=0.2, color=colors[row + 2], label=name)
right.set(title="strength, as a share of the most", xticks=range(4), xticklabels=names, ylim=(0, 1))
right.legend(frameon=False, fontsize="small")
plt.show()
