"""Collection of bilevel problems of many families, with solutions computed without the methods of this library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from meha.problems import KnownProblem, group_lasso, lasso, merely_convex, sine, strong_convex
from meha_lab.problems.blueprints import Blueprint, known_problem, references
from meha_lab.problems.collected import CollectedProblem, collected
from meha_lab.problems.constrained import FAMILIES as CONSTRAINED
from meha_lab.problems.constrained import coupled_problem
from meha_lab.problems.factors import dictionary, factorisation, products, representation
from meha_lab.problems.games import cournot, cournot_limited, toll_revenue, toll_time
from meha_lab.problems.hollow import FAMILIES as HOLLOW
from meha_lab.problems.literature import (
    bilinear,
    circle,
    cubic,
    dead_zone,
    double_well,
    mirrlees,
    one_sided,
    quartic,
    valley,
    wave,
)
from meha_lab.problems.quadratic import linear_upper, quadratic, through_y, undetermined
from meha_lab.problems.regression import (
    coreset,
    elastic_net,
    group_lasso_gaussian,
    lasso_weight,
    logistic,
    reweighting,
    ridge,
    softmax,
)
from meha_lab.problems.rugged import FAMILIES as RUGGED
from meha_lab.problems.rugged import HELD_OUT as RUGGED_HELD_OUT
from meha_lab.problems.scaled import scaled
from meha_lab.problems.simple import FAMILIES as SIMPLE
from meha_lab.problems.simple import HELD_OUT as SIMPLE_HELD_OUT
from meha_lab.problems.support import dual, primal

__all__ = ["Entry", "collection"]


BLUEPRINTS: dict[str, dict[str, Callable[[], Blueprint]]] = {
    "quadratic": {
        "quadratic, condition 10": partial(quadratic, 5, 10, 1e1, seed=0),
        "quadratic, condition 10, wide": partial(quadratic, 20, 20, 1e1, seed=1),
        "quadratic, condition 1e2": partial(quadratic, 10, 20, 1e2, seed=2),
        "quadratic, condition 1e2, soft": partial(quadratic, 5, 20, 1e2, seed=3, soft=True),
        "quadratic, condition 1e3": partial(quadratic, 10, 30, 1e3, seed=4),
        "quadratic, condition 1e3, large": partial(quadratic, 20, 200, 1e3, seed=5),
        "quadratic, condition 1e4": partial(quadratic, 10, 50, 1e4, seed=6),
        "quadratic, condition 1e4, small": partial(quadratic, 5, 10, 1e4, seed=7),
    },
    "through y": {
        "through y, condition 10": partial(through_y, 5, 10, 1e1, seed=10),
        "through y, condition 1e2": partial(through_y, 8, 20, 1e2, seed=11),
    },
    "linear F": {
        "linear F, condition 10": partial(linear_upper, 5, 10, 1e1, seed=12),
        "linear F, condition 1e2": partial(linear_upper, 10, 20, 1e2, seed=13),
    },
    "undetermined": {
        "undetermined, 3 of 6": partial(undetermined, 4, 6, 3, seed=14),
        "undetermined, 5 of 20": partial(undetermined, 10, 20, 5, seed=15),
    },
    "ridge": {
        "ridge, one weight": partial(ridge, 10, 20, seed=20),
        "ridge, one weight, wide": partial(ridge, 40, 30, seed=21),
        "ridge, weight per feature": partial(ridge, 12, 20, seed=22, each=True),
        "ridge, weight per feature, more noise": partial(ridge, 20, 30, seed=23, each=True, noise=2.0),
    },
    "logistic": {
        "logistic, one weight": partial(logistic, 10, 40, seed=30),
        "logistic, one weight, wide": partial(logistic, 30, 40, seed=31),
        "logistic, weight per feature": partial(logistic, 8, 40, seed=32, each=True),
        "logistic, weight per feature, larger": partial(logistic, 15, 60, seed=33, each=True),
    },
    "softmax": {
        "softmax, one weight": partial(softmax, 8, 60, 3, seed=34),
        "softmax, weight per class": partial(softmax, 8, 60, 4, seed=35, each=True),
    },
    "elastic net": {
        "elastic net": partial(elastic_net, 15, 40, seed=43, form="direct"),
        "elastic net, log": partial(elastic_net, 15, 40, seed=41, form="log"),
        "elastic net, no ridge": partial(elastic_net, 15, 40, seed=44, form="direct"),  # the best ridge weight is 0
    },
    "lasso weight": {
        "lasso, one weight": partial(lasso_weight, 15, 40, seed=51, form="direct"),
        "lasso, one weight, log": partial(lasso_weight, 20, 40, seed=46, form="log"),
        "lasso, weight per feature": partial(lasso_weight, 12, 30, seed=47, form="log", each=True),
    },
    "group lasso": {
        "group lasso, 4 groups": partial(group_lasso_gaussian, 4, 3, 30, seed=48),
        "group lasso, 8 groups": partial(group_lasso_gaussian, 8, 3, 60, seed=49),
    },
    "data weights": {
        "coreset, 15 examples": partial(coreset, 15, 4, seed=50),
        "coreset, 30 examples": partial(coreset, 30, 6, seed=51),
        "reweighting, 15 examples": partial(reweighting, 15, 3, seed=52),
        "reweighting, 30 examples": partial(reweighting, 30, 4, seed=53),
    },
    "matrix factorisation": {
        "factorisation, 8 x 6": partial(factorisation, 8, 6, 2, seed=60),
        "factorisation, 12 x 10": partial(factorisation, 12, 10, 3, seed=61, noise=0.6),
        "products, n = 5": partial(products, 5, seed=62),
        "products, n = 20": partial(products, 20, seed=63),
    },
    "Cournot": {
        "Cournot, 1 market": partial(cournot, 1, 2, seed=70),
        "Cournot, 6 markets": partial(cournot, 6, 3, seed=71),
        "Cournot with capacities, 1 market": partial(cournot_limited, 1, 3, seed=72),
        "Cournot with capacities, 5 markets": partial(cournot_limited, 5, 4, seed=73),
    },
    "constrained": {
        "bilinear": bilinear,
        "one-sided": one_sided,
        "circle": circle,
    },
    "non-convex": {
        "double well, n = 1": partial(double_well, 1),
        "double well, n = 10": partial(double_well, 10),
        "wave": wave,
        "valley": valley,
        "cubic, n = 3": partial(cubic, 3),
        "Mirrlees": mirrlees,
    },
    "scaled": {
        "quadratic, x in units from 1e-3 to 1e3": partial(
            scaled, partial(quadratic, 7, 12, 1e1, seed=75), x=np.geomspace(1e-3, 1e3, 7)
        ),
        "quadratic, F times 1e4, f times 1e-4": partial(scaled, partial(quadratic, 5, 10, 1e2, seed=76), upper=1e4, lower=1e-4),
        "Cournot, sales in hundredths": partial(scaled, partial(cournot, 3, 2, seed=77), x=100.0, y=100.0, upper=1e-2),
        "logistic, one weight, scaled": partial(scaled, partial(logistic, 8, 40, seed=78), x=1e2, y=1e-2, lower=1e3),
        "undetermined, x times 1e-2, y times 1e2": partial(scaled, partial(undetermined, 4, 8, 4, seed=79), x=1e-2, y=1e2),
        "ridge, weight per feature, scaled": partial(
            scaled, partial(ridge, 8, 30, seed=24, each=True), x=1e-2, y=1e3, upper=1e-3
        ),
    },
    "support vectors": {
        "support vectors, cost": partial(primal, 15, 40, seed=80),
        "support vectors, cost and scales": partial(primal, 4, 40, seed=81, scales=True),
    },
    "support vectors, dual": {
        "support vectors, dual, 2 features": partial(dual, 2, 20, seed=82),
        "support vectors, dual, 3 features": partial(dual, 3, 30, seed=84),
    },
    "tolls": {
        "tolls against congestion, 6 paths": partial(toll_time, 2, seed=84),
        "tolls against congestion, some roads free": partial(toll_time, 2, seed=85, free=6),
        "tolls for revenue": partial(toll_revenue, 2, seed=86, tolled=3),
    },
    "degenerate": {
        "quartic, n = 5": partial(quartic, 5),
        "dead zone, n = 5": partial(dead_zone, 5),
        "ridge, weight per feature, no bounds": partial(ridge, 8, 30, seed=25, each=True, bounds=None),
    },
    "dictionary": {
        "dictionary, 2 atoms": partial(dictionary, 3, 2, 6, seed=90),
        "dictionary, 3 atoms": partial(dictionary, 4, 3, 6, seed=95),
    },
    "representation": {
        "representation, linear": partial(representation, 6, 2, 40, seed=92),
        "representation, tanh": partial(representation, 4, 2, 40, seed=93, bent=True),
    },
}

TOYS: dict[str, dict[str, Callable[..., KnownProblem]]] = {
    "paper": {
        "strong convex, n = 100": partial(strong_convex, 100),
        "merely convex, n = 10": partial(merely_convex, 10),
        "sine, n = 10": partial(sine, 10),
        "lasso, n = 100": partial(lasso, 100),
    },
    "group lasso, orthogonal": {
        "group lasso, m = 60, orthogonal": partial(group_lasso, 60, 6, design="orthogonal"),
        "group lasso, m = 120, orthogonal": partial(group_lasso, 120, 12, seed=1, design="orthogonal"),
    },
}

HELD_OUT = {"support vectors, dual", "tolls", "dictionary", "representation", "degenerate"}
"""Families whose members are all in the held-out half."""


Half = Literal["tuning", "held-out"]

Group = Literal["gentle", "rugged", "simple", "hollow", "constrained"]


@dataclass(frozen=True)
class Entry:
    """A problem of the collection that is not built yet.

    Attributes:
        name: the name of the problem.
        family: the kind of problem.
        half: ``"tuning"`` or ``"held-out"``. Constants of methods are chosen on the first half and tested on the second.
        build: builds the problem, given ``dtype`` and ``device``.
        group: see :func:`collection`.
    """

    name: str
    family: str
    half: Half
    build: Callable[..., KnownProblem] = field(repr=False)
    group: Group = "gentle"

    @property
    def optima(self) -> int | None:
        """Return the number of different values at which the search for the reference ended; None for closed forms.

        More than one means local optima, or kinks at which a descent may stop.
        """
        file = "rugged.json" if self.group == "rugged" else "references.json"
        count: int | None = references(file).get(self.name, {}).get("optima")
        return count

    def make(self, *, dtype: torch.dtype = torch.float64, device: Any = None) -> CollectedProblem:
        """Build the problem in this precision and on this device; ``problem.error(x, y)`` judges an answer."""
        return collected(self.build(dtype=dtype, device=device))


def collection(half: Half | None = None, group: Group | None = "gentle") -> list[Entry]:
    """Return the entries of one half, or of both (None), and of one group, or of all without coupling constraints (None).

    The members of a family alternate between the halves; some families are held out as a whole. The groups:

    - ``"gentle"``: nearly all lower levels are convex, or have one basin;
    - ``"rugged"``: lower levels with several basins, kinks without convexity, plateaus, or many solutions;
    - ``"simple"``: no x, only a choice among the solutions of one problem: ``upper`` and ``lower`` are functions of y;
    - ``"hollow"``: lower levels with many solutions, of which the one nearest to y0 is the response;
    - ``"constrained"``: constraints couple x and y; most methods refuse them.

    >>> entry = collection("tuning")[0]
    >>> problem = entry.make()
    >>> entry.name, problem.error(problem.x_star, problem.y_star)
    ('quadratic, condition 10', 0.0)
    """
    if half not in (None, "tuning", "held-out"):
        raise ValueError(f"half: must be 'tuning', 'held-out' or None (both), got {half!r}.")
    if group not in (None, "gentle", "rugged", "simple", "hollow", "constrained"):
        raise ValueError(
            f"group: must be 'gentle', 'rugged', 'simple', 'hollow', 'constrained' or None (all others), got {group!r}."
        )
    if group == "constrained":
        makers = {
            family: {name: partial(coupled_problem, name, make) for name, make in members.items()}
            for family, members in CONSTRAINED.items()
        }
        # Their references are in a file of their own, and most methods refuse them: group=None leaves them out.
        return [entry for entry in _entries(makers, set(), "constrained") if half in (None, entry.half)]
    gentle = {family: _built(makers, "references.json") for family, makers in BLUEPRINTS.items()}
    rugged = {family: _built(makers, "rugged.json") for family, makers in RUGGED.items()}
    entries = [
        *_entries({**gentle, **TOYS}, HELD_OUT, "gentle"),
        *_entries(rugged, RUGGED_HELD_OUT, "rugged"),
        *_entries(SIMPLE, SIMPLE_HELD_OUT, "simple"),
        *_entries({family: _built(makers, "references.json") for family, makers in HOLLOW.items()}, set(), "hollow"),
    ]
    return [entry for entry in entries if half in (None, entry.half) and group in (None, entry.group)]


Builders = Mapping[str, Callable[..., KnownProblem]]


def _built(makers: Mapping[str, Callable[[], Blueprint]], file: str) -> Builders:
    """Return functions that build the known problems, with the references in a file."""
    return {name: partial(known_problem, name, make, file=file) for name, make in makers.items()}


def _entries(families: Mapping[str, Builders], held_out: set[str], group: Group) -> list[Entry]:
    """Return the entries of families; every second member is held out."""
    return [
        Entry(name, family, "held-out" if family in held_out or i % 2 else "tuning", build, group)
        for family, members in families.items()
        for i, (name, build) in enumerate(members.items())
    ]
