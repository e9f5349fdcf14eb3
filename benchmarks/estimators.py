"""The estimators of meha.sklearn beside those of scikit-learn: test errors and times on 12 data sets, and wrong labels.

    OMP_NUM_THREADS=1 python benchmarks/estimators.py [--part errors labels] [--splits 5] [--only NAME] [--methods NAME ...]
        [--first 0] [--jobs 1] [--page]

The errors are mean squares over the variance of the targets, or mean cross entropies, on test data. Times are processor seconds
of a second fit; those of one split are taken one after another. Records go to benchmarks/results/estimators.json, tables to
docs/estimators.md and docs/label-noise.md (--page: without a run). TPE needs optuna, and is left out without it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from estimator_data import SETS, Data, draw
from estimator_labels import LABELS, judge_labels
from sklearn.linear_model import ElasticNet, ElasticNetCV, LassoCV, LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

from meha.sklearn import PenalizedClassifier, PenalizedRegressor

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results/estimators.json"
DOCS = HERE.parent / "docs"
SINGLE = ("RidgeCV", "LassoCV", "ElasticNetCV", "logistic ridge CV", "logistic lasso CV")
OURS = "meha.sklearn"
TRIALS = 50
SEEN = 5
"""Splits up to this one were looked at when numbers of the search were chosen."""
ALPHAS = np.logspace(-3, 5, 30)
RATIOS = [0.1, 0.5, 0.9, 0.99]


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
        return LogisticRegressionCV(l1_ratios=(1.0,), solver="saga" if data.classes > 2 else "liblinear", **common)
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
    shared = {OURS: ours, "adaptive lasso": adaptive_lasso, f"TPE, {TRIALS} trials": tpe}
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
    if not hasattr(model, "predict_proba"):
        return float("nan")
    likely = model.predict_proba(data.X_test)[np.arange(len(data.y_test)), data.y_test]
    return float(-np.log(likely.clip(1e-12)).mean())


def measure(task: tuple[str, int, Sequence[str]]) -> list[dict[str, Any]]:
    """All methods on one split."""
    name, split, chosen = task
    warnings.simplefilter("ignore")
    data, records = draw(name, split), []
    for method, fit in methods(data).items():
        if chosen and not any(part in method for part in chosen):
            continue
        start = time.process_time()
        try:
            model = fit(data)
        except ImportError:
            continue
        if not method.startswith("TPE"):  # the first fit loads what it needs
            start = time.process_time()
            fit(data)
        seconds = time.process_time() - start
        record = {"set": name, "split": split, "method": method, "error": error(model, data), "seconds": seconds}
        if method == OURS:
            record["penalty"] = model.penalty_
        records.append(record)
    return records


def run(part: str, tasks: list[Any], job: Callable[[Any], list[dict[str, Any]]], jobs: int) -> None:
    """Do all tasks, and save each when it is done; a record replaces an older one of the same key."""
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            for records in pool.imap_unordered(job, tasks):
                save(part, records)
    else:
        for task in tasks:
            save(part, job(task))


def save(part: str, records: list[dict[str, Any]]) -> None:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    table = {(r["set"], r["split"], r["method"]): r for r in [*stored.get(part, []), *records]}
    stored[part] = [table[key] for key in sorted(table)]
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    for record in records:
        print(record, flush=True)


def summary(records: list[dict[str, Any]]) -> tuple[list[list[str]], dict[str, float]]:
    """Rows of the table of errors, and the figures that matter."""
    rows, worst, gains, ratios, own = [], 0.0, [], [], []
    for name in SETS:
        mine = [r for r in records if r["set"] == name]
        if not mine:
            continue
        mean = {m: np.mean([r["error"] for r in mine if r["method"] == m]) for m in {r["method"] for r in mine}}
        seconds = {m: np.median([r["seconds"] or np.nan for r in mine if r["method"] == m]) for m in mean}
        singles = {m: mean[m] for m in SINGLE if m in mean and np.isfinite(mean[m])}
        best = min(singles, key=lambda m: singles[m])
        ratio = mean[OURS] / singles[best]
        worst, gains = max(worst, ratio), [*gains, ratio]
        ratios.append(seconds[OURS] / seconds["LassoCV"])
        own.append(seconds[OURS] / seconds["logistic ridge CV" if "logistic ridge CV" in mean else "LassoCV"])
        others = [f"{mean[m]:.3f}" if m in mean else "" for m in ("adaptive lasso", f"TPE, {TRIALS} trials")]
        first = [f"{singles[m]:.3f}" if m in singles else "" for m in SINGLE]
        joined = [first[0] or first[3], first[1] or first[4], first[2]]
        rows.append(
            [
                name,
                *joined,
                *others,
                f"**{mean[OURS]:.3f}**",
                f"{ratio - 1:+.1%}",
                f"{seconds[OURS]:.2f} s",
                f"{ratios[-1]:.1f}",
            ]
        )
    figures = {
        "worst": worst,
        "better by 5 %": sum(ratio <= 0.95 for ratio in gains),
        "median time": float(np.median(ratios)),
        "median time, own kind": float(np.median(own)),
    }
    return rows, figures


def sentence(figures: dict[str, float], count: int) -> str:
    """The figures that matter, in words."""
    return (
        f"Worst case {figures['worst'] - 1:+.1%} against the best single weight; better by 5 % or more on"
        f" {figures['better by 5 %']} of {count}; median time {figures['median time']:.1f} times `LassoCV`'s"
        f" ({figures['median time, own kind']:.1f} times that of the method for the same kind of target)."
    )


def write(page: Path, part: str, lines: list[str]) -> None:
    begin, end = f"<!-- {part}: written by benchmarks/estimators.py -->", f"<!-- end of {part} -->"
    text = page.read_text()
    head, rest = text.split(begin)
    page.write_text("\n".join([head + begin, *lines, end]) + rest.split(end)[1])


def pages() -> None:
    """Write the tables."""
    stored = json.loads(RESULTS.read_text())
    if "errors" in stored:
        rows, figures = summary([record for record in stored["errors"] if record["split"] < SEEN])
        head = [
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
        ]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]
        lines += ["", sentence(figures, len(rows))]
        fresh, figures = summary([record for record in stored["errors"] if record["split"] >= SEEN])
        if fresh:
            lines += ["", f"On splits that played no part in any choice: {sentence(figures, len(fresh))}"]
        write(DOCS / "estimators.md", "errors", lines)
        print("\n".join(lines))
    if "labels" in stored:
        lines = label_table(stored["labels"])
        write(DOCS / "label-noise.md", "labels", lines)
        print("\n".join(lines))


def label_table(records: list[dict[str, Any]]) -> list[str]:
    names = sorted({r["method"] for r in records}, key=lambda m: (not m.startswith("LabelCleaner"), m))
    lines = ["| data | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for name in dict.fromkeys(r["set"] for r in records):
        cells = []
        for method in names:
            mine = [r for r in records if r["set"] == name and r["method"] == method]
            cells.append(
                f"{np.mean([r['auc'] for r in mine]):.3f}, {np.mean([r['precision'] for r in mine]):.3f}" if mine else ""
            )
        lines.append("| " + " | ".join([name, *cells]) + " |")
    both = [[np.mean([r[key] for r in records if r["method"] == m]) for key in ("auc", "precision")] for m in names]
    return [*lines, "| mean | " + " | ".join(f"{a:.3f}, {p:.3f}" for a, p in both) + " |"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs="+", default=["errors", "labels"], choices=["errors", "labels"])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page:
        splits = range(arguments.first, arguments.first + arguments.splits)
        if "errors" in arguments.part:
            names = [name for name in SETS if arguments.only in name]
            tasks = [(name, split, arguments.methods) for name in names for split in splits]
            run("errors", tasks, measure, arguments.jobs)
        if "labels" in arguments.part:
            names = [name for name in LABELS if arguments.only in name]
            run(
                "labels",
                [(name, split, arguments.methods) for name in names for split in splits],
                judge_labels,
                arguments.jobs,
            )
    pages()


if __name__ == "__main__":
    main()
