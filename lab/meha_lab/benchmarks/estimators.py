"""The estimators of meha.sklearn beside those of scikit-learn: errors on 12 data sets, wrong labels, data without structure.

    OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.estimators [--part errors labels structure] [--splits 5] [--first 0]
        [--only NAME] [--methods NAME ...] [--jobs 1] [--out out/estimators.jsonl]
    python -m meha_lab.benchmarks.estimators --draw [FILE ...]

The errors are mean squares over the variance of the targets, or mean cross entropies, on test data. Times are processor seconds
of a second fit; those of one split are taken one after another. Each record is a line of --out, written when it is measured.
The same command continues a run that was cut off: it skips what the file has. TPE needs the package optuna, and cleanlab its
own: they are left out where these are not installed. --draw adds the records of the files to those stored in
lab/records/benchmarks/estimators.jsonl, and writes the tables of docs/estimators.md and docs/label-noise.md from all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from meha_lab.benchmarks.estimator_data import SETS, Data, draw
from meha_lab.benchmarks.estimator_labels import LABELS, label_methods
from meha_lab.benchmarks.estimator_pages import OURS, TPE, draw_pages
from meha_lab.benchmarks.estimator_records import append, key, read, store
from meha_lab.benchmarks.estimator_structure import STRUCTURE, structure_methods
from meha_lab.paths import BENCHMARKS, ROOT
from sklearn.linear_model import ElasticNet, ElasticNetCV, LassoCV, LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

from meha.sklearn import PenalizedClassifier, PenalizedRegressor

RESULTS = BENCHMARKS / "estimators.jsonl"
OUT = ROOT / "out/estimators.jsonl"
TRIALS = 50
ALPHAS = np.logspace(-3, 5, 30)
RATIOS = [0.1, 0.5, 0.9, 0.99]
NEEDS = {"TPE": "optuna", "cleanlab": "cleanlab"}
"""Packages that methods need."""


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


Task = tuple[str, str, int]
"""Part, data set and split."""


def measure(task: Task, wanted: Callable[[str], bool], out: Path) -> None:
    """Measure all methods that are wanted and not in the file yet, and write a line for each."""
    warnings.simplefilter("ignore")
    part, name, split = task
    done = {key(record) for record in read([out])}
    try:
        pairs = PARTS[part][1](name, split)
    except FileNotFoundError as error:
        print(f"{name}: left out, {error}", flush=True)
        return
    for method, act in pairs.items():
        if wanted(method) and (*task, method) not in done:
            append(out, {"part": part, "set": name, "split": split, "method": method, **act()})


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
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--draw", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.draw is not None:
        records = read([RESULTS, *arguments.draw])
        store(RESULTS, records)
        draw_pages(records)
        return
    wanted = Wanted(arguments.methods)
    for method in wanted.missing:
        print(f"{method}: left out, {NEEDS[method]} is not installed", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
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
