"""Whether an x of a network is worth anything, and whether ``solve`` says so where it is not.

    python -m meha_lab.benchmarks.hollow_networks [--methods default F2SA] [--only NAME ...] [--again]

Twenty kinds of problems invite a hollow answer: few validation data, a network that can memorise them, an x with nothing to
find. Twenty others have an x to find and the data to find it. The truth of each answer is measured without the library: three
new networks are trained at x and at x0, as long as the run trained one, and their F is compared. A warning of ``solve`` is a
false alarm where networks at x are better than those at x0, and an answer without one is missed where they are worse.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from meha_lab import pages
from meha_lab.datasets import digits
from meha_lab.paths import RECORDS
from meha_lab.store import Store
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, one_hot

import meha

KIND = "hollow_networks"
CLASSES = 10
STEPS = 1000
LONG, RATE, SEEDS = 1000, 3e-3, (101, 102, 103)
"""Steps, learning rate and seeds of the networks that judge an answer."""

MARGIN = 0.02
"""Relative difference of F below which two x are as good."""


@dataclass(frozen=True)
class NetworkCase:
    """A bilevel problem with a network.

    Attributes:
        problem, x0: the problem, whose objectives take batches if there are ``batches``, and the start of x.
        network: a new network of a seed.
        batches: a function that returns an iterable of batches; None for all data in every step.
        upper: F on all data of the upper level, for judging.
    """

    problem: meha.Problem
    x0: Any
    network: Callable[[int], nn.Module]
    batches: Callable[[], Any] | None
    upper: Callable[[Any, nn.Module], Tensor]


shift = 0
"""Added to all seeds of data; the rules of ``solve`` were chosen at 0."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 1000 * shift)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=seeded(seed))


def perceptron(inputs: int, outputs: int, hidden: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not hidden:
            return nn.Linear(inputs, outputs)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def images(seed: int, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Disjoint parts of the digits, flat, with numbers from 0 to 1."""
    data = digits()
    order = torch.randperm(len(data.labels), generator=seeded(seed))[: sum(sizes)]
    inputs, labels = data.images[order].flatten(1).float() / 255, data.labels[order].long()
    return list(zip(inputs.split(sizes), labels.split(sizes), strict=True))


def redrawn(labels: Tensor, share: float, seed: int) -> Tensor:
    """Labels of which a share is another one."""
    wrong = uniform(seed, len(labels)) < share
    return (labels + wrong * (1 + (uniform(seed + 1, len(labels)) * (CLASSES - 1)).long())) % CLASSES


class IndexDraws:
    """Random indices of training and of validation examples, without end."""

    def __init__(self, train: int, valid: int, size: int = 64) -> None:
        self.sizes, self.size = (train, valid), size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        generator = seeded(7)
        while True:
            yield tuple(torch.randint(n, (min(n, self.size),), generator=generator) for n in self.sizes)


def case(
    train: int,
    valid: int,
    lower: Callable[[Any, Any, Tensor], Tensor],
    upper: Callable[[Any, Any, Tensor], Tensor],
    x0: Any,
    network: Callable[[int], nn.Module],
    batched: bool,
    x_set: Any = None,
) -> NetworkCase:
    """A case from objectives of (x, y, indices)."""
    everything = torch.arange(train), torch.arange(valid)
    if batched:
        problem = meha.Problem(lambda x, y, b: upper(x, y, b[1]), lambda x, y, b: lower(x, y, b[0]), x_set=x_set)
    else:
        problem = meha.Problem(lambda x, y: upper(x, y, everything[1]), lambda x, y: lower(x, y, everything[0]), x_set=x_set)
    batches = partial(IndexDraws, train, valid) if batched else None
    return NetworkCase(problem, x0, network, batches, lambda x, y: upper(x, y, everything[1]))


def classes(x: Any, y: Any, inputs: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    return cross_entropy(y(inputs[index]), labels[index])


def decay(train: int, valid: int, hidden: int, start: float, *, one: bool = False, batched: bool = False) -> NetworkCase:
    """A weight decay for each tensor of the network, or one for all."""
    (a, s), (b, t) = images(0, train, valid)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        sizes = torch.stack([weight.square().sum() for weight in y.parameters()])
        return cross_entropy(y(a[index]), s[index]) + 0.5 * (x.exp() * sizes).sum()

    number = 1 if one else len(list(perceptron(64, CLASSES, hidden, 0).parameters()))
    x0, network = torch.full((number,), start), partial(perceptron, 64, CLASSES, hidden)
    return case(train, valid, lower, partial(over, b, t), x0, network, batched)


def over(inputs: Tensor, labels: Tensor, x: Any, y: Any, index: Tensor) -> Tensor:
    return cross_entropy(y(inputs[index]), labels[index])


def weights(
    train: int, valid: int, hidden: int, wrong: float, *, batched: bool = False, network: bool = False, by_class: bool = False
) -> NetworkCase:
    """A weight for each example, by itself, by a network of its loss, or by its class."""
    (a, s), (b, t) = images(1, train, valid)
    labels = redrawn(s, wrong, 5)

    def lower(x: Any, y: nn.Module, index: Tensor) -> Tensor:
        losses = cross_entropy(y(a[index]), labels[index], reduction="none")
        logits = x(losses.detach()[:, None])[:, 0] if network else x[labels[index] if by_class else index]
        return (logits.sigmoid() * losses).mean()

    x0 = perceptron(1, 1, 16, 3) if network else torch.zeros(CLASSES if by_class else train)
    return case(train, valid, lower, partial(over, b, t), x0, partial(perceptron, 64, CLASSES, hidden), batched)


def distilled(valid: int, hidden: int, *, noise: bool = False, soft: bool = False, batched: bool = False) -> NetworkCase:
    """An image for each class, or the labels of ten images of noise, from which the network learns."""
    (b, t), (first, named) = images(2, valid, 300)
    goal = torch.arange(CLASSES)
    start = normal(9, CLASSES, 64).abs() if noise else torch.stack([first[named == label][0] for label in range(CLASSES)])

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        if soft:
            return -(x.softmax(1) * log_softmax(y(start), 1)).sum(1).mean()
        return cross_entropy(y(x), goal)

    x0 = 3 * one_hot(goal, CLASSES).float() if soft else start
    return case(1, valid, lower, partial(over, b, t), x0, partial(perceptron, 64, CLASSES, hidden), batched)


def smoothing(train: int, valid: int, hidden: int, wrong: float, *, batched: bool = False, power: bool = False) -> NetworkCase:
    """The share of other labels in each target, or the exponent of a focal loss."""
    (a, s), (b, t) = images(3, train, valid)
    labels = redrawn(s, wrong, 5)
    targets = one_hot(labels, CLASSES).float()

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        logs = log_softmax(y(a[index]), 1)
        if power:
            mine = logs.gather(1, labels[index][:, None])[:, 0]
            return -((1 - mine.exp()).clamp_min(1e-6) ** x.exp() * mine).mean()
        share = x.sigmoid()
        return -(((1 - share) * targets[index] + share / CLASSES) * logs).sum(1).mean()

    return case(
        train,
        valid,
        lower,
        partial(over, b, t),
        torch.tensor([-3.0]),
        partial(perceptron, 64, CLASSES, hidden),
        batched,
    )


def sources(size: int, valid: int, hidden: int, wrong: tuple[float, ...], *, batched: bool = False) -> NetworkCase:
    """Shares of sources of text, or here images, on a simplex."""
    *parts, (b, t) = images(4, *[size] * len(wrong), valid)
    labels = [redrawn(s, share, 5 + i) for i, ((_, s), share) in enumerate(zip(parts, wrong, strict=True))]

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return x @ torch.stack([cross_entropy(y(a[index]), s[index]) for (a, _), s in zip(parts, labels, strict=True)])

    x0 = torch.full((len(wrong),), 1 / len(wrong))
    network = partial(perceptron, 64, CLASSES, hidden)
    return case(size, valid, lower, partial(over, b, t), x0, network, batched, meha.sets.Simplex())


def noise(train: int, valid: int, hidden: int, shift: float, *, batched: bool = False) -> NetworkCase:
    """The strength of noise on training images; the validation images have noise of strength ``shift``."""
    (a, s), (b, t) = images(6, train, valid)
    b = b + shift * normal(8, *b.shape)
    drawn = normal(9, *a.shape)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return cross_entropy(y(a[index] + x.exp() * drawn[index]), s[index])

    network = partial(perceptron, 64, CLASSES, hidden)
    return case(train, valid, lower, partial(over, b, t), torch.tensor([-3.0]), network, batched)


def scales(train: int, valid: int, features: int, useful: int, hidden: int, *, batched: bool = False) -> NetworkCase:
    """A factor for each feature of a regression, few of which matter."""
    data = normal(10, train + valid, features)
    goal = (data[:, :useful].sum(1) / math.sqrt(useful)).tanh()[:, None] + 0.1 * normal(11, train + valid, 1)
    a, s, b, t = data[:train], goal[:train], data[train:], goal[train:]

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return mse_loss(y(x.exp() * a[index]), s[index])

    def upper(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return mse_loss(y(x.exp() * b[index]), t[index])

    return case(train, valid, lower, upper, torch.zeros(features), partial(perceptron, features, 1, hidden), batched)


class MixedActivations(nn.Module):
    """A network whose hidden layer mixes three activations, or has a gate on each unit."""

    def __init__(self, inputs: int, outputs: int, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, inputs: Tensor, x: Tensor) -> Tensor:
        z = self.first(inputs)
        if len(x) > 3:
            return self.last(x.sigmoid() * z.relu())
        shares = x.softmax(0)
        return self.last(shares[0] * z.relu() + shares[1] * torch.sin(8 * z) + shares[2] * 0 * z)


def structure(train: int, valid: int, hidden: int, *, gates: bool = False, batched: bool = False) -> NetworkCase:
    """Shares of activations, or gates of hidden units."""
    (a, s), (b, t) = images(12, train, valid)
    return case(
        train,
        valid,
        lambda x, y, index: cross_entropy(y(a[index], x), s[index]),
        lambda x, y, index: cross_entropy(y(b[index], x), t[index]),
        torch.zeros(hidden if gates else 3),
        partial(MixedActivations, 64, CLASSES, hidden),
        batched,
    )


def tasks(train: int, valid: int, hidden: int, *, useful: bool, batched: bool = False) -> NetworkCase:
    """Weights of further losses of the same network: more examples of the task, if useful, and random labels."""
    (a, s), (more, named), (b, t) = images(13, train, 300, valid)
    random = redrawn(named, 1.0, 6)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        part = index if batched else torch.arange(300)
        first = cross_entropy(y(more[part]), named[part] if useful else random[part].roll(1))
        return (
            cross_entropy(y(a[index]), s[index]) + x[0].exp() * first + x[1].exp() * cross_entropy(y(more[part]), random[part])
        )

    x0, network = torch.tensor([-2.0, -2.0]), partial(perceptron, 64, CLASSES, hidden)
    return case(train, valid, lower, partial(over, b, t), x0, network, batched)


def mixup(train: int, valid: int, hidden: int, *, batched: bool = False) -> NetworkCase:
    """The share of another example in each training example."""
    (a, s), (b, t) = images(14, train, valid)
    other = torch.randperm(train, generator=seeded(1))

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        share, pair = x.sigmoid() / 2, other[index]
        mixed = y((1 - share) * a[index] + share * a[pair])
        return (1 - share) * cross_entropy(mixed, s[index]) + share * cross_entropy(mixed, s[pair])

    network = partial(perceptron, 64, CLASSES, hidden)
    return case(train, valid, lower, partial(over, b, t), torch.tensor(-2.0), network, batched)


def targets(train: int, valid: int, features: int, hidden: int, *, batched: bool = False, wrong: float = 0.0) -> NetworkCase:
    """Corrections of the targets of a regression, some of which are far off."""
    data = normal(15, train + valid, features)
    goal = (data @ normal(16, features, 1)) / math.sqrt(features) + 0.1 * normal(17, train + valid, 1)
    a, b, t = data[:train], data[train:], goal[train:]
    s = goal[:train] + 5 * (uniform(18, train, 1) < wrong)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return mse_loss(y(a[index]), s[index] + x[index])

    def upper(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return mse_loss(y(b[index]), t[index])

    return case(train, valid, lower, upper, torch.zeros(train, 1), partial(perceptron, features, 1, hidden), batched)


def outliers(train: int, valid: int, features: int, wrong: float, hidden: int = 0, *, batched: bool = False) -> NetworkCase:
    """Weights of the examples of a regression, some of which have targets that are far off."""
    data = normal(19, train + valid, features)
    goal = (data @ normal(20, features, 1)) / math.sqrt(features) + 0.1 * normal(21, train + valid, 1)
    s = goal[:train] + 4 * (uniform(22, train, 1) < wrong)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return (x[index, None].sigmoid() * (y(data[index]) - s[index]).square()).mean()

    def upper(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return mse_loss(y(data[train + index]), goal[train + index])

    return case(train, valid, lower, upper, torch.zeros(train), partial(perceptron, features, 1, hidden), batched)


def offset(train: int, valid: int, hidden: int, shift: float, *, batched: bool = False) -> NetworkCase:
    """An offset of the training images; those for validation are brighter by ``shift``."""
    (a, s), (b, t) = images(23, train, valid)

    def lower(x: Tensor, y: nn.Module, index: Tensor) -> Tensor:
        return cross_entropy(y(a[index] + x), s[index])

    network = partial(perceptron, 64, CLASSES, hidden)
    return case(train, valid, lower, partial(over, b + shift, t), torch.zeros(64), network, batched)


def ridge(samples: int, features: int, useful: int, *, one: bool = False, batched: bool = False) -> NetworkCase:
    """A penalty for each feature of a linear classifier, or one for all."""
    data = normal(24, 2 * samples, features)
    labels = (data[:, :useful].sum(1) + normal(25, 2 * samples) > 0).float()

    def loss(y: nn.Module, index: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(y(data[index])[:, 0], labels[index])

    def lower(x: Tensor, y: Any, index: Tensor) -> Tensor:
        return loss(y, index) + 0.5 * (x.exp() * y.weight[0].square()).sum()

    x0 = torch.full((1 if one else features,), -4.0)
    network = partial(perceptron, features, 1, 0)
    return case(samples, samples, lower, lambda x, y, index: loss(y, samples + index), x0, network, batched)


HOLLOW: Mapping[str, Callable[[], NetworkCase]] = {
    "decay per layer, 60 images": partial(decay, 60, 60, 64, -3.0),
    "decay per layer, 60 images, batches": partial(decay, 60, 60, 64, -3.0, batched=True),
    "one decay, 30 images, wide": partial(decay, 30, 30, 256, -4.0, one=True),
    "weight per example, right labels, 10 clean": partial(weights, 200, 10, 64, 0.0),
    "weight per example, random labels, 20 clean": partial(weights, 200, 20, 64, 1.0),
    "weight per example, 20 clean, batches": partial(weights, 500, 20, 128, 0.2, batched=True),
    "ten images, 40 real": partial(distilled, 40, 64),
    "ten images of noise, 200 real": partial(distilled, 200, 64, noise=True),
    "labels of ten images of noise": partial(distilled, 100, 64, noise=True, soft=True),
    "label smoothing, right labels, 20 clean": partial(smoothing, 200, 20, 64, 0.0),
    "focal exponent, 20 clean": partial(smoothing, 200, 20, 64, 0.1, power=True),
    "equal sources, 10 clean": partial(sources, 100, 10, 64, (0.2, 0.2, 0.2)),
    "noise of images, 20 clean": partial(noise, 100, 20, 128, 0.0),
    "scales of 40 features, 20 examples": partial(scales, 20, 20, 40, 3, 64),
    "gates of units, 30 images": partial(structure, 30, 30, 64, gates=True),
    "activations, 30 images": partial(structure, 30, 30, 64),
    "useless further losses, 20 clean": partial(tasks, 50, 20, 64, useful=False),
    "mixup, 20 images": partial(mixup, 20, 20, 64),
    "corrections of 20 targets": partial(targets, 20, 10, 30, 64),
    "offset of images, 10 clean": partial(offset, 50, 10, 64, 0.0),
}
"""Problems that invite a hollow answer."""

SOUND: Mapping[str, Callable[[], NetworkCase]] = {
    "weight per example, 40 % wrong, 300 clean, batches": partial(weights, 600, 300, 64, 0.4, batched=True),
    "weight per example, 40 % wrong, 300 clean": partial(weights, 600, 300, 64, 0.4),
    "weight per example, linear": partial(weights, 400, 300, 0, 0.4),
    "weight per example, half wrong, linear, batches": partial(weights, 400, 300, 0, 0.5, batched=True),
    "weights by a network, batches": partial(weights, 800, 300, 64, 0.4, batched=True, network=True),
    "weights of classes": partial(weights, 300, 300, 32, 0.2, by_class=True),
    "sources, four noises, batches": partial(sources, 250, 200, 64, (0.0, 0.3, 0.6, 0.9), batched=True),
    "sources, two noises": partial(sources, 200, 200, 64, (0.0, 0.9)),
    "penalty per feature, 100 samples": partial(ridge, 100, 300, 5),
    "penalty per feature, 200 samples, batches": partial(ridge, 200, 100, 5, batched=True),
    "one penalty, 100 samples": partial(ridge, 100, 100, 5, one=True),
    "label smoothing, 40 % wrong, 300 clean": partial(smoothing, 500, 300, 64, 0.4),
    "label smoothing, 40 % wrong, batches": partial(smoothing, 500, 300, 64, 0.4, batched=True),
    "ten images, 500 real, batches": partial(distilled, 500, 64, batched=True),
    "noise of images, noisy validation": partial(noise, 300, 300, 64, 0.5),
    "scales of 20 features, 300 examples": partial(scales, 300, 300, 20, 3, 32),
    "activations, 400 images, batches": partial(structure, 400, 400, 48, batched=True),
    "further losses, one useful": partial(tasks, 30, 300, 64, useful=True),
    "outliers, 200 examples": partial(outliers, 200, 200, 20, 0.3),
    "offset of images, brighter validation": partial(offset, 300, 300, 64, 0.5),
}
"""Problems with an x to find, and the data to find it."""

CASES = {**HOLLOW, **SOUND}


def long_training(case: NetworkCase, x: Any, seed: int) -> float:
    """F of a new network that was trained for long at x."""
    y = case.network(seed)
    optimizer = torch.optim.Adam(y.parameters(), lr=RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LONG)
    stream = iter(case.batches()) if case.batches is not None else None
    for _ in range(LONG):
        optimizer.zero_grad()
        (case.problem.lower(x, y) if stream is None else case.problem.lower(x, y, next(stream))).backward()
        optimizer.step()
        falling.step()
    with torch.no_grad():
        return float(case.upper(x, y))


def worth(case: NetworkCase, x: Any) -> tuple[float, float, float]:
    """F of new networks at x and at x0, and the standard error of the mean difference."""
    x = x if isinstance(x, nn.Module) else x.detach()
    pairs = [(long_training(case, x, seed), long_training(case, case.x0, seed)) for seed in SEEDS]
    differences = [a - b for a, b in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs), error


METHODS: Mapping[str, Callable[[], meha.Method | None]] = {
    "default": lambda: None,
    "F2SA": meha.F2SA,
    "MEHA": lambda: meha.MEHA(alpha=0.5, beta=0.05, eta=0.05, gamma=1.0, c=0.5, p=0.1),
}
"""The default, and two whose y sees the data of F, so that more answers are hollow."""


def measured(job: tuple[str, str, int]) -> tuple[str, dict[str, Any]]:
    """Solve a problem with the data of a seed, and judge its x."""
    global shift
    torch.set_num_threads(1)
    name, label, shift = job
    case = CASES[name]()
    begin, x0 = time.process_time(), copy.deepcopy(case.x0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = None if case.batches is None else case.batches()
        solution = meha.solve(
            case.problem, x0, case.network(shift), METHODS[label](), max_steps=STEPS, tol=None, batches=batches
        )
    seconds, fresh = time.process_time() - begin, solution.fresh
    warned = any("worth less than x0" in str(item.message) for item in caught)
    key = f"{name}; {label}; {shift}"
    record = {
        "name": name,
        "method": label,
        "seed": shift,
        "status": solution.status.value,
        "warned": warned,
        "seconds": seconds,
    }
    if fresh is None:
        return key, record | {"returned": solution.upper, "judged": False}
    at_x, at_x0, error = worth(case, solution.x)
    record |= {"returned": fresh.returned, "judged": True, "upper": fresh.upper, "start": fresh.start}
    return key, record | {"at x": at_x, "at x0": at_x0, "error": error}


def verdict(record: Mapping[str, Any]) -> str:
    """What an answer is, and what solve said of it."""
    if not record["judged"]:
        return f"no answer ({record['status']})"
    difference, margin = record["at x"] - record["at x0"], MARGIN * abs(record["at x0"])
    if record["warned"]:
        return "false alarm" if difference < -margin else "warned"
    return "missed" if difference > max(margin, 2 * record["error"]) else "right"


def rows(store: Store) -> list[str]:
    """The table of the documentation: how many answers were what, by kind of problem, method and seeds."""
    records = store.records(KIND)
    lines = []
    for title, group in (("invite a hollow answer", HOLLOW), ("have an x to find", SOUND)):
        for label in METHODS:
            for seeds, chosen in (("0", [0]), ("others", sorted({record["seed"] for record in records} - {0}))):
                verdicts = [
                    verdict(record)
                    for record in records
                    if record["name"] in group and record["method"] == label and record["seed"] in chosen
                ]
                numbers = [str(verdicts.count(kind)) for kind in ("right", "warned", "missed", "false alarm")]
                lines.append([title, label, seeds, *numbers, str(sum(map(verdicts.count, {v for v in verdicts if "(" in v})))])
    return pages.markdown(("20 problems that", "method", "seeds", "right", "warned", "missed", "false alarm", "failed"), lines)


TABLES: pages.Tables = {"hollow networks": ("responses.md", rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="measure what has a record, too")
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    store = Store(options.records)
    known = set() if options.again else {record["key"] for record in store.records(KIND)}
    jobs = [(name, label, seed) for seed in options.seeds for name in options.only for label in options.methods]
    jobs = [job for job in jobs if "; ".join(map(str, job)) not in known]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for key, record in pool.imap_unordered(measured, jobs):
            store.add(KIND, key, record)
            print(f"{verdict(record):12} {key}", {k: v for k, v in record.items() if isinstance(v, float)}, flush=True)


if __name__ == "__main__":
    main()
