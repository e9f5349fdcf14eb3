"""Learning tasks of many kinds, each with test data, a lower level that can be trained afresh, and references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from meha.problem.problem import Problem
from meha.problem.sets import Simplex
from meha_lab.datasets import digits, load
from meha_lab.tasks import few_shot
from meha_lab.tasks.hyper_cleaning import Labelled, mlp

__all__ = ["TASKS", "LearningTask", "Split"]


BATCH = 64
CLASSES = 10
RATE = 3e-3
"""Learning rate of Adam for networks that are trained afresh."""

SHIFT = 1000
"""Added to the seed of a network that is trained afresh, so that it differs from the one that a run begins with."""

Split = Literal["tuning", "held out"]
Judged = Literal["returned", "fresh"]


@dataclass(frozen=True, eq=False)
class LearningTask:
    """A bilevel problem on data, and how to judge x and y.

    Attributes:
        problem: the problem.
        start: returns a new (x0, y0).
        batches: returns endless batches.
        score: how good (x, y) is on test data, in percent.
        fresh: returns y trained afresh at x.
        references: scores without a bilevel method, by name; the first is what a user would have without one.
        judged: whether the y of the run counts, or one trained afresh.
    """

    problem: Problem
    start: Callable[[], tuple[Any, Any]]
    batches: Callable[[], Any]
    score: Callable[[Any, Any], float]
    fresh: Callable[[Any], Any]
    references: Callable[[], dict[str, float]]
    judged: Judged = "fresh"


class Draws:
    """Endless batches of random indices into parts of the data, by the names of these parts."""

    def __init__(self, sizes: Mapping[str, int], seed: int, batch: int = BATCH) -> None:
        self.sizes, self.batch = sizes, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield {
                name: torch.randint(size, (min(size, self.batch),), generator=self.generator)
                for name, size in self.sizes.items()
            }


def _images(data: str, sizes: tuple[int, ...], seed: int, device: Any) -> list[Labelled]:
    """Disjoint parts of a data set, flat, with numbers from 0 to 1."""
    images = digits() if data == "digits" else load(data)
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(seed))[: sum(sizes)]
    inputs = (images.images[order].flatten(1).float() / 255).to(device)
    labels = images.labels[order].to(device)
    return [Labelled(*part) for part in zip(inputs.split(sizes), labels.split(sizes), strict=True)]


def _tampered(labels: Tensor, fraction: float, seed: int, flip: bool = False) -> Tensor:
    """Labels of which a fraction is wrong: random others, or always the next class."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(labels), generator=generator) < fraction
    shift = (
        torch.ones(len(labels), dtype=torch.long) if flip else torch.randint(1, CLASSES, (len(labels),), generator=generator)
    )
    return (labels + (wrong * shift).to(labels.device)) % CLASSES


def _train(loss: Callable[[Any, Any], Tensor], y: Any, steps: int, batches: Any, rate: float = RATE) -> Any:
    """Minimise a loss over a module by Adam, with a rate that falls to zero."""
    optimizer = torch.optim.Adam(y.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss(y, batch).backward()
        optimizer.step()
        falling.step()
    return y


@torch.no_grad()
def _accuracy(y: nn.Module, test: Labelled) -> float:
    return 100 * float((y(test.inputs).argmax(1) == test.labels).double().mean())


def noisy_labels(
    data: str,
    *,
    clean: int,
    noisy: int,
    network: bool,
    fraction: float = 0.4,
    flip: bool = False,
    hidden: int = 64,
    activation: str = "relu",
    steps: int = 800,
    seed: int = 0,
    device: Any = None,
) -> LearningTask:
    """Weights of examples with unverified labels, chosen by few clean ones: a weight for each, or a network of the loss."""
    few, many, test = _images(data, (clean, noisy, 1000 if data != "digits" else 400), seed, device)
    labels = _tampered(many.labels, fraction, seed, flip)

    def losses(y: nn.Module, batch: Any) -> Tensor:
        index = batch["noisy"]
        return cross_entropy(y(many.inputs[index]), labels[index], reduction="none")

    def upper(x: Any, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(few.inputs[batch["clean"]]), few.labels[batch["clean"]])

    def lower(x: Any, y: nn.Module, batch: Any) -> Tensor:
        found = losses(y, batch)
        logits = x(found.detach()[:, None])[:, 0] if network else x[batch["noisy"]]
        return (logits.sigmoid() * found).mean()

    def new(shift: int = 0) -> nn.Module:
        return mlp(many.inputs.shape[1], CLASSES, hidden, activation, seed + shift).to(device)

    def start() -> tuple[Any, nn.Module]:
        if not network:
            return torch.zeros(noisy, device=device), new()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)).to(device), new()

    def draws() -> Draws:
        return Draws({"clean": clean, "noisy": noisy}, seed)

    def references() -> dict[str, float]:
        alone = _train(lambda y, batch: upper(None, y, batch), new(SHIFT), steps, draws())
        both = _train(lambda y, batch: upper(None, y, batch) + losses(y, batch).mean(), new(SHIFT), steps, draws())
        return {"clean alone": _accuracy(alone, test), "clean and noisy": _accuracy(both, test)}

    return LearningTask(
        problem=Problem(upper, lower),
        start=start,
        batches=draws,
        score=lambda x, y: _accuracy(y, test),
        fresh=lambda x: _train(lambda y, batch: lower(x, y, batch), new(SHIFT), steps, draws()),
        references=references,
        judged="returned",
    )


def distillation(
    data: str, *, real: int, hidden: int = 64, activation: str = "relu", seed: int = 0, device: Any = None
) -> LearningTask:
    """One image for each class on which a network learns all classes."""
    train, test = _images(data, (real, 1000 if data != "digits" else 600), seed, device)
    goal = torch.arange(CLASSES, device=device)

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(train.inputs[batch["real"]]), train.labels[batch["real"]])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(x), goal)

    def new(shift: int = 0) -> nn.Module:
        return mlp(train.inputs.shape[1], CLASSES, hidden, activation, seed + shift).to(device)

    def first() -> Tensor:
        return torch.stack([train.inputs[train.labels == label][0] for label in range(CLASSES)])

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: lower(x, y, batch), new(SHIFT), 150, Draws({}, seed))

    def references() -> dict[str, float]:
        means = torch.stack([train.inputs[train.labels == label].mean(0) for label in range(CLASSES)])
        return {"the images at the start": _accuracy(fresh(first()), test), "class means": _accuracy(fresh(means), test)}

    return LearningTask(
        problem=Problem(upper, lower),
        start=lambda: (first(), new()),
        batches=lambda: Draws({"real": real}, seed),
        score=lambda x, y: _accuracy(y, test),
        fresh=fresh,
        references=references,
    )


def layer_decay(
    data: str, *, train_size: int, seed: int = 0, hidden: int = 64, decay: float = -6.0, device: Any = None
) -> LearningTask:
    """A weight decay for each layer of a network that can memorise its data."""
    train, validation, test = _images(data, (train_size, train_size, 800), seed, device)

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(validation.inputs[batch["validation"]]), validation.labels[batch["validation"]])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        index, penalties = batch["train"], [weight.square().sum() for weight in y.parameters()]
        return cross_entropy(y(train.inputs[index]), train.labels[index]) + 0.5 * x.exp() @ torch.stack(penalties)

    def new(shift: int = 0) -> nn.Module:
        return mlp(train.inputs.shape[1], CLASSES, hidden, "relu", seed + shift).to(device)

    def draws() -> Draws:
        return Draws({"train": train_size, "validation": train_size}, seed)

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: lower(x, y, batch), new(SHIFT), 600, draws())

    def at(value: float) -> Tensor:
        return torch.full((4,), value, device=device)

    def references() -> dict[str, float]:
        grid = [fresh(at(value)) for value in (-9.0, -7.0, -5.0, -4.0, -3.0)]
        return {
            "start": _accuracy(fresh(at(decay)), test),
            "grid": _accuracy(max(grid, key=lambda y: _accuracy(y, validation)), test),
        }

    return LearningTask(
        problem=Problem(upper, lower),
        start=lambda: (at(decay), new()),
        batches=draws,
        score=lambda x, y: _accuracy(y, test),
        fresh=fresh,
        references=references,
    )


def smoothing(data: str, *, train_size: int, fraction: float = 0.3, seed: int = 0, device: Any = None) -> LearningTask:
    """Label smoothing and the temperature of a network that learns from noisy labels; the score is exp(-loss), in percent."""
    train, validation, test = _images(data, (train_size, 200, 800), seed, device)
    labels = one_hot(_tampered(train.labels, fraction, seed), CLASSES).float()

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        index = batch["validation"]
        return cross_entropy(y(validation.inputs[index]) * x[1].exp(), validation.labels[index])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        index, share = batch["train"], x[0].sigmoid()
        goal = (1 - share) * labels[index] + share / CLASSES
        return -(goal * log_softmax(y(train.inputs[index]), 1)).sum(1).mean()

    def new(shift: int = 0) -> nn.Module:
        return mlp(train.inputs.shape[1], CLASSES, 64, "relu", seed + shift).to(device)

    def draws() -> Draws:
        return Draws({"train": train_size, "validation": 200}, seed)

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: lower(x, y, batch), new(SHIFT), 400, draws())

    @torch.no_grad()
    def score(x: Tensor, y: nn.Module, part: Labelled = test) -> float:
        return 100 * float((-cross_entropy(y(part.inputs) * x[1].exp(), part.labels)).exp())

    def at(first: float, second: float) -> Tensor:
        return torch.tensor([first, second], device=device)

    def references() -> dict[str, float]:
        best: tuple[float, float] = (-1.0, 0.0)
        for first in (-4.0, -2.0, -1.0, 0.0):
            y = fresh(at(first, 0.0))
            for second in (-1.0, -0.5, 0.0, 0.5, 1.0):
                x = at(first, second)
                best = max(best, (score(x, y, validation), score(x, y)))
        x0 = at(-3.0, 0.0)
        return {"start": score(x0, fresh(x0)), "grid": best[1]}

    return LearningTask(
        problem=Problem(upper, lower),
        start=lambda: (at(-3.0, 0.0), new()),
        batches=draws,
        score=score,
        fresh=fresh,
        references=references,
    )


def sources(data: str, *, size: int, noise: tuple[float, ...], seed: int = 0, device: Any = None) -> LearningTask:
    """Shares of sources of unequal quality on a simplex."""
    *parts, validation, test = _images(data, (*[size] * len(noise), 100, 600), seed, device)
    labels = [_tampered(part.labels, fraction, seed + i) for i, (part, fraction) in enumerate(zip(parts, noise, strict=True))]

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(validation.inputs[batch["validation"]]), validation.labels[batch["validation"]])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        index = batch["source"]
        losses = [cross_entropy(y(part.inputs[index]), label[index]) for part, label in zip(parts, labels, strict=True)]
        return x @ torch.stack(losses)

    def new(shift: int = 0) -> nn.Module:
        return mlp(validation.inputs.shape[1], CLASSES, 64, "relu", seed + shift).to(device)

    def draws() -> Draws:
        return Draws({"source": size, "validation": 100}, seed, batch=32)

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: lower(x, y, batch), new(SHIFT), 400, draws())

    def references() -> dict[str, float]:
        even = torch.full((len(noise),), 1 / len(noise), device=device)
        best = torch.tensor([(1 - f) ** 2 * (f < 0.5) for f in noise], device=device)
        scores = {"even shares": even, "clean sources": best / best.sum()}
        return {name: _accuracy(fresh(x), test) for name, x in scores.items()}

    return LearningTask(
        problem=Problem(upper, lower, x_set=Simplex()),
        start=lambda: (torch.full((len(noise),), 1 / len(noise), device=device), new()),
        batches=draws,
        score=lambda x, y: _accuracy(y, test),
        fresh=fresh,
        references=references,
    )


class MixedOperations(nn.Module):
    """A network whose hidden layer is a mixture of operations; the shares are given with the inputs."""

    OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.relu, torch.tanh, torch.zeros_like, lambda z: torch.sin(8 * z))

    def __init__(self, inputs: int, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.parts = nn.ModuleList([nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, CLASSES)])

    def forward(self, inputs: Tensor, x: Tensor) -> Tensor:
        for layer, shares in zip(self.parts, x.softmax(1), strict=False):
            z = layer(inputs)
            inputs = sum(share * operation(z) for share, operation in zip(shares, self.OPERATIONS, strict=True))
        return self.parts[-1](inputs)


def operations(data: str, *, train_size: int, seed: int = 0, device: Any = None) -> LearningTask:
    """The shares of four operations in two layers."""
    if data == "generated":
        generator = torch.Generator().manual_seed(seed)
        inputs, plane = (
            torch.randn(2 * train_size + 800, 20, generator=generator),
            torch.randn(20, CLASSES, generator=generator),
        )
        labels = ((inputs @ plane).tanh() @ torch.randn(CLASSES, CLASSES, generator=generator)).argmax(1)
        sizes = (train_size, train_size, 800)
        split = zip(inputs.to(device).split(sizes), labels.to(device).split(sizes), strict=True)
        train, validation, test = (Labelled(*part) for part in split)
    else:
        train, validation, test = _images(data, (train_size, train_size, 800), seed, device)

    def loss(x: Tensor, y: nn.Module, part: Labelled, index: Tensor) -> Tensor:
        return cross_entropy(y(part.inputs[index], x), part.labels[index])

    def new(shift: int = 0) -> nn.Module:
        return MixedOperations(train.inputs.shape[1], 48, seed + shift).to(device)

    def draws() -> Draws:
        return Draws({"train": train_size, "validation": train_size}, seed)

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: loss(x, y, train, batch["train"]), new(SHIFT), 400, draws())

    @torch.no_grad()
    def score(x: Tensor, y: nn.Module, part: Labelled = test) -> float:
        return 100 * float((y(part.inputs, x).argmax(1) == part.labels).double().mean())

    def references() -> dict[str, float]:
        even = torch.zeros(2, 4, device=device)
        singles = [8.0 * one_hot(torch.tensor([i, i], device=device), 4).float() for i in (0, 1, 3)]
        found = [(x, fresh(x)) for x in singles]
        best = max(found, key=lambda pair: score(pair[0], pair[1], validation))
        return {"even shares": score(even, fresh(even)), "best single operation": score(*best)}

    return LearningTask(
        problem=Problem(
            lambda x, y, batch: loss(x, y, validation, batch["validation"]),
            lambda x, y, batch: loss(x, y, train, batch["train"]),
        ),
        start=lambda: (torch.zeros(2, 4, device=device), new()),
        batches=draws,
        score=score,
        fresh=fresh,
        references=references,
    )


def feature_penalties(*, samples: int, features: int, useful: int, seed: int = 0, device: Any = None) -> LearningTask:
    """A ridge penalty for each of many features, few of which matter; generated data, classes by a sign."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2 * samples + 2000, features, generator=generator)
    logits = inputs[:, :useful] @ torch.randn(useful, generator=generator)
    labels = (torch.rand(len(logits), generator=generator) < (2 * logits).sigmoid()).float()
    sizes = (samples, samples, 2000)
    split = zip(inputs.to(device).split(sizes), labels.to(device).split(sizes), strict=True)
    train, validation, test = (Labelled(*part) for part in split)

    def loss(y: nn.Module, part: Labelled, index: Any) -> Tensor:
        scores = y(part.inputs[index])[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, part.labels[index])

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        return loss(y, train, batch["train"]) + 0.5 * x.exp() @ y.weight[0].square()

    def draws() -> Draws:
        return Draws({"train": samples, "validation": samples}, seed)

    def new() -> nn.Module:
        y = nn.Linear(features, 1, bias=False).to(device)
        nn.init.zeros_(y.weight)
        return y

    def fresh(x: Tensor) -> nn.Module:
        return _train(lambda y, batch: lower(x, y, batch), new(), 600, draws(), rate=0.03)

    @torch.no_grad()
    def score(x: Any, y: nn.Module, part: Labelled = test) -> float:
        return 100 * float(((y(part.inputs)[:, 0] > 0) == (part.labels > 0)).double().mean())

    def at(value: float) -> Tensor:
        return torch.full((features,), value, device=device)

    def references() -> dict[str, float]:
        grid = [fresh(at(value)) for value in (-7.0, -5.0, -3.0, -2.0, -1.0, 0.0)]
        best = max(grid, key=lambda y: score(None, y, validation))
        return {"start": score(None, fresh(at(-4.0))), "one penalty for all": score(None, best)}

    return LearningTask(
        problem=Problem(lambda x, y, batch: loss(y, validation, batch["validation"]), lower),
        start=lambda: (at(-4.0), new()),
        batches=draws,
        score=score,
        fresh=fresh,
        references=references,
    )


PROXIMITY, ADAPTATION, ADAPTING = 0.1, 0.5, 10
"""Of adapted weights: how much they are drawn to the common ones, and the size and number of steps in the test."""


def common_start(
    data: str, *, ways: int = 5, tasks: int = 8, hidden: int = 64, seed: int = 0, device: Any = None
) -> LearningTask:
    """The weights from which a network adapts to few examples of new classes; all weights adapt, for each task of a batch."""
    few = few_shot(data, ways=ways, tasks=tasks, width=1, test_tasks=1, shots=2, queries=8, seed=seed, device=device)  # type: ignore[arg-type]
    side = 14

    def weights() -> dict[str, Tensor]:
        network = mlp(side * side, ways, hidden, "relu", seed)
        found = [parameter.detach() for parameter in network.parameters()]
        return {"first": found[0].T.to(device), "bias": found[1].to(device), "second": found[2].T.to(device)}

    def loss(y: Mapping[str, Tensor], images: Tensor) -> Tensor:
        small = nn.functional.avg_pool2d(images, 2).flatten(1).unflatten(0, (len(y["first"]), -1))
        scores = torch.relu(small @ y["first"] + y["bias"][:, None]) @ y["second"]
        labels = torch.arange(ways, device=device).repeat(scores.shape[1] // ways).expand(len(scores), -1)
        return cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").unflatten(0, labels.shape).mean(1).sum()

    def lower(x: Mapping[str, Tensor], y: Mapping[str, Tensor], batch: Any) -> Tensor:
        return loss(y, batch.support) + 0.5 * PROXIMITY * sum((y[name] - x[name]).square().sum() for name in x)

    def spread(x: Mapping[str, Tensor], count: int = tasks) -> dict[str, Tensor]:
        return {name: tensor.detach().expand(count, *tensor.shape).clone() for name, tensor in x.items()}

    generator = torch.Generator(few.testing.device).manual_seed(seed + SHIFT)
    tests = few.images(few.testing, few.draw(few.testing, 100, generator))

    def fresh(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        y = spread(x, 100)
        for _ in range(ADAPTING):
            leaves = {name: tensor.requires_grad_() for name, tensor in y.items()}
            gradients = torch.autograd.grad(lower(x, leaves, tests), list(leaves.values()))
            y = {name: (leaf - ADAPTATION * g).detach() for (name, leaf), g in zip(leaves.items(), gradients, strict=True)}
        return y

    @torch.no_grad()
    def score(x: Any, y: Mapping[str, Tensor]) -> float:
        if len(y["first"]) != 100:
            return float("nan")
        small = nn.functional.avg_pool2d(tests.query, 2).flatten(1).unflatten(0, (100, -1))
        scores = torch.relu(small @ y["first"] + y["bias"][:, None]) @ y["second"]
        labels = torch.arange(ways, device=device).repeat(scores.shape[1] // ways)
        return 100 * float((scores.argmax(2) == labels).double().mean())

    def start() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        x = weights()
        return x, spread(x)

    return LearningTask(
        problem=Problem(lambda x, y, batch: loss(y, batch.query), lower),
        start=start,
        batches=few.batches,
        score=score,
        fresh=fresh,
        references=lambda: {"start": score(None, fresh(weights()))},
    )


def shared_features(data: str, *, ways: int = 5, width: int = 8, seed: int = 0, device: Any = None) -> LearningTask:
    """The features of :func:`meha_lab.tasks.few_shot`; heads belong to the tasks of a batch."""
    few = few_shot(data, ways=ways, tasks=4, width=width, test_tasks=100, seed=seed, device=device)  # type: ignore[arg-type]

    def fresh(x: nn.Module) -> None:
        return None

    return LearningTask(
        problem=few.problem,
        start=few.start,
        batches=few.batches,
        score=lambda x, y: 100 * few.evaluate(x)["accuracy"],
        fresh=fresh,
        references=lambda: {"start": 100 * few.evaluate(few.start()[0])["accuracy"]},
    )


@dataclass(frozen=True)
class Declared:
    """A task of the declared set.

    Attributes:
        split: whether the default was chosen on it, or it was held out until the end.
        build: makes the task from a seed and a device.
        work: gradients of F and f and Hessian-vector products together that a run may take.
    """

    split: Split
    build: Callable[..., LearningTask]
    arguments: Mapping[str, Any]
    work: int = 6000

    @property
    def judged(self) -> Judged:
        """Whether the y of the run counts, or one trained afresh."""
        return "returned" if self.build is noisy_labels else "fresh"

    def make(self, seed: int = 0, device: Any = None) -> LearningTask:
        """The task with the data of a seed."""
        return self.build(**self.arguments, seed=seed, device=device)


TASKS: Mapping[str, Declared] = {
    "weights by a network, MNIST, 100 clean": Declared(
        "tuning", noisy_labels, dict(data="mnist", clean=100, noisy=1000, network=True)
    ),
    "weights by a network, FashionMNIST, 500 clean": Declared(
        "held out", noisy_labels, dict(data="fashion-mnist", clean=500, noisy=2000, network=True, flip=True)
    ),
    "weight per example, MNIST, 500 clean": Declared(
        "tuning", noisy_labels, dict(data="mnist", clean=500, noisy=2000, network=False, hidden=100)
    ),
    "weight per example, FashionMNIST, 300 clean": Declared(
        "held out", noisy_labels, dict(data="fashion-mnist", clean=300, noisy=2000, network=False, fraction=0.5)
    ),
    "weight per example, digits, linear": Declared(
        "tuning", noisy_labels, dict(data="digits", clean=300, noisy=1000, network=False, activation="none")
    ),
    "weight per example, digits, 100 clean": Declared(
        "held out", noisy_labels, dict(data="digits", clean=100, noisy=900, network=False, flip=True)
    ),
    "ten images, digits": Declared("tuning", distillation, dict(data="digits", real=1000)),
    "ten images, FashionMNIST": Declared("held out", distillation, dict(data="fashion-mnist", real=2000)),
    "decay per layer, digits": Declared("tuning", layer_decay, dict(data="digits", train_size=60, decay=-3.0)),
    "decay per layer, MNIST": Declared("held out", layer_decay, dict(data="mnist", train_size=100, decay=-3.0)),
    "smoothing and temperature, digits": Declared("tuning", smoothing, dict(data="digits", train_size=600)),
    "smoothing and temperature, FashionMNIST": Declared("held out", smoothing, dict(data="fashion-mnist", train_size=800)),
    "sources, digits": Declared("tuning", sources, dict(data="digits", size=250, noise=(0.0, 0.3, 0.6, 0.9))),
    "sources, MNIST": Declared("held out", sources, dict(data="mnist", size=300, noise=(0.9, 0.0, 0.4, 0.7))),
    "operations, digits": Declared("tuning", operations, dict(data="digits", train_size=300)),
    "operations, MNIST": Declared("held out", operations, dict(data="mnist", train_size=400)),
    "penalty per feature, 100 samples": Declared("tuning", feature_penalties, dict(samples=100, features=300, useful=5)),
    "penalty per feature, 150 samples": Declared("held out", feature_penalties, dict(samples=150, features=300, useful=10)),
    "common start, digits": Declared("tuning", common_start, dict(data="digits")),
    "common start, Omniglot, 3 classes": Declared("held out", common_start, dict(data="omniglot", ways=3)),
    "shared features, digits": Declared("tuning", shared_features, dict(data="digits"), work=900),
    "shared features, Omniglot, 10 classes": Declared(
        "held out", shared_features, dict(data="omniglot", ways=10, width=16), work=900
    ),
}
"""The declared set."""
