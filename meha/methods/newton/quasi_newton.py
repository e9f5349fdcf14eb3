"""Quasi-Newton steps in x: memories of curvature, a search along projected steps, and a test of kinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meha.methods.newton.hyper import HyperObjective, Value
from meha.methods.newton.tuning import TUNING

__all__ = ["DenseMemory", "Memory", "PairMemory", "memory_for", "search", "shortest_combination"]


class Memory:
    """Curvature of the hyper-objective, learned from differences of gradients."""

    def direction(self, gradient: Tensor, free: Tensor) -> Tensor | None:
        """-B^-1 gradient on the free coordinates, zero on the others; None while nothing is known."""
        raise NotImplementedError

    def update(self, move: Tensor, change: Tensor) -> None:
        """Learn from a move in x and the change of the gradient."""
        raise NotImplementedError

    def replace(self, matrix: Tensor, free: Tensor) -> None:
        """Take over the curvature of the free coordinates, if it is positive definite."""

    def clear(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain tensors."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a memory."""
        vars(self).update(state)


class DenseMemory(Memory):
    """The matrix B of BFGS, without the updates that would make it indefinite."""

    def __init__(self) -> None:
        self.matrix: Tensor | None = None

    def direction(self, gradient: Tensor, free: Tensor) -> Tensor | None:
        if self.matrix is None:
            return None
        whole = bool(free.all())
        matrix = self.matrix if whole else self.matrix[free][:, free]
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info):
            self.clear()
            return None
        part = gradient if whole else gradient[free]
        step = -torch.cholesky_solve(part[:, None], lower)[:, 0]
        return step if whole else torch.zeros_like(gradient).masked_scatter_(free, step)

    def update(self, move: Tensor, change: Tensor) -> None:
        product = float(torch.dot(move, change))
        if self.matrix is None:
            square = float(torch.dot(move, move))
            size = float(torch.dot(change, change)) / product if product > 0 else 0.0
            if not (0 < size < math.inf and square):
                return
            self.matrix = size * torch.eye(len(move), dtype=move.dtype, device=move.device)
        image = self.matrix @ move
        curvature = float(torch.dot(move, image))
        if not (curvature > 0 and product > torch.finfo(move.dtype).eps * curvature):
            return
        self.matrix = self.matrix - torch.outer(image, image / curvature) + torch.outer(change, change / product)

    def replace(self, matrix: Tensor, free: Tensor) -> None:
        matrix = (matrix + matrix.T) / 2
        _, info = torch.linalg.cholesky_ex(matrix)
        if not int(info) and self.matrix is not None:
            self.matrix = torch.diag(self.matrix.diagonal())
            self.matrix[free[:, None], free] = matrix

    def clear(self) -> None:
        self.matrix = None


class PairMemory(Memory):
    """The pairs of L-BFGS, restricted to the free coordinates."""

    def __init__(self) -> None:
        self.moves: list[Tensor] = []
        self.changes: list[Tensor] = []

    def direction(self, gradient: Tensor, free: Tensor) -> Tensor | None:
        if not self.moves:
            return None
        mask = free.to(gradient.dtype)
        q, kept = gradient * mask, []
        for s, change in zip(self.moves, self.changes, strict=True):
            y = change * mask
            product = float(torch.dot(s, y))
            if product > torch.finfo(q.dtype).eps * float(torch.dot(y, y)):
                kept.append((s * mask, y, product))
        if not kept:
            return None
        weights = []
        for s, y, product in reversed(kept):
            weights.append(float(torch.dot(s, q)) / product)
            q = q - weights[-1] * y
        _, y, product = kept[-1]
        q = q * (product / float(torch.dot(y, y)))
        for (s, y, product), weight in zip(kept, reversed(weights), strict=True):
            q = q + (weight - float(torch.dot(y, q)) / product) * s
        return -q

    def update(self, move: Tensor, change: Tensor) -> None:
        if float(torch.dot(move, change)) > 0:
            self.moves = [*self.moves, move][-TUNING.pairs :]
            self.changes = [*self.changes, change][-TUNING.pairs :]

    def clear(self) -> None:
        self.moves, self.changes = [], []


def memory_for(size: int) -> Memory:
    """The memory for this number of coordinates of x."""
    return DenseMemory() if size <= TUNING.dense_x else PairMemory()


def search(
    objective: HyperObjective, start: Value, direction: Tensor, project: Callable[[Tensor], Tensor], eps: float
) -> tuple[Value | None, list[Value]]:
    """A point of lower F and smaller slope along the projected direction, and all points that were tried.

    The conditions are those of Wolfe in their weak form, found by growth and bisection; where differences of F are lost in
    rounding, a smaller slope is enough.
    """
    low, high, length = 0.0, math.inf, 1.0
    slope = float(torch.dot(start.gradient, direction))
    noise = eps**TUNING.loose_power * abs(start.F)
    best: Value | None = None
    tried: list[Value] = []
    guess = start.y
    for _ in range(TUNING.trials):
        x = project(start.x + length * direction)
        move = x - start.x
        if not bool(move.any()):
            break
        new = objective(x, guess)
        tried.append(new)
        promised = float(torch.dot(start.gradient, move))
        now = float(torch.dot(new.gradient, direction)) if math.isfinite(new.F) else 0.0
        decreased = new.F <= start.F + TUNING.decrease * promised
        level = abs(new.F - start.F) <= noise and abs(now) <= TUNING.level * abs(slope)
        if math.isfinite(new.F) and new.regular and (decreased or level):
            if best is None or new.F <= best.F:
                best = new
            clipped = not torch.equal(x, start.x + length * direction)
            if now >= TUNING.slope * slope or clipped:
                return new if decreased or best is None else best, tried
            low, guess = length, new.y
        else:
            high = length
        length = TUNING.growth * length if high == math.inf else (low + high) / 2
        if high - low <= eps * high:
            break
    return best, tried


def shortest_combination(gradients: Tensor) -> Tensor:
    """The shortest vector in the convex hull of the rows, by steps that move weight towards the best row."""
    weights = torch.full_like(gradients[:, 0], 1 / len(gradients))
    gram = gradients @ gradients.T
    for _ in range(TUNING.kink_steps):
        slopes = gram @ weights
        used = weights > 0
        best = int(slopes.argmin())
        worst = int(torch.where(used, slopes, -math.inf).argmax())
        curvature = float(gram[best, best] + gram[worst, worst] - 2 * gram[best, worst])
        if not curvature > 0:
            break
        length = min(float(slopes[worst] - slopes[best]) / curvature, float(weights[worst]))
        weights[best] += length
        weights[worst] -= length
    return gradients.T @ weights
