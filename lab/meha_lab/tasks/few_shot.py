"""Few-shot classification: learn features that tasks share, with a linear head for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, one_hot, pad

from meha.problem.problem import Problem
from meha.tensors.checks import check_count
from meha_lab.datasets import digits, omniglot

__all__ = ["Backbone", "Episodes", "FewShot", "Tasks", "few_shot"]


TRAINING_CHARACTERS = 1200
"""Number of characters for training, of 1623 in all; the others are for the test."""

SPLIT_SEED = 0  # fixed, so that no test character is trained on with another seed


class Backbone(nn.Sequential):
    """Convolutional network with four blocks that turns an image of 28 x 28 into ``width`` features.

    A block has convolution, ReLU, pooling and batch normalisation. Normalisation uses the statistics of the current images, in
    training and in the test, as is usual in few-shot experiments.
    """

    def __init__(self, width: int = 32) -> None:
        blocks: list[nn.Module] = []
        for channels in (1, width, width, width):
            blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            blocks.append(nn.BatchNorm2d(width, track_running_stats=False))
        super().__init__(*blocks, nn.Flatten())


class Tasks(NamedTuple):
    """Images of B tasks with N classes each: ``shots`` per class to learn from, ``queries`` per class to evaluate on.

    Attributes:
        support: (B * shots * N, 1, 28, 28), with alternating classes.
        query: (B * queries * N, 1, 28, 28), with alternating classes.
        heads: the indices of the heads in y that belong to the tasks; None for all.
    """

    support: Tensor
    query: Tensor
    heads: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FewShot:
    """Few-shot task: x is the backbone, y a head for each task of a batch; a task has N classes, drawn from many.

        f(x, y) = sum over tasks of CE on support,    F(x, y) = sum over tasks of CE on queries

    A head has a row (weights, bias) for each class. Heads start at zero in every batch (``pool`` = 0), or each task of a pool
    keeps its head.

    Attributes:
        training: images of the training classes, (classes, drawings, 28, 28), bytes.
        testing: images of the test classes.
        ways: classes per task.
        shots: examples per class to learn from.
        queries: examples per class to evaluate on.
        tasks: tasks per batch.
        width: number of features.
        pool: the total number of tasks; 0 for no limit.
        test_tasks: number of test tasks in an evaluation.
        seed: the seed of the initial backbone and the tasks.

    >>> task = few_shot("digits", ways=3, tasks=2, width=4, test_tasks=20)
    >>> x, y = task.start()
    >>> batch = next(iter(task.batches()))
    >>> y.shape, batch.support.shape, batch.query.shape
    (torch.Size([2, 3, 5]), torch.Size([6, 1, 28, 28]), torch.Size([90, 1, 28, 28]))
    >>> print(f"{float(task.problem.lower(x, y, batch).detach()):.4f}")  # two tasks, three classes: 2 log 3
    2.1972
    """

    training: Tensor
    testing: Tensor
    ways: int = 5
    shots: int = 1
    queries: int = 15
    tasks: int = 16
    width: int = 32
    pool: int = 0
    test_tasks: int = 1000
    seed: int = 0
    _features: _Features = field(default_factory=lambda: _Features(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("ways", "shots", "queries", "tasks", "width", "test_tasks"):
            check_count(name, getattr(self, name))
        classes, drawings = min(len(self.training), len(self.testing)), self.training.shape[1]
        if self.ways > classes:
            raise ValueError(f"ways: must be at most {classes}, the number of classes, got {self.ways}.")
        if self.shots + self.queries > drawings:
            raise ValueError(
                f"shots + queries: must be at most {drawings} (images per class), got {self.shots} + {self.queries}."
            )
        if self.pool and self.pool < self.tasks:
            raise ValueError(f"pool: must be 0 or at least tasks = {self.tasks}, got {self.pool}.")

    @property
    def problem(self) -> Problem:
        """Return the bilevel problem on batches of :class:`Tasks`; features of a batch are computed once for each x."""
        return Problem(upper=self._upper, lower=self._lower, joint=True)

    def _upper(self, x: nn.Module, y: Tensor, batch: Tasks) -> Tensor:
        return self._loss(x, y, batch, "query")

    def _lower(self, x: nn.Module, y: Tensor, batch: Tasks) -> Tensor:
        return self._loss(x, y, batch, "support")

    def _loss(self, x: nn.Module, y: Tensor, batch: Tasks, part: Literal["support", "query"]) -> Tensor:
        heads = y if batch.heads is None else y[batch.heads]
        scores = torch.bmm(self._features(x, batch, part, len(heads)), heads.transpose(1, 2))
        labels = _labels(scores)
        return cross_entropy(scores.flatten(0, 1), labels, reduction="sum") * (len(heads) / len(labels))  # sum of the means

    def start(self) -> tuple[Backbone, Tensor]:
        """Return a new backbone, and heads of zeros."""
        device = self.training.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            backbone = Backbone(self.width)
        return backbone.to(device), torch.zeros(self.pool or self.tasks, self.ways, self.width + 1, device=device)

    def batches(self) -> Episodes:
        """Return endless batches of tasks from the training classes."""
        return Episodes(self)

    def draw(self, classes: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw the classes and images of ``count`` tasks.

        Returns:
            Indices (count, shots + queries, ways) into ``classes.flatten(0, 1)``.
        """
        device, drawings = classes.device, classes.shape[1]
        # Sorting random keys draws classes, and images of a class, without repetition.
        chosen = torch.rand(count, len(classes), generator=generator, device=device).topk(self.ways).indices
        order = torch.rand(count, drawings, self.ways, generator=generator, device=device).argsort(dim=1)
        return chosen[:, None] * drawings + order[:, : self.shots + self.queries]

    def images(self, classes: Tensor, places: Tensor, heads: Tensor | None = None) -> Tasks:
        """Return the images with the indices ``places``."""
        flat = classes.flatten(0, 1)
        parts = (places[:, : self.shots], places[:, self.shots :])
        support, query = (flat[part.flatten()][:, None].float() / 255 for part in parts)
        return Tasks(support, query, heads)

    @torch.no_grad()
    def evaluate(
        self, x: nn.Module, y: Any = None, *, steps: int = 10, step: float = 0.1, seed: int = 12345
    ) -> dict[str, float]:
        """Return the accuracy on the queries of test tasks, after ``steps`` gradient steps of the heads from zero.

        Batch normalisation sees several tasks together, as in training; a single task gives slightly different results.
        """
        tasks = self.test_tasks
        generator = torch.Generator(self.testing.device).manual_seed(seed)
        # At most about 8000 images at once, to limit memory.
        right, chunk = [], max(1, min(tasks, 8000 // (self.ways * (self.shots + self.queries))))
        for first in range(0, tasks, chunk):
            count = min(chunk, tasks - first)
            batch = self.images(self.testing, self.draw(self.testing, count, generator))
            support, query = (_with_ones(x(images), count) for images in batch[:2])
            heads = support.new_zeros(count, self.ways, support.shape[2])
            goal = one_hot(_labels(support.new_zeros(count, support.shape[1], self.ways)), self.ways).unflatten(0, (count, -1))
            for _ in range(steps):
                # The gradient of the cross entropy in the heads in closed form: softmax minus one-hot, times features.
                wrong = torch.bmm(support, heads.transpose(1, 2)).softmax(dim=2) - goal
                heads -= step / support.shape[1] * torch.bmm(wrong.transpose(1, 2), support)
            scores = torch.bmm(query, heads.transpose(1, 2))
            right.append((scores.flatten(0, 1).argmax(dim=1) == _labels(scores)).unflatten(0, (count, -1)).float().mean(dim=1))
        return {"accuracy": float(torch.cat(right).mean())}


def _labels(scores: Tensor) -> Tensor:
    """Return the labels of alternating classes: 0, 1, ..., N - 1, 0, 1, ..."""
    return torch.arange(scores.shape[2], device=scores.device).repeat(scores.shape[0] * scores.shape[1] // scores.shape[2])


def _with_ones(features: Tensor, tasks: int) -> Tensor:
    """Group features by task, and append a one for the bias."""
    return pad(features, (0, 1), value=1.0).unflatten(0, (tasks, -1))


class _Features:
    """Cache the features of a batch and their graph, until x changes or a backward pass uses them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[nn.Module, Tensor, list[tuple[int, int]], Tensor]] = {}

    def __call__(self, x: nn.Module, batch: Tasks, part: Literal["support", "query"], tasks: int) -> Tensor:
        images = getattr(batch, part)
        # Versions count changes in place: an optimizer step makes the features invalid.
        state = [(tensor.data_ptr(), tensor._version) for tensor in (images, *x.parameters())]
        if part in self._kept:
            module, seen, known, features = self._kept[part]
            same = module is x and seen is images and known == state
            if same and (features.requires_grad or not torch.is_grad_enabled()):  # features without a graph have no gradient
                return features
        features = _with_ones(x(images), tasks)
        if features.requires_grad:  # a backward pass frees the graph, so the features can be used once only
            features.register_hook(lambda _: self._kept.pop(part, None) and None)
        self._kept[part] = x, images, state, features
        return features


class Episodes:
    """Endless batches of new tasks, or of tasks from a pool.

    The state of its random generator can be saved, so checkpoints can resume it.
    """

    def __init__(self, task: FewShot) -> None:
        self.task = task
        self.generator = torch.Generator(task.training.device).manual_seed(task.seed)
        self.pool = task.draw(task.training, task.pool, self.generator) if task.pool else None  # fixed tasks with heads

    def __iter__(self) -> Iterator[Tasks]:
        while True:
            yield self._next()

    def _next(self) -> Tasks:
        task = self.task
        if self.pool is None:
            return task.images(task.training, task.draw(task.training, task.tasks, self.generator))
        order = torch.rand(task.pool, generator=self.generator, device=task.training.device).topk(task.tasks).indices
        return task.images(task.training, self.pool[order], order)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the generator."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of the generator."""
        self.generator.set_state(state["generator"])


def few_shot(
    data: Literal["omniglot", "digits"] = "omniglot",
    *,
    ways: int = 10,
    shots: int = 1,
    queries: int = 15,
    tasks: int = 16,
    width: int = 32,
    pool: int = 0,
    test_tasks: int = 1000,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> FewShot:
    """Build few-shot tasks from images; rotations by 0, 90, 180 and 270 degrees turn each class into four.

    Args:
        data: "omniglot" has 1200 characters for training and 423 for the test, the same for all seeds; "digits" has enlarged
            digits, 0 to 4 for training and 5 to 9 for the test.
        ways: classes per task.
        shots: examples per class to learn from.
        queries: examples per class to evaluate on.
        tasks: tasks per batch.
        width: features of the backbone.
        pool: the number of tasks whose heads are kept; 0 draws new tasks in every batch.
        test_tasks: number of test tasks in an evaluation.
        seed: the seed of the initial backbone and the tasks.
        device: the device of the images.

    Returns:
        The task, with its problem, its start, its batches and its evaluation.
    """
    if data == "omniglot":
        images = omniglot().images
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        parts = (images[order[:TRAINING_CHARACTERS]], images[order[TRAINING_CHARACTERS:]])
    elif data == "digits":
        images = _enlarged_digits()
        parts = (images[:5], images[5:])
    else:
        raise ValueError(f"data: must be 'omniglot' or 'digits', got {data!r}.")
    training, testing = (
        torch.stack([part.to(device).rot90(quarter, (2, 3)) for quarter in range(4)], dim=1).flatten(0, 1) for part in parts
    )
    return FewShot(training, testing, ways, shots, queries, tasks, width, pool, test_tasks, seed)


def _enlarged_digits() -> Tensor:
    """Return the digits as images of 28 x 28, the same number of each."""
    data = digits()
    least = int(data.labels.bincount().min())
    large = interpolate(data.images[:, None].float(), (28, 28), mode="bilinear")[:, 0].round().byte()
    return torch.stack([large[data.labels == digit][:least] for digit in range(10)])
