"""The task of :mod:`weighing` in a loop of one's own around ``meha.start``, with the caller's optimizers and schedule."""

import copy

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from weighing import EPOCHS, RATE, answers, clean_loss, weighted_loss

import meha


# begin
def train(task, numbers):
    net, weigher = task.networks()
    batches = meha.loaders.Together(*task.loaders())
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    x_optimizer = torch.optim.Adam(weigher.parameters(), lr=numbers["lr"])
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    problem = meha.Problem(
        upper=lambda x, y, batch: clean_loss(y, batch[1]),
        lower=lambda x, y, batch: weighted_loss(x, y, batch[0]),
    )
    run = meha.start(problem, weigher, net, x_optimizer=x_optimizer, y_optimizer=optimizer, max_steps=task.steps)
    best, kept, first = -1.0, None, 0
    if task.file.exists():
        state = torch.load(task.file, weights_only=True)
        run.load_state_dict(state["run"])
        batches.load_state_dict(state["batches"])
        scheduler.load_state_dict(state["scheduler"])
        best, kept, first = (state[name] for name in ("best", "kept", "first"))
        meha.loaders.set_random_states(state["random"], batches)
    for epoch in range(first, EPOCHS):
        for batch in batches:
            run.step(batch)
            scheduler.step()
        score = task.accuracy(net)
        if score > best:
            best, kept = score, copy.deepcopy(net.state_dict())
        state = {"run": run.state_dict(), "batches": batches.state_dict(), "scheduler": scheduler.state_dict()}
        random = meha.loaders.random_states(batches)
        torch.save({**state, "first": epoch + 1, "random": random, "best": best, "kept": kept}, task.file)
        task.ended(epoch)
    return kept


# end

if __name__ == "__main__":
    answers(train)
