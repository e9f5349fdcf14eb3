"""
A run that can be killed and resumed
====================================

Data loaders of different lengths, a learning rate with a schedule and clipping, a log file, and a checkpoint. If the process is
killed, repeat the call: it resumes from the checkpoint and ends with the same numbers, bit for bit.
"""

import copy
import tempfile
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import meha

folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)
points, index = torch.randn(600, 2), torch.arange(500)
labels = (points.prod(dim=1) > 0).long()
noisy = torch.where(torch.rand(600) < 0.4, 1 - labels, labels)
network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def batches():
    return meha.loaders.Together(  # each loader starts over when it ends
        clean=DataLoader(TensorDataset(points[500:], labels[500:]), batch_size=50, shuffle=True),
        noisy=DataLoader(TensorDataset(index, points[:500], noisy[:500]), batch_size=100, shuffle=True),
    )


def upper(x, y, batch):
    inputs, targets = batch.clean
    return cross_entropy(y(inputs), targets)


def lower(x, y, batch):
    i, inputs, targets = batch.noisy
    return (x[i].sigmoid() * cross_entropy(y(inputs), targets, reduction="none")).mean()


# %%
# One function makes the call, so that it can be repeated.

adam = meha.Optimizer(torch.optim.Adam, lr=0.05, scheduler=partial(CosineAnnealingLR, T_max=600), clip=1.0)


def train(name, callbacks=()):
    torch.manual_seed(1)
    return meha.solve(
        meha.Problem(upper, lower),
        torch.zeros(500),
        copy.deepcopy(network),
        meha.StochasticMEHA(x_optimizer=adam),
        batches=batches(),
        max_steps=600,
        checkpoint=meha.Checkpoint(folder / f"{name}.pt", every=100),
        callbacks=[meha.loggers.CSVLogger(folder / f"{name}.csv", every=10), *callbacks],
    )


# %%
# An exception in the middle stands for a process that is killed.


def killed(run, info):
    if info.step == 350:
        raise RuntimeError("killed")


try:
    train("run", [killed])
except RuntimeError as error:
    print("the run ended:", error)
resumed = train("run")
whole = train("other")
print("resumed and uninterrupted runs are equal, bit for bit:", torch.equal(resumed.x, whole.x))

# %%
# The log has a row for every tenth step.

rows = [line.split(",") for line in (folder / "run.csv").read_text().splitlines()]
step, loss = (rows[0].index(name) for name in ("step", "upper"))
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.plot([float(row[step]) for row in rows[1:]], [float(row[loss]) for row in rows[1:]])
axis.axvline(350, color="tab:red", linestyle=":", label="killed")
axis.set(xlabel="step", ylabel="F on the batch")
axis.legend(frameon=False)
plt.show()
