"""The numbers behind Default's decisions, found by trial on the toys and half of the collection of problems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DefaultTuning:
    """Every heuristic number of Default. Weights are those of the upper level, 1 where both levels weigh the same."""

    # What counts as small, near or noise in passes
    small: float = 0.1  # an error does not matter below this part of what it would disturb
    near: float = 0.01  # points are near below this distance, relative to their size; the first step and displacements
    within_noise: float = 10.0  # a promised decrease below this many errors of the value cannot be seen
    # The sequence of stages
    probes: int = 4  # power steps for each curvature: a factor of two is good enough
    first_c: float = 10.0  # first c in units of the balance where f decides, and its inverse where F decides
    ratio: float = 4.0  # growth of c from stage to stage: the next solution is near, and the bias falls quickly
    largest_c: float = 1e9  # in units of the balance; beyond, rounding errors prevail
    stage_accuracy: float = (
        0.03  # relative accuracy in x of the first stages; of later ones, times the square of the last change
    )
    early_steps: int = 10  # most steps of a stage that F still shapes
    late_steps: int = 50  # most steps of a later stage
    patience: int = 5  # failed steps in x after which a stage ends, and steps in y that do not halve the residual
    # The solves in y and theta
    pairs: int = 300  # L-BFGS pairs kept: ill-conditioned lower levels need many
    few_pairs: int = 30  # the same for x, whose function changes with c, and where nothing is known of the curvature
    inner_steps: int = 400  # upper bound on the steps of one solve
    finest_solve: float = 1e-9  # finest accuracy, relative to y - theta
    solved: float = 1e3  # y solves the lower level if the residual is below this many pulls of F
    least_weight: float = 1e-3  # of any basin, so that it is noticed as soon as it becomes the lowest
    # Optima at infinity
    further: tuple[float, ...] = (3.0, 7.0)  # moves beyond the optimum at which F must also be as low, if it is after one
    beyond: float = 1e3  # moves of x which X must allow before the optimum counts as infinitely far
    # Evidence: searches of the lower level, samples of other x, further passes, restarts of implicit Newton
    budget_share: float = 0.7  # part of the gradients left that an engine or a pass may take: some must be left for evidence
    least_search: int = 1000  # gradients of f that a search may take in any case; otherwise half of those taken so far
    curvature_samples: int = 6  # random points at which the curvature of f shows whether the lower level is convex
    samples: int = 12  # strata of the Latin hypercube of x at which F is compared; also basins that are remembered
    newton_samples: int = 8  # the same for implicit Newton: each takes longer where points cannot be taken in one batch
    wider: float = 4.0  # where X has no bounds, half of them are this many times further away than the size of x
    segment_points: tuple[float, ...] = (1 / 3, 2 / 3)  # points on the segments to them at which F shows a barrier
    searchable: int = 20  # most coordinates of x for all this: with more, a few points say nothing about where F is low
    basins: int = 3  # basins, besides that of y, that a pass follows; it compares others between stages
    holding: float = 10.0  # c, in units of the difference of F by that of f, at which F does not draw y out of a lower basin
    faithful: float = 256.0  # first c of a pass from another x, in units of that of the second: it shall stay where it begins
    passes: int = 8  # upper bound on the number of passes
    restarts: int = 2  # attempts from other x, by either engine, as long as they agree
    restart_share: float = 4.0  # evaluations for all restarts, in units of those of the first attempt
    least_restart: int = 100  # the same at least
    # Agreement: when two points or values are the same, and when "converged" may be said
    same: float = 1e-3  # relative difference of x, y or F below which two results, basins or values are the same
    better: float = 1e-6  # gain in F or f, relative to its range, that counts
    agreeing: int = 2  # attempts that must end at the best of several solutions; one more for each other one, if they are cheap


TUNING = DefaultTuning()
