"""Which inequalities of the paper's theorems fail for given numbers, as sentences and as a warning."""

from __future__ import annotations

import inspect
import math
import warnings

from meha._checks import check_positive
from meha.theory.lemmas import step_bounds
from meha.theory.theorem import Constants, eta_range, gamma_range

__all__ = ["TheoryWarning", "check", "warn"]


class TheoryWarning(UserWarning):
    """Parameters are outside the range for which the theorem promises convergence."""


def check(
    constants: Constants,
    *,
    gamma: float,
    eta: float | None = None,
    p: float | None = None,
    c: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    mu: float | None = None,
) -> list[str]:
    """List the inequalities of the theorem that fail, each as a sentence with its factor; empty if all hold.

    Args:
        eta, p, c: of the run; what is left out is not looked at.
        alpha, beta: compared with :func:`step_bounds`, which needs eta and c; not looked at where gamma or eta fail already.
        mu: f is mu-strongly convex in y. With it, the theorem on the hypergradient is looked at too, which needs g = 0,
            gamma > 1/mu, p > 0 and c_k > 4 L_F / mu.

    >>> print(*check(Constants(L_F=2.0, L_f=1.0, rho_f=1.0), gamma=200.0))
    gamma = 200 is not below 1/(2 rho_f + 2 rho_g) = 0.5 (rho_f = 1, rho_g = 0): 400 times too large.
    """
    failing = _gamma_and_eta(constants, gamma, eta)
    if alpha is not None or beta is not None:
        if eta is None or c is None:
            raise ValueError("check: the bounds on alpha and beta depend on eta and c; pass both.")
        bounds = None if failing else step_bounds(constants, gamma, eta, c)
        for name, value in (("alpha", alpha), ("beta", beta)):
            if bounds is not None and value is not None and not 0 < value <= (bound := getattr(bounds, name)):
                failing.append(
                    f"{name} = {value:g} is above its bound {bound:.3g} (step_bounds): {value / bound:.3g} times too large."
                )
    if p is not None and not 0 <= p < 0.5:
        failing.append(f"p = {p:g} is not in [0, 1/2).")
    return failing if mu is None else failing + _hypergradient(constants, gamma, p, c, mu)


def _gamma_and_eta(constants: Constants, gamma: float, eta: float | None) -> list[str]:
    failing = []
    admitted = gamma_range(constants)
    if gamma not in admitted:
        failing.append(
            f"gamma = {gamma:g} is not below 1/(2 rho_f + 2 rho_g) = {admitted.upper:.4g}"
            f" (rho_f = {constants.rho_f:.4g}, rho_g = {constants.rho_g:.4g}): {gamma / admitted.upper:.3g} times too large."
        )
    if eta is not None:
        admitted = eta_range(constants, gamma)
        if admitted.upper == 0:
            failing.append(f"no eta is admitted, because 1/gamma = {1 / gamma:.4g} is not above rho_f = {constants.rho_f:.4g}.")
        elif eta not in admitted:
            bound = "(1/gamma - rho_f)/(f_yy + 1/gamma)^2" if admitted.closed else "1/rho_g"
            failing.append(
                f"eta = {eta:g} is {'above' if admitted.closed else 'not below'} {bound} = {admitted.upper:.4g}"
                f" (f_yy = {constants.f_yy:.4g}): {eta / admitted.upper:.3g} times too large."
            )
    return failing


def _hypergradient(constants: Constants, gamma: float, p: float | None, c: float | None, mu: float) -> list[str]:
    check_positive("mu", mu)
    failing = []
    if constants.L_g or constants.rho_g:
        failing.append("g is not zero, which the theorem on the hypergradient demands.")
    if not gamma > 1 / mu:
        failing.append(f"gamma = {gamma:g} is not above 1/mu = {1 / mu:.4g}.")
    if p == 0:
        failing.append("p = 0: c_k does not grow, so the hypergradient does not vanish in the limit; take p in (0, 1/2).")
    needed = 4 * constants.L_F / mu
    if c is not None and not c > needed:
        later = f"; c_k = c (k+1)^p is from k = {math.ceil((needed / c) ** (1 / p))}" if p else ""
        failing.append(f"c = {c:g} is not above 4 L_F/mu = {needed:.4g}{later}.")
    return failing


def warn(failing: list[str]) -> None:
    """Issue one :class:`TheoryWarning` that lists the failing inequalities, if there are any."""
    if failing:
        level, frame = 1, inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith("meha."):
            level, frame = level + 1, frame.f_back
        warnings.warn("outside the range of the convergence theorem: " + " ".join(failing), TheoryWarning, stacklevel=level)
