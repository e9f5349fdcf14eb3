"""Data of the benchmark of the estimators: data sets, pictures with wrong labels, data without structure; drawn by a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_wine,
    make_friedman1,
    make_low_rank_matrix,
)
from sklearn.preprocessing import PolynomialFeatures, SplineTransformer, StandardScaler

Array = NDArray[Any]
TEST = 1000


class Data(NamedTuple):
    """Training and test data; ``groups`` has a label for each feature, or is None."""

    X: Array
    y: Array
    X_test: Array
    y_test: Array
    groups: Array | None
    classes: int = 0


def _split(X: Array, y: Array, count: int, rng: np.random.Generator, groups: Array | None = None, classes: int = 0) -> Data:
    order = rng.permutation(len(y))
    train, test = order[:count], order[count:]
    scaler = StandardScaler().fit(X[train])
    return Data(scaler.transform(X[train]), y[train], scaler.transform(X[test]), y[test], groups, classes)


def _noisy(signal: Array, ratio: float, rng: np.random.Generator) -> Array:
    return signal + rng.normal(size=len(signal)) * signal.std() / np.sqrt(ratio)


def diabetes(rng: np.random.Generator) -> Data:
    X, y = load_diabetes(return_X_y=True)
    return _split(X, y, 221, rng)


def polynomials(rng: np.random.Generator) -> Data:
    X, y = load_diabetes(return_X_y=True)
    expansion = PolynomialFeatures(2, include_bias=False)
    Z = expansion.fit_transform(StandardScaler().fit_transform(X))
    powers = expansion.powers_
    return _split(Z, y, 221, rng, np.where(powers.sum(1) == 1, 0, np.where(powers.max(1) == 2, 1, 2)))


def sparse(rng: np.random.Generator) -> Data:
    X, b = rng.normal(size=(100 + TEST, 300)), np.zeros(300)
    b[:5] = rng.choice([-1, 1], 5) * rng.uniform(0.5, 1.5, 5)
    return _split(X, _noisy(X @ b, 4, rng), 100, rng)


def correlated_groups(rng: np.random.Generator) -> Data:
    common = np.repeat(rng.normal(size=(100 + TEST, 30)), 10, axis=1)
    X, b = np.sqrt(0.6) * common + np.sqrt(0.4) * rng.normal(size=common.shape), np.zeros(300)
    b[:40] = rng.normal(size=40)
    return _split(X, _noisy(X @ b, 3, rng), 100, rng, np.repeat(np.arange(30), 10))


def sources(rng: np.random.Generator) -> Data:
    sizes = (20, 100, 180)
    X = rng.normal(size=(150 + TEST, sum(sizes)))
    b = np.concatenate([scale * rng.normal(size=size) for size, scale in zip(sizes, (1.0, 0.15, 0.0), strict=True)])
    return _split(X, _noisy(X @ b, 3, rng), 150, rng, np.repeat(np.arange(3), sizes))


def splines(rng: np.random.Generator) -> Data:
    X, y = make_friedman1(200 + TEST, 20, noise=1.0, random_state=int(rng.integers(1 << 30)))
    Z = SplineTransformer(6, degree=3, include_bias=False).fit_transform(X)
    return _split(Z, y, 200, rng, np.repeat(np.arange(20), Z.shape[1] // 20))


def dense(rng: np.random.Generator) -> Data:
    X = 100 * make_low_rank_matrix(150 + TEST, 200, effective_rank=30, random_state=int(rng.integers(1 << 30)))
    return _split(X, _noisy(X @ rng.normal(size=200), 2, rng), 150, rng)


def digit_sums(rng: np.random.Generator) -> Data:
    """The intensity of the lower half of a digit's picture from the pixels of its upper half."""
    images = load_digits().images
    X, y = images[:, :4].reshape(len(images), -1), images[:, 4:].sum((1, 2))
    return _split(X, y, 300, rng, np.repeat(np.arange(4), 8))


def breast_cancer(rng: np.random.Generator) -> Data:
    X, y = load_breast_cancer(return_X_y=True)
    return _split(X, y, 284, rng, classes=2)


def wine(rng: np.random.Generator) -> Data:
    X, y = load_wine(return_X_y=True)
    return _split(X, y, 89, rng, classes=3)


def fours_and_nines(rng: np.random.Generator) -> Data:
    from meha_lab.datasets import load

    images = load("mnist", "train")
    kept = np.flatnonzero(np.isin(images.labels.numpy(), (4, 9)))
    kept = rng.permutation(kept)[: 300 + 2 * TEST]
    pixels = images.images[kept].flatten(1).numpy() / 255.0
    return _split(pixels, (images.labels[kept].numpy() == 9).astype(int), 300, rng, classes=2)


def grouped_classes(rng: np.random.Generator) -> Data:
    X, b = rng.normal(size=(200 + 2 * TEST, 200)), np.zeros(200)
    b[:20] = rng.normal(size=20)
    score = X @ b
    y = (rng.uniform(size=len(score)) < 1 / (1 + np.exp(-3 * score / score.std()))).astype(int)
    return _split(X, y, 200, rng, np.repeat(np.arange(10), 20), classes=2)


SETS: dict[str, Callable[[np.random.Generator], Data]] = {
    "diabetes, 10 features": diabetes,
    "diabetes, 65 polynomials": polynomials,
    "digits, lower half by upper half": digit_sums,
    "sparse, 100 x 300": sparse,
    "correlated groups, 100 x 300": correlated_groups,
    "three sources, 150 x 300": sources,
    "splines of 20 variables": splines,
    "dense of low rank, 150 x 200": dense,
    "breast cancer": breast_cancer,
    "wine, 3 classes": wine,
    "MNIST, 4 or 9, 300 x 784": fours_and_nines,
    "classes by groups, 200 x 200": grouped_classes,
}


def draw(name: str, split: int) -> Data:
    """The data set of this name and split."""
    return SETS[name](np.random.default_rng([split, list(SETS).index(name)]))


# Wrong labels

TAKEN, TRUSTED = 1000, 100
SHARES = (0.1, 0.3, 0.5)
PICTURES = ("digits", "mnist", "fashion-mnist")
LABELS = {
    f"{name}, {share:.0%} wrong, {kind}": (name, share, kind)
    for name in PICTURES
    for share in SHARES
    for kind in ("uniform", "by class")
}


def pictures(name: str, share: float, kind: str, split: int) -> tuple[Array, Array, Array, Array]:
    """Pixels, given labels, a mask of wrong ones, and the rows of trusted examples."""
    from meha_lab.datasets import load

    rng = np.random.default_rng([split, PICTURES.index(name), round(100 * share), len(kind)])
    images = load(name, "all" if name == "digits" else "train")
    kept = rng.permutation(len(images.labels))[:TAKEN]
    pixels, truth = images.images[kept].flatten(1).numpy().astype(float), images.labels[kept].numpy()
    pixels = pixels / pixels.max()
    trusted = rng.permutation(len(truth))[:TRUSTED]
    open_ = np.setdiff1d(np.arange(len(truth)), trusted)
    wrong = np.zeros(len(truth), dtype=bool)
    wrong[rng.permutation(open_)[: round(share * len(open_))]] = True
    other = (truth + rng.integers(1, 10, len(truth))) % 10 if kind == "uniform" else (truth + 1) % 10
    return pixels, np.where(wrong, other, truth), wrong, trusted


# Data without structure

EXAMPLES, FEATURES, UNSEEN = 60, 5, 2000
STRUCTURE = {
    "alike: all coefficients are 0.3": (0.3, False),
    "noise: all coefficients are 0": (0.0, False),
    "structure: one of five coefficients is not 0": (0.7, True),
}
"""Sizes of the coefficients, and whether only the first one has it."""


def structured(title: str, split: int) -> Data:
    """Examples to learn from, and others with their targets before noise."""
    size, first = STRUCTURE[title]
    rng = np.random.default_rng([split, list(STRUCTURE).index(title)])
    X = rng.normal(size=(EXAMPLES + UNSEEN, FEATURES))
    coefficients = size * (np.arange(FEATURES) < (1 if first else FEATURES))
    y = X[:EXAMPLES] @ coefficients + rng.normal(size=EXAMPLES)
    return Data(X[:EXAMPLES], y, X[EXAMPLES:], X[EXAMPLES:] @ coefficients, None)
