"""Base class of non-smooth terms, the zero term, and sums of terms."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from meha.tensors.checks import broadcasts
from meha.tensors.torch_private import under_trace
from meha.tensors.variables import Leaves, Variable, copy_, select, short_step, subtract

Weight = float | Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[Any], Any]

_HIDDEN = ("names", "rho", "count")  # left out of representations, as they follow from the arguments or the run


class NonSmooth(ABC):
    """A term g(x, y), possibly non-smooth in y, whose proximal map in y is known in closed form."""

    rho: float = 0.0
    """g + rho/2 ||y||^2 is convex in y (0 for convex terms)."""

    separable: bool = False
    """Whether g is a sum of functions of single coordinates of y."""

    orthant: bool = False
    """Whether prox of g + indicator(y >= 0) is prox of g after max(y, 0)."""

    quadratic: bool = False
    """Whether g is quadratic (or linear) in y along its faces."""

    kinked: bool = False
    """Whether g has a kink wherever a coordinate of y is zero."""

    def __init__(self, part: str | Sequence[str] | None = None) -> None:
        if part is not None and not isinstance(part, str | list | tuple):
            raise TypeError(f"{type(self).__name__}: part must be a name or a list of names, got {part!r}.")
        self.part = part
        self.names: list[str] = []

    def declared(self, name: str, weight: Weight) -> Weight:
        """Return the weight; raise if its form is unknown or it is a negative number or tensor."""
        term = type(self).__name__
        if not callable(weight) and not isinstance(weight, Tensor | Real | list | tuple | Mapping):
            kinds = "a number, a tensor, a list or dict of them, or a function of x"
            raise TypeError(f"{term}: {name} must be {kinds}, got {weight!r}.")
        if isinstance(weight, Tensor | Real) and bool(torch.as_tensor(weight < 0).any()):
            raise ValueError(f"{term}: {name} must not be negative, got {weight!r}.")
        return weight

    def weighted(
        self, weight: Weight, x: Any, leaves: Leaves, *, scalar: bool = False, signed: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Pair each leaf with its weight, converted to the dtype and device of the leaf.

        Args:
            scalar: whether the weight of a leaf must be a single number.
            signed: whether weights may be negative, as they may be at an x outside X.
        """
        term = type(self).__name__
        weights = weight(x) if callable(weight) else weight
        if isinstance(weights, Mapping):
            if set(weights) != set(self.names):
                found = f"the weights are named {sorted(weights)}, the leaves {sorted(self.names)}"
                raise ValueError(f"{term}: {found}; use the same names.")
            weights = [weights[leaf] for leaf in self.names]
        if isinstance(weights, Tensor) and weights.ndim == 1 and len(leaves) > 1 and weights.numel() == len(leaves):
            weights = list(weights)  # one entry per leaf, not one per coordinate
        many = weights if isinstance(weights, list | tuple) else [weights] * len(leaves)
        if len(many) != len(leaves):
            raise ValueError(f"{term}: got {len(many)} weights for {len(leaves)} leaves; give one for each, or a single one.")
        return [(_fitted(w, leaf, term, scalar, signed), leaf) for w, leaf in zip(many, leaves, strict=True)]

    def value(self, x: Any, y: Any) -> Tensor:
        """g(x, y), differentiable in x."""
        point = Variable.of(y, "y")
        parts = [term.value_leaves(x, [point.leaves[i] for i in chosen]) for term, chosen in self.terms(point)]
        return total(parts) if parts else point.leaves[0].new_zeros(())

    def prox(self, x: Any, y: Any, step: float) -> Any:
        """argmin_w step * g(x, w) + 0.5 ||w - y||^2, in the structure of y (a module is copied)."""
        point = Variable.of(y, "y").copy()
        with torch.no_grad():
            for term, chosen in self.terms(point):
                leaves = [point.leaves[i] for i in chosen]
                term.check_step(step)
                copy_(leaves, term.prox_leaves(x, leaves, step))
        return point.detached()

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        """Split the term into terms on separate groups of leaves of ``y``, checked against their shapes."""
        chosen = select(self.part, y.names, f"{type(self).__name__}: part")
        self.check([y.leaves[i] for i in chosen])
        bound = copy.copy(self)  # a term can be used in several problems, with other names
        bound.names = [y.names[i] for i in chosen]
        return [(bound, chosen)]

    def check(self, leaves: Leaves) -> None:
        """Raise if the term does not fit these leaves."""

    def free(self, leaves: Leaves) -> Leaves | None:
        """Return the face of a point: masks of the coordinates along which g is twice differentiable if the others are fixed.

        None if the term has no such coordinates in general; second-order methods then refuse it.
        """
        return [leaf != 0 for leaf in leaves] if self.kinked else None

    def cut(self, leaves: Leaves, start: Leaves) -> Leaves:
        """Stop a move from ``start`` to ``leaves`` at the kinks that it crosses: coordinates that change sign become zero."""
        if not self.kinked:
            return leaves
        return [torch.where(new * old < 0, 0.0, new) for new, old in zip(leaves, start, strict=True)]

    def least_leaves(self, x: Any, leaves: Leaves, gradient: Leaves, c: float, room: tuple[Leaves, Leaves] | None) -> Leaves:
        """Return the element of least norm of gradient + c * (subdifferential of g in y) + (normal cone of Y).

        If the subdifferential is not known in closed form, it is approximated by a short proximal step, since
        (y - prox(y - step * gradient)) / step is never longer.

        Args:
            room: for a coordinatewise Y, the coordinates that can decrease and those that can increase; None for whole spaces.
        """
        bounds = self.slopes(x, leaves)
        if bounds is not None:
            return least(gradient, bounds, c, room)
        if room is not None:
            remedy = "define slopes(x, leaves), or use diagnostics.prox_residual"
            raise ValueError(f"{type(self).__name__}: its subdifferential beside a set Y is not known; {remedy}.")
        step = short_step(leaves, gradient) / max(c, 1.0)  # c multiplies the threshold of the prox
        moved = self.prox_leaves(x, [y - step * d for y, d in zip(leaves, gradient, strict=True)], step * c)
        return [d / step for d in subtract(leaves, moved)]

    def absolute_terms(self, leaves: Leaves) -> Tensor | None:
        """Return the linear functions a of y, as one vector, whose absolute values :meth:`epigraph` bounds by unknowns t.

        None if g has no such form; the default then refuses it together with constraints.
        """
        return None

    def epigraph(self, x: Any, leaves: Leaves, t: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a smooth function of (x, y, t), and inequalities (not positive if they hold) besides -t <= a(y) <= t.

        Its least value over t is g. Weights may be negative, since x need not be in X here.
        """
        return None

    def slopes(self, x: Any, leaves: Leaves) -> tuple[Leaves, Leaves] | None:
        """Return the left and right derivatives of g in each coordinate; None if unknown or g is not separable."""
        return None

    def check_step(self, step: float | Tensor) -> None:
        """Raise if the proximal map is not single-valued at this step (weakly convex terms)."""
        if isinstance(step, Tensor) and self.rho == 0:  # a traced step has no value to check; its sign is checked elsewhere
            return
        if not step > 0:
            raise ValueError(f"{type(self).__name__}: step must be positive, got {step}.")
        if step * self.rho >= 1:  # step * g + ||.||^2 / 2 is then not strictly convex
            needed = f"step < {1 / self.rho:g} (the term is {self.rho:g}-weakly convex)"
            remedy = "take smaller steps or a larger a"
            raise ValueError(f"{type(self).__name__}: the proximal map needs {needed}, got {step:g}; {remedy}.")

    def __add__(self, other: NonSmooth) -> Sum:
        return Sum(self, other)

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_" and name not in _HIDDEN)
        return f"{type(self).__name__}({', '.join(fields)})"

    @abstractmethod
    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        """Return g on the chosen leaves."""

    @abstractmethod
    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        """Return the proximal map of the chosen leaves, as new leaves."""


class Weighted(NonSmooth):
    """A term with one weight.

    Args:
        weight: w; see :mod:`meha.nonsmooth` for its forms.
        part: the leaves of y that it acts on; all by default.
    """

    def __init__(self, weight: Weight = 1.0, part: str | Sequence[str] | None = None) -> None:
        super().__init__(part)
        self.weight = self.declared("weight", weight)


class Zero(NonSmooth):
    """g = 0: the smooth case.

    >>> Zero().prox(None, torch.tensor([3.0]), 0.1)
    tensor([3.])
    """

    separable = True

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        return []

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        return leaves[0].new_zeros(())

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        return leaves


class Sum(NonSmooth):
    """g = g_1 + g_2 + ..., each on separate leaves (two terms on one leaf have no closed-form prox).

    >>> from meha.problem.nonsmooth import L1, Nuclear
    >>> g = L1(1.0, part="w") + Nuclear(0.5, part="matrix")
    >>> g.prox(None, {"w": torch.tensor([3.0]), "matrix": torch.eye(2)}, 1.0)
    {'w': tensor([2.]), 'matrix': tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])}
    """

    def __init__(self, *members: NonSmooth) -> None:
        super().__init__()
        if not members:
            raise ValueError("Sum: needs at least one term.")
        for member in members:
            if not isinstance(member, NonSmooth):
                raise TypeError(f"Sum: expected terms of meha.nonsmooth, got {type(member).__name__}.")
        self.members: list[NonSmooth] = []
        for member in members:
            self.members += member.members if isinstance(member, Sum) else [member]  # a + b + c is one sum
        self.rho = max(member.rho for member in self.members)  # not their sum, as the leaves are separate

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        pairs = [pair for member in self.members for pair in member.terms(y)]
        taken: dict[int, NonSmooth] = {}
        for term, chosen in pairs:
            for i in chosen:
                if i in taken:
                    both = f"{type(taken[i]).__name__} and {type(term).__name__} both act on {y.label(y.names[i])}"
                    raise ValueError(f"Sum: {both}; give them separate parts, or use SparseGroup or ElasticNet.")
                taken[i] = term
        return pairs

    def value_leaves(self, x: Any, leaves: Leaves) -> Tensor:
        raise TypeError("Sum: leaves have no names here; use value(x, y) or terms(y).")

    def prox_leaves(self, x: Any, leaves: Leaves, step: float) -> Leaves:
        raise TypeError("Sum: leaves have no names here; use prox(x, y, step) or terms(y).")


def _fitted(weight: Any, leaf: Tensor, term: str, scalar: bool, signed: bool) -> Tensor:
    """Convert the weight of one leaf to its dtype and device; raise if it does not broadcast to the leaf."""
    if not isinstance(weight, Tensor | Real):
        kind = type(weight).__name__
        raise TypeError(f"{term}: a weight must be a number or a tensor, got {kind}; wrap arrays with torch.as_tensor.")
    fitted = converted(cast(Tensor | float, weight), leaf)
    if fitted.ndim and (scalar or not broadcasts(fitted.shape, leaf.shape)):
        kind = "one number" if scalar else f"a number or a tensor that broadcasts to {tuple(leaf.shape)}"
        raise ValueError(f"{term}: weight has shape {tuple(fitted.shape)}; a leaf of shape {tuple(leaf.shape)} takes {kind}.")
    return fitted if signed else not_negative(fitted, term)


def converted(weight: Tensor | float, like: Tensor) -> Tensor:
    """Convert a weight to the dtype and device of ``like``; a number is not copied from the host."""
    tensor = weight.to(like) if isinstance(weight, Tensor) else like.new_full((), float(weight))
    return tensor.reshape(()) if tensor.numel() == 1 else tensor  # broadcasts like a number, whatever its shape was


def not_negative(weight: Tensor, term: str) -> Tensor:
    """Return the weight; raise if it is negative.

    It becomes NaN instead on an accelerator, where the check would need a synchronisation, and in a traced step, where there is
    no value.
    """
    if weight.device.type != "cpu" or under_trace():
        return torch.where(weight < 0, torch.nan, weight)  # the run then ends with NaN instead of a wrong prox
    if bool((weight < 0).any()):
        found = f"a weight is negative ({float(weight.detach().min()):.3g}), and the term has no prox"
        remedy = "constrain x (x_set=meha.sets.NonNegative()) or map it (weight=lambda x: x.exp())"
        raise ValueError(f"{term}: {found}; {remedy}.")
    return weight


def least(gradient: Leaves, slopes: tuple[Leaves, Leaves], c: float, room: tuple[Leaves, Leaves] | None) -> Leaves:
    """Return the elements of least size of the intervals gradient + c [left, right], which active bounds of Y extend."""
    results = []
    for i, (d, left, right) in enumerate(zip(gradient, *slopes, strict=True)):
        low, high = d + c * left, d + c * right
        if room is not None:
            # The normal cone of a coordinate that cannot decrease is (-inf, 0], and [0, inf) if it cannot increase.
            low, high = torch.where(room[0][i], low, -torch.inf), torch.where(room[1][i], high, torch.inf)
        results.append(low.clamp(min=0) + high.clamp(max=0))  # zero if the interval contains it, else the nearer end
    return results


def kink(w: Tensor, y: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left and right derivatives of an even function: -w and w at its kink zero, ``slope`` * sign(y) elsewhere."""
    there = torch.where(y == 0, w, slope * y.sign())
    return torch.where(y == 0, -w, there), there


def soft(u: Tensor, threshold: Tensor) -> Tensor:
    """Return the prox of threshold * |u|, known as soft thresholding."""
    return u.sign() * (u.abs() - threshold).clamp(min=0)


def total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of all entries of all tensors."""
    result: Tensor = sum(term.sum() for term in terms)  # type: ignore[assignment]
    return result
