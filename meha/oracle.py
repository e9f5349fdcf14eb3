"""The oracle: gradients and Hessian-vector products of F, f and f + g, checked and counted.

Every derivative of what the user wrote is taken here, so that one place decides how gradients are taken, and one place
counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from meha.problem import Problem
from meha.variables import Leaves, Variable, add_

__all__ = ["Counts", "Function", "Hessian", "Oracle", "Term"]

T = TypeVar("T")

JOINT_LIMIT = 1 << 16
"""Up to this many numbers in x and y, a sum of terms is differentiated in one backward pass."""


@dataclass
class Counts:
    """Work done so far: gradients of F, gradients of f (or f + g), Hessian-vector products."""

    upper: int = 0
    lower: int = 0
    hvp: int = 0


class Function:
    """F, f or f + g, as called by methods: ``function(x, y, batch)`` on variables, with a checked scalar result."""

    def __init__(self, name: str, evaluate: Callable[[Variable, Variable, Any], Tensor], level: str) -> None:
        self.name = name
        self.level = level
        self._evaluate = evaluate

    def __call__(self, x: Variable, y: Variable, batch: Any = None) -> Tensor:
        value = self._evaluate(x, y, batch)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.level}: must return a scalar tensor, got {got}; reduce it with .sum() or .mean().")
        return value


Term = tuple[float, Function, Variable, Variable]
"""weight * function(x, y), a summand of what :meth:`Oracle.gradient` differentiates."""


class Oracle:
    """First and second derivatives of a problem at variables of the structure of ``x`` and ``y``.

    Attributes:
        upper, lower, phi: F, f and f + g as functions of variables.
        prox: the proximal map of g + indicator of Y; ``prox(x_value, leaves, step)`` works in place.
        project: the projection on X, with the same signature.
        counts: gradients and Hessian-vector products taken so far.

    >>> problem = Problem(upper=lambda x, y: (x * y).sum(), lower=lambda x, y: (y - x).square().sum())
    >>> x, y = Variable(torch.tensor([1.0]), "x"), Variable(torch.tensor([3.0]), "y")
    >>> oracle = Oracle(problem, x, y)
    >>> values, gradient = oracle.gradient(y, [(2.0, oracle.upper, x, y), (1.0, oracle.lower, x, y)])
    >>> gradient, oracle.counts
    ([tensor([6.])], Counts(upper=1, lower=1, hvp=0))
    """

    def __init__(self, problem: Problem, x: Variable, y: Variable) -> None:
        self.problem = problem
        self.counts = Counts()
        self.prox = problem.bind_prox(y)
        self.project = problem.bind_projection(x)
        self.upper = Function("F", _caller(problem.upper), "upper")
        self.lower = Function("f", _caller(problem.lower), "lower")
        self._g = problem.g.terms(y)
        self.phi = Function("f + g", self._phi, "lower") if self._g else self.lower
        self.upper_uses_x = True  # until a first look says otherwise; matters for the counts alone
        self._joint = x.numel + y.numel <= JOINT_LIMIT
        self._checked: set[tuple[str, ...]] = set()

    def g(self, x: Variable, y: Variable) -> Tensor | float:
        """g(x, y); 0 when there is none."""
        return sum(term.value_leaves(x.value, [y.leaves[i] for i in chosen]) for term, chosen in self._g)

    def _phi(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self.lower(x, y, batch) + self.g(x, y)

    def gradient(
        self, wrt: Variable, terms: list[Term], batch: Any = None, *, strict: bool = True
    ) -> tuple[list[Tensor], Leaves]:
        """The values of the functions, and the gradient of their weighted sum with respect to ``wrt``."""
        values, (gradient,) = self.gradients((wrt,), terms, batch, strict=strict)
        return values, gradient

    def gradients(
        self, wrt: tuple[Variable, ...], terms: list[Term], batch: Any = None, *, strict: bool = True
    ) -> tuple[list[Tensor], list[Leaves]]:
        """The values of the functions, and the gradients of their weighted sum with respect to each variable of ``wrt``.

        A function counts as one gradient, with however many variables. Small problems take one backward pass through the sum,
        because there the time goes into calls; larger ones take a pass per term, so that the intermediate results of one term
        only are held at a time.

        Args:
            strict: refuse functions that do not depend on their variable, instead of taking them for constants. The first
                gradient of each kind finds out. A function found not to depend on x is evaluated all the same, since that may
                change, but its gradients in x alone are not counted.
        """
        targets = [leaf for variable in wrt for leaf in variable.leaves]
        values: list[Tensor] = []
        total: Tensor | None = None
        gradient: Leaves | None = None
        key = (*(variable.argument for variable in wrt), *(function.name for _, function, _, _ in terms))
        unchecked = strict and key not in self._checked
        used = []
        with torch.enable_grad():
            for weight, function, x, y in terms:
                value = function(x, y, batch)
                values.append(value.detach().clone() if value.is_leaf or value._base is not None else value.detach())
                if unchecked:
                    used.append([_depends(value, variable.leaves) for variable in wrt])
                if not value.requires_grad:
                    continue
                if function is not self.upper:
                    self.counts.lower += 1
                elif self.upper_uses_x or wrt[-1].argument != "x":
                    self.counts.upper += 1
                if self._joint:
                    value = value if weight == 1.0 else weight * value
                    total = value if total is None else total + value
                elif gradient is None:
                    gradient = [weight * leaf for leaf in _differentiate(value, targets)]
                else:
                    add_(gradient, _differentiate(value, targets), weight)
            if unchecked:
                self._check_dependence(wrt, terms, used)
                self._checked.add(key)
            if total is not None:
                gradient = _differentiate(total, targets)
        return values, _split(gradient if gradient is not None else [torch.zeros_like(leaf) for leaf in targets], wrt)

    def traced(self, wrt: Variable, terms: list[Term], batch: Any = None) -> Leaves:
        """The gradient of a weighted sum of functions with respect to ``wrt``, as a part of the graph."""
        with torch.enable_grad():
            total = sum(weight * function(x, y, batch) for weight, function, x, y in terms)
            assert isinstance(total, Tensor)
            for _, function, _, _ in terms:
                if function is self.upper:
                    self.counts.upper += 1
                else:
                    self.counts.lower += 1
            return _differentiate(total, wrt.leaves, create_graph=True)

    def pull_back(
        self, function: Function, x: Variable, iterates: Sequence[Variable], batch: Any = None
    ) -> tuple[list[Tensor], list[Leaves]]:
        """The value of a function at (x, last iterate), and its gradients with respect to x and the first iterate.

        The iterates come from traced gradients, one for each after the first; the pass back through these is a Hessian-vector
        product each.
        """
        self.counts.hvp += len(iterates) - 1
        return self.gradients((x, iterates[0]), [(1.0, function, x, iterates[-1])], batch, strict=False)

    def _check_dependence(self, wrt: tuple[Variable, ...], terms: list[Term], used: list[list[bool]]) -> None:
        """Once per kind of gradient: refuse objectives that ignore their variable, and note whether F uses x."""
        for (_, function, x, y), uses in zip(terms, used, strict=True):
            for variable, use in zip(wrt, uses, strict=True):
                if variable is y and not use:
                    remedy = (
                        "then the lower level has no influence; minimise upper over x alone"
                        if function is self.upper
                        else "then any y solves the lower level"
                    )
                    raise ValueError(
                        f"{function.level}: its value does not depend on y (or was detached from it); {remedy}. Use y inside,"
                        " and no .detach(), .item() or numpy."
                    )
                if variable is x and function is self.upper and self.upper_uses_x and not use:
                    self.upper_uses_x = False
                    self.counts.upper -= len(wrt) == 1
        only_upper = all(function is self.upper for _, function, _, _ in terms)
        unused = wrt[0].argument == "x" and not any(uses[0] for uses in used)
        if unused and not only_upper and not self.upper_uses_x:
            raise ValueError(
                "x: neither upper nor lower nor nonsmooth depends on it (or its value was detached); use x inside one."
            )

    def hessian(self, terms: list[Term], batch: Any = None) -> Hessian:
        """Second derivatives of a weighted sum of functions at one point (x, y); each product with a vector is counted."""
        return Hessian(self, terms, batch)


class Hessian:
    """Products of a vector with second derivatives at one point, from one graph that lives as long as the object.

    Attributes:
        gradient: the gradient of the sum in y.
    """

    def __init__(self, oracle: Oracle, terms: list[Term], batch: Any) -> None:
        self._oracle = oracle
        y = terms[0][3]
        with torch.enable_grad():
            total = sum(weight * function(x, at, batch) for weight, function, x, at in terms)
            assert isinstance(total, Tensor)
            self._first = _differentiate(total, y.leaves, create_graph=True)
        self.gradient = [leaf.detach() for leaf in self._first]

    def __call__(self, vector: Leaves, *wrt: Variable) -> list[Leaves]:
        """d/d(v) <grad_y, vector> for each variable v of ``wrt``: one double backward pass."""
        self._oracle.counts.hvp += 1
        curved = [(first, part) for first, part in zip(self._first, vector, strict=True) if first.requires_grad]
        targets = [leaf for variable in wrt for leaf in variable.leaves]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if curved:
            outputs, cotangents = zip(*curved, strict=True)
            found = torch.autograd.grad(outputs, targets, cotangents, allow_unused=True, retain_graph=True)
        for variable, pieces in zip(wrt, _split(found, wrt), strict=True):
            if variable.argument == "x" and not self._oracle.upper_uses_x and all(piece is None for piece in pieces):
                raise ValueError(
                    "x: upper does not depend on it, and neither does the y-gradient of lower, so that it has no influence (or"
                    " its value was detached); use x inside one."
                )
        return _split([torch.zeros_like(t) if piece is None else piece for t, piece in zip(targets, found, strict=True)], wrt)


def _caller(objective: Callable[..., Tensor]) -> Callable[[Variable, Variable, Any], Tensor]:
    def call(x: Variable, y: Variable, batch: Any) -> Tensor:
        return objective(x.value, y.value) if batch is None else objective(x.value, y.value, batch)

    return call


def _differentiate(value: Tensor, leaves: Leaves, create_graph: bool = False) -> Leaves:
    found = torch.autograd.grad(value, leaves, allow_unused=True, create_graph=create_graph)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def _split(leaves: Sequence[T], variables: tuple[Variable, ...]) -> list[list[T]]:
    """One list of pieces for all variables as a list for each."""
    pieces = iter(leaves)
    return [[next(pieces) for _ in variable.leaves] for variable in variables]


def _depends(value: Tensor, leaves: Leaves) -> bool:
    if not value.requires_grad:
        return False
    found = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    return any(part is not None for part in found)
