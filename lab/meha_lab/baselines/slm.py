"""SLM: a smoothed Lagrangian of the problem with the gap of the lower level as its constraint."""

from __future__ import annotations

from dataclasses import dataclass

from meha.analysis.theory import Constants
from meha.method.method import At, Numbers
from meha.methods.frames import PenaltyMethod, PenaltyState, at_most_one, gap_terms
from meha.problem.oracle import Oracle
from meha.problem.schedules import Schedule, check_schedule
from meha.tensors.checks import check_positive, check_tolerance
from meha.tensors.variables import Variable, add_, add_difference_, subtract

__all__ = ["SLM", "SLMState"]


@dataclass(kw_only=True)
class SLMState(PenaltyState):
    """The state of a penalty method, the multiplier, and the centre (x_c, y_c) of the smoothing."""

    lam: float = 0.0
    x_centre: Variable
    y_centre: Variable


@dataclass(frozen=True, kw_only=True)
class SLM(PenaltyMethod):
    """Smoothed first-order Lagrangian method (Lu 2023), experimental.

    For the constraint q = f(x, y) - f(x, z) - delta <= 0,

        T times:  z <- proj_Y( z - eta f_y(x, z) )
        (x, y) <- proj( (x, y) - (alpha, beta) s grad[ F + lam q + r/2 ||(x, y) - centre||^2 ] ),   s = min(1, 1/lam), at once
        lam <- max( 0, (1 - decay) lam + dual_step q ),    centre <- centre + m ((x, y) - centre)

    A step costs T + 2 gradients of f and 1 of F.

    Args:
        delta: how much above its minimum the lower level may end; must be positive for the constraint to be regular.
        r: the strength of the smoothing.
        dual_step, decay: step of the multiplier, and its pull to zero, which keeps it bounded.
        m: how far the centre follows in a step, in (0, 1].
        alpha, beta, eta, inner_steps, x_optimizer, y_optimizer: see :class:`~meha.methods.frames.PenaltyMethod`.

    The structure (smoothing centre, regularised multiplier, inner steps for the value function) is the paper's; its exact
    algorithm was not at hand, so that constants, the order of updates and the factor s are our reading, and no result here
    speaks for the paper. With decay > 0 the multiplier stays below dual_step q / decay, which biases the answer.

    >>> import meha
    >>> problem = meha.problems.strong_convex(n=1)
    >>> run = SLM(alpha=0.2, beta=0.2, eta=0.5, inner_steps=5).start(problem, problem.x0, problem.y0)
    >>> for _ in range(2000):
    ...     info = run.step()
    >>> print(f"{float(run.x):.2f}")
    0.53
    """

    delta: float = 1e-4
    r: float = 1.0
    dual_step: Schedule = 1.0
    decay: float = 1e-4
    m: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tolerance("delta", self.delta)
        check_tolerance("r", self.r)
        check_schedule("dual_step", self.dual_step)
        check_tolerance("decay", self.decay)
        check_positive("m", self.m)
        for name in ("decay", "m"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}: must be at most 1, got {getattr(self, name)}.")

    def choose(self, constants: Constants) -> dict[str, float]:
        steps = super().choose(constants)
        return {**steps, **{name: 1 / (1 / steps[name] + self.r) for name in ("alpha", "beta")}}  # r adds to curvatures

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SLMState:
        state = SLMState(**vars(super().init(oracle, x, y)), x_centre=x.copy(), y_centre=y.copy())
        state.settled = False  # the first step knows nothing of the constraint
        return state

    def step(self, oracle: Oracle, state: SLMState, at: At) -> Numbers:
        x, y, x_c, y_c = state.x, state.y, state.x_centre.leaves, state.y_centre.leaves
        self.follow(oracle, state, at)
        lam, batch = state.lam, at.batch
        s = at_most_one(lam)  # otherwise steps that fit the curvature of F + f would be too long for a large multiplier
        (upper, lower, best), (d_x, d_y) = oracle.gradients((x, y), gap_terms(oracle, state, s, lam * s), batch)
        add_difference_(d_x, x.leaves, x_c, self.r * s)
        add_difference_(d_y, y.leaves, y_c, self.r * s)
        size = self.move_x(oracle, state, at, d_x)
        self.move_y(oracle, state, at, d_y)
        gap = lower - best
        state.settled = True  # lam was zero in the first step
        state.lam = max(0.0, (1 - self.decay) * lam + at.dual_step * (float(gap) - self.delta))
        add_(x_c, subtract(x.leaves, x_c), self.m)
        add_(y_c, subtract(y.leaves, y_c), self.m)
        return {"upper": upper, "lower": lower, "gap": gap, "d_x": size, "c": lam}
