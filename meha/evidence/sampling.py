"""Samples around a solution: curvatures, descents and values of F that tell whether it may be the only one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meha.engines.hyper_objective import HyperObjective
from meha.lower.batched_newton import Batch, Ends
from meha.lower.flat_problem import LowerPoint
from meha.lower.multistart import JOINED, StartingPoint
from meha.lower.newton_on_faces import SmoothFace, semidefinite
from meha.lower.newton_tuning import TUNING
from meha.numerics.tolerances import NEAR, SAME
from meha.problem.oracle import BudgetError
from meha.tensors.torch_private import BREAKDOWNS
from meha.tensors.vectors import vector_norm


class Samples:
    """Samples three things around a solution: the curvature of f at distant points, descents of f at its x, F at other x.

    Where the problem allows it, one batch computes all of them. Otherwise each is computed when it is asked for.

    Args:
        objective, batch: the hyper-objective, and the solver for several points at once.
        x: that of the solution.
        bottom: f at the solution y.
        origins: the starts of descents at x.
        far: other x, one in each row, and a y for each, at which the curvature of f is sampled.
        others: the x, one in each row, at which F is sampled.
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
        self._random_rows = slice(first, first + len(far[0]))  # of random starts at x, which follow the given ones
        self._ends = self._solve_batch()

    def _solve_batch(self) -> Ends | None:
        """Solve all points in one batch: curvature only at far points, descents at x, and the lower level at other x.

        For small problems, a batch of 40 points takes little more time than one. Returns None where it is not possible.
        """
        (far_x, far_y), y, others, origins = self._far, self._bottom.z, self._points_to_sample, self._origins
        x = torch.cat([far_x, self._x.expand(len(origins), -1), others])
        starts = torch.cat([far_y, torch.stack([origin.y for origin in origins]), y.expand(len(others), -1)])
        # An infinite tol takes no step; F at other x only ranks them, so a coarse y is enough. A last step far shorter than the
        # distance of two points that are the same: where Newton steps converge linearly, the error is as large as the step.
        tol = [math.inf] * len(far_x) + [NEAR * JOINED] * len(origins) + [SAME] * len(others)
        # Less than zero: at another x, no point belongs to the basin of the bottom, be it the same y.
        reach = [0.0] * len(far_x) + [origin.reach for origin in origins] + [-1.0] * len(others)
        checked = torch.zeros(len(x), dtype=torch.bool, device=x.device)  # negative curvature at one of these ends the batch
        checked[: len(far_x)] = checked[self._random_rows] = True
        return self._batch.solve(x, starts, y.new_tensor(tol), self._bottom, y.new_tensor(reach), checked)

    def convex(self, *, far: bool) -> bool:
        """Whether g is convex, and f has no negative curvature at the far points, or else at random points at x."""
        if self._lower.oracle.problem.g.rho:  # g is only weakly convex
            return False
        if self._ends is not None:
            return bool(self._ends.convex[slice(len(self._far[0])) if far else self._random_rows].all())
        random = [(self._x, origin.y) for origin in self._origins if origin.random]
        return all(self._convex(*point) for point in (zip(*self._far, strict=True) if far else random[: len(self._far[0])]))

    def _convex(self, x: Tensor, y: Tensor) -> bool:
        """Whether f has no negative curvature at (x, y); along the Krylov space of a fixed vector where y is large."""
        lower = self._lower
        at = lower.expand(lower.flat_x.at(x), y)
        # Conjugate gradients stop at negative curvature, and take far fewer products than a Hessian of that size.
        if lower.flat_y.size > TUNING.batched and lower.hessians.groups is None:
            right = torch.arange(len(y), dtype=y.dtype, device=y.device).cos()
            _, _, positive = lower.iterate(at, SmoothFace(), right, lower.tol, TUNING.batched, None)
            return positive
        return bool(semidefinite(lower.hessians.at(at), lower.eps))

    def descents(self, scale: float) -> list[float] | None:
        """The decrease of f in each descent that ended at y, and NaN for the others; None without a batch."""
        if self._ends is None:
            return None
        begin, end = len(self._far[0]), len(self._ends.y) - len(self._points_to_sample)
        rows = zip(*(part[begin:end] for part in self._ends[:3]), strict=True)
        same = [
            (bool(solved) and vector_norm(y - self._bottom.z) <= JOINED * scale, float(fallen)) for y, fallen, solved in rows
        ]
        return [fallen if joined else math.nan for joined, fallen in same]

    def upper(self) -> list[tuple[float, Tensor, Tensor]]:
        """F, x and y at each of the other x; F is infinite where the lower level was not solved."""
        ends, rows = self._ends, len(self._points_to_sample)
        values = None if ends is None or not rows else self._batch.upper(self._points_to_sample, ends.y[-rows:])
        if ends is None or values is None:
            return self._solve_each()
        samples = []
        for x, y, F, solved in zip(
            self._points_to_sample, ends.y[-rows:], values.tolist(), ends.solved[-rows:].tolist(), strict=True
        ):
            self._objective.count()  # as if solved one by one: budgets must not depend on the batch
            samples.append((F if solved and math.isfinite(F) else math.inf, x, y))
        return samples

    def _solve_each(self) -> list[tuple[float, Tensor, Tensor]]:
        """Solve the lower level at each sampled x, from near to far, warm-started from the nearest solved one."""
        lower, known = self._lower, [(self._x, self._bottom.z)]
        samples = {}
        distances = torch.linalg.vector_norm(self._points_to_sample - self._x, dim=1)
        for i in distances.argsort().tolist():
            x = self._points_to_sample[i]
            # From the solution itself, distant x would take more Newton steps, and fail more often.
            _, guess = min(known, key=lambda point: vector_norm(point[0] - x))
            lower.accuracy = SAME
            try:
                F, y = self._objective.sample(x, guess)
            except (BudgetError, RuntimeError, *BREAKDOWNS):  # a sample that fails says nothing, and must not end the run
                F, y = math.inf, guess
            finally:
                lower.accuracy = lower.tol
            if math.isfinite(F):
                known.append((x, y))
            samples[i] = F, x, y
        return [samples[i] for i in range(len(samples))]  # in the order in which they were given
