"""The default beside hand-written solvers, on users' problems and on the collection.

    OMP_NUM_THREADS=1 python -m meha_lab.benchmarks.newton [--part cases collection hessians jax] [--only lasso]
        [--before FOLDER]

Times are processor seconds of one run, after a warm-up; those of one row are taken one after another, so that ratios hold on a
busy machine. ``--before`` also runs the default of another version, whose package lies in FOLDER, for at most 60 s on each
problem. The part "jax" has five problems: `solve` and the dense baseline in torch beside the same baseline compiled by JAX.
Each problem is a record of lab/records/newton.jsonl, written when it is measured; the tables go to docs/newton.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import Any

import meha_lab.problems
import torch
from meha_lab import pages
from meha_lab.baselines import IGJO
from meha_lab.benchmarks.newton_cases import CASES, F64, clocked, dense_newton
from meha_lab.benchmarks.peers.environments import Peer
from meha_lab.paths import RECORDS
from meha_lab.store import Record, Store
from torch import Tensor
from torch.func import hessian, jacrev, vmap

import meha
from meha.problem.sets import Box, NonNegative

PARTS = ["cases", "collection", "hessians", "jax"]
ROUNDS, ROUNDS_OF_JAX = 5, 3
UNVERIFIED = meha.Default(verify=False)
LONGEST = 60.0
"""Seconds after which a run is stopped."""


class Limit:
    """Ends a run after some processor seconds."""

    def __init__(self, seconds: float) -> None:
        self.last = time.process_time() + seconds

    def __call__(self, run: meha.Run, info: meha.StepInfo) -> meha.Verdict | None:
        return meha.Verdict(meha.Status.STOPPED, "out of time") if time.process_time() > self.last else None


def outcome(problem: meha.Problem, x0: Tensor, y0: Tensor, method: meha.Method | None = None) -> dict[str, Any]:
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


Measured = Iterator[tuple[str, dict[str, Any]]]
"""The name of each problem, and what was measured there."""


def measure_cases(only: str, before: str) -> Measured:
    for name in ("ridge, diabetes, 10 penalties", "elastic net 100 x 300, 300 weights"):  # first calls load parts of torch
        case = CASES[name]()
        case.by_hand()
        outcome(case.problem, case.x0, case.y0)
    for name, make in CASES.items():
        if only not in name:
            continue
        case = make()
        row: dict[str, Any] = {
            "solve": _plain(outcome(case.problem, case.x0, case.y0)),
            "unverified": _plain(outcome(case.problem, case.x0, case.y0, UNVERIFIED)),
            "by hand": by_another_way(case.problem, case.by_hand),
            "others": {other: by_another_way(case.problem, way) for other, way in case.others.items()},
        }
        if "lasso" in name:
            row["others"]["IGJO"] = _plain(outcome(case.problem, case.x0, case.y0, IGJO()))
        if before:
            row["before"] = _elsewhere(before, name)
        yield name, row


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


def measure_collection(only: str) -> Measured:
    """The gentle problems, with the dense baseline where it can be used, and with the first-order engine alone."""
    for entry in meha_lab.problems.collection():
        if only not in entry.name:
            continue
        problem = entry.make()
        row: dict[str, Any] = {}
        first_order = meha.Default(second_order=False)
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
        yield entry.name, row


def measure_hessians() -> Measured:
    """Ways to a dense Hessian of a logistic loss, in milliseconds."""
    for n, m in ((10, 300), (65, 300), (300, 500), (1000, 1000), (2000, 2000)):
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(m, n, dtype=F64, generator=generator)

        def f(y: Tensor, A: Tensor = A) -> Tensor:
            return torch.nn.functional.softplus(A @ y).mean() + y.square().sum()

        y, eye = torch.full((n,), 0.1, dtype=F64), torch.eye(n, dtype=F64)

        def graph(f: Any = f, y: Any = y) -> tuple[Tensor, Tensor]:
            at = y.clone().requires_grad_()
            return at, torch.autograd.grad(f(at), at, create_graph=True)[0]

        def batched(graph: Any = graph, eye: Any = eye) -> Tensor:
            at, gradient = graph()
            return torch.autograd.grad(gradient, at, eye, is_grads_batched=True)[0]

        def mapped(graph: Any = graph, eye: Any = eye) -> Tensor:
            at, gradient = graph()
            return vmap(lambda row: torch.autograd.grad(gradient, at, row, retain_graph=True)[0])(eye)

        def product(graph: Any = graph, eye: Any = eye) -> Tensor:
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
        spent = {}
        for name, way in ways.items():
            way()
            spent[name] = 1e3 * statistics.median(clocked(way)[1] for _ in range(ROUNDS))
        yield str(n), {"ms": spent}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("x", "y")}


def _closed_over(*functions: Callable[..., Any]) -> dict[str, Any]:
    """The data of objectives, by their names there."""
    return {name: value for function in functions for name, value in getclosurevars(function).nonlocals.items()}


def _ridge(problem: meha.Problem) -> dict[str, Any]:
    found = _closed_over(problem.upper, problem.lower)
    training, validation = found["training"], found["validation"]
    return {"A": training.A, "b": training.b, "A_val": validation.A, "b_val": validation.b}


def _named(*names: str) -> Callable[[meha.Problem], dict[str, Any]]:
    def data(problem: meha.Problem) -> dict[str, Any]:
        found = _closed_over(problem.upper, problem.lower)
        return {name: found[name] if name in found else found[f"{name}_"] for name in names}

    return data


JAX_PROBLEMS: dict[str, tuple[str, Callable[[meha.Problem], dict[str, Any]]]] = {
    "ridge, diabetes, 10 penalties": ("ridge", _ridge),
    "ridge, diabetes, 65 penalties": ("ridge", _ridge),
    "kernel ridge, diabetes, 1 width": ("kernel", _named("squares", "squares_val", "b", "b_val")),
    "logistic, one weight": ("logistic", _named("margin", "margin2")),
    "quadratic, condition 1e3, large": ("quadratic", _named("H", "B", "b", "s", "t", "rho")),
}


def measure_jax(only: str) -> Measured:
    """Processor seconds of the fastest of some runs, after a warm-up."""
    collection = {entry.name: entry for entry in meha_lab.problems.collection()}
    with Peer("jax", "jax_newton.py") as peer:
        versions = {**peer.versions, "torch": torch.__version__}
        for name, (kind, data) in JAX_PROBLEMS.items():
            if only not in name:
                continue
            case: Any = CASES[name]() if name in CASES else collection[name].make()
            problem, x0, y0 = case.problem if name in CASES else case, case.x0, case.y0
            x_set = problem.x_set
            limits = None if x_set is None else (float(x_set.low), float(x_set.high))
            row: dict[str, Any] = {}
            numbers = {key: part.tolist() if isinstance(part, Tensor) else part for key, part in data(problem).items()}
            row["jax"] = peer.ask(
                problem=kind, data=numbers, x0=x0.tolist(), y0=y0.tolist(), limits=limits, rounds=ROUNDS_OF_JAX
            )
            row["torch"] = _fastest(problem, lambda p=problem, x=x0, y=y0, b=limits: dense_newton(p, x, y, b))
            row["solve"] = _fastest(problem, lambda p=problem, x=x0, y=y0: _solved(p, x, y))
            yield name, {**row, "versions": versions}


def _solved(problem: meha.Problem, x0: Tensor, y0: Tensor) -> tuple[Tensor, Tensor]:
    solution = meha.solve(problem, x0, y0)
    return solution.x, solution.y


def _fastest(problem: meha.Problem, way: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, float]:
    way()
    (x, y), seconds = min((clocked(way) for _ in range(ROUNDS_OF_JAX)), key=lambda run: run[1])
    return {"seconds": seconds, "F": float(problem.upper(x, y))}


def measured(store: Store, part: str) -> dict[str, Record]:
    """The records of a part, by the name of the problem."""
    return {record["name"]: record for record in store.records("newton") if record["part"] == part}


def cases_table(store: Store) -> list[str]:
    """Users' problems."""
    rows = []
    for name, row in measured(store, "cases").items():
        hand, own, quick, before = row["by hand"], row["solve"], row["unverified"], row.get("before", {})
        quickly, ratio = (f"{part['seconds'] / hand['seconds']:.2g} times" for part in (quick, own))
        past = f"{before['seconds']:.3g} s, {before['status']}" if before else ""
        values = ", ".join(f"{part['F']:.6g}" for part in (hand, quick, own, before) if part)
        others = "; ".join(f"{other} {part['seconds']:.3g} s, F {part['F']:.6g}" for other, part in row["others"].items())
        times = [f"{part['seconds']:.3f} s" for part in (hand, quick, own)]
        rows.append([name, *times[:2], quickly, f"{times[2]}, {own['status']}", ratio, past, values, others])
    return pages.markdown(HEAD, rows)


def jax_table(store: Store) -> list[str]:
    """The problems that JAX has too."""
    rows, versions = [], {}
    for name, row in measured(store, "jax").items():
        jax, same, own, versions = row["jax"], row["torch"], row["solve"], row["versions"]
        seconds = (jax["compile"], jax["seconds"], same["seconds"], own["seconds"])
        rows.append([name, *(f"{part:.3g} s" for part in seconds), f"{jax['F']:.6g}, {same['F']:.6g}, {own['F']:.6g}"])
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*pages.markdown(HEAD_OF_JAX, rows), "", f"Fastest of {ROUNDS_OF_JAX} runs, one thread, float64; {shown}."]


HEAD = ("problem", "by hand", "unverified", "", "`solve`", "", "before", "F by hand, unverified, `solve`, before", "others")
HEAD_OF_JAX = ("problem", "JAX, compilation", "JAX, run", "torch, the same", "`solve`", "F in JAX, torch, `solve`")
TABLES: pages.Tables = {"newton": ("newton.md", cases_table), "newton in JAX": ("newton.md", jax_table)}


def _error(row: Record) -> float:
    """The error of a run; infinite where it has none, or one that is not finite."""
    return math.inf if row.get("error") is None else float(row["error"])


def summary(store: Store) -> str:
    """The results on the collection, and the Hessians."""
    lines, rows = [], measured(store, "collection")
    for kind in ("solve", "unverified", "first order", "by hand"):
        for part, names in (("all", set(rows)), ("of the baseline", {name for name in rows if "by hand" in rows[name]})):
            chosen = [rows[name][kind] for name in names if "error" in rows[name].get(kind, {})]
            solved = [sum(_error(row) <= level for row in chosen) for level in (1e-3, 1e-5)]
            if chosen:
                middle = statistics.median(row["seconds"] for row in chosen)
                lines.append(
                    f"- {kind}, {part}: {solved[0]} and {solved[1]} of {len(names)} to 1e-3 and 1e-5, median {middle:.3f} s"
                )
    for own, other in (("solve", "by hand"), ("unverified", "by hand"), ("solve", "first order")):
        both = [
            row[own]["seconds"] / row[other]["seconds"]
            for row in rows.values()
            if max(_error(row.get(kind, {})) for kind in (own, other)) <= 1e-3
        ]
        if both:
            lines.append(
                f"- time of {own} by that of {other}, where both solve: median {statistics.median(both):.2g} ({len(both)})"
            )
    for n, row in measured(store, "hessians").items():
        lines.append(f"- n = {n}: " + ", ".join(f"{name} {value:.3g} ms" for name, value in row["ms"].items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", default=PARTS[:3], choices=PARTS)
    parser.add_argument("--only", default="", help="problems with this in their name")
    parser.add_argument("--before", default="", help="the folder of another version of the package")
    parser.add_argument("--alone", default="", help="run the default on one problem, and print the result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.alone:
        case = CASES[arguments.alone]()
        print(json.dumps(_plain(outcome(case.problem, case.x0, case.y0))))
        return
    store, only = Store(RECORDS), arguments.only
    parts: dict[str, Callable[[], Measured]] = {
        "cases": lambda: measure_cases(only, arguments.before),
        "collection": lambda: measure_collection(only),
        "hessians": measure_hessians,
        "jax": lambda: measure_jax(only),
    }
    for part in arguments.part:
        known = measured(store, part)
        for name, row in parts[part]():
            kept = {key: value for key, value in known.get(name, {}).items() if key == "before"}
            store.add("newton", f"{part}, {name}", {"part": part, "name": name, **kept, **row})
            print(name, row, flush=True)
    pages.draw(TABLES)
    print(summary(store))


if __name__ == "__main__":
    main()
