"""One tolerance policy: when numbers are equal, errors small, and points lost, in units of the rounding error eps.

Powers of eps are relative to the size of what they measure. Values of functions have errors of some eps, so minima are known to
eps^(1/2) from values, and to eps^(2/3) from gradients, whose own errors grow on the way.
"""

from __future__ import annotations

TIGHT = 2 / 3  # power of eps: the error of a minimum that gradients allow, and the least weight beside a sum
LOOSE = 1 / 2  # power of eps: the error that values allow; where rounding ends a solve, it counts as solved
DIFFERENCE = 1 / 3  # power of eps: length of a difference quotient, relative to the point, that balances rounding and curvature
ROUNDING = 8.0  # values that differ by fewer eps are equal
SINGULAR = (
    100.0  # vectors that differ by fewer eps, relative to their norm, are equal, and pivots are zero: sums of many products
)
FAR = 1e7  # a point this many times further away than where it began, or than 1, is at infinity
STEPS = 200  # upper bound on the steps of one solve or stage, and on the descents and basins of one search
PROBES = 5  # products or moves that measure a curvature: a factor of two is good enough
PATIENCE = 4  # steps in a row without half the error, or that failed, after which only rounding is left

# Parts of a whole
SMALL = 0.1  # an error does not matter below this part of what it would disturb
NEAR = (
    0.01  # points are near below this distance, relative to their size; first steps, displacements, weights of what may matter
)
SAME = 1e-3  # results, basins and values are the same, and a gradient is zero, below this part of their size

# Programs with constraints, whose data are scaled to 1: the one meaning of feasible, active and converged
ZERO = 1e-10  # residuals, steps and changes of an objective that count as rounding: an iteration has converged
FEASIBLE = 1e-7  # violations, and excess of f over its minimum; slacks and multipliers that count as zero
EQUAL = 1e-5  # difference of two values of F, relative to 1 + |F|, up to which they agree: the root of ZERO
