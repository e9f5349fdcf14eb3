"""Theory: the constants of a problem, the numbers that the paper's theorems admit for them, and the constants of its lemmas.

The convergence theorem assumes that F is L_F-smooth, f is L_f-smooth, f and g are weakly convex in y with moduli rho_f and
rho_g,

    0 < gamma < 1 / (2 rho_f + 2 rho_g),
    0 < eta <= (1/gamma - rho_f) / (L_f + 1/gamma)^2   and   eta < 1 / rho_g,
    0 <= p < 1/2,

and alpha and beta at most the bounds of :func:`step_bounds`, which are tiny. In the bound on eta, the proof uses L_f only as
the Lipschitz constant of grad_y f(x, .), so f_yy replaces it where it is known: it can be far smaller (for the sine problem 1
instead of n + 1); in the same way f_xy is the constant of grad_y f(., y). A run outside these ranges may work well (the
paper's own settings are outside in several experiments), but has no guarantee. Runs warn about gamma, eta and p alone; the
report of a solution names alpha and beta too.

The theorem on the hypergradient assumes besides that g = 0, f is mu-strongly convex in y, gamma > 1/mu and p > 0
(``check(..., mu=)``, :func:`response_bound`, :func:`hypergradient_bound`). With the paper's rho_f = L_f no gamma would satisfy
both theorems; with the modulus in y alone, which is 0 for such f, every gamma > 1/mu does.
"""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass

from meha.lower.estimation import estimate
from meha.problem.constants import Constants, Range, eta_range, gamma_range
from meha.tensors.checks import check_positive

__all__ = [
    "Constants",
    "Range",
    "StepBounds",
    "TheoryWarning",
    "check",
    "contraction",
    "envelope_weak_convexity",
    "estimate",
    "eta_range",
    "gamma_range",
    "hypergradient_bound",
    "prox_lipschitz",
    "response_bound",
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
    left = 1 - s * constants.rho_g  # the modulus of strong convexity of what the prox minimises
    if not left > 0:
        raise ValueError(f"s: must be below 1/rho_g = {1 / constants.rho_g:g}, where the prox is single-valued, got {s:g}.")
    return s * constants.L_g / left, 1 / left


def contraction(constants: Constants, gamma: float, eta: float) -> float:
    """The factor sigma by which a step of theta shrinks ||theta - theta*||: sqrt(1 - eta (1/gamma - rho_f)) / (1 - eta rho_g).

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
        s = admitted.upper if admitted.closed else 0.5 * admitted.upper  # an open end is not admitted itself
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
    t = (1 / (2 * gamma) - constants.rho_f - constants.rho_g) / 2  # rho + t must stay below 1 / (2 gamma)
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
    lipschitz = theta_lipschitz(constants, gamma) ** 2  # L_theta^2 in the formulas
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
    check_positive("mu", mu)
    check_positive("c", c)
    if gamma is None:  # the paper's bound
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
        eta, p, c: of the run; what is left out is not checked.
        alpha, beta: compared with :func:`step_bounds`, which needs eta and c; not checked where gamma or eta fail already.
        mu: f is mu-strongly convex in y. With it, the theorem on the hypergradient is checked too, which needs g = 0,
            gamma > 1/mu, p > 0 and c_k > 4 L_F / mu.

    >>> print(*check(Constants(L_F=2.0, L_f=1.0, rho_f=1.0), gamma=200.0))
    gamma = 200 is not below 1/(2 rho_f + 2 rho_g) = 0.5 (rho_f = 1, rho_g = 0): 400 times too large.
    """
    failing = []
    admitted = gamma_range(constants)
    if gamma not in admitted:
        failing.append(
            f"gamma = {gamma:g} is not below 1/(2 rho_f + 2 rho_g) = {admitted.upper:.4g}"
            f" (rho_f = {constants.rho_f:.4g}, rho_g = {constants.rho_g:.4g}): {gamma / admitted.upper:.3g} times too large."
        )
    if eta is not None and eta not in (admitted := eta_range(constants, gamma)):
        above = "above (1/gamma - rho_f)/(f_yy + 1/gamma)^2" if admitted.closed else "not below 1/rho_g"
        failing.append(
            f"eta = {eta:g} is {above} = {admitted.upper:.4g} (f_yy = {constants.f_yy:.4g}):"
            f" {eta / admitted.upper:.3g} times too large."
            if admitted.upper  # else 1 / gamma <= rho_f: the proximal lower level need not be convex
            else f"no eta is admitted, because 1/gamma = {1 / gamma:.4g} is not above rho_f = {constants.rho_f:.4g}."
        )
    if alpha is not None or beta is not None:
        if eta is None or c is None:
            raise ValueError("check: the bounds on alpha and beta depend on eta and c; pass both.")
        bounds = None if failing else step_bounds(constants, gamma, eta, c)  # which raises where gamma or eta fail
        for name, value in (("alpha", alpha), ("beta", beta)):
            if bounds is not None and value is not None and not 0 < value <= (most := getattr(bounds, name)):
                failing.append(
                    f"{name} = {value:g} is above its bound {most:.3g} (step_bounds): {value / most:.3g} times too large."
                )
    if p is not None and not 0 <= p < 0.5:
        failing.append(f"p = {p:g} is not in [0, 1/2).")
    if mu is None:
        return failing
    check_positive("mu", mu)
    if constants.L_g or constants.rho_g:
        failing.append("g is not zero, which the theorem on the hypergradient demands.")
    if not gamma > 1 / mu:
        failing.append(f"gamma = {gamma:g} is not above 1/mu = {1 / mu:.4g}.")
    if p == 0:
        failing.append("p = 0: c_k does not grow, so the hypergradient does not vanish in the limit; take p in (0, 1/2).")
    needed = 4 * constants.L_F / mu
    if c is not None and not c > needed:  # from c (k + 1)^p > needed
        later = f"; c_k = c (k+1)^p is from k = {math.ceil((needed / c) ** (1 / p))}" if p else ""
        failing.append(f"c = {c:g} is not above 4 L_F/mu = {needed:.4g}{later}.")
    return failing


def warn(failing: list[str]) -> None:
    """Issue one :class:`TheoryWarning` that lists the failing inequalities, if there are any."""
    if failing:
        level, frame = 1, inspect.currentframe()
        # The warning must point at the line of the user, however deep inside of the library it is issued.
        while frame is not None and frame.f_globals.get("__name__", "").startswith("meha."):
            level, frame = level + 1, frame.f_back
        warnings.warn("outside the range of the convergence theorem: " + " ".join(failing), TheoryWarning, stacklevel=level)
