"""MEHA: the Moreau envelope based Hessian-free algorithm (the paper's Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from meha.analysis.theory import Constants, check, estimate, step_bounds, warn
from meha.method.method import At, Numbers, Run, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer
from meha.methods.frames import SteppingMethod, move
from meha.methods.parameters import GROWTH, OPTIMIZERS, complete, first_penalty, parameters
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.problem.schedules import Power, Schedule, check_schedule, evaluate
from meha.tensors.checks import check_count, check_positive, check_switch, check_tolerance
from meha.tensors.variables import Leaves, Variable, add_difference_, distance, norm, subtract


@dataclass
class MEHAState(State):
    """x, y, the auxiliary theta that follows argmin_theta (f + g)(x, theta) + ||theta - y||^2 / (2 gamma), and optimizers."""

    theta: Variable
    x_optimizer: RunningOptimizer | None = None
    y_optimizer: RunningOptimizer | None = None
    theta_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class MEHA(SteppingMethod):
    """The Moreau envelope based Hessian-free algorithm, Algorithm 1 of the paper: one loop, first-order gradients only.

    The lower level may be non-convex and non-smooth.

    Step k = 0, 1, ... is

        theta <- prox_{eta g(x,.)}( theta - eta (grad_y f(x, theta) + (theta - y) / gamma) )
        x     <- proj_X( x - alpha grad_x [ F(x, y) / c_k + (f+g)(x, y) - (f+g)(x, theta) ] )
        y     <- prox_{beta g(x,.)}( y - beta (grad_y [ F(x, y) / c_k + f(x, y) ] - (y - theta) / gamma) )

    with prox including the projection on Y, theta = y at the start, and c_k = c (k+1)^p. It costs 4 gradients of f and 2 of F
    (1 if F does not depend on x), and never a double backward pass. The smooth case is the same code with g = 0.

    Lower levels that belong to a batch, such as the heads of its tasks, start over with each batch. For them, and wherever x
    should wait for y, there are further steps of theta and y at the same x.

    Args:
        alpha, beta, eta: step sizes of x, y and theta: numbers, or functions of k (:mod:`meha.schedules`).
        gamma: the parameter of the Moreau envelope.
        c, p: the penalty c_k = c (k+1)^p with 0 <= p < 1/2; or c a function of k, and no p.
        x_optimizer, y_optimizer, theta_optimizer: factories such as ``partial(torch.optim.Adam, lr=1e-3)``, or
            :class:`~meha.Optimizer` with a schedule or clipping; the optimizer then takes the step along the direction instead
            of ``- alpha *``, and alpha is not given. A prox or a projection that mixes coordinates is only correct after plain
            steps, so there only SGD is accepted, and its lr is the step of the prox.
        gradients: number of gradients of f per step. 4 is the algorithm above. Fewer share evaluations between the
            directions; the fixed points are the same, the way there differs a little:

            3 (and 1 of F): y moves along its direction at the old x, so that f and F are differentiated in x and y at once,

                theta <- as above
                d     =  grad [ F(x, y) / c_k + f(x, y) ]
                x+    =  proj_X( x - alpha (d_x + grad_x [ g(x, y) - (f+g)(x, theta) ]) )
                y     <- prox_{beta g(x+,.)}( y - beta (d_y - (y - theta) / gamma) ),   x <- x+

            2 (and 1 of F): the gradient at theta before its move, h = grad f(x, theta), serves in x as well,

                theta+ = prox_{eta g(x,.)}( theta - eta (h_theta + (theta - y) / gamma) )
                x+     = proj_X( x - alpha (d_x - h_x + grad_x [ g(x, y) - g(x, theta) ]) )
                y      <- prox_{beta g(x+,.)}( y - beta (d_y - (y - theta+) / gamma) ),   x <- x+,  theta <- theta+

            In x, dropout then draws one mask for f(x, y) and another for f(x, theta).
        inner_steps: T, the steps of theta and y; T - 1 of them (theta, then y) go before the step above, which is the algorithm
            for T = 1. Each costs 2 gradients of f and 1 of F.
        warm_start: whether theta and y continue from the last step, or restart at y0 in every step, with optimizers that
            remember nothing but their schedule. Then the last step of y, which would be thrown away, is left out, and T must be
            at least 2.

    Modules run as they are: in training mode, batch-norm statistics of y see the data of both objectives (those of theta, a
    copy, only its own passes), and dropout draws a new mask in every pass, except that f(x, y) and f(x, theta) in the
    x-direction share one. Theta is in training mode where y is. A step on a network takes the memory of x, y, theta, a
    gradient, a second gradient of its largest parameter, and one forward-backward pass; optimizers add what they keep, and a
    prox a copy of its level.

    Numbers that are left out are chosen once, at the start, from the constants of the problem; where these are not stated with
    the problem, they are estimated first, and these gradients count. For numbers that adapt during the run there are
    :class:`~meha.contrib.AdaptiveMEHA` and, with batches or modules, :class:`~meha.StochasticMEHA`.

    The numbers of a step, at the point (x, y) where it starts: ``upper`` F, ``lower`` f + g, ``gap`` the value
    (f+g)(x, y) - (f+g)(x, theta) - ||theta - y||^2 / (2 gamma) with the new theta, a lower bound of the gap
    phi - v_gamma; ``residual`` c_k times the norm of the three directions (of the moves divided by their steps, where there is
    a prox or projection), which vanishes exactly at fixed points and estimates the residual R_k; ``d_x`` the norm of the
    x-direction; ``c`` the penalty.

    >>> import torch
    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(), lambda x, y: (x + y - 2).sin().sum())
    >>> x0, y0 = torch.tensor([-6.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=0.4, c=0.5, p=0.49).start(problem, x0, y0)
    >>> run.step()
    StepInfo(step=1, upper=80, lower=-0.9894, gap=0.001748, residual=17.87, d_x=32.01, c=0.5)
    """

    penalties: ClassVar[tuple[str, ...]] = ("c",)

    alpha: Schedule | None = None
    beta: Schedule | None = None
    eta: Schedule | None = None
    gamma: float | None = None
    c: Schedule | None = None
    p: float | None = None
    x_optimizer: OptimizerFactory | None = None
    y_optimizer: OptimizerFactory | None = None
    theta_optimizer: OptimizerFactory | None = None
    gradients: Literal[4, 3, 2] = 4
    inner_steps: int = 1
    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None:
            check_positive("gamma", self.gamma)
        if self.c is not None:
            check_schedule("c", self.c)
        if self.p is not None:
            if callable(self.c):
                raise ValueError(f"p: c is a function of the step, so p={self.p} has no meaning; leave one out.")
            check_tolerance("p", self.p)
            if not self.p < 0.5:
                raise ValueError(f"p: must be in [0, 1/2), got {self.p}.")
        if not isinstance(self.gradients, int) or self.gradients not in (2, 3, 4):
            raise ValueError(f"gradients: must be 4 (the paper's step), 3 or 2, got {self.gradients!r}.")
        check_count("inner_steps", self.inner_steps)
        check_switch("warm_start", self.warm_start)
        if not self.warm_start and self.inner_steps < 2:
            raise ValueError("inner_steps: with warm_start=False, y would stay at y0 with one; take at least 2.")

    @property
    def c_k(self) -> Schedule:
        """Return the penalty c_k = c (k+1)^p as a function of k."""
        assert self.c is not None
        return self.c if callable(self.c) else Power(self.c, self.p or 0.0)

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any = None) -> tuple[MEHA, Constants | None]:
        """Fill in what was left out, and warn when the result is outside the theorem's range."""

        def choose(constants: Constants) -> dict[str, float]:
            c = first_penalty(oracle, x, y, constants, batch) if self.c is None else evaluate("c", self.c, 0)
            return parameters(constants, c, gamma=self.gamma)

        grown = self if self.p is not None or callable(self.c) else dataclasses.replace(self, p=GROWTH)
        method, constants = complete(grown, ("gamma", "c", *OPTIMIZERS), choose, oracle, x, y, batch)
        if constants is not None:
            warn(method.check_theory(constants))
        return method, constants

    def check_theory(self, constants: Constants) -> list[str]:
        """List the inequalities of the convergence theorem for gamma, eta and p that fail; schedules are sampled."""
        assert self.gamma is not None
        return check(constants, gamma=self.gamma, eta=max(self._sampled("eta"), default=None), p=self.p)

    def _check_steps(self, constants: Constants) -> tuple[bool, str]:
        """Return whether alpha and beta are within the bounds of the theorem's proof, and a phrase about them."""
        assert self.gamma is not None
        alphas, betas, etas = (self._sampled(name) for name in ("alpha", "beta", "eta"))
        if not (alphas and betas and etas) or callable(self.c):
            return False, "alpha and beta not looked at"
        bounds = step_bounds(constants, self.gamma, min(etas), evaluate("c_k", self.c_k, 0))  # both smallest: the worst case
        factors = {"alpha": max(alphas) / bounds.alpha, "beta": max(betas) / bounds.beta}
        above = [f"{name} is {factor:.2g} times" for name, factor in factors.items() if factor > 1]
        return not above, f"{' and '.join(above)} what its proof admits"

    def _sampled(self, name: str) -> list[float]:
        """Return a step size in some steps; an empty list where an optimizer takes its place."""
        step = getattr(self, name)
        return [] if step is None else [evaluate(name, step, k) for k in (0, 10, 1000, 100_000)]

    def report(self, run: Run) -> dict[str, str]:
        """Report which inequalities of the theorem fail, or what is in range, and what the theorem does not cover."""
        if run.constants is None:
            return {}
        failing = self.check_theory(run.constants)
        checked = ", ".join(name for name in ("gamma", "eta", "p") if getattr(self, name) is not None)
        fine = ""
        if not failing:
            inside, steps = self._check_steps(run.constants)
            fine = f"{checked}, alpha, beta in the range of the convergence theorem"
            fine = fine if inside else f"{checked} fit the convergence theorem; {steps}"
        uncovered = [name for name in ("x_optimizer", "y_optimizer", "theta_optimizer") if getattr(self, name) is not None]
        uncovered += ["c as a function"] if callable(self.c) else []
        published = {"gradients": 4, "inner_steps": 1, "warm_start": True}
        uncovered += [f"{name}={getattr(self, name)}" for name, value in published.items() if getattr(self, name) != value]
        origin = "" if run.problem.constants is not None else " (constants estimated near the start)"
        covered = " ".join([*failing, fine]).strip() + (f"; not covered: {', '.join(uncovered)}" if uncovered else "")
        return {"theory": covered + origin}

    def advice(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> str:
        """Say which numbers of a failed run are too large for the problem's constants, and which would fit."""
        try:
            constants = problem.constants or estimate(problem, x.value, y.value, batch=batch)
        except (RuntimeError, ValueError, ArithmeticError):  # the start lies at the edge of an objective's domain
            return "Take smaller steps, or start further inside the domain of the objectives."
        steps = {name: getattr(self, name) for name in ("alpha", "beta", "eta")}
        given = {name: evaluate(name, step, 0) for name, step in steps.items() if step is not None}
        notes = self.check_theory(constants)
        if given.get("beta", 0.0) > given.get("eta", math.inf):
            notes.append(f"beta = {given['beta']:g} is above eta = {given['eta']:g}, so theta lags behind y.")
        fitting = parameters(constants, evaluate("c_k", self.c_k, 0), self.gamma if not notes else None)
        if all(step <= 1.01 * fitting[name] for name, step in given.items()):  # the advice below has three digits
            notes.append("The steps fit the curvature near the start, but not where the run went; take smaller ones.")
        else:
            numbers = ", ".join(f"{name}={fitting[name]:.3g}" for name in ("alpha", "beta", "eta", "gamma"))
            notes.append(f"Try {numbers}, which fit the curvature near the start, or leave them out.")
        return " ".join(notes)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> MEHAState:
        theta, start = y.copy(), None if self.warm_start else y.copy()
        return MEHAState(x, y, theta, **self.optimizers(oracle, x=x, y=y, theta=theta), start=start)

    def step(self, oracle: Oracle, state: MEHAState, at: At) -> Numbers:
        x, y, theta, batch, gamma, c = state.x, state.y, state.theta, at.batch, at.gamma, at.c_k

        state.restart(y, theta)  # the order below is that of Algorithm 1: theta, x, then y at the new x
        for _ in range(self.inner_steps - 1):
            self._move_theta(oracle, state, at)
            m_y = self._move_y(oracle, state, at)

        both = self.gradients < 4 and self.warm_start  # with 4, y takes its gradient at the new x; restarted, y does not move
        wrt, phi = ((x, y), oracle.partial) if both else ((x,), oracle.phi)  # partial: in y, g is left to its prox
        terms = [(1 / c, oracle.upper, x, y), (1.0, phi, x, y)]
        if self.gradients == 2:
            own, (h, g_theta) = oracle.gradients((x, theta), [(1.0, oracle.partial, x, theta)], batch, own=True)
            (g_theta,) = oracle.average([g_theta], (theta,), own)
            (lower_theta,) = own
            apart = distance(theta.leaves, y.leaves)  # before the move, because lower_theta belongs to the old theta
            m_theta = self._move_theta(oracle, state, at, g_theta)
            del g_theta  # frees a gradient before the next pass
            own, (g_x, *g_y) = oracle.gradients(wrt, terms, batch, own=True)
            g_x, *g_y = oracle.average([subtract(g_x, h), *g_y], wrt, own)  # both parts of g_x in one message
            upper, lower = own
        else:
            m_theta = self._move_theta(oracle, state, at)
            apart = distance(theta.leaves, y.leaves)
            # One call, so that f(x, y) and f(x, theta) share their dropout mask: their difference is small beside its noise.
            (upper, lower, lower_theta), (g_x, *g_y) = oracle.gradients(wrt, [*terms, (-1.0, phi, x, theta)], batch)

        d_x, m_x = move(x, g_x, at.alpha, oracle.project, x.value, state.x_optimizer)
        if self.warm_start:  # a restart would throw this step of y away
            m_y = self._move_y(oracle, state, at, *g_y)

        return {  # functions are evaluated when they are read, so that a step does not pay for them
            "upper": upper,
            "lower": lower,
            "gap": lambda: lower - lower_theta - apart.square() / (2 * gamma),
            "residual": lambda: c * norm([m_theta, m_x, m_y]),
            "d_x": d_x,
            "c": c,
        }

    def _move_theta(self, oracle: Oracle, state: MEHAState, at: At, gradient: Leaves | None = None) -> Tensor:
        """Step theta, along f_y(x, theta) unless the gradient is given; return the norm of the move over the step."""
        if gradient is None:
            gradient = oracle.gradient(state.theta, [(1.0, oracle.lower, state.x, state.theta)], at.batch)[1]
        add_difference_(gradient, state.theta.leaves, state.y.leaves, 1 / at.gamma)
        return move(state.theta, gradient, at.eta, oracle.prox, state.x.value, state.theta_optimizer)[1]

    def _move_y(self, oracle: Oracle, state: MEHAState, at: At, gradient: Leaves | None = None) -> Tensor:
        """Step y, along the gradient of F / c_k + f unless it is given; return the norm of the move over the step."""
        x, y = state.x, state.y
        if gradient is None:
            gradient = oracle.gradient(y, [(1 / at.c_k, oracle.upper, x, y), (1.0, oracle.lower, x, y)], at.batch)[1]
        add_difference_(gradient, state.theta.leaves, y.leaves, 1 / at.gamma)
        return move(y, gradient, at.beta, oracle.prox, x.value, state.y_optimizer)[1]
