"""Sets X and Y as inequalities and equations in their variable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from meha.problem import sets
from meha.tensors.variables import Variable

MANY_CORNERS = 10  # largest dimension in which an L1 ball is written as rows, 2^n of them


class UnsupportedSetError(ValueError):
    """A set cannot be written as inequalities and equations."""


Part = tuple[str, Callable[[Tensor], Tensor], int]
"""An inequality or equation: its kind, a function of the flat variable, and the number of its rows."""


def set_as_constraints(domain: sets.ConvexSet, variable: Variable) -> list[Part]:
    """Write a set as inequalities and equations in its variable."""
    constraints: list[Part] = []
    offsets = np.concatenate([[0], np.cumsum([leaf.numel() for leaf in variable.leaves])])
    for part, chosen in domain.parts(variable):  # a part may be a set of some of the leaves only
        index = torch.cat([torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in chosen]).to(variable.device)
        shapes = [variable.leaves[i] for i in chosen]
        for kind, call, size in _part_as_constraints(part, shapes):
            constraints.append((kind, partial(_of_part, call, index), size))
    return constraints


def _part_as_constraints(part: sets.ConvexSet, leaves: list[Tensor]) -> list[Part]:
    """Write a set of vectors, the given leaves one after another, as inequalities and equations."""
    n = sum(leaf.numel() for leaf in leaves)
    like = leaves[0].detach()
    if isinstance(part, sets.Reals):
        return []
    if isinstance(part, sets.Intersection):
        return [row for member in part.sets for row in _part_as_constraints(member, leaves)]
    if isinstance(part, sets.NonNegative):
        return [("inequality", lambda v: -v, n)]
    if isinstance(part, sets.LinfBall):
        centre, reach = torch.as_tensor(part.center).to(like).reshape(-1), part.radius
        return [("inequality", lambda v: torch.cat([centre - reach - v, v - centre - reach]), 2 * n)]
    if isinstance(part, sets.Box):
        rows: list[Part] = []
        for sign, bound in ((-1.0, part.low), (1.0, part.high)):
            ends = torch.cat([torch.as_tensor(bound).to(leaf).expand(leaf.shape).reshape(-1) for leaf in leaves])
            kept = torch.nonzero(torch.isfinite(ends)).reshape(-1)  # an infinite bound would give infinite rows
            if len(kept):
                rows.append(("inequality", partial(_beyond, sign, kept, ends[kept]), len(kept)))
        return rows
    if isinstance(part, sets.HalfSpace):
        normal, offset = part.normal.reshape(1, -1).to(like), part.offset
        return [("inequality", lambda v: normal.to(v) @ v - offset, 1)]
    if isinstance(part, sets.AffineSet):
        matrix, rhs = part.matrix.to(like), part.rhs.to(like)
        return [("equation", lambda v: matrix @ v - rhs, len(rhs))]
    if isinstance(part, sets.Polyhedron):
        A, b, C, d = (torch.from_numpy(array).to(like) for array in part.arrays)
        rows = [("inequality", lambda v: A @ v - b, len(b))] if len(b) else []
        return rows + ([("equation", lambda v: C @ v - d, len(d))] if len(d) else [])
    if isinstance(part, sets.Simplex):
        total = part.total
        return [("inequality", lambda v: -v, n), ("equation", lambda v: v.sum().reshape(1) - total, 1)]
    if isinstance(part, sets.L2Ball):  # with the square of the norm, which is smooth at the centre
        center, radius = torch.as_tensor(part.center).to(like).reshape(-1), part.radius
        return [("inequality", lambda v: ((v - center).square().sum() - radius**2).reshape(1), 1)]
    if isinstance(part, sets.L1Ball) and n <= MANY_CORNERS:  # <s, v> <= r for all signs s: linear, without kinks
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * n).reshape(-1, n).to(like)
        middle, size = torch.as_tensor(part.center).to(like).reshape(-1), part.radius
        return [("inequality", lambda v: signs @ (v - middle) - size, len(signs))]
    raise UnsupportedSetError(
        f"{type(part).__name__} together with constraints: it cannot be written as inequalities here; state it as a"
        " meha.constraints.Smooth, or as a Polyhedron."
    )


def _of_part(call: Callable[[Tensor], Tensor], index: Tensor, v: Tensor) -> Tensor:
    return call(v[index])


def _beyond(sign: float, kept: Tensor, ends: Tensor, v: Tensor) -> Tensor:
    return sign * (v[kept] - ends)
