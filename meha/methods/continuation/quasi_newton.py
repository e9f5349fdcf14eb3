"""Quasi-Newton steps for h(z) + g(z), with h smooth and the proximal map of g known, on flat vectors.

The residual r(z) = (z - prox_{t g}(z - t grad h(z))) / t takes the place of the gradient, and is the gradient where g = 0.
Coordinates that the proximal map holds fast (zeros of a lasso, bounds of a box) go where it puts them; the others take a step
along -H r, with H from a limited memory of pairs (change of z, change of r). A step must decrease h + g enough; when it does
not, shorter ones are tried, and then the plain proximal step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Descent", "Pairs", "Point", "Prox"]

DESCENT, CURVATURE = 1e-4, 0.9
"""The constants of Wolfe's conditions."""

TRIALS = 12

SPREAD = 100.0
"""From this ratio of curvatures of coordinates on, the first guess of the Hessian is a diagonal instead of a number."""

Prox = Callable[[Tensor, float], Tensor]

Residual = tuple[Tensor, Tensor | None, Tensor]
"""r; the coordinates that are free (None for all); and where the plain step leads."""


@dataclass(eq=False)
class Point:
    """h at z: its value and gradient, the value of g, and what else belongs to the evaluation.

    Attributes:
        noise: the error of the value.
        upper: the gradient of the part of h whose weight changes between solves, without that weight.
        seen: the last residual taken here, with its t.
    """

    z: Tensor
    smooth: float
    gradient: Tensor
    nonsmooth: float = 0.0
    noise: float = 0.0
    upper: Tensor | None = None
    extra: Any = None
    seen: tuple[float, Residual] | None = None

    @property
    def value(self) -> float:
        """h + g."""
        return self.smooth + self.nonsmooth

    @property
    def finite(self) -> bool:
        """Whether value and gradient are numbers."""
        return math.isfinite(self.value) and bool(torch.isfinite(self.gradient).all())


class Pairs:
    """The inverse of a Hessian from changes of z and of the gradient: limited-memory BFGS in its compact form.

    A pair may have a second change of gradient, that of a part of h with a weight of its own; when the weight changes, all
    pairs stay exact.

    Args:
        limit: how many pairs are kept, at most.
        damping: so many times the largest curvature seen is added to that of each pair, which bounds the steps.

    >>> pairs = Pairs(5)
    >>> A = torch.diag(torch.tensor([1.0, 10.0], dtype=torch.float64))
    >>> for s in torch.eye(2, dtype=torch.float64):
    ...     pairs.add(s, A @ s)
    >>> pairs.direction(torch.tensor([1.0, 1.0], dtype=torch.float64))
    tensor([-1.0000, -0.1000], dtype=torch.float64)
    """

    def __init__(self, limit: int, damping: float = 0.0) -> None:
        self.limit, self.damping = limit, damping
        self.weight = 0.0
        self.rows: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._forget()

    def _forget(self) -> None:
        self._mask: Tensor | None = None
        self._ready = False

    def __len__(self) -> int:
        return len(self.rows)

    def clear(self, keep: int = 0) -> None:
        """Forget all pairs but the last ``keep``."""
        self.rows = self.rows[len(self.rows) - keep :] if keep else []
        self._forget()

    def reweigh(self, weight: float) -> None:
        """Use another weight for the second changes of gradient from now on."""
        self.weight = weight
        self._forget()

    def add(self, s: Tensor, y: Tensor, upper: Tensor | None = None) -> None:
        """Learn that a step ``s`` changed the gradient by ``y + weight * upper``."""
        size = torch.linalg.vector_norm(s)
        if not float(size) > 0:
            return
        s, y, upper = s / size, y / size, None if upper is None else upper / size
        whole = y if upper is None else y + self.weight * upper
        if not bool(torch.isfinite(whole).all()) or not float(s @ whole) > 1e-10 * float(torch.linalg.vector_norm(whole)):
            return
        self.rows.append((s, y, upper))
        if len(self.rows) > self.limit:
            self.rows.pop(0)
            self._forget()
        elif self._ready:
            self._append(s, whole)

    def _prepare(self, mask: Tensor | None) -> None:
        """Matrices of the pairs that have positive curvature on the free coordinates."""
        S = torch.stack([row[0] for row in self.rows])
        Y = torch.stack([y if u is None else y + self.weight * u for _, y, u in self.rows])
        if mask is not None:
            S, Y = S * mask, Y * mask
        products, sizes = (S * Y).sum(1), S.square().sum(1)
        if self.damping:
            largest = (products / sizes.clamp(min=1e-300)).max()
            Y = Y + self.damping * largest.clamp(min=0) * S
            products = (S * Y).sum(1)
        good = products > 1e-8 * (sizes * Y.square().sum(1)).sqrt()
        S, Y, products = S[good], Y[good], products[good]
        diagonal = torch.ones(S.shape[1], dtype=S.dtype, device=S.device)
        if len(S) >= 3:
            diagonal = ((S.square() / products[:, None]).sum(0) / (Y.square() / products[:, None]).sum(0)).sqrt()
            inside = torch.isfinite(diagonal) & (diagonal > 0)
            middle = diagonal[inside].median() if bool(inside.any()) else torch.ones_like(products[0])
            diagonal = torch.where(inside, diagonal, middle)
            if not float(diagonal.max()) > SPREAD * float(diagonal.min()):
                diagonal = torch.ones_like(diagonal)
        self._S, self._Y, self._diagonal = S, Y, diagonal
        if len(S):
            self._SY, self._YY = S @ Y.T, Y @ (Y * diagonal).T
        self._mask, self._ready = mask, True

    def _append(self, s: Tensor, y: Tensor) -> None:
        if not len(self._S):
            self._ready = False
            return
        if self._mask is not None:
            s, y = s * self._mask, y * self._mask
        if self.damping:
            largest = max(float((self._SY.diagonal() / self._S.square().sum(1)).max()), float(s @ y / s.square().sum()))
            y = y + self.damping * largest * s
        if not float(s @ y) > 1e-8 * float(torch.linalg.vector_norm(s) * torch.linalg.vector_norm(y)):
            return
        weighted = self._diagonal * y
        below, right, corner = self._Y @ s, self._S @ y, (s @ y).reshape(1, 1)
        self._SY = torch.cat([torch.cat([self._SY, right[:, None]], 1), torch.cat([below[None], corner], 1)])
        side, corner = self._Y @ weighted, (y @ weighted).reshape(1, 1)
        self._YY = torch.cat([torch.cat([self._YY, side[:, None]], 1), torch.cat([side[None], corner], 1)])
        self._S, self._Y = torch.cat([self._S, s[None]]), torch.cat([self._Y, y[None]])

    def direction(self, r: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """-H r on the coordinates of ``mask``, zero elsewhere; None when nothing is known."""
        if not self.rows:
            return None
        same = self._mask is mask or (self._mask is not None and mask is not None and torch.equal(self._mask, mask))
        if not (self._ready and same):
            self._prepare(mask)
        if not len(self._S):
            return None
        r = r if mask is None else r * mask
        S, Y, diagonal = self._S, self._Y, self._diagonal
        products = self._SY.diagonal()
        scale = products[-1] / self._YY[-1, -1]
        upper = self._SY.triu()
        u = torch.linalg.solve_triangular(upper, (S @ r)[:, None], upper=True)[:, 0]
        rest = products * u + scale * (self._YY @ u - Y @ (diagonal * r))
        v = torch.linalg.solve_triangular(upper.T, rest[:, None], upper=False)[:, 0]
        found = scale * diagonal * (r - Y.T @ u) + v @ S
        found = -found if mask is None else -found * mask
        slope, size = float(found @ r), float(torch.linalg.vector_norm(found) * torch.linalg.vector_norm(r))
        return found if slope < -1e-10 * size and math.isfinite(size) else None

    def state_dict(self) -> dict[str, Any]:
        """The pairs, as plain tensors."""
        return {"rows": [list(row) for row in self.rows], "weight": self.weight, "limit": self.limit, "damping": self.damping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the pairs of another memory."""
        self.rows, self.weight = [(s, y, u) for s, y, u in state["rows"]], state["weight"]
        self._forget()


class Descent:
    """Steps that decrease h + g, one at a time.

    Args:
        evaluate: h and its gradient at a vector, as a :class:`Point`.
        pairs: what is known about the curvature; it learns from each step.
        prox: ``prox(z, step)``, the proximal map of g; None where g = 0.
        composite: whether g is more than the indicator of a set.
        t: the step of the proximal map; also the length of a step, in units of the residual, when ``pairs`` is empty.
    """

    def __init__(self, evaluate: Callable[[Tensor], Point], pairs: Pairs, prox: Prox | None, composite: bool, t: float) -> None:
        self.evaluate, self.pairs, self.prox, self.composite, self.t = evaluate, pairs, prox, composite, t

    def residual(self, point: Point) -> Residual:
        """The residual at a point."""
        if point.seen is None or point.seen[0] != self.t:
            point.seen = self.t, self._residual(point)
        return point.seen[1]

    def _residual(self, point: Point) -> Residual:
        ahead = point.z - self.t * point.gradient
        if self.prox is None:
            return point.gradient, None, ahead
        target = self.prox(ahead, self.t)
        nudge = torch.finfo(ahead.dtype).eps ** 0.5 * (ahead.abs() + self.t * point.gradient.abs())
        free = (self.prox(ahead + nudge, self.t) != target) | (self.prox(ahead - nudge, self.t) != target)
        return (point.z - target) / self.t, free.to(point.z.dtype), target

    def direction(self, point: Point) -> tuple[Tensor, bool]:
        """The step to try first, and whether the memory gave it."""
        r, free, target = self.residual(point)
        found = self.pairs.direction(r, free)
        if found is None:
            return target - point.z, False
        return found if free is None else torch.where(free > 0, found, target - point.z), True

    def step(self, point: Point, d: Tensor, remembered: bool, first: float = 1.0) -> Point | None:
        """A point with a smaller value, from ``first`` times ``d`` on; None if there is none."""
        new = self._search(point, d, first, remembered)
        if new is not None and not (remembered or self.composite):  # the plain steps may be too short
            moved, steep = (float(torch.linalg.vector_norm(v)) for v in (new.z - point.z, point.gradient))
            self.t = max(self.t, moved / steep) if steep else self.t
        if new is None and self.composite:
            new = self._plain(point)
        if new is not None:
            self._learn(point, new)
        return new

    def _learn(self, point: Point, new: Point) -> None:
        (r, free, _), (after, still, _) = self.residual(point), self.residual(new)
        s, change, upper = new.z - point.z, after - r, None
        if point.upper is not None and new.upper is not None:
            upper = new.upper - point.upper
            change = change - self.pairs.weight * upper
        if free is not None and still is not None:  # a coordinate that the map caught or let go says nothing of h
            free = free * still
            s, change, upper = s * free, change * free, None if upper is None else upper * free
        self.pairs.add(s, change, upper)

    def _search(self, point: Point, d: Tensor, tau: float, remembered: bool) -> Point | None:
        """Along d, to a point that is low enough.

        Where d is no more than a guess of its length, the slope must also have fallen (Wolfe's second condition): otherwise
        longer steps are tried.
        """
        low, high, slope_low = 0.0, math.inf, float(point.gradient @ d)
        first = slope_low
        slope_high = 0.0
        best: Point | None = None
        for _ in range(3 if self.composite else TRIALS):
            ahead = point.z + tau * d
            z = ahead if self.prox is None else self.prox(ahead, 1e-30)  # in the domain of g
            new = self.evaluate(z)
            model = float(point.gradient @ (z - point.z)) + new.nonsmooth - point.nonsmooth
            change, noise = new.value - point.value, point.noise + new.noise
            held = self.prox is not None and not torch.equal(z, ahead)
            slope = float(new.gradient @ d) if new.finite and not held else math.nan
            lower = new.finite and change <= DESCENT * min(model, 0.0) and (model < 0 or change < 0)
            if not lower and new.finite and abs(change) <= noise:  # the values say nothing more
                before, after = self.residual(point)[0], self.residual(new)[0]
                lower = float(torch.linalg.vector_norm(after)) < float(torch.linalg.vector_norm(before))
                lower = lower or (not self.composite and abs(slope) <= (1 - 2 * DESCENT) * abs(first))
            if not lower:
                high, slope_high = tau, slope
            elif self.composite or remembered or held or slope >= CURVATURE * first:
                return new
            else:
                best, low, slope_low = new, tau, slope
            tau = self._next(low, high, slope_low, slope_high)
            if high < math.inf and high - low <= 1e-12 * high:
                break
        return best

    @staticmethod
    def _next(low: float, high: float, slope_low: float, slope_high: float) -> float:
        if math.isinf(high):
            return 4 * low
        if math.isfinite(slope_high) and slope_high > 0 > slope_low:
            share = max(-slope_low / (slope_high - slope_low), 0.05)
            return low + (share if share <= 0.9 else 0.3) * (high - low)
        return low + 0.3 * (high - low)

    def _plain(self, point: Point) -> Point | None:
        """A proximal step, with t shortened until it decreases h + g as it should."""
        for _ in range(60):
            target = self.residual(point)[2]
            moved = target - point.z
            if not float(torch.linalg.vector_norm(moved)) > 0:
                return None
            new = self.evaluate(target)
            bound = float(point.gradient @ moved) + float(moved @ moved) / (2 * self.t)
            if new.finite and new.smooth - point.smooth <= bound + point.noise + new.noise:
                return new
            if new.finite and float((new.gradient - point.gradient) @ moved) <= float(moved @ moved) / self.t:
                return new  # the same for a quadratic h, without rounding
            self.t *= 0.4
        return None
