"""The task of :mod:`weighing` in PyTorch alone: the weigher moves along the gradient through one step ahead of the network."""

import copy

import torch
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR
from weighing import EPOCHS, RATE, answers, clean_loss, weighted_loss


# begin
def train(task, numbers):
    net, weigher = task.networks()
    train, clean = task.loaders()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    x_optimizer = torch.optim.Adam(weigher.parameters(), lr=numbers["lr"])
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    parts = {"net": net, "weigher": weigher, "optimizer": optimizer, "x_optimizer": x_optimizer, "scheduler": scheduler}
    best, kept, first = -1.0, None, 0
    begun, taken, stream = torch.get_rng_state(), 0, iter(clean)
    if task.file.exists():
        state = torch.load(task.file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        best, kept, first, begun, taken = (state[name] for name in ("best", "kept", "first", "begun", "taken"))
        torch.set_rng_state(begun)  # the clean loader is in the middle of a pass
        stream = iter(clean)
        for _ in range(taken):
            next(stream)
        torch.set_rng_state(state["random"])
    for epoch in range(first, EPOCHS):
        for batch in train:
            if taken == len(clean):
                begun, taken, stream = torch.get_rng_state(), 0, iter(clean)
            clean_batch, taken = next(stream), taken + 1
            tensors = dict(net.named_parameters())
            gradient = torch.autograd.grad(weighted_loss(weigher, net, batch), list(tensors.values()), create_graph=True)
            ahead = {name: p - numbers["step"] * g for (name, p), g in zip(tensors.items(), gradient, strict=True)}
            loss = clean_loss(lambda inputs, at=ahead: functional_call(net, at, (inputs,)), clean_batch)
            x_optimizer.zero_grad()
            loss.backward(inputs=list(weigher.parameters()))
            x_optimizer.step()
            optimizer.zero_grad()
            weighted_loss(weigher, net, batch).backward(inputs=list(net.parameters()))
            optimizer.step()
            scheduler.step()
        score = task.accuracy(net)
        if score > best:
            best, kept = score, copy.deepcopy(net.state_dict())
        state = {name: part.state_dict() for name, part in parts.items()}
        place = {"first": epoch + 1, "begun": begun, "taken": taken, "random": torch.get_rng_state()}
        torch.save({**state, **place, "best": best, "kept": kept}, task.file)
        task.ended(epoch)
    return kept


# end

if __name__ == "__main__":
    answers(train)
