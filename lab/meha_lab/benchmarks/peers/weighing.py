"""The task of the programs ``weighing_*.py``: a network weighs the examples of another one, half of whose labels are random.

Each program has a function ``train(task, numbers)``, whose lines between ``# begin`` and ``# end`` are counted. It trains the
network on the weighted loss, and the weigher by the loss on clean examples; both have loaders of their own. The network has
Adam with a cosine schedule. After each epoch the program measures the accuracy on validation examples and keeps the best
network, and it writes a checkpoint, from which the same call goes on when its process was killed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from worker import serve

EPOCHS, RATE = 10, 1e-3  # of all programs; the rate is that of the network


def weighted_loss(weigher: nn.Module, net: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """The mean loss, with weights that the weigher computes from what is known of an example."""
    inputs, labels, known = batch
    weights = weigher(known)[:, 0]
    return weights @ cross_entropy(net(inputs), labels, reduction="none") / weights.sum()


def clean_loss(net: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    inputs, labels = batch
    return cross_entropy(net(inputs), labels)


class KilledError(Exception):
    """Stands for the end of a process."""


class Task:
    """The data, the networks and the file of a run.

    Args:
        data: a file with the tensors of ``train``, ``clean``, ``valid`` and ``test``.
        seed: of the networks and of the order of the examples.
        file: that of the checkpoint.
        until: the number of epochs after which the process is killed; None for never.

    Attributes:
        scores: the accuracies on validation examples.
        trail: digests of the networks that had them, by which two runs are compared.
    """

    def __init__(self, data: Path, seed: int, file: Path, until: int | None) -> None:
        self.data, self.seed, self.file, self.until = torch.load(data, weights_only=True), seed, file, until
        self.steps = EPOCHS * len(self.loaders()[0])
        self.scores: list[float] = []
        self.trail: list[str] = []

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Those of the noisy and of the clean examples: 50 and 7 batches."""
        train, clean = (DataLoader(TensorDataset(*self.data[k]), batch_size=100, shuffle=True) for k in ("train", "clean"))
        return train, clean

    def networks(self) -> tuple[nn.Module, nn.Module]:
        """The network and the weigher; the order of the examples begins here as well."""
        torch.manual_seed(self.seed)
        net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        return net, nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1), nn.Sigmoid())

    def accuracy(self, net: nn.Module) -> float:
        """That on validation examples."""
        self.scores.append(self.measure(net, "valid"))
        self.trail.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
        return self.scores[-1]

    @torch.no_grad()
    def measure(self, net: nn.Module, part: str) -> float:
        inputs, labels = self.data[part]
        return float((net(inputs).argmax(dim=1) == labels).double().mean())

    def ended(self, epoch: int) -> None:
        """After the checkpoint of an epoch, counted from 0."""
        if epoch + 1 == self.until:
            raise KilledError


def answers(train: Callable[[Task, dict[str, float]], dict[str, Tensor]], **versions: str) -> None:
    """Answer questions about a program: the accuracies of its network, the seconds, and the trail of a run."""

    def answer(data: str, seed: int, file: str, numbers: dict[str, float], until: int | None = None) -> dict[str, Any]:
        task, begin = Task(Path(data), seed, Path(file), until), time.process_time()
        try:
            best = train(task, numbers)
        except KilledError:
            return {}
        seconds, (net, _) = time.process_time() - begin, task.networks()
        net.load_state_dict(best)
        valid = max(task.scores)
        return {"accuracy": task.measure(net, "test"), "valid": valid, "seconds": seconds, "trail": task.trail}

    torch.set_num_threads(1)
    serve(answer, torch=torch.__version__, **versions)
