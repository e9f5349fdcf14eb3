"""The paper's theorem on the hypergradient: how far y is from y*(x), and the residual from the hypergradient."""

from __future__ import annotations

from meha._checks import check_positive
from meha.theory.theorem import Constants

__all__ = ["hypergradient_bound", "response_bound"]


def response_bound(*, mu: float, c: float, slope: float, residual: float, gamma: float | None = None) -> float:
    """Upper bound on ||y - y*(x)||: (2 slope + 4 residual) / (c mu), for gamma >= 1/mu, g = 0 and Y the whole space.

    With gamma, a smaller one for any gamma: (1 + 1/(gamma mu)) (slope + residual) / (c mu). It follows from
    ||f_y(y) - f_y(theta)|| >= mu ||y - theta|| and y - theta = gamma f_y(theta), for theta = theta*(x, y), and shows the first
    one without the paper's condition c > 4 L_F / mu. (The paper's proof bounds the curvature of v_gamma by mu / (mu gamma + 1),
    which holds for quadratic f only.)

    Args:
        mu: f is mu-strongly convex in y.
        c: the penalty.
        slope: an upper bound on ||F_y|| (at y alone is enough for the second bound).
        residual: the norm of the part in y of the residual, F_y + c (f_y - (y - theta) / gamma).

    >>> response_bound(mu=2.0, c=10.0, slope=1.0, residual=0.5)
    0.2
    >>> response_bound(mu=2.0, c=10.0, slope=1.0, residual=0.5, gamma=1.0)
    0.1125
    """
    for name, value in (("mu", mu), ("c", c)):
        check_positive(name, value)
    if gamma is None:
        return (2 * slope + 4 * residual) / (c * mu)
    check_positive("gamma", gamma)
    return (1 + 1 / (gamma * mu)) * (slope + residual) / (c * mu)


def hypergradient_bound(
    constants: Constants, *, mu: float, gamma: float, c: float, slope: float, residual: float, L_f2: float
) -> float:
    """Upper bound on ||grad Phi(x) - R_x||, with R_x the part in x of the residual: L_mu / c + (L_f / mu) residual.

    Phi(x) = F(x, y*(x)) and, with L_Phi the Lipschitz constant in y of F_x - f_xy f_yy^-1 F_y,

        L_mu  = 6 slope / mu (1 + L_f/mu) (L_F + 6 L_f2 slope / mu) + 6 L_Phi slope / (mu^2 gamma),
        L_Phi = (1 + L_f/mu) (L_F + slope L_f2 / mu).

    Args:
        mu, c, slope: as in :func:`response_bound`; slope bounds ||F_y|| everywhere.
        residual: the norm of the part of the residual in y; at most slope.
        L_f2: a Lipschitz constant of f_xy and f_yy in y; 0 for quadratic f.

    >>> known = Constants(L_F=1.0, L_f=1.0, rho_f=0.0)
    >>> hypergradient_bound(known, mu=1.0, gamma=2.0, c=60.0, slope=1.0, residual=0.0, L_f2=0.0)
    0.3
    """
    for name, value in (("mu", mu), ("gamma", gamma), ("c", c)):
        check_positive(name, value)
    if gamma < 1 / mu:
        raise ValueError(f"gamma: must be at least 1/mu = {1 / mu:g}, got {gamma:g}.")
    if residual > slope:
        raise ValueError(
            f"residual: must not exceed slope = {slope:g}, got {residual:g}; the bound holds nearer to a solution."
        )
    spread = 1 + constants.L_f / mu
    L_Phi = spread * (constants.L_F + slope * L_f2 / mu)
    L_mu = 6 * slope / mu * spread * (constants.L_F + 6 * L_f2 * slope / mu) + 6 * L_Phi * slope / (mu**2 * gamma)
    return L_mu / c + constants.L_f / mu * residual
