"""The numbers behind Default's decisions, found by trial on the toys and half of the collection of problems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DefaultTuning:
    """The heuristic numbers of Default. Weights are those of the upper level, 1 where both levels weigh the same."""

    # The sequence of stages
    within_noise: float = 10.0  # a promised decrease below this many errors of the value cannot be seen
    first_c: float = 10.0  # first c in units of the balance where f decides, and its inverse where F decides
    ratio: float = 4.0  # growth of c from stage to stage: the next solution is near, and the bias falls quickly
    largest_c: float = 1e9  # in units of the balance; beyond, rounding errors, which c multiplies, prevail
    stage_accuracy: float = (
        0.03  # relative accuracy in x of the first stages; of later ones, times the square of the last change
    )
    early_steps: int = 10  # most steps of a stage that F still shapes
    late_steps: int = 50  # most steps of a later stage: where it converges slowly, the next one is the better start
    # Optima at infinity
    further: tuple[float, ...] = (3.0, 7.0)  # moves beyond the optimum at which F must also be as low, if it is after one
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
    faithful: float = 256.0  # first c of a pass from another x, in units of that of the second: it shall stay where it begins
    passes: int = 8  # upper bound on the number of passes
    restarts: int = 2  # attempts from other x, by either engine, as long as they agree
    least_restart: int = 100  # evaluations that restarts may take in any case; otherwise as many as the first attempt
    # Agreement: when "converged" may be said
    agreeing: int = 2  # attempts that must end at the best of several solutions; one more for each other one, if they are cheap


TUNING = DefaultTuning()
