"""Find wrong labels by training a network with MEHA, given a few trusted labels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meha.method.status import Status
from meha.methods import MEHA
from meha.problem.problem import Problem
from meha.running.observers import Recorder
from meha.running.solve import solve, uninterrupted

Array = NDArray[Any]

LIMIT = 10**9  # numbers: 4 GB during training, about three times as much during preparation
NEUTRAL = 0.5
FEW = 5  # trusted examples per class below which there is a warning

HIDDEN = 128
BATCH = 256
STEPS = 300  # least number of training steps ...
EPOCHS = 8  # ... and of epochs: the larger of both counts
WIDE, PASSES, FEWEST = 256, 16, 50  # from WIDE inputs on, 16 epochs (at least 50 steps) if fewer: no memorising
PRETRAINING = 200  # steps on the trusted examples
RATE = 3e-3  # of Adam, for both networks
C = 0.6  # the penalty parameter c of MEHA
GAMMA = 1e4
TRAVEL = 30.0  # distance that x_i moves in the whole training if its own term has derivative 1
DOUBT = 0.3  # the cost in F of removing all examples; see clean()


class CleaningWarning(UserWarning):
    """Warning that some examples cannot be judged, or only poorly."""


@dataclass(frozen=True, eq=False, repr=False)
class Cleaning:
    """The result of :func:`clean`: a weight and a suggested label for every example.

    Attributes:
        weights: from 0 (the label looks wrong) to 1 (it looks right): p / (p + q), where p is the probability of the label and
            q that of the best other label; below 0.5, the other label is suggested. Examples that were not judged have exactly
            0.5, trusted ones exactly 1.
        order: row numbers, most suspicious first, trusted ones last.
        suggested: the most likely label of each example; trusted examples and those not judged keep their label.
        trusted: a mask of the trusted examples.
    """

    weights: NDArray[np.float64]
    order: NDArray[np.int64]
    suggested: Array
    trusted: NDArray[np.bool_]

    def suspicious(self, threshold: float = NEUTRAL) -> NDArray[np.int64]:
        """Return the row numbers of the examples with a weight below ``threshold``, most suspicious first."""
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: must be in [0, 1], got {threshold!r}.")
        return self.order[self.weights[self.order] < threshold]

    def __repr__(self) -> str:
        trusted = int(self.trusted.sum())
        return f"Cleaning({len(self.suspicious())} of {len(self.trusted) - trusted} labels look wrong, {trusted} trusted)"


def clean(
    features: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    trusted: ArrayLike | Tensor,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    watch: Callable[[float], None] | None = None,
) -> Cleaning:
    """Rank examples by how wrong their labels look, given a few labels you trust.

    This is data hyper-cleaning with MEHA: x_i decides the weight of the unverified example i, y is a network with one hidden
    layer, pretrained on the trusted examples, and

        F(x, y) = mean over trusted of CE(y) + 0.3 mean_i (1 - sigmoid(x_i)),    f(x, y) = mean_i sigmoid(x_i) CE_i(y)

    An example loses weight if fitting it costs the network that also fits the trusted examples 0.3 / c = 0.5 nats more than
    the network that does not. Dropout keeps the network from memorising wrong labels, and so do few epochs where inputs are
    many (256 or more): 16, or 50 steps.

    The trained network then judges: it ranks wrong labels better than sigmoid(x), which keeps them out of the training but
    hardly orders them. We measured this on labels made wrong on purpose (26 settings: digits, MNIST, Fashion-MNIST, tables and
    points in the plane; 10 to 50 % wrong; seeds not used to choose the settings), against the same network trained on one kind
    of examples only and ranked by the same margin::

        mean of                   AUC    precision  recall      worst AUC with systematically wrong labels
        MEHA                      0.989  0.89       0.97        0.971
        trusted examples only     0.985  0.79       0.98        0.977
        all, as if right          0.983  0.92       0.92        0.918

    It is not always the best. If wrong labels are random and trusted examples very few, training on all examples is as good or
    better (20 columns, 4 classes, 100 trusted: AUC 0.93, MEHA 0.89). If errors are systematic and the trusted examples suffice
    for training, so is training on them alone (Fashion-MNIST, 200 trusted: 0.98, MEHA 0.97; two clouds of 200 points, with all
    wrong labels in one: 1.00, MEHA 0.99).

    Images (:func:`as_images`) are scaled as a whole, other features column by column. All data must fit in memory.

    Args:
        features: (n, ...), numbers; see above.
        labels: (n,), integers or strings.
        trusted: a mask (n,), or the row numbers of the examples whose labels are right. Each class needs some, ideally ten or
            more. Labels of a class without any cannot be judged: a warning says so, and their weight is 0.5.
        seed: the seed of the initial network, of dropout and of the batches.
        device: the device of the training.
        watch: called every ten steps with the share of the training that is done.

    Returns:
        The weights, the ranking and the suggested labels.

    Two clouds, in which every ninth label from row 20 on is wrong:

    >>> generator = np.random.default_rng(0)
    >>> truth = np.arange(300) % 2
    >>> features = generator.normal(size=(300, 2)) + 4 * truth[:, None]
    >>> labels = truth.copy()
    >>> labels[20::9] = 1 - truth[20::9]
    >>> cleaning = clean(features, labels, trusted=range(20))
    >>> worst = cleaning.order[:25]
    >>> bool((labels[worst] != truth[worst]).all()), bool((cleaning.suggested[worst] == truth[worst]).all())
    (True, True)
    >>> 20 in cleaning.suspicious(), 21 in cleaning.suspicious()
    (True, False)
    """
    values = check_features(features)
    names, targets = np.unique(check_labels(labels, len(values)), return_inverse=True)
    mask = check_trusted(trusted, len(values))
    judged = _judged(names, targets, mask)
    known = np.unique(targets[mask])
    scaled = _scaled(values)
    if not scaled.any():
        raise ValueError("features: all examples are identical; pass features that differ.")
    inputs = torch.from_numpy(scaled).to(device)
    # The network has outputs for classes with trusted examples only; other labels get any one of them, and are masked below.
    classes = torch.from_numpy(np.searchsorted(known, targets).clip(max=len(known) - 1)).to(device)

    unverified = judged & ~mask
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        torch.manual_seed(seed)
        first, last = nn.Linear(inputs.shape[1], HIDDEN), nn.Linear(HIDDEN, len(known))
        noise = nn.Dropout(0.3 if inputs.shape[1] >= 8 else 0.0)  # of 30 % of 8 or more inputs
        network = nn.Sequential(noise, first, nn.ReLU(), nn.Dropout(0.5), last).to(device)
        torch.manual_seed(seed)  # of dropout, which has no generator of its own
        noisy, right = (torch.from_numpy(np.flatnonzero(part)).to(device) for part in (unverified, mask))
        _train(network, inputs, classes, noisy, right, seed, watch)

    network.eval()
    with torch.no_grad():
        logits = torch.cat([network(part).double() for part in inputs.split(2**15)])  # in parts, to limit memory
    own = logits.gather(1, classes[:, None])
    others = logits.scatter(1, classes[:, None], -torch.inf).amax(dim=1, keepdim=True)
    margin = (own - others).squeeze(1).cpu().numpy()
    margin[~judged], margin[mask] = 0.0, np.inf
    suggested = np.where(unverified, known[logits.argmax(dim=1).cpu().numpy()], targets)
    weights = torch.from_numpy(margin).sigmoid().numpy()  # p / (p + q) = sigmoid(log p - log q)
    return Cleaning(weights, np.argsort(margin, kind="stable"), names[suggested], mask)  # by margins: weights round to 1


def check_features(features: ArrayLike | Tensor) -> Array:
    """Return the features as an array (n, ...) of finite numbers.

    >>> check_features([[1.0, 2.0], [3.0, float("nan")]])
    Traceback (most recent call last):
    ValueError: features: row 1, column 1 (counted from 0) is nan; fill in a number, or remove the row or the column.
    """
    values = _array("features", features)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"features: must be real numbers, got an array of {values.dtype}; convert them to numbers.")
    if values.ndim < 2 or values.size == 0:
        raise ValueError(f"features: must have shape (n, ...), one row per example, got shape {values.shape}.")
    if values.size > LIMIT:
        raise ValueError(
            f"features: shape {values.shape} exceeds {LIMIT:,} numbers, too many for memory; clean a part of them."
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row, *column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        place = f"column {column[0]}" if len(column) == 1 else f"position {tuple(column)}"
        raise ValueError(
            f"features: row {row}, {place} (counted from 0) is {values[(row, *column)]}; fill in a number, or remove the row or"
            " the column."
        )
    return values


def check_labels(labels: ArrayLike | Tensor, count: int) -> Array:
    """Return the labels as an array (count,) of integers or strings, of at least two classes.

    >>> check_labels([1.0, 2.0, 2.0], 3)
    array([1, 2, 2])
    >>> check_labels([0.5, 1.5], 2)
    Traceback (most recent call last):
    ValueError: labels: must be integers or strings, got 0.5; regression targets cannot be cleaned.
    """
    values = _array("labels", labels)
    if values.shape != (count,):
        raise ValueError(f"labels: must have shape ({count},), one per example, got shape {values.shape}.")
    if values.dtype.kind == "f":
        # Files often store integers as floats, which are exact below 2^53.
        strange = values[~(np.isfinite(values) & (values == np.rint(values)) & (np.abs(values) < 2**53))]
        if len(strange):
            raise ValueError(f"labels: must be integers or strings, got {strange[0]}; regression targets cannot be cleaned.")
        values = values.astype(np.int64)
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):  # columns of pandas
        values = values.astype(np.str_)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "biuU":
        raise TypeError(f"labels: must be integers or strings, got an array of {values.dtype}.")
    if (values == values[0]).all():
        raise ValueError(f"labels: all are {values[0]}; pass at least two classes.")
    return values


def check_trusted(trusted: ArrayLike | Tensor, count: int) -> NDArray[np.bool_]:
    """Return a mask (count,) from a mask, of booleans or of 0 and 1, or from row numbers.

    >>> check_trusted([0, 3], 5)
    array([ True, False, False,  True, False])
    >>> check_trusted([5], 5)
    Traceback (most recent call last):
    ValueError: trusted: row 5 does not exist; rows go from 0 to 4.
    """
    values = _array("trusted", trusted)
    if values.ndim != 1 or (values.dtype.kind == "b" and len(values) != count):
        raise ValueError(f"trusted: must be a mask of length {count}, or row numbers, got shape {values.shape}.")
    if values.dtype.kind not in "biu" and len(values):
        raise TypeError(f"trusted: must be a mask or row numbers, got an array of {values.dtype}.")
    # As many 0s and 1s as examples are a mask: row numbers would name only two different rows.
    if values.dtype.kind != "b" and len(values) == count > 2 and np.isin(values, (0, 1)).all():
        values = values.astype(bool)
    if values.dtype.kind != "b":
        outside = values[(values < 0) | (values >= count)]
        if len(outside):
            raise ValueError(f"trusted: row {outside[0]} does not exist; rows go from 0 to {count - 1}.")
        values = np.isin(np.arange(count), values)
    if not values.any():
        raise ValueError("trusted: no example is marked; mark some of each class whose labels are right.")
    if values.all():
        raise ValueError("trusted: all examples are trusted; leave out those to judge.")
    return values


def _array(name: str, values: ArrayLike | Tensor) -> Array:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be an array: {error}.") from error


def _judged(names: Array, targets: Array, trusted: Array) -> Array:
    """Return a mask of the examples whose label some trusted example has too, and warn about the others."""
    counts, totals = (np.bincount(part, minlength=len(names)) for part in (targets[trusted], targets))
    if (counts > 0).sum() < 2:
        only = names[counts > 0][0]
        raise ValueError(f"trusted: all are of class {only}; mark examples of at least two classes, ideally of all.")
    missing, few = np.flatnonzero(counts == 0), np.flatnonzero((counts > 0) & (counts < FEW))
    notes = [
        f"labels: {one!r} and {other!r} are two classes. If they are one, write them in the same way."
        for one, other in _alike(names)
    ]
    if len(missing):
        notes.append(
            f"trusted: there are no examples of class {_some(names[missing])}, so {totals[missing].sum()} examples with these"
            f" labels cannot be judged and get weight {NEUTRAL}. Mark some that are right."
        )
    if len(few):
        notes.append(
            f"trusted: there are fewer than {FEW} examples of class {_some(names[few])}, so weights are uncertain. Mark more."
        )
    for note in notes:
        warnings.warn(note, CleaningWarning, stacklevel=3)
    judged: Array = counts[targets] > 0
    if not (judged & ~trusted).any():
        raise ValueError("trusted: no other example has one of their labels, so none can be judged; mark other classes.")
    return judged


def _alike(names: Array) -> Iterator[tuple[str, str]]:
    """Yield pairs of classes that differ only in case or spaces, or are the same number."""
    seen: dict[str, str] = {}
    for name in names.tolist() if names.dtype.kind == "U" else ():
        key = name.strip().casefold()
        with contextlib.suppress(ValueError):
            key = repr(float(key))
        if key in seen:
            yield seen[key], name
        seen[key] = name


def _some(names: Array, most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + rest


def as_images(features: Array) -> Array | None:
    """Return features as images (n, height, width) or (n, height, width, 3), or None if they are not images.

    Images have shape (n, height, width), with one, three or four channels last or first; or are uint8 rows of square images of
    at least 4 x 4 pixels.

    >>> as_images(np.zeros((7, 64), dtype=np.uint8)).shape, as_images(np.zeros((7, 3, 8, 9))).shape
    ((7, 8, 8), (7, 8, 9, 3))
    >>> as_images(np.zeros((7, 64)))
    """
    if features.ndim == 2:
        side = round(features.shape[1] ** 0.5)
        square = features.dtype == np.uint8 and side >= 4 and side**2 == features.shape[1]
        return features.reshape(-1, side, side) if square else None
    if features.ndim == 4 and features.shape[3] not in (1, 3, 4) and features.shape[1] in (1, 3, 4):  # channels first
        features = np.moveaxis(features, 1, 3)
    if features.ndim == 4 and features.shape[3] in (1, 3, 4):
        return features[..., 0] if features.shape[3] == 1 else features[..., :3]  # without transparency
    return features if features.ndim == 3 else None


def _scaled(values: Array) -> NDArray[np.float32]:
    """Return features with mean 0 and standard deviation 1: images scaled as a whole, other data column by column.

    In columns, outliers are clipped to the range of the 1 % and 99 % quantiles, extended on both sides by its width.
    """
    # Column by column, pixels at the rim that are hardly ever used would become as large as all others.
    images = as_images(values) is not None
    kind = np.float32 if values.dtype == np.uint8 else np.float64
    flat: NDArray[np.floating[Any]] = values.reshape(len(values), -1).astype(kind)
    largest = np.abs(flat).max(axis=None if images else 0, keepdims=True)
    flat /= np.where(largest > 0, largest, 1)  # squares of huge numbers would overflow
    if not images:
        low, high = np.quantile(flat, (0.01, 0.99), axis=0)
        room = np.where(high > low, high - low, np.inf)
        np.clip(flat, low - room, high + room, out=flat)
    flat -= flat.mean(axis=0)
    deviation = flat.std(axis=None if images else 0)
    flat /= np.where(deviation > 1e-12, deviation, 1)  # constant columns: rounding errors only
    return flat.astype(np.float32)


def _train(
    network: nn.Sequential,
    inputs: Tensor,
    classes: Tensor,
    unverified: Tensor,
    trusted: Tensor,
    seed: int,
    watch: Callable[[float], None] | None,
) -> None:
    """Train the network on the trusted examples, then on all examples with MEHA."""
    generator = torch.Generator().manual_seed(seed)
    count = len(unverified)
    batch = min(BATCH, count)
    least = STEPS if inputs.shape[1] < WIDE else min(STEPS, max(FEWEST, PASSES * count // batch))
    steps = max(least, EPOCHS * count // batch)

    def losses(network: nn.Module, rows: Tensor) -> Tensor:
        return cross_entropy(network(inputs[rows]), classes[rows], reduction="none")

    def upper(x: Tensor, y: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        return losses(y, trusted[rows[1]]).mean() + DOUBT * (1 - x[rows[0]].sigmoid()).mean()

    def lower(x: Tensor, y: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        return torch.dot(x[rows[0]].sigmoid(), losses(y, unverified[rows[0]])) / batch

    def report(done: int) -> None:
        if watch is not None and done % 10 == 0:
            watch(done / (PRETRAINING + steps))

    adam = partial(torch.optim.Adam, lr=RATE)
    optimizer = adam(network.parameters())
    of_trusted = _batches(len(trusted), generator, inputs.device)
    for step in range(PRETRAINING):
        optimizer.zero_grad()
        losses(network, trusted[next(of_trusted)]).mean().backward()
        optimizer.step()
        report(step)

    # alpha grows with n because f and F are means: the gradient of x_i falls like 1 / n.
    method = MEHA(c=C, p=0.0, gamma=GAMMA, alpha=TRAVEL * count / steps, y_optimizer=adam, theta_optimizer=adam)
    solution = solve(
        Problem(upper, lower),
        torch.zeros(count, device=inputs.device),
        network,
        method,
        max_steps=steps,
        tol=None,  # residuals of random batches do not vanish
        batches=zip(_batches(count, generator, inputs.device), of_trusted, strict=False),
        callbacks=[Recorder(every=steps), lambda run, info: report(PRETRAINING + info.step)],
    )
    if uninterrupted(solution).status not in (Status.MAX_STEPS, Status.FINISHED):
        raise ArithmeticError(f"Training failed: {solution.message}")


def _batches(count: int, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Yield random batches of the row numbers below ``count`` forever, epoch by epoch."""
    size = min(BATCH, count)
    while True:
        for part in torch.randperm(count, generator=generator).split(size):
            if len(part) == size:  # the lower level divides by the full batch size
                yield part.to(device)
