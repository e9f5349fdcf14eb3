"""Theory: constants of smoothness and weak convexity, and what the paper's Theorem 3.1 admits for gamma and eta.

The theorem asks for F to be L_F-smooth, f to be L_f-smooth, f and g to be weakly convex in y with moduli rho_f and rho_g, and

    0 < gamma < 1 / (2 rho_f + 2 rho_g),
    0 < eta <= (1/gamma - rho_f) / (L_f + 1/gamma)^2   and   eta < 1 / rho_g,
    0 <= p < 1/2.

In the bound on eta, the proof uses L_f only as the Lipschitz constant of grad_y f(x, .), so f_yy takes its place where it is
known: it can be far smaller (for the sine problem 1 instead of n + 1). The bounds on alpha and beta are shown to exist but
have no usable form, so nothing is checked about them. A run outside these ranges may work well (the paper's own settings are
outside in several experiments); it has no guarantee.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from meha._checks import check_count
from meha._oracle import Function, Oracle, Term
from meha._variables import Leaves, Variable, add_, copy_, norm, subtract
from meha.problem import Problem

__all__ = [
    "Constants",
    "Probe",
    "Range",
    "TheoryWarning",
    "check",
    "estimate",
    "estimate_at",
    "eta_range",
    "gamma_range",
    "warn",
]


class TheoryWarning(UserWarning):
    """A run is outside the range for which the theorem promises convergence."""


@dataclass(frozen=True)
class Constants:
    """What is known about a problem; curvatures are largest absolute eigenvalues (norms) of blocks of Hessians.

    Args:
        L_F: smoothness of F on X x Y.
        L_f: smoothness of f on X x Y.
        rho_f: f + rho_f/2 ||y||^2 is convex in y; 0 for f convex in y. L_f when nothing better is known.
        rho_g: the same for g; 0 for convex terms (for x |y| it may be taken as small as one likes).
        L_g: the Lipschitz constant of grad_x g in y; 1 for x |y|.
        F_xx, F_yy, F_xy: curvatures of F; default L_F.
        f_yy, f_xy: curvatures of f in y, and of its mixed derivative; default L_f.

    >>> Constants(L_F=2.0, L_f=1.0).rho_f
    1.0
    """

    L_F: float
    L_f: float
    rho_f: float = math.nan
    rho_g: float = 0.0
    L_g: float = 0.0
    F_xx: float = math.nan
    F_yy: float = math.nan
    F_xy: float = math.nan
    f_yy: float = math.nan
    f_xy: float = math.nan

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"Constants: {name} must be a number, got {value!r}.")
            if math.isnan(value):
                object.__setattr__(self, name, self.L_F if name.startswith("F") else self.L_f)
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"Constants: {name} must be a number of at least 0, got {value}.")


@dataclass(frozen=True)
class Range:
    """An interval (0, upper) or (0, upper]."""

    upper: float
    closed: bool = False

    def __contains__(self, value: float) -> bool:
        return 0 < value < self.upper or (self.closed and value == self.upper)

    def __str__(self) -> str:
        return f"(0, {self.upper:.4g}{']' if self.closed else ')'}"


def gamma_range(constants: Constants) -> Range:
    """The gamma that the theorem admits: (0, 1 / (2 rho_f + 2 rho_g)).

    >>> print(gamma_range(Constants(L_F=2.0, L_f=1.0, rho_f=1.0)))
    (0, 0.5)
    """
    rho = constants.rho_f + constants.rho_g
    return Range(math.inf if rho == 0 else 1 / (2 * rho))


def eta_range(constants: Constants, gamma: float) -> Range:
    """The eta that the theorem admits for this gamma: (0, (1/gamma - rho_f) / (f_yy + 1/gamma)^2], below 1 / rho_g.

    >>> print(eta_range(Constants(L_F=2.0, L_f=1.0, rho_f=0.0), gamma=1.0))
    (0, 0.25]
    """
    first = max((1 / gamma - constants.rho_f) / (constants.f_yy + 1 / gamma) ** 2, 0.0)
    second = math.inf if constants.rho_g == 0 else 1 / constants.rho_g
    return Range(first, closed=True) if first < second else Range(second)


def check(constants: Constants, *, gamma: float, eta: float | None = None, p: float | None = None) -> list[str]:
    """The theorem's inequalities that fail, each as a sentence that says by how much; empty when all hold.

    >>> print(*check(Constants(L_F=2.0, L_f=1.0, rho_f=1.0), gamma=200.0))
    gamma = 200 is not below 1/(2 rho_f + 2 rho_g) = 0.5 (rho_f = 1, rho_g = 0): 400 times too large.
    """
    found = []
    admitted = gamma_range(constants)
    if gamma not in admitted:
        found.append(
            f"gamma = {gamma:g} is not below 1/(2 rho_f + 2 rho_g) = {admitted.upper:.4g}"
            f" (rho_f = {constants.rho_f:.4g}, rho_g = {constants.rho_g:.4g}): {gamma / admitted.upper:.3g} times too large."
        )
    if eta is not None:
        admitted = eta_range(constants, gamma)
        if admitted.upper == 0:
            found.append(f"no eta is admitted, because 1/gamma = {1 / gamma:.4g} is not above rho_f = {constants.rho_f:.4g}.")
        elif eta not in admitted:
            bound = "(1/gamma - rho_f)/(f_yy + 1/gamma)^2" if admitted.closed else "1/rho_g"
            found.append(
                f"eta = {eta:g} is {'above' if admitted.closed else 'not below'} {bound} = {admitted.upper:.4g}"
                f" (f_yy = {constants.f_yy:.4g}): {eta / admitted.upper:.3g} times too large."
            )
    if p is not None and not 0 <= p < 0.5:
        found.append(f"p = {p:g} is not in [0, 1/2).")
    return found


def warn(failing: list[str]) -> None:
    """Give one :class:`TheoryWarning` that lists the failing inequalities, if there are any."""
    if failing:
        level, frame = 1, inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith("meha."):
            level, frame = level + 1, frame.f_back
        warnings.warn("outside the range of the convergence theorem: " + " ".join(failing), TheoryWarning, stacklevel=level)


def estimate(
    problem: Problem, x: Any, y: Any, *, batch: Any = None, points: int = 3, rounds: int = 8, seed: int = 0
) -> Constants:
    """Constants from finite differences of gradients: Lanczos' method at the start and at random points around it.

    These are lower bounds, found near (x, y); curvature elsewhere may be larger. No second derivatives are taken. The cost is
    about ``8 * points * rounds`` gradients of F and of f each (``10`` of f with a non-smooth term); less where they are simple.

    Args:
        points: how many points, the given one among them; the others differ from it by normal noise of the size of x and y
            (their root mean square; 1 where they are zero), brought back into X and Y. One at which an objective raises is left
            out.
        rounds: products with a Hessian per constant.

    >>> problem = Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (3 * y.square() - x * y).sum())
    >>> c = estimate(problem, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> round(c.f_yy, 4), round(c.f_xy, 4), round(c.F_yy, 4), round(c.rho_f, 4)
    (6.0, 1.0, 2.0, 0.0)
    """
    first, second = Variable.of(x, "x"), Variable.of(y, "y")
    return estimate_at(Oracle(problem, first, second), first, second, batch=batch, points=points, rounds=rounds, seed=seed)


def estimate_at(
    oracle: Oracle, x: Variable, y: Variable, *, batch: Any = None, points: int = 3, rounds: int = 8, seed: int = 0
) -> Constants:
    """:func:`estimate` for variables, counted by the oracle."""
    check_count("points", points)
    check_count("rounds", rounds)
    for function in (oracle.upper, oracle.lower):
        with torch.no_grad():
            value = float(function(x, y, batch))
        if not math.isfinite(value):
            raise ValueError(f"{function.level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    probe = Probe(oracle, x.copy(), y.copy(), batch, torch.Generator().manual_seed(seed), rounds)
    centre = ([leaf.detach().clone() for leaf in x.leaves], [leaf.detach().clone() for leaf in y.leaves])
    found = probe.measure()
    for _ in range(points - 1):
        probe.move(centre)
        try:
            here = probe.measure()
        except (RuntimeError, ValueError, ArithmeticError):  # outside the domain of an objective; the start was inside
            continue
        found = {name: max(found[name], here[name]) for name in found}
    return Constants(**found, rho_g=oracle.problem.g.rho)


class Probe:
    """Curvatures at a point (x, y), from differences of gradients.

    Args:
        x, y: the point, whose tensors are moved about while a product is taken.
        generator: of the random directions.
        rounds: products with a Hessian per number.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable, batch: Any, generator: torch.Generator, rounds: int) -> None:
        self.oracle, self.x, self.y, self.batch = oracle, x, y, batch
        self.generator, self.rounds = generator, rounds

    def noise(self, like: Leaves) -> Leaves:
        """A random direction of length 1."""
        draw = [torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64).to(leaf) for leaf in like]
        return [leaf / norm(draw) for leaf in draw]

    def move(self, centre: tuple[Leaves, Leaves]) -> None:
        """Go to a random point of X and Y around ``centre``."""
        with torch.no_grad():
            for variable, start in zip((self.x, self.y), centre, strict=True):
                size = float(norm(start)) / math.sqrt(variable.numel) or 1.0
                for leaf, origin in zip(variable.leaves, start, strict=True):
                    draw = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64)
                    leaf.copy_(origin + size * draw.to(leaf))
            self.oracle.project(self.x.value, self.x.leaves, 1.0)
            for part, chosen in [] if self.oracle.problem.y_set is None else self.oracle.problem.y_set.parts(self.y):
                leaves = [self.y.leaves[i] for i in chosen]
                copy_(leaves, part.project_leaves(leaves))

    def gradient(self, function: Function, wrt: Variable) -> Leaves:
        """The gradient of ``function`` in ``wrt`` here."""
        return self.oracle.gradient(wrt, [(1.0, function, self.x, self.y)], self.batch, strict=False)[1]

    def product(self, function: Function, along: Variable, vector: Leaves, wrt: Variable) -> Leaves:
        """The second derivative of ``function`` along ``vector``, by central differences of its gradient in ``wrt``.

        A difference within rounding may come from a linear function or from a large gradient; a longer step tells which.
        """
        zero = [torch.zeros_like(leaf) for leaf in wrt.leaves]
        size = float(norm(vector))
        if not 0 < size < math.inf:
            return zero
        eps = max(torch.finfo(leaf.dtype).eps for leaf in along.leaves)
        start = [leaf.detach().clone() for leaf in along.leaves]
        h = eps ** (1 / 3) * (float(norm(start)) or 1.0) / size
        for _ in range(3):
            with torch.no_grad():
                add_(along.leaves, vector, h)
                up = self.gradient(function, wrt)
                copy_(along.leaves, start)
                add_(along.leaves, vector, -h)
                down = self.gradient(function, wrt)
                copy_(along.leaves, start)
                difference = subtract(up, down)
                if float(norm(difference)) > 1e3 * eps * float(norm(up, down)):
                    return [part / (2 * h) for part in difference]
            h *= 30
        return zero

    def spectrum(self, apply: Callable[[Leaves], Leaves], like: Leaves) -> tuple[float, float]:
        """Smallest and largest eigenvalue of a symmetric operator, as Lanczos' method sees them after ``rounds`` products."""
        vector, before, beta = self.noise(like), [torch.zeros_like(leaf) for leaf in like], 0.0
        diagonal: list[float] = []
        coupling: list[float] = []
        for _ in range(self.rounds):
            image = apply(vector)
            alpha = float(sum((a * b).sum() for a, b in zip(vector, image, strict=True)))
            rest = [w - alpha * v - beta * u for w, v, u in zip(image, vector, before, strict=True)]
            size = float(norm(rest))
            if not math.isfinite(alpha + size):
                break
            diagonal.append(alpha)
            if size <= 1e-6 * max(abs(alpha), *coupling, 0.0):
                break
            coupling.append(size)
            before, vector, beta = vector, [leaf / size for leaf in rest], size
        if not diagonal:
            return 0.0, 0.0
        side = torch.tensor(coupling[: len(diagonal) - 1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(side, 1) + torch.diag(side, -1)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def mixed(self, function: Function) -> float:
        """The norm of the mixed derivative: y -> x -> y."""

        def there_and_back(vector: Leaves) -> Leaves:
            return self.product(function, self.x, self.product(function, self.y, vector, self.x), self.y)

        return math.sqrt(max(self.spectrum(there_and_back, self.y.leaves)[1], 0.0))

    def block(self, function: Function, variable: Variable) -> tuple[float, float]:
        """Smallest and largest eigenvalue of the block of ``variable`` in the Hessian of ``function``."""
        return self.spectrum(lambda vector: self.product(function, variable, vector, variable), variable.leaves)

    def measure(self) -> dict[str, float]:
        """The arguments of :class:`Constants` as they are here, except for rho_g."""
        F, f = self.oracle.upper, self.oracle.lower
        F_xx, F_yy, f_xx = (
            max(-low, high) for low, high in (self.block(F, self.x), self.block(F, self.y), self.block(f, self.x))
        )
        low, high = self.block(f, self.y)
        f_yy, F_xy, f_xy = max(-low, high), self.mixed(F), self.mixed(f)
        return {
            "L_F": _norm_of_blocks(F_xx, F_yy, F_xy),
            "L_f": _norm_of_blocks(f_xx, f_yy, f_xy),
            "rho_f": -low if low < -1e-3 * f_yy else 0.0,  # less is within the error of differences
            "F_xx": F_xx,
            "F_yy": F_yy,
            "F_xy": F_xy,
            "f_yy": f_yy,
            "f_xy": f_xy,
            "L_g": self.nonsmooth_coupling(),
        }

    def nonsmooth_coupling(self) -> float:
        """The largest change of grad_x g seen, relative to that of y."""
        oracle, y = self.oracle, self.y
        if oracle.phi is oracle.lower:
            return 0.0

        def gradient() -> Leaves:
            terms: list[Term] = [(1.0, oracle.phi, self.x, y), (-1.0, oracle.lower, self.x, y)]
            return oracle.gradient(self.x, terms, self.batch, strict=False)[1]

        start, here = [leaf.detach().clone() for leaf in y.leaves], gradient()
        h, largest = 1e-3 * (float(norm(start)) or 1.0), 0.0
        with torch.no_grad():
            for _ in range(self.rounds):
                add_(y.leaves, self.noise(start), h)
                largest = max(largest, float(norm(subtract(gradient(), here))) / h)
                copy_(y.leaves, start)
        return largest


def _norm_of_blocks(a: float, b: float, mixed: float) -> float:
    """The norm of [[a, m], [m, b]]: a bound for that of the Hessian with blocks of these norms."""
    return (a + b) / 2 + math.sqrt(((a - b) / 2) ** 2 + mixed**2)
