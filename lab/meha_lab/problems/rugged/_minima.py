"""Global minima of functions of few variables: grids, bisection and Newton steps, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["best", "box_minima", "chain_minima", "line_minima", "lowest", "newton", "separable"]


TIE = 2e-10  # twice the tolerance with which answers were searched: these lie on its edge, where rounding would decide
"""Relative difference of lower values, by 1 + |value|, up to which they count as equal."""

Function = Callable[[Tensor], Tensor]


def line_minima(phi: Function, low: Tensor, high: Tensor, *, points: int = 401, extra: Sequence[float] = ()) -> Tensor:
    """Return the local minima of functions of one variable on intervals, one function a row.

    Args:
        phi: takes and returns a matrix; row i holds points of function i. Its derivative may jump.
        low: the left ends of the intervals, one a row.
        high: the right ends.
        points: the size of the grid that separates the minima; each is found by bisection of the derivative.
        extra: points that are candidates in every row, such as kinks.

    Rows with fewer minima repeat their last one.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> line_minima(lambda y: (y.square() - 4).square(), -3 * one, 3 * one)
    tensor([[-2.,  2.]], dtype=torch.float64)
    """
    grid = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, points, dtype=low.dtype)
    with torch.no_grad():
        values = phi(grid)
    wall = torch.full_like(values[:, :1], torch.inf)  # ends of the intervals can be minima
    left, right = torch.cat([wall, values[:, :-1]], 1), torch.cat([values[:, 1:], wall], 1)
    # One strict comparison: a flat piece of the grid counts once, not at each of its points.
    places = [torch.nonzero(row).reshape(-1) for row in (values <= left) & (values < right)]
    count = max(len(row) for row in places)
    index = torch.stack([torch.cat([row, row[-1:].expand(count - len(row))]) for row in places])
    a, c = (grid.gather(1, (index + move).clamp(0, points - 1)) for move in (-1, 1))
    more = torch.tensor(list(extra), dtype=low.dtype).expand(len(low), len(extra))
    a, c = _bisect(phi, a, c, 12)  # close enough for Newton steps, which are cheaper than 48 more halvings
    y, done = _polished(phi, a, c)
    # Bisection finishes where Newton steps fail, unless the interval holds an extra point, which is the kink there.
    if not bool((done | ((a[..., None] <= more[:, None]) & (more[:, None] <= c[..., None])).any(-1)).all()):
        a, c = _bisect(phi, a, c, 48)
        ends = torch.where(c >= high[:, None], c, torch.where(a <= low[:, None], a, 0.5 * (a + c)))
        y = torch.where(done, y, ends)
    return torch.cat([more, y], 1)


def _bisect(phi: Function, a: Tensor, c: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Halve the intervals [a, c] around places where the derivative of phi changes its sign."""
    for _ in range(steps):
        middle = 0.5 * (a + c)
        rising = _slope(phi, middle) > 0
        a, c = torch.where(rising, a, middle), torch.where(rising, middle, c)
    return a, c


def _polished(phi: Function, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Take Newton steps inside of [a, c]; return where they end, and whether they converged to a minimum inside."""
    y, move = 0.5 * (a + c), c - a
    for _ in range(6):
        with torch.enable_grad():
            z = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(phi(z).sum(), z, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), z) if slope.requires_grad else (torch.zeros_like(z),)
        new = (y - slope.detach() / curvature).clamp(a, c)  # 0 / 0 gives NaN, which the next line skips
        move, y = (new - y).abs(), torch.where(new.isnan(), y, new)
    return y, (move <= 1e-14 * (1 + y.abs())) & (y > a) & (y < c) & (curvature > 0)


def _slope(f: Function, y: Tensor) -> Tensor:
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(y).sum(), y)
    return slope


def lowest(values: Tensor) -> Tensor:
    """Return a mask of the entries that equal the minimum of the last axis, up to :data:`TIE`."""
    least = values.amin(-1, keepdim=True)
    return values <= least + TIE * (1 + least.abs())


def separable(
    phi: Function, score: Function, low: Tensor, high: Tensor, *, points: int = 401, extra: Sequence[float] = ()
) -> Tensor:
    """Return the minimiser of sum_i phi_i(y_i) with the least sum_i score_i(y_i); arguments as for :func:`line_minima`."""
    minima = line_minima(phi, low, high, points=points, extra=extra)
    with torch.no_grad():
        scores = torch.where(lowest(phi(minima)), score(minima), torch.inf)
    return minima.gather(1, scores.argmin(1, keepdim=True)).reshape(-1)


def newton(f: Function, y: Tensor, *, steps: int = 60) -> Tensor:
    """Descend from each row of ``y`` to a local minimum of f by Newton steps on |curvatures|, with a line search.

    ``f`` maps a matrix of points, one a row, to a vector.
    """
    lengths = torch.tensor([1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 1e-3], dtype=y.dtype)
    for _ in range(steps):
        slope, curvature = derivatives(f, y)
        signed, axes = torch.linalg.eigh(curvature)
        values = signed.abs().clamp(min=1e-10)  # |curvature|: saddles repel
        move = -(axes @ ((axes.mT @ slope[..., None]) / values[..., None]))[..., 0]
        # No step is longer than 1 + |y|: near zero curvature, Newton steps explode.
        move = move / (move.norm(dim=1, keepdim=True) / (1 + y.norm(dim=1, keepdim=True))).clamp(min=1)
        trials = y + lengths[:, None, None] * move
        with torch.no_grad():
            here, there = f(y), torch.stack([f(trial) for trial in trials])
        value, chosen = there.min(0)
        new = trials[chosen, torch.arange(len(y))]
        # Near a proper minimum, rounding hides a decrease; there the Newton step is taken as it is.
        near = (slope.norm(dim=1) <= 1e-5 * (1 + here.abs())) & (signed.amin(1) > 1e-6)
        new = torch.where(near[:, None], trials[0], torch.where((value < here)[:, None], new, y))
        if bool(((new - y).abs() <= 1e-15 * (1 + y.abs())).all()):
            break
        y = new
    return y


def derivatives(f: Function, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients and Hessians of f at the rows of ``y``."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(y).sum(), y, create_graph=True)
        rows = [torch.autograd.grad(slope[:, j].sum(), y, retain_graph=True)[0] for j in range(y.shape[1])]
    return slope.detach(), torch.stack(rows, 1)


def box_minima(f: Function, low: Tensor, high: Tensor, *, points: int = 41, kept: int = 12) -> Tensor:
    """Return local minima of a function of two to four variables: the lowest local minima of a grid, then Newton steps.

    ``f`` maps a matrix of points, one a row, to a vector; minima are rows.
    """
    m = len(low)
    axes = [torch.linspace(float(a), float(b), points, dtype=low.dtype) for a, b in zip(low, high, strict=True)]
    grid = torch.cartesian_prod(*axes)
    with torch.no_grad():
        values = f(grid).reshape((points,) * m)
    # A grid point is a local minimum if none of its 2 m neighbours along the axes is lower.
    local = torch.ones_like(values, dtype=torch.bool)
    for axis in range(m):
        first, second = values.narrow(axis, 0, points - 1), values.narrow(axis, 1, points - 1)
        local.narrow(axis, 0, points - 1).logical_and_(first <= second)
        local.narrow(axis, 1, points - 1).logical_and_(second <= first)
    places = torch.nonzero(local.reshape(-1)).reshape(-1)
    order = values.reshape(-1)[places].argsort()[:kept]
    return newton(f, grid[places[order]])


def chain_minima(phi: Function, coupling: float, low: float, high: float, m: int, *, points: int = 201) -> Tensor:
    """Return local minima of sum_i phi_i(y_i) + coupling / 2 sum_i (y_{i+1} - y_i)^2, the global one among them.

    Dynamic programming on a grid gives the best path through each value of each y_i. For every i, the paths that are local
    minima among these are refined by Newton steps; two paths that tie differ in some y_i, so both are found.
    """
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    with torch.no_grad():
        single = phi(grid.expand(m, points))
    link = 0.5 * coupling * (grid[:, None] - grid).square()
    before, after = _messages(single, link), _messages(single.flip(0), link)
    paths = []
    for i in range(m):
        through = single[i] + before[i][0] + after[m - 1 - i][0]
        wall = through.new_full((1,), torch.inf)
        index = torch.nonzero(
            (through <= torch.cat([wall, through[:-1]])) & (through <= torch.cat([through[1:], wall]))
        ).reshape(-1)
        left, right = [index], [index]
        for j in range(i, 0, -1):
            left.append(before[j][1][left[-1]])
        for j in range(m - 1 - i, 0, -1):
            right.append(after[j][1][right[-1]])
        paths.append(torch.stack([*reversed(left), *right[1:]], 1))

    def f(y: Tensor) -> Tensor:
        return phi(y.mT).sum(0) + 0.5 * coupling * y.diff(dim=1).square().sum(1)

    return newton(f, grid[torch.unique(torch.cat(paths), dim=0)])


def _messages(single: Tensor, link: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, for each value of each row, the least cost of all rows before it, and the value before that attains it."""
    messages = [(torch.zeros_like(single[0]), torch.zeros_like(single[0], dtype=torch.long))]
    for row in single[:-1]:
        least, move = (link + row + messages[-1][0]).min(1)
        messages.append((least, move))
    return messages


def best(upper: Function, lower: Function, candidates: Tensor) -> Tensor:
    """Return the row with the least ``upper`` among those with the least ``lower``; both map a matrix to a vector."""
    with torch.no_grad():
        scores = torch.where(lowest(lower(candidates)), upper(candidates), torch.inf)
    return candidates[scores.argmin()]
