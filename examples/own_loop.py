"""
Three lines in your own training loop
=====================================

Eight people labelled the training examples, and four of them tossed a coin. An ordinary training loop believes all of them.
Three lines are added to it, and it learns how much each label counts, by the loss on 50 examples whose labels are right.
Optimizer, schedule and whatever else is in the loop stay.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import meha

torch.manual_seed(0)
inputs = torch.randn(3050, 20)
truth = (inputs @ torch.randn(20) > 0).long()
person = torch.randint(8, (3050,))
tossed = (person < 4) & (torch.rand(3050) < 0.5)
labels = torch.where(tossed, 1 - truth, truth)
train = DataLoader(TensorDataset(inputs[:1000], labels[:1000], person[:1000]), batch_size=50, shuffle=True)
clean = DataLoader(TensorDataset(inputs[1000:1050], truth[1000:1050]), batch_size=50)


def fresh():
    """A network, its optimizer and its schedule, for 20 epochs."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * len(train))


def accuracy(net):
    with torch.no_grad():
        return float((net(inputs[1050:]).argmax(dim=1) == truth[1050:]).float().mean())


# %%
# The ordinary loop
# -----------------

net, optimizer, scheduler = fresh()
ordinary = []
for _ in range(20):
    for points, targets, _who in train:
        optimizer.zero_grad()
        cross_entropy(net(points), targets).backward()
        optimizer.step()
        scheduler.step()
    ordinary.append(accuracy(net))
print(f"test accuracy, all labels alike: {ordinary[-1]:.3f}")

# %%
# Three lines more
# ----------------
#
# ``x`` has one number for each person, whose sigmoid weighs the losses of their labels. The lower level is the training loss
# with these weights, the upper level the loss on the clean examples.


def training_loss(x, net, batch):
    points, targets, who = batch[0]
    return (x[who].sigmoid() * cross_entropy(net(points), targets, reduction="none")).mean()


def clean_loss(x, net, batch):
    points, targets = batch[1]
    return cross_entropy(net(points), targets)


# %%
# ``Together`` takes a batch of each loader, and ends with the epoch of the longer one. ``run.step(batch)`` takes the place of
# ``zero_grad``, ``backward`` and ``step``.

net, optimizer, scheduler = fresh()
problem = meha.Problem(upper=clean_loss, lower=training_loss)  # new
run = meha.start(problem, torch.zeros(8), net, y_optimizer=optimizer, max_steps=20 * len(train))  # new
learned = []
for _ in range(20):
    for batch in meha.loaders.Together(train, clean):
        run.step(batch)  # new
        scheduler.step()
    learned.append(accuracy(net))
print(f"test accuracy, learned weights: {learned[-1]:.3f}")
print("weights of the people:", [f"{weight:.2f}" for weight in run.x.sigmoid()])

# %%
# Without ``y_optimizer``, the method takes steps of its own.

net, _, _ = fresh()
run = meha.start(problem, torch.zeros(8), net, max_steps=20 * len(train))
for _ in range(20):
    for batch in meha.loaders.Together(train, clean):
        run.step(batch)
print(f"test accuracy, learned weights, the method's own steps: {accuracy(net):.3f}")
print(run.solution())

# %%
# The clean examples could also be all that the network learns from. 50 are too few.

net, optimizer, scheduler = fresh()
for _ in range(20 * len(train)):
    optimizer.zero_grad()
    cross_entropy(net(inputs[1000:1050]), truth[1000:1050]).backward()
    optimizer.step()
    scheduler.step()
alone = accuracy(net)
print(f"test accuracy, clean examples alone: {alone:.3f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
epochs = range(1, 21)
left.plot(epochs, ordinary, color="tab:red", label="all labels alike")
left.plot(epochs, learned, color="tab:blue", label="learned weights")
left.axhline(alone, color="0.6", linestyle=":", label="clean examples alone")
left.set(title="test accuracy", xlabel="epoch", xticks=[1, 5, 10, 15, 20], ylim=(0.62, 0.98))
left.legend(frameon=False, loc="lower left")
right.bar(range(1, 9), run.x.sigmoid(), color=["tab:red"] * 4 + ["tab:green"] * 4)
right.set(title="learned weight of each person", xlabel="persons 1 to 4 tossed a coin")
plt.show()
