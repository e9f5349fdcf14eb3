"""Case: a problem of the collection in numpy, before it is cast to a precision and a device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from meha.methods import MEHA
from meha.problem import Problem
from meha.problems.base import Distance, KnownProblem
from meha.problems.exact import minimiser

__all__ = ["Array", "Case", "Cast", "known"]

Array = NDArray[Any]

Cast = Callable[[Any], Tensor]
"""From numbers in numpy to a tensor of the precision and on the device asked for."""

SMOOTH = MEHA(alpha=1.5, beta=0.8, eta=0.8, gamma=10.0, c=33.3, p=0.49)
NONSMOOTH = MEHA(alpha=0.1, beta=1e-5, eta=0.1, gamma=10.0, c=2.0, p=0.49)


def _all(y: Tensor) -> Tensor:
    return y


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """What is needed to make a :class:`~meha.problems.KnownProblem`, all in float64.

    Args:
        state: the problem, with its data cast by the function that it gets.
        x0, y0: the start.
        x_star: the solution where there is a closed form; otherwise it is looked up among the stored references.
        response: y*(x) where there is a closed form; otherwise it is solved for.
        measure: see :class:`~meha.problems.KnownProblem`.
        units: the sizes of x's coordinates, when they are not alike; the distance is measured in these units.
        unique: what of y the lower level decides, where it leaves y itself free (such as a product of two factors).
    """

    state: Callable[[Cast], Problem]
    x0: Array
    y0: Array
    x_star: Array | None = None
    response: Callable[[Tensor], Tensor] | None = None
    measure: Literal["distance", "excess"] = "distance"
    units: Array | float = 1.0
    unique: Callable[[Tensor], Tensor] = _all

    @functools.cached_property
    def exact(self) -> Problem:
        """The problem in float64."""
        return self.state(double)

    def respond(self, x: Tensor) -> Tensor:
        """y*(x) for an x in float64."""
        if self.response is not None:
            return self.response(x)
        return minimiser(self.exact, x, double(self.y0))

    def value(self, x: Tensor) -> float:
        """The hyper-objective F(x, y*(x)) for an x in float64."""
        with torch.no_grad():
            return float(self.exact.upper(x, self.respond(x)))


def double(value: Any) -> Tensor:
    """``value`` in float64, on the CPU."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def known(name: str, make: Callable[[], Case], *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """The case as a problem of this precision on this device. Its answer and its measures stay in float64."""
    case = make()

    def cast(value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).to(device, dtype)

    stored = references().get(name, {})
    if case.x_star is None and not stored:
        raise LookupError(f"name: there is no reference for {name!r}; compute it with tools/references.py.")
    x_star = double(stored["x"] if case.x_star is None else case.x_star).reshape(case.x0.shape)
    y_star = double(stored["y"]).reshape(case.y0.shape) if case.x_star is None else case.respond(x_star)

    def distance(x: Tensor, y: Tensor) -> Distance:
        x, y, units = double(x.detach()), double(y.detach()), double(case.units)
        return Distance(_relative(x / units, x_star / units), _relative(case.unique(y), case.unique(y_star)))

    problem = case.state(cast)
    return KnownProblem(
        **{part: getattr(problem, part) for part in ("upper", "lower", "nonsmooth", "x_set", "y_set")},
        name=name,
        x0=cast(case.x0),
        y0=cast(case.y0),
        x_star=cast(x_star),
        y_star=cast(y_star),
        upper_star=float(case.exact.upper(x_star, y_star)),
        distance=distance,
        presets={"paper": SMOOTH if problem.nonsmooth is None else NONSMOOTH},
        response=lambda x: case.respond(double(x.detach())),
        value=lambda x: case.value(double(x.detach())),
        measure=case.measure,
    )


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    """The stored solutions by name of the problem: x, y, and how many local optima the search met."""
    text = resources.files("meha.problems").joinpath("references.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def _relative(value: Tensor, target: Tensor) -> float:
    """||value - target|| / ||target||, or ||value|| where the target is zero."""
    size = float(target.norm())
    return float((value - target).norm()) / (size or 1.0)
