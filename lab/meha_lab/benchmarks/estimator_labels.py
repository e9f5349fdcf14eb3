"""Wrong labels for python -m meha_lab.benchmarks.estimators: LabelCleaner beside confident learning and loss ranking."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier

Array = NDArray[Any]
Case = tuple[str, float, str, int]
EXAMPLES, TRUSTED = 1000, 100
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
    from meha_lab.datasets import load

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


def ranked(probabilities: Array, y: Array) -> Array:
    """Minus the loss of each label."""
    return np.log(probabilities[np.arange(len(y)), y].clip(1e-12))


def by_cleanlab(probabilities: Array, y: Array) -> Array:
    """Confident learning, by the package cleanlab: the margin of the label, less the mean probabilities of the classes."""
    from cleanlab.rank import get_label_quality_scores

    return get_label_quality_scores(y, probabilities, method="normalized_margin", adjust_pred_probs=True)


def label_methods(title: str, split: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each method on one draw; higher scores mean that a label looks right."""
    from meha.sklearn import LabelCleaner

    case = (*LABELS[title], split)
    X, y, wrong, trusted = drawn(*case)
    linear = LogisticRegression(C=0.1, max_iter=300)
    scores: dict[str, Callable[[], Array]] = {
        "LabelCleaner, logistic": lambda: LabelCleaner(linear).fit(X, y, trusted).label_quality_,
        "LabelCleaner, network": lambda: LabelCleaner("network").fit(_bytes(X), y, trusted).label_quality_,
        "trusted only, logistic": lambda: ranked(linear.fit(X[trusted], y[trusted]).predict_proba(X), y),
    }
    for name, network in (("logistic", False), ("network", True)):
        for method, score in (("cleanlab", by_cleanlab), ("loss ranking", ranked)):
            scores[f"{method}, {name}"] = partial(_scored, score, case, network, y)
    return {method: partial(_judged, score, wrong, trusted) for method, score in scores.items()}


def _bytes(X: Array) -> Array:
    """Pixels as bytes, as which the network knows them for pixels."""
    return (255 * X).round().astype(np.uint8)


def _scored(score: Callable[[Array, Array], Array], case: Case, network: bool, y: Array) -> Array:
    return score(_left_out(*case, network), y)


def _judged(score: Callable[[], Array], wrong: Array, trusted: Array) -> dict[str, Any]:
    start = time.process_time()
    quality = score()
    seconds = time.process_time() - start
    judged = np.setdiff1d(np.arange(len(wrong)), trusted)
    quality, wrong = quality[judged], wrong[judged]
    worst = np.argsort(quality, kind="stable")[: int(wrong.sum())]
    return {"auc": float(roc_auc_score(~wrong, quality)), "precision": float(wrong[worst].mean()), "seconds": seconds}
