"""Group lasso with one learned weight per group, on synthetic regression data."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from meha.methods import MEHA
from meha.nonsmooth import GroupL2
from meha.problems.base import Distance, KnownProblem, relative
from meha.sets import NonNegative
from meha.theory import Constants

__all__ = ["group_lasso"]

SAMPLES = 100


def group_lasso(
    m: int = 600,
    groups: int | None = None,
    *,
    seed: int = 0,
    design: Literal["gaussian", "orthogonal"] = "gaussian",
    start: float = 0.1,
    dtype: torch.dtype = torch.float64,
    device: Any = None,
) -> KnownProblem:
    """Group lasso: F = validation loss, f = training loss, g = sum_j x_j ||y^(j)||, X = {x >= 0}.

    The loss is ||b - A y||^2 / (2 * 100). The data follow the paper, in the reading that reproduces its numbers: 100 samples
    each for training, validation and test; A standard normal with m features in contiguous groups (30 for m = 600, 300
    otherwise); coefficients of three equal blocks, each 50 ones and then zeros; noise such that ||A v|| is twice its norm.

    With the Gaussian design there is no closed-form solution: use ``metrics["test error"]``; ``distance`` compares y with the
    true coefficients, which no estimate reaches. The orthogonal design (m samples, A'A = m I, the same in training and
    validation, loss / (2 m)) makes the problem separable, so its solution is known: with u and w the training and validation
    correlations A'b / m, y^(j) = t_j u^(j), t_j = <u^(j), w^(j)> / ||u^(j)||^2 clipped to [0, 1], and
    x_j = (1 - t_j) ||u^(j)|| (or any larger x_j if t_j = 0).

    Args:
        m: number of features.
        groups: number of groups, a divisor of m.
        seed: seed of the data.
        design: the design matrix; see above.
        start: every weight of x0, which the paper does not state.
        dtype: precision of the data.
        device: device of the data.

    Returns:
        The problem, with its start and its measures on test data.

    >>> problem = group_lasso(60, groups=6, design="orthogonal")
    >>> problem.distance(problem.x_star, problem.y_star)
    Distance(x=0.0, y=0.0)
    """
    groups = groups if groups is not None else (30 if m == 600 else 300)
    if m < 3 or groups < 1 or m % groups:
        raise ValueError(f"m and groups: m must be at least 3 and a multiple of groups, got {m} and {groups}.")
    if design not in ("gaussian", "orthogonal"):
        raise ValueError(f"design: must be 'gaussian' or 'orthogonal', got {design!r}.")
    if not 0 <= start < math.inf:
        raise ValueError(f"start: must be a number >= 0, got {start!r}.")
    size = m // groups
    truth = _coefficients(m)
    generator = torch.Generator().manual_seed(seed)
    samples = SAMPLES if design == "gaussian" else m
    rows = torch.randn(3 * samples, m, generator=generator, dtype=torch.float64)
    if design == "orthogonal":
        rows = m**0.5 * torch.linalg.qr(rows[:m])[0].repeat(3, 1)
    clean = rows @ truth
    noise = torch.randn(3 * samples, generator=generator, dtype=torch.float64)
    labels = clean + noise * (clean.norm() / (2 * noise.norm()))
    data = [(a.to(device, dtype), b.to(device, dtype)) for a, b in zip(rows.split(samples), labels.split(samples), strict=True)]
    train, validation, test = data

    def loss(part: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return (part[1] - part[0] @ y).square().sum() / (2 * samples)

    smoothness = [float(torch.linalg.matrix_norm(a.double(), 2) ** 2) / samples for a, _ in data]
    step = min(0.05, 1 / smoothness[0])
    truth = truth.to(device, dtype)
    common: dict[str, Any] = {
        "name": f"group lasso, m = {m}" + ("" if design == "gaussian" else ", orthogonal"),
        "upper": lambda x, y: loss(validation, y),
        "lower": lambda x, y: loss(train, y),
        "nonsmooth": GroupL2([size] * groups, weight=lambda x: x),
        "x_set": NonNegative(),
        "x0": torch.full((groups,), start, dtype=dtype, device=device),
        "y0": torch.zeros(m, dtype=dtype, device=device),
        "constants": Constants(
            L_F=smoothness[1], L_f=smoothness[0], rho_f=0.0, L_g=1.0, F_xx=0.0, F_yy=smoothness[1], F_xy=0.0, f_xy=0.0
        ),
        "presets": {
            "paper": MEHA(alpha=0.01, beta=0.05, eta=0.05, gamma=100.0, c=20.0, p=0.48),
            "recipe": MEHA(alpha=0.01, beta=step, eta=step, gamma=100.0, c=20.0, p=0.48),
        },
    }
    with torch.no_grad():
        null = float(loss(test, common["y0"]))
    metrics = {"test error": lambda x, y: float(loss(test, y)), "null error": lambda x, y: null}
    if design == "gaussian":
        return KnownProblem(**common, metrics=metrics, distance=lambda x, y: Distance(math.nan, relative(y, truth)))

    u, w = ((a.T @ b / m).reshape(groups, size) for a, b in (train, validation))
    share = ((u * w).sum(1) / u.square().sum(1)).clamp(0, 1)
    x_star, y_star = (1 - share) * u.norm(dim=1), (share[:, None] * u).reshape(-1)

    def distance(x: Tensor, y: Tensor) -> Distance:
        nearest = torch.where(share > 0, x_star, torch.maximum(x, x_star))
        return Distance(relative(x, nearest), relative(y, y_star))

    def response(x: Tensor) -> Tensor:
        shrunk = (1 - x.detach().to(u) / u.norm(dim=1)).clamp(min=0)
        return (shrunk[:, None] * u).reshape(-1).double().cpu()

    upper_star = float(loss(validation, y_star))
    return KnownProblem(
        **common,
        metrics=metrics,
        distance=distance,
        x_star=x_star,
        y_star=y_star,
        upper_star=upper_star,
        answer=response,
    )


def _coefficients(m: int) -> Tensor:
    """Three equal blocks, each of 50 ones (or as many as fit) and then zeros."""
    truth = torch.zeros(m, dtype=torch.float64)
    for block in range(3):
        start = block * (m // 3)
        truth[start : start + min(50, m // 3)] = 1
    return truth
