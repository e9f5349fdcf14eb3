"""Solve the paper's five synthetic problems with three settings each; print a table and draw the convergence curves.

    python -m meha_lab.tools.five_problems [--steps 800] [--out out]

Settings: "paper", the values in the paper's table; "recipe", values with which Algorithm 1 works; "theory", values derived
from the constants of the problem; gamma, eta and p are those of the convergence theorem.
"""

import argparse
import warnings
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import meha
from meha import problems

PRESETS = ("paper", "recipe", "theory")


def error(problem, x, y):
    """Return the larger relative error of x and y; for the group lasso, the test error divided by that of y = 0."""
    if "test error" in problem.metrics:
        return problem.metrics["test error"](x, y) / problem.metrics["null error"](x, y)
    return max(problem.distance(x, y))


def solve(problem, preset, steps):
    return meha.solve(
        problem,
        problem.x0,
        problem.y0,
        problem.preset(preset),
        max_steps=steps,
        tol=None,
        callbacks=lambda run, info: {"error": error(problem, run.x, run.y)},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", meha.theory.TheoryWarning)

    toys = [
        problems.strong_convex(100),
        problems.merely_convex(10),
        problems.sine(10),
        problems.lasso(100),
        problems.group_lasso(600),
    ]
    console = Console()
    table = Table(title=f"MEHA, at most {options.steps} steps", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("problem", no_wrap=True)
    for heading in ("error", "gap", "residual", "steps", "grad F/f", "time"):
        table.add_column(heading, justify="right")
    table.add_column("status")

    figure = Figure(figsize=(15, 3.4), layout="constrained")
    axes = figure.subplots(1, len(toys))
    with console.status("") as status:
        for problem, axis in zip(toys, axes, strict=True):
            table.add_row(problem.name, style="bold")
            for preset in PRESETS:
                status.update(f"{problem.name}: {preset}")
                solution = solve(problem, preset, options.steps)
                diagnosis = solution.diagnose()
                style = "red" if solution.status in (meha.Status.DIVERGED, meha.Status.NON_FINITE) else None
                table.add_row(
                    f"  {preset}",
                    f"{error(problem, solution.x, solution.y):.2g}",
                    f"{diagnosis.gap:.1e}",
                    f"{diagnosis.residual:.1e}",
                    str(solution.steps),
                    f"{solution.counts.upper}/{solution.counts.lower}",
                    f"{solution.seconds:.1f} s",
                    str(solution.status),
                    style=style,
                )
                dashed = "--" if preset == "recipe" else "-"
                axis.plot(solution.history["step"], solution.history["error"], dashed, label=preset)
            axis.set_title(problem.name)
            axis.set_xlabel("step")
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("error")
    axes[0].legend()

    console.print(table)
    console.print(
        "error: the larger relative error of x and y; for the group lasso, the test\n"
        "error divided by that of y = 0. gap: f + g minus its Moreau envelope.\n"
        "residual: stationarity of the penalised problem. Settings: the paper's\n"
        "table, a recipe that works, and values from the convergence theorem."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("five_problems.png", "five_problems.svg"):
        figure.savefig(options.out / name, dpi=130)
    console.print(f"Convergence curves: {options.out / 'five_problems.png'}")


if __name__ == "__main__":
    main()
