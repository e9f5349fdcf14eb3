"""The statement of a bilevel problem: F, f, g, X, Y and constraints that couple x and y."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from meha.problem.constants import Constants
from meha.problem.constraints import Constraint, takes
from meha.problem.nonsmooth import NonSmooth, Zero
from meha.problem.responses import Response
from meha.problem.sets import ConvexSet, Reals
from meha.tensors.distributed import local, owners, total
from meha.tensors.variables import Leaves, Variable, copy_

Objective = Callable[..., Tensor]
Map = Callable[[Any, Leaves, float], Leaves]

CLOSED_FORMS = (
    "Exact ones exist for a coordinatewise set with a separable term, such as Box with L1, and for an orthant with a term that"
    " has orthant, such as NonNegative with GroupL2; or let both act on different leaves."
)


class Prox:
    """A proximal map or projection bound to a variable: ``prox(x_value, leaves, step)`` changes ``leaves`` in place.

    The actions are maps with the indices of the leaves that each acts on, applied in this order.
    """

    def __init__(self, actions: list[tuple[Map, list[int]]]) -> None:
        self._actions = actions
        self.identity = not actions

    def __call__(self, x: Any, leaves: Leaves, step: float) -> None:
        for action, chosen in self._actions:
            old = local([leaves[i] for i in chosen])
            copy_(old, action(x, old, step))  # in place: others hold the same leaves

    def pull_back(self, x: Any, leaves: Leaves, step: float, cotangent: Leaves) -> Leaves:
        """Apply the transposed Jacobian of the map at ``leaves`` to ``cotangent``."""
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            outputs = list(inputs)
            for action, chosen in self._actions:
                for i, new in zip(chosen, action(x, [outputs[i] for i in chosen], step), strict=True):
                    outputs[i] = new  # a new list: in-place writes would break the graph
            return list(torch.autograd.grad(outputs, inputs, cotangent))


class _OfY:
    """Gives an objective of y, or of (y, batch), an unused argument x, for problems without an upper variable."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        names = ["x", "y"] if takes(objective, 1) else ["x", "y", "batch"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # takes() asks for it

    def __call__(self, x: Any, y: Any, *batch: Any) -> Tensor:
        return self.objective(y, *batch)


@dataclass(frozen=True, eq=False)
class Problem:
    """A bilevel problem: min F(x, y) over x in X and y among the solutions of min_{y in Y} f(x, y) + g(x, y).

    There need not be an x: ``Problem(upper=lambda y: ..., lower=lambda y: ...)``, started with ``x0=None``, chooses among the
    solutions of one problem the one with the smallest F (simple bilevel optimization).

    Args:
        upper: F(x, y), a function that returns a scalar tensor. It receives x and y in the form of the start: tensors, dicts
            or lists of tensors, or modules; and the batch as a third argument, if the run has batches.
        lower: f(x, y), the smooth part of the lower level, called in the same way.
        nonsmooth: g(x, y), a term of :mod:`meha.nonsmooth`.
        x_set: X, a set of :mod:`meha.sets`.
        y_set: Y. The proximal map of g + indicator of Y must have a closed form: any Y without g, a coordinatewise Y with a
            separable g, an orthant with a g that has ``orthant``; other combinations are refused.
        lower_constraints: h(x, y) <= 0 and equations that y has to satisfy in the lower level, one or several of
            :mod:`meha.constraints`. The default, :class:`~meha.LVHBA` and :class:`~meha.BiCGAFFA` take them.
        upper_constraints: those that (x, y) has to satisfy at the solution; the lower level does not know them.
        response: which y is meant where the lower level has several solutions: ``"optimistic"``, the best for F, or a
            selected one of :mod:`meha.responses`, which the lower level gives by itself: ``Nearest()``, the solution nearest to
            y0, or ``Trained(steps=5, lr=0.1)``, where training leads from its start. Another response is another problem, with
            another solution; methods that cannot follow it refuse it.
        constants: known constants of smoothness and convexity; with them, a run outside the theorem's range warns.
        joint: whether to differentiate a sum of objectives in one backward pass instead of one for each. One pass takes less
            time, especially if the objectives share intermediate results, but more memory, for all graphs together; it is the
            default for small problems without modules.

    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
    ...     lower=lambda x, y: torch.sin(x + y - 2).sum(),
    ... )

    The solution of y_1 + y_2 = 1 with the smallest norm:

    >>> import meha
    >>> problem = Problem(upper=lambda y: y.square().sum(), lower=lambda y: (y.sum() - 1).square())
    >>> solution = meha.solve(problem, None, torch.tensor([3.0, 0.0], dtype=torch.float64))
    >>> solution.x, solution.y.round(decimals=4)
    (None, tensor([0.5000, 0.5000], dtype=torch.float64))
    """

    upper: Objective
    lower: Objective
    _: KW_ONLY
    nonsmooth: NonSmooth | None = None
    x_set: ConvexSet | None = None
    y_set: ConvexSet | None = None
    lower_constraints: Constraint | Sequence[Constraint] = ()
    upper_constraints: Constraint | Sequence[Constraint] = ()
    response: Response | Literal["optimistic"] = "optimistic"
    constants: Constants | None = None
    joint: bool | None = None

    def __post_init__(self) -> None:
        for name, objective in (("upper", self.upper), ("lower", self.lower)):
            if not callable(objective):
                raise TypeError(f"{name}: expected a function of (x, y) or (x, y, batch), got {type(objective).__name__}.")
        _check_type("nonsmooth", self.nonsmooth, NonSmooth, "a term of meha.nonsmooth, such as L1(0.1)")
        expected = '"optimistic", or a response of meha.responses, such as Nearest()'
        if not (self.response == "optimistic" or isinstance(self.response, Response)):
            raise TypeError(f"response: expected {expected}, got {self.response!r}.")
        if self.constants is not None and not hasattr(self.constants, "rho_f"):
            raise TypeError(f"constants: expected meha.theory.Constants(...), got {type(self.constants).__name__}.")
        for name, domain in (("x_set", self.x_set), ("y_set", self.y_set)):
            _check_type(name, domain, ConvexSet, "a set of meha.sets, such as Box(0.0, 1.0)")
        for name, value in (("lower_constraints", self.lower_constraints), ("upper_constraints", self.upper_constraints)):
            parts = tuple(value) if isinstance(value, Sequence) else (value,)
            for part in parts:
                _check_type(name, part, Constraint, "a constraint of meha.constraints, such as Linear(A, B, b)")
            object.__setattr__(self, name, tuple(part for part in parts if part is not None))  # the dataclass is frozen

    @property
    def constraints(self) -> tuple[tuple[Constraint, ...], tuple[Constraint, ...]]:
        """The constraints of the lower and of the upper level, as tuples."""
        return cast(Any, (self.lower_constraints, self.upper_constraints))

    @property
    def coupled(self) -> bool:
        """Whether there are constraints that couple x and y."""
        return any(self.constraints)

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.repr}
        changed = {name: value for name, value in values.items() if value not in (None, (), "optimistic")}
        parts = [f"{name}={getattr(value, '__name__', value)}" for name, value in changed.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def g(self) -> NonSmooth:
        """The non-smooth term; :class:`~meha.nonsmooth.Zero` if there is none."""
        return self.nonsmooth if self.nonsmooth is not None else Zero()

    @property
    def domains(self) -> tuple[ConvexSet, ConvexSet]:
        """X and Y; :class:`~meha.sets.Reals` if there is none."""
        x_set, y_set = (Reals() if domain is None else domain for domain in (self.x_set, self.y_set))
        return x_set, y_set

    @property
    def _selected_response(self) -> Response | None:
        """The selected response; None for the optimistic one."""
        return self.response if isinstance(self.response, Response) else None

    @property
    def needs_batch(self) -> bool:
        """Whether an objective cannot be called as ``objective(x, y)``."""
        return not (takes(self.upper, 2) and takes(self.lower, 2))

    @property
    def _without_x(self) -> bool:
        """Whether the problem has no x: :meth:`_with_dummy_x` made it for ``x = None``."""
        return isinstance(self.upper, _OfY)

    def _with_dummy_x(self, x: Any, y: Variable) -> tuple[Problem, Any]:
        """Return the problem and x: both unchanged or, for ``x = None``, with an x of one number that nothing depends on."""
        if x is not None:
            for name, objective in (("upper", self.upper), ("lower", self.lower)):
                if takes(objective, 1) and not takes(objective, 2) and not takes(objective, 3):
                    remedy = "pass x0=None, or write it as a function of (x, y)"
                    raise TypeError(f"{name}: takes y alone, but there is an x0; {remedy}.")
            return self, x
        if self.x_set is not None:
            raise ValueError(f"x_set: is {self.x_set!r}, but there is no x (x0=None); leave it out, or pass x0.")
        if self._selected_response is not None:
            reason = "there is no x (x0=None), and the lower level alone would decide"
            raise ValueError(f"response: is {self.response!r}, but {reason}; leave it out, so that F chooses y.")
        none = torch.zeros(1, dtype=y.leaves[0].dtype, device=y.device)
        if self._without_x:
            return self, none
        return dataclasses.replace(self, upper=_OfY(self.upper), lower=_OfY(self.lower)), none

    def _bind_projection(self, x: Variable) -> Prox:
        """Return the projection onto X for the leaves of ``x``."""
        parts = self.domains[0].parts(x)
        for part, chosen in parts:
            _check_parts("x_set", part, x, chosen, apart=part.coordinatewise)
        return Prox([(_projection(part), chosen) for part, chosen in parts])

    def _bind_prox(self, y: Variable) -> Prox:
        """Return the proximal map of g(x, .) + indicator of Y for the leaves of ``y``; raise if it has no closed form."""
        terms = self.g.terms(y)
        for term, chosen in terms:
            _check_parts("nonsmooth", term, y, chosen, apart=term.separable)  # maps act on the local parts of sharded leaves
        before: list[tuple[Map, list[int]]] = []
        after: list[tuple[Map, list[int]]] = []
        for part, inside in self.domains[1].parts(y):
            _check_parts("y_set", part, y, inside, apart=part.coordinatewise)
            first = []
            for term, chosen in terms:
                if not set(inside) & set(chosen):
                    continue
                if term.orthant and part.orthant:
                    first += [i for i in inside if i in chosen]  # a norm of groups: project, then shrink
                elif not (term.separable and part.coordinatewise):  # in one dimension: prox of g, then clip
                    pair = f"{type(term).__name__} plus the indicator of {type(part).__name__}"
                    raise ValueError(f"y_set and nonsmooth: the proximal map of {pair} has no closed form here. {CLOSED_FORMS}")
            # Only an orthant is ever split, and it acts on each leaf separately.
            before += [(_projection(part), first)] if first else []
            last = [i for i in inside if i not in first]
            after += [(_projection(part), last)] if last else []
        return Prox([*before, *((_proximal(term), chosen) for term, chosen in terms), *after])

    def _project_start(self, x: Variable, y: Variable) -> None:
        """Project x onto X and y onto Y, unless they are inside, sharded, or parameters of modules."""
        for variable, domain in zip((x, y), self.domains, strict=True):
            variable.check_finite()
            if variable.has_modules or variable.divided:
                continue
            for leaf in variable.leaves:  # steps relative to such a start would vanish in rounding
                with torch.no_grad():
                    leaf[leaf.abs() < torch.finfo(leaf.dtype).tiny / torch.finfo(leaf.dtype).eps] = 0.0
            if not domain.holds(variable):  # inside: keep the numbers
                domain.project_(variable)

    def _check_start(self, x: Variable, y: Variable) -> None:
        """Raise unless x0 is in X, y0 is in Y and in the domain of g, and both are finite and on one device."""
        if x.device != y.device:
            raise ValueError(f"x is on {x.device} and y on {y.device}; move both to one device, such as y.to(x.device).")
        if {id(leaf) for leaf in x.leaves} & {id(leaf) for leaf in y.leaves}:  # a step of one level would move the other
            raise ValueError("x and y share parameters; each tensor must belong to one level.")
        self._bind_projection(x)  # for its errors, before the first step
        self._bind_prox(y)
        if y.divided and self._selected_response is not None:
            reason = "y is divided among processes, where no method follows it"
            raise ValueError(f"response: is {self.response!r}, but {reason}; leave it out, or do not shard y.")
        for variable, domain in zip((x, y), self.domains, strict=True):
            variable.check_finite()
            if not domain.holds(variable):
                name = variable.argument
                raise ValueError(f"{name}0 is not in {name.upper()} = {domain!r}; start from {name}_set.project({name}0).")
        for constraint in itertools.chain(*self.constraints):
            constraint.check(x, y)
        for term, chosen in self.g.terms(y):
            with torch.no_grad():
                value = sum_of_parts(term, x.value, [y.leaves[i] for i in chosen])
            if not bool(torch.isfinite(value)):  # no descent leads back from an infinite value
                remedy = "start inside its domain (y0 >= 0 for NonNegativeL1) and with finite weights"
                raise ValueError(f"nonsmooth: {type(term).__name__} is {float(value)} at the start; {remedy}.")


def sum_of_parts(term: NonSmooth, x: Any, leaves: Leaves) -> Tensor:
    """Return the value of a term; for sharded leaves, the sum over the processes that hold parts.

    Its gradient in x is that of the local parts times the number of parts, so that the mean over the processes is that of g.
    """
    value = term.value_leaves(x, local(leaves))
    groups = owners(leaves[0])
    if not groups:
        return value
    scaled = value * math.prod(group.size() for group in groups)
    return scaled + (total([value.detach()], leaves[:1]) - scaled).detach()  # the value of the sum with the gradient of scaled


def _projection(part: ConvexSet) -> Map:
    return lambda x, leaves, step: part.project_leaves(leaves)  # the prox of an indicator does not depend on the step


def _proximal(term: NonSmooth) -> Map:
    def prox(x: Any, leaves: Leaves, step: float) -> Leaves:
        term.check_step(step)
        return term.prox_leaves(x, leaves, step)

    return prox


def _check_parts(argument: str, part: Any, variable: Variable, chosen: list[int], *, apart: bool) -> None:
    """Raise if a set or term combines numbers of several processes, or has a parameter for each number of a sharded leaf."""
    divided = [i for i in chosen if owners(variable.leaves[i])]
    if not divided:
        return
    entries = [key for key, value in vars(part).items() if isinstance(value, Tensor) and value.numel() > 1]
    if not apart or len({tuple(owners(variable.leaves[i])) for i in chosen}) > 1:
        found, remedy = "mixes numbers", "use one that acts on each number by itself (such as Box, NonNegative or L1)"
    elif entries:
        found, remedy = f"has an entry of {entries[0]} for each number", "give one number for all"
    else:
        return
    whose, found = variable.argument, f"{type(part).__name__} {found}"
    raise ValueError(f"{argument}: {found} of {whose}, which is divided among processes; {remedy}, or do not shard {whose}.")


def _check_type(name: str, value: Any, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}: expected {example}, got {type(value).__name__}.")
