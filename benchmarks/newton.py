"""Newton beside hand-written solvers and the default, on users' problems and on the tuning half of the collection.

    OMP_NUM_THREADS=1 python benchmarks/newton.py [--part cases collection hessians default] [--limit 60] [--page]

Times are processor seconds of one run, after a warm-up; those of one row are taken one after another, so that ratios hold on a
busy machine. Results go to benchmarks/results/newton.json (--page: without a run), the first table to docs/newton.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from newton_cases import CASES, F64, clocked, dense_newton
from torch.func import hessian, jacrev, vmap

import meha
from meha.sets import Box, NonNegative

RESULTS = Path(__file__).resolve().parent / "results/newton.json"
PAGE = Path(__file__).resolve().parent.parent / "docs/newton.md"
BEGIN, END = "<!-- table: written by benchmarks/newton.py -->", "<!-- end of table -->"
STOPPED = str(meha.Status.STOPPED)
ROUNDS = 5
LONGEST = 60.0
"""Seconds after which a run of Newton is stopped."""


class Limit:
    """Ends a run after some processor seconds."""

    def __init__(self, seconds: float) -> None:
        self.last = time.process_time() + seconds

    def __call__(self, run: meha.Run, info: meha.StepInfo) -> meha.Verdict | None:
        return meha.Verdict(meha.Status.STOPPED, "out of time") if time.process_time() > self.last else None


def outcome(
    problem: meha.Problem, x0: torch.Tensor, y0: torch.Tensor, method: meha.Method | None, limit: float
) -> dict[str, Any]:
    """One run of a method, or of the default."""
    solution, seconds = clocked(lambda: meha.solve(problem, x0, y0, method, max_steps=100_000, callbacks=Limit(limit)))
    counts = solution.counts
    return {
        "seconds": seconds,
        "F": solution.upper,
        "status": str(solution.status),
        "steps": solution.steps,
        "work": [counts.upper, counts.lower, counts.hvp],
        "time": solution.report.get("time", ""),
        "x": solution.x,
        "y": solution.y,
    }


def measure_cases(before: dict[str, Any]) -> dict[str, Any]:
    for name in ("ridge, diabetes, 10 penalties", "elastic net 100 x 300, 300 weights"):  # first calls load parts of torch
        case = CASES[name]()
        case.by_hand()
        outcome(case.problem, case.x0, case.y0, meha.Newton(), LONGEST)
    rows = {}
    for name, make in CASES.items():
        case = make()
        (x, y), seconds = clocked(case.by_hand)
        hand = {"seconds": seconds, "F": float(case.problem.upper(x, y))}
        newton = _plain(outcome(case.problem, case.x0, case.y0, meha.Newton(), LONGEST))
        rows[name] = {**before.get(name, {}), "by hand": hand, "Newton": newton}
        print(name, hand, newton, flush=True)
    return rows


def measure_default(results: dict[str, Any], limit: float) -> None:
    """The default on the cases, saved row by row, for it takes long."""
    for name, make in CASES.items():
        case = make()
        row = _plain(outcome(case.problem, case.x0, case.y0, meha.Continuation(), limit))
        results.setdefault("cases", {}).setdefault(name, {})["Continuation"] = row
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, row, flush=True)


def bounds_of(problem: meha.Problem) -> tuple[Any, Any] | None:
    """The bounds of X; None if X is another set."""
    if isinstance(problem.x_set, Box):
        return problem.x_set.low, problem.x_set.high
    if isinstance(problem.x_set, NonNegative):
        return 0.0, torch.inf
    return (-torch.inf, torch.inf) if problem.x_set is None else None


def measure_collection() -> dict[str, Any]:
    rows = {}
    for entry in meha.problems.collection("tuning"):
        problem = entry.make()
        row: dict[str, Any] = {}
        try:
            run = outcome(problem, problem.x0, problem.y0, meha.Newton(), LONGEST)
            row["Newton"] = {**_plain(run), "error": problem.error(run["x"], run["y"])}
        except ValueError as error:
            row["Newton"] = {"status": f"refused: {error}"}
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
        "| problem | by hand | `Newton` | | `Continuation` | F by hand, `Newton`, `Continuation` |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in cases.items():
        hand, newton, default = row["by hand"], row["Newton"], row.get("Continuation", {})
        ratio = f"{newton['seconds'] / hand['seconds']:.2g} times"
        other = f"{default['seconds']:.3g} s, {default['status']}" if default else ""
        other = "stopped" if default.get("status") == STOPPED else other
        values = ", ".join(f"{part['F']:.6g}" for part in (hand, newton, default) if part.get("status") != STOPPED and part)
        times = f"{hand['seconds']:.3f} s | {newton['seconds']:.3f} s, {newton['status']}"
        lines.append(f"| {name} | {times} | {ratio} | {other} | {values} |")
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """The results on the collection, and the Hessians."""
    lines = []
    if "collection" in results:
        rows = results["collection"]
        for kind in ("Newton", "by hand"):
            done = {name: row[kind] for name, row in rows.items() if "error" in row.get(kind, {})}
            for part, names in (("all", set(rows)), ("of the baseline", {name for name in rows if "by hand" in rows[name]})):
                chosen = [row for name, row in done.items() if name in names]
                solved = [sum(row["error"] <= level for row in chosen) for level in (1e-3, 1e-5)]
                if chosen:
                    middle = statistics.median(row["seconds"] for row in chosen)
                    lines.append(
                        f"{kind}, {part}: {solved[0]} and {solved[1]} of {len(names)} to 1e-3 and 1e-5, median {middle:.3f} s"
                    )
        both = [
            row["Newton"]["seconds"] / row["by hand"]["seconds"]
            for row in rows.values()
            if max(row.get("by hand", {}).get("error", 1), row["Newton"].get("error", 1)) <= 1e-3
        ]
        lines.append(
            f"Newton's time by the baseline's where both solve: median {statistics.median(both):.2f} ({len(both)} problems)"
        )
    for n, row in results.get("hessians", {}).items():
        lines.append(f"n = {n}: " + ", ".join(f"{name} {value:.3g} ms" for name, value in row.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", default=["cases", "collection", "hessians"], help="the default method takes long")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the default on each problem")
    parser.add_argument("--page", action="store_true", help="write the stored results to the page")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.page:
        for part in arguments.part:
            if part == "default":
                measure_default(results, arguments.limit)
            elif part == "cases":
                results[part] = measure_cases(results.get("cases", {}))
            else:
                results[part] = measure_hessians() if part == "hessians" else measure_collection()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if "cases" in results:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + table(results["cases"]) + "\n" + END + rest.partition(END)[2])
    print(summary(results))


if __name__ == "__main__":
    main()
