"""AdaptiveSOBA: SOBA with first-order responses, a metric of measured curvature, and rates found while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meha.method.method import At, Method, Numbers, Run
from meha.methods.stochastic.frame import is_first, one_batch
from meha.methods.stochastic.saba import MemoryState, shown
from meha.problem.loaders import GroupDraw
from meha.problem.oracle import Function, Oracle
from meha.tensors.memory import available
from meha.tensors.variables import Variable
from meha.tensors.vectors import Flat

# Curvature of f in y

MEASURED, PERIOD = 16, 8
"""Steps at the start that measure curvatures, in which nothing moves. Later, one in PERIOD does, in which x and v rest."""

SLOW = 0.02
"""Weight of the newest value in slow means: of curvatures, of directions of y and v, of the share drawn, of the usual L."""

ROW = 0.25
"""The metric is at least this part of the norm of the row of the Hessian: estimates of the diagonal alone may be negative."""

FLOOR = 1e-6
"""The metric is at least this part of its largest entry, for coordinates that have no curvature."""

WRONG = 4.0
"""L above which the metric must be outdated: curvatures are then forgotten faster, in proportion."""

DIFFERENCE = 0.3
"""Differences of gradients are taken over a length of the rounding error to this power, relative to the largest y so far."""

PROBES, MIXING = 4096, (12.9898, 78.233, 43758.5453)
"""Steps after which the random signs repeat, and the factors that make them from the numbers of the step and coordinate."""

# Rates of y and v, by the agreement of successive directions

AGREEMENT = -0.1
"""The cosine that the rates of y and v aim at. Below 0, since a lag behind x is a bias, and noise averages out."""

GAIN = 0.1
"""How fast these rates follow."""

SLOWEST = 1e-4
"""Lower bound on the rates of y and v, relative to 1 / L."""

# The rate of x

FIRST = 0.02
"""The rate of x at the start, relative to the mean size of its numbers (1 for zeros)."""

WINDOW, GROWING = 14, 0.03
"""Steps in the windows whose mean directions are compared: at the start, and as a part of all steps so far."""

GOAL = 0.3
"""The cosine between successive windows above which the rate of x grows. Noise alone has 0."""

RARE_GROWTH = 4.0
"""How many times as fast the rate grows where numbers of x are drawn rarely: a window is then a pass, and y and v follow."""

RISING = 1.05
"""Where the lag of y or v is larger than in the last window by this factor, x moves too fast."""

STALE = 1.2
"""x waits while L is larger than usual by this factor, and fully at twice this factor: it has outrun the metric."""

DECAY = 0.5
"""Where the direction of x is only noise, its rate falls with the steps k as k^-DECAY."""

RETREAT = 0.25
"""Factor of the rate of x where it had to wait for more than half of a window, or where its directions grew suddenly."""

LONGEST = 2.0
"""Upper bound on the step of a coordinate of x, in units of its usual one."""

JUMP = 3.0
"""A direction of x counts as at most this times the usual one in its metric, after the first steps, in which v grows. Where
the directions of a window are longer than those of the last one by more than this, steps were too long."""

SPAN = 100
"""Steps over which the squares of the directions of x are averaged; fewer draws of a number that is drawn rarely, since y and v
move on between two of them."""

AVERAGE = 8
"""The answer is the mean of the iterates with weights of the order k^AVERAGE: about those of the last tenth of the run."""


LEVELS = {"f_y": 1, "f_yy": 1, "F_y": 0}
"""The derivatives that the memory holds, with the place of their level in ``GroupDraw.groups``."""


def is_moving(k: int) -> float:
    """1 after the first steps, 0 before."""
    return float(k >= MEASURED)


def probe_number(k: int) -> float:
    """A number that differs from step to step, and is exact in single precision."""
    return float(k % PROBES)


def measures(k: int) -> float:
    """1 in steps that measure the curvature of f, 0 in those that follow v."""
    return float(k < MEASURED or k % PERIOD == 0)


def probes(k: int) -> int:
    """The number of measurements before step k."""
    return k if k < MEASURED else MEASURED + (k - MEASURED) // PERIOD


def draws_signs(k: int) -> float:
    """1 in every other measurement, that of the diagonal of the Hessian, 0 in those of its largest eigenvalue."""
    return measures(k) * (probes(k) % 2)


def curvature_weight(k: int) -> float:
    """Weight of the newest curvature in a plain mean."""
    return 1 / (probes(k) // 2 + 1)


def window_steps(k: int) -> float:
    """The least length of a window that ends in step k."""
    return max(WINDOW, GROWING * (k - MEASURED))


def moment_weight(k: int) -> float:
    """Weight of the newest direction in a plain mean."""
    return 1 / (max(k - MEASURED, 0) + 1)


def largest_square(k: int) -> float:
    """The square of JUMP; nothing is limited while v has just begun."""
    return JUMP**2 if k >= 2 * MEASURED else math.inf


def answer_weight(k: int) -> float:
    """Weight of the newest iterate in the answer."""
    return min(1.0, (AVERAGE + 1) / (max(k - MEASURED, 0) + AVERAGE))


def signs(number: Any, like: Tensor) -> Tensor:
    """Return a vector of 1 and -1 that depends on a number alone, so that checkpoints and compiled steps need no generator."""
    by_coordinate, by_step, spread = MIXING
    i = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    step = torch.as_tensor(number, dtype=torch.float64, device=like.device)
    mixed = torch.sin(i * by_coordinate + step * by_step) * spread
    return torch.where(mixed - torch.floor(mixed) < 0.5, -1.0, 1.0).to(like.dtype)


def cosine(a: Tensor, b: Tensor, metric: Tensor) -> Tensor:
    """Return the cosine between two directions in the inner product <a, b / metric>; 0 if one of them is zero."""
    sizes = (a * a / metric).sum() * (b * b / metric).sum()
    return (a * b / metric).sum() / (sizes.sqrt() + torch.finfo(a.dtype).tiny)


@dataclass
class AdaptiveSOBAState(MemoryState):
    """x and y are the answer, a weighted mean of the iterates.

    Attributes:
        point: x and y of the iteration, as vectors.
        system: as vectors of the size of y: v, the estimated ``diagonal`` and squared ``rows`` of the Hessian, the
            eigenvector of its largest eigenvalue in the metric, and the mean directions of y and v.
        moments: as vectors of the size of x: the mean ``square`` of its directions, their ``sum`` in this window, and that in
            the window ``before``.
        numbers: rates, measured constants, and what the present window has seen.
        memory: the last derivatives on every group of examples, their sums, and which groups were seen; None without groups.
    """

    memories: ClassVar[tuple[str, ...]] = ("memory",)

    point: Variable
    system: Variable
    moments: Variable
    numbers: Variable
    memory: Variable | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptiveSOBA(Method):
    """The default for tensors and batches: a single loop with first-order gradients, and no number to choose.

    It takes the three directions of :class:`~meha.stochastic.SOBA`, with products of second derivatives by differences of
    gradients, whose length rounding determines. With P a diagonal metric of measured curvature, L the largest eigenvalue of
    P^-1 f_yy, D the root mean square of the directions of x, and s the share of its numbers that a batch touches,

        y <- y - r_y / L P^-1 f_y
        v <- v - r_v / L P^-1 (f_yy [v] + F_y)                     so that v -> -f_yy^-1 F_y
        x <- proj_X( x - a / s D^-1 (F_x + f_xy [v]) )

    P comes from products with random signs and L from power steps, one of them in each eighth step, in which x and v rest. The
    rates r_y and r_v, at most 1, follow the agreement of successive directions: they agree while y or v lag behind x, and
    disagree where steps are too long for the noise. The rate a grows while the mean directions of x in successive windows
    agree, and y and v do not lag more and more; it falls where they do not agree, or where directions grow, and in windows
    that hold noise alone as k^-1/2. x waits while L rises, since it has then outrun the metric. The answer is a mean of the
    iterates in which the last tenth of the run counts most. Multiplying F or f by a number changes nothing but rounding.

    A step costs 2 gradients of f and 1 of F. With batches of ``meha.loaders.Indices(..., groups=True)``, the directions of y
    and v are corrected by the last derivatives on every group, as in :class:`~meha.stochastic.SABA`, in proportion to how well
    these predict the present ones. Where this memory does not fit, or in several processes, the run goes on without it;
    ``solution.report`` says so.

    The lower level must be strongly convex in y near its solutions, smooth and without a set Y. x may have any set. x and y
    are tensors, or dicts and lists of them. Modules, and lower variables that belong to the batch, such as the heads of its
    tasks, go to :class:`~meha.StochasticMEHA`.

    The numbers of a step: ``upper`` F and ``lower`` f on the batch before the step, ``d_x`` the norm of the direction of x
    (0 where x rests), ``rate`` a.

    >>> import meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(2, upper=4, lower=8, groups=True)
    >>> solution = meha.solve(problem, zero, zero, meha.stochastic.AdaptiveSOBA(), batches=batches, max_steps=600)
    >>> print(f"{float(solution.x):.3f}")
    1.000
    """

    refuses_nonsmooth: ClassVar[str] = "it follows the linear system of the implicit function theorem"
    refuses_y_set: ClassVar[str] = "the implicit function theorem holds in the interior of Y only"
    refuses_shards: ClassVar[str] = "it works on x and y as whole vectors"
    open_ended: ClassVar[bool] = True

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> AdaptiveSOBAState:
        for variable in (x, y):
            if variable.has_modules:
                raise TypeError(
                    f"{variable.argument}: {self.name} takes tensors, since it differentiates f at points beside the iterate,"
                    " which a module cannot be at as well; use StochasticMEHA()."
                )
        here_x, here_y = (Flat(level).read() for level in (x, y))
        here_x, here_y = (here.to(torch.promote_types(here.dtype, torch.float32)) for here in (here_x, here_y))
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(len(here_y), generator=generator, dtype=torch.float64).to(here_y)
        usual = here_x.abs().mean()
        ones = {"rate": FIRST * torch.where(usual > 0, usual, 1.0), "rate_y": 1.0, "rate_v": 1.0}
        zeros = ["L", "usual", "reach", "share", "steps", "energy", "last_energy", "open", "waited"]
        zeros += ["lag_y", "lag_v", "last_lag"]
        zeros += [name + end for name in LEVELS for end in ("_covariance", "_variance")]
        numbers = {**ones, **dict.fromkeys(zeros, 0.0)}
        blank = {name: torch.zeros_like(here_y) for name in ("v", "diagonal", "rows", "mean_y", "mean_v")}
        return AdaptiveSOBAState(
            x,
            y,
            settled=False,  # the answer is a mean, whose steps become short by themselves
            point=Variable.of({"x": here_x, "y": here_y}, "point"),
            system=Variable.of({**blank, "eigenvector": start / torch.linalg.vector_norm(start)}, "system"),
            moments=Variable.of({name: torch.zeros_like(here_x) for name in ("square", "sum", "before")}, "moments"),
            numbers=Variable.of({n: torch.as_tensor(number).to(here_y).clone() for n, number in numbers.items()}, "numbers"),
        )

    def step(self, oracle: Oracle, state: AdaptiveSOBAState, at: At) -> Numbers:
        batch = at.batch if isinstance(at.batch, GroupDraw) else one_batch(self.name, at.batch)
        if at.rare(is_first) and isinstance(batch, GroupDraw) and oracle.group is None:
            state.memory = allocate(state.point.value["y"], batch.groups)
        numbers, system, moving = state.numbers.value, state.system.value, at.of(is_moving)
        follows = 1 - at.of(measures)
        found = self._derivatives(oracle, state, batch, at)
        metric = self._measure(state, found, at)
        if state.memory is not None:
            for name, level in LEVELS.items():
                found[name] = correct(state, name, found[name], batch.group[level], follows if name == "f_yy" else 1.0)
        for name, variable, direction, moves in (
            ("y", state.point.value["y"], found["f_y"], moving),
            ("v", system["v"], found["f_yy"] + found["F_y"], follows),
        ):
            rate, mean = numbers[f"rate_{name}"], system[f"mean_{name}"]
            variable.sub_(moves * rate / numbers["L"] * direction / metric)
            agreement = cosine(mean, direction, metric)
            rate.copy_((rate * torch.exp(moves * GAIN * (agreement - AGREEMENT))).clamp(SLOWEST, 1.0))
            numbers[f"lag_{name}"].mul_(1 - moves / WINDOW).add_(agreement * (moves / WINDOW))
            mean.add_((direction - mean) * (SLOW * (moves if name == "v" else 1.0)))
        self._move_x(oracle, state, found["F_x"] + found["f_xy"], follows, at)
        weight = at.of(answer_weight)
        for flat in (Flat(state.x), Flat(state.y)):
            mean, iterate = flat.read().to(numbers["L"].dtype), state.point.value[flat.variable.argument]
            flat.write((mean + weight * (iterate - mean)).to(flat.dtype))
        d_x = follows * torch.linalg.vector_norm(found["F_x"] + found["f_xy"])
        return {"upper": found["upper"], "lower": found["lower"], "d_x": d_x, "rate": numbers["rate"].clone()}

    def _derivatives(self, oracle: Oracle, state: AdaptiveSOBAState, batch: Any, at: At) -> dict[str, Tensor]:
        """Return F, f, their gradients, and the product of f_yy with the unit vector ``probe``.

        In steps that do not measure curvature the probe is v / |v|; f_xy [v] and f_yy [v] are products with it, times |v|.
        """
        flat_x, flat_y, point, system = Flat(state.x), Flat(state.y), state.point.value, state.system.value
        dtype, reach = point["y"].dtype, state.numbers.value["reach"]
        torch.maximum(reach, torch.linalg.vector_norm(point["y"]), out=reach)
        length = flat_y.eps**DIFFERENCE * torch.where(reach > 0, reach, 1.0)
        x = flat_x.at(point["x"].to(flat_x.dtype))

        def gradients(function: Function, moved: Tensor, *levels: str) -> tuple[Tensor, list[Tensor]]:
            y = flat_y.at(moved.to(flat_y.dtype))
            wrt = tuple({"x": x, "y": y}[level] for level in levels)
            (value,), found = oracle.gradients(wrt, [(1.0, function, x, y)], batch)
            flats = {"x": flat_x, "y": flat_y}
            return value, [flats[level].join(leaves).to(dtype) for level, leaves in zip(levels, found, strict=True)]

        lower, (f_x, f_y) = gradients(oracle.lower, point["y"], "x", "y")
        upper, (F_x, F_y) = gradients(oracle.upper, point["y"], "x", "y")
        way = torch.linalg.vector_norm(system["v"])
        sign = signs(at.of(probe_number), f_y) / math.sqrt(f_y.numel())
        measuring, signed = (torch.as_tensor(at.of(which), device=f_y.device) > 0 for which in (measures, draws_signs))
        probe = torch.where(measuring, system["eigenvector"], system["v"] / torch.where(way > 0, way, 1.0))
        probe = torch.where(signed, sign, probe)
        _, (ahead_x, ahead_y) = gradients(oracle.lower, point["y"] + length * probe, "x", "y")
        product = (ahead_y - f_y) / length
        products = {"f_xy": (ahead_x - f_x) / length * way, "f_yy": product * way, "product": product}
        return {"upper": upper, "lower": lower, "F_x": F_x, "F_y": F_y, "f_y": f_y, "probe": probe, **products}

    def _measure(self, state: AdaptiveSOBAState, found: dict[str, Tensor], at: At) -> Tensor:
        """Move the estimates of curvature by one product; return the metric P."""
        numbers, system, moving = state.numbers.value, state.system.value, at.of(is_moving)
        L, tiny = numbers["L"], torch.finfo(numbers["L"].dtype).tiny
        measuring, signed = (torch.as_tensor(at.of(which), device=L.device) > 0 for which in (measures, draws_signs))
        forget = (SLOW * (L / WRONG).clamp_min(1.0)).clamp_max(0.5)
        weight = torch.where(signed, torch.maximum(forget, torch.as_tensor(at.of(curvature_weight)).to(forget)), 0.0)
        probe, product = found["probe"], found["product"]
        system["diagonal"].lerp_(len(probe) * probe * product, weight)
        system["rows"].lerp_(len(probe) * product * product, weight)
        metric = torch.maximum(system["diagonal"], ROW * system["rows"].sqrt())
        metric = metric + FLOOR * metric.max()
        metric = torch.where(metric.max() > 0, metric, 1.0)

        def growth(vector: Tensor, image: Tensor) -> Tensor:
            return ((image * image / metric).sum() / ((vector * vector * metric).sum() + tiny)).sqrt()

        kept = torch.where(measuring, moving * (1 - forget), 1.0) * L  # L is forgotten by its own measurements alone
        L.copy_(torch.where(signed, L, torch.maximum(growth(probe, product), kept)).clamp_min(tiny))
        image = product / metric
        turned = image / (torch.linalg.vector_norm(image) + tiny)
        system["eigenvector"].copy_(torch.where(measuring & ~signed, turned, system["eigenvector"]))
        rise = L.log() - numbers["usual"]
        numbers["usual"].add_(torch.where(torch.as_tensor(moving) > 0, SLOW * rise.clamp_max(0.5), rise))
        return metric

    def _move_x(self, oracle: Oracle, state: AdaptiveSOBAState, direction: Tensor, moving: Any, at: At) -> None:
        """Take a step of x where it moves, and change its rate at the end of a window."""
        numbers, moments = state.numbers.value, state.moments.value
        tiny, domain = torch.finfo(direction.dtype).tiny, oracle.problem.x_set
        touched = direction != 0
        share, now, newest = numbers["share"], touched.to(direction.dtype).mean(), at.of(moment_weight)
        newest = torch.as_tensor(newest).to(share)
        weight = moving * torch.where(share > 0, newest.clamp_min(SLOW), 1.0) * (now > 0)
        share.lerp_(now, weight)
        often = share.clamp_min(1 / len(direction))
        square, known = moments["square"], moments["square"] > 0
        limit = torch.where(known, square * torch.as_tensor(at.of(largest_square)).to(square), math.inf)
        limited = torch.minimum(direction * direction, limit)
        weight = torch.maximum(newest / often, 1 / (1 + SPAN * often**2)).clamp_max(1.0)
        weight = moving * touched * torch.where(known, weight, 1.0)
        square.lerp_(limited, weight)
        root = (square.mean().expand_as(square) if domain is not None and not domain.coordinatewise else square).sqrt() + tiny

        gate = moving * (2 - torch.exp(numbers["L"].log() - numbers["usual"]) / STALE).clamp(0.0, 1.0)
        x, flat = state.point.value["x"], Flat(state.x)
        pace = gate * numbers["rate"] / often
        moved = x - pace * (direction / root).clamp(-LONGEST, LONGEST)
        if domain is not None:  # what the set holds back must not count as agreement
            leaves = flat.split(moved.to(flat.dtype).clone())
            oracle.project(state.x.value, leaves, 1.0)
            moved = flat.join(leaves).to(x.dtype)
            direction = torch.where(pace > 0, (x - moved) / pace * root, 0.0)
        x.copy_(moved)

        moments["sum"].add_(moving * direction)
        numbers["steps"].add_(moving)
        numbers["open"].add_(gate)
        least = torch.as_tensor(at.of(window_steps)).to(share)
        rare = share < 0.5
        due = numbers["steps"] >= torch.maximum(least, torch.where(rare, 1 / often, 0.0))
        agreement = cosine(moments["sum"], moments["before"], square + tiny)
        # How long the sum of a window is beside one of independent directions without a mean: 1 where there is only noise,
        # whose windows even disagree where examples are drawn without replacement. Rare numbers have one direction.
        energy = numbers["energy"]
        inverse = torch.where(square > 0, 1 / square, 0.0)
        energy.add_(moving * (direction * direction * inverse).sum())
        signal = ((moments["sum"] * moments["sum"] * inverse).sum() / (energy + tiny) - 1).clamp(0.0, 1.0)
        signal = torch.where(rare, 1.0, signal)
        # Directions of n independent numbers agree by n^-1/2 by chance. Where y or v lag more and more, x moves too fast: the
        # agreement of its own directions tells too late, since they answer through y and v.
        surplus = (agreement - GOAL - (1 - signal) * len(direction) ** -0.5).clamp_min(0.0)
        lag = torch.maximum(numbers["lag_y"], numbers["lag_v"]).clamp_min(0.0)
        growth = torch.where(lag > RISING * numbers["last_lag"], -lag, torch.where(rare, RARE_GROWTH, 1.0) * surplus)
        trend = torch.where(agreement > GOAL, growth, agreement - GOAL)
        decay = DECAY * numbers["steps"] * newest
        changed = torch.exp(signal * trend - (1 - signal) * decay)
        opened = numbers["open"] / numbers["steps"].clamp_min(1.0)
        retreat = torch.where(numbers["waited"] > 0.5, 1.0, RETREAT)
        # Oscillations within a window look like noise, but grow where steps are too long for the curvature of h.
        mean, last = energy / numbers["steps"].clamp_min(1.0), numbers["last_energy"]
        unstable = (last > 0) & (mean > JUMP**2 * last)
        factor = torch.where(unstable, RETREAT, torch.where(opened > 0.5, changed, retreat))
        compared = due & (moments["before"] != 0).any()
        numbers["rate"].mul_(torch.where(compared, factor, 1.0))
        last.copy_(torch.where(due, mean, last))
        numbers["last_lag"].copy_(torch.where(due, lag, numbers["last_lag"]))
        numbers["waited"].copy_(torch.where(compared, 1 - opened, numbers["waited"]))
        moments["before"].copy_(torch.where(due, moments["sum"], moments["before"]))
        for total in (moments["sum"], numbers["steps"], numbers["open"], energy):
            total.mul_(~due)

    def report(self, run: Run) -> Mapping[str, str]:
        state = run.state
        numbers = {name: float(number) for name, number in state.numbers.value.items()}
        if run.k <= MEASURED:
            return {}
        course = f"rate of x {numbers['rate']:.2g}; of y {numbers['rate_y']:.2g} / L, of v {numbers['rate_v']:.2g} / L"
        lines = {"course": course}
        if state.memory is not None:
            lines["memory"] = f"derivatives on every group of examples, {shown(state.bytes)}"
        elif isinstance(run.batch, GroupDraw):  # groups were asked for, so that the run must say why they do not help
            needed = size(state.point.value["y"], run.batch.groups)
            reason = f"{shown(needed)} do not fit" if run.group is None else "those of other processes differ"
            lines["memory"] = f"none of the derivatives on groups of examples, because {reason}"
        return lines


def allocate(like: Tensor, groups: tuple[int, int]) -> Variable | None:
    """Make the memory for these numbers of groups of the upper and of the lower examples; None where it does not fit."""
    left = available(like.device)
    if left is not None and size(like, groups) > left / 2:  # objectives need some as well
        return None
    memory = {}
    for name, level in LEVELS.items():
        memory[name], memory[f"{name}_seen"] = like.new_zeros(groups[level], len(like)), like.new_zeros(groups[level])
        memory[f"{name}_sum"] = torch.zeros_like(like)
    return Variable.of(memory, "memory")


def size(like: Tensor, groups: tuple[int, int]) -> int:
    """Return the bytes of the rows of the memory."""
    return sum(groups[level] for level in LEVELS.values()) * like.nbytes


def correct(state: AdaptiveSOBAState, name: str, new: Tensor, group: Tensor, valid: Any) -> Tensor:
    """Return a derivative without the part of its noise that the last one on this group predicts, and remember it.

    That is new - w (row - mean of the rows), with w in [0, 1] from a regression on recent steps, so that outdated rows do no
    harm; 0 where the group was not seen before. Nothing is remembered where ``valid`` is 0, and the derivative is another one.
    """
    assert state.memory is not None
    memory, numbers, row = state.memory.value, state.numbers.value, group.reshape(1)
    table, total, seen = memory[name], memory[f"{name}_sum"], memory[f"{name}_seen"]
    old, known = table.index_select(0, row)[0], seen.index_select(0, row)[0]
    apart = known * (old - total / seen.sum().clamp_min(1.0))
    covariance, variance = numbers[f"{name}_covariance"], numbers[f"{name}_variance"]
    for mean, value in ((covariance, (new * apart).sum()), (variance, (apart * apart).sum())):
        mean.lerp_(value, SLOW * known * valid)
    weight = (covariance / (variance + torch.finfo(new.dtype).tiny)).clamp(0.0, 1.0)
    total.add_(valid * (new - known * old))
    table.index_copy_(0, row, (old + valid * (new - old))[None])
    seen.index_copy_(0, row, known.clamp_min(valid)[None])
    return new - weight * apart
