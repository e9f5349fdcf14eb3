"""BOAT's MESO on the sine toy, in an environment of its own.

MESO is Algorithm 1 in another order (theta, y, x), with c_0 = 0.2 and c_k = c (k+1)^(1/4) after that, and with a gradient of
||y - theta||^2 that takes theta for a function of y; y and x are moved by two SGD optimizers. With each step, BOAT writes the
losses of all steps so far to a JSON file; with ``history=False`` it is kept from that, and still computes them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from importlib.metadata import version
from typing import Any

import boat_torch
import torch
from torch import Tensor, nn
from worker import serve


class Point(nn.Module):
    """BOAT's variables are modules."""

    def __init__(self, value: float, n: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((n,), value, dtype=torch.float64))


def upper(data: Any, x: Point, y: Point) -> Tensor:
    return (x.value - 2).square().sum() + (y.value - 4).square().sum()


def lower(data: Any, x: Point, y: Point) -> Tensor:
    return torch.sin(x.value + y.value - 2).sum()


def answer(n: int, steps: int, numbers: dict[str, float], history: bool) -> dict[str, Any]:
    """Median of the seconds of the steps, and the last iterate."""
    x, y = Point(-6.0, 1), Point(0.0, n)
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    config = {
        "fo_op": "MESO",
        "gm_op": None,
        "na_op": None,
        "lower_level_model": y,
        "upper_level_model": x,
        "lower_level_var": list(y.parameters()),
        "upper_level_var": list(x.parameters()),
        "lower_level_opt": torch.optim.SGD(y.parameters(), lr=numbers["beta"]),
        "upper_level_opt": torch.optim.SGD(x.parameters(), lr=numbers["alpha"]),
        "lower_iters": 1,
        "fo_ol_batch_input": False,
        "return_grad": False,
        "device": "cpu",
        "loss_log_path": path,
        "MESO": {"eta": numbers["eta"], "gamma_1": 1 / numbers["gamma"], "c0": numbers["c"], "y_hat_lr": numbers["eta"]},
    }
    losses = {"lower_level_loss": {"function": "__main__.lower"}, "upper_level_loss": {"function": "__main__.upper"}}
    problem = boat_torch.Problem(config, losses)
    problem.build_ll_solver()
    problem.build_ul_solver()
    if not history:
        problem.save_losses = lambda **losses: None
    spent = []
    for k in range(steps):
        begin = time.process_time()
        problem.run_iter({}, {}, current_iter=k)
        spent.append(time.process_time() - begin)
    os.unlink(path)
    return {"seconds": statistics.median(spent), "x": x.value.tolist(), "y": y.value.tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer, **{"boat-torch": version("boat-torch"), "torch of BOAT": torch.__version__})
