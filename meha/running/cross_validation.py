"""cross_validation: choose hyper-parameters of any model by K folds, stated as one bilevel problem."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meha.lower.proximal_gradient import solve_lower
from meha.problem.nonsmooth import NonSmooth
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet
from meha.running.solution import Solution
from meha.running.solve import solve
from meha.tensors.checks import check_count
from meha.tensors.variables import Variable

STRENGTHS = (1.0, 0.1, 0.01, 0.001)  # strengths of the prior that the folds choose from
ACCURACY = 1e-9  # residual of the fit on all data
PATIENCE = 100_000  # upper bound on the steps of the fit on all data

Loss = Callable[[Any, Any, Tensor], Tensor]


class Copies(NonSmooth):
    """g(x, y) = sum_k g_1(x, y_k) for a list y of K variables of the same structure.

    Args:
        term: g_1.
        like: a vector of weights; x is then a single number, which stands for all of its entries.
    """

    def __init__(self, term: NonSmooth, like: Tensor | None = None) -> None:
        super().__init__()
        self.term, self.rho, self._like = term, term.rho, like

    def terms(self, y: Variable) -> list[tuple[NonSmooth, list[int]]]:
        pairs, offset = [], 0
        for part in y.value:
            single = Variable.of(part, y.argument)
            for term, chosen in self.term.terms(single):
                whole = term if self._like is None else _Expanded(term, self._like)
                pairs.append((whole, [offset + i for i in chosen]))
            offset += len(single.leaves)
        return pairs

    # A term may act on named parts of a model, and bare leaves do not say which fold and part they are.

    def value_leaves(self, x: Any, leaves: Sequence[Tensor]) -> Tensor:
        raise TypeError("Copies: leaves have no names here; use value(x, y) or terms(y).")

    def prox_leaves(self, x: Any, leaves: Sequence[Tensor], step: float) -> list[Tensor]:
        raise TypeError("Copies: leaves have no names here; use prox(x, y, step) or terms(y).")


@dataclass(frozen=True, eq=False)
class CrossValidated:
    """Hyper-parameters chosen by cross-validation, and the model with them.

    Attributes:
        x: the hyper-parameters.
        y: the model fitted on all data.
        solution: the solution of the K-fold problem; its y is the list of the models, each fitted without its fold.
        error: the mean loss on the folds left out. With ``prior="folds"``, x for each fold was chosen without that fold.
        strength: that of the prior; infinity for a single value of all x.
        errors: the error for each strength that was tried.
    """

    x: Any
    y: Any
    solution: Solution
    error: float
    strength: float
    errors: dict[float, float]


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """The K-fold problem of a model; made by :func:`cross_validation`.

    Attributes:
        folds: the fold of each example, (examples,).
        count: the number K of folds.
    """

    lower: Loss
    upper: Loss
    nonsmooth: NonSmooth | None
    x_set: ConvexSet | None
    folds: Tensor
    count: int
    prior: float | Literal["folds"]
    groups: Tensor | None

    def problem(self, strength: float = 0.0, without: int | None = None) -> Problem:
        """Return the K-fold problem: y is a list with a model for each fold; F is the mean loss of each model on its fold.

        Args:
            strength: the strength of the prior on x, a term of F.
            without: a fold whose examples are not used at all; y then has K - 1 models.
        """
        parts = [k for k in range(self.count) if k != without]
        train, valid = [self._rows(k, without) for k in parts], [(self.folds == k).nonzero()[:, 0] for k in parts]

        def upper(x: Any, y: Any) -> Tensor:
            losses = [self.upper(x, model, rows) for model, rows in zip(y, valid, strict=True)]
            mean = torch.stack(losses).mean()
            return mean + strength * self._spread(x) if strength else mean

        def lower(x: Any, y: Any) -> Tensor:
            # A sum, as that of the K terms g: in a mean, f would weigh less against g than it does for one model.
            return torch.stack([self.lower(x, model, rows) for model, rows in zip(y, train, strict=True)]).sum()

        nonsmooth = None if self.nonsmooth is None else Copies(self.nonsmooth)
        return Problem(upper=upper, lower=lower, nonsmooth=nonsmooth, x_set=self.x_set)

    def fit(self, x: Any, y0: Any, without: int | None = None) -> Any:
        """Fit the model with hyper-parameters x on all examples, or on those of all folds but one."""
        rows, point, model = self._rows(without), Variable(x, "x"), Variable(y0, "y")
        problem = Problem(
            upper=lambda x, y: self.upper(x, y, rows), lower=lambda x, y: self.lower(x, y, rows), nonsmooth=self.nonsmooth
        )
        return solve_lower(Oracle(problem, point, model), point, model, tol=ACCURACY, max_steps=PATIENCE).theta.detached()

    def _rows(self, *without: int | None) -> Tensor:
        """The examples that are in none of these folds."""
        return torch.stack([self.folds != (-1 if k is None else k) for k in without]).all(0).nonzero()[:, 0]

    def error(self, x: Any, y0: Any) -> float:
        """Return the mean loss on the folds left out, with these hyper-parameters."""
        return sum(self._judged(x, y0, k) for k in range(self.count)) / self.count

    def solve(self, x0: Any, y0: Any, **options: Any) -> CrossValidated:
        """Choose x by cross-validation, and fit the model on all data.

        Args:
            x0: the start of the hyper-parameters.
            y0: the start of one model.
            options: passed to :func:`meha.solve`.
        """
        if self.prior != "folds":
            best, errors = self.prior, {}
        elif not isinstance(x0, Tensor) or x0.ndim != 1:
            raise TypeError(
                "x0: a prior chosen by the folds needs a vector of hyper-parameters; pass one, or a number as prior."
            )
        else:
            best = single = torch.inf
            judged = {s: self._nested(x0, y0, s, options) for s in (single, *STRENGTHS)}
            for strength in STRENGTHS:
                gain = judged[single] - judged[strength]  # fold by fold, which removes what the folds have in common
                # A single value overfits least, so that others must be better by more than their standard error.
                if gain.mean() > gain.std() / len(gain) ** 0.5 and judged[strength].mean() < judged[best].mean():
                    best = strength
            errors = {s: float(losses.mean()) for s, losses in judged.items()}
        solution = self._solved(x0, y0, best, None, options)
        errors = errors or {best: self.error(solution.x, y0)}
        return CrossValidated(solution.x, self.fit(solution.x, y0), solution, errors[best], best, errors)

    def _nested(self, x0: Tensor, y0: Any, strength: float, options: dict[str, Any]) -> Tensor:
        """Return the loss on each fold with hyper-parameters chosen by cross-validation on the others (nested)."""
        # Losses of the folds that chose x would favour weak priors, which fit these folds best.
        losses = [self._judged(self._solved(x0, y0, strength, k, options).x, y0, k) for k in range(self.count)]
        return torch.tensor(losses, dtype=torch.float64)

    def _solved(self, x0: Any, y0: Any, strength: float, without: int | None, options: dict[str, Any]) -> Solution:
        """Solve the K-fold problem; with infinite strength, over a single number for all entries of x."""
        models = [copy.deepcopy(y0) for _ in range(self.count - (without is not None))]
        problem = self.problem(0.0 if strength == torch.inf else strength, without)
        if strength != torch.inf:
            return solve(problem, x0, models, **options)
        shared = Problem(
            upper=lambda m, y: problem.upper(m.expand_as(x0), y),
            lower=lambda m, y: problem.lower(m.expand_as(x0), y),
            nonsmooth=None if self.nonsmooth is None else Copies(self.nonsmooth, x0),
            x_set=self.x_set,
        )
        solution = solve(shared, x0.mean(), models, **options)
        solution.x = solution.x.expand_as(x0).clone()
        return solution

    def _judged(self, x: Any, y0: Any, fold: int) -> float:
        """Return the loss on a fold of the model that is fitted on the others."""
        rows = (self.folds == fold).nonzero()[:, 0]
        return float(self.upper(x, self.fit(x, y0, without=fold), rows))

    def _spread(self, x: Tensor) -> Tensor:
        """Return half the squared deviations of x from its mean, or from its group means plus those of the group means."""
        if self.groups is None:
            return 0.5 * (x - x.mean()).square().sum()
        count = int(self.groups.max()) + 1
        sizes = torch.bincount(self.groups, minlength=count)
        means = x.new_zeros(count).index_add(0, self.groups, x) / sizes
        return 0.5 * ((x - means[self.groups]).square().sum() + (means - means.mean()).square().sum())


class _Expanded(NonSmooth):
    """A term with a vector of weights, as a function of a single number, which it expands to this vector."""

    def __init__(self, term: NonSmooth, like: Tensor) -> None:
        super().__init__()
        self.term, self._like, self.rho = term, like, term.rho
        # What solvers ask a term about itself, so that they treat it as they would treat the original.
        self.separable, self.orthant, self.quadratic, self.kinked = term.separable, term.orthant, term.quadratic, term.kinked

    def value_leaves(self, x: Any, leaves: Sequence[Tensor]) -> Tensor:
        return self.term.value_leaves(x.expand_as(self._like), list(leaves))

    def prox_leaves(self, x: Any, leaves: Sequence[Tensor], step: float) -> list[Tensor]:
        return self.term.prox_leaves(x.expand_as(self._like), list(leaves), step)

    def free(self, leaves: list[Tensor]) -> list[Tensor] | None:
        return self.term.free(leaves)

    def cut(self, leaves: list[Tensor], start: list[Tensor]) -> list[Tensor]:
        return self.term.cut(leaves, start)


def cross_validation(
    lower: Loss,
    upper: Loss,
    *,
    examples: int,
    folds: int | Sequence[int] | Tensor = 5,
    nonsmooth: NonSmooth | None = None,
    x_set: ConvexSet | None = None,
    prior: float | Literal["folds"] = 0.0,
    groups: Sequence[int] | Tensor | None = None,
    seed: int = 0,
) -> CrossValidation:
    """State the choice of hyper-parameters by K folds as one bilevel problem.

        min_x  mean_k upper(x, y_k, fold k) + prior on x,    y_k = argmin_y lower(x, y, all but fold k) + g(x, y)

    The K lower levels are one lower level, solved together. ``.solve(x0, y0)`` also fits the model on all data.

    Args:
        lower: lower(x, y, rows), the objective of one model on the examples ``rows`` (an index tensor).
        upper: upper(x, y, rows), its loss on examples left out.
        examples: the number of examples.
        folds: the number of folds, or the fold of each example, from 0.
        nonsmooth: g, for one model.
        x_set: X; with prior="folds" one that also takes a single number, such as a box with numbers as bounds.
        prior: pulls the entries of a vector x, such as log-weights, to their mean: F grows by prior / 2 sum (x_i - mean)^2.
            "folds" chooses its strength by nested cross-validation: x for each fold is chosen without that fold. Where no
            strength is better than a single value of all x_i by more than its standard error, the answer is that value.
        groups: the group of each entry of x, from 0: the prior pulls entries to the means of their groups, and these to theirs.
        seed: decides the folds.

    >>> from meha.problem.sets import Box
    >>> A = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> b = A[:, 0]
    >>> cv = cross_validation(
    ...     lambda x, y, rows: (A[rows] @ y - b[rows]).square().mean() + (x.exp() * y.square()).sum(),
    ...     lambda x, y, rows: (A[rows] @ y - b[rows]).square().mean(),
    ...     examples=30, folds=3, x_set=Box(-6.0, 3.0),
    ... )
    >>> result = cv.solve(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
    >>> bool(result.x[0] < -5), [round(float(c), 2) + 0.0 for c in result.y]
    (True, [1.0, 0.0, 0.0, 0.0])
    """
    check_count("examples", examples)
    if isinstance(folds, int):
        if not 2 <= folds <= examples:
            raise ValueError(f"folds: must be from 2 to {examples}, the number of examples, got {folds}.")
        order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
        assigned = torch.empty(examples, dtype=torch.long)
        assigned[order] = torch.arange(examples) % folds  # sizes differ by one at most
    else:
        assigned = torch.as_tensor(folds).long()
        present = assigned.unique()
        if assigned.shape != (examples,) or present.tolist() != list(range(len(present))) or len(present) < 2:
            raise ValueError(f"folds: must name a fold from 0, two or more in all, for each of {examples} examples.")
    if prior != "folds" and not (isinstance(prior, int | float) and prior >= 0):
        raise ValueError(f"prior: must be a number that is not negative, or 'folds', got {prior!r}.")
    labels = None if groups is None else torch.as_tensor(groups).long()
    return CrossValidation(lower, upper, nonsmooth, x_set, assigned, int(assigned.max()) + 1, prior, labels)
