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

from meha.analysis.theory.lemmas import (
    StepBounds,
    TheoryWarning,
    check,
    contraction,
    envelope_weak_convexity,
    hypergradient_bound,
    prox_lipschitz,
    response_bound,
    step_bounds,
    theta_lipschitz,
)
from meha.lower.estimation import estimate
from meha.problem.constants import Constants, Range, eta_range, gamma_range

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
