"""IAPTT: an optimised start of the lower steps, and a pessimistic choice of where to stop them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from meha.analysis.theory import Constants
from meha.method.method import At
from meha.methods.frames import HypergradientMethod, HypergradientState, Trajectory, move
from meha.methods.parameters import SAFETY, complete
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule
from meha.tensors.variables import Leaves, Variable, copy_


@dataclass
class IAPTTState(HypergradientState):
    """x, y, and z, where the lower steps start."""

    z: Variable | None = None


@dataclass(frozen=True, kw_only=True)
class IAPTT(HypergradientMethod):
    """Initialisation auxiliary and pessimistic trajectory truncation (Liu et al. 2021), for non-convex lower levels.

        y_0 = z;   y_{t+1} = proj_Y( y_t - beta grad_y f(x, y_t) ),   t = 0, ..., T-1
        tbar = argmax over t = 1, ..., T of F(x, y_t)
        x <- proj_X( x - alpha d/dx F(x, y_tbar(x, z)) ),   z <- proj_Y( z - eta d/dz F(x, y_tbar(x, z)) )

    both from one reverse sweep of length tbar. A step costs T gradients of f, 1 of F, T evaluations of F and tbar
    Hessian-vector products.

    f must give the same value twice (no dropout). The answer is y_T(z); z itself, which some experiments with networks report,
    is ``run.state.z``.

    Args:
        eta: the step of z; when left out it is alpha or, where that is left out too, chosen from the curvature of F in y.
        keep_graph: as in :class:`~meha.RHG`.
        alpha, beta, inner_steps, x_optimizer: see :class:`~meha.methods.frames.HypergradientMethod`; ``warm_start`` has
            no meaning here, because z decides where the steps start.

    The paper claims convergence for non-convex lower levels; a fixed T leaves a bias, as below (the solution is 2.356). On
    :func:`meha.problems.sine` from its start we find the right basin for n = 1 with some settings; with longer inner loops it
    ends in another one, and for n = 10 no setting that we tried came within 5 %.

    >>> import meha
    >>> problem = meha.problems.sine(n=1)
    >>> run = IAPTT(alpha=0.05, beta=0.1, inner_steps=40).start(problem, problem.x0, problem.y0)
    >>> for _ in range(100):
    ...     info = run.step()
    >>> print(f"{float(run.x):.3f}")
    2.353
    """

    eta: Schedule | None = None
    keep_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warm_start:
            raise ValueError("warm_start: has no meaning for IAPTT, whose lower steps start from z; leave it out.")

    def choose(self, constants: Constants) -> dict[str, float]:
        return {**super().choose(constants), "eta": SAFETY / (constants.F_yy or 1.0)}  # lower steps flatten F(x, y_T(z))

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        chosen = self.chosen if self.alpha is not None else (*self.chosen, "eta")  # a given alpha also serves for z
        return complete(self, chosen, self.choose, oracle, x, y, batch)

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> IAPTTState:
        return IAPTTState(**vars(super().init(oracle, x, y)), z=y.copy())

    def hypergradient(self, oracle: Oracle, state: IAPTTState, at: At) -> tuple[dict[str, Any], Leaves]:
        x, y, z = state.x, state.y, state.z
        assert z is not None
        copy_(y.leaves, z.leaves)
        steps = Trajectory(oracle, x, y, self.inner_steps, at.beta, at.batch, keep_graph=self.keep_graph)
        values = []
        for iterate in steps.iterates[1:]:  # values only, so that gradients of F are taken at one iterate
            with y.at(iterate) as there:
                values.append(oracle.upper(x, there, at.batch).clone())  # it may be a view of y
        worst = 1 + int(torch.stack(values).argmax())  # as in the paper, t = 0 is no candidate: x would get F_x alone
        _, h, q = steps.pull_back(worst)  # the answer is y_T, not the iterate of the largest F
        move(z, q, at.alpha if self.eta is None else at.eta, oracle.prox, x.value)
        return {"upper": values[-1], "pessimistic": worst}, h
