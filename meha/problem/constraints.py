"""Constraints that couple x and y: linear and smooth inequalities and equations, and bounds on y that move with x.

They are given to :class:`~meha.Problem` as ``lower_constraints``, which y has to satisfy in the lower level, and as
``upper_constraints``, which the pair (x, y) has to satisfy. A constraint is a pair of vectors, ``inequalities`` that must not
be positive and ``equations`` that must be zero. A variable with several leaves counts as one long vector, all leaves one
after another, as in :mod:`meha.sets`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha.problem.sets.base import Rows
from meha.tensors.variables import Leaves, Variable, named_parts
from meha.tensors.vectors import join

__all__ = ["Bounds", "Constraint", "Linear", "Smooth"]


class Constraint(ABC):
    """Inequalities and equations in x and y."""

    def __call__(self, x: Any, y: Any) -> Rows:
        """Return the values of the inequalities and of the equations at (x, y), which have the structure of the start."""
        return self.values(Variable.of(x, "x"), Variable.of(y, "y"))

    @abstractmethod
    def values(self, x: Variable, y: Variable) -> Rows:
        """Return the values of the inequalities and of the equations at variables."""

    def violation(self, x: Any, y: Any) -> float:
        """Return the largest violation of an inequality or equation at (x, y); 0 if all hold."""
        with torch.no_grad():
            inequalities, equations = self(x, y)
        parts = [inequalities.clamp(min=0.0), equations.abs()]
        return max(float(part.max()) if part.numel() else 0.0 for part in parts)

    def check(self, x: Variable, y: Variable) -> None:
        """Raise if the constraint does not fit the variables."""


@dataclass(frozen=True, eq=False)
class Linear(Constraint):
    """A x + B y <= b and A_eq x + B_eq y = b_eq.

    Args:
        A, B: matrices with one row per inequality and one column per coordinate of x, and of y; None for zero. A vector is
            a row if there is one inequality, and a column otherwise.
        b: one entry per row.
        A_eq, B_eq, b_eq: the same for equations.

    >>> budget = Linear(A=None, B=[[1.0, 1.0]], b=[3.0])  # y_1 + y_2 <= 3
    >>> budget(torch.zeros(1), torch.tensor([2.0, 2.0]))
    (tensor([1.]), tensor([]))
    """

    A: Any = None
    B: Any = None
    b: Any = None
    A_eq: Any = None
    B_eq: Any = None
    b_eq: Any = None

    def __post_init__(self) -> None:
        for names in (("A", "B", "b"), ("A_eq", "B_eq", "b_eq")):
            matrices, right = [getattr(self, name) for name in names[:2]], getattr(self, names[2])
            if right is None and all(matrix is None for matrix in matrices):
                continue
            if right is None or all(matrix is None for matrix in matrices):
                raise ValueError(f"Linear: {names[2]} and one of {names[0]}, {names[1]} belong together; give both.")
            right = _tensor(right, f"Linear: {names[2]}").reshape(-1)
            object.__setattr__(self, names[2], right)  # the only way in a frozen dataclass
            for name, matrix in zip(names[:2], matrices, strict=True):
                if matrix is None:
                    continue
                matrix = _tensor(matrix, f"Linear: {name}")
                if matrix.ndim <= 1:  # one row, or one column for a variable with one coordinate
                    matrix = matrix.reshape(1, -1) if len(right) == 1 else matrix.reshape(-1, 1)
                if matrix.ndim != 2 or len(matrix) != len(right):
                    kind = f"a matrix with one row for each of the {len(right)} entries of {names[2]}"
                    raise ValueError(f"Linear: {name} must be {kind}, got shape {tuple(matrix.shape)}.")
                object.__setattr__(self, name, matrix)
        if self.b is None and self.b_eq is None:
            raise ValueError("Linear: is empty; give A, B and b for A x + B y <= b, or A_eq, B_eq and b_eq.")

    def check(self, x: Variable, y: Variable) -> None:
        for name, variable in (("A", x), ("B", y), ("A_eq", x), ("B_eq", y)):
            matrix = getattr(self, name)
            if matrix is not None and (columns := matrix.shape[1]) != variable.numel:
                size = f"{variable.argument} has {variable.numel} coordinates"
                raise ValueError(f"Linear: {name} has {columns} columns, but {size}.")

    def values(self, x: Variable, y: Variable) -> Rows:
        flat = join(x.leaves), join(y.leaves)
        return _rows(self.A, self.B, self.b, *flat), _rows(self.A_eq, self.B_eq, self.b_eq, *flat)


@dataclass(frozen=True, eq=False)
class Smooth(Constraint):
    """h(x, y) <= 0 and e(x, y) = 0, entry by entry, for smooth functions.

    Args:
        h: a function of (x, y) in the structure of the start, which returns a tensor of any shape, or a dict or list of
            tensors and numbers; a function of y alone where there is no x.
        equations: e, likewise.

    >>> disc = Smooth(lambda x, y: (y - x).square().sum() - 1)
    >>> disc.violation(torch.zeros(2), torch.tensor([2.0, 0.0]))
    3.0
    """

    h: Callable[[Any, Any], Any] | None = None
    equations: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.h is None and self.equations is None:
            raise ValueError("Smooth: is empty; give h for h(x, y) <= 0, or equations for e(x, y) = 0.")
        for name, function in (("h", self.h), ("equations", self.equations)):
            if function is not None and not callable(function):
                raise TypeError(f"Smooth: {name} must be a function of (x, y), got {type(function).__name__}.")

    def check(self, x: Variable, y: Variable) -> None:
        at = [variable.moved([leaf.detach().clone().requires_grad_() for leaf in variable.leaves]) for variable in (x, y)]
        for name, function in (("h", self.h), ("equations", self.equations)):
            with torch.enable_grad():
                first, second = _vector(function, name, *at), _vector(function, name, *at)
            if len(first) != len(second):
                lengths = f"{len(first)} numbers, and {len(second)} when it is called again"
                raise ValueError(f"Smooth: {name} returns {lengths}; the number of constraints must stay the same.")
            if len(first) and not first.requires_grad:
                why = "autograd sees no x or y in it (a constant, .detach(), .item() or numpy)"
                raise ValueError(
                    f"Smooth: {name} cannot be differentiated: {why}; compute it from x and y by functions of torch."
                )

    def values(self, x: Variable, y: Variable) -> Rows:
        return _vector(self.h, "h", x, y), _vector(self.equations, "equations", x, y)


@dataclass(frozen=True, eq=False)
class Bounds(Constraint):
    """low(x) <= y <= high(x), coordinate by coordinate.

    Args:
        low, high: functions of x with finite values, or fixed numbers or tensors, which may be infinite; what they give
            broadcasts to y, or has the structure of y. None for no bound.

    >>> capacity = Bounds(low=0.0, high=lambda x: 2 * x)
    >>> capacity(torch.ones(1), torch.tensor([3.0]))[0]
    tensor([-3.,  1.])
    """

    low: Any = None
    high: Any = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("Bounds: is empty; give low, high or both, numbers, tensors or functions of x.")
        for name in ("low", "high"):
            bound = getattr(self, name)
            if isinstance(bound, list | tuple | int | float | Tensor):
                numbers = _tensor(bound, f"Bounds: {name}", infinite=True)
                object.__setattr__(self, name, bound if isinstance(bound, int | float) else numbers)
            elif callable(bound) and not takes(bound, 1):  # a function of (x, y) belongs into Smooth
                raise TypeError(f"Bounds: {name} must be a function of x alone, a number or a tensor.")

    def values(self, x: Variable, y: Variable) -> Rows:
        parts = []
        for sign, name in ((-1.0, "low"), (1.0, "high")):
            bound = getattr(self, name)
            if bound is None:
                continue
            leaves = _bound_leaves(bound(x.value) if callable(bound) else bound, y, name)
            for leaf, end in zip(y.leaves, leaves, strict=True):
                part = (sign * (leaf - end)).reshape(-1)
                # Infinite fixed bounds give no rows; a bound that moves with x keeps all, as their number must not depend on x.
                parts.append(part if callable(bound) else part[torch.nonzero(torch.isfinite(end).reshape(-1)).reshape(-1)])
        return torch.cat(parts), y.leaves[0].new_zeros(0)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with this number of arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _bound_leaves(bound: Any, y: Variable, name: str) -> Leaves:
    """Return the bound for each leaf of y."""
    if isinstance(bound, int | float):
        return [torch.full(leaf.shape, float(bound), dtype=leaf.dtype, device=leaf.device) for leaf in y.leaves]
    named = dict.fromkeys(y.names, bound) if isinstance(bound, Tensor) else dict(named_parts(bound))
    if set(named) != set(y.names):
        raise ValueError(f"Bounds: {name} has the tensors {sorted(named)}, but y has {sorted(y.names)}; give one for each.")
    leaves = [torch.as_tensor(named[leaf]) for leaf in y.names]
    try:
        return [end.to(leaf.device, leaf.dtype).expand(leaf.shape) for end, leaf in zip(leaves, y.leaves, strict=True)]
    except RuntimeError:  # expand refuses shapes that do not broadcast
        shapes = [tuple(leaf.shape) for leaf in leaves], [tuple(leaf.shape) for leaf in y.leaves]
        raise ValueError(f"Bounds: {name} has shapes {shapes[0]}, which do not broadcast to those of y, {shapes[1]}.") from None


def _rows(A: Tensor | None, B: Tensor | None, b: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """Return A x + B y - b; an empty vector without b."""
    if b is None:
        return y.new_zeros(0)
    total = -b.to(y.device, y.dtype)  # b and matrices may be of another device or precision than the variables
    for matrix, vector in ((A, x), (B, y)):
        if matrix is not None:
            total = total + matrix.to(vector.device, vector.dtype) @ vector
    return total


def _vector(function: Callable[[Any, Any], Any] | None, name: str, x: Variable, y: Variable) -> Tensor:
    """Return all values of a function of (x, y), or of y alone, as one vector; an empty vector without a function."""
    if function is None:
        return y.leaves[0].new_zeros(0)
    arguments = (x.value, y.value) if takes(function, 2) else (y.value,)
    like = y.leaves[0]
    parts = []
    for _, value in named_parts(function(*arguments)):
        if isinstance(value, int | float):
            value = like.new_tensor(float(value))  # a constant, for which a function need not make a tensor
        if not isinstance(value, Tensor):
            got = type(value).__name__
            raise TypeError(f"Smooth: {name} must return a tensor, or a dict or list of tensors and numbers, got {got}.")
        parts.append(value.reshape(-1))
    return torch.cat(parts) if parts else like.new_zeros(0)


def _tensor(value: Any, label: str, *, infinite: bool = False) -> Tensor:
    """Convert numbers to a real floating point tensor, finite unless ``infinite``; raise with the label if that fails."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{label} must be a tensor or a list of numbers, got {value!r}.") from None
    if tensor.is_complex():
        raise TypeError(f"{label} must be real, got {tensor.dtype}; pass its real part.")
    if bool(tensor.isnan().any()) or not (infinite or bool(torch.isfinite(tensor).all())):
        raise ValueError(f"{label} has entries that are NaN{'' if infinite else ' or infinite'}.")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())  # integers, as in [[1, 1]]
