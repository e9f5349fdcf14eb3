"""The numbers that AdaptiveMEHA does not ask for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TUNING", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Every heuristic number of AdaptiveMEHA. All are relative, so that the units of x, y, F and f do not matter."""

    # Steps
    safety: float = 0.6  # steps times curvatures; below 1, because curvatures are estimated from below
    gamma: float = 0.45  # first gamma times the curvature of f; below 1/2 the theorem covers any f

    # Curvatures
    first_look: int = 4  # power steps for each curvature at the start; enough for its first digit
    next_look: int = 1  # power steps in each later look, which continue the earlier ones
    wait: int = 50  # largest number of steps between two looks, which then cost 5 % of all gradients
    fall: float = 0.4  # curvatures that fell by less are kept, and none falls further at once: one look may miss a direction
    rise: float = 1.1  # curvatures that rose by less are kept, so that the steps do not change all the time
    concave: float = 1e-3  # negative curvature of f, relative to its largest, that counts; less is the error of differences

    # Rejected points
    explosion: float = 10.0  # growth of the residual at which a plain step is rejected; some growth is normal across a kink
    overshoot: float = 2.0  # the same for an accelerated step, which is worth little when it does not reduce the residual
    cut: float = 0.4  # factor on all steps after a rejected plain step, so that a few get below any curvature
    attempts: int = 30  # rejected plain steps in a row after which the run gives up, with steps of 1e-12 of their first size

    # Shorter steps
    excess: float = 1.3  # change of the residual, relative to the move, above which steps are cut; 1 if curvatures are right
    least_cut: float = 0.2  # smallest factor on steps at once, as one change may be exceptional
    against: float = 0.1  # negative cosine of move and residual's change at which acceleration starts again; less may be noise

    # Growth of gamma
    flat: float = 0.7  # share of the slope at y that is left at theta from which on f is too flat for gamma
    arrived: float = 0.2  # relative error of theta below which that share is meaningful
    growth: float = 16.0  # largest factor on gamma at once, as it is judged from one direction
    worth: float = 1.5  # smallest factor on gamma that is worth a change, which makes the last stages incomparable
    largest: float = 1e3  # largest gamma relative to the first one; without limit, theta would never arrive
    share_left: float = 1e-9  # guards the division by 1 - share

    # Acceleration
    memory: int = 40  # points, besides the last one, that are combined; more seldom help and are costly
    shortest: float = 0.3  # shortest accelerated step relative to the plain one; the residual cannot fall faster than that
    first_reach: float = 10.0  # longest accelerated step relative to the plain one, at first and after a rejected one
    least_reach: float = 4.0  # the same at any time; otherwise it may be twice the last accelerated step

    # Stages of c
    first_c: float = 0.5  # c at the start, relative to the balance of both levels: F counts a little more, and shows the way
    first_c_linear: float = 0.1  # c at the start, relative to equal slopes, if F is linear: slopes do not tell how far it draws
    ratio: float = 2.0  # factor on c from stage to stage; a larger one makes the next solution hard to reach
    early: int = 15  # steps after which a stage is left unsolved, while the solution moves much with c
    late: int = 60  # the same once it moves little, and a solved stage is worth waiting for
    late_share: float = 0.25  # the same as a share of all steps, so that hard problems get longer stages
    moving: float = 0.3  # relative change between stages above which the solution moves much
    accuracy: float = 0.05  # residual of a solved stage relative to grad F, times the relative change between the last stages
    accuracy_tol: float = 0.3  # the same, times tol, below which it need not be: well inside the changes to be seen
    loosest: float = 0.1  # upper bound of that residual, relative to grad F; beyond, the stage shows nothing
    least_slope: float = 1e-3  # lower bound of grad F relative to its largest, for a minimum of F inside
    rounding: float = 4.0  # multiple of the rounding error of z below which the residual cannot get
    close: float = 10.0  # c stops growing unsolved if F can lose only this multiple of tol times its range

    # Limits for c to infinity
    shrinks: float = 0.8  # largest ratio of successive changes that is extrapolated; 1/2 where the bias is of order 1/c
    near: float = 10.0  # multiple of tol within which the last change, and the limit from its stage, must lie
    way: float = 0.01  # weight of the distance from the start in the size of a point, which may end at zero
    inside: float = 1e-9  # prox step, times the curvature of f, that only brings y into its set

    # The end
    closed: float = 0.1  # loss of F that the gap still allows, relative to its range, at which a run may end
    pairs: int = 50  # memory of the descents that verify y
    least_search: int = 1000  # gradients of f that these may take in any case
    search: float = 0.5  # part of those taken so far that they may take
    holding: float = 10.0  # c, in units of the difference of F by that of f, at which F does not draw y out of a lower valley
    restarts: int = 3  # times that y may move to a lower valley; more would mean that x and y chase each other
    behind: tuple[float, ...] = (0.0, 0.1, 0.3)  # shares of the way of x at which F is compared

    # Optima at infinity
    moved: float = 1e-3  # x has moved if it is further from the start than this, relative to x
    beyond: float = 1e3  # x that can move this many times as far as it did inside X counts as unbounded
    lower_tol: float = 1e-8  # relative accuracy of the lower solves that compare F, well below what tol can be
    lower_steps: int = 1000  # largest number of steps of these solves, which happen once in a run


TUNING = Tuning()
