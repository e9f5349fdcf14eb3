"""
Long-tailed classes
===================

The zeros have 100 examples, the nines 2, and each class between fewer than the one before; tests have all classes alike. An
ordinary training hardly ever answers "nine". Here an offset for the logit of each class in training is learned from 8 further
examples of each class. Two formulas that need no such examples are the baselines, and one of them is hard to beat.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import meha

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images).float() / 16, torch.tensor(digits)
counts = (100 * 50.0 ** -torch.linspace(0, 1, 10)).round().int()
of_class = [torch.nonzero(digits == k)[:, 0] for k in range(10)]
train = torch.cat([index[: counts[k]] for k, index in enumerate(of_class)])
valid = torch.cat([index[100:108] for index in of_class])
test = torch.cat([index[108:] for index in of_class])
print("examples of each class:", counts.tolist())


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def batches(seed):
    """Random examples of both parts, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(part[torch.randint(len(part), (64,), generator=generator)] for part in (train, valid))


# %%
# ``x`` has the ten offsets. They are added in training only: a class with a low offset must win by a larger logit. Tests go
# without them.


def lower(x, net, batch):
    return cross_entropy(net(images[batch[0]]) + x, digits[batch[0]])


def upper(x, net, batch):
    return cross_entropy(net(images[batch[1]]), digits[batch[1]])


problem = meha.Problem(upper, lower, x_set=meha.sets.Box(-5.0, 5.0))
solution = meha.solve(problem, torch.zeros(10), network(0), batches=batches(0), max_steps=1500)
print(solution)

# %%
# The baselines: nothing; the class-balanced loss (Cui et al. 2019), which weighs an example of a class of n by
# (1 - b) / (1 - b^n) with b = 0.999; logit adjustment (Menon et al. 2021), whose offsets are the logarithms of the shares of
# the classes. All are trained in the same way, as is a network with the offsets found, and on the same three seeds.


def trained(loss, seed, part=train):
    net = network(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.004)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(400):
        index = part[torch.randint(len(part), (64,), generator=generator)]
        optimizer.zero_grad()
        loss(net(images[index]), digits[index]).backward()
        optimizer.step()
        schedule.step()
    return net


def accuracies(loss, part=train):
    """The share of right answers in each class, in per cent; the mean of three networks."""
    right = sum((trained(loss, seed, part)(images[test]).argmax(1) == digits[test]).float() for seed in (1, 2, 3)) / 3
    return torch.stack([100 * right[digits[test] == k].mean() for k in range(10)])


def adjusted(offsets):
    return lambda logits, labels: cross_entropy(logits + offsets, labels)


prior = (counts / counts.sum()).log()
losses = {
    "plain": cross_entropy,
    "class-balanced loss": torch.nn.CrossEntropyLoss((1 - 0.999) / (1 - 0.999**counts)),
    "logit adjustment": adjusted(prior),
    "learned offsets": adjusted(solution.x),
}
found = {name: accuracies(loss) for name, loss in losses.items()}
for name, each in found.items():
    print(f"{name}: {each.mean():.1f} % on average over the classes, {each[-3:].mean():.1f} % for the three smallest")

# %%
# Logit adjustment is better: the formula knows what 80 examples can only estimate. And these 80 can be trained on instead. The
# offsets then follow the new shares of the classes.

both, more = torch.cat([train, valid]), counts + 8
new = (more / more.sum()).log()
for name, offsets in {"plain": 0.0, "logit adjustment": new, "learned offsets": solution.x + new - prior}.items():
    print(f"{name}, trained on all examples: {accuracies(adjusted(offsets), both).mean():.1f} %")

# %%

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for (name, each), color in zip(found.items(), ("0.7", "tab:orange", "tab:green", "tab:blue"), strict=True):
    left.plot(range(10), each, "o-", color=color, label=name, markersize=4)
left.set(title="test accuracy, %", xlabel="class", xticks=range(10))
left.legend(frameon=False, loc="lower left")
right.plot(range(10), prior - prior.mean(), "o-", color="tab:green", label="logit adjustment", markersize=4)
right.plot(range(10), solution.x - solution.x.mean(), "o-", color="tab:blue", label="learned", markersize=4)
right.set(title="offset less the mean of the offsets", xlabel="class", xticks=range(10))
right.legend(frameon=False)
plt.show()
