"""The rules that choose the numbers left out of a method from the problem's constants.

L_y = f_yy is the curvature of f in y, L_xy = sqrt(f_xy^2 + L_g^2) the strength with which x acts on y, s = 0.9. For MEHA:

    gamma = 2 / L_y                                 if f and g are convex in y (rho_f = rho_g = 0); otherwise
            0.45 / (L_y + rho_g)                    inside the theorem's range for any f, because rho_f <= L_y
    eta   = s / (L_y + 1/gamma)                     the curvature of theta's problem; at most what the theorem admits
    c     = 0.5 min(F_yy / L_y, F_xx L_y / L_xy^2)  F counts at first: far from the solution it guides x
    p     = 0.49                                    so that the bias, of order 1/c_k, goes away
    beta  = min(eta, s / (F_yy / c + L_y))          theta must be able to follow y
    alpha = s / (F_xx / c + L_xy^2 / L_y)           with beta, divided by 1 + sqrt(alpha beta) F_xy / c

A quotient whose parts are zero is left out of the minimum. When none remains, F is linear, and c = |F_y| / |G|, with G the
prox-gradient mapping of the lower level at the start. For given constants the rule is scale-free: the run stays the same
when x, y, F or f are measured in other units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from meha.analysis.theory import Constants, eta_range
from meha.lower.curvature import balance
from meha.lower.estimation import estimate_at
from meha.problem.oracle import Oracle
from meha.tensors.variables import Variable, norm, subtract

SAFETY = 0.9  # of a step of 1 / curvature, since constants are often estimates
GROWTH = 0.49  # p of the paper's experiments; the theorem needs p < 1/2

CAUTION = 0.1
"""Where v only follows the solution of its system, x moves by this part of the step for an exact hypergradient."""

FIRST_C = 0.5
"""c at the start, relative to the balance of both levels: F counts a little more, because it guides x."""

OPTIMIZERS = {"alpha": "x_optimizer", "beta": "y_optimizer", "eta": "theta_optimizer"}
"""The optimizer that takes the place of a step size."""

M = TypeVar("M")


def complete(
    method: M,
    names: Sequence[str],
    choose: Callable[[Constants], Mapping[str, float]],
    oracle: Oracle,
    x: Variable,
    y: Variable,
    batch: Any,
) -> tuple[M, Constants | None]:
    """Choose the numbers that were left out of a method from the problem's constants, which are estimated if unknown.

    Args:
        names: the fields to fill in; one whose level has an optimizer stays empty.
        choose: the rule, from constants to numbers by name.
    """
    missing = [n for n in names if getattr(method, n) is None and getattr(method, OPTIMIZERS.get(n, ""), None) is None]
    constants = oracle.problem.constants
    if not missing:
        return method, constants  # no gradients are spent on constants that nobody needs
    constants = constants or estimate_at(oracle, x, y, batch=batch)
    numbers = choose(constants)
    return dataclasses.replace(cast(Any, method), **{name: numbers[name] for name in missing}), constants


def parameters(constants: Constants, c: float, gamma: float | None = None) -> dict[str, float]:
    """Return the numbers that the rule gives for these constants, this c and, where it is given, this gamma.

    >>> found = parameters(Constants(L_F=2.0, L_f=2.0, f_yy=1.0, f_xy=1.0), c=1.0)
    >>> print({name: round(value, 3) for name, value in found.items()})
    {'gamma': 0.45, 'c': 1.0, 'eta': 0.021, 'beta': 0.018, 'alpha': 0.259}
    """
    F_xx, F_yy, F_xy = constants.F_xx, constants.F_yy, constants.F_xy
    L_y, L_xy = _lower_curvatures(constants)
    if gamma is None:
        gamma = 0.45 / (L_y + constants.rho_g) if constants.rho_f or constants.rho_g else 2 / L_y
    eta = min(SAFETY / (L_y + 1 / gamma), eta_range(constants, gamma).upper or math.inf)
    beta = min(eta, SAFETY / (F_yy / c + L_y))
    alpha = SAFETY / (F_xx / c + L_xy**2 / L_y or 1.0)
    coupling = 1 + math.sqrt(alpha * beta) * F_xy / c  # [[a, b], [b, d]] <= (1 + b / sqrt(a d)) diag(a, d)
    return {"gamma": gamma, "c": c, "eta": eta, "beta": beta / coupling, "alpha": alpha / coupling}


def hypergradient_steps(constants: Constants, mu: float = 0.0) -> dict[str, float]:
    """Return alpha, beta and eta for a step of x along the hypergradient, lower steps on f, and steps on a system with f_yy.

    y(x) moves at most k = L_xy / L_y times as far as x in the directions of largest curvature, so that F(x, y(x)) has about the
    curvature F_xx + 2 k F_xy + k^2 F_yy; where f is curved less, y moves further, and alpha must be smaller than this. Lower
    steps may be on mu F + (1 - mu) f, with mu falling.
    """
    L_y, L_xy = _lower_curvatures(constants)
    k = L_xy / L_y
    curvature = constants.F_xx + 2 * k * constants.F_xy + k * k * constants.F_yy
    beta = SAFETY / max(L_y, mu * constants.F_yy + (1 - mu) * L_y)  # for all mu that follow, down to 0
    return {"alpha": SAFETY / (curvature or 1.0), "beta": beta, "eta": beta}


def penalty_steps(constants: Constants) -> dict[str, float]:
    """Return alpha, beta and eta for F + f(x, y) - f(x, z) in x, F + f in y, and f in z."""
    steps = parameters(constants, c=1.0)  # after at_most_one, weights 1 and 1 bound the curvature for every c
    L_y, _ = _lower_curvatures(constants)
    return {"alpha": steps["alpha"], "beta": SAFETY / (constants.F_yy + L_y), "eta": SAFETY / L_y}


def first_penalty(oracle: Oracle, x: Variable, y: Variable, constants: Constants, batch: Any) -> float:
    """Return c for the first step: where both levels are curved alike or, if F is linear, equally steep."""
    L_y, L_xy = _lower_curvatures(constants)
    c = balance(constants.F_xx, constants.F_yy, L_y, L_xy)
    if c < math.inf:
        return FIRST_C * c
    _, F_y = oracle.gradient(y, [(1.0, oracle.upper, x, y)], batch)
    _, f_y = oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)
    with torch.no_grad():
        moved = [leaf - d / L_y for leaf, d in zip(y.leaves, f_y, strict=True)]
        oracle.prox(x.value, moved, 1 / L_y)
        slope, mapping = float(norm(F_y)), float(norm(subtract(y.leaves, moved))) * L_y
    return slope / mapping if slope and mapping else 1.0


def _lower_curvatures(constants: Constants) -> tuple[float, float]:
    """Return L_y and L_xy; a linear f counts as one of curvature 1, so that no step is infinite."""
    return constants.f_yy or constants.L_f or 1.0, math.hypot(constants.f_xy, constants.L_g)
