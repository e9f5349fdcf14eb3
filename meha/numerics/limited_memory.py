"""Quasi-Newton steps for h(z) + g(z), with h smooth and the proximal map of g known, on flat vectors.

The residual r(z) = (z - prox_{t g}(z - t grad h(z))) / t takes the place of the gradient, and is the gradient where g = 0.
Coordinates that the proximal map fixes (zeros of a lasso, bounds of a box) move to their fixed values; the others take a step
along -H r, where H comes from L-BFGS pairs (change of z, change of r). A step must decrease h + g enough (Armijo); if it does
not, shorter ones are tried, and then the plain proximal gradient step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from meha.numerics.line_search import SHORTER, TRIALS, LineTrial, line_search
from meha.tensors.vectors import Clock, vector_norm

PAIRS, FEW_PAIRS = 300, 30  # pairs for an ill-conditioned function, and for one that changes or of which nothing is known
SPARE_PAIRS = 10  # kept in any case, and beyond twice the dimension at most: more repeat themselves
MOST_NUMBERS = 4_000_000  # fewer pairs are kept where they would hold more numbers than this

Prox = Callable[[Tensor, float], Tensor]


class ProximalResidual(NamedTuple):
    """The residual r, a mask of the free coordinates (None for all), and the end of the plain proximal step."""

    r: Tensor
    free: Tensor | None
    target: Tensor


@dataclass(eq=False)
class EvaluatedPoint:
    """h at z: its value and gradient, and the value of g. Subclasses add what else an evaluation computes.

    Attributes:
        noise: the error of the value.
        upper: the gradient of the part of h whose weight changes between solves, without that weight.
        seen: the residual that was last computed here, with its t.
    """

    z: Tensor
    smooth: float
    gradient: Tensor
    nonsmooth: float = 0.0
    noise: float = 0.0
    upper: Tensor | None = None
    seen: tuple[float, ProximalResidual] | None = field(default=None, metadata={"saved": False})

    @property
    def value(self) -> float:
        """h + g."""
        return self.smooth + self.nonsmooth

    @property
    def finite(self) -> bool:
        """Whether value and gradient are finite."""
        return math.isfinite(self.value) and bool(torch.isfinite(self.gradient).all())


PointT = TypeVar("PointT", bound=EvaluatedPoint)


class LimitedMemory:
    """L-BFGS: the inverse of a Hessian from changes of z and of the gradient, in compact form (Byrd, Nocedal, Schnabel 1994).

    A pair may hold the change of a second gradient, of a part of h that has a weight of its own; when the weight changes, all
    pairs stay exact.

    Args:
        limit: the largest number of pairs to keep.
        damping: this fraction of the largest curvature seen is added to that of each pair, which bounds the steps.
        matrix: the first guess of the Hessian; by default the multiple of the identity that fits the last pair (Oren and
            Luenberger, 1974), since the curvature in unexplored directions is best guessed by that of the last one.

    >>> pairs = LimitedMemory(5)
    >>> A = torch.diag(torch.tensor([1.0, 10.0], dtype=torch.float64))
    >>> for s in torch.eye(2, dtype=torch.float64):
    ...     pairs.add(s, A @ s)
    >>> pairs.direction(torch.tensor([1.0, 1.0], dtype=torch.float64))
    tensor([-1.0000, -0.1000], dtype=torch.float64)
    """

    def __init__(self, limit: int, damping: float = 0.0, matrix: Tensor | None = None) -> None:
        self.limit, self.damping, self.matrix = limit, damping, matrix
        self.weight = 0.0
        self.rows: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._forget()

    @classmethod
    def sized(cls, most: int, n: int, damping: float = 0.0, matrix: Tensor | None = None) -> LimitedMemory:
        """Return a memory for vectors of n numbers that keeps at most ``most`` pairs."""
        useful = 2 * n + SPARE_PAIRS
        return cls(max(SPARE_PAIRS, min(most, useful, MOST_NUMBERS // n)), damping, matrix)

    def copy(self) -> LimitedMemory:
        """Return an independent copy with the same pairs."""
        other = LimitedMemory(self.limit, self.damping, self.matrix)
        other.rows, other.weight = list(self.rows), self.weight
        return other

    def _forget(self) -> None:
        """Drop the matrices; the next direction computes them again, and notes the number of pairs in ``_prepared``."""
        self._mask: Tensor | None = None
        self._prepared = 0

    def __len__(self) -> int:
        return len(self.rows)

    def clear(self) -> None:
        """Drop all pairs and the matrix."""
        self.rows, self.matrix = [], None
        self._forget()

    @property
    def known(self) -> bool:
        """Whether there is a pair or a matrix."""
        return bool(self.rows) or self.matrix is not None

    def replace(self, matrix: Tensor, free: Tensor, size: int) -> None:
        """Replace the pairs by a measured Hessian of the free coordinates, if it is positive definite."""
        matrix = (matrix + matrix.T) / 2  # differences of gradients are not symmetric
        _, info = torch.linalg.cholesky_ex(matrix)
        if not int(info):
            self.clear()
            # Coordinates at a bound were not measured, and may become free: they get the mean curvature.
            self.matrix = float(matrix.diagonal().mean()) * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
            self.matrix[free[:, None], free] = matrix

    def reweigh(self, weight: float) -> None:
        """Change the weight of the second gradient in all pairs."""
        if weight != self.weight:
            self.weight = weight
            self._forget()

    def add(self, s: Tensor, y: Tensor, upper: Tensor | None = None) -> None:
        """Add the pair of a step ``s`` that changed the gradient by ``y + weight * upper``."""
        length = torch.linalg.vector_norm(s)
        if not float(length) > 0:
            return
        s, y, upper = s / length, y / length, None if upper is None else upper / length  # keeps products in range
        change = self._weighted_change(y, upper)
        if not bool(torch.isfinite(change).all()) or not float(s @ change) > torch.finfo(s.dtype).eps * vector_norm(change):
            return
        self.rows.append((s, y, upper))
        if len(self.rows) > self.limit:
            self.rows.pop(0)
            self._forget()
        elif self._prepared:
            self._append(s, change)

    def _weighted_change(self, y: Tensor, upper: Tensor | None) -> Tensor:
        return y if upper is None else y + self.weight * upper

    def _prepare(self, mask: Tensor | None) -> None:
        """Compute the matrices of the pairs that have positive curvature on the free coordinates."""
        self._mask, self._prepared = mask, len(self.rows)
        if self.matrix is not None:  # of which the free block is inverted, not the free block of the inverse taken
            self._triangle = torch.linalg.cholesky(self.matrix if mask is None else self.matrix[mask][:, mask])
        if not self.rows:
            return
        S = torch.stack([row[0] for row in self.rows])
        Y = torch.stack([self._weighted_change(y, upper) for _, y, upper in self.rows])
        if mask is not None:
            S, Y = S * mask, Y * mask  # for the inverse of the free block of the Hessian
        products, sizes = (S * Y).sum(1), S.square().sum(1)
        if self.damping:
            largest = (products / sizes.clamp(min=torch.finfo(S.dtype).tiny)).max()
            Y = Y + self.damping * largest.clamp(min=0) * S
            products = (S * Y).sum(1)
        good = products > torch.finfo(S.dtype).eps * (sizes * Y.square().sum(1)).sqrt()
        S, Y, products = S[good], Y[good], products[good]
        self._S, self._Y = S, Y
        if len(S):
            self._HY = self._guess(Y)
            self._SY, self._YY = S @ Y.T, Y @ self._HY.T

    def _guess(self, rows: Tensor) -> Tensor:
        """Multiply rows by the inverse of the first guess; up to its scale, if that is the identity."""
        if self.matrix is None:
            return rows
        if self._mask is None:
            return torch.cholesky_solve(rows.T, self._triangle).T
        result = torch.zeros_like(rows)
        result[:, self._mask] = torch.cholesky_solve(rows[:, self._mask].T, self._triangle).T
        return result

    def _append(self, s: Tensor, y: Tensor) -> None:
        """Extend the matrices by a pair, which takes less time than computing all of them again."""
        if not len(self._S):
            self._prepared = 0
            return
        if self._mask is not None:
            s, y = s * self._mask, y * self._mask
        if self.damping:
            largest = max(float((self._SY.diagonal() / self._S.square().sum(1)).max()), float(s @ y / s.square().sum()))
            y = y + self.damping * largest * s
        if not float(s @ y) > torch.finfo(s.dtype).eps * vector_norm(s) * vector_norm(y):
            return
        weighted = self._guess(y[None])[0]
        below, right, corner = self._Y @ s, self._S @ y, (s @ y).reshape(1, 1)
        self._SY = torch.cat([torch.cat([self._SY, right[:, None]], 1), torch.cat([below[None], corner], 1)])
        side, corner = self._Y @ weighted, (y @ weighted).reshape(1, 1)
        self._YY = torch.cat([torch.cat([self._YY, side[:, None]], 1), torch.cat([side[None], corner], 1)])
        self._S, self._Y = torch.cat([self._S, s[None]]), torch.cat([self._Y, y[None]])
        self._HY = torch.cat([self._HY, weighted[None]])

    def direction(self, r: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return -H r on the coordinates of a boolean ``mask``, zero elsewhere; None if nothing is known, or uphill."""
        if not self.known:
            return None
        same = self._mask is mask or (self._mask is not None and mask is not None and torch.equal(self._mask, mask))
        if not (self._prepared and same):
            self._prepare(mask)
        r = r if mask is None else r * mask
        if not self.rows or not len(self._S):
            return None if self.matrix is None else -self._guess(r[None])[0]
        S, HY = self._S, self._HY
        products = self._SY.diagonal()
        scale = products[-1] / self._YY[-1, -1] if self.matrix is None else 1.0  # Oren-Luenberger scaling, of the last pair
        upper = self._SY.triu()
        u = torch.linalg.solve_triangular(upper, (S @ r)[:, None], upper=True)[:, 0]
        rest = products * u + scale * (self._YY @ u - HY @ r)
        v = torch.linalg.solve_triangular(upper.T, rest[:, None], upper=False)[:, 0]
        step = scale * (self._guess(r[None])[0] - u @ HY) + v @ S
        step = -step if mask is None else -step * mask
        slope, bound = float(step @ r), vector_norm(step) * vector_norm(r)
        return step if slope < -torch.finfo(r.dtype).eps * bound and math.isfinite(bound) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the pairs, and with how many of them the matrices were computed, as plain tensors and numbers."""
        rows = [list(row) for row in self.rows]
        return {"rows": rows, "weight": self.weight, "matrix": self.matrix, "mask": self._mask, "prepared": self._prepared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the pairs of another memory; the matrices are computed in the same order, so they agree bit for bit."""
        rows = [(s, y, upper) for s, y, upper in state["rows"]]
        self.weight, self.matrix, prepared = state["weight"], state["matrix"], state["prepared"]
        self.rows = rows[:prepared] if prepared else rows
        self._forget()
        if prepared:
            self._prepare(state["mask"])
            for s, y, upper in rows[prepared:]:
                self.rows.append((s, y, upper))
                self._append(s, self._weighted_change(y, upper))


@dataclass(eq=False)
class QuasiNewtonDescent(Generic[PointT]):
    """A proximal quasi-Newton method with a line search, one step at a time.

    Args:
        evaluate: h and its gradient at a vector, as an :class:`EvaluatedPoint`.
        pairs: the memory of curvature, to which each step adds a pair.
        prox: ``prox(z, step)``, the proximal map of g; None where g = 0.
        composite: whether g is more than the indicator of a set.
        t: the step of the proximal map; also the length of a step, in units of the residual, when ``pairs`` is empty.
        kinks: whether h may have kinks, so that a shortened step may be much too short.
        clock: records the time that directions take.
    """

    evaluate: Callable[[Tensor], PointT]
    pairs: LimitedMemory
    prox: Prox | None
    composite: bool
    t: float
    kinks: bool = False
    clock: Clock | None = None

    def residual(self, point: EvaluatedPoint) -> ProximalResidual:
        """Return the residual at a point, computed once for each t."""
        if point.seen is None or point.seen[0] != self.t:
            point.seen = self.t, self._residual(point)
        return point.seen[1]

    def _residual(self, point: EvaluatedPoint) -> ProximalResidual:
        ahead = point.z - self.t * point.gradient
        if self.prox is None:
            return ProximalResidual(point.gradient, None, ahead)
        target = self.prox(ahead, self.t)
        # A coordinate is fixed if the proximal map returns the same number for inputs a little above and below.
        nudge = torch.finfo(ahead.dtype).eps ** 0.5 * (ahead.abs() + self.t * point.gradient.abs())
        free = (self.prox(ahead + nudge, self.t) != target) | (self.prox(ahead - nudge, self.t) != target)
        return ProximalResidual((point.z - target) / self.t, free, target)

    def direction(self, point: EvaluatedPoint) -> tuple[Tensor, bool]:
        """Return the full step of the line search, and whether it is a quasi-Newton step."""
        r, free, target = self.residual(point)
        begin = time.perf_counter()
        d = self.pairs.direction(r, free)
        if self.clock is not None:
            self.clock.algebra += time.perf_counter() - begin
        if d is None:
            return target - point.z, False
        return d if free is None else torch.where(free, d, target - point.z), True

    def step(self, point: PointT, d: Tensor, remembered: bool, first: float = 1.0) -> PointT | None:
        """Search for a point with a smaller value, from the step ``first * d`` on; return None if there is none."""
        new = self._search(point, d, first, remembered)
        if new is not None and not (remembered or self.composite):  # the plain steps may be too short
            moved, steep = vector_norm(new.z - point.z), vector_norm(point.gradient)
            self.t = max(self.t, moved / steep) if steep else self.t
        if new is None and self.composite:
            new = self._plain(point)
        if new is not None:
            self._learn(point, new)
        return new

    def _learn(self, point: EvaluatedPoint, new: EvaluatedPoint) -> None:
        """Add the pair of a step to the memory."""
        (r, free, _), (after, still, _) = self.residual(point), self.residual(new)
        s, change, upper = new.z - point.z, after - r, None
        if point.upper is not None and new.upper is not None:
            upper = new.upper - point.upper
            change = change - self.pairs.weight * upper
        if free is not None and still is not None:  # a coordinate that became fixed or free tells nothing about h
            free = free & still
            s, change, upper = s * free, change * free, None if upper is None else upper * free
        self.pairs.add(s, change, upper)

    def _search(self, point: PointT, d: Tensor, first: float, remembered: bool) -> PointT | None:
        """Search along d; unless its length comes from the memory, the curvature condition of Wolfe must hold as well."""

        def trial(length: float) -> LineTrial[PointT]:
            ahead = point.z + length * d
            z = ahead if self.prox is None else self.prox(ahead, torch.finfo(ahead.dtype).tiny)  # in the domain of g
            new = self.evaluate(z)
            clipped = self.prox is not None and not torch.equal(z, ahead)
            slope = math.nan if self.composite or clipped else float(new.gradient @ d)
            promised = float(point.gradient @ (z - point.z)) + new.nonsmooth - point.nonsmooth
            return LineTrial(new, new.value if new.finite else math.inf, slope, promised)

        return line_search(
            trial,
            point.value,
            float(point.gradient @ d),
            noise=2 * point.noise,
            first=first,
            wolfe=not remembered,
            kinks=self.kinks,
            flatter=lambda new: vector_norm(self.residual(new).r) < vector_norm(self.residual(point).r),
            # With g, a plain step follows, which changes the free coordinates; without, the memory is cleared next.
            trials=1 if self.composite else TRIALS // 2,
        )

    def _plain(self, point: PointT) -> PointT | None:
        """Take a proximal gradient step, with t reduced until h is below its quadratic bound (as in ISTA)."""
        for _ in range(TRIALS):
            target = self.residual(point).target
            moved = target - point.z
            if not vector_norm(moved) > 0:
                return None
            new = self.evaluate(target)
            bound = float(point.gradient @ moved) + float(moved @ moved) / (2 * self.t)
            if new.finite and new.smooth - point.smooth <= bound + point.noise + new.noise:
                return new
            if new.finite and float((new.gradient - point.gradient) @ moved) <= float(moved @ moved) / self.t:
                return new  # the same for a quadratic h, without rounding
            self.t *= SHORTER
        return None
