"""The paper's four toy problems, in any dimension, with their closed-form solutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meha.methods import MEHA
from meha.nonsmooth import L1
from meha.nonsmooth._base import soft
from meha.problems.base import Distance, KnownProblem, relative
from meha.schedules import InversePower
from meha.sets import Box
from meha.theory import Constants

__all__ = ["lasso", "merely_convex", "sine", "strong_convex"]

GOLDEN = (1 + math.sqrt(5)) / 2
"""The norm of [[0, 1], [1, 1]], the Hessian of y^2/2 - x y."""


def strong_convex(n: int = 100, *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """Strongly convex toy: F = ||x - e||^2 / 2 + ||y||^2 / 2, f = ||y||^2 / 2 - <x, y>; x* = y* = e / 2 (e: all ones).

    The paper states neither n nor the start; n = 100 and x0 = y0 = 2 are our reading.

    >>> import meha
    >>> problem = strong_convex(n=10)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, problem.preset("recipe"), max_steps=800)
    >>> print(f"{problem.distance(solution.x, solution.y).x:.2f}")
    0.03
    """
    _check_dimension(n, 1)
    one = torch.ones(n, dtype=dtype, device=device)
    half = one / 2
    table = MEHA(alpha=1.5, beta=0.8, eta=0.8, gamma=10.0, c=33.3, p=0.49)
    return KnownProblem(
        name=f"strong convex, n = {n}",
        upper=lambda x, y: 0.5 * (x - one).square().sum() + 0.5 * y.square().sum(),
        lower=lambda x, y: 0.5 * y.square().sum() - (x * y).sum(),
        x0=2 * one,
        y0=2 * one,
        x_star=half,
        y_star=half,
        upper_star=n / 4,
        distance=lambda x, y: Distance(relative(x, half), relative(y, half)),
        answer=lambda x: x.detach().double().cpu(),
        constants=Constants(L_F=1.0, L_f=GOLDEN, rho_f=0.0, F_xx=1.0, F_yy=1.0, F_xy=0.0, f_yy=1.0, f_xy=1.0),
        presets={"paper": table, "recipe": table},
    )


def merely_convex(n: int = 10, *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """Convex toy: F = ||x - y2||^2 / 2 + ||y1 - e||^2 / 2, f = ||y1||^2 / 2 - <x, y1>, y = (y1, y2); x* = y1* = y2* = e.

    The lower level does not involve y2, so methods that invert its Hessian fail. y is a tensor of shape (2, n).
    With the step sizes of the paper's table, the iterates pass near the solution around step 130 and then diverge.

    >>> problem = merely_convex(n=3)
    >>> float(problem.upper(problem.x_star, problem.y_star))
    0.0
    """
    _check_dimension(n, 1)
    x_star = torch.ones(n, dtype=dtype, device=device)
    y_star = torch.ones(2, n, dtype=dtype, device=device)
    # The Hessian of F is that of |x - y2|^2/2 with norm 2.
    return KnownProblem(
        name=f"merely convex, n = {n}",
        upper=lambda x, y: 0.5 * (x - y[1]).square().sum() + 0.5 * (y[0] - x_star).square().sum(),
        lower=lambda x, y: 0.5 * y[0].square().sum() - (x * y[0]).sum(),
        x0=0.01 * x_star,
        y0=0.01 * y_star,
        x_star=x_star,
        y_star=y_star,
        upper_star=0.0,
        distance=lambda x, y: Distance(relative(x, x_star), relative(y, y_star)),
        answer=lambda x: x.detach().double().cpu().expand(2, n).clone(),
        constants=Constants(L_F=2.0, L_f=GOLDEN, rho_f=0.0, F_xx=1.0, F_yy=1.0, F_xy=1.0, f_yy=1.0, f_xy=1.0),
        presets={
            "paper": MEHA(alpha=InversePower(0.012), beta=InversePower(0.1), eta=0.009, gamma=5.0, c=0.167, p=0.49),
            "recipe": MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49),
        },
    )


def sine(n: int = 1, *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """Sine toy: F = (x - 2)^2 + ||y - 4 e||^2, f = sum_i sin(x + y_i - 2), with a scalar x and infinitely many valleys of f.

    With C = 3 pi / 2, the solution is x = (2 (1 - n) + n C) / (1 + n), y_i = C + 2 - x, F = n (C - 4)^2 / (1 + n). The start
    x0 = -6, y0 = 0 is closest to another valley.

    >>> print(f"{float(sine(n=1).x_star):.4f}, {sine(n=1).upper_star:.4f}")
    2.3562, 0.2537
    """
    _check_dimension(n, 1)
    valley = 1.5 * math.pi
    x_star = torch.tensor([(2 * (1 - n) + n * valley) / (1 + n)], dtype=dtype, device=device)
    y_star = torch.full((n,), valley + 2 - float(x_star), dtype=dtype, device=device)
    c = min(0.5, 2.5 / n)
    root = math.sqrt(n)

    def response(x: Tensor) -> Tensor:
        first = valley + 2 - float(x)
        return torch.full((n,), first + 2 * math.pi * round((4 - first) / (2 * math.pi)), dtype=torch.float64)

    return KnownProblem(
        name=f"sine, n = {n}",
        upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
        lower=lambda x, y: torch.sin(x + y - 2).sum(),
        x0=torch.full((1,), -6.0, dtype=dtype, device=device),
        y0=torch.zeros(n, dtype=dtype, device=device),
        x_star=x_star,
        y_star=y_star,
        upper_star=n * (valley - 4) ** 2 / (1 + n),
        distance=lambda x, y: Distance(relative(x, x_star), relative(y, y_star)),
        answer=response,
        constants=Constants(L_F=2.0, L_f=n + 1.0, rho_f=1.0, F_xx=2.0, F_yy=2.0, F_xy=0.0, f_yy=1.0, f_xy=root),
        presets={
            "paper": MEHA(alpha=5e-4, beta=5e-4, eta=1e-3, gamma=200.0, c=0.02, p=0.49),
            "recipe": MEHA(alpha=1 / (2 / c + 2 * n), beta=1 / (2 / c + 3.5), eta=0.1, gamma=0.4, c=c, p=0.49),
        },
    )


def lasso(n: int = 100, *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """Lasso toy: F = sum y, f = ||y - a||^2 / 2, ``g = sum_i x_i |y_i|``, X = [0, 1]^n, a = (1/n, ..., -1/n, ...), in halves.

    The solutions form a set: x_i in [1/n, 1], y_i = 0 in the first half; x_i = 0, y_i = -1/n in the second. The distance to the
    set is relative to the norm of its nearest point. The start is 0, because from x = 1 the method stays at y = 0.

    >>> problem = lasso(n=4)
    >>> problem.distance(torch.tensor([0.3, 0.7, 0.0, 0.0]), torch.tensor([0.0, 0.0, -0.25, -0.25]))
    Distance(x=0.0, y=0.0)
    """
    _check_dimension(n, 2)
    if n % 2:
        raise ValueError(f"n: must be even (half of the targets are positive), got {n}.")
    a = torch.full((n,), 1 / n, dtype=dtype, device=device)
    a[n // 2 :] *= -1
    y_star = a.clamp(max=0)
    low = a.clamp(min=0)
    high = torch.where(a > 0, 1.0, 0.0).to(a)

    def distance(x: Tensor, y: Tensor) -> Distance:
        nearest = x.to(low).clamp(low, high)
        return Distance(relative(x.to(low), nearest), relative(y.to(low), y_star))

    return KnownProblem(
        name=f"lasso, n = {n}",
        upper=lambda x, y: y.sum(),
        lower=lambda x, y: 0.5 * (y - a).square().sum(),
        nonsmooth=L1(weight=lambda x: x),
        x_set=Box(0.0, 1.0),
        x0=torch.zeros(n, dtype=dtype, device=device),
        y0=torch.zeros(n, dtype=dtype, device=device),
        x_star=low,
        y_star=y_star,
        upper_star=-0.5,
        distance=distance,
        answer=lambda x: soft(a, x.detach().to(a)).double().cpu(),
        constants=Constants(L_F=0.0, L_f=1.0, rho_f=0.0, L_g=1.0, f_xy=0.0),
        presets={
            "paper": MEHA(alpha=0.1, beta=1e-5, eta=0.1, gamma=10.0, c=2.0, p=0.49),
            "recipe": MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=10.0, c=2.0 * n, p=0.49),
        },
    )


def _check_dimension(n: int, least: int) -> None:
    if n < least:
        raise ValueError(f"n: must be at least {least}, got {n}.")
