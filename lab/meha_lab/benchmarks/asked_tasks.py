"""Long-tailed classes, loss weights of heads, augmentation strengths: what solve finds, beside baselines with equal work.

    python -m meha_lab.benchmarks.asked_tasks --tune       # the learning rate of all trainings, on other seeds of MNIST
    python -m meha_lab.benchmarks.asked_tasks --measure --seeds 0 1 2 --device cpu --jobs 1     # resumes where it stopped
    python -m meha_lab.benchmarks.asked_tasks --measure --only long-tailed --data mnist --rows TPE
    python -m meha_lab.benchmarks.asked_tasks --draw       # the tables of the three pages

Set MEHA_DATA for MNIST and FashionMNIST. A training takes the same steps everywhere. A row has the work of twenty trainings, in
gradients: solve and a training at the x found; or nineteen trials, of which the least validation loss is taken, and a training.
Scores are means over the same three further trainings of each row. TPE needs optuna, and is left out where it is not installed.

Records: a line of lab/records/asked_tasks.jsonl for each row of each task, data set and seed, written when it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from meha_lab import pages
from meha_lab.datasets import Images, digits, load
from meha_lab.paths import RECORDS
from meha_lab.store import Record, Store
from meha_lab.tasks.hyper_cleaning import Labelled, mlp
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, cross_entropy, grid_sample

import meha

KIND, TUNED = "asked_tasks", "asked_tasks_rates"
BATCH, CLASSES = 64, 10
STEPS = 600
"""Steps of every training."""

WORK, LITTLE = 20, 5
"""Work of a row, and of a second run of solve, in trainings."""

TRIALS = WORK - 1
"""Trainings among which validation chooses; one more is left for the network whose score counts."""

COST = 2.7
"""Gradients in a step of NetworkSOBA, the default for networks: three, and two in the last 0.3 of the steps."""

FRESH = (1000, 1001, 1002)
"""Added to the seed for the trainings whose scores count."""

CHOSEN_ON, MEASURED = (10, 11), (0, 1, 2)
"""Seeds of MNIST on which the models of x, their starts and learning rates were chosen, and seeds that are measured."""

TRIED = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Learning rates of Adam."""

NEVER = -math.inf
"""The logarithm, or the logit, of nothing."""

Loss = Callable[[nn.Module, Any], Tensor]
Trainer = Callable[[int], nn.Module]
"""A training from the network and the batches of a seed."""


class Setup(NamedTuple):
    """What a task is built from; ``both`` joins the validation data to the training data."""

    data: str
    seed: int
    device: str
    rate: float
    steps: int = STEPS
    both: bool = False


@dataclass(frozen=True, eq=False)
class AskedTask:
    """A task with its baselines, on training data, or on training and validation data joined.

    Attributes:
        setup: what it was built from.
        problem: the bilevel problem; X is a box.
        x0: the start of x.
        new: a new network of a seed.
        batches: endless batches of a seed.
        score: how good a network is on test data.
        rows: trainings by name of the baseline; where there are several, validation chooses.
        shift: what is added to an x found on the training data, where the joined data have other shares of classes.
    """

    setup: Setup
    problem: meha.Problem
    x0: Tensor
    new: Callable[[int], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    score: Callable[[nn.Module], float]
    rows: dict[str, Sequence[Trainer]] = field(default_factory=dict)
    shift: Tensor | float = 0.0

    def give(self, points: Mapping[str, Sequence[Tensor]]) -> None:
        """Add baselines that are trainings at given x."""
        self.rows.update({name: [partial(self.train, x) for x in found] for name, found in points.items()})

    def train(self, x: Tensor, seed: int) -> nn.Module:
        """A network trained on the lower level at x."""
        return self.minimise(lambda y, batch: self.problem.lower(x + self.shift, y, batch), seed)

    def minimise(self, loss: Loss, seed: int, extra: Mapping[str, Any] | None = None) -> nn.Module:
        """A network trained by Adam, with a rate that falls to zero; ``extra`` is a group of other parameters."""
        y = self.new(seed)
        groups: list[Any] = [{"params": list(y.parameters())}, *([extra] if extra else [])]
        optimizer = torch.optim.Adam(groups, lr=self.setup.rate)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.setup.steps)
        for batch in itertools.islice(self.batches(seed), self.setup.steps):
            optimizer.zero_grad()
            loss(y, batch).backward()
            optimizer.step()
            falling.step()
        return y

    @torch.no_grad()
    def validation(self, y: nn.Module) -> float:
        """F on all validation data."""
        return float(self.problem.upper(self.x0, y, {"validation": slice(None)}))


def numbers(sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Random indices into parts of the data, by the names of these parts."""
    return {name: torch.randint(size, (BATCH,), generator=generator, device=generator.device) for name, size in sizes.items()}


# The data


@cache
def images(data: str, device: str) -> tuple[Images, Images]:
    """Images to train and to test with; of the digits, whose test images are drawn from all, twice the same."""
    parts = (digits(), digits()) if data == "digits" else (load(data, "train"), load(data, "test"))
    return tuple(Images(part.images.to(device), part.labels.to(device), part.classes) for part in parts)  # type: ignore[return-value]


def taken(part: Images, index: Tensor) -> Labelled:
    """Some images with numbers from 0 to 1, and their labels."""
    return Labelled(part.images[index].float()[:, None] / 255, part.labels[index])


def drawn(data: str, counts: Sequence[Sequence[int]], seed: int, device: str) -> list[Labelled]:
    """Disjoint parts with these numbers of each class, and test images."""
    whole, test = images(data, device)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.nonzero(whole.labels.cpu() == label)[:, 0] for label in range(CLASSES)]
    orders = [order[torch.randperm(len(order), generator=generator)] for order in orders]
    ends = np.cumsum([[0] * CLASSES, *counts], axis=0)
    found = [
        torch.cat([order[begin:end] for order, begin, end in zip(orders, first, last, strict=True)])
        for first, last in itertools.pairwise(ends)
    ]
    rest = torch.cat([order[end:] for order, end in zip(orders, ends[-1], strict=True)]) if data == "digits" else slice(None)
    return [*(taken(whole, index) for index in found), taken(test, rest)]


def small(parts: Sequence[Labelled]) -> list[Labelled]:
    """Images of at most 14 pixels, for the sake of time."""
    return [Labelled(avg_pool2d(part.inputs, 2) if part.inputs.shape[-1] > 14 else part.inputs, part.labels) for part in parts]


def joined(first: Labelled, second: Labelled) -> Labelled:
    return Labelled(*(torch.cat(parts) for parts in zip(first, second, strict=True)))


def generator_of(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# Long-tailed classes

IMBALANCE = 100
TAUS = tuple(0.15 * i for i in range(1, 20))
BETAS = tuple(1 - 10.0**-power for power in np.linspace(0.5, 5, 19))


def counts_of(most: int, seed: int) -> list[int]:
    """Exponentially falling numbers of examples, of classes in random order."""
    order = np.random.default_rng(seed).permutation(CLASSES)
    counts = [round(most * IMBALANCE ** (-rank / (CLASSES - 1))) for rank in range(CLASSES)]
    return [counts[rank] for rank in order]


def long_tailed(setup: Setup) -> AskedTask:
    """An offset for the logit of each class in training, chosen by few validation images of each class."""
    data, seed, device = setup[:3]
    most, few = (100, 8) if data == "digits" else (1000, 20)
    counts = counts_of(most, seed)
    train, validation, test = drawn(data, [counts, [few] * CLASSES], seed, device)
    prior = torch.tensor(counts, device=device).float()
    shift = torch.zeros(CLASSES, device=device)
    if setup.both:
        train, before, prior = joined(train, validation), prior, prior + few
        shift = (prior / prior.sum()).log() - (before / before.sum()).log()
    inputs = train.inputs[0].numel()

    def weighted(weights: Tensor, y: nn.Module, batch: Any) -> Tensor:
        labels = train.labels[batch["train"]]
        return (weights[labels] * cross_entropy(y(train.inputs[batch["train"]]), labels, reduction="none")).mean()

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(train.inputs[batch["train"]]) + x, train.labels[batch["train"]])

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(validation.inputs[batch["validation"]]), validation.labels[batch["validation"]])

    @torch.no_grad()
    def score(y: nn.Module) -> float:
        right = (y(test.inputs).argmax(1) == test.labels).double()
        return 100 * float(torch.stack([right[test.labels == label].mean() for label in range(CLASSES)]).mean())

    def batches(start: int) -> Iterator[Any]:
        generator = generator_of(start, device)
        sizes = {"train": len(train.labels), "validation": len(validation.labels)}
        while True:
            yield numbers(sizes, generator)

    task = AskedTask(
        setup,
        problem=meha.Problem(upper, lower, x_set=meha.sets.Box(-5.0, 5.0)),
        x0=torch.zeros(CLASSES, device=device),
        new=lambda start: nn.Sequential(nn.Flatten(), mlp(inputs, CLASSES, 64, "relu", start)).to(device),
        batches=batches,
        score=score,
        shift=shift,
    )
    zero, log_prior = task.x0 - shift, (prior / prior.sum()).log()
    task.give({
        "plain": [zero],
        "logit adjustment, tau = 1": [zero + log_prior],
        "logit adjustment, tau chosen": [zero + tau * log_prior for tau in TAUS],
    })  # fmt: skip
    for name, betas in (("class-balanced loss, beta = 0.999", [0.999]), ("class-balanced loss, beta chosen", BETAS)):
        weights = [(1 - beta) / (1 - beta**prior) for beta in betas]
        losses = [partial(weighted, CLASSES * weight / weight.sum()) for weight in weights]
        task.rows[name] = [partial(task.minimise, loss) for loss in losses]
    if not setup.both:
        task.rows["plain, then biases fitted to validation"] = [lambda start: biased(task.train(zero, start), validation)]
    return task


def biased(y: nn.Module, validation: Labelled) -> nn.Module:
    """The network with offsets of its logits that have the least loss on the validation data."""
    with torch.no_grad():
        logits = y(validation.inputs)
    bias = torch.zeros_like(logits[0], requires_grad=True)
    optimizer = torch.optim.LBFGS([bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits + bias, validation.labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return nn.Sequential(y, Added(bias.detach()))


class Added(nn.Module):
    """Adds a constant."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, logits: Tensor) -> Tensor:
        return logits + self.bias


# Loss weights of several heads

HEADS = {"class": 10, "even": 2, "high": 2, "ink": 4, "turn": 4, "random": 10}
WANTED = 5
"""The heads whose results count in the second form: all but the one with random labels."""
TRUNK = 32
"""Units that all heads share: few, so that heads compete."""

WEIGHTS = (-4.0, 2.0)
"""The box of the log-weights."""

S_RATES = tuple(10.0**power for power in np.linspace(-4, 0, 19))


class Heads(nn.Module):
    """A trunk of one layer, and a linear head for each task; the images of all tasks pass the trunk at once."""

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(inputs, TRUNK), nn.ReLU())
            self.heads = nn.ModuleDict({name: nn.Linear(TRUNK, size) for name, size in HEADS.items()})

    def forward(self, labelled: Tensor, all_images: Tensor, turned: Tensor) -> dict[str, Tensor]:
        sizes = [len(part) for part in (labelled, all_images, turned)]
        first, second, third = self.trunk(torch.cat([labelled, all_images, turned])).split(sizes)
        places = {"class": first, "even": second, "high": second, "ink": second, "turn": third, "random": second}
        return {name: self.heads[name](z) for name, z in places.items()}


class Targets(NamedTuple):
    """Images with the targets of all heads."""

    inputs: Tensor
    labels: Tensor
    ink: Tensor
    random: Tensor


def heads(setup: Setup, wanted: int = 1) -> AskedTask:
    """Weights of the losses of five further heads, chosen by the validation loss of the first, or of those that are wanted."""
    data, seed, device = setup[:3]
    few, more, judges = (5, 90, 10) if data == "digits" else (10, 990, 20)
    counts = [[number] * CLASSES for number in (few, more, judges)]
    main, rest, validation, test = small(drawn(data, counts, seed, device))
    pool = joined(main, rest)
    if setup.both:
        main, pool = joined(main, validation), joined(pool, validation)
    amounts = pool.inputs.flatten(1).mean(1)
    quarters = amounts.quantile(torch.tensor([0.25, 0.5, 0.75], device=device))
    coins = torch.Generator().manual_seed(seed)

    def targets(part: Labelled) -> Targets:
        guesses = torch.randint(CLASSES, (len(part.labels),), generator=coins).to(device)
        return Targets(part.inputs, part.labels, torch.bucketize(part.inputs.flatten(1).mean(1), quarters), guesses)

    every, judged, unseen = targets(pool), targets(validation), targets(test)

    def losses(y: nn.Module, known: Labelled, index: Any, other: Targets, chosen: Any, turns: Tensor) -> Tensor:
        inputs = other.inputs[chosen]
        out = y(known.inputs[index], inputs, turned(inputs, turns))
        return torch.stack([
            cross_entropy(out["class"], known.labels[index]),
            cross_entropy(out["even"], other.labels[chosen] % 2),
            cross_entropy(out["high"], other.labels[chosen] // 5),
            cross_entropy(out["ink"], other.ink[chosen]),
            cross_entropy(out["turn"], turns),
            cross_entropy(out["random"], other.random[chosen]),
        ])  # fmt: skip

    def lower_losses(y: nn.Module, batch: Any) -> Tensor:
        return losses(y, main, batch["main"], every, batch["pool"], batch["turns"])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return torch.cat([unit, x.exp()]) @ lower_losses(y, batch)

    def on_all(y: nn.Module, part: Targets, index: Any) -> Tensor:
        turns = torch.arange(len(part.labels), device=device)[index] % 4
        return losses(y, Labelled(part.inputs, part.labels), index, part, index, turns)[:wanted]

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        found = on_all(y, judged, batch["validation"])
        return found[0] if wanted == 1 else found.log().mean()

    @torch.no_grad()
    def score(y: nn.Module) -> float:
        if wanted == 1:
            none = test.inputs[:0]
            return 100 * float((y(test.inputs, none, none)["class"].argmax(1) == test.labels).double().mean())
        return 100 * float(1 - (on_all(y, unseen, slice(None)).log() - alone).mean().exp())

    def batches(start: int) -> Iterator[Any]:
        generator = generator_of(start, device)
        sizes = {"main": len(main.labels), "pool": len(pool.labels), "validation": len(validation.labels), "turns": 4}
        while True:
            yield numbers(sizes, generator)

    count = len(HEADS) - 1
    unit, zero = torch.ones(1, device=device), torch.zeros(count, device=device)
    task = AskedTask(
        setup,
        problem=meha.Problem(upper, lower, x_set=meha.sets.Box(*WEIGHTS)),
        x0=zero,
        new=lambda start: Heads(main.inputs[0].numel(), start).to(device),
        batches=batches,
        score=score,
    )
    alone = torch.zeros(wanted, device=device)
    if wanted > 1 and not setup.both:  # of networks that were trained for one head each, on test data
        networks = [
            task.minimise(lambda y, batch, i=i: lower_losses(y, batch)[i], seed + FRESH[0])  # type: ignore[misc]
            for i in range(wanted)
        ]
        with torch.no_grad():
            alone = torch.stack([on_all(y, unseen, slice(None))[i].log() for i, y in enumerate(networks)])
    task.give({
        "equal weights": [zero],
        **({"main task alone": [zero + NEVER]} if wanted == 1 else {}),
        "one weight for all other heads, chosen": [zero + level for level in np.linspace(*WEIGHTS, TRIALS).tolist()],
    })  # fmt: skip
    for name, rates in (("uncertainty weighting", [setup.rate]), ("uncertainty weighting, rate chosen", S_RATES)):
        task.rows[name] = [partial(by_uncertainty, task, lower_losses, s_rate) for s_rate in rates]
    return task


def turned(inputs: Tensor, turns: Tensor) -> Tensor:
    """Images turned by quarters."""
    quarters = torch.stack([inputs.rot90(k, (2, 3)) for k in range(4)])
    return quarters[turns, torch.arange(len(inputs), device=inputs.device)]


def by_uncertainty(task: AskedTask, losses: Loss, s_rate: float, seed: int) -> nn.Module:
    """A network trained with log-variances s of the heads (Kendall, Gal and Cipolla 2018), with a learning rate of their own:
    the sum of exp(-s) L + s / 2."""
    s = torch.zeros(len(HEADS), device=task.x0.device, requires_grad=True)

    def loss(y: nn.Module, batch: Any) -> Tensor:
        return ((-s).exp() * losses(y, batch) + s / 2).sum()

    return task.minimise(loss, seed, {"params": [s], "lr": s_rate})


# Augmentation strengths

MOST = {"turn": 60.0, "move": 0.4, "zoom": 0.5, "contrast": 1.0, "noise": 0.8, "blur": 1.0, "erase": 1.0}
"""The largest strengths: degrees, shares of half the width, logarithms of factors, gray levels, shares of a blurred image and
of the width."""

SHIFT = {"turn": 30.0, "noise": 0.4}
"""What test and validation images of the first form have, and training images have not."""

BY_HAND = {"turn": 10.0, "move": 0.15, "zoom": 0.1, "contrast": 0.2, "noise": 0.05, "erase": 0.3}


def strengths(values: Mapping[str, float], device: str) -> Tensor:
    """The x with these strengths."""
    shares = torch.tensor([values.get(name, 0.0) / most for name, most in MOST.items()], device=device)
    return shares.logit()


def augmented(x: Tensor, inputs: Tensor, draws: Tensor, normal: Tensor) -> Tensor:
    """Images, each with magnitudes between minus and plus the strengths of x, by draws from -1 to 1 (two for moves, two for
    the place that is erased)."""
    most = torch.tensor(list(MOST.values()), device=x.device)
    turn, move, zoom, contrast, noise, blur, erase = x.sigmoid() * most
    angle = torch.deg2rad(turn) * draws[:, 0]
    size = (zoom * draws[:, 1]).exp()
    cos, sin = angle.cos() * size, angle.sin() * size
    matrix = torch.stack([cos, -sin, move * draws[:, 2], sin, cos, move * draws[:, 3]], 1).view(-1, 2, 3)
    out = grid_sample(inputs, affine_grid(matrix, list(inputs.shape), align_corners=False), align_corners=False)
    share = (blur * draws[:, 4].abs())[:, None, None, None]
    out = out + share * (avg_pool2d(out, 3, 1, 1) - out)
    out = out * (contrast * draws[:, 5]).exp()[:, None, None, None]
    out = out + (noise * draws[:, 6].abs())[:, None, None, None] * normal
    side = inputs.shape[-1]
    places = torch.linspace(-1, 1, side, device=x.device)
    distances = torch.maximum((places - draws[:, 7:8]).abs()[:, :, None], (places - draws[:, 8:9]).abs()[:, None, :])
    half = (erase * draws[:, 9].abs())[:, None, None]
    covered = ((half - distances) * side / 2).clamp(0, 1)  # the edge is a pixel wide, so that the side has a gradient
    return out * (1 - covered[:, None])


DRAWS = 10


def augmentation(setup: Setup, shifted: bool = True) -> AskedTask:
    """Strengths of seven augmentations of few images, chosen by the loss on validation images as they are."""
    data, seed, device = setup[:3]
    train, validation, test = small(drawn(data, [[50] * CLASSES, [20] * CLASSES], seed, device))
    side = train.inputs.shape[-1]
    if shifted:
        coins, truth = generator_of(seed, device), strengths(SHIFT, device)
        validation, test = (
            Labelled(augmented(truth, part.inputs, *random_draws(len(part.labels), side, coins)), part.labels)
            for part in (validation, test)
        )
    if setup.both:
        train = joined(train, validation)

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        index = batch["train"]
        return cross_entropy(y(augmented(x, train.inputs[index], batch["draws"], batch["normal"])), train.labels[index])

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(validation.inputs[batch["validation"]]), validation.labels[batch["validation"]])

    @torch.no_grad()
    def score(y: nn.Module) -> float:
        return 100 * float((y(test.inputs).argmax(1) == test.labels).double().mean())

    def batches(start: int) -> Iterator[Any]:
        generator = generator_of(start, device)
        sizes = {"train": len(train.labels), "validation": len(validation.labels)}
        while True:
            indices = numbers(sizes, generator)
            draws, normal = random_draws(BATCH, side, generator)
            yield {**indices, "draws": draws, "normal": normal}

    task = AskedTask(
        setup,
        problem=meha.Problem(upper, lower, x_set=meha.sets.Box(-5.0, 5.0)),
        x0=torch.zeros(len(MOST), device=device),
        new=lambda start: convolutional(side, start).to(device),
        batches=batches,
        score=score,
    )
    zero = task.x0  # all at half of the largest strength
    levels = torch.linspace(-5.0, 4.0, 19).tolist()
    task.give({
        "none": [zero + NEVER],
        "all at the middle": [zero],
        "by hand": [strengths(BY_HAND, device)],
        "one strength for all, chosen": [zero + level for level in levels],
        **({"the strengths of the shift itself": [strengths(SHIFT, device)]} if shifted else {}),
    })  # fmt: skip
    return task


def random_draws(number: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    device = generator.device
    draws = 2 * torch.rand(number, DRAWS, generator=generator, device=device) - 1
    return draws, torch.randn(number, 1, side, side, generator=generator, device=device)


def convolutional(side: int, seed: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16 * math.ceil(side / 4) ** 2, CLASSES))


# What is measured


class AskedCell(NamedTuple):
    """A task by name: how it is built, its learning rate, the page of its table, and the numbers of x in the user's units."""

    build: Callable[[Setup], AskedTask]
    rate: float
    page: str
    unit: str
    shown: Callable[[Sequence[float], int], dict[str, float]]


def by_size(x: Sequence[float], seed: int) -> dict[str, float]:
    """Offsets of classes, from the largest class to the smallest."""
    order = np.random.default_rng(seed).permutation(CLASSES)
    return {f"class {place + 1}": x[int(np.flatnonzero(order == place)[0])] for place in range(CLASSES)}


def by_head(x: Sequence[float], seed: int) -> dict[str, float]:
    return dict(zip([*HEADS][1:], map(math.exp, x), strict=True))


def by_kind(x: Sequence[float], seed: int) -> dict[str, float]:
    return {name: most / (1 + math.exp(-logit)) for (name, most), logit in zip(MOST.items(), x, strict=True)}


TASKS: Mapping[str, AskedCell] = {
    "long-tailed classes": AskedCell(long_tailed, 4e-3, "long-tailed.md", "%", by_size),
    "loss weights, main task": AskedCell(heads, 2e-3, "loss-weights.md", "%", by_head),
    "loss weights, five tasks": AskedCell(partial(heads, wanted=WANTED), 32e-3, "loss-weights.md", "% less loss", by_head),
    "augmentation, shifted test": AskedCell(augmentation, 16e-3, "augmentation.md", "%", by_kind),
    "augmentation, same test": AskedCell(partial(augmentation, shifted=False), 16e-3, "augmentation.md", "%", by_kind),
}
FIRST_ROWS = {"long-tailed": "plain", "loss weights": "equal weights", "augmentation": "all at the middle"}
"""The rows by which learning rates were chosen."""

ORACLE = "the strengths of the shift itself"
"""What nobody knows; it is no baseline."""

Found = tuple[Tensor | None, Record]
"""The x that was found, and what the record has of the search."""


def least(trials: Sequence[Trainer], task: AskedTask) -> tuple[int, Record]:
    """The trial with the least validation loss, with the score of its network."""
    seed, losses, best, score = task.setup.seed, list[float](), math.inf, math.nan
    for trial in trials:
        y = trial(seed)
        losses.append(task.validation(y))
        if losses[-1] < best:
            best, score = losses[-1], task.score(y)
    gradients = len(trials) * task.setup.steps
    return int(np.argmin(losses)), {"trials": losses, "returned": score, "gradients": gradients}


def random_search(task: AskedTask) -> Found:
    low, high = task.problem.x_set.low, task.problem.x_set.high  # type: ignore[union-attr]
    points = np.random.default_rng([task.setup.seed, 1]).uniform(low, high, (TRIALS, task.x0.numel()))
    found = [task.x0.new_tensor(point) for point in points]
    best, record = least([partial(task.train, x) for x in found], task)
    return found[best], record


def tpe(task: AskedTask) -> Found:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    low, high = task.problem.x_set.low, task.problem.x_set.high  # type: ignore[union-attr]
    seen: dict[int, float] = {}

    def point(trial: Any) -> Tensor:
        return task.x0.new_tensor([trial.suggest_float(f"x{i}", low, high) for i in range(task.x0.numel())])

    def objective(trial: Any) -> float:
        y = task.train(point(trial), task.setup.seed)
        seen[trial.number] = task.score(y)
        return task.validation(y)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=task.setup.seed))
    study.optimize(objective, n_trials=TRIALS)
    record = {"trials": [trial.value for trial in study.trials], "returned": seen[study.best_trial.number]}
    best = task.x0.new_tensor([study.best_trial.params[f"x{i}"] for i in range(task.x0.numel())])
    return best, {**record, "gradients": TRIALS * task.setup.steps}


def solved(task: AskedTask, method: meha.Method | None, work: int) -> Found:
    """What solve finds with this work, less that of one training."""
    seed = task.setup.seed
    solution = meha.solve(
        task.problem,
        task.x0,
        task.new(seed),
        method,
        batches=task.batches(seed),
        max_steps=round((work - 1) * task.setup.steps / COST),
        tol=None,
        refit=False,  # the row has trainings of its own
    )
    counts = solution.counts
    record = {"returned": task.score(solution.y), "gradients": counts.upper + counts.lower + counts.hvp}
    return solution.x, {**record, "status": solution.status.value, "method": solution.method.name}


DEFAULT = "`solve`"
FINDERS: Mapping[str, Callable[[AskedTask], Found]] = {
    "random search": random_search,
    "TPE": tpe,
    DEFAULT: lambda task: solved(task, None, WORK),
    "`solve`, a quarter of the work": lambda task: solved(task, None, LITTLE),
    "`solve`, differences on both sides": lambda task: solved(task, meha.stochastic.NetworkSOBA(both_sides=True), WORK),
}
"""What looks for x."""


def measured(row: str, task: AskedTask, both: AskedTask) -> Record:
    """Find or choose, train afresh on both kinds of data, and judge."""
    begin, seed = time.perf_counter(), task.setup.seed
    if row in FINDERS:
        x, record = FINDERS[row](task)
        assert x is not None
        record["x"] = x.tolist()
        trainers = [partial(task.train, x), partial(both.train, x)]
    else:
        trials = task.rows[row]
        best, record = least(trials, task) if len(trials) > 1 else (0, {"returned": None, "gradients": 0})
        record["chosen"] = best
        trainers = [trials[best], *([both.rows[row][best]] if row in both.rows else [])]
    for name, trainer in zip(("fresh", "joined"), trainers, strict=False):
        networks = [trainer(seed + shift) for shift in FRESH]
        record[name] = [task.score(y) for y in networks]
        if name == "fresh":
            record["validation"] = [task.validation(y) for y in networks]
    return {**record, "seconds": time.perf_counter() - begin}


class Job(NamedTuple):
    """A task with its data and seed, and where its records go."""

    name: str
    setup: Setup
    rows: tuple[str, ...]
    folder: Path

    def key(self, row: str) -> str:
        """The key of a record."""
        return f"{self.name}, {self.setup.data}, seed {self.setup.seed}, {self.setup.steps} steps: {row}"

    def run(self) -> None:
        """Measure the rows that have no record, and write each at once."""
        torch.set_num_threads(1)
        store, build = Store(self.folder), TASKS[self.name].build
        done = {record["key"] for record in store.records(KIND)}
        task, both = build(self.setup), build(self.setup._replace(both=True))
        left_out = {"TPE"} if find_spec("optuna") is None else set()
        for row in (*task.rows, *FINDERS):
            wanted = not self.rows or any(part in row for part in self.rows)
            if wanted and row not in left_out and self.key(row) not in done:
                found = measured(row, task, both)
                made = {"torch": str(torch.__version__), "device": self.setup.device}
                about = {"task": self.name, "data": self.setup.data, "seed": self.setup.seed, "steps": self.setup.steps}
                store.add(KIND, self.key(row), {**about, "rate": self.setup.rate, "row": row, **found, "made with": made})
                shown = ", ".join(
                    f"{name} {statistics.fmean(found[name]):.2f}" for name in ("fresh", "joined") if name in found
                )
                print(f"{self.key(row)}: {shown}, {found['seconds']:.0f} s", flush=True)


def run(job: Job) -> None:
    job.run()


def tune(setup: Setup, store: Store) -> None:
    """The validation loss of the row that a user begins with, for each learning rate that has no record."""
    done = {record["key"] for record in store.records(TUNED)}
    for name, asked in TASKS.items():
        row = next(row for kind, row in FIRST_ROWS.items() if name.startswith(kind))
        for rate, seed in itertools.product(TRIED, CHOSEN_ON):
            key = f"{name}, {setup.data}, seed {seed}, {setup.steps} steps: rate {rate:g}"
            if key not in done:
                task = asked.build(setup._replace(rate=rate, seed=seed))
                losses = [task.validation(task.rows[row][0](seed + shift)) for shift in FRESH]
                store.add(TUNED, key, {"task": name, "rate": rate, "seed": seed, "validation": losses})
                print(f"{key}: {statistics.fmean(losses):.3f}", flush=True)


def best_rate(name: str, store: Store) -> float:
    """The learning rate with the least validation loss, a mean over seeds."""
    losses: dict[float, list[float]] = {}
    for record in store.records(TUNED):
        if record["task"] == name:
            losses.setdefault(record["rate"], []).extend(record["validation"])
    return min(losses, key=lambda rate: statistics.fmean(losses[rate]))


# The tables

HEAD = ("", "trained on training data", "against the best baseline", "and on validation data", "against the best", "returned")
NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "digits": "digits"}


def of_row(records: Sequence[Record], field: str) -> dict[str, dict[int, float]]:
    """Scores by row and seed: means over new trainings, or that of the network which a search returned."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if record.get(field) is not None:
            score = record[field] if field == "returned" else statistics.fmean(record[field])
            found.setdefault(record["row"], {})[record["seed"]] = score
    return found


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """The mean difference seed by seed, with its 95 % interval."""
    from scipy.stats import t

    each = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    mean = statistics.fmean(each)
    if len(each) < 2:
        return f"{mean:+z.1f}"
    half = float(t.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / math.sqrt(len(each))
    return f"{mean:+z.1f} ({mean - half:+z.1f} .. {mean + half:+z.1f})"


def against_best(scores: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """The difference of each row to the baseline with the highest mean, which is chosen after the fact."""
    means = {row: statistics.fmean(found.values()) for row, found in scores.items()}
    baselines = [row for row in means if not row.startswith(DEFAULT) and row != ORACLE]
    best = max(baselines, key=means.__getitem__)
    return {row: "best" if row == best else difference(scores[row], scores[best]) for row in scores}


def score_table(records: Sequence[Record]) -> list[str]:
    """The rows of a task on a data set."""
    columns = [of_row(records, field) for field in ("fresh", "joined", "returned")]
    differences = [against_best(scores) for scores in columns[:2]]

    def mean(scores: Mapping[str, Mapping[int, float]], row: str) -> str:
        return f"{statistics.fmean(scores[row].values()):.1f}" if row in scores else ""

    rows = [
        [
            row,
            mean(columns[0], row),
            differences[0][row],
            mean(columns[1], row),
            differences[1].get(row, ""),
            mean(columns[2], row),
        ]
        for row in columns[0]
    ]
    return pages.markdown(HEAD, rows)


def found_table(name: str, records: Sequence[Record]) -> list[str]:
    """Means over the seeds of what was found."""
    by_row: dict[str, list[dict[str, float]]] = {}
    for record in records:
        if "x" in record:
            by_row.setdefault(record["row"], []).append(TASKS[name].shown(record["x"], record["seed"]))
    parts = list(next(iter(by_row.values()))[0])
    rows = [
        [row, *(f"{statistics.fmean(found[part] for found in each):.2f}" for part in parts)] for row, each in by_row.items()
    ]
    return pages.markdown(["found, mean", *parts], rows)


def tables(page: str, store: Store) -> list[str]:
    """All tables of a page: each of its tasks, on each data set."""
    lines: list[str] = []
    for name in (name for name, asked in TASKS.items() if asked.page == page):
        mine = [record for record in store.records(KIND) if record["task"] == name and record["steps"] == STEPS]
        for data in dict.fromkeys(record["data"] for record in mine):
            records = [record for record in mine if record["data"] == data]
            seeds = sorted({record["seed"] for record in records})
            title = f"**{name}: {NAMES[data]}, seeds {', '.join(map(str, seeds))}**, in {TASKS[name].unit}"
            lines += [title, "", *score_table(records), "", *found_table(name, records), ""]
    return lines[:-1] if lines else ["There are no records yet."]


TABLES: pages.Tables = {
    page.removesuffix(".md"): (page, partial(tables, page)) for page in dict.fromkeys(asked.page for asked in TASKS.values())
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure what has no record")
    parser.add_argument("--tune", action="store_true", help="try the learning rates on other seeds of MNIST")
    parser.add_argument("--draw", action="store_true", help="draw the tables of the pages from the records")
    parser.add_argument("--seeds", type=int, nargs="+", default=MEASURED)
    parser.add_argument("--data", nargs="+", default=["fashion-mnist"], choices=list(NAMES))
    parser.add_argument("--only", default="", help="tasks whose name has this text")
    parser.add_argument("--rows", nargs="*", default=[], help="rows whose name has one of these texts")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    options = parser.parse_args(arguments)
    if options.tune:
        tune(Setup("mnist", 0, options.device, 0.0, options.steps), Store(options.records))
    if options.measure:
        jobs = [
            Job(name, Setup(data, seed, options.device, asked.rate, options.steps), tuple(options.rows), options.records)
            for seed, data, (name, asked) in itertools.product(options.seeds, options.data, TASKS.items())
            if options.only in name
        ]
        if options.jobs == 1:
            for job in jobs:
                job.run()
        else:
            with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
                for _ in pool.imap_unordered(run, jobs):
                    pass
    if options.draw:
        pages.draw(TABLES)


if __name__ == "__main__":
    main()
