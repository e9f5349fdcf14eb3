"""The task of :mod:`weighing` in BOAT, with MESO, its form of MEHA; loop, loaders and checkpoint are written by hand.

The copy of the network that MESO trains is in a private attribute of the problem, and begins again.
"""

import copy
import os
from importlib.metadata import version

import boat_torch
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from weighing import EPOCHS, RATE, answers, clean_loss, weighted_loss


# begin
def upper(batch, weigher, net):
    return clean_loss(net, batch["batch"])


def lower(batch, weigher, net):
    return weighted_loss(weigher, net, batch["batch"])


def train(task, numbers):
    net, weigher = task.networks()
    train, clean = task.loaders()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    x_optimizer = torch.optim.Adam(weigher.parameters(), lr=numbers["lr"])
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    config = {
        "fo_op": "MESO",
        "gm_op": None,
        "na_op": None,
        "lower_level_model": net,
        "upper_level_model": weigher,
        "lower_level_var": list(net.parameters()),
        "upper_level_var": list(weigher.parameters()),
        "lower_level_opt": optimizer,
        "upper_level_opt": x_optimizer,
        "fo_ol_batch_input": False,
        "return_grad": False,
        "device": "cpu",
        "loss_log_path": os.devnull,
        "MESO": {
            "eta": numbers["eta"],
            "gamma_1": numbers["gamma_1"],
            "c0": numbers["c0"],
            "y_hat_lr": numbers["y_hat_lr"],
        },
    }
    losses = {"lower_level_loss": {"function": "__main__.lower"}, "upper_level_loss": {"function": "__main__.upper"}}
    problem = boat_torch.Problem(config, losses)
    problem.build_ll_solver()
    problem.build_ul_solver()
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
    step = first * len(train)
    for epoch in range(first, EPOCHS):
        for batch in train:
            if taken == len(clean):
                begun, taken, stream = torch.get_rng_state(), 0, iter(clean)
            clean_batch, taken = next(stream), taken + 1
            problem.run_iter({"batch": batch}, {"batch": clean_batch}, current_iter=step)
            scheduler.step()
            step += 1
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
    answers(train, **{"boat-torch": version("boat-torch")})
