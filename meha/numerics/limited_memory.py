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
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from meha.tensors.vectors import Clock

DESCENT, CURVATURE = 1e-4, 0.9  # the constants of Wolfe's conditions
TRIALS, COMPOSITE_TRIALS = 12, 3  # lengths tried along a direction; fewer with g, where plain steps follow
PLAIN_TRIALS, PLAIN_SHRINKAGE = 60, 0.4  # plain steps tried, and the factor from one to the next
GROWTH, SHRINKAGE = 4.0, 0.3  # factors for a length that is too short or too long, where no interpolation helps
NEAREST, FURTHEST = 0.05, 0.9  # where in its interval an interpolated length may lie; beyond, it is not trusted
RESOLUTION = 1e-12  # relative width of the interval at which the search for a length ends
INSIDE = 1e-30  # a step so short that a proximal map only brings a point into its domain
SPREAD, ENOUGH = 100.0, 3  # ratio of curvatures and number of pairs from which the first guess of the Hessian is a diagonal
POSITIVE, POSITIVE_FREE = 1e-10, 1e-8  # least cosine between the changes of a pair; on the free coordinates, where many fail
DOWNHILL = 1e-10  # least cosine between a direction and -r
TINY = 1e-300  # keeps a quotient finite
FEWEST_PAIRS = 5  # kept in any case
SPARE_PAIRS = 10  # kept beyond twice the dimension, at most: more repeat themselves
MOST_NUMBERS = 4_000_000  # fewer pairs are kept where they would hold more numbers than this

Prox = Callable[[Tensor, float], Tensor]


class _Trial(NamedTuple):
    """A step length along a direction, with the value and the slope there."""

    length: float
    value: float
    slope: float


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
    seen: tuple[float, ProximalResidual] | None = None

    @property
    def value(self) -> float:
        """h + g."""
        return self.smooth + self.nonsmooth

    @property
    def finite(self) -> bool:
        """Whether value and gradient are finite."""
        return math.isfinite(self.value) and bool(torch.isfinite(self.gradient).all())


PointT = TypeVar("PointT", bound=EvaluatedPoint)


def vector_norm(z: Tensor) -> float:
    """The Euclidean norm."""
    return float(torch.linalg.vector_norm(z))


class LimitedMemory:
    """L-BFGS: the inverse of a Hessian from changes of z and of the gradient, in compact form (Byrd, Nocedal, Schnabel 1994).

    A pair may hold the change of a second gradient, of a part of h that has a weight of its own; when the weight changes, all
    pairs stay exact.

    Args:
        limit: the largest number of pairs to keep.
        damping: this fraction of the largest curvature seen is added to that of each pair, which bounds the steps.
        inverse: multiplies columns by the initial inverse Hessian, for all coordinates; a diagonal by default.

    >>> pairs = LimitedMemory(5)
    >>> A = torch.diag(torch.tensor([1.0, 10.0], dtype=torch.float64))
    >>> for s in torch.eye(2, dtype=torch.float64):
    ...     pairs.add(s, A @ s)
    >>> pairs.direction(torch.tensor([1.0, 1.0], dtype=torch.float64))
    tensor([-1.0000, -0.1000], dtype=torch.float64)
    """

    def __init__(self, limit: int, damping: float = 0.0, inverse: Callable[[Tensor], Tensor] | None = None) -> None:
        self.limit, self.damping, self.inverse = limit, damping, inverse
        self.weight = 0.0
        self.rows: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._forget()

    @classmethod
    def sized(cls, most: int, n: int, damping: float = 0.0, inverse: Callable[[Tensor], Tensor] | None = None) -> LimitedMemory:
        """Return a memory for vectors of n numbers that keeps at most ``most`` pairs."""
        useful = 2 * n + SPARE_PAIRS
        return cls(max(FEWEST_PAIRS, min(most, useful, MOST_NUMBERS // n)), damping, inverse)

    def copy(self) -> LimitedMemory:
        """Return an independent copy with the same pairs."""
        other = LimitedMemory(self.limit, self.damping, self.inverse)
        other.rows, other.weight = list(self.rows), self.weight
        return other

    def _forget(self) -> None:
        """Drop the matrices; the next direction computes them again, and notes the number of pairs in ``_prepared``."""
        self._mask: Tensor | None = None
        self._prepared = 0

    def __len__(self) -> int:
        return len(self.rows)

    def clear(self) -> None:
        """Drop all pairs and the initial inverse Hessian."""
        self.rows, self.inverse = [], None
        self._forget()

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
        if not bool(torch.isfinite(change).all()) or not float(s @ change) > POSITIVE * vector_norm(change):
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
        S = torch.stack([row[0] for row in self.rows])
        Y = torch.stack([self._weighted_change(y, upper) for _, y, upper in self.rows])
        if mask is not None:
            S, Y = S * mask, Y * mask  # for the inverse of the free block of the Hessian
        products, sizes = (S * Y).sum(1), S.square().sum(1)
        if self.damping:
            largest = (products / sizes.clamp(min=TINY)).max()
            Y = Y + self.damping * largest.clamp(min=0) * S
            products = (S * Y).sum(1)
        good = products > POSITIVE_FREE * (sizes * Y.square().sum(1)).sqrt()
        S, Y, products = S[good], Y[good], products[good]
        diagonal = torch.ones(S.shape[1], dtype=S.dtype, device=S.device)
        if len(S) >= ENOUGH and self.inverse is None:
            diagonal = ((S.square() / products[:, None]).sum(0) / (Y.square() / products[:, None]).sum(0)).sqrt()
            inside = torch.isfinite(diagonal) & (diagonal > 0)
            middle = diagonal[inside].median() if bool(inside.any()) else torch.ones_like(products[0])
            diagonal = torch.where(inside, diagonal, middle)  # coordinates that never moved
            if not float(diagonal.max()) > SPREAD * float(diagonal.min()):
                diagonal = torch.ones_like(diagonal)
        self._S, self._Y, self._diagonal = S, Y, diagonal
        if len(S):
            self._HY = self._guess(Y)
            self._SY, self._YY = S @ Y.T, Y @ self._HY.T
        self._mask, self._prepared = mask, len(self.rows)

    def _guess(self, rows: Tensor) -> Tensor:
        """Multiply rows by the initial inverse Hessian, without the scale of the diagonal one."""
        return rows * self._diagonal if self.inverse is None else self.inverse(rows.T).T

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
        if not float(s @ y) > POSITIVE_FREE * float(torch.linalg.vector_norm(s) * torch.linalg.vector_norm(y)):
            return
        weighted = self._guess(y[None])[0]
        below, right, corner = self._Y @ s, self._S @ y, (s @ y).reshape(1, 1)
        self._SY = torch.cat([torch.cat([self._SY, right[:, None]], 1), torch.cat([below[None], corner], 1)])
        side, corner = self._Y @ weighted, (y @ weighted).reshape(1, 1)
        self._YY = torch.cat([torch.cat([self._YY, side[:, None]], 1), torch.cat([side[None], corner], 1)])
        self._S, self._Y = torch.cat([self._S, s[None]]), torch.cat([self._Y, y[None]])
        self._HY = torch.cat([self._HY, weighted[None]])

    def direction(self, r: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return -H r on the coordinates of ``mask``, zero elsewhere; None without usable pairs or if that is no descent."""
        if not self.rows:
            return None if self.inverse is None else -self.inverse(r[:, None])[:, 0]
        same = self._mask is mask or (self._mask is not None and mask is not None and torch.equal(self._mask, mask))
        if not (self._prepared and same):
            self._prepare(mask)
        if not len(self._S):
            return None
        r = r if mask is None else r * mask
        S, HY = self._S, self._HY
        products = self._SY.diagonal()
        scale = products[-1] / self._YY[-1, -1] if self.inverse is None else 1.0  # Oren-Luenberger scaling, of the last pair
        upper = self._SY.triu()
        u = torch.linalg.solve_triangular(upper, (S @ r)[:, None], upper=True)[:, 0]
        rest = products * u + scale * (self._YY @ u - HY @ r)
        v = torch.linalg.solve_triangular(upper.T, rest[:, None], upper=False)[:, 0]
        step = scale * (self._guess(r[None])[0] - u @ HY) + v @ S
        step = -step if mask is None else -step * mask
        slope, bound = float(step @ r), float(torch.linalg.vector_norm(step) * torch.linalg.vector_norm(r))
        return step if slope < -DOWNHILL * bound and math.isfinite(bound) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the pairs, and with how many of them the matrices were computed, as plain tensors and numbers."""
        rows = [list(row) for row in self.rows]
        return {"rows": rows, "weight": self.weight, "mask": self._mask, "prepared": self._prepared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the pairs of another memory; the matrices are computed in the same order, so they agree bit for bit."""
        rows = [(s, y, upper) for s, y, upper in state["rows"]]
        self.weight, prepared = state["weight"], state["prepared"]
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
        return ProximalResidual((point.z - target) / self.t, free.to(point.z.dtype), target)

    def direction(self, point: EvaluatedPoint) -> tuple[Tensor, bool]:
        """Return the full step of the line search, and whether it is a quasi-Newton step."""
        r, free, target = self.residual(point)
        begin = time.perf_counter()
        d = self.pairs.direction(r, free)
        if self.clock is not None:
            self.clock.algebra += time.perf_counter() - begin
        if d is None:
            return target - point.z, False
        return d if free is None else torch.where(free > 0, d, target - point.z), True

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
            free = free * still
            s, change, upper = s * free, change * free, None if upper is None else upper * free
        self.pairs.add(s, change, upper)

    def _search(self, point: PointT, d: Tensor, tau: float, remembered: bool) -> PointT | None:
        """Search along d for a point that satisfies Armijo's condition.

        If the length of d is only a guess, the curvature condition of Wolfe must hold as well; otherwise longer steps are
        tried.
        """
        first = float(point.gradient @ d)
        low, high = _Trial(0.0, point.value, first), _Trial(math.inf, math.nan, 0.0)
        best: PointT | None = None
        for _ in range(COMPOSITE_TRIALS if self.composite else TRIALS):
            ahead = point.z + tau * d
            z = ahead if self.prox is None else self.prox(ahead, INSIDE)  # in the domain of g
            new = self.evaluate(z)
            model = float(point.gradient @ (z - point.z)) + new.nonsmooth - point.nonsmooth
            change, noise = new.value - point.value, point.noise + new.noise
            clipped = self.prox is not None and not torch.equal(z, ahead)
            slope = float(new.gradient @ d) if new.finite and not clipped else math.nan
            lower = new.finite and change <= DESCENT * min(model, 0.0) and (model < 0 or change < 0)
            if not lower and new.finite and abs(change) <= noise:  # then compare residuals and slopes
                lower = vector_norm(self.residual(new).r) < vector_norm(self.residual(point).r)
                lower = lower or (not self.composite and abs(slope) <= (1 - 2 * DESCENT) * abs(first))  # Hager and Zhang, 2005
            shortened = high.length < math.inf
            if not lower:
                high = _Trial(tau, new.value, slope)
            elif self.composite or clipped or slope >= CURVATURE * first or (remembered and not (self.kinks and shortened)):
                return new
            else:
                best, low = new, _Trial(tau, new.value, slope)
            tau = self._next(low, high)
            if high.length < math.inf and high.length - low.length <= RESOLUTION * high.length:
                break
        return best

    def _next(self, low: _Trial, high: _Trial) -> float:
        """Return the next length: the zero of the interpolated slope or, near a kink, where the tangents meet."""
        if math.isinf(high.length):
            return GROWTH * low.length
        width = high.length - low.length
        share = SHRINKAGE
        if math.isfinite(high.slope) and high.slope > 0 > low.slope:
            turn = high.slope - low.slope
            share = (high.slope - (high.value - low.value) / width if self.kinks and low.length else -low.slope) / turn
            share = max(share, NEAREST) if share <= FURTHEST else SHRINKAGE
        return low.length + share * width

    def _plain(self, point: PointT) -> PointT | None:
        """Take a proximal gradient step, with t reduced until h is below its quadratic bound (as in ISTA)."""
        for _ in range(PLAIN_TRIALS):
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
            self.t *= PLAIN_SHRINKAGE
        return None
