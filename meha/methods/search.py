"""Grid search, random search and TPE: methods that solve the lower level at many x, and keep the best."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meha.lower.proximal_gradient import ProximalSolution, solve_lower
from meha.method.method import At, Method, Numbers, State
from meha.method.status import Status, Verdict
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.tensors.checks import check_count, check_tolerance
from meha.tensors.torch_private import BREAKDOWNS
from meha.tensors.variables import Variable, copy_, select

LIMIT = 100_000
"""Largest number of points of a grid: each costs a lower-level solve."""


@dataclass(frozen=True)
class Interval:
    """Values that a parameter may take, from ``low`` to ``high``, with uniform values or uniform logarithms."""

    log: ClassVar[bool] = False

    low: float
    high: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        ends: tuple[Any, Any] = (self.low, self.high)
        if not all(isinstance(end, Real) and math.isfinite(end) for end in ends):
            raise ValueError(f"{name}: low and high must be finite numbers, got {self.low!r} and {self.high!r}.")
        if not self.low < self.high:
            raise ValueError(f"{name}: low must be less than high, got {self.low!r} and {self.high!r}.")

    def at(self, share: Tensor) -> Tensor:
        """Return the values at these fractions of the interval, from low (0) to high (1)."""
        values = self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)
        return values.clamp(self.low, self.high)  # rounding of a power may leave the interval


@dataclass(frozen=True)
class Uniform(Interval):
    """Interval [low, high] with uniform values.

    >>> import torch
    >>> Uniform(1.0, 3.0).at(torch.tensor([0.0, 0.5, 1.0]))
    tensor([1., 2., 3.])
    """


@dataclass(frozen=True)
class LogUniform(Interval):
    """Interval [low, high], 0 < low, with uniform logarithms: all orders of magnitude count alike.

    >>> import torch
    >>> LogUniform(0.01, 1.0).at(torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0100, 0.1000, 1.0000])
    """

    log: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > 0:
            raise ValueError(f"LogUniform: low must be positive, got {self.low!r}; use Uniform for an interval with zero.")


Space = Interval | Mapping[str, Interval]


class _Block(NamedTuple):
    """The parameters that share an interval: a single named one, or the coordinates of a leaf of x."""

    name: str
    interval: Interval
    size: int = 1
    leaf: int = -1


@dataclass
class SearchState(State):
    """The best candidate so far with its lower solution (before the first success, the start), and all candidates tried.

    Attributes:
        start: the point from which the next lower solve starts.
        best: the smallest F so far; infinite before the first success.
        failed: number of candidates that failed.
        tried: the parameters of each candidate.
        values: F of each candidate; NaN where it failed.
    """

    start: Variable
    best: float = math.inf
    failed: int = 0
    tried: list[Tensor] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def check(self) -> None:
        super().check()
        lengths = {len(part) if isinstance(part, list) else -1 for part in (self.tried, self.values)}
        if lengths != {self.k}:  # TPE rebuilds its study from both lists
            raise ValueError(f"state: must hold {self.k} tried candidates and their values; it is damaged.")


@dataclass(frozen=True)
class _Builder:
    """The user's ``to_x``, shown by its name: checkpoints compare descriptions, and addresses of functions change."""

    function: Callable[[dict[str, float]], Any]

    def __call__(self, values: dict[str, float]) -> Any:
        return self.function(values)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))


@dataclass(frozen=True, kw_only=True)
class Search(Method):
    """Base class of searches: each step tries one candidate, and the best is kept.

        y(x) = argmin_{y in Y} (f + g)(x, y)  by FISTA;    (x, y) <- (x_new, y(x_new))  if F(x_new, y(x_new)) is smaller.

    Searches solve any problem: nothing is differentiated in x, and g and Y enter through the proximal map. A step costs the
    gradients of f that the lower level needs.

    Args:
        space: an interval for all coordinates of x; or a dict from names of leaves (or branches) of x to intervals for their
            coordinates, where leaves without a name stay fixed.
        to_x: a function that builds x from a dict with a number for each name of ``space``; the names are then free, and a
            few parameters stand for many coordinates.
        warm_start: whether a lower solve starts at the previous solution, or always at y0.
        inner_steps: upper bound on the FISTA steps per candidate.
        lower_tol: relative accuracy of the lower solve, as in :func:`meha.lower.proximal_gradient.solve_lower`.

    A candidate outside X is projected on X. The start x0 is not a candidate: x is x0 until a candidate succeeds. A candidate
    fails if F is not finite, if the lower level is not solved to ``lower_tol`` in ``inner_steps`` (then its F says nothing), or
    if an objective raises an arithmetic error; it is counted and never becomes the best. If all fail, the last step breaks
    down. Values of F on different batches are not comparable: use objectives that see all data.

    The numbers of a step: ``upper`` the best F so far (left out before the first success), ``trial`` F of this candidate,
    ``residual`` of its lower solve, ``failed`` the number of candidates that failed so far.
    """

    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    refuses_scaler: ClassVar[str] = "it compares differences that half precision rounds away"

    space: Space
    to_x: Callable[[dict[str, float]], Any] | None = None
    warm_start: bool = True
    inner_steps: int = 10_000
    lower_tol: float = 1e-8

    def __post_init__(self) -> None:
        intervals = list(self.space.values()) if isinstance(self.space, Mapping) else [self.space]
        if not intervals or not all(isinstance(interval, Interval) for interval in intervals):
            raise TypeError(
                f"space: expected an interval such as LogUniform(1e-3, 10.0), or a dict of them by name, got {self.space!r}."
            )
        if self.to_x is not None:
            if not callable(self.to_x):
                raise TypeError(f"to_x: expected a function from a dict of numbers to x, got {type(self.to_x).__name__}.")
            if not isinstance(self.space, Mapping):
                raise ValueError(f"to_x: needs a dict of named intervals as space, got {self.space!r}.")
            if not isinstance(self.to_x, _Builder):  # dataclasses.replace comes here a second time
                object.__setattr__(self, "to_x", _Builder(self.to_x))
        check_count("inner_steps", self.inner_steps)
        check_tolerance("lower_tol", self.lower_tol)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SearchState:
        self._blocks(x)  # names that do not fit x are refused now, not in the first step
        return SearchState(x, y, y.copy(), settled=False)  # a best x that stays is no sign of convergence

    def step(self, oracle: Oracle, state: SearchState, at: At) -> Numbers:
        values = self.propose(state, self._blocks(state.x))
        x = self._candidate(oracle, state.x, values)
        residual, upper, solved = math.inf, math.nan, False
        try:
            lower = self.solve_candidate(oracle, state, x, at.batch)
            residual, upper = lower.residual, float(oracle.upper(x, lower.theta, at.batch))
            solved = lower.converged and math.isfinite(upper)  # at an unsolved y, F may be smaller than any true value
        except BREAKDOWNS:
            pass  # a failed candidate, counted below
        if not solved and state.failed + 1 == self.total(state.x):
            raise ArithmeticError(f"all {self.total(state.x)} candidates failed: {self._failure()}")
        if solved and upper < state.best:
            state.best = upper
            state.x.load_state_dict(x.state_dict())
            state.y.load_state_dict(lower.theta.state_dict())  # with the statistics of batch norm, which belong to a solution
        if solved and self.warm_start:  # a failed solve may have ended far away
            state.start.load_state_dict(lower.theta.state_dict())
        state.failed += not solved
        state.tried = [*state.tried, values]
        state.values = [*state.values, upper if solved else math.nan]
        best = {"upper": state.best} if math.isfinite(state.best) else {}  # an infinite F would look like a failed run
        return {**best, "trial": upper, "residual": residual, "failed": float(state.failed)}

    def terminate(self, state: SearchState) -> Verdict | None:
        total = self.total(state.x)
        if state.k < total:
            return None
        failed = f", of which {state.failed} failed: {self._failure()}" if state.failed else ""
        return Verdict(Status.FINISHED, f"All {total} candidates were tried{failed}.")

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return "Allow more inner_steps or a larger lower_tol, or search elsewhere."

    def solve_candidate(self, oracle: Oracle, state: SearchState, x: Variable, batch: Any) -> ProximalSolution:
        """Solve the lower level at a candidate."""
        return solve_lower(oracle, x, state.start, tol=self.lower_tol, max_steps=self.inner_steps, batch=batch)

    @abstractmethod
    def total(self, x: Variable) -> int:
        """Number of candidates."""

    @abstractmethod
    def propose(self, state: SearchState, blocks: list[_Block]) -> Tensor:
        """Choose the parameters of candidate number ``state.k``."""

    def _failure(self) -> str:
        return (
            f"F was not finite, or the lower level not solved to lower_tol={self.lower_tol:g} in inner_steps={self.inner_steps}"
        )

    def _blocks(self, x: Variable) -> list[_Block]:
        """List the parameters, in the order of the entries of a candidate."""
        if not isinstance(self.space, Mapping):
            return [_Block(name, self.space, x.leaves[i].numel(), i) for i, name in enumerate(x.names)]
        if self.to_x is not None:
            return [_Block(name, interval) for name, interval in self.space.items()]
        blocks: dict[int, _Block] = {}
        for name, interval in self.space.items():
            try:
                chosen = select(name, x.names, "space")
            except ValueError as error:
                raise ValueError(f"{error} For other names pass to_x, a function that builds x from them.") from None
            for i in chosen:
                if i in blocks:
                    raise ValueError(f"space: two intervals for {x.label(x.names[i])}, one of them from {name!r}; give one.")
                blocks[i] = _Block(x.names[i], interval, x.leaves[i].numel(), i)
        return list(blocks.values())  # in the order of the space, which the entries of a candidate follow

    def _candidate(self, oracle: Oracle, like: Variable, values: Tensor) -> Variable:
        """Build x from these parameters, projected on X."""
        x, blocks = like.copy(), self._blocks(like)
        if self.to_x is not None:
            numbers = dict(zip((block.name for block in blocks), values.tolist(), strict=True))
            built = Variable.of(self.to_x(numbers), "to_x")
            shapes, own = ({n: tuple(v.shape) for n, v in zip(var.names, var.leaves, strict=True)} for var in (built, x))
            if shapes != own:
                raise ValueError(f"to_x: returned leaves of shapes {shapes}, but x has {own}; return a value like x0.")
            copy_(x.leaves, built.leaves)
        else:
            for block, piece in zip(blocks, values.split([block.size for block in blocks]), strict=True):
                x.leaves[block.leaf].copy_(piece.reshape(x.leaves[block.leaf].shape))
        oracle.project(x.value, x.leaves, 1.0)  # the intervals know nothing of X
        return x


@dataclass(frozen=True, kw_only=True)
class GridSearch(Search):
    """Search of a grid: all combinations of ``points`` values for each parameter, the last one changing fastest.

    The values go from low to high in equal steps, of the logarithm for :class:`LogUniform`.

    Args:
        points: number of values for each parameter; with 1, the middle of the interval.
        space, to_x, warm_start, inner_steps, lower_tol: see :class:`Search`.

    A grid of more than 100,000 points is refused.

    >>> import meha
    >>> problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    >>> shared = GridSearch(space={"weight": LogUniform(0.01, 1.0)}, to_x=lambda p: p["weight"] * torch.ones(6), points=5)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, shared)
    >>> solution.x, solution.message
    (tensor([0.3162, 0.3162, 0.3162, 0.3162, 0.3162, 0.3162], dtype=torch.float64), 'All 5 candidates were tried.')
    """

    points: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("points", self.points)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SearchState:
        dimension = _size(self._blocks(x))
        if dimension * math.log(self.points) > math.log(LIMIT) + 1e-9:  # the power itself may have thousands of digits
            raise ValueError(
                f"points: a grid of {self.points} values for each of {dimension} parameters has more than {LIMIT} points; take"
                " fewer, let to_x build x from a few parameters, or use RandomSearch or TPE."
            )
        return super().init(oracle, x, y)

    def total(self, x: Variable) -> int:
        return int(self.points ** _size(self._blocks(x)))

    def propose(self, state: SearchState, blocks: list[_Block]) -> Tensor:
        number, digits = state.k, [0] * _size(blocks)  # of k to the base ``points``: the grid is never stored
        for i in reversed(range(len(digits))):
            number, digits[i] = divmod(number, self.points)
        shares = [digit / (self.points - 1) if self.points > 1 else 0.5 for digit in digits]
        return _values(blocks, torch.tensor(shares, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class DrawnSearch(Search):
    """Base class of searches that draw their candidates."""

    trials: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("trials", self.trials)
        check_count("seed", self.seed, least=0)

    def total(self, x: Variable) -> int:
        return self.trials


@dataclass(frozen=True, kw_only=True)
class RandomSearch(DrawnSearch):
    """Random search (Bergstra & Bengio 2012): parameters are drawn independently from their intervals.

    Args:
        trials: number of candidates.
        seed: seed of the draws; candidate k depends on (seed, k) only.
        space, to_x, warm_start, inner_steps, lower_tol: see :class:`Search`.

    >>> import meha
    >>> problem = meha.problems.lasso(n=2)
    >>> method = RandomSearch(space=meha.Uniform(0.0, 1.0), trials=30)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, method)
    >>> print(f"{solution.upper:.2f}, {problem.upper_star}")
    -0.39, -0.5
    """

    def propose(self, state: SearchState, blocks: list[_Block]) -> Tensor:
        # A generator for each candidate needs no state: a resumed run draws the same ones.
        shares = np.random.default_rng([self.seed, state.k]).random(_size(blocks))
        return _values(blocks, torch.from_numpy(shares))


@dataclass(frozen=True, kw_only=True)
class TPE(DrawnSearch):
    """Tree-structured Parzen estimator (Bergstra et al. 2011), by Optuna (``pip install "meha[search]"``).

    The first ten candidates are drawn at random. Then each parameter is chosen separately: among draws from a density l of the
    good candidates, the one with the largest l / (density of the others). Each step passes over all earlier candidates for each
    parameter: with 100 of them and 30 parameters, this takes about 0.2 seconds in addition to the lower solve.

    Args:
        trials: number of candidates.
        seed: seed of the draws; candidate k depends on (seed, k) and the earlier candidates only.
        space, to_x, warm_start, inner_steps, lower_tol: see :class:`Search`.

    >>> import meha
    >>> problem = meha.problems.lasso(n=2)
    >>> method = TPE(space=meha.Uniform(0.0, 1.0), trials=30)
    >>> solution = meha.solve(problem, problem.x0, problem.y0, method)
    >>> solution.upper < -0.45, problem.upper_star
    (True, -0.5)
    """

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SearchState:
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ImportError('TPE needs optuna; install it with: pip install "meha[search]"') from error
        return super().init(oracle, x, y)

    def propose(self, state: SearchState, blocks: list[_Block]) -> Tensor:
        import optuna
        from optuna.distributions import BaseDistribution, FloatDistribution
        from optuna.trial import TrialState, create_trial

        space: dict[str, BaseDistribution] = {}
        for block in blocks:
            for i in range(block.size):
                low, high = float(block.interval.low), float(block.interval.high)
                space[f"{block.name}[{i}]"] = FloatDistribution(low, high, log=block.interval.log)
        entropy = np.random.SeedSequence([self.seed, state.k]).generate_state(1)  # optuna takes a single number as seed
        sampler = optuna.samplers.TPESampler(seed=int(entropy[0]), multivariate=False)
        level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(max(level, optuna.logging.WARNING))  # silences the message of a new study
        try:
            study = optuna.create_study(sampler=sampler)
        finally:
            optuna.logging.set_verbosity(level)
        for tried, value in zip(state.tried, state.values, strict=True):  # the state is all that a checkpoint keeps
            params = dict(zip(space, tried.tolist(), strict=True))
            outcome: dict[str, Any] = {"state": TrialState.FAIL} if math.isnan(value) else {"value": value}
            study.add_trial(create_trial(**outcome, params=params, distributions=space))
        chosen = study.ask(space).params
        return torch.tensor([chosen[name] for name in space], dtype=torch.float64)


def _size(blocks: list[_Block]) -> int:
    return sum(block.size for block in blocks)


def _values(blocks: list[_Block], shares: Tensor) -> Tensor:
    """Return the parameters at these fractions of their intervals."""
    pieces = shares.split([block.size for block in blocks])
    return torch.cat([block.interval.at(piece) for block, piece in zip(blocks, pieces, strict=True)])
