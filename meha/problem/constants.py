"""Constants of a problem in the convergence theorem of MEHA, and the gamma and eta that it admits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Constants:
    """Constants of a problem; curvatures are largest absolute eigenvalues (norms) of blocks of Hessians.

    Args:
        L_F: smoothness of F on X x Y.
        L_f: smoothness of f on X x Y.
        rho_f: f + rho_f/2 ||y||^2 is convex in y; 0 for f convex in y. L_f when nothing better is known.
        rho_g: the same for g; 0 for convex terms (for ``x |y|`` it may be taken as small as one likes).
        L_g: the Lipschitz constant of grad_x g, in x and in y; 1 for ``x |y|``.
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
        # NaN stands for a constant that was not given: L_F or L_f bounds it.
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real):  # True is a Real in Python
                raise TypeError(f"Constants: {name} must be a number, got {value!r}.")
            if math.isnan(value):
                object.__setattr__(self, name, self.L_F if name.startswith("F") else self.L_f)
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"Constants: {name} must be a finite number >= 0, got {value}.")


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
    """Values of gamma that the theorem admits: (0, 1 / (2 rho_f + 2 rho_g)).

    >>> print(gamma_range(Constants(L_F=2.0, L_f=1.0, rho_f=1.0)))
    (0, 0.5)
    """
    rho = constants.rho_f + constants.rho_g
    return Range(math.inf if rho == 0 else 1 / (2 * rho))  # for a convex lower level, any gamma


def eta_range(constants: Constants, gamma: float) -> Range:
    """Values of eta that the theorem admits for this gamma: (0, (1/gamma - rho_f) / (f_yy + 1/gamma)^2], below 1 / rho_g.

    >>> print(eta_range(Constants(L_F=2.0, L_f=1.0, rho_f=0.0), gamma=1.0))
    (0, 0.25]
    """
    first = max((1 / gamma - constants.rho_f) / (constants.f_yy + 1 / gamma) ** 2, 0.0)
    second = math.inf if constants.rho_g == 0 else 1 / constants.rho_g
    return Range(first, closed=True) if first < second else Range(second)  # only the second bound excludes its end
