"""Theory: the constants of a problem, and the gamma and eta that the paper's Theorem 3.1 admits for them.

The theorem assumes that F is L_F-smooth, f is L_f-smooth, f and g are weakly convex in y with moduli rho_f and rho_g, and

    0 < gamma < 1 / (2 rho_f + 2 rho_g),
    0 < eta <= (1/gamma - rho_f) / (L_f + 1/gamma)^2   and   eta < 1 / rho_g,
    0 <= p < 1/2.

In the bound on eta, the proof uses L_f only as the Lipschitz constant of grad_y f(x, .), so f_yy replaces it where it is
known: it can be far smaller (for the sine problem 1 instead of n + 1). The bounds on alpha and beta exist but have no usable
form, so they are not checked. A run outside these ranges may work well (the paper's own settings are outside in several
experiments), but has no guarantee.
"""

from meha.theory.estimation import Probe, estimate, estimate_at
from meha.theory.theorem import Constants, Range, TheoryWarning, check, eta_range, gamma_range, warn

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
