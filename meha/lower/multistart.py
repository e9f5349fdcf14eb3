"""Multistart for the lower level at one x: descents of f + g from many starts show whether y is its global minimum.

A lower value proves that y is no solution. That none is found is evidence, which grows with the number of descents: after n of
them with w different values at their ends, w (n - 1) / (n - w - 2) values are to be expected in all (the Bayesian estimate of
Boender and Rinnooy Kan, 1987, for starts and basins of which nothing else is known).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meha.lower.curvature import flatten
from meha.lower.flat_problem import FlatProblem, LowerPoint
from meha.lower.newton_tuning import TUNING
from meha.lower.quadratic_model import QuadraticModel, in_same_quadratic
from meha.numerics.limited_memory import LimitedMemory
from meha.numerics.tolerances import FAR, NEAR, ROUNDING, STEPS
from meha.problem.oracle import BudgetError
from meha.tensors.vectors import vector_norm

NEARER = 0.1  # a descent may join a basin when its distance fell by this factor
JOINED = 1e-4  # distance, relative to y, at which two points are the same; difference of slopes, relative to what descents gain
EQUAL = 1e-9  # difference of two values, relative to what descents gain, at which they are the same
NEAREST, FURTHEST = 0.3, 3.0  # distances of random starts from y, where Y does not bound them: from the first, relative to y,
# to the second, relative to y or to where F or x could draw it
RUNGS = 6  # number of distances between them
ENDING = 0.1  # the search ends when fewer further values than this are to be expected
HITS = 20  # and when as many random starts led to the lowest basin: one half as wide is missed with a chance below 0.1 %


class Evidence(NamedTuple):
    """What the descents at one x found.

    Attributes:
        starts: the number of descents.
        values: the number of basins they met that differ in height, at this x or at others.
        excess: by how much f + g at y is larger than the least of them; 0 if y is the lowest.
        above: by how much the next basin is higher than the lowest; NaN if there is none.
        certain: whether hardly any further basins are to be expected.
    """

    starts: int
    values: int
    excess: float
    above: float
    certain: bool

    def __str__(self) -> str:
        descents = f"{self.starts} descents of the lower level from other starts"
        if self.excess:
            return f"{descents} ended in {self.values} basins; y is {self.excess:.1e} above the lowest"
        if self.values == 1:
            return f"{descents} found no lower value"
        return f"{descents} ended in {self.values} basins, none below y, the next {self.above:.1e} above it"


class StartingPoint(NamedTuple):
    """The start of a descent: y, the distance from the verified y within which it may join that basin, whether y is random."""

    y: Tensor
    reach: float
    random: bool


class LowerMultistart:
    """Descents of f + g at the present x, and the basins that they met.

    Args:
        levels: the problem; x is where its variable is.
        y: the point to verify; ``point`` is f + g there.
        pairs: what is known of the curvature near y.
        t: a plain step.
        scale: the size of y.
        tolerance: the error of x; a difference that vanishes when x changes by that is none.
        slack: the difference of f + g that the error of y may cause.
        solved: whether y is a local minimum at this x, as far as is known.
        model: f around a solved y, if it seems quadratic, and g and Y are convex; dropped where a point contradicts it.

    Attributes:
        basins: the distinct ends of the descents, in the order in which they were met; the first is y, if it is solved.
        starts: the number of descents.
        heights: the values at which those from random starts ended.
        between: starts in the middle of two basins.
        origins: the first starts, where they were drawn before the search.
    """

    def __init__(
        self,
        levels: FlatProblem,
        y: Tensor,
        pairs: LimitedMemory,
        t: float,
        scale: float,
        tolerance: float,
        *,
        slack: float = 0.0,
        solved: bool,
        model: QuadraticModel | None = None,
    ) -> None:
        self.levels, self.pairs, self.scale, self.tolerance, self.slack = levels, pairs, scale, tolerance, slack
        self.t = min(t, levels.oracle.longest_prox)
        self.generator = torch.Generator().manual_seed(0)
        self.point = levels.lower(y)
        self.basins = [self.point] if solved else []
        self.model = model if solved else None
        self.starts = 0
        self.gains: list[float] = []
        self.heights: list[float] = []
        self.between: list[Tensor] = []
        self.origins: list[StartingPoint] = []
        self.low, self.high = levels.y_bounds()

    # Starts

    def draw(self, given: Iterable[Tensor], random: int) -> list[StartingPoint]:
        """The first starts: displaced y, the ``given`` points, corners of Y, and some random points."""
        near = [*self.close(), *given, *self.corners()]
        self.origins = [StartingPoint(start, self._reach(start), random=False) for start in near]
        self.origins += [
            StartingPoint(start, self._reach(start), random=True) for start in itertools.islice(self.random(), random)
        ]
        return self.origins

    def _reach(self, start: Tensor) -> float:
        return NEARER * vector_norm(start - self.point.z)

    def close(self) -> Iterable[Tensor]:
        """Two points beside y, on opposite sides, from which descents leave a maximum or a saddle."""
        d = self._random(self.point.z)
        yield from (self.levels.inside(self.point.z + step * NEAR * self.scale * d / vector_norm(d)) for step in (1.0, -1.0))

    def corners(self) -> Iterable[Tensor]:
        """The centre and two opposite corners of Y, if it is a bounded box."""
        low, high = self.low, self.high
        if bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            yield from (low + share * (high - low) for share in (0.5, 0.0, 1.0))

    def random(self) -> Iterator[Tensor]:
        """Random points in opposite pairs: between the bounds of Y in bounded coordinates, around y in the others."""
        y, low, high = self.point.z, self.low, self.high
        bounded = torch.isfinite(low) & torch.isfinite(high)
        free = not bool(bounded.any())
        rung = self._radii[1] / self._radii[0]
        for radius in itertools.cycle(self._radii):
            direction, power = self._random(y), float(torch.rand(1, generator=self.generator, device="cpu"))
            away = radius * rung**-power / vector_norm(direction) * direction
            share = torch.rand(len(y), generator=self.generator, dtype=torch.float64, device="cpu").to(y)
            # Antithetic pairs: a basin on one side of y is not missed because all draws went to the other.
            for d, s in ((away, share), (-away, 1 - share)):
                yield self.levels.inside(y + d if free else torch.where(bounded, low + s * (high - low), y + d))

    @cached_property
    def _radii(self) -> list[float]:
        """Distances of random starts from y, up to where F would draw y, or x could move it."""
        curvatures, F_y = self.levels.curvatures, vector_norm(self.levels.upper(self.point.z)[2])
        wanted = F_y / curvatures["F_yy"] if curvatures["F_yy"] else 0.0  # the Newton step of F
        # By the implicit function theorem, dy/dx is of the size f_xy / f_yy.
        moved = curvatures.get("f_xy", 0.0) * vector_norm(flatten(self.levels.x)) / (curvatures["f_yy"] or math.inf)
        least = NEAREST * self.scale
        most = FURTHEST * max([self.scale, *(reach for reach in (wanted, moved) if math.isfinite(reach))])
        return [least * (most / least) ** (i / (RUNGS - 1)) for i in range(RUNGS)]

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(like)

    # Descents

    def descend(self, start: Tensor) -> LowerPoint | None:
        """Descend from a start, and record the basin at the end; None if the descent does not converge."""
        end = self._descend(self.levels.lower(start))
        if end is not None:
            self.starts += 1
            self._note(end)
        return end

    def joined(self, fallen: Iterable[float] | None) -> None:
        """Record descents from the first starts that are made already: the decrease of each, NaN if it did not end at y."""
        left: list[StartingPoint] = []  # to be descended from in run(), which finds out where they lead
        if fallen is None:
            return
        for origin, gain in zip(self.origins, fallen, strict=True):
            if math.isnan(gain):
                left.append(origin)
                continue
            self.starts += 1
            self.gains.append(gain)
            self.heights += [self.point.value] if origin.random else []
        self.origins = left

    def _descend(self, point: LowerPoint) -> LowerPoint | None:
        """Descend by quasi-Newton steps, until the end or until a known basin is certain to be the end."""
        if self.model is not None and self.model.matches(point, self.point):
            self.gains.append(point.value - self.point.value)
            return self.basins[0]  # a convex quadratic f has one basin: the descent need not be made
        self.model = None
        levels, pairs, start = self.levels, self.pairs.copy(), point.z
        descent = levels.descent(levels.lower, pairs, self.t)
        first, bounds = point.value, [NEARER * vector_norm(start - basin.z) for basin in self.basins]
        cleared = False
        for _ in range(STEPS):
            if not point.finite or vector_norm(point.z - start) > FAR * max(self.scale, vector_norm(start)):
                return None
            for basin, bound in zip(self.basins, bounds, strict=False):
                if vector_norm(point.z - basin.z) <= bound and in_same_quadratic(point, basin):
                    self.gains.append(first - basin.value)
                    return basin
            d, remembered = descent.direction(point)
            promise = -float(descent.residual(point).r @ d)
            if promise <= point.noise:
                break
            new = descent.step(point, d, remembered)
            if new is None:
                if cleared or not remembered:  # the plain step failed, too: only rounding is left
                    break
                pairs.clear()  # the memory may be of another basin: try plain steps before giving up
                cleared = True
                continue
            point, cleared = new, False
        else:
            if point.value >= self.point.value:
                return None  # it did not converge, and shows nothing below y
        self.gains.append(first - point.value)
        return point

    def _note(self, end: LowerPoint) -> None:
        """Record the end of a descent as a basin unless it is a known one, whose lowest point is then kept."""
        for i, basin in enumerate(self.basins):
            if end is basin:
                return
            if vector_norm(end.z - basin.z) <= JOINED * self.scale:
                if end.value < basin.value:
                    self.basins[i] = end
                return
            if abs(end.value - basin.value) <= self.equal(end) and self._connected(end, basin):
                return
        nearest = min((basin.z for basin in self.basins), key=lambda z: vector_norm(end.z - z), default=end.z)
        if vector_norm(end.z - nearest) > NEAREST * self.scale:  # between two basins there may be a third
            middle, d = 0.5 * (end.z + nearest), self._random(end.z)
            self.between.append(self.levels.inside(middle + NEAR * self.scale * d / vector_norm(d)))
        self.basins.append(end)

    def _connected(self, a: LowerPoint, b: LowerPoint) -> bool:
        """Whether two ends of the same height lie in one flat basin, i.e. their midpoint has that height, too."""
        middle = self.levels.lower(self.levels.inside(0.5 * (a.z + b.z)))
        return abs(middle.value - a.value) <= self.equal(a)

    def mix(self) -> None:
        """Recombine basins: put single coordinates of others into the lowest, and descend from each combination that is lower.

        Where f is a sum over coordinates, this finds the best of all combinations.
        """
        if not 1 < len(self.point.z) <= TUNING.batched:
            return
        for other in list(self.basins):
            best = self.lowest
            for i in range(len(best.z)):
                z = best.z.clone()
                z[i] = other.z[i]
                if abs(float(z[i] - best.z[i])) <= JOINED * self.scale:
                    continue
                point = self.levels.lower(self.levels.inside(z))
                if point.finite and point.value < best.value - self.equal(point):
                    end = self.descend(point.z)
                    best = end if end is not None and end.value < best.value else best

    # Evidence

    @property
    def lowest(self) -> LowerPoint:
        """The basin of least value."""
        return min(self.basins, key=lambda basin: basin.value)

    def equal(self, point: LowerPoint) -> float:
        """The difference below which a value counts as equal to that at a point."""
        return ROUNDING * point.noise + EQUAL * self._gain

    @property
    def _gain(self) -> float:
        """The median decrease of a descent."""
        gains = sorted(self.gains)
        return gains[len(gains) // 2] if gains else 0.0

    def excess(self, point: LowerPoint) -> float:
        """By how much f + g at y exceeds that at a point; 0 if it does not, or if the error of x may explain it."""
        difference = self.point.value - point.value
        # What the error of x may change in the difference, to first order.
        turn = vector_norm(self.levels.pull(self.point, point)) * self.tolerance
        return difference if difference > self.equal(point) + turn + self.slack else 0.0

    def same(self, a: LowerPoint, b: LowerPoint) -> bool:
        """Whether two basins have the same height at this x and, as their gradients in x show, at x nearby."""
        if abs(a.value - b.value) > self.equal(b):
            return False
        coupling = self.levels.curvatures.get("f_xy", 0.0)
        blur = 2 * math.sqrt(self.levels.eps) * self.scale * coupling  # the slopes' error, from that of the ends
        turn = (vector_norm(self.levels.pull(a, b)) - blur) * (vector_norm(flatten(self.levels.x)) or 1.0)
        return turn <= JOINED * self._gain + ROUNDING * (a.noise + b.noise)

    @property
    def values(self) -> int:
        """The number of basins that differ in height, at this x or nearby."""
        kinds: list[LowerPoint] = []
        for basin in self.basins:
            if not any(self.same(basin, kind) for kind in kinds):
                kinds.append(basin)
        return len(kinds)

    @property
    def expected(self) -> float:
        """The number of further values to be expected (Boender and Rinnooy Kan, 1987)."""
        n, w = self.starts, self.values
        return w * (n - 1) / (n - w - 2) - w if n > w + 2 else math.inf

    @property
    def hits(self) -> int:
        """The number of random starts that ended in the lowest basin."""
        least = self.lowest.value + self.equal(self.lowest)
        return sum(height <= least for height in self.heights)

    @property
    def _enough(self) -> bool:
        return self.expected < ENDING or (bool(self.basins) and self.hits >= HITS)

    def run(self, given: Iterable[Tensor], allowed: int, *, most: int = STEPS) -> Evidence:
        """Descend from points beside y, the ``given`` points, corners of Y and random points until the evidence is enough.

        Args:
            allowed: gradients of f after which no further descent begins.
            most: the number of basins with which the search ends.
        """
        levels, tries, mixed = self.levels, 0, 0
        if not self.origins and not self.starts:
            self.draw(given, 0)
        more = (StartingPoint(start, 0.0, random=True) for start in self.random())
        with levels.until(levels.spent + allowed), contextlib.suppress(BudgetError):
            for start, _, random in itertools.chain(self.origins, more):
                if len(self.basins) >= most or (random and (tries >= STEPS or self._enough)):
                    break
                end = self.descend(start)
                if not random:
                    continue
                self.heights += [] if end is None else [end.value]
                tries += 1
                while self.between:
                    self.descend(self.between.pop())
                if len(self.basins) > 1 and tries > 2 * mixed + 1:
                    self.mix()
                    mixed = tries - 1
        lowest = self.lowest if self.basins else self.point
        excess = self.excess(lowest) if lowest is not self.point else 0.0
        above = min((v.value - lowest.value for v in self.basins if not self.same(v, lowest)), default=math.nan)
        # Where the budget ended before, half of the evidence will do: a further value is less likely than none.
        certain = self.expected < 0.5 or (bool(self.basins) and self.hits >= HITS // 2)
        return Evidence(self.starts, self.values, excess, above, certain)
