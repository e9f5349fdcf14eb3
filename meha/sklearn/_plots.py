"""Figures of learned weights and of the course of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["plot_course", "plot_penalties"]

NAMED = 40
"""Features up to which each gets its name."""


def plot_penalties(penalties: NDArray[Any], names: NDArray[Any] | None, ax: Any) -> Any:
    """Draw the weight of each feature on a logarithmic scale."""
    ax = _axes(ax)
    ax.semilogy(np.arange(len(penalties)), penalties, "o")
    if names is not None and len(names) <= NAMED:
        ax.set_xticks(np.arange(len(names)), names, rotation=90)
    ax.set(xlabel="feature", ylabel="weight of the penalty")
    return ax


def plot_course(paths: Mapping[str, NDArray[Any]], results: Mapping[str, NDArray[Any]], ax: Any) -> Any:
    """Draw the error of the examples left out along the path of each candidate."""
    ax = _axes(ax)
    for (name, path), chosen in zip(paths.items(), results["chosen"], strict=True):
        steps = np.arange(len(path))
        ax.plot(
            steps,
            path[:, 1],
            "-o" if chosen else "-",
            label=name + (" (chosen)" if chosen else ""),
            alpha=0.9 if chosen else 0.5,
        )
    ax.set(xlabel="point on the path, from large weights or strengths to small ones", ylabel="mean loss of examples left out")
    ax.legend()
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "meha[plot]".') from error
    return pyplot.subplots()[1]
