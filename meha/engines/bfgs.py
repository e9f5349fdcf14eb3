"""L-BFGS in x: the memory of curvature, a weak Wolfe line search with projection, and the stationarity test at kinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meha.engines.hyper_objective import HyperObjective, HyperValue
from meha.lower.newton_tuning import TUNING


class BFGS:
    """L-BFGS memory of the curvature of the hyper-objective, from moves in x and changes of the gradient.

    The initial Hessian is a multiple of the identity that fits the last pair (Oren and Luenberger), since the curvature in
    unexplored directions is best guessed by that of the last one; or a matrix, once one was measured.
    """

    def __init__(self) -> None:
        self.moves: Tensor | None = None
        self.changes: Tensor | None = None
        self.matrix: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of pairs."""
        return 0 if self.moves is None else len(self.moves)

    @property
    def known(self) -> bool:
        """Whether there is a pair or a measured matrix."""
        return self.moves is not None or self.matrix is not None

    def direction(self, gradient: Tensor, free: Tensor) -> Tensor | None:
        """-B^-1 gradient on the free coordinates, zero on the others; None while nothing is known.

        B^-1 is applied in compact form (Byrd, Nocedal and Schnabel, 1994): two triangular systems instead of two loops.
        """
        whole = bool(free.all())
        g = gradient if whole else gradient[free]
        if self.moves is None or self.changes is None:
            if self.matrix is None:
                return None
            return self._spread(-self._begin(g[:, None], free, 1.0)[:, 0], gradient, free, whole)
        # Pairs are restricted first: the inverse of the free block of B is wanted, not the free block of the inverse.
        S, Y = (self.moves, self.changes) if whole else (self.moves[:, free], self.changes[:, free])
        products = (S * Y).sum(1)
        squares = (Y * Y).sum(1)
        good = products > torch.finfo(g.dtype).eps * squares  # a restricted pair may have no positive curvature left
        if not bool(good.all()):
            S, Y, products, squares = S[good], Y[good], products[good], squares[good]
        if not len(S):
            return None
        scale = float(products[-1] / squares[-1])
        images = self._begin(torch.cat([g[None], Y]).T, free, scale)
        first, HY = images[:, 0], images[:, 1:]
        R = (S @ Y.T).triu()
        u = torch.linalg.solve_triangular(R, (S @ g)[:, None], upper=True)
        right = products[:, None] * u + (Y @ HY) @ u - (Y @ first)[:, None]
        w = torch.linalg.solve_triangular(R.T, right, upper=False)
        step = -(first + S.T @ w[:, 0] - HY @ u[:, 0])
        return self._spread(step, gradient, free, whole)

    def update(self, move: Tensor, change: Tensor) -> None:
        """Learn from a move in x and the change of the gradient."""
        if float(torch.dot(move, change)) > 0:  # B stays positive definite; steps that meet the Wolfe conditions pass this
            new = move[None], change[None]
            if self.moves is None or self.changes is None:
                self.moves, self.changes = new
            else:
                keep = slice(1 - TUNING.pairs, None)
                self.moves = torch.cat([self.moves[keep], new[0]])
                self.changes = torch.cat([self.changes[keep], new[1]])

    def replace(self, matrix: Tensor, free: Tensor, size: int) -> None:
        """Replace the pairs by a measured Hessian of the free coordinates, if it is positive definite."""
        matrix = (matrix + matrix.T) / 2  # differences of gradients are not symmetric
        _, info = torch.linalg.cholesky_ex(matrix)
        if not int(info):
            self.clear()
            # Coordinates at a bound were not measured, and may become free: they get the mean curvature.
            self.matrix = float(matrix.diagonal().mean()) * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
            self.matrix[free[:, None], free] = matrix

    def clear(self) -> None:
        """Forget everything."""
        self.moves = self.changes = self.matrix = None

    def state_dict(self) -> dict[str, Any]:
        """All pairs and the matrix, as plain tensors."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved."""
        vars(self).update(state)

    def _begin(self, columns: Tensor, free: Tensor, scale: float) -> Tensor:
        """The inverse of the initial Hessian, times the columns."""
        if self.matrix is None:
            return scale * columns
        return torch.cholesky_solve(columns, torch.linalg.cholesky(self.matrix[free][:, free]))

    def _spread(self, step: Tensor, gradient: Tensor, free: Tensor, whole: bool) -> Tensor:
        return step if whole else torch.zeros_like(gradient).masked_scatter_(free, step)


def line_search(
    objective: HyperObjective, start: HyperValue, direction: Tensor, project: Callable[[Tensor], Tensor], eps: float
) -> tuple[HyperValue | None, list[HyperValue]]:
    """Find a point along the projected direction that meets the weak Wolfe conditions; returns it and all trials.

    Lengths grow until they bracket such a point, and are then bisected; this also converges where F has kinks (Lewis and
    Overton, 2013). Where differences of F are lost in rounding, a smaller slope is enough (Hager and Zhang, 2005).
    """
    low, high, length = 0.0, math.inf, 1.0
    slope = float(torch.dot(start.gradient, direction))
    noise = eps**TUNING.loose_power * abs(start.F)
    best: HyperValue | None = None
    tried: list[HyperValue] = []
    guess = start.y
    for _ in range(TUNING.trials):
        end = torch.add(start.x, direction, alpha=length)
        x = project(end)
        move = x - start.x
        if not bool(move.any()):  # X blocks the direction, or the length is below rounding
            break
        if tried and torch.equal(x, tried[-1].x):  # a bound of X holds it
            new = tried[-1]
        else:
            new = objective(x, guess)
            tried.append(new)
        if sum(math.isinf(value.F) for value in tried) >= TUNING.unsolved:  # failed solves cost most
            break
        promised = float(torch.dot(start.gradient, move))
        now = float(torch.dot(new.gradient, direction)) if math.isfinite(new.F) else 0.0
        decreased = start.F + TUNING.decrease * promised >= new.F  # Armijo, with the usual 1e-4: almost any decrease will do
        level = abs(new.F - start.F) <= noise and abs(now) <= TUNING.level * abs(slope)
        if math.isfinite(new.F) and new.regular and (decreased or level):
            if best is None or new.F <= best.F:
                best = new
            clipped = x is not end and not torch.equal(x, end)  # at the boundary of X, a longer step need not lower the slope
            if now >= TUNING.slope * slope or clipped or length >= TUNING.longest:
                return new if decreased or best is None else best, tried
            low, guess = length, new.y
        else:
            high = length
        length = TUNING.growth * length if high == math.inf else (low + high) / 2
        if high < math.inf and high - low <= eps * high:
            break
    return best, tried


def shortest_combination(gradients: Tensor) -> Tensor:
    """The shortest vector in the convex hull of the rows, by pairwise steps that move weight from the worst to the best row.

    At a kink, x is stationary if zero is a convex combination of the gradients around it, although none of them is zero.
    """
    weights = torch.full_like(gradients[:, 0], 1 / len(gradients))
    gram = gradients @ gradients.T
    for _ in range(TUNING.kink_steps):
        slopes = gram @ weights
        used = weights > 0  # weight can only be taken from these
        best = int(slopes.argmin())
        worst = int(torch.where(used, slopes, -math.inf).argmax())
        curvature = float(gram[best, best] + gram[worst, worst] - 2 * gram[best, worst])
        if not curvature > 0:
            break
        length = min(float(slopes[worst] - slopes[best]) / curvature, float(weights[worst]))  # exact minimum along the pair
        weights[best] += length
        weights[worst] -= length
    return gradients.T @ weights
