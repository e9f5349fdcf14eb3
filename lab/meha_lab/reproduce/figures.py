"""Figures of convergence: the median and the band of several runs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, isfinite, log10
from typing import Any, Literal
from zlib import crc32

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

__all__ = []


Array = NDArray[np.float64]
Dash = Literal["-"] | tuple[int, tuple[float, ...]]

MINUS, DASH, TIMES = "\u2212", "\u2013", "\u00d7"  # spelt out, for they look like others
NOT_REACHED = "✕ not reached"
INK, FAINT, RED = "#222222", "#767676", "#b3261e"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "meha",
}


@dataclass(frozen=True)
class Curve:
    """The runs of one method, one pair (xs, ys) for a seed; a diverged run may hold None, NaN or infinite values in ys.

    With ``best``, the best value so far is drawn: for a method that starts again and returns the best of its passes.
    """

    label: str
    runs: Sequence[tuple[Sequence[float], Sequence[float | None]]]
    best: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        target: height of a dashed line.
        slopes: pairs (p, label), drawn as dotted lines proportional to x^p from the start of the first curve.
        better: whether low or high values are good; a diverged value is drawn at the other end.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    logx: bool = True
    logy: bool = True
    target: float | None = None
    slopes: Sequence[tuple[float, str]] = ()
    better: Literal["low", "high"] = "low"


@dataclass(frozen=True)
class LineStyle:
    """How a method is drawn."""

    color: str
    dash: Dash = "-"
    width: float = 1.5
    order: float = 3.0


HUES = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")  # Okabe and Ito; MEHA alone has their vermilion
VERMILION = "#d55e00"
DASHES: tuple[Dash, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
FAMILIES = (  # a dash for each family, a hue for each method in it
    ("RHG", "BDA", "IAPTT", "CG", "NS", "BRC"),
    ("BOME", "F2SA", "BAMM", "BVFIM", "VPBGD"),
    ("Grid search", "Random search", "TPE", "IGJO", "VF-iDCA"),
)
STYLES = {
    "MEHA": LineStyle(VERMILION, width=2.8, order=5),
    "MEHA, paper's values": LineStyle(VERMILION, (0, (3, 1.2)), width=2, order=4),
    "AdaptiveMEHA": LineStyle("#8c1c13", width=2.2, order=4.5),
    "automatic": LineStyle("#5e2ca5", width=2.2, order=4.5),
    **{name: LineStyle(HUES[i], dash) for names, dash in zip(FAMILIES, DASHES, strict=True) for i, name in enumerate(names)},
}
SHADES = ("#a6bddb", "#57a0cc", "#0570b0", "#023858")
OTHERS = [LineStyle(hue, dash) for dash, hue in product([(0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))], HUES)]


def power_of_ten(exponent: int) -> str:
    """10 to a power, in plain text."""
    return "10" + str(exponent).translate(SUPERSCRIPT)


def three_digits(value: float) -> str:
    """A number to three significant digits.

    >>> three_digits(0.012345), three_digits(1234.5), three_digits(-1.5e-7), three_digits(float("nan"))
    ('0.0123', '1230', '−1.50×10⁻⁷', 'NaN')
    """
    if not isfinite(value) or value == 0:
        return {"inf": "∞", "-inf": f"{MINUS}∞", "nan": "NaN"}.get(str(value), "0")
    digits, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    text = f"{float(f'{digits}e{power}'):.{max(0, 2 - power)}f}" if -4 < power < 5 else f"{digits}{TIMES}{power_of_ten(power)}"
    return text.replace("-", MINUS)


def styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """A style for each label; those without one of their own get different ones, as far as there are enough."""
    found: dict[str, LineStyle] = {}
    for label in dict.fromkeys(labels):
        first = crc32(label.encode()) % len(OTHERS)
        free = [other for other in OTHERS[first:] + OTHERS[:first] if other not in found.values()]
        found[label] = STYLES.get(label) or (free or OTHERS[first:])[0]
    ordered = [label for label in found if " = " in label]  # the values of a number, from light to dark
    found |= {label: LineStyle(shade) for label, shade in zip(ordered, SHADES, strict=False)}
    return found


def style(label: str) -> LineStyle:
    """The style of a method, the same on every figure.

    >>> style("MEHA").color == style("MEHA, paper's values").color
    True
    """
    return styles([label])[label]


def arrays(panel: Panel, curve: Curve) -> list[tuple[Array, Array]]:
    """The runs of a curve as arrays, infinitely bad where a run has diverged; runs without points are left out."""
    found = []
    for xs, ys in curve.runs:
        if len(xs) != len(ys):
            raise ValueError(f"a run of {curve.label!r} has {len(xs)} xs and {len(ys)} ys; give as many of each")
        x, y = np.asarray(xs, float), np.asarray(ys, float)  # None becomes NaN
        if np.any(x > 0) if panel.logx else len(x):
            y = np.where(np.isfinite(y), y, inf if panel.better == "low" else -inf)
            best = np.minimum.accumulate if panel.better == "low" else np.maximum.accumulate
            found.append((x, best(y) if curve.best else y))
    return found


def limits(panel: Panel) -> tuple[float, float]:
    """The visible range of y: that of all values, but for runs that left the scale of the others."""
    runs = [y[np.isfinite(y) & ((y > 0) | (not panel.logy))] for curve in panel.curves for _, y in arrays(panel, curve)]
    peaks = [peak for y in runs if len(y) and (peak := np.abs(y).max()) > 0]
    if not peaks:
        return (0.1, 1.0) if panel.logy else (0.0, 1.0)
    values = np.concatenate(runs)
    values = values[np.abs(values) <= (30 if panel.logy else 5) * np.quantile(peaks, 0.25)]
    if panel.target is not None and (panel.target > 0 or not panel.logy):
        values = np.append(values, panel.target)
    low, high = float(values.min()), float(values.max())
    if panel.logy:
        low = max(low, 1e-16 * high)
        margin = max((high / low) ** 0.05, 1.2)
        return low / margin, high * margin
    margin = 0.05 * (high - low) or 0.5 * abs(high)
    return low - margin, high + margin


def band(panel: Panel, curve: Curve, points: int = 80) -> tuple[Array, Array]:
    """The x of a curve, and the 20 %, 50 % and 80 % quantiles of its runs there, in three rows.

    Runs are clipped to the limits of the panel and are straight lines between their points in the plot; before the first point
    and after the last one a run holds its value. The x are those of all runs, or ``points`` even ones if there are more.
    """
    low, high = limits(panel)
    runs = arrays(panel, curve)
    start = min(x[x > 0].min() if panel.logx else x[0] for x, _ in runs)
    grid = np.unique(np.maximum(np.concatenate([x for x, _ in runs]), start))
    if len(grid) > points:
        grid = (np.geomspace if panel.logx else np.linspace)(start, grid[-1], points)
    along, up = np.log if panel.logx else np.asarray, np.log if panel.logy else np.asarray
    heights = []
    for x, y in runs:
        x = np.maximum(x, start)  # on a logarithmic axis x = 0 is its left end
        last = np.append(np.diff(x) > 0, True)
        heights.append(np.interp(along(grid), along(x[last]), up(np.clip(y[last], low, high))))
    quantiles = np.quantile(heights, (0.2, 0.5, 0.8), axis=0)
    return grid, np.exp(quantiles) if panel.logy else quantiles


def curves(panels: Sequence[Panel], columns: int = 2) -> Figure:
    """Median and 20-80 % band of every curve, with one legend below all panels.

    A dot ends the longest run of a curve; a cross is where the median leaves the plot for good. Parts of a curve, and its entry
    in the legend, have names in SVG ("curve3.0", "legend3.0"), by which a page can hide them.
    """
    looks = styles(curve.label for panel in panels for curve in panel.curves)
    names = list(looks)
    with rc_context(RC):
        figure, axes = _figure(len(panels), columns, height=2.9)
        for panel, ax in zip(panels, axes, strict=True):
            _draw(panel, ax, looks)
        width, height = figure.get_size_inches()
        rows = next(n for n in range(1, len(names) + 2) if _legend_width(names, n) < width or n > len(names))
        figure.set_size_inches(width, height + 0.23 * rows)
        lines = [Line2D([], [], color=look.color, linestyle=look.dash, linewidth=look.width) for look in looks.values()]
        columns = ceil(len(names) / rows)
        room: dict[str, Any] = dict(frameon=False, handlelength=2.6, columnspacing=1.4)
        legend = figure.legend(lines, names, loc="outside lower center", ncols=columns, **room)
        for i, entry in enumerate(zip(legend.get_texts(), legend.get_lines(), strict=True)):
            for part, artist in enumerate(entry):
                artist.set_gid(f"legend{i}.{part}")
        for i, label in enumerate(names):
            for part, artist in enumerate(a for ax in axes for a in ax.get_children() if a.get_label() == f"_{label}"):
                artist.set_gid(f"curve{i}.{part}")
    return figure


def _legend_width(names: Sequence[str], rows: int) -> float:
    """Estimate the width of a legend with this number of rows, in inches."""
    return sum(0.72 + 0.083 * max(map(len, names[i : i + rows])) for i in range(0, len(names), rows))


def _figure(count: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with panels of a height in inches; one column fits a phone, two a page."""
    if count < 1 or columns not in (1, 2):
        raise ValueError(f"a figure has at least 1 panel, in 1 or 2 columns; got {count} in {columns}")
    columns = min(columns, count)
    rows = ceil(count / columns)
    size = (4.6, 8.4)[columns - 1], rows * height + 0.1
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _draw(panel: Panel, ax: Axes, looks: Mapping[str, LineStyle]) -> None:
    low, high = limits(panel)
    worst = high if panel.better == "low" else low
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.grid(color="#e8e8e8", linewidth=0.7)
    drawn = [curve for curve in panel.curves if arrays(panel, curve)]
    bands = [band(panel, curve) for curve in drawn]
    for curve, (x, (lower, median, upper)) in zip(drawn, bands, strict=True):
        look = looks[curve.label]
        if len(curve.runs) > 1:
            label = f"_{curve.label}"
            ax.fill_between(x, lower, upper, color=look.color, alpha=0.16, linewidth=0, zorder=look.order - 2, label=label)
        inside = np.flatnonzero(~np.isclose(median, worst, rtol=1e-9, atol=0))
        end = min(inside[-1] + 1 if len(inside) else 0, len(x) - 1)
        lost = end not in inside
        draw: dict[str, Any] = dict(color=look.color, zorder=look.order, label=f"_{curve.label}")
        ax.plot(x[: end + 1], median[: end + 1], linestyle=look.dash, linewidth=look.width, **draw)
        size = 8 if lost else 1.5 + 1.6 * look.width
        ax.plot(x[end], median[end], marker="X" if lost else "o", markersize=size, mew=0.6, mec="white", clip_on=False, **draw)
    small: dict[str, Any] = dict(textcoords="offset points", fontsize=9, color=FAINT, zorder=6)
    if panel.target is not None:
        ax.axhline(panel.target, color=INK, linestyle=(0, (5, 3)), linewidth=0.9, zorder=2.5)
        ax.annotate("target", (0, panel.target), (4, 3), xycoords=("axes fraction", "data"), **small)
    if bands:
        x, (_, median, _) = bands[0]
        x, median = x[x > 0], median[x > 0]
        for power, label in panel.slopes:
            line = median[0] * (x / x[0]) ** power
            ax.plot(x, line, color=FAINT, linestyle=":", linewidth=1.4, zorder=2.5)
            end = max(np.flatnonzero((line >= low) & (line <= high)), default=0)
            ax.annotate(label, (x[end], line[end]), (5, 0), va="center", **small)
    if panel.logx:
        ax.set_xscale("log")
        _log_ticks(ax.xaxis, *ax.get_xlim())
    if panel.logy:
        ax.set_yscale("log")
        _log_ticks(ax.yaxis, low, high)
    ax.set_ylim(low, high)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """At most seven ticks: plain numbers where these are short, powers of ten otherwise."""
    few = high / low < 50
    plain = few or (low > 5e-3 and high < 2e4)
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if few else (1,), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if plain else power_of_ten(round(log10(v)))))


def render(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The bytes of a figure, the same for the same figure."""
    metadata = {"Software": None} if kind == "png" else dict.fromkeys(("Creator", "Date", "Format", "Type"))
    file = io.BytesIO()
    with rc_context(RC):
        figure.savefig(file, format=kind, dpi=180, metadata=metadata, facecolor="white")
    return file.getvalue()
