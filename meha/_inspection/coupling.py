"""What a check looks at in a coupled problem: its constraints at the start and at the solution of the lower level there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array
from meha.methods.constrained.lower import LowerLevel, Region

if TYPE_CHECKING:
    from meha._inspection.judging import Inspection

__all__ = ["check_constraints"]

STEP = 1.0  # of a difference, in cube roots of the rounding error
WRONG = 1e-4  # deviation of a gradient from differences, relative to its size, that counts
MET = 1e-6  # violation with which a constraint counts as met, and slack with which it is active
INDEPENDENT = 1e-9  # singular values, relative to the largest, that count as zero
SHOWN = 5  # constraints that are named


def check_constraints(inspection: Inspection) -> None:
    """Values and gradients at the start, a feasible point of the lower level at x0, its active constraints and their rank."""
    result = inspection.result
    try:
        coupling = Coupling(inspection.around.oracle, inspection.x.copy(), inspection.y.copy())
    except Exception as error:  # of a constraint, whatever it does
        inspection.fail("lower_constraints, upper_constraints", error)
        return
    rows, z = coupling.rows, coupling.read()
    lower, upper = rows.lower_equations.stop - rows.lower.start, rows.upper_equations.stop - rows.upper.start
    kinds = "linear" if coupling.linear[2:].all() else "quadratic" if coupling.quadratic[2:].all() else "smooth"
    inspection.find("constraints", f"{lower} rows of the lower level, {upper} of the upper level, sets included; {kinds}.")
    values = coupling.values(z)
    unknown = [coupling.names[k] for k in np.flatnonzero(~np.isfinite(values))]
    if unknown:
        inspection.warn(f"{unknown[0]}: is not finite at the start; check it, or start elsewhere.")
        return
    _check_start(inspection, coupling, values)
    _check_gradients(inspection, coupling, z)
    level = LowerLevel(coupling, Region.of(coupling, z))
    convexity = {True: "convex", None: "convex as far as seen", False: "non-convex"}[level.convex]
    result.convexity = "unknown" if level.convex is None else convexity
    inspection.find("lower level", f"{convexity} in y, with its constraints.")
    found = level.search(z[: coupling.n], z[coupling.n :])
    if found is None:
        inspection.warn(
            "lower_constraints: no y was found that meets them at x0; such x are excluded from the solution. Check the signs"
            " (h(x, y) <= 0), or start where they can be met."
        )
        return
    _check_active(inspection, coupling, np.concatenate([z[: coupling.n], found.w]), found.lam)


def _check_start(inspection: Inspection, coupling: Coupling, values: Array) -> None:
    rows = coupling.rows
    excess = np.concatenate([values[rows.lower], np.abs(values[rows.lower_equations]), values[rows.upper]])
    excess = np.concatenate([excess, np.abs(values[rows.upper_equations])])
    inspection.result.violation = float(max(0.0, excess.max(initial=0.0)))
    broken = [coupling.names[2 + k] for k in np.flatnonzero(excess > MET)]
    if broken:
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        listed = ", ".join(broken[:SHOWN]) + more
        inspection.find("feasibility", f"the start violates {listed}, by {inspection.result.violation:.2g} at most; it may.")
    else:
        inspection.find("feasibility", "the start meets all constraints.")


def _check_gradients(inspection: Inspection, coupling: Coupling, z: Array) -> None:
    generator = np.random.default_rng(0)
    direction = generator.normal(size=len(z))
    direction /= np.linalg.norm(direction)
    step = STEP * coupling.eps ** (1 / 3) * (1 + float(np.abs(z).max()))
    ends = [coupling.call(z + sign * step * direction) for sign in (1.0, -1.0)]
    slopes = coupling.jacobian(z) @ direction
    differences = (ends[0] - ends[1]) / (2 * step)
    size = np.abs(slopes) + np.abs(differences) + np.abs(ends[0]) + 1.0
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(np.abs(slopes - differences) > (WRONG + coupling.eps**0.5) * size)
    for k in wrong[:SHOWN]:
        inspection.warn(
            f"{coupling.names[k]}: its gradient, {slopes[k]:.3g} along a random direction at the start, differs from finite"
            f" differences, {differences[k]:.3g}; avoid .detach(), .item(), kinks and numpy in it."
        )
    if not len(wrong):
        inspection.find("gradients", "those of F, f and all constraints agree with finite differences.")


def _check_active(inspection: Inspection, coupling: Coupling, z: Array, lam: Array) -> None:
    rows = coupling.rows
    values = coupling.values(z)
    active = [k for k in range(rows.lower.start, rows.lower.stop) if values[k] >= -MET]
    held = [*active, *range(rows.lower_equations.start, rows.lower_equations.stop)]
    inspection.result.active = [coupling.names[k] for k in active]
    texts = [f"{coupling.names[k]} (multiplier {lam[k - rows.lower.start]:.2g})" for k in active[:SHOWN]]
    listed = ", ".join(texts) or "none"
    inspection.find("active", f"at the lower solution for x0: {listed}.")
    if not held:
        return
    gradients = coupling.jacobian(z)[held][:, coupling.n :]
    singular = np.linalg.svd(gradients, compute_uv=False)
    rank = int((singular > INDEPENDENT * max(float(singular[0]), 1.0)).sum())
    flat = [coupling.names[k] for k, row in zip(held, gradients, strict=True) if np.abs(row).max() <= MET]
    if flat:
        inspection.warn(
            f"{flat[0]}: its gradient in y vanishes where it is active, so that the lower level may have no multipliers; state"
            " the constraint in another way, such as y = 0 instead of y^2 <= 0."
        )
    elif rank < len(held):
        inspection.find(
            "multipliers", f"not unique at x0: the gradients of {len(held)} active constraints have rank {rank} in y."
        )
