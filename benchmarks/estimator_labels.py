"""Wrong labels for benchmarks/estimators.py: LabelCleaner beside confident learning and loss ranking."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier

Array = NDArray[Any]
EXAMPLES, TRUSTED = 2000, 200
SHARES = (0.1, 0.3, 0.5)
PICTURES = ("digits", "mnist", "fashion-mnist")
LABELS = {
    f"{name}, {share:.0%} wrong, {kind}": (name, share, kind)
    for name in PICTURES
    for share in SHARES
    for kind in ("uniform", "by class")
}


def drawn(name: str, share: float, kind: str, split: int) -> tuple[Array, Array, Array, Array]:
    """Pixels, given labels, a mask of wrong ones, and the rows of trusted examples."""
    from meha.datasets import load

    rng = np.random.default_rng([split, PICTURES.index(name), round(100 * share), len(kind)])
    images = load(name, "all" if name == "digits" else "train")
    kept = rng.permutation(len(images.labels))[:EXAMPLES]
    pixels, truth = images.images[kept].flatten(1).numpy().astype(float), images.labels[kept].numpy()
    pixels = pixels / pixels.max()
    trusted = rng.permutation(len(truth))[:TRUSTED]
    open_ = np.setdiff1d(np.arange(len(truth)), trusted)
    wrong = np.zeros(len(truth), dtype=bool)
    wrong[rng.permutation(open_)[: round(share * len(open_))]] = True
    other = (truth + rng.integers(1, 10, len(truth))) % 10 if kind == "uniform" else (truth + 1) % 10
    return pixels, np.where(wrong, other, truth), wrong, trusted


@cache
def _left_out(name: str, share: float, kind: str, split: int, network: bool) -> Array:
    """Out-of-fold probabilities."""
    X, y, _, _ = drawn(name, share, kind, split)
    model = MLPClassifier((128,), early_stopping=True, random_state=0) if network else LogisticRegression(C=0.1, max_iter=300)
    return cross_val_predict(model, X, y, cv=StratifiedKFold(5, shuffle=True, random_state=0), method="predict_proba")


def confident(probabilities: Array, y: Array) -> Array:
    """Confident learning: the probability of the label, less the mean of this probability in its class."""
    own = probabilities[np.arange(len(y)), y]
    means = np.array([own[y == k].mean() for k in range(10)])
    return own - means[y]


def ranked(probabilities: Array, y: Array) -> Array:
    """Minus the loss of each label."""
    return np.log(probabilities[np.arange(len(y)), y].clip(1e-12))


def judge_labels(task: tuple[str, int, Sequence[str]]) -> list[dict[str, Any]]:
    """Scores of all methods for one draw; higher scores mean that a label looks right."""
    from meha.sklearn import LabelCleaner

    warnings.simplefilter("ignore")
    title, split, chosen = task
    case = (*LABELS[title], split)
    X, y, wrong, trusted = drawn(*case)
    judged = np.setdiff1d(np.arange(len(y)), trusted)
    linear = LogisticRegression(C=0.1, max_iter=300)
    methods: dict[str, Callable[[], Array]] = {
        "LabelCleaner": lambda: LabelCleaner().fit(X, y, trusted).label_quality_,
        "LabelCleaner, logistic": lambda: LabelCleaner(linear).fit(X, y, trusted).label_quality_,
        "confident learning, logistic": lambda: confident(_left_out(*case, False), y),
        "confident learning, network": lambda: confident(_left_out(*case, True), y),
        "loss ranking, logistic": lambda: ranked(_left_out(*case, False), y),
        "loss ranking, network": lambda: ranked(_left_out(*case, True), y),
    }
    records = []
    for method, score in methods.items():
        if chosen and not any(part in method for part in chosen):
            continue
        start = time.process_time()
        quality = score()[judged]
        seconds = time.process_time() - start
        count = int(wrong.sum())
        worst = np.argsort(quality, kind="stable")[:count]
        auc, precision = roc_auc_score(~wrong[judged], quality), float(wrong[judged][worst].mean())
        records.append(
            {"set": title, "split": split, "method": method, "auc": float(auc), "precision": precision, "seconds": seconds}
        )
    return records
