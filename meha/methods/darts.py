"""DARTS: alternating steps on the two levels; order 2 differentiates through one lower step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from meha.method.method import At, Numbers, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer
from meha.methods.frames import SteppingMethod
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.checks import check_positive
from meha.tensors.variables import Leaves, Variable, add_, copy_, norm, scaled


@dataclass
class DARTSState(State):
    """x, y, a scratch copy of y, and optimizers."""

    ahead: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class DARTS(SteppingMethod):
    """The alternation of differentiable architecture search (Liu, Simonyan and Yang 2019), of first or second order.

        order 1:  h = F_x(x, y)
        order 2:  y' = y - beta f_y(x, y);   h = F_x(x, y') - (f_x(x, y + e d) - f_x(x, y - e d)) / (2 e),
                  d = beta F_y(x, y'), e = epsilon / ||d||, a difference quotient for f_xy [d]
        x <- proj_X( x - alpha h );    y <- y - beta f_y(x, y)  at the new x

    With an optimizer for y, the step ahead uses its learning rate and, if it is SGD, its momentum and weight decay; it is an
    approximation for other optimizers, and where ``clip`` shortens the step. The number ``upper`` of order 2 is F(x, y'). A
    step costs 1 gradient of F and 1 of f (order 1), or 1 of F and 4 of f (order 2, where f must give the same value twice: no
    dropout).

    Args:
        order: 1 or 2.
        epsilon: see above.
        alpha, beta: step sizes of x and y; chosen from the problem's constants when left out.
        x_optimizer, y_optimizer: take the steps of x and y instead.

    Order 1 ignores how y depends on x and does not solve bilevel problems; it is refused where F does not use x itself. Order 2
    is RHG with one inner step, and biased like it: on :func:`meha.problems.strong_convex` with steps beta < 1 it ends away
    from the solution.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = DARTS(alpha=0.1, beta=0.9).start(problem, problem.x0, problem.y0)
    >>> for _ in range(200):
    ...     info = run.step()
    >>> run.x, run.counts
    (tensor([0.5263, 0.5263], dtype=torch.float64), Counts(upper=200, lower=800, hvp=0))
    """

    refuses_nonsmooth: ClassVar[str] = "it takes plain gradient steps on the lower level"
    refuses_y_set: ClassVar[str] = "its step ahead knows no constraint"

    alpha: Schedule | None = None
    beta: Schedule | None = None
    order: Literal[1, 2] = 2
    epsilon: float = 0.01
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("epsilon", self.epsilon)
        if not isinstance(self.order, int) or self.order not in (1, 2):  # 1.0 == 1, but is a mistake
            raise ValueError(f"order: must be 1 or 2, got {self.order!r}.")

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> DARTSState:
        state = DARTSState(x, y, ahead=y.copy(), **self.optimizers(oracle, x=x, y=y))
        used = None if state.y_optimizer is None or self.order == 1 else state.y_optimizer.optimizer
        groups = used.param_groups if isinstance(used, torch.optim.SGD) else []
        if any(group["nesterov"] or group["dampening"] for group in groups):  # _ahead does not model them
            raise ValueError("y_optimizer: the step ahead of DARTS knows no nesterov and no dampening; leave them out.")
        return state

    def step(self, oracle: Oracle, state: DARTSState, at: At) -> Numbers:
        x, y = state.x, state.y
        upper, h = self._first(oracle, state, at) if self.order == 1 else self._second(oracle, state, at)
        size = self.move_x(oracle, state, at, h)
        (lower,), f_y = oracle.gradient(y, [(1.0, oracle.lower, x, y)], at.batch)  # again, because x has moved
        self.move_y(oracle, state, at, f_y)
        return {"upper": upper, "lower": lower, "d_x": size}

    def _first(self, oracle: Oracle, state: DARTSState, at: At) -> tuple[torch.Tensor, Leaves]:
        """Return F and h of order 1."""
        (upper,), h = oracle.gradient(state.x, [(1.0, oracle.upper, state.x, state.y)], at.batch)
        if not oracle.upper_uses_x:  # known since the gradient above
            raise ValueError("order: DARTS of order 1 moves x along F_x, and upper does not depend on x; use order=2.")
        return upper, h

    def _second(self, oracle: Oracle, state: DARTSState, at: At) -> tuple[torch.Tensor, Leaves]:
        """Return F at the step ahead, and h of order 2."""
        x, y, ahead, batch = state.x, state.y, state.ahead, at.batch
        _, f_y = oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)
        ahead_by, rates = self._ahead(state, f_y)
        copy_(ahead.leaves, y.leaves)
        add_(ahead.leaves, ahead_by, -1.0 if rates else -at.beta)
        (upper,), (h, d) = oracle.gradients((x, ahead), [(1.0, oracle.upper, x, ahead)], batch)
        d, rate = ([rate * part for rate, part in zip(rates, d, strict=True)], 1.0) if rates else (d, at.beta)
        size = norm(d)
        e = self.epsilon / size.clamp(min=torch.finfo(size.dtype).tiny)  # where d = 0, both slopes below are the same
        d = scaled(d, e)
        copy_(ahead.leaves, y.leaves)
        slopes = []
        for by in (1.0, -2.0):  # to y + e d, from there to y - e d: central differences, of second order in e
            add_(ahead.leaves, d, by)
            slopes.append(oracle.gradient(x, [(1.0, oracle.lower, x, ahead)], batch)[1])
        return upper, [torch.addcdiv(a, up - down, 2 * e / rate, value=-1) for a, up, down in zip(h, *slopes, strict=True)]

    def _ahead(self, state: DARTSState, f_y: Leaves) -> tuple[Leaves, list[Any]]:
        """Return the step that the optimizer of y would take now and the learning rate of each leaf; f_y and [] without one."""
        if state.y_optimizer is None:
            return f_y, []
        optimizer = state.y_optimizer.optimizer
        slopes = {id(leaf): part for leaf, part in zip(state.y.leaves, f_y, strict=True)}
        found: dict[int, tuple[torch.Tensor, Any]] = {}
        for group in optimizer.param_groups:
            sgd, rate = isinstance(optimizer, torch.optim.SGD), group["lr"]
            for leaf in group["params"]:
                # As in torch.optim.SGD: weight decay is part of the gradient, and momentum * buffer is added to it.
                part = slopes[id(leaf)] + group["weight_decay"] * leaf if sgd else slopes[id(leaf)]
                buffer = optimizer.state.get(leaf, {}).get("momentum_buffer") if sgd else None
                found[id(leaf)] = rate * (part if buffer is None else part + group["momentum"] * buffer), rate
        moves, rates = zip(*(found[id(leaf)] for leaf in state.y.leaves), strict=True)
        return list(moves), list(rates)
