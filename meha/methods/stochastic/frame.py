"""What stochastic methods share: the derivatives of a step, the three moves, recursions, the Neumann series, and batches."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from meha.analysis.theory import Constants
from meha.method.method import At, Numbers, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer
from meha.methods.frames import SteppingMethod
from meha.methods.parameters import CAUTION
from meha.problem.loaders import Draw, GroupDraw, StepDraws
from meha.problem.oracle import Hessian, Oracle, Term
from meha.problem.schedules import Schedule, check_schedule
from meha.tensors.variables import Leaves, Variable, add_, copy_, subtract

Triple = tuple[Leaves, Leaves, Leaves]
"""Directions of x, y and v."""


class Derivatives(NamedTuple):
    """The value of F at a point (x, y, v), and what the directions of a step are made of; f_xy and f_yy are products with v."""

    upper: Tensor
    F_x: Leaves
    F_y: Leaves
    f_xy: Leaves
    f_y: Leaves
    f_yy: Leaves

    @property
    def directions(self) -> Triple:
        """F_x - f_xy [v], f_y and f_yy [v] - F_y."""
        return subtract(self.F_x, self.f_xy), self.f_y, subtract(self.f_yy, self.F_y)


def derivatives(oracle: Oracle, x: Variable, y: Variable, v: Leaves, batch: Any) -> Derivatives:
    """Return the derivatives at (x, y, v) on a batch: 1 gradient of F, 1 of f and 1 Hessian-vector product."""
    (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
    hessian = oracle.hessian([(1.0, oracle.lower, x, y)], batch, counted=True)
    f_xy, f_yy = hessian(v, x, y)  # one double backward pass gives both
    return Derivatives(upper, F_x, F_y, f_xy, hessian.gradient, f_yy)


@contextmanager
def on_all(oracle: Oracle, batch: GroupDraw) -> Iterator[Draw]:
    """Give all examples; what is computed on them counts as if it was computed on every group."""
    before = dataclasses.replace(oracle.counts)
    yield batch.whole()
    (upper, lower), counts = batch.groups, oracle.counts
    counts.upper += (upper - 1) * (counts.upper - before.upper)
    counts.lower += (lower - 1) * (counts.lower - before.lower)
    counts.hvp += (lower - 1) * (counts.hvp - before.hvp)


def zeros(like: Variable, name: str) -> Variable:
    """Return a variable with the shapes of another one, made of zeros."""
    return Variable([leaf.new_zeros(leaf.shape) for leaf in like.leaves], name)


def is_first(k: int) -> bool:
    """Whether a step is the first of a run."""
    return k == 0


# Batches


def grouped(method: str, batch: Any) -> GroupDraw:
    """Return the batch of a method that needs to know the groups of examples, or raise."""
    if not isinstance(batch, GroupDraw):
        got = "none" if batch is None else type(batch).__name__
        raise TypeError(
            f"batches: {method} needs batches of fixed groups of examples, got {got}; pass"
            " meha.loaders.Indices(size, upper=..., lower=..., groups=True), and objectives of batch.upper and batch.lower."
        )
    return batch


class StepBatches:
    """The batches of a step: the j-th of several draws, or one batch that serves for all.

    Args:
        needed: how many batches the step uses.
        made_of: where this number comes from.
    """

    def __init__(self, method: str, batch: Any, needed: int, made_of: str) -> None:
        if isinstance(batch, StepDraws) and len(batch.upper) != needed:
            raise ValueError(
                f"batches: {method} uses {needed} batches in a step ({made_of}), got draws={len(batch.upper)}; pass"
                f" meha.loaders.Indices(..., draws={needed}), or leave draws out to use one batch for all."
            )
        self._batch, self.last = batch, needed - 1

    def __call__(self, j: int) -> Any:
        """The batch number j."""
        return self._batch.row(j) if isinstance(self._batch, StepDraws) else self._batch

    def hessians(self, oracle: Oracle, x: Variable, y: Variable, *, counted: bool = False) -> Callable[[int], Hessian]:
        """Return the Hessian of f at (x, y) on the batch j as a function of j.

        Args:
            counted: count the gradient of the last one.
        """
        f: list[Term] = [(1.0, oracle.lower, x, y)]
        if not isinstance(self._batch, StepDraws):
            one = oracle.hessian(f, self._batch, counted=counted)  # one graph for all products
            return lambda j: one
        return lambda j: oracle.hessian(f, self(j), counted=counted and j == self.last)


def one_batch(method: str, batch: Any) -> Any:
    """Return the batch of a method that uses one in a step, or raise for several draws."""
    if isinstance(batch, StepDraws):
        raise ValueError(f"batches: {method} uses one batch in a step, got draws={len(batch.upper)}; leave draws out.")
    return batch


# Methods that follow the solution of the linear system


@dataclass
class SystemState(State):
    """x, y, v, which follows the solution of f_yy v = F_y, and the optimizer of x."""

    v: Variable
    x_optimizer: RunningOptimizer | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ImplicitSteps(SteppingMethod):
    """Base class of stochastic methods whose direction of x is that of the implicit function theorem.

    Args:
        alpha, beta, eta: step sizes of x, of y, and for the linear system f_yy v = F_y; numbers or functions of k. Those left
            out are chosen from the problem's constants and do not fall, so that noise leaves an error of their order.
        x_optimizer: a factory such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; it takes the step of
            x, instead of alpha.

    The numbers of a step: ``upper`` F on the batch before the step, ``d_x`` the norm of the direction of x.
    """

    refuses_nonsmooth: ClassVar[str] = "it differentiates the lower level twice"
    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"
    refuses_shards: ClassVar[str] = "it takes second derivatives, which a pass through sharded modules does not have"
    refuses_scaler: ClassVar[str] = "it takes second derivatives, whose passes are not scaled"
    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eta")

    alpha: Schedule | None = None
    beta: Schedule | None = None
    eta: Schedule | None = None
    x_optimizer: OptimizerFactory | None = None

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        return {**steps, "alpha": CAUTION * steps["alpha"]}


@dataclass(frozen=True, kw_only=True)
class SystemMethod(ImplicitSteps):
    """Base class of methods that move x, y and v at once, along estimates of F_x - f_xy [v], f_y and f_yy [v] - F_y.

    Args:
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.
    """

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SystemState:
        return SystemState(x, y, v=zeros(y, "v"), **self.optimizers(oracle, x=x))

    def step(self, oracle: Oracle, state: Any, at: At) -> Numbers:
        upper, (d_x, d_y, d_v) = self.directions(oracle, state, at)
        add_(state.y.leaves, d_y, -at.beta)
        add_(state.v.leaves, d_v, -at.eta)
        return {"upper": upper, "d_x": self.move_x(oracle, state, at, d_x)}

    @abstractmethod
    def directions(self, oracle: Oracle, state: Any, at: At) -> tuple[Tensor, Triple]:
        """Return F, and the directions of x, y and v, before anything moves."""


# Recursions: an estimate at the last point is carried to the present one by differences on the present batch


@dataclass
class CarriedState(SystemState):
    """Besides x, y and v: the point before the last step, and the estimate of the direction of x there."""

    last_x: Variable
    last_y: Variable
    last_v: Variable
    d_x: Variable

    def keep(self) -> None:
        """Make the present point the last one, before it moves."""
        for last, now in ((self.last_x, self.x), (self.last_y, self.y), (self.last_v, self.v)):
            copy_(last.leaves, now.leaves)


@dataclass
class RecursiveState(CarriedState):
    """Besides: the estimates of the directions of y and v there."""

    d_y: Variable
    d_v: Variable


def used_up(estimate: Variable) -> Leaves:
    """Return a copy of an estimate as a direction for :func:`~meha.methods.frames.move`, which uses it up."""
    return [leaf.detach().clone() for leaf in estimate.leaves]


def carry(estimates: tuple[Variable, ...], new: tuple[Leaves, ...], old: tuple[Leaves, ...] | None, share: Any = 0.0) -> None:
    """Set estimate <- new + (1 - share) (estimate - old) for each estimate; the new one alone where there is no old one."""
    for i, (estimate, here) in enumerate(zip(estimates, new, strict=True)):
        if old is not None:
            apart = subtract(estimate.leaves, old[i])
            here = [a + (1 - share) * b for a, b in zip(here, apart, strict=True)]
        copy_(estimate.leaves, here)


@dataclass(frozen=True, kw_only=True)
class RestartedMethod(SystemMethod):
    """Base class of methods with recursive estimates that begin afresh on all examples in some steps.

    Args:
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.
    """

    refuses_group: ClassVar[str] = "it restarts on all examples, and each process knows only its own"
    repeats: ClassVar[str] = "it takes differences of derivatives on one batch"

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> RecursiveState:
        d_x, d_y, d_v = zeros(x, "d_x"), zeros(y, "d_y"), zeros(y, "d_v")
        v, last_v, optimizers = zeros(y, "v"), zeros(y, "v"), self.optimizers(oracle, x=x)
        return RecursiveState(x, y, v, x.copy(), y.copy(), last_v, d_x, d_y, d_v, **optimizers)

    @abstractmethod
    def restarts(self, groups: int) -> Callable[[int], bool]:
        """Return whether step k takes all examples, as a function of k, for data of this many groups."""

    def directions(self, oracle: Oracle, state: RecursiveState, at: At) -> tuple[Tensor, Triple]:
        batch = grouped(self.name, at.batch)
        estimates = state.d_x, state.d_y, state.d_v
        if at.rare(self.restarts(max(batch.groups))):
            with on_all(oracle, batch) as examples:
                found = derivatives(oracle, state.x, state.y, state.v.leaves, examples)
            carry(estimates, found.directions, None)
        else:
            found = derivatives(oracle, state.x, state.y, state.v.leaves, batch)
            before = derivatives(oracle, state.last_x, state.last_y, state.last_v.leaves, batch)
            carry(estimates, found.directions, before.directions)
        state.keep()
        return found.upper, (used_up(state.d_x), state.d_y.leaves, state.d_v.leaves)


def check_share(name: str, share: Schedule) -> None:
    """Raise unless a share is a number from above 0 to 1, or a function of k."""
    check_schedule(name, share)
    if not callable(share) and share > 1:
        raise ValueError(f"{name}: must be a number from above 0 to 1, or a function of k, got {share}.")


# Methods that sum a Neumann series instead of following v


def series_direction(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    step: Any,
    batches: StepBatches,
    first: int,
    drawn: Any = None,
    *,
    counted: bool = False,
) -> tuple[Tensor, Leaves, Leaves]:
    """Return F, F_x - f_xy [v] and f_y at (x, y), with v a Neumann series for f_yy^-1 F_y with factors I - step f_yy.

    Batch ``first`` and those after it make the factors, and the last one is for all else. v is the sum of the step times the
    products of 0, 1, 2, ... factors or, with ``drawn``, the product of that many factors, scaled so that the mean over 0 to
    the number of factors is the sum.

    Args:
        drawn: a whole number, or a tensor where the step is traced.
        counted: count the gradient of f, for a step that uses it.
    """
    factors = batches.last - first
    (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batches(batches.last))
    hessian = batches.hessians(oracle, x, y, counted=counted)
    part, total = F_y, [leaf.clone() for leaf in F_y]
    for j in range(factors):
        (image,) = hessian(first + j)(part, y)
        # Factors beyond the drawn number are 1: their products are taken all the same, so that all steps are alike.
        scale = step if drawn is None else step * (drawn > j)
        part = [a - scale * b for a, b in zip(part, image, strict=True)]
        if drawn is None:
            add_(total, part, 1.0)
    v = [step * leaf for leaf in total] if drawn is None else [(factors + 1) * step * leaf for leaf in part]
    last = hessian(batches.last)
    (cross,) = last(v, x)
    return upper, subtract(F_x, cross), last.gradient


@dataclass(frozen=True)
class UniformDraw:
    """A whole number from 0 to ``most`` for every step number, the same for the same seed; SplitMix64 (Steele et al. 2014).

    >>> draw = UniformDraw(seed=0, most=3)
    >>> [draw(k) for k in range(8)]
    [3, 1, 0, 3, 0, 1, 0, 3]
    """

    seed: int
    most: int

    def __call__(self, k: int) -> int:
        return int(uniform(self.seed, k) * (self.most + 1))


def uniform(seed: int, k: int) -> float:
    """A number from 0 to less than 1 that looks random as a function of k: checkpoints need no generator."""
    z = _mixed(_mixed(seed) + (k + 1) * 0x9E3779B97F4A7C15)
    return (z >> 11) / 2**53


def _mixed(z: int) -> int:
    z &= 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)
