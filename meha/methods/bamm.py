"""BAMM: one step on the lower variable, one on the linear system of the implicit gradient, one on x, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch

from meha.analysis.theory import Constants
from meha.method.method import At, Numbers, State
from meha.method.optimizers import OptimizerFactory, RunningOptimizer
from meha.methods.frames import SteppingMethod, move
from meha.methods.parameters import CAUTION, complete, hypergradient_steps
from meha.problem.oracle import Oracle, Term
from meha.problem.schedules import InversePower, Schedule, fraction
from meha.tensors.checks import check_tolerance
from meha.tensors.variables import Variable, add_, inner, subtract

FALLING = InversePower(0.9, power=0.1)  # mu_0 and 1 / p_0 of the source

POWERS = {"s1": (2, 7), "s2": (1, 5), "s3": (0, 3)}
"""Powers of mu in eta / beta and alpha / beta."""


@dataclass
class BAMMState(State):
    """x, y, and v, which follows the solution of psi_yy v = F_y."""

    v: Variable
    x_optimizer: RunningOptimizer | None = None


@dataclass(frozen=True, kw_only=True)
class BAMM(SteppingMethod):
    """Averaged method of multipliers, single loop (Liu et al. 2023).

    With psi = mu_k F + (1 - mu_k) f, at once

        y <- y - beta psi_y;    v <- v - eta (psi_yy [v] - F_y);    x <- proj_X( x - alpha (F_x - psi_xy [v]) ),

    every right-hand side at the old (x, y, v), v = 0 at the start. A step costs 1 gradient of f, 1 of F and 1 Hessian-vector
    product of psi (2 with ``line_search``).

    Args:
        beta: the step of y.
        mu: the weight of F, a number or a function of k; 0 for no averaging (f strongly convex in y). By default
            0.9 / (k+1)^(1/10).
        strategy: how alpha and eta follow from beta, mu_k and tau. With (e, a) = (2, 7), (1, 5), (0, 3) for s1, s2, s3:
            eta = (k+1)^(-tau/2) mu_k^e beta, alpha = (k+1)^(-3 tau/2) mu_k^a beta.
            None: alpha and eta by themselves.
        tau: see ``strategy``.
        line_search: eta minimises the quadratic along the residual of v instead.
        alpha, eta: steps of x and v; they take precedence over the strategy.
        x_optimizer: takes the step of x instead of alpha.

    The error falls with mu_k, hence slowly: on :func:`meha.problems.merely_convex` with s3 it is .07 after 1000 steps and
    1e-5 after 6000. Published times count the longest of the three updates only, as if they ran in parallel; ours count all.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = BAMM(mu=0.0, strategy=None, alpha=0.1, beta=0.2, eta=0.5).start(problem, problem.x0, problem.y0)
    >>> for _ in range(200):
    ...     info = run.step()
    >>> run.x, run.counts
    (tensor([0.5000, 0.5000], dtype=torch.float64), Counts(upper=200, lower=200, hvp=200))
    """

    refuses_nonsmooth: ClassVar[str] = "it differentiates the lower level twice"
    refuses_shards: ClassVar[str] = "it takes second derivatives, which a pass through sharded modules does not have"
    refuses_scaler: ClassVar[str] = "it takes second derivatives, whose passes are not scaled"
    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"
    penalties: ClassVar[tuple[str, ...]] = ("mu",)

    beta: Schedule | None = None
    mu: Schedule = FALLING
    strategy: Literal["s1", "s2", "s3"] | None = "s3"
    tau: float = 1 / 40
    line_search: bool = False
    alpha: Schedule | None = None
    eta: Schedule | None = None
    x_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy is not None and str(self.strategy) not in POWERS:
            raise ValueError(f"strategy: must be one of {', '.join(POWERS)} or None, got {self.strategy!r}.")
        check_tolerance("tau", self.tau)
        self.average(0)  # raises for a mu that is no fraction

    def average(self, k: int) -> float:
        """Return mu_k, and raise if it is no fraction, or 0 where steps are powers of it."""
        mu = fraction("mu", self.mu, k)
        if mu == 0 and self.strategy is not None:
            raise ValueError(
                f"strategy: its steps are powers of mu, which is 0 at step {k}; pass strategy=None, or a positive mu."
            )
        return mu

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = hypergradient_steps(constants, self.average(0))
        return {**steps, "alpha": CAUTION * steps["alpha"]}

    def resolve(self, oracle: Oracle, x: Variable, y: Variable, batch: Any) -> tuple[Self, Constants | None]:
        return complete(self, ("beta",) if self.strategy else ("alpha", "beta", "eta"), self.choose, oracle, x, y, batch)

    def steps(self, at: At, k: int) -> tuple[Any, Any]:
        """Return eta and alpha of step k."""
        if self.strategy is None:
            return at.eta, at.alpha
        mu, (e, a) = self.average(k), POWERS[self.strategy]
        eta = (k + 1) ** (-self.tau / 2) * mu**e * at.beta
        alpha = (k + 1) ** (-3 * self.tau / 2) * mu**a * at.beta
        return at.eta or eta, at.alpha or alpha

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> BAMMState:
        v = Variable([torch.zeros_like(leaf) for leaf in y.leaves], "v")
        return BAMMState(x, y, v, **self.optimizers(oracle, x=x))

    def step(self, oracle: Oracle, state: BAMMState, at: At) -> Numbers:
        x, y, v, k = state.x, state.y, state.v.leaves, state.k
        batch, mu, (eta, alpha) = at.batch, self.average(k), self.steps(at, k)
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], batch)
        # All derivatives come before all moves, since the updates are simultaneous (Jacobi), not one after another.
        (lower,), f_y = oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)
        psi: list[Term] = [(mu, oracle.upper, x, y), (1 - mu, oracle.lower, x, y)]
        hessian = oracle.hessian(psi if mu else psi[1:], batch)  # without averaging, F need not be differentiated twice
        cross, image = hessian(v, x, y)  # one double backward pass gives both
        residual, d_x = subtract(image, F_y), subtract(F_x, cross)
        if self.line_search:
            (curved,) = hessian(residual, y)
            bend = float(inner(residual, curved))
            eta = float(inner(residual, residual)) / bend if bend > 0 else 0.0  # Cauchy's step; a concave direction has none
        add_(v, residual, -eta)
        add_(y.leaves, [mu * a + (1 - mu) * b for a, b in zip(F_y, f_y, strict=True)], -at.beta)
        size, _ = move(x, d_x, alpha, oracle.project, x.value, state.x_optimizer)
        return {"upper": upper, "lower": lower, "d_x": size, "mu": mu}
