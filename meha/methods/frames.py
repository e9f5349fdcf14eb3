"""The base classes of hypergradient methods and penalty methods, and the steps and inner loops that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from meha.analysis.theory import Constants
from meha.method.method import At, Method, Numbers, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer, build_optimizer
from meha.methods.parameters import OPTIMIZERS, complete, hypergradient_steps, penalty_steps
from meha.problem.oracle import Hessian, Oracle, Term, refusing_lack
from meha.problem.problem import Prox
from meha.problem.schedules import Schedule, check_schedule
from meha.tensors.checks import check_count
from meha.tensors.variables import Leaves, Variable, add_, copy_, distance, norm


def check_step(name: str, step: Schedule | None, optimizer: str = "", factory: OptimizerFactory | None = None) -> None:
    """Raise if a step size and an optimizer are both given, or one of them has a wrong type or value."""
    if step is not None:
        check_schedule(name, step)
        if factory is not None:
            raise ValueError(f"{name} and {optimizer}: give one of them; with an optimizer the step is its lr.")
    if factory is not None and not callable(factory) and not isinstance(factory, torch.optim.Optimizer):
        raise TypeError(
            f"{optimizer}: expected a factory such as partial(torch.optim.Adam, lr=1e-3), or an optimizer that is built, got"
            f" {type(factory).__name__}."
        )


def move(
    variable: Variable, direction: Leaves, step: Any, prox: Prox, x: Any, optimizer: RunningOptimizer | None = None
) -> tuple[Tensor, Tensor]:
    """Set variable <- prox(variable - step * direction); return the norms of the direction, and of the move over the step.

    The second norm is the first where there is no prox, and also with an optimizer: it shows how far the variable is from a
    fixed point, which the length of a step of Adam does not.

    Args:
        direction: used up; with a prox, its list is filled with other tensors.
        step: the step size, a number, or a tensor where the step is traced; an optimizer has its learning rate instead.
        x: the value of x, for the prox.
    """
    leaves, size = variable.leaves, norm(direction)
    if optimizer is not None:
        step = 0.0 if prox.identity else optimizer.lr  # a schedule may also end at 0, where nothing moves
        old = [leaf.clone() for leaf in leaves] if step else []
        optimizer.step(leaves, direction, size)
        if not step:
            return size, size
        prox(x, leaves, step)
        return size, distance(old, leaves) / step
    if prox.identity:
        add_(leaves, direction, -step)
        return size, size
    for i, leaf in enumerate(leaves):  # new tensors, as the old leaf is needed below
        direction[i] = _ahead(leaf, direction[i], step)
    prox(x, direction, step)
    moved = distance(leaves, direction) / step  # the prox-gradient mapping: zero exactly at fixed points
    copy_(leaves, direction)
    return size, moved


def _ahead(leaf: Tensor, direction: Tensor, step: Any) -> Tensor:
    """Return leaf - step * direction; torch.add takes no tensor for alpha."""
    return leaf - step * direction if isinstance(step, Tensor) else torch.add(leaf, direction, alpha=-step)


Objective = Callable[[int, Variable], list[Term]]
"""A function of t and y: the weighted sum of functions at (x, y) that inner step t decreases."""


def lower_objective(oracle: Oracle, x: Variable) -> Objective:
    """Return f as the objective of every inner step."""
    return lambda t, y: [(1.0, oracle.lower, x, y)]


def descend(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    steps: int,
    step: float,
    batch: Any,
    objective: Objective | None = None,
    trace: list[Leaves] | None = None,
    ridge: float = 0.0,
) -> None:
    """Set y <- proj_Y(y - step * grad_y objective(t, y)) for t = 0, ..., steps - 1; f is the objective by default.

    Args:
        trace: takes copies of y_0, ..., y_{steps - 1}.
        ridge: adds ridge/2 ||y||^2 to the objective.
    """
    objective = objective or lower_objective(oracle, x)
    for t in range(steps):
        if trace is not None:
            trace.append([leaf.detach().clone() for leaf in y.leaves])
        _, direction = oracle.gradient(y, objective(t, y), batch)
        if ridge:  # added here, because an objective is a sum of F and f only; both gradients are at the same y
            add_(y.leaves, y.leaves, -step * ridge)
        add_(y.leaves, direction, -step)
        oracle.prox(x.value, y.leaves, step)


GRAPH = "leave keep_graph out, and products with second derivatives are differences of gradients"
"""The remedy where the steps cannot be differentiated."""


class Trajectory:
    """The iterates y_0, ..., y_T of the steps of :func:`descend`, through which gradients of F are pulled back.

    Iterates are kept and derivatives recomputed, but for those of the last step: its graph stays from the step to the sweep
    back. So memory is that of the iterates, and of the graphs of one step and of F; objectives must give the same value when
    they are called again, which the last is not. y itself waits at y_{T-1}, where that graph was recorded, and is y_T after
    :meth:`pull_back`.

    Args:
        keep_graph: keep the graphs of the steps instead; one backward pass takes less time, with the memory of all graphs.
        first: leave the graphs of this many steps out, and their iterates; the steps after them are counted from 0.
    """

    def __init__(
        self,
        oracle: Oracle,
        x: Variable,
        y: Variable,
        steps: int,
        step: float,
        batch: Any,
        objective: Objective | None = None,
        *,
        keep_graph: bool = False,
        first: int = 0,
    ) -> None:
        self.oracle, self.x, self.y, self.step, self.batch = oracle, x, y, step, batch
        self.objective = objective or lower_objective(oracle, x)
        self.graph: list[Variable] = []
        self.iterates: list[Leaves] = []
        self._last: Hessian | None = None
        if not keep_graph:
            descend(oracle, x, y, steps - 1, step, batch, objective, self.iterates)
            self._last = oracle.hessian(self.objective(steps - 1, y), batch, counted=True)
            ahead = [_ahead(leaf, d, step) for leaf, d in zip(y.leaves, self._last.gradient, strict=True)]
            oracle.prox(x.value, ahead, step)
            self.iterates += [y.leaves, ahead]  # no copy of y, which stays there
            return
        descend(oracle, x, y, first, step, batch, objective)
        if y.has_modules or not oracle.prox.identity:
            reason = "holds a module" if y.has_modules else "has a set Y"
            raise ValueError(
                f"keep_graph: y {reason}, and steps are kept as graphs for free tensors only; leave keep_graph out."
            )
        # The first iterate is a leaf of the graph, so that the gradient in y_0 is available.
        self.graph = [Variable.of(y.like([leaf.detach().clone().requires_grad_() for leaf in y.leaves]), y.argument)]
        for t in range(first, steps):
            last = self.graph[-1]
            with refusing_lack("keep_graph", GRAPH):
                direction = oracle.traced(last, self.objective(t, last), batch)
            with torch.enable_grad():
                leaves = [leaf - step * d for leaf, d in zip(last.leaves, direction, strict=True)]
                self.graph.append(Variable.of(last.like(leaves), y.argument))
        self.iterates = [iterate.leaves for iterate in self.graph]
        copy_(y.leaves, self.iterates[-1])  # without its graph, which would otherwise grow from step to step

    def pull_back(self, t: int = -1, terms: int | None = None, *, to_start: bool = True) -> tuple[Tensor, Leaves, Leaves]:
        """Return F at (x, y_t), by default the last, and the gradients of F(x, y_t(x, y_0)) in x and in y_0; y becomes y_T.

        With h = F_x and q = F_y at (x, y_t), for the ``terms`` steps before it (all by default), from the last to the first,
        and J the Jacobian of the projection on Y,

            q <- J' q;   h <- h - step * objective_xy [q];   q <- q - step * objective_yy [q].

        One Hessian-vector product a step.

        Args:
            to_start: False leaves the last update of q out, and returns an empty list instead of the gradient in y_0.
        """
        oracle, x, y, step, last = self.oracle, self.x, self.y, self.step, self._last
        steps = t % len(self.iterates)
        if self.graph:
            with refusing_lack("keep_graph", GRAPH):
                upper, (h, q) = oracle.pull_back(oracle.upper, x, self.graph[: steps + 1], self.batch)
            return upper, h, q
        self._last = None  # only the local name holds the graph now
        with y.at(self.iterates[steps]) as there:
            (upper,), (h, q) = oracle.gradients((x, there), [(1.0, oracle.upper, x, there)], self.batch)
        begin = 0 if terms is None else steps - terms
        for i in reversed(range(begin, steps)):
            if last is None or i < len(self.iterates) - 2:
                last = None  # before the next one is built, so that only one graph is in memory
                copy_(y.leaves, self.iterates[i])
                last = oracle.hessian(self.objective(i, y), self.batch)
            if not oracle.prox.identity:  # first, because the projection is the last part of a step
                # J is taken at the point before the projection, which is not stored: its gradient comes with the Hessian.
                ahead = [_ahead(leaf, d, step) for leaf, d in zip(self.iterates[i], last.gradient, strict=True)]
                q = oracle.prox.pull_back(x.value, ahead, step, q)
            wrt = (x, y) if to_start or i > begin else (x,)
            d_x, *d_y = last(q, *wrt)
            h = [_ahead(a, b, step) for a, b in zip(h, d_x, strict=True)]
            q = [_ahead(a, b, step) for a, b in zip(q, *d_y, strict=True)] if d_y else []
        copy_(y.leaves, self.iterates[-1])
        return upper, h, q


@dataclass(frozen=True, kw_only=True)
class SteppingMethod(Method):
    """Base class of methods with steps alpha of x, beta of y and eta of a third variable, or optimizers in their place.

    The steps that are ``chosen`` for a problem where they are left out come from :meth:`choose`.
    """

    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta")

    def __post_init__(self) -> None:
        for name, optimizer in OPTIMIZERS.items():
            check_step(name, getattr(self, name, None), optimizer, getattr(self, optimizer, None))

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        return complete(self, self.chosen, self.choose, oracle, x, y, batch)

    def choose(self, constants: Constants) -> dict[str, float]:
        """Return the step sizes for a problem with these constants."""
        return hypergradient_steps(constants)

    def optimizers(self, oracle: Oracle, **levels: Variable) -> dict[str, Any]:
        """Return the optimizers of these variables by their names in the state."""
        built: dict[str, Any] = {}
        for name, variable in ((f"{level}_optimizer", variable) for level, variable in levels.items()):
            # theta is a copy of y, and may have the optimizer of y, which is there before.
            leader = built.get("y_optimizer") if name == "theta_optimizer" else None
            built[name] = build_optimizer(name, getattr(self, name), variable, oracle.problem, leader)
        return built

    def move_x(self, oracle: Oracle, state: Any, at: At, direction: Leaves) -> Tensor:
        """Set x <- proj_X(x - alpha * direction), and return the norm of the direction."""
        return move(state.x, direction, at.alpha, oracle.project, state.x.value, state.x_optimizer)[0]

    def move_y(self, oracle: Oracle, state: Any, at: At, direction: Leaves) -> None:
        """Set y <- proj_Y(y - beta * direction)."""
        if oracle.prox.identity and state.y_optimizer is None:  # without the norm of the direction, which nobody asks for
            add_(state.y.leaves, direction, -at.beta)
            return
        move(state.y, direction, at.beta, oracle.prox, state.x.value, state.y_optimizer)


@dataclass
class HypergradientState(State):
    """x, y and the optimizer of x."""

    x_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class HypergradientMethod(SteppingMethod):
    """Base class of methods that take lower steps on y, estimate the hypergradient h, and set x <- proj_X(x - alpha h).

    Args:
        alpha, beta: step sizes of x and of y, numbers or functions of k; those left out are chosen from the problem's
            constants.
        inner_steps: T, the steps on y.
        warm_start: whether they continue where the last ones ended, or restart at y0 every time.
        x_optimizer: a factory such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; it takes the step of
            x, instead of alpha.

    The numbers of a step: ``upper`` F(x, y_T) before x moves, ``d_x`` the norm of h.
    """

    refuses_nonsmooth: ClassVar[str] = "it differentiates the lower level twice"
    refuses_shards: ClassVar[str] = "it takes second derivatives, which a pass through sharded modules does not have"
    refuses_scaler: ClassVar[str] = "it takes second derivatives, whose passes are not scaled"
    repeats: ClassVar[str] = "it computes derivatives again at points where it has been"
    alpha: Schedule | None = None
    beta: Schedule | None = None
    inner_steps: int = 10
    warm_start: bool = True
    x_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> HypergradientState:
        start = None if self.warm_start else y.copy()  # y0, before y moves
        return HypergradientState(x, y, **self.optimizers(oracle, x=x), start=start)

    def step(self, oracle: Oracle, state: HypergradientState, at: At) -> Numbers:
        state.restart(state.y)
        numbers, h = self.hypergradient(oracle, state, at)
        # y waits for the next step: the answer is y_T at the x before this move.
        return {**numbers, "d_x": self.move_x(oracle, state, at, h)}

    @abstractmethod
    def hypergradient(self, oracle: Oracle, state: Any, at: At) -> tuple[dict[str, Any], Leaves]:
        """Take the steps on y in place; return numbers for the history, and the direction for x."""


@dataclass
class PenaltyState(State):
    """x, y, the auxiliary z that follows argmin f(x, .), and optimizers."""

    z: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class PenaltyMethod(SteppingMethod):
    """First-order methods for min F(x, y) subject to f(x, y) <= min_z f(x, z).

    Args:
        alpha, beta, eta: step sizes of x, y and z, numbers or functions of k; those left out are chosen from the problem's
            constants.
        inner_steps: T, the steps on z.
        x_optimizer, y_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)`` or :class:`~meha.Optimizer`; they
            take the steps of x and y, instead of alpha and beta.

    The numbers of a step, at the point (x, y) where x begins to move: ``upper`` F, ``lower`` f, ``gap`` f(x, y) - f(x, z),
    ``d_x`` the norm of the x-direction, ``c`` the weight of the gap.
    """

    refuses_nonsmooth: ClassVar[str] = "it takes plain gradient steps on the lower level"
    chosen: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eta")

    alpha: Schedule | None = None
    beta: Schedule | None = None
    eta: Schedule | None = None
    inner_steps: int = 10
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        for name in self.penalties:
            check_schedule(name, getattr(self, name))

    def choose(self, constants: Constants) -> dict[str, float]:
        return penalty_steps(constants)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> PenaltyState:
        return PenaltyState(x, y, z=y.copy(), **self.optimizers(oracle, x=x, y=y))  # the gap is zero at the start

    def follow(self, oracle: Oracle, state: PenaltyState, at: At, steps: int | None = None) -> None:
        """Move z by ``steps`` steps on the lower level, T by default."""
        descend(oracle, state.x, state.z, steps or self.inner_steps, at.eta, at.batch)


def at_most_one(c: Any) -> Any:
    """Return the factor that scales the weights 1 of F and c of f so that the larger one is 1: steps then fit any c."""
    return 1 / (c.clamp(min=1.0) if isinstance(c, Tensor) else max(1.0, c))  # a tensor where the step is traced


def gap_terms(oracle: Oracle, state: PenaltyState, upper: float, gap: float) -> list[Term]:
    """Return the terms of upper * F(x, y) + gap * (f(x, y) - f(x, z))."""
    x, y, z = state.x, state.y, state.z
    return [(upper, oracle.upper, x, y), (gap, oracle.lower, x, y), (-gap, oracle.lower, x, z)]
