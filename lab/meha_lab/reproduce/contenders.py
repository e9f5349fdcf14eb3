"""Methods with their declared settings: eight for each method that has any, so that all have the same budget of trials.

Step sizes are multiples of those that a method chooses for the problem, so that one grid serves problems of every scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meha import methods
from meha.methods.search import Search
from meha.problem.oracle import Oracle
from meha.problem.schedules import InversePower, Power, Ramp
from meha.problems import KnownProblem
from meha.tensors.variables import Variable
from meha_lab.baselines import BRC, IGJO, SLM, VFiDCA
from meha_lab.baselines.quadratic_search import QUADRATIC

__all__ = ["AUTOMATIC", "CONTENDERS", "SETTINGS", "Contender", "Setting"]


SETTINGS = 8

Setting = Mapping[str, Any]
"""Hyper-parameters by name. Numbers for alpha, beta, eta and c are multiples of those that the method chooses for the problem;
``steps`` is a multiple for alpha and beta together. ``preset`` alone names a preset of the problem, and ``numbers`` alone
has the numbers themselves. ``quadratic`` is for searches, and says that f is."""

MULTIPLES = ("alpha", "beta", "eta")


@dataclass(frozen=True)
class Contender:
    """A method and its declared settings; without a grid there is nothing to set.

    ``kind`` None is the method that :func:`meha.solve` takes by default.

    >>> CONTENDERS["MEHA"].settings()[:2]
    [{'c': 0.3, 'p': 0.1}, {'c': 0.3, 'p': 0.49}]
    >>> len(CONTENDERS["CG"].settings())
    8
    >>> CONTENDERS["AdaptiveMEHA"].settings()
    [{}]
    """

    name: str
    kind: type[methods.Method] | None
    grid: Mapping[str, tuple[Any, ...]]

    @property
    def automatic(self) -> bool:
        """Whether it has no settings, and ends by itself."""
        return not self.grid

    def settings(self) -> list[Setting]:
        """The declared settings, in their order."""
        return [dict(zip(self.grid, chosen, strict=True)) for chosen in itertools.product(*self.grid.values())]

    def build(self, problem: KnownProblem, setting: Setting) -> methods.Method:
        """The method of a setting for a problem, with all its numbers."""
        if self.kind is None:
            return methods.default_method(problem, problem.x0, problem.y0)
        if "preset" in setting:
            return problem.preset(setting["preset"])
        if "numbers" in setting:
            return self.kind(**setting["numbers"])
        if self.automatic:
            return self.kind(**setting)
        if issubclass(self.kind, Search):
            return _search(self.kind, problem, dict(setting))
        if setting.get("mu") == 0.0:
            setting = {**setting, "strategy": None}  # BAMM's step strategies are powers of mu
        if "steps" in setting:
            setting = {**setting, "alpha": setting["steps"], "beta": setting["steps"]}
        multiples = {name: setting[name] for name in MULTIPLES if isinstance(setting.get(name), int | float)}
        given = {name: value for name, value in setting.items() if name not in (*multiples, "steps")}
        if isinstance(given.get("c"), int | float):  # the steps are chosen for c
            given["c"] *= getattr(_complete(self.kind(), problem), "c", 1.0)
        chosen = _complete(self.kind(**given), problem)
        return replace(chosen, **{name: factor * getattr(chosen, name) for name, factor in multiples.items()})


def _complete(method: methods.Method, problem: KnownProblem) -> methods.Method:
    x, y = Variable(problem.x0, "x"), Variable(problem.y0, "y")
    return method.resolve(Oracle(problem, x, y), x, y, None)[0]


def _search(kind: type[Search], problem: KnownProblem, setting: dict[str, Any]) -> methods.Method:
    """A search over all coordinates of x in the same interval, separately or with one value for all."""
    like, kind = problem.x0, QUADRATIC[kind] if setting.pop("quadratic", False) else kind
    interval = setting.pop("space", None)
    if interval is None:
        interval = methods.Uniform(-6.0, 6.0) if problem.x_set is None else methods.LogUniform(1e-3, 10.0)
    space: Any = {"space": interval}
    if setting.pop("shared"):
        space = {"space": {"value": interval}, "to_x": lambda values: torch.full_like(like, values["value"])}
    elif setting.get("points", 0) > 10 and like.numel() > 1:
        setting["points"] = 2  # the product grid would have 200^n points
    return kind(**space, **setting)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("MEHA", methods.MEHA, {"c": (0.3, 3, 30, 300), "p": (0.1, 0.49)}),
        Contender("AdaptiveMEHA", methods.contrib.AdaptiveMEHA, {}),
        Contender("automatic", None, {}),
        Contender("RHG", methods.RHG, {"alpha": (0.2, 1), "inner_steps": (10, 50), "warm_start": (True, False)}),
        Contender("RHG, truncated", methods.RHG, {"alpha": (0.2, 1), "inner_steps": (20, 100), "terms": (5, 10)}),
        Contender("BDA", methods.BDA, {"alpha": (0.2, 1), "inner_steps": (16, 64), "mu": (0.1, InversePower(0.5, power=1.0))}),
        Contender("IAPTT", methods.IAPTT, {"alpha": (0.2, 1), "beta": (0.1, 1), "eta": (0.1, 1), "inner_steps": (40,)}),
        Contender("CG", methods.CG, {"alpha": (0.2, 1), "inner_steps": (1, 20), "damping": (0.0, 0.1)}),
        Contender("NS", methods.NS, {"alpha": (0.2, 1), "inner_steps": (1, 20), "terms": (5, 40)}),
        Contender("GALET", methods.GALET, {"alpha": (0.2, 1), "inner_steps": (1, 20), "terms": (5, 40)}),
        Contender(
            "BAMM",
            methods.BAMM,
            {"mu": (0.0, *(InversePower(0.9, power=q) for q in (0.1, 0.3, 1.0))), "line_search": (False, True)},
        ),
        Contender("BRC", BRC, {"alpha": (0.2, 1), "beta": (0.1, 1), "inner_steps": (1, 5)}),
        Contender("DARTS, order 1", methods.DARTS, {"order": (1,), "alpha": (0.05, 0.2, 0.5, 1), "beta": (0.3, 1)}),
        Contender("DARTS, order 2", methods.DARTS, {"order": (2,), "alpha": (0.05, 0.2, 0.5, 1), "beta": (0.3, 1)}),
        Contender("BOME", methods.BOME, {"steps": (0.01, 0.1, 0.3, 1), "inner_steps": (1, 10)}),
        Contender(
            "F2SA",
            methods.F2SA,
            {"alpha": (0.2, 1), "inner_steps": (1, 10), "c": (Power(1.0, 1 / 3), Ramp(0.1, 300.0, 10_000))},
        ),
        Contender(
            "VPBGD",
            methods.VPBGD,
            {"alpha": (0.2, 1), "inner_steps": (1, 5), "c": (Ramp(0.0, 30.0, 300), Ramp(0.0, 30.0, 1500))},
        ),
        Contender("SLM", SLM, {"alpha": (0.2, 1), "inner_steps": (1, 5), "dual_step": (0.3, 3.0)}),
        Contender("BVFIM", methods.BVFIM, {"penalty": ("log", "inverse"), "m2": (1.0, 30.0), "hold": (20, 100)}),
        Contender(
            "BVFIM, sequential",
            methods.BVFIM,
            {"penalty": ("quadratic",), "m2": (1.0, 30.0), "tau": (0.1, 1.0), "hold": (20, 100)},
        ),
        Contender("IGJO", IGJO, {"alpha": (1, 10), "decrease": (5e-4, 1e-8), "threshold": (1e-4, 1e-6)}),
        Contender(
            "VFiDCA",
            VFiDCA,
            {"radii": (0.05, 1.0), "rho": (0.1, 1.0), "beta": (1, 10), "tol": (1e-4,), "iterations": (300,)},
        ),
        Contender("GridSearch", methods.GridSearch, {"shared": (True, False), "warm_start": (True, False), "points": (3, 200)}),
        Contender(
            "RandomSearch",
            methods.RandomSearch,
            {"shared": (True, False), "warm_start": (True, False), "seed": (0, 1), "trials": (400,)},
        ),
        Contender("TPE", methods.TPE, {"shared": (True, False), "warm_start": (True, False), "seed": (0, 1), "trials": (200,)}),
    )
}

AUTOMATIC = tuple(name for name, contender in CONTENDERS.items() if contender.automatic)
"""Methods without settings: AdaptiveMEHA, and the default of :func:`meha.solve`. They have rows of their own."""
