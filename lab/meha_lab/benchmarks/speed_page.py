"""What python -m meha_lab.benchmarks.speed found: stored, as a table in docs/speed.md, and as a figure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from meha_lab.paths import BENCHMARKS, DOCS, ROOT

PAGE, PICTURE = DOCS / "speed.md", ROOT / "out/pages/speed.png"

Kind = Literal["cpu", "gpu"]
KINDS: tuple[Kind, ...] = ("cpu", "gpu")


class Row(TypedDict):
    """A ratio: 20 % quantile, median and 80 % quantile; the median seconds of both; and the goal, such as [">=", 10]."""

    part: str
    what: str
    ratio: list[float]
    seconds: list[float]
    goal: list[Any]


@dataclass(frozen=True)
class Results:
    """The rows of a machine, and what the figure shows."""

    kind: Kind
    about: dict[str, str]
    rows: list[Row]
    curves: dict[str, Any]

    def updated(self, about: dict[str, str], rows: list[Row], curves: dict[str, Any]) -> Results:
        """With parts measured again; what was measured on another machine or with other versions is dropped."""
        if about != self.about:
            return Results(self.kind, about, rows, curves)
        new = {row["part"] for row in rows}
        order = list(dict.fromkeys(row["part"] for row in [*self.rows, *rows]))
        found = [row for row in self.rows if row["part"] not in new] + rows
        return Results(self.kind, about, sorted(found, key=lambda row: order.index(row["part"])), {**self.curves, **curves})


def path(kind: Kind) -> Path:
    return BENCHMARKS / {"cpu": "speed.json", "gpu": "speed-gpu.json"}[kind]


def load(kind: Kind) -> Results:
    """What was measured so far."""
    found = json.loads(path(kind).read_text()) if path(kind).exists() else {"about": {}, "rows": [], "curves": {}}
    return Results(kind, **found)


def save(results: Results) -> None:
    """Write the results, a line for each row and each curve."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in results.rows)
    curves = ",\n".join(f"  {json.dumps(name)}: {json.dumps(curve)}" for name, curve in results.curves.items())
    text = f'{{\n "about": {json.dumps(results.about)},\n "rows": [\n{rows}\n ],\n "curves": {{\n{curves}\n }}\n}}\n'
    path(results.kind).parent.mkdir(exist_ok=True)
    path(results.kind).write_text(text)


# The table


def met(row: Row) -> bool | None:
    """Whether the median meets the goal; None without one."""
    if not row["goal"]:
        return None
    sense, number = row["goal"]
    return bool(row["ratio"][1] >= number if sense == ">=" else row["ratio"][1] <= number)


def number(value: float) -> str:
    """Three digits, in full.

    >>> number(0.5123), number(12.34), number(2463.9)
    ('0.512', '12.3', '2,460')
    """
    digits = float(f"{value:.3g}")
    return f"{digits:,.0f}" if digits >= 100 else f"{digits:#.3g}"


def duration(seconds: float) -> str:
    """Seconds in a unit that fits.

    >>> duration(1.234e-7), duration(0.00456), duration(78.9)
    ('0.123 us', '4.56 ms', '78.9 s')
    """
    unit, scale = next((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 0.0)) if seconds >= scale)
    return f"{number(seconds / (scale or 1e-6))} {unit}"


def cells(row: Row) -> list[str]:
    """What, the two times, the ratio, its spread, and the goal."""
    low, middle, high = row["ratio"]
    aim = "{} {:g}".format(*row["goal"]) if row["goal"] else ""
    verdict = {True: ", met", False: ", missed", None: ""}[met(row)]
    around = "" if low == high else f"{number(low)} to {number(high)}"
    return [row["what"], " / ".join(map(duration, row["seconds"])), number(middle), around, aim + verdict]


def printed(row: Row) -> str:
    """A row for the terminal."""
    what, seconds, ratio, around, aim = cells(row)
    return f"{what:<72} {seconds:>19} {ratio:>7}  {around:<16} {aim}".rstrip()


HEADINGS = {"cpu": "One thread of a CPU", "gpu": "A GPU"}


def table(results: Results) -> str:
    """Tables by part, with the machine before them."""
    machine = ", ".join(f"{name} {told}" if name not in ("processor", "gpu") else told for name, told in results.about.items())
    lines = [f"## {HEADINGS[results.kind]}", "", f"{machine}."]
    for part in dict.fromkeys(row["part"] for row in results.rows):
        lines += ["", f"### {part}", "", "| | time of each | ratio | 20-80 % | goal |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in results.rows if row["part"] == part]
    return "\n".join(lines)


BEGIN, END = "<!-- tables: written by python -m meha_lab.benchmarks.speed -->", "<!-- end of tables -->"


def text(page: str) -> str:
    """The page with its tables replaced."""
    before, rest = page.split(BEGIN)
    tables = "\n\n".join(table(results) for kind in KINDS if (results := load(kind)).rows)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


def page() -> None:
    """Write the tables into the page."""
    PAGE.write_text(text(PAGE.read_text()))


# The figure


LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "BOAT": ("BOAT (MESO)", dict(color="#555555", marker="s", linestyle="none")),
    "BOAT, no file": ("BOAT, no file of losses", dict(color="#555555", marker="s", linestyle=":")),
    "bare loop": ("bare torch loop", dict(color="#0072b2", marker="^", linestyle="--")),
    "Run.step": ("MEHA, eager step", dict(color="#e69f00", marker="o")),
    "compiled": ("MEHA, compiled", dict(color="#d55e00", marker="o", linewidth=2.4)),
    "JAX scan": ("JAX lax.scan", dict(color="#009e73", marker="D", linestyle="--")),
    "copy": ("copy of one array", dict(color="#555555", linestyle=":")),
}
"""Contenders as they are drawn: label and style, the same in all panels."""


def figure() -> None:
    """Draw time of a step and time to the target against the dimension, and the race on group lasso."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    from meha_lab.reproduce.figures import RC, power_of_ten, render

    curves = load("cpu").curves
    with rc_context(RC):
        drawing = Figure(figsize=(9.2, 7.4), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        (step, target), (large, lasso) = drawing.subplots(2, 2)
        for ax in (step, target, large, lasso):
            ax.set(xscale="log", yscale="log")
            ax.grid(color="#e8e8e8", linewidth=0.7)
        _draw(step, curves.get("sine", {}), "Sine toy: a step", "seconds a step")
        _draw(target, curves.get("target", {}), "Sine toy: to within 2 % of the solution", "seconds")
        _draw(large, curves.get("strong convex", {}), "Strong convex toy: a step", "seconds a step")
        _draw_compilation(target, curves.get("target", {}), curves.get("compile", {}))
        _draw_lasso(lasso, curves.get("group lasso", {}))
        for axis in (axis for ax in (step, target, large, lasso) for axis in (ax.xaxis, ax.yaxis)):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(10, numticks=12))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(round(math.log10(value)))))
        found = {
            label: line for ax in (step, target, large) for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_bytes(render(drawing, "png"))


def _draw(ax: Any, curves: dict[str, Any], title: str, ylabel: str) -> None:
    ax.set(title=title, xlabel="dimension n", ylabel=ylabel)
    for name, (label, style) in LINES.items():
        points = [(int(n), found[name]) for n, found in curves.items() if name in found]
        if points:
            dimensions = [n for n, _ in points]
            low, middle, high = zip(*(told for _, told in points), strict=True)
            ax.plot(dimensions, middle, label=label, **{"markersize": 4.5, **style})
            ax.fill_between(dimensions, low, high, color=style["color"], alpha=0.16, linewidth=0)


def _draw_compilation(ax: Any, curves: dict[str, Any], compilation: dict[str, float]) -> None:
    for name, label in (("compiled", "MEHA, with compilation"), ("JAX scan", "JAX, with compilation")):
        points = [
            (int(n), told[name][1] + compilation[name]) for n, told in curves.items() if name in told and name in compilation
        ]
        if points:
            ax.plot(*zip(*points, strict=True), label=label, color=LINES[name][1]["color"], linestyle=(0, (1, 1.5)))


def _draw_lasso(ax: Any, curves: dict[str, Any]) -> None:
    ax.set(title="Group lasso, m = 3600", xlabel="seconds", ylabel="least validation error so far", yscale="linear")
    hues = dict(zip(curves, ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#d55e00"), strict=False))
    for name, looks in curves.items():
        best = [min(error for _, error in looks[: i + 1]) for i in range(len(looks))]
        ax.plot([spent for spent, _ in looks], best, label=name, color=hues[name], marker="o", markersize=3.5)
    if curves:
        ax.legend(frameon=False, fontsize=8)
