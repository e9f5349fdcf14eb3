"""Problems with known solutions, for first steps, examples and tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meha.analysis.theory import Constants
from meha.methods import MEHA
from meha.problem.nonsmooth import L1, GroupL2
from meha.problem.nonsmooth.base import soft
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.schedules import InversePower
from meha.problem.sets import Box, NonNegative
from meha.tensors.variables import Variable, norm

__all__ = ["Distance", "KnownProblem", "group_lasso", "lasso", "merely_convex", "sine", "strong_convex"]


class Distance(NamedTuple):
    """The relative distance of a point to the solution (set), in x and in y."""

    x: float
    y: float


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class KnownProblem(Problem):
    """A :class:`~meha.Problem` with a known solution; pass it to ``solve`` like any other.

    Attributes:
        name: the name in tables and figures.
        x0: the start of x in the paper's experiment, or our reading of it.
        y0: the start of y.
        x_star: the solution in x; any one if there are several.
        y_star: the solution in y.
        upper_star: F at the solution.
        distance: ``distance(x, y)`` to the solution (set); NaN if there is nothing to compare with.
        presets: settings of MEHA by name; see :meth:`preset`.
        metrics: further measures by name, each a function of (x, y).
        answer: ``answer(x)``, the solution y of the lower level at x in float64 (if there are several, the best for F, or the
            one that ``response`` names), computed without the methods of this library; None if unknown.

    >>> from meha.problems import strong_convex
    >>> problem = strong_convex(n=2)
    >>> problem.distance(problem.x_star, problem.y_star)
    Distance(x=0.0, y=0.0)
    >>> problem.preset("paper").gamma
    10.0
    """

    name: str
    x0: Any
    y0: Any
    x_star: Any = None
    y_star: Any = None
    upper_star: float | None = None
    distance: Callable[[Any, Any], Distance]
    presets: Mapping[str, MEHA]
    metrics: Mapping[str, Callable[[Any, Any], float]] = field(default_factory=dict)
    answer: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        return f"KnownProblem({self.name!r})"

    def preset(self, name: str) -> MEHA:
        """Return MEHA with settings for this problem.

        ``"paper"``: the values in the paper's table. ``"recipe"``: values with which Algorithm 1 works on this problem.
        ``"theory"``: values within the range of the theorem, from the exact constants of this problem.
        """
        if name == "theory":
            x, y = Variable(self.x0, "x"), Variable(self.y0, "y")
            return MEHA().resolve(Oracle(self, x, y), x, y)[0]  # from self.constants
        if name not in self.presets:
            raise ValueError(f"preset: must be one of {', '.join([*self.presets, 'theory'])} for {self.name}, got {name!r}.")
        return self.presets[name]


def relative(value: Tensor, target: Tensor) -> float:
    """Return ||value - target|| / ||target||, or ||value|| if the target is zero."""
    size = norm([target])
    return float(norm([value - target]) / (size if size > 0 else 1.0))


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
    # L_F = 2 below: the Hessian of |x - y2|^2 / 2 has norm 2.
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
        answer=lambda x: x.detach().double().cpu().expand(2, n).clone(),  # y1 solves the lower level; y2 = x is best for F
        constants=Constants(L_F=2.0, L_f=GOLDEN, rho_f=0.0, F_xx=1.0, F_yy=1.0, F_xy=1.0, f_yy=1.0, f_xy=1.0),
        presets={
            "paper": MEHA(alpha=InversePower(0.012), beta=InversePower(0.1), eta=0.009, gamma=5.0, c=0.167, p=0.49),
            "recipe": MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49),
        },
    )


def sine(n: int = 1, *, dtype: torch.dtype = torch.float64, device: Any = None) -> KnownProblem:
    """Sine toy: F = (x - 2)^2 + ||y - 4 e||^2, f = sum_i sin(x + y_i - 2), with a scalar x and infinitely many basins of f.

    With C = 3 pi / 2, the solution is x = (2 (1 - n) + n C) / (1 + n), y_i = C + 2 - x, F = n (C - 4)^2 / (1 + n). The start
    x0 = -6, y0 = 0 is closest to another basin.

    >>> print(f"{float(sine(n=1).x_star):.4f}, {sine(n=1).upper_star:.4f}")
    2.3562, 0.2537
    """
    _check_dimension(n, 1)
    basin = 1.5 * math.pi
    x_star = torch.tensor([(2 * (1 - n) + n * basin) / (1 + n)], dtype=dtype, device=device)
    y_star = torch.full((n,), basin + 2 - float(x_star), dtype=dtype, device=device)
    c = min(0.5, 2.5 / n)

    def response(x: Tensor) -> Tensor:
        first = basin + 2 - float(x)  # sin is least at x + y - 2 = 3 pi / 2, up to periods; F prefers the one nearest to 4
        return torch.full((n,), first + 2 * math.pi * round((4 - first) / (2 * math.pi)), dtype=torch.float64)

    return KnownProblem(
        name=f"sine, n = {n}",
        upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
        lower=lambda x, y: torch.sin(x + y - 2).sum(),
        x0=torch.full((1,), -6.0, dtype=dtype, device=device),
        y0=torch.zeros(n, dtype=dtype, device=device),
        x_star=x_star,
        y_star=y_star,
        upper_star=n * (basin - 4) ** 2 / (1 + n),
        distance=lambda x, y: Distance(relative(x, x_star), relative(y, y_star)),
        answer=response,
        constants=Constants(L_F=2.0, L_f=n + 1.0, rho_f=1.0, F_xx=2.0, F_yy=2.0, F_xy=0.0, f_yy=1.0, f_xy=math.sqrt(n)),
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
    low, high, y_star = a.clamp(min=0), (a > 0).to(a), a.clamp(max=0)

    def distance(x: Tensor, y: Tensor) -> Distance:
        nearest = x.to(low).clamp(low, high)  # the set of solutions is a box in x
        return Distance(relative(x.to(low), nearest), relative(y.to(low), y_star))

    return KnownProblem(
        name=f"lasso, n = {n}",
        upper=lambda x, y: y.sum(),
        lower=lambda x, y: 0.5 * (y - a).square().sum(),
        nonsmooth=L1(weight=lambda x: x),
        x_set=Box(0.0, 1.0),
        x0=torch.zeros_like(a),
        y0=torch.zeros_like(a),
        x_star=low,
        y_star=y_star,
        upper_star=-0.5,
        distance=distance,
        answer=lambda x: soft(a, x.detach().to(a)).double().cpu(),  # soft thresholding solves the lower level
        constants=Constants(L_F=0.0, L_f=1.0, rho_f=0.0, L_g=1.0, f_xy=0.0),
        presets={
            "paper": MEHA(alpha=0.1, beta=1e-5, eta=0.1, gamma=10.0, c=2.0, p=0.49),
            "recipe": MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=10.0, c=2.0 * n, p=0.49),
        },
    )


def _check_dimension(n: int, least: int) -> None:
    if n < least:
        raise ValueError(f"n: must be at least {least}, got {n}.")


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
    size, block, truth = m // groups, m // 3, torch.zeros(m, dtype=torch.float64)
    for first in (0, block, 2 * block):
        truth[first : first + min(50, block)] = 1  # in each block as many of the 50 ones as fit
    generator = torch.Generator().manual_seed(seed)
    samples = 100 if design == "gaussian" else m
    rows = torch.randn(3 * samples, m, generator=generator, dtype=torch.float64)
    if design == "orthogonal":
        rows = m**0.5 * torch.linalg.qr(rows[:m])[0].repeat(3, 1)  # A'A = m I, as Gaussian rows have in the mean
    clean = rows @ truth
    noise = torch.randn(3 * samples, generator=generator, dtype=torch.float64)
    labels = clean + noise * (clean.norm() / (2 * noise.norm()))  # signal-to-noise ratio 2, as in the paper
    data = [(a.to(device, dtype), b.to(device, dtype)) for a, b in zip(rows.split(samples), labels.split(samples), strict=True)]
    train, validation, test = data

    def loss(part: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return (part[1] - part[0] @ y).square().sum() / (2 * samples)

    smoothness = [float(torch.linalg.matrix_norm(a.double(), 2) ** 2) / samples for a, _ in data]
    step = min(0.05, 1 / smoothness[0])  # the paper's value, limited to the stable 1 / L_f
    truth = truth.to(device, dtype)
    null = float(loss(test, torch.zeros_like(truth)))  # what a model without features reaches
    problem = KnownProblem(
        name=f"group lasso, m = {m}",
        upper=lambda x, y: loss(validation, y),
        lower=lambda x, y: loss(train, y),
        nonsmooth=GroupL2([size] * groups, weight=lambda x: x),
        x_set=NonNegative(),
        x0=torch.full((groups,), start, dtype=dtype, device=device),
        y0=torch.zeros_like(truth),
        distance=lambda x, y: Distance(math.nan, relative(y, truth)),
        metrics={"test error": lambda x, y: float(loss(test, y)), "null error": lambda x, y: null},
        constants=Constants(
            L_F=smoothness[1], L_f=smoothness[0], rho_f=0.0, L_g=1.0, F_xx=0.0, F_yy=smoothness[1], F_xy=0.0, f_xy=0.0
        ),
        presets={
            "paper": MEHA(alpha=0.01, beta=0.05, eta=0.05, gamma=100.0, c=20.0, p=0.48),
            "recipe": MEHA(alpha=0.01, beta=step, eta=step, gamma=100.0, c=20.0, p=0.48),
        },
    )
    if design == "gaussian":
        return problem

    u, w = ((a.T @ b / m).reshape(groups, size) for a, b in (train, validation))
    share = ((u * w).sum(1) / u.square().sum(1)).clamp(0, 1)
    x_star, y_star = (1 - share) * u.norm(dim=1), (share[:, None] * u).reshape(-1)

    def distance(x: Tensor, y: Tensor) -> Distance:
        # Where t_j = 0, every larger x_j also gives y^(j) = 0.
        nearest = torch.where(share > 0, x_star, torch.maximum(x, x_star))
        return Distance(relative(x, nearest), relative(y, y_star))

    def response(x: Tensor) -> Tensor:
        shrunk = (1 - x.detach().to(u) / u.norm(dim=1)).clamp(min=0)  # prox of the group norm at u, since A'A = m I
        return (shrunk[:, None] * u).reshape(-1).double().cpu()

    name, upper_star = f"{problem.name}, orthogonal", float(loss(validation, y_star))
    return replace(problem, name=name, x_star=x_star, y_star=y_star, upper_star=upper_star, distance=distance, answer=response)
