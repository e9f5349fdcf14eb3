"""The numbers behind the decisions of the Newton solver and of implicit Newton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NewtonTuning:
    """Every heuristic number of these solvers; eps is the rounding error of the variables."""

    # Systems
    dense: int = 2000  # largest face with a dense Hessian: there, its rows and factor take as long as some 150 products
    singular: float = 100.0  # a pivot below this many eps times the dimension, relative to its diagonal, counts as zero
    inverted: int = 50  # most unknowns for which a product with the inverse takes less time than two triangular systems
    well_conditioned: float = 1e-6  # least pivot for that, since an inverse has larger errors
    floor: float = 1e-4  # least curvature of a modified Hessian, relative to the largest: rounding must not look like a step
    inconsistent: float = 1e-6  # relative residual of a singular system above which it has no solution
    same: float = 1e3  # products that differ by less than this many eps show the same Hessian
    formulas: int = 100  # fewest unknowns for which formulas of losses take less time than backward passes
    sparse: float = 0.25  # changes of a Hessian have a pattern if products for this part of its columns determine them
    batched: int = 40  # most unknowns for which several points are evaluated at once
    batched_elements: float = 3e5  # most unknowns times numbers in the graph of f for that: beyond, arithmetic dominates calls
    descended: float = 1e-6  # accuracy of y at the end of batched descents: two basins are further apart
    look_accuracy: float = 1e-3  # accuracy of y at sampled x, whose F only ranks them
    # The lower level
    lower_power: float = 2 / 3  # y is accurate to this power of eps, relative to y: rounding of gradients allows it
    loose_power: float = 0.5  # where rounding ends the solve, it counts as solved at this power of eps; it is also the size of
    # the move, relative to x, that shows which coordinates a bound of X fixes
    lower_steps: int = 50  # upper bound on Newton steps of one solve
    decrease: float = 1e-4  # least part of the predicted decrease in a step, below and above
    shorter: float = 0.3  # factor of a step that failed, below
    shortenings: int = 25  # after this many, there is no descent along a direction
    level: float = 0.5  # where values are lost in rounding, a step is good if it leaves this part of the slope
    rounding: float = 8.0  # values that differ by less than this many eps are equal
    escapes: int = 10  # lengths that are tried along negative curvature, to leave a saddle
    stalls: int = 2  # steps in a row without half the error, where values are lost in rounding, after which a solve ends
    contraction: float = 0.3  # an old factor is kept while it shrinks the error to this part in each step
    old_steps: float = 2.0  # most further steps with an old factor
    old_steps_by_size: float = 0.02  # and more of them for each unknown, since a new Hessian costs as many products
    quick: float = 0.1  # y may be less accurate where a step is this part of the one before: at singular Hessians none is
    telling: float = 1e-3  # a step longer than this, relative to y, that leaves no error suggests a quadratic f
    probes: int = 5  # power steps for the largest curvature, from which the first proximal step comes
    forcing: float = 0.1  # largest relative residual of conjugate gradients in a step below
    looking_steps: int = 30  # products that test for negative curvature where a Hessian takes many more
    cg_steps: int = 1000  # upper bound on products of one solve by conjugate gradients
    # Steps in x
    pairs: int = 30  # pairs that are kept: older ones belong to another curvature
    first_step: float = 0.1  # length of the first step, relative to x
    slope: float = 0.9  # part of the slope to which a step must have fallen
    trials: int = 30  # upper bound on evaluations in one search
    unsolved: int = 5  # and on those of them at which the lower level was not solved
    rests: int = 5  # steps in a row without a decrease after which x counts as stationary, at a kink
    growth: float = 4.0  # of a step that may be longer
    longest: float = 1e3  # a search ends at this multiple of its first step
    widest: float = 1e6  # largest move in one step, relative to x
    explored: int = 1  # with this many pairs for each free coordinate of x, the curvature is known without a test
    uneven: float = 100.0  # unless they differ by more than this factor: pairs then tell little about the smaller ones
    probes_x: int = 10  # moves that test the curvature at the end: one for each coordinate of x, up to this number of them
    probes_many: int = 4  # the same where there are more, along some directions: the steps have seen many others
    probe_power: float = 1 / 3  # their length, relative to x: this power of eps balances rounding and curvature
    seen: float = 1e5  # a change of the hypergradient counts if it exceeds this many rounding errors
    probe_growth: float = 1e3  # factor of a move along a coordinate that shows no such change
    probe_growths: int = 3  # most lengths that are tried
    far: float = 1e7  # x this many times further away than its start counts as infinitely far
    steady: float = 0.9  # a move does not shrink if it is at least this part of the one before
    accuracy: float = 1e-3  # of y in a step in x, in units of the relative hypergradient before it
    loosest: float = 1e-4  # the same, at most
    beyond_x: float = 1e-3  # the same, at least, in units of tol
    blurred: float = 10.0  # a relative hypergradient of fewer units of that accuracy is too inaccurate to use
    # The end
    recent: int = 4  # last points, whose smallest changes are the scales of the end: a far start may lie among them
    settled: float = 1e-3  # largest hypergradient at the end, relative to the sum of its two parts at their largest
    beyond_tol: float = 0.1  # length of the last step, in units of tol, since a memory of curvature may deceive
    negligible: float = 0.01  # times tol^2: a promised decrease of F, relative to F, that is too small for a step
    margin: float = 1e-6  # coordinates that a proximal step shifted by this part of y would free are about to move
    release: float = 0.01  # first move of x, relative to its coordinates, that frees fixed coordinates of y
    releases: int = 6  # such moves, each longer than the one before, of which the best is taken
    rounds: int = 1  # most times that this is done: each may lead to hundreds of further steps
    detour: float = 2.0  # gradients that the descent from there may take, in units of those before
    near: float = 10.0  # hypergradients from within this many tol of x enter the test at a kink
    sampled: int = 20  # most hypergradients in the test at a kink
    kink_steps: int = 200  # steps of the shortest combination of hypergradients


TUNING = NewtonTuning()
