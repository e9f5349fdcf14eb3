"""The default beside hand-written solvers, on users' problems and on the collection.

    OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.newton [--part cases collection hessians jax] [--only lasso]
        [--before FOLDER]

Times are processor seconds of one run, after a warm-up; those of one row are taken one after another, so that ratios hold on a
busy machine. ``--before`` also runs the default of another version, whose package lies in FOLDER, for at most 60 s on each
problem. Results go to lab/records/benchmarks/newton.json (--page: without a run), the tables to docs/newton.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import meha_lab.problems
import torch
from meha_lab.benchmarks.newton_cases import CASES, F64, clocked, dense_newton
from meha_lab.benchmarks.newton_jax import measure_jax, table_jax
from meha_lab.paths import BENCHMARKS, DOCS
from torch.func import hessian, jacrev, vmap

import meha
from meha.sets import Box, NonNegative

RESULTS = BENCHMARKS / "newton.json"
PAGE = DOCS / "newton.md"
BEGIN, END = "<!-- table: written by python -m meha_lab.benchmarks.newton -->", "<!-- end of table -->"
BEGIN_JAX = "<!-- table of JAX: written by python -m meha_lab.benchmarks.newton --part jax -->"
STOPPED = str(meha.Status.STOPPED)
ROUNDS = 5
UNVERIFIED = meha.Continuation(verify=False)
LONGEST = 60.0
"""Seconds after which a run is stopped."""


class Limit:
    """Ends a run after some processor seconds."""

    def __init__(self, seconds: float) -> None:
        self.last = time.process_time() + seconds

    def __call__(self, run: meha.Run, info: meha.StepInfo) -> meha.Verdict | None:
        return meha.Verdict(meha.Status.STOPPED, "out of time") if time.process_time() > self.last else None


def outcome(problem: meha.Problem, x0: torch.Tensor, y0: torch.Tensor, method: meha.Method | None = None) -> dict[str, Any]:
    """One run of a method, or of the default."""
    solution, seconds = clocked(lambda: meha.solve(problem, x0, y0, method, max_steps=100_000, callbacks=Limit(LONGEST)))
    counts = solution.counts
    return {
        "seconds": seconds,
        "F": solution.upper,
        "status": str(solution.status),
        "steps": solution.steps,
        "work": [counts.upper, counts.lower, counts.hvp],
        "time": solution.report.get("time", ""),
        "engine": solution.report.get("engine", ""),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "x": solution.x,
        "y": solution.y,
    }


def by_another_way(problem: meha.Problem, way: Any) -> dict[str, Any]:
    (x, y), seconds = clocked(way)
    return {"seconds": seconds, "F": float(problem.upper(x, y))}


def measure_cases(results: dict[str, Any], only: str, before: str) -> None:
    """Each row is saved when it is done."""
    for name in ("ridge, diabetes, 10 penalties", "elastic net 100 x 300, 300 weights"):  # first calls load parts of torch
        case = CASES[name]()
        case.by_hand()
        outcome(case.problem, case.x0, case.y0)
    for name, make in CASES.items():
        if only not in name:
            continue
        case = make()
        row = results.setdefault("cases", {}).setdefault(name, {})
        row["solve"] = _plain(outcome(case.problem, case.x0, case.y0))
        row["unverified"] = _plain(outcome(case.problem, case.x0, case.y0, UNVERIFIED))
        row["by hand"] = by_another_way(case.problem, case.by_hand)
        row["others"] = {other: by_another_way(case.problem, way) for other, way in case.others.items()}
        if "lasso" in name:
            row["others"]["IGJO"] = _plain(outcome(case.problem, case.x0, case.y0, meha.IGJO()))
        if before:
            row["before"] = _elsewhere(before, name)
        save(results)
        print(name, row, flush=True)


def save(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _elsewhere(folder: str, name: str) -> dict[str, Any]:
    """A run of the default of another version, in a process of its own."""
    command = [sys.executable, __file__, "--alone", name]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bounds_of(problem: meha.Problem) -> tuple[Any, Any] | None:
    """The bounds of X; None if X is another set."""
    if isinstance(problem.x_set, Box):
        return problem.x_set.low, problem.x_set.high
    if isinstance(problem.x_set, NonNegative):
        return 0.0, torch.inf
    return (-torch.inf, torch.inf) if problem.x_set is None else None


def measure_collection(only: str) -> dict[str, Any]:
    """The gentle problems, with the dense baseline where it can be used, and with the first-order engine alone."""
    rows = {}
    for entry in meha_lab.problems.collection():
        if only not in entry.name:
            continue
        problem = entry.make()
        row: dict[str, Any] = {}
        first_order = meha.Continuation(second_order=False)
        for kind, method in (("solve", None), ("unverified", UNVERIFIED), ("first order", first_order)):
            run = outcome(problem, problem.x0, problem.y0, method)
            row[kind] = {**_plain(run), "error": problem.error(run["x"], run["y"])}
        limits = bounds_of(problem)
        if problem.nonsmooth is None and problem.y_set is None and limits is not None:
            try:
                (x, y), seconds = clocked(lambda p=problem, b=limits: dense_newton(p, p.x0, p.y0, b))
                row["by hand"] = {"seconds": seconds, "error": problem.error(x, y)}
            except (RuntimeError, ValueError) as error:
                row["by hand"] = {"status": f"failed: {error}"}
        rows[entry.name] = row
        print(entry.name, row, flush=True)
    return rows


def measure_hessians() -> dict[str, Any]:
    """Ways to a dense Hessian of a logistic loss, in milliseconds."""
    rows = {}
    for n, m in ((10, 300), (65, 300), (300, 500), (1000, 1000), (2000, 2000)):
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(m, n, dtype=F64, generator=generator)

        def f(y: torch.Tensor, A: torch.Tensor = A) -> torch.Tensor:
            return torch.nn.functional.softplus(A @ y).mean() + y.square().sum()

        y, eye = torch.full((n,), 0.1, dtype=F64), torch.eye(n, dtype=F64)

        def graph(f: Any = f, y: Any = y) -> tuple[torch.Tensor, torch.Tensor]:
            at = y.clone().requires_grad_()
            return at, torch.autograd.grad(f(at), at, create_graph=True)[0]

        def batched(graph: Any = graph, eye: Any = eye) -> torch.Tensor:
            at, gradient = graph()
            return torch.autograd.grad(gradient, at, eye, is_grads_batched=True)[0]

        def mapped(graph: Any = graph, eye: Any = eye) -> torch.Tensor:
            at, gradient = graph()
            return vmap(lambda row: torch.autograd.grad(gradient, at, row, retain_graph=True)[0])(eye)

        def product(graph: Any = graph, eye: Any = eye) -> torch.Tensor:
            at, gradient = graph()
            return torch.autograd.grad(gradient, at, eye[0])[0]

        ways = {"gradient": graph, "one product": product, "vmap of backward passes": mapped}
        if n <= 1000:
            ways |= {
                "is_grads_batched": batched,
                "torch.func.hessian": lambda f=f, y=y: hessian(f)(y),
                "jacrev of jacrev": lambda f=f, y=y: jacrev(jacrev(f))(y),
            }
        ways["Cholesky"] = lambda A=A, eye=eye: torch.linalg.cholesky(A.T @ A + eye)
        rows[str(n)] = {}
        for name, way in ways.items():
            way()
            rows[str(n)][name] = 1e3 * statistics.median(clocked(way)[1] for _ in range(ROUNDS))
        print(n, rows[str(n)], flush=True)
    return rows


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("x", "y")}


def table(cases: dict[str, Any]) -> str:
    """The results on users' problems as Markdown."""
    lines = [
        "| problem | by hand | unverified | | `solve` | | before | F by hand, unverified, `solve`, before | others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in cases.items():
        if "solve" not in row:
            continue
        hand, own, before = row["by hand"], row["solve"], row.get("before", {})
        quick = row["unverified"]
        ratio, quickly = (f"{part['seconds'] / hand['seconds']:.2g} times" for part in (own, quick))
        past = f"{before['seconds']:.3g} s, {before['status']}" if before else ""
        values = ", ".join(f"{part['F']:.6g}" for part in (hand, quick, own, before) if part)
        others = "; ".join(f"{other} {part['seconds']:.3g} s, F {part['F']:.6g}" for other, part in row["others"].items())
        times = f"{hand['seconds']:.3f} s | {quick['seconds']:.3f} s | {quickly} | {own['seconds']:.3f} s, {own['status']}"
        lines.append(f"| {name} | {times} | {ratio} | {past} | {values} | {others} |")
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """The results on the collection, and the Hessians."""
    lines = []
    rows = {name: row for name, row in results.get("collection", {}).items() if "solve" in row}
    for kind in ("solve", "unverified", "first order", "by hand"):
        for part, names in (("all", set(rows)), ("of the baseline", {name for name in rows if "by hand" in rows[name]})):
            chosen = [rows[name][kind] for name in names if "error" in rows[name].get(kind, {})]
            solved = [sum(row["error"] <= level for row in chosen) for level in (1e-3, 1e-5)]
            if chosen:
                middle = statistics.median(row["seconds"] for row in chosen)
                lines.append(
                    f"- {kind}, {part}: {solved[0]} and {solved[1]} of {len(names)} to 1e-3 and 1e-5, median {middle:.3f} s"
                )
    for own, other in (("solve", "by hand"), ("unverified", "by hand"), ("solve", "first order")):
        both = [
            row[own]["seconds"] / row[other]["seconds"]
            for row in rows.values()
            if max(row.get(kind, {}).get("error", 1) for kind in (own, other)) <= 1e-3
        ]
        if both:
            lines.append(
                f"- time of {own} by that of {other}, where both solve: median {statistics.median(both):.2g} ({len(both)})"
            )
    for n, row in results.get("hessians", {}).items():
        lines.append(f"- n = {n}: " + ", ".join(f"{name} {value:.3g} ms" for name, value in row.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", default=["cases", "collection", "hessians"])
    parser.add_argument("--only", default="", help="problems with this in their name")
    parser.add_argument("--before", default="", help="the folder of another version of the package")
    parser.add_argument("--page", action="store_true", help="write the stored results to the page")
    parser.add_argument("--alone", default="", help="run the default on one problem, and print the result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.alone:
        case = CASES[arguments.alone]()
        print(json.dumps(_plain(outcome(case.problem, case.x0, case.y0))))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in [] if arguments.page else arguments.part:
        if part == "cases":
            measure_cases(results, arguments.only, arguments.before)
        elif part == "collection":
            results.setdefault(part, {}).update(measure_collection(arguments.only))
        elif part == "jax":
            measure_jax(results.setdefault(part, {}), arguments.only, lambda: save(results))
        else:
            results[part] = measure_hessians()
        save(results)
    for begin, part, write in ((BEGIN, "cases", table), (BEGIN_JAX, "jax", table_jax)):
        if part in results:
            before, _, rest = PAGE.read_text().partition(begin)
            PAGE.write_text(before + begin + "\n" + write(results[part]) + "\n" + END + rest.partition(END)[2])
    print(summary(results))


if __name__ == "__main__":
    main()
