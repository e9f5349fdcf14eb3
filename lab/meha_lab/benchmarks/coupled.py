"""The default, LVHBA and BiCGAFFA on the constrained problems of the collection: what they solve, gradients, time.

    python -m meha_lab.benchmarks.coupled [--every 1] [--steps 2000]

Prints a table in Markdown, from the records of lab/records/coupled.jsonl. The first-order methods have the best of two
settings, by the error of F; a method that refuses a problem does not solve it.
"""

import argparse
import math
import statistics
import time

import torch
from meha_lab import pages
from meha_lab.paths import RECORDS
from meha_lab.problems import collection
from meha_lab.problems.constrained.known import judge
from meha_lab.store import Store

import meha
from meha.problem.schedules import Power

STRICT = dict(tol=1e-3, violation=1e-6, gap=1e-5)
LOOSE = dict(tol=5e-2, violation=1e-2, gap=5e-2)
SETTINGS = [dict(step=0.01, c=1.0), dict(step=0.05, c=3.0)]
"""Step sizes of all variables, and the factor of the penalty c (k + 1)^0.3."""

MEDIANS = {"gradients": ("gradients", ",.0f"), "Hessian-vector products": ("products", ",.0f"), "seconds": ("seconds", ".2g")}
"""Columns: the field of a record, and how it is shown."""


def methods(setting):
    step, c = setting["step"], Power(setting["c"], p=0.3)
    return {
        "LVHBA": meha.LVHBA(alpha=step, beta=step, eta=step, c=c),
        "BiCGAFFA": meha.BiCGAFFA(alpha=step, eta=step, c=c),
    }


def measure(problem, method, steps):
    begin = time.process_time()
    try:
        if method is None:
            solution = meha.solve(problem, problem.x0, problem.y0)
        else:
            solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None)
    except ValueError as error:
        return dict(outcome="refused", why=str(error)[:100])
    judged = judge(problem, solution.x, solution.y)
    finite = judged.upper == judged.upper
    return dict(
        outcome=solution.status.value,
        error=judged.upper if finite else float("inf"),
        violation=judged.violation,
        gap=judged.gap,
        strict=judged.right(**STRICT),
        loose=judged.right(**LOOSE),
        gradients=solution.counts.lower + solution.counts.upper,
        products=solution.counts.hvp,
        seconds=time.process_time() - begin,
    )


HEAD = ("", "solved to 1e-3", "within 5 %", "refused", *(f"{each}, median" for each in MEDIANS))


def table(store):
    """The runs with the same options as the last one, by method."""
    rows, runs = [], store.records("coupled", alike="options")
    for name in dict.fromkeys(run["method"] for run in runs):
        part = [run for run in runs if run["method"] == name]
        taken = [run for run in part if run["outcome"] != "refused"]
        solved = [f"{sum(run[key] for run in taken)} of {len(part)}" for key in ("strict", "loose")]
        middle = [f"{statistics.median(run[key] for run in taken):{form}}" for key, form in MEDIANS.values()]
        rows.append([f"`{name}`", *solved, str(len(part) - len(taken)), *middle])
    return pages.markdown(HEAD, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take every n-th problem")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the first-order methods")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(RECORDS)
    for entry in collection(group="constrained")[:: options.every]:
        problem = entry.make()
        runs = {"default": measure(problem, None, options.steps)}
        for setting in SETTINGS:
            for name, method in methods(setting).items():
                found = measure(problem, method, options.steps) | {"setting": setting}
                if name not in runs or found.get("error", math.inf) < runs[name].get("error", math.inf):
                    runs[name] = found
        for name, run in runs.items():
            store.add(
                "coupled", f"{name}, {entry.name}", {"method": name, "problem": entry.name, **run, "options": vars(options)}
            )
        print(entry.name, {name: run.get("error", "refused") for name, run in runs.items()}, flush=True)
    print("\n".join(table(store)))


if __name__ == "__main__":
    main()
