"""Which y the lower level leaves open: flat directions at its solution, and variables that belong to a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meha._leaves import add_, copy_, norm
from meha._variables import Variable
from meha.methods._curvatures import flatten, probe
from meha.methods._levels import BudgetError, Levels
from meha.methods._nearest import nearest
from meha.methods._quasi_newton import Pairs

if TYPE_CHECKING:
    from meha._inspection.judging import Inspection

__all__ = ["check_carried", "check_open"]

ALLOWED = 400  # gradients of f for the solution of the lower level
MOST = 100  # largest dimension of y in which flat directions are counted
PROBES = 4  # power steps for the curvature of f
LEAST = 1e-3  # size of y in which differences of gradients are taken, where y is smaller
FLAT = 10.0  # roots of the rounding error: the curvature, relative to the largest, below which a direction is flat
FELT = 1e-3  # slope of F in flat directions, relative to its whole slope there, that counts
ACCURACY = 1e-4  # of the solution
DESCENT = 20  # steps on one batch
FELL = 0.1  # part by which f must fall on it, to say anything
SHARED = 0.1  # part of that fall which must show on the other batch, if y is for both


def check_open(inspection: Inspection) -> None:
    """Solve the lower level from y0, and count the directions in which f is flat there, on the face that g and Y leave."""
    result, problem = inspection.result, inspection.problem
    if result.convexity == "strongly convex":
        result.flat = 0
        return
    small = inspection.around.thorough and inspection.y.numel <= MOST
    if inspection.stochastic or not small or "f in y" in result.kinks or any(inspection.wrong.values()):
        return
    levels = Levels(inspection.around.oracle, inspection.x.copy(), inspection.y.copy())
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=PROBES)
    try:
        with levels.until(levels.spent + ALLOWED):
            fresh = nearest(levels, flatten(levels.y), ACCURACY, curvatures["f_yy"])
    except (BudgetError, RuntimeError, ValueError, ArithmeticError):
        return  # too hard for a look before the run, or outside the domain of f
    point = levels.lower(fresh.y)
    residual = levels.descent(levels.lower, _none(fresh.y), 1 / (curvatures["f_yy"] or 1.0)).residual(point)
    free = torch.ones_like(fresh.y) if residual.free is None else residual.free
    kept = [int(i) for i in torch.nonzero(free).reshape(-1)]
    hessian = _hessian(levels, fresh.y, point.gradient, kept)
    if hessian is None:
        return
    values, vectors = torch.linalg.eigh(hessian)
    largest = max(float(values.abs().max()), curvatures["f_yy"])
    null = vectors[:, values.abs() <= FLAT * math.sqrt(levels.eps) * largest]
    result.flat = null.shape[1]
    if not result.flat:
        inspection.find("determined", "the lower level determines y at its solution.")
        return
    F_y = levels.upper(fresh.y)[2][kept]
    result.open = float((null.T @ F_y).norm()) > FELT * float(F_y.norm()) > 0
    where = f"f is flat in {result.flat} of {len(fresh.y)} directions of y at its solution nearest to y0"
    if problem.selected is not None:
        inspection.find("determined", f"{where}; {type(problem.selected).__name__} says which solution is meant.")
    elif problem.simple or not result.open:
        why = "which F chooses" if problem.simple else "in which F does not change to first order"
        inspection.find("determined", f"{where}, {why}.")
    else:
        inspection.find("determined", f"{where}, and F is not: the best y for F is meant.")
        inspection.warn(
            f"lower: under-determined, since {where}; F then chooses y, and may owe more to it than to x. If y is to be"
            " computed afresh, say which one: Problem(..., response=meha.responses.Nearest()), or add a regulariser."
        )


def check_carried(inspection: Inspection) -> None:
    """Take steps on one batch; if these spoil the other, y belongs to its batch."""
    if inspection.other_batch is None:
        return
    oracle, x, y = inspection.around.oracle, inspection.x, inspection.y.copy()
    batches = inspection.batch, inspection.other_batch

    def values() -> list[float]:
        return [float(oracle.lower(x, y, batch)) for batch in batches]

    before = values()
    _descend(inspection, x, y)
    fell, other = (a - b for a, b in zip(before, values(), strict=True))
    if not (math.isfinite(fell + other) and fell > FELL * abs(before[0])):
        return
    inspection.result.carried = other < SHARED * fell
    if inspection.result.carried:
        inspection.warn(
            f"y: {DESCENT} steps on one batch lower f there by {fell:.2g} and on the other by {other:.2g}, so y seems to belong"
            " to its batch, as the heads of tasks do; start over with each batch (warm_start=False)."
        )
    else:
        inspection.find("batches", "steps of y on one batch lower f on the other as well.")


def _descend(inspection: Inspection, x: Variable, y: Variable) -> None:
    """Gradient steps on the first batch, each half as long when f does not fall."""
    oracle, batch = inspection.around.oracle, inspection.batch
    step = 1.0
    for _ in range(DESCENT):
        (value,), gradient = oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)
        here, size = [leaf.clone() for leaf in y.leaves], float(norm(gradient))
        while step > torch.finfo(value.dtype).eps:
            add_(y.leaves, gradient, -step)
            oracle.prox(x.value, y.leaves, step)
            if float(oracle.lower(x, y, batch)) <= float(value) - 0.25 * step * size**2:
                step *= 2
                break
            copy_(y.leaves, here)
            step /= 2


def _none(y: Tensor) -> Pairs:
    return Pairs.sized(1, len(y))


def _hessian(levels: Levels, y: Tensor, gradient: Tensor, kept: list[int]) -> Tensor | None:
    """The Hessian of f on some coordinates, by differences of gradients; None where they are not finite."""
    step = math.sqrt(levels.eps) * max(float(y.abs().max()), LEAST)
    rows = []
    for i in kept:
        z = y.clone()
        z[i] += step
        rows.append((levels.lower(z).gradient - gradient)[kept] / step)
    if not rows:
        return None
    matrix = torch.stack(rows)
    return (matrix + matrix.T) / 2 if bool(torch.isfinite(matrix).all()) else None
