"""The hyper-objective x -> F(x, y*(x)), its gradient by the implicit function theorem, and the set X."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from meha.lower.expansion import upper_value
from meha.lower.newton_on_faces import LowerResponse, NewtonLower
from meha.lower.newton_tuning import TUNING
from meha.numerics.tolerances import LOOSE
from meha.problem.oracle import BudgetError, Oracle
from meha.tensors.state import Saved
from meha.tensors.vectors import Clock, Flat, vector_norm


class Domain(Saved):
    """The set X on flat vectors: projection, free coordinates, and the size of x.

    Attributes:
        whole: whether X is the whole space.
        coordinatewise: whether it is a product of intervals.
        start_size: the norm of x at the start, a lower bound for the size of x.
    """

    saves = ("start_size",)

    def __init__(self, oracle: Oracle, flat: Flat) -> None:
        x_set = oracle.problem.x_set
        self._project, self._flat, self.whole = oracle.project, flat, oracle.project.identity
        self.coordinatewise = x_set is None or all(part.coordinatewise for part, _ in x_set.parts(flat.variable))
        self.start_size = 0.0
        # The last answers: a step asks several times at the same tensors, which are recognised by identity.
        self._free_at: tuple[Tensor, Tensor, Tensor] | None = None
        self._residual_at: tuple[Tensor, Tensor, float] | None = None
        self._size_at: tuple[Tensor, float] | None = None

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of X."""
        if self.whole:
            return x
        leaves = [leaf.clone() for leaf in self._flat.split(x)]  # the parts are views, and projections work in place
        self._project(None, leaves, 1.0)
        return self._flat.join(leaves)

    def x_size(self, x: Tensor) -> float:
        """The norm of x, or of the start if that is larger."""
        if self._size_at is None or self._size_at[0] is not x:
            self._size_at = x, vector_norm(x)
        return max(self._size_at[1], self.start_size)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor:
        """A mask of the coordinates that can move against the gradient without leaving X."""
        known = self._free_at
        if known is not None and known[0] is x and known[1] is gradient:
            return known[2]
        if self.whole:
            free = torch.ones_like(x, dtype=torch.bool)
        else:
            length = vector_norm(gradient)
            # A tiny step against the gradient leaves coordinates at an active bound where they are.
            probe = self._flat.eps**LOOSE * (self.x_size(x) or 1.0) / length if length else 0.0
            free = self.project(x - probe * gradient) != x
        self._free_at = x, gradient, free
        return free

    def residual(self, x: Tensor, gradient: Tensor) -> float:
        """The norm of the projected gradient, which is zero at stationary points."""
        known = self._residual_at
        if known is None or known[0] is not x or known[1] is not gradient:
            known = self._residual_at = x, gradient, vector_norm(self.unblocked(x, gradient))
        return known[2]

    def unblocked(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The projected gradient: the part of the gradient that X does not block."""
        if self.whole:
            return gradient
        if self.coordinatewise:
            return torch.where(self.free(x, gradient), gradient, 0.0)
        length = vector_norm(gradient)
        # For a general X, the residual of the projected gradient map, with a step of the length of a first step.
        probe = TUNING.first_step * (self.x_size(x) or 1.0) / length if length else 1.0
        return (x - self.project(x - probe * gradient)) / probe


@dataclass(frozen=True, eq=False)
class HyperValue:
    """The value and gradient of the hyper-objective at x.

    Attributes:
        x: the point.
        y: the solution of the lower level.
        F: the value; infinity where the lower level was not solved.
        lower: f + g.
        gradient: the hypergradient.
        size: the sum of the norms of its two parts, F_x and the one through y, which may cancel.
        direct, adjoint: the norms of F_x, and of the v with (f+g)_yy v = F_y on the face of y.
        error: the larger one of the relative errors of y and v.
        response: the lower level at (x, y), with the graph that derivatives need; None for a point from a checkpoint.
        regular: whether the system of the hypergradient had a solution.
        rates: F_y - (f+g)_yy v, the rate of change of F with fixed coordinates of y; None where it is not needed.
    """

    x: Tensor
    y: Tensor
    F: float
    lower: float
    gradient: Tensor
    size: float
    response: LowerResponse | None = field(default=None, metadata={"saved": False})  # it holds a graph
    regular: bool = True
    rates: Tensor | None = field(default=None, metadata={"saved": False})  # computed again
    direct: float = 0.0
    adjoint: float = 0.0
    error: float = 0.0

    @cached_property
    def length(self) -> float:
        """The norm of the hypergradient."""
        return vector_norm(self.gradient)


def hypergradient(lower: NewtonLower, response: LowerResponse, *, rates: bool = False) -> HyperValue:
    """The value and gradient of the hyper-objective at a solution of the lower level.

    With v the solution of (f+g)_yy v = F_y on the face of y, the gradient is F_x - d/dx <(f+g)_y, v>. The value is corrected by
    -<(f+g)_y, v>, which makes an error of y matter to second order only.
    """
    at, face = response.at, response.face
    upper = upper_value(lower.oracle, at.x, at.y, lower.flat_x, lower.flat_y, lower.clock)
    v, regular, residual = lower.solve_system(at, face, upper.F_y)
    through = at.cross(v)
    correction = float(torch.dot(v, at.gradient))  # the adjoint correction of a value (Pierce and Giles, 2000)
    direct, adjoint = vector_norm(upper.F_x), vector_norm(v)
    size = direct + vector_norm(through)
    x = lower.flat_x.join([leaf.detach() for leaf in at.x.leaves])
    fixed_rates = upper.F_y - at.product(v) if rates else None  # one more product: only asked for at the end
    gradient, error = upper.F_x - through, max(response.error, residual)
    return HyperValue(
        x, at.y, upper.F - correction, at.value, gradient, size, response, regular, fixed_rates, direct, adjoint, error
    )


class HyperObjective(Saved):
    """Evaluates x -> F(x, y*(x)) and its gradient, with warm starts of the lower level, and counts evaluations.

    Attributes:
        calls: number of evaluations so far.
        limit: largest number of evaluations; beyond, :class:`BudgetError` is raised.
    """

    saves = ("calls", "limit")

    def __init__(self, lower: NewtonLower, flat_x: Flat, clock: Clock) -> None:
        self.lower, self.flat_x, self.clock = lower, flat_x, clock
        self.calls, self.limit = 0, math.inf

    def check_dependence(self, x: Tensor, y: Tensor) -> None:
        """Raise an error unless both objectives depend on y, and one of them on x."""
        begin, oracle = time.perf_counter(), self.lower.oracle
        at_x, at_y = self.flat_x.at(x), self.lower.flat_y.at(y)
        for function in (oracle.upper, oracle.phi):
            oracle.gradients((at_x, at_y), [(1.0, function, at_x, at_y)])
        self.clock.functions += time.perf_counter() - begin

    def __call__(self, x: Tensor, y: Tensor) -> HyperValue:
        """The value and gradient at x; the lower level starts from y."""
        self.count()
        response = self.lower.solve(self.flat_x.at(x), y)
        if not response.solved:
            return HyperValue(x, response.y, math.inf, response.at.value, torch.zeros_like(x), 0.0, response)
        value = hypergradient(self.lower, response)
        finite = math.isfinite(value.F) and math.isfinite(value.size)  # an infinite F makes the line search shorten its step
        return value if finite else HyperValue(x, value.y, math.inf, value.lower, torch.zeros_like(x), 0.0, response)

    def scale(self, value: HyperValue) -> float:
        """An estimate of how large the hypergradient would be if its parts did not cancel: |F_x| + |f_xy| |v|."""
        if value.response is None:  # after a resume; the evaluation was counted before the checkpoint
            at = self.lower.expand(self.flat_x.at(value.x), value.y)
            self.lower.oracle.counts.lower -= 1
        else:
            at = value.response.at
        probe = torch.arange(len(value.y), dtype=value.y.dtype, device=value.y.device).cos()
        return value.direct + value.adjoint * float(torch.linalg.vector_norm(at.cross(probe)) / torch.linalg.vector_norm(probe))

    def sample(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """F and y at x, without the gradient; F is infinite where the lower level was not solved."""
        self.count()
        response = self.lower.solve(self.flat_x.at(x), y)
        if not response.solved:
            return math.inf, response.y
        upper = upper_value(self.lower.oracle, response.at.x, response.y, self.flat_x, self.lower.flat_y, self.clock)
        return upper.F if math.isfinite(upper.F) else math.inf, response.y

    def count(self) -> None:
        """Count an evaluation, or raise an error if the limit is reached."""
        if self.calls >= self.limit:
            raise BudgetError
        self.calls += 1
