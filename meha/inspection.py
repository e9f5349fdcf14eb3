"""check(): a look at a problem before a run, with what to mend."""

from __future__ import annotations

import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meha._lower import solve_lower
from meha._oracle import JOINT_LIMIT, Counts, Function, Oracle
from meha._variables import Leaves, Variable, copy_, inner, norm, subtract
from meha.loaders import random_states, set_random_states
from meha.problem import Objective, Problem
from meha.theory import Probe

__all__ = ["Report", "check"]

SLOW = 0.1
"""Seconds for a gradient, beyond which, as with networks, less is looked at."""

UNEVEN = 1e4
"""Gradients of coordinates of x that differ by more than this factor count as badly scaled."""

HUGE = 1e8
"""Values and gradients beyond this are pointed out."""

KINK = 1e-3
"""A jump of a gradient counts as a kink from this on, relative to its largest size on a line."""


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What :func:`check` found; ``print`` it. It is true if nothing speaks against a run.

    Objectives and variables are named as in the formulas: ``"F in x"`` is upper as a function of x, ``"f in y"`` lower.

    Attributes:
        findings: pairs of a topic and what was found about it.
        warnings: what should be mended or known before a run, a sentence or two each, with the remedy.
        upper, lower: F and f at the start; NaN where they have no value.
        depends: by ``"F on x"``, ``"F on y"``, ``"f on x"``, ``"f on y"``, ``"g on x"``, whether the value changes with it.
        unused: leaves that neither level uses.
        deviations: of gradients from finite differences, relative and beyond rounding, by ``"F in x"`` and so on; with g,
            ``"f in x"`` is f + g.
        repeatable: whether the objectives have the same values when called again; None where that was not looked at.
        kinks: the jump of the gradient, relative to its largest size nearby, by ``"f in y"`` and so on, where one was met.
        convexity: of f in y: ``"strongly convex"``, ``"convex with flat directions"``, ``"non-convex"``, ``"linear"`` or
            ``"unknown"``, as far as it was seen.
        curvature: smallest and largest curvature of f in y seen.
        sizes: root mean squares of x and y, and norms of the gradients F_x, F_y, f_x, f_y at the start.
        method: what ``solve`` takes by default.
        counts: gradients that the check took.
        seconds: for a gradient of F and of f.
    """

    findings: tuple[tuple[str, str], ...]
    warnings: list[str]
    upper: float
    lower: float
    depends: Mapping[str, bool]
    unused: list[str]
    deviations: Mapping[str, float]
    repeatable: bool | None
    kinks: Mapping[str, float]
    convexity: str
    curvature: tuple[float, float]
    sizes: Mapping[str, float]
    method: str
    counts: Counts
    seconds: tuple[float, float]

    @property
    def ok(self) -> bool:
        """Whether there are no warnings."""
        return not self.warnings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"Report({len(self.warnings)} warnings, f {self.convexity} in y)"

    def __str__(self) -> str:
        n = len(self.warnings)
        lines = ["check: nothing speaks against a run" if self.ok else f"check: {n} warning{'s' if n > 1 else ''}"]
        for topic, finding in [*self.findings, *(("!", warning) for warning in self.warnings)]:
            margin = f"  {topic:<11}" if topic != "!" else "  ! "
            lines += textwrap.wrap(finding, 116, initial_indent=margin, subsequent_indent=" " * len(margin))
        return "\n".join(lines)


def check(problem: Problem, x0: Any, y0: Any, batch: Any = None) -> Report:
    """Look at a problem before a run from (x0, y0): what may go wrong, and what to do about it.

    It looks at whether F and f have values at the start, which of them depends on what, their gradients against finite
    differences, whether they give the same value twice, kinks, the convexity of f in y, and scales. All of this is seen at the
    start and at some points around it; what does not show there is not reported. Some 30 gradients of F and 100 of f are taken,
    fewer with modules and slow objectives. Modules, tensors and random number generators stay as they are.

    Args:
        batch: for objectives that take one; ``next(iter(loader))`` will do.

    Returns:
        A report to be printed. Whatever is wrong with the problem, even an exception in an objective, is in its ``warnings``.

    Raises:
        TypeError, ValueError: an argument is no problem, or holds nothing to optimise.

    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 1).square().sum() + y.square().sum(),
    ...     lower=lambda x, y: (y - x.detach()).square().sum() + y.abs().sum(),
    ... )
    >>> report = check(problem, torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> report.ok, list(report.kinks), report.deviations["F in x"] < 1e-6
    (False, ['f in y'], True)
    >>> print(report.warnings[0])
    lower: its value changes with x, but autograd does not see it; use no .detach(), .item(), .data or numpy on x.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    states = random_states()
    with torch.inference_mode(False), torch.no_grad():
        inspection = _Inspection(problem, Variable(x0, "x"), Variable(y0, "y"), batch)
        try:
            return inspection.report()
        finally:
            set_random_states(states)


class _Line:
    """The points centre + t v of a variable, |t| <= 1, between two ends."""

    def __init__(self, variable: Variable, first: Leaves, second: Leaves) -> None:
        self.leaves = variable.leaves
        self.v = [v / 2 for v in subtract(second, first)]
        self.centre = _moved(first, self.v, 1.0)
        self.length = float(norm(self.v))

    def go(self, t: float) -> None:
        copy_(self.leaves, _moved(self.centre, self.v, t))


class _Curvatures(Probe):
    """Curvatures at points where the gradients are finite; elsewhere an error instead of a wrong number."""

    def gradient(self, function: Function, wrt: Variable) -> Leaves:
        found = super().gradient(function, wrt)
        if not math.isfinite(float(norm(found))):
            raise ArithmeticError("a gradient is not finite")
        return found


class _Surroundings:
    """A problem around its start: copies of x and y, which are moved about, and measurements where they are.

    Attributes:
        g: the non-smooth term.
        frozen: whether every call of an objective sees the same random numbers.
        thorough: whether there is time to look at more than the least.
        secants: curvatures of f along lines in y, met by the way.
        outside: what g raised at a point of X.
    """

    def __init__(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> None:
        parts = {name: getattr(problem, name) for name in ("nonsmooth", "x_set", "y_set", "joint")}
        self.oracle = Oracle(Problem(self.steady(problem.upper), self.steady(problem.lower), **parts), x, y)
        self.g = Function("nonsmooth", lambda x, y, batch: torch.as_tensor(self.oracle.g(x, y)), y.device)
        self.x, self.y, self.batch = x, y, batch
        self.eps = max(torch.finfo(leaf.dtype).eps for leaf in x.leaves + y.leaves)
        self.generator = torch.Generator().manual_seed(0)
        self.states, self.frozen = random_states(), False
        self.thorough = not (x.has_modules or y.has_modules) and x.numel + y.numel <= JOINT_LIMIT
        self.secants: list[float] = []
        self.outside = ""
        self.enter()
        self.start = {variable: [leaf.detach().clone() for leaf in variable.leaves] for variable in (x, y)}

    def steady(self, objective: Objective) -> Objective:
        def call(*arguments: Any) -> Tensor:
            if self.frozen:
                set_random_states(self.states)
            return objective(*arguments)

        return call

    def pairs(self) -> Iterator[tuple[str, Function, Variable]]:
        """What is differentiated in a run: F in y and x, f in y, f + g in x."""
        yield "F in y", self.oracle.upper, self.y
        yield "f in y", self.oracle.lower, self.y
        yield "F in x", self.oracle.upper, self.x
        yield "f in x", self.oracle.phi, self.x

    # Moving about.

    def enter(self, leaves: Leaves | None = None, variable: Variable | None = None) -> None:
        """Bring x into X, and y into Y and the domain of g; or ``leaves`` into the set of ``variable``."""
        if variable is not self.y:
            self.oracle.project(self.x.value, self.x.leaves if leaves is None else leaves, 1.0)
        if variable is not self.x:
            self.oracle.prox(self.x.value, self.y.leaves if leaves is None else leaves, 1e-30)

    def go_back(self) -> None:
        """Go to the start."""
        for variable, leaves in self.start.items():
            copy_(variable.leaves, leaves)

    def scatter(self, spread: float) -> None:
        """Go to a random point around the start; nearer to it, if g has no value there."""
        for factor in (1.0, 0.1, 0.01, 0.0):
            for variable, leaves in self.start.items():
                copy_(variable.leaves, _moved(leaves, self.noise(variable), factor * spread))
            try:
                self.enter()
                if math.isfinite(float(self.oracle.g(self.x, self.y))):
                    return
            except Exception as error:  # of the weights of g, which X does not keep in their domain
                self.outside = self.outside or str(error)

    def noise(self, variable: Variable, even: bool = False) -> Leaves:
        """Normal noise of the size of each leaf at the start, or that of all leaves, or 1, the first that is not zero.

        Args:
            even: of exactly this size.
        """
        found, start = [], self.start[variable]
        for leaf in start:
            size = _size([leaf]) or _size(start) or 1.0
            draw = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64)
            found.append((size / (_size([draw]) or 1.0 if even else 1.0) * draw).to(leaf))
        return found

    def line(self, variable: Variable, first: Leaves, second: Leaves) -> _Line:
        """The line between two points, each brought into the set of the variable; all of it is in the set then."""
        for end in (first, second):
            self.enter(end, variable)
        return _Line(variable, first, second)

    def lines(self, variable: Variable, spread: float) -> Iterator[tuple[str, _Line]]:
        """Random lines near here with their names: along all leaves, and along each one where they are few."""
        here, count = [leaf.detach().clone() for leaf in variable.leaves], len(variable.leaves)
        along = [(variable.argument, range(count))] * (2 if self.thorough else 1)
        if self.thorough and 1 < count <= 6:
            along += [(variable.label(name), range(i, i + 1)) for i, name in enumerate(variable.names)]
        for label, chosen in along:
            first, second = ([d * (i in chosen) for i, d in enumerate(self.noise(variable))] for _ in range(2))
            yield label, self.line(variable, _moved(here, first, spread), _moved(here, second, spread))
            copy_(variable.leaves, here)

    # Measuring.

    def value(self, function: Function, line: _Line | None = None, t: float = 0.0) -> float:
        """The value here, or at a point of a line; NaN outside of the function's domain."""
        if line is not None:
            line.go(t)
        try:
            return float(function(self.x, self.y, self.batch))
        except Exception:  # whatever a user's function raises there
            return math.nan

    def gradient(self, function: Function, *wrt: Variable, strict: bool = False) -> list[Leaves]:
        """The gradients here; NaN outside of the function's domain, unless errors are asked for."""
        try:
            return self.oracle.gradients(wrt, [(1.0, function, self.x, self.y)], self.batch, strict=False)[1]
        except Exception:
            if strict:
                raise
            return [[torch.full_like(leaf, math.nan) for leaf in variable.leaves] for variable in wrt]

    def repeats(self) -> bool:
        """Whether a second call gives the values of the first."""
        for function in (self.oracle.upper, self.oracle.lower):
            first, second = self.value(function), self.value(function)
            if not abs(first - second) <= 100 * self.eps * max(abs(first), abs(second)):
                return False
        return True

    def deviation(self, function: Function, variable: Variable, line: _Line) -> tuple[float, bool]:
        """The relative deviation of the slope along a line from differences of values, and whether the gradient is wrong.

        A gradient counts as wrong if the differences at two of three step sizes agree with each other much better than with
        it. Where a kink is within a step, or rounding prevails, they do not.
        """
        line.go(0.0)
        (found,) = self.gradient(function, variable)
        slope = float(inner(found, line.v))
        differences, rounding = [], math.inf
        for factor in (30, 3, 0.3):
            h = factor * self.eps ** (1 / 3)
            up, down = self.value(function, line, h), self.value(function, line, -h)
            differences.append((up - down) / (2 * h))
            rounding = min(rounding, 8 * self.eps * max(abs(up), abs(down)) / h)
        typical = float(norm(found)) * line.length / math.sqrt(variable.numel)
        scale = max(abs(slope), typical, *map(abs, differences))
        if not (math.isfinite(scale + sum(differences)) and scale > 0):
            return 0.0, False
        error = min(abs(difference - slope) for difference in differences)
        apart = min(abs(a - b) for a, b in itertools.pairwise(differences))
        wrong = error > max(self.eps**0.25 * scale, 5 * apart + rounding)
        return max(error - rounding, 0.0) / scale, wrong

    def jump(self, function: Function, variable: Variable, centre: Leaves) -> float:
        """The jump of the gradient at the sharpest kink seen on a random line, relative to its largest size; 0 if smooth.

        From a dozen points it goes to the gap where the change of the gradient stands out from those next to it, and halves
        that gap: where the function is smooth, the change shrinks with it.
        """
        for spread in (2.0, 0.2, 0.02):
            away = self.noise(variable, even=True)
            line = self.line(variable, _moved(centre, away, -spread), _moved(centre, away, spread))
            if all(math.isfinite(self.value(function, line, t)) for t in (-1.0, 1.0)):
                break
        else:
            return 0.0

        def gradient(t: float) -> Leaves:
            line.go(t)
            return self.gradient(function, variable)[0]

        n = 11  # odd, so that the centre, where a kink is likely, is inside of a gap
        points = [(t, gradient(t)) for t in (2 * i / n - 1 for i in range(n + 1))]
        steps = [subtract(b, a) for (_, a), (_, b) in itertools.pairwise(points)]
        size = max(float(norm(found)) for _, found in points)
        if function is self.oracle.lower and variable is self.y and line.length:
            bends = [float(inner(step, line.v)) for step in steps if float(norm(step)) > 1e3 * self.eps * size]
            self.secants += [bend * n / (2 * line.length**2) for bend in bends if math.isfinite(bend)]
        apart = {i: _apart(*steps[i - 2 : i + 3]) for i in range(2, n - 2)}
        if not (math.isfinite(size + sum(apart.values())) and max(apart.values()) > KINK * size):
            return 0.0
        i = max(apart, key=lambda i: apart[i])
        left, right, change = points[i], points[i + 1], 0.0
        for _ in range(14):
            middle = left[0] + 0.47 * (right[0] - left[0])  # not the centre of the line, where a derivative may not exist
            at = gradient(middle)
            first, second = (float(norm(subtract(at, end))) for end in (left[1], right[1]))
            left, right = (left, (middle, at)) if first > second else ((middle, at), right)
            change = max(first, second)
            if not change > KINK * size:
                return 0.0
        return change / size

    def curvatures(self, smooth: bool) -> list[tuple[float, float]]:
        """Smallest and largest curvature of f in y at several points; along lines only, unless f is smooth."""

        def solve() -> None:
            found = solve_lower(self.oracle, self.x, self.y, tol=1e-3, max_steps=15, batch=self.batch)
            copy_(self.y.leaves, found.theta.leaves)

        found = [(secant, secant) for secant in self.secants]
        moves: list[Callable[[], None]] = [self.go_back] if smooth else []
        if smooth and self.thorough:
            count = max(2, min(8, 16 // self.y.numel))
            moves += [solve, *(partial(self.scatter, 1.0 if i % 2 else 3.0) for i in range(count))]
        probe = _Curvatures(self.oracle, self.x, self.y, self.batch, self.generator, rounds=8 if self.thorough else 5)
        for move in moves:
            self.go_back()
            try:
                move()
                found.append(probe.block(self.oracle.lower, self.y))
            except Exception:  # outside of the domain of f
                continue
        self.go_back()
        return found


class _Inspection:
    """One check at work, and its findings so far, which have the names that they have in the report."""

    def __init__(self, problem: Problem, x: Variable, y: Variable, batch: Any) -> None:
        self.problem, self.x, self.y, self.batch = problem, x.copy(), y.copy(), batch
        self.shared = {id(leaf) for leaf in x.leaves} & {id(leaf) for leaf in y.leaves}
        self.stochastic = x.has_modules or y.has_modules or batch is not None or problem.needs_batch
        self.findings: list[tuple[str, str]] = []
        self.warnings: list[str] = []
        self.values = {"F": math.nan, "f": math.nan}
        self.depends: dict[str, bool] = {}
        self.unused: list[str] = []
        self.deviations: dict[str, float] = {}
        self.wrong: dict[str, list[str]] = {}  # variables and leaves with wrong gradients
        self.repeatable: bool | None = None
        self.kinks: dict[str, float] = {}
        self.convexity, self.curvature = "unknown", (math.nan, math.nan)
        self.sizes: dict[str, float] = {}
        self.seconds = {"F": math.nan, "f": math.nan}
        self.largest: dict[str, Leaves] = {}  # the size of each component of a gradient, the largest of several points

    def report(self) -> Report:
        if self.look_at_start() and self.look_at_values() and self.look_at_repeats() and self.look_at_dependence():
            self.look_at_gradients()
            self.look_at_kinks()
            if self.depends["f on y"]:
                self.look_at_convexity()
            self.look_at_scales()
            if self.around.outside:
                self.warn(f"nonsmooth: has no value at some points of X near the start. {self.around.outside}")
        method = "StochasticMEHA" if self.stochastic else "Continuation"
        reason = "made for modules and batches" if self.stochastic else "made for tensors without batches"
        self.find("method", f"solve(problem, x0, y0) takes meha.{method}, {reason}.")
        counts = self.around.oracle.counts if hasattr(self, "around") else Counts()
        times = [f"{1e3 * seconds:.2g} ms for a gradient of {name}" for name, seconds in self.seconds.items() if seconds > 0]
        self.find("cost", "; ".join([*times, f"this check took {counts.upper} of F and {counts.lower} of f"]) + ".")
        return Report(
            findings=tuple(self.findings),
            warnings=self.warnings,
            upper=self.values["F"],
            lower=self.values["f"],
            depends=self.depends,
            unused=self.unused,
            deviations=self.deviations,
            repeatable=self.repeatable,
            kinks=self.kinks,
            convexity=self.convexity,
            curvature=self.curvature,
            sizes=self.sizes,
            method=method,
            counts=counts,
            seconds=(self.seconds["F"], self.seconds["f"]),
        )

    def find(self, topic: str, finding: str) -> None:
        self.findings.append((topic, finding))

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def fail(self, level: str, error: Exception) -> None:
        """Report an error of an objective; errors of the oracle name the argument and the remedy already."""
        told = " ".join(str(error).split()).rstrip(".")
        if told.split(":")[0] in ("upper", "lower", "batch"):
            self.warn(f"{told}.")
        else:
            hint = "" if self.batch is None else "; a batch was passed, so that it must take (x, y, batch)"
            self.warn(f"{level}: raised {type(error).__name__} at the start ({told}){hint}; mend it, or start elsewhere.")

    def uses(self, key: str) -> bool:
        """Whether a gradient, such as that of ``"F in x"``, was ever other than zero."""
        return any(bool(leaf.any()) for leaf in self.largest[key])

    def look_at_start(self) -> bool:
        """Whether there is a start at all; it is brought into X and Y."""
        x, y, problem = self.x, self.y, self.problem
        dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in x.leaves + y.leaves})
        self.find("start", f"x: {_count(x)}; y: {_count(y)}; {' and '.join(dtypes)} on {x.device}.")
        if problem.needs_batch and self.batch is None:
            self.warn("batch: the objectives need one; pass batch=next(iter(loader)).")
            return False
        if x.device != y.device:
            self.warn(f"x is on {x.device} and y on {y.device}; move both to one device, such as y.to(x.device).")
            return False
        if self.shared:
            self.warn("x and y share parameters; each tensor must belong to one level.")
            return False
        try:
            for variable, domain in ((x, problem.x_set), (y, problem.y_set)):
                variable.check_finite()
                if domain is not None and not domain.holds(variable):
                    name = variable.argument
                    self.warn(
                        f"{name}0 is not in {name.upper()} = {domain!r}, and a run would refuse it; start from"
                        f" {name}_set.project({name}0). The rest of this report is about that point."
                    )
            if not (self.warnings or math.isfinite(float(problem.g.value(x.value, y.value)))):
                self.warn("nonsmooth: is not finite at the start; start inside its domain (y0 >= 0 for NonNegativeL1).")
            self.around = _Surroundings(problem, x, y, self.batch)
        except Exception as error:  # of a set, a term or its weight; those of this library say what is wrong
            self.warn(f"the start does not fit the problem. {type(error).__name__}: {error}")
            return False
        return True

    def look_at_values(self) -> bool:
        """Whether both objectives have finite values at the start."""
        oracle, eps = self.around.oracle, self.around.eps
        for name, function in (("F", oracle.upper), ("f", oracle.lower)):
            try:
                value = function(self.x, self.y, self.batch)
            except Exception as error:
                self.fail(function.level, error)
                continue
            self.values[name] = float(value)
            if not math.isfinite(self.values[name]):
                self.warn(f"{function.level}: is {float(value)} at the start (x0, y0); check it, or start elsewhere.")
            elif torch.finfo(value.dtype).eps > eps:
                self.warn(
                    f"{function.level}: returns {value.dtype}, which has fewer digits than x and y; compute it in their dtype."
                )
        told = ", ".join(f"{name} = {value:.6g}" for name, value in self.values.items())
        self.find("values", f"{told} at the start.")
        return all(math.isfinite(value) for value in self.values.values())

    def look_at_repeats(self) -> bool:
        """Whether the objectives can be looked at further: they give the same values twice, at least with the same seed."""
        around, variables = self.around, (self.x, self.y)
        before = [buffer.clone() for variable in variables for buffer in variable.buffers().values()]
        self.repeatable = around.repeats()
        after = [buffer for variable in variables for buffer in variable.buffers().values()]
        moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        statistics = " Buffers (running statistics) move with each call; .eval() would keep them." if moved else ""
        around.frozen = not self.repeatable
        again = self.repeatable or around.repeats()
        random = "" if again else ", even with the same seed, so that nothing else can be looked at"
        told = "the same values when called again" if self.repeatable else f"other values when called again{random}"
        self.find("repeatable", f"{told}.{statistics}")
        if not self.repeatable and not self.stochastic:
            self.warn(
                "upper and lower: give other values when called again at the same point; the deterministic default needs the"
                " same. Draw random numbers once and outside of them, or make what they draw a batch, solve(..., batches=...),"
                " for which there is meha.StochasticMEHA."
            )
        return again

    def look_at_dependence(self) -> bool:
        """Gradients at the start and at two points around it: whether they can be had, their sizes, what is zero."""
        around = self.around
        for spread in (0.0, 0.3, 1.0):
            if spread:
                around.scatter(spread)
            for name, function in (("F", around.oracle.upper), ("f", around.oracle.lower)):
                begin = time.perf_counter()
                try:
                    found = around.gradient(function, self.x, self.y, strict=not spread)
                except Exception as error:
                    self.fail(function.level, error)
                    return False
                sizes = [float(norm(leaves)) for leaves in found]
                self.seconds[name] = min(time.perf_counter() - begin, self.seconds[name] if spread else math.inf)
                for argument, gradient, size in zip(("x", "y"), found, sizes, strict=True):
                    self.note_gradient(name, argument, gradient, size)
                    if not spread:
                        self.sizes[f"{name}_{argument}"] = size
                    if not spread and not math.isfinite(size):
                        self.warn(
                            f"{function.level}: its value at the start is finite, its gradient in {argument} is not, as with a"
                            " square root at 0; add a small number inside, or start elsewhere."
                        )
            if self.problem.nonsmooth is not None:
                (gradient,) = around.gradient(around.g, self.x)
                self.note_gradient("g", "x", gradient, float(norm(gradient)))
        around.go_back()
        around.thorough = around.thorough and max(self.seconds.values()) < SLOW
        return True

    def note_gradient(self, name: str, argument: str, gradient: Leaves, size: float) -> None:
        """Keep the largest components; those of g count for f, with which it is differentiated."""
        key, on = f"{'f' if name == 'g' else name} in {argument}", f"{name} on {argument}"
        before = self.largest.setdefault(key, [torch.zeros_like(leaf) for leaf in gradient])
        self.depends[on] = self.depends.get(on, False) or 0 < size < math.inf
        if math.isfinite(size):
            self.largest[key] = [torch.maximum(a, b.abs()) for a, b in zip(before, gradient, strict=True)]

    def look_at_gradients(self) -> None:
        """Gradients along random lines near the start, against differences of values; after that, what depends on what."""
        around, wrong = self.around, self.wrong
        for spread in (0.3, 0.01, 0.0):
            around.scatter(spread)
            if all(math.isfinite(around.value(function)) for _, function, _ in around.pairs()):
                break
        for key, function, variable in around.pairs():
            self.deviations[key], wrong[key] = 0.0, []
            for label, line in around.lines(variable, spread or 0.01):
                deviation, failed = around.deviation(function, variable, line)
                self.deviations[key] = max(self.deviations[key], deviation)
                wrong[key] += [label] if failed else []
            if wrong[key]:
                self.depends[key.replace(" in ", " on ")] = True
                self.warn_of_gradient(key, function, variable, wrong[key])
        around.go_back()
        self.tell_dependence()
        right = {key: deviation for key, deviation in self.deviations.items() if self.uses(key) and not wrong[key]}
        beyond = ", ".join(f"{key} {deviation:.0e}" for key, deviation in right.items() if deviation)
        told = f"of {', '.join(right)} agree with finite differences up to rounding" + (f" and {beyond}" if beyond else "")
        self.find("gradients", f"{told}." if right else "are all zero or wrong, see below.")

    def warn_of_gradient(self, key: str, function: Function, variable: Variable, labels: list[str]) -> None:
        name = variable.argument
        if not self.uses(key):
            self.warn(
                f"{function.level}: its value changes with {name}, but autograd does not see it; use no .detach(), .item(),"
                f" .data or numpy on {name}."
            )
            return
        where = ", ".join(dict.fromkeys(label for label in labels if label != name)) or name
        self.warn(
            f"{function.level}: its gradient in {where} deviates from finite differences ({self.deviations[key]:.1e},"
            " relatively); look for .detach() or .item() in a part of it, or a mistake in a backward() of your own."
        )

    def tell_dependence(self) -> None:
        """Say what depends on what, and what follows from it."""
        on, g = self.depends, self.problem.nonsmooth is not None
        told = []
        for name in ("F", "f"):
            found = [argument for argument in ("x", "y") if on[f"{name} on {argument}"]]
            told.append(f"{name} on {' and '.join(found) or 'neither x nor y'}")
        told += [f"g on {'x and y' if on['g on x'] else 'y'}"] if g else []
        self.find("depends", "; ".join(told) + ".")
        lower = on["f on x"] or on.get("g on x", False)
        if not (on["F on x"] or lower):
            self.warn("x: neither upper nor lower nor nonsmooth depends on it; use x inside one.")
        elif not lower:
            self.warn(
                "lower: does not depend on x, so that its solutions are the same for every x; use x inside lower, or solve the"
                " lower level first and upper after it."
            )
        if not on["F on y"]:
            self.warn("upper: does not depend on y, so that the lower level has no influence; minimise upper over x alone.")
        if not on["f on y"]:
            self.warn("lower: does not depend on y, so that any y solves it; use y, as it is passed, inside.")
        held = {self.y.names[i] for _, chosen in self.problem.g.terms(self.y) for i in chosen}
        for variable in (self.x, self.y):
            keys = [f"{name} in {variable.argument}" for name in ("F", "f")]
            for i, name in enumerate(variable.names if len(variable.names) > 1 else []):
                seen = any(bool(self.largest[key][i].any()) or variable.label(name) in self.wrong[key] for key in keys)
                if any(map(self.uses, keys)) and not seen and not (variable is self.y and name in held):
                    self.unused.append(variable.label(name))
        if self.unused:
            more = f" and {len(self.unused) - 6} more" if len(self.unused) > 6 else ""
            self.warn(f"{', '.join(self.unused[:6])}{more}: no gradient of upper or lower reaches it; use it, or leave it out.")

    def look_at_kinks(self) -> None:
        """Kinks on lines through the start, for f in y also through 0, where absolute values and norms have theirs."""
        around = self.around
        if not around.thorough:
            return self.find("smoothness", "not looked at, because of modules, size or time.")
        for key, function, variable in around.pairs():
            start = around.start[variable]
            zero = [torch.zeros_like(leaf) for leaf in start]
            for centre in [start, zero] if key == "f in y" and bool(norm(start) > 0) else [start]:
                around.go_back()
                if variable is self.x:  # away from y = 0, where weights of |y| have no influence
                    around.scatter(0.3)
                jump = around.jump(function, variable, centre) if self.uses(key) else 0.0
                if jump:
                    self.kinks[key] = max(jump, self.kinks.get(key, 0.0))
        around.go_back()
        told = ", ".join(f"{key} (its gradient jumps by {jump:.2g} of its size)" for key, jump in self.kinks.items())
        self.find("smoothness", f"kinks met: {told}." if told else "no kinks met.")
        smooth = "softplus instead of relu, Huber's function instead of abs"
        for key in self.kinks:
            remedy = f"smooth it ({smooth})"
            if key == "f in y":
                remedy = (
                    "put absolute values and norms of y into nonsmooth=, such as meha.nonsmooth.L1(weight) or GroupL2(groups,"
                    f" weight), and smooth other kinks ({smooth})"
                )
            level = "upper" if key[0] == "F" else "lower"
            self.warn(f"{level}: has a kink as a function of {key[-1]} (abs, relu, max, sort?), where methods stall; {remedy}.")
        return None

    def look_at_convexity(self) -> None:
        """What the curvatures of f in y say."""
        seen, eps = self.around.curvatures(smooth="f in y" not in self.kinks), self.around.eps
        if not seen:
            return self.find("convexity", "of f in y was not seen, because its gradients around the start are not finite.")
        low, high = min(a for a, _ in seen), max(b for _, b in seen)
        self.curvature, scale, told = (low, high), max(-low, high), f"curvature from {low:.3g} to {high:.3g} seen"
        if any(a < -1e-3 * max(-a, b) and a < -(eps ** (2 / 3)) * scale for a, b in seen):
            self.convexity, told = "non-convex", f"is non-convex (or weakly convex): {told}"
        elif scale == 0:
            self.convexity, told = "linear", "looks linear"
        elif low <= eps**0.4 * high:
            self.convexity, told = (
                "convex with flat directions",
                f"looks convex with flat directions: curvature up to {high:.3g}",
            )
        else:
            self.convexity, told = "strongly convex", f"looks strongly convex: {told}, condition at least {high / low:.2g}"
        self.find("convexity", f"f {told}{'' if self.around.thorough else ' (at the start only)'}.")
        if self.convexity == "linear" and self.problem.nonsmooth is None and self.problem.y_set is None:
            self.warn("lower: looks linear in y, and then has no minimum; add a y_set, a nonsmooth term or a regulariser.")
        return None

    def look_at_scales(self) -> None:
        """Sizes, and what about them makes a problem hard."""
        names = ("F_x", "F_y", "f_x", "f_y")
        self.sizes |= {variable.argument: _size(start) for variable, start in self.around.start.items()}
        gradients = ", ".join(f"{name} {self.sizes[name]:.2g}" for name in names)
        self.find("scales", f"x {self.sizes['x']:.2g}, y {self.sizes['y']:.2g} (root mean squares); gradients {gradients}.")
        if self.around.eps > 1e-10 and not self.stochastic:
            self.find("precision", "differences of f cancel in this dtype: some 3 digits of x can be had; float64 gives more.")
        named = {"upper": self.values["F"], "lower": self.values["f"]} | {f"gradient {n}": self.sizes[n] for n in names}
        huge = [f"{name} ({value:.1e})" for name, value in named.items() if abs(value) > HUGE]
        if huge:
            self.warn(f"{', '.join(huge)}: huge at the start; measure in larger units, or take means instead of sums.")
        for key, level in (("F in x", "upper"), ("f in x", "lower")):
            ratio = self.unevenness(self.largest[key])
            if ratio > UNEVEN:
                what = "tensors" if self.x.has_modules else "coordinates"
                self.warn(
                    f"{level}: its gradients in the {what} of x differ by a factor of {ratio:.0e}; measure x in units in which"
                    " they are alike (x = scale * z, with z as the variable)."
                )

    def unevenness(self, sizes: Leaves) -> float:
        """The quotient of the largest and the smallest component of a gradient, those within rounding of zero left out."""
        parts = [leaf.square().mean().sqrt().reshape(1) if self.x.has_modules else leaf.reshape(-1) for leaf in sizes]
        flat = torch.cat([part.double() for part in parts])
        largest = float(flat.max())
        return largest / float(flat[flat > 100 * self.around.eps * largest].min()) if largest > 0 else 1.0


def _count(variable: Variable) -> str:
    n, k = variable.numel, len(variable.leaves)
    return f"{n} number{'s' if n > 1 else ''}" + (f" in {k} tensors" if k > 1 else "")


def _moved(leaves: Leaves, direction: Leaves, scale: float) -> Leaves:
    return [leaf + scale * d for leaf, d in zip(leaves, direction, strict=True)]


def _apart(*steps: Leaves) -> float:
    """How far the third of five successive steps is from what a cubic through the others says."""
    return float(norm([c - (4 * (b + d) - a - e) / 6 for a, b, c, d, e in zip(*steps, strict=True)]))


def _size(leaves: Leaves) -> float:
    """The root mean square."""
    return float(norm(leaves)) / math.sqrt(sum(leaf.numel() for leaf in leaves) or 1)
