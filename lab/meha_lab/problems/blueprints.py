"""Blueprints: problems in numpy, from which a KnownProblem of any precision and device is built."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from meha.methods import MEHA
from meha.problem.problem import Problem
from meha.problems import Distance, relative
from meha_lab.problems.collected import CollectedProblem, Region
from meha_lab.problems.exact import minimiser

__all__ = ["Array", "Blueprint", "Cast", "Region", "known_problem"]


Array = NDArray[Any]

Cast = Callable[[Any], Tensor]
"""A function that converts numpy numbers to a tensor of the requested precision and device."""

SMOOTH = MEHA(alpha=1.5, beta=0.8, eta=0.8, gamma=10.0, c=33.3, p=0.49)  # the paper's for its strongly convex toy
NONSMOOTH = MEHA(alpha=0.1, beta=1e-5, eta=0.1, gamma=10.0, c=2.0, p=0.49)  # the paper's for its lasso


def _all(y: Tensor) -> Tensor:
    return y


@dataclass(frozen=True, eq=False, kw_only=True)
class Blueprint:
    """Everything needed to build a :class:`~meha_lab.problems.collected.CollectedProblem`, in float64.

    Args:
        build: returns the problem, given the function that casts its data.
        x0: the start of x.
        y0: the start of y.
        x_star: the solution in closed form; None looks it up among the stored references.
        response: y*(x) in closed form; None computes it numerically.
        measure: see :class:`~meha_lab.problems.collected.CollectedProblem`.
        units: the scales of the coordinates of x, if they differ; distances are measured in these units.
        unique: the part of y that the lower level determines, if not y itself (such as the product of two factors).
        region: where random starts are drawn from; None draws them around x0 and y0.
    """

    build: Callable[[Cast], Problem]
    x0: Array
    y0: Array
    x_star: Array | None = None
    response: Callable[[Tensor], Tensor] | None = None
    measure: Literal["distance", "excess"] = "distance"
    units: Array | float = 1.0
    unique: Callable[[Tensor], Tensor] = _all
    region: Region | None = None

    @functools.cached_property
    def exact(self) -> Problem:
        """Return the problem in float64."""
        return self.build(double)

    def respond(self, x: Tensor) -> Tensor:
        """Return y*(x) for an x in float64."""
        if self.response is not None:
            return self.response(x)
        return minimiser(self.exact, x, double(self.y0))

    def value(self, x: Tensor) -> float:
        """Return the hyper-objective F(x, y*(x)) for an x in float64."""
        with torch.no_grad():
            return float(self.exact.upper(x, self.respond(x)))


def double(value: Any) -> Tensor:
    """Return ``value`` as a float64 tensor on the CPU."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def known_problem(
    name: str,
    make: Callable[[], Blueprint],
    *,
    file: str = "references.json",
    dtype: torch.dtype = torch.float64,
    device: Any = None,
) -> CollectedProblem:
    """Build the problem in this precision and on this device; its answer and its error are computed in float64.

    Answers without a closed form are stored in ``file``.
    """
    blueprint = make()

    def cast(value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).to(device, dtype)

    stored = references(file).get(name, {})
    if blueprint.x_star is None and not stored:
        raise LookupError(
            f"name: no reference is stored for {name!r}; compute it with tools/references.py or tools/rugged_references.py."
        )
    x_star = double(stored["x"] if blueprint.x_star is None else blueprint.x_star).reshape(blueprint.x0.shape)
    y_star = double(stored["y"]).reshape(blueprint.y0.shape) if blueprint.x_star is None else blueprint.respond(x_star)

    def distance(x: Tensor, y: Tensor) -> Distance:
        x, y, units = double(x.detach()), double(y.detach()), double(blueprint.units)  # float32 answers are compared in float64
        return Distance(relative(x / units, x_star / units), relative(blueprint.unique(y), blueprint.unique(y_star)))

    problem = blueprint.build(cast)
    return CollectedProblem(
        **{field.name: getattr(problem, field.name) for field in fields(problem)},
        name=name,
        x0=cast(blueprint.x0),
        y0=cast(blueprint.y0),
        x_star=cast(x_star),
        y_star=cast(y_star),
        upper_star=float(blueprint.exact.upper(x_star, y_star)),
        distance=distance,
        presets={"paper": SMOOTH if problem.nonsmooth is None else NONSMOOTH},
        answer=lambda x: blueprint.respond(double(x.detach())),
        value=lambda x: blueprint.value(double(x.detach())),
        measure=blueprint.measure,
        region=blueprint.region,
        local=tuple(cast(x).reshape(blueprint.x0.shape) for x in stored.get("local", ())),
    )


@functools.cache
def references(file: str = "references.json") -> dict[str, dict[str, Any]]:
    """Return the stored solutions by problem name: x, y, and the number of local optima that the search found."""
    text = resources.files("meha_lab.problems").joinpath(file).read_text(encoding="utf-8")
    solutions: dict[str, dict[str, Any]] = json.loads(text)
    return solutions
