"""The default, LVHBA and BiCGAFFA on the constrained problems of the collection: what they solve, gradients, time.

    python -m meha_lab.benchmarks.coupled [--every 1] [--steps 2000]

Prints a table in Markdown and stores it with all runs in lab/records/benchmarks/coupled.json. The first-order methods have
the best of two settings, by the error of F; a method that refuses a problem does not solve it.
"""

import argparse
import json
import statistics
import time

import torch
from meha_lab.paths import BENCHMARKS
from meha_lab.problems import collection
from meha_lab.problems.constrained.known import judge

import meha
from meha.schedules import Power

PATH = BENCHMARKS / "coupled.json"
STRICT = dict(tol=1e-3, violation=1e-6, gap=1e-5)
LOOSE = dict(tol=5e-2, violation=1e-2, gap=5e-2)
SETTINGS = [dict(step=0.01, c=1.0), dict(step=0.05, c=3.0)]
"""Step sizes of all variables, and the factor of the penalty c (k + 1)^0.3."""


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


def table(runs):
    """The lines of a table in Markdown."""
    lines = [
        "| | solved to 1e-3 | within 5 % | refused | gradients, median | Hessian-vector products, median | seconds, median |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in runs.items():
        taken = [run for run in part.values() if run["outcome"] != "refused"]
        counts = [sum(run[key] for run in taken) for key in ("strict", "loose")]
        middle = [statistics.median(run[key] for run in taken) for key in ("gradients", "products", "seconds")]
        cells = [f"{count} of {len(part)}" for count in counts] + [str(len(part) - len(taken))]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {middle[0]:,.0f} | {middle[1]:,.0f} | {middle[2]:.2g} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take one of so many problems")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the first-order methods")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = {"default": {}, "LVHBA": {}, "BiCGAFFA": {}}
    for entry in collection(group="constrained")[:: options.every]:
        problem = entry.make()
        runs["default"][entry.name] = measure(problem, None, options.steps)
        for setting in SETTINGS:
            for name, method in methods(setting).items():
                found = measure(problem, method, options.steps) | {"setting": setting}
                before = runs[name].get(entry.name)
                if before is None or found.get("error", 9e9) < before.get("error", 9e9):
                    runs[name][entry.name] = found
        print(entry.name, {name: part[entry.name].get("error", "refused") for name, part in runs.items()}, flush=True)
        lines = table(runs)
        stored = {"every": options.every, "steps": options.steps, "table": lines, "runs": runs}
        PATH.write_text(json.dumps(stored, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
