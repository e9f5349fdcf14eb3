"""Five problems of the benchmark newton: `solve` and the dense baseline in torch beside the same baseline compiled by JAX."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import meha_lab.problems
import torch
from meha_lab.benchmarks.newton_cases import CASES, clocked, dense_newton
from meha_lab.benchmarks.peers.environments import Peer

import meha

ROUNDS = 3


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


PROBLEMS: dict[str, tuple[str, Callable[[meha.Problem], dict[str, Any]]]] = {
    "ridge, diabetes, 10 penalties": ("ridge", _ridge),
    "ridge, diabetes, 65 penalties": ("ridge", _ridge),
    "kernel ridge, diabetes, 1 width": ("kernel", _named("squares", "squares_val", "b", "b_val")),
    "logistic, one weight": ("logistic", _named("margin", "margin2")),
    "quadratic, condition 1e3, large": ("quadratic", _named("H", "B", "b", "s", "t", "rho")),
}


def measure_jax(rows: dict[str, Any], only: str, save: Callable[[], Any]) -> None:
    """Processor seconds of the fastest of some runs, after a warm-up; each row is saved when it is done."""
    collection = {entry.name: entry for entry in meha_lab.problems.collection()}
    with Peer("jax", "jax_newton.py") as peer:
        rows["versions"] = {**peer.versions, "torch": torch.__version__}
        for name, (kind, data) in PROBLEMS.items():
            if only not in name:
                continue
            case: Any = CASES[name]() if name in CASES else collection[name].make()
            problem, x0, y0 = case.problem if name in CASES else case, case.x0, case.y0
            x_set = problem.x_set
            limits = None if x_set is None else (float(x_set.low), float(x_set.high))
            row: dict[str, Any] = {}
            numbers = {key: part.tolist() if isinstance(part, torch.Tensor) else part for key, part in data(problem).items()}
            row["jax"] = peer.ask(problem=kind, data=numbers, x0=x0.tolist(), y0=y0.tolist(), limits=limits, rounds=ROUNDS)
            row["torch"] = _fastest(problem, lambda p=problem, x=x0, y=y0, b=limits: dense_newton(p, x, y, b))
            row["solve"] = _fastest(problem, lambda p=problem, x=x0, y=y0: _solved(p, x, y))
            rows[name] = row
            save()
            print(name, row, flush=True)


def _solved(problem: meha.Problem, x0: torch.Tensor, y0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    solution = meha.solve(problem, x0, y0)
    return solution.x, solution.y


def _fastest(problem: meha.Problem, way: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    way()
    (x, y), seconds = min((clocked(way) for _ in range(ROUNDS)), key=lambda run: run[1])
    return {"seconds": seconds, "F": float(problem.upper(x, y))}


def table_jax(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| problem | JAX, compilation | JAX, run | torch, the same | `solve` | F in JAX, torch, `solve` |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if name != "versions":
            jax, same, own = row["jax"], row["torch"], row["solve"]
            seconds = " | ".join(f"{part:.3g} s" for part in (jax["compile"], jax["seconds"], same["seconds"], own["seconds"]))
            lines.append(f"| {name} | {seconds} | {jax['F']:.6g}, {same['F']:.6g}, {own['F']:.6g} |")
    versions = ", ".join(f"{name} {version}" for name, version in rows["versions"].items())
    return "\n".join([*lines, "", f"Fastest of {ROUNDS} runs, one thread, float64; {versions}."])
