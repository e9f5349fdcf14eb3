"""The checks of :func:`meha.check`, each a function of an Inspection."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meha.inspection.measuring import StartNeighbourhood, root_mean_square, unevenness
from meha.inspection.report import Report
from meha.lower.constrained import ConstrainedLower, SampleBox
from meha.lower.curvature import flatten, probe
from meha.lower.flat_problem import FlatProblem
from meha.lower.multistart import LowerMultistart
from meha.lower.nearest import solve_nearest
from meha.methods import RHG, StochasticMEHA, default_method, stochastic
from meha.numerics.limited_memory import LimitedMemory
from meha.numerics.quadratic_program import Array
from meha.problem.oracle import BudgetError, Function, lack
from meha.problem.problem import Problem
from meha.reduce.nonlinear_program import NonlinearProgram
from meha.tensors.variables import Leaves, Variable, add_, copy_, inner, norm

SLOW = 0.1  # seconds for a gradient, beyond which, as with modules, only the most important points are visited
UNEVEN = 1e4  # gradients in coordinates of x that differ by more than this factor count as badly scaled
HUGE = 1e8  # values and gradients beyond this get a warning
SEARCH, PAIRS = 300, 20  # gradients of f that the search for basins may take, and the memory of its descents
NEGATIVE = 1e-3  # curvature counts as negative from this share of the largest one on; less is within the error

PURPOSES = {  # of the methods that ``default_method`` takes
    "Default": ("meha.Default", "tensors without batches"),
    "AdaptiveSOBA": ("meha.stochastic.AdaptiveSOBA", "tensors with batches"),
    "NetworkSOBA": ("meha.stochastic.NetworkSOBA", "networks with batches"),
    "StochasticMEHA": ("meha.StochasticMEHA", "modules and batches"),
    "RHG": ("meha.RHG", "a response that is trained"),
}
LEVELS = {"F": "upper", "f": "lower"}  # the arguments of Problem
SMOOTH = "smooth it (softplus instead of relu, Huber's function instead of abs)"
MOVE = "move abs and norms of y to nonsmooth=, such as meha.nonsmooth.L1(weight) or GroupL2(groups, weight), or else "


class Inspection:
    """Runs the checks of one problem, and collects what they find in a report."""

    def __init__(self, problem: Problem, x: Variable, y: Variable, batch: Any, other_batch: Any = None) -> None:
        self.problem, self.x, self.y = problem, x.copy(), y.copy()
        self.batch, self.other_batch = batch, other_batch
        self.original = x, y
        method = default_method(problem, x.value, y.value, None if batch is None else [batch])
        self.unrolled = isinstance(method, RHG)
        self.stochastic = isinstance(method, StochasticMEHA | stochastic.AdaptiveSOBA | stochastic.NetworkSOBA)
        self.result = Report(method=method.name)
        self.seconds = {"F": math.nan, "f": math.nan}
        self.wrong: dict[str, list[str]] = {}  # variables and leaves with wrong gradients, for "F in x" and so on
        self.largest: dict[str, Leaves] = {}  # largest size of each component of a gradient over several points

    def report(self) -> Report:
        """Run the checks in order; each is skipped if an earlier one found that it cannot be done."""
        result = self.result
        ready = self.check_start() and self.check_values() and self.check_repeats()
        if ready and self.problem.coupled:
            check_constraints(self)
        elif ready and self.check_dependence():
            self.check_gradients()
            self.check_kinks()
            if result.depends["f on y"]:
                self.check_convexity()
                self.check_basins()
                check_open(self)
                check_carried(self)
                self.check_second()
            self.check_scales()
            if self.around.outside:
                self.warn(f"nonsmooth: has no value at some points of X near the start. {self.around.outside}")
        name, purpose = PURPOSES[result.method]
        self.find("method", f"solve(problem, x0, y0) uses {name}, which is made for {purpose}.")
        result.seconds = (self.seconds["F"], self.seconds["f"])
        cost = [f"{1e3 * seconds:.2g} ms per gradient of {name}" for name, seconds in self.seconds.items() if seconds > 0]
        cost.append(f"this check took {_counted(result.counts.upper, 'gradient')} of F and {result.counts.lower} of f")
        self.find("cost", "; ".join(cost) + ".")
        return result

    def find(self, topic: str, sentence: str) -> None:
        self.result.findings.append((topic, sentence))

    def warn(self, sentence: str) -> None:
        self.result.warnings.append(sentence)

    def fail(self, level: str, error: Exception) -> None:
        """Warn of an error in an objective; errors of the oracle already name the argument and the remedy."""
        message = " ".join(str(error).split()).rstrip(".")
        if message.split(":")[0] not in ("upper", "lower", "batch"):
            hint = "" if self.batch is None else "; a batch was passed, so it must accept (x, y, batch)"
            message = f"{level}: raised {type(error).__name__} at the start ({message}){hint}; fix it, or start elsewhere"
        self.warn(f"{message}.")

    def uses(self, key: str) -> bool:
        """Return whether a gradient was nonzero somewhere."""
        return any(bool(leaf.any()) for leaf in self.largest[key])

    def check_start(self) -> bool:
        """Project the start on X and Y; return whether it fits the problem."""
        x, y, problem = self.x, self.y, self.problem
        counts = [
            _counted(variable.numel, "number") + (f" in {len(variable.leaves)} tensors" if len(variable.leaves) > 1 else "")
            for variable in (x, y)
        ]
        dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in x.leaves + y.leaves})
        first = "no x" if problem._without_x else f"x: {counts[0]}"
        self.find("start", f"{first}; y: {counts[1]}; {' and '.join(dtypes)} on {x.device}.")
        if problem.needs_batch and self.batch is None:
            self.warn("batch: the objectives need one; pass batch=next(iter(loader)).")
            return False
        try:
            replace(problem, nonsmooth=None, x_set=None, y_set=None)._check_start(*self.original)
            for name, variable, domain in zip("xy", (x, y), problem.domains, strict=True):
                if not domain.holds(variable):
                    remedy = f"start from {name}_set.project({name}0). The rest of this report is about that point"
                    where = f"{name}0 is not in {name.upper()} = {domain!r}"
                    self.warn(f"{where}, and only the default begins at the nearest point; {remedy}.")
            if not (self.result.warnings or math.isfinite(float(problem.g.value(x.value, y.value)))):
                self.warn("nonsmooth: is not finite at the start; start inside its domain (y0 >= 0 for NonNegativeL1).")
            self.around = StartNeighbourhood(problem, x, y, self.batch)
        except Exception as error:  # from a set, a term or its weight; those of this library say what is wrong
            self.warn(f"the start does not fit the problem. {type(error).__name__}: {error}")
            return False
        self.result.counts = self.around.oracle.counts
        return True

    def check_values(self) -> bool:
        """Return whether both objectives have finite values at the start."""
        values = {"F": math.nan, "f": math.nan}
        for name, function in self.around.levels.items():
            try:
                value = function(self.x, self.y, self.batch)
            except Exception as error:
                self.fail(function.level, error)
                continue
            values[name] = float(value)
            if not math.isfinite(values[name]):
                self.warn(f"{function.level}: is {float(value)} at the start (x0, y0); check it, or start elsewhere.")
            elif torch.finfo(value.dtype).eps > self.around.eps:
                self.warn(f"{function.level}: returns {value.dtype}, less precise than x and y; compute it in their dtype.")
        self.result.upper, self.result.lower = values["F"], values["f"]
        self.find("values", f"F = {values['F']:.6g}, f = {values['f']:.6g} at the start.")
        return all(math.isfinite(value) for value in values.values())

    def check_repeats(self) -> bool:
        """Return whether the objectives give the same values twice, at least with the same seed; else the check ends."""

        def buffers() -> Leaves:
            return [buffer.clone() for variable in (self.x, self.y) for buffer in variable.buffers().values()]

        before = buffers()
        repeatable = self.result.repeatable = self.around.repeats()
        moved = not all(map(torch.equal, before, buffers()))
        self.around.frozen = not repeatable  # from now on, every call begins with the same seed
        measurable = repeatable or self.around.repeats()
        values = "the same values" if repeatable else "different values"
        consequence = "" if measurable else ", even with the same seed, so the remaining checks were skipped"
        running = " Buffers (running statistics) change with each call; .eval() keeps them." if moved else ""
        self.find("repeatable", f"repeated calls return {values}{consequence}.{running}")
        if not repeatable and not self.stochastic:
            self.warn(
                "upper and lower: return different values when called again at the same point. Draw random numbers once,"
                " outside the objectives, or pass what is drawn as a batch, solve(..., batches=...), for a stochastic method."
            )
        return measurable

    def check_dependence(self) -> bool:
        """Return whether gradients exist at the start; record their sizes, and which are zero there and at two other points."""
        around = self.around
        for spread in (0.0, 0.3, 1.0):
            if spread:
                around.scatter(spread)
            for name, function in around.levels.items():
                begin = time.perf_counter()
                try:
                    gradients = around.gradient(function, self.x, self.y, strict=not spread)
                except Exception as error:
                    self.fail(function.level, error)
                    return False
                sizes = [float(norm(leaves)) for leaves in gradients]
                self.seconds[name] = min(time.perf_counter() - begin, self.seconds[name] if spread else math.inf)
                for argument, gradient, size in zip("xy", gradients, sizes, strict=True):
                    self.record(name, argument, gradient, size)
                    if spread:
                        continue
                    self.result.sizes[f"{name}_{argument}"] = size
                    if not math.isfinite(size):
                        where = f"{function.level}: its gradient in {argument} is not finite at the start"
                        self.warn(f"{where} (sqrt at 0?); add a small number under the root, or start elsewhere.")
            if self.problem.nonsmooth is not None:
                (gradient,) = around.gradient(around.g, self.x)
                self.record("g", "x", gradient, float(norm(gradient)))
        around.go_back()
        around.thorough = around.thorough and max(self.seconds.values()) < SLOW
        return True

    def record(self, name: str, argument: str, gradient: Leaves, size: float) -> None:
        """Record the largest components; those of g count for f, because a run differentiates f + g in x."""
        key, on, depends = f"{'f' if name == 'g' else name} in {argument}", f"{name} on {argument}", self.result.depends
        before = self.largest.setdefault(key, [torch.zeros_like(leaf) for leaf in gradient])
        depends[on] = depends.get(on, False) or 0 < size < math.inf
        if math.isfinite(size):
            self.largest[key] = [torch.maximum(a, b.abs()) for a, b in zip(before, gradient, strict=True)]

    def check_gradients(self) -> None:
        """Compare gradients along random lines near the start with differences of values; then judge the dependences."""
        around, deviations = self.around, self.result.deviations
        for spread in (0.3, 0.01, 0.0):  # not at the start itself, where kinks (y = 0) and zero gradients are common
            around.scatter(spread)
            if all(math.isfinite(around.value(function)) for _, function, _ in around.pairs()):
                break
        for key, function, variable in around.pairs():
            deviations[key], wrong = 0.0, self.wrong.setdefault(key, [])
            for label, line in around.lines(variable, spread or 0.01):
                deviation, failed = around.deviation(function, variable, line)
                deviations[key] = max(deviations[key], deviation)
                wrong += [label] if failed else []
            if wrong:  # the values change, even if autograd sees no dependence
                self.result.depends[key.replace(" in ", " on ")] = True
                name = variable.argument
                where = ", ".join(dict.fromkeys(label for label in wrong if label != name)) or name
                mistake = f"its gradient in {where} deviates from finite differences (relative error {deviations[key]:.1e})"
                remedy = "look for .detach() or .item() in it, or a mistake in your backward()"
                if not self.uses(key):
                    mistake = f"its value changes with {name}, but autograd does not see it"
                    remedy = f"avoid .detach(), .item(), .data and numpy on {name}"
                self.warn(f"{function.level}: {mistake}; {remedy}.")
        around.go_back()
        self.judge_dependence()
        right = {key: deviations[key] for key, wrong in self.wrong.items() if self.uses(key) and not wrong}
        beyond = ", ".join(f"{key} {deviation:.0e}" for key, deviation in right.items() if deviation)
        agree = f"{', '.join(right)} agree with finite differences"
        more = f"; deviations beyond rounding: {beyond}" if beyond else ""
        self.find("gradients", f"{agree}{more}." if right else "all are zero or wrong, see below.")

    def judge_dependence(self) -> None:
        """Report which objective depends on which variable, and warn of what is missing."""
        on, unused = self.result.depends, self.result.unused
        used = {name: [argument for argument in "xy" if on[f"{name} on {argument}"]] for name in ("F", "f")}
        used |= {"g": ["x", "y"] if on["g on x"] else ["y"]} if self.problem.nonsmooth is not None else {}
        parts = [f"{name} on {' and '.join(arguments) or 'neither x nor y'}" for name, arguments in used.items()]
        self.find("depends", "; ".join(parts) + ".")
        lower = on["f on x"] or on.get("g on x", False)
        simple = self.problem._without_x
        if not (on["F on x"] or lower or simple):
            self.warn(
                "x: neither upper nor lower nor nonsmooth depends on it; use x in one of them, or leave it out (x0=None)."
            )
        elif not lower and not simple:
            self.warn("lower: does not depend on x, so neither do its solutions; use x in lower, or solve one level at a time.")
        if not on["F on y"]:
            alone = "minimise lower alone" if simple else "minimise upper over x alone"
            self.warn(f"upper: does not depend on y, so the lower level has no influence on it; {alone}.")
        if not on["f on y"]:
            self.warn("lower: does not depend on y, so every y solves it; use y, as it is passed, in lower.")
        penalised = {self.y.names[i] for _, chosen in self.problem.g.terms(self.y) for i in chosen}  # g determines these
        for variable in (self.x, self.y):
            keys = [f"{name} in {variable.argument}" for name in LEVELS]
            for i, name in enumerate(variable.names if len(variable.names) > 1 else []):
                reached = any(bool(self.largest[key][i].any()) or variable.label(name) in self.wrong[key] for key in keys)
                if any(map(self.uses, keys)) and not reached and not (variable is self.y and name in penalised):
                    unused.append(variable.label(name))
        if unused:
            self.warn(f"{_listed(unused, 6)}: no gradient of upper or lower reaches it; use it, or leave it out.")

    def check_kinks(self) -> None:
        """Search kinks on lines through the start; for f in y also through 0, where absolute values and norms have theirs."""
        around, jumps = self.around, self.result.kinks
        if not around.thorough:
            self.find("smoothness", "not checked, because of modules, many variables or slow objectives.")
            return
        for key, function, variable in around.pairs():
            start = around.start[variable]
            zero = [torch.zeros_like(leaf) for leaf in start]
            for centre in [start, zero] if key == "f in y" and bool(norm(start) > 0) else [start]:
                around.go_back()
                if variable is self.x:  # away from y = 0, where weights of |y| have no influence
                    around.scatter(0.3)
                jump = around.jump(function, variable, centre) if self.uses(key) else 0.0
                if jump:
                    jumps[key] = max(jump, jumps.get(key, 0.0))
        around.go_back()
        listed = ", ".join(f"{key} (its gradient jumps by {jump:.2g} of its size)" for key, jump in jumps.items())
        self.find("smoothness", f"kinks: {listed}." if listed else "no kinks found.")
        for key in jumps:
            kink = f"has a kink as a function of {key[-1]} (abs, relu, max, sort?), where methods stall"
            self.warn(f"{LEVELS[key[0]]}: {kink}; {MOVE if key == 'f in y' else ''}{SMOOTH}.")

    def check_second(self) -> None:
        """Differentiate a slope of f in y again, and compare the result with differences of gradients."""
        around, lower, v = self.around, self.around.oracle.lower, self.around.noise(self.y)

        def slope(x: Variable, y: Variable, batch: Any) -> Tensor:
            gradient = around.oracle._differentiated([(1.0, lower, x, y)], y, batch)
            with torch.enable_grad():
                value = inner(gradient, v)
            if torch.is_grad_enabled():
                return value
            self.result.counts.lower += 1  # the oracle counts those with a gradient
            return value.detach()

        function = Function("lower", slope, self.y.device)
        try:
            around.gradient(function, self.y, strict=True)
        except RuntimeError as error:
            if not (why := lack(error)):
                raise
            self.result.twice = False
            self.find("second", f"torch cannot differentiate f twice ({why}); products are differences of two gradients.")
            if self.unrolled:
                self.warn(
                    f"lower: cannot be differentiated twice ({why}), as {self.result.method} does; differences of gradients"
                    " take the place of such products, with 9 digits in double and 4 in single precision. For exact ones, use"
                    " a module that is not compiled, and leave the kernel of attention to torch."
                )
            return
        _, line = next(around.lines(self.y, 0.01))
        deviation, wrong = around.deviation(function, self.y, line)
        around.go_back()
        self.result.twice = not wrong
        self.find("second", f"derivatives of f in y {'deviate from' if wrong else 'agree with'} differences of gradients.")
        if wrong:
            self.warn(
                f"lower: its second derivative in y deviates from differences of gradients (relative error {deviation:.1e}), so"
                " that RHG, CG and SOBA would go wrong; look for a backward() that cannot be differentiated and does not say"
                " so, mark it with torch.autograd.function.once_differentiable, or take a method with first derivatives."
            )

    def check_convexity(self) -> None:
        """Classify f in y by its curvatures."""
        ranges, eps = self.around.curvatures(smooth="f in y" not in self.result.kinks), self.around.eps
        if not ranges:
            self.find("convexity", "of f in y is unknown, because its gradients around the start are not finite.")
            return
        low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
        scale, seen = max(-low, high), f"curvature {low:.3g} to {high:.3g}"
        if any(a < -NEGATIVE * max(-a, b) and a < -(eps ** (2 / 3)) * scale for a, b in ranges):
            kind, words = "non-convex", f"non-convex (or weakly convex), {seen}"
        elif scale == 0:
            kind, words = "linear", "looks linear"
        elif low <= eps**0.4 * high:
            kind, words = "convex with flat directions", f"looks convex with flat directions, curvature up to {high:.3g}"
        else:
            kind, words = "strongly convex", f"looks strongly convex, {seen}, condition number at least {high / low:.2g}"
        self.result.curvature, self.result.convexity = (low, high), kind
        self.find("convexity", f"f in y: {words}{'' if self.around.thorough else ' (at the start only)'}.")
        if kind == "linear" and self.problem.nonsmooth is None and self.problem.y_set is None:
            self.warn("lower: looks linear in y, so it has no minimum; add a y_set, a nonsmooth term or a regulariser.")

    def check_basins(self) -> None:
        """Count the basins of f + g in y near the start, where it is not convex."""
        curved = self.result.convexity == "non-convex" or self.problem.g.rho > 0
        if not curved or not self.around.thorough or self.stochastic or self.result.kinks:
            return
        y, high = flatten(self.y), self.result.curvature[1]
        pairs, t, scale = LimitedMemory.sized(PAIRS, len(y)), 1 / high if high > 0 else 1.0, float(norm([y])) or 1.0
        search = LowerMultistart(self.levels(), y, pairs, t, scale, 0.0, solved=False)
        evidence = search.run([y], SEARCH)
        if not search.basins:
            return
        self.result.basins = evidence.values
        ends = f"{_counted(evidence.starts, 'descent')} of f + g from points around the start"
        lowest = f"the lowest {evidence.above:.2g} below the next"
        self.find(
            "basins",
            f"{ends} all reached the same value."
            if evidence.values == 1
            else f"{ends} ended in {evidence.values} basins, {lowest}; a solution must be in the lowest at its x.",
        )

    def levels(self) -> FlatProblem:
        """Return the problem on vectors, with copies of x and y for descents to move."""
        return FlatProblem(self.around.oracle, self.x.copy(), self.y.copy())

    def check_scales(self) -> None:
        """Report sizes, and warn of those that make a problem hard."""
        names, sizes = {"F_x": "dF/dx", "F_y": "dF/dy", "f_x": "df/dx", "f_y": "df/dy"}, self.result.sizes
        sizes |= {variable.argument: root_mean_square(start) for variable, start in self.around.start.items()}
        gradients = ", ".join(f"{shown} {sizes[name]:.2g}" for name, shown in names.items())
        self.find("scales", f"RMS of x {sizes['x']:.2g}, y {sizes['y']:.2g}. Gradient norms at the start: {gradients}.")
        if self.around.eps > 1e-10 and not self.stochastic:
            self.find("precision", "differences of f cancel in this dtype: expect about 3 digits of x, more with float64.")
        named = {"upper": self.result.upper, "lower": self.result.lower} | {f"gradient {name}": sizes[name] for name in names}
        huge = [f"{name} ({value:.1e})" for name, value in named.items() if abs(value) > HUGE]
        if huge:
            self.warn(f"{', '.join(huge)}: huge at the start; use larger units, or means instead of sums.")
        for name, level in LEVELS.items():
            ratio = unevenness(self.largest[f"{name} in x"], self.around.eps, by_leaf=self.x.has_modules)
            if ratio > UNEVEN:
                among = f"in the {'tensors' if self.x.has_modules else 'coordinates'} of x"
                self.warn(f"{level}: its gradients {among} differ by a factor of {ratio:.0e}; rescale x (x = scale * z).")


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _listed(names: list[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


WRONG = 1e-4  # deviation of a gradient from differences, relative to its size, that counts
MET = 1e-6  # violation with which a constraint counts as met, and slack with which it is active
INDEPENDENT = 1e-9  # singular values, relative to the largest, that count as zero
SHOWN = 5  # constraints that are named


def check_constraints(inspection: Inspection) -> None:
    """Check values and gradients at the start, a feasible point of the lower level at x0, and the rank of its active set."""
    try:
        coupling = NonlinearProgram(inspection.around.oracle, inspection.x.copy(), inspection.y.copy())
    except Exception as error:  # of a constraint, whatever it does
        inspection.fail("lower_constraints, upper_constraints", error)
        return
    rows, z = coupling.rows, coupling.read()
    lower, upper = rows.lower_equations.stop - rows.lower.start, rows.upper_equations.stop - rows.upper.start
    kinds = "linear" if coupling.linear[2:].all() else "quadratic" if coupling.quadratic[2:].all() else "smooth"
    inspection.find(
        "constraints", f"{_counted(lower, 'row')} of the lower level, {upper} of the upper level, sets included; {kinds}."
    )
    values = coupling.values(z)
    unknown = [coupling.names[k] for k in np.flatnonzero(~np.isfinite(values))]
    if unknown:
        inspection.warn(f"{unknown[0]}: is not finite at the start; check it, or start elsewhere.")
        return
    excess = values.copy()
    excess[:2] = 0.0  # F and f
    for equations in (rows.lower_equations, rows.upper_equations):
        excess[equations] = np.abs(excess[equations])
    inspection.result.violation = float(max(0.0, excess.max()))
    broken = _listed([coupling.names[k] for k in np.flatnonzero(excess > MET)], SHOWN)
    violated = f"the start violates {broken}, by {inspection.result.violation:.2g} at most; it may."
    inspection.find("feasibility", violated if broken else "the start meets all constraints.")
    _check_gradients(inspection, coupling, z)
    level = ConstrainedLower(coupling, SampleBox.of(coupling, z))
    convexity = {True: "convex", None: "convex as far as seen", False: "non-convex"}[level.convex]
    inspection.result.convexity = "unknown" if level.convex is None else convexity
    inspection.find("lower level", f"{convexity} in y, with its constraints.")
    solution = level.search(z[: coupling.n], z[coupling.n :])
    if solution is None:
        inspection.warn(
            "lower_constraints: no y was found that meets them at x0; such x are excluded from the solution. Check the signs"
            " (h(x, y) <= 0), or start where they can be met."
        )
        return
    _check_active(inspection, coupling, np.concatenate([z[: coupling.n], solution.w]), solution.lam)


def _check_gradients(inspection: Inspection, coupling: NonlinearProgram, z: Array) -> None:
    """Compare the gradients of F, f and the constraints along one random direction with central differences."""
    direction = np.random.default_rng(0).normal(size=len(z))
    direction /= np.linalg.norm(direction)
    step = coupling.eps ** (1 / 3) * (1 + float(np.abs(z).max()))  # eps^(1/3) balances truncation and rounding
    ends = [coupling.call(z + sign * step * direction) for sign in (1.0, -1.0)]
    slopes = coupling.jacobian(z) @ direction
    differences = (ends[0] - ends[1]) / (2 * step)
    size = np.abs(slopes) + np.abs(differences) + np.abs(ends[0]) + 1.0
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(np.abs(slopes - differences) > (WRONG + coupling.eps**0.5) * size)
    for k in wrong[:SHOWN]:
        inspection.warn(
            f"{coupling.names[k]}: its gradient, {slopes[k]:.3g} along a random direction at the start, differs from finite"
            f" differences, {differences[k]:.3g}; avoid .detach(), .item(), kinks and numpy in it."
        )
    if not len(wrong):
        inspection.find("gradients", "those of F, f and all constraints agree with finite differences.")


def _check_active(inspection: Inspection, coupling: NonlinearProgram, z: Array, lam: Array) -> None:
    """Report the active constraints at the lower solution z, and whether their gradients in y are independent (LICQ)."""
    rows, values = coupling.rows, coupling.values(z)
    active = [k for k in range(rows.lower.start, rows.lower.stop) if values[k] >= -MET]
    inspection.result.active = [coupling.names[k] for k in active]
    texts = [f"{coupling.names[k]} (multiplier {lam[k - rows.lower.start]:.2g})" for k in active[:SHOWN]]
    inspection.find("active", f"at the lower solution for x0: {', '.join(texts) or 'none'}.")
    active += range(rows.lower_equations.start, rows.lower_equations.stop)
    if not active:
        return
    gradients = coupling.jacobian(z)[active][:, coupling.n :]
    singular = np.linalg.svd(gradients, compute_uv=False)
    rank = int((singular > INDEPENDENT * max(float(singular[0]), 1.0)).sum())
    flat = [coupling.names[k] for k, row in zip(active, gradients, strict=True) if np.abs(row).max() <= MET]
    if flat:
        inspection.warn(
            f"{flat[0]}: its gradient in y vanishes where it is active, so that the lower level may have no multipliers; state"
            " the constraint in another way, such as y = 0 instead of y^2 <= 0."
        )
    elif rank < len(active):
        inspection.find(
            "multipliers", f"not unique at x0: the gradients of {len(active)} active constraints have rank {rank} in y."
        )


ALLOWED = 400  # gradients of f for the solution of the lower level
MOST = 100  # largest dimension of y in which flat directions are counted
PROBES = 4  # power steps for the curvature of f
LEAST = 1e-3  # size of y in which differences of gradients are taken, where y is smaller
FLAT = 10.0  # roots of the rounding error: the curvature, relative to the largest, below which a direction is flat
FELT = 1e-3  # slope of F in flat directions, relative to its whole slope there, that counts
ACCURACY = 1e-4  # of the solution
DESCENT = 20  # steps on one batch
FELL = 0.1  # part by which f must fall on it, to say anything
SHARED = 0.1  # part of that fall which must show on the other batch, if y is for both


def check_open(inspection: Inspection) -> None:
    """Solve the lower level from y0, and count the directions of the face of g and Y at its solution in which f is flat."""
    result, problem = inspection.result, inspection.problem
    if result.convexity == "strongly convex":  # then the lower solution is unique
        result.flat = 0
        return
    small = inspection.around.thorough and inspection.y.numel <= MOST
    if inspection.stochastic or not small or "f in y" in result.kinks or any(inspection.wrong.values()):
        return
    levels = inspection.levels()
    curvatures = levels.curvatures = probe(levels.oracle, levels.x, levels.y, {}, rounds=PROBES)
    try:
        with levels.until(levels.spent + ALLOWED):
            y = solve_nearest(levels, flatten(levels.y), ACCURACY, curvatures["f_yy"]).y
    except (BudgetError, RuntimeError, ValueError, ArithmeticError):
        return  # too hard for a check before the run, or outside the domain of f
    point = levels.lower(y)
    memory = LimitedMemory.sized(1, len(y))  # an empty one, for a plain proximal step
    free = levels.descent(levels.lower, memory, 1 / (curvatures["f_yy"] or 1.0)).residual(point).free
    free = torch.ones_like(y) if free is None else free
    kept = [int(i) for i in torch.nonzero(free).reshape(-1)]  # coordinates at a bound of Y or a kink of g do not move
    hessian = _hessian(levels, y, point.gradient, kept)
    if hessian is None:
        return
    values, vectors = torch.linalg.eigh(hessian)
    largest = max(float(values.abs().max()), curvatures["f_yy"])
    null = vectors[:, values.abs() <= FLAT * math.sqrt(levels.eps) * largest]
    result.flat = null.shape[1]
    if not result.flat:
        inspection.find("determined", "the lower level determines y at its solution.")
        return
    F_y = levels.upper(y)[2][kept]
    result.open = float((null.T @ F_y).norm()) > FELT * float(F_y.norm()) > 0
    where = f"f is flat in {result.flat} of {_counted(len(y), 'direction')} of y at its solution nearest to y0"
    if problem._selected_response is not None:
        meant = f"; {type(problem._selected_response).__name__} says which solution is meant."
    elif problem._without_x:
        meant = ", which F chooses."
    elif not result.open:
        meant = ", in which F does not change to first order."
    else:
        meant = ", and F is not: the best y for F is meant."
        inspection.warn(
            f"lower: under-determined, since {where}; F then chooses y, and may owe more to it than to x. If y is to be"
            " computed afresh, say which one: Problem(..., response=meha.responses.Nearest()), or add a regulariser."
        )
    inspection.find("determined", where + meant)


def _hessian(levels: FlatProblem, y: Tensor, gradient: Tensor, kept: list[int]) -> Tensor | None:
    """Return the Hessian of f on some coordinates, by differences of gradients; None where they are not finite."""
    step = math.sqrt(levels.eps) * max(float(y.abs().max()), LEAST)  # sqrt(eps) balances truncation and rounding
    rows = []
    for i in kept:
        z = y.clone()
        z[i] += step
        rows.append((levels.lower(z).gradient - gradient)[kept] / step)
    if not rows:
        return None
    matrix = torch.stack(rows)
    return (matrix + matrix.T) / 2 if bool(torch.isfinite(matrix).all()) else None  # differences are not quite symmetric


def check_carried(inspection: Inspection) -> None:
    """Take steps on one batch; if f does not fall on the other one as well, y belongs to its batch."""
    if inspection.other_batch is None:
        return
    oracle, x, y = inspection.around.oracle, inspection.x, inspection.y.copy()

    def values() -> list[float]:
        return [float(oracle.lower(x, y, batch)) for batch in (inspection.batch, inspection.other_batch)]

    before, step = values(), 1.0
    for _ in range(DESCENT):  # proximal gradient steps on the first batch, with step sizes found by backtracking
        (value,), gradient = oracle.gradient(y, [(1.0, oracle.lower, x, y)], inspection.batch)
        here, size = [leaf.clone() for leaf in y.leaves], float(norm(gradient))
        while step > torch.finfo(value.dtype).eps:
            add_(y.leaves, gradient, -step)
            oracle.prox(x.value, y.leaves, step)
            if float(oracle.lower(x, y, inspection.batch)) <= float(value) - 0.25 * step * size**2:  # Armijo's condition
                step *= 2  # the next search may begin with a longer step
                break
            copy_(y.leaves, here)
            step /= 2
    fell, other = (a - b for a, b in zip(before, values(), strict=True))
    if not (math.isfinite(fell + other) and fell > FELL * abs(before[0])):
        return
    inspection.result.carried = other < SHARED * fell
    if inspection.result.carried:
        inspection.warn(
            f"y: {DESCENT} steps on one batch lower f there by {fell:.2g} and on the other by {other:.2g}, so y seems to belong"
            " to its batch, as the heads of tasks do; start over with each batch (warm_start=False)."
        )
    else:
        inspection.find("batches", "steps of y on one batch lower f on the other as well.")
