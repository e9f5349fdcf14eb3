"""What the measurements of a problem mean: findings, and warnings with a remedy."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch

from meha._functions import Function
from meha._inspection.coupling import check_constraints
from meha._inspection.freedom import check_carried, check_open
from meha._inspection.measuring import Surroundings, root_mean_square, unevenness
from meha._inspection.saying import Report
from meha._leaves import Leaves, norm
from meha._variables import Variable
from meha.methods import StochasticMEHA, default_method
from meha.methods._curvatures import flatten
from meha.methods._levels import Levels
from meha.methods._quasi_newton import Pairs
from meha.methods._verification import Search
from meha.problem import Problem

__all__ = ["Inspection"]

SLOW = 0.1  # seconds for a gradient, beyond which, as with modules, only the most important points are visited
UNEVEN = 1e4  # gradients in coordinates of x that differ by more than this factor count as badly scaled
HUGE = 1e8  # values and gradients beyond this get a warning
SEARCH, PAIRS = 300, 20  # gradients of f that the search for valleys may take, and the memory of its descents
NEGATIVE = 1e-3  # curvature counts as negative from this share of the largest one on; less is within the error

SMOOTH = "smooth it (softplus instead of relu, Huber's function instead of abs)"
MOVE = "move abs and norms of y to nonsmooth=, such as meha.nonsmooth.L1(weight) or GroupL2(groups, weight), or else "


class Inspection:
    """A check at work; it fills a report."""

    def __init__(self, problem: Problem, x: Variable, y: Variable, batch: Any, other_batch: Any = None) -> None:
        self.problem, self.x, self.y, self.batch = problem, x.copy(), y.copy(), batch
        self.other_batch = other_batch
        self.original = x, y
        method = default_method(problem, x.value, y.value, None if batch is None else [batch])
        self.stochastic = isinstance(method, StochasticMEHA)
        self.result = Report(method=type(method).__name__)
        self.seconds = {"F": math.nan, "f": math.nan}
        self.wrong: dict[str, list[str]] = {}  # variables and leaves with wrong gradients
        self.largest: dict[str, Leaves] = {}  # largest size of each component of a gradient over several points

    def report(self) -> Report:
        """Run all checks for which the previous ones left a basis."""
        result = self.result
        if self.problem.coupled:
            if self.check_start() and self.check_values() and self.check_repeats():
                check_constraints(self)
        elif self.check_start() and self.check_values() and self.check_repeats() and self.check_dependence():
            self.check_gradients()
            if self.around.thorough:
                self.check_kinks()
            else:
                self.find("smoothness", "not checked, because of modules, many variables or slow objectives.")
            if result.depends["f on y"]:
                self.check_convexity()
                self.check_valleys()
                check_open(self)
                check_carried(self)
            self.check_scales()
            if self.around.outside:
                self.warn(f"nonsmooth: has no value at some points of X near the start. {self.around.outside}")
        purpose = "modules and batches" if self.stochastic else "tensors without batches"
        self.find("method", f"solve(problem, x0, y0) uses meha.{result.method}, which is made for {purpose}.")
        if hasattr(self, "around"):
            result.counts = self.around.oracle.counts
        result.seconds = (self.seconds["F"], self.seconds["f"])
        cost = [f"{1e3 * seconds:.2g} ms per gradient of {name}" for name, seconds in self.seconds.items() if seconds > 0]
        cost.append(f"this check took {result.counts.upper} gradients of F and {result.counts.lower} of f")
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
        """Whether a gradient, such as that of ``"F in x"``, was nonzero somewhere."""
        return any(bool(leaf.any()) for leaf in self.largest[key])

    def check_start(self) -> bool:
        """Whether the start fits the problem; it is projected on X and Y."""
        x, y, problem = self.x, self.y, self.problem
        dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in x.leaves + y.leaves})
        first = "no x" if problem.simple else f"x: {_count(x)}"
        self.find("start", f"{first}; y: {_count(y)}; {' and '.join(dtypes)} on {x.device}.")
        if problem.needs_batch and self.batch is None:
            self.warn("batch: the objectives need one; pass batch=next(iter(loader)).")
            return False
        try:
            replace(problem, nonsmooth=None, x_set=None, y_set=None).check_start(*self.original)
            for variable, domain in ((x, problem.x_set), (y, problem.y_set)):
                if domain is not None and not domain.holds(variable):
                    name = variable.argument
                    remedy = f"start from {name}_set.project({name}0). The rest of this report is about that point"
                    where = f"{name}0 is not in {name.upper()} = {domain!r}"
                    self.warn(f"{where}, and only the default begins at the nearest point; {remedy}.")
            if not (self.result.warnings or math.isfinite(float(problem.g.value(x.value, y.value)))):
                self.warn("nonsmooth: is not finite at the start; start inside its domain (y0 >= 0 for NonNegativeL1).")
            self.around = Surroundings(problem, x, y, self.batch)
        except Exception as error:  # from a set, a term or its weight; those of this library say what is wrong
            self.warn(f"the start does not fit the problem. {type(error).__name__}: {error}")
            return False
        return True

    def check_values(self) -> bool:
        """Whether both objectives have finite values at the start."""
        oracle, values = self.around.oracle, {"F": math.nan, "f": math.nan}
        for name, function in (("F", oracle.upper), ("f", oracle.lower)):
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
        """Whether the objectives return the same values twice, at least with the same seed; otherwise the check ends."""
        around, variables = self.around, (self.x, self.y)
        before = [buffer.clone() for variable in variables for buffer in variable.buffers().values()]
        repeatable = self.result.repeatable = around.repeats()
        after = [buffer for variable in variables for buffer in variable.buffers().values()]
        moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        around.frozen = not repeatable
        measurable = repeatable or around.repeats()
        values = "the same values" if repeatable else "different values"
        consequence = "" if measurable else ", even with the same seed, so the remaining checks were skipped"
        buffers = " Buffers (running statistics) change with each call; .eval() keeps them." if moved else ""
        self.find("repeatable", f"repeated calls return {values}{consequence}.{buffers}")
        if not repeatable and not self.stochastic:
            self.warn(
                "upper and lower: return different values when called again at the same point. Draw random numbers once,"
                " outside the objectives, or pass what is drawn as a batch, solve(..., batches=...), for meha.StochasticMEHA."
            )
        return measurable

    def check_dependence(self) -> bool:
        """Whether gradients exist at the start; their sizes there, and which are zero there and at two points around it."""
        around = self.around
        for spread in (0.0, 0.3, 1.0):
            if spread:
                around.scatter(spread)
            for name, function in (("F", around.oracle.upper), ("f", around.oracle.lower)):
                begin = time.perf_counter()
                try:
                    gradients = around.gradient(function, self.x, self.y, strict=not spread)
                except Exception as error:
                    self.fail(function.level, error)
                    return False
                sizes = [float(norm(leaves)) for leaves in gradients]
                self.seconds[name] = min(time.perf_counter() - begin, self.seconds[name] if spread else math.inf)
                for argument, gradient, size in zip(("x", "y"), gradients, sizes, strict=True):
                    self.record(name, argument, gradient, size)
                    if not spread:
                        self.result.sizes[f"{name}_{argument}"] = size
                    if not spread and not math.isfinite(size):
                        where = f"{function.level}: its gradient in {argument} is not finite at the start"
                        self.warn(f"{where} (sqrt at 0?); add a small number under the root, or start elsewhere.")
            if self.problem.nonsmooth is not None:
                (gradient,) = around.gradient(around.g, self.x)
                self.record("g", "x", gradient, float(norm(gradient)))
        around.go_back()
        around.thorough = around.thorough and max(self.seconds.values()) < SLOW
        return True

    def record(self, name: str, argument: str, gradient: Leaves, size: float) -> None:
        """Keep the largest components; those of g count for f, because a run differentiates f + g in x."""
        key, on, depends = f"{'f' if name == 'g' else name} in {argument}", f"{name} on {argument}", self.result.depends
        before = self.largest.setdefault(key, [torch.zeros_like(leaf) for leaf in gradient])
        depends[on] = depends.get(on, False) or 0 < size < math.inf
        if math.isfinite(size):
            self.largest[key] = [torch.maximum(a, b.abs()) for a, b in zip(before, gradient, strict=True)]

    def check_gradients(self) -> None:
        """Compare gradients along random lines near the start with differences of values; then judge the dependences."""
        around, wrong, deviations = self.around, self.wrong, self.result.deviations
        for spread in (0.3, 0.01, 0.0):
            around.scatter(spread)
            if all(math.isfinite(around.value(function)) for _, function, _ in around.pairs()):
                break
        for key, function, variable in around.pairs():
            deviations[key], wrong[key] = 0.0, []
            for label, line in around.lines(variable, spread or 0.01):
                deviation, failed = around.deviation(function, variable, line)
                deviations[key] = max(deviations[key], deviation)
                wrong[key] += [label] if failed else []
            if wrong[key]:
                self.result.depends[key.replace(" in ", " on ")] = True
                self.warn_of_gradient(key, function, variable)
        around.go_back()
        self.judge_dependence()
        right = {key: deviation for key, deviation in deviations.items() if self.uses(key) and not wrong[key]}
        beyond = ", ".join(f"{key} {deviation:.0e}" for key, deviation in right.items() if deviation)
        agree = f"{', '.join(right)} agree with finite differences" + (
            f"; deviations beyond rounding: {beyond}" if beyond else ""
        )
        self.find("gradients", f"{agree}." if right else "all are zero or wrong, see below.")

    def warn_of_gradient(self, key: str, function: Function, variable: Variable) -> None:
        """Warn of a gradient that finite differences contradict."""
        name = variable.argument
        where = ", ".join(dict.fromkeys(label for label in self.wrong[key] if label != name)) or name
        mistake = f"its gradient in {where} deviates from finite differences (relative error {self.result.deviations[key]:.1e})"
        remedy = "look for .detach() or .item() in it, or a mistake in your backward()"
        if not self.uses(key):
            mistake = f"its value changes with {name}, but autograd does not see it"
            remedy = f"avoid .detach(), .item(), .data and numpy on {name}"
        self.warn(f"{function.level}: {mistake}; {remedy}.")

    def judge_dependence(self) -> None:
        """Report which objective depends on which variable, and warn of what is missing."""
        on, unused = self.result.depends, self.result.unused
        used = {name: [argument for argument in ("x", "y") if on[f"{name} on {argument}"]] for name in ("F", "f")}
        used |= {"g": ["x", "y"] if on["g on x"] else ["y"]} if self.problem.nonsmooth is not None else {}
        parts = [f"{name} on {' and '.join(arguments) or 'neither x nor y'}" for name, arguments in used.items()]
        self.find("depends", "; ".join(parts) + ".")
        lower = on["f on x"] or on.get("g on x", False)
        simple = self.problem.simple
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
        held = {self.y.names[i] for _, chosen in self.problem.g.terms(self.y) for i in chosen}
        for variable in (self.x, self.y):
            keys = [f"{name} in {variable.argument}" for name in ("F", "f")]
            for i, name in enumerate(variable.names if len(variable.names) > 1 else []):
                reached = any(bool(self.largest[key][i].any()) or variable.label(name) in self.wrong[key] for key in keys)
                if any(map(self.uses, keys)) and not reached and not (variable is self.y and name in held):
                    unused.append(variable.label(name))
        if unused:
            more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
            self.warn(f"{', '.join(unused[:6])}{more}: no gradient of upper or lower reaches it; use it, or leave it out.")

    def check_kinks(self) -> None:
        """Search kinks on lines through the start; for f in y also through 0, where absolute values and norms have theirs."""
        around, kinks = self.around, self.result.kinks
        for key, function, variable in around.pairs():
            start = around.start[variable]
            zero = [torch.zeros_like(leaf) for leaf in start]
            for centre in [start, zero] if key == "f in y" and bool(norm(start) > 0) else [start]:
                around.go_back()
                if variable is self.x:  # away from y = 0, where weights of |y| have no influence
                    around.scatter(0.3)
                jump = around.jump(function, variable, centre) if self.uses(key) else 0.0
                if jump:
                    kinks[key] = max(jump, kinks.get(key, 0.0))
        around.go_back()
        jumps = ", ".join(f"{key} (its gradient jumps by {jump:.2g} of its size)" for key, jump in kinks.items())
        self.find("smoothness", f"kinks: {jumps}." if jumps else "no kinks found.")
        for key in kinks:
            level, move = "upper" if key[0] == "F" else "lower", MOVE if key == "f in y" else ""
            kink = f"has a kink as a function of {key[-1]} (abs, relu, max, sort?), where methods stall"
            self.warn(f"{level}: {kink}; {move}{SMOOTH}.")

    def check_convexity(self) -> None:
        """Classify f in y by its curvatures."""
        ranges, eps = self.around.curvatures(smooth="f in y" not in self.result.kinks), self.around.eps
        if not ranges:
            return self.find("convexity", "of f in y is unknown, because its gradients around the start are not finite.")
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
        return None

    def check_valleys(self) -> None:
        """Count the valleys of f + g in y near the start, where it is not convex."""
        problem = self.problem
        curved = self.result.convexity == "non-convex" or problem.g.rho > 0
        if not curved or not self.around.thorough or self.stochastic or self.result.kinks:
            return None
        levels = Levels(self.around.oracle, self.x.copy(), self.y.copy())
        y = flatten(self.y)
        scale, high = float(norm([y])) or 1.0, self.result.curvature[1]
        search = Search(levels, y, Pairs.sized(PAIRS, len(y)), 1 / high if high > 0 else 1.0, scale, 0.0, solved=False)
        evidence = search.run([y], SEARCH)
        if search.valleys:
            self.result.valleys = evidence.values
            ends = f"{evidence.starts} descents of f + g from points around the start"
            if evidence.values == 1:
                return self.find("valleys", f"{ends} ended at the same height.")
            lowest = f"the lowest {evidence.above:.2g} below the next"
            self.find(
                "valleys", f"{ends} ended in {evidence.values} valleys, {lowest}; a solution must be in the lowest at its x."
            )
        return None

    def check_scales(self) -> None:
        """Report sizes, and warn of those that make a problem hard."""
        names, sizes = ("F_x", "F_y", "f_x", "f_y"), self.result.sizes
        sizes |= {variable.argument: root_mean_square(start) for variable, start in self.around.start.items()}
        gradients = ", ".join(f"{name} {sizes[name]:.2g}" for name in names)
        self.find("scales", f"root mean squares x {sizes['x']:.2g}, y {sizes['y']:.2g}; gradient norms {gradients}.")
        if self.around.eps > 1e-10 and not self.stochastic:
            self.find("precision", "differences of f cancel in this dtype: expect about 3 digits of x, more with float64.")
        named = {"upper": self.result.upper, "lower": self.result.lower} | {f"gradient {name}": sizes[name] for name in names}
        huge = [f"{name} ({value:.1e})" for name, value in named.items() if abs(value) > HUGE]
        if huge:
            self.warn(f"{', '.join(huge)}: huge at the start; use larger units, or means instead of sums.")
        for key, level in (("F in x", "upper"), ("f in x", "lower")):
            ratio = unevenness(self.largest[key], self.around.eps, by_leaf=self.x.has_modules)
            if ratio > UNEVEN:
                among = f"in the {'tensors' if self.x.has_modules else 'coordinates'} of x"
                self.warn(f"{level}: its gradients {among} differ by a factor of {ratio:.0e}; rescale x (x = scale * z).")


def _count(variable: Variable) -> str:
    n, k = variable.numel, len(variable.leaves)
    return f"{n} number{'s' if n > 1 else ''}" + (f" in {k} tensors" if k > 1 else "")
