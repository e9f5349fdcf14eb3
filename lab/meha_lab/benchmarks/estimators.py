"""The estimators of meha.sklearn beside those of scikit-learn: errors on 12 data sets, wrong labels, data without structure.

    OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.estimators [--part errors labels structure] [--splits 5] [--first 0]
        [--only NAME] [--methods NAME ...] [--jobs 1] [--out out/records]
    python -m meha_lab.benchmarks.estimators --keep [--out out/records]

The errors are mean squares over the variance of the targets, or mean cross entropies, on test data. Times are processor seconds
of a second fit; those of one split are taken one after another. Each record is a line of estimators.jsonl in the folder --out,
written when it is measured. The same command continues a run that was cut off: it skips what the folder has. TPE needs the
package optuna, and cleanlab its own: they are left out where these are not installed. --keep adds the records of the folder to
those of lab/records, and draws the tables of docs/estimators.md and docs/label-noise.md from all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from meha_lab import pages
from meha_lab.benchmarks.estimator_data import LABELS, SETS, STRUCTURE, Array, Data, draw, pictures, structured
from meha_lab.paths import RECORDS, ROOT
from meha_lab.store import Record, Store
from sklearn.linear_model import ElasticNet, ElasticNetCV, LassoCV, LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.neural_network import MLPClassifier

import meha
from meha.sklearn import LabelCleaner, PenalizedClassifier, PenalizedRegressor

KIND = "estimators"
SINGLE = ("RidgeCV", "LassoCV", "ElasticNetCV", "logistic ridge CV", "logistic lasso CV")
OURS = "meha.sklearn"
TPE = "TPE, 50 trials"
TRIALS = 50
ALPHAS = np.logspace(-3, 5, 30)
RATIOS = [0.1, 0.5, 0.9, 0.99]
NEEDS = {"TPE": "optuna", "cleanlab": "cleanlab"}
"""Packages that methods need."""
FOLDS = 5
LEAST, MOST = -9.0, 3.0
"""Bounds of the log-weights."""


# Errors


class Scaled:
    """A fitted model behind features multiplied by ``scale``."""

    def __init__(self, model: Any, scale: Any) -> None:
        self.model, self.scale = model, scale

    def predict(self, X: Any) -> Any:
        return self.model.predict(X * self.scale)

    def predict_proba(self, X: Any) -> Any:
        return self.model.predict_proba(X * self.scale)


def logistic_cv(data: Data, l1: bool) -> Any:
    """LogisticRegressionCV chosen by log loss; the way to ask for absolute values differs between versions."""
    common = dict(Cs=10, cv=5, scoring="neg_log_loss", max_iter=2000)
    solver = "saga" if data.classes > 2 else "liblinear"
    if not l1:
        return LogisticRegressionCV(**common)
    try:
        return LogisticRegressionCV(l1_ratios=(1.0,), solver=solver, **common)
    except TypeError:
        return LogisticRegressionCV(penalty="l1", solver=solver, **common)


def pilot(data: Data) -> Any:
    model = logistic_cv(data, False) if data.classes else RidgeCV(ALPHAS)
    size = np.abs(np.atleast_2d(model.fit(data.X, data.y).coef_)).max(axis=0)
    if data.groups is not None:
        size = np.array([np.sqrt(np.mean(size[data.groups == group] ** 2)) for group in data.groups])
    return size + 1e-3 * size.max()


def adaptive_lasso(data: Data) -> Any:
    """Absolute values (with groups: norms of groups) with weights 1 / |coefficient of a ridge|."""
    scale = pilot(data)
    if data.groups is None:
        model = logistic_cv(data, True) if data.classes else LassoCV(cv=5)
    else:  # scikit-learn has no group lasso: ours with a single weight
        kind = PenalizedClassifier if data.classes else PenalizedRegressor
        model = kind(penalty="group", weights="one", groups=data.groups, standardize=False)
    return Scaled(model.fit(data.X * scale, data.y), scale)


def tpe(data: Data) -> Any:
    """50 trials of optuna's sampler: a weight for each group of a ridge, or both weights of an elastic net."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folds = StratifiedKFold(5, shuffle=True, random_state=0) if data.classes else KFold(5, shuffle=True, random_state=0)

    def model(trial: Any) -> tuple[Any, Any]:
        if data.groups is not None:
            weights = np.array([trial.suggest_float(f"w{g}", -7, 7) for g in range(data.groups.max() + 1)])[data.groups]
            scale = np.exp(-weights / 2)
            return (LogisticRegression(max_iter=500) if data.classes else Ridge(alpha=len(data.y))), scale
        if data.classes:
            return LogisticRegression(C=float(np.exp(trial.suggest_float("C", -9, 9))), max_iter=500), 1.0
        alpha, ratio = np.exp(trial.suggest_float("alpha", -9, 3)), trial.suggest_float("ratio", 0.01, 1)
        return ElasticNet(alpha=float(alpha) * data.y.std(), l1_ratio=ratio), 1.0

    def objective(trial: Any) -> float:
        candidate, scale = model(trial)
        score = "neg_log_loss" if data.classes else "neg_mean_squared_error"
        return -float(cross_val_score(candidate, data.X * scale, data.y, cv=folds, scoring=score).mean())

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=TRIALS)
    candidate, scale = model(study.best_trial)
    return Scaled(candidate.fit(data.X * scale, data.y), scale)


def ours(data: Data) -> Any:
    kind = PenalizedClassifier if data.classes else PenalizedRegressor
    return kind(groups=data.groups).fit(data.X, data.y)


def methods(data: Data) -> dict[str, Callable[[Data], Any]]:
    """The methods that suit the data."""
    shared = {OURS: ours, "adaptive lasso": adaptive_lasso, TPE: tpe}
    if data.classes:
        return {
            "logistic ridge CV": lambda d: logistic_cv(d, False).fit(d.X, d.y),
            "logistic lasso CV": lambda d: logistic_cv(d, True).fit(d.X, d.y),
            **shared,
            "LassoCV": lambda d: LassoCV(cv=5).fit(d.X, d.y),
        }
    return {
        "RidgeCV": lambda d: RidgeCV(ALPHAS).fit(d.X, d.y),
        "LassoCV": lambda d: LassoCV(cv=5).fit(d.X, d.y),
        "ElasticNetCV": lambda d: ElasticNetCV(cv=5, l1_ratio=RATIOS).fit(d.X, d.y),
        **shared,
    }


def error(model: Any, data: Data) -> float:
    if not data.classes:
        return float(np.mean((model.predict(data.X_test) - data.y_test) ** 2) / np.var(data.y_test))
    if not hasattr(model, "predict_proba"):  # LassoCV, which is measured for its time
        return float("nan")
    likely = model.predict_proba(data.X_test)[np.arange(len(data.y_test)), data.y_test]
    return float(-np.log(likely.clip(1e-12)).mean())


def error_methods(name: str, split: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each method on one split."""
    data = draw(name, split)
    return {method: partial(errors, method, fit, data) for method, fit in methods(data).items()}


def errors(method: str, fit: Callable[[Data], Any], data: Data) -> dict[str, Any]:
    """Test error and time of a method."""
    start = time.process_time()
    model = fit(data)
    if method != TPE:  # the first fit loads what it needs
        start = time.process_time()
        fit(data)
    seconds = time.process_time() - start
    chosen = {"penalty": model.penalty_} if method == OURS else {}
    return {"error": error(model, data), "seconds": seconds, **chosen}


# Wrong labels


@cache
def _left_out(name: str, share: float, kind: str, split: int, network: bool) -> Array:
    """Out-of-fold probabilities."""
    X, y, _, _ = pictures(name, share, kind, split)
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
    case = (*LABELS[title], split)
    X, y, wrong, trusted = pictures(*case)
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


def _scored(score: Callable[[Array, Array], Array], case: tuple[str, float, str, int], network: bool, y: Array) -> Array:
    return score(_left_out(*case, network), y)


def _judged(score: Callable[[], Array], wrong: Array, trusted: Array) -> dict[str, Any]:
    start = time.process_time()
    quality = score()
    seconds = time.process_time() - start
    judged = np.setdiff1d(np.arange(len(wrong)), trusted)
    quality, wrong = quality[judged], wrong[judged]
    worst = np.argsort(quality, kind="stable")[: int(wrong.sum())]
    return {"auc": float(roc_auc_score(~wrong, quality)), "precision": float(wrong[worst].mean()), "seconds": seconds}


# Data without structure


def structure_methods(title: str, split: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What measures each method on one draw."""
    data = structured(title, split)
    fits = {
        'cross_validation(prior="folds")': _folded,
        'PenalizedRegressor(penalty="ridge")': partial(_estimated, "ridge"),
        "PenalizedRegressor()": partial(_estimated, "auto"),
    }
    return {method: partial(_compared, fit, data) for method, fit in fits.items()}


def _compared(fit: Callable[[Array, Array], tuple[Array, Array, bool]], data: Data) -> dict[str, Any]:
    """Test errors with many weights allowed and with one, relative to noise of variance 1."""
    start = time.process_time()
    many, one, left = fit(data.X, data.y)
    seconds = time.process_time() - start
    errors = [1 + float(np.mean((data.X_test @ b - data.y_test) ** 2)) for b in (many, one)]
    return {"error": errors[0], "single": errors[1], "left": left, "seconds": seconds}


def _folded(X: Array, y: Array) -> tuple[Array, Array, bool]:
    A, b = torch.from_numpy(X), torch.from_numpy(y)

    def loss(x: Any, w: Any, rows: Any) -> Any:
        return (A[rows] @ w - b[rows]).square().mean() / 2

    cv = meha.cross_validation(
        lambda x, w, rows: loss(x, w, rows) + 0.5 * (x.exp() * w.square()).sum(),
        loss,
        examples=len(y),
        folds=FOLDS,
        x_set=meha.sets.Box(LEAST, MOST),
        prior="folds",
    )
    x0, w0 = torch.full((X.shape[1],), -2.0, dtype=torch.float64), torch.zeros(X.shape[1], dtype=torch.float64)
    result, single = cv.solve(x0, w0), replace(cv, prior=float("inf")).solve(x0, w0)
    return result.y.numpy(), single.y.numpy(), bool(np.isfinite(result.strength))


def _estimated(penalty: str, X: Array, y: Array) -> tuple[Array, Array, bool]:
    models = [PenalizedRegressor(penalty=penalty, weights=weights).fit(X, y) for weights in ("auto", "one")]
    return models[0].coef_, models[1].coef_, len(np.unique(models[0].penalties_)) > 1


# The tables

SEEN = 7
"""Splits up to this one were looked at when numbers of the search were chosen."""
HEAD = (
    "data",
    "ridge",
    "lasso",
    "elastic net",
    "adaptive (group) lasso",
    "TPE",
    "`meha.sklearn`",
    "against the best single weight",
    "time",
    "in `LassoCV`s",
)


def measured(store: Store, part: str) -> list[Record]:
    """The records of a part, sorted by what they measure."""
    found = [record for record in store.records(KIND) if record["part"] == part]
    return sorted(found, key=lambda record: (record["set"], record["split"], record["method"]))


class ErrorRow(NamedTuple):
    """A line of the table of errors: its cells, the error over that of the best single weight, and two ratios of times."""

    cells: list[str]
    ratio: float
    time: float
    time_of_kind: float


def error_row(name: str, records: Sequence[Record]) -> ErrorRow:
    """The line of one data set: means over the splits, of methods that have all of them, and medians of times."""
    methods = {record["method"] for record in records}
    errors = {m: [r["error"] for r in records if r["method"] == m and r["error"] is not None] for m in methods}
    mean = {m: float(np.mean(values)) for m, values in errors.items() if len(values) == len(errors[OURS])}
    seconds = {m: np.median([r["seconds"] or np.nan for r in records if r["method"] == m]) for m in methods}
    ratio = mean[OURS] / min(mean[m] for m in SINGLE if m in mean)
    classes = "logistic ridge CV" in mean
    ridge, lasso = ("logistic ridge CV", "logistic lasso CV") if classes else ("RidgeCV", "LassoCV")
    others = [f"{mean[m]:.3f}" if m in mean else "" for m in (ridge, lasso, "ElasticNetCV", "adaptive lasso", TPE)]
    time = seconds[OURS] / seconds["LassoCV"]
    cells = [name, *others, f"**{mean[OURS]:.3f}**", f"{ratio - 1:+.1%}", f"{seconds[OURS]:.2f} s", f"{time:.1f}"]
    return ErrorRow(cells, ratio, time, seconds[OURS] / seconds[ridge if classes else lasso])


def sentence(rows: Sequence[ErrorRow]) -> str:
    """The figures that matter, in words."""
    better = sum(row.ratio <= 0.95 for row in rows)
    times, times_of_kind = (np.median([getattr(row, name) for row in rows]) for name in ("time", "time_of_kind"))
    return (
        f"Worst case {max(row.ratio for row in rows) - 1:+.1%} against the best single weight; better by 5 % or more on"
        f" {better} of {len(rows)}; median time {times:.1f} times `LassoCV`'s ({times_of_kind:.1f} times that of the method for"
        " the same kind of target)."
    )


def error_tables(store: Store) -> list[str]:
    """The tables of fresh splits and of those that were seen."""
    records = measured(store, "errors")
    lines: list[str] = []
    for title, fresh in (("Fresh splits", True), ("Splits that were looked at", False)):
        mine = [record for record in records if (record["split"] >= SEEN) == fresh]
        known = {record["set"] for record in mine if record["method"] == OURS}
        rows = [error_row(name, [record for record in mine if record["set"] == name]) for name in SETS if name in known]
        if rows:
            lines += [f"**{title}**", "", *pages.markdown(HEAD, [row.cells for row in rows]), "", sentence(rows), ""]
    return lines[:-1]


def label_table(store: Store) -> list[str]:
    """Area under the curve and precision of each method for each kind of wrong labels, and their means."""
    records = measured(store, "labels")
    names = sorted({r["method"] for r in records}, key=lambda m: (not m.startswith("LabelCleaner"), m))

    def cell(method: str, title: str = "") -> str:
        mine = [r for r in records if r["method"] == method and title in ("", r["set"])]
        return f"{np.mean([r['auc'] for r in mine]):.3f}, {np.mean([r['precision'] for r in mine]):.3f}" if mine else ""

    known = {r["set"] for r in records}
    rows = [[title, *(cell(name, title) for name in names)] for title in LABELS if title in known]
    return pages.markdown(["data", *names], [*rows, ["mean", *map(cell, names)]])


def structure_table(store: Store) -> list[str]:
    """How often many weights are taken, and the mean test error with them over that of a single weight."""
    records = measured(store, "structure")
    rows = []
    for title in STRUCTURE:
        for method in sorted({r["method"] for r in records}):
            mine = [r for r in records if r["set"] == title and r["method"] == method]
            if mine:
                ratio = np.mean([r["error"] for r in mine]) / np.mean([r["single"] for r in mine])
                left = sum(r["left"] for r in mine)
                rows.append([title, f"`{method}`", f"{left} of {len(mine)}", f"{ratio - 1:+.1%}"])
    return pages.markdown(["data", "method", "more than one weight", "test error against one weight"], rows)


TABLES: pages.Tables = {
    "errors": ("estimators.md", error_tables),
    "structure": ("estimators.md", structure_table),
    "labels": ("label-noise.md", label_table),
}


# The command

Task = tuple[str, str, int]
"""Part, data set and split."""


def measure(task: Task, wanted: Callable[[str], bool], out: Path) -> None:
    """Measure all methods that are wanted and not in the folder yet, and write a record of each."""
    warnings.simplefilter("ignore")
    part, name, split = task
    store = Store(out)
    done = {record["key"] for record in store.records(KIND)}
    try:
        pairs = PARTS[part][1](name, split)
    except FileNotFoundError as error:
        print(f"{name}: left out, {error}", flush=True)
        return
    for method, act in pairs.items():
        key = f"{part}, {name}, {split}, {method}"
        if wanted(method) and key not in done:
            found = act()
            store.add(KIND, key, {"part": part, "set": name, "split": split, "method": method, **found})
            print(key, *(f"{field}={value}" for field, value in found.items()), flush=True)


PARTS: dict[str, tuple[Iterable[str], Callable[[str, int], dict[str, Callable[[], dict[str, Any]]]]]] = {
    "errors": (SETS, error_methods),
    "labels": (LABELS, label_methods),
    "structure": (STRUCTURE, structure_methods),
}
"""The cases of each part, and what measures each method on one of them."""


class Wanted:
    """Whether a method is asked for, and can run here."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts
        self.missing = tuple(method for method, package in NEEDS.items() if find_spec(package) is None)

    def __call__(self, method: str) -> bool:
        return not method.startswith(self.missing) and (not self.parts or any(part in method for part in self.parts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs="+", default=["errors", "labels"], choices=list(PARTS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out/records")
    parser.add_argument("--keep", action="store_true", help="add the records of --out to lab/records, and draw the tables")
    arguments = parser.parse_args()
    if arguments.keep:
        store = Store(RECORDS)
        known = {record["key"]: record for record in store.records(KIND)}
        for record in Store(arguments.out).records(KIND):
            if record != known.get(record["key"]):
                store.add(KIND, record["key"], record)
        pages.draw(TABLES)
        return
    wanted = Wanted(arguments.methods)
    for method in wanted.missing:
        print(f"{method}: left out, {NEEDS[method]} is not installed", flush=True)
    splits = range(arguments.first, arguments.first + arguments.splits)
    tasks = [(p, name, split) for p in arguments.part for name in PARTS[p][0] if arguments.only in name for split in splits]
    job = partial(measure, wanted=wanted, out=arguments.out)
    if arguments.jobs == 1:
        for task in tasks:
            job(task)
    else:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            for _ in pool.imap_unordered(job, tasks):
                pass


if __name__ == "__main__":
    main()
