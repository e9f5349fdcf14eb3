"""MEHA: the Moreau envelope based Hessian-free algorithm (the paper's Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meha.checks import check_positive
from meha.methods.automatic import advise, choose
from meha.methods.base import Method, Numbers, State
from meha.oracle import Oracle
from meha.problem import Problem, Prox
from meha.schedules import Power, Schedule, check_schedule, evaluate
from meha.sets import ConvexSet
from meha.theory import Constants, check, warn
from meha.variables import Leaves, Variable, add_, add_difference, norm, subtract

__all__ = ["MEHA", "MEHAState", "OptimizerFactory"]

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass
class MEHAState(State):
    """x, y, the auxiliary theta that follows argmin_theta (f + g)(x, theta) + ||theta - y||^2 / (2 gamma), and optimizers."""

    theta: Variable
    x_optimizer: torch.optim.Optimizer | None = None
    y_optimizer: torch.optim.Optimizer | None = None
    theta_optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class MEHA(Method):
    """One loop, first-order gradients only, for non-convex and non-smooth lower levels. Step k = 0, 1, ... is

        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )
        x     <- proj_X( x - alpha grad_x [ F(x, y) / c_k + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c_k + f(x, y) ] - (y - theta) / gamma) )

    with prox including the projection on Y, theta = y at the start, and c_k = c (k+1)^p. It costs 4 gradients of f and 2 of F
    (1 if F does not depend on x), and never a double backward pass. The smooth case is the same code with g = 0.

    Args:
        alpha, beta, eta: step sizes of x, y and theta: numbers, or functions of k (:mod:`meha.schedules`).
        gamma: the parameter of the Moreau envelope.
        c, p: the penalty c_k = c (k+1)^p with 0 <= p < 1/2; or c a function of k, and no p.
        x_optimizer, y_optimizer, theta_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``; the optimizer
            then takes the step along the direction instead of ``- alpha *``, and alpha is not given. A prox or a projection
            that mixes coordinates is only correct after plain steps, so there only SGD is accepted, and its lr is the step
            of the prox.

    Modules run as they are: in training mode, batch-norm statistics of y see the data of both objectives (those of theta, a
    copy, only its own passes), and dropout draws a new mask in every pass.

    What is left out is chosen from the constants of the problem (:mod:`meha.methods.automatic`); where they are not stated with
    the problem, they are estimated first, and these gradients count.

    The numbers of a step, at the point (x, y) where it starts: ``upper`` F, ``lower`` f + g, ``gap`` the value
    (f+g)(x, y) - (f+g)(x, theta) - ||theta - y||^2 / (2 gamma) with the new theta, a lower bound of the gap
    phi - v_gamma; ``residual`` c_k times the norm of the three moves divided by their steps, which vanishes exactly at fixed
    points and estimates the residual R_k; ``d_x`` the norm of the x-direction; ``c`` the penalty.

    >>> from meha.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lambda x, y: (x + y - 2).sin().sum())
    >>> x0, y0 = torch.tensor([-6.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=0.4, c=0.5, p=0.49).start(problem, x0, y0)
    >>> run.step()
    StepInfo(step=1, upper=80, lower=-0.9894, gap=0.001748, residual=17.87, d_x=32.01, c=0.5)
    """

    alpha: Schedule | None = None
    beta: Schedule | None = None
    eta: Schedule | None = None
    gamma: float | None = None
    c: Schedule | None = None
    p: float | None = None
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None
    theta_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name, optimizer in (("alpha", "x_optimizer"), ("beta", "y_optimizer"), ("eta", "theta_optimizer")):
            step, factory = getattr(self, name), getattr(self, optimizer)
            if step is not None:
                check_schedule(name, step)
                if factory is not None:
                    raise ValueError(f"{name} and {optimizer}: give one of them; with an optimizer the step is its lr.")
            if factory is not None and not callable(factory):
                raise TypeError(
                    f"{optimizer}: expected a factory such as partial(torch.optim.Adam, lr=1e-3), got {type(factory).__name__}."
                )
        if self.gamma is not None:
            check_positive("gamma", self.gamma)
        if self.c is not None:
            check_schedule("c", self.c)
        if self.p is not None:
            if callable(self.c):
                raise ValueError(f"p: c is a function of the step, so p={self.p} has no meaning; leave one out.")
            if not 0 <= self.p < 0.5:
                raise ValueError(f"p: must be in [0, 1/2), got {self.p}.")

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any = None) -> tuple[MEHA, Constants | None]:
        """Fill in what was left out, and warn when the result is outside the theorem's range."""
        method, constants = choose(self, oracle, x, y, batch)
        if constants is not None:
            warn(method.check_theory(constants))
        return method, constants

    def check_theory(self, constants: Constants) -> list[str]:
        """The inequalities of the convergence theorem that fail; a schedule is looked at in some steps."""
        assert self.gamma is not None
        etas = [] if self.eta is None else [evaluate("eta", self.eta, k) for k in (0, 10, 1000, 100_000)]
        return check(constants, gamma=self.gamma, eta=max(etas, default=None), p=self.p)

    def theory(self, constants: Constants) -> str:
        """Which inequalities fail, or what is in range, and what the theorem does not cover."""
        failing = self.check_theory(constants)
        checked = [name for name in ("gamma", "eta", "p") if getattr(self, name) is not None]
        fine = f"{', '.join(checked)} in the range of the convergence theorem" if not failing else ""
        uncovered = [name for name in ("x_optimizer", "y_optimizer", "theta_optimizer") if getattr(self, name) is not None]
        uncovered += ["c as a function"] if callable(self.c) else []
        return " ".join([*failing, fine]).strip() + (f"; not covered: {', '.join(uncovered)}" if uncovered else "")

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        return advise(self, problem, x, y, batch)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> MEHAState:
        theta = y.copy()
        state = MEHAState(x=x, y=y, theta=theta)
        g = oracle.problem.nonsmooth is not None
        for variable, domain, role in (
            (x, oracle.problem.x_set, "x"),
            (y, oracle.problem.y_set, "y"),
            (theta, oracle.problem.y_set, "theta"),
        ):
            factory = getattr(self, f"{role}_optimizer")
            if factory is not None:
                optimizer = _build(factory, variable, f"{role}_optimizer")
                _check_metric(optimizer, domain, g and role != "x", f"{role}_optimizer")
                setattr(state, f"{role}_optimizer", optimizer)
        return state

    def step(self, oracle: Oracle, state: MEHAState, batch: Any) -> Numbers:
        x, y, theta = state.x, state.y, state.theta
        F, f, phi = oracle.upper, oracle.lower, oracle.phi
        gamma, c = self.gamma, self.penalty(state.k)
        assert gamma is not None

        _, d = oracle.gradient(theta, [(1.0, f, x, theta)], batch)
        d_theta = add_difference(d, theta.leaves, y.leaves, 1 / gamma)
        m_theta = self._move("eta", state, theta, d_theta, oracle.prox)

        terms = [(1 / c, F, x, y), (1.0, phi, x, y), (-1.0, phi, x, theta)]
        (upper, lower, lower_theta), d_x = oracle.gradient(x, terms, batch)
        m_x = self._move("alpha", state, x, d_x, oracle.project)

        apart = norm(subtract(theta.leaves, y.leaves))
        _, d = oracle.gradient(y, [(1 / c, F, x, y), (1.0, f, x, y)], batch)
        d_y = add_difference(d, theta.leaves, y.leaves, 1 / gamma)
        m_y = self._move("beta", state, y, d_y, oracle.prox)

        return {
            "upper": upper,
            "lower": lower,
            "gap": lambda: float(lower) - float(lower_theta) - float(apart) ** 2 / (2 * gamma),
            "residual": lambda: c * math.hypot(m_theta, m_x, m_y),
            "d_x": m_x if oracle.project.identity and state.x_optimizer is None else norm(d_x),
            "c": c,
        }

    def penalty(self, k: int) -> float:
        """c_k."""
        assert self.c is not None
        return evaluate("c", self.c if callable(self.c) else Power(self.c, self.p or 0.0), k)

    def _move(
        self, name: Literal["alpha", "beta", "eta"], state: MEHAState, variable: Variable, direction: Leaves, prox: Prox
    ) -> Tensor:
        """variable <- prox(variable - step * direction), and the norm of the move divided by the step."""
        optimizer = getattr(state, _OPTIMIZERS[name])
        leaves = variable.leaves
        if optimizer is None and prox.identity:
            add_(leaves, direction, -evaluate(name, getattr(self, name), state.k))
            return norm(direction)
        old = [leaf.clone() for leaf in leaves]
        if optimizer is None:
            step = evaluate(name, getattr(self, name), state.k)
            add_(leaves, direction, -step)
        else:
            step = float(optimizer.param_groups[0]["lr"])
            for leaf, part in zip(leaves, direction, strict=True):
                leaf.grad = part
            optimizer.step()
            for leaf in leaves:
                leaf.grad = None
        prox(state.x.value, leaves, step)
        return norm(subtract(old, leaves)) / step


_OPTIMIZERS = {"alpha": "x_optimizer", "beta": "y_optimizer", "eta": "theta_optimizer"}


def _build(factory: OptimizerFactory, variable: Variable, name: str) -> torch.optim.Optimizer:
    optimizer = factory(variable.leaves)
    if isinstance(optimizer, torch.optim.Optimizer) and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(f"{name}: maximize=True would climb; leave it out.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{name}: LBFGS evaluates the objective itself, which a single-loop method does not allow; use another."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{name}: the factory returned {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(leaf) for leaf in variable.leaves}:
        raise ValueError(f"{name}: the factory must hand all tensors that it gets to the optimizer, and no others.")
    return optimizer


def _check_metric(optimizer: torch.optim.Optimizer, domain: ConvexSet | None, nonsmooth: bool, name: str) -> None:
    """A prox belongs to the metric of the step: after Adam, soft thresholding is no proximal step of anything."""
    if not nonsmooth and (domain is None or domain.coordinatewise):
        return
    rates = {group["lr"] for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ValueError(
            f"{name}: has several learning rates {sorted(rates)}, but a prox or projection has one step; use one lr."
        )
    if isinstance(optimizer, torch.optim.SGD):
        return
    what = "a non-smooth term" if nonsmooth else f"the set {domain!r}"
    raise ValueError(
        f"{name}: {type(optimizer).__name__} rescales coordinates, and the prox or projection of {what} is only correct"
        " after plain steps; use torch.optim.SGD or leave the optimizer out."
    )
