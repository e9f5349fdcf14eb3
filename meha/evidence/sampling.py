"""Survey: what is seen from a solution, which tells whether it may be the only one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meha.engines.hyper_objective import HyperObjective
from meha.lower.batched_newton import Batch, Ends
from meha.lower.flat_problem import BudgetError, LowerPoint
from meha.lower.multistart import JOINED, StartingPoint
from meha.lower.newton_on_faces import SmoothFace, semidefinite
from meha.lower.newton_tuning import TUNING
from meha.numerics.limited_memory import vector_norm
from meha.tensors.torch_private import BREAKDOWNS

__all__ = ["Samples"]


class Samples:
    """Curvatures of f far from a solution, ends of descents of f at its x, and F at other x.

    Where a batch is possible, it finds all of them at once. Elsewhere each is found when it is asked for.

    Args:
        objective, batch: the hyper-objective, and what takes several points at once.
        x: that of the solution.
        bottom: f at the solution y.
        origins: where descents at x begin.
        far: other x, one in each row, and a y for each, at which f should be convex.
        others: the x, one in each row, at which F is of interest.
    """

    def __init__(
        self,
        objective: HyperObjective,
        batch: Batch,
        x: Tensor,
        bottom: LowerPoint,
        origins: Sequence[StartingPoint],
        far: tuple[Tensor, Tensor],
        others: Tensor,
    ) -> None:
        self._objective, self._batch, self._lower = objective, batch, objective.lower
        self._x, self._bottom, self._origins, self._far, self._points_to_sample = x, bottom, origins, far, others
        first = len(far[0]) + sum(not origin.random for origin in origins)
        self._here = slice(first, first + len(far[0]))  # the rows of the first random starts
        self._ends = self._solve_batch()

    def _solve_batch(self) -> Ends | None:
        """The ends of all at once: far points, where nothing is to be done, descents at x, and the lower level at other x."""
        (far_x, far_y), y, others, origins = self._far, self._bottom.z, self._points_to_sample, self._origins
        x = torch.cat([far_x, self._x.expand(len(origins), -1), others])
        starts = torch.cat([far_y, torch.stack([origin.y for origin in origins]), y.expand(len(others), -1)])
        tol = [math.inf] * len(far_x) + [TUNING.descended] * len(origins) + [TUNING.look_accuracy] * len(others)
        reach = [0.0] * len(far_x) + [origin.reach for origin in origins] + [0.0] * len(others)
        looks = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        looks[: len(far_x)] = looks[self._here] = True
        return self._batch.solve(x, starts, y.new_tensor(tol), self._bottom, y.new_tensor(reach), looks)

    def convex(self, *, far: bool) -> bool:
        """Whether f shows no negative curvature, at far points or at random points of x, and g has none anywhere."""
        if self._lower.oracle.problem.g.rho:
            return False
        if self._ends is not None:
            return bool(self._ends.convex[slice(len(self._far[0])) if far else self._here].all())
        random = [(self._x, origin.y) for origin in self._origins if origin.random]
        return all(self._convex(*point) for point in (zip(*self._far, strict=True) if far else random[: len(self._far[0])]))

    def _convex(self, x: Tensor, y: Tensor) -> bool:
        lower = self._lower
        at = lower.expand(lower.flat_x.at(x), y)
        if lower.flat_y.size > 2 * TUNING.looking_steps and lower.hessians.groups is None:
            right = torch.arange(len(y), dtype=y.dtype, device=y.device).cos()
            _, _, positive = lower.iterate(at, SmoothFace(), right, lower.tol, TUNING.looking_steps, None)
            return positive
        return bool(semidefinite(lower.hessians.at(at), lower.eps))

    def descents(self, scale: float) -> list[float] | None:
        """By how much f fell in each descent that ended at y, and NaN for the others; None where they were not made."""
        if self._ends is None:
            return None
        begin, end = len(self._far[0]), len(self._ends.y) - len(self._points_to_sample)
        rows = zip(*(part[begin:end] for part in self._ends[:3]), strict=True)
        same = [
            (bool(solved) and vector_norm(y - self._bottom.z) <= JOINED * scale, float(fallen)) for y, fallen, solved in rows
        ]
        return [fallen if joined else math.nan for joined, fallen in same]

    def upper(self) -> list[tuple[float, Tensor, Tensor]]:
        """F, x and y at the other x; F is infinite where the lower level was not solved."""
        ends, rows = self._ends, len(self._points_to_sample)
        values = None if ends is None or not rows else self._batch.upper(self._points_to_sample, ends.y[-rows:])
        if ends is None or values is None:
            return self._solve_each()
        found = []
        for x, y, F, solved in zip(
            self._points_to_sample, ends.y[-rows:], values.tolist(), ends.solved[-rows:].tolist(), strict=True
        ):
            self._objective.count()
            found.append((F if solved and math.isfinite(F) else math.inf, x, y))
        return found

    def _solve_each(self) -> list[tuple[float, Tensor, Tensor]]:
        """The same, from the nearest x to the furthest, each from the solution at the nearest one so far."""
        lower, known = self._lower, [(self._x, self._bottom.z)]
        found = {}
        distances = torch.linalg.vector_norm(self._points_to_sample - self._x, dim=1)
        for i in distances.argsort().tolist():
            x = self._points_to_sample[i]
            _, guess = min(known, key=lambda point: vector_norm(point[0] - x))
            lower.accuracy = TUNING.look_accuracy
            try:
                F, y = self._objective.sample(x, guess)
            except (BudgetError, RuntimeError, *BREAKDOWNS):
                F, y = math.inf, guess
            finally:
                lower.accuracy = lower.tol
            if math.isfinite(F):
                known.append((x, y))
            found[i] = F, x, y
        return [found[i] for i in range(len(found))]
