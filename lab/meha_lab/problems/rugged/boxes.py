"""Non-convex lower levels on boxes, with solutions at corners, on faces and inside."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from meha.problem.problem import Problem
from meha.problem.sets import Box
from meha_lab.problems.blueprints import Array, Blueprint, Cast, double
from meha_lab.problems.collected import Region
from meha_lab.problems.rugged._forms import Numbers, tracking
from meha_lab.problems.rugged._minima import best, separable

__all__ = ["indefinite", "polynomial"]


def polynomial(
    fixed: Numbers, moved: Numbers, s: Numbers, t: Numbers, *, cross: float = 0.0, low: float = -1.0, high: float = 1.0
) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2 + cross <x, y>, f = sum_i p(y_i) + x_i q(y_i), low <= y <= high.

    p and q are polynomials with the coefficients ``fixed`` and ``moved`` of y, y^2, y^3 and so on.
    """
    fixed, moved, s, t = (np.asarray(part, dtype=float) for part in (fixed, moved, s, t))
    m = len(t)

    def value(coefficients: Array, y: Tensor) -> Tensor:
        total = torch.zeros_like(y)
        for coefficient in coefficients[::-1]:  # Horner's rule
            total = (total + coefficient) * y
        return total

    def build(cast: Cast) -> Problem:
        return Problem(
            tracking(cast, s, t, cross=cross),
            lambda x, y: (value(fixed, y) + x * value(moved, y)).sum(),
            y_set=Box(low, high),
        )

    def response(x: Tensor) -> Tensor:
        column, target = x[:, None], double(t)[:, None]
        ends = torch.ones(m, dtype=torch.float64)
        return separable(
            lambda y: value(fixed, y) + column * value(moved, y),
            lambda y: 0.5 * (y - target).square() + cross * column * y,
            low * ends,
            high * ends,
            extra=(low, high),
        )

    return Blueprint(
        build=build,
        x0=np.zeros(m),
        y0=np.full(m, 0.5 * (low + high)),
        response=response,
        region=Region((-1.5, 1.5), (low, high)),
    )


def indefinite(m: int, n: int, *, seed: int, lift: float = 0.0) -> Blueprint:
    """F = ||x - s||^2 / 2 + ||y - t||^2 / 2, f = y^T H y / 2 + (a + B x)^T y, -1 <= y <= 1, with an indefinite H.

    All points that satisfy the optimality conditions are found by going through the 3^m faces of the box. ``lift`` is added
    to the diagonal of H.
    """
    rng = np.random.default_rng(seed)
    H = rng.normal(size=(m, m)).round(2)
    H = 0.5 * (H + H.T) + lift * np.eye(m)
    a, B = rng.normal(size=m).round(2), (0.5 * rng.normal(size=(m, n))).round(2)
    s, t = rng.uniform(-1, 1, n).round(2), rng.uniform(-1, 1, m).round(2)
    faces = [np.array(face) for face in itertools.product((-1.0, 0.0, 1.0), repeat=m)]
    maps = []  # of the linear term to the stationary point of each face on which f is convex
    for face in faces:
        free = face == 0
        part = H[np.ix_(free, free)]
        if free.any() and np.linalg.eigvalsh(part).min() <= 1e-9:  # no minimum inside of this face
            continue
        shift, slope = face.copy(), np.zeros((m, m))
        if free.any():
            inverse = np.linalg.inv(part)
            shift[free] = -inverse @ H[np.ix_(free, ~free)] @ face[~free]
            slope[np.ix_(free, free)] = -inverse
        maps.append((shift, slope))
    shifts, slopes = double(np.array([shift for shift, _ in maps])), double(np.array([slope for _, slope in maps]))

    def build(cast: Cast) -> Problem:
        H_, a_, B_ = cast(H), cast(a), cast(B)
        return Problem(tracking(cast, s, t), lambda x, y: 0.5 * (y @ H_ @ y) + (a_ + B_ @ x) @ y, y_set=Box(-1.0, 1.0))

    def response(x: Tensor) -> Tensor:
        linear = double(a) + double(B) @ x
        rows = shifts + slopes @ linear
        # Signs of multipliers need no check: best compares the values, and the minimum is among the rows.
        rows = rows[(rows.abs() <= 1 + 1e-12).all(1)].clamp(-1, 1)
        return best(lambda y: (y - double(t)).square().sum(1), lambda y: 0.5 * ((y @ double(H)) * y).sum(1) + y @ linear, rows)

    return Blueprint(build=build, x0=np.zeros(n), y0=np.zeros(m), response=response, region=Region((-1.5, 1.5), (-1.0, 1.0)))
