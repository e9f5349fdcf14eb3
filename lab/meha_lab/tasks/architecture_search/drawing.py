"""Draw genotypes with matplotlib: both cells as graphs, from the inputs on the left to the output on the right."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from meha_lab.tasks.architecture_search.genotype import INCOMING, INPUTS, CellGenotype, Genotype

__all__ = ["draw", "draw_cell"]


COLOURS = {"skip": "#767676", "max": "#0072b2", "average": "#56b4e9", "separable": "#d55e00", "dilated": "#009e73"}
"""Colours by the first word of an operation."""

OTHER = "#5e2ca5"
INK, PAPER = "#222222", "#f2f2f2"
SPREAD = 0.62
"""Vertical distance of the inputs and of neighbouring nodes from the middle."""


def draw(genotype: Genotype) -> Figure:
    """Draw the normal and the reduction cell, one above the other."""
    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    for place, (name, cell) in enumerate((("Normal cell", genotype.normal), ("Reduction cell", genotype.reduction))):
        draw_cell(figure.add_subplot(2, 1, place + 1), name, cell)
    return figure


def draw_cell(ax: Axes, title: str, cell: CellGenotype) -> None:
    """Draw a cell as a graph."""
    nodes = len(cell) // INCOMING
    places = [(0.0, SPREAD), (0.0, -SPREAD)]
    places += [(1.6 * (node + 1), SPREAD * (1 if node % 2 == 0 else -1)) for node in range(nodes)]
    end = (1.6 * (nodes + 1), 0.0)
    labels = ["c(k−2)", "c(k−1)", *map(str, range(INPUTS, INPUTS + nodes))]
    drawn: dict[tuple[int, int], int] = {}
    for edge, (operation, source) in enumerate(cell):
        target = INPUTS + edge // INCOMING
        twice = drawn[source, target] = drawn.get((source, target), 0) + 1  # a second edge between the same nodes is bent more
        _edge(ax, places[source], places[target], operation, bend=_bend(places, source, target) + 0.3 * (twice - 1))
    for node in range(INPUTS, INPUTS + nodes):
        ax.add_patch(
            FancyArrowPatch(places[node], end, arrowstyle="-", color="#c8c8c8", linewidth=1, zorder=1, shrinkA=12, shrinkB=12)
        )
    for place, label in [*zip(places, labels, strict=True), (end, "c(k)")]:
        box = dict(boxstyle="round,pad=0.35", facecolor=PAPER, edgecolor=INK, linewidth=1)
        ax.text(*place, label, ha="center", va="center", fontsize=9, color=INK, bbox=box, zorder=4)
    ax.set_title(title, fontsize=11, color=INK, loc="left")
    ax.set(xlim=(-0.5, end[0] + 0.5), ylim=(-1.75, 1.75))
    ax.set_axis_off()


def _bend(places: Sequence[tuple[float, float]], source: int, target: int) -> float:
    """Return the curvature of an edge: larger if it passes other nodes, and away from the middle."""
    (x0, y0), (x1, y1) = places[source], places[target]
    far = (x1 - x0) / 1.6
    if y0 == y1:
        return (-1 if y0 > 0 else 1) * (0.28 if far > 1 else 0.0)
    return 0.12 if far > 1 else 0.0


def _edge(ax: Axes, start: tuple[float, float], end: tuple[float, float], operation: str, bend: float) -> None:
    colour = COLOURS.get(operation.partition(" ")[0], OTHER)
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.5, zorder=2,
        connectionstyle=f"arc3,rad={bend}", shrinkA=14, shrinkB=14,
    )  # fmt: skip
    ax.add_patch(arrow)
    dx, dy = end[0] - start[0], end[1] - start[1]
    # The curve of arc3 passes half way between the middle of the line and its control point.
    x, y = (start[0] + end[0]) / 2 + bend * dy / 2, (start[1] + end[1]) / 2 - bend * dx / 2
    box = dict(boxstyle="round,pad=0.1", facecolor="white", edgecolor="none", alpha=0.85)
    words = operation.replace("separable conv", "sep").replace("dilated conv", "dil").replace("average pool", "avg pool")
    ax.text(x, y, words, ha="center", va="center", fontsize=8, color=colour, bbox=box, zorder=3)
