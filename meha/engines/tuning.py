"""The numbers behind Default's decisions, found by trial on the toys and half of the collection of problems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DefaultTuning:
    """Every heuristic number of Default. Weights are those of the upper level, 1 where both levels weigh the same."""

    # The start
    least_tol: float = 10.0  # least tol, in units of the rounding error to the power below: c times a difference cancels
    least_tol_power: float = 2 / 3  # rounding errors eps c and the error 1/c^2 of an extrapolated x are equal there
    least_tol_proximal_power: float = (
        0.25  # power of the rounding error that bounds tol where a proximal term vanishes with the root of c
    )
    probes: int = 4  # power steps for each curvature: a factor of two is good enough
    upper_first: float = 0.1  # first c of the first pass, in units of the balance: F decides
    lower_first: float = 10.0  # first c of the second pass: f decides
    rough_pairs: int = 20  # memory of rough lower solves, and of searches that know nothing of the curvature
    rough_steps: int = 50  # upper bound on its steps
    rough_reduction: float = 0.1  # reduction of the residual at which it ends
    # Memories
    pairs: int = 300  # pairs kept for y and theta: ill-conditioned lower levels need many
    composite_pairs: int = 50  # the same with a non-smooth g, under which the free coordinates change often
    outer_pairs: int = 30  # pairs kept for x, whose function changes with c
    damping: float = 1e-4  # added curvature in x, relative to the largest: where Phi is almost flat, steps stay bounded
    # The sequence of stages
    ratio: float = 4.0  # growth of c from stage to stage: the next solution is near, and the bias falls quickly
    proximal: float = 0.1  # weight of a vanishing proximal term where the levels balance, relative to the curvature of f
    max_stages: int = 40  # upper bound for one pass
    largest_c: float = 1e9  # in units of the balance; beyond, rounding errors prevail
    lower_shapes_below: float = 0.3  # below this weight of the upper level, the lower level shapes the stage
    may_end_below: float = 0.1  # below this weight, a pass may end
    first_stage_accuracy: float = 0.03  # relative accuracy in x of the first stages
    stage_accuracy: float = 0.03  # accuracy of a later stage: this times the last change of x to the power below
    stage_accuracy_power: float = 1.5  # superlinear, since extrapolation amplifies errors
    last_accuracy: float = 0.1  # finest accuracy of a stage and of the last lower solve, in units of tol
    # Steps in x
    early_steps: int = 10  # most steps of a stage that F still shapes: its solution matters little
    late_steps: int = 50  # most steps of a later stage
    max_failures: int = 3  # failed steps after which a stage ends
    first_step: float = 0.01  # length of the very first step, relative to x
    stride: float = 0.1  # longest step, in units of the largest x so far, where x itself is smaller
    negligible: float = 0.01  # times tau^2: relative decrease of Phi, or relative gradient, too small for a step
    stationary: float = 0.1  # a small step ends a stage only if the gradient fell to this part of the largest
    wandered: float = 100.0  # an early stage that went this far, relative to x, has no solution nearby
    far: float = 1e7  # a point this many times further away than all before it counts as divergence
    # Accuracy of the solves in y and theta, relative to y - theta
    coarsest_solve: float = 0.1  # the coarsest
    finest_solve_first: float = 1e-8  # the finest at the beginning of a stage
    finest_solve_after_step: float = 1e-9  # the finest after a step in x
    finest_solve_after_failure: float = 1e-10  # the finest after a failed step in x
    in_step: float = 0.1  # times the gradient in x, relative to the largest: the accuracy of the next solves
    retry: float = 0.03  # factor after a failed step in x, which errors of the solves may have caused
    # The solves in y and theta
    inner_steps: int = 400  # upper bound on the steps of one solve
    leap: float = 10.0  # longest plain step, relative to y
    least_force: float = 0.01  # least pull of F, in units of tol times that at the start: F may not pull at its minimum
    least_distance: float = 1e-3  # least distance of y and theta, in units of tol times y
    patience: int = 8  # steps without half the residual after which tiny steps end the solve
    within_noise: float = 10.0  # a promised decrease below this many errors of the value cannot be seen
    within_rounding: float = 10.0  # a step below this many rounding errors of y changes nothing
    solved: float = 1e3  # y solves the lower level if the residual is below this many pulls of F
    # Several basins of the lower level
    displaced: float = 0.01  # displacement of theta at the beginning of a stage, relative to its distance from y
    displaced_least: float = 1e-6  # the same, relative to y: from there, theta leaves maxima and saddles
    smoothing: float = 0.5  # part of the range of F over which the least of several basins is smoothed
    new_weight: float = 0.1  # weight of a basin that was just found
    least_weight: float = 1e-3  # of any basin, so that it is noticed as soon as it becomes the lowest
    borderline: float = 1e-2  # share of another basin, times c, from which on x is on a border
    fallen: float = 0.25  # if the gap fell by less with a stage, in which c grew fourfold, y may be in another basin than theta
    merged: float = 1e-3  # basins whose bottoms are this close, relative to y, are one
    # Extrapolation
    shrinking: float = 0.6  # largest ratio of changes for Richardson's rule, which expects 1/4
    steady: float = 0.9  # largest ratio for a geometric series
    unsteady: float = 0.1  # two such ratios that differ relatively by more are not steady
    # The end of a pass
    closed: float = 0.1  # largest loss of F that the gap still allows, about 2 c times the gap, relative to the range of F
    joined: float = 0.01  # largest distance of y and theta, relative to y
    y_tol: float = 10.0  # accuracy in y, in units of that in x: the lower level determines y less well
    unsettled: float = 0.01  # while x changes by more than this, an F that changes by less than tol does not depend on it
    F_rest: float = 1e-3  # otherwise F is steady if it changes by less than this times tol to the power below
    F_rest_power: float = 1.5  # between 1, for F as accurate as x, and 2, since F is quadratic near a solution
    F_rest_stages: int = 3  # stages in a row in which F must be steady
    blurred: float = 0.1  # rounding error of the next gradient, relative to its largest, at which accuracy ends
    tie_steps: int = 4  # Newton steps to where two basins are as low, if the optimum lies there
    tie_reach: float = 0.01  # longest of them, relative to x
    moved: float = 1e-3  # x has moved if it is further from the start than this, relative to x
    reserve: float = 0.1  # part of the gradients of a pass that is kept for its end
    further: tuple[float, ...] = (3.0, 7.0)  # moves beyond the optimum at which F must also be as low, if it is after one
    beyond: float = 1e3  # moves of x which X must allow before the optimum counts as infinitely far
    # The search of the lower level at the end, and further passes
    newton_share: float = 0.7  # part of all gradients that implicit Newton may take: most are products, which are cheap
    first_pass_share: float = 0.45  # part of all gradients that each of the two first passes may take
    next_pass_share: float = 0.5  # part of the gradients left that each further one may take
    least_search: int = 1000  # gradients of f that a search may take in any case
    search: float = 0.5  # part of those taken so far that it may take
    curvature_samples: int = (
        6  # random points, at x and at other x, at which the curvature of f shows whether the lower level is convex
    )
    least_pass: int = 200  # gradients of f that must be left for a further pass
    basins: int = 3  # basins, besides that of y, that a pass follows; it compares others between stages
    remembered: int = 12  # basins whose lowest points are kept as starts of later searches
    holding: float = 10.0  # c, in units of the difference of F by that of f, at which F does not draw y out of a lower basin
    sampling_share: float = 0.2  # part of those taken so far for samples at other x, where nothing speaks for another solution
    samples: int = 12  # x at which the lower level is solved for that
    wider: float = 4.0  # where X has no bounds, half of them are this many times further away than the size of x
    faithful: float = 256.0  # first c of such a pass, in units of that of the second: it shall stay where it begins
    explored: int = 2  # the best of them, from which passes start
    confirming: int = 2  # passes that try to find the best of several solutions once more
    passes: int = 8  # upper bound on the number of passes
    # Restarts of implicit Newton from other x
    samples_share: float = (
        0.3  # x that are sampled, the best of which are their starts, in units of the evaluations of the first
    )
    least_samples: int = 8  # the same at least
    segment_points: tuple[float, ...] = (
        1 / 3,
        2 / 3,
    )  # points of the segments to them at which F shows whether there is a barrier
    segment_middle: tuple[float, ...] = (0.5,)  # the same where points cannot be taken at once
    barrier: float = 1e-3  # a fall of F away from the answer is a barrier if it is more than this part of the whole rise
    restarts: int = 2  # number of attempts
    restart_share: float = 1.5  # evaluations for all of them, in units of those of the first
    least_restart: int = 24  # the same at least
    most_restarts: int = 8  # these three as long as the best of several solutions was not found often enough
    restart_share_several: float = 4.0
    least_restart_several: int = 100
    searchable: int = 20  # most coordinates of x for all this: with more, a few points say nothing about where F is low
    restart_share_large_x: float = 1.0  # with more, evaluations and gradients of the only other attempt: as many as the first
    restart_tol: float = 1e-3  # accuracy of x there, until F is less than in the best solution
    joining_distance: float = 0.1  # an attempt ends at a known solution if its distance fell by this factor,
    quadratic_misfit: float = 0.05  # and F differs from a quadratic function in between by this part of its change of slope
    quadratic_misfit_far: float = 1e-6  # or by this part, from where the attempt begins
    resolved: float = 0.5  # power of the rounding error, relative to F, below which differences of F are not seen
    # The lower level solved again
    as_low: float = 1e-6  # a re-solved y is as low as y within this part of the decrease of f + g from y0
    hollow: float = 1e-3  # F at a re-solved y differs from F by more than this, relative to F and its range
    # The choice between the results
    agreeing_attempts: int = 3  # where there are several solutions, attempts of the engine that must end at the best
    agreeing_passes: int = 2  # the same for passes, which take longer
    agreeing_attempts_large_x: int = 2  # the same where x has many coordinates, even if no other solution was met
    better: float = 1e-6  # gain in F, relative to its range, that makes the second result the better one
    agreement: float = 100.0  # two results agree if x differs by less than this many tol
    least_agreement: float = 1e-3  # or by less than this
    alike: float = 1e-5  # or if F differs by less than this part of its range: x may not matter


TUNING = DefaultTuning()
