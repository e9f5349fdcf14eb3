"""The constants in the lemmas behind the convergence theorem, and the steps alpha and beta that its proof admits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meha._checks import check_positive
from meha.theory.theorem import Constants, eta_range, gamma_range

__all__ = [
    "StepBounds",
    "contraction",
    "envelope_weak_convexity",
    "prox_lipschitz",
    "step_bounds",
    "theta_lipschitz",
]


def prox_lipschitz(constants: Constants, s: float) -> tuple[float, float]:
    """Lipschitz constants of (x, z) -> prox_{s g(x, .) + indicator of Y}(z), in x and in z: (s L_g, 1) / (1 - s rho_g).

    The paper assumes the first one and shows it for x ||y||_1 and for groups. It holds in general: g(x, .) - g(x', .) has the
    Lipschitz constant L_g ||x - x'||, and what the prox minimises is (1 - s rho_g)-strongly convex. One x for m coordinates,
    as in x ||y||_1, has L_g = sqrt(m) (the paper leaves this factor out).

    >>> prox_lipschitz(Constants(L_F=1.0, L_f=1.0, L_g=2.0, rho_g=0.5), s=1.0)
    (4.0, 2.0)
    """
    check_positive("s", s)
    left = 1 - s * constants.rho_g
    if not left > 0:
        raise ValueError(f"s: must be below 1/rho_g = {1 / constants.rho_g:g}, where the prox is single-valued, got {s:g}.")
    return s * constants.L_g / left, 1 / left


def contraction(constants: Constants, gamma: float, eta: float) -> float:
    """The factor sigma by which a step of theta comes nearer to theta*: sqrt(1 - eta (1/gamma - rho_f)) / (1 - eta rho_g).

    It falls with eta, so the smallest eta of a schedule has the largest factor.

    >>> round(contraction(Constants(L_F=1.0, L_f=1.0, rho_f=0.0), gamma=1.0, eta=0.25), 4)
    0.866
    """
    _check(constants, gamma, eta)
    return math.sqrt(1 - eta * (1 / gamma - constants.rho_f)) / (1 - eta * constants.rho_g)


def theta_lipschitz(constants: Constants, gamma: float, s: float | None = None) -> float:
    """A Lipschitz constant L_theta of (x, y) -> theta*(x, y); with K_x and K_z of :func:`prox_lipschitz`,

        || (K_x + s K_z f_xy, s K_z / gamma) || / (1 - sigma(s)).

    Args:
        s: any step that :func:`eta_range` admits; the largest one by default, which gives the smallest constant for g = 0.

    >>> round(theta_lipschitz(Constants(L_F=1.0, L_f=1.0, rho_f=0.0), gamma=1.0), 4)
    2.639
    """
    if s is None:
        admitted = eta_range(constants, gamma)
        s = admitted.upper if admitted.closed else 0.5 * admitted.upper
    sigma = contraction(constants, gamma, s)
    in_x, in_z = prox_lipschitz(constants, s)
    return math.hypot(in_x + s * in_z * constants.f_xy, s * in_z / gamma) / (1 - sigma)


def envelope_weak_convexity(constants: Constants, gamma: float) -> tuple[float, float]:
    """Moduli (rho_x, 1/gamma) with which v_gamma + rho_x/2 ||x||^2 + 1/(2 gamma) ||y||^2 is convex.

    The paper's lemma needs moduli (rho_x, rho_y) of f + g in both variables, and gamma < 1/(2 rho_y). From the modulus
    rho = rho_f + rho_g in y alone follow (L_f + L_g + (f_xy + L_g)^2 / t, rho + t) for every t > 0; t is half of what gamma
    leaves.

    >>> envelope_weak_convexity(Constants(L_F=1.0, L_f=1.0, rho_f=0.0), gamma=0.5)
    (3.0, 2.0)
    """
    _check(constants, gamma)
    t = (1 / (2 * gamma) - constants.rho_f - constants.rho_g) / 2
    return constants.L_f + constants.L_g + (constants.f_xy + constants.L_g) ** 2 / t, 1 / gamma


@dataclass(frozen=True)
class StepBounds:
    """The steps that the proof of the convergence theorem admits.

    Attributes:
        alpha, beta: the largest steps of x and y (c_alpha and c_beta of the paper).
        C_alpha, C_beta: alpha is at most 1 / (4 C_alpha), and beta at most 1 / (4 C_beta).
        theta: the merit falls in each step by at least ||dx||^2 / (4 alpha) + ||dy||^2 / (4 beta) + theta ||theta - theta*||^2.
    """

    alpha: float
    beta: float
    C_alpha: float
    C_beta: float
    theta: float


def step_bounds(constants: Constants, gamma: float, eta: float, c: float) -> StepBounds:
    """The bounds on alpha and beta from the proof that the merit function decreases; tiny, as such bounds are.

    With d = 1 - sigma(eta)^2, M = (L_f + L_g)^2 + 1/gamma^2 and L = L_F/c + L_f + L_g + max(rho_x, 1/gamma),

        C_alpha = L/2 + d L_theta^2 / (4 gamma^2) + (1 + 4/d) L_theta^2 M,    alpha <= min(d/2, 1 / (4 C_alpha)),
        C_beta  = rho_g/2 + L/2 + (1 + 4/d) L_theta^2 M,                      beta  <= min(d/4, 1 / (4 C_beta)).

    The paper has (eta rho_g / (1 - eta rho_g))^2 in place of d, which is a lower bound of d and zero for convex g, where its
    formulas admit no step; its proof works with d itself.

    Args:
        eta: the smallest step of theta.
        c: the smallest penalty.

    >>> bounds = step_bounds(Constants(L_F=1.0, L_f=1.0, rho_f=0.0), gamma=1.0, eta=0.25, c=1.0)
    >>> print(f"{bounds.alpha:.2g} {bounds.beta:.2g}")
    0.001 0.001
    """
    check_positive("c", c)
    _check(constants, gamma, eta)
    rho = constants.rho_g
    d = eta * (1 / gamma - constants.rho_f - 2 * rho + eta * rho**2) / (1 - eta * rho) ** 2  # 1 - sigma^2, without rounding
    both = constants.L_f + constants.L_g
    merit = both**2 + 1 / gamma**2
    smooth = constants.L_F / c + both + max(envelope_weak_convexity(constants, gamma))
    lipschitz = theta_lipschitz(constants, gamma) ** 2
    shared = smooth / 2 + (1 + 4 / d) * lipschitz * merit
    C_alpha, C_beta = shared + d * lipschitz / (4 * gamma**2), shared + rho / 2
    return StepBounds(min(d / 2, 1 / (4 * C_alpha)), min(d / 4, 1 / (4 * C_beta)), C_alpha, C_beta, d / 2 * merit)


def _check(constants: Constants, gamma: float, eta: float | None = None) -> None:
    """Raise unless the theorem admits gamma and eta."""
    check_positive("gamma", gamma)
    if gamma not in gamma_range(constants):
        raise ValueError(f"gamma: must be in {gamma_range(constants)}, the range of the theorem, got {gamma:g}.")
    if eta is not None and eta not in eta_range(constants, gamma):
        raise ValueError(f"eta: must be in {eta_range(constants, gamma)}, the range of the theorem, got {eta:g}.")
